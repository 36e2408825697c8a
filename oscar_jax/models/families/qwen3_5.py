"""Qwen 3.5, text, dense and with experts: the layers of Qwen 3 Next inside a model of images and text."""

from typing import Any

import numpy as np

from ..family import Family, Fields, Settings, TensorSource
from ..hf_config import read_rope
from ..tensors import Computation, Reshaping, computed, stack_experts
from . import qwen3_next
from .qwen2_moe import GGUF_SHARED_EXPERT
from .qwen3_moe import GGUF_EXPERTS, read_experts
from .qwen3_next import FIELDS, GGUF_LINEAR, LAYER_TYPES, LINEAR_DEFAULTS, read_layers, split_gates

_ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")  # a text's positions are the same in all sections

_GGUF_NAMES = {**GGUF_LINEAR, "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}


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


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """Linear blocks; the sections of the rope are for images."""
    settings.get("rope.dimension_sections")
    return qwen3_next.read_gguf_layers(settings, fields)


def read_gguf_moe(settings: Settings, fields: Fields) -> Fields:
    """The same with experts in every block, and a shared MLP behind a gate."""
    settings.get("rope.dimension_sections")
    return qwen3_next.read_gguf(settings, fields)


def adapt_gguf(source: TensorSource, config: Any) -> TensorSource:
    """Value heads grouped by key head again: llama.cpp has the first of every key head, then the second."""
    linear = config.linear
    heads = np.arange(linear.value_heads).reshape(-1, linear.key_heads).T.ravel()
    channels = (heads[:, None] * linear.value_dim + np.arange(linear.value_dim)).ravel()
    keys = 2 * linear.key_heads * linear.key_dim
    mixed = np.concatenate([np.arange(keys), keys + channels])
    rows = {
        "in_proj_qkv.weight": mixed,
        "conv1d.weight": mixed,
        "in_proj_z.weight": channels,
        "in_proj_a.weight": heads,
        "in_proj_b.weight": heads,
        "A_log": heads,
        "dt_bias": heads,
    }

    def same(shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    parts: dict[str, tuple[Reshaping, Computation]] = {
        f"linear_attn.{end}": (same, lambda tensor, order=order: tensor[order]) for end, order in rows.items()
    }
    parts["linear_attn.out_proj.weight"] = (same, lambda tensor: tensor[:, channels])
    return qwen3_next.adapt_gguf(computed(source, parts), config)


FAMILIES = (
    Family(
        name="qwen3_5_text",
        model_types=("qwen3_5_text", "qwen3_5"),
        gguf_architectures=("qwen35",),
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
        read_gguf=read_gguf,
        gguf_names=_GGUF_NAMES,
        adapt=split_gates,
        adapt_gguf=adapt_gguf,
    ),
    Family(
        name="qwen3_5_moe_text",
        model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
        gguf_architectures=("qwen35moe",),
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
        read_gguf=read_gguf_moe,
        gguf_names={**_GGUF_NAMES, **GGUF_EXPERTS, **GGUF_SHARED_EXPERT},
        gguf_defaults={"feed_forward_length": 512},  # no block has a dense MLP
        names={"pre_feedforward_layernorm": "post_attention_layernorm", "mlp.router": "mlp.gate"},
        adapt=lambda source, config: stack_experts(split_gates(source, config)),
        adapt_gguf=adapt_gguf,
    ),
)
