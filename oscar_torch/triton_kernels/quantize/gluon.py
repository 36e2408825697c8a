"""Page quantizer for Hopper, in Gluon: the bytes of `quantize/triton.py`, operands and codes in registers.

A program walks over pages of one head (`gluon_page.py`); the rows of a page arrive while the page before is
worked on. On an H200 instructions are issued in 51 to 53 % of the cycles, and by their number the products
take 38 to 46 %: the two hardly overlap. Pages of 256 channels are quantized by `gluon_wide.py`, where they
do; of 128 channels that takes longer (952 us instead of 679 for 4096 pages of 8 heads).
"""

import functools
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.tensors import check_hopper
from . import gluon_wide as wide
from . import triton as plain
from .gluon_page import center_tile, copy_tile, role_memory, store_page, tile_offsets
from .gluon_sequential import load_feedback, stage_feedback
from .sequential import feedback_arguments, require_head_dim


@gluon.jit
def _bulk_role(
    rows_ptr, stride_page, stride_token, head, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr, feedback_ptr, shift_ptr,
    IS_KEY: gl.constexpr, K: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Pages program_id(1), program_id(1) + programs, ... of one head and role; rows_ptr is at the head."""
    if D == wide.D:
        wide.bulk_role(
            rows_ptr, stride_page, stride_token, head, num_pages, transform_ptr, multiplier_ptr,
            stride_rotation, mean_ptr, codes_ptr, scale_ptr, IS_KEY, K,
        )  # fmt: skip
    else:
        _bulk_pages(
            rows_ptr, stride_page, stride_token, head, num_pages, transform_ptr, multiplier_ptr,
            stride_rotation, mean_ptr, codes_ptr, scale_ptr, feedback_ptr, shift_ptr, IS_KEY, K, D, STEPS,
        )  # fmt: skip


@gluon.jit
def _bulk_pages(
    rows_ptr, stride_page, stride_token, head, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr, feedback_ptr, shift_ptr,
    IS_KEY: gl.constexpr, K: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """`_bulk_role` for pages that are worked on one after the other."""
    rotation = head * stride_rotation
    multiplier = gl.load(multiplier_ptr + rotation)
    loaded, shift = load_feedback(feedback_ptr, shift_ptr, head, stride_rotation, D, STEPS)
    t_high, t_low, tile, mean, scratch, sums, mean_top = role_memory(
        transform_ptr + rotation * D * D, mean_ptr + rotation * D, IS_KEY, D, STEPS
    )
    feedback = stage_feedback(loaded, D, STEPS)
    rows_ptr += tile_offsets(stride_token, D)
    first, step = gl.program_id(1), gl.num_programs(1)
    copy_tile(rows_ptr + gl.cast(first, gl.int64) * stride_page, tile, first < num_pages)
    for i in range(first, num_pages, step):
        slot = gl.cast(i, gl.int64) * K + head
        z, top = center_tile(tile, mean, scratch, sums, mean_top, mean_ptr + slot * D, IS_KEY, D)
        copy_tile(rows_ptr + gl.cast(i + step, gl.int64) * stride_page, tile, i + step < num_pages)
        store_page(
            z, top, t_high, t_low, multiplier, feedback, shift, codes_ptr, scale_ptr, slot, IS_KEY, D, STEPS
        )


@gluon.jit(do_not_specialize=["num_pages"])
def _bulk_kernel(
    key_ptr, value_ptr, stride_page, stride_token, stride_head, num_pages,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    key_feedback_ptr, key_shift_ptr, value_feedback_ptr, value_shift_ptr,
    FIRST_ROLE: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
    KEY_STEPS: gl.constexpr, VALUE_STEPS: gl.constexpr,
):  # fmt: skip
    """Grid (K, programs, roles): keys, then values; values alone with FIRST_ROLE = 1.

    KEY_STEPS, VALUE_STEPS: blocks of sequential rounding; 0, with None for the feedback: to the nearest.

    Roles mixed on a multiprocessor take longer: 728 us instead of 677 for 4096 pages of 8 heads (H200).
    """
    head = gl.program_id(0)
    if gl.program_id(2) + FIRST_ROLE == 0:
        _bulk_role(
            key_ptr + head * stride_head, stride_page, stride_token, head, num_pages,
            key_transform_ptr, key_multiplier_ptr, stride_rotation, key_page_mean_ptr, key_codes_ptr,
            key_scale_ptr, key_feedback_ptr, key_shift_ptr, True, K, D, KEY_STEPS,
        )  # fmt: skip
    else:
        _bulk_role(
            value_ptr + head * stride_head, stride_page, stride_token, head, num_pages,
            value_transform_ptr, value_multiplier_ptr, stride_rotation, value_mean_ptr, value_codes_ptr,
            value_scale_ptr, value_feedback_ptr, value_shift_ptr, False, K, D, VALUE_STEPS,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------ entry points

# Programs per multiprocessor, warps of a program and registers per thread, by head_dim. Four programs do not
# fit the products of 128 channels without spills; with 64 channels four take 300 us, three 305 (H200).
PLANS = {64: (3, 4, 168), 128: (3, 4, 168), 256: (1, 8, 255)}
SEQUENTIAL_HEAD_DIM_MAX = 128  # with more channels no shared memory is left for the feedback


def _launch(feedback: dict[str, Any], arguments: tuple, roles: int, constants: dict[str, int]) -> None:
    """Starts the kernel; `feedback`: of `feedback_arguments`."""
    heads = constants["K"]
    resident, warps, registers = PLANS[constants["D"]]
    programs = plain.bulk_programs(arguments[0].device, arguments[5], heads, resident)
    _bulk_kernel[(heads, programs, roles)](
        *arguments, **feedback, **constants, num_warps=warps, maxnreg=registers
    )


def _launch_for(rows: torch.Tensor, rotation: Any = None) -> plain.Launch:
    """How pages of these rows are quantized, if they can be, with the feedback of a rotation."""
    check_hopper(rows)
    head_dim = rows.shape[-1]
    if head_dim not in PLANS:
        raise NotImplementedError(f"head_dim = {head_dim}: the Gluon quantizer serves {tuple(PLANS)}")
    require_head_dim(rotation, head_dim, SEQUENTIAL_HEAD_DIM_MAX)
    return functools.partial(_launch, feedback_arguments(rotation))


def quantize_key_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize.triton.quantize_key_pages`; raises NotImplementedError too for a head_dim not served."""
    return plain.quantize_key_pages(rows, transform, multiplier, launch=_launch_for(rows))


def quantize_value_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize.triton.quantize_value_pages`; raises NotImplementedError too for a head_dim not served."""
    return plain.quantize_value_pages(rows, transform, multiplier, mean, launch=_launch_for(rows))


def quantize_page_pair(
    key_pages: torch.Tensor, value_pages: torch.Tensor, rotation
) -> dict[str, torch.Tensor]:
    """`quantize.triton.quantize_page_pair`; raises NotImplementedError too for a head_dim not served.

    Sequential rounding is served up to 128 channels.
    """
    return plain.quantize_page_pair(key_pages, value_pages, rotation, launch=_launch_for(key_pages, rotation))
