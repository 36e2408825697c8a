"""The conformance command: writes, compares, points at the first difference, and refuses bad vectors."""

from pathlib import Path

import numpy as np
import pytest

from parity_tests.conformance import rows
from parity_tests.conformance import vectors as conformance_vectors
from parity_tests.conformance.implementations import IMPLEMENTATIONS


@pytest.fixture(params=["key", "value", "key sequential", "value sequential"])
def vectors(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    role, _, rounding = request.param.partition(" ")
    return rows.sample_vectors(role, 0, 2, 2, 80, steps=4 if rounding else 0)


def write(path: Path, arrays: dict[str, np.ndarray]) -> str:
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return str(path)


@pytest.mark.parametrize("name", [name for name, one in IMPLEMENTATIONS.items() if one.devices[0] == "cpu"])
def test_equal(
    name: str, vectors: dict[str, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compared in place, or written and compared later: exit 0, with counts."""
    reason = IMPLEMENTATIONS[name].why_not("cpu")
    if reason:
        pytest.skip(reason)
    file, out = write(tmp_path / "in.npz", vectors), str(tmp_path / "out.npz")
    assert conformance_vectors.main(["--vectors", file, "--implementation", name]) == 0
    assert "20480 codes" in capsys.readouterr().out
    assert conformance_vectors.main(["--vectors", file, "--implementation", name, "--out", out]) == 0
    with np.load(out) as written:
        assert written["codes"].shape == (128, 2, 80) and written["codes"].dtype == np.uint8
        assert written["scale"].shape == (128, 2) and written["scale"].dtype == np.uint16
        role = str(vectors["role"])
        assert written["words"].shape == ((2, 2, 64, 5) if role == "key" else (2, 2, 80, 4))
        assert written["words"].dtype == np.int32
        assert ("page_mean" in written) == (role == "key")
    assert conformance_vectors.main(["--vectors", file, "--compare", out]) == 0


@pytest.mark.parametrize(
    ("array", "index", "where"),
    [
        ("codes", (70, 1, 33), "page 1, token 6, head 1, channel 33"),
        ("scale", (5, 0), "page 0, token 5, head 0"),
        ("page_mean", (1, 0, 9), "page 1, head 0, channel 9"),
        ("words", (1, 1, 7, 2), "page 1, token 7, head 1, channels 32..47 (word 2)"),
    ],
)
def test_difference(
    array: str,
    index: tuple[int, ...],
    where: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One changed bit: exit 1 and its page, token, head and channel; a later change does not hide it."""
    vectors = rows.sample_vectors("key", 0, 2, 2, 64)
    result = conformance_vectors.run_implementation("oracle", vectors)
    result[array][index] ^= 1
    result[array][(-1,) * result[array].ndim] ^= 1
    file = write(tmp_path / "in.npz", vectors)
    assert (
        conformance_vectors.main(["--vectors", file, "--compare", write(tmp_path / "out.npz", result)]) == 1
    )
    printed = capsys.readouterr().out
    assert f"{array} differs in" in printed and f"first at {where}:" in printed


def test_value_words_are_located(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = rows.sample_vectors("value", 0, 1, 1, 64)
    result = conformance_vectors.run_implementation("oracle", vectors)
    result["words"][0, 0, 17, 3] ^= 1
    file = write(tmp_path / "in.npz", vectors)
    assert (
        conformance_vectors.main(["--vectors", file, "--compare", write(tmp_path / "out.npz", result)]) == 1
    )
    assert "page 0, tokens 48..63 (word 3), head 0, channel 17" in capsys.readouterr().out


BAD = {
    "no rows": ({"rows": None}, "missing arrays: rows"),
    "no mean": ({"mean": None}, "mean"),
    "role": ({"role": np.array("query")}, "'query'"),
    "role list": ({"role": np.array(["key", "value"])}, "role"),
    "float rows": ({"rows": np.zeros((64, 2, 64), np.float32)}, "float32"),
    "odd tokens": ({"rows": np.zeros((65, 2, 64), np.uint16)}, "65"),
    "no pages": ({"rows": np.zeros((0, 2, 64), np.uint16)}, "at least one page"),
    "2-D rows": ({"rows": np.zeros((64, 64), np.uint16)}, "(64, 64)"),
    "head_dim": ({"rows": np.zeros((64, 2, 72), np.uint16)}, "head_dim = 72"),
    "large head_dim": ({"rows": np.zeros((64, 2, 528), np.uint16)}, "head_dim = 528"),
    "transform heads": ({"transform": np.zeros((3, 64, 64), np.int16)}, "(3, 64, 64)"),
    "transform dtype": ({"transform": np.zeros((2, 64, 64), np.int32)}, "int32"),
    "long columns": ({"transform": np.full((2, 64, 64), 2**14, np.int16)}, "norm 8.0"),
    "multiplier zero": ({"multiplier": np.array([371, 0], np.int32)}, "multiplier = 0"),
    "multiplier 512": ({"multiplier": np.array([512, 1], np.int32)}, "multiplier = 512"),
    "multiplier shape": ({"multiplier": np.array([371], np.int32)}, "(1,)"),
    "multiplier dtype": ({"multiplier": np.array([371, 371], np.int64)}, "int64"),
    "mean shape": ({"mean": np.zeros((2, 32), np.uint16)}, "(2, 32)"),
    "mean infinite": ({"mean": np.full((2, 64), 0x7F80, np.uint16)}, "infinity"),
}


BAD_FEEDBACK = {
    "shift alone": ({"feedback": None}, "feedback_shift, rounding_steps alone"),
    "feedback dtype": ({"feedback": np.zeros((2, 64, 64), np.int16)}, "int16"),
    "feedback shape": ({"feedback": np.zeros((1, 64, 64), np.int8)}, "(1, 64, 64)"),
    "feedback backwards": ({"feedback": np.ones((2, 64, 64), np.int8)}, "own or an earlier block"),
    "feedback -128": (
        {"feedback": np.triu(np.full((2, 64, 64), -128, np.int8), 48)},
        "feedback from -128",
    ),
    "shift 8": ({"feedback_shift": np.array([0, 8], np.int32)}, "feedback_shift 0..8"),
    "three steps": ({"rounding_steps": np.array(3, np.int32)}, "rounding_steps = 3"),
    "eight steps": ({"rounding_steps": np.array(8, np.int32)}, "rounding_steps = 8"),
    "small multiplier": ({"multiplier": np.array([63, 371], np.int32)}, "multiplier = 63 with feedback"),
}


@pytest.mark.parametrize("case", [*BAD, *BAD_FEEDBACK])
def test_bad_vectors(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2 with one line that names the array and the offending value."""
    change, expected = (BAD | BAD_FEEDBACK)[case]
    steps = 4 if case in BAD_FEEDBACK else 0
    vectors = {**rows.sample_vectors("value", 0, 1, 2, 64, steps=steps), **change}
    file = write(tmp_path / "in.npz", {name: array for name, array in vectors.items() if array is not None})
    assert conformance_vectors.main(["--vectors", file, "--implementation", "oracle"]) == 2
    printed = capsys.readouterr().err
    assert expected in printed and printed.count("\n") == 1


def test_bad_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are no vectors, unknown names, options that contradict each other."""
    text = tmp_path / "text.npz"
    text.write_text("not a zip file")
    good = write(tmp_path / "in.npz", rows.sample_vectors("key", 0, 1, 1, 64))
    truncated = tmp_path / "cut.npz"
    truncated.write_bytes(Path(good).read_bytes()[:2000])
    np.save(tmp_path / "one.npy", np.zeros(3))
    for command in (
        ["--vectors", str(text), "--implementation", "oracle"],
        ["--vectors", str(truncated), "--implementation", "oracle"],
        ["--vectors", str(tmp_path / "one.npy"), "--implementation", "oracle"],
        ["--vectors", str(tmp_path / "absent.npz"), "--implementation", "oracle"],
        ["--vectors", good, "--implementation", "nobody"],
        ["--vectors", good, "--implementation", "oracle", "--device", "gpu"],
        ["--vectors", good],
        ["--vectors", good, "--compare", good],
        ["--make-vectors", str(tmp_path / "new.npz"), "--head-dim", "72"],
        ["--make-vectors", str(tmp_path / "new.npz"), "--pages", "0"],
        ["--make-vectors", str(tmp_path / "new.npz"), "--head-dim", "64", "--steps", "5"],
    ):
        assert conformance_vectors.main(command) == 2, command
        assert capsys.readouterr().err.count("\n") == 1, command


def test_make_vectors(tmp_path: Path) -> None:
    """Sample vectors are the same every time and conform."""
    files = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    for file in files:
        options = ["--role", "value", "--pages", "3", "--heads", "2", "--head-dim", "80", "--steps", "4"]
        assert conformance_vectors.main(["--make-vectors", file, *options]) == 0
    first, second = (conformance_vectors.load_vectors(file) for file in files)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert conformance_vectors.main(["--vectors", files[0], "--implementation", "oracle"]) == 0
