"""What every kernel asks before a launch: devices, strides, tensors seen as words."""

import torch
import triton

from ...core.errors import ShapeError

# Shared memory per program from which the limbs of a transform of 256 channels can stay on the chip.
LARGE_SHARED_MEMORY = 200_000


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory one program can have."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def int16_bits(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 numbers as their bits."""
    return tensor.view(torch.int16)


def int32_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Rows as int32 pairs of bf16, in place where their strides allow it."""
    rows = rows.to(torch.bfloat16)
    offsets = (rows.storage_offset(), *rows.stride()[:-1])
    if rows.stride(-1) != 1 or any(offset % 2 for offset in offsets):
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int32)


def rotation_stride(rotation_heads: int, num_heads: int) -> int:
    """0 where one rotation serves all heads, 1 where every head has its own."""
    if rotation_heads not in (1, num_heads):
        raise ShapeError(f"rotation has {rotation_heads} heads, allowed: 1 or {num_heads}")
    return 0 if rotation_heads == 1 else 1


def check_device(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError unless compiled Triton (or its interpreter) can reach the tensor."""
    if triton.knobs.runtime.interpret and tensor.device.type == "cpu":
        return
    major, minor = _capability(tensor)
    if major < 8:
        raise NotImplementedError(f"compute capability {major}.{minor}, needed: 8.0 or newer")


def check_hopper(tensor: torch.Tensor) -> None:
    """Raises NotImplementedError unless the tensor is on a Hopper GPU: newer ones lack its wgmma."""
    major, minor = _capability(tensor)
    if major != 9:
        raise NotImplementedError(f"compute capability {major}.{minor}, the Gluon kernels serve 9.0 (Hopper)")


def _capability(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.device.type != "cuda":
        raise NotImplementedError(f"Triton kernels need a CUDA tensor, got device {tensor.device}")
    return torch.cuda.get_device_capability(tensor.device)
