"""The exact integer row quantizer: bf16 rows -> 2-bit codes and one scale per row; pages of 64 rows.

A page is a pure function of its rows and of the rotation set, defined in integers, so that every
implementation on every device writes the same bytes. The arithmetic is documented step by step in
`docs/int2-format.md`; the step numbers below are the ones of its section 2.

Why it is exact: a row and a transform are 15-bit integers, split into two signed 8-bit limbs. Every sum of
limb products stays below 2**24, so a float32 matrix unit (TF32 and bf16 included) computes it without
rounding, in any order. Nothing divides floats, and no float product feeds an addition unless it is exact.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arithmetic import exact_arithmetic, refuse_gradients
from .core import cache_format as fmt
from .core.errors import DTypeError, ShapeError
from .layer_cache import Array, RotationArrays, require_array, require_float
from .packing import pack_key_codes, pack_value_codes, unpack_key_codes, unpack_value_codes

_CLAMP = 2.0**fmt.MAX_EXPONENT


@dataclasses.dataclass(frozen=True, eq=False)
class Feedback:
    """Where the rounding errors of a block of channels go (format page, section 2, steps 8a to 8c).

    matrix int8 [K or 1, D, D], source by target, in units of 2**-shift, shift int32 [K or 1]; zero unless the
    target lies in a later one of `steps` blocks of D / steps channels.
    """

    matrix: jax.Array | np.ndarray
    shift: jax.Array | np.ndarray
    steps: int


jax.tree_util.register_dataclass(Feedback, data_fields=["matrix", "shift"], meta_fields=["steps"])


@exact_arithmetic
def round_to_bfloat16(rows: Array) -> jax.Array:
    """Rounds to the nearest bfloat16, ties to even; bfloat16 passes through unchanged.

    `reduce_precision` makes the rounding explicit: XLA may drop a plain float32 -> bfloat16 -> float32 pair.
    """
    if rows.dtype == jnp.bfloat16:
        return jnp.asarray(rows)
    return lax.reduce_precision(rows.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(
        jnp.bfloat16
    )


@exact_arithmetic
def page_key_mean(rows: jax.Array) -> jax.Array:
    """Mean key of a page (step 2). rows bf16 [..., 64, K, D] -> bf16 [..., K, D].

    Non-finite rows count as zeros. Raises ShapeError unless the page has 64 rows.
    """
    require_float("rows", rows)
    if rows.ndim < 3 or rows.shape[-3] != fmt.PAGE_TOKENS:
        raise ShapeError(f"a page has {fmt.PAGE_TOKENS} rows: rows {rows.shape}, expected [..., 64, K, D]")
    rows = refuse_gradients("page_key_mean", rows)
    return _page_key_mean(_clean(rows))


@exact_arithmetic
def quantize_rows(
    rows: jax.Array,
    transform: Array,
    multiplier: Array,
    mean: Array,
    feedback: Feedback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Centers, rotates, scales and codes rows (steps 1-9).

    rows bf16 [..., K, D]; transform int16 [K or 1, D, D] in units of 2**-14; multiplier int32 [K or 1] in
    units of 1/256; mean bf16 [..., K or 1, D], subtracted first. Returns codes uint8 [..., K, D] in 0..3 and
    scale bf16 [..., K]. With a feedback the rounding is sequential. Raises ShapeError or DTypeError before
    any work.
    """
    require_float("rows", rows)
    require_float("mean", mean)
    check_transform(rows.shape[-2], rows.shape[-1], transform, multiplier)
    rows = refuse_gradients("quantize_rows", rows)
    return _code_rows(_clean(rows) - _clean(mean), transform, multiplier, feedback)


@exact_arithmetic
def quantize_key_pages(
    rows: jax.Array, transform: Array, multiplier: Array, feedback: Feedback | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes whole pages of keys, centered by their own mean.

    rows bf16 [P, 64, K, D] -> words int32 [P, K, 64, D/16], scale bf16 [P, K, 64], page_mean bf16 [P, K, D].
    """
    check_pages(rows, transform, multiplier)
    rows = refuse_gradients("quantize_key_pages", rows)
    x = _clean(rows)
    mean = _page_key_mean(x)
    z = x - mean.astype(jnp.float32)[:, None]
    codes, scale = _code_rows(z, transform, multiplier, feedback)
    return pack_key_codes(codes.swapaxes(1, 2)), scale.swapaxes(1, 2), mean


@exact_arithmetic
def quantize_value_pages(
    rows: jax.Array,
    transform: Array,
    multiplier: Array,
    mean: Array,
    feedback: Feedback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantizes whole pages of values, centered by the calibrated mean of the rotation set.

    rows bf16 [P, 64, K, D], mean bf16 [K or 1, D] -> words int32 [P, K, D, 4], scale bf16 [P, K, 64].
    """
    check_pages(rows, transform, multiplier)
    if mean.shape != (transform.shape[0], rows.shape[-1]):
        raise ShapeError(f"value mean {mean.shape}, expected {(transform.shape[0], rows.shape[-1])}")
    rows = refuse_gradients("quantize_value_pages", rows)
    codes, scale = _code_rows(_clean(rows) - _clean(mean), transform, multiplier, feedback)
    return pack_value_codes(codes.swapaxes(1, 2)), scale.swapaxes(1, 2)


@exact_arithmetic
def quantize_page_pair(
    key_pages: jax.Array, value_pages: jax.Array, rotation: RotationArrays
) -> dict[str, jax.Array]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    check_page_pair(key_pages, value_pages, rotation)
    key_codes, key_scale, key_page_mean = quantize_key_pages(
        key_pages, rotation.key_transform, rotation.key_multiplier, getattr(rotation, "key_feedback", None)
    )
    value_codes, value_scale = quantize_value_pages(
        value_pages,
        rotation.value_transform,
        rotation.value_multiplier,
        rotation.value_mean,
        getattr(rotation, "value_feedback", None),
    )
    return {
        "key_codes": key_codes,
        "value_codes": value_codes,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "key_page_mean": key_page_mean,
    }


@exact_arithmetic
def dequantize_key_pages(
    words: jax.Array, scale: jax.Array, page_mean: jax.Array, query_transform: Array
) -> jax.Array:
    """Reconstructs keys: mean + ((code - 1.5) * scale) @ inverse(T_K), with inverse(T_K) = query_transform^T.

    words int32 [P, K, 64, D/16], scale bf16 [P, K, 64], page_mean bf16 [P, K, D], query_transform float32
    [K or 1, D, D] -> float32 [P, 64, K, D].
    """
    head_dim = query_transform.shape[-1]
    mean = ("page_mean", page_mean, (*words.shape[:2], head_dim))
    per_page = (fmt.PAGE_TOKENS, head_dim // fmt.CODES_PER_WORD)
    _check_coded(words, scale, query_transform, per_page, mean)
    y = _grid(unpack_key_codes(words), scale)
    x = page_mean.astype(jnp.float32)[:, :, None] + _matmul(y, query_transform.swapaxes(-1, -2))
    return x.swapaxes(1, 2)


@exact_arithmetic
def dequantize_value_pages(
    words: jax.Array, scale: jax.Array, value_mean: Array, output_transform: Array
) -> jax.Array:
    """Reconstructs values: value_mean + ((code - 1.5) * scale) @ output_transform.

    words int32 [P, K, D, 4], scale bf16 [P, K, 64], value_mean bf16 [K or 1, D], output_transform float32
    [K or 1, D, D] -> float32 [P, 64, K, D].
    """
    head_dim = output_transform.shape[-1]
    mean = ("value_mean", value_mean, (*words.shape[1:2], head_dim))
    per_page = (head_dim, fmt.PAGE_TOKENS // fmt.CODES_PER_WORD)
    _check_coded(words, scale, output_transform, per_page, mean)
    y = _grid(unpack_value_codes(words), scale)
    x = jnp.asarray(value_mean, jnp.float32)[:, None] + _matmul(y, output_transform)
    return x.swapaxes(1, 2)


def check_transform(key_value_heads: int, head_dim: int, transform: Array, multiplier: Array) -> None:
    """Raises ShapeError or DTypeError unless transform and multiplier fit rows of [..., K, D]."""
    fmt_heads = transform.shape[0] if transform.ndim == 3 else -1
    if transform.ndim != 3 or transform.shape[1:] != (head_dim, head_dim):
        raise ShapeError(f"transform {transform.shape}, expected [K or 1, {head_dim}, {head_dim}]")
    if fmt_heads not in (1, key_value_heads):
        raise ShapeError(f"transform has {fmt_heads} heads, expected 1 or {key_value_heads}")
    if transform.dtype != jnp.int16:
        raise DTypeError(f"transform is {transform.dtype}, expected int16 (units of 2**-14)")
    if multiplier.shape != (fmt_heads,):
        raise ShapeError(f"multiplier {multiplier.shape}, expected ({fmt_heads},)")
    if multiplier.dtype != jnp.int32:
        raise DTypeError(f"multiplier is {multiplier.dtype}, expected int32 (units of 1/256)")
    if head_dim % fmt.HEAD_DIM_MULTIPLE or not 0 < head_dim <= fmt.MAX_HEAD_DIM:
        raise ShapeError(f"head_dim {head_dim}, expected a multiple of 16 up to {fmt.MAX_HEAD_DIM}")


def check_page_pair(key_pages: jax.Array, value_pages: jax.Array, rotation: RotationArrays) -> None:
    """Raises ShapeError or DTypeError unless both are [P, 64, K, D] pages that the rotation fits."""
    check_pages(key_pages, rotation.key_transform, rotation.key_multiplier)
    check_pages(value_pages, rotation.value_transform, rotation.value_multiplier)
    if key_pages.shape != value_pages.shape:
        raise ShapeError(
            f"key pages {tuple(key_pages.shape)} and value pages {tuple(value_pages.shape)} must be equal"
        )


def _check_coded(
    words: jax.Array,
    scale: jax.Array,
    matrix: Array,
    per_page: tuple[int, int],
    mean: tuple[str, Array, tuple[int, ...]],
) -> None:
    """Raises ShapeError or DTypeError unless codes of pages, their scales, mean and matrix belong together.

    per_page: the last two axes of the words; mean: its name, the array, and its shape.
    """
    for array, name in ((words, "words"), (scale, "scale"), (matrix, "matrix"), (mean[1], mean[0])):
        require_array(name, array)
    pages, heads = tuple(words.shape[:2]) if words.ndim == 4 else (-1, -1)
    head_dim = matrix.shape[-1]
    dtype = str(words.dtype).removeprefix("torch.")
    if tuple(words.shape) != (pages, heads, *per_page) or dtype != "int32":
        raise ShapeError(
            f"words {dtype} {tuple(words.shape)}, expected int32 [P, K, {per_page[0]}, {per_page[1]}]"
        )
    if tuple(matrix.shape) not in ((1, head_dim, head_dim), (heads, head_dim, head_dim)):
        raise ShapeError(f"matrix {tuple(matrix.shape)}, expected [{heads} or 1, {head_dim}, {head_dim}]")
    for name, array, shape in (("scale", scale, (pages, heads, fmt.PAGE_TOKENS)), mean):
        if tuple(array.shape) != shape and not (name == "value_mean" and tuple(array.shape) == (1, head_dim)):
            raise ShapeError(f"{name} {tuple(array.shape)}, expected {shape}")


def check_pages(rows: jax.Array, transform: Array, multiplier: Array) -> None:
    """Raises ShapeError or DTypeError unless rows are [P, 64, K, D] and the transform fits them."""
    require_float("rows", rows)
    if rows.ndim != 4 or rows.shape[1] != fmt.PAGE_TOKENS:
        raise ShapeError(f"rows {rows.shape}, expected [P, {fmt.PAGE_TOKENS}, K, D]")
    check_transform(rows.shape[2], rows.shape[3], transform, multiplier)


def _clean(rows: Array) -> jax.Array:
    """Step 1: float32 rows with non-finite entries 0 and magnitudes at most 2**64."""
    x = round_to_bfloat16(rows).astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -_CLAMP, _CLAMP), 0.0)


def _exponent(magnitude: jax.Array) -> jax.Array:
    """floor(log2) of a non-negative float32, read from its exponent bits."""
    return (lax.bitcast_convert_type(magnitude, jnp.int32) >> 23) - 127


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent as float32, built from its bits; exponent in -126..127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _page_key_mean(x: jax.Array) -> jax.Array:
    """Step 2 on cleaned rows [..., 64, K, D] -> bf16 [..., K, D]."""
    exponent = _exponent(jnp.max(jnp.abs(x), axis=(-3, -1)))  # [..., K]
    empty = exponent < fmt.MIN_EXPONENT
    exponent = jnp.where(empty, 0, exponent)
    up = _power_of_two(fmt.MEAN_BITS - exponent)[..., None, :, None]
    total = jnp.floor(x * up + 0.5).astype(jnp.int32).sum(axis=-3)  # [..., K, D], |total| <= 2**27
    down = _power_of_two(exponent - fmt.MEAN_BITS - fmt.PAGE_TOKENS_LOG2)[..., None]
    return round_to_bfloat16(jnp.where(empty[..., None], 0.0, total.astype(jnp.float32) * down))


def _limbs(v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Step 5: v = 256 * hi + lo with lo in -128..127."""
    hi = (v + 128) >> fmt.LIMB_BITS
    return hi, v - (hi << fmt.LIMB_BITS)


def _code_rows(
    z: jax.Array, transform: Array, multiplier: Array, feedback: Feedback | None = None
) -> tuple[jax.Array, jax.Array]:
    """Steps 3-9 on centered rows z float32 [..., K, D]."""
    head_dim = z.shape[-1]
    exponent = _exponent(jnp.max(jnp.abs(z), axis=-1))  # [..., K]
    empty = exponent < fmt.MIN_EXPONENT
    exponent = jnp.where(empty, 0, exponent)
    fixed = jnp.floor(z * _power_of_two(fmt.ROW_BITS - exponent)[..., None] + 0.5)
    fixed = jnp.where(empty[..., None], 0, fixed.astype(jnp.int32))

    # Step 6. One product of the stacked limbs: rows [hi; lo] times columns [Thi | Tlo].
    rows = jnp.stack(_limbs(fixed)).astype(jnp.float32)
    columns = jnp.concatenate(_limbs(jnp.asarray(transform, jnp.int32)), axis=-1).astype(jnp.float32)
    products = jnp.split(_matmul_rows(rows, columns).astype(jnp.int32), 2, axis=-1)
    (hi_hi, lo_hi), (hi_lo, lo_lo) = products
    y = (hi_hi << fmt.LIMB_BITS) + (hi_lo + lo_hi) + (lo_lo >> fmt.LIMB_BITS)

    mean_abs = (jnp.abs(y) >> fmt.ABS_SHIFT).sum(axis=-1) // head_dim
    s = (mean_abs * multiplier) >> fmt.MULTIPLIER_SHIFT
    codes = _levels(y, s[..., None]) if feedback is None else _sequential_codes(y, s, feedback)
    scale = s.astype(jnp.float32) * _power_of_two(exponent - fmt.SCALE_BITS)
    return codes, round_to_bfloat16(scale)


def _levels(y: jax.Array, bound: jax.Array) -> jax.Array:
    """Step 8: codes uint8 of y."""
    return (y >= -bound).astype(jnp.uint8) + (y >= 0).astype(jnp.uint8) + (y >= bound).astype(jnp.uint8)


def _sequential_codes(y: jax.Array, s: jax.Array, feedback: Feedback) -> jax.Array:
    """Steps 8a to 8c: codes uint8 [..., K, D] of y int32 [..., K, D] and s int32 [..., K], block by block."""
    shift, limit = jnp.asarray(feedback.shift), fmt.FEEDBACK_LIMIT
    p = _exponent(jnp.maximum(s, 1).astype(jnp.float32)) - fmt.FEEDBACK_UNIT_BITS - shift
    down, up = jnp.maximum(p, 0), jnp.maximum(-p, 0)
    w = (y << up[..., None]) >> down[..., None]
    bound, shift = ((s << up) >> down)[..., None], shift[:, None]
    block = y.shape[-1] // feedback.steps
    codes = []
    for first in range(0, y.shape[-1], block):
        here, w = w[..., :block], w[..., block:]
        codes.append(_levels(here, bound))
        rest = here - (((2 * codes[-1].astype(jnp.int32) - 3) * bound) >> 1)
        unit = jnp.clip((rest + ((1 << shift) >> 1)) >> shift, -limit, limit)
        columns = jnp.asarray(feedback.matrix[:, first : first + block, first + block :])
        w = w + _matmul_rows(unit.astype(jnp.float32), columns.astype(jnp.float32)).astype(jnp.int32)
    return jnp.concatenate(codes, axis=-1)


def _matmul_rows(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """rows [..., K, D] @ columns [K or 1, D, E] -> [..., K, E]."""
    if columns.shape[0] == 1:
        return jnp.matmul(rows, columns[0], precision=lax.Precision.HIGHEST)
    return jnp.einsum("...kd,kde->...ke", rows, columns, precision=lax.Precision.HIGHEST)


def _grid(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Grid values (code - 1.5) * scale, float32; codes [P, K, 64, D], scale [P, K, 64]."""
    return (codes.astype(jnp.float32) - 1.5) * scale.astype(jnp.float32)[..., None]


def _matmul(y: jax.Array, matrix: Array) -> jax.Array:
    """y [P, K, 64, D] @ matrix [K or 1, D, D]."""
    return jnp.matmul(y, matrix, precision=lax.Precision.HIGHEST)
