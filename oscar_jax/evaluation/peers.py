"""Caches without a rotation that an evaluation compares with, simulated: per-channel keys as in KIVI; FP8.

Both are `Recipe`s like those of `fidelity.py`: rows are coded and at once restored in float32, and the same
BF16 windows stay exact.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from ..core import cache_format as fmt

GROUP = 32  # tokens of a channel, or channels of a row, that share a scale and a zero; divides a page
GROUP_BITS = 32  # scale and zero, counted at 16 bits each
ROW_SCALE_BITS = 16  # the bfloat16 scale of an FP8 row
FLOAT8 = jnp.float8_e4m3fn


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class PerChannelRecipe:
    """Two bits as KIVI (arXiv 2402.02750) writes them: keys channel by channel, values token by token.

    `GROUP` tokens of a key channel, or `value_group` channels of a value row, share a minimum and a scale.
    """

    def restore(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values as the codes return them: float [T, K, D], T from a page start -> float32.

        The rows of a last page that is not complete mean nothing.
        """
        tokens, heads, head_dim = key.shape
        padded = jnp.pad(key.astype(jnp.float32), ((0, -tokens % GROUP), (0, 0), (0, 0)))
        by_channel = padded.reshape(-1, GROUP, heads, head_dim)
        restored_key = fake_quantize_groups(by_channel, axis=1).reshape(padded.shape)[:tokens]
        by_token = value.astype(jnp.float32).reshape(tokens, heads, -1, value_group(head_dim))
        return restored_key, fake_quantize_groups(by_token, axis=3).reshape(value.shape)


@partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Float8Recipe:
    """Rows in float8_e4m3fn with a bfloat16 scale of their own, per token and head."""

    def restore(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values as FP8 returns them: float [..., D] -> float32 [..., D]."""
        return fake_quantize_float8(key), fake_quantize_float8(value)


def value_group(head_dim: int) -> int:
    """Channels of a value row that share a scale: `GROUP`, or 16 where it does not divide head_dim."""
    return GROUP if head_dim % GROUP == 0 else fmt.HEAD_DIM_MULTIPLE


def per_channel_bits(head_dim: int) -> float:
    """Bits per element of `PerChannelRecipe`, keys and values averaged."""
    return fmt.CODE_BITS + (GROUP_BITS / GROUP + GROUP_BITS / value_group(head_dim)) / 2


def float8_bits(head_dim: int) -> float:
    """Bits per element of `Float8Recipe`."""
    return 8 + ROW_SCALE_BITS / head_dim


def fake_quantize_groups(rows: jax.Array, axis: int) -> jax.Array:
    """Codes 0 … 3 between minimum and maximum along `axis`, and back: float32 of the same shape.

    code = round((x − min) / scale), scale = (max − min) / 3; equal rows come back as they are. Minimum and
    scale stay float32, see `GROUP_BITS` for how they are counted.
    """
    low, high = rows.min(axis=axis, keepdims=True), rows.max(axis=axis, keepdims=True)
    scale = (high - low) / 3
    code = jnp.clip(jnp.round((rows - low) / jnp.where(scale > 0, scale, 1.0)), 0, 3)
    return code * scale + low


def fake_quantize_float8(rows: jax.Array) -> jax.Array:
    """Rows [..., D] rounded to float8_e4m3fn, each under a scale of max|x| / 448, and back: float32."""
    rows = rows.astype(jnp.float32)
    largest = float(jnp.finfo(FLOAT8).max)
    scale = jnp.abs(rows).max(axis=-1, keepdims=True) / largest
    scale = jnp.where(scale > 0, scale, 1.0).astype(jnp.bfloat16).astype(jnp.float32)
    # The rounded scale may be too small for the largest entry, and what does not fit would become NaN.
    return jnp.clip(rows / scale, -largest, largest).astype(FLOAT8).astype(jnp.float32) * scale
