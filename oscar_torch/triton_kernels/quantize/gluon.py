"""Page quantizer for Hopper, in Gluon: the bytes of `quantize/triton.py`, operands and codes in registers.

A program of four warps keeps the limbs of one head's transform in shared memory and walks over pages. Warp w
owns tokens 16 w ... 16 w + 15 of a page; lane (g, c) of the matrix unit owns tokens 2 g and 2 g + 1 of them.
The rows of a page arrive in shared memory while the page before is worked on; every lane reads the entries
of its left operand, centers them and splits them into limbs where they are, and the products leave it the
codes of whole key words. Values meet in one lane after three exchanges between lanes. On an H200
instructions are issued in 51 to 53 % of the cycles, and by their number the products take 38 to 46 %: the two
hardly overlap. Pages of 256 channels are quantized by `quantize/gluon_wide.py`, where they do; of 128
channels that takes longer (952 us instead of 679 for 4096 pages of 8 heads).

Contraction index 32 s + 16 h + 4 c + b is channel 32 s + 8 c + 4 h + b, so that a lane reads 16 bytes at a
time. Column 8 j + 2 c + b is channel D/4 c + 2 j + b of keys and 32 (j / 4) + 8 c + 2 (j % 4) + b of values.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..launch import tensors
from . import gluon_wide as wide
from . import triton as plain_quantize
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
def _everywhere(size: int):
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
def _store_transform(transform_ptr, high_limbs, low_limbs, IS_KEY: gl.constexpr, D: gl.constexpr):
    """The limbs of the transform to shared memory [columns, contraction index], both in operand order."""
    layout: gl.constexpr = _transform_layout(D, False)
    row = gl.arange(0, D, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    x = gl.load(transform_ptr + row[:, None] * D + column[None, :])
    x = gl.convert_layout(x, _transform_layout(D, True)).to(gl.int32)
    high, low = gl.inline_asm_elementwise(
        LIMBS, "=r,=r,r,r,r,r", [x], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    high_limbs.store(_transform_operand(high, IS_KEY, D))
    low_limbs.store(_transform_operand(low, IS_KEY, D))


@gluon.jit
def _transform_operand(x, IS_KEY: gl.constexpr, D: gl.constexpr):
    """Transform [D channels, D channels] -> [columns, contraction index]."""
    x = x.reshape([D // 32, 4, 2, 4, D]).permute((0, 2, 1, 3, 4))  # s, h, c, b
    if IS_KEY:
        x = x.reshape([D, 4, D // 8, 2]).permute((2, 1, 3, 0))  # j, c, b
    else:
        x = x.reshape([D, D // 32, 4, 4, 2]).permute((1, 3, 2, 4, 0))
    return x.reshape([D, D])


@gluon.jit
def _largest_of_page(x, scratch):
    """The largest of x int32 [4 warps, n], through `scratch` int32 [4] in shared memory."""
    scratch.store(gl.max(x, 1))
    return gl.max(scratch.load(_everywhere(4)), 0)


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
def _store_page(
    z, top, t_high, t_low, multiplier, codes_ptr, scale_ptr, slot, IS_KEY: gl.constexpr, D: gl.constexpr
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
    bound = bound.to(gl.float32)
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
def _role_memory(transform_ptr, mean_ptr, IS_KEY: gl.constexpr, D: gl.constexpr):
    """What a program keeps of one head and role, pointers at the head.

    -> in shared memory the limbs of the transform, a tile of rows (pairs [64, D / 2]), the mean (of values:
    clean and filled in) and two places to work in; the bits of the largest |mean| of values.
    """
    limb_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=D, element_bitwidth=8, rank=2)
    t_high = gl.allocate_shared_memory(gl.int8, [D, D], limb_layout)
    t_low = gl.allocate_shared_memory(gl.int8, [D, D], limb_layout)
    _store_transform(transform_ptr, t_high, t_low, IS_KEY, D)
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
def _tile_offsets(stride_token, D: gl.constexpr):
    layout: gl.constexpr = _row_pairs(D)
    token = gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout))
    pair = gl.arange(0, D // 2, layout=gl.SliceLayout(0, layout))
    return token[:, None] * stride_token + pair[None, :]


@gluon.jit
def _copy_tile(pointers, tile, valid):
    async_copy.async_copy_global_to_shared(tile, pointers, mask=valid)
    async_copy.commit_group()


@gluon.jit
def _center_tile(tile, mean, scratch, sums, mean_top, page_mean_ptr, IS_KEY: gl.constexpr, D: gl.constexpr):
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


@gluon.jit
def _bulk_role(
    rows_ptr, stride_page, stride_token, head, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr,
    IS_KEY: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Pages program_id(1), program_id(1) + programs, ... of one head and role; rows_ptr is at the head."""
    if D == wide.D:
        wide.bulk_role(
            rows_ptr, stride_page, stride_token, head, num_pages, transform_ptr, multiplier_ptr,
            stride_rotation, mean_ptr, codes_ptr, scale_ptr, IS_KEY, K,
        )  # fmt: skip
    else:
        _bulk_pages(
            rows_ptr, stride_page, stride_token, head, num_pages, transform_ptr, multiplier_ptr,
            stride_rotation, mean_ptr, codes_ptr, scale_ptr, IS_KEY, K, D,
        )  # fmt: skip


@gluon.jit
def _bulk_pages(
    rows_ptr, stride_page, stride_token, head, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr,
    IS_KEY: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """`_bulk_role` for pages that are worked on one after the other."""
    rotation = head * stride_rotation
    multiplier = gl.load(multiplier_ptr + rotation)
    t_high, t_low, tile, mean, scratch, sums, mean_top = _role_memory(
        transform_ptr + rotation * D * D, mean_ptr + rotation * D, IS_KEY, D
    )
    rows_ptr += _tile_offsets(stride_token, D)
    first, step = gl.program_id(1), gl.num_programs(1)
    _copy_tile(rows_ptr + gl.cast(first, gl.int64) * stride_page, tile, first < num_pages)
    for i in range(first, num_pages, step):
        slot = gl.cast(i, gl.int64) * K + head
        z, top = _center_tile(tile, mean, scratch, sums, mean_top, mean_ptr + slot * D, IS_KEY, D)
        _copy_tile(rows_ptr + gl.cast(i + step, gl.int64) * stride_page, tile, i + step < num_pages)
        _store_page(z, top, t_high, t_low, multiplier, codes_ptr, scale_ptr, slot, IS_KEY, D)


@gluon.jit
def _bulk_kernel(
    key_ptr, value_ptr, stride_page, stride_token, stride_head, num_pages,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    FIRST_ROLE: gl.constexpr, K: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Grid (K, programs, roles): keys, then values; values alone with FIRST_ROLE = 1.

    Roles mixed on a multiprocessor take longer: 728 us instead of 677 for 4096 pages of 8 heads (H200).
    """
    head = gl.program_id(0)
    if gl.program_id(2) + FIRST_ROLE == 0:
        _bulk_role(
            key_ptr + head * stride_head, stride_page, stride_token, head, num_pages,
            key_transform_ptr, key_multiplier_ptr, stride_rotation, key_page_mean_ptr, key_codes_ptr,
            key_scale_ptr, True, K, D,
        )  # fmt: skip
    else:
        _bulk_role(
            value_ptr + head * stride_head, stride_page, stride_token, head, num_pages,
            value_transform_ptr, value_multiplier_ptr, stride_rotation, value_mean_ptr, value_codes_ptr,
            value_scale_ptr, False, K, D,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------ entry points

# Programs per multiprocessor, warps of a program and registers per thread, by head_dim. Four programs do not
# fit the products of 128 channels without spills; with 64 channels four take 300 us, three 305 (H200).
PLANS = {64: (3, 4, 168), 128: (3, 4, 168), 256: (1, 8, 255)}


def _launch(arguments: tuple, roles: int, constants: dict[str, int]) -> None:
    heads = constants["K"]
    resident, warps, registers = PLANS[constants["D"]]
    programs = plain_quantize.bulk_programs(arguments[0].device, arguments[5], heads, resident)
    _bulk_kernel[(heads, programs, roles)](*arguments, **constants, num_warps=warps, maxnreg=registers)


def _launch_for(rows: torch.Tensor) -> plain_quantize.Launch:
    """How pages of these rows are quantized, if they can be."""
    tensors.check_hopper(rows)
    if rows.shape[-1] not in PLANS:
        served = tuple(PLANS)
        raise NotImplementedError(f"head_dim = {rows.shape[-1]}: the Gluon quantizer serves {served}")
    return _launch


def quantize_key_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize.triton.quantize_key_pages`; raises NotImplementedError too for a head_dim not served."""
    return plain_quantize.quantize_key_pages(rows, transform, multiplier, launch=_launch_for(rows))


def quantize_value_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize.triton.quantize_value_pages`; raises NotImplementedError too for a head_dim not served."""
    return plain_quantize.quantize_value_pages(rows, transform, multiplier, mean, launch=_launch_for(rows))


def quantize_page_pair(
    key_pages: torch.Tensor, value_pages: torch.Tensor, rotation
) -> dict[str, torch.Tensor]:
    """`quantize.triton.quantize_page_pair`; raises NotImplementedError too for a head_dim not served."""
    return plain_quantize.quantize_page_pair(key_pages, value_pages, rotation, launch=_launch_for(key_pages))
