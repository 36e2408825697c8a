"""The exact page quantizer for Hopper GPUs (Mosaic GPU): all pages of keys and values in one launch.

Byte for byte the quantizer of `quantize.py`. A block takes a run of pages and keeps the transform of one head
and role at a time; each of its warpgroups walks over pages of its own (`page.py`). The rows of the next page
arrive while a page is still being coded.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...core import cache_format as fmt
from ...core.errors import DTypeError, ShapeError
from ...quantize import Feedback, check_pages, round_to_bfloat16
from ..machine.registers import Warpgroup
from ..machine.tuning import page_costs, quantize_plan
from .page import (
    HEAD_DIMS,
    PAGE,
    THREADS,
    WARPS,
    QuantizeShape,
    quantize_tile,
    stage_rotation,
    store_corrections,
    store_value_mean,
)

BLOCKS = (2, 4, 8, 16)  # of sequential rounding
SHARED_BYTES = 227 * 1024  # that a block may ask for

# ------------------------------------------------------------------------------------------ kernel body


def quantize_body(m: Any, shape: QuantizeShape, block: tuple, refs: dict) -> None:
    """The kernel for one block. `m` is a register machine, `block` = (number,).

    Pages are numbered by kind, then by head, and a block takes a run of them, its share of the work.
    """
    pages = shape.heads * shape.pages  # of a kind
    costs = page_costs(shape.kinds, pages // shape.blocks)
    share = -(-sum(costs) * pages // shape.blocks)
    begin = block[0] * share
    for i, (kind, cost) in enumerate(zip(shape.kinds, costs)):
        before = sum(costs[:i]) * pages
        first = (begin - before).max(0).udiv(cost)
        end = (begin + (share - before)).max(0).udiv(cost).min(pages)
        m.when(first.lt(end), functools.partial(_heads, m, shape, refs, kind, first, end))


def _heads(block: Any, shape: QuantizeShape, refs: dict, kind: str, first: Any, end: Any) -> None:
    """The pages first .. end - 1 of `kind`, one head after the other."""

    def one_head(carry):
        head = carry[0].udiv(shape.pages)
        before = head * shape.pages
        until = (before + shape.pages).min(end)
        _pages(block, shape, refs, kind, head, carry[0] - before, until - before)
        return [until]

    heads = (end - 1).udiv(shape.pages) - first.udiv(shape.pages) + 1
    block.loop(heads, [first], one_head)


def _pages(block: Any, shape: QuantizeShape, refs: dict, kind: str, head: Any, first: Any, end: Any) -> None:
    """The pages first .. end - 1 of one head, dealt out to the block's warpgroups."""
    m = Warpgroup(block)
    m.area = m.shared_base + shape.area_start + m.index * shape.area_bytes
    rotation_head = head if shape.rotation_heads > 1 else m.Int(0)
    multiplier = m.load_global(m.pointer(refs[kind + "_multiplier"]).at(rotation_head, 4))[0]

    # Every warp copies the 16 rows of a page that it will read, a few at a time.
    chunks = shape.head_dim // 8  # of 16 bytes in a row
    row, chunk = m.warp * 16 + m.lane.udiv(chunks), m.lane.umod(chunks)
    slot = m.area + row * shape.row_bytes + chunk * 16
    token_stride = shape.heads * 2 * shape.head_dim
    source = m.pointer(refs[kind + "_rows"]).at(head, 2 * shape.head_dim).at(row, token_stride).at(chunk, 16)
    further = range(0, 16, 32 // chunks)  # rows

    def fetch(page):
        base = source.at(page, PAGE * token_stride)
        for n in further:
            m.copy_async(slot, base, n * shape.row_bytes, n * token_stride)

    def fetch_if_there(page):
        m.when(page.lt(end), lambda: fetch(page))
        m.commit_copies()

    first = first + m.index
    block.sync_block()  # nobody needs any more what lies in shared memory
    fetch_if_there(first)
    threads = THREADS * shape.warpgroups
    shift = stage_rotation(block, shape, refs, kind, rotation_head, threads)
    if kind == "value":
        store_value_mean(m, shape, refs, rotation_head)
    m.order_copies()  # the products read the transform past the threads that wrote it
    block.sync_block()
    store_corrections(block, shape, threads)
    block.sync_block()

    def page_step(carry):
        page = carry[0]
        slots = [slot + n * shape.row_bytes for n in further]

        def fetch_next():
            m.sync_warp()
            fetch_if_there(page + shape.warpgroups)

        m.wait_copies(0)
        m.sync_warp()
        page_head = page * shape.heads + head
        quantize_tile(m, shape, refs, kind, m.area, slots, page_head, multiplier, shift, fetch_next)
        return [page + shape.warpgroups]

    count = (end - first + (shape.warpgroups - 1)).max(0).udiv(shape.warpgroups)
    m.loop(count, [first], page_step)


def _argument_names(shape: QuantizeShape) -> tuple[list[str], list[str]]:
    inputs, outputs = [], []
    for kind in shape.kinds:
        inputs += [kind + "_rows", kind + "_transform", kind + "_multiplier"]
        inputs += ["value_mean"] if kind == "value" else []
        inputs += [kind + "_feedback", kind + "_feedback_shift"] if shape.blocks_of(kind) else []
        outputs += [kind + "_codes", kind + "_scale"] + (["key_page_mean"] if kind == "key" else [])
    return inputs, outputs


@functools.cache
def _quantize_kernel(shape: QuantizeShape) -> Any:
    """The compiled-on-first-use kernel of one shape; arrays in the order of _argument_names."""
    from ..machine.registers import compiled_kernel

    inputs, outputs = _argument_names(shape)
    shapes = fmt.int2_array_shapes(shape.pages, shape.heads, shape.head_dim)
    return compiled_kernel(
        lambda m, block, arrays: quantize_body(m, shape, block, arrays),
        inputs,
        {name: jax.ShapeDtypeStruct(shapes[name], fmt.INT2_ARRAYS[name]) for name in outputs},
        {"block": shape.blocks},
        WARPS * shape.warpgroups,
        shape.shared_bytes,
        "oscar_quantize",
    )


def quantize_shape(
    rows: jax.Array, transform: jax.Array, kinds: tuple[str, ...], steps: tuple[int, int] = (0, 0)
) -> QuantizeShape:
    """The launch plan for pages [P, 64, K, D]. Raises NotImplementedError."""
    pages, _, heads, head_dim = rows.shape
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim = {head_dim}: the Mosaic quantize kernel serves {HEAD_DIMS}")
    if pages < 1:
        raise NotImplementedError(f"{pages} pages: the Mosaic quantize kernel needs at least one")
    blocks, warpgroups = quantize_plan(pages * heads * len(kinds), head_dim)
    shape = QuantizeShape(pages, heads, head_dim, transform.shape[0], blocks, warpgroups, kinds, steps)
    while shape.shared_bytes > SHARED_BYTES and shape.warpgroups > 1:  # head_dim 256 with feedback
        shape = dataclasses.replace(shape, warpgroups=shape.warpgroups - 1)
    return shape


def _launch(shape: QuantizeShape, arrays: dict) -> dict[str, jax.Array]:
    inputs, outputs = _argument_names(shape)
    for kind in shape.kinds:
        arrays[kind + "_rows"] = round_to_bfloat16(arrays[kind + "_rows"])
    return dict(zip(outputs, _quantize_kernel(shape)(*(arrays[n] for n in inputs))))


def quantize_key_pages(
    rows: jax.Array, transform: jax.Array, multiplier: jax.Array, feedback: Feedback | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantizes whole pages of keys, centered by their own mean; the bytes of `quantize.quantize_key_pages`.

    rows bf16 [P, 64, K, D] -> words int32 [P, K, 64, D/16], scale bf16 [P, K, 64], page_mean bf16 [P, K, D].
    """
    check_pages(rows, transform, multiplier)
    steps, fed = feedback_arrays(transform, {"key": feedback})
    shape = quantize_shape(rows, transform, ("key",), steps)
    out = _launch(shape, {"key_rows": rows, "key_transform": transform, "key_multiplier": multiplier, **fed})
    return out["key_codes"], out["key_scale"], out["key_page_mean"]


def quantize_value_pages(
    rows: jax.Array,
    transform: jax.Array,
    multiplier: jax.Array,
    mean: jax.Array,
    feedback: Feedback | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Quantizes whole pages of values, centered by the calibrated mean of the rotation set.

    rows bf16 [P, 64, K, D], mean bf16 [K or 1, D] -> words int32 [P, K, D, 4], scale bf16 [P, K, 64].
    """
    check_pages(rows, transform, multiplier)
    check_mean(mean, transform)
    steps, fed = feedback_arrays(transform, {"value": feedback})
    shape = quantize_shape(rows, transform, ("value",), steps)
    arrays = {"value_rows": rows, "value_transform": transform, "value_multiplier": multiplier, **fed}
    out = _launch(shape, {**arrays, "value_mean": mean})
    return out["value_codes"], out["value_scale"]


def quantize_page_pair(key_pages: jax.Array, value_pages: jax.Array, rotation: Any) -> dict[str, jax.Array]:
    """Quantizes pages of keys and values [P, 64, K, D] in one launch: the INT2 arrays, by name."""
    if key_pages.shape != value_pages.shape:
        raise ShapeError(f"key pages {key_pages.shape} and value pages {value_pages.shape} differ")
    check_pages(key_pages, rotation.key_transform, rotation.key_multiplier)
    check_pages(value_pages, rotation.value_transform, rotation.value_multiplier)
    check_mean(rotation.value_mean, rotation.value_transform)
    names = ("key_transform", "key_multiplier", "value_transform", "value_multiplier", "value_mean")
    arrays = {name: getattr(rotation, name) for name in names}
    steps, fed = rotation_feedback(rotation)
    arrays |= fed
    shape = quantize_shape(key_pages, rotation.key_transform, ("key", "value"), steps)
    return _launch(shape, {"key_rows": key_pages, "value_rows": value_pages, **arrays})


def rotation_feedback(rotation: Any) -> tuple[tuple[int, int], dict[str, jax.Array]]:
    """`feedback_arrays` of a rotation's keys and values."""
    fed = {kind: getattr(rotation, kind + "_feedback", None) for kind in ("key", "value")}
    return feedback_arrays(rotation.key_transform, fed)


def feedback_arrays(
    transform: jax.Array, feedback: dict[str, Feedback | None]
) -> tuple[tuple[int, int], dict[str, jax.Array]]:
    """The blocks of keys and of values, 0 without feedback, and the arrays of those that are fed, by name.

    Raises ShapeError or DTypeError unless they fit the transform [K or 1, D, D], and NotImplementedError for
    a number of blocks that the kernel does not serve.
    """
    heads, head_dim, _ = transform.shape
    steps, arrays = {"key": 0, "value": 0}, {}
    for kind, fed in feedback.items():
        if fed is None:
            continue
        if fed.steps not in BLOCKS or head_dim // fed.steps < fmt.FEEDBACK_BLOCK_MIN:
            allowed = [n for n in BLOCKS if head_dim // n >= fmt.FEEDBACK_BLOCK_MIN]
            raise NotImplementedError(
                f"rounding_steps = {fed.steps} of {kind}s, head_dim = {head_dim}: the Mosaic quantizer "
                f"serves {allowed}"
            )
        if fed.matrix.shape != (heads, head_dim, head_dim) or fed.shift.shape != (heads,):
            raise ShapeError(
                f"{kind} feedback {fed.matrix.shape} and shift {fed.shift.shape}, expected "
                f"{(heads, head_dim, head_dim)} and {(heads,)}"
            )
        if fed.matrix.dtype != jnp.int8 or fed.shift.dtype != jnp.int32:
            raise DTypeError(
                f"{kind} feedback is {fed.matrix.dtype}, its shift {fed.shift.dtype}: expected int8, int32"
            )
        steps[kind] = fed.steps
        arrays |= {kind + "_feedback": fed.matrix, kind + "_feedback_shift": fed.shift}
    return (steps["key"], steps["value"]), arrays


def check_mean(mean: jax.Array, transform: jax.Array) -> None:
    if mean.shape != (transform.shape[0], transform.shape[-1]):
        raise ShapeError(f"value mean {mean.shape}, expected {(transform.shape[0], transform.shape[-1])}")
    if mean.dtype != jnp.bfloat16:
        raise DTypeError(f"value mean is {mean.dtype}, expected bfloat16")
