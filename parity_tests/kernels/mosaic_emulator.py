"""A register machine in NumPy: runs the bodies of the Mosaic GPU kernels on a CPU, thread by thread.

It has the methods of `oscar_jax.pallas.machine.registers.MosaicMachine`, but executes them at once for all
threads of one block, as arrays with one register per thread. The warp instructions follow the fragment
layouts of the PTX manual, copies arrive only when they are waited for, and memory outside an array or never
written is an error or poison. What it cannot check is the hardware itself and races between warps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np

LANES = 32
POISON = 0x7FC1_7FC1  # NaN as float32, as two bf16 and as two float16


def _bits(x: Any) -> np.ndarray:
    """Any integer as unsigned 32-bit registers: one per thread, or one for all."""
    if isinstance(x, Int):
        return x.value
    return (np.atleast_1d(np.asarray(x, np.int64)) & 0xFFFFFFFF).astype(np.uint32)


class Int:
    def __init__(self, value: Any):
        self.value = _bits(value)

    @property
    def signed(self) -> np.ndarray:
        return self.value.view(np.int32).astype(np.int64)

    def __add__(self, o):
        return Int(self.value + _bits(o))

    def __sub__(self, o):
        return Int(self.value - _bits(o))

    def __rsub__(self, o):
        return Int(_bits(o) - self.value)

    def __mul__(self, o):
        return Int(self.value * _bits(o))

    def __and__(self, o):
        return Int(self.value & _bits(o))

    def __or__(self, o):
        return Int(self.value | _bits(o))

    def __xor__(self, o):
        return Int(self.value ^ _bits(o))

    def __lshift__(self, o):
        return Int(self.value << _bits(o))

    def __rshift__(self, o):
        return Int(self.value >> _bits(o))

    def sar(self, n):
        return Int(self.signed >> _bits(n).astype(np.int64))

    def udiv(self, o):
        return Int(self.value // _bits(o))

    def umod(self, o):
        return Int(self.value % _bits(o))

    def min(self, o):
        return Int(np.minimum(self.signed, Int(o).signed))

    def max(self, o):
        return Int(np.maximum(self.signed, Int(o).signed))

    def lt(self, o):
        return Predicate(self.signed < Int(o).signed)

    def ge(self, o):
        return Predicate(self.signed >= Int(o).signed)

    def eq(self, o):
        return Predicate(self.value == _bits(o))

    def ne(self, o):
        return Predicate(self.value != _bits(o))

    def as_float(self):
        return Float(self.value.view(np.float32))

    def to_float(self):
        return Float(self.signed.astype(np.float32))

    def to_float_up(self):
        near = self.signed.astype(np.float32)
        return Float(np.where(near < self.signed, np.nextafter(near, np.float32(np.inf)), near))

    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__


class Float:
    def __init__(self, value: Any):
        value = value.value if isinstance(value, Float) else value
        self.value = np.atleast_1d(np.asarray(value, np.float32))

    def __add__(self, o):
        return Float(self.value + Float(o).value)

    def __sub__(self, o):
        with np.errstate(invalid="ignore"):
            return Float(self.value - Float(o).value)

    def __mul__(self, o):
        with np.errstate(over="ignore", invalid="ignore"):
            return Float(self.value * Float(o).value)

    __radd__, __rmul__ = __add__, __mul__

    def fma(self, factor, addend):
        product = self.value.astype(np.float64) * Float(factor).value
        return Float((product + Float(addend).value).astype(np.float32))

    def fma_down(self, factor, addend):
        product = self.value.astype(np.float64) * Float(factor).value
        addend = Float(addend).value.astype(np.float64)
        total = product + addend
        part = total - product
        error = (product - (total - part)) + (addend - part)  # of the sum in float64: exact
        near = total.astype(np.float32)
        above = (near > total) | ((near == total) & (error < 0))
        return Float(np.where(above, np.nextafter(near, np.float32(-np.inf)), near))

    def fma_clamped(self, factor, addend):
        return Float(np.clip(self.fma(factor, addend).value, 0, 1))

    def add_to_zero(self, o):
        down = self.fma_down(1.0, o)
        up = Float(-self.value).fma_down(1.0, -Float(o).value)
        return Float(np.where(down.value < 0, -up.value, down.value))

    def max(self, o):
        return Float(np.fmax(self.value, Float(o).value))

    def max_or_nan(self, o):
        return Float(np.maximum(self.value, Float(o).value))

    def min(self, o):
        return Float(np.fmin(self.value, Float(o).value))

    def abs(self):
        return Float(np.abs(self.value))

    def exp2(self):
        with np.errstate(over="ignore"):
            return Float(np.exp2(self.value))

    def log2(self):
        return Float(np.log2(self.value))

    def reciprocal(self):
        return Float(np.float32(1) / self.value)

    def gt(self, o):
        return Predicate(self.value > Float(o).value)

    def as_int(self):
        return Int(np.ascontiguousarray(self.value).view(np.uint32))

    def floor_to_int(self):
        assert not (np.abs(self.value) >= 2**22).any()
        # NaN, as in threads that are not here, becomes a number that would show.
        return Int(np.floor(np.nan_to_num(self.value, nan=POISON)).astype(np.int64))

    def round_to_int(self):
        return Int(np.rint(self.value).astype(np.int64))

    def bfloat16_bits(self):
        return Int(self.value.astype(ml_dtypes.bfloat16).view(np.uint16))


class Predicate:
    def __init__(self, value: np.ndarray):
        self.value = np.atleast_1d(np.asarray(value, bool))

    def __and__(self, o):
        return Predicate(self.value & o.value)

    def __or__(self, o):
        return Predicate(self.value | o.value)

    def to_int(self):
        return Int(self.value.astype(np.int64))


class Pointer:
    """A byte offset per thread into the bytes of one array."""

    def __init__(self, memory: np.ndarray, offset: np.ndarray):
        self.memory, self.offset = memory, offset

    def at(self, index, stride=1):
        step = _bits(index).astype(np.int64) * _bits(stride).astype(np.int64)
        return Pointer(self.memory, self.offset + step)

    def of(self, thread):
        return self.memory, self.offset[thread if self.offset.size > 1 else 0]


class Machine:
    """Executes a kernel body for one block. Arrays are NumPy; outputs are written in place."""

    Int, Float = Int, Float

    def __init__(self, shared_bytes: int, warps: int):
        self.warps, self.threads = warps, warps * LANES
        thread = np.arange(self.threads)
        self.thread, self.lane, self.warp = Int(thread), Int(thread % LANES), Int(thread // LANES)
        self.shared_base = Int(0)
        self.shared = np.full(-(-shared_bytes // 4), POISON, np.uint32).view(np.uint8)
        self._active = np.ones(self.threads, bool)
        self._groups: list[list[list]] = [[] for _ in thread]  # per thread: committed groups
        self._open: list[list] = [[] for _ in thread]
        self._barriers: dict[int, _Barrier] = {}  # by shared address

    # ---- values
    def select(self, condition, yes, no):
        if isinstance(yes, Float) or isinstance(no, Float):
            return Float(np.where(condition.value, Float(yes).value, Float(no).value))
        return Int(np.where(condition.value, _bits(yes), _bits(no)))

    def pack_float16(self, low, high):
        with np.errstate(over="ignore"):
            return _pack(low.value.astype(np.float16), high.value.astype(np.float16))

    def pack_bfloat16(self, low, high):
        return _pack(low.value.astype(ml_dtypes.bfloat16), high.value.astype(ml_dtypes.bfloat16))

    def max_magnitudes(self, a, b):
        # By magnitude NaN is larger than infinity. The signs are those of the hardware, of no use.
        bits = _halfwise(np.maximum, a & 0x7FFF7FFF, b & 0x7FFF7FFF, np.uint16)
        return bits | ((a ^ b) & 0x80008000)

    def sum_bytes(self, word, total):
        parts = self._full(word).view(np.int8).reshape(self.threads, 4)
        return Int(total.signed + parts.sum(-1, dtype=np.int64))

    def gather_bytes(self, a, b, selector):
        words = np.stack([self._full(a), self._full(b)], -1)
        source = words.view(np.uint8).reshape(self.threads, 8)
        selector = np.broadcast_to(_bits(selector), (self.threads,))
        which = np.stack([(selector >> np.uint32(4 * i)) & 7 for i in range(4)], -1)
        chosen = np.take_along_axis(source, which.astype(np.int64), -1)
        signs = np.stack([(selector >> np.uint32(4 * i)) & 8 for i in range(4)], -1) != 0
        chosen = np.where(signs, (chosen.view(np.int8) >> 7).view(np.uint8), chosen)
        return Int(np.ascontiguousarray(chosen).view(np.uint32)[:, 0])

    def rotate_left(self, word, count):
        return Int(word.value << count.value | word.value >> (32 - count.value))

    # ---- warp instructions
    def mma_s8(self, a, b, c, unsigned_a=False, unsigned_b=False):
        sums = self._mma(a, b, *(np.uint8 if unsigned else np.int8 for unsigned in (unsigned_a, unsigned_b)))
        return [Int(x.signed + y.astype(np.int64)) for x, y in zip(c, sums)]

    def mma_f16(self, a, b, c, bfloat16=False):
        kind = ml_dtypes.bfloat16 if bfloat16 else np.float16
        return [Float(x.value + y) for x, y in zip(c, self._mma(a, b, kind, kind))]

    def wgmma_fence(self, registers):
        return [_Handed(x.value) for x in registers]

    def wgmma_s8(self, a, b, offset, c=None, *, columns, unsigned_a=False):
        c = c or [_InFlight(np.zeros((), np.int64))] * (columns // 2)
        assert all(isinstance(x, _Handed) for x in a) and all(isinstance(x, _Handed | _InFlight) for x in c)
        word = (self.lane.signed >> 2) * 16 + (self.lane.signed & 3) * 4
        out = []
        for n in range(columns // 8):
            right = [
                self._load(self.shared, b.signed + offset + word + 256 * n + 128 * i, 1)[0] for i in range(2)
            ]
            sums = self._mma(a, right, np.uint8 if unsigned_a else np.int8, np.int8)
            out += [_InFlight(x.result + y.astype(np.int64)) for x, y in zip(c[4 * n : 4 * n + 4], sums)]
        return out

    def wgmma_wait(self, registers):
        return [Int(x.result) for x in registers]

    def transpose_8x8(self, word):
        halves = self._full(word).view(np.uint16).reshape(self.warps, 8, 8)
        return Int(np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint32).reshape(-1))

    def shuffle_xor(self, x, distance):
        return type(x)(self._full(x)[self.thread.signed ^ distance])

    def shuffle(self, x, source):
        return type(x)(self._full(x)[self.warp.signed * LANES + source.signed % LANES])

    def largest_of_warp(self, x):
        lanes = self._full(x).view(np.int32).reshape(self.warps, LANES)
        return Int(np.repeat(lanes.max(1), LANES))

    def any_lane(self, condition):
        return Predicate(np.repeat(self._full(condition).reshape(self.warps, LANES).any(1), LANES))

    def one_lane(self):
        self._uniform()
        return Predicate(self._active & (self.thread.signed % LANES == 0))

    # ---- memory
    def pointer(self, array: np.ndarray) -> Pointer:
        return Pointer(array.reshape(-1).view(np.uint8), np.zeros(1, np.int64))

    def load_global(self, pointer, count=1, offset=0, early=False):
        return self._load(pointer.memory, pointer.offset + offset, count)

    def prefetch(self, pointer, offset=0):
        self._load(pointer.memory, pointer.offset + offset, 1)

    def load_changing(self, pointer):
        return self._load(pointer.memory, pointer.offset, 1)[0]

    def add_global(self, pointer, value, condition):
        live = np.flatnonzero(self._active & self._full(condition))
        old = np.zeros(self.threads, np.uint32)
        offsets = np.broadcast_to(pointer.offset, (self.threads,))
        for t in live:
            word = pointer.memory[offsets[t] : offsets[t] + 4].view(np.uint32)
            old[t] = word[0]
            word += self._full(value)[t]
        return Int(old)

    def store_global(self, pointer, words, offset=0):
        self._store(pointer.memory, pointer.offset + offset, words)

    def store_global_u16(self, pointer, bits, offset=0):
        live = np.flatnonzero(self._active)
        at = np.broadcast_to(pointer.offset + offset, (self.threads,))[live]
        assert at.min() >= 0 and at.max() <= pointer.memory.size - 2 and (at % 2 == 0).all()
        data = self._full(bits)[live].astype(np.uint16)
        pointer.memory[at[:, None] + np.arange(2)] = data.view(np.uint8).reshape(-1, 2)

    def load_shared(self, address, count=1, offset=0):
        return self._load(self.shared, address.signed + offset, count)

    def store_shared(self, address, words, offset=0):
        self._store(self.shared, address.signed + offset, words)

    def load_matrices(self, address, offset=0):
        at = (address.signed + offset).reshape(self.warps, 4, 8)
        assert (at % 16 == 0).all() and at.min() >= 0 and at.max() <= self.shared.size - 16
        rows = self.shared[at[..., None] + np.arange(16)].view(np.uint32)  # [warp, matrix, row, word]
        return [Int(rows[:, i].reshape(-1)) for i in range(4)]

    def copy_async(self, address, pointer, shared_offset=0, global_offset=0):
        targets = np.broadcast_to(address.signed + shared_offset, (self.threads,))
        for t in np.flatnonzero(self._active):
            memory, offset = pointer.of(t)
            source, target = int(offset + global_offset), int(targets[t])
            assert 0 <= source <= memory.size - 16 and source % 16 == 0
            assert 0 <= target <= self.shared.size - 16 and target % 16 == 0
            self.shared[target : target + 16].view(np.uint32)[:] = POISON  # until it has arrived
            self._open[t].append((target, memory[source : source + 16].copy()))

    def commit_copies(self):
        for t in np.flatnonzero(self._active):
            self._groups[t].append(self._open[t])
            self._open[t] = []

    def wait_copies(self, newest_allowed):
        for t in np.flatnonzero(self._active):
            done = max(0, len(self._groups[t]) - newest_allowed)
            for group in self._groups[t][:done]:
                for target, data in group:
                    self.shared[target : target + 16] = data
            self._groups[t] = self._groups[t][done:]

    def start_barrier(self, address, offset=0):
        for at in self._of_active(address, offset):
            assert at % 8 == 0 and 0 <= at <= self.shared.size - 8 and at not in self._barriers
            self._barriers[at] = _Barrier()

    def publish_barriers(self):
        pass

    def order_copies(self):
        pass

    def expect_bytes(self, barrier, size):
        for at in self._of_active(barrier):
            assert not self._barriers[at].expected, "a barrier is armed again before its phase is over"
            self._barriers[at].expected = size

    def copy_bulk(self, address, pointer, size, barrier, shared_offset=0):
        targets, barriers = (np.broadcast_to(x.signed, (self.threads,)) for x in (address, barrier))
        for t in np.flatnonzero(self._active):
            memory, source = pointer.of(t)
            target = int(targets[t]) + shared_offset
            assert 0 <= source <= memory.size - size and source % 16 == 0 and size % 16 == 0
            assert 0 <= target <= self.shared.size - size and target % 16 == 0
            self.shared[target : target + size].view(np.uint32)[:] = POISON  # until it has arrived
            self._barriers[int(barriers[t])].copies.append((target, memory[source : source + size].copy()))

    def wait_barrier(self, barrier, parity):
        parities = np.broadcast_to(parity.signed, (self.threads,))[self._active]
        for at, want in set(zip(self._of_active(barrier), parities.tolist())):
            state = self._barriers[at]
            if state.parity != want:
                continue  # the phase before the current one is complete
            arrived = sum(data.size for _, data in state.copies)
            assert 0 < state.expected == arrived, f"waits forever: {arrived} of {state.expected} bytes"
            for target, data in state.copies:
                self.shared[target : target + data.size] = data
            self._barriers[at] = _Barrier(state.parity ^ 1)

    def _of_active(self, address, offset=0) -> list[int]:
        return [int(x) + offset for x in np.broadcast_to(address.signed, (self.threads,))[self._active]]

    def sync_warp(self):
        pass

    def sync_block(self):
        pass

    def sync_warpgroup(self):
        pass

    # ---- control flow
    def loop(self, count, carry, body: Callable[[Any], Any]):
        outer = self._active
        for step in range(max(0, int(np.where(outer, count.signed, 0).max()))):
            self._active = outer & (count.signed > step)
            self._uniform()
            carry = self._step(carry, body)
        self._active = outer
        return carry

    def _step(self, carry, body):
        """`body(carry)` in the threads that are here, `carry` in the others."""
        new = body(jax.tree.map(lambda x: x, carry))  # lists of its own, which it may change
        return jax.tree.map(lambda old, x: self.select(Predicate(self._active), x, old), carry, new)

    def when(self, condition, body: Callable[[], None]):
        outer = self._active
        self._active = outer & condition.value
        if self._active.any():
            body()
        self._active = outer

    def repeat(self, kinds, body):
        again, values = body()
        while self._full(again).any():
            more = []

            def once(_, more=more):
                condition, out = body()
                more.append(condition)
                return out

            values = self.branch(again, values, once)
            again = again & more[0]
        assert [type(x) for x in values] == list(kinds)
        return values

    def branch(self, condition, carry, body: Callable[[Any], Any]):
        outer = self._active
        self._active = outer & condition.value
        self._uniform()
        if self._active.any():
            carry = self._step(carry, body)
        self._active = outer
        return carry

    def _full(self, x) -> np.ndarray:
        """The registers of all threads, contiguous."""
        return np.ascontiguousarray(np.broadcast_to(x.value, (self.threads,)))

    def _mma(self, a, b, kind_a, kind_b) -> list[np.ndarray]:
        """a[16, K] @ b[K, 8] for every warp, exact in float64; K = 32 bytes or 16 halves.

        a: registers (row g, first half of K), (row g+8, first), (g, second), (g+8, second); lane 4g + c holds
        one word of a half. b: (first half, column g), (second half, column g). Result: (g, 2c), (g, 2c+1),
        (g+8, 2c), (g+8, 2c+1).
        """

        def matrix(word, kind):  # [warp, g, elements of the four lanes c]
            return self._full(word).view(kind).reshape(self.warps, 8, -1).astype(np.float64)

        rows = [np.concatenate([matrix(a[i], kind_a), matrix(a[i + 2], kind_a)], -1) for i in range(2)]
        left = np.concatenate(rows, 1)
        right = np.concatenate([matrix(word, kind_b) for word in b], -1)
        product = left @ right.swapaxes(1, 2)  # [warp, 16, 8]
        g, c, warp = self.lane.signed >> 2, self.lane.signed & 3, self.warp.signed
        return [product[warp, g + 8 * (i >> 1), 2 * c + (i & 1)] for i in range(4)]

    def _uniform(self):
        by_warp = self._active.reshape(self.warps, LANES)
        assert (by_warp.all(1) | ~by_warp.any(1)).all(), "a branch divides a warp"

    def _load(self, memory, at, count):
        at = np.where(self._active, at, 0)
        assert at.min() >= 0 and at.max() <= memory.size - 4 * count and (at % (4 * count) == 0).all()
        words = memory[at[:, None] + np.arange(4 * count)].view(np.uint32)
        return [Int(np.where(self._active, words[:, i], np.uint32(POISON))) for i in range(count)]

    def _store(self, memory, at, words):
        live = np.flatnonzero(self._active)
        size = 4 * len(words)
        at = np.broadcast_to(at, (self.threads,))
        assert (
            (at[live] >= 0).all() and (at[live] <= memory.size - size).all() and (at[live] % size == 0).all()
        )
        data = np.stack([self._full(x) for x in words], -1)[live]
        memory[at[live][:, None] + np.arange(size)] = np.ascontiguousarray(data).view(np.uint8)


class _Handed(Int):
    """A register that the matrix unit may read."""

    @property
    def result(self) -> np.ndarray:
        return self.signed


class _InFlight(Int):
    """A register of a product that nobody has waited for: poison, until then."""

    def __init__(self, result: np.ndarray):
        super().__init__(POISON)
        self.result = result


@dataclasses.dataclass
class _Barrier:
    """A barrier in shared memory: the phase that it is in, the bytes it expects and the copies under way."""

    parity: int = 0
    expected: int = 0
    copies: list[tuple[int, np.ndarray]] = dataclasses.field(default_factory=list)


def _halfwise(function: Callable, a: Int, b: Int, kind: Any) -> Int:
    halves = function(*(np.ascontiguousarray(x.value).view(kind) for x in (a, b)))
    return Int(halves.view(np.uint32))


def _pack(low: np.ndarray, high: np.ndarray) -> Int:
    return Int(low.view(np.uint16).astype(np.uint32) | high.view(np.uint16).astype(np.uint32) << 16)
