"""One-token attention on Hopper, in Gluon: rings of pages in shared memory, codes in registers.

Three launches or four, no host wait. Each but the first may start while the one before it is at work
(programmatic dependent launch) and waits for what it needs:

1. `triton.rotate`: rotates the queries.
2. `_stage_kernel`: flash attention over equal pieces of all pages, INT2 and BF16 (`DecodePlan`). It asks for
   its first pages and reads its BF16 pages before it waits for the queries.
3. `triton.merge`: merges the partial results and rotates back; two launches where queries are many.

Inside the stage every warp is a flash decoder of its own (`gluon_warp.py`): it copies its share of the pages
in bulk to a private ring (one barrier per stage), keeps an online softmax in registers, and meets the other
warps of its block only after its last page. A page's integer sums are added to float32 outputs. The page's
mean key is one more product, in bf16. The BF16 pages are read by `gluon_window.py`.

Gluon has no bulk copy of plain bytes: it is inline PTX. The kernel allocates shared memory once, so it lies
where `global_smem` points.
"""

import ctypes
import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...core import cache_format as fmt
from ..launch.aggregate import aggregate
from ..launch.repeated import Launch, remembered
from ..launch.tensors import check_hopper
from . import triton as plain
from .gluon_warp import (
    ACC,
    EMPTY,
    FRACTION_RANGE,
    HALVES_RIGHT,
    HIDDEN,
    PAGE,
    QUERY_RANGE,
    RECIPROCAL,
    STORE_1,
    STORE_1_IN_FIRST_ROW,
    WARP_BARRIER,
    WARPS,
    WHOLE,
    first_of_pair,
    fixed_query,
    iota,
    join4,
    key_address_layout,
    key_operand,
    load_keys,
    load_mean,
    load_values,
    load_word,
    load_words,
    mean_layout,
    mma,
    per_head,
    run,
    scale_layout,
    scales,
    second_of_pair,
    value_address_layout,
    value_operand,
    weight_operand,
    whole_sums,
)
from .gluon_window import Window, attend_page, prefetch_page

HEAD_DIMS = (64, 128, 256)
SLACK = gl.constexpr(2.0**24)  # the maximum only moves when P, summed over a lane's tokens, exceeds this
SHARED_MEMORY = gl.constexpr("mov.u32 $0, global_smem;")
# By a shuffle: so the assembler knows that it is the same in all lanes.
WARP = gl.constexpr(
    "{ .reg .b32 x; mov.u32 x, %tid.x; shr.u32 x, x, 5; shfl.sync.idx.b32 $0, x, 0, 0x1f, 0xffffffff; }"
)
# With a fence, since bulk copies may overwrite what was written before.
BLOCK_BARRIER = gl.constexpr("fence.proxy.async.shared::cta; bar.sync 0; mov.b32 $0, 0;")
START_BARRIER = gl.constexpr(
    "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.init.shared::cta.b64 [$1], 1; mov.b32 $0, 0; }"
)
PUBLISH_BARRIERS = gl.constexpr(
    "fence.mbarrier_init.release.cluster; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"
)
WAIT_BARRIER = gl.constexpr(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra again;"
    " mov.b32 $0, 0; }"
)

# Blocks per multiprocessor for up to 4, 8 and 16 query heads per key/value head: what registers allow, less
# one for 4 heads of 128 channels (a fourth takes 1 % more).
BLOCKS = {64: (4, 3, 2), 128: (3, 2, 2), 256: (2, 2, 2)}
# Measured at batch 8 on an H200: two pages to a ring 120.6 us, three 126.0; loading is the limit.
RING_PAGES = 2


def _window_pages(batch: int) -> int:
    """The work of one BF16 page in INT2 pages; more where pieces are short and its latency counts.

    Microseconds in all on an H200, 8 key/value heads, batch 1 and 8 with 102400 tokens, batch 32 with 32768:
    8 pages take 25.0, 118.1, 167.7; 12 pages take 24.8, 118.5, 168.9.
    """
    return 12 if batch == 1 else 8


def _blocks(head_dim: int, padded_group: int) -> int:
    """Blocks per multiprocessor for 4, 8 or 16 heads."""
    return BLOCKS[head_dim][padded_group.bit_length() - 3]


# ------------------------------------------------------------------------------------------ the ring


# One staged page: key codes | value codes | page mean | key scale | value scale.
_stage_bytes = gluon.constexpr_function(fmt.int2_page_bytes)


@gluon.constexpr_function
def ring_bytes(head_dim: int, stages: int) -> int:
    """Shared memory of a warp, a multiple of 128: stages, then their barriers."""
    return -(-stages * (_stage_bytes(head_dim) + 8) // 128) * 128


@gluon.constexpr_function
def shared_bytes(head_dim: int, stages: int) -> int:
    """Shared memory of a block."""
    return WARPS * ring_bytes(head_dim, stages)


@gluon.constexpr_function
def _fetch_assembly(head_dim: int) -> str:
    """Elected lane: five bulk copies of one head's page, whose bytes the stage's barrier counts.

    A step reads every page once: so they leave the L2 first (H200, batch 8: 4 of 129 us).
    """
    sizes = [16 * head_dim, 16 * head_dim, 2 * head_dim, 128, 128]
    lines = ["{ .reg .pred p;", "bar.warp.sync 0xffffffff;", "elect.sync _|p, 0xffffffff;"]
    lines += ["setp.ne.and.b32 p, $8, 0, p;", "@!p bra done;", ".reg .b64 policy;"]
    lines += ["createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"]
    lines += [f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$7], {sum(sizes)};"]
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    for n, size in enumerate(sizes):
        lines.append(f"{copy} [$6 + {sum(sizes[:n])}], [${n + 1}], {size}, [$7], policy;")
    return "\n".join([*lines, "done:", "mov.b32 $0, 0; }"])


@aggregate
class _Pool:
    """Where the INT2 pages of one head lie."""

    key_codes_ptr: gl.tensor
    value_codes_ptr: gl.tensor
    mean_ptr: gl.tensor
    key_scale_ptr: gl.tensor
    value_scale_ptr: gl.tensor


@gluon.jit
def _fetch(pool, physical, stage, barrier, wanted, D: gl.constexpr):
    """Asks for a head's page; every lane has read what the stage held."""
    sources = [
        (pool.key_codes_ptr + physical * (4 * D)).to(gl.int64),
        (pool.value_codes_ptr + physical * (4 * D)).to(gl.int64),
        (pool.mean_ptr + physical * D).to(gl.int64), (pool.key_scale_ptr + physical * PAGE).to(gl.int64),
        (pool.value_scale_ptr + physical * PAGE).to(gl.int64), stage, barrier, wanted.to(gl.int32),
    ]  # fmt: skip
    run(_fetch_assembly(D), "=r,l,l,l,l,l,r,r,r", sources)


# ------------------------------------------------------------------------------------------ INT2 pages


@gluon.jit
def _next(slot, STAGES: gl.constexpr):
    """The next stage of the ring."""
    return gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _history_part(
    rotated_ptr, query_ptr, pool, table_ptr, low, high, oldest, softmax_scale, ring, barriers, slot, parity,
    following,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr,
    SLIDING: gl.constexpr, STAGES: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Flash attention over pages [low, high) of one sequence and head, whose first are already on their way.

    Pointers are at the head (and the table at the sequence). Returns the ring's next stage and its parity.
    """
    words: gl.constexpr = D // 64
    STAGE_BYTES: gl.constexpr = _stage_bytes(D)
    AHEAD: gl.constexpr = STAGES - 1
    KEY_SCALE: gl.constexpr = 34 * D  # bytes before the scales of a stage
    VALUE_SCALE: gl.constexpr = 34 * D + 128

    # Addresses inside a stage: what depends on the lane, and constants, which loads add for nothing.
    layout: gl.constexpr = key_address_layout()
    key_lane = iota(layout, 3, 0, 8) * (128 * words) + iota(layout, 3, 2, 4) * (4 * words)
    key_place = iota(layout, 3, 1, 8) * (16 * words)
    value_layout: gl.constexpr = value_address_layout(D)
    value_lane = 64 * iota(value_layout, 3, 1, 8) + 16 * iota(value_layout, 3, 2, 4)
    value_place = 16 * D + 512 * iota(value_layout, 3, 0, D // 32)
    channels: gl.constexpr = mean_layout(D)
    mean_lane = 16 * iota(channels, 4, 2, 4) + 0 * iota(channels, 4, 0, 8)
    mean_place = 32 * D + 64 * iota(channels, 4, 1, D // 32) + 0 * iota(channels, 4, 3, 8)
    scale_lane = 16 * gl.arange(0, 8, layout=scale_layout())

    # Right operands: the query in bf16, a head in two columns, and the rotated one as bytes.
    n = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, HALVES_RIGHT))[None, :]
    k = gl.arange(0, D // 2, layout=gl.SliceLayout(1, HALVES_RIGHT))[:, None]
    channel = 32 * (k >> 4) + 8 * ((k >> 1) & 3) + 4 * ((k >> 3) & 1) + 2 * (n & 1) + (k & 1)
    q = gl.load(query_ptr + (n >> 1) * D + channel, mask=((n >> 1) < G) & (k >= 0), other=0.0)
    coarse = q.to(gl.bfloat16)
    if not EXACT_QUERY:
        rest = (q.to(gl.float32) - coarse.to(gl.float32)).to(gl.bfloat16)
    gdc_wait()
    # The last page of the ring waits with the query, whose rotation would else stand in line behind it.
    write = gl.where(slot + AHEAD >= STAGES, slot + AHEAD - STAGES, slot + AHEAD)
    _fetch(
        pool, following.to(gl.int64) * K, ring + write * STAGE_BYTES, barriers + 8 * write,
        low + AHEAD < high, D,
    )  # fmt: skip
    following = gl.load(table_ptr + low + STAGES, mask=low + STAGES < high, other=0)
    limbs, top, query_sum = fixed_query(rotated_ptr, G, GP, D)

    # Per head: what the grid's offset of 1.5 adds to the integer sums, and units.
    like = whole_sums(gl.full([64, 2 * GP], 0, gl.int32, ACC), 64, GP).reshape([8, 8, GP])
    score_layout: gl.constexpr = like.type.layout
    statistics: gl.constexpr = gl.SliceLayout(0, score_layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, statistics)
    token_layout: gl.constexpr = gl.SliceLayout(2, score_layout)
    top = per_head(top, GP, head_layout)
    start = -1.5 * per_head(query_sum.to(gl.float32), GP, head_layout)[None, :][None, :, :]
    unit = top * (softmax_scale / QUERY_RANGE)  # of the integer sums, base 2
    mean_unit = QUERY_RANGE / top
    place = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, score_layout)))
    fraction = gl.where((place & 1) == 1, FRACTION_RANGE / 4, FRACTION_RANGE)[:, None, None]

    m = gl.full([GP], EMPTY, gl.float32, layout=head_layout)
    l = gl.full([8, GP], 0.0, gl.float32, layout=statistics)
    weight_sum = gl.full([8, GP], 0.0, gl.float32, layout=statistics)
    acc = whole_sums(gl.full([D, 2 * GP], 0, gl.int32, ACC), D, GP).to(gl.float32)
    column_layout: gl.constexpr = gl.SliceLayout(0, acc.type.layout)

    for page in range(low, high):
        stage = ring + slot * STAGE_BYTES
        run(WAIT_BARRIER, "=r,r,r", (barriers + 8 * slot, parity))
        key_words = load_keys(key_lane + stage + key_place, words)
        mean = load_mean(mean_lane + stage + mean_place, D)
        k0, k1, k2, k3 = load_words(scale_lane + stage + KEY_SCALE)
        v0, v1, v2, v3 = load_words(scale_lane + stage + VALUE_SCALE)
        _fetch(
            pool, following.to(gl.int64) * K, ring + write * STAGE_BYTES, barriers + 8 * write,
            (page > low) & (page + AHEAD < high), D,
        )  # fmt: skip
        following = gl.load(table_ptr + page + (AHEAD + 1), mask=page + (AHEAD + 1) < high, other=0)

        # Scores in units of the integer sums.
        sums = mma(mean, coarse, gl.full([16, 2 * GP], 0.0, gl.float32, layout=ACC))
        if not EXACT_QUERY:
            sums = mma(mean, rest, sums)
        first_half, second_half = gl.split(sums.reshape([2, 8, GP, 2]))
        mean_score = first_of_pair(first_half.permute((1, 2, 0)))
        mean_score += second_of_pair(second_half.permute((1, 2, 0)))
        mean_score = gl.convert_layout(mean_score, statistics, assert_trivial=True) * mean_unit[None, :]
        sums = mma(key_operand(key_words, D), limbs, gl.full([64, 2 * GP], 0, gl.int32, ACC))
        sums = whole_sums(sums, 64, GP).reshape([8, 8, GP])
        sums = gl.convert_layout(sums, score_layout, assert_trivial=True)
        key_scale = scales(k0, k1, k2, k3, token_layout)[:, :, None]
        score = sums.to(gl.float32) * key_scale + (key_scale * start + mean_score[None, :, :])
        if SLIDING:
            token = 8 * iota(score_layout, 3, 1, 8) + iota(score_layout, 3, 0, 8)
            score = gl.where(token + (SINK_PAGES + page) * PAGE >= oldest, score, HIDDEN)

        # The whole warp branches, and rarely: on its first page, then where a score is far above the maximum.
        p = gl.exp2(score * unit[None, :][None, :, :] - (m * unit)[None, :][None, :, :])
        total = gl.sum(p, 0)
        if gl.max((total > SLACK).to(gl.int32).reshape([8 * GP]), 0) != 0:
            m_new = gl.maximum(m, gl.max(gl.max(score, 0), 0))
            alpha = gl.exp2((m - m_new) * unit)
            acc *= gl.convert_layout(alpha, column_layout, assert_trivial=True)[None, :]
            l *= alpha[None, :]
            weight_sum *= alpha[None, :]
            m = m_new
            p = gl.exp2(score * unit[None, :][None, :, :] - (m * unit)[None, :][None, :, :])
            total = gl.sum(p, 0)
        l += total

        # P * scale as a fraction of the page's largest; as integers, positive floats have the same order.
        p *= scales(v0, v1, v2, v3, token_layout)[:, :, None]
        weight_sum += gl.sum(p, 0)
        largest = gl.max(gl.max(p.to(gl.int32, bitcast=True), 0), 0).to(gl.float32, bitcast=True)
        largest = gl.maximum(largest, 1.0e-30)
        inverse = gl.inline_asm_elementwise(
            RECIPROCAL, "=r,r", [largest], dtype=gl.float32, is_pure=True, pack=1
        )
        weights = weight_operand(p * (fraction * inverse[None, :][None, :, :]) + WHOLE, GP)
        values = value_operand(load_values(value_lane + stage + value_place, D), D)
        sums = mma(values, weights, gl.full([D, 2 * GP], 0, gl.int32, ACC))
        factor = gl.convert_layout(largest * (1.0 / FRACTION_RANGE), column_layout, assert_trivial=True)
        acc += whole_sums(sums, D, GP).to(gl.float32) * factor[None, :]
        slot = _next(slot, STAGES)
        parity = gl.where(slot == 0, parity ^ 1, parity)
        write = _next(write, STAGES)

    l = gl.convert_layout(gl.sum(l, 0), column_layout)
    weight_sum = gl.convert_layout(gl.sum(weight_sum, 0), column_layout)
    m = gl.convert_layout(m * unit, column_layout)
    o = acc - 1.5 * weight_sum[None, :]
    run(WARP_BARRIER, "=r", ())  # every lane has read the last page
    head = gl.arange(0, GP, layout=column_layout)
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, o.type.layout))
    place = ring + head[None, :] * _partial_bytes(D) + 4 * channel[:, None]
    run(STORE_1, "=r,r,r", (place, o.to(gl.int32, bitcast=True)))
    place = ring + GP * _partial_bytes(D) + 8 * head
    run(STORE_1_IN_FIRST_ROW, "=r,r,r", (place, m.to(gl.int32, bitcast=True)))
    run(STORE_1_IN_FIRST_ROW, "=r,r,r", (place + 4, l.to(gl.int32, bitcast=True)))
    return slot, parity


@gluon.constexpr_function
def _partial_bytes(head_dim: int) -> int:
    """One head of a warp's result in its ring: heads are kept apart so that they fall in different banks."""
    return 4 * head_dim + 32


@gluon.jit
def _merge_warps(
    rings, segment, o_ptr, lse_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """One partial result of what every warp has left in its ring: o, largest score (base 2), sum."""
    RING: gl.constexpr = ring_bytes(D, STAGES)
    gl.static_assert(GP * (_partial_bytes(D) + 8) <= STAGES * _stage_bytes(D))
    quad = gl.arange(0, GP * D // 4, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    head = quad // (D // 4)
    place = rings + head * _partial_bytes(D) + quad % (D // 4) * 16
    statistics = rings + GP * _partial_bytes(D) + 8 * head
    top = load_word(statistics).to(gl.float32, bitcast=True)
    for n in gl.static_range(1, WARPS):
        top = gl.maximum(top, load_word(statistics + n * RING).to(gl.float32, bitcast=True))
    l = gl.full([GP * D // 4], 0.0, gl.float32, quad.type.layout)
    o0, o1, o2, o3 = l, l, l, l
    for n in gl.static_range(WARPS):
        m = load_word(statistics + n * RING).to(gl.float32, bitcast=True)
        factor = gl.exp2(m - top)
        l += factor * load_word(statistics + n * RING + 4).to(gl.float32, bitcast=True)
        a, b, c, d = load_words(place + n * RING)
        o0 += factor * a.to(gl.float32, bitcast=True)
        o1 += factor * b.to(gl.float32, bitcast=True)
        o2 += factor * c.to(gl.float32, bitcast=True)
        o3 += factor * d.to(gl.float32, bitcast=True)
    safe = gl.where(l > 0, l, 1.0)
    rows = segment * G + head
    lse = gl.where(l > 0, top + gl.log2(safe), float("-inf"))
    gl.store(lse_ptr + rows, lse, mask=(head < G) & (quad % (D // 4) == 0))
    inverse = 1.0 / safe
    o = join4(o0 * inverse, o1 * inverse, o2 * inverse, o3 * inverse).reshape([GP * D // 4, 4])
    layout: gl.constexpr = o.type.layout
    flat = 4 * gl.arange(0, GP * D // 4, layout=gl.SliceLayout(1, layout))[:, None]
    flat += gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(o_ptr + segment.to(gl.int64) * (G * D) + flat, o, mask=flat < G * D)


# ------------------------------------------------------------------------------------------ the kernel


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["sliding_window", "batch", "pieces", "stride_table"])
def _stage_kernel(
    query_ptr, rotated_ptr, key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr,
    value_scale_ptr, window_key_ptr, window_value_ptr, page_table_ptr, stride_table, window_table_ptr,
    lengths_ptr, history_ptr, softmax_scale, sliding_window, batch, pieces, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr,
    RECENT_SLOTS: gl.constexpr, WINDOW_PAGES: gl.constexpr, SLIDING: gl.constexpr, BATCH_P: gl.constexpr,
    STAGES: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Grid (pieces * K): every block takes its piece of the work, see `DecodePlan`, and deals it out to its
    warps, sequence by sequence."""
    WINDOW: gl.constexpr = (SINK_PAGES + RECENT_SLOTS) * WINDOW_PAGES
    SLOTS: gl.constexpr = SINK_PAGES + RECENT_SLOTS
    STAGE_BYTES: gl.constexpr = _stage_bytes(D)
    RING: gl.constexpr = ring_bytes(D, STAGES)
    gdc_launch_dependents()
    memory = gl.allocate_shared_memory(
        gl.int32, [shared_bytes(D, STAGES) // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    memory.index(0).store(gl.full([32], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [WARPS], [0])))
    rings = gl.inline_asm_elementwise(SHARED_MEMORY, "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    warp = gl.inline_asm_elementwise(WARP, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    ring = rings + warp * RING
    barriers = ring + STAGES * STAGE_BYTES
    run(BLOCK_BARRIER, "=r", ())  # the store above lies in a ring
    for n in gl.static_range(STAGES):
        run(START_BARRIER, "=r,r", (barriers + 8 * n,))
    run(PUBLISH_BARRIERS, "=r", ())
    slot = 0
    parity = 0

    # This block's share [x, end) of all pages.
    index = gl.arange(0, BATCH_P, layout=gl.BlockedLayout([BATCH_P // 32], [32], [WARPS], [0]))
    load = gl.load(history_ptr + index, mask=index < batch, other=0)
    if SLIDING:
        lengths = gl.load(lengths_ptr + index, mask=index < batch, other=0)
        load -= plain.first_page(gl.maximum(lengths - sliding_window, 0), load, SINK_PAGES)
    load = gl.where(index < batch, load + WINDOW, 0)
    total = gl.sum(load, 0)
    head = gl.program_id(0) % K
    x = plain.piece_start(gl.program_id(0) // K, total, pieces)
    end = plain.piece_start(gl.program_id(0) // K + 1, total, pieces)
    earlier = gl.associative_scan(load, 0, _add) <= x
    b = gl.sum(earlier.to(gl.int32), 0)
    start = gl.sum(gl.where(earlier, load, 0), 0)
    pool = _Pool(
        key_codes_ptr + head * (4 * D), value_codes_ptr + head * (4 * D), mean_ptr + head * D,
        key_scale_ptr + head * PAGE, value_scale_ptr + head * PAGE,
    )  # fmt: skip

    while x < end:
        row = b * K + head
        length = gl.load(lengths_ptr + b)
        history = gl.load(history_ptr + b)
        oldest = gl.maximum(length - sliding_window, 0) if SLIDING else 0
        first = plain.first_page(oldest, history, SINK_PAGES) if SLIDING else 0
        row_end = start + WINDOW + history - first
        # This warp's share [low, high) of the sequence.
        share = gl.minimum(end, row_end) - x
        low = x - start + share * warp // WARPS
        high = x - start + share * (warp + 1) // WARPS
        page_low = first + gl.maximum(low - WINDOW, 0)
        page_high = first + gl.maximum(high - WINDOW, 0)
        table = page_table_ptr + b * stride_table
        following = gl.load(table + page_low, mask=page_low < page_high, other=0)
        write = slot
        for n in gl.static_range(STAGES - 1):
            _fetch(
                pool, following.to(gl.int64) * K, ring + write * STAGE_BYTES, barriers + 8 * write,
                page_low + n < page_high, D,
            )  # fmt: skip
            write = _next(write, STAGES)
            following = gl.load(table + page_low + (n + 1), mask=page_low + (n + 1) < page_high, other=0)

        window = Window(window_key_ptr, window_value_ptr, window_table_ptr + b * SLOTS, length, history, head)
        window_low = (low + WINDOW_PAGES - 1) // WINDOW_PAGES
        window_high = gl.minimum((high + WINDOW_PAGES - 1) // WINDOW_PAGES, SLOTS)
        for window_page in range(window_low, window_high):
            prefetch_page(window, window_page, K, D, SINK_PAGES, RECENT_SLOTS)
        for window_page in range(window_low, window_high):
            attend_page(
                query_ptr + row * G * D, window, oldest, softmax_scale, window_page,
                row * SLOTS + window_page, o_ptr, lse_ptr,
                K, G, GP, D, SINK_PAGES, RECENT_SLOTS, EXACT_QUERY,
            )  # fmt: skip
        slot, parity = _history_part(
            rotated_ptr + row * G * D, query_ptr + row * G * D, pool, table, page_low, page_high, oldest,
            softmax_scale, ring, barriers, slot, parity, following,
            K, G, GP, D, SINK_PAGES, SLIDING, STAGES, EXACT_QUERY,
        )  # fmt: skip
        run(BLOCK_BARRIER, "=r", ())
        segment = batch * K * SLOTS + gl.program_id(0) + b * K
        _merge_warps(rings, segment, o_ptr, lse_ptr, G, GP, D, STAGES)
        run(BLOCK_BARRIER, "=r", ())
        x = gl.minimum(row_end, end)
        start = row_end
        b += 1
    memory._keep_alive()


# ------------------------------------------------------------------------------------------ launches


def _reserve_shared_memory(kernel) -> None:
    """Makes later launches of a compiled kernel ask for as much shared memory as a multiprocessor has.

    A launch that starts early shares multiprocessors with the one before it, and their division between cache
    and shared memory: the stage must not find less than it needs.
    """
    if kernel is not None:
        _set_carveout(kernel.function)


@functools.cache
def _set_carveout(function: int) -> None:
    preferred_shared_memory_carveout, percent = 9, 100
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(function), preferred_shared_memory_carveout, percent
    )


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
    sequence of length 0 yields zeros. Raises ShapeError; NotImplementedError (device other than Hopper,
    head_dim other than 64, 128, 256, more than 16 query heads per key/value head) before anything is
    allocated. CUDA-graph capturable.
    """
    key = plain.step_key(query, softmax_scale, sliding_window, sink_logits, dtype)
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
        check_hopper(query)
        if query.shape[-1] not in HEAD_DIMS:
            raise NotImplementedError(f"head_dim {query.shape[-1]}, the Gluon kernel serves {HEAD_DIMS}")
        group = plain.query_group(query, cache)
        padded_group = max(4, triton.next_power_of_2(group))
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        heads, batch = query.shape[1] // group, query.shape[0]
        blocks = _blocks(query.shape[-1], padded_group)
        pieces = blocks * processors // heads
        # A piece that goes over the end of a sequence starts and ends twice. Where sequences have one length
        # none does if there are as many pieces for each; but not at the price of too many idle
        # multiprocessors.
        aligned = pieces // batch * batch
        if 16 * aligned >= 15 * pieces:
            pieces = aligned
        self.plan = plan = plain.plan_decode(
            query, cache, rotation, sliding_window, programs=heads * pieces,
            window_pages=_window_pages(batch),
        )  # fmt: skip
        plain.check_sinks(plan, sink_logits)
        self.rotate = plain.Rotation(plan, rotation.query_transform, rows_dtype=query.dtype, EARLY=True)
        self.merge = plain.Merge(
            plan, cache, rotation, sinks=sink_logits is not None, dtype=dtype, EARLY=True, launch_pdl=True
        )
        fixed = {
            "key_codes_ptr": cache.key_codes, "value_codes_ptr": cache.value_codes,
            **plain.stage_arrays(cache), "softmax_scale": softmax_scale * plain.LOG2_E,
            "sliding_window": sliding_window or 0, "batch": plan.batch, "pieces": plan.pieces,
            "K": plan.heads, "G": plan.group, "GP": plan.padded_group, "D": plan.head_dim,
            "SINK_PAGES": plan.sink_pages, "RECENT_SLOTS": plan.recent_slots,
            "WINDOW_PAGES": plan.window_pages, "SLIDING": sliding_window is not None,
            "BATCH_P": plan.padded_batch, "STAGES": RING_PAGES,
            "EXACT_QUERY": query.dtype == torch.bfloat16,
        }  # fmt: skip
        changing = ("query_ptr", "rotated_ptr", "o_ptr", "lse_ptr")
        self.stage = Launch(
            _stage_kernel, (plan.pieces * plan.heads,), changing, fixed, num_warps=WARPS.value,
            maxnreg=min(255, 65536 // (32 * WARPS.value * blocks)), launch_pdl=True,
        )  # fmt: skip

    def __call__(self, query: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
        rotated, first = self.rotate(query)
        _reserve_shared_memory(first)
        o, lse = plain.allocate_partials(self.plan, query.device)
        _reserve_shared_memory(self.stage(query, rotated, o, lse))
        out, kernels = self.merge(o, lse, sink_logits)
        for kernel in kernels:
            _reserve_shared_memory(kernel)
        return out
