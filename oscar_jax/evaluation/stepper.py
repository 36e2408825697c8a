"""Steps a decoder through text with any mixture of caches, and measures each layer's attention on the way.

Three kinds of cache stand behind one call: the BF16 `DenseCache`, the 2-bit `LayerCache`, and the
`SimulatedCache` of the asymmetric recipes, which keeps rows as a recipe would return them beside the exact
rows and reads them for exactly the tokens whose pages would be INT2.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..attention import chunk_attention, decode_attention
from ..cache import allocate_dense_cache, allocate_layer_cache, append_rows, live_bytes
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..layer_cache import DenseCache
from ..models.cached_attention import CachedAttention
from ..models.config import ModelConfig
from ..quantize import round_to_bfloat16
from . import fidelity


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table: a name, how its cache works, and one rotation (or recipe) per quantized layer."""

    name: str
    kind: str  # "bf16" | "int2" | "simulated"
    rotations: Mapping[int, Any]  # layer -> LayerRotation | AsymmetricRecipe; empty for bf16
    bits: float  # per stored element of the quantized history
    basis: str = ""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["exact", "restored"], meta_fields=["config"]
)
@dataclasses.dataclass(frozen=True)
class SimulatedCache:
    """Exact rows (BF16) beside the same rows quantized and restored (float32), both full length."""

    exact: DenseCache
    restored: DenseCache
    config: CacheConfig


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model ready to be stepped with any mixture of caches; build it with `make_runner`."""

    config: ModelConfig
    state: Any  # the model's arrays
    step: Callable[..., tuple[jax.Array, list[Any], list[jax.Array]]]
    log_probabilities: Callable[..., jax.Array]
    next_token: Callable[..., jax.Array]


def make_runner(model: Any, config: ModelConfig) -> Runner:
    """Compiled steps of a decoder: hidden rows through caches, log-probabilities, and their comparison."""
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, static_argnames=("capture",), donate_argnums=(2,))
    def step(state, tokens, caches, new_lengths, rotations, capture: tuple[int, ...] = ()):
        # tokens int32 [B, T] -> hidden [B, T, H], caches, queries of the captured layers [B, T, N, D]
        queries: list[jax.Array] = []

        strategy = AnyAttention(config, rotations, new_lengths)

        def attention(layer: int, query, key, value, cache):
            if layer in capture:
                queries.append(query)
            return strategy(layer, query, key, value, cache)

        positions = caches_length(caches)[:, None] + jnp.arange(tokens.shape[1])
        hidden, caches = nnx.merge(graph, state).hidden_states(
            tokens, caches, positions=positions, attention=attention
        )
        return hidden, caches, queries

    @jax.jit
    def log_probabilities(state, hidden, index):  # hidden [1, T, H], index int32 [R] -> float32 [R, V]
        logits = nnx.merge(graph, state).logits(hidden[0, index])
        return jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)

    @jax.jit
    def next_token(state, hidden):  # [B, H] -> int32 [B]
        return jnp.argmax(nnx.merge(graph, state).logits(hidden), axis=-1).astype(jnp.int32)

    return Runner(config, state, step, log_probabilities, next_token)


@jax.jit
def compare_distributions(
    reference: jax.Array, log_q: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Row-wise negative log-likelihood, KL(reference || q) in nats, and equality of the argmax.

    reference, log_q float32 [R, V] log-probabilities; targets int32 [R]. Returns float32, float32, bool [R].
    """
    nll = -jnp.take_along_axis(log_q, targets[:, None], axis=-1)[:, 0]
    kl = jnp.sum(jnp.exp(reference) * (reference - log_q), axis=-1)
    return nll, kl, jnp.argmax(reference, axis=-1) == jnp.argmax(log_q, axis=-1)


class AnyAttention:
    """The decoder's attention strategy over any mixture of the three caches; see `decoder.Attention`."""

    def __init__(self, config: ModelConfig, rotations: Mapping[int, Any], new_lengths: jax.Array) -> None:
        self.config, self.rotations, self.new_lengths = config, rotations, new_lengths
        self.cached = CachedAttention(config, rotations, new_lengths)

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer: rows [B, T, N, D] and the cache with the rows appended."""
        # Every method must read the same rows: those that a cache stores.
        key, value = round_to_bfloat16(key), round_to_bfloat16(value)
        if not isinstance(state, SimulatedCache):
            return self.cached(layer, query, key, value, state)
        options = {
            "softmax_scale": self.config.attention_scale,
            "sliding_window": self.config.layer_windows[layer],
        }
        rotation = self.rotations[layer]
        return _attend_simulated(query, key, value, state, rotation, self.new_lengths, options)


def _attend_simulated(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: SimulatedCache,
    recipe: fidelity.AsymmetricRecipe,
    new_lengths: jax.Array,
    options: dict[str, Any],
) -> tuple[jax.Array, SimulatedCache]:
    """`cache.attend` over rows as the recipe would return them, with the same windows as the INT2 cache."""
    restored = fidelity.reconstruct_rows(key, value, recipe)
    appended = SimulatedCache(
        append_rows(cache.exact, None, key, value, new_lengths),
        append_rows(cache.restored, None, *restored, new_lengths),
        cache.config,
    )
    if query.shape[1] == 1:
        return decode_attention(query[:, 0], _mixed_rows(appended), None, **options)[:, None], appended
    mixed = _mixed_rows(cache)
    return chunk_attention(query, key, value, mixed, None, new_lengths=new_lengths, **options), appended


def _mixed_rows(cache: SimulatedCache) -> DenseCache:
    """The rows attention reads: restored where their page would be INT2, exact elsewhere."""
    exact, restored = cache.exact, cache.restored
    coded = fidelity.coded_mask(exact.lengths, exact.key.shape[1], cache.config)[..., None, None]
    return dataclasses.replace(
        exact,
        key=jnp.where(coded, restored.key, exact.key.astype(jnp.float32)),
        value=jnp.where(coded, restored.value, exact.value.astype(jnp.float32)),
    )


def caches_length(caches: Sequence[Any]) -> jax.Array:
    """Tokens stored per sequence, int32 [B]; every layer's cache has the same."""
    first = caches[0]
    return first.exact.lengths if isinstance(first, SimulatedCache) else first.lengths


def allocate_caches(
    method: Method, config: ModelConfig, max_length: int, batch: int = 1, full: Sequence[int] = ()
) -> list[Any]:
    """Empty caches, one per layer; windowed layers outside `method.rotations` and `full` get rings."""
    geometry = config.cache_config()
    caches: list[Any] = []
    for layer, window in enumerate(config.layer_windows):
        if layer not in method.rotations:
            ring = None if layer in full else window
            caches.append(allocate_dense_cache(geometry, batch, max_length, window=ring))
        elif method.kind == "int2":
            caches.append(allocate_layer_cache(geometry, batch, max_length))
        else:
            exact = allocate_dense_cache(geometry, batch, max_length)
            restored = allocate_dense_cache(geometry, batch, max_length, dtype=jnp.float32)
            caches.append(SimulatedCache(exact, restored, geometry))
    return caches


def layer_error(
    query: Any,
    positions: Any,
    key: jax.Array,
    value: jax.Array,
    rotation: Any,
    config: ModelConfig,
    layer: int,
) -> dict[str, float]:
    """Attention KL and relative output error of one layer on exact inputs, means over heads.

    query [T, N, D] at `positions` [T], NumPy or JAX; key, value [S, K, D] exact; rotation a LayerRotation or
    a recipe.
    """
    if not len(positions):
        return {"kl": 0.0, "output_error": 0.0, "value_error": 0.0}
    errors = _layer_error(
        jnp.asarray(query),
        jnp.asarray(positions),
        key,
        value,
        rotation,
        geometry=config.cache_config(),
        softmax_scale=config.attention_scale,
        sliding_window=config.layer_windows[layer],
    )
    return {name: float(np.asarray(values).mean()) for name, values in errors.items()}


@functools.partial(jax.jit, static_argnames=("geometry", "softmax_scale", "sliding_window"))
def _layer_error(query, positions, key, value, rotation, *, geometry, softmax_scale, sliding_window):
    if isinstance(rotation, fidelity.AsymmetricRecipe):
        restored = fidelity.reconstruct_rows(key, value, rotation)
    else:
        restored = fidelity.reconstruct_pages(key, value, rotation)
    return fidelity.attention_error(
        query,
        positions,
        key,
        value,
        *restored,
        geometry=geometry,
        softmax_scale=softmax_scale,
        sliding_window=sliding_window,
    )


def method_bytes(method: Method, caches: Sequence[Any], config: ModelConfig) -> dict[str, int]:
    """Live cache bytes of the quantized layers and of the whole model, against BF16 rows of the same tokens.

    Simulated recipes are counted as their real cache would be: history at `method.bits` per element, windows
    in BF16.
    """
    totals = {"quantized_layers": 0, "all_layers": 0, "all_layers_bf16": 0}
    for layer, cache in enumerate(caches):
        if isinstance(cache, SimulatedCache):
            geometry = cache.config
            length = int(cache.exact.lengths[0])
            history = fmt.PAGE_TOKENS * geometry.history_pages(length)
            elements = 2 * geometry.num_key_value_heads * geometry.head_dim
            dense = 2 * elements * length
            live = round(history * elements * method.bits / 8) + 2 * elements * (length - history)
        else:
            stored = live_bytes(cache)
            live, dense = stored["total"], stored["bfloat16"]
            if isinstance(cache, DenseCache) and config.layer_windows[layer] is not None:
                window = config.layer_windows[layer]
                row = dense // max(1, stored["tokens"])
                live = dense = row * min(stored["tokens"], window or stored["tokens"])
        if layer in method.rotations:
            totals["quantized_layers"] += live
        totals["all_layers"] += live
        totals["all_layers_bf16"] += dense
    return totals
