"""A chunk of queries over INT2 history for Hopper GPUs (Mosaic GPU), merged with exact attention within it.

Every query of a chunk sees the whole INT2 history, so the chunk is, for the decode kernel, one large group of
query rows per key/value head: it serves them in tiles of eight, and unpacks pages in registers as always.
Nothing of the history is ever dequantized to memory. The BF16 part (window pages and the chunk itself) is
plain attention by XLA over blocks of queries, so that the workspace does not depend on the history length.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...attention import Partial, _finish, _rows, window_positions
from ...core.errors import ShapeError
from ...layer_cache import outgrown
from ..decode.mosaic_gpu import check_decode_shape, decode_history, restore_values, rotate_queries

QUERY_BLOCK = 128  # queries whose scores over the BF16 rows exist at a time


def chunk_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    rotation: Any,
    *,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]; the twin of
    `attention.chunk_attention`. Raises ShapeError, or NotImplementedError for a shape that the kernel does
    not serve.
    """
    if sliding_window is not None:
        raise NotImplementedError(
            f"sliding_window = {sliding_window}: the Mosaic prefill kernel reads whole sequences"
        )
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    batch, tokens, query_heads, width = query.shape
    if batch != cache.batch or width != head_dim or query_heads % heads:
        raise ShapeError(f"query {query.shape}, expected [{cache.batch}, T, G * {heads}, {head_dim}]")
    group = query_heads // heads
    check_decode_shape(head_dim, group)

    grouped = query.reshape(batch, tokens, heads, group, head_dim)
    rows = grouped.swapaxes(1, 2).reshape(batch, heads, tokens * group, head_dim)
    out, lse = decode_history(rotate_queries(rows, rotation), rows, cache, softmax_scale=softmax_scale)
    out = restore_values(out, jnp.isfinite(lse).astype(jnp.float32), rotation)
    history = Partial(
        out.reshape(batch, heads, tokens, group, head_dim).swapaxes(1, 2),
        lse.reshape(batch, heads, tokens, group).swapaxes(1, 2),
    )
    exact = _exact_part(grouped, key, value, cache, new_lengths, softmax_scale)
    return _finish([history, exact], sink_logits, outgrown(cache, new_lengths, tokens))


def _exact_part(
    queries: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    new_lengths: jax.Array,
    softmax_scale: float,
) -> Partial:
    """Partial of queries [B, T, K, G, D] over the window pages and, causally, the chunk: all BF16 rows."""
    batch, tokens = queries.shape[:2]

    def with_chunk(window: jax.Array, chunk: jax.Array) -> jax.Array:  # -> [B, slots * 64 + T, K, D]
        stored = window[cache.window_table].swapaxes(2, 3)
        stored = stored.reshape(batch, -1, *stored.shape[3:])
        dtype = jnp.promote_types(stored.dtype, chunk.dtype)
        return jnp.concatenate([stored.astype(dtype), chunk.astype(dtype)], 1)

    rows_key, rows_value = with_chunk(cache.window_key, key), with_chunk(cache.window_value, value)
    step = jnp.arange(tokens)
    stored = (window_positions(cache) >= 0).reshape(batch, 1, -1)  # [B, 1, S]
    real = step < new_lengths[:, None, None]  # [B, 1, T]

    def attend(first: jax.Array, block: jax.Array) -> Partial:
        """block [B, T', K, G, D], the queries from `first` on."""
        row = first + jnp.arange(block.shape[1])
        causal = (row[:, None] >= step) & real  # [B, T', T]
        seen = jnp.broadcast_to(stored, (batch, block.shape[1], stored.shape[2]))
        mask = jnp.concatenate([seen, causal], -1)
        return _rows(block.astype(jnp.float32), rows_key, rows_value, mask, softmax_scale)

    whole = tokens // QUERY_BLOCK * QUERY_BLOCK
    parts = []
    if whole:
        blocks = queries[:, :whole].reshape(batch, -1, QUERY_BLOCK, *queries.shape[2:]).swapaxes(0, 1)
        starts = jnp.arange(0, whole, QUERY_BLOCK)
        mapped = lax.map(lambda x: attend(*x), (starts, blocks))
        parts.append(Partial(*(x.swapaxes(0, 1).reshape(batch, whole, *x.shape[3:]) for x in mapped)))
    if whole < tokens:
        parts.append(attend(jnp.int32(whole), queries[:, whole:]))
    return Partial(*(jnp.concatenate(x, 1) for x in zip(*parts)))
