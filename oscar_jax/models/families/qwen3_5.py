"""Qwen 3.5, text, dense and with experts: the layers of Qwen 3 Next inside a model of images and text."""

from ..family import Family, Fields, Settings
from ..hf_config import read_rope
from ..tensors import stack_experts
from .qwen3_moe import read_experts
from .qwen3_next import FIELDS, LAYER_TYPES, LINEAR_DEFAULTS, read_layers, split_gates

_ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")  # a text's positions are the same in all sections


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Linear layers, and the one rope of all others."""
    return {**read_layers(settings, fields), "rope": read_rope(settings, fields, FAMILIES[0])}


def read_hf_moe(settings: Settings, fields: Fields) -> Fields:
    """The same with experts in every layer, and a shared MLP behind a gate."""
    shared = settings.integer("shared_expert_intermediate_size")
    return {
        **read_hf(settings, fields),
        **read_experts(settings, fields, shared_size=shared, shared_gate=True),
    }


FAMILIES = (
    Family(
        name="qwen3_5_text",
        model_types=("qwen3_5_text", "qwen3_5"),
        gguf_architectures=(),
        text_section="text_config",
        defaults={
            **LINEAR_DEFAULTS,
            "vocab_size": 248_320,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
        },
        fields=FIELDS,
        layer_types=LAYER_TYPES,
        rope_without_effect=_ROPE_OF_IMAGES,
        read_hf=read_hf,
        adapt=split_gates,
    ),
    Family(
        name="qwen3_5_moe_text",
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        gguf_architectures=(),
        text_section="text_config",
        defaults={
            **LINEAR_DEFAULTS,
            "vocab_size": 248_320,
            "hidden_size": 2048,
            "intermediate_size": 512,  # no layer has a dense MLP
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
            "norm_topk_prob": True,
        },
        fields=FIELDS,
        layer_types=LAYER_TYPES,
        rope_without_effect=_ROPE_OF_IMAGES,
        read_hf=read_hf_moe,
        names={"pre_feedforward_layernorm": "post_attention_layernorm", "mlp.router": "mlp.gate"},
        adapt=lambda source, config: stack_experts(split_gates(source, config)),
    ),
)
