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
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from . import cache_format as fmt
from .config import CheckpointError, ConfigError, DTypeError, ShapeError, check_head_dim

BASIS_VERSION = "1"  # of the formulas below; a change of any of them is a new version
KEY_BASES = ("identity", "hadamard", "oscar", "channel_balanced", "balanced")
VALUE_BASES = ("identity", "hadamard", "oscar", "oscar_exact")
INVERSE_TOLERANCE = 1e-3
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_UNIT = 2.0**-fmt.TRANSFORM_BITS


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


@dataclasses.dataclass(frozen=True)
class RotationHeader:
    """What a rotation set was made for and from; travels with it as JSON, so nothing is read off file names.

    `layers` are the ids of the layers with attention, ascending. `rope` names the position convention of the
    keys ("half" for the two-halves pairing, "interleaved", "none", ...). `basis` and `basis_version` name the
    formula, `corpus_digest` and `calibration_tokens` the text it was fitted on ("" and 0 without a fit).
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

    def to_dict(self) -> dict[str, Any]:
        """The header as JSON-ready values."""
        return dataclasses.asdict(self) | {"layers": list(self.layers)}

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
    if header.rounding != "nearest":
        raise CheckpointError(f"header: rounding = {header.rounding!r}, allowed: 'nearest'")
    ids = list(header.layers)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0:
        raise CheckpointError(f"header: layers = {ids}, expected distinct ascending ids >= 0, at least one")


@dataclasses.dataclass(frozen=True, eq=False)
class RotationSet:
    """The rotations of a model: a header and one LayerRotation per layer id with attention.

    companions: by layer id, arrays kept beside the rotation under their own names, such as the float32 matrix
    that an imported file held; the cache never reads them.
    """

    header: RotationHeader
    layers: dict[int, LayerRotation]
    companions: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)


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


# Bases, float64 [D, D].


def hadamard_matrix(head_dim: int) -> np.ndarray:
    """The orthonormal Hadamard matrix, float64 [D, D]: blocks of the largest power of two that divides D."""
    block = head_dim & -head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(head_dim // block), matrix) / np.sqrt(block)


def bit_reversal(size: int) -> np.ndarray:
    """The bit-reversal permutation, int64 [size]: the next power of two's, numbers >= size left out."""
    bits = max(size - 1, 0).bit_length()
    numbers = np.arange(1 << bits)
    reverse = sum((((numbers >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)), np.zeros_like(numbers))
    return reverse[reverse < size]


def eigenbasis(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues float64 [D], ascending, and eigenvectors float64 [D, D] (columns) of a symmetric matrix.

    Canonical signs: in each column the first entry within 1e-9 of the largest magnitude is positive. Within
    an eigenspace of more than one dimension the basis stays LAPACK's choice.
    """
    matrix = _symmetric(covariance)
    values, vectors = np.linalg.eigh(matrix)
    magnitude = np.abs(vectors)
    lead = np.argmax(magnitude >= magnitude.max(axis=0) * (1 - 1e-9), axis=0)
    return values, vectors * np.where(vectors[lead, np.arange(len(lead))] < 0, -1.0, 1.0)


def oscar_basis(covariance: np.ndarray) -> np.ndarray:
    """The orthogonal R = U·H·P of the paper, float64 [D, D], from a query or value covariance [D, D].

    U: eigenvectors by ascending eigenvalue, H: Hadamard, P: I[:, perm] with perm[bitrev(i)] = s[i], where s
    sorts the eigenvalues in descending order. P cannot change the error of a row with a single scale.
    """
    values, vectors = eigenbasis(covariance)
    permutation = np.empty(len(values), np.int64)
    permutation[bit_reversal(len(values))] = np.argsort(-values, kind="stable")
    return (vectors @ hadamard_matrix(len(values)))[:, permutation]


def channel_balanced_basis(
    query_covariance: np.ndarray, key_covariance: np.ndarray, damping: float
) -> np.ndarray:
    """diag((C_Q,ii / C_K,ii)**0.25)·H, float64 [D, D]: each channel has equal energy in queries and keys."""
    query, key = _damped(query_covariance, damping), _damped(key_covariance, damping)
    return ((np.diag(query) / np.diag(key)) ** 0.25)[:, None] * hadamard_matrix(len(key))


def balanced_basis(query_covariance: np.ndarray, key_covariance: np.ndarray, damping: float) -> np.ndarray:
    """C_Q**0.5·U·S**-0.5·H, float64 [D, D], with U S Vt = svd(C_Q**0.5 C_K**0.5).

    Queries and keys then share one diagonal covariance (S) before the Hadamard mix.
    """
    query_root = _square_root(_damped(query_covariance, damping))
    key_root = _square_root(_damped(key_covariance, damping))
    left, singular, _ = np.linalg.svd(query_root @ key_root)
    # The sign of a singular vector flips one row of H: canonical for the same reason as in eigenbasis.
    lead = np.argmax(np.abs(left) >= np.abs(left).max(axis=0) * (1 - 1e-9), axis=0)
    left = left * np.where(left[lead, np.arange(len(lead))] < 0, -1.0, 1.0)
    return (query_root @ left / np.sqrt(singular)) @ hadamard_matrix(len(singular))


def orthogonality_defect(matrix: np.ndarray) -> float:
    """The largest entry of |TᵀT/c − I| over matrices [..., D, D], c the mean squared column norm."""
    matrix = np.asarray(matrix, np.float64)
    gram = matrix.swapaxes(-1, -2) @ matrix
    scale = np.trace(gram, axis1=-2, axis2=-1)[..., None, None] / gram.shape[-1]
    return float(np.abs(gram / scale - np.eye(gram.shape[-1])).max())


def condition_number(matrix: np.ndarray) -> float:
    """The largest ratio of extreme singular values over all matrices [..., D, D]."""
    return float(np.max(np.linalg.cond(np.asarray(matrix, np.float64))))


def _symmetric(covariance: np.ndarray) -> np.ndarray:
    matrix = np.asarray(covariance, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"covariance has shape {matrix.shape}, expected [D, D]")
    if not np.isfinite(matrix).all():
        raise ConfigError("covariance has non-finite entries")
    return (matrix + matrix.T) / 2


def _damped(covariance: np.ndarray, damping: float) -> np.ndarray:
    matrix = _symmetric(covariance)
    energy = np.trace(matrix) / len(matrix)
    if energy <= 0:  # a head that was never active
        return np.eye(len(matrix))
    if np.any(np.diag(matrix) + damping * energy <= 0):
        raise ConfigError(f"damping = {damping!r} leaves a channel without energy, allowed: > 0")
    return matrix + damping * energy * np.eye(len(matrix))


def _square_root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    if values[0] <= 0:
        raise ConfigError("covariance is singular after damping; allowed: a damping > 0")
    return (vectors * np.sqrt(values)) @ vectors.T


# The fixed-point form.


def to_fixed_point(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """int16 [D, D] in units of 2**-14 and the positive factor c: the largest rounding of c·matrix that fits.

    Fits: every column of the *rounded* matrix has integer norm <= 2**14. Rounding can lift a column whose
    norm was exactly 1 (eight entries of 5792.6 become 5793), so the factor shrinks until all fit. One
    factor for a whole matrix changes nothing: the row's scale absorbs it, and so does the inverse. A matrix
    that comes from fixed point goes back unchanged.
    """
    matrix = np.asarray(matrix, np.float64)
    norm = np.sqrt((matrix**2).sum(axis=0).max())
    if not np.isfinite(norm) or norm <= 0:
        raise ConfigError(f"transform has largest column norm {norm}, expected a finite positive one")
    units = matrix * fmt.TRANSFORM_MAX
    if 0.5 < norm <= 1.0 and np.array_equal(units, np.rint(units)):
        return units.astype(np.int16), 1.0
    factor = 1.0 / norm
    limit = fmt.TRANSFORM_MAX**2
    while True:
        rounded = np.rint(matrix * (factor * fmt.TRANSFORM_MAX)).astype(np.int64)
        largest = int((rounded**2).sum(axis=0).max())
        if largest <= limit:
            return rounded.astype(np.int16), factor
        factor *= np.sqrt(limit / largest)


def from_fixed_point(transform: Any) -> np.ndarray:
    """The float64 matrix that an int16 transform stands for."""
    return np.asarray(transform).astype(np.float64) * _UNIT


def invert_fixed_point(transform: np.ndarray) -> np.ndarray:
    """The float64 inverse of the rounded transform, int16 [D, D] -> [D, D]; ConfigError if it has none."""
    matrix = from_fixed_point(transform)
    try:
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        raise ConfigError("transform is singular once rounded to 2**-14") from None
    error = np.abs(matrix @ inverse.astype(np.float32) - np.eye(len(matrix))).max()
    if not error <= INVERSE_TOLERANCE:
        raise ConfigError(f"transform is too ill-conditioned for fixed point: inverse off by {error:.3g}")
    return inverse


def make_layer_rotation(
    key_bases: Sequence[np.ndarray],
    value_bases: Sequence[np.ndarray],
    *,
    key_mean: np.ndarray | None = None,
    value_mean: np.ndarray | None = None,
    key_multiplier: int = fmt.MULTIPLIER_DEFAULT,
    value_multiplier: int = fmt.MULTIPLIER_DEFAULT,
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


class LayerStatistics(Protocol):
    """What a fit reads of one layer, float64; `covariance.finalize_statistics` makes it.

    Covariances [K, D, D], means [K, D]. The value covariances may be None when their basis is not asked for.
    """

    @property
    def query_covariance(self) -> np.ndarray: ...
    @property
    def key_covariance(self) -> np.ndarray: ...
    @property
    def key_mean(self) -> np.ndarray: ...
    @property
    def value_mean(self) -> np.ndarray: ...
    @property
    def surrogate_value_covariance(self) -> np.ndarray | None: ...
    @property
    def exact_value_covariance(self) -> np.ndarray | None: ...


def fit_layer_rotation(
    statistics: LayerStatistics,
    basis: str | Sequence[str],
    *,
    per_head: bool,
    damping: float,
    key_multiplier: int = fmt.MULTIPLIER_DEFAULT,
    value_multiplier: int = fmt.MULTIPLIER_DEFAULT,
    value_basis: str = "hadamard",
) -> LayerRotation:
    """The rotation of one layer from its statistics, [K, D, D] if per_head, else [1, D, D] of the head means.

    basis: one of KEY_BASES, or one per key/value head (per_head only). value_basis: one of VALUE_BASES;
    "oscar" takes the published surrogate covariance, "oscar_exact" the paper's. damping is relative to the
    mean variance and concerns the two balanced bases. Raises ConfigError or ShapeError.
    """
    if value_basis not in VALUE_BASES:
        raise ConfigError(f"value_basis = {value_basis!r}, allowed: {', '.join(VALUE_BASES)}")

    def heads_of(array: np.ndarray) -> np.ndarray:
        array = np.asarray(array, np.float64)
        return array if per_head else array.mean(axis=0, keepdims=True)

    query, key = heads_of(statistics.query_covariance), heads_of(statistics.key_covariance)
    heads, head_dim = key.shape[0], key.shape[-1]
    names = [basis] * heads if isinstance(basis, str) else list(basis)
    if len(names) != heads:
        raise ConfigError(f"{len(names)} bases for {heads} matrices, allowed: one name, or one per matrix")

    def key_basis(name: str, head: int) -> np.ndarray:
        match name:
            case "identity":
                return np.eye(head_dim)
            case "hadamard":
                return hadamard_matrix(head_dim)
            case "oscar":
                return oscar_basis(query[head])
            case "channel_balanced":
                return channel_balanced_basis(query[head], key[head], damping)
            case "balanced":
                return balanced_basis(query[head], key[head], damping)
        raise ConfigError(f"basis = {name!r}, allowed: {', '.join(KEY_BASES)}")

    key_bases = [key_basis(name, head) for head, name in enumerate(names)]
    if value_basis in ("identity", "hadamard"):
        matrix = np.eye(head_dim) if value_basis == "identity" else hadamard_matrix(head_dim)
        value_bases = [matrix] * heads
    else:
        exact = value_basis == "oscar_exact"
        covariance = statistics.exact_value_covariance if exact else statistics.surrogate_value_covariance
        if covariance is None:
            raise ConfigError(f"value_basis = {value_basis!r} needs a covariance the statistics do not have")
        value_bases = [oscar_basis(matrix) for matrix in heads_of(covariance)]
    return make_layer_rotation(
        key_bases,
        value_bases,
        key_mean=heads_of(statistics.key_mean),
        value_mean=heads_of(statistics.value_mean),
        key_multiplier=key_multiplier,
        value_multiplier=value_multiplier,
    )
