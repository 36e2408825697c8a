"""Qwen 2 and 2.5: biases on query, key and value; later layers may have a window."""

from ..family import Family, Fields, Settings

DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_windows(settings: Settings, fields: Fields) -> Fields:
    """If switched on, a window on layers from max_window_layers on or on those in layer_types."""
    settings.get("attention_bias")  # these layers have their biases whatever it says
    layers = fields["num_layers"]
    window = settings.get("sliding_window")
    window = window if settings.flag("use_sliding_window") else None
    first = settings.get("max_window_layers", layers)
    kinds = settings.get("layer_types")
    if kinds is None:
        return {"layer_windows": tuple(window if layer >= first else None for layer in range(layers))}
    return {"layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds)}


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    gguf_architectures=("qwen2",),
    defaults=DEFAULTS,
    fields={"qkv_bias": True},
    read_hf=read_windows,
)
