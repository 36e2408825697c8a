"""Rotation sets: the matrices that spread a key or value row evenly before it is coded in two bits.

Why: a 2-bit row has one scale, so its channels should carry equal energy, and for keys that energy should be
weighed by what the queries look at. Every basis here ends in a Hadamard matrix, which mixes the channels.

Layout: rows are row vectors, y = x·T. A transform is stored as int16 in units of 2**-14 (fixed point), its
inverse as float32 of the inverse of the *rounded* matrix, so that queries and outputs undo exactly what was
applied to the rows. Leading axis Kr: 1 (shared by all key/value heads of the layer) or K.

Bases, fits and checks are NumPy, the same bytes in both packages (`bases`, `fixed_point`, `fields`, `fit`).
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..core import cache_format as fmt
from ..core.errors import CheckpointError
from ..core.rotation_header import Geometry, RotationHeader, require_header_fits, validate_header
from ..quantize import Feedback
from .bases import hadamard_matrix
from .fields import BFLOAT16, check_feedback, check_fields, make_fields
from .fixed_point import UNIT

FEEDBACKS = ("key_feedback", "value_feedback")


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRotation:
    """The transforms of one attention layer (format page, section 1).

    key_transform, value_transform int16 [Kr, D, D] in units of 2**-14; query_transform float32 [Kr, D, D],
    the inverse transpose of key_transform; output_transform float32 [Kr, D, D], value_transform's inverse;
    value_mean, key_mean bfloat16 [Kr, D]; key_multiplier, value_multiplier int32 [Kr] in units of 1/256.
    A role with a feedback is rounded sequentially, the others to the nearest level.
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
    key_feedback: Feedback | None = None
    value_feedback: Feedback | None = None

    def __post_init__(self) -> None:
        for name in fmt.ROTATION_FIELDS:
            object.__setattr__(self, name, getattr(self, name).contiguous())

    def to(self, device: torch.device | str) -> "LayerRotation":
        """The same rotation with its tensors on `device`."""
        arrays: dict[str, Any] = {name: getattr(self, name).to(device) for name in fmt.ROTATION_FIELDS}
        for name in FEEDBACKS:
            if (feedback := getattr(self, name)) is not None:
                matrix, shift = feedback.matrix.to(device), feedback.shift.to(device)
                arrays[name] = Feedback(matrix, shift, feedback.steps)
        return LayerRotation(**arrays)

    @classmethod
    def from_numpy(cls, fields: Mapping[str, np.ndarray], rounding_steps: int = 0) -> "LayerRotation":
        """The rotation whose fields are these arrays, by name; rounding_steps: blocks of a feedback."""
        arrays: dict[str, Any] = {name: to_tensor(fields[name]) for name in fmt.ROTATION_FIELDS}
        for name in FEEDBACKS:
            if name in fields:
                matrix, shift = to_tensor(fields[name]), to_tensor(fields[f"{name}_shift"])
                arrays[name] = Feedback(matrix, shift, rounding_steps)
        return cls(**arrays)

    def numpy(self) -> dict[str, np.ndarray]:
        """The fields by name as NumPy arrays."""
        arrays = {name: to_numpy(getattr(self, name)) for name in fmt.ROTATION_FIELDS}
        for name in FEEDBACKS:
            if (feedback := getattr(self, name)) is not None:
                arrays[name], arrays[f"{name}_shift"] = to_numpy(feedback.matrix), to_numpy(feedback.shift)
        return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class RotationSet:
    """The rotations of a model: a header and one LayerRotation per layer id with attention.

    companions: by layer id, arrays kept beside the rotation under their own names, such as the float32 matrix
    that an imported file held; the cache never reads them.
    """

    header: RotationHeader
    layers: dict[int, LayerRotation]
    companions: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def require_fits(
        self,
        geometry: Geometry,
        layers: Collection[int],
        *,
        model_id: str | None = None,
        fingerprint: str | None = None,
        possible_layers: Collection[int] | None = None,
    ) -> None:
        """Raises CheckpointError unless the set fits a model; see `require_header_fits`."""
        require_header_fits(
            self.header,
            geometry,
            layers,
            model_id=model_id,
            fingerprint=fingerprint,
            possible_layers=possible_layers,
        )

    def to(self, device: torch.device | str) -> "RotationSet":
        """The same set with its rotations on `device`; companions stay where they are."""
        return RotationSet(
            self.header,
            {layer: rotation.to(device) for layer, rotation in self.layers.items()},
            self.companions,
        )


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the CPU with the array's content; bfloat16 is that of ml_dtypes."""
    array = np.array(array)  # what libraries hand out may be read-only
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A NumPy array with the tensor's content; bfloat16 is that of ml_dtypes."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()


def validate_layer(
    layer_rotation: LayerRotation,
    *,
    layer_id: int,
    num_key_value_heads: int,
    head_dim: int,
    rounding: str = "nearest",
    rounding_steps: int = 0,
) -> None:
    """Raises an error naming layer and field unless the arrays obey the format page, section 1.

    ShapeError, DTypeError or CheckpointError, as `fields.check_fields` and `fields.check_feedback`.
    """
    fields = layer_rotation.numpy()
    check_fields(fields, layer_id=layer_id, num_key_value_heads=num_key_value_heads, head_dim=head_dim)
    for feedback in (layer_rotation.key_feedback, layer_rotation.value_feedback):
        if feedback is not None and feedback.steps != rounding_steps:
            raise CheckpointError(
                f"layer {layer_id}: feedback of {feedback.steps} blocks, header: rounding_steps = "
                f"{rounding_steps}"
            )
    check_feedback(fields, layer_id=layer_id, head_dim=head_dim, rounding=rounding, steps=rounding_steps)


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
            rounding=header.rounding,
            rounding_steps=header.rounding_steps,
        )


def apply_transform(rows: torch.Tensor, transform: torch.Tensor) -> torch.Tensor:
    """Rows times a transform in float32: [..., K, D] by int16 or float32 [Kr, D, D] -> float32 [..., K, D].

    For the read side (queries, outputs) and for measurements; the codes come from quantize.py, in integers.
    """
    matrix = transform.to(torch.float32)
    if transform.dtype == torch.int16:
        matrix = matrix * UNIT
    matrix = matrix.expand(rows.shape[-2], -1, -1)
    return torch.einsum("...kd,kde->...ke", rows.to(torch.float32), matrix)


def make_layer_rotation(
    key_bases: Sequence[np.ndarray],
    value_bases: Sequence[np.ndarray],
    *,
    key_mean: np.ndarray | None = None,
    value_mean: np.ndarray | None = None,
    key_multiplier: int = fmt.KEY_MULTIPLIER_DEFAULT,
    value_multiplier: int = fmt.VALUE_MULTIPLIER_DEFAULT,
) -> LayerRotation:
    """The fixed-point rotation of Kr float64 key and value bases [D, D]; means [Kr, D], None for zeros."""
    fields = make_fields(
        key_bases,
        value_bases,
        key_mean=key_mean,
        value_mean=value_mean,
        key_multiplier=key_multiplier,
        value_multiplier=value_multiplier,
    )
    return LayerRotation.from_numpy(fields)


def identity_rotation(num_key_value_heads: int, head_dim: int) -> LayerRotation:
    """The rotation that changes nothing, one matrix per head; pass 1 head for a shared one."""
    bases = [np.eye(head_dim)] * num_key_value_heads
    return make_layer_rotation(bases, bases)


def hadamard_rotation(num_key_value_heads: int, head_dim: int) -> LayerRotation:
    """The Hadamard rotation without means, one matrix per head; pass 1 head for a shared one."""
    bases = [hadamard_matrix(head_dim)] * num_key_value_heads
    return make_layer_rotation(bases, bases)
