"""The house: floors, one-way imports, twin files, and each package alone without the other's framework."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parity_tests.conformance.frameworks import FRAMEWORKS

ROOT = Path(__file__).parents[2]
PACKAGES = ("oscar_jax", "oscar_torch")
FOREIGN = {
    "oscar_jax": {"torch", "triton", "oscar_torch"},
    "oscar_torch": {"jax", "jaxlib", "flax", "orbax", "optax", "oscar_jax"},
}

TWIN_FOLDER = "core"
KERNEL_FOLDERS = ("pallas", "triton_kernels")


def block(tag: str) -> list[str]:
    """Lines of the fenced block `tag` of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page.split(f"```{tag}\n")[1].split("```")[0].splitlines()


def read_floors() -> dict[str, list[list[str]]]:
    """Floors of each package from the page, bottom to top; each a list of first names of modules."""
    floors: dict[str, list[list[str]]] = {}
    for line in block("floors"):
        if line.startswith("  "):
            floors[next(reversed(floors))].append(line.split())
        else:
            floors[line.removesuffix(":")] = []
    return floors


FLOORS = read_floors()


def modules(package: str) -> dict[str, Path]:
    """Dotted name inside the package to file; a package's __init__ has the name of the package."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(package: str, name: str, path: Path) -> Iterator[tuple[str, int]]:
    """Absolute dotted names that a file imports anywhere in its text, with line numbers."""
    depth = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    inside = [part for part in depth if part]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                yield node.module or "", node.lineno
                continue
            base = [package, *inside[: len(inside) - node.level + 1]]
            target = ".".join([*base, node.module] if node.module else base)
            known = modules(package)
            for alias in node.names:  # `from . import cache` names a module, `from .cache import x` does not
                full = f"{target}.{alias.name}"
                yield (full if full.removeprefix(f"{package}.") in known else target), node.lineno


def floor_of(package: str, module: str) -> tuple[int, int]:
    """Floor and place on it of a module, by its first name; the front doors stand above everything."""
    first = module.split(".")[0]
    if module.endswith("__main__"):
        return len(FLOORS[package]), 0
    for floor, names in enumerate(FLOORS[package]):
        if first in names:
            return floor, names.index(first)
    assert not first, f"{package}.{module} has no floor in docs/architecture.md"
    return len(FLOORS[package]), 0


def numeric(package: str, module: str) -> bool:
    """Whether a module lies on a floor up to the cache: no environment variable, few libraries."""
    return floor_of(package, module)[0] <= floor_of(package, "cache")[0]


def is_twin(path: Path) -> bool:
    """Whether a file says that it is the same in both packages."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.search(r"Twin file[,:] byte-identical in both packages", docstring) is not None


def every_file() -> list[tuple[str, str, Path]]:
    return [(package, name, path) for package in PACKAGES for name, path in modules(package).items()]


@pytest.mark.parametrize(
    ("package", "name", "path"), every_file(), ids=[f"{package}.{name}" for package, name, _ in every_file()]
)
class TestImports:
    def test_floors(self, package: str, name: str, path: Path) -> None:
        """A file imports only what stands below it, or beside it in its folder."""
        here = floor_of(package, name)
        for target, line in imports(package, name, path):
            if target.split(".")[0] != package or "." not in target:
                continue
            other = target.removeprefix(f"{package}.")
            same_folder = other.split(".")[0] == name.split(".")[0]
            assert same_folder or floor_of(package, other) < here, (
                f"{path.name}:{line} imports {other} from above"
            )

    def test_one_framework(self, package: str, name: str, path: Path) -> None:
        """No file knows the other package or its framework; in oscar_torch only hf/ knows transformers."""
        forbidden = set(FOREIGN[package])
        if package == "oscar_torch" and name.split(".")[0] != "hf":
            forbidden.add("transformers")
        allowed = sys.stdlib_module_names | {package}
        if plain := is_twin(path) and name.split(".")[0] != TWIN_FOLDER:
            allowed |= {"numpy", "ml_dtypes", "safetensors", "matplotlib", "rich", "lm_eval"}
        plain = plain or name.split(".")[0] == TWIN_FOLDER
        for target, line in imports(package, name, path):
            first = target.split(".")[0]
            assert first not in forbidden, f"{path.name}:{line} imports {target}"
            assert not plain or first in allowed, f"{path.name}:{line}: a twin imports {target}"

    def test_habits(self, package: str, name: str, path: Path) -> None:
        """A docstring, no file of leftovers, a size to read in one sitting, no environment variable."""
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
        assert name.split(".")[-1] not in ("utils", "util", "common", "misc", "helpers")
        lines, most = text.count("\n"), 1000 if name.split(".")[0] in KERNEL_FOLDERS else 700
        assert lines <= most, f"{path} has {lines} lines, allowed: {most}"
        if numeric(package, name):
            assert "environ" not in text and "getenv" not in text


def test_the_page_shows_the_tree() -> None:
    """Every folder and file of the packages stands in the tree of docs/architecture.md, and nothing else."""
    shown: set[str] = set()
    package = ""
    for line in block("tree"):
        if not line.startswith(" "):
            shown |= {entry.rstrip("/") for entry in line.split()}
            package = line.split()[0]
        else:
            entries = [word.rstrip("/,:") for word in line.split() if word.endswith(("/", ".py"))]
            shown |= {package + entry for entry in entries if (ROOT / package / entry).exists()}
            missing = [entry for entry in entries[:1] if not (ROOT / package / entry).exists()]
            assert not missing, f"docs/architecture.md shows {package}{missing[0]}, which does not exist"
    for package in PACKAGES:
        for path in sorted((ROOT / package).iterdir()):
            if path.name.startswith("__") or (path.is_dir() and not list(path.glob("*.py"))):
                continue
            if path.suffix in (".py", ""):
                assert f"{package}/{path.name}" in shown, f"{package}/{path.name} is not in the tree"
    listed = " ".join(block("tree")).split("oscar_torch/")
    for package, text in zip(PACKAGES, listed):
        words = set(re.findall(r"\w+", text))
        for name, path in modules(package).items():
            folder, _, file = name.partition(".")
            # Kernels and families stand there as folders, twins once.
            whole = folder in ("pallas", "triton_kernels") or file.startswith("families.")
            if not file or whole or path.name.startswith("__") or (package != PACKAGES[0] and is_twin(path)):
                continue
            assert file in words, f"{package}/{folder}/{path.name} is not in the tree"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycles(package: str) -> None:
    """Imports form a tree of floors, function-level imports included."""
    graph = {
        name: {
            target.removeprefix(f"{package}.")
            for target, _ in imports(package, name, path)
            if target.startswith(f"{package}.")
        }
        - {name}
        for name, path in modules(package).items()
    }
    while graph:
        leaves = [name for name, targets in graph.items() if not targets & graph.keys()]
        assert leaves, f"import cycle among {sorted(graph)}"
        for name in leaves:
            del graph[name]


def test_twin_files() -> None:
    """What says that it is a twin, and all of core/, is byte-identical in both packages."""
    twins: list[set[str]] = []
    for package in PACKAGES:
        found = {name for name, path in modules(package).items() if is_twin(path)}
        core = {name for name in modules(package) if name.startswith(f"{TWIN_FOLDER}.")}
        assert core <= found, f"{package}: {sorted(core - found)} do not say that they are twins"
        twins.append(found)
    assert twins[0] == twins[1]
    for name in twins[0]:
        texts = [modules(package)[name].read_bytes() for package in PACKAGES]
        assert texts[0] == texts[1], f"{name} differs between the packages"


Signature = tuple[list[str], str]


def public_functions(path: Path) -> dict[str, Signature]:
    """Public functions, and methods of public classes: argument names in order, first docstring line.

    Classes are listed without either. Torch places tensors explicitly: a last argument `device` is its own.
    """
    found: dict[str, Signature] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            name = getattr(node, "name", "_")
            if name.startswith("_"):
                continue
            if isinstance(node, ast.FunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                signature = node.args
                arguments = [a.arg for a in (*signature.posonlyargs, *signature.args)]
                if arguments[-1:] == ["device"]:
                    del arguments[-1]
                arguments += ["*", *sorted(a.arg for a in signature.kwonlyargs if a.arg != "device")]
                found[prefix + name] = (arguments, first)
            elif isinstance(node, ast.ClassDef):
                found[prefix + name] = ([], "")
                visit(node.body, f"{prefix}{name}.")

    visit(ast.parse(path.read_text()).body, "")
    return found


# Files of the core: whatever one package offers here, the other offers too.
CORE = ("packing", "quantize", "layer_cache", "cache", "attention")


@pytest.mark.parametrize("name", sorted(modules("oscar_jax").keys() & modules("oscar_torch").keys() - {""}))
def test_twin_functions(name: str) -> None:
    """A function in both files has the same arguments in the same order and the same first docstring line."""
    jax, torch = (public_functions(modules(package)[name]) for package in PACKAGES)
    if name in CORE:
        assert jax.keys() == torch.keys()
    assert jax.keys() & torch.keys() or not torch, f"{name}.py: nothing in common"
    for function in jax.keys() & torch.keys():
        assert jax[function] == torch[function], f"{name}.{function}"


ALONE = """
import importlib, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
for name in {names!r}:
    importlib.import_module("{package}." + name)
checkpoint = importlib.import_module("{package}.rotations.store")
sums = []
for path in {paths!r}:
    rotation = checkpoint.load_rotation_set(path)
    layer = rotation.layers[3]
    total = sum(abs(int(v)) for v in layer.key_transform.reshape(-1).tolist())
    sums.append([rotation.header.model_id, total, layer.key_multiplier.tolist()])
assert not {blocked!r} & {{name.split(".")[0] for name in sys.modules}}
print(json.dumps(sums))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_alone(package: str, tmp_path: Path) -> None:
    """Without the other framework a package imports, and reads a rotation set in both of its forms."""
    for framework in FRAMEWORKS.values():
        if not framework.installed():
            pytest.skip(f"{framework.name} is not installed, nothing to block")
    from oscar_jax.core import rotation_header
    from oscar_jax.rotations import bases, rotation, store

    layer = rotation.hadamard_rotation(2, 64)
    header = rotation_header.RotationHeader(
        model_id="test/house",
        layers=(3,),
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope="half",
        basis="hadamard",
        basis_version=bases.BASIS_VERSION,
    )
    rotation_set = rotation.RotationSet(header, {3: layer})
    paths = [str(tmp_path / "set"), str(tmp_path / "set.safetensors")]
    store.save_rotation_set(rotation_set, paths[0])
    store.save_safetensors(rotation_set, paths[1])
    folders = ("hf", "vllm", "models", "cli", "interchange", "evaluation", "calibration", *KERNEL_FOLDERS)
    names = [n for n in modules(package) if n and n.split(".")[0] not in folders and n != "__main__"]
    code = ALONE.format(package=package, blocked=FOREIGN[package], names=names, paths=paths)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    total = 2 * 64 * 64 * 2**14 // 8  # entries +-1/8
    assert json.loads(run.stdout) == [["test/house", total, [410, 410]]] * 2
