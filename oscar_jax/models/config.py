"""What a decoder of the supported families looks like, read from a Hugging Face config or from GGUF metadata.

Two sources, one `ModelConfig`. Everything that changes a number is stated here explicitly; a setting that the
decoder does not implement is refused by name instead of being dropped.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.config import CacheConfig
from ..core.errors import CheckpointError, ConfigError

FAMILIES = ("qwen2", "qwen3", "llama", "gemma3_text")
# GGUF architecture or Hugging Face model_type -> family
_ALIASES = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "llama": "llama",
    "gemma3": "gemma3_text",
    "gemma3_text": "gemma3_text",
}
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Published Gemma 3 configs leave out whatever equals the default of the reference implementation.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA3_WINDOW_PATTERN = 6  # every sixth layer is global
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim); GGUF does not say so


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer: channel i pairs with i + D/2 ("neox"), over the whole head.

    The angle of pair i at position p is p * theta**(-2i/D) / divisors[i]. Linear scaling has equal divisors;
    Llama 3 scaling (and its GGUF form, the tensor `rope_freqs`) has one per pair. None means all ones.
    """

    theta: float
    divisors: tuple[float, ...] | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each channel pair, float32 [D/2], in the reference's float32 arithmetic."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = np.float32(1.0) / np.float32(self.theta) ** exponent
        if self.divisors is not None:
            frequencies = frequencies / np.asarray(self.divisors, np.float32)
        return frequencies.astype(np.float32)

    def __str__(self) -> str:
        scaled = "" if self.divisors is None else f", divisors {min(self.divisors):g}..{max(self.divisors):g}"
        return f"neox, theta {self.theta:g}{scaled}"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Geometry and arithmetic of one decoder; hashable, so that it can be a static argument of `jax.jit`."""

    family: str
    model_id: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    attention_scale: float  # multiplies q.k
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None = all
    local_rope: RopeConfig | None = None  # of layers with a window (Gemma 3); None = the same rope everywhere
    qkv_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False  # also a norm after attention and after the MLP
    norm_plus_one: bool = False  # Hugging Face stores w of (1 + w); the loaders add the one
    activation: str = "silu"
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"model family {self.family!r} is not supported, allowed: {', '.join(FAMILIES)}"
            )
        if self.activation not in _ACTIVATIONS.values():
            raise ConfigError(
                f"activation {self.activation!r}, allowed: {', '.join(sorted(set(_ACTIVATIONS.values())))}"
            )
        if self.num_layers < 1 or self.vocab_size < 1 or self.hidden_size < 1 or self.intermediate_size < 1:
            raise ConfigError(
                f"layers, vocabulary and widths must be positive: {self.num_layers} layers, vocabulary "
                f"{self.vocab_size}, hidden {self.hidden_size}, intermediate {self.intermediate_size}"
            )
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(f"{len(self.layer_windows)} layer windows for {self.num_layers} layers")
        self.cache_config()  # checks heads and head_dim

    def cache_config(self, **windows: int) -> CacheConfig:
        """Geometry of one layer's cache; `windows` are `sink_tokens` and `recent_tokens`."""
        return CacheConfig(self.num_key_value_heads, self.num_query_heads, self.head_dim, **windows)

    def layer_rope(self, layer: int) -> RopeConfig:
        """Rotary embedding of a layer: Gemma's windowed layers have their own base."""
        if self.layer_windows[layer] is not None and self.local_rope is not None:
            return self.local_rope
        return self.rope


def family_of(architecture: str) -> str:
    """Family of a GGUF architecture or Hugging Face model_type; ConfigError names what is supported."""
    if architecture not in _ALIASES:
        raise ConfigError(f"architecture {architecture!r} is not supported, allowed: {', '.join(_ALIASES)}")
    return _ALIASES[architecture]


def read_hf_config(directory: Path) -> ModelConfig:
    """ModelConfig of a Hugging Face directory; raises CheckpointError if config.json is unreadable."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no config.json") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected an object")
    return config_from_hf(raw, model_id=raw.get("_name_or_path") or directory.resolve().name)


def config_from_hf(raw: Mapping[str, Any], *, model_id: str) -> ModelConfig:
    """ModelConfig of a `config.json`, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    A multimodal Gemma 3 config is read through its `text_config`. Raises ConfigError naming the key.
    """
    architecture = raw.get("model_type")
    if not isinstance(architecture, str):
        raise ConfigError("config.json has no model_type")
    family = family_of(architecture)
    gemma = family == "gemma3_text"
    source = {**_GEMMA3_DEFAULTS, **raw.get("text_config", raw)} if gemma else dict(raw)
    for key in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "attention_bias",
    ):
        if source.get(key) and not (key == "attention_bias" and family == "qwen2"):
            raise ConfigError(f"{key} = {source[key]!r} is not supported, allowed: none")
    if source.get("mlp_bias"):
        raise ConfigError(f"mlp_bias = {source['mlp_bias']!r} is not supported, allowed: false")
    activation = source.get("hidden_activation" if gemma else "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not supported, allowed: {', '.join(_ACTIVATIONS)}")

    layers, heads = _integer(source, "num_hidden_layers"), _integer(source, "num_attention_heads")
    hidden = _integer(source, "hidden_size")
    head_dim = source.get("head_dim") or hidden // heads
    scaling = float(source["query_pre_attn_scalar"]) if gemma else float(head_dim)
    rope, local_rope = _hf_ropes(source, head_dim, gemma)
    return _complete(
        family,
        model_id=model_id,
        vocab_size=_integer(source, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(source, "intermediate_size"),
        num_layers=layers,
        num_query_heads=heads,
        num_key_value_heads=source.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=_integer(source, "max_position_embeddings"),
        rms_norm_eps=float(source.get("rms_norm_eps", 1e-6)),
        attention_scale=1.0 / math.sqrt(scaling),
        rope=rope,
        local_rope=local_rope,
        layer_windows=_hf_windows(source, layers, gemma),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(source.get("tie_word_embeddings", False)),
        bos_token_id=source.get("bos_token_id"),
        eos_token_ids=_token_ids(raw.get("eos_token_id", source.get("eos_token_id"))),
    )


def config_from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    rope_divisors: tuple[float, ...] | None,
    model_id: str,
) -> ModelConfig:
    """ModelConfig of GGUF metadata; `tensor_shapes` (rows first) give the vocabulary, biases and tying.

    `rope_divisors` is the tensor `rope_freqs.weight` of a Llama 3 file. Raises ConfigError naming the key.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ConfigError("the GGUF file has no general.architecture")
    family = family_of(architecture)
    gemma = family == "gemma3_text"
    source = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    if source.get("final_logit_softcapping") or source.get("attn_logit_softcapping"):
        raise ConfigError("logit softcapping is not supported, allowed: none")

    layers, heads = _integer(source, "block_count"), _integer(source, "attention.head_count")
    hidden = _integer(source, "embedding_length")
    head_dim = source.get("attention.key_length") or hidden // heads
    if source.get("attention.value_length", head_dim) != head_dim:
        raise ConfigError(f"key and value head_dim differ: {head_dim} and {source['attention.value_length']}")
    if source.get("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError(
            f"partial rope: {source['rope.dimension_count']} of {head_dim} channels, allowed: all"
        )
    vocabulary = tensor_shapes.get("token_embd.weight")
    if vocabulary is None or len(vocabulary) != 2:
        raise ConfigError("the GGUF file has no tensor token_embd.weight")

    theta = float(source.get("rope.freq_base", 1_000_000.0 if gemma else 10_000.0))
    scaling = source.get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ConfigError(f"rope.scaling.type = {scaling!r} is not supported, allowed: none, linear")
    factor = float(source.get("rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0
    divisors = rope_divisors if rope_divisors is not None else _linear_divisors(factor, head_dim)

    window = source.get("attention.sliding_window") if gemma else None
    pattern = source.get("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
    if isinstance(pattern, list):  # one flag per layer
        windows = tuple(window if sliding else None for sliding in pattern)
    else:
        windows = tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    scale_base = hidden / heads if gemma and layers == _GEMMA3_27B_LAYERS else head_dim
    eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    return _complete(
        family,
        model_id=model_id,
        vocab_size=vocabulary[0],
        hidden_size=hidden,
        intermediate_size=_integer(source, "feed_forward_length"),
        num_layers=layers,
        num_query_heads=heads,
        num_key_value_heads=source.get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_positions=_integer(source, "context_length"),
        rms_norm_eps=float(source.get("attention.layer_norm_rms_epsilon", 1e-6)),
        attention_scale=1.0 / math.sqrt(scale_base),
        rope=RopeConfig(theta, divisors),
        local_rope=RopeConfig(float(source.get("rope.freq_base_swa", 10_000.0))) if gemma else None,
        layer_windows=windows,
        activation="gelu_tanh" if gemma else "silu",
        tie_embeddings="output.weight" not in tensor_shapes,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_token_ids([token for token in eos if token is not None]),
    )


def _complete(family: str, **fields: Any) -> ModelConfig:
    """Adds what the family alone decides."""
    gemma = family == "gemma3_text"
    return ModelConfig(
        family=family,
        qkv_bias=family == "qwen2",
        qk_norm=gemma or family == "qwen3",
        sandwich_norms=gemma,
        norm_plus_one=gemma,
        embedding_scale=math.sqrt(fields["hidden_size"]) if gemma else 1.0,
        **fields,
    )


def _integer(source: Mapping[str, Any], key: str) -> int:
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} = {value!r}, allowed: an integer >= 1")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)


def _hf_ropes(source: Mapping[str, Any], head_dim: int, gemma: bool) -> tuple[RopeConfig, RopeConfig | None]:
    """Rope of the global layers and, for Gemma, of the windowed ones."""
    theta = float(source.get("rope_theta", 10_000.0))
    parameters = source.get("rope_parameters") or source.get("rope_scaling") or {}
    if not gemma:
        return _hf_rope(parameters, theta, head_dim, source), None
    local_theta = float(source["rope_local_base_freq"])
    by_kind = parameters if "full_attention" in parameters else {"full_attention": parameters}
    local = by_kind.get("sliding_attention") or {}
    return (
        _hf_rope(by_kind["full_attention"] or {}, theta, head_dim, source),
        _hf_rope(local, local_theta, head_dim, source),
    )


def _hf_rope(
    parameters: Mapping[str, Any], theta: float, head_dim: int, source: Mapping[str, Any]
) -> RopeConfig:
    theta = float(parameters.get("rope_theta", theta))
    partial = parameters.get("partial_rotary_factor", source.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"partial_rotary_factor = {partial!r} is not supported, allowed: 1.0")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, _linear_divisors(float(parameters["factor"]), head_dim))
    if kind == "llama3":
        return RopeConfig(theta, _llama3_divisors(parameters, theta, head_dim, source))
    raise ConfigError(f"rope_type = {kind!r} is not supported, allowed: default, linear, llama3")


def _linear_divisors(factor: float, head_dim: int) -> tuple[float, ...] | None:
    return None if factor == 1.0 else (factor,) * (head_dim // 2)


def _llama3_divisors(
    parameters: Mapping[str, Any], theta: float, head_dim: int, source: Mapping[str, Any]
) -> tuple[float, ...]:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, a ramp in between."""
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key not in parameters]
    if missing:
        raise ConfigError(f"llama3 rope scaling lacks {', '.join(missing)}")
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(parameters.get("original_max_position_embeddings") or source["max_position_embeddings"])
    turns = trained * RopeConfig(theta).inverse_frequencies(head_dim).astype(np.float64) / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple(float(x) for x in 1.0 / ((1.0 - ramp) / factor + ramp))


def _hf_windows(source: Mapping[str, Any], layers: int, gemma: bool) -> tuple[int | None, ...]:
    window = source.get("sliding_window")
    kinds = source.get("layer_types")
    if kinds is not None:
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown:
            raise ConfigError(f"layer_types {unknown}, allowed: sliding_attention, full_attention")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if gemma:
        pattern = source.get("sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
        return tuple(window if (layer + 1) % pattern else None for layer in range(layers))
    if source.get("use_sliding_window") and window:
        first = source.get("max_window_layers", layers)
        return tuple(window if layer >= first else None for layer in range(layers))
    return (None,) * layers
