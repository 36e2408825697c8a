"""Steps 1 to 9 of the row quantizer in plain Triton: what the kernels that write pages and tokens share.

A program quantizes `ROWS` rows of one page of one head: `row_operands` (or `scale_rows`, where the
contraction goes by chunks), `rotate` (`rotate_chunks`), `store_codes`. The Gluon kernels share its constants.
"""

import triton
import triton.language as tl

from ...core import cache_format as fmt

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
def code_channels(DP: tl.constexpr, IS_KEY: tl.constexpr):
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
def load_transform(
    transform_ptr, IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The whole transform's limbs, or placeholders when the contraction is chunked."""
    if CHUNK == DP:
        rows, columns = _row_channels(DP, not IS_KEY), code_channels(DP, IS_KEY)
        return _transform_limbs(transform_ptr, rows, columns, D)
    else:
        return 0, 0


@triton.jit
def load_value_mean(mean_ptr, D: tl.constexpr, DP: tl.constexpr, QUARTERS: tl.constexpr):
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
def scale_rows(
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
def row_operands(
    rows_ptr, stride_token, value_mean, value_mean_largest, mean_ptr, row0, valid,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 5, arguments as of `scale_rows` -> (high limbs int8 [R, DP], low limbs, exponent [R])."""
    z, exponent, factor, _ = scale_rows(
        rows_ptr, stride_token, value_mean, value_mean_largest, mean_ptr, row0, valid, IS_KEY, D, DP, ROWS
    )
    high, low = _row_limbs(z * factor[:, None] + 0.5)
    return high, low, exponent


@triton.jit
def rotate(x_high, x_low, t_high, t_low):
    """Step 6: int8 limbs [R, C] and [C, N] -> int32 [R, N]."""
    y = tl.dot(x_high, t_high, out_dtype=tl.int32) << 8
    y = tl.dot(x_high, t_low, acc=y, out_dtype=tl.int32)
    y = tl.dot(x_low, t_high, acc=y, out_dtype=tl.int32)
    return y + (tl.dot(x_low, t_low, out_dtype=tl.int32) >> 8)


@triton.jit
def rotate_chunks(
    rows_ptr, stride_token, factor, largest, mean_ptr, row0, transform_ptr,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Steps 4 to 6 where rows and transform do not fit: chunk by chunk of channels, both read again."""
    tokens = row0 + tl.arange(0, ROWS)
    columns = code_channels(DP, IS_KEY)
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
def code_complements(y, threshold):
    """3 - code: how many of y + s, y and y - s are negative; 0 <= s."""
    above = (y + threshold).to(tl.uint32, bitcast=True)
    below = (y - threshold).to(tl.uint32, bitcast=True)
    negative = (above >> 31) + (y.to(tl.uint32, bitcast=True) >> 31)
    return (negative + (below >> 31)).to(tl.int32, bitcast=True)


@triton.jit
def _key_words(complements, DP: tl.constexpr, ROWS: tl.constexpr):
    """Columns in the order of `code_channels` -> words int32 [R, DP / 16] along channels."""
    lanes = tl.permute(tl.reshape(complements, (ROWS, DP // 8, 4, 2)), (0, 2, 1, 3))
    shift = 2 * tl.arange(0, CODES)
    return ~tl.sum(tl.reshape(lanes, (ROWS, DP // CODES, CODES)) << shift[None, None, :], 2)


@triton.jit
def token_powers(ROWS: tl.constexpr):
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
def store_scales(y, exponent, multiplier, scale_ptr, row0, D: tl.constexpr, ROWS: tl.constexpr):
    """Steps 7 and 9 of `ROWS` rotated rows -> their thresholds [R]; scale_ptr is at the page and head."""
    mean_abs = tl.sum(tl.abs(y) >> ABS_SHIFT, 1) // D
    threshold = (mean_abs * multiplier) >> MULTIPLIER_SHIFT
    scale = threshold.to(tl.float32) * _power_of_two(exponent + SCALE_DOWN)
    tl.store(scale_ptr + row0 + tl.arange(0, ROWS), _bf16_bits(scale))
    return threshold


@triton.jit
def store_words(
    complements, powers, codes_ptr, row0,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Packs and stores 3 - code of `ROWS` rows; codes_ptr is at the page and head."""
    if IS_KEY:  # word w of a token: channels 16w .. 16w + 15
        rows = row0 + tl.arange(0, ROWS)
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


@triton.jit
def store_codes(
    y, exponent, multiplier, powers, codes_ptr, scale_ptr, row0,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Steps 7 to 9 and packing of `ROWS` rotated rows; pointers are at the page and head."""
    threshold = store_scales(y, exponent, multiplier, scale_ptr, row0, D, ROWS)
    store_words(code_complements(y, threshold[:, None]), powers, codes_ptr, row0, IS_KEY, D, DP, ROWS)
