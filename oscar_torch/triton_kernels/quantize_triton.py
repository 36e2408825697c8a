"""Page quantizer in plain Triton: center, rotate, scale, code and pack in one launch, exact to the byte.

Why: the format page defines a quantized page in integers; here every step is integer arithmetic or a
float32 operation with an exact result, so compiled code, the CPU interpreter and the Torch reference agree.
Rotation = int8 dots of 8-bit limbs with int32 accumulators. bf16 data is read and written as int16 bits.

Layout: one program handles `ROWS` tokens of a page (all 64 up to D = 256) for one key/value head. Bulk calls
walk several pages per program, so that the transform's limbs are split once and stay on the chip.
"""

import torch
import triton
import triton.language as tl

from .. import cache_format as fmt
from ..config import DTypeError, ShapeError, check_head_dim

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
INFINITY_BITS = tl.constexpr(0x7F800000)
LIMIT_BITS = tl.constexpr((fmt.MAX_EXPONENT + 127) << 23)
EMPTY_BITS = tl.constexpr((fmt.MIN_EXPONENT + 127) << 23)
# shift + 127: the biased exponent of a power of two, before the row's own exponent is added or subtracted
MEAN_UP = tl.constexpr(fmt.MEAN_BITS + 127)
MEAN_DOWN = tl.constexpr(127 - fmt.MEAN_BITS - fmt.PAGE_TOKENS_LOG2)
ROW_UP = tl.constexpr(fmt.ROW_BITS + 127)
SCALE_DOWN = tl.constexpr(127 - fmt.SCALE_BITS)
ABS_SHIFT = tl.constexpr(fmt.ABS_SHIFT)
MULTIPLIER_SHIFT = tl.constexpr(fmt.MULTIPLIER_SHIFT)


@triton.jit
def _clean(raw):
    """bf16 bits (int16) -> float32; NaN and infinities become 0, finite values are clamped to +-2**64."""
    bits = raw.to(tl.int32) << 16
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.where(magnitude > LIMIT_BITS, (bits ^ magnitude) | LIMIT_BITS, bits)
    return tl.where(magnitude >= INFINITY_BITS, 0, clamped).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x):
    """|x| as the int32 that orders like it."""
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
def _limbs(v):
    """int32 in the format's 15-bit range -> (high, low) int8 limbs with v = 256 * high + low."""
    high = (v + 128) >> 8
    return high.to(tl.int8), (v - (high << 8)).to(tl.int8)


@triton.jit
def _page_mean_bits(x, largest):
    """Mean key of a page: x float32 [64, C], largest = max |x| bits over all channels -> bf16 bits [C]."""
    exponent = (largest >> 23) - 127
    exponent = tl.where(largest < EMPTY_BITS, 0, exponent)
    summands = tl.floor(x * _power_of_two(-exponent + MEAN_UP) + 0.5).to(tl.int32)
    mean = tl.sum(summands, 0).to(tl.float32) * _power_of_two(exponent + MEAN_DOWN)
    return tl.where(largest < EMPTY_BITS, 0, _bf16_bits(mean))


@triton.jit
def _fixed_rows(z, factor):
    """Rows to fixed point: z float32 [R, C], factor float32 [R] (0 for an empty row) -> int32 [R, C]."""
    return tl.floor(z * factor[:, None] + 0.5).to(tl.int32)


@triton.jit
def _transform_limbs(transform_ptr, rows, columns, D: tl.constexpr):
    mask = (rows < D)[:, None] & (columns < D)[None, :]
    entries = tl.load(transform_ptr + rows[:, None] * D + columns[None, :], mask=mask, other=0)
    return _limbs(entries.to(tl.int32))


@triton.jit
def _store_codes(
    y, exponent, multiplier, codes_ptr, scale_ptr, row0,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Thresholds, codes, scale and packing of `ROWS` rotated rows; pointers are at the page and head."""
    mean_abs = tl.sum(tl.abs(y) >> ABS_SHIFT, 1) // D
    threshold = (mean_abs * multiplier) >> MULTIPLIER_SHIFT
    codes = (y >= -threshold[:, None]).to(tl.int32) + (y >= 0).to(tl.int32)
    codes += (y >= threshold[:, None]).to(tl.int32)
    scale = threshold.to(tl.float32) * _power_of_two(exponent + SCALE_DOWN)
    rows = row0 + tl.arange(0, ROWS)
    tl.store(scale_ptr + rows, _bf16_bits(scale))
    shift = 2 * tl.arange(0, 16)
    if IS_KEY:  # word w of a token: channels 16w .. 16w + 15
        words = tl.sum(tl.reshape(codes, (ROWS, DP // 16, 16)) << shift[None, None, :], 2)
        w = tl.arange(0, DP // 16)
        mask = (w < D // 16)[None, :] & (rows >= 0)[:, None]
        tl.store(codes_ptr + rows[:, None] * (D // 16) + w[None, :], words, mask=mask)
    else:  # word w of a channel: tokens 16w .. 16w + 15
        words = tl.sum(tl.reshape(codes, (ROWS // 16, 16, DP)) << shift[None, :, None], 1)
        w = row0 // 16 + tl.arange(0, ROWS // 16)
        d = tl.arange(0, DP)
        mask = (d < D)[None, :] & (w >= 0)[:, None]
        tl.store(codes_ptr + d[None, :] * (PAGE // 16) + w[:, None], words, mask=mask)


@triton.jit
def _load_rows(rows_ptr, stride_token, tokens, channels, D: tl.constexpr):
    mask = (channels < D)[None, :] & (tokens >= 0)[:, None]
    offsets = tokens[:, None] * stride_token + channels[None, :]
    return _clean(tl.load(rows_ptr + offsets, mask=mask, other=0))


@triton.jit
def _load_page(rows_ptr, stride_token, x, channels, D: tl.constexpr, ROWS: tl.constexpr):
    """All 64 rows of the page at these channels; x when the program holds them already."""
    if ROWS == PAGE:
        return x
    else:
        return _load_rows(rows_ptr, stride_token, tl.arange(0, PAGE), channels, D)


@triton.jit
def _center(x, mean_bits):
    return x - (mean_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)[None, :]


@triton.jit
def _quantize_page(
    rows_ptr, stride_token, transform_ptr, t_high, t_low, multiplier,
    codes_ptr, scale_ptr, mean_ptr, row0,
    IS_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One page and head: rows bf16 [64, D] at rows_ptr -> codes, scale and, for keys, the page's mean.

    mean_ptr is written for keys and read for values. With CHUNK = DP the limbs t_high, t_low are used;
    otherwise the contraction walks over chunks of channels and reads rows and transform again.
    """
    channels = tl.arange(0, DP)
    tokens = row0 + tl.arange(0, ROWS)
    x = _load_rows(rows_ptr, stride_token, tokens, channels, D)
    if IS_KEY:
        page = _load_page(rows_ptr, stride_token, x, channels, D, ROWS)
        largest = tl.max(tl.max(_magnitude(page), 1), 0)
        mean_bits = _page_mean_bits(page, largest)
        if row0 == 0:
            tl.store(mean_ptr + channels, mean_bits, mask=channels < D)
    else:
        mean_bits = tl.load(mean_ptr + channels, mask=channels < D, other=0)
    z = _center(x, mean_bits)
    row_largest = tl.max(_magnitude(z), 1)
    empty = row_largest < EMPTY_BITS
    exponent = tl.where(empty, 0, (row_largest >> 23) - 127)
    factor = tl.where(empty, 0.0, _power_of_two(-exponent + ROW_UP))
    if CHUNK == DP:
        x_high, x_low = _limbs(_fixed_rows(z, factor))
        cross = tl.dot(x_high, t_low, out_dtype=tl.int32)
        cross = tl.dot(x_low, t_high, acc=cross, out_dtype=tl.int32)
        y = (tl.dot(x_high, t_high, out_dtype=tl.int32) << 8) + cross
        y += tl.dot(x_low, t_low, out_dtype=tl.int32) >> 8
    else:
        high_high = tl.zeros((ROWS, DP), tl.int32)
        cross = tl.zeros((ROWS, DP), tl.int32)
        low_low = tl.zeros((ROWS, DP), tl.int32)
        for chunk in range(0, D, CHUNK):
            c = chunk + tl.arange(0, CHUNK)
            xc = _load_rows(rows_ptr, stride_token, tokens, c, D)
            if IS_KEY:
                mean_chunk = _page_mean_bits(_load_page(rows_ptr, stride_token, xc, c, D, ROWS), largest)
            else:
                mean_chunk = tl.load(mean_ptr + c, mask=c < D, other=0)
            x_high, x_low = _limbs(_fixed_rows(_center(xc, mean_chunk), factor))
            c_high, c_low = _transform_limbs(transform_ptr, c, channels, D)
            high_high = tl.dot(x_high, c_high, acc=high_high, out_dtype=tl.int32)
            cross = tl.dot(x_high, c_low, acc=cross, out_dtype=tl.int32)
            cross = tl.dot(x_low, c_high, acc=cross, out_dtype=tl.int32)
            low_low = tl.dot(x_low, c_low, acc=low_low, out_dtype=tl.int32)
        y = (high_high << 8) + cross + (low_low >> 8)
    _store_codes(y, exponent, multiplier, codes_ptr, scale_ptr, row0, IS_KEY, D, DP, ROWS)


@triton.jit
def _load_transform(transform_ptr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr):
    """The whole transform's limbs, or placeholders when the contraction is chunked."""
    if CHUNK == DP:
        channels = tl.arange(0, DP)
        return _transform_limbs(transform_ptr, channels, channels, D)
    else:
        return 0, 0


@triton.jit
def _bulk_kernel(
    rows_ptr, stride_page, stride_token, stride_head, num_pages,
    transform_ptr, multiplier_ptr, stride_rotation, mean_ptr, codes_ptr, scale_ptr,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (K, STEP, 64 / ROWS): pages pid, pid + STEP, ... of one head, one role."""
    head = tl.program_id(0)
    row0 = tl.program_id(2) * ROWS
    head_transform = transform_ptr + head * stride_rotation * D * D
    multiplier = tl.load(multiplier_ptr + head * stride_rotation)
    t_high, t_low = _load_transform(head_transform, D, DP, CHUNK)
    for i in range(tl.program_id(1), num_pages, STEP):
        page = tl.cast(i, tl.int64)
        slot = page * K + head
        mean_offset = slot * D if IS_KEY else head * stride_rotation * D
        _quantize_page(
            rows_ptr + page * stride_page + head * stride_head, stride_token, head_transform,
            t_high, t_low, multiplier,
            codes_ptr + slot * (PAGE * D // 16), scale_ptr + slot * PAGE, mean_ptr + mean_offset, row0,
            IS_KEY, D, DP, ROWS, CHUNK,
        )  # fmt: skip


@triton.jit
def _flush_role(
    rows_ptr, source, target, head, transform_ptr, multiplier_ptr, mean_ptr, stride_rotation,
    codes_ptr, scale_ptr, row0,
    IS_KEY: tl.constexpr, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Quantize one window page of one head into an INT2 page of the cache."""
    slot = target * K + head
    head_transform = transform_ptr + head * stride_rotation * D * D
    t_high, t_low = _load_transform(head_transform, D, DP, CHUNK)
    mean_offset = slot * D if IS_KEY else head * stride_rotation * D
    _quantize_page(
        rows_ptr + (source * K + head) * (PAGE * D), D, head_transform, t_high, t_low,
        tl.load(multiplier_ptr + head * stride_rotation),
        codes_ptr + slot * (PAGE * D // 16), scale_ptr + slot * PAGE, mean_ptr + mean_offset, row0,
        IS_KEY, D, DP, ROWS, CHUNK,
    )  # fmt: skip


@triton.jit
def _flush_kernel(
    source_ptr, destination_ptr, window_key_ptr, window_value_ptr,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (K, flushes, 2 * 64 / ROWS): even programs quantize the keys of a page, odd ones its values."""
    head = tl.program_id(0)
    source = tl.load(source_ptr + tl.program_id(1)).to(tl.int64)
    target = tl.load(destination_ptr + tl.program_id(1)).to(tl.int64)
    row0 = (tl.program_id(2) // 2) * ROWS
    if target > 0:
        if tl.program_id(2) % 2 == 0:
            _flush_role(
                window_key_ptr, source, target, head, key_transform_ptr, key_multiplier_ptr,
                key_page_mean_ptr, stride_rotation, key_codes_ptr, key_scale_ptr, row0,
                True, K, D, DP, ROWS, CHUNK,
            )  # fmt: skip
        else:
            _flush_role(
                window_value_ptr, source, target, head, value_transform_ptr, value_multiplier_ptr,
                value_mean_ptr, stride_rotation, value_codes_ptr, value_scale_ptr, row0,
                False, K, D, DP, ROWS, CHUNK,
            )  # fmt: skip


@triton.jit
def _copy_row(rows_ptr, window_ptr, slot, head, row, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    channels = tl.arange(0, DP)
    bits = tl.load(rows_ptr + head * D + channels, mask=channels < D, other=0)
    tl.store(window_ptr + ((slot * K + head) * PAGE + row) * D + channels, bits, mask=channels < D)


@triton.jit
def _has_room(length, history, max_pages, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr):
    """Whether one more row leaves the page table with an entry for every history page."""
    due = (length + 1) // PAGE - (SINK_PAGES + RECENT_SLOTS - 1)
    return tl.maximum(history, due) <= max_pages


@triton.jit
def _append_kernel(
    key_ptr, value_ptr, new_lengths_ptr, lengths_ptr, history_ptr, page_table_ptr, stride_table,
    window_table_ptr, window_key_ptr, window_value_ptr,
    key_transform_ptr, value_transform_ptr, key_multiplier_ptr, value_multiplier_ptr, value_mean_ptr,
    stride_rotation, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (K, B, 2 * 64 / ROWS): store one new row and, where a page leaves the recent part, quantize it.

    The page that leaves and the page of the new row are never the same slot, so programs do not wait.
    """
    head = tl.program_id(0)
    b = tl.program_id(1)
    row0 = (tl.program_id(2) // 2) * ROWS
    is_key = tl.program_id(2) % 2 == 0
    length = tl.load(lengths_ptr + b)
    history = tl.load(history_ptr + b)
    room = _has_room(length, history, stride_table, SINK_PAGES, RECENT_SLOTS)
    if (tl.load(new_lengths_ptr + b) > 0) & room:
        table = window_table_ptr + b * (SINK_PAGES + RECENT_SLOTS)
        if row0 == 0:
            page = length // PAGE
            slot = tl.where(page < SINK_PAGES, page, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
            slot = tl.load(table + slot).to(tl.int64)
            if is_key:
                _copy_row(key_ptr + b * K * D, window_key_ptr, slot, head, length % PAGE, K, D, DP)
            else:
                _copy_row(value_ptr + b * K * D, window_value_ptr, slot, head, length % PAGE, K, D, DP)
        if length + 1 >= (SINK_PAGES + RECENT_SLOTS + history) * PAGE:
            source = tl.load(table + SINK_PAGES + history % RECENT_SLOTS).to(tl.int64)
            target = tl.load(page_table_ptr + b * stride_table + history).to(tl.int64)
            if is_key:
                _flush_role(
                    window_key_ptr, source, target, head, key_transform_ptr, key_multiplier_ptr,
                    key_page_mean_ptr, stride_rotation, key_codes_ptr, key_scale_ptr, row0,
                    True, K, D, DP, ROWS, CHUNK,
                )  # fmt: skip
            else:
                _flush_role(
                    window_value_ptr, source, target, head, value_transform_ptr, value_multiplier_ptr,
                    value_mean_ptr, stride_rotation, value_codes_ptr, value_scale_ptr, row0,
                    False, K, D, DP, ROWS, CHUNK,
                )  # fmt: skip


@triton.jit
def _advance_kernel(
    new_lengths_ptr, lengths_ptr, history_ptr, batch, max_pages,
    SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the appended rows, after every program of `_append_kernel` has read the old counts."""
    b = tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + b, mask=b < batch, other=0)
    history = tl.load(history_ptr + b, mask=b < batch, other=0)
    room = _has_room(length, history, max_pages, SINK_PAGES, RECENT_SLOTS)
    new = tl.minimum(tl.load(new_lengths_ptr + b, mask=b < batch, other=0), 1)
    length += tl.where(room, new, 0)
    due = tl.maximum(length // PAGE - (SINK_PAGES + RECENT_SLOTS - 1), 0)
    tl.store(lengths_ptr + b, length, mask=b < batch)
    tl.store(history_ptr + b, tl.maximum(history, due), mask=b < batch)


def _tiles(head_dim: int) -> dict[str, int]:
    """Tile sizes by head_dim: padded channels, rows per program, contraction chunk, warps."""
    check_head_dim(head_dim)
    padded = max(32, triton.next_power_of_2(head_dim))
    if padded <= 128:
        return {"DP": padded, "ROWS": 64, "CHUNK": padded, "num_warps": 4}
    if padded == 256:
        return {"DP": padded, "ROWS": 64, "CHUNK": 32, "num_warps": 8}
    return {"DP": padded, "ROWS": 16, "CHUNK": 32, "num_warps": 8}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def rotation_stride(rotation_heads: int, num_heads: int) -> int:
    """0 where one rotation serves all heads, 1 where every head has its own."""
    if rotation_heads not in (1, num_heads):
        raise ShapeError(f"rotation has {rotation_heads} heads, allowed: 1 or {num_heads}")
    return 0 if rotation_heads == 1 else 1


def check_device(tensor: torch.Tensor, capability: int = 8) -> None:
    """Raises NotImplementedError unless compiled Triton (or its interpreter) can reach the tensor."""
    if triton.knobs.runtime.interpret and tensor.device.type == "cpu":
        return
    if tensor.device.type != "cuda":
        raise NotImplementedError(f"Triton kernels need a CUDA tensor, got device {tensor.device}")
    major, minor = torch.cuda.get_device_capability(tensor.device)
    if major < capability:
        raise NotImplementedError(f"compute capability {major}.{minor}, needed: {capability}.0 or newer")


def _quantize_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor, mean: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if rows.ndim != 4 or rows.shape[1] != fmt.PAGE_TOKENS:
        raise ShapeError(f"rows has shape {tuple(rows.shape)}, needed: [P, {fmt.PAGE_TOKENS}, K, D]")
    if transform.dtype != torch.int16:
        raise DTypeError(f"transform is {transform.dtype}, needed: torch.int16")
    num_pages, _, heads, head_dim = rows.shape
    tiles = _tiles(head_dim)
    stride_rotation = rotation_stride(transform.shape[0], heads)
    check_device(rows)
    rows = rows.to(torch.bfloat16)
    if rows.stride(3) != 1:
        rows = rows.contiguous()
    is_key = mean is None
    shapes = fmt.int2_array_shapes(num_pages, heads, head_dim)
    role = "key" if is_key else "value"
    codes = torch.empty(shapes[f"{role}_codes"], dtype=torch.int32, device=rows.device)
    scale = torch.empty(shapes[f"{role}_scale"], dtype=torch.bfloat16, device=rows.device)
    if mean is None:
        mean = torch.empty(shapes["key_page_mean"], dtype=torch.bfloat16, device=rows.device)
    if num_pages == 0:
        return codes, scale, mean
    blocks = fmt.PAGE_TOKENS // tiles["ROWS"]
    programs = max(1, min(num_pages, _bulk_programs(rows.device) // heads))
    _bulk_kernel[(heads, programs, blocks)](
        _bits(rows), rows.stride(0), rows.stride(1), rows.stride(2), num_pages,
        transform.contiguous(), multiplier, stride_rotation, _bits(mean.contiguous()), codes, _bits(scale),
        IS_KEY=is_key, K=heads, D=head_dim, STEP=programs, **tiles,
    )  # fmt: skip
    return codes, scale, mean


def _bulk_programs(device: torch.device) -> int:
    """Programs of a bulk launch: a few per multiprocessor, so that each reuses its transform."""
    if device.type != "cuda":
        return 4
    return 3 * torch.cuda.get_device_properties(device).multi_processor_count


def quantize_key_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize pages of keys: center by the page's mean, rotate, scale, code and pack along channels.

    rows bf16 [P, 64, K, D] (other floats are rounded to bf16), transform int16 [1 or K, D, D], multiplier
    int32 [1 or K] -> words int32 [P, K, 64, D / 16], scale bf16 [P, K, 64], page mean bf16 [P, K, D].
    Raises ShapeError, DTypeError, ConfigError (head_dim), NotImplementedError (device).
    Format page, section 2.
    """
    return _quantize_pages(rows, transform, multiplier, None)


def quantize_value_pages(
    rows: torch.Tensor, transform: torch.Tensor, multiplier: torch.Tensor, mean: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize pages of values: center by the calibrated mean, rotate, scale, code and pack along tokens.

    rows bf16 [P, 64, K, D], transform int16 [1 or K, D, D], multiplier int32 [1 or K], mean bf16 [1 or K, D]
    -> words int32 [P, K, D, 4], scale bf16 [P, K, 64].
    Raises ShapeError, DTypeError, ConfigError (head_dim), NotImplementedError (device).
    Format page, section 2.
    """
    if mean.shape[0] != transform.shape[0]:
        raise ShapeError(f"mean has {mean.shape[0]} heads, transform has {transform.shape[0]}")
    return _quantize_pages(rows, transform, multiplier, mean)[:2]


def quantize_page_pair(
    key_pages: torch.Tensor, value_pages: torch.Tensor, rotation
) -> dict[str, torch.Tensor]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    key_codes, key_scale, key_page_mean = quantize_key_pages(
        key_pages, rotation.key_transform, rotation.key_multiplier
    )
    value_codes, value_scale = quantize_value_pages(
        value_pages, rotation.value_transform, rotation.value_multiplier, rotation.value_mean
    )
    return {
        "key_codes": key_codes,
        "value_codes": value_codes,
        "key_scale": key_scale,
        "value_scale": value_scale,
        "key_page_mean": key_page_mean,
    }


def flush_pages(cache, rotation, source_pages: torch.Tensor, destination_pages: torch.Tensor) -> None:
    """Quantize window pages into INT2 pages of the same cache, keys and values, all in one launch.

    source_pages int32 [F]: physical window pages; destination_pages int32 [F]: physical INT2 pages, where 0
    (the reserved page) leaves the cache as it is. F is any count: the batch, or all pages of a prefill.
    Writes key_codes, value_codes, key_scale, value_scale and key_page_mean of `cache` in place. No host
    synchronization. Raises NotImplementedError (device), ShapeError. Format page, sections 2 and 4.
    """
    _, heads, _, head_dim = cache.window_key.shape
    tiles = _tiles(head_dim)
    stride_rotation = rotation_stride(rotation.key_transform.shape[0], heads)
    if source_pages.shape != destination_pages.shape:
        raise ShapeError(f"{source_pages.shape} source pages for {destination_pages.shape} destinations")
    check_device(cache.window_key)
    blocks = fmt.PAGE_TOKENS // tiles["ROWS"]
    _flush_kernel[(heads, source_pages.shape[0], 2 * blocks)](
        source_pages, destination_pages, _bits(cache.window_key), _bits(cache.window_value),
        rotation.key_transform, rotation.value_transform, rotation.key_multiplier, rotation.value_multiplier,
        _bits(rotation.value_mean), stride_rotation, cache.key_codes, cache.value_codes,
        _bits(cache.key_scale), _bits(cache.value_scale), _bits(cache.key_page_mean),
        K=heads, D=head_dim, **tiles,
    )  # fmt: skip


def append_token(cache, rotation, key: torch.Tensor, value: torch.Tensor, new_lengths: torch.Tensor) -> None:
    """Appends at most one row per sequence and quantizes the pages that become history, in two launches.

    key, value bf16 [B, 1, K, D] (other floats are rounded to bf16); new_lengths int32 [B], 0 or 1. Leaves the
    bytes of `cache.append_rows`, without a host synchronization and hence CUDA-graph capturable; for the same
    reason the caller makes sure beforehand that the page tables have room. A row that would need a page
    beyond the table is dropped: nothing is written for its sequence and its length stands still. Raises
    ShapeError, NotImplementedError (device). Format page, section 4.
    """
    config = cache.config
    heads, head_dim, batch = config.num_key_value_heads, config.head_dim, cache.batch
    for name, rows in (("key", key), ("value", value)):
        if rows.shape != (batch, 1, heads, head_dim):
            raise ShapeError(f"{name} rows {tuple(rows.shape)}, expected {(batch, 1, heads, head_dim)}")
    tiles = _tiles(head_dim)
    stride_rotation = rotation_stride(rotation.key_transform.shape[0], heads)
    check_device(cache.window_key)
    windows = {"SINK_PAGES": config.sink_pages, "RECENT_SLOTS": config.recent_slots}
    _append_kernel[(heads, batch, 2 * fmt.PAGE_TOKENS // tiles["ROWS"])](
        _bits(key.to(torch.bfloat16).contiguous()), _bits(value.to(torch.bfloat16).contiguous()),
        new_lengths, cache.lengths, cache.history_pages, cache.page_table, cache.page_table.shape[1],
        cache.window_table, _bits(cache.window_key), _bits(cache.window_value),
        rotation.key_transform, rotation.value_transform, rotation.key_multiplier, rotation.value_multiplier,
        _bits(rotation.value_mean), stride_rotation, cache.key_codes, cache.value_codes,
        _bits(cache.key_scale), _bits(cache.value_scale), _bits(cache.key_page_mean),
        K=heads, D=head_dim, **windows, **tiles,
    )  # fmt: skip
    _advance_kernel[(1,)](
        new_lengths, cache.lengths, cache.history_pages, batch, cache.page_table.shape[1],
        BLOCK=triton.next_power_of_2(batch), num_warps=1, **windows,
    )  # fmt: skip
