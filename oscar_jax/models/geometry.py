"""What a rotation set must fit: head counts, head_dim and layers, read from a model's own files."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from ..core.errors import CheckpointError
from .gguf_file import GGUFFile


@dataclasses.dataclass(frozen=True)
class ModelGeometry:
    """What a rotation set must fit: head counts, head_dim, and the layers that keep keys and values.

    full_layers must all have a rotation, sliding_layers may; architecture is the file's own name for it.
    """

    model_id: str
    architecture: str
    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    num_layers: int
    full_layers: tuple[int, ...]
    sliding_layers: tuple[int, ...]

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """All layers that keep keys and values, ascending."""
        return tuple(sorted({*self.full_layers, *self.sliding_layers}))


def read_model_geometry(path: str | os.PathLike[str]) -> ModelGeometry:
    """The geometry of a Hugging Face model directory, its config.json, or a GGUF file; CheckpointError."""
    path = pathlib.Path(path)
    if path.suffix == ".gguf":
        return gguf_geometry(GGUFFile(path))
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
        config = config.get("text_config", config)
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        architecture = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: not a model configuration: {type(error).__name__} {error}") from None
    kinds = config.get("layer_types") or ["full_attention"] * layers
    return ModelGeometry(
        model_id=config.get("_name_or_path") or file.resolve().parent.name,
        architecture=architecture,
        num_query_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        num_layers=layers,
        full_layers=tuple(i for i, kind in enumerate(kinds) if kind == "full_attention"),
        sliding_layers=tuple(i for i, kind in enumerate(kinds) if kind in _WINDOWED),
    )


_WINDOWED = ("sliding_attention", "chunked_attention")


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
