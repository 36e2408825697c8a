"""What one decode step writes to a layer's cache, for Hopper GPUs (Mosaic GPU): the new row of every sequence
and, where a page leaves the recent part, that page quantized. In place, in one launch.

Byte for byte `cache.append_rows` with one token. A block serves one sequence, head and kind (key or value).
It reads how far its sequence is, copies one row into the BF16 window and, once in 64 tokens, runs the page
quantizer of `quantize/page.py` on the window page that leaves. That page and the new row's page are
never the same, so blocks do not wait for one another. Nothing is prepared per call: a block that quantizes
splits the transform into limbs itself.

The cache's arrays are inputs and outputs in the same memory: a step that donates its caches copies nothing.
All blocks of a sequence read its length, and one of them must write it once none reads it any more. So each
block, when it has read, adds one to the upper bits of the length, and the last one writes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...core import cache_format as fmt
from ...core.errors import ShapeError
from ...layer_cache import LayerCache
from ...quantize import check_transform, round_to_bfloat16
from ..machine.registers import Warpgroup
from ..quantize.mosaic_gpu import check_mean, rotation_feedback
from ..quantize.page import (
    HEAD_DIMS,
    PAGE,
    THREADS,
    QuantizeShape,
    quantize_tile,
    stage_rotation,
    store_corrections,
    store_value_mean,
)

KINDS = ("key", "value")
LENGTH_BITS = 24  # of a length; the bits above count the blocks that have read it
MAX_HEADS = (1 << 32 - LENGTH_BITS) // len(KINDS) - 1

# Arrays that the kernel reads, and fields of the cache that it changes, in the order of its references.
_INPUTS = (
    *("key", "value", "new_lengths", "page_table", "window_table", "value_mean"),
    *("key_transform", "value_transform", "key_multiplier", "value_multiplier"),
)
_FEEDBACK = ("key_feedback", "key_feedback_shift", "value_feedback", "value_feedback_shift")
_STATE = (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS, "lengths", "history_pages")


@dataclasses.dataclass(frozen=True)
class AppendShape:
    """Everything that is fixed when the append kernel is built."""

    batch: int
    sink_pages: int
    recent_slots: int
    table_pages: int  # columns of the page table
    window_pages: int  # of the pool, page 0 included
    quantize: QuantizeShape  # of the INT2 pool, page 0 included; one warpgroup


# ------------------------------------------------------------------------------------------ kernel body


def append_body(m: Any, shape: AppendShape, block: tuple, refs: dict) -> None:
    """The kernel for one block. `m` is a register machine, `block` = (sequence, head, kind)."""
    sequence, head, kind = block
    for i, name in enumerate(KINDS):
        m.when(kind.eq(i), functools.partial(_append, m, shape, refs, name, sequence, head))


def _append(block: Any, shape: AppendShape, refs: dict, kind: str, sequence: Any, head: Any) -> None:
    """One head's new row of one kind, and the page that leaves, if one does."""
    m = Warpgroup(block)
    heads, head_dim = shape.quantize.heads, shape.quantize.head_dim
    slots = shape.sink_pages + shape.recent_slots

    def table(name, columns, column):
        return m.load_global(m.pointer(refs[name]).at(sequence * columns + column, 4))[0]

    row_words = head_dim // 2
    own_word = m.thread.min(row_words - 1)
    row = m.pointer(refs[kind]).at(sequence * heads + head, 2 * head_dim).at(own_word, 4)
    row = m.load_global(row)
    new = m.load_global(m.pointer(refs["new_lengths"]).at(sequence, 4))[0]
    at_length, at_history = (m.pointer(refs[name]).at(sequence, 4) for name in ("lengths", "history_pages"))
    length = m.load_changing(at_length) & ((1 << LENGTH_BITS) - 1)
    before = m.load_changing(at_history)
    kept = (shape.sink_pages + shape.recent_slots - 1) * PAGE  # tokens that stay BF16
    past = (shape.sink_pages + shape.recent_slots + shape.table_pages) * PAGE  # a length beyond the tables
    lost = (length + new).ge(past) | new.lt(0) | new.ge(2)
    new = m.select(lost, m.Int(0), new)
    due = (length + new - kept).sar(fmt.PAGE_TOKENS_LOG2)
    after = m.select(new.eq(1), before.max(due), before)

    # This block has read the counts. A thread that stores little else says so, and learns whether it is last.
    m.sync_warpgroup()
    messenger = m.thread.eq(THREADS - 32)
    arrived = m.add_global(at_length, m.Int(1 << LENGTH_BITS), messenger)

    page = length >> fmt.PAGE_TOKENS_LOG2
    in_sink = page.lt(shape.sink_pages)
    slot = m.select(in_sink, page, _recent_slot(shape, page))
    physical = table("window_table", slots, slot)

    def flush():
        source = table("window_table", slots, _recent_slot(shape, before + shape.sink_pages))
        target = table("page_table", shape.table_pages, before.min(shape.table_pages - 1))
        there = target.ge(1) & target.lt(shape.quantize.pages)
        source = source.max(0).min(shape.window_pages - 1)
        m.when(there, functools.partial(_flush, m, shape.quantize, refs, kind, head, source, target))

    m.when(before.lt(after), flush)

    def store_row():
        to = m.pointer(refs["window_" + kind]).at(physical * heads + head, 2 * PAGE * head_dim)
        m.store_global(to.at(length & (PAGE - 1), 2 * head_dim).at(m.thread, 4), row)

    stays = in_sink | page.ge(after + shape.sink_pages)
    owned = physical.ge(1) & physical.lt(shape.window_pages)
    m.when(new.eq(1) & stays & owned & m.thread.lt(row_words), store_row)

    def store_counts():
        m.store_global(at_length, [m.select(lost, m.Int(past), length + new)])
        m.store_global(at_history, [after])

    last = (arrived >> LENGTH_BITS).eq(heads * len(KINDS) - 1)
    m.when(messenger & last, store_counts)


def _recent_slot(shape: AppendShape, page: Any) -> Any:
    return (page - shape.sink_pages).umod(shape.recent_slots) + shape.sink_pages


def _flush(m: Any, shape: QuantizeShape, refs: dict, kind: str, head: Any, source: Any, target: Any) -> None:
    """Quantizes window page `source` of one head into INT2 page `target`."""
    m.area = m.shared_base + shape.area_start
    rotation_head = head if shape.rotation_heads > 1 else m.Int(0)
    row_bytes = 2 * shape.head_dim
    chunks = shape.head_dim // 8  # of 16 bytes in a row
    rows = m.pointer(refs["window_" + kind]).at(source * shape.heads + head, PAGE * row_bytes)
    own = []  # shared addresses of the chunks that this thread copies
    for n in range(PAGE * chunks // THREADS):
        flat = m.thread + n * THREADS
        row, chunk = flat.udiv(chunks), flat.umod(chunks)
        own.append(m.area + row * shape.row_bytes + chunk * 16)
        m.copy_async(own[-1], rows.at(flat, 16))
    m.commit_copies()
    multiplier = m.load_global(m.pointer(refs[kind + "_multiplier"]).at(rotation_head, 4))[0]
    if kind == "value":
        store_value_mean(m, shape, refs, rotation_head)
    shift = stage_rotation(m, shape, refs, kind, rotation_head, THREADS)
    m.wait_copies(0)
    m.order_copies()
    m.sync_warpgroup()
    store_corrections(m, shape, THREADS)
    m.sync_warpgroup()
    quantize_tile(m, shape, refs, kind, m.area, own, target * shape.heads + head, multiplier, shift)


# ------------------------------------------------------------------------------------------ launch


def input_names(shape: AppendShape) -> tuple[str, ...]:
    """The arrays that the kernel reads: _INPUTS, then the feedback of what is rounded sequentially."""
    return _INPUTS + tuple(n for n in _FEEDBACK if shape.quantize.blocks_of(n.split("_")[0]))


@functools.cache
def _append_kernel(shape: AppendShape) -> Any:
    """The compiled-on-first-use kernel of one shape: input_names and _STATE -> arrays of _STATE."""
    from ..machine.registers import kernel_function

    axes = ("sequence", "head", "kind")
    names = input_names(shape) + _STATE
    body = kernel_function(lambda m, block, refs: append_body(m, shape, block, refs), names, axes)
    kernel = plgpu.kernel(
        body,
        grid=(shape.batch, shape.quantize.heads, len(KINDS)),
        grid_names=axes,
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((shape.quantize.shared_bytes // 4,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="oscar_append",
    )

    def run(inputs, state):
        state = [jax.new_ref(array) for array in state]
        kernel(*inputs, *state)
        return [jax.ref.freeze(array) for array in state]

    return jax.jit(run)  # layers of one shape share one lowering


def append_shape(cache: LayerCache, rotation: Any) -> AppendShape:
    """The launch for this cache. Raises NotImplementedError."""
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim = {head_dim}: the Mosaic append kernel serves {HEAD_DIMS}")
    if heads > MAX_HEADS:
        raise NotImplementedError(
            f"{heads} key/value heads: the Mosaic append kernel serves up to {MAX_HEADS}"
        )
    if cache.capacity + 1 >= 1 << LENGTH_BITS:
        raise NotImplementedError(
            f"{cache.capacity} tokens a sequence: the Mosaic append kernel serves less than 2**{LENGTH_BITS}"
        )
    kernel = QuantizeShape(
        pages=cache.key_codes.shape[0],
        heads=heads,
        head_dim=head_dim,
        rotation_heads=rotation.key_transform.shape[0],
        blocks=1,
        warpgroups=1,
        kinds=KINDS,
        steps=rotation_feedback(rotation)[0],
    )
    return AppendShape(
        batch=cache.batch,
        sink_pages=config.sink_pages,
        recent_slots=config.recent_slots,
        table_pages=cache.page_table.shape[1],
        window_pages=cache.window_key.shape[0],
        quantize=kernel,
    )


def append_token(
    cache: LayerCache, rotation: Any, key: jax.Array, value: jax.Array, new_lengths: jax.Array
) -> LayerCache:
    """Appends at most one row per sequence and quantizes the pages that become history, in one launch.

    key, value bf16 [B, 1, K, D] (other floats are rounded to bf16); new_lengths int32 [B], 0 or 1. Leaves the
    bytes of `cache.append_rows`, the mark of a sequence past its tables included; under jit with donated
    caches in the memory of the old ones. Raises ShapeError, DTypeError, or NotImplementedError for a shape
    that the kernel does not serve.
    """
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    for name, rows in (("key", key), ("value", value)):
        if rows.shape != (cache.batch, 1, heads, head_dim):
            raise ShapeError(f"{name} rows {rows.shape}, expected {(cache.batch, 1, heads, head_dim)}")
    shape = append_shape(cache, rotation)
    check_transform(heads, head_dim, rotation.key_transform, rotation.key_multiplier)
    check_transform(heads, head_dim, rotation.value_transform, rotation.value_multiplier)
    check_mean(rotation.value_mean, rotation.value_transform)
    tables = {"page_table": cache.page_table, "window_table": cache.window_table}
    arrays = {"key": round_to_bfloat16(key), "value": round_to_bfloat16(value), "new_lengths": new_lengths}
    arrays |= (
        {name: getattr(rotation, name) for name in _INPUTS[5:]} | tables | rotation_feedback(rotation)[1]
    )
    state = [getattr(cache, name) for name in _STATE]
    written = _append_kernel(shape)([arrays[name] for name in input_names(shape)], state)
    return dataclasses.replace(cache, **dict(zip(_STATE, written)))
