"""Turning a checkpoint's tensors into the decoder's: fused projections split, experts stacked."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..core.errors import CheckpointError
from .family import LazyTensor, TensorSource

Reshaping = Callable[[tuple[int, ...]], tuple[int, ...]]
Computation = Callable[[np.ndarray], np.ndarray]
Rows = int | np.ndarray  # the next so many rows, or the indices of some


def _count(rows: Rows) -> int:
    return rows if isinstance(rows, int) else len(rows)


def split(source: TensorSource, parts: Mapping[str, Sequence[tuple[str, Rows]]]) -> TensorSource:
    """A source whose fused projections are separate: `parts` names, by the end of a stem, the rows of each.

    {"self_attn.qkv_proj": (("self_attn.q_proj", 64), ...)}; weights and biases alike. A number means the next
    rows, an array their indices. Raises CheckpointError for a fused tensor with another number of rows.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[str, slice | np.ndarray]] = {}
    for name, shape in source.shapes.items():
        stem, _, suffix = name.rpartition(".")
        fused = next((end for end in parts if stem.endswith(f".{end}")), None)
        if fused is None:
            shapes[name] = shape
            continue
        total = sum(_count(rows) for _, rows in parts[fused])
        if shape[0] != total:
            raise CheckpointError(f"{name} has {shape[0]} rows, expected {total}")
        start = 0
        for end, rows in parts[fused]:
            new, count = f"{stem.removesuffix(fused)}{end}.{suffix}", _count(rows)
            part = slice(start, start + count) if isinstance(rows, int) else rows
            shapes[new], places[new] = (count, *shape[1:]), (name, part)
            start += count

    def load(name: str) -> np.ndarray | LazyTensor:
        if name not in places:
            return source.load(name)
        stored, part = places[name]
        tensor = source.load(stored)
        if isinstance(tensor, np.ndarray):
            return tensor[part]

        def read(index: tuple[slice, ...]) -> np.ndarray:
            first, last = index[0].start, index[0].stop
            rows = (
                part[index[0]]
                if isinstance(part, np.ndarray)
                else slice(part.start + first, part.start + last)
            )
            return tensor[rows, *index[1:]]

        return LazyTensor(shapes[name], read)

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

    def load(name: str) -> np.ndarray | LazyTensor:
        if name not in members:
            return source.load(name)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            experts, rest = range(index[0].start, index[0].stop), index[1:]
            return np.stack([source.load(members[name][expert])[rest] for expert in experts])

        return LazyTensor(shapes[name], read)

    return dataclasses.replace(source, shapes=shapes, load=load)


def computed(source: TensorSource, parts: Mapping[str, tuple[Reshaping, Computation]]) -> TensorSource:
    """A source in which tensors, by the end of their name, are computed from the stored ones.

    `parts` gives the shape that follows from the stored one, and the computation, on the whole tensor.
    """
    found = {name: part for name in source.shapes for end, part in parts.items() if name.endswith(f".{end}")}
    shapes = {
        name: found[name][0](tuple(shape)) if name in found else shape
        for name, shape in source.shapes.items()
    }

    def load(name: str) -> np.ndarray | LazyTensor:
        if name not in found:
            return source.load(name)
        compute = found[name][1]
        return LazyTensor(shapes[name], lambda index: compute(np.asarray(source.load(name)))[index])

    return dataclasses.replace(source, shapes=shapes, load=load)


def without_layers(source: TensorSource, first: int) -> TensorSource:
    """A source without the layers from `first` on, which predict further tokens and are not used."""
    shapes = {
        name: shape
        for name, shape in source.shapes.items()
        if not ((match := re.match(r"model\.layers\.(\d+)\.", name)) and int(match[1]) >= first)
    }
    return dataclasses.replace(source, shapes=shapes)
