"""What a rotation set must fit: head counts, head_dim and layers, read from a model's own files."""

import os
import pathlib
from typing import Any

from ..core.errors import CheckpointError
from ..core.model_geometry import ModelGeometry, read_config_geometry
from .gguf_file import GGUFFile


def read_model_geometry(path: str | os.PathLike[str]) -> ModelGeometry:
    """The geometry of a Hugging Face model directory, its config.json, or a GGUF file; CheckpointError."""
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        return gguf_geometry(GGUFFile(path))
    return read_config_geometry(path)


def gguf_geometry(file: GGUFFile) -> ModelGeometry:
    """The geometry of an open GGUF file; layers with keys and values are those with an attn_k tensor."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture", "")
    try:
        heads = metadata[f"{architecture}.attention.head_count"]
        key_value_heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
        head_dim = metadata.get(f"{architecture}.attention.key_length")
        head_dim = head_dim or metadata[f"{architecture}.embedding_length"] // _single(heads)
        num_layers = metadata[f"{architecture}.block_count"]
        num_layers -= metadata.get(f"{architecture}.nextn_predict_layers", 0)
    except KeyError as error:
        raise CheckpointError(f"{file.path}: metadata {error} is missing") from None
    return ModelGeometry(
        model_id=str(metadata.get("general.name", file.path.stem)),
        architecture=architecture,
        num_query_heads=_single(heads),
        num_key_value_heads=_single(key_value_heads),
        head_dim=_single(head_dim),
        num_layers=num_layers,
        # GGUF metadata name no layer kinds in a common way: none is required, all that have keys may.
        full_layers=(),
        sliding_layers=tuple(i for i in range(num_layers) if f"blk.{i}.attn_k.weight" in file.tensors),
    )


def _single(value: Any) -> int:
    """A metadata number, or the largest of a list with one entry per layer (0: no attention there)."""
    return max(value) if isinstance(value, list) else int(value)
