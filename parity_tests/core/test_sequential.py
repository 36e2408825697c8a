"""Sequential rounding (format page, section 2, steps 8a to 8c): both references write the oracle's bytes,
sets that ask for it are checked, and whoever cannot write it says so by name.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework, PackageCache
from parity_tests.golden.make_golden import GOLDEN, digests, run_sequential


def make_feedback(
    rng: np.random.Generator, heads: int, head_dim: int, steps: int, shift: int | None = None
) -> oracle.Feedback:
    """Hostile: entries of full size wherever they may be."""
    block = np.arange(head_dim) // (head_dim // steps)
    matrix = rng.integers(-127, 128, (heads, head_dim, head_dim)) * (block[:, None] < block[None])
    shifts = rng.integers(0, 8, heads) if shift is None else np.full(heads, shift)
    return oracle.Feedback(matrix.astype(np.int8), shifts.astype(np.int32), steps)


def package_feedback(framework: Framework, feedback: oracle.Feedback) -> Any:
    arrays = (framework.array(array, "cpu") for array in (feedback.matrix, feedback.shift))
    return framework.module("quantize").Feedback(*arrays, feedback.steps)


@pytest.mark.parametrize(
    ("heads", "matrices", "head_dim", "steps", "multiplier"),
    [(2, 2, 64, 4, 410), (2, 1, 64, 2, 64), (1, 1, 96, 3, 511), (1, 1, 128, 4, 371), (1, 1, 512, 8, 64)],
)
@pytest.mark.parametrize("role", ["key", "value"])
def test_references_write_the_bytes_of_the_oracle(
    framework: Framework, role: str, heads: int, matrices: int, head_dim: int, steps: int, multiplier: int
) -> None:
    """Rows of every family, edge rows and any bits among them, with feedback as large as it may be."""
    rng = np.random.default_rng([heads, head_dim, steps])
    data = np.concatenate([f(rng, (64, heads, head_dim))[:64] for f in rows.ROW_FAMILIES.values()])
    transform = rows.channel_balanced_transform(rng, matrices, head_dim)
    if head_dim & (head_dim - 1):
        transform = rows.orthogonal_transform(rng, matrices, head_dim)
    multipliers = np.full(matrices, multiplier, np.int32)
    mean = oracle.to_bfloat16(rng.normal(0, 1, (matrices, head_dim))) if role == "value" else None
    quantize = framework.module("quantize")
    pages = framework.bfloat16(data.reshape(-1, 64, heads, head_dim), "cpu")
    arguments = [pages, framework.array(transform, "cpu"), framework.array(multipliers, "cpu")]
    if mean is not None:
        arguments.append(framework.bfloat16(mean, "cpu"))
    run = framework.compiled(getattr(quantize, f"quantize_{role}_pages"))
    for shift in (None, 0, 7):
        feedback = make_feedback(rng, matrices, head_dim, steps, shift)
        want = oracle.quantize_pages(role, data, transform, multipliers, mean, feedback)
        words, scale, *_ = run(*arguments, package_feedback(framework, feedback))
        np.testing.assert_array_equal(framework.numpy(words), want["words"])
        got = framework.numpy(scale).transpose(0, 2, 1).reshape(want["scale"].shape)
        np.testing.assert_array_equal(got, want["scale"])


def test_feedback_lowers_what_the_metric_sees() -> None:
    """With correlated queries and the block solution as feedback, the error of scores falls."""
    rng = np.random.default_rng(0)
    mix = np.eye(64) + 0.5 * rng.normal(0, 1, (64, 64)) / 8
    metric = mix @ np.diag(np.exp(-np.arange(64) / 12)) @ mix.T
    matrix = np.zeros((64, 64))
    for first in range(0, 48, 16):
        late = slice(first + 16, 64)
        solved = np.linalg.solve(metric[late, late], metric[late, first : first + 16])
        matrix[first : first + 16, late] = np.clip(np.rint(solved.T * 16), -127, 127)
    feedback = oracle.Feedback(matrix.astype(np.int8)[None], np.array([4], np.int32), 4)
    data = oracle.to_bfloat16(rng.normal(0, 1, (512, 1, 64)))
    transform = rows.fixed_point(np.eye(64)[None])
    exact = oracle.from_bfloat16(data)[:, 0].astype(np.float64)

    def error(feedback: oracle.Feedback | None) -> float:
        zero = np.zeros((1, 64), np.uint16)
        codes, scale = oracle.quantize_rows(data, transform, np.array([410]), zero, feedback)
        got = oracle.reconstruct_rows(codes, scale, zero, np.eye(64)[None])[:, 0]
        return float(np.einsum("rd,de,re->", got - exact, metric, got - exact))

    assert error(feedback) < 0.8 * error(None)


def test_cache(framework: Framework) -> None:
    """Pages that leave the recent part are coded with the rotation's feedback, keys and values alike."""
    rng = np.random.default_rng(1)
    rotation = rows.make_rotation(rng, 2, 64)
    key, value = (oracle.to_bfloat16(rng.normal(0, 1, (450, 2, 64))) for _ in "kv")
    feedback = {role: make_feedback(rng, 2, 64, 4) for role in ("key", "value")}
    cache = PackageCache(framework, rotation, 1, 450)
    cache.feed(feedback)
    for start in range(0, 450, 150):
        part = slice(start, start + 150)
        cache.append(key[None, part], value[None, part], [150])
    got, quantized = cache.sequence(0), slice(64, 64 + 64 * 2)
    for role, data in (("key", key), ("value", value)):
        mean = rotation["value_mean"] if role == "value" else None
        arrays = (rotation[f"{role}_transform"], rotation[f"{role}_multiplier"], mean)
        want = oracle.quantize_pages(role, data[quantized], *arrays, feedback[role])
        np.testing.assert_array_equal(getattr(got, f"{role}_codes"), want["words"])
        plain = oracle.quantize_pages(role, data[quantized], *arrays)
        assert (plain["words"] != want["words"]).any()


def make_set(framework: Framework, **changes: Any) -> Any:
    """A rotation set of two layers, the second without feedback of values; fields of layer 3 as `changes`."""
    module = framework.module("rotations.rotation")
    rng = np.random.default_rng(2)
    layers = {}
    for layer, names in ((3, ("key", "value")), (7, ("key",))):
        fields = module.hadamard_rotation(2, 64).numpy()
        for role in names:
            feedback = make_feedback(rng, 2, 64, 4)
            fields |= {f"{role}_feedback": feedback.matrix, f"{role}_feedback_shift": feedback.shift}
        if layer == 3:
            fields |= {name: array for name, array in changes.items() if name in fields}
        layers[layer] = module.LayerRotation.from_numpy(fields, 4)
    header = {
        **{"model_id": "test", "layers": (3, 7), "num_query_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "rope": "half", "basis": "hadamard", "basis_version": "1"},
        **{"rounding": "sequential", "rounding_steps": 4},
    }
    header |= {name: value for name, value in changes.items() if name in header}
    return module.RotationSet(module.RotationHeader(**header), layers)


def test_sets_are_the_same_files(tmp_path: Path) -> None:
    """Both packages write one file and read it, and the directory of JAX; a reader gets what was written."""
    pytest.importorskip("torch")
    stores = {name: framework.module("rotations.store") for name, framework in FRAMEWORKS.items()}
    for name, framework in FRAMEWORKS.items():
        stores[name].save_safetensors(make_set(framework), tmp_path / f"{name}.safetensors")
    assert (tmp_path / "jax.safetensors").read_bytes() == (tmp_path / "torch.safetensors").read_bytes()
    stores["jax"].save_rotation_set(make_set(FRAMEWORKS["jax"]), tmp_path / "set")
    for name, framework in FRAMEWORKS.items():
        written = make_set(framework)
        for source in ("torch.safetensors", "set"):
            got = stores[name].load_rotation_set(tmp_path / source)
            if name == "torch":
                got = got.to("cpu")
            assert got.header == written.header
            for layer, rotation in written.layers.items():
                want, have = rotation.numpy(), got.layers[layer].numpy()
                assert digests(have) == digests(want) and set(have) == set(want)
                assert got.layers[layer].key_feedback.steps == 4
            assert got.layers[7].value_feedback is None


LATER = np.tril(np.ones((64, 64), np.int8))[None].repeat(2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_feedback": LATER}, "layer 3: key_feedback flows into its own or an earlier block"),
        ({"key_feedback": np.full((2, 64, 64), -128, np.int8)}, "layer 3: key_feedback has -128"),
        ({"value_feedback_shift": np.array([0, 8], np.int32)}, "layer 3: value_feedback_shift has 8"),
        ({"value_multiplier": np.array([63, 371], np.int32)}, "value_multiplier = 63 with feedback"),
        ({"rounding_steps": 2}, "feedback of 4 blocks"),
        ({"rounding_steps": 8}, "with rounding_steps = 8"),
        ({"rounding_steps": 0}, "rounding_steps = 0"),
        ({"rounding": "nearest"}, "rounding = 'nearest' with rounding_steps = 4"),
        ({"rounding": "nearest", "rounding_steps": 0}, "feedback of 4 blocks, header: rounding_steps = 0"),
        ({"rounding": "random"}, "rounding = 'random', allowed: nearest, sequential"),
    ],
)
def test_sets_that_contradict_themselves(framework: Framework, changes: dict, message: str) -> None:
    error = framework.module("core.errors").CheckpointError
    with pytest.raises(error, match=message):
        framework.module("rotations.rotation").validate_rotation_set(make_set(framework, **changes))


@pytest.mark.parametrize(
    ("present", "rounding"),
    [
        ((), "sequential"),
        (("value_feedback", "value_feedback_shift"), "sequential"),
        (("key_feedback",), "nearest"),
    ],
)
def test_feedback_that_does_not_belong(framework: Framework, present: tuple[str, ...], rounding: str) -> None:
    """Keys must be fed, a matrix comes with its shifts, and a set that rounds to the nearest has neither."""
    fields = make_set(framework).layers[3].numpy()
    fields = {name: array for name, array in fields.items() if "feedback" not in name or name in present}
    check = framework.module("rotations.fields").check_feedback
    with pytest.raises(framework.module("core.errors").CheckpointError, match="rounding with the fields"):
        check(fields, layer_id=3, head_dim=64, rounding=rounding, steps=4)


def test_header_without_steps_is_as_before(framework: Framework) -> None:
    header = make_set(framework, rounding="nearest", rounding_steps=0).header
    assert "rounding_steps" not in header.to_dict()
    assert type(header).from_dict(json.loads(json.dumps(header.to_dict()))) == header


class TestRefusals:
    """Whoever rounds to the nearest says so by name; None goes on to the reference."""

    @staticmethod
    def pages(framework: Framework) -> tuple[Any, Any, dict[str, np.ndarray]]:
        rotation = make_set(framework).layers[3]
        data = rows.normal_rows(np.random.default_rng(3), (64, 2, 64))
        want = framework.module("quantize").quantize_page_pair(
            *[framework.bfloat16(data[None], "cpu")] * 2, rotation
        )
        return framework.bfloat16(data[None], "cpu"), rotation, want

    def test_kernels(self) -> None:
        pytest.importorskip("triton")
        framework = FRAMEWORKS["torch"]
        module = framework.module("triton_kernels.quantize.triton")
        _, rotation, _ = self.pages(framework)
        pages = framework.bfloat16(np.zeros((1, 64, 2, 272), np.uint16), "cpu")
        with pytest.raises(NotImplementedError, match="272: sequential rounding up to 256"):
            module.quantize_page_pair(pages, pages, rotation)

    def test_none_goes_on_to_the_reference(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        framework = FRAMEWORKS["torch"]
        ops = framework.module("ops")
        monkeypatch.setattr(ops, "_best", lambda device: ("triton",))
        pages, rotation, want = self.pages(framework)
        got = ops.quantize_pages(pages, pages, rotation)
        assert all((got[name] == array).all() for name, array in want.items())

    def test_exports(self, tmp_path: Path) -> None:
        from oscar_jax.core.errors import CheckpointError
        from oscar_jax.interchange import absorb, gguf, published_pair

        rotation_set = make_set(FRAMEWORKS["jax"])
        with pytest.raises(CheckpointError, match="rounding = 'sequential'"):
            published_pair.export_published_pair(rotation_set, tmp_path)
        with pytest.raises(CheckpointError, match="rounding = 'sequential'"):
            absorb.absorb_values(rotation_set, tmp_path, tmp_path / "out")
        with pytest.raises(CheckpointError, match="rounding = 'sequential'"):
            gguf.export_gguf(rotation_set, tmp_path / "base.gguf", tmp_path / "out.gguf")


def test_golden(framework: Framework) -> None:
    """golden/sequential.npz was written once; the oracle and each package reproduce its digests."""
    with np.load(GOLDEN / "sequential.npz", allow_pickle=False) as file:
        data = {name: file[name] for name in file.files}
    record = json.loads((GOLDEN / "sequential.json").read_text())
    assert digests(data) == record["inputs"]
    assert digests(run_sequential(data)) == record["outputs"]
    quantize = framework.module("quantize")
    for role in ("key", "value"):
        feedback = oracle.Feedback(data[f"{role}_feedback"], data[f"{role}_feedback_shift"], 4)
        pages = framework.bfloat16(data[role].reshape(-1, 64, 1, 64), "cpu")
        arguments = [framework.array(data[f"{role}_{name}"], "cpu") for name in ("transform", "multiplier")]
        if role == "value":
            arguments.append(framework.bfloat16(data["value_mean"], "cpu"))
        run = getattr(quantize, f"quantize_{role}_pages")
        words, *_ = run(pages, *arguments, package_feedback(framework, feedback))
        assert digests({"words": framework.numpy(words)})["words"] == record["outputs"][f"{role}_words"]
