"""A warp's share of the BF16 pages (sink and recent): flash attention over 16 tokens at a time."""

import itertools
import math
from typing import Any

from ..machine import fragments as frag
from .geometry import EMPTY, LOG2E, PAGE, TINY, WARP_LANES, Place, sum_rows
from .queries import dense_query, dense_scores, lane_scores

STEPS = 4  # over a window page, of 16 tokens each: what one product takes


class WindowRows:
    """The rows of one step of this warp over the BF16 windows: 16 consecutive tokens of a page.

    A warp has every workers-th part of a page, and takes four steps per page.
    """

    def __init__(self, at: Place, step: Any):
        m, shape = at.m, at.shape
        self.at = at
        steps = STEPS // shape.window_parts  # of a part
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


def attend_windows(at: Place, steps: Any) -> None:
    """Attention over this warp's rows of the BF16 windows, stored as a partial result of its own.

    The rows of the next step are asked for as soon as those of a step have been used, where they leave
    registers enough for that.
    """
    m, shape, refs = at.m, at.shape, at.refs
    head_dim, n_heads = shape.head_dim, shape.lane_heads
    heads = range(n_heads)
    unit = shape.softmax_scale * LOG2E
    operands = dense_query(at)
    count = head_dim // 4  # words of a step that a lane loads, of keys and of values
    ahead = head_dim <= 128

    def window_step(carry):
        step, loaded, (maximum, total, acc) = carry
        window, following, more = WindowRows(at, step), WindowRows(at, step + 1), (step + 1).lt(steps)
        if ahead:
            keys, values = loaded
            m.when((step + 2).lt(steps), lambda: WindowRows(at, step + 2).prefetch())
        else:
            keys, values = window.load_keys(), window.load_values()
            m.when(more, following.prefetch)
        # Words 0, 1 of both rows meet the first 16 channels of a block, words 2, 3 the others.
        a, b = keys[: count // 2], keys[count // 2 :]
        left = [[a[n], b[n], a[n + 1], b[n + 1]] for n in range(0, count // 2, 2)]
        tile = dense_scores(at, left, operands)
        if ahead:
            keys = m.branch(more, keys, lambda _: following.load_keys())
        inside = [(at.g + 8 * h).lt(window.stored) for h in range(2)]
        # Rows past the end may hold anything.
        score = [
            [m.select(inside[h], x * unit, m.Float(EMPTY)) for x in lane_scores(at, tile, h)]
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
            loaded = keys, m.branch(more, values, lambda _: following.load_values())
        return step + 1, loaded, (top, total, acc)

    zero, first_step, loaded = m.Float(0.0), m.Int(0), ()
    if ahead:
        first = WindowRows(at, m.Int(0))
        loaded = first.load_keys(), first.load_values()
    nothing = [m.Float(EMPTY)] * n_heads, [zero] * n_heads, [zero] * (head_dim // 4)
    _, _, (maximum, total, acc) = m.loop(steps, (first_step, loaded, nothing), window_step)
    total = sum_rows(m, total)
    some = [x.gt(0.0) for x in total]
    inverse = [m.select(s, x.max(TINY).reciprocal(), zero) for s, x in zip(some, total)]

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
        value = m.select(some[e], maximum[e] + total[e].max(TINY).log2(), m.Float(-math.inf))
        real = rows[e].lt(shape.group)
        target = out.at(places[e], 4 * head_dim).at(frag.dense_value_channel(0, at.g, 0, 0), 4)

        def store(target=target, words=words):
            for n in range(0, len(words), 4):  # a lane has 8 neighbouring channels of every 64
                m.store_global(target, words[n : n + 4], 4 * (64 * (n // 8) + n % 8))

        m.when(real, store)
        place = lse.at(places[e], 4)
        m.when(real & at.g.eq(0), lambda p=place, v=value: m.store_global(p, [v.as_int()]))
