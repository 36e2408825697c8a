"""Whose rotations these are, and which part of them a rank of a tensor-parallel engine needs."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..core.fingerprint import EMBEDDING_ROWS, fingerprint_weights
from ..quantize import Feedback
from ..rotations.rotation import FEEDBACKS, LayerRotation, RotationSet, hadamard_rotation
from ..rotations.store import load_rotation_set
from .options import HADAMARD, ServeOptions

EMBEDDING = "embed_tokens.weight"
KEYS = (".self_attn.k_proj.weight", ".self_attn.qkv_proj.weight")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def head_range(heads: int, rank: int, size: int) -> range:
    """The key/value heads of a rank, of `heads` in the model; with more ranks than heads they share one.

    ConfigError where neither divides the other.
    """
    if heads % size and size % heads:
        raise ConfigError(f"tensor_parallel_size = {size}, allowed: divisors and multiples of {heads} heads")
    each = max(1, heads // size)
    first = rank * each if heads >= size else rank // (size // heads)
    return range(first, first + each)


def slice_rotation(rotation: LayerRotation, heads: range) -> LayerRotation:
    """The rotation of these key/value heads; one that all heads share stays whole."""
    if rotation.key_transform.shape[0] == 1:
        return rotation
    part = slice(heads.start, heads.stop)
    fields: dict[str, Any] = {name: getattr(rotation, name)[part] for name in fmt.ROTATION_FIELDS}
    for name in FEEDBACKS:
        if (whole := getattr(rotation, name)) is not None:
            fields[name] = Feedback(whole.matrix[part].contiguous(), whole.shift[part], whole.steps)
    return LayerRotation(**fields)


def read_rotations(
    options: ServeOptions,
    geometry: CacheConfig,
    layers: Sequence[int],
    model: str,
    *,
    fingerprint: str | None = None,
) -> dict[int, LayerRotation]:
    """The rotation of every layer, all heads, on the CPU.

    geometry: the whole model's, whatever a rank has of it; layers: ids of those with attention; model: what
    the engine was given, a hub name or a folder; fingerprint of its weights, if known. Raises CheckpointError
    unless the set fits the model.
    """
    if options.rotations == HADAMARD:
        return dict.fromkeys(layers, hadamard_rotation(1, geometry.head_dim))
    rotations: RotationSet = load_rotation_set(options.rotations)
    name = options.model_id or (None if os.path.exists(model) else model)
    known = None if options.model_id else fingerprint
    rotations.require_fits(geometry, layers, model_id=name, fingerprint=known)
    return {layer: rotations.layers[layer] for layer in layers}


def model_folder(model: str, revision: str | None) -> pathlib.Path | None:
    """Where the files of a model lie that the engine has loaded; None if that cannot be told."""
    if os.path.isdir(model):
        return pathlib.Path(model)
    try:
        from huggingface_hub import snapshot_download

        return pathlib.Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not from the hub, or not kept
        return None


def checkpoint_fingerprint(folder: pathlib.Path | None, geometry: CacheConfig, num_layers: int) -> str | None:
    """The fingerprint of the weights in a folder's safetensors files (core/fingerprint.py).

    Three tensors are read, so it costs nothing and is the same on every rank. None where there are no such
    files or their weights are quantized: names must decide then.
    """
    places: dict[str, pathlib.Path] = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        with safe_open(path, framework="pt") as file:
            places |= dict.fromkeys(file.keys(), path)
    embeddings = [name for name in places if name.endswith(EMBEDDING)]
    by_layer = {_layer_of(name): name for name in places if name.endswith(KEYS)}
    if len(embeddings) != 1 or not by_layer:
        return None
    first, last = by_layer[min(by_layer)], by_layer[max(by_layer)]
    tensors = {
        "embedding": _read(places, embeddings[0], slice(EMBEDDING_ROWS)),
        "first_key": _read(places, first, _key_rows(first, geometry)),
        "last_key": _read(places, last, _key_rows(last, geometry)),
    }
    if any(tensor.dtype not in FLOATS for tensor in tensors.values()):
        return None
    return fingerprint_weights(geometry, num_layers, {name: _bytes(x) for name, x in tensors.items()})


def _layer_of(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


def _key_rows(name: str, geometry: CacheConfig) -> slice:
    """Rows of a projection that make keys."""
    if name.endswith(KEYS[0]):
        return slice(None)
    first = geometry.num_query_heads * geometry.head_dim
    return slice(first, first + geometry.num_key_value_heads * geometry.head_dim)


def _read(places: dict[str, pathlib.Path], name: str, rows: slice) -> Tensor:
    with safe_open(places[name], framework="pt") as file:
        array: Any = file.get_slice(name)
        return array[rows]


def _bytes(tensor: Tensor) -> bytes:
    """Values rounded to bfloat16, little endian."""
    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2").tobytes()


def local_config(geometry: CacheConfig, query_heads: int, heads: range) -> CacheConfig:
    """The geometry of one rank's part of a layer."""
    return dataclasses.replace(geometry, num_query_heads=query_heads, num_key_value_heads=len(heads))
