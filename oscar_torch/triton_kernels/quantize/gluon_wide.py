"""Page quantizer for Hopper, in Gluon, for 256 channels: the bytes of `quantize/triton.py`, pages overlapped.

With so many channels the products alone take twice as long as rows and pages take to copy, and a warp waits
where it issues a product before the matrix unit has room. So they are issued in portions between pieces of
the other work, which belongs to other pages: while the products of a page run, the entries of the page before
become codes and the rows of the page behind become limbs. On an H200 that takes 1018 us for 4096 pages of 4
heads, of which the products alone take 610; one page after the other in two independent halves of a
multiprocessor took 1159.

A program of two warpgroups keeps the limbs of one head's transform in shared memory. Each group has half of
the columns and all tokens, so that the results stay in registers; the limbs of rows pass through shared
memory, in two places, since those of the next page are written while these are read. Warp w of a group owns
tokens 16 w ... 16 w + 15 of the results, and lane (g, c) of the matrix unit tokens 2 g and 2 g + 1 of them.

Contraction index 64 i + 32 j + k of 128 channels is channel 64 j + 32 i + k: so the lanes that read pieces of
rows together, and write limbs together, use all banks. Column 8 j + 2 c + b of the 128 of a group is channel
32 c + 2 j + b of keys and 32 (j / 4) + 8 c + 2 (j % 4) + b of values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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

D = gl.constexpr(256)
HALF = gl.constexpr(D.value // 2)  # channels of one product, columns of a warpgroup, pairs of a row
UP = gl.constexpr("cvt.rp.f32.s32 $0, $1;")  # a bound above 2**24 must not become an entry's 2**24


# ------------------------------------------------------------------------------------------ layouts

# Pairs [64, HALF] as they become limbs: a thread has 8 pairs of two tokens, in each half of the channels.
OPERAND_PAIRS = gl.constexpr(
    linear(
        [PAGE.value, HALF.value],
        [(1, 1), (1, 2), (1, 4), (0, 1), (1, 64)],
        [(0, 2), (0, 4), (1, 16), (1, 8), (1, 32)],
        span(0, 8, 64),
    )
)
# Pairs [64, HALF] as they are copied and as keys are averaged: 4 pairs of eight tokens.
ROW_PAIRS = gl.constexpr(
    linear([PAGE.value, HALF.value], [(1, 1), (1, 2), *span(0, 1, 8)], span(1, 4, 128), span(0, 8, 64))
)
# Sums of keys [8, D]: a thread has a whole channel.
CHANNEL_SUMS = gl.constexpr(linear([8, D.value], span(0, 1, 8), span(1, 1, 32), span(1, 32, 256)))
# [8]: every thread has all.
EVERYWHERE = gl.constexpr(linear([8], span(0, 1, 8), [(-1, 0)] * 5, [(-1, 0)] * 3))
PRODUCTS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, HALF.value, 32])
)
# [64 tokens, 2 groups x 4 c, HALF / 4]: the rotated entries of a lane, in its registers.
RESULTS = gl.constexpr(
    linear(
        [PAGE.value, 8, HALF.value // 4],
        [(2, 1), (0, 1), *span(2, 2, 32)],
        [(1, 1), (1, 2), *span(0, 2, 16)],
        [*span(0, 16, 64), (1, 4)],
    )
)
# Sums of rows [64 tokens, 2 groups]: a lane has both of its two tokens.
ROW_SUMS = gl.constexpr(
    linear(
        [PAGE.value, 2],
        [(1, 1), (0, 1)],
        [(-1, 0), (-1, 0), *span(0, 2, 16)],
        [*span(0, 16, 64), (-1, 0)],
    )
)


@gluon.constexpr_function
def _transform_layout(words: bool):
    """[64, D]: a thread has 8 neighbours of four rows, or these column by column: words of limbs."""
    rows, columns = span(0, 1, 4), span(1, 1, 8)
    registers = [*rows, *columns] if words else [*columns, *rows]
    return linear([64, 256], [*registers, (0, 32)], span(1, 8, 256), span(0, 4, 32))


# ------------------------------------------------------------------------------------------ steps


@gluon.jit
def _store_transform(transform_ptr, high_limbs, low_limbs, IS_KEY: gl.constexpr):
    """The limbs of the transform to shared memory [columns, contraction index], both in operand order."""
    layout: gl.constexpr = _transform_layout(False)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for part in gl.static_range(D // 64):
        index = 64 * part + row
        channel = (index & ~0x60) | ((index & 0x20) << 1) | ((index & 0x40) >> 1)
        x = gl.load(transform_ptr + channel[:, None] * D + column[None, :])
        x = gl.convert_layout(x, _transform_layout(True)).to(gl.int32)
        high, low = gl.inline_asm_elementwise(
            LIMBS, "=r,=r,r,r,r,r", [x], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
        high_limbs.slice(64 * part, 64, dim=1).store(_transform_operand(high, IS_KEY))
        low_limbs.slice(64 * part, 64, dim=1).store(_transform_operand(low, IS_KEY))


@gluon.jit
def _transform_operand(x, IS_KEY: gl.constexpr):
    """Transform [64 contraction indices, D channels] -> [columns, 64]."""
    if IS_KEY:
        x = x.reshape([64, 2, 4, 16, 2]).permute((1, 3, 2, 4, 0))  # group, j, c, b
    else:
        x = x.reshape([64, 8, 4, 4, 2]).permute((1, 3, 2, 4, 0))
    return x.reshape([D, 64])


@gluon.jit
def _largest_of_page(x, scratch):
    """The largest of x int32 [8 warps, n], through `scratch` int32 [8] in shared memory."""
    scratch.store(gl.max(x, 1))
    return gl.max(scratch.load(EVERYWHERE), 0)


@gluon.jit
def _largest_key(pairs, scratch):
    """The largest magnitude, as bf16 bits, of a page of pairs in the layout `ROW_PAIRS`."""
    tops = gl.reduce((pairs & 0x7FFF7FFF).reshape([8, 8, HALF]), 1, max_halves)
    tops = gl.reduce(tops.reshape([256, 4]), 1, max_halves)
    return _largest_of_page(gl.maximum(tops & 0xFFFF, tops >> 16).reshape([8, 32]), scratch)


@gluon.jit
def _load_keys(tile, scratch):
    """Step 1 of a page of keys, in `tile` too -> clean pairs in the layout `ROW_PAIRS`, `_largest_key`."""
    rows = tile.load(ROW_PAIRS)
    top = _largest_key(rows, scratch)
    if top > BF16_LIMIT:
        rows = clean_pairs(rows)
        tile.store(rows)
        top = _largest_key(rows, scratch)
    return rows, top


@gluon.jit
def _average(rows, top, page_mean_ptr, mean, place, valid):
    """Step 2 of a page of keys: its mean to memory, where `valid`, and as float32 [D] to `mean`.

    `place`: shared memory of limbs, int8 [64, D], that nobody needs yet.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    sums = place._reinterpret(gl.int32, [PAGE // 4, D], layout).slice(0, 8)
    sums.store(gl.sum(summands(rows, top).reshape([8, 8, D]), 1))
    bits = mean_of_sums(gl.sum(sums.load(CHANNEL_SUMS), 0), top)
    channel = gl.arange(0, D, layout=bits.type.layout)
    gl.store(page_mean_ptr + channel, bits.to(gl.int16, bitcast=True), mask=valid & (channel >= 0))
    mean.store(bits.to(gl.float32))


@gluon.jit
def _center_values(tile, mean, scratch, mean_top):
    """Steps 1 and 2 of a page of values -> `centered` rows."""
    z, top = centered(tile.load(OPERAND_PAIRS), mean)
    # In the usual case nothing is to be cleaned: no entry is large, and no mean that could hide one.
    if gl.maximum(_largest_of_page(top.reshape([8, 8]), scratch), mean_top) > CLEAN_BITS:
        z, top = centered(clean_pairs(tile.load(OPERAND_PAIRS)), mean)
    return z, top


@gluon.jit
def _store_limbs(z, top, high_limbs, low_limbs, exponents):
    """Steps 3 to 5 of `centered` rows, into shared memory."""
    high, low, exponent = split_rows(z, top)
    high_limbs.store(_operand(high))
    low_limbs.store(_operand(low))
    exponents.store(exponent)


@gluon.jit
def _operand(limbs):
    """Bytes [64 tokens, D channels] -> the left operand of the products."""
    x = limbs.reshape([4, 8, 2, 2, 2, 2, 32]).permute((0, 2, 1, 3, 5, 4, 6))
    return x.reshape([PAGE, D])


@gluon.jit
def _product(rows, columns, half: gl.constexpr, y, use_acc: gl.constexpr = True):
    """Adds limbs [64, D] times limbs [columns, D], of half of the channels, to y: under way."""
    rows = rows.slice(half * HALF, HALF, dim=1)
    columns = columns.slice(half * HALF, HALF, dim=1).permute((1, 0))
    return warpgroup_mma(rows, columns, y, use_acc=use_acc, is_async=True)


@gluon.jit
def _entries(y):
    """Results of products -> float32 [64 tokens, 8, HALF / 4]; |Y| <= 2**24, so that float32 holds it."""
    y = y.to(gl.float32).reshape([4, 2, 8, 2, 16, 4, 2]).permute((0, 2, 1, 3, 5, 4, 6))
    return gl.convert_layout(y.reshape([PAGE, 8, HALF // 4]), RESULTS, assert_trivial=True)


@gluon.jit
def _store_scales(y, exponent, multiplier, scale_ptr, row_sums):
    """Steps 7 and 9 -> bounds of the entries [64 tokens]; `row_sums` int32 [64, 2] is in shared memory."""
    sums = gl.sum(sum_rows(y), 2).reshape([PAGE, 2, 4])
    row_sums.store(gl.sum(sums, 2))
    mean_abs = gl.sum(row_sums.load(ROW_SUMS), 1) >> log2(D)
    bound = (mean_abs * multiplier) >> MULTIPLIER_SHIFT
    scale = bound.to(gl.float32) * power_of_two(exponent + SCALE_DOWN)
    token = gl.arange(0, PAGE, layout=bound.type.layout)
    gl.store(scale_ptr + token, scale.to(gl.bfloat16).to(gl.int16, bitcast=True))
    return gl.inline_asm_elementwise(UP, "=r,r", [bound], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _store_codes(y, bound, codes_ptr, IS_KEY: gl.constexpr):
    """Step 8 and packing."""
    if IS_KEY:
        words = key_words(y, bound)
        offset = index_along(words, 0) * (D // CODES) + index_along(words, 1) * 2 + index_along(words, 2)
        gl.store(codes_ptr + offset, words)
    else:
        words = value_words(y, bound)
        row, column = index_along(words, 0), index_along(words, 1)
        channel = column // 4 * HALF + index_along(words, 2) * 32 + column % 4 * 8 + row % 8
        gl.store(codes_ptr + channel * (PAGE // CODES) + row // 8, words)


@gluon.jit
def _copy_tile(rows_ptr, stride_token, tile, valid):
    """Rows of a page to shared memory, under way; their places are computed anew: no registers in between."""
    token = gl.arange(0, PAGE, layout=gl.SliceLayout(1, ROW_PAIRS))
    pair = gl.arange(0, HALF, layout=gl.SliceLayout(0, ROW_PAIRS))
    token = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1
    )
    offset = token[:, None] * stride_token + pair[None, :]
    async_copy.async_copy_global_to_shared(tile, rows_ptr + offset, mask=valid)
    async_copy.commit_group()


# ------------------------------------------------------------------------------------------ kernel


@gluon.jit
def bulk_role(
    rows_ptr, stride_page, stride_token, head, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr,
    IS_KEY: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Pages program_id(1), program_id(1) + programs, ... of one head and role; rows_ptr is at the head."""
    rotation = head * stride_rotation
    multiplier = gl.load(multiplier_ptr + rotation)
    limb_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    t_high = gl.allocate_shared_memory(gl.int8, [D, D], limb_layout)
    t_low = gl.allocate_shared_memory(gl.int8, [D, D], limb_layout)
    highs = gl.allocate_shared_memory(gl.int8, [2, PAGE, D], limb_layout)
    lows = gl.allocate_shared_memory(gl.int8, [2, PAGE, D], limb_layout)
    # Pieces of 16 bytes change places from one pair of rows to the next: lanes read other banks.
    tile_layout: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=2, max_phase=8, order=[1, 0])
    tile = gl.allocate_shared_memory(gl.int32, [PAGE, HALF], tile_layout)
    mean = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    scratch = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    exponents = gl.allocate_shared_memory(gl.int32, [PAGE], gl.SwizzledSharedLayout(1, 1, 1, order=[0]))
    row_sums = gl.allocate_shared_memory(gl.int32, [PAGE, 2], gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0]))

    first, step = gl.program_id(1), gl.num_programs(1)
    following = rows_ptr + gl.cast(first, gl.int64) * stride_page
    _copy_tile(following, stride_token, tile, first < num_pages)
    _store_transform(transform_ptr + rotation * D * D, t_high, t_low, IS_KEY)
    mean_top = 0
    if not IS_KEY:
        channel = gl.arange(0, D, layout=gl.BlockedLayout([1], [32], [8], [0]))
        bits = clean(gl.load(mean_ptr + rotation * D + channel).to(gl.int32) & 0xFFFF) << 16
        mean_top = gl.max(bits & 0x7FFFFFFF, 0)
        mean.store(bits.to(gl.float32, bitcast=True))

    # The limbs of the first page and what the loop takes from the pass before: half of the products.
    slot = gl.cast(first, gl.int64) * K + head
    async_copy.wait_group(0)
    if IS_KEY:
        rows, top = _load_keys(tile, scratch)
        _average(rows, top, mean_ptr + slot * D, mean, highs.index(0), True)
        z, top = centered(tile.load(OPERAND_PAIRS), mean)
    else:
        z, top = _center_values(tile, mean, scratch, mean_top)
    following = rows_ptr + gl.cast(first + step, gl.int64) * stride_page
    _copy_tile(following, stride_token, tile, first + step < num_pages)
    _store_limbs(z, top, highs.index(0), lows.index(0), exponents)
    fence_async_shared()
    zero = gl.zeros([PAGE, D], gl.int32, PRODUCTS)
    small = _product(lows.index(0), t_low, 0, zero, False)
    small = _product(lows.index(0), t_low, 1, small)
    large = _product(highs.index(0), t_high, 0, zero, False)
    small, large = warpgroup_mma_wait(0, deps=[small, large])
    y = small >> 8

    place = 0  # of this page's limbs
    for i in range(first, num_pages, step):
        # The next page becomes limbs while the other products of this one run.
        high, low = highs.index(place), lows.index(place)
        place ^= 1
        slot = gl.cast(i, gl.int64) * K + head
        exponent = exponents.load(gl.SliceLayout(1, ROW_SUMS))
        large = _product(high, t_high, 1, large)
        async_copy.wait_group(0)
        if IS_KEY:
            rows, top = _load_keys(tile, scratch)
            y = _product(high, t_low, 0, y)
            y = _product(high, t_low, 1, y)
            next_slot = gl.cast(i + step, gl.int64) * K + head
            _average(rows, top, mean_ptr + next_slot * D, mean, highs.index(place), i + step < num_pages)
            y = _product(low, t_high, 1, y)
            z, top = centered(tile.load(OPERAND_PAIRS), mean)
        else:
            y = _product(high, t_low, 0, y)
            z, top = _center_values(tile, mean, scratch, mean_top)
            y = _product(high, t_low, 1, y)
            y = _product(low, t_high, 1, y)
        y = _product(low, t_high, 0, y)
        high, low = highs.index(place), lows.index(place)
        _store_limbs(z, top, high, low, exponents)
        following = rows_ptr + gl.cast(i + 2 * step, gl.int64) * stride_page
        _copy_tile(following, stride_token, tile, i + 2 * step < num_pages)
        fence_async_shared()

        # This page becomes codes while half of the next one's products run.
        small = _product(low, t_low, 0, zero, False)
        large, y = warpgroup_mma_wait(1, deps=[large, y])
        entries = _entries((large << 8) + y)
        small = _product(low, t_low, 1, small)
        bound = _store_scales(entries, exponent, multiplier, scale_ptr + slot * PAGE, row_sums)
        large = _product(high, t_high, 0, zero, False)
        _store_codes(entries, bound, codes_ptr + slot * (PAGE * D // CODES), IS_KEY)
        small = warpgroup_mma_wait(1, deps=[small])
        y = small >> 8
        large = warpgroup_mma_wait(0, deps=[large])
