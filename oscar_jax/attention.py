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

import jax
import jax.numpy as jnp
from jax import lax

from .arithmetic import compiled_once, exact_arithmetic, refuse_gradients
from .core import cache_format as fmt
from .layer_cache import (
    Array,
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
_HIGHEST = lax.Precision.HIGHEST


class Partial(NamedTuple):
    """Attention over one segment: normalized output and log-sum-exp of the scores (-inf where empty)."""

    out: jax.Array  # float32 [B, T, K, G, D]
    lse: jax.Array  # float32 [B, T, K, G]


@exact_arithmetic
def decode_attention(
    query: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of the newest token of every sequence over all that is stored, itself included.

    query [B, N, D] -> float32 [B, N, D]; `softmax_scale` multiplies the scores (usually D**-0.5). A window of
    w lets a token see the last w tokens. sink_logits [N] adds exp(logit) to the softmax denominator. A
    softcap of c turns each scaled score x into c * tanh(x / c). A sequence of length 0 yields zeros, one that
    has `overflowed` NaN. Raises ShapeError, DTypeError, ConfigError, GradientError (INT2 only).
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    return _decode(query, cache, rotation, softmax_scale, sliding_window, sink_logits, softcap)


@compiled_once
def _decode(
    query: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    if isinstance(cache, LayerCache):
        query, cache, rotation, sink_logits = refuse_gradients(
            "decode_attention", (query, cache, rotation, sink_logits)
        )
    queries = _grouped(query[:, None], cache)
    position = (cache.lengths - 1)[:, None]
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window, softcap)
    return _finish(partials, sink_logits, outgrown(cache))[:, 0]


@exact_arithmetic
def chunk_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]. `cache` is the state before the
    chunk; token j of sequence b stands at position lengths[b] + j. Rows at or past new_lengths[b] are
    padding: nothing attends to them and their output means nothing. Raises ShapeError, DTypeError,
    ConfigError, GradientError (INT2 only).
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    check_chunk(query, key, value, cache, new_lengths)
    return _chunk(
        query, key, value, cache, rotation, new_lengths, softmax_scale, sliding_window, sink_logits, softcap
    )


@compiled_once
def _chunk(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    if isinstance(cache, LayerCache):
        query, key, value, cache, rotation, sink_logits = refuse_gradients(
            "chunk_attention", (query, key, value, cache, rotation, sink_logits)
        )
    queries = _grouped(query, cache)
    step = jnp.arange(query.shape[1])
    position = cache.lengths[:, None] + step
    partials = _stored(queries, cache, rotation, position, softmax_scale, sliding_window, softcap)

    def mask(rows: jax.Array) -> jax.Array:  # indices [S] -> [B, T, S]
        seen = (step[None, :, None] >= rows) & (rows < new_lengths[:, None, None])
        return seen if sliding_window is None else seen & (step[None, :, None] - rows < sliding_window)

    partials.append(_blocks(queries, key, value, mask, new_lengths.max(), softmax_scale, softcap))
    return _finish(partials, sink_logits, outgrown(cache, new_lengths, query.shape[1]))


@exact_arithmetic
def merge_partials(partials: list[Partial]) -> Partial:
    """Merges segments by log-sum-exp: softmax over the union of their scores."""
    lse = jnp.stack([p.lse for p in partials])
    top = lse.max(axis=0)
    weight = jnp.exp(lse - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weight.sum(axis=0)
    weight = weight / jnp.where(total > 0, total, 1.0)
    out = sum(p.out * w[..., None] for p, w in zip(partials, weight))
    return Partial(jnp.asarray(out), top + jnp.log(total))


def cap_scores(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Scores bent so that none exceeds the cap in size; None leaves them as they are."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


@exact_arithmetic
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
    batch, tokens, _, head_dim = query.shape
    return query.astype(jnp.float32).reshape(batch, tokens, cache.heads, -1, head_dim)


def _stored(
    queries: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    position: jax.Array,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None,
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

        def mask(rows: jax.Array) -> jax.Array:
            token = newest - (newest - rows) % slots
            return visible(jnp.where(rows < slots, token, -1))

        used = jnp.minimum(cache.lengths.max(), slots)
        return [_blocks(queries, cache.key, cache.value, mask, used, softmax_scale, softcap)]

    assert rotation is not None
    token = window_positions(cache)

    def flat(window: jax.Array) -> jax.Array:  # -> [B, slots * 64, K, D]
        rows = window[cache.window_table].swapaxes(2, 3)
        return rows.reshape(cache.batch, -1, *rows.shape[3:])

    window_rows = flat(cache.window_key), flat(cache.window_value)
    seen = visible(token.reshape(cache.batch, -1))
    window = _rows(queries, *window_rows, seen, softmax_scale, softcap)
    first = 0 if sliding_window is None else position.min() - sliding_window + 1 - cache.config.sink_tokens
    return [_history(queries, cache, rotation, visible, first, softmax_scale, softcap), window]


class _Running(NamedTuple):
    """An online softmax: the sums so far, relative to exp(top)."""

    top: jax.Array  # float32 [B, T, K, G, 1], -inf where nothing was visible
    total: jax.Array  # float32 [B, T, K, G, 1]
    out: jax.Array  # float32 [B, T, K, G, D]


def _history(
    queries: jax.Array,
    cache: LayerCache,
    rotation: RotationArrays,
    visible: Callable[[jax.Array], jax.Array],
    first: jax.Array | int,
    softmax_scale: float,
    softcap: float | None,
) -> Partial:
    """Partial over the INT2 pages of every sequence; no query sees tokens of the history before `first`."""
    columns = cache.page_table.shape[1]
    size = min(BLOCK_PAGES, columns)
    rotated = _per_head(queries, rotation.query_transform)

    def block(index: jax.Array, running: _Running) -> _Running:
        pages = index * size + jnp.arange(size)
        live = pages < cache.history_pages[:, None]  # [B, pages]
        token = cache.config.sink_tokens + pages[:, None] * PAGE + jnp.arange(PAGE)
        mask = visible(jnp.where(live[:, :, None], token, -1).reshape(cache.batch, -1))  # [B, T, S]
        table = cache.page_table[:, jnp.minimum(pages, columns - 1)]
        codes = unpack_key_codes(cache.key_codes[table]).astype(jnp.float32) - 1.5  # [B, pages, K, 64, D]
        key_scale = cache.key_scale[table].astype(jnp.float32)  # [B, pages, K, 64]
        page_mean = cache.key_page_mean[table].astype(jnp.float32)  # [B, pages, K, D]
        scores = jnp.einsum("btkgd,bpksd->btkgps", rotated, codes, precision=_HIGHEST)
        scores = scores * key_scale.swapaxes(1, 2)[:, None, :, None]
        scores += jnp.einsum("btkgd,bpkd->btkgp", queries, page_mean, precision=_HIGHEST)[..., None]
        scaled = cap_scores(scores.reshape(*scores.shape[:4], -1) * softmax_scale, softcap)
        weights, running = _advance(running, scaled, mask)
        # Pages that are not part of the sequence may hold anything; 0 * NaN must not reach the output.
        value_scale = jnp.where(live[:, :, None, None], cache.value_scale[table], 0).astype(jnp.float32)
        weights = weights.reshape(scores.shape) * value_scale.swapaxes(1, 2)[:, None, :, None]
        codes = unpack_value_codes(cache.value_codes[table]).astype(jnp.float32) - 1.5
        out = jnp.einsum("btkgps,bpksd->btkgd", weights, codes, precision=_HIGHEST)
        return running._replace(out=running.out + out)

    start = jnp.maximum(first, 0) // (PAGE * size)
    running = _scan(block, start, -(-cache.history_pages.max() // size), -(-columns // size), rotated)
    out, lse = _settle(running)
    total = (running.total > 0).astype(jnp.float32)
    out = _per_head(out, rotation.output_transform)
    return Partial(out + total * rotation.value_mean.astype(jnp.float32)[:, None], lse)


def _blocks(
    queries: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Callable[[jax.Array], jax.Array],
    used: jax.Array,
    softmax_scale: float,
    softcap: float | None,
) -> Partial:
    """Partial over the first `used` rows of key, value [B, S, K, D]; mask: row indices -> [B, T, rows]."""
    rows = key.shape[1]
    size = BLOCK_PAGES * PAGE
    if rows <= size:
        return _rows(queries, key, value, mask(jnp.arange(rows)), softmax_scale, softcap)

    def block(index: jax.Array, running: _Running) -> _Running:
        row = index * size + jnp.arange(size)
        column = jnp.minimum(row, rows - 1)
        seen = mask(row) & (row < rows)
        block_key, block_value = (_seen_rows(x[:, column], seen) for x in (key, value))
        scores = jnp.einsum("btkgd,bskd->btkgs", queries, block_key, precision=_HIGHEST) * softmax_scale
        weights, running = _advance(running, cap_scores(scores, softcap), seen)
        out = jnp.einsum("btkgs,bskd->btkgd", weights, block_value, precision=_HIGHEST)
        return running._replace(out=running.out + out)

    return Partial(*_settle(_scan(block, 0, -(-used // size), -(-rows // size), queries)))


def _scan(
    block: Callable[[jax.Array, _Running], _Running],
    start: jax.Array | int,
    stop: jax.Array,
    count: int,
    like: jax.Array,
) -> _Running:
    """Runs blocks start .. stop - 1 of `count`; the others cost nothing; `like` has the output's shape.

    A scan with a condition, not a while loop: it has a gradient, which a DenseCache gives.
    """
    out = jnp.where(like > 0, 0.0, 0.0).astype(like.dtype)  # zeros, sharded as what the blocks add
    running = _Running(out[..., :1] - jnp.inf, out[..., :1], out)

    def step(running: _Running, index: jax.Array) -> tuple[_Running, None]:
        due = (index >= start) & (index < stop)
        return lax.cond(due, block, lambda _, running: running, index, running), None

    return lax.scan(step, running, jnp.arange(count))[0]


def _advance(running: _Running, scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, _Running]:
    """Weights of scores [B, T, K, G, S] under mask [B, T, S], and the sums so far rescaled to them."""
    scores = jnp.where(mask[:, :, None, None], scores, -jnp.inf)
    top = jnp.maximum(running.top, scores.max(axis=-1, keepdims=True))
    finite = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - finite)
    down = jnp.exp(running.top - finite)
    total = running.total * down + weights.sum(axis=-1, keepdims=True)
    return weights, _Running(top, total, running.out * down)


def _settle(running: _Running) -> tuple[jax.Array, jax.Array]:
    """Normalized output and log-sum-exp."""
    total = running.total
    # Not `total > 0`: a NaN must stay one.
    return running.out / jnp.where(total == 0, 1.0, total), (running.top + jnp.log(total))[..., 0]


def _rows(
    queries: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    softmax_scale: float,
    softcap: float | None = None,
) -> Partial:
    """Partial over plain rows: key, value [B, S, K, D], mask [B, T, S]."""
    key, value = _seen_rows(key, mask), _seen_rows(value, mask)
    scores = jnp.einsum("btkgd,bskd->btkgs", queries, key, precision=_HIGHEST) * softmax_scale
    weights, lse = _softmax(cap_scores(scores, softcap), mask)
    return Partial(jnp.einsum("btkgs,bskd->btkgd", weights, value, precision=_HIGHEST), lse)


def _seen_rows(rows: jax.Array, mask: jax.Array) -> jax.Array:
    """Rows [B, S, K, D] as float32; one that nobody sees may hold anything, and 0 * NaN must not leak."""
    return jnp.where(mask.any(axis=1)[..., None, None], rows, 0).astype(jnp.float32)


def _softmax(scores: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the last axis of [B, T, K, G, S] under mask [B, T, S]; zeros where nothing is visible."""
    scores = jnp.where(mask[:, :, None, None], scores, -jnp.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    lse = (top + jnp.log(total))[..., 0]
    return weights / jnp.where(total > 0, total, 1.0), lse


def _per_head(rows: jax.Array, matrix: Array) -> jax.Array:
    """rows [B, T, K, G, D] @ matrix [K or 1, D, D]."""
    if matrix.shape[0] == 1:
        return jnp.matmul(rows, matrix[0], precision=_HIGHEST)
    return jnp.einsum("btkgd,kde->btkge", rows, matrix, precision=_HIGHEST)


def _finish(partials: list[Partial], sink_logits: jax.Array | None, lost: jax.Array) -> jax.Array:
    """Merges the segments, applies the sink logits, and restores [B, T, N, D]; NaN where `lost` bool [B]."""
    merged = merge_partials(partials)
    out = merged.out
    if sink_logits is not None:
        logits = sink_logits.astype(jnp.float32).reshape(out.shape[2:4])
        out = out * jax.nn.sigmoid(merged.lse - logits)[..., None]
    out = jnp.where(lost[:, None, None, None, None], jnp.nan, out)
    batch, tokens, heads, group, head_dim = out.shape
    return out.reshape(batch, tokens, heads * group, head_dim)
