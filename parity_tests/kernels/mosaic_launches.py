"""Launches of the Mosaic GPU kernels on a CPU: their bodies executed by the emulator, block by block."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.core import cache_format
from oscar_jax.pallas.decode import merge as merge_mosaic_gpu
from oscar_jax.pallas.decode import mosaic_gpu as decode_mosaic_gpu
from oscar_jax.pallas.quantize import mosaic_gpu as quantize_mosaic_gpu
from oscar_jax.quantize import Feedback
from parity_tests.kernels import mosaic_emulator as emulator


def fed_rotation(rotation: Any, rng: np.random.Generator, steps: dict[str, int], full: bool = False) -> Any:
    """The rotation with feedback of any size in `steps` blocks by role; `full`: all entries +-127."""
    fields = dict(vars(rotation))
    for role, count in steps.items():
        heads, head_dim, _ = fields[role + "_transform"].shape
        block = np.arange(head_dim) // (head_dim // count)
        entries = rng.integers(-127, 128, (heads, head_dim, head_dim))
        entries = np.where(entries < 0, -127, 127) if full else entries
        matrix = jnp.asarray(entries * (block[:, None] < block[None]), jnp.int8)
        shift = rng.choice([0, 7] if full else 8, heads)
        fields[role + "_feedback"] = Feedback(matrix, jnp.asarray(shift, jnp.int32), count)
        low = cache_format.FEEDBACK_MULTIPLIER_MIN
        fields[role + "_multiplier"] = jnp.maximum(fields[role + "_multiplier"], low)
    return type(rotation)(**fields)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Runs the kernel bodies in the emulator instead of launching them."""

    def run(body: Any, shape: Any, grid: Any, warps: int, inputs: dict, outputs: dict) -> tuple:
        arrays = {name: np.array(x) for name, x in inputs.items()}
        for name, (counts, bfloat16) in outputs.items():  # bfloat16 as the bits that a kernel stores
            arrays[name] = np.full(counts, *((0x7FC1, np.uint16) if bfloat16 else (np.nan, np.float32)))
        for block in np.ndindex(*grid):
            machine = emulator.Machine(shape.shared_bytes, warps)
            body(machine, shape, tuple(map(emulator.Int, block)), arrays)
        return tuple(
            jnp.asarray(arrays[name].view(jnp.bfloat16.dtype) if bfloat16 else arrays[name])
            for name, (_, bfloat16) in outputs.items()
        )

    def decode(shape: Any) -> Any:
        names = decode_mosaic_gpu._inputs(shape)
        counts = (shape.batch, shape.heads, shape.group, shape.partials)
        outputs = {"out": ((*counts, shape.head_dim), False), "lse": (counts, False)}
        grid = (shape.splits, shape.heads * shape.tiles, shape.batch)
        body = decode_mosaic_gpu.decode_body
        return lambda *operands: run(body, shape, grid, shape.warps, dict(zip(names, operands)), outputs)

    def rows(body: Any, names: tuple, output: str) -> Any:
        def kernel(shape: Any) -> Any:
            counts = (shape.batch, shape.heads, shape.group, shape.head_dim)
            grid, warps = shape.grid.values(), merge_mosaic_gpu.WARPS
            outputs = {output: (counts, shape.out_bfloat16)}
            return lambda *operands: run(body, shape, grid, warps, dict(zip(names, operands)), outputs)

        return kernel

    def quantize(shape: Any) -> Any:
        inputs, outputs = quantize_mosaic_gpu._argument_names(shape)

        def launch(*operands: Any) -> tuple:
            arrays = dict(zip(inputs, map(np.array, operands)))
            shapes = cache_format.int2_array_shapes(shape.pages, shape.heads, shape.head_dim)
            for name in outputs:
                kind = np.int32 if name.endswith("codes") else np.uint16
                arrays[name] = np.full(shapes[name], 0x7FC1, kind)
            for block in range(shape.blocks):
                machine = emulator.Machine(shape.shared_bytes, 4 * shape.warpgroups)
                quantize_mosaic_gpu.quantize_body(machine, shape, (emulator.Int(block),), arrays)
            return tuple(
                arrays[n] if n.endswith("codes") else arrays[n].view(jnp.bfloat16.dtype) for n in outputs
            )

        return launch

    rotate = rows(merge_mosaic_gpu.rotate_body, ("query", "query_transform"), "query_rotated")
    merge = rows(merge_mosaic_gpu.merge_body, merge_mosaic_gpu._MERGE_INPUTS, "result")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_mosaic_gpu, "_decode_kernel", decode)
        patch.setattr(merge_mosaic_gpu, "_rotate_kernel", rotate)
        patch.setattr(merge_mosaic_gpu, "_merge_kernel", merge)
        patch.setattr(quantize_mosaic_gpu, "_quantize_kernel", quantize)
        yield
