"""OSCAR-KV in JAX: attention-aware rotated 2-bit KV caches.

The names below are all that most programs need. Each is looked up when it is first used, so that importing
the package loads neither JAX nor anything else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cache import allocate_dense_cache, allocate_layer_cache, append_rows, attend, live_bytes
    from .calibration.job import calibrate, fit
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
    from .evaluation.job import evaluate
    from .evaluation.task_job import evaluate_tasks
    from .generate import Generation, Generator, SamplingConfig
    from .interchange.convert import convert
    from .interchange.inspect import inspect
    from .layer_cache import DenseCache, LayerCache
    from .models.weights import load_model
    from .rotations.rotation import LayerRotation, RotationSet, hadamard_rotation, identity_rotation
    from .rotations.store import load_rotation_set, save_rotation_set, save_safetensors
    from .serving.sequence_pool import SequencePool

    __version__: str

_PLACES = {
    "cache": ("allocate_dense_cache", "allocate_layer_cache", "append_rows", "attend", "live_bytes"),
    "calibration.job": ("calibrate", "fit"),
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
    "evaluation.job": ("evaluate",),
    "evaluation.task_job": ("evaluate_tasks",),
    "generate": ("Generation", "Generator", "SamplingConfig"),
    "interchange.convert": ("convert",),
    "interchange.inspect": ("inspect",),
    "layer_cache": ("DenseCache", "LayerCache"),
    "models.weights": ("load_model",),
    "rotations.rotation": ("LayerRotation", "RotationSet", "hadamard_rotation", "identity_rotation"),
    "rotations.store": ("load_rotation_set", "save_rotation_set", "save_safetensors"),
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
    "Generation",
    "Generator",
    "LayerCache",
    "LayerRotation",
    "OscarError",
    "RotationHeader",
    "RotationSet",
    "SamplingConfig",
    "SequencePool",
    "ShapeError",
    "__version__",
    "allocate_dense_cache",
    "allocate_layer_cache",
    "append_rows",
    "attend",
    "calibrate",
    "convert",
    "evaluate",
    "evaluate_tasks",
    "fit",
    "hadamard_rotation",
    "identity_rotation",
    "inspect",
    "live_bytes",
    "load_model",
    "load_rotation_set",
    "save_rotation_set",
    "save_safetensors",
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
