"""The page quantizer in Gluon, run on a CPU: its own source, with NumPy in place of Triton.

Triton interprets no Gluon. But what decides a byte is written on tensors, not on lanes: reshapes, sums,
products and assembly per entry. So `quantize/gluon.py` and what it imports run as they stand, up to 128
channels, with the stand-ins below for `gl`; layouts say nothing, and the one exchange between lanes goes by
the axes that the layouts give them. What only a GPU shows: layouts, barriers, memory.
"""

import ast
import functools
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = Path(__file__).parents[2] / "oscar_torch/triton_kernels"


class Tensor(np.ndarray):
    """An array with the methods of a Gluon tensor; uint16 stands for bfloat16."""

    def permute(self, axes: tuple[int, ...]) -> Any:
        return self.transpose(axes)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if bitcast:
            return self.view(dtype)
        if dtype == np.uint16:
            bits = self.view(np.uint32)
            return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        if self.dtype == np.uint16:
            return (self.astype(np.uint32) << 16).view(np.float32)
        return self.astype(dtype)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)


class Pointer:
    """Elements of an array, from one of them on or many at a time."""

    def __init__(self, array: np.ndarray, at: Any = 0) -> None:
        self.array, self.at = array, at

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.array, self.at + offset)

    def to(self, dtype: Any, bitcast: bool = True) -> "Pointer":
        assert isinstance(self.at, int | np.integer)
        scale = self.array.itemsize // np.dtype(dtype).itemsize
        return Pointer(self.array.view(dtype), self.at * scale)


class Memory:
    """Shared memory, or a part of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def load(self, layout: Any) -> Any:
        return tensor(self.array.copy())

    def store(self, value: Any) -> None:
        self.array[...] = value

    def slice(self, start: int, length: int, dim: int = 0) -> "Memory":
        return Memory(np.moveaxis(np.moveaxis(self.array, dim, 0)[start : start + length], 0, dim))

    def permute(self, axes: tuple[int, ...]) -> "Memory":
        return Memory(self.array.transpose(axes))

    def index(self, i: int) -> "Memory":
        return Memory(self.array[i])


def tensor(value: Any, dtype: Any = None) -> Any:
    return np.asarray(value, dtype).view(Tensor)


class _Layout:
    """Whatever names where entries lie."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass


class Gl:
    """In place of `triton.experimental.gluon.language`, and of its modules for Ampere and Hopper."""

    int8, int16, int32, int64, float32, bfloat16 = (
        np.dtype(n) for n in ("int8", "int16", "int32", "int64", "float32", "uint16")
    )
    NVMMADistributedLayout = NVMMASharedLayout = SwizzledSharedLayout = DotOperandLayout = _Layout
    SliceLayout = BlockedLayout = DistributedLinearLayout = _Layout

    static_range = range
    place = (0, 0, 0)

    def program_id(self, axis: int) -> int:
        return self.place[axis]

    @staticmethod
    def num_programs(axis: int) -> int:
        return 2

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    @staticmethod
    def cast(x: Any, dtype: Any) -> Any:
        return int(x)

    @staticmethod
    def arange(start: int, end: int, layout: Any = None) -> Any:
        return tensor(np.arange(start, end, dtype=np.int32))

    @staticmethod
    def zeros(shape: list[int], dtype: Any, layout: Any) -> Any:
        return tensor(np.zeros(shape, dtype))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        out = np.where(condition, a, b)
        return tensor(out, np.int32 if out.dtype == np.int64 else out.dtype)

    @staticmethod
    def maximum(a: Any, b: Any, propagate_nan: Any = None) -> Any:
        return np.maximum(a, b)

    @staticmethod
    def abs(x: Any) -> Any:
        return np.abs(x)

    @staticmethod
    def fma(a: Any, b: Any, c: Any) -> Any:
        return tensor(_fma(np.asarray(a), np.asarray(b), np.asarray(c), 0))

    @staticmethod
    def sum(x: Any, axis: int) -> Any:
        return tensor(x.sum(axis, dtype=x.dtype))

    @staticmethod
    def max(x: Any, axis: int) -> Any:
        return tensor(x.max(axis))

    @staticmethod
    def reduce(x: Any, axis: int, combine: Callable[[Any, Any], Any]) -> Any:
        return functools.reduce(combine, (x.take(i, axis) for i in range(x.shape[axis])))

    @staticmethod
    def join(a: Any, b: Any) -> Any:
        return tensor(np.stack([a, b], -1))

    @staticmethod
    def split(x: Any) -> tuple[Any, Any]:
        return x[..., 0], x[..., 1]

    @staticmethod
    def convert_layout(x: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return x

    @staticmethod
    def pointer_type(dtype: Any) -> Any:
        return dtype

    @staticmethod
    def load(pointer: Pointer) -> Any:
        return tensor(pointer.array[pointer.at])

    @staticmethod
    def store(pointer: Pointer, value: Any) -> None:
        pointer.array[pointer.at] = value

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Memory:
        return Memory(np.full(shape, 85, dtype))

    @staticmethod
    def inline_asm_elementwise(
        asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        """Runs the assembly for all entries at once; `pack` neighbours of the last axis are a thread's."""
        arrays = [np.asarray(x, np.int32 if isinstance(x, int) else None) for x in args]
        arrays = [x.astype(np.float32) if x.dtype == np.float64 else x for x in arrays]
        arrays = [np.ascontiguousarray(x).view(np.uint32) for x in np.broadcast_arrays(*arrays)]
        inputs = [x[..., i::pack] for x in arrays for i in range(pack)]
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        outputs = _assembled(asm, len(dtypes), inputs)
        results = [
            tensor(np.ascontiguousarray(x).view(kind).reshape(arrays[0].shape))
            for x, kind in zip(outputs, dtypes)
        ]
        return tuple(results) if isinstance(dtype, tuple) else results[0]


def warpgroup_mma(a: Any, b: Memory, sums: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    product = (np.asarray(a).astype(np.float64) @ b.array.astype(np.float64)).astype(np.int32)
    return tensor(sums + product if use_acc else product)


def warpgroup_mma_wait(count: int, deps: list[Any]) -> Any:
    return deps[0] if len(deps) == 1 else tuple(deps)


def copy_to_shared(memory: Memory, pointers: Pointer, mask: Any = True) -> None:
    if mask:
        memory.store(pointers.array[pointers.at])


# ------------------------------------------------------------------------------------------ assembly


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, direction: int) -> np.ndarray:
    """a * b + c, rounded once: up (1), down (-1) or to the nearest (0)."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    out = exact.astype(np.float32)
    if direction > 0:
        return np.where(out < exact, np.nextafter(out, np.float32(np.inf)), out)
    if direction < 0:
        return np.where(out > exact, np.nextafter(out, np.float32(-np.inf)), out)
    return out


def _float_operation(name: str, rounding: str, x: list[np.ndarray]) -> np.ndarray:
    one = np.ones_like(x[0])
    if name == "abs":
        return np.abs(x[0])
    if name == "rcp":
        return np.nextafter(1 / x[0], np.float32(np.inf))  # not quite right, as on a GPU
    a, b, c = x if name == "fma" else (one, x[0], x[1])
    if name == "sub":
        c = -c
    if name == "mul":
        a, b, c = x[0], x[1], 0 * one
    if "sat" in rounding:
        return np.clip(_fma(a, b, c, 0), 0, 1)
    if rounding == "rz":
        down, up = _fma(a, b, c, -1), _fma(a, b, c, 1)
        return np.where(np.abs(down) < np.abs(up), down, up)
    return _fma(a, b, c, {"rm": -1, "rp": 1}.get(rounding, 0))


def _permuted(a: np.ndarray, b: np.ndarray, pick: np.ndarray) -> np.ndarray:
    both, out = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        place = (pick >> np.uint32(4 * i)) & np.uint32(7)
        byte = (both >> (place.astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(0xFF)
        out |= byte << np.uint32(8 * i)
    return out


def _neighbour(x: np.ndarray, mask: int) -> np.ndarray:
    """Of lane 4 g + c, where axis 0 is 8 warp + g and axis 1 is c: that of lane ^ mask."""
    return x[np.arange(x.shape[0]) ^ (mask >> 2)][:, np.arange(x.shape[1]) ^ (mask & 3)]


def _operation(name: str, x: list[np.ndarray]) -> np.ndarray:
    """One instruction on arrays of 32 bits."""
    kind, *parts = name.split(".")
    if parts[-1] == "f32":
        y = _float_operation(kind, ".".join(parts[:-1]), [v.view(np.float32) for v in x])
        return y.astype(np.float32).view(np.uint32)
    if name == "max.u16x2":
        halves = [np.maximum((x[0] >> s) & 0xFFFF, (x[1] >> s) & 0xFFFF) for s in (0, 16)]
        return halves[0] | halves[1] << np.uint32(16)
    if kind == "shf":
        return x[1] << x[2] | x[0] >> (np.uint32(32) - x[2])
    if kind == "shfl":
        return _neighbour(x[0], int(x[1].flat[0]))
    if kind == "lop3":
        assert (x[3] == 0xCA).all()
        return x[0] & x[1] | ~x[0] & x[2]
    if kind == "prmt":
        return _permuted(*x)
    functions = {"mov": lambda a: a, "not": np.invert, "add": np.add, "shr": np.right_shift}
    functions |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    return functions[kind](*x)


def _statements(asm: str) -> Iterator[tuple[str, list[str]]]:
    for line in re.sub(r"[{}\n]", " ", asm).split(";"):
        name, _, rest = line.strip().partition(" ")
        if name and name != ".reg":
            yield name, [operand.strip() for operand in rest.split(",")]


def _assembled(asm: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The output registers of a piece of PTX."""
    values = {f"${outputs + i}": x for i, x in enumerate(inputs)}
    like = np.zeros(inputs[0].shape, np.uint32)

    def value(operand: str) -> np.ndarray:
        if operand in values:
            return values[operand]
        return like + np.uint32(int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0) % 2**32)

    for name, (target, *operands) in _statements(asm):
        values[target] = _operation(name, [value(operand) for operand in operands])
    return [values[f"${i}"] for i in range(outputs)]


# ------------------------------------------------------------------------------------------ the kernel


class _Plain(ast.NodeTransformer):
    """Constants as what they hold: `constexpr` stands for it here."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        return node.value if node.attr == "value" else node


def _loaded(gl: Gl) -> dict[str, Any]:
    """The kernel functions of `quantize/gluon.py` and what they call, with `gl` in place of Gluon."""
    from oscar_torch.triton_kernels.quantize import sequential, steps

    jit = types.SimpleNamespace(
        jit=lambda f=None, **options: f or (lambda g: g), constexpr_function=lambda f: f
    )
    copies = types.SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, commit_group=lambda: None, wait_group=lambda n: None
    )
    given = {"gluon": jit, "gl": gl, "async_copy": copies, "fence_async_shared": lambda: None}
    given |= {"warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait}
    given |= {"PropagateNan": types.SimpleNamespace(ALL=None), "wide": types.SimpleNamespace(D=256)}
    for module in (steps, sequential):
        given |= {name: v.value for name, v in vars(module).items() if hasattr(v, "value")}
    for name in ("gluon_steps", "gluon_sequential", "gluon_page", "gluon"):
        tree = ast.parse((PACKAGE / f"quantize/{name}.py").read_text())
        tree.body = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign) or (isinstance(node, ast.FunctionDef) and node.decorator_list)
        ]
        own = dict(given)
        tree = ast.fix_missing_locations(_Plain().visit(tree))
        exec(compile(tree, name, "exec"), own)
        given |= {name: v for name, v in own.items() if not name.startswith("__")}
    return given


def quantize_page_pair(key_pages: Any, value_pages: Any, rotation: Any) -> dict[str, Any]:
    """`oscar_torch.quantize.quantize_page_pair` by the kernel of `quantize/gluon.py`; Torch tensors."""
    import torch

    from oscar_torch.core import cache_format as fmt
    from oscar_torch.triton_kernels.quantize.sequential import feedback_arguments

    pages, _, heads, head_dim = key_pages.shape
    out = {
        name: torch.zeros(shape, dtype=getattr(torch, fmt.INT2_ARRAYS[name]))
        for name, shape in fmt.int2_array_shapes(pages, heads, head_dim).items()
    }

    def pointer(array: Any) -> Any:
        if not isinstance(array, torch.Tensor):
            return array
        bits = array.view(torch.int16) if array.dtype == torch.bfloat16 else array
        return Pointer(bits.numpy().reshape(-1))

    pairs = [rows.bfloat16().contiguous().view(torch.int32) for rows in (key_pages, value_pages)]
    gl = Gl()
    kernel = _loaded(gl)["_bulk_kernel"]
    strides = (64 * heads * head_dim // 2, heads * head_dim // 2, head_dim // 2)
    arguments = [
        *pairs, *strides, pages, rotation.key_transform, rotation.value_transform, rotation.key_multiplier,
        rotation.value_multiplier, rotation.value_mean, int(rotation.key_transform.shape[0] > 1),
        out["key_codes"], out["value_codes"], out["key_scale"], out["value_scale"], out["key_page_mean"],
    ]  # fmt: skip
    fed = {name: pointer(array) for name, array in feedback_arguments(rotation).items()}
    with np.errstate(invalid="ignore", over="ignore"):  # rows of any bits; as a GPU, without a word
        for place in np.ndindex(heads, 2, 2):  # two programs share the pages of a head and role
            gl.place = place
            kernel(*map(pointer, arguments), **fed, FIRST_ROLE=0, K=heads, D=head_dim)
    return out
