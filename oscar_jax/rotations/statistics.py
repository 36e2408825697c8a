"""What a rotation is fitted on: a layer's covariances and means, and the file that holds those of a model.

Twin file, byte-identical in both packages: NumPy only.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from ..core.errors import CheckpointError
from ..core.rotation_header import RotationHeader

STATISTICS_VERSION = "1"
STATISTICS_FILE = "statistics.safetensors"  # in the folder that `oscar calibrate` and `oscar fit` write
HEADER = "header"  # its place among the scalars of the file


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What `fit.fit_layer_rotation` reads: float64 NumPy, covariances [K, D, D], means [K, D]."""

    query_covariance: np.ndarray
    key_covariance: np.ndarray
    key_mean: np.ndarray
    value_mean: np.ndarray
    value_covariance: np.ndarray
    surrogate_value_covariance: np.ndarray | None
    exact_value_covariance: np.ndarray | None
    tokens: int
    version: str = STATISTICS_VERSION


def save_statistics(
    statistics: Mapping[int, LayerStatistics],
    path: str | os.PathLike[str],
    header: RotationHeader | None = None,
) -> None:
    """Writes the statistics as safetensors (float64), which `oscar fit` reads.

    `header` says of which model and text they are: a RotationHeader without a basis.
    """
    arrays, scalars = {}, {}
    for layer, entry in statistics.items():
        for field in dataclasses.fields(entry):
            value = getattr(entry, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"{layer}.{field.name}"] = value
            elif value is not None:
                scalars[f"{layer}.{field.name}"] = value
    if header is not None:
        scalars[HEADER] = header.to_dict()
    # One metadata entry: the library writes several in no fixed order, and equal statistics are equal bytes.
    safetensors.numpy.save_file(arrays, path, metadata={"scalars": json.dumps(scalars, sort_keys=True)})


def load_statistics(path: str | os.PathLike[str]) -> dict[int, LayerStatistics]:
    """Reads what `save_statistics` wrote; raises CheckpointError if it is damaged or of another version."""
    return read_statistics(path)[0]


def read_statistics(
    path: str | os.PathLike[str],
) -> tuple[dict[int, LayerStatistics], RotationHeader | None]:
    """Statistics per layer and the header beside them, None if the file has none; CheckpointError."""
    layers: dict[int, dict[str, Any]] = {}
    try:
        with safetensors.safe_open(path, "numpy") as stored:
            values = {name: stored.get_tensor(name) for name in stored.keys()}
            values |= json.loads(stored.metadata()["scalars"])
        header = values.pop(HEADER, None)
        for name, value in values.items():
            layer, _, field = name.partition(".")
            layers.setdefault(int(layer), {})[field] = value
        optional: dict[str, Any] = {"surrogate_value_covariance": None, "exact_value_covariance": None}
        found = {k: LayerStatistics(**(optional | v)) for k, v in sorted(layers.items())}
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a statistics file: {error}") from None
    for layer, entry in found.items():
        if entry.version != STATISTICS_VERSION:
            raise CheckpointError(
                f"{path}: layer {layer} has statistics version {entry.version!r}, "
                f"expected {STATISTICS_VERSION!r}"
            )
    if header is None:
        return found, None
    try:
        return found, RotationHeader.from_dict(header)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
