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

from ..core import cache_format as fmt
from ..core.errors import CheckpointError, ConfigError
from ..core.rotation_header import RotationHeader

STATISTICS_VERSION = "2"
READABLE_VERSIONS = ("1", "2")  # 1 lacks what fits of basis "ordered" need
STATISTICS_FILE = "statistics.safetensors"  # in the folder that `oscar calibrate` and `oscar fit` write
HEADER = "header"  # its place among the scalars of the file


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What `fit.fit_layer_rotation` reads: float64 NumPy, covariances [K, D, D], means [K, D].

    coded_query_covariance weighs each query by the attention it gives to coded tokens; None where none did.
    rope_frequencies [R/2] are those of the pairs that turn, empty for a layer without RoPE, None if unknown;
    rope_interleaved says how channels pair (`ordered.spread_covariance`). context is the length of the
    longest sequence, reach the longest that the model takes, in tokens.
    """

    query_covariance: np.ndarray
    key_covariance: np.ndarray
    key_mean: np.ndarray
    value_mean: np.ndarray
    value_covariance: np.ndarray
    surrogate_value_covariance: np.ndarray | None
    exact_value_covariance: np.ndarray | None
    tokens: int
    version: str = STATISTICS_VERSION
    coded_query_covariance: np.ndarray | None = None
    rope_frequencies: np.ndarray | None = None
    rope_interleaved: bool = False
    context: int = 0
    reach: int = 0

    def require_ordered(self) -> None:
        """Raises ConfigError naming what a fit of basis "ordered" lacks."""
        if self.version == "1":
            raise ConfigError(
                "statistics of version '1' lack coded_query_covariance and rope_frequencies, which basis "
                "'ordered' (rounding 'sequential') needs: gather them again"
            )
        if self.coded_query_covariance is None:
            least = fmt.SINK_TOKENS + fmt.RECENT_TOKENS + fmt.PAGE_TOKENS
            raise ConfigError(
                f"the statistics lack coded_query_covariance, which basis 'ordered' (rounding 'sequential') "
                f"needs: sequences of {self.context} tokens, allowed: >= {least}, which read a page"
            )
        if self.rope_frequencies is None:
            raise ConfigError(
                "the statistics lack rope_frequencies, which basis 'ordered' (rounding 'sequential') needs: "
                "how the model turns its keys is not known"
            )


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
                arrays[f"{layer}.{field.name}"] = np.ascontiguousarray(value)  # the library writes memory
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
        if entry.version not in READABLE_VERSIONS:
            raise CheckpointError(
                f"{path}: layer {layer} has statistics version {entry.version!r}, "
                f"expected {' or '.join(map(repr, READABLE_VERSIONS))}"
            )
    if header is None:
        return found, None
    try:
        return found, RotationHeader.from_dict(header)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
