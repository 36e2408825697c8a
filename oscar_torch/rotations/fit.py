"""From a layer's statistics to its rotation, in float64. A fitted set is a file to ship, never to refit.

Twin file, byte-identical in both packages: NumPy only, so that the same statistics give the same set.
"""

from collections.abc import Sequence
from typing import Any

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
from .fields import make_fields
from .ordered import KEY_DAMPING, fit_feedback, ordered_basis, rounding_steps, spread_covariance
from .rotation import LayerRotation
from .statistics import LayerStatistics

# alpha in units of 1/256; bases compete at the first of each: 1.60, 1.30, 1.45, 1.75
KEY_MULTIPLIERS = (fmt.KEY_MULTIPLIER_DEFAULT, 333, 371, 448)
ORDERED = "ordered"  # the basis of sequential rounding
ORDERED_KEY_MULTIPLIERS = (448, 410, 480)  # alpha 1.75, 1.60, 1.875


def fit_layer_rotation(
    statistics: LayerStatistics,
    basis: str | Sequence[str],
    *,
    per_head: bool,
    damping: float,
    key_multiplier: int | None = None,
    value_multiplier: int | None = None,
    value_basis: str | None = None,
) -> LayerRotation:
    """The rotation of one layer from its statistics, [K, D, D] if per_head, else [1, D, D] of the head means.

    basis: one of KEY_BASES, or one per key/value head (per_head only). value_basis: one of VALUE_BASES;
    "oscar" takes the published surrogate covariance, "oscar_exact" the paper's. damping is relative to the
    mean variance and concerns the two balanced bases and "ordered". A role in basis "ordered" has a feedback
    and is rounded sequentially. None: by default keys take alpha 1.60, or 1.75 in basis "ordered", values
    1.45; values are "ordered" with keys that are, else "hadamard". Raises ConfigError or ShapeError.
    """
    if not isinstance(basis, str) and ORDERED in basis:
        raise ConfigError(f"basis = {basis!r}: {ORDERED!r} is of all heads of a layer, one name")
    ordered = basis == ORDERED
    if value_basis is None:
        value_basis = ORDERED if ordered else "hadamard"
    if key_multiplier is None:
        key_multiplier = ORDERED_KEY_MULTIPLIERS[0] if ordered else fmt.KEY_MULTIPLIER_DEFAULT
    if value_multiplier is None:
        value_multiplier = fmt.VALUE_MULTIPLIER_DEFAULT
    if value_basis not in VALUE_BASES:
        raise ConfigError(f"value_basis = {value_basis!r}, allowed: {', '.join(VALUE_BASES)}")

    def heads_of(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array, np.float64)
        return array if per_head else array.mean(axis=0, keepdims=True)

    query, key = heads_of(statistics.query_covariance), heads_of(statistics.key_covariance)
    heads, head_dim = key.shape[0], key.shape[-1]
    seen = stored = query
    if ordered:
        seen, stored = (heads_of(array) for array in _ordered_covariances(statistics))
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
            case "ordered":
                return ordered_basis(seen[head], stored[head], damping, KEY_DAMPING * damping)
        raise ConfigError(f"basis = {name!r}, allowed: {', '.join(KEY_BASES)}")

    key_bases = [key_basis(name, head) for head, name in enumerate(names)]
    if value_basis in ("identity", "hadamard"):
        matrix = np.eye(head_dim) if value_basis == "identity" else hadamard_matrix(head_dim)
        value_bases = [matrix] * heads
    elif value_basis == ORDERED:
        plain, covariances = np.eye(head_dim), heads_of(statistics.value_covariance)
        value_bases = [ordered_basis(plain, matrix, damping, damping) for matrix in covariances]
    else:
        exact = value_basis == "oscar_exact"
        covariance = statistics.exact_value_covariance if exact else statistics.surrogate_value_covariance
        if covariance is None:
            raise ConfigError(f"value_basis = {value_basis!r} needs a covariance the statistics do not have")
        value_bases = [oscar_basis(matrix) for matrix in heads_of(covariance)]
    fields = make_fields(
        key_bases,
        value_bases,
        key_mean=heads_of(statistics.key_mean),
        value_mean=heads_of(statistics.value_mean),
        key_multiplier=key_multiplier,
        value_multiplier=value_multiplier,
    )
    if ordered:  # by the inverse of the rounded transform, transposed as queries take it
        inverses = fields["query_transform"].swapaxes(1, 2).astype(np.float64)
        fields |= _feedback_fields("key", inverses, seen, damping)
    if value_basis == ORDERED:
        metric = np.broadcast_to(np.eye(head_dim), (heads, head_dim, head_dim))
        fields |= _feedback_fields("value", fields["output_transform"].astype(np.float64), metric, damping)
    fed = ordered or value_basis == ORDERED
    return LayerRotation.from_numpy(fields, rounding_steps(head_dim) if fed else 0)


def rounding_fields(basis: str, head_dim: int) -> dict[str, Any]:
    """What a header says of the rounding of a set in this basis: rounding and rounding_steps."""
    if basis != ORDERED:
        return {"rounding": "nearest", "rounding_steps": 0}
    return {"rounding": "sequential", "rounding_steps": rounding_steps(head_dim)}


def _feedback_fields(
    role: str, inverses: np.ndarray, metrics: np.ndarray, damping: float
) -> dict[str, np.ndarray]:
    """The fields of a role's feedback, from inverse transforms and covariances of its readers, [Kr, D, D]."""
    fitted = [fit_feedback(inverse, metric, damping) for inverse, metric in zip(inverses, metrics)]
    return {
        f"{role}_feedback": np.stack([matrix for matrix, _ in fitted]),
        f"{role}_feedback_shift": np.asarray([shift for _, shift in fitted], np.int32),
    }


def _ordered_covariances(statistics: LayerStatistics) -> tuple[np.ndarray, np.ndarray]:
    """Covariances [K, D, D] of queries, weighed by what they read from pages, and of keys, both spread."""
    statistics.require_ordered()
    assert statistics.coded_query_covariance is not None and statistics.rope_frequencies is not None
    rope = statistics.rope_frequencies, statistics.rope_interleaved, statistics.context, statistics.reach
    query, key = (
        np.stack([spread_covariance(matrix, *rope) for matrix in covariances])
        for covariances in (statistics.coded_query_covariance, statistics.key_covariance)
    )
    return query, key
