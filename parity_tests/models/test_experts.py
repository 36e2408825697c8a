"""Mixtures of experts compute what was chosen, no more: few tokens read their experts, many are grouped."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.models.experts import Experts, ExpertsConfig

COUNT, HIDDEN, WIDTH = 32, 24, 16
CONFIG = ExpertsConfig(count=COUNT, per_token=2, intermediate_size=WIDTH)


@pytest.fixture(scope="module")
def experts() -> Experts:
    """Random experts."""
    made = Experts(HIDDEN, CONFIG, jax.nn.silu, jnp.float32)
    keys = iter(jax.random.split(jax.random.key(0), 3))
    state = nnx.state(made)
    nnx.update(made, jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), state))
    return made


def inputs(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows [M, H], their experts and weights [M, 2]; only experts 3, 4, ... 9 are ever chosen."""
    rng = np.random.default_rng(tokens)
    chosen = np.stack([rng.permutation(np.arange(3, 10))[:2] for _ in range(tokens)])
    rows, weights = rng.normal(size=(tokens, HIDDEN)), rng.uniform(size=(tokens, 2))
    return jnp.asarray(rows, jnp.float32), jnp.asarray(chosen, jnp.int32), jnp.asarray(weights, jnp.float32)


def apply(experts: Experts, rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    return experts(rows, chosen, weights, jax.lax.Precision.HIGHEST)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a program, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(part := getattr(part, "jaxpr", part), "eqns"):
                yield from equations(part)


@pytest.mark.parametrize("tokens", [16, 17])
def test_the_sum_over_chosen_experts(experts: Experts, tokens: int) -> None:
    """Against the plain formula, on both sides of the change from gathering to grouping (16 tokens)."""
    rows, chosen, weights = inputs(tokens)
    kernels = [
        np.asarray(part.kernel[...]) for part in (experts.gate_proj, experts.up_proj, experts.down_proj)
    ]
    expected = np.zeros((tokens, HIDDEN))
    for row in range(tokens):
        for expert, weight in zip(np.asarray(chosen[row]), np.asarray(weights[row])):
            gate, up = (np.asarray(rows[row]) @ kernel[expert] for kernel in kernels[:2])
            expected[row] += weight * (gate / (1 + np.exp(-gate)) * up) @ kernels[2][expert]
    out = np.asarray(nnx.jit(apply)(experts, rows, chosen, weights))
    np.testing.assert_allclose(out, expected, atol=1e-5 * np.abs(expected).max())


def test_a_decode_step_reads_only_its_experts(experts: Experts) -> None:
    """Its products are as large as what was chosen; the other experts may hold anything."""
    rows, chosen, weights = inputs(2)
    graph, state = nnx.split(experts)

    def step(state: Any, *arguments: jax.Array) -> jax.Array:
        return apply(nnx.merge(graph, state), *arguments)

    others = jnp.asarray(~np.isin(np.arange(COUNT), np.asarray(chosen)))[:, None, None]
    poisoned = jax.tree.map(lambda leaf: jnp.where(others, jnp.nan, leaf), state)
    compiled = jax.jit(step)
    out = compiled(poisoned, rows, chosen, weights)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(compiled(state, rows, chosen, weights)))
    for equation in equations(jax.make_jaxpr(step)(state, rows, chosen, weights).jaxpr):
        if equation.primitive.name == "dot_general":  # [R, in] by the R gathered kernels
            assert all(variable.aval.shape[0] == chosen.size for variable in equation.invars)
        assert "ragged" not in equation.primitive.name
    cost = compiled.lower(state, rows, chosen, weights).cost_analysis()
    assert cost is not None
    # Two operations a weight that is read, and some on the activations.
    assert 2 <= cost["flops"] / (3 * chosen.size * HIDDEN * WIDTH) < 2.5


def test_many_tokens_go_through_grouped_products(experts: Experts) -> None:
    """Three ragged products over rows sorted by expert, and no other product."""
    rows, chosen, weights = inputs(90)
    found = [
        equation
        for equation in equations(jax.make_jaxpr(lambda *a: apply(experts, *a))(rows, chosen, weights).jaxpr)
        if "dot" in equation.primitive.name
    ]
    assert [equation.primitive.name.split("_general")[0] for equation in found] == ["ragged_dot"] * 3
    assert all(equation.invars[0].aval.shape[0] == chosen.size for equation in found)
