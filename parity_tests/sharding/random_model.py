"""A small decoder with random weights, of any configuration."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.experts import ExpertsConfig
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


def large_config(name: str) -> ModelConfig:
    """The geometry of a model too large for one device, for shapes alone."""
    common: dict[str, Any] = {"num_query_heads": 64, "head_dim": 128, "max_positions": 131_072}
    if name == "Llama-70B":
        return small_config(
            **common, family="llama", vocab_size=128_256, hidden_size=8192, intermediate_size=28_672,
            num_layers=80, num_key_value_heads=8, qk_norm="",
        )  # fmt: skip
    if name == "Qwen3-235B":
        return small_config(
            **common, vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_layers=94,
            num_key_value_heads=4, experts=ExpertsConfig(128, 8, 1536, normalize=True),
        )  # fmt: skip
    assert name == "GLM-4.7", name
    return small_config(
        **common | {"num_query_heads": 96}, family="glm4_moe", vocab_size=151_552, hidden_size=5120,
        intermediate_size=12_288, num_layers=92, num_key_value_heads=8, qkv_bias=True, dense_layers=(0, 1, 2),
        experts=ExpertsConfig(160, 8, 1536, router="sigmoid", correction_bias=True, shared_size=1536),
    )  # fmt: skip
