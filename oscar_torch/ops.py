"""Choice of implementation: "eager" (the reference, any device), "triton", "gluon" (Hopper), None (best).

A named choice never falls back: it runs, or raises NotImplementedError naming the shape or device it cannot
serve. `None` takes Gluon on Hopper, plain Triton on other NVIDIA GPUs of compute capability 8 and newer, and
the reference elsewhere and for shapes that the kernels do not support.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import attention, cache
from .cache import LayerCache
from .config import ConfigError

IMPLEMENTATIONS = ("eager", "triton", "gluon")
_log = logging.getLogger(__name__)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: Any,
    rotation: Any,
    *,
    new_lengths: Tensor,
    scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Any]:
    """Attends with new tokens and stores them: the one call a decoder layer makes.

    query [B, T, N, D], key and value [B, T, K, D], new_lengths int32 [B] (rows past it are padding) ->
    float32 [B, T, N, D] and the cache with the rows appended. One token is stored first and then attends to
    all that is stored; a chunk attends to the cache as it was and, exactly, to itself.
    """
    options = {"scale": scale, "sliding_window": sliding_window, "sink_logits": sink_logits}
    if query.shape[1] == 1:
        layer_cache = append_rows(
            layer_cache, rotation, key, value, new_lengths, implementation=implementation
        )
        out = decode_attention(query[:, 0], layer_cache, rotation, implementation=implementation, **options)
        return out[:, None], layer_cache
    out = chunk_attention(
        query,
        key,
        value,
        layer_cache,
        rotation,
        new_lengths=new_lengths,
        implementation=implementation,
        **options,
    )
    return out, append_rows(layer_cache, rotation, key, value, new_lengths, implementation=implementation)


def append_rows(
    layer_cache: Any,
    rotation: Any,
    key: Tensor,
    value: Tensor,
    new_lengths: Tensor,
    *,
    implementation: str | None = None,
) -> Any:
    """`cache.append_rows` with the page quantizer of the chosen implementation."""
    quantize = functools.partial(quantize_pages, implementation=implementation)
    return cache.append_rows(layer_cache, rotation, key, value, new_lengths, quantize=quantize)


def quantize_pages(
    key_pages: Tensor, value_pages: Tensor, rotation: Any, *, implementation: str | None = None
) -> dict[str, Tensor]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    kernels = {
        "triton": ("quantize_triton", "quantize_page_pair"),
        "gluon": ("quantize_triton", "quantize_page_pair"),
    }
    return _choose(implementation, kernels, cache.quantize_page_pair, key_pages, value_pages, rotation)


def decode_attention(
    query: Tensor, layer_cache: Any, rotation: Any, *, implementation: str | None = None, **options: Any
) -> Tensor:
    """`attention.decode_attention` by the chosen implementation; float32 [B, N, D]."""
    kernels = {"triton": ("decode_triton", "decode_attention"), "gluon": ("decode_gluon", "decode_attention")}
    if not isinstance(layer_cache, LayerCache):
        kernels = {}
    return _choose(
        implementation, kernels, attention.decode_attention, query, layer_cache, rotation, **options
    )


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: Any,
    rotation: Any,
    *,
    implementation: str | None = None,
    **options: Any,
) -> Tensor:
    """`attention.chunk_attention` by the chosen implementation; float32 [B, T, N, D]."""
    kernels = {
        "triton": ("prefill_triton", "chunk_attention"),
        "gluon": ("prefill_triton", "chunk_attention"),
    }
    if not isinstance(layer_cache, LayerCache):
        kernels = {}
    reference = attention.chunk_attention
    return _choose(implementation, kernels, reference, query, key, value, layer_cache, rotation, **options)


def _choose(
    implementation: str | None,
    kernels: dict[str, tuple[str, str]],
    reference: Callable,
    *args: Any,
    **options: Any,
) -> Any:
    """Runs the named implementation, or the best one that supports these arguments."""
    if implementation not in (*IMPLEMENTATIONS, None):
        raise ConfigError(
            f"implementation = {implementation!r}, allowed: {', '.join(IMPLEMENTATIONS)} or None"
        )
    # A BF16 cache has no INT2 kernel: every choice means the reference.
    if implementation == "eager" or not kernels:
        return reference(*args, **options)
    if implementation is not None:
        return _kernel(*kernels[implementation])(*args, **options)
    best = _best(args[0].device)
    if best is not None:
        try:
            return _kernel(*kernels[best])(*args, **options)
        except NotImplementedError as reason:
            _log.info("%s: %s; using the eager reference", kernels[best][0], reason)
    return reference(*args, **options)


def _kernel(module: str, name: str) -> Callable:
    """A kernel, imported on first use: Triton is not part of every Torch build."""
    return getattr(importlib.import_module(f".triton_kernels.{module}", __package__), name)


@functools.cache
def _best(device: torch.device) -> str | None:
    """The fastest implementation for a device, chosen by compute capability."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if major == 9:
        return "gluon"
    if major >= 8:
        _log.info("compute capability %d.%d is not Hopper: using the plain Triton kernels", major, minor)
        return "triton"
    return None
