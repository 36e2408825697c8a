"""Page quantizer in plain Triton: center, rotate, scale, code and pack in one launch, exact to the byte.

Why: the format page defines a quantized page in integers; here every step is integer arithmetic or a
float32 operation with an exact result, so compiled code, the CPU interpreter and the Torch reference agree.
Rotation = int8 dots of 8-bit limbs with int32 accumulators. bf16 data is read and written as integer bits.

Layout: one program handles `ROWS` tokens of a page for one key/value head: all 64 in bulk, 16 where a decode
step quantizes a page and latency counts. Bulk calls walk several pages per program, so that the transform's
limbs are split once and stay on the chip. A page is bound by instructions, not by memory. What keeps them
few: rows are cleaned only where a page has something to clean, floor is one addition, codes are sums of sign
bits, keys take the columns of the transform in an order in which the channels of a word meet in one lane, and
a matrix product packs the tokens of values.
"""

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .. import cache_format as fmt
from ..config import DTypeError, ShapeError, check_head_dim

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
CODES = tl.constexpr(fmt.CODES_PER_WORD)
INFINITY_BITS = tl.constexpr(0x7F800000)
LIMIT_BITS = tl.constexpr((fmt.MAX_EXPONENT + 127) << 23)
# Where mean and centered rows stay below this, no entry of the rows needs cleaning.
CLEAN_BITS = tl.constexpr((fmt.MAX_EXPONENT - 2 + 127) << 23)
EMPTY_BITS = tl.constexpr((fmt.MIN_EXPONENT + 127) << 23)
# shift + 127: the biased exponent of a power of two, before the row's own exponent is added or subtracted
MEAN_UP = tl.constexpr(fmt.MEAN_BITS + 127)
MEAN_DOWN = tl.constexpr(127 - fmt.MEAN_BITS - fmt.PAGE_TOKENS_LOG2)
ROW_UP = tl.constexpr(fmt.ROW_BITS + 127)
SCALE_DOWN = tl.constexpr(127 - fmt.SCALE_BITS)
ABS_SHIFT = tl.constexpr(fmt.ABS_SHIFT)
MULTIPLIER_SHIFT = tl.constexpr(fmt.MULTIPLIER_SHIFT)

# floor by one addition that rounds down: x + 1.5 * 2**23 has the floor of x in its low bits. The interpreter
# has no such addition and takes the floor.
ROUND_DOWN = tl.constexpr(not triton.knobs.runtime.interpret)
FLOOR_BIAS = 0x4B400000 if ROUND_DOWN.value else 0
PAGE_BIAS = tl.constexpr(((fmt.PAGE_TOKENS * FLOOR_BIAS + 2**31) % 2**32) - 2**31)  # of 64 floors, in int32


# --------------------------------------------------------------------------- numbers as the format has them


@triton.jit
def _clean(x):
    """float32 rows with NaN and infinities 0 and finite values clamped to +-2**64."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.where(magnitude > LIMIT_BITS, (bits ^ magnitude) | LIMIT_BITS, bits)
    return tl.where(magnitude >= INFINITY_BITS, 0, clamped).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x):
    """|x| as the int32 that orders like it; NaN is above everything."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(x):
    """float32 -> bf16 bits (int16), nearest even; x is finite."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@triton.jit
def _bf16_float(bits):
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _biased_floor(x, OFFSET: tl.constexpr = 0):
    """floor(x) + OFFSET + FLOOR_BIAS as int32, whose low 16 bits are those without the bias; |x| < 2**21."""
    if ROUND_DOWN:
        biased = tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, $2;", "=f,f,f", [x, 12582912.0 + OFFSET],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return biased.to(tl.int32, bitcast=True)
    else:
        return tl.floor(x).to(tl.int32) + OFFSET


@triton.jit
def _row_limbs(x):
    """floor(x) in the format's 15-bit range as (high, low) int8 limbs, 256 * high + low; x float32."""
    return (_biased_floor(x, 128) >> 8).to(tl.int8), _biased_floor(x).to(tl.int8)


# ---------------------------------------------------------------------------------------------------- loading


@triton.jit
def _load_pairs(rows_ptr, stride_token, tokens, first, WIDTH: tl.constexpr, D: tl.constexpr, valid):
    """`WIDTH` channels of some rows from channel `first` on, as int32 pairs of bf16 [R, WIDTH / 2]."""
    pair = first // 2 + tl.arange(0, WIDTH // 2)
    mask = (pair < D // 2)[None, :] & (tokens >= 0)[:, None] & valid
    return tl.load(rows_ptr + tokens[:, None] * stride_token + pair[None, :], mask=mask, other=0)


@triton.jit
def _load_rows(
    rows_ptr, stride_token, tokens, D: tl.constexpr, DP: tl.constexpr, QUARTERS: tl.constexpr, valid=True
):  # fmt: skip
    """Whole rows as int32 pairs [R, DP / 2], their channels in the order of `_row_channels`.

    By quarters, a thread holds 2 rows and not 8, so that what is taken over a row stays in few lanes.
    """
    if QUARTERS:
        q: tl.constexpr = DP // 4
        a = _load_pairs(rows_ptr, stride_token, tokens, 0, q, D, valid)
        b = _load_pairs(rows_ptr, stride_token, tokens, q, q, D, valid)
        c = _load_pairs(rows_ptr, stride_token, tokens, 2 * q, q, D, valid)
        d = _load_pairs(rows_ptr, stride_token, tokens, 3 * q, q, D, valid)
        return tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (tokens.shape[0], DP // 2))
    else:
        return _load_pairs(rows_ptr, stride_token, tokens, 0, DP, D, valid)


@triton.jit
def _row_channels(DP: tl.constexpr, QUARTERS: tl.constexpr):
    """Channel in every column of what `_load_rows` returns."""
    column = tl.arange(0, DP)
    if QUARTERS:  # pairs 4 j ... 4 j + 3 are pair j of quarters 0, 2, 1, 3
        pair = column // 2
        quarter = pair % 2 * 2 + pair // 2 % 2
        return quarter * (DP // 4) + pair // 4 * 2 + column % 2
    else:
        return column


@triton.jit
def _floats(pairs):
    """int32 pairs of bf16 [R, C] -> float32 [R, 2 C]."""
    both = tl.join(pairs << 16, pairs & -65536)
    return tl.reshape(both, (pairs.shape[0], 2 * pairs.shape[1])).to(tl.float32, bitcast=True)


@triton.jit
def _code_channels(DP: tl.constexpr, IS_KEY: tl.constexpr):
    """Channel in every column of the rotated rows.

    A lane holds columns 8 j + 2 lane and 8 j + 2 lane + 1 of a matrix product. For keys these are
    consecutive channels, so that the codes of a word meet in one lane.
    """
    column = tl.arange(0, DP)
    if IS_KEY:
        return column // 2 % 4 * (DP // 4) + column // 8 * 2 + column % 2
    else:
        return column


@triton.jit
def _transform_limbs(transform_ptr, rows, columns, D: tl.constexpr):
    """Entries in 15 bits as (high, low) int8 limbs, 256 * high + low.

    Four rows at a time: a thread then holds what the matrix unit reads as one word, neighbours in a column.
    """
    n: tl.constexpr = rows.shape[0] // 4
    even, odd = tl.split(tl.reshape(rows, (2 * n, 2)))
    r0, r2 = tl.split(tl.reshape(even, (n, 2)))
    r1, r3 = tl.split(tl.reshape(odd, (n, 2)))
    evens = tl.join(
        _transform_rows(transform_ptr, r0, columns, D), _transform_rows(transform_ptr, r2, columns, D)
    )
    odds = tl.join(
        _transform_rows(transform_ptr, r1, columns, D), _transform_rows(transform_ptr, r3, columns, D)
    )
    entries = tl.permute(tl.join(evens, odds), (0, 2, 3, 1))
    entries = tl.reshape(entries, (4 * n, columns.shape[0])).to(tl.int32)
    return ((entries + 128) >> 8).to(tl.int8), entries.to(tl.int8)


@triton.jit
def _transform_rows(transform_ptr, rows, columns, D: tl.constexpr):
    mask = (rows < D)[:, None] & (columns < D)[None, :]
    return tl.load(transform_ptr + rows[:, None] * D + columns[None, :], mask=mask, other=0)


@triton.jit
def _load_transform(
    transform_ptr, IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The whole transform's limbs, or placeholders when the contraction is chunked."""
    if CHUNK == DP:
        rows, columns = _row_channels(DP, not IS_KEY), _code_channels(DP, IS_KEY)
        return _transform_limbs(transform_ptr, rows, columns, D)
    else:
        return 0, 0


@triton.jit
def _load_value_mean(mean_ptr, D: tl.constexpr, DP: tl.constexpr, QUARTERS: tl.constexpr):
    """The calibrated mean of values, cleaned, and its largest magnitude."""
    channels = _row_channels(DP, QUARTERS)
    mean = _clean(_bf16_float(tl.load(mean_ptr + channels, mask=channels < D, other=0)))
    return mean, tl.max(_magnitude(mean), 0)


# ---------------------------------------------------------------------------------- the steps of one page


@triton.jit
def _page_mean_bits(x, largest):
    """Mean key of a page: x float32 [64, C], largest = max |x| bits over all channels -> bf16 bits [C]."""
    exponent = tl.where(largest < EMPTY_BITS, 0, (largest >> 23) - 127)
    summands = _biased_floor(x * _power_of_two(-exponent + MEAN_UP) + 0.5)
    mean = (tl.sum(summands, 0) - PAGE_BIAS).to(tl.float32) * _power_of_two(exponent + MEAN_DOWN)
    return tl.where(largest < EMPTY_BITS, 0, _bf16_bits(mean))


@triton.jit
def _center_keys(
    x, rows_ptr, stride_token, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows less the mean of their page -> (z float32 [R, DP], mean bits [DP], largest |x| of the page)."""
    if ROWS == PAGE:
        largest = tl.max(_magnitude(x))
        if largest > LIMIT_BITS:
            x = _clean(x)
            largest = tl.max(_magnitude(x))
        mean_bits = _page_mean_bits(x, largest)
    else:
        page = _clean(_floats(_load_rows(rows_ptr, stride_token, tl.arange(0, PAGE), D, DP, False)))
        largest = tl.max(_magnitude(page))
        mean_bits = _page_mean_bits(page, largest)
        x = _clean(x)
    return x - _bf16_float(mean_bits)[None, :], mean_bits, largest


@triton.jit
def _center_values(
    x, rows_ptr, stride_token, tokens, mean, mean_largest, valid, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """Rows less the calibrated mean -> (z float32 [R, DP], largest |z| bits [R]); rows in quarters."""
    z = x - mean[None, :]
    largest = tl.max(_magnitude(z), 1)
    if tl.maximum(tl.max(largest, 0), mean_largest) > CLEAN_BITS:
        # Read again, so that in the usual case the rows are not kept beside z.
        x = _floats(_load_rows(rows_ptr, stride_token, tokens, D, DP, True, valid))
        z = _clean(x) - mean[None, :]
        largest = tl.max(_magnitude(z), 1)
    return z, largest


@triton.jit
def _scale_rows(
    rows_ptr, stride_token, value_mean, value_mean_largest, mean_ptr, row0, valid,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 3 of `ROWS` rows of a page of bf16 rows [64, D] at rows_ptr.

    -> z float32 [R, DP], its exponent [R], the factor of step 4 [R], the largest |x| bits of a page of keys.
    Stores the mean of a page of keys. Where not `valid`, rows are zeros and nothing is stored.
    """
    tokens = row0 + tl.arange(0, ROWS)
    x = _floats(_load_rows(rows_ptr, stride_token, tokens, D, DP, not IS_KEY, valid))
    largest = 0
    if IS_KEY:
        z, mean_bits, largest = _center_keys(x, rows_ptr, stride_token, D, DP, ROWS)
        channels = tl.arange(0, DP)
        if row0 == 0:
            tl.store(mean_ptr + channels, mean_bits, mask=(channels < D) & valid)
        row_largest = tl.max(tl.abs(z), 1).to(tl.int32, bitcast=True)
    else:
        z, row_largest = _center_values(
            x, rows_ptr, stride_token, tokens, value_mean, value_mean_largest, valid, D, DP
        )
    empty = row_largest < EMPTY_BITS
    exponent = tl.where(empty, 0, (row_largest >> 23) - 127)
    factor = tl.where(empty, 0.0, _power_of_two(-exponent + ROW_UP))
    return z, exponent, factor, largest


@triton.jit
def _row_operands(
    rows_ptr, stride_token, value_mean, value_mean_largest, mean_ptr, row0, valid,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 5, arguments as of `_scale_rows` -> (high limbs int8 [R, DP], low limbs, exponent [R])."""
    z, exponent, factor, _ = _scale_rows(
        rows_ptr, stride_token, value_mean, value_mean_largest, mean_ptr, row0, valid, IS_KEY, D, DP, ROWS
    )
    high, low = _row_limbs(z * factor[:, None] + 0.5)
    return high, low, exponent


@triton.jit
def _rotate(x_high, x_low, t_high, t_low):
    """Step 6: int8 limbs [R, C] and [C, N] -> int32 [R, N]."""
    y = tl.dot(x_high, t_high, out_dtype=tl.int32) << 8
    y = tl.dot(x_high, t_low, acc=y, out_dtype=tl.int32)
    y = tl.dot(x_low, t_high, acc=y, out_dtype=tl.int32)
    return y + (tl.dot(x_low, t_low, out_dtype=tl.int32) >> 8)


@triton.jit
def _rotate_chunks(
    rows_ptr, stride_token, factor, largest, mean_ptr, row0, transform_ptr,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Steps 4 to 6 where rows and transform do not fit: chunk by chunk of channels, both read again."""
    tokens = row0 + tl.arange(0, ROWS)
    columns = _code_channels(DP, IS_KEY)
    high_high = tl.zeros((ROWS, DP), tl.int32)
    cross = tl.zeros((ROWS, DP), tl.int32)
    low_low = tl.zeros((ROWS, DP), tl.int32)
    for chunk in range(0, D, CHUNK):
        c = chunk + tl.arange(0, CHUNK)
        x = _clean(_floats(_load_pairs(rows_ptr, stride_token, tokens, chunk, CHUNK, D, True)))
        if IS_KEY:
            page = x
            if ROWS != PAGE:
                pairs = _load_pairs(rows_ptr, stride_token, tl.arange(0, PAGE), chunk, CHUNK, D, True)
                page = _clean(_floats(pairs))
            mean = _bf16_float(_page_mean_bits(page, largest))
        else:
            mean = _clean(_bf16_float(tl.load(mean_ptr + c, mask=c < D, other=0)))
        x_high, x_low = _row_limbs((x - mean[None, :]) * factor[:, None] + 0.5)
        t_high, t_low = _transform_limbs(transform_ptr, c, columns, D)
        high_high = tl.dot(x_high, t_high, acc=high_high, out_dtype=tl.int32)
        cross = tl.dot(x_high, t_low, acc=cross, out_dtype=tl.int32)
        cross = tl.dot(x_low, t_high, acc=cross, out_dtype=tl.int32)
        low_low = tl.dot(x_low, t_low, acc=low_low, out_dtype=tl.int32)
    return (high_high << 8) + cross + (low_low >> 8)


@triton.jit
def _code_complements(y, threshold):
    """3 - code: how many of y + s, y and y - s are negative; 0 <= s."""
    above = (y + threshold).to(tl.uint32, bitcast=True)
    below = (y - threshold).to(tl.uint32, bitcast=True)
    negative = (above >> 31) + (y.to(tl.uint32, bitcast=True) >> 31)
    return (negative + (below >> 31)).to(tl.int32, bitcast=True)


@triton.jit
def _key_words(complements, DP: tl.constexpr, ROWS: tl.constexpr):
    """Columns in the order of `_code_channels` -> words int32 [R, DP / 16] along channels."""
    lanes = tl.permute(tl.reshape(complements, (ROWS, DP // 8, 4, 2)), (0, 2, 1, 3))
    shift = 2 * tl.arange(0, CODES)
    return ~tl.sum(tl.reshape(lanes, (ROWS, DP // CODES, CODES)) << shift[None, None, :], 2)


@triton.jit
def _token_powers(ROWS: tl.constexpr):
    """fp16 [R, 8]: 4**(token % 8) where column 2 w + h stands for half h of word w of the token."""
    token = tl.arange(0, ROWS)
    own = token[:, None] // 8 == tl.arange(0, 8)[None, :]
    return tl.where(own, (1 << (2 * (token % 8)))[:, None], 0).to(tl.float16)


@triton.jit
def _value_words(complements, powers, DP: tl.constexpr, ROWS: tl.constexpr):
    """[R, DP] -> words int32 [DP, R / 16] along tokens.

    Tokens lie across lanes. Where four warps have a whole page, a matrix product packs: the bits of a small
    integer are an fp16 subnormal, in units of 2**-24, and sums of eight codes by powers of 4 are exact.
    """
    if ROWS == PAGE and DP <= 128:
        halves = tl.dot(tl.trans(complements.to(tl.int16).to(tl.float16, bitcast=True)), powers)
        low, high = tl.split(tl.reshape((halves * 16777216.0).to(tl.int32), (DP, 4, 2)))
        return ~(low | (high << 16))
    else:
        shift = 2 * tl.arange(0, CODES)
        words = tl.sum(tl.reshape(complements, (ROWS // CODES, CODES, DP)) << shift[None, :, None], 1)
        return ~tl.trans(words)


@triton.jit
def _store_codes(
    y, exponent, multiplier, powers, codes_ptr, scale_ptr, row0,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps 7 to 9 and packing of `ROWS` rotated rows; pointers are at the page and head."""
    mean_abs = tl.sum(tl.abs(y) >> ABS_SHIFT, 1) // D
    threshold = (mean_abs * multiplier) >> MULTIPLIER_SHIFT
    scale = threshold.to(tl.float32) * _power_of_two(exponent + SCALE_DOWN)
    rows = row0 + tl.arange(0, ROWS)
    tl.store(scale_ptr + rows, _bf16_bits(scale))
    complements = _code_complements(y, threshold[:, None])
    if IS_KEY:  # word w of a token: channels 16w .. 16w + 15
        words = _key_words(complements, DP, ROWS)
        w = tl.arange(0, DP // CODES)
        mask = (w < D // CODES)[None, :] & (rows >= 0)[:, None]
        tl.store(codes_ptr + rows[:, None] * (D // CODES) + w[None, :], words, mask=mask)
    else:  # word w of a channel: tokens 16w .. 16w + 15
        words = _value_words(complements, powers, DP, ROWS)
        w = row0 // CODES + tl.arange(0, ROWS // CODES)
        d = tl.arange(0, DP)
        mask = (d < D)[:, None] & (w >= 0)[None, :]
        tl.store(codes_ptr + d[:, None] * (PAGE // CODES) + w[None, :], words, mask=mask)


# ------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _bulk_role(
    rows_ptr, stride_page, stride_token, head, row0, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Pages program_id(1), program_id(1) + programs, ... of one head and role; rows_ptr is at the head.

    The limbs of the next page are made at the end of a turn and handed over: limbs that a loop carries go to
    the matrix unit through shared memory, which spares the registers that a third program at a time needs.
    """
    transform_ptr += head * stride_rotation * D * D
    multiplier = tl.load(multiplier_ptr + head * stride_rotation)
    t_high, t_low = _load_transform(transform_ptr, IS_KEY, D, DP, CHUNK)
    value_mean, value_mean_largest, powers = 0, 0, 0
    if not IS_KEY:
        mean_ptr += head * stride_rotation * D
        value_mean, value_mean_largest = _load_value_mean(mean_ptr, D, DP, True)
        powers = _token_powers(ROWS)
    first, step = tl.program_id(1), tl.num_programs(1)
    page = tl.cast(first, tl.int64)
    if CHUNK == DP:
        high, low, exponent = _row_operands(
            rows_ptr + page * stride_page, stride_token, value_mean, value_mean_largest,
            mean_ptr + (page * K + head) * D, row0, True, IS_KEY, D, DP, ROWS,
        )  # fmt: skip
    for i in tl.range(first, num_pages, step, num_stages=1):
        page = tl.cast(i, tl.int64)
        page_ptr = rows_ptr + page * stride_page
        slot = page * K + head
        if CHUNK == DP:
            y = _rotate(high, low, t_high, t_low)
        else:
            page_mean_ptr = mean_ptr + slot * D if IS_KEY else mean_ptr
            _, exponent, factor, largest = _scale_rows(
                page_ptr, stride_token, value_mean, value_mean_largest, page_mean_ptr, row0, True,
                IS_KEY, D, DP, ROWS,
            )  # fmt: skip
            y = _rotate_chunks(
                page_ptr, stride_token, factor, largest, page_mean_ptr, row0, transform_ptr,
                IS_KEY, D, DP, ROWS, CHUNK,
            )  # fmt: skip
        _store_codes(
            y, exponent, multiplier, powers, codes_ptr + slot * (PAGE * D // CODES), scale_ptr + slot * PAGE,
            row0, IS_KEY, D, DP, ROWS,
        )  # fmt: skip
        if CHUNK == DP:
            high, low, exponent = _row_operands(
                page_ptr + step * stride_page, stride_token, value_mean, value_mean_largest,
                mean_ptr + (slot + step * K) * D, row0, i + step < num_pages, IS_KEY, D, DP, ROWS,
            )  # fmt: skip


@triton.jit
def _bulk_kernel(
    key_ptr, value_ptr, stride_page, stride_token, stride_head, num_pages,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    FIRST_ROLE: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (K, programs, roles * 64 / ROWS): keys, then values; values alone with FIRST_ROLE = 1.

    Programs start in this order, so that the programs of a multiprocessor mostly run the same instructions.
    """
    head = tl.program_id(0)
    role = tl.program_id(2) // (PAGE // ROWS) + FIRST_ROLE
    row0 = tl.program_id(2) % (PAGE // ROWS) * ROWS
    if role == 0:
        _bulk_role(
            key_ptr + head * stride_head, stride_page, stride_token, head, row0, num_pages,
            key_transform_ptr, key_multiplier_ptr, stride_rotation, key_page_mean_ptr, key_codes_ptr,
            key_scale_ptr, True, K, D, DP, ROWS, CHUNK,
        )  # fmt: skip
    else:
        _bulk_role(
            value_ptr + head * stride_head, stride_page, stride_token, head, row0, num_pages,
            value_transform_ptr, value_multiplier_ptr, stride_rotation, value_mean_ptr, value_codes_ptr,
            value_scale_ptr, False, K, D, DP, ROWS, CHUNK,
        )  # fmt: skip


@triton.jit
def _flush_page(
    rows_ptr, source, target, head, transform_ptr, t_high, t_low, multiplier_ptr, mean_ptr, stride_rotation,
    codes_ptr, scale_ptr, row0,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Quantize `ROWS` rows of one window page of one head into an INT2 page of the cache."""
    slot = target * K + head
    rows_ptr += (source * K + head) * (PAGE * D // 2)
    value_mean, value_mean_largest, powers = 0, 0, 0
    if IS_KEY:
        mean_ptr += slot * D
    else:
        mean_ptr += head * stride_rotation * D
        value_mean, value_mean_largest = _load_value_mean(mean_ptr, D, DP, True)
        powers = _token_powers(ROWS)
    if CHUNK == DP:
        high, low, exponent = _row_operands(
            rows_ptr, D // 2, value_mean, value_mean_largest, mean_ptr, row0, True, IS_KEY, D, DP, ROWS
        )
        y = _rotate(high, low, t_high, t_low)
    else:
        _, exponent, factor, largest = _scale_rows(
            rows_ptr, D // 2, value_mean, value_mean_largest, mean_ptr, row0, True, IS_KEY, D, DP, ROWS
        )
        y = _rotate_chunks(
            rows_ptr, D // 2, factor, largest, mean_ptr, row0, transform_ptr, IS_KEY, D, DP, ROWS, CHUNK
        )
    multiplier = tl.load(multiplier_ptr + head * stride_rotation)
    _store_codes(
        y, exponent, multiplier, powers, codes_ptr + slot * (PAGE * D // CODES), scale_ptr + slot * PAGE,
        row0, IS_KEY, D, DP, ROWS,
    )  # fmt: skip


@triton.jit
def _flush_role(
    rows_ptr, flushes, sources, targets, head, transform_ptr, multiplier_ptr, mean_ptr, stride_rotation,
    codes_ptr, scale_ptr, row0,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """`_flush_page` for every entry of `flushes`, `sources` and `targets` [N] that flushes."""
    transform_ptr += head * stride_rotation * D * D
    t_high, t_low = _load_transform(transform_ptr, IS_KEY, D, DP, CHUNK)
    entry = tl.arange(0, flushes.shape[0])
    for i in range(flushes.shape[0]):
        own = flushes & (entry == i)
        if tl.max(own.to(tl.int32), 0) > 0:
            source = tl.sum(tl.where(own, sources, 0), 0).to(tl.int64)
            target = tl.sum(tl.where(own, targets, 0), 0).to(tl.int64)
            _flush_page(
                rows_ptr, source, target, head, transform_ptr, t_high, t_low, multiplier_ptr, mean_ptr,
                stride_rotation, codes_ptr, scale_ptr, row0, IS_KEY, K, D, DP, ROWS, CHUNK,
            )  # fmt: skip


@triton.jit
def _take(count_ptrs, mask, shift):
    """Reads counts that every program of a launch reads and the last one writes -> (counts, is the last).

    The bits from `shift` on say how many programs have read: one atomic addition reads and signs off.
    """
    old = tl.atomic_add(count_ptrs, tl.full(mask.shape, 1, tl.int32) << shift, mask=mask, sem="relaxed")
    return old & ((1 << shift) - 1), (old >> shift) == tl.num_programs(0) - 1


@triton.jit
def _load_new_rows(rows_ptr, sequences, head, mask, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    pair = tl.arange(0, DP // 2)
    offsets = (sequences[:, None] * K + head) * (D // 2) + pair[None, :]
    return tl.load(rows_ptr + offsets, mask=mask[:, None] & (pair < D // 2)[None, :], other=0)


@triton.jit
def _store_new_rows(
    rows, window_ptr, slots, head, tokens, mask, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    pair = tl.arange(0, DP // 2)
    first = ((slots.to(tl.int64) * K + head) * PAGE + tokens % PAGE) * (D // 2)
    target = window_ptr + first[:, None] + pair[None, :]
    tl.store(target, rows, mask=mask[:, None] & (pair < D // 2)[None, :])


@triton.jit
def _append_kernel(
    batch, key_ptr, value_ptr, new_lengths_ptr, lengths_ptr, history_ptr, shift, page_table_ptr,
    stride_table, window_table_ptr, window_key_ptr, window_value_ptr,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, SLOTS: tl.constexpr, K: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Grid (2 * K * 64 / ROWS, batch / ENTRIES): one new row of `ENTRIES` sequences, and where a page leaves
    the recent part, `ROWS` rows of it quantized.

    The first 2 * K programs store the new rows. The page that leaves and the page of the new row are never
    the same slot, so programs do not wait; the last to have read the counts of a sequence writes them.
    """
    part = tl.program_id(0)
    head = part // 2 % K
    is_key = part % 2 == 0
    row0 = part // (2 * K) * ROWS
    sequence = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    live = sequence < batch
    # All that is read to store a row, at once: with a cold cache each of these is a way to the memory.
    rows_ptr = value_ptr
    if is_key:
        rows_ptr = key_ptr
    rows = _load_new_rows(rows_ptr, sequence, head, live & (row0 == 0), K, D, DP)
    slot = tl.arange(0, SLOTS)
    table_mask = live[:, None] & (slot < SINK_PAGES + RECENT_SLOTS)[None, :]
    table_ptr = window_table_ptr + sequence[:, None] * (SINK_PAGES + RECENT_SLOTS) + slot[None, :]
    table = tl.load(table_ptr, mask=table_mask, other=0)
    new = tl.minimum(tl.load(new_lengths_ptr + sequence, mask=live, other=0), 1)
    is_length = tl.arange(0, 2)[None, :] == 0
    count_ptrs = tl.where(is_length, lengths_ptr + sequence[:, None], history_ptr + sequence[:, None])
    count_mask = live[:, None] & (tl.arange(0, 2) >= 0)[None, :]
    counts, is_last = _take(count_ptrs, count_mask, shift)
    length, history = tl.split(counts)

    # A row is dropped where the page table has no entry for every history page.
    due = (length + 1) // PAGE - (SINK_PAGES + RECENT_SLOTS - 1)
    stores = live & (new > 0) & (tl.maximum(history, due) <= stride_table)
    length_after = length + stores.to(tl.int32)
    history_after = tl.maximum(history, tl.where(stores, due, 0))
    tl.store(count_ptrs, tl.join(length_after, history_after), mask=count_mask & is_last)

    page = length // PAGE
    place = tl.where(page < SINK_PAGES, page, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    physical = tl.sum(tl.where(slot[None, :] == place[:, None], table, 0), 1)
    stored = stores & (row0 == 0)
    if is_key:
        _store_new_rows(rows, window_key_ptr, physical, head, length, stored, K, D, DP)
    else:
        _store_new_rows(rows, window_value_ptr, physical, head, length, stored, K, D, DP)

    flushes = stores & (due > history)
    if tl.max(flushes.to(tl.int32), 0) > 0:
        place = SINK_PAGES + history % RECENT_SLOTS
        sources = tl.sum(tl.where(slot[None, :] == place[:, None], table, 0), 1)
        targets = tl.load(page_table_ptr + sequence * stride_table + history, mask=flushes, other=0)
        if is_key:
            _flush_role(
                window_key_ptr, flushes, sources, targets, head, key_transform_ptr, key_multiplier_ptr,
                key_page_mean_ptr, stride_rotation, key_codes_ptr, key_scale_ptr, row0,
                True, K, D, DP, ROWS, CHUNK,
            )  # fmt: skip
        else:
            _flush_role(
                window_value_ptr, flushes, sources, targets, head, value_transform_ptr, value_multiplier_ptr,
                value_mean_ptr, stride_rotation, value_codes_ptr, value_scale_ptr, row0,
                False, K, D, DP, ROWS, CHUNK,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------- entry points

# Sequences per program of an append or a flush.
ENTRIES = 4
# Bulk programs per multiprocessor and role: as many as run at a time, each with its transform on the chip.
BULK_PROGRAMS = 3
# Shared memory per program from which the limbs of a transform of 256 channels can stay on the chip.
LARGE_SHARED_MEMORY = 200_000


def _bulk_tiles(head_dim: int, device: torch.device) -> dict[str, int]:
    """Tile sizes of bulk calls: padded channels, rows per program, contraction chunk, warps."""
    check_head_dim(head_dim)
    padded = max(32, triton.next_power_of_2(head_dim))
    if padded <= 128:
        return {"DP": padded, "ROWS": 64, "CHUNK": padded, "num_warps": 4, "maxnreg": 168}
    if padded == 256:
        chunk = 256 if _shared_memory(device) >= LARGE_SHARED_MEMORY else 32
        return {"DP": padded, "ROWS": 64, "CHUNK": chunk, "num_warps": 8}
    return {"DP": padded, "ROWS": 16, "CHUNK": 32, "num_warps": 8}


def _flush_tiles(head_dim: int) -> dict[str, int]:
    """Tile sizes where few pages are quantized and none is to wait: a quarter of a page per program."""
    check_head_dim(head_dim)
    padded = max(32, triton.next_power_of_2(head_dim))
    if padded <= 128:
        return {"DP": padded, "ROWS": 16, "CHUNK": padded, "num_warps": 4, "maxnreg": 128}
    return {"DP": padded, "ROWS": 16, "CHUNK": 32, "num_warps": 8}


def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one program can have."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _pairs(rows: torch.Tensor) -> torch.Tensor:
    """Rows as int32 pairs of bf16, in place where their strides allow it."""
    rows = rows.to(torch.bfloat16)
    offsets = (rows.storage_offset(), *rows.stride()[:-1])
    if rows.stride(-1) != 1 or any(offset % 2 for offset in offsets):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


def rotation_stride(rotation_heads: int, num_heads: int) -> int:
    """0 where one rotation serves all heads, 1 where every head has its own."""
    if rotation_heads not in (1, num_heads):
        raise ShapeError(f"rotation has {rotation_heads} heads, allowed: 1 or {num_heads}")
    return 0 if rotation_heads == 1 else 1


def check_device(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError unless compiled Triton (or its interpreter) can reach the tensor."""
    if triton.knobs.runtime.interpret and tensor.device.type == "cpu":
        return
    major, minor = _capability(tensor)
    if major < 8:
        raise NotImplementedError(f"compute capability {major}.{minor}, needed: 8.0 or newer")


def check_hopper(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError unless the tensor is on a Hopper GPU: newer ones lack its wgmma."""
    major, minor = _capability(tensor)
    if major != 9:
        raise NotImplementedError(f"compute capability {major}.{minor}, the Gluon kernels serve 9.0 (Hopper)")


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.device.type != "cuda":
        raise NotImplementedError(f"Triton kernels need a CUDA tensor, got device {tensor.device}")
    return torch.cuda.get_device_capability(tensor.device)


# Starts a bulk kernel: its arguments, the number of roles (keys, values) and its constants.
Launch = Callable[[tuple, int, dict[str, int]], None]


@dataclasses.dataclass
class _Role:
    """What a bulk launch reads and writes for keys, or for values."""

    rows: torch.Tensor  # int32 pairs [P, 64, K, D / 2]
    transform: torch.Tensor
    multiplier: torch.Tensor
    mean: torch.Tensor  # of values: read; of keys: written
    codes: torch.Tensor
    scale: torch.Tensor


def _prepare(
    role: str,
    rows: torch.Tensor,
    transform: torch.Tensor,
    multiplier: torch.Tensor,
    mean: torch.Tensor | None = None,
) -> _Role:
    """Checks pages of rows [P, 64, K, D] and allocates what they are quantized into."""
    if rows.ndim != 4 or rows.shape[1] != fmt.PAGE_TOKENS:
        raise ShapeError(f"rows has shape {tuple(rows.shape)}, needed: [P, {fmt.PAGE_TOKENS}, K, D]")
    if transform.dtype != torch.int16:
        raise DTypeError(f"transform is {transform.dtype}, needed: torch.int16")
    num_pages, _, heads, head_dim = rows.shape
    check_head_dim(head_dim)
    rotation_stride(transform.shape[0], heads)
    check_device(rows)

    def empty(name: str) -> torch.Tensor:
        shape = fmt.int2_array_shapes(num_pages, heads, head_dim)[name]
        return torch.empty(shape, dtype=getattr(torch, fmt.INT2_ARRAYS[name]), device=rows.device)

    mean = empty("key_page_mean") if mean is None else mean.contiguous()
    arrays = (empty(f"{role}_codes"), empty(f"{role}_scale"))
    return _Role(_pairs(rows), transform.contiguous(), multiplier, mean, *arrays)


def _quantize(keys: _Role | None, values: _Role | None, launch: Launch) -> None:
    """Quantizes the pages of one role or, in the same launch, of both."""
    roles = [role for role in (keys, values) if role is not None]
    if len({role.rows.shape for role in roles}) > 1:
        raise ShapeError(f"pages of keys and values differ: {[tuple(role.rows.shape) for role in roles]}")
    if len({role.rows.stride() for role in roles}) > 1:
        for role in roles:
            role.rows = role.rows.contiguous()
    # A role that does not run is given the arrays of the other.
    key, value = roles[0], roles[-1]
    num_pages, _, heads, _ = key.rows.shape
    if num_pages == 0:
        return
    arguments = (
        key.rows, value.rows, *key.rows.stride()[:3], num_pages, key.transform, value.transform,
        key.multiplier, value.multiplier, _bits(value.mean), rotation_stride(key.transform.shape[0], heads),
        key.codes, value.codes, _bits(key.scale), _bits(value.scale), _bits(key.mean),
    )  # fmt: skip
    launch(arguments, len(roles), {"FIRST_ROLE": int(keys is None), "K": heads, "D": 2 * key.rows.shape[-1]})


def _launch_bulk(arguments: tuple, roles: int, constants: dict[str, int]) -> None:
    device, heads, num_pages = arguments[0].device, constants["K"], arguments[5]
    tiles = _bulk_tiles(constants["D"], device)
    blocks = fmt.PAGE_TOKENS // tiles["ROWS"]
    programs = bulk_programs(device, num_pages, heads * blocks, BULK_PROGRAMS)
    _bulk_kernel[(heads, programs, roles * blocks)](*arguments, **constants, **tiles)


def bulk_programs(device: torch.device, num_pages: int, blocks: int, resident: int) -> int:
    """Programs of a bulk launch that share the pages of one role and block: few, to reuse the transform."""
    slots = 4
    if device.type == "cuda":
        slots = resident * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(num_pages, slots // blocks))


def quantize_key_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor, *, launch: Launch = _launch_bulk
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize pages of keys: center by the page's mean, rotate, scale, code and pack along channels.

    rows bf16 [P, 64, K, D] (other floats are rounded to bf16), transform int16 [1 or K, D, D], multiplier
    int32 [1 or K] -> words int32 [P, K, 64, D / 16], scale bf16 [P, K, 64], page mean bf16 [P, K, D].
    Raises ShapeError, DTypeError, ConfigError (head_dim), NotImplementedError (device).
    Format page, section 2.
    """
    keys = _prepare("key", rows, transform, multiplier)
    _quantize(keys, None, launch)
    return keys.codes, keys.scale, keys.mean


def quantize_value_pages(
    rows: torch.Tensor,
    transform: torch.Tensor,
    multiplier: torch.Tensor,
    mean: torch.Tensor,
    *,
    launch: Launch = _launch_bulk,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize pages of values: center by the calibrated mean, rotate, scale, code and pack along tokens.

    rows bf16 [P, 64, K, D], transform int16 [1 or K, D, D], multiplier int32 [1 or K], mean bf16 [1 or K, D]
    -> words int32 [P, K, D, 4], scale bf16 [P, K, 64].
    Raises ShapeError, DTypeError, ConfigError (head_dim), NotImplementedError (device).
    Format page, section 2.
    """
    if mean.shape[0] != transform.shape[0]:
        raise ShapeError(f"mean has {mean.shape[0]} heads, transform has {transform.shape[0]}")
    values = _prepare("value", rows, transform, multiplier, mean)
    _quantize(None, values, launch)
    return values.codes, values.scale


def quantize_page_pair(
    key_pages: torch.Tensor, value_pages: torch.Tensor, rotation, *, launch: Launch = _launch_bulk
) -> dict[str, torch.Tensor]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    keys = _prepare("key", key_pages, rotation.key_transform, rotation.key_multiplier)
    values = _prepare(
        "value", value_pages, rotation.value_transform, rotation.value_multiplier, rotation.value_mean
    )
    _quantize(keys, values, launch)
    return {
        "key_codes": keys.codes,
        "value_codes": values.codes,
        "key_scale": keys.scale,
        "value_scale": values.scale,
        "key_page_mean": keys.mean,
    }


def append_token(cache, rotation, key: torch.Tensor, value: torch.Tensor, new_lengths: torch.Tensor) -> None:
    """Appends at most one row per sequence and quantizes the pages that become history, in one launch.

    key, value bf16 [B, 1, K, D] (other floats are rounded to bf16); new_lengths int32 [B], 0 or 1. Leaves the
    bytes of `cache.append_rows`, without a host synchronization and hence CUDA-graph capturable; for the same
    reason the caller makes sure beforehand that the page tables have room. A row that would need a page
    beyond the table is dropped: nothing is written for its sequence and its length stands still. While the
    kernel runs, the upper bits of lengths and history_pages count the programs that have read them. Raises
    ShapeError, NotImplementedError (device; more tokens and heads than 32 bits can count). Format page,
    section 4.
    """
    config, batch = cache.config, cache.batch
    tiles = _flush_tiles(config.head_dim)
    parts = _parts(config.num_key_value_heads, tiles)
    arguments, constants = append_arguments(cache, rotation, key, value, new_lengths, parts)
    _append_kernel[(parts, triton.cdiv(batch, ENTRIES))](
        batch, *arguments, **constants, ENTRIES=ENTRIES, **tiles
    )


def append_arguments(
    cache, rotation, key: torch.Tensor, value: torch.Tensor, new_lengths: torch.Tensor, parts: int
) -> tuple[tuple, dict[str, int]]:
    """Checked arguments and constants of an append kernel whose `parts` programs read each count."""
    config, batch = cache.config, cache.batch
    heads, head_dim = config.num_key_value_heads, config.head_dim
    for name, rows in (("key", key), ("value", value)):
        if rows.shape != (batch, 1, heads, head_dim):
            raise ShapeError(f"{name} rows {tuple(rows.shape)}, expected {(batch, 1, heads, head_dim)}")
    check_device(cache.window_key)
    shift = int(cache.capacity).bit_length()
    if parts << shift > 1 << 31:
        raise NotImplementedError(f"{heads} key/value heads with tables for {cache.capacity} tokens")
    arguments = (
        _pairs(key.contiguous()), _pairs(value.contiguous()), new_lengths, cache.lengths, cache.history_pages,
        shift, cache.page_table, cache.page_table.shape[1], cache.window_table, *_windows(cache),
        *_rotation_arguments(rotation, heads), *_int2_arguments(cache),
    )  # fmt: skip
    slots = triton.next_power_of_2(config.window_slots)
    constants = {"SINK_PAGES": config.sink_pages, "RECENT_SLOTS": config.recent_slots, "SLOTS": slots}
    return arguments, {**constants, "K": heads, "D": head_dim}


def _parts(heads: int, tiles: dict[str, int]) -> int:
    """Programs that share the pages of all heads and both roles."""
    return 2 * heads * fmt.PAGE_TOKENS // tiles["ROWS"]


def _windows(cache) -> tuple[torch.Tensor, torch.Tensor]:
    """The window arrays as int32 pairs of bf16, in place."""
    return cache.window_key.view(torch.int32), cache.window_value.view(torch.int32)


def _rotation_arguments(rotation, heads: int) -> tuple[torch.Tensor | int, ...]:
    """The rotation as the append kernels take it."""
    multipliers = (rotation.key_multiplier, rotation.value_multiplier)
    stride = rotation_stride(rotation.key_transform.shape[0], heads)
    return rotation.key_transform, rotation.value_transform, *multipliers, _bits(rotation.value_mean), stride


def _int2_arguments(cache) -> tuple[torch.Tensor, ...]:
    """The INT2 arrays as the append kernels take them."""
    scales = (_bits(cache.key_scale), _bits(cache.value_scale))
    return cache.key_codes, cache.value_codes, *scales, _bits(cache.key_page_mean)
