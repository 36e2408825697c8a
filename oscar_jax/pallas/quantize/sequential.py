"""Sequential rounding of a warpgroup's page (Mosaic GPU): steps 8a to 8c of `docs/int2-format.md`, section 2.

A lane holds D / 4 of the channels of its two rows, an equal share of every block
(`fragments.rotated_channel`). So the units U of a block, four to a word, are the left operand of a product as
they lie, and the entries W of all later blocks, in place, are the sums that `wgmma` adds their feedback to.
The right operand, the feedback from every k-step of 32 channels to all later blocks, lies in shared memory.

An entry W is kept as the bits of the float 1.5 * 2**23 + W: the products add integers to it, and one sum of
floats makes W of it again. For D <= 256 a float holds whatever matters: |W| < 12 * D * 2**12 = 1.5 * 2**23
at the start, so that it is positive. Its bits grow with W and are exact for |W| <= 2**22, a feedback is below
240 * 127**2 < 2**22, and code and U are saturated as of |W| = 2**15 + 2**14 (S < 2**13, 128 units < 2**14).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ...core import cache_format as fmt

BIAS = 1.5 * 2.0**23
_SIGN = 0x80000000
_SIGNS = 0xFBFB  # gather_bytes: the sign of the first word in every even byte, that of the second in odd ones
_STEP = 32  # channels of one product's contraction: 8 entries of each lane
_LOADS = 4  # units of 4 x 4 feedback bytes that a thread loads before it stores them


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of one role's channels, and where their feedback lies: byte offsets in shared memory."""

    head_dim: int
    steps: int  # blocks

    @property
    def size(self) -> int:
        """Channels of a block."""
        return self.head_dim // self.steps

    def first_tile(self, step: int) -> int:
        """The first product tile (8 channels) that k-step `step` has feedback for."""
        return (_STEP * step // self.size + 1) * self.size // 8

    def offset(self, step: int, tile: int) -> int:
        """Of the right operand for product tile `tile`, as `wgmma_s8` reads it: 256 bytes for 8 channels."""
        before = sum(self.head_dim // 8 - self.first_tile(s) for s in range(step))
        return 256 * (before + tile - self.first_tile(step))

    @property
    def feedback_bytes(self) -> int:
        return self.offset(self.head_dim // _STEP - 1, self.head_dim // 8)


class CodeWords:
    """Words of 16 codes that grow as signs come in: of Y + 1/2, and of what |Y + 1/2| exceeds the bound by.

    The former flips both bits of a code of 3, the latter its low bit. `place(half, entry)` says which word an
    entry belongs to and where in it; two entries of a word, four places apart, are done at a time.
    """

    def __init__(self, m: Any, place: Callable[[int, int], tuple[Any, int]]):
        self._m, self._place = m, place
        self._waiting: dict = {}
        self.words: dict = {}

    def add(self, half: int, entry: int, negative: Any, inner: Any) -> None:
        """Takes the float registers whose signs say it all for one entry."""
        word, p = self._place(half, entry)
        here = (negative.as_int(), inner.as_int())
        other = self._waiting.pop((word, p ^ 4), None)
        if other is None:
            self._waiting[word, p] = here
            return
        first, second = (other, here) if p & 4 else (here, other)
        out = self.words.get(word, self._m.Int(-1))
        for signs, bits in zip(zip(first, second), (0b11, 0b01)):
            out = out ^ (self._m.gather_bytes(*signs, _SIGNS) & (bits << 2 * (p & ~4)) * 0x101)
        self.words[word] = out


def stage_feedback(m: Any, blocks: Blocks, base: int, feedback: Any, threads: int) -> None:
    """Brings a feedback (int8 [D, D] at the pointer) into operand order, `base` bytes into shared memory.

    The first `threads` threads take units of 4 sources and 4 targets, which are four words of the operand.
    """
    side = blocks.size // 4  # units of a block
    bits = side.bit_length() - 1
    jobs = []
    for source in range(blocks.steps - 1):
        units = (blocks.steps - 1 - source) * side**2
        jobs += [(source, units, first) for first in range(0, units, threads)]
    for start in range(0, len(jobs), _LOADS):
        loaded = []
        for source, units, first in jobs[start : start + _LOADS]:
            unit = (m.thread + first).min(units - 1)
            row, column = (unit >> bits) & (side - 1), unit & (side - 1)
            target = (unit >> 2 * bits) + (source + 1)
            at = feedback.at(row * 4 + source * blocks.size, blocks.head_dim)
            at = at.at(target * blocks.size + column * 4)
            words = [m.load_global(at, 1, blocks.head_dim * i)[0] for i in range(4)]
            entry, c = _own_entry(blocks, row)
            entry = entry + source * side
            step = source * side // 8
            to, to_c = _own_entry(blocks, column)
            tile = (target * side + to) >> 1
            stride = blocks.offset(step, blocks.head_dim // 8) - blocks.offset(step, blocks.first_tile(step))
            place = m.shared_base + ((entry >> 3) - step) * stride + ((entry >> 2) & 1) * 128 + c * 4
            place = place + tile * 256 + to_c * 32 + (base + blocks.offset(step, 0))
            loaded.append((place, words))
        for place, words in loaded:
            for i, word in enumerate(_transposed(m, words)):
                m.store_shared(place, [word], 256 * (i >> 1) + 16 * (i & 1))


def _own_entry(blocks: Blocks, group: Any) -> tuple[Any, Any]:
    """Of channels 4 * `group` and on in a block: the first one's entry in its lanes, and their column."""
    quarter = (min(blocks.size, 64) // 16).bit_length() - 1  # bits of the number of groups of a lane
    inside = group & ((1 << quarter) - 1)
    return ((group >> quarter + 2) << quarter | inside) * 4, (group >> quarter) & 3


def _transposed(m: Any, words: list) -> list:
    """The 4 x 4 bytes of four words, transposed."""
    pairs = [(m.gather_bytes(a, b, 0x5140), m.gather_bytes(a, b, 0x7362)) for a, b in (words[:2], words[2:])]
    return [m.gather_bytes(a, b, pick) for a, b in zip(*pairs) for pick in (0x5410, 0x7632)]


def code_rows(
    m: Any, blocks: Blocks, y: tuple, bounds: list, shift: Any, feedback: int, codes: CodeWords
) -> None:
    """Codes two rows: y [half][entry] floats, bounds (s) and the feedback's shift as integers.

    `feedback` is where `stage_feedback` put it. The warps of the group do this together.
    """
    rows = [_Row(m, bound, shift) for bound in bounds]
    slope = ((127 - 8 - shift) << 23).as_float() * -1.0  # -2**-f / 256
    # W by product tile, as the products have their sums.
    w = [y[i >> 1 & 1][i >> 2 << 1 | i & 1] for i in range(2 * len(y[0]))]
    w = [x.fma_down(rows[i >> 1 & 1].factor, BIAS).as_int() for i, x in enumerate(w)]
    share = blocks.size // 4  # of a lane
    for block in range(blocks.steps):
        units: tuple[list, list] = ([], [])
        for entry in range(block * share, (block + 1) * share):
            for half, row in enumerate(rows):
                here = w[entry >> 1 << 2 | half << 1 | entry & 1].as_float() - BIAS + 0.5
                over = here.abs() - row.bound
                codes.add(half, entry, here, over)
                if block + 1 < blocks.steps:
                    units[half].append(_unit(row, slope, here, over))
        if block + 1 < blocks.steps:
            _feed_back(m, blocks, block, units, w, feedback)


class _Row:
    """What step 8 needs of one row."""

    def __init__(self, m: Any, s: Any, shift: Any):
        exponent = (s.max(1).to_float().as_int() >> 23) - 127
        p = exponent - shift - fmt.FEEDBACK_UNIT_BITS
        bound = (s << (0 - p).max(0)).sar(p.max(0))
        self.factor = ((127 - p) << 23).as_float()
        self.bound = bound.to_float()
        self.half_bound = (self.bound * 0.5).as_int()
        # U = floor((W + 1/2 - level + addend / 2) * 2**-f) with the level +-S/2 or +-3S/2 as it is: where S
        # is odd, a level rounded down is half less.
        addend = ((m.Int(1) << shift) & 0xFE) + (bound & 1) - 1
        self.start = addend.to_float().fma(((127 - 9 - shift) << 23).as_float() * -1.0, 127 / 256)


def _unit(row: _Row, slope: Any, here: Any, over: Any) -> Any:
    """U in the low byte, of W + 1/2 and |W + 1/2| - S.

    What W + 1/2 is beyond its level, up to its sign, is `over` +- S/2. Sums that stop at 0 and at 1 hold
    (127 - Z) / 256 and (Z + 127) / 256, Z the number whose floor is U: all exact multiples of 2**-16.
    """
    level = (row.half_bound | (over.as_int() & _SIGN)).as_float()
    rest = ((over - level).as_int() ^ (here.as_int() & _SIGN)).as_float()
    part = rest.fma_clamped(slope, row.start).fma_clamped(-1.0, 254 / 256)
    return part.fma_down(256.0, BIAS - fmt.FEEDBACK_LIMIT).as_int()


def _feed_back(m: Any, blocks: Blocks, block: int, units: tuple, w: list, feedback: int) -> None:
    """Step 8c, in place: the entries of later blocks, with the feedback of a block's units."""
    share = blocks.size // 4
    words = [
        [_low_bytes(m, row[i : i + 4]) for row in units] for i in range(0, share, 4)
    ]  # [four entries][row]
    if share == 4:  # half a k-step: the other half counts nothing
        words.insert(1 - (block & 1), [m.Int(0)] * 2)
    first = block * share // 8
    operand = [word for pair in words for word in pair]
    tile = (block + 1) * blocks.size // 8
    size = len(operand)
    registers = m.wgmma_fence([*operand, *w[4 * tile :]])
    operand, later = registers[:size], registers[size:]
    for i in range(size // 4):
        offset = feedback + blocks.offset(first + i, tile)
        columns = blocks.head_dim - 8 * tile
        later = m.wgmma_s8(operand[4 * i : 4 * i + 4], m.shared_base, offset, later, columns=columns)
    w[4 * tile :] = m.wgmma_wait(later)


def _low_bytes(m: Any, four: list) -> Any:
    """The low bytes of four integers in one word."""
    return m.gather_bytes(
        m.gather_bytes(four[0], four[1], 0x40), m.gather_bytes(four[2], four[3], 0x40), 0x5410
    )
