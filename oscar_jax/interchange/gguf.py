"""Rotations inside GGUF files, as llama.cpp forks read them: `blk.{i}.attn_k_rot.weight`, F32, transposed."""

import dataclasses
import datetime
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import CheckpointError
from ..core.files import replacing_file
from ..core.model_geometry import ModelGeometry
from ..core.rotation_header import RotationHeader, require_nearest
from ..models.geometry import gguf_geometry
from ..models.gguf_file import GGUFFile
from ..rotations.rotation import RotationSet, validate_rotation_set
from .published_file import IMPORT_DEFECT, check_orthogonal
from .published_pair import orthogonal_matrix, rotation_of_entries
from .report import Report, has_means, make_report, not_published
from .torch_file import require_package

_GGUF_ROTATION = re.compile(r"blk\.(\d+)\.attn_([kv])_rot\.weight")
_GGUF_HEADER = "oscar_kv.rotation_header"
# Architectures whose graph reads the tensors, and in which fork; others stop at the file with "wrong number
# of tensors". None of these reorders the channels of a key, as llama does: there wrong ones would be rotated.
LOADED_BY = {
    "qwen3": "the OSCAR branch and the turboquant fork",
    "gemma4": "the turboquant fork",
    "qwen35": "the turboquant fork",
    "qwen3moe": "the turboquant fork",
}


def import_gguf(path: str | os.PathLike[str], *, model_id: str | None = None) -> RotationSet:
    """The rotation set that the rotation tensors of a GGUF file hold; CheckpointError naming what is off.

    A file with key tensors only has its value rotation in the weights: its values get the identity.
    """
    file = GGUFFile(pathlib.Path(path))
    geometry = gguf_geometry(file)
    found: dict[int, dict[str, np.ndarray]] = {}
    for name, tensor in file.tensors.items():
        if match := _GGUF_ROTATION.fullmatch(name):
            layer, role = int(match[1]), {"k": "key", "v": "value"}[match[2]]
            if tensor.quantization.name != "F32" or tensor.shape != (geometry.head_dim,) * 2:
                raise CheckpointError(
                    f"{path}: layer {layer}: {name} is {tensor.quantization.name} {tensor.shape}, "
                    f"expected F32 {(geometry.head_dim,) * 2}"
                )
            matrix = np.ascontiguousarray(file.load(name).T)  # the file holds the transpose
            check_orthogonal(f"{path}: layer {layer}: {name}", matrix, IMPORT_DEFECT)
            found.setdefault(layer, {})[role] = matrix
    if not found:
        raise CheckpointError(f"{path}: has no rotation tensors (blk.N.attn_k_rot.weight)")
    roles = {role for matrices in found.values() for role in matrices}
    for layer, matrices in sorted(found.items()):
        if missing := sorted(roles - set(matrices)) or ["key"] * ("key" not in matrices):
            raise CheckpointError(f"{path}: layer {layer}: the {missing[0]} rotation is missing")
    extra: dict[str, Any] = {"source": "gguf"} | ({} if "value" in roles else {"values_absorbed": True})
    header = _gguf_header(file, geometry, sorted(found), model_id, extra)
    identity = np.eye(geometry.head_dim, dtype=np.float32)
    layers = {
        layer: rotation_of_entries(
            {"rotation": matrices["key"]}, {"rotation": matrices.get("value", identity)}, 1
        )
        for layer, matrices in sorted(found.items())
    }
    companions = {
        layer: {f"{role}_rotation": matrix for role, matrix in matrices.items()}
        for layer, matrices in sorted(found.items())
    }
    rotation_set = RotationSet(header, layers, companions)
    validate_rotation_set(rotation_set)
    return rotation_set


def export_gguf(
    rotation_set: RotationSet, base: str | os.PathLike[str], destination: str | os.PathLike[str]
) -> Report:
    """Writes a copy of the GGUF file `base` with the rotation tensors added; base tensors keep every byte.

    The format holds one orthogonal matrix per layer and role. Raises CheckpointError if the set has others,
    does not fit the model, or the architecture reorders key channels; ConfigError without the gguf library.
    """
    base, destination = pathlib.Path(base), pathlib.Path(destination)
    validate_rotation_set(rotation_set)
    require_nearest(rotation_set.header, "a GGUF file")
    if destination.exists():
        raise CheckpointError(f"{destination}: exists, expected a new file")
    file = GGUFFile(base)
    geometry = gguf_geometry(file)
    rotation_set.require_fits(geometry, geometry.full_layers, possible_layers=geometry.attention_layers)
    if geometry.architecture not in LOADED_BY:
        raise CheckpointError(
            f"{base}: no llama.cpp reads rotation tensors for architecture {geometry.architecture!r}, "
            f"allowed: {', '.join(LOADED_BY)}"
        )
    if baked := next((name for name in file.tensors if _GGUF_ROTATION.fullmatch(name)), None):
        raise CheckpointError(f"{base}: already has rotation tensors ({baked})")
    tensors = {}
    for layer in rotation_set.header.layers:
        for role, letter in (("key", "k"), ("value", "v")):
            matrix = orthogonal_matrix(rotation_set, layer, role)
            if matrix is None:
                raise CheckpointError(
                    f"layer {layer}: {role}_transform is not orthogonal, GGUF holds only orthogonal matrices"
                )
            if len(matrix) > 1 and (matrix != matrix[:1]).any():
                raise CheckpointError(
                    f"layer {layer}: {role}_transform differs by head, GGUF holds one matrix per layer"
                )
            tensors[f"blk.{layer}.attn_{letter}_rot.weight"] = np.ascontiguousarray(matrix[0].T)
    _bake_gguf(rotation_set.header, file, destination, tensors)
    _verify_gguf(file, GGUFFile(destination), tensors)
    return make_report(
        rotation_set,
        "GGUF",
        [str(destination)],
        carried=["rotation matrices (transposed, F32)", "header, as metadata text"],
        dropped=[
            *not_published(rotation_set),
            *(["key means"] if has_means(rotation_set, "key_mean") else []),
        ],
        notes=[
            f"{len(file.tensors)} base tensors byte-identical, {len(tensors)} rotation tensors added",
            f"architecture {geometry.architecture}: read by {LOADED_BY[geometry.architecture]} of llama.cpp; "
            "upstream refuses the file",
        ],
    )


def _gguf_header(
    file: GGUFFile,
    geometry: ModelGeometry,
    layers: Sequence[int],
    model_id: str | None,
    extra: dict[str, Any],
) -> RotationHeader:
    basis, basis_version = "unknown", "unknown"
    text = file.metadata.get(_GGUF_HEADER)
    if text is not None:
        try:
            origin = RotationHeader.from_dict(json.loads(text))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file.path}: metadata {_GGUF_HEADER}: {error}") from None
        if list(origin.layers) != list(layers):
            raise CheckpointError(
                f"{file.path}: rotation tensors of layers {list(layers)}, "
                f"its header says {list(origin.layers)}"
            )
        return dataclasses.replace(origin, extra=origin.extra | extra)
    return RotationHeader(
        model_id=model_id or geometry.model_id,
        layers=tuple(layers),
        num_query_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.head_dim,
        rope="unknown",
        basis=basis,
        basis_version=basis_version,
        versions={"numpy": np.__version__},
        created=datetime.date.today().isoformat(),
        extra=extra,
    )


def _bake_gguf(
    header: RotationHeader, base: GGUFFile, destination: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
    gguf = require_package("gguf", "writing GGUF files")
    with replacing_file(destination) as partial:
        writer = gguf.GGUFWriter(partial, base.metadata["general.architecture"])
        writer.data_alignment = base.metadata.get("general.alignment", writer.data_alignment)
        for key, value in base.metadata.items():
            if key == "general.architecture":
                continue  # the writer has written it itself
            kind, inner = base.metadata_types[key]
            item = None if inner is None else gguf.GGUFValueType(inner)
            writer.add_key_value(key, value, gguf.GGUFValueType(kind), sub_type=item)
        writer.add_string(_GGUF_HEADER, json.dumps(header.to_dict(), sort_keys=True))
        for name, tensor in base.tensors.items():
            # The dtype only says that the shape counts elements, not bytes; the type is the last argument.
            any_float = np.dtype(np.float32)
            writer.add_tensor_info(name, tensor.shape, any_float, tensor.num_bytes, tensor.quantization)
        for name, array in tensors.items():
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name in base.tensors:
            writer.write_tensor_data(base.raw(name))
        for array in tensors.values():
            writer.write_tensor_data(array)
        writer.close()


def _verify_gguf(base: GGUFFile, written: GGUFFile, tensors: Mapping[str, np.ndarray]) -> None:
    """Compares metadata, base tensors and rotation tensors of the file just written."""
    for key, value in base.metadata.items():
        if (written.metadata.get(key), written.metadata_types.get(key)) != (value, base.metadata_types[key]):
            raise CheckpointError(f"{written.path}: metadata {key} did not survive writing")
    for name, tensor in base.tensors.items():
        copy = written.tensors.get(name)
        same_form = copy is not None and (copy.shape, copy.quantization) == (
            tensor.shape,
            tensor.quantization,
        )
        if not same_form or not np.array_equal(written.raw(name), base.raw(name)):
            raise CheckpointError(f"{written.path}: tensor {name} did not survive writing")
    for name, array in tensors.items():
        if not np.array_equal(written.load(name), array):
            raise CheckpointError(f"{written.path}: tensor {name} did not survive writing")
