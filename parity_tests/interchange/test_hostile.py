"""Files made to harm: each is refused in one line, before anything is executed, expanded or copied."""

import resource
import zipfile

import pytest
import torch

from oscar_jax.core.errors import CheckpointError
from oscar_jax.interchange import convert, inspect, torch_file
from oscar_jax.models.safetensors_file import SafetensorsFile
from parity_tests.interchange.test_interchange import D, break_state, make_state, write_pair

EYE = torch.eye(D)


def with_calibration(**fields):
    return {**make_state("key"), "calibration": fields}


def with_layer_ids(identifier):
    state = make_state("key")
    state["layers"][identifier] = state["layers"].pop(3)
    return state


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "sparse": (
        break_state(rotation=EYE.to_sparse()),
        "layer 3: rotation is float32 sparse_coo, expected a dense",
    ),
    "quantized": (
        break_state(rotation=torch.quantize_per_tensor(EYE, 0.1, 0, torch.qint8)),
        "layer 3: rotation is qint8",
    ),
    "meta": (break_state(rotation=torch.empty(D, D, device="meta")), "rotation has no content|not a PyTorch"),
    "stride 0": (
        break_state(rotation=torch.ones(1, 1).expand(D, D)),
        r"layer 3: rotation of shape \(32, 32\) repeats a storage of 4 bytes",
    ),
    "terabytes": (
        break_state(eigenvalues=torch.ones(1).expand(1 << 40)),
        "layer 3: eigenvalues of shape .* repeats a storage",
    ),
    "terabytes of heads": (
        {
            **make_state("key", heads=2, version=2),
            "layers": {3: {"rotation": torch.ones(1).expand(1 << 30, D, D)}},
        },
        "repeats a storage of 4 bytes",
    ),
    "many heads": (
        {
            **make_state("key", heads=2, version=2),
            "layers": {3: {"rotation": torch.eye(16).repeat(1025, 1, 1)}},
        },
        "rotation of 1025 heads, allowed: 1 to 1024",
    ),
    "version True": (
        {**make_state("key"), "format_version": True},
        "format_version = True, allowed: 1, 2, 3",
    ),
    "version 1.0": ({**make_state("key"), "format_version": 1.0}, "format_version = 1.0, allowed: 1, 2, 3"),
    "version text": ({**make_state("key"), "format_version": "1"}, "format_version = '1', allowed"),
    "grouping": (
        {**make_state("key"), "source_grouping": ["layer"]},
        "source_grouping = .'layer'.,",
    ),
    "tokens": (with_calibration(tokens="many"), "calibration tokens = 'many', expected an int >= 0"),
    "heads": (
        with_calibration(global_kv_heads=2.0, global_q_heads=4),
        "global_kv_heads = 2.0, expected",
    ),
    "heads True": (with_calibration(global_q_heads=True), "global_q_heads = True, expected an int"),
    "layer True": (with_layer_ids(True), "layer id True, expected an int"),
    "layer 1.0": (with_layer_ids(3.0), "layer id 3.0, expected an int"),
    "layer text": (with_layer_ids("0x3"), "layer id '0x3', expected an int"),
    "layer underscore": (with_layer_ids("1_0"), "layer id '1_0', expected an int"),
    "layer huge": (with_layer_ids("9" * 5000), "layer id '9{59}…, expected an int"),
    "layer negative": (with_layer_ids(-1), "layer id -1, expected an int"),
    "layer_id tensor": (break_state(layer_id=torch.ones(3)), "layer 3: layer_id tensor"),
    "integers": (break_state(rotation=EYE.int()), "rotation is int32, expected a float32 tensor"),
    "complex": (break_state(rotation=EYE.to(torch.complex64)), "rotation is complex64, expected"),
    "a list": (break_state(rotation=EYE.tolist()), "rotation is list, expected a dense float32 tensor"),
    "one axis": (break_state(rotation=torch.ones(D)), r"rotation has shape \(32,\), source_grouping says"),
    "huge head_dim": (break_state(rotation=torch.eye(1024)), "head_dim = 1024"),
    "a tensor": (EYE, "not a rotation file"),
    "layers of a list": ({"layers": [1, 2]}, "not a rotation file"),
    "an entry of text": ({**make_state("key"), "layers": {3: "rotation"}}, "layer 3: rotation is missing"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_give_one_line(tmp_path, name):
    state, reason = HOSTILE[name]
    write_pair(tmp_path)
    torch.save(state, tmp_path / "k_rotation_test.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=reason) as error:
        convert.load_any(tmp_path, num_query_heads=4)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 256 * 1024, f"{grown} KiB were taken by a file of a few"


def test_deep_metadata_is_ignored_by_name(tmp_path):
    """No recursion without end; infinities and odd names do not reach the JSON of the header."""
    write_pair(tmp_path)
    odd = {"deep": nested(500), "odd": {1: 2}, "endless": float("inf"), 7: "seven"}
    torch.save({**make_state("key"), **odd}, tmp_path / "k_rotation_test.pt")
    report = convert.convert(tmp_path, tmp_path / "set.safetensors", num_query_heads=4, num_key_value_heads=2)
    ignored = [note for note in report.notes if note.startswith("ignored in the source")]
    assert len(ignored) == 4 and any("'deep'" in note for note in ignored)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """In every form that is kept in such repositories, weights included."""
    for name in ("k_rotation.pt", "set.safetensors", "model.gguf", "model.safetensors"):
        path = tmp_path / name
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2373\n")
        with pytest.raises(CheckpointError, match=rf"^[^:]*{name}: a Git LFS pointer.*git lfs pull"):
            SafetensorsFile(path) if name == "model.safetensors" else inspect.inspect(path)


def test_compressed_archives_are_refused_unread(tmp_path):
    """torch.save stores; an archive that compresses could expand to any size."""
    path, packed = tmp_path / "k.pt", tmp_path / "packed.pt"
    torch.save({"layers": {3: torch.zeros(1 << 20)}}, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    with pytest.raises(CheckpointError, match="is compressed, expected stored entries"):
        torch_file.load_torch_file(packed)
