"""Products of few rows with a weight, as decoding makes them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ops import ambient_device

MIN_ROWS = 16  # of a product on tensor cores
MAX_WEIGHT = 4 << 20  # entries; wide weights are read well as they are, and filling up is two kernels more


def dot_general(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """`lax.dot_general`; on a GPU fewer than 16 rows of half precision are filled up for a small weight.

    XLA makes multiplications and sums of such a product, in several kernels far from the bandwidth of the
    weight; filled up with zeros it is one product on tensor cores. Shapes, dtypes, errors: those of `lax`.
    """
    (contracted, _), (batched, _) = dimension_numbers
    rows = math.prod(lhs.shape[:-1])
    narrow = 0 < rows < MIN_ROWS and rhs.ndim == 2 and rhs.size <= MAX_WEIGHT
    narrow = narrow and lhs.dtype in (jnp.bfloat16, jnp.float16)
    plain = tuple(contracted) == (lhs.ndim - 1,) and not batched
    # On a mesh rows lie on several devices: filling them up would gather them.
    alone = jax.sharding.get_abstract_mesh().empty
    if not (narrow and plain and alone and _on_gpu(ambient_device())):
        return lax.dot_general(lhs, rhs, dimension_numbers, **options)
    return filled_up(lhs, rhs, dimension_numbers, **options)


def filled_up(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
    """lhs [..., H] of fewer than 16 rows with rhs [H, V] or [V, H] -> [..., V]."""
    rows = lhs.reshape(-1, lhs.shape[-1])
    wide = jnp.pad(rows, ((0, MIN_ROWS - len(rows)), (0, 0)))
    # Barriers: else the compiler sees that most rows are zeros and nobody's, and undoes it.
    wide = lax.optimization_barrier(wide)
    (_, (columns,)), _ = dimension_numbers
    out = lax.dot_general(wide, rhs, (((1,), (columns,)), ((), ())), **options)
    out = lax.optimization_barrier(out)[: len(rows)]
    return out.reshape(*lhs.shape[:-1], out.shape[-1])


def _on_gpu(device: Any) -> bool:
    return device.platform == "gpu"
