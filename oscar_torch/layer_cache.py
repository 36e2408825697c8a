"""The cache of one layer as data: INT2 pages, BF16 window pages, and the tables that map sequences to them.

Which tokens are quantized depends on the length of a sequence alone; `cache.py` has the functions that write
and read. `DenseCache` is the BF16 cache beside it: the baseline, and the ring of layers with a short window.
"""

import dataclasses
from typing import Any

from torch import Tensor

from .core import cache_format as fmt
from .core.config import CacheConfig
from .core.errors import ShapeError

PAGE = fmt.PAGE_TOKENS


@dataclasses.dataclass
class LayerCache:
    """INT2 pages, BF16 window pages, and the tables that say which sequence owns them.

    P INT2 pages, P' window pages, B sequences. `page_table[b, i]` is the physical page of history page i
    (tokens sink + 64 i ...). Window slots of a sequence: first the sink pages, then a ring of recent pages:
    token page p >= sink_pages + history_pages lies in slot sink_pages + (p - sink_pages) % recent_slots.
    `history_pages[b]` counts the INT2 pages of sequence b; it is `config.history_pages(length)`, or more
    where a sequence borrowed a prefix or was cut inside its history.
    """

    key_codes: Tensor  # int32 [P, K, 64, D/16]
    value_codes: Tensor  # int32 [P, K, D, 4]
    key_scale: Tensor  # bf16 [P, K, 64]
    value_scale: Tensor  # bf16 [P, K, 64]
    key_page_mean: Tensor  # bf16 [P, K, D]
    window_key: Tensor  # bf16 [P', K, 64, D]
    window_value: Tensor  # bf16 [P', K, 64, D]
    page_table: Tensor  # int32 [B, max_pages]
    window_table: Tensor  # int32 [B, window_slots]
    lengths: Tensor  # int32 [B]
    history_pages: Tensor  # int32 [B]
    config: CacheConfig

    # `history_pages` on the host, where a caller keeps count: spares kernels that need it the wait.
    known_history = None  # or list[int]; no field: it is not part of the cache's content

    def __post_init__(self) -> None:
        """Raises ShapeError for an array that is not contiguous: kernels read and write it in place."""
        for field in dataclasses.fields(self):
            array = getattr(self, field.name)
            if isinstance(array, Tensor) and not array.is_contiguous():
                raise ShapeError(
                    f"{field.name} {tuple(array.shape)} is not contiguous: strides {array.stride()}"
                )

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.page_table.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that one sequence's tables can hold."""
        return self.config.sink_tokens + self.config.recent_tokens + PAGE * (self.page_table.shape[1] + 1) - 1


@dataclasses.dataclass
class DenseCache:
    """BF16 keys and values of one layer; a ring if shorter than the sequence: token t in slot t % S."""

    key: Tensor  # bf16 [B, S, K, D]
    value: Tensor  # bf16 [B, S, K, D]
    lengths: Tensor  # int32 [B]
    window: int | None = None

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return self.key.shape[0]


def recent_slot(page: Any, config: CacheConfig) -> Any:
    """Window slot of token page `page` (past the sink), an int or an int array."""
    return config.sink_pages + (page - config.sink_pages) % config.recent_slots
