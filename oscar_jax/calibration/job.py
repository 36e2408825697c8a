"""Fits a rotation set to a model: one streaming pass over text, then a choice on held-out sequences.

The pass runs the model chunk by chunk through a BF16 cache and keeps nothing but running sums
(`covariance.py`); they are saved every few chunks, so that an interrupted calibration goes on where it
stopped and ends in the same bytes. The last sequences are held out. On them every candidate, basis and scale
multiplier, is judged by what it does to attention: the real page quantizer, the model's own queries, the
later half of the positions. Calibrated sequences may be short (4096 tokens) although the cache will be long:
covariances are centered page by page and damped, and each page carries its own mean.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import ConfigError
from ..core.rotation_header import RotationHeader
from ..evaluation.stepper import Runner, layer_error
from ..rotations import bases
from ..rotations.fit import fit_layer_rotation
from ..rotations.rotation import LayerRotation, RotationSet
from . import covariance
from .held_out import _least_context, choose_layer_rotation, observe_sequence
from .report import Calibration

ROTATION_DIRECTORY = "rotation_set"


def rotation_path(given: str) -> pathlib.Path:
    """The rotation set behind what a user names: a calibration's directory, a rotation set, or its file."""
    inside = pathlib.Path(given) / ROTATION_DIRECTORY
    return inside if inside.is_dir() else pathlib.Path(given)


def model_fingerprint(path: pathlib.Path) -> str:
    """Digest of a checkpoint's file names, sizes, first and last MiB; fast, not every byte."""
    digest = hashlib.sha256()
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()[:16]


def fit_rotation_set(
    runner: Runner,
    statistics: Mapping[int, covariance.LayerStatistics],
    held_out: Sequence[np.ndarray],
    settings: CalibrationConfig,
    header: RotationHeader,
    *,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Calibration:
    """Fits every layer of `statistics` and judges it on the `held_out` sequences (int32 [S] each).

    With basis "auto" the candidates compete there, layer by layer and head by head.
    """
    config = runner.config
    layers = tuple(statistics)
    observed = [
        observe_sequence(runner, layers, tokens, chunk=chunk, on_chunk=on_chunk) for tokens in held_out
    ]
    rotations: dict[int, LayerRotation] = {}
    by_layer: dict[str, Any] = {}
    for layer in layers:
        seen = [observation[layer] for observation in observed if len(observation[layer].positions)]
        alpha = fmt.KEY_MULTIPLIER_DEFAULT / (1 << fmt.MULTIPLIER_BITS)
        name = f"{settings.basis} {settings.damping:g}"
        chosen: dict[str, Any] = {"key": [{"basis": name, "alpha": alpha}]}
        if settings.basis == "auto":
            if not seen:
                raise ConfigError(
                    f"basis 'auto' needs held-out sequences of at least {_least_context(config)} tokens, "
                    f"these have {max(map(len, held_out))}: give more text, or name a basis"
                )
            rotations[layer], chosen = choose_layer_rotation(
                statistics[layer], seen, config, layer, per_head=settings.per_head
            )
        else:
            rotations[layer] = fit_layer_rotation(
                statistics[layer],
                settings.basis,
                per_head=settings.per_head,
                damping=settings.damping,
                key_multiplier=fmt.KEY_MULTIPLIER_DEFAULT,
            )
        fitted = jax.tree.map(jnp.asarray, rotations[layer])
        errors = [layer_error(h.query, h.positions, h.key, h.value, fitted, config, layer) for h in seen]
        by_layer[str(layer)] = {
            "chosen": {name: chosen[name] for name in ("key", "value") if name in chosen},
            "tried": chosen.get("tried", {}),
            "predicted": {k: float(np.mean([e[k] for e in errors])) for k in errors[0]} if errors else {},
            "key_condition_number": bases.condition_number(rotations[layer].key_transform),
            "value_condition_number": bases.condition_number(rotations[layer].value_transform),
        }
        on_layer(layer)
    header = dataclasses.replace(
        header,
        extra={
            **header.extra,
            "choices": {layer: entry["chosen"] for layer, entry in by_layer.items()},
        },
    )
    return Calibration(RotationSet(header, rotations), dict(statistics), {"layers": by_layer})
