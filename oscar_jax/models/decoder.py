"""The decoder of every family, one Flax NNX module tree; ModelConfig says which norms and biases it has.

A layer is  x += [norm](attention([norm](x)));  x += [norm](mlp([norm](x)))  with optional bracketed norms.
How queries meet keys is not decided here: the decoder computes query, key and value rows and calls an
`Attention` strategy, so that exact, cached, fake-quantized and statistics-collecting attention are plug-ins.

Module names are those of Hugging Face's Gemma, whose norms are named by place (a family maps its own);
kernels are [in, out]. Axes: B batch, T new tokens, V vocabulary, H hidden, N query heads, K key/value
heads, D head_dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..attention import cap_scores
from ..core.errors import ShapeError
from .config import ModelConfig
from .experts import SparseMLP
from .linear_attention import GatedDeltaNet
from .products import dot_general
from .rope import apply_rope

MakeLinear = functools.partial[nnx.Linear]  # (width in, width out, use_bias=False)
_QUERY_BLOCK = 512  # queries whose scores CausalAttention holds at a time


class Attention(Protocol):
    """How a layer's queries meet keys and values: the one hook between the decoder and everything else.

    The decoder calls `attention(layer, query, key, value, state)` once per layer, layers in ascending order,
    while it is being traced; it must be functional and returns `(out, state)`.

      layer   Python int, 0-based index in the model (global; also for windowed layers).
      query   [B, T, N, D], key and value [B, T, K, D], in the model's compute dtype. Query and key are final:
              after projection bias, QK-norm and RoPE at the rows' absolute positions, not yet multiplied by
              `config.attention_scale`. Rounded to bfloat16, key and value are the rows a cache stores.
              Query head n reads key/value head n // (N // K). Row t of sequence b is token `positions[b, t]`.
      state   whatever the caller put at `states[layer]` (None without states): a cache, running sums, ...
      sinks   only of models with `config.attention_sinks`: sink_logits=float32 [N], each a score without a
              value that takes part in its query head's softmax.
      out     [B, T, N, D], any float dtype; cast to the compute dtype before the output projection.
      state   the layer's new state, handed back by the decoder in a list in layer order.

    Rows past a sequence's end (right padding) are passed through as they are; a strategy that sums over rows
    must mask them itself. The scale is `config.attention_scale`, the cap of scaled scores
    `config.attention_softcap`, the window `config.layer_windows[layer]` (None: all; w: a query sees the last
    w tokens, itself included).
    """

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any, **sinks: jax.Array
    ) -> tuple[jax.Array, Any]: ...


class CausalAttention:
    """Exact causal attention over the T rows of the call, without a cache; the state passes through.

    Scores and softmax in float32. The causal and window masks count rows, not positions; padding belongs on
    the right. Memory for scores is bounded by `B * N * 512 * T` floats.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any, **sinks: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer; see `Attention`. Returns float32 [B, T, N, D] and `state` unchanged."""
        window = self.config.layer_windows[layer]
        scale, softcap = self.config.attention_scale, self.config.attention_softcap
        return causal_attention(query, key, value, scale, window, softcap=softcap, **sinks), state


class CapturingAttention:
    """Wraps a strategy and returns each layer's (query, key, value) rows beside the inner strategy's state.

    The state handed back per layer is `(inner_state, (query, key, value))`.
    """

    def __init__(self, inner: Attention) -> None:
        self.inner = inner

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any, **sinks: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer; see `Attention`."""
        out, state = self.inner(layer, query, key, value, state, **sinks)
        return out, (state, (query, key, value))


@functools.partial(jax.jit, static_argnames=("softmax_scale", "window", "softcap"))
def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    softmax_scale: float,
    window: int | None,
    sink_logits: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal softmax attention in float32, query blocks of 512 one after the other.

    query [B, T, N, D], key and value [B, T, K, D]; `window` as in `ModelConfig.layer_windows`;
    `sink_logits` float32 [N] as in `Attention`; `softcap` as in
    `ModelConfig.attention_softcap`. Returns float32 [B, T, N, D].
    """
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    key, value = key.astype(jnp.float32), value.astype(jnp.float32)
    stored = jnp.arange(length)
    block = min(_QUERY_BLOCK, length)
    blocks = -(-length // block)
    query = jnp.pad(
        query.astype(jnp.float32) * softmax_scale, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0))
    )
    query = query.reshape(batch, blocks, block, kv_heads, heads // kv_heads, width)

    def attend_block(index: jax.Array) -> jax.Array:
        at = (index * block + jnp.arange(block))[:, None]
        visible = stored <= at
        if window is not None:
            visible &= stored > at - window
        scores = jnp.einsum("btkgd,bskd->bkgts", query[:, index], key, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(visible, cap_scores(scores, softcap), -jnp.inf)
        if sink_logits is None:
            weights = jax.nn.softmax(scores, axis=-1)
        else:
            sinks = sink_logits.astype(jnp.float32).reshape(1, kv_heads, -1, 1, 1)
            sinks = jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))
            weights = jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]
        return jnp.einsum("bkgts,bskd->btkgd", weights, value, precision=jax.lax.Precision.HIGHEST)

    out = jax.lax.map(attend_block, jnp.arange(blocks))  # [blocks, B, block, K, G, D]
    return jnp.moveaxis(out, 0, 1).reshape(batch, blocks * block, heads, width)[:, :length]


class RMSNorm(nnx.Module):
    """x / rms(x) * weight in float32; for Gemma the loader has already added one to the weight."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalised rows in the dtype of x."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...]).astype(x.dtype)


def split_columns(rows: jax.Array, widths: Sequence[int], shards: int) -> list[jax.Array]:
    """The parts [..., width] of rows [..., sum(widths)]; each of `shards` groups of columns has some of all.

    So a device that holds one group has its own heads of query, key and value, and nothing moves.
    """
    pieces = [width // shards for width in widths]
    grouped = rows.reshape(*rows.shape[:-1], shards, sum(pieces))
    parts = jnp.split(grouped, np.cumsum(pieces)[:-1].tolist(), axis=-1)
    return [part.reshape(*rows.shape[:-1], width) for part, width in zip(parts, widths)]


class Attend(nnx.Module):
    """Projections, QK-norm and RoPE around an `Attention` strategy."""

    def __init__(self, config: ModelConfig, layer: int, make_linear: MakeLinear) -> None:
        self.config, self.layer = config, layer
        heads, kv_heads, width = config.num_query_heads, config.num_key_value_heads, config.head_dim
        # One product: at small batches a narrow one takes as long as a wide one. The loader joins the parts.
        self.widths = heads * width, kv_heads * width, kv_heads * width
        if config.attention_gate:
            self.widths = (*self.widths, heads * width)
        self.qkv_proj = make_linear(config.hidden_size, sum(self.widths), use_bias=config.qkv_bias)
        self.o_proj = make_linear(heads * width, config.hidden_size, use_bias=config.output_bias)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(heads, jnp.float32))
        if config.qk_norm:
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(width if per_head else heads * width, config.rms_norm_eps)
            self.k_norm = RMSNorm(width if per_head else kv_heads * width, config.rms_norm_eps)

    def __call__(
        self, x: jax.Array, positions: jax.Array, attention: Attention, state: Any
    ) -> tuple[jax.Array, Any]:
        """x [B, T, H] -> [B, T, H] and the layer's new state."""
        batch, length, _ = x.shape
        query, key, value, *gates = split_columns(self.qkv_proj(x), self.widths, self.config.shards)
        if self.config.qk_norm == "projection":
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (
            rows.reshape(batch, length, -1, self.config.head_dim) for rows in (query, key, value)
        )
        if self.config.qk_norm == "head":
            query, key = self.q_norm(query), self.k_norm(key)
        rope = self.config.layer_rope(self.layer)
        if rope is not None:
            query, key = apply_rope(query, positions, rope), apply_rope(key, positions, rope)
        sinks = {"sink_logits": self.sinks[...]} if self.config.attention_sinks else {}
        out, state = attention(self.layer, query, key, value, state, **sinks)
        out = out.astype(x.dtype).reshape(batch, length, -1)
        for gate in gates:
            out = out * jax.nn.sigmoid(gate)
        return self.o_proj(out), state


def activation_of(config: ModelConfig) -> Callable[[jax.Array], jax.Array]:
    """The function named by `config.activation`."""
    return jax.nn.silu if config.activation == "silu" else functools.partial(jax.nn.gelu, approximate=True)


class MLP(nnx.Module):
    """Gated MLP: down(act(gate(x)) * up(x)); `inner` channels, by default the configuration's."""

    def __init__(self, config: ModelConfig, make_linear: MakeLinear, inner: int | None = None) -> None:
        hidden, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        self.inner, self.shards = inner, config.shards
        self.gate_up_proj = make_linear(hidden, 2 * inner, use_bias=bias)
        self.down_proj = make_linear(inner, hidden, use_bias=bias)
        self.activation = activation_of(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, H] -> [B, T, H]."""
        gate, up = split_columns(self.gate_up_proj(x), (self.inner, self.inner), self.shards)
        return self.down_proj(self.activation(gate) * up)


def make_mlp(config: ModelConfig, layer: int, make_linear: MakeLinear) -> MLP | SparseMLP:
    """The MLP of a layer, or its experts."""
    experts = config.experts
    if experts is None or layer in config.dense_layers:
        return MLP(config, make_linear)
    return SparseMLP(
        config.hidden_size,
        experts,
        activation_of(config),
        make_linear,
        shards=config.shards,
        make_shared=lambda: MLP(config, make_linear, experts.shared_size),
    )


class Layer(nnx.Module):
    """One decoder layer; each of `config.norms` is a norm at its place."""

    def __init__(self, config: ModelConfig, layer: int, make_linear: MakeLinear) -> None:
        self.norms, self.residual_scale = config.norms, config.residual_scale
        for name in config.norms:
            setattr(self, name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        if config.linear is not None and layer in config.linear_layers:
            self.linear_attn = GatedDeltaNet(
                config.hidden_size, config.linear, config.rms_norm_eps, make_linear
            )
        else:
            self.self_attn = Attend(config, layer, make_linear)
        self.mlp = make_mlp(config, layer, make_linear)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        attention: Attention,
        state: Any,
        new_lengths: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        """x [B, T, H] -> [B, T, H] and the layer's new state."""
        rows = self._norm("input_layernorm", x)
        if hasattr(self, "linear_attn"):
            attended, state = self.linear_attn(rows, state, new_lengths)
        else:
            attended, state = self.self_attn(rows, positions, attention, state)
        x = self._add(x, self._norm("post_attention_layernorm", attended))
        out = self.mlp(self._norm("pre_feedforward_layernorm", x))
        return self._add(x, self._norm("post_feedforward_layernorm", out)), state

    def _norm(self, name: str, x: jax.Array) -> jax.Array:
        return getattr(self, name)(x) if name in self.norms else x

    def _add(self, x: jax.Array, change: jax.Array) -> jax.Array:
        return x + change if self.residual_scale == 1.0 else x + change * self.residual_scale


class Decoder(nnx.Module):
    """Token ids to logits. Compute dtype and weight dtype are chosen apart; norms and logits are float32.

    float32 products run at the highest precision of the device (no TF32).
    """

    def __init__(self, config: ModelConfig, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

        make_linear = functools.partial(
            nnx.Linear,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=self.precision,
            dot_general=dot_general,
            rngs=rngs,
        )
        self.embed_tokens = nnx.Embed(
            config.vocab_size, config.hidden_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.layers = nnx.List([Layer(config, layer, make_linear) for layer in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.lm_head = make_linear(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        tokens: jax.Array,
        states: Sequence[Any] | None = None,
        *,
        positions: jax.Array | None = None,
        attention: Attention | None = None,
        new_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """Logits float32 [B, T, V] of tokens int32 [B, T], and the new states; see `hidden_states`."""
        hidden, states = self.hidden_states(
            tokens, states, positions=positions, attention=attention, new_lengths=new_lengths
        )
        return self.logits(hidden), states

    def hidden_states(
        self,
        tokens: jax.Array,
        states: Sequence[Any] | None = None,
        *,
        positions: jax.Array | None = None,
        attention: Attention | None = None,
        new_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """Rows after the last norm, [B, T, H] in the compute dtype, and the layers' new states.

        `positions` int32 [B, T] are absolute token positions, by default 0 .. T-1; `attention` is by default
        `CausalAttention`; `states` holds one state per layer for it, and a `RecurrentState` for each linear
        layer, in which rows at or past `new_lengths` int32 [B] (None: none) leave no trace. Raises ShapeError
        for a wrong count.
        """
        if states is not None and len(states) != self.config.num_layers:
            raise ShapeError(f"{len(states)} layer states for a model of {self.config.num_layers} layers")
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        attention = CausalAttention(self.config) if attention is None else attention
        x = self.embed_tokens(tokens)
        if self.config.embedding_scale != 1.0:
            # The reference rounds the factor to the compute dtype before it multiplies.
            x = x * jnp.asarray(np.float32(self.config.embedding_scale), x.dtype)
        new_states = []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, positions, attention, None if states is None else states[index], new_lengths)
            new_states.append(state)
        return self.norm(x), new_states

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., V] of rows [..., H] from `hidden_states`: take only the rows you need."""
        if self.config.tie_embeddings:
            weights = self.embed_tokens.embedding[...].astype(self.dtype).T
        else:
            weights = self.lm_head.kernel[...].astype(self.dtype)
        logits = jnp.matmul(hidden, weights, precision=self.precision, preferred_element_type=jnp.float32)
        logits = logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale
        return cap_scores(logits, self.config.logit_softcap)
