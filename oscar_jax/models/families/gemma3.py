"""Gemma 3, text: four norms a layer of weight 1 + w, five windowed layers to one global."""

import math

from ...core.errors import ConfigError
from ..config import NORMS
from ..family import Family, Fields, Settings
from ..rope import RopeConfig, rope_of_parameters

_WINDOW_PATTERN = 6  # every sixth layer is global
_LOCAL_THETA = 10_000.0
_LAYERS_OF_27B = 62  # the one size whose attention scale is not 1/sqrt(head_dim); GGUF does not say so


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Scale, windows and the two ropes; `rope_scaling` belongs to the global layers, as in transformers."""
    bias = settings.flag("attention_bias")
    layers, kinds = fields["num_layers"], settings.get("layer_types")
    window, pattern = (
        settings.get("sliding_window"),
        settings.integer("sliding_window_pattern", _WINDOW_PATTERN),
    )
    if kinds is None:
        kinds = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]

    by_kind = dict(settings.get("rope_parameters") or {})
    if unknown := sorted(set(by_kind) - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"rope_parameters has the key {unknown[0]!r}, allowed: full_attention, sliding_attention"
        )
    full = {**(by_kind.get("full_attention") or {}), **(settings.get("rope_scaling") or {})}
    common = {"head_dim": fields["head_dim"], "max_positions": fields["max_positions"]}
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_scale": 1.0 / math.sqrt(settings.number("query_pre_attn_scalar")),
        "embedding_scale": math.sqrt(fields["hidden_size"]),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "rope": rope_of_parameters(full, theta=settings.number("rope_theta"), **common),
        "local_rope": rope_of_parameters(
            by_kind.get("sliding_attention") or {},
            theta=settings.number("rope_local_base_freq"),
            **common,
        ),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """Windows by a period or by one flag per layer; the scale follows from the size."""
    layers, hidden = fields["num_layers"], fields["hidden_size"]
    window = settings.get("attention.sliding_window")
    pattern = settings.get("attention.sliding_window_pattern", _WINDOW_PATTERN)
    sliding = pattern if isinstance(pattern, list) else [(i + 1) % pattern for i in range(layers)]
    base = hidden / fields["num_query_heads"] if layers == _LAYERS_OF_27B else fields["head_dim"]
    return {
        "attention_scale": 1.0 / math.sqrt(base),
        "embedding_scale": math.sqrt(hidden),
        "activation": "gelu_tanh",
        "layer_windows": tuple(window if slides else None for slides in sliding),
        "local_rope": RopeConfig(settings.number("rope.freq_base_swa", _LOCAL_THETA)),
    }


FAMILY = Family(
    name="gemma3_text",
    model_types=("gemma3_text", "gemma3"),
    gguf_architectures=("gemma3",),
    text_section="text_config",
    activation_key="hidden_activation",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": _LOCAL_THETA,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    fields={"qk_norm": "head", "norms": NORMS, "norm_plus_one": True},
    read_hf=read_hf,
    read_gguf=read_gguf,
    names={},
    gguf_names={
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    gguf_defaults={"rope.freq_base": 1_000_000.0},
)
