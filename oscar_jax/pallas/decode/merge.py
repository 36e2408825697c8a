"""Around the decode kernel: the rotation of queries before it, and what makes one output of its partials.

Both kernels multiply a few rows with a square float32 matrix, and both take a handful of microseconds, so all
that counts is latency: every thread starts all its loads at once, blocks of 32 output columns spread a head's
matrix over the device, and four columns of a few matrix rows per thread are summed through shared memory.

`merge_partials` finishes a decode step in one launch: it merges the partial results of a query row by their
log-sum-exp, brings what came from INT2 pages back into the original basis, and adds value_mean and the part
that came from the BF16 windows.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

_LOG2E = math.log2(math.e)
_EMPTY = -1e30  # below every log-sum-exp of something

WARP_LANES = 32
WARPS = 8  # of a block; also the rows of a tile, so that a warp finishes one row
COLUMNS = WARP_LANES  # of a block, so that a lane finishes one column
_AT_ONCE = 16  # loads of 16 bytes that a thread has under way


@dataclasses.dataclass(frozen=True)
class MergeShape:
    """Everything that is fixed when a kernel of this module is built."""

    batch: int
    heads: int  # key/value heads K
    group: int  # query rows per key/value head
    head_dim: int
    transforms: int  # leading axis of the rotation's arrays: 1 (shared) or K
    windows: int = 0  # partial results per query row that come from BF16 pages
    partials: int = 0  # all of them
    sink_logits: bool = False
    query_bfloat16: bool = False
    out_bfloat16: bool = False  # what the rows of the output are: bfloat16, or else float32

    @property
    def rows(self) -> int:
        """Query rows of a tile: of one head, whatever their sequence, since they share its matrix."""
        return min(self.batch * self.group, WARPS)

    @property
    def grid(self) -> dict[str, int]:
        tiles = -(-self.batch * self.group // WARPS)
        return {"columns": self.head_dim // COLUMNS, "tile": tiles, "head": self.heads}

    @property
    def slices(self) -> int:
        """Shares of a row's partials that are summed side by side."""
        return max(1, WARPS * WARP_LANES // (self.rows * self.head_dim // 4))

    @property
    def rows_bytes(self) -> int:
        """Float32 rows [slice][row][D]: the left operand of the product."""
        return 4 * self.slices * self.rows * self.head_dim

    @property
    def sums_bytes(self) -> int:
        """Float32 partial sums [depth group][row][column] of the product."""
        return 4 * WARPS * WARP_LANES * 4 * self.rows

    @property
    def weights_stride(self) -> int:
        """Entries of a row's table of weights: one per partial, then zeros."""
        return -(-self.partials // WARP_LANES) * WARP_LANES + self.slices + 1

    @property
    def shared_bytes(self) -> int:
        return self.rows_bytes + self.sums_bytes + 4 * self.rows * self.weights_stride


class _Tile:
    """Where a block stands: its head, its first query row and its first output column."""

    def __init__(self, m, shape, block, refs, matrix):
        self.m, self.shape, self.refs = m, shape, refs
        column, tile, self.head = block
        self.first_column, self.first_row = column * COLUMNS, tile * WARPS
        self.rotation_head = self.head if shape.transforms > 1 else m.Int(0)
        # Four columns of the matrix rows depth * group .. depth * (group + 1) - 1 are this thread's.
        quads = COLUMNS // 4
        self.depth = shape.head_dim // (WARPS * WARP_LANES // quads)
        self.quad, self.depth_group = m.thread & (quads - 1), m.thread.udiv(quads)
        base = m.pointer(refs[matrix]).at(self.rotation_head, 4 * shape.head_dim * shape.head_dim)
        base = base.at(self.depth_group * self.depth, 4 * shape.head_dim)
        base = base.at(self.first_column + self.quad * 4, 4)
        self.matrix = [m.load_global(base, 4, 4 * shape.head_dim * i) for i in range(self.depth)]

    def row_in_group(self, row: Any) -> tuple[Any, Any]:
        """Sequence, and row in its group, of a row of the tile; rows past the last one repeat it."""
        row = (self.first_row + row).min(self.shape.batch * self.shape.group - 1)
        return row.udiv(self.shape.group), row.umod(self.shape.group)

    def query_row(self, row: Any) -> Any:
        """Index of a row of the tile among all query rows [B, K, G]."""
        sequence, row = self.row_in_group(row)
        return (sequence * self.shape.heads + self.head) * self.shape.group + row

    def product(self) -> Any:
        """Rows in shared memory times the matrix: row `warp`, column `lane`, where such a row exists."""
        m, shape = self.m, self.shape
        matrix = [[w.as_float() for w in words] for words in self.matrix]
        left = m.shared_base + self.depth_group * (4 * self.depth)
        step = min(4, self.depth)
        sums = m.shared_base + shape.rows_bytes
        for r in range(shape.rows):
            four = [m.Float(0.0)] * 4
            for i in range(0, self.depth, step):
                entries = m.load_shared(left, step, 4 * (r * shape.head_dim + i))
                for x, row in zip(entries, matrix[i : i + step]):
                    four = [x.as_float().fma(y, z) for y, z in zip(row, four)]
            place = (self.depth_group * shape.rows + r) * (4 * COLUMNS) + self.quad * 16
            m.store_shared(sums + place, [x.as_int() for x in four])
        m.sync_block()
        place = sums + (m.warp.min(shape.rows - 1) * COLUMNS + m.lane) * 4
        total = [m.Float(0.0)] * 2
        for n in range(shape.head_dim // self.depth):
            word = m.load_shared(place, 1, 4 * COLUMNS * shape.rows * n)[0]
            total[n & 1] = total[n & 1] + word.as_float()
        return total[0] + total[1]

    def store(self, name: str, value: Any) -> None:
        """Stores an output [B, K, G, D]: row `warp`, column `lane`."""
        m, shape = self.m, self.shape
        real = m.warp.lt(shape.rows) & (self.first_row + m.warp).lt(shape.batch * shape.group)
        size = 2 if shape.out_bfloat16 else 4
        row = m.pointer(self.refs[name]).at(self.query_row(m.warp), size * shape.head_dim)
        place = row.at(self.first_column + m.lane, size)
        if shape.out_bfloat16:
            m.when(real, lambda: m.store_global_u16(place, value.bfloat16_bits()))
        else:
            m.when(real, lambda: m.store_global(place, [value.as_int()]))


# ------------------------------------------------------------------------------------------ queries


def rotate_body(m: Any, shape: MergeShape, block: tuple, refs: dict) -> None:
    """query_rotated = query @ query_transform for the rows and columns of one block."""
    tile = _Tile(m, shape, block, refs, "query_transform")
    size, threads = 2 if shape.query_bfloat16 else 4, WARPS * WARP_LANES
    query = m.pointer(refs["query"])
    for n in range(-(-shape.rows * shape.head_dim // (4 * threads))):
        four = m.thread + n * threads  # channels 4 * four .. 4 * four + 3 of all rows
        row, chunk = four.udiv(shape.head_dim // 4), four.umod(shape.head_dim // 4)
        source = query.at(tile.query_row(row), shape.head_dim * size).at(chunk, 4 * size)
        words = m.load_global(source, size)
        if shape.query_bfloat16:
            words = [x for w in words for x in (w << 16, w & 0xFFFF0000)]
        m.when(
            row.lt(shape.rows),
            lambda four=four, words=words: m.store_shared(m.shared_base + four * 16, words),
        )
    m.sync_block()
    tile.store("query_rotated", tile.product())


@functools.cache
def _rotate_kernel(shape: MergeShape) -> Any:
    from ..machine.registers import compiled_kernel

    rows = (shape.batch, shape.heads, shape.group, shape.head_dim)
    return compiled_kernel(
        lambda m, block, arrays: rotate_body(m, shape, block, arrays),
        ("query", "query_transform"),
        {"query_rotated": jax.ShapeDtypeStruct(rows, jnp.float32)},
        shape.grid,
        WARPS,
        shape.shared_bytes,
        "oscar_rotate",
    )


def rotate_few_queries(query: jax.Array, rotation: Any) -> jax.Array:
    """query [B, K, G, D] (float32 or bfloat16) @ query_transform [K or 1, D, D] -> float32, in one launch."""
    transform = rotation.query_transform
    shape = MergeShape(*query.shape, transform.shape[0], query_bfloat16=query.dtype == jnp.bfloat16)
    return _rotate_kernel(shape)(query, transform)[0]


# ------------------------------------------------------------------------------------------ outputs


def merge_body(m: Any, shape: MergeShape, block: tuple, refs: dict) -> None:
    """The outputs of one tile of query rows, 32 of their channels."""
    tile = _Tile(m, shape, block, refs, "output_transform")
    head_dim, rows, slices, windows, partials = (
        *(shape.head_dim, shape.rows, shape.slices, shape.windows, shape.partials),
    )
    out, lse = m.pointer(refs["out"]), m.pointer(refs["lse"])

    # ---- this thread's share of the INT2 partials: four channels of a row in every slices-th partial
    quads, threads = rows * head_dim // 4, WARPS * WARP_LANES
    steps = -(-(partials - windows) // slices)
    share = [(n, i) for n in range(-(-quads // threads)) for i in range(steps)]

    def place(n):  # -> its quad of all rows, slice
        flat = m.thread + n * threads
        return flat.umod(quads), flat.udiv(quads).min(slices - 1)

    def load(some):
        words = []
        for n, i in some:
            quad, piece = place(n)
            partial = (piece + (windows + slices * i)).min(partials - 1)
            row = tile.query_row(quad.udiv(head_dim // 4))
            source = out.at(row * partials + partial, 4 * head_dim).at(quad.umod(head_dim // 4), 16)
            words.append(m.load_global(source, 4))
        return words

    parts = [share[i : i + _AT_ONCE] for i in range(0, len(share), _AT_ONCE)]
    loaded = load(parts[0])

    # ---- what the end needs of row `warp` and column `lane`
    column, row = tile.first_column + m.lane, tile.query_row(m.warp)
    window_values = [
        m.load_global(out.at(row * partials + n, 4 * head_dim).at(column, 4))[0].as_float()
        for n in range(windows)
    ]
    pair = m.load_global(m.pointer(refs["value_mean"]).at(tile.rotation_head * head_dim + (column & -2), 2))[
        0
    ]
    mean = m.select((column & 1).ne(0), pair & 0xFFFF0000, pair << 16).as_float()

    # ---- weights of the partials of row `warp`
    values = []
    for n in range(-(-partials // WARP_LANES)):
        s = m.lane + WARP_LANES * n
        x = m.load_global(lse.at(row * partials + s.min(partials - 1), 4))[0].as_float()
        values.append(m.select(s.lt(partials), x, m.Float(-math.inf)))
    top = functools.reduce(lambda a, b: a.max(b), values)
    for distance in (1, 2, 4, 8, 16):
        top = top.max(m.shuffle_xor(top, distance))
    top = top.max(_EMPTY)
    values = [(x - top).exp2() for x in values]
    weights = [m.shuffle(values[n // WARP_LANES], m.Int(n % WARP_LANES)) for n in range(windows)]
    window = functools.reduce(lambda a, b: a + b, [w * x for w, x in zip(weights, window_values)])
    history = m.Float(0.0)
    for n, x in enumerate(values):
        history = history + m.select((m.lane + WARP_LANES * n).lt(windows), m.Float(0.0), x)
    for distance in (1, 2, 4, 8, 16):
        history = history + m.shuffle_xor(history, distance)
    total = functools.reduce(lambda a, b: a + b, weights, history)
    if shape.sink_logits:
        index = tile.head * shape.group + tile.row_in_group(m.warp)[1]
        sink = m.load_global(m.pointer(refs["sink_logits"]).at(index, 4))[0].as_float()
        total = total + (sink * _LOG2E - top).exp2()
    inverse = total.max(1.0).reciprocal()  # without a sink 1 is the least, unless nothing is stored
    table = m.shared_base + (shape.rows_bytes + shape.sums_bytes)

    def store_weights():
        base = table + (m.warp * shape.weights_stride + m.lane) * 4
        for n, x in enumerate(values):
            m.store_shared(base, [(x * inverse).as_int()], 4 * WARP_LANES * n)
        padding = 4 * WARP_LANES * len(values)
        m.when(m.lane.lt(slices + 1), lambda: m.store_shared(base, [m.Int(0)], padding))

    m.when(m.warp.lt(rows), store_weights)
    m.sync_block()

    # ---- merged rows, in the rotated basis
    four = [m.Float(0.0)] * 4
    for number, some in enumerate(parts):
        now = loaded
        loaded = load(parts[number + 1]) if number + 1 < len(parts) else []
        for (n, i), words in zip(some, now):
            quad, piece = place(n)
            weight = table + (quad.udiv(head_dim // 4) * shape.weights_stride + piece) * 4
            weight = m.load_shared(weight, 1, 4 * (windows + slices * i))[0].as_float()
            four = [w.as_float().fma(weight, x) for w, x in zip(words, four)]
            if i == share[-1][1]:
                inside = (m.thread + n * threads).lt(slices * quads)
                target = m.shared_base + (m.thread + n * threads) * 16
                m.when(inside, lambda t=target, x=four: m.store_shared(t, [y.as_int() for y in x]))
                four = [m.Float(0.0)] * 4
    m.sync_block()
    if slices > 1:

        def add_slices():
            pieces = [m.load_shared(m.shared_base + m.thread * 16, 4, 16 * quads * n) for n in range(slices)]
            sums = [functools.reduce(lambda a, b: a + b, [w.as_float() for w in x]) for x in zip(*pieces)]
            m.store_shared(m.shared_base + m.thread * 16, [x.as_int() for x in sums])

        m.when(m.thread.lt(quads), add_slices)
        m.sync_block()
    value = tile.product()
    tile.store("result", (mean.fma(history, window)).fma(inverse, value))


_MERGE_INPUTS = ("out", "lse", "output_transform", "value_mean", "sink_logits")


@functools.cache
def _merge_kernel(shape: MergeShape) -> Any:
    from ..machine.registers import compiled_kernel

    rows = (shape.batch, shape.heads, shape.group, shape.head_dim)
    return compiled_kernel(
        lambda m, block, arrays: merge_body(m, shape, block, arrays),
        _MERGE_INPUTS if shape.sink_logits else _MERGE_INPUTS[:-1],
        {"result": jax.ShapeDtypeStruct(rows, jnp.bfloat16 if shape.out_bfloat16 else jnp.float32)},
        shape.grid,
        WARPS,
        shape.shared_bytes,
        "oscar_merge",
    )


def merge_partials(
    out: jax.Array,
    lse: jax.Array,
    rotation: Any,
    *,
    windows: int,
    sink_logits: jax.Array | None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Attention outputs [B, K, G, D] of the partial results of `decode_partials`, windows included.

    out float32 [B, K, G, S, D] and its base-2 log-sum-exp [B, K, G, S]: the first `windows` of S in the
    original basis, the others in the rotated one without value_mean. sink_logits [K * G] take part in the
    softmax alone. The outputs are rounded once, to `dtype`: float32 or bfloat16.
    """
    *counts, partials, head_dim = out.shape
    transform = rotation.output_transform
    shape = MergeShape(
        *counts,
        head_dim,
        transform.shape[0],
        windows,
        partials,
        sink_logits=sink_logits is not None,
        out_bfloat16=dtype == jnp.bfloat16,
    )
    sinks = [] if sink_logits is None else [sink_logits.astype(jnp.float32)]
    return _merge_kernel(shape)(out, lse, transform, rotation.value_mean, *sinks)[0]
