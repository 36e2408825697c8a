"""Random interleavings of everything a serving cache can do, checked byte for byte against plain lists.

    python -m parity_tests.conformance.stress --operations 200000 --out results/serving_stress

`Harness` drives one `SequencePool` and a model of it made of Python lists: per sequence the numbers of the
rows it was given. What a page must contain follows from those numbers and `oracle.quantize_pages`. A row is
a function of all tokens up to it and of the sequence's salt, as in a causal model with adapters, so equal
prefixes of one salt have equal rows, and a page found under another salt would be a difference. After every
step the sequences it touched are compared and the pool is audited; every `AUDIT` operations every byte of
every page of every sequence is. The pools are small, so that they are full most of the time.
"""

import argparse
import contextlib
import dataclasses
import json
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from parity_tests.conformance import oracle
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework
from parity_tests.conformance.rows import make_rotation, mixed_rows

PAGE = 64
AUDIT = 250
BANK = 2048  # different rows
BATCH = 4
BUCKETS = (1, 64, 192)  # tokens per append, so that few shapes are compiled
SALTS = (b"", b"adapter")
INT2_FIELDS = {
    "key_codes": ("key", "words"),
    "value_codes": ("value", "words"),
    "key_scale": ("key", "scale"),
    "value_scale": ("value", "scale"),
    "key_page_mean": ("key", "page_mean"),
}


@dataclasses.dataclass(frozen=True)
class World:
    """The geometry and the limits of one pool."""

    name: str
    sink_tokens: int
    recent_tokens: int
    grid_tokens: int
    int2_pages: int
    window_pages: int
    max_length: int
    layers: tuple[tuple[int, int], ...] = ((2, 16), (1, 32))  # (key/value heads, head_dim) of every layer


WORLDS = (
    World("sink 64, recent 64", 64, 64, 64, 14, 14, 640),
    World("sink 64, recent 256", 64, 256, 64, 14, 26, 900),
    World("no sink, recent 64", 0, 64, 64, 14, 12, 640),
    World("sink 128, recent 128, grid 128", 128, 128, 128, 12, 20, 704),
)


@dataclasses.dataclass
class Expected:
    """The model's idea of one sequence: its tokens, the numbers of its rows, and forced INT2 pages."""

    tokens: list[int]
    rows: list[int]
    hash: list[int]  # running hash after every token
    forced: int = 0
    salt: bytes = b""


class Interruption(BaseException):
    """Stands for Ctrl-C in the middle of a forward."""


class Harness:
    """One pool beside its model; every method performs one operation on both and compares them."""

    def __init__(self, framework: Framework, world: World, seed: int, device: str = "cpu") -> None:
        self.framework, self.world, self.device = framework, world, device
        rng = np.random.default_rng(seed)
        self.rotations = [make_rotation(rng, heads, dim) for heads, dim in world.layers]
        self.bank = [
            {role: mixed_rows(rng, (BANK, heads, dim)) for role in ("key", "value")}
            for heads, dim in world.layers
        ]
        config = framework.module("core.config").CacheConfig
        self.configs = [
            config(heads, heads, dim, world.sink_tokens, world.recent_tokens) for heads, dim in world.layers
        ]
        self.config = self.configs[0]
        self.errors = framework.module("core.errors")
        self.page_errors = framework.module("core.page_pool")
        self.pool = self.new_pool()
        self.model: dict[int, Expected] = {}
        self.written: dict[int, tuple[int, ...]] = {}  # INT2 page -> rows in it, verified when written
        self.pages: dict[tuple[int, tuple[int, ...]], dict[str, np.ndarray]] = {}
        self.counts: Counter[str] = Counter()
        self.compared_pages = 0
        self.refused = 0
        self.audits = 0

    def new_pool(self, model_id: str = "stress") -> Any:
        """An empty pool of this world whose byte budget leaves not one page to spare."""
        serving = self.framework.module("serving.sequence_pool")
        int2 = sum(heads * (34 * dim + 256) for heads, dim in self.world.layers)
        window = sum(heads * 256 * dim for heads, dim in self.world.layers)
        return serving.SequencePool(
            self.configs,
            [self.framework.layer_rotation(rotation, self.device) for rotation in self.rotations],
            model_id=model_id,
            max_length=self.world.max_length,
            max_sequences=100,
            window_pages=self.world.window_pages,
            max_bytes=(self.world.int2_pages + 1) * int2 + (self.world.window_pages + 1) * window,
            grid_tokens=self.world.grid_tokens,
        )

    # ------------------------------------------------------------ operations

    def create(self, prompt: list[int], reuse: str | None, generated: bool, salt: bytes = b"") -> int:
        """A sequence that resumes inside `prompt` if it can; the rest is appended by other operations."""
        sequence = self.pool.create(prompt, reuse=reuse, generated=generated, salt=salt)
        state = self.pool.pages.state(sequence)
        formula = oracle.history_pages(state.length, self.world.sink_tokens, self.world.recent_tokens)
        history = len(state.int2_pages)
        borrowed = reuse == "quantized" and state.length == self.world.sink_tokens + PAGE * history
        assert history == formula or (borrowed and history > formula), "only quantized reuse bends the layout"
        assert state.length < max(1, len(prompt)), "a token is left to compute"
        self.model[sequence] = expected = Expected([], [], [], salt=salt)
        self.extend(expected, prompt[: state.length])
        expected.forced = history if history > formula else 0
        self.counts["create, resumed" if state.length else "create, empty"] += 1
        self.compare([sequence])
        return sequence

    def append(
        self,
        sequences: list[int | None],
        tokens: list[list[int]],
        known: bool = True,
        interrupt: int | None = None,
    ) -> bool:
        """Appends tokens to a batch in any order with padding rows; False if it does not fit.

        `interrupt`: the layer at which the append is interrupted. The sequences then are as before, or, in a
        pool without pages to spare, refused by name until they are freed.
        """
        longest = max([1, *map(len, tokens)])
        bucket = next(size for size in BUCKETS if size >= longest)
        before = {s: (self.model[s], len(self.model[s].rows)) for s in sequences if s is not None}
        for sequence, new in zip(sequences, tokens):
            if sequence is not None:
                self.extend(self.model[sequence], new)
        keys, values = [], []
        for bank, (heads, dim) in zip(self.bank, self.world.layers):
            for role, rows in (("key", keys), ("value", values)):
                # What is not to be stored is poison: NaN in bf16.
                batch = np.full((len(sequences), bucket, heads, dim), 0x7FC1, np.uint16)
                for i, (sequence, new) in enumerate(zip(sequences, tokens)):
                    if sequence is not None and new:
                        batch[i, : len(new)] = bank[role][self.model[sequence].rows[-len(new) :]]
                rows.append(self.framework.bfloat16(batch, self.device))
        statistics = self.pool.statistics()
        given = {"tokens": tokens} if known else {"counts": [len(new) for new in tokens]}
        try:
            with self.interrupted_at(interrupt):
                self.pool.append(sequences, keys, values, **given)
        except Interruption:
            for expected, length in before.values():
                self.cut(expected, length)
            self.drop_damaged(list(before))
            self.counts["append, interrupted"] += 1
            self.compare([s for s in before if s in self.model], every_byte=True)
            return True
        except self.errors.CacheFullError:
            for expected, length in before.values():
                self.cut(expected, length)
            assert self.pool.statistics() == statistics, "a refusal changes nothing"
            self.refused += 1
            self.counts["append, refused"] += 1
            self.compare([s for s in sequences if s is not None])
            return False
        self.counts["append, one token" if bucket == 1 else "append, chunk"] += 1
        self.compare([s for s in sequences if s is not None])
        return True

    @contextlib.contextmanager
    def interrupted_at(self, layer: int | None) -> Iterator[None]:
        """Lets the pool's append fail before it writes to `layer`; None: not at all."""
        module = self.framework.module("serving.sequence_pool")
        append_layer, layers = module.append_layer, iter(range(len(self.world.layers)))

        def failing(*arguments: Any) -> Any:
            if next(layers) == layer:
                raise Interruption
            return append_layer(*arguments)

        module.append_layer = failing
        try:
            yield
        finally:
            module.append_layer = append_layer

    def drop_damaged(self, sequences: list[int]) -> None:
        """Frees sequences that an interruption has damaged; every other use of them is refused."""
        for sequence in sequences:
            if self.pool.pages.state(sequence).damaged:
                for use in (
                    self.pool.fork,
                    lambda s: self.pool.view([s]),
                    lambda s: self.pool.truncate(s, 0),
                ):
                    try:
                        use(sequence)
                    except self.page_errors.PageStateError as error:
                        assert "free it" in str(error)
                    else:
                        raise AssertionError("a damaged sequence was used")
                self.pool.free(sequence)
                del self.model[sequence]
                self.counts["append, damaged"] += 1

    def abort(self, sequence: int, count: int = 1) -> None:
        """Begins an append and drops it untouched."""
        try:
            step = self.pool.begin([sequence], counts=[count])
        except self.errors.CacheFullError:
            return
        self.pool.abort(step, untouched=True)
        self.counts["abort"] += 1
        self.compare([sequence])

    def fork(self, sequence: int) -> int:
        """A second sequence of the same rows."""
        child = self.pool.fork(sequence)
        self.model[child] = self.copy(sequence)
        self.counts["fork"] += 1
        self.compare([sequence, child])
        return child

    def truncate(self, sequence: int, length: int, keep: bool) -> None:
        """Cuts a sequence, or is refused exactly when quantized tokens would have to become BF16."""
        expected = self.model[sequence]
        sink, recent = self.world.sink_tokens, self.world.recent_tokens
        history = self.history(expected)
        wanted = max(expected.forced, oracle.history_pages(length, sink, recent))
        whole = length == len(expected.rows)
        exact = whole or length <= sink or (length >= sink + PAGE * history and wanted == history)
        try:
            kept = self.pool.truncate(sequence, length, keep_quantized=keep)
        except self.page_errors.QuantizedTokensError:
            assert not exact and not keep
            self.counts["truncate, refused"] += 1
        else:
            assert exact or keep
            self.counts["truncate, exact" if exact else "truncate, quantized kept"] += 1
            if not exact:
                inside = length < sink + PAGE * history
                expected.forced = min(history, (length - sink) // PAGE)
                length = sink + PAGE * expected.forced if inside else length
            elif length <= sink and not whole:
                expected.forced = 0
            assert kept == length
            self.cut(expected, length)
        self.compare([sequence])

    def free(self, sequence: int) -> None:
        """Ends a sequence."""
        self.pool.free(sequence)
        del self.model[sequence]
        self.counts["free"] += 1

    def reorder(self, sequences: list[int], sources: list[int]) -> None:
        """The beam step."""
        old = [self.copy(sequence) for sequence in sequences]
        result = self.pool.reorder(sequences, sources)
        for sequence in sequences:
            del self.model[sequence]
        for sequence, source in zip(result, sources):
            kept = old[source]
            self.model[sequence] = self.copy_of(kept)
        self.counts["reorder"] += 1
        self.compare(result)

    def snapshot(self, sequence: int) -> None:
        """Writes a sequence to a file, ends it, and brings it back if there is room."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "sequence.safetensors"
            self.pool.snapshot(sequence, path)
            expected = self.model.pop(sequence)
            self.pool.free(sequence)
            try:
                restored = self.pool.restore(path)
            except self.errors.CacheFullError:  # it had shared its pages, and needs its own now
                self.pool.pages.check()
                self.counts["snapshot, no room to restore"] += 1
                return
        for page, rows in zip(self.pool.pages.state(restored).int2_pages, self.page_rows(expected)):
            self.written[page] = rows
        self.model[restored] = expected
        self.counts["snapshot and restore"] += 1
        self.compare([restored], every_byte=True)

    # ------------------------------------------------------------ the model

    def extend(self, expected: Expected, tokens: list[int]) -> None:
        """Gives the model the rows of new tokens: each depends on all tokens up to it."""
        value = expected.hash[-1] if expected.hash else 1 + SALTS.index(expected.salt)
        for token in tokens:
            value = (value * 6364136223846793005 + token + 1442695040888963407) & (2**64 - 1)
            expected.tokens.append(token)
            expected.hash.append(value)
            expected.rows.append((value >> 33) % BANK)

    def cut(self, expected: Expected, length: int) -> None:
        """Shortens the model of a sequence."""
        for values in (expected.tokens, expected.rows, expected.hash):
            del values[length:]

    def copy(self, sequence: int) -> Expected:
        """The model of a fork."""
        return self.copy_of(self.model[sequence])

    def copy_of(self, e: Expected) -> Expected:
        """The same in lists of its own."""
        return Expected(list(e.tokens), list(e.rows), list(e.hash), e.forced, e.salt)

    def history(self, expected: Expected) -> int:
        """INT2 pages that a sequence must have."""
        formula = oracle.history_pages(len(expected.rows), self.world.sink_tokens, self.world.recent_tokens)
        return max(expected.forced, formula)

    def page_rows(self, expected: Expected) -> list[tuple[int, ...]]:
        """The row numbers in every INT2 page that a sequence must have."""
        starts = (self.world.sink_tokens + PAGE * i for i in range(self.history(expected)))
        return [tuple(expected.rows[start : start + PAGE]) for start in starts]

    def page_bytes(self, layer: int, rows: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The INT2 arrays of one page by the oracle, remembered."""
        if (layer, rows) not in self.pages:
            if len(self.pages) > 4096:
                self.pages.clear()
            rotation, bank = self.rotations[layer], self.bank[layer]
            made = {
                role: oracle.quantize_pages(
                    role,
                    bank[role][list(rows)],
                    rotation[f"{role}_transform"],
                    rotation[f"{role}_multiplier"],
                    rotation["value_mean"],
                )
                for role in ("key", "value")
            }
            page = {name: made[role][field] for name, (role, field) in INT2_FIELDS.items()}
            page |= {name: page[name].T for name in ("key_scale", "value_scale")}  # [64, K] -> [K, 64]
            page |= {name: page[name][0] for name in ("key_codes", "value_codes", "key_page_mean")}
            self.pages[layer, rows] = page
        return self.pages[layer, rows]

    # ------------------------------------------------------------ comparing

    def compare(self, sequences: list[int], every_byte: bool = False) -> None:
        """Raises AssertionError unless these sequences hold exactly what the model says."""
        self.pool.pages.check()
        arrays = [
            {
                name: self.framework.numpy(getattr(cache, name))
                for name in (*INT2_FIELDS, "window_key", "window_value")
            }
            for cache in self.pool.view([None])
        ]
        for sequence in sequences:
            expected = self.model[sequence]
            state = self.pool.pages.state(sequence)
            assert state.length == len(expected.rows)
            assert len(state.int2_pages) == self.history(expected)
            for page, rows in zip(state.int2_pages, self.page_rows(expected)):
                if every_byte or self.written.get(page) != rows:
                    self.compare_page(arrays, page, rows)
            self.compare_windows(arrays, sequence, expected)

    def compare_page(self, arrays: list[dict[str, np.ndarray]], page: int, rows: tuple[int, ...]) -> None:
        """One INT2 page of every layer."""
        for layer, stored in enumerate(arrays):
            for name, wanted in self.page_bytes(layer, rows).items():
                assert np.array_equal(stored[name][page], wanted), f"INT2 page {page}, layer {layer}: {name}"
        self.written[page] = rows
        self.compared_pages += 1

    def compare_windows(self, arrays: list[dict[str, np.ndarray]], sequence: int, expected: Expected) -> None:
        """All BF16 rows of a sequence, found through its window table as attention finds them."""
        table, length = self.pool.pages.window_row(sequence), len(expected.rows)
        sinks, slots = self.config.sink_pages, self.config.recent_slots
        first = sinks + self.history(expected)
        for token_page in [*range(min(sinks, -(-length // PAGE))), *range(first, -(-length // PAGE))]:
            slot = token_page if token_page < sinks else sinks + (token_page - sinks) % slots
            rows = expected.rows[PAGE * token_page : PAGE * (token_page + 1)]
            assert table[slot] != 0, "a live page is the reserved page"
            for bank, stored in zip(self.bank, arrays):
                for role in ("key", "value"):
                    found = stored[f"window_{role}"][table[slot]][:, : len(rows)]
                    wanted = bank[role][rows].transpose(1, 0, 2)
                    assert np.array_equal(found, wanted), f"sequence {sequence}, token page {token_page}"
            self.compared_pages += 1

    def audit(self) -> None:
        """Every byte of every sequence, the reserved pages, and the tables of a mixed batch."""
        self.compare(list(self.model), every_byte=True)
        for cache in self.pool.view([None]):
            for name in (*INT2_FIELDS, "window_key", "window_value"):
                assert not self.framework.numpy(getattr(cache, name))[0].any(), f"{name}: page 0 was written"
        self.audits += 1

    def end(self) -> None:
        """Frees everything and proves that nothing leaked."""
        self.audit()
        for sequence in list(self.model):
            self.pool.free(sequence)
        self.model.clear()
        self.pool.pages.check()
        statistics = self.pool.statistics()
        assert statistics.live_bytes == 0 and statistics.sequences == 0, "leaked pages"


# ------------------------------------------------------------ the random driver


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """Blocks of a page, of two kinds: many prompts begin alike, and equal pages follow unequal ones."""
    length = rng.randrange(1, longest)
    blocks = [int(rng.random() < 0.2) for _ in range(length // PAGE + 1)]
    return [(7 * block + i * i) % 100 for block in blocks for i in range(PAGE)][:length]


class Driver:
    """Chooses operations at random; a sequence either follows its prompt or generates freely."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness, self.rng = harness, random.Random(seed)
        self.prompts: dict[int, list[int]] = {}

    def step(self) -> None:
        """One random operation."""
        h, rng = self.harness, self.rng
        self.prompts = {s: p for s, p in self.prompts.items() if s in h.model}
        living = list(h.model)
        choice = rng.random()
        if not living or (choice < 0.10 and len(living) < 12):
            prompt = random_prompt(rng, h.world.max_length - 64)
            reuse = rng.choice(["exact", "exact", "quantized", None])
            self.prompts[h.create(prompt, reuse, rng.random() < 0.3, rng.choice(SALTS))] = prompt
        elif choice < 0.68:
            self.append(living)
        elif choice < 0.76 and len(living) < 14:
            parent = rng.choice(living)
            child = h.fork(parent)
            if parent in self.prompts and rng.random() < 0.5:
                self.prompts[child] = self.prompts[parent]
        elif choice < 0.88:
            sequence = rng.choice(living)
            length = len(h.model[sequence].rows)
            cut = rng.choice([rng.randrange(length + 1), rng.randrange(min(length, 70) + 1)])
            h.truncate(sequence, length - cut, rng.random() < 0.3)
        elif choice < 0.95:
            h.free(rng.choice(living))
        elif choice < 0.98:
            beams = rng.sample(living, min(len(living), rng.randrange(1, 4)))
            room = 14 - len(living) + len(beams)
            h.reorder(beams, [rng.randrange(len(beams)) for _ in range(rng.randrange(1, max(2, room)))][:5])
        elif choice < 0.985:
            h.snapshot(rng.choice(living))
        else:
            sequence = rng.choice(living)
            room = h.world.max_length - len(h.model[sequence].rows)
            h.abort(sequence, min(room, rng.choice([1, 64, 192])))

    def append(self, living: list[int]) -> None:
        """A batch of one to four sequences in any order, padded to four rows."""
        h, rng = self.harness, self.rng
        chosen: list[int | None] = list(rng.sample(living, min(len(living), rng.randrange(1, BATCH + 1))))
        chosen += [None] * (BATCH - len(chosen))
        rng.shuffle(chosen)
        kind = rng.random()
        tokens: list[list[int]] = []
        for sequence in chosen:
            if sequence is None:
                tokens.append([])
                continue
            length = len(h.model[sequence].rows)
            grid = h.world.grid_tokens
            prompt = self.prompts.get(sequence, [])
            follows = h.model[sequence].tokens == prompt[:length] and len(prompt) > length
            if kind < (0.1 if follows else 0.5):
                count = 1
            elif kind < 0.85:
                count = grid - length % grid
            else:
                count = rng.randrange(0, 193)
            count = min(count, 192, h.world.max_length - length)
            new = prompt[length : length + count] if follows else []
            tokens.append(new if follows else [rng.randrange(2) for _ in range(count)])
        interrupt = rng.randrange(len(h.world.layers)) if rng.random() < 0.1 else None
        fits = h.append(chosen, tokens, rng.random() < 0.97, interrupt)
        if not fits and rng.random() < 0.7:
            h.free(rng.choice(living))


def run(
    framework: str, operations: int, seed: int = 0, per_world: int | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Runs `operations` operations over all worlds in turn; raises AssertionError on a difference."""
    per_world = per_world or min(5000, -(-operations // len(WORLDS)))
    counts: Counter[str] = Counter()
    totals = {
        "compared_pages": 0,
        "refused": 0,
        "audits": 0,
        "evictions": 0,
        "reused_tokens": 0,
        "copied_pages": 0,
    }
    fill, worlds, done, start = [], 0, 0, time.perf_counter()
    while done < operations:
        world = WORLDS[worlds % len(WORLDS)]
        harness = Harness(FRAMEWORKS[framework], world, seed + worlds, device)
        driver = Driver(harness, seed + worlds)
        size = min(per_world, operations - done)
        used = 0
        while sum(harness.counts.values()) < size:
            driver.step()
            statistics = harness.pool.statistics()
            used = max(used, statistics.live_bytes)
            fill.append(statistics.live_bytes / statistics.max_bytes)
            if len(fill) % AUDIT == 0:
                harness.audit()
        harness.end()
        counts += harness.counts
        done += sum(harness.counts.values())
        totals["compared_pages"] += harness.compared_pages
        totals["refused"] += harness.refused
        totals["audits"] += harness.audits
        totals["evictions"] += statistics.evictions
        totals["reused_tokens"] += statistics.reused_tokens
        totals["copied_pages"] += statistics.copied_pages
        assert used <= harness.pool.pages.max_bytes
        worlds += 1
        print(f"{framework}: {done} operations, {worlds} pools, 0 differences", file=sys.stderr, flush=True)
    return {
        "framework": framework,
        "versions": FRAMEWORKS[framework].versions(device),
        "operations": done,
        "pools": worlds,
        "differences": 0,
        "leaks": 0,
        "mean_fill_of_budget": round(float(np.mean(fill)), 4),
        "highest_fill_of_budget": round(float(np.max(fill)), 4),
        **totals,
        "by_kind": dict(sorted(counts.items())),
        "seconds": round(time.perf_counter() - start, 1),
        "seed": seed,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = [
        "# Stress test of the serving cache",
        "",
        f"`{report['command']}`, {report['date']}, Python {report['python']}. A difference or a leak ends "
        "the run with an error, so a report that exists has none.",
        "",
        "| framework | operations | pools | differences | leaks | page comparisons | refused (pool full) | "
        "fill of the byte budget (mean, highest) | tokens reused | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report["runs"]:
        version = r["versions"][r["framework"]]
        lines.append(
            f"| {r['framework']} {version} | {r['operations']} | {r['pools']} | {r['differences']} | "
            f"{r['leaks']} | {r['compared_pages']} | {r['refused']} | {r['mean_fill_of_budget']:.0%}, "
            f"{r['highest_fill_of_budget']:.0%} | {r['reused_tokens']} | {r['seconds']} |"
        )
    kinds = sorted({kind for r in report["runs"] for kind in r["by_kind"]})
    names = [r["framework"] for r in report["runs"]]
    lines += ["", f"| operation | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for kind in kinds:
        lines.append(f"| {kind} | {' | '.join(str(r['by_kind'].get(kind, 0)) for r in report['runs'])} |")
    lines += ["", "Pools in turn:", ""]
    for world in WORLDS:
        layers = ", ".join(f"{heads} heads of {dim}" for heads, dim in world.layers)
        lines.append(
            f"- {world.name}: {world.int2_pages} INT2 pages, {world.window_pages} window pages, sequences up "
            f"to {world.max_length} tokens, layers with {layers}"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs, and writes NAME.json and NAME.md."""
    parser = argparse.ArgumentParser(
        prog="python -m parity_tests.conformance.stress", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--operations", type=int, default=200_000, help="for Torch (default %(default)s)")
    parser.add_argument("--jax-operations", type=int, default=4_000, help="for JAX (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="report without suffix, e.g. results/serving_stress")
    options = parser.parse_args(arguments)
    plan = {"torch": options.operations, "jax": options.jax_operations}
    runs = [run(name, operations, options.seed) for name, operations in plan.items() if operations > 0]
    report = {
        "command": "python -m parity_tests.conformance.stress "
        f"--operations {options.operations} --jax-operations {options.jax_operations} --seed {options.seed}",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "runs": runs,
    }
    text = markdown(report)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
