"""One-token attention over INT2 pages for Hopper GPUs (Mosaic GPU): flash decoding with codes in registers.

Every warp is its own flash decoder: it walks whole pages of 64 tokens through a private ring of
shared-memory stages (bulk copies that report to one barrier per stage), keeps an online softmax in registers,
and never meets a block barrier inside the loop. The warps of a block merge once, at the end; blocks write
partial outputs and their log-sum-exp, and a second launch (`merge_mosaic_gpu.py`) makes outputs of them. The
BF16 window pages (sink and recent) are dealt out to the warps as well, which then get fewer INT2 pages: each
is a partial result of its own. While the first pages are on their way, the block rotates its query.

The two products of a page run on warp-level 8-bit matrix instructions with the codes as left operand; see
`fragments.py` for the mapping. Scores: the rotated query becomes a fixed-point vector of 15 bits, split into
two signed bytes, so that `u8 x s8 -> s32` sums are exact and the grid's offset of 1.5 is an integer that
starts the sum. Values: P times the row's scale becomes a fixed-point fraction of the page's largest, of 15
bits in two unsigned bytes, and a page's exact sums are added to the float32 outputs. With at most 4 query
heads per key/value head the two bytes fill the 8 columns of one product (column 2h + limb); with more heads
they are two products. Larger groups are split into tiles of 8 heads. q . (mean key of a page) is one bf16
product for a batch of pages, one page per row.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import cache_format as fmt
from ..config import ShapeError
from . import fragments as frag
from .merge_mosaic_gpu import merge_partials, rotate_few_queries
from .tuning import decode_plan

PAGE = fmt.PAGE_TOKENS
HEAD_DIMS = (64, 128, 256)
WARP_LANES = 32
ROTATED_IN_BLOCK = 128  # largest head_dim whose query_transform every block reads; else in a launch before

_LOG2E = math.log2(math.e)
_FIXED_MAX = 32000.0  # largest fixed-point query entry; its high byte stays inside -128..127
_EMPTY = -1e30  # running maximum before the first page
_TINY = 1e-30
# The maximum is only moved when P, summed over a lane's tokens of a page, exceeds this: after the first page
# hardly ever. P in fixed point is a fraction of the page's own largest.
_SLACK = 2.0**24
_FRACTION_MAX = 65000.0  # largest fixed-point P * scale; a page's sum of 64 with code 3 is below 2**24
_WHOLE = 2.0**23  # added to a float, leaves its nearest integer in the low bits
_ROTATE_STEP = 64  # entries of its matrix column that a thread loads at once


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Everything that is fixed when the decode kernel is built."""

    batch: int
    heads: int  # key/value heads K
    group: int  # query rows per key/value head
    head_dim: int
    table_pages: int  # columns of the page table
    scale: float  # multiplies the scores
    query_bfloat16: bool
    splits: int  # blocks per sequence and head that share the INT2 pages
    stages: int  # pages in flight per warp
    warps: int  # of a block, a multiple of 4; more warps leave each of them fewer registers
    mean_pages: int  # pages whose mean keys meet the query in one product, a power of two up to 16
    transforms: int  # leading axis of query_transform (1: shared, or K); 0: the queries come rotated
    sink_pages: int = 0
    window_slots: int = 0  # 0: only INT2 pages
    window_pages: int = 0  # INT2 pages that a warp is spared for every window page that it reads

    @property
    def paired(self) -> bool:
        """Whether both bytes of a query entry sit side by side in the columns of one product."""
        return self.group <= 4

    @property
    def columns(self) -> int:
        """Query rows per tile."""
        return 4 if self.paired else 8

    @property
    def lane_heads(self) -> int:
        """Query rows of which one lane holds scores: columns 2c and 2c + 1 of the product."""
        return 1 if self.paired else 2

    @property
    def tiles(self) -> int:
        return -(-self.group // self.columns)

    @property
    def partials(self) -> int:
        """Partial results per query row: one per BF16 window page, then one per split."""
        return self.window_slots + self.splits

    @property
    def workers(self) -> int:
        """Warps that share a sequence and head."""
        return self.splits * self.warps

    @property
    def tile_rows(self) -> int:
        """Different query rows of a tile; its other columns repeat the last."""
        return min(self.columns, self.group)

    @property
    def stage_bytes(self) -> int:
        """One staged page: key codes | value codes | key scale | value scale."""
        return fmt.int2_page_bytes(self.head_dim) - 2 * self.head_dim

    # ---- shared memory: stages | mean keys | rows of the query | barriers; at the end the merge of the warps
    @property
    def mean_offset(self) -> int:
        return self.warps * self.stages * self.stage_bytes

    @property
    def query_offset(self) -> int:
        return self.mean_offset + self.warps * self.mean_pages * 2 * self.head_dim

    @property
    def rotated_stride(self) -> int:
        """Bytes from one rotated query to the next: four blocks of a lane column each, kept apart."""
        return 4 * (self.head_dim + 16)

    @property
    def rotation_depth(self) -> int:
        """Entries of a column of query_transform that one thread multiplies."""
        groups = self.warps * WARP_LANES // self.head_dim
        return self.head_dim >> (max(1, groups).bit_length() - 1)

    @property
    def barrier_offset(self) -> int:
        """Where the barriers lie, 8 bytes per warp and stage."""
        groups = self.head_dim // self.rotation_depth
        queries = self.tile_rows * (4 * self.head_dim + groups * self.rotated_stride)
        queries = queries if self.transforms else 0
        merge = 2 * self.warps * 8 * 4 + self.warps * self.columns * self.head_dim * 4
        return max(self.query_offset + queries, merge)

    @property
    def shared_bytes(self) -> int:
        return self.barrier_offset + self.warps * self.stages * 8


def check_decode_shape(head_dim: int, group: int) -> None:
    """Raises NotImplementedError unless the kernel serves this head_dim and group."""
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim = {head_dim}: the Mosaic decode kernel serves {HEAD_DIMS}")
    if group < 1:
        raise NotImplementedError(f"group = {group}: the Mosaic decode kernel needs at least one query head")


# ------------------------------------------------------------------------------------------ kernel body


def decode_body(m: Any, shape: DecodeShape, block: tuple, refs: dict) -> None:
    """The kernel for one block. `m` is a register machine, `block` = (split, tile and head, sequence)."""
    split, head_tile, sequence = block
    head, tile = head_tile.udiv(shape.tiles), head_tile.umod(shape.tiles)
    _history(_Place(m, shape, refs, sequence, head, tile, split))


class _Place:
    """Where a thread stands: sequence, head and tile of its block, its warp, its lane's row and column."""

    def __init__(self, m, shape, refs, sequence, head, tile, split):
        self.m, self.shape, self.refs = m, shape, refs
        self.sequence, self.head, self.tile = sequence, head, tile
        self.partial = split + shape.window_slots
        self.worker = m.warp * shape.splits + split  # among all warps of this sequence, head and tile
        self.length, self.history_pages = (self.scalar(n, sequence) for n in ("lengths", "history_pages"))
        self.g, self.c = m.lane >> 2, m.lane & 3
        self.sequence_head = sequence * shape.heads + head
        self.low_limb = (self.g & 1).ne(0)  # in paired columns
        column_head = self.g >> 1 if shape.paired else self.g
        row = (tile * shape.columns + column_head).min(shape.group - 1)  # columns past the group repeat it
        self.row_in_tile = row - tile * shape.columns
        self.query_row = self.sequence_head * shape.group + row
        # Lanes whose column statistics belong to the heads of this lane's accumulators (columns 2c, 2c + 1).
        self.stat_lanes = [self.c * 8 + 4 * e for e in range(shape.lane_heads)]

    def per_head(self, x):
        """Moves a statistic of this lane's query column to the lanes that hold that column's scores."""
        return [self.m.shuffle(x, lane) for lane in self.stat_lanes]

    def scalar(self, name, index):
        return self.m.load_global(self.m.pointer(self.refs[name]).at(index, 4))[0]


def _dense_query(at: _Place) -> list[list]:
    """Right operands (bf16) of the unrotated query: one or two lists of 2 words per 16 channels.

    A float32 query is split into two bf16 parts: in the odd columns when paired, else as a second operand.
    """
    m, shape = at.m, at.shape
    words: list[list] = [[], []]
    size = 2 if shape.query_bfloat16 else 4
    base = m.pointer(at.refs["query"]).at(at.query_row, shape.head_dim * size).at(at.c, 8 * size)
    for block in range(shape.head_dim // 32):
        if shape.query_bfloat16:
            high = m.load_global(base, 4, 64 * block)
            low = [m.Int(0)] * 4
        else:
            x = [m.load_global(base, 4, 128 * block + 16 * i) for i in range(2)]
            x = [w.as_float() for w in x[0] + x[1]]
            high = [m.pack_bfloat16(x[2 * i], x[2 * i + 1]) for i in range(4)]
            rest = []
            for i, w in enumerate(high):
                rest += [x[2 * i] - (w << 16).as_float(), x[2 * i + 1] - (w & 0xFFFF0000).as_float()]
            low = [m.pack_bfloat16(rest[2 * i], rest[2 * i + 1]) for i in range(4)]
        if shape.paired:
            words[0] += [m.select(at.low_limb, b, a) for a, b in zip(high, low)]
        else:
            words[0] += high
            words[1] += low
    return words[:1] if shape.paired or shape.query_bfloat16 else words


def _dense_scores(at: _Place, left: list, operands: list[list]) -> list:
    """Products of bf16 rows (left operands, 4 words per 16 channels) with the unrotated query."""
    sums = [[at.m.Float(0.0)] * 4 for _ in range(2)]  # two chains hide each other's latency
    for operand in operands:
        for step, a in enumerate(left):
            b = operand[2 * step : 2 * step + 2]
            sums[step & 1] = at.m.mma_f16(a, b, sums[step & 1], bfloat16=True)
    return [x + y for x, y in zip(*sums)]


def _lane_scores(at: _Place, acc: list, row: int) -> list:
    """Scores of row g (row = 0) or g + 8 (row = 1) for this lane's heads, from one accumulator tile."""
    pair = acc[2 * row : 2 * row + 2]
    if not at.shape.paired:
        return pair
    return [pair[0] if at.shape.query_bfloat16 else pair[0] + pair[1]]


def _start_rotation(at: _Place) -> tuple[list, list]:
    """Starts loading what `_rotate_query` multiplies: this thread's parts of the query and the transform."""
    m, shape, refs = at.m, at.shape, at.refs
    head_dim, threads = shape.head_dim, shape.warps * WARP_LANES
    size = 2 if shape.query_bfloat16 else 4
    query = m.pointer(refs["query"]).at(at.sequence_head * shape.group, head_dim * size)
    rows = []
    for n in range(-(-shape.tile_rows * head_dim // (4 * threads))):
        four = m.thread + n * threads  # channels 4 * four .. 4 * four + 3 of all rows
        row, chunk = four.udiv(head_dim // 4), four.umod(head_dim // 4)
        row_in_group = (at.tile * shape.columns + row).min(shape.group - 1)
        rows.append(m.load_global(query.at(row_in_group, head_dim * size).at(chunk, 4 * size), size))
    return rows, _matrix_column(at, 0)


def _matrix_column(at: _Place, first: int) -> list:
    """Entries of the column of query_transform that this thread multiplies, from its entry `first` on."""
    m, shape = at.m, at.shape
    head_dim, depth = shape.head_dim, shape.rotation_depth
    if first == depth:
        return []
    head = at.head if shape.transforms > 1 else 0
    group = m.thread.udiv(head_dim).min(head_dim // depth - 1)
    column = m.pointer(at.refs["query_transform"]).at(head, 4 * head_dim * head_dim)
    column = column.at(group, 4 * head_dim * depth).at(m.thread.umod(head_dim), 4)
    count = min(depth, _ROTATE_STEP)
    return [m.load_global(column, 1, 4 * head_dim * (first + d), early=True)[0] for d in range(count)]


def _rotate_query(at: _Place, started: tuple[list, list]) -> Any:
    """q' = q @ query_transform for the query rows of this tile, in float32; returns where q' lies.

    All threads copy the rows to shared memory; then every thread has one column of the transform, or, where
    there are threads enough, `rotation_depth` entries of it, and q' is left as so many sums.
    """
    m, shape = at.m, at.shape
    head_dim, rows, depth = shape.head_dim, shape.tile_rows, shape.rotation_depth
    threads, groups = shape.warps * WARP_LANES, shape.head_dim // shape.rotation_depth
    source = m.shared_base + shape.query_offset  # float32 [rows, D]
    target = source + 4 * rows * head_dim  # float32 [group][row][rotated_place(channel)]
    query_words, column = started
    for n, words in enumerate(query_words):
        four = m.thread + n * threads
        if shape.query_bfloat16:
            words = [x for w in words for x in (w << 16, w & 0xFFFF0000)]
        inside = four.lt(rows * head_dim // 4)
        m.when(inside, lambda four=four, words=words: m.store_shared(source + four * 16, words))
    m.sync_block()

    def multiply():
        group, channel = m.thread.udiv(head_dim), m.thread.umod(head_dim)
        sums, entries = [m.Float(0.0)] * rows, column
        left = source + group * (4 * depth)
        for first in range(0, depth, _ROTATE_STEP):
            now = [w.as_float() for w in entries]
            entries = _matrix_column(at, first + len(now))
            for d in range(0, len(now), 4):
                for r in range(rows):
                    four = m.load_shared(left, 4, 4 * (r * head_dim + first + d))
                    for x, entry in zip(four, now[d : d + 4]):
                        sums[r] = x.as_float().fma(entry, sums[r])
        place = target + group * (rows * shape.rotated_stride) + _rotated_place(shape, channel)
        for r in range(rows):
            m.store_shared(place, [sums[r].as_int()], r * shape.rotated_stride)

    m.when(m.thread.lt(groups * head_dim), multiply)
    m.sync_block()
    return target


def _rotated_place(shape: DecodeShape, channel: Any) -> Any:
    """Byte offset of a rotated query's channel: the lanes that read together find it in different banks."""
    block = 16 * (shape.head_dim // 64)  # channels of one lane column
    return channel.udiv(block) * (4 * block + 16) + channel.umod(block) * 4


def _rotated_query(at: _Place, rotated: Any | None) -> tuple[list[list], list, list]:
    """The rotated query as fixed-point right operands, the start of the integer sums, and their unit.

    It lies at `rotated` in shared memory, or in the array query_rotated. Returns operands (one list when
    paired, else high and low), per lane head the float32 -1.5 * sum(q') in integer steps, and the float32
    largest |q'|, of which a step is 1 / _FIXED_MAX.
    """
    m, shape = at.m, at.shape
    parts = shape.head_dim // 64
    entries = []  # [j][p]: channel 16 (parts c + j) + p
    for j in range(parts):
        if rotated is None:
            source = m.pointer(at.refs["query_rotated"]).at(at.query_row, shape.head_dim * 4)
            sums = [[m.load_global(source.at(at.c, 64 * parts), 4, 64 * j + 16 * i) for i in range(4)]]
        else:
            source = rotated + at.row_in_tile * shape.rotated_stride + at.c * (64 * parts + 16)
            offsets = [
                n * shape.tile_rows * shape.rotated_stride
                for n in range(shape.head_dim // shape.rotation_depth)
            ]
            sums = [[m.load_shared(source, 4, n + 64 * j + 16 * i) for i in range(4)] for n in offsets]
        sums = [[w.as_float() for four in words for w in four] for words in sums]
        entries.append([functools.reduce(lambda a, b: a + b, x) for x in zip(*sums)])
    top = functools.reduce(lambda a, b: a.max(b), [x.abs() for row in entries for x in row])
    for distance in (1, 2):
        top = top.max(m.shuffle_xor(top, distance))
    top = top.max(_TINY)
    steps = top.reciprocal() * _FIXED_MAX
    total = m.Int(0)
    operands: list[list] = [[], []]
    for j in range(parts):
        for register, weight in enumerate(frag.BYTE_WEIGHTS):
            # Byte b of this register meets channel frag.byte_channel(parts, j, c, register, b).
            fixed = [(entries[j][register + 4 * b] * steps * (1 / weight)).round_to_int() for b in range(4)]
            total = total + (fixed[0] + fixed[1] + fixed[2] + fixed[3]) * weight
            high = [(v + 128).sar(8) for v in fixed]
            low = [v - (h << 8) for v, h in zip(fixed, high)]
            if shape.paired:
                limb = [m.select(at.low_limb, b, a) for a, b in zip(high, low)]
                operands[0].append(_pack_bytes(m, limb))
            else:
                operands[0].append(_pack_bytes(m, high))
                operands[1].append(_pack_bytes(m, low))
    for distance in (1, 2):
        total = total + m.shuffle_xor(total, distance)
    start = [x.to_float() * -1.5 for x in at.per_head(total)]
    return operands[: shape.lane_heads], start, at.per_head(top)


def _pack_bytes(m: Any, four: list) -> Any:
    """The low bytes of four integers in one word."""
    return m.gather_bytes(
        m.gather_bytes(four[0], four[1], 0x0040), m.gather_bytes(four[2], four[3], 0x0040), 0x5410
    )


def _history(at: _Place) -> None:
    """Attention of this block's share of the INT2 pages, and of the BF16 window pages that its warps take."""
    m, shape, refs = at.m, at.shape, at.refs
    head_dim, parts, stages, stage = shape.head_dim, shape.head_dim // 64, shape.stages, shape.stage_bytes
    heads = range(shape.lane_heads)
    value_offset, scale_offset = 16 * head_dim, 32 * head_dim  # bytes inside a stage

    # ---- this warp's pages. A sequence may be cut inside its last page: tokens past its end do not count.
    stored = (at.length - shape.sink_pages * PAGE).max(0)
    pages = at.history_pages.min((stored + (PAGE - 1)) >> 6)
    first, end = (_first_page(shape, pages, at.worker + n) for n in (0, 1))
    table = m.pointer(refs["page_table"]).at(at.sequence * shape.table_pages, 4)

    def physical_pages(index):  # lane n: the page of index + n; means nothing past the end
        return m.load_global(table.at((index + m.lane).min(shape.table_pages - 1), 4))[0]

    batch = shape.mean_pages
    first_pages = physical_pages(first)
    started = _start_rotation(at) if shape.transforms else None

    # ---- copies: one lane asks for the four arrays of a page, and a barrier counts their bytes
    ring = m.shared_base + m.warp * (stages * stage)
    barriers = m.shared_base + shape.barrier_offset + m.warp * (8 * stages)
    pieces, offset = [], 0  # (this head of page 0, bytes of a head, offset in a stage)
    for name, size in (
        ("key_codes", 16 * head_dim),
        ("value_codes", 16 * head_dim),
        ("key_scale", 2 * PAGE),
        ("value_scale", 2 * PAGE),
    ):
        pieces.append((m.pointer(refs[name]).at(at.head, size), size, offset))
        offset += size

    def start_barriers():
        for n in range(stages):
            m.start_barrier(barriers, 8 * n)
        m.publish_barriers()

    m.when(m.one_lane(), start_barriers)
    m.sync_warp()

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
    key_operands, start, top = _rotated_query(at, _rotate_query(at, started) if started else None)
    mean_operands = _dense_query(at)
    score_unit = [t * (shape.scale * _LOG2E / _FIXED_MAX) for t in top]  # of the integer sums, base 2
    mean_unit = [t.reciprocal() * _FIXED_MAX for t in top]  # of q . mean, in units of the integer sums

    if shape.window_slots:
        windows = (m.Int(shape.window_slots + shape.workers - 1) - at.worker).udiv(shape.workers)
        m.loop(windows, [at.worker], lambda carry: [_window_page(at, carry[0]) + shape.workers])

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

    def unpack_state(carry):
        """maximum (in units of the integer sums), sum of P, sum of P * scale per lane head; outputs."""
        maximum, total, weighted = (list(carry[i * n_heads : (i + 1) * n_heads]) for i in range(3))
        return maximum, total, weighted, list(carry[3 * n_heads :])

    def next_batch(index, carry):
        """q . mean of the pages from `index` on, [row half][head] in units of the integer sums; the pages."""
        pages_now = carry[-1]
        m.wait_copies(0)
        m.sync_warp()  # the other lanes' copies are there
        sums = _dense_scores(at, load_means(), mean_operands)
        m.sync_warp()  # every lane has read them
        fetch_means(index + batch, pages_now, batch)
        scores = [x * u for h in range(2) for x, u in zip(_lane_scores(at, sums, h), mean_unit)]
        return [*scores, pages_now, physical_pages(index + batch)]

    def scores_and_values(slot, value_slot, mean_score, right, factor, acc):
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
            acc = add_values(values, right, factor, acc, range(pair * tiles // 4, (pair + 1) * tiles // 4))
        score = []
        for r in range(8):
            shift = [key_scale[r].fma(x, y) for x, y in zip(start, mean_score)]
            score.append([whole[r].to_float().fma(key_scale[r], y) for whole, y in zip(sums_of_rows, shift)])
        return score, acc

    def add_values(values, right, factor, acc, some_tiles):
        """acc + factor * (P @ V) for 16 channels per tile."""
        acc = list(acc)
        for u in some_tiles:
            left = [frag.unpack_bytes(values[2 * u + h]) for h in range(2)]
            sums = [[m.Int(0)] * 4 for _ in right]
            for s in (0, 2):
                a = [left[0][s], left[1][s], left[0][s + 1], left[1][s + 1]]
                for limb, words in enumerate(right):
                    sums[limb] = m.mma_s8(a, words[s : s + 2], sums[limb], unsigned_a=True, unsigned_b=True)
            for h in range(2):
                for e, x in enumerate(_whole(shape, sums, h)):
                    i = (2 * u + h) * n_heads + e
                    acc[i] = x.to_float().fma(factor[e], acc[i])
        return acc

    limbs, ahead = len(key_operands), stages - 2

    def page_step(carry):
        index, parity, slot, value_slot, free_slot, barrier, previous_barrier, free_barrier = carry[:8]
        batch_state, carry = carry[8 : 10 + 2 * n_heads], carry[10 + 2 * n_heads :]
        right = [carry[4 * limb : 4 * limb + 4] for limb in range(limbs)]
        factor, state = carry[4 * limbs : 4 * limbs + n_heads], carry[4 * limbs + n_heads :]
        m.wait_barrier(barrier, parity)
        m.sync_warp()  # every lane has read what `free_slot` held
        row = (index - first) & (batch - 1)
        batch_state = m.branch(row.eq(0), batch_state, lambda carry: next_batch(index, carry))
        page = m.shuffle(batch_state[-2], row + ahead)
        fetch_where((index + ahead).lt(end) & index.ge(first + 2), free_slot, free_barrier, page)
        lower, lane = row.lt(8), (row & 7) * 4 + at.c
        mean_score = [m.select(lower, batch_state[e], batch_state[n_heads + e]) for e in heads]
        mean_score = [m.shuffle(x, lane) for x in mean_score]

        maximum, total, weighted, acc = unpack_state(state)
        score, acc = scores_and_values(slot, value_slot, mean_score, right, factor, acc)

        # Online softmax. The branch is taken by the whole warp, and rarely: a score far above the maximum,
        # or a page that is not full.
        def probabilities(score, maximum):  # -> P [r][head] and its sums over r
            minus = [x * u * -1.0 for x, u in zip(maximum, score_unit)]
            p = [[x.fma(u, y).exp2() for x, u, y in zip(row, score_unit, minus)] for row in score]
            return p, [functools.reduce(lambda a, b: a + b, [row[e] for row in p]) for e in heads]

        def rescale(carry):
            maximum, total, weighted, acc = unpack_state(carry[9 * n_heads :])
            keep = [frag.score_token(at.g, r).lt(left_in_page) for r in range(8)]
            kept = [[m.select(k, x, m.Float(_EMPTY)) for x in row] for k, row in zip(keep, score)]
            new_maximum = []
            for e in heads:
                top = functools.reduce(lambda a, b: a.max(b), [row[e] for row in kept])
                for distance in (4, 8, 16):
                    top = top.max(m.shuffle_xor(top, distance))
                new_maximum.append(maximum[e].max(top))
            alpha = [((x - y) * u).exp2() for x, y, u in zip(maximum, new_maximum, score_unit)]
            total = [x * a for x, a in zip(total, alpha)]
            weighted = [x * a for x, a in zip(weighted, alpha)]
            acc = [x * alpha[i % n_heads] for i, x in enumerate(acc)]
            p, sums = probabilities(kept, new_maximum)
            return [*(x for row in p for x in row), *sums, *new_maximum, *total, *weighted, *acc]

        p, sums = probabilities(score, maximum)
        left_in_page = stored - index * PAGE
        slow = left_in_page.lt(PAGE)
        for x in sums:
            slow = slow | x.gt(_SLACK)
        flat = [*(x for row in p for x in row), *sums, *maximum, *total, *weighted, *acc]
        flat = m.branch(m.any_lane(slow), flat, rescale)
        p = [flat[r * n_heads : (r + 1) * n_heads] for r in range(8)]
        maximum, total, weighted, acc = unpack_state(flat[9 * n_heads :])
        total = [x + y for x, y in zip(total, flat[8 * n_heads :])]

        # P * scale as a fraction of the page's largest, in fixed point, is the right operand of P @ V.
        value_scale = load_scales(slot, 2 * PAGE)
        p = [[x * scale for x in row] for row, scale in zip(p, value_scale)]
        fixed, factor = [], []
        for e in heads:
            column = [row[e] for row in p]
            weighted[e] = weighted[e] + functools.reduce(lambda a, b: a + b, column)
            # No P is negative, so they compare as integers.
            largest = functools.reduce(lambda a, b: a.max(b), [x.as_int() for x in column])
            for distance in (4, 8, 16):
                largest = largest.max(m.shuffle_xor(largest, distance))
            top = largest.as_float().max(_TINY)
            steps = top.reciprocal() * _FRACTION_MAX
            weights = [steps * (1 / w) for w in frag.BYTE_WEIGHTS]
            fixed.append([x.fma(weights[r & 3], _WHOLE).as_int() for r, x in enumerate(column)])
            factor.append(top * (1 / _FRACTION_MAX))
        right = _value_operands(m, fixed)

        last = slot.eq(ring + (stages - 1) * stage)
        return [
            *(index + 1, parity ^ last.to_int()),
            *(m.select(last, ring, slot + stage), slot, value_slot),
            *(m.select(last, barriers, barrier + 8), barrier, previous_barrier),
            *batch_state,
            *(*(x for words in right for x in words), *factor, *maximum, *total, *weighted, *acc),
        ]

    # Before the first page P is zero; the first stage, which has arrived by then, stands in for the values.
    # Afterwards one stage holds the page whose values are still to be summed, one the page whose scores are
    # computed; `ahead` are on their way.
    zero = m.Float(0.0)
    init = [first, m.Int(0), *(ring + n * stage for n in (0, 0, ahead))]
    init += [barriers + 8 * n for n in (0, 0, ahead)]
    init += [*[zero] * (2 * n_heads), first_pages, first_pages]
    init += [*[m.Int(0)] * (4 * limbs), *[zero] * n_heads]
    init += [*[m.Float(_EMPTY)] * n_heads, *[zero] * ((2 + 2 * tiles) * n_heads)]
    carry = m.loop((end - first).max(0), init, page_step)
    value_slot, carry = carry[3], carry[10 + 2 * n_heads :]
    right = [carry[4 * limb : 4 * limb + 4] for limb in range(limbs)]
    factor, state = carry[4 * limbs : 4 * limbs + n_heads], carry[4 * limbs + n_heads :]
    maximum, total, weighted, acc = unpack_state(state)
    acc = add_values(load_values(value_slot), right, factor, acc, range(tiles))

    total, weighted = _sum_rows(m, total), _sum_rows(m, weighted)

    def output(u, h, e):
        return 16 * u + 8 * h + at.g, weighted[e].fma(-1.5, acc[(2 * u + h) * n_heads + e])

    _merge_warps(at, [x * u for x, u in zip(maximum, score_unit)], total, output)


def _whole(shape: DecodeShape, sums: list[list], half: int) -> list:
    """Per lane head high * 256 + low of row g (half 0) or g + 8 (half 1) of integer accumulator tiles."""
    if shape.paired:
        return [(sums[0][2 * half] << 8) + sums[0][2 * half + 1]]
    return [(high << 8) + low for high, low in zip(*(tile[2 * half : 2 * half + 2] for tile in sums))]


def _value_operands(m: Any, fixed: list[list]) -> list[list]:
    """16-bit P [head][r] of tokens 8g + r as unsigned right operands of P @ V: one list of 4 words, or two.

    Rows r and r + 4 become neighbouring bytes, so that after the transpose a word holds what the four bytes
    of a value word's register r meet; high bytes go to even columns when paired, else to the first operand.
    """
    # bytes: high of r, high of r + 4, low of r, low of r + 4
    words = [[m.gather_bytes(p[r], p[r + 4], 0x4051) for r in range(4)] for p in fixed]
    if len(words) == 2:
        words = [[m.gather_bytes(*two, pick) for two in zip(*words)] for pick in (0x5410, 0x7632)]
    return [[m.transpose_8x8(w) for w in four] for four in words]


def _first_page(shape: DecodeShape, pages: Any, worker: Any) -> Any:
    """The first INT2 page of a worker; window pages go round among them, and count as several pages."""
    load = pages + shape.window_slots * shape.window_pages
    each, rest = divmod(shape.window_slots, shape.workers)
    windows = worker * each + worker.min(rest)  # of the workers before
    return ((worker * load).udiv(shape.workers) - windows * shape.window_pages).max(0).min(pages)


def _sum_rows(m: Any, xs: list) -> list:
    """Sums over the eight rows g; every lane of a column gets the sum."""
    for distance in (4, 8, 16):
        xs = [x + m.shuffle_xor(x, distance) for x in xs]
    return xs


def _window_page(at: _Place, slot: Any) -> Any:
    """Attention over the BF16 window page in `slot`, stored as a partial result of its own; returns slot."""
    m, shape, refs = at.m, at.shape, at.refs
    head_dim, blocks = shape.head_dim, shape.head_dim // 32
    heads = range(shape.lane_heads)
    unit = shape.scale * _LOG2E
    ring_slots = shape.window_slots - shape.sink_pages
    operands = _dense_query(at)
    row_bytes = 2 * head_dim
    page = at.scalar("window_table", at.sequence * shape.window_slots + slot)
    # Slot of the ring -> page of the sequence: the ring starts where the INT2 pages end.
    turn = slot + (ring_slots - shape.sink_pages) + ring_slots - at.history_pages.umod(ring_slots)
    recent = at.history_pages + turn.umod(ring_slots) + shape.sink_pages
    token_page = m.select(slot.lt(shape.sink_pages), slot, recent)
    valid = at.length - token_page * PAGE  # rows of this page that are stored
    keys, values = (
        m.pointer(refs[name])
        .at(at.head, PAGE * row_bytes)
        .at(page, shape.heads * PAGE * row_bytes)
        .at(at.c, 16)
        for name in ("window_key", "window_value")
    )

    # 8 channels of every 32-channel block of token 8g + r. Rows past the end may hold anything: zeros.
    def row(base, r):
        token = frag.score_token(at.g, r)
        words = [m.load_global(base.at(token, row_bytes), 4, 64 * n) for n in range(blocks)]
        inside = token.lt(valid)
        return [[m.select(inside, w, m.Int(0)) for w in four] for four in words]

    score = []
    for pair in range(4):
        rows = [row(keys, 2 * pair + h) for h in range(2)]
        left = [
            [rows[0][n][i], rows[1][n][i], rows[0][n][i + 1], rows[1][n][i + 1]]
            for n in range(blocks)
            for i in (0, 2)
        ]
        tile = _dense_scores(at, left, operands)
        score += [[x * unit for x in _lane_scores(at, tile, h)] for h in range(2)]
    inside = [frag.score_token(at.g, r).lt(valid) for r in range(8)]
    score = [[m.select(inside[r], x, m.Float(_EMPTY)) for x in score[r]] for r in range(8)]
    maximum = [functools.reduce(lambda a, b: a.max(b), [row[e] for row in score]) for e in heads]
    for distance in (4, 8, 16):
        maximum = [x.max(m.shuffle_xor(x, distance)) for x in maximum]
    total, right = [m.Float(0.0)] * len(heads), []
    for r in range(8):
        p = [m.select(inside[r], (score[r][e] - maximum[e]).exp2(), m.Float(0.0)) for e in heads]
        total = [x + y for x, y in zip(total, p)]
        if shape.paired:  # the odd column carries what bf16 cut off P
            word = m.pack_bfloat16(p[0], m.Float(0.0))
            word = m.pack_bfloat16(p[0], p[0] - (word << 16).as_float())
        else:
            word = m.pack_bfloat16(*p)
        right.append(m.transpose_8x8(word))
    total = _sum_rows(m, total)
    some = [x.gt(0.0) for x in total]
    inverse = [m.select(s, x.max(_TINY).reciprocal(), m.Float(0.0)) for s, x in zip(some, total)]

    # Row of the query and byte offset of a partial result, per lane head; heads past the group store nothing.
    first_head = at.c if shape.paired else at.c * 2
    rows = [at.tile * shape.columns + first_head + e for e in heads]
    places = [(at.sequence_head * shape.group + row) * shape.partials + slot for row in rows]
    out, lse = m.pointer(refs["out"]), m.pointer(refs["lse"])
    for n in range(blocks):
        columns = [_value_block(m, at, values, valid, row_bytes, r, n) for r in range(8)]
        for half in range(2):
            tile = [m.Float(0.0)] * 4
            for s in (0, 2, 4, 6):
                a = [columns[s + k][2 * half + w] for k in range(2) for w in range(2)]
                tile = m.mma_f16(a, right[s : s + 2], tile, bfloat16=True)
            for e, h in itertools.product(heads, range(2)):
                value = tile[2 * h] + tile[2 * h + 1] if shape.paired else tile[2 * h + e]
                channel = frag.dense_value_channel(n, at.g, 2 * half + h)
                target = out.at(places[e], 4 * head_dim).at(channel, 4)
                word = (value * inverse[e]).as_int()
                m.when(rows[e].lt(shape.group), lambda t=target, w=word: m.store_global(t, [w]))
    for e in heads:
        value = m.select(some[e], maximum[e] + total[e].max(_TINY).log2(), m.Float(-math.inf))
        target = lse.at(places[e], 4)
        mine = rows[e].lt(shape.group) & at.g.eq(0)
        m.when(mine, lambda t=target, v=value: m.store_global(t, [v.as_int()]))
    return slot


def _value_block(m: Any, at: _Place, values: Any, valid: Any, row_bytes: int, r: int, block: int) -> list:
    """Transposed value rows 8g + r of one 32-channel block: word w has channel dense_value_channel(...)."""
    token = frag.score_token(at.g, r)
    words = m.load_global(values.at(token, row_bytes), 4, 64 * block)
    inside = token.lt(valid)
    return [m.transpose_8x8(m.select(inside, w, m.Int(0))) for w in words]


def _merge_warps(at: _Place, maximum: list, total: list, output: Any) -> None:
    """Merges the warps of a block through shared memory; stores the partial output and log-sum-exp.

    maximum (base 2) and total per lane head; output(u, h, e) -> (channel, unnormalized value).
    """
    m, shape = at.m, at.shape
    head_dim = shape.head_dim
    # Bytes of one [warp][head] table: maxima, then sums, then outputs [warp][head][channel].
    sums = 4 * 8 * shape.warps
    m.sync_block()  # the stages are free now
    lane_head = [at.c] if shape.paired else [at.c * 2, at.c * 2 + 1]

    def store_statistics():
        for e, h in enumerate(lane_head):
            address = m.shared_base + (m.warp * 8 + h) * 4
            m.store_shared(address, [maximum[e].as_int()])
            m.store_shared(address, [total[e].as_int()], sums)

    m.when(at.g.eq(0), store_statistics)
    m.sync_block()

    def statistics(h, offset):
        address = m.shared_base + h * 4
        return [m.load_shared(address, 1, offset + 32 * w)[0].as_float() for w in range(shape.warps)]

    for e, h in enumerate(lane_head):
        top = functools.reduce(lambda a, b: a.max(b), statistics(h, 0))
        factor = (maximum[e] - top).exp2()
        base = m.shared_base + (m.warp * shape.columns + h) * (head_dim * 4)
        for u in range(head_dim // 16):
            for half in range(2):
                channel, value = output(u, half, e)
                m.store_shared(base + channel * 4, [(value * factor).as_int()], 2 * sums)
    m.sync_block()
    rows = m.pointer(at.refs["out"]), m.pointer(at.refs["lse"])
    threads, outputs = shape.warps * WARP_LANES, shape.columns * head_dim
    for n in range(-(-outputs // threads)):
        flat = m.thread + n * threads
        inside = flat.lt(outputs)  # the last round may have more threads than outputs
        flat = flat.min(outputs - 1)
        h, channel = flat.udiv(head_dim), flat.umod(head_dim)
        tops, totals = statistics(h, 0), statistics(h, sums)
        top = functools.reduce(lambda a, b: a.max(b), tops)
        weight = m.Float(0.0)
        for t, x in zip(tops, totals):
            weight = (t - top).exp2().fma(x, weight)
        value = m.Float(0.0)
        for w in range(shape.warps):
            word = m.load_shared(m.shared_base + flat * 4, 1, 2 * sums + 4 * w * shape.columns * head_dim)
            value = value + word[0].as_float()
        some = weight.gt(0.0)
        value = m.select(some, value * weight.max(_TINY).reciprocal(), m.Float(0.0))
        lse = m.select(some, top + weight.max(_TINY).log2(), m.Float(-math.inf))
        row = at.tile * shape.columns + h
        index = (at.sequence_head * shape.group + row) * shape.partials + at.partial

        def store(index=index, channel=channel, value=value):
            m.store_global(rows[0].at(index, 4 * head_dim).at(channel * 4), [value.as_int()])

        def store_lse(index=index, lse=lse):
            m.store_global(rows[1].at(index, 4), [lse.as_int()])

        inside = inside & row.lt(shape.group)
        m.when(inside, store)
        m.when(inside & channel.eq(0), store_lse)


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
    from .registers import compiled_kernel

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
    query: jax.Array, cache: Any, *, scale: float, transforms: int, windows: bool, splits: int | None = None
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
    plan = decode_plan(batch * heads * tiles, table_pages, head_dim, group <= 4)
    return DecodeShape(
        batch=batch,
        heads=heads,
        group=group,
        head_dim=head_dim,
        table_pages=table_pages,
        scale=float(scale),
        query_bfloat16=query.dtype == jnp.bfloat16,
        splits=splits or plan.splits,
        stages=plan.stages,
        warps=plan.warps,
        mean_pages=plan.mean_pages,
        transforms=transforms,
        sink_pages=cache.config.sink_pages,
        window_slots=cache.config.window_slots if windows else 0,
        window_pages=plan.window_pages if windows else 0,
    )


def decode_partials(
    rotation_input: jax.Array, query: jax.Array, cache: Any, shape: DecodeShape
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel: partial outputs float32 [B, K, G, S, D] and their base-2 log-sum-exp [B, K, G, S].

    query float32 or bf16 [B, K, G, D]; rotation_input is query_transform float32 [shape.transforms, D, D],
    or, where that is 0, the rotated query float32 [B, K, G, D]. The first window_slots partials are the BF16
    pages, if they are read; the others are in the rotated value basis without value_mean.
    """
    arrays = [getattr(cache, name) for name in _CACHE_ARRAYS]
    return _decode_kernel(shape)(rotation_input, query, *arrays)


def decode_history(
    query_rotated: jax.Array, query: jax.Array, cache: Any, *, scale: float, splits: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries [B, K, G, D] over the INT2 pages alone, in the rotated value basis.

    Returns out float32 [B, K, G, D] = sum(p * scale * (code - 1.5)) / sum(p) and the natural log-sum-exp of
    the scores, float32 [B, K, G], -inf where a sequence has no INT2 page. Any number of query rows G: they
    are served in tiles of eight. Raises NotImplementedError.
    """
    shape = decode_shape(query, cache, scale=scale, transforms=0, windows=False, splits=splits)
    out, lse = decode_partials(query_rotated, query, cache, shape)
    top = lse.max(-1)
    weight = jnp.exp2(lse - jnp.where(jnp.isfinite(top), top, 0.0)[..., None])
    total = weight.sum(-1)
    total = jnp.where(total > 0, total, 1.0)
    out = jnp.einsum("bkgsd,bkgs->bkgd", out, weight / total[..., None], precision=lax.Precision.HIGHEST)
    return out, jnp.where(jnp.isfinite(top), (top + jnp.log2(total)) / _LOG2E, -jnp.inf)


def decode_attention(
    query: jax.Array,
    cache: Any,
    rotation: Any,
    *,
    scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    splits: int | None = None,
) -> jax.Array:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; the twin of `attention.decode_attention`. Raises ShapeError, or
    NotImplementedError for a shape that the kernel does not serve.
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
    shape = decode_shape(grouped, cache, scale=scale, transforms=transforms, windows=True, splits=splits)
    first = transform if transforms else rotate_few_queries(grouped, rotation)
    partials = decode_partials(first, grouped, cache, shape)
    return merge_partials(*partials, rotation, windows=shape.window_slots, sink_logits=sink_logits).reshape(
        query.shape
    )


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
