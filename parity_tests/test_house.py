"""The house: floors, one-way imports, twin files, and each package alone without the other's framework."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from parity_tests.implementations import FRAMEWORKS

ROOT = Path(__file__).parent.parent
PACKAGES = ("oscar_jax", "oscar_torch")
FOREIGN = {
    "oscar_jax": {"torch", "triton", "oscar_torch"},
    "oscar_torch": {"jax", "jaxlib", "flax", "orbax", "optax", "oscar_jax"},
}

# Bottom to top. A file imports only files of lower floors, or files named before it on its own floor. Files
# not named here stand above everything: nothing below may import them.
FLOORS = (
    ("cache_format", "config", "page_pool"),
    ("packing", "quantize", "covariance", "rotation", "layer_cache", "attention"),
    ("pallas", "triton_kernels"),
    ("ops",),
    ("cache",),
)
TWINS = ("cache_format", "config", "page_pool")


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


def floor_of(module: str) -> tuple[int, int]:
    """Floor and place on it of a module, by its first name."""
    first = module.split(".")[0]
    for floor, names in enumerate(FLOORS):
        if first in names:
            return floor, names.index(first)
    return len(FLOORS), 0


def every_file() -> list[tuple[str, str, Path]]:
    return [(package, name, path) for package in PACKAGES for name, path in modules(package).items()]


@pytest.mark.parametrize(
    ("package", "name", "path"), every_file(), ids=[f"{package}.{name}" for package, name, _ in every_file()]
)
class TestImports:
    def test_floors(self, package: str, name: str, path: Path) -> None:
        """A file of a floor imports only what stands below it."""
        here = floor_of(name)
        if here[0] == len(FLOORS):
            return
        for target, line in imports(package, name, path):
            if target.split(".")[0] != package or "." not in target:
                continue
            other = target.removeprefix(f"{package}.")
            same_folder = other.split(".")[0] == name.split(".")[0]
            assert same_folder or floor_of(other) < here, f"{path.name}:{line} imports {other} from above"

    def test_one_framework(self, package: str, name: str, path: Path) -> None:
        """No file knows the other package or its framework; in oscar_torch only hf.py knows transformers."""
        forbidden = set(FOREIGN[package])
        if package == "oscar_torch" and name != "hf":
            forbidden.add("transformers")
        if floor_of(name)[0] == 0:
            allowed = sys.stdlib_module_names | {package}
        else:
            allowed = None
        for target, line in imports(package, name, path):
            first = target.split(".")[0]
            assert first not in forbidden, f"{path.name}:{line} imports {target}"
            assert allowed is None or first in allowed, f"{path.name}:{line}: floor 0 imports {target}"

    def test_habits(self, package: str, name: str, path: Path) -> None:
        """A docstring, no file of leftovers, and no environment variable under the numerics."""
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"
        assert name.split(".")[-1] not in ("utils", "util", "common", "misc", "helpers")
        if floor_of(name)[0] < len(FLOORS):
            assert "environ" not in path.read_text() and "getenv" not in path.read_text()


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
    """Files that say "Twin file" are byte-identical in both packages."""
    named = {
        name
        for package, name, path in every_file()
        if "Twin file" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    assert named >= set(TWINS)
    for name in sorted(named):
        twins = [ROOT / package / f"{name.replace('.', '/')}.py" for package in PACKAGES]
        assert twins[0].read_bytes() == twins[1].read_bytes(), f"{name}.py differs between the packages"


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
checkpoint = importlib.import_module("{package}.checkpoint")
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
    from oscar_jax import checkpoint, rotation

    layer = rotation.hadamard_rotation(2, 64)
    header = rotation.RotationHeader(
        model_id="test/house",
        layers=(3,),
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope="half",
        basis="hadamard",
        basis_version=rotation.BASIS_VERSION,
    )
    rotation_set = rotation.RotationSet(header, {3: layer})
    paths = [str(tmp_path / "set"), str(tmp_path / "set.safetensors")]
    checkpoint.save_rotation_set(rotation_set, paths[0])
    checkpoint.save_safetensors(rotation_set, paths[1])
    names = [name for floor in FLOORS for name in floor if name in modules(package) and name != "pallas"]
    code = ALONE.format(package=package, blocked=FOREIGN[package], names=names, paths=paths)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    total = 2 * 64 * 64 * 2**14 // 8  # entries +-1/8
    assert json.loads(run.stdout) == [["test/house", total, [371, 371]]] * 2
