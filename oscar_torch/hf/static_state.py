"""The state of one layer as a single buffer, and the decode step on it as one operator.

Why one buffer: a compiled model takes every tensor of a cache as an input whose address is checked at each
step. One uint8 buffer per layer holds the pages, the tables, the lengths and the rotation, and the operator
declares that it changes this buffer; its arrays are views at offsets that depend on a `Layout` alone. So the
operator is a function of what it is given: graphs may be replayed on another cache of the same layout.
"""

import dataclasses
import functools
import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arithmetic import exact_arithmetic
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..layer_cache import DenseCache, LayerCache
from ..quantize import Feedback
from ..rotations.rotation import FEEDBACKS, LayerRotation
from .rows import append_to_ring, append_token, decode_attention

ALIGNMENT = 256  # bytes; kernels read whole vectors


class Layout(NamedTuple):
    """What decides where an array lies in the buffer: plain integers, of which an operator gets a text."""

    batch: int
    pages: int  # INT2 pages per sequence, or slots per sequence of a ring
    query_heads: int
    heads: int
    head_dim: int
    sink_tokens: int
    recent_tokens: int
    rotation_heads: int  # 1 or `heads`; 0 for a BF16 cache
    key_steps: int = 0  # blocks of sequential rounding; 0: to the nearest
    value_steps: int = 0


def write_layout(layout: Layout) -> str:
    """A layout as one word, which a compiler compares with one guard."""
    return ",".join(map(str, layout))


@functools.lru_cache(maxsize=64)
def read_layout(text: str) -> Layout:
    """What `write_layout` wrote."""
    return Layout(*map(int, text.split(",")))


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The arrays of one layer, all of them views of one buffer."""

    store: LayerCache | DenseCache
    rotation: LayerRotation | None
    reached: Tensor | None  # int32 [B], of rings: the length that each has been written up to
    opened_as: tuple[Layout, int | None]  # what `open_state` was given


# By the address of their buffer, which is theirs as long as they live.
_opened: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()


@functools.lru_cache(maxsize=64)
def cache_geometry(layout: Layout) -> CacheConfig:
    """The CacheConfig of a layout."""
    return CacheConfig(
        num_key_value_heads=layout.heads,
        num_query_heads=layout.query_heads,
        head_dim=layout.head_dim,
        sink_tokens=layout.sink_tokens,
        recent_tokens=layout.recent_tokens,
    )


@functools.lru_cache(maxsize=64)
def _places(layout: Layout) -> tuple[dict[str, tuple[int, torch.dtype, tuple[int, ...]]], int]:
    """Where each array begins, its dtype and its shape, by name; and the bytes of the whole buffer."""
    batch, heads, head_dim = layout.batch, layout.heads, layout.head_dim
    arrays: dict[str, tuple[str, tuple[int, ...]]] = {"lengths": ("int32", (batch,))}
    if layout.rotation_heads:
        slots = cache_geometry(layout).window_slots
        arrays |= {
            "history_pages": ("int32", (batch,)),
            "page_table": ("int32", (batch, layout.pages)),
            "window_table": ("int32", (batch, slots)),
        }
        for name, shape in fmt.rotation_field_shapes(layout.rotation_heads, head_dim).items():
            arrays[name] = (fmt.ROTATION_FIELDS[name], shape)
        for name, steps in zip(FEEDBACKS, (layout.key_steps, layout.value_steps)):
            if steps:
                arrays[name] = ("int8", (layout.rotation_heads, head_dim, head_dim))
                arrays[f"{name}_shift"] = ("int32", (layout.rotation_heads,))
        for name, shape in fmt.window_array_shapes(1 + batch * slots, heads, head_dim).items():
            arrays[name] = (fmt.WINDOW_ARRAYS[name], shape)
        for name, shape in fmt.int2_array_shapes(1 + batch * layout.pages, heads, head_dim).items():
            arrays[name] = (fmt.INT2_ARRAYS[name], shape)
    else:
        rows = ("bfloat16", (batch, layout.pages, heads, head_dim))
        arrays |= {"reached": ("int32", (batch,)), "key": rows, "value": rows}
    places, end = {}, 0
    for name, (dtype_name, shape) in arrays.items():
        dtype = getattr(torch, dtype_name)
        places[name] = (end, dtype, shape)
        end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return places, end


def open_state(buffer: Tensor, layout: Layout, window: int | None) -> State:
    """The arrays in a buffer; `window` is the number of tokens that a ring keeps."""
    arrays: dict[str, Any] = {
        name: buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for name, (start, dtype, shape) in _places(layout)[0].items()
    }
    if not layout.rotation_heads:
        reached = arrays.pop("reached")
        return _noted(buffer, State(DenseCache(**arrays, window=window), None, reached, (layout, window)))
    fields: dict[str, Any] = {name: arrays.pop(name) for name in fmt.ROTATION_FIELDS}
    for name, steps in zip(FEEDBACKS, (layout.key_steps, layout.value_steps)):
        if steps:
            fields[name] = Feedback(arrays.pop(name), arrays.pop(f"{name}_shift"), steps)
    rotation = LayerRotation(**fields)
    store = LayerCache(**arrays, config=cache_geometry(layout))
    return _noted(buffer, State(store, rotation, None, (layout, window)))


def _noted(buffer: Tensor, state: State) -> State:
    _opened[buffer.data_ptr()] = state
    return state


def pin(tensor: Tensor) -> Tensor:
    """Promises a compiler that the tensor keeps its address: CUDA graphs then use it where it is."""
    torch._dynamo.mark_static_address(tensor, guard=False)
    torch._dynamo.mark_static(tensor)
    return tensor


def new_state(
    layout: Layout, rotation: LayerRotation | None, window: int | None, device: torch.device
) -> tuple[Tensor, State]:
    """An empty buffer uint8 [bytes] in which every sequence owns its pages, and its arrays."""
    buffer = pin(torch.zeros(_places(layout)[1], dtype=torch.uint8, device=device))
    state = open_state(buffer, layout, window)
    if isinstance(state.store, LayerCache):
        for table in (state.store.page_table, state.store.window_table):
            torch.arange(1, table.numel() + 1, dtype=torch.int32, out=table.view(-1))
        for name in fmt.ROTATION_FIELDS:
            getattr(state.rotation, name).copy_(getattr(rotation, name))
        for name in FEEDBACKS:
            if (feedback := getattr(rotation, name)) is not None:
                getattr(state.rotation, name).matrix.copy_(feedback.matrix)
                getattr(state.rotation, name).shift.copy_(feedback.shift)
    return buffer, state


@exact_arithmetic
def decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    state: State,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Stores one row per sequence and attends: query [B, N, 1, D], key, value [B, K, 1, D] -> [B, 1, N, D].

    new_lengths int32 [B]: 1, or 0 for a sequence whose row is padding; its output means nothing. Nothing
    waits for the device, and the caller knows that there is room.
    """
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(state.store, DenseCache):
        append_to_ring(state.store, key, value, new_lengths)
        assert state.reached is not None
        torch.maximum(state.reached, state.store.lengths, out=state.reached)
    else:
        append_token(state.store, state.rotation, key, value, new_lengths, implementation)
    out = decode_attention(
        query[:, :, 0], state.store, state.rotation, softmax_scale=softmax_scale,
        sliding_window=sliding_window, sink_logits=sink_logits, softcap=softcap,
        implementation=implementation,
    )  # fmt: skip
    return out[:, None]


@torch.library.custom_op("oscar_kv::decode_step", mutates_args=("buffer",))
def decode_step_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    buffer: Tensor,
    layout: str,
    window: int | None,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: Tensor | None,
    softcap: float | None,
    implementation: str | None,
) -> Tensor:
    """`decode_step` on a buffer: what a compiled model calls."""
    opened_as = read_layout(layout), window
    state = _opened.get(buffer.data_ptr())
    if state is None or state.opened_as != opened_as:
        state = open_state(buffer, *opened_as)
    return decode_step(
        query, key, value, new_lengths, state, softmax_scale=softmax_scale, sliding_window=sliding_window,
        sink_logits=sink_logits, softcap=softcap, implementation=implementation,
    )  # fmt: skip


@decode_step_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    buffer: Tensor,
    layout: str,
    window: int | None,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: Tensor | None,
    softcap: float | None,
    implementation: str | None,
) -> Tensor:
    batch, heads, _, head_dim = query.shape
    return query.new_empty((batch, 1, heads, head_dim))
