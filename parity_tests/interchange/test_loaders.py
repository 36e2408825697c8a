"""Every export against the loaders' own rules: right, refused, or stopped by `--for` before it is misread.

docs/interchange.md shows the table that comes out, so that the page cannot say anything else.
"""

import dataclasses
import functools
import pathlib
import re

import numpy as np
import pytest

from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.core.model_geometry import ModelGeometry
from oscar_jax.core.rotation_header import RotationHeader
from oscar_jax.interchange import convert, gguf, loaders, published_pair
from oscar_jax.rotations import bases, rotation, store
from parity_tests.interchange import loaders as independent
from parity_tests.interchange.test_interchange import D, load, orthogonal, skewed, write_gguf, write_pair

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "interchange.md"
EVERY = independent.Model(layers=4, full=(0, 1, 2, 3), query_heads=4, key_value_heads=2, head_dim=D)
HYBRID = dataclasses.replace(EVERY, full=(1, 3))


def make_set(model, layers, *, skew=(), per_head=True, means=True):
    """A fitted set: keys of the layers in `skew` are not orthogonal; values have one Hadamard matrix."""
    heads = model.key_value_heads if per_head else 1
    generator = np.random.default_rng(len(layers))
    rotations = {}
    for layer in layers:
        make = skewed if layer in skew else lambda seed: (orthogonal(seed),)
        keys = [make(10 * layer + head)[0] for head in range(heads)]
        rotations[layer] = rotation.make_layer_rotation(
            keys,
            [bases.hadamard_matrix(D)] * heads,
            key_mean=generator.standard_normal((heads, D)) if means else None,
            value_mean=generator.standard_normal((heads, D)) if means else None,
        )
    header = RotationHeader(
        model_id="test/tiny",
        layers=tuple(layers),
        num_query_heads=model.query_heads,
        num_key_value_heads=model.key_value_heads,
        head_dim=D,
        rope="half",
        basis="balanced" if skew else "oscar",
        basis_version=bases.BASIS_VERSION,
    )
    return rotation.RotationSet(header, rotations)


def geometry(model):
    sliding = tuple(sorted(set(range(model.layers)) - set(model.full)))
    sizes = (model.query_heads, model.key_value_heads, model.head_dim, model.layers)
    return ModelGeometry("test/tiny", "qwen3", *sizes, model.full, sliding)


# Name in the table, the model, how the set is made.
SETS = [
    ("`oscar calibrate --rounding nearest`", EVERY, dict(layers=range(4), skew=range(4))),
    ("`--basis auto`, orthogonal in some layers", EVERY, dict(layers=range(4), skew=(1, 2))),
    ("`--shared`", EVERY, dict(layers=range(4), skew=range(4), per_head=False)),
    ("`--basis oscar`, per head", EVERY, dict(layers=range(4))),
    ("`--basis oscar --shared`", EVERY, dict(layers=range(4), per_head=False)),
    (
        "the same, of a model with short windows or layers without attention",
        HYBRID,
        dict(layers=(1, 3), per_head=False),
    ),
    ("the same with `--all-layers`", HYBRID, dict(layers=range(4), per_head=False)),
]


def outcome(tmp_path, rotation_set, model, name):
    """What becomes of a set at one loader; every claim is checked against the loader's own rules."""
    loader = independent.LOADERS[name]
    folder = tmp_path / name
    try:
        report = published_pair.export_published_pair(
            rotation_set, folder, loader=name, model=geometry(model)
        )
    except CheckpointError as error:
        assert not folder.exists() and "\n" not in str(error)
        published_pair.export_published_pair(rotation_set, folder)
        try:
            wrong = independent.worst_error(loader(folder, model), model)
        except independent.Refused:
            assert "ignores" not in str(error)
            return "refused"
        assert wrong > 0.05 and "ignores" in str(error), name
        return "**misread**, stopped by `--for`"
    assert independent.worst_error(loader(folder, model), model) < 1e-3
    if loaders.LOADERS[name].per_head:
        for rank in range(2):  # tensor-parallel ranks take their own heads
            applied = loader(folder, model, rank, 2)
            assert independent.worst_error(applied, model, rank, 2) < 1e-3
            whole = loader(folder, model)
            for layer, part in applied.items():
                heads = slice(rank, rank + 1) if len(whole[layer].key) > 1 else slice(None)
                assert np.array_equal(part.key, whole[layer].key[heads])
    lost = any("key means" in item for item in report.dropped)
    return "right, without means" if lost else "right"


def gguf_outcome(tmp_path, rotation_set, model):
    base = write_gguf(tmp_path / "base.gguf", layers=model.layers)
    try:
        gguf.export_gguf(rotation_set, base, tmp_path / "out.gguf")
    except CheckpointError as error:
        assert re.search("not orthogonal|differs by head", str(error))
        return "refused here"
    import gguf as library

    found = {t.name: np.array(t.data, np.float64) for t in library.GGUFReader(tmp_path / "out.gguf").tensors}
    applied = {}
    for layer in rotation_set.header.layers:
        # Its product takes a row x to M·x: with M = Rᵀ that is x·R; outputs take the transpose of M.
        key, value = (found[f"blk.{layer}.attn_{letter}_rot.weight"].T[None] for letter in "kv")
        applied[layer] = independent.Applied(key, key, value, value.swapaxes(-1, -2), np.zeros((1, D)))
    assert independent.worst_error(applied, model) < 1e-3
    return "right, without means"


@functools.cache
def table_row(tmp_path, number):
    title, model, recipe = SETS[number]
    folder = tmp_path / str(number)
    folder.mkdir()
    rotation_set = make_set(model, **recipe)
    cells = [outcome(folder, rotation_set, model, name) for name in loaders.LOADERS]
    return f"| {' | '.join([title, *cells, gguf_outcome(folder, rotation_set, model)])} |"


def test_the_page_shows_what_each_loader_makes_of_each_set(tmp_path):
    names = [f"`{name}`" for name in loaders.LOADERS]
    head = f"| set | {' | '.join(names)} | GGUF |"
    lines = [head, "|---" * (len(names) + 2) + "|", *(table_row(tmp_path, n) for n in range(len(SETS)))]
    table = "\n".join(lines)
    assert table in PAGE.read_text(), f"docs/interchange.md should hold:\n{table}"


def test_loaders_are_the_ones_that_were_looked_at():
    assert independent.LOADERS.keys() == loaders.LOADERS.keys()
    with pytest.raises(ConfigError, match="loader 'tgi' is unknown, allowed: sglang"):
        loaders.get_loader("tgi")


def test_fields_stand_on_all_layers_or_on_none(tmp_path):
    rotation_set = make_set(EVERY, range(4), skew=(2,))
    keep = dataclasses.replace(rotation_set.layers[0], key_mean=rotation_set.layers[0].key_mean * 0)
    rotation_set = dataclasses.replace(rotation_set, layers=rotation_set.layers | {0: keep})
    published_pair.export_published_pair(rotation_set, tmp_path)
    state = load(tmp_path / published_pair.KEY_FILE)
    assert (state["format_version"], state["source_grouping"]) == (3, "head")
    for layer, entry in state["layers"].items():
        assert set(entry) == {"layer_id", "rotation", "eigenvalues", "k_mean", "q_rotation"}
        assert entry["rotation"].shape == (2, D, D) and entry["k_mean"].shape == (2, D)
        assert bool((entry["rotation"] == entry["q_rotation"]).all()) == (layer != 2)
        assert bool(entry["k_mean"].any()) == (layer != 0)
    mixed = {"layers": {0: {"rotation": 1, "k_mean": 1}, 1: {"rotation": 1}}}
    with pytest.raises(CheckpointError, match="k_mean stands on 1 of 2 layers"):
        loaders.check_all_or_none("k.pt", mixed)


def test_an_imported_pair_is_completed_if_a_field_stands_on_some_layers(tmp_path):
    import torch

    states = write_pair(tmp_path, version=3, heads=2)
    del states["key"]["layers"][3]["k_mean"]
    torch.save(states["key"], tmp_path / "k_rotation_test.pt")
    convert.convert(tmp_path, tmp_path / "out", target="pair", num_query_heads=4)
    entries = load(tmp_path / "out" / published_pair.KEY_FILE)["layers"]
    assert not entries[3]["k_mean"].any() and entries[7]["k_mean"].equal(states["key"]["layers"][7]["k_mean"])


def test_the_report_warns_in_capitals(tmp_path):
    report = published_pair.export_published_pair(make_set(EVERY, range(4), skew=range(4)), tmp_path)
    warnings = [note for note in report.notes if note.startswith("NOT FOR")]
    assert len(warnings) == 1 and "2026-08" in warnings[0] and "IGNORES Q_ROTATION" in warnings[0]
    assert "--for sglang-2026-08 refuses" in warnings[0]
    report = published_pair.export_published_pair(make_set(EVERY, range(4)), tmp_path)
    assert not [note for note in report.notes if "NOT FOR" in note]


def test_layers_of_each_loader(tmp_path):
    rotation_set = make_set(HYBRID, (1, 3), per_head=False)
    with pytest.raises(CheckpointError, match=r"has no rotation for layers 0 … 2.*--all-layers"):
        published_pair.export_published_pair(rotation_set, tmp_path / "no", loader="sglang")
    report = published_pair.export_published_pair(rotation_set, tmp_path / "nova", loader="nova")
    assert any(r"0 … 1 are [1, 3]" in note for note in report.notes)
    state = load(tmp_path / "nova" / published_pair.KEY_FILE)
    assert {i: entry["layer_id"] for i, entry in state["layers"].items()} == {0: 0, 1: 1}
    # The other way: the ids of the files count, the model says which layers they are.
    with pytest.raises(CheckpointError, match=r"layer 3.*--layer-ids attention|--layer-ids attention"):
        published_pair.import_published_pair(
            *published_pair.find_pair(tmp_path / "nova", None), model=geometry(HYBRID)
        )
    back = published_pair.import_published_pair(
        *published_pair.find_pair(tmp_path / "nova", None), model=geometry(HYBRID), layer_ids="attention"
    )
    assert back.header.layers == (1, 3)
    assert np.array_equal(back.layers[3].key_transform, rotation_set.layers[3].key_transform) or (
        np.abs(back.layers[3].key_transform.astype(int) - rotation_set.layers[3].key_transform).max() <= 1
    )
    # Written again as it came, byte for byte.
    published_pair.export_published_pair(back, tmp_path / "again")
    for name in (published_pair.KEY_FILE, published_pair.VALUE_FILE):
        first, second = load(tmp_path / "nova" / name), load(tmp_path / "again" / name)
        assert list(first["layers"]) == list(second["layers"])
        assert all(
            first["layers"][i]["rotation"].equal(second["layers"][i]["rotation"]) for i in first["layers"]
        )
    # For a loader the model's ids count, whatever the file that the set came from had.
    for name in ("sglang-hybrid", "nova"):
        published_pair.export_published_pair(back, tmp_path / name, loader=name, model=geometry(HYBRID))
        assert independent.LOADERS[name](tmp_path / name, HYBRID).keys() == {1, 3}
        assert independent.worst_error(independent.LOADERS[name](tmp_path / name, HYBRID), HYBRID) < 1e-3
    with pytest.raises(ConfigError, match="layer_ids = 'heads', allowed: model, attention"):
        convert.load_any(tmp_path / "nova", layer_ids="heads")
    with pytest.raises(ConfigError, match="needs the model"):
        convert.load_any(tmp_path / "nova", layer_ids="attention")


def test_key_means_of_an_imported_pair_are_dropped_for_who_ignores_them(tmp_path):
    import torch

    write_pair(tmp_path / "pair", version=2, heads=2, layers=(0, 1))
    means = load(tmp_path / "pair" / "k_rotation_test.pt") | {"format_version": 3, "source_grouping": "head"}
    for entry in means["layers"].values():
        entry["k_mean"] = torch.ones(2, D)
    torch.save(means, tmp_path / "pair" / "k_rotation_test.pt")
    imported, _ = convert.load_any(tmp_path / "pair", num_query_heads=4)
    for name, options in {"loader": {"loader": "sglang-2026-08"}, "schema": {"schema": 2}}.items():
        report = published_pair.export_published_pair(imported, tmp_path / name, **options)
        state = load(tmp_path / name / published_pair.KEY_FILE)
        assert state["format_version"] == 2 and "key means" in report.dropped
        for layer, entry in state["layers"].items():
            assert "k_mean" not in entry and entry["rotation"].equal(means["layers"][layer]["rotation"])


def test_convert_for_a_loader(tmp_path):
    rotation_set = make_set(EVERY, range(4), skew=range(4))
    store.save_safetensors(rotation_set, tmp_path / "set.safetensors")
    with pytest.raises(
        CheckpointError, match=r"not for sglang-2026-08.*ignores q_rotation and would compute"
    ):
        convert.convert(tmp_path / "set.safetensors", tmp_path / "out", loader="sglang-2026-08")
    with pytest.raises(CheckpointError, match=r"not for vllm.*reads one matrix per layer"):
        convert.convert(tmp_path / "set.safetensors", tmp_path / "out", loader="vllm")
    report = convert.convert(tmp_path / "set.safetensors", tmp_path / "out", loader="sglang-2026-10")
    assert report.target == "published pair for SGLang, OSCAR tree of 2026-10 (OSCAR-2)"
    with pytest.raises(ConfigError, match="concern published pairs"):
        convert.convert(tmp_path / "out", tmp_path / "x.safetensors", loader="vllm")
    with pytest.raises(ConfigError, match="schema = 4, allowed: 1, 2, 3"):
        convert.convert(tmp_path / "set.safetensors", tmp_path / "x", schema=4)
