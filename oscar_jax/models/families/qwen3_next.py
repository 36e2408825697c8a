"""Qwen 3 Next: three layers of linear attention to one of gated full attention, experts behind both."""

from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ..experts import ExpertsConfig
from ..family import Family, Fields, Settings, TensorSource
from ..linear_attention import LinearAttentionConfig
from ..tensors import computed, split, stack_experts
from .qwen2_moe import GGUF_SHARED_EXPERT, shared_gate_of_gguf
from .qwen3_moe import GGUF_EXPERTS, read_experts

LAYER_TYPES = ("full_attention", "linear_attention")
LINEAR_DEFAULTS = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
FIELDS = {"qk_norm": "head", "norm_plus_one": True, "attention_gate": True}
# What the files say about the one way in which these models are computed.
_ONLY = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "swish", "silu"),
    "mamba_ssm_dtype": (None, "float32"),
}
_UNUSED = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # further tokens are not guessed

GGUF_LINEAR = {
    "post_attention_norm": "pre_feedforward_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}


def read_layers(settings: Settings, fields: Fields) -> Fields:
    """Which layers are linear, their geometry, and attention biases."""
    for key, allowed in _ONLY.items():
        if settings.get(key) not in allowed:
            raise ConfigError(
                f"{key} = {settings.get(key)!r} is not supported, allowed: {', '.join(map(repr, allowed))}"
            )
    for key in _UNUSED:
        settings.get(key)
    bias, kinds = settings.flag("attention_bias"), settings.get("layer_types")
    period = settings.integer("full_attention_interval", 4)
    if kinds is None:
        layers = range(1, fields["num_layers"] + 1)
        kinds = ["linear_attention" if layer % period else "full_attention" for layer in layers]
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "linear_layers": tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention"),
        "linear": LinearAttentionConfig(
            key_heads=settings.integer("linear_num_key_heads"),
            value_heads=settings.integer("linear_num_value_heads"),
            key_dim=settings.integer("linear_key_head_dim"),
            value_dim=settings.integer("linear_value_head_dim"),
            conv_width=settings.integer("linear_conv_kernel_dim"),
        ),
    }


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Linear layers, and experts with a shared MLP behind a gate."""
    shared = settings.integer("shared_expert_intermediate_size")
    return {
        **read_layers(settings, fields),
        **read_experts(settings, fields, shared_size=shared, shared_gate=True),
    }


def read_gguf_layers(settings: Settings, fields: Fields) -> Fields:
    """Which blocks are linear, and their geometry; the last blocks may only guess further tokens."""
    layers = fields["num_layers"] - (settings.get("nextn_predict_layers") or 0)
    period = settings.integer("full_attention_interval", 4)
    linear = settings.get("attention.recurrent_layers")
    if linear is None:
        linear = [(layer + 1) % period != 0 for layer in range(layers)]
    value_heads = settings.integer("ssm.time_step_rank")
    inner = settings.integer("ssm.inner_size")
    if inner % value_heads:
        raise ConfigError(
            f"ssm.inner_size = {inner}, allowed: multiples of ssm.time_step_rank = {value_heads}"
        )
    return {
        "num_layers": layers,
        "layer_windows": (None,) * layers,
        "linear_layers": tuple(layer for layer in range(layers) if linear[layer]),
        "linear": LinearAttentionConfig(
            key_heads=settings.integer("ssm.group_count"),
            value_heads=value_heads,
            key_dim=settings.integer("ssm.state_size"),
            value_dim=inner // value_heads,
            conv_width=settings.integer("ssm.conv_kernel"),
        ),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """Linear layers, and experts in every block with a shared MLP behind a gate, weights normalized."""
    size = settings.integer("expert_feed_forward_length")
    return {
        **read_gguf_layers(settings, fields),
        "experts": ExpertsConfig(
            count=settings.integer("expert_count"),
            per_token=settings.integer("expert_used_count"),
            intermediate_size=size,
            normalize=True,
            shared_size=settings.integer("expert_shared_feed_forward_length", size),
            shared_gate=True,
        ),
    }


def adapt_gguf(source: TensorSource, config: Any) -> TensorSource:
    """A file has the decay itself, not its logarithm, and the convolution without its middle axis."""
    parts = {
        "linear_attn.A_log": (lambda shape: shape, lambda decay: np.log(-decay)),
        "linear_attn.conv1d.weight": (
            lambda shape: (shape[0], 1, shape[-1]),
            lambda weight: weight.reshape(len(weight), 1, -1),
        ),
    }
    return shared_gate_of_gguf(computed(source, parts), config)


def split_gates(source: TensorSource, config: Any) -> TensorSource:
    """The gates of the attention's output, which lie behind each head's queries, apart from them."""
    if any(".self_attn.gate_proj." in name for name in source.shapes):
        return source  # a decoder's own tensors
    rows = np.arange(2 * config.num_query_heads * config.head_dim).reshape(-1, 2, config.head_dim)
    parts = (("self_attn.q_proj", rows[:, 0].ravel()), ("self_attn.gate_proj", rows[:, 1].ravel()))
    return split(source, {"self_attn.q_proj": parts})


def adapt(source: TensorSource, config: Any) -> TensorSource:
    """Projections of linear layers, stored key head by key head, part by part; gates and experts."""
    linear = config.linear
    shared = linear.value_heads // linear.key_heads
    value = shared * linear.value_dim

    def grouped(widths: dict[str, int]) -> dict[str, np.ndarray]:
        ends = np.cumsum(list(widths.values()))
        rows = np.arange(linear.key_heads * ends[-1]).reshape(linear.key_heads, -1)
        return {name: part.ravel() for name, part in zip(widths, np.split(rows, ends[:-1], axis=1))}

    wide = grouped({"query": linear.key_dim, "key": linear.key_dim, "value": value, "z": value})
    narrow = grouped({"b": shared, "a": shared})
    mixed = np.concatenate([wide["query"], wide["key"], wide["value"]])
    parts = {
        "linear_attn.in_proj_qkvz": (
            ("linear_attn.in_proj_qkv", mixed),
            ("linear_attn.in_proj_z", wide["z"]),
        ),
        "linear_attn.in_proj_ba": tuple(
            (f"linear_attn.in_proj_{name}", rows) for name, rows in narrow.items()
        ),
    }
    return stack_experts(split_gates(split(source, parts), config))


FAMILY = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    gguf_architectures=("qwen3next",),
    defaults={
        **LINEAR_DEFAULTS,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    fields=FIELDS,
    layer_types=LAYER_TYPES,
    read_hf=read_hf,
    read_gguf=read_gguf,
    names={"pre_feedforward_layernorm": "post_attention_layernorm", "mlp.router": "mlp.gate"},
    gguf_names={
        **GGUF_LINEAR,
        **GGUF_EXPERTS,
        **GGUF_SHARED_EXPERT,
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_in": "linear_attn.in_proj_qkvz",  # older files
    },
    adapt=adapt,
    adapt_gguf=adapt_gguf,
)
