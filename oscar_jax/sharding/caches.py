"""Caches, rotations and attention on a mesh: key/value heads along `model`, sequences along `data`.

A cache on a mesh is an ordinary cache whose page numbers run on from one data shard to the next: shard s of a
pool of P pages has pages s P/data ... (s + 1) P/data - 1, of which the first is its reserved one. So what
reads a cache as a whole (`read_layer_cache`, `live_bytes`, plain `jit`) needs to know nothing of the mesh,
and `attend` here gives each device its own pages, its own tables counted from 0, and its own heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from .. import cache as one_device
from ..arithmetic import traced
from ..cache import allocate_dense_cache, allocate_layer_cache, check_capacity
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..core.window_policy import DEFAULT_WINDOW_POLICY, WindowPolicy
from ..layer_cache import DenseCache, LayerCache, RotationArrays, check_chunk, check_query
from ..models.cached_attention import CACHE_KINDS, AnyCache, int2_layers
from ..models.config import ModelConfig
from ..models.experts import DATA_AXIS, MODEL_AXIS
from ..models.linear_attention import RecurrentState, allocate_recurrent_state
from .mesh import check_batch, on_mesh

POOLED = (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)  # arrays of pages; the others are of sequences
# Tables, and an array of the pool that each points into.
TABLES = {"page_table": "key_codes", "window_table": "window_key"}
ROWS = PartitionSpec(DATA_AXIS, None, MODEL_AXIS)  # [B, T, heads, D]


def cache_specs[Cache: AnyCache](cache: Cache) -> Cache:
    """How the arrays of a cache lie on a mesh, as a cache of PartitionSpecs."""
    pages, sequences = PartitionSpec(DATA_AXIS, MODEL_AXIS), PartitionSpec(DATA_AXIS)
    if isinstance(cache, DenseCache):
        return dataclasses.replace(cache, key=ROWS, value=ROWS, lengths=sequences)  # type: ignore[arg-type]
    if isinstance(cache, RecurrentState):
        return jax.tree.map(lambda array: sequences, cache)
    names = [field.name for field in dataclasses.fields(cache) if field.name != "config"]
    specs: dict[str, Any] = {name: pages if name in POOLED else sequences for name in names}
    return dataclasses.replace(cache, **specs)


def cache_shardings[Cache: AnyCache](cache: Cache, mesh: Mesh) -> Cache:
    """The same as shardings of a mesh."""
    return jax.tree.map(lambda spec: on_mesh(mesh, *spec), cache_specs(cache))


def rotation_specs(rotation: Any) -> Any:
    """How a rotation's arrays lie on a mesh: by head, or on every device if all heads share them."""
    return jax.tree.map(lambda x: PartitionSpec(MODEL_AXIS) if x.shape[0] > 1 else PartitionSpec(), rotation)


def spread_heads(config: CacheConfig, mesh: Mesh) -> CacheConfig:
    """The geometry of a whole cache on a mesh: key/value heads fewer than devices are copied.

    Raises ConfigError unless heads and devices divide.
    """
    heads, shards = config.num_key_value_heads, mesh.shape[MODEL_AXIS]
    if (heads % shards and shards % heads) or config.num_query_heads % shards:
        raise ConfigError(
            f"{config.num_query_heads} query heads and {heads} key/value heads do not spread over "
            f"model = {shards}, allowed: divisors of both (of the latter also multiples)"
        )
    return dataclasses.replace(config, num_key_value_heads=max(heads, shards))


def allocate_model_cache(
    config: ModelConfig,
    batch: int,
    max_length: int,
    mesh: Mesh,
    *,
    kind: str = "int2",
    window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
    dtype: DTypeLike = jnp.bfloat16,
    **windows: int,
) -> list[AnyCache]:
    """As `models.cached_attention.allocate_model_cache`, on a mesh; no array is ever whole on one device.

    `config` is the checkpoint's or that `for_shards`; `batch` a multiple of the mesh's data axis.
    Raises ConfigError.
    """
    if kind not in CACHE_KINDS:
        raise ConfigError(f"cache kind {kind!r}, allowed: {', '.join(CACHE_KINDS)}")
    check_batch(batch, mesh)
    geometry = spread_heads(config.cache_config(**windows), mesh)
    paged = int2_layers(config, window_policy=window_policy) if kind == "int2" else ()

    def allocate(layer: int, window: int | None) -> AnyCache:
        linear = config.linear
        if linear is None or layer not in config.linear_layers:
            return _allocate(geometry, batch, max_length, mesh, layer in paged, window, jnp.dtype(dtype))
        return _placed(lambda: allocate_recurrent_state(linear, batch), mesh)

    return [allocate(layer, window) for layer, window in enumerate(config.layer_windows)]


def _allocate(
    config: CacheConfig,
    batch: int,
    max_length: int,
    mesh: Mesh,
    paged: bool,
    window: int | None,
    dtype: DTypeLike,
) -> LayerCache | DenseCache:
    def make() -> LayerCache | DenseCache:
        if not paged:
            return allocate_dense_cache(config, batch, max_length, window=window, dtype=dtype)
        shards = mesh.shape[DATA_AXIS]
        each = batch // shards  # sequences of a data shard
        pages, slots = max(1, config.history_pages(max_length)), config.window_slots
        cache = allocate_layer_cache(
            config, batch, max_length, shards * (1 + each * pages), shards * (1 + each * slots)
        )
        owner = (jnp.arange(batch, dtype=jnp.int32) // each)[:, None]  # and so many reserved pages before
        tables = {
            name: 1 + owner + jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
            for name, columns in (("page_table", pages), ("window_table", slots))
        }
        return dataclasses.replace(cache, **tables)

    return _placed(make, mesh)


def _placed[Cache: AnyCache](make: Callable[[], Cache], mesh: Mesh) -> Cache:
    """What `make` makes, each part on its device from the start."""
    return jax.jit(make, out_shardings=cache_shardings(jax.eval_shape(make), mesh))()


def place_cache[Cache: LayerCache | DenseCache](cache: Cache, mesh: Mesh) -> Cache:
    """A cache of one device on a mesh: pages move to their sequence's shard, heads are copied if need be.

    A page that sequences of several shards share is copied; pages that no table names are not kept, but as
    many are free afterwards. Raises ConfigError unless sequences and heads divide among the devices.
    """
    check_batch(cache.batch, mesh)
    shards = mesh.shape[MODEL_AXIS]
    if isinstance(cache, DenseCache):
        heads = spread_heads(CacheConfig(cache.heads, cache.heads * shards, cache.head_dim), mesh)
        copies = heads.num_key_value_heads // cache.heads
        rows = {name: jnp.repeat(getattr(cache, name), copies, axis=2) for name in ("key", "value")}
        return jax.device_put(dataclasses.replace(cache, **rows), cache_shardings(cache, mesh))
    config = spread_heads(cache.config, mesh)
    copies = config.num_key_value_heads // cache.heads
    changes: dict[str, Any] = {}
    for name, arrays in (("page_table", fmt.INT2_ARRAYS), ("window_table", fmt.WINDOW_ARRAYS)):
        pool = getattr(cache, TABLES[name]).shape[0]
        changes[name], order = _renumbered(np.asarray(getattr(cache, name)), pool, mesh.shape[DATA_AXIS])
        for array in arrays:
            changes[array] = jnp.repeat(getattr(cache, array)[order], copies, axis=1)
    placed = dataclasses.replace(cache, config=config, **changes)
    return jax.device_put(placed, cache_shardings(placed, mesh))


def _renumbered(table: np.ndarray, pages: int, shards: int) -> tuple[np.ndarray, np.ndarray]:
    """The table int32 [B, columns] with each shard's pages in its part of the pool, and where each was."""
    parts = np.split(table, shards)
    used = [np.unique(part[part > 0]) for part in parts]
    each = 1 + max(-(-(pages - 1) // shards), *(len(found) for found in used))
    order = np.zeros(each * shards, np.int64)
    for shard, found in enumerate(used):
        order[shard * each + 1 : shard * each + 1 + len(found)] = found
    new = [
        np.where(part > 0, shard * each + 1 + np.searchsorted(found, part), 0)
        for shard, (part, found) in enumerate(zip(parts, used))
    ]
    return np.concatenate(new).astype(np.int32), order


def place_rotations[Rotations](rotations: Rotations, mesh: Mesh, num_key_value_heads: int) -> Rotations:
    """Rotations, any tree of `LayerRotation`, on a mesh: each device has those of its heads."""
    copies = max(1, mesh.shape[MODEL_AXIS] // num_key_value_heads)

    def place(array: Any) -> jax.Array:
        array = np.asarray(array)
        per_head = array.shape[0] > 1
        array = np.repeat(array, copies, axis=0) if per_head else array
        return jax.device_put(array, on_mesh(mesh, MODEL_AXIS if per_head else None))

    return jax.tree.map(place, rotations)


def attend[Cache: LayerCache | DenseCache](
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    rotation: RotationArrays | None,
    *,
    mesh: Mesh,
    new_lengths: jax.Array,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: jax.Array | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """`cache.attend` on a mesh: each device attends with its sequences and heads, and asks no other.

    The cache is one of `allocate_model_cache` or `place_cache`; query, key, value, rotation and sink_logits
    have its (copied) heads. Works under `jit`, with automatic or explicit axes, and outside; kernels run as
    on one device. Raises what `cache.attend` raises.
    """
    check_query(query, cache, rotation, sink_logits, softmax_scale, sliding_window, softcap)
    check_chunk(query, key, value, cache, new_lengths)
    arrays = (query, key, value, cache, rotation, new_lengths, sink_logits)
    settings = (softmax_scale, sliding_window, softcap, implementation)
    if traced(arrays):
        return _attend(*arrays, mesh=mesh, settings=settings)
    check_capacity(cache, new_lengths, key.shape[1])
    return _attend_compiled(*arrays, mesh=mesh, settings=settings)


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    rotation: Any,
    new_lengths: jax.Array,
    sink_logits: jax.Array | None,
    *,
    mesh: Mesh,
    settings: tuple[float, int | None, float | None, str | None],
) -> tuple[jax.Array, Any]:
    specs = cache_specs(cache)
    sequences, heads = PartitionSpec(DATA_AXIS), PartitionSpec(MODEL_AXIS)
    softmax_scale, sliding_window, softcap, implementation = settings

    def of_a_shard(query, key, value, cache, rotation, new_lengths, sink_logits):
        out, new = one_device.attend(
            query,
            key,
            value,
            _of_this_device(cache, mesh),
            rotation,
            new_lengths=new_lengths,
            softmax_scale=softmax_scale,
            sliding_window=sliding_window,
            sink_logits=sink_logits,
            softcap=softcap,
            implementation=implementation,
        )
        if isinstance(cache, LayerCache):  # what it was given: tables never change here
            new = dataclasses.replace(
                new, config=cache.config, page_table=cache.page_table, window_table=cache.window_table
            )
        return out, new

    return jax.shard_map(
        of_a_shard,
        mesh=mesh,
        in_specs=(ROWS, ROWS, ROWS, specs, rotation_specs(rotation), sequences, heads),
        out_specs=(ROWS, specs),
        check_vma=False,
    )(query, key, value, cache, rotation, new_lengths, sink_logits)


_attend_compiled = functools.partial(jax.jit, static_argnames=("mesh", "settings"))(_attend)


def _of_this_device[Cache: LayerCache | DenseCache](cache: Cache, mesh: Mesh) -> Cache:
    """Inside `shard_map`: the part of a cache on this device as a cache of its own, pages counted from 0."""
    if isinstance(cache, DenseCache):
        return cache
    shards = mesh.shape[MODEL_AXIS]
    config = dataclasses.replace(
        cache.config,
        num_key_value_heads=cache.config.num_key_value_heads // shards,
        num_query_heads=cache.config.num_query_heads // shards,
    )
    shard = jax.lax.axis_index(DATA_AXIS)
    tables = {}
    for name, array in TABLES.items():
        table, pages = getattr(cache, name), getattr(cache, array).shape[0]
        own = table - shard * pages
        tables[name] = jnp.where((table > 0) & (own > 0) & (own < pages), own, 0)
    return dataclasses.replace(cache, config=config, **tables)
