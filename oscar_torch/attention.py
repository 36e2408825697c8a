"""Float32 reference attention over sink | INT2 | recent, for one token and for a chunk of queries.

Queries read the INT2 pages in the rotated basis: with q' = q @ query_transform, the score of a quantized
token is scale * (q' . code - 1.5 * sum(q')) + q . page_mean, and the weighted sum of value codes is rotated
back once, at the end. Every segment yields a normalized output and the log-sum-exp of its scores; segments
are merged by log-sum-exp. `docs/int2-format.md`, section 5.

History and long runs of rows are read in blocks, with an online softmax: what is allocated beside the result
is O(T * block * heads), whatever the history or the capacity, and the time follows the longest sequence.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .arithmetic import exact_arithmetic, refuse_gradients
from .core import cache_format as fmt
from .layer_cache import (
    DenseCache,
    LayerCache,
    RotationArrays,
    check_chunk,
    check_query,
    outgrown,
)
from .packing import unpack_key_codes, unpack_value_codes

PAGE = fmt.PAGE_TOKENS
BLOCK_PAGES = 8  # pages, or as many rows, that are unpacked and scored at a time


class Partial(NamedTuple):
    """Attention over one segment: normalized output and log-sum-exp of the scores (-inf where empty)."""

    out: Tensor  # float32 [B, T, K, G, D]
    lse: Tensor  # float32 [B, T, K, G]


@exact_arithmetic
def decode_attention(
    query: Tensor,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; `softmax_scale` multiplies the scores (usually D**-0.5). A window of
    w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    softcap of c turns each scaled score x into c * tanh(x / c). A sequence of length 0 yields zeros, one that
    has `overflowed` NaN. Raises ShapeError, DTypeError, ConfigError, GradientError (INT2 only).
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    if isinstance(cache, LayerCache):
        refuse_gradients("decode_attention", (query, rotation, sink_logits))
    queries = _grouped(query[:, None], cache)
    position = (cache.lengths - 1)[:, None]
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window, softcap)
    return _finish(partials, sink_logits, outgrown(cache))[:, 0]


@exact_arithmetic
def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    new_lengths: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]. `cache` is the state before the
    chunk; token j of sequence b stands at position lengths[b] + j. Rows at or past new_lengths[b] are
    padding: nothing attends to them and their output means nothing. Raises ShapeError, DTypeError,
    ConfigError, GradientError (INT2 only).
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    check_chunk(query, key, value, cache, new_lengths)
    if isinstance(cache, LayerCache):
        refuse_gradients("chunk_attention", (query, key, value, rotation, sink_logits))
    queries = _grouped(query, cache)
    step = torch.arange(query.shape[1], device=query.device)
    position = cache.lengths[:, None] + step
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window, softcap)

    def mask(rows: Tensor) -> Tensor:  # indices [S] -> [B, T, S]
        seen = (step[None, :, None] >= rows) & (rows < new_lengths[:, None, None])
        return seen if sliding_window is None else seen & (step[None, :, None] - rows < sliding_window)

    partials.append(_blocks(queries, key, value, mask, new_lengths.max(), softmax_scale, softcap))
    return _finish(partials, sink_logits, outgrown(cache, new_lengths, query.shape[1]))


@exact_arithmetic
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


def cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores bent so that none exceeds the cap in size; None leaves them as they are."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


@exact_arithmetic
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
    batch, tokens, _, head_dim = query.shape
    return query.float().reshape(batch, tokens, cache.heads, -1, head_dim)


def _stored(
    queries: Tensor,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    position: Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
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

        def mask(rows: Tensor) -> Tensor:
            return visible(newest - (newest - rows) % slots)

        used = cache.lengths.max()
        return [_blocks(queries, cache.key, cache.value, mask, used, softmax_scale, softcap)]

    assert rotation is not None
    token = window_positions(cache).flatten(1)

    def flat(window: Tensor) -> Tensor:  # -> [B, slots * 64, K, D]
        return window[cache.window_table].transpose(2, 3).flatten(1, 2)

    window_rows = flat(cache.window_key), flat(cache.window_value)
    window = _rows(queries, *window_rows, visible(token), softmax_scale, softcap)
    first = None if sliding_window is None else position.min() - sliding_window + 1 - cache.config.sink_tokens
    return [_history(queries, cache, rotation, visible, first, softmax_scale, softcap), window]


class _Running(NamedTuple):
    """An online softmax: the sums so far, relative to exp(top)."""

    top: Tensor  # float32 [B, T, K, G, 1], -inf where nothing was visible
    total: Tensor  # float32 [B, T, K, G, 1]
    out: Tensor  # float32 [B, T, K, G, D]


def _history(
    queries: Tensor,
    cache: LayerCache,
    rotation: RotationArrays,
    visible: Callable[[Tensor], Tensor],
    first: Tensor | None,
    softmax_scale: float,
    softcap: float | None,
) -> Partial:
    """Partial over the INT2 pages of every sequence; no query sees tokens of the history before `first`."""
    device, columns = queries.device, cache.page_table.shape[1]
    rotated = _per_head(queries, rotation.query_transform)
    running = _nothing(rotated)
    stop = min(columns, _number(cache.history_pages.max(), columns))
    start = 0 if first is None else max(0, _number(first, 0)) // (PAGE * BLOCK_PAGES) * BLOCK_PAGES
    for low in range(start, stop, BLOCK_PAGES):
        pages = torch.arange(low, min(low + BLOCK_PAGES, stop), device=device)
        live = pages < cache.history_pages[:, None]  # [B, pages]
        token = cache.config.sink_tokens + pages[:, None] * PAGE + torch.arange(PAGE, device=device)
        mask = visible(torch.where(live[:, :, None], token, -1).flatten(1))  # [B, T, S]
        table = cache.page_table[:, low : low + len(pages)]
        codes = unpack_key_codes(cache.key_codes[table]).float() - 1.5  # [B, pages, K, 64, D]
        key_scale = cache.key_scale[table].float()  # [B, pages, K, 64]
        page_mean = cache.key_page_mean[table].float()  # [B, pages, K, D]
        scores = torch.einsum("btkgd,bpksd->btkgps", rotated, codes)
        scores = scores * key_scale.transpose(1, 2)[:, None, :, None]
        scores = scores + torch.einsum("btkgd,bpkd->btkgp", queries, page_mean)[..., None]
        weights, running = _advance(running, cap_scores(scores.flatten(4) * softmax_scale, softcap), mask)
        # Pages that are not part of the sequence may hold anything; 0 * NaN must not reach the output.
        value_scale = torch.where(live[:, :, None, None], cache.value_scale[table], 0).float()
        weights = weights.reshape(scores.shape) * value_scale.transpose(1, 2)[:, None, :, None]
        codes = unpack_value_codes(cache.value_codes[table]).float() - 1.5
        out = torch.einsum("btkgps,bpksd->btkgd", weights, codes)
        running = running._replace(out=running.out + out)
    out, lse = _settle(running)
    out = _per_head(out, rotation.output_transform)
    return Partial(out + (running.total > 0) * rotation.value_mean.float()[:, None], lse)


def _blocks(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Callable[[Tensor], Tensor],
    used: Tensor,
    softmax_scale: float,
    softcap: float | None,
) -> Partial:
    """Partial over the first `used` rows of key, value [B, S, K, D]; mask: row indices -> [B, T, rows]."""
    rows, size = key.shape[1], BLOCK_PAGES * PAGE
    if rows <= size:
        seen = mask(torch.arange(rows, device=key.device))
        return _rows(queries, key, value, seen, softmax_scale, softcap)
    running = _nothing(queries)
    for low in range(0, min(rows, _number(used, rows)), size):
        high = min(low + size, rows)
        seen = mask(torch.arange(low, high, device=key.device))
        block_key, block_value = (_seen_rows(x[:, low:high], seen) for x in (key, value))
        scores = torch.einsum("btkgd,bskd->btkgs", queries, block_key) * softmax_scale
        weights, running = _advance(running, cap_scores(scores, softcap), seen)
        out = torch.einsum("btkgs,bskd->btkgd", weights, block_value)
        running = running._replace(out=running.out + out)
    return Partial(*_settle(running))


def _number(count: Tensor, otherwise: int) -> int:
    """The value of a count; the other one while a CUDA graph is captured, which cannot wait for values."""
    if count.is_cuda and torch.cuda.is_current_stream_capturing():
        return otherwise
    return int(count)


def _nothing(like: Tensor) -> _Running:
    """The running sums before the first block; `like` [B, T, K, G, D] has the output's shape."""
    zeros = torch.zeros_like(like)
    return _Running(torch.full_like(zeros[..., :1], -torch.inf), zeros[..., :1], zeros)


def _advance(running: _Running, scores: Tensor, mask: Tensor) -> tuple[Tensor, _Running]:
    """Weights of scores [B, T, K, G, S] under mask [B, T, S], and the sums so far rescaled to them."""
    scores = scores.masked_fill(~mask[:, :, None, None], -torch.inf)
    top = torch.maximum(running.top, scores.amax(dim=-1, keepdim=True))
    finite = torch.where(torch.isfinite(top), top, 0.0)
    weights = torch.exp(scores - finite)
    down = torch.exp(running.top - finite)
    total = running.total * down + weights.sum(dim=-1, keepdim=True)
    return weights, _Running(top, total, running.out * down)


def _settle(running: _Running) -> tuple[Tensor, Tensor]:
    """Normalized output and log-sum-exp."""
    total = running.total
    # Not `total > 0`: a NaN must stay one.
    return running.out / torch.where(total == 0, 1.0, total), (running.top + torch.log(total))[..., 0]


def _rows(
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    softmax_scale: float,
    softcap: float | None = None,
) -> Partial:
    """Partial over plain rows: key, value [B, S, K, D], mask [B, T, S]."""
    key, value = _seen_rows(key, mask), _seen_rows(value, mask)
    scores = torch.einsum("btkgd,bskd->btkgs", queries, key) * softmax_scale
    weights, lse = _softmax(cap_scores(scores, softcap), mask)
    return Partial(torch.einsum("btkgs,bskd->btkgd", weights, value), lse)


def _seen_rows(rows: Tensor, mask: Tensor) -> Tensor:
    """Rows [B, S, K, D] as float32; one that nobody sees may hold anything, and 0 * NaN must not leak."""
    return torch.where(mask.any(dim=1)[..., None, None], rows, 0).float()


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


def _finish(partials: list[Partial], sink_logits: Tensor | None, lost: Tensor) -> Tensor:
    """Merges the segments, applies the sink logits, and restores [B, T, N, D]; NaN where `lost` bool [B]."""
    merged = merge_partials(partials)
    out = merged.out
    if sink_logits is not None:
        logits = sink_logits.float().reshape(out.shape[2:4])
        out = out * torch.sigmoid(merged.lse - logits)[..., None]
    return torch.where(lost[:, None, None, None], torch.nan, out.flatten(2, 3))
