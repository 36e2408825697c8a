"""Linear attention by the gated delta rule (arXiv 2412.06464): a state of fixed size instead of a cache.

A causal convolution mixes the last few inputs; then a matrix per head is decayed, corrected towards the new
value and read by the query. One token updates it directly; more go through it in chunks of 64, inside which
everything is a matrix product. Float32 throughout. The state cannot be taken back: it does not say what it
was some tokens ago.

Axes: B batch, T new tokens, C channels of the convolution, W its width, Q key heads, N value heads, K and V
channels of a key and of a value head.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core.errors import ConfigError

CHUNK = 64  # tokens of one matrix product
_HIGHEST = jax.lax.Precision.HIGHEST
_einsum = functools.partial(jnp.einsum, precision=_HIGHEST)


@dataclasses.dataclass(frozen=True)
class LinearAttentionConfig:
    """Heads of the linear layers; each key head serves value_heads / key_heads neighbouring value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} = {getattr(self, field.name)}, allowed: >= 1")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"linear layers: {self.value_heads} value heads, no multiple of {self.key_heads} key heads"
            )

    @property
    def widths(self) -> dict[str, int]:
        """Width of each part of the input projection: convolved rows, output gate, learning rate, decay."""
        value = self.value_heads * self.value_dim
        mixed = 2 * self.key_heads * self.key_dim + value
        return {"qkv": mixed, "z": value, "b": self.value_heads, "a": self.value_heads}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentState:
    """What a linear layer keeps of B sequences: the last inputs of its convolution, and a matrix per head."""

    conv: jax.Array  # float32 [B, W - 1, C]
    memory: jax.Array  # float32 [B, N, K, V]
    lengths: jax.Array  # int32 [B], tokens that went in

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.lengths.shape[0]

    def fits(self, config: LinearAttentionConfig) -> bool:
        """Whether this is a state of such layers."""
        like = jax.eval_shape(lambda: allocate_recurrent_state(config, self.batch))
        return (self.conv.shape, self.memory.shape) == (like.conv.shape, like.memory.shape)


def allocate_recurrent_state(config: LinearAttentionConfig, batch: int) -> RecurrentState:
    """The state of `batch` sequences before their first token."""
    return RecurrentState(
        jnp.zeros((batch, config.conv_width - 1, config.widths["qkv"]), jnp.float32),
        jnp.zeros((batch, config.value_heads, config.key_dim, config.value_dim), jnp.float32),
        jnp.zeros(batch, jnp.int32),
    )


class CausalConvolution(nnx.Module):
    """A filter per channel over the last W inputs, then SiLU; weight [C, 1, W], as Torch stores it."""

    def __init__(self, channels: int, width: int, param_dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((channels, 1, width), param_dtype))

    def __call__(self, rows: jax.Array) -> jax.Array:
        """Rows float32 [B, W - 1 + T, C] -> [B, T, C]."""
        weight = self.weight[...][:, 0].astype(jnp.float32)
        tokens = rows.shape[1] - weight.shape[1] + 1
        taps = (rows[:, tap : tap + tokens] * weight[:, tap] for tap in range(weight.shape[1]))
        return jax.nn.silu(functools.reduce(jnp.add, taps))


class GatedNorm(nnx.Module):
    """x / rms(x) * weight * silu(gate) over the channels of a head, in float32; the weight is as stored."""

    def __init__(self, width: int, eps: float) -> None:
        self.weight = nnx.Param(jnp.ones(width, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """Rows float32 [..., V] and their gates -> float32 [..., V]."""
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return y * self.weight[...] * jax.nn.silu(gate.astype(jnp.float32))


class GatedDeltaNet(nnx.Module):
    """One linear layer, between its norm and its residual."""

    def __init__(
        self,
        hidden: int,
        config: LinearAttentionConfig,
        eps: float,
        make_linear: functools.partial[nnx.Linear],
    ) -> None:
        self.config = config
        widths = config.widths
        self.in_proj = make_linear(hidden, sum(widths.values()))
        self.conv1d = CausalConvolution(widths["qkv"], config.conv_width, make_linear.keywords["param_dtype"])
        self.dt_bias = nnx.Param(jnp.zeros(config.value_heads, jnp.float32))
        self.A_log = nnx.Param(jnp.zeros(config.value_heads, jnp.float32))
        self.norm = GatedNorm(config.value_dim, eps)
        self.out_proj = make_linear(widths["z"], hidden)

    def __call__(
        self, x: jax.Array, state: RecurrentState | None, new_lengths: jax.Array | None
    ) -> tuple[jax.Array, RecurrentState | None]:
        """x [B, T, H] -> [B, T, H] and the new state; None: the sequences begin here, and none is returned.

        Rows at or past new_lengths int32 [B] (None: no row) are padding: they leave the state alone.
        """
        config, (batch, tokens, _) = self.config, x.shape
        before = allocate_recurrent_state(config, batch) if state is None else state
        counts = jnp.full(batch, tokens, jnp.int32) if new_lengths is None else new_lengths
        counts = jnp.clip(counts, 0, tokens)
        mixed, gate, rate, decay = jnp.split(
            self.in_proj(x), np.cumsum(list(config.widths.values()))[:-1], axis=-1
        )
        rows = jnp.concatenate([before.conv, mixed.astype(jnp.float32)], axis=1)
        # Row counts + W - 2 is the newest that is real.
        last = counts[:, None] + jnp.arange(config.conv_width - 1)
        conv = jnp.take_along_axis(rows, last[..., None], axis=1)

        keys = config.key_heads * config.key_dim
        query, key, value = jnp.split(self.conv1d(rows), [keys, 2 * keys], axis=-1)
        query, key = (_unit(part.reshape(batch, tokens, -1, config.key_dim)) for part in (query, key))
        shared = config.value_heads // config.key_heads
        query, key = (jnp.repeat(part, shared, axis=2) for part in (query, key))
        value = value.reshape(batch, tokens, -1, config.value_dim)
        real = (jnp.arange(tokens) < counts[:, None])[..., None]
        # A rate and a decay of zero: nothing is written, nothing fades.
        rate = jnp.where(real, jax.nn.sigmoid(rate.astype(jnp.float32)), 0.0)
        decay = jax.nn.softplus(decay.astype(jnp.float32) + self.dt_bias[...])
        decay = jnp.where(real, -jnp.exp(self.A_log[...]) * decay, 0.0)
        rows = DeltaRows(query * config.key_dim**-0.5, key, value, rate, decay)
        out, memory = gated_delta_rule(rows, before.memory)
        out = self.norm(out, gate.reshape(out.shape)).astype(x.dtype)
        out = self.out_proj(out.reshape(batch, tokens, -1))
        return out, None if state is None else RecurrentState(conv, memory, before.lengths + counts)


class DeltaRows(NamedTuple):
    """New tokens of the delta rule, all float32."""

    query: jax.Array  # [B, T, N, K], scaled
    key: jax.Array  # [B, T, N, K], of length 1
    value: jax.Array  # [B, T, N, V]
    rate: jax.Array  # [B, T, N], 0..1: how much of what the memory says of the key is replaced
    decay: jax.Array  # [B, T, N], logarithm of the factor that the memory fades by, <= 0


def gated_delta_rule(rows: DeltaRows, memory: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads of all tokens, float32 [B, T, N, V], and the memory float32 [B, N, K, V] after the last."""
    if rows.query.shape[1] == 1:
        query, key, value, rate, decay = (part[:, 0] for part in rows)
        memory = memory * jnp.exp(decay)[..., None, None]
        wrong = value - _einsum("bnk,bnkv->bnv", key, memory)
        memory = memory + key[..., None] * (wrong * rate[..., None])[..., None, :]
        return _einsum("bnk,bnkv->bnv", query, memory)[:, None], memory
    tokens = rows.query.shape[1]
    chunks = -(-tokens // CHUNK)

    def chunked(part: jax.Array) -> jax.Array:  # [B, T, N, ...] -> [chunks, B, N, CHUNK, ...]
        part = jnp.pad(part, ((0, 0), (0, chunks * CHUNK - tokens), *((0, 0),) * (part.ndim - 2)))
        part = part.reshape(part.shape[0], chunks, CHUNK, *part.shape[2:])
        return jnp.moveaxis(part, (1, 3), (0, 2))

    memory, out = jax.lax.scan(_chunk, memory, DeltaRows(*map(chunked, rows)))
    out = jnp.moveaxis(out, (0, 2), (1, 3))  # [B, chunks, CHUNK, N, V]
    return out.reshape(out.shape[0], -1, *out.shape[3:])[:, :tokens], memory


def _chunk(memory: jax.Array, rows: DeltaRows) -> tuple[jax.Array, jax.Array]:
    """One chunk, rows [B, N, CHUNK, ...]: solves for what each token writes after those before it."""
    query, key, value, rate, decay = rows
    total = jnp.cumsum(decay, axis=-1)  # [B, N, CHUNK]
    step = jnp.arange(CHUNK)
    since = jnp.where(step[:, None] >= step, total[..., :, None] - total[..., None, :], -jnp.inf)
    faded = jnp.exp(since)  # [B, N, t, s]: what token t sees of token s
    faded_in = jnp.exp(total)[..., None]
    among = _einsum("bnti,bnsi->bnts", key * rate[..., None], key) * faded
    system = jnp.where(step[:, None] > step, among, 0.0) + jnp.eye(CHUNK)
    sides = jnp.concatenate([value, key * faded_in], axis=-1) * rate[..., None]
    solved = jax.lax.linalg.triangular_solve(system, sides, left_side=True, lower=True, unit_diagonal=True)
    written, against = jnp.split(solved, [value.shape[-1]], axis=-1)
    written = written - _einsum("bntk,bnkv->bntv", against, memory)
    seen = _einsum("bntk,bnsk->bnts", query, key) * faded
    out = _einsum("bntk,bnkv->bntv", query * faded_in, memory) + _einsum("bnts,bnsv->bntv", seen, written)
    left = key * jnp.exp(total[..., -1:] - total)[..., None]
    memory = memory * jnp.exp(total[..., -1])[..., None, None] + _einsum("bntk,bntv->bnkv", left, written)
    return memory, out


def _unit(rows: jax.Array) -> jax.Array:
    """Rows of length 1; the constant under the root is the reference's."""
    return rows * jax.lax.rsqrt(jnp.sum(rows * rows, axis=-1, keepdims=True) + 1e-6)
