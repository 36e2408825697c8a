"""One-token attention over INT2 pages for Hopper GPUs (Mosaic GPU): flash decoding with codes in registers.

Every warp is its own flash decoder: it walks whole pages of 64 tokens through a private ring of
shared-memory stages (bulk copies that report to one barrier per stage), keeps an online softmax in registers,
and never meets a block barrier inside the loop. The warps of a block merge once, at the end; blocks write
partial outputs and their log-sum-exp, and a second launch (`merge.py`) makes outputs of them. The BF16 window
pages (sink and recent), whole or in parts, are dealt out to the warps as well, which then get fewer INT2
pages; what a warp makes of them is a partial result of its own (`windows.py`). While the first pages are on
their way, the block rotates its query (`queries.py`).

The two products of a page run on warp-level 8-bit matrix instructions with the codes as left operand; see
`fragments.py` for the mapping. Scores: the rotated query becomes a fixed-point vector of 15 bits, split into
two signed bytes, so that `u8 x s8 -> s32` sums are exact and the grid's offset of 1.5 is an integer that
starts the sum. With at most 4 query heads per key/value head the two bytes fill the 8 columns of one product
(column 2h + limb); with more heads they are two products. Larger groups are split into tiles of 8 heads.
Values: with at most 4 heads, P times the row's scale becomes a fixed-point fraction of the page's largest, of
16 bits in two unsigned bytes, and a page's exact sums are added to the float32 outputs; with more heads it is
a float16 number and the codes are subnormal ones (`values.py`). q . (mean key of a page) is one bf16 product
for a batch of pages, one page per row.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core.errors import ShapeError
from ..machine import fragments as frag
from ..machine.tuning import decode_plan
from .geometry import (
    EMPTY,
    LOG2E,
    PAGE,
    TINY,
    WARP_LANES,
    DecodeShape,
    Place,
    check_decode_shape,
    sum_rows,
)
from .merge import merge_partials, rotate_few_queries
from .queries import (
    FIXED_MAX,
    ROTATED_IN_BLOCK,
    dense_query,
    dense_scores,
    lane_scores,
    rotate_query,
    rotated_query,
    start_rotation,
)
from .values import BytesTimesValues, HalvesTimesValues, sum_columns
from .windows import STEPS, WindowRows, attend_windows

# ------------------------------------------------------------------------------------------ kernel body


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Turn:
    """Where a warp stands on its way through its pages: the page, and the stages that it is about to use."""

    index: Any  # of the page whose scores come next
    parity: Any  # of its stage's barrier
    slot: Any  # its stage
    value_slot: Any  # stage of the page before it, whose values come next
    free_slot: Any  # stage that the warp asks for again, once it has met
    barrier: Any  # of each of these stages
    previous_barrier: Any
    free_barrier: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _MeanScores:
    """q . mean key of a batch of pages, [row half][head], in units of the integer sums."""

    scores: list
    pages: Any  # lane n: physical page of the batch's n-th page
    following: Any  # likewise of the next batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Softmax:
    """Online softmax, per lane head."""

    maximum: list  # score, in units of the integer sums
    total: list  # sum of P
    weighted: list  # sum of P * scale
    acc: list  # outputs

    def scaled(self, alpha: list, maximum: list) -> "_Softmax":
        """The same sums relative to another maximum: all times alpha."""
        total = [x * a for x, a in zip(self.total, alpha)]
        weighted = [x * a for x, a in zip(self.weighted, alpha)]
        return _Softmax(maximum, total, weighted, [x * alpha[i % len(alpha)] for i, x in enumerate(self.acc)])


def decode_body(m: Any, shape: DecodeShape, block: tuple, refs: dict) -> None:
    """The kernel for one block. `m` is a register machine, `block` = (split, tile and head, sequence)."""
    split, head_tile, sequence = block
    head, tile = head_tile.udiv(shape.tiles), head_tile.umod(shape.tiles)
    _history(Place(m, shape, refs, sequence, head, tile, split))


def _history(at: Place) -> None:
    """Attention of this block's share of the INT2 pages, and of the BF16 window pages that its warps take."""
    m, shape, refs = at.m, at.shape, at.refs
    head_dim, parts, stages, stage = shape.head_dim, shape.head_dim // 64, shape.stages, shape.stage_bytes
    heads = range(shape.lane_heads)
    value_offset, scale_offset = 16 * head_dim, 32 * head_dim  # bytes inside a stage

    # ---- what does not depend on the length, which is still to come, comes first
    table = m.pointer(refs["page_table"]).at(at.sequence * shape.table_pages, 4)
    line = 128 // 4  # table entries

    def prefetch_table():
        for entry in range(0, shape.table_pages, line * WARP_LANES):
            m.prefetch(table.at((m.lane * line + entry).min(shape.table_pages - 1), 4))

    m.when(m.warp.eq(0), prefetch_table)
    started = start_rotation(at) if shape.transforms else None
    barriers = m.shared_base + shape.barrier_offset + m.warp * (8 * stages)

    def start_barriers():
        for n in range(stages):
            m.start_barrier(barriers, 8 * n)
        m.publish_barriers()

    m.when(m.one_lane(), start_barriers)
    m.sync_warp()
    window = WindowRows(at, m.Int(0)) if shape.windows else None

    # ---- this warp's pages. A sequence may be cut inside its last page: tokens past its end do not count.
    stored = (at.length - shape.sink_pages * PAGE).max(0)
    pages = at.history_pages.min((stored + (PAGE - 1)) >> 6)
    first, end = (_first_page(shape, pages, at.worker + n) for n in (0, 1))

    def physical_pages(index):  # lane n: the page of index + n; means nothing past the end
        return m.load_global(table.at((index + m.lane).min(shape.table_pages - 1), 4))[0]

    batch = shape.mean_pages
    first_pages = physical_pages(first)
    if window:  # the first rows come nearer during the rotation
        m.when(at.worker.lt(shape.windows), window.prefetch)

    # ---- copies: one lane asks for the four arrays of a page, and a barrier counts their bytes
    ring = m.shared_base + m.warp * (stages * stage)
    pieces, offset = [], 0  # (this head of page 0, bytes of a head, offset in a stage)
    for name, size in (
        ("key_codes", 16 * head_dim),
        ("value_codes", 16 * head_dim),
        ("key_scale", 2 * PAGE),
        ("value_scale", 2 * PAGE),
    ):
        pieces.append((m.pointer(refs[name]).at(at.head, size), size, offset))
        offset += size

    # A stage is asked for again when the warp has met after using what it read there: no load is under way.
    def fetch(target, barrier, page):
        m.expect_bytes(barrier, stage)
        for source, size, offset in pieces:
            m.copy_bulk(target, source.at(page, shape.heads * size), size, barrier, offset)

    def fetch_where(condition, target, barrier, page):
        m.when(condition, lambda: m.when(m.one_lane(), lambda: fetch(target, barrier, page)))

    for n in range(stages):
        page = m.shuffle(first_pages, m.Int(n))
        fetch_where((first + n).lt(end), ring + n * stage, barriers + 8 * n, page)

    # ---- mean keys: of a batch of pages at once, one page per row of a product
    chunks = head_dim // 8  # 16-byte pieces of a mean
    means = m.shared_base + shape.mean_offset + m.warp * (2 * head_dim * batch)
    mean_source = m.pointer(refs["key_page_mean"]).at(at.head, 2 * head_dim)

    def fetch_means(index, pages_from, lane):  # of the pages from `index` on, the first of them in `lane`
        for n in range(batch * chunks // WARP_LANES):
            flat = m.lane + WARP_LANES * n
            row, chunk = flat.udiv(chunks), flat.umod(chunks)
            page = m.shuffle(pages_from, row + lane)
            source = mean_source.at(page, shape.heads * 2 * head_dim).at(chunk, 16)
            m.when(
                (index + row).lt(end),
                lambda flat=flat, source=source: m.copy_async(means + flat * 16, source),
            )
        m.commit_copies()

    fetch_means(first, first_pages, 0)

    # ---- right operands
    key_operands, start, top = rotated_query(at, rotate_query(at, started) if started else None)
    score_unit = [t * (shape.softmax_scale * LOG2E / FIXED_MAX) for t in top]  # of the integer sums, base 2
    mean_unit = [t.reciprocal() * FIXED_MAX for t in top]  # of q . mean, in units of the integer sums

    if window:
        parts_here = (m.Int(shape.all_parts + shape.workers - 1) - at.worker).udiv(shape.workers)
        steps = parts_here * (STEPS // shape.window_parts)
        m.when(at.worker.lt(shape.windows), lambda: attend_windows(at, steps))

    # ---- loads out of a stage
    def load_keys(slot):  # -> words[r][j]: word parts * c + j of token 8g + r
        place = slot + at.g * (128 * parts) + at.c * (4 * parts)
        return [m.load_shared(place, parts, 16 * parts * r) for r in range(8)]

    def load_values(slot):  # -> words[i]: word c of channel 8i + g
        words = []
        for n in range(head_dim // 32):
            words += m.load_matrices(slot + m.lane * 16, value_offset + 512 * n)
        return words

    def load_scales(slot, offset):  # -> the scales of tokens 8g .. 8g+7
        words = m.load_shared(slot + at.g * 16, 4, scale_offset + offset)
        return [x.as_float() for w in words for x in (w << 16, w & 0xFFFF0000)]

    def load_means():  # -> one left operand per 16 channels, whose rows are the mean keys of the batch
        rows = [means + ((at.g + 8 * h) & (batch - 1)) * (2 * head_dim) + at.c * 16 for h in range(2)]
        words = [[m.load_shared(row, 4, 64 * n) for row in rows] for n in range(head_dim // 32)]
        return [[a[i], b[i], a[i + 1], b[i + 1]] for a, b in words for i in (0, 2)]

    # ---- loop state
    n_heads, tiles = shape.lane_heads, head_dim // 16
    product = BytesTimesValues(m) if shape.paired else HalvesTimesValues(m)

    def next_batch(index, batch_before):
        """The mean scores of the pages from `index` on."""
        pages_now = batch_before.following
        m.wait_copies(0)
        m.sync_warp()  # the other lanes' copies are there
        sums = dense_scores(at, load_means(), dense_query(at))
        m.sync_warp()  # every lane has read them
        fetch_means(index + batch, pages_now, batch)
        scores = [x * u for h in range(2) for x, u in zip(lane_scores(at, sums, h), mean_unit)]
        return _MeanScores(scores, pages_now, physical_pages(index + batch))

    def scores_and_values(slot, value_slot, mean_score, weights, acc):
        """Scores of the page in `slot`, and P @ V of the page before it: independent, so that they overlap.

        Scores [r][head] come in units of the integer sums; row tile r is the tokens 8g + r.
        """
        words, values = load_keys(slot), load_values(value_slot)
        key_scale = load_scales(slot, 0)
        sums_of_rows = [[] for _ in heads]
        for pair in range(4):  # two row tiles share one product
            left = [[frag.unpack_bytes(w) for w in words[2 * pair + h]] for h in range(2)]
            sums = [[m.Int(0)] * 4 for _ in key_operands]  # a literal 0 costs nothing
            for j in range(parts):
                for s in (0, 2):
                    a = [left[0][j][s], left[1][j][s], left[0][j][s + 1], left[1][j][s + 1]]
                    for limb, operand in enumerate(key_operands):
                        b = operand[4 * j + s : 4 * j + s + 2]
                        sums[limb] = m.mma_s8(a, b, sums[limb], unsigned_a=True)
            for h in range(2):
                for row, x in zip(sums_of_rows, _whole(shape, sums, h)):
                    row.append(x)
            some_tiles = range(pair * tiles // 4, (pair + 1) * tiles // 4)
            acc = product.add(acc, weights, values, some_tiles)
        score = []
        for r in range(8):
            shift = [key_scale[r].fma(x, y) for x, y in zip(start, mean_score)]
            score.append([whole[r].to_float().fma(key_scale[r], y) for whole, y in zip(sums_of_rows, shift)])
        return score, acc

    ahead = stages - 2

    def page_step(carry):
        turn, means_of_batch, weights, state = carry
        index, slot = turn.index, turn.slot
        m.wait_barrier(turn.barrier, turn.parity)
        m.sync_warp()  # every lane has read what the free slot held
        row = (index - first) & (batch - 1)
        means_of_batch = m.branch(row.eq(0), means_of_batch, lambda before: next_batch(index, before))
        page = m.shuffle(means_of_batch.pages, row + ahead)
        wanted = (index + ahead).lt(end) & index.ge(first + 2)
        fetch_where(wanted, turn.free_slot, turn.free_barrier, page)
        lower, lane = row.lt(8), (row & 7) * 4 + at.c
        by_half = means_of_batch.scores
        mean_score = [m.select(lower, by_half[e], by_half[n_heads + e]) for e in heads]
        mean_score = [m.shuffle(x, lane) for x in mean_score]

        score, acc = scores_and_values(slot, turn.value_slot, mean_score, weights, state.acc)
        state = dataclasses.replace(state, acc=acc)

        # Online softmax. The branch is taken by the whole warp, and rarely: a score far above the maximum,
        # or a page that is not full.
        value_scale = product.scales(load_scales(slot, 2 * PAGE))

        def probabilities(score, maximum):  # -> P * value_scale [r][head], sums over r of P * scale and of P
            minus = [x * u * -1.0 for x, u in zip(maximum, score_unit)]
            p = [[x.fma(u, y).exp2() for x, u, y in zip(row, score_unit, minus)] for row in score]
            rows = [[x * scale for x in row] for row, scale in zip(p, value_scale)]
            return rows, product.sums(rows), sum_columns(p)

        def rescale(carry):
            state = carry[3]
            keep = [frag.score_token(at.g, r).lt(left_in_page) for r in range(8)]
            kept = [[m.select(k, x, m.Float(EMPTY)) for x in row] for k, row in zip(keep, score)]
            new_maximum = []
            for e in heads:
                top = functools.reduce(lambda a, b: a.max(b), [row[e] for row in kept])
                for distance in (4, 8, 16):
                    top = top.max(m.shuffle_xor(top, distance))
                top = product.reference([row[e] for row in kept], value_scale, top, score_unit[e])
                new_maximum.append(state.maximum[e].max(top))
            alpha = [((x - y) * u).exp2() for x, y, u in zip(state.maximum, new_maximum, score_unit)]
            state = state.scaled(alpha, new_maximum)
            return (*probabilities(kept, new_maximum), state)

        rows, sums, p_sums = probabilities(score, state.maximum)
        left_in_page = stored - index * PAGE
        slow = functools.reduce(lambda a, b: a | b, product.beyond(p_sums, sums), left_in_page.lt(PAGE))
        rows, sums, p_sums, state = m.branch(m.any_lane(slow), (rows, sums, p_sums, state), rescale)
        weighted = [x + y for x, y in zip(state.weighted, sums)]
        total = [x + y for x, y in zip(state.total, p_sums)]
        state = dataclasses.replace(state, total=total, weighted=weighted)

        last = slot.eq(ring + (stages - 1) * stage)
        turn = _Turn(
            index=index + 1,
            parity=turn.parity ^ last.to_int(),
            slot=m.select(last, ring, slot + stage),
            value_slot=slot,
            free_slot=turn.value_slot,
            barrier=m.select(last, barriers, turn.barrier + 8),
            previous_barrier=turn.barrier,
            free_barrier=turn.previous_barrier,
        )
        return turn, means_of_batch, product.weights(rows), state

    # Before the first page P is zero; the first stage, which has arrived by then, stands in for the values.
    # Afterwards one stage holds the page whose values are still to be summed, one the page whose scores are
    # computed; `ahead` are on their way.
    zero = m.Float(0.0)
    turn = _Turn(
        first,
        m.Int(0),
        *(ring + n * stage for n in (0, 0, ahead)),
        *(barriers + 8 * n for n in (0, 0, ahead)),
    )
    nothing = [[zero] * n_heads, [zero] * n_heads, [zero] * (2 * tiles * n_heads)]
    init = (
        turn,
        _MeanScores([zero] * (2 * n_heads), first_pages, first_pages),
        product.nothing(),
        _Softmax([m.Float(EMPTY)] * n_heads, *nothing),
    )
    turn, _, weights, state = m.loop((end - first).max(0), init, page_step)
    acc = product.add(state.acc, weights, load_values(turn.value_slot), range(tiles))

    total, weighted = sum_rows(m, state.total), sum_rows(m, state.weighted)

    def output(u, h, e):
        value = acc[(2 * u + h) * n_heads + e] * product.unit
        return 16 * u + 8 * h + at.g, weighted[e].fma(-1.5, value)

    _merge_warps(at, [x * u for x, u in zip(state.maximum, score_unit)], total, output)


def _whole(shape: DecodeShape, sums: list[list], half: int) -> list:
    """Per lane head high * 256 + low of row g (half 0) or g + 8 (half 1) of integer accumulator tiles."""
    if shape.paired:
        return [(sums[0][2 * half] << 8) + sums[0][2 * half + 1]]
    return [(high << 8) + low for high, low in zip(*(tile[2 * half : 2 * half + 2] for tile in sums))]


def _first_page(shape: DecodeShape, pages: Any, worker: Any) -> Any:
    """The first INT2 page of a worker; parts of windows go round among them, and count as several pages."""
    load = pages + shape.all_parts * shape.window_pages
    each, rest = divmod(shape.all_parts, shape.workers)
    windows = worker * each + worker.min(rest)  # of the workers before
    return ((worker * load).udiv(shape.workers) - windows * shape.window_pages).max(0).min(pages)


def _merge_warps(at: Place, maximum: list, total: list, output: Any) -> None:
    """Merges the warps of a block through shared memory; stores the partial output and log-sum-exp.

    maximum (base 2) and total per lane head; output(u, h, e) -> (channel, unnormalized value).
    """
    m, shape = at.m, at.shape
    head_dim, columns = shape.head_dim, shape.columns
    lane_head = [at.c] if shape.paired else [at.c * 2, at.c * 2 + 1]
    # Tables [warp][8 heads] of maxima and of sums, [8 heads] of the largest maxima, then outputs
    # [warp][head][channel] in rows of row_bytes.
    table_bytes, row_bytes = 32 * shape.warps, shape.merge_row_bytes
    maxima, sums = m.shared_base, m.shared_base + table_bytes
    tops, outputs = m.shared_base + 2 * table_bytes, m.shared_base + (2 * table_bytes + 32)

    def store_statistics(table, values):
        for h, x in zip(lane_head, values):
            m.store_shared(table + (m.warp * 8 + h) * 4, [x.as_int()])

    def load_statistics(table, h):
        return [m.load_shared(table + h * 4, 1, 32 * w)[0].as_float() for w in range(shape.warps)]

    m.sync_block()  # the stages are free now
    m.when(at.g.eq(0), lambda: store_statistics(maxima, maximum))
    m.sync_block()
    top = [functools.reduce(lambda a, b: a.max(b), load_statistics(maxima, h)) for h in lane_head]
    factor = [(x - y).exp2() for x, y in zip(maximum, top)]
    m.when(at.g.eq(0), lambda: store_statistics(sums, [x * f for x, f in zip(total, factor)]))
    m.when(m.thread.lt(4), lambda: store_statistics(tops, top))
    for e, h in enumerate(lane_head):
        row = outputs + (m.warp * columns + h) * row_bytes
        for u, half in itertools.product(range(head_dim // 16), range(2)):
            channel, value = output(u, half, e)
            m.store_shared(row + channel * 4, [(value * factor[e]).as_int()])
    m.sync_block()

    out, lse = m.pointer(at.refs["out"]), m.pointer(at.refs["lse"])
    threads, quads = shape.warps * WARP_LANES, columns * head_dim // 4
    for n in range(-(-quads // threads)):
        flat = m.thread + n * threads
        inside = flat.lt(quads)  # the last round may have more threads than outputs
        flat = flat.min(quads - 1)
        h, quad = flat.udiv(head_dim // 4), flat.umod(head_dim // 4)
        weight = functools.reduce(lambda a, b: a + b, load_statistics(sums, h))
        place = outputs + h * row_bytes + quad * 16
        parts = [m.load_shared(place, 4, w * columns * row_bytes) for w in range(shape.warps)]
        some = weight.gt(0.0)
        inverse = m.select(some, weight.max(TINY).reciprocal(), m.Float(0.0))
        values = [functools.reduce(lambda a, b: a + b, [x.as_float() for x in four]) for four in zip(*parts)]
        words = [(x * inverse).as_int() for x in values]
        largest = m.load_shared(tops + h * 4)[0].as_float()
        logarithm = m.select(some, largest + weight.max(TINY).log2(), m.Float(-math.inf))
        if shape.windows:  # this is all attention; rows of a sequence past its tables are lost
            past = PAGE * (shape.table_pages + shape.window_slots)
            logarithm = m.select(at.length.lt(past), logarithm, m.Float(math.nan))
        row = at.tile * columns + h
        index = (at.sequence_head * shape.group + row) * shape.partials + at.partial
        target, lse_target = out.at(index, 4 * head_dim).at(quad, 16), lse.at(index, 4)
        inside = inside & row.lt(shape.group)
        m.when(inside, lambda p=target, w=words: m.store_global(p, w))
        m.when(inside & quad.eq(0), lambda p=lse_target, x=logarithm: m.store_global(p, [x.as_int()]))


# ------------------------------------------------------------------------------------------ launches

_CACHE_ARRAYS = (
    *("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean"),
    *("window_key", "window_value", "page_table", "window_table", "history_pages", "lengths"),
)


def _inputs(shape: DecodeShape) -> tuple[str, ...]:
    return ("query_transform" if shape.transforms else "query_rotated", "query", *_CACHE_ARRAYS)


@functools.cache
def _decode_kernel(shape: DecodeShape) -> Any:
    """The compiled-on-first-use kernel of one shape: arrays in the order of _inputs."""
    from ..machine.registers import compiled_kernel

    rows = (shape.batch, shape.heads, shape.group, shape.partials)
    return compiled_kernel(
        lambda m, block, arrays: decode_body(m, shape, block, arrays),
        _inputs(shape),
        {
            "out": jax.ShapeDtypeStruct((*rows, shape.head_dim), jnp.float32),
            "lse": jax.ShapeDtypeStruct(rows, jnp.float32),
        },
        {"split": shape.splits, "head_tile": shape.heads * shape.tiles, "sequence": shape.batch},
        shape.warps,
        shape.shared_bytes,
        "oscar_decode",
    )


def decode_shape(
    query: jax.Array,
    cache: Any,
    *,
    softmax_scale: float,
    transforms: int,
    windows: bool,
    splits: int | None = None,
) -> DecodeShape:
    """The launch plan for queries [B, K, G, D] over `cache`. Raises NotImplementedError.

    `transforms` is the leading axis of the query_transform that the kernel is to apply, or 0.
    """
    batch, heads, group, head_dim = query.shape
    check_decode_shape(head_dim, group)
    if query.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(
            f"query is {query.dtype}: the Mosaic decode kernel reads float32 or bfloat16"
        )
    tiles = -(-group // 8)
    table_pages = cache.page_table.shape[1]
    window_slots = cache.config.window_slots if windows else 0
    plan = decode_plan(batch * heads * tiles, table_pages, head_dim, window_slots)
    return DecodeShape(
        batch=batch,
        heads=heads,
        group=group,
        head_dim=head_dim,
        table_pages=table_pages,
        softmax_scale=float(softmax_scale),
        query_bfloat16=query.dtype == jnp.bfloat16,
        splits=splits or plan.splits,
        stages=plan.stages,
        warps=plan.warps,
        mean_pages=plan.mean_pages,
        transforms=transforms,
        sink_pages=cache.config.sink_pages,
        window_slots=window_slots,
        window_parts=plan.window_parts,
        window_pages=plan.window_pages,
    )


def decode_partials(
    rotation_input: jax.Array, query: jax.Array, cache: Any, shape: DecodeShape
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel: partial outputs float32 [B, K, G, S, D] and their base-2 log-sum-exp [B, K, G, S].

    query float32 or bf16 [B, K, G, D]; rotation_input is query_transform float32 [shape.transforms, D, D],
    or, where that is 0, the rotated query float32 [B, K, G, D]. The first shape.windows partials are those of
    the BF16 pages; the others are in the rotated value basis without value_mean.
    """
    arrays = [getattr(cache, name) for name in _CACHE_ARRAYS]
    return _decode_kernel(shape)(rotation_input, query, *arrays)


def decode_history(
    query_rotated: jax.Array, query: jax.Array, cache: Any, *, softmax_scale: float, splits: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries [B, K, G, D] over the INT2 pages alone, in the rotated value basis.

    Returns out float32 [B, K, G, D] = sum(p * scale * (code - 1.5)) / sum(p) and the natural log-sum-exp of
    the scores, float32 [B, K, G], -inf where a sequence has no INT2 page. Any number of query rows G: they
    are served in tiles of eight. Raises NotImplementedError.
    """
    shape = decode_shape(
        query, cache, softmax_scale=softmax_scale, transforms=0, windows=False, splits=splits
    )
    out, lse = decode_partials(query_rotated, query, cache, shape)
    top = lse.max(-1)
    weight = jnp.exp2(lse - jnp.where(jnp.isfinite(top), top, 0.0)[..., None])
    total = weight.sum(-1)
    total = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bkgsd,bkgs->bkgd", out, weight / total[..., None], precision=lax.Precision.HIGHEST)
    return out, jnp.where(jnp.isfinite(top), (top + jnp.log2(total)) / LOG2E, -jnp.inf)


def decode_attention(
    query: jax.Array,
    cache: Any,
    rotation: Any,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    splits: int | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> [B, N, D], float32 or rounded to bfloat16 as `dtype` says; the twin of
    `attention.decode_attention`. Raises ShapeError, or NotImplementedError for a shape that the kernel does
    not serve.
    """
    if sliding_window is not None:
        raise NotImplementedError(
            f"sliding_window = {sliding_window}: the Mosaic decode kernel reads whole sequences"
        )
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    if query.shape[0] != cache.batch or query.shape[2] != head_dim or query.shape[1] % heads:
        raise ShapeError(f"query {query.shape}, expected [{cache.batch}, G * {heads}, {head_dim}]")
    grouped = query.reshape(cache.batch, heads, -1, head_dim)
    transform = rotation.query_transform
    transforms = transform.shape[0] if head_dim <= ROTATED_IN_BLOCK else 0
    shape = decode_shape(
        grouped, cache, softmax_scale=softmax_scale, transforms=transforms, windows=True, splits=splits
    )
    first = transform if transforms else rotate_few_queries(grouped, rotation)
    partials = decode_partials(first, grouped, cache, shape)
    out = merge_partials(*partials, rotation, windows=shape.windows, sink_logits=sink_logits, dtype=dtype)
    return out.reshape(query.shape)


def rotate_queries(query: jax.Array, rotation: Any) -> jax.Array:
    """query [B, K, G, D] @ query_transform [K or 1, D, D] -> float32."""
    return _per_head(query.astype(jnp.float32), rotation.query_transform)


def restore_values(history: jax.Array, weight: jax.Array, rotation: Any) -> jax.Array:
    """Output of the INT2 segment in the original basis: history @ output_transform + weight * value_mean.

    history float32 [B, K, G, D] in the rotated basis, weight float32 [B, K, G] its share of the softmax.
    """
    mean = rotation.value_mean.astype(jnp.float32)[:, None]  # [K or 1, 1, D]
    return _per_head(history, rotation.output_transform) + weight[..., None] * mean


def _per_head(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    if matrix.shape[0] == 1:
        return jnp.matmul(rows, matrix[0], precision=lax.Precision.HIGHEST)
    return jnp.einsum("bkgd,kde->bkge", rows, matrix, precision=lax.Precision.HIGHEST)
