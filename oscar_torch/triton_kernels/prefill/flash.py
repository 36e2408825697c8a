"""A chunk of queries over INT2 history through flash attention, history dequantized block by block.

Long chunks are bound by arithmetic, not by bytes: dequantizing a block of pages to BF16 costs a few per
cent of the attention over it, and the vendor's products are the fastest there are. So the history is read in
blocks of `BLOCK_TOKENS` tokens, each one piece of what `prefill/triton.py: attend` merges with the BF16 rows:
beside the results of pieces the workspace does not grow. Short chunks and decoding read codes directly.

Within a block keys stay in the rotated basis, and so do queries. The mean key of the whole block is taken out
of the BF16 keys and put back as a number per query, q·mean, into the log-sum-exp: what BF16 then rounds is a
page's mean less the block's and the coded rest. Query heads of a group are further rows of their key head:
no query of a chunk is masked from any of the history.

cuDNN plans every shape anew, for a quarter of a second. So blocks come in few sizes (`blocks_of`), the last
filled up with rows of zeros: keys whose score is 0, of values that add nothing. Their share of the weights is
known and taken off. What remains is at least about one part in `SIZE_STEP`, which float32 can bear: keys less
their mean score 0 on average, so the sum of their exponentials is at least their number. Queries are filled
up to multiples of `MIN_TOKENS` tokens; nobody reads what comes out there.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core import cache_format as fmt
from . import triton as plain
from .dequantize import HEAD_DIMS, dequantize_pages

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
    64, 128, 256. Waits for the device unless `cache.known_history` says how many pages every sequence has.
    """
    plain.check_chunk(query, key, value, cache, sink_logits)
    head_dim, tokens = cache.config.head_dim, query.shape[1]
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise NotImplementedError(f"queries of {query.dtype}, flash attention serves bfloat16 and float16")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim}, pages are dequantized for {HEAD_DIMS}")
    if sliding_window is not None:
        raise NotImplementedError(f"sliding_window = {sliding_window}: blocks are read as a whole")
    if tokens < MIN_TOKENS:
        raise NotImplementedError(f"a chunk of {tokens} tokens: blocks are dequantized from {MIN_TOKENS} on")
    query = query.contiguous()
    history = _history(query, cache, rotation, softmax_scale)
    unused = query, query  # rotated queries and their units: of the history only, which is done
    return plain.attend(
        query, key, value, cache, rotation, unused, history, new_lengths=new_lengths,
        softmax_scale=softmax_scale, sliding_window=None, sink_logits=sink_logits,
    )  # fmt: skip


def _history(query: Tensor, cache, rotation, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """The share of the INT2 pages, in pieces, as `prefill/triton.py: attend` takes it."""
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    batch, tokens = query.shape[:2]
    grouped = query.reshape(batch, tokens, heads, -1, head_dim).transpose(1, 2)
    grouped = grouped.reshape(batch, heads, -1, head_dim).float()  # [B, K, T * G, D]
    rows = grouped.shape[2]
    rotated = (grouped @ rotation.query_transform).to(query.dtype)
    rotated = pad(rotated, (0, 0, 0, -tokens % MIN_TOKENS * (rows // tokens)))
    counts = cache.known_history or cache.history_pages.tolist()
    blocks = [blocks_of(count) for count in counts]
    pieces = max(1, *map(len, blocks))
    even = min(counts) == max(counts) > 0  # then every part of the results below is written
    sums = (query.new_empty if even else query.new_zeros)((pieces, batch, heads, rows, head_dim))
    maxima = torch.full((pieces, batch, heads, rows), plain.UNSEEN.value, device=query.device)
    weights = torch.zeros_like(maxima)
    transform = rotation.key_transform.float() * 2.0**-fmt.TRANSFORM_BITS
    widest = max((size for parts in blocks for _, _, size in parts), default=0) * fmt.PAGE_TOKENS
    space = query.new_empty((2, heads * widest * head_dim))
    for b, count in enumerate(counts):
        if not count:
            continue
        means = cache.key_page_mean[cache.page_table[b, :count].long()].float().transpose(0, 1)  # [K, P, D]
        rotated_means = means @ transform
        for piece, (first, end, pages) in enumerate(blocks[b]):
            mean = rotated_means[:, first:end]
            size = pages * fmt.PAGE_TOKENS
            key, value = (x[: heads * size * head_dim].view(heads, size, head_dim) for x in space)
            table = cache.page_table[b, first:end]
            dequantize_pages(cache, table, mean - mean.mean(dim=1, keepdim=True), key, value)
            out, lse = flash(rotated[b : b + 1], key[None], value[None], softmax_scale)
            sums[piece, b] = out[0, :, :rows]
            lse = lse[0, :, :rows]
            shift = grouped[b] @ means[:, first:end].mean(dim=1)[:, :, None]  # [K, T * G, 1]
            zeros = (pages - (end - first)) * fmt.PAGE_TOKENS
            weights[piece, b] = 1.0 - zeros * torch.exp(-lse)
            score = lse * plain.LOG2_E
            maxima[piece, b] = score.add_(shift[..., 0], alpha=softmax_scale * plain.LOG2_E)
    all_rows = batch * heads * rows
    state = torch.stack([maxima, weights])
    return sums.reshape(pieces, all_rows, head_dim), state.reshape(2, pieces, all_rows)


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


def flash(query: Tensor, key: Tensor, value: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention without a mask: query [B, K, R, D], key, value [B, K, S, D] -> the same and lse.

    The log-sum-exp is natural, float32 [B, K, R]. cuDNN's kernel where Torch can reach it, else
    FlashAttention; the math in float32 off CUDA, for checking every step around them.
    """
    if query.device.type != "cuda":
        scores = query.float() @ key.float().mT * softmax_scale
        return (torch.softmax(scores, -1) @ value.float()).to(query.dtype), torch.logsumexp(scores, -1)
    if _cudnn_serves(query.device, query.dtype, query.shape[-1]):
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, False, False, scale=softmax_scale
        )[:2]
        return out, lse.reshape(query.shape[:3])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, False, False, scale=softmax_scale
    )[:2]
    return out, lse[..., : query.shape[2]]


@functools.cache
def _cudnn_serves(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN attends on this device: asked of Torch once, with tensors of no size to speak of."""
    probe = torch.zeros((1, 1, 128, head_dim), device=device, dtype=dtype)
    parameters = torch.backends.cuda.SDPAParams(probe, probe, probe, None, 0.0, False, False)
    return bool(torch.backends.cuda.can_use_cudnn_attention(parameters))
