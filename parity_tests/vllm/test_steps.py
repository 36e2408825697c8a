"""Steps of an engine against the same rows in a cache of their own: same bytes, same attention."""

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from oscar_torch.cache import allocate_layer_cache, append_rows, attend  # noqa: E402
from oscar_torch.core import cache_format as fmt  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import CacheFullError, ConfigError, ShapeError  # noqa: E402
from oscar_torch.layer_cache import LayerCache, recent_slot  # noqa: E402
from oscar_torch.quantize import Feedback, quantize_page_pair  # noqa: E402
from oscar_torch.rotations.rotation import hadamard_rotation  # noqa: E402
from oscar_torch.vllm.identity import slice_rotation  # noqa: E402
from oscar_torch.vllm.layer import LayerMemory, attend_step  # noqa: E402
from oscar_torch.vllm.pages import allocate_windows, block_bytes, check_arena, token_bytes, view_pages  # noqa: E402
from oscar_torch.vllm.slots import SlotTable  # noqa: E402
from oscar_torch.vllm.step import StepTables  # noqa: E402

from .engine import Batch, Engine  # noqa: E402

HEADS, GROUP, DIM, LAYERS = 2, 2, 32, 2
CONFIG = CacheConfig(HEADS, HEADS * GROUP, DIM, sink_tokens=64, recent_tokens=64)
SCALE = DIM**-0.5
MAX_LENGTH = 700
ROTATION = hadamard_rotation(HEADS, DIM)


@functools.cache
def rows_of(name: str, layer: int) -> tuple[Any, Any, Any]:
    """Query, key and value of every token that a request can have: what a model would compute."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7 + layer)
    shapes = (HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, DIM)
    return tuple(torch.randn(MAX_LENGTH, *s, generator=generator).bfloat16() for s in shapes)


class Served:
    """The plugin's half of an engine: blocks, arena, slots and tables of every layer."""

    def __init__(self, blocks: int, sequences: int) -> None:
        device = torch.device("cpu")
        self.memories = [
            LayerMemory(i, CONFIG, ROTATION, *allocate_windows(CONFIG, sequences, device))
            for i in range(LAYERS)
        ]
        size = block_bytes(HEADS, DIM)
        self.blocks = [torch.full((blocks + 1, size), 255, dtype=torch.uint8) for _ in range(LAYERS)]  # NaN
        self.slots = SlotTable(sequences)
        self.tables = StepTables(CONFIG, LAYERS, sequences + 3, MAX_LENGTH, device)

    def run(self, batch: Batch, padding: int = 0) -> tuple[list[Any], list[int]]:
        """Outputs [T, N, D] of every layer, and where each row begins; `padding` rows stand at the end."""
        self.slots.release(batch.left)
        slots = self.slots.seat([request.name for request in batch.requests])
        starts = [0]
        for count in batch.counts:
            starts.append(starts[-1] + count)
        starts += [starts[-1]] * padding
        after = [r.computed + n for r, n in zip(batch.requests, batch.counts)] + [0] * padding
        table = torch.zeros((len(after), -(-MAX_LENGTH // 64)), dtype=torch.int32)
        for row, request in enumerate(batch.requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        step = self.tables.fill(
            torch.tensor(starts, dtype=torch.int32), starts, torch.tensor(after, dtype=torch.int32), after,
            table, slots,
        )  # fmt: skip
        outputs = []
        for layer in range(LAYERS):
            query, key, value = self.rows(batch, layer, starts[-1] + padding)
            output = torch.full_like(query, torch.nan)
            attend_step(
                self.memories[layer], self.blocks[layer], step, query, key, value, output, softmax_scale=SCALE
            )
            outputs.append(output)
        return outputs, starts

    def rows(self, batch: Batch, layer: int, tokens: int) -> list[Any]:
        parts = []
        for request, count in zip(batch.requests, batch.counts):
            part = slice(request.computed, request.computed + count)
            parts.append([x[part] for x in rows_of(request.name, layer)])
        rows = [torch.cat(column) for column in zip(*parts)]
        return [torch.cat([x, x.new_full((tokens - len(x), *x.shape[1:]), torch.nan)]) for x in rows]


class Alone:
    """Every request in a cache of its own, through `cache.attend`."""

    def __init__(self) -> None:
        self.caches: dict[tuple[str, int, int], LayerCache] = {}

    def run(self, batch: Batch, row: int, layer: int) -> tuple[Any, LayerCache]:
        request, count = batch.requests[row], batch.counts[row]
        place = request.name, layer, request.times
        if place not in self.caches:
            self.caches[place] = allocate_layer_cache(CONFIG, 1, MAX_LENGTH)
        part = slice(request.computed, request.computed + count)
        query, key, value = (x[None, part] for x in rows_of(request.name, layer))
        new = torch.tensor([count], dtype=torch.int32)
        out, cache = attend(
            query, key, value, self.caches[place], ROTATION, new_lengths=new, softmax_scale=SCALE
        )
        return out[0], cache


def assert_same_bytes(served: Served, batch: Batch, row: int, layer: int, alone: LayerCache) -> None:
    """Every INT2 page and every BF16 row of a request, in the engine's blocks and in a cache of its own."""
    request, length = batch.requests[row], batch.requests[row].computed + batch.counts[row]
    pages = view_pages(served.blocks[layer], HEADS, DIM)
    history = CONFIG.history_pages(length)
    assert int(alone.history_pages[0]) == history
    own = alone.page_table[0, :history].long()
    theirs = torch.tensor(request.blocks, dtype=torch.int64)[CONFIG.sink_pages :][:history]
    for name in fmt.INT2_ARRAYS:
        assert torch.equal(pages[name][theirs], getattr(alone, name)[own]), name
    table = served.tables.window_table[row]
    for page in [*range(CONFIG.sink_pages), *range(CONFIG.sink_pages + history, -(-length // 64))]:
        if page * 64 >= length:
            continue
        slot = page if page < CONFIG.sink_pages else recent_slot(page, CONFIG)
        used = min(64, length - page * 64)
        for name in fmt.WINDOW_ARRAYS:
            theirs = getattr(served.memories[layer], name)[table[slot], :, :used]
            assert torch.equal(theirs, getattr(alone, name)[alone.window_table[0, slot], :, :used]), (
                name,
                page,
            )


def compare(engine: Engine, served: Served, padding: int = 0) -> list[Batch]:
    """Runs an engine to its end; every step's outputs and bytes are those of requests alone."""
    alone, batches = Alone(), []
    for batch in engine.run():
        batches.append(batch)
        if not batch.requests:
            served.slots.release(batch.left)
            continue
        outputs, starts = served.run(batch, padding)
        for layer in range(LAYERS):
            for row, count in enumerate(batch.counts):
                expected, cache = alone.run(batch, row, layer)
                got = outputs[layer][starts[row] : starts[row] + count]
                # Sums of float32 in another order, rounded to bf16: one unit in the last place.
                torch.testing.assert_close(got, expected, rtol=2**-7, atol=1e-4)
                assert_same_bytes(served, batch, row, layer, cache)
    return batches


def test_a_prompt_in_one_piece_then_tokens() -> None:
    engine = Engine(blocks=20, sequences=1, budget=1000)
    engine.add("a", prompt=180, total=215)
    compare(engine, Served(20, 1))


@pytest.mark.parametrize("budget", [1, 63, 64, 65, 150])
def test_chunks_of_any_size(budget: int) -> None:
    """From single tokens on: prompts cross the end of the sink, of a page and of the recent part anywhere."""
    engine = Engine(blocks=20, sequences=1, budget=budget)
    engine.add("a", prompt=140 if budget == 1 else 460, total=200 if budget == 1 else 466)
    compare(engine, Served(20, 1))


def test_mixed_batches_preemption_and_padding() -> None:
    """More requests than places and blocks: decoding rows beside chunks, preempted and resumed sequences."""
    engine = Engine(blocks=26, sequences=5, budget=200, seed=3)
    generator = random.Random(5)
    for i in range(8):
        prompt = generator.choice([1, 2, 40, 64, 130, 257, 400])
        engine.add(f"r{i}", prompt, prompt + generator.choice([1, 12, 40]))
    served = Served(26, 5)
    batches = compare(engine, served, padding=3)
    assert engine.preemptions, "nothing was preempted: fewer blocks"
    assert any(1 in b.counts and max(b.counts) > 1 for b in batches), "no mixed batch"
    assert any(b.counts.count(1) > 2 and max(b.counts) == 1 for b in batches), "no batch that only decodes"
    assert served.slots.used == 0 and len(engine.free) == 26


def test_no_leak_after_a_thousand_requests() -> None:
    """Arrivals, ends, aborts and preemptions at random: places and blocks all come back."""
    engine, slots, generator = (
        Engine(blocks=60, sequences=16, budget=300, seed=8),
        SlotTable(16),
        random.Random(2),
    )
    added, most = 0, 0
    while added < 1000 or engine.running or engine.waiting or engine.left:
        for _ in range(generator.randrange(4)):
            if added < 1000:
                prompt = generator.randrange(1, 400)
                engine.add(f"r{added}", prompt, prompt + generator.randrange(1, 30))
                added += 1
        if (batch := engine.step()) is None:
            continue
        slots.release(batch.left)
        seats = slots.seat([r.name for r in batch.requests])
        assert len(set(seats)) == len(seats)
        most = max(most, slots.used)
        engine.finish(batch)
        if generator.random() < 0.3:
            for queue in (engine.running, engine.waiting):
                if queue:
                    engine.abort(generator.choice(queue).name)
    assert most == 16 and engine.preemptions
    assert slots.used == 0 and len(engine.free) == 60


def test_a_request_keeps_its_place_and_a_resumed_one_may_get_another() -> None:
    slots = SlotTable(2)
    first = slots.seat(["a", "b"])
    assert slots.seat(["b", "a"]) == first[::-1]
    assert slots.seat(["b"]) == first[1:], "a row that was not scheduled keeps its place"
    with pytest.raises(CacheFullError, match="3 requests hold BF16 rows, the arena has 2 places"):
        slots.seat(["a", "c"])
    slots.release(["a", "never seen"])
    assert slots.seat(["c", "b"]) == first
    with pytest.raises(ConfigError, match="0 places"):
        SlotTable(0)


def test_a_trial_run_stores_nothing() -> None:
    """The engine measures memory and records graphs on rows without a request: no byte changes."""
    served = Served(8, 2)
    before = [x.clone() for x in (*served.blocks, *(m.window_key for m in served.memories))]
    starts = [0, 1, 2, 90]
    after = [200, 1, 300]
    step = served.tables.fill(
        torch.tensor(starts, dtype=torch.int32), starts, torch.tensor(after, dtype=torch.int32), after,
        torch.zeros((3, 11), dtype=torch.int32), [],
    )  # fmt: skip
    assert step.decodes == 2 and [c.slot for c in step.chunks] == [-1]
    for layer, memory in enumerate(served.memories):
        q, k, v = (torch.randn(90, heads, DIM).bfloat16() for heads in (HEADS * GROUP, HEADS, HEADS))
        attend_step(memory, served.blocks[layer], step, q, k, v, torch.empty_like(q), softmax_scale=SCALE)
    for old, new in zip(before, (*served.blocks, *(m.window_key for m in served.memories))):
        assert torch.equal(old, new)


def test_tables_refuse_more_rows_than_they_have() -> None:
    tables = StepTables(CONFIG, 1, 2, MAX_LENGTH, torch.device("cpu"))
    starts, after = torch.arange(4, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    with pytest.raises(ShapeError, match="0 sequences in 3 rows, the tables have 2"):
        tables.fill(starts, [0, 1, 2, 3], after, [1, 1, 1], torch.zeros((3, 4), dtype=torch.int32), [])


@pytest.mark.parametrize(("head_dim", "size"), [(64, 38), (128, 72), (256, 140)])
def test_blocks_have_the_bytes_of_pages(head_dim: int, size: int) -> None:
    assert token_bytes(head_dim) == size
    assert block_bytes(8, head_dim) == 64 * 8 * size == 8 * fmt.int2_page_bytes(head_dim)
    blocks = torch.zeros((3, block_bytes(8, head_dim)), dtype=torch.uint8)
    pages = view_pages(blocks, 8, head_dim)
    assert sum(array.nbytes for array in pages.values()) == blocks.nbytes
    assert {name: tuple(array.shape) for name, array in pages.items()} == fmt.int2_array_shapes(
        3, 8, head_dim
    )
    for array in pages.values():  # every byte belongs to one array
        array.view(torch.uint8).add_(1)
    assert bool((blocks == 1).all())
    with pytest.raises(ShapeError, match="expected"):
        view_pages(blocks[:, 1:], 8, head_dim)


def test_the_arena_is_refused_where_it_leaves_no_room() -> None:
    config = CacheConfig(8, 32, 128)
    each = 36 * 6 * 8 * fmt.window_page_bytes(128)
    assert check_arena(config, 36, 64, 80 << 30) == 64 * each
    with pytest.raises(ConfigError, match=f"--max-num-seqs <= {(40 << 30) // each}"):
        check_arena(config, 36, 1024, 80 << 30)


def test_rows_are_appended_to_the_same_bytes_as_by_the_cache() -> None:
    """`store_chunk` alone, where a chunk is longer than everything the recent part holds."""
    served, alone = Served(20, 1), allocate_layer_cache(CONFIG, 1, MAX_LENGTH)
    engine = Engine(blocks=20, sequences=1, budget=1000)
    engine.add("a", prompt=650, total=651)
    batch = engine.step()
    assert batch is not None
    served.run(batch)
    _, key, value = (x[None, :650] for x in rows_of("a", 0))
    append_rows(alone, ROTATION, key, value, torch.tensor([650], dtype=torch.int32))
    assert_same_bytes(served, batch, 0, 0, alone)


def test_a_rank_rounds_its_heads_sequentially_as_the_whole_does() -> None:
    """The feedback of a set goes with its heads."""
    generator = np.random.default_rng(0)
    block = np.arange(64) // 16
    entries = generator.integers(-127, 128, (4, 64, 64)) * (block[:, None] < block[None])
    shift = torch.arange(4, 8, dtype=torch.int32)
    feedback = Feedback(torch.from_numpy(entries.astype(np.int8)), shift, 4)
    rotation = dataclasses.replace(hadamard_rotation(4, 64), key_feedback=feedback)
    pages = torch.from_numpy(generator.standard_normal((2, 64, 4, 64))).bfloat16()
    whole = quantize_page_pair(pages, pages, rotation)
    own = pages[:, :, 2:]
    part = quantize_page_pair(own, own, slice_rotation(rotation, range(2, 4)))
    for name, array in whole.items():
        assert torch.equal(array[:, 2:].view(torch.int16), part[name].view(torch.int16)), name
