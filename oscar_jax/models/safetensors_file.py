"""Safetensors files mapped into memory: tensors are views of the file, in every dtype it can hold.

The library's NumPy door copies each tensor and knows no 8-bit floats.
"""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ..core.errors import CheckpointError
from ..core.files import refuse_lfs_pointer

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_MAX_HEADER = 100_000_000  # bytes, the format's own bound


class SafetensorsFile:
    """Shapes and tensors of one .safetensors file; CheckpointError if it is missing, foreign or truncated."""

    def __init__(self, path: Path) -> None:
        try:
            refuse_lfs_pointer(path)
            self._data = np.memmap(path, np.uint8, "r")
            length = int.from_bytes(self._data[:8].tobytes(), "little")
            if not 2 <= length <= min(_MAX_HEADER, len(self._data) - 8):
                raise ValueError(f"its header would have {length} bytes, the file has {len(self._data)}")
            header = json.loads(self._data[8 : 8 + length].tobytes())
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            self._start = 8 + length
            self._places = {
                name: (entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in entries.items()
            }
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
        for name, (dtype, shape, first, last) in self._places.items():
            if dtype not in _DTYPES:
                raise CheckpointError(
                    f"tensor {name} of {path} has dtype {dtype}, allowed: {', '.join(_DTYPES)}"
                )
            needed = int(np.prod(shape, dtype=np.int64)) * np.dtype(_DTYPES[dtype]).itemsize
            if last - first != needed or not 0 <= first <= last <= len(self._data) - self._start:
                raise CheckpointError(
                    f"{path} is not a readable safetensors file: tensor {name} lies at {first}..{last}, "
                    f"needs {needed} bytes, there are {len(self._data) - self._start}"
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name."""
        return {name: place[1] for name, place in self._places.items()}

    def load(self, name: str) -> np.ndarray:
        """One tensor, read-only, not copied."""
        dtype, shape, first, last = self._places[name]
        return self._data[self._start + first : self._start + last].view(_DTYPES[dtype]).reshape(shape)
