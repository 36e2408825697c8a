"""What a transformers model must be to be served, and by which name it was loaded."""

import os
from typing import Any

from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..core.window_policy import WindowPolicy

LAYER_TYPES = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"  # layers with a state instead of keys and values
LINEAR_MODELS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # that were tested beside such layers


# What a model must be.


def layer_windows(config: Any) -> list[int | None]:
    """Sliding window of every layer, None for one without; ConfigError names what cannot be served."""
    text = config.get_text_config(decoder=True)
    name = type(text).__name__

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{name}: {what}, allowed: decoders with causal attention in every layer")

    if getattr(config, "is_encoder_decoder", False):
        raise refuse("encoder-decoder")
    if getattr(text, "kv_lora_rank", None):
        raise refuse(f"multi-head latent attention (kv_lora_rank = {text.kv_lora_rank})")
    if getattr(text, "use_bidirectional_attention", None) or getattr(text, "is_causal", True) is False:
        raise refuse("bidirectional attention")
    if getattr(text, "num_kv_shared_layers", 0) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise refuse("layers that share another layer's keys and values")
    if crossed := getattr(text, "cross_attention_layers", None):
        raise refuse(f"cross-attention in layers {list(crossed)}")
    layers, window = text.num_hidden_layers, getattr(text, "sliding_window", None)
    if getattr(text, "num_attention_heads", None) is None:
        raise refuse("no attention heads")
    types = _layer_types(text)
    if types is None:
        kind = "full_attention" if window is None else "sliding_attention"
        if getattr(text, "attention_chunk_size", None) is not None:
            kind = "chunked_attention"
        types = [kind] * layers
    for layer, kind in enumerate(types):
        linear = kind == LINEAR and getattr(text, "model_type", None) in LINEAR_MODELS
        if kind not in LAYER_TYPES and not linear:
            raise refuse(f"layer {layer} is {kind!r}")
    if LINEAR in types and not set(types) & set(LAYER_TYPES):
        raise refuse(f"every layer is {LINEAR!r}")
    if len(types) != layers:
        raise refuse(f"layer_types names {len(types)} of {layers} layers")
    return [window if kind == "sliding_attention" else None for kind in types]


def linear_layers(config: Any) -> tuple[int, ...]:
    """Layers with linear attention, whose state is transformers' own."""
    types = _layer_types(config.get_text_config(decoder=True)) or ()
    return tuple(layer for layer, kind in enumerate(types) if kind == LINEAR)


def int2_layers(config: Any, window_policy: WindowPolicy) -> tuple[int, ...]:
    """Layers with INT2 pages: those with keys and values that keep no BF16 ring.

    Raises ConfigError if their heads differ: rotations have one geometry.
    """
    linear = linear_layers(config)
    paged = tuple(layer for layer in window_policy.int2_layers(layer_windows(config)) if layer not in linear)
    geometry, geometries = cache_config(config), layer_geometries(config)
    for layer in paged:
        if geometries[layer] != geometry:
            raise ConfigError(
                f"layer {layer} has {_heads(geometries[layer])}, others with INT2 pages {_heads(geometry)}: "
                "rotations have one geometry, allowed: the same in all of these layers"
            )
    return paged


def _heads(config: CacheConfig) -> str:
    return f"{config.num_key_value_heads} key/value heads of {config.head_dim} channels"


def _layer_types(text: Any) -> list[str] | None:
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)


def layer_geometries(config: Any, **windows: int) -> list[CacheConfig]:
    """The geometry of every layer, whose heads may differ (Gemma 4); `windows` as in `cache_config`."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "is_heterogeneous", False):
        return [_geometry(text, **windows)] * text.num_hidden_layers
    return [_geometry(layer, **windows) for layer in text.per_layer_config]


def cache_config(config: Any, **windows: int) -> CacheConfig:
    """The geometry in a model's config; `windows` may set sink_tokens and recent_tokens.

    Where layers differ, that of those which see everything, or of the first if none does.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "is_heterogeneous", False):
        return _geometry(text, **windows)
    kinds = _layer_types(text) or ["full_attention"]
    first = kinds.index("full_attention") if "full_attention" in kinds else 0
    return layer_geometries(text, **windows)[first]


def _geometry(text: Any, **windows: int) -> CacheConfig:
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    value_dim = getattr(text, "v_head_dim", None) or head_dim
    if value_dim != head_dim:
        raise ConfigError(
            f"{type(text).__name__}: values of {value_dim} channels (v_head_dim) beside keys of {head_dim}, "
            "allowed: the same number"
        )
    return CacheConfig(
        num_query_heads=heads, num_key_value_heads=_key_value_heads(text), head_dim=head_dim, **windows
    )


def _key_value_heads(text: Any) -> int:
    """Heads of the keys that attention gets, by every key with which transformers' configurations say it."""
    heads = text.num_attention_heads
    if getattr(text, "new_decoder_architecture", False):  # Falcon's keys are repeated for all query heads
        return heads
    if (one := getattr(text, "multi_query", None)) is not None:  # Falcon, GPT BigCode: whatever else is said
        return 1 if one else getattr(text, "num_kv_heads", None) or heads
    return getattr(text, "num_key_value_heads", None) or heads


def _hub_id(config: Any) -> str | None:
    """The hub name a model was loaded by; None for a local directory or a model made in memory."""
    name = getattr(config, "_name_or_path", "") or ""
    return None if os.path.exists(name) or not name else name
