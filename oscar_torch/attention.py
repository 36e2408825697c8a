"""Float32 reference attention over sink | INT2 | recent, for one token and for a chunk of queries.

Queries read the INT2 pages in the rotated basis: with q' = q @ query_transform, the score of a quantized
token is scale * (q' . code - 1.5 * sum(q')) + q . page_mean, and the weighted sum of value codes is rotated
back once, at the end. Every segment yields a normalized output and the log-sum-exp of its scores; segments
are merged by log-sum-exp. `docs/int2-format.md`, section 5.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .core import cache_format as fmt
from .core.errors import ShapeError
from .layer_cache import DenseCache, LayerCache
from .packing import unpack_key_codes, unpack_value_codes

PAGE = fmt.PAGE_TOKENS


class Partial(NamedTuple):
    """Attention over one segment: normalized output and log-sum-exp of the scores (-inf where empty)."""

    out: Tensor  # float32 [B, T, K, G, D]
    lse: Tensor  # float32 [B, T, K, G]


def _in_full_float32(function: Callable) -> Callable:
    """Keeps TF32 out of the reference, whatever the process has switched on."""

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            return function(*args, **options)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

    return wrapped


@_in_full_float32
def decode_attention(
    query: Tensor,
    cache: LayerCache | DenseCache,
    rotation: Any,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; `softmax_scale` multiplies the scores (usually D**-0.5). A window of
    w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    sequence of length 0 yields zeros. Raises ShapeError.
    """
    queries = _grouped(query[:, None], cache)
    position = (cache.lengths - 1)[:, None]
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window)
    return _finish(partials, sink_logits)[:, 0]


@_in_full_float32
def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache | DenseCache,
    rotation: Any,
    *,
    new_lengths: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]. `cache` is the state before the
    chunk; token j of sequence b stands at position lengths[b] + j. Rows at or past new_lengths[b] are
    padding: nothing attends to them and their output means nothing. Raises ShapeError.
    """
    queries = _grouped(query, cache)
    step = torch.arange(query.shape[1], device=query.device)
    position = cache.lengths[:, None] + step
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window)
    mask = (step[None, :, None] >= step) & (step < new_lengths[:, None, None])  # [B, T, T]
    if sliding_window is not None:
        mask &= step[None, :, None] - step < sliding_window
    partials.append(_rows(queries, key, value, mask, softmax_scale))
    return _finish(partials, sink_logits)


def merge_partials(partials: list[Partial]) -> Partial:
    """Merges segments by log-sum-exp: softmax over the union of their scores."""
    lse = torch.stack([p.lse for p in partials])
    top = lse.amax(dim=0)
    weight = torch.exp(lse - torch.where(torch.isfinite(top), top, 0.0))
    total = weight.sum(dim=0)
    weight = weight / torch.where(total > 0, total, 1.0)
    out = torch.zeros_like(partials[0].out)
    for p, w in zip(partials, weight):
        out = out + p.out * w[..., None]
    return Partial(out, top + torch.log(total))


def window_positions(cache: LayerCache) -> Tensor:
    """Token position of every row of the window slots, int32 [B, slots, 64]; -1 where nothing is stored."""
    config = cache.config
    slot = torch.arange(config.window_slots, device=cache.lengths.device)
    ring = (slot - config.sink_pages - cache.history_pages[:, None]) % config.recent_slots
    page = torch.where(
        slot < config.sink_pages, slot, config.sink_pages + cache.history_pages[:, None] + ring
    )
    token = page[:, :, None] * PAGE + torch.arange(PAGE, device=cache.lengths.device)
    return torch.where(token < cache.lengths[:, None, None], token, -1)


def _grouped(query: Tensor, cache: LayerCache | DenseCache) -> Tensor:
    """[B, T, N, D] -> float32 [B, T, K, G, D]."""
    if isinstance(cache, DenseCache):
        heads, head_dim = cache.key.shape[2:]
    else:
        heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    batch, tokens, query_heads = query.shape[:3]
    if batch != cache.batch or query.shape[3] != head_dim or query_heads % heads:
        raise ShapeError(f"query {tuple(query.shape)}, expected [{cache.batch}, T, G * {heads}, {head_dim}]")
    return query.float().reshape(batch, tokens, heads, -1, head_dim)


def _stored(
    queries: Tensor,
    cache: LayerCache | DenseCache,
    rotation: Any,
    position: Tensor,
    softmax_scale: float,
    sliding_window: int | None,
) -> list[Partial]:
    """Partials over everything a cache holds; `position` int32 [B, T] is where each query stands."""

    def visible(token: Tensor) -> Tensor:  # [B, S] positions, -1 for none -> [B, T, S]
        mask = (token >= 0)[:, None] & (token[:, None] <= position[:, :, None])
        if sliding_window is not None:
            mask &= position[:, :, None] - token[:, None] < sliding_window
        return mask

    if isinstance(cache, DenseCache):
        slots = cache.key.shape[1]
        newest = cache.lengths[:, None] - 1
        token = newest - (newest - torch.arange(slots, device=newest.device)) % slots
        return [_rows(queries, cache.key, cache.value, visible(token), softmax_scale)]

    token = window_positions(cache).flatten(1)

    def flat(window: Tensor) -> Tensor:  # -> [B, slots * 64, K, D]
        return window[cache.window_table].transpose(2, 3).flatten(1, 2)

    window = _rows(queries, flat(cache.window_key), flat(cache.window_value), visible(token), softmax_scale)
    return [_history(queries, cache, rotation, visible, softmax_scale), window]


def _history(
    queries: Tensor, cache: LayerCache, rotation: Any, visible: Callable, softmax_scale: float
) -> Partial:
    """Partial over the INT2 pages of every sequence."""
    table = cache.page_table
    pages = torch.arange(table.shape[1], device=table.device)
    live = pages < cache.history_pages[:, None]  # [B, pages]
    token = cache.config.sink_tokens + pages[:, None] * PAGE + torch.arange(PAGE, device=table.device)
    token = torch.where(live[:, :, None], token, -1)  # [B, pages, 64]
    mask = visible(token.flatten(1))  # [B, T, S]

    rotated = _per_head(queries, rotation.query_transform)
    codes = unpack_key_codes(cache.key_codes[table]).float() - 1.5  # [B, pages, K, 64, D]
    key_scale = cache.key_scale[table].float()  # [B, pages, K, 64]
    page_mean = cache.key_page_mean[table].float()  # [B, pages, K, D]
    scores = torch.einsum("btkgd,bpksd->btkgps", rotated, codes)
    scores = scores * key_scale.transpose(1, 2)[:, None, :, None]
    scores = scores + torch.einsum("btkgd,bpkd->btkgp", queries, page_mean)[..., None]
    weights, lse = _softmax(scores.flatten(4) * softmax_scale, mask)

    weights = weights.reshape(scores.shape)
    # Pages that are not part of the sequence may hold anything; 0 * NaN must not reach the output.
    value_scale = torch.where(live[:, :, None, None], cache.value_scale[table], 0).float()
    value_scale = value_scale.transpose(1, 2)[:, None, :, None]
    codes = unpack_value_codes(cache.value_codes[table]).float() - 1.5
    out = torch.einsum("btkgps,bpksd->btkgd", weights * value_scale, codes)
    out = _per_head(out, rotation.output_transform)
    total = weights.sum(dim=(-2, -1))[..., None]
    return Partial(out + total * rotation.value_mean.float()[:, None], lse)


def _rows(queries: Tensor, key: Tensor, value: Tensor, mask: Tensor, softmax_scale: float) -> Partial:
    """Partial over plain rows: key, value [B, S, K, D], mask [B, T, S]."""
    # A masked row may hold anything, NaN included; zero it so that 0 * NaN cannot leak into the output.
    seen = mask.any(dim=1)[..., None, None]
    key = torch.where(seen, key, 0).float()
    value = torch.where(seen, value, 0).float()
    scores = torch.einsum("btkgd,bskd->btkgs", queries, key) * softmax_scale
    weights, lse = _softmax(scores, mask)
    return Partial(torch.einsum("btkgs,bskd->btkgd", weights, value), lse)


def _softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last axis of [B, T, K, G, S] under mask [B, T, S]; zeros where nothing is visible."""
    scores = scores.masked_fill(~mask[:, :, None, None], -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - torch.where(torch.isfinite(top), top, 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    lse = (top + torch.log(total))[..., 0]
    return weights / torch.where(total > 0, total, 1.0), lse


def _per_head(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [B, T, K, G, D] @ matrix [K or 1, D, D]."""
    if matrix.shape[0] == 1:
        return rows @ matrix[0]
    return torch.einsum("btkgd,kde->btkge", rows, matrix)


def _finish(partials: list[Partial], sink_logits: Tensor | None) -> Tensor:
    """Merges the segments, applies the sink logits, and restores [B, T, N, D]."""
    merged = merge_partials(partials)
    out = merged.out
    if sink_logits is not None:
        logits = sink_logits.float().reshape(out.shape[2:4])
        out = out * torch.sigmoid(merged.lse - logits)[..., None]
    return out.flatten(2, 3)
