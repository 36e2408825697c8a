"""One page of one head, by one warpgroup of a Hopper GPU: center, rotate, scale, code and pack (Mosaic GPU).

The step numbers are those of `docs/int2-format.md`, section 2. Rows and transform are split into bytes, and
`wgmma` instructions sum their products exactly. A block keeps a head's transform in shared memory, in the
order of the right operand; warp w of a group owns the tokens 16w .. 16w+15, so that a lane ends up with the
16 codes of a key word, and a warp with the 16 codes of a value word.

A page goes through a warpgroup like this: its rows have arrived in shared memory; a lane reads the entries of
its left operand, centers them and splits them into bytes in registers; then other rows may take their place.
The products leave 2 D/4 integers Y in every lane, and all that follows, up to the packed word, happens to
them in place. They become floats, which hold them exactly, because float sums have twice the room of integer
and logical instructions, which the rest of the work is full of.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...core import cache_format as fmt
from ..machine import fragments as frag
from .sequential import Blocks, CodeWords, code_rows, stage_feedback

PAGE = fmt.PAGE_TOKENS
HEAD_DIMS = (64, 128, 256)
WARPS = 4  # of a warpgroup, which works on one page at a time
THREADS = 32 * WARPS

# Columns of one product: few enough that sums, operands and results stay in registers. 32 take twice as many
# instructions (H200, head_dim 256, 2048 pages x 4 heads: 580 us against 556).
COLUMNS = 64
HIGH, LOW = 0, 1  # limbs

_CLAMP_BITS = (127 + fmt.MAX_EXPONENT) << 7  # 2**64 as bf16
_LARGE_BITS = _CLAMP_BITS - (2 << 7)  # 2**62: a sum of two smaller numbers is far from being clamped
_INFINITY_BITS = 0x7F80


@dataclasses.dataclass(frozen=True)
class QuantizeShape:
    """Everything that is fixed when the quantize kernel is built."""

    pages: int
    heads: int
    head_dim: int
    rotation_heads: int  # 1 or `heads`
    blocks: int
    warpgroups: int  # of a block
    kinds: tuple[str, ...]  # "key", "value" or both
    steps: tuple[int, int] = (0, 0)  # blocks of sequential rounding of keys and of values, 0: to the nearest

    def blocks_of(self, kind: str) -> Blocks | None:
        """The blocks of sequential rounding, None where rows are rounded to the nearest."""
        steps = self.steps[kind == "value"]
        return Blocks(self.head_dim, steps) if steps else None

    def width(self, kind: str) -> int:
        """The channels of which every lane gets its share: `frag.rotated_channel`."""
        blocks = self.blocks_of(kind)
        return min(blocks.size, 64) if blocks else 64

    # Shared memory: the transform, corrections, the feedback, then per warpgroup, at these byte offsets: a
    # tile of rows, the mean, the sums of keys of each warp, one word per warp.
    @property
    def transform_bytes(self) -> int:
        return 2 * self.head_dim**2

    @property
    def correction_stride(self) -> int:
        """Bytes of the corrections of a lane column: padded, so that the four are read from other banks."""
        return self.head_dim + 16

    @property
    def feedback_start(self) -> int:
        return self.transform_bytes + 4 * self.correction_stride

    @property
    def area_start(self) -> int:
        every = (self.blocks_of(kind) for kind in self.kinds)
        return self.feedback_start + max(blocks.feedback_bytes if blocks else 0 for blocks in every)

    @property
    def row_bytes(self) -> int:
        """Of a staged row. Of rows 2g and 2g + 2 a quarter of a warp reads 64 bytes each: other banks."""
        return 2 * self.head_dim + 32

    @property
    def mean_offset(self) -> int:
        return PAGE * self.row_bytes

    @property
    def sum_offset(self) -> int:
        return self.mean_offset + 4 * self.head_dim

    @property
    def warp_offset(self) -> int:
        return self.sum_offset + 4 * WARPS * self.head_dim

    @property
    def area_bytes(self) -> int:
        return self.warp_offset + 4 * WARPS

    @property
    def shared_bytes(self) -> int:
        return self.area_start + self.warpgroups * self.area_bytes


def stage_rotation(
    m: Any, shape: QuantizeShape, refs: dict, kind: str, rotation_head: Any, threads: int
) -> Any:
    """The transform and the feedback of one head and role, in operand order, in shared memory.

    The first `threads` threads do it. Returns the feedback's shift, None where there is no feedback.
    """
    transform = m.pointer(refs[kind + "_transform"]).at(rotation_head, 2 * shape.head_dim**2)
    stage_transform(m, shape.head_dim, transform, threads, shape.width(kind))
    blocks = shape.blocks_of(kind)
    if not blocks:
        return None
    feedback = m.pointer(refs[kind + "_feedback"]).at(rotation_head, shape.head_dim**2)
    stage_feedback(m, blocks, shape.feedback_start, feedback, threads)
    return m.load_global(m.pointer(refs[kind + "_feedback_shift"]).at(rotation_head, 4))[0]


def stage_transform(m: Any, head_dim: int, transform: Any, threads: int, channels: int = 64) -> None:
    """Splits a transform (int16 [D, D] at the pointer) into limbs, in operand order, in shared memory.

    The first `threads` threads take blocks of 8 rows and 8 columns; a word of the operand is one limb of four
    rows of a column. `channels` is the width of `frag.rotated_channel`.
    """
    row_bits, column_bits, _ = operand_offsets(head_dim, channels)
    width = head_dim.bit_length() - 4  # bits of the number of a block of columns, or of rows
    units = 1 << 2 * width
    for start in range(0, units, 2 * threads):  # two blocks at a time hide the way to memory
        blocks = []
        for first in range(start, min(start + 2 * threads, units), threads):
            unit = (m.thread + first).min(units - 1)
            # Lanes that load together: two neighbours of a row, four rows; then the rest of the row.
            column = (unit & 1) | ((unit >> 3) & ((1 << width - 1) - 1)) << 1
            row = ((unit >> 1) & 3) | (unit >> width + 2) << 2
            source = transform.at(row, 16 * head_dim).at(column, 16)
            words = [m.load_global(source, 4, 2 * head_dim * i) for i in range(8)]
            place = m.shared_base
            for number, bits in ((row, row_bits), (column, column_bits)):
                for i in range(width):
                    place = place + ((number >> i) & 1) * bits[3 + i]
            blocks.append((place, words))
        for place, words in blocks:
            store = functools.partial(_store_limbs, m, head_dim, place, words, channels)
            if units < threads:
                m.when(m.thread.lt(units), store)
            else:
                store()


def _store_limbs(m: Any, head_dim: int, place: Any, words: list, channels: int) -> None:
    """The limbs of 8 rows of 8 columns, two columns to a word; `place` is where the first one goes."""
    row_bits, column_bits, low_limb = operand_offsets(head_dim, channels)
    for column, half in np.ndindex(8, 2):
        four = [row[column // 2] for row in words[4 * half : 4 * half + 4]]
        offset = half * row_bits[2] + sum((column >> i & 1) * column_bits[i] for i in range(3))
        byte = 2 * (column % 2)
        m.store_shared(place, [_gather(m, four, byte)], offset + low_limb)
        # The high limb is that of v + 128, in each half of the word by itself.
        four = [((v & 0x7FFF7FFF) + 0x00800080) ^ (v & 0x80008000) for v in four]
        m.store_shared(place, [_gather(m, four, byte + 1)], offset)


def _gather(m: Any, four: list, byte: int) -> Any:
    """Byte `byte` of four integers in one word."""
    pick = byte | (4 + byte) << 4
    return m.gather_bytes(
        m.gather_bytes(four[0], four[1], pick), m.gather_bytes(four[2], four[3], pick), 0x5410
    )


@functools.cache
def operand_offsets(head_dim: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Where `transform_operand` puts the limbs of a transform, asked of that function itself.

    Byte offsets that add up: of the bits of a row, of the bits of a column, and of the low limb; the high
    limb of row 0, column 0 is at 0.
    """
    bits = head_dim.bit_length() - 1
    probes = np.zeros((2 * bits + 1, head_dim, head_dim), np.int16)
    for i in range(bits):
        probes[i, 1 << i, 0] = probes[bits + i, 0, 1 << i] = 1 << fmt.LIMB_BITS
    probes[-1, 0, 0] = 1
    with jax.ensure_compile_time_eval():
        operand = np.asarray(transform_operand(jnp.asarray(probes), width))
    found = np.argmax(operand.reshape(len(probes), -1).view(np.int8), axis=1).tolist()
    return tuple(found[:bits]), tuple(found[bits:-1]), found[-1]


def store_corrections(m: Any, shape: QuantizeShape, threads: int) -> None:
    """What makes up for unsigned rows: -2**14 * (sum of a column of the transform) / 256, per column.

    To shared memory, in the order in which the lanes need them. The transform lies there, visible to the
    first `threads` threads, which do the work.
    """

    def store(column):
        tile, j = column >> 3, column & 7
        sums = [m.Int(0), m.Int(0)]
        for limb, s, part in np.ndindex(2, shape.head_dim // 32, 2):
            offset = operand_offset(shape.head_dim, limb, s, 0) + 128 * part
            for word in m.load_shared(m.shared_base + tile * 256 + j * 16, 4, offset):
                sums[limb] = m.sum_bytes(word, sums[limb])
        total = (sums[HIGH] << fmt.LIMB_BITS) + sums[LOW]
        at = m.shared_base + (j >> 1) * shape.correction_stride + tile * 8 + (j & 1) * 4
        correction = (0 - total) << fmt.TRANSFORM_BITS - fmt.LIMB_BITS
        m.store_shared(at, [correction], shape.transform_bytes)

    for n in range(-(-shape.head_dim // threads)):
        column = m.thread + n * threads
        m.when(column.lt(shape.head_dim), functools.partial(store, column))


def quantize_tile(
    m: Any,
    shape: QuantizeShape,
    refs: dict,
    kind: str,
    tile: Any,
    slots: list,
    page_head: Any,
    multiplier: Any,
    shift: Any,
    rows_are_read: Callable[[], None] | None = None,
) -> None:
    """Steps 1-9 for one staged page of one head: shared memory at `tile` -> its codes, scales and mean.

    `slots` are the addresses of the chunks that this thread copied: the chunks thread % (D/8) of some rows;
    the 16 rows of a warp are visible to it. `page_head` = page * heads + head is where the result goes.
    Shared memory starts with what `stage_rotation` stores, ordered before the products (`order_copies` in
    the threads that wrote it, then a barrier), and what `store_corrections` says; the value mean lies in the
    group's area. `shift` is what `stage_rotation` returned. `rows_are_read` is called when this warp needs
    its rows no more.
    """
    if kind == "key":
        words, largest = _clean_own_rows(m, slots)
        _page_mean(m, shape, refs, words, largest, page_head)
    g, c = m.lane >> 2, m.lane & 3
    center = _center_rows if kind == "key" else _center_values
    *rows, top, top_too = center(m, shape, tile, g, c)
    if rows_are_read:
        rows_are_read()
    limbs, exponents = _split_rows(m, shape, rows, (top, top_too))
    y = _rotate_rows(m, shape, limbs, c)
    bounds = []
    for row in y:
        total = sum_magnitudes(row)
        for distance in (1, 2):
            total = total + m.shuffle_xor(total, distance)
        mean_abs = total >> shape.head_dim.bit_length() - 1  # head_dim is a power of two
        bounds.append((mean_abs * multiplier) >> fmt.MULTIPLIER_SHIFT)

    def store_scales():
        bits = []
        for half in range(2):
            unit = ((exponents[half] + (127 - fmt.SCALE_BITS)) << 23).as_float()
            bits.append((bounds[half].to_float() * unit).bfloat16_bits())
        token = page_head * PAGE + m.warp * 16 + frag.row_token(g, 0)
        m.store_global(m.pointer(refs[kind + "_scale"]).at(token, 2), [bits[0] | (bits[1] << 16)])

    m.when(c.eq(0), store_scales)
    codes = CodeWords(m, _key_place if kind == "key" else _value_place)
    blocks = shape.blocks_of(kind)
    if blocks:
        code_rows(m, blocks, y, bounds, shift, shape.feedback_start, codes)
    else:
        code_nearest(y, [bound.to_float_up() for bound in bounds], codes)
    store = _store_key_words if kind == "key" else _store_value_words
    store(m, shape, refs, codes.words, shape.width(kind), page_head, g, c)


def sum_magnitudes(row: list) -> Any:
    """The sum of |Y| >> ABS_SHIFT. A sum with a float whose unit is 2**ABS_SHIFT drops the same bits."""
    unit = 23 + fmt.ABS_SHIFT  # its exponent
    total = functools.reduce(lambda a, b: a + b, [y.abs().add_to_zero(2.0**unit).as_int() for y in row])
    return total - (len(row) * (127 + unit << 23) & 0xFFFFFFFF)


def _key_place(half: int, entry: int) -> tuple[Any, int]:
    return (half, entry >> 4), entry & 15


def _value_place(half: int, entry: int) -> tuple[Any, int]:
    return entry >> 3, 2 * (entry & 7) + half


def code_nearest(y: tuple, bounds: list, codes: CodeWords) -> None:
    """Step 8 for two rows: y [half][entry] floats, and the smallest floats that are not below their bounds.

    -bound <= Y < bound is |Y + 1/2| < bound. (Where the half is lost, rounding towards zero leaves the right
    side of every bound.)
    """
    for entry in range(len(y[0])):
        for half, bound in enumerate(bounds):
            here = y[half][entry]
            codes.add(half, entry, here, here.add_to_zero(0.5).abs() - bound)


def store_value_mean(m: Any, shape: QuantizeShape, refs: dict, rotation_head: Any) -> None:
    """The calibrated mean value, cleaned, as float32 in shared memory, and its largest magnitudes as bf16."""
    words = shape.head_dim // 2
    own = m.thread.min(words - 1)
    address = m.pointer(refs["value_mean"]).at(rotation_head, 2 * shape.head_dim).at(own, 4)
    word = _clean_word(m, m.load_global(address)[0])
    store = functools.partial(m.store_shared, m.area + own * 8, list(_halves(word)), shape.mean_offset)
    m.when(m.thread.lt(words), store)
    _store_warp_top(m, shape, word & 0x7FFF7FFF)


def _store_warp_top(m: Any, shape: QuantizeShape, tops: Any) -> None:
    """The warp's largest of two magnitudes (bf16) per lane, to its word in shared memory."""
    top = m.largest_of_warp((tops >> 16).max(tops & 0xFFFF))
    m.store_shared(m.area + m.warp * 4, [top], shape.warp_offset)


def _clean_word(m: Any, word: Any) -> Any:
    """Step 1 for two bf16: non-finite numbers become 0, large ones +-2**64."""
    out = m.Int(0)
    for shift in (0, 16):
        half = word >> shift
        magnitude, sign = half & 0x7FFF, half & 0x8000
        clean = m.select(magnitude.lt(_INFINITY_BITS), magnitude.min(_CLAMP_BITS) | sign, m.Int(0))
        out = out | (clean << shift)
    return out


def _clean_own_rows(m: Any, slots: list) -> tuple[list, Any]:
    """Step 1 on the chunks that this thread copied, in place.

    Returns their words, and in one word the two largest magnitudes, as bf16, of low and of high halves.
    """

    def largest(words):
        return functools.reduce(m.max_magnitudes, words) & 0x7FFF7FFF

    def clean(carry):
        words = [_clean_word(m, w) for w in carry[:-1]]
        for n, slot in enumerate(slots):
            m.store_shared(slot, words[4 * n : 4 * n + 4])
        return [*words, largest(words)]

    words = [w for slot in slots for w in m.load_shared(slot, 4)]
    top = largest(words)
    # Bit 15 of a half: magnitude > 2**64. Rare, hence the branch.
    strange = ((top + (0x7FFF - _CLAMP_BITS) * 0x10001) & 0x80008000).ne(0)
    *words, top = m.branch(m.any_lane(strange), [*words, top], clean)
    return words, top


def _page_mean(m: Any, shape: QuantizeShape, refs: dict, words: list, largest: Any, page_head: Any) -> None:
    """Step 2: the mean key of the page, to shared memory (float32) and to `key_page_mean`.

    A thread sums the 8 channels of the chunks that it copied; then its warp and, through shared memory, the
    warps of the group add up.
    """
    head_dim = shape.head_dim
    _store_warp_top(m, shape, largest)
    m.sync_warpgroup()
    tops = m.load_shared(m.area, 4, shape.warp_offset)
    exponent = (functools.reduce(lambda a, b: a.max(b), tops) >> 7) - 127
    empty = exponent.lt(fmt.MIN_EXPONENT)
    exponent = m.select(empty, m.Int(0), exponent)
    up = ((fmt.MEAN_BITS + 127 - exponent) << 23).as_float()
    down = ((exponent + (127 - fmt.MEAN_BITS - fmt.PAGE_TOKENS_LOG2)) << 23).as_float()

    totals = [m.Int(0)] * 8
    for n in range(0, len(words), 4):
        x = [v.as_float() for w in words[n : n + 4] for v in _halves(w)]
        totals = [total + v.fma(up, 0.5).floor_to_int() for total, v in zip(totals, x)]
    chunks = head_dim // 8
    for distance in (8, 16):
        if distance >= chunks:  # the same chunk of other rows
            totals = [total + m.shuffle_xor(total, distance) for total in totals]
    at = m.area + m.warp * (4 * head_dim) + m.lane * 32

    def store_totals():
        for i in range(2):
            m.store_shared(at, totals[4 * i : 4 * i + 4], shape.sum_offset + 16 * i)

    m.when(m.lane.lt(chunks), store_totals)
    m.sync_warpgroup()

    def finish():
        at = m.area + m.thread * 8  # a pair of channels
        sums = [m.load_shared(at, 2, shape.sum_offset + 4 * head_dim * i) for i in range(WARPS)]
        bits = []
        for i in range(2):
            total = functools.reduce(lambda a, b: a + b, [s[i] for s in sums])
            mean = m.select(empty, m.Float(0.0), total.to_float() * down)
            bits.append(mean.bfloat16_bits())
        m.store_shared(at, [b << 16 for b in bits], shape.mean_offset)
        address = m.pointer(refs["key_page_mean"]).at(page_head, 2 * head_dim).at(m.thread, 4)
        m.store_global(address, [bits[0] | (bits[1] << 16)])

    m.when(m.thread.lt(head_dim // 2), finish)
    m.sync_warpgroup()  # the mean is visible


def _halves(word: Any) -> tuple:
    """The bits of two bf16 as those of two float32."""
    return word << 16, word & 0xFFFF0000


def _center_values(m: Any, shape: QuantizeShape, tile: Any, g: Any, c: Any) -> list:
    """Step 1, in place, and what `_center_rows` says.

    Cleaning changes nothing where the differences are small, unless the mean is large. So it is rare, and a
    warp that cleans its rows centers them again.
    """
    mean_tops = m.load_shared(m.area, 4, shape.warp_offset)
    mean_top = functools.reduce(lambda a, b: a.max(b), mean_tops)

    def clean(_):
        changed = m.Int(0)
        for s, half in np.ndindex(shape.head_dim // 32, 2):
            address = _row_address(m, shape, tile, g, c, half)
            words = m.load_shared(address, 4, 64 * s)
            cleaned = [_clean_word(m, w) for w in words]
            m.store_shared(address, cleaned, 64 * s)
            for before, after in zip(words, cleaned):
                changed = changed | (before ^ after)
        return [changed]

    def center():
        rows = _center_rows(m, shape, tile, g, c)
        strange = rows[-2].max_or_nan(rows[-1]).as_int().ge(_LARGE_BITS << 16) | mean_top.ge(_LARGE_BITS)
        (changed,) = m.branch(m.any_lane(strange), [m.Int(0)], clean)
        return m.any_lane(changed.ne(0)), rows

    return m.repeat([m.Float] * (shape.head_dim // 2 + 2), center)


def _row_address(m: Any, shape: QuantizeShape, tile: Any, g: Any, c: Any, half: int) -> Any:
    """Of the first 16 bytes that a lane centers of its staged row `half`; so it goes on every 64 bytes."""
    return tile + (m.warp * 16 + frag.row_token(g, half)) * shape.row_bytes + c * 16


def _center_rows(m: Any, shape: QuantizeShape, tile: Any, g: Any, c: Any) -> list:
    """x - mean for the rows frag.row_token(g, half) of this warp, then the largest magnitude of each row.

    A lane holds of row g, then of row g + 8, the channels 32 s + 8 c ... of every k-step s.
    """
    rows: list[list] = [[], []]
    for s in range(shape.head_dim // 32):
        mean = [m.load_shared(m.area + c * 32, 4, shape.mean_offset + 128 * s + 16 * i) for i in range(2)]
        mean = [w.as_float() for w in mean[0] + mean[1]]
        for half in range(2):
            words = m.load_shared(_row_address(m, shape, tile, g, c, half), 4, 64 * s)
            x = [v.as_float() for w in words for v in _halves(w)]
            rows[half] += [a - b for a, b in zip(x, mean)]
    tops = []
    for row in rows:
        top = functools.reduce(lambda a, b: a.max_or_nan(b), [x.abs() for x in row])
        for distance in (1, 2):
            top = top.max_or_nan(m.shuffle_xor(top, distance))
        tops.append(top)
    return [*rows[0], *rows[1], *tops]


def _split_rows(m: Any, shape: QuantizeShape, rows: list, tops: tuple) -> tuple[tuple, list]:
    """Steps 3-5 for two centered rows: left operands of the products, and the exponents of the rows.

    Returns (high, low), each with four words per k-step of 32 channels: the bytes of X + 2**14, which are
    unsigned. Step 6 is floor(X T / 256), whichever bytes X is split into.
    """
    high, low = [], []  # [half][words]
    exponents = []
    for half, top in enumerate(tops):
        exponent = (top.as_int() >> 23) - 127
        empty = exponent.lt(fmt.MIN_EXPONENT)
        exponent = m.select(empty, m.Int(0), exponent)
        factor = ((fmt.ROW_BITS + 8 + 127 - exponent) << 23).as_float()
        factor = m.select(empty, m.Float(0.0), factor)  # every entry of an empty row is 0
        # floor(256 X' + 128) in the low 23 bits of a float: byte 1 is the low byte of X, byte 2 its high byte
        # plus 64. Where X = 2**14 the float's unit is 2, and these bytes come out all the same.
        size = len(rows) // 2
        row = rows[half * size : (half + 1) * size]
        fixed = [x.fma_down(factor, 1.5 * 2.0**23 + 128).as_int() for x in row]
        pairs = [m.gather_bytes(a, b, 0x6521) for a, b in zip(fixed[::2], fixed[1::2])]
        low.append([m.gather_bytes(a, b, 0x6420) for a, b in zip(pairs[::2], pairs[1::2])])
        high.append([m.gather_bytes(a, b, 0x7531) for a, b in zip(pairs[::2], pairs[1::2])])
        exponents.append(exponent)
    # Left operand of a k-step: (row g, channels +0..3), (row g + 8, +0..3), then both with channels +4..7.
    high, low = ([word for column in zip(*limb) for word in column] for limb in (high, low))
    return (high, low), exponents


def _rotate_rows(m: Any, shape: QuantizeShape, limbs: tuple, c: Any) -> tuple[list, list]:
    """Step 6: Y [half][2n + b] of a lane is the output channel frag.rotated_channel(n, 2c + b), as a float.

    |Y| <= 2**14 sqrt(D) 2**14 / 256 <= 2**24, as no column of a transform is longer than 1: a float is exact.

    In pieces of COLUMNS channels. high * high and low * low come first, so that their sum, at its place, can
    be what the middle products are added to: two sums at a time instead of three.
    """
    steps = shape.head_dim // 32
    size = len(limbs[0])
    limbs = m.wgmma_fence([*limbs[0], *limbs[1]])
    a_limbs = (limbs[:size], limbs[size:])
    corrections = m.shared_base + c * shape.correction_stride + shape.transform_bytes
    y: tuple[list, list] = ([], [])

    def product(tile, a, b, total=None):
        for s in range(steps):
            offset = operand_offset(shape.head_dim, b, s, tile)
            words = a_limbs[a][4 * s : 4 * s + 4]
            total = m.wgmma_s8(words, m.shared_base, offset, total, columns=COLUMNS, unsigned_a=True)
        return total

    for tile in range(0, shape.head_dim // 8, COLUMNS // 8):
        outer = product(tile, HIGH, HIGH) + product(tile, LOW, LOW)
        offsets = range(8 * tile, 8 * tile + COLUMNS, 16)
        correction = [w for offset in offsets for w in m.load_shared(corrections, 4, offset)]
        outer = m.wgmma_wait(outer)
        total = []
        for i, (high, low) in enumerate(zip(outer[: COLUMNS // 2], outer[COLUMNS // 2 :])):
            low = low.sar(fmt.LIMB_BITS) + correction[i >> 2 << 1 | i & 1]
            total.append((high << fmt.LIMB_BITS) + low)
        total = m.wgmma_fence(total)
        total = m.wgmma_wait(product(tile, LOW, HIGH, product(tile, HIGH, LOW, total)))
        for i, x in enumerate(total):
            y[i >> 1 & 1].append(x.to_float())
    return y


# Two lanes exchange halves of their words, or every second byte: distances aside, who keeps what.
_HALVES, _BYTES = (0x5410, 0x3276), (0x6240, 0x3715)


def _exchange(m: Any, word: Any, distance: int, upper: Any, selectors: tuple[int, int]) -> Any:
    """A word made of this lane's and its partner's; `upper` in the partner with the higher number."""
    selector = m.select(upper, m.Int(selectors[1]), m.Int(selectors[0]))
    return m.gather_bytes(word, m.shuffle_xor(word, distance), selector)


def _store_key_words(
    m: Any, shape: QuantizeShape, refs: dict, words: dict, width: int, page_head: Any, g: Any, c: Any
) -> None:
    """The words of the two rows. Of 64 channels a lane holds 16: a word, or 2 or 4 parts of words."""
    words_per_row = shape.head_dim // fmt.CODES_PER_WORD
    odd, upper = (c & 1).ne(0), (c & 2).ne(0)
    own = (c >> 1) | (c & 1) << 1 if width == 32 else c
    for half in range(2):
        row = page_head * PAGE + m.warp * 16 + frag.row_token(g, half)
        base = m.pointer(refs["key_codes"]).at(row, 4 * words_per_row).at(own, 4)
        for j in range(words_per_row // 4):
            word = words[half, j]
            if width == 32:
                word = _exchange(m, word, 1, odd, _HALVES)
            elif width == 16:
                word = _exchange(m, word, 2, upper, _HALVES)
                word = _exchange(m, word, 1, odd, _BYTES)
            m.store_global(base, [word], 16 * j)


def _store_value_words(
    m: Any, shape: QuantizeShape, refs: dict, words: dict, width: int, page_head: Any, g: Any, c: Any
) -> None:
    """Word `warp` of every channel: its 16 codes sit in the eight lanes of a column, two in each.

    A word of a lane starts as the codes of two rows, a nibble, for each of eight channels. Three exchanges
    turn it into eight nibbles of one channel: lane g keeps the g-th, and the nibbles come in order of rows.
    """
    upper = [(g >> i & 1).ne(0) for i in range(3)]
    kept = m.select(upper[0], m.Int(0xF0F0F0F0), m.Int(0x0F0F0F0F))
    turn = m.select(upper[0], m.Int(28), m.Int(4))
    base = m.pointer(refs["value_codes"]).at(page_head, 16 * shape.head_dim).at(m.warp, 4)
    for w in range(shape.head_dim // 32):
        word = _exchange(m, words[w], 16, upper[2], _HALVES)
        word = _exchange(m, word, 8, upper[1], _BYTES)
        other = m.rotate_left(m.shuffle_xor(word, 4), turn)
        word = (word & kept) | (other & (kept ^ 0xFFFFFFFF))
        entry = g + 8 * w
        channel = frag.rotated_channel(entry >> 1, c * 2 + (entry & 1), width)
        m.store_global(base.at(channel, 16), [word])


# ------------------------------------------------------------------------------------------ launches


def transform_operand(transform: jax.Array, width: int = 64) -> jax.Array:
    """int16 [K or 1, D, D] -> int32 [K or 1, 2, D/32, D/8, 2, 8, 4]: right operands of the row products.

    Indices: limb (high, low), k-step s, product tile n, part i, column j, word c. A word holds four signed
    bytes: a limb of the transform's column frag.rotated_channel(n, j, width) at the rows 32 s + 8 c + 4 i +
    (0..3).
    """
    heads, head_dim, _ = transform.shape
    n, j = jnp.arange(head_dim // 8)[:, None], jnp.arange(8)
    columns = frag.rotated_channel(n, j, width)  # [D/8, 8]
    x = transform.astype(jnp.int32)
    high = (x + 128) >> fmt.LIMB_BITS
    limbs = jnp.stack([high, x - (high << fmt.LIMB_BITS)], 1).astype(jnp.int8)  # [K, limb, row, column]
    limbs = limbs[..., columns.reshape(-1)].reshape(heads, 2, head_dim // 32, 4, 2, 4, head_dim // 8, 8)
    # [K, limb, s, c, i, byte, n, j] -> [K, limb, s, n, i, j, c, byte]
    return lax.bitcast_convert_type(limbs.transpose(0, 1, 2, 6, 4, 7, 3, 5), jnp.int32)


def operand_offset(head_dim: int, limb: int, step: int, tile: int) -> int:
    """Where `transform_operand` puts a limb of k-step `step` for product tile `tile`, in bytes."""
    return 256 * ((limb * (head_dim // 32) + step) * (head_dim // 8) + tile)
