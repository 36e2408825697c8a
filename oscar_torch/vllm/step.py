"""One step of the engine as our tables: which rows of the batch decode, which are pieces of prompts.

The engine describes a step by the first token of every row in the batch (query_start_loc), the lengths after
it (seq_lens) and the blocks of every sequence. Rows of one token come first and go through append and decode
together, under a CUDA graph where the engine records one; a graph is replayed without Python, so every array
that it reads is allocated once and refilled before. The other rows are taken one after another.

Lengths and history pages stand once per layer: the append kernel of a layer counts them up.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ShapeError


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + count - 1 of the batch: more of the prompt of the sequence in `row`.

    `length` tokens of it are stored already; `slot` is its place in the arena, -1 in a trial run of the
    engine, where nothing may be stored.
    """

    row: int
    start: int
    count: int
    length: int
    slot: int


@dataclasses.dataclass(frozen=True)
class Step:
    """The rows of one step: `decodes` rows of one token each, then chunks."""

    decodes: int
    chunks: tuple[Chunk, ...]
    tables: "StepTables"


class StepTables:
    """The arrays of a step for `layers` layers and up to `rows` rows of sequences of up to `max_length`."""

    page_table: Tensor  # int32 [rows, max_pages], history page n of every row
    window_table: Tensor  # int32 [rows, slots]
    lengths: Tensor  # int32 [layers, rows], before the step
    history_pages: Tensor  # int32 [layers, rows], before the step
    new_lengths: Tensor  # int32 [rows], 0 for rows of padding

    def __init__(
        self, config: CacheConfig, layers: int, rows: int, max_length: int, device: torch.device
    ) -> None:
        self.config = config
        self.rows = rows

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.page_table = zeros(rows, max(1, config.history_pages(max_length)))
        self.window_table = zeros(rows, config.window_slots)
        self.lengths, self.history_pages = zeros(layers, rows), zeros(layers, rows)
        self.new_lengths = zeros(rows)
        self._places = torch.arange(config.window_slots, dtype=torch.int32, device=device)
        self._seated: list[int] = []  # what _slots holds: most steps have the rows of the step before
        self._slots = zeros(rows)

    def fill(
        self,
        starts: Tensor,
        host_starts: Sequence[int],
        lengths_after: Tensor,
        host_lengths_after: Sequence[int],
        blocks: Tensor,
        slots: Sequence[int],
    ) -> Step:
        """Refills the arrays for a batch of R rows and says what is to be done; waits for no device.

        starts int32 [R + 1] and on the host: first token of every row; lengths_after int32 [R] and on the
        host, where only those of chunks need to be exact; blocks int32 [R, >= blocks per sequence]; slots:
        places in the arena of the first rows, the others are padding and store nothing. Raises ShapeError.
        """
        rows = len(host_starts) - 1
        if rows > self.rows or len(slots) > rows:
            raise ShapeError(f"{len(slots)} sequences in {rows} rows, the tables have {self.rows}")
        slots = [*slots, *[-1] * (rows - len(slots))]
        if self._seated[:rows] != slots:
            seated = torch.tensor(slots, dtype=torch.int32)
            if self._slots.is_cuda:
                seated = seated.pin_memory()
            self._slots[:rows].copy_(seated, non_blocking=True)
            self._seated = slots
        seated = self._slots[:rows]
        counts = starts[1 : rows + 1] - starts[:rows]
        before = (lengths_after[:rows] - counts).clamp_(min=0)
        windows = self.config.sink_tokens + self.config.recent_tokens
        self.lengths[:, :rows] = before
        self.history_pages[:, :rows] = (before - windows).clamp_(min=0) // fmt.PAGE_TOKENS
        self.new_lengths[:rows] = torch.where(seated >= 0, counts, 0)
        first = self.config.sink_pages
        history = blocks[:rows, first : first + self.page_table.shape[1]]
        self.page_table[:rows, : history.shape[1]] = history
        places = seated[:, None] * self.config.window_slots + 1 + self._places
        self.window_table[:rows] = torch.where(seated[:, None] >= 0, places, 0)

        host_counts = [after - start for start, after in itertools.pairwise(host_starts)]
        decodes = next((row for row, count in enumerate(host_counts) if count > 1), rows)
        chunks = tuple(
            Chunk(row, host_starts[row], count, host_lengths_after[row] - count, slots[row])
            for row, count in enumerate(host_counts)
            if row >= decodes and count
        )
        return Step(decodes, chunks, self)
