"""Streaming statistics: chunked equals whole equals a float64 oracle; pages sit at absolute positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.calibration import covariance
from oscar_jax.core.errors import ConfigError, ShapeError

TOKENS, HEADS, GROUP, HEAD_DIM = 389, 2, 3, 32
SCALE = HEAD_DIM**-0.5
COVARIANCES = (
    "query_covariance",
    "key_covariance",
    "value_covariance",
    "surrogate_value_covariance",
    "exact_value_covariance",
    "coded_query_covariance",
)


@pytest.fixture(scope="module")
def rows():
    generator = np.random.default_rng(0)
    query = generator.standard_normal((TOKENS, HEADS * GROUP, HEAD_DIM))
    key = generator.standard_normal((TOKENS, HEADS, HEAD_DIM)) + 20 * generator.standard_normal(
        (HEADS, HEAD_DIM)
    )
    value = generator.standard_normal((TOKENS, HEADS, HEAD_DIM)) * 3 + 1
    return tuple(a.astype(np.float32) for a in (query, key, value))


def attention(query, key, value):
    """Dense causal attention in float64, head by head."""
    output = np.empty_like(query, np.float64)
    for head in range(query.shape[1]):
        keys, values = (a[:, head // GROUP].astype(np.float64) for a in (key, value))
        scores = query[:, head].astype(np.float64) @ keys.T * SCALE
        scores[np.triu_indices(len(scores), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        output[:, head] = weights / weights.sum(axis=-1, keepdims=True) @ values
    return output


def shares(query, key):
    """Of each query's attention what goes to tokens that INT2 pages hold by then: float64 [T, N]."""
    share = np.zeros(query.shape[:2])
    for position in range(len(query)):
        stored = np.arange(position + 1)
        coded = (stored >= 64) & (stored < 64 + max(0, (position + 1 - 64 - 256) // 64) * 64)
        for head in range(query.shape[1]):
            scores = query[position, head].astype(np.float64) @ key[: position + 1, head // GROUP].T * SCALE
            weights = np.exp(scores - scores.max())
            share[position, head] = weights[coded].sum() / weights.sum()
    return share


def oracle(rows, metric, skip=0):
    """The definitions of covariance.py, written out in float64."""
    query, key, value = (a.astype(np.float64) for a in rows)
    output, share = attention(query, key, value), shares(query, key)
    result = {name: [] for name in (*COVARIANCES, "key_mean", "value_mean")}
    for head in range(HEADS):
        group = slice(head * GROUP, (head + 1) * GROUP)
        q, o = (a[:, group].reshape(-1, HEAD_DIM) for a in (query, output))
        result["query_covariance"].append(q.T @ q / len(q))
        result["exact_value_covariance"].append(o.T @ o / len(o))
        w = share[:, group].reshape(-1, 1)
        result["coded_query_covariance"].append(q.T @ (w * q) / w.sum())
        pages = key[skip : len(key) // 64 * 64, head].reshape(-1, 64, HEAD_DIM)
        centered = (pages - pages.mean(axis=1, keepdims=True)).reshape(-1, HEAD_DIM)
        result["key_covariance"].append(centered.T @ centered / len(centered))
        k, v = key[skip:, head], value[skip:, head]
        result["key_mean"].append(k.mean(axis=0))
        result["value_mean"].append(v.mean(axis=0))
        result["value_covariance"].append(np.cov(v.T, bias=True))
        weight = np.einsum("td,de,te->t", k, metric[head].astype(np.float64), k)
        weight = weight / weight.sum() * len(k)
        result["surrogate_value_covariance"].append(v.T @ (v * weight[:, None]) / len(k))
    return {name: np.stack(value) for name, value in result.items()}


def gather(rows, sizes, *, metric, skip=0, position=0):
    state = covariance.init_statistics(HEADS, HEAD_DIM, skip_tokens=skip)
    state = dataclasses.replace(state, surrogate_metric=jnp.asarray(metric))
    state = covariance.start_sequence(state, position)
    output, share = attention(*rows).astype(np.float32), shares(*rows[:2]).astype(np.float32)
    start = position
    for size in sizes:
        chunk = slice(start, start + size)
        query, key, value = (a[chunk] for a in rows)
        state = covariance.update_statistics(state, query, key, value, output[chunk], share[chunk])
        start += size
    return state


def compare(statistics, expected, tolerance=1e-6):
    for name, value in expected.items():
        error = np.abs(getattr(statistics, name) - value).max() / np.abs(value).max()
        assert error < tolerance, (name, error)


@pytest.fixture(scope="module")
def metric(rows):
    query, key, value = rows
    state = covariance.update_statistics(covariance.init_statistics(HEADS, HEAD_DIM), query, key, value)
    assert covariance.finalize_statistics(state).surrogate_value_covariance is None
    assert covariance.finalize_statistics(state).exact_value_covariance is None
    return np.asarray(covariance.fix_surrogate_metric(state).surrogate_metric)


@pytest.mark.parametrize(
    "sizes, skip",
    [
        ((TOKENS,), 0),
        ((TOKENS,), 64),
        ((64,) * 6 + (5,), 0),
        ((64,) * 6 + (5,), 64),
        ((1, 62, 130, 196), 0),
        ((7,) * 55 + (4,), 0),
    ],
    ids=str,
)
def test_chunked_equals_whole_equals_oracle(rows, metric, sizes, skip):
    assert sum(sizes) == TOKENS
    statistics = covariance.finalize_statistics(gather(rows, sizes, metric=metric, skip=skip))
    assert statistics.tokens == TOKENS - skip
    compare(statistics, oracle(rows, metric, skip))


@pytest.mark.parametrize("skip", [0, 64])
def test_batches_of_padded_pages_equal_the_oracle(rows, metric, skip):
    """Two equal sequences at once, in steps of 256 tokens of which the last is not full: each as alone."""
    output, share = attention(*rows).astype(np.float32), shares(*rows[:2]).astype(np.float32)
    state = covariance.init_statistics(HEADS, HEAD_DIM, skip_tokens=skip)
    state = dataclasses.replace(state, surrogate_metric=jnp.asarray(metric))
    for start in (0, 256):
        count = min(256, TOKENS - start)
        step = []
        for part in (*rows, output, share):
            padded = np.full((2, 256, *part.shape[1:]), np.nan, np.float32)  # padding may hold anything
            padded[:, :count] = part[start : start + count]
            step.append(padded)
        state = jax.jit(covariance.update_pages)(state, *step, start, count)
    statistics = covariance.finalize_statistics(state)
    assert statistics.tokens == 2 * (TOKENS - skip)
    compare(statistics, oracle(rows, metric, skip))


def test_sums_of_blocks_stay_within_the_stated_bound():
    """Entry by entry: 256 · 2⁻²⁴ of Σ |x·y|, on rows that cancel, where a plain float32 sum is far off."""
    generator = np.random.default_rng(2)
    rows = (generator.standard_normal((100_000, 1, 16)) * 1e3).astype(np.float32)
    rows[50_000:] = -rows[:50_000]
    other = np.abs(rows[:, ::-1])
    total = covariance.Total(jnp.zeros((1, 16, 16)), jnp.zeros((1, 16, 16)))
    found = covariance._value(jax.jit(covariance._add_moment)(total, rows, other))[0]
    left, right = rows[:, 0].astype(np.float64), other[:, 0].astype(np.float64)
    bound = 256 * 2.0**-24 * (np.abs(left).T @ np.abs(right))
    assert (np.abs(found - left.T @ right) <= bound).all()
    # Blocks of 256 cancel pairwise but for their float32 rounding: the sum of blocks itself is exact.
    assert np.abs(found - left.T @ right).max() < 1e-6 * (np.abs(left).T @ np.abs(right)).max()


def test_two_pass_surrogate_is_the_published_one(rows, metric):
    """With the metric taken from all queries the result is the surrogate of the same rows."""
    query = rows[0].astype(np.float64)
    for head in range(HEADS):
        group = query[:, head * GROUP : (head + 1) * GROUP].reshape(-1, HEAD_DIM)
        np.testing.assert_allclose(metric[head], group.T @ group / len(group), rtol=2e-6, atol=1e-6)


def test_merge_of_halves_equals_whole(rows, metric):
    first = gather(rows, (64, 64, 64), metric=metric)
    second = gather(rows, (1, 196), metric=metric, position=192)
    compare(covariance.finalize_statistics(covariance.merge_statistics(first, second)), oracle(rows, metric))


def test_many_chunks_lose_no_digits():
    """100 000 rows with a large mean, in 1000 chunks: a plain float32 total drifts by 1e-5."""
    generator = np.random.default_rng(1)
    rows = (generator.standard_normal((100, 1, 16)) + 100).astype(np.float32)
    state = covariance.init_statistics(1, 16)
    for _ in range(1000):
        state = covariance.update_statistics(state, rows, rows, rows)
    exact = rows[:, 0].astype(np.float64)
    gathered = covariance.finalize_statistics(state).query_covariance[0]
    np.testing.assert_allclose(gathered, exact.T @ exact / 100, rtol=1e-6)
    plain = np.float32(0)
    for _ in range(1000):
        plain = plain + rows[:, 0].T @ rows[:, 0]
    assert np.abs(plain / 100_000 / (exact.T @ exact / 100) - 1).max() > 5e-6
    assert int(state.token_rows) == 100_000 and int(state.key_rows) == 100_000 // 64 * 64


def test_new_sequence_starts_a_page(rows, metric):
    """Two sequences give the mean of both; the first one's open page does not leak into the second."""
    state = gather(rows, (64, 7, 7, 7, 7, 7, 1), metric=metric)
    state = covariance.start_sequence(state)
    query, key, value = (a[:64] for a in rows)
    state = covariance.update_statistics(state, query, key, value)
    once = covariance.finalize_statistics(gather(rows, (64,), metric=metric))
    both = covariance.finalize_statistics(state)
    assert both.tokens == 164 and int(state.key_rows) == 128
    np.testing.assert_allclose(both.key_covariance, once.key_covariance, rtol=1e-6, atol=1e-7)


def test_bfloat16_rows_are_taken_as_they_are(rows):
    rounded = tuple(jnp.asarray(a, jnp.bfloat16) for a in rows)
    state = covariance.init_statistics(HEADS, HEAD_DIM)
    narrow = covariance.update_statistics(state, rounded[0], rounded[1], rounded[2])
    query, key, value = (a.astype(jnp.float32) for a in rounded)
    wide = covariance.update_statistics(state, query, key, value)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), narrow, wide)))


def test_refusals(rows):
    state = covariance.init_statistics(HEADS, HEAD_DIM)
    query, key, value = rows
    with pytest.raises(ShapeError, match="value"):
        covariance.update_statistics(state, query, key, value[:-1])
    with pytest.raises(ShapeError, match="query has shape"):
        covariance.update_statistics(state, query[:, :3], key, value)
    with pytest.raises(ShapeError, match="coded_share has shape"):
        covariance.update_statistics(state, query, key, value, None, query[:, :3, 0])
    with pytest.raises(ConfigError, match="no full page"):
        covariance.finalize_statistics(covariance.update_statistics(state, query[:63], key[:63], value[:63]))
    with pytest.raises(ConfigError, match="no query"):
        covariance.fix_surrogate_metric(state)
    with pytest.raises(ConfigError, match="skip_tokens = 3"):
        covariance.init_statistics(HEADS, HEAD_DIM, skip_tokens=3)
    with pytest.raises(ConfigError, match="position = 65"):
        covariance.start_sequence(state, 65)
    with pytest.raises(ConfigError, match="do not merge"):
        covariance.merge_statistics(state, covariance.init_statistics(HEADS, HEAD_DIM, skip_tokens=64))
    seen = covariance.update_statistics(state, query, key, value)
    with pytest.raises(ConfigError, match="surrogate"):
        covariance.merge_statistics(state, covariance.fix_surrogate_metric(seen))
    with pytest.raises(ShapeError, match="do not merge"):
        covariance.merge_statistics(state, covariance.init_statistics(HEADS, 64))
