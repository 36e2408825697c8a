"""Rotation sets to and from other stacks: published `.pt` pairs (SGLang, vLLM), safetensors, GGUF, weights.

`convert` does the work of `oscar convert`, `inspect.inspect` that of `oscar inspect`.

Twin file, byte-identical in both packages: NumPy only; what needs more stands in `forms`.
"""

import dataclasses
import os
import pathlib

from ..core.errors import CheckpointError, ConfigError
from ..rotations import store
from ..rotations.rotation import RotationSet
from . import forms
from .published_pair import export_published_pair, find_pair, import_published_pair
from .report import Report, native_report

TARGETS = ("orbax", "safetensors", "pair", "gguf", "absorb")


def load_any(
    source: str | os.PathLike[str],
    *,
    values: str | os.PathLike[str] | None = None,
    model: str | os.PathLike[str] | None = None,
    num_query_heads: int | None = None,
    num_key_value_heads: int | None = None,
    model_id: str | None = None,
    rope: str = "unknown",
    layer_ids: str = "model",
) -> tuple[RotationSet, str]:
    """The rotation set in `source` and the name of its form: "orbax", "safetensors", "pair" or "gguf".

    source: a rotation set (directory or .safetensors), a directory with a published pair, the key file of a
    pair (`values` its value file, or the one beside it), or a GGUF file. `model`, a model directory,
    config.json or GGUF file, gives head counts and is checked against. layer_ids "attention": the ids of a
    pair count the layers with full attention. Raises CheckpointError or ConfigError.
    """
    source = store.rotation_path(source)
    geometry = None if model is None else forms.read_model_geometry(model)
    if not source.exists():
        raise CheckpointError(f"{source}: no such file or directory")
    if source.suffix == ".gguf":
        rotation_set, form = forms.import_gguf(source, model_id=model_id), "gguf"
    elif source.suffix == ".pt" or (source.is_dir() and not (source / store.HEADER_FILE).exists()):
        rotation_set = import_published_pair(
            *find_pair(source, None if values is None else pathlib.Path(values)),
            model=geometry,
            num_query_heads=num_query_heads,
            num_key_value_heads=num_key_value_heads,
            model_id=model_id,
            rope=rope,
            layer_ids=layer_ids,
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
    loader: str | None = None,
    layer_ids: str = "model",
) -> Report:
    """Reads any form of a rotation set, writes another, reads it back, and reports what was carried.

    target, one of TARGETS, follows from `destination` if None: `.safetensors` and `.gguf` by their suffix; a
    directory is a published pair if the source is an Orbax rotation set or a loader is named, and an Orbax
    rotation set otherwise. `base`: the GGUF file or Hugging Face model to bake into ("gguf", "absorb").
    `schema` caps the version of a published pair, `loader` names who will read it, see
    `export_published_pair`. The rest as in `load_any`. Raises CheckpointError or ConfigError, one line each.
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
        layer_ids=layer_ids,
    )
    pair_only = loader is not None or schema is not None
    target = target or _guess_target(destination, form, pair_only)
    if pair_only and target != "pair":
        raise ConfigError(f"loader and schema concern published pairs, target = {target!r}")
    base_path = None if base is None else pathlib.Path(base)
    match target:
        case "pair":
            geometry = None if model is None else forms.read_model_geometry(model)
            report = export_published_pair(
                rotation_set, destination, schema=schema, loader=loader, model=geometry
            )
        case "gguf":
            report = forms.write_gguf(rotation_set, base_path, destination)
        case "absorb":
            report = forms.write_absorbed(rotation_set, base_path, destination)
        case "safetensors":
            store.save_safetensors(rotation_set, destination)
            report = native_report(rotation_set, "safetensors", destination)
        case _:
            report = forms.write_orbax(rotation_set, destination)
    return dataclasses.replace(report, source=form, notes=(*report.notes, *_source_notes(rotation_set)))


def _source_notes(rotation_set: RotationSet) -> list[str]:
    """What the source left open or held in vain."""
    extra, notes = rotation_set.header.extra, []
    if not extra.get("heads_known", True):
        notes.append(
            "the source does not say the number of heads; pass a model to make the set loadable for it"
        )
    if not extra.get("roles_verified", True):
        notes.append("the source does not say which file is of keys; taken from the order given")
    return notes + [f"ignored in the source: {item}" for item in extra.get("ignored", [])]


def _guess_target(destination: pathlib.Path, form: str, pair_only: bool) -> str:
    if destination.suffix in (".safetensors", ".gguf"):
        return destination.suffix[1:]
    if destination.suffix == ".pt":
        raise ConfigError(f"{destination}: a published pair is two files, pass the directory for them")
    return "pair" if form == "orbax" or pair_only else "orbax"
