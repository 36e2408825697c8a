"""What a page pool knows: sequences, planned appends, reusable prefixes, counts.

Twin file: byte-identical in both packages. Standard library only.
"""

import dataclasses
import operator
from array import array
from collections.abc import Iterable
from typing import Any

from .errors import ConfigError, DTypeError, OscarError, ShapeError


@dataclasses.dataclass
class SequenceState:
    """One sequence: its length in tokens and the physical pages that hold it.

    `int2_pages[i]` holds tokens sink + 64i ..., `window_pages[p]` the BF16 rows of token page p. There are
    max(forced_pages, config.history_pages(length)) INT2 pages; `forced_pages` is 0 unless quantized tokens
    were borrowed or kept. Tokens below `grid_length` were computed on the chunk grid. Pages are found by
    sequences of the same `salt` only. A `damaged` sequence lost BF16 rows in an aborted append: only `free`
    takes it.
    """

    length: int = 0
    forced_pages: int = 0
    grid_length: int = 0
    int2_pages: list[int] = dataclasses.field(default_factory=list)
    window_pages: dict[int, int] = dataclasses.field(default_factory=dict)
    tokens: array = dataclasses.field(default_factory=lambda: array("q"))
    hashes: list[bytes] = dataclasses.field(default_factory=list)
    salt: bytes = b""
    busy: bool = False
    damaged: bool = False


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A reusable beginning: `length` tokens, `history_pages` of its pages INT2; on the grid or not."""

    length: int
    history_pages: int
    int2_pages: tuple[int, ...]
    window_pages: dict[int, int]
    grid: bool


@dataclasses.dataclass
class SequenceAppend:
    """What one append does to one sequence; `window_row` is the window table to append through."""

    sequence: int
    count: int
    tokens: array | None
    int2_pages: list[int]
    window_pages: dict[int, int]
    window_row: list[int]
    released: list[int]  # window pages that the sequence gives up when the append is finished
    allocated: list[int]  # window pages that an aborted append gives back
    overwritten: bool = (
        False  # rows that the sequence still holds are written over: no copy could be afforded
    )


@dataclasses.dataclass(eq=False)
class AppendPlan:
    """A planned append: first copy window pages (source, target), then write, then `finish_append`."""

    rows: list[SequenceAppend]
    copies: list[tuple[int, int]]
    open: bool = True


@dataclasses.dataclass(frozen=True)
class PoolStatistics:
    """Counts of pages, bytes over all layers, sequences, and what sharing has saved so far."""

    sequences: int
    tokens: int
    int2_live: int
    int2_kept: int
    int2_free: int
    window_live: int
    window_kept: int
    window_free: int
    live_bytes: int
    kept_bytes: int
    peak_live_bytes: int
    max_bytes: int
    evictions: int
    copied_pages: int
    reused_tokens: int


def whole_number(name: str, value: Any, error: type[OscarError] = DTypeError) -> int:
    """The int that a value of any library stands for; raises `error` where it counts nothing, such as 1.5."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise error(f"{name} = {value!r}, allowed: whole numbers") from None


def whole_numbers(name: str, values: Iterable[Any]) -> list[int]:
    """The ints of a sequence; raises ShapeError for a lone value, DTypeError for what counts nothing."""
    return [whole_number(f"{name}[{i}]", value) for i, value in enumerate(entries(name, values))]


def entries[T](name: str, values: Iterable[T]) -> list[T]:
    """The entries of a sequence; raises ShapeError for what is none."""
    try:
        return list(values)
    except TypeError:
        raise ShapeError(f"{name} = {values!r}, allowed: a list with an entry for each") from None


def token_ids(tokens: Iterable[int], typecode: str = "q") -> array:
    """Tokens as integers of 64 bits, or 32 with typecode "i"; raises ConfigError for anything else."""
    bits = 8 * array(typecode).itemsize
    try:
        if isinstance(tokens, bytes | bytearray):  # array would take them as its memory
            raise TypeError(f"{type(tokens).__name__}")
        return array(typecode, tokens)
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"tokens: {error}, allowed: whole numbers of {bits} bits") from None
