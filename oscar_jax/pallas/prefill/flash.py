"""Chunks of queries through cuDNN's flash attention, over history dequantized block by block.

Long chunks are bound by arithmetic, not by bytes: dequantizing a block of pages to BF16 costs a few per
cent of the attention over it, and cuDNN's products are the fastest there are. So the history is read in
blocks of `BLOCK_TOKENS` tokens, whose partial results are merged by log-sum-exp; the workspace does not grow
with the history. Short chunks and decoding read codes directly.

Within a block keys stay in the rotated basis, and so do queries. The mean key of the whole block is taken out
of the BF16 keys and put back as a number per query, q·mean, into the log-sum-exp: what BF16 then rounds is a
page's mean less the block's and the coded rest. Values are merged in the rotated basis and rotated back once.

Floating results: products, weights and outputs are rounded to BF16 as in any BF16 flash attention.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...attention import Partial, _finish, merge_partials, window_positions
from ...core import cache_format as fmt
from ...core.errors import ConfigError, ShapeError
from ...layer_cache import LayerCache, outgrown
from ...packing import unpack_key_codes, unpack_value_codes

BLOCK_TOKENS = 16_384  # dequantized at a time per sequence, at most
BLOCK_ROWS = 65_536  # dequantized at a time over the batch
MIN_TOKENS = 128  # shorter chunks are bound by the bytes of the history: the kernels that read codes win
MAX_HEAD_DIM = 256  # of cuDNN's kernels on Hopper
BACKENDS = ("cudnn", "xla")


def chunk_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache,
    rotation: Any,
    *,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    backend: str = "cudnn",
) -> jax.Array:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D], bfloat16 or float16 -> float32 [B, T, N, D]; the twin of
    `attention.chunk_attention`. `backend` "xla" runs the same steps without cuDNN, on any device. Raises
    ConfigError, ShapeError, or NotImplementedError for what the backend does not serve.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend = {backend!r}, allowed: {', '.join(BACKENDS)}")
    batch, tokens, query_heads, head_dim = query.shape
    heads = cache.config.num_key_value_heads
    if batch != cache.batch or head_dim != cache.config.head_dim or query_heads % heads:
        raise ShapeError(f"query {query.shape}, expected [{cache.batch}, T, G * {heads}, {head_dim}]")
    if backend == "cudnn":
        _check_cudnn(query, tokens, sliding_window)
    if sliding_window is not None:
        raise NotImplementedError(
            f"sliding_window = {sliding_window}: blocks are read as a whole, allowed: None"
        )
    flash = functools.partial(attend, softmax_scale=softmax_scale, backend=backend)
    dtype = query.dtype if backend == "cudnn" else jnp.float32

    group = query_heads // heads
    history = _history(query, cache, rotation, dtype, flash, softmax_scale)
    rows_key, rows_value, counts = _window_rows(cache)
    window = flash(query, rows_key, rows_value, lengths=counts)
    # Padding may hold anything; it stands on the right, so that the causal mask hides it, but 0 * NaN is NaN.
    real = (jnp.arange(tokens) < new_lengths[:, None])[..., None, None]
    own = flash(query, jnp.where(real, key, 0), jnp.where(real, value, 0), causal=True)

    def grouped(part: tuple[jax.Array, jax.Array]) -> Partial:
        out, lse = part
        return Partial(
            out.reshape(batch, tokens, heads, group, head_dim), lse.reshape(batch, tokens, heads, group)
        )

    partials = [grouped(history), grouped(window), grouped(own)]
    return _finish(partials, sink_logits, outgrown(cache, new_lengths, tokens))


def dequantize_block(
    cache: LayerCache, rotation: Any, pages: jax.Array, dtype: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of some pages of every sequence in the rotated bases, less the block's mean key.

    pages int32 [P], numbers of history pages; those past a sequence's end give zeros. Returns key and value
    [B, P * 64, K, D] in `dtype`, and the mean key float32 [B, K, D] that every key of the block lacks.
    """
    heads, head_dim = cache.config.num_key_value_heads, cache.config.head_dim
    live = pages < cache.history_pages[:, None]  # [B, P]
    table = jnp.take(cache.page_table, jnp.minimum(pages, cache.page_table.shape[1] - 1), axis=1)

    def scaled(codes: jax.Array, scale: jax.Array) -> jax.Array:  # [B, P, K, 64, D], [B, P, K, 64] -> float32
        # Pages that are not part of the sequence may hold anything; 0 * NaN must not reach the output.
        scale = jnp.where(live[:, :, None, None], scale, 0).astype(jnp.float32)
        return (codes.astype(jnp.float32) - 1.5) * scale[..., None]

    page_mean = jnp.where(live[:, :, None, None], cache.key_page_mean[table], 0).astype(jnp.float32)
    count = jnp.maximum(live.sum(axis=1), 1)[:, None, None]
    block_mean = page_mean.sum(axis=1) / count  # [B, K, D]
    centered = jnp.where(live[:, :, None, None], page_mean - block_mean[:, None], 0)
    transform = rotation.key_transform.astype(jnp.float32) * 2.0**-fmt.TRANSFORM_BITS
    transform = jnp.broadcast_to(transform, (heads, head_dim, head_dim))
    rotated = jnp.einsum("bpkd,kde->bpke", centered, transform, precision=lax.Precision.HIGHEST)
    key = scaled(unpack_key_codes(cache.key_codes[table]), cache.key_scale[table]) + rotated[..., None, :]
    value = scaled(unpack_value_codes(cache.value_codes[table]), cache.value_scale[table])

    def rows(x: jax.Array) -> jax.Array:
        return x.astype(dtype).swapaxes(2, 3).reshape(x.shape[0], -1, heads, head_dim)

    return rows(key), rows(value), block_mean


def _history(
    query: jax.Array, cache: LayerCache, rotation: Any, dtype: Any, flash: Any, softmax_scale: float
) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 [B, T, N, D] and log-sum-exp [B, T, N] over the INT2 pages of every sequence."""
    batch, tokens, _, head_dim = query.shape
    heads = cache.config.num_key_value_heads
    grouped = query.astype(jnp.float32).reshape(batch, tokens, heads, -1, head_dim)
    highest = lax.Precision.HIGHEST
    matrices = jnp.broadcast_to(rotation.query_transform, (heads, head_dim, head_dim))
    rotated = jnp.einsum("btkgd,kde->btkge", grouped, matrices, precision=highest)
    rotated = rotated.reshape(query.shape).astype(dtype)
    block = max(1, min(BLOCK_TOKENS, BLOCK_ROWS // batch) // fmt.PAGE_TOKENS)
    block = min(block, cache.page_table.shape[1])

    def attend_block(index: jax.Array, merged: Partial) -> Partial:
        first = index * block
        key, value, mean = dequantize_block(
            cache, rotation, first + jnp.arange(block, dtype=jnp.int32), dtype
        )
        lengths = jnp.clip(cache.history_pages - first, 0, block) * fmt.PAGE_TOKENS
        out, lse = flash(rotated, key, value, lengths=lengths)
        shift = jnp.einsum("btkgd,bkd->btkg", grouped, mean, precision=highest) * softmax_scale
        return merge_partials([merged, Partial(out, lse + shift.reshape(lse.shape))])

    empty = Partial(jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:3], -jnp.inf, jnp.float32))
    blocks = -(-cache.history_pages.max() // block)
    out, lse = lax.fori_loop(0, blocks, attend_block, empty)
    out = out.reshape(grouped.shape)
    back = jnp.broadcast_to(rotation.output_transform, (heads, head_dim, head_dim))
    out = jnp.einsum("btkgd,kde->btkge", out, back, precision=highest)
    out += rotation.value_mean.astype(jnp.float32)[:, None]
    return jnp.where(jnp.isfinite(lse)[..., None], out.reshape(query.shape), 0.0), lse


def _window_rows(cache: LayerCache) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The BF16 rows of the windows, [B, S, K, D] with those stored first, and how many: int32 [B]."""
    stored = window_positions(cache).reshape(cache.batch, -1) >= 0
    order = jnp.argsort(~stored, axis=1, stable=True)

    def rows(window: jax.Array) -> jax.Array:
        flat = window[cache.window_table].swapaxes(2, 3)
        flat = flat.reshape(cache.batch, -1, *flat.shape[3:])
        # A row where nothing is stored may hold anything; 0 * NaN must not reach the output.
        return jnp.take_along_axis(
            jnp.where(stored[..., None, None], flat, 0), order[..., None, None], axis=1
        )

    return rows(cache.window_key), rows(cache.window_value), stored.sum(axis=1, dtype=jnp.int32)


def _check_cudnn(query: jax.Array, tokens: int, sliding_window: int | None) -> None:
    """Raises NotImplementedError where the kernels that read codes should run, or cuDNN has no kernel."""
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"cuDNN attends in bfloat16 and float16, the queries are {query.dtype}")
    if query.shape[-1] > MAX_HEAD_DIM or query.shape[-1] % 8:
        raise NotImplementedError(
            f"head_dim = {query.shape[-1]}, allowed with cuDNN: multiples of 8 up to {MAX_HEAD_DIM}"
        )
    if tokens < MIN_TOKENS:
        raise NotImplementedError(f"a chunk of {tokens} tokens: blocks are dequantized from {MIN_TOKENS} on")


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    softmax_scale: float,
    backend: str,
    lengths: jax.Array | None = None,
    causal: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention, float32 [B, T, N, D], and its natural log-sum-exp float32 [B, T, N].

    query [B, T, N, D], key and value [B, S, K, D]; a sequence sees its first `lengths` int32 [B] rows (None:
    all), zeros and -inf where that is none; `causal`: query t sees rows 0 … t.
    """
    if backend == "xla":
        return _attend_xla(query, key, value, softmax_scale=softmax_scale, lengths=lengths, causal=causal)
    # jax.nn.dot_product_attention rounds the log-sum-exp to the queries' dtype, which is useless for merging.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    arguments: dict[str, Any] = {"mask_type": MaskType.CAUSAL if causal else MaskType.NO_MASK}
    if lengths is not None:
        arguments = {
            "mask_type": MaskType.PADDING,
            "q_seqlen": jnp.full_like(lengths, query.shape[1]),
            "kv_seqlen": jnp.maximum(lengths, 1),  # a length of 0 is not defined there
        }
    key, value = key.astype(query.dtype), value.astype(query.dtype)
    arguments |= {"scale": softmax_scale, "return_residual": True}
    out, lse = dot_product_attention(query, key, value, **arguments)
    out, lse = out.astype(jnp.float32), lse.swapaxes(1, 2).astype(jnp.float32)
    if lengths is not None:
        some = (lengths > 0)[:, None, None]
        out, lse = jnp.where(some[..., None], out, 0.0), jnp.where(some, lse, -jnp.inf)
    return out, lse


def _attend_xla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    softmax_scale: float,
    lengths: jax.Array | None,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """`attend` in float32, for checking every step but cuDNN's own."""
    batch, tokens, _, head_dim = query.shape
    stored, heads = key.shape[1:3]
    grouped = query.astype(jnp.float32).reshape(batch, tokens, heads, -1, head_dim)
    step = jnp.arange(stored)
    mask = jnp.ones((batch, tokens, stored), bool)
    if lengths is not None:
        mask &= step < lengths[:, None, None]
    if causal:
        mask &= step <= jnp.arange(tokens)[:, None]
    highest = lax.Precision.HIGHEST
    scores = (
        jnp.einsum("btkgd,bskd->btkgs", grouped, key.astype(jnp.float32), precision=highest) * softmax_scale
    )
    scores = jnp.where(mask[:, :, None, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(
        mask[:, :, None, None], jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0
    )
    out = jnp.einsum("btkgs,bskd->btkgd", weights, value.astype(jnp.float32), precision=highest)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])
