"""What the packages offer at their front doors, and that nothing heavy is loaded before it is used."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = (
    "jax",
    "numpy",
    "torch",
    "transformers",
    "flax",
    "safetensors",
    "rich",
    "oscar_jax.core",
    "oscar_torch.core",
)
PACKAGES = ("oscar_jax", "oscar_torch")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_there_and_stands_where_it_says(package: str) -> None:
    door = importlib.import_module(package)
    placed = {name for names in door._PLACES.values() for name in names}
    assert sorted(door.__all__) == sorted([*placed, "__version__"])
    for module, names in door._PLACES.items():
        for name in names:
            assert getattr(door, name) is getattr(importlib.import_module(f"{package}.{module}"), name)
    assert set(door.__all__) <= set(dir(door))
    assert door.__version__.count(".") >= 2
    # What a type checker sees is what is there.
    source = Path(door.__file__ or "").read_text().split("_PLACES")[0]
    assert all(name in source for name in door.__all__)
    with pytest.raises(AttributeError, match="no attribute 'dance'"):
        _ = door.dance


def test_the_packages_offer_the_same_names() -> None:
    """Apart from jobs that only JAX has, and the classes for transformers."""
    jax, torch = (set(importlib.import_module(package).__all__) for package in PACKAGES)
    assert torch - jax == {"OscarCache", "calibrate_model", "save_statistics"}
    jobs = {"fit", "evaluate", "evaluate_tasks"}
    models = {"Generator", "Generation", "SamplingConfig", "load_model"}
    assert jax - torch == jobs | models | {"save_rotation_set"}


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_loads_nothing(package: str) -> None:
    code = f"import sys, {package}; dir({package}); print(*(n for n in {HEAVY!r} if n in sys.modules))"
    assert run(code).strip() == ""
    code = f"import sys; from {package} import ConfigError; print('numpy' in sys.modules)"
    assert run(code).strip() == "False"


def test_caches_of_torch_do_not_load_transformers() -> None:
    code = "import sys; from oscar_torch import attend, SequencePool; print('transformers' in sys.modules)"
    assert run(code).strip() == "False"


@pytest.mark.parametrize("module", ["oscar_jax", "oscar_jax.cli", "oscar_torch", "oscar_torch.cli"])
def test_both_modules_run_the_command_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--version"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("oscar 0.")
    assert "| jax" not in done.stderr and "| torch" not in done.stderr  # asking for the version is quick
