"""One layer's paged mixed-precision cache, as a pytree; every function is pure and returns a new cache.

Tokens 0 .. 63 (sink) and the last 256 .. 319 (recent) stay BF16; the pages between are INT2. Which tokens
are quantized depends on the length of a sequence alone, so writing the same rows in one go, in chunks or one
by one gives the same bytes. Page tables map a sequence's pages to physical pages, so that sequences of
different lengths share one pool; physical page 0 of both pools is reserved and never written, so that table
entries of padding rows can point there.

`DenseCache` is the BF16 cache beside it: the baseline, and the ring of layers with a short sliding window.
"""

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from . import ops
from .arithmetic import compiled_once, exact_arithmetic, refuse_gradients, traced, zeros_of
from .core import cache_format as fmt
from .core.config import CacheConfig
from .core.errors import CacheFullError, ConfigError, DTypeError, OscarError, ShapeError
from .layer_cache import (
    PAGE,
    DenseCache,
    LayerCache,
    RotationArrays,
    check_chunk,
    check_query,
    check_rotation,
    check_rows,
    outgrown,
    recent_slot,
)
from .quantize import dequantize_key_pages, dequantize_value_pages, round_to_bfloat16


@exact_arithmetic
def allocate_layer_cache(
    config: CacheConfig,
    batch: int,
    max_length: int,
    num_pages: int | None = None,
    num_window_pages: int | None = None,
    *,
    chunk: int = 512,
) -> LayerCache:
    """An empty cache for `batch` sequences of up to `max_length` tokens each.

    By default every sequence owns its pages (tables are filled in order). With `num_pages` or
    `num_window_pages` the pools have that many physical pages (page 0 included) and the tables are all 0:
    an allocator fills them. Where the config has a window, a sequence owns as many INT2 pages as the window
    can reach, or one append of `chunk` tokens completes, and takes them again in turn. Raises ConfigError.
    """
    _require_whole(batch=batch, max_length=max_length, chunk=chunk)
    if batch < 1 or max_length < 1:
        raise ConfigError(f"batch = {batch}, max_length = {max_length}: both must be at least 1")
    max_pages = max(1, config.history_pages(max_length))
    slots = config.window_slots
    owned = num_pages is None and num_window_pages is None
    if config.window is not None and not owned:
        raise ConfigError(f"window = {config.window} with num_pages: an allocator keeps all pages")
    kept = max_pages
    if config.window is not None:
        kept = min(max_pages, max(-(-config.window // PAGE) + 1, -(-chunk // PAGE)))
    pages = num_pages if num_pages is not None else 1 + batch * kept
    window_pages = num_window_pages if num_window_pages is not None else 1 + batch * slots
    if pages < 1 or window_pages < 1:
        raise ConfigError(f"num_pages = {pages}, num_window_pages = {window_pages}: page 0 is always there")
    heads, head_dim = config.num_key_value_heads, config.head_dim
    shapes = {
        **fmt.int2_array_shapes(pages, heads, head_dim),
        **fmt.window_array_shapes(window_pages, heads, head_dim),
    }
    dtypes = {**fmt.INT2_ARRAYS, **fmt.WINDOW_ARRAYS}
    arrays = {name: jnp.zeros(shape, dtypes[name]) for name, shape in shapes.items()}

    def table(columns: int, own: int) -> jax.Array:
        """Column i of a sequence is its page i modulo the number of its own pages."""
        first = 1 + own * jnp.arange(batch, dtype=jnp.int32)[:, None]
        entries = first + jnp.arange(columns, dtype=jnp.int32) % own
        return entries if owned else jnp.zeros_like(entries)

    return LayerCache(
        **arrays,
        page_table=table(max_pages, kept),
        window_table=table(slots, slots),
        lengths=jnp.zeros(batch, jnp.int32),
        history_pages=jnp.zeros(batch, jnp.int32),
        config=config,
    )


@exact_arithmetic
def allocate_dense_cache(
    config: CacheConfig,
    batch: int,
    max_length: int,
    window: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> DenseCache:
    """An empty BF16 cache; with `window`, a ring just long enough for a sliding window of that length."""
    _require_whole(batch=batch, max_length=max_length, window=1 if window is None else window)
    if batch < 1 or max_length < 1 or (window is not None and window < 1):
        raise ConfigError(f"batch = {batch}, max_length = {max_length}, window = {window}: all must be >= 1")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise DTypeError(f"dtype = {dtype}, allowed: a type of floats")
    slots = max_length if window is None else min(max_length, -(-window // PAGE) * PAGE)
    rows = jnp.zeros((batch, slots, config.num_key_value_heads, config.head_dim), dtype)
    return DenseCache(
        key=rows, value=jnp.zeros_like(rows), lengths=jnp.zeros(batch, jnp.int32), window=window
    )


def _require_whole(**numbers: int) -> None:
    """Raises ConfigError for what counts nothing, such as 512.5."""
    for name, number in numbers.items():
        try:
            operator.index(number)
        except TypeError:
            raise ConfigError(f"{name} = {number!r}, allowed: whole numbers") from None


@exact_arithmetic
def attend[Cache: LayerCache | DenseCache](
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    rotation: RotationArrays | None,
    *,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """Attends with new tokens and stores them: the one call a decoder layer makes.

    query [B, T, N, D], key and value [B, T, K, D], new_lengths int32 [B] (rows past it are padding) ->
    rows [B, T, N, D] in the query's dtype, computed in float32, and the cache with the rows appended. One
    token is stored first and then attends to all that is stored; a chunk attends to the cache as it was and,
    exactly, to itself. `softcap` is that of `attention.decode_attention`. Raises what `append_rows` raises,
    before anything runs.

    Under jit nobody can refuse a sequence that outgrows its tables, or claims other than 0..T rows: its rows
    are dropped, from then on its output is NaN, the other sequences stay right, and `overflowed` tells which.
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    check_chunk(query, key, value, cache, new_lengths)
    if isinstance(cache, LayerCache) and query.shape[2] != cache.config.num_query_heads:
        raise ShapeError(f"query has {query.shape[2]} heads, the cache {cache.config.num_query_heads}")
    ops.check_implementation(implementation)
    if isinstance(cache, LayerCache):
        ops.check_softcap_kernel(implementation, softcap)
    if not traced((cache, new_lengths)):
        check_capacity(cache, new_lengths, key.shape[1])
    with ops.placed(query):
        return _attend(
            query, key, value, cache, rotation, new_lengths, softmax_scale, sliding_window, sink_logits,
            softcap, implementation,
        )  # fmt: skip


@compiled_once
def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    rotation: RotationArrays | None,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: jax.Array | None,
    softcap: float | None,
    implementation: str | None,
) -> tuple[jax.Array, Any]:
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "sliding_window": sliding_window, "sink_logits": sink_logits,
        "softcap": softcap,
    }  # fmt: skip
    if query.shape[1] == 1:
        cache = _append(cache, rotation, key, value, new_lengths, implementation)
        out = ops.decode_attention(query[:, 0], cache, rotation, implementation=implementation, **options)
        return out[:, None], cache
    out = ops.chunk_attention(
        query,
        key,
        value,
        cache,
        rotation,
        new_lengths=new_lengths,
        implementation=implementation,
        **options,
    )
    return out, _append(cache, rotation, key, value, new_lengths, implementation)


class NewPages(NamedTuple):
    """The pages a chunk of rows completes, ready to be quantized."""

    key: jax.Array  # bf16 [B, M, 64, K, D]
    value: jax.Array  # bf16 [B, M, 64, K, D]
    destination: jax.Array  # int32 [B, M]: physical page, or P where there is nothing to write


@exact_arithmetic
def append_rows[Cache: LayerCache | DenseCache](
    cache: Cache,
    rotation: RotationArrays | None,
    key: jax.Array,
    value: jax.Array,
    new_lengths: jax.Array,
    *,
    implementation: str | None = None,
    check: bool = True,
) -> Cache:
    """Appends rows to every sequence and quantizes the recent pages that become history.

    key, value bf16 [B, T, K, D] (other floats are rounded to bf16); new_lengths int32 [B]: the first
    new_lengths[b] rows of sequence b are stored, 0 leaves it untouched. Raises ShapeError, DTypeError,
    GradientError (INT2 only) and, outside jit, CacheFullError when a sequence would outgrow its tables; under
    jit, or with check=False (which spares the wait for the device), the caller has called `check_capacity`,
    or asks `overflowed` later.
    """
    check_rows(cache, key, value, new_lengths)
    ops.check_implementation(implementation)
    if isinstance(cache, LayerCache):
        check_rotation(cache.config, rotation)
    if check and not traced((cache.lengths, new_lengths)):
        check_capacity(cache, new_lengths, key.shape[1])
    with ops.placed(key):
        return _append(cache, rotation, key, value, new_lengths, implementation)


@compiled_once
def _append(
    cache: Any,
    rotation: Any,
    key: jax.Array,
    value: jax.Array,
    new_lengths: jax.Array,
    implementation: str | None,
) -> Any:
    if isinstance(cache, DenseCache):
        return _append_dense(cache, key, value, new_lengths)
    key, value = refuse_gradients("append_rows", (key, value))
    if key.shape[1] == 1:
        written = ops.append_token(cache, rotation, key, value, new_lengths, implementation=implementation)
        if written is not None:
            return written
    key, value = round_to_bfloat16(key), round_to_bfloat16(value)
    new_lengths, after = _lengths_after(cache, new_lengths, key.shape[1])
    pages, history = _pages_to_quantize(cache, key, value, new_lengths)
    cache = _write_pages(cache, rotation, pages, implementation)
    cache = _write_window(cache, key, value, new_lengths, history)
    return dataclasses.replace(cache, lengths=after, history_pages=history)


@exact_arithmetic
def overflowed(cache: LayerCache | DenseCache) -> jax.Array:
    """Which sequences have outgrown their tables, bool [B]: rows of theirs are lost, and their output is NaN.

    Only where nothing checks: under jit, or with check=False. Their length stays capacity + 1, as that of
    sequences whose `new_lengths` were negative or more than the rows given.
    """
    return outgrown(cache)


def _lengths_after(
    cache: LayerCache | DenseCache, new_lengths: jax.Array, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """How many of `tokens` rows are stored, and the lengths then, int32 [B] each.

    A sequence that would outgrow its tables, or claims other than 0..tokens rows, stores nothing and is
    marked: its length is capacity + 1.
    """
    lost = outgrown(cache, new_lengths, tokens)
    new_lengths = jnp.where(lost, 0, new_lengths)
    return new_lengths, jnp.where(lost, cache.capacity + 1, cache.lengths + new_lengths)


@exact_arithmetic
def read_layer_cache(
    cache: LayerCache, rotation: RotationArrays, sequence: int
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of one sequence as attention sees them: float32 [L, K, D] each, INT2 reconstructed.

    Raises OscarError where pages behind a window were given up, ShapeError for a sequence that is not there.
    """
    check_rotation(cache.config, rotation)
    if not 0 <= sequence < cache.batch:
        raise ShapeError(f"sequence = {sequence}, allowed: 0..{cache.batch - 1}")
    config = cache.config
    length, history = int(cache.lengths[sequence]), int(cache.history_pages[sequence])
    kept = (cache.key_codes.shape[0] - 1) // cache.batch
    if config.window is not None and history > kept:
        raise OscarError(
            f"sequence {sequence} has given up INT2 pages 0..{history - kept - 1} of {history}, behind its "
            f"window of {config.window} tokens"
        )
    table = cache.page_table[sequence, :history]
    key_history = dequantize_key_pages(
        cache.key_codes[table], cache.key_scale[table], cache.key_page_mean[table], rotation.query_transform
    )
    value_history = dequantize_value_pages(
        cache.value_codes[table], cache.value_scale[table], rotation.value_mean, rotation.output_transform
    )

    def joined(window: jax.Array, history_pages: jax.Array) -> jax.Array:
        rows = window[cache.window_table[sequence]].swapaxes(1, 2).astype(jnp.float32)  # [slots, 64, K, D]
        sink = rows[: config.sink_pages]
        first = config.sink_pages + history
        recent = rows[recent_slot(first + np.arange(config.recent_slots), config)]
        every = jnp.concatenate([sink, history_pages, recent])
        return every.reshape(every.shape[0] * PAGE, *every.shape[2:])[:length]

    return joined(cache.window_key, key_history), joined(cache.window_value, value_history)


def live_bytes(cache: LayerCache | DenseCache, sliding_window: int | None = None) -> dict[str, int]:
    """Exact bytes of the tokens stored now, against the same tokens in BF16.

    Returns int2, window, total, bfloat16 (bytes of the same tokens as BF16 rows; of a layer with a sliding
    window, which the cache's own is by default, only as many as a BF16 ring keeps), allocated (bytes of all
    arrays), int2_pages, window_pages and tokens. Sequences that share a page count it once.
    """
    lengths = np.asarray(cache.lengths)
    if sliding_window is None:
        sliding_window = cache.window if isinstance(cache, DenseCache) else cache.config.window
    kept = int((lengths if sliding_window is None else np.minimum(lengths, sliding_window)).sum())
    if isinstance(cache, DenseCache):
        row = 2 * cache.key.shape[2] * cache.key.shape[3] * cache.key.dtype.itemsize
        stored = int(np.minimum(lengths, cache.key.shape[1]).sum()) * row
        tokens = int(lengths.sum())
        allocated = cache.key.nbytes + cache.value.nbytes
        return {
            "int2": 0,
            "window": stored,
            "total": stored,
            "bfloat16": kept * 2 * cache.key.shape[2] * cache.key.shape[3] * 2,
            "allocated": allocated,
            "int2_pages": 0,
            "window_pages": 0,
            "tokens": tokens,
        }
    config = cache.config
    history = np.asarray(cache.history_pages)
    page_table, window_table = np.asarray(cache.page_table), np.asarray(cache.window_table)
    int2_pages: set[int] = set()
    window_pages: set[int] = set()
    for b, (length, pages) in enumerate(zip(lengths.tolist(), history.tolist())):
        int2_pages.update(page_table[b, :pages].tolist())
        for page in range(-(-length // PAGE)):
            if page < config.sink_pages:
                window_pages.add(int(window_table[b, page]))
            elif page >= config.sink_pages + pages:
                window_pages.add(int(window_table[b, recent_slot(page, config)]))
    heads, head_dim = config.num_key_value_heads, config.head_dim
    int2 = len(int2_pages) * heads * fmt.int2_page_bytes(head_dim)
    window = len(window_pages) * heads * fmt.window_page_bytes(head_dim)
    arrays = [getattr(cache, name) for name in (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)]
    return {
        "int2": int2,
        "window": window,
        "total": int2 + window,
        "bfloat16": kept * heads * head_dim * 4,
        "allocated": sum(a.nbytes for a in arrays),
        "int2_pages": len(int2_pages),
        "window_pages": len(window_pages),
        "tokens": int(lengths.sum()),
    }


def check_capacity(cache: LayerCache | DenseCache, new_lengths: jax.Array, tokens: int | None = None) -> None:
    """Raises CacheFullError when a sequence would outgrow its tables, or its table names no page.

    ShapeError for a negative number of new rows, or more than `tokens`, the rows there are.
    """
    new = np.asarray(new_lengths)
    if (new < 0).any() or (tokens is not None and (new > tokens).any()):
        allowed = "0 or more" if tokens is None else f"0..{tokens}, the rows given"
        raise ShapeError(f"new_lengths {new.tolist()}, allowed: {allowed}")
    after = np.asarray(cache.lengths) + new
    limit = cache.capacity
    if (after > limit).any():
        b = int(np.argmax(after > limit))
        raise CacheFullError(f"sequence {b} would have {int(after[b])} tokens, its cache holds {limit}")
    if isinstance(cache, LayerCache):
        _check_tables(cache, after, new)


def _check_tables(cache: LayerCache, after: np.ndarray, new_lengths: np.ndarray) -> None:
    """Every page that the sequences need after the append must be a physical page other than 0."""
    config = cache.config
    page_table, window_table = np.asarray(cache.page_table), np.asarray(cache.window_table)
    for name, table, pages in (
        ("page_table", page_table, cache.key_codes.shape[0]),
        ("window_table", window_table, cache.window_key.shape[0]),
    ):
        if ((table < 0) | (table >= pages)).any():
            bad = int(table[(table < 0) | (table >= pages)][0])
            raise OscarError(f"{name} names page {bad}, the pool has pages 0..{pages - 1}")
    history_before = np.asarray(cache.history_pages)
    for b in np.flatnonzero(new_lengths > 0):
        history = max(int(history_before[b]), config.history_pages(int(after[b])))
        if (page_table[b, :history] == 0).any():
            raise CacheFullError(f"sequence {b} needs {history} INT2 pages, its table names fewer")
        first = config.sink_pages + history
        last = (int(after[b]) - 1) // PAGE
        needed = list(range(min(config.sink_pages, last + 1)))
        needed += [recent_slot(p, config) for p in range(first, last + 1)]
        if (window_table[b, needed] == 0).any():
            raise CacheFullError(f"sequence {b} needs {len(needed)} window pages, its table names fewer")


def _append_dense(cache: DenseCache, key: jax.Array, value: jax.Array, new_lengths: jax.Array) -> DenseCache:
    slots, tokens = cache.key.shape[1], key.shape[1]
    new_lengths, after = _lengths_after(cache, new_lengths, tokens)
    step = jnp.arange(tokens)
    # A chunk longer than the ring overwrites itself: only its last S rows are written.
    keep = (step < new_lengths[:, None]) & (step >= new_lengths[:, None] - slots)
    slot = jnp.where(keep, (cache.lengths[:, None] + step) % slots, slots)
    row = jnp.arange(cache.batch)[:, None]

    def written(store: jax.Array, rows: jax.Array) -> jax.Array:
        rows = round_to_bfloat16(rows) if store.dtype == jnp.bfloat16 else rows.astype(store.dtype)
        return store.at[row, slot].set(rows, mode="drop")

    return dataclasses.replace(
        cache,
        key=written(cache.key, key),
        value=written(cache.value, value),
        lengths=after,
    )


def _bits(rows: jax.Array) -> jax.Array:
    """bf16 as uint16: moves rows without touching NaN payloads or subnormals."""
    return lax.bitcast_convert_type(rows, jnp.uint16)


def _pages_to_quantize(
    cache: LayerCache, key: jax.Array, value: jax.Array, new_lengths: jax.Array
) -> tuple[NewPages, jax.Array]:
    """Collects the rows of the pages that leave the recent part: from the window, then from the chunk."""
    config, tokens = cache.config, key.shape[1]
    length, before = cache.lengths, cache.history_pages
    formula = (length + new_lengths - config.sink_tokens - config.recent_tokens) // PAGE
    after = jnp.maximum(before, jnp.where(new_lengths > 0, formula, 0))
    # At most 63 tokens wait beyond the recent window, so T more complete at most ceil(T / 64) pages. More
    # recent tokens than that can only stem from a cut inside the history, where fewer pages are due.
    count = -(-tokens // PAGE)
    index = jnp.arange(count)
    page = config.sink_pages + before[:, None] + index  # [B, M] token pages
    slot = recent_slot(page, config)
    source = jnp.take_along_axis(cache.window_table, slot, axis=1)
    token = page[:, :, None] * PAGE + jnp.arange(PAGE)  # [B, M, 64]
    step = jnp.clip(token - length[:, None, None], 0, tokens - 1)
    is_new = (token >= length[:, None, None])[..., None, None]
    sequence = jnp.arange(cache.batch)[:, None, None]

    def gathered(window: jax.Array, rows: jax.Array) -> jax.Array:
        old = _bits(window)[source].swapaxes(2, 3)  # [B, M, 64, K, D]
        new = _bits(rows)[sequence, step]
        return lax.bitcast_convert_type(jnp.where(is_new, new, old), jnp.bfloat16)

    due = index < (after - before)[:, None]
    columns = jnp.minimum(before[:, None] + index, cache.page_table.shape[1] - 1)
    destination = jnp.take_along_axis(cache.page_table, columns, axis=1)
    pages = cache.key_codes.shape[0]
    destination = jnp.where(due & (destination > 0), destination, pages)
    return NewPages(gathered(cache.window_key, key), gathered(cache.window_value, value), destination), after


def _write_pages(
    cache: LayerCache, rotation: RotationArrays, pages: NewPages, implementation: str | None
) -> LayerCache:
    """Quantizes the collected pages, if any is due, and writes them to their physical pages."""
    key, value = (rows.reshape(-1, *rows.shape[2:]) for rows in (pages.key, pages.value))

    def quantized() -> dict[str, jax.Array]:
        return ops.quantize_pages(key, value, rotation, implementation=implementation)

    types = jax.eval_shape(quantized)
    new = lax.cond(
        (pages.destination < cache.key_codes.shape[0]).any(),
        quantized,
        lambda: jax.tree.map(zeros_of, types),
    )
    destination = pages.destination.reshape(-1)
    written = {name: getattr(cache, name).at[destination].set(new[name], mode="drop") for name in new}
    return dataclasses.replace(cache, **written)


def _write_window(
    cache: LayerCache, key: jax.Array, value: jax.Array, new_lengths: jax.Array, history: jax.Array
) -> LayerCache:
    """Writes the rows of the chunk that stay BF16: sink tokens and tokens past the new history."""
    config = cache.config
    step = jnp.arange(key.shape[1])
    token = cache.lengths[:, None] + step  # [B, T]
    page = token // PAGE
    in_sink = page < config.sink_pages
    stays = in_sink | (page >= config.sink_pages + history[:, None])
    slot = jnp.where(in_sink, page, recent_slot(page, config))
    physical = jnp.take_along_axis(cache.window_table, slot, axis=1)
    pages = cache.window_key.shape[0]
    physical = jnp.where(stays & (step < new_lengths[:, None]) & (physical > 0), physical, pages)

    def written(window: jax.Array, rows: jax.Array) -> jax.Array:
        bits = _bits(window).at[physical, :, token % PAGE].set(_bits(rows), mode="drop")
        return lax.bitcast_convert_type(bits, jnp.bfloat16)

    return dataclasses.replace(
        cache, window_key=written(cache.window_key, key), window_value=written(cache.window_value, value)
    )
