"""What a decoder must offer to be calibrated, evaluated and to generate; how a plain function becomes one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from ..core.errors import ConfigError, ShapeError
from .config import ModelConfig
from .decoder import Attention, CausalAttention

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


@runtime_checkable
class LanguageModel(Protocol):
    """A decoder, a Flax NNX module whose parameters are `nnx.Param`; `Decoder` and every model of yours.

    Its geometry is said apart, by a `ModelConfig` with `family="custom"`.
    """

    dtype: Any  # of its rows

    def hidden_states(
        self,
        tokens: jax.Array,
        states: Sequence[Any] | None = None,
        *,
        positions: jax.Array,
        attention: Attention,
    ) -> tuple[jax.Array, list[Any]]:
        """Rows [B, T, H] of tokens int32 [B, T] at positions int32 [B, T], and each layer's new state.

        Every layer calls `attention(layer, query, key, value, states[layer])` once, in ascending order.
        """
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of rows [..., H]."""
        ...


class PlainDecoder(nnx.Module):
    """A decoder of plain functions over a tree of arrays, as a `LanguageModel`.

    `forward(params, tokens, positions, attend)` returns rows [B, T, H]. Inside, every layer has its attention
    from `attend(layer, query, key, value)`: rows [B, T, N or K, D] in, [B, T, N, D] in the query's dtype out;
    once per layer, in ascending order, outside of loops that JAX traces. `logits(params, rows)` returns
    [..., V]. Raises ConfigError for layers left out or in another order, ShapeError for other geometry.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        forward: Callable[[Any, jax.Array, jax.Array, Attend], jax.Array],
        logits: Callable[[Any, jax.Array], jax.Array],
        *,
        dtype: Any = jnp.float32,
    ) -> None:
        self.config, self.dtype = config, jnp.dtype(dtype)
        leaves, self.structure = jax.tree.flatten(params)
        self.params = nnx.List([nnx.Param(jnp.asarray(leaf)) for leaf in leaves])
        self.forward, self.project = forward, logits

    def _tree(self) -> Any:
        return jax.tree.unflatten(self.structure, [leaf[...] for leaf in self.params])

    def hidden_states(
        self,
        tokens: jax.Array,
        states: Sequence[Any] | None = None,
        *,
        positions: jax.Array | None = None,
        attention: Attention | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """See `LanguageModel`; by default positions 0 ... T-1 and exact causal attention."""
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        strategy = CausalAttention(self.config) if attention is None else attention
        new: list[Any] = []

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            if layer != len(new):
                raise ConfigError(f"attend was called for layer {layer}, expected layer {len(new)}")
            check_rows(self.config, tokens.shape, query, key, value)
            out, state = strategy(layer, query, key, value, None if states is None else states[layer])
            new.append(state)
            return out.astype(query.dtype)

        rows = self.forward(self._tree(), tokens, positions, attend)
        if len(new) != self.config.num_layers:
            raise ConfigError(f"attend was called for {len(new)} layers, expected {self.config.num_layers}")
        return rows.astype(self.dtype), new

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `LanguageModel`."""
        return self.project(self._tree(), hidden).astype(jnp.float32)


def check_rows(
    config: ModelConfig, shape: tuple[int, ...], query: jax.Array, key: jax.Array, value: jax.Array
) -> None:
    """Raises ShapeError unless the rows of tokens [B, T] have the heads and channels of the configuration."""
    for name, rows, heads in (
        ("query", query, config.num_query_heads),
        ("key", key, config.num_key_value_heads),
        ("value", value, config.num_key_value_heads),
    ):
        if rows.shape != (*shape, heads, config.head_dim):
            raise ShapeError(f"{name} has shape {rows.shape}, expected {(*shape, heads, config.head_dim)}")
