"""Runs the golden test of every family and records what it found.

    python -m parity_tests.models.families_run [--out results]

A row of the tables of README and docs/models.md is a family whose test passed: a tiny checkpoint with random
weights is loaded, its logits are compared with transformers' at near and far positions, it is calibrated, it
generates through the INT2 cache, and the same weights come back from a GGUF file with llama.cpp's names.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import json
import pkgutil
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from oscar_jax.models import families
from oscar_jax.models.family import Family, all_families

RESULTS = Path(__file__).parents[2] / "results"
SUBJECT = "families"
GGUF_TESTS = ("test_gguf_names_are_those_of_llama_cpp", "test_gguf_equals_safetensors")
VERSIONS = ("transformers", "jax", "torch", "gguf")


def description_of(family: Family) -> dict[str, Any]:
    """What the files say of a family: names, and what is special about it."""
    title, special = _first_line(family).rstrip(".").split(": ", 1)
    return {
        "family": family.name,
        "title": title,
        "special": special,
        "model_types": list(family.model_types),
        "gguf_architectures": list(family.gguf_architectures),
    }


def _first_line(family: Family) -> str:
    """Of the file that holds the family: which checkpoints it is of, a colon, what is special."""
    for module in pkgutil.iter_modules(families.__path__):
        content = importlib.import_module(f"{families.__name__}.{module.name}")
        if family in (getattr(content, "FAMILIES", None) or (content.FAMILY,)):
            return (content.__doc__ or "").splitlines()[0]
    raise AssertionError(f"no file holds {family.name}")


class Recorder:
    """A pytest plugin: which tests passed, and what they recorded, by test and family."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the properties of a call, and whether it passed."""
        match = re.search(r"::(\w+)\[(\w+)\]$", report.nodeid)
        if match and report.when == "call":
            self.found[match[1], match[2]] = {**dict(report.user_properties), "passed": report.passed}

    def rows(self) -> list[dict[str, Any]]:
        """A row per family."""
        rows = []
        for name, family in sorted(all_families().items()):
            test = self.found.get(("test_family", name), {})
            gguf = [self.found[test, name]["passed"] for test in GGUF_TESTS if (test, name) in self.found]
            rows.append(
                {
                    **description_of(family),
                    "logits": test.get("logits"),
                    "calibrates": test.get("calibrates", False),
                    "generates": test.get("generates", False),
                    "gguf": bool(gguf) and all(gguf),
                }
            )
        return rows


def newest_record() -> dict[str, Any]:
    """run.json of the newest recorded run."""
    return json.loads((max((RESULTS / SUBJECT).glob("*-*"), key=_date) / "run.json").read_text())


def _date(folder: Path) -> str:
    return folder.name.split("-", 1)[1]


def main() -> int:
    """Runs the tests; with --out records run.json and page.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of recorded runs")
    out = parser.parse_args().out
    recorder, here = Recorder(), Path(__file__).parent
    files = [str(here / "test_families.py"), str(here / "test_models.py")]
    wanted = f"test_family or {' or '.join(GGUF_TESTS)}"
    failed = pytest.main(["-q", "-p", "no:cacheprovider", *files, "-k", wanted], plugins=[recorder])
    if out is None:
        return int(failed)
    date = datetime.date.today().isoformat()
    record = {
        "command": "python -m parity_tests.models.families_run --out results",
        "date": date,
        "versions": {
            **{name: importlib.metadata.version(name) for name in VERSIONS},
            "python": platform.python_version(),
        },
        "rows": recorder.rows(),
    }
    folder = out / SUBJECT / f"cpu-{date}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    text = (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n", " ")
    (folder / "page.md").write_text(
        f"# Families of models\n\n{text}\n\n{versions}, {date}. Random seeds are fixed in "
        "`parity_tests/models/test_families.py`; the table is in "
        "[docs/models.md](../../../docs/models.md).\n"
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
