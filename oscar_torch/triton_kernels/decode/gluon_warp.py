"""What one warp of the Gluon decode kernel does by itself: layouts of its registers, loads, operands, stores.

The compiler does not know that warps go their own ways: to it, all warps hold the same tensors, and
`gl.store` lets one warp store what it takes for copies. Hence `store_words`; `gl.store` is for the few
tensors that are dealt out to the warps of a block.

Keys and values are int8 products. Masks turn a word of 16 codes into four A registers of mma.m16n8k32; codes
at odd places carry a factor 4 that the other operand undoes. That is a 15-bit integer in two signed bytes,
high and low in neighbouring columns, so that every lane finds both halves of a sum in its own registers: the
rotated query, and P * scale as a fraction of the page's largest. `movmatrix` turns the latter from
accumulator to operand layout.

Index bits (page of 64 tokens): row r = 8 i + g of a score tile is token 8 g + i, so that lane g owns 8
neighbouring tokens: one 16-byte load of scales, and rows i and i + 4 are neighbouring bytes of a value word.
Lanes that read keys together find them in the same banks; reading other tokens and swapping registers
afterwards costs more.

Gluon has no address of shared memory: loads from it are inline PTX.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ...core import cache_format as fmt

PAGE = gl.constexpr(fmt.PAGE_TOKENS)
QUERY_RANGE = gl.constexpr(32000.0)  # |query| in integer steps: the high byte stays inside -128 .. 127
EMPTY = gl.constexpr(-1.0e30)  # running maximum before the first page
HIDDEN = gl.constexpr(-3.0e38)  # score of a token outside the sliding window
FRACTION_RANGE = gl.constexpr(32500.0)  # P * scale of a page in integer steps; 127.5 * 256 is the end
# A float32 plus 2**23 has its nearest integer in its low bits. With 128 more, the second byte is the high one
# of a split into two signed bytes; the low one is the first byte with its top bit turned.
WHOLE = gl.constexpr(2.0**23 + 128.0)
SIGNED = gl.constexpr(1.5 * 2.0**23)  # likewise where numbers may be negative

AND_03 = gl.constexpr("and.b32 $0, $1, 0x03030303;")
AND_0C = gl.constexpr("and.b32 $0, $1, 0x0C0C0C0C;")

LIMB_BYTES = gl.constexpr(
    "{ .reg .b32 x, y; prmt.b32 x, $1, $2, $5; prmt.b32 y, $3, $4, $5; prmt.b32 $0, x, y, 0x5410; }"
)
FRACTION_BYTES = gl.constexpr("{ .reg .b32 x; prmt.b32 x, $1, $2, 0x4051; xor.b32 $0, x, 0x80800000; }")
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
LOAD_1 = gl.constexpr("ld.shared.b32 $0, [$1];")
LOAD_2 = gl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
LOAD_4 = gl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
LOAD_MATRICES = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];")
STORE_GLOBAL = gl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }"
)
STORE_1 = gl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
STORE_1_IN_FIRST_ROW = gl.constexpr(
    "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.lt.u32 p, lane, 4;"
    " @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }"
)
WARP_BARRIER = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
WARPS = gl.constexpr(4)  # of a block
# All warps hold the same matrices: the axis of the layout that is dealt out to them has size 1.
MMA = gl.constexpr(
    gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS.value, 1, 1], instr_shape=[1, 16, 8])
)
ACC = gl.constexpr(gl.SliceLayout(0, MMA.value))
BYTES_LEFT = gl.constexpr(gl.SliceLayout(0, gl.DotOperandLayout(0, MMA.value, 4)))
BYTES_RIGHT = gl.constexpr(gl.SliceLayout(0, gl.DotOperandLayout(1, MMA.value, 4)))
HALVES_LEFT = gl.constexpr(gl.SliceLayout(0, gl.DotOperandLayout(0, MMA.value, 2)))
HALVES_RIGHT = gl.constexpr(gl.SliceLayout(0, gl.DotOperandLayout(1, MMA.value, 2)))


# ------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def bases(rank: int, *entries: tuple[int, int]) -> list[list[int]]:
    """Basis vectors of a linear layout: (axis, step) pairs; axis -1 is a broadcast bit."""
    return [[step if axis == a else 0 for a in range(rank)] for axis, step in entries]


@gluon.constexpr_function
def linear(shape: list[int], registers, lanes) -> gl.DistributedLinearLayout:
    """The layout of a tensor that every warp holds for itself."""
    rank = len(shape)
    return gl.DistributedLinearLayout(
        reg_bases=bases(rank, *registers), lane_bases=bases(rank, *lanes),
        warp_bases=bases(rank, *bits(-1, WARPS)), block_bases=[], shape=shape,
    )  # fmt: skip


@gluon.constexpr_function
def bits(axis: int, size: int) -> list[tuple[int, int]]:
    """The basis vectors of a whole axis."""
    return [(axis, 1 << n) for n in range(size.bit_length() - 1)]


@gluon.constexpr_function
def lanes(g: int, c: int) -> list[tuple[int, int]]:
    """Lane 4 g + c of the matrix unit, on two axes (-1: every lane holds the same)."""
    return [(c, 1 if c >= 0 else 0), (c, 2 if c >= 0 else 0)] + [(g, n if g >= 0 else 0) for n in (1, 2, 4)]


@gluon.constexpr_function
def key_layout(words: int):
    """[8 g, 8 i, 4 c, words, 4 bytes]: lane (g, c) holds its words of tokens 8 g + i, each four times."""
    return linear([8, 8, 4, words, 4], [*bits(4, 4), *bits(3, words), *bits(1, 8)], lanes(0, 2))


@gluon.constexpr_function
def key_address_layout():
    """[8 g, 8 i, 4 c]."""
    return linear([8, 8, 4], bits(1, 8), lanes(0, 2))


@gluon.constexpr_function
def value_layout(head_dim: int):
    """[D / 8, 8 g, 4 c, 4 bytes]: lane (g, c) holds word c of channels 8 r + g, each four times."""
    return linear([head_dim // 8, 8, 4, 4], [*bits(3, 4), *bits(0, head_dim // 8)], lanes(1, 2))


@gluon.constexpr_function
def weight_layout(padded_group: int):
    """[4 r, 8 g, GP, 4 bytes]: lane (g, c) holds words of heads c, c + 4, ..., each four times."""
    tiles = [(2, 4 << n) for n in range((padded_group // 4).bit_length() - 1)]
    return linear([4, 8, padded_group, 4], [*bits(3, 4), *bits(0, 4), *tiles], lanes(1, 2))


@gluon.constexpr_function
def value_address_layout(head_dim: int):
    """[D / 32, 8 g, 4 c]."""
    return linear([head_dim // 32, 8, 4], bits(0, head_dim // 32), lanes(1, 2))


@gluon.constexpr_function
def mean_layout(head_dim: int):
    """[8 g, D / 32, 4 c, 8]: lane (any g, c) holds 8 neighbouring channels of every block of 32."""
    blocks = head_dim // 32
    return linear([8, blocks, 4, 8], [*bits(3, 8), *bits(1, blocks)], lanes(0, 2))


@gluon.constexpr_function
def scale_layout():
    """[8 g]: lane (g, any c)."""
    return linear([8], [], lanes(0, -1))


@gluon.constexpr_function
def limb_layout(padded_group: int, words: int):
    """[2 GP, 4 c, words, 4 bytes, 4 parts], or parts before bytes: lane (g, c) holds column g (and g + 8)."""
    registers = [*bits(4, 4), *bits(3, 4), *bits(2, words)]
    registers += [(0, 8 << n) for n in range((padded_group // 4).bit_length() - 1)]
    return linear([2 * padded_group, 4, words, 4, 4], registers, lanes(0, 1))


@gluon.constexpr_function
def axis_layout(layout, rank: int, axis: int):
    """The layout of one axis alone."""
    for other in reversed(range(rank)):
        layout = layout if other == axis else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def iota(layout: gl.constexpr, rank: gl.constexpr, axis: gl.constexpr, size: gl.constexpr):
    """0 .. size - 1 along one axis, of size 1 along the others."""
    x = gl.arange(0, size, layout=axis_layout(layout, rank, axis))
    for other in gl.static_range(rank):
        if other != axis:
            x = gl.expand_dims(x, other)
    return x


# ------------------------------------------------------------------------------------------ shared memory


@gluon.jit
def run(asm: gl.constexpr, constraints: gl.constexpr, arguments):
    """Assembly for its effect."""
    gl.inline_asm_elementwise(asm, constraints, arguments, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_word(address):
    return gl.inline_asm_elementwise(LOAD_1, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_words(address):
    """Shared memory -> four neighbouring words."""
    return gl.inline_asm_elementwise(
        LOAD_4,
        "=r,=r,=r,=r,r",
        [address],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def join4(a, b, c, d):
    """[...] x 4 -> [..., 2, 2], in order."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def load_keys(address, words: gl.constexpr):
    """Address of a lane's first word of 64 tokens [8 g, 8 i, 4 c] -> int32 [8 g, 8 i, 4 c, words]."""
    if words == 1:
        x = load_word(address).reshape([8, 8, 4, 1])
    elif words == 2:
        a, b = gl.inline_asm_elementwise(
            LOAD_2, "=r,=r,r", [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
        )
        x = gl.join(a, b)
    else:
        a, b, c, d = load_words(address)
        x = join4(a, b, c, d).reshape([8, 8, 4, 4])
    return gl.convert_layout(x, gl.SliceLayout(4, key_layout(words)), assert_trivial=True)


@gluon.jit
def load_values(address, D: gl.constexpr):
    """Address of the matrix row of every lane [D / 32, 8 g, 4 c] -> value words int32 [D / 8, 8 g, 4 c]."""
    a, b, c, d = gl.inline_asm_elementwise(
        LOAD_MATRICES, "=r,=r,=r,=r,r", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip
    x = join4(a, b, c, d).permute((0, 3, 4, 1, 2)).reshape([D // 8, 8, 4])
    return gl.convert_layout(x, gl.SliceLayout(3, value_layout(D)), assert_trivial=True)


@gluon.jit
def load_mean(address, D: gl.constexpr):
    """Address of 8 channels [8 g, D / 32, 4 c, 8] -> bf16 [16, D / 2], the left operand of q . mean.

    Contraction index 16 s + 8 x + 2 c + b of row 8 h + g (any g) is channel 32 s + 8 c + 4 x + 2 h + b.
    """
    x = gl.inline_asm_elementwise(
        LOAD_4, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [address], dtype=gl.bfloat16, is_pure=False, pack=8
    )
    x = x.reshape([8, D // 32, 4, 2, 2, 2]).permute((4, 0, 1, 3, 2, 5)).reshape([16, D // 2])
    return gl.convert_layout(x, HALVES_LEFT, assert_trivial=True)


@gluon.jit
def scales(a, b, c, d, layout: gl.constexpr):
    """Four words [8 g] of bf16 pairs -> float32 [8 i, 8 g]."""
    words = join4(a, b, c, d)
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    x = gl.join(even, odd).reshape([8, 8]).permute((1, 0))
    return gl.convert_layout(x, layout, assert_trivial=True)


# ------------------------------------------------------------------------------------------ operands


@gluon.jit
def first_of_pair(x):
    """[..., 2] -> [...]"""
    a, _b = gl.split(x)
    return a


@gluon.jit
def second_of_pair(x):
    """[..., 2] -> [...]"""
    _a, b = gl.split(x)
    return b


@gluon.jit
def masked_bytes(asm: gl.constexpr, word):
    """Four copies of a word, int32 [..., 4] -> its masked bytes, int8 [..., 4], by one instruction."""
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [word], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def mma(a, b, acc):
    """acc + a @ b, each warp its own."""
    out = mma_v2(gl.expand_dims(a, 0), gl.expand_dims(b, 0), gl.expand_dims(acc, 0))
    return gl.convert_layout(out.reshape(acc.shape), ACC, assert_trivial=True)


@gluon.jit
def unpack(word):
    """Four copies of words int32 [a, b, c, d, 4] -> int8 [a, b, c, d, 4 bytes, 2, 2] at register 2 y + x.

    Byte n of register r is code r + 4 n of the word, times 4 where r is odd.
    """
    high = word >> 4
    low_parts = gl.join(masked_bytes(AND_03, word), masked_bytes(AND_0C, word))
    high_parts = gl.join(masked_bytes(AND_03, high), masked_bytes(AND_0C, high))
    return gl.join(low_parts, high_parts)


@gluon.jit
def key_operand(words, D: gl.constexpr):
    """Key words int32 [8 g, 8 i, 4 c, D / 64] -> int8 [64, D], the left operand of the scores.

    Contraction index ((part * D/64 + j) * 4 + c) * 4 + byte: channel 16 (D/64 * c + j) + part + 4 byte, times
    4 for odd parts.
    """
    codes = unpack(gl.expand_dims(words, 4).broadcast_to([8, 8, 4, D // 64, 4]))
    codes = codes.permute((1, 0, 6, 5, 3, 2, 4)).reshape([64, D])
    return gl.convert_layout(codes, BYTES_LEFT, assert_trivial=True)


@gluon.jit
def value_operand(words, D: gl.constexpr):
    """Value words int32 [D / 8, 8 g, 4 c] -> int8 [D, 64], the left operand of the outputs.

    Column 16 r + 4 c + byte: token 16 c + r + 4 byte, times 4 for odd r.
    """
    codes = unpack(gl.expand_dims(words, 3).broadcast_to([D // 8, 8, 4, 4]))
    codes = codes.permute((0, 1, 5, 4, 2, 3)).reshape([D, 64])
    return gl.convert_layout(codes, BYTES_LEFT, assert_trivial=True)


@gluon.jit
def weight_operand(fixed, GP: gl.constexpr):
    """P in integer steps, as float32 plus WHOLE [8 i, 8 g, GP] -> int8 [64, 2 GP], for P @ V.

    Rows are the columns of `value_operand`; columns 2 h and 2 h + 1 are the high and the low byte of head h.
    Rows i and i + 4 become neighbouring bytes; then movmatrix, which turns halves across the warp, makes an
    operand.
    """
    first, second = gl.split(fixed.to(gl.int32, bitcast=True).reshape([2, 4, 8, GP]).permute((1, 2, 3, 0)))
    word = gl.inline_asm_elementwise(
        FRACTION_BYTES, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )
    word = gl.convert_layout(word, gl.SliceLayout(3, weight_layout(GP)), assert_trivial=True)
    word = gl.expand_dims(word, 3).broadcast_to([4, 8, GP, 4])
    x = gl.inline_asm_elementwise(TRANSPOSE, "=r,r,r,r,r", [word], dtype=gl.int8, is_pure=False, pack=4)
    x = x.reshape([4, 8, GP // 4, 4, 4]).permute((0, 3, 4, 2, 1)).reshape([64, 2 * GP])
    return gl.convert_layout(x, BYTES_RIGHT, assert_trivial=True)


@gluon.jit
def whole_sums(sums, ROWS: gl.constexpr, GP: gl.constexpr):
    """Sums of high and low bytes int32 [ROWS, 2 GP] -> [ROWS, GP]."""
    high, low = gl.split(sums.reshape([ROWS, GP, 2]))
    return (high << 8) + low


@gluon.jit
def transpose_operand(p, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """p 16-bit [ROWS, COLUMNS] in accumulator layout -> the same matrix as a right operand.

    movmatrix transposes 8 x 8 blocks across the warp; renaming the axes of the blocks undoes it.
    """
    p = gl.convert_layout(p, ACC, assert_trivial=True)
    p = gl.inline_asm_elementwise(TRANSPOSE, "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2)
    p = p.reshape([ROWS // 8, 8, COLUMNS // 8, 8]).permute((0, 3, 2, 1)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(p, HALVES_RIGHT, assert_trivial=True)


@gluon.jit
def fixed_query(rotated_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr):
    """Rotated queries float32 [G, D] in memory -> fixed point in two bytes.

    Returns int8 [D, 2 GP] (columns 2 h and 2 h + 1: high and low byte of head h; order of `key_operand`),
    and per column the largest |query| and the sum of the integers.
    """
    words: gl.constexpr = D // 64
    layout: gl.constexpr = limb_layout(GP, words)
    n = iota(layout, 5, 0, 2 * GP)
    c = iota(layout, 5, 1, 4)
    j = iota(layout, 5, 2, words)
    byte = iota(layout, 5, 3, 4)
    part = iota(layout, 5, 4, 4)
    offset = (n >> 1) * D + 16 * (words * c + j) + 4 * byte + part
    x = gl.load(rotated_ptr + offset, mask=((n >> 1) < G) & (offset >= 0), other=0.0)
    top = gl.maximum(gl.max(gl.abs(x).reshape([2 * GP, D]), 1), 1.0e-30)
    steps = gl.convert_layout(QUERY_RANGE / top, axis_layout(layout, 5, 0))
    for axis in gl.static_range(1, 5):
        steps = gl.expand_dims(steps, axis)
    weight = gl.where((part & 1) == 1, 4, 1)
    # Of the low bits of a sum with SIGNED the first byte is the low one; with 128 more, the second the high.
    start = gl.where((n & 1) == 1, SIGNED, SIGNED + 128.0)
    fixed = (x * (steps / weight.to(gl.float32)) + start).to(gl.int32, bitcast=True)
    total = gl.sum((fixed * weight).reshape([2 * GP, D]), 1)
    bias = (start.to(gl.int32, bitcast=True) * (5 * D // 2)).reshape([2 * GP])  # half the weights are 4
    total -= gl.convert_layout(bias, total.type.layout)
    fixed = gl.convert_layout(fixed.permute((0, 1, 2, 4, 3)), layout)
    selector = iota(layout, 5, 0, 2 * GP)
    selector = gl.where((selector & 1) == 1, 0x40, 0x51).broadcast_to(fixed.shape)
    limb = gl.inline_asm_elementwise(
        LIMB_BYTES, "=r,r,r,r,r,r,r,r,r", [fixed, selector], dtype=gl.int8, is_pure=True, pack=4
    )
    limb = limb.permute((3, 2, 1, 4, 0)).reshape([D, 2 * GP])
    return gl.convert_layout(limb, BYTES_RIGHT, assert_trivial=True), top, total


@gluon.jit
def per_head(x, GP: gl.constexpr, layout: gl.constexpr):
    """A statistic of columns [2 GP] -> of heads [GP]."""
    x = gl.convert_layout(x, gl.SliceLayout(0, ACC)).reshape([GP, 2])
    return gl.convert_layout(first_of_pair(x), layout)


@gluon.jit
def store_words(pointer, x, mask):
    """float32 to global memory, by every warp: the compiler would let the first one store for all."""
    run(STORE_GLOBAL, "=r,l,r,r", (pointer.to(gl.int64), x.to(gl.int32, bitcast=True), mask.to(gl.int32)))


@gluon.jit
def store_partial(
    o, m, l, segment, channel, o_ptr, lse_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr
):
    """o float32 [D, GP] already divided by l; m, l [GP]; channel [D] names the rows of o."""
    layout: gl.constexpr = o.type.layout
    head = gl.arange(0, GP, layout=gl.SliceLayout(0, layout))
    rows = segment * G + head
    place = o_ptr + rows[None, :].to(gl.int64) * D + channel[:, None]
    store_words(place, o, (head < G)[None, :] & (channel >= 0)[:, None])
    lse = gl.where(l > 0, m + gl.log2(gl.where(l > 0, l, 1.0)), float("-inf"))
    store_words(lse_ptr + rows, lse, head < G)
