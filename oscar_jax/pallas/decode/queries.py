"""The query as right operands of a block's products: in bf16 as it came, and rotated as fixed-point integers.

Where head_dim is at most ROTATED_IN_BLOCK every block rotates the query itself, while its first pages are on
their way; else the rotated query comes from a launch before.
"""

import functools
from typing import Any

from ..machine import fragments as frag
from .geometry import TINY, WARP_LANES, DecodeShape, Place

ROTATED_IN_BLOCK = 128  # largest head_dim whose query_transform every block reads; else in a launch before

FIXED_MAX = 32000.0  # largest fixed-point query entry; its high byte stays inside -128..127
# Added to a float, leaves its nearest integer in the low bits.
_SIGNED, _SIGNED_BITS = 1.5 * 2.0**23, 0x4B400000
_ROTATE_STEP = 64  # entries of its matrix column that a thread loads at once


def dense_query(at: Place) -> list[list]:
    """Right operands (bf16) of the unrotated query: one or two lists of 2 words per 16 channels.

    A float32 query is split into two bf16 parts: in the odd columns when paired, else as a second operand.
    """
    m, shape = at.m, at.shape
    words: list[list] = [[], []]
    if shape.transforms:  # rotate_query has left the rows, float32
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


def dense_scores(at: Place, left: list, operands: list[list]) -> list:
    """Products of bf16 rows (left operands, 4 words per 16 channels) with the unrotated query."""
    sums = [[at.m.Float(0.0)] * 4 for _ in range(2)]  # two chains hide each other's latency
    for operand in operands:
        for step, a in enumerate(left):
            b = operand[2 * step : 2 * step + 2]
            sums[step & 1] = at.m.mma_f16(a, b, sums[step & 1], bfloat16=True)
    return [x + y for x, y in zip(*sums)]


def lane_scores(at: Place, acc: list, row: int) -> list:
    """Scores of row g (row = 0) or g + 8 (row = 1) for this lane's heads, from one accumulator tile."""
    pair = acc[2 * row : 2 * row + 2]
    if not at.shape.paired:
        return pair
    return [pair[0] if at.shape.query_bfloat16 else pair[0] + pair[1]]


def start_rotation(at: Place) -> tuple[list, list]:
    """Starts loading what `rotate_query` multiplies: this thread's parts of the query and the transform."""
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


def _matrix_column(at: Place, first: int) -> list:
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


def rotate_query(at: Place, started: tuple[list, list]) -> Any:
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


def rotated_query(at: Place, rotated: Any | None) -> tuple[list[list], list, list]:
    """The rotated query as fixed-point right operands, the start of the integer sums, and their unit.

    It lies at `rotated` in shared memory, or in the array query_rotated. Returns operands (one list when
    paired, else high and low), per lane head the float32 -1.5 * sum(q') in integer steps, and the float32
    largest |q'|, of which a step is 1 / FIXED_MAX.
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
    top = top.max(TINY)
    steps = top.reciprocal() * FIXED_MAX
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
