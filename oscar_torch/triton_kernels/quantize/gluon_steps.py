"""What the Gluon page quantizers share: numbers of the format in a lane's registers, and words of codes."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from .steps import EMPTY_BITS, LIMIT_BITS, MEAN_DOWN, MEAN_UP, PAGE, PAGE_BIAS, ROW_UP

BF16_LIMIT = gl.constexpr(LIMIT_BITS.value >> 16)
BF16_INFINITY = gl.constexpr(0x7F80)
FLOOR = gl.constexpr(1.5 * 2.0**23)  # its unit is 1: x + it, rounded down, has floor(x) in its low bits
ALL_NAN = gl.constexpr(PropagateNan.ALL)
MAX_HALVES = gl.constexpr("max.u16x2 $0, $1, $2;")
ADD_DOWN = gl.constexpr("add.rm.f32 $0, $1, $2;")

# a ... d are integers + 128: the upper byte is the high limb, the lower one the low limb + 128.
PACK_LIMBS = (
    " prmt.b32 a, a, b, 0x5140; prmt.b32 c, c, d, 0x5140; prmt.b32 $0, a, c, 0x7632;"
    " prmt.b32 $1, a, c, 0x5410; xor.b32 $1, $1, 0x80808080; }"
)
LIMBS = gl.constexpr(
    "{ .reg .b32 a, b, c, d;"
    + "".join(f" add.s32 {x}, ${2 + n}, 128;" for n, x in enumerate("abcd"))
    + PACK_LIMBS
)
# Of floor(z * factor + 0.5).
ROW_LIMBS = gl.constexpr(
    "{ .reg .b32 a, b, c, d;"
    + "".join(
        f" fma.rm.f32 {x}, ${2 + n}, ${6 + n}, 0f3F000000; add.rm.f32 {x}, {x}, 0f4B400080;"
        for n, x in enumerate("abcd")
    )
    + PACK_LIMBS
)


@gluon.constexpr_function
def _sum_assembly() -> str:
    """Sum of floor(|y| / 8) of $1 ... $16: numbers from 2**26 on have the unit 8; four y stay below 2**27."""
    lines = ["{ .reg .b32 t, a;", f"mov.b32 $0, {-4 * 0x4C800000 % 2**32:#x};"]
    for n in range(1, 17, 4):
        lines.append("mov.b32 a, 0x4C800000;")
        lines += [f"abs.f32 t, ${i}; add.rm.f32 a, a, t;" for i in range(n, n + 4)]
        lines.append("add.s32 $0, $0, a;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _code_assembly(bounds: int) -> str:
    """A word of 16 codes: of $1 ... $16, in turn with each of 1 or 2 bounds from $17 on.

    Every entry shifts in two signs: of y and of |y + 1/2| - bound, which says -bound <= y < bound. Rounded
    towards zero, the sum is right where y is so large that its unit is 1.
    """
    lines = ["{ .reg .b32 t, w;", "mov.b32 w, 0;"]
    for i in reversed(range(16)):
        y, bound = f"${1 + i}", f"${17 + i % bounds}"
        lines.append(f"shf.l.wrap.b32 w, {y}, w, 1; add.rz.f32 t, {y}, 0f3F000000; abs.f32 t, t;")
        lines.append(f"sub.f32 t, t, {bound}; shf.l.wrap.b32 w, t, w, 1;")
    # Odd bits: y < 0, even bits: small. Code: not negative; large where positive, small where negative.
    lines.append("not.b32 t, w; and.b32 t, t, 0xAAAAAAAA; shr.u32 $0, t, 1; xor.b32 w, w, $0;")
    return "\n".join([*lines, "and.b32 w, w, 0x55555555; or.b32 $0, w, t; }"])


SUM = gl.constexpr(_sum_assembly())
KEY_CODES = gl.constexpr(_code_assembly(1))
VALUE_CODES = gl.constexpr(_code_assembly(2))
# From the codes of a lane's two tokens for 8 channels to those of 16 tokens for one channel: lane g keeps
# the g-th channel, nibbles in the order of lanes. $2 ... $5: selectors, kept nibbles and turn of the lane.
EXCHANGE = gl.constexpr(
    "{ .reg .b32 w, o;"
    " shfl.sync.bfly.b32 o, $1, 16, 31, -1; prmt.b32 w, $1, o, $2;"
    " shfl.sync.bfly.b32 o, w, 8, 31, -1; prmt.b32 w, w, o, $3;"
    " shfl.sync.bfly.b32 o, w, 4, 31, -1; shf.l.wrap.b32 o, o, o, $5;"
    " lop3.b32 $0, $4, w, o, 0xCA; }"
)


# ------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def span(axis: int, low: int, high: int) -> list[tuple[int, int]]:
    """Index bits low, 2 low, ... below high of an axis."""
    return [(axis, 1 << n) for n in range(low.bit_length() - 1, high.bit_length() - 1)]


@gluon.constexpr_function
def log2(n: int) -> int:
    return n.bit_length() - 1


@gluon.constexpr_function
def linear(shape: list[int], registers, lanes, warps) -> gl.DistributedLinearLayout:
    bases = [
        [[step if axis == a else 0 for a in range(len(shape))] for axis, step in e]
        for e in (registers, lanes, warps)
    ]
    return gl.DistributedLinearLayout(*bases, block_bases=[], shape=shape)


# ------------------------------------------------------------------------------------------ numbers


@gluon.jit
def power_of_two(biased_exponent):
    return (biased_exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def floats(pairs):
    """int32 pairs of bf16 [64, C] -> float32 [64, 2 C]."""
    both = gl.join(pairs << 16, pairs & -65536)
    return both.reshape([PAGE, 2 * pairs.shape[1]]).to(gl.float32, bitcast=True)


@gluon.jit
def max_halves(a, b):
    return gl.inline_asm_elementwise(MAX_HALVES, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def max_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=ALL_NAN)


@gluon.jit
def clean(bits):
    """bf16 in the low half of int32, other bits 0: NaN and infinities 0, finite values within +-2**64."""
    magnitude = bits & 0x7FFF
    clamped = gl.where(magnitude > BF16_LIMIT, (bits ^ magnitude) | BF16_LIMIT, bits)
    return gl.where(magnitude >= BF16_INFINITY, 0, clamped)


@gluon.jit
def clean_pairs(pairs):
    return clean(pairs & 0xFFFF) | (clean((pairs >> 16) & 0xFFFF) << 16)


@gluon.jit
def _split2(x):
    """[A, B, 2 n] -> x[..., 0::2], x[..., 1::2]."""
    return gl.split(x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2]))


@gluon.jit
def _split4(x):
    """[A, B, 4 n] -> x[..., 0::4], x[..., 1::4], x[..., 2::4], x[..., 3::4]."""
    a, b = gl.split(x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    a, c = gl.split(a.reshape([x.shape[0], x.shape[1], x.shape[2] // 4, 2]))
    b, d = gl.split(b.reshape([x.shape[0], x.shape[1], x.shape[2] // 4, 2]))
    return a, b, c, d


@gluon.jit
def split8(x):
    """[A, B, 8 n] -> x[..., 0::8], x[..., 1::8], ..."""
    a, b, c, d = _split4(x)
    a0, a1 = _split2(a)
    b0, b1 = _split2(b)
    c0, c1 = _split2(c)
    d0, d1 = _split2(d)
    return a0, b0, c0, d0, a1, b1, c1, d1


@gluon.jit
def split16(x):
    """[A, B, 16 n] -> x[..., 0::16], x[..., 1::16], ..."""
    a, b, c, d = _split4(x)
    a0, a1, a2, a3 = _split4(a)
    b0, b1, b2, b3 = _split4(b)
    c0, c1, c2, c3 = _split4(c)
    d0, d1, d2, d3 = _split4(d)
    return a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3


# ------------------------------------------------------------------------------------------ steps


@gluon.jit
def summands(pairs, top):
    """Step 2: clean pairs of a page of keys, bits of its largest magnitude -> floors + FLOOR, int32."""
    exponent = gl.where((top << 16) < EMPTY_BITS, 0, (top >> 7) - 127)
    x = gl.fma(floats(pairs), power_of_two(MEAN_UP - exponent), 0.5)
    return gl.inline_asm_elementwise(ADD_DOWN, "=r,r,r", [x, FLOOR], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def mean_of_sums(sums, top):
    """Step 2: sums of `summands` of 64 tokens -> the mean key, bf16."""
    empty = (top << 16) < EMPTY_BITS
    exponent = gl.where(empty, 0, (top >> 7) - 127)
    mean = (sums - PAGE_BIAS).to(gl.float32) * power_of_two(exponent + MEAN_DOWN)
    return gl.where(empty, 0.0, mean).to(gl.bfloat16)


@gluon.jit
def centered(pairs, mean):
    """Rows less a mean -> (z float32 [64, D], bits of the largest |z| of every row)."""
    x = floats(pairs)
    z = x - mean.load(gl.SliceLayout(0, x.type.layout))[None, :]
    return z, gl.reduce(gl.abs(z), 1, max_or_nan).to(gl.int32, bitcast=True)


@gluon.jit
def split_rows(z, top):
    """Steps 3 to 5 -> high limbs int8 [64, D], low limbs, exponent [64 tokens]."""
    empty = top < EMPTY_BITS
    exponent = gl.where(empty, 0, (top >> 23) - 127)
    factor = gl.where(empty, 0.0, power_of_two(ROW_UP - exponent))
    high, low = gl.inline_asm_elementwise(
        ROW_LIMBS,
        "=r,=r,r,r,r,r,r,r,r,r",
        [z, factor[:, None]],
        dtype=(gl.int8, gl.int8),
        is_pure=True,
        pack=4,
    )
    return high, low, exponent


@gluon.jit
def sum_rows(y):
    """Sums of floor(|Y| / 8) over 16 entries of a lane: y [64, C, N] -> [64, C, N / 16]."""
    return gl.inline_asm_elementwise(SUM, "=r" + ",r" * 16, split16(y), dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def key_words(y, bound):
    """A lane has the 16 channels of a word: y [64 tokens, C, N] -> words [64 tokens, C, N / 16]."""
    entries = split16(y)
    bounds = (spread(bound, entries[0]),)
    return gl.inline_asm_elementwise(
        KEY_CODES, "=r" + ",r" * 17, entries + bounds,
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def value_words(y, bound):
    """The 16 codes of a word lie in eight lanes, two in each -> words [8 warp + g, C, N / 8].

    y [64 tokens, C, N]: entry 8 w + 2 i + b is column 8 (4 w + i) + 2 c + b of a product. The word is number
    `warp` of channel 32 w + 8 c + g of these columns.
    """
    y = y.reshape([32, 2, y.shape[1], y.shape[2]]).permute((0, 2, 3, 1))
    y = y.reshape([32, y.shape[1], 2 * y.shape[2]])
    even, odd = gl.split(bound.reshape([32, 2]))
    entries = split16(y)
    bounds = (spread(even, entries[0]), spread(odd, entries[0]))
    words = gl.inline_asm_elementwise(
        VALUE_CODES, "=r" + ",r" * 18, entries + bounds,
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return exchange_tokens(words)


@gluon.jit
def exchange_tokens(words):
    """Codes of a lane's two tokens for 8 channels -> of 16 tokens for one channel: [8 warp + g, C, N]."""
    g = index_along(words, 0) % 8
    first = gl.where((g & 4) != 0, 0x3276, 0x5410)
    second = gl.where((g & 2) != 0, 0x3715, 0x6240)
    kept = gl.where((g & 1) != 0, -0x0F0F0F10, 0x0F0F0F0F)
    turn = gl.where((g & 1) != 0, 28, 4)
    return gl.inline_asm_elementwise(
        EXCHANGE, "=r,r,r,r,r,r", [words, first, second, kept, turn], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def spread(x, like):
    """A number per row, laid out to meet `like` [rows, 4, n]."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, like.type.layout))
    return gl.convert_layout(x, layout)[:, None, None]


@gluon.jit
def index_along(x, axis: gl.constexpr):
    """0 .. size - 1 along one axis of x [A, B, C], of size 1 along the others."""
    if axis == 0:
        i = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, gl.SliceLayout(2, x.type.layout)))
        return i[:, None, None]
    elif axis == 1:
        i = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, x.type.layout)))
        return i[None, :, None]
    else:
        i = gl.arange(0, x.shape[2], layout=gl.SliceLayout(0, gl.SliceLayout(1, x.type.layout)))
        return i[None, None, :]
