"""What a model and its caches take on each device of a mesh, from shapes alone."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ..core.errors import ConfigError
from ..models import cached_attention, weights
from ..models.config import ModelConfig
from .weights import parameter_spec


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device: its part of the weights, and of the caches with INT2 pages or all in BF16."""

    weights: int
    int2: int
    bf16: int


def memory_per_device(
    config: ModelConfig, *, data: int, model: int, batch: int, tokens: int, dtype: DTypeLike = jnp.bfloat16
) -> DeviceMemory:
    """Bytes per device of a mesh for `batch` sequences of `tokens` tokens; weights are of `dtype`.

    Copied key/value heads and reserved pages included, activations not. Raises ConfigError for a mesh that
    does not fit.
    """
    if data < 1 or batch % data:
        raise ConfigError(f"{batch} sequences, allowed: multiples of data = {data}")
    spread = config.for_shards(model)
    state = nnx.split(weights.abstract_model(spread, dtype=dtype, param_dtype=dtype))[1]
    stored = 0
    for name, leaf in zip(weights.parameter_names(state), jax.tree.leaves(state)):
        split = any(axis is not None for axis in parameter_spec(name, leaf.shape, spread))
        stored += math.prod(leaf.shape) * leaf.dtype.itemsize // (model if split else 1)
    own = dataclasses.replace(
        spread,
        num_key_value_heads=spread.num_key_value_heads // model,
        num_query_heads=spread.num_query_heads // model,
    )

    def cache_bytes(kind: str) -> int:
        caches = jax.eval_shape(
            lambda: cached_attention.allocate_model_cache(own, batch // data, tokens, kind=kind)
        )
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))

    return DeviceMemory(stored, cache_bytes("int2"), cache_bytes("bf16"))
