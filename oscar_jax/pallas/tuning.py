"""Launch plans of the Mosaic GPU kernels: small frozen tables, measured on the device they name."""

DEVICE = "NVIDIA H200"  # the numbers below were tuned on this device
MULTIPROCESSORS = 132

# head_dim -> (pages in flight per warp, blocks per multiprocessor that fit with that many)
_DECODE = {64: (4, 4), 128: (3, 4), 256: (3, 2)}
MIN_PAGES_PER_WARP = 2  # a split that leaves a warp less than this is not worth its merge


def decode_stages(head_dim: int) -> int:
    """Pages of the shared-memory ring of one warp."""
    return _DECODE[head_dim][0]


def decode_splits(rows: int, table_pages: int, head_dim: int) -> int:
    """Blocks that share one sequence's INT2 pages, for `rows` = sequences x heads x tiles of query heads.

    One wave of blocks if the pages allow it: the grid fills the device once and no block waits for a second
    turn.
    """
    blocks = MULTIPROCESSORS * _DECODE[head_dim][1]
    by_device = max(1, blocks // rows)
    by_pages = max(1, table_pages // (4 * MIN_PAGES_PER_WARP))
    return min(by_device, by_pages)
