"""Prose and code found on this machine, to calibrate and to judge with."""

import pathlib
import sysconfig
from pydoc_data.topics import topics

# Long modules of the standard library, two disjoint sets.
CALIBRATION_CODE = (
    "typing.py",
    "doctest.py",
    "pydoc.py",
    "optparse.py",
    "subprocess.py",
    "zipfile/__init__.py",
)
EVALUATION_CODE = ("argparse.py", "inspect.py", "tarfile.py", "turtle.py")


def find_texts(directory: pathlib.Path) -> tuple[list[str], list[str]]:
    """Writes prose and code found on this machine into files; calibration and evaluation share no document.

    Prose: what Python packages say of themselves and their licences, to calibrate; the language reference
    that `help()` shows, to evaluate. Code: modules of the standard library.
    """
    directory.mkdir(parents=True, exist_ok=True)
    packages = pathlib.Path(sysconfig.get_path("purelib"))
    prose: dict[str, None] = {}  # an ordered set: many packages carry the same licence
    for pattern in ("*.dist-info/METADATA", "*.dist-info/**/LICENSE*"):
        for file in sorted(packages.glob(pattern)):
            body = file.read_text(encoding="utf-8", errors="ignore")
            # The description of a package follows the header lines of its metadata.
            prose[body.partition("\n\n")[2] if file.name == "METADATA" else body] = None
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    files = {
        "calibration_prose.txt": [body for body in prose if len(body) > 2000],
        "evaluation_prose.txt": [topics[name] for name in sorted(topics, key=str.lower)],
        "calibration_code.txt": read_all(library, CALIBRATION_CODE),
        "evaluation_code.txt": read_all(library, EVALUATION_CODE),
    }
    for name, parts in files.items():
        (directory / name).write_text("\n\n".join(parts)[:400_000])
    paths = {name: str(directory / name) for name in files}
    return (
        [path for name, path in paths.items() if name.startswith("calibration")],
        [path for name, path in paths.items() if name.startswith("evaluation")],
    )


def read_all(directory: pathlib.Path, names: tuple[str, ...]) -> list[str]:
    """The texts of the files that exist."""
    return [(directory / name).read_text() for name in names if (directory / name).exists()]
