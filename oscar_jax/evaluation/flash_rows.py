"""`blockwise.attend_rows` for a chunk of a text on a GPU: nearly all of it through cuDNN's flash attention.

The queries of a chunk differ in few pages: what the first one reads as INT2, all of them do. So a chunk is
four parts, each a plain attention, merged by their log-sum-exp:

- rows that are INT2 for the first query already: unmasked, by cuDNN;
- rows that become INT2 within the chunk: as many tokens as the chunk has, in one masked product;
- the exact rows near a query: the recent tokens and its own page, for 64 queries at a time (`_near`);
- the sink.

Where nothing stands in for INT2 pages everything is exact, and two parts suffice, both by cuDNN: what was
stored before, and the chunk itself. The attention that would go to INT2 tokens is then all but that to the
sink and the near rows.

cuDNN rounds rows, weights and results to BF16, as any BF16 attention does: some 2**-9 of an output, against
a tenth and more by which two bits change it. Its log-sum-exp is float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..ops import ambient_device
from ..pallas.prefill import flash
from .blockwise import Partial, StoredRows, attend_at_once, coded_end, group_queries, merge

PAGE = fmt.PAGE_TOKENS


def serves(query: jax.Array, sliding_window: int | None, softcap: float | None) -> bool:
    """Whether cuDNN attends to chunks of these queries [B, T, N, D], here and on one device."""
    return (
        _has_cudnn(ambient_device())
        and jax.sharding.get_abstract_mesh().empty
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and query.shape[1] % PAGE == 0
        and query.shape[3] <= flash.MAX_HEAD_DIM
        and query.shape[3] % 8 == 0
        and sliding_window is None
        and softcap is None
    )


@functools.cache
def _has_cudnn(device: Any) -> bool:
    """Flash attention of cuDNN: GPUs of compute capability 8.0 and more."""
    capability = str(getattr(device, "compute_capability", "0")).split(".")[0]
    return device.platform == "gpu" and capability.isdigit() and int(capability) >= 8


def attend_chunk(
    query: jax.Array,
    rows: StoredRows,
    start: jax.Array | int,
    *,
    config: CacheConfig,
    softmax_scale: float,
    measure_coded: bool = False,
    backend: str = "cudnn",
) -> Partial:
    """What `attend_rows` sees of queries [B, T, N, D] at positions start … start + T - 1, T rows stored last.

    start and T are multiples of 64. `measure_coded` fills in `Partial.coded`, of rows without restored ones.
    backend "xla" runs the same steps without cuDNN, on any device.
    """
    attention = functools.partial(flash.attend, softmax_scale=softmax_scale, backend=backend)
    heads, tokens = rows.key.shape[1], query.shape[1]
    sink, end = config.sink_tokens, coded_end(jnp.asarray(start), config)
    if rows.restored_key is None or rows.restored_value is None:
        before = _flash_part(attention, query, rows.key, rows.value, jnp.asarray(start))
        key, value = (
            lax.dynamic_slice_in_dim(store, start, tokens, axis=2).swapaxes(1, 2)
            for store in (rows.key, rows.value)
        )
        whole = merge([before, _as_partial(*attention(query, key, value, causal=True), heads)])
        if not measure_coded:
            return whole
        exact = merge(_exact_parts(query, rows, start, config, softmax_scale))
        coded = whole.mass - exact.mass * jnp.exp(exact.top - whole.top)
        return whole._replace(coded=jnp.maximum(coded, 0))
    parts = _exact_parts(query, rows, start, config, softmax_scale)
    key, value = rows.restored_key[:, :, sink:], rows.restored_value[:, :, sink:]
    parts.append(_flash_part(attention, query, key, value, end - sink))
    return merge(
        [*parts, _changing(query, rows.restored_key, rows.restored_value, start, config, softmax_scale)]
    )


def _as_partial(out: jax.Array, lse: jax.Array, heads: int) -> Partial:
    """Normalized output [B, T, N, D] and log-sum-exp [B, T, N], -inf where nothing was seen."""
    batch, tokens, query_heads, head_dim = out.shape
    total = out.reshape(batch, tokens, heads, -1, head_dim).transpose(0, 2, 3, 1, 4)
    top = lse.reshape(batch, tokens, heads, query_heads // heads).transpose(0, 2, 3, 1)
    return Partial(total, jnp.isfinite(top).astype(jnp.float32), top)


def _flash_part(attention, query: jax.Array, key: jax.Array, value: jax.Array, count: jax.Array) -> Partial:
    """Attention to the first `count` rows of [B, K, S, D], unmasked."""
    lengths = jnp.full(query.shape[0], count, jnp.int32)
    out, lse = attention(query, key.swapaxes(1, 2), value.swapaxes(1, 2), lengths=lengths)
    return _as_partial(out, lse, key.shape[1])


def _exact_parts(
    query: jax.Array, rows: StoredRows, start: jax.Array | int, config: CacheConfig, softmax_scale: float
) -> list[Partial]:
    """Attention to the rows that a cache holds in BF16 for each query: sink and near ones."""
    near = _near(query, rows, start, config, softmax_scale)
    if not config.sink_tokens:
        return [near]
    queries = group_queries(query, rows.key.shape[1]) * softmax_scale
    seen = jnp.arange(config.sink_tokens) <= start + jnp.arange(query.shape[1])[:, None]
    key, value = (store[:, :, : config.sink_tokens] for store in (rows.key, rows.value))
    return [near, attend_at_once(queries, key, value, seen[None], None)]


def _near(
    query: jax.Array, rows: StoredRows, start: jax.Array | int, config: CacheConfig, softmax_scale: float
) -> Partial:
    """Attention to the exact rows past the sink: of 64 queries the recent tokens before them and their page.

    They are those from `coded_end` of a query on, and `coded_end` of the first of the 64 is `recent_tokens`
    before it, where there are so many.
    """
    batch, tokens, _, head_dim = query.shape
    heads, recent = rows.key.shape[1], config.recent_tokens
    blocks, pages = tokens // PAGE, recent // PAGE + 1
    token = start - recent + jnp.arange(recent + tokens)

    def beside(store: jax.Array) -> jax.Array:
        """[B, K, S, D] -> [B * blocks, K, pages * 64, D]: the rows that each block of queries may see."""
        span = jnp.take(store, jnp.maximum(token, 0), axis=2).reshape(batch, heads, -1, PAGE, head_dim)
        rows = jnp.concatenate([span[:, :, page : page + blocks] for page in range(pages)], axis=3)
        return rows.swapaxes(1, 2).reshape(batch * blocks, *rows.shape[1:2], *rows.shape[3:])

    first = jnp.arange(blocks)[:, None] * PAGE  # of a block, in `token`
    seen = token[first + jnp.arange(pages * PAGE)][:, None]  # [blocks, 1, pages * 64]
    position = (start + jnp.arange(tokens)).reshape(blocks, PAGE, 1)
    mask = jnp.tile((seen >= coded_end(position, config)) & (seen <= position), (batch, 1, 1))
    queries = group_queries(query.reshape(-1, PAGE, *query.shape[2:]), heads) * softmax_scale
    part = attend_at_once(queries, beside(rows.key), beside(rows.value), mask, None)

    def together(array: jax.Array) -> jax.Array:
        """[B * blocks, K, G, 64, ...] -> [B, K, G, T, ...]."""
        array = jnp.moveaxis(array.reshape(batch, blocks, *array.shape[1:]), 1, 3)
        return array.reshape(*array.shape[:3], tokens, *array.shape[5:])

    return jax.tree.map(together, part)


def _changing(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    start: jax.Array | int,
    config: CacheConfig,
    softmax_scale: float,
) -> Partial:
    """Attention to restored rows [B, K, S, D] that are INT2 for a query but not for the chunk's first."""
    tokens, capacity = query.shape[1], key.shape[2]
    queries = group_queries(query, key.shape[1]) * softmax_scale
    always = coded_end(jnp.asarray(start), config)
    width = min(tokens, capacity)
    first = jnp.minimum(always, capacity - width)
    token = first + jnp.arange(width)
    ends = coded_end(start + jnp.arange(tokens), config)[:, None]
    key, value = (lax.dynamic_slice_in_dim(store, first, width, axis=2) for store in (key, value))
    return attend_at_once(queries, key, value, ((token >= always) & (token < ends))[None], None)
