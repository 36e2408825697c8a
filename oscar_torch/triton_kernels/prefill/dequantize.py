"""What flash attention reads: INT2 pages as BF16 rows in the rotated bases, and queries in the keys'."""

import torch
import triton
import triton.language as tl

from ...core import cache_format as fmt
from ..launch.tensors import check_device, rotation_stride
from .triton import TILES, times_matrix

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
CODES = tl.constexpr(fmt.CODES_PER_WORD)
HEAD_DIMS = (64, 128, 256)


# One compilation for all blocks: tables begin anywhere, blocks have any number of pages.
@triton.jit(do_not_specialize=["pages"], do_not_specialize_on_alignment=["table_ptr"])
def _dequantize_kernel(
    table_ptr, key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, mean_ptr, key_ptr, value_ptr,
    pages, K: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Grid (S, K), S >= pages. mean float32 [K, pages, D] in the rotated basis; outputs [K, S * 64, D].

    Rows from `pages` on are zeros.
    """
    page, head = tl.program_id(0), tl.program_id(1)
    live = page < pages
    physical = tl.load(table_ptr + page, mask=live, other=0).to(tl.int64) * K + head
    token = tl.arange(0, PAGE)
    channel = tl.arange(0, D)
    out = ((head * tl.num_programs(0) + page).to(tl.int64) * PAGE + token)[:, None] * D + channel[None, :]
    shift = tl.arange(0, CODES) * 2

    word = tl.arange(0, D // CODES)
    words = tl.load(
        key_codes_ptr + physical * (PAGE * D // CODES) + token[:, None] * (D // CODES) + word[None, :]
    )
    codes = tl.reshape((words[:, :, None] >> shift[None, None, :]) & 3, (PAGE, D))
    scale = tl.load(key_scale_ptr + physical * PAGE + token, mask=live & (token >= 0), other=0).to(tl.float32)
    mean = tl.load(mean_ptr + (head * pages + page) * D + channel, mask=live & (channel >= 0), other=0)
    rows = (codes.to(tl.float32) - 1.5) * scale[:, None] + mean[None, :]
    tl.store(key_ptr + out, rows.to(key_ptr.dtype.element_ty))

    word = tl.arange(0, PAGE // CODES)
    words = tl.load(
        value_codes_ptr + physical * (PAGE * D // CODES) + channel[:, None] * (PAGE // CODES) + word[None, :]
    )
    codes = tl.trans(tl.reshape((words[:, :, None] >> shift[None, None, :]) & 3, (D, PAGE)))
    scale = tl.load(value_scale_ptr + physical * PAGE + token, mask=live & (token >= 0), other=0).to(
        tl.float32
    )
    tl.store(value_ptr + out, ((codes.to(tl.float32) - 1.5) * scale[:, None]).to(value_ptr.dtype.element_ty))


def dequantize_pages(
    cache, table: torch.Tensor, mean: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Writes the rows of physical pages `table` int32 [P] to key and value [K, S * 64, D], rotated bases.

    S >= P; rows past the pages become zeros. mean float32 [K, P, D], in the keys' rotated basis, is added to
    the keys of a page. Raises NotImplementedError (device, head_dim).
    """
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim}, pages are dequantized for {HEAD_DIMS}")
    check_device(key)
    _dequantize_kernel[(key.shape[1] // fmt.PAGE_TOKENS, heads)](
        table, cache.key_codes, cache.value_codes, cache.key_scale, cache.value_scale, mean, key, value,
        len(table), K=heads, D=head_dim, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "filled"])
def _rotate_kernel(
    query_ptr, transform_ptr, stride_rotation, mean_ptr, rotated_ptr, shift_ptr, rows, filled,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, MEANS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(filled / ROWS), K): rows token * G + query head of the group; zeros from `rows` on."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    live = row < rows
    start = ((row // G) * (K * G) + head * G + row % G).to(tl.int64) * D
    rows_ptr = query_ptr + start[:, None]
    matrix_ptr = transform_ptr + head * stride_rotation * D * D
    rotated = times_matrix(rows_ptr, live, matrix_ptr, D, ROWS, D, D, CHUNK, COMPILED)
    place = (head * filled + row).to(tl.int64)
    channel = tl.arange(0, D)
    mask = (row < filled)[:, None] & (channel >= 0)[None, :]
    tl.store(rotated_ptr + place[:, None] * D + channel[None, :], rotated, mask=mask)
    shift = times_matrix(rows_ptr, live, mean_ptr + head * D * MEANS, MEANS, ROWS, D, MEANS, CHUNK, COMPILED)
    mean = tl.arange(0, MEANS)
    out = (head * MEANS + mean).to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(shift_ptr + out, shift, mask=live[:, None] & (mean >= 0)[None, :])


def rotate_queries(
    query: torch.Tensor, rotation, means: torch.Tensor, filled: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [1, T, K * G, D] in the keys' rotated basis, and their products with vectors.

    means float32 [K, P, D], not rotated. Returns rows [1, K, filled, D] in the query's dtype, zeros after
    T * G of them, and float32 [K, P', T * G] with P' >= P. Raises NotImplementedError (device).
    """
    check_device(query)
    heads, pieces, head_dim = means.shape
    rows = query.shape[1] * query.shape[2] // heads
    padded = max(16, triton.next_power_of_2(pieces))
    columns = means.new_zeros((heads, head_dim, padded))
    columns[..., :pieces] = means.mT
    rotated = query.new_empty((1, heads, filled, head_dim))
    shift = torch.empty((heads, padded, rows), device=query.device)
    tile = TILES[head_dim]
    # Triton 3.6 makes nonsense of the second product where its loop has but one step (head_dim 64 on Hopper).
    chunk = min(tile.chunk, head_dim // 2)
    _rotate_kernel[(triton.cdiv(filled, tile.rows), heads)](
        query, rotation.query_transform, rotation_stride(rotation.query_transform.shape[0], heads), columns,
        rotated, shift, rows, filled, K=heads, G=query.shape[2] // heads, D=head_dim, MEANS=padded,
        ROWS=tile.rows, CHUNK=chunk, COMPILED=query.device.type == "cuda", num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return rotated, shift
