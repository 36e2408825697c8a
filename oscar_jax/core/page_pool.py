"""Who owns which page: the host-side half of a serving cache, in plain integers.

Twin file: byte-identical in both packages. Standard library only: nothing here touches an array.
`serving.SequencePool` executes the decisions on the arrays.

Pages. A token page is 64 consecutive tokens of one sequence. It is stored either as a BF16 window page (the
sink, and the recent tokens) or as an INT2 page, in physical pages numbered 1..capacity of their kind. One
physical page number stands for the page of *every* layer of the model. Physical page 0 of both kinds is
reserved: padding rows of a batch point at it, so they cannot reach live data.

Sharing. INT2 pages and full sink pages never change, so sequences share them by reference. Recent pages are
shared too until one owner writes: then it gets a copy (`AppendPlan.copies`).

Prefix reuse. Every full page of known tokens has a chained hash (its 64 tokens and the hash of the page
before). Pages of both precisions are found by it, also after their last owner has gone, until their space is
needed: then the page unused for the longest time is evicted. `reuse="exact"` resumes only at a length whose
*whole* state (sink, INT2 and recent BF16 pages) is still there, computed on the same chunk grid: nothing
that follows can tell a shared run from an unshared one. `reuse="quantized"` also resumes behind INT2 pages
alone. That saves more work, but the tokens computed next see as INT2 what they would have seen as BF16.
The chain of hashes begins with a `salt`: where the same tokens have other keys and values (another adapter,
other images), or must not be found at all (another tenant), another salt keeps the pages apart.

Interrupted appends. `abort_append` restores every sequence, also when rows were written: they lie beyond the
lengths, or on pages of their own. Only a pool without a page to spare writes over BF16 rows that are about to
be quantized; then an abort leaves a damaged sequence that can be freed and nothing else.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Sequence

from .cache_format import PAGE_TOKENS
from .config import CacheConfig
from .errors import CacheFullError, ConfigError, OscarError, ShapeError
from .page_allocator import PageAllocator, PageKey, PageStateError
from .page_records import (
    AppendPlan,
    PoolStatistics,
    Prefix,
    SequenceAppend,
    SequenceState,
    entries,
    token_ids,
    whole_number,
    whole_numbers,
)

REUSE = (None, "exact", "quantized")


class QuantizedTokensError(OscarError):
    """A sequence cannot be cut to this length exactly: tokens that would have to be BF16 are quantized."""


class PagePool:
    """Sequences over shared pages: create, append, fork, truncate, free, reorder, repeat, prefix lookup.

    `config` gives the lengths of sink and recent part; `int2_page_bytes` and `window_page_bytes` are the
    bytes of one page over all layers and heads. Live and kept pages together never exceed `max_bytes`
    (default: all pages). `grid_tokens` is the prefill chunk on which exact reuse relies.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        int2_pages: int,
        window_pages: int,
        int2_page_bytes: int,
        window_page_bytes: int,
        max_bytes: int | None = None,
        grid_tokens: int = PAGE_TOKENS,
        salt: bytes = b"",
    ) -> None:
        sizes = {"int2_pages": int2_pages, "window_pages": window_pages, "grid_tokens": grid_tokens}
        sizes |= {"int2_page_bytes": int2_page_bytes, "window_page_bytes": window_page_bytes}
        for name, size in (sizes | ({} if max_bytes is None else {"max_bytes": max_bytes})).items():
            whole_number(name, size, ConfigError)
        if grid_tokens < PAGE_TOKENS or grid_tokens % PAGE_TOKENS:
            raise ConfigError(f"grid_tokens = {grid_tokens}, allowed: positive multiples of {PAGE_TOKENS}")
        self.config = config
        self.grid_tokens = grid_tokens
        self.int2 = PageAllocator("INT2", int2_pages, int2_page_bytes)
        self.window = PageAllocator("window", window_pages, window_page_bytes)
        total = int2_pages * int2_page_bytes + window_pages * window_page_bytes
        self.max_bytes = total if max_bytes is None else max_bytes
        if self.max_bytes < window_page_bytes:
            raise ConfigError(f"max_bytes = {max_bytes}, allowed: >= {window_page_bytes} (one window page)")
        self.peak_live_bytes = 0
        self.copied_pages = 0
        self.reused_tokens = 0
        self._sequences: dict[int, SequenceState] = {}
        self._next_sequence = 0
        self._salt = salt
        self._plans: list[AppendPlan] = []

    # ---------------------------------------------------------------- reading

    @property
    def sequences(self) -> list[int]:
        """Living sequences, oldest first."""
        return list(self._sequences)

    @property
    def live_bytes(self) -> int:
        """Bytes of pages that have an owner, over all layers."""
        return self.int2.live * self.int2.page_bytes + self.window.live * self.window.page_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of pages that wait without an owner to be found again."""
        return self.int2.kept * self.int2.page_bytes + self.window.kept * self.window.page_bytes

    def state(self, sequence: int) -> SequenceState:
        """The bookkeeping of a living sequence; read only."""
        try:
            return self._sequences[sequence]
        except (KeyError, TypeError):  # TypeError: no number at all
            raise PageStateError(
                f"sequence {sequence!r} does not exist; it was freed or never created"
            ) from None

    def usable(self, sequence: int, *, damaged: bool = False) -> SequenceState:
        """`state`, or PageStateError in an unfinished append, or if it is damaged unless `damaged` allows."""
        state = self.state(sequence)
        if state.busy:
            raise PageStateError(f"sequence {sequence} has an unfinished append: finish or abort it")
        if state.damaged and not damaged:
            raise PageStateError(
                f"sequence {sequence} lost BF16 rows in an aborted append: free it and create it again"
            )
        return state

    def window_row(self, sequence: int) -> list[int]:
        """The sequence's row of the window table, padded with page 0."""
        return self._window_row(self.state(sequence).window_pages)

    def pages_for(self, length: int) -> tuple[int, int]:
        """INT2 and window pages of a sequence of `length` tokens that shares nothing."""
        int2 = self.config.history_pages(length)
        return int2, _pages(length) - int2

    def bytes_for(self, length: int) -> int:
        """Bytes of a sequence of `length` tokens that shares nothing, over all layers."""
        int2, window = self.pages_for(length)
        return int2 * self.int2.page_bytes + window * self.window.page_bytes

    def can_admit(self, length: int) -> bool:
        """Whether a new sequence may grow to `length` tokens if nothing else grows meanwhile."""
        window = min(_pages(length), self.config.window_slots)
        return self._shortage(self.config.history_pages(length), window) is None

    def statistics(self) -> PoolStatistics:
        """Counts at this moment."""
        return PoolStatistics(
            sequences=len(self._sequences),
            tokens=sum(state.length for state in self._sequences.values()),
            int2_live=self.int2.live,
            int2_kept=self.int2.kept,
            int2_free=self.int2.free,
            window_live=self.window.live,
            window_kept=self.window.kept,
            window_free=self.window.free,
            live_bytes=self.live_bytes,
            kept_bytes=self.kept_bytes,
            peak_live_bytes=self.peak_live_bytes,
            max_bytes=self.max_bytes,
            evictions=self.int2.evictions + self.window.evictions,
            copied_pages=self.copied_pages,
            reused_tokens=self.reused_tokens,
        )

    def check(self) -> None:
        """Audits everything: raises PageStateError on a leak, a wrong count or a wrong layout."""
        int2: dict[int, int] = {}
        window: dict[int, int] = {}
        for sequence, state in self._sequences.items():
            self._check_layout(sequence, state)
            for page in state.int2_pages:
                int2[page] = int2.get(page, 0) + 1
            for page in state.window_pages.values():
                window[page] = window.get(page, 0) + 1
        for plan in self._plans:
            for row in plan.rows:
                for page in row.int2_pages:
                    int2[page] = int2.get(page, 0) + 1
                for page in row.allocated:
                    window[page] = window.get(page, 0) + 1
        self.int2.check(int2)
        self.window.check(window)
        if self.live_bytes + self.kept_bytes > self.max_bytes:
            raise PageStateError(f"{self.live_bytes + self.kept_bytes} bytes used of {self.max_bytes}")

    # ---------------------------------------------------------------- sequences

    def create(
        self,
        prompt: Sequence[int] | None = None,
        *,
        reuse: str | None = "exact",
        generated: bool = False,
        salt: bytes = b"",
    ) -> int:
        """A new sequence, already holding what `find_prefix` finds of its prompt; else it is empty.

        The caller computes and appends the prompt from `state(sequence).length` on. Only sequences of the
        same salt ever find pages of this one.
        """
        self._root(salt)  # refuses what is no salt
        prompt = None if prompt is None else token_ids(prompt)
        options = {"reuse": reuse, "generated": generated, "salt": salt}
        prefix = None if prompt is None else self.find_prefix(prompt, **options)
        state = SequenceState(salt=salt)
        if prefix is not None and prompt is not None:
            for page in prefix.int2_pages:
                self.int2.retain(page)
            for page in prefix.window_pages.values():
                self.window.retain(page)
            self._note_peak()
            state.length = prefix.length
            state.forced_pages = (
                prefix.history_pages if prefix.history_pages > self.config.history_pages(prefix.length) else 0
            )
            state.grid_length = prefix.length if prefix.grid else 0
            state.int2_pages = list(prefix.int2_pages)
            state.window_pages = dict(prefix.window_pages)
            state.tokens = token_ids(prompt[: prefix.length])
            self._extend_hashes(state)
            self.reused_tokens += prefix.length
        return self._register(state)

    def import_sequence(
        self,
        length: int,
        *,
        forced_pages: int = 0,
        grid_length: int = 0,
        tokens: Sequence[int] = (),
        salt: bytes = b"",
    ) -> int:
        """A sequence of `length` tokens on fresh pages that the caller fills; raises CacheFullError."""
        history = max(forced_pages, self.config.history_pages(length))
        sinks = min(self.config.sink_pages, _pages(length))
        if not 0 <= grid_length <= length or len(tokens) > length or forced_pages < 0:
            raise ConfigError(
                f"length {length} with grid_length {grid_length}, {len(tokens)} tokens, "
                f"forced_pages {forced_pages} is not a sequence"
            )
        if forced_pages and self.config.sink_tokens + forced_pages * PAGE_TOKENS > length:
            raise ConfigError(f"{forced_pages} INT2 pages do not fit into {length} tokens")
        self._root(salt)  # refuses what is no salt
        known = token_ids(tokens)
        held = [*range(sinks), *range(self.config.sink_pages + history, _pages(length))]
        self._require(history, len(held))
        state = SequenceState(length, forced_pages, grid_length, salt=salt)
        state.int2_pages = [self._allocate(self.int2) for _ in range(history)]
        state.window_pages = {page: self._allocate(self.window) for page in held}
        state.tokens = known
        self._extend_hashes(state)
        self._publish(state, 0, 0)
        return self._register(state)

    def fork(self, sequence: int) -> int:
        """A second sequence of the same content; every page is shared until one of the two writes to it."""
        source = self.usable(sequence)
        for page in source.int2_pages:
            self.int2.retain(page)
        for page in source.window_pages.values():
            self.window.retain(page)
        return self._register(
            dataclasses.replace(
                source,
                int2_pages=list(source.int2_pages),
                window_pages=dict(source.window_pages),
                tokens=array("q", source.tokens),
                hashes=list(source.hashes),
            )
        )

    def free(self, sequence: int) -> None:
        """Ends a sequence; its findable pages are kept for reuse until their space is needed."""
        state = self.usable(sequence, damaged=True)
        del self._sequences[sequence]
        # The last pages first: they are then evicted before the pages without which they cannot be found.
        for token_page in sorted(state.window_pages, reverse=True):
            self.window.release(state.window_pages[token_page])
        for page in reversed(state.int2_pages):
            self.int2.release(page)

    def truncate(self, sequence: int, length: int, *, keep_quantized: bool = False) -> int:
        """Cuts a sequence to `length` tokens, as if the others had never come; returns the new length.

        That is exact while every token that such a shorter sequence holds in BF16 still is BF16. Otherwise
        QuantizedTokensError, or with `keep_quantized` the INT2 pages stay as they are (the sequence then has
        more of them than its length asks for), and a cut inside an INT2 page falls back to that page's
        beginning: append the missing 1..63 tokens again.
        """
        state, length = self.usable(sequence), whole_number("length", length)
        if not 0 <= length <= state.length:
            raise ShapeError(f"length = {length}, allowed: 0..{state.length}")
        sink = self.config.sink_tokens
        history = len(state.int2_pages)
        quantized_end = sink + history * PAGE_TOKENS
        forced = state.forced_pages
        if length == state.length:
            return length
        if length <= sink:
            history = forced = 0
        elif length < quantized_end or max(forced, self.config.history_pages(length)) < history:
            if not keep_quantized:
                raise QuantizedTokensError(
                    f"cannot cut sequence {sequence} of {state.length} tokens to {length}: its tokens "
                    f"{sink}..{quantized_end - 1} are quantized, a sequence of {length} tokens has only "
                    f"{self.config.history_pages(length)} INT2 pages; the shortest exact cut is to "
                    f"{self.shortest_exact_length(sequence)}; keep_quantized=True keeps them quantized"
                )
            history = min(history, (length - sink) // PAGE_TOKENS)
            forced = history
            if length < quantized_end:
                length = sink + history * PAGE_TOKENS
        for token_page in sorted(state.window_pages, reverse=True):
            if token_page >= _pages(length):
                self.window.release(state.window_pages.pop(token_page))
        while len(state.int2_pages) > history:
            self.int2.release(state.int2_pages.pop())
        state.length = length
        state.forced_pages = forced
        state.grid_length = min(state.grid_length, length)
        del state.tokens[length:]
        del state.hashes[length // PAGE_TOKENS :]
        return length

    def shortest_exact_length(self, sequence: int) -> int:
        """The shortest length beyond the sink to which `truncate` cuts without touching quantized tokens."""
        state = self.state(sequence)
        history = len(state.int2_pages)
        if history == 0:
            return 0
        recent = 0 if state.forced_pages == history else self.config.recent_tokens
        return self.config.sink_tokens + history * PAGE_TOKENS + recent

    def repeat(self, sequence: int, count: int) -> list[int]:
        """`count` sequences of the same content: the given one and forks of it."""
        if whole_number("count", count) < 1:
            raise ConfigError(f"count = {count}, allowed: >= 1")
        return [sequence, *(self.fork(sequence) for _ in range(count - 1))]

    def reorder(self, sequences: Sequence[int], sources: Sequence[int]) -> list[int]:
        """The beam step: result i continues sequences[sources[i]]; sequences that nobody continues end."""
        sequences, sources = entries("sequences", sequences), whole_numbers("sources", sources)
        for sequence in sequences:
            self.usable(sequence)
        if len(set(sequences)) != len(sequences):
            raise PageStateError(f"a sequence appears twice in {sequences}")
        if any(not 0 <= source < len(sequences) for source in sources):
            raise ShapeError(f"sources = {sources}, allowed: 0..{len(sequences) - 1}")
        result = []
        used: set[int] = set()
        for source in sources:
            sequence = sequences[source]
            result.append(self.fork(sequence) if sequence in used else sequence)
            used.add(sequence)
        for sequence in sequences:
            if sequence not in used:
                self.free(sequence)
        return result

    # ---------------------------------------------------------------- appending

    def begin_append(
        self,
        sequences: Sequence[int],
        counts: Sequence[int],
        tokens: Sequence[Sequence[int] | None] | None = None,
    ) -> AppendPlan:
        """Reserves the pages for `counts[i]` new tokens of every sequence, all or none.

        Raises CacheFullError, with nothing changed, if they do not fit. Until `finish_append` or
        `abort_append` the sequences cannot be used otherwise. Sequences without known `tokens` are not found
        by prefix lookups.
        """
        sequences, counts = entries("sequences", sequences), whole_numbers("counts", counts)
        every = [None] * len(sequences) if tokens is None else entries("tokens", tokens)
        token_lists = [None if given is None else token_ids(given) for given in every]
        if not len(sequences) == len(counts) == len(token_lists):
            raise ShapeError(
                f"{len(sequences)} sequences, {len(counts)} counts, {len(token_lists)} token lists"
            )
        states = [self.usable(sequence) for sequence in sequences]
        if len(set(sequences)) != len(sequences):
            raise PageStateError(f"a sequence appears twice in {sequences}")
        for count, given in zip(counts, token_lists):
            if count < 0 or (given is not None and len(given) != count):
                raise ShapeError(f"count = {count} with {None if given is None else len(given)} tokens")

        # Decide before touching anything. A target of None stands for a page still to be allocated.
        int2_need = []
        choices: list[list[tuple[int, int | None, bool]]] = []  # (token page, page it replaces, must copy)
        window_need = 0
        departing: dict[int, int] = {}
        for state, count in zip(states, counts):
            int2_need.append(self._history(state, state.length + count) - len(state.int2_pages))
            occupant = {self._slot(page): page for page in state.window_pages}
            written = []
            for token_page in self._held(state, state.length + count):
                if count == 0 or token_page < state.length // PAGE_TOKENS:
                    continue
                old = occupant.get(self._slot(token_page))
                physical = None if old is None else state.window_pages[old]
                must_copy = False
                if physical is not None:
                    owners = self.window.references(physical) - departing.get(physical, 0)
                    must_copy = owners > 1
                    if must_copy:
                        departing[physical] = departing.get(physical, 0) + 1
                window_need += physical is None or must_copy
                written.append((token_page, physical, must_copy))
            choices.append(written)
        self._require(sum(int2_need), window_need)

        # Overwriting a findable page would lose it for others, and overwriting one whose rows the sequence
        # still holds would make the append final: copy them first while there is room to spare.
        spare = min(
            self.window.capacity - self.window.live - window_need,
            (self.max_bytes - self.live_bytes - sum(int2_need) * self.int2.page_bytes)
            // self.window.page_bytes
            - window_need,
        )
        plan = AppendPlan([], [])
        for sequence, state, count, given, need, written in zip(
            sequences, states, counts, token_lists, int2_need, choices
        ):
            target: dict[int, int] = {
                page: state.window_pages[page]
                for page in self._held(state, state.length + count)
                if page in state.window_pages
            }
            row = SequenceAppend(sequence, count, given, [], target, [], [], [])
            for token_page, physical, must_copy in written:
                departs = physical is not None and token_page not in state.window_pages
                if physical is not None and not must_copy and (departs or self.window.key(physical)):
                    if spare > 0:
                        spare -= 1
                        must_copy = True
                    else:
                        self.window.withdraw(physical)
                        row.overwritten |= departs
                if physical is not None and not must_copy:
                    target[token_page] = physical
                    continue
                fresh = self._allocate(self.window)
                row.allocated.append(fresh)
                target[token_page] = fresh
                if physical is not None:
                    plan.copies.append((physical, fresh))
            row.int2_pages = [self._allocate(self.int2) for _ in range(need)]
            row.released = [page for page in state.window_pages.values() if page not in target.values()]
            # Old pages that are only read (to be quantized) stay in their slots until the append is done.
            row.window_row = self._window_row(state.window_pages)
            for token_page, physical in target.items():
                row.window_row[self._slot(token_page)] = physical
            state.busy = True
            plan.rows.append(row)
        self.copied_pages += len(plan.copies)
        self._plans.append(plan)
        return plan

    def finish_append(self, plan: AppendPlan) -> None:
        """Makes a planned append final, after the rows were written."""
        self._close(plan)
        for row in plan.rows:
            state = self._sequences[row.sequence]
            old_length, old_history = state.length, len(state.int2_pages)
            on_grid = (
                state.grid_length == old_length
                and old_length % self.grid_tokens == 0
                and row.count == self.grid_tokens
                and old_history == self.config.history_pages(old_length)
            )
            state.int2_pages += row.int2_pages
            state.window_pages = row.window_pages
            state.length += row.count
            if on_grid:
                state.grid_length = state.length
            if row.tokens is not None and len(state.tokens) == old_length:
                state.tokens.extend(row.tokens)
                self._extend_hashes(state)
            self._publish(state, old_length // PAGE_TOKENS, old_history)
            for page in row.released:
                self.window.release(page)

    def abort_append(self, plan: AppendPlan, *, untouched: bool = False) -> None:
        """Gives the pages of a planned append back; the sequences are as before, whatever rows were written.

        Sequences of `overwritten` rows are damaged then, unless no row was written at all: `untouched`.
        """
        self._close(plan)
        for row in plan.rows:
            self._sequences[row.sequence].damaged |= row.overwritten and not untouched
            for page in row.allocated:
                self.window.release(page)
            for page in row.int2_pages:
                self.int2.release(page)

    # ---------------------------------------------------------------- prefix lookup

    def find_prefix(
        self,
        prompt: Sequence[int],
        *,
        reuse: str | None = "exact",
        generated: bool = False,
        salt: bytes = b"",
    ) -> Prefix | None:
        """The longest stored beginning of a prompt that a new sequence can start from, or None.

        At least one token is left to compute. "exact": the whole state at a multiple of `grid_tokens`,
        computed on the grid. "quantized": also sink and INT2 pages alone, as far as the prompt's own last
        recent tokens stay BF16. `generated` admits pages computed off the grid (generated tokens, odd
        chunks): continuing them equals continuing the sequence that wrote them, not recomputing the prompt.
        Pages of another `salt` are not found.
        """
        if reuse not in REUSE:
            raise ConfigError(f"reuse = {reuse!r}, allowed: {REUSE}")
        if reuse is None or len(prompt) < 2:
            return None
        int2, window = self._lookup(prompt, generated, self._root(salt))
        step = PAGE_TOKENS if generated else self.grid_tokens
        sinks = self.config.sink_pages
        leading = next((i for i, page in enumerate(int2[sinks:]) if page is None), max(0, len(int2) - sinks))
        best: Prefix | None = None
        for length in range(len(window) * PAGE_TOKENS // step * step, 0, -step):
            history = self.config.history_pages(length)
            held = _held_pages(self.config, history, length)
            if history <= leading and all(window[page] is not None for page in held):
                best = self._prefix(length, history, int2, window)
                break
        if reuse == "quantized" and all(page is not None for page in window[:sinks]) and len(window) >= sinks:
            history = min(leading, self.config.history_pages(len(prompt)))
            length = self.config.sink_tokens + history * PAGE_TOKENS
            length -= length % step
            history = max(0, length - self.config.sink_tokens) // PAGE_TOKENS
            if length > (best.length if best else 0):
                best = self._prefix(length, history, int2, window)
        return best

    def _lookup(
        self, prompt: Sequence[int], generated: bool, parent: bytes
    ) -> tuple[list[int | None], list[int | None]]:
        """INT2 and window page of every leading token page of the prompt that is stored at all."""
        int2: list[int | None] = []
        window: list[int | None] = []
        for start in range(0, (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
            parent = _chain(parent, token_ids(prompt[start : start + PAGE_TOKENS]))
            quantized = self.int2.find((parent, True))
            raw = self.window.find((parent, True))
            if generated and quantized is None:
                quantized = self.int2.find((parent, False))
            if generated and raw is None:
                raw = self.window.find((parent, False))
            if quantized is None and raw is None:
                break
            int2.append(quantized)
            window.append(raw)
        return int2, window

    def _prefix(self, length: int, history: int, int2: list[int | None], window: list[int | None]) -> Prefix:
        sinks = self.config.sink_pages
        quantized = tuple(page for page in int2[sinks : sinks + history] if page is not None)
        raw = {page: window[page] for page in _held_pages(self.config, history, length)}
        found = {page: physical for page, physical in raw.items() if physical is not None}
        keys = [self.int2.key(page) for page in quantized]
        keys += [self.window.key(page) for page in found.values()]
        # A mixture of pages computed on and off the grid counts as off the grid throughout.
        grid = all(key is not None and key[1] for key in keys)
        return Prefix(length, history, quantized, found, grid)

    # ---------------------------------------------------------------- inside

    def _register(self, state: SequenceState) -> int:
        sequence = self._next_sequence
        self._next_sequence += 1
        self._sequences[sequence] = state
        return sequence

    def _root(self, salt: bytes) -> bytes:
        """The hash before a sequence's first page. No chain of tokens can lead to the root of a salt."""
        if not isinstance(salt, bytes):
            raise ConfigError(f"salt = {salt!r}, allowed: bytes")
        own = hashlib.blake2b(self._salt, digest_size=16).digest()
        return hashlib.blake2b(own + salt, digest_size=16, person=b"salt").digest() if salt else own

    def _close(self, plan: AppendPlan) -> None:
        if not plan.open:
            raise PageStateError("this append was already finished or aborted")
        plan.open = False
        self._plans.remove(plan)
        for row in plan.rows:
            self._sequences[row.sequence].busy = False

    def _slot(self, token_page: int) -> int:
        sinks = self.config.sink_pages
        if token_page < sinks:
            return token_page
        return sinks + (token_page - sinks) % self.config.recent_slots

    def _window_row(self, window_pages: dict[int, int]) -> list[int]:
        row = [0] * self.config.window_slots
        for token_page, physical in window_pages.items():
            row[self._slot(token_page)] = physical
        return row

    def _history(self, state: SequenceState, length: int) -> int:
        return max(state.forced_pages, self.config.history_pages(length))

    def _held(self, state: SequenceState, length: int) -> list[int]:
        return _held_pages(self.config, self._history(state, length), length)

    def _shortage(self, int2: int, window: int) -> str | None:
        for pages, need in ((self.int2, int2), (self.window, window)):
            if pages.live + need > pages.capacity:
                option = f"{pages.kind.lower()}_pages = {pages.capacity}"
                return (
                    f"{need} more {pages.kind} pages needed, {pages.capacity - pages.live} left of {option}"
                )
        need_bytes = int2 * self.int2.page_bytes + window * self.window.page_bytes
        if self.live_bytes + need_bytes > self.max_bytes:
            return (
                f"{need_bytes} more bytes needed, {self.max_bytes - self.live_bytes} left of "
                f"max_bytes = {self.max_bytes}"
            )
        return None

    def _require(self, int2: int, window: int) -> None:
        shortage = self._shortage(int2, window)
        if shortage is not None:
            raise CacheFullError(f"{shortage}; nothing was changed")

    def _allocate(self, pages: PageAllocator) -> int:
        while self.live_bytes + self.kept_bytes + pages.page_bytes > self.max_bytes and (
            pages.free or not pages.kept
        ):
            (self.window if self.window.kept else self.int2).evict()
        page = pages.allocate()
        self._note_peak()
        return page

    def _note_peak(self) -> None:
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes)

    def _extend_hashes(self, state: SequenceState) -> None:
        for page in range(len(state.hashes), len(state.tokens) // PAGE_TOKENS):
            parent = state.hashes[-1] if state.hashes else self._root(state.salt)
            start = page * PAGE_TOKENS
            state.hashes.append(_chain(parent, state.tokens[start : start + PAGE_TOKENS]))

    def _publish(self, state: SequenceState, first_page: int, first_history: int) -> None:
        """Publishes full window pages from token page `first_page`, INT2 pages from `first_history` on."""
        for token_page, physical in state.window_pages.items():
            if token_page >= first_page and token_page < len(state.hashes):
                self.window.publish(physical, self._key(state, token_page))
        for i in range(first_history, len(state.int2_pages)):
            token_page = self.config.sink_pages + i
            if token_page < len(state.hashes):
                self.int2.publish(state.int2_pages[i], self._key(state, token_page))

    def _key(self, state: SequenceState, token_page: int) -> PageKey:
        return state.hashes[token_page], (token_page + 1) * PAGE_TOKENS <= state.grid_length

    def _check_layout(self, sequence: int, state: SequenceState) -> None:
        if len(state.int2_pages) != self._history(state, state.length):
            raise PageStateError(
                f"sequence {sequence} has {len(state.int2_pages)} INT2 pages, a wrong number"
            )
        if sorted(state.window_pages) != self._held(state, state.length):
            raise PageStateError(
                f"sequence {sequence} holds token pages {sorted(state.window_pages)} in BF16"
            )


def _pages(length: int) -> int:
    return -(-length // PAGE_TOKENS)


def _held_pages(config: CacheConfig, history: int, length: int) -> list[int]:
    """Token pages that a sequence of `length` tokens with `history` INT2 pages stores in BF16."""
    sinks = min(config.sink_pages, _pages(length))
    return [*range(sinks), *range(config.sink_pages + history, _pages(length))]


def _chain(parent: bytes, tokens: array) -> bytes:
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()
