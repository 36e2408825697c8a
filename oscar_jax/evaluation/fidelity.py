"""How far attention over a quantized history is from exact: one measure for calibration and evaluation.

Two kinds of rows stand in for the exact ones. The project's own format: `reconstruct_pages`, the real page
quantizer followed by its inverse. The asymmetric recipes it is compared with: `AsymmetricRecipe`, rotation,
clip, then minimum and maximum per group of channels in float32, row by row. Either way tokens of the BF16
windows stay exact, as in decoding: for a query at position p the cache holds p + 1 tokens, and exactly the
tokens `sink ... sink + 64 * history_pages(p + 1)` are read from INT2 pages.

Everything here is float32 and pure; nothing is stored in two bits.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..attention import cap_scores
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..quantize import (
    Feedback,
    dequantize_key_pages,
    dequantize_value_pages,
    quantize_key_pages,
    quantize_value_pages,
)
from .published import fake_quantize_asymmetric

GROUP_CHANNELS = 128  # channels that share one scale and one zero in the asymmetric recipes
ASYMMETRIC_METADATA_BITS = 32  # scale and zero of a group, counted at 16 bits each
PRECISION = jax.lax.Precision.HIGHEST


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "key_rotation",
        "value_rotation",
        "key_clip_index",
        "value_clip_index",
        "query_rotation",
        "output_rotation",
        "key_mean",
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class AsymmetricRecipe:
    """An asymmetric INT2 recipe of one layer.

    key_rotation, value_rotation float32 [1 or K, D, D]; clip indices int32 []: a rotated row is clamped to
    its ascending |x| at that index, so D - 1 clips nothing. query_rotation, output_rotation: their inverse
    transposes, or None where they are orthogonal. key_mean float32 [1 or K, D]: taken from every key before
    its rotation, added to the restored one; None if keys are not centered.
    """

    key_rotation: Any
    value_rotation: Any
    key_clip_index: Any
    value_clip_index: Any
    query_rotation: Any = None
    output_rotation: Any = None
    key_mean: Any = None

    def restore(self, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`reconstruct_rows` of this recipe."""
        return reconstruct_rows(key, value, self)


def make_recipe(
    key_rotation: np.ndarray,
    value_rotation: np.ndarray,
    key_clip: float = 1.0,
    value_clip: float = 1.0,
    *,
    query_rotation: np.ndarray | None = None,
    output_rotation: np.ndarray | None = None,
    key_mean: np.ndarray | None = None,
) -> AsymmetricRecipe:
    """An AsymmetricRecipe from rotations [1 or K, D, D] and clip ratios r: index min(floor(r * D), D - 1).

    The optional arrays are those of `AsymmetricRecipe`.
    """
    head_dim = key_rotation.shape[-1]

    def index(ratio: float) -> jax.Array:
        return jnp.int32(min(int(ratio * head_dim), head_dim - 1))

    key, value = (jnp.asarray(rotation, jnp.float32) for rotation in (key_rotation, value_rotation))
    optional = (
        None if array is None else jnp.asarray(array, jnp.float32)
        for array in (query_rotation, output_rotation, key_mean)
    )
    return AsymmetricRecipe(key, value, index(key_clip), index(value_clip), *optional)


def asymmetric_bits(head_dim: int) -> float:
    """Bits per element of the asymmetric recipes: 2 + 2 * 16 / group_channels."""
    return fmt.CODE_BITS + ASYMMETRIC_METADATA_BITS / group_channels(head_dim)


def group_channels(head_dim: int) -> int:
    """Channels that share a scale and a zero: 128 where it divides head_dim, else the whole row."""
    return head_dim if head_dim % GROUP_CHANNELS else GROUP_CHANNELS


def page_bits(head_dim: int) -> float:
    """Bits per element of an INT2 page: codes, one scale per row, one mean key per page."""
    return 8 * fmt.int2_page_bytes(head_dim) / (2 * fmt.PAGE_TOKENS * head_dim)


def fake_quantize_rows(
    rows: jax.Array,
    rotation: jax.Array,
    clip_index: jax.Array,
    inverse_transposed: jax.Array | None = None,
    mean: jax.Array | None = None,
) -> jax.Array:
    """Rotates, clips, codes with 2 bits between minimum and maximum of each group, and rotates back.

    rows float [..., K, D]; rotation, its inverse transpose (None: itself), clip_index and mean as in
    `AsymmetricRecipe`. Returns float32 [..., K, D].
    Scale and zero stay float32 (the published recipe); see `asymmetric_bits` for how they are counted.
    """
    rows = rows.astype(jnp.float32)
    head_dim = rows.shape[-1]
    shape = (rows.shape[-2], head_dim, head_dim)
    back = jnp.broadcast_to(rotation if inverse_transposed is None else inverse_transposed, shape)
    rotation = jnp.broadcast_to(rotation, shape)
    if mean is not None:
        rows = rows - mean
    rotated = jnp.einsum("...kd,kde->...ke", rows, rotation, precision=PRECISION)
    threshold = jnp.take(jnp.sort(jnp.abs(rotated), axis=-1), clip_index, axis=-1)[..., None]
    rotated = jnp.clip(rotated, -threshold, threshold)
    group = group_channels(head_dim)
    grouped = rotated.reshape(*rotated.shape[:-1], head_dim // group, group)
    restored = fake_quantize_asymmetric(grouped).reshape(rotated.shape)
    restored = jnp.einsum("...ke,kde->...kd", restored, back, precision=PRECISION)
    return restored if mean is None else restored + mean


def reconstruct_rows(
    key: jax.Array, value: jax.Array, recipe: AsymmetricRecipe
) -> tuple[jax.Array, jax.Array]:
    """Keys and values as an asymmetric recipe returns them: float [..., K, D] -> float32 [..., K, D]."""
    return (
        fake_quantize_rows(
            key, recipe.key_rotation, recipe.key_clip_index, recipe.query_rotation, recipe.key_mean
        ),
        fake_quantize_rows(value, recipe.value_rotation, recipe.value_clip_index, recipe.output_rotation),
    )


def reconstruct_key_pages(
    key: jax.Array,
    transform: jax.Array,
    inverse_transposed: jax.Array,
    multiplier: jax.Array,
    feedback: Feedback | None = None,
) -> jax.Array:
    """Keys as INT2 pages return them: [S, K, D], S a multiple of 64 -> float32 [S, K, D]."""
    pages = (-1, fmt.PAGE_TOKENS, *key.shape[1:])
    words, scale, mean = quantize_key_pages(key.reshape(pages), transform, multiplier, feedback)
    return dequantize_key_pages(words, scale, mean, inverse_transposed).reshape(key.shape)


def reconstruct_value_pages(
    value: jax.Array,
    transform: jax.Array,
    inverse: jax.Array,
    mean: jax.Array,
    multiplier: jax.Array,
    feedback: Feedback | None = None,
) -> jax.Array:
    """Values as INT2 pages return them: [S, K, D], S a multiple of 64 -> float32 [S, K, D]."""
    pages = (-1, fmt.PAGE_TOKENS, *value.shape[1:])
    words, scale = quantize_value_pages(value.reshape(pages), transform, multiplier, mean, feedback)
    return dequantize_value_pages(words, scale, mean, inverse).reshape(value.shape)


def reconstruct_pages(key: jax.Array, value: jax.Array, rotation: Any) -> tuple[jax.Array, jax.Array]:
    """Keys and values as the pages of a LayerRotation return them: [S, K, D], any S -> float32 [S, K, D]."""
    tokens = key.shape[0]
    padding = ((0, -tokens % fmt.PAGE_TOKENS), (0, 0), (0, 0))
    restored_key = reconstruct_key_pages(
        jnp.pad(key, padding),
        rotation.key_transform,
        rotation.query_transform,
        rotation.key_multiplier,
        rotation.key_feedback,
    )
    restored_value = reconstruct_value_pages(
        jnp.pad(value, padding),
        rotation.value_transform,
        rotation.output_transform,
        rotation.value_mean,
        rotation.value_multiplier,
        rotation.value_feedback,
    )
    return restored_key[:tokens], restored_value[:tokens]


def coded_mask(lengths: jax.Array, tokens: int, config: CacheConfig) -> jax.Array:
    """Which of `tokens` tokens are INT2 when the cache holds `lengths` tokens: bool [..., tokens]."""
    pages = jnp.maximum(0, (lengths - config.sink_tokens - config.recent_tokens) // fmt.PAGE_TOKENS)
    end = config.sink_tokens + fmt.PAGE_TOKENS * pages
    index = jnp.arange(tokens)
    return (index >= config.sink_tokens) & (index < end[..., None])


def attention_error(
    query: jax.Array,
    positions: jax.Array,
    key: jax.Array,
    value: jax.Array,
    coded_key: jax.Array,
    coded_value: jax.Array,
    *,
    geometry: CacheConfig,
    softmax_scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> dict[str, jax.Array]:
    """KL of attention weights and relative error of the attention output, per key/value head.

    query float [T, N, D] at `positions` int32 [T]; key, value (exact) and coded_key, coded_value (as read
    from INT2) float [S, K, D]. Returns float32 [K] each:
    `kl`: mean over queries of KL(exact weights || weights over coded keys), in nats;
    `output_error`: sum |o - o~|^2 / sum |o|^2 with keys and values coded; `value_error`: with values alone.
    Rows of positions past what is stored must not be passed.
    """
    tokens, heads, head_dim = key.shape
    group = query.shape[1] // heads
    queries = query.astype(jnp.float32).reshape(query.shape[0], heads, group, head_dim).transpose(1, 2, 0, 3)
    index = jnp.arange(tokens)
    visible = index <= positions[:, None]
    if sliding_window is not None:
        visible &= index > positions[:, None] - sliding_window
    coded = coded_mask(positions + 1, tokens, geometry)

    def one_head(arguments: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v, k_coded, v_coded = arguments  # [G, T, D], [S, D] x 4
        exact, mixed = (
            cap_scores(jnp.einsum("gtd,sd->gts", q, rows, precision=PRECISION) * softmax_scale, softcap)
            for rows in (k, k_coded)
        )
        log_p = jax.nn.log_softmax(jnp.where(visible, exact, -jnp.inf), axis=-1)
        log_q = jax.nn.log_softmax(jnp.where(visible, jnp.where(coded, mixed, exact), -jnp.inf), axis=-1)
        p, weights = jnp.exp(log_p), jnp.exp(log_q)
        kl = jnp.sum(jnp.where(visible, p * (log_p - log_q), 0.0), axis=-1).mean()

        def output(w: jax.Array, coded_part: bool) -> jax.Array:
            if not coded_part:
                return jnp.einsum("gts,sd->gtd", w, v, precision=PRECISION)
            near = jnp.einsum("gts,sd->gtd", jnp.where(coded, 0.0, w), v, precision=PRECISION)
            return near + jnp.einsum("gts,sd->gtd", jnp.where(coded, w, 0.0), v_coded, precision=PRECISION)

        reference = output(p, False)
        energy = jnp.maximum(jnp.sum(reference**2), 1e-30)
        output_error = jnp.sum((output(weights, True) - reference) ** 2) / energy
        value_error = jnp.sum((output(p, True) - reference) ** 2) / energy
        return kl, output_error, value_error

    by_head = [x.astype(jnp.float32).transpose(1, 0, 2) for x in (key, value, coded_key, coded_value)]
    kl, output_error, value_error = jax.lax.map(one_head, (queries, *by_head))
    return {"kl": kl, "output_error": output_error, "value_error": value_error}


def probe_positions(length: int, count: int, config: CacheConfig) -> np.ndarray:
    """At most `count` query positions, evenly spread from the first that reads an INT2 page: int32.

    They end at the last position, so the longest history is always judged. Empty if the sequence has no INT2
    page.
    """
    first = config.sink_tokens + config.recent_tokens + fmt.PAGE_TOKENS - 1
    if length <= first:
        return np.zeros(0, np.int32)
    available = length - first
    steps = np.linspace(first, length - 1, min(count, available))
    return np.unique(np.round(steps).astype(np.int32))
