"""Page quantizer in plain Triton: center, rotate, scale, code and pack in one launch, exact to the byte.

Why: the format page defines a quantized page in integers; here every step is integer arithmetic or a
float32 operation with an exact result, so compiled code, the CPU interpreter and the Torch reference agree.
Rotation = int8 dots of 8-bit limbs with int32 accumulators. bf16 data is read and written as integer bits.

Layout: one program handles `ROWS` tokens of a page for one key/value head: all 64 in bulk, 16 where a decode
step quantizes a page and latency counts. Bulk calls walk several pages per program, so that the transform's
limbs are split once and stay on the chip. A page is bound by instructions, not by memory. What keeps them
few: rows are cleaned only where a page has something to clean, floor is one addition, codes are sums of sign
bits, keys take the columns of the transform in an order in which the channels of a word meet in one lane, and
a matrix product packs the tokens of values.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ...core import cache_format as fmt
from ...core.config import check_head_dim
from ...core.errors import DTypeError, ShapeError
from ..launch.tensors import (
    LARGE_SHARED_MEMORY,
    check_device,
    int16_bits,
    int32_pairs,
    rotation_stride,
    shared_memory,
)
from .sequential import feedback_arguments, require_head_dim, sequential_kernel
from .steps import (
    CODES,
    PAGE,
    load_transform,
    load_value_mean,
    rotate,
    rotate_chunks,
    row_operands,
    scale_rows,
    store_codes,
    token_powers,
)

# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _bulk_role(
    rows_ptr, stride_page, stride_token, head, row0, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Pages program_id(1), program_id(1) + programs, ... of one head and role; rows_ptr is at the head.

    The limbs of the next page are made at the end of a turn and handed over: limbs that a loop carries go to
    the matrix unit through shared memory, which spares the registers that a third program at a time needs.
    """
    transform_ptr += head * stride_rotation * D * D
    multiplier = tl.load(multiplier_ptr + head * stride_rotation)
    t_high, t_low = load_transform(transform_ptr, IS_KEY, D, DP, CHUNK)
    value_mean, value_mean_largest, powers = 0, 0, 0
    if not IS_KEY:
        mean_ptr += head * stride_rotation * D
        value_mean, value_mean_largest = load_value_mean(mean_ptr, D, DP, True)
        powers = token_powers(ROWS)
    first, step = tl.program_id(1), tl.num_programs(1)
    page = tl.cast(first, tl.int64)
    if CHUNK == DP:
        high, low, exponent = row_operands(
            rows_ptr + page * stride_page, stride_token, value_mean, value_mean_largest,
            mean_ptr + (page * K + head) * D, row0, True, IS_KEY, D, DP, ROWS,
        )  # fmt: skip
    for i in tl.range(first, num_pages, step, num_stages=1):
        page = tl.cast(i, tl.int64)
        page_ptr = rows_ptr + page * stride_page
        slot = page * K + head
        if CHUNK == DP:
            y = rotate(high, low, t_high, t_low)
        else:
            page_mean_ptr = mean_ptr + slot * D if IS_KEY else mean_ptr
            _, exponent, factor, largest = scale_rows(
                page_ptr, stride_token, value_mean, value_mean_largest, page_mean_ptr, row0, True,
                IS_KEY, D, DP, ROWS,
            )  # fmt: skip
            y = rotate_chunks(
                page_ptr, stride_token, factor, largest, page_mean_ptr, row0, transform_ptr,
                IS_KEY, D, DP, ROWS, CHUNK,
            )  # fmt: skip
        store_codes(
            y, exponent, multiplier, powers, codes_ptr + slot * (PAGE * D // CODES), scale_ptr + slot * PAGE,
            row0, IS_KEY, D, DP, ROWS,
        )  # fmt: skip
        if CHUNK == DP:
            high, low, exponent = row_operands(
                page_ptr + step * stride_page, stride_token, value_mean, value_mean_largest,
                mean_ptr + (slot + step * K) * D, row0, i + step < num_pages, IS_KEY, D, DP, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_pages"])
def _bulk_kernel(
    key_ptr, value_ptr, stride_page, stride_token, stride_head, num_pages,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    FIRST_ROLE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (K, programs, roles * 64 / ROWS): keys, then values; values alone with FIRST_ROLE = 1.

    Programs start in this order, so that the programs of a multiprocessor mostly run the same instructions.
    """
    head = tl.program_id(0)
    role = tl.program_id(2) // (PAGE // ROWS) + FIRST_ROLE
    row0 = tl.program_id(2) % (PAGE // ROWS) * ROWS
    if role == 0:
        _bulk_role(
            key_ptr + head * stride_head, stride_page, stride_token, head, row0, num_pages,
            key_transform_ptr, key_multiplier_ptr, stride_rotation, key_page_mean_ptr, key_codes_ptr,
            key_scale_ptr, True, K, D, DP, ROWS, CHUNK,
        )  # fmt: skip
    else:
        _bulk_role(
            value_ptr + head * stride_head, stride_page, stride_token, head, row0, num_pages,
            value_transform_ptr, value_multiplier_ptr, stride_rotation, value_mean_ptr, value_codes_ptr,
            value_scale_ptr, False, K, D, DP, ROWS, CHUNK,
        )  # fmt: skip


# Bulk programs per multiprocessor and role: as many as run at a time, each with its transform on the chip.
BULK_PROGRAMS = 3


def _bulk_tiles(head_dim: int, device: torch.device) -> dict[str, int]:
    """Tile sizes of bulk calls: padded channels, rows per program, contraction chunk, warps."""
    check_head_dim(head_dim)
    padded = max(32, triton.next_power_of_2(head_dim))
    if padded <= 128:
        return {"DP": padded, "ROWS": 64, "CHUNK": padded, "num_warps": 4, "maxnreg": 168}
    if padded == 256:
        chunk = 256 if shared_memory(device) >= LARGE_SHARED_MEMORY else 32
        return {"DP": padded, "ROWS": 64, "CHUNK": chunk, "num_warps": 8}
    return {"DP": padded, "ROWS": 16, "CHUNK": 32, "num_warps": 8}


# Starts a bulk kernel: its arguments, the number of roles (keys, values) and its constants.
Launch = Callable[[tuple, int, dict[str, int]], None]


@dataclasses.dataclass
class _Role:
    """What a bulk launch reads and writes for keys, or for values."""

    rows: torch.Tensor  # int32 pairs [P, 64, K, D / 2]
    transform: torch.Tensor
    multiplier: torch.Tensor
    mean: torch.Tensor  # of values: read; of keys: written
    codes: torch.Tensor
    scale: torch.Tensor


def _prepare(
    role: str,
    rows: torch.Tensor,
    transform: torch.Tensor,
    multiplier: torch.Tensor,
    mean: torch.Tensor | None = None,
) -> _Role:
    """Checks pages of rows [P, 64, K, D] and allocates what they are quantized into."""
    if rows.ndim != 4 or rows.shape[1] != fmt.PAGE_TOKENS:
        raise ShapeError(f"rows has shape {tuple(rows.shape)}, needed: [P, {fmt.PAGE_TOKENS}, K, D]")
    if transform.dtype != torch.int16:
        raise DTypeError(f"transform is {transform.dtype}, needed: torch.int16")
    num_pages, _, heads, head_dim = rows.shape
    check_head_dim(head_dim)
    rotation_stride(transform.shape[0], heads)
    check_device(rows)

    def empty(name: str) -> torch.Tensor:
        shape = fmt.int2_array_shapes(num_pages, heads, head_dim)[name]
        return torch.empty(shape, dtype=getattr(torch, fmt.INT2_ARRAYS[name]), device=rows.device)

    mean = empty("key_page_mean") if mean is None else mean.contiguous()
    arrays = (empty(f"{role}_codes"), empty(f"{role}_scale"))
    return _Role(int32_pairs(rows), transform.contiguous(), multiplier, mean, *arrays)


def _quantize(keys: _Role | None, values: _Role | None, launch: Launch) -> None:
    """Quantizes the pages of one role or, in the same launch, of both."""
    roles = [role for role in (keys, values) if role is not None]
    if len({role.rows.shape for role in roles}) > 1:
        raise ShapeError(f"pages of keys and values differ: {[tuple(role.rows.shape) for role in roles]}")
    if len({role.rows.stride() for role in roles}) > 1:
        for role in roles:
            role.rows = role.rows.contiguous()
    # A role that does not run is given the arrays of the other.
    key, value = roles[0], roles[-1]
    num_pages, _, heads, _ = key.rows.shape
    if num_pages == 0:
        return
    arguments = (
        key.rows, value.rows, *key.rows.stride()[:3], num_pages, key.transform, value.transform,
        key.multiplier, value.multiplier, int16_bits(value.mean),
        rotation_stride(key.transform.shape[0], heads), key.codes, value.codes, int16_bits(key.scale),
        int16_bits(value.scale), int16_bits(key.mean),
    )  # fmt: skip
    launch(arguments, len(roles), {"FIRST_ROLE": int(keys is None), "K": heads, "D": 2 * key.rows.shape[-1]})


def _launch_bulk(arguments: tuple, roles: int, constants: dict[str, int]) -> None:
    device, heads, num_pages = arguments[0].device, constants["K"], arguments[5]
    tiles = _bulk_tiles(constants["D"], device)
    blocks = fmt.PAGE_TOKENS // tiles["ROWS"]
    programs = bulk_programs(device, num_pages, heads * blocks, BULK_PROGRAMS)
    _bulk_kernel[(heads, programs, roles * blocks)](*arguments, **constants, **tiles)


def _launch_sequential(
    feedback: dict[str, Any], arguments: tuple, roles: int, constants: dict[str, int]
) -> None:
    """Keys and values in one launch; `feedback`: of `feedback_arguments`."""
    device, heads, num_pages = arguments[0].device, constants["K"], arguments[5]
    tiles = _bulk_tiles(constants["D"], device)
    blocks = fmt.PAGE_TOKENS // tiles["ROWS"]
    programs = bulk_programs(device, num_pages, heads * blocks, BULK_PROGRAMS)
    sequential_kernel[(heads, programs, roles * blocks)](
        *arguments, **feedback, K=heads, D=constants["D"], **tiles
    )


def bulk_programs(device: torch.device, num_pages: int, blocks: int, resident: int) -> int:
    """Programs of a bulk launch that share the pages of one role and block: few, to reuse the transform."""
    slots = 4
    if device.type == "cuda":
        slots = resident * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(num_pages, slots // blocks))


def quantize_key_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor, *, launch: Launch = _launch_bulk
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize pages of keys: center by the page's mean, rotate, scale, code and pack along channels.

    rows bf16 [P, 64, K, D] (other floats are rounded to bf16), transform int16 [1 or K, D, D], multiplier
    int32 [1 or K] -> words int32 [P, K, 64, D / 16], scale bf16 [P, K, 64], page mean bf16 [P, K, D].
    Raises ShapeError, DTypeError, ConfigError (head_dim), NotImplementedError (device).
    Format page, section 2.
    """
    keys = _prepare("key", rows, transform, multiplier)
    _quantize(keys, None, launch)
    return keys.codes, keys.scale, keys.mean


def quantize_value_pages(
    rows: torch.Tensor,
    transform: torch.Tensor,
    multiplier: torch.Tensor,
    mean: torch.Tensor,
    *,
    launch: Launch = _launch_bulk,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize pages of values: center by the calibrated mean, rotate, scale, code and pack along tokens.

    rows bf16 [P, 64, K, D], transform int16 [1 or K, D, D], multiplier int32 [1 or K], mean bf16 [1 or K, D]
    -> words int32 [P, K, D, 4], scale bf16 [P, K, 64].
    Raises ShapeError, DTypeError, ConfigError (head_dim), NotImplementedError (device).
    Format page, section 2.
    """
    if mean.shape[0] != transform.shape[0]:
        raise ShapeError(f"mean has {mean.shape[0]} heads, transform has {transform.shape[0]}")
    values = _prepare("value", rows, transform, multiplier, mean)
    _quantize(None, values, launch)
    return values.codes, values.scale


def quantize_page_pair(
    key_pages: torch.Tensor, value_pages: torch.Tensor, rotation, *, launch: Launch | None = None
) -> dict[str, torch.Tensor]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name.

    A rotation with feedback is rounded sequentially; NotImplementedError above 256 channels. Another kernel's
    `launch` sees to the feedback itself.
    """
    if launch is None:
        require_head_dim(rotation, key_pages.shape[-1])
        feedback = feedback_arguments(rotation)
        fed = feedback["KEY_STEPS"] + feedback["VALUE_STEPS"] > 0
        launch = functools.partial(_launch_sequential, feedback) if fed else _launch_bulk
    keys = _prepare("key", key_pages, rotation.key_transform, rotation.key_multiplier)
    values = _prepare(
        "value", value_pages, rotation.value_transform, rotation.value_multiplier, rotation.value_mean
    )
    _quantize(keys, values, launch)
    return {
        "key_codes": keys.codes,
        "value_codes": values.codes,
        "key_scale": keys.scale,
        "value_scale": values.scale,
        "key_page_mean": keys.mean,
    }
