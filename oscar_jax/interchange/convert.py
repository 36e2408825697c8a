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
import os
import pathlib

from ..core.errors import CheckpointError, ConfigError
from ..models.geometry import read_model_geometry
from ..rotations import store
from ..rotations.rotation import RotationSet
from .absorb import absorb_values
from .gguf import export_gguf, import_gguf
from .published_pair import _find_pair, export_published_pair, import_published_pair
from .report import Report, _native_report, _report

TARGETS = ("orbax", "safetensors", "pair", "gguf", "absorb")


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
    source = store.rotation_path(source)
    geometry = None if model is None else read_model_geometry(model)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or directory")
    if source.suffix == ".gguf":
        rotation_set, form = import_gguf(source, model_id=model_id), "gguf"
    elif source.suffix == ".pt" or (source.is_dir() and not (source / store.HEADER_FILE).exists()):
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
        rotation_set = store.load_rotation_set(source)
        form = "orbax" if source.is_dir() else "safetensors"
    if geometry is not None:
        rotation_set.require_fits(geometry, geometry.full_layers, possible_layers=geometry.attention_layers)
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
            store.save_safetensors(rotation_set, destination)
            report = _native_report(rotation_set, "safetensors", destination)
        case _:
            store.save_rotation_set(rotation_set, destination)
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


# Reports.


def _guess_target(destination: pathlib.Path, form: str) -> str:
    if destination.suffix in (".safetensors", ".gguf"):
        return destination.suffix[1:]
    if destination.suffix == ".pt":
        raise ConfigError(f"{destination}: a published pair is two files, pass the directory for them")
    return "pair" if form == "orbax" else "orbax"
