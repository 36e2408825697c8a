"""GLM-4-0414 (9B, 32B): four norms a layer, half of each head's channels turn in neighbouring pairs."""

from typing import Any

from ..config import NORMS
from ..family import Family, Fields, Settings, TensorSource
from ..tensors import split


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Biases on query, key and value, not on the output."""
    return {"qkv_bias": settings.flag("attention_bias")}


def adapt(source: TensorSource, config: Any) -> TensorSource:
    """Gate and up apart."""
    inner = config.intermediate_size
    return split(source, {"mlp.gate_up_proj": (("mlp.gate_proj", inner), ("mlp.up_proj", inner))})


FAMILY = Family(
    name="glm4",
    model_types=("glm4",),
    gguf_architectures=("glm4",),
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "eos_token_id": [151_329, 151_336, 151_338],
    },
    fields={"norms": NORMS},
    read_hf=read_hf,
    rope_interleaved=True,
    names={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    adapt=adapt,
)
