"""Products of few rows: filled up on a GPU alone, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.models import products
from oscar_jax.sharding import make_mesh

PLAIN, TURNED = 0, 1  # the axis of the weight that is summed


def operands(rows: tuple[int, ...], axis: int, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array, tuple]:
    rng = np.random.default_rng(len(rows))
    weight = rng.normal(0, 1, (48, 80) if axis == PLAIN else (80, 48))
    lhs, rhs = jnp.asarray(rng.normal(0, 1, (*rows, 48)), dtype), jnp.asarray(weight, dtype)
    return lhs, rhs, (((len(rows),), (axis,)), ((), ()))


def products_in(function, *operands: jax.Array) -> list[tuple[int, ...]]:
    """Shapes of what the products of a trace result in."""
    equations = jax.make_jaxpr(lambda *x: function(*x))(*operands).jaxpr.eqns  # a trace of its own
    results = [e.outvars[0].aval for e in equations if e.primitive.name == "dot_general"]
    return [x.shape for x in results]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("axis", [PLAIN, TURNED])
@pytest.mark.parametrize("rows", [(1,), (3, 1), (15,), (2, 7)])
def test_the_numbers_are_those_of_the_plain_product(rows: tuple[int, ...], axis: int) -> None:
    """Both sum in float32 and round to bfloat16: at most one step of 2^-8 apart."""
    lhs, rhs, dimensions = operands(rows, axis)
    got = products.filled_up(lhs, rhs, dimensions).astype(jnp.float32)
    wanted = jax.lax.dot_general(lhs.astype(jnp.float32), rhs.astype(jnp.float32), dimensions)
    assert got.shape == (*rows, 80)
    assert jnp.abs(got - wanted).max() <= 2.0**-8 * jnp.abs(wanted).max()


def test_only_few_rows_of_half_precision_on_one_gpu_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything else is the plain product, whatever the device."""
    lhs, rhs, dimensions = operands((3, 1), PLAIN)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return products.dot_general(x, y, dimensions)

    assert products_in(product, lhs, rhs) == [(3, 1, 80)]
    monkeypatch.setattr(products, "_on_gpu", lambda device: True)
    assert products_in(product, lhs, rhs) == [(16, 80)]
    assert products_in(product, lhs.astype(jnp.float32), rhs.astype(jnp.float32)) == [(3, 1, 80)]
    monkeypatch.setattr(products, "MAX_WEIGHT", rhs.size - 1)
    assert products_in(product, lhs, rhs) == [(3, 1, 80)]
    monkeypatch.setattr(products, "MAX_WEIGHT", rhs.size)
    many, _, _ = operands((4, 4), PLAIN)
    assert products_in(product, many, rhs) == [(4, 4, 80)]
    with jax.set_mesh(make_mesh()):
        assert products_in(product, lhs, rhs) == [(3, 1, 80)]
