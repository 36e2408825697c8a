"""gpt-oss (20B, 120B): attention sinks, windows on every other layer, biases everywhere, clamped experts."""

import dataclasses
from typing import Any

import numpy as np

from ..experts import ExpertsConfig
from ..family import Family, Fields, LazyTensor, Settings, TensorSource
from .qwen3_moe import GGUF_EXPERTS

_SWIGLU = (1.702, 7.0)  # alpha and limit
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Windows by layer_types or on every other layer, and the experts with their own activation."""
    layers, kinds = fields["num_layers"], settings.get("layer_types")
    window, bias = settings.get("sliding_window"), settings.flag("attention_bias")
    if kinds is None:
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    for key in ("initial_context_length", "swiglu_limit", "hidden_act", "experts_per_token"):
        settings.get(key)  # said twice in published files, or of fixed meaning
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "experts": ExpertsConfig(
            count=settings.integer_of("num_local_experts", "num_experts"),
            per_token=settings.integer("num_experts_per_tok"),
            intermediate_size=fields["intermediate_size"],
            router="softmax_of_top",
            router_bias=True,
            bias=True,
            swiglu_clamp=(settings.number("swiglu_alpha"), settings.number("swiglu_limit")),
        ),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """As llama.cpp computes the architecture: windows on every other layer, the first one included."""
    layers, window = fields["num_layers"], settings.integer("attention.sliding_window")
    period = settings.integer("attention.sliding_window_pattern", 2)
    return {
        "layer_windows": tuple(window if (layer + 1) % period else None for layer in range(layers)),
        "experts": ExpertsConfig(
            count=settings.integer("expert_count"),
            per_token=settings.integer("expert_used_count"),
            intermediate_size=settings.integer("expert_feed_forward_length"),
            router="softmax_of_top",
            scale=settings.number("expert_weights_scale", 1.0) or 1.0,
            router_bias=True,
            bias=True,
            swiglu_clamp=_SWIGLU,
        ),
    }


def adapt(source: TensorSource, config: Any) -> TensorSource:
    """Experts [E, in, out], gate and up in alternating columns -> [E, out, in], gate and up apart."""
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, slice, bool]] = {}
    for name, shape in source.shapes.items():
        stem, _, end = name.rpartition(".")
        if not stem.endswith(".experts") or not end.startswith(("gate_up_proj", "down_proj")):
            shapes[name] = shape
            continue
        matrix = not end.endswith("_bias")
        suffix = "weight" if matrix else "bias"
        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        if end.startswith("down_proj"):
            parts = {"down_proj": slice(None)}
        for part, columns in parts.items():
            width = len(range(*columns.indices(shape[-1])))
            new = f"{stem}.{part}.{suffix}"
            shapes[new] = (shape[0], width, shape[1]) if matrix else (shape[0], width)
            places[new] = (name, columns, matrix)

    def load(name: str) -> np.ndarray | LazyTensor:
        if name not in places:
            return source.load(name)
        stored, columns, matrix = places[name]
        tensor = source.load(stored)

        def read(part: tuple[slice, ...]) -> np.ndarray:
            """Of gate and up every other column between the first and the last of the part."""
            step, offset = columns.step or 1, columns.start or 0
            span = slice(part[1].start * step, part[1].stop * step)
            if not matrix:
                return tensor[part[0], span][:, offset::step]
            return tensor[part[0], part[2], span][..., offset::step].swapaxes(-1, -2)

        return LazyTensor(shapes[name], read)

    return dataclasses.replace(source, shapes=shapes, load=load)


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    gguf_architectures=("gpt-oss",),
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": _ROPE,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": _SWIGLU[0],
        "swiglu_limit": _SWIGLU[1],
        "attention_bias": True,
    },
    fields={"attention_sinks": True},
    read_hf=read_hf,
    read_gguf=read_gguf,
    gguf_names={
        **GGUF_EXPERTS,
        "post_attention_norm": "pre_feedforward_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    without_effect=("hidden_act",),
    adapt=adapt,
)
