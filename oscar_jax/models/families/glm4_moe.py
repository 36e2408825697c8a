"""GLM-4.5, 4.6 and 4.7: experts chosen by corrected sigmoids, a shared MLP, partial rotary embedding."""

from typing import Any

from ...core.errors import ConfigError
from ..experts import ExpertsConfig
from ..family import Family, Fields, Settings, TensorSource
from ..tensors import stack_experts, without_layers
from .qwen3_moe import GGUF_EXPERTS

_SIGMOID = 2  # llama.cpp's number of the gating function; 0: the architecture's, which it is


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Experts behind the first dense layers; biases on query, key and value; an optional norm per head."""
    size = settings.integer("moe_intermediate_size")
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        settings.get(key)  # layers behind the last one, which only guess further tokens
    return {
        "qkv_bias": settings.flag("attention_bias"),
        "qk_norm": "head" if settings.flag("use_qk_norm") else "",
        "dense_layers": tuple(range(settings.get("first_k_dense_replace"))),
        "experts": ExpertsConfig(
            count=settings.integer_of("n_routed_experts", "num_local_experts"),
            per_token=settings.integer("num_experts_per_tok"),
            intermediate_size=size,
            router="sigmoid",
            normalize=settings.flag("norm_topk_prob"),
            scale=settings.number("routed_scaling_factor"),
            groups=settings.integer("n_group"),
            top_groups=settings.integer("topk_group"),
            correction_bias=True,
            shared_size=size * settings.integer("n_shared_experts"),
        ),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """Experts behind the leading dense blocks; the last blocks may only guess further tokens."""
    layers = fields["num_layers"] - (settings.get("nextn_predict_layers") or 0)
    if (gating := settings.get("expert_gating_func", 0)) not in (0, _SIGMOID):
        raise ConfigError(
            f"expert_gating_func = {gating!r} is not supported, allowed: 0, {_SIGMOID} (sigmoid)"
        )
    size = settings.integer("expert_feed_forward_length")
    return {
        "num_layers": layers,
        "layer_windows": (None,) * layers,
        "dense_layers": tuple(range(settings.get("leading_dense_block_count", 0))),
        "experts": ExpertsConfig(
            count=settings.integer("expert_count"),
            per_token=settings.integer("expert_used_count"),
            intermediate_size=size,
            router="sigmoid",
            normalize=settings.flag("expert_weights_norm"),
            scale=settings.number("expert_weights_scale", 1.0) or 1.0,
            groups=settings.integer("expert_group_count", 1),
            top_groups=settings.integer("expert_group_used_count", 1),
            correction_bias=True,
            shared_size=size * settings.integer("expert_shared_count"),
        ),
    }


def adapt(source: TensorSource, config: Any) -> TensorSource:
    """Experts stacked, layers for further tokens left out."""
    return stack_experts(without_layers(source, config.num_layers))


FAMILY = Family(
    name="glm4_moe",
    model_types=("glm4_moe",),
    gguf_architectures=("glm4moe",),
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    read_hf=read_hf,
    read_gguf=read_gguf,
    names={
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "mlp.router": "mlp.gate",
        "mlp.router.correction_bias": "mlp.gate.e_score_correction_bias",
        "mlp.shared_expert.gate_proj": "mlp.shared_experts.gate_proj",
        "mlp.shared_expert.up_proj": "mlp.shared_experts.up_proj",
        "mlp.shared_expert.down_proj": "mlp.shared_experts.down_proj",
    },
    gguf_names={
        **GGUF_EXPERTS,
        "post_attention_norm": "pre_feedforward_layernorm",
        "exp_probs_b.bias": "mlp.router.correction_bias",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    without_effect=("num_mtp_layers",),
    adapt=adapt,
)
