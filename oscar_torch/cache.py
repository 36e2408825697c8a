"""One layer's paged mixed-precision cache; functions change the cache they get and return it.

Tokens 0 .. 63 (sink) and the last 256 .. 319 (recent) stay BF16; the pages between are INT2. Which tokens
are quantized depends on the length of a sequence alone, so writing the same rows in one go, in chunks or one
by one gives the same bytes. Page tables map a sequence's pages to physical pages, so that sequences of
different lengths share one pool; physical page 0 of both pools is reserved and never written, so that table
entries of padding rows can point there.

`DenseCache` is the BF16 cache beside it: the baseline, and the ring of layers with a short sliding window.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .arithmetic import exact_arithmetic, refuse_gradients
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


@torch.inference_mode(False)  # a cache outlives the mode it was made in
@exact_arithmetic
def allocate_layer_cache(
    config: CacheConfig,
    batch: int,
    max_length: int,
    num_pages: int | None = None,
    num_window_pages: int | None = None,
    device: torch.device | str | None = None,
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
    arrays = {
        name: torch.zeros(shape, dtype=getattr(torch, dtypes[name]), device=device)
        for name, shape in shapes.items()
    }

    def table(columns: int, own: int) -> Tensor:
        """Column i of a sequence is its page i modulo the number of its own pages."""
        first = 1 + own * torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        return (first + torch.arange(columns, dtype=torch.int32, device=device) % own) * int(owned)

    return LayerCache(
        **arrays,
        page_table=table(max_pages, kept),
        window_table=table(slots, slots),
        lengths=torch.zeros(batch, dtype=torch.int32, device=device),
        history_pages=torch.zeros(batch, dtype=torch.int32, device=device),
        config=config,
    )


@torch.inference_mode(False)  # a cache outlives the mode it was made in
@exact_arithmetic
def allocate_dense_cache(
    config: CacheConfig,
    batch: int,
    max_length: int,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
) -> DenseCache:
    """An empty BF16 cache; with `window`, a ring just long enough for a sliding window of that length."""
    _require_whole(batch=batch, max_length=max_length, window=1 if window is None else window)
    if batch < 1 or max_length < 1 or (window is not None and window < 1):
        raise ConfigError(f"batch = {batch}, max_length = {max_length}, window = {window}: all must be >= 1")
    if not dtype.is_floating_point:
        raise DTypeError(f"dtype = {dtype}, allowed: a type of floats")
    slots = max_length if window is None else min(max_length, -(-window // PAGE) * PAGE)
    shape = (batch, slots, config.num_key_value_heads, config.head_dim)
    rows = torch.zeros(shape, dtype=dtype, device=device)
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    return DenseCache(key=rows, value=torch.zeros_like(rows), lengths=lengths, window=window)


def _require_whole(**numbers: int) -> None:
    """Raises ConfigError for what counts nothing, such as 512.5."""
    for name, number in numbers.items():
        try:
            operator.index(number)
        except TypeError:
            raise ConfigError(f"{name} = {number!r}, allowed: whole numbers") from None


@exact_arithmetic
def attend[Cache: LayerCache | DenseCache](
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Cache,
    rotation: RotationArrays | None,
    *,
    new_lengths: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Cache]:
    """Attends with new tokens and stores them: the one call a decoder layer makes.

    query [B, T, N, D], key and value [B, T, K, D], new_lengths int32 [B] (rows past it are padding) ->
    rows [B, T, N, D] in the query's dtype, computed in float32, and the cache with the rows appended. One
    token is stored first and then attends to all that is stored; a chunk attends to the cache as it was and,
    exactly, to itself. `softcap` is that of `attention.decode_attention`. Raises what `append_rows` raises,
    before anything runs.
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    check_chunk(query, key, value, cache, new_lengths)
    if isinstance(cache, LayerCache):
        if query.shape[2] != cache.config.num_query_heads:
            raise ShapeError(f"query has {query.shape[2]} heads, the cache {cache.config.num_query_heads}")
        refuse_gradients("attend", (query, key, value, sink_logits))
    ops.check_implementation(implementation)
    if isinstance(cache, LayerCache):
        ops.check_softcap_kernel(implementation, softcap)
    check_capacity(cache, new_lengths, key.shape[1])
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

    key: Tensor  # bf16 [M, 64, K, D]
    value: Tensor  # bf16 [M, 64, K, D]
    destination: Tensor  # int64 [M] physical pages


@exact_arithmetic
def append_rows[Cache: LayerCache | DenseCache](
    cache: Cache,
    rotation: RotationArrays | None,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    *,
    implementation: str | None = None,
    check: bool = True,
) -> Cache:
    """Appends rows to every sequence and quantizes the recent pages that become history.

    key, value bf16 [B, T, K, D] (other floats are rounded to bf16); new_lengths int32 [B]: the first
    new_lengths[b] rows of sequence b are stored, 0 leaves it untouched. Raises ShapeError, DTypeError,
    GradientError (INT2 only) and CacheFullError, with nothing changed, when a sequence would outgrow its
    tables; with check=False (which spares the wait for the device) the caller has called `check_capacity`,
    or asks `overflowed` later.
    """
    check_rows(cache, key, value, new_lengths)
    ops.check_implementation(implementation)
    if isinstance(cache, LayerCache):
        check_rotation(cache.config, rotation)
        refuse_gradients("append_rows", (key, value))
    if check:
        check_capacity(cache, new_lengths, key.shape[1])
    return _append(cache, rotation, key, value, new_lengths, implementation)


def _append(
    cache: Any,
    rotation: Any,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    implementation: str | None,
) -> Any:
    if isinstance(cache, DenseCache):
        _append_dense(cache, key, value, new_lengths)
        return cache
    if key.shape[1] == 1 and ops.append_token(
        cache, rotation, key, value, new_lengths, implementation=implementation
    ):
        return cache
    key, value = round_to_bfloat16(key), round_to_bfloat16(value)
    new_lengths, after = _lengths_after(cache, new_lengths, key.shape[1])
    pages, history = _pages_to_quantize(cache, key, value, new_lengths)
    if pages.destination.numel():
        new_pages = ops.quantize_pages(pages.key, pages.value, rotation, implementation=implementation)
        for name, new in new_pages.items():
            getattr(cache, name)[pages.destination] = new
    _write_window(cache, key, value, new_lengths, history)
    cache.lengths.copy_(after)
    cache.history_pages.copy_(history)
    return cache


@exact_arithmetic
def overflowed(cache: LayerCache | DenseCache) -> Tensor:
    """Which sequences have outgrown their tables, bool [B]: rows of theirs are lost, and their output is NaN.

    Only where nothing checks, that is with check=False. Their length stays capacity + 1; so does that of
    sequences whose `new_lengths` were negative or more than the rows given.
    """
    return outgrown(cache)


def _lengths_after(cache: LayerCache | DenseCache, new_lengths: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """How many of `tokens` rows are stored, and the lengths then, int32 [B] each.

    A sequence that would outgrow its tables, or claims other than 0..tokens rows, stores nothing and is
    marked: its length is capacity + 1.
    """
    lost = outgrown(cache, new_lengths, tokens)
    new_lengths = torch.where(lost, 0, new_lengths)
    return new_lengths, torch.where(lost, cache.capacity + 1, cache.lengths + new_lengths)


@exact_arithmetic
def read_layer_cache(cache: LayerCache, rotation: RotationArrays, sequence: int) -> tuple[Tensor, Tensor]:
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

    def joined(window: Tensor, history_pages: Tensor) -> Tensor:
        rows = window[cache.window_table[sequence]].transpose(1, 2).float()  # [slots, 64, K, D]
        sink = rows[: config.sink_pages]
        first = config.sink_pages + history
        recent = rows[[recent_slot(first + i, config) for i in range(config.recent_slots)]]
        return torch.cat([sink, history_pages, recent]).flatten(0, 1)[:length]

    return joined(cache.window_key, key_history), joined(cache.window_value, value_history)


def live_bytes(cache: LayerCache | DenseCache, sliding_window: int | None = None) -> dict[str, int]:
    """Exact bytes of the tokens stored now, against the same tokens in BF16.

    Returns int2, window, total, bfloat16 (bytes of the same tokens as BF16 rows; of a layer with a sliding
    window, which the cache's own is by default, only as many as a BF16 ring keeps), allocated (bytes of all
    arrays), int2_pages, window_pages and tokens. Sequences that share a page count it once.
    """
    lengths = cache.lengths.tolist()
    tokens = sum(lengths)
    if sliding_window is None:
        sliding_window = cache.window if isinstance(cache, DenseCache) else cache.config.window
    kept = sum(lengths if sliding_window is None else (min(n, sliding_window) for n in lengths))
    if isinstance(cache, DenseCache):
        elements = 2 * cache.key.shape[2] * cache.key.shape[3]
        stored = sum(min(n, cache.key.shape[1]) for n in lengths) * elements * cache.key.element_size()
        return {
            "int2": 0,
            "window": stored,
            "total": stored,
            "bfloat16": kept * elements * 2,
            "allocated": cache.key.nbytes + cache.value.nbytes,
            "int2_pages": 0,
            "window_pages": 0,
            "tokens": tokens,
        }
    config = cache.config
    page_table, window_table = cache.page_table.tolist(), cache.window_table.tolist()
    int2_pages: set[int] = set()
    window_pages: set[int] = set()
    for b, (length, pages) in enumerate(zip(lengths, cache.history_pages.tolist())):
        int2_pages.update(page_table[b][:pages])
        for page in range(-(-length // PAGE)):
            if page < config.sink_pages:
                window_pages.add(window_table[b][page])
            elif page >= config.sink_pages + pages:
                window_pages.add(window_table[b][recent_slot(page, config)])
    heads, head_dim = config.num_key_value_heads, config.head_dim
    int2 = len(int2_pages) * heads * fmt.int2_page_bytes(head_dim)
    window = len(window_pages) * heads * fmt.window_page_bytes(head_dim)
    return {
        "int2": int2,
        "window": window,
        "total": int2 + window,
        "bfloat16": kept * heads * head_dim * 4,
        "allocated": sum(getattr(cache, name).nbytes for name in (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)),
        "int2_pages": len(int2_pages),
        "window_pages": len(window_pages),
        "tokens": tokens,
    }


def check_capacity(cache: LayerCache | DenseCache, new_lengths: Tensor, tokens: int | None = None) -> None:
    """Raises CacheFullError when a sequence would outgrow its tables, or its table names no page.

    ShapeError for a negative number of new rows, or more than `tokens`, the rows there are.
    """
    new = new_lengths.tolist()
    if min(new) < 0 or (tokens is not None and max(new) > tokens):
        allowed = "0 or more" if tokens is None else f"0..{tokens}, the rows given"
        raise ShapeError(f"new_lengths {new}, allowed: {allowed}")
    after = [a + b for a, b in zip(cache.lengths.tolist(), new)]
    limit = cache.capacity
    for b, length in enumerate(after):
        if length > limit:
            raise CacheFullError(f"sequence {b} would have {length} tokens, its cache holds {limit}")
    if isinstance(cache, LayerCache):
        _check_tables(cache, after, new)


def _check_tables(cache: LayerCache, after: list[int], new_lengths: list[int]) -> None:
    """Every page that the sequences need after the append must be a physical page other than 0."""
    config = cache.config
    tables = {}
    for name, table, pages in (
        ("page_table", cache.page_table, cache.key_codes.shape[0]),
        ("window_table", cache.window_table, cache.window_key.shape[0]),
    ):
        tables[name] = table.tolist()
        bad = [page for row in tables[name] for page in row if not 0 <= page < pages]
        if bad:
            raise OscarError(f"{name} names page {bad[0]}, the pool has pages 0..{pages - 1}")
    for b, (length, before) in enumerate(zip(after, cache.history_pages.tolist())):
        if new_lengths[b] == 0:
            continue
        history = max(before, config.history_pages(length))
        if 0 in tables["page_table"][b][:history]:
            raise CacheFullError(f"sequence {b} needs {history} INT2 pages, its table names fewer")
        first = config.sink_pages + history
        last = (length - 1) // PAGE
        needed = list(range(min(config.sink_pages, last + 1)))
        needed += [recent_slot(p, config) for p in range(first, last + 1)]
        if any(tables["window_table"][b][slot] == 0 for slot in needed):
            raise CacheFullError(f"sequence {b} needs {len(needed)} window pages, its table names fewer")


def _append_dense(cache: DenseCache, key: Tensor, value: Tensor, new_lengths: Tensor) -> None:
    slots, tokens = cache.key.shape[1], key.shape[1]
    new_lengths, after = _lengths_after(cache, new_lengths, tokens)
    step = torch.arange(tokens, device=key.device)
    # A chunk longer than the ring overwrites itself: only its last S rows are written.
    keep = (step < new_lengths[:, None]) & (step >= new_lengths[:, None] - slots)
    sequence, index = keep.nonzero(as_tuple=True)
    slot = (cache.lengths[sequence] + index) % slots
    for store, rows in ((cache.key, key), (cache.value, value)):
        store[sequence, slot] = rows[sequence, index].to(store.dtype)
    cache.lengths.copy_(after)


def _pages_to_quantize(
    cache: LayerCache, key: Tensor, value: Tensor, new_lengths: Tensor
) -> tuple[NewPages, Tensor]:
    """Collects the rows of the pages that leave the recent part: from the window, then from the chunk."""
    config = cache.config
    length, before = cache.lengths, cache.history_pages
    formula = (length + new_lengths - config.sink_tokens - config.recent_tokens) // PAGE
    after = torch.maximum(before, torch.where(new_lengths > 0, formula, 0))
    # At most 63 tokens wait beyond the recent window, so T more complete at most ceil(T / 64) pages. More
    # recent tokens than that can only stem from a cut inside the history, where fewer pages are due.
    count = -(-key.shape[1] // PAGE)
    index = torch.arange(count, device=key.device)
    due = index < (after - before)[:, None]
    columns = (before[:, None] + index).clamp(max=cache.page_table.shape[1] - 1)
    due &= cache.page_table.gather(1, columns.long()) > 0
    sequence, index = due.nonzero(as_tuple=True)
    page = config.sink_pages + before[sequence] + index  # [M] token pages
    source = cache.window_table[sequence, recent_slot(page, config)]
    token = page[:, None] * PAGE + torch.arange(PAGE, device=key.device)  # [M, 64]
    step = (token - length[sequence, None]).clamp(0, key.shape[1] - 1)
    is_new = (token >= length[sequence, None])[..., None, None]

    def gathered(window: Tensor, rows: Tensor) -> Tensor:
        return torch.where(is_new, rows[sequence[:, None], step], window[source].transpose(1, 2))

    destination = cache.page_table[sequence, before[sequence] + index].long()
    pages = NewPages(gathered(cache.window_key, key), gathered(cache.window_value, value), destination)
    return pages, after


def _write_window(
    cache: LayerCache, key: Tensor, value: Tensor, new_lengths: Tensor, history: Tensor
) -> None:
    """Writes the rows of the chunk that stay BF16: sink tokens and tokens past the new history."""
    config = cache.config
    step = torch.arange(key.shape[1], device=key.device)
    token = cache.lengths[:, None] + step  # [B, T]
    page = token // PAGE
    in_sink = page < config.sink_pages
    stays = in_sink | (page >= config.sink_pages + history[:, None])
    slot = torch.where(in_sink, page, recent_slot(page, config))
    physical = cache.window_table.gather(1, slot.long())
    stays &= (step < new_lengths[:, None]) & (physical > 0)
    sequence, index = stays.nonzero(as_tuple=True)
    target, row = physical[sequence, index], token[sequence, index] % PAGE
    cache.window_key[target, :, row] = key[sequence, index]
    cache.window_value[target, :, row] = value[sequence, index]
