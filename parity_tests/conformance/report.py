"""Parity report: which implementation ran where, how many bytes were compared with the oracle, what differed.

    python -m parity_tests.conformance.report --out DIR [--codes 1e8] [--implementations xla,eager]
    python -m parity_tests.conformance.report --out results --name parity-h200 --devices gpu --codes 1e9 \\
        --head-dims 64,128,256 --heads 8 --case-codes 4e6 --jobs 12 --real-rows rows.npz

Every implementation quantizes the same rows as the NumPy oracle: all row families, bases, head dimensions and
head counts, keys and values, and rows captured from a model where given (`capture_rows.py`). Then the caches
of both packages are filled in one go, in chunks and token by token, ragged, and by forked sequences, with
every kernel that writes caches, and compared with the oracle's layout. Writes NAME.md and NAME.json; exits 1
on any difference, 2 on bad arguments.

The second form suits a GPU: few shapes, because a compiler works per shape; large cases; and processes that
share the cases, because the oracle takes most of the time.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import itertools
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import DEVICES, FRAMEWORKS, PackageCache
from parity_tests.conformance.implementations import IMPLEMENTATIONS, Implementation
from parity_tests.conformance.vectors import compare_outputs

ROUNDINGS = ("nearest", "sequential")
PAGES_PER_CASE = 32  # two of every row family
CACHE_HEADS, CACHE_HEAD_DIM = 2, 128
CACHE_LENGTHS = (1, 64, 321, 384, 700, 1000)
CACHE_WRITES = {"one go": 1000, "chunks of 100": 100, "token by token": 1}
CACHE_KERNELS = {"jax": ("mosaic_gpu",), "torch": ("gluon", "triton")}  # beside the reference, where they run
CACHE_WORKERS = 4  # processes for caches beside those for pages
FORKED = "forked, then diverging"
SEQUENTIAL = "token by token, sequential"  # by kernels: rotations with feedback
SLOW_PAGES = 1  # of every case, in turn: what interpreted kernels can do in the time of a report
AHEAD = 2  # cases whose oracle is computed ahead, in threads


@dataclasses.dataclass
class Tally:
    """What one implementation on one device was compared on."""

    implementation: str
    device: str
    versions: dict[str, str]
    codes: int = 0
    sequential_codes: int = 0  # of `codes`, those rounded sequentially
    scales: int = 0
    bytes: int = 0
    differences: int = 0
    cases: int = 0
    seconds: float = 0.0
    first_difference: str | None = None

    def add(
        self,
        expected: dict[str, np.ndarray],
        got: dict[str, np.ndarray],
        role: str,
        case: str,
        sequential: bool = False,
    ) -> None:
        """Counts one case: codes, scales, and the stored bytes (words, scales, page means)."""
        self.cases += 1
        self.sequential_codes += expected["codes"].size if sequential else 0
        self.codes += expected["codes"].size
        self.scales += expected["scale"].size
        self.bytes += sum(array.nbytes for name, array in expected.items() if name != "codes")
        self.differences += sum(int((got[name] != array).sum()) for name, array in expected.items())
        difference = compare_outputs(role, got, expected)
        if difference and self.first_difference is None:
            self.first_difference = f"{case}: {difference}"

    def merge(self, other: "Tally") -> None:
        """Adds what another process has counted for the same implementation and device."""
        for name in ("codes", "sequential_codes", "scales", "bytes", "differences", "cases", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_difference = self.first_difference or other.first_difference


@dataclasses.dataclass
class CacheTally:
    """What the cache of one package, written by one implementation on one device, was compared on."""

    package: str
    device: str
    implementation: str
    writing: str
    sequences: int = 0
    bytes: int = 0
    differences: int = 0
    first_difference: str | None = None

    def add(self, expected: dict[str, np.ndarray], got: dict[str, np.ndarray], sequence: str) -> None:
        """Counts the stored bytes of one sequence."""
        self.sequences += 1
        for name, array in got.items():
            self.bytes += expected[name].nbytes
            unequal = array != expected[name] if array.shape == expected[name].shape else np.True_
            self.differences += int(np.sum(unequal))
            if np.any(unequal) and self.first_difference is None:
                self.first_difference = f"{name} of {sequence}"


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of vectors; `seed` makes it reproducible."""

    role: str
    heads: int
    head_dim: int
    basis: str
    shared: bool
    seed: int
    pages: int = PAGES_PER_CASE
    steps: int = 0  # blocks of sequential rounding; 0: to the nearest

    @property
    def codes(self) -> int:
        return 64 * self.pages * self.heads * self.head_dim

    def vectors(self) -> dict[str, np.ndarray]:
        return rows.sample_vectors(
            self.role, self.seed, self.pages, self.heads, self.head_dim, self.basis, self.shared, self.steps
        )

    def __str__(self) -> str:
        matrices = "shared" if self.shared else "per head"
        rounding = f" in {self.steps} blocks" if self.steps else ""
        return (
            f"{self.role} K={self.heads} D={self.head_dim} {self.basis} {matrices}{rounding} seed={self.seed}"
        )


@dataclasses.dataclass(frozen=True)
class RealCase:
    """Keys or values of one layer of a model, from a file of `capture_rows.py`."""

    path: Path
    role: str
    layer: int
    basis: str
    head_dim: int
    pages: int
    steps: int = 0

    def vectors(self) -> dict[str, np.ndarray]:
        with np.load(self.path) as file:
            captured = file[self.role][self.layer]  # [T, K, D]
        heads, rng = captured.shape[1], np.random.default_rng(self.layer)
        mean = oracle.to_bfloat16(oracle.from_bfloat16(captured).mean(axis=0))
        transform = rows.TRANSFORMS[self.basis](rng, heads, self.head_dim)
        return rows.make_vectors(self.role, captured, transform, 371, mean)

    def __str__(self) -> str:
        return f"{self.role} of layer {self.layer} in {self.path.name} {self.basis}"


def make_cases(
    codes: float,
    head_dims: Sequence[int] = rows.HEAD_DIMS,
    head_counts: Sequence[int] = rows.HEAD_COUNTS,
    case_codes: float = 0,
    roundings: Sequence[str] = ROUNDINGS,
) -> list[Case]:
    """Cases that hold at least `codes` codes: every role, K, D and rounding in each round, bases in turn.

    A case has at least `case_codes` codes, and never fewer than two pages of every row family.
    """
    cases: list[Case] = []
    total, seed, turn = 0, 0, 0
    bases = list(rows.TRANSFORMS)
    while total < codes:
        turn += 1  # so that the next round meets every shape with another basis
        for head_dim in head_dims:
            for heads in head_counts:
                pages = PAGES_PER_CASE
                pages *= max(1, math.ceil(case_codes / (64 * pages * heads * head_dim)))
                for role, rounding in itertools.product(("key", "value"), roundings):
                    steps = min(4, head_dim // 16) if rounding == "sequential" else 0
                    if steps == 1:  # one block: nothing is left to correct
                        continue
                    # sharing depends on K, so that a compiler sees few shapes
                    basis = bases[(seed + turn) % len(bases)]
                    cases.append(Case(role, heads, head_dim, basis, heads == 2, seed, pages, steps))
                    total += cases[-1].codes
                    seed += 1
        if not cases:
            break  # no head_dim here has two blocks
    return cases


def make_real_cases(path: Path) -> list[RealCase]:
    """Both roles of every layer in the file; raises ValueError for a file of another kind."""
    cases = []
    with np.load(path) as file:
        for role in ("key", "value"):
            if role not in file or file[role].dtype != np.uint16 or file[role].ndim != 4:
                raise ValueError(f"{path} has no {role} uint16 [layers, T, K, D]")
            layers, tokens, _, head_dim = file[role].shape
            if tokens % 64 or not tokens:
                raise ValueError(f"{path}: {tokens} rows of {role}, allowed: multiples of 64")
            for layer in range(layers):
                basis = ("hadamard", "orthogonal")[layer % 2]
                cases.append(RealCase(path, role, layer, basis, head_dim, tokens // 64))
    return cases


def make_lanes(cases: Sequence[Case], lanes: int) -> list[list[Case]]:
    """The cases in `lanes` parts of like size, each of few shapes."""
    parts: list[list[Case]] = [[] for _ in range(lanes)]
    total, done = sum(case.codes for case in cases), 0
    for case in sorted(cases, key=lambda case: (case.head_dim, case.heads, case.role)):
        parts[done * lanes // total].append(case)
        done += case.codes
    return [part for part in parts if part]


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


def compare_pages(
    cases: Sequence[Case | RealCase],
    voices: Sequence[tuple[Implementation, str]],
    deadline: float = math.inf,
) -> list[Tally]:
    """Quantizes every case with the oracle and every voice, and counts; starts none after `deadline`.

    `deadline` is a time of `time.time()`, which all processes share.
    """
    tallies = [Tally(one.name, device, one.versions(device)) for one, device in voices]
    with progress("pages", len(cases)) as advance:
        for number, (case, vectors, expected) in enumerate(with_oracle(cases)):
            arrays = [vectors.get(name) for name in ("rows", "transform", "multiplier", "mean")]
            for (implementation, device), tally in zip(voices, tallies):
                if not implementation.supports(case.head_dim, case.steps > 0):
                    continue
                asked, want = arrays, expected
                if implementation.slow:
                    chosen = [(number + i) % case.pages for i in range(SLOW_PAGES)]
                    asked = [take_pages(vectors["rows"], case.pages, chosen), *arrays[1:]]
                    want = {name: take_pages(array, case.pages, chosen) for name, array in expected.items()}
                start = time.perf_counter()
                fed = rows.feedback_of(vectors)
                got = implementation.quantize_pages(case.role, *asked, device, fed)  # type: ignore
                tally.seconds += time.perf_counter() - start
                tally.add(want, got, case.role, str(case), case.steps > 0)
            advance()
            if time.time() > deadline:
                break
    return tallies


def with_oracle(
    cases: Sequence[Case | RealCase],
) -> Iterator[tuple[Case | RealCase, dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Every case with its vectors and the oracle's arrays; NumPy works ahead while the voices run."""

    def compute(case: Case | RealCase) -> tuple:
        vectors = case.vectors()
        arrays = [vectors.get(name) for name in ("rows", "transform", "multiplier", "mean")]
        return case, vectors, oracle.quantize_pages(case.role, *arrays, rows.feedback_of(vectors))  # type: ignore

    rest = iter(cases)
    with concurrent.futures.ThreadPoolExecutor(AHEAD) as pool:
        waiting = collections.deque(pool.submit(compute, case) for case in itertools.islice(rest, AHEAD))
        while waiting:
            yield waiting.popleft().result()
            waiting.extend(pool.submit(compute, case) for case in itertools.islice(rest, 1))


def take_pages(array: np.ndarray, pages: int, chosen: Sequence[int]) -> np.ndarray:
    """Some of the `pages` pages of an array whose first axis counts pages, or 64 rows a page."""
    by_page = array.reshape(pages, -1, *array.shape[1:])
    return by_page[list(chosen)].reshape(-1, *array.shape[1:])


# What a cache comparison is: framework, device, implementation, way of writing.
CacheTask = tuple[str, str, str, str]


def make_cache_tasks(devices: Sequence[str], missing: dict[str, str]) -> list[CacheTask]:
    """Every package, device, implementation that can write a cache here, and way of writing.

    Kernels come first: they take longest. What cannot run is added to `missing` with its reason.
    """
    tasks: list[CacheTask] = []
    kernels = [(name, kernel) for name in FRAMEWORKS for kernel in CACHE_KERNELS[name]]
    references = [(name, framework.reference) for name, framework in FRAMEWORKS.items()]
    for name, implementation in (*kernels, *references):
        framework, known = FRAMEWORKS[name], (name, implementation) in kernels
        for device in devices:
            if known and device not in IMPLEMENTATIONS[implementation].devices:
                continue
            reason = (IMPLEMENTATIONS[implementation] if known else framework).why_not(device)
            if reason:
                missing[f"cache of {framework.package} by {implementation} on {device}"] = reason
            else:
                ways = (*CACHE_WRITES, FORKED, SEQUENTIAL) if known else (*CACHE_WRITES, FORKED)
                tasks += [(name, device, implementation, way) for way in ways]
    return tasks


def compare_cache(task: CacheTask) -> CacheTally:
    """Fills caches of one package in one way and compares all stored bytes with the oracle's."""
    name, device, implementation, writing = task
    tally = CacheTally(FRAMEWORKS[name].package, device, implementation, writing)
    compare = compare_forks if writing == FORKED else compare_writes
    compare(tally, FRAMEWORKS[name])
    return tally


def cache_rows(rng: np.random.Generator, batch: int, tokens: int) -> list[np.ndarray]:
    """Key and value rows of every family, bits [batch, tokens, K, D]."""
    shape = (64 * -(-tokens // 64), CACHE_HEADS, CACHE_HEAD_DIM)
    return [np.stack([rows.mixed_rows(rng, shape)[:tokens] for _ in range(batch)]) for _ in range(2)]


def compare_writes(tally: CacheTally, framework: Any) -> None:
    """A ragged batch, appended in chunks of one size."""
    rng = np.random.default_rng(64)
    batch, longest, chunk = len(CACHE_LENGTHS), max(CACHE_LENGTHS), CACHE_WRITES.get(tally.writing, 1)
    key, value = cache_rows(rng, batch, longest)
    rotation = rows.make_rotation(rng, CACHE_HEADS, CACHE_HEAD_DIM)
    feedback: dict[str, oracle.Feedback] = {}
    cache = PackageCache(
        framework, rotation, batch, longest, tally.device, implementation=tally.implementation
    )
    if tally.writing == SEQUENTIAL:
        for role in ("key", "value"):
            vectors = rows.sample_vectors(role, 66, 1, CACHE_HEADS, CACHE_HEAD_DIM, steps=4)
            feedback[role] = oracle.Feedback(vectors["feedback"], vectors["feedback_shift"], 4)
        cache.feed(feedback)
    label = f"{tally.package} {tally.implementation} {tally.device} {tally.writing}"
    with progress(label, -(-longest // chunk)) as advance:
        for start in range(0, longest, chunk):
            counts = np.clip(np.array(CACHE_LENGTHS) - start, 0, chunk)
            cache.append(key[:, start : start + chunk], value[:, start : start + chunk], counts)
            advance()
    for b, length in enumerate(CACHE_LENGTHS):
        stored = oracle.store_sequence(key[b, :length], value[b, :length], rotation, feedback=feedback)
        want = stored.arrays()
        tally.add(want, cache.sequence(b).arrays(), f"sequence {b} (length {length})")


def compare_forks(tally: CacheTally, framework: Any) -> None:
    """Sequences of a pool that fork, and fork again, and then grow apart in ragged batches."""
    rng = np.random.default_rng(65)
    rotation = rows.make_rotation(rng, CACHE_HEADS, CACHE_HEAD_DIM)
    config = framework.module("core.config").CacheConfig(CACHE_HEADS, CACHE_HEADS, CACHE_HEAD_DIM)
    pool = framework.module("serving.sequence_pool").SequencePool(
        [config],
        [framework.layer_rotation(rotation, tally.device)],
        model_id="parity report",
        max_length=1100,
        device=framework.place(tally.device),
    )
    written: dict[int, list[list[np.ndarray]]] = {}

    def append(counts: dict[int, int]) -> None:
        key, value = cache_rows(rng, len(counts), max(counts.values()))
        arrays = [[framework.bfloat16(array, tally.device)] for array in (key, value)]
        pool.append(list(counts), *arrays, counts=list(counts.values()), implementation=tally.implementation)
        for b, (sequence, count) in enumerate(counts.items()):
            written[sequence].append([key[b, :count], value[b, :count]])

    def fork(sequence: int) -> int:
        copy = pool.fork(sequence)
        written[copy] = list(written[sequence])
        return copy

    first = pool.create()
    written[first] = []
    append({first: 500})
    second, third = fork(first), fork(first)
    append({first: 300, second: 170, third: 0})
    fourth = fork(second)
    append({fourth: 333, third: 200, second: 1, first: 70})
    for sequence, parts in written.items():
        key, value = (np.concatenate(rows_of_role) for rows_of_role in zip(*parts))
        want = oracle.store_sequence(key, value, rotation).arrays()
        got = {name: framework.numpy(array) for name, array in pool.sequence_arrays(sequence, 0).items()}
        for role in ("key", "value"):  # window pages [w, K, 64, D] in token order: the sink, then recent
            window = got.pop(f"window_{role}").transpose(0, 2, 1, 3).reshape(-1, *key.shape[1:])
            sink, recent = want[f"sink_{role}"], want[f"recent_{role}"]
            got[f"sink_{role}"] = window[: len(sink)]
            got[f"recent_{role}"] = window[len(sink) : len(sink) + len(recent)]
        tally.add(want, got, f"sequence {sequence} (length {len(key)})")


# --- processes --------------------------------------------------------------------------------------


def _lane(
    cases: Sequence[Case | RealCase], voices: Sequence[tuple[str, str]], deadline: float
) -> list[Tally]:
    """`compare_pages` in a process of its own, where implementations go by name."""
    return compare_pages(cases, [(IMPLEMENTATIONS[name], device) for name, device in voices], deadline)


def run_tasks(
    lanes: Sequence[Sequence[Case | RealCase]],
    caches: Sequence[CacheTask],
    voices: Sequence[tuple[Implementation, str]],
    jobs: int,
    deadline: float,
) -> tuple[list[list[Tally]], list[CacheTally]]:
    """All comparisons, in this process or, with more than one job, in that many and some for the caches."""
    if jobs == 1:
        pages = [compare_pages(lane, voices, deadline) for lane in lanes]
        return pages, [compare_cache(task) for task in caches]
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # the processes are the parallelism
    names = [(one.name, device) for one, device in voices]
    context = multiprocessing.get_context("spawn")  # a forked child cannot use the parent's GPU
    with concurrent.futures.ProcessPoolExecutor(jobs + CACHE_WORKERS, mp_context=context) as pool:
        page_futures = [pool.submit(_lane, lane, names, deadline) for lane in lanes]
        cache_futures = [pool.submit(compare_cache, task) for task in caches]
        return [one.result() for one in page_futures], [one.result() for one in cache_futures]


def merge_tallies(parts: Sequence[Sequence[Tally]]) -> list[Tally]:
    """One tally per voice."""
    merged = [dataclasses.replace(tally) for tally in parts[0]]
    for part in parts[1:]:
        for mine, other in zip(merged, part):
            mine.merge(other)
    return merged


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
    cases: Sequence[Case],
    pages: Sequence[Tally],
    real_rows: dict[str, Any] | None,
    caches: Sequence[CacheTally],
    missing: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    """Everything the report says, as JSON-ready values."""
    real = [] if real_rows is None else real_rows["pages"]
    return {
        "format": "oscar-int2/1",
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m parity_tests.conformance.report", *sys.argv[1:]]),
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "processors": os.cpu_count(),
        },
        "oracle": IMPLEMENTATIONS["oracle"].versions("cpu"),
        "compared_with": "oracle",
        "cases": len(cases),
        "row_families": list(rows.ROW_FAMILIES),
        "roundings": sorted({ROUNDINGS[case.steps > 0] for case in cases}),
        "bases": [basis for basis in rows.TRANSFORMS if any(case.basis == basis for case in cases)],
        "head_dims": sorted({case.head_dim for case in cases}),
        "key_value_heads": sorted({case.heads for case in cases}),
        "pages": [dataclasses.asdict(tally) for tally in pages],
        "real_rows": real_rows and {**real_rows, "pages": [dataclasses.asdict(tally) for tally in real]},
        "caches": [dataclasses.asdict(tally) for tally in caches],
        "not_run": missing,
        "codes": sum(tally.codes for tally in (*pages, *real)),
        "differences": sum(tally.differences for tally in (*pages, *real, *caches)),
        "seconds": round(seconds, 1),
    }


def _page_table(pages: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        "| implementation | device | versions | compared with | cases | codes | of them sequential | scales "
        "| bytes | differences | seconds |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in pages:
        versions = dict(one["versions"])
        where = f"{one['device']}: {versions.pop('device')}"
        lines.append(
            f"| {one['implementation']} | {where} | {', '.join(f'{k} {v}' for k, v in versions.items())} "
            f"| oracle | {one['cases']} | {one['codes']:,} | {one['sequential_codes']:,} "
            f"| {one['scales']:,} | {one['bytes']:,} | {one['differences']} | {one['seconds']:.1f} |"
        )
    return lines


def to_markdown(report: dict[str, Any]) -> str:
    """The report as a page to read."""
    real = report["real_rows"]
    lines = [
        "# Parity report",
        "",
        f"Format `{report['format']}`, {report['created']}, {report['machine']['system']}, "
        f"{report['machine']['processors']} processors, Python {report['machine']['python']}, oracle: NumPy "
        f"{report['oracle']['numpy']} on {report['oracle']['device']}. {report['seconds']:.0f} s. "
        f"`{report['command']}`",
        "",
        f"**{report['differences']} differences in {report['codes']:,} codes** of all implementations, "
        f"each compared with the NumPy oracle's. {report['cases']} cases planned; head_dim "
        f"{', '.join(map(str, report['head_dims']))}; key/value heads "
        f"{', '.join(map(str, report['key_value_heads']))}; rounding {', '.join(report['roundings'])}; "
        f"bases {', '.join(report['bases'])}; "
        f"rows: {', '.join(report['row_families'])}.",
        "",
        "## Pages of random and hostile rows",
        "",
        *_page_table(report["pages"]),
        "",
        "Bytes are those a cache stores: words, scales and page means. Seconds are summed over processes and "
        "include compilation and copies; they are not a benchmark. An implementation skips cases whose "
        "head_dim or rounding it does not serve; interpreted ones get one page of each case.",
    ]
    if real:
        lines += ["", f"## Pages of real rows ({real['model']}, {real['layers']} layers)", ""]
        lines += _page_table(real["pages"])
    lines += [
        "",
        f"## Caches (ragged batch of lengths {', '.join(map(str, CACHE_LENGTHS))}, and forked sequences)",
        "",
        "| package | device | written by | written in | compared with | sequences | bytes | differences |",
        "|---|---|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {one['package']} | {one['device']} | {one['implementation']} | {one['writing']} | oracle "
        f"| {one['sequences']} | {one['bytes']:,} | {one['differences']} |"
        for one in report["caches"]
    ]
    tallies = (*report["pages"], *(real["pages"] if real else ()), *report["caches"])
    found = [one for one in tallies if one["first_difference"]]
    if found:
        lines += ["", "## First differences", ""]
        lines += [f"- {one['implementation']} on {one['device']}: {one['first_difference']}" for one in found]
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


def _numbers(text: str, allowed: Callable[[int], bool], what: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = [-1]
    if not all(map(allowed, numbers)):
        raise argparse.ArgumentTypeError(f"{text!r}, allowed: {what}")
    return numbers


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
        prog="python -m parity_tests.conformance.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME.md and NAME.json")
    parser.add_argument("--name", default="report", help="name of the files (default: report)")
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
    parser.add_argument(
        "--head-dims",
        type=lambda text: _numbers(text, lambda d: 16 <= d <= 512 and d % 16 == 0, "multiples of 16 to 512"),
        default=list(rows.HEAD_DIMS),
        help="comma-separated (default: all that the tests know)",
    )
    parser.add_argument(
        "--heads",
        type=lambda text: _numbers(text, lambda k: 1 <= k <= 64, "1 to 64"),
        default=list(rows.HEAD_COUNTS),
        help="comma-separated key/value head counts",
    )
    parser.add_argument(
        "--rounding",
        type=lambda text: _names(text, ROUNDINGS),
        default=list(ROUNDINGS),
        help="comma-separated, of nearest, sequential (default: both)",
    )
    parser.add_argument("--case-codes", type=_count, default=1, help="at least so many codes in one case")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases (default 1)")
    parser.add_argument("--seconds", type=_count, help="start no case after so many seconds")
    parser.add_argument(
        "--real-rows", type=Path, metavar="FILE", help="rows of `parity_tests.conformance.capture_rows`"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    start = time.time()
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not 1 <= options.jobs <= 256:
        parser.error(f"--jobs {options.jobs}, allowed: 1 to 256")
    voices, missing = available_voices(options.implementations, options.devices)
    if not voices:
        print(f"nothing can run here: {missing}", file=sys.stderr)
        return 2
    real_cases: list[RealCase] = []
    if options.real_rows:
        try:
            real_cases = make_real_cases(options.real_rows)
        except (OSError, ValueError) as error:
            parser.error(f"--real-rows: {error}")
    sizes = options.head_dims, options.heads, options.case_codes
    cases = make_cases(options.codes, *sizes, options.rounding)
    if not cases:
        parser.error(f"--rounding sequential with --head-dims {options.head_dims}, allowed: 32 and more")
    lanes = make_lanes(cases, options.jobs)
    deadline = start + (options.seconds or math.inf)
    tasks = make_cache_tasks(options.devices, missing)
    every = [*lanes, real_cases] if real_cases else lanes
    tallies, caches = run_tasks(every, tasks, voices, options.jobs, deadline)
    real_rows = None
    if real_cases:
        with np.load(options.real_rows) as file:
            real_rows = {"model": str(file["model"]), "layers": len(file["key"]), "pages": tallies.pop()}
    pages = merge_tallies(tallies)
    report = make_report(cases, pages, real_rows, caches, missing, time.time() - start)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    markdown = to_markdown(report)
    (options.out / f"{options.name}.md").write_text(markdown)
    print(markdown)
    return 1 if report["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
