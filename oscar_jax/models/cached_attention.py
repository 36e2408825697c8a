"""Decoding through caches: the attention strategy over INT2 or BF16 layer caches, and their allocation."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..cache import allocate_dense_cache, allocate_layer_cache, attend, live_bytes
from ..core.errors import ConfigError
from ..core.window_policy import DEFAULT_WINDOW_POLICY, WindowPolicy
from ..layer_cache import DenseCache, LayerCache
from ..rotations.rotation import LayerRotation
from .config import ModelConfig
from .linear_attention import RecurrentState, allocate_recurrent_state

AnyCache = LayerCache | DenseCache | RecurrentState  # of one layer
CACHE_KINDS = ("int2", "bf16")


class CachedAttention:
    """Attends through one cache per layer and stores the new rows; the layer states are the caches.

    `new_lengths` int32 [B] counts the rows of each sequence that are real; the rest of the T rows is padding.
    `rotations` holds a LayerRotation per layer with a LayerCache. Keys and values are rounded to the cache's
    dtype before anything reads them, so that a token's row is the same whether its chunk or a later one
    attends to it. `attend` is `cache.attend`, or its like on a mesh. Raises ConfigError for a layer without
    rotation.
    """

    def __init__(
        self,
        config: ModelConfig,
        rotations: Mapping[int, LayerRotation],
        new_lengths: jax.Array,
        *,
        implementation: str | None = None,
        attend: Callable[..., tuple[jax.Array, Any]] = attend,
    ) -> None:
        self.config, self.rotations, self.new_lengths = config, rotations, new_lengths
        self.implementation, self.attend = implementation, attend

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any, **sinks: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer; see `decoder.Attention`. Returns [B, T, N, D] and the cache."""
        if isinstance(state, LayerCache) and layer not in self.rotations:
            raise ConfigError(
                f"layer {layer} has an INT2 cache but no rotation, have: {sorted(self.rotations)}"
            )
        dtype = state.key.dtype if isinstance(state, DenseCache) else jnp.bfloat16
        return self.attend(
            query,
            key.astype(dtype),
            value.astype(dtype),
            state,
            self.rotations.get(layer),
            new_lengths=self.new_lengths,
            softmax_scale=self.config.attention_scale,
            sliding_window=self.config.layer_windows[layer],
            softcap=self.config.attention_softcap,
            implementation=self.implementation,
            **sinks,
        )


def int2_layers(
    config: ModelConfig, *, window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY
) -> tuple[int, ...]:
    """Layers whose cache is INT2; others keep a BF16 ring of a short window, or no keys at all."""
    paged = window_policy.int2_layers(config.layer_windows)
    return tuple(layer for layer in paged if layer not in config.linear_layers)


def allocate_model_cache(
    config: ModelConfig,
    batch: int,
    max_length: int,
    *,
    kind: str = "int2",
    window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
    dtype: DTypeLike = jnp.bfloat16,
    chunk: int = 512,
    **windows: int,
) -> list[AnyCache]:
    """Empty caches, one per layer, for `batch` sequences of up to `max_length` tokens.

    kind "int2": INT2 pages, except for layers that keep a BF16 ring by `window_policy`. kind "bf16": dense,
    rings where there is a window; `dtype` other than bfloat16 is for comparisons. Either way linear layers
    have a RecurrentState. INT2 pages that no window can reach any more are given up; `chunk`: the most tokens
    of one append. `windows` are `sink_tokens`, `recent_tokens`. Raises ConfigError.
    """
    if kind not in CACHE_KINDS:
        raise ConfigError(f"cache kind {kind!r}, allowed: {', '.join(CACHE_KINDS)}")
    geometry = config.cache_config(**windows)
    paged = int2_layers(config, window_policy=window_policy) if kind == "int2" else ()

    def allocate(layer: int, window: int | None) -> AnyCache:
        if config.linear is not None and layer in config.linear_layers:
            return allocate_recurrent_state(config.linear, batch)
        if layer in paged:
            behind = dataclasses.replace(geometry, window=window)
            return allocate_layer_cache(behind, batch, max_length, chunk=chunk)
        return allocate_dense_cache(geometry, batch, max_length, window=window, dtype=dtype)

    return [allocate(layer, window) for layer, window in enumerate(config.layer_windows)]


def model_live_bytes(caches: Sequence[AnyCache], config: ModelConfig) -> dict[str, int]:
    """`cache.live_bytes` summed over layers: stored bytes, bytes of a BF16 cache (with rings), pages.

    Recurrent states, whose size no cache kind and no length changes, are not counted.
    """
    per_layer = [
        live_bytes(cache, window)
        for cache, window in zip(caches, config.layer_windows)
        if not isinstance(cache, RecurrentState)
    ]
    return {name: sum(layer[name] for layer in per_layer) for name in per_layer[0]}
