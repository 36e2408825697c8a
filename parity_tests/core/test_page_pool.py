"""The page pool alone, in plain Python: every decision is executed on lists and compared with plain lists.

A stored row is here a number that depends on all tokens up to it, as in a causal model, so equal prefixes
have equal rows. `Machine` is the hypothesis state machine; `parity_tests.conformance.stress` drives the same
operations over real arrays.
"""

import hashlib
import random
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from oscar_jax.core import page_pool as jax_page_pool
from oscar_torch.core import page_pool as torch_page_pool
from oscar_torch.core.config import CacheConfig
from oscar_torch.core.errors import CacheFullError, ConfigError, ShapeError
from oscar_torch.core.page_pool import PageAllocator, PagePool, PageStateError, QuantizedTokensError

SMALL = CacheConfig(num_key_value_heads=1, num_query_heads=1, head_dim=16, sink_tokens=64, recent_tokens=64)
DEFAULT = CacheConfig(num_key_value_heads=1, num_query_heads=1, head_dim=16)
INT2_BYTES, WINDOW_BYTES = 800, 4096  # of one page of the geometry above


def new_pool(config: CacheConfig = SMALL, **options) -> PagePool:
    """A pool with the true page sizes of `config`."""
    sizes = {"int2_page_bytes": INT2_BYTES, "window_page_bytes": WINDOW_BYTES}
    return PagePool(config, **{"int2_pages": 64, "window_pages": 32, **sizes, **options})


def causal_rows(tokens: list[int]) -> list[bytes]:
    """One value per token that depends on every token up to it."""
    digest = hashlib.blake2b(digest_size=8)
    rows = []
    for token in tokens:
        digest.update(token.to_bytes(8, "little"))
        rows.append(digest.copy().digest())
    return rows


class ListCache:
    """Executes a pool's decisions on pages that are plain lists, through the tables alone."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.window = [[None] * 64 for _ in range(pool.window.capacity + 1)]
        self.int2: list[list] = [[]] * (pool.int2.capacity + 1)

    def append(self, sequences: list[int], new_tokens: list[list[int]], known: bool = True) -> None:
        """Appends rows that belong to the tokens, page for page like `cache.append_rows`."""
        before = [list(self.pool.state(s).tokens) for s in sequences] if known else [[] for _ in sequences]
        rows = [causal_rows(old + new)[len(old) :] for old, new in zip(before, new_tokens)]
        self.append_rows(sequences, rows, new_tokens if known else None)

    def append_rows(self, sequences, rows, tokens) -> None:
        """Appends given rows; tokens None hides them from prefix lookups."""
        config = self.pool.config
        plan = self.pool.begin_append(sequences, [len(r) for r in rows], tokens)
        for source, target in plan.copies:
            self.window[target] = list(self.window[source])
        for row, new in zip(plan.rows, rows):
            state = self.pool.state(row.sequence)
            length, history = state.length, len(state.int2_pages)
            table = state.int2_pages + row.int2_pages

            def slot(page: int) -> int:
                sinks = config.sink_pages
                return page if page < sinks else sinks + (page - sinks) % config.recent_slots

            for i in range(history, len(table)):
                page = config.sink_pages + i
                old = self.window[row.window_row[slot(page)]]
                start = 64 * page
                content = [
                    old[t - start] if t < length else new[t - length] for t in range(start, start + 64)
                ]
                assert table[i] not in state.int2_pages
                self.int2[table[i]] = content
            for t in range(length, length + len(new)):
                page = t // 64
                if page < config.sink_pages or page >= config.sink_pages + len(table):
                    physical = row.window_row[slot(page)]
                    assert physical != 0, "a live token in the reserved page"
                    self.window[physical] = list(self.window[physical])
                    self.window[physical][t % 64] = new[t - length]
        self.pool.finish_append(plan)

    def read(self, sequence: int) -> list:
        """All rows of a sequence, found through its tables."""
        state, config = self.pool.state(sequence), self.pool.config
        row = self.pool.window_row(sequence)
        rows = []
        for page in range(-(-state.length // 64)):
            i = page - config.sink_pages
            if 0 <= i < len(state.int2_pages):
                rows += self.int2[state.int2_pages[i]]
            else:
                slot = page if i < 0 else config.sink_pages + i % config.recent_slots
                rows += self.window[row[slot]]
        return rows[: state.length]


def test_twins_are_byte_identical():
    assert Path(jax_page_pool.__file__).read_bytes() == Path(torch_page_pool.__file__).read_bytes()


class TestAllocator:
    def test_page_zero_is_never_handed_out(self):
        pages = PageAllocator("INT2", 3, 1)
        assert sorted(pages.allocate() for _ in range(3)) == [1, 2, 3]
        with pytest.raises(CacheFullError, match="all 3 INT2 pages"):
            pages.allocate()

    def test_double_free_is_detected(self):
        pages = PageAllocator("INT2", 3, 1)
        page = pages.allocate()
        pages.release(page)
        with pytest.raises(PageStateError, match=f"double free of INT2 page {page}"):
            pages.release(page)

    @pytest.mark.parametrize("page", [0, -1, 4])
    def test_reserved_and_foreign_pages_are_refused(self, page):
        pages = PageAllocator("window", 3, 1)
        with pytest.raises(PageStateError, match=r"allowed: 1\.\.3"):
            pages.release(page)
        with pytest.raises(PageStateError, match=r"allowed: 1\.\.3"):
            pages.retain(page)

    def test_a_free_page_cannot_be_shared(self):
        with pytest.raises(PageStateError, match="is free"):
            PageAllocator("window", 3, 1).retain(2)

    def test_a_leak_is_detected(self):
        pages = PageAllocator("INT2", 3, 1)
        page = pages.allocate()
        with pytest.raises(PageStateError, match=f"page {page} counts 1 owners, 0"):
            pages.check({})

    def test_the_page_unused_longest_is_evicted_first(self):
        pages = PageAllocator("INT2", 2, 1)
        first, second = pages.allocate(), pages.allocate()
        pages.publish(first, (b"first", True))
        pages.publish(second, (b"second", True))
        pages.release(second)
        pages.release(first)
        assert pages.allocate() == second
        assert pages.find((b"second", True)) is None and pages.find((b"first", True)) == first
        pages.retain(first)
        assert pages.live == 2 and pages.kept == 0

    def test_growing_keeps_owners_and_hands_out_freed_pages_first(self):
        pages = PageAllocator("INT2", 2, 1)
        first, second = pages.allocate(), pages.allocate()
        pages.retain(first)
        pages.release(second)
        pages.grow(3)
        assert pages.capacity == 5 and pages.free == 4 and pages.references(first) == 2
        assert [pages.allocate() for _ in range(4)] == [second, 3, 4, 5]
        pages.check({first: 2, second: 1, 3: 1, 4: 1, 5: 1})
        with pytest.raises(CacheFullError, match="all 5 INT2 pages"):
            pages.allocate()
        with pytest.raises(ConfigError, match="further INT2 pages = 0, allowed: >= 1"):
            pages.grow(0)

    def test_a_copy_is_independent(self):
        pages = PageAllocator("INT2", 3, 1)
        first, second = pages.allocate(), pages.allocate()
        pages.publish(second, (b"second", True))
        pages.release(second)
        twin = pages.copy()
        twin.retain(second)
        twin.withdraw(second)
        twin.release(first)
        twin.grow(1)
        twin.check({second: 1})
        pages.check({first: 1})
        assert pages.find((b"second", True)) == second and pages.kept == 1 and pages.capacity == 3

    def test_the_same_calls_give_the_same_pages(self):
        def run() -> list[int]:
            rng, pages, owned, trace = random.Random(7), PageAllocator("INT2", 50, 1), [], []
            for _ in range(2000):
                if owned and (rng.random() < 0.5 or len(owned) == 50):
                    pages.release(owned.pop(rng.randrange(len(owned))))
                else:
                    owned.append(pages.allocate())
                    trace.append(owned[-1])
            return trace

        assert run() == run()


class TestSettings:
    @pytest.mark.parametrize("grid", [0, 63, 65, -64])
    def test_grid_must_be_whole_pages(self, grid):
        with pytest.raises(ConfigError, match="grid_tokens"):
            new_pool(grid_tokens=grid)

    def test_budget_below_one_page_is_refused(self):
        with pytest.raises(ConfigError, match="max_bytes"):
            new_pool(max_bytes=WINDOW_BYTES - 1)

    def test_empty_pools_are_refused(self):
        with pytest.raises(ConfigError, match="INT2 pages = 0"):
            new_pool(int2_pages=0)


class TestSequences:
    @pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 127, 128, 191, 192, 193, 255, 256, 384, 700])
    @pytest.mark.parametrize("config", [SMALL, DEFAULT], ids=["small", "default"])
    def test_layout_depends_on_length_alone(self, length, config):
        """One go, chunks of 48, one by one: the same rows in the same kinds of pages (26)."""
        tokens = list(range(length))
        for chunk in (length, 48, 64, 1):
            store = ListCache(new_pool(config))
            sequence = store.pool.create()
            for start in range(0, length, chunk):
                store.append([sequence], [tokens[start : start + chunk]])
            state = store.pool.state(sequence)
            assert len(state.int2_pages) == config.history_pages(length)
            assert (len(state.int2_pages), len(state.window_pages)) == store.pool.pages_for(length)
            assert store.read(sequence) == causal_rows(tokens)
            assert store.pool.live_bytes == store.pool.bytes_for(length)
            store.pool.check()

    def test_fork_shares_everything_until_one_side_writes(self):
        store = ListCache(new_pool(DEFAULT))
        tokens = list(range(500))
        parent = store.pool.create()
        store.append([parent], [tokens])
        live = store.pool.live_bytes
        child = store.pool.fork(parent)
        assert store.pool.live_bytes == live
        store.append([child], [[9]])
        assert store.pool.live_bytes == live + WINDOW_BYTES, "one recent page was copied"
        assert store.read(parent) == causal_rows(tokens)
        assert store.read(child) == causal_rows([*tokens, 9])
        shared = set(store.pool.state(parent).int2_pages) & set(store.pool.state(child).int2_pages)
        assert len(shared) == DEFAULT.history_pages(500)
        store.pool.check()

    def test_both_sides_of_a_fork_append_in_one_batch(self):
        """Only one of two owners copies; the other may then write in place."""
        store = ListCache(new_pool(DEFAULT))
        parent = store.pool.create()
        store.append([parent], [list(range(500))])
        child = store.pool.fork(parent)
        copied = store.pool.copied_pages
        for step in range(200):
            store.append([child, parent], [[step], [1000 + step]])
        assert store.pool.copied_pages == copied + 1
        assert store.read(parent) == causal_rows([*range(500), *range(1000, 1200)])
        assert store.read(child) == causal_rows([*range(500), *range(200)])
        store.pool.check()

    @pytest.mark.parametrize("reject", [1, 3, 40, 63])
    def test_rolled_back_tokens_never_were(self, reject):
        """Append k, reject j: the same as never appended, also over a flush that was not reached (10)."""
        for length in range(384, 448, 9):
            store = ListCache(new_pool(DEFAULT, int2_pages=200, window_pages=64))
            tokens = list(range(length))
            plain, rolled = store.pool.create(), store.pool.create()
            store.append([plain], [tokens])
            store.append([rolled], [tokens])
            extra = list(range(5000, 5000 + reject))
            store.append([rolled], [extra])
            crossed = DEFAULT.history_pages(length + reject) > DEFAULT.history_pages(length)
            if crossed:
                with pytest.raises(QuantizedTokensError, match="quantized"):
                    store.pool.truncate(rolled, length)
                continue
            assert store.pool.truncate(rolled, length) == length
            for step in range(150):
                store.append([plain, rolled], [[step], [step]])
            assert store.read(plain) == store.read(rolled)
            assert len(store.pool.state(plain).int2_pages) == len(store.pool.state(rolled).int2_pages)
            store.pool.check()

    def test_truncate_refuses_exactly_what_is_quantized(self):
        """Every cut of a 700-token sequence is exact, or refused by name and possible on request."""
        tokens = list(range(700))
        history = DEFAULT.history_pages(700)
        for length in range(701):
            store = ListCache(new_pool(DEFAULT))
            sequence = store.pool.create()
            store.append([sequence], [tokens])
            exact = length <= 64 or DEFAULT.history_pages(length) == history
            assert exact == (length <= 64 or length >= store.pool.shortest_exact_length(sequence))
            if exact:
                assert store.pool.truncate(sequence, length) == length
                assert len(store.pool.state(sequence).int2_pages) == DEFAULT.history_pages(length)
            else:
                with pytest.raises(QuantizedTokensError, match=f"to {length}:"):
                    store.pool.truncate(sequence, length)
                assert store.read(sequence) == causal_rows(tokens), "a refusal changes nothing"
                end = 64 + 64 * history
                kept = length if length >= end else length - length % 64
                assert store.pool.truncate(sequence, length, keep_quantized=True) == kept
                length = kept
            assert store.read(sequence) == causal_rows(tokens[:length])
            store.append([sequence], [tokens[length:]])
            assert store.read(sequence) == causal_rows(tokens)
            store.pool.check()

    @pytest.mark.parametrize("length", [-1, 11])
    def test_truncate_cannot_grow(self, length):
        store = ListCache(new_pool())
        sequence = store.pool.create()
        store.append([sequence], [list(range(10))])
        with pytest.raises(ShapeError, match=r"allowed: 0\.\.10"):
            store.pool.truncate(sequence, length)

    def test_beam_reorder_touches_whole_sequences(self):
        """Survivors continue, repeats fork, losers end; history and recent part move together (23)."""
        store = ListCache(new_pool(DEFAULT))
        first = store.pool.create()
        store.append([first], [list(range(400))])
        beams = store.pool.repeat(first, 4)
        expected = [list(range(400)) for _ in beams]
        rng = random.Random(3)
        for _ in range(120):
            new = [rng.randrange(50) for _ in beams]
            store.append(beams, [[token] for token in new])
            expected = [[*tokens, token] for tokens, token in zip(expected, new)]
            sources = [rng.randrange(4) for _ in beams]
            beams = store.pool.reorder(beams, sources)
            expected = [expected[source] for source in sources]
            assert [store.read(beam) for beam in beams] == [causal_rows(tokens) for tokens in expected]
        store.pool.check()
        for beam in beams:
            store.pool.free(beam)
        assert store.pool.live_bytes == 0

    def test_misuse_is_named(self):
        pool = new_pool()
        sequence = pool.create()
        pool.free(sequence)
        for call in (pool.free, pool.fork, pool.state, pool.window_row):
            with pytest.raises(PageStateError, match="does not exist"):
                call(sequence)
        sequence = pool.create()
        with pytest.raises(PageStateError, match="twice"):
            pool.begin_append([sequence, sequence], [1, 1])
        with pytest.raises(PageStateError, match="twice"):
            pool.reorder([sequence, sequence], [0, 0])
        with pytest.raises(ShapeError, match="sources"):
            pool.reorder([sequence], [-1])
        with pytest.raises(ShapeError, match="count"):
            pool.begin_append([sequence], [-1])
        with pytest.raises(ShapeError, match="count = 2 with 1 tokens"):
            pool.begin_append([sequence], [2], [[5]])
        plan = pool.begin_append([sequence], [5])
        for call in (pool.free, pool.fork, lambda s: pool.truncate(s, 0)):
            with pytest.raises(PageStateError, match="unfinished append"):
                call(sequence)
        pool.check()
        pool.abort_append(plan)
        with pytest.raises(PageStateError, match="already"):
            pool.finish_append(plan)
        pool.check()
        assert pool.live_bytes == 0


class TestBudget:
    def test_full_pool_refuses_and_loses_nothing(self):
        store = ListCache(new_pool(int2_pages=4, window_pages=8))
        first, second = store.pool.create(), store.pool.create()
        store.append([first], [list(range(300))])
        store.append([second], [list(range(100, 300))])
        before = (store.read(first), store.read(second), store.pool.statistics())
        with pytest.raises(CacheFullError, match=r"INT2 pages needed.*nothing was changed"):
            store.append([first, second], [list(range(130)), list(range(130))])
        assert (store.read(first), store.read(second), store.pool.statistics()) == before
        store.pool.check()
        store.pool.free(second)
        store.append([first], [list(range(130))])

    def test_byte_budget_is_exact(self):
        """The last byte admits a page, one byte less refuses it."""
        need = 4 * INT2_BYTES + 2 * WINDOW_BYTES
        for budget, fits in ((need, True), (need - 1, False)):
            store = ListCache(new_pool(max_bytes=budget))
            assert store.pool.bytes_for(384) == need
            # growing to 384 needs the three window pages of 383 tokens and the fourth INT2 page at once
            assert store.pool.can_admit(384) is False
            assert new_pool(max_bytes=budget + WINDOW_BYTES).can_admit(384) is fits
            sequence = store.pool.create()
            if fits:
                store.append([sequence], [list(range(384))])
                assert store.pool.live_bytes == need == store.pool.statistics().peak_live_bytes
            else:
                with pytest.raises(
                    CacheFullError, match=f"{need} more bytes needed, {budget} left of max_bytes = {budget}"
                ):
                    store.append([sequence], [list(range(384))])
            store.pool.check()

    def test_kept_pages_make_room(self):
        """Pages kept for reuse never stand in the way of live tokens."""
        store = ListCache(new_pool(int2_pages=8, window_pages=6))
        for round_ in range(20):
            sequence = store.pool.create()
            store.append([sequence], [[round_ * 1000 + i for i in range(500)]])
            store.pool.free(sequence)
            store.pool.check()
        statistics = store.pool.statistics()
        assert statistics.evictions > 0 and statistics.live_bytes == 0
        assert statistics.int2_kept + statistics.int2_free == 8

    def test_statistics_add_up(self):
        store = ListCache(new_pool())
        sequence = store.pool.create()
        store.append([sequence], [list(range(300))])
        statistics = store.pool.statistics()
        int2, window = store.pool.pages_for(300)
        assert (statistics.int2_live, statistics.window_live) == (int2, window)
        assert statistics.int2_live + statistics.int2_kept + statistics.int2_free == 64
        assert statistics.window_live + statistics.window_kept + statistics.window_free == 32
        assert statistics.tokens == 300 and statistics.sequences == 1


class TestPrefix:
    def prefill(self, store: ListCache, tokens: list[int], **options) -> int:
        """A sequence that resumes where the pool can, and prefills the rest on the grid."""
        sequence = store.pool.create(tokens, **options)
        grid = store.pool.grid_tokens
        start = store.pool.state(sequence).length
        while start < len(tokens):
            stop = min(len(tokens), (start // grid + 1) * grid)
            store.append([sequence], [tokens[start:stop]])
            start = stop
        return sequence

    def test_exact_reuse_restores_the_whole_state(self):
        store = ListCache(new_pool(DEFAULT, int2_pages=200, window_pages=100))
        tokens = list(range(1400))
        donor = self.prefill(store, tokens)
        for length in (65, 128, 129, 300, 321, 384, 385, 449, 1000, 1399, 1400, 1401, 1500):
            prompt = [*tokens, *range(9000, 9100)][:length]
            prefix = store.pool.find_prefix(prompt)
            assert prefix is not None and prefix.grid
            assert prefix.length == min(1344, (length - 1) // 64 * 64), "pages of released windows are kept"
            assert prefix.history_pages == DEFAULT.history_pages(prefix.length)
            borrower = self.prefill(store, prompt)
            assert store.read(borrower) == causal_rows(prompt)
            state = store.pool.state(borrower)
            # the borrower keeps its own last tokens BF16 (2)
            assert len(state.int2_pages) == DEFAULT.history_pages(length)
            assert length - 64 - 64 * len(state.int2_pages) >= min(256, length - 64)
            store.pool.check()
        assert store.read(donor) == causal_rows(tokens)

    def test_long_donor_short_borrower(self):
        """A 1400-token donor, then a 300-token prompt: its last min(256, L - 64) tokens are BF16 (2)."""
        for reuse in ("exact", "quantized"):
            store = ListCache(new_pool(DEFAULT, window_pages=12))
            tokens = list(range(1400))
            self.prefill(store, tokens)
            borrower = self.prefill(store, tokens[:300], reuse=reuse)
            assert store.pool.state(borrower).int2_pages == []
            assert store.pool.statistics().reused_tokens >= 64
            assert store.read(borrower) == causal_rows(tokens[:300])

    def test_quantized_reuse_needs_no_windows(self):
        """With every BF16 page but the sink evicted, exact reuse stops at the sink, quantized does not."""
        store = ListCache(new_pool(DEFAULT, int2_pages=40, window_pages=7))
        tokens = list(range(1000))
        donor = self.prefill(store, tokens)
        store.pool.free(donor)
        other = store.pool.create()
        store.append([other], [list(range(5000, 5300))])
        store.pool.free(other)
        prompt = [*tokens[:900], *range(7000, 7050)]
        exact = store.pool.find_prefix(prompt)
        quantized = store.pool.find_prefix(prompt, reuse="quantized")
        assert exact is None or exact.length <= 64
        if quantized is not None:  # the sink page survived
            assert quantized.length == 64 + 64 * DEFAULT.history_pages(950)

    def test_evicted_int2_pages_end_the_prefix(self):
        """BF16 pages alone, behind a missing INT2 page, are not a state to resume from."""
        store = ListCache(new_pool(DEFAULT, window_pages=64))
        tokens = list(range(1000))
        donor = self.prefill(store, tokens)
        store.pool.free(donor)
        for evicted in range(1, 11):  # the deepest page goes first: 704 ..., then 640 ..., then 576 ...
            store.pool.int2.evict()
            prefix = store.pool.find_prefix(tokens)
            assert prefix is not None and len(prefix.int2_pages) == 10 - evicted == prefix.history_pages
            assert prefix.length == min(960, 64 * (10 - evicted) + 64 + 256)
            store.pool.check()
        borrower = self.prefill(store, tokens)
        assert store.read(borrower) == causal_rows(tokens)
        store.pool.check()

    def test_quantized_reuse_keeps_the_recent_tokens(self):
        store = ListCache(new_pool(DEFAULT, window_pages=7))
        tokens = list(range(1400))
        donor = self.prefill(store, tokens)
        prompt = [*tokens[:800], *range(7000, 7100)]
        borrower = store.pool.create(prompt, reuse="quantized")
        state = store.pool.state(borrower)
        history = DEFAULT.history_pages(900)
        assert state.length == 64 + 64 * history and len(state.int2_pages) == history == state.forced_pages
        assert state.int2_pages == store.pool.state(donor).int2_pages[:history]
        with pytest.raises(CacheFullError):
            store.append([borrower], [prompt[state.length :]])
        store.pool.free(donor)
        store.append([borrower], [prompt[state.length :]])
        assert store.read(borrower) == causal_rows(prompt)
        assert len(state.int2_pages) == history
        store.append([borrower], [list(range(200))])
        assert len(store.pool.state(borrower).int2_pages) == DEFAULT.history_pages(1100)
        store.pool.check()

    def test_other_tokens_share_nothing(self):
        store = ListCache(new_pool())
        tokens = list(range(400))
        self.prefill(store, tokens)
        for position in (0, 1, 63):
            prompt = list(tokens)
            prompt[position] += 1
            assert store.pool.find_prefix(prompt) is None
        prompt = list(tokens)
        prompt[64] += 1
        prefix = store.pool.find_prefix(prompt)
        assert prefix is not None and prefix.length == 64
        assert store.pool.find_prefix(tokens[:64]) is None, "one token must be left to compute"
        assert store.pool.find_prefix([]) is None
        assert store.pool.find_prefix(tokens, reuse=None) is None
        with pytest.raises(ConfigError, match="reuse"):
            store.pool.find_prefix(tokens, reuse="fuzzy")

    def test_generated_tokens_are_reusable_on_request(self):
        """Pages written token by token are off the grid: found only when asked for."""
        store = ListCache(new_pool(DEFAULT, window_pages=64))
        prompt = list(range(200))
        sequence = self.prefill(store, prompt)
        answer = list(range(3000, 3400))
        for token in answer:
            store.append([sequence], [[token]])
        turn = [*prompt, *answer, 1, 2, 3]
        exact = store.pool.find_prefix(turn)
        assert exact is not None and exact.length == 192 and exact.grid
        generated = store.pool.find_prefix(turn, generated=True)
        assert generated is not None and generated.length == 576 and not generated.grid
        borrower = self.prefill(store, turn, generated=True)
        assert store.read(borrower) == causal_rows(turn)
        assert store.pool.state(borrower).grid_length == 0, "what builds on it is off the grid too"
        store.pool.check()

    def test_coarse_grid_resumes_at_its_own_boundaries(self):
        store = ListCache(new_pool(DEFAULT, grid_tokens=256, int2_pages=100, window_pages=64))
        tokens = list(range(1400))
        self.prefill(store, tokens)
        for length in (200, 257, 700, 1300, 1400):
            prefix = store.pool.find_prefix(tokens[:length])
            expected = (length - 1) // 256 * 256
            assert (prefix.length if prefix else 0) == expected

    def test_unknown_tokens_are_never_found(self):
        store = ListCache(new_pool())
        sequence = store.pool.create()
        store.append([sequence], [list(range(300))], known=False)
        store.append([sequence], [list(range(300, 400))])
        assert store.pool.find_prefix(list(range(400))) is None
        assert len(store.pool.state(sequence).tokens) == 0

    def test_rewritten_page_is_withdrawn(self):
        """A findable page that its only owner overwrites after a cut must not be found any more."""
        store = ListCache(new_pool(window_pages=2))
        tokens = list(range(128))
        sequence = self.prefill(store, tokens)
        assert store.pool.find_prefix([*tokens, 0]) is not None
        store.pool.truncate(sequence, 100)
        store.append([sequence], [list(range(500, 528))])
        prefix = store.pool.find_prefix([*tokens, 0])
        assert prefix is not None and prefix.length == 64
        assert store.read(sequence) == causal_rows([*tokens[:100], *range(500, 528)])

    def test_import_registers_what_it_brings(self):
        pool = new_pool(DEFAULT)
        tokens = list(range(500))
        sequence = pool.import_sequence(500, grid_length=448, tokens=tokens)
        prefix = pool.find_prefix(tokens)
        assert prefix is not None and prefix.length == 448
        assert pool.state(sequence).tokens == array("q", tokens)
        pool.check()
        with pytest.raises(CacheFullError):
            pool.import_sequence(100_000)
        for forced, grid in ((0, 501), (-1, 0), (7, 0)):
            with pytest.raises(ConfigError):
                pool.import_sequence(500, forced_pages=forced, grid_length=grid)
        pool.check()


class Machine(RuleBasedStateMachine):
    """Random operations on a pool at its limit against plain lists of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[int, list[int]] = {}

    @initialize(grid=st.sampled_from([64, 128]), window=st.integers(6, 16), int2=st.integers(4, 16))
    def start(self, grid, window, int2):
        budget = int2 * INT2_BYTES + window * WINDOW_BYTES - 1000
        pool = new_pool(SMALL, int2_pages=int2, window_pages=window, grid_tokens=grid, max_bytes=budget)
        self.store = ListCache(pool)

    def pick(self, data) -> int | None:
        return data.draw(st.sampled_from(sorted(self.model))) if self.model else None

    @rule(
        length=st.integers(0, 400),
        stem=st.integers(0, 2),
        reuse=st.sampled_from([None, "exact", "quantized"]),
        generated=st.booleans(),
    )
    def create(self, length, stem, reuse, generated):
        prompt = [stem * 1000 + i for i in range(length)]
        sequence = self.store.pool.create(prompt, reuse=reuse, generated=generated)
        self.model[sequence] = prompt[: self.store.pool.state(sequence).length]

    @rule(data=st.data(), count=st.sampled_from([0, 1, 1, 2, 63, 64, 65, 130, 300]), follow=st.booleans())
    def append(self, data, count, follow):
        if not self.model:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True, max_size=3))
        new = [[len(self.model[s]) + i + (0 if follow else 7) for i in range(count)] for s in chosen]
        try:
            self.store.append(chosen, new)
        except CacheFullError:
            return
        for sequence, tokens in zip(chosen, new):
            self.model[sequence] = self.model[sequence] + tokens

    @rule(data=st.data())
    def abort(self, data):
        sequence = self.pick(data)
        if sequence is None:
            return
        try:
            plan = self.store.pool.begin_append([sequence], [1])
        except CacheFullError:
            return
        self.store.pool.check()
        self.store.pool.abort_append(plan)

    @rule(data=st.data())
    def fork(self, data):
        sequence = self.pick(data)
        if sequence is not None and len(self.model) < 8:
            self.model[self.store.pool.fork(sequence)] = list(self.model[sequence])

    @rule(data=st.data(), cut=st.integers(0, 200), keep=st.booleans())
    def truncate(self, data, cut, keep):
        sequence = self.pick(data)
        if sequence is None:
            return
        length = max(0, len(self.model[sequence]) - cut)
        try:
            length = self.store.pool.truncate(sequence, length, keep_quantized=keep)
        except QuantizedTokensError:
            assert not keep
            return
        self.model[sequence] = self.model[sequence][:length]

    @rule(data=st.data())
    def free(self, data):
        sequence = self.pick(data)
        if sequence is not None:
            self.store.pool.free(sequence)
            del self.model[sequence]

    @rule(data=st.data())
    def reorder(self, data):
        beams = sorted(self.model)[:3]
        if beams:
            sources = data.draw(st.lists(st.integers(0, len(beams) - 1), min_size=1, max_size=4))
            old = [self.model.pop(beam) for beam in beams]
            for beam, source in zip(self.store.pool.reorder(beams, sources), sources):
                self.model[beam] = list(old[source])

    @invariant()
    def every_sequence_reads_back(self):
        if hasattr(self, "store"):
            self.store.pool.check()
            for sequence, tokens in self.model.items():
                assert self.store.read(sequence) == causal_rows(tokens)

    def teardown(self):
        if hasattr(self, "store"):
            for sequence in self.model:
                self.store.pool.free(sequence)
            self.store.pool.check()
            assert self.store.pool.live_bytes == 0


Machine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow,),
)
TestMachine = Machine.TestCase
