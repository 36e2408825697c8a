"""Registers, memory and warp instructions as Python values, so that a kernel body reads like arithmetic.

The decode and quantize kernels are written against the small vocabulary of `Machine`: every thread holds
scalar registers (`Int`, `Float`, `Predicate`), and the instructions that involve a warp (matrix product,
shuffle, transpose) are methods. `MosaicMachine` emits the operations into a Mosaic GPU kernel. The tests own
a second machine with the same methods which executes the same kernel body with NumPy for all threads of a
block, so that everything but the hardware instructions themselves is checked on a CPU.

Integers are 32 bits, wrap around, and shift right logically with `>>`; `sar` is the arithmetic shift.
Shared memory is addressed by 32-bit byte addresses, global memory by `Pointer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu.utils as mosaic_utils
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf
from jaxlib.mlir.dialects import math as mlir_math

WARP_LANES = 32
Tree = Any

_CONTRACT = arith.FastMathFlags.contract


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _f32() -> ir.Type:
    return ir.F32Type.get()


def _constant(value: int) -> ir.Value:
    value &= 0xFFFFFFFF
    return mosaic_utils.c(value - (1 << 32) if value >= 1 << 31 else value, _i32())


class Int:
    """One 32-bit integer register per thread."""

    def __init__(self, value: ir.Value | int):
        self.value = _constant(value) if isinstance(value, int) else value

    @staticmethod
    def _of(other: Int | int) -> ir.Value:
        return _constant(other) if isinstance(other, int) else other.value

    def __add__(self, other):
        return Int(arith.addi(self.value, self._of(other)))

    def __sub__(self, other):
        return Int(arith.subi(self.value, self._of(other)))

    def __rsub__(self, other):
        return Int(arith.subi(self._of(other), self.value))

    def __mul__(self, other):
        return Int(arith.muli(self.value, self._of(other)))

    def __and__(self, other):
        return Int(arith.andi(self.value, self._of(other)))

    def __or__(self, other):
        return Int(arith.ori(self.value, self._of(other)))

    def __xor__(self, other):
        return Int(arith.xori(self.value, self._of(other)))

    def __lshift__(self, other):
        return Int(arith.shli(self.value, self._of(other)))

    def __rshift__(self, other):
        return Int(arith.shrui(self.value, self._of(other)))

    def sar(self, count):
        """Arithmetic shift right (floor division by a power of two)."""
        return Int(arith.shrsi(self.value, self._of(count)))

    def udiv(self, other):
        return Int(arith.divui(self.value, self._of(other)))

    def umod(self, other):
        return Int(arith.remui(self.value, self._of(other)))

    def min(self, other):
        return Int(arith.minsi(self.value, self._of(other)))

    def max(self, other):
        return Int(arith.maxsi(self.value, self._of(other)))

    def _compare(self, kind, other):
        return Predicate(arith.cmpi(kind, self.value, self._of(other)))

    def lt(self, other):
        return self._compare(arith.CmpIPredicate.slt, other)

    def ge(self, other):
        return self._compare(arith.CmpIPredicate.sge, other)

    def eq(self, other):
        return self._compare(arith.CmpIPredicate.eq, other)

    def ne(self, other):
        return self._compare(arith.CmpIPredicate.ne, other)

    def as_float(self):
        """The same 32 bits as a float register."""
        return Float(arith.bitcast(_f32(), self.value))

    def to_float(self):
        """The nearest float of the signed value."""
        return Float(arith.sitofp(_f32(), self.value))

    def to_float_up(self):
        """The smallest float that is not below the signed value."""
        return Float(_ptx("cvt.rp.f32.s32 $0, $1;", [self.value], [_f32()])[0])

    __radd__, __rmul__, __rand__, __ror__, __rxor__ = __add__, __mul__, __and__, __or__, __xor__


class Float:
    """One float32 register per thread. Products and sums may be contracted into one rounding."""

    def __init__(self, value: ir.Value | float):
        self.value = mosaic_utils.c(float(value), _f32()) if isinstance(value, int | float) else value

    @staticmethod
    def _of(other: Float | float) -> ir.Value:
        return other.value if isinstance(other, Float) else mosaic_utils.c(float(other), _f32())

    def __add__(self, other):
        return Float(arith.addf(self.value, self._of(other), fastmath=_CONTRACT))

    def __sub__(self, other):
        return Float(arith.subf(self.value, self._of(other), fastmath=_CONTRACT))

    def __mul__(self, other):
        return Float(arith.mulf(self.value, self._of(other), fastmath=_CONTRACT))

    __radd__, __rmul__ = __add__, __mul__

    def fma(self, factor, addend):
        """self * factor + addend, rounded once."""
        return Float(mlir_math.fma(self.value, self._of(factor), self._of(addend)))

    def fma_down(self, factor, addend):
        """self * factor + addend, rounded once, to the next smaller float."""
        operands = (self, Float(self._of(factor)), Float(self._of(addend)))
        return _ptx_float("fma.rm.f32 $0, $1, $2, $3;", *operands)

    def fma_clamped(self, factor, addend):
        """self * factor + addend, rounded once, then brought into 0 .. 1."""
        operands = (self, Float(self._of(factor)), Float(self._of(addend)))
        return _ptx_float("fma.rn.sat.f32 $0, $1, $2, $3;", *operands)

    def add_to_zero(self, other):
        """The sum, rounded to the next float towards zero."""
        return _ptx_float("add.rz.f32 $0, $1, $2;", self, Float(self._of(other)))

    def max(self, other):
        return _ptx_float("max.f32 $0, $1, $2;", self, Float(self._of(other)))

    def max_or_nan(self, other):
        """The maximum, NaN if one of both is NaN."""
        return _ptx_float("max.NaN.f32 $0, $1, $2;", self, Float(self._of(other)))

    def min(self, other):
        return _ptx_float("min.f32 $0, $1, $2;", self, Float(self._of(other)))

    def abs(self):
        return _ptx_float("abs.f32 $0, $1;", self)

    def exp2(self):
        return _ptx_float("ex2.approx.ftz.f32 $0, $1;", self)

    def log2(self):
        return _ptx_float("lg2.approx.f32 $0, $1;", self)

    def reciprocal(self):
        return _ptx_float("rcp.approx.ftz.f32 $0, $1;", self)

    def gt(self, other):
        return Predicate(arith.cmpf(arith.CmpFPredicate.OGT, self.value, self._of(other)))

    def as_int(self):
        """The same 32 bits as an integer register."""
        return Int(arith.bitcast(_i32(), self.value))

    def floor_to_int(self):
        """The floor of a value below 2**22 in magnitude.

        Adding a bias and rounding down costs a quarter of a conversion instruction: the integer then sits in
        the low mantissa bits.
        """
        return _ptx_float("add.rm.f32 $0, $1, $2;", self, Float(1.5 * 2.0**23)).as_int() - 0x4B400000

    def round_to_int(self):
        return Int(_ptx("cvt.rni.s32.f32 $0, $1;", [self.value], [_i32()])[0])

    def bfloat16_bits(self):
        """The 16 bits of the nearest (ties to even) bfloat16, in the low half of an integer."""
        return Int(
            _ptx("{ .reg .b16 h; cvt.rn.bf16.f32 h, $1; cvt.u32.u16 $0, h; }", [self.value], [_i32()])[0]
        )


class Predicate:
    """One truth value per thread."""

    def __init__(self, value: ir.Value):
        self.value = value

    def __and__(self, other):
        return Predicate(arith.andi(self.value, other.value))

    def __or__(self, other):
        return Predicate(arith.ori(self.value, other.value))

    def to_int(self):
        return Int(arith.extui(_i32(), self.value))


class Pointer:
    """A byte address in global memory per thread."""

    def __init__(self, value: ir.Value):
        self.value = value

    def at(self, index: Int | int, stride: Int | int = 1) -> Pointer:
        """The address `index * stride` bytes further; the unsigned product is taken in 64 bits."""
        if isinstance(index, int) and isinstance(stride, int):
            return Pointer(arith.addi(self.value, mosaic_utils.c(index * stride, _i64())))
        index, stride = (Int(x) if isinstance(x, int) else x for x in (index, stride))
        wide = [arith.extui(_i64(), x.value) for x in (index, stride)]
        return Pointer(arith.addi(self.value, arith.muli(*wide)))


def _ptx(code: str, operands: Sequence[ir.Value], results: Sequence[ir.Type], memory=False, warp=False):
    out = mosaic_utils.inline_ptx(
        code, *operands, result_types=list(results), has_side_effects=memory, convergent=warp
    )
    return list(out)


def _ptx_float(code: str, *operands: Float) -> Float:
    return Float(_ptx(code, [x.value for x in operands], [_f32()])[0])


def _ptx_through(code: str, registers: Sequence[Int]) -> list[Int]:
    """The registers after `code`: what the compiler computes from them stays on this side of it."""
    count = len(registers)
    constraints = ["=r"] * count + [str(i) for i in range(count)]
    return _inline_asm(code, [x.value for x in registers], constraints, count)


def _inline_asm(code: str, operands: Sequence[ir.Value], constraints: Sequence[str], count: int) -> list[Int]:
    """Inline PTX with `count` > 1 results, for the constraints that `inline_ptx` does not know."""
    out = llvm.inline_asm(
        llvm.StructType.get_literal([_i32()] * count),
        list(operands),
        code,
        ",".join(constraints),
        has_side_effects=True,
        convergent=True,
    )
    return [Int(llvm.extractvalue(_i32(), out, [i])) for i in range(count)]


_VECTOR = {1: "b32 {0}", 2: "v2.b32 {{{0},{1}}}", 4: "v4.b32 {{{0},{1},{2},{3}}}"}


def _vector(count: int) -> str:
    return _VECTOR[count].format(*(f"${i}" for i in range(count)))


class MosaicMachine:
    """Emits the operations of a kernel body into the Mosaic GPU kernel that is being built."""

    Int, Float = Int, Float

    def __init__(self, shared_memory: ir.Value):
        self.thread = Int(mosaic_utils.thread_idx())
        self.lane = self.thread & (WARP_LANES - 1)
        self.warp = Int(mosaic_utils.warp_idx(sync=True))
        base = llvm.ptrtoint(_i64(), mosaic_utils.memref_ptr(shared_memory))
        self.shared_base = Int(arith.trunci(_i32(), base))

    # ---- values
    def select(self, condition, yes, no):
        kind = Int if isinstance(yes, Int) or isinstance(no, Int) else Float
        yes, no = (x if isinstance(x, kind) else kind(x) for x in (yes, no))
        return kind(arith.select(condition.value, yes.value, no.value))

    def pack_float16(self, low, high):
        """Two floats rounded to float16 in one word."""
        return Int(_ptx("cvt.rn.f16x2.f32 $0, $1, $2;", [high.value, low.value], [_i32()])[0])

    def pack_bfloat16(self, low, high):
        """Two floats rounded to bfloat16 in one word."""
        return Int(_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", [high.value, low.value], [_i32()])[0])

    def max_magnitudes(self, a, b):
        """The larger magnitudes of two pairs of bf16, NaN where one is; their signs mean nothing."""
        return Int(_ptx("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", [a.value, b.value], [_i32()])[0])

    def sum_bytes(self, word, total):
        """The total plus the four signed bytes of the word."""
        return Int(_ptx("dp4a.s32.s32 $0, $1, 0x01010101, $2;", [word.value, total.value], [_i32()])[0])

    def gather_bytes(self, a, b, selector: Int | int):
        """Four bytes out of the eight of (a, b); nibble i of the selector names the source of byte i.

        With bit 3 of the nibble, byte i is that source's sign bit, eight times.
        """
        if isinstance(selector, int):
            return Int(_ptx(f"prmt.b32 $0, $1, $2, {selector};", [a.value, b.value], [_i32()])[0])
        operands = [a.value, b.value, selector.value]
        return Int(_ptx("prmt.b32 $0, $1, $2, $3;", operands, [_i32()])[0])

    def rotate_left(self, word, count):
        """The word's bits, `count` places to the left, around the end."""
        return Int(_ptx("shf.l.wrap.b32 $0, $1, $1, $2;", [word.value, count.value], [_i32()])[0])

    # ---- warp instructions
    def mma_s8(self, a, b, c, unsigned_a=False, unsigned_b=False):
        """c[16, 8] + a[16, 32] @ b[32, 8] in int32; a and b are s8 (or u8)."""
        kinds = ".".join("u8" if unsigned else "s8" for unsigned in (unsigned_a, unsigned_b))
        code = (
            f"mma.sync.aligned.m16n8k32.row.col.s32.{kinds}.s32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        operands = [x.value for x in (*a, *b, *c)]
        return [Int(x) for x in _ptx(code, operands, [_i32()] * 4, warp=True)]

    def mma_f16(self, a, b, c, bfloat16=False):
        """c[16, 8] + a[16, 16] @ b[16, 8] in float32; a and b are float16 (or bfloat16)."""
        kind = "bf16" if bfloat16 else "f16"
        code = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        operands = [x.value for x in (*a, *b, *c)]
        return [Float(x) for x in _ptx(code, operands, [_f32()] * 4, warp=True)]

    # ---- warpgroup instructions: the registers of a product are in flight from wgmma_fence to wgmma_wait
    def wgmma_fence(self, registers):
        """Hands registers, all that the following products read, to the matrix unit; returns them."""
        return _ptx_through("wgmma.fence.sync.aligned;", registers)

    def wgmma_s8(self, a, b, offset: int, c=None, *, columns: int, unsigned_a=False):
        """Starts c[64, columns] + a[64, 32] @ b[32, columns] in int32 (c = 0 if left out), for a warpgroup.

        Every warp holds 16 rows of a (s8 or u8) and of the result, laid out as for `mma_s8`; 8 columns of the
        result are 4 registers. b (s8) lies in shared memory `offset` bytes (16 n) behind the address b, the
        same in all warps: per 8 columns 256 bytes, two halves of the contraction, in each of them 16 bytes
        per column. The offset is added next to the instruction: sums of many would be kept in registers.
        """
        count = columns // 2
        first = count if c is None else 2 * count
        out, left = (
            "{" + ",".join(f"${i}" for i in range(n, n + size)) + "}" for n, size in ((0, count), (first, 4))
        )
        code = (
            f"{{ .reg .pred p; .reg .b32 l; .reg .b64 d; setp.ne.b32 p, {int(c is not None)}, 0; "
            f"add.s32 l, ${first + 4}, {offset // 16}; mov.b64 d, {{l, {256 // 16}}}; "
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.{'u8' if unsigned_a else 's8'}.s8 "
            f"{out}, {left}, d, p; }}"
        )
        # Descriptor d: address, distance along the contraction and along the columns, in units of 16 bytes.
        low = ((b >> 4) & 0x3FFF) | (128 // 16) << 16
        tied = [] if c is None else [x.value for x in c]
        constraints = ["=r"] * count + [str(i) for i in range(len(tied))] + ["r"] * 5
        operands = [*tied, *(x.value for x in a), low.value]
        return _inline_asm(code, operands, constraints, count)

    def wgmma_wait(self, registers):
        """Waits for all products that this warpgroup has started; returns their registers."""
        code = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
        return _ptx_through(code, registers)

    def transpose_8x8(self, word):
        """Transposes the 8x8 matrix of 16-bit halves of which lane 4r + c holds row r, columns 2c, 2c+1."""
        code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        return Int(_ptx(code, [word.value], [_i32()], warp=True)[0])

    def shuffle_xor(self, x, distance: int):
        return type(x)(mosaic_utils.shfl_bfly(x.value, distance))

    def shuffle(self, x, source):
        """The register of lane `source` of the same warp."""
        word = x.as_int() if isinstance(x, Float) else x
        got = nvvm.shfl_sync(
            _constant(-1), word.value, source.value, _constant(WARP_LANES - 1), nvvm.ShflKind.idx
        )
        return Int(got).as_float() if isinstance(x, Float) else Int(got)

    def largest_of_warp(self, x):
        """The largest of the signed integers in the lanes of a warp."""
        return Int(_ptx("redux.sync.max.s32 $0, $1, -1;", [x.value], [_i32()], memory=True, warp=True)[0])

    def any_lane(self, condition):
        """Whether the condition holds in some lane of the warp."""
        code = "{ .reg .pred p, q; setp.ne.b32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.b32 $0, 1, 0, q; }"
        return Int(_ptx(code, [condition.to_int().value], [_i32()], memory=True, warp=True)[0]).ne(0)

    def one_lane(self):
        """True in one lane of a warp whose lanes are all here."""
        code = "{ .reg .pred p; elect.sync _|p, -1; selp.b32 $0, 1, 0, p; }"
        return Int(_ptx(code, [], [_i32()], memory=True, warp=True)[0]).ne(0)

    # ---- memory
    def pointer(self, ref: ir.Value) -> Pointer:
        return Pointer(llvm.ptrtoint(_i64(), mosaic_utils.memref_ptr(ref)))

    def load_global(self, pointer, count=1, offset=0, early=False):
        """`count` (1, 2, 4) words; the memory must not be written by this kernel.

        An `early` load is not put off beyond the next block barrier.
        """
        code = f"ld.global{'' if early else '.nc'}.{_vector(count)}, [${count}+{offset}];"
        return [Int(x) for x in _ptx(code, [pointer.value], [_i32()] * count, memory=True)]

    def prefetch(self, pointer, offset=0):
        """Brings the 128-byte line of global memory there into the L2 cache."""
        mosaic_utils.inline_ptx(f"prefetch.global.L2 [$0+{offset}];", pointer.value)

    def load_changing(self, pointer):
        """One word that other blocks of this kernel may write meanwhile."""
        code = "ld.relaxed.gpu.global.b32 $0, [$1];"
        return Int(_ptx(code, [pointer.value], [_i32()], memory=True)[0])

    def add_global(self, pointer, value, condition):
        """Adds to one word, atomically, where the condition holds, and returns what it was there.

        Whoever sees the sum also sees what this thread has seen and written before.
        """
        code = "{ .reg .pred p; setp.ne.b32 p, $3, 0; mov.b32 $0, 0; "
        code += "@p atom.add.acq_rel.gpu.global.u32 $0, [$1], $2; }"
        operands = [pointer.value, value.value, condition.to_int().value]
        return Int(_ptx(code, operands, [_i32()], memory=True)[0])

    def store_global(self, pointer, words, offset=0):
        code = f"st.global.{_store_form(len(words), offset)}"
        mosaic_utils.inline_ptx(code, pointer.value, *(x.value for x in words))

    def store_global_u16(self, pointer, bits, offset=0):
        code = f"{{ .reg .b16 h; cvt.u16.u32 h, $1; st.global.b16 [$0+{offset}], h; }}"
        mosaic_utils.inline_ptx(code, pointer.value, bits.value)

    def load_shared(self, address, count=1, offset=0):
        code = f"ld.shared.{_vector(count)}, [${count}+{offset}];"
        return [Int(x) for x in _ptx(code, [address.value], [_i32()] * count, memory=True)]

    def store_shared(self, address, words, offset=0):
        code = f"st.shared.{_store_form(len(words), offset)}"
        mosaic_utils.inline_ptx(code, address.value, *(x.value for x in words))

    def load_matrices(self, address, offset=0):
        """Four 8x8 matrices of 16-bit halves (rows of 16 bytes); lane 8i + r addresses row r of matrix i.

        Register i of lane 4r + c is the word of row r, bytes 4c..4c+3, of matrix i.
        """
        code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0,$1,$2,$3}}, [$4+{offset}];"
        return [Int(x) for x in _ptx(code, [address.value], [_i32()] * 4, memory=True, warp=True)]

    def copy_async(self, address, pointer, shared_offset=0, global_offset=0):
        """Starts a copy of 16 bytes from global to shared memory, in the current group of this thread."""
        code = f"cp.async.cg.shared.global.L2::128B [$0+{shared_offset}], [$1+{global_offset}], 16;"
        mosaic_utils.inline_ptx(code, address.value, pointer.value)

    def commit_copies(self):
        mosaic_utils.inline_ptx("cp.async.commit_group;")

    def wait_copies(self, newest_allowed: int):
        """Waits until at most `newest_allowed` groups of this thread are still on their way."""
        mosaic_utils.inline_ptx(f"cp.async.wait_group {newest_allowed};")

    def start_barrier(self, address, offset=0):
        """Makes 8 bytes of shared memory a barrier that completes by one `expect_bytes` and those bytes."""
        mosaic_utils.inline_ptx(f"mbarrier.init.shared.b64 [$0+{offset}], 1;", address.value)

    def publish_barriers(self):
        """Shows the barriers that this thread started to the unit that copies."""
        mosaic_utils.inline_ptx("fence.mbarrier_init.release.cluster;")

    def order_copies(self):
        """Orders what this thread has seen of shared memory before the bulk copies that it starts next."""
        mosaic_utils.inline_ptx("fence.proxy.async.shared::cta;")

    def expect_bytes(self, barrier, size: int):
        mosaic_utils.inline_ptx(f"mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};", barrier.value)

    def copy_bulk(self, address, pointer, size: int, barrier, shared_offset=0):
        """Starts one copy of `size` bytes (16 n) from global to shared memory; the barrier counts them."""
        code = (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[$0+{shared_offset}], [$1], {size}, [$2];"
        )
        mosaic_utils.inline_ptx(code, address.value, pointer.value, barrier.value)

    def wait_barrier(self, barrier, parity):
        """Waits until the barrier's current phase, of parity 0, 1, 0, ..., is complete."""
        code = (
            "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; "
            "@p bra DONE; bra WAIT; DONE: }"
        )
        mosaic_utils.inline_ptx(code, barrier.value, parity.value)

    def sync_warp(self):
        mosaic_utils.inline_ptx("bar.warp.sync -1;", has_side_effects=True, convergent=True)

    def sync_block(self):
        gpu.barrier()

    def sync_warpgroup(self):
        mosaic_utils.warpgroup_barrier()

    # ---- control flow; what is carried is a tree (as JAX has them) of Int and Float
    def loop(self, count: Int, carry: Tree, body: Callable[[Tree], Tree]) -> Tree:
        """Runs `body(carry) -> carry` `count` times; `count` is the same in all lanes of a warp."""
        leaves, tree = jax.tree.flatten(carry)
        loop = scf.ForOp(_constant(0), count.value, _constant(1), [x.value for x in leaves])
        with ir.InsertionPoint(loop.body):
            out = body(_like(leaves, tree, loop.inner_iter_args))
            scf.YieldOp([x.value for x in tree.flatten_up_to(out)])
        return _like(leaves, tree, loop.results)

    def when(self, condition: Predicate, body: Callable[[], None]) -> None:
        """Runs `body` for its memory effects in the threads where the condition holds."""
        with mosaic_utils.when(condition.value):
            body()

    def branch(self, condition: Predicate, carry: Tree, body: Callable[[Tree], Tree]) -> Tree:
        """`body(carry)` where the condition holds (the same in all lanes of a warp), else `carry`."""
        leaves, tree = jax.tree.flatten(carry)
        op = scf.IfOp(condition.value, [x.value.type for x in leaves], has_else=True)
        with ir.InsertionPoint(op.then_block):
            scf.YieldOp([x.value for x in tree.flatten_up_to(body(carry))])
        with ir.InsertionPoint(op.else_block):
            scf.YieldOp([x.value for x in leaves])
        return _like(leaves, tree, op.results)

    def repeat(self, kinds: Sequence, body: Callable[[], tuple[Predicate, list]]) -> list:
        """Runs `body() -> (again, values)` until `again`, the same in all lanes of a warp, fails.

        Returns the last values; `kinds` are their types.
        """
        types = [_f32() if kind is Float else _i32() for kind in kinds]
        op = scf.WhileOp(types, [])
        with ir.InsertionPoint(op.before.blocks.append()):
            again, values = body()
            scf.ConditionOp(again.value, [x.value for x in values])
        with ir.InsertionPoint(op.after.blocks.append(*types)):
            scf.YieldOp([])
        return [kind(x) for kind, x in zip(kinds, op.results)]


def _like(leaves: Sequence, tree: jax.tree_util.PyTreeDef, values: Sequence[ir.Value]) -> Tree:
    """A carried tree of other values."""
    return jax.tree.unflatten(tree, [type(x)(value) for x, value in zip(leaves, values)])


class Warpgroup:
    """Four consecutive warps of a block as a machine of their own, with their own barrier."""

    def __init__(self, machine):
        self._machine = machine
        self.thread, self.warp = machine.thread & 127, machine.warp & 3
        self.index = machine.warp >> 2

    def __getattr__(self, name):
        return getattr(self._machine, name)

    def sync_block(self):
        raise AttributeError("a warpgroup meets its own barrier, sync_warpgroup")


def _store_form(count: int, offset: int) -> str:
    values = {1: "b32 [{a}], $1;", 2: "v2.b32 [{a}], {{$1,$2}};", 4: "v4.b32 [{a}], {{$1,$2,$3,$4}};"}
    return values[count].format(a=f"$0+{offset}")


def kernel_function(body: Callable[..., None], names: Sequence[str], axes: Sequence[str]) -> Callable:
    """`body(machine, block, arrays)` as a function of references, for `plgpu.kernel`.

    `block` is the position on the grid's `axes`, `arrays` all references by name; shared memory comes last.
    """

    def kernel(*refs):
        block = [lax.axis_index(axis) for axis in axes]
        splat = plgpu.Layout.WG_SPLAT(())

        @plgpu.inline_mgpu(arg_types=(splat,) * len(axes) + (plgpu.RefType(),) * len(refs), return_type=())
        def emit(_, *operands):
            place = tuple(Int(x.registers.item()) for x in operands[: len(axes)])
            *arrays, shared = operands[len(axes) :]
            body(MosaicMachine(shared), place, dict(zip(names, arrays)))
            return ()

        emit(*block, *refs)

    return kernel


def compiled_kernel(
    body: Callable[..., None],
    inputs: Sequence[str],
    outputs: dict[str, Any],
    grid: dict[str, int],
    warps: int,
    shared_bytes: int,
    name: str,
) -> Any:
    """The jitted launch of `body(machine, block, arrays)`, compiled on first use.

    It takes the input arrays and returns the outputs (named ShapeDtypeStructs) as a tuple. `grid` names the
    axes of a launch, the last of which runs fastest; `block` is the position on them, `arrays` all arrays by
    name. `warps` is a multiple of 4.
    """
    launch = plgpu.kernel(
        kernel_function(body, (*inputs, *outputs), tuple(grid)),
        out_type=tuple(outputs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warps // 4,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((-(-shared_bytes // 4),), jnp.int32)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name=name,
    )
    return jax.jit(launch)  # layers of one shape share one lowering
