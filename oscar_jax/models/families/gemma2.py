"""Gemma 2: four norms a layer of weight 1 + w, soft caps on scores and logits, every other layer windowed."""

import math

from ..config import NORMS
from ..family import Family, Fields, Settings

_LAYERS_OF_27B = 46  # the one size whose attention scale is not 1/sqrt(head_dim); GGUF does not say so


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Scale, caps and windows; without layer_types the even layers have the window."""
    bias, kinds = settings.flag("attention_bias"), settings.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])]
    window = settings.get("sliding_window")
    settings.get("hidden_act")  # older files have it beside hidden_activation, which counts
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_scale": 1.0 / math.sqrt(settings.number("query_pre_attn_scalar")),
        "attention_softcap": settings.get("attn_logit_softcapping"),
        "logit_softcap": settings.get("final_logit_softcapping"),
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """The same, as llama.cpp fills it in; the scale follows from the size."""
    layers, hidden = fields["num_layers"], fields["hidden_size"]
    window = settings.integer("attention.sliding_window")
    base = hidden / fields["num_query_heads"] if layers == _LAYERS_OF_27B else fields["head_dim"]
    return {
        "attention_scale": 1.0 / math.sqrt(base),
        "attention_softcap": settings.number("attn_logit_softcapping"),
        "logit_softcap": settings.number("final_logit_softcapping"),
        "embedding_scale": math.sqrt(hidden),
        "activation": "gelu_tanh",
        "layer_windows": tuple(None if layer % 2 else window for layer in range(layers)),
    }


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    gguf_architectures=("gemma2",),
    activation_key="hidden_activation",
    defaults={
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    fields={"norms": NORMS, "norm_plus_one": True},
    read_hf=read_hf,
    read_gguf=read_gguf,
    names={},
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    gguf_defaults={
        "attention.sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
