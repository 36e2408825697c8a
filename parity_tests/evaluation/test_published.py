"""The published recipe against its formulas, written out one row at a time in NumPy."""

import numpy as np
import pytest

from oscar_jax.core.errors import ConfigError, ShapeError
from oscar_jax.evaluation import published
from oscar_jax.rotations.bases import orthogonality_defect


def quantize_row(row, ratio):
    """One rotated row, from the description alone."""
    row = row.astype(np.float32)
    if ratio is not None:
        threshold = np.sort(np.abs(row))[min(int(np.floor(ratio * len(row))), len(row) - 1)]
        row = np.clip(row, -threshold, threshold)
    scale = np.float32(max(row.max() - row.min(), np.float32(1e-8))) / np.float32(3)
    zero = -row.min() / scale
    return (np.trunc(row / scale + zero + np.float32(0.5)) - zero) * scale


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("ratio", [published.KEY_CLIP_RATIO, published.VALUE_CLIP_RATIO, None, 1.0])
def test_fake_quantization_follows_the_formula(head_dim, ratio):
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((20, 2, head_dim)).astype(np.float32)
    rows[3] = 0
    rows[4] = 5
    rows[5, :, 7] = 300
    quantized = published.fake_quantize_published(rows, np.eye(head_dim, dtype=np.float32), ratio)
    expected = np.stack([[quantize_row(row, ratio) for row in heads] for heads in rows])
    np.testing.assert_allclose(quantized, expected, rtol=1e-5, atol=1e-5)
    levels = [len(np.unique(row.round(4))) for row in np.asarray(quantized)[6:].reshape(-1, head_dim)]
    assert max(levels) <= 4


def test_clip_takes_the_quantile_of_the_row():
    row = np.arange(1.0, 101.0, dtype=np.float32) * np.where(np.arange(100) % 2, -1, 1)
    clipped = np.asarray(published.clip_rows(row, 0.92))
    assert np.abs(clipped).max() == 93 and (clipped[:92] == row[:92]).all()
    assert (np.asarray(published.clip_rows(row, 1.0)) == row).all()
    with pytest.raises(ConfigError, match="clip ratio = 0"):
        published.clip_rows(row, 0)


def test_rotation_helps_a_row_with_an_outlier_channel_and_heads_keep_their_matrix():
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((50, 2, 64)).astype(np.float32)
    rows[..., 9] *= 30
    covariance = np.einsum("tkd,tke->kde", rows, rows) / 50
    rotation = published.fit_published_rotation(covariance)
    assert rotation.dtype == np.float32 and orthogonality_defect(rotation) < 1e-6
    error = [
        np.square(published.fake_quantize_published(rows, matrix, None) - rows).mean()
        for matrix in (np.eye(64, dtype=np.float32), rotation)
    ]
    assert error[1] < error[0]
    per_head = published.fake_quantize_published(rows, np.stack([rotation, np.eye(64)]), None)
    shared = published.fake_quantize_published(rows, rotation, None)
    plain = published.fake_quantize_published(rows, np.eye(64), None)
    np.testing.assert_allclose(per_head[:, 0], shared[:, 0], atol=1e-4)
    np.testing.assert_allclose(per_head[:, 1], plain[:, 1], atol=1e-4)
    with pytest.raises(ShapeError, match="expected"):
        published.fit_published_rotation(covariance[0])


def test_centering_moves_the_rows_and_nothing_else():
    generator = np.random.default_rng(2)
    rows = generator.standard_normal((20, 2, 64)).astype(np.float32)
    mean = 50 * generator.standard_normal((2, 64)).astype(np.float32)
    centered = published.fake_quantize_published(rows + mean, np.eye(64), 0.96, mean)
    np.testing.assert_allclose(
        centered - mean, published.fake_quantize_published(rows, np.eye(64), 0.96), atol=0.5
    )
    plain = published.fake_quantize_published(rows + mean, np.eye(64), 0.96)
    assert np.square(centered - rows - mean).mean() < 0.1 * np.square(plain - rows - mean).mean()
