"""Parity report: which implementation ran where, how many bytes were compared with the oracle, what differed.

    python -m parity_tests.report --out DIR [--codes 1e8] [--implementations xla,torch] [--devices cpu,gpu]

Every implementation quantizes the same rows as the NumPy oracle: all row families, bases, head dimensions and
head counts, keys and values. Then the caches of both packages are filled in one go, in chunks and token by
token, ragged, and compared with the oracle's layout. Writes report.md and report.json; exits 1 on any
difference, 2 on bad arguments.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from parity_tests import oracle, rows
from parity_tests.conformance import compare_outputs
from parity_tests.implementations import DEVICES, FRAMEWORKS, IMPLEMENTATIONS, Implementation, PackageCache

PAGES_PER_CASE = 32  # two of every row family
CACHE_LENGTHS = (1, 64, 321, 384, 700, 1000)
CACHE_WRITES = {"one go": 1000, "chunks of 100": 100, "token by token": 1}
SLOW_PAGES = 1  # of every case, in turn: what interpreted kernels can do in the time of a report


@dataclasses.dataclass
class Tally:
    """What one implementation on one device was compared on."""

    implementation: str
    device: str
    versions: dict[str, str]
    codes: int = 0
    scales: int = 0
    bytes: int = 0
    differences: int = 0
    cases: int = 0
    seconds: float = 0.0
    first_difference: str | None = None

    def add(self, expected: dict[str, np.ndarray], got: dict[str, np.ndarray], role: str, case: str) -> None:
        """Counts one case: codes, scales, and the stored bytes (words, scales, page means)."""
        self.cases += 1
        self.codes += expected["codes"].size
        self.scales += expected["scale"].size
        self.bytes += sum(array.nbytes for name, array in expected.items() if name != "codes")
        self.differences += sum(int((got[name] != array).sum()) for name, array in expected.items())
        difference = compare_outputs(role, got, expected)
        if difference and self.first_difference is None:
            self.first_difference = f"{case}: {difference}"


@dataclasses.dataclass
class CacheTally:
    """What the cache of one package on one device was compared on."""

    package: str
    device: str
    writing: str
    sequences: int = 0
    bytes: int = 0
    differences: int = 0
    first_difference: str | None = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of vectors; `seed` makes it reproducible."""

    role: str
    heads: int
    head_dim: int
    basis: str
    shared: bool
    seed: int

    def vectors(self, pages: int = PAGES_PER_CASE) -> dict[str, np.ndarray]:
        return rows.sample_vectors(
            self.role, self.seed, pages, self.heads, self.head_dim, self.basis, self.shared
        )

    def __str__(self) -> str:
        matrices = "shared" if self.shared else "per head"
        return f"{self.role} K={self.heads} D={self.head_dim} {self.basis} {matrices} seed={self.seed}"


def make_cases(codes: float, head_dims: Sequence[int] = rows.HEAD_DIMS) -> list[Case]:
    """Cases that hold at least `codes` codes: every role, K and D in each round, bases in turn."""
    cases: list[Case] = []
    total, seed, turn = 0, 0, 0
    bases = list(rows.TRANSFORMS)
    while total < codes:
        turn += 1  # so that the next round meets every shape with another basis
        for head_dim in head_dims:
            for heads in rows.HEAD_COUNTS:
                for role in ("key", "value"):
                    # sharing depends on K, so that a compiler sees few shapes
                    cases.append(
                        Case(role, heads, head_dim, bases[(seed + turn) % len(bases)], heads == 2, seed)
                    )
                    total += 64 * PAGES_PER_CASE * heads * head_dim
                    seed += 1
    return cases


def available_voices(
    names: Sequence[str], devices: Sequence[str]
) -> tuple[list[tuple[Implementation, str]], dict[str, str]]:
    """Implementations and devices that can run here, and the reasons why the others cannot."""
    voices, missing = [], {}
    for name in names:
        for device in devices:
            implementation = IMPLEMENTATIONS[name]
            if device not in implementation.devices:
                continue
            reason = implementation.why_not(device)
            if reason:
                missing[f"{name} on {device}"] = reason
            else:
                voices.append((implementation, device))
    return voices, missing


def compare_pages(cases: Sequence[Case], voices: Sequence[tuple[Implementation, str]]) -> list[Tally]:
    """Quantizes every case with the oracle and every voice, and counts."""
    tallies = [Tally(one.name, device, one.versions(device)) for one, device in voices]
    with progress("pages", len(cases)) as advance:
        for number, case in enumerate(cases):
            vectors = case.vectors()
            arrays = [vectors.get(name) for name in ("rows", "transform", "multiplier", "mean")]
            expected = IMPLEMENTATIONS["oracle"].quantize_pages(case.role, *arrays)  # type: ignore
            for (implementation, device), tally in zip(voices, tallies):
                if not implementation.supports(case.head_dim):
                    continue
                asked, want = arrays, expected
                if implementation.slow:
                    chosen = [(number + i) % PAGES_PER_CASE for i in range(SLOW_PAGES)]
                    asked = [take_pages(vectors["rows"], chosen), *arrays[1:]]
                    want = {name: take_pages(array, chosen) for name, array in expected.items()}
                start = time.perf_counter()
                got = implementation.quantize_pages(case.role, *asked, device=device)  # type: ignore
                tally.seconds += time.perf_counter() - start
                tally.add(want, got, case.role, str(case))
            advance()
    return tallies


def take_pages(array: np.ndarray, pages: Sequence[int]) -> np.ndarray:
    """Some pages of an array whose first axis counts pages, or 64 rows a page."""
    by_page = array.reshape(PAGES_PER_CASE, -1, *array.shape[1:])
    return by_page[list(pages)].reshape(-1, *array.shape[1:])


def compare_caches(devices: Sequence[str], missing: dict[str, str]) -> list[CacheTally]:
    """Fills a ragged cache of each package in different ways and compares all stored bytes."""
    rng = np.random.default_rng(64)
    heads, head_dim, longest = 2, 128, max(CACHE_LENGTHS)
    batch = len(CACHE_LENGTHS)
    shape = (batch, longest, heads, head_dim)
    key, value = (
        np.stack([rows.mixed_rows(rng, (1024, *shape[2:]))[:longest] for _ in range(batch)]) for _ in range(2)
    )
    rotation = rows.make_rotation(rng, heads, head_dim)
    expected = [
        oracle.store_sequence(key[b, :length], value[b, :length], rotation).arrays()
        for b, length in enumerate(CACHE_LENGTHS)
    ]
    tallies: list[CacheTally] = []
    for framework in FRAMEWORKS.values():
        for device in devices:
            reason = framework.why_not(device)
            if reason:
                missing[f"cache of {framework.package} on {device}"] = reason
                continue
            for writing, chunk in CACHE_WRITES.items():
                tally = CacheTally(framework.package, device, writing)
                cache = PackageCache(framework, rotation, batch, longest, device)
                with progress(f"{framework.package} {device} {writing}", -(-longest // chunk)) as advance:
                    for start in range(0, longest, chunk):
                        counts = np.clip(np.array(CACHE_LENGTHS) - start, 0, chunk)
                        stop = start + chunk
                        cache.append(key[:, start:stop], value[:, start:stop], counts)
                        advance()
                for b, want in enumerate(expected):
                    tally.sequences += 1
                    for name, array in cache.sequence(b).arrays().items():
                        tally.bytes += want[name].nbytes
                        unequal = array != want[name] if array.shape == want[name].shape else np.True_
                        tally.differences += int(np.sum(unequal))
                        if np.any(unequal) and tally.first_difference is None:
                            tally.first_difference = f"{name} of sequence {b} (length {CACHE_LENGTHS[b]})"
                tallies.append(tally)
    return tallies


@contextmanager
def progress(label: str, total: int) -> Iterator[Any]:
    """A progress bar where rich is installed and the output is a terminal, otherwise a line now and then."""
    try:
        from rich.progress import Progress
    except ImportError:
        Progress = None
    if Progress is not None and sys.stderr.isatty():
        from rich.console import Console

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda: bar.advance(task)
        return
    start = last = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal last, done
        done += 1
        now = time.monotonic()
        if now - last >= 10 or done == total:
            print(f"{label}: {done} of {total}, {now - start:.0f} s", file=sys.stderr, flush=True)
            last = now

    yield advance


def make_report(
    pages: Sequence[Tally], caches: Sequence[CacheTally], missing: dict[str, str], cases: int
) -> dict[str, Any]:
    """Everything the report says, as JSON-ready values."""
    return {
        "format": "oscar-int2/1",
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "oracle": IMPLEMENTATIONS["oracle"].versions("cpu"),
        "cases": cases,
        "row_families": list(rows.ROW_FAMILIES),
        "bases": list(rows.TRANSFORMS),
        "head_dims": list(rows.HEAD_DIMS),
        "key_value_heads": list(rows.HEAD_COUNTS),
        "pages": [dataclasses.asdict(tally) for tally in pages],
        "caches": [dataclasses.asdict(tally) for tally in caches],
        "not_run": missing,
        "differences": sum(tally.differences for tally in (*pages, *caches)),
    }


def to_markdown(report: dict[str, Any]) -> str:
    """The report as a page to read."""
    lines = [
        "# Parity report",
        "",
        f"Format `{report['format']}`, {report['created']}, {report['machine']['system']}, "
        f"Python {report['machine']['python']}, oracle: NumPy {report['oracle']['numpy']} on "
        f"{report['oracle']['device']}.",
        "",
        f"**{report['differences']} differences.** {report['cases']} cases; head_dim "
        f"{', '.join(map(str, report['head_dims']))}; key/value heads "
        f"{', '.join(map(str, report['key_value_heads']))}; bases {', '.join(report['bases'])}; "
        f"rows: {', '.join(report['row_families'])}.",
        "",
        "## Pages against the oracle",
        "",
        "| implementation | device | versions | cases | codes | scales | bytes | differences | seconds |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for one in report["pages"]:
        versions = dict(one["versions"])
        where = f"{one['device']}: {versions.pop('device')}"
        lines.append(
            f"| {one['implementation']} | {where} | {', '.join(f'{k} {v}' for k, v in versions.items())} "
            f"| {one['cases']} | {one['codes']:,} | {one['scales']:,} | {one['bytes']:,} "
            f"| {one['differences']} | {one['seconds']:.1f} |"
        )
    lines += [
        "",
        "Bytes are those a cache stores: words, scales and page means. Seconds include compilation and "
        "copies; they are not a benchmark.",
        "",
        f"## Caches against the oracle (ragged batch, lengths {', '.join(map(str, CACHE_LENGTHS))})",
        "",
        "| package | device | written in | sequences | bytes | differences |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {one['package']} | {one['device']} | {one['writing']} | {one['sequences']} | {one['bytes']:,} "
        f"| {one['differences']} |"
        for one in report["caches"]
    ]
    found = [one for one in (*report["pages"], *report["caches"]) if one["first_difference"]]
    if found:
        lines += ["", "## First differences", ""]
        lines += [
            f"- {one.get('implementation') or one['package']} on {one['device']}: {one['first_difference']}"
            for one in found
        ]
    if report["not_run"]:
        lines += ["", "## Not run", ""]
        lines += [f"- {name}: {reason}" for name, reason in report["not_run"].items()]
    return "\n".join(lines) + "\n"


def _names(text: str, allowed: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: {', '.join(allowed)}")
    return names


def _count(text: str) -> float:
    try:
        count = float(text)
    except ValueError:
        count = -1.0
    if not 1 <= count <= 1e12:
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: 1 to 1e12")
    return count


def make_parser() -> argparse.ArgumentParser:
    """The command line, documented at the top of this file."""
    others = [name for name in IMPLEMENTATIONS if name != "oracle"]
    parser = argparse.ArgumentParser(
        prog="python -m parity_tests.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for report.md and report.json")
    parser.add_argument("--codes", type=_count, default=1e8, help="at least so many codes each (default 1e8)")
    parser.add_argument(
        "--implementations",
        type=lambda text: _names(text, others),
        default=others,
        help=f"comma-separated, of {', '.join(others)} (default: all that can run)",
    )
    parser.add_argument(
        "--devices",
        type=lambda text: _names(text, DEVICES),
        default=list(DEVICES),
        help="comma-separated, of cpu, gpu (default: all that can be used)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = make_parser().parse_args(arguments)
    voices, missing = available_voices(options.implementations, options.devices)
    if not voices:
        print(f"nothing can run here: {missing}", file=sys.stderr)
        return 2
    cases = make_cases(options.codes)
    pages = compare_pages(cases, voices)
    caches = compare_caches(options.devices, missing)
    report = make_report(pages, caches, missing, len(cases))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    markdown = to_markdown(report)
    (options.out / "report.md").write_text(markdown)
    print(markdown)
    return 1 if report["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
