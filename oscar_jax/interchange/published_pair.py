"""The two `.pt` files in which rotations are published: read, checked, written, verified."""

import dataclasses
import datetime
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..core.config import check_head_dim
from ..core.errors import CheckpointError, ConfigError
from ..core.files import replacing_file
from ..core.rotation_header import RotationHeader
from ..models.geometry import ModelGeometry
from ..rotations.bases import hadamard_matrix, orthogonality_defect
from ..rotations.fixed_point import from_fixed_point, to_fixed_point
from ..rotations.rotation import LayerRotation, RotationSet, make_layer_rotation, validate_rotation_set
from .report import Report, _has_means, _not_published, _report

KEY_FILE = "k_rotation_qqt_r_h_pbr.pt"  # the names that the published documentation and scripts expect
VALUE_FILE = "v_rotation_sst_r_h_pbr.pt"
IMPORT_DEFECT = 1e-5  # of a float32 matrix that claims to be orthogonal
EXPORT_DEFECT = 1e-6  # of a float32 matrix that we call orthogonal
ROUNDED_DEFECT = 1e-3  # an orthogonal matrix rounded to 2**-14 stays below it
INVERSE_TOLERANCE = 1e-3
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
        rotation_set.require_fits(model, model.full_layers, possible_layers=model.attention_layers)
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
    with replacing_file(path) as partial:
        torch.save(state | {"layers": layers}, partial)


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
