"""One-token attention over a mixed INT2 / BF16 cache in plain Triton: a few launches, no host wait.

Why: the history is never dequantized to memory. Codes become fp16 subnormals (code * 2**-24) by masks alone;
the query is rotated instead of the keys, the output instead of the values.

1. `_rotate_kernel`: rotates the query.
2. `_stage_kernel`: flash attention over equal pieces of all pages, INT2 and BF16 (`DecodePlan`). Partials: o
   float32 [partials, G, D], log2-sum-exp [partials, G]. `decode/gluon.py` has its own for Hopper.
3. `_merge_kernel`: merges the partials with sink logits, rotates back, adds value mean and BF16 pages. Many
   queries are rotated back by `_rotate_kernel`.

Scores are in log2 units everywhere. Runs in Triton's CPU interpreter. Format page, section 5.
"""

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...core import cache_format as fmt
from ...core.errors import ShapeError
from ..launch.repeated import Launch, remembered
from ..launch.tensors import check_device, rotation_stride

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
PAGES_PER_BLOCK = tl.constexpr(16)  # page means that one product with the query covers
CODE_UNIT = tl.constexpr(2.0**24)  # a code read as an fp16 subnormal is code * 2**-24
MAX_GROUP = 16
LOG2_E = math.log2(math.e)
# Query heads of a batch up to which one launch merges and rotates back: it reads the transform once for each
# of them. Two launches take 2 us more at 256 on an H200 (Gluon), 6 less at 1024.
ROWS_OF_ONE_MERGE = 256
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How the plain stage runs: programs per multiprocessor, warps, pipeline stages, registers.

    window_pages: the work of one BF16 page in INT2 pages.
    """

    programs: int
    warps: int
    stages: int
    registers: int | None = None  # per thread, at most; for up to 8 query heads per key/value head
    window_pages: int = 8


# By padded head_dim. 128 is the fastest of four settings on an H200 at batch 8 (270 us in all; 302 for 8
# programs of 255 registers, 288 for 8 of two warps).
TUNING = {
    64: Tuning(programs=12, warps=1, stages=3),
    128: Tuning(programs=12, warps=1, stages=3, registers=168),
    256: Tuning(programs=4, warps=4, stages=2),
    512: Tuning(programs=2, warps=8, stages=2),
}


@triton.jit
def widen(raw):
    """bf16 bits (int16) -> float32."""
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _coarse(x):
    """float32 without the bits that TF32 lacks."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _dot_exact(a, b, acc):
    """acc + a @ b for b that is exact in TF32 (bf16 is); a is split into two TF32."""
    coarse = _coarse(a)
    acc = tl.dot(a - coarse, b, acc=acc, input_precision="tf32")
    return tl.dot(coarse, b, acc=acc, input_precision="tf32")


@triton.jit
def _add_product(out, rows, matrix, EXACT_ROWS: tl.constexpr):
    """out + rows @ matrix to 22 bits: TF32 products of two parts each. They do not wait for each other.

    EXACT_ROWS: TF32 holds the rows (bf16).
    """
    zero = tl.zeros(out.shape, tl.float32)
    coarse = _coarse(matrix)
    rest = tl.dot(rows, matrix - coarse, acc=zero, input_precision="tf32")
    if not EXACT_ROWS:
        whole = rows
        rows = _coarse(whole)
        rest += tl.dot(whole - rows, coarse, acc=zero, input_precision="tf32")
    return tl.dot(rows, coarse, acc=out, input_precision="tf32") + rest


@triton.jit(do_not_specialize=["batch", "stride_rotation"])
def _rotate_kernel(
    rows_ptr, matrix_ptr, stride_rotation, added_ptr, weight_ptr, mean_ptr, out_ptr, batch,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, EXACT_ROWS: tl.constexpr, BACK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(D / COLUMNS), ceil(B * G / ROWS), K): out = rows @ matrix; BACK: + added + weight * mean.

    The ROWS query heads of a program share a key/value head, whatever their sequence. EARLY: this launch and
    the next may start before the one before them has ended (Hopper).
    """
    if EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(2)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = (n // G * K + head) * G + n % G
    place = row[:, None] * D + columns[None, :]
    inside = (n < batch * G)[:, None] & (columns < D)[None, :]
    out = tl.zeros((ROWS, COLUMNS), tl.float32)
    for chunk in tl.static_range(0, D, CHUNK):
        c = chunk + tl.arange(0, CHUNK)
        mask = (c < D)[:, None] & (columns < D)[None, :]
        offset = head * stride_rotation * D * D + c[:, None] * D + columns[None, :]
        matrix = tl.load(matrix_ptr + offset, mask=mask, other=0.0)
        if chunk == 0 and BACK:
            mean = tl.load(mean_ptr + head * stride_rotation * D + columns, mask=columns < D, other=0)
            if EARLY:
                gdc_wait()
            weight = tl.load(weight_ptr + row, mask=n < batch * G, other=0.0)
            out = tl.load(added_ptr + place, mask=inside, other=0.0)
            out += weight[:, None] * widen(mean)[None, :]
        mask = (n < batch * G)[:, None] & (c < D)[None, :]
        part = tl.load(rows_ptr + row[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
        out = _add_product(out, part, matrix, EXACT_ROWS)
    tl.store(out_ptr + place, out, mask=inside)


@triton.jit
def first_page(oldest, history, SINK_PAGES: tl.constexpr):
    """The first history page that holds a token from `oldest` on."""
    return tl.minimum(tl.maximum(oldest // PAGE - SINK_PAGES, 0), history)


@triton.jit
def _pages_to_read(
    history_ptr, lengths_ptr, sliding_window, batch,
    SINK_PAGES: tl.constexpr, WINDOW: tl.constexpr, SLIDING: tl.constexpr, BATCH_P: tl.constexpr,
):  # fmt: skip
    """Work of one head of every sequence [BATCH_P] in INT2 pages, of which WINDOW are its BF16 pages."""
    index = tl.arange(0, BATCH_P)
    history = tl.load(history_ptr + index, mask=index < batch, other=0)
    if SLIDING:
        length = tl.load(lengths_ptr + index, mask=index < batch, other=0)
        history -= first_page(tl.maximum(length - sliding_window, 0), history, SINK_PAGES)
    return tl.where(index < batch, history + WINDOW, 0)


@triton.jit
def piece_start(piece, total, pieces):
    """Where a piece begins: piece * total / pieces, rounded down. Of little work there are fewer pieces."""
    pieces = tl.minimum(pieces, total)
    piece = tl.minimum(piece, pieces)
    return piece * (total // pieces) + piece * (total % pieces) // pieces


@triton.jit
def _piece_at(place, total, pieces):
    """The piece that holds a place on the line of work."""
    return (((place.to(tl.int64) + 1) * tl.minimum(pieces, total) - 1) // total).to(tl.int32)


@triton.jit
def pieces_of(
    b, history_ptr, lengths_ptr, sliding_window, batch, pieces, SINK_PAGES: tl.constexpr,
    SLOTS: tl.constexpr, WINDOW_PAGES: tl.constexpr, SLIDING: tl.constexpr, BATCH_P: tl.constexpr,
):  # fmt: skip
    """(first piece, number of pieces) of the line of work that touch sequence b, see `DecodePlan`."""
    sequence = tl.arange(0, BATCH_P)
    load = _pages_to_read(
        history_ptr, lengths_ptr, sliding_window, batch, SINK_PAGES, SLOTS * WINDOW_PAGES, SLIDING, BATCH_P
    )
    total = tl.sum(load, 0)
    own = tl.sum(tl.where(sequence == b, load, 0), 0)
    start = tl.sum(tl.where(sequence < b, load, 0), 0)
    first = _piece_at(start, total, pieces)
    return first, _piece_at(start + own - 1, total, pieces) - first + 1


@triton.constexpr_function
def _code_assembly(place: int) -> str:
    """Masks one code out of both halves of a word."""
    if place < 5:
        return f"and.b32 $0, $1, {0x00030003 << 2 * place:#x};"
    return f"{{ .reg .b32 x; shr.b32 x, $1, 10; and.b32 $0, x, {0x00030003 << 2 * (place - 5):#x}; }}"


@triton.jit
def _codes(halves, place: tl.constexpr):
    """Halves of code words, int16 -> their codes at one place, fp16: code * 2**-24 * 4**e, e = place (- 5).

    An element stays where it is: the compiler reads operands of the matrix unit straight from a staged page.
    """
    if INTERPRETED:
        e: tl.constexpr = place - 5 if place >= 5 else place
        shifted = halves >> 10 if place >= 5 else halves
        return (shifted & (3 << (2 * e))).to(tl.int16).to(tl.float16, bitcast=True)
    # The compiler would mask each half for itself.
    return tl.inline_asm_elementwise(
        _code_assembly(place), "=r,r", [halves], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def _eighth(x, i: tl.constexpr, ROWS: tl.constexpr):
    """x [8, 16, ROWS] -> x[i]: registers only."""
    x = tl.permute(tl.reshape(x, (2, 2, 2, 16, ROWS)), (3, 4, 0, 1, 2))
    a, b = tl.split(x)
    if i % 2 == 1:
        a = b
    c, d = tl.split(a)
    if (i // 2) % 2 == 1:
        c = d
    e, f = tl.split(c)
    if i // 4 == 1:
        e = f
    return e


@triton.jit
def _prepare_pages(
    query_ptr, mean_ptr, value_scale_ptr, table_ptr, page_score_ptr, low, high, head, softmax_scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, EXACT_QUERY: tl.constexpr,
):  # fmt: skip
    """Writes the query's products with mean keys of pages [low, high); returns the largest value scale."""
    rows = tl.arange(0, ROWS)
    tokens = tl.arange(0, PAGE)
    largest = tl.zeros((PAGES_PER_BLOCK,), tl.int32)
    for block in tl.range(low, high, PAGES_PER_BLOCK, num_stages=1):
        page = block + tl.arange(0, PAGES_PER_BLOCK)
        valid = page < high
        physical = tl.load(table_ptr + page, mask=valid, other=0).to(tl.int64) * K + head
        mask = valid[:, None] & (tokens >= 0)[None, :]
        scale = tl.load(value_scale_ptr + physical[:, None] * PAGE + tokens[None, :], mask=mask, other=0)
        largest = tl.maximum(
            largest, tl.max(scale.to(tl.int32), 1)
        )  # positive bf16 are ordered like integers
        scores = tl.zeros((PAGES_PER_BLOCK, ROWS), tl.float32)
        for chunk in tl.static_range(0, DP, CHUNK):
            c = chunk + tl.arange(0, CHUNK)
            mask = valid[:, None] & (c < D)[None, :]
            mean = widen(tl.load(mean_ptr + physical[:, None] * D + c[None, :], mask=mask, other=0))
            mask = (c < D)[:, None] & (rows < G)[None, :]
            q = tl.load(query_ptr + rows[None, :] * D + c[:, None], mask=mask, other=0.0).to(tl.float32)
            # bf16 is exact in TF32, a float32 query in two of them.
            if EXACT_QUERY:
                scores = tl.dot(mean, q, acc=scores, input_precision="tf32")
            else:
                coarse = _coarse(q)
                scores = tl.dot(mean, coarse, acc=scores, input_precision="tf32")
                scores = tl.dot(mean, q - coarse, acc=scores, input_precision="tf32")
        tl.store(
            page_score_ptr + page[:, None] * ROWS + rows[None, :], scores * softmax_scale, mask=valid[:, None]
        )
    tl.debug_barrier()  # other threads read what this one has written
    return widen(tl.max(largest, 0))


@triton.jit
def _query_part(
    rotated_ptr, unit, place: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The rotated query at the channels of `_codes(., place)` in units of `unit`, fp16 [columns, ROWS]."""
    rows = tl.arange(0, ROWS)
    column = tl.arange(0, 16 if DP == 64 else DP // 8)
    channel = 8 * (column % 8) + 4 * (column // 8) + place if DP == 64 else 8 * column + place
    e: tl.constexpr = place - 5 if place >= 5 else place
    mask = (channel < D)[:, None] & (rows < G)[None, :]
    q = tl.load(rotated_ptr + rows[None, :] * D + channel[:, None], mask=mask, other=0.0)
    return ((q / unit[None, :]).to(tl.float16).to(tl.float32) * (0.25**e)).to(tl.float16)


@triton.jit
def _history_part(
    rotated_ptr, query_ptr, page_score_ptr, key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr,
    value_scale_ptr, table_ptr, low, high, oldest, softmax_scale, head, segment, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, SINK_PAGES: tl.constexpr, SLIDING: tl.constexpr, EXACT_QUERY: tl.constexpr,
):  # fmt: skip
    """Flash attention over pages [low, high), two at a time. Codes are read as halves of words, 8 in each."""
    largest = _prepare_pages(
        query_ptr, mean_ptr, value_scale_ptr, table_ptr, page_score_ptr, low, high, head, softmax_scale,
        K, G, D, DP, ROWS, CHUNK, EXACT_QUERY,
    )  # fmt: skip
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    mask = (channels < D)[:, None] & (rows < G)[None, :]
    q = tl.load(rotated_ptr + rows[None, :] * D + channels[:, None], mask=mask, other=0.0)
    unit = tl.max(tl.abs(q), 0)
    unit = tl.where(unit > 0, unit, 1.0) * (1.0 / 1024)
    query_sum = tl.sum((q / unit[None, :]).to(tl.float16).to(tl.float32), 0)
    start = (-1.5 / CODE_UNIT) * query_sum[None, :] + tl.zeros((2 * PAGE, ROWS), tl.float32)
    q0 = _query_part(rotated_ptr, unit, 0, G, D, DP, ROWS)
    q1 = _query_part(rotated_ptr, unit, 1, G, D, DP, ROWS)
    q2 = _query_part(rotated_ptr, unit, 2, G, D, DP, ROWS)
    q3 = _query_part(rotated_ptr, unit, 3, G, D, DP, ROWS)
    if DP > 64:
        q4 = _query_part(rotated_ptr, unit, 4, G, D, DP, ROWS)
        q5 = _query_part(rotated_ptr, unit, 5, G, D, DP, ROWS)
        q6 = _query_part(rotated_ptr, unit, 6, G, D, DP, ROWS)
        q7 = _query_part(rotated_ptr, unit, 7, G, D, DP, ROWS)
    unit *= softmax_scale
    inverse_unit = 1.0 / unit

    # Row 16 i + 8 s + j of a score tile is token 8 j + i of page s: the j-th half of a value word holds the
    # tokens 8 j .. 8 j + 7, and place i of all halves of both pages is one product.
    row = tl.arange(0, 2 * PAGE)
    i = row // 16
    token = 8 * (row % 8) + i
    second = (row // 8) % 2 == 1
    place = tl.where(i >= 5, i - 5, i)
    restore = (1 << (2 * place)).to(tl.float32)
    value_unit = tl.where(largest > 0, largest, 1.0) * (1.0 / 32768)  # keeps the weights inside fp16
    weight_unit = 1.0 / (restore * value_unit)
    half = tl.arange(0, 16 if DP == 64 else DP // 8)
    column = (
        half % 8 if DP == 64 else half
    )  # 8 halves do not fill a product: columns 8 .. 15 are their high bytes
    value_half = tl.arange(0, 16)
    m = tl.full((ROWS,), -1e30, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((DP, ROWS), tl.float32)
    for page in range(low, high, 2):
        other = tl.minimum(page + 1, high - 1)
        first_physical = tl.load(table_ptr + page).to(tl.int64) * K + head
        second_physical = tl.load(table_ptr + other).to(tl.int64) * K + head
        physical = tl.where(second, second_physical, first_physical)
        key_ptr = key_codes_ptr + (physical * (8 * D) + token * (D // 8))[:, None] + column[None, :]
        base = tl.where(value_half >= 8, second_physical, first_physical) * (8 * D) + value_half % 8
        value_ptr = value_codes_ptr + base[None, :] + channels[:, None] * 8
        if D == DP:
            key_halves = tl.load(key_ptr)
            value_halves = tl.load(value_ptr)
        else:
            key_halves = tl.load(key_ptr, mask=(row >= 0)[:, None] & (column < D // 8)[None, :], other=0)
            value_halves = tl.load(
                value_ptr, mask=(channels < D)[:, None] & (value_half >= 0)[None, :], other=0
            )
        key_scale = widen(tl.load(key_scale_ptr + physical * PAGE + token))
        value_scale = widen(tl.load(value_scale_ptr + physical * PAGE + token))
        first_score = tl.load(page_score_ptr + page * ROWS + rows) * inverse_unit
        second_score = tl.load(page_score_ptr + other * ROWS + rows) * inverse_unit
        second_score = tl.where(page + 1 < high, second_score, -1e30)
        if DP == 64:
            key_halves = tl.where((half >= 8)[None, :], key_halves >> 8, key_halves)
        score = tl.dot(_codes(key_halves, 0), q0, acc=start)
        score = tl.dot(_codes(key_halves, 1), q1, acc=score)
        score = tl.dot(_codes(key_halves, 2), q2, acc=score)
        score = tl.dot(_codes(key_halves, 3), q3, acc=score)
        if DP > 64:
            score = tl.dot(_codes(key_halves, 4), q4, acc=score)
            score = tl.dot(_codes(key_halves, 5), q5, acc=score)
            score = tl.dot(_codes(key_halves, 6), q6, acc=score)
            score = tl.dot(_codes(key_halves, 7), q7, acc=score)
        score = score * (key_scale * CODE_UNIT)[:, None]
        score += tl.where(second[:, None], second_score[None, :], first_score[None, :])
        if SLIDING:
            visible = token + (SINK_PAGES + page + second.to(tl.int32)) * PAGE >= oldest
            score = tl.where(visible[:, None], score, -1e30)
        m_new = tl.maximum(m, tl.max(score, 0))
        alpha = tl.exp2((m - m_new) * unit)
        p = tl.exp2(score * unit[None, :] - (m_new * unit)[None, :])
        if SLIDING:
            p = tl.where(visible[:, None] & ((page + 1 < high) | (second == 0))[:, None], p, 0.0)
        l = l * alpha + tl.sum(p, 0)
        weight_sum = weight_sum * alpha + tl.sum(p * value_scale[:, None], 0)
        weight = tl.reshape((p * (value_scale * weight_unit)[:, None]).to(tl.float16), (8, 16, ROWS))
        acc *= alpha[None, :]
        for place_index in tl.static_range(8):
            acc = tl.dot(_codes(value_halves, place_index), _eighth(weight, place_index, ROWS), acc=acc)
        m = m_new
    safe = tl.where(l > 0, l, 1.0)
    o = (acc * (CODE_UNIT * value_unit) - 1.5 * weight_sum[None, :]) / safe[None, :]
    mask = (channels < D)[:, None] & (rows < G)[None, :]
    tl.store(o_ptr + (segment * G + rows)[None, :].to(tl.int64) * D + channels[:, None], o, mask=mask)
    lse = tl.where(l > 0, m * unit + tl.log2(safe), -float("inf"))
    tl.store(lse_ptr + segment * G + rows, lse, mask=rows < G)


@triton.jit
def _window_part(
    query_ptr, window_key_ptr, window_value_ptr, window_table_ptr, length, history, oldest, softmax_scale,
    index, head, segment, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window, STEP tokens at a time."""
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, DP)
    recent = index - SINK_PAGES
    page = tl.where(recent < 0, index, index + history)
    slot = tl.where(recent < 0, index, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    physical = tl.load(window_table_ptr + slot).to(tl.int64)
    offset = (physical * K + head) * (PAGE * D)
    row_mask = (rows < G)[:, None] & (channels < D)[None, :]
    q = tl.load(query_ptr + rows[:, None] * D + channels[None, :], mask=row_mask, other=0.0)
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
        key = widen(tl.load(window_key_ptr + row_offset, mask=mask, other=0))
        value = widen(tl.load(window_value_ptr + row_offset, mask=mask, other=0))
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
    out_row = (segment * G + rows)[:, None].to(tl.int64)
    tl.store(o_ptr + out_row * D + channels[None, :], o, mask=row_mask)
    tl.store(lse_ptr + segment * G + rows, tl.where(l > 0, m + tl.log2(safe), -float("inf")), mask=rows < G)


@triton.jit(do_not_specialize=["sliding_window", "batch", "pieces", "stride_table"])
def _stage_kernel(
    query_ptr, rotated_ptr, page_score_ptr, key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr,
    value_scale_ptr, window_key_ptr, window_value_ptr, page_table_ptr, stride_table, window_table_ptr,
    lengths_ptr, history_ptr, softmax_scale, sliding_window, batch, pieces, o_ptr, lse_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, WINDOW_PAGES: tl.constexpr,
    SLIDING: tl.constexpr, BATCH_P: tl.constexpr, WINDOW_STEP: tl.constexpr, EXACT_QUERY: tl.constexpr,
):  # fmt: skip
    """Grid (programs): every program takes its piece of the line of work, see `DecodePlan`."""
    SLOTS: tl.constexpr = SINK_PAGES + RECENT_SLOTS
    WINDOW: tl.constexpr = SLOTS * WINDOW_PAGES
    program = tl.program_id(0)
    load = _pages_to_read(
        history_ptr, lengths_ptr, sliding_window, batch, SINK_PAGES, WINDOW, SLIDING, BATCH_P
    )
    total = tl.sum(load, 0)
    head = program % K
    x = piece_start(program // K, total, pieces)
    end = piece_start(program // K + 1, total, pieces)
    earlier = tl.cumsum(load, 0) <= x
    b = tl.sum(earlier.to(tl.int32), 0)
    start = tl.sum(tl.where(earlier, load, 0), 0)
    while x < end:
        row = b * K + head
        length = tl.load(lengths_ptr + b)
        history = tl.load(history_ptr + b)
        oldest = tl.maximum(length - sliding_window, 0) if SLIDING else 0
        first = first_page(oldest, history, SINK_PAGES) if SLIDING else 0
        row_end = start + WINDOW + history - first
        low = x - start
        high = tl.minimum(end, row_end) - start
        window_low = (low + WINDOW_PAGES - 1) // WINDOW_PAGES
        window_high = tl.minimum((high + WINDOW_PAGES - 1) // WINDOW_PAGES, SLOTS)
        for slot in range(window_low, window_high):
            _window_part(
                query_ptr + row * G * D, window_key_ptr, window_value_ptr, window_table_ptr + b * SLOTS,
                length, history, oldest, softmax_scale, slot, head, row * SLOTS + slot, o_ptr, lse_ptr,
                K, G, D, DP, ROWS, WINDOW_STEP, SINK_PAGES, RECENT_SLOTS,
            )  # fmt: skip
        page_low = first + tl.maximum(low - WINDOW, 0)
        page_high = first + tl.maximum(high - WINDOW, 0)
        segment = batch * K * SLOTS + program + b * K
        if page_low < page_high:
            _history_part(
                rotated_ptr + row * G * D, query_ptr + row * G * D,
                page_score_ptr + row * stride_table * ROWS,
                key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr,
                page_table_ptr + b * stride_table, page_low, page_high, oldest, softmax_scale, head, segment,
                o_ptr, lse_ptr, K, G, D, DP, ROWS, CHUNK, SINK_PAGES, SLIDING, EXACT_QUERY,
            )  # fmt: skip
        else:
            g = tl.arange(0, ROWS)
            channel = tl.arange(0, DP)
            out = (segment * G + g).to(tl.int64)[:, None] * D + channel[None, :]
            tl.store(o_ptr + out, 0.0, mask=(g < G)[:, None] & (channel < D)[None, :])
            tl.store(lse_ptr + segment * G + g, -float("inf"), mask=g < G)
        x = tl.minimum(row_end, end)
        start = row_end
        b += 1


@triton.jit(do_not_specialize=["table_pages", "sliding_window", "batch", "pieces", "stride_rotation"])
def _merge_kernel(
    o_ptr, lse_ptr, history_ptr, lengths_ptr, table_pages, sliding_window, batch, pieces, transform_ptr,
    value_mean_ptr, stride_rotation, sink_ptr, out_ptr, weight_ptr, window_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SINK_PAGES: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_P: tl.constexpr, WINDOW_PAGES: tl.constexpr, SLIDING: tl.constexpr,
    BATCH_P: tl.constexpr, PIECES_P: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
    SINK_LOGITS: tl.constexpr, ROTATE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (DP / COLUMNS, B * K * G): merges the partial results of one query head.

    ROTATE: writes some channels of the output. Else all channels of what the output is made of: the part of
    the history, still in the rotated basis, its share of the softmax, and the part of the BF16 pages. All
    loads start before anything waits for one: the time of this kernel is latency. EARLY: it may start before
    stage 1 has ended, and the next kernel before it has (Hopper).
    """
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(1) // G
    g = tl.program_id(1) % G
    head = row % K
    channels = tl.arange(0, DP)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # What stage 1 does not write can be read before it ends.
    length = tl.load(lengths_ptr + row // K)
    first, count = pieces_of(
        row // K, history_ptr, lengths_ptr, sliding_window, batch, pieces, SINK_PAGES, SLOTS, WINDOW_PAGES,
        SLIDING, BATCH_P,
    )  # fmt: skip
    if ROTATE:
        inside = (channels < D)[:, None] & (columns < D)[None, :]
        offset = head * stride_rotation * D * D + channels[:, None] * D + columns[None, :]
        transform = tl.load(transform_ptr + offset, mask=inside, other=0.0)
        mean = tl.load(value_mean_ptr + head * stride_rotation * D + columns, mask=columns < D, other=0)
    if SINK_LOGITS:
        sink = tl.load(sink_ptr + head * G + g).to(tl.float32) * 1.4426950408889634
    if EARLY:
        gdc_wait()

    # BF16 pages, then pieces of the history.
    slot = tl.arange(0, SLOTS_P)
    slot_row = (row * SLOTS + slot) * G + g
    window = _partials(o_ptr, slot_row, slot < SLOTS, columns, D)
    piece = tl.arange(0, STEP)
    piece_row = (batch * K * SLOTS + row + first * K) * G + g  # of the first piece; the next is K * G further
    o = _partials(o_ptr, piece_row + piece * (K * G), piece < count, channels, D)
    slot_lse = tl.load(lse_ptr + slot_row, mask=slot < SLOTS, other=-float("inf"))
    every = tl.arange(0, PIECES_P)
    lse = tl.load(lse_ptr + piece_row + every * (K * G), mask=every < count, other=-float("inf"))
    o_lse = tl.load(lse_ptr + piece_row + piece * (K * G), mask=piece < count, other=-float("inf"))
    top = tl.maximum(tl.max(lse, 0), tl.max(slot_lse, 0))
    if SINK_LOGITS:
        top = tl.maximum(top, sink)
    top = tl.where(top > -float("inf"), top, 0.0)
    weight = tl.sum(tl.exp2(lse - top), 0)
    slot_weight = tl.exp2(slot_lse - top)
    total = weight + tl.sum(slot_weight, 0)
    if SINK_LOGITS:
        total += tl.exp2(sink - top)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    inverse = tl.where(length < (table_pages + SLOTS) * PAGE, inverse, float("nan"))  # rows of it are lost
    acc = o * tl.exp2(o_lse - top)[:, None]
    for low in tl.range(STEP, count, STEP, num_stages=1):
        rows = piece_row + (low + piece) * (K * G)
        o = _partials(o_ptr, rows, low + piece < count, channels, D)
        o_lse = tl.load(lse_ptr + rows, mask=low + piece < count, other=-float("inf"))
        acc += o * tl.exp2(o_lse - top)[:, None]
    history = tl.sum(acc, 0) * inverse
    weight *= inverse
    window = tl.sum(window * slot_weight[:, None], 0) * inverse
    place = tl.program_id(1) * D + columns
    if ROTATE:
        out = tl.sum(history[:, None] * transform, 0) + window + weight * widen(mean)
        tl.store(out_ptr + place, out, mask=columns < D)
    else:
        tl.store(out_ptr + tl.program_id(1) * D + channels, history, mask=channels < D)
        tl.store(weight_ptr + tl.program_id(1), weight)
        tl.store(window_ptr + place, window, mask=columns < D)


@triton.jit
def _partials(o_ptr, rows, exist, channels, D: tl.constexpr):
    """Channels of partial results, float32 [rows, channels]."""
    mask = exist[:, None] & (channels < D)[None, :]
    return tl.load(o_ptr + rows.to(tl.int64)[:, None] * D + channels[None, :], mask=mask, other=0.0)


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Everything a decode step fixes on the host: shapes, tiles and the number of programs.

    The work of a head is a line: for every sequence its BF16 pages, then its INT2 pages. Stage 1 cuts it into
    equal pieces; program piece * K + head, so that all heads of a page are read at about the same time. A
    piece leaves a partial result for every sequence that it touches: B * K * slots + (piece + sequence) * K +
    head. A BF16 page is read whole where it begins; its partial is (sequence * K + head) * slots + slot.
    """

    batch: int
    heads: int
    group: int
    head_dim: int
    padded_dim: int
    padded_group: int  # 4, 8 or 16: the head columns that stage 1 works with
    padded_batch: int
    pieces: int
    sink_pages: int
    recent_slots: int
    window_pages: int  # the work of one BF16 page, in INT2 pages
    stride_rotation: int
    sliding_window: int | None

    @property
    def slots(self) -> int:
        return self.sink_pages + self.recent_slots

    @property
    def partials(self) -> int:
        return self.heads * (self.batch * (self.slots + 1) + self.pieces)


def query_group(query: torch.Tensor, cache) -> int:
    """Query heads per key/value head of query [B, N, D]. Raises ShapeError; NotImplementedError above 16."""
    batch, query_heads, head_dim = query.shape
    heads = cache.config.num_key_value_heads
    if batch != cache.batch or head_dim != cache.config.head_dim or query_heads % heads:
        raise ShapeError(
            f"query {tuple(query.shape)}, expected [{cache.batch}, G * {heads}, {cache.config.head_dim}]"
        )
    group = query_heads // heads
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per key/value head, the kernel serves 1..{MAX_GROUP}")
    return group


def plan_decode(
    query: torch.Tensor,
    cache,
    rotation,
    sliding_window: int | None,
    *,
    programs: int,
    window_pages: int,
) -> DecodePlan:
    """Checks shapes and device and divides the work among about `programs` programs; allocates nothing.

    Raises ShapeError for shapes that contradict each other, NotImplementedError for what no kernel serves.
    """
    config = cache.config
    group = query_group(query, cache)
    check_device(query)
    batch, _, head_dim = query.shape
    heads = config.num_key_value_heads
    most = batch * (cache.page_table.shape[1] + window_pages * config.window_slots)
    return DecodePlan(
        batch=batch,
        heads=heads,
        group=group,
        head_dim=head_dim,
        padded_dim=_padded_dim(head_dim),
        padded_group=max(4, triton.next_power_of_2(group)),
        padded_batch=max(32, triton.next_power_of_2(batch)),
        pieces=max(1, min(most, programs // heads)),
        sink_pages=config.sink_pages,
        recent_slots=config.recent_slots,
        window_pages=window_pages,
        stride_rotation=rotation_stride(rotation.query_transform.shape[0], heads),
        sliding_window=sliding_window,
    )


def check_sinks(plan: DecodePlan, sink_logits: torch.Tensor | None) -> None:
    """Raises ShapeError unless there is one sink logit per query head, or none."""
    query_heads = plan.heads * plan.group
    if sink_logits is not None and sink_logits.shape != (query_heads,):
        raise ShapeError(f"sink_logits {tuple(sink_logits.shape)}, expected ({query_heads},)")


def step_key(
    query: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """What the launches of a decode step depend on beside the cache and the rotation."""
    sinks = None if sink_logits is None else (sink_logits.shape, sink_logits.dtype)
    return query.shape, query.dtype, query.device, softmax_scale, sliding_window, sinks, dtype


class Rotation:
    """The launch of rows [B, N, D] @ matrix [K or 1, D, D] -> [B, N, D] of `dtype`.

    With `mean`, bf16 [K or 1, D], also + added [B, N, D] + weight [B, N] * mean, both float32.
    """

    def __init__(
        self,
        plan: DecodePlan,
        matrix: torch.Tensor,
        mean: torch.Tensor | None = None,
        *,
        rows_dtype: torch.dtype = torch.float32,
        dtype: torch.dtype = torch.float32,
        **launch: bool,
    ) -> None:
        columns, tile = 32, 16
        grid = (triton.cdiv(plan.head_dim, columns), triton.cdiv(plan.batch * plan.group, tile), plan.heads)
        fixed = {
            "matrix_ptr": matrix, "stride_rotation": plan.stride_rotation, "batch": plan.batch,
            "mean_ptr": matrix if mean is None else mean.view(torch.int16),
            "K": plan.heads, "G": plan.group, "D": plan.head_dim, "CHUNK": min(128, plan.padded_dim),
            "COLUMNS": columns, "ROWS": tile, "EXACT_ROWS": rows_dtype != torch.float32,
            "BACK": mean is not None, "EARLY": launch.pop("EARLY"),
        }  # fmt: skip
        self.dtype = dtype
        changing = ("rows_ptr", "added_ptr", "weight_ptr", "out_ptr")
        self.launch = Launch(_rotate_kernel, grid, changing, fixed, num_warps=4, **launch)

    def __call__(
        self, rows: torch.Tensor, added: torch.Tensor | None = None, weight: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """The result, and the compiled kernel where Triton looked for it."""
        out = torch.empty(rows.shape, dtype=self.dtype, device=rows.device)
        if added is None or weight is None:
            added, weight = out, out
        return out, self.launch(rows, added, weight, out)


def allocate_partials(plan: DecodePlan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 1's output: o float32 [partials, G, D] and log2-sum-exp float32 [partials, G]."""
    shape = (plan.partials, plan.group)
    return torch.empty((*shape, plan.head_dim), device=device), torch.empty(shape, device=device)


class Merge:
    """The launches of the merge and of the rotation back: one, or two where queries are many."""

    def __init__(
        self, plan: DecodePlan, cache, rotation, *, sinks: bool, dtype: torch.dtype, **launch: bool
    ) -> None:
        self.plan, self.dtype = plan, dtype
        self.back = None
        transform, mean = rotation.output_transform, rotation.value_mean
        if plan.batch * plan.heads * plan.group > ROWS_OF_ONE_MERGE:
            self.back = Rotation(plan, transform, mean, dtype=dtype, **launch)
        rotates = self.back is None
        pieces = triton.next_power_of_2(plan.pieces // plan.batch + 1)
        step = min(pieces, 8192 // plan.padded_dim)
        wide = step * plan.padded_dim > 2048
        if rotates:  # one warp holds 64 rows of 64 columns of the transform
            columns, warps = 64, max(2, plan.padded_dim // 64) * (2 if wide else 1)
        else:
            columns, warps = plan.padded_dim, step * plan.padded_dim // 2048 if wide else 1
        fixed = {
            "history_ptr": cache.history_pages, "lengths_ptr": cache.lengths,
            "table_pages": cache.page_table.shape[1], "sliding_window": plan.sliding_window or 0,
            "batch": plan.batch, "pieces": plan.pieces, "transform_ptr": transform,
            "value_mean_ptr": mean.view(torch.int16), "stride_rotation": plan.stride_rotation,
            "K": plan.heads, "G": plan.group, "D": plan.head_dim, "DP": plan.padded_dim,
            "SINK_PAGES": plan.sink_pages, "SLOTS": plan.slots,
            "SLOTS_P": triton.next_power_of_2(plan.slots), "WINDOW_PAGES": plan.window_pages,
            "SLIDING": plan.sliding_window is not None, "BATCH_P": plan.padded_batch,
            "PIECES_P": triton.next_power_of_2(plan.pieces + 1), "STEP": step, "COLUMNS": columns,
            "SINK_LOGITS": sinks, "ROTATE": rotates, "EARLY": launch.pop("EARLY"),
        }  # fmt: skip
        grid = (plan.padded_dim // columns, plan.batch * plan.heads * plan.group)
        changing = ("o_ptr", "lse_ptr", "sink_ptr", "out_ptr", "weight_ptr", "window_ptr")
        self.launch = Launch(_merge_kernel, grid, changing, fixed, num_warps=warps, **launch)

    def __call__(
        self, o: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Any]]:
        """[B, N, D], and the compiled kernels where Triton looked for them."""
        plan, sinks = self.plan, lse if sink_logits is None else sink_logits
        shape = (plan.batch, plan.heads * plan.group)
        if self.back is None:
            out = torch.empty((*shape, plan.head_dim), dtype=self.dtype, device=o.device)
            return out, [self.launch(o, lse, sinks, out, out, out)]
        history, window = torch.empty((2, *shape, plan.head_dim), device=o.device)
        weight = torch.empty(shape, device=o.device)
        first = self.launch(o, lse, sinks, history, weight, window)
        out, second = self.back(history, window, weight)
        return out, [first, second]


def decode_attention(
    query: torch.Tensor,
    cache,
    rotation,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> [B, N, D] of `dtype`; `softmax_scale` multiplies the scores (usually D**-0.5). A window
    of w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    sequence of length 0 yields zeros, one that has overflowed NaN. Raises ShapeError; NotImplementedError
    (device, more than 16 query heads per key/value head) before anything is allocated.
    """
    key = step_key(query, softmax_scale, sliding_window, sink_logits, dtype)
    step = remembered(
        cache, rotation, key, lambda: _Step(query, cache, rotation, *key[3:5], sink_logits, dtype)
    )
    return step(query.contiguous(), sink_logits)


class _Step:
    """The launches of a decode step over one cache."""

    def __init__(
        self,
        query: torch.Tensor,
        cache,
        rotation,
        softmax_scale: float,
        sliding_window: int | None,
        sink_logits: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        tuning = TUNING[_padded_dim(query.shape[-1])]
        self.plan = plan = plan_decode(
            query, cache, rotation, sliding_window,
            programs=tuning.programs * _processors(query.device), window_pages=tuning.window_pages,
        )  # fmt: skip
        check_sinks(plan, sink_logits)
        self.rotate = Rotation(plan, rotation.query_transform, rows_dtype=query.dtype, EARLY=False)
        self.merge = Merge(plan, cache, rotation, sinks=sink_logits is not None, dtype=dtype, EARLY=False)
        rows = 8 if plan.group <= 8 else 16
        self.score_shape = (plan.batch, plan.heads, cache.page_table.shape[1], rows)
        fixed = {
            "key_codes_ptr": cache.key_codes.view(torch.int16),
            "value_codes_ptr": cache.value_codes.view(torch.int16), **stage_arrays(cache),
            "softmax_scale": softmax_scale * LOG2_E, "sliding_window": sliding_window or 0,
            "batch": plan.batch, "pieces": plan.pieces,
            "K": plan.heads, "G": plan.group, "D": plan.head_dim, "DP": plan.padded_dim, "ROWS": rows,
            "CHUNK": min(plan.padded_dim, 128), "SINK_PAGES": plan.sink_pages,
            "RECENT_SLOTS": plan.recent_slots, "WINDOW_PAGES": plan.window_pages,
            "SLIDING": sliding_window is not None, "BATCH_P": plan.padded_batch, "WINDOW_STEP": 16,
            "EXACT_QUERY": query.dtype != torch.float32,
        }  # fmt: skip
        changing = ("query_ptr", "rotated_ptr", "page_score_ptr", "o_ptr", "lse_ptr")
        self.stage = Launch(
            _stage_kernel, (plan.pieces * plan.heads,), changing, fixed, num_warps=tuning.warps,
            num_stages=tuning.stages, maxnreg=tuning.registers if plan.group <= 8 else None,
        )  # fmt: skip

    def __call__(self, query: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
        rotated, _ = self.rotate(query)
        o, lse = allocate_partials(self.plan, query.device)
        page_score = torch.empty(self.score_shape, device=query.device)
        self.stage(query, rotated, page_score, o, lse)
        return self.merge(o, lse, sink_logits)[0]


def stage_arrays(cache) -> dict[str, Any]:
    """The arrays of a cache, but the codes, as the stage kernels name them."""
    return {
        "mean_ptr": cache.key_page_mean.view(torch.int16), "key_scale_ptr": cache.key_scale.view(torch.int16),
        "value_scale_ptr": cache.value_scale.view(torch.int16),
        "window_key_ptr": cache.window_key.view(torch.int16),
        "window_value_ptr": cache.window_value.view(torch.int16), "page_table_ptr": cache.page_table,
        "stride_table": cache.page_table.shape[1], "window_table_ptr": cache.window_table,
        "lengths_ptr": cache.lengths, "history_ptr": cache.history_pages,
    }  # fmt: skip


def _padded_dim(head_dim: int) -> int:
    return max(64, triton.next_power_of_2(head_dim))


def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; one where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
