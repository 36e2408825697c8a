"""The published OSCAR recipe in floating point, row by row: rotation, clip, asymmetric codes, and back.

`evaluate` takes its rotation and clip ratios from here; its method `published` codes rows in groups of 128
channels (`fidelity.AsymmetricRecipe`), which is the same up to D = 128 and one scale more at D = 256.

Layer-shared orthogonal rotation R = U·H·P, clip at a quantile of |row|, asymmetric 2-bit codes with a float32
scale and zero point per row (paper 2605.17757 and its public code). Rows are quantized and at once
reconstructed; nothing is packed. The product's own format is in quantize.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core.errors import ConfigError, ShapeError
from ..rotations.bases import oscar_basis
from ..rotations.rotation import apply_transform

KEY_CLIP_RATIO = 0.96
VALUE_CLIP_RATIO = 0.92


def fit_published_rotation(covariance: np.ndarray) -> np.ndarray:
    """The layer-shared R, float32 [D, D], of per-head covariances [K, D, D] averaged over the heads.

    Keys take the query covariance, values the surrogate (public code) or exact (paper) score-weighted one.
    """
    covariance = np.asarray(covariance, np.float64)
    if covariance.ndim != 3:
        raise ShapeError(f"covariance has shape {covariance.shape}, expected [K, D, D]")
    return oscar_basis(covariance.mean(axis=0)).astype(np.float32)


def clip_rows(rows: ArrayLike, ratio: float) -> jax.Array:
    """Rows [..., D] clamped to ± the entry number min(floor(ratio·D), D − 1) of their ascending |row|."""
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"clip ratio = {ratio!r}, allowed: above 0, at most 1")
    rows = jnp.asarray(rows)
    head_dim = rows.shape[-1]
    index = min(int(ratio * head_dim), head_dim - 1)
    threshold = jnp.sort(jnp.abs(rows), axis=-1)[..., index : index + 1]
    return jnp.clip(rows, -threshold, threshold)


def fake_quantize_asymmetric(rows: ArrayLike) -> jax.Array:
    """Rows [..., D] coded in 2 bits with their own minimum and maximum, and reconstructed: float32 [..., D].

    scale = max(max − min, 1e-8) / 3, zero = −min / scale (not rounded), code = trunc(x / scale + zero + 0.5).
    """
    rows = jnp.asarray(rows, jnp.float32)
    low, high = rows.min(axis=-1, keepdims=True), rows.max(axis=-1, keepdims=True)
    scale = jnp.maximum(high - low, 1e-8) / 3
    zero = -low / scale
    code = jnp.clip(jnp.trunc(rows / scale + zero + 0.5), 0, 3)
    return (code - zero) * scale


def fake_quantize_published(
    rows: ArrayLike,
    rotation: ArrayLike,
    clip_ratio: float | None,
    mean: ArrayLike | None = None,
) -> jax.Array:
    """Rows [..., K, D] through the published path and back: float32 [..., K, D].

    rotation: orthogonal float32 [D, D] or per head [K, D, D]. clip_ratio None does not clip. mean [K, D] or
    [1, D] is subtracted first and added last (the recipe's later "centering"); None for the original one.
    """
    matrix = jnp.asarray(rotation, jnp.float32)
    matrix = matrix if matrix.ndim == 3 else matrix[None]
    offset = jnp.float32(0) if mean is None else jnp.asarray(mean, jnp.float32)
    rotated = apply_transform(jnp.asarray(rows, jnp.float32) - offset, matrix)
    if clip_ratio is not None:
        rotated = clip_rows(rotated, clip_ratio)
    return apply_transform(fake_quantize_asymmetric(rotated), matrix.swapaxes(-1, -2)) + offset
