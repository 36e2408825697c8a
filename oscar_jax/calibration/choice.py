"""Choosing between bases, multipliers and roundings by what they do to attention on held-out text.

What attention over pages of a rotation loses is measured by a `Judge`, in the framework of the package; the
choice is made here, in float64, so that the same errors lead to the same set.

Twin file, byte-identical in both packages: NumPy only.
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import ConfigError
from ..core.rotation_header import RotationHeader
from ..rotations import bases
from ..rotations.fit import (
    KEY_MULTIPLIERS,
    ORDERED,
    ORDERED_KEY_MULTIPLIERS,
    fit_layer_rotation,
    rounding_fields,
)
from ..rotations.rotation import LayerRotation, RotationSet
from ..rotations.statistics import LayerStatistics
from .report import Calibration

_log = logging.getLogger(__name__)
HELD_OUT_SHARE = 0.25  # of the sequences
HELD_OUT_MOST = 4
PROBES = 192  # queries of a held-out sequence
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


class Judge(Protocol):
    """What one layer saw on the held-out sequences, and what pages of a rotation make of it."""

    @property
    def sequences(self) -> int:
        """Held-out sequences with queries that read pages."""
        ...

    def key_errors(self, rotation: LayerRotation, multiplier: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per sequence attention KL and relative output error [K] with keys coded and exact values."""
        ...

    def value_errors(self, rotation: LayerRotation, multiplier: int) -> list[np.ndarray]:
        """Per sequence relative output error [K] with values coded and exact keys."""
        ...

    def layer_errors(self, rotation: LayerRotation) -> list[dict[str, float]]:
        """Per sequence "kl", "output_error" and "value_error" of the whole rotation, means over heads."""
        ...


def split_sequences(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sequences to fit on and sequences to choose on; a single one serves both."""
    if len(sequences) == 1:
        return list(sequences), list(sequences)
    held_out = min(HELD_OUT_MOST, max(1, round(HELD_OUT_SHARE * len(sequences))))
    return list(sequences[:-held_out]), list(sequences[-held_out:])


def choose_probes(candidates: np.ndarray, tokens: int) -> np.ndarray:
    """At most PROBES of the candidate positions, int32 in order, from the later half of `tokens` tokens."""
    later = candidates[candidates >= tokens // 2]
    picks = np.unique(np.linspace(0, len(later) - 1, min(PROBES, len(later))).astype(int))
    return later[picks] if len(later) else later


def fit_and_judge(
    statistics: Mapping[int, LayerStatistics],
    judges: Mapping[int, Judge],
    settings: CalibrationConfig,
    header: RotationHeader,
    *,
    least_context: int,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Calibration:
    """Fits every layer of `statistics` and judges it by its held-out sequences.

    With basis "auto" the candidates compete there, layer by layer and head by head; if settings leave the
    rounding open, the better of the two whole sets is taken. Raises ConfigError where "auto" has no sequence
    of at least `least_context` tokens.
    """
    layers = tuple(statistics)
    settings = settled(settings, statistics)
    if settings.basis == "auto" and not all(judges[layer].sequences for layer in layers):
        raise ConfigError(
            f"basis 'auto' needs held-out sequences of at least {least_context} tokens, these are shorter: "
            "give more text or context, or name a basis"
        )
    competing = [settings.rounding or rounding for rounding in fmt.ROUNDINGS]
    fits: dict[str, tuple[dict[int, LayerRotation], dict[str, Any]]] = {}
    for rounding in dict.fromkeys(competing):
        if len(set(competing)) > 1 and rounding == "sequential":
            if why_not_sequential(statistics):  # a set that nobody asked for by name need not be possible
                continue
        rotations: dict[int, LayerRotation] = {}
        by_layer: dict[str, Any] = {}
        for layer in layers:
            if settings.basis == "auto":
                rotations[layer], chosen = choose_layer_rotation(
                    statistics[layer], judges[layer], per_head=settings.per_head, rounding=rounding
                )
            else:
                rotations[layer] = fit_layer(statistics[layer], settings)
                chosen = {"key": [_named(settings, rotations[layer].key_multiplier)]}
                if settings.basis == ORDERED:
                    chosen["value"] = [_named(settings, rotations[layer].value_multiplier)]
            errors = judges[layer].layer_errors(rotations[layer])
            arrays = rotations[layer].numpy()
            by_layer[str(layer)] = {
                "chosen": {name: chosen[name] for name in ("key", "value") if name in chosen},
                "tried": chosen.get("tried", {}),
                "predicted": {k: float(np.mean([e[k] for e in errors])) for k in errors[0]} if errors else {},
                "key_condition_number": bases.condition_number(arrays["key_transform"]),
                "value_condition_number": bases.condition_number(arrays["value_transform"]),
            }
            if rounding == competing[0]:
                on_layer(layer)
        fits[rounding] = rotations, by_layer
    rounding = min(fits, key=lambda name: _predicted_error(fits[name][1]) if len(fits) > 1 else 0.0)
    rotations, by_layer = fits[rounding]
    fields = basis_fields(header, settings, rounding, header.head_dim)
    fields["extra"]["choices"] = {layer: entry["chosen"] for layer, entry in by_layer.items()}
    header = dataclasses.replace(header, **fields)
    report: dict[str, Any] = {"layers": by_layer, "rounding": rounding}
    if len(fits) > 1:
        report["predicted_by_rounding"] = {
            name: math.exp(_predicted_error(fit[1])) for name, fit in fits.items()
        }
    return Calibration(RotationSet(header, rotations), dict(statistics), report)


def why_not_sequential(statistics: Mapping[int, LayerStatistics]) -> str:
    """What keeps these statistics from a fit for sequential rounding; "" if nothing does."""
    try:
        for entry in statistics.values():
            rounding_fields(ORDERED, entry.key_mean.shape[1])
            entry.require_ordered()
    except ConfigError as error:
        return str(error)
    return ""


def settled(settings: CalibrationConfig, statistics: Mapping[int, LayerStatistics]) -> CalibrationConfig:
    """The settings with a basis: unnamed, that of sequential rounding where model and text allow it."""
    if settings.basis:
        return settings
    reason = why_not_sequential(statistics)
    if reason:
        _log.info("rounding 'nearest': %s", reason)
    return dataclasses.replace(settings, rounding="nearest" if reason else "sequential")


def basis_fields(
    header: RotationHeader, settings: CalibrationConfig, rounding: str, head_dim: int
) -> dict[str, Any]:
    """What a fit adds to the header of its statistics."""
    fitted = {"damping": settings.damping, "per_head": settings.per_head}
    return {
        "basis": settings.basis,
        "basis_version": bases.BASIS_VERSION,
        "extra": header.extra | fitted,
        **rounding_fields(ORDERED if rounding == "sequential" else "", head_dim),
    }


def fit_layer(statistics: LayerStatistics, settings: CalibrationConfig) -> LayerRotation:
    """The rotation of one layer in the basis that the settings name."""
    return fit_layer_rotation(
        statistics, settings.basis, per_head=settings.per_head, damping=settings.damping
    )


def _named(settings: CalibrationConfig, multiplier: Any) -> dict[str, Any]:
    return {
        "basis": f"{settings.basis} {settings.damping:g}",
        "alpha": int(multiplier[0]) / (1 << fmt.MULTIPLIER_BITS),
    }


def _predicted_error(by_layer: Mapping[str, Any]) -> float:
    """Mean over layers of the logarithm of attention KL and output error, as candidates are judged."""
    errors = [entry["predicted"] for entry in by_layer.values()]
    return float(np.mean([np.log(error[name]) for error in errors for name in ("kl", "output_error")]))


# One layer.


def choose_layer_rotation(
    statistics: LayerStatistics, judge: Judge, *, per_head: bool, rounding: str = "nearest"
) -> tuple[LayerRotation, dict[str, Any]]:
    """The best key and value transform, then the best multipliers, of every head (or of the layer).

    Keys are judged by the geometric mean of attention KL and output error with exact values, values by the
    output error with exact keys. The first candidate wins unless another is at least 3 % better. With
    rounding "sequential" the dampings of basis "ordered" compete, and the layer's values are rounded to the
    nearest where that is better. Returns the rotation and what was tried.
    """
    head_dim = statistics.key_mean.shape[1]

    def over_heads(parts: Sequence[np.ndarray]) -> np.ndarray:
        """Mean over sequences, and over all heads if the transform is shared: float64 [heads]."""
        by_head = np.mean([np.asarray(part, np.float64) for part in parts], axis=0)
        return by_head if per_head else by_head.mean(keepdims=True)

    def key_score(fitted: LayerRotation, multiplier: int) -> np.ndarray:
        pairs = judge.key_errors(fitted, multiplier)
        return np.sqrt(over_heads([kl for kl, _ in pairs]) * over_heads([error for _, error in pairs]))

    def value_score(fitted: LayerRotation, multiplier: int) -> np.ndarray:
        return over_heads(judge.value_errors(fitted, multiplier))

    fit = partial(fit_layer_rotation, statistics, per_head=per_head)
    value_fits = {
        basis: fit("identity", damping=0.0, value_basis=basis)
        for basis in VALUE_CANDIDATES
        if basis != "oscar" or statistics.surrogate_value_covariance is not None
    }
    value = choose_candidate(value_fits, VALUE_FIELDS, value_score, VALUE_MULTIPLIERS)
    if rounding == "nearest":
        key_fits = {
            f"{basis} {damping:g}" if damping else basis: fit(basis, damping=damping)
            for basis, damping in KEY_CANDIDATES
        }
        key = choose_candidate(key_fits, KEY_FIELDS, key_score, KEY_MULTIPLIERS)
    else:
        fits = {f"{ORDERED} {damping:g}": fit(ORDERED, damping=damping) for damping in ORDERED_DAMPINGS}
        key = choose_candidate(fits, (*KEY_FIELDS, *KEY_FEEDBACK), key_score, ORDERED_KEY_MULTIPLIERS)
        fed = choose_candidate(fits, (*VALUE_FIELDS, *VALUE_FEEDBACK), value_score, VALUE_MULTIPLIERS)
        if np.log(fed.scores).mean() <= np.log(value.scores).mean():
            value = fed
    fields: dict[str, Any] = {
        **key.fields,
        **value.fields,
        "key_multiplier": np.asarray(key.multipliers, np.int32),
        "value_multiplier": np.asarray(value.multipliers, np.int32),
    }
    steps = rounding_fields(ORDERED, head_dim)["rounding_steps"] if rounding != "nearest" else 0
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


def choose_candidate(
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
    first = next(iter(fits.values()))
    feedback = next((f for f in (first.key_feedback, first.value_feedback) if f is not None), None)
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
