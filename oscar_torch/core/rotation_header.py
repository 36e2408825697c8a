"""What a rotation set says of itself: model, geometry, basis, origin; and the checks that need no array.

Twin file, byte-identical in both packages. Standard library only.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, Protocol

from . import cache_format as fmt
from .config import check_head_dim
from .errors import CheckpointError, ConfigError

FINGERPRINT_FIELD = "weights_fingerprint"  # key in `extra`, of core/fingerprint.py


@dataclasses.dataclass(frozen=True)
class RotationHeader:
    """What a rotation set was made for and from; travels with it as JSON, so nothing is read off file names.

    `layers` are the ids of the layers with attention, ascending. `rope` names the position convention of the
    keys ("half" for the two-halves pairing, "interleaved", "none", ...). `basis` and `basis_version` name the
    formula, `corpus_digest` and `calibration_tokens` the text it was fitted on ("" and 0 without a fit).
    `rounding` is "nearest" or "sequential", the latter in `rounding_steps` blocks of channels (else 0).
    """

    model_id: str
    layers: tuple[int, ...]
    num_query_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: str
    basis: str
    basis_version: str
    corpus_digest: str = ""
    calibration_tokens: int = 0
    rounding: str = "nearest"
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    created: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    format: str = fmt.FORMAT_NAME
    format_version: int = fmt.FORMAT_VERSION
    rounding_steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The header as JSON-ready values; rounding_steps only where there are some."""
        values = dataclasses.asdict(self) | {"layers": list(self.layers)}
        if not self.rounding_steps:
            del values["rounding_steps"]
        return values

    @classmethod
    def from_dict(cls, values: Any) -> "RotationHeader":
        """The header of `to_dict`; raises CheckpointError naming a missing, unknown or mistyped field."""
        if not isinstance(values, dict):
            raise CheckpointError(f"header is {type(values).__name__}, expected a JSON object")
        kinds = {"layers": list, "versions": dict, "extra": dict}
        kinds |= dict.fromkeys(
            ("num_query_heads", "num_key_value_heads", "head_dim", "calibration_tokens", "format_version"),
            int,
        )
        kinds["rounding_steps"] = int
        values = {"rounding_steps": 0} | values
        names = [field.name for field in dataclasses.fields(cls)]
        for name in ("format", "format_version"):  # first, since another version may have other fields
            expected = getattr(cls, name)
            if values.get(name) != expected:
                raise CheckpointError(f"header: {name} = {values.get(name)!r}, expected {expected!r}")
        for name in names:
            kind = kinds.get(name, str)
            if name not in values:
                raise CheckpointError(f"header: field {name!r} is missing")
            if not isinstance(values[name], kind) or isinstance(values[name], bool):
                raise CheckpointError(f"header: {name} = {values[name]!r}, expected {kind.__name__}")
        if unknown := sorted(set(values) - set(names)):
            raise CheckpointError(f"header: unknown field {unknown[0]!r}")
        if not all(type(layer) is int for layer in values["layers"]):
            raise CheckpointError(f"header: layers = {values['layers']!r}, expected a list of int")
        fields: dict[str, Any] = values | {"layers": tuple(values["layers"])}
        return cls(**fields)


def validate_header(header: RotationHeader) -> None:
    """Raises CheckpointError unless the header's geometry, rounding rule and layer ids are possible."""
    if header.format != fmt.FORMAT_NAME or header.format_version != fmt.FORMAT_VERSION:
        raise CheckpointError(
            f"header: format = {header.format!r} version {header.format_version!r}, expected "
            f"{fmt.format_id()}"
        )
    try:
        check_head_dim(header.head_dim)
    except ConfigError as error:
        raise CheckpointError(f"header: {error}") from None
    if header.num_key_value_heads < 1 or header.num_query_heads < 1:
        raise CheckpointError(
            f"header: num_query_heads = {header.num_query_heads}, "
            f"num_key_value_heads = {header.num_key_value_heads}, allowed: >= 1"
        )
    if header.num_query_heads % header.num_key_value_heads:
        raise CheckpointError(
            f"header: num_query_heads = {header.num_query_heads} is not a multiple of "
            f"num_key_value_heads = {header.num_key_value_heads}"
        )
    if header.rounding not in fmt.ROUNDINGS:
        raise CheckpointError(f"header: rounding = {header.rounding!r}, allowed: {', '.join(fmt.ROUNDINGS)}")
    steps = header.rounding_steps
    blocks = steps > 1 and not header.head_dim % steps and header.head_dim // steps >= fmt.FEEDBACK_BLOCK_MIN
    if not (blocks if header.rounding == "sequential" else steps == 0):
        raise CheckpointError(
            f"header: rounding = {header.rounding!r} with rounding_steps = {steps}, allowed: 'nearest' with "
            f"0, 'sequential' with a number that cuts {header.head_dim} channels into blocks of "
            f">= {fmt.FEEDBACK_BLOCK_MIN}"
        )
    ids = list(header.layers)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0:
        raise CheckpointError(f"header: layers = {ids}, expected distinct ascending ids >= 0, at least one")


def require_nearest(header: RotationHeader, writer: str) -> None:
    """Raises CheckpointError unless a set is rounded to the nearest level, all that `writer` can hand on."""
    if header.rounding != "nearest":
        raise CheckpointError(
            f"header: rounding = {header.rounding!r}: {writer} knows 'nearest' alone, for which the basis of "
            "such a set is worse than others; `oscar fit --rounding nearest` makes one of the same statistics"
        )


class Geometry(Protocol):
    """What a rotation set must share with a model: `CacheConfig` and the models' own configurations do."""

    @property
    def num_query_heads(self) -> int: ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


def require_header_fits(
    header: RotationHeader,
    geometry: Geometry,
    layers: Collection[int],
    *,
    model_id: str | None = None,
    fingerprint: str | None = None,
    possible_layers: Collection[int] | None = None,
) -> None:
    """Raises CheckpointError unless a header's heads, head_dim, layers and model are those of a model.

    `layers` all need a rotation; `possible_layers` are those that may have one (None: any). If both header
    and caller know the weights' `fingerprint` (core/fingerprint.py), it decides and names do not count.
    Else `model_id`, if given, must end in the header's name ("org/Name" and "name" are the same model).
    """
    owner = f"the rotations of {header.model_id!r}"
    model = f"the model {model_id!r}" if model_id else "the model"
    for name in ("num_query_heads", "num_key_value_heads", "head_dim"):
        if name != "head_dim" and not header.extra.get("heads_known", True):
            continue  # a published file of one matrix per layer does not say how many heads share it
        if getattr(header, name) != getattr(geometry, name):
            raise CheckpointError(
                f"{owner} have {name} = {getattr(header, name)}, {model} has {getattr(geometry, name)}"
            )
    if possible_layers is not None and (extra := sorted(set(header.layers) - set(possible_layers))):
        raise CheckpointError(
            f"{owner} have layer {extra[0]}, {model} has no attention with keys there, "
            f"allowed: {sorted(possible_layers)}"
        )
    if missing := sorted(set(layers) - set(header.layers)):
        raise CheckpointError(
            f"{owner} have no layer {missing[0]}, which {model} needs; they have {list(header.layers)}"
        )
    stored = header.extra.get(FINGERPRINT_FIELD)
    if stored and fingerprint:
        if stored != fingerprint:
            raise CheckpointError(
                f"{owner} were made for other weights (fingerprint {stored}) than those of {model} "
                f"({fingerprint}); quantized weights count as others. "
                f"model_id={header.model_id!r} without a fingerprint (--model-id) says that they fit"
            )
        return
    if model_id and header.model_id and _last_name(model_id) != _last_name(header.model_id):
        raise CheckpointError(
            f"the rotations are of model {header.model_id!r}, this is {model_id!r} "
            f"(model_id={header.model_id!r}, or --model-id, says that they are the same weights)"
        )


def _last_name(model_id: str) -> str:
    return model_id.rstrip("/").rpartition("/")[2].lower()
