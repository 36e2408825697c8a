"""GGUF files: metadata and tensor table read here, blocks dequantized by the `gguf` library.

The library's own reader builds one NumPy view per metadata string, which takes many seconds for a vocabulary
of 262 144 tokens; walking the header once takes a fraction of one.
"""

import dataclasses
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import CheckpointError
from ..core.files import refuse_lfs_pointer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_BLOCKS_AT_A_TIME = 16_384
_THREADS = min(8, os.cpu_count() or 1)
# value type -> struct code; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the table: shape with rows first, the library's quantization type, place in the file."""

    shape: tuple[int, ...]
    quantization: Any  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """Metadata and lazily dequantized tensors of one GGUF file.

    Raises CheckpointError if the file is missing, foreign, split, truncated (header or data), or needs a
    quantization type the installed `gguf` library does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            refuse_lfs_pointer(path)
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"cannot read GGUF file {path}: {error}") from None
        self._cursor = 0
        self.metadata_types: dict[str, tuple[int, int | None]] = {}  # value type, and that of array items
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError):
            raise CheckpointError(f"GGUF file {path} is truncated or damaged in its header") from None
        needed = max((t.offset + t.num_bytes for t in self.tensors.values()), default=0)
        if needed > len(self._data):
            raise CheckpointError(
                f"GGUF file {path} is truncated: its tensors need {needed} bytes, it has {len(self._data)}"
            )
        if self.metadata.get("split.count", 1) > 1:
            raise CheckpointError(
                f"GGUF file {path} is one of {self.metadata['split.count']}: merge them first"
            )

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as they lie in the file, uint8 [num_bytes], not copied."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def check_readable(self) -> None:
        """Raises CheckpointError for the first tensor whose code the gguf library cannot dequantize."""
        from gguf import quants
        from gguf.constants import GGMLQuantizationType

        allowed = [kind.name for kind in GGMLQuantizationType if hasattr(quants, kind.name)]
        allowed += ["F32", "F16"]
        for name, tensor in self.tensors.items():
            if tensor.quantization.name not in allowed:
                raise CheckpointError(
                    f"tensor {name} of {self.path} is of type {tensor.quantization.name}, which the gguf "
                    f"library cannot dequantize, allowed: {', '.join(sorted(allowed))}"
                )

    def load(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor dequantized to float32, rows first; its code must pass `check_readable`.

        `index`, a slice with whole numbers per axis, asks for a part: only its blocks are read.
        """
        from gguf.constants import GGML_QUANT_SIZES

        tensor = self.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
        if not tensor.shape or tensor.shape[-1] % block:  # a block lies across rows
            whole = self._dequantized(tensor.quantization, self.raw(name).reshape(-1, block_bytes))
            return whole.reshape(tensor.shape)[index or ()]
        blocks = self.raw(name).reshape(*tensor.shape[:-1], tensor.shape[-1] // block, block_bytes)
        if index is None:
            whole = self._dequantized(tensor.quantization, blocks.reshape(-1, block_bytes))
            return whole.reshape(tensor.shape)
        columns = index[-1]
        first, last = columns.start // block, -(-columns.stop // block)
        blocks = blocks[(*index[:-1], slice(first, last))]
        rows = self._dequantized(tensor.quantization, blocks.reshape(-1, block_bytes))
        rows = rows.reshape(*blocks.shape[:-2], (last - first) * block)
        return rows[..., columns.start - first * block : columns.stop - first * block]

    @staticmethod
    def _dequantized(quantization: Any, blocks: np.ndarray) -> np.ndarray:
        """Blocks uint8 [n, bytes] of one code -> float32 [n, elements]."""
        from gguf import quants
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        block, _ = GGML_QUANT_SIZES[quantization]
        if quantization in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            return quants.dequantize(blocks.reshape(-1), quantization).reshape(-1, block)
        codec = getattr(quants, quantization.name)
        # Large groups of blocks: the library's own loop takes 16 rows at a time.
        out = np.empty((len(blocks), block), np.float32)

        def fill(start: int) -> None:
            group = slice(start, start + _BLOCKS_AT_A_TIME)
            out[group] = codec.dequantize_blocks(blocks[group])

        starts = range(0, len(blocks), _BLOCKS_AT_A_TIME)
        if len(starts) < 2 * _THREADS:
            for start in starts:
                fill(start)
        else:  # the embedding alone can be half of the file
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(fill, starts))
        return out

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._data[:4] != _MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {self._data[:4]!r}")
        self._cursor = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise CheckpointError(f"GGUF version {version} of {self.path}, allowed: {_VERSIONS}")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_values):
            key, kind = self._string(), self._scalar("I")
            inner = struct.unpack_from("<I", self._data, self._cursor)[0] if kind == _ARRAY else None
            self.metadata_types[key] = (kind, inner)
            metadata[key] = self._value(kind)
        table = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-self._cursor // alignment) * alignment
        return metadata, {
            name: dataclasses.replace(tensor, offset=start + tensor.offset) for name, tensor in table
        }

    def _tensor_entry(self) -> tuple[str, GGUFTensor]:
        """One line of the tensor table; its offset still counts from the start of the data."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
        kind, offset = self._scalar("I"), self._scalar("Q")
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            raise CheckpointError(
                f"tensor {name} of {self.path} has unknown quantization type {kind}"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        num_bytes = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        return name, GGUFTensor(shape, quantization, offset, num_bytes)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._cursor)
        self._cursor += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        if self._cursor + length > len(self._data):
            raise IndexError(length)
        self._cursor += length
        return self._data[self._cursor - length : self._cursor].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"metadata of {self.path} has unknown value type {kind}")
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind not in _SCALARS:
            return [self._value(kind) for _ in range(length)]
        values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._data, self._cursor)
        self._cursor += struct.calcsize(f"<{length}{_SCALARS[kind]}")
        return list(values)
