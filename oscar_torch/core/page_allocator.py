"""Physical pages of one kind: who owns them, which are free, which can be found by what they hold.

Twin file: byte-identical in both packages. Standard library only.
"""

import copy
from collections import OrderedDict

from .errors import CacheFullError, ConfigError, OscarError

PageKey = tuple[bytes, bool]  # chained hash of the tokens; True if computed on the chunk grid


class PageStateError(OscarError):
    """A page or sequence is freed twice, leaked, unknown, or busy in an unfinished append."""


class PageAllocator:
    """Physical pages of one kind: reference counts, a free stack, and unowned pages kept for reuse.

    Every operation but `grow`, `copy` and `check` is O(1), and all are deterministic: the page freed last is
    handed out first, the page kept unused for the longest time is evicted first. `page_bytes` counts all
    layers.
    """

    def __init__(self, kind: str, capacity: int, page_bytes: int) -> None:
        if capacity < 1:
            raise ConfigError(f"{kind} pages = {capacity}, allowed: >= 1")
        self.kind = kind
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.live = 0
        self.peak_live = 0
        self.evictions = 0
        self._free = list(range(capacity, 0, -1))  # page 0 is never in it
        self._references = [0] * (capacity + 1)
        self._keys: list[PageKey | None] = [None] * (capacity + 1)
        self._by_key: dict[PageKey, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # no owner, still findable; oldest first

    @property
    def kept(self) -> int:
        """Pages without an owner that a prefix lookup can still find."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

    def references(self, page: int) -> int:
        """Owners of a physical page."""
        return self._references[page]

    def allocate(self) -> int:
        """A page with one owner and undefined content; raises CacheFullError if every page is owned."""
        if not self._free:
            self.evict()
        page = self._free.pop()
        self._references[page] = 1
        self._count_live(1)
        return page

    def grow(self, pages: int) -> None:
        """Adds free pages, numbered from capacity + 1 on; those free before are handed out first."""
        if pages < 1:
            raise ConfigError(f"further {self.kind} pages = {pages}, allowed: >= 1")
        self._free[:0] = range(self.capacity + pages, self.capacity, -1)
        self._references += [0] * pages
        self._keys += [None] * pages
        self.capacity += pages

    def copy(self) -> "PageAllocator":
        """An independent allocator in the same state."""
        twin = copy.copy(self)
        twin._free, twin._references = list(self._free), list(self._references)
        twin._keys, twin._by_key, twin._kept = list(self._keys), dict(self._by_key), self._kept.copy()
        return twin

    def retain(self, page: int) -> None:
        """Adds an owner to a page that is live or kept."""
        self._check_page(page)
        if self._references[page] == 0:
            if page not in self._kept:
                raise PageStateError(f"{self.kind} page {page} is free and cannot be shared")
            del self._kept[page]
            self._count_live(1)
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Removes an owner; the last one leaves the page findable if it has a key, else free."""
        self._check_page(page)
        if self._references[page] == 0:
            raise PageStateError(f"double free of {self.kind} page {page}")
        self._references[page] -= 1
        if self._references[page]:
            return
        self.live -= 1
        if self._keys[page] is None:
            self._free.append(page)
        else:
            self._kept[page] = None

    def publish(self, page: int, key: PageKey) -> None:
        """Makes a finished page findable; the first page of a key stays the one that is found."""
        if self._references[page] == 0:
            raise PageStateError(f"{self.kind} page {page} has no owner and cannot be published")
        if self._keys[page] is None and key not in self._by_key:
            self._keys[page] = key
            self._by_key[key] = page

    def withdraw(self, page: int) -> None:
        """Makes a page unfindable, because its content is about to change."""
        key = self._keys[page]
        if key is not None:
            del self._by_key[key]
            self._keys[page] = None

    def find(self, key: PageKey) -> int | None:
        """The page published under a key, or None."""
        return self._by_key.get(key)

    def key(self, page: int) -> PageKey | None:
        """The key under which a prefix lookup finds this page, or None."""
        return self._keys[page]

    def evict(self) -> None:
        """Frees the page that has been without an owner for the longest time."""
        if not self._kept:
            raise CacheFullError(f"all {self.capacity} {self.kind} pages are in use")
        page, _ = self._kept.popitem(last=False)
        self.withdraw(page)
        self._free.append(page)
        self.evictions += 1

    def check(self, owners: dict[int, int]) -> None:
        """Raises PageStateError unless the counts equal `owners` (page -> owners) and no page is lost."""
        for page in range(1, self.capacity + 1):
            if self._references[page] != owners.get(page, 0):
                raise PageStateError(
                    f"{self.kind} page {page} counts {self._references[page]} owners, "
                    f"{owners.get(page, 0)} sequences hold it"
                )
        if 0 in owners or self._references[0]:
            raise PageStateError(f"reserved {self.kind} page 0 has an owner")
        unowned = [*self._free, *self._kept]
        if len(set(unowned)) != len(unowned) or len(unowned) + self.live != self.capacity:
            raise PageStateError(
                f"{self.kind} pages: {self.live} live + {self.kept} kept + {self.free} free "
                f"is not {self.capacity}"
            )
        if any(self._references[page] for page in unowned):
            raise PageStateError(f"a {self.kind} page is owned and free at the same time")
        if any(self._keys[page] != key for key, page in self._by_key.items()):
            raise PageStateError(f"the index of {self.kind} pages is inconsistent")

    def _count_live(self, change: int) -> None:
        self.live += change
        self.peak_live = max(self.peak_live, self.live)

    def _check_page(self, page: int) -> None:
        if not 1 <= page <= self.capacity:
            raise PageStateError(f"{self.kind} page {page}, allowed: 1..{self.capacity} (page 0 is reserved)")
