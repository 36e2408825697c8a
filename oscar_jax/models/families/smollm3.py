"""SmolLM 3: Llama whose every fourth layer has no rotary embedding."""

from ..family import Family, Fields, Settings
from .llama import read_hf as read_biases


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Layers without rope, by a list of flags (1: with) or by an interval; those may have a window."""
    layers = fields["num_layers"]
    every = settings.integer("no_rope_layer_interval")
    with_rope = settings.get("no_rope_layers")
    if with_rope is None:
        with_rope = [int((layer + 1) % every != 0) for layer in range(layers)]
    window, kinds = settings.get("sliding_window"), settings.get("layer_types")
    window = window if settings.flag("use_sliding_window") else None
    if kinds is None:
        kinds = ["full_attention" if with_rope[layer] else "sliding_attention" for layer in range(layers)]
    return {
        **read_biases(settings, fields),
        "layers_without_rope": tuple(layer for layer in range(layers) if not with_rope[layer]),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
    }


FAMILY = Family(
    name="smollm3",
    model_types=("smollm3",),
    gguf_architectures=("smollm3",),
    defaults={
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    read_hf=read_hf,
    # llama.cpp knows the interval of the one published size
    read_gguf=lambda settings, fields: {"layers_without_rope": tuple(range(3, fields["num_layers"], 4))},
    gguf_interleaves_rope=True,
)
