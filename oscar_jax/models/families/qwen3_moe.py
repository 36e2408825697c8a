"""Qwen 3 mixtures of experts (30B-A3B, 235B-A22B, Coder): Qwen 3 attention, routed MLPs."""

from ..experts import ExpertsConfig
from ..family import Family, Fields, Settings
from ..tensors import stack_experts

GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def read_experts(settings: Settings, fields: Fields, **more: object) -> Fields:
    """Experts in every layer but those of mlp_only_layers and between the steps of decoder_sparse_step."""
    step, plain = settings.integer("decoder_sparse_step"), settings.get("mlp_only_layers") or []
    count = settings.integer_of("num_experts", "num_local_experts")
    return {
        "experts": ExpertsConfig(
            count=count,
            per_token=settings.integer("num_experts_per_tok"),
            intermediate_size=settings.integer("moe_intermediate_size"),
            normalize=settings.flag("norm_topk_prob"),
            **more,  # pyright: ignore[reportArgumentType]
        ),
        "dense_layers": tuple(
            layer for layer in range(fields["num_layers"]) if layer in plain or (layer + 1) % step
        ),
    }


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Experts, attention biases, and one window for all layers if it is switched on."""
    bias, window = settings.flag("attention_bias"), settings.get("sliding_window")
    window = window if settings.flag("use_sliding_window") else None
    settings.get("max_window_layers")  # not read by transformers for this family
    return {
        **read_experts(settings, fields),
        "qkv_bias": bias,
        "output_bias": bias,
        "layer_windows": (window,) * fields["num_layers"],
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """Experts in every layer, weights normalized, as llama.cpp computes this architecture."""
    return {
        "experts": ExpertsConfig(
            count=settings.integer("expert_count"),
            per_token=settings.integer("expert_used_count"),
            intermediate_size=settings.integer("expert_feed_forward_length"),
            normalize=True,
        )
    }


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    gguf_architectures=("qwen3moe",),
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    fields={"qk_norm": "head"},
    read_hf=read_hf,
    read_gguf=read_gguf,
    names={"pre_feedforward_layernorm": "post_attention_layernorm", "mlp.router": "mlp.gate"},
    gguf_names=GGUF_EXPERTS,
    adapt=lambda source, config: stack_experts(source),
)
