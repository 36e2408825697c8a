"""Pages of sequential rounding in plain Triton (format page, section 2, steps 8a to 8c).

One program quantizes `ROWS` tokens of a page of one head: steps 1 to 7 as `triton.py`, then block after block
of channels. All columns stay where they are; the errors of other blocks are masked, so that one int8 product
with the whole feedback moves what is still to be coded, and nothing else.
"""

from typing import Any

import triton
import triton.language as tl

from ...core import cache_format as fmt
from ...quantize import Feedback
from .steps import (
    CODES,
    PAGE,
    code_channels,
    code_complements,
    load_transform,
    load_value_mean,
    rotate,
    rotate_chunks,
    row_operands,
    scale_rows,
    store_scales,
    store_words,
    token_powers,
)

HEAD_DIM_MAX = 256  # the feedback of more channels does not fit shared memory
UNIT_BITS = tl.constexpr(fmt.FEEDBACK_UNIT_BITS)
LIMIT = tl.constexpr(fmt.FEEDBACK_LIMIT)


def feedback_arguments(rotation: Any) -> dict[str, Any]:
    """The feedback of both roles as kernels take it: None and 0 blocks for what is rounded to the nearest."""
    arguments: dict[str, Any] = {}
    for role in ("key", "value"):
        feedback: Feedback | None = getattr(rotation, f"{role}_feedback", None)
        arguments[f"{role}_feedback_ptr"] = None if feedback is None else feedback.matrix.contiguous()
        arguments[f"{role}_shift_ptr"] = None if feedback is None else feedback.shift
        arguments[f"{role.upper()}_STEPS"] = 0 if feedback is None else feedback.steps
    return arguments


def require_head_dim(rotation: Any, head_dim: int, largest: int = HEAD_DIM_MAX) -> None:
    """Raises NotImplementedError where a rotation has feedback and too many channels for a kernel."""
    fed = any(getattr(rotation, f"{role}_feedback", None) is not None for role in ("key", "value"))
    if fed and head_dim > largest:
        raise NotImplementedError(f"head_dim {head_dim}: sequential rounding up to {largest}")


@triton.jit
def sequential_complements(
    y, threshold, feedback_ptr, shift,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """3 - code of y int32 [R, DP] with thresholds [R]; feedback_ptr and shift are those of the head."""
    channel = code_channels(DP, IS_KEY)
    mask = (channel < D)[:, None] & (channel < D)[None, :]
    feedback = tl.load(feedback_ptr + channel[:, None] * D + channel[None, :], mask=mask, other=0)
    exponent = (tl.maximum(threshold, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    p = exponent - UNIT_BITS - shift
    down, up = tl.maximum(p, 0), tl.maximum(-p, 0)
    w = (y << up[:, None]) >> down[:, None]
    bound = ((threshold << up) >> down)[:, None]
    complements = tl.zeros(y.shape, tl.int32)
    for step in tl.static_range(STEPS):
        here = code_complements(w, bound)
        own = (channel // (D // STEPS) == step)[None, :]
        complements = tl.where(own, here, complements)
        if step + 1 < STEPS:
            rest = w - (((3 - 2 * here) * bound) >> 1)
            unit = (rest + ((1 << shift) >> 1)) >> shift
            unit = tl.minimum(tl.maximum(unit, -LIMIT), LIMIT)
            w += tl.dot(tl.where(own, unit, 0).to(tl.int8), feedback, out_dtype=tl.int32)
    return complements


@triton.jit
def _role(
    rows_ptr, stride_page, stride_token, head, row0, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr, feedback_ptr, shift_ptr,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Pages program_id(1), program_id(1) + programs, ... of one head and role; rows_ptr is at the head.

    STEPS = 0: a role without feedback.
    """
    transform_ptr += head * stride_rotation * D * D
    multiplier = tl.load(multiplier_ptr + head * stride_rotation)
    t_high, t_low = load_transform(transform_ptr, IS_KEY, D, DP, CHUNK)
    value_mean, value_mean_largest, powers = 0, 0, 0
    if not IS_KEY:
        mean_ptr += head * stride_rotation * D
        value_mean, value_mean_largest = load_value_mean(mean_ptr, D, DP, True)
        powers = token_powers(ROWS)
    for i in tl.range(tl.program_id(1), num_pages, tl.num_programs(1), num_stages=1):
        page = tl.cast(i, tl.int64)
        page_ptr = rows_ptr + page * stride_page
        slot = page * K + head
        page_mean_ptr = mean_ptr + slot * D if IS_KEY else mean_ptr
        if CHUNK == DP:
            high, low, exponent = row_operands(
                page_ptr, stride_token, value_mean, value_mean_largest, page_mean_ptr, row0, True,
                IS_KEY, D, DP, ROWS,
            )  # fmt: skip
            y = rotate(high, low, t_high, t_low)
        else:
            _, exponent, factor, largest = scale_rows(
                page_ptr, stride_token, value_mean, value_mean_largest, page_mean_ptr, row0, True,
                IS_KEY, D, DP, ROWS,
            )  # fmt: skip
            y = rotate_chunks(
                page_ptr, stride_token, factor, largest, page_mean_ptr, row0, transform_ptr,
                IS_KEY, D, DP, ROWS, CHUNK,
            )  # fmt: skip
        threshold = store_scales(y, exponent, multiplier, scale_ptr + slot * PAGE, row0, D, ROWS)
        if STEPS == 0:
            complements = code_complements(y, threshold[:, None])
        else:
            shift = tl.load(shift_ptr + head * stride_rotation)
            own = feedback_ptr + head * stride_rotation * D * D
            complements = sequential_complements(y, threshold, own, shift, IS_KEY, D, DP, STEPS)
        store_words(complements, powers, codes_ptr + slot * (PAGE * D // CODES), row0, IS_KEY, D, DP, ROWS)


@triton.jit(do_not_specialize=["num_pages"])
def sequential_kernel(
    key_ptr, value_ptr, stride_page, stride_token, stride_head, num_pages,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    key_feedback_ptr, key_shift_ptr, value_feedback_ptr, value_shift_ptr,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    KEY_STEPS: tl.constexpr, VALUE_STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (K, programs, 2 * 64 / ROWS): keys, then values."""
    head = tl.program_id(0)
    row0 = tl.program_id(2) % (PAGE // ROWS) * ROWS
    if tl.program_id(2) // (PAGE // ROWS) == 0:
        _role(
            key_ptr + head * stride_head, stride_page, stride_token, head, row0, num_pages,
            key_transform_ptr, key_multiplier_ptr, stride_rotation, key_page_mean_ptr, key_codes_ptr,
            key_scale_ptr, key_feedback_ptr, key_shift_ptr, True, K, D, DP, ROWS, CHUNK, KEY_STEPS,
        )  # fmt: skip
    else:
        _role(
            value_ptr + head * stride_head, stride_page, stride_token, head, row0, num_pages,
            value_transform_ptr, value_multiplier_ptr, stride_rotation, value_mean_ptr, value_codes_ptr,
            value_scale_ptr, value_feedback_ptr, value_shift_ptr, False, K, D, DP, ROWS, CHUNK, VALUE_STEPS,
        )  # fmt: skip
