"""Checkpoints with quantized weights, dequantized while they are read, as transformers does on request.

FP8: a weight of 8-bit floats beside `weight_scale_inv`, one factor per block of rows and columns; the product
is taken in float32 and rounded once, to the model's dtype. Every other method is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, ConfigError
from .family import TensorSource

METHODS = ("fp8",)
_SCALE = "weight_scale_inv"
_KNOWN = {
    "quant_method",
    "weight_block_size",
    "modules_to_not_convert",
    "fmt",
    "activation_scheme",
    "dequantize",
}


def check_quantization(settings: Any) -> None:
    """Raises ConfigError unless `quantization_config` names a method that is dequantized here."""
    if not isinstance(settings, Mapping) or settings.get("quant_method") not in METHODS:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
        raise ConfigError(
            f"quantization_config: weights quantized by {method!r}, allowed: none, {', '.join(METHODS)}"
        )
    if unknown := sorted(key for key in set(settings) - _KNOWN if settings[key] is not None):
        raise ConfigError(f"quantization_config: unknown key {unknown[0]!r} = {settings[unknown[0]]!r}")
    # "static" would round activations to scales of the checkpoint; "dynamic" only says how kernels would run.
    for key, allowed in (("activation_scheme", (None, "dynamic")), ("fmt", (None, "e4m3"))):
        if settings.get(key) not in allowed:
            raise ConfigError(f"quantization_config: {key} = {settings[key]!r}, allowed: {allowed[1]!r}")


def dequantized(source: TensorSource) -> TensorSource:
    """A source whose FP8 weights are float32; CheckpointError for scales that do not fit."""
    scales = {name: name.removesuffix("_scale_inv") for name in source.shapes if name.endswith(f".{_SCALE}")}
    by_weight = {weight: scale for scale, weight in scales.items()}
    for weight, scale in by_weight.items():
        if weight not in source.shapes:
            raise CheckpointError(f"{scale} has no {weight} beside it")
        shape, grid = source.shapes[weight], source.shapes[scale] or (1, 1)
        if len(grid) != 2 or len(shape) != 2 or shape[0] % grid[0] or shape[1] % grid[1]:
            raise CheckpointError(
                f"{scale} has shape {list(grid)}, which does not divide {weight} {list(shape)}"
            )

    def load(name: str) -> np.ndarray:
        array = source.load(name)
        if name not in by_weight:
            if array.dtype.itemsize == 1:  # 8-bit numbers mean nothing without their factors
                raise CheckpointError(f"{name} has dtype {array.dtype} and no {_SCALE} beside it")
            return array
        scale = (
            source.load(by_weight[name]).astype(np.float32).reshape(source.shapes[by_weight[name]] or (1, 1))
        )
        height, width = array.shape[0] // scale.shape[0], array.shape[1] // scale.shape[1]
        blocks = array.astype(np.float32).reshape(scale.shape[0], height, scale.shape[1], width)
        return (blocks * scale[:, None, :, None]).reshape(array.shape)

    shapes = {name: shape for name, shape in source.shapes.items() if name not in scales}
    return dataclasses.replace(source, shapes=shapes, load=load)
