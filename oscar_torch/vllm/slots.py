"""Which running request owns which place in the arena of BF16 rows: plain integers, no arrays.

A request holds its place from its first step until it ends or is preempted. The engine's steps are executed
in order, so a place may be given on in the very step that frees it. A preempted request starts again from its
first token, wherever it then sits.
"""

from collections.abc import Iterable, Sequence

from ..core.errors import CacheFullError, ConfigError


class SlotTable:
    """Places 0 .. count - 1 for as many requests at a time; ConfigError for a count below 1."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"{count} places for running requests, allowed: >= 1")
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[str, int] = {}

    @property
    def used(self) -> int:
        """Requests that hold a place."""
        return len(self._slots)

    def release(self, requests: Iterable[str]) -> None:
        """Frees the places of requests that ended or were preempted; those without one are passed over."""
        for request in requests:
            slot = self._slots.pop(request, None)
            if slot is not None:
                self._free.append(slot)

    def seat(self, requests: Sequence[str]) -> list[int]:
        """The places of the requests of a batch, in its order; CacheFullError if there are too many."""
        missing = [request for request in requests if request not in self._slots]
        if len(missing) > len(self._free):
            raise CacheFullError(
                f"{self.used + len(missing)} requests hold BF16 rows, the arena has {self.count} places"
            )
        for request in missing:
            self._slots[request] = self._free.pop()
        return [self._slots[request] for request in requests]
