"""One-token attention over a mixed INT2 / BF16 cache in plain Triton: three launches, no host wait.

Why: the history is never dequantized to memory. Codes become fp16 subnormals (code * 2**-24) by masks alone;
the query is rotated instead of the keys, the output instead of the values.

1. `_prepare_kernel`: rotates the query, takes its product with every page's mean key, and finds the largest
   value scale (which keeps the probabilities inside fp16).
2. `_stage_kernel`: split-KV flash attention. Splits 0 .. S-1 walk over INT2 pages; S .. S+W-1 take one
   BF16 page each (sink or recent). Partials: o float32 [B, N, S + W, D], log2-sum-exp [B, N, S + W].
   `decode_gluon.py` replaces this stage on Hopper.
3. `_merge_kernel`: merges the partials, applies the output transform, adds value mean and sink logits.

Scores are in log2 units everywhere. Runs in Triton's CPU interpreter. Format page, section 5.
"""

import dataclasses
import math

import torch
import triton
import triton.language as tl

from .. import cache_format as fmt
from ..config import ShapeError
from .quantize_triton import check_device, rotation_stride

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
PAGES_PER_BLOCK = 64  # history pages that one program of the prepare kernel covers
QUERY_RANGE = tl.constexpr(26000.0)  # |query| in integer steps; one and a quarter of it fits two signed bytes
CODE_UNIT = tl.constexpr(2.0**24)  # a code read as an fp16 subnormal is code * 2**-24
MAX_GROUP = 16
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the plain stage runs: programs per multiprocessor, warps, pipeline stages."""

    programs_per_processor: int = 3
    warps: int = 4
    stages: int = 2


TUNING = Tuning()


@triton.jit
def _widen(raw):
    """bf16 bits (int16) -> float32."""
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _code(words, place: tl.constexpr):
    """The codes at one place of every word, as fp16 subnormals code * 2**-24."""
    return ((words >> (2 * place)) & 3).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def unpack_codes(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Words int32 [ROWS, COLUMNS / 16] -> codes as fp16 subnormals [ROWS, COLUMNS].

    Joined pairwise, so that a thread holds the 16 codes of its word next to each other.
    """
    low = tl.join(
        tl.join(tl.join(_code(words, 0), _code(words, 8)), tl.join(_code(words, 4), _code(words, 12))),
        tl.join(tl.join(_code(words, 2), _code(words, 10)), tl.join(_code(words, 6), _code(words, 14))),
    )
    high = tl.join(
        tl.join(tl.join(_code(words, 1), _code(words, 9)), tl.join(_code(words, 5), _code(words, 13))),
        tl.join(tl.join(_code(words, 3), _code(words, 11)), tl.join(_code(words, 7), _code(words, 15))),
    )
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))


@triton.jit
def _store_query_limbs(
    rotated, limbs_ptr, factor_ptr, bias_ptr, rows, GP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rotated query float32 [ROWS, D] -> two signed bytes per head and channel, as `decode_gluon` reads them.

    A nibble of a code word is code_even + 4 code_odd. Its weight is q_odd / 4; the even code alone gets
    q_even - q_odd / 4. Column 2 h holds the high byte of head h, 2 h + 1 the low byte; padding is zero.
    """
    largest = tl.max(tl.abs(rotated), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    steps = rotated * ((1.0 / largest) * QUERY_RANGE)[:, None]
    even, odd = tl.split(tl.reshape(steps, (ROWS, D // 2, 2)))
    even = tl.floor(even + 0.5).to(tl.int32)
    odd = tl.floor(odd * 0.25 + 0.5).to(tl.int32)
    half_sum = tl.sum(even + 4 * odd, 1).to(tl.float32)
    tl.store(factor_ptr + rows, largest / QUERY_RANGE, mask=rows < GP)
    tl.store(bias_ptr + rows, tl.floor(1.5 * half_sum + 0.5), mask=rows < GP)
    channel = 2 * tl.arange(0, D // 2)
    words_per_lane: tl.constexpr = D // 64
    word = channel >> 4
    lane, j = word // words_per_lane, word % words_per_lane
    byte = (channel >> 2) & 3
    for parity in tl.static_range(2):
        v = odd if parity else even - odd
        high = (v + 128) >> 8
        low = v - (high << 8)
        part = (channel & 3) + parity
        k = ((part * words_per_lane + j) * 4 + lane) * 4 + byte
        mask = (rows < GP)[:, None] & (k >= 0)[None, :]
        tl.store(limbs_ptr + (2 * rows)[:, None] * D + k[None, :], high.to(tl.int8), mask=mask)
        tl.store(limbs_ptr + (2 * rows + 1)[:, None] * D + k[None, :], low.to(tl.int8), mask=mask)


@triton.jit
def _prepare_kernel(
    query_ptr, query_transform_ptr, stride_rotation, key_page_mean_ptr, value_scale_ptr,
    page_table_ptr, stride_table, history_ptr, softmax_scale,
    rotated_ptr, factor_ptr, bias_ptr, page_score_ptr, value_max_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LIMBS: tl.constexpr,
):  # fmt: skip
    """Grid (1 + blocks, K, B): program 0 rotates the query, program 1 + i covers history pages 64 i ..."""
    block = tl.program_id(0) - 1
    head = tl.program_id(1)
    b = tl.program_id(2)
    slot = b * K + head
    rows = tl.arange(0, ROWS)
    query_head = query_ptr + slot * G * D
    if block < 0:
        channels = tl.arange(0, DP)
        rotated = tl.zeros((ROWS, DP), tl.float32)
        for chunk in range(0, D, CHUNK):
            c = chunk + tl.arange(0, CHUNK)
            mask = (rows < G)[:, None] & (c < D)[None, :]
            q = tl.load(query_head + rows[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            mask = (c < D)[:, None] & (channels < D)[None, :]
            t_offset = head * stride_rotation * D * D + c[:, None] * D + channels[None, :]
            t = tl.load(query_transform_ptr + t_offset, mask=mask, other=0.0)
            rotated = tl.dot(q, t, acc=rotated, input_precision="tf32x3")
        rotated = rotated * softmax_scale
        if LIMBS:
            _store_query_limbs(
                rotated, rotated_ptr + slot * 2 * GP * D, factor_ptr + slot * GP, bias_ptr + slot * GP,
                rows, GP, D, ROWS,
            )  # fmt: skip
        else:
            mask = (rows < G)[:, None] & (channels < D)[None, :]
            tl.store(rotated_ptr + (slot * G + rows)[:, None] * D + channels[None, :], rotated, mask=mask)
    else:
        history = tl.load(history_ptr + b)
        if block * BLOCK < history:
            page = block * BLOCK + tl.arange(0, BLOCK)
            valid = page < history
            physical = tl.load(page_table_ptr + b * stride_table + page, mask=valid, other=0).to(tl.int64)
            physical = physical * K + head
            scores = tl.zeros((BLOCK, ROWS), tl.float32)
            for chunk in range(0, D, CHUNK):
                c = chunk + tl.arange(0, CHUNK)
                mask = valid[:, None] & (c < D)[None, :]
                mean = _widen(
                    tl.load(key_page_mean_ptr + physical[:, None] * D + c[None, :], mask=mask, other=0)
                )
                mask = (c < D)[:, None] & (rows < G)[None, :]
                q = tl.load(query_head + rows[None, :] * D + c[:, None], mask=mask, other=0.0).to(tl.float32)
                scores = tl.dot(mean, q, acc=scores, input_precision="tf32x3")
            out = page_score_ptr + (slot * stride_table + page)[:, None] * GP + rows[None, :]
            tl.store(out, scores * softmax_scale, mask=valid[:, None] & (rows < GP)[None, :])
            tokens = tl.arange(0, PAGE)
            mask = valid[:, None] & (tokens >= 0)[None, :]
            scale = tl.load(value_scale_ptr + physical[:, None] * PAGE + tokens[None, :], mask=mask, other=0)
            largest = _widen(tl.max(tl.max(scale.to(tl.int32), 1), 0).to(tl.int16))
        else:
            largest = 0.0
        tl.store(value_max_ptr + slot * (tl.num_programs(0) - 1) + block, largest)


@triton.jit
def _value_unit(value_max_ptr, blocks, BLOCKS: tl.constexpr):
    """A power of two >= every value scale of this sequence and head (1 if there is none)."""
    index = tl.arange(0, BLOCKS)
    largest = tl.max(tl.load(value_max_ptr + index, mask=index < blocks, other=0.0), 0)
    bits = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(largest > 0, bits.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _split_range(first, last, split, SPLITS: tl.constexpr):
    """The pages [low, high) of one split of [first, last)."""
    per_split = (last - first + SPLITS - 1) // SPLITS
    low = first + split * per_split
    return low, tl.minimum(low + per_split, last)


@triton.jit
def _window_page(index, history, window_table_ptr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr):
    """(token page, physical window page) of window program `index`: sink pages, then recent pages."""
    recent = index - SINK_PAGES
    page = tl.where(recent < 0, index, index + history)
    slot = tl.where(recent < 0, index, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    return page, tl.load(window_table_ptr + slot).to(tl.int64)


@triton.jit
def _history_split(
    rotated_ptr, page_score_ptr, value_max_ptr,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, page_table_ptr,
    history, oldest, blocks, slot, head, split, out_rows, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, SINK_PAGES: tl.constexpr, SLIDING: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """Flash attention over one split of the INT2 pages. page_score_ptr and value_max_ptr are at the slot."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    tokens = tl.arange(0, PAGE)
    first = tl.minimum(tl.maximum(oldest // PAGE - SINK_PAGES, 0), history) if SLIDING else 0
    low, high = _split_range(first, history, split, SPLITS)
    mask = (channels < D)[:, None] & (rows < G)[None, :]
    q = tl.load(rotated_ptr + (slot * G + rows)[None, :] * D + channels[:, None], mask=mask, other=0.0)
    largest = tl.max(tl.abs(q), 0)
    unit = tl.where(largest > 0, largest, 1.0) * (1.0 / 1024)
    q = (q / unit[None, :]).to(tl.float16)
    query_sum = 1.5 * tl.sum(q.to(tl.float32), 0)
    value_unit = _value_unit(value_max_ptr, blocks, BLOCKS) * (1.0 / 1024)
    word = tl.arange(0, DP // 16)
    token_word = tl.arange(0, PAGE // 16)
    m = tl.full((ROWS,), -1e30, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((DP, ROWS), tl.float32)
    for page in range(low, high):
        physical = tl.load(page_table_ptr + page).to(tl.int64) * K + head
        word_mask = (tokens >= 0)[:, None] & (word < D // 16)[None, :]
        offset = physical * (PAGE * D // 16)
        key_words = tl.load(
            key_codes_ptr + offset + tokens[:, None] * (D // 16) + word[None, :], mask=word_mask, other=0
        )
        channel_mask = (channels < D)[:, None] & (token_word >= 0)[None, :]
        value_words = tl.load(
            value_codes_ptr + offset + channels[:, None] * (PAGE // 16) + token_word[None, :],
            mask=channel_mask, other=0,
        )  # fmt: skip
        key_scale = _widen(tl.load(key_scale_ptr + physical * PAGE + tokens))
        value_scale = _widen(tl.load(value_scale_ptr + physical * PAGE + tokens))
        page_score = tl.load(page_score_ptr + page * GP + rows, mask=rows < G, other=0.0)
        score = tl.dot(unpack_codes(key_words, PAGE, DP), q) * CODE_UNIT - query_sum[None, :]
        score = score * key_scale[:, None] * unit[None, :] + page_score[None, :]
        if SLIDING:
            visible = tokens + (SINK_PAGES + page) * PAGE >= oldest
            score = tl.where(visible[:, None], score, -1e30)
        m_new = tl.maximum(m, tl.max(score, 0))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[None, :])
        if SLIDING:
            p = tl.where(visible[:, None], p, 0.0)
        weight = p * (value_scale / value_unit)[:, None]
        l = l * alpha + tl.sum(p, 0)
        weight_sum = weight_sum * alpha + tl.sum(weight, 0)
        acc = tl.dot(unpack_codes(value_words, DP, PAGE), weight.to(tl.float16), acc=acc * alpha[None, :])
        m = m_new
    safe = tl.where(l > 0, l, 1.0)
    o = (acc * CODE_UNIT - 1.5 * weight_sum[None, :]) * (value_unit / safe)[None, :]
    mask = (channels < D)[:, None] & (rows < G)[None, :]
    tl.store(o_ptr + out_rows[None, :].to(tl.int64) * D + channels[:, None], o, mask=mask)
    tl.store(lse_ptr + out_rows, tl.where(l > 0, m + tl.log2(safe), -float("inf")), mask=rows < G)


@triton.jit
def _window_split(
    query_ptr, window_key_ptr, window_value_ptr, window_table_ptr, length, history, oldest, softmax_scale,
    index, slot, head, out_rows, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    tokens = tl.arange(0, PAGE)
    page, physical = _window_page(index, history, window_table_ptr, SINK_PAGES, RECENT_SLOTS)
    token = page * PAGE + tokens
    visible = (token < length) & (token >= oldest)
    offset = (physical * K + head) * (PAGE * D)
    mask = visible[:, None] & (channels < D)[None, :]
    key = _widen(
        tl.load(window_key_ptr + offset + tokens[:, None] * D + channels[None, :], mask=mask, other=0)
    )
    value = _widen(
        tl.load(window_value_ptr + offset + tokens[:, None] * D + channels[None, :], mask=mask, other=0)
    )
    mask = (rows < G)[:, None] & (channels < D)[None, :]
    q = tl.load(query_ptr + (slot * G + rows)[:, None] * D + channels[None, :], mask=mask, other=0.0)
    score = tl.dot(q.to(tl.float32) * softmax_scale, tl.trans(key), input_precision="tf32x3")
    score = tl.where(visible[None, :], score, -1e30)
    m = tl.max(score, 1)
    p = tl.where(visible[None, :], tl.exp2(score - m[:, None]), 0.0)
    l = tl.sum(p, 1)
    safe = tl.where(l > 0, l, 1.0)
    o = tl.dot(p, value, input_precision="tf32x3") / safe[:, None]
    tl.store(o_ptr + out_rows[:, None].to(tl.int64) * D + channels[None, :], o, mask=mask)
    tl.store(lse_ptr + out_rows, tl.where(l > 0, m + tl.log2(safe), -float("inf")), mask=rows < G)


@triton.jit
def _stage_kernel(
    query_ptr, rotated_ptr, page_score_ptr, value_max_ptr,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, window_key_ptr, window_value_ptr,
    page_table_ptr, stride_table, window_table_ptr, lengths_ptr, history_ptr, softmax_scale, sliding_window,
    blocks, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr,
    SLIDING: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS + SINK_PAGES + RECENT_SLOTS, K, B)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2)
    slot = b * K + head
    length = tl.load(lengths_ptr + b)
    history = tl.load(history_ptr + b)
    oldest = tl.maximum(length - sliding_window, 0) if SLIDING else 0
    out_rows = (slot * G + tl.arange(0, ROWS)) * (SPLITS + SINK_PAGES + RECENT_SLOTS) + split
    if split < SPLITS:
        _history_split(
            rotated_ptr, page_score_ptr + slot * stride_table * GP, value_max_ptr + slot * blocks,
            key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr,
            page_table_ptr + b * stride_table, history, oldest, blocks, slot, head, split, out_rows,
            o_ptr, lse_ptr, K, G, GP, D, DP, ROWS, SPLITS, SINK_PAGES, SLIDING, BLOCKS,
        )  # fmt: skip
    else:
        _window_split(
            query_ptr, window_key_ptr, window_value_ptr,
            window_table_ptr + b * (SINK_PAGES + RECENT_SLOTS), length, history, oldest, softmax_scale,
            split - SPLITS, slot, head, out_rows, o_ptr, lse_ptr,
            K, G, D, DP, ROWS, SINK_PAGES, RECENT_SLOTS,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    o_ptr, lse_ptr, output_transform_ptr, value_mean_ptr, stride_rotation, sink_ptr, out_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    TOTAL: tl.constexpr, TOTAL_P: tl.constexpr, HEADS: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr, SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(G / HEADS), K, B): merge TOTAL partials of HEADS query heads, rotate the INT2 part back."""
    head = tl.program_id(1)
    b = tl.program_id(2)
    g = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    row = (b * K + head) * G + g
    channels = tl.arange(0, DP)
    s = tl.arange(0, TOTAL_P)
    mask = (g < G)[:, None] & (s < TOTAL)[None, :]
    lse = tl.load(lse_ptr + row[:, None] * TOTAL + s[None, :], mask=mask, other=-float("inf"))
    m = tl.max(lse, 1)
    if SINK_LOGITS:
        sink = tl.load(sink_ptr + head * G + g, mask=g < G, other=0.0).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m > -float("inf"), m, 0.0)
    weight = tl.exp2(lse - m[:, None])
    denominator = tl.sum(weight, 1)
    if SINK_LOGITS:
        denominator += tl.exp2(sink - m)
    denominator = tl.where(denominator > 0, denominator, 1.0)
    history_weight = tl.sum(tl.where((s < SPLITS)[None, :], weight, 0.0), 1) / denominator
    history = tl.zeros((HEADS, DP), tl.float32)
    window = tl.zeros((HEADS, DP), tl.float32)
    for start in range(0, TOTAL, STEP):
        i = start + tl.arange(0, STEP)
        step_mask = (i < TOTAL)[:, None] & (g < G)[None, :]
        step_lse = tl.load(lse_ptr + row[None, :] * TOTAL + i[:, None], mask=step_mask, other=-float("inf"))
        w = tl.exp2(step_lse - m[None, :]) / denominator[None, :]
        o_offset = (row[None, :] * TOTAL + i[:, None]).to(tl.int64)[:, :, None] * D + channels[None, None, :]
        o_mask = (w > 0)[:, :, None] & (channels < D)[None, None, :]
        o = tl.load(o_ptr + o_offset, mask=o_mask, other=0.0) * w[:, :, None]
        is_history = (i < SPLITS)[:, None, None]
        history += tl.sum(tl.where(is_history, o, 0.0), 0)
        window += tl.sum(tl.where(is_history, 0.0, o), 0)
    mean = _widen(tl.load(value_mean_ptr + head * stride_rotation * D + channels, mask=channels < D, other=0))
    out = window + history_weight[:, None] * mean[None, :]
    out_mask = (g < G)[:, None] & (channels < D)[None, :]
    transform_ptr = output_transform_ptr + head * stride_rotation * D * D
    if CHUNK == DP:
        mask = (channels < D)[:, None] & (channels < D)[None, :]
        t = tl.load(transform_ptr + channels[:, None] * D + channels[None, :], mask=mask, other=0.0)
        out = tl.dot(history, t, acc=out, input_precision="tf32x3")
    else:  # a register tile cannot be cut into chunks: pass it through the output rows
        tl.store(out_ptr + row[:, None] * D + channels[None, :], history, mask=out_mask)
        tl.debug_barrier()
        for chunk in range(0, D, CHUNK):
            c = chunk + tl.arange(0, CHUNK)
            part_mask = (g < G)[:, None] & (c < D)[None, :]
            part = tl.load(out_ptr + row[:, None] * D + c[None, :], mask=part_mask, other=0.0)
            chunk_mask = (c < D)[:, None] & (channels < D)[None, :]
            t = tl.load(transform_ptr + c[:, None] * D + channels[None, :], mask=chunk_mask, other=0.0)
            out = tl.dot(part, t, acc=out, input_precision="tf32x3")
        tl.debug_barrier()
    tl.store(out_ptr + row[:, None] * D + channels[None, :], out, mask=out_mask)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Everything a decode step fixes on the host: shapes, tiles and the number of splits."""

    batch: int
    heads: int
    group: int
    head_dim: int
    padded_dim: int
    padded_group: int  # 4, 8 or 16: the head columns that stage 1 works with
    blocks: int  # prepare programs per sequence and head that read page means
    splits: int
    sink_pages: int
    recent_slots: int
    stride_rotation: int

    @property
    def total(self) -> int:
        """Partials per query head: history splits, then window pages."""
        return self.splits + self.sink_pages + self.recent_slots


def plan_decode(query: torch.Tensor, cache, rotation, programs: int) -> DecodePlan:
    """Checks shapes and device and divides the work into about `programs` programs; allocates nothing.

    Raises ShapeError for shapes that contradict each other, NotImplementedError for what no kernel serves.
    """
    config = cache.config
    batch, query_heads, head_dim = query.shape
    heads = config.num_key_value_heads
    if batch != cache.batch or head_dim != config.head_dim or query_heads % heads:
        raise ShapeError(
            f"query {tuple(query.shape)}, expected [{cache.batch}, G * {heads}, {config.head_dim}]"
        )
    check_device(query)
    group = query_heads // heads
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per key/value head, the kernel serves 1..{MAX_GROUP}")
    max_pages = cache.page_table.shape[1]
    splits = max(1, min(max_pages, programs // (batch * heads)))
    return DecodePlan(
        batch=batch,
        heads=heads,
        group=group,
        head_dim=head_dim,
        padded_dim=max(32, triton.next_power_of_2(head_dim)),
        padded_group=max(4, triton.next_power_of_2(group)),
        blocks=triton.cdiv(max_pages, PAGES_PER_BLOCK),
        splits=splits,
        sink_pages=config.sink_pages,
        recent_slots=config.recent_slots,
        stride_rotation=rotation_stride(rotation.query_transform.shape[0], heads),
    )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the prepare kernel hands to stage 1 (all on the device)."""

    rotated: torch.Tensor  # float32 [B, K, G, D], or int8 [B, K, 2 padded_group, D] as limbs
    factor: torch.Tensor  # float32 [B, K, padded_group]: one step of the limbs
    bias: torch.Tensor  # float32 [B, K, padded_group]: 1.5 * sum of the query, in steps
    page_score: torch.Tensor  # float32 [B, K, max_pages, padded_group]
    value_max: torch.Tensor  # float32 [B, K, blocks]


def prepare(plan: DecodePlan, query: torch.Tensor, cache, rotation, scale: float, limbs: bool) -> Prepared:
    """Launches the prepare kernel: rotated query, products with the page means, largest value scales."""
    device, shape = query.device, (plan.batch, plan.heads)
    if limbs:
        rotated = torch.empty((*shape, 2 * plan.padded_group, plan.head_dim), dtype=torch.int8, device=device)
        factor = torch.empty((2, *shape, plan.padded_group), device=device)
    else:
        rotated = torch.empty((*shape, plan.group, plan.head_dim), device=device)
        factor = torch.empty((2, 1), device=device)
    max_pages = cache.page_table.shape[1]
    page_score = torch.empty((*shape, max_pages, plan.padded_group), device=device)
    value_max = torch.empty((*shape, plan.blocks), device=device)
    _prepare_kernel[(1 + plan.blocks, plan.heads, plan.batch)](
        query, rotation.query_transform, plan.stride_rotation, cache.key_page_mean.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.page_table, max_pages, cache.history_pages,
        scale * LOG2_E, rotated, factor[0], factor[1], page_score, value_max,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim, DP=plan.padded_dim,
        ROWS=16, CHUNK=min(plan.padded_dim, 64), BLOCK=PAGES_PER_BLOCK, LIMBS=limbs, num_warps=4,
    )  # fmt: skip
    return Prepared(rotated, factor[0], factor[1], page_score, value_max)


def allocate_partials(plan: DecodePlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 1's output: o float32 [B, N, total, D] and log2-sum-exp float32 [B, N, total]."""
    shape = (plan.batch, plan.heads * plan.group, plan.total)
    return torch.empty((*shape, plan.head_dim), device=device), torch.empty(shape, device=device)


def merge(
    plan: DecodePlan, o: torch.Tensor, lse: torch.Tensor, rotation, sink_logits: torch.Tensor | None
) -> torch.Tensor:
    """Launches the merge kernel -> float32 [B, N, D]."""
    query_heads = plan.heads * plan.group
    if sink_logits is not None and sink_logits.shape != (query_heads,):
        raise ShapeError(f"sink_logits {tuple(sink_logits.shape)}, expected ({query_heads},)")
    out = torch.empty((plan.batch, query_heads, plan.head_dim), device=o.device)
    # One head per program while the batch is small; then a group shares one reading of the transform.
    rows = 1 if plan.batch * query_heads <= 256 else plan.padded_group
    _merge_kernel[(triton.cdiv(plan.group, rows), plan.heads, plan.batch)](
        o, lse, rotation.output_transform, rotation.value_mean.view(torch.int16), plan.stride_rotation,
        lse if sink_logits is None else sink_logits, out,
        K=plan.heads, G=plan.group, D=plan.head_dim, DP=plan.padded_dim, SPLITS=plan.splits,
        TOTAL=plan.total, TOTAL_P=triton.next_power_of_2(plan.total), HEADS=rows, STEP=max(1, 32 // rows),
        CHUNK=plan.padded_dim if plan.padded_dim <= 128 else 32, SINK_LOGITS=sink_logits is not None,
        num_warps=8,
    )  # fmt: skip
    return out


def decode_attention(
    query: torch.Tensor,
    cache,
    rotation,
    *,
    scale: float,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; `scale` multiplies the scores (usually D**-0.5). A sliding window of
    w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    sequence of length 0 yields zeros. Raises ShapeError; NotImplementedError (device, more than 16 query
    heads per key/value head) before anything is allocated.
    """
    plan = plan_decode(query, cache, rotation, programs=_programs(query.device))
    query = query.contiguous()
    prepared = prepare(plan, query, cache, rotation, scale, limbs=False)
    o, lse = allocate_partials(plan, query.device)
    _stage_kernel[(plan.total, plan.heads, plan.batch)](
        query, prepared.rotated, prepared.page_score, prepared.value_max,
        cache.key_codes, cache.value_codes, cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.window_key.view(torch.int16),
        cache.window_value.view(torch.int16), cache.page_table, cache.page_table.shape[1],
        cache.window_table, cache.lengths, cache.history_pages, scale * LOG2_E, sliding_window or 0,
        plan.blocks, o, lse,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim, DP=plan.padded_dim,
        ROWS=8 if plan.group <= 8 else 16, SPLITS=plan.splits,
        SINK_PAGES=plan.sink_pages, RECENT_SLOTS=plan.recent_slots, SLIDING=sliding_window is not None,
        BLOCKS=triton.next_power_of_2(plan.blocks), num_warps=TUNING.warps, num_stages=TUNING.stages,
    )  # fmt: skip
    return merge(plan, o, lse, rotation, sink_logits)


def _programs(device: torch.device) -> int:
    """Stage-1 programs: about what the chip holds at once."""
    if device.type != "cuda":
        return 8
    return TUNING.programs_per_processor * torch.cuda.get_device_properties(device).multi_processor_count
