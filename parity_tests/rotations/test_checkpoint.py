"""Rotation sets on disk: equal bytes in both packages, across devices and versions, and refusals by name."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch

from oscar_jax.core import cache_format as fmt
from oscar_jax.core import errors as jax_errors
from oscar_jax.core import rotation_header
from oscar_jax.rotations import bases, rotation
from oscar_jax.rotations import store as checkpoint
from oscar_torch.core import errors as torch_errors
from oscar_torch.rotations import store as torch_checkpoint

ROOT = pathlib.Path(__file__).parents[2]
GEOMETRY: dict = {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def make_set(layers=(3, 11), seed=0, model_id="test/model") -> rotation.RotationSet:
    generator = np.random.default_rng(seed)

    def basis():
        return np.linalg.qr(generator.standard_normal((32, 32)))[0]

    header = rotation_header.RotationHeader(
        model_id=model_id,
        layers=tuple(layers),
        rope="half",
        basis="oscar",
        basis_version=bases.BASIS_VERSION,
        corpus_digest="sha256:00",
        calibration_tokens=123,
        versions={"numpy": np.__version__},
        created="2026-11-29",
        **GEOMETRY,
    )
    rotations = {
        layer: rotation.make_layer_rotation(
            [basis(), basis()],
            [basis(), basis()],
            value_mean=generator.standard_normal((2, 32)),
            key_mean=generator.standard_normal((2, 32)),
        )
        for layer in layers
    }
    companions = {layers[0]: {"key_rotation": generator.standard_normal((2, 3)).astype(np.float32)}}
    return rotation.RotationSet(header, rotations, companions)


def bits(array) -> bytes:
    if isinstance(array, torch.Tensor):
        return array.contiguous().view(torch.uint8).numpy().tobytes()
    return np.asarray(array).tobytes()


def assert_equal(first, second):
    assert first.header.to_dict() == second.header.to_dict()
    assert sorted(first.layers) == sorted(second.layers)
    for layer in first.layers:
        for name in fmt.ROTATION_FIELDS:
            mine, other = (getattr(s.layers[layer], name) for s in (first, second))
            assert tuple(mine.shape) == tuple(other.shape)
            assert str(mine.dtype).removeprefix("torch.") == str(other.dtype).removeprefix("torch.")
            assert bits(mine) == bits(other), (layer, name)
    assert sorted(first.companions) == sorted(second.companions)
    for layer, arrays in first.companions.items():
        assert sorted(arrays) == sorted(second.companions[layer])
        assert all(bits(arrays[name]) == bits(second.companions[layer][name]) for name in arrays)


@pytest.fixture(scope="module")
def rotation_set():
    return make_set()


@pytest.fixture(scope="module")
def saved(rotation_set, tmp_path_factory):
    """One good directory and one good file, copied by the tests that damage them."""
    folder = tmp_path_factory.mktemp("rotations")
    checkpoint.save_rotation_set(rotation_set, folder / "set")
    checkpoint.save_safetensors(rotation_set, folder / "set.safetensors")
    return folder


def both_refuse(path, message):
    with pytest.raises(jax_errors.CheckpointError, match=message) as jax_error:
        checkpoint.load_rotation_set(path)
    with pytest.raises(torch_errors.CheckpointError, match=message) as torch_error:
        torch_checkpoint.load_rotation_set(path)
    for error in (jax_error, torch_error):
        assert "\n" not in str(error.value)


def test_both_packages_read_the_folder_of_a_calibration(rotation_set, saved, tmp_path):
    shutil.copytree(saved / "set", tmp_path / "rotations" / "rotation_set")
    (tmp_path / "rotations" / "report.md").write_text("beside it")
    for module in (checkpoint, torch_checkpoint):
        assert_equal(rotation_set, module.load_rotation_set(tmp_path / "rotations"))
        assert module.read_header(tmp_path / "rotations").model_id == rotation_set.header.model_id
        assert module.rotation_path(saved / "set") == saved / "set"


@pytest.mark.parametrize("name", ["set", "set.safetensors"])
def test_both_packages_read_the_same_bytes(rotation_set, saved, name):
    assert_equal(rotation_set, checkpoint.load_rotation_set(saved / name))
    loaded = torch_checkpoint.load_rotation_set(saved / name)
    assert_equal(rotation_set, loaded)
    assert loaded.layers[3].value_mean.dtype == torch.bfloat16
    assert checkpoint.read_header(saved / name) == rotation_set.header


def test_both_packages_write_the_same_file(saved, tmp_path):
    loaded = torch_checkpoint.load_safetensors(saved / "set.safetensors")
    torch_checkpoint.save_safetensors(loaded, tmp_path / "torch.safetensors")
    assert (tmp_path / "torch.safetensors").read_bytes() == (saved / "set.safetensors").read_bytes()


def run_python(code, *arguments, **environment):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torch_reads_without_jax(saved):
    code = """
import sys
for name in ("jax", "jaxlib", "orbax", "flax"):
    sys.modules[name] = None
from oscar_torch.rotations import store as checkpoint
for path in sys.argv[1:]:
    print(sorted(checkpoint.load_rotation_set(path).layers))
"""
    assert run_python(code, saved / "set", saved / "set.safetensors") == "[3, 11]\n" * 2


def test_jax_reads_without_torch(saved):
    code = """
import sys
for name in ("torch", "triton"):
    sys.modules[name] = None
from oscar_jax.rotations import store as checkpoint
print(sorted(checkpoint.load_rotation_set(sys.argv[1]).layers))
"""
    assert run_python(code, saved / "set.safetensors") == "[3, 11]\n"


def test_saved_on_four_devices_loads_on_one(rotation_set, saved, tmp_path):
    code = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
from oscar_jax.rotations import store as checkpoint
import dataclasses
assert jax.device_count() == 4
loaded = checkpoint.load_rotation_set(sys.argv[1])
mesh = jax.make_mesh((4,), ("devices",))
def spread(array):
    spec = PartitionSpec(*[None] * (array.ndim - 1), "devices") if array.ndim > 1 else PartitionSpec()
    return jax.device_put(array, NamedSharding(mesh, spec))
layers = jax.tree.map(spread, loaded.layers)
checkpoint.save_rotation_set(dataclasses.replace(loaded, layers=layers), sys.argv[2])
"""
    flags = "--xla_force_host_platform_device_count=4"
    run_python(code, saved / "set.safetensors", tmp_path / "sharded", XLA_FLAGS=flags)
    assert_equal(rotation_set, checkpoint.load_rotation_set(tmp_path / "sharded"))
    assert_equal(rotation_set, torch_checkpoint.load_rotation_set(tmp_path / "sharded"))


def test_saving_replaces_only_rotation_sets(rotation_set, saved, tmp_path):
    shutil.copytree(saved / "set", tmp_path / "set")
    other = make_set(seed=1)
    checkpoint.save_rotation_set(other, tmp_path / "set")
    assert_equal(other, checkpoint.load_rotation_set(tmp_path / "set"))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(jax_errors.CheckpointError, match="refusing to overwrite"):
        checkpoint.save_rotation_set(rotation_set, foreign)
    assert (foreign / "thesis.txt").read_text() == "mine"
    model = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"weight": np.zeros(3)}, model)
    for module, config in ((checkpoint, jax_errors), (torch_checkpoint, torch_errors)):
        loaded = module.load_safetensors(saved / "set.safetensors")
        with pytest.raises(config.CheckpointError, match="refusing to overwrite"):
            module.save_safetensors(loaded, model)
    assert safetensors.numpy.load_file(model)["weight"].shape == (3,)
    with pytest.raises(jax_errors.CheckpointError, match="is a file"):
        checkpoint.save_rotation_set(rotation_set, model)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["foreign", "model.safetensors", "set"]


def test_a_failed_write_leaves_the_old_set(rotation_set, saved, tmp_path, monkeypatch):
    shutil.copytree(saved / "set", tmp_path / "set")

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.ocp, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save_rotation_set(make_set(seed=1), tmp_path / "set")
    assert_equal(rotation_set, checkpoint.load_rotation_set(tmp_path / "set"))
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_invalid_sets_are_not_written(rotation_set, tmp_path):
    header = dataclasses.replace(rotation_set.header, layers=(3,))
    broken = dataclasses.replace(rotation_set, header=header)
    for save in (checkpoint.save_rotation_set, checkpoint.save_safetensors):
        with pytest.raises(jax_errors.CheckpointError, match="layers"):
            save(broken, tmp_path / "broken")
    assert not list(tmp_path.iterdir())


def test_missing_and_foreign_paths(tmp_path):
    both_refuse(tmp_path / "nowhere", "no such file")
    (tmp_path / "empty").mkdir()
    both_refuse(tmp_path / "empty", "not a rotation set")
    (tmp_path / "text.safetensors").write_text("hello, this is no tensor file")
    both_refuse(tmp_path / "text.safetensors", "not a .safetensors file")
    safetensors.numpy.save_file({"weight": np.zeros(3)}, tmp_path / "model.safetensors")
    both_refuse(tmp_path / "model.safetensors", "not a rotation set")


def test_truncated_file(saved, tmp_path):
    data = (saved / "set.safetensors").read_bytes()
    (tmp_path / "short.safetensors").write_bytes(data[:-1])
    both_refuse(tmp_path / "short.safetensors", r"layer \d+: \w+ is truncated")
    (tmp_path / "stub.safetensors").write_bytes(data[:100])
    both_refuse(tmp_path / "stub.safetensors", "truncated inside its header")
    (tmp_path / "long.safetensors").write_bytes(data + b"\0")
    both_refuse(tmp_path / "long.safetensors", "SafetensorError")


# Orbax leaves an event loop behind when a load fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_truncated_directory(saved, tmp_path):
    shutil.copytree(saved / "set", tmp_path / "set")
    for file in (tmp_path / "set" / "arrays").glob("*/ocdbt.process_0/d/*"):
        if file.stat().st_size > 4096:
            file.write_bytes(file.read_bytes()[:-2000])
    both_refuse(tmp_path / "set", r"layer \d+: \w+ cannot be read")
    shutil.rmtree(tmp_path / "set" / "arrays")
    both_refuse(tmp_path / "set", "array stores")


def edit(path, target, change):
    """A copy of a saved set, directory or file, with its JSON document changed."""
    if path.is_dir():
        shutil.copytree(path, target)
        document = json.loads((target / "header.json").read_text())
        change(document)
        (target / "header.json").write_text(json.dumps(document))
    else:
        with safetensors.safe_open(path, "numpy") as file:
            document = json.loads(file.metadata()["rotation_set"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        change(document)
        safetensors.numpy.save_file(arrays, target, metadata={"rotation_set": json.dumps(document)})
    return target


@pytest.mark.parametrize("name", ["set", "set.safetensors"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d["header"].update(format_version=2), "format_version = 2, expected 1"),
        (lambda d: d["header"].update(format="other"), "format = 'other'"),
        (lambda d: d["header"].pop("rope"), "field 'rope' is missing"),
        (lambda d: d["header"].update(head_dim=64), r"layer 3: key_transform has shape \(2, 32, 32\)"),
        (lambda d: d["header"].update(num_key_value_heads=4), "layer 3: key_transform has leading axis"),
        (lambda d: d["header"].update(layers=[3]), "layer 11: key_mean is unexpected"),
        (lambda d: d["header"].update(layers=[3, 11, 12]), "layer 12: key_mean is missing"),
        (
            lambda d: d["digests"].update({"layers.11.output_transform": "0" * 64}),
            "layer 11: output_transform does not match its digest",
        ),
        (lambda d: d["digests"].update({"layers.3.surprise": "0"}), "layer 3: surprise"),
    ],
)
def test_header_and_arrays_must_agree(saved, tmp_path, name, change, message):
    both_refuse(edit(saved / name, tmp_path / name, change), message)


def test_header_of_another_model_is_refused(saved, tmp_path):
    """Same geometry, another model's arrays: only the digests can tell."""
    checkpoint.save_rotation_set(make_set(seed=1, model_id="test/other"), tmp_path / "other")
    shutil.copy(saved / "set" / "header.json", tmp_path / "other" / "header.json")
    both_refuse(tmp_path / "other", "layer 3: companion key_rotation does not match its digest")


def test_swapped_layers_are_refused(rotation_set, saved, tmp_path):
    arrays = safetensors.numpy.load_file(saved / "set.safetensors")
    with safetensors.safe_open(saved / "set.safetensors", "numpy") as file:
        metadata = file.metadata()
    arrays["layers.3.key_mean"], arrays["layers.11.key_mean"] = (
        arrays["layers.11.key_mean"],
        arrays["layers.3.key_mean"],
    )
    safetensors.numpy.save_file(arrays, tmp_path / "swapped.safetensors", metadata=metadata)
    both_refuse(tmp_path / "swapped.safetensors", "layer 11: key_mean does not match its digest")


def test_bfloat16_and_int16_survive_every_bit(rotation_set, tmp_path):
    """Every finite bfloat16 (as means) and extreme int16 (as companions) comes back."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    companions = {
        3: {"patterns": patterns, "integers": np.arange(-(1 << 15), 1 << 15, dtype=np.int16)},
        11: {"signed_zero": np.array([-0.0, 0.0], ml_dtypes.bfloat16)},
    }
    full = dataclasses.replace(rotation_set, companions=companions)
    checkpoint.save_rotation_set(full, tmp_path / "set")
    checkpoint.save_safetensors(full, tmp_path / "set.safetensors")
    for name in ("set", "set.safetensors"):
        for module in (checkpoint, torch_checkpoint):
            assert_equal(full, module.load_rotation_set(tmp_path / name))
