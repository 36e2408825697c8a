"""Rotation sets to and from other stacks: published `.pt` pairs (SGLang, vLLM), safetensors, GGUF, weights.

Published pair: one PyTorch file for keys, one for values, {"format_version", "objective", "source_grouping",
"layers": {id: {"layer_id", "rotation", "eigenvalues", ...}}}, row-vector convention. Version 1 has one
orthogonal [D, D] per layer, version 2 one per key/value head [K, D, D], version 3 may add `k_mean`, and
`q_rotation` / `o_rotation`, the inverse transposes that make non-orthogonal matrices usable.

An imported matrix is rounded to the fixed point of the format; the float32 original stays beside it as a
companion, so that writing the pair again gives back the same tensors, byte for byte. Roles come from the
objective, the fields and the geometry; a file name can only contradict them, never decide.

`convert` and `inspect` are the whole of the commands of the same names.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import cache_format as fmt
from . import checkpoint
from .absorb import ModelGeometry, absorb_values, check_geometry, gguf_geometry, read_model_geometry
from .config import CheckpointError, ConfigError, check_head_dim
from .models.gguf_file import GGUFFile
from .rotation import (
    LayerRotation,
    RotationHeader,
    RotationSet,
    condition_number,
    from_fixed_point,
    hadamard_matrix,
    make_layer_rotation,
    orthogonality_defect,
    to_fixed_point,
    validate_rotation_set,
)

KEY_FILE = "k_rotation_qqt_r_h_pbr.pt"  # the names that the published documentation and scripts expect
VALUE_FILE = "v_rotation_sst_r_h_pbr.pt"
TARGETS = ("orbax", "safetensors", "pair", "gguf", "absorb")
IMPORT_DEFECT = 1e-5  # of a float32 matrix that claims to be orthogonal
EXPORT_DEFECT = 1e-6  # of a float32 matrix that we call orthogonal
ROUNDED_DEFECT = 1e-3  # an orthogonal matrix rounded to 2**-14 stays below it
INVERSE_TOLERANCE = 1e-3

_GGUF_ROTATION = re.compile(r"blk\.(\d+)\.attn_([kv])_rot\.weight")
_GGUF_HEADER = "oscar_kv.rotation_header"
# GGUF files of these keep the channels of a key as Hugging Face files do; others (llama) reorder them.
_GGUF_ARCHITECTURES = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
)
_ENTRY_FIELDS = {"layer_id", "rotation", "eigenvalues", "k_mean", "q_rotation", "o_rotation"}
_PER_HEAD_GROUPINGS = ("per_kv_head", "head")
_COMPANIONS = {  # field of a published entry -> companion, for keys and for values
    "key": {
        "rotation": "key_rotation",
        "eigenvalues": "key_eigenvalues",
        "k_mean": "key_mean",
        "q_rotation": "key_query_rotation",
    },
    "value": {
        "rotation": "value_rotation",
        "eigenvalues": "value_eigenvalues",
        "o_rotation": "value_output_rotation",
    },
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion read and wrote, what it carried over, what the target cannot hold."""

    source: str
    target: str
    written: tuple[str, ...]
    layers: int
    head_dim: int
    matrices_per_layer: int
    carried: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The report as lines for a terminal."""
        lines = [
            f"{self.source} -> {self.target}: {self.layers} layers, head_dim {self.head_dim}, "
            f"matrices per role and layer: {self.matrices_per_layer}"
        ]
        for title, items in (
            ("wrote", self.written),
            ("carried", self.carried),
            ("dropped", self.dropped),
            ("note", self.notes),
        ):
            lines += [f"{title:>8}: {item}" for item in items]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """One checked file of a published pair; arrays are NumPy, metadata is JSON-ready, role may be unknown."""

    path: pathlib.Path
    metadata: dict[str, Any]
    layers: dict[int, dict[str, np.ndarray]]
    role: str | None  # "key", "value", or None where neither the objective nor a field says
    per_head: bool
    string_ids: bool
    ignored: tuple[str, ...]  # fields this project has no use for

    @property
    def head_dim(self) -> int:
        """D of the matrices, the same in every layer."""
        return next(iter(self.layers.values()))["rotation"].shape[-1]

    @property
    def heads(self) -> int:
        """Matrices per layer: 1, or the number of key/value heads."""
        return next(iter(self.layers.values()))["rotation"].shape[0] if self.per_head else 1


# Published pairs.


def read_published_file(path: str | os.PathLike[str]) -> PublishedFile:
    """One `.pt` file of a published pair, checked alone; CheckpointError in one line.

    Loaded with `weights_only=True`: a file that holds anything but tensors and plain values is refused.
    """
    path = pathlib.Path(path)
    state = _load_torch(path)
    if not isinstance(state, dict) or not isinstance(state.get("layers"), dict) or not state["layers"]:
        raise CheckpointError(f"{path}: not a rotation file, it has no layers")
    metadata = {name: value for name, value in state.items() if name != "layers" and _is_plain(value)}
    ignored = {f"field {name!r}" for name in state if name not in metadata and name != "layers"}
    version = metadata.get("format_version")
    if version not in (1, 2, 3):
        raise CheckpointError(f"{path}: format_version = {version!r}, allowed: 1, 2, 3")
    per_head = metadata.get("source_grouping") in _PER_HEAD_GROUPINGS
    if not per_head and metadata.get("source_grouping") != "layer":
        raise CheckpointError(
            f"{path}: source_grouping = {metadata.get('source_grouping')!r}, allowed: 'layer', "
            "'per_kv_head', 'head'"
        )
    layers: dict[int, dict[str, np.ndarray]] = {}
    for identifier, entry in state["layers"].items():
        layer = _layer_id(path, identifier)
        if layer in layers:
            raise CheckpointError(f"{path}: layer {layer} appears twice")
        if not isinstance(entry, dict) or "rotation" not in entry:
            raise CheckpointError(f"{path}: layer {layer}: rotation is missing")
        if entry.get("layer_id", layer) not in (layer, str(layer)):
            raise CheckpointError(f"{path}: layer {layer}: layer_id = {entry['layer_id']!r}")
        ignored |= {f"layer field {name!r}" for name in entry if name not in _ENTRY_FIELDS}
        layers[layer] = _check_entry(path, layer, entry, per_head)
    first = next(iter(layers.values()))["rotation"].shape
    for layer, arrays in layers.items():
        if arrays["rotation"].shape != first:
            raise CheckpointError(
                f"{path}: layer {layer}: rotation has shape {arrays['rotation'].shape}, "
                f"other layers have {first}"
            )
    return PublishedFile(
        path=path,
        metadata=metadata,
        layers=dict(sorted(layers.items())),
        role=_find_role(path, metadata, layers),
        per_head=per_head,
        string_ids=any(isinstance(identifier, str) for identifier in state["layers"]),
        ignored=tuple(sorted(ignored)),
    )


def import_published_pair(
    key_path: str | os.PathLike[str],
    value_path: str | os.PathLike[str],
    *,
    model: ModelGeometry | None = None,
    num_query_heads: int | None = None,
    num_key_value_heads: int | None = None,
    model_id: str | None = None,
    rope: str = "unknown",
) -> RotationSet:
    """The rotation set of a published pair: rounded matrices, zero value means, default multipliers.

    The originals stay as companions. The files of version 1 do not say how many heads the model has: `model`
    or the two counts do; without them a shared rotation gets a header of one head, marked as unknown.
    Raises CheckpointError or ConfigError in one line.
    """
    keys, values = read_published_file(key_path), read_published_file(value_path)
    for file, role, other in ((keys, "key", "value"), (values, "value", "key")):
        if file.role == other:
            raise CheckpointError(
                f"{file.path}: objective {file.metadata.get('objective')!r} is of {other}s, "
                f"expected {role}s: are the two files swapped?"
            )
        if file.role is None and re.match(r"[kv]_rotation", file.path.name) and file.path.name[0] != role[0]:
            raise CheckpointError(f"{file.path}: passed as the file of {role}s but named otherwise: swapped?")
    if list(keys.layers) != list(values.layers):
        odd = min(set(keys.layers) ^ set(values.layers))
        raise CheckpointError(
            f"layer {odd}: only in one of {keys.path.name} ({len(keys.layers)} layers) and "
            f"{values.path.name} ({len(values.layers)} layers)"
        )
    if keys.head_dim != values.head_dim:
        raise CheckpointError(
            f"{keys.path.name} has head_dim {keys.head_dim}, {values.path.name} has {values.head_dim}"
        )
    heads = max(keys.heads, values.heads)
    if {keys.heads, values.heads} - {1, heads}:
        raise CheckpointError(f"keys have {keys.heads} heads, values have {values.heads}")
    header = _imported_header(
        keys, values, heads, model, num_query_heads, num_key_value_heads, model_id, rope
    )
    layers, companions = {}, {}
    for layer in keys.layers:
        arrays = {"key": keys.layers[layer], "value": values.layers[layer]}
        layers[layer] = _rotation_of_entries(arrays["key"], arrays["value"], heads)
        companions[layer] = {
            _COMPANIONS[role][field]: array
            for role, fields in arrays.items()
            for field, array in fields.items()
        }
    rotation_set = RotationSet(header, layers, companions)
    validate_rotation_set(rotation_set)
    if model is not None:
        check_geometry(rotation_set, model)
    return rotation_set


def export_published_pair(
    rotation_set: RotationSet, directory: str | os.PathLike[str], *, schema: int | None = None
) -> Report:
    """Writes the two `.pt` files of a published pair, in the lowest schema version that can hold the set.

    Matrices of an imported set are the originals, byte for byte; a fitted orthogonal one is the orthogonal
    matrix nearest to its rounded form, to 1e-6. Non-orthogonal transforms go to version 3 with their inverse
    companions, key means too. `schema` caps the version: below 3 the key means of a fitted set are dropped,
    and what needs a newer version is refused. Raises CheckpointError; replaces only such files.
    """
    directory = pathlib.Path(directory)
    validate_rotation_set(rotation_set)
    files = {"key": directory / KEY_FILE, "value": directory / VALUE_FILE}
    for path in files.values():
        if path.exists():
            try:
                read_published_file(path)
            except CheckpointError as error:
                raise CheckpointError(f"refusing to overwrite what is no rotation file: {error}") from None
    states, notes = {}, set()
    for role in files:
        states[role] = _published_state(rotation_set, role, notes, means=schema is None or schema >= 3)
        version = states[role]["format_version"]
        if schema is not None and version > schema:
            raise CheckpointError(
                f"{role} file needs schema version {version} ({_reason(states[role])}), "
                f"but schema = {schema} was asked for"
            )
        if version == 3:
            notes.add(f"{role} file is version 3 ({_reason(states[role])}): needs a loader that reads it")
    directory.mkdir(parents=True, exist_ok=True)
    for role, path in files.items():
        _save_torch(states[role], path)
    for role, path in files.items():
        _verify_published(path, states[role])
    per_head = any(state["source_grouping"] in _PER_HEAD_GROUPINGS for state in states.values())
    with_means = any("k_mean" in entry for entry in states["key"]["layers"].values())
    lost_means = _has_means(rotation_set, "key_mean") and not with_means
    return _report(
        rotation_set,
        "published pair",
        [str(path) for path in files.values()],
        carried=["rotation matrices", *(["key means"] if with_means else [])],
        dropped=[*_not_published(rotation_set), *(["key means"] if lost_means else [])],
        notes=[*sorted(notes), *([] if not per_head else ["one matrix per key/value head"])],
    )


# GGUF.


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
            _check_orthogonal(f"{path}: layer {layer}: {name}", matrix, IMPORT_DEFECT)
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
        layer: _rotation_of_entries(
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
    if destination.exists():
        raise CheckpointError(f"{destination}: exists, expected a new file")
    file = GGUFFile(base)
    geometry = gguf_geometry(file)
    check_geometry(rotation_set, geometry)
    if geometry.architecture not in _GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{base}: architecture {geometry.architecture!r} is not known to keep the order of key channels, "
            f"allowed: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    if baked := next((name for name in file.tensors if _GGUF_ROTATION.fullmatch(name)), None):
        raise CheckpointError(f"{base}: already has rotation tensors ({baked})")
    tensors = {}
    for layer in rotation_set.header.layers:
        for role, letter in (("key", "k"), ("value", "v")):
            matrix, _ = _orthogonal_matrix(rotation_set, layer, role)
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
    return _report(
        rotation_set,
        "GGUF",
        [str(destination)],
        carried=["rotation matrices (transposed, F32)", "header, as metadata text"],
        dropped=[
            *_not_published(rotation_set),
            *(["key means"] if _has_means(rotation_set, "key_mean") else []),
        ],
        notes=[f"{len(file.tensors)} base tensors byte-identical, {len(tensors)} rotation tensors added"],
    )


# The two commands.


def load_any(
    source: str | os.PathLike[str],
    *,
    values: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    num_query_heads: int | None = None,
    num_key_value_heads: int | None = None,
    model_id: str | None = None,
    rope: str = "unknown",
) -> tuple[RotationSet, str]:
    """The rotation set in `source` and the name of its form: "orbax", "safetensors", "pair" or "gguf".

    source: a rotation set (directory or .safetensors), a directory with a published pair, the key file of a
    pair (`values` its value file, or the one beside it), or a GGUF file. `model`, a model directory,
    config.json or GGUF file, gives head counts and is checked against. Raises CheckpointError.
    """
    source = pathlib.Path(source)
    geometry = None if model is None else read_model_geometry(model)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or directory")
    if source.suffix == ".gguf":
        rotation_set, form = import_gguf(source, model_id=model_id), "gguf"
    elif source.suffix == ".pt" or (source.is_dir() and not (source / checkpoint.HEADER_FILE).exists()):
        pair = _find_pair(source, None if values is None else pathlib.Path(values))
        rotation_set = import_published_pair(
            *pair,
            model=geometry,
            num_query_heads=num_query_heads,
            num_key_value_heads=num_key_value_heads,
            model_id=model_id,
            rope=rope,
        )
        return rotation_set, "pair"
    else:
        rotation_set = checkpoint.load_rotation_set(source)
        form = "orbax" if source.is_dir() else "safetensors"
    if geometry is not None:
        check_geometry(rotation_set, geometry)
    return rotation_set, form


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    target: str | None = None,
    values: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    num_query_heads: int | None = None,
    num_key_value_heads: int | None = None,
    model_id: str | None = None,
    rope: str = "unknown",
    schema: int | None = None,
) -> Report:
    """Reads any form of a rotation set, writes another, reads it back, and reports what was carried.

    target, one of TARGETS, follows from `destination` if None: `.safetensors` and `.gguf` by their suffix; a
    directory is a published pair if the source is an Orbax rotation set, and an Orbax rotation set otherwise.
    `base`: the GGUF file or Hugging Face model to bake into ("gguf", "absorb"). `schema` caps the version of
    a published pair. The rest as in `load_any`. Raises CheckpointError or ConfigError, one line each.
    """
    destination = pathlib.Path(destination)
    if target is not None and target not in TARGETS:
        raise ConfigError(f"target = {target!r}, allowed: {', '.join(TARGETS)}")
    rotation_set, form = load_any(
        source,
        values=values,
        model=model,
        num_query_heads=num_query_heads,
        num_key_value_heads=num_key_value_heads,
        model_id=model_id,
        rope=rope,
    )
    target = target or _guess_target(destination, form)
    if base is None and target in ("gguf", "absorb"):
        raise ConfigError(f"target {target!r} needs base: the model to bake the rotations into")
    match target:
        case "pair":
            report = export_published_pair(rotation_set, destination, schema=schema)
        case "gguf":
            assert base is not None
            report = export_gguf(rotation_set, base, destination)
        case "absorb":
            assert base is not None
            error = absorb_values(rotation_set, base, destination)
            report = _report(
                rotation_set,
                "model with absorbed values",
                [str(destination)],
                carried=["value transforms, in v_proj and o_proj", "the rest, as rotation_set/ beside them"],
                dropped=[],
                notes=[f"largest relative rounding error of a replaced weight: {error:.2e}"],
            )
        case "safetensors":
            checkpoint.save_safetensors(rotation_set, destination)
            report = _native_report(rotation_set, "safetensors", destination)
        case _:
            checkpoint.save_rotation_set(rotation_set, destination)
            report = _native_report(rotation_set, "Orbax directory", destination)
    notes = list(report.notes)
    if not rotation_set.header.extra.get("heads_known", True):
        notes.append(
            "the source does not say the number of heads; pass a model to make the set loadable for it"
        )
    if not rotation_set.header.extra.get("roles_verified", True):
        notes.append("the source does not say which file is of keys; taken from the order given")
    notes += [f"ignored in the source: {item}" for item in rotation_set.header.extra.get("ignored", [])]
    return dataclasses.replace(report, source=form, notes=tuple(notes))


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a file contains: a structured, JSON-ready summary, and the same as text."""

    summary: dict[str, Any]

    def text(self) -> str:
        """A header block and one line per layer and role, for a terminal."""
        summary = self.summary
        lines = [f"{name:>20}: {summary[name]}" for name in summary if name not in ("layers", "origin")]
        lines += [f"{name:>20}: {value}" for name, value in summary["origin"].items()]
        titles = ("heads", 5), ("defect", 9), ("condition", 9), ("mean", 9), ("alpha", 6)
        lines.append(f"{'layer role':>12} {' '.join(f'{t:>{w}}' for t, w in titles)}  spectrum")
        for row in summary["layers"]:
            spectrum = row["spectrum"]
            described = (
                f"{spectrum['min']:.3g} … {spectrum['max']:.3g}, "
                f"effective rank {spectrum['effective_rank']:.1f}"
                if spectrum
                else "-"
            )
            alpha = f"{row['alpha']:.3f}" if row["alpha"] is not None else "-"
            lines.append(
                f"{row['layer']:>6} {row['role']:>5} {row['heads']:>5} {row['defect']:>9.1e} "
                f"{row['condition']:>9.3f} {row['mean_norm']:>9.3g} {alpha:>6}  {described}"
            )
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str], *, values: str | os.PathLike[str] | None = None) -> Inspection:
    """Geometry, objective, orthogonality, spectrum, means and origin of any form that `load_any` reads.

    A single `.pt` file is shown alone, unless `values` names its partner. The summary's keys: form, model_id,
    head_dim, num_query_heads, num_key_value_heads, basis, objective, num_layers, layer_ids, origin (dict) and
    layers, a list of rows {layer, role, heads, defect, condition, mean_norm, alpha, spectrum}.
    """
    path = pathlib.Path(path)
    if path.suffix == ".pt" and values is None:
        return _inspect_published(read_published_file(path))
    rotation_set, form = load_any(path, values=values)
    header = rotation_set.header
    published = header.extra.get("published", {})
    rows = [_inspect_role(rotation_set, layer, role) for layer in header.layers for role in ("key", "value")]
    return Inspection(
        {
            "form": form,
            "model_id": header.model_id,
            "head_dim": header.head_dim,
            "num_query_heads": header.num_query_heads,
            "num_key_value_heads": header.num_key_value_heads,
            "basis": header.basis,
            "objective": {role: meta.get("objective") for role, meta in published.items()},
            "num_layers": len(header.layers),
            "layer_ids": list(header.layers),
            "origin": {
                "format": fmt.format_id(),
                "basis_version": header.basis_version,
                "rope": header.rope,
                "rounding": header.rounding,
                "created": header.created,
                "corpus_digest": header.corpus_digest,
                "calibration_tokens": header.calibration_tokens,
                "versions": header.versions,
                "extra": header.extra,
            },
            "layers": rows,
        }
    )


# Details of published pairs.


def _load_torch(path: pathlib.Path) -> Any:
    torch = _require("torch", "reading and writing .pt files")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        text = str(error)
        if "weights_only" in text or "Unsupported" in text or "GLOBAL" in text:
            reason = "holds objects other than tensors and plain values"
        else:
            reason = "truncated, or not a PyTorch file"
        raise CheckpointError(f"{path}: {reason} ({type(error).__name__})") from None


def _save_torch(state: dict[str, Any], path: pathlib.Path) -> None:
    torch = _require("torch", "reading and writing .pt files")
    layers = {
        layer: {
            name: torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
            for name, value in entry.items()
        }
        for layer, entry in state["layers"].items()
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state | {"layers": layers}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _require(module: str, purpose: str) -> Any:
    try:
        return __import__(module)
    except ImportError:
        raise ConfigError(f"{purpose} needs the {module} package: pip install 'oscar-kv[{module}]'") from None


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (str, int, float, bool))


def _layer_id(path: pathlib.Path, identifier: Any) -> int:
    try:
        layer = int(identifier) if type(identifier) in (int, str) else -1
    except ValueError:
        layer = -1
    if layer < 0:
        raise CheckpointError(f"{path}: layer id {identifier!r}, expected an int >= 0")
    return layer


def _check_entry(
    path: pathlib.Path, layer: int, entry: dict[str, Any], per_head: bool
) -> dict[str, np.ndarray]:
    """The arrays of one layer: float32, finite, of agreeing shapes, orthogonal or with their inverse."""
    where = f"{path}: layer {layer}"
    arrays: dict[str, np.ndarray] = {}
    for name in _ENTRY_FIELDS - {"layer_id"}:
        if entry.get(name) is None:
            continue
        tensor = entry[name]
        dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
        if dtype != "float32":
            raise CheckpointError(f"{where}: {name} is {dtype}, expected a float32 tensor")
        arrays[name] = tensor.detach().contiguous().numpy()
        if not np.isfinite(arrays[name]).all():
            raise CheckpointError(f"{where}: {name} has non-finite entries")
    rotation = arrays["rotation"]
    expected = "[K, D, D]" if per_head else "[D, D]"
    if rotation.ndim != 2 + per_head or rotation.shape[-1] != rotation.shape[-2]:
        raise CheckpointError(
            f"{where}: rotation has shape {rotation.shape}, source_grouping says {expected}"
        )
    try:
        check_head_dim(rotation.shape[-1])
    except ConfigError as error:
        raise CheckpointError(f"{where}: rotation: {error}") from None
    for name, array in arrays.items():
        shape = rotation.shape if name.endswith("rotation") else rotation.shape[:-1]
        # A mean may be given per head beside a shared matrix.
        fits = array.shape == shape or (
            name == "k_mean" and array.shape[-1:] == shape[-1:] and array.ndim <= 2
        )
        if not fits:
            raise CheckpointError(f"{where}: {name} has shape {array.shape}, expected {shape}")
    inverses = [name for name in ("q_rotation", "o_rotation") if name in arrays]
    for name in inverses:
        product = rotation.astype(np.float64) @ arrays[name].astype(np.float64).swapaxes(-1, -2)
        error = np.abs(product - np.eye(rotation.shape[-1])).max()
        if error > INVERSE_TOLERANCE:
            raise CheckpointError(
                f"{where}: {name} is not the inverse transpose of rotation: off by {error:.3g}"
            )
    if not inverses:
        _check_orthogonal(f"{where}: rotation", rotation, IMPORT_DEFECT)
    return arrays


def _check_orthogonal(where: str, matrix: np.ndarray, limit: float) -> None:
    gram = matrix.astype(np.float64).swapaxes(-1, -2) @ matrix.astype(np.float64)
    defect = np.abs(gram - np.eye(matrix.shape[-1])).max()
    if defect > limit:
        raise CheckpointError(f"{where} is not orthogonal: defect {defect:.3g}, allowed {limit:g}")


def _find_role(
    path: pathlib.Path, metadata: dict[str, Any], layers: Mapping[int, dict[str, np.ndarray]]
) -> str | None:
    """The role that objective, transform note and fields agree on; CheckpointError if they do not."""
    objective = str(metadata.get("objective", ""))
    claims = set()
    if objective.startswith(("sst", "oscar2_v_", "oscar_kv_value_")):
        claims.add("value")
    elif objective.startswith(("qqt", "oscar2_", "oscar_kv_key_")):
        claims.add("key")
    transform = metadata.get("transform")
    if isinstance(transform, dict):
        claims |= {"key", "value"} & set(transform)
    fields = {name for arrays in layers.values() for name in arrays}
    claims |= {"key"} if fields & {"q_rotation", "k_mean"} else set()
    claims |= {"value"} if "o_rotation" in fields else set()
    if len(claims) > 1:
        raise CheckpointError(
            f"{path}: objective {objective!r} and the fields {sorted(fields - {'rotation', 'eigenvalues'})} "
            "contradict each other on keys or values"
        )
    return next(iter(claims), None)


def _find_pair(source: pathlib.Path, values: pathlib.Path | None) -> tuple[pathlib.Path, pathlib.Path]:
    if values is not None:
        return source, values
    folder = source if source.is_dir() else source.parent
    found = {}
    for letter in "kv":
        if not source.is_dir() and letter == "k":
            found[letter] = source
            continue
        candidates = sorted(folder.glob(f"{letter}_rotation*.pt"))
        if len(candidates) != 1:
            raise CheckpointError(
                f"{folder}: {len(candidates)} files {letter}_rotation*.pt, expected one "
                "(or pass the key file and the value file)"
            )
        found[letter] = candidates[0]
    return found["k"], found["v"]


def _rotation_of_entries(
    key: Mapping[str, np.ndarray], value: Mapping[str, np.ndarray], heads: int
) -> LayerRotation:
    """The fixed-point rotation of one layer of a pair, shared matrices repeated where the other has heads."""

    def spread(array: np.ndarray, ndim: int) -> np.ndarray:
        array = array if array.ndim == ndim else array[None]
        return np.broadcast_to(array, (heads, *array.shape[1:]))

    key_mean = None
    if "k_mean" in key:
        key_mean = key["k_mean"]
        if key_mean.ndim == 2 and heads == 1:  # per-head means beside a shared matrix
            key_mean = key_mean.mean(axis=0)
        key_mean = spread(key_mean, 2)
    keys, values = spread(key["rotation"], 3), spread(value["rotation"], 3)
    return make_layer_rotation(list(keys), list(values), key_mean=key_mean)


def _imported_header(
    keys: PublishedFile,
    values: PublishedFile,
    heads: int,
    model: ModelGeometry | None,
    num_query_heads: int | None,
    num_key_value_heads: int | None,
    model_id: str | None,
    rope: str,
) -> RotationHeader:
    calibration = keys.metadata.get("calibration")
    calibration = calibration if isinstance(calibration, dict) else {}
    if model is not None:
        num_query_heads, num_key_value_heads = model.num_query_heads, model.num_key_value_heads
        model_id = model_id or model.model_id
    num_key_value_heads = (
        num_key_value_heads or calibration.get("global_kv_heads") or (heads if heads > 1 else None)
    )
    num_query_heads = num_query_heads or calibration.get("global_q_heads")
    known = num_key_value_heads is not None and num_query_heads is not None
    if heads > 1 and num_key_value_heads != heads:
        raise CheckpointError(
            f"{keys.path}: rotations of {heads} heads, but num_key_value_heads = {num_key_value_heads}"
        )
    objective = str(keys.metadata.get("objective", ""))
    basis = {"q": "oscar", "h": "hadamard"}.get(objective[:1], objective or "unknown")
    meta = {
        role: file.metadata | {"string_ids": file.string_ids}
        for role, file in (("key", keys), ("value", values))
    }
    extra: dict[str, Any] = {
        "source": "published pair",
        "published": meta,
        "heads_known": known,
        "roles_verified": (keys.role, values.role) != (None, None),
    }
    if ignored := sorted({*keys.ignored, *values.ignored}):
        extra["ignored"] = ignored
    return RotationHeader(
        model_id=model_id or str(calibration.get("model_path", "unknown")),
        layers=tuple(keys.layers),
        num_query_heads=num_query_heads or num_key_value_heads or 1,
        num_key_value_heads=num_key_value_heads or 1,
        head_dim=keys.head_dim,
        rope=rope,
        basis=basis,
        basis_version=f"published/{keys.metadata['format_version']}",
        calibration_tokens=int(calibration.get("tokens", 0)),
        versions={"jax": jax.__version__, "numpy": np.__version__},
        created=datetime.date.today().isoformat(),
        extra=extra,
    )


def _orthogonal_matrix(rotation_set: RotationSet, layer: int, role: str) -> tuple[np.ndarray | None, bool]:
    """(float32 [Kr, D, D] orthogonal to 1e-6, or None) and whether it is the imported original."""
    original = _original(rotation_set, layer, role)
    if original is not None:
        matrix = original if original.ndim == 3 else original[None]
        return (matrix if _unit_defect(matrix) <= IMPORT_DEFECT else None), True
    transform = from_fixed_point(getattr(rotation_set.layers[layer], f"{role}_transform"))
    if orthogonality_defect(transform) > ROUNDED_DEFECT:
        return None, False
    left, _, right = np.linalg.svd(transform)
    matrix = (left @ right).astype(np.float32)
    assert _unit_defect(matrix) <= EXPORT_DEFECT
    return matrix, False


def _unit_defect(matrix: np.ndarray) -> float:
    matrix = matrix.astype(np.float64)
    return float(np.abs(matrix.swapaxes(-1, -2) @ matrix - np.eye(matrix.shape[-1])).max())


def _original(rotation_set: RotationSet, layer: int, role: str) -> np.ndarray | None:
    """The imported matrix kept as a companion, checked to be the one the transform was rounded from."""
    original = rotation_set.companions.get(layer, {}).get(f"{role}_rotation")
    if original is None:
        return None
    original = np.asarray(original)
    transform = np.asarray(getattr(rotation_set.layers[layer], f"{role}_transform"))
    matrices = original if original.ndim == 3 else original[None]
    rounded = np.stack([to_fixed_point(matrix)[0] for matrix in matrices])
    if not np.array_equal(np.broadcast_to(rounded, transform.shape), transform):
        raise CheckpointError(f"layer {layer}: companion {role}_rotation does not belong to {role}_transform")
    return original


def _published_state(rotation_set: RotationSet, role: str, notes: set[str], *, means: bool) -> dict[str, Any]:
    """The dict of one file of a pair, arrays as NumPy."""
    header = rotation_set.header
    entries = {layer: _published_entry(rotation_set, layer, role, notes, means) for layer in header.layers}
    originals = all(_original(rotation_set, layer, role) is not None for layer in header.layers)
    published = header.extra.get("published", {}).get(role) if originals else None
    if published is not None:
        metadata = dict(published)
        as_text = metadata.pop("string_ids", False)
        layers = {str(layer) if as_text else layer: entry for layer, entry in entries.items()}
        return metadata | {"layers": layers}
    per_head = any(entry["rotation"].ndim == 3 for entry in entries.values())
    newer = any({"q_rotation", "o_rotation", "k_mean"} & set(entry) for entry in entries.values())
    if per_head:
        for entry in entries.values():
            for name, array in entry.items():
                if isinstance(array, np.ndarray) and array.ndim == (2 if name.endswith("rotation") else 1):
                    entry[name] = np.repeat(array[None], header.num_key_value_heads, axis=0)
    version = 3 if newer else 2 if per_head else 1
    state = {
        "format_version": version,
        "objective": _objective(rotation_set, role),
        "source_grouping": {1: "layer", 2: "per_kv_head", 3: "head" if per_head else "layer"}[version],
        "layers": entries,
    }
    if version == 3:  # earlier versions have no place for it
        state["calibration"] = {
            "model_path": header.model_id,
            "tokens": header.calibration_tokens,
            "global_kv_heads": header.num_key_value_heads,
            "global_q_heads": header.num_query_heads,
        }
    return state


def _published_entry(
    rotation_set: RotationSet, layer: int, role: str, notes: set[str], means: bool
) -> dict[str, Any]:
    companions = rotation_set.companions.get(layer, {})
    original = _original(rotation_set, layer, role)
    if original is not None:
        kept = {
            field: np.asarray(companions[name])
            for field, name in _COMPANIONS[role].items()
            if name in companions
        }
        return {"layer_id": layer} | kept
    rotation = rotation_set.layers[layer]
    matrix, _ = _orthogonal_matrix(rotation_set, layer, role)
    entry: dict[str, Any] = {}
    if matrix is not None:
        entry["rotation"] = matrix
    else:
        # Exact in float32: the transform has 15 bits.
        entry["rotation"] = from_fixed_point(getattr(rotation, f"{role}_transform")).astype(np.float32)
        if role == "key":
            entry["q_rotation"] = np.asarray(rotation.query_transform)
        else:
            entry["o_rotation"] = np.asarray(rotation.output_transform).swapaxes(-1, -2)
    heads, head_dim = entry["rotation"].shape[:2]
    # No spectrum is stored; the published Hadamard files write ones in its place, and no loader reads it.
    entry["eigenvalues"] = np.ones((heads, head_dim), np.float32)
    notes.add("eigenvalues are not part of a rotation set and are written as ones")
    if role == "key" and means and np.any(np.asarray(rotation.key_mean)):
        entry["k_mean"] = np.asarray(rotation.key_mean).astype(np.float32)
    if heads == 1 or all((array == array[:1]).all() for array in entry.values()):
        entry = {name: array[0] for name, array in entry.items()}
    return {"layer_id": layer} | {name: np.ascontiguousarray(array) for name, array in entry.items()}


def _objective(rotation_set: RotationSet, role: str) -> str:
    """The published name of a basis where there is one, else ours, with the role in it.

    The header names the basis of the keys alone, so Hadamard and identity are recognized by their entries.
    """
    transforms = [getattr(layer, f"{role}_transform") for layer in rotation_set.layers.values()]
    head_dim = rotation_set.header.head_dim
    for name, matrix in (("hadamard", hadamard_matrix(head_dim)), ("identity", np.eye(head_dim))):
        fixed = to_fixed_point(matrix)[0]
        if all((np.asarray(transform) == fixed).all() for transform in transforms):
            return name if name == "hadamard" else f"oscar_kv_{role}_{name}"
    if all(orthogonality_defect(from_fixed_point(transform)) <= ROUNDED_DEFECT for transform in transforms):
        if role == "value":
            return "sst_r_h_pbr"
        if rotation_set.header.basis == "oscar":
            return "qqt_r_h_pbr"
    return f"oscar_kv_{role}_{rotation_set.header.basis}"


def _reason(state: Mapping[str, Any]) -> str:
    fields = {name for entry in state["layers"].values() for name in entry} - {"layer_id", "eigenvalues"}
    extra = sorted(fields - {"rotation"})
    return "fields " + ", ".join(extra) if extra else f"source_grouping {state['source_grouping']!r}"


def _verify_published(path: pathlib.Path, state: Mapping[str, Any]) -> None:
    """Reads a written file back and compares every array."""
    written = read_published_file(path)
    for identifier, entry in state["layers"].items():
        for name, array in entry.items():
            if isinstance(array, np.ndarray) and not np.array_equal(
                written.layers[int(identifier)][name], array
            ):
                raise CheckpointError(f"{path}: layer {identifier}: {name} did not survive writing")


# Details of GGUF.


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
        versions={"jax": jax.__version__, "numpy": np.__version__},
        created=datetime.date.today().isoformat(),
        extra=extra,
    )


def _bake_gguf(
    header: RotationHeader, base: GGUFFile, destination: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
    gguf = _require("gguf", "writing GGUF files")
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    writer = gguf.GGUFWriter(temporary, base.metadata["general.architecture"])
    writer.data_alignment = base.metadata.get("general.alignment", writer.data_alignment)
    try:
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
        os.replace(temporary, destination)
    finally:
        temporary.unlink(missing_ok=True)


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


# Reports.


def _guess_target(destination: pathlib.Path, form: str) -> str:
    if destination.suffix in (".safetensors", ".gguf"):
        return destination.suffix[1:]
    if destination.suffix == ".pt":
        raise ConfigError(f"{destination}: a published pair is two files, pass the directory for them")
    return "pair" if form == "orbax" else "orbax"


def _has_means(rotation_set: RotationSet, field: str) -> bool:
    return any(np.any(np.asarray(getattr(layer, field))) for layer in rotation_set.layers.values())


def _not_published(rotation_set: RotationSet) -> list[str]:
    """What neither a published pair nor a GGUF file has a place for, if the set has it."""
    items = ["page means of keys (the other stack centers with a fixed mean, or not at all)"]
    if _has_means(rotation_set, "value_mean"):
        items.append("value means")
    multipliers = {
        int(value)
        for layer in rotation_set.layers.values()
        for field in (layer.key_multiplier, layer.value_multiplier)
        for value in np.asarray(field)
    }
    items.append(f"multipliers {sorted(multipliers)} (the other stack has its own clip ratios)")
    return items


def _native_report(rotation_set: RotationSet, target: str, path: pathlib.Path) -> Report:
    written = checkpoint.load_rotation_set(path)
    if written.header != rotation_set.header:
        raise CheckpointError(f"{path}: the header did not survive writing")
    return _report(rotation_set, target, [str(path)], carried=["everything"], dropped=[])


def _report(
    rotation_set: RotationSet,
    target: str,
    written: Sequence[str],
    *,
    carried: Sequence[str],
    dropped: Sequence[str],
    notes: Sequence[str] = (),
) -> Report:
    heads = max(len(layer.key_transform) for layer in rotation_set.layers.values())
    header = rotation_set.header
    return Report(
        source="rotation set",
        target=target,
        written=tuple(written),
        layers=len(header.layers),
        head_dim=header.head_dim,
        matrices_per_layer=heads,
        carried=tuple(carried),
        dropped=tuple(dropped),
        notes=tuple(notes),
    )


def _inspect_role(rotation_set: RotationSet, layer: int, role: str) -> dict[str, Any]:
    rotation = rotation_set.layers[layer]
    transform = from_fixed_point(getattr(rotation, f"{role}_transform"))
    eigenvalues = rotation_set.companions.get(layer, {}).get(f"{role}_eigenvalues")
    multiplier = np.asarray(getattr(rotation, f"{role}_multiplier"))
    return {
        "layer": layer,
        "role": role,
        "heads": len(transform),
        "defect": orthogonality_defect(transform),
        "condition": condition_number(transform),
        "mean_norm": _largest_norm(np.asarray(getattr(rotation, f"{role}_mean"))),
        "alpha": float(multiplier.mean()) / (1 << fmt.MULTIPLIER_BITS),
        "spectrum": _spectrum(eigenvalues),
    }


def _inspect_published(file: PublishedFile) -> Inspection:
    rows = [
        {
            "layer": layer,
            "role": file.role or "?",
            "heads": file.heads,
            "defect": orthogonality_defect(arrays["rotation"]),
            "condition": condition_number(arrays["rotation"]),
            "mean_norm": _largest_norm(arrays.get("k_mean", np.zeros(1))),
            "alpha": None,
            "spectrum": _spectrum(arrays.get("eigenvalues")),
        }
        for layer, arrays in file.layers.items()
    ]
    metadata = dict(file.metadata)
    return Inspection(
        {
            "form": "published file",
            "model_id": (metadata.get("calibration") or {}).get("model_path", "unknown"),
            "head_dim": file.head_dim,
            "num_query_heads": None,
            "num_key_value_heads": file.heads if file.per_head else None,
            "basis": None,
            "objective": {file.role or "unknown role": metadata.pop("objective", None)},
            "num_layers": len(file.layers),
            "layer_ids": list(file.layers),
            "origin": metadata,
            "layers": rows,
        }
    )


def _largest_norm(mean: np.ndarray) -> float:
    return float(np.linalg.norm(np.atleast_2d(mean.astype(np.float64)), axis=-1).max())


def _spectrum(eigenvalues: Any) -> dict[str, float] | None:
    """Extremes and effective rank, exp of the entropy of the normalized spectrum (1…D)."""
    if eigenvalues is None:
        return None
    values = np.maximum(np.asarray(eigenvalues, np.float64).reshape(-1), 0)
    share = values / max(values.sum(), np.finfo(np.float64).tiny)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum()
    return {"min": float(values.min()), "max": float(values.max()), "effective_rank": float(np.exp(entropy))}
