"""Choosing between bases and multipliers on text that the fit has not seen."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import cache_format as fmt
from ..evaluation import fidelity
from ..evaluation.stepper import Runner
from ..models.config import ModelConfig
from ..quantize import Feedback
from ..rotations.fit import (
    KEY_MULTIPLIERS,
    ORDERED,
    ORDERED_KEY_MULTIPLIERS,
    fit_layer_rotation,
    rounding_fields,
)
from ..rotations.rotation import LayerRotation
from ..rotations.statistics import LayerStatistics

PROBES = 192
# Damping 0.01 wins on held-out text as short as the calibration text and loses at 32K (Gemma 3 270M in the
# balanced basis: KL .046 against .033), so it does not compete.
KEY_CANDIDATES = (("channel_balanced", 0.1), ("balanced", 0.1), ("oscar", 0.0), ("hadamard", 0.0))
ORDERED_DAMPINGS = (0.1, 0.03)
VALUE_CANDIDATES = ("hadamard", "oscar", "oscar_exact")
VALUE_MULTIPLIERS = (fmt.VALUE_MULTIPLIER_DEFAULT, 333, 410)
KEY_FIELDS = ("key_transform", "query_transform", "key_mean")
VALUE_FIELDS = ("value_transform", "output_transform", "value_mean")
KEY_FEEDBACK, VALUE_FEEDBACK = (tuple(fmt.FEEDBACK_FIELDS)[:2], tuple(fmt.FEEDBACK_FIELDS)[2:])
MARGIN = 0.97  # a candidate replaces the simplest one only if its error is below this share of it


# The choice on held-out sequences.


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What one layer saw on one held-out sequence: probed queries and all keys and values."""

    query: jax.Array  # [T, N, D]
    positions: jax.Array  # int32 [T]
    key: jax.Array  # bf16 [S, K, D]
    value: jax.Array  # bf16 [S, K, D]


def observe_sequence(
    runner: Runner,
    layers: Sequence[int],
    tokens: np.ndarray,
    *,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> dict[int, HeldOut]:
    """Runs a held-out sequence through the model; keeps queries of the later half of the positions."""
    config = runner.config
    geometry = config.cache_config()
    candidates = fidelity.probe_positions(len(tokens), len(tokens), geometry)
    later = candidates[candidates >= len(tokens) // 2]
    picks = np.unique(np.linspace(0, len(later) - 1, min(PROBES, len(later))).astype(int))
    probes = later[picks] if len(later) else later
    width = min(chunk, -(-len(tokens) // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS)
    rows = runner.allocate(1, -(-len(tokens) // width) * width)
    queries: dict[int, list[jax.Array]] = {layer: [] for layer in layers}
    for start in range(0, len(tokens), width):
        count = min(width, len(tokens) - start)
        part = np.zeros((1, width), np.int32)
        part[0, :count] = tokens[start : start + count]
        here = probes[(probes >= start) & (probes < start + count)] - start
        index = np.zeros(min(width, PROBES), np.int32)
        index[: len(here)] = here
        _, rows, captured = runner.step(runner.state, part, start, rows, {}, index, capture=tuple(layers))
        for layer, query in zip(layers, captured):
            queries[layer].append(query[: len(here)])
        jax.block_until_ready(rows[0].key)
        on_chunk(count)
    positions = jnp.asarray(probes)
    return {
        layer: HeldOut(
            jnp.concatenate(queries[layer]),
            positions,
            *(part[0, :, : len(tokens)].swapaxes(0, 1) for part in (rows[layer].key, rows[layer].value)),
        )
        for layer in layers
    }


@functools.partial(jax.jit, static_argnames=("geometry", "softmax_scale", "sliding_window", "softcap"))
def _key_errors(query, positions, key, value, *arrays, **options):
    """arrays: transform, query transform, multiplier and feedback."""
    restored = fidelity.reconstruct_key_pages(_pad_to_pages(key), *arrays)[: len(key)]
    errors = fidelity.attention_error(query, positions, key, value, restored, value, **options)
    return errors["kl"], errors["output_error"]


@functools.partial(jax.jit, static_argnames=("geometry", "softmax_scale", "sliding_window", "softcap"))
def _value_errors(query, positions, key, value, *arrays, **options):
    """arrays: transform, inverse, mean, multiplier and feedback."""
    restored = fidelity.reconstruct_value_pages(_pad_to_pages(value), *arrays)[: len(value)]
    return fidelity.attention_error(query, positions, key, value, key, restored, **options)["output_error"]


def _pad_to_pages(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, -rows.shape[0] % fmt.PAGE_TOKENS), (0, 0), (0, 0)))


def choose_layer_rotation(
    statistics: LayerStatistics,
    held_out: Sequence[HeldOut],
    config: ModelConfig,
    layer: int,
    *,
    per_head: bool,
    rounding: str = "nearest",
) -> tuple[LayerRotation, dict[str, Any]]:
    """The best key and value transform, then the best multipliers, of every head (or of the layer).

    Keys are judged by the geometric mean of attention KL and output error with exact values, values by the
    output error with exact keys. The first candidate wins unless another is at least 3 % better. With
    rounding "sequential" the dampings of basis "ordered" compete, and the layer's values are rounded to the
    nearest where that is better. Returns the rotation and what was tried.
    """
    options = {
        "geometry": config.cache_config(),
        "softmax_scale": config.attention_scale,
        "sliding_window": config.layer_windows[layer],
        "softcap": config.attention_softcap,
    }
    heads = config.num_key_value_heads if per_head else 1

    def over_heads(parts: Sequence[jax.Array]) -> np.ndarray:
        """Mean over sequences, and over all heads if the transform is shared: float64 [heads]."""
        by_head = np.mean([np.asarray(part, np.float64) for part in parts], axis=0)
        return by_head if per_head else by_head.mean(keepdims=True)

    def key_score(fitted: LayerRotation, multiplier: int) -> np.ndarray:
        multipliers = jnp.full(heads, multiplier, jnp.int32)
        transforms = jnp.asarray(fitted.key_transform), jnp.asarray(fitted.query_transform)
        arrays = *transforms, multipliers, fitted.key_feedback
        pairs = [_key_errors(h.query, h.positions, h.key, h.value, *arrays, **options) for h in held_out]
        return np.sqrt(over_heads([kl for kl, _ in pairs]) * over_heads([error for _, error in pairs]))

    def value_score(fitted: LayerRotation, multiplier: int) -> np.ndarray:
        multipliers = jnp.full(heads, multiplier, jnp.int32)
        fields = fitted.value_transform, fitted.output_transform, fitted.value_mean
        arrays = *map(jnp.asarray, fields), multipliers, fitted.value_feedback
        return over_heads(
            [_value_errors(h.query, h.positions, h.key, h.value, *arrays, **options) for h in held_out]
        )

    fit = functools.partial(fit_layer_rotation, statistics, per_head=per_head)
    value_fits = {
        basis: fit("identity", damping=0.0, value_basis=basis)
        for basis in VALUE_CANDIDATES
        if basis != "oscar" or statistics.surrogate_value_covariance is not None
    }
    value = _choose(value_fits, VALUE_FIELDS, value_score, VALUE_MULTIPLIERS)
    if rounding == "nearest":
        key_fits = {
            f"{basis} {damping:g}" if damping else basis: fit(basis, damping=damping)
            for basis, damping in KEY_CANDIDATES
        }
        key = _choose(key_fits, KEY_FIELDS, key_score, KEY_MULTIPLIERS)
    else:
        fits = {f"{ORDERED} {damping:g}": fit(ORDERED, damping=damping) for damping in ORDERED_DAMPINGS}
        key = _choose(fits, (*KEY_FIELDS, *KEY_FEEDBACK), key_score, ORDERED_KEY_MULTIPLIERS)
        fed = _choose(fits, (*VALUE_FIELDS, *VALUE_FEEDBACK), value_score, VALUE_MULTIPLIERS)
        if np.log(fed.scores).mean() <= np.log(value.scores).mean():
            value = fed
    fields: dict[str, Any] = {
        **key.fields,
        **value.fields,
        "key_multiplier": np.asarray(key.multipliers, np.int32),
        "value_multiplier": np.asarray(value.multipliers, np.int32),
    }
    steps = rounding_fields(ORDERED, config.head_dim)["rounding_steps"] if rounding != "nearest" else 0
    return LayerRotation.from_numpy(fields, steps), {
        "key": key.describe(),
        "value": value.describe(),
        "tried": {"key": key.tried, "value": value.tried},
    }


@dataclasses.dataclass(frozen=True)
class Choice:
    """The winners of one role, per head, and the score of everything that was tried."""

    names: list[str]
    multipliers: list[int]
    fields: dict[str, np.ndarray]
    tried: dict[str, list[float]]
    scores: list[float]

    def describe(self) -> list[dict[str, Any]]:
        """Basis and alpha of every head."""
        pairs = zip(self.names, self.multipliers)
        return [{"basis": name, "alpha": multiplier / 256} for name, multiplier in pairs]


def _choose(
    fits: Mapping[str, LayerRotation],
    fields: Sequence[str],
    score: Callable[[LayerRotation, int], np.ndarray],
    multipliers: Sequence[int],
) -> Choice:
    """First the basis at the first multiplier, head by head, then the multiplier of the chosen mixture."""
    names = list(fits)
    by_basis = np.stack([score(fit, multipliers[0]) for fit in fits.values()])  # [candidates, heads]
    best = by_basis.argmin(axis=0)
    best = np.where(by_basis.min(axis=0) < MARGIN * by_basis[0], best, 0)
    arrays = [fit.numpy() for fit in fits.values()]
    mixture = {
        field: np.stack([arrays[winner][field][head] for head, winner in enumerate(best)]) for field in fields
    }
    feedback = next((f for f in _feedbacks(next(iter(fits.values()))) if f is not None), None)
    mixed = LayerRotation.from_numpy(arrays[0] | mixture, feedback.steps if feedback else 0)
    at_first = by_basis[best, np.arange(len(best))]
    by_multiplier = np.stack([at_first, *(score(mixed, m) for m in multipliers[1:])])
    tried = {name: row.tolist() for name, row in zip(names, by_basis)}
    tried |= {f"alpha {m / 256:.2f}": row.tolist() for m, row in zip(multipliers, by_multiplier)}
    return Choice(
        [names[winner] for winner in best],
        [multipliers[winner] for winner in by_multiplier.argmin(axis=0)],
        mixture,
        tried,
        by_multiplier.min(axis=0).tolist(),
    )


def _feedbacks(rotation: LayerRotation) -> tuple[Feedback | None, Feedback | None]:
    return rotation.key_feedback, rotation.value_feedback


def _least_context(config: ModelConfig) -> int:
    geometry = config.cache_config()
    return geometry.sink_tokens + geometry.recent_tokens + fmt.PAGE_TOKENS
