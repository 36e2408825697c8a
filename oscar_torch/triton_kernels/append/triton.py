"""One new token per sequence in plain Triton: stores its rows, quantizes the page that leaves."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ...core import cache_format as fmt
from ...core.config import check_head_dim
from ...core.errors import ShapeError
from ..launch.repeated import Launch, remembered
from ..launch.tensors import check_device, int16_bits, int32_pairs, rotation_stride
from ..quantize.sequential import feedback_arguments, require_head_dim, sequential_complements
from ..quantize.steps import (
    CODES,
    PAGE,
    load_transform,
    load_value_mean,
    rotate,
    rotate_chunks,
    row_operands,
    scale_rows,
    store_codes,
    store_scales,
    store_words,
    token_powers,
)


@triton.jit
def _flush_page(
    rows_ptr, source, target, head, transform_ptr, t_high, t_low, multiplier_ptr, mean_ptr, stride_rotation,
    codes_ptr, scale_ptr, feedback_ptr, shift_ptr, row0,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Quantize `ROWS` rows of one window page of one head into an INT2 page of the cache.

    STEPS: blocks of sequential rounding, 0 to the nearest.
    """
    slot = target * K + head
    rows_ptr += (source * K + head) * (PAGE * D // 2)
    value_mean, value_mean_largest, powers = 0, 0, 0
    if IS_KEY:
        mean_ptr += slot * D
    else:
        mean_ptr += head * stride_rotation * D
        value_mean, value_mean_largest = load_value_mean(mean_ptr, D, DP, True)
        powers = token_powers(ROWS)
    if CHUNK == DP:
        high, low, exponent = row_operands(
            rows_ptr, D // 2, value_mean, value_mean_largest, mean_ptr, row0, True, IS_KEY, D, DP, ROWS
        )
        y = rotate(high, low, t_high, t_low)
    else:
        _, exponent, factor, largest = scale_rows(
            rows_ptr, D // 2, value_mean, value_mean_largest, mean_ptr, row0, True, IS_KEY, D, DP, ROWS
        )
        y = rotate_chunks(
            rows_ptr, D // 2, factor, largest, mean_ptr, row0, transform_ptr, IS_KEY, D, DP, ROWS, CHUNK
        )
    multiplier = tl.load(multiplier_ptr + head * stride_rotation)
    if STEPS == 0:
        store_codes(
            y, exponent, multiplier, powers, codes_ptr + slot * (PAGE * D // CODES), scale_ptr + slot * PAGE,
            row0, IS_KEY, D, DP, ROWS,
        )  # fmt: skip
    else:
        threshold = store_scales(y, exponent, multiplier, scale_ptr + slot * PAGE, row0, D, ROWS)
        own = feedback_ptr + head * stride_rotation * D * D
        shift = tl.load(shift_ptr + head * stride_rotation)
        complements = sequential_complements(y, threshold, own, shift, IS_KEY, D, DP, STEPS)
        store_words(complements, powers, codes_ptr + slot * (PAGE * D // CODES), row0, IS_KEY, D, DP, ROWS)


@triton.jit
def _flush_role(
    rows_ptr, flushes, sources, targets, head, transform_ptr, multiplier_ptr, mean_ptr, stride_rotation,
    codes_ptr, scale_ptr, feedback_ptr, shift_ptr, row0,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """`_flush_page` for every entry of `flushes`, `sources` and `targets` [N] that flushes."""
    transform_ptr += head * stride_rotation * D * D
    t_high, t_low = load_transform(transform_ptr, IS_KEY, D, DP, CHUNK)
    entry = tl.arange(0, flushes.shape[0])
    for i in range(flushes.shape[0]):
        own = flushes & (entry == i)
        if tl.max(own.to(tl.int32), 0) > 0:
            source = tl.sum(tl.where(own, sources, 0), 0).to(tl.int64)
            target = tl.sum(tl.where(own, targets, 0), 0).to(tl.int64)
            _flush_page(
                rows_ptr, source, target, head, transform_ptr, t_high, t_low, multiplier_ptr, mean_ptr,
                stride_rotation, codes_ptr, scale_ptr, feedback_ptr, shift_ptr, row0,
                IS_KEY, K, D, DP, ROWS, CHUNK, STEPS,
            )  # fmt: skip


@triton.jit
def _take(count_ptrs, mask, shift):
    """Reads counts that every program of a launch reads and the last one writes -> (counts, is the last).

    The bits from `shift` on say how many programs have read: one atomic addition reads and signs off.
    """
    old = tl.atomic_add(count_ptrs, tl.full(mask.shape, 1, tl.int32) << shift, mask=mask, sem="relaxed")
    return old & ((1 << shift) - 1), (old >> shift) == tl.num_programs(0) - 1


@triton.jit
def _load_new_rows(rows_ptr, sequences, head, mask, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    pair = tl.arange(0, DP // 2)
    offsets = (sequences[:, None] * K + head) * (D // 2) + pair[None, :]
    return tl.load(rows_ptr + offsets, mask=mask[:, None] & (pair < D // 2)[None, :], other=0)


@triton.jit
def _store_new_rows(
    rows, window_ptr, slots, head, tokens, mask, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    pair = tl.arange(0, DP // 2)
    first = ((slots.to(tl.int64) * K + head) * PAGE + tokens % PAGE) * (D // 2)
    target = window_ptr + first[:, None] + pair[None, :]
    tl.store(target, rows, mask=mask[:, None] & (pair < D // 2)[None, :])


@triton.jit(do_not_specialize=["batch", "shift", "stride_table"])
def _append_kernel(
    batch, key_ptr, value_ptr, new_lengths_ptr, lengths_ptr, history_ptr, shift, page_table_ptr,
    stride_table, window_table_ptr, window_key_ptr, window_value_ptr,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    key_feedback_ptr, key_shift_ptr, value_feedback_ptr, value_shift_ptr,
    SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, ENTRIES: tl.constexpr,
    KEY_STEPS: tl.constexpr, VALUE_STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (2 * K * 64 / ROWS, batch / ENTRIES): one new row of `ENTRIES` sequences, and where a page leaves
    the recent part, `ROWS` rows of it quantized.

    The first 2 * K programs store the new rows. The page that leaves and the page of the new row are never
    the same slot, so programs do not wait; the last to have read the counts of a sequence writes them.
    KEY_STEPS, VALUE_STEPS: blocks of sequential rounding; 0, with None for the feedback: to the nearest.
    """
    part = tl.program_id(0)
    head = part // 2 % K
    is_key = part % 2 == 0
    row0 = part // (2 * K) * ROWS
    sequence = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    live = sequence < batch
    # All that is read to store a row, at once: with a cold cache each of these is a way to the memory.
    rows_ptr = value_ptr
    if is_key:
        rows_ptr = key_ptr
    rows = _load_new_rows(rows_ptr, sequence, head, live & (row0 == 0), K, D, DP)
    slot = tl.arange(0, SLOTS)
    table_mask = live[:, None] & (slot < SINK_PAGES + RECENT_SLOTS)[None, :]
    table_ptr = window_table_ptr + sequence[:, None] * (SINK_PAGES + RECENT_SLOTS) + slot[None, :]
    table = tl.load(table_ptr, mask=table_mask, other=0)
    new = tl.load(new_lengths_ptr + sequence, mask=live, other=0)
    is_length = tl.arange(0, 2)[None, :] == 0
    count_ptrs = tl.where(is_length, lengths_ptr + sequence[:, None], history_ptr + sequence[:, None])
    count_mask = live[:, None] & (tl.arange(0, 2) >= 0)[None, :]
    counts, is_last = _take(count_ptrs, count_mask, shift)
    length, history = tl.split(counts)

    # Nothing is written where the tables have no room, or more or less than a row is claimed: the length says
    # so from then on, capacity + 1.
    due = (length + 1) // PAGE - (SINK_PAGES + RECENT_SLOTS - 1)
    past = (stride_table + SINK_PAGES + RECENT_SLOTS) * PAGE
    stores = live & (new == 1) & (length + 1 < past) & (history <= stride_table)
    length_after = tl.where(new != 0, tl.where(stores, length + 1, past), length)
    history_after = tl.maximum(history, tl.where(stores, due, 0))
    tl.store(count_ptrs, tl.join(length_after, history_after), mask=count_mask & is_last)

    page = length // PAGE
    place = tl.where(page < SINK_PAGES, page, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    physical = tl.sum(tl.where(slot[None, :] == place[:, None], table, 0), 1)
    stored = stores & (row0 == 0) & (physical > 0)  # page 0 belongs to nobody
    if is_key:
        _store_new_rows(rows, window_key_ptr, physical, head, length, stored, K, D, DP)
    else:
        _store_new_rows(rows, window_value_ptr, physical, head, length, stored, K, D, DP)

    flushes = stores & (due > history)
    if tl.max(flushes.to(tl.int32), 0) > 0:
        place = SINK_PAGES + history % RECENT_SLOTS
        sources = tl.sum(tl.where(slot[None, :] == place[:, None], table, 0), 1)
        targets = tl.load(page_table_ptr + sequence * stride_table + history, mask=flushes, other=0)
        flushes &= targets > 0
        if is_key:
            _flush_role(
                window_key_ptr, flushes, sources, targets, head, key_transform_ptr, key_multiplier_ptr,
                key_page_mean_ptr, stride_rotation, key_codes_ptr, key_scale_ptr, key_feedback_ptr,
                key_shift_ptr, row0, True, K, D, DP, ROWS, CHUNK, KEY_STEPS,
            )  # fmt: skip
        else:
            _flush_role(
                window_value_ptr, flushes, sources, targets, head, value_transform_ptr, value_multiplier_ptr,
                value_mean_ptr, stride_rotation, value_codes_ptr, value_scale_ptr, value_feedback_ptr,
                value_shift_ptr, row0, False, K, D, DP, ROWS, CHUNK, VALUE_STEPS,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------- entry points

# Sequences per program of an append or a flush.
ENTRIES = 4


def _flush_tiles(head_dim: int) -> dict[str, int]:
    """Tile sizes where few pages are quantized and none is to wait: a quarter of a page per program."""
    check_head_dim(head_dim)
    padded = max(32, triton.next_power_of_2(head_dim))
    if padded <= 128:
        return {"DP": padded, "ROWS": 16, "CHUNK": padded, "num_warps": 4, "maxnreg": 128}
    return {"DP": padded, "ROWS": 16, "CHUNK": 32, "num_warps": 8}


def append_token(cache, rotation, key: torch.Tensor, value: torch.Tensor, new_lengths: torch.Tensor) -> None:
    """Appends at most one row per sequence and quantizes the pages that become history, in one launch.

    key, value bf16 [B, 1, K, D] (other floats are rounded to bf16); new_lengths int32 [B], 0 or 1. Leaves the
    bytes of `cache.append_rows`, without a host synchronization and hence CUDA-graph capturable; for the same
    reason the caller makes sure beforehand that the page tables have room. A row that would need a page
    beyond the table is dropped: nothing is written for its sequence, and its length becomes capacity + 1,
    which makes its attention NaN (`cache.overflowed`). While the kernel runs, the upper bits of lengths and
    history_pages count the programs that have read them. Raises ShapeError, NotImplementedError (device; more
    tokens and heads than 32 bits can count; sequential rounding above 256 channels). Format page, section 4.
    """
    prepared(cache, rotation, key, value, new_lengths, "append.triton", _launch)


def _launch(cache, rotation) -> Launch:
    require_head_dim(rotation, cache.config.head_dim)
    tiles = _flush_tiles(cache.config.head_dim)
    parts = _parts(cache.config.num_key_value_heads, tiles)
    fixed = fixed_arguments(cache, rotation, parts) | {"batch": cache.batch, "ENTRIES": ENTRIES}
    options = {name: tiles.pop(name) for name in ("num_warps", "maxnreg") if name in tiles}
    grid = (parts, triton.cdiv(cache.batch, ENTRIES))
    return Launch(_append_kernel, grid, CHANGING, fixed | tiles, **options)


CHANGING = ("key_ptr", "value_ptr", "new_lengths_ptr")


def prepared(
    cache, rotation, key: torch.Tensor, value: torch.Tensor, new_lengths: torch.Tensor, kernel: str,
    prepare: Callable[[Any, Any], Launch],
) -> None:  # fmt: skip
    """Checks the rows and launches what `prepare` makes of cache and rotation, the first time."""
    launch = remembered(cache, rotation, (kernel, new_lengths.dtype), lambda: prepare(cache, rotation))
    config = cache.config
    expected = (cache.batch, 1, config.num_key_value_heads, config.head_dim)
    for name, rows in (("key", key), ("value", value)):
        if rows.shape != expected:
            raise ShapeError(f"{name} rows {tuple(rows.shape)}, expected {expected}")
    launch(int32_pairs(key.contiguous()), int32_pairs(value.contiguous()), new_lengths)


def fixed_arguments(cache, rotation, parts: int) -> dict[str, Any]:
    """Arguments and constants of an append kernel whose `parts` programs read each count, by name."""
    config = cache.config
    heads = config.num_key_value_heads
    check_device(cache.window_key)
    shift = int(cache.capacity + 1).bit_length()
    if parts << shift > 1 << 31:
        raise NotImplementedError(f"{heads} key/value heads with tables for {cache.capacity} tokens")
    return {
        "lengths_ptr": cache.lengths, "history_ptr": cache.history_pages, "shift": shift,
        "page_table_ptr": cache.page_table, "stride_table": cache.page_table.shape[1],
        "window_table_ptr": cache.window_table, "window_key_ptr": cache.window_key.view(torch.int32),
        "window_value_ptr": cache.window_value.view(torch.int32),
        "key_transform_ptr": rotation.key_transform, "value_transform_ptr": rotation.value_transform,
        "key_multiplier_ptr": rotation.key_multiplier, "value_multiplier_ptr": rotation.value_multiplier,
        "value_mean_ptr": int16_bits(rotation.value_mean),
        "stride_rotation": rotation_stride(rotation.key_transform.shape[0], heads),
        "key_codes_ptr": cache.key_codes, "value_codes_ptr": cache.value_codes,
        "key_scale_ptr": int16_bits(cache.key_scale), "value_scale_ptr": int16_bits(cache.value_scale),
        "key_page_mean_ptr": int16_bits(cache.key_page_mean),
        "SINK_PAGES": config.sink_pages, "RECENT_SLOTS": config.recent_slots,
        "SLOTS": triton.next_power_of_2(config.window_slots), "K": heads, "D": config.head_dim,
        **feedback_arguments(rotation),
    }  # fmt: skip


def _parts(heads: int, tiles: dict[str, int]) -> int:
    """Programs that share the pages of all heads and both roles."""
    return 2 * heads * fmt.PAGE_TOKENS // tiles["ROWS"]
