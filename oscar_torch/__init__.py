"""OSCAR-KV in PyTorch: attention-aware rotated 2-bit KV caches, the twin of `oscar_jax`.

The names below are all that most programs need. Each is looked up when it is first used, so that importing
the package loads neither PyTorch nor transformers. `OscarCache`, `calibrate` and its parts
need transformers; looking one up registers the attention function "oscar".
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import allocate_dense_cache, allocate_layer_cache, append_rows, attend, live_bytes
    from .core.config import CacheConfig, CalibrationConfig
    from .core.errors import (
        CacheFullError,
        CheckpointError,
        ConfigError,
        DTypeError,
        OscarError,
        ShapeError,
    )
    from .core.rotation_header import RotationHeader
    from .hf.cache import OscarCache
    from .hf.calibrate import calibrate, calibrate_model, save_statistics
    from .interchange.convert import convert
    from .interchange.inspect import inspect
    from .layer_cache import DenseCache, LayerCache
    from .rotations.rotation import LayerRotation, RotationSet, hadamard_rotation, identity_rotation
    from .rotations.store import load_rotation_set, save_safetensors
    from .serving.sequence_pool import SequencePool

    __version__: str

_PLACES = {
    "cache": ("allocate_dense_cache", "allocate_layer_cache", "append_rows", "attend", "live_bytes"),
    "core.config": ("CacheConfig", "CalibrationConfig"),
    "core.errors": (
        "CacheFullError",
        "CheckpointError",
        "ConfigError",
        "DTypeError",
        "OscarError",
        "ShapeError",
    ),
    "core.rotation_header": ("RotationHeader",),
    "hf": ("OscarCache",),
    "hf.calibrate": ("calibrate", "calibrate_model", "save_statistics"),
    "interchange.convert": ("convert",),
    "interchange.inspect": ("inspect",),
    "layer_cache": ("DenseCache", "LayerCache"),
    "rotations.rotation": ("LayerRotation", "RotationSet", "hadamard_rotation", "identity_rotation"),
    "rotations.store": ("load_rotation_set", "save_safetensors"),
    "serving.sequence_pool": ("SequencePool",),
}
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "CacheConfig",
    "CacheFullError",
    "CalibrationConfig",
    "CheckpointError",
    "ConfigError",
    "DTypeError",
    "DenseCache",
    "LayerCache",
    "LayerRotation",
    "OscarCache",
    "OscarError",
    "RotationHeader",
    "RotationSet",
    "SequencePool",
    "ShapeError",
    "__version__",
    "allocate_dense_cache",
    "allocate_layer_cache",
    "append_rows",
    "attend",
    "calibrate",
    "calibrate_model",
    "convert",
    "hadamard_rotation",
    "identity_rotation",
    "inspect",
    "live_bytes",
    "load_rotation_set",
    "save_safetensors",
    "save_statistics",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("oscar-kv")
    elif name in _PLACE_OF:
        value = getattr(importlib.import_module(f".{_PLACE_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
