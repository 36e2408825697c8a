"""What the loaders of other stacks accept of a published pair, and what they misread without a word.

Each row of LOADERS is what that project's own code does with the two files; docs/interchange.md shows what
follows for the sets this project writes. A loader that ignores `q_rotation` computes wrong scores from keys
that are not orthogonal, and only the form of the file can stop it.

Twin file, byte-identical in both packages: NumPy only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..core.errors import CheckpointError, ConfigError
from ..core.model_geometry import ModelGeometry
from .published_file import INVERSE_FIELDS


@dataclasses.dataclass(frozen=True)
class Loader:
    """How one stack reads a pair.

    per_head: takes [K, D, D] as one matrix per key/value head, otherwise refuses the shape. companions: reads
    `q_rotation`, `o_rotation` and `k_mean`, on all layers or on none, otherwise ignores them. layers: which
    ids it asks for: "every" layer of the model, those with "full" attention, or the latter "counted" from 0.
    """

    title: str
    per_head: bool
    companions: bool
    layers: Literal["every", "full", "counted"]


LOADERS = {
    "sglang": Loader("SGLang, OSCAR tree, main of 2026-06", False, False, "every"),
    "sglang-hybrid": Loader("SGLang, OSCAR tree, branch for hybrid models", False, False, "full"),
    "sglang-2026-08": Loader("SGLang, OSCAR tree of 2026-08 (per head)", True, False, "every"),
    "sglang-2026-10": Loader("SGLang, OSCAR tree of 2026-10 (OSCAR-2)", True, True, "every"),
    "nova": Loader("nova-kv", False, False, "counted"),
    "vllm": Loader("vLLM, pull request 46774", False, False, "every"),
}

State = Mapping[str, Any]  # one file of a pair: metadata, and "layers": {id: {field: value}}, arrays NumPy


@dataclasses.dataclass(frozen=True)
class Problem:
    """Why a loader does not serve a pair right; misread if it does not notice itself."""

    misread: bool
    text: str


def get_loader(name: str) -> Loader:
    """The loader of a name in LOADERS; ConfigError with the names."""
    if name not in LOADERS:
        raise ConfigError(f"loader {name!r} is unknown, allowed: {', '.join(LOADERS)}")
    return LOADERS[name]


def check_all_or_none(name: str, state: State) -> None:
    """Raises CheckpointError if a field stands on some layers only: no loader that reads it accepts that."""
    fields = [set(entry) - {"layer_id", "eigenvalues"} for entry in state["layers"].values()]
    for field in sorted(set.union(*fields)):
        count = sum(field in found for found in fields)
        if count != len(fields):
            raise CheckpointError(
                f"{name}: {field} stands on {count} of {len(fields)} layers, allowed: all, none"
            )


def find_problems(
    loader: Loader, states: Mapping[str, State], model: ModelGeometry | None = None
) -> list[Problem]:
    """Why `loader` would not serve the pair ("key" and "value" state) right; [] if it does.

    Without `model` the set is taken to have all layers up to its last, and all with full attention.
    """
    problems = []
    for role, state in states.items():
        entries = list(state["layers"].values())
        per_head = any(np.ndim(entry["rotation"]) == 3 for entry in entries)
        inverse = INVERSE_FIELDS[role]
        if per_head and not loader.per_head:
            problems.append(
                Problem(False, f"reads one matrix per layer, this set has one per head ({role}s)")
            )
        elif not loader.companions and any(_is_needed(entry, inverse) for entry in entries):
            effect = "scores" if role == "key" else "outputs"
            problems.append(Problem(True, f"ignores {inverse} and would compute wrong {effect}"))
    ids = sorted(int(layer) for layer in states["key"]["layers"])
    wanted = wanted_layers(loader, ids, model)
    if missing := sorted(set(wanted) - set(ids)):
        problems.append(Problem(False, _explain_layers(loader, ids, missing)))
    return problems


def wanted_layers(loader: Loader, ids: Sequence[int], model: ModelGeometry | None) -> list[int]:
    """The layer ids that `loader` asks for; without `model` as far as the set's own `ids` tell."""
    full = list(ids) if model is None else list(model.full_layers or model.sliding_layers)
    match loader.layers:
        case "every":
            return list(range(max(ids) + 1 if model is None else model.num_layers))
        case "full":
            return full
        case _:
            return list(range(len(full)))


def _is_needed(entry: Mapping[str, Any], field: str) -> bool:
    """Whether the matrix differs from its inverse transpose by more than rounding: both are needed."""
    return field in entry and not np.allclose(entry["rotation"], entry[field], atol=1e-3)


def _explain_layers(loader: Loader, ids: Sequence[int], missing: Sequence[int]) -> str:
    shown = f"layer {missing[0]}" if len(missing) == 1 else f"layers {missing[0]} … {missing[-1]}"
    match loader.layers:
        case "every":
            remedy = "fit with --all-layers, or take a loader of hybrid models"
        case "full":
            remedy = "these layers have attention in this model"
        case _:
            remedy = "its ids count the layers with full attention"
    return f"has no rotation for {shown}, this set has {len(ids)} layers ({remedy})"
