"""Launch plans of the Mosaic GPU kernels: small frozen tables, measured on an H200."""

import dataclasses

MULTIPROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How a decode launch is cut: blocks per sequence and head, warps per block, staged pages per warp.

    window_parts is the number of warps that share a BF16 window page (1, 2 or 4), window_pages the work of
    such a part in INT2 pages, mean_pages the number of pages whose mean keys meet the query in one product:
    a power of two up to 16.
    """

    splits: int
    warps: int
    stages: int
    window_pages: int = 0
    mean_pages: int = 16
    window_parts: int = 1


# head_dim -> (warps per block, stages per warp, pages per product of mean keys). One block fits on a
# multiprocessor, for its registers and its shared memory. Measured with batch 8, 8 key/value heads of 8 query
# heads, head_dim 128, 102 400 tokens: 12 warps took 126.0 us, 8 132.1.
_DECODE = {64: (8, 8, 16), 128: (8, 5, 16), 256: (8, 3, 4)}
_DECODE_LONG = {128: (12, 3, 16)}  # for blocks of LONG_PAGES INT2 pages or more
LONG_PAGES = 400  # at 254 pages 8 warps are as good, at 800 they are not
# Two blocks on a multiprocessor hide each other's start and end, where there are blocks enough. Measured with
# head_dim 128, 8 key/value heads, batch 32: 4096 tokens 41.8 us against 47.1 by one block of 8 warps, 32 768
# tokens 165.1 against 166.9.
_DECODE_TWO = {64: (4, 8, 16), 128: (4, 5, 16), 256: (4, 3, 4)}
# Measured with batch 8, 12 warps, 102 400 tokens: 6 took 116.7 us, 10 117.8.
WINDOW_PAGES = 6
BLOCK_PAGES = 40  # about the pages that a block could read while it starts, reads windows and merges


def decode_plan(rows: int, table_pages: int, head_dim: int, window_slots: int) -> DecodePlan:
    """The plan for `rows` = sequences x heads x tiles of query heads and tables of `table_pages` pages.

    The number of splits is the one with the least pages (and BLOCK_PAGES) per multiprocessor, when the device
    runs one block on each at a time, as long as every second warp gets a page or a quarter of a window page.
    """
    warps, stages, mean_pages = _DECODE[head_dim]
    most = max(1, 2 * (table_pages + 4 * window_slots) // warps)
    most = min(max(8, MULTIPROCESSORS // rows), most)

    def cost(splits: int) -> float:
        return -(-rows * splits // MULTIPROCESSORS) * (table_pages / splits + BLOCK_PAGES)

    splits = min(range(1, most + 1), key=cost)
    if rows > MULTIPROCESSORS and table_pages < 2 * LONG_PAGES:
        splits, (warps, stages, mean_pages) = 1, _DECODE_TWO[head_dim]
    elif table_pages >= splits * LONG_PAGES:
        warps, stages, mean_pages = _DECODE_LONG.get(head_dim, (warps, stages, mean_pages))
    # A warp with a window page should not be the last: where the others have little, four share one. Batch 1,
    # 4096 tokens, 16 splits: 7.4 against 9.8 by 3 splits and whole window pages.
    share = (table_pages + window_slots * WINDOW_PAGES) / (splits * warps)
    if share < WINDOW_PAGES / 2:
        return DecodePlan(splits, warps, stages, 1, mean_pages, window_parts=4)
    return DecodePlan(splits, warps, stages, WINDOW_PAGES, mean_pages)


# head_dim -> warpgroups per block; one block fits on a multiprocessor. Measured with 2048 pages of 8 heads of
# 128 channels: three took 334 us, two 395; with as many bytes: head_dim 64 four 292, five 316; head_dim 256
# two 1012, one 1155.
_QUANTIZE = {64: 4, 128: 3, 256: 2}
# Pages of one kind alone take 183 and 151 us (head_dim 128). 13:11, 5:4 and 11:9 are 3 to 5 % slower.
_PAGE_COSTS = {"key": 6, "value": 5}


def quantize_plan(pages: int, head_dim: int) -> tuple[int, int]:
    """Blocks, and their warpgroups, for `pages` pages (keys and values, of every head): one wave."""
    share = -(-pages // MULTIPROCESSORS)
    return -(-pages // share), min(_QUANTIZE[head_dim], share)


def page_costs(kinds: tuple[str, ...], pages: int) -> list[int]:
    """The cost of a page of each kind, for blocks of about `pages` pages: blocks of few pages count them."""
    return [_PAGE_COSTS[kind] if pages >= 16 else 1 for kind in kinds]
