"""Attention of a chunk of queries over INT2 history on Hopper, in Gluon: some warps unpack, others attend.

Three launches: `prefill/triton.py` rotates the queries; the kernel here attends to the INT2 pages; and
`prefill/triton.py` rotates back, attends to the BF16 rows and normalizes. Where a chunk is small, several
programs share the history (pieces), and the last launch merges them.

A program owns 128 query rows of one key/value head. Four warps, the producer, unpack two pages at a time to
fp16 operands in shared memory: keys [token, channel] and values [channel, token], two slots each. Two
warpgroups, the consumers, are flash attention over 64 rows each, by wgmma: values of a step and keys of the
next go to the matrix unit together. Making the two take turns there gains nothing.

Codes become (code - 1.5) * scale as in `prefill/triton.py`: tokens and channels in the order of `code_of`,
scales as fractions of a power of two of their block of 32 pages. The mean keys of such a block are one more
product, whose scores wait in shared memory.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...core import cache_format as fmt
from ..decode.triton import LOG2_E, widen
from ..launch.aggregate import aggregate
from ..launch.tensors import check_hopper
from . import triton as plain

HEAD_DIMS = (64, 128)
PAGE = gl.constexpr(fmt.PAGE_TOKENS)
STEP = gl.constexpr(2 * fmt.PAGE_TOKENS)  # tokens that one slot of a ring holds
BLOCK = gl.constexpr(32)  # pages whose mean keys make one product
CONSUMERS = gl.constexpr(2)
ROWS = gl.constexpr(64)  # query rows of a consumer
STAGES = gl.constexpr(2)
UNSEEN = gl.constexpr(plain.UNSEEN.value)
SCALE_BITS = gl.constexpr(plain.SCALE_BITS.value)
# Registers of a thread. With 184 the consumers' products no longer fly: the compiler waits for each.
CONSUMER_REGISTERS = gl.constexpr(192)
PRODUCER_REGISTERS = gl.constexpr(120)
LEAST_PAGES = 32  # of a piece of the history: less is not worth a program

SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
)
STEP_SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
)
MEAN_SCORES = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
)
ROW = gl.constexpr(gl.SliceLayout(1, SCORES.value))
KEY_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))  # a thread has whole tokens
VALUE_WORDS = gl.constexpr(gl.BlockedLayout([1, 1], [8, 4], [2, 2], [1, 0]))  # a thread has the same tokens
SCALES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
HALVES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BY_PAGE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))

PACK = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
MULTIPLY = gl.constexpr("mul.rn.f16x2 $0, $1, $2;")
MULTIPLY_ADD = gl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")


@gluon.jit
def _pack(low, high):
    """Two float32 -> fp16 halves of an int32."""
    return gl.inline_asm_elementwise(PACK, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _code_pair(words, factor, offset, place: gl.constexpr):
    """Codes `place` and `place` + 8 of every word * factor + offset: pairs of fp16, as all arguments."""
    shift: gl.constexpr = 6 * (place // 3) - 4
    if shift < 0:
        moved = words << -shift
    else:
        moved = words >> shift
    bits = moved & (0x00300030 << (2 * (place % 3)))
    return gl.inline_asm_elementwise(
        MULTIPLY_ADD, "=r,r,r,r", [bits, factor, offset], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _in_order(p0, p1, p2, p3, p4, p5, p6, p7, N: gl.constexpr, W: gl.constexpr):
    """Pairs of the eight places, each [N, W] -> [N, 8 * W]."""
    low = gl.join(gl.join(p0, p4), gl.join(p2, p6))
    high = gl.join(gl.join(p1, p5), gl.join(p3, p7))
    return gl.reshape(gl.join(low, high), [N, W * 8])


@gluon.jit
def _unpack_keys(words, scale, W: gl.constexpr):
    """Words [128, W], float32 scales [128] < 2**-4 -> pairs of (code - 1.5) * scale [128, 8 * W]."""
    scale = gl.expand_dims(scale, 1)
    offset = _pack(scale * -1.5, scale * -1.5)
    f0 = _pack(scale * 2.0**20, scale * 2.0**20)
    f1 = _pack(scale * 2.0**18, scale * 2.0**18)
    f2 = _pack(scale * 2.0**16, scale * 2.0**16)
    return _in_order(
        _code_pair(words, f0, offset, 0), _code_pair(words, f1, offset, 1), _code_pair(words, f2, offset, 2),
        _code_pair(words, f0, offset, 3), _code_pair(words, f1, offset, 4), _code_pair(words, f2, offset, 5),
        _code_pair(words, f0, offset, 6), _code_pair(words, f1, offset, 7), STEP, W,
    )  # fmt: skip


@gluon.jit
def _value_pair(words, scale, further, down, place: gl.constexpr):
    """`_code_pair` of values; scale, further: bf16 pairs, whose half place % 2 is the scale of a token."""
    if place % 2 == 0:
        a, b = scale << 16, further << 16
    else:
        a, b = scale & -0x10000, further & -0x10000
    down = down * 2.0 ** (20 - 2 * (place % 3))
    factor = _pack(a.to(gl.float32, bitcast=True) * down, b.to(gl.float32, bitcast=True) * down)
    # The bits of -1.5 * 2 ** (2 * (place % 3) - 20), a subnormal, in both halves.
    constant = gl.full_like(factor, (0x00180018 << (2 * (place % 3))) - 0x7FFF8000)
    offset = gl.inline_asm_elementwise(
        MULTIPLY, "=r,r,r", [factor, constant], dtype=gl.int32, is_pure=True, pack=1
    )
    return _code_pair(words, gl.expand_dims(factor, 0), gl.expand_dims(offset, 0), place)


@gluon.jit
def _unpack_values(words, s0, s1, s2, s3, s4, s5, s6, s7, down, D: gl.constexpr):
    """Words [D, 8], bf16 pairs of their tokens' scales -> pairs of (code - 1.5) * scale * down [D, 64]."""
    return _in_order(
        _value_pair(words, s0, s4, down, 0), _value_pair(words, s0, s4, down, 1),
        _value_pair(words, s1, s5, down, 2), _value_pair(words, s1, s5, down, 3),
        _value_pair(words, s2, s6, down, 4), _value_pair(words, s2, s6, down, 5),
        _value_pair(words, s3, s7, down, 6), _value_pair(words, s3, s7, down, 7), D, 8,
    )  # fmt: skip


@gluon.jit
def _entries(table_ptr, page, end, head, K: gl.constexpr):
    """Rows in the pools of two pages; of the padding page from `end` on."""
    first = gl.load(table_ptr + page, mask=page < end, other=0).to(gl.int64) * K + head
    second = gl.load(table_ptr + page + 1, mask=page + 1 < end, other=0).to(gl.int64) * K + head
    return first, second


@gluon.jit
def _load_keys(first, second, codes_ptr, scale_ptr, D: gl.constexpr):
    """Words [128, D / 16] and scales [128] of two pages."""
    row = gl.arange(0, STEP, layout=gl.SliceLayout(1, KEY_WORDS))
    word = gl.arange(0, D // 16, layout=gl.SliceLayout(0, KEY_WORDS))
    token = plain.code_of(row) % PAGE
    physical = gl.where(row < PAGE, first, second)
    start = physical * (PAGE * D // 16) + token * (D // 16)
    words = gl.load(codes_ptr + (gl.expand_dims(start, 1) + gl.expand_dims(word, 0)))
    return words, gl.load(scale_ptr + physical * PAGE + token)


@gluon.jit
def _load_values(first, second, page, end, codes_ptr, scale_ptr, D: gl.constexpr):
    """Words [D, 8] of two pages and, eight times [8], two scales of each word's 16 tokens.

    Scales are 0 from page `end` on: the padding page may hold NaN, and a weight of 0 does not hide that.
    """
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, VALUE_WORDS))
    word = gl.arange(0, STEP // 16, layout=gl.SliceLayout(0, VALUE_WORDS))
    in_page = word % (PAGE // 16)
    physical = gl.where(word < PAGE // 16, first, second)
    start = physical * (PAGE * D // 16) + in_page
    words = gl.load(codes_ptr + (gl.expand_dims(start, 0) + gl.expand_dims(channel * (PAGE // 16), 1)))
    scale = scale_ptr + physical * (PAGE // 2) + in_page * 8
    live = page + word // (PAGE // 16) < end
    return (
        words, gl.load(scale, mask=live, other=0), gl.load(scale + 1, mask=live, other=0),
        gl.load(scale + 2, mask=live, other=0), gl.load(scale + 3, mask=live, other=0),
        gl.load(scale + 4, mask=live, other=0), gl.load(scale + 5, mask=live, other=0),
        gl.load(scale + 6, mask=live, other=0), gl.load(scale + 7, mask=live, other=0),
    )  # fmt: skip


@gluon.jit
def _block_exponent(table_ptr, block, end, head, scale_ptr, K: gl.constexpr):
    """Exponent of the largest scale of a block of pages, at least -30, see `prefill/triton.py`."""
    page = block + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, SCALES))
    token = gl.arange(0, PAGE, layout=gl.SliceLayout(0, SCALES))
    entry = gl.load(table_ptr + page, mask=page < end, other=0).to(gl.int64) * K + head
    offset = gl.expand_dims(entry * PAGE, 1) + gl.expand_dims(token, 0)
    mask = gl.expand_dims(page < end, 1) & gl.expand_dims(token >= 0, 0)
    scale = gl.load(scale_ptr + offset, mask=mask, other=0).to(gl.int32)
    return gl.maximum((gl.max(gl.max(scale, 1), 0) >> 7) - 127, -30)


@gluon.jit
def _load_means(table_ptr, block, end, head, mean_ptr, K: gl.constexpr, D: gl.constexpr):
    """Mean keys of a block of pages, bf16 bits [BLOCK, D]; zeros from `end` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    page = block + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    entry = gl.load(table_ptr + page, mask=page < end, other=0).to(gl.int64) * K + head
    offset = gl.expand_dims(entry * D, 1) + gl.expand_dims(channel, 0)
    mask = gl.expand_dims(page < end, 1) & gl.expand_dims(channel >= 0, 0)
    return gl.load(mean_ptr + offset, mask=mask, other=0)


@aggregate
class _Slots:
    """Shared memory through which the producer hands unpacked pages to the consumers, and its barriers."""

    keys: gl.shared_memory_descriptor  # pairs of fp16, int32 [STAGES, STEP, D / 2]
    values: gl.shared_memory_descriptor  # likewise [STAGES, D, STEP / 2]
    means: gl.shared_memory_descriptor  # of a block of pages, bf16 bits [BLOCK, D]
    exponents: gl.shared_memory_descriptor  # of a block's scales of keys and of values, int32 [2, ROWS]
    key_full: gl.shared_memory_descriptor  # barriers [STAGES, 1]: full when stored, empty when all have read
    key_empty: gl.shared_memory_descriptor
    value_full: gl.shared_memory_descriptor
    value_empty: gl.shared_memory_descriptor
    means_full: gl.shared_memory_descriptor  # [1]
    means_empty: gl.shared_memory_descriptor


@aggregate
class _Piece:
    """The pages of a program: begin .. end - 1, two to a step."""

    begin: gl.tensor
    end: gl.tensor
    steps: gl.tensor


@aggregate
class _Pool:
    """Where the INT2 pages of one sequence lie; `table_ptr` is at the sequence."""

    table_ptr: gl.tensor
    key_codes_ptr: gl.tensor
    value_codes_ptr: gl.tensor
    key_scale_ptr: gl.tensor
    value_scale_ptr: gl.tensor
    value_scale_pair_ptr: gl.tensor  # the same, two scales at a time
    mean_ptr: gl.tensor


@aggregate
class _Queries:
    """What consumers read and write, and of which rows: block `row_block` of the chunk, at `position`."""

    query_ptr: gl.tensor
    rotated_ptr: gl.tensor
    unit_ptr: gl.tensor
    sums_ptr: gl.tensor
    state_ptr: gl.tensor
    tokens: gl.tensor
    all_rows: gl.tensor
    piece: gl.tensor
    pieces: gl.tensor
    row_block: gl.tensor
    position: gl.tensor
    sliding_window: gl.tensor
    softmax_scale: gl.tensor


@gluon.jit
def _publish(full):
    """Tells the consumers that what was stored before is there, in sight of the matrix unit."""
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _producer(pool, head, piece, slots, K: gl.constexpr, D: gl.constexpr):
    """Unpacks the pages of a piece, and one step more: consumers issue a product ahead."""
    end = piece.end
    first, second = _entries(pool.table_ptr, piece.begin, end, head, K)
    words_next, key_next = _load_keys(first, second, pool.key_codes_ptr, pool.key_scale_ptr, D)
    words_v_next, n0, n1, n2, n3, n4, n5, n6, n7 = _load_values(
        first, second, piece.begin, end, pool.value_codes_ptr, pool.value_scale_pair_ptr, D
    )
    first, second = _entries(pool.table_ptr, piece.begin + 2, end, head, K)
    key_down = 0.0
    value_down = 0.0
    for step in range(piece.steps + 1):
        page = piece.begin + 2 * step
        if step % (BLOCK // 2) == 0:
            key_exponent = _block_exponent(pool.table_ptr, page, end, head, pool.key_scale_ptr, K)
            value_exponent = _block_exponent(pool.table_ptr, page, end, head, pool.value_scale_ptr, K)
            key_down = plain.power(-key_exponent - SCALE_BITS)
            value_down = plain.power(-value_exponent - SCALE_BITS)
            mean = _load_means(pool.table_ptr, page, end, head, pool.mean_ptr, K, D)
            mbarrier.wait(slots.means_empty, (step // (BLOCK // 2) & 1) ^ 1)
            none = gl.full([ROWS], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
            slots.exponents.index(0).store(none + key_exponent)
            slots.exponents.index(1).store(none + value_exponent)
            slots.means.store(mean)
            _publish(slots.means_full)
        row = gl.arange(0, STEP, layout=gl.SliceLayout(1, KEY_WORDS))
        key_scale = gl.where(page + row // PAGE < end, widen(key_next) * key_down, 0.0)
        words = words_next
        words_v = words_v_next
        s0, s1, s2, s3, s4, s5, s6, s7 = n0, n1, n2, n3, n4, n5, n6, n7
        words_next, key_next = _load_keys(first, second, pool.key_codes_ptr, pool.key_scale_ptr, D)
        words_v_next, n0, n1, n2, n3, n4, n5, n6, n7 = _load_values(
            first, second, page + 2, end, pool.value_codes_ptr, pool.value_scale_pair_ptr, D
        )
        first, second = _entries(pool.table_ptr, page + 4, end, head, K)
        slot = step % STAGES
        empty_phase = (step // STAGES & 1) ^ 1
        pairs = _unpack_keys(words, key_scale, D // 16)
        mbarrier.wait(slots.key_empty.index(slot), empty_phase)
        slots.keys.index(slot).store(pairs)
        _publish(slots.key_full.index(slot))
        pairs = _unpack_values(words_v, s0, s1, s2, s3, s4, s5, s6, s7, value_down, D)
        mbarrier.wait(slots.value_empty.index(slot), empty_phase)
        slots.values.index(slot).store(pairs)
        _publish(slots.value_full.index(slot))


@gluon.jit
def _consumer(
    given, piece, queries, rotated, scores, slots, K: gl.constexpr, G: gl.constexpr, D: gl.constexpr,
    SINK_PAGES: gl.constexpr, SLIDING: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Flash attention of 64 query rows over what the producer unpacks.

    queries bf16 and rotated fp16 [ROWS, D], scores float32 [ROWS, BLOCK] are its own shared memory.
    """
    tokens = given.tokens
    output: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16]
    )
    output_row: gl.constexpr = gl.SliceLayout(1, output)
    weights: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    head = gl.program_id(1)
    b = gl.program_id(2)
    start = (given.row_block * CONSUMERS + PART) * ROWS
    flat = (b * K + head).to(gl.int64) * (tokens * G)

    copy: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, copy))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, copy))
    mask = gl.expand_dims(row < tokens * G, 1) & gl.expand_dims(channel >= 0, 0)
    offset = gl.expand_dims((flat + row) * D, 1) + gl.expand_dims(channel, 0)
    rotated.store(gl.load(given.rotated_ptr + offset, mask=mask, other=0.0))
    query_row = ((b * tokens + row // G) * (K * G) + head * G + row % G).to(gl.int64)
    offset = gl.expand_dims(query_row * D, 1) + gl.expand_dims(channel, 0)
    queries.store(gl.load(given.query_ptr + offset, mask=mask, other=0.0))
    fence_async_shared()

    row = start + gl.arange(0, ROWS, layout=ROW)
    live = row < tokens * G
    unit = gl.load(given.unit_ptr + flat + row, mask=live, other=1.0)
    oldest = given.position + row // G - given.sliding_window + 1
    token = plain.code_of(gl.arange(0, PAGE, layout=gl.SliceLayout(0, SCORES)))
    page_scores = scores._reinterpret(gl.float32, [BLOCK, ROWS], FLAT)
    m = gl.full([ROWS], UNSEEN, gl.float32, ROW)
    l = gl.zeros([ROWS], gl.float32, ROW)
    acc = gl.zeros([ROWS, D], gl.float32, output)
    factor = unit
    last_exponent = gl.full([ROWS], 0, gl.int32, ROW)
    no_means = gl.zeros([ROWS, BLOCK], gl.float32, MEAN_SCORES)
    no_scores = gl.zeros([ROWS, STEP], gl.float32, STEP_SCORES)

    mbarrier.wait(slots.key_full.index(0), 0)
    tile = slots.keys.index(0)._reinterpret(gl.float16, [STEP, D], HALVES).permute((1, 0))
    score = warpgroup_mma_wait(
        0, deps=[warpgroup_mma(rotated, tile, no_scores, use_acc=False, is_async=True)]
    )
    mbarrier.arrive(slots.key_empty.index(0), count=1)
    for step in range(piece.steps):
        page = piece.begin + 2 * step
        if step % (BLOCK // 2) == 0:
            phase = step // (BLOCK // 2) & 1
            mbarrier.wait(slots.means_full, phase)
            mean_tile = slots.means._reinterpret(gl.bfloat16, [BLOCK, D], HALVES).permute((1, 0))
            mean_score = warpgroup_mma(queries, mean_tile, no_means, use_acc=False)
            factor = unit * plain.power(slots.exponents.index(0).load(ROW) + SCALE_BITS)
            exponent = slots.exponents.index(1).load(ROW)
            mbarrier.arrive(slots.means_empty, count=1)
            exists = page + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, MEAN_SCORES)) < piece.end
            scores.store(gl.where(gl.expand_dims(exists, 0), mean_score * given.softmax_scale, UNSEEN))
            change = plain.power(last_exponent - exponent)
            acc *= gl.expand_dims(gl.convert_layout(change, output_row), 1)
            last_exponent = exponent

        mean0 = page_scores.index(2 * step % BLOCK).load(ROW)
        mean1 = page_scores.index(2 * step % BLOCK + 1).load(ROW)
        score0, score1 = gl.split(gl.permute(gl.reshape(score, [ROWS, 2, PAGE]), (0, 2, 1)))
        score0 = gl.convert_layout(score0, SCORES, assert_trivial=True)
        score1 = gl.convert_layout(score1, SCORES, assert_trivial=True)
        if SLIDING:
            place = token + (SINK_PAGES + page) * PAGE
            seen0 = gl.expand_dims(place, 0) >= gl.expand_dims(oldest, 1)
            seen1 = gl.expand_dims(place + PAGE, 0) >= gl.expand_dims(oldest, 1)
            score0 = gl.where(seen0, score0, UNSEEN)
            score1 = gl.where(seen1, score1, UNSEEN)
        m_new = gl.maximum(m, gl.max(score0, 1) * factor + mean0)
        m_new = gl.maximum(m_new, gl.max(score1, 1) * factor + mean1)
        p0 = gl.exp2(score0 * gl.expand_dims(factor, 1) + gl.expand_dims(mean0 - m_new, 1))
        p1 = gl.exp2(score1 * gl.expand_dims(factor, 1) + gl.expand_dims(mean1 - m_new, 1))
        if SLIDING:
            p0 = gl.where(seen0, p0, 0.0)
            p1 = gl.where(seen1, p1, 0.0)
        alpha = gl.exp2(m - m_new)
        m = m_new
        l = l * alpha + gl.sum(p0 + p1, 1)
        acc *= gl.expand_dims(gl.convert_layout(alpha, output_row), 1)
        weight0 = gl.convert_layout(p0.to(gl.float16), weights)
        weight1 = gl.convert_layout(p1.to(gl.float16), weights)

        slot = step % STAGES
        next_slot = (step + 1) % STAGES
        mbarrier.wait(slots.value_full.index(slot), step // STAGES & 1)
        mbarrier.wait(slots.key_full.index(next_slot), (step + 1) // STAGES & 1)
        both = slots.values.index(slot)._reinterpret(gl.float16, [2 * D, PAGE], HALVES)  # page after page
        sums = warpgroup_mma(weight0, both.slice(0, D).permute((1, 0)), acc, is_async=True)
        sums = warpgroup_mma(weight1, both.slice(D, D).permute((1, 0)), sums, is_async=True)
        tile = slots.keys.index(next_slot)._reinterpret(gl.float16, [STEP, D], HALVES).permute((1, 0))
        next_score = warpgroup_mma(rotated, tile, no_scores, use_acc=False, is_async=True)
        score, acc = warpgroup_mma_wait(0, deps=[next_score, sums])
        mbarrier.arrive(slots.value_empty.index(slot), count=1)
        mbarrier.arrive(slots.key_empty.index(next_slot), count=1)

    place = given.piece.to(gl.int64) * given.all_rows + flat + row
    gl.store(given.state_ptr + place, m, mask=live)
    place = (given.piece.to(gl.int64) + given.pieces) * given.all_rows + flat + row
    gl.store(given.state_ptr + place, l, mask=live)
    acc *= gl.expand_dims(gl.convert_layout(plain.power(last_exponent + SCALE_BITS), output_row), 1)
    row = start + gl.arange(0, ROWS, layout=output_row)
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, output))
    place = given.piece.to(gl.int64) * given.all_rows + flat + row
    mask = gl.expand_dims(row < tokens * G, 1) & gl.expand_dims(channel >= 0, 0)
    gl.store(given.sums_ptr + (gl.expand_dims(place * D, 1) + gl.expand_dims(channel, 0)), acc, mask=mask)


# An argument that is 1 would be a constant, and the aggregates take tensors.
@gluon.jit(do_not_specialize=["tokens", "all_rows", "pieces", "stride_table", "sliding_window"])
def _history_kernel(
    query_ptr, rotated_ptr, unit_ptr, sums_ptr, state_ptr, tokens, all_rows, pieces,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, value_scale_pair_ptr, key_page_mean_ptr,
    page_table_ptr, stride_table, lengths_ptr, history_ptr, softmax_scale, sliding_window,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr, SLIDING: gl.constexpr,
):  # fmt: skip
    """Grid (ceil(T * G / 128) * pieces, K, B)."""
    number = gl.program_id(0) % pieces
    row_block = gl.program_id(0) // pieces
    head = gl.program_id(1)
    b = gl.program_id(2)
    history = gl.load(history_ptr + b)
    position = gl.load(lengths_ptr + b)
    first_page = 0
    if SLIDING:
        oldest = position + row_block * (ROWS * CONSUMERS) // G - sliding_window + 1
        first_page = gl.maximum(oldest // PAGE - SINK_PAGES, 0)
    share = gl.cdiv(gl.maximum(history - first_page, 0), 2 * pieces) * 2
    begin = first_page + number * share
    end = gl.minimum(begin + share, history)
    steps = gl.maximum(gl.cdiv(end - begin, 2), 1)  # without a page, one step over the padding page

    queries = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, ROWS, D], HALVES)
    rotated = gl.allocate_shared_memory(gl.float16, [CONSUMERS, ROWS, D], HALVES)
    scores = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS, BLOCK], BY_PAGE)
    keys = gl.allocate_shared_memory(gl.int32, [STAGES, STEP, D // 2], PAIRS)
    values = gl.allocate_shared_memory(gl.int32, [STAGES, D, STEP // 2], PAIRS)
    means = gl.allocate_shared_memory(gl.int16, [BLOCK, D], HALVES)
    exponents = gl.allocate_shared_memory(gl.int32, [2, ROWS], FLAT)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    means_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    means_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(key_full.index(slot), count=1)
        mbarrier.init(key_empty.index(slot), count=CONSUMERS)
        mbarrier.init(value_full.index(slot), count=1)
        mbarrier.init(value_empty.index(slot), count=CONSUMERS)
    mbarrier.init(means_full, count=1)
    mbarrier.init(means_empty, count=CONSUMERS)
    fence_async_shared()
    pool = _Pool(
        page_table_ptr + b * stride_table, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr,
        value_scale_pair_ptr, key_page_mean_ptr,
    )  # fmt: skip
    given = _Queries(
        query_ptr, rotated_ptr, unit_ptr, sums_ptr, state_ptr, tokens, all_rows, number, pieces, row_block,
        position, sliding_window, softmax_scale,
    )  # fmt: skip
    piece = _Piece(begin, end, steps)
    slots = _Slots(
        keys, values, means, exponents, key_full, key_empty, value_full, value_empty, means_full, means_empty
    )
    gl.warp_specialize(
        [
            (_consumer, (
                given, piece, queries.index(0), rotated.index(0), scores.index(0), slots,
                K, G, D, SINK_PAGES, SLIDING, 0,
            )),
            (_consumer, (
                given, piece, queries.index(1), rotated.index(1), scores.index(1), slots,
                K, G, D, SINK_PAGES, SLIDING, 1,
            )),
            (_producer, (pool, head, piece, slots, K, D)),
        ],
        [4, 4], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


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

    Shapes, dtypes and errors as in `prefill/triton.py`; NotImplementedError also for queries that are not
    bfloat16, a head_dim that is neither 64 nor 128 and a device that is not Hopper.
    """
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    group = plain.check_chunk(query, key, value, cache, sink_logits)
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim}, the kernel serves {HEAD_DIMS}")
    if query.dtype != torch.bfloat16:
        raise NotImplementedError(f"queries of {query.dtype}, the kernel serves torch.bfloat16")
    check_hopper(query)
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    query = query.contiguous()
    batch, tokens = query.shape[:2]
    rotated = plain.rotate(query, cache, rotation, softmax_scale)
    row_blocks = triton.cdiv(tokens * group, CONSUMERS.value * ROWS.value)
    most = max(1, cache.page_table.shape[1] // LEAST_PAGES)
    pieces = min(most, max(1, processors // (row_blocks * heads * batch)))
    all_rows = batch * heads * tokens * group
    sums = torch.empty((pieces, all_rows, head_dim), device=query.device)
    state = torch.empty((2, pieces, all_rows), device=query.device)
    _history_kernel[(row_blocks * pieces, heads, batch)](
        query, *rotated, sums, state, tokens, all_rows, pieces,
        cache.key_codes, cache.value_codes, cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.value_scale.view(torch.int32),
        cache.key_page_mean.view(torch.int16), cache.page_table, cache.page_table.shape[1],
        cache.lengths, cache.history_pages, softmax_scale * LOG2_E, sliding_window or 0,
        K=heads, G=group, D=head_dim, SINK_PAGES=config.sink_pages, SLIDING=sliding_window is not None,
        num_warps=4,
    )  # fmt: skip
    return plain.attend(
        query, key, value, cache, rotation, rotated, (sums, state), new_lengths=new_lengths,
        softmax_scale=softmax_scale, sliding_window=sliding_window, sink_logits=sink_logits,
    )  # fmt: skip
