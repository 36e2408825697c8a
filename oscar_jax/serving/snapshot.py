"""The file that holds sequences of a pool between processes: name, version, digest, reader."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..core import cache_format as fmt
from ..core.errors import CheckpointError

SNAPSHOT_KIND = "oscar-sequence"
SNAPSHOT_VERSION = 1


def digest_rotations(rotations: Sequence[Any]) -> str:
    """Hex digest of the rotation arrays of all layers; equal in both packages."""
    digest = hashlib.blake2b(digest_size=16)
    for rotation in rotations:
        for name in fmt.ROTATION_FIELDS:
            digest.update(np.asarray(getattr(rotation, name)).tobytes())
    return digest.hexdigest()


def _read_snapshot(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a safetensors file; raises CheckpointError if it is none."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from None
