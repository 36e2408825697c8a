"""Rotation sets on disk: an Orbax directory written by JAX, or one safetensors file; both packages read both.

A directory holds `header.json` (header, and a SHA-256 per array) and `arrays/`, an Orbax v1 checkpoint of the
tree {"layers": {id: {field: array}}, "companions": {id: {name: array}}}. A safetensors file holds the same
arrays as "layers.ID.FIELD" and the same JSON text in its metadata. The digests make a swapped, edited or
damaged array a refusal that names it, whatever the file is called.
"""

import hashlib
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
import safetensors.numpy
import tensorstore
from orbax.checkpoint import v1 as ocp

from ..core import cache_format as fmt
from ..core.errors import CheckpointError, OscarError
from ..core.files import refuse_lfs_pointer, replacing_directory, replacing_file
from ..core.rotation_header import RotationHeader, validate_header
from .rotation import LayerRotation, RotationSet, validate_rotation_set

HEADER_FILE = "header.json"
ARRAYS_DIRECTORY = "arrays"
ROTATION_DIRECTORY = "rotation_set"  # in the folder that `oscar calibrate` and `oscar fit` write
ROTATION_FILE = "rotation_set.safetensors"  # the same, where PyTorch wrote it
_KEY = "rotation_set"  # of header.json and of the safetensors metadata
_NAME = re.compile(r"(layers|companions)\.(\d+)\.(\w+)")


def rotation_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """The rotation set behind what a user names: itself, or the one in the folder of `oscar calibrate`."""
    path = pathlib.Path(path)
    inside = [path / name for name in (ROTATION_DIRECTORY, ROTATION_FILE) if (path / name).exists()]
    return inside[0] if inside else path


def load_rotation_set(path: str | os.PathLike[str]) -> RotationSet:
    """The rotation set of a directory, a .safetensors file or the folder of `oscar calibrate`.

    Raises CheckpointError naming what is wrong. Arrays come as NumPy, so that a set saved from any number
    of devices loads on any other.
    """
    path = rotation_path(path)
    if not path.is_dir():
        return load_safetensors(path)
    header, digests = _read_document(path)
    try:
        tree = ocp.load(str((path / ARRAYS_DIRECTORY).resolve()))
    except Exception as error:
        # Orbax reads all arrays at once: find out which one is to blame.
        store = _array_store(path)
        for name in digests:
            _read_array(path, name, store)
        raise CheckpointError(f"{path}: {_first_line(error)}") from None
    arrays = {
        f"{kind}.{layer}.{name}": np.asarray(array)
        for kind, layers in tree.items()
        for layer, fields in layers.items()
        for name, array in fields.items()
    }
    return _assemble(path, header, digests, arrays)


def save_rotation_set(rotation_set: RotationSet, directory: str | os.PathLike[str]) -> None:
    """Writes a rotation set as an Orbax directory, built aside and renamed into place.

    Replaces an earlier rotation set or an empty directory, nothing else: CheckpointError.
    """
    directory = pathlib.Path(directory).resolve()
    validate_rotation_set(rotation_set)
    if directory.is_file():
        raise CheckpointError(f"{directory}: is a file, expected a directory or nothing")
    _check_replaceable(directory)
    arrays = _flatten(rotation_set)
    tree: dict[str, dict[str, dict[str, np.ndarray]]] = {"layers": {}, "companions": {}}
    for name, array in arrays.items():
        kind, layer, field = name.split(".")
        tree[kind].setdefault(layer, {})[field] = array
    with replacing_directory(directory) as new:
        ocp.save(str(new / ARRAYS_DIRECTORY), tree)
        (new / HEADER_FILE).write_text(_document(rotation_set.header, arrays))


def read_header(path: str | os.PathLike[str]) -> RotationHeader:
    """The header of a rotation set, directory or .safetensors file, without its arrays; CheckpointError."""
    return _read_document(rotation_path(path))[0]


def load_safetensors(path: str | os.PathLike[str]) -> RotationSet:
    """The rotation set of a .safetensors file; CheckpointError naming layer and field if anything is off."""
    path = pathlib.Path(path)
    header, digests = _read_document(path)
    try:
        arrays = safetensors.numpy.load_file(path)
    except Exception as error:
        raise CheckpointError(f"{path}: {_first_line(error)}") from None
    return _assemble(path, header, digests, arrays)


def save_safetensors(rotation_set: RotationSet, path: str | os.PathLike[str]) -> None:
    """Writes a rotation set as one .safetensors file, header in its metadata, atomically.

    The bytes depend on the set alone: both packages write the same file. Replaces nothing but a rotation set.
    """
    path = pathlib.Path(path)
    validate_rotation_set(rotation_set)
    _check_replaceable(path)
    arrays = _flatten(rotation_set)
    data = safetensors.numpy.save(arrays, metadata={_KEY: _document(rotation_set.header, arrays)})
    with replacing_file(path) as partial:
        partial.write_bytes(data)


def _flatten(rotation_set: RotationSet) -> dict[str, np.ndarray]:
    arrays = {
        f"layers.{layer}.{field}": array
        for layer, rotation in rotation_set.layers.items()
        for field, array in rotation.numpy().items()
    }
    for layer, companions in rotation_set.companions.items():
        arrays |= {f"companions.{layer}.{name}": array for name, array in companions.items()}
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _digest(array: np.ndarray) -> str:
    form = f"{array.dtype.name} {list(array.shape)}\n"
    return hashlib.sha256(form.encode() + np.ascontiguousarray(array).tobytes()).hexdigest()


def _document(header: RotationHeader, arrays: dict[str, np.ndarray]) -> str:
    """The JSON text that travels with the arrays: header, and one digest per array against mix-ups."""
    digests = {name: _digest(array) for name, array in sorted(arrays.items())}
    return json.dumps({"header": header.to_dict(), "digests": digests}, sort_keys=True)


def _read_document(path: pathlib.Path) -> tuple[RotationHeader, dict[str, str]]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    try:
        if path.is_dir():
            text = (path / HEADER_FILE).read_text()
        else:
            text = _safetensors_header(path).get("__metadata__", {})[_KEY]
        document = json.loads(text)
        header, digests = document["header"], document["digests"]
    except CheckpointError:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{path}: not a rotation set, no {fmt.FORMAT_NAME} header found") from None
    try:
        header = RotationHeader.from_dict(header)
        validate_header(header)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(digests, dict):
        raise CheckpointError(f"{path}: digests is {type(digests).__name__}, expected a JSON object")
    return header, digests


def _safetensors_header(path: pathlib.Path) -> dict[str, Any]:
    """The JSON header of a .safetensors file; a file too short for its tensors is refused by tensor name."""
    refuse_lfs_pointer(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if not 2 <= length <= size - 8:
            raise CheckpointError(f"{path}: not a .safetensors file, or truncated inside its header")
        header = json.loads(file.read(length))
    tensors = [(entry["data_offsets"][1], name) for name, entry in header.items() if name != "__metadata__"]
    for end, name in sorted(tensors):
        if 8 + length + end > size:
            raise CheckpointError(f"{path}: {_describe(name)} is truncated")
    return header


def _assemble(
    path: pathlib.Path, header: RotationHeader, digests: dict[str, str], arrays: dict[str, np.ndarray]
) -> RotationSet:
    """The validated set; names, digests, then shapes, dtypes and content are checked."""
    expected = {f"layers.{layer}.{field}" for layer in header.layers for field in fmt.ROTATION_FIELDS}
    feedback = fmt.FEEDBACK_FIELDS if header.rounding == "sequential" else {}
    possible = expected | {f"layers.{layer}.{field}" for layer in header.layers for field in feedback}
    for name in sorted(expected | set(digests)):
        if name not in arrays:
            raise CheckpointError(f"{path}: {_describe(name)} is missing")
    layers: dict[int, dict[str, np.ndarray]] = {layer: {} for layer in header.layers}
    companions: dict[int, dict[str, np.ndarray]] = {}
    for name, array in sorted(arrays.items()):
        match = _NAME.fullmatch(name)
        if not match or (match[1] == "layers" and name not in possible):
            raise CheckpointError(
                f"{path}: {_describe(name)} is unexpected, header: layers = {header.layers}"
            )
        if digests.get(name) != _digest(array):
            raise CheckpointError(f"{path}: {_describe(name)} does not match its digest: damaged or mixed up")
        if match[1] == "layers":
            layers[int(match[2])][match[3]] = array
        else:
            companions.setdefault(int(match[2]), {})[match[3]] = array
    rotations = {
        layer: LayerRotation.from_numpy(fields, header.rounding_steps) for layer, fields in layers.items()
    }
    rotation_set = RotationSet(header, rotations, companions)
    try:
        validate_rotation_set(rotation_set)
    except OscarError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return rotation_set


def _describe(name: str) -> str:
    match = _NAME.fullmatch(name)
    if not match:
        return f"array {name!r}"
    return f"layer {match[2]}: {'companion ' if match[1] == 'companions' else ''}{match[3]}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _check_replaceable(path: pathlib.Path) -> None:
    """Raises CheckpointError if something other than a rotation set would be overwritten."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        try:
            _read_document(path)
        except CheckpointError as error:
            raise CheckpointError(f"refusing to overwrite what is not a rotation set: {error}") from None


def _array_store(path: pathlib.Path) -> dict[str, Any]:
    """The tensorstore spec of the arrays that Orbax wrote, without the array's name."""
    candidates = sorted((path / ARRAYS_DIRECTORY).glob("*/manifest.ocdbt"))
    if len(candidates) != 1:
        raise CheckpointError(f"{path}: {len(candidates)} array stores in {ARRAYS_DIRECTORY}/, expected one")
    store = candidates[0].parent
    try:
        zarr3 = json.loads((store / "_METADATA").read_text())["use_zarr3"]
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{path}: {ARRAYS_DIRECTORY}/ has no readable Orbax metadata") from None
    base = f"file://{store.resolve()}/"
    return {"driver": "zarr3" if zarr3 else "zarr", "kvstore": {"driver": "ocdbt", "base": base}}


def _read_array(path: pathlib.Path, name: str, store: dict[str, Any]) -> np.ndarray:
    spec = store | {"kvstore": store["kvstore"] | {"path": f"{name}/"}}
    try:
        return tensorstore.open(spec, open=True, read=True).result().read().result()
    except Exception as error:
        raise CheckpointError(f"{path}: {_describe(name)} cannot be read, {_first_line(error)}") from None
