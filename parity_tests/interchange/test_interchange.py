"""Interchange: published pairs, GGUF and absorbed weights, there and back, and one-line refusals.

The published files themselves are tested when OSCAR_ROTATION_ZOO names the folder that holds them.
"""

import dataclasses
import json
import os
import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from oscar_jax import quantize as jax_quantize
from oscar_jax.core import cache_format as fmt
from oscar_jax.core import rotation_header
from oscar_jax.core.errors import CheckpointError, ConfigError, OscarError
from oscar_jax.interchange import convert, inspect, published_pair
from oscar_jax.interchange import gguf as gguf_rotations
from oscar_jax.models.geometry import read_model_geometry
from oscar_jax.rotations import bases, fixed_point, rotation, store
from oscar_torch import quantize as torch_quantize
from oscar_torch.rotations import store as torch_checkpoint

gguf = pytest.importorskip("gguf")
D = 32


def orthogonal(seed, *shape):
    matrix = np.random.default_rng(seed).standard_normal((*shape, D, D))
    return np.linalg.qr(matrix)[0].astype(np.float32)


def skewed(seed, *shape):
    """A well-conditioned matrix that is not orthogonal, and its inverse transpose."""
    left, right = orthogonal(seed, *shape).astype(np.float64), orthogonal(seed + 1, *shape).astype(np.float64)
    scale = np.linspace(0.5, 1.0, D)
    matrix, inverse_transpose = (left * scale) @ right, (left / scale) @ right
    return matrix.astype(np.float32), inverse_transpose.astype(np.float32)


def make_state(role, *, layers=(3, 7), heads=None, version=1, string_ids=False, objective=None, seed=0):
    """A file of a published pair as a dict; heads None is one matrix per layer."""
    shape = () if heads is None else (heads,)
    grouping = {1: "layer", 2: "per_kv_head", 3: "layer" if heads is None else "head"}[version]
    entries = {}
    for index, layer in enumerate(layers):
        entry = {"layer_id": layer, "rotation": orthogonal(seed + index, *shape)}
        entry["eigenvalues"] = np.sort(np.abs(entry["rotation"][..., 0]), axis=-1)
        if version == 3:
            name = "q_rotation" if role == "key" else "o_rotation"
            entry["rotation"], entry[name] = skewed(seed + index, *shape)
            if role == "key":
                entry["k_mean"] = entry["rotation"][..., 1] * 3
        entries[str(layer) if string_ids else layer] = {
            name: torch.from_numpy(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value
            for name, value in entry.items()
        }
    default = {"key": "qqt_r_h_pbr", "value": "sst_r_h_pbr"}[role]
    if version == 3:
        default = {"key": "oscar2_flat", "value": "oscar2_v_post_wo"}[role]
    return {
        "format_version": version,
        "objective": objective or default,
        "source_grouping": grouping,
        "layers": entries,
    }


def write_pair(folder, **changes):
    folder.mkdir(exist_ok=True)
    states = {role: make_state(role, seed=seed, **changes) for role, seed in (("key", 0), ("value", 100))}
    torch.save(states["key"], folder / "k_rotation_test.pt")
    torch.save(states["value"], folder / "v_rotation_test.pt")
    return states


def assert_same_files(first, second):
    """Two loaded files of a pair: same keys, same values, same bytes."""
    assert {k: v for k, v in first.items() if k != "layers"} == {
        k: v for k, v in second.items() if k != "layers"
    }
    assert list(first["layers"]) == list(second["layers"])
    count = 0
    for layer, entry in first["layers"].items():
        other = second["layers"][layer]
        assert set(entry) == set(other)
        for name, value in entry.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == other[name].dtype and value.shape == other[name].shape
                assert value.numpy().tobytes() == other[name].numpy().tobytes(), (layer, name)
                count += 1
            else:
                assert value == other[name]
    return count


def load(path):
    return torch.load(path, weights_only=True)


def there_and_back(folder, states):
    """pair -> Orbax -> safetensors -> pair."""
    convert.convert(folder, folder / "set")
    convert.convert(folder / "set", folder / "set.safetensors")
    convert.convert(folder / "set.safetensors", folder / "out", target="pair")
    for role, name in (("key", published_pair.KEY_FILE), ("value", published_pair.VALUE_FILE)):
        assert_same_files(states[role], load(folder / "out" / name))
    return store.load_rotation_set(folder / "set.safetensors")


@pytest.mark.parametrize("heads, version", [(None, 1), (2, 2), (2, 3), (None, 3)])
@pytest.mark.parametrize("string_ids", [False, True])
def test_published_pairs_come_back_byte_equal(tmp_path, heads, version, string_ids):
    states = write_pair(tmp_path, heads=heads, version=version, string_ids=string_ids)
    rotation_set = there_and_back(tmp_path, states)
    assert rotation_set.header.layers == (3, 7)
    layer = rotation_set.layers[3]
    assert layer.key_transform.shape == (heads or 1, D, D)
    assert not np.any(np.asarray(layer.value_mean, np.float32))
    assert bool(np.any(np.asarray(layer.key_mean, np.float32))) == (version == 3)
    assert set(np.asarray(layer.key_multiplier)) == {fmt.KEY_MULTIPLIER_DEFAULT}
    matrix = states["key"]["layers"]["3" if string_ids else 3]["rotation"].numpy().reshape(-1, D, D)[0]
    ratio = np.linalg.norm(fixed_point.from_fixed_point(layer.key_transform[0])) / np.linalg.norm(matrix)
    np.testing.assert_allclose(
        fixed_point.from_fixed_point(layer.key_transform[0]), matrix * ratio, atol=2.0**-14
    )


@hypothesis.settings(max_examples=12, deadline=None, database=None)
@hypothesis.given(
    layers=st.lists(st.integers(0, 200), min_size=1, max_size=3, unique=True),
    key_heads=st.sampled_from([None, 3]),
    value_heads=st.sampled_from([None, 3]),
    string_ids=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_orthogonal_pair_round_trips(tmp_path_factory, layers, key_heads, value_heads, string_ids, seed):
    """Keys and values may differ in sharing; layer ids may be sparse, unordered, int or str."""
    folder = tmp_path_factory.mktemp("pair")
    states = {}
    for role, heads, offset in (("key", key_heads, 0), ("value", value_heads, 5000)):
        states[role] = make_state(
            role,
            layers=sorted(layers),
            heads=heads,
            version=1 if heads is None else 2,
            string_ids=string_ids,
            seed=seed + offset,
        )
        torch.save(states[role], folder / f"{role[0]}_rotation.pt")
    there_and_back(folder, states)


@hypothesis.settings(max_examples=10, deadline=None, database=None)
@hypothesis.given(seed=st.integers(0, 10_000), per_head=st.booleans(), skew=st.booleans())
def test_any_fitted_set_survives_a_published_pair(tmp_path_factory, seed, per_head, skew):
    """Non-orthogonal transforms come back as the same integers, orthogonal ones within one unit."""
    folder = tmp_path_factory.mktemp("fitted")
    original = fitted_set(seed, per_head=per_head, skew=skew)
    published_pair.export_published_pair(original, folder)
    back, form = convert.load_any(folder)
    assert form == "pair" and back.header.layers == original.header.layers
    for layer, mine in original.layers.items():
        other = back.layers[layer]
        for name in ("key_transform", "value_transform"):
            difference = getattr(mine, name).astype(int) - getattr(other, name).astype(int)
            assert np.abs(difference).max() <= (0 if skew and name == "key_transform" else 1), name
        # A shared matrix that is not orthogonal is written per head, its mean with it.
        np.testing.assert_array_equal(np.broadcast_to(mine.key_mean, other.key_mean.shape), other.key_mean)


def fitted_set(seed=0, *, per_head=False, skew=False, means=True, layers=(0, 1), heads=2):
    """A set as a fit makes it, without companions."""
    count = heads if per_head else 1
    generator = np.random.default_rng(seed)
    rotations = {}
    for layer in layers:
        keys = [
            (skewed if skew else lambda s: (orthogonal(s),))(seed + layer + 7 * i)[0] for i in range(count)
        ]
        values = [orthogonal(seed + layer + 50 + i) for i in range(count)]
        mean = generator.standard_normal((2, count, D)) if means else np.zeros((2, count, D))
        rotations[layer] = rotation.make_layer_rotation(keys, values, key_mean=mean[0], value_mean=mean[1])
    header = rotation_header.RotationHeader(
        model_id="test/tiny",
        layers=tuple(layers),
        num_query_heads=4,
        num_key_value_heads=heads,
        head_dim=D,
        rope="half",
        basis="balanced" if skew else "oscar",
        basis_version=bases.BASIS_VERSION,
        created="2026-11-29",
    )
    return rotation.RotationSet(header, rotations)


def test_export_says_what_it_carries_and_drops(tmp_path):
    plain = fitted_set(means=False)
    report = published_pair.export_published_pair(plain, tmp_path / "plain")
    state = load(tmp_path / "plain" / "k_rotation_qqt_r_h_pbr.pt")
    assert (state["format_version"], state["source_grouping"]) == (1, "layer")
    assert state["objective"] == "qqt_r_h_pbr" and list(state["layers"]) == [0, 1]
    assert set(state["layers"][0]) == {"layer_id", "rotation", "eigenvalues"}
    matrix = state["layers"][0]["rotation"].double()
    assert matrix.shape == (D, D) and (matrix.T @ matrix - torch.eye(D)).abs().max() < 1e-6
    assert any("multipliers" in item for item in report.dropped)
    assert not any("value means" in item for item in report.dropped)

    report = published_pair.export_published_pair(fitted_set(per_head=True), tmp_path / "heads", schema=3)
    state = load(tmp_path / "heads" / "k_rotation_qqt_r_h_pbr.pt")
    assert (state["format_version"], state["source_grouping"]) == (3, "head")  # for the key means
    assert state["layers"][0]["k_mean"].shape == (2, D)
    assert load(tmp_path / "heads" / "v_rotation_sst_r_h_pbr.pt")["format_version"] == 2
    header = convert.load_any(tmp_path / "heads")[0].header
    assert (header.num_query_heads, header.num_key_value_heads, header.model_id) == (4, 2, "test/tiny")
    assert any("value means" in item for item in report.dropped) and "key means" in report.carried
    assert "dropped" in report.text() and len(report.text().splitlines()) > 5

    report = published_pair.export_published_pair(fitted_set(), tmp_path / "old", schema=1)
    assert load(tmp_path / "old" / "k_rotation_qqt_r_h_pbr.pt")["format_version"] == 1
    assert any(item.startswith("key means") for item in report.dropped)
    with pytest.raises(CheckpointError, match=r"schema version 2 \(source_grouping 'per_kv_head'\)"):
        published_pair.export_published_pair(fitted_set(per_head=True), tmp_path / "no", schema=1)
    with pytest.raises(CheckpointError, match=r"schema version 3 \(fields q_rotation\)"):
        published_pair.export_published_pair(fitted_set(skew=True), tmp_path / "no", schema=2)
    assert not (tmp_path / "no").exists()


def test_objectives_name_what_the_matrices_are(tmp_path):
    hadamard, identity = (make(1, D) for make in (rotation.hadamard_rotation, rotation.identity_rotation))
    plain = fitted_set(means=False)
    for index, (changes, key, value) in enumerate(
        (
            ({}, "qqt_r_h_pbr", "sst_r_h_pbr"),
            (value_part(hadamard), "qqt_r_h_pbr", "hadamard"),
            (value_part(identity), "qqt_r_h_pbr", "oscar_kv_value_identity"),
        )
    ):
        layers = {id: dataclasses.replace(layer, **changes) for id, layer in plain.layers.items()}
        published_pair.export_published_pair(dataclasses.replace(plain, layers=layers), tmp_path / str(index))
        files = (published_pair.KEY_FILE, published_pair.VALUE_FILE)
        assert [load(tmp_path / str(index) / file)["objective"] for file in files] == [key, value]
        assert convert.load_any(tmp_path / str(index))[0].header.extra["roles_verified"]
    published_pair.export_published_pair(fitted_set(skew=True), tmp_path / "skew")
    state = load(tmp_path / "skew" / published_pair.KEY_FILE)
    assert (state["objective"], state["format_version"]) == ("oscar_kv_key_balanced", 3)


def value_part(layer):
    return {name: getattr(layer, name) for name in ("value_transform", "output_transform")}


def test_foreign_files_are_not_overwritten(tmp_path):
    (tmp_path / published_pair.KEY_FILE).write_text("mine")
    with pytest.raises(CheckpointError, match="refusing to overwrite"):
        published_pair.export_published_pair(fitted_set(), tmp_path)
    assert (tmp_path / published_pair.KEY_FILE).read_text() == "mine"


def test_tampered_companions_are_refused(tmp_path):
    write_pair(tmp_path)
    rotation_set, _ = convert.load_any(tmp_path)
    rotation_set.companions[3]["key_rotation"] = orthogonal(999)
    with pytest.raises(CheckpointError, match="layer 3: companion key_rotation does not belong"):
        published_pair.export_published_pair(rotation_set, tmp_path / "out")


def break_state(role="key", layer=3, **entry):
    state = make_state(role)
    state["layers"][layer] |= entry
    return state


def malformed():
    """name, key file (state or bytes), value file or None for a good one, expected reason."""
    good = make_state("value", seed=100)
    scaled = torch.from_numpy(orthogonal(0) * 1.01)
    yield "no torch file", b"hello, I am a text", None, "not a PyTorch file"
    yield "truncated", "truncate", None, "truncated"
    yield "code inside", {"layers": object()}, None, "holds objects other than tensors"
    yield "no layers", {"weights": torch.zeros(3)}, None, "has no layers"
    yield "swapped pair", good, make_state("key"), "are the two files swapped"
    yield "not orthogonal", break_state(rotation=scaled), None, "layer 3: rotation is not orthogonal"
    yield (
        "other head_dim",
        break_state(rotation=torch.eye(64), eigenvalues=torch.ones(64)),
        None,
        r"layer 7: rotation has shape \(32, 32\), other layers have \(64, 64\)",
    )
    yield "odd head_dim", make_odd_state(), None, "head_dim = 8"
    yield "layer missing", make_state("key", layers=(3,)), None, "layer 7: only in one of"
    yield "half precision", break_state(rotation=scaled.half()), None, "rotation is float16"
    yield "not a number", break_state(rotation=torch.full((D, D), torch.nan)), None, "non-finite"
    yield "wrong id", break_state(layer_id=4), None, "layer 3: layer_id = 4"
    yield (
        "heads by shape only",
        {**make_state("key", heads=2, version=2), "source_grouping": "layer"},
        None,
        (r"rotation has shape \(2, 32, 32\), source_grouping says \[D, D\]"),
    )
    yield "unknown version", {**make_state("key"), "format_version": 4}, None, "format_version = 4"
    yield "odd grouping", {**make_state("key"), "source_grouping": "page"}, None, "source_grouping = 'page'"
    yield "bad layer id", rename_layer("three"), None, "layer id 'three'"
    yield "layer twice", duplicate_layer(), None, "layer 3 appears twice"
    wrong = break_state(q_rotation=torch.from_numpy(orthogonal(5)))
    yield "wrong inverse", wrong, None, "q_rotation is not the inverse transpose"
    yield "contradiction", break_state(o_rotation=torch.from_numpy(orthogonal(0))), None, "contradict"
    yield "eigenvalues", break_state(eigenvalues=torch.ones(31)), None, "eigenvalues has shape"
    yield "no rotation", {**make_state("key"), "layers": {3: {"layer_id": 3}}}, None, "rotation is missing"


class Exploit:
    """What an unpickler without `weights_only` would run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(tmp_path):
    write_pair(tmp_path)
    torch.save({"layers": {3: Exploit(tmp_path / "touched")}}, tmp_path / "k_rotation_test.pt")
    with pytest.raises(CheckpointError, match="holds objects other than tensors"):
        inspect.inspect(tmp_path / "k_rotation_test.pt")
    assert not (tmp_path / "touched").exists()
    torch.load(tmp_path / "k_rotation_test.pt", weights_only=False)
    assert (tmp_path / "touched").exists()


def make_odd_state():
    state = make_state("key")
    for entry in state["layers"].values():
        entry |= {"rotation": torch.eye(8), "eigenvalues": torch.ones(8)}
    return state


def rename_layer(name):
    state = make_state("key")
    state["layers"][name] = state["layers"].pop(3)
    return state


def duplicate_layer():
    state = make_state("key")
    state["layers"]["3"] = state["layers"][3]
    return state


@pytest.mark.parametrize(
    "keys, values, reason", [pytest.param(*rest, id=name) for name, *rest in malformed()]
)
def test_malformed_files_give_one_line(tmp_path, keys, values, reason):
    write_pair(tmp_path)
    path = tmp_path / "k_rotation_test.pt"
    if keys == "truncate":
        path.write_bytes(path.read_bytes()[:-500])
    elif isinstance(keys, bytes):
        path.write_bytes(keys)
    else:
        torch.save(keys, path)
    if values is not None:
        torch.save(values, tmp_path / "v_rotation_test.pt")
    with pytest.raises(CheckpointError, match=reason) as error:
        convert.convert(tmp_path, tmp_path / "set")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "set").exists()


def test_roles_that_no_field_tells_follow_the_order_and_never_the_name(tmp_path):
    write_pair(tmp_path, objective="hadamard")
    report = convert.convert(tmp_path, tmp_path / "set")
    assert any("does not say which file is of keys" in note for note in report.notes)
    key, value = tmp_path / "k_rotation_test.pt", tmp_path / "v_rotation_test.pt"
    with pytest.raises(CheckpointError, match="named otherwise"):
        published_pair.import_published_pair(value, key)
    other = value.rename(tmp_path / "whatever.pt")
    assert convert.load_any(key, values=other)[1] == "pair"


def write_config(folder, **changes):
    config = {
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention"] * 3
        + ["full_attention"]
        + ["linear_attention"] * 3
        + ["full_attention"],
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_model_geometry_decides_heads_and_layers(tmp_path):
    write_pair(tmp_path / "pair")
    unknown = convert.convert(tmp_path / "pair", tmp_path / "unknown")
    assert any("number of heads" in note for note in unknown.notes)
    model = write_config(tmp_path / "model")
    report = convert.convert(tmp_path / "pair", tmp_path / "set", model=model)
    assert not report.notes
    header = store.read_header(tmp_path / "set")
    assert (header.num_query_heads, header.num_key_value_heads, header.model_id) == (4, 2, "model")
    full = ["full_attention"] * 8
    for changes, reason in (
        ({"head_dim": 64}, "head_dim = 32, the model has 64"),
        ({"num_hidden_layers": 6, "layer_types": full[:6]}, "have layer 7, the model has no attention"),
        ({"layer_types": full}, r"have no layer 0, which the model needs; they have \[3, 7\]"),
        (
            {"layer_types": [*full[:3], "linear_attention", *full[4:]]},
            "have layer 3, the model has no attention",
        ),
    ):
        write_config(model, **changes)
        with pytest.raises(CheckpointError, match=reason):
            convert.convert(tmp_path / "pair", tmp_path / "refused", model=model)
    write_config(model)
    write_pair(tmp_path / "heads", heads=3, version=2)
    with pytest.raises(CheckpointError, match="rotations of 3 heads, but num_key_value_heads = 2"):
        convert.convert(tmp_path / "heads", tmp_path / "refused", model=model)
    assert not (tmp_path / "refused").exists()


def quantize_both(rotation_set, path):
    """Codes, scales and page means of both packages from the same file; the number of codes compared."""
    torch_set = torch_checkpoint.load_rotation_set(path)
    heads, count = rotation_set.header.num_key_value_heads, 0
    rows = np.random.default_rng(0).standard_normal((1, 64, heads, rotation_set.header.head_dim))
    jax_rows = jnp.asarray(rows, jnp.bfloat16)
    torch_rows = torch.from_numpy(rows.astype(np.float32)).bfloat16()
    for layer, mine in rotation_set.layers.items():
        theirs = torch_set.layers[layer]
        for role in ("key", "value"):
            arguments = [getattr(mine, f"{role}_{name}") for name in ("transform", "multiplier")]
            others = [getattr(theirs, f"{role}_{name}") for name in ("transform", "multiplier")]
            if role == "value":
                arguments.append(mine.value_mean)
                others.append(theirs.value_mean)
            first = getattr(jax_quantize, f"quantize_{role}_pages")(jax_rows, *map(jnp.asarray, arguments))
            second = getattr(torch_quantize, f"quantize_{role}_pages")(torch_rows, *others)
            for a, b in zip(first, second, strict=True):
                assert np.asarray(a).tobytes() == b.contiguous().view(torch.uint8).numpy().tobytes()
            count += rows.size
    return count


def test_imported_rotations_quantize_identically(tmp_path):
    write_pair(tmp_path, heads=2, version=3)
    convert.convert(tmp_path, tmp_path / "set.safetensors", num_query_heads=4)
    assert quantize_both(store.load_rotation_set(tmp_path / "set.safetensors"), tmp_path / "set.safetensors")


# GGUF.


def write_gguf(path, *, architecture="qwen3", layers=2, head_dim=D, tensors=()):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(layers)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(head_dim)
    writer.add_token_list(["<a>", "b", "ü"])
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_bool("test.flag", True)
    generator = np.random.default_rng(0)
    for layer in range(layers):
        weight = generator.standard_normal((2 * head_dim, 64)).astype(np.float32)
        quantized = gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.{layer}.attn_k.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.{layer}.attn_v.weight", weight.astype(np.float16))
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_holds_the_transpose_beside_an_unchanged_base(tmp_path):
    write_pair(tmp_path / "pair", layers=(0, 1))
    rotation_set, _ = convert.load_any(tmp_path / "pair", num_query_heads=4, num_key_value_heads=2)
    base = write_gguf(tmp_path / "base.gguf")
    store.save_rotation_set(rotation_set, tmp_path / "set")
    report = convert.convert(tmp_path / "set", tmp_path / "out.gguf", base=base)
    assert report.notes[0].startswith("4 base tensors byte-identical, 4 rotation tensors")
    before, after = (gguf.GGUFReader(p) for p in (base, tmp_path / "out.gguf"))
    written = {tensor.name: tensor for tensor in after.tensors}
    for tensor in before.tensors:
        assert tensor.data.tobytes() == written[tensor.name].data.tobytes()
        assert tensor.tensor_type == written[tensor.name].tensor_type
    for name, field in before.fields.items():
        if not name.startswith("GGUF."):
            assert (
                after.fields[name].contents() == field.contents() and after.fields[name].types == field.types
            )
    matrix = load(tmp_path / "pair" / "k_rotation_test.pt")["layers"][1]["rotation"].numpy()
    assert np.array_equal(written["blk.1.attn_k_rot.weight"].data, matrix.T)
    assert written["blk.1.attn_k_rot.weight"].tensor_type == gguf.GGMLQuantizationType.F32

    back, form = convert.load_any(tmp_path / "out.gguf")
    assert form == "gguf" and back.header.model_id == rotation_set.header.model_id
    for layer in (0, 1):
        for name in ("key_transform", "value_transform", "query_transform", "output_transform"):
            assert np.array_equal(
                getattr(back.layers[layer], name), getattr(rotation_set.layers[layer], name)
            )
    convert.convert(tmp_path / "out.gguf", tmp_path / "again", target="pair")
    again = load(tmp_path / "again" / published_pair.KEY_FILE)["layers"][1]["rotation"]
    assert np.array_equal(again.numpy(), matrix)


def test_gguf_refusals(tmp_path):
    base = write_gguf(tmp_path / "base.gguf")
    out = tmp_path / "out.gguf"
    baked = [("blk.0.attn_k_rot.weight", orthogonal(0))]
    for rotations, file, reason in (
        (fitted_set(skew=True), base, "layer 0: key_transform is not orthogonal"),
        (fitted_set(per_head=True), base, "layer 0: key_transform differs by head"),
        (fitted_set(layers=(0, 5)), base, "have layer 5, the model has no attention"),
        (fitted_set(), write_gguf(tmp_path / "wide.gguf", head_dim=64), "head_dim = 32, the model has 64"),
        (fitted_set(), write_gguf(tmp_path / "llama.gguf", architecture="llama"), "architecture 'llama'"),
        (fitted_set(), write_gguf(tmp_path / "baked.gguf", tensors=baked), "already has rotation tensors"),
        (fitted_set(heads=4), base, "num_key_value_heads = 4, the model has 2"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            gguf_rotations.export_gguf(rotations, file, out)
        assert not out.exists()
    with pytest.raises(CheckpointError, match="exists"):
        gguf_rotations.export_gguf(fitted_set(), base, base)
    rot = "blk.{}.attn_{}_rot.weight"
    for tensors, reason in (
        ([], "has no rotation tensors"),
        ([(rot.format(0, "k"), orthogonal(0) * 2)], "is not orthogonal"),
        ([(rot.format(0, "v"), orthogonal(0))], "layer 0: the key rotation is missing"),
        ([(rot.format(0, "k"), orthogonal(0)[:16])], "expected F32"),
        (
            [(rot.format(layer, letter), orthogonal(0)) for layer, letter in ((0, "k"), (0, "v"), (1, "k"))],
            "layer 1: the value rotation is missing",
        ),
    ):
        with pytest.raises(CheckpointError, match=reason):
            gguf_rotations.import_gguf(write_gguf(tmp_path / "bad.gguf", tensors=tensors))
    data = base.read_bytes()
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        convert.load_any(tmp_path / "short.gguf")
    keys_only = write_gguf(tmp_path / "keys.gguf", tensors=[(rot.format(0, "k"), orthogonal(0))])
    layer = gguf_rotations.import_gguf(keys_only).layers[0]
    assert np.array_equal(layer.value_transform[0], np.eye(D) * fmt.TRANSFORM_MAX)


def test_a_fitted_set_goes_to_every_target(tmp_path):
    """What the acceptance asks of `oscar convert`: pair, safetensors and GGUF of one set, each read back."""
    original = fitted_set(per_head=False)
    store.save_rotation_set(original, tmp_path / "set")
    base = write_gguf(tmp_path / "base.gguf")
    for destination, options in (("pair", {}), ("set.safetensors", {}), ("model.gguf", {"base": base})):
        report = convert.convert(tmp_path / "set", tmp_path / destination, **options)
        assert report.source == "orbax" and report.written
        back, _ = convert.load_any(tmp_path / destination)
        for layer, mine in original.layers.items():
            for name in ("key_transform", "value_transform"):
                difference = getattr(mine, name).astype(int) - getattr(back.layers[layer], name).astype(int)
                assert np.abs(difference).max() <= (0 if "safetensors" in destination else 1)


def test_targets_follow_from_names(tmp_path):
    store.save_rotation_set(fitted_set(), tmp_path / "set")
    for options, error, reason in (
        ({"destination": tmp_path / "x.gguf"}, ConfigError, "needs base"),
        ({"destination": tmp_path / "k.pt"}, ConfigError, "is two files"),
        ({"destination": tmp_path / "x", "target": "onnx"}, ConfigError, "target = 'onnx'"),
        ({"source": tmp_path / "nowhere", "destination": tmp_path / "x"}, CheckpointError, "no such file"),
        ({"source": tmp_path, "destination": tmp_path / "x"}, CheckpointError, "0 files k_rotation"),
    ):
        with pytest.raises(error, match=reason):
            convert.convert(**({"source": tmp_path / "set"} | options))
    with pytest.raises(OscarError, match="not a model configuration"):
        read_model_geometry(tmp_path)


# Inspection.


def test_inspect_shows_geometry_objective_orthogonality_spectrum_means_and_origin(tmp_path):
    write_pair(tmp_path / "pair", heads=2, version=3)
    convert.convert(tmp_path / "pair", tmp_path / "set", num_query_heads=4, model_id="test/tiny")
    inspection = inspect.inspect(tmp_path / "set")
    summary = inspection.summary
    json.dumps(summary)
    assert summary["model_id"] == "test/tiny" and summary["head_dim"] == D
    assert summary["objective"] == {"key": "oscar2_flat", "value": "oscar2_v_post_wo"}
    assert summary["layer_ids"] == [3, 7] and len(summary["layers"]) == 4
    row = summary["layers"][0]
    assert row["defect"] > 0.1 and 1.9 < row["condition"] < 2.1 and row["mean_norm"] > 1
    assert 1 <= row["spectrum"]["effective_rank"] <= 2 * D
    assert re.search(r"effective rank", inspection.text()) and "published/3" in inspection.text()
    single = inspect.inspect(tmp_path / "pair" / "k_rotation_test.pt").summary
    assert single["objective"] == {"key": "oscar2_flat"} and len(single["layers"]) == 2
    gguf_file = tmp_path / "x.gguf"
    gguf_rotations.export_gguf(fitted_set(), write_gguf(tmp_path / "base.gguf"), gguf_file)
    assert inspect.inspect(gguf_file).summary["form"] == "gguf"


# Absorption.


@pytest.mark.hf
@pytest.mark.parametrize("family, per_head", [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_absorbed_models_compute_the_same_logits(tmp_path, family, per_head):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=D,
        max_position_embeddings=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    rotations = fitted_set(per_head=per_head)
    store.save_rotation_set(rotations, tmp_path / "set")
    report = convert.convert(
        tmp_path / "set", tmp_path / "absorbed", target="absorb", base=tmp_path / "model"
    )
    absorbed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "absorbed", dtype=torch.float32)
    tokens = torch.arange(40)[None] % 100
    with torch.no_grad():
        before, after = model.eval()(tokens).logits, absorbed.eval()(tokens).logits
    assert (before - after).abs().max() <= 1e-5 * before.abs().max()
    weights = [m.model.layers[1].self_attn.v_proj.weight for m in (model, absorbed)]
    assert (weights[0] - weights[1]).abs().max() > 0.01
    assert report.target == "model with absorbed values"
    rest = store.load_rotation_set(tmp_path / "absorbed" / "rotation_set")
    assert np.array_equal(rest.layers[1].value_transform[0], np.eye(D) * fmt.TRANSFORM_MAX)
    assert np.array_equal(rest.layers[1].key_transform, rotations.layers[1].key_transform)
    # The cache of the new model is given what the old one's would have been after the transform.
    transform = fixed_point.from_fixed_point(rotations.layers[1].value_transform)[0]
    mean = np.asarray(rotations.layers[1].value_mean, np.float64)[0] @ transform
    np.testing.assert_allclose(
        np.asarray(rest.layers[1].value_mean, np.float64)[0], mean, rtol=0.01, atol=0.01
    )

    with pytest.raises(CheckpointError, match="exists"):
        convert.convert(tmp_path / "set", tmp_path / "absorbed", target="absorb", base=tmp_path / "model")
    config_file = tmp_path / "model" / "config.json"
    config_file.write_text(config_file.read_text().replace(f'"{family}"', '"qwen3_next"'))
    with pytest.raises(CheckpointError, match="model_type = 'qwen3_next'"):
        convert.convert(tmp_path / "set", tmp_path / "no", target="absorb", base=tmp_path / "model")
    assert not (tmp_path / "no").exists()


# The published files.

ZOO = os.environ.get("OSCAR_ROTATION_ZOO")
ZOO_PAIRS = sorted({file.parent for file in pathlib.Path(ZOO).glob("*/*.pt")}) if ZOO else []


@pytest.mark.skipif(not ZOO_PAIRS, reason="OSCAR_ROTATION_ZOO names no folder of published rotations")
@pytest.mark.parametrize("folder", ZOO_PAIRS, ids=lambda folder: folder.name)
def test_published_files(tmp_path, folder):
    convert.convert(folder, tmp_path / "set.safetensors", num_query_heads=1, num_key_value_heads=1)
    convert.convert(tmp_path / "set.safetensors", tmp_path / "pair", target="pair")
    tensors = 0
    for letter, name in (("k", published_pair.KEY_FILE), ("v", published_pair.VALUE_FILE)):
        (original,) = folder.glob(f"{letter}_rotation*.pt")
        tensors += assert_same_files(load(original), load(tmp_path / "pair" / name))
    assert tensors == 4 * len(convert.load_any(folder)[0].layers)
    rotation_set = store.load_rotation_set(tmp_path / "set.safetensors")
    few = dict(list(rotation_set.layers.items())[::7])
    codes = quantize_both(dataclasses.replace(rotation_set, layers=few), tmp_path / "set.safetensors")
    assert codes == len(few) * 2 * 64 * rotation_set.header.head_dim
