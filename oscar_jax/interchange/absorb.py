"""Absorption: the value transform folded into a model's own weights, so that serving costs nothing for it.

With o = (P·(v·T))·T⁻¹ and v = x·W_vᵀ + b, a model whose value projection is TᵀW_v (bias b·T) and whose output
projection reads each head through T⁻¹ computes the same logits and hands the cache values that are already
transformed. Keys are not absorbed: the rotary embedding lies between their projection and the cache.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil

import numpy as np
import safetensors
import safetensors.numpy

from ..core.errors import CheckpointError
from ..core.files import replacing_directory
from ..core.model_geometry import ModelGeometry
from ..core.rotation_header import require_nearest
from ..models.geometry import read_model_geometry
from ..rotations import store
from ..rotations.fixed_point import from_fixed_point
from ..rotations.rotation import LayerRotation, RotationSet, make_layer_rotation, validate_rotation_set

# Families whose attention output goes from the heads to o_proj with nothing between (no gate, no value norm).
ABSORBABLE_MODELS = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)
_PROJECTION = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.([vo])_proj\.(weight|bias)$")
_FOREIGN_TOWER = re.compile(r"vision|visual|audio|encoder")


def absorb_layer_weights(
    rotation: LayerRotation,
    value_weight: np.ndarray,
    value_bias: np.ndarray | None,
    output_weight: np.ndarray,
    *,
    num_query_heads: int,
    num_key_value_heads: int,
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """float64 weights with the value transform folded in, as [out, in] projections with an optional bias.

    value_weight [K·D, hidden] becomes TᵀW per head, value_bias [K·D] b·T, output_weight [hidden, N·D] W·T⁻ᵀ.
    """
    transform = from_fixed_point(rotation.value_transform)
    head_dim = transform.shape[-1]
    transform = np.broadcast_to(transform, (num_key_value_heads, head_dim, head_dim))
    inverse = np.linalg.inv(transform)
    value = value_weight.astype(np.float64).reshape(num_key_value_heads, head_dim, -1)
    value = np.einsum("kde,kdh->keh", transform, value).reshape(value_weight.shape)
    bias = None
    if value_bias is not None:
        rows = value_bias.astype(np.float64).reshape(num_key_value_heads, head_dim)
        bias = np.einsum("kd,kde->ke", rows, transform).reshape(-1)
    group = num_query_heads // num_key_value_heads
    output = output_weight.astype(np.float64).reshape(-1, num_key_value_heads, group, head_dim)
    output = np.einsum("hkge,kde->hkgd", output, inverse).reshape(output_weight.shape)
    return value, bias, output


def absorb_values(
    rotation_set: RotationSet, model: str | os.PathLike[str], destination: str | os.PathLike[str]
) -> float:
    """Writes a copy of a Hugging Face model with the value transforms folded in; logits stay the same.

    destination gets every file of the model, the projections replaced in their own dtype, and the rotation
    set that remains (identity for values) in `rotation_set/`. Returns the largest relative rounding error of
    a replaced weight. Raises CheckpointError, and writes nothing, if something does not fit.
    """
    model, destination = pathlib.Path(model), pathlib.Path(destination).resolve()
    validate_rotation_set(rotation_set)
    require_nearest(rotation_set.header, "absorption into weights")
    geometry = read_model_geometry(model)
    _check_absorbable(model, geometry)
    rotation_set.require_fits(geometry, geometry.full_layers, possible_layers=geometry.attention_layers)
    if destination.exists():
        raise CheckpointError(f"{destination}: exists, expected a new directory")
    files = sorted(model.glob("*.safetensors"))
    places = _find_projections(files, rotation_set, geometry)
    replaced, error = _absorb_all(rotation_set, geometry, places)
    with replacing_directory(destination) as target:
        for file in model.iterdir():
            if file.is_file() and file not in files:
                shutil.copy2(file, target / file.name)
        for file in files:
            with safetensors.safe_open(file, "numpy") as source:
                arrays = {
                    name: replaced[name] if name in replaced else source.get_tensor(name)
                    for name in source.keys()
                }
                metadata = source.metadata()
            safetensors.numpy.save_file(arrays, target / file.name, metadata=metadata)
        store.save_rotation_set(without_values(rotation_set), target / store.ROTATION_DIRECTORY)
    return error


def without_values(rotation_set: RotationSet) -> RotationSet:
    """The set that serves a model with absorbed values: identity for values, their mean transformed."""

    def remaining(rotation: LayerRotation) -> LayerRotation:
        transform = from_fixed_point(rotation.value_transform)
        identity = make_layer_rotation(
            [np.eye(transform.shape[-1])] * len(transform),
            [np.eye(transform.shape[-1])] * len(transform),
            value_mean=np.einsum("kd,kde->ke", np.asarray(rotation.value_mean, np.float64), transform),
        )
        return dataclasses.replace(
            rotation,
            value_transform=identity.value_transform,
            output_transform=identity.output_transform,
            value_mean=identity.value_mean,
        )

    header = dataclasses.replace(
        rotation_set.header, extra=rotation_set.header.extra | {"values_absorbed": True}
    )
    companions = {
        layer: kept
        for layer, arrays in rotation_set.companions.items()
        if (kept := {name: array for name, array in arrays.items() if not name.startswith("value_")})
    }
    layers = {layer: remaining(rotation) for layer, rotation in rotation_set.layers.items()}
    return RotationSet(header, layers, companions)


def _check_absorbable(model: pathlib.Path, geometry: ModelGeometry) -> None:
    if geometry.architecture not in ABSORBABLE_MODELS:
        raise CheckpointError(
            f"{model}: model_type = {geometry.architecture!r}, values can be absorbed in: "
            f"{', '.join(ABSORBABLE_MODELS)}"
        )
    config = json.loads((model / "config.json").read_text())
    if "quantization_config" in config:
        raise CheckpointError(f"{model}: weights are quantized, absorption needs float weights")


def _find_projections(
    files: list[pathlib.Path], rotation_set: RotationSet, geometry: ModelGeometry
) -> dict[tuple[int, str], tuple[pathlib.Path, str]]:
    """(layer, "v.weight" | "v.bias" | "o.weight") -> (file, tensor name), shapes checked."""
    places: dict[tuple[int, str], tuple[pathlib.Path, str]] = {}
    values, outputs = (
        heads * geometry.head_dim for heads in (geometry.num_key_value_heads, geometry.num_query_heads)
    )
    for file in files:
        try:
            source = safetensors.safe_open(file, "numpy")
        except Exception as error:
            raise CheckpointError(f"{file}: {error}") from None
        with source as tensors:
            for name in tensors.keys():
                match = _PROJECTION.search(name)
                if not match or _FOREIGN_TOWER.search(name) or int(match[1]) not in rotation_set.layers:
                    continue
                layer, kind = int(match[1]), f"{match[2]}.{match[3]}"
                shape = tuple(tensors.get_slice(name).get_shape())
                axis, expected = (-1, outputs) if kind == "o.weight" else (0, values)
                if kind != "o.bias" and shape[axis] != expected:
                    raise CheckpointError(
                        f"layer {layer}: {name} has shape {shape}, axis {axis} != {expected}"
                    )
                places[layer, kind] = (file, name)
    for layer in rotation_set.layers:
        for kind in ("v.weight", "o.weight"):
            if (layer, kind) not in places:
                raise CheckpointError(f"layer {layer}: the model has no {kind[0]}_proj.weight in safetensors")
    return places


def _absorb_all(
    rotation_set: RotationSet,
    geometry: ModelGeometry,
    places: dict[tuple[int, str], tuple[pathlib.Path, str]],
) -> tuple[dict[str, np.ndarray], float]:
    """All replaced tensors in their own dtype, and the largest relative rounding error among them."""

    def load(layer: int, kind: str) -> np.ndarray | None:
        if (layer, kind) not in places:
            return None
        file, name = places[layer, kind]
        with safetensors.safe_open(file, "numpy") as source:
            return source.get_tensor(name)

    replaced: dict[str, np.ndarray] = {}
    error = 0.0
    for layer, rotation in rotation_set.layers.items():
        originals = {kind: load(layer, kind) for kind in ("v.weight", "v.bias", "o.weight")}
        value_weight, output_weight = originals["v.weight"], originals["o.weight"]
        assert value_weight is not None and output_weight is not None
        absorbed = absorb_layer_weights(
            rotation,
            value_weight,
            originals["v.bias"],
            output_weight,
            num_query_heads=geometry.num_query_heads,
            num_key_value_heads=geometry.num_key_value_heads,
        )
        for kind, exact in zip(("v.weight", "v.bias", "o.weight"), absorbed, strict=True):
            original = originals[kind]
            if exact is None or original is None:
                continue
            rounded = exact.astype(np.float32).astype(original.dtype)
            replaced[places[layer, kind][1]] = np.ascontiguousarray(rounded)
            largest = max(np.abs(exact).max(), np.finfo(np.float32).tiny)
            error = max(error, float(np.abs(rounded.astype(np.float64) - exact).max() / largest))
    return replaced, error
