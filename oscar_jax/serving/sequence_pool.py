"""Many sequences of one model over one set of pages: the array half of a serving cache.

`PagePool` decides in plain integers which page belongs to whom; `SequencePool` owns the arrays of every layer
and executes the decisions. One page table serves all layers. A batch is a list of sequences in any order and
of any lengths: `begin` hands out ordinary `LayerCache` views for the model to run on, `finish` takes them
back. A `None` in the list is a padding row: its table points at the reserved page 0 and its length is 0.

    pool = SequencePool(configs, rotations, model_id="...", max_length=4096)
    sequence = pool.create(prompt)                  # holds what is already stored of the prompt
    step = pool.begin([sequence], tokens=[prompt[pool.length(sequence):]])
    logits, caches = model(step.tokens, step.caches, step.new_lengths)
    pool.finish(step, caches)

A step that fails between the two is dropped by `abort`, which restores every sequence of it.

Sharing keeps results equal to the bit if a row's keys and values do not depend on who else is in the batch;
that is up to the model and its shapes, not to the cache.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..cache import allocate_layer_cache, append_rows, check_rows, read_layer_cache
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import CacheFullError, CheckpointError, ConfigError, ShapeError
from ..core.page_allocator import PageStateError
from ..core.page_pool import PagePool
from ..core.page_records import (
    AppendPlan,
    PoolStatistics,
    entries,
    token_ids,
    whole_number,
    whole_numbers,
)
from ..layer_cache import LayerCache, check_rotation
from ..rotations.rotation import LayerRotation
from .snapshot import digest_rotations, pool_identity, read_snapshot, write_snapshot


@dataclasses.dataclass
class Step:
    """One batch between `begin` and `finish`: views of every layer, and how many tokens each row appends.

    `tokens` int32 [B, T] is padded with 0 (None where only counts were given); `new_lengths` int32 [B];
    `lengths` are the lengths after the step.
    """

    caches: list[LayerCache]
    new_lengths: jax.Array
    tokens: jax.Array | None
    lengths: list[int]
    plan: AppendPlan


class SequencePool:
    """The cache of one model for many sequences; arrays live on `device`.

    `configs` and `rotations` hold one entry per layer; layers may differ in heads and head_dim, not in the
    lengths of sink and recent part. `max_length` bounds every sequence. By default there is room for
    `max_sequences` of that length; `max_bytes` bounds all arrays together, the reserved pages included, and
    then decides the number of INT2 pages. `grid_tokens` is the chunk in which prompts are prefilled. Raises
    ConfigError before anything is allocated, also for hybrids: a layer with linear attention has no pages to
    share; ShapeError or DTypeError for rotations of other heads.
    """

    def __init__(
        self,
        configs: Sequence[CacheConfig],
        rotations: Sequence[LayerRotation],
        *,
        model_id: str,
        max_length: int,
        max_sequences: int = 8,
        max_bytes: int | None = None,
        int2_pages: int | None = None,
        window_pages: int | None = None,
        grid_tokens: int = fmt.PAGE_TOKENS,
        device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        config = check_layers(configs, rotations)
        options = {"max_length": max_length, "max_sequences": max_sequences}
        options |= {"int2_pages": int2_pages, "window_pages": window_pages}
        for name, number in (options | {"max_bytes": max_bytes}).items():
            if number is not None and whole_number(name, number, ConfigError) < 1:
                raise ConfigError(f"{name} = {number}, allowed: >= 1")
        if not isinstance(model_id, str):
            raise ConfigError(f"model_id = {model_id!r}, allowed: a name")
        int2_bytes = sum(c.num_key_value_heads * fmt.int2_page_bytes(c.head_dim) for c in configs)
        window_bytes = sum(c.num_key_value_heads * fmt.window_page_bytes(c.head_dim) for c in configs)
        self.max_pages = max(1, config.history_pages(max_length))
        if window_pages is None:
            window_pages = max_sequences * config.window_slots
        if int2_pages is None:
            int2_pages = max_sequences * self.max_pages
            if max_bytes is not None:
                left = max_bytes - (window_pages + 1) * window_bytes
                int2_pages = min(int2_pages, left // int2_bytes - 1)
        allocated = (max(int2_pages, 1) + 1) * int2_bytes + (window_pages + 1) * window_bytes
        if max_bytes is not None and allocated > max_bytes:
            raise ConfigError(
                f"max_bytes = {max_bytes}, needed: {allocated} for window_pages = {window_pages} of "
                f"{window_bytes} bytes, int2_pages = {max(int2_pages, 1)} of {int2_bytes} bytes and the two "
                "reserved pages"
            )
        self.configs = list(configs)
        self.rotations = [
            jax.tree.map(jnp.asarray, jax.device_put(rotation, device)) for rotation in rotations
        ]
        self.model_id = model_id
        self.max_length = max_length
        self._identity = pool_identity(model_id, digest_rotations(self.rotations), self.configs, grid_tokens)
        self.pages = PagePool(
            config,
            int2_pages=int2_pages,
            window_pages=window_pages,
            int2_page_bytes=int2_bytes,
            window_page_bytes=window_bytes,
            grid_tokens=grid_tokens,
        )
        with jax.default_device(device):
            self._layers = [
                allocate_layer_cache(c, 1, max_length, int2_pages + 1, window_pages + 1) for c in configs
            ]
        self._device = device
        self._step: Step | None = None
        self._lost: list[int] = []  # layers whose arrays an unfinished step has taken with it

    # ---------------------------------------------------------------- sequences

    def create(
        self,
        prompt: Sequence[int] | None = None,
        *,
        reuse: str | None = "exact",
        generated: bool = False,
        salt: bytes = b"",
    ) -> int:
        """A new sequence holding what is stored of its prompt (`PagePool.find_prefix`), else empty.

        Sequences share pages with those of the same `salt` only: give one to every adapter, image or tenant
        whose keys and values, or whose secrets, are its own.
        """
        self._require_arrays()
        return self.pages.create(prompt, reuse=reuse, generated=generated, salt=salt)

    def length(self, sequence: int) -> int:
        """Tokens stored."""
        return self.pages.state(sequence).length

    def fork(self, sequence: int) -> int:
        """A second sequence of the same content; pages are shared until one of the two writes to them."""
        return self.pages.fork(sequence)

    def truncate(self, sequence: int, length: int, *, keep_quantized: bool = False) -> int:
        """Cuts a sequence, exactly or by QuantizedTokensError (`PagePool.truncate`); returns the length."""
        return self.pages.truncate(sequence, length, keep_quantized=keep_quantized)

    def free(self, sequence: int) -> None:
        """Ends a sequence."""
        self.pages.free(sequence)

    def repeat(self, sequence: int, count: int) -> list[int]:
        """`count` sequences of the same content: the given one and forks of it."""
        return self.pages.repeat(sequence, count)

    def reorder(self, sequences: Sequence[int], sources: Sequence[int]) -> list[int]:
        """The beam step: result i continues sequences[sources[i]]; sequences nobody continues end."""
        return self.pages.reorder(sequences, sources)

    def statistics(self) -> PoolStatistics:
        """Pages, bytes and what sharing has saved."""
        return self.pages.statistics()

    # ---------------------------------------------------------------- batches

    def view(self, sequences: Sequence[int | None]) -> list[LayerCache]:
        """Views of every layer for reading the sequences, in this order; not for appending."""
        self._require_arrays()
        sequences = entries("sequences", sequences)
        tables = _Tables(len(sequences), self.max_pages, self.pages.config.window_slots)
        for i, sequence in enumerate(sequences):
            if sequence is not None:
                state = self.pages.usable(sequence)
                tables.set(
                    i, state.int2_pages, self.pages.window_row(sequence), state.length, len(state.int2_pages)
                )
        return self._views(tables)

    def begin(
        self,
        sequences: Sequence[int | None],
        *,
        tokens: Sequence[Sequence[int]] | None = None,
        counts: Sequence[int] | None = None,
    ) -> Step:
        """Reserves pages for new tokens of every sequence and returns the views to run the model on.

        Give the tokens, or only their counts (such sequences are not found by prefix lookups). Raises
        CacheFullError, with nothing changed, if they do not fit or outgrow max_length; PageStateError while
        another step is unfinished; ConfigError, ShapeError or DTypeError for what is no token or count.
        """
        self._require_no_step()
        sequences = entries("sequences", sequences)
        if tokens is not None and counts is None:
            tokens = [token_ids(row, "i") for row in entries("tokens", tokens)]
            sizes = [len(row) for row in tokens]
        elif counts is not None and tokens is None:
            sizes = whole_numbers("counts", counts)
        else:
            raise ConfigError("give either tokens or counts")
        if len(sizes) != len(sequences) or any(n and s is None for n, s in zip(sizes, sequences)):
            raise ShapeError(f"new lengths {sizes} for sequences {sequences}; a padding row appends 0")
        live = [(i, s) for i, s in enumerate(sequences) if s is not None]
        for i, sequence in live:
            if self.length(sequence) + sizes[i] > self.max_length:
                raise CacheFullError(
                    f"sequence {sequence} would have {self.length(sequence) + sizes[i]} tokens, "
                    f"max_length = {self.max_length}; nothing was changed"
                )
        plan = self.pages.begin_append(
            [s for _, s in live],
            [sizes[i] for i, _ in live],
            None if tokens is None else [tokens[i] for i, _ in live],
        )
        try:
            self._step = self._make_step(sequences, sizes, tokens, plan)
        except BaseException:
            self.pages.abort_append(plan, untouched=True)
            raise
        return self._step

    def finish(self, step: Step, caches: Sequence[LayerCache]) -> None:
        """Makes a step final; `caches` are the views after the model has appended to every layer.

        Raises ShapeError if a layer has not stored exactly the new tokens of every row.
        """
        self._check_step(step)
        caches = entries("caches", caches)
        if len(caches) != len(self._layers):
            raise ShapeError(f"{len(caches)} layer caches, the model has {len(self._layers)} layers")
        self._adopt(caches)  # first: views that were donated can be aborted then, too
        for i, lengths in enumerate(jax.device_get([cache.lengths for cache in caches])):
            if lengths.tolist() != step.lengths:
                raise ShapeError(f"layer {i} holds {lengths.tolist()} tokens, expected {step.lengths}")
        self.pages.finish_append(step.plan)
        self._step = None

    def abort(self, step: Step | None = None, *, untouched: bool = False) -> None:
        """Drops a step, the one in progress by default; its sequences are as before, also after a failure.

        In a pool without pages to spare, rows written by the model may have replaced rows that a sequence
        still needs: that sequence can only be freed then, unless `untouched` promises that no layer was
        written. In JAX a step that donated its views takes the arrays with it: PageStateError, and the pool
        is of no use any more.
        """
        self._roll_back(self._check_step(step), untouched)
        self._require_arrays()

    def append(
        self,
        sequences: Sequence[int | None],
        keys: Sequence[jax.Array],
        values: Sequence[jax.Array],
        *,
        tokens: Sequence[Sequence[int]] | None = None,
        counts: Sequence[int] | None = None,
        implementation: str | None = None,
    ) -> None:
        """Appends given rows without a model: per layer bf16 [B, T, K, D], padded rows beyond the counts."""
        step = self.begin(sequences, tokens=tokens, counts=counts)
        caches, written = list(step.caches), 0
        try:
            self._check_rows(step, keys, values)
            for i, (rotation, key, value) in enumerate(zip(self.rotations, keys, values)):
                caches[i] = append_layer(caches[i], rotation, key, value, step.new_lengths, implementation)
                written = i + 1
        except BaseException:
            self._adopt(caches)  # views of written layers were donated
            self._roll_back(step, untouched=not written)
            raise
        self.finish(step, caches)

    # ---------------------------------------------------------------- reading

    def read(self, sequence: int, layer: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer as attention sees them: float32 [L, K, D] each."""
        layer = self._layer(layer)
        return read_layer_cache(self.view([sequence])[layer], self.rotations[layer], 0)

    def sequence_arrays(self, sequence: int, layer: int) -> dict[str, np.ndarray]:
        """Everything stored for one sequence in one layer: INT2 arrays [n, ...] and window pages.

        window_key, window_value bf16 [w, K, 64, D] in the order of tokens; rows past the length are zero.
        """
        state = self.pages.usable(sequence)
        cache = self._layers[self._layer(layer)]
        window = [state.window_pages[p] for p in sorted(state.window_pages)]
        arrays = {name: _gather_pages(getattr(cache, name), state.int2_pages) for name in fmt.INT2_ARRAYS}
        arrays |= {name: _gather_pages(getattr(cache, name), window) for name in fmt.WINDOW_ARRAYS}
        used = state.length % fmt.PAGE_TOKENS
        if window and used:
            for name in fmt.WINDOW_ARRAYS:
                arrays[name][-1, :, used:] = 0
        return arrays

    # ---------------------------------------------------------------- snapshots

    def snapshot(self, sequence: int, path: str | os.PathLike[str]) -> None:
        """Writes a sequence and its salt to a safetensors file that `restore` of either package reads."""
        self._require_no_step()
        state = self.pages.usable(sequence)
        layers = [self.sequence_arrays(sequence, layer) for layer in range(len(self._layers))]
        write_snapshot(path, self._identity, state, layers)

    def restore(self, path: str | os.PathLike[str]) -> int:
        """The sequence of a snapshot, on pages of its own; the rest of this pool is untouched.

        Raises CheckpointError if the file is damaged or belongs to another model, rotation set, geometry or
        format; CacheFullError if it does not fit.
        """
        self._require_no_step()
        saved = read_snapshot(path, self._identity, self.configs)
        if saved.length > self.max_length:
            raise CacheFullError(f"{path} holds {saved.length} tokens, max_length = {self.max_length}")
        if saved.forced_pages > self.max_pages:
            raise CacheFullError(
                f"{path} holds {saved.forced_pages} INT2 pages, max_length = {self.max_length} has "
                f"{self.max_pages}"
            )
        try:
            sequence = self.pages.import_sequence(
                saved.length,
                forced_pages=saved.forced_pages,
                grid_length=saved.grid_length,
                tokens=saved.tokens,
                salt=saved.salt,
            )
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None
        state = self.pages.state(sequence)
        held = [state.window_pages[page] for page in sorted(state.window_pages)]
        for i, (cache, arrays) in enumerate(zip(self._layers, saved.layers)):
            self._layers[i] = _write_pages(cache, state.int2_pages, held, arrays)
        return sequence

    # ---------------------------------------------------------------- inside

    def _make_step(
        self,
        sequences: Sequence[int | None],
        sizes: list[int],
        tokens: Sequence[Sequence[int]] | None,
        plan: AppendPlan,
    ) -> Step:
        tables = self._step_tables(sequences, plan)
        self._copy_window_pages(plan.copies)
        padded = None if tokens is None else self._array(_padded(tokens))
        new_lengths = self._array(np.array(sizes, np.int32))
        after = [length + size for length, size in zip(tables.lengths.tolist(), sizes)]
        return Step(self._views(tables), new_lengths, padded, after, plan)

    def _step_tables(self, sequences: Sequence[int | None], plan: AppendPlan) -> "_Tables":
        tables = _Tables(len(sequences), self.max_pages, self.pages.config.window_slots)
        rows = iter(plan.rows)
        for i, sequence in enumerate(sequences):
            if sequence is not None:
                state, row = self.pages.state(sequence), next(rows)
                pages = state.int2_pages + row.int2_pages
                tables.set(i, pages, row.window_row, state.length, len(state.int2_pages))
        return tables

    def _views(self, tables: "_Tables") -> list[LayerCache]:
        # Every layer gets tables of its own: a compiled step may donate its view.
        host = (tables.page_table, tables.window_table, tables.lengths, tables.history_pages)
        placed = _copies(jax.device_put(host, self._device), len(self._layers))
        return [
            dataclasses.replace(
                cache, page_table=pages, window_table=window, lengths=lengths, history_pages=history
            )
            for cache, (pages, window, lengths, history) in zip(self._layers, placed)
        ]

    def _array(self, values: np.ndarray) -> jax.Array:
        return jax.device_put(values, self._device, may_alias=False)

    def _roll_back(self, step: Step, untouched: bool) -> None:
        names = (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)
        layers = zip(self._layers, step.caches)
        if all(getattr(layer, name) is getattr(view, name) for layer, view in layers for name in names):
            untouched = True  # what the model made of the views was never taken back
        self._lost = [
            i
            for i, layer in enumerate(self._layers)
            if any(getattr(layer, name).is_deleted() for name in names)
        ]
        self.pages.abort_append(step.plan, untouched=untouched)
        self._step = None

    def _require_arrays(self) -> None:
        if self._lost:
            raise PageStateError(
                f"the arrays of layers {self._lost} were donated to a step that was not finished, and are "
                "lost: make a new SequencePool, restore snapshots, create the other sequences again"
            )

    def _adopt(self, caches: Sequence[LayerCache]) -> None:
        names = (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)
        for i, (layer, cache) in enumerate(zip(self._layers, caches)):
            for name in names:
                old, new = getattr(layer, name), getattr(cache, name)
                if old.shape != new.shape or old.dtype != new.dtype:
                    raise ShapeError(f"layer {i}: {name} is {new.dtype} {new.shape}, expected {old.shape}")
        self._layers = [
            dataclasses.replace(layer, **{name: getattr(cache, name) for name in names})
            for layer, cache in zip(self._layers, caches)
        ]

    def _copy_window_pages(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        # Index lists of a few fixed lengths, so that few variants are compiled; the filling is dropped.
        size = _rounded(len(copies))
        source, target = np.zeros(size, np.int32), np.full(size, self.pages.window.capacity + 1, np.int32)
        source[: len(copies)], target[: len(copies)] = zip(*copies)
        for i, cache in enumerate(self._layers):
            key, value = _copy_pages(cache.window_key, cache.window_value, source, target)
            self._layers[i] = dataclasses.replace(cache, window_key=key, window_value=value)

    def _check_rows(self, step: Step, keys: Sequence[jax.Array], values: Sequence[jax.Array]) -> None:
        keys, values = entries("keys", keys), entries("values", values)
        if len(keys) != len(self._layers) or len(values) != len(self._layers):
            raise ShapeError(f"rows of {len(keys)} and {len(values)} layers, expected {len(self._layers)}")
        longest = max((row.count for row in step.plan.rows), default=0)
        for cache, key, value in zip(step.caches, keys, values):
            check_rows(cache, key, value, step.new_lengths)
            if key.shape[1] < longest:
                raise ShapeError(f"rows for {key.shape[1]} tokens, a sequence appends {longest}")

    def _layer(self, layer: int) -> int:
        if not 0 <= whole_number("layer", layer) < len(self._layers):
            raise ShapeError(f"layer = {layer}, allowed: 0..{len(self._layers) - 1}")
        return layer

    def _require_no_step(self) -> None:
        if self._step is not None:
            raise PageStateError(
                "the last step was neither finished nor aborted: call finish(step, caches), or abort() if "
                "the model failed"
            )
        self._require_arrays()

    def _check_step(self, step: Step | None) -> Step:
        if self._step is None or (step is not None and step is not self._step):
            raise PageStateError("this step is not the one in progress")
        return self._step


@dataclasses.dataclass
class _Tables:
    """Tables of one batch on the host, shared by all layers: int32 [B, ...], padding rows are zeros."""

    page_table: np.ndarray
    window_table: np.ndarray
    lengths: np.ndarray
    history_pages: np.ndarray

    def __init__(self, batch: int, max_pages: int, window_slots: int) -> None:
        self.page_table = np.zeros((batch, max_pages), np.int32)
        self.window_table = np.zeros((batch, window_slots), np.int32)
        self.lengths, self.history_pages = np.zeros(batch, np.int32), np.zeros(batch, np.int32)

    def set(self, row: int, pages: list[int], window_row: list[int], length: int, history: int) -> None:
        self.page_table[row, : len(pages)] = pages
        self.window_table[row] = window_row
        self.lengths[row], self.history_pages[row] = length, history


def _padded(tokens: Sequence[Sequence[int]]) -> np.ndarray:
    """int32 [B, T], padded with 0 to the longest row, at least one column."""
    rows = np.zeros((len(tokens), max([1, *map(len, tokens)])), np.int32)
    for row, given in zip(rows, tokens):
        row[: len(given)] = given
    return rows


def append_layer(
    cache: LayerCache,
    rotation: LayerRotation,
    key: jax.Array,
    value: jax.Array,
    new_lengths: jax.Array,
    implementation: str | None,
) -> LayerCache:
    """`cache.append_rows` as the pool runs it, on a view of the pool's arrays.

    Compiled, and the view is donated.
    """
    return _append_compiled(cache, rotation, key, value, new_lengths, implementation=implementation)


_append_compiled = jax.jit(append_rows, static_argnames="implementation", donate_argnums=0)


def check_layers(configs: Sequence[CacheConfig], rotations: Sequence[LayerRotation]) -> CacheConfig:
    """The first layer's config; raises ConfigError unless one page table can serve all layers.

    ShapeError or DTypeError where a rotation does not have its layer's heads.
    """
    configs, rotations = entries("configs", configs), entries("rotations", rotations)
    if not configs or len(configs) != len(rotations):
        raise ConfigError(
            f"{len(configs)} layer configs and {len(rotations)} rotations: one of each per layer"
        )
    for layer, (config, rotation) in enumerate(zip(configs, rotations)):
        if not isinstance(config, CacheConfig) or not isinstance(rotation, LayerRotation):
            given = f"{type(config).__name__} and {type(rotation).__name__}"
            raise ConfigError(
                f"layer {layer} has {given}, allowed: a CacheConfig and a LayerRotation for every layer; "
                "hybrids cannot be served, since linear attention has a state instead of pages"
            )
        if config.window is not None:
            raise ConfigError(
                f"layer {layer}: window = {config.window}, allowed: None, the pool keeps all pages"
            )
        check_rotation(config, rotation)
    windows = {(c.sink_tokens, c.recent_tokens) for c in configs}
    if len(windows) > 1:
        raise ConfigError(f"(sink_tokens, recent_tokens) = {sorted(windows)}: all layers must agree")
    return configs[0]


def _write_pages(
    cache: LayerCache, int2_pages: list[int], window_pages: list[int], arrays: dict[str, np.ndarray]
) -> LayerCache:
    written = {}
    for names, pages in ((fmt.INT2_ARRAYS, int2_pages), (fmt.WINDOW_ARRAYS, window_pages)):
        for name in names:
            store = getattr(cache, name)
            if pages:
                written[name] = _scatter(store, np.array(pages, dtype=np.int32), arrays[name])
    return dataclasses.replace(cache, **written)


@functools.partial(jax.jit, static_argnames="count")
def _copies(tables: tuple[jax.Array, ...], count: int) -> list[tuple[jax.Array, ...]]:
    return [tuple(jnp.copy(table) for table in tables) for _ in range(count)]


def _rounded(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()


def _gather_pages(store: jax.Array, pages: list[int]) -> np.ndarray:
    padded = np.zeros(_rounded(len(pages)), np.int32)
    padded[: len(pages)] = pages
    return np.array(_gather(store, padded)[: len(pages)])


def _bits(rows: jax.Array) -> jax.Array:
    """bf16 as uint16, so that NaN payloads and subnormals move unchanged; other types as they are."""
    return lax.bitcast_convert_type(rows, jnp.uint16) if rows.dtype == jnp.bfloat16 else rows


@jax.jit
def _gather(store: jax.Array, pages: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_bits(store)[pages], store.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(store: jax.Array, pages: jax.Array, rows: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(_bits(store).at[pages].set(_bits(rows)), store.dtype)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _copy_pages(
    key: jax.Array, value: jax.Array, source: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def copied(store: jax.Array) -> jax.Array:
        bits = _bits(store)
        return lax.bitcast_convert_type(bits.at[target].set(bits[source], mode="drop"), store.dtype)

    return copied(key), copied(value)
