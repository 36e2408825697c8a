"""Rotary embedding: which channels turn, how fast, and the ways of stretching that configurations name."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
# Keys of `rope_parameters` that each type reads; transformers warns about others, here they are refused.
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_TYPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
}
_TRAINED_KEY = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; R channels from the front of the head turn, in R/2 pairs.

    The angle of pair i at position p is p * theta**(-2i/R) / divisors[i]; channel i pairs with i + R/2, or,
    if `interleaved`, 2i with 2i + 1. `rotary_dim` None: R = D. `attention_factor` multiplies cosine and sine.

    Two kinds depend on the largest position p of a call, as in transformers: from `trained_positions` tokens
    on, `long_divisors` hold instead, or theta grows by (dynamic_factor * (p + 1) / trained - dynamic_factor
    + 1)**(R/(R-2)).
    """

    theta: float
    divisors: tuple[float, ...] | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    attention_factor: float = 1.0
    long_divisors: tuple[float, ...] | None = None
    dynamic_factor: float | None = None
    trained_positions: int | None = None

    def rotary_width(self, head_dim: int) -> int:
        """Channels that turn, R."""
        return head_dim if self.rotary_dim is None else self.rotary_dim

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each channel pair, float32 [R/2], in the reference's float32 arithmetic."""
        width = self.rotary_width(head_dim)
        exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        frequencies = np.float32(1.0) / np.float32(self.theta) ** exponent
        if self.divisors is not None:
            frequencies = frequencies / np.asarray(self.divisors, np.float32)
        return frequencies.astype(np.float32)

    def frequencies_at(self, head_dim: int, positions: jax.Array) -> jax.Array:
        """`inverse_frequencies` as a call with these positions uses them, float32 [R/2]."""
        plain = jnp.asarray(self.inverse_frequencies(head_dim))
        if self.long_divisors is None and self.dynamic_factor is None:
            return plain
        assert self.trained_positions is not None
        tokens = positions.max() + 1
        if self.long_divisors is not None:
            long = dataclasses.replace(self, divisors=self.long_divisors)
            far = jnp.asarray(long.inverse_frequencies(head_dim))
            return jnp.where(tokens > self.trained_positions, far, plain)
        assert self.dynamic_factor is not None
        width = self.rotary_width(head_dim)
        stretch = jnp.maximum(tokens, self.trained_positions).astype(jnp.float32) / self.trained_positions
        growth = self.dynamic_factor * stretch - (self.dynamic_factor - 1)
        theta = self.theta * growth ** (width / (width - 2))
        exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
        return 1.0 / theta**exponent

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "neox"
        part = "" if self.rotary_dim is None else f", first {self.rotary_dim} channels"
        scaled = "" if self.divisors is None else f", divisors {min(self.divisors):g}..{max(self.divisors):g}"
        if self.long_divisors is not None:
            scaled += f", from {self.trained_positions} tokens on {max(self.long_divisors):g}"
        if self.dynamic_factor is not None:
            scaled += f", dynamic {self.dynamic_factor:g} from {self.trained_positions} tokens on"
        return f"{pairs}, theta {self.theta:g}{part}{scaled}"


def apply_rope(rows: jax.Array, positions: jax.Array, rope: RopeConfig) -> jax.Array:
    """Rotates channel pairs of rows [B, T, heads, D] by positions [B, T]; float32 inside, dtype of rows."""
    width = rope.rotary_width(rows.shape[-1])
    frequencies = rope.frequencies_at(rows.shape[-1], positions)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [B, T, 1, R/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    turning = rows[..., :width].astype(jnp.float32)
    if rope.interleaved:
        low, high = turning[..., ::2], turning[..., 1::2]
        turned = jnp.stack([low * cos - high * sin, high * cos + low * sin], axis=-1).reshape(turning.shape)
    else:
        low, high = jnp.split(turning, 2, axis=-1)
        turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    turned = turned.astype(rows.dtype)
    return turned if width == rows.shape[-1] else jnp.concatenate([turned, rows[..., width:]], axis=-1)


def rope_of_parameters(
    parameters: Mapping[str, Any],
    *,
    theta: float,
    head_dim: int,
    max_positions: int,
    trained_positions: int | None = None,
    partial_rotary_factor: float | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """RopeConfig of one `rope_parameters` / `rope_scaling` object, with the meaning transformers gives it.

    `theta` and `partial_rotary_factor` are what stands beside the object and holds if it does not say;
    `trained_positions` beside it wins over the object's own. Raises ConfigError naming the key.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope_type = {kind!r} is not supported, allowed: {', '.join(ROPE_TYPES)}")
    known = _COMMON_KEYS | _TYPE_KEYS[kind] | {_TRAINED_KEY}
    if unknown := sorted(set(parameters) - known):
        raise ConfigError(
            f"rope parameters of type {kind!r}: unknown key {unknown[0]!r} = {parameters[unknown[0]]!r}, "
            f"allowed: {', '.join(sorted(known))}"
        )
    theta = float(parameters.get("rope_theta", theta))
    part = parameters.get("partial_rotary_factor", partial_rotary_factor)
    width = head_dim if part is None else int(head_dim * part)
    if not 0 < width <= head_dim or width % 2:
        raise ConfigError(
            f"partial_rotary_factor = {part!r}: {width} channels turn, allowed: 2..{head_dim}, even"
        )
    plain = RopeConfig(theta, rotary_dim=None if width == head_dim else width, interleaved=interleaved)
    if kind == "default":
        return plain

    def number(key: str) -> float:
        value = parameters.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{kind} rope scaling: {key} = {value!r}, expected a number")
        return float(value)

    trained = int(trained_positions or parameters.get(_TRAINED_KEY) or max_positions)
    if kind == "linear":
        return dataclasses.replace(plain, divisors=linear_divisors(number("factor"), width))
    if kind == "dynamic":
        # transformers measures from max_position_embeddings, whatever the object says
        return dataclasses.replace(plain, dynamic_factor=number("factor"), trained_positions=max_positions)
    if kind == "llama3":
        numbers = (number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
        return dataclasses.replace(plain, divisors=_llama3_divisors(plain, head_dim, trained, *numbers))
    if kind == "yarn":
        factor = max_positions / trained if parameters.get("factor") is None else number("factor")
        return _yarn(plain, parameters, head_dim, factor, trained)
    return _longrope(plain, parameters, width, max_positions, trained)


def linear_divisors(factor: float, width: int) -> tuple[float, ...] | None:
    """Divisors of linear scaling for `width` turning channels; None for a factor of 1."""
    return None if factor == 1.0 else (factor,) * (width // 2)


def _llama3_divisors(
    plain: RopeConfig, head_dim: int, trained: int, factor: float, low: float, high: float
) -> tuple[float, ...]:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, a ramp in between."""
    turns = trained * plain.inverse_frequencies(head_dim).astype(np.float64) / (2 * math.pi)
    ramp = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return tuple(float(x) for x in 1.0 / ((1.0 - ramp) / factor + ramp))


def _yarn(
    plain: RopeConfig, parameters: Mapping[str, Any], head_dim: int, factor: float, trained: int
) -> RopeConfig:
    """YaRN (arXiv 2309.00071): a ramp over pairs from kept to stretched, and hotter attention."""
    width = plain.rotary_width(head_dim)

    def mscale(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention = parameters.get("attention_factor")
    if attention is None:
        one, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)

    def pair_of(turns: float) -> float:
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(plain.theta))

    low = pair_of(float(parameters.get("beta_fast") or 32))
    high = pair_of(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
    divisors = tuple(float(x) for x in 1.0 / (ramp / factor + (1.0 - ramp)))
    return dataclasses.replace(plain, divisors=divisors, attention_factor=float(attention))


def _longrope(
    plain: RopeConfig, parameters: Mapping[str, Any], width: int, max_positions: int, trained: int
) -> RopeConfig:
    """LongRoPE (arXiv 2402.13753): a measured divisor per pair, one set for short and one for long texts."""
    divisors = []
    for key in ("short_factor", "long_factor"):
        values = parameters.get(key)
        if not isinstance(values, list) or len(values) != width // 2:
            raise ConfigError(f"longrope rope scaling: {key} = {values!r}, expected {width // 2} numbers")
        divisors.append(tuple(float(value) for value in values))
    # `factor` only tells the attention factor; without it the ratio of the lengths does
    factor = parameters.get("factor") or max_positions / trained
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return dataclasses.replace(
        plain,
        divisors=divisors[0],
        long_divisors=divisors[1],
        trained_positions=trained,
        attention_factor=float(attention),
    )
