"""The file that holds one sequence of a pool between processes; either package reads what the other wrote."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import CheckpointError
from ..core.files import replacing_file
from ..core.page_records import SequenceState
from ..rotations.rotation import LayerRotation

SNAPSHOT_KIND = "oscar-sequence"
SNAPSHOT_VERSION = 2  # 1 had no salt


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A sequence read from a file: what its `SequenceState` holds, and the arrays of every layer by name."""

    length: int
    forced_pages: int
    grid_length: int
    salt: bytes
    tokens: list[int]
    layers: list[dict[str, Tensor]]  # INT2 arrays [n, ...], window_key and window_value [w, K, 64, D]


def digest_rotations(rotations: Sequence[LayerRotation]) -> str:
    """Hex digest of the rotation arrays of all layers; equal in both packages."""
    digest = hashlib.blake2b(digest_size=16)
    for rotation in rotations:
        for array in rotation.numpy().values():
            digest.update(array.tobytes())
    return digest.hexdigest()


def pool_identity(
    model_id: str, rotation_digest: str, configs: Sequence[CacheConfig], grid_tokens: int
) -> dict[str, str]:
    """What a snapshot and the pool that reads it must agree in, field by field."""
    return {
        "format": fmt.format_id(),
        "kind": f"{SNAPSHOT_KIND}/{SNAPSHOT_VERSION}",
        "model_id": model_id,
        "rotation_digest": rotation_digest,
        "layers": json.dumps([[c.num_key_value_heads, c.head_dim] for c in configs]),
        "sink_tokens": str(configs[0].sink_tokens),
        "recent_tokens": str(configs[0].recent_tokens),
        "grid_tokens": str(grid_tokens),
    }


def write_snapshot(
    path: str | os.PathLike[str],
    identity: Mapping[str, str],
    state: SequenceState,
    layers: Sequence[Mapping[str, Tensor]],
) -> None:
    """Writes a sequence, or leaves the file that was there; `layers` as in `Snapshot`."""
    tensors = {"tokens": torch.tensor(state.tokens.tolist(), dtype=torch.int64)}
    for layer, arrays in enumerate(layers):
        for name, array in arrays.items():
            tensors[f"layers.{layer}.{name}"] = array.cpu().contiguous()
    metadata = dict(identity) | {
        "length": str(state.length),
        "forced_pages": str(state.forced_pages),
        "grid_length": str(state.grid_length),
        "salt": state.salt.hex(),
    }
    with replacing_file(path) as partial:
        save_file(tensors, partial, metadata)


def read_snapshot(
    path: str | os.PathLike[str], identity: Mapping[str, str], configs: Sequence[CacheConfig]
) -> Snapshot:
    """The sequence in a file; CheckpointError if it is damaged or not one of a pool of this identity."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None
    for name, expected in identity.items():
        if metadata.get(name) != expected:
            raise CheckpointError(f"{path}: {name} is {metadata.get(name)!r}, this pool has {expected!r}")
    try:
        length, forced, grid = (int(metadata[k]) for k in ("length", "forced_pages", "grid_length"))
        salt = bytes.fromhex(metadata["salt"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: metadata is incomplete: {error}") from None
    _check_tensors(path, tensors, configs, length, forced)
    names = (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)
    layers = [{name: tensors[f"layers.{i}.{name}"] for name in names} for i in range(len(configs))]
    return Snapshot(length, forced, grid, salt, tensors["tokens"].tolist(), layers)


def _check_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    configs: Sequence[CacheConfig],
    length: int,
    forced_pages: int,
) -> None:
    history = max(forced_pages, configs[0].history_pages(length))
    window = -(-length // fmt.PAGE_TOKENS) - history
    dtypes = fmt.INT2_ARRAYS | fmt.WINDOW_ARRAYS
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for i, config in enumerate(configs):
        heads, head_dim = config.num_key_value_heads, config.head_dim
        shapes = fmt.int2_array_shapes(history, heads, head_dim)
        shapes |= fmt.window_array_shapes(window, heads, head_dim)
        expected |= {f"layers.{i}.{name}": (dtypes[name], shape) for name, shape in shapes.items()}
    if set(tensors) != {"tokens", *expected}:
        odd = sorted(set(tensors) ^ {"tokens", *expected})[0]
        raise CheckpointError(f"{path}: tensor {odd!r} is missing or unknown")
    for name, (dtype, shape) in expected.items():
        found = (str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape))
        if found != (dtype, shape):
            raise CheckpointError(f"{path}: {name} is {found}, expected {(dtype, shape)}")
    if tensors["tokens"].ndim != 1 or tensors["tokens"].dtype != torch.int64:
        raise CheckpointError(f"{path}: tokens must be int64 [n]")
