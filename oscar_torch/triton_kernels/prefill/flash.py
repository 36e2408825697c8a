"""A long chunk of queries through flash attention: INT2 history dequantized block by block, and BF16 rows.

Long chunks are bound by arithmetic, not by bytes: dequantizing a block of pages to BF16 costs a few per
cent of the attention over it, and the vendor's products are the fastest there are. So three parts go through
flash attention, and the launch in `prefill/triton.py: attend` merges them by their log-sum-exp:

- the INT2 history in blocks of up to `BLOCK_TOKENS` tokens, in the rotated bases,
- the BF16 rows of sink and recent pages,
- the chunk itself, causally.

Sequences go one after the other, so the workspace is that of one. Short chunks and decoding read codes
directly.

Within a block keys stay in the rotated basis, and so do queries. The mean key of the whole block is taken out
of the BF16 keys and put back as a number per query, q·mean, into the log-sum-exp: what BF16 then rounds is a
page's mean less the block's and the coded rest. Query heads of a group are further rows of their key head:
no query of a chunk is masked from any of the history.

cuDNN plans every shape anew, for a quarter of a second. So blocks come in few sizes (`blocks_of`), the last
filled up with rows of zeros: keys whose score is 0, of values that add nothing. Their share of the weights is
known and taken off. What remains is at least about one part in `SIZE_STEP`, which float32 can bear: keys less
their mean score 0 on average, so the sum of their exponentials is at least their number. Queries are filled
up to a power of two times `MIN_TOKENS` tokens; nobody reads what comes out there.
"""

import dataclasses
import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core import cache_format as fmt
from ...layer_cache import recent_slot
from . import triton as plain
from .dequantize import HEAD_DIMS, dequantize_pages, rotate_queries

BLOCK_TOKENS = 32_768  # dequantized at a time
SIZE_STEP = 32  # pages: blocks have this many, or a power of two times as many up to BLOCK_TOKENS
MIN_TOKENS = 1024  # at 512 over 32K plain Triton takes 1.04 ms and this 1.48, at 2048 4.0 and 2.5 (H200)


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache,
    rotation,
    *,
    new_lengths: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    Shapes, dtypes and errors as in `prefill/triton.py`; NotImplementedError also for queries that are not
    bfloat16 or float16, chunks below `MIN_TOKENS` tokens, a sliding window, and other head_dims than
    64, 128 and 256. Waits for the device unless the cache is `counted`.
    """
    plain.check_chunk(query, key, value, cache, sink_logits)
    head_dim, tokens = cache.config.head_dim, query.shape[1]
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise NotImplementedError(f"queries of {query.dtype}, flash attention serves bfloat16 and float16")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim}, flash attention is used for {HEAD_DIMS}")
    if sliding_window is not None:
        raise NotImplementedError(f"sliding_window = {sliding_window}: blocks are read as a whole")
    if tokens < MIN_TOKENS:
        raise NotImplementedError(f"a chunk of {tokens} tokens: blocks are dequantized from {MIN_TOKENS} on")
    query = query.contiguous()
    counts = cache.known_counts
    if counts is None:
        counts = torch.stack([cache.lengths, cache.history_pages], dim=1).tolist()
    key, value = key.to(query.dtype), value.to(query.dtype)
    if not cache.known_whole:
        live = torch.arange(tokens, device=query.device) < new_lengths[:, None]
        # Rows that are no tokens may hold anything; behind the causal mask weights of 0 would not hide NaN.
        key, value = (x.masked_fill(~live[..., None, None], 0) for x in (key, value))
    out = query.new_empty(query.shape, dtype=torch.float32)
    for b, (length, history) in enumerate(counts):
        part = slice(b, b + 1)
        one = _sequence(cache, part)
        rows = query[part], key[part], value[part]
        plain.attend(
            *rows, one, rotation, (query, query),  # rotated queries and units: of the history, which is done
            _history(query[part], one, rotation, softmax_scale, history), new_lengths=new_lengths[part],
            softmax_scale=softmax_scale, sliding_window=None, sink_logits=sink_logits,
            rows=(*_window(query[part], one, softmax_scale, length, history), *_own(*rows, softmax_scale)),
            out=out[part],
        )  # fmt: skip
    return out


def _sequence(cache, part: slice):
    """The cache of one sequence, all arrays in place."""
    if cache.batch == 1:
        return cache
    names = ("page_table", "window_table", "lengths", "history_pages")
    return dataclasses.replace(cache, **{name: getattr(cache, name)[part] for name in names})


def _filled_up(tokens: int) -> int:
    """The least power of two times `MIN_TOKENS` that is not below `tokens`."""
    return MIN_TOKENS << max(0, -(-tokens // MIN_TOKENS) - 1).bit_length()


class Pieces(NamedTuple):
    """What flash attention found over INT2 pages, as `prefill/triton.py: attend` takes it."""

    sums: Tensor  # [pieces, rows, D], normalized
    state: Tensor  # float32 [2, pieces, rows]: maxima of scores in log2 units, sums of weights


def _history(query: Tensor, cache, rotation, softmax_scale: float, count: int) -> Pieces | None:
    """The share of `count` INT2 pages, in the rotated basis, rows [K * T * G]; one piece per block."""
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    blocks = blocks_of(count)
    if not blocks:
        return None
    tokens = query.shape[1]
    rows = tokens * query.shape[2] // heads
    means = cache.key_page_mean[cache.page_table[0, :count].long()].float().transpose(0, 1)  # [K, P, D]
    rotated_means = means @ (rotation.key_transform.float() * 2.0**-fmt.TRANSFORM_BITS)
    block_means = torch.stack([means[:, first:end].mean(dim=1) for first, end, _ in blocks], dim=1)
    rotated, shift = rotate_queries(query, rotation, block_means, rows // tokens * _filled_up(tokens))
    sums = []
    state = torch.empty((2, len(blocks), heads, rows), device=query.device)
    widest = max(size for _, _, size in blocks) * fmt.PAGE_TOKENS
    space = query.new_empty((2, heads * widest * head_dim))
    for piece, (first, end, pages) in enumerate(blocks):
        mean = rotated_means[:, first:end]
        size = pages * fmt.PAGE_TOKENS
        key, value = (x[: heads * size * head_dim].view(heads, size, head_dim) for x in space)
        table = cache.page_table[0, first:end]
        dequantize_pages(cache, table, mean - mean.mean(dim=1, keepdim=True), key, value)
        found, lse = flash(rotated, key[None], value[None], softmax_scale)
        sums.append(found[0, :, :rows])
        lse = lse[0, :, :rows]
        zeros = (pages - (end - first)) * fmt.PAGE_TOKENS
        state[0, piece] = torch.add(lse, shift[:, piece], alpha=softmax_scale).mul_(plain.LOG2_E)
        state[1, piece] = 1.0 - zeros * torch.exp(-lse) if zeros else 1.0
    joined = torch.stack(sums) if len(sums) > 1 else sums[0].contiguous()
    return Pieces(joined.view(len(sums), heads * rows, head_dim), state.flatten(2, 3))


def _window(query: Tensor, cache, softmax_scale: float, length: int, history: int) -> tuple[Tensor, Tensor]:
    """The share of the BF16 rows of sink and recent pages: [T, N, D] and log-sum-exp float32 [N, T]."""
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    stored = -(-length // fmt.PAGE_TOKENS)
    pages = [n if n < config.sink_pages else n + history for n in range(max(0, stored - history))]
    if not pages:
        return query[0], query.new_full(query.shape[2:0:-1], plain.UNSEEN.value, dtype=torch.float32)
    slots = [n if n < config.sink_pages else recent_slot(n, config) for n in pages]
    physical = torch.cat([cache.window_table[0, slot : slot + 1] for slot in slots]).long()
    count = length - (pages[-1] + 1 - len(pages)) * fmt.PAGE_TOKENS
    key, value = (
        window[physical].transpose(0, 1).reshape(1, heads, -1, head_dim)[:, :, :count].to(query.dtype)
        for window in (cache.window_key, cache.window_value)
    )
    # Not cuDNN: as many shapes as there are lengths, of little work each.
    out, lse = flash(query.transpose(1, 2), key, value, softmax_scale, cudnn=False)
    return out[0].transpose(0, 1).contiguous(), lse[0].contiguous()


def _own(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """The chunk's attention to itself, causal: [T', N, D] and log-sum-exp float32 [N, T'], T' >= T."""
    fill = _filled_up(query.shape[1]) - query.shape[1]
    if fill:
        query, key, value = (pad(x, (0, 0, 0, 0, 0, fill)) for x in (query, key, value))
    # Anew without the batch: a part of a longer prompt has other strides there, for which cuDNN would plan.
    query, key, value = (x[0].unsqueeze(0).transpose(1, 2) for x in (query, key, value))
    out, lse = flash(query, key, value, softmax_scale, causal=True)
    return out[0].transpose(0, 1).contiguous(), lse[0].contiguous()


def blocks_of(pages: int) -> list[tuple[int, int, int]]:
    """Cuts pages into blocks (first page, end, pages that the block has room for), the largest first.

    The sizes are `SIZE_STEP` times a power of two, up to `BLOCK_TOKENS`: what is left, rounded up to a
    multiple of the step, in binary. Only the last block can have room to spare, less than a step.
    """
    blocks, first = [], 0
    while first < pages:
        steps = -(-(pages - first) // SIZE_STEP)
        size = min(BLOCK_TOKENS // fmt.PAGE_TOKENS, SIZE_STEP << (steps.bit_length() - 1))
        blocks.append((first, min(first + size, pages), size))
        first += size
    return blocks


def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    softmax_scale: float,
    *,
    causal: bool = False,
    cudnn: bool = True,
) -> tuple[Tensor, Tensor]:
    """Softmax attention: query [B, N, R, D], key, value [B, K, S, D] -> as query, and the log-sum-exp.

    The log-sum-exp is natural, float32 [B, N, R]; query head n belongs to key head n * K / N. causal: row r
    sees keys 0 .. r. cuDNN's kernel where Torch can reach it, unless it is not wanted, else FlashAttention,
    both of which know groups of heads; the math in float32 off CUDA, for checking every step around them.
    """
    if query.device.type != "cuda":
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = query.float() @ key.float().mT * softmax_scale
        if causal:
            scores += torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return (torch.softmax(scores, -1) @ value.float()).to(query.dtype), torch.logsumexp(scores, -1)
    if cudnn and _cudnn_serves(query.device, query.dtype, query.shape[-1]):
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=softmax_scale
        )[:2]
        return out, lse.reshape(query.shape[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=softmax_scale
    )[:2]
    return out, lse[..., : query.shape[2]]


@functools.cache
def _cudnn_serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN attends on this device: asked of Torch once, with tensors of no size to speak of."""
    probe = torch.zeros((1, 1, 128, head_dim), device=device, dtype=dtype)
    parameters = torch.backends.cuda.SDPAParams(probe, probe, probe, None, 0.0, False, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))
