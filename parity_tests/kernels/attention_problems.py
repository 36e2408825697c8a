"""What every attention kernel faces: problems in NumPy and their answers in float64.

A problem is a cache full of random words, scales and rows under permuted tables, in which everything that no
sequence owns is NaN, and queries over it. The answer is the oracle's dense attention over the rows that the
stored bytes stand for.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, PackageCache

PAGE = oracle.PAGE
NAN = np.uint16(0x7FC1)
BFLOAT16 = ("key_scale", "value_scale", "key_page_mean", "window_key", "window_value")


@dataclasses.dataclass(frozen=True)
class Case:
    """The geometry of one problem. tokens: 0 for one query per sequence (decode), else those of a chunk."""

    lengths: tuple[int, ...]
    heads: int
    group: int
    head_dim: int
    tokens: int = 0
    shared: bool = False  # one rotation for all heads
    bfloat16: bool = False  # queries that bf16 holds
    sink_tokens: int = 64
    recent_tokens: int = 256
    sliding_window: int | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        """For test ids: what differs from the defaults."""
        extra = [
            f"{field.name}={value}" if not isinstance(value, bool) else field.name
            for field in dataclasses.fields(self)[4:]
            if (value := getattr(self, field.name)) != field.default
        ]
        lengths = "_".join(map(str, self.lengths[:9]))
        return "-".join([f"{lengths}x{self.heads}x{self.group}x{self.head_dim}", *extra])


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case with its numbers: fields of the cache and of the rotation, and rows; bf16 as bits."""

    case: Case
    fields: Mapping[str, np.ndarray]
    rotation: Mapping[str, np.ndarray]
    query: np.ndarray  # float32 [B, N, D], or [B, T, N, D] of a chunk
    key: np.ndarray  # rows of the chunk [B, T, K, D]; NaN past new_lengths
    value: np.ndarray
    new_lengths: np.ndarray
    sink_logits: np.ndarray | None

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"softmax_scale": self.case.head_dim**-0.5}
        if self.case.sliding_window is not None:
            options["sliding_window"] = self.case.sliding_window
        if self.sink_logits is not None:
            options["sink_logits"] = self.sink_logits
        return options

    def live(self) -> np.ndarray:
        """Which queries count: bool [B], or [B, T]."""
        if self.case.tokens:
            return np.arange(self.case.tokens) < self.new_lengths[:, None]
        return np.ones(len(self.case.lengths), bool)


def make_problem(case: Case, seed: int = 0) -> Problem:
    """Fresh random numbers for a case."""
    rng = np.random.default_rng([seed, *case.lengths, case.heads, case.group, case.head_dim, case.tokens])
    batch, heads, head_dim = len(case.lengths), case.heads, case.head_dim
    rotation = rows.make_rotation(rng, 1 if case.shared else heads, head_dim)
    sink_pages, recent_slots = case.sink_tokens // PAGE, case.recent_tokens // PAGE + 1
    history = [oracle.history_pages(n, case.sink_tokens, case.recent_tokens) for n in case.lengths]
    slots, longest = sink_pages + recent_slots, max(1, *history)
    pages, windows = 1 + sum(history), 1 + batch * slots
    order = iter(1 + rng.permutation(pages - 1))
    table = np.zeros((batch, longest), np.int32)
    for b, i in itertools.product(range(batch), range(longest)):
        table[b, i] = next(order) if i < history[b] else 0

    def bits(values: np.ndarray) -> np.ndarray:
        out = oracle.to_bfloat16(values)
        out[0] = NAN  # page 0 belongs to nobody
        return out

    def words(*shape: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, shape).astype(np.int32)

    def scales(size: float) -> np.ndarray:
        return bits(size * np.exp(rng.normal(0, 0.5, (pages, heads, PAGE))))

    fields = {
        "key_codes": words(pages, heads, PAGE, head_dim // 16),
        "value_codes": words(pages, heads, head_dim, 4),
        "key_scale": scales(0.4),
        "value_scale": scales(3.7),
        "key_page_mean": bits(rng.normal(0, 1, (pages, heads, head_dim))),
        "window_key": bits(rng.normal(0, 1, (windows, heads, PAGE, head_dim))),
        "window_value": bits(rng.normal(0, 1, (windows, heads, PAGE, head_dim))),
        "page_table": table,
        "window_table": 1 + rng.permutation(windows - 1).reshape(batch, slots).astype(np.int32),
        "lengths": np.array(case.lengths, np.int32),
        "history_pages": np.array(history, np.int32),
    }
    for b, length in enumerate(case.lengths):
        for slot in range(slots):
            ring = (slot - sink_pages - history[b]) % recent_slots
            page = slot if slot < sink_pages else sink_pages + history[b] + ring
            stored = min(PAGE, max(0, length - page * PAGE))
            for name in ("window_key", "window_value"):
                fields[name][fields["window_table"][b, slot], :, stored:] = NAN
    query = rng.normal(0, 1.2, (batch, max(1, case.tokens), heads * case.group, head_dim))
    query = query.astype(np.float32)
    if case.bfloat16:
        query = oracle.from_bfloat16(oracle.to_bfloat16(query))
    new = np.maximum(case.tokens - 3 * np.arange(batch), min(1, case.tokens)).astype(np.int32)
    key, value = (oracle.to_bfloat16(rng.normal(0, 1, (batch, case.tokens, heads, head_dim))) for _ in "kv")
    for b, count in enumerate(new):
        key[b, count:], value[b, count:] = NAN, NAN
    sinks = rng.normal(0, 2, heads * case.group).astype(np.float32) if case.sinks else None
    query = query if case.tokens else query[:, 0]
    return Problem(case, fields, rotation, query, key, value, new, sinks)


def answer(problem: Problem) -> np.ndarray:
    """float64, shaped like the query; zeros where a sequence is empty, NaN for queries that do not count."""
    case, fields = problem.case, problem.fields
    want = np.full(problem.query.shape, np.nan)
    sink_pages, recent_slots = case.sink_tokens // PAGE, case.recent_tokens // PAGE + 1
    for b, length in enumerate(case.lengths):
        history = int(fields["history_pages"][b])
        end = case.sink_tokens + PAGE * history

        def raw(name: str, start: int, stop: int, b: int = b) -> np.ndarray:
            found = [np.empty((0, case.heads, case.head_dim), np.uint16)]
            for page in range(start // PAGE, -(-stop // PAGE)):
                recent = page - sink_pages
                slot = page if recent < 0 else sink_pages + recent % recent_slots
                found.append(fields[name][fields["window_table"][b, slot]].transpose(1, 0, 2))
            return np.concatenate(found)[: max(0, stop - start)]

        sink = min(length, case.sink_tokens)
        own = fields["page_table"][b, :history]
        pages = ("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean")
        stored = oracle.SequenceBytes(
            **{name: fields[name][own] for name in pages},
            sink_key=raw("window_key", 0, sink),
            sink_value=raw("window_value", 0, sink),
            recent_key=raw("window_key", end, length),
            recent_value=raw("window_value", end, length),
        )
        key, value = oracle.read_sequence(stored, problem.rotation)
        query = problem.query[b][None]
        if case.tokens:
            count = problem.new_lengths[b]
            query = problem.query[b, :count]
            key, value = (
                np.concatenate([old, oracle.from_bfloat16(new[b, :count]).astype(np.float64)])
                for old, new in ((key, problem.key), (value, problem.value))
            )
        if not len(key):
            want[b] = 0
            continue
        out = oracle.attention(query, key, value, **problem.options())
        if case.tokens:
            want[b, : len(out)] = out
        else:
            want[b] = out[0]
    return want


@contextlib.contextmanager
def _poisoned(package: str) -> Iterator[None]:
    """Torch fills what it allocates and does not write with NaN."""
    if package != "torch":
        yield
        return
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run(
    problem: Problem, package: str, module: str, device: str = "cpu", compiled: bool = False
) -> np.ndarray:
    """What `module` of a package, e.g. "attention" or a kernel's, makes of a problem: float32."""
    case, framework = problem.case, FRAMEWORKS[package]
    cache = PackageCache(
        framework,
        problem.rotation,
        len(case.lengths),
        max(case.sink_tokens + case.recent_tokens + PAGE, *case.lengths),
        device,
        query_heads=case.heads * case.group,
        heads=case.heads,
        sink_tokens=case.sink_tokens,
        recent_tokens=case.recent_tokens,
    )
    options = problem.options()
    with framework.device_context(device), _poisoned(package):
        fields = {
            name: framework.bfloat16(field, device) if name in BFLOAT16 else framework.array(field, device)
            for name, field in problem.fields.items()
        }
        stored = dataclasses.replace(cache.cache, **fields)
        query = framework.array(problem.query, device)
        if case.bfloat16:
            query = framework.bfloat16(oracle.to_bfloat16(problem.query), device)
        if "sink_logits" in options:
            options["sink_logits"] = framework.array(options["sink_logits"], device)
        operands = [query]
        if case.tokens:
            operands += [framework.bfloat16(bits, device) for bits in (problem.key, problem.value)]
            options["new_lengths"] = framework.array(problem.new_lengths, device)
        function = getattr(framework.module(module), "chunk_attention" if case.tokens else "decode_attention")
        if compiled:
            function = framework.compiled(function, "softmax_scale", "sliding_window")
        return framework.numpy(function(*operands, stored, cache.rotation, **options))


def largest_error(problem: Problem, got: np.ndarray) -> float:
    """Of a query head that counts, relative to its answer; an empty sequence must give zeros."""
    live, want = problem.live(), answer(problem)
    got, want = got[live].astype(np.float64), want[live]
    assert np.isfinite(got).all(), "NaN or infinity in the output"
    size = np.linalg.norm(want, axis=-1)
    assert not got[size == 0].any(), "an empty sequence attends to nothing"
    return float((np.linalg.norm(got - want, axis=-1) / np.where(size > 0, size, 1)).max())
