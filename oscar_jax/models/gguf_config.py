"""ModelConfig of GGUF metadata, with the meaning that llama.cpp gives to keys and to missing ones.

Every key of the architecture is used, known to be harmless, or refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..core.errors import ConfigError
from .config import ModelConfig
from .family import Fields, Settings, gguf_family_of
from .hf_config import token_ids
from .rope import RopeConfig, linear_divisors, rope_of_parameters

# Keys outside the architecture's own: what the file is, the tokenizer's (see tokenizer.py), other tools'.
_FOREIGN = ("general.", "tokenizer.", "quantize.", "split.", "oscar.", "imatrix.")
_HARMLESS = frozenset(("vocab_size", "tensor_data_layout"))
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "attention.sliding_window": (0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "nextn_predict_layers": (0,),
}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_divisors: tuple[float, ...] | None,
    model_id: str,
) -> ModelConfig:
    """ModelConfig of GGUF metadata; `tensor_shapes` (rows first) give the vocabulary, biases and tying.

    What llama.cpp reads if it is there, biases and norms of queries and keys, the first block tells.
    `rope_divisors` is the tensor `rope_freqs.weight` of a Llama 3 file. Raises ConfigError naming the key.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError("the GGUF file has no general.architecture")
    family = gguf_family_of(architecture)
    own = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    settings = Settings(own, family.gguf_defaults)
    layers, heads = settings.integer("block_count"), _same(settings, "attention.head_count")
    hidden = settings.integer("embedding_length")
    head_dim = settings.integer("attention.key_length", max(1, hidden // heads))
    value_dim = settings.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ConfigError(f"key and value head_dim differ: {head_dim} and {value_dim}")
    vocabulary = tensor_shapes.get("token_embd.weight")
    if vocabulary is None or len(vocabulary) != 2:
        raise ConfigError("the GGUF file has no tensor token_embd.weight")
    fields: Fields = {
        "vocab_size": vocabulary[0],
        "hidden_size": hidden,
        "intermediate_size": _same(settings, "feed_forward_length"),
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": _same(settings, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_positions": settings.integer("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon", 1e-6),
        "attention_scale": 1.0 / math.sqrt(head_dim),
        "layer_windows": (None,) * layers,
        "rope": read_rope(settings, head_dim, rope_divisors, interleaved=family.rope_interleaved),
        "qkv_bias": "blk.0.attn_q.bias" in tensor_shapes,
        "output_bias": "blk.0.attn_output.bias" in tensor_shapes,
        "qk_norm": "head" if "blk.0.attn_q_norm.weight" in tensor_shapes else "",
        "tie_embeddings": "output.weight" not in tensor_shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": token_ids(
            [
                metadata[key]
                for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
                if metadata.get(key) is not None
            ]
        ),
    }
    fields |= family.fields
    fields |= family.read_gguf(settings, fields)
    for key in settings.unread():
        if key in _HARMLESS or key.startswith(_FOREIGN):
            continue
        allowed, said = _NEUTRAL.get(key), f"{architecture}.{key} = {own[key]!r}"
        if allowed is None:
            raise ConfigError(f"{said}: unknown key, its meaning cannot be honoured")
        if own[key] not in allowed:
            raise ConfigError(f"{said} is not supported, allowed: {', '.join(map(repr, allowed))}")
    return ModelConfig(family=family.name, model_id=model_id, **fields)


def read_rope(
    settings: Settings, head_dim: int, divisors: tuple[float, ...] | None, *, interleaved: bool = False
) -> RopeConfig:
    """Rope as llama.cpp reads it: a missing scaling type is linear, the factor's older key counts too."""
    width = settings.integer("rope.dimension_count", head_dim)
    if width > head_dim or width % 2:
        raise ConfigError(f"rope.dimension_count = {width}, allowed: even numbers up to {head_dim}")
    theta = settings.number("rope.freq_base", 10_000.0)
    kind = settings.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"rope.scaling.type = {kind!r} is not supported, allowed: none, linear, yarn")
    old = settings.number("rope.scale_linear", 0.0)
    factor = settings.number("rope.scaling.factor", 0.0) or old
    context = settings.integer("context_length")
    trained = settings.integer("rope.scaling.original_context_length", context)
    settings.get("rope.scaling.finetuned")  # said about the training
    if kind == "yarn" and factor:
        if divisors is not None:
            raise ConfigError(
                "rope.scaling.type = 'yarn' beside the tensor rope_freqs.weight, allowed: one of them"
            )
        parameters = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
        for key in ("beta_fast", "beta_slow"):
            parameters[key] = settings.number(f"rope.scaling.yarn_{key}", _YARN[key])
        return rope_of_parameters(
            parameters,
            theta=theta,
            head_dim=head_dim,
            max_positions=context,
            partial_rotary_factor=width / head_dim,
            interleaved=interleaved,
        )
    linear = None if kind == "none" or not factor else linear_divisors(factor, width)
    if divisors is not None and linear is not None:
        divisors = tuple(divisor * factor for divisor in divisors)
    return RopeConfig(
        theta,
        linear if divisors is None else divisors,
        rotary_dim=None if width == head_dim else width,
        interleaved=interleaved,
    )


def _same(settings: Settings, key: str, default: int | None = None) -> int:
    """A number that may be written once per layer; ConfigError if the layers differ."""
    value = settings.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ConfigError(
                f"{key} differs by layer: {sorted(set(value))}, allowed: the same for all layers"
            )
        settings = Settings({key: value[0]}, {})
    return settings.integer(key, default)
