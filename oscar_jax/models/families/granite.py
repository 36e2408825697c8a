"""Granite 3 and 4 dense: Llama with factors on embedding, attention, residuals and logits."""

from ..family import Family, Fields, Settings
from .llama import read_hf as read_biases


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """The four factors beside Llama's biases."""
    return {
        **read_biases(settings, fields),
        "attention_scale": settings.number("attention_multiplier"),
        "embedding_scale": settings.number("embedding_multiplier"),
        "residual_scale": settings.number("residual_multiplier"),
        "logit_scale": 1.0 / settings.number("logits_scaling"),
    }


def read_gguf(settings: Settings, fields: Fields) -> Fields:
    """The four factors; zero or missing means that there is none."""
    return {
        "attention_scale": settings.number("attention.scale", 0.0) or fields["attention_scale"],
        "embedding_scale": settings.number("embedding_scale", 0.0) or 1.0,
        "residual_scale": settings.number("residual_scale", 0.0) or 1.0,
        "logit_scale": 1.0 / (settings.number("logit_scale", 0.0) or 1.0),
    }


FAMILY = Family(
    name="granite",
    model_types=("granite",),
    gguf_architectures=("granite",),
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    read_hf=read_hf,
    read_gguf=read_gguf,
    gguf_interleaves_rope=True,
)
