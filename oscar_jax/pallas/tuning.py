"""Launch plans of the Mosaic GPU kernels: small frozen tables for the device they name."""

import dataclasses

DEVICE = "NVIDIA H200"
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a decode launch is cut: blocks per sequence and head, warps per block, staged pages per warp.

    mean_pages are the pages whose mean keys meet the query in one product, a power of two up to 16.
    window_pages is the work of a BF16 window in INT2 pages, where it delays the blocks of the last split.
    """

    splits: int
    warps: int
    stages: int
    window_pages: int = 0
    mean_pages: int = 16


# Measured at head_dim 128, batch 8, 102 400 tokens: 4 to 6 stages and 4 or 8 warps differ by less than 2 %,
# 8 splits instead of 4 cost 3 %. The other head_dims follow from registers and shared memory: not compared.
# head_dim -> (warps per block, stages per warp, blocks that fit on one multiprocessor)
_DECODE = {64: (4, 6, 3), 128: (4, 5, 2), 256: (4, 3, 2)}
# A full window of the default size has the bytes of 43 INT2 pages. Of 0, 24, 40 and 60, 40 was fastest (H200,
# batch 8, 102 400 tokens: 132.9, 129.9, 128.4 and 129.3 us).
WINDOW_PAGES = 40
MIN_PAGES_PER_WARP = 2  # a split that leaves a warp less than this is not worth its merge


def decode_plan(rows: int, table_pages: int, head_dim: int) -> DecodePlan:
    """The plan for `rows` = sequences x heads x tiles of query heads and tables of `table_pages` pages.

    The blocks that read INT2 pages fill the device once; those that a window block keeps waiting read less.
    """
    warps, stages, resident = _DECODE[head_dim]
    by_device = max(1, MULTIPROCESSORS * resident // rows)
    by_pages = max(1, table_pages // (warps * MIN_PAGES_PER_WARP))
    splits = min(by_device, by_pages)
    delayed = rows * (splits + 1) > MULTIPROCESSORS * resident
    return DecodePlan(splits, warps, stages, WINDOW_PAGES if delayed else 0, 16 if head_dim < 256 else 4)


# head_dim -> warpgroups per block; one block fits on a multiprocessor
_QUANTIZE = {64: 4, 128: 3, 256: 2}
_PAGE_COSTS = {"key": 6, "value": 5}


def quantize_plan(pages: int, head_dim: int) -> tuple[int, int]:
    """Blocks, and their warpgroups, for `pages` pages (keys and values, of every head): one wave."""
    share = -(-pages // MULTIPROCESSORS)
    return -(-pages // share), min(_QUANTIZE[head_dim], share)


def page_costs(kinds: tuple[str, ...], pages: int) -> list[int]:
    """The cost of a page of each kind, for blocks of about `pages` pages: blocks of few pages count them."""
    return [_PAGE_COSTS[kind] if pages >= 16 else 1 for kind in kinds]
