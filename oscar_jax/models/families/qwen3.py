"""Qwen 3: a norm on every head's query and key, head_dim apart from the hidden size."""

from ..family import Family, Fields, Settings
from .qwen2 import DEFAULTS, read_windows


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """The windows of Qwen 2, and biases on all four attention projections if the file says so."""
    bias = settings.flag("attention_bias")
    return {**read_windows(settings, fields), "qkv_bias": bias, "output_bias": bias}


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    gguf_architectures=("qwen3",),
    defaults={**DEFAULTS, "head_dim": 128},
    fields={"qk_norm": "head"},
    read_hf=read_hf,
)
