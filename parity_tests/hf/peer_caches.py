"""Caches of other methods for transformers, and what they store; `scripts/bench_peers.py` judges them.

FP8 rows and transformers' quantized layers (HQQ, quanto) store what they say: their bytes are those of their
tensors. Recipes without a cache of their own (KIVI's codes, the published OSCAR recipe) are simulated:
rows are coded and at once restored in float32, and bytes are counted from bits. All of them get rows in BF16,
quantize the layers that an `OscarCache` quantizes, and leave the BF16 rings of short sliding windows alone.
"""

import copy
import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from oscar_torch.cache import live_bytes
from oscar_torch.core import cache_format as fmt
from oscar_torch.core.config import CacheConfig
from oscar_torch.core.errors import ConfigError
from oscar_torch.core.window_policy import DEFAULT_WINDOW_POLICY
from oscar_torch.hf.cache import OscarCache
from oscar_torch.hf.layer import OscarLayer
from oscar_torch.hf.model_check import cache_config, int2_layers, layer_windows
from oscar_torch.rotations.bases import hadamard_matrix, oscar_basis
from oscar_torch.rotations.statistics import LayerStatistics

FLOAT8 = torch.float8_e4m3fn
KEY_CLIP, VALUE_CLIP = 0.96, 0.92  # of the published recipe
GROUP_CHANNELS = 128  # of the published recipe; all channels where it does not divide head_dim
GROUP = 32  # of KIVI: tokens of a key channel, channels of a value row
METADATA_BITS = 32  # scale and zero of a group, counted at 16 bits each


class Size(NamedTuple):
    """What a layer holds: bytes and numbers of its quantized history, bytes of rows that are still BF16."""

    history_bytes: int
    history_numbers: int
    window_bytes: int

    def __add__(self, other: Any) -> "Size":
        return Size(*(mine + theirs for mine, theirs in zip(self, other)))


class Recipe(Protocol):
    """How a simulated method codes whole pages of rows [B, K, T, D]."""

    @property
    def bits(self) -> float:
        """Bits per number, scales and zeros included."""
        ...

    def restore(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The rows as the codes return them, float32."""
        ...


# Two bits between a minimum and a maximum.


def fake_quantize_groups(rows: Tensor, dim: int) -> Tensor:
    """As in KIVI: codes round((x - min) / scale), 0 … 3 along `dim`, scale = (max - min) / 3, and back."""
    low, high = rows.amin(dim, keepdim=True), rows.amax(dim, keepdim=True)
    scale = (high - low) / 3
    code = ((rows - low) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, 3)
    return code * scale + low


def fake_quantize_published(rows: Tensor, rotation: Tensor, clip: float, mean: Tensor | None) -> Tensor:
    """The published path and back: less a mean [K, 1, D], rotated [D, D], clipped by |row|, 2 bits."""
    rows = rows.float() if mean is None else rows.float() - mean
    rotated, head_dim = rows @ rotation, rows.shape[-1]
    index = min(int(clip * head_dim), head_dim - 1)
    threshold = rotated.abs().sort(dim=-1).values[..., index : index + 1]
    clipped = torch.maximum(torch.minimum(rotated, threshold), -threshold)
    group = head_dim if head_dim % GROUP_CHANNELS else GROUP_CHANNELS
    grouped = clipped.unflatten(-1, (-1, group))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-8) / 3
    zero = -low / scale
    code = torch.trunc(grouped / scale + zero + 0.5).clamp(0, 3)
    restored = ((code - zero) * scale).flatten(-2) @ rotation.mT
    return restored if mean is None else restored + mean


@dataclasses.dataclass(frozen=True)
class PerChannel:
    """KIVI's codes: 32 tokens of a key channel, or 32 channels of a value row, share scale and zero."""

    bits: float = fmt.CODE_BITS + METADATA_BITS / GROUP

    def restore(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, K, T, D] as the codes return them, float32; T and D multiples of 32."""
        by_channel = key.float().unflatten(2, (-1, GROUP))
        by_token = value.float().unflatten(3, (-1, GROUP))
        return (
            fake_quantize_groups(by_channel, 3).flatten(2, 3),
            fake_quantize_groups(by_token, 4).flatten(3, 4),
        )


@dataclasses.dataclass(frozen=True)
class Rotated:
    """The published quantizer behind rotations [D, D] of keys and values; key_mean [K, 1, D] or None."""

    key_rotation: Tensor
    value_rotation: Tensor
    key_mean: Tensor | None = None

    @property
    def bits(self) -> float:
        """Bits per number."""
        head_dim = self.key_rotation.shape[-1]
        return fmt.CODE_BITS + METADATA_BITS / (head_dim if head_dim % GROUP_CHANNELS else GROUP_CHANNELS)

    def restore(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [B, K, T, D] as the codes return them, float32."""
        mean = None if self.key_mean is None else self.key_mean.to(key.device)
        matrices = self.key_rotation.to(key.device), self.value_rotation.to(key.device)
        return (
            fake_quantize_published(key, matrices[0], KEY_CLIP, mean),
            fake_quantize_published(value, matrices[1], VALUE_CLIP, None),
        )


def published(statistics: LayerStatistics, *, centered: bool = False) -> Rotated:
    """The published recipe of a layer: layer-shared rotations; `centered`: less the calibrated mean keys."""
    values = statistics.surrogate_value_covariance
    if values is None:
        raise ConfigError(
            "statistics of one sequence lack a surrogate value covariance, allowed: of two or more"
        )
    key, value = (
        torch.from_numpy(oscar_basis(covariance.mean(axis=0)).astype(np.float32))
        for covariance in (statistics.query_covariance, values)
    )
    mean = torch.from_numpy(statistics.key_mean.astype(np.float32))[:, None] if centered else None
    return Rotated(key, value, mean)


def hadamard(head_dim: int) -> Rotated:
    """The published quantizer behind a plain Hadamard rotation."""
    matrix = torch.from_numpy(hadamard_matrix(head_dim).astype(np.float32))
    return Rotated(matrix, matrix)


# Layers.


class SimulatedLayer(DynamicLayer):
    """Exact rows beside restored ones; a chunk that begins at length L reads what decoding reads at L + 1."""

    def __init__(self, recipe: Recipe, geometry: CacheConfig) -> None:
        super().__init__()
        self.recipe, self.geometry = recipe, geometry
        self.restored: list[tuple[Tensor, Tensor]] = []  # whole pages, in order

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores rows [B, K, T, D]; returns all of them as they are to be read, float32."""
        before = self.get_seq_length()
        exact = super().update(key_states, value_states)
        first = sum(key.shape[2] for key, _ in self.restored)
        end = exact[0].shape[2] // fmt.PAGE_TOKENS * fmt.PAGE_TOKENS
        if end > first:
            self.restored.append(self.recipe.restore(*(rows[:, :, first:end] for rows in exact)))
        sink = self.geometry.sink_tokens
        coded = sink + fmt.PAGE_TOKENS * self.geometry.history_pages(before + 1)
        if coded == sink:
            return exact
        key, value = (
            torch.cat(
                [rows[:, :, :sink].float(), restored[:, :, sink:coded], rows[:, :, coded:].float()], dim=2
            )
            for rows, restored in zip(exact, (torch.cat(part, dim=2) for part in zip(*self.restored)))
        )
        return key, value

    def size(self) -> Size:
        """Counted from the bits of the recipe."""
        assert self.keys is not None
        batch, heads, tokens, head_dim = self.keys.shape
        history = fmt.PAGE_TOKENS * self.geometry.history_pages(tokens)
        row = 2 * batch * heads * head_dim
        return Size(round(history * row * self.recipe.bits / 8), history * row, 2 * (tokens - history) * row)


class Float8Layer(DynamicLayer):
    """Every row in float8_e4m3fn with a bfloat16 scale of its own, per token and head; no window."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.stored: list[Tensor] = []  # key rows, key scales, value rows, value scales

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores rows [B, K, T, D]; returns all as FP8 has them, float32, but a first chunk as it is."""
        first = not self.stored
        if first:
            self.lazy_initialization(key_states, value_states)
        new = [*to_float8(key_states), *to_float8(value_states)]
        self.stored = new if first else [torch.cat(pair, dim=2) for pair in zip(self.stored, new)]
        self.tokens += key_states.shape[2]
        if first:
            return key_states, value_states
        key, key_scale, value, value_scale = self.stored
        return key.float() * key_scale.float(), value.float() * value_scale.float()

    def get_seq_length(self) -> int:
        """Tokens stored."""
        return self.tokens

    def size(self) -> Size:
        """All is history."""
        return Size(sum(x.nbytes for x in self.stored), self.stored[0].numel() + self.stored[2].numel(), 0)


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., D] in float8_e4m3fn, and their scales [..., 1], max|x| / 448 in bfloat16."""
    largest = torch.finfo(FLOAT8).max
    scale = rows.float().abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0).bfloat16()
    # The rounded scale may be too small for the largest entry, and what does not fit would become NaN.
    return (rows.float() / scale.float()).clamp(-largest, largest).to(FLOAT8), scale


class PeerCache(Cache):
    """A transformers cache whose layers are given BF16 rows, whatever the model computes in."""

    def begin(self, prompt: "PeerCache", layers: Sequence[int]) -> None:
        """Takes over a prompt that a BF16 cache has read: a forward's first `update` of an empty cache.

        `layers` are quantized, the others are copied; the rows that a first update returns are exact.
        """
        held: Any
        own: list[Any] = self.layers
        for number, held in enumerate(prompt.layers):
            if number in layers:
                own[number].update(held.keys, held.values)
            else:
                own[number] = copy.deepcopy(held)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores rows [B, K, T, D]; returns all of the layer's in the dtype of the new ones."""
        rows = key_states.bfloat16(), value_states.bfloat16()
        key, value = super().update(*rows, layer_idx, *args, **kwargs)
        return key.to(key_states.dtype), value.to(value_states.dtype)


def make_cache(
    method: str, config: Any, recipes: Mapping[int, Recipe] | None = None, *, chunk: int = fmt.PAGE_TOKENS
) -> PeerCache:
    """An empty cache of a method for `model.config`: bf16, fp8, hqq:BITS, quanto:BITS, or one of `recipes`.

    `recipes`: per quantized layer. HQQ and quanto take groups of 64, the axes that transformers recommends,
    and a residual of 256 tokens, which is given up whole once it is full, when fed by `chunk` tokens.
    Raises ConfigError for unknown methods and for models with wide sliding windows; ImportError without the
    package of a method.
    """
    geometry, windows = cache_config(config), layer_windows(config)
    quantized = int2_layers(config, DEFAULT_WINDOW_POLICY)
    name, _, bits = method.partition(":")
    if wide := [layer for layer in quantized if windows[layer] is not None]:
        raise ConfigError(
            f"layer {wide[0]} has a sliding window of {windows[wide[0]]}, allowed: rings or none"
        )
    # Fed token by token, a residual of 256 is full at every 256th: so it is with chunks that divide 64, in
    # versions of transformers that ask "+ 1 >= residual_length" and in those that ask "+ chunk >= …".
    options: dict[str, int] = {"q_group_size": 64, "residual_length": fmt.RECENT_TOKENS - chunk + 1}
    if name in ("hqq", "quanto"):
        if not bits.isdigit():
            raise ConfigError(f"method {method!r}, allowed: {name}:2, {name}:4")
        options["nbits"] = int(bits)

    def make_layer(layer: int) -> Any:
        window = windows[layer]
        if layer not in quantized:
            return DynamicLayer() if window is None else DynamicSlidingWindowLayer(sliding_window=window)
        if recipes is not None:
            return SimulatedLayer(recipes[layer], geometry)
        if name == "hqq":
            return cache_utils.HQQQuantizedLayer(**options, axis_key=1, axis_value=1)
        if name == "quanto":
            spare_quanto_its_compiler()
            return cache_utils.QuantoQuantizedLayer(**options, axis_key=0, axis_value=0)
        if name == "fp8":
            return Float8Layer()
        if name == "bf16":
            return DynamicLayer()
        raise ConfigError(f"method {method!r}, allowed: bf16, fp8, hqq:BITS, quanto:BITS, or with recipes")

    return PeerCache(layers=[make_layer(layer) for layer in range(len(windows))])


def spare_quanto_its_compiler() -> None:
    """Lets quanto unpack codes by Torch's operations: by itself it compiles an extension, for minutes."""
    extension = importlib.import_module("optimum.quanto.library.extensions.extension")
    for entry in extension._extensions.values():
        entry._lib = SimpleNamespace(unpack=unpack_codes)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Codes of `bits` bits from bytes uint8 [R, ...], lowest bits first: uint8 [R * 8 / bits, ...]."""
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)])


# What is stored.


def cache_size(cache: Cache, layers: Sequence[int]) -> Size:
    """What the quantized `layers` of a cache hold."""
    return sum((layer_size(cache.layers[layer]) for layer in layers), Size(0, 0, 0))


def layer_size(layer: Any) -> Size:
    """What one layer holds: the bytes of its tensors, or as the method counts them."""
    if isinstance(layer, (SimulatedLayer, Float8Layer)):
        return layer.size()
    if isinstance(layer, OscarLayer):
        assert layer.store is not None
        live, config = live_bytes(layer.store), layer.config
        numbers = 2 * live["int2_pages"] * fmt.PAGE_TOKENS * config.num_key_value_heads * config.head_dim
        return Size(live["int2"], numbers, live["window"])
    window = layer.keys.nbytes + layer.values.nbytes
    if not isinstance(layer, cache_utils.QuantizedLayer):
        return Size(0, 0, window)
    parts = tensors_of((layer._quantized_keys, layer._quantized_values))
    numbers = 2 * quantized_numel(layer._quantized_keys)
    return Size(sum(part.nbytes for part in parts), numbers, window)


def quantized_numel(stored: Any) -> int:
    """Numbers behind what a quantized layer keeps: quanto's tensor, or HQQ's pair of codes and notes."""
    return stored.numel() if isinstance(stored, Tensor) else stored[1]["shape"].numel()


def tensors_of(stored: Any) -> list[Tensor]:
    """All plain tensors in nested tuples, lists, dicts and tensor subclasses made of others."""
    if isinstance(stored, Tensor):
        flatten = getattr(stored, "__tensor_flatten__", None)
        if flatten is None:
            return [stored]
        return [t for name in flatten()[0] for t in tensors_of(getattr(stored, name))]
    if isinstance(stored, dict):
        stored = list(stored.values())
    return [t for part in stored for t in tensors_of(part)] if isinstance(stored, (tuple, list)) else []


def make_oscar_cache(rotations: Any, model: Any, prefill: int) -> OscarCache:
    """An `OscarCache` that reads a prompt of `prefill` tokens exactly, as the other caches do."""
    return OscarCache(rotations, model, prefill_chunk=max(fmt.PAGE_TOKENS, prefill))
