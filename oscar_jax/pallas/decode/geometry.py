"""What is fixed when a decode kernel is built, and where a thread of it stands."""

import dataclasses
import math
from typing import Any

from ...core import cache_format as fmt

PAGE = fmt.PAGE_TOKENS
HEAD_DIMS = (64, 128, 256)
WARP_LANES = 32

LOG2E = math.log2(math.e)
EMPTY = -1e30  # running maximum before the first page
TINY = 1e-30  # least divisor


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """Everything that is fixed when the decode kernel is built."""

    batch: int
    heads: int  # key/value heads K
    group: int  # query rows per key/value head
    head_dim: int
    table_pages: int  # columns of the page table
    softmax_scale: float  # multiplies the scores
    query_bfloat16: bool
    splits: int  # blocks per sequence and head that share the INT2 pages
    stages: int  # pages in flight per warp
    warps: int  # of a block, a multiple of 4; more warps leave each of them fewer registers
    mean_pages: int  # pages whose mean keys meet the query in one product, a power of two up to 16
    transforms: int  # leading axis of query_transform (1: shared, or K); 0: the queries come rotated
    sink_pages: int = 0
    window_slots: int = 0  # 0: only INT2 pages
    window_parts: int = 1  # of a window page, 1, 2 or 4, that go round among the warps
    window_pages: int = 0  # INT2 pages that a warp is spared for every part of a window page that it reads

    @property
    def paired(self) -> bool:
        """Whether both bytes of a query entry sit side by side in the columns of one product."""
        return self.group <= 4

    @property
    def columns(self) -> int:
        """Query rows per tile."""
        return 4 if self.paired else 8

    @property
    def lane_heads(self) -> int:
        """Query rows of which one lane holds scores: columns 2c and 2c + 1 of the product."""
        return 1 if self.paired else 2

    @property
    def tiles(self) -> int:
        return -(-self.group // self.columns)

    @property
    def workers(self) -> int:
        """Warps that share a sequence and head."""
        return self.splits * self.warps

    @property
    def all_parts(self) -> int:
        return self.window_slots * self.window_parts

    @property
    def windows(self) -> int:
        """Partial results per query row that come from BF16 pages: one per warp that reads some."""
        return min(self.workers, self.all_parts)

    @property
    def partials(self) -> int:
        """Partial results per query row: those of the windows, then one per split."""
        return self.windows + self.splits

    @property
    def tile_rows(self) -> int:
        """Different query rows of a tile; its other columns repeat the last."""
        return min(self.columns, self.group)

    @property
    def stage_bytes(self) -> int:
        """One staged page: key codes | value codes | key scale | value scale."""
        return fmt.int2_page_bytes(self.head_dim) - 2 * self.head_dim

    # ---- shared memory: stages | mean keys | rows of the query | barriers; at the end the merge of the warps
    @property
    def mean_offset(self) -> int:
        return self.warps * self.stages * self.stage_bytes

    @property
    def query_offset(self) -> int:
        return self.mean_offset + self.warps * self.mean_pages * 2 * self.head_dim

    @property
    def rotated_stride(self) -> int:
        """Bytes from one rotated query to the next: four blocks of a lane column each, kept apart."""
        return 4 * (self.head_dim + 16)

    @property
    def merge_row_bytes(self) -> int:
        """Bytes of a warp's output for one head, so that lanes that store together meet different banks."""
        return 4 * self.head_dim + 32 // self.lane_heads

    @property
    def rotation_depth(self) -> int:
        """Entries of a column of query_transform that one thread multiplies."""
        groups = self.warps * WARP_LANES // self.head_dim
        return self.head_dim >> (max(1, groups).bit_length() - 1)

    @property
    def barrier_offset(self) -> int:
        """Where the barriers lie, 8 bytes per warp and stage."""
        groups = self.head_dim // self.rotation_depth
        queries = self.tile_rows * (4 * self.head_dim + groups * self.rotated_stride)
        queries = queries if self.transforms else 0
        merge = (2 * self.warps + 1) * 8 * 4 + self.warps * self.columns * self.merge_row_bytes
        return max(self.query_offset + queries, merge)

    @property
    def shared_bytes(self) -> int:
        return self.barrier_offset + self.warps * self.stages * 8


def check_decode_shape(head_dim: int, group: int) -> None:
    """Raises NotImplementedError unless the kernel serves this head_dim and group."""
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim = {head_dim}: the Mosaic decode kernel serves {HEAD_DIMS}")
    if group < 1:
        raise NotImplementedError(f"group = {group}: the Mosaic decode kernel needs at least one query head")


class Place:
    """Where a thread stands: sequence, head and tile of its block, its warp, its lane's row and column."""

    def __init__(self, m, shape, refs, sequence, head, tile, split):
        self.m, self.shape, self.refs = m, shape, refs
        self.sequence, self.head, self.tile = sequence, head, tile
        self.partial = split + shape.windows
        self.worker = m.warp * shape.splits + split  # among all warps of this sequence, head and tile
        self.length, self.history_pages = (self.scalar(n, sequence) for n in ("lengths", "history_pages"))
        self.g, self.c = m.lane >> 2, m.lane & 3
        self.sequence_head = sequence * shape.heads + head
        self.low_limb = (self.g & 1).ne(0)  # in paired columns
        column_head = self.g >> 1 if shape.paired else self.g
        row = (tile * shape.columns + column_head).min(shape.group - 1)  # columns past the group repeat it
        self.row_in_tile = row - tile * shape.columns
        self.query_row = self.sequence_head * shape.group + row
        # Lanes whose column statistics belong to the heads of this lane's accumulators (columns 2c, 2c + 1).
        self.stat_lanes = [self.c * 8 + 4 * e for e in range(shape.lane_heads)]

    def per_head(self, x):
        """Moves a statistic of this lane's query column to the lanes that hold that column's scores."""
        return [self.m.shuffle(x, lane) for lane in self.stat_lanes]

    def scalar(self, name, index):
        return self.m.load_global(self.m.pointer(self.refs[name]).at(index, 4))[0]


def sum_rows(m: Any, xs: list) -> list:
    """Sums over the eight rows g; every lane of a column gets the sum."""
    for distance in (4, 8, 16):
        xs = [x + m.shuffle_xor(x, distance) for x in xs]
    return xs
