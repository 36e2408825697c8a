"""Choice of implementation: "eager" (the reference, any device), "triton", "gluon" (Hopper), None (best).

A named choice never falls back: it runs, or raises NotImplementedError naming the shape or device it cannot
serve. `None` takes Gluon on Hopper, plain Triton on other NVIDIA GPUs of compute capability 8 and newer and
for shapes that Gluon does not support, and the reference elsewhere. Chunks of many queries take
"flash", the vendor's flash attention over blocks of dequantized pages, on every one of these GPUs. The log
says once which and why.
"""

import copy
import functools
import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import attention, quantize
from .arithmetic import exact_arithmetic, refuse_gradients
from .core.errors import ConfigError
from .layer_cache import (
    DenseCache,
    LayerCache,
    RotationArrays,
    check_chunk,
    check_query,
    check_rotation,
    check_rows,
)

IMPLEMENTATIONS = ("eager", "triton", "gluon", "flash")
_log = logging.getLogger(__name__)

# Kernel module and function of every implementation but the reference.
Kernels = dict[str, tuple[str, str]]
QUANTIZE_PAGES: Kernels = {
    "triton": ("quantize.triton", "quantize_page_pair"),
    "gluon": ("quantize.gluon", "quantize_page_pair"),
}
APPEND_TOKEN: Kernels = {
    "triton": ("append.triton", "append_token"),
    "gluon": ("append.gluon", "append_token"),
}
DECODE_ATTENTION: Kernels = {
    "triton": ("decode.triton", "decode_attention"),
    "gluon": ("decode.gluon", "decode_attention"),
}
CHUNK_ATTENTION: Kernels = {
    "flash": ("prefill.flash", "chunk_attention"),
    "triton": ("prefill.triton", "chunk_attention"),
    "gluon": ("prefill.gluon", "chunk_attention"),
}


@exact_arithmetic
def quantize_pages(
    key_pages: Tensor, value_pages: Tensor, rotation: RotationArrays, *, implementation: str | None = None
) -> dict[str, Tensor]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    quantize.check_page_pair(key_pages, value_pages, rotation)
    refuse_gradients("quantize_pages", (key_pages, value_pages))
    choice = _choose(implementation, key_pages, QUANTIZE_PAGES, quantize.quantize_page_pair)
    return choice(key_pages, value_pages, rotation)


@exact_arithmetic
def append_token(
    cache: LayerCache,
    rotation: RotationArrays,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    *,
    implementation: str | None = None,
) -> bool:
    """Stores at most one row [B, 1, K, D] per sequence without waiting for the device, where a kernel can.

    Returns False, with nothing done, where the choice of implementation means the reference.
    """
    check_rows(cache, key, value, new_lengths)
    check_rotation(cache.config, rotation)
    refuse_gradients("append_token", (key, value))
    choice = _choose(implementation, key, APPEND_TOKEN, lambda *arguments: False)
    return choice(cache, rotation, key, value, new_lengths.to(torch.int32)) is not False


@exact_arithmetic
def decode_attention(
    query: Tensor,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    implementation: str | None = None,
    **options: Any,
) -> Tensor:
    """`attention.decode_attention` by the chosen implementation; [B, N, D] in the query's dtype."""
    check_query(query, cache, rotation, **options)
    kernels: Kernels = {}
    if isinstance(cache, LayerCache):
        kernels = _serving(DECODE_ATTENTION, implementation, options)
        refuse_gradients("decode_attention", query)
    choice = _choose(implementation, query, kernels, _decode_reference)
    return choice(query, cache, rotation, dtype=query.dtype, **options)


def _decode_reference(*arguments: Any, dtype: torch.dtype, **options: Any) -> Tensor:
    return attention.decode_attention(*arguments, **options).to(dtype)


@exact_arithmetic
def counted(cache: LayerCache, counts: list[tuple[int, int]], *, whole: bool) -> LayerCache:
    """A view of a cache for one chunk, which kernels need not ask the device about.

    counts: length and INT2 pages of every sequence; whole: every row of the chunk is a token.
    """
    view = copy.copy(cache)
    vars(view).update(known_counts=counts, known_whole=whole)
    return view


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    implementation: str | None = None,
    **options: Any,
) -> Tensor:
    """`attention.chunk_attention` by the chosen implementation; [B, T, N, D] in the query's dtype."""
    check_chunk(query, key, value, cache, options["new_lengths"])
    check_query(query, cache, rotation, **{n: x for n, x in options.items() if n != "new_lengths"})
    kernels: Kernels = {}
    if isinstance(cache, LayerCache):
        kernels = _serving(CHUNK_ATTENTION, implementation, options)
        refuse_gradients("chunk_attention", (query, key, value))
    choice = _choose(implementation, query, kernels, attention.chunk_attention)
    options["new_lengths"] = options["new_lengths"].to(torch.int32)
    return choice(query, key, value, cache, rotation, **options).to(query.dtype)


def check_implementation(implementation: str | None) -> None:
    """Raises ConfigError unless the name is known."""
    if implementation not in (*IMPLEMENTATIONS, None):
        raise ConfigError(
            f"implementation = {implementation!r}, allowed: {', '.join(IMPLEMENTATIONS)} or None"
        )


def check_softcap_kernel(implementation: str | None, softcap: float | None) -> None:
    """Raises NotImplementedError where a kernel is named that is to cap scores: none can."""
    if softcap is not None and implementation not in ("eager", None):
        raise NotImplementedError(
            f"implementation = {implementation!r} with softcap = {softcap}: no kernel caps scores, "
            "allowed: 'eager' or None"
        )


def _choose(implementation: str | None, tensor: Tensor, kernels: Kernels, reference: Callable) -> Callable:
    """The named implementation, or for None the best one for the tensor's device."""
    check_implementation(implementation)
    # A BF16 cache has no INT2 kernel: every choice means the reference.
    if implementation == "eager" or not kernels:
        return reference
    if implementation is not None:
        if implementation not in kernels:
            raise NotImplementedError(f"{implementation} has no kernel here, allowed: {', '.join(kernels)}")
        return _on_device(_kernel(*kernels[implementation]), tensor.device)
    best = _best(tensor.device)
    if not best:
        return reference

    def best_available(*args: Any, **options: Any) -> Any:
        for name in (n for n in best if n in kernels):
            try:
                return _kernel(*kernels[name])(*args, **options)
            except NotImplementedError as reason:
                _log_once(f"{name} does not serve this: {reason}")
        return reference(*args, **options)

    return _on_device(best_available, tensor.device)


def _on_device(function: Callable, device: torch.device) -> Callable:
    """The function with the device of its tensors as the current one, where Triton launches."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return function

    def there(*args: Any, **options: Any) -> Any:
        with torch.cuda.device(device):
            return function(*args, **options)

    return there


def _serving(kernels: Kernels, implementation: str | None, options: dict[str, Any]) -> Kernels:
    """The kernels for a call with these options, which lose a soft cap of None: no kernel has one."""
    if options.get("softcap") is None:
        options.pop("softcap", None)
        return kernels
    check_softcap_kernel(implementation, options["softcap"])
    _log_once("the reference runs: no kernel caps attention scores (softcap)")
    return {}


def _kernel(module: str, name: str) -> Callable:
    """A kernel, imported on first use: Triton is not part of every Torch build."""
    return getattr(_module(module), name)


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f".triton_kernels.{name}", __package__)


@functools.cache
def _best(device: torch.device) -> tuple[str, ...]:
    """Implementations to try on a device, fastest first, chosen by compute capability."""
    if device.type != "cuda" or torch.version.cuda is None:
        _log_once(f"the reference runs: the tensors lie on {device.type}, kernels need an NVIDIA GPU")
        return ()
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return ("flash", "gluon", "triton")
    if major >= 8:
        _log.info("compute capability %d.%d is not Hopper: using the plain Triton kernels", major, minor)
        return ("flash", "triton")
    _log.info("compute capability %d.%d is too old for the kernels: using the reference", major, minor)
    return ()


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)
