"""`.pt` files without trust: nothing in them is executed, and nothing is expanded before it was checked.

Twin file, byte-identical in both packages: NumPy only; the torch package is imported when a file is touched.
"""

import importlib
import pathlib
import types
import zipfile
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, ConfigError
from ..core.files import refuse_lfs_pointer, replacing_file


def require_package(module: str, purpose: str) -> types.ModuleType:
    """The imported module; ConfigError that says what it is needed for and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{purpose} needs the {module} package: pip install 'oscar-kv[{module}]'") from None


def load_torch_file(path: pathlib.Path) -> Any:
    """What a `.pt` file holds: tensors on the CPU and plain values, nothing else; CheckpointError."""
    torch = require_package("torch", "reading and writing .pt files")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    refuse_lfs_pointer(path)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                packed = [entry for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
            if packed:  # torch.save never compresses: this could expand to any size
                raise CheckpointError(f"{path}: {packed[0].filename} is compressed, expected stored entries")
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        text = str(error)
        if "weights_only" in text or "Unsupported" in text or "GLOBAL" in text:
            reason = "holds objects other than tensors and plain values"
        else:
            reason = "truncated, or not a PyTorch file"
        raise CheckpointError(f"{path}: {reason} ({type(error).__name__})") from None


def save_torch_file(content: Any, path: pathlib.Path) -> None:
    """Writes nested dicts of NumPy arrays and plain values as a `.pt` file, whole or not at all."""
    torch = require_package("torch", "reading and writing .pt files")

    def to_torch(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: to_torch(item) for name, item in value.items()}
        return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value

    with replacing_file(path) as partial:
        torch.save(to_torch(content), partial)


def check_tensor(where: str, tensor: Any) -> tuple[int, ...]:
    """The shape of a dense float32 tensor that owns all its elements; CheckpointError before it is read.

    A view that repeats a small storage (stride 0) could expand to any size and is refused.
    """
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    layout = str(getattr(tensor, "layout", "")).removeprefix("torch.")
    if not hasattr(tensor, "layout") or layout != "strided" or tensor.is_quantized or tensor.is_nested:
        raise CheckpointError(f"{where} is {dtype} {layout}".rstrip() + ", expected a dense float32 tensor")
    if dtype != "float32":
        raise CheckpointError(f"{where} is {dtype}, expected a float32 tensor")
    if tensor.device.type != "cpu":
        raise CheckpointError(f"{where} has no content (device {tensor.device}), expected a float32 tensor")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{where} of shape {tuple(tensor.shape)} repeats a storage of "
            f"{tensor.untyped_storage().nbytes()} bytes, expected a tensor of its own"
        )
    return tuple(tensor.shape)


def to_array(where: str, tensor: Any) -> np.ndarray:
    """A NumPy float32 array of a tensor that `check_tensor` accepted; CheckpointError if it is not finite."""
    array = tensor.detach().contiguous().numpy()
    if not np.isfinite(array).all():
        raise CheckpointError(f"{where} has non-finite entries")
    return array
