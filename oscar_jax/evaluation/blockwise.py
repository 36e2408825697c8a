"""Attention in which every query reads the history as it would in decoding, whatever the length of the chunk.

What a query at position p reads depends on p alone: the cache then holds p + 1 tokens, of which exactly
`sink ... sink + 64 * history_pages(p + 1)` come from INT2 pages (or from whatever stands in for them) and all
others are exact. A chunk read through a cache sees less of that: its own rows stay exact for all of its
queries. So both kinds of rows are kept here, exact and restored, and each query chooses by its own position.
That is an exact shortcut for stepping token by token: the bytes of a page are a function of its 64 rows, so
the restored rows are those that a cache returns, whenever it has written the page.

Keys are read in blocks with a running softmax: memory does not grow with the length, and cost follows the
tokens stored, not the capacity. Everything is float32.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..attention import cap_scores
from ..core import cache_format as fmt
from ..core.config import CacheConfig

BLOCK = 512  # keys per step; capacities are multiples of it


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "restored_key", "restored_value"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class StoredRows:
    """What one layer keeps: exact rows bfloat16 [B, K, S, D], and restored ones float32 or None.

    S is a multiple of BLOCK; row s is token s of its sequence.
    """

    key: jax.Array
    value: jax.Array
    restored_key: jax.Array | None
    restored_value: jax.Array | None


class Partial(NamedTuple):
    """Attention over some rows: weighted sum and weights relative to exp(top), -inf where none is seen."""

    total: jax.Array  # float32 [B, K, G, T, D]
    mass: jax.Array  # float32 [B, K, G, T]
    top: jax.Array  # float32 [B, K, G, T]
    coded: jax.Array | None = None  # of `mass`, what lies on tokens of INT2 pages; None where nobody asked


def allocate_rows(config: CacheConfig, batch: int, tokens: int, *, restored: bool) -> StoredRows:
    """Zeros for `batch` sequences of up to `tokens` tokens."""
    capacity = -(-tokens // BLOCK) * BLOCK
    shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
    exact = [jnp.zeros(shape, jnp.bfloat16) for _ in range(2)]
    coded = [jnp.zeros(shape, jnp.float32) if restored else None for _ in range(2)]
    return StoredRows(*exact, *coded)


def write_rows(
    rows: StoredRows,
    start: jax.Array | int,
    key: jax.Array,
    value: jax.Array,
    restored: tuple[jax.Array, jax.Array] | None,
) -> StoredRows:
    """The rows with tokens start ... start + T - 1 of every sequence written; all [B, T, K, D]."""

    def written(store: jax.Array, new: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(store, new.swapaxes(1, 2).astype(store.dtype), (0, 0, start, 0))

    coded: tuple[jax.Array | None, jax.Array | None] = (None, None)
    if restored is not None and rows.restored_key is not None and rows.restored_value is not None:
        coded = (written(rows.restored_key, restored[0]), written(rows.restored_value, restored[1]))
    return StoredRows(written(rows.key, key), written(rows.value, value), *coded)


def group_queries(query: jax.Array, heads: int) -> jax.Array:
    """[B, T, N, D] -> float32 [B, K, G, T, D]: query head n belongs to key/value head n // G."""
    batch, tokens, query_heads, head_dim = query.shape
    grouped = query.astype(jnp.float32).reshape(batch, tokens, heads, query_heads // heads, head_dim)
    return grouped.transpose(0, 2, 3, 1, 4)


def merge(parts: list[Partial]) -> Partial:
    """Attention over the union of disjoint rows; `coded` is dropped."""
    top = jnp.stack([part.top for part in parts]).max(axis=0)
    shared = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = [jnp.exp(part.top - shared) for part in parts]
    total = sum((part.total * weight[..., None] for part, weight in zip(parts, weights)), jnp.zeros(()))
    mass = sum((part.mass * weight for part, weight in zip(parts, weights)), jnp.zeros(()))
    return Partial(total, mass, top)


def finish(parts: list[Partial], sink_logits: jax.Array | None = None) -> jax.Array:
    """Softmax over the union of what the parts saw: float32 [B, T, N, D].

    `sink_logits` float32 [N] are scores without a value, one per query head, that take part in it.
    """
    if sink_logits is not None:
        top = parts[0].top
        sinks = sink_logits.astype(jnp.float32).reshape(1, *top.shape[1:3], 1)
        ones = jnp.ones_like(top)
        parts = [*parts, Partial(jnp.zeros_like(parts[0].total), ones, ones * sinks)]
    whole = merge(parts)
    out = whole.total / jnp.maximum(whole.mass, 1e-30)[..., None]
    batch, heads, group, tokens, head_dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, heads * group, head_dim)


def coded_share(part: Partial, sink_logits: jax.Array | None = None) -> jax.Array:
    """Of all attention of each query, what it gives to tokens of INT2 pages: float32 [B, T, N] in 0 ... 1.

    `part` is all that the queries see, measured; `sink_logits` as in `finish`.
    """
    assert part.coded is not None
    mass = part.mass
    if sink_logits is not None:
        sinks = sink_logits.astype(jnp.float32).reshape(1, *part.top.shape[1:3], 1)
        mass = mass + jnp.exp(sinks - part.top)
    share = part.coded / jnp.maximum(mass, 1e-30)
    batch, heads, group, tokens = share.shape
    return share.transpose(0, 3, 1, 2).reshape(batch, tokens, heads * group)


def coded_end(positions: jax.Array, config: CacheConfig) -> jax.Array:
    """The first token after the INT2 pages that a query at each position reads, int32 as `positions`."""
    pages = (positions + 1 - config.sink_tokens - config.recent_tokens) // fmt.PAGE_TOKENS
    return config.sink_tokens + fmt.PAGE_TOKENS * jnp.maximum(0, pages)


def attend_rows(
    query: jax.Array,
    rows: StoredRows,
    positions: jax.Array,
    stored: jax.Array | int,
    *,
    config: CacheConfig,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
    measure_coded: bool = False,
) -> Partial:
    """Attention over the first `stored` tokens, each query reading INT2 where it would in decoding.

    query [B, T, N, D] at positions int32 [T] of every sequence; query and key must not be NaN. Without
    restored rows everything is exact. With a sliding window of w a query sees the last w tokens.
    `measure_coded` fills in `Partial.coded`, of rows without restored ones.
    """
    queries = group_queries(query, rows.key.shape[1]) * softmax_scale
    batch, heads, group, tokens, head_dim = queries.shape
    end = coded_end(positions, config)
    always = end.min()  # up to here the history is INT2 for every query
    least, most = positions.min(), jnp.minimum(positions.max() + 1, stored)
    oldest = jnp.maximum(0, least - sliding_window + 1) if sliding_window is not None else 0

    def block_of(store: jax.Array, index: jax.Array) -> jax.Array:
        block = lax.dynamic_slice_in_dim(store, index * BLOCK, BLOCK, axis=2)
        return block.astype(jnp.float32)

    def accumulate(
        carry: Partial, key: jax.Array, value: jax.Array, mask: jax.Array, coded: jax.Array | None = None
    ) -> Partial:
        scores = jnp.einsum("bkgtd,bksd->bkgts", queries, key, precision=lax.Precision.HIGHEST)
        scores = jnp.where(mask, cap_scores(scores, softcap), -jnp.inf)
        top = jnp.maximum(carry.top, scores.max(axis=-1))
        shared = jnp.where(jnp.isfinite(top), top, 0.0)
        weights = jnp.exp(scores - shared[..., None])
        shrink = jnp.exp(carry.top - shared)
        added = jnp.einsum("bkgts,bksd->bkgtd", weights, value, precision=lax.Precision.HIGHEST)
        total = carry.total * shrink[..., None] + added
        measured = None
        if carry.coded is not None and coded is not None:
            measured = carry.coded * shrink + jnp.where(coded, weights, 0).sum(axis=-1)
        return Partial(total, carry.mass * shrink + weights.sum(axis=-1), top, measured)

    def visible(token: jax.Array) -> jax.Array:
        seen = (token[None] <= positions[:, None]) & (token[None] < stored)
        if sliding_window is not None:
            seen &= token[None] > positions[:, None] - sliding_window
        return seen

    def changing(token: jax.Array) -> jax.Array:
        """Tokens whose page is INT2 for the query, but not yet for the first one: bool [T, BLOCK]."""
        return (token[None] >= always) & (token[None] < end[:, None])

    def first_pass(index: jax.Array, carry: Partial) -> Partial:
        """Rows as the first query reads them, without those that others read from INT2."""
        token = index * BLOCK + jnp.arange(BLOCK)
        key, value = block_of(rows.key, index), block_of(rows.value, index)
        mask = visible(token)
        if rows.restored_key is not None and rows.restored_value is not None:
            coded = ((token >= config.sink_tokens) & (token < always))[:, None]
            key = jnp.where(coded, block_of(rows.restored_key, index), key)
            value = jnp.where(coded, block_of(rows.restored_value, index), value)
            mask &= ~changing(token)
        int2 = (token[None] >= config.sink_tokens) & (token[None] < end[:, None])
        return accumulate(carry, key, value, mask, int2)

    def second_pass(index: jax.Array, carry: Partial) -> Partial:
        """The rows left out, restored."""
        assert rows.restored_key is not None and rows.restored_value is not None
        token = index * BLOCK + jnp.arange(BLOCK)
        key, value = block_of(rows.restored_key, index), block_of(rows.restored_value, index)
        return accumulate(carry, key, value, visible(token) & changing(token))

    shape = (batch, heads, group, tokens)
    carry = Partial(
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32) if measure_coded else None,
    )
    carry = lax.fori_loop(oldest // BLOCK, (most + BLOCK - 1) // BLOCK, first_pass, carry)
    if rows.restored_key is not None:
        last = jnp.minimum(end.max(), stored)
        # An empty range where no page changes within the chunk.
        stop = jnp.where(last > always, (last + BLOCK - 1) // BLOCK, 0)
        carry = lax.fori_loop(jnp.maximum(oldest, always) // BLOCK, stop, second_pass, carry)
    return carry


def attend_few(
    query: jax.Array,
    rows: StoredRows,
    positions: jax.Array,
    stored: jax.Array | int,
    *,
    apart: int,
    config: CacheConfig,
    softmax_scale: float,
    sliding_window: int | None,
    softcap: float | None = None,
) -> list[Partial]:
    """What `attend_rows` sees, of few queries: products over the whole capacity at once, without a loop.

    Arguments as there; `apart` is at least the distance between two of `positions`.
    """
    queries = group_queries(query, rows.key.shape[1]) * softmax_scale
    end = coded_end(positions, config)
    always = end.min()  # up to here the history is INT2 for every query

    def seen(token: jax.Array) -> jax.Array:
        seen = (token <= positions[:, None]) & (token < stored)
        return seen if sliding_window is None else seen & (token > positions[:, None] - sliding_window)

    def among(key: jax.Array, value: jax.Array, mask: jax.Array) -> Partial:
        return attend_at_once(queries, key, value, mask[None], softcap)

    token = jnp.arange(rows.key.shape[2])
    if rows.restored_key is None or rows.restored_value is None:
        return [among(rows.key, rows.value, seen(token))]
    coded = ((token >= config.sink_tokens) & (token < always))[:, None]
    key = jnp.where(coded, rows.restored_key, rows.key.astype(jnp.float32))
    value = jnp.where(coded, rows.restored_value, rows.value.astype(jnp.float32))
    if not apart:
        return [among(key, value, seen(token))]
    changing = (token >= always) & (token < end[:, None])
    first = among(key, value, seen(token) & ~changing)
    # The pages that are INT2 for some of the queries only.
    width = min(len(token), fmt.PAGE_TOKENS * (apart // fmt.PAGE_TOKENS + 1))
    start = jnp.minimum(always, len(token) - width)
    near = start + jnp.arange(width)
    key = lax.dynamic_slice_in_dim(rows.restored_key, start, width, axis=2)
    value = lax.dynamic_slice_in_dim(rows.restored_value, start, width, axis=2)
    return [first, among(key, value, seen(near) & (near >= always) & (near < end[:, None]))]


def attend_own(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    softmax_scale: float,
    softcap: float | None = None,
) -> Partial:
    """Attention over few exact rows: query [B, T, N, D], key and value [B, S, K, D], mask bool [B, T, S]."""
    queries = group_queries(query, key.shape[2]) * softmax_scale
    return attend_at_once(queries, key.swapaxes(1, 2), value.swapaxes(1, 2), mask, softcap)


def attend_at_once(
    queries: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, softcap: float | None
) -> Partial:
    """Scaled queries [B, K, G, T, D] over rows [B, K, S, D] where mask bool [B or 1, T, S] says so."""
    scores = jnp.einsum(
        "bkgtd,bksd->bkgts", queries, key.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    scores = jnp.where(mask[:, None, None], cap_scores(scores, softcap), -jnp.inf)
    top = scores.max(axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)[..., None])
    total = jnp.einsum(
        "bkgts,bksd->bkgtd", weights, value.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    return Partial(total, weights.sum(axis=-1), top)
