"""Attention of a chunk of queries over INT2 history, BF16 window and the chunk itself, in plain Triton.

Why: a prompt longer than one chunk reads its own history from INT2 pages. One program owns `rows` queries of
one key/value head (row = token * G + query head of the group) and walks over all keys with one softmax, so
the history is unpacked only inside a tile and the workspace, rotated queries, is as large as the chunk.

Order: rotated query over INT2 pages; output transform and value mean applied to what was accumulated; then
sink, recent and chunk tokens as plain rows. Scores are in log2 units. Format page, section 5.

Unpacking is what a chunk adds to flash attention, so it must take few instructions: one mask takes two codes
as fp16 subnormals, one fused multiply-add makes operands of them. The pairs come in an order of their own
(`code_of`), which the other operand follows. All of a page's common factors and its mean key act on scores.
On Hopper, `prefill/gluon.py` reads the history and this kernel does the rest.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from ...core import cache_format as fmt
from ...core.errors import ShapeError
from ..decode.triton import LOG2_E, MAX_GROUP, widen
from ..launch.tensors import check_device, rotation_stride

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
UNSEEN = tl.constexpr(-1.0e30)
# Codes are scaled by less than 2**(1 - SCALE_BITS): times 2**20, for their place in a word, that fits fp16.
SCALE_BITS = tl.constexpr(5)
WEIGHT_BITS = tl.constexpr(9)  # a weight times its value scale is below 2**(WEIGHT_BITS + 1): inside fp16


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one padded head_dim runs: query rows per program, pages per step, channels per step of a product
    with a rotation, warps, pipeline stages."""

    rows: int
    pages: int
    chunk: int
    warps: int
    stages: int


TILES = {
    32: Tile(rows=64, pages=2, chunk=32, warps=4, stages=1),
    64: Tile(rows=64, pages=2, chunk=64, warps=4, stages=1),
    128: Tile(rows=64, pages=2, chunk=64, warps=4, stages=1),
    256: Tile(rows=32, pages=1, chunk=32, warps=8, stages=1),
    512: Tile(rows=16, pages=1, chunk=32, warps=8, stages=1),
}


@triton.jit
def _twice(x):
    """float32 -> its fp16 bits in both halves of an int32."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return (bits & 0xFFFF) | (bits << 16)


@triton.jit
def _half(bits):
    """The low half of an int32 as fp16."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _code_pair(words, scale, place: tl.constexpr, COMPILED: tl.constexpr):
    """(code - 1.5) * scale of the codes `place` and `place` + 8 of every word, as fp16.

    One mask takes both codes. In bits 4 to 9 of a half they are fp16 subnormals: code times 2**-20, -18, -16.
    """
    shift: tl.constexpr = 6 * (place // 3) - 4
    within: tl.constexpr = 2 * (place % 3)
    moved = words << -shift if shift < 0 else words >> shift
    bits = moved & (0x00300030 << within)
    factor, offset = scale * 2.0 ** (20 - within), scale * -1.5
    if COMPILED:  # which does not find the instruction for two halves
        operands = [bits, _twice(factor), _twice(offset)]
        pair = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", operands, tl.int32, is_pure=True, pack=1
        )
        low, high = _half(pair), _half(pair >> 16)
    else:
        factor16, offset16 = factor.to(tl.float16), offset.to(tl.float16)
        low, high = _half(bits) * factor16 + offset16, _half(bits >> 16) * factor16 + offset16
    return low, high


@triton.jit
def unpack_codes(words, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPILED: tl.constexpr):
    """Words int32 [ROWS, COLUMNS / 16], float32 scale < 2**-4 -> fp16 (code - 1.5) * scale [ROWS, COLUMNS].

    Exact down to a scale of 2**-15, then with an error of 2**-25. Columns are in the order of `code_of`.
    """
    low0, high0 = _code_pair(words, scale, 0, COMPILED)
    low1, high1 = _code_pair(words, scale, 1, COMPILED)
    low2, high2 = _code_pair(words, scale, 2, COMPILED)
    low3, high3 = _code_pair(words, scale, 3, COMPILED)
    low4, high4 = _code_pair(words, scale, 4, COMPILED)
    low5, high5 = _code_pair(words, scale, 5, COMPILED)
    low6, high6 = _code_pair(words, scale, 6, COMPILED)
    low7, high7 = _code_pair(words, scale, 7, COMPILED)
    low = tl.join(
        tl.join(tl.join(low0, low4), tl.join(low2, low6)), tl.join(tl.join(low1, low5), tl.join(low3, low7))
    )
    high = tl.join(
        tl.join(tl.join(high0, high4), tl.join(high2, high6)),
        tl.join(tl.join(high1, high5), tl.join(high3, high7)),
    )
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))


@triton.jit
def _settle(codes, COMPILED: tl.constexpr):
    """The same codes. Keeps the compiler from moving their reshape behind the store to shared memory."""
    if COMPILED:
        codes = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [codes], tl.float16, True, 2)
    return codes


@triton.jit
def code_of(column):
    """The code, counted over the words, that `unpack_codes` puts into a column: 0, 8, 1, 9, ... 7, 15."""
    return column // 16 * 16 + column % 16 // 2 + column % 2 * 8


@triton.jit
def _exponent(scale):
    """Exponent of the largest of bf16 bits of scales, which are < 2**70; at least -30: ratios stay finite."""
    return tl.maximum((tl.max(scale.to(tl.int32)) >> 7) - 127, -30)


@triton.jit
def power(exponent):
    """2 ** exponent as float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _softmax_step(score, visible, m, l):
    """Online softmax: score [ROWS, S] -> weights, rescaling factor, new maximum and sum."""
    score = tl.where(visible, score, UNSEEN)
    m_new = tl.maximum(m, tl.max(score, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.where(visible, tl.exp2(score - m_new[:, None]), 0.0)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def times_matrix(
    rows_ptr, row_mask, matrix_ptr, columns,
    ROWS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Rows in memory (pointers [ROWS, 1]) @ matrix float32 [D, columns] -> float32 [ROWS, COLUMNS]."""
    column = tl.arange(0, COLUMNS)
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in range(0, D, CHUNK):
        c = chunk + tl.arange(0, CHUNK)
        rows = tl.load(rows_ptr + c[None, :], mask=row_mask[:, None] & (c < D)[None, :], other=0.0)
        mask = (c < D)[:, None] & (column < columns)[None, :]
        t = tl.load(matrix_ptr + c[:, None] * columns + column[None, :], mask=mask, other=0.0)
        if COMPILED:  # 16 bits of both: enough for a result that is rounded to fp16 or came from such
            out = tl.dot(rows.to(tl.float32), t, acc=out, input_precision="bf16x3")
        else:
            out = tl.dot(rows.to(tl.float32), t, acc=out, input_precision="tf32x3")
    return out


@triton.jit
def _plain_rows(
    q, softmax_scale, key_ptr, value_ptr, stride_row, row_offset, stored, visible, acc, m, l,
    D: tl.constexpr, DP: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """One step over 64 BF16 rows: stored [64] says which exist, visible [ROWS, 64] who sees them."""
    channels = tl.arange(0, DP)
    mask = stored[:, None] & (channels < D)[None, :]
    offset = row_offset[:, None] * stride_row + channels[None, :]
    key = tl.load(key_ptr + offset, mask=mask, other=0)
    value = tl.load(value_ptr + offset, mask=mask, other=0)
    if BF16:
        score = tl.dot(q, tl.trans(key.to(tl.bfloat16, bitcast=True))) * softmax_scale
        p, alpha, m, l = _softmax_step(score, visible & stored[None, :], m, l)
        high = p.to(tl.bfloat16)  # two terms: 16 bits of every weight
        low = (p - high.to(tl.float32)).to(tl.bfloat16)
        value = value.to(tl.bfloat16, bitcast=True)
        acc = tl.dot(low, value, acc=tl.dot(high, value, acc=acc * alpha[:, None]))
    else:
        score = tl.dot(q, tl.trans(widen(key)), input_precision="tf32") * softmax_scale
        p, alpha, m, l = _softmax_step(score, visible & stored[None, :], m, l)
        acc = tl.dot(p, widen(value), acc=acc * alpha[:, None], input_precision="tf32")
    return acc, m, l


@triton.jit(do_not_specialize=["tokens"])
def _rotate_kernel(
    query_ptr, tokens, query_transform_ptr, stride_rotation, softmax_scale, rotated_ptr, unit_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T * G / ROWS), K, B): rotated queries, as fp16 in the order of codes, in units of a row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b = tl.program_id(2)
    live = row < tokens * G
    query_row = ((b * tokens + row // G) * (K * G) + head * G + row % G).to(tl.int64) * D
    matrix_ptr = query_transform_ptr + head * stride_rotation * D * D
    rotated = times_matrix(query_ptr + query_row[:, None], live, matrix_ptr, D, ROWS, D, DP, CHUNK, COMPILED)
    rotated *= softmax_scale
    largest = tl.max(tl.abs(rotated), 1)
    unit = tl.where(largest > 0, largest, 1.0) * (1.0 / 1024)
    flat = (b * K + head).to(tl.int64) * (tokens * G) + row
    tl.store(unit_ptr + flat, unit, mask=live)
    channels = tl.arange(0, DP)
    column = channels // 16 * 16 + channels % 8 * 2 + channels % 16 // 8  # code_of(column) = channel
    place = flat[:, None] * D + column[None, :]
    rotated16 = (rotated / unit[:, None]).to(tl.float16)
    tl.store(rotated_ptr + place, rotated16, mask=live[:, None] & (channels < D)[None, :])


@triton.jit
def _score_means(
    query_rows, live, mean_ptr, entry, in_history,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """Queries @ the mean keys of a block of pages -> [ROWS, BLOCK]; entry [BLOCK]: rows of the pool."""
    if BF16:  # exact products
        c = tl.arange(0, DP)
        q = tl.load(query_rows + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0.0)
        mask = in_history[None, :] & (c < D)[:, None]
        mean = tl.load(mean_ptr + entry[None, :] * D + c[:, None], mask=mask, other=0)
        scores = tl.dot(q, mean.to(tl.bfloat16, bitcast=True))
    else:
        scores = tl.zeros((ROWS, BLOCK), tl.float32)
        for chunk in range(0, D, CHUNK):
            c = chunk + tl.arange(0, CHUNK)
            q = tl.load(query_rows + c[None, :], mask=live[:, None] & (c < D)[None, :], other=0.0)
            mask = in_history[None, :] & (c < D)[:, None]
            mean = tl.load(mean_ptr + entry[None, :] * D + c[:, None], mask=mask, other=0)
            scores = tl.dot(q.to(tl.float32), widen(mean), acc=scores, input_precision="tf32x3")
    return scores


@triton.jit
def _attend_history(
    query_rows, rotated_rows, unit, live, oldest, table_ptr, first_page, history, head, softmax_scale,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr, scratch_ptr,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr, COMPILED: tl.constexpr,
    SINK_PAGES: tl.constexpr, SLIDING: tl.constexpr,
):  # fmt: skip
    """Flash attention over INT2 pages: sum of weights * values in the rotated basis, maximum, sum of weights.

    scratch_ptr [ROWS]: memory for BLOCK floats per row, private to the program.
    """
    m = tl.full((ROWS,), UNSEEN, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    channels = tl.arange(0, DP)
    mask = live[:, None] & (channels < D)[None, :]
    rotated = tl.load(rotated_rows + channels[None, :], mask=mask, other=0.0)
    word = tl.arange(0, DP // 16)  # of a token's key
    group = tl.arange(0, BLOCK)
    token = tl.arange(0, PAGES * PAGE)
    token_word = tl.arange(0, PAGES * PAGE // 16)  # of a channel's values
    row_in_page = code_of(token) % PAGE
    value_exponent = tl.full((), 0, tl.int32)
    for block in range(first_page, history, BLOCK):
        # Of a block of pages: the exponents of their scales, and the scores of their mean keys.
        in_history = block + group < history
        entry = tl.load(table_ptr + block + group, mask=in_history, other=0).to(tl.int64) * K + head
        scale_offset = entry[:, None] * PAGE + tl.arange(0, PAGE)[None, :]
        exponent = _exponent(tl.load(key_scale_ptr + scale_offset, mask=in_history[:, None], other=0))
        key_down = power(-exponent - SCALE_BITS)
        factor = unit * power(exponent + SCALE_BITS)
        exponent = _exponent(tl.load(value_scale_ptr + scale_offset, mask=in_history[:, None], other=0))
        value_down = power(-exponent + WEIGHT_BITS)
        acc *= power(value_exponent - exponent)
        value_exponent = exponent
        scores = _score_means(
            query_rows, live, key_page_mean_ptr, entry, in_history, ROWS, D, DP, CHUNK, BLOCK, BF16
        )
        tl.debug_barrier()
        tl.store(scratch_ptr[:, None] + group[None, :], scores * softmax_scale, mask=live[:, None])
        tl.debug_barrier()
        for page in range(block, tl.minimum(block + BLOCK, history), PAGES):
            # A step past the history reads the padding page; its score hides it.
            of_token = page + token // PAGE
            physical = tl.load(table_ptr + of_token, mask=of_token < history, other=0).to(tl.int64) * K + head
            key_scale = widen(tl.load(key_scale_ptr + physical * PAGE + row_in_page)) * key_down
            key_scale = tl.where(of_token < history, key_scale, 0.0)
            value_scale = widen(tl.load(value_scale_ptr + physical * PAGE + row_in_page)) * value_down
            value_scale = tl.where(of_token < history, value_scale, 0.0)
            key_row = physical * (PAGE * D // 16) + row_in_page * (D // 16)
            key_mask = (token >= 0)[:, None] & (word < D // 16)[None, :]
            key_words = tl.load(key_codes_ptr + key_row[:, None] + word[None, :], mask=key_mask, other=0)
            of_word = page + token_word // (PAGE // 16)
            physical = tl.load(table_ptr + of_word, mask=of_word < history, other=0).to(tl.int64) * K + head
            value_column = physical * (PAGE * D // 16) + token_word % (PAGE // 16)
            value_offset = value_column[None, :] + channels[:, None] * (PAGE // 16)
            value_mask = (token_word >= 0)[None, :] & (channels < D)[:, None]
            value_words = tl.load(value_codes_ptr + value_offset, mask=value_mask, other=0)
            of_score = page + tl.arange(0, PAGES)
            score_mask = live[:, None] & (of_score < history)[None, :]
            mean_score = tl.load(
                scratch_ptr[:, None] + (of_score - block)[None, :], mask=score_mask, other=UNSEEN
            )
            codes = _settle(unpack_codes(key_words, key_scale[:, None], PAGES * PAGE, DP, COMPILED), COMPILED)
            score = tl.dot(rotated, tl.trans(codes))
            if SLIDING:
                position = (SINK_PAGES + page) * PAGE + code_of(token)
                visible = position[None, :] >= oldest[:, None]
                score = tl.where(visible, score, UNSEEN)
            score = tl.reshape(score, (ROWS, PAGES, PAGE))
            m_new = tl.maximum(m, tl.max(tl.max(score, 2) * factor[:, None] + mean_score, 1))
            p = tl.exp2(score * factor[:, None, None] + (mean_score - m_new[:, None])[:, :, None])
            p = tl.reshape(p, (ROWS, PAGES * PAGE))
            if SLIDING:
                p = tl.where(visible, p, 0.0)
            alpha = tl.exp2(m - m_new)
            m = m_new
            l = l * alpha + tl.sum(p, 1)
            scale = tl.full((1, 1), 2.0**-5, tl.float32)  # 2**-SCALE_BITS
            codes = _settle(unpack_codes(value_words, scale, DP, PAGES * PAGE, COMPILED), COMPILED)
            weight = (p * value_scale[None, :]).to(tl.float16)
            acc = tl.dot(weight, tl.trans(codes), acc=acc * alpha[:, None])
    return acc * power(value_exponent + SCALE_BITS - WEIGHT_BITS), m, l


@triton.jit
def _merge(acc, m, l, sums, maximum, weights):
    """Two shares of the keys: sums of weights * values, maxima of scores, sums of weights."""
    m_new = tl.maximum(m, maximum)
    alpha, beta = tl.exp2(m - m_new), tl.exp2(maximum - m_new)
    return acc * alpha[:, None] + sums * beta[:, None], m_new, l * alpha + weights * beta


@triton.jit
def _merge_pieces(
    acc, m, l, sums_ptr, state_ptr, row, live, all_rows, pieces, D: tl.constexpr, DP: tl.constexpr
):
    """Further pieces of the keys, in memory: see `attend`."""
    channels = tl.arange(0, DP)
    mask = live[:, None] & (channels < D)[None, :]
    for piece in range(pieces):
        place = (row + piece * all_rows).to(tl.int64)
        maximum = tl.load(state_ptr + place, mask=live, other=UNSEEN)
        weights = tl.load(state_ptr + place + pieces * all_rows, mask=live, other=0.0)
        sums = tl.load(sums_ptr + place[:, None] * D + channels[None, :], mask=mask, other=0.0)
        acc, m, l = _merge(acc, m, l, sums.to(tl.float32), maximum, weights)
    return acc, m, l


# One compilation for all chunks: neither the tokens of one nor the width of a table make another kernel, nor
# which sequence of a batch it is.
@triton.jit(
    do_not_specialize=["tokens", "stride_table", "sliding_window", "pieces", "own_tokens"],
    do_not_specialize_on_alignment=[
        "new_lengths_ptr", "page_table_ptr", "window_table_ptr", "lengths_ptr", "history_ptr"
    ],
)  # fmt: skip
def _chunk_kernel(
    query_ptr, key_ptr, value_ptr, new_lengths_ptr, tokens,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    window_key_ptr, window_value_ptr, page_table_ptr, stride_table, window_table_ptr,
    lengths_ptr, history_ptr, output_transform_ptr, value_mean_ptr, stride_rotation,
    softmax_scale, sliding_window, sink_ptr, rotated_ptr, unit_ptr, sums_ptr, state_ptr, pieces,
    window_ptr, window_lse_ptr, own_ptr, own_lse_ptr, own_tokens, out_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    PAGES: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BF16: tl.constexpr,
    COMPILED: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, SLIDING: tl.constexpr,
    SINK_LOGITS: tl.constexpr, HISTORY_DONE: tl.constexpr, ROWS_DONE: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T * G / ROWS), K, B)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b = tl.program_id(2)
    step = row // G
    live = step < tokens
    length = tl.load(lengths_ptr + b)
    history = tl.load(history_ptr + b)
    claimed = tl.load(new_lengths_ptr + b)
    new_length = tl.minimum(tl.maximum(claimed, 0), tokens)
    position = length + step
    oldest = position - sliding_window + 1 if SLIDING else position * 0
    channels = tl.arange(0, DP)
    in_page = tl.arange(0, PAGE)
    out_row = ((b * tokens + step) * (K * G) + head * G + row % G).to(tl.int64) * D
    row_mask = live[:, None] & (channels < D)[None, :]
    out_rows = out_ptr + out_row[:, None]
    m = tl.full((ROWS,), UNSEEN, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)

    # --- INT2 pages ---
    first_page = tl.maximum(tl.min(oldest, 0) // PAGE - SINK_PAGES, 0) if SLIDING else 0
    flat = (b * K + head) * (tokens * G) + row
    all_rows = tl.num_programs(2) * K * tokens * G
    if first_page < history:
        if HISTORY_DONE:
            acc, m, l = _merge_pieces(acc, m, l, sums_ptr, state_ptr, flat, live, all_rows, pieces, D, DP)
        else:
            acc, m, l = _attend_history(
                query_ptr + out_row[:, None], rotated_ptr + flat.to(tl.int64)[:, None] * D,
                tl.load(unit_ptr + flat, mask=live, other=1.0), live, oldest,
                page_table_ptr + b * stride_table, first_page, history, head, softmax_scale,
                key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
                out_ptr + out_row,  # nothing else needs the rows of the output yet
                K, D, DP, ROWS, PAGES, CHUNK, BLOCK, BF16, COMPILED, SINK_PAGES, SLIDING,
            )  # fmt: skip
        # A register tile cannot be cut into chunks: the rotated output passes through its own rows.
        tl.debug_barrier()
        tl.store(out_rows + channels[None, :], acc, mask=row_mask)
        tl.debug_barrier()
        matrix_ptr = output_transform_ptr + head * stride_rotation * D * D
        acc = times_matrix(out_rows, live, matrix_ptr, D, ROWS, D, DP, CHUNK, COMPILED)
        tl.debug_barrier()
        mean_offset = head * stride_rotation * D + channels
        value_mean = widen(tl.load(value_mean_ptr + mean_offset, mask=channels < D, other=0))
        acc += l[:, None] * value_mean[None, :]

    if ROWS_DONE:
        one = tl.full((ROWS,), 1.0, tl.float32)
        query_head = head * G + row % G
        place = (step * (K * G) + query_head).to(tl.int64)[:, None] * D + channels[None, :]
        lse = tl.load(window_lse_ptr + query_head * tokens + step, mask=live, other=0.0) * 1.4426950408889634
        sums = tl.load(window_ptr + place, mask=row_mask, other=0.0)
        acc, m, l = _merge(acc, m, l, sums.to(tl.float32), lse, one)
        lse = tl.load(own_lse_ptr + query_head * own_tokens + step, mask=live, other=0.0) * 1.4426950408889634
        sums = tl.load(own_ptr + place, mask=row_mask, other=0.0)
        acc, m, l = _merge(acc, m, l, sums.to(tl.float32), lse, one)
    else:
        q = tl.load(query_ptr + out_row[:, None] + channels[None, :], mask=row_mask, other=0.0)
        if not BF16:
            q = q.to(tl.float32)

        # --- sink and recent pages ---
        stored_pages = (length + PAGE - 1) // PAGE
        for index in range(0, tl.minimum(stored_pages - history, SINK_PAGES + RECENT_SLOTS)):
            page = index + history if index >= SINK_PAGES else index
            slot = SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS if index >= SINK_PAGES else index
            physical = tl.load(window_table_ptr + b * (SINK_PAGES + RECENT_SLOTS) + slot).to(tl.int64)
            token = in_page + page * PAGE
            base = (physical * K + head) * (PAGE * D)
            acc, m, l = _plain_rows(
                q, softmax_scale, window_key_ptr + base, window_value_ptr + base, D, in_page, token < length,
                token[None, :] >= oldest[:, None], acc, m, l, D, DP, BF16,
            )  # fmt: skip

        # --- the chunk itself, causal ---
        last = tl.minimum(tl.max(step, 0) + 1, new_length)
        base = (b * tokens).to(tl.int64) * (K * D) + head * D
        for start in range(0, last, PAGE):
            other = start + in_page
            causal = (other[None, :] <= step[:, None]) & ((length + other)[None, :] >= oldest[:, None])
            acc, m, l = _plain_rows(
                q, softmax_scale, key_ptr + base, value_ptr + base, K * D, other, other < new_length, causal,
                acc, m, l, D, DP, BF16,
            )  # fmt: skip

    if SINK_LOGITS:
        sink = tl.load(sink_ptr + head * G + row % G).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha[:, None]
        l = l * alpha + tl.exp2(sink - m_new)
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    fits = (claimed == new_length) & (length + claimed < (stride_table + SINK_PAGES + RECENT_SLOTS) * PAGE)
    out = tl.where(fits, out, float("nan"))  # else rows of the sequence are lost
    tl.store(out_rows + channels[None, :], out, mask=row_mask)


def check_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache, sink_logits: torch.Tensor | None
) -> int:
    """Query heads per key/value head. Raises ShapeError, NotImplementedError (device, group)."""
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    batch, tokens, query_heads = query.shape[:3]
    if batch != cache.batch or query.shape[3] != head_dim or query_heads % heads:
        raise ShapeError(f"query {tuple(query.shape)}, expected [{cache.batch}, T, G * {heads}, {head_dim}]")
    for name, rows in (("key", key), ("value", value)):
        if rows.shape != (batch, tokens, heads, head_dim):
            raise ShapeError(f"{name} {tuple(rows.shape)}, expected {(batch, tokens, heads, head_dim)}")
    if sink_logits is not None and sink_logits.shape != (query_heads,):
        raise ShapeError(f"sink_logits {tuple(sink_logits.shape)}, expected ({query_heads},)")
    check_device(query)
    group = query_heads // heads
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per key/value head, the kernel serves 1..{MAX_GROUP}")
    return group


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache,
    rotation,
    *,
    new_lengths: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]. `cache` is the state before the
    chunk; token j of sequence b stands at position lengths[b] + j. Rows at or past new_lengths[b] are
    padding: nothing attends to them and their output means nothing. Raises ShapeError; NotImplementedError
    (device, more than 16 query heads per key/value head) before anything is allocated.
    """
    check_chunk(query, key, value, cache, sink_logits)
    query = query.contiguous()
    rotated = rotate(query, cache, rotation, softmax_scale)
    return attend(
        query, key, value, cache, rotation, rotated, None, new_lengths=new_lengths,
        softmax_scale=softmax_scale, sliding_window=sliding_window, sink_logits=sink_logits,
    )  # fmt: skip


def rotate(query: torch.Tensor, cache, rotation, softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated queries, fp16 [B, K, T * G, D], channels in the order of `code_of`, and units of their scores.

    query [B, T, N, D]; units float32 [B, K, T * G]: a product with a key times the unit is a score in log2.
    """
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    batch, tokens, query_heads = query.shape[:3]
    rows = tokens * query_heads // heads
    stride_rotation = rotation_stride(rotation.query_transform.shape[0], heads)
    padded = _padded(head_dim)
    tile = TILES[padded]
    rotated = torch.empty((batch, heads, rows, head_dim), device=query.device, dtype=torch.float16)
    unit = torch.empty((batch, heads, rows), device=query.device)
    _rotate_kernel[(triton.cdiv(rows, tile.rows), heads, batch)](
        query, tokens, rotation.query_transform, stride_rotation, softmax_scale * LOG2_E, rotated, unit,
        K=heads, G=query_heads // heads, D=head_dim, DP=padded, ROWS=tile.rows, CHUNK=tile.chunk,
        COMPILED=query.device.type == "cuda", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return rotated, unit


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache,
    rotation,
    rotated: tuple[torch.Tensor, torch.Tensor],
    history: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    new_lengths: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`chunk_attention` of checked arguments and contiguous queries, where these are rotated already.

    rotated: what `rotate` returns. history: None, or the share of the INT2 pages, in pieces, rows as those of
    `rotated`: sums of weights * values in the rotated basis, [pieces, B * K * T * G, D]; and, of the scores
    in log2 units, maxima and sums of weights, float32 [2, pieces, B * K * T * G].
    rows: None, or of one sequence the shares of the BF16 rows, normalized, with natural log-sum-exps: of sink
    and recent pages [T, N, D] and float32 [N, T]; of the chunk itself with T' >= T rows. Then None for the
    history means that there are no INT2 pages. out: float32, like query, to be written.
    """
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    batch, tokens, query_heads = query.shape[:3]
    group = query_heads // heads
    if out is None:
        out = torch.empty((batch, tokens, query_heads, head_dim), device=query.device)
    window, window_lse, own, own_lse = (out, out, out, out) if rows is None else rows
    sums, state = (window, window_lse) if history is None else history
    padded = _padded(head_dim)
    tile = TILES[padded]
    compiled = query.device.type == "cuda"  # the interpreter has no assembly, and its bf16 product is wrong
    key, value = (x.to(torch.bfloat16).contiguous().view(torch.int16) for x in (key, value))
    _chunk_kernel[(triton.cdiv(tokens * group, tile.rows), heads, batch)](
        query, key, value, new_lengths, tokens,
        cache.key_codes, cache.value_codes, cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.key_page_mean.view(torch.int16),
        cache.window_key.view(torch.int16), cache.window_value.view(torch.int16),
        cache.page_table, cache.page_table.shape[1], cache.window_table, cache.lengths, cache.history_pages,
        rotation.output_transform, rotation.value_mean.view(torch.int16),
        rotation_stride(rotation.query_transform.shape[0], heads), softmax_scale * LOG2_E,
        sliding_window or 0, out if sink_logits is None else sink_logits, *rotated,
        sums, state, sums.shape[0], window, window_lse, own, own_lse, own_lse.shape[1], out,
        K=heads, G=group, D=head_dim, DP=padded, ROWS=tile.rows, PAGES=tile.pages, CHUNK=tile.chunk,
        BLOCK=min(64, 1 << (head_dim.bit_length() - 1)),  # its scores must fit an output row
        BF16=compiled and query.dtype == torch.bfloat16, COMPILED=compiled,
        SINK_PAGES=config.sink_pages, RECENT_SLOTS=config.recent_slots, SLIDING=sliding_window is not None,
        SINK_LOGITS=sink_logits is not None, HISTORY_DONE=history is not None or rows is not None,
        ROWS_DONE=rows is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _padded(head_dim: int) -> int:
    return max(32, triton.next_power_of_2(head_dim))
