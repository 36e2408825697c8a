"""One-token attention over a mixed INT2 / BF16 cache in plain Triton: five launches, no host wait.

Why: the history is never dequantized to memory. Codes become fp16 subnormals (code * 2**-24) by masks alone;
the query is rotated instead of the keys, the output instead of the values.

1. `_rotate_kernel`: rotates the query. `_prepare_kernel`: its product with every page's mean key, the largest
   value scale (which keeps the probabilities inside fp16), and for Gluon the rotated query as bytes.
2. `_stage_kernel`: split-KV flash attention. Splits 0 .. S-1 walk over INT2 pages; S .. S+W-1 take one
   BF16 page each (sink or recent). Partials: o float32 [B, N, S + W, D], log2-sum-exp [B, N, S + W].
   `decode_gluon.py` replaces this stage on Hopper.
3. `_merge_kernel`: merges the partials, adds value mean and sink logits; `_rotate_kernel` once more applies
   the output transform to the INT2 part.

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
    """How the plain stage runs: programs per multiprocessor, warps, pipeline stages, registers."""

    programs_per_processor: int
    warps: int
    stages: int
    registers: int | None = None  # per thread, at most


# By padded head_dim. One warp a program: nothing waits for another warp; more where registers run out.
# 128 is the fastest of five settings on an H200 at batch 8 and 32 (520 against 694 us for 10 programs and 168
# registers, batch 8, 102 400 tokens); the other head_dims are not compared.
TUNING = {
    64: Tuning(programs_per_processor=16, warps=1, stages=3),
    128: Tuning(programs_per_processor=16, warps=1, stages=3, registers=128),
    256: Tuning(programs_per_processor=4, warps=4, stages=2),
    512: Tuning(programs_per_processor=2, warps=8, stages=2),
}


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
def unpack_in_place(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Words int32 [ROWS, COLUMNS / 16] -> fp16 [ROWS, COLUMNS]; compiles to one mask for two codes.

    Column ((word // 4) * 8 + i) * 8 + 2 * (word % 4) + b is code 8 b + i of the word, times 2**-24 and 4**i
    (4**(i - 5) from i = 5 on): the order in which a lane of the matrix unit reads its own words.
    """
    words = tl.reshape(words, (ROWS, COLUMNS // 64, 1, 4, 1))
    i = tl.reshape(tl.arange(0, 8), (1, 1, 8, 1, 1))
    b = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2))
    place = tl.where(i >= 5, i - 5, i)
    pair = (words >> tl.where(i >= 5, 10, 0)) & (0x00030003 << (2 * place))
    half = (pair >> (16 * b)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.reshape(half, (ROWS, COLUMNS))


@triton.jit
def _in_place_order(columns):
    """(code index, 4**-i) of the columns that `unpack_in_place` makes."""
    i = (columns >> 3) & 7
    code = (columns & -64) + 16 * ((columns >> 1) & 3) + 8 * (columns & 1) + i
    place = tl.where(i >= 5, i - 5, i)
    return code, 1.0 / (1 << (2 * place)).to(tl.float32)


@triton.jit
def _dot_exact(a, b, acc):
    """acc + a @ b for b that is exact in TF32 (bf16 is); a is split into two TF32."""
    coarse = (a.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    acc = tl.dot(a - coarse, b, acc=acc, input_precision="tf32")
    return tl.dot(coarse, b, acc=acc, input_precision="tf32")


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
def _rotate_kernel(
    rows_ptr, transform_ptr, stride_rotation, factor, out_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(D / COLUMNS), K, B): out = factor * rows @ transform; with ADD it is added."""
    channels = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    g = tl.arange(0, ROWS)
    row = (tl.program_id(2) * K + head) * G + g
    out_offset = row[:, None] * D + channels[None, :]
    out_mask = (g < G)[:, None] & (channels < D)[None, :]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in tl.static_range(0, D, CHUNK):
        c = chunk + tl.arange(0, CHUNK)
        mask = (c < D)[:, None] & (channels < D)[None, :]
        t_offset = head * stride_rotation * D * D + c[:, None] * D + channels[None, :]
        t = tl.load(transform_ptr + t_offset, mask=mask, other=0.0)
        mask = (g < G)[:, None] & (c < D)[None, :]
        part = tl.load(rows_ptr + row[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        out = tl.dot(part, t, acc=out, input_precision="tf32x3")
    out *= factor
    if ADD:
        out += tl.load(out_ptr + out_offset, mask=out_mask, other=0.0)
    tl.store(out_ptr + out_offset, out, mask=out_mask)


@triton.jit
def _prepare_kernel(
    query_ptr, rotated_ptr, key_page_mean_ptr, value_scale_ptr,
    page_table_ptr, stride_table, history_ptr, softmax_scale,
    limbs_ptr, factor_ptr, bias_ptr, page_score_ptr, value_max_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LIMBS: tl.constexpr,
    EXACT_QUERY: tl.constexpr,
):  # fmt: skip
    """Grid (LIMBS + blocks, K, B): one program splits the query, the others take BLOCK pages each."""
    block = tl.program_id(0) - LIMBS
    head = tl.program_id(1)
    b = tl.program_id(2)
    slot = b * K + head
    rows = tl.arange(0, ROWS)
    query_head = query_ptr + slot * G * D
    if block < 0:
        if LIMBS:
            channels = tl.arange(0, DP)
            mask = (rows < G)[:, None] & (channels < D)[None, :]
            offset = (slot * G + rows)[:, None] * D + channels[None, :]
            rotated = tl.load(rotated_ptr + offset, mask=mask, other=0.0)
            _store_query_limbs(
                rotated, limbs_ptr + slot * 2 * GP * D, factor_ptr + slot * GP, bias_ptr + slot * GP,
                rows, GP, D, ROWS,
            )  # fmt: skip
    else:
        # The table is read without waiting for the count of pages.
        history = tl.load(history_ptr + b)
        page = block * BLOCK + tl.arange(0, BLOCK)
        entry = tl.load(page_table_ptr + b * stride_table + page, mask=page < stride_table, other=0)
        valid = page < history
        largest = 0.0
        if block * BLOCK < history:
            physical = tl.where(valid, entry, 0).to(tl.int64) * K + head
            tokens = tl.arange(0, PAGE)
            mask = valid[:, None] & (tokens >= 0)[None, :]
            scale = tl.load(value_scale_ptr + physical[:, None] * PAGE + tokens[None, :], mask=mask, other=0)
            scores = tl.zeros((BLOCK, ROWS), tl.float32)
            for chunk in tl.static_range(0, D, CHUNK):
                c = chunk + tl.arange(0, CHUNK)
                mask = valid[:, None] & (c < D)[None, :]
                raw = tl.load(key_page_mean_ptr + physical[:, None] * D + c[None, :], mask=mask, other=0)
                mask = (c < D)[:, None] & (rows < G)[None, :]
                q = tl.load(query_head + rows[None, :] * D + c[:, None], mask=mask, other=0.0).to(tl.float32)
                # bf16 is exact in TF32, a float32 query in two of them.
                mean = _widen(raw)
                if EXACT_QUERY:
                    scores = tl.dot(mean, q, acc=scores, input_precision="tf32")
                else:
                    coarse = (q.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
                    scores = tl.dot(mean, coarse, acc=scores, input_precision="tf32")
                    scores = tl.dot(mean, q - coarse, acc=scores, input_precision="tf32")
            out = page_score_ptr + (slot * stride_table + page)[:, None] * GP + rows[None, :]
            tl.store(out, scores * softmax_scale, mask=valid[:, None] & (rows < GP)[None, :])
            largest = _widen(tl.max(tl.max(scale.to(tl.int32), 1), 0).to(tl.int16))
        tl.store(value_max_ptr + slot * (tl.num_programs(0) - LIMBS) + block, largest)


@triton.jit
def _value_unit(value_max_ptr, blocks, BLOCKS: tl.constexpr):
    """A power of two >= every value scale of this sequence and head (1 if there is none)."""
    index = tl.arange(0, BLOCKS)
    largest = tl.max(tl.load(value_max_ptr + index, mask=index < blocks, other=0.0), 0)
    bits = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.where(largest > 0, bits.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _split_range(first, last, split, splits):
    """The pages [low, high) of one split of [first, last)."""
    per_split = (last - first + splits - 1) // splits
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
    history, oldest, blocks, slot, head, split, splits, out_rows, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, SINK_PAGES: tl.constexpr, SLIDING: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Flash attention over one split of the INT2 pages. page_score_ptr and value_max_ptr are at the slot."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, DP)
    tokens = tl.arange(0, PAGE)
    first = tl.minimum(tl.maximum(oldest // PAGE - SINK_PAGES, 0), history) if SLIDING else 0
    low, high = _split_range(first, history, split, splits)
    # The query in the order of the unpacked codes, with the weights of their places taken out.
    channel, place = _in_place_order(columns)
    mask = (channel < D)[:, None] & (rows < G)[None, :]
    q = tl.load(rotated_ptr + (slot * G + rows)[None, :] * D + channel[:, None], mask=mask, other=0.0)
    largest = tl.max(tl.abs(q), 0)
    unit = tl.where(largest > 0, largest, 1.0) * (1.0 / 1024)
    q = (q / unit[None, :]).to(tl.float16)
    query_sum = 1.5 * tl.sum(q.to(tl.float32), 0)
    q = (q.to(tl.float32) * place[:, None]).to(tl.float16)
    value_unit = _value_unit(value_max_ptr, blocks, BLOCKS) * (1.0 / 32768)
    # Rows of the score tile are tokens in the order of the unpacked value codes.
    token, token_place = _in_place_order(tokens)
    weight_unit = token_place / value_unit
    restore = 1.0 / token_place
    word = tl.arange(0, DP // 16)
    token_word = tl.arange(0, PAGE // 16)
    m = tl.full((ROWS,), -1e30, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((DP, ROWS), tl.float32)
    for page in range(low, high):
        physical = tl.load(page_table_ptr + page).to(tl.int64) * K + head
        offset = physical * (PAGE * D // 16)
        key_offset = offset + token[:, None] * (D // 16) + word[None, :]
        value_offset = offset + columns[:, None] * (PAGE // 16) + token_word[None, :]
        if D == DP:
            key_words = tl.load(key_codes_ptr + key_offset)
            value_words = tl.load(value_codes_ptr + value_offset)
        else:
            word_mask = (tokens >= 0)[:, None] & (word < D // 16)[None, :]
            key_words = tl.load(key_codes_ptr + key_offset, mask=word_mask, other=0)
            channel_mask = (columns < D)[:, None] & (token_word >= 0)[None, :]
            value_words = tl.load(value_codes_ptr + value_offset, mask=channel_mask, other=0)
        key_scale = _widen(tl.load(key_scale_ptr + physical * PAGE + token))
        value_scale = _widen(tl.load(value_scale_ptr + physical * PAGE + token))
        page_score = tl.load(page_score_ptr + page * GP + rows, mask=rows < G, other=0.0)
        score = tl.dot(unpack_in_place(key_words, PAGE, DP), q) * CODE_UNIT - query_sum[None, :]
        score = score * key_scale[:, None] * unit[None, :] + page_score[None, :]
        if SLIDING:
            visible = token + (SINK_PAGES + page) * PAGE >= oldest
            score = tl.where(visible[:, None], score, -1e30)
        m_new = tl.maximum(m, tl.max(score, 0))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(score - m_new[None, :])
        if SLIDING:
            p = tl.where(visible[:, None], p, 0.0)
        weight = p * (value_scale * weight_unit)[:, None]
        l = l * alpha + tl.sum(p, 0)
        weight_sum = weight_sum * alpha + tl.sum(weight * restore[:, None], 0)
        acc = tl.dot(unpack_in_place(value_words, DP, PAGE), weight.to(tl.float16), acc=acc * alpha[None, :])
        m = m_new
    safe = tl.where(l > 0, l, 1.0)
    o = (acc * CODE_UNIT - 1.5 * weight_sum[None, :]) * (value_unit / safe)[None, :]
    mask = (columns < D)[:, None] & (rows < G)[None, :]
    tl.store(o_ptr + out_rows[None, :].to(tl.int64) * D + columns[:, None], o, mask=mask)
    tl.store(lse_ptr + out_rows, tl.where(l > 0, m + tl.log2(safe), -float("inf")), mask=rows < G)


@triton.jit
def _window_split(
    query_ptr, window_key_ptr, window_value_ptr, window_table_ptr, length, history, oldest, softmax_scale,
    index, slot, head, out_rows, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window, STEP tokens at a time."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    page, physical = _window_page(index, history, window_table_ptr, SINK_PAGES, RECENT_SLOTS)
    offset = (physical * K + head) * (PAGE * D)
    row_mask = (rows < G)[:, None] & (channels < D)[None, :]
    q = tl.load(query_ptr + (slot * G + rows)[:, None] * D + channels[None, :], mask=row_mask, other=0.0)
    q = q.to(tl.float32) * softmax_scale
    m = tl.full((ROWS,), -1e30, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    for start in tl.range(0, tl.minimum(length - page * PAGE, PAGE), STEP, num_stages=1):
        row = start + tl.arange(0, STEP)
        token = page * PAGE + row
        visible = (token < length) & (token >= oldest)
        mask = visible[:, None] & (channels < D)[None, :]
        row_offset = offset + row[:, None] * D + channels[None, :]
        key = _widen(tl.load(window_key_ptr + row_offset, mask=mask, other=0))
        value = _widen(tl.load(window_value_ptr + row_offset, mask=mask, other=0))
        score = _dot_exact(q, tl.trans(key), tl.zeros((ROWS, STEP), tl.float32))
        score = tl.where(visible[None, :], score, -1e30)
        m_new = tl.maximum(m, tl.max(score, 1))
        alpha = tl.exp2(m - m_new)
        p = tl.where(visible[None, :], tl.exp2(score - m_new[:, None]), 0.0)
        l = l * alpha + tl.sum(p, 1)
        acc = _dot_exact(p, value, acc * alpha[:, None])
        m = m_new
    safe = tl.where(l > 0, l, 1.0)
    o = acc / safe[:, None]
    tl.store(o_ptr + out_rows[:, None].to(tl.int64) * D + channels[None, :], o, mask=row_mask)
    tl.store(lse_ptr + out_rows, tl.where(l > 0, m + tl.log2(safe), -float("inf")), mask=rows < G)


@triton.jit(do_not_specialize=["splits"])
def _stage_kernel(
    query_ptr, rotated_ptr, page_score_ptr, value_max_ptr,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, window_key_ptr, window_value_ptr,
    page_table_ptr, stride_table, window_table_ptr, lengths_ptr, history_ptr, softmax_scale, sliding_window,
    blocks, splits, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr,
    SLIDING: tl.constexpr, BLOCKS: tl.constexpr, WINDOW_STEP: tl.constexpr,
):  # fmt: skip
    """Grid (splits + SINK_PAGES + RECENT_SLOTS, K, B)."""
    split = tl.program_id(0)
    head = tl.program_id(1)
    b = tl.program_id(2)
    slot = b * K + head
    length = tl.load(lengths_ptr + b)
    history = tl.load(history_ptr + b)
    oldest = tl.maximum(length - sliding_window, 0) if SLIDING else 0
    out_rows = (slot * G + tl.arange(0, ROWS)) * (splits + SINK_PAGES + RECENT_SLOTS) + split
    if split < splits:
        _history_split(
            rotated_ptr, page_score_ptr + slot * stride_table * GP, value_max_ptr + slot * blocks,
            key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr,
            page_table_ptr + b * stride_table, history, oldest, blocks, slot, head, split, splits, out_rows,
            o_ptr, lse_ptr, K, G, GP, D, DP, ROWS, SINK_PAGES, SLIDING, BLOCKS,
        )  # fmt: skip
    else:
        _window_split(
            query_ptr, window_key_ptr, window_value_ptr,
            window_table_ptr + b * (SINK_PAGES + RECENT_SLOTS), length, history, oldest, softmax_scale,
            split - splits, slot, head, out_rows, o_ptr, lse_ptr,
            K, G, D, DP, ROWS, WINDOW_STEP, SINK_PAGES, RECENT_SLOTS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "total"])
def _merge_kernel(
    o_ptr, lse_ptr, value_mean_ptr, stride_rotation, sink_ptr, history_out_ptr, out_ptr,
    splits, total,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    TOTAL_P: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Grid (B * N, ceil(D / COLUMNS)): the weighted sum of total partials of one query head.

    The INT2 part, still rotated, goes to history_out; the BF16 part plus the value mean goes to out.
    """
    row = tl.program_id(0)
    query_head = row % (K * G)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rows = row.to(tl.int64) * total
    i = tl.arange(0, TOTAL_P)
    lse = tl.load(lse_ptr + rows + i, mask=i < total, other=-float("inf"))
    m = tl.max(lse, 0)
    if SINK_LOGITS:
        sink = tl.load(sink_ptr + query_head).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m > -float("inf"), m, 0.0)
    weight = tl.exp2(lse - m)
    denominator = tl.sum(weight, 0)
    if SINK_LOGITS:
        denominator += tl.exp2(sink - m)
    inverse = 1.0 / tl.where(denominator > 0, denominator, 1.0)
    history_weight = tl.sum(tl.where(i < splits, weight, 0.0), 0)
    history = tl.zeros((COLUMNS,), tl.float32)
    window = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, total, STEP, num_stages=1):
        partial = start + tl.arange(0, STEP)
        w = tl.exp2(tl.load(lse_ptr + rows + partial, mask=partial < total, other=-float("inf")) - m)
        mask = (partial < total)[:, None] & (channels < D)[None, :]
        o = tl.load(o_ptr + (rows + partial)[:, None] * D + channels[None, :], mask=mask, other=0.0)
        history += tl.sum(o * tl.where(partial < splits, w, 0.0)[:, None], 0)
        window += tl.sum(o * tl.where(partial < splits, 0.0, w)[:, None], 0)
    mean_offset = (query_head // G) * stride_rotation * D + channels
    mean = _widen(tl.load(value_mean_ptr + mean_offset, mask=channels < D, other=0))
    out = (window + history_weight * mean) * inverse
    tl.store(history_out_ptr + row * D + channels, history * inverse, mask=channels < D)
    tl.store(out_ptr + row * D + channels, out, mask=channels < D)


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
        padded_dim=_padded_dim(head_dim),
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


def _rotate(
    plan: DecodePlan, rows: torch.Tensor, transform: torch.Tensor, factor: float, out: torch.Tensor,
    add: bool,
) -> None:  # fmt: skip
    """Launches `_rotate_kernel` on rows and out [B, K * G, D]."""
    columns = min(32, plan.padded_dim)
    _rotate_kernel[(triton.cdiv(plan.head_dim, columns), plan.heads, plan.batch)](
        rows, transform, plan.stride_rotation, factor, out,
        K=plan.heads, G=plan.group, D=plan.head_dim, CHUNK=min(128, plan.padded_dim), COLUMNS=columns,
        ROWS=16, ADD=add, num_warps=4,
    )  # fmt: skip


def prepare(plan: DecodePlan, query: torch.Tensor, cache, rotation, scale: float, limbs: bool) -> Prepared:
    """Launches the prepare kernel: rotated query, products with the page means, largest value scales."""
    device, shape = query.device, (plan.batch, plan.heads)
    rotated = torch.empty((*shape, plan.group, plan.head_dim), device=device)
    _rotate(plan, query, rotation.query_transform, scale * LOG2_E, rotated, add=False)
    if limbs:
        result = torch.empty((*shape, 2 * plan.padded_group, plan.head_dim), dtype=torch.int8, device=device)
        factor = torch.empty((2, *shape, plan.padded_group), device=device)
    else:
        result = rotated
        factor = torch.empty((2, 1), device=device)
    max_pages = cache.page_table.shape[1]
    page_score = torch.empty((*shape, max_pages, plan.padded_group), device=device)
    value_max = torch.empty((*shape, plan.blocks), device=device)
    _prepare_kernel[(limbs + plan.blocks, plan.heads, plan.batch)](
        query, rotated, cache.key_page_mean.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.page_table, max_pages, cache.history_pages,
        scale * LOG2_E, result, factor[0], factor[1], page_score, value_max,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim, DP=plan.padded_dim,
        ROWS=16, CHUNK=min(plan.padded_dim, 128), BLOCK=PAGES_PER_BLOCK,
        LIMBS=int(limbs), EXACT_QUERY=query.dtype != torch.float32, num_warps=4,
    )  # fmt: skip
    return Prepared(result, factor[0], factor[1], page_score, value_max)


def allocate_partials(plan: DecodePlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 1's output: o float32 [B, N, total, D] and log2-sum-exp float32 [B, N, total]."""
    shape = (plan.batch, plan.heads * plan.group, plan.total)
    return torch.empty((*shape, plan.head_dim), device=device), torch.empty(shape, device=device)


def merge(
    plan: DecodePlan, o: torch.Tensor, lse: torch.Tensor, rotation, sink_logits: torch.Tensor | None
) -> torch.Tensor:
    """Launches the merge and the rotation back -> float32 [B, N, D]."""
    query_heads = plan.heads * plan.group
    if sink_logits is not None and sink_logits.shape != (query_heads,):
        raise ShapeError(f"sink_logits {tuple(sink_logits.shape)}, expected ({query_heads},)")
    history, out = torch.empty((2, plan.batch, query_heads, plan.head_dim), device=o.device)
    columns = min(32, plan.padded_dim)
    blocks = triton.cdiv(plan.head_dim, columns)
    padded_total = triton.next_power_of_2(plan.total)
    _merge_kernel[(plan.batch * query_heads, blocks)](
        o, lse, rotation.value_mean.view(torch.int16), plan.stride_rotation,
        lse if sink_logits is None else sink_logits, history, out, plan.splits, plan.total,
        K=plan.heads, G=plan.group, D=plan.head_dim,
        TOTAL_P=padded_total, STEP=min(256, padded_total), COLUMNS=columns,
        SINK_LOGITS=sink_logits is not None, num_warps=4,
    )  # fmt: skip
    _rotate(plan, history, rotation.output_transform, 1.0, out, add=True)
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
    tuning = TUNING[_padded_dim(query.shape[-1])]
    plan = plan_decode(query, cache, rotation, programs=_programs(query.device, tuning))
    query = query.contiguous()
    prepared = prepare(plan, query, cache, rotation, scale, limbs=False)
    o, lse = allocate_partials(plan, query.device)
    _stage_kernel[(plan.total, plan.heads, plan.batch)](
        query, prepared.rotated, prepared.page_score, prepared.value_max,
        cache.key_codes, cache.value_codes, cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.window_key.view(torch.int16),
        cache.window_value.view(torch.int16), cache.page_table, cache.page_table.shape[1],
        cache.window_table, cache.lengths, cache.history_pages, scale * LOG2_E, sliding_window or 0,
        plan.blocks, plan.splits, o, lse,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim, DP=plan.padded_dim,
        ROWS=8 if plan.group <= 8 else 16,
        SINK_PAGES=plan.sink_pages, RECENT_SLOTS=plan.recent_slots, SLIDING=sliding_window is not None,
        BLOCKS=max(32, triton.next_power_of_2(plan.blocks)), WINDOW_STEP=16, num_warps=tuning.warps,
        num_stages=tuning.stages, maxnreg=tuning.registers if plan.group <= 8 else None,
    )  # fmt: skip
    return merge(plan, o, lse, rotation, sink_logits)


def _padded_dim(head_dim: int) -> int:
    return max(64, triton.next_power_of_2(head_dim))


def _programs(device: torch.device, tuning: Tuning) -> int:
    """Stage-1 programs: about what the chip holds at once."""
    if device.type != "cuda":
        return 8
    return tuning.programs_per_processor * torch.cuda.get_device_properties(device).multi_processor_count
