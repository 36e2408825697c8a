"""Launch plans of the Mosaic GPU kernels: small frozen tables for the device they name."""

import dataclasses

DEVICE = "NVIDIA H200"
MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a decode launch is cut: blocks per sequence and head, warps per block, staged pages per warp.

    window_pages is the work of a BF16 window page in INT2 pages, mean_pages the number of pages whose mean
    keys meet the query in one product: a power of two up to 16.
    """

    splits: int
    warps: int
    stages: int
    window_pages: int = 0
    mean_pages: int = 16


# head_dim -> (warps per block, stages per warp, pages per product of mean keys). One block fits on a
# multiprocessor, for its registers and its shared memory. Only head_dim 128 was compared (8 key/value heads,
# 4 query heads each, 102 400 tokens, microseconds):
#   batch 8, 2 splits: 12 warps 116.8, 8 warps 120.5, two blocks of 4 warps 123.0
#   batch 1, 16 splits: 12 warps 25.1, 8 warps 21.6, two blocks of 4 warps 23.7
# Twelve warps leave each 168 registers: enough in the loop for four query heads, not for eight, and a window
# page then loads its rows one after the other, which only long sequences hide.
_DECODE = {64: (8, 8, 16), 128: (8, 5, 16), 256: (8, 3, 4)}
_DECODE_LONG = {128: (12, 3, 16)}  # for at most four query heads and blocks of
LONG_PAGES = 400  # INT2 pages or more; between 100 and 800 nothing was measured
# Of 7, 10, 13 and 16 all are within 0.5 % with 8 warps; with 12 warps 10 is better than 3, 7 and 14.
WINDOW_PAGES = 10
MIN_PAGES_PER_WARP = 2  # a split that leaves a warp less than this is not worth its merge
BLOCK_PAGES = 40  # about the pages that a block could read while it starts, reads windows and merges


def decode_plan(rows: int, table_pages: int, head_dim: int, paired: bool) -> DecodePlan:
    """The plan for `rows` = sequences x heads x tiles of query heads and tables of `table_pages` pages.

    `paired` says that a tile has at most four query heads. The number of splits is the one with the least
    pages (and BLOCK_PAGES) per multiprocessor, when the device runs one block on each at a time.
    """
    warps, stages, mean_pages = _DECODE[head_dim]
    most = min(max(8, MULTIPROCESSORS // rows), max(1, table_pages // (warps * MIN_PAGES_PER_WARP)))

    def cost(splits: int) -> float:
        return -(-rows * splits // MULTIPROCESSORS) * (table_pages / splits + BLOCK_PAGES)

    splits = min(range(1, most + 1), key=cost)
    if paired and head_dim in _DECODE_LONG and table_pages >= splits * LONG_PAGES:
        warps, stages, mean_pages = _DECODE_LONG[head_dim]
    return DecodePlan(splits, warps, stages, WINDOW_PAGES, mean_pages)


# head_dim -> warpgroups per block; one block fits on a multiprocessor. Measured (H200, one version of the
# kernel): 128 with 2, 3, 4: 434, 382, 471 us for 2048 pages x 8 heads; 64 with 4, 5: 341, 365 us for twice as
# many pages; 256 with 1, 2: 1155, 1012 us for half as many heads.
_QUANTIZE = {64: 4, 128: 3, 256: 2}
_PAGE_COSTS = {"key": 6, "value": 5}  # 198 and 165 us for pages of one kind alone, head_dim 128


def quantize_plan(pages: int, head_dim: int) -> tuple[int, int]:
    """Blocks, and their warpgroups, for `pages` pages (keys and values, of every head): one wave."""
    share = -(-pages // MULTIPROCESSORS)
    return -(-pages // share), min(_QUANTIZE[head_dim], share)


def page_costs(kinds: tuple[str, ...], pages: int) -> list[int]:
    """The cost of a page of each kind, for blocks of about `pages` pages: blocks of few pages count them."""
    return [_PAGE_COSTS[kind] if pages >= 16 else 1 for kind in kinds]
