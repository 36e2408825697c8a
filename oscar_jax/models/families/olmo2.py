"""OLMo 2: norms behind attention and MLP only, and one norm over all heads' queries, one over all keys."""

from ..family import Family, Fields, Settings


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Biases of all four attention projections by one key."""
    bias = settings.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2",),
    gguf_architectures=("olmo2",),
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50_279,
    },
    fields={
        "qk_norm": "projection",
        "norms": ("post_attention_layernorm", "post_feedforward_layernorm"),
    },
    read_hf=read_hf,
    names={},
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
)
