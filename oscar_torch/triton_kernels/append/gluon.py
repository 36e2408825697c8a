"""One new token per sequence in Gluon: a whole page of one sequence per program."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ..launch.repeated import Launch
from ..launch.tensors import check_hopper
from ..quantize.gluon import PLANS, SEQUENTIAL_HEAD_DIM_MAX
from ..quantize.gluon_page import (
    center_tile,
    everywhere,
    role_memory,
    store_page,
    tile_offsets,
)
from ..quantize.gluon_sequential import load_feedback, stage_feedback
from ..quantize.sequential import require_head_dim
from ..quantize.steps import PAGE
from . import triton as plain


@gluon.jit
def _flush_page(
    rows_ptr, source, target, head, transform_ptr, multiplier_ptr, stride_rotation, mean_ptr,
    codes_ptr, scale_ptr, feedback_ptr, shift_ptr,
    IS_KEY: gl.constexpr, K: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Quantizes one window page of one head into an INT2 page of the cache."""
    rows_ptr += (gl.cast(source, gl.int64) * K + head) * (PAGE * D // 2) + tile_offsets(D // 2, D)
    rotation = head * stride_rotation
    multiplier = gl.load(multiplier_ptr + rotation)
    loaded, fed_shift = load_feedback(feedback_ptr, shift_ptr, head, stride_rotation, D, STEPS)
    t_high, t_low, tile, mean, scratch, sums, mean_top = role_memory(
        transform_ptr + rotation * D * D, mean_ptr + rotation * D, IS_KEY, D, STEPS
    )
    feedback = stage_feedback(loaded, D, STEPS)
    async_copy.async_copy_global_to_shared(tile, rows_ptr)
    async_copy.commit_group()
    slot = gl.cast(target, gl.int64) * K + head
    z, top = center_tile(tile, mean, scratch, sums, mean_top, mean_ptr + slot * D, IS_KEY, D)
    store_page(
        z, top, t_high, t_low, multiplier, feedback, fed_shift, codes_ptr, scale_ptr, slot, IS_KEY, D, STEPS
    )


@gluon.jit
def _take(count_ptr, shift):
    """`triton._take` of one count."""
    old = gl.atomic_add(count_ptr, gl.cast(1, gl.int32) << shift, sem="relaxed")
    return old & ((1 << shift) - 1), (old >> shift) == gl.num_programs(0) - 1


@gluon.jit
def _append_role(
    row_ptr, new_lengths_ptr, lengths_ptr, history_ptr, shift, page_table_ptr, stride_table,
    window_table_ptr, window_ptr, transform_ptr, multiplier_ptr, stride_rotation, mean_ptr,
    codes_ptr, scale_ptr, feedback_ptr, feedback_shift_ptr,
    IS_KEY: gl.constexpr, SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr, SLOTS: gl.constexpr,
    K: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """The new row of one sequence and head, and the page that leaves the recent part."""
    head, sequence = gl.program_id(0) // 2, gl.program_id(1)
    # All that is read to store a row, at once: with a cold cache each of these is a way to the memory.
    pair = gl.arange(0, D // 2, layout=gl.BlockedLayout([1], [32], [4], [0]))
    row = gl.load(row_ptr + (sequence * K + head) * (D // 2) + pair)
    slot = gl.arange(0, SLOTS, layout=everywhere(SLOTS))
    window_slots: gl.constexpr = SINK_PAGES + RECENT_SLOTS
    table = gl.load(window_table_ptr + sequence * window_slots + slot, mask=slot < window_slots, other=0)
    new = gl.load(new_lengths_ptr + sequence)
    length, last_length = _take(lengths_ptr + sequence, shift)
    history, last_history = _take(history_ptr + sequence, shift)

    # Nothing is written where the tables have no room, or more or less than a row is claimed: the length says
    # so from then on, capacity + 1.
    due = (length + 1) // PAGE - (window_slots - 1)
    past = (stride_table + window_slots) * PAGE
    stores = (new == 1) & (length + 1 < past) & (history <= stride_table)
    length_after = gl.where(new != 0, gl.where(stores, length + 1, past), length)
    gl.store(lengths_ptr + sequence, length_after, mask=last_length)
    gl.store(history_ptr + sequence, gl.maximum(history, gl.where(stores, due, 0)), mask=last_history)

    page = length // PAGE
    place = gl.where(page < SINK_PAGES, page, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    physical = gl.cast(gl.sum(gl.where(slot == place, table, 0), 0), gl.int64)
    target = ((physical * K + head) * PAGE + length % PAGE) * (D // 2)
    gl.store(window_ptr + target + pair, row, mask=stores & (physical > 0) & (pair >= 0))  # 0: nobody's
    if stores & (due > history):
        place = SINK_PAGES + history % RECENT_SLOTS
        flushed = gl.load(page_table_ptr + sequence * stride_table + history)
        if flushed > 0:
            _flush_page(
                window_ptr, gl.sum(gl.where(slot == place, table, 0), 0), flushed, head, transform_ptr,
                multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr, feedback_ptr,
                feedback_shift_ptr, IS_KEY, K, D, STEPS,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["shift", "stride_table"])
def _append_kernel(
    key_ptr, value_ptr, new_lengths_ptr, lengths_ptr, history_ptr, shift, page_table_ptr, stride_table,
    window_table_ptr, window_key_ptr, window_value_ptr,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    key_feedback_ptr, key_shift_ptr, value_feedback_ptr, value_shift_ptr,
    SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr, SLOTS: gl.constexpr, K: gl.constexpr,
    D: gl.constexpr, KEY_STEPS: gl.constexpr, VALUE_STEPS: gl.constexpr,
):  # fmt: skip
    """Grid (2 K, batch): the kernel of `triton.py` with a whole page of one sequence per program."""
    if gl.program_id(0) % 2 == 0:
        _append_role(
            key_ptr, new_lengths_ptr, lengths_ptr, history_ptr, shift, page_table_ptr, stride_table,
            window_table_ptr, window_key_ptr, key_transform_ptr, key_multiplier_ptr, stride_rotation,
            key_page_mean_ptr, key_codes_ptr, key_scale_ptr, key_feedback_ptr, key_shift_ptr,
            True, SINK_PAGES, RECENT_SLOTS, SLOTS, K, D, KEY_STEPS,
        )  # fmt: skip
    else:
        _append_role(
            value_ptr, new_lengths_ptr, lengths_ptr, history_ptr, shift, page_table_ptr, stride_table,
            window_table_ptr, window_value_ptr, value_transform_ptr, value_multiplier_ptr, stride_rotation,
            value_mean_ptr, value_codes_ptr, value_scale_ptr, value_feedback_ptr, value_shift_ptr,
            False, SINK_PAGES, RECENT_SLOTS, SLOTS, K, D, VALUE_STEPS,
        )  # fmt: skip


HEAD_DIMS = (64, 128)


def append_token(cache, rotation, key: torch.Tensor, value: torch.Tensor, new_lengths: torch.Tensor) -> None:
    """`append.triton.append_token`; raises NotImplementedError too for a head_dim not served."""
    plain.prepared(cache, rotation, key, value, new_lengths, "append.gluon", _launch)


def _launch(cache, rotation) -> Launch:
    check_hopper(cache.window_key)
    head_dim = cache.config.head_dim
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim = {head_dim}: Gluon appends with {HEAD_DIMS}")
    require_head_dim(rotation, head_dim, SEQUENTIAL_HEAD_DIM_MAX)
    parts = 2 * cache.config.num_key_value_heads
    fixed = plain.fixed_arguments(cache, rotation, parts)
    _, warps, registers = PLANS[head_dim]
    grid = (parts, cache.batch)
    return Launch(_append_kernel, grid, plain.CHANGING, fixed, num_warps=warps, maxnreg=registers)
