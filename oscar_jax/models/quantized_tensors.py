"""Weights in the forms that checkpoints keep them, as floats: scaled 8-bit numbers, packed integers, MXFP4.

Each `find_*` says which weights of a source are kept in one form, and how a part of one is computed; nothing
is read before. A product of a code and its scale is taken in float32 and rounded where the method rounds it.
Axes of a weight are rows (out) and columns (in), of experts' weights as the checkpoint has them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..core.errors import CheckpointError
from .family import TensorSource

Part = tuple[slice, ...]  # a slice with whole numbers per axis
_WORD = 32  # bits of the integers that codes are packed in
_STRIP = 1 << 20  # elements computed at a time, so that temporaries stay small


@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight, the tensors it is kept in, and how a part of it is computed."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]
    read: Callable[[Part], np.ndarray]


def find_scaled(
    source: TensorSource, block_of: Callable[[str], tuple[int, int] | None], *, round_to_scale: bool
) -> dict[str, QuantizedWeight]:
    """Weights of 8-bit floats or integers beside factors: one, one per row, or one per block.

    `block_of(module)` is the block's size for weights that the blocks do not divide. `round_to_scale` rounds
    to the scales' dtype, as compressed-tensors does outside of experts; else the product stays float32.
    """
    ends = ("weight_scale", "weight_scale_inv")
    scales = [name for name in source.shapes if name.rpartition(".")[2] in ends]
    stems = {name.rpartition(".")[0]: name for name in scales}
    return {
        f"{stem}.weight": _scaled_weight(source, stem, scale, block_of(stem), round_to_scale)
        for stem, scale in stems.items()
        if f"{stem}.weight_packed" not in source.shapes
    }


_OF_ACTIVATIONS = ("activation_scale", "input_scale", "input_zero_point", "output_scale")


def _scaled_weight(
    source: TensorSource, stem: str, scale: str, block: tuple[int, int] | None, round_to_scale: bool
) -> QuantizedWeight:
    weight, zero = f"{stem}.weight", f"{stem}.weight_zero_point"
    shape, grid = _require(source, weight, scale), source.shapes[scale]
    grid = (*grid, 1, 1)[: max(2, len(grid))]
    sizes = block or (1, 1)
    if not all(grid) or len(grid) != 2 or len(shape) != 2:
        raise CheckpointError(f"{scale} {list(grid)} and {weight} {list(shape)}: expected two axes each")
    if grid != tuple(-(-n // size) for n, size in zip(shape, sizes)):  # the scales themselves say the size
        if any(n % count for n, count in zip(shape, grid)):
            raise CheckpointError(
                f"{scale} has shape {list(grid)}, which does not divide {weight} {list(shape)}"
            )
        sizes = tuple(n // count for n, count in zip(shape, grid))
    if ".experts." in stem:  # there transformers multiplies in float32
        round_to_scale = False
    zeros_there = zero in source.shapes

    def read(part: Part) -> np.ndarray:
        values = np.asarray(source.load(weight))
        allowed = [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
        allowed += [np.int8] if scale.endswith("_scale") else []
        if values.dtype not in allowed:
            names = ", ".join(np.dtype(kind).name for kind in allowed)
            raise CheckpointError(f"{weight} has dtype {values.dtype} beside {scale}, allowed: {names}")
        factors = np.asarray(source.load(scale)).reshape(grid)
        rounded = factors.dtype if round_to_scale else np.dtype(np.float32)
        exponents = factors.dtype == np.uint8
        factors = np.ldexp(np.float32(1), factors.astype(np.int32) - 127) if exponents else factors
        factors = factors.astype(np.float32)
        zeros = np.asarray(source.load(zero)).reshape(grid).astype(np.float32) if zeros_there else None

        def compute(part: Part) -> np.ndarray:
            out = values[part].astype(np.float32)
            if zeros is not None:
                out -= _spread(zeros, part, sizes)
            out *= _spread(factors, part, sizes)
            return out

        return _in_strips(part, rounded, compute)

    parts = (weight, scale, *_present(source, stem, ("weight_zero_point", *_OF_ACTIVATIONS)))
    return QuantizedWeight(shape, parts, read)


def _spread(grid: np.ndarray, part: Part, sizes: tuple[int, ...]) -> np.ndarray:
    """The factor of every element of a part; an axis with a single factor keeps length one."""
    for axis, (s, size) in enumerate(zip(part, sizes)):
        if grid.shape[axis] > 1:
            grid = grid.take(np.arange(s.start, s.stop) // size, axis)
    return grid


def find_packed(
    source: TensorSource, group_of: Callable[[str], Mapping[str, Any] | None]
) -> dict[str, QuantizedWeight]:
    """compressed-tensors' pack-quantized: codes of `num_bits` along columns, the first in the lowest bits.

    `group_of(module)` are the weights' arguments. Codes are shifted by half their range, as are zero points,
    which are packed along the rows; the scales' columns are groups of columns.
    """
    stems = [name.removesuffix(".weight_packed") for name in source.shapes if name.endswith(".weight_packed")]
    return {f"{stem}.weight": _packed_weight(source, stem, group_of(stem)) for stem in stems}


def _packed_weight(source: TensorSource, stem: str, arguments: Mapping[str, Any] | None) -> QuantizedWeight:
    packed, scale, shape = (f"{stem}.weight_{end}" for end in ("packed", "scale", "shape"))
    if arguments is None:
        raise CheckpointError(f"{packed}: quantization_config has no config_groups entry for it")
    if f"{stem}.weight_g_idx" in source.shapes:
        raise CheckpointError(f"{stem}.weight_g_idx: columns in an order of groups are not read here")
    grid = (*_require(source, scale, packed), 1, 1)[:2]
    _require(source, shape, packed)
    bits = arguments.get("num_bits", 8)
    rows, columns = (int(n) for n in np.asarray(source.load(shape)))
    fits = source.shapes[packed] == (rows, -(-columns * bits // _WORD)) and grid[0] in (1, rows)
    if not fits or columns % grid[1]:
        raise CheckpointError(
            f"{packed} {list(source.shapes[packed])} and {scale} {list(grid)} do not fit a weight of "
            f"{[rows, columns]} in {bits} bits"
        )
    zero = f"{stem}.weight_zero_point"
    symmetric = arguments.get("symmetric", True)
    if not symmetric:
        _require(source, zero, packed)
    sizes = (1, columns // grid[1])

    def read(part: Part) -> np.ndarray:
        factors = np.asarray(source.load(scale)).reshape(grid)
        zeros = None
        if not symmetric and source.shapes[zero] == source.shapes[scale]:
            zeros = np.asarray(source.load(zero)).reshape(grid).astype(np.int32) + (1 << bits - 1)
        elif not symmetric:
            zeros = _unpack(_words(source, zero), bits, 0, slice(0, grid[0]))

        def compute(part: Part) -> np.ndarray:
            out = _unpack(_words(source, packed)[part[0]], bits, 1, part[1]).astype(np.float32)
            out -= 1 << bits - 1 if zeros is None else _spread(zeros, part, sizes)
            out *= _spread(factors.astype(np.float32), part, sizes)
            return out

        return _in_strips(part, factors.dtype, compute)

    parts = (packed, scale, shape, *_present(source, stem, ("weight_zero_point", *_OF_ACTIVATIONS)))
    return QuantizedWeight((rows, columns), parts, read)


def find_gptq(source: TensorSource, *, zeros_less_one: bool) -> dict[str, QuantizedWeight]:
    """GPTQ: codes [in, out] packed along in, scales and zeros per group and output, `g_idx` an input's group.

    Inputs may stand in any order of groups (act-order). `zeros_less_one`: zeros are stored one too small, as
    in every file but those of format gptq_v2. The number of bits follows from the shapes.
    """
    stems = [name.removesuffix(".qweight") for name in source.shapes if name.endswith(".qweight")]
    return {f"{stem}.weight": _gptq_weight(source, stem, int(zeros_less_one)) for stem in stems}


def _gptq_weight(source: TensorSource, stem: str, zero_offset: int) -> QuantizedWeight:
    packed, scale, zero, index = (f"{stem}.{end}" for end in ("qweight", "scales", "qzeros", "g_idx"))
    columns, (groups, rows) = _require(source, index, packed)[0], _require(source, scale, packed)
    words, width = source.shapes[packed]
    bits = _WORD * words // max(1, columns)
    if bits not in (2, 4, 8) or width != rows or words * _WORD != columns * bits:
        raise CheckpointError(
            f"{packed} {[words, width]} does not hold {rows} outputs of {columns} inputs in 2, 4 or 8 bits"
        )
    if _require(source, zero, packed) != (groups, rows * bits // _WORD):
        raise CheckpointError(f"{zero} {list(source.shapes[zero])} does not fit {scale} {[groups, rows]}")

    def groups_of(columns: slice) -> np.ndarray:
        found = np.asarray(source.load(index))[columns]
        if found.size and not 0 <= found.min() <= found.max() < groups:
            raise CheckpointError(f"{index} names groups {found.min()}..{found.max()}, there are {groups}")
        return found

    read = _grouped_reader(
        source,
        scale,
        codes_of=lambda part: _unpack(_words(source, packed)[:, part[0]], bits, 0, part[1]),
        zeros_of=lambda rows: _unpack(_words(source, zero), bits, 1, rows) + zero_offset,
        groups_of=groups_of,
    )
    return QuantizedWeight((rows, columns), (packed, scale, zero, index), read)


_AWQ_ORDER = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # the place in its word of each of eight outputs


def find_awq(source: TensorSource) -> dict[str, QuantizedWeight]:
    """AWQ's gemm form: codes of four bits [in, out], eight outputs to a word, the even ones first."""
    stems = [name.removesuffix(".qweight") for name in source.shapes if name.endswith(".qweight")]
    return {f"{stem}.weight": _awq_weight(source, stem) for stem in stems}


def _awq_weight(source: TensorSource, stem: str) -> QuantizedWeight:
    packed, scale, zero = (f"{stem}.{end}" for end in ("qweight", "scales", "qzeros"))
    (columns, words), (groups, rows) = source.shapes[packed], _require(source, scale, packed)
    if words * 8 != rows or columns % groups or _require(source, zero, packed) != (groups, words):
        raise CheckpointError(
            f"{packed} {[columns, words]} and {scale} {[groups, rows]} do not fit each other in four bits, "
            f"or {zero} does not fit them"
        )

    def unpack(words: np.ndarray, rows: slice) -> np.ndarray:
        first, last = rows.start // 8, -(-rows.stop // 8)
        codes = _unpack(words[:, first:last], 4, 1, slice(0, 8 * (last - first)))
        codes = codes.reshape(len(codes), last - first, 8)[:, :, _AWQ_ORDER]
        codes = codes.reshape(len(codes), 8 * (last - first))
        return codes[:, rows.start - 8 * first : rows.stop - 8 * first]

    read = _grouped_reader(
        source,
        scale,
        codes_of=lambda part: unpack(_words(source, packed)[part[1]], part[0]),
        zeros_of=lambda rows: unpack(_words(source, zero), rows),
        groups_of=lambda part: np.arange(part.start, part.stop) // (columns // groups),
    )
    return QuantizedWeight((rows, columns), (packed, scale, zero), read)


def _grouped_reader(
    source: TensorSource,
    scale: str,
    *,
    codes_of: Callable[[Part], np.ndarray],
    zeros_of: Callable[[slice], np.ndarray],
    groups_of: Callable[[slice], np.ndarray],
) -> Callable[[Part], np.ndarray]:
    """(code - zero) * scale [out, in] in the scales' dtype; codes [in, out], the others [groups, out]."""

    def read(part: Part) -> np.ndarray:
        scales = np.asarray(source.load(scale))

        def compute(part: Part) -> np.ndarray:
            groups = groups_of(part[1])
            out = codes_of(part).astype(np.float32)
            out -= zeros_of(part[0])[groups]
            out *= scales[:, part[0]].astype(np.float32)[groups]
            return out.T

        return _in_strips(part, scales.dtype, compute)

    return read


# The sixteen numbers of E2M1: a sign, two bits of exponent, one of mantissa.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def find_mxfp4(source: TensorSource) -> dict[str, QuantizedWeight]:
    """gpt-oss's experts [E, in, out]: blocks of 32 four-bit floats, low half first, and an exponent each.

    `*_blocks` uint8 [E, out, in / 32, 16] and `*_scales` uint8 [E, out, in / 32], each biased by 127.
    """
    stems = [name.removesuffix("_blocks") for name in source.shapes if name.endswith("_blocks")]
    return {stem: _mxfp4_weight(source, stem) for stem in stems}


def _mxfp4_weight(source: TensorSource, stem: str) -> QuantizedWeight:
    blocks, scale = f"{stem}_blocks", f"{stem}_scales"
    grid = _require(source, scale, blocks)
    if len(grid) != 3 or source.shapes[blocks] != (*grid, 16):
        raise CheckpointError(
            f"{blocks} {list(source.shapes[blocks])} does not fit {scale} {list(grid)}, "
            "expected [E, out, n, 16] and [E, out, n]"
        )

    def read(part: Part) -> np.ndarray:
        codes, exponents = (np.asarray(source.load(name)) for name in (blocks, scale))

        def compute(part: Part) -> np.ndarray:
            experts, columns, rows = part
            first, last = columns.start // 32, -(-columns.stop // 32)
            halves = codes[experts, rows, first:last]
            numbers = np.stack([_E2M1[halves & 15], _E2M1[halves >> 4]], axis=-1).reshape(
                *halves.shape[:-1], 32
            )
            shifts = exponents[experts, rows, first:last].astype(np.int32) - 127
            numbers = np.ldexp(numbers, shifts[..., None]).reshape(*halves.shape[:2], 32 * (last - first))
            inside = slice(columns.start - 32 * first, columns.stop - 32 * first)
            return numbers[..., inside].swapaxes(1, 2)

        return _in_strips(part, np.dtype(np.float32), compute)

    return QuantizedWeight((grid[0], grid[2] * 32, grid[1]), (blocks, scale), read)


def _unpack(words: np.ndarray, bits: int, axis: int, part: slice) -> np.ndarray:
    """Codes int32 part.start .. part.stop along an axis of int32 words, the first code in the lowest bits."""
    each = _WORD // bits
    first, last = part.start // each, -(-part.stop // each)
    words = words[first:last].T if axis == 0 else words[:, first:last]
    shifts = np.arange(each, dtype=np.uint32) * np.uint32(bits)
    codes = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    codes = codes.reshape(len(words), each * (last - first))[
        :, part.start - first * each : part.stop - first * each
    ].astype(np.int32)
    return codes.T if axis == 0 else codes


def _in_strips(part: Part, dtype: np.dtype, compute: Callable[[Part], np.ndarray]) -> np.ndarray:
    """A part computed along its first axis some at a time, rounded to `dtype`."""
    shape = tuple(s.stop - s.start for s in part)
    out = np.empty(shape, dtype)
    step = max(1, _STRIP // max(1, int(np.prod(shape[1:]))))
    for start in range(part[0].start, part[0].stop, step):
        stop = min(start + step, part[0].stop)
        out[start - part[0].start : stop - part[0].start] = compute((slice(start, stop), *part[1:]))
    return out


def _require(source: TensorSource, name: str, beside: str) -> tuple[int, ...]:
    if name not in source.shapes:
        raise CheckpointError(f"{beside} has no {name} beside it")
    return source.shapes[name]


def _present(source: TensorSource, stem: str, ends: tuple[str, ...]) -> list[str]:
    return [name for end in ends if (name := f"{stem}.{end}") in source.shapes]


def _words(source: TensorSource, name: str) -> np.ndarray:
    words = np.asarray(source.load(name))
    if words.dtype != np.int32:
        raise CheckpointError(f"{name} has dtype {words.dtype}, allowed: int32")
    return words
