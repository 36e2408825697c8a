"""Phi 3, 3.5 and 4: query, key and value fused in one projection, gate and up in another; LongRoPE."""

from typing import Any

from ..family import Family, Fields, Settings, TensorSource
from ..tensors import split


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """One window for all layers; null for most checkpoints."""
    return {"layer_windows": (settings.get("sliding_window"),) * fields["num_layers"]}


def adapt(source: TensorSource, config: Any) -> TensorSource:
    """The fused projections apart."""
    query, key = (heads * config.head_dim for heads in (config.num_query_heads, config.num_key_value_heads))
    inner = config.intermediate_size
    return split(
        source,
        {
            "self_attn.qkv_proj": (
                ("self_attn.q_proj", query),
                ("self_attn.k_proj", key),
                ("self_attn.v_proj", key),
            ),
            "mlp.gate_up_proj": (("mlp.gate_proj", inner), ("mlp.up_proj", inner)),
        },
    )


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    gguf_architectures=("phi3",),
    defaults={
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32_000,
    },
    read_hf=read_hf,
    rope_type_aliases={"su": "longrope", "yarn": "longrope"},  # as transformers reads older files
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    adapt=adapt,
)
