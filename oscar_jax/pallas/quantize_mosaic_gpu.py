"""The exact page quantizer for Hopper GPUs (Mosaic GPU): center, rotate, scale, code and pack in one pass.

Byte for byte the quantizer of `quantize.py` (the step numbers are those of `docs/int2-format.md`, section 2):
rows and transform are split into signed bytes, and `s8 x s8 -> s32` matrix instructions sum their products
exactly. A block keeps one head's transform in shared memory, already in the order of the right operand, and
each of its warpgroups walks over pages of its own; warp w of a group owns the tokens 16w .. 16w+15, so that a
lane ends up with the 16 codes of a key word, and a warp with the 16 codes of a value word. Keys and values
share one launch.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .. import cache_format as fmt
from ..config import DTypeError, ShapeError
from ..quantize import check_pages, round_to_bfloat16
from . import fragments as frag
from .registers import Warpgroup
from .tuning import quantize_plan

PAGE = fmt.PAGE_TOKENS
HEAD_DIMS = (64, 128, 256)
WARPS = 4  # of a warpgroup, which works on one page at a time
THREADS = 32 * WARPS

_CLAMP_BITS = (127 + fmt.MAX_EXPONENT) << 7  # 2**64 as bf16
_INFINITY_BITS = 0x7F80


@dataclasses.dataclass(frozen=True)
class QuantizeShape:
    """Everything that is fixed when the quantize kernel is built."""

    pages: int
    heads: int
    head_dim: int
    rotation_heads: int  # 1 or `heads`
    blocks: int  # per head and kind
    warpgroups: int  # of a block
    kinds: tuple[str, ...]  # "key", "value" or both

    # Shared memory: the transform, then per warpgroup, at these byte offsets: two row tiles, the mean,
    # partial sums, value words, one word per warp.
    @property
    def transform_bytes(self) -> int:
        return 2 * self.head_dim**2

    @property
    def tile_bytes(self) -> int:
        return 2 * PAGE * self.head_dim

    @property
    def mean_offset(self) -> int:
        return 2 * self.tile_bytes

    @property
    def sum_offset(self) -> int:
        return self.mean_offset + 4 * self.head_dim

    @property
    def word_offset(self) -> int:
        return self.sum_offset + 8 * THREADS

    @property
    def warp_offset(self) -> int:
        return self.word_offset + 16 * self.head_dim

    @property
    def area_bytes(self) -> int:
        return self.warp_offset + 4 * WARPS

    @property
    def shared_bytes(self) -> int:
        return self.transform_bytes + self.warpgroups * self.area_bytes


# ------------------------------------------------------------------------------------------ kernel body


def quantize_body(m: Any, shape: QuantizeShape, block: tuple, refs: dict) -> None:
    """The kernel for one block. `m` is a register machine, `block` = (first page, head, kind)."""
    first, head, kind = block
    for i, name in enumerate(shape.kinds):
        m.when(kind.eq(i), functools.partial(_pages, m, shape, refs, name, first, head))


def _pages(block: Any, shape: QuantizeShape, refs: dict, kind: str, first: Any, head: Any) -> None:
    """All pages of one block: `kind` rows of one head, from page `first` on."""
    m = Warpgroup(block)
    m.area = m.shared_base + shape.transform_bytes + m.index * shape.area_bytes
    head_dim = shape.head_dim
    rotation_head = head if shape.rotation_heads > 1 else m.Int(0)
    row_bytes = 2 * head_dim
    chunks = head_dim // 8  # of 16 bytes in a row
    copies = PAGE * chunks // THREADS  # per thread

    # ---- the transform, in operand order; it stays
    source = m.pointer(refs[kind + "_transform"]).at(rotation_head, shape.transform_bytes)
    threads = THREADS * shape.warpgroups
    for n in range(-(-shape.transform_bytes // (16 * threads))):
        chunk = (block.thread + n * threads).min(shape.transform_bytes // 16 - 1)
        m.copy_async(m.shared_base + chunk * 16, source.at(chunk, 16))
    multiplier = m.load_global(m.pointer(refs[kind + "_multiplier"]).at(rotation_head, 4))[0]

    # ---- row tiles: chunk i of row t lies at chunk frag.row_chunk(t, i) of that row
    own = []  # (row, chunk) copied by this thread
    for n in range(copies):
        flat = m.thread + n * THREADS
        own.append((flat.udiv(chunks), flat.umod(chunks)))
    slots = [m.area + row * row_bytes + frag.row_chunk(row, chunk) * 16 for row, chunk in own]
    rows = m.pointer(refs[kind + "_rows"]).at(head, row_bytes)
    token_stride = shape.heads * row_bytes

    def fetch(page, buffer):
        base = rows.at(page, PAGE * token_stride)
        for (row, chunk), slot in zip(own, slots):
            m.copy_async(slot + buffer, base.at(row, token_stride).at(chunk * 16))

    def fetch_if_there(page, buffer):
        m.when(page.lt(shape.pages), lambda: fetch(page, buffer))
        m.commit_copies()

    first = first + m.index * shape.blocks
    stride = shape.blocks * shape.warpgroups
    fetch_if_there(first, m.Int(0))
    if kind == "value":
        _store_value_mean(m, shape, refs, rotation_head)
    m.wait_copies(0)
    block.sync_block()  # the transform is there

    def page_step(carry):
        page, buffer = carry
        other = shape.tile_bytes - buffer
        fetch_if_there(page + stride, other)
        m.wait_copies(1)
        tile, staged = m.area + buffer, [slot + buffer for slot in slots]
        _quantize_tile(m, shape, refs, kind, tile, staged, page * shape.heads + head, multiplier)
        m.sync_warpgroup()  # the tile and the words may be overwritten
        return [page + stride, other]

    count = (m.Int(shape.pages + stride - 1) - first).max(0).udiv(stride)
    m.loop(count, [first, m.Int(0)], page_step)
    m.wait_copies(0)


def _quantize_tile(
    m: Any,
    shape: QuantizeShape,
    refs: dict,
    kind: str,
    tile: Any,
    slots: list,
    page_head: Any,
    multiplier: Any,
) -> None:
    """Steps 1-8 for one staged page of one head: shared memory at `tile` -> its codes, scales and mean.

    `slots` are the addresses of the chunks that this thread copied; `page_head` = page * heads + head is
    where the result goes. The transform lies at the start of shared memory, the value mean in the group's
    area.
    """
    largest = _clean_own_rows(m, slots)
    if kind == "key":
        _page_mean(m, shape, refs, tile, largest, page_head)
    m.sync_warpgroup()  # cleaned rows and mean are visible

    g, c = m.lane >> 2, m.lane & 3
    y, exponents = _rotate_rows(m, shape, tile, g, c)
    bounds = []
    for half in range(2):
        total = functools.reduce(lambda a, b: a + b, [x.abs() >> fmt.ABS_SHIFT for x in y[half]])
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
    planes = [_code_planes(m, y[half], bounds[half]) for half in range(2)]
    store = _store_key_words if kind == "key" else _store_value_words
    store(m, shape, refs, planes, page_head, g, c)


def _code_planes(m: Any, y: list, bound: Any) -> list[tuple]:
    """Step 8 for entries of one row: per 32 of them a word with the low and one with the high bits of codes.

    code = 3 - (y < -bound) - (y < 0) - (y < bound). The three conditions imply one another, so the code's
    high bit is the opposite of the second, and its low bit the opposite of their parity. Their sign bits are
    collected 32 at a time.
    """
    planes = []
    for start in range(0, len(y), 32):
        below = [m.Int(0)] * 3
        for x in reversed(y[start : start + 32]):
            signs = (x + bound, x, x - bound)
            below = [m.shift_in_sign(word, sign) for word, sign in zip(below, signs)]
        planes.append((below[0] ^ below[1] ^ below[2] ^ 0xFFFFFFFF, below[1] ^ 0xFFFFFFFF))
    return planes


def _store_value_mean(m: Any, shape: QuantizeShape, refs: dict, rotation_head: Any) -> None:
    """The calibrated mean value, cleaned, as float32 in shared memory."""
    words = shape.head_dim // 2

    def store():
        address = m.pointer(refs["value_mean"]).at(rotation_head, 2 * shape.head_dim).at(m.thread, 4)
        word = _clean_word(m, m.load_global(address)[0])
        m.store_shared(m.area + m.thread * 8, [word << 16, word & 0xFFFF0000], shape.mean_offset)

    m.when(m.thread.lt(words), store)


def _clean_word(m: Any, word: Any) -> Any:
    """Step 1 for two bf16: non-finite numbers become 0, large ones +-2**64."""
    out = m.Int(0)
    for shift in (0, 16):
        half = word >> shift
        magnitude, sign = half & 0x7FFF, half & 0x8000
        clean = m.select(magnitude.lt(_INFINITY_BITS), magnitude.min(_CLAMP_BITS) | sign, m.Int(0))
        out = out | (clean << shift)
    return out


def _clean_own_rows(m: Any, slots: list) -> Any:
    """Step 1 on the chunks that this thread copied. Returns its largest magnitudes, two bf16 in a word."""

    def largest():
        words = [w & 0x7FFF7FFF for slot in slots for w in m.load_shared(slot, 4)]
        return functools.reduce(m.max_u16x2, words)

    def clean(_):
        for slot in slots:
            m.store_shared(slot, [_clean_word(m, w) for w in m.load_shared(slot, 4)])
        return [largest()]

    top = largest()
    # Bit 15 of a half: magnitude > 2**64. Rare, hence the branch.
    strange = ((top + (0x7FFF - _CLAMP_BITS) * 0x10001) & 0x80008000).ne(0)
    return m.branch(m.any_lane(strange), [top], clean)[0]


def _page_mean(m: Any, shape: QuantizeShape, refs: dict, tile: Any, largest: Any, page_head: Any) -> None:
    """Step 2: the mean key of the page, to shared memory (float32) and to `key_page_mean`."""
    head_dim, shared = shape.head_dim, m.area
    top = (largest >> 16).max(largest & 0xFFFF)
    for distance in (1, 2, 4, 8, 16):
        top = top.max(m.shuffle_xor(top, distance))
    m.store_shared(shared + m.warp * 4, [top], shape.warp_offset)
    m.sync_warpgroup()
    tops = m.load_shared(shared, 4, shape.warp_offset)
    exponent = (functools.reduce(lambda a, b: a.max(b), tops) >> 7) - 127
    empty = exponent.lt(fmt.MIN_EXPONENT)
    exponent = m.select(empty, m.Int(0), exponent)
    up = ((fmt.MEAN_BITS + 127 - exponent) << 23).as_float()
    down = ((exponent + (127 - fmt.MEAN_BITS - fmt.PAGE_TOKENS_LOG2)) << 23).as_float()

    # Thread = (part of the tokens, pair of channels).
    pairs = head_dim // 2
    parts = THREADS // pairs
    tokens = PAGE // parts
    part, pair = m.thread.udiv(pairs), m.thread.umod(pairs)
    totals = [m.Int(0), m.Int(0)]
    for t in range(tokens):
        row = part * tokens + t
        address = tile + row * (2 * head_dim) + frag.row_chunk(row, pair >> 2) * 16 + (pair & 3) * 4
        word = m.load_shared(address)[0]
        for i, x in enumerate((word << 16, word & 0xFFFF0000)):
            totals[i] = totals[i] + x.as_float().fma(up, 0.5).floor_to_int()
    m.store_shared(shared + m.thread * 8, totals, shape.sum_offset)
    m.sync_warpgroup()

    def finish():
        sums = [
            m.load_shared(shared + m.thread * 8, 2, shape.sum_offset + 8 * pairs * i) for i in range(parts)
        ]
        bits = []
        for i in range(2):
            total = functools.reduce(lambda a, b: a + b, [s[i] for s in sums])
            mean = m.select(empty, m.Float(0.0), total.to_float() * down)
            bits.append(mean.bfloat16_bits())
        m.store_shared(shared + m.thread * 8, [b << 16 for b in bits], shape.mean_offset)
        address = m.pointer(refs["key_page_mean"]).at(page_head, 2 * head_dim).at(m.thread, 4)
        m.store_global(address, [bits[0] | (bits[1] << 16)])

    m.when(m.thread.lt(pairs), finish)


def _rotate_rows(m: Any, shape: QuantizeShape, tile: Any, g: Any, c: Any) -> tuple:
    """Steps 3-6 for the rows frag.row_token(g, half) of this warp: Y [half][2n + b], and their exponents.

    Entry 2n + b of a lane is the output channel frag.rotated_channel(n, 2c + b).
    """
    head_dim = shape.head_dim
    steps = head_dim // 32
    centered: list[list] = [[], []]
    for s in range(steps):
        # This lane's eight channels of the k-step: 32 s + 8 c ...
        mean = [m.load_shared(m.area + c * 32, 4, shape.mean_offset + 128 * s + 16 * i) for i in range(2)]
        mean = [w.as_float() for w in mean[0] + mean[1]]
        for half in range(2):
            row = m.warp * 16 + frag.row_token(g, half)
            address = tile + row * (2 * head_dim) + frag.row_chunk(row, c + 4 * s) * 16
            words = m.load_shared(address, 4)
            x = [v.as_float() for w in words for v in (w << 16, w & 0xFFFF0000)]
            centered[half] += [a - b for a, b in zip(x, mean)]
    high: list[list] = [[], []]
    low: list[list] = [[], []]
    exponents = []
    for half in range(2):
        top = functools.reduce(lambda a, b: a.max(b), [x.abs() for x in centered[half]])
        for distance in (1, 2):
            top = top.max(m.shuffle_xor(top, distance))
        exponent = (top.as_int() >> 23) - 127
        empty = exponent.lt(fmt.MIN_EXPONENT)
        exponent = m.select(empty, m.Int(0), exponent)
        factor = ((fmt.ROW_BITS + 127 - exponent) << 23).as_float()
        factor = m.select(empty, m.Float(0.0), factor)  # every entry of an empty row is 0
        biased = [x.fma(factor, 0.5).floor_biased() for x in centered[half]]
        for i in range(0, len(biased), 4):
            # The bias leaves the low two bytes alone. The low limb is the low byte, read as signed.
            low[half].append(_gather(m, [v.as_int() for v in biased[i : i + 4]], 0))
            high[half].append(_gather(m, [(v + 128.0).as_int() for v in biased[i : i + 4]], 1))
        exponents.append(exponent)

    y: list[list] = [[], []]
    for n in range(head_dim // 8):
        high_high, middle, low_low = ([m.Int(0)] * 4 for _ in range(3))
        for s in range(steps):
            # (high, low) of the transform: words for the channels +0..3 and +4..7 of the k-step
            b = m.load_shared(m.shared_base + m.lane * 16, 4, 512 * (n * steps + s))
            a_high = [high[half][2 * s + i] for i in range(2) for half in range(2)]
            a_low = [low[half][2 * s + i] for i in range(2) for half in range(2)]
            high_high = m.mma_s8(a_high, b[:2], high_high)
            middle = m.mma_s8(a_high, b[2:], middle)
            middle = m.mma_s8(a_low, b[:2], middle)
            low_low = m.mma_s8(a_low, b[2:], low_low)
        for half in range(2):
            for b in range(2):
                i = 2 * half + b
                y[half].append((high_high[i] << fmt.LIMB_BITS) + middle[i] + low_low[i].sar(fmt.LIMB_BITS))
    return y, exponents


def _gather(m: Any, four: list, byte: int) -> Any:
    """Byte `byte` of four integers in one word."""
    pick = byte | (4 + byte) << 4
    return m.gather_bytes(
        m.gather_bytes(four[0], four[1], pick), m.gather_bytes(four[2], four[3], pick), 0x5410
    )


def _store_key_words(
    m: Any, shape: QuantizeShape, refs: dict, planes: list, page_head: Any, g: Any, c: Any
) -> None:
    """Word 4j + c of the two rows: this lane holds its 16 channels."""
    words_per_row = shape.head_dim // fmt.CODES_PER_WORD
    for half in range(2):
        row = page_head * PAGE + m.warp * 16 + frag.row_token(g, half)
        base = m.pointer(refs["key_codes"]).at(row, 4 * words_per_row).at(c, 4)
        for j in range(words_per_row // 4):
            low, high = planes[half][j // 2]
            if j % 2:
                low, high = low >> 16, high >> 16
            m.store_global(base, [frag.interleave_bits(low, high)], 16 * j)


def _store_value_words(
    m: Any, shape: QuantizeShape, refs: dict, planes: list, page_head: Any, g: Any, c: Any
) -> None:
    """Word `warp` of every channel: its 16 codes sit in the eight lanes of a column, two in each.

    A lane holds four planes (low and high bits of two rows) of 32 channels; three exchanges leave it the same
    bits of four channels, of eight rows each.
    """

    def bit(i):
        return (g >> i) & 1

    for chunk, pair in enumerate(zip(*planes)):
        words = [word for row in pair for word in row]  # low and high bits of row g, then of row g + 8
        # Halves, then bytes, then nibbles; the lane of the smaller row keeps the lower part of both.
        for row_bit, lower, upper in ((1, 0x5410, 0x3276), (2, 0x6420, 0x3175)):
            selector = m.select(bit(row_bit).ne(0), m.Int(upper), m.Int(lower))
            other = [m.shuffle_xor(w, 4 << row_bit) for w in words]
            words = [m.gather_bytes(a, b, selector) for a, b in zip(words, other)]
        shift = bit(0) * 4
        for i, word in enumerate(words):
            other = m.shuffle_xor(word, 4)
            smaller, larger = (m.select(bit(0).ne(0), *x) for x in ((other, word), (word, other)))
            words[i] = ((smaller >> shift) & 0x0F0F0F0F) | (((larger >> shift) & 0x0F0F0F0F) << 4)
        start = bit(1) * 16 + bit(2) * 8 + bit(0) * 4
        # Nibble k now holds row k, or k + 8, of four channels; transposed, a nibble is the two rows' codes.
        for i, word in enumerate(frag.transpose_nibbles(words)):
            entry = start + (32 * chunk + i)
            channel = frag.rotated_channel(entry >> 1, c * 2 + (entry & 1))
            address = m.area + channel * 16 + m.warp * 4
            m.when(
                entry.lt(shape.head_dim // 4),
                functools.partial(m.store_shared, address, [word], shape.word_offset),
            )
    m.sync_warpgroup()
    base = m.pointer(refs["value_codes"]).at(page_head, 16 * shape.head_dim)

    def store(channel):
        words = m.load_shared(m.area + channel * 16, 4, shape.word_offset)
        m.store_global(base.at(channel, 16), words)

    for n in range(-(-shape.head_dim // THREADS)):
        channel = m.thread + n * THREADS
        m.when(channel.lt(shape.head_dim), functools.partial(store, channel))


# ------------------------------------------------------------------------------------------ launches


def transform_operand(transform: jax.Array) -> jax.Array:
    """int16 [K or 1, D, D] -> int32 [K or 1, D/8, D/32, 32, 4]: right operands of the row products.

    Lane 4g + c of tile n and k-step s holds (high, high, low, low) limbs of the transform's column
    frag.rotated_channel(n, g) at the rows 32 s + 8 c + (0..3 | 4..7), four signed bytes per word.
    """
    heads, head_dim, _ = transform.shape
    n, g = jnp.arange(head_dim // 8)[:, None], jnp.arange(8)
    columns = frag.rotated_channel(n, g)  # [D/8, 8]
    x = transform.astype(jnp.int32)
    high = (x + 128) >> fmt.LIMB_BITS
    limbs = jnp.stack([high, x - (high << fmt.LIMB_BITS)], 1).astype(jnp.int8)  # [K, 2, row, column]
    limbs = limbs[..., columns.reshape(-1)].reshape(heads, 2, head_dim // 32, 4, 2, 4, head_dim // 8, 8)
    # [K, limb, s, c, word, byte, n, g] -> [K, n, s, g, c, limb, word, byte]
    limbs = limbs.transpose(0, 6, 2, 7, 3, 1, 4, 5)
    return lax.bitcast_convert_type(limbs, jnp.int32).reshape(heads, head_dim // 8, head_dim // 32, 32, 4)


def _argument_names(kinds: tuple[str, ...]) -> tuple[list[str], list[str]]:
    inputs, outputs = [], []
    for kind in kinds:
        inputs += [kind + "_rows", kind + "_transform", kind + "_multiplier"]
        inputs += ["value_mean"] if kind == "value" else []
        outputs += [kind + "_codes", kind + "_scale"] + (["key_page_mean"] if kind == "key" else [])
    return inputs, outputs


@functools.cache
def _quantize_kernel(shape: QuantizeShape) -> Any:
    """The compiled-on-first-use kernel of one shape; arrays in the order of _argument_names."""
    from .registers import Int, MosaicMachine

    inputs, outputs = _argument_names(shape.kinds)

    def body(*refs):
        block = [lax.axis_index(name) for name in ("first", "head", "kind")]
        splat = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(splat,) * 3 + (plgpu.RefType(),) * len(refs), return_type=())
        def emit(_, *operands):
            indices = tuple(Int(x.registers.item()) for x in operands[:3])
            *arrays, shared = operands[3:]
            quantize_body(MosaicMachine(shared), shape, indices, dict(zip(inputs + outputs, arrays)))
            return ()

        emit(*block, *refs)

    shapes = fmt.int2_array_shapes(shape.pages, shape.heads, shape.head_dim)
    kernel = plgpu.kernel(
        body,
        out_type=tuple(jax.ShapeDtypeStruct(shapes[n], fmt.INT2_ARRAYS[n]) for n in outputs),
        grid=(shape.blocks, shape.heads, len(shape.kinds)),
        grid_names=("first", "head", "kind"),
        num_threads=shape.warpgroups,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((shape.shared_bytes // 4,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="oscar_quantize",
    )
    return jax.jit(kernel)  # layers of one shape share one lowering


def quantize_shape(rows: jax.Array, transform: jax.Array, kinds: tuple[str, ...]) -> QuantizeShape:
    """The launch plan for pages [P, 64, K, D]. Raises NotImplementedError."""
    pages, _, heads, head_dim = rows.shape
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim = {head_dim}: the Mosaic quantize kernel serves {HEAD_DIMS}")
    if pages < 1:
        raise NotImplementedError(f"{pages} pages: the Mosaic quantize kernel needs at least one")
    blocks, warpgroups = quantize_plan(pages, heads * len(kinds), head_dim)
    return QuantizeShape(pages, heads, head_dim, transform.shape[0], blocks, warpgroups, kinds)


def _launch(shape: QuantizeShape, arrays: dict) -> dict[str, jax.Array]:
    inputs, outputs = _argument_names(shape.kinds)
    for kind in shape.kinds:
        arrays[kind + "_rows"] = round_to_bfloat16(arrays[kind + "_rows"])
        arrays[kind + "_transform"] = transform_operand(arrays[kind + "_transform"])
    return dict(zip(outputs, _quantize_kernel(shape)(*(arrays[n] for n in inputs))))


def quantize_key_pages(
    rows: jax.Array, transform: jax.Array, multiplier: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes whole pages of keys, centered by their own mean; the bytes of `quantize.quantize_key_pages`.

    rows bf16 [P, 64, K, D] -> words int32 [P, K, 64, D/16], scale bf16 [P, K, 64], page_mean bf16 [P, K, D].
    """
    check_pages(rows, transform, multiplier)
    shape = quantize_shape(rows, transform, ("key",))
    out = _launch(shape, {"key_rows": rows, "key_transform": transform, "key_multiplier": multiplier})
    return out["key_codes"], out["key_scale"], out["key_page_mean"]


def quantize_value_pages(
    rows: jax.Array, transform: jax.Array, multiplier: jax.Array, mean: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Quantizes whole pages of values, centered by the calibrated mean of the rotation set.

    rows bf16 [P, 64, K, D], mean bf16 [K or 1, D] -> words int32 [P, K, D, 4], scale bf16 [P, K, 64].
    """
    check_pages(rows, transform, multiplier)
    _check_mean(mean, transform)
    shape = quantize_shape(rows, transform, ("value",))
    arrays = {"value_rows": rows, "value_transform": transform, "value_multiplier": multiplier}
    out = _launch(shape, {**arrays, "value_mean": mean})
    return out["value_codes"], out["value_scale"]


def quantize_page_pair(key_pages: jax.Array, value_pages: jax.Array, rotation: Any) -> dict[str, jax.Array]:
    """Quantizes pages of keys and values [P, 64, K, D] in one launch: the INT2 arrays, by name."""
    if key_pages.shape != value_pages.shape:
        raise ShapeError(f"key pages {key_pages.shape} and value pages {value_pages.shape} differ")
    check_pages(key_pages, rotation.key_transform, rotation.key_multiplier)
    check_pages(value_pages, rotation.value_transform, rotation.value_multiplier)
    _check_mean(rotation.value_mean, rotation.value_transform)
    names = ("key_transform", "key_multiplier", "value_transform", "value_multiplier", "value_mean")
    arrays = {name: getattr(rotation, name) for name in names}
    shape = quantize_shape(key_pages, rotation.key_transform, ("key", "value"))
    return _launch(shape, {"key_rows": key_pages, "value_rows": value_pages, **arrays})


def _check_mean(mean: jax.Array, transform: jax.Array) -> None:
    if mean.shape != (transform.shape[0], transform.shape[-1]):
        raise ShapeError(f"value mean {mean.shape}, expected {(transform.shape[0], transform.shape[-1])}")
    if mean.dtype != jnp.bfloat16:
        raise DTypeError(f"value mean is {mean.dtype}, expected bfloat16")
