"""Launch plans of the Mosaic GPU kernels: small frozen tables for the device they name."""

import dataclasses

DEVICE = "NVIDIA H200"
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a decode launch is cut: blocks per sequence and head, warps per block, staged pages per warp."""

    splits: int
    warps: int
    stages: int


# Four warps per block were measured against 8, 12 and 16 (head_dim 128) and won. The stages follow from the
# shared memory that is left, and the other head_dims from their registers: not measured yet.
# head_dim -> (warps per block, stages per warp, blocks that fit on one multiprocessor)
_DECODE = {64: (4, 6, 3), 128: (4, 5, 2), 256: (4, 3, 2)}
MIN_PAGES_PER_WARP = 2  # a split that leaves a warp less than this is not worth its merge


def decode_plan(rows: int, table_pages: int, head_dim: int) -> DecodePlan:
    """The plan for `rows` = sequences x heads x tiles of query heads and tables of `table_pages` pages.

    One wave of blocks if the pages allow it: the grid fills the device once and no block waits for a second
    turn.
    """
    warps, stages, resident = _DECODE[head_dim]
    by_device = max(1, MULTIPROCESSORS * resident // rows)
    by_pages = max(1, table_pages // (warps * MIN_PAGES_PER_WARP))
    return DecodePlan(min(by_device, by_pages), warps, stages)


# Three warpgroups were measured against one and two (head_dim 128) and won; the others are not measured yet.
# head_dim -> warpgroups per block; one block fits on a multiprocessor
_QUANTIZE = {64: 4, 128: 3, 256: 1}


def quantize_plan(pages: int, rows: int, head_dim: int) -> tuple[int, int]:
    """Blocks per head and kind, and their warpgroups, for `rows` = heads x kinds: at most one wave."""
    blocks = min(pages, max(1, MULTIPROCESSORS // rows))
    return blocks, min(_QUANTIZE[head_dim], max(1, pages // blocks))
