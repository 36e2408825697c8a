"""One page of one head by a Gluon program of four warps, for up to 128 channels: what pages and tokens share.

A program keeps the limbs of one head's transform in shared memory. Warp w owns tokens 16 w ... 16 w + 15 of a
page; lane (g, c) of the matrix unit owns tokens 2 g and 2 g + 1 of them. The rows of a page arrive in shared
memory; every lane reads the entries of its left operand, centers them and splits them into limbs where they
are, and the products leave it the codes of whole key words. Values meet in one lane after three exchanges
between lanes.

Contraction index 32 s + 16 h + 4 c + b is channel 32 s + 8 c + 4 h + b, so that a lane reads 16 bytes at a
time. Column 8 j + 2 c + b is channel D/4 c + 2 j + b of keys and 32 (j / 4) + 8 c + 2 (j % 4) + b of values
and of all that is rounded sequentially (`gluon_sequential.py`, STEPS blocks; 0: to the nearest).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_sequential import store_sequential
from .gluon_steps import (
    BF16_LIMIT,
    LIMBS,
    centered,
    clean,
    clean_pairs,
    index_along,
    key_words,
    linear,
    log2,
    max_halves,
    mean_of_sums,
    power_of_two,
    span,
    split_rows,
    sum_rows,
    summands,
    value_words,
)
from .steps import CLEAN_BITS, CODES, MULTIPLIER_SHIFT, PAGE, SCALE_DOWN

COLUMNS = gl.constexpr(64)  # of one product: few enough that sums, operands and results stay in registers


# ------------------------------------------------------------------------------------------ layouts


@gluon.constexpr_function
def _operand_pairs(D: int):
    """Pairs [64, D / 2] as lanes own them in the left operand: 4 pairs of two tokens, then further ones."""
    registers = [(1, 1), (1, 2), (0, 1), *span(1, 16, D // 2)]
    return linear([64, D // 2], registers, [(1, 4), (1, 8), *span(0, 2, 16)], span(0, 16, 64))


@gluon.constexpr_function
def _row_pairs(D: int):
    """Pairs [64, D / 2] as they are copied and as keys are averaged: 4 pairs of several tokens."""
    rows = 256 // D  # of one read of a warp
    registers = [(1, 1), (1, 2), *span(0, rows, 16)]
    return linear([64, D // 2], registers, [*span(1, 4, D // 2), *span(0, 1, rows)], span(0, 16, 64))


@gluon.constexpr_function
def _transform_layout(D: int, words: bool):
    """[D, D]: a thread has 8 neighbours of four rows, or their columns one by one: words of limbs."""
    first, second = 1024 // D, 4096 // D  # rows of a warp and of all warps at a time
    rows, columns = span(0, 1, 4), span(1, 1, 8)
    registers = [*rows, *columns] if words else [*columns, *rows]
    registers += span(0, second, D)
    return linear([D, D], registers, [*span(1, 8, D), *span(0, 4, first)], span(0, first, second))


@gluon.constexpr_function
def _sums_of_channels(D: int):
    """[1024 / D, D]: a thread has a whole column (and, where D = 64, another thread has it too)."""
    warps = [*span(1, 32, D), (-1, 0)][:2]
    return linear([1024 // D, D], span(0, 1, 1024 // D), span(1, 1, 32), warps)


@gluon.constexpr_function
def everywhere(size: int):
    """[size]: every thread has all."""
    return linear([size], span(0, 1, size), [(-1, 0)] * 5, [(-1, 0)] * 2)


PRODUCTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS.value, 32])
)
LEFT = gl.constexpr(gl.DotOperandLayout(0, PRODUCTS.value, 4))
# [64 tokens, 4 c, COLUMNS / 4]: the rotated entries of a lane, in its registers.
RESULTS = gl.constexpr(
    linear(
        [64, 4, COLUMNS.value // 4],
        [(2, 1), (0, 1), *span(2, 2, COLUMNS.value // 4)],
        [(1, 1), (1, 2), *span(0, 2, 16)],
        span(0, 16, 64),
    )
)


# ------------------------------------------------------------------------------------------ steps


@gluon.jit
def _store_transform(transform_ptr, high_limbs, low_limbs, BY_LANE: gl.constexpr, D: gl.constexpr):
    """The limbs of the transform to shared memory [columns, contraction index], both in operand order."""
    layout: gl.constexpr = _transform_layout(D, False)
    row = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    x = gl.load(transform_ptr + row[:, None] * D + column[None, :])
    x = gl.convert_layout(x, _transform_layout(D, True)).to(gl.int32)
    high, low = gl.inline_asm_elementwise(
        LIMBS, "=r,=r,r,r,r,r", [x], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    high_limbs.store(_transform_operand(high, BY_LANE, D))
    low_limbs.store(_transform_operand(low, BY_LANE, D))


@gluon.jit
def _transform_operand(x, BY_LANE: gl.constexpr, D: gl.constexpr):
    """Transform [D channels, D channels] -> [columns, contraction index]; BY_LANE: columns of keys."""
    x = x.reshape([D // 32, 4, 2, 4, D]).permute((0, 2, 1, 3, 4))  # s, h, c, b
    if BY_LANE:
        x = x.reshape([D, 4, D // 8, 2]).permute((2, 1, 3, 0))  # j, c, b
    else:
        x = x.reshape([D, D // 32, 4, 4, 2]).permute((1, 3, 2, 4, 0))
    return x.reshape([D, D])


@gluon.jit
def _largest_of_page(x, scratch):
    """The largest of x int32 [4 warps, n], through `scratch` int32 [4] in shared memory."""
    scratch.store(gl.max(x, 1))
    return gl.max(scratch.load(everywhere(4)), 0)


@gluon.jit
def _rows_of_threads(x, D: gl.constexpr):
    """[64, C] in the layout of `_row_pairs` -> [1024 / D, D / 16, C]: the middle axis lies in a thread."""
    x = x.reshape([4, D // 16, 256 // D, x.shape[1]]).permute((0, 2, 1, 3))
    return x.reshape([1024 // D, D // 16, x.shape[3]])


@gluon.jit
def _largest_key(pairs, scratch, D: gl.constexpr):
    """The largest magnitude, as bf16 bits, of a page of pairs in the layout of `_row_pairs`."""
    tops = gl.reduce(_rows_of_threads(pairs & 0x7FFF7FFF, D), 1, max_halves)
    tops = gl.reduce(tops.reshape([128, 4]), 1, max_halves)
    return _largest_of_page(gl.maximum(tops & 0xFFFF, tops >> 16).reshape([4, 32]), scratch)


@gluon.jit
def _load_keys(tile, page_mean_ptr, mean, scratch, sums, D: gl.constexpr):
    """Steps 1 and 2 of a page of keys -> its clean pairs in the layout of `_operand_pairs`.

    The mean goes to memory and, as float32 [D], to `mean`. `tile`, `mean`, `scratch` int32 [4] and `sums`
    int32 [1024 / D, D] are in shared memory.
    """
    rows = tile.load(_row_pairs(D))
    top = _largest_key(rows, scratch, D)
    if top > BF16_LIMIT:
        rows = clean_pairs(rows)
        tile.store(rows)
        top = _largest_key(rows, scratch, D)
    sums.store(gl.sum(_rows_of_threads(summands(rows, top), D), 1))
    pairs = tile.load(_operand_pairs(D))
    bits = mean_of_sums(gl.sum(sums.load(_sums_of_channels(D)), 0), top)
    channel = gl.arange(0, D, layout=bits.type.layout)
    gl.store(page_mean_ptr + channel, bits.to(gl.int16, bitcast=True))
    mean.store(bits.to(gl.float32))
    return pairs


@gluon.jit
def _operand(limbs, D: gl.constexpr):
    """Bytes [64 tokens, D channels] -> the left operand of the products."""
    x = limbs.reshape([4, 8, 2, D // 32, 4, 2, 4]).permute((0, 2, 1, 3, 5, 4, 6)).reshape([PAGE, D])
    return gl.convert_layout(x, LEFT, assert_trivial=True)


@gluon.jit
def _rotate(high, low, t_high, t_low, column: gl.constexpr):
    """Step 6: limbs [64, D] and, in shared memory [columns, D] -> float32 [64 tokens, 4 c, COLUMNS / 4].

    Of COLUMNS columns; |Y| < 2**24, so that float32 holds it.
    """
    t_high = t_high.slice(column, COLUMNS).permute((1, 0))
    t_low = t_low.slice(column, COLUMNS).permute((1, 0))
    zero = gl.zeros([PAGE, COLUMNS], gl.int32, PRODUCTS)
    y = warpgroup_mma(high, t_high, zero, use_acc=False, is_async=True)
    small = warpgroup_mma(low, t_low, zero, use_acc=False, is_async=True)
    y, small = warpgroup_mma_wait(0, deps=[y, small])
    y = (y << 8) + (small >> 8)
    y = warpgroup_mma(high, t_low, y, is_async=True)
    y = warpgroup_mma(low, t_high, y, is_async=True)
    y = warpgroup_mma_wait(0, deps=[y]).to(gl.float32)
    y = y.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((0, 2, 1, 4, 3, 5)).reshape([PAGE, 4, COLUMNS // 4])
    return gl.convert_layout(y, RESULTS, assert_trivial=True)


@gluon.jit
def store_page(
    z, top, t_high, t_low, multiplier, feedback, shift, codes_ptr, scale_ptr, slot,
    IS_KEY: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    """Steps 3 to 9 and packing of `centered` rows into page and head `slot` of the pool."""
    codes_ptr += slot * (PAGE * D // CODES)
    scale_ptr += slot * PAGE
    high, low, exponent = split_rows(z, top)
    high, low = _operand(high, D), _operand(low, D)
    y = (_rotate(high, low, t_high, t_low, 0),)
    sums = sum_rows(y[0])
    if D > COLUMNS:
        y += (_rotate(high, low, t_high, t_low, COLUMNS),)
        sums += sum_rows(y[1])
    mean_abs = gl.sum(gl.sum(sums, 2), 1) >> log2(D)
    bound = (mean_abs * multiplier) >> MULTIPLIER_SHIFT
    exponent = gl.convert_layout(exponent, bound.type.layout)
    scale = bound.to(gl.float32) * power_of_two(exponent + SCALE_DOWN)
    token = gl.arange(0, PAGE, layout=bound.type.layout)
    gl.store(scale_ptr + token, scale.to(gl.bfloat16).to(gl.int16, bitcast=True))
    if STEPS > 0:
        store_sequential(y, bound, shift, feedback, codes_ptr, IS_KEY, D, STEPS)
    else:
        _store_nearest(y, bound.to(gl.float32), codes_ptr, IS_KEY, D)


@gluon.jit
def _store_nearest(y, bound, codes_ptr, IS_KEY: gl.constexpr, D: gl.constexpr):
    """Step 8 and packing; codes_ptr is at the page and head."""
    if IS_KEY:
        words = key_words(y[0], bound)
        if D > COLUMNS:
            words = gl.join(words, key_words(y[1], bound)).reshape([PAGE, 4, 2])
        offset = (
            index_along(words, 0) * (D // CODES) + index_along(words, 1) * (D // 64) + index_along(words, 2)
        )
        gl.store(codes_ptr + offset, words)
    else:
        for half in gl.static_range(D // COLUMNS):
            words = value_words(y[half], bound)
            row = index_along(words, 0)
            channel = half * COLUMNS + index_along(words, 2) * 32 + index_along(words, 1) * 8 + row % 8
            gl.store(codes_ptr + channel * (PAGE // CODES) + row // 8, words)


@gluon.jit
def role_memory(transform_ptr, mean_ptr, IS_KEY: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr):
    """What a program keeps of one head and role, pointers at the head.

    -> in shared memory the limbs of the transform, a tile of rows (pairs [64, D / 2]), the mean (of values:
    clean and filled in) and two places to work in; the bits of the largest |mean| of values.
    """
    limb_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=D, element_bitwidth=8, rank=2)
    t_high = gl.allocate_shared_memory(gl.int8, [D, D], limb_layout)
    t_low = gl.allocate_shared_memory(gl.int8, [D, D], limb_layout)
    _store_transform(transform_ptr, t_high, t_low, IS_KEY and STEPS == 0, D)
    fence_async_shared()
    # 64-byte pieces of every other pair of rows change places: lanes 2 g and 2 g + 1 read other banks.
    tile_layout: gl.constexpr = gl.SwizzledSharedLayout(vec=16, per_phase=2, max_phase=2, order=[1, 0])
    tile = gl.allocate_shared_memory(gl.int32, [PAGE, D // 2], tile_layout)
    mean = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    scratch = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    sums = gl.allocate_shared_memory(gl.int32, [1024 // D, D], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))
    mean_top = 0
    if not IS_KEY:
        channel = gl.arange(0, D, layout=gl.BlockedLayout([1], [32], [4], [0]))
        bits = clean(gl.load(mean_ptr + channel).to(gl.int32) & 0xFFFF) << 16
        mean_top = gl.max(bits & 0x7FFFFFFF, 0)
        mean.store(bits.to(gl.float32, bitcast=True))
    return t_high, t_low, tile, mean, scratch, sums, mean_top


@gluon.jit
def tile_offsets(stride_token, D: gl.constexpr):
    layout: gl.constexpr = _row_pairs(D)
    token = gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, layout))
    return token[:, None] * stride_token + pair[None, :]


@gluon.jit
def copy_tile(pointers, tile, valid):
    async_copy.async_copy_global_to_shared(tile, pointers, mask=valid)
    async_copy.commit_group()


@gluon.jit
def center_tile(tile, mean, scratch, sums, mean_top, page_mean_ptr, IS_KEY: gl.constexpr, D: gl.constexpr):
    """Steps 1 and 2 -> `centered` rows; all warps have passed a barrier since they read the tile."""
    async_copy.wait_group(0)
    if IS_KEY:
        z, top = centered(_load_keys(tile, page_mean_ptr, mean, scratch, sums, D), mean)
    else:
        z, top = centered(tile.load(_operand_pairs(D)), mean)
        # In the usual case nothing is to be cleaned: no entry is large, and no mean that could hide one.
        if gl.maximum(_largest_of_page(top.reshape([4, 16]), scratch), mean_top) > CLEAN_BITS:
            z, top = centered(clean_pairs(tile.load(_operand_pairs(D))), mean)
    return z, top
