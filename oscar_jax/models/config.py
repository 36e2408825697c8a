"""What a decoder looks like: one `ModelConfig` whatever file it was read from, and no family by name.

Everything that changes a number is stated here explicitly. `hf_config` and `gguf_config` fill it in; what one
family needs stands in its file in `families/`.
"""

import dataclasses

from ..core.config import CacheConfig
from ..core.errors import ConfigError
from .experts import ExpertsConfig
from .linear_attention import LinearAttentionConfig
from .rope import RopeConfig

ACTIVATIONS = ("silu", "gelu_tanh")
# Places of a layer's norms: before and behind attention, before and behind the MLP.
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
QK_NORMS = ("", "head", "projection")  # none; of each head's D channels; of all heads' channels together


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
    layers_without_rope: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False  # of the projection behind attention
    mlp_bias: bool = False
    qk_norm: str = ""  # one of QK_NORMS
    norms: tuple[str, ...] = ("input_layernorm", "pre_feedforward_layernorm")  # of NORMS
    norm_plus_one: bool = False  # Hugging Face stores w of (1 + w); the loaders add the one
    attention_softcap: float | None = None  # c: scaled scores x become c * tanh(x / c)
    attention_gate: bool = False  # the query's projection also gives gates of the attention's output
    attention_sinks: bool = False  # a logit per query head that takes part in the softmax and has no value
    linear: LinearAttentionConfig | None = None
    linear_layers: tuple[int, ...] = ()  # layers with linear attention, which have no keys and values
    experts: ExpertsConfig | None = None
    dense_layers: tuple[int, ...] = ()  # layers without experts
    activation: str = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and MLP add
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # the same of the logits
    tie_embeddings: bool = False
    bos_token_id: int | None = None  # put before every text, None: nothing
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str | None = None  # of the weights that were loaded, core/fingerprint.py
    # Of a decoder spread over devices, see `for_shards`; 1 and 1: all on one.
    shards: int = 1  # column groups of the joined projections, each with its own query, key and value heads
    head_copies: int = 1  # how often each key/value head of the checkpoint stands, side by side

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("activation", self.activation, ACTIVATIONS),
            ("qk_norm", self.qk_norm, QK_NORMS),
            *(("norms", norm, NORMS) for norm in self.norms),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} = {value!r}, allowed: {', '.join(map(repr, allowed))}")
        for name, cap in (("attention", self.attention_softcap), ("logit", self.logit_softcap)):
            if cap is not None and not cap > 0:
                raise ConfigError(f"{name}_softcap = {cap!r}, allowed: > 0, or None for none")
        if self.num_layers < 1 or self.vocab_size < 1 or self.hidden_size < 1 or self.intermediate_size < 1:
            raise ConfigError(
                f"layers, vocabulary and widths must be positive: {self.num_layers} layers, vocabulary "
                f"{self.vocab_size}, hidden {self.hidden_size}, intermediate {self.intermediate_size}"
            )
        if len(self.layer_windows) != self.num_layers:
            raise ConfigError(f"{len(self.layer_windows)} layer windows for {self.num_layers} layers")
        linear, layers = set(self.linear_layers), set(range(self.num_layers))
        if not linear <= layers or linear == layers:
            raise ConfigError(
                f"linear_layers = {sorted(linear)}, allowed: some of {self.num_layers} layers, not all"
            )
        if linear and self.linear is None:
            raise ConfigError(f"linear_layers = {sorted(linear)} without their geometry (linear = None)")
        self.cache_config()  # checks heads and head_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with keys and values, ascending: all but the linear ones."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.linear_layers)

    def for_shards(self, shards: int) -> "ModelConfig":
        """The same model spread over `shards` devices: each has whole heads, columns and experts of its own.

        Fewer key/value heads than devices are copied, so that each device has the one its queries read.
        Raises ConfigError, naming the width, if something does not divide.
        """
        heads, experts = self.num_key_value_heads, self.experts
        if shards > 1 and self.linear_layers:
            raise ConfigError(
                f"{self.model_id!r} does not spread over {shards} devices: it has linear layers, allowed: 1"
            )
        copies = 1 if heads % shards == 0 else shards // heads
        widths = {"num_query_heads": self.num_query_heads, "num_key_value_heads": heads * copies}
        if experts is None or self.dense_layers:
            widths["intermediate_size"] = self.intermediate_size
        if experts is not None:
            widths |= {"experts": experts.count, "shared_size": experts.shared_size}
        for name, width in widths.items():
            if shards < 1 or width % shards or not copies:
                raise ConfigError(
                    f"{self.model_id!r} does not spread over {shards} devices: {name} = {width}, allowed: "
                    "divisors of it (of key/value heads also multiples)"
                )
        return dataclasses.replace(
            self, num_key_value_heads=heads * copies, shards=shards, head_copies=copies * self.head_copies
        )

    def cache_config(self, **windows: int) -> CacheConfig:
        """Geometry of one layer's cache; `windows` are `sink_tokens` and `recent_tokens`."""
        return CacheConfig(self.num_key_value_heads, self.num_query_heads, self.head_dim, **windows)

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """Rotary embedding of a layer, None for a layer without; layers with a window may have their own."""
        if layer in self.layers_without_rope:
            return None
        if self.layer_windows[layer] is not None and self.local_rope is not None:
            return self.local_rope
        return self.rope
