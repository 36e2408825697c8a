"""Rotation sets: bases against float64 definitions, the fixed-point form, and refusals by name."""

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from oscar_jax.core import cache_format as fmt
from oscar_jax.core import errors as jax_errors
from oscar_jax.core import rotation_header
from oscar_jax.rotations import bases, fit, fixed_point, rotation, store
from oscar_jax.rotations.statistics import LayerStatistics
from oscar_torch import cache as torch_cache
from oscar_torch.core import config as torch_config
from oscar_torch.core import errors as torch_errors
from oscar_torch.rotations import fit as torch_fit
from oscar_torch.rotations import rotation as torch_rotation
from oscar_torch.rotations import store as torch_store

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)


def make_statistics(heads: int, head_dim: int, seed: int = 0) -> LayerStatistics:
    generator = np.random.default_rng(seed)

    def covariance():
        rows = generator.standard_normal((heads, 4 * head_dim, head_dim))
        rows = rows * np.exp(generator.standard_normal((heads, 1, head_dim)))
        return rows.swapaxes(-1, -2) @ rows / rows.shape[1]

    means = generator.standard_normal((2, heads, head_dim))
    return LayerStatistics(
        query_covariance=covariance(),
        key_covariance=covariance(),
        key_mean=means[0],
        value_mean=means[1],
        value_covariance=covariance(),
        surrogate_value_covariance=covariance(),
        exact_value_covariance=covariance(),
        tokens=1,
        coded_query_covariance=covariance(),
        rope_frequencies=1e4 ** (-np.arange(head_dim // 2) * 2 / head_dim),
        context=4096,
        reach=32768,
    )


def as_torch(layer: rotation.LayerRotation) -> torch_rotation.LayerRotation:
    def tensor(array):
        array = np.asarray(array)
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    fields: dict[str, Any] = {n: tensor(getattr(layer, n)) for n in fmt.ROTATION_FIELDS}
    return torch_rotation.LayerRotation(**fields)


@pytest.mark.parametrize("head_dim", [1, 2, 8, 16, *HEAD_DIMS])
def test_hadamard_is_orthonormal_and_block_diagonal(head_dim):
    matrix = bases.hadamard_matrix(head_dim)
    block = head_dim & -head_dim
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-12)
    blocks = np.kron(np.eye(head_dim // block), np.ones((block, block)))
    np.testing.assert_allclose(np.abs(matrix), blocks / np.sqrt(block), atol=1e-12)


def test_bit_reversal_is_a_permutation():
    assert bases.bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    for size in (1, 2, 3, 16, 80, 128, 192):
        assert sorted(bases.bit_reversal(size)) == list(range(size))


def test_eigenbasis_is_canonical():
    generator = np.random.default_rng(3)
    vectors, _ = np.linalg.qr(generator.standard_normal((32, 32)))
    covariance = (vectors * np.arange(1.0, 33.0)) @ vectors.T
    values, basis = bases.eigenbasis(covariance)
    np.testing.assert_allclose(values, np.arange(1.0, 33.0), rtol=1e-12)
    lead = np.abs(basis).argmax(axis=0)
    assert (basis[lead, np.arange(32)] > 0).all()
    flipped = vectors * np.where(np.arange(32) % 2, -1.0, 1.0)  # the same matrix from other signs
    other = bases.eigenbasis((flipped * np.arange(1.0, 33.0)) @ flipped.T)[1]
    np.testing.assert_allclose(basis, other, atol=1e-10)


def test_oscar_basis_spreads_the_eigenvalues_as_published():
    covariance = make_statistics(1, 64).query_covariance[0]
    basis = bases.oscar_basis(covariance)
    assert bases.orthogonality_defect(basis) < 1e-12
    # H gives every channel the mean variance.
    np.testing.assert_allclose(np.diag(basis.T @ covariance @ basis), np.trace(covariance) / 64, rtol=1e-9)
    values, vectors = np.linalg.eigh(covariance)
    order = np.argsort(-values)
    product = vectors @ bases.hadamard_matrix(64)
    for index in range(64):  # perm[bitrev(i)] = s[i]; eigh's signs may flip the Hadamard's rows
        reversed_index = int(f"{index:06b}"[::-1], 2)
        mixed = vectors.T @ basis[:, reversed_index]
        expected = vectors.T @ product[:, order[index]]
        np.testing.assert_allclose(np.abs(mixed), np.abs(expected), atol=1e-9)


def test_balanced_bases_balance_queries_and_keys():
    statistics = make_statistics(1, 64)
    query, key = statistics.query_covariance[0], statistics.key_covariance[0]
    query = query + 0.01 * np.trace(query) / 64 * np.eye(64)
    key = key + 0.01 * np.trace(key) / 64 * np.eye(64)
    hadamard = bases.hadamard_matrix(64)
    basis = bases.balanced_basis(statistics.query_covariance[0], statistics.key_covariance[0], 0.01)
    inverse_transpose = np.linalg.inv(basis).T
    keys = hadamard @ (basis.T @ key @ basis) @ hadamard.T
    queries = hadamard @ (inverse_transpose.T @ query @ inverse_transpose) @ hadamard.T
    np.testing.assert_allclose(keys, queries, atol=1e-9 * keys.max())
    np.testing.assert_allclose(keys, np.diag(np.diag(keys)), atol=1e-9 * keys.max())

    basis = bases.channel_balanced_basis(statistics.query_covariance[0], statistics.key_covariance[0], 0.01)
    scale = np.linalg.norm(basis, axis=1)
    np.testing.assert_allclose(np.diag(key) * scale**2, np.diag(query) / scale**2, rtol=1e-9)


def test_dead_head_falls_back_to_hadamard():
    zero = np.zeros((64, 64))
    for basis in (bases.balanced_basis, bases.channel_balanced_basis):
        assert bases.orthogonality_defect(basis(zero, zero, 0.01)) < 1e-12


@pytest.mark.parametrize("head_dim", [2, 8, 32, *HEAD_DIMS])
def test_fixed_point_columns_never_pass_one(head_dim):
    generator = np.random.default_rng(head_dim)
    orthogonal, _ = np.linalg.qr(generator.standard_normal((head_dim, head_dim)))
    for matrix in (bases.hadamard_matrix(head_dim), orthogonal, 37.0 * orthogonal, np.eye(head_dim)):
        fixed, factor = fixed_point.to_fixed_point(matrix)
        norms = (fixed.astype(np.int64) ** 2).sum(axis=0)
        assert norms.max() <= 2**28 and np.abs(fixed.astype(np.int64)).max() <= 2**14
        assert norms.max() > 2**28 * 0.998  # no precision is given away
        np.testing.assert_allclose(fixed * 2.0**-14, matrix * factor, atol=2.0**-15 * 1.0001)
        again, unchanged = fixed_point.to_fixed_point(fixed_point.from_fixed_point(fixed))
        assert unchanged == 1.0 and np.array_equal(again, fixed)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("make", [rotation.identity_rotation, rotation.hadamard_rotation])
def test_plain_rotations_are_valid_in_both_packages(make, head_dim):
    layer = make(2, head_dim)
    arguments = {"layer_id": 0, "num_key_value_heads": 2, "head_dim": head_dim}
    rotation.validate_layer(layer, **arguments)
    torch_rotation.validate_layer(as_torch(layer), **arguments)


def test_torch_kernels_get_contiguous_tensors() -> None:
    """A transform made by transposing would else be read as its transpose, without an error."""
    layer = torch_rotation.identity_rotation(2, 64)
    turned = torch.randn(2, 64, 64)
    view = dataclasses.replace(layer, query_transform=turned.mT)
    assert view.query_transform.is_contiguous() and torch.equal(view.query_transform, turned.mT)
    cache = torch_cache.allocate_layer_cache(torch_config.CacheConfig(2, 4, 64), 2, 1000)
    with pytest.raises(torch_errors.ShapeError, match=r"page_table .* is not contiguous"):
        dataclasses.replace(cache, page_table=cache.page_table[:, :2])


def test_torch_identity_equals_jax_identity():
    ours, theirs = as_torch(rotation.identity_rotation(2, 64)), torch_rotation.identity_rotation(2, 64)
    for name in fmt.ROTATION_FIELDS:
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("basis", [name for name in bases.KEY_BASES if name != fit.ORDERED])
def test_fitted_rotations_are_valid_and_invert(basis, per_head):
    value_basis = {"oscar": "oscar", "balanced": "oscar_exact", "identity": "identity"}.get(basis, "hadamard")
    statistics = make_statistics(2, 80)
    layer = fit.fit_layer_rotation(
        statistics, basis, per_head=per_head, damping=0.01, value_basis=value_basis, key_multiplier=300
    )
    assert layer.key_transform.shape == (2 if per_head else 1, 80, 80)
    assert layer.key_multiplier.tolist() == [300] * (2 if per_head else 1)
    arguments: dict[str, Any] = {"layer_id": 3, "num_key_value_heads": 2, "head_dim": 80}
    rotation.validate_layer(layer, **arguments)
    torch_rotation.validate_layer(as_torch(layer), **arguments)
    generator = np.random.default_rng(0)
    query, key = generator.standard_normal((2, 7, 2, 80)).astype(np.float32)
    scores = np.einsum("tkd,tkd->tk", query, key)
    rotated_query = rotation.apply_transform(
        jax.numpy.asarray(query), jax.numpy.asarray(layer.query_transform)
    )
    rotated_key = rotation.apply_transform(jax.numpy.asarray(key), jax.numpy.asarray(layer.key_transform))
    np.testing.assert_allclose(np.einsum("tkd,tkd->tk", rotated_query, rotated_key), scores, atol=2e-3)
    torch_key = torch_rotation.apply_transform(torch.from_numpy(key), as_torch(layer).key_transform)
    np.testing.assert_allclose(torch_key.numpy(), rotated_key, atol=1e-5)
    value = rotation.apply_transform(jax.numpy.asarray(key), jax.numpy.asarray(layer.value_transform))
    back = rotation.apply_transform(value, jax.numpy.asarray(layer.output_transform))
    np.testing.assert_allclose(back, key, atol=1e-4)


def test_basis_can_differ_by_head():
    statistics = make_statistics(2, 64)
    arguments = {"per_head": True, "damping": 0.01}
    mixed = fit.fit_layer_rotation(statistics, ("hadamard", "balanced"), **arguments)
    for head, basis in enumerate(("hadamard", "balanced")):
        whole = fit.fit_layer_rotation(statistics, basis, **arguments)
        assert np.array_equal(mixed.key_transform[head], whole.key_transform[head])


def test_shared_fit_of_equal_heads_is_the_per_head_fit():
    statistics = make_statistics(1, 64)
    doubled = dataclasses.replace(
        statistics,
        **{n: np.concatenate([a, a]) for n, a in vars(statistics).items() if np.ndim(a) > 1},
    )
    shared = fit.fit_layer_rotation(doubled, "balanced", per_head=False, damping=0.01)
    single = fit.fit_layer_rotation(statistics, "balanced", per_head=True, damping=0.01)
    assert np.array_equal(shared.key_transform, single.key_transform)


def test_fit_refuses_bad_requests():
    statistics = dataclasses.replace(make_statistics(2, 64), exact_value_covariance=None)
    for changes, message in (
        ({"basis": "fourier"}, "basis = 'fourier'"),
        ({"value_basis": "balanced"}, "value_basis = 'balanced'"),
        ({"value_basis": "oscar_exact"}, "needs a covariance"),
        ({"basis": ("hadamard",)}, "1 bases for 2"),
        ({"key_multiplier": 512}, "key_multiplier = 512"),
    ):
        with pytest.raises(jax_errors.ConfigError, match=message):
            arguments: dict = {"basis": "hadamard", "per_head": True, "damping": 0.01} | changes
            fit.fit_layer_rotation(statistics, **arguments)


def test_layer_rotation_is_a_pytree():
    layer = rotation.hadamard_rotation(1, 64)
    assert len(jax.tree.leaves(layer)) == len(fmt.ROTATION_FIELDS)
    doubled = jax.jit(lambda tree: jax.tree.map(lambda a: a, tree))(layer)
    assert doubled.value_mean.dtype == jax.numpy.bfloat16


def broken_layers():
    generator = np.random.default_rng(1)
    orthogonal, _ = np.linalg.qr(generator.standard_normal((64, 64)))
    other, _ = np.linalg.qr(generator.standard_normal((64, 64)))
    good = rotation.make_layer_rotation([orthogonal] * 2, [other] * 2)

    def change(**fields):
        return dataclasses.replace(good, **fields)

    nan = good.output_transform.copy()
    nan[1, 2, 3] = np.nan
    big = good.value_transform.copy()
    big[0, 5, 5] = 16384
    infinite = good.value_mean.copy()
    infinite[0, 0] = np.inf
    yield "shape", change(query_transform=good.query_transform[:1]), "ShapeError", "layer 7: query_transform"
    yield (
        "heads",
        change(key_transform=good.key_transform.repeat(2, 0)),
        "ShapeError",
        "layer 7: key_transform",
    )
    yield (
        "dtype",
        change(key_multiplier=good.key_multiplier.astype(np.float32)),
        "DTypeError",
        "key_multiplier",
    )
    yield "float mean", change(value_mean=good.value_mean.astype(np.float32)), "DTypeError", "value_mean"
    yield "nan", change(output_transform=nan), "CheckpointError", "layer 7: output_transform has non-finite"
    yield "inf", change(value_mean=infinite), "CheckpointError", "layer 7: value_mean has non-finite"
    yield "norm", change(value_transform=big), "CheckpointError", "layer 7: value_transform has a column"
    zero = np.zeros(2, np.int32)
    yield "multiplier", change(value_multiplier=zero), "CheckpointError", "value_multiplier = 0"
    yield "large", change(key_multiplier=zero + 512), "CheckpointError", "key_multiplier = 512"
    yield (
        "swapped roles",
        change(
            key_transform=good.value_transform,
            query_transform=good.output_transform,
            value_transform=good.key_transform,
            output_transform=good.query_transform,
        ),
        "CheckpointError",
        "roles look swapped",
    )
    yield (
        "mixed matrices",
        change(key_transform=good.value_transform),
        "CheckpointError",
        "layer 7: query_transform is not the inverse transpose of key_transform",
    )
    other_inverse = good.query_transform.swapaxes(1, 2).copy()
    yield (
        "mixed inverse",
        change(output_transform=other_inverse),
        "CheckpointError",
        "output_transform is not",
    )


@pytest.mark.parametrize(
    "layer, error, message", [pytest.param(*rest, id=name) for name, *rest in broken_layers()]
)
def test_validation_names_layer_and_field(layer, error, message):
    arguments: dict[str, Any] = {"layer_id": 7, "num_key_value_heads": 2, "head_dim": 64}
    with pytest.raises(getattr(jax_errors, error), match=message):
        rotation.validate_layer(layer, **arguments)
    with pytest.raises(getattr(torch_errors, error), match=message):
        torch_rotation.validate_layer(as_torch(layer), **arguments)


def make_header(module, **changes):
    fields = {
        "model_id": "test/model",
        "layers": (0, 2),
        "num_query_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope": "half",
        "basis": "hadamard",
        "basis_version": bases.BASIS_VERSION,
    }
    return module.RotationHeader(**(fields | changes))


@pytest.mark.parametrize("module", [rotation, torch_rotation], ids=["jax", "torch"])
def test_header_round_trip_and_refusals(module):
    errors = jax_errors if module is rotation else torch_errors
    header = make_header(module, extra={"a": [1, 2]}, versions={"numpy": "2"})
    assert module.RotationHeader.from_dict(header.to_dict()) == header
    good = header.to_dict()
    for changes, message in (
        ({"format": "other"}, "format = 'other'"),
        ({"format_version": 2}, "format_version = 2"),
        ({"head_dim": "64"}, "head_dim = '64'"),
        ({"layers": [0, "2"]}, "layers = "),
        ({"surprise": 1}, "unknown field 'surprise'"),
    ):
        with pytest.raises(errors.CheckpointError, match=message):
            module.RotationHeader.from_dict(good | changes)
    del good["rope"]
    with pytest.raises(errors.CheckpointError, match="'rope' is missing"):
        module.RotationHeader.from_dict(good)
    layer = (
        torch_rotation.identity_rotation(2, 64)
        if module is torch_rotation
        else rotation.identity_rotation(2, 64)
    )
    for changes, message in (
        ({"layers": (0, 1)}, r"layers = \[0, 1\]"),
        ({"layers": (2, 0)}, "ascending"),
        ({"head_dim": 72}, "head_dim = 72"),
        ({"num_query_heads": 3}, "num_query_heads = 3"),
        ({"rounding": "sequential"}, "rounding = 'sequential'"),
        ({"format_version": 9}, "version 9"),
    ):
        with pytest.raises(errors.CheckpointError, match=message):
            module.validate_rotation_set(
                module.RotationSet(make_header(module, **changes), {0: layer, 2: layer})
            )
    module.validate_rotation_set(module.RotationSet(make_header(module), {0: layer, 2: layer}))


# Values in the basis of sequential rounding go with keys in it: no set has a feedback of values alone.
PAIRS = [
    (basis, value_basis)
    for basis in bases.KEY_BASES
    for value_basis in bases.VALUE_BASES
    if basis == fit.ORDERED or value_basis != fit.ORDERED
]


@pytest.mark.parametrize(("basis", "value_basis"), PAIRS)
def test_both_packages_fit_the_same_file(tmp_path, basis, value_basis):
    """The same statistics give the same rotation set from either package, byte for byte."""
    statistics = make_statistics(2, 64)
    options = {"per_head": True, "damping": 0.1, "value_basis": value_basis, "key_multiplier": 371}
    header = rotation_header.RotationHeader(
        model_id="test/twins",
        layers=(3,),
        num_query_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        rope="half",
        basis=basis,
        basis_version=bases.BASIS_VERSION,
        rounding="sequential" if basis == fit.ORDERED else "nearest",
        rounding_steps=4 if basis == fit.ORDERED else 0,
    )
    files = []
    for fitted, room, files_of in ((fit, rotation, store), (torch_fit, torch_rotation, torch_store)):
        layer = fitted.fit_layer_rotation(statistics, basis, **options)
        assert isinstance(layer, room.LayerRotation)
        files.append(tmp_path / f"{len(files)}.safetensors")
        files_of.save_safetensors(room.RotationSet(header, {3: layer}), files[-1])
    assert files[0].read_bytes() == files[1].read_bytes()
