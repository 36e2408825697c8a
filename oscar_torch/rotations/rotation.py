"""Rotation sets: the matrices that spread a key or value row evenly before it is coded in two bits.

Why: a 2-bit row has one scale, so its channels should carry equal energy, and for keys that energy should be
weighed by what the queries look at. This package applies rotation sets, it never fits them.

Layout: rows are row vectors, y = x·T. A transform is stored as int16 in units of 2**-14 (fixed point), its
inverse as float32 of the inverse of the *rounded* matrix, so that queries and outputs undo exactly what was
applied to the rows. Leading axis Kr: 1 (shared by all key/value heads of the layer) or K.
"""

import dataclasses
from collections.abc import Collection

import torch

from ..core import cache_format as fmt
from ..core.config import check_head_dim
from ..core.errors import CheckpointError, DTypeError, ShapeError
from ..core.rotation_header import Geometry, RotationHeader, require_header_fits, validate_header

INVERSE_TOLERANCE = 1e-3
_UNIT = 2.0**-fmt.TRANSFORM_BITS


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRotation:
    """The transforms of one attention layer (format page, section 1).

    key_transform, value_transform int16 [Kr, D, D] in units of 2**-14; query_transform float32 [Kr, D, D],
    the inverse transpose of key_transform; output_transform float32 [Kr, D, D], value_transform's inverse;
    value_mean, key_mean bfloat16 [Kr, D]; key_multiplier, value_multiplier int32 [Kr] in units of 1/256.
    Tensors are stored contiguous, as kernels read them: a transposed view is copied.
    """

    key_transform: torch.Tensor
    query_transform: torch.Tensor
    value_transform: torch.Tensor
    output_transform: torch.Tensor
    value_mean: torch.Tensor
    key_mean: torch.Tensor
    key_multiplier: torch.Tensor
    value_multiplier: torch.Tensor

    def __post_init__(self) -> None:
        for name in fmt.ROTATION_FIELDS:
            object.__setattr__(self, name, getattr(self, name).contiguous())

    def to(self, device: torch.device | str) -> "LayerRotation":
        """The same rotation with its tensors on `device`."""
        return LayerRotation(**{name: getattr(self, name).to(device) for name in fmt.ROTATION_FIELDS})


@dataclasses.dataclass(frozen=True, eq=False)
class RotationSet:
    """The rotations of a model: a header and one LayerRotation per layer id with attention.

    companions: by layer id, arrays kept beside the rotation under their own names, such as the float32 matrix
    that an imported file held; the cache never reads them.
    """

    header: RotationHeader
    layers: dict[int, LayerRotation]
    companions: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)

    def require_fits(
        self,
        geometry: Geometry,
        layers: Collection[int],
        *,
        model_id: str | None = None,
        possible_layers: Collection[int] | None = None,
    ) -> None:
        """Raises CheckpointError unless the set fits a model; see `require_header_fits`."""
        require_header_fits(self.header, geometry, layers, model_id=model_id, possible_layers=possible_layers)

    def to(self, device: torch.device | str) -> "RotationSet":
        """The same set with its rotations on `device`; companions stay where they are."""
        return RotationSet(
            self.header, {layer: rotation.to(device) for layer, rotation in self.layers.items()}
        )


def validate_layer(
    layer_rotation: LayerRotation, *, layer_id: int, num_key_value_heads: int, head_dim: int
) -> None:
    """Raises an error naming layer and field unless the arrays obey the format page, section 1.

    ShapeError and DTypeError for the arrays' form; CheckpointError for their content: non-finite entries, a
    column norm above 1, a multiplier outside 1..511, a pair that is not inverse to 1e-3, or swapped roles.
    """
    heads = tuple(layer_rotation.key_transform.shape[:1])
    if heads not in ((1,), (num_key_value_heads,)):
        raise ShapeError(
            f"layer {layer_id}: key_transform has leading axis {heads}, "
            f"allowed: 1 or num_key_value_heads = {num_key_value_heads}"
        )
    arrays = {}
    for name, shape in fmt.rotation_field_shapes(heads[0], head_dim).items():
        array = getattr(layer_rotation, name)
        if tuple(array.shape) != shape:
            raise ShapeError(f"layer {layer_id}: {name} has shape {tuple(array.shape)}, expected {shape}")
        dtype = str(array.dtype).removeprefix("torch.")
        if dtype != fmt.ROTATION_FIELDS[name]:
            expected = fmt.ROTATION_FIELDS[name]
            raise DTypeError(f"layer {layer_id}: {name} has dtype {dtype}, expected {expected}")
        arrays[name] = array.detach().cpu().to(torch.float64)
        if not torch.isfinite(arrays[name]).all():
            raise CheckpointError(f"layer {layer_id}: {name} has non-finite entries")
    for name in ("key_multiplier", "value_multiplier"):
        for multiplier in arrays[name].tolist():
            if not 1 <= multiplier < fmt.MULTIPLIER_LIMIT:
                raise CheckpointError(
                    f"layer {layer_id}: {name} = {int(multiplier)}, allowed: 1..{fmt.MULTIPLIER_LIMIT - 1}"
                )
    for name in ("key_transform", "value_transform"):
        norms = arrays[name].square().sum(dim=-2).sqrt() * _UNIT
        if norms.max() > 1.0:
            raise CheckpointError(
                f"layer {layer_id}: {name} has a column of norm {norms.max().item():.6f}, allowed: <= 1"
            )
    key, value = arrays["key_transform"] * _UNIT, arrays["value_transform"] * _UNIT
    query_transposed = arrays["query_transform"].mT
    _check_inverse(layer_id, "key_transform", "query_transform", "inverse transpose", key, query_transposed)
    _check_inverse(
        layer_id, "value_transform", "output_transform", "inverse", value, arrays["output_transform"]
    )


def _check_inverse(
    layer_id: int, name: str, inverse_name: str, relation: str, matrix: torch.Tensor, inverse: torch.Tensor
) -> None:
    identity = torch.eye(matrix.shape[-1], dtype=torch.float64)
    error = (matrix @ inverse - identity).abs().max().item()
    if error <= INVERSE_TOLERANCE:
        return
    message = f"layer {layer_id}: {inverse_name} is not the {relation} of {name}: off by {error:.3g}"
    if (matrix @ inverse.mT - identity).abs().max() <= INVERSE_TOLERANCE:
        message += " (it is when transposed: key and value roles look swapped)"
    raise CheckpointError(message)


def validate_rotation_set(rotation_set: RotationSet) -> None:
    """Raises an error naming layer and field unless header and arrays are sound and agree."""
    header = rotation_set.header
    validate_header(header)
    if sorted(rotation_set.layers) != list(header.layers):
        raise CheckpointError(
            f"header: layers = {list(header.layers)}, but the arrays are of {sorted(rotation_set.layers)}"
        )
    if unknown := sorted(set(rotation_set.companions) - set(header.layers)):
        raise CheckpointError(f"layer {unknown[0]}: has companions but no rotation")
    for layer_id, layer in rotation_set.layers.items():
        validate_layer(
            layer,
            layer_id=layer_id,
            num_key_value_heads=header.num_key_value_heads,
            head_dim=header.head_dim,
        )


def apply_transform(rows: torch.Tensor, transform: torch.Tensor) -> torch.Tensor:
    """Rows times a transform in float32: [..., K, D] by int16 or float32 [Kr, D, D] -> float32 [..., K, D].

    For the read side (queries, outputs) and for measurements; the codes come from quantize.py, in integers.
    """
    matrix = transform.to(torch.float32)
    if transform.dtype == torch.int16:
        matrix = matrix * _UNIT
    matrix = matrix.expand(rows.shape[-2], -1, -1)
    return torch.einsum("...kd,kde->...ke", rows.to(torch.float32), matrix)


def identity_rotation(num_key_value_heads: int, head_dim: int) -> LayerRotation:
    """The rotation that changes nothing, one matrix per head; pass 1 head for a shared one."""
    check_head_dim(head_dim)
    heads = num_key_value_heads
    transform = (torch.eye(head_dim, dtype=torch.int16) * fmt.TRANSFORM_MAX).repeat(heads, 1, 1)
    inverse = torch.eye(head_dim).repeat(heads, 1, 1)
    mean = torch.zeros(heads, head_dim, dtype=torch.bfloat16)
    return LayerRotation(
        key_transform=transform,
        query_transform=inverse,
        value_transform=transform.clone(),
        output_transform=inverse.clone(),
        value_mean=mean,
        key_mean=mean.clone(),
        key_multiplier=torch.full((heads,), fmt.KEY_MULTIPLIER_DEFAULT, dtype=torch.int32),
        value_multiplier=torch.full((heads,), fmt.VALUE_MULTIPLIER_DEFAULT, dtype=torch.int32),
    )
