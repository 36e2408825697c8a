"""The caches that an evaluation compares with, against figures worked out by hand and against NumPy."""

from types import SimpleNamespace
from typing import cast

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from oscar_jax.evaluation import fidelity, peers
from oscar_jax.evaluation.methods import PEERS, published_recipe, resolve_methods
from oscar_jax.models.config import ModelConfig
from parity_tests.evaluation.test_evaluate import random_statistics

ROWS = np.random.default_rng(4).standard_normal((100, 2, 48)).astype(np.float32)


def test_two_bits_of_a_group_by_hand() -> None:
    """0 … 9 in steps of 3: the codes of 1.4 and 1.6 are 0 and 1; a group of equal numbers is exact."""
    groups = np.asarray([[0, 1.4, 1.6, 9], [5, 5, 5, 5], [-3, 0, 2.9, 3]], np.float32)
    found = peers.fake_quantize_groups(jnp.asarray(groups), axis=1)
    np.testing.assert_allclose(found, [[0, 0, 3, 9], [5, 5, 5, 5], [-3, 1, 3, 3]], atol=1e-6)


def test_keys_go_channel_by_channel_and_values_token_by_token() -> None:
    """An outlier channel costs the other keys nothing, an outlier token the other values."""
    rows = ROWS.copy()
    rows[:, :, 5] += 300  # a channel
    rows[70] += 300  # a token
    key, value = map(np.asarray, peers.PerChannelRecipe().restore(jnp.asarray(rows), jnp.asarray(rows)))
    assert key.shape == value.shape == rows.shape
    padded = np.concatenate([rows, np.zeros((28, 2, 48), np.float32)])
    for found, group, axis in (
        (key, padded.reshape(4, 32, 2, 48), 1),
        (value, rows.reshape(100, 2, 3, 16), 3),
    ):
        low, high = group.min(axis, keepdims=True), group.max(axis, keepdims=True)
        expected = low + np.clip(np.round((group - low) / (high - low) * 3), 0, 3) * (high - low) / 3
        np.testing.assert_allclose(found, expected.reshape(-1, 2, 48)[:100], atol=1e-4)
    quiet = np.abs(key - rows)[:64]  # groups without the outlier token
    assert quiet.max() < 2 and np.abs(value - rows)[:, :, 16:].max() < 2
    loud = np.abs(value - rows)[:, :, :16].mean()  # the outlier channel's group within a row
    assert loud > 3 * np.abs(value - rows)[:, :, 16:].mean() and loud > 3 * quiet.mean()


def test_float8_rows_are_those_of_ml_dtypes() -> None:
    rows = np.concatenate([ROWS, np.zeros((1, 2, 48), np.float32), 1e5 * ROWS[:3], 1e-5 * ROWS[:3]])
    scale = (np.abs(rows).max(-1, keepdims=True) / 448).astype(ml_dtypes.bfloat16).astype(np.float32)
    scale[scale == 0] = 1
    with np.errstate(over="ignore"):
        expected = np.clip(rows / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    found, same = map(np.asarray, peers.Float8Recipe().restore(jnp.asarray(rows), jnp.asarray(rows)))
    np.testing.assert_array_equal(found, same)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.abs(found - rows).max() / np.abs(rows).max() < 2**-4 and np.isfinite(found).all()


def test_bits_of_the_peers_and_their_names() -> None:
    config = SimpleNamespace(head_dim=32)
    names, statistics = list(PEERS), {0: random_statistics()}
    methods = resolve_methods(names, cast(ModelConfig, config), [0], None, statistics)[1:]
    assert [method.name for method in methods] == names
    assert [method.bits for method in methods] == [3, 3, 8.5]  # 2 + 32/32 twice, 8 + 16/32
    assert methods[0].rotations[0].key_mean is not None
    assert [peers.per_channel_bits(d) for d in (64, 48)] == [3, 3.5]
    assert [peers.float8_bits(d) for d in (64, 128)] == [8.25, 8.125]


def test_a_centered_published_recipe_takes_the_calibrated_mean_off() -> None:
    """Keys around a mean of 50 lose almost nothing with it and nearly everything without."""
    statistics = random_statistics()
    mean = 50 * np.sign(np.random.default_rng(3).standard_normal((2, 32)))
    statistics.key_mean[:] = mean
    rows = jnp.asarray(ROWS[..., :32] + mean, jnp.float32)
    recipes = [published_recipe(statistics, centered=centered) for centered in (False, True)]
    plain, centered = (
        float(jnp.abs(fidelity.reconstruct_rows(rows, rows, recipe)[0] - rows).mean()) for recipe in recipes
    )
    assert centered < 0.6 and plain > 5 * centered
