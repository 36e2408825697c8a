"""The report counts what it compares, finds what differs, and says what did not run."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from parity_tests import report, rows
from parity_tests.implementations import FRAMEWORKS, IMPLEMENTATIONS, Framework

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
    shapes = {(case.role, case.heads, case.head_dim) for case in cases}
    assert len(shapes) == 2 * len(rows.HEAD_COUNTS) * len(rows.HEAD_DIMS)
    assert len({(case.role, case.heads, case.head_dim, case.basis) for case in cases}) == len(cases)


def test_caches(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of each package; a wrong byte is counted and named."""
    monkeypatch.setattr(report, "FRAMEWORKS", {framework.name: framework})
    monkeypatch.setattr(report, "CACHE_LENGTHS", (1, 390))
    monkeypatch.setattr(report, "CACHE_WRITES", {"chunks of 130": 130})
    (tally,) = report.compare_caches(["cpu"], {})
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
    (tally,) = report.compare_caches(["cpu"], {})
    assert tally.differences == 2 * 64 and tally.first_difference == "key_scale of sequence 1 (length 390)"


def test_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both files, the printed page, and the exit status."""
    one_case = [report.Case("value", 1, 64, "hadamard", True, 0)]
    monkeypatch.setattr(report, "make_cases", lambda codes: one_case)
    monkeypatch.setattr(report, "compare_caches", lambda devices, missing: [])
    for implementation, status in ((ORACLE, 0), (WRONG, 1)):
        monkeypatch.setattr(report, "available_voices", lambda *_, one=implementation: ([(one, "cpu")], {}))
        assert report.main(["--out", str(tmp_path)]) == status
        written = json.loads((tmp_path / "report.json").read_text())
        assert written["differences"] == 2 * status and written["pages"][0]["codes"] == 131072
        assert (tmp_path / "report.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--codes", "0"], ["--codes", "many"], ["--implementations", "cuda"], ["--devices", "tpu"]]
)
def test_bad_arguments(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        report.main(["--out", str(tmp_path), *arguments])
    assert error.value.code == 2 and "allowed" in capsys.readouterr().err


def test_missing_devices_are_named() -> None:
    """What cannot run here is listed with its reason."""
    voices, missing = report.available_voices(["xla", "torch"], ["cpu", "gpu"])
    known = {f"{one.name} on {device}" for one, device in voices} | missing.keys()
    assert known == {"xla on cpu", "xla on gpu", "torch on cpu", "torch on gpu"}
    assert all(FRAMEWORKS["jax" if "xla" in name else "torch"].name in why for name, why in missing.items())
