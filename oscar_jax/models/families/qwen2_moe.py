"""Qwen 1.5 and 2 mixtures of experts (A2.7B, 57B-A14B): a shared MLP behind a gate beside the routed ones."""

from typing import Any

from ..experts import ExpertsConfig
from ..family import Family, Fields, Settings, TensorSource
from ..tensors import computed, stack_experts
from .qwen3_moe import GGUF_EXPERTS, read_experts

GGUF_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Experts, biases, and a window on every other one of the first layers if it is switched on."""
    layers, kinds = fields["num_layers"], settings.get("layer_types")
    window, first = settings.get("sliding_window"), settings.get("max_window_layers")
    window = window if settings.flag("use_sliding_window") else None
    if kinds is None:
        kinds = ["sliding_attention" if i % 2 == 0 and i < first else "" for i in range(layers)]
    shared = settings.integer("shared_expert_intermediate_size")
    return {
        **read_experts(settings, fields, shared_size=shared, shared_gate=True),
        "qkv_bias": settings.flag("qkv_bias"),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """Experts in every layer, weights as the softmax gives them."""
    return {
        "experts": ExpertsConfig(
            count=settings.integer("expert_count"),
            per_token=settings.integer("expert_used_count"),
            intermediate_size=settings.integer("expert_feed_forward_length"),
            shared_size=settings.integer("expert_shared_feed_forward_length"),
            shared_gate=True,
        )
    }


def shared_gate_of_gguf(source: TensorSource, config: Any) -> TensorSource:
    """Older converters drop the first axis, of length one, of the shared expert's gate."""
    return computed(
        source,
        {"mlp.shared_expert_gate.weight": (lambda shape: (1, shape[-1]), lambda gate: gate.reshape(1, -1))},
    )


FAMILY = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    gguf_architectures=("qwen2moe",),
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    fields={"qkv_bias": True},
    read_hf=read_hf,
    read_gguf=read_gguf,
    names={"pre_feedforward_layernorm": "post_attention_layernorm", "mlp.router": "mlp.gate"},
    gguf_names={**GGUF_EXPERTS, **GGUF_SHARED_EXPERT},
    adapt=lambda source, config: stack_experts(source),
    adapt_gguf=shared_gate_of_gguf,
)
