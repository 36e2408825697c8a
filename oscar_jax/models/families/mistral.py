"""Mistral and Ministral-shaped checkpoints: Llama with one window for all layers."""

from ..family import Family, Fields, Settings


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """The window of every layer; null for the later versions, which have none."""
    return {"layer_windows": (settings.get("sliding_window"),) * fields["num_layers"]}


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    gguf_architectures=(),  # GGUF files of Mistral are of the architecture "llama", which has no window
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read_hf=read_hf,
)
