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

Sharing keeps results equal to the bit if a row's keys and values do not depend on who else is in the batch;
that is up to the model and its shapes, not to the cache.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from safetensors.numpy import save_file

from ..cache import allocate_layer_cache, append_rows, check_rows, read_layer_cache
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import CacheFullError, CheckpointError, ConfigError, OscarError, ShapeError
from ..core.files import replacing_file
from ..core.page_allocator import PageStateError
from ..core.page_pool import PagePool
from ..core.page_records import AppendPlan, PoolStatistics
from ..layer_cache import LayerCache
from .snapshot import SNAPSHOT_KIND, SNAPSHOT_VERSION, _read_snapshot, digest_rotations


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
    ConfigError before anything is allocated.
    """

    def __init__(
        self,
        configs: Sequence[CacheConfig],
        rotations: Sequence[Any],
        *,
        model_id: str,
        max_length: int,
        max_sequences: int = 8,
        max_bytes: int | None = None,
        int2_pages: int | None = None,
        window_pages: int | None = None,
        grid_tokens: int = fmt.PAGE_TOKENS,
        device: Any = None,
    ) -> None:
        config = check_layers(configs, rotations)
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
        allocated = (int2_pages + 1) * int2_bytes + (window_pages + 1) * window_bytes
        if int2_pages < 1 or (max_bytes is not None and allocated > max_bytes):
            raise ConfigError(
                f"max_bytes = {max_bytes} cannot hold {window_pages} window pages of {window_bytes} bytes, "
                f"{max(int2_pages, 1)} INT2 pages of {int2_bytes} bytes and the two reserved pages"
            )
        self.configs = list(configs)
        self.rotations = [
            jax.tree.map(jnp.asarray, jax.device_put(rotation, device)) for rotation in rotations
        ]
        self.model_id = model_id
        self.max_length = max_length
        self.rotation_digest = digest_rotations(self.rotations)
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

    # ---------------------------------------------------------------- sequences

    def create(
        self, prompt: Sequence[int] | None = None, *, reuse: str | None = "exact", generated: bool = False
    ) -> int:
        """A new sequence holding what is stored of its prompt (`PagePool.find_prefix`), else empty."""
        return self.pages.create(prompt, reuse=reuse, generated=generated)

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
        rows = [None if s is None else self.pages.state(s) for s in sequences]
        return self._views(
            [
                [0] * self.max_pages if s is None else self.pages.page_row(s, self.max_pages)
                for s in sequences
            ],
            [
                [0] * self.pages.config.window_slots if s is None else self.pages.window_row(s)
                for s in sequences
            ],
            [0 if row is None else row.length for row in rows],
            [0 if row is None else len(row.int2_pages) for row in rows],
        )

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
        another step is unfinished.
        """
        self._require_no_step()
        if (tokens is None) == (counts is None):
            raise ConfigError("give either tokens or counts")
        sizes = [len(row) for row in tokens] if tokens is not None else list(counts or ())
        if len(sizes) != len(sequences) or any(n and s is None for n, s in zip(sizes, sequences)):
            raise ShapeError(f"new lengths {sizes} for sequences {list(sequences)}; a padding row appends 0")
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
        page_rows = [[0] * self.max_pages for _ in sequences]
        window_rows = [[0] * self.pages.config.window_slots for _ in sequences]
        lengths, history = [0] * len(sequences), [0] * len(sequences)
        for (i, sequence), row in zip(live, plan.rows):
            state = self.pages.state(sequence)
            pages = state.int2_pages + row.int2_pages
            page_rows[i][: len(pages)] = pages
            window_rows[i] = row.window_row
            lengths[i], history[i] = state.length, len(state.int2_pages)
        self._copy_window_pages(plan.copies)
        padded = None
        if tokens is not None:
            longest = max([1, *sizes])
            padded = self._array([[*row, *[0] * (longest - len(row))] for row in tokens])
        new_lengths = self._array(sizes)
        caches = self._views(page_rows, window_rows, lengths, history)
        after = [length + size for length, size in zip(lengths, sizes)]
        self._step = Step(caches, new_lengths, padded, after, plan)
        return self._step

    def finish(self, step: Step, caches: Sequence[LayerCache]) -> None:
        """Makes a step final; `caches` are the views after the model has appended to every layer.

        Raises ShapeError if a layer has not stored exactly the new tokens of every row.
        """
        self._check_step(step)
        if len(caches) != len(self._layers):
            raise ShapeError(f"{len(caches)} layer caches, the model has {len(self._layers)} layers")
        for i, lengths in enumerate(jax.device_get([cache.lengths for cache in caches])):
            if lengths.tolist() != step.lengths:
                raise ShapeError(f"layer {i} holds {lengths.tolist()} tokens, expected {step.lengths}")
        self._adopt(caches)
        self.pages.finish_append(step.plan)
        self._step = None

    def abort(self, step: Step) -> None:
        """Drops a step before the model has written to any layer; the sequences are as before.

        Too late once the views were donated to a compiled function.
        """
        self._check_step(step)
        self.pages.abort_append(step.plan)
        self._step = None

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
        try:
            self._check_rows(step, keys, values)
        except OscarError:
            self.abort(step)
            raise
        caches = [
            append_layer(cache, rotation, key, value, step.new_lengths, implementation)
            for cache, rotation, key, value in zip(step.caches, self.rotations, keys, values)
        ]
        self.finish(step, caches)

    # ---------------------------------------------------------------- reading

    def read(self, sequence: int, layer: int) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer as attention sees them: float32 [L, K, D] each."""
        return read_layer_cache(self.view([sequence])[layer], self.rotations[layer], 0)

    def sequence_arrays(self, sequence: int, layer: int) -> dict[str, np.ndarray]:
        """Everything stored for one sequence in one layer: INT2 arrays [n, ...] and window pages.

        window_key, window_value bf16 [w, K, 64, D] in the order of tokens; rows past the length are zero.
        """
        state = self.pages.state(sequence)
        cache = self._layers[layer]
        window = [state.window_pages[p] for p in sorted(state.window_pages)]
        arrays = {name: _gather_pages(getattr(cache, name), state.int2_pages) for name in fmt.INT2_ARRAYS}
        arrays |= {name: _gather_pages(getattr(cache, name), window) for name in fmt.WINDOW_ARRAYS}
        used = state.length % fmt.PAGE_TOKENS
        if window and used:
            for name in fmt.WINDOW_ARRAYS:
                arrays[name][-1, :, used:] = 0
        return arrays

    # ---------------------------------------------------------------- snapshots

    def snapshot(self, sequence: int, path: str | os.PathLike) -> None:
        """Writes a sequence to a safetensors file that `restore` reads back, in either package."""
        self._require_no_step()
        state = self.pages.state(sequence)
        tensors = {"tokens": np.array(state.tokens, dtype=np.int64)}
        for layer in range(len(self._layers)):
            for name, array in self.sequence_arrays(sequence, layer).items():
                tensors[f"layers.{layer}.{name}"] = array
        metadata = self._identity() | {
            "length": str(state.length),
            "forced_pages": str(state.forced_pages),
            "grid_length": str(state.grid_length),
        }
        with replacing_file(path) as partial:
            save_file(tensors, partial, metadata)

    def restore(self, path: str | os.PathLike) -> int:
        """The sequence of a snapshot, on pages of its own; the rest of this pool is untouched.

        Raises CheckpointError if the file is damaged or belongs to another model, rotation set, geometry or
        format; CacheFullError if it does not fit.
        """
        self._require_no_step()
        metadata, tensors = _read_snapshot(path)
        for name, expected in self._identity().items():
            if metadata.get(name) != expected:
                raise CheckpointError(f"{path}: {name} is {metadata.get(name)!r}, this pool has {expected!r}")
        try:
            length, forced, grid = (int(metadata[k]) for k in ("length", "forced_pages", "grid_length"))
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: metadata is incomplete: {error}") from None
        if length > self.max_length:
            raise CacheFullError(f"{path} holds {length} tokens, max_length = {self.max_length}")
        history = max(forced, self.pages.config.history_pages(length))
        window = -(-length // fmt.PAGE_TOKENS) - history
        self._check_snapshot(path, tensors, history, window)
        try:
            sequence = self.pages.import_sequence(
                length, forced_pages=forced, grid_length=grid, tokens=tensors["tokens"].tolist()
            )
        except ConfigError as error:
            raise CheckpointError(f"{path}: {error}") from None
        state = self.pages.state(sequence)
        for i, cache in enumerate(self._layers):
            arrays = {name: tensors[f"layers.{i}.{name}"] for name in (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)}
            held = [state.window_pages[page] for page in sorted(state.window_pages)]
            self._layers[i] = _write_pages(cache, state.int2_pages, held, arrays)
        return sequence

    # ---------------------------------------------------------------- inside

    def _views(
        self, page_rows: list[list[int]], window_rows: list[list[int]], lengths: list[int], history: list[int]
    ) -> list[LayerCache]:
        # Every layer gets tables of its own: a compiled step may donate its view.
        return [
            dataclasses.replace(
                cache,
                page_table=self._array(page_rows),
                window_table=self._array(window_rows),
                lengths=self._array(lengths),
                history_pages=self._array(history),
            )
            for cache in self._layers
        ]

    def _array(self, values: list) -> jax.Array:
        return jnp.array(np.array(values, dtype=np.int32), device=self._device)

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
        if len(keys) != len(self._layers) or len(values) != len(self._layers):
            raise ShapeError(f"rows of {len(keys)} and {len(values)} layers, expected {len(self._layers)}")
        longest = max((row.count for row in step.plan.rows), default=0)
        for cache, key, value in zip(step.caches, keys, values):
            check_rows(cache, key, value, step.new_lengths)
            if key.shape[1] < longest:
                raise ShapeError(f"rows for {key.shape[1]} tokens, a sequence appends {longest}")

    def _require_no_step(self) -> None:
        if self._step is not None:
            raise PageStateError("the last step was neither finished nor aborted")

    def _check_step(self, step: Step) -> None:
        if step is not self._step:
            raise PageStateError("this step is not the one in progress")

    def _identity(self) -> dict[str, str]:
        """What a snapshot must agree with, field by field."""
        geometry = [[c.num_key_value_heads, c.head_dim] for c in self.configs]
        return {
            "format": fmt.format_id(),
            "kind": f"{SNAPSHOT_KIND}/{SNAPSHOT_VERSION}",
            "model_id": self.model_id,
            "rotation_digest": self.rotation_digest,
            "layers": json.dumps(geometry),
            "sink_tokens": str(self.pages.config.sink_tokens),
            "recent_tokens": str(self.pages.config.recent_tokens),
            "grid_tokens": str(self.pages.grid_tokens),
        }

    def _check_snapshot(self, path: Any, tensors: dict[str, np.ndarray], history: int, window: int) -> None:
        expected: dict[str, tuple[str, tuple[int, ...]]] = {}
        for i, config in enumerate(self.configs):
            heads, head_dim = config.num_key_value_heads, config.head_dim
            shapes = fmt.int2_array_shapes(history, heads, head_dim)
            shapes |= fmt.window_array_shapes(window, heads, head_dim)
            dtypes = fmt.INT2_ARRAYS | fmt.WINDOW_ARRAYS
            expected |= {f"layers.{i}.{name}": (dtypes[name], shape) for name, shape in shapes.items()}
        if set(tensors) != {"tokens", *expected}:
            odd = sorted(set(tensors) ^ {"tokens", *expected})[0]
            raise CheckpointError(f"{path}: tensor {odd!r} is missing or unknown")
        for name, (dtype, shape) in expected.items():
            found = (str(tensors[name].dtype), tuple(tensors[name].shape))
            if found != (dtype, shape):
                raise CheckpointError(f"{path}: {name} is {found}, expected {(dtype, shape)}")
        if tensors["tokens"].ndim != 1 or tensors["tokens"].dtype != np.int64:
            raise CheckpointError(f"{path}: tokens must be int64 [n]")


def append_layer(
    cache: LayerCache,
    rotation: Any,
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


def check_layers(configs: Sequence[CacheConfig], rotations: Sequence[Any]) -> CacheConfig:
    """The first layer's config; raises ConfigError unless one page table can serve all layers."""
    if not configs or len(configs) != len(rotations):
        raise ConfigError(
            f"{len(configs)} layer configs and {len(rotations)} rotations: one of each per layer"
        )
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
