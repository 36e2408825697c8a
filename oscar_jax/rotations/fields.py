"""The arrays of one layer's rotation in NumPy: made from bases, checked against the format page, section 1.

Twin file, byte-identical in both packages: NumPy only.
"""

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from ..core import cache_format as fmt
from ..core.config import check_head_dim
from ..core.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from .fixed_point import INVERSE_TOLERANCE, UNIT, invert_fixed_point, to_fixed_point

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def make_fields(
    key_bases: Sequence[np.ndarray],
    value_bases: Sequence[np.ndarray],
    *,
    key_mean: np.ndarray | None = None,
    value_mean: np.ndarray | None = None,
    key_multiplier: int = fmt.KEY_MULTIPLIER_DEFAULT,
    value_multiplier: int = fmt.VALUE_MULTIPLIER_DEFAULT,
) -> dict[str, np.ndarray]:
    """The fields of a LayerRotation by name, from Kr float64 bases [D, D]; means [Kr, D], None for zeros.

    Raises ShapeError or ConfigError.
    """
    if len(key_bases) != len(value_bases):
        raise ShapeError(f"{len(key_bases)} key bases but {len(value_bases)} value bases")
    if not len(key_bases):
        raise ConfigError("no bases, allowed: one for every head, or one for all")
    heads, head_dim = len(key_bases), np.shape(key_bases[0])[-1]
    check_head_dim(head_dim)
    for name, multiplier in (("key_multiplier", key_multiplier), ("value_multiplier", value_multiplier)):
        if not 1 <= multiplier < fmt.MULTIPLIER_LIMIT:
            raise ConfigError(f"{name} = {multiplier}, allowed: 1..{fmt.MULTIPLIER_LIMIT - 1}")
    keys = np.stack([to_fixed_point(basis)[0] for basis in key_bases])
    values = np.stack([to_fixed_point(basis)[0] for basis in value_bases])

    def mean(rows: np.ndarray | None) -> np.ndarray:
        rows = np.zeros((heads, head_dim)) if rows is None else np.asarray(rows)
        if rows.shape != (heads, head_dim):
            raise ShapeError(f"mean has shape {rows.shape}, expected {(heads, head_dim)}")
        return rows.astype(np.float32).astype(BFLOAT16)

    return {
        "key_transform": keys,
        "query_transform": np.stack([invert_fixed_point(key).T for key in keys]).astype(np.float32),
        "value_transform": values,
        "output_transform": np.stack([invert_fixed_point(value) for value in values]).astype(np.float32),
        "value_mean": mean(value_mean),
        "key_mean": mean(key_mean),
        "key_multiplier": np.full(heads, key_multiplier, np.int32),
        "value_multiplier": np.full(heads, value_multiplier, np.int32),
    }


def check_fields(
    fields: Mapping[str, np.ndarray], *, layer_id: int, num_key_value_heads: int, head_dim: int
) -> None:
    """Raises an error naming layer and field unless the arrays obey the format page, section 1.

    ShapeError and DTypeError for the arrays' form; CheckpointError for their content: non-finite entries, a
    column norm above 1, a multiplier outside 1..511, a pair that is not inverse to 1e-3, or swapped roles.
    """
    heads = fields["key_transform"].shape[:1]
    if heads not in ((1,), (num_key_value_heads,)):
        raise ShapeError(
            f"layer {layer_id}: key_transform has leading axis {heads}, "
            f"allowed: 1 or num_key_value_heads = {num_key_value_heads}"
        )
    arrays = {}
    for name, shape in fmt.rotation_field_shapes(heads[0], head_dim).items():
        array = fields[name]
        if array.shape != shape:
            raise ShapeError(f"layer {layer_id}: {name} has shape {array.shape}, expected {shape}")
        if array.dtype.name != fmt.ROTATION_FIELDS[name]:
            expected = fmt.ROTATION_FIELDS[name]
            raise DTypeError(f"layer {layer_id}: {name} has dtype {array.dtype.name}, expected {expected}")
        arrays[name] = array.astype(np.float64)
        if not np.isfinite(arrays[name]).all():
            raise CheckpointError(f"layer {layer_id}: {name} has non-finite entries")
    for name in ("key_multiplier", "value_multiplier"):
        for multiplier in arrays[name]:
            if not 1 <= multiplier < fmt.MULTIPLIER_LIMIT:
                raise CheckpointError(
                    f"layer {layer_id}: {name} = {int(multiplier)}, allowed: 1..{fmt.MULTIPLIER_LIMIT - 1}"
                )
    for name in ("key_transform", "value_transform"):
        norms = np.sqrt((arrays[name] ** 2).sum(axis=-2)) * UNIT
        if norms.max() > 1.0:
            raise CheckpointError(
                f"layer {layer_id}: {name} has a column of norm {norms.max():.6f}, allowed: <= 1"
            )
    key, value = arrays["key_transform"] * UNIT, arrays["value_transform"] * UNIT
    query_transposed = arrays["query_transform"].swapaxes(-1, -2)
    _check_inverse(layer_id, "key_transform", "query_transform", "inverse transpose", key, query_transposed)
    _check_inverse(
        layer_id, "value_transform", "output_transform", "inverse", value, arrays["output_transform"]
    )


def check_feedback(
    fields: Mapping[str, np.ndarray], *, layer_id: int, head_dim: int, rounding: str, steps: int
) -> None:
    """Raises an error naming layer and field unless the feedback obeys the format page, section 1.

    ShapeError and DTypeError for the arrays' form; CheckpointError where a set of this rounding must have
    other fields, where feedback flows inside a block or to an earlier one, and for entries out of range.
    """
    present = [name for name in fmt.FEEDBACK_FIELDS if name in fields]
    keys, both = list(fmt.FEEDBACK_FIELDS)[:2], list(fmt.FEEDBACK_FIELDS)
    if present not in ([[]] if rounding == "nearest" else [keys, both]):
        raise CheckpointError(f"layer {layer_id}: {rounding!r} rounding with the fields {present}")
    heads = fields["key_transform"].shape[0]
    for name in present:
        array, matrix = fields[name], not name.endswith("_shift")
        shape = (heads, head_dim, head_dim) if matrix else (heads,)
        if array.shape != shape:
            raise ShapeError(f"layer {layer_id}: {name} has shape {array.shape}, expected {shape}")
        if array.dtype.name != fmt.FEEDBACK_FIELDS[name]:
            expected = fmt.FEEDBACK_FIELDS[name]
            raise DTypeError(f"layer {layer_id}: {name} has dtype {array.dtype.name}, expected {expected}")
        low, high = (-fmt.FEEDBACK_LIMIT, fmt.FEEDBACK_LIMIT) if matrix else (0, fmt.FEEDBACK_MAX_SHIFT)
        if array.min() < low or array.max() > high:
            found = int(array.min() if array.min() < low else array.max())
            raise CheckpointError(f"layer {layer_id}: {name} has {found}, allowed: {low}..{high}")
        if not matrix:
            continue
        block = np.arange(head_dim) // (head_dim // steps)
        if np.any(array[:, block[:, None] >= block[None]]):
            raise CheckpointError(f"layer {layer_id}: {name} flows into its own or an earlier block")
        multiplier = fields[name.replace("feedback", "multiplier")]
        if multiplier.min() < fmt.FEEDBACK_MULTIPLIER_MIN:
            raise CheckpointError(
                f"layer {layer_id}: {name.replace('feedback', 'multiplier')} = {int(multiplier.min())} with "
                f"feedback, allowed: {fmt.FEEDBACK_MULTIPLIER_MIN}..{fmt.MULTIPLIER_LIMIT - 1}"
            )


def _check_inverse(
    layer_id: int, name: str, inverse_name: str, relation: str, matrix: np.ndarray, inverse: np.ndarray
) -> None:
    identity = np.eye(matrix.shape[-1])
    error = np.abs(matrix @ inverse - identity).max()
    if error <= INVERSE_TOLERANCE:
        return
    message = f"layer {layer_id}: {inverse_name} is not the {relation} of {name}: off by {error:.3g}"
    if np.abs(matrix @ inverse.swapaxes(-1, -2) - identity).max() <= INVERSE_TOLERANCE:
        message += " (it is when transposed: key and value roles look swapped)"
    raise CheckpointError(message)
