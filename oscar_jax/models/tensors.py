"""Turning a checkpoint's tensors into the decoder's: fused projections split, experts stacked."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ..core.errors import CheckpointError
from .family import TensorSource


def split(source: TensorSource, parts: Mapping[str, Sequence[tuple[str, int]]]) -> TensorSource:
    """A source whose fused projections are separate: `parts` names, by the end of a stem, the rows of each.

    {"self_attn.qkv_proj": (("self_attn.q_proj", 64), ...)}; weights and biases alike. Raises CheckpointError
    for a fused tensor with another number of rows.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, slice]] = {}
    for name, shape in source.shapes.items():
        stem, _, suffix = name.rpartition(".")
        fused = next((end for end in parts if stem.endswith(f".{end}")), None)
        if fused is None:
            shapes[name] = shape
            continue
        total = sum(count for _, count in parts[fused])
        if shape[0] != total:
            raise CheckpointError(f"{name} has {shape[0]} rows, expected {total}")
        start = 0
        for end, count in parts[fused]:
            new = f"{stem.removesuffix(fused)}{end}.{suffix}"
            shapes[new], places[new] = (count, *shape[1:]), (name, slice(start, start + count))
            start += count

    def load(name: str) -> np.ndarray:
        if name not in places:
            return source.load(name)
        stored, part = places[name]
        return source.load(stored)[part]

    return dataclasses.replace(source, shapes=shapes, load=load)


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.((?:gate|up|down)_proj\.(?:weight|bias))")


def stack_experts(source: TensorSource) -> TensorSource:
    """A source with one tensor [E, ...] per projection where the checkpoint has one per expert."""
    members: dict[str, dict[int, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in source.shapes.items():
        if match := _EXPERT.fullmatch(name):
            members.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
        else:
            shapes[name] = shape
    for name, experts in members.items():
        found = {tuple(source.shapes[member]) for member in experts.values()}
        if sorted(experts) != list(range(len(experts))) or len(found) != 1:
            raise CheckpointError(f"{name}: experts {sorted(experts)} of shapes {sorted(found)} do not stack")
        shapes[name] = (len(experts), *found.pop())

    def load(name: str) -> np.ndarray:
        if name not in members:
            return source.load(name)
        return np.stack([source.load(members[name][expert]) for expert in range(len(members[name]))])

    return dataclasses.replace(source, shapes=shapes, load=load)


def without_layers(source: TensorSource, first: int) -> TensorSource:
    """A source without the layers from `first` on, which predict further tokens and are not used."""
    shapes = {
        name: shape
        for name, shape in source.shapes.items()
        if not ((match := re.match(r"model\.layers\.(\d+)\.", name)) and int(match[1]) >= first)
    }
    return dataclasses.replace(source, shapes=shapes)
