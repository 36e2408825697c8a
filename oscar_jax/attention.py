"""Float32 reference attention over sink | INT2 | recent, for one token and for a chunk of queries.

Queries read the INT2 pages in the rotated basis: with q' = q @ query_transform, the score of a quantized
token is scale * (q' . code - 1.5 * sum(q')) + q . page_mean, and the weighted sum of value codes is rotated
back once, at the end. Every segment yields a normalized output and the log-sum-exp of its scores; segments
are merged by log-sum-exp. `docs/int2-format.md`, section 5.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .core import cache_format as fmt
from .core.errors import ShapeError
from .layer_cache import DenseCache, LayerCache
from .packing import unpack_key_codes, unpack_value_codes

PAGE = fmt.PAGE_TOKENS
_HIGHEST = lax.Precision.HIGHEST


class Partial(NamedTuple):
    """Attention over one segment: normalized output and log-sum-exp of the scores (-inf where empty)."""

    out: jax.Array  # float32 [B, T, K, G, D]
    lse: jax.Array  # float32 [B, T, K, G]


def decode_attention(
    query: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: Any,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; `softmax_scale` multiplies the scores (usually D**-0.5). A window of
    w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    sequence of length 0 yields zeros. Raises ShapeError.
    """
    queries = _grouped(query[:, None], cache)
    position = (cache.lengths - 1)[:, None]
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window)
    return _finish(partials, sink_logits)[:, 0]


def chunk_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: Any,
    *,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]. `cache` is the state before the
    chunk; token j of sequence b stands at position lengths[b] + j. Rows at or past new_lengths[b] are
    padding: nothing attends to them and their output means nothing. Raises ShapeError.
    """
    queries = _grouped(query, cache)
    step = jnp.arange(query.shape[1])
    position = cache.lengths[:, None] + step
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window)
    mask = (step[None, :, None] >= step) & (step < new_lengths[:, None, None])  # [B, T, T]
    if sliding_window is not None:
        mask &= step[None, :, None] - step < sliding_window
    partials.append(_rows(queries, key, value, mask, softmax_scale))
    return _finish(partials, sink_logits)


def merge_partials(partials: list[Partial]) -> Partial:
    """Merges segments by log-sum-exp: softmax over the union of their scores."""
    lse = jnp.stack([p.lse for p in partials])
    top = lse.max(axis=0)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weight.sum(axis=0)
    weight = weight / jnp.where(total > 0, total, 1.0)
    out = sum(p.out * w[..., None] for p, w in zip(partials, weight))
    return Partial(jnp.asarray(out), top + jnp.log(total))


def window_positions(cache: LayerCache) -> jax.Array:
    """Token position of every row of the window slots, int32 [B, slots, 64]; -1 where nothing is stored."""
    config = cache.config
    slot = jnp.arange(config.window_slots)
    ring = (slot - config.sink_pages - cache.history_pages[:, None]) % config.recent_slots
    page = jnp.where(slot < config.sink_pages, slot, config.sink_pages + cache.history_pages[:, None] + ring)
    token = page[:, :, None] * PAGE + jnp.arange(PAGE)
    return jnp.where(token < cache.lengths[:, None, None], token, -1)


def _grouped(query: jax.Array, cache: LayerCache | DenseCache) -> jax.Array:
    """[B, T, N, D] -> float32 [B, T, K, G, D]."""
    if isinstance(cache, DenseCache):
        heads, head_dim = cache.key.shape[2:]
    else:
        heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    batch, tokens, query_heads = query.shape[:3]
    if batch != cache.batch or query.shape[3] != head_dim or query_heads % heads:
        raise ShapeError(f"query {query.shape}, expected [{cache.batch}, T, G * {heads}, {head_dim}]")
    return query.astype(jnp.float32).reshape(batch, tokens, heads, -1, head_dim)


def _stored(
    queries: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: Any,
    position: jax.Array,
    softmax_scale: float,
    sliding_window: int | None,
) -> list[Partial]:
    """Partials over everything a cache holds; `position` int32 [B, T] is where each query stands."""

    def visible(token: jax.Array) -> jax.Array:  # [B, S] positions, -1 for none -> [B, T, S]
        mask = (token >= 0)[:, None] & (token[:, None] <= position[:, :, None])
        if sliding_window is not None:
            mask &= position[:, :, None] - token[:, None] < sliding_window
        return mask

    if isinstance(cache, DenseCache):
        slots = cache.key.shape[1]
        newest = cache.lengths[:, None] - 1
        token = newest - (newest - jnp.arange(slots)) % slots
        return [_rows(queries, cache.key, cache.value, visible(token), softmax_scale)]

    token = window_positions(cache)

    def flat(window: jax.Array) -> jax.Array:  # -> [B, slots * 64, K, D]
        rows = window[cache.window_table].swapaxes(2, 3)
        return rows.reshape(cache.batch, -1, *rows.shape[3:])

    window_rows = flat(cache.window_key), flat(cache.window_value)
    window = _rows(queries, *window_rows, visible(token.reshape(cache.batch, -1)), softmax_scale)
    return [_history(queries, cache, rotation, visible, softmax_scale), window]


def _history(
    queries: jax.Array, cache: LayerCache, rotation: Any, visible: Any, softmax_scale: float
) -> Partial:
    """Partial over the INT2 pages of every sequence."""
    table = cache.page_table
    pages = jnp.arange(table.shape[1])
    token = cache.config.sink_tokens + pages[:, None] * PAGE + jnp.arange(PAGE)
    token = jnp.where((pages < cache.history_pages[:, None])[:, :, None], token, -1)  # [B, pages, 64]
    mask = visible(token.reshape(cache.batch, -1))  # [B, T, S]

    rotated = _per_head(queries, rotation.query_transform)
    codes = unpack_key_codes(cache.key_codes[table]).astype(jnp.float32) - 1.5  # [B, pages, K, 64, D]
    key_scale = cache.key_scale[table].astype(jnp.float32)  # [B, pages, K, 64]
    page_mean = cache.key_page_mean[table].astype(jnp.float32)  # [B, pages, K, D]
    scores = jnp.einsum("btkgd,bpksd->btkgps", rotated, codes, precision=_HIGHEST)
    scores = scores * key_scale.swapaxes(1, 2)[:, None, :, None]
    scores += jnp.einsum("btkgd,bpkd->btkgp", queries, page_mean, precision=_HIGHEST)[..., None]
    weights, lse = _softmax(scores.reshape(*scores.shape[:4], -1) * softmax_scale, mask)

    weights = weights.reshape(scores.shape)
    # Pages that are not part of the sequence may hold anything; 0 * NaN must not reach the output.
    live = (pages < cache.history_pages[:, None])[:, :, None, None]
    value_scale = jnp.where(live, cache.value_scale[table], 0).astype(jnp.float32)
    value_scale = value_scale.swapaxes(1, 2)[:, None, :, None]
    codes = unpack_value_codes(cache.value_codes[table]).astype(jnp.float32) - 1.5
    out = jnp.einsum("btkgps,bpksd->btkgd", weights * value_scale, codes, precision=_HIGHEST)
    out = _per_head(out, rotation.output_transform)
    total = weights.sum(axis=(-2, -1))[..., None]
    return Partial(out + total * rotation.value_mean.astype(jnp.float32)[:, None], lse)


def _rows(
    queries: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, softmax_scale: float
) -> Partial:
    """Partial over plain rows: key, value [B, S, K, D], mask [B, T, S]."""
    # A masked row may hold anything, NaN included; zero it so that 0 * NaN cannot leak into the output.
    seen = mask.any(axis=1)[..., None, None]
    key = jnp.where(seen, key, 0).astype(jnp.float32)
    value = jnp.where(seen, value, 0).astype(jnp.float32)
    scores = jnp.einsum("btkgd,bskd->btkgs", queries, key, precision=_HIGHEST) * softmax_scale
    weights, lse = _softmax(scores, mask)
    return Partial(jnp.einsum("btkgs,bskd->btkgd", weights, value, precision=_HIGHEST), lse)


def _softmax(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis of [B, T, K, G, S] under mask [B, T, S]; zeros where nothing is visible."""
    scores = jnp.where(mask[:, :, None, None], scores, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    lse = (top + jnp.log(total))[..., 0]
    return weights / jnp.where(total > 0, total, 1.0), lse


def _per_head(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """rows [B, T, K, G, D] @ matrix [K or 1, D, D]."""
    if matrix.shape[0] == 1:
        return jnp.matmul(rows, matrix[0], precision=_HIGHEST)
    return jnp.einsum("btkgd,kde->btkge", rows, matrix, precision=_HIGHEST)


def _finish(partials: list[Partial], sink_logits: jax.Array | None) -> jax.Array:
    """Merges the segments, applies the sink logits, and restores [B, T, N, D]."""
    merged = merge_partials(partials)
    out = merged.out
    if sink_logits is not None:
        logits = sink_logits.astype(jnp.float32).reshape(out.shape[2:4])
        out = out * jax.nn.sigmoid(merged.lse - logits)[..., None]
    batch, tokens, heads, group, head_dim = out.shape
    return out.reshape(batch, tokens, heads * group, head_dim)
