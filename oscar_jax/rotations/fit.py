"""From a layer's statistics to its rotation, in float64. A fitted set is a file to ship, never to refit.

Twin file, byte-identical in both packages: NumPy only, so that the same statistics give the same set.
"""

from collections.abc import Sequence

import numpy as np

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from .bases import (
    KEY_BASES,
    VALUE_BASES,
    balanced_basis,
    channel_balanced_basis,
    hadamard_matrix,
    oscar_basis,
)
from .rotation import LayerRotation, make_layer_rotation
from .statistics import LayerStatistics

# alpha in units of 1/256; bases compete at the first of each: 1.60, 1.30, 1.45, 1.75 and 1.45, 1.30, 1.60
KEY_MULTIPLIERS = (fmt.KEY_MULTIPLIER_DEFAULT, 333, 371, 448)


def fit_layer_rotation(
    statistics: LayerStatistics,
    basis: str | Sequence[str],
    *,
    per_head: bool,
    damping: float,
    key_multiplier: int = fmt.KEY_MULTIPLIER_DEFAULT,
    value_multiplier: int = fmt.VALUE_MULTIPLIER_DEFAULT,
    value_basis: str = "hadamard",
) -> LayerRotation:
    """The rotation of one layer from its statistics, [K, D, D] if per_head, else [1, D, D] of the head means.

    basis: one of KEY_BASES, or one per key/value head (per_head only). value_basis: one of VALUE_BASES;
    "oscar" takes the published surrogate covariance, "oscar_exact" the paper's. damping is relative to the
    mean variance and concerns the two balanced bases. Raises ConfigError or ShapeError.
    """
    if value_basis not in VALUE_BASES:
        raise ConfigError(f"value_basis = {value_basis!r}, allowed: {', '.join(VALUE_BASES)}")

    def heads_of(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array, np.float64)
        return array if per_head else array.mean(axis=0, keepdims=True)

    query, key = heads_of(statistics.query_covariance), heads_of(statistics.key_covariance)
    heads, head_dim = key.shape[0], key.shape[-1]
    names = [basis] * heads if isinstance(basis, str) else list(basis)
    if len(names) != heads:
        raise ConfigError(f"{len(names)} bases for {heads} matrices, allowed: one name, or one per matrix")

    def key_basis(name: str, head: int) -> np.ndarray:
        match name:
            case "identity":
                return np.eye(head_dim)
            case "hadamard":
                return hadamard_matrix(head_dim)
            case "oscar":
                return oscar_basis(query[head])
            case "channel_balanced":
                return channel_balanced_basis(query[head], key[head], damping)
            case "balanced":
                return balanced_basis(query[head], key[head], damping)
        raise ConfigError(f"basis = {name!r}, allowed: {', '.join(KEY_BASES)}")

    key_bases = [key_basis(name, head) for head, name in enumerate(names)]
    if value_basis in ("identity", "hadamard"):
        matrix = np.eye(head_dim) if value_basis == "identity" else hadamard_matrix(head_dim)
        value_bases = [matrix] * heads
    else:
        exact = value_basis == "oscar_exact"
        covariance = statistics.exact_value_covariance if exact else statistics.surrogate_value_covariance
        if covariance is None:
            raise ConfigError(f"value_basis = {value_basis!r} needs a covariance the statistics do not have")
        value_bases = [oscar_basis(matrix) for matrix in heads_of(covariance)]
    return make_layer_rotation(
        key_bases,
        value_bases,
        key_mean=heads_of(statistics.key_mean),
        value_mean=heads_of(statistics.value_mean),
        key_multiplier=key_multiplier,
        value_multiplier=value_multiplier,
    )
