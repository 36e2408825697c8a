"""One-token attention over INT2 pages for Hopper GPUs (Mosaic GPU): flash decoding with codes in registers.

Every warp is its own flash decoder: it walks whole pages of 64 tokens through a private ring of
shared-memory stages (bulk copies that report to one barrier per stage), keeps an online softmax in registers,
and never meets a block barrier inside the loop. The warps of a block merge once, at the end; blocks write
partial outputs and their log-sum-exp, and a second launch (`decode/merge.py`) makes outputs of them. The
BF16 window pages (sink and recent), whole or in parts, are dealt out to the warps as well, which then get
fewer INT2 pages; what a warp makes of them is a partial result of its own. While the first pages are on their
way, the block rotates its query.

The two products of a page run on warp-level 8-bit matrix instructions with the codes as left operand; see
`fragments.py` for the mapping. Scores: the rotated query becomes a fixed-point vector of 15 bits, split into
two signed bytes, so that `u8 x s8 -> s32` sums are exact and the grid's offset of 1.5 is an integer that
starts the sum. With at most 4 query heads per key/value head the two bytes fill the 8 columns of one product
(column 2h + limb); with more heads they are two products. Larger groups are split into tiles of 8 heads.
Values: with at most 4 heads, P times the row's scale becomes a fixed-point fraction of the page's largest, of
16 bits in two unsigned bytes, and a page's exact sums are added to the float32 outputs; with more heads it is
a float16 number and the codes are subnormal ones. q . (mean key of a page) is one bf16 product for a batch of
pages, one page per row.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...core import cache_format as fmt
from ...core.errors import ShapeError
from ..machine import fragments as frag
from ..machine.tuning import decode_plan
from .merge import merge_partials, rotate_few_queries

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
# P in float16 is used as it is, so there the sum of P * scale counts; a scale of 0 must not hide a huge P.
_HALF_MAX, _HALF_SLACK = 60000.0, 2.0**60
_FRACTION_MAX = 65000.0  # largest fixed-point P * scale; a page's sum of 64 with code 3 is below 2**24
_WHOLE = 2.0**23  # added to a float, leaves its nearest integer in the low bits
_SIGNED, _SIGNED_BITS = 1.5 * 2.0**23, 0x4B400000  # likewise where it may be negative
_WINDOW_STEPS = 4  # over a window page, of 16 tokens each: what one product takes
_ROTATE_STEP = 64  # entries of its matrix column that a thread loads at once


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Everything that is fixed when the decode kernel is built."""

    batch: int
    heads: int  # key/value heads K
    group: int  # query rows per key/value head
    head_dim: int
    table_pages: int  # columns of the page table
    softmax_scale: float  # multiplies the scores
    query_bfloat16: bool
    splits: int  # blocks per sequence and head that share the INT2 pages
    stages: int  # pages in flight per warp
    warps: int  # of a block, a multiple of 4; more warps leave each of them fewer registers
    mean_pages: int  # pages whose mean keys meet the query in one product, a power of two up to 16
    transforms: int  # leading axis of query_transform (1: shared, or K); 0: the queries come rotated
    sink_pages: int = 0
    window_slots: int = 0  # 0: only INT2 pages
    window_parts: int = 1  # of a window page, 1, 2 or 4, that go round among the warps
    window_pages: int = 0  # INT2 pages that a warp is spared for every part of a window page that it reads

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
    def workers(self) -> int:
        """Warps that share a sequence and head."""
        return self.splits * self.warps

    @property
    def all_parts(self) -> int:
        return self.window_slots * self.window_parts

    @property
    def windows(self) -> int:
        """Partial results per query row that come from BF16 pages: one per warp that reads some."""
        return min(self.workers, self.all_parts)

    @property
    def partials(self) -> int:
        """Partial results per query row: those of the windows, then one per split."""
        return self.windows + self.splits

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
    def merge_row_bytes(self) -> int:
        """Bytes of a warp's output for one head, so that lanes that store together meet different banks."""
        return 4 * self.head_dim + 32 // self.lane_heads

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
        merge = (2 * self.warps + 1) * 8 * 4 + self.warps * self.columns * self.merge_row_bytes
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
        self.partial = split + shape.windows
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
    if shape.transforms:  # _rotate_query has left the rows, float32
        row = m.shared_base + shape.query_offset + at.row_in_tile * (4 * shape.head_dim) + at.c * 32
        load = functools.partial(m.load_shared, row, 4)
    else:
        size = 2 if shape.query_bfloat16 else 4
        row = m.pointer(at.refs["query"]).at(at.query_row, shape.head_dim * size).at(at.c, 8 * size)
        load = functools.partial(m.load_global, row, 4)
    for block in range(shape.head_dim // 32):
        low = [m.Int(0)] * 4
        if shape.query_bfloat16 and not shape.transforms:
            high = load(64 * block)
        else:
            x = [w.as_float() for i in range(2) for w in load(128 * block + 16 * i)]
            high = [m.pack_bfloat16(x[2 * i], x[2 * i + 1]) for i in range(4)]
        if not shape.query_bfloat16:
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
    scaled = {weight: steps * (1 / weight) for weight in frag.BYTE_WEIGHTS}
    total = m.Int(0)
    # Of a 16-bit number v the signed bytes are the low byte of v and the high byte of v + 128.
    high, low = (m.Int(128), m.Int(0x0051)), (m.Int(0), m.Int(0x0040))
    limbs = [[m.select(at.low_limb, *x) for x in zip(low, high)]] if shape.paired else [high, low]
    operands: list[list] = [[] for _ in limbs]
    for j in range(parts):
        for register, weight in enumerate(frag.BYTE_WEIGHTS):
            # Byte b of this register meets channel frag.byte_channel(parts, j, c, register, b).
            four = [entries[j][register + 4 * b].fma(scaled[weight], _SIGNED).as_int() for b in range(4)]
            total = total + (four[0] + four[1] + four[2] + four[3]) * weight
            for operand, (addend, pick) in zip(operands, limbs):
                v = [x + addend for x in four]
                pairs = [m.gather_bytes(*v[i : i + 2], pick) for i in (0, 2)]
                operand.append(m.gather_bytes(*pairs, 0x5410))
    total = total - parts * 4 * sum(frag.BYTE_WEIGHTS) * _SIGNED_BITS
    for distance in (1, 2):
        total = total + m.shuffle_xor(total, distance)
    start = [x.to_float() * -1.5 for x in at.per_head(total)]
    return operands, start, at.per_head(top)


def _history(at: _Place) -> None:
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
    started = _start_rotation(at) if shape.transforms else None
    barriers = m.shared_base + shape.barrier_offset + m.warp * (8 * stages)

    def start_barriers():
        for n in range(stages):
            m.start_barrier(barriers, 8 * n)
        m.publish_barriers()

    m.when(m.one_lane(), start_barriers)
    m.sync_warp()
    window = _WindowRows(at, m.Int(0)) if shape.windows else None

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
    key_operands, start, top = _rotated_query(at, _rotate_query(at, started) if started else None)
    score_unit = [t * (shape.softmax_scale * _LOG2E / _FIXED_MAX) for t in top]  # of the integer sums, base 2
    mean_unit = [t.reciprocal() * _FIXED_MAX for t in top]  # of q . mean, in units of the integer sums

    if window:
        parts_here = (m.Int(shape.all_parts + shape.workers - 1) - at.worker).udiv(shape.workers)
        steps = parts_here * (_WINDOW_STEPS // shape.window_parts)
        m.when(at.worker.lt(shape.windows), lambda: _windows(at, steps))

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
    product = _BytesTimesValues(m) if shape.paired else _HalvesTimesValues(m)

    def unpack_state(carry):
        """maximum (in units of the integer sums), sum of P, sum of P * scale per lane head; outputs."""
        maximum, total, weighted = (list(carry[i * n_heads : (i + 1) * n_heads]) for i in range(3))
        return maximum, total, weighted, list(carry[3 * n_heads :])

    def next_batch(index, carry):
        """q . mean of the pages from `index` on, [row half][head] in units of the integer sums; the pages."""
        pages_now = carry[-1]
        m.wait_copies(0)
        m.sync_warp()  # the other lanes' copies are there
        sums = _dense_scores(at, load_means(), _dense_query(at))
        m.sync_warp()  # every lane has read them
        fetch_means(index + batch, pages_now, batch)
        scores = [x * u for h in range(2) for x, u in zip(_lane_scores(at, sums, h), mean_unit)]
        return [*scores, pages_now, physical_pages(index + batch)]

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
        index, parity, slot, value_slot, free_slot, barrier, previous_barrier, free_barrier = carry[:8]
        batch_state, carry = carry[8 : 10 + 2 * n_heads], carry[10 + 2 * n_heads :]
        weights, state = carry[: product.registers], carry[product.registers :]
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
        score, acc = scores_and_values(slot, value_slot, mean_score, weights, acc)

        # Online softmax. The branch is taken by the whole warp, and rarely: a score far above the maximum,
        # or a page that is not full.
        value_scale = product.scales(load_scales(slot, 2 * PAGE))

        def probabilities(score, maximum):  # -> P * value_scale [r][head], sums over r of P * scale and of P
            minus = [x * u * -1.0 for x, u in zip(maximum, score_unit)]
            p = [[x.fma(u, y).exp2() for x, u, y in zip(row, score_unit, minus)] for row in score]
            rows = [[x * scale for x in row] for row, scale in zip(p, value_scale)]
            return rows, product.sums(rows), _sums(p)

        def rescale(carry):
            maximum, total, weighted, acc = unpack_state(carry[10 * n_heads :])
            keep = [frag.score_token(at.g, r).lt(left_in_page) for r in range(8)]
            kept = [[m.select(k, x, m.Float(_EMPTY)) for x in row] for k, row in zip(keep, score)]
            new_maximum = []
            for e in heads:
                top = functools.reduce(lambda a, b: a.max(b), [row[e] for row in kept])
                for distance in (4, 8, 16):
                    top = top.max(m.shuffle_xor(top, distance))
                top = product.reference([row[e] for row in kept], value_scale, top, score_unit[e])
                new_maximum.append(maximum[e].max(top))
            alpha = [((x - y) * u).exp2() for x, y, u in zip(maximum, new_maximum, score_unit)]
            total = [x * a for x, a in zip(total, alpha)]
            weighted = [x * a for x, a in zip(weighted, alpha)]
            acc = [x * alpha[i % n_heads] for i, x in enumerate(acc)]
            rows, sums, p_sums = probabilities(kept, new_maximum)
            return [*(x for row in rows for x in row), *sums, *p_sums, *new_maximum, *total, *weighted, *acc]

        rows, sums, p_sums = probabilities(score, maximum)
        left_in_page = stored - index * PAGE
        slow = functools.reduce(lambda a, b: a | b, product.beyond(p_sums, sums), left_in_page.lt(PAGE))
        flat = [*(x for row in rows for x in row), *sums, *p_sums, *maximum, *total, *weighted, *acc]
        flat = m.branch(m.any_lane(slow), flat, rescale)
        rows = [flat[r * n_heads : (r + 1) * n_heads] for r in range(8)]
        maximum, total, weighted, acc = unpack_state(flat[10 * n_heads :])
        weighted = [x + y for x, y in zip(weighted, flat[8 * n_heads :])]
        total = [x + y for x, y in zip(total, flat[9 * n_heads :])]

        last = slot.eq(ring + (stages - 1) * stage)
        return [
            *(index + 1, parity ^ last.to_int()),
            *(m.select(last, ring, slot + stage), slot, value_slot),
            *(m.select(last, barriers, barrier + 8), barrier, previous_barrier),
            *batch_state,
            *(*product.weights(rows), *maximum, *total, *weighted, *acc),
        ]

    # Before the first page P is zero; the first stage, which has arrived by then, stands in for the values.
    # Afterwards one stage holds the page whose values are still to be summed, one the page whose scores are
    # computed; `ahead` are on their way.
    zero = m.Float(0.0)
    init = [first, m.Int(0), *(ring + n * stage for n in (0, 0, ahead))]
    init += [barriers + 8 * n for n in (0, 0, ahead)]
    init += [*[zero] * (2 * n_heads), first_pages, first_pages]
    init += product.nothing()
    init += [*[m.Float(_EMPTY)] * n_heads, *[zero] * ((2 + 2 * tiles) * n_heads)]
    carry = m.loop((end - first).max(0), init, page_step)
    value_slot, carry = carry[3], carry[10 + 2 * n_heads :]
    weights, state = carry[: product.registers], carry[product.registers :]
    maximum, total, weighted, acc = unpack_state(state)
    acc = product.add(acc, weights, load_values(value_slot), range(tiles))

    total, weighted = _sum_rows(m, total), _sum_rows(m, weighted)

    def output(u, h, e):
        value = acc[(2 * u + h) * n_heads + e] * product.unit
        return 16 * u + 8 * h + at.g, weighted[e].fma(-1.5, value)

    _merge_warps(at, [x * u for x, u in zip(maximum, score_unit)], total, output)


def _sums(rows: list[list]) -> list:
    """Per lane head the sum over the rows [r][head]."""
    return [functools.reduce(lambda a, b: a + b, column) for column in zip(*rows)]


class _BytesTimesValues:
    """P @ V of a page in 8-bit products, for at most four query heads per tile.

    P times the row's scale becomes a fixed-point fraction of the page's largest, whose two bytes lie in
    neighbouring columns; the page's exact integer sums, times a factor, are added to the outputs.
    """

    registers = 5  # from one page to the next: the right operand, the factor
    unit = 1.0  # of the outputs

    def __init__(self, m: Any):
        self.m = m

    def nothing(self) -> list:
        return [*[self.m.Int(0)] * 4, self.m.Float(0.0)]

    def scales(self, scale: list) -> list:
        """What P of row r is multiplied with."""
        return scale

    def sums(self, rows: list[list]) -> list:
        """Per lane head the sum of P * scale."""
        return _sums(rows)

    def beyond(self, p_sums: list, sums: list) -> list:
        """Whether the maximum must move, by a lane's sums of P and of P * scale of a page."""
        return [x.gt(_SLACK) for x in p_sums]

    def reference(self, score: list, scale: list, top: Any, unit: Any) -> Any:
        """The score whose P is to be 1, where `top` is the page's largest."""
        return top

    def weights(self, rows: list[list]) -> list:
        """What meets the values of a page, [r] of tokens 8g + r."""
        m, column = self.m, [row[0] for row in rows]
        # No P is negative, so they compare as integers.
        largest = functools.reduce(lambda a, b: a.max(b), [x.as_int() for x in column])
        for distance in (4, 8, 16):
            largest = largest.max(m.shuffle_xor(largest, distance))
        top = largest.as_float().max(_TINY)
        steps = top.reciprocal() * _FRACTION_MAX
        steps = [steps * (1 / w) for w in frag.BYTE_WEIGHTS]
        fixed = [x.fma(steps[r & 3], _WHOLE).as_int() for r, x in enumerate(column)]
        # Rows r and r + 4 become neighbouring bytes (high of r, high of r + 4, low of r, low of r + 4), so
        # that after the transpose a word holds what the four bytes of a value word's register r meet.
        words = [m.gather_bytes(fixed[r], fixed[r + 4], 0x4051) for r in range(4)]
        return [*(m.transpose_8x8(w) for w in words), top * (1 / _FRACTION_MAX)]

    def add(self, acc: list, weights: list, values: list, some_tiles: range) -> list:
        """acc + P @ V for 16 channels per tile."""
        acc, factor = list(acc), weights[4]
        for u in some_tiles:
            left = [frag.unpack_bytes(values[2 * u + h]) for h in range(2)]
            sums = [self.m.Int(0)] * 4
            for s in (0, 2):
                a = [left[0][s], left[1][s], left[0][s + 1], left[1][s + 1]]
                sums = self.m.mma_s8(a, weights[s : s + 2], sums, unsigned_a=True, unsigned_b=True)
            for i, (high, low) in enumerate((sums[:2], sums[2:]), 2 * u):
                acc[i] = ((high << 8) + low).to_float().fma(factor, acc[i])
        return acc


class _HalvesTimesValues:
    """P @ V of a page in float16 products, for more than four query heads per tile.

    Two bytes of P for eight heads would be two products, and their sums cost more to add up than float16
    codes cost to unpack. P times the row's scale is at most _HALF_MAX, and the products are added to the
    outputs where they are made.
    """

    registers = 8
    unit = 2.0**24  # codes are subnormal numbers

    def __init__(self, m: Any):
        self.m = m

    def nothing(self) -> list:
        return [self.m.Int(0)] * 8

    def scales(self, scale: list) -> list:
        """What P of row r is multiplied with: the weight of the row's codes is undone."""
        return [x * (1 / w) for x, w in zip(scale, frag.HALF_WEIGHTS)]

    def sums(self, rows: list[list]) -> list:
        """Per lane head the sum of P * scale."""
        total = rows[0]
        for row, w in zip(rows[1:], frag.HALF_WEIGHTS[1:]):
            total = [x.fma(float(w), y) for x, y in zip(row, total)]
        return total

    def beyond(self, p_sums: list, sums: list) -> list:
        """Whether the maximum must move, by a lane's sums of P and of P * scale of a page."""
        return [*(x.gt(_HALF_SLACK) for x in p_sums), *(x.gt(_HALF_MAX) for x in sums)]

    def reference(self, score: list, scale: list, top: Any, unit: Any) -> Any:
        """The score whose P is to be 1, where `top` is the page's largest: P * scale becomes 2**8 at most."""
        m = self.m
        largest = m.Float(2.0**-40)
        for x, y, w in zip(score, scale, frag.HALF_WEIGHTS):
            largest = largest.max(((x - top) * unit).exp2() * (y * float(w)))
        for distance in (4, 8, 16):
            largest = largest.max(m.shuffle_xor(largest, distance))
        return (largest.log2() - 8.0).fma(unit.reciprocal(), top)

    def weights(self, rows: list[list]) -> list:
        """What meets the values of a page, [r] of tokens 8g + r."""
        return [self.m.transpose_8x8(self.m.pack_float16(*row)) for row in rows]

    def add(self, acc: list, weights: list, values: list, some_tiles: range) -> list:
        """acc + P @ V for 16 channels per tile."""
        acc = list(acc)
        for u in some_tiles:
            left = [frag.unpack_halves(values[2 * u + h]) for h in range(2)]
            for s in (0, 2, 4, 6):
                a = [left[0][s], left[1][s], left[0][s + 1], left[1][s + 1]]
                acc[4 * u : 4 * u + 4] = self.m.mma_f16(a, weights[s : s + 2], acc[4 * u : 4 * u + 4])
        return acc


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


def _sum_rows(m: Any, xs: list) -> list:
    """Sums over the eight rows g; every lane of a column gets the sum."""
    for distance in (4, 8, 16):
        xs = [x + m.shuffle_xor(x, distance) for x in xs]
    return xs


class _WindowRows:
    """The rows of one step of this warp over the BF16 windows: 16 consecutive tokens of a page.

    A warp has every workers-th part of a page, and takes four steps per page.
    """

    def __init__(self, at: _Place, step: Any):
        m, shape = at.m, at.shape
        self.at = at
        steps = _WINDOW_STEPS // shape.window_parts  # of a part
        part = at.worker + step.udiv(steps) * shape.workers
        slot = part.udiv(shape.window_parts).min(shape.window_slots - 1)  # past the last part: any
        page = at.scalar("window_table", at.sequence * shape.window_slots + slot)
        # Slot of the ring -> page of the sequence: the ring starts where the INT2 pages end.
        ring_slots = shape.window_slots - shape.sink_pages
        turn = slot + (ring_slots - shape.sink_pages) + ring_slots - at.history_pages.umod(ring_slots)
        recent = at.history_pages + turn.umod(ring_slots) + shape.sink_pages
        token_page = m.select(slot.lt(shape.sink_pages), slot, recent)
        first = (part.umod(shape.window_parts) * steps + step.umod(steps)) * 16
        self.stored = at.length - token_page * PAGE - first  # rows of this step that are stored
        row_bytes = 2 * shape.head_dim
        self.keys, self.values = (
            m.pointer(at.refs[name])
            .at(at.head, PAGE * row_bytes)
            .at(page, shape.heads * PAGE * row_bytes)
            .at(first, row_bytes)
            for name in ("window_key", "window_value")
        )

    def prefetch(self) -> None:
        """Brings the rows into the L2 cache."""
        m, lines = self.at.m, 16 * 2 * self.at.shape.head_dim // 128
        for rows in (self.keys, self.values):
            mine = rows.at(m.lane & (min(lines, WARP_LANES) - 1), 128)
            for line in range(0, lines, WARP_LANES):
                m.prefetch(mine, 128 * line)

    def load_keys(self) -> list:
        """4 words, channels dense_channel(...), of every 32-channel block of rows g and g + 8."""
        m, head_dim, words = self.at.m, self.at.shape.head_dim, []
        rows = self.keys.at(self.at.g, 2 * head_dim).at(self.at.c, 16)
        for half in range(2):
            for block in range(head_dim // 32):
                words += m.load_global(rows, 4, 16 * head_dim * half + 64 * block)
        return words

    def load_values(self) -> list:
        """4 words, channels dense_value_channel(...), of every 64-channel block of rows 2c + (0, 1, 8, 9)."""
        m, head_dim, words = self.at.m, self.at.shape.head_dim, []
        rows = self.values.at(self.at.c, 4 * head_dim).at(self.at.g, 16)
        for row in (0, 1, 8, 9):
            for block in range(head_dim // 64):
                words += m.load_global(rows, 4, 2 * head_dim * row + 128 * block)
        return words


def _windows(at: _Place, steps: Any) -> None:
    """Attention over this warp's rows of the BF16 windows, stored as a partial result of its own.

    The rows of the next step are asked for as soon as those of a step have been used, where they leave
    registers enough for that.
    """
    m, shape, refs = at.m, at.shape, at.refs
    head_dim, n_heads = shape.head_dim, shape.lane_heads
    heads = range(n_heads)
    unit = shape.softmax_scale * _LOG2E
    operands = _dense_query(at)
    count = head_dim // 4  # words of a step that a lane loads, of keys and of values
    ahead = head_dim <= 128

    def unpack_state(carry):
        maximum, total = (list(carry[i * n_heads : (i + 1) * n_heads]) for i in range(2))
        return maximum, total, list(carry[2 * n_heads :])

    def window_step(carry):
        step = carry[0]
        window, following, more = _WindowRows(at, step), _WindowRows(at, step + 1), (step + 1).lt(steps)
        if ahead:
            keys, values = carry[1 : 1 + count], carry[1 + count : 1 + 2 * count]
            m.when((step + 2).lt(steps), lambda: _WindowRows(at, step + 2).prefetch())
        else:
            keys, values = window.load_keys(), window.load_values()
            m.when(more, following.prefetch)
        maximum, total, acc = unpack_state(carry[state:])
        # Words 0, 1 of both rows meet the first 16 channels of a block, words 2, 3 the others.
        a, b = keys[: count // 2], keys[count // 2 :]
        left = [[a[n], b[n], a[n + 1], b[n + 1]] for n in range(0, count // 2, 2)]
        tile = _dense_scores(at, left, operands)
        if ahead:
            keys = m.branch(more, keys, lambda _: following.load_keys())
        inside = [(at.g + 8 * h).lt(window.stored) for h in range(2)]
        # Rows past the end may hold anything.
        score = [
            [m.select(inside[h], x * unit, m.Float(_EMPTY)) for x in _lane_scores(at, tile, h)]
            for h in range(2)
        ]
        top = [score[0][e].max(score[1][e]) for e in heads]
        for distance in (4, 8, 16):
            top = [x.max(m.shuffle_xor(x, distance)) for x in top]
        top = [x.max(y) for x, y in zip(top, maximum)]
        alpha = [(x - y).exp2() for x, y in zip(maximum, top)]
        total = [x * y for x, y in zip(total, alpha)]
        right = []
        for h in range(2):
            p = [m.select(inside[h], (score[h][e] - top[e]).exp2(), m.Float(0.0)) for e in heads]
            total = [x + y for x, y in zip(total, p)]
            if shape.paired:  # the odd column carries what bf16 cut off P
                word = m.pack_bfloat16(p[0], m.Float(0.0))
                word = m.pack_bfloat16(p[0], p[0] - (word << 16).as_float())
            else:
                word = m.pack_bfloat16(*p)
            right.append(m.transpose_8x8(word))
        acc = [x * alpha[i % n_heads] for i, x in enumerate(acc)]
        rows = [values[i * count // 4 : (i + 1) * count // 4] for i in range(4)]
        for row, number in zip(rows, (0, 1, 8, 9)):
            here = (at.c * 2 + number).lt(window.stored)
            row[:] = [m.select(here, w, m.Int(0)) for w in row]
        for n, four in enumerate(zip(*rows)):  # channels 2n, 2n + 1 of two neighbouring tokens, twice
            a = [m.gather_bytes(*four[i : i + 2], pick) for i in (0, 2) for pick in (0x5410, 0x7632)]
            acc[4 * n : 4 * n + 4] = m.mma_f16(a, right, acc[4 * n : 4 * n + 4], bfloat16=True)
        if ahead:
            values = m.branch(more, values, lambda _: following.load_values())
            return [step + 1, *keys, *values, *top, *total, *acc]
        return [step + 1, *top, *total, *acc]

    zero, init = m.Float(0.0), [m.Int(0)]
    if ahead:
        first = _WindowRows(at, m.Int(0))
        init += [*first.load_keys(), *first.load_values()]
    state = len(init)
    init += [*[m.Float(_EMPTY)] * n_heads, *[zero] * (n_heads + head_dim // 4)]
    maximum, total, acc = unpack_state(m.loop(steps, init, window_step)[state:])
    total = _sum_rows(m, total)
    some = [x.gt(0.0) for x in total]
    inverse = [m.select(s, x.max(_TINY).reciprocal(), zero) for s, x in zip(some, total)]

    # Row of the query and byte offset of a partial result, per lane head; heads past the group store nothing.
    first_head = at.c if shape.paired else at.c * 2
    rows = [at.tile * shape.columns + first_head + e for e in heads]
    places = [(at.sequence_head * shape.group + row) * shape.partials + at.worker for row in rows]
    out, lse = m.pointer(refs["out"]), m.pointer(refs["lse"])
    for e in heads:
        words = []
        for n, h in itertools.product(range(head_dim // 16), range(2)):
            pair = acc[4 * n + 2 * h : 4 * n + 2 * h + 2]
            value = pair[0] + pair[1] if shape.paired else pair[e]
            words.append((value * inverse[e]).as_int())
        value = m.select(some[e], maximum[e] + total[e].max(_TINY).log2(), m.Float(-math.inf))
        real = rows[e].lt(shape.group)
        target = out.at(places[e], 4 * head_dim).at(frag.dense_value_channel(0, at.g, 0, 0), 4)

        def store(target=target, words=words):
            for n in range(0, len(words), 4):  # a lane has 8 neighbouring channels of every 64
                m.store_global(target, words[n : n + 4], 4 * (64 * (n // 8) + n % 8))

        m.when(real, store)
        place = lse.at(places[e], 4)
        m.when(real & at.g.eq(0), lambda p=place, v=value: m.store_global(p, [v.as_int()]))


def _merge_warps(at: _Place, maximum: list, total: list, output: Any) -> None:
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
        inverse = m.select(some, weight.max(_TINY).reciprocal(), m.Float(0.0))
        values = [functools.reduce(lambda a, b: a + b, [x.as_float() for x in four]) for four in zip(*parts)]
        words = [(x * inverse).as_int() for x in values]
        largest = m.load_shared(tops + h * 4)[0].as_float()
        logarithm = m.select(some, largest + weight.max(_TINY).log2(), m.Float(-math.inf))
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
    return out, jnp.where(jnp.isfinite(top), (top + jnp.log2(total)) / _LOG2E, -jnp.inf)


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
