"""Settings and errors: frozen dataclasses, validated once, when they are made.

Twin file: byte-identical in both packages. Standard library only.
"""

import dataclasses
from typing import Any

from . import cache_format as fmt
from .errors import ConfigError


def _require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f">= {low}" if high is None else f"in {low}..{high}"
        raise ConfigError(f"{name} = {value}, allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Geometry of one layer's cache: heads, head_dim, and the lengths of the BF16 windows in tokens.

    `window`: the layer's sliding window, behind which INT2 pages are given up; None keeps them all.
    """

    num_key_value_heads: int
    num_query_heads: int
    head_dim: int
    sink_tokens: int = fmt.SINK_TOKENS
    recent_tokens: int = fmt.RECENT_TOKENS
    window: int | None = None

    def __post_init__(self) -> None:
        _require_int("num_key_value_heads", self.num_key_value_heads, 1)
        _require_int("num_query_heads", self.num_query_heads, 1)
        if self.num_query_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_query_heads = {self.num_query_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        check_head_dim(self.head_dim)
        _require_int("sink_tokens", self.sink_tokens, 0)
        _require_int("recent_tokens", self.recent_tokens, fmt.PAGE_TOKENS)
        if self.window is not None:
            _require_int("window", self.window, 1)
        for name in ("sink_tokens", "recent_tokens"):
            if getattr(self, name) % fmt.PAGE_TOKENS:
                raise ConfigError(f"{name} = {getattr(self, name)} is not a multiple of {fmt.PAGE_TOKENS}")

    @property
    def sink_pages(self) -> int:
        """Pages that stay BF16 for ever at the start of a sequence."""
        return self.sink_tokens // fmt.PAGE_TOKENS

    @property
    def recent_slots(self) -> int:
        """BF16 pages that hold the recent tokens: one more than full, for the page being filled."""
        return self.recent_tokens // fmt.PAGE_TOKENS + 1

    @property
    def window_slots(self) -> int:
        """BF16 pages one sequence can hold at a time."""
        return self.sink_pages + self.recent_slots

    def history_pages(self, length: int) -> int:
        """INT2 pages of a sequence of `length` tokens; the layout depends on the length alone."""
        return max(0, (length - self.sink_tokens - self.recent_tokens) // fmt.PAGE_TOKENS)


@dataclasses.dataclass(frozen=True)
class CalibrationConfig:
    """What a calibration run reads and which basis it fits; `damping` is relative to the mean variance.

    Basis "ordered" is the one of rounding "sequential", all others are rounded to the nearest level. One says
    the other: basis "" is "ordered" with "sequential", "channel_balanced" with "nearest"; rounding "" is what
    the basis says. With neither the fit is "sequential" wherever model and text allow it. With basis "auto"
    rounding "" means that both compete.
    """

    tokens: int = 30_000
    context: int = 4096
    basis: str = ""
    per_head: bool = True
    damping: float = 0.1
    rounding: str = ""

    BASES = ("auto", "channel_balanced", "balanced", "oscar", "hadamard", "identity", "ordered")

    def __post_init__(self) -> None:
        _require_int("tokens", self.tokens, 1)
        _require_int("context", self.context, fmt.PAGE_TOKENS)
        if self.rounding not in ("", *fmt.ROUNDINGS):
            raise ConfigError(f"rounding = {self.rounding!r}, allowed: {', '.join(fmt.ROUNDINGS)}")
        if self.rounding and not self.basis:
            basis = "ordered" if self.rounding == "sequential" else "channel_balanced"
            object.__setattr__(self, "basis", basis)
        if self.basis not in ("", *self.BASES):
            raise ConfigError(f"basis = {self.basis!r}, allowed: {', '.join(self.BASES)}")
        if self.basis not in ("", "auto"):
            own = "sequential" if self.basis == "ordered" else "nearest"
            if self.rounding not in ("", own):
                raise ConfigError(
                    f"basis = {self.basis!r} with rounding = {self.rounding!r}, allowed: {own!r}"
                    " (basis 'ordered' is the one of rounding 'sequential')"
                )
            object.__setattr__(self, "rounding", own)
        if not 0.0 <= self.damping <= 1.0:
            raise ConfigError(f"damping = {self.damping!r}, allowed: 0..1")


def check_head_dim(head_dim: int) -> None:
    """Raises ConfigError unless the format can hold rows of `head_dim` channels."""
    _require_int("head_dim", head_dim, fmt.HEAD_DIM_MULTIPLE, fmt.MAX_HEAD_DIM)
    if head_dim % fmt.HEAD_DIM_MULTIPLE:
        raise ConfigError(f"head_dim = {head_dim} is not a multiple of {fmt.HEAD_DIM_MULTIPLE}")
