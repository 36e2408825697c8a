"""What the cache path keeps out: settings of the process that change arithmetic, and impossible gradients.

A page is defined in integers and attention in float32. Autocast, TF32, other default types and the like must
therefore end at the public functions, which are marked `exact_arithmetic`.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .core.errors import GradientError

_DEVICES = ("cpu", "cuda")
_EXACT = ("none", "ieee")


class _Inside(threading.local):
    """Whether this thread is inside an exact function: those it calls need not look again."""

    exact = False


_inside = _Inside()


def exact_arithmetic[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function in plain float32 and int32, whatever the process has switched on."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        if _inside.exact:
            return function(*args, **options)
        _inside.exact = True
        try:
            if _is_plain():
                return function(*args, **options)
            with _plain_settings():
                return function(*args, **options)
        finally:
            _inside.exact = False

    return wrapped


def _is_plain() -> bool:
    return (
        torch.get_default_dtype() == torch.float32
        and not any(torch.is_autocast_enabled(device) for device in _DEVICES)
        and all(matmul.fp32_precision in _EXACT for matmul in _matmuls())
    )


def refuse_gradients(function: str, arrays: Any) -> Any:
    """The arrays; raises GradientError, naming the function, where a gradient through them is asked for."""
    if torch.is_grad_enabled() and _asks_for_gradient(arrays):
        raise GradientError(
            f"{function} cannot be differentiated: 2-bit pages have no gradient; "
            "allowed: a DenseCache, torch.no_grad(), or detach() on what goes in"
        )
    return arrays


def _asks_for_gradient(arrays: Any) -> bool:
    if isinstance(arrays, Tensor):
        return arrays.requires_grad
    if isinstance(arrays, tuple):
        return any(_asks_for_gradient(one) for one in arrays)
    if dataclasses.is_dataclass(arrays):
        return any(_asks_for_gradient(one) for one in vars(arrays).values())
    return False


def _matmuls() -> tuple[Any, ...]:
    """The places where Torch keeps what float32 products may be rounded to: of CUDA, and of CPUs."""
    cpu: Any = torch.backends.mkldnn
    return torch.backends.cuda.matmul, cpu.matmul


@contextlib.contextmanager
def _plain_settings() -> Iterator[None]:
    dtype, precisions = torch.get_default_dtype(), [matmul.fp32_precision for matmul in _matmuls()]
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            torch.set_default_dtype(torch.float32)
            for matmul in _matmuls():
                matmul.fp32_precision = "ieee"
            yield
        finally:
            torch.set_default_dtype(dtype)
            for matmul, precision in zip(_matmuls(), precisions):
                matmul.fp32_precision = precision
