"""The cache of one layer as data: INT2 pages, BF16 window pages, and the tables that map sequences to them.

Which tokens are quantized depends on the length of a sequence alone; `cache.py` has the functions that write
and read. `DenseCache` is the BF16 cache beside it: the baseline, and the ring of layers with a short window.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .core import cache_format as fmt
from .core.config import CacheConfig
from .core.errors import ConfigError, DTypeError, ShapeError

PAGE = fmt.PAGE_TOKENS


class RotationArrays(Protocol):
    """What quantizer and attention read of a layer's rotation; `rotations.rotation.LayerRotation` has it."""

    @property
    def key_transform(self) -> Tensor: ...  # int16 [K or 1, D, D]
    @property
    def query_transform(self) -> Tensor: ...  # float32 [K or 1, D, D]
    @property
    def value_transform(self) -> Tensor: ...  # int16 [K or 1, D, D]
    @property
    def output_transform(self) -> Tensor: ...  # float32 [K or 1, D, D]
    @property
    def value_mean(self) -> Tensor: ...  # bf16 [K or 1, D]
    @property
    def key_multiplier(self) -> Tensor: ...  # int32 [K or 1]
    @property
    def value_multiplier(self) -> Tensor: ...  # int32 [K or 1]


@dataclasses.dataclass
class LayerCache:
    """INT2 pages, BF16 window pages, and the tables that say which sequence owns them.

    P INT2 pages, P' window pages, B sequences. `page_table[b, i]` is the physical page of history page i
    (tokens sink + 64 i ...). Window slots of a sequence: first the sink pages, then a ring of recent pages:
    token page p >= sink_pages + history_pages lies in slot sink_pages + (p - sink_pages) % recent_slots.
    `history_pages[b]` counts the INT2 pages of sequence b; it is `config.history_pages(length)`, or more
    where a sequence borrowed a prefix or was cut inside its history.
    """

    key_codes: Tensor  # int32 [P, K, 64, D/16]
    value_codes: Tensor  # int32 [P, K, D, 4]
    key_scale: Tensor  # bf16 [P, K, 64]
    value_scale: Tensor  # bf16 [P, K, 64]
    key_page_mean: Tensor  # bf16 [P, K, D]
    window_key: Tensor  # bf16 [P', K, 64, D]
    window_value: Tensor  # bf16 [P', K, 64, D]
    page_table: Tensor  # int32 [B, max_pages]
    window_table: Tensor  # int32 [B, window_slots]
    lengths: Tensor  # int32 [B]
    history_pages: Tensor  # int32 [B]
    config: CacheConfig

    # What a caller knows, see `ops.counted`; no fields: they are not part of the cache's content.
    known_counts: ClassVar[list[tuple[int, int]] | None] = None
    known_whole: ClassVar[bool] = False  # every row of the next chunk is a token, none is padding
    # What `triton_kernels/launch/repeated.py` keeps between steps; no field either.
    launches = None

    def __post_init__(self) -> None:
        """Raises ShapeError for an array that is not contiguous: kernels read and write it in place."""
        for field in dataclasses.fields(self):
            array = getattr(self, field.name)
            if isinstance(array, Tensor) and not array.is_contiguous():
                raise ShapeError(
                    f"{field.name} {tuple(array.shape)} is not contiguous: strides {array.stride()}"
                )

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.page_table.shape[0]

    @property
    def heads(self) -> int:
        """Number of key/value heads K."""
        return self.config.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head D."""
        return self.config.head_dim

    @property
    def capacity(self) -> int:
        """Tokens that one sequence's tables can hold."""
        return self.config.sink_tokens + self.config.recent_tokens + PAGE * (self.page_table.shape[1] + 1) - 1


@dataclasses.dataclass
class DenseCache:
    """BF16 keys and values of one layer; a ring if shorter than the sequence: token t in slot t % S."""

    key: Tensor  # bf16 [B, S, K, D]
    value: Tensor  # bf16 [B, S, K, D]
    lengths: Tensor  # int32 [B]
    window: int | None = None

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.key.shape[0]

    @property
    def heads(self) -> int:
        """Number of key/value heads K."""
        return self.key.shape[2]

    @property
    def head_dim(self) -> int:
        """Channels of a head D."""
        return self.key.shape[3]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence can have; a ring that holds its window forgets, and has no end."""
        slots = self.key.shape[1]
        return slots if self.window is None or slots < self.window else 2**31 - 2


def recent_slot(page: Any, config: CacheConfig) -> Any:
    """Window slot of token page `page` (past the sink), an int or an int array."""
    return config.sink_pages + (page - config.sink_pages) % config.recent_slots


def outgrown(cache: LayerCache | DenseCache, new_lengths: Tensor | None = None, tokens: int = 0) -> Tensor:
    """Which sequences are longer than their tables, also with new_lengths of `tokens` more rows: bool [B].

    So is one that claims another number of rows than 0..tokens: what it was to store is not known.
    """
    if new_lengths is None:
        return cache.lengths > cache.capacity
    wrong = (new_lengths < 0) | (new_lengths > tokens)
    return wrong | (cache.lengths > cache.capacity - new_lengths)


def check_query(
    query: Tensor,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    sink_logits: Tensor | None = None,
    softmax_scale: float = 1.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Raises ShapeError, DTypeError or ConfigError unless a query, its options and rotation fit the cache.

    query [B, N, D] or [B, T, N, D]. A ring cannot serve a window longer than the one it was made for.
    """
    require_float("query", query)
    shape = tuple(query.shape)
    middle = "" if len(shape) == 3 else "T, "
    if (
        len(shape) not in (3, 4)
        or 0 in shape
        or shape[0] != cache.batch
        or shape[-1] != cache.head_dim
        or shape[-2] % cache.heads
    ):
        raise ShapeError(
            f"query {shape}, expected [{cache.batch}, {middle}G * {cache.heads}, {cache.head_dim}], T >= 1"
        )
    if sink_logits is not None:
        require_float("sink_logits", sink_logits)
        if tuple(sink_logits.shape) != shape[-2:-1]:
            raise ShapeError(f"sink_logits {tuple(sink_logits.shape)}, expected {shape[-2:-1]}")
    if softmax_scale is None or (isinstance(softmax_scale, int | float) and not 0 < softmax_scale < math.inf):
        raise ConfigError(f"softmax_scale = {softmax_scale}, allowed: a finite number above 0")
    if isinstance(sliding_window, int | float) and (sliding_window < 1 or sliding_window % 1):
        raise ConfigError(f"sliding_window = {sliding_window}, allowed: None or a whole number of at least 1")
    check_softcap(softcap)
    if isinstance(cache, LayerCache):
        check_rotation(cache.config, rotation)
    kept = cache.config.window if isinstance(cache, LayerCache) else cache.window
    if kept is not None and (
        sliding_window is None or (isinstance(sliding_window, int) and sliding_window > kept)
    ):
        raise ConfigError(f"sliding_window = {sliding_window}, allowed: 1..{kept}, which the cache keeps")


def check_softcap(softcap: float | None) -> None:
    """Raises ConfigError unless a soft cap of attention scores is positive, or None for none."""
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigError(f"softcap = {softcap!r}, allowed: a finite number above 0, or None for none")


def check_chunk(
    query: Tensor, key: Tensor, value: Tensor, cache: LayerCache | DenseCache, new_lengths: Tensor
) -> None:
    """Raises ShapeError or DTypeError unless key and value are rows for this cache, as many as queries."""
    check_rows(cache, key, value, new_lengths)
    if query.ndim != 4 or query.shape[1] != key.shape[1]:
        raise ShapeError(
            f"query {tuple(query.shape)} and key rows {tuple(key.shape)} must have the same number of tokens"
        )


def check_rows(cache: LayerCache | DenseCache, key: Tensor, value: Tensor, new_lengths: Tensor) -> None:
    """Raises ShapeError or DTypeError unless key and value are [B, T, K, D] rows for this cache."""
    for name, rows in (("key", key), ("value", value)):
        require_float(f"{name} rows", rows)
        shape = tuple(rows.shape)
        if len(shape) != 4 or shape[0] != cache.batch or shape[2:] != (cache.heads, cache.head_dim):
            raise ShapeError(
                f"{name} rows {shape}, expected [{cache.batch}, T, {cache.heads}, {cache.head_dim}]"
            )
    if key.shape != value.shape or key.shape[1] < 1:
        raise ShapeError(
            f"key rows {tuple(key.shape)} and value rows {tuple(value.shape)} must be equal and not empty"
        )
    if isinstance(cache, LayerCache) and cache.config.window is not None:
        own = (cache.key_codes.shape[0] - 1) // cache.batch
        room = PAGE * own
        if own < cache.page_table.shape[1] and key.shape[1] > room:  # one append writes a page once
            raise ShapeError(
                f"a chunk of {key.shape[1]} tokens, allowed: 1..{room} where pages behind a window of "
                f"{cache.config.window} are given up (chunk = ... of allocate_layer_cache)"
            )
    require_array("new_lengths", new_lengths)
    if tuple(new_lengths.shape) != (cache.batch,):
        raise ShapeError(f"new_lengths {tuple(new_lengths.shape)}, expected ({cache.batch},)")
    for name, lengths in (("new_lengths", new_lengths), ("lengths of the cache", cache.lengths)):
        if lengths.dtype not in (torch.int32, torch.int64):  # the latter is what Torch makes of lists
            raise DTypeError(f"{name} is {_dtype(lengths)}, expected int32")


def check_rotation(config: CacheConfig, rotation: RotationArrays | None) -> None:
    """Raises ShapeError or DTypeError unless the rotation has the heads and the head_dim of the cache."""
    own = config.num_key_value_heads
    if rotation is None:
        raise ShapeError(f"rotation is None, an INT2 cache needs one of {own} or 1 heads")
    heads = rotation.key_transform.shape[0]
    if heads not in (1, own):
        raise ShapeError(f"rotation of {heads} heads, expected 1 or {own}")
    for name, shape, dtype in _rotation_fields(heads, config.head_dim):
        array = getattr(rotation, name)
        require_array(f"rotation: {name}", array)
        if array.shape != shape:
            raise ShapeError(f"rotation: {name} {tuple(array.shape)}, expected {shape}")
        if array.dtype != dtype:
            raise DTypeError(
                f"rotation: {name} is {_dtype(array)}, expected {str(dtype).removeprefix('torch.')}"
            )


@functools.cache
def _rotation_fields(heads: int, head_dim: int) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    """Name, shape and dtype of what quantizer and attention read; key_mean is for export only."""
    shapes = fmt.rotation_field_shapes(heads, head_dim)
    names = (name for name in fmt.ROTATION_FIELDS if name != "key_mean")
    return tuple((name, shapes[name], getattr(torch, fmt.ROTATION_FIELDS[name])) for name in names)


def require_float(name: str, array: Tensor) -> None:
    """Raises DTypeError unless something is an array of floats."""
    require_array(name, array)
    if not array.dtype.is_floating_point:
        raise DTypeError(f"{name} are {_dtype(array)}, expected bfloat16 (or a float to be rounded)")


def require_array(name: str, array: Tensor) -> None:
    """Raises DTypeError unless something is an array."""
    if not isinstance(array, Tensor):
        raise DTypeError(f"{name}: {type(array).__name__}, expected an array")


def _dtype(array: Tensor) -> str:
    """Name of an array's element type, the same in both packages."""
    return str(array.dtype).removeprefix("torch.")
