"""Which sequences of one growing layer hold which INT2 pages: kept on the host, the device has the table."""

from ..core.page_allocator import PageAllocator

WIDTH_STEP = 64  # columns by which tables grow: kernels are launched anew for a table of another width


class HeldPages:
    """The INT2 pages of the sequences of one layer, taken from a PageAllocator.

    `held[b]` maps a page of sequence b, counted from its first INT2 page, to the physical page it owns a
    reference of. `tables` [B, width] is the page table. It also names pages that are held no longer: behind a
    window, where nobody reads them, and where one append writes to a place again once a window has passed.
    """

    def __init__(self, sequences: int, pages: int, width: int) -> None:
        self.tables: list[list[int]] = [[0] * width for _ in range(sequences)]
        self.held: list[dict[int, int]] = [{} for _ in range(sequences)]
        self.allocator: PageAllocator | None = None  # until there is a page
        if pages:
            self.grow(pages)

    def grow(self, pages: int) -> None:
        """Adds `pages` free pages."""
        if self.allocator is None:
            self.allocator = PageAllocator("INT2", pages, 1)  # bytes are counted by `live_bytes`, not here
        else:
            self.allocator.grow(pages)

    def copy(self) -> "HeldPages":
        """An independent one of the same content."""
        twin = HeldPages(0, 0, 0)
        twin.tables, twin.held = [list(row) for row in self.tables], [dict(held) for held in self.held]
        twin.allocator = None if self.allocator is None else self.allocator.copy()
        return twin

    def keep(self, sequence: int, first: int, end: int) -> None:
        """Releases a sequence's pages before `first`, behind its window, and those from `end` on, cropped."""
        held, row = self.held[sequence], self.tables[sequence]
        for page in [page for page in held if not first <= page < end]:
            assert self.allocator is not None
            self.allocator.release(held.pop(page))
        if first < end:
            row[:first] = [row[first]] * first

    def missing(self, before: list[int], needed: list[int], apart: int | None) -> int:
        """How many pages `take` with the same arguments finds no room for; not above 0 if for all."""
        fresh = sum(
            page not in self.held[b] and not self._reusable(b, page, start, apart)
            for b, (start, end) in enumerate(zip(before, needed))
            for page in range(start, end)
        )
        return fresh - (0 if self.allocator is None else self.allocator.free)

    def take(self, before: list[int], needed: list[int], apart: int | None) -> list[tuple[int, int, int]]:
        """Takes the pages before[b] .. needed[b] - 1 of every sequence b; CacheFullError if `missing` any.

        With `apart` a page takes the place of the one `apart` pages earlier, if no other sequence reads it.
        Returns the new entries of the table: (sequence, page, physical page). What an interruption has left
        undone is taken by the next call.
        """
        width = max(len(self.tables[0]), *needed)
        entries = []
        for b, (row, held) in enumerate(zip(self.tables, self.held)):
            if width > len(row):
                row += [0] * (-(-width // WIDTH_STEP) * WIDTH_STEP - len(row))
            for page in range(before[b], needed[b]):
                if page not in held:
                    if apart is not None and self._reusable(b, page, before[b], apart):
                        held[page] = held.pop(page - apart)
                    else:
                        assert self.allocator is not None
                        held[page] = self.allocator.allocate()
                row[page] = held[page]
                entries.append((b, page, held[page]))
        return entries

    def select(self, sequences: list[int]) -> None:
        """Makes the batch the sequences named, repeated or left out; repeated ones share their pages."""
        released = self.held
        self.tables = [list(self.tables[b]) for b in sequences]
        self.held = [dict(released[b]) for b in sequences]
        if self.allocator is None:
            return
        for held in self.held:
            for page in held.values():
                self.allocator.retain(page)
        for held in released:
            for page in held.values():
                self.allocator.release(page)

    def _reusable(self, sequence: int, page: int, before: int, apart: int | None) -> bool:
        """Whether `page` can take the place of the one `apart` earlier: its sequence must hold it alone."""
        if apart is None or page < apart:
            return False
        behind = page - apart
        if behind >= before:  # taken by the same append, so no other sequence has it
            return True
        place = self.held[sequence].get(behind)
        return place is not None and self.allocator is not None and self.allocator.references(place) == 1
