"""Rotation sets: the matrices that spread a key or value row evenly before it is coded in two bits.

Why: a 2-bit row has one scale, so its channels should carry equal energy, and for keys that energy should be
weighed by what the queries look at. Every basis here ends in a Hadamard matrix, which mixes the channels.

Layout: rows are row vectors, y = x·T. A transform is stored as int16 in units of 2**-14 (fixed point), its
inverse as float32 of the inverse of the *rounded* matrix, so that queries and outputs undo exactly what was
applied to the rows. Leading axis Kr: 1 (shared by all key/value heads of the layer) or K.

Fits run in float64 NumPy on the CPU: eigenvectors from accelerators differ in sign and order. A fitted set is
a file to ship, never to refit.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..core import cache_format as fmt
from ..core.config import check_head_dim
from ..core.errors import CheckpointError, ConfigError, DTypeError, ShapeError
from ..core.rotation_header import Geometry, RotationHeader, require_header_fits, validate_header
from .bases import hadamard_matrix
from .fixed_point import _UNIT, INVERSE_TOLERANCE, invert_fixed_point, to_fixed_point

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRotation:
    """The transforms of one attention layer (format page, section 1); a pytree.

    key_transform, value_transform int16 [Kr, D, D] in units of 2**-14; query_transform float32 [Kr, D, D],
    the inverse transpose of key_transform; output_transform float32 [Kr, D, D], value_transform's inverse;
    value_mean, key_mean bfloat16 [Kr, D]; key_multiplier, value_multiplier int32 [Kr] in units of 1/256.
    """

    key_transform: Any
    query_transform: Any
    value_transform: Any
    output_transform: Any
    value_mean: Any
    key_mean: Any
    key_multiplier: Any
    value_multiplier: Any


jax.tree_util.register_dataclass(LayerRotation, data_fields=list(fmt.ROTATION_FIELDS), meta_fields=[])


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
        possible_layers: Collection[int] | None = None,
    ) -> None:
        """Raises CheckpointError unless the set fits a model; see `require_header_fits`."""
        require_header_fits(self.header, geometry, layers, model_id=model_id, possible_layers=possible_layers)


def validate_layer(
    layer_rotation: LayerRotation, *, layer_id: int, num_key_value_heads: int, head_dim: int
) -> None:
    """Raises an error naming layer and field unless the arrays obey the format page, section 1.

    ShapeError and DTypeError for the arrays' form; CheckpointError for their content: non-finite entries, a
    column norm above 1, a multiplier outside 1..511, a pair that is not inverse to 1e-3, or swapped roles.
    """
    heads = np.shape(layer_rotation.key_transform)[:1]
    if heads not in ((1,), (num_key_value_heads,)):
        raise ShapeError(
            f"layer {layer_id}: key_transform has leading axis {heads}, "
            f"allowed: 1 or num_key_value_heads = {num_key_value_heads}"
        )
    arrays = {}
    for name, shape in fmt.rotation_field_shapes(heads[0], head_dim).items():
        array = np.asarray(getattr(layer_rotation, name))
        if array.shape != shape:
            raise ShapeError(f"layer {layer_id}: {name} has shape {array.shape}, expected {shape}")
        if array.dtype.name != fmt.ROTATION_FIELDS[name]:
            expected = fmt.ROTATION_FIELDS[name]
            raise DTypeError(f"layer {layer_id}: {name} has dtype {array.dtype.name}, expected {expected}")
        arrays[name] = array.astype(np.float64)
        if not np.isfinite(arrays[name]).all():
            raise CheckpointError(f"layer {layer_id}: {name} has non-finite entries")
    for name in ("key_multiplier", "value_multiplier"):
        for multiplier in arrays[name]:
            if not 1 <= multiplier < fmt.MULTIPLIER_LIMIT:
                raise CheckpointError(
                    f"layer {layer_id}: {name} = {int(multiplier)}, allowed: 1..{fmt.MULTIPLIER_LIMIT - 1}"
                )
    for name in ("key_transform", "value_transform"):
        norms = np.sqrt((arrays[name] ** 2).sum(axis=-2)) * _UNIT
        if norms.max() > 1.0:
            raise CheckpointError(
                f"layer {layer_id}: {name} has a column of norm {norms.max():.6f}, allowed: <= 1"
            )
    key, value = arrays["key_transform"] * _UNIT, arrays["value_transform"] * _UNIT
    query_transposed = arrays["query_transform"].swapaxes(-1, -2)
    _check_inverse(layer_id, "key_transform", "query_transform", "inverse transpose", key, query_transposed)
    _check_inverse(
        layer_id, "value_transform", "output_transform", "inverse", value, arrays["output_transform"]
    )


def _check_inverse(
    layer_id: int, name: str, inverse_name: str, relation: str, matrix: np.ndarray, inverse: np.ndarray
) -> None:
    identity = np.eye(matrix.shape[-1])
    error = np.abs(matrix @ inverse - identity).max()
    if error <= INVERSE_TOLERANCE:
        return
    message = f"layer {layer_id}: {inverse_name} is not the {relation} of {name}: off by {error:.3g}"
    if np.abs(matrix @ inverse.swapaxes(-1, -2) - identity).max() <= INVERSE_TOLERANCE:
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


def apply_transform(rows: jax.Array, transform: jax.Array) -> jax.Array:
    """Rows times a transform in float32: [..., K, D] by int16 or float32 [Kr, D, D] -> float32 [..., K, D].

    For the read side (queries, outputs) and for measurements; the codes come from quantize.py, in integers.
    """
    matrix = transform.astype(jnp.float32)
    if transform.dtype == jnp.int16:
        matrix = matrix * _UNIT
    matrix = jnp.broadcast_to(matrix, (rows.shape[-2], *matrix.shape[-2:]))
    return jnp.einsum("...kd,kde->...ke", rows.astype(jnp.float32), matrix, precision="highest")


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
    if len(key_bases) != len(value_bases):
        raise ShapeError(f"{len(key_bases)} key bases but {len(value_bases)} value bases")
    heads, head_dim = len(key_bases), np.shape(key_bases[0])[-1]
    check_head_dim(head_dim)
    for name, multiplier in (("key_multiplier", key_multiplier), ("value_multiplier", value_multiplier)):
        if not 1 <= multiplier < fmt.MULTIPLIER_LIMIT:
            raise ConfigError(f"{name} = {multiplier}, allowed: 1..{fmt.MULTIPLIER_LIMIT - 1}")
    keys = np.stack([to_fixed_point(basis)[0] for basis in key_bases])
    values = np.stack([to_fixed_point(basis)[0] for basis in value_bases])

    def mean(rows: np.ndarray | None) -> np.ndarray:
        rows = np.zeros((heads, head_dim)) if rows is None else np.asarray(rows)
        if rows.shape != (heads, head_dim):
            raise ShapeError(f"mean has shape {rows.shape}, expected {(heads, head_dim)}")
        return rows.astype(np.float32).astype(_BFLOAT16)

    return LayerRotation(
        key_transform=keys,
        query_transform=np.stack([invert_fixed_point(key).T for key in keys]).astype(np.float32),
        value_transform=values,
        output_transform=np.stack([invert_fixed_point(value) for value in values]).astype(np.float32),
        value_mean=mean(value_mean),
        key_mean=mean(key_mean),
        key_multiplier=np.full(heads, key_multiplier, np.int32),
        value_multiplier=np.full(heads, value_multiplier, np.int32),
    )


def identity_rotation(num_key_value_heads: int, head_dim: int) -> LayerRotation:
    """The rotation that changes nothing, one matrix per head; pass 1 head for a shared one."""
    bases = [np.eye(head_dim)] * num_key_value_heads
    return make_layer_rotation(bases, bases)


def hadamard_rotation(num_key_value_heads: int, head_dim: int) -> LayerRotation:
    """The Hadamard rotation without means, one matrix per head; pass 1 head for a shared one."""
    bases = [hadamard_matrix(head_dim)] * num_key_value_heads
    return make_layer_rotation(bases, bases)
