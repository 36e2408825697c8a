"""What a rotation set must fit in a model: head counts, head_dim and layers, read from a config.json.

Twin file, byte-identical in both packages. Standard library only.
"""

import dataclasses
import json
import os
import pathlib

from .errors import CheckpointError

_WINDOWED = ("sliding_attention", "chunked_attention")


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


def read_config_geometry(path: str | os.PathLike[str]) -> ModelGeometry:
    """The geometry of a Hugging Face model directory or its config.json; CheckpointError."""
    path = pathlib.Path(path)
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
