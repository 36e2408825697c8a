"""The report counts what it compares, finds what differs, and says what did not run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from parity_tests.conformance import capture_rows, oracle, report, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework
from parity_tests.conformance.implementations import IMPLEMENTATIONS

ORACLE = IMPLEMENTATIONS["oracle"]


def wrong_pages(*arguments) -> dict[str, np.ndarray]:
    """The oracle's answer with one code and its word changed."""
    result = ORACLE.run(*arguments)
    result["codes"][3, 0, 5] ^= 1
    result["words"][0, 0, 3, 0] ^= 1 << 10
    return result


WRONG = dataclasses.replace(ORACLE, name="wrong", run=wrong_pages)
SLOW = dataclasses.replace(ORACLE, name="slow", slow=True)


def test_pages() -> None:
    """Equal and unequal implementations, and slow ones that get some pages only."""
    cases = [report.Case(role, 1, 64, "identity", True, seed) for seed, role in enumerate(("key", "value"))]
    right, wrong, slow = report.compare_pages(cases[:1], [(one, "cpu") for one in (ORACLE, WRONG, SLOW)])
    pages = report.PAGES_PER_CASE
    assert right.codes == pages * 64 * 64 and right.scales == pages * 64 and right.differences == 0
    assert right.bytes == pages * (64 * 4 * 4 + 64 * 2 + 64 * 2)
    assert wrong.differences == 2 and "page 0, token 3, head 0, channel 5" in (wrong.first_difference or "")
    assert slow.codes == report.SLOW_PAGES * 64 * 64 and slow.differences == 0
    (values,) = report.compare_pages(cases, [(SLOW, "cpu")])
    assert values.cases == 2 and values.differences == 0


def test_cases() -> None:
    """At least the number of codes asked for; every role, K and D; every shape meets several bases."""
    cases = report.make_cases(1e8)
    assert sum(case.heads * case.head_dim for case in cases) * 64 * report.PAGES_PER_CASE >= 1e8
    shapes = set(map(_shape, cases))
    wide = sum(head_dim >= 32 for head_dim in rows.HEAD_DIMS)  # two blocks and more: sequential too
    assert len(shapes) == 2 * len(rows.HEAD_COUNTS) * (len(rows.HEAD_DIMS) + wide)
    assert len({(*_shape(case), case.basis) for case in cases}) == len(cases)
    assert all(case.steps for case in report.make_cases(1e6, (64,), (1,), roundings=("sequential",)))
    assert not report.make_cases(1e6, (16,), (1,), roundings=("sequential",))


def _shape(case: report.Case) -> tuple:
    return case.role, case.heads, case.head_dim, case.steps


def test_sequential_pages() -> None:
    """Sequential cases are asked of those that round sequentially, and counted."""
    case = report.Case("key", 1, 64, "identity", True, 0, steps=4)
    nearest = dataclasses.replace(WRONG, name="nearest", sequential_head_dim=0)
    right, left_out = report.compare_pages([case], [(ORACLE, "cpu"), (nearest, "cpu")])
    assert right.codes == right.sequential_codes == case.codes and right.differences == 0
    assert left_out.cases == left_out.sequential_codes == 0
    plain = case.vectors()["rows"], case.vectors()["transform"], case.vectors()["multiplier"]
    fed = rows.feedback_of(case.vectors())
    nearest_codes, codes = (oracle.quantize_pages("key", *plain, None, f)["codes"] for f in (None, fed))
    assert (nearest_codes != codes).any()


def test_caches(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of each package; a wrong byte is counted and named."""
    monkeypatch.setattr(report, "FRAMEWORKS", {framework.name: framework})
    monkeypatch.setattr(report, "CACHE_LENGTHS", (1, 390))
    monkeypatch.setattr(report, "CACHE_WRITES", {"chunks of 130": 130})
    missing: dict[str, str] = {}
    task, _forked = report.make_cache_tasks(["cpu"], missing)
    assert task == (framework.name, "cpu", framework.reference, "chunks of 130") and not missing
    tally = report.compare_cache(task)
    assert tally.sequences == 2 and tally.differences == 0
    raw_rows = (1 + 390 - 64) * 2 * 2 * 128 * 2
    assert tally.bytes == raw_rows + 2 * (34 * 128 + 256)
    field = report.PackageCache.field

    def broken(self: report.PackageCache, name: str) -> np.ndarray:
        array = field(self, name).copy()
        if name == "key_scale":
            array[2] ^= 1  # the second sequence owns the second page
        return array

    monkeypatch.setattr(report.PackageCache, "field", broken)
    tally = report.compare_cache(task)
    assert tally.differences == 2 * 64 and tally.first_difference == "key_scale of sequence 1 (length 390)"


def test_forks(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked sequences that grow apart hold the oracle's bytes; every length and every array counts."""
    monkeypatch.setattr(report, "CACHE_HEADS", 1)
    monkeypatch.setattr(report, "CACHE_HEAD_DIM", 32)
    tally = report.compare_cache((framework.name, "cpu", framework.reference, report.FORKED))
    assert tally.sequences == 4 and tally.differences == 0
    lengths = (500 + 300 + 70, 500 + 170 + 1, 500 + 200, 500 + 170 + 333)
    pages = sum((length - 320) // 64 for length in lengths)
    raw_rows = sum(lengths) - 64 * pages
    assert tally.bytes == pages * (34 * 32 + 256) + raw_rows * 2 * 32 * 2


def test_kernels_are_missing_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every kernel that writes caches is asked for; what cannot run says why."""
    missing: dict[str, str] = {}
    tasks = report.make_cache_tasks(["gpu"], missing)
    ran = {(name, implementation) for name, _, implementation, _ in tasks}
    wanted = {("jax", "xla"), ("jax", "mosaic_gpu")} | {("torch", k) for k in ("eager", "triton", "gluon")}
    assert len(ran) + len(missing) == len(wanted) and ran <= wanted
    assert all(missing.values())


def test_lanes() -> None:
    """Every case in exactly one lane, lanes of like size and, with as many lanes as shapes, of one shape."""
    cases = report.make_cases(1e9, (64, 128, 256), (8,), 4e6)
    assert {case.codes for case in cases} == {2**22}
    lanes = report.make_lanes(cases, 6)
    assert sorted(str(case) for lane in lanes for case in lane) == sorted(map(str, cases))
    assert all(len({(case.role, case.head_dim) for case in lane}) == 1 for lane in lanes)
    assert max(map(len, lanes)) - min(map(len, lanes)) <= 1


def test_processes(tmp_path: Path) -> None:
    """Cases shared by processes give the tallies of one process; a passed deadline stops after one case."""
    cases = [report.Case("key", 1, 64, "identity", True, seed) for seed in range(3)]
    voices = [(IMPLEMENTATIONS["oracle"], "cpu")]
    parts, caches = report.run_tasks([cases[:1], cases[1:]], [], voices, 2, float("inf"))
    (merged,), (alone,) = report.merge_tallies(parts), report.compare_pages(cases, voices)
    assert caches == [] and merged.codes == alone.codes == 3 * report.PAGES_PER_CASE * 64 * 64
    (stopped,) = report.compare_pages(cases, voices, deadline=0)
    assert stopped.cases == 1


def test_real_rows(tmp_path: Path) -> None:
    """Captured rows are cut to pages, quantized as they are, and refused when they are something else."""
    rng = np.random.default_rng(0)
    layers = [tuple(np.asarray(rng.normal(0, 1, (1, 150, 2, 64)), np.float32) for _ in range(3))] * 2
    pytest.importorskip("jax")
    shape = capture_rows.save_rows(tmp_path / "rows.npz", "some model", layers)
    assert shape == (2, 128, 2, 64)
    cases = report.make_real_cases(tmp_path / "rows.npz")
    assert [(case.role, case.layer) for case in cases] == [("key", 0), ("key", 1), ("value", 0), ("value", 1)]
    want = oracle.to_bfloat16(layers[0][1][0, :128])
    assert (cases[0].vectors()["rows"] == want).all()
    (tally,) = report.compare_pages(cases, [(ORACLE, "cpu")])
    assert tally.codes == 4 * 128 * 2 * 64 and tally.differences == 0
    np.savez(tmp_path / "bad.npz", key=want)
    with pytest.raises(ValueError, match="no key uint16"):
        report.make_real_cases(tmp_path / "bad.npz")


def test_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both files, the printed page, and the exit status."""
    one_case = [report.Case("value", 1, 64, "hadamard", True, 0)]
    monkeypatch.setattr(report, "make_cases", lambda *_: one_case)
    monkeypatch.setattr(report, "make_cache_tasks", lambda devices, missing: [])
    for implementation, status in ((ORACLE, 0), (WRONG, 1)):
        monkeypatch.setattr(report, "available_voices", lambda *_, one=implementation: ([(one, "cpu")], {}))
        assert report.main(["--out", str(tmp_path)]) == status
        written = json.loads((tmp_path / "report.json").read_text())
        assert written["differences"] == 2 * status and written["pages"][0]["codes"] == 131072
        assert (tmp_path / "report.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--codes", "0"],
        ["--codes", "many"],
        ["--implementations", "cuda"],
        ["--devices", "tpu"],
        ["--head-dims", "100"],
        ["--heads", "0"],
        ["--jobs", "0"],
    ],
)
def test_bad_arguments(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        report.main(["--out", str(tmp_path), *arguments])
    assert error.value.code == 2 and "allowed" in capsys.readouterr().err


def test_missing_devices_are_named() -> None:
    """What cannot run here is listed with its reason."""
    voices, missing = report.available_voices(["xla", "eager"], ["cpu", "gpu"])
    known = {f"{one.name} on {device}" for one, device in voices} | missing.keys()
    assert known == {"xla on cpu", "xla on gpu", "eager on cpu", "eager on gpu"}
    assert all(FRAMEWORKS["jax" if "xla" in name else "torch"].name in why for name, why in missing.items())
