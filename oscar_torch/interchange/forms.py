"""Forms of a rotation set that need more than NumPy and PyTorch: refused by name, `oscar_jax` has them."""

import os
import pathlib

from ..core.errors import ConfigError
from ..core.model_geometry import ModelGeometry, read_config_geometry
from ..rotations.rotation import RotationSet
from .report import Report


def import_gguf(path: str | os.PathLike[str], *, model_id: str | None = None) -> RotationSet:
    """The rotation set that the rotation tensors of a GGUF file hold; CheckpointError naming what is off."""
    raise _needs_jax(f"{path}: reading rotations from GGUF")


def read_model_geometry(path: str | os.PathLike[str]) -> ModelGeometry:
    """The geometry of a Hugging Face model directory, its config.json, or a GGUF file; CheckpointError."""
    if pathlib.Path(path).suffix == ".gguf":
        raise _needs_jax(f"{path}: reading the geometry of a GGUF file")
    return read_config_geometry(path)


def write_orbax(rotation_set: RotationSet, directory: pathlib.Path) -> Report:
    """Writes a rotation set directory; CheckpointError if something else is there."""
    raise _needs_jax(f"{directory}: writing a rotation set directory", ", or write .safetensors")


def write_gguf(rotation_set: RotationSet, base: pathlib.Path | None, destination: pathlib.Path) -> Report:
    """Writes a copy of a GGUF file with the rotation tensors added; CheckpointError."""
    raise _needs_jax(f"{destination}: writing GGUF")


def write_absorbed(rotation_set: RotationSet, base: pathlib.Path | None, destination: pathlib.Path) -> Report:
    """Writes a copy of a Hugging Face model with the value transforms folded in; CheckpointError."""
    raise _needs_jax(f"{destination}: absorbing the values into a model")


def _needs_jax(what: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"{what} needs JAX: pip install 'oscar-kv[jax,gguf]'{remedy}")
