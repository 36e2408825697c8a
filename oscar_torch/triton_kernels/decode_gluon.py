"""Stage 1 of one-token attention on Hopper, in Gluon: codes go from memory to the matrix units in registers.

One warp is one program: it walks over whole pages with its own online softmax, so nothing is exchanged
between warps and nothing passes through shared memory in the loop. `decode_triton.py` prepares and merges.

Keys: int8 products. A nibble of a code word is code_even + 4 code_odd, so four masks and one shift turn a
word of 16 codes into four A registers of mma.m16n8k32; the weights of the nibbles are folded into the query.
The query is a 15-bit integer in two signed bytes; the high and the low byte of a head are neighbouring
columns, so every lane finds both halves of its score in its own registers. The accumulator starts at the bits
of 1.5 * 2**23, so the integer sum is read as a float without a conversion.

Values: fp16 products. `word & 0x00030003` read as two fp16 is code * 2**-24, codes at bits 2 i carry 4**i,
which the probabilities undo; `movmatrix` turns them from accumulator to operand layout.

Index bits (page of 64 tokens): row r = 8 i + g of a score tile is token 8 g + i, so that lane g owns 8
neighbouring tokens (one 16-byte load of scales) and code i of every value word meets row block i.
"""

import dataclasses

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .. import cache_format as fmt
from . import decode_triton as plain
from .quantize_triton import check_device

HEAD_DIMS = (64, 128, 256)
HOPPER = 9
MAGIC_BITS = gl.constexpr(0x4B400000)  # 1.5 * 2**23 as float32: integers below 2**22 sit in its mantissa
MAGIC = gl.constexpr(1.5 * 2.0**23)
PAGE = gl.constexpr(fmt.PAGE_TOKENS)
CODE_UNIT = gl.constexpr(2.0**24)  # a code read as an fp16 subnormal is code * 2**-24


AND_03 = gl.constexpr("and.b32 $0, $1, 0x03030303;")
AND_0F = gl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
HALF_0 = gl.constexpr("and.b32 $0, $1, 0x00030003;")
HALF_1 = gl.constexpr("and.b32 $0, $1, 0x000C000C;")
HALF_2 = gl.constexpr("and.b32 $0, $1, 0x00300030;")
HALF_3 = gl.constexpr("and.b32 $0, $1, 0x00C000C0;")
HALF_4 = gl.constexpr("and.b32 $0, $1, 0x03000300;")
TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
PROBABILITY_UNIT = gl.constexpr(2.0**15)  # probabilities times relative value scales, as fp16
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8]))
BYTES_LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 4))
BYTES_RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 4))
HALVES_LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 2))
HALVES_RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 2))


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How one head_dim runs: programs (warps) per multiprocessor, registers per thread, value prefetch."""

    warps_per_processor: int
    registers: int | None
    prefetch_values: bool


# 128 is the fastest of eight settings on an H200 at batch 8 and 32 (182 and 249 us in all; 12 warps
# take 193 and 271, but 47 instead of 50 us at batch 1); the other head_dims are not compared.
TUNING = {
    64: Tuning(warps_per_processor=16, registers=128, prefetch_values=False),
    128: Tuning(warps_per_processor=32, registers=128, prefetch_values=False),
    256: Tuning(warps_per_processor=8, registers=None, prefetch_values=False),
}


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
def _key_layout(words: int):
    """[8 g, 8 i, 4 c, words, 4 bytes]: lane (g, c) holds its words of tokens 8 g + i, each four times."""
    word = [(3, 1 << n) for n in range(words.bit_length() - 1)]
    registers = [(4, 1), (4, 2), *word, (1, 1), (1, 2), (1, 4)]
    return _linear([8, 8, 4, words, 4], registers, [(2, 1), (2, 2), (0, 1), (0, 2), (0, 4)])


@gluon.constexpr_function
def _value_layout(head_dim: int):
    """[D / 8, 8 g, 4 c, 2]: lane (g, c) holds word c of channels 8 r + g, each twice."""
    rows = [(0, 1 << n) for n in range((head_dim // 8).bit_length() - 1)]
    return _linear([head_dim // 8, 8, 4, 2], [(3, 1), *rows], [(2, 1), (2, 2), (1, 1), (1, 2), (1, 4)])


@gluon.constexpr_function
def _scale_layout():
    """[8 g, 8 i]: lane (g, any c) holds the scales of tokens 8 g + i."""
    return _linear([8, 8], [(1, 1), (1, 2), (1, 4)], [(-1, 0), (-1, 0), (0, 1), (0, 2), (0, 4)])


@gluon.constexpr_function
def _window_key_layout(head_dim: int):
    """[16 tokens, D / 32, 4 c, 8]: lane (g, c) holds 8 neighbouring channels of tokens g and g + 8."""
    blocks = [(1, 1 << n) for n in range((head_dim // 32).bit_length() - 1)]
    registers = [(3, 1), (3, 2), (3, 4), (0, 8), *blocks]
    return _linear([16, head_dim // 32, 4, 8], registers, [(2, 1), (2, 2), (0, 1), (0, 2), (0, 4)])


@gluon.constexpr_function
def _window_value_layout(head_dim: int):
    """[16 tokens, D / 64, 8 g, 8]: lane (g, c) holds 8 neighbouring channels of tokens 2 c, 2 c + 1, ..."""
    blocks = [(1, 1 << n) for n in range((head_dim // 64).bit_length() - 1)]
    registers = [(3, 1), (3, 2), (3, 4), (0, 1), (0, 8), *blocks]
    return _linear([16, head_dim // 64, 8, 8], registers, [(0, 2), (0, 4), (2, 1), (2, 2), (2, 4)])


@gluon.jit
def _widen(raw):
    """bf16 bits (int16) -> float32."""
    return (raw.to(gl.int32) << 16).to(gl.float32, bitcast=True)


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

    Contraction index ((part * D/64 + word) * 4 + c) * 4 + byte, parts as in decode_triton's query limbs.
    """
    word = gl.expand_dims(words, 4).broadcast_to([8, 8, 4, D // 64, 4])
    high = gl.expand_dims(words >> 4, 4).broadcast_to([8, 8, 4, D // 64, 4])
    low_parts = gl.join(_bytes(AND_03, word), _bytes(AND_0F, word))
    high_parts = gl.join(_bytes(AND_03, high), _bytes(AND_0F, high))
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
    """The inverse of `_columns_of_heads`; the zero columns of four heads are dropped: no registers."""
    if GP == 4:
        x, _ = gl.split(x.reshape([ROWS, 4, 2]))
    else:
        x = x.reshape([ROWS, GP // 8, 4, 2]).permute((0, 1, 3, 2)).reshape([ROWS, GP])
    return x


@gluon.jit
def _store_partial(
    o, m, l, out_row, channel, o_ptr, lse_ptr, total,
    G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """o float32 [D, GP] already divided by l; m, l [GP]; channel [D] names the rows of o."""
    layout: gl.constexpr = o.type.layout
    head = gl.arange(0, GP, layout=gl.SliceLayout(0, layout))
    rows = (out_row + head) * total
    gl.store(o_ptr + rows[None, :].to(gl.int64) * D + channel[:, None], o, mask=(head < G)[None, :])
    lse = gl.where(l > 0, m + gl.log2(gl.where(l > 0, l, 1.0)), float("-inf"))
    gl.store(lse_ptr + rows, lse, mask=head < G)


@gluon.jit
def _history_split(
    limbs_ptr, factor_ptr, bias_ptr, page_score_ptr, value_max_ptr,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, page_table_ptr,
    history, oldest, blocks, head, split, splits, total, out_row, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
    SINK_PAGES: gl.constexpr, SLIDING: gl.constexpr, BLOCKS: gl.constexpr, PREFETCH_VALUES: gl.constexpr,
):  # fmt: skip
    """Flash attention over one split of the INT2 pages, by one warp."""
    words: gl.constexpr = D // 64
    COLUMNS: gl.constexpr = 8 if GP == 4 else GP
    # Pages [low, high) of this split.
    first = gl.minimum(gl.maximum(oldest // PAGE - SINK_PAGES, 0), history) if SLIDING else 0
    per_split = (history - first + splits - 1) // splits
    low = first + split * per_split
    high = gl.minimum(low + per_split, history)

    # Offsets inside a page: of the lane, and (constants, folded into the load instructions) of its registers.
    key_layout: gl.constexpr = gl.SliceLayout(4, _key_layout(words))
    g = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, key_layout))))
    i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, key_layout))))
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, key_layout))))
    j = gl.arange(0, words, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, key_layout))))
    key_lane = (D // 2) * g[:, None, None, None] + words * c[None, None, :, None]
    key_register = (D // 16) * i[None, :, None, None] + j[None, None, None, :]
    value_layout: gl.constexpr = gl.SliceLayout(3, _value_layout(D))
    r = gl.arange(0, D // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, value_layout)))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, value_layout)))
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, value_layout)))
    value_lane = 4 * g[None, :, None] + c[None, None, :]
    value_register = 32 * r[:, None, None]
    scale_layout: gl.constexpr = _scale_layout()
    scale_lane = 8 * gl.arange(0, 8, layout=gl.SliceLayout(1, scale_layout))[:, None]
    scale_register = gl.arange(0, 8, layout=gl.SliceLayout(0, scale_layout))[None, :]

    # The query as right operand [D, 2 GP]: columns 2 h and 2 h + 1 are the bytes of head h.
    k = gl.arange(0, D, layout=gl.SliceLayout(1, BYTES_RIGHT))
    n = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, BYTES_RIGHT))
    limbs = gl.load(limbs_ptr + n[None, :] * D + k[:, None])
    start = gl.full([64, 2 * GP], MAGIC_BITS, gl.int32, layout=MMA)
    like, _ = gl.split(start.reshape([64, GP, 2]))
    score_layout: gl.constexpr = like.type.layout
    token_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    head_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    h = gl.arange(0, GP, layout=head_layout)
    factor = gl.load(factor_ptr + h)
    bias = gl.load(bias_ptr + h) + MAGIC
    inverse_factor = 1.0 / factor

    # Weights enter the fp16 product as p * scale / unit * 2**15 / 4**e, e the place of the code in its word.
    block = gl.arange(0, BLOCKS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    largest = gl.max(gl.load(value_max_ptr + block, mask=block < blocks, other=0.0), 0)
    unit_bits = (largest.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    unit = gl.where(largest > 0, unit_bits.to(gl.float32, bitcast=True), 1.0)
    place = gl.arange(0, 64, layout=token_layout) >> 3
    place = gl.where(place >= 5, place - 5, place)
    restore = (1 << (2 * place)).to(gl.float32)
    weight_unit = PROBABILITY_UNIT / (unit * restore)

    m = gl.full([GP], -3.0e38, gl.float32, layout=head_layout)
    o = _heads_of_columns(gl.full([D, COLUMNS], 0.0, gl.float32, layout=MMA), D, GP)
    pieces = gl.full([64, GP], 0.0, gl.float32, layout=score_layout).reshape([8, 8, GP])
    l = gl.sum(pieces, 0)
    weight_sum = gl.sum(pieces, 0)

    physical = gl.load(page_table_ptr + low, mask=low < high, other=0).to(gl.int64) * K + head
    following = gl.load(page_table_ptr + low + 1, mask=low + 1 < high, other=0)
    key_words = gl.load(key_codes_ptr + physical * (4 * D) + key_lane + key_register, mask=low < high)
    key_scale = gl.load(key_scale_ptr + physical * PAGE + scale_lane + scale_register, mask=low < high)
    value_scale = gl.load(value_scale_ptr + physical * PAGE + scale_lane + scale_register, mask=low < high)
    page_score = gl.load(page_score_ptr + low * GP + h, mask=(h < G) & (low < high), other=0.0)
    if PREFETCH_VALUES:
        value_words = gl.load(
            value_codes_ptr + physical * (4 * D) + value_lane + value_register, mask=low < high
        )
    for page in range(low, high):
        # Loads for the next page go out before this page is computed.
        more = page + 1 < high
        next_physical = following.to(gl.int64) * K + head
        following = gl.load(page_table_ptr + page + 2, mask=page + 2 < high, other=0)
        if not PREFETCH_VALUES:
            value_words = gl.load(value_codes_ptr + physical * (4 * D) + value_lane + value_register)
        next_key_words = gl.load(key_codes_ptr + next_physical * (4 * D) + key_lane + key_register, mask=more)
        next_key_scale = gl.load(
            key_scale_ptr + next_physical * PAGE + scale_lane + scale_register, mask=more
        )
        next_value_scale = gl.load(
            value_scale_ptr + next_physical * PAGE + scale_lane + scale_register, mask=more
        )
        next_page_score = gl.load(page_score_ptr + (page + 1) * GP + h, mask=(h < G) & more, other=0.0)
        if PREFETCH_VALUES:
            next_value_words = gl.load(
                value_codes_ptr + next_physical * (4 * D) + value_lane + value_register, mask=more
            )

        # Scores in units of `factor`: integers times the token's scale, plus the page's mean.
        s = mma_v2(_key_operand(key_words, D), limbs, start).to(gl.float32, bitcast=True)
        high_byte, low_byte = gl.split(s.reshape([64, GP, 2]))
        scale = gl.convert_layout(
            _widen(key_scale).permute((1, 0)).reshape([64]), token_layout, assert_trivial=True
        )
        score = (high_byte - MAGIC) * 256.0 + (low_byte - bias[None, :])
        score = score * scale[:, None] + (page_score * inverse_factor)[None, :]
        if SLIDING:
            row = gl.arange(0, 64, layout=token_layout)
            visible = (SINK_PAGES + page) * PAGE + 8 * (row & 7) + (row >> 3) >= oldest
            score = gl.where(visible[:, None], score, -3.0e38)
        m_new = gl.maximum(m, gl.max(score, 0))
        alpha = gl.exp2((m - m_new) * factor)
        p = gl.exp2(score * factor[None, :] - (m_new * factor)[None, :])
        if SLIDING:
            p = gl.where(visible[:, None], p, 0.0)
        scale = gl.convert_layout(
            _widen(value_scale).permute((1, 0)).reshape([64]), token_layout, assert_trivial=True
        )
        weight = p * (scale * weight_unit)[:, None]
        lane_alpha = gl.convert_layout(alpha, gl.SliceLayout(0, l.type.layout), assert_trivial=True)
        l = l * lane_alpha[None, :] + gl.sum(p.reshape([8, 8, GP]), 0)
        weight_sum = weight_sum * lane_alpha[None, :] + gl.sum(
            (weight * restore[:, None]).reshape([8, 8, GP]), 0
        )

        weights = _transpose_operand(_columns_of_heads(weight.to(gl.float16), 64, GP), 64, COLUMNS)
        o = o * gl.convert_layout(alpha, gl.SliceLayout(0, o.type.layout), assert_trivial=True)[None, :]
        acc = mma_v2(_value_operand(value_words, D), weights, _columns_of_heads(o, D, GP))
        o = _heads_of_columns(acc, D, GP)
        m = m_new
        physical = next_physical
        key_words = next_key_words
        key_scale = next_key_scale
        value_scale = next_value_scale
        page_score = next_page_score
        if PREFETCH_VALUES:
            value_words = next_value_words

    out_layout: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    l = gl.convert_layout(gl.sum(l, 0), out_layout)
    weight_sum = gl.convert_layout(gl.sum(weight_sum, 0), out_layout)
    m = gl.convert_layout(m * factor, out_layout)
    inverse = 1.0 / gl.where(l > 0, l, 1.0)
    o = (o * (CODE_UNIT / PROBABILITY_UNIT) - weight_sum[None, :] * (1.5 / PROBABILITY_UNIT)) * (
        unit * inverse
    )[None, :]
    channel = gl.arange(0, D, layout=gl.SliceLayout(1, o.type.layout))
    _store_partial(o, m, l, out_row, channel, o_ptr + split * D, lse_ptr + split, total, G, GP, D)


@gluon.jit
def _window_split(
    query_ptr, window_key_ptr, window_value_ptr, window_table_ptr, length, history, oldest, softmax_scale,
    index, head, out_row, o_ptr, lse_ptr, total,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
    SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window, by one warp, 16 tokens at a time.

    Query and probabilities are split into two bf16, in neighbouring columns 2 h and 2 h + 1.
    """
    recent = index - SINK_PAGES
    page = gl.where(recent < 0, index, index + history)
    slot = gl.where(recent < 0, index, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    physical = gl.load(window_table_ptr + slot).to(gl.int64) * K + head

    # Contraction index 32 s + 16 t + 8 x + 2 c + b is channel 32 s + 8 c + 4 t + 2 x + b.
    k = gl.arange(0, D, layout=gl.SliceLayout(1, HALVES_RIGHT))
    channel = (k & -32) + ((k >> 1) & 3) * 8 + ((k >> 4) & 1) * 4 + ((k >> 3) & 1) * 2 + (k & 1)
    n = gl.arange(0, 2 * GP, layout=gl.SliceLayout(0, HALVES_RIGHT))
    q = gl.load(query_ptr + (n >> 1)[None, :] * D + channel[:, None], mask=((n >> 1) < G)[None, :], other=0.0)
    q = q.to(gl.float32) * softmax_scale
    coarse = q.to(gl.bfloat16)
    q = gl.where((n & 1)[None, :] == 0, coarse, (q - coarse.to(gl.float32)).to(gl.bfloat16))

    key_layout: gl.constexpr = _window_key_layout(D)
    key_token = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, key_layout))))
    s = gl.arange(0, D // 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, key_layout))))
    c = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, key_layout))))
    x = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, key_layout))))
    key_channel = 32 * s[None, :, None, None] + 8 * c[None, None, :, None] + x[None, None, None, :]
    key_token = key_token[:, None, None, None]
    value_layout: gl.constexpr = _window_value_layout(D)
    value_token = gl.arange(
        0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, value_layout)))
    )
    s = gl.arange(0, D // 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, value_layout))))
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, value_layout))))
    x = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, value_layout))))
    value_channel = 64 * s[None, :, None, None] + 8 * g[None, None, :, None] + x[None, None, None, :]
    value_token = value_token[:, None, None, None]

    like, _ = gl.split(gl.full([16, 2 * GP], 0.0, gl.float32, layout=MMA).reshape([16, GP, 2]))
    score_layout: gl.constexpr = like.type.layout
    head_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    m = gl.full([GP], -3.0e38, gl.float32, layout=head_layout)
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
        score = gl.where(visible, first + second, -3.0e38)
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
    _store_partial(o, m, l, out_row, channel, o_ptr, lse_ptr, total, G, GP, D)


@gluon.jit(do_not_specialize=["splits"])
def _stage_kernel(
    query_ptr, limbs_ptr, factor_ptr, bias_ptr, page_score_ptr, value_max_ptr,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, window_key_ptr, window_value_ptr,
    page_table_ptr, stride_table, window_table_ptr, lengths_ptr, history_ptr, softmax_scale, sliding_window,
    blocks, splits, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
    SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr, SLIDING: gl.constexpr, BLOCKS: gl.constexpr,
    PREFETCH_VALUES: gl.constexpr,
):  # fmt: skip
    """Grid (window pages + splits, K, B), one warp each; the window pages start first."""
    window_slots: gl.constexpr = SINK_PAGES + RECENT_SLOTS
    total = splits + window_slots
    split = gl.program_id(0) - window_slots
    head = gl.program_id(1)
    b = gl.program_id(2)
    slot = b * K + head
    length = gl.load(lengths_ptr + b)
    history = gl.load(history_ptr + b)
    oldest = gl.maximum(length - sliding_window, 0) if SLIDING else 0
    if split >= 0:
        _history_split(
            limbs_ptr + slot * 2 * GP * D, factor_ptr + slot * GP, bias_ptr + slot * GP,
            page_score_ptr + slot * stride_table * GP, value_max_ptr + slot * blocks,
            key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, page_table_ptr + b * stride_table,
            history, oldest, blocks, head, split, splits, total, slot * G, o_ptr, lse_ptr,
            K, G, GP, D, SINK_PAGES, SLIDING, BLOCKS, PREFETCH_VALUES,
        )  # fmt: skip
    else:
        index = split + window_slots
        _window_split(
            query_ptr + slot * G * D, window_key_ptr, window_value_ptr, window_table_ptr + b * window_slots,
            length, history, oldest, softmax_scale, index, head, slot * G,
            o_ptr + (splits + index) * D, lse_ptr + splits + index, total,
            K, G, GP, D, SINK_PAGES, RECENT_SLOTS,
        )  # fmt: skip


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
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    plan = plain.plan_decode(query, cache, rotation, programs=tuning.warps_per_processor * processors)
    query = query.contiguous()
    prepared = plain.prepare(plan, query, cache, rotation, scale, limbs=True)
    o, lse = plain.allocate_partials(plan, query.device)
    _stage_kernel[(plan.total, plan.heads, plan.batch)](
        query, prepared.rotated, prepared.factor, prepared.bias, prepared.page_score, prepared.value_max,
        cache.key_codes, cache.value_codes, cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.window_key.view(torch.int16),
        cache.window_value.view(torch.int16), cache.page_table, cache.page_table.shape[1],
        cache.window_table, cache.lengths, cache.history_pages, scale * plain.LOG2_E, sliding_window or 0,
        plan.blocks, plan.splits, o, lse,
        K=plan.heads, G=plan.group, GP=plan.padded_group, D=plan.head_dim,
        SINK_PAGES=plan.sink_pages, RECENT_SLOTS=plan.recent_slots, SLIDING=sliding_window is not None,
        BLOCKS=max(32, triton.next_power_of_2(plan.blocks)), PREFETCH_VALUES=tuning.prefetch_values,
        num_warps=1, maxnreg=tuning.registers,
    )  # fmt: skip
    return plain.merge(plan, o, lse, rotation, sink_logits)
