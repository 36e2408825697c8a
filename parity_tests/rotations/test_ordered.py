"""The fit of sequential rounding: closed forms against their definitions, sets that both packages take."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from oscar_jax.core.errors import ConfigError
from oscar_jax.rotations import bases, fit, fixed_point, ordered, rotation, statistics
from parity_tests.conformance import oracle
from parity_tests.rotations.test_rotation import make_statistics


def turn(rows: np.ndarray, offset: float, frequencies: np.ndarray, interleaved: bool) -> np.ndarray:
    """RoPE of rows [R, D] by `offset` positions, written out pair by pair."""
    turned = rows.copy()
    half = len(frequencies)
    for pair, frequency in enumerate(frequencies):
        low, high = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        cosine, sine = np.cos(offset * frequency), np.sin(offset * frequency)
        turned[:, low] = rows[:, low] * cosine - rows[:, high] * sine
        turned[:, high] = rows[:, high] * cosine + rows[:, low] * sine
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [16, 8])
def test_spread_is_the_mean_over_offsets(monkeypatch, pairs, interleaved):
    """All channels turn, or the first 16 of 32 only."""
    monkeypatch.setattr(ordered, "_OFFSETS", 50)
    rng = np.random.default_rng(pairs)
    rows = rng.standard_normal((100, 32)) @ rng.standard_normal((32, 32))
    frequencies = 1e4 ** (-np.arange(pairs) / pairs)
    found = ordered.spread_covariance(rows.T @ rows, frequencies, interleaved, 100, 1100)
    turned = [turn(rows, offset, frequencies, interleaved) for offset in np.linspace(0, 1000, 50)]
    mean = np.mean([part.T @ part for part in turned], axis=0)
    np.testing.assert_allclose(found, (rows.T @ rows + mean) / 2, atol=1e-9 * np.abs(mean).max())


def test_spread_changes_nothing_without_rope_or_reach():
    covariance = make_statistics(1, 32).key_covariance[0]
    assert ordered.spread_covariance(covariance, np.zeros(0), False, 64, 4096) is covariance
    assert ordered.spread_covariance(covariance, np.ones(16), False, 4096, 4096) is covariance


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mix_leaves_equal_conditional_energies(size):
    """What remains of a column's energy once all later ones correct for it is the geometric mean."""
    rng = np.random.default_rng(size)
    for _ in range(20):
        energy = np.exp(rng.standard_normal(size) * 3)
        mix = ordered.geometric_mean_mix(energy)
        np.testing.assert_allclose(mix.T @ mix, np.eye(size), atol=1e-12)
        metric = mix.T @ np.diag(energy) @ mix
        remains = [1 / np.linalg.inv(metric[column:, column:])[0, 0] for column in range(size)]
        np.testing.assert_allclose(remains, np.full(size, np.exp(np.log(energy).mean())), rtol=1e-6)


@pytest.mark.parametrize(("head_dim", "steps"), [(32, 2), (48, 3), (64, 4), (80, 4), (256, 4)])
def test_fitted_set_is_valid_and_lowers_the_error_of_scores(head_dim, steps):
    """By the oracle's codes; against nearest rounding in the default basis of the same statistics."""
    entry = make_statistics(2, head_dim)
    fitted = fit.fit_layer_rotation(entry, "ordered", per_head=True, damping=0.1)
    rotation.validate_layer(
        fitted,
        layer_id=0,
        num_key_value_heads=2,
        head_dim=head_dim,
        rounding="sequential",
        rounding_steps=steps,
    )
    plain = fit.fit_layer_rotation(entry, "channel_balanced", per_head=True, damping=0.1)
    metric, stored = fit._ordered_covariances(entry)
    rng = np.random.default_rng(0)
    rows = np.stack(
        [rng.standard_normal((256, head_dim)) @ np.linalg.cholesky(matrix).T for matrix in stored], axis=1
    )

    def error(layer: rotation.LayerRotation) -> float:
        fields, feedback = layer.numpy(), None
        if "key_feedback" in fields:
            feedback = oracle.Feedback(fields["key_feedback"], fields["key_feedback_shift"], steps)
        data, zero = oracle.to_bfloat16(rows.astype(np.float32)), np.zeros((2, head_dim), np.uint16)
        arrays = data, fields["key_transform"], fields["key_multiplier"], zero
        codes, scale = oracle.quantize_rows(*arrays, feedback)
        grid = (codes - 1.5) * oracle.from_bfloat16(scale)[..., None]
        back = np.einsum("tke,kde->tkd", grid, fields["query_transform"]) - oracle.from_bfloat16(data)
        return float(np.einsum("tkd,kde,tke->", back, metric, back))

    assert error(fitted) < 0.8 * error(plain)


def test_feedback_is_the_regression_on_later_blocks():
    """One entry of a block moves the later ones by the least-squares answer, up to int8 and damping."""
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((200, 64)) @ rng.standard_normal((64, 64)) + rng.standard_normal((200, 1)) * 3
    query = rows.T @ rows / len(rows)
    feedback, shift = ordered.fit_feedback(np.eye(64), query, 0.1)
    damped = query + 0.1 * np.trace(query) / 64 * np.eye(64)
    want = np.linalg.solve(damped[16:, 16:], damped[16:, :16]).T
    assert np.abs(feedback[:16, 16:] * 2.0**-shift - want).max() <= 2.0 ** -(shift + 1)
    assert not feedback[:, :16].any() and not feedback[48:].any()


def test_refusals_name_what_is_missing(tmp_path):
    entry = make_statistics(2, 64)
    options: dict[str, Any] = {"per_head": True, "damping": 0.1}
    for changes, message in (
        ({"version": "1", "coded_query_covariance": None}, "version '1' lack coded_query_covariance"),
        ({"coded_query_covariance": None, "context": 200}, "sequences of 200 tokens, allowed: >= 384"),
        ({"rope_frequencies": None}, "lack rope_frequencies"),
    ):
        changed = dataclasses.replace(entry, **changes)
        path = tmp_path / "statistics.safetensors"
        statistics.save_statistics({0: changed}, path)
        loaded = statistics.load_statistics(path)[0]
        assert np.array_equal(fit.fit_layer_rotation(loaded, "balanced", **options).key_transform,
                              fit.fit_layer_rotation(entry, "balanced", **options).key_transform)  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            fit.fit_layer_rotation(loaded, "ordered", **options)
    with pytest.raises(ConfigError, match="of all heads of a layer"):
        fit.fit_layer_rotation(entry, ("ordered", "balanced"), **options)
    with pytest.raises(ConfigError, match="head_dim = 16 is one block"):
        fit.fit_layer_rotation(make_statistics(2, 16), "ordered", **options)
    coupled = np.diag(np.r_[np.full(16, 1e9), np.full(48, 1.0)])
    coupled[0, -1] = coupled[-1, 0] = 1e4  # the last channel would take 10**4 times the first one's error
    with pytest.raises(ConfigError, match="does not fit int8"):
        ordered.fit_feedback(np.eye(64), coupled, 0.0)


def test_a_layer_without_a_file_of_positions_reads_back(tmp_path):
    """An empty array of frequencies (no RoPE) survives the file and fits."""
    entry = dataclasses.replace(make_statistics(1, 64), rope_frequencies=np.zeros(0))
    statistics.save_statistics({4: entry}, tmp_path / "s.safetensors")
    loaded = statistics.load_statistics(tmp_path / "s.safetensors")[4]
    assert loaded.rope_frequencies is not None and loaded.rope_frequencies.shape == (0,)
    fitted = fit.fit_layer_rotation(loaded, "ordered", per_head=True, damping=0.1)
    assert bases.condition_number(fixed_point.from_fixed_point(fitted.key_transform)) < 1e3
