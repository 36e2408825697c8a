"""Mixture of experts: a router picks a few MLPs per token, and only those are computed.

Many tokens are sorted by expert and go through grouped matrix products (`jax.lax.ragged_dot`); a few tokens,
as in a decode step, gather the weights of their experts, so that no other expert is read.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from ..core.errors import ConfigError

# Axes of a mesh of devices: sequences are spread over the first, heads, columns and experts over the second.
DATA_AXIS, MODEL_AXIS = "data", "model"
ROUTERS = ("softmax", "softmax_of_top", "sigmoid")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """E experts of I channels, of which `per_token` see a token.

    router: how scores become weights, one of ROUTERS: softmax over all experts; over the chosen ones alone;
    or a sigmoid each. With `groups` > 1 only the `top_groups` groups with the best two scores may be chosen.
    `swiglu_clamp` is (alpha, limit) of gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), clamped.
    """

    count: int
    per_token: int
    intermediate_size: int
    router: str = "softmax"
    normalize: bool = False  # weights of the chosen experts add up to one
    scale: float = 1.0  # multiplies the weights
    groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False  # added to the scores for the choice, not to the weights
    router_bias: bool = False
    bias: bool = False  # of the experts' projections
    shared_size: int = 0  # channels of the MLP that sees every token
    shared_gate: bool = False  # a sigmoid of the row multiplies the shared MLP's output
    swiglu_clamp: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ConfigError(f"router = {self.router!r}, allowed: {', '.join(ROUTERS)}")
        if not 1 <= self.per_token <= self.count:
            raise ConfigError(f"{self.per_token} experts per token, allowed: 1..{self.count}")
        if self.count % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ConfigError(f"{self.top_groups} of {self.groups} groups of {self.count} experts")


class Router(nnx.Module):
    """Which experts see a token, and with which weights; float32 throughout."""

    def __init__(self, hidden: int, config: ExpertsConfig, param_dtype: Any) -> None:
        self.config = config
        self.kernel = nnx.Param(jnp.zeros((hidden, config.count), param_dtype))
        if config.router_bias:
            self.bias = nnx.Param(jnp.zeros(config.count, param_dtype))
        if config.correction_bias:
            self.correction_bias = nnx.Param(jnp.zeros(config.count, jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows [M, H] -> experts int32 [M, k] and weights float32 [M, k]."""
        config = self.config
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.matmul(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        if config.router_bias:
            logits = logits + self.bias[...].astype(jnp.float32)
        if config.router == "softmax_of_top":
            top, chosen = jax.lax.top_k(logits, config.per_token)
            return chosen, jax.nn.softmax(top, axis=-1) * config.scale
        scores = jax.nn.sigmoid(logits) if config.router == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        ranked = scores
        if config.correction_bias:
            ranked = scores + self.correction_bias[...]
        if config.groups > 1:
            grouped = ranked.reshape(len(x), config.groups, -1)
            best = jax.lax.top_k(grouped, 2)[0].sum(axis=-1)
            kept = jax.lax.top_k(best, config.top_groups)[1]
            allowed = jax.nn.one_hot(kept, config.groups, dtype=bool).any(axis=1)
            ranked = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
        chosen = jax.lax.top_k(ranked, config.per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * config.scale


class ExpertProjection(nnx.Module):
    """One projection of all experts: kernel [E, in, out], bias [E, out]."""

    def __init__(self, config: ExpertsConfig, width_in: int, width_out: int, param_dtype: Any) -> None:
        self.kernel = nnx.Param(jnp.zeros((config.count, width_in, width_out), param_dtype))
        if config.bias:
            self.bias = nnx.Param(jnp.zeros((config.count, width_out), param_dtype))
        self.has_bias = config.bias

    def arrays(self) -> "ExpertArrays":
        """The weights as a tree of arrays."""
        return ExpertArrays(self.kernel[...], self.bias[...] if self.has_bias else None)


class ExpertArrays(NamedTuple):
    """The weights of one projection of the experts that a device has."""

    kernel: jax.Array  # [E, in, out]
    bias: jax.Array | None  # [E, out]

    def apply(
        self, rows: jax.Array, experts: jax.Array, group_sizes: jax.Array | None, precision: Any
    ) -> jax.Array:
        """Rows [R, in], of which row r goes through experts[r] -> [R, out] in the dtype of rows.

        `group_sizes` int32 [E] counts rows per expert, rows sorted by expert; None: each row gathers its own.
        """
        kernel = self.kernel.astype(rows.dtype)
        if group_sizes is None:
            out = jnp.einsum("ri,rio->ro", rows, kernel[experts], precision=precision)
        else:
            out = jax.lax.ragged_dot(rows, kernel, group_sizes, precision=precision)
        return out if self.bias is None else out + self.bias.astype(rows.dtype)[experts]


class Experts(nnx.Module):
    """The experts' MLPs; with `shards` > 1 each device of the mesh's model axis has some of them, whole."""

    def __init__(
        self,
        hidden: int,
        config: ExpertsConfig,
        activation: Callable[[jax.Array], jax.Array],
        param_dtype: Any,
        shards: int = 1,
    ) -> None:
        self.config, self.activation, self.shards = config, activation, shards
        inner = config.intermediate_size
        self.gate_proj = ExpertProjection(config, hidden, inner, param_dtype)
        self.up_proj = ExpertProjection(config, hidden, inner, param_dtype)
        self.down_proj = ExpertProjection(config, inner, hidden, param_dtype)

    def __call__(self, x: jax.Array, chosen: jax.Array, weights: jax.Array, precision: Any) -> jax.Array:
        """Rows [M, H], experts int32 [M, k] and their weights float32 [M, k] -> [M, H].

        Spread over devices, the mesh is that of the context (`jax.set_mesh`).
        """
        projections = [part.arrays() for part in (self.gate_proj, self.up_proj, self.down_proj)]
        if self.shards == 1:
            return self._mixed(projections, x, chosen, weights, precision, None).astype(x.dtype)
        over = jax.sharding.get_abstract_mesh().shape.get(DATA_AXIS, 1)
        rows = PartitionSpec(DATA_AXIS if len(x) % over == 0 else None)

        def of_a_shard(projections: Any, x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
            first = jax.lax.axis_index(MODEL_AXIS) * (self.config.count // self.shards)
            return jax.lax.psum(self._mixed(projections, x, chosen, weights, precision, first), MODEL_AXIS)

        specs = (PartitionSpec(MODEL_AXIS), rows, rows, rows)
        mixed = jax.shard_map(of_a_shard, in_specs=specs, out_specs=rows, check_vma=False)
        return mixed(projections, x, chosen, weights).astype(x.dtype)

    def _mixed(
        self,
        projections: Sequence[ExpertArrays],
        x: jax.Array,
        chosen: jax.Array,
        weights: jax.Array,
        precision: Any,
        first: jax.Array | None,
    ) -> jax.Array:
        """The weighted sum, float32 [M, H], of experts `first`, `first` + 1, ...; None: of all there are."""
        each = chosen.shape[-1]
        experts = chosen.reshape(-1)
        here = len(projections[0].kernel)
        mine = None
        if first is not None:  # rows for experts elsewhere come last, and count nothing
            experts = jnp.where((experts >= first) & (experts < first + here), experts - first, here)
        order, sizes = jnp.arange(len(experts)), None
        if len(experts) > self.config.count:  # more rows than experts: sort them, read every expert once
            order = jnp.argsort(experts, stable=True)
            experts = experts[order]
            sizes = jnp.bincount(experts, length=here).astype(jnp.int32)
        if first is not None:
            mine, experts = (experts < here)[:, None], jnp.minimum(experts, here - 1)
        rows = x[order // each]
        gate, up = (part.apply(rows, experts, sizes, precision) for part in projections[:2])
        out = projections[2].apply(self._join(gate, up), experts, sizes, precision)
        out = out.astype(jnp.float32) * weights.reshape(-1)[order, None]
        if mine is not None:
            out = jnp.where(mine, out, 0.0)
        back = jnp.zeros((len(experts), x.shape[-1]), jnp.float32).at[order].set(out)
        return back.reshape(len(x), each, -1).sum(axis=1)

    def _join(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.config.swiglu_clamp is None:
            return self.activation(gate) * up
        alpha, limit = self.config.swiglu_clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


class SparseMLP(nnx.Module):
    """Router, experts and, where there is one, the shared MLP, made by `make_shared`."""

    def __init__(
        self,
        hidden: int,
        config: ExpertsConfig,
        activation: Callable[[jax.Array], jax.Array],
        make_linear: functools.partial[nnx.Linear],
        make_shared: Callable[[], Callable[[jax.Array], jax.Array]],
        shards: int = 1,
    ) -> None:
        self.config, self.precision = config, make_linear.keywords["precision"]
        param_dtype = make_linear.keywords["param_dtype"]
        self.router = Router(hidden, config, param_dtype)
        self.experts = Experts(hidden, config, activation, param_dtype, shards)
        if config.shared_size:
            self.shared_expert = make_shared()
        if config.shared_gate:
            self.shared_expert_gate = make_linear(hidden, 1)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, T, H] -> [B, T, H]."""
        rows = x.reshape(-1, x.shape[-1])
        chosen, weights = self.router(rows)
        out = self.experts(rows, chosen, weights, self.precision).reshape(x.shape)
        if not self.config.shared_size:
            return out
        shared = self.shared_expert(x)
        if self.config.shared_gate:
            shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * shared
        return out + shared
