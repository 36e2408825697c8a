"""Forms of a rotation set that need more than NumPy and PyTorch: directories, GGUF, absorbed weights."""

import pathlib

from ..core.errors import ConfigError
from ..models.geometry import read_model_geometry
from ..rotations import store
from ..rotations.rotation import RotationSet
from .absorb import absorb_values
from .gguf import export_gguf, import_gguf
from .report import Report, make_report, native_report

__all__ = ["import_gguf", "read_model_geometry", "write_absorbed", "write_gguf", "write_orbax"]


def write_orbax(rotation_set: RotationSet, directory: pathlib.Path) -> Report:
    """Writes a rotation set directory; CheckpointError if something else is there."""
    store.save_rotation_set(rotation_set, directory)
    return native_report(rotation_set, "Orbax directory", directory)


def write_gguf(rotation_set: RotationSet, base: pathlib.Path | None, destination: pathlib.Path) -> Report:
    """Writes a copy of a GGUF file with the rotation tensors added; CheckpointError."""
    return export_gguf(rotation_set, _require_base("gguf", base), destination)


def write_absorbed(rotation_set: RotationSet, base: pathlib.Path | None, destination: pathlib.Path) -> Report:
    """Writes a copy of a Hugging Face model with the value transforms folded in; CheckpointError."""
    error = absorb_values(rotation_set, _require_base("absorb", base), destination)
    return make_report(
        rotation_set,
        "model with absorbed values",
        [str(destination)],
        carried=["value transforms, in v_proj and o_proj", "the rest, as rotation_set/ beside them"],
        dropped=[],
        notes=[f"largest relative rounding error of a replaced weight: {error:.2e}"],
    )


def _require_base(target: str, base: pathlib.Path | None) -> pathlib.Path:
    if base is None:
        raise ConfigError(f"target {target!r} needs base: the model to bake the rotations into")
    return base
