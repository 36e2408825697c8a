"""What a layer saw on text that the fit has not seen, and what pages of a rotation make of it."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..calibration.choice import choose_probes
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..evaluation import fidelity
from ..rotations.rotation import LayerRotation
from .observation import Seen, observing, run_batch


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What one layer saw on one held-out sequence: probed queries and all keys and values."""

    query: Tensor  # [T, N, D]
    positions: Tensor  # int64 [T]
    key: Tensor  # bf16 [S, K, D]
    value: Tensor  # bf16 [S, K, D]
    options: Mapping[str, Any]  # how the layer attends


def observe_sequence(
    model: Any,
    layers: Collection[int],
    tokens: Tensor,
    geometry: CacheConfig,
    *,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> dict[int, HeldOut]:
    """Runs a held-out sequence int64 [S] through the model; keeps queries of its later half."""
    probes = choose_probes(fidelity.probe_positions(len(tokens), len(tokens), geometry), len(tokens))
    found: dict[int, HeldOut] = {}

    def see(layer: int, row: int, seen: Seen) -> None:
        if layer in layers:
            positions = torch.from_numpy(probes.astype(np.int64)).to(seen.query.device)
            options = {
                "softmax_scale": seen.softmax_scale,
                "sliding_window": seen.sliding_window,
                "softcap": seen.softcap,
                "geometry": geometry,
            }
            # Copies: what was seen are views of all heads' rows.
            found[layer] = HeldOut(
                seen.query[positions], positions, seen.key.contiguous(), seen.value.contiguous(), options
            )

    with observing(model, see):
        run_batch(model, [tokens])
    on_tokens(len(tokens))
    return found


@dataclasses.dataclass(frozen=True)
class LayerJudge:
    """The held-out rows of one layer as a `choice.Judge`."""

    held_out: Sequence[HeldOut]

    @property
    def sequences(self) -> int:
        """Held-out sequences with queries that read pages."""
        return len(self.held_out)

    @torch.no_grad()
    def key_errors(self, rotation: LayerRotation, multiplier: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per sequence attention KL and relative output error [K] with keys coded and exact values."""
        pairs = []
        for h in self.held_out:
            moved = rotation.to(h.key.device)
            restored = fidelity.reconstruct_key_pages(
                _pad_to_pages(h.key), moved.key_transform, moved.query_transform,
                torch.full_like(moved.key_multiplier, multiplier), moved.key_feedback,
            )[: len(h.key)]  # fmt: skip
            errors = fidelity.attention_error(
                h.query, h.positions, h.key, h.value, restored, h.value, **h.options
            )
            pairs.append((_array(errors["kl"]), _array(errors["output_error"])))
        return pairs

    @torch.no_grad()
    def value_errors(self, rotation: LayerRotation, multiplier: int) -> list[np.ndarray]:
        """Per sequence relative output error [K] with values coded and exact keys."""
        found = []
        for h in self.held_out:
            moved = rotation.to(h.key.device)
            restored = fidelity.reconstruct_value_pages(
                _pad_to_pages(h.value), moved.value_transform, moved.output_transform, moved.value_mean,
                torch.full_like(moved.value_multiplier, multiplier), moved.value_feedback,
            )[: len(h.value)]  # fmt: skip
            errors = fidelity.attention_error(
                h.query, h.positions, h.key, h.value, h.key, restored, **h.options
            )
            found.append(_array(errors["output_error"]))
        return found

    @torch.no_grad()
    def layer_errors(self, rotation: LayerRotation) -> list[dict[str, float]]:
        """Per sequence "kl", "output_error" and "value_error" of the whole rotation, means over heads."""
        found = []
        for h in self.held_out:
            restored = fidelity.reconstruct_pages(h.key, h.value, rotation.to(h.key.device))
            errors = fidelity.attention_error(h.query, h.positions, h.key, h.value, *restored, **h.options)
            found.append({name: float(part.mean()) for name, part in errors.items()})
        return found


def _pad_to_pages(rows: Tensor) -> Tensor:
    return pad(rows, (0, 0, 0, 0, 0, -rows.shape[0] % fmt.PAGE_TOKENS))


def _array(values: Tensor) -> np.ndarray:
    return values.cpu().numpy()
