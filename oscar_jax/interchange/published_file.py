"""One `.pt` file of a published pair: read with every check that it allows alone.

{"format_version", "objective", "source_grouping", "layers": {id: {"layer_id", "rotation", "eigenvalues"}}},
row-vector convention. Version 1 has one orthogonal [D, D] per layer, version 2 one per key/value head
[K, D, D], version 3 may add `k_mean`, and `q_rotation` / `o_rotation`, the inverse transposes that make
non-orthogonal matrices usable.

Twin file, byte-identical in both packages: NumPy only.
"""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.config import check_head_dim
from ..core.errors import CheckpointError, ConfigError
from .torch_file import check_tensor, load_torch_file, to_array

VERSIONS = (1, 2, 3)
PER_HEAD_GROUPINGS = ("per_kv_head", "head")
INVERSE_FIELDS = {"key": "q_rotation", "value": "o_rotation"}
IMPORT_DEFECT = 1e-5  # of a float32 matrix that claims to be orthogonal
INVERSE_TOLERANCE = 1e-3
MOST_HEADS = 1024  # more key/value heads than any model has
_MATRIX_FIELDS = ("rotation", "q_rotation", "o_rotation")
_ARRAY_FIELDS = (*_MATRIX_FIELDS, "eigenvalues", "k_mean")
_LAYER_ID = re.compile(r"[0-9]{1,6}")
_METADATA_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """One checked file of a published pair; arrays are NumPy, metadata is JSON-ready, role may be unknown."""

    path: pathlib.Path
    metadata: dict[str, Any]
    layers: dict[int, dict[str, np.ndarray]]
    role: str | None  # "key", "value", or None where neither the objective nor a field says
    per_head: bool
    string_ids: bool
    ignored: tuple[str, ...]  # fields this project has no use for

    @property
    def head_dim(self) -> int:
        """D of the matrices, the same in every layer."""
        return next(iter(self.layers.values()))["rotation"].shape[-1]

    @property
    def heads(self) -> int:
        """Matrices per layer: 1, or the number of key/value heads."""
        return next(iter(self.layers.values()))["rotation"].shape[0] if self.per_head else 1

    @property
    def calibration(self) -> dict[str, Any]:
        """What the file says of its calibration, {} if nothing; `calibration_count` reads its numbers."""
        found = self.metadata.get("calibration")
        return found if isinstance(found, dict) else {}

    def calibration_count(self, name: str) -> int | None:
        """A number of the calibration block, None if it has none; CheckpointError for anything else."""
        value = self.calibration.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise CheckpointError(f"{self.path}: calibration {name} = {value!r}, expected an int >= 0")
        return value


def read_published_file(path: str | os.PathLike[str]) -> PublishedFile:
    """One `.pt` file of a published pair, checked alone; CheckpointError in one line.

    Nothing in it is executed: a file that holds anything but tensors and plain values is refused.
    """
    path = pathlib.Path(path)
    state = load_torch_file(path)
    if not isinstance(state, dict) or not isinstance(state.get("layers"), dict) or not state["layers"]:
        raise CheckpointError(f"{path}: not a rotation file, it has no layers")
    metadata = {
        name: value
        for name, value in state.items()
        if isinstance(name, str) and name != "layers" and _is_plain(value)
    }
    ignored = {f"field {name!r}" for name in state if name not in metadata and name != "layers"}
    version, grouping = metadata.get("format_version"), metadata.get("source_grouping")
    if type(version) is not int or version not in VERSIONS:
        raise CheckpointError(f"{path}: format_version = {version!r}, allowed: 1, 2, 3")
    per_head = grouping in PER_HEAD_GROUPINGS
    if not per_head and grouping != "layer":
        raise CheckpointError(
            f"{path}: source_grouping = {grouping!r}, allowed: 'layer', 'per_kv_head', 'head'"
        )
    layers: dict[int, dict[str, np.ndarray]] = {}
    shape: tuple[int, ...] | None = None
    for identifier, entry in state["layers"].items():
        layer = _layer_id(path, identifier)
        if layer in layers:
            raise CheckpointError(f"{path}: layer {layer} appears twice")
        if not isinstance(entry, dict) or entry.get("rotation") is None:
            raise CheckpointError(f"{path}: layer {layer}: rotation is missing")
        if "layer_id" in entry and _layer_id(path, entry["layer_id"], f"layer {layer}: layer_id") != layer:
            raise CheckpointError(f"{path}: layer {layer}: layer_id = {entry['layer_id']!r}")
        ignored |= {f"layer field {name!r}" for name in entry if name not in (*_ARRAY_FIELDS, "layer_id")}
        layers[layer] = _read_entry(path, layer, entry, per_head, shape)
        shape = layers[layer]["rotation"].shape
    file = PublishedFile(
        path=path,
        metadata=metadata,
        layers=dict(sorted(layers.items())),
        role=_find_role(path, metadata, layers),
        per_head=per_head,
        string_ids=any(isinstance(identifier, str) for identifier in state["layers"]),
        ignored=tuple(sorted(ignored)),
    )
    for name in ("tokens", "global_kv_heads", "global_q_heads"):
        file.calibration_count(name)
    return file


def check_orthogonal(where: str, matrix: np.ndarray, limit: float) -> None:
    """Raises CheckpointError unless the matrices [..., D, D] are orthogonal to `limit`."""
    if (defect := unit_defect(matrix)) > limit:
        raise CheckpointError(f"{where} is not orthogonal: defect {defect:.3g}, allowed {limit:g}")


def unit_defect(matrix: np.ndarray) -> float:
    """The largest entry of |RᵀR − I| over matrices [..., D, D]."""
    matrix = matrix.astype(np.float64)
    return float(np.abs(matrix.swapaxes(-1, -2) @ matrix - np.eye(matrix.shape[-1])).max())


def _is_plain(value: Any, depth: int = _METADATA_DEPTH) -> bool:
    """Whether JSON holds the value: names and numbers, in lists and dicts that are not nested without end."""
    if isinstance(value, dict):
        return depth > 0 and all(
            isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items()
        )
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, (str, int))


def _layer_id(path: pathlib.Path, identifier: Any, name: str = "layer id") -> int:
    text = str(identifier) if type(identifier) in (int, str) else ""
    if not _LAYER_ID.fullmatch(text):
        shown = repr(identifier)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        raise CheckpointError(f"{path}: {name} {shown}, expected an int from 0 to 999999")
    return int(text)


def _read_entry(
    path: pathlib.Path, layer: int, entry: Mapping[str, Any], per_head: bool, shape: tuple[int, ...] | None
) -> dict[str, np.ndarray]:
    """The arrays of one layer: float32, finite, of agreeing shapes, orthogonal or with their inverse.

    `shape` is that of the rotation in the other layers. All shapes are checked before an array is made.
    """
    where = f"{path}: layer {layer}"
    tensors = {name: entry[name] for name in _ARRAY_FIELDS if entry.get(name) is not None}
    shapes = {name: check_tensor(f"{where}: {name}", tensor) for name, tensor in tensors.items()}
    rotation = shapes["rotation"]
    if len(rotation) != 2 + per_head or rotation[-1] != rotation[-2]:
        expected = "[K, D, D]" if per_head else "[D, D]"
        raise CheckpointError(f"{where}: rotation has shape {rotation}, source_grouping says {expected}")
    try:
        check_head_dim(rotation[-1])
    except ConfigError as error:
        raise CheckpointError(f"{where}: rotation: {error}") from None
    if per_head and not 1 <= rotation[0] <= MOST_HEADS:
        raise CheckpointError(f"{where}: rotation of {rotation[0]} heads, allowed: 1 to {MOST_HEADS}")
    if shape is not None and rotation != shape:
        raise CheckpointError(f"{where}: rotation has shape {rotation}, other layers have {shape}")
    for name, found in shapes.items():
        expected = rotation if name in _MATRIX_FIELDS else rotation[:-1]
        # A mean may be given per head beside a shared matrix.
        per_head_mean = name == "k_mean" and len(found) == 2 and found[-1] == rotation[-1]
        if found != expected and not (per_head_mean and found[0] <= MOST_HEADS):
            raise CheckpointError(f"{where}: {name} has shape {found}, expected {expected}")
    arrays = {name: to_array(f"{where}: {name}", tensor) for name, tensor in tensors.items()}
    inverses = [name for name in INVERSE_FIELDS.values() if name in arrays]
    matrix = arrays["rotation"].astype(np.float64)
    for name in inverses:
        product = matrix @ arrays[name].astype(np.float64).swapaxes(-1, -2)
        error = np.abs(product - np.eye(matrix.shape[-1])).max()
        if error > INVERSE_TOLERANCE:
            raise CheckpointError(
                f"{where}: {name} is not the inverse transpose of rotation: off by {error:.3g}"
            )
    if not inverses:
        check_orthogonal(f"{where}: rotation", arrays["rotation"], IMPORT_DEFECT)
    return arrays


def _find_role(
    path: pathlib.Path, metadata: Mapping[str, Any], layers: Mapping[int, dict[str, np.ndarray]]
) -> str | None:
    """The role that objective, transform note and fields agree on; CheckpointError if they do not."""
    objective = str(metadata.get("objective", ""))
    claims = set()
    if objective.startswith(("sst", "oscar2_v_", "oscar_kv_value_")):
        claims.add("value")
    elif objective.startswith(("qqt", "oscar2_", "oscar_kv_key_")):
        claims.add("key")
    transform = metadata.get("transform")
    if isinstance(transform, dict):
        claims |= {"key", "value"} & set(transform)
    fields = {name for arrays in layers.values() for name in arrays}
    claims |= {"key"} if fields & {"q_rotation", "k_mean"} else set()
    claims |= {"value"} if "o_rotation" in fields else set()
    if len(claims) > 1:
        raise CheckpointError(
            f"{path}: objective {objective!r} and the fields {sorted(fields - {'rotation', 'eigenvalues'})} "
            "contradict each other on keys or values"
        )
    return next(iter(claims), None)
