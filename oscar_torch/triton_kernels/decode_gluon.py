"""One-token attention on Hopper, in Gluon: a ring of pages in shared memory, codes in registers.

Stage 1 of `decode_triton.py`, which rotates the query before it and merges after it. Every warp is a program
of its own: it reads an equal share of all pages, copies them in bulk to a private ring (one barrier per
stage), keeps an online softmax in registers, and exchanges nothing with other warps.

Keys: int8 products. Masks turn a word of 16 codes into four A registers of mma.m16n8k32; codes at odd places
carry a factor 4 that the query undoes. The query is a 15-bit integer in two signed bytes; its high and low
byte are neighbouring columns, so every lane finds both halves of its score in its own registers. The page's
mean key is one more product, in bf16.

Values: fp16 products. `word & 0x00030003` read as two fp16 is code * 2**-24, codes at bits 2 i carry 4**i,
which the probabilities undo; `movmatrix` turns them from accumulator to operand layout.

Index bits (page of 64 tokens): row r = 8 i + g of a score tile is token 8 g + i, so that lane g owns 8
neighbouring tokens (one 16-byte load of scales) and code i of every value word meets row block i. Lane g
reads token 8 g + (i ^ turn) so that lanes hit different banks; registers are swapped afterwards.

Gluon has no bulk copy of plain bytes and no address of shared memory: both are inline PTX. The ring is the
only allocation of the kernel, so it lies where `global_smem` points.
"""

import dataclasses

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import cache_format as fmt
from . import decode_triton as plain
from .quantize_triton import check_device

HEAD_DIMS = (64, 128, 256)
HOPPER = 9
PAGE = gl.constexpr(fmt.PAGE_TOKENS)
QUERY_RANGE = gl.constexpr(32000.0)  # |query| in integer steps: the high byte stays inside -128 .. 127
EMPTY = gl.constexpr(-1.0e30)  # running maximum before the first page
HIDDEN = gl.constexpr(-3.0e38)  # score of a token outside the sliding window
# The maximum only moves when a score exceeds it by SLACK (base 2): most pages skip the rescaling. P reaches
# 2**5, a value scale 2 in units of the largest power of two so far: P * scale * 2**9 < 2**15 fits fp16.
SLACK = gl.constexpr(5.0)
P_UNIT = gl.constexpr(2.0**9)
CODE_UNIT = gl.constexpr(2.0**24)  # a code read as an fp16 subnormal is code * 2**-24

AND_03 = gl.constexpr("and.b32 $0, $1, 0x03030303;")
AND_0C = gl.constexpr("and.b32 $0, $1, 0x0C0C0C0C;")
HALF_0 = gl.constexpr("and.b32 $0, $1, 0x00030003;")
HALF_1 = gl.constexpr("and.b32 $0, $1, 0x000C000C;")
HALF_2 = gl.constexpr("and.b32 $0, $1, 0x00300030;")
HALF_3 = gl.constexpr("and.b32 $0, $1, 0x00C000C0;")
HALF_4 = gl.constexpr("and.b32 $0, $1, 0x03000300;")
PACK_HALVES = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
LOAD_1 = gl.constexpr("ld.shared.b32 $0, [$1];")
LOAD_2 = gl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
LOAD_4 = gl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
LOAD_MATRICES = gl.constexpr("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];")
MAX_HALVES = gl.constexpr("max.u16x2 $0, $1, $2;")
RING = gl.constexpr("mov.u32 $0, global_smem;")
START_BARRIER = gl.constexpr(
    "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p mbarrier.init.shared::cta.b64 [$1], 1; mov.b32 $0, 0; }"
)
PUBLISH_BARRIERS = gl.constexpr(
    "fence.mbarrier_init.release.cluster; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"
)
PREFETCH = gl.constexpr(
    "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p cp.async.bulk.prefetch.L2.global [$1], $3;"
    " @p cp.async.bulk.prefetch.L2.global [$2], $3; mov.b32 $0, 0; }"
)
WAIT_BARRIER = gl.constexpr(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra again;"
    " mov.b32 $0, 0; }"
)
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
BYTES_LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
BYTES_RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
HALVES_LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
HALVES_RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How one head_dim runs: programs (warps) per multiprocessor, pages in a ring, work of one BF16 page.

    programs: for up to 4 query heads per key/value head; more heads need more registers. window_pages: in
    INT2 pages.
    """

    programs: int
    stages: int
    window_pages: int = 8

    def resident(self, padded_group: int) -> int:
        """Programs per multiprocessor for 4, 8 or 16 heads."""
        return self.programs * {4: 4, 8: 3, 16: 2}[padded_group] // 4

    def registers(self, padded_group: int) -> int:
        """Registers per thread that so many programs leave each other."""
        return min(255, 65536 // (32 * self.resident(padded_group)) // 8 * 8)


# 128 is the fastest of eight settings on an H200 at batch 8 (147 us in all; 15 programs with rings of 3 pages
# take 153: they ask for more than the memory delivers), 1 and 32; the other head_dims are not compared.
TUNING = {
    64: Tuning(programs=16, stages=3),
    128: Tuning(programs=16, stages=2),
    256: Tuning(programs=8, stages=3),
}


# ------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def _bases(rank: int, *entries: tuple[int, int]) -> list[list[int]]:
    """Basis vectors of a linear layout: (axis, step) pairs; axis -1 is a broadcast bit."""
    return [[step if axis == a else 0 for a in range(rank)] for axis, step in entries]


@gluon.constexpr_function
def _linear(shape: list[int], registers, lanes) -> gl.DistributedLinearLayout:
    rank = len(shape)
    return gl.DistributedLinearLayout(
        reg_bases=_bases(rank, *registers), lane_bases=_bases(rank, *lanes), warp_bases=[], block_bases=[],
        shape=shape,
    )  # fmt: skip


@gluon.constexpr_function
def _bits(axis: int, size: int) -> list[tuple[int, int]]:
    """The basis vectors of a whole axis."""
    return [(axis, 1 << n) for n in range(size.bit_length() - 1)]


@gluon.constexpr_function
def _lanes(g: int, c: int) -> list[tuple[int, int]]:
    """Lane 4 g + c of the matrix unit, on two axes (-1: every lane holds the same)."""
    return [(c, 1 if c >= 0 else 0), (c, 2 if c >= 0 else 0)] + [(g, n if g >= 0 else 0) for n in (1, 2, 4)]


@gluon.constexpr_function
def _key_layout(words: int):
    """[8 g, 8 i, 4 c, words, 4 bytes]: lane (g, c) holds its words of tokens 8 g + i, each four times."""
    return _linear([8, 8, 4, words, 4], [*_bits(4, 4), *_bits(3, words), *_bits(1, 8)], _lanes(0, 2))


@gluon.constexpr_function
def _key_address_layout():
    """[8 g, 8 i, 4 c]."""
    return _linear([8, 8, 4], _bits(1, 8), _lanes(0, 2))


@gluon.constexpr_function
def _value_layout(head_dim: int):
    """[D / 8, 8 g, 4 c, 2]: lane (g, c) holds word c of channels 8 r + g, each twice."""
    return _linear([head_dim // 8, 8, 4, 2], [*_bits(3, 2), *_bits(0, head_dim // 8)], _lanes(1, 2))


@gluon.constexpr_function
def _value_address_layout(head_dim: int):
    """[D / 32, 8 g, 4 c]."""
    return _linear([head_dim // 32, 8, 4], _bits(0, head_dim // 32), _lanes(1, 2))


@gluon.constexpr_function
def _mean_layout(head_dim: int):
    """[8 g, D / 32, 4 c, 8]: lane (any g, c) holds 8 neighbouring channels of every block of 32."""
    blocks = head_dim // 32
    return _linear([8, blocks, 4, 8], [*_bits(3, 8), *_bits(1, blocks)], _lanes(0, 2))


@gluon.constexpr_function
def _scale_layout():
    """[8 g]: lane (g, any c)."""
    return _linear([8], [], _lanes(0, -1))


@gluon.constexpr_function
def _limb_layout(padded_group: int, words: int):
    """[2 GP, 4 c, words, 4 bytes, 4 parts]: lane (g, c) holds its words' channels of column g (and g + 8)."""
    registers = [*_bits(4, 4), *_bits(3, 4), *_bits(2, words)]
    registers += [(0, 8 << n) for n in range((padded_group // 4).bit_length() - 1)]
    return _linear([2 * padded_group, 4, words, 4, 4], registers, _lanes(0, 1))


@gluon.constexpr_function
def _window_key_layout(head_dim: int):
    """[16 tokens, D / 32, 4 c, 8]: lane (g, c) holds 8 neighbouring channels of tokens g and g + 8."""
    blocks = _bits(1, head_dim // 32)
    return _linear([16, head_dim // 32, 4, 8], [*_bits(3, 8), (0, 8), *blocks], _lanes(0, 2))


@gluon.constexpr_function
def _window_value_layout(head_dim: int):
    """[16 tokens, D / 64, 8 g, 8]: lane (g, c) holds 8 neighbouring channels of tokens 2 c, 2 c + 1, ..."""
    registers = [*_bits(3, 8), (0, 1), (0, 8), *_bits(1, head_dim // 64)]
    return _linear([16, head_dim // 64, 8, 8], registers, [(0, 2), (0, 4), (2, 1), (2, 2), (2, 4)])


@gluon.constexpr_function
def _axis_layout(layout, rank: int, axis: int):
    """The layout of one axis alone."""
    for other in reversed(range(rank)):
        layout = layout if other == axis else gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _iota(layout: gl.constexpr, rank: gl.constexpr, axis: gl.constexpr, size: gl.constexpr):
    """0 .. size - 1 along one axis, of size 1 along the others."""
    x = gl.arange(0, size, layout=_axis_layout(layout, rank, axis))
    for other in gl.static_range(rank):
        if other != axis:
            x = gl.expand_dims(x, other)
    return x


# ------------------------------------------------------------------------------------------ the ring


# One staged page: key codes | value codes | page mean | key scale | value scale.
_stage_bytes = gluon.constexpr_function(fmt.int2_page_bytes)


@gluon.constexpr_function
def ring_bytes(head_dim: int, stages: int) -> int:
    """Shared memory of a program, a multiple of 128: stages, then their barriers."""
    return -(-stages * (_stage_bytes(head_dim) + 8) // 128) * 128


@gluon.constexpr_function
def _fetch_assembly(head_dim: int) -> str:
    """Elected lane: five bulk copies of one head's page, whose bytes the stage's barrier counts."""
    sizes = [16 * head_dim, 16 * head_dim, 2 * head_dim, 128, 128]
    lines = ["{ .reg .pred p;", "bar.warp.sync 0xffffffff;", "fence.proxy.async.shared::cta;"]
    lines += ["elect.sync _|p, 0xffffffff;", "setp.ne.and.b32 p, $8, 0, p;"]
    lines += [f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$7], {sum(sizes)};"]
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    for n, size in enumerate(sizes):
        lines.append(f"@p {copy} [$6 + {sum(sizes[:n])}], [${n + 1}], {size}, [$7];")
    return "\n".join([*lines, "mov.b32 $0, 0; }"])


@gluon.jit
def _run(asm: gl.constexpr, constraints: gl.constexpr, arguments):
    """Assembly for its effect."""
    gl.inline_asm_elementwise(asm, constraints, arguments, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(
    key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr, physical, stage, barrier,
    wanted, D: gl.constexpr,
):  # fmt: skip
    """Asks for a head's page; every lane has read what the stage held."""
    sources = [
        (key_codes_ptr + physical * (4 * D)).to(gl.int64),
        (value_codes_ptr + physical * (4 * D)).to(gl.int64),
        (mean_ptr + physical * D).to(gl.int64), (key_scale_ptr + physical * PAGE).to(gl.int64),
        (value_scale_ptr + physical * PAGE).to(gl.int64), stage, barrier, wanted.to(gl.int32),
    ]  # fmt: skip
    _run(_fetch_assembly(D), "=r,l,l,l,l,l,r,r,r", sources)


@gluon.jit
def _load_words(address):
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
def _join4(a, b, c, d):
    """[...] x 4 -> [..., 2, 2], in order."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def _load_keys(address, words: gl.constexpr):
    """Address of a lane's first word of 64 tokens [8 g, 8 i, 4 c] -> int32 [8 g, 8 i, 4 c, words]."""
    if words == 1:
        x = gl.inline_asm_elementwise(LOAD_1, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)
        x = x.reshape([8, 8, 4, 1])
    elif words == 2:
        a, b = gl.inline_asm_elementwise(
            LOAD_2, "=r,=r,r", [address], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
        )
        x = gl.join(a, b)
    else:
        a, b, c, d = _load_words(address)
        x = _join4(a, b, c, d).reshape([8, 8, 4, 4])
    return gl.convert_layout(x, gl.SliceLayout(4, _key_layout(words)), assert_trivial=True)


@gluon.jit
def _load_values(address, D: gl.constexpr):
    """Address of the matrix row of every lane [D / 32, 8 g, 4 c] -> value words int32 [D / 8, 8 g, 4 c]."""
    a, b, c, d = gl.inline_asm_elementwise(
        LOAD_MATRICES, "=r,=r,=r,=r,r", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip
    x = _join4(a, b, c, d).permute((0, 3, 4, 1, 2)).reshape([D // 8, 8, 4])
    return gl.convert_layout(x, gl.SliceLayout(3, _value_layout(D)), assert_trivial=True)


@gluon.jit
def _load_mean(address, D: gl.constexpr):
    """Address of 8 channels [8 g, D / 32, 4 c, 8] -> bf16 [16, D / 2], the left operand of q . mean.

    Contraction index 16 s + 8 x + 2 c + b of row 8 h + g (any g) is channel 32 s + 8 c + 4 x + 2 h + b.
    """
    x = gl.inline_asm_elementwise(
        LOAD_4, "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [address], dtype=gl.bfloat16, is_pure=False, pack=8
    )
    x = x.reshape([8, D // 32, 4, 2, 2, 2]).permute((4, 0, 1, 3, 2, 5)).reshape([16, D // 2])
    return gl.convert_layout(x, HALVES_LEFT, assert_trivial=True)


@gluon.jit
def _scales(a, b, c, d, layout: gl.constexpr):
    """Four words [8 g] of bf16 pairs -> float32 [8 i, 8 g]."""
    words = _join4(a, b, c, d)
    even = (words << 16).to(gl.float32, bitcast=True)
    odd = (words & -65536).to(gl.float32, bitcast=True)
    x = gl.join(even, odd).reshape([8, 8]).permute((1, 0))
    return gl.convert_layout(x, layout, assert_trivial=True)


# ------------------------------------------------------------------------------------------ operands


@gluon.jit
def _bytes(asm: gl.constexpr, word):
    """Four copies of a word, int32 [..., 4] -> its masked bytes, int8 [..., 4], by one instruction."""
    return gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [word], dtype=gl.int8, is_pure=True, pack=4)


@gluon.jit
def _halves(asm: gl.constexpr, word):
    """Two copies of a word, int32 [..., 2] -> its masked halves, fp16 [..., 2], by one instruction."""
    return gl.inline_asm_elementwise(asm, "=r,r,r", [word], dtype=gl.float16, is_pure=True, pack=2)


@gluon.jit
def _key_operand(words, D: gl.constexpr):
    """Key words int32 [8 g, 8 i, 4 c, D / 64] -> int8 [64, D], the left operand of the scores.

    Contraction index ((part * D/64 + j) * 4 + c) * 4 + byte: channel 16 (D/64 * c + j) + part + 4 byte, times
    4 for odd parts.
    """
    word = gl.expand_dims(words, 4).broadcast_to([8, 8, 4, D // 64, 4])
    high = gl.expand_dims(words >> 4, 4).broadcast_to([8, 8, 4, D // 64, 4])
    low_parts = gl.join(_bytes(AND_03, word), _bytes(AND_0C, word))
    high_parts = gl.join(_bytes(AND_03, high), _bytes(AND_0C, high))
    codes = gl.join(low_parts, high_parts).permute((1, 0, 6, 5, 3, 2, 4)).reshape([64, D])
    return gl.convert_layout(codes, BYTES_LEFT, assert_trivial=True)


@gluon.jit
def _value_operand(words, D: gl.constexpr):
    """Value words int32 [D / 8, 8 g, 4 c] -> fp16 [D, 64]; column 8 i + 2 c + b: token 16 c + 8 b + i."""
    word = gl.expand_dims(words, 3).broadcast_to([D // 8, 8, 4, 2])
    high = gl.expand_dims(words >> 10, 3).broadcast_to([D // 8, 8, 4, 2])
    pair0 = gl.join(_halves(HALF_0, word), _halves(HALF_1, word))
    pair1 = gl.join(_halves(HALF_2, word), _halves(HALF_3, word))
    pair2 = gl.join(_halves(HALF_4, word), _halves(HALF_0, high))
    pair3 = gl.join(_halves(HALF_1, high), _halves(HALF_2, high))
    codes = gl.join(gl.join(pair0, pair1), gl.join(pair2, pair3))  # [D / 8, g, c, b, i0, i1, i2]
    codes = codes.permute((0, 1, 6, 5, 4, 2, 3)).reshape([D, 64])
    return gl.convert_layout(codes, HALVES_LEFT, assert_trivial=True)


@gluon.jit
def _transpose_operand(p, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """p 16-bit [ROWS, COLUMNS] in accumulator layout -> the same matrix as a right operand.

    movmatrix transposes 8 x 8 blocks across the warp; renaming the axes of the blocks undoes it.
    """
    p = gl.convert_layout(p, MMA, assert_trivial=True)
    p = gl.inline_asm_elementwise(TRANSPOSE, "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2)
    p = p.reshape([ROWS // 8, 8, COLUMNS // 8, 8]).permute((0, 3, 2, 1)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(p, HALVES_RIGHT, assert_trivial=True)


@gluon.jit
def _columns_of_heads(x, ROWS: gl.constexpr, GP: gl.constexpr):
    """[ROWS, GP] -> [ROWS, max(8, GP)]: column 2 c + j of a tile is head 4 j + c; of 4 heads j = 1 is 0."""
    if GP == 4:
        x = gl.join(x, gl.zeros_like(x)).reshape([ROWS, 8])
    else:
        x = x.reshape([ROWS, GP // 8, 2, 4]).permute((0, 1, 3, 2)).reshape([ROWS, GP])
    return gl.convert_layout(x, MMA, assert_trivial=True)


@gluon.jit
def _heads_of_columns(x, ROWS: gl.constexpr, GP: gl.constexpr):
    """The inverse of `_columns_of_heads`."""
    if GP == 4:
        x = _first(x.reshape([ROWS, 4, 2]))
    else:
        x = x.reshape([ROWS, GP // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([ROWS, GP])
    return x


@gluon.jit
def _column_factors(x, GP: gl.constexpr):
    """Factors of heads [GP] -> of the columns of `_columns_of_heads`."""
    if GP == 4:
        x = gl.join(x, x).reshape([8])
    else:
        x = x.reshape([GP // 8, 2, 4]).permute((0, 2, 1)).reshape([GP])
    return gl.convert_layout(x, gl.SliceLayout(0, MMA), assert_trivial=True)


@gluon.jit
def _query_bytes(rotated_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr):
    """Rotated query float32 [G, D] in memory -> fixed point in two bytes.

    Returns int8 [D, 2 GP] (columns 2 h and 2 h + 1: high and low byte of head h; order of `_key_operand`),
    and per column the largest |query| and the sum of the integers.
    """
    words: gl.constexpr = D // 64
    layout: gl.constexpr = _limb_layout(GP, words)
    n = _iota(layout, 5, 0, 2 * GP)
    c = _iota(layout, 5, 1, 4)
    j = _iota(layout, 5, 2, words)
    byte = _iota(layout, 5, 3, 4)
    part = _iota(layout, 5, 4, 4)
    offset = (n >> 1) * D + 16 * (words * c + j) + 4 * byte + part
    x = gl.load(rotated_ptr + offset, mask=((n >> 1) < G) & (offset >= 0), other=0.0)
    top = gl.maximum(gl.max(gl.abs(x).reshape([2 * GP, D]), 1), 1.0e-30)
    steps = gl.convert_layout(QUERY_RANGE / top, _axis_layout(layout, 5, 0))
    for axis in gl.static_range(1, 5):
        steps = gl.expand_dims(steps, axis)
    weight = gl.where((part & 1) == 1, 4, 1)
    fixed = gl.floor(x * steps / weight.to(gl.float32) + 0.5).to(gl.int32)
    total = gl.sum((fixed * weight).reshape([2 * GP, D]), 1)
    high = (fixed + 128) >> 8
    limb = gl.where((n & 1) == 1, fixed - (high << 8), high).to(gl.int8)
    limb = limb.permute((4, 2, 1, 3, 0)).reshape([D, 2 * GP])
    return gl.convert_layout(limb, BYTES_RIGHT, assert_trivial=True), top, total


@gluon.jit
def _swap(x, distance: gl.constexpr, turned, GP: gl.constexpr):
    """Rows i and i ^ distance of [8 i, 8 g, GP] change places where lane row g is turned."""
    x = x.reshape([4 // distance, 2, distance, 8, GP]).permute((0, 2, 3, 4, 1))
    a, b = gl.split(x)
    mask = gl.convert_layout(turned, _axis_layout(a.type.layout, 4, 2), assert_trivial=True)
    mask = mask[None, None, :, None]
    x = gl.join(gl.where(mask, b, a), gl.where(mask, a, b))
    return x.permute((0, 4, 1, 2, 3)).reshape([8, 8, GP])


@gluon.jit
def _store_nothing(segment, o_ptr, lse_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr):
    """The partial result of no tokens."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    head = gl.arange(0, GP, layout=gl.SliceLayout(1, layout))
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    rows = segment * G + head
    zero = gl.full([GP, D], 0.0, gl.float32, layout)
    gl.store(o_ptr + rows.to(gl.int64)[:, None] * D + channel[None, :], zero, mask=(head < G)[:, None])
    gl.store(lse_ptr + rows, gl.full([GP], float("-inf"), gl.float32, head.type.layout), mask=head < G)


@gluon.jit
def _store_partial(
    o, m, l, segment, channel, o_ptr, lse_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr
):
    """o float32 [D, GP] already divided by l; m, l [GP]; channel [D] names the rows of o."""
    layout: gl.constexpr = o.type.layout
    head = gl.arange(0, GP, layout=gl.SliceLayout(0, layout))
    rows = segment * G + head
    gl.store(o_ptr + rows[None, :].to(gl.int64) * D + channel[:, None], o, mask=(head < G)[None, :])
    lse = gl.where(l > 0, m + gl.log2(gl.where(l > 0, l, 1.0)), float("-inf"))
    gl.store(lse_ptr + rows, lse, mask=head < G)


# ------------------------------------------------------------------------------------------ the two parts


@gluon.jit
def _next(slot, STAGES: gl.constexpr):
    """The next stage of the ring."""
    return gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _first(x):
    """[..., 2] -> [...]"""
    a, _b = gl.split(x)
    return a


@gluon.jit
def _second(x):
    """[..., 2] -> [...]"""
    _a, b = gl.split(x)
    return b


@gluon.jit
def _history_part(
    rotated_ptr, query_ptr, key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr,
    table_ptr, low, high, oldest, softmax_scale, segment, o_ptr, lse_ptr, ring, barriers, slot, parity,
    following,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr,
    SLIDING: gl.constexpr, STAGES: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Flash attention over pages [low, high) of one sequence and head, whose first are already on their way.

    Pointers are at the head (and the table at the sequence). Returns the ring's next stage and its parity.
    """
    words: gl.constexpr = D // 64
    COLUMNS: gl.constexpr = 8 if GP == 4 else GP
    STAGE_BYTES: gl.constexpr = _stage_bytes(D)
    AHEAD: gl.constexpr = STAGES - 1
    KEY_SCALE: gl.constexpr = 34 * D  # bytes before the scales of a stage
    VALUE_SCALE: gl.constexpr = 34 * D + 128

    # Addresses inside a stage.
    layout: gl.constexpr = _key_address_layout()
    turn = _iota(layout, 3, 0, 8) & (8 // words - 1)
    key_row = 8 * _iota(layout, 3, 0, 8) + (_iota(layout, 3, 1, 8) ^ turn)
    key_address = key_row * (16 * words) + _iota(layout, 3, 2, 4) * (4 * words)
    value_layout: gl.constexpr = _value_address_layout(D)
    lane = 4 * _iota(value_layout, 3, 1, 8) + _iota(value_layout, 3, 2, 4)
    value_address = 16 * D + 512 * _iota(value_layout, 3, 0, D // 32) + 16 * lane
    mean_layout: gl.constexpr = _mean_layout(D)
    mean_address = 32 * D + 64 * _iota(mean_layout, 4, 1, D // 32) + 16 * _iota(mean_layout, 4, 2, 4)
    mean_address += 0 * _iota(mean_layout, 4, 0, 8) + 0 * _iota(mean_layout, 4, 3, 8)
    scale_address = 16 * gl.arange(0, 8, layout=_scale_layout())

    # Right operands: the rotated query as bytes, the plain one in bf16, a head in two columns.
    limbs, top, total = _query_bytes(rotated_ptr, G, GP, D)
    n = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, HALVES_RIGHT))[None, :]
    k = gl.arange(0, D // 2, layout=gl.SliceLayout(1, HALVES_RIGHT))[:, None]
    channel = 32 * (k >> 4) + 8 * ((k >> 1) & 3) + 4 * ((k >> 3) & 1) + 2 * (n & 1) + (k & 1)
    q = gl.load(query_ptr + (n >> 1) * D + channel, mask=((n >> 1) < G) & (k >= 0), other=0.0)
    coarse = q.to(gl.bfloat16)
    if not EXACT_QUERY:
        rest = (q.to(gl.float32) - coarse.to(gl.float32)).to(gl.bfloat16)

    # Per column: the start of the integer sums. Per head: units.
    column = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, MMA))
    offset = gl.convert_layout((total * 3) >> 1, gl.SliceLayout(0, MMA))
    start = gl.where((column & 1) == 1, -offset, 0)[None, :] + gl.full([64, 2 * GP], 0, gl.int32, layout=MMA)
    like = _first(start.reshape([8, 8, GP, 2]))
    score_layout: gl.constexpr = like.type.layout
    statistics: gl.constexpr = gl.SliceLayout(0, score_layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, statistics)
    token_layout: gl.constexpr = gl.SliceLayout(2, score_layout)
    top = gl.convert_layout(top, gl.SliceLayout(0, MMA))
    top = gl.convert_layout(_first(top.reshape([GP, 2])), head_layout)
    unit = top * (softmax_scale / QUERY_RANGE)  # of the integer sums, base 2
    mean_unit = QUERY_RANGE / top
    slack = SLACK / gl.maximum(unit, 1.0e-30)

    # A weight is p * scale / 2**exponent * 2**9 / 4**e, e the place of the code in its word.
    place = gl.arange(0, 8, layout=_axis_layout(score_layout, 3, 0))
    place = gl.where(place >= 5, place - 5, place)
    place_unit = P_UNIT / (1 << (2 * place)).to(gl.float32)

    m = gl.full([GP], EMPTY, gl.float32, layout=head_layout)
    l = gl.full([8, GP], 0.0, gl.float32, layout=statistics)
    weight_sum = gl.full([8, GP], 0.0, gl.float32, layout=statistics)
    acc = gl.full([D, COLUMNS], 0.0, gl.float32, layout=MMA)
    exponent = 1
    write = gl.where(slot + AHEAD >= STAGES, slot + AHEAD - STAGES, slot + AHEAD)

    for page in range(low, high):
        stage = ring + slot * STAGE_BYTES
        _run(WAIT_BARRIER, "=r,r,r", (barriers + 8 * slot, parity))
        key_words = _load_keys(key_address + stage, words)
        mean = _load_mean(mean_address + stage, D)
        k0, k1, k2, k3 = _load_words(scale_address + (stage + KEY_SCALE))
        v0, v1, v2, v3 = _load_words(scale_address + (stage + VALUE_SCALE))
        _fetch(
            key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr,
            following.to(gl.int64) * K, ring + write * STAGE_BYTES, barriers + 8 * write,
            page + AHEAD < high, D,
        )  # fmt: skip
        following = gl.load(table_ptr + page + (AHEAD + 1), mask=page + (AHEAD + 1) < high, other=0)

        # Scores in units of the integer sums.
        sums = mma_v2(mean, coarse, gl.full([16, 2 * GP], 0.0, gl.float32, layout=MMA))
        if not EXACT_QUERY:
            sums = mma_v2(mean, rest, sums)
        first_half, second_half = gl.split(sums.reshape([2, 8, GP, 2]))
        mean_score = _first(first_half.permute((1, 2, 0))) + _second(second_half.permute((1, 2, 0)))
        mean_score = gl.convert_layout(mean_score, statistics, assert_trivial=True) * mean_unit[None, :]
        s = mma_v2(_key_operand(key_words, D), limbs, start)
        high_byte, low_byte = gl.split(s.reshape([8, 8, GP, 2]))
        whole = (high_byte << 8) + low_byte
        row = gl.arange(0, 8, layout=_axis_layout(score_layout, 3, 1))
        if words <= 4:
            whole = _swap(whole, 1, (row & 1) == 1, GP)
        if words <= 2:
            whole = _swap(whole, 2, (row & 2) == 2, GP)
        if words == 1:
            whole = _swap(whole, 4, (row & 4) == 4, GP)
        whole = gl.convert_layout(whole, score_layout, assert_trivial=True)
        key_scale = _scales(k0, k1, k2, k3, token_layout)
        score = whole.to(gl.float32) * key_scale[:, :, None] + mean_score[None, :, :]
        if SLIDING:
            i = gl.arange(0, 8, layout=_axis_layout(score_layout, 3, 0))
            visible = ((SINK_PAGES + page) * PAGE + 8 * row[None, :] + i[:, None] >= oldest)[:, :, None]
            score = gl.where(visible, score, HIDDEN)
        value_scale = _scales(v0, v1, v2, v3, token_layout)
        largest = _larger_halves(_larger_halves(v0, v1), _larger_halves(v2, v3))

        # The whole warp branches, and rarely: a new maximum, or a larger value scale.
        largest = gl.convert_layout(largest, gl.SliceLayout(1, statistics), assert_trivial=True)
        limit = (0x8000 - ((exponent + 1) << 7)) * 0x10001  # bit 15 of a half: scale >= 2 * 2**exponent
        page_max = gl.max(score, 0)
        moved = (((largest + limit) & -0x7FFF8000) != 0)[:, None] | (page_max > (m + slack)[None, :])
        if gl.max(moved.to(gl.int32).reshape([8 * GP]), 0) != 0:
            m_new = gl.maximum(m, gl.max(page_max, 0))
            alpha = gl.exp2((m - m_new) * unit)
            bits = gl.max(gl.maximum((largest >> 16) & 0xFFFF, largest & 0xFFFF), 0) >> 7
            new_exponent = gl.maximum(exponent, bits)
            shrink = (gl.maximum(exponent - new_exponent + 127, 0) << 23).to(gl.float32, bitcast=True)
            acc *= _column_factors(alpha * shrink, GP)[None, :]
            l *= alpha[None, :]
            weight_sum *= alpha[None, :]
            m = m_new
            exponent = new_exponent
        p = gl.exp2(score * unit[None, :][None, :, :] - (m * unit)[None, :][None, :, :])
        if SLIDING:
            p = gl.where(visible, p, 0.0)
        inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
        l += gl.sum(p, 0)
        weight_sum += gl.sum(p * value_scale[:, :, None], 0)
        p *= (value_scale * (place_unit * inverse)[:, None])[:, :, None]
        weights = _columns_of_heads(p.reshape([64, GP]), 64, GP)
        weights = gl.inline_asm_elementwise(
            PACK_HALVES, "=r,r,r", [weights], dtype=gl.float16, is_pure=True, pack=2
        )
        weights = _transpose_operand(weights, 64, COLUMNS)
        acc = mma_v2(_value_operand(_load_values(value_address + stage, D), D), weights, acc)
        slot = _next(slot, STAGES)
        parity = gl.where(slot == 0, parity ^ 1, parity)
        write = _next(write, STAGES)

    o = _heads_of_columns(acc, D, GP)
    out_layout: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    l = gl.convert_layout(gl.sum(l, 0), out_layout)
    weight_sum = gl.convert_layout(gl.sum(weight_sum, 0), out_layout)
    m = gl.convert_layout(m * unit, out_layout)
    o = o * ((exponent << 23).to(gl.float32, bitcast=True) * (CODE_UNIT / P_UNIT)) - 1.5 * weight_sum[None, :]
    o *= (1.0 / gl.where(l > 0, l, 1.0))[None, :]
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, o.type.layout))
    _store_partial(o, m, l, segment, channel, o_ptr, lse_ptr, G, GP, D)
    return slot, parity


@gluon.jit
def _larger_halves(a, b):
    """The larger of two unsigned halves, both halves of a word."""
    return gl.inline_asm_elementwise(MAX_HALVES, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _window_page(
    index,
    history,
    head,
    window_table_ptr,
    K: gl.constexpr,
    SINK_PAGES: gl.constexpr,
    RECENT_SLOTS: gl.constexpr,
):
    """(page of the sequence, head's page in memory) of BF16 page `index`: sink pages, then recent pages."""
    recent = index - SINK_PAGES
    page = gl.where(recent < 0, index, index + history)
    slot = gl.where(recent < 0, index, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    return page, gl.load(window_table_ptr + slot).to(gl.int64) * K + head


@gluon.jit
def _window_part(
    query_ptr, window_key_ptr, window_value_ptr, window_table_ptr, length, history, oldest, softmax_scale,
    index, head, segment, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
    SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window, 16 tokens at a time.

    Query and probabilities are split into two bf16, in neighbouring columns 2 h and 2 h + 1.
    """
    page, physical = _window_page(index, history, head, window_table_ptr, K, SINK_PAGES, RECENT_SLOTS)

    # Contraction index 32 s + 16 t + 8 x + 2 c + b is channel 32 s + 8 c + 4 t + 2 x + b.
    k = gl.arange(0, D, layout=gl.SliceLayout(1, HALVES_RIGHT))
    channel = (k & -32) + ((k >> 1) & 3) * 8 + ((k >> 4) & 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1)
    n = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, HALVES_RIGHT))
    q = gl.load(query_ptr + (n >> 1)[None, :] * D + channel[:, None], mask=((n >> 1) < G)[None, :], other=0.0)
    q = q.to(gl.float32) * softmax_scale
    coarse = q.to(gl.bfloat16)
    q = gl.where((n & 1)[None, :] == 0, coarse, (q - coarse.to(gl.float32)).to(gl.bfloat16))

    key_layout: gl.constexpr = _window_key_layout(D)
    key_token = _iota(key_layout, 4, 0, 16)
    key_channel = 32 * _iota(key_layout, 4, 1, D // 32) + 8 * _iota(key_layout, 4, 2, 4)
    key_channel = key_channel + _iota(key_layout, 4, 3, 8)
    value_layout: gl.constexpr = _window_value_layout(D)
    value_token = _iota(value_layout, 4, 0, 16)
    value_channel = 64 * _iota(value_layout, 4, 1, D // 64) + 8 * _iota(value_layout, 4, 2, 8)
    value_channel = value_channel + _iota(value_layout, 4, 3, 8)

    like = _first(gl.full([16, 2 * GP], 0.0, gl.float32, layout=MMA).reshape([16, GP, 2]))
    score_layout: gl.constexpr = like.type.layout
    head_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    m = gl.full([GP], EMPTY, gl.float32, layout=head_layout)
    l = gl.full([GP], 0.0, gl.float32, layout=head_layout)
    acc = gl.full([D, 2 * GP], 0.0, gl.float32, layout=MMA)
    low = page * PAGE
    for token in range(low, gl.minimum(low + PAGE, length), 16):
        offset = physical * (PAGE * D) + (token - low) * D
        key_mask = (token + key_token < length) & (token + key_token >= oldest) & (key_channel >= 0)
        key = gl.load(window_key_ptr + offset + key_token * D + key_channel, mask=key_mask, other=0)
        value_mask = (token + value_token < length) & (token + value_token >= oldest) & (value_channel >= 0)
        value = gl.load(window_value_ptr + offset + value_token * D + value_channel, mask=value_mask, other=0)
        # [16, D/32, c, t, x, b] -> [16, D/32, t, x, c, b]
        key = key.to(gl.bfloat16, bitcast=True).reshape([16, D // 32, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5))
        key = gl.convert_layout(key.reshape([16, D]), HALVES_LEFT, assert_trivial=True)
        score = mma_v2(key, q, gl.full([16, 2 * GP], 0.0, gl.float32, layout=MMA))
        first, second = gl.split(score.reshape([16, GP, 2]))
        row = token + gl.arange(0, 16, layout=gl.SliceLayout(1, score_layout))
        visible = ((row < length) & (row >= oldest))[:, None]
        score = gl.where(visible, first + second, HIDDEN)
        m_new = gl.maximum(m, gl.max(score, 0))
        alpha = gl.exp2(m - m_new)
        p = gl.where(visible, gl.exp2(score - m_new[None, :]), 0.0)
        l = l * alpha + gl.sum(p, 0)
        rounded = p.to(gl.bfloat16)
        p = gl.join(rounded, (p - rounded.to(gl.float32)).to(gl.bfloat16)).reshape([16, 2 * GP])
        # rows of the product: [D/64, 4, 2, 8 g] = channel 64 s + 8 g + x, x = (4, 2)
        value = value.to(gl.bfloat16, bitcast=True).permute((1, 3, 2, 0)).reshape([D, 16])
        value = gl.convert_layout(value, HALVES_LEFT, assert_trivial=True)
        columns = gl.join(alpha, alpha).reshape([2 * GP])
        columns = gl.convert_layout(columns, gl.SliceLayout(0, MMA), assert_trivial=True)
        acc = mma_v2(value, _transpose_operand(p, 16, 2 * GP), acc * columns[None, :])
        m = m_new
    first, second = gl.split(acc.reshape([D, GP, 2]))
    o = first + second
    out_layout: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    l = gl.convert_layout(l, out_layout)
    m = gl.convert_layout(m, out_layout)
    o = o * (1.0 / gl.where(l > 0, l, 1.0))[None, :]
    row = gl.arange(0, D, layout=gl.SliceLayout(1, o.type.layout))
    channel = (row & -64) + (row & 7) * 8 + ((row >> 3) & 7)
    _store_partial(o, m, l, segment, channel, o_ptr, lse_ptr, G, GP, D)


# ------------------------------------------------------------------------------------------ the kernel


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _first_page(oldest, history, SINK_PAGES: gl.constexpr):
    """The first history page that holds a token from `oldest` on."""
    return gl.minimum(gl.maximum(oldest // PAGE - SINK_PAGES, 0), history)


@gluon.jit(do_not_specialize=["sliding_window", "batch", "pieces"])
def _stage_kernel(
    query_ptr, rotated_ptr, key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr,
    window_key_ptr, window_value_ptr, page_table_ptr, stride_table, window_table_ptr, lengths_ptr,
    history_ptr, softmax_scale, sliding_window, batch, pieces, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr,
    RECENT_SLOTS: gl.constexpr, WINDOW_PAGES: gl.constexpr, SLIDING: gl.constexpr, BATCH_P: gl.constexpr,
    STAGES: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Grid (pieces * K), one warp each: every program takes its piece of the work, see `DecodePlan`."""
    WINDOW: gl.constexpr = (SINK_PAGES + RECENT_SLOTS) * WINDOW_PAGES
    SLOTS: gl.constexpr = SINK_PAGES + RECENT_SLOTS
    STAGE_BYTES: gl.constexpr = _stage_bytes(D)
    AHEAD: gl.constexpr = STAGES - 1
    gdc_launch_dependents()
    memory = gl.allocate_shared_memory(
        gl.int32, [ring_bytes(D, STAGES) // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    memory.index(0).store(gl.full([32], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])))
    ring = gl.inline_asm_elementwise(RING, "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    barriers = ring + STAGES * STAGE_BYTES
    for n in gl.static_range(STAGES):
        _run(START_BARRIER, "=r,r", (barriers + 8 * n,))
    _run(PUBLISH_BARRIERS, "=r", ())
    slot = 0
    parity = 0

    # This program's share [x, end) of all pages.
    index = gl.arange(0, BATCH_P, layout=gl.BlockedLayout([1], [32], [1], [0]))
    load = gl.load(history_ptr + index, mask=index < batch, other=0)
    if SLIDING:
        lengths = gl.load(lengths_ptr + index, mask=index < batch, other=0)
        load -= _first_page(gl.maximum(lengths - sliding_window, 0), load, SINK_PAGES)
    load = gl.where(index < batch, load + WINDOW, 0)
    total = gl.sum(load, 0)
    chunk = (total + pieces - 1) // pieces
    head = gl.program_id(0) % K
    piece = gl.program_id(0) // K
    x = piece * chunk
    end = gl.minimum(x + chunk, total)
    earlier = gl.associative_scan(load, 0, _add) <= x
    b = gl.sum(earlier.to(gl.int32), 0)
    start = gl.sum(gl.where(earlier, load, 0), 0)
    key_codes = key_codes_ptr + head * (4 * D)
    value_codes = value_codes_ptr + head * (4 * D)
    mean = mean_ptr + head * D
    key_scale = key_scale_ptr + head * PAGE
    value_scale = value_scale_ptr + head * PAGE

    while x < end:
        row = b * K + head
        length = gl.load(lengths_ptr + b)
        history = gl.load(history_ptr + b)
        oldest = gl.maximum(length - sliding_window, 0) if SLIDING else 0
        first = _first_page(oldest, history, SINK_PAGES) if SLIDING else 0
        row_end = start + WINDOW + history - first
        low = x - start
        high = gl.minimum(end, row_end) - start
        page_low = first + gl.maximum(low - WINDOW, 0)
        page_high = first + gl.maximum(high - WINDOW, 0)
        table = page_table_ptr + b * stride_table
        segment = batch * K * SLOTS + gl.program_id(0) + b * K
        following = gl.load(table + page_low, mask=page_low < page_high, other=0)
        write = slot
        for n in gl.static_range(AHEAD):
            _fetch(
                key_codes, value_codes, mean, key_scale, value_scale, following.to(gl.int64) * K,
                ring + write * STAGE_BYTES, barriers + 8 * write, page_low + n < page_high, D,
            )  # fmt: skip
            write = _next(write, STAGES)
            following = gl.load(table + page_low + (n + 1), mask=page_low + (n + 1) < page_high, other=0)

        window_low = (low + WINDOW_PAGES - 1) // WINDOW_PAGES
        window_high = gl.minimum((high + WINDOW_PAGES - 1) // WINDOW_PAGES, SLOTS)
        for window_page in range(window_low, window_high):
            page, physical = _window_page(
                window_page, history, head, window_table_ptr + b * SLOTS, K, SINK_PAGES, RECENT_SLOTS
            )
            if page * PAGE < length:
                key_page = (window_key_ptr + physical * (PAGE * D)).to(gl.int64)
                value_page = (window_value_ptr + physical * (PAGE * D)).to(gl.int64)
                _run(PREFETCH, "=r,l,l,r", (key_page, value_page, 2 * PAGE * D))
        for window_page in range(window_low, window_high):
            _window_part(
                query_ptr + row * G * D, window_key_ptr, window_value_ptr, window_table_ptr + b * SLOTS,
                length, history, oldest, softmax_scale, window_page, head, row * SLOTS + window_page, o_ptr,
                lse_ptr, K, G, GP, D, SINK_PAGES, RECENT_SLOTS,
            )  # fmt: skip
        gdc_wait()
        if page_low < page_high:
            slot, parity = _history_part(
                rotated_ptr + row * G * D, query_ptr + row * G * D, key_codes, value_codes, mean, key_scale,
                value_scale, table, page_low, page_high, oldest, softmax_scale, segment, o_ptr, lse_ptr,
                ring, barriers, slot, parity, following,
                K, G, GP, D, SINK_PAGES, SLIDING, STAGES, EXACT_QUERY,
            )  # fmt: skip
        else:
            _store_nothing(segment, o_ptr, lse_ptr, G, GP, D)
        x = gl.minimum(row_end, end)
        start = row_end
        b += 1
    memory._keep_alive()


def decode_attention(
    query: torch.Tensor,
    cache,
    rotation,
    *,
    scale: float,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; `scale` multiplies the scores (usually D**-0.5). A sliding window of
    w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    sequence of length 0 yields zeros. Raises ShapeError; NotImplementedError (device other than Hopper,
    head_dim other than 64, 128, 256, more than 16 query heads per key/value head) before anything is
    allocated. CUDA-graph capturable.
    """
    check_device(query, capability=HOPPER)
    if query.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {query.shape[-1]}, the Gluon kernel serves {HEAD_DIMS}")
    tuning = TUNING[query.shape[-1]]
    padded_group = max(4, triton.next_power_of_2(plain.query_group(query, cache)))
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    plan = plain.plan_decode(
        query, cache, rotation, sliding_window,
        programs=tuning.resident(padded_group) * processors, window_pages=tuning.window_pages, early=True,
    )  # fmt: skip
    query = query.contiguous()
    rotated = plain.rotate_query(plan, query, rotation)
    o, lse = plain.allocate_partials(plan, query.device)
    kernel = _stage_kernel[(plan.pieces * plan.heads,)](
        query, rotated, cache.key_codes, cache.value_codes, cache.key_page_mean.view(torch.int16),
        cache.key_scale.view(torch.int16), cache.value_scale.view(torch.int16),
        cache.window_key.view(torch.int16), cache.window_value.view(torch.int16), cache.page_table,
        cache.page_table.shape[1], cache.window_table, cache.lengths, cache.history_pages,
        scale * plain.LOG2_E, sliding_window or 0, plan.batch, plan.pieces, o, lse,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim, SINK_PAGES=plan.sink_pages,
        RECENT_SLOTS=plan.recent_slots, WINDOW_PAGES=plan.window_pages, SLIDING=sliding_window is not None,
        BATCH_P=plan.padded_batch, STAGES=tuning.stages, EXACT_QUERY=query.dtype == torch.bfloat16,
        num_warps=1, maxnreg=tuning.registers(padded_group), **plan.launch,
    )  # fmt: skip
    plain.reserve_shared_memory(kernel)
    return plain.merge(plan, o, lse, cache, rotation, sink_logits)
