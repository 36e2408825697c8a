"""A small decoder with random weights, of any configuration."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.rope import RopeConfig


def small_config(**changes: Any) -> ModelConfig:
    """Two layers of 4 query and 2 key/value heads x 16; `changes` are fields of ModelConfig."""
    fields: dict[str, Any] = {
        "family": "qwen3_moe" if changes.get("experts") else "qwen3",
        "model_id": "test/mesh",
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_positions": 4096,
        "rms_norm_eps": 1e-6,
        "attention_scale": 0.25,
        "rope": RopeConfig(10_000.0),
        "qk_norm": "head",
    }
    fields |= changes
    fields.setdefault("layer_windows", (None,) * fields["num_layers"])
    return ModelConfig(**fields)


def random_decoder(seed: int = 0, dtype: Any = jnp.float32, **changes: Any) -> Decoder:
    """The decoder of `small_config` with normal weights of variance 1 / width, zeros included."""
    model = Decoder(small_config(**changes), dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(seed))
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        leaf if leaf.ndim == 1 else jax.random.normal(key, leaf.shape, leaf.dtype) * leaf.shape[-2] ** -0.5
        for key, leaf in zip(keys, leaves)
    ]
    return nnx.merge(graph, jax.tree.unflatten(structure, drawn))
