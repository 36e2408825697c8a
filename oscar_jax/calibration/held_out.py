"""What a layer saw on text that the fit has not seen, and what pages of a rotation make of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arithmetic import compiled_quickly
from ..core import cache_format as fmt
from ..evaluation import fidelity
from ..evaluation.stepper import Runner, layer_error
from ..models.config import ModelConfig
from ..models.weights import host_array
from ..rotations.rotation import LayerRotation
from .choice import PROBES, choose_probes


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
    probes = choose_probes(fidelity.probe_positions(len(tokens), len(tokens), geometry), len(tokens))
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
        jax.block_until_ready(rows)
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


@compiled_quickly(static_argnames=("geometry", "softmax_scale", "sliding_window", "softcap"))
def _key_errors(query, positions, key, value, *arrays, **options):
    """arrays: transform, query transform, multiplier and feedback."""
    restored = fidelity.reconstruct_key_pages(_pad_to_pages(key), *arrays)[: len(key)]
    errors = fidelity.attention_error(query, positions, key, value, restored, value, **options)
    return errors["kl"], errors["output_error"]


@compiled_quickly(static_argnames=("geometry", "softmax_scale", "sliding_window", "softcap"))
def _value_errors(query, positions, key, value, *arrays, **options):
    """arrays: transform, inverse, mean, multiplier and feedback."""
    restored = fidelity.reconstruct_value_pages(_pad_to_pages(value), *arrays)[: len(value)]
    return fidelity.attention_error(query, positions, key, value, key, restored, **options)["output_error"]


def _pad_to_pages(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, -rows.shape[0] % fmt.PAGE_TOKENS), (0, 0), (0, 0)))


@dataclasses.dataclass(frozen=True)
class LayerJudge:
    """The held-out rows of one layer as a `choice.Judge`."""

    held_out: Sequence[HeldOut]
    config: ModelConfig
    layer: int

    @property
    def sequences(self) -> int:
        """Held-out sequences with queries that read pages."""
        return len(self.held_out)

    def key_errors(self, rotation: LayerRotation, multiplier: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per sequence attention KL and relative output error [K] with keys coded and exact values."""
        transforms = jnp.asarray(rotation.key_transform), jnp.asarray(rotation.query_transform)
        arrays = *transforms, self._multipliers(rotation, multiplier), rotation.key_feedback
        pairs = [
            _key_errors(h.query, h.positions, h.key, h.value, *arrays, **self._options())
            for h in self.held_out
        ]
        return [(host_array(kl), host_array(error)) for kl, error in pairs]

    def value_errors(self, rotation: LayerRotation, multiplier: int) -> list[np.ndarray]:
        """Per sequence relative output error [K] with values coded and exact keys."""
        fields = rotation.value_transform, rotation.output_transform, rotation.value_mean
        arrays = *map(jnp.asarray, fields), self._multipliers(rotation, multiplier), rotation.value_feedback
        errors = [
            _value_errors(h.query, h.positions, h.key, h.value, *arrays, **self._options())
            for h in self.held_out
        ]
        return [host_array(error) for error in errors]

    def layer_errors(self, rotation: LayerRotation) -> list[dict[str, float]]:
        """Per sequence "kl", "output_error" and "value_error" of the whole rotation, means over heads."""
        fitted = jax.tree.map(jnp.asarray, rotation)
        return [
            layer_error(h.query, h.positions, h.key, h.value, fitted, self.config, self.layer)
            for h in self.held_out
        ]

    def _multipliers(self, rotation: LayerRotation, multiplier: int) -> jax.Array:
        return jnp.full(rotation.key_transform.shape[0], multiplier, jnp.int32)

    def _options(self) -> dict[str, Any]:
        return {
            "geometry": self.config.cache_config(),
            "softmax_scale": self.config.attention_scale,
            "sliding_window": self.config.layer_windows[self.layer],
            "softcap": self.config.attention_softcap,
        }


def least_context(config: ModelConfig) -> int:
    """Tokens of the shortest sequence with an INT2 page."""
    geometry = config.cache_config()
    return geometry.sink_tokens + geometry.recent_tokens + fmt.PAGE_TOKENS
