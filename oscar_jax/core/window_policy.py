"""Which layers keep a BF16 ring instead of INT2 pages: one rule for caches, calibration and command line.

Twin file: byte-identical in both packages. Standard library only.
"""

import dataclasses
from collections.abc import Sequence

from .errors import ConfigError

RING_WINDOW = 1024  # tokens


@dataclasses.dataclass(frozen=True)
class WindowPolicy:
    """Layers with a sliding window of at most `ring_window` tokens keep a BF16 ring, all others INT2 pages.

    A short ring is as small as the sink, the recent part and the INT2 pages that its window would need.
    `ring_window` = 0 gives INT2 pages to every layer.
    """

    ring_window: int = RING_WINDOW

    def __post_init__(self) -> None:
        if type(self.ring_window) is not int or self.ring_window < 0:
            raise ConfigError(f"ring_window = {self.ring_window!r}, allowed: integers >= 0")

    def keeps_ring(self, window: int | None) -> bool:
        """Whether a layer of this sliding window in tokens (None: it sees everything) keeps a BF16 ring."""
        return window is not None and window <= self.ring_window

    def int2_layers(self, windows: Sequence[int | None]) -> tuple[int, ...]:
        """Numbers of the layers with INT2 pages, of a model whose layers have these sliding windows."""
        return tuple(layer for layer, window in enumerate(windows) if not self.keeps_ring(window))


DEFAULT_WINDOW_POLICY = WindowPolicy()
EVERY_LAYER_INT2 = WindowPolicy(ring_window=0)
