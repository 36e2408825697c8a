"""What another stack reads from an exported published pair, as recipes of an evaluation.

The pair is really written and read back, so that a set is judged by the matrices and means in the files.
"""

import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np

from ..core.errors import CheckpointError, ConfigError
from ..core.model_geometry import ModelGeometry
from ..interchange.loaders import LOADERS
from ..interchange.published_file import VERSIONS
from ..interchange.published_pair import (
    KEY_FILE,
    VALUE_FILE,
    export_published_pair,
    import_published_pair,
)
from ..models.config import ModelConfig
from ..rotations.rotation import RotationSet
from . import fidelity
from .published import KEY_CLIP_RATIO, VALUE_CLIP_RATIO

NAME = "exported"
MEANS_KEPT, MEANS_DROPPED = ", fixed key means", ", key means dropped"  # in the basis of a method


def parse_reader(name: str) -> tuple[int | None, str | None]:
    """Schema and loader of a method "exported[:SCHEMA or LOADER]", as an export takes them; ConfigError."""
    if name == NAME:
        return None, None
    reader = name.removeprefix(f"{NAME}:")
    if reader in map(str, VERSIONS):
        return int(reader), None
    if reader in LOADERS:
        return None, reader
    allowed = ", ".join([*map(str, VERSIONS), *LOADERS])
    raise ConfigError(f"method {name!r}: reader {reader!r}, allowed: {allowed}")


def exported_recipes(
    rotation_set: RotationSet, config: ModelConfig, layers: Sequence[int], name: str
) -> dict[int, fidelity.AsymmetricRecipe]:
    """Recipe of each of `layers` as the reader of method `name` gets it from the exported pair.

    The asymmetric quantizer with the published clip ratios, over the float32 matrices of the files, keys less
    the fixed mean that they carry, if the reader takes it. Raises what the export refuses; CheckpointError if
    the pair has no rotation for a layer.
    """
    schema, loader = parse_reader(name)
    geometry = _geometry(config)
    if loader is None:  # the export keeps the ids of an imported pair
        counted = "published_layers" in rotation_set.header.extra
    else:
        counted = LOADERS[loader].layers == "counted"
    with tempfile.TemporaryDirectory() as folder:
        export_published_pair(rotation_set, folder, schema=schema, loader=loader, model=geometry)
        read = import_published_pair(
            pathlib.Path(folder) / KEY_FILE,
            pathlib.Path(folder) / VALUE_FILE,
            model=geometry if counted else None,
            num_query_heads=config.num_query_heads,
            num_key_value_heads=config.num_key_value_heads,
            layer_ids="attention" if counted else "model",
        )
    if missing := sorted(set(layers) - set(read.companions)):
        raise CheckpointError(f"method {name!r}: the exported pair has no rotation for layer {missing[0]}")
    # An import rounds the matrices for our format; the float32 ones of the files are beside them.
    companions = loader is None or LOADERS[loader].companions
    return {layer: _recipe(read.companions[layer], companions=companions) for layer in layers}


def _recipe(arrays: dict[str, np.ndarray], *, companions: bool) -> fidelity.AsymmetricRecipe:
    """The recipe of one layer from the fields of its entries; `companions` False: matrices alone are read."""

    def field(name: str, ndim: int) -> np.ndarray | None:
        array = arrays.get(name) if companions else None
        return array if array is None or array.ndim == ndim else array[None]

    key, value = (
        array if array.ndim == 3 else array[None]
        for array in (arrays["key_rotation"], arrays["value_rotation"])
    )
    return fidelity.make_recipe(
        key,
        value,
        KEY_CLIP_RATIO,
        VALUE_CLIP_RATIO,
        query_rotation=field("key_query_rotation", 3),
        output_rotation=field("value_output_rotation", 3),
        key_mean=field("key_mean", 2),
    )


def _geometry(config: ModelConfig) -> ModelGeometry:
    windows = {layer: config.layer_windows[layer] for layer in config.attention_layers}
    return ModelGeometry(
        model_id=config.model_id,
        architecture=config.family,
        num_query_heads=config.num_query_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_layers=config.num_layers,
        full_layers=tuple(layer for layer, window in windows.items() if window is None),
        sliding_layers=tuple(layer for layer, window in windows.items() if window is not None),
    )
