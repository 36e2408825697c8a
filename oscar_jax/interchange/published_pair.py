"""The two `.pt` files in which rotations are published: imported, exported, verified.

An imported matrix is rounded to the fixed point of the format; the float32 original stays beside it as a
companion, so that writing the pair again gives back the same tensors, byte for byte. Roles come from the
objective, the fields and the geometry; a file name can only contradict them, never decide.

Exported files say by their form what an old loader must not misread: if one layer of a file has a field, all
have it, and matrices that are not orthogonal stand per key/value head, [K, D, D], which loaders that do not
know their inverses refuse.

Twin file, byte-identical in both packages: NumPy only.
"""

import datetime
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, ConfigError
from ..core.model_geometry import ModelGeometry
from ..core.rotation_header import RotationHeader, require_nearest
from ..rotations.bases import hadamard_matrix, orthogonality_defect
from ..rotations.fixed_point import from_fixed_point, to_fixed_point
from ..rotations.rotation import LayerRotation, RotationSet, make_layer_rotation, validate_rotation_set
from .loaders import LOADERS, Loader, check_all_or_none, find_problems, get_loader
from .published_file import (
    IMPORT_DEFECT,
    INVERSE_FIELDS,
    PER_HEAD_GROUPINGS,
    VERSIONS,
    PublishedFile,
    read_published_file,
    unit_defect,
)
from .report import Report, has_means, make_report, not_published
from .torch_file import save_torch_file

KEY_FILE = "k_rotation_qqt_r_h_pbr.pt"  # the names that the published documentation and scripts expect
VALUE_FILE = "v_rotation_sst_r_h_pbr.pt"
EXPORT_DEFECT = 1e-6  # of a float32 matrix that we call orthogonal
ROUNDED_DEFECT = 1e-3  # an orthogonal matrix rounded to 2**-14 stays below it
LAYER_IDS = ("model", "attention")
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


def find_pair(source: pathlib.Path, values: pathlib.Path | None) -> tuple[pathlib.Path, pathlib.Path]:
    """Key and value file of a pair: a directory, or its key file with `values` or the one beside it."""
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


def import_published_pair(
    key_path: str | os.PathLike[str],
    value_path: str | os.PathLike[str],
    *,
    model: ModelGeometry | None = None,
    num_query_heads: int | None = None,
    num_key_value_heads: int | None = None,
    model_id: str | None = None,
    rope: str = "unknown",
    layer_ids: str = "model",
) -> RotationSet:
    """The rotation set of a published pair: rounded matrices, zero value means, default multipliers.

    The originals stay as companions. The files of version 1 do not say how many heads the model has: `model`
    or the two counts do; without them a shared rotation gets a header of one head, marked as unknown.
    layer_ids "attention": the ids in the files count the layers with full attention of `model`, in order.
    Raises CheckpointError or ConfigError in one line.
    """
    if layer_ids not in LAYER_IDS:
        raise ConfigError(f"layer_ids = {layer_ids!r}, allowed: {', '.join(LAYER_IDS)}")
    keys, values = read_published_file(key_path), read_published_file(value_path)
    _check_pair(keys, values)
    heads = max(keys.heads, values.heads)
    numbers = _number_layers(keys, model, layer_ids)
    header = _imported_header(
        keys, values, heads, model, num_query_heads, num_key_value_heads, model_id, rope, numbers
    )
    layers, companions = {}, {}
    for identifier, layer in numbers.items():
        arrays = {"key": keys.layers[identifier], "value": values.layers[identifier]}
        layers[layer] = rotation_of_entries(arrays["key"], arrays["value"], heads)
        companions[layer] = {
            _COMPANIONS[role][field]: array
            for role, fields in arrays.items()
            for field, array in fields.items()
        }
    rotation_set = RotationSet(header, layers, companions)
    validate_rotation_set(rotation_set)
    if model is not None:
        try:
            rotation_set.require_fits(model, model.full_layers, possible_layers=model.attention_layers)
        except CheckpointError as error:
            counted = list(range(len(model.full_layers)))
            hint = ""
            if list(keys.layers) == counted != list(model.full_layers):
                hint = " (if the ids count the layers with full attention only: --layer-ids attention)"
            raise CheckpointError(f"{error}{hint}") from None
    return rotation_set


def rotation_of_entries(
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


def export_published_pair(
    rotation_set: RotationSet,
    directory: str | os.PathLike[str],
    *,
    schema: int | None = None,
    loader: str | None = None,
    model: ModelGeometry | None = None,
) -> Report:
    """Writes the two `.pt` files of a published pair, in the lowest schema version that can hold the set.

    Matrices of an imported set are the originals, byte for byte; a fitted orthogonal one is the orthogonal
    matrix nearest to its rounded form, to 1e-6. Non-orthogonal transforms go to version 3 with their inverse
    companions, key means too. `schema` caps the version: below 3 key means are dropped, and what needs a
    newer version is refused. `loader`, a name in LOADERS, refuses what that one would refuse or misread,
    numbers the layers as it does, whatever the ids of an imported pair, and drops the means that it ignores;
    `model` tells it the model's layers. Raises CheckpointError or ConfigError; replaces only such files.
    """
    directory = pathlib.Path(directory)
    validate_rotation_set(rotation_set)
    require_nearest(rotation_set.header, "a published pair")
    if schema is not None and schema not in VERSIONS:
        raise ConfigError(f"schema = {schema!r}, allowed: {', '.join(map(str, VERSIONS))}")
    target = None if loader is None else get_loader(loader)
    files = {"key": directory / KEY_FILE, "value": directory / VALUE_FILE}
    for path in files.values():
        if path.exists():
            try:
                read_published_file(path)
            except CheckpointError as error:
                raise CheckpointError(f"refusing to overwrite what is no rotation file: {error}") from None
    means = (schema is None or schema >= 3) and (target is None or target.companions)
    states, notes = published_states(rotation_set, means=means, model_ids=target is not None)
    for role, state in states.items():
        version = state["format_version"]
        if schema is not None and version > schema:
            raise CheckpointError(
                f"{role} file needs schema version {version} ({_reason(state)}), "
                f"but schema = {schema} was asked for"
            )
        if version == 3:
            notes.append(f"{role} file is version 3 ({_reason(state)}): needs a loader that reads it")
    if target is not None and loader is not None:
        states = _serve(loader, target, states, model, notes)
    else:
        notes += _warnings(states)
    directory.mkdir(parents=True, exist_ok=True)
    for role, path in files.items():
        save_torch_file(states[role], path)
    for role, path in files.items():
        _verify_published(path, states[role])
    per_head = any(state["source_grouping"] in PER_HEAD_GROUPINGS for state in states.values())
    with_means = any("k_mean" in entry for entry in states["key"]["layers"].values())
    lost_means = has_means(rotation_set, "key_mean") and not with_means
    dropped = ["key means"] if lost_means else []
    return make_report(
        rotation_set,
        "published pair" if target is None else f"published pair for {target.title}",
        [str(path) for path in files.values()],
        carried=["rotation matrices", *(["key means"] if with_means else [])],
        dropped=[*not_published(rotation_set), *dropped],
        notes=[*notes, *([] if not per_head else ["one matrix per key/value head"])],
    )


def published_states(
    rotation_set: RotationSet, *, means: bool = True, model_ids: bool = False
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The content of the two files of a pair by role, arrays as NumPy, and notes for the report.

    `means` False leaves key means out. Layers have the ids that an imported pair gave them, or with
    `model_ids` those of the model's layers.
    """
    states, notes = {}, []
    for role in ("key", "value"):
        originals = {
            layer: _original(rotation_set, layer, role) is not None for layer in rotation_set.header.layers
        }
        if not all(originals.values()):
            notes.append(f"{role} eigenvalues are not part of a rotation set and are written as ones")
        states[role] = _published_state(rotation_set, role, all(originals.values()), means, model_ids)
    return states, notes


def orthogonal_matrix(rotation_set: RotationSet, layer: int, role: str) -> np.ndarray | None:
    """float32 [Kr, D, D] orthogonal to 1e-6, or as imported; None if the transform is not orthogonal."""
    original = _original(rotation_set, layer, role)
    if original is not None:
        matrix = original if original.ndim == 3 else original[None]
        return matrix if unit_defect(matrix) <= IMPORT_DEFECT else None
    transform = from_fixed_point(rotation_set.layers[layer].numpy()[f"{role}_transform"])
    if orthogonality_defect(transform) > ROUNDED_DEFECT:
        return None
    left, _, right = np.linalg.svd(transform)
    matrix = (left @ right).astype(np.float32)
    if (defect := unit_defect(matrix)) > EXPORT_DEFECT:
        raise CheckpointError(f"layer {layer}: {role}_transform is orthogonal only to {defect:.3g}")
    return matrix


# Import.


def _check_pair(keys: PublishedFile, values: PublishedFile) -> None:
    """Raises CheckpointError unless the two files are keys and values of the same layers and geometry."""
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


def _number_layers(keys: PublishedFile, model: ModelGeometry | None, layer_ids: str) -> dict[int, int]:
    """Layer id of the files -> layer id of the model."""
    if layer_ids == "model":
        return {layer: layer for layer in keys.layers}
    if model is None:
        raise ConfigError("layer_ids = 'attention' needs the model, whose layers the ids count")
    full = model.full_layers or model.sliding_layers
    if list(keys.layers) != list(range(len(full))):
        raise CheckpointError(
            f"{keys.path}: layers {list(keys.layers)} do not count the {len(full)} layers with full "
            f"attention of the model {model.model_id!r}"
        )
    return dict(enumerate(full))


def _imported_header(
    keys: PublishedFile,
    values: PublishedFile,
    heads: int,
    model: ModelGeometry | None,
    num_query_heads: int | None,
    num_key_value_heads: int | None,
    model_id: str | None,
    rope: str,
    numbers: Mapping[int, int],
) -> RotationHeader:
    if model is not None:
        num_query_heads, num_key_value_heads = model.num_query_heads, model.num_key_value_heads
        model_id = model_id or model.model_id
    num_key_value_heads = (
        num_key_value_heads or keys.calibration_count("global_kv_heads") or (heads if heads > 1 else None)
    )
    num_query_heads = num_query_heads or keys.calibration_count("global_q_heads")
    known = num_key_value_heads is not None and num_query_heads is not None
    if heads > 1 and num_key_value_heads != heads:
        raise CheckpointError(
            f"{keys.path}: rotations of {heads} heads, but num_key_value_heads = {num_key_value_heads}"
        )
    objective = str(keys.metadata.get("objective", ""))
    basis = {"q": "oscar", "h": "hadamard"}.get(objective[:1], objective or "unknown")
    extra: dict[str, Any] = {
        "source": "published pair",
        "published": {
            role: file.metadata | {"string_ids": file.string_ids}
            for role, file in (("key", keys), ("value", values))
        },
        "heads_known": known,
        "roles_verified": (keys.role, values.role) != (None, None),
    }
    if any(identifier != layer for identifier, layer in numbers.items()):
        extra["published_layers"] = {str(layer): identifier for identifier, layer in numbers.items()}
    if ignored := sorted({*keys.ignored, *values.ignored}):
        extra["ignored"] = ignored
    return RotationHeader(
        model_id=model_id or str(keys.calibration.get("model_path", "unknown")),
        layers=tuple(numbers.values()),
        num_query_heads=num_query_heads or num_key_value_heads or 1,
        num_key_value_heads=num_key_value_heads or 1,
        head_dim=keys.head_dim,
        rope=rope,
        basis=basis,
        basis_version=f"published/{keys.metadata['format_version']}",
        calibration_tokens=keys.calibration_count("tokens") or 0,
        versions={"numpy": np.__version__},
        created=datetime.date.today().isoformat(),
        extra=extra,
    )


# Export.


def _original(rotation_set: RotationSet, layer: int, role: str) -> np.ndarray | None:
    """The imported matrix kept as a companion, checked to be the one the transform was rounded from."""
    original = rotation_set.companions.get(layer, {}).get(f"{role}_rotation")
    if original is None:
        return None
    original = np.asarray(original)
    transform = rotation_set.layers[layer].numpy()[f"{role}_transform"]
    matrices = original if original.ndim == 3 else original[None]
    rounded = np.stack([to_fixed_point(matrix)[0] for matrix in matrices])
    if not np.array_equal(np.broadcast_to(rounded, transform.shape), transform):
        raise CheckpointError(f"layer {layer}: companion {role}_rotation does not belong to {role}_transform")
    return original


def _published_state(
    rotation_set: RotationSet, role: str, all_original: bool, means: bool, model_ids: bool
) -> dict[str, Any]:
    """The dict of one file of a pair, arrays as NumPy."""
    header = rotation_set.header
    entries = {layer: _entry(rotation_set, layer, role, means) for layer in header.layers}
    _complete(entries, role, header.num_key_value_heads)
    published = header.extra.get("published", {}).get(role) if all_original else None
    cut = not means and role == "key" and any("key_mean" in kept for kept in rotation_set.companions.values())
    if published is not None and not cut:
        metadata = {name: value for name, value in published.items() if name != "string_ids"}
        numbers = {} if model_ids else header.extra.get("published_layers", {})
        named = {numbers.get(str(layer), layer): entry for layer, entry in entries.items()}
        for identifier, entry in named.items():
            entry["layer_id"] = identifier
        as_text = published.get("string_ids", False)
        return metadata | {"layers": {str(i) if as_text else i: entry for i, entry in named.items()}}
    per_head = any(entry["rotation"].ndim == 3 for entry in entries.values())
    newer = any({"q_rotation", "o_rotation", "k_mean"} & set(entry) for entry in entries.values())
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


def _entry(rotation_set: RotationSet, layer: int, role: str, means: bool) -> dict[str, Any]:
    """What one layer has to say: the original of an import, or matrices in the smallest form."""
    companions = rotation_set.companions.get(layer, {})
    if _original(rotation_set, layer, role) is not None:
        kept = {
            field: np.asarray(companions[name])
            for field, name in _COMPANIONS[role].items()
            if name in companions and (means or field != "k_mean")
        }
        return {"layer_id": layer} | kept
    fields = rotation_set.layers[layer].numpy()
    matrix = orthogonal_matrix(rotation_set, layer, role)
    entry: dict[str, Any] = {}
    if matrix is not None:
        entry["rotation"] = matrix
    else:
        # Exact in float32: the transform has 15 bits.
        entry["rotation"] = from_fixed_point(fields[f"{role}_transform"]).astype(np.float32)
        if role == "key":
            entry["q_rotation"] = fields["query_transform"]
        else:
            entry["o_rotation"] = fields["output_transform"].swapaxes(-1, -2)
    # No spectrum is stored; the published Hadamard files write ones in its place, and no loader reads it.
    entry["eigenvalues"] = np.ones(entry["rotation"].shape[:2], np.float32)
    if role == "key" and means and fields["key_mean"].any():
        entry["k_mean"] = fields["key_mean"].astype(np.float32)
    shared = len(entry["rotation"]) == 1 or all((array == array[:1]).all() for array in entry.values())
    if shared and matrix is not None:
        entry = {name: array[0] for name, array in entry.items()}
    return {"layer_id": layer} | {name: np.ascontiguousarray(array) for name, array in entry.items()}


def _complete(entries: dict[int, dict[str, Any]], role: str, heads: int) -> None:
    """Gives every layer the fields and the head axis that one of them has; nothing changes if all agree.

    A layer without an inverse is orthogonal, so its matrix is its own; without a mean it was not centered.
    """
    inverse = INVERSE_FIELDS[role]
    fields = set().union(*entries.values())
    for entry in entries.values():
        if inverse in fields:
            entry.setdefault(inverse, entry["rotation"])
        if "k_mean" in fields:
            entry.setdefault("k_mean", np.zeros(entry["rotation"].shape[:-1], np.float32))
    if len({entry["rotation"].ndim for entry in entries.values()}) == 1:
        if all(entry["rotation"].shape[:-2] in ((), (heads,)) for entry in entries.values()):
            return
    for entry in entries.values():
        for name, array in entry.items():
            if not isinstance(array, np.ndarray):
                continue
            ndim = 3 if name.endswith("rotation") else 2
            array = array if array.ndim == ndim else array[None]
            if len(array) != heads:
                entry[name] = np.repeat(array, heads, axis=0)


def _objective(rotation_set: RotationSet, role: str) -> str:
    """The published name of a basis where there is one, else ours, with the role in it.

    The header names the basis of the keys alone, so Hadamard and identity are recognized by their entries.
    """
    transforms = [layer.numpy()[f"{role}_transform"] for layer in rotation_set.layers.values()]
    head_dim = rotation_set.header.head_dim
    for name, matrix in (("hadamard", hadamard_matrix(head_dim)), ("identity", np.eye(head_dim))):
        fixed = to_fixed_point(matrix)[0]
        if all((transform == fixed).all() for transform in transforms):
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


def _serve(
    name: str,
    loader: Loader,
    states: dict[str, dict[str, Any]],
    model: ModelGeometry | None,
    notes: list[str],
) -> dict[str, dict[str, Any]]:
    """The states as `loader` numbers layers; CheckpointError naming what it would refuse or misread."""
    if loader.layers == "counted":
        states = _count_layers(states, model, notes)
    problems = find_problems(loader, states, model)
    if problems:
        first = min(problems, key=lambda problem: not problem.misread)
        raise CheckpointError(
            f"not for {name} ({loader.title}): it {first.text}; "
            "for every loader: oscar calibrate --basis oscar --shared --all-layers"
        )
    return states


def _count_layers(
    states: Mapping[str, dict[str, Any]], model: ModelGeometry | None, notes: list[str]
) -> dict[str, dict[str, Any]]:
    """The states with ids that count the layers with full attention: those of `model`, or all of the set."""
    counted = {}
    for role, state in states.items():
        entries = {int(identifier): entry for identifier, entry in state["layers"].items()}
        full = list(entries) if model is None else list(model.full_layers or model.sliding_layers)
        if missing := sorted(set(full) - set(entries)):
            raise CheckpointError(
                f"{role}s have no rotation for layer {missing[0]}, which has full attention"
            )
        layers = {number: entries[layer] | {"layer_id": number} for number, layer in enumerate(full)}
        counted[role] = state | {"layers": layers}
        if role == "key" and list(layers) != full:
            notes.append(f"layer ids count the layers with full attention: 0 … {len(full) - 1} are {full}")
    return counted


def _warnings(states: Mapping[str, Any]) -> list[str]:
    """One line in capitals for each way in which a loader would misread the pair without a word."""
    lines = []
    for name, loader in LOADERS.items():
        for problem in find_problems(loader, states):
            if problem.misread:
                lines.append(
                    f"NOT FOR {loader.title.upper()}: IT {problem.text.upper()} (--for {name} refuses)"
                )
    return lines


def _verify_published(path: pathlib.Path, state: Mapping[str, Any]) -> None:
    """Reads a written file back, compares every array, and checks what loaders check."""
    written = read_published_file(path)
    check_all_or_none(str(path), {"layers": written.layers})
    for identifier, entry in state["layers"].items():
        for name, array in entry.items():
            if isinstance(array, np.ndarray) and not np.array_equal(
                written.layers[int(identifier)][name], array
            ):
                raise CheckpointError(f"{path}: layer {identifier}: {name} did not survive writing")
