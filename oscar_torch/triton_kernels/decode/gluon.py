"""One-token attention on Hopper, in Gluon: rings of pages in shared memory, codes in registers.

Three launches or four, no host wait. Each but the first may start while the one before it is at work
(programmatic dependent launch) and waits for what it needs:

1. `decode.triton.rotate`: rotates the queries.
2. `_stage_kernel`: flash attention over equal pieces of all pages, INT2 and BF16 (`DecodePlan`). It asks for
   its first pages and reads its BF16 pages before it waits for the queries.
3. `decode.triton.merge`: merges the partial results and rotates back; two launches where queries are many.

Inside the stage every warp is a flash decoder of its own: it copies its share of the pages in bulk to a
private ring (one barrier per stage), keeps an online softmax in registers, and meets the other warps of its
block only after its last page. The compiler does not know: to it, all warps hold the same tensors, and
`gl.store` lets one warp store what it takes for copies. Hence `_store_words`; `gl.store` is for the few
tensors that are dealt out to the warps of a block.

Keys and values are int8 products. Masks turn a word of 16 codes into four A registers of mma.m16n8k32; codes
at odd places carry a factor 4 that the other operand undoes. That is a 15-bit integer in two signed bytes,
high and low in neighbouring columns, so that every lane finds both halves of a sum in its own registers: the
rotated query, and P * scale as a fraction of the page's largest. `movmatrix` turns the latter from
accumulator to operand layout. A page's sums are added to float32 outputs. The page's mean key is one more
product, in bf16.

Index bits (page of 64 tokens): row r = 8 i + g of a score tile is token 8 g + i, so that lane g owns 8
neighbouring tokens: one 16-byte load of scales, and rows i and i + 4 are neighbouring bytes of a value word.
Lanes that read keys together find them in the same banks; reading other tokens and swapping registers
afterwards costs more.

Gluon has no bulk copy of plain bytes and no address of shared memory: both are inline PTX. The kernel
allocates shared memory once, so it lies where `global_smem` points.
"""

import ctypes
import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...core import cache_format as fmt
from ..launch.tensors import check_hopper
from . import triton as plain

HEAD_DIMS = (64, 128, 256)
PAGE = gl.constexpr(fmt.PAGE_TOKENS)
QUERY_RANGE = gl.constexpr(32000.0)  # |query| in integer steps: the high byte stays inside -128 .. 127
EMPTY = gl.constexpr(-1.0e30)  # running maximum before the first page
HIDDEN = gl.constexpr(-3.0e38)  # score of a token outside the sliding window
SLACK = gl.constexpr(2.0**24)  # the maximum only moves when P, summed over a lane's tokens, exceeds this
FRACTION_RANGE = gl.constexpr(32500.0)  # P * scale of a page in integer steps; 127.5 * 256 is the end
# A float32 plus 2**23 has its nearest integer in its low bits. With 128 more, the second byte is the high one
# of a split into two signed bytes; the low one is the first byte with its top bit turned.
WHOLE = gl.constexpr(2.0**23 + 128.0)

AND_03 = gl.constexpr("and.b32 $0, $1, 0x03030303;")
AND_0C = gl.constexpr("and.b32 $0, $1, 0x0C0C0C0C;")
SIGNED = gl.constexpr(1.5 * 2.0**23)  # likewise where numbers may be negative

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
SHARED_MEMORY = gl.constexpr("mov.u32 $0, global_smem;")
# By a shuffle: so the assembler knows that it is the same in all lanes.
WARP = gl.constexpr(
    "{ .reg .b32 x; mov.u32 x, %tid.x; shr.u32 x, x, 5; shfl.sync.idx.b32 $0, x, 0, 0x1f, 0xffffffff; }"
)
WARP_BARRIER = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
# With a fence, since bulk copies may overwrite what was written before.
BLOCK_BARRIER = gl.constexpr("fence.proxy.async.shared::cta; bar.sync 0; mov.b32 $0, 0;")
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


# Blocks per multiprocessor for up to 4, 8 and 16 query heads per key/value head: what registers allow, less
# one for 4 heads of 128 channels (a fourth takes 1 % more). Not compared: 16 heads, 4 heads of 64 channels.
BLOCKS = {64: (4, 3, 2), 128: (3, 2, 2), 256: (2, 2, 2)}
# Three pages to a ring took 126.0 us instead of 120.6 at batch 8: loading is the limit, and more of it at a
# time does not make memory faster.
RING_PAGES = 2


def _window_pages(batch: int) -> int:
    """The work of one BF16 page in INT2 pages; more where pieces are short and its latency counts.

    Microseconds in all on an H200, 8 key/value heads, batch 1 and 8 with 102400 tokens, batch 32 with 32768:
    8 pages take 25.0, 118.1, 167.7; 12 pages take 24.8, 118.5, 168.9.
    """
    return 12 if batch == 1 else 8


def _blocks(head_dim: int, padded_group: int) -> int:
    """Blocks per multiprocessor for 4, 8 or 16 heads."""
    return BLOCKS[head_dim][padded_group.bit_length() - 3]


# ------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def _bases(rank: int, *entries: tuple[int, int]) -> list[list[int]]:
    """Basis vectors of a linear layout: (axis, step) pairs; axis -1 is a broadcast bit."""
    return [[step if axis == a else 0 for a in range(rank)] for axis, step in entries]


@gluon.constexpr_function
def _linear(shape: list[int], registers, lanes) -> gl.DistributedLinearLayout:
    """The layout of a tensor that every warp holds for itself."""
    rank = len(shape)
    return gl.DistributedLinearLayout(
        reg_bases=_bases(rank, *registers), lane_bases=_bases(rank, *lanes),
        warp_bases=_bases(rank, *_bits(-1, WARPS)), block_bases=[], shape=shape,
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
    """[D / 8, 8 g, 4 c, 4 bytes]: lane (g, c) holds word c of channels 8 r + g, each four times."""
    return _linear([head_dim // 8, 8, 4, 4], [*_bits(3, 4), *_bits(0, head_dim // 8)], _lanes(1, 2))


@gluon.constexpr_function
def _weight_layout(padded_group: int):
    """[4 r, 8 g, GP, 4 bytes]: lane (g, c) holds words of heads c, c + 4, ..., each four times."""
    tiles = [(2, 4 << n) for n in range((padded_group // 4).bit_length() - 1)]
    return _linear([4, 8, padded_group, 4], [*_bits(3, 4), *_bits(0, 4), *tiles], _lanes(1, 2))


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
    """[2 GP, 4 c, words, 4 bytes, 4 parts], or parts before bytes: lane (g, c) holds column g (and g + 8)."""
    registers = [*_bits(4, 4), *_bits(3, 4), *_bits(2, words)]
    registers += [(0, 8 << n) for n in range((padded_group // 4).bit_length() - 1)]
    return _linear([2 * padded_group, 4, words, 4, 4], registers, _lanes(0, 1))


@gluon.constexpr_function
def _window_key_layout(head_dim: int):
    """[16 tokens, D / 32, 4 c, 8]: lane (g, c) holds 8 neighbouring channels of tokens g and g + 8."""
    blocks = _bits(1, head_dim // 32)
    return _linear([16, head_dim // 32, 4, 8], [*_bits(3, 8), (0, 8), *blocks], _lanes(0, 2))


@gluon.constexpr_function
def _window_query_layout(head_dim: int, padded_group: int):
    """[2 GP, D / 32, 4 c, 8]: lane (g, c) holds 8 neighbouring channels of columns g, g + 8, ..."""
    columns = [(0, 8 << n) for n in range((padded_group // 4).bit_length() - 1)]
    blocks = _bits(1, head_dim // 32)
    return _linear([2 * padded_group, head_dim // 32, 4, 8], [*_bits(3, 8), *blocks, *columns], _lanes(0, 2))


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
    """Shared memory of a warp, a multiple of 128: stages, then their barriers."""
    return -(-stages * (_stage_bytes(head_dim) + 8) // 128) * 128


@gluon.constexpr_function
def shared_bytes(head_dim: int, stages: int) -> int:
    """Shared memory of a block."""
    return WARPS * ring_bytes(head_dim, stages)


@gluon.constexpr_function
def _fetch_assembly(head_dim: int) -> str:
    """Elected lane: five bulk copies of one head's page, whose bytes the stage's barrier counts.

    A step reads every page once: so they leave the L2 first (H200, batch 8: 4 of 129 us).
    """
    sizes = [16 * head_dim, 16 * head_dim, 2 * head_dim, 128, 128]
    lines = ["{ .reg .pred p;", "bar.warp.sync 0xffffffff;", "elect.sync _|p, 0xffffffff;"]
    lines += ["setp.ne.and.b32 p, $8, 0, p;", "@!p bra done;", ".reg .b64 policy;"]
    lines += ["createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"]
    lines += [f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$7], {sum(sizes)};"]
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    for n, size in enumerate(sizes):
        lines.append(f"{copy} [$6 + {sum(sizes[:n])}], [${n + 1}], {size}, [$7], policy;")
    return "\n".join([*lines, "done:", "mov.b32 $0, 0; }"])


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
def _load_word(address):
    return gl.inline_asm_elementwise(LOAD_1, "=r,r", [address], dtype=gl.int32, is_pure=False, pack=1)


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
        x = _load_word(address).reshape([8, 8, 4, 1])
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
def _mma(a, b, acc):
    """acc + a @ b, each warp its own."""
    out = mma_v2(gl.expand_dims(a, 0), gl.expand_dims(b, 0), gl.expand_dims(acc, 0))
    return gl.convert_layout(out.reshape(acc.shape), ACC, assert_trivial=True)


@gluon.jit
def _unpack(word):
    """Four copies of words int32 [a, b, c, d, 4] -> int8 [a, b, c, d, 4 bytes, 2, 2] at register 2 y + x.

    Byte n of register r is code r + 4 n of the word, times 4 where r is odd.
    """
    high = word >> 4
    low_parts = gl.join(_bytes(AND_03, word), _bytes(AND_0C, word))
    high_parts = gl.join(_bytes(AND_03, high), _bytes(AND_0C, high))
    return gl.join(low_parts, high_parts)


@gluon.jit
def _key_operand(words, D: gl.constexpr):
    """Key words int32 [8 g, 8 i, 4 c, D / 64] -> int8 [64, D], the left operand of the scores.

    Contraction index ((part * D/64 + j) * 4 + c) * 4 + byte: channel 16 (D/64 * c + j) + part + 4 byte, times
    4 for odd parts.
    """
    codes = _unpack(gl.expand_dims(words, 4).broadcast_to([8, 8, 4, D // 64, 4]))
    codes = codes.permute((1, 0, 6, 5, 3, 2, 4)).reshape([64, D])
    return gl.convert_layout(codes, BYTES_LEFT, assert_trivial=True)


@gluon.jit
def _value_operand(words, D: gl.constexpr):
    """Value words int32 [D / 8, 8 g, 4 c] -> int8 [D, 64], the left operand of the outputs.

    Column 16 r + 4 c + byte: token 16 c + r + 4 byte, times 4 for odd r.
    """
    codes = _unpack(gl.expand_dims(words, 3).broadcast_to([D // 8, 8, 4, 4]))
    codes = codes.permute((0, 1, 5, 4, 2, 3)).reshape([D, 64])
    return gl.convert_layout(codes, BYTES_LEFT, assert_trivial=True)


@gluon.jit
def _weight_operand(fixed, GP: gl.constexpr):
    """P in integer steps, as float32 plus WHOLE [8 i, 8 g, GP] -> int8 [64, 2 GP], for P @ V.

    Rows are the columns of `_value_operand`; columns 2 h and 2 h + 1 are the high and the low byte of head h.
    Rows i and i + 4 become neighbouring bytes; then movmatrix, which turns halves across the warp, makes an
    operand.
    """
    first, second = gl.split(fixed.to(gl.int32, bitcast=True).reshape([2, 4, 8, GP]).permute((1, 2, 3, 0)))
    word = gl.inline_asm_elementwise(
        FRACTION_BYTES, "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )
    word = gl.convert_layout(word, gl.SliceLayout(3, _weight_layout(GP)), assert_trivial=True)
    word = gl.expand_dims(word, 3).broadcast_to([4, 8, GP, 4])
    x = gl.inline_asm_elementwise(TRANSPOSE, "=r,r,r,r,r", [word], dtype=gl.int8, is_pure=False, pack=4)
    x = x.reshape([4, 8, GP // 4, 4, 4]).permute((0, 3, 4, 2, 1)).reshape([64, 2 * GP])
    return gl.convert_layout(x, BYTES_RIGHT, assert_trivial=True)


@gluon.jit
def _whole(sums, ROWS: gl.constexpr, GP: gl.constexpr):
    """Sums of high and low bytes int32 [ROWS, 2 GP] -> [ROWS, GP]."""
    high, low = gl.split(sums.reshape([ROWS, GP, 2]))
    return (high << 8) + low


@gluon.jit
def _transpose_operand(p, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """p 16-bit [ROWS, COLUMNS] in accumulator layout -> the same matrix as a right operand.

    movmatrix transposes 8 x 8 blocks across the warp; renaming the axes of the blocks undoes it.
    """
    p = gl.convert_layout(p, ACC, assert_trivial=True)
    p = gl.inline_asm_elementwise(TRANSPOSE, "=r,r", [p], dtype=p.dtype, is_pure=False, pack=2)
    p = p.reshape([ROWS // 8, 8, COLUMNS // 8, 8]).permute((0, 3, 2, 1)).reshape([ROWS, COLUMNS])
    return gl.convert_layout(p, HALVES_RIGHT, assert_trivial=True)


@gluon.jit
def _fixed_query(rotated_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr):
    """Rotated queries float32 [G, D] in memory -> fixed point in two bytes.

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
    # Of the low bits of a sum with SIGNED the first byte is the low one; with 128 more, the second the high.
    start = gl.where((n & 1) == 1, SIGNED, SIGNED + 128.0)
    fixed = (x * (steps / weight.to(gl.float32)) + start).to(gl.int32, bitcast=True)
    total = gl.sum((fixed * weight).reshape([2 * GP, D]), 1)
    bias = (start.to(gl.int32, bitcast=True) * (5 * D // 2)).reshape([2 * GP])  # half the weights are 4
    total -= gl.convert_layout(bias, total.type.layout)
    fixed = gl.convert_layout(fixed.permute((0, 1, 2, 4, 3)), layout)
    selector = _iota(layout, 5, 0, 2 * GP)
    selector = gl.where((selector & 1) == 1, 0x40, 0x51).broadcast_to(fixed.shape)
    limb = gl.inline_asm_elementwise(
        LIMB_BYTES, "=r,r,r,r,r,r,r,r,r", [fixed, selector], dtype=gl.int8, is_pure=True, pack=4
    )
    limb = limb.permute((3, 2, 1, 4, 0)).reshape([D, 2 * GP])
    return gl.convert_layout(limb, BYTES_RIGHT, assert_trivial=True), top, total


@gluon.jit
def _per_head(x, GP: gl.constexpr, layout: gl.constexpr):
    """A statistic of columns [2 GP] -> of heads [GP]."""
    x = gl.convert_layout(x, gl.SliceLayout(0, ACC)).reshape([GP, 2])
    return gl.convert_layout(_first(x), layout)


@gluon.jit
def _store_words(pointer, x, mask):
    """float32 to global memory, by every warp: the compiler would let the first one store for all."""
    _run(STORE_GLOBAL, "=r,l,r,r", (pointer.to(gl.int64), x.to(gl.int32, bitcast=True), mask.to(gl.int32)))


@gluon.jit
def _store_partial(
    o, m, l, segment, channel, o_ptr, lse_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr
):
    """o float32 [D, GP] already divided by l; m, l [GP]; channel [D] names the rows of o."""
    layout: gl.constexpr = o.type.layout
    head = gl.arange(0, GP, layout=gl.SliceLayout(0, layout))
    rows = segment * G + head
    place = o_ptr + rows[None, :].to(gl.int64) * D + channel[:, None]
    _store_words(place, o, (head < G)[None, :] & (channel >= 0)[:, None])
    lse = gl.where(l > 0, m + gl.log2(gl.where(l > 0, l, 1.0)), float("-inf"))
    _store_words(lse_ptr + rows, lse, head < G)


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
    table_ptr, low, high, oldest, softmax_scale, ring, barriers, slot, parity, following,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr,
    SLIDING: gl.constexpr, STAGES: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Flash attention over pages [low, high) of one sequence and head, whose first are already on their way.

    Pointers are at the head (and the table at the sequence). Returns the ring's next stage and its parity.
    """
    words: gl.constexpr = D // 64
    STAGE_BYTES: gl.constexpr = _stage_bytes(D)
    AHEAD: gl.constexpr = STAGES - 1
    KEY_SCALE: gl.constexpr = 34 * D  # bytes before the scales of a stage
    VALUE_SCALE: gl.constexpr = 34 * D + 128

    # Addresses inside a stage: what depends on the lane, and constants, which loads add for nothing.
    layout: gl.constexpr = _key_address_layout()
    key_lane = _iota(layout, 3, 0, 8) * (128 * words) + _iota(layout, 3, 2, 4) * (4 * words)
    key_place = _iota(layout, 3, 1, 8) * (16 * words)
    value_layout: gl.constexpr = _value_address_layout(D)
    value_lane = 64 * _iota(value_layout, 3, 1, 8) + 16 * _iota(value_layout, 3, 2, 4)
    value_place = 16 * D + 512 * _iota(value_layout, 3, 0, D // 32)
    mean_layout: gl.constexpr = _mean_layout(D)
    mean_lane = 16 * _iota(mean_layout, 4, 2, 4) + 0 * _iota(mean_layout, 4, 0, 8)
    mean_place = 32 * D + 64 * _iota(mean_layout, 4, 1, D // 32) + 0 * _iota(mean_layout, 4, 3, 8)
    scale_lane = 16 * gl.arange(0, 8, layout=_scale_layout())

    # Right operands: the query in bf16, a head in two columns, and the rotated one as bytes.
    n = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, HALVES_RIGHT))[None, :]
    k = gl.arange(0, D // 2, layout=gl.SliceLayout(1, HALVES_RIGHT))[:, None]
    channel = 32 * (k >> 4) + 8 * ((k >> 1) & 3) + 4 * ((k >> 3) & 1) + 2 * (n & 1) + (k & 1)
    q = gl.load(query_ptr + (n >> 1) * D + channel, mask=((n >> 1) < G) & (k >= 0), other=0.0)
    coarse = q.to(gl.bfloat16)
    if not EXACT_QUERY:
        rest = (q.to(gl.float32) - coarse.to(gl.float32)).to(gl.bfloat16)
    gdc_wait()
    # The last page of the ring waits with the query, whose rotation would else stand in line behind it.
    write = gl.where(slot + AHEAD >= STAGES, slot + AHEAD - STAGES, slot + AHEAD)
    _fetch(
        key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr, following.to(gl.int64) * K,
        ring + write * STAGE_BYTES, barriers + 8 * write, low + AHEAD < high, D,
    )  # fmt: skip
    following = gl.load(table_ptr + low + STAGES, mask=low + STAGES < high, other=0)
    limbs, top, query_sum = _fixed_query(rotated_ptr, G, GP, D)

    # Per head: what the grid's offset of 1.5 adds to the integer sums, and units.
    like = _whole(gl.full([64, 2 * GP], 0, gl.int32, ACC), 64, GP).reshape([8, 8, GP])
    score_layout: gl.constexpr = like.type.layout
    statistics: gl.constexpr = gl.SliceLayout(0, score_layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, statistics)
    token_layout: gl.constexpr = gl.SliceLayout(2, score_layout)
    top = _per_head(top, GP, head_layout)
    start = -1.5 * _per_head(query_sum.to(gl.float32), GP, head_layout)[None, :][None, :, :]
    unit = top * (softmax_scale / QUERY_RANGE)  # of the integer sums, base 2
    mean_unit = QUERY_RANGE / top
    place = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, score_layout)))
    fraction = gl.where((place & 1) == 1, FRACTION_RANGE / 4, FRACTION_RANGE)[:, None, None]

    m = gl.full([GP], EMPTY, gl.float32, layout=head_layout)
    l = gl.full([8, GP], 0.0, gl.float32, layout=statistics)
    weight_sum = gl.full([8, GP], 0.0, gl.float32, layout=statistics)
    acc = _whole(gl.full([D, 2 * GP], 0, gl.int32, ACC), D, GP).to(gl.float32)
    column_layout: gl.constexpr = gl.SliceLayout(0, acc.type.layout)

    for page in range(low, high):
        stage = ring + slot * STAGE_BYTES
        _run(WAIT_BARRIER, "=r,r,r", (barriers + 8 * slot, parity))
        key_words = _load_keys(key_lane + stage + key_place, words)
        mean = _load_mean(mean_lane + stage + mean_place, D)
        k0, k1, k2, k3 = _load_words(scale_lane + stage + KEY_SCALE)
        v0, v1, v2, v3 = _load_words(scale_lane + stage + VALUE_SCALE)
        _fetch(
            key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr, value_scale_ptr,
            following.to(gl.int64) * K, ring + write * STAGE_BYTES, barriers + 8 * write,
            (page > low) & (page + AHEAD < high), D,
        )  # fmt: skip
        following = gl.load(table_ptr + page + (AHEAD + 1), mask=page + (AHEAD + 1) < high, other=0)

        # Scores in units of the integer sums.
        sums = _mma(mean, coarse, gl.full([16, 2 * GP], 0.0, gl.float32, layout=ACC))
        if not EXACT_QUERY:
            sums = _mma(mean, rest, sums)
        first_half, second_half = gl.split(sums.reshape([2, 8, GP, 2]))
        mean_score = _first(first_half.permute((1, 2, 0))) + _second(second_half.permute((1, 2, 0)))
        mean_score = gl.convert_layout(mean_score, statistics, assert_trivial=True) * mean_unit[None, :]
        sums = _mma(_key_operand(key_words, D), limbs, gl.full([64, 2 * GP], 0, gl.int32, ACC))
        sums = gl.convert_layout(_whole(sums, 64, GP).reshape([8, 8, GP]), score_layout, assert_trivial=True)
        key_scale = _scales(k0, k1, k2, k3, token_layout)[:, :, None]
        score = sums.to(gl.float32) * key_scale + (key_scale * start + mean_score[None, :, :])
        if SLIDING:
            token = 8 * _iota(score_layout, 3, 1, 8) + _iota(score_layout, 3, 0, 8)
            score = gl.where(token + (SINK_PAGES + page) * PAGE >= oldest, score, HIDDEN)

        # The whole warp branches, and rarely: on its first page, then where a score is far above the maximum.
        p = gl.exp2(score * unit[None, :][None, :, :] - (m * unit)[None, :][None, :, :])
        total = gl.sum(p, 0)
        if gl.max((total > SLACK).to(gl.int32).reshape([8 * GP]), 0) != 0:
            m_new = gl.maximum(m, gl.max(gl.max(score, 0), 0))
            alpha = gl.exp2((m - m_new) * unit)
            acc *= gl.convert_layout(alpha, column_layout, assert_trivial=True)[None, :]
            l *= alpha[None, :]
            weight_sum *= alpha[None, :]
            m = m_new
            p = gl.exp2(score * unit[None, :][None, :, :] - (m * unit)[None, :][None, :, :])
            total = gl.sum(p, 0)
        l += total

        # P * scale as a fraction of the page's largest; as integers, positive floats have the same order.
        p *= _scales(v0, v1, v2, v3, token_layout)[:, :, None]
        weight_sum += gl.sum(p, 0)
        largest = gl.max(gl.max(p.to(gl.int32, bitcast=True), 0), 0).to(gl.float32, bitcast=True)
        largest = gl.maximum(largest, 1.0e-30)
        inverse = gl.inline_asm_elementwise(
            RECIPROCAL, "=r,r", [largest], dtype=gl.float32, is_pure=True, pack=1
        )
        weights = _weight_operand(p * (fraction * inverse[None, :][None, :, :]) + WHOLE, GP)
        values = _value_operand(_load_values(value_lane + stage + value_place, D), D)
        sums = _mma(values, weights, gl.full([D, 2 * GP], 0, gl.int32, ACC))
        factor = gl.convert_layout(largest * (1.0 / FRACTION_RANGE), column_layout, assert_trivial=True)
        acc += _whole(sums, D, GP).to(gl.float32) * factor[None, :]
        slot = _next(slot, STAGES)
        parity = gl.where(slot == 0, parity ^ 1, parity)
        write = _next(write, STAGES)

    l = gl.convert_layout(gl.sum(l, 0), column_layout)
    weight_sum = gl.convert_layout(gl.sum(weight_sum, 0), column_layout)
    m = gl.convert_layout(m * unit, column_layout)
    o = acc - 1.5 * weight_sum[None, :]
    _run(WARP_BARRIER, "=r", ())  # every lane has read the last page
    head = gl.arange(0, GP, layout=column_layout)
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, o.type.layout))
    place = ring + head[None, :] * _partial_bytes(D) + 4 * channel[:, None]
    _run(STORE_1, "=r,r,r", (place, o.to(gl.int32, bitcast=True)))
    place = ring + GP * _partial_bytes(D) + 8 * head
    _run(STORE_1_IN_FIRST_ROW, "=r,r,r", (place, m.to(gl.int32, bitcast=True)))
    _run(STORE_1_IN_FIRST_ROW, "=r,r,r", (place + 4, l.to(gl.int32, bitcast=True)))
    return slot, parity


@gluon.constexpr_function
def _partial_bytes(head_dim: int) -> int:
    """One head of a warp's result in its ring: heads are kept apart so that they fall in different banks."""
    return 4 * head_dim + 32


@gluon.jit
def _merge_warps(
    rings, segment, o_ptr, lse_ptr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr
):
    """One partial result of what every warp has left in its ring: o, largest score (base 2), sum."""
    RING: gl.constexpr = ring_bytes(D, STAGES)
    gl.static_assert(GP * (_partial_bytes(D) + 8) <= STAGES * _stage_bytes(D))
    quad = gl.arange(0, GP * D // 4, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    head = quad // (D // 4)
    place = rings + head * _partial_bytes(D) + quad % (D // 4) * 16
    statistics = rings + GP * _partial_bytes(D) + 8 * head
    top = _load_word(statistics).to(gl.float32, bitcast=True)
    for n in gl.static_range(1, WARPS):
        top = gl.maximum(top, _load_word(statistics + n * RING).to(gl.float32, bitcast=True))
    l = gl.full([GP * D // 4], 0.0, gl.float32, quad.type.layout)
    o0, o1, o2, o3 = l, l, l, l
    for n in gl.static_range(WARPS):
        m = _load_word(statistics + n * RING).to(gl.float32, bitcast=True)
        factor = gl.exp2(m - top)
        l += factor * _load_word(statistics + n * RING + 4).to(gl.float32, bitcast=True)
        a, b, c, d = _load_words(place + n * RING)
        o0 += factor * a.to(gl.float32, bitcast=True)
        o1 += factor * b.to(gl.float32, bitcast=True)
        o2 += factor * c.to(gl.float32, bitcast=True)
        o3 += factor * d.to(gl.float32, bitcast=True)
    safe = gl.where(l > 0, l, 1.0)
    rows = segment * G + head
    lse = gl.where(l > 0, top + gl.log2(safe), float("-inf"))
    gl.store(lse_ptr + rows, lse, mask=(head < G) & (quad % (D // 4) == 0))
    inverse = 1.0 / safe
    o = _join4(o0 * inverse, o1 * inverse, o2 * inverse, o3 * inverse).reshape([GP * D // 4, 4])
    layout: gl.constexpr = o.type.layout
    flat = 4 * gl.arange(0, GP * D // 4, layout=gl.SliceLayout(1, layout))[:, None]
    flat += gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    gl.store(o_ptr + segment.to(gl.int64) * (G * D) + flat, o, mask=flat < G * D)


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
    SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window, 16 tokens at a time.

    Query and probabilities are split into two bf16, in neighbouring columns 2 h and 2 h + 1.
    """
    page, physical = _window_page(index, history, head, window_table_ptr, K, SINK_PAGES, RECENT_SLOTS)

    # Contraction index 32 s + 16 t + 8 x + 2 c + b is channel 32 s + 8 c + 4 t + 2 x + b.
    query_layout: gl.constexpr = _window_query_layout(D, GP)
    n = _iota(query_layout, 4, 0, 2 * GP)
    place = 32 * _iota(query_layout, 4, 1, D // 32) + 8 * _iota(query_layout, 4, 2, 4)
    place = (n >> 1) * D + place + _iota(query_layout, 4, 3, 8)
    q = gl.load(query_ptr + place, mask=((n >> 1) < G) & (place >= 0), other=0.0)
    if EXACT_QUERY:
        q = gl.where((n & 1) == 0, q, 0.0)
    else:
        coarse = q.to(gl.bfloat16)
        q = gl.where((n & 1) == 0, coarse, (q - coarse.to(gl.float32)).to(gl.bfloat16))
    q = q.reshape([2 * GP, D // 32, 4, 2, 2, 2]).permute((1, 3, 4, 2, 5, 0)).reshape([D, 2 * GP])
    q = gl.convert_layout(q, HALVES_RIGHT, assert_trivial=True)

    key_layout: gl.constexpr = _window_key_layout(D)
    key_token = _iota(key_layout, 4, 0, 16)
    key_channel = 32 * _iota(key_layout, 4, 1, D // 32) + 8 * _iota(key_layout, 4, 2, 4)
    key_channel = key_channel + _iota(key_layout, 4, 3, 8)
    value_layout: gl.constexpr = _window_value_layout(D)
    value_token = _iota(value_layout, 4, 0, 16)
    value_channel = 64 * _iota(value_layout, 4, 1, D // 64) + 8 * _iota(value_layout, 4, 2, 8)
    value_channel = value_channel + _iota(value_layout, 4, 3, 8)

    like = _first(gl.full([16, 2 * GP], 0.0, gl.float32, layout=ACC).reshape([16, GP, 2]))
    score_layout: gl.constexpr = like.type.layout
    head_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    m = gl.full([GP], EMPTY, gl.float32, layout=head_layout)
    l = gl.full([GP], 0.0, gl.float32, layout=head_layout)
    acc = gl.full([D, 2 * GP], 0.0, gl.float32, layout=ACC)
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
        score = _mma(key, q, gl.full([16, 2 * GP], 0.0, gl.float32, layout=ACC))
        first, second = gl.split(score.reshape([16, GP, 2]))
        row = token + gl.arange(0, 16, layout=gl.SliceLayout(1, score_layout))
        visible = ((row < length) & (row >= oldest))[:, None]
        score = gl.where(visible, (first + second) * softmax_scale, HIDDEN)
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
        columns = gl.convert_layout(columns, gl.SliceLayout(0, ACC), assert_trivial=True)
        acc = _mma(value, _transpose_operand(p, 16, 2 * GP), acc * columns[None, :])
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


@gluon.jit(do_not_specialize=["sliding_window", "batch", "pieces", "stride_table"])
def _stage_kernel(
    query_ptr, rotated_ptr, key_codes_ptr, value_codes_ptr, mean_ptr, key_scale_ptr,
    value_scale_ptr, window_key_ptr, window_value_ptr, page_table_ptr, stride_table, window_table_ptr,
    lengths_ptr, history_ptr, softmax_scale, sliding_window, batch, pieces, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr,
    RECENT_SLOTS: gl.constexpr, WINDOW_PAGES: gl.constexpr, SLIDING: gl.constexpr, BATCH_P: gl.constexpr,
    STAGES: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Grid (pieces * K): every block takes its piece of the work, see `DecodePlan`, and deals it out to its
    warps, sequence by sequence."""
    WINDOW: gl.constexpr = (SINK_PAGES + RECENT_SLOTS) * WINDOW_PAGES
    SLOTS: gl.constexpr = SINK_PAGES + RECENT_SLOTS
    STAGE_BYTES: gl.constexpr = _stage_bytes(D)
    RING: gl.constexpr = ring_bytes(D, STAGES)
    gdc_launch_dependents()
    memory = gl.allocate_shared_memory(
        gl.int32, [shared_bytes(D, STAGES) // 128, 32], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    memory.index(0).store(gl.full([32], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [WARPS], [0])))
    rings = gl.inline_asm_elementwise(SHARED_MEMORY, "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    warp = gl.inline_asm_elementwise(WARP, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    ring = rings + warp * RING
    barriers = ring + STAGES * STAGE_BYTES
    _run(BLOCK_BARRIER, "=r", ())  # the store above lies in a ring
    for n in gl.static_range(STAGES):
        _run(START_BARRIER, "=r,r", (barriers + 8 * n,))
    _run(PUBLISH_BARRIERS, "=r", ())
    slot = 0
    parity = 0

    # This block's share [x, end) of all pages.
    index = gl.arange(0, BATCH_P, layout=gl.BlockedLayout([BATCH_P // 32], [32], [WARPS], [0]))
    load = gl.load(history_ptr + index, mask=index < batch, other=0)
    if SLIDING:
        lengths = gl.load(lengths_ptr + index, mask=index < batch, other=0)
        load -= plain.first_page(gl.maximum(lengths - sliding_window, 0), load, SINK_PAGES)
    load = gl.where(index < batch, load + WINDOW, 0)
    total = gl.sum(load, 0)
    head = gl.program_id(0) % K
    x = plain.piece_start(gl.program_id(0) // K, total, pieces)
    end = plain.piece_start(gl.program_id(0) // K + 1, total, pieces)
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
        first = plain.first_page(oldest, history, SINK_PAGES) if SLIDING else 0
        row_end = start + WINDOW + history - first
        # This warp's share [low, high) of the sequence.
        share = gl.minimum(end, row_end) - x
        low = x - start + share * warp // WARPS
        high = x - start + share * (warp + 1) // WARPS
        page_low = first + gl.maximum(low - WINDOW, 0)
        page_high = first + gl.maximum(high - WINDOW, 0)
        table = page_table_ptr + b * stride_table
        following = gl.load(table + page_low, mask=page_low < page_high, other=0)
        write = slot
        for n in gl.static_range(STAGES - 1):
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
                lse_ptr, K, G, GP, D, SINK_PAGES, RECENT_SLOTS, EXACT_QUERY,
            )  # fmt: skip
        slot, parity = _history_part(
            rotated_ptr + row * G * D, query_ptr + row * G * D, key_codes, value_codes, mean, key_scale,
            value_scale, table, page_low, page_high, oldest, softmax_scale, ring, barriers, slot, parity,
            following,
            K, G, GP, D, SINK_PAGES, SLIDING, STAGES, EXACT_QUERY,
        )  # fmt: skip
        _run(BLOCK_BARRIER, "=r", ())
        segment = batch * K * SLOTS + gl.program_id(0) + b * K
        _merge_warps(rings, segment, o_ptr, lse_ptr, G, GP, D, STAGES)
        _run(BLOCK_BARRIER, "=r", ())
        x = gl.minimum(row_end, end)
        start = row_end
        b += 1
    memory._keep_alive()


# ------------------------------------------------------------------------------------------ launches


def _reserve_shared_memory(kernel) -> None:
    """Makes later launches of a compiled kernel ask for as much shared memory as a multiprocessor has.

    A launch that starts early shares multiprocessors with the one before it, and their division between cache
    and shared memory: the stage must not find less than it needs.
    """
    _set_carveout(kernel.function)


@functools.cache
def _set_carveout(function: int) -> None:
    preferred_shared_memory_carveout, percent = 9, 100
    ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(function), preferred_shared_memory_carveout, percent
    )


def decode_attention(
    query: torch.Tensor,
    cache,
    rotation,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> [B, N, D] of `dtype`; `softmax_scale` multiplies the scores (usually D**-0.5). A window
    of w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    sequence of length 0 yields zeros. Raises ShapeError; NotImplementedError (device other than Hopper,
    head_dim other than 64, 128, 256, more than 16 query heads per key/value head) before anything is
    allocated. CUDA-graph capturable.
    """
    check_hopper(query)
    if query.shape[-1] not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {query.shape[-1]}, the Gluon kernel serves {HEAD_DIMS}")
    group = plain.query_group(query, cache)
    padded_group = max(4, triton.next_power_of_2(group))
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    heads, batch = query.shape[1] // group, query.shape[0]
    blocks = _blocks(query.shape[-1], padded_group)
    pieces = blocks * processors // heads
    # A piece that goes over the end of a sequence starts and ends twice. Where sequences have one length none
    # does if there are as many pieces for each; but not at the price of too many idle multiprocessors.
    aligned = pieces // batch * batch
    if 16 * aligned >= 15 * pieces:
        pieces = aligned
    plan = plain.plan_decode(
        query, cache, rotation, sliding_window, programs=heads * pieces, window_pages=_window_pages(batch)
    )
    plain.check_sinks(plan, sink_logits)
    query = query.contiguous()
    rotated, kernel = plain.rotate(plan, query, rotation.query_transform, EARLY=True)
    _reserve_shared_memory(kernel)
    o, lse = plain.allocate_partials(plan, query.device)
    kernel = _stage_kernel[(plan.pieces * plan.heads,)](
        query, rotated, cache.key_codes, cache.value_codes,
        cache.key_page_mean.view(torch.int16), cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.window_key.view(torch.int16),
        cache.window_value.view(torch.int16), cache.page_table, cache.page_table.shape[1],
        cache.window_table, cache.lengths, cache.history_pages, softmax_scale * plain.LOG2_E,
        sliding_window or 0, plan.batch, plan.pieces, o, lse,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim, SINK_PAGES=plan.sink_pages,
        RECENT_SLOTS=plan.recent_slots, WINDOW_PAGES=plan.window_pages, SLIDING=sliding_window is not None,
        BATCH_P=plan.padded_batch, STAGES=RING_PAGES,
        EXACT_QUERY=query.dtype == torch.bfloat16, num_warps=WARPS.value,
        maxnreg=min(255, 65536 // (32 * WARPS.value * blocks)), launch_pdl=True,
    )  # fmt: skip
    _reserve_shared_memory(kernel)
    out, kernels = plain.merge(plan, o, lse, cache, rotation, sink_logits, dtype, EARLY=True, launch_pdl=True)
    for kernel in kernels:
        _reserve_shared_memory(kernel)
    return out
