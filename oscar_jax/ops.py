"""Choice of implementation: "xla" (the reference, any device), "mosaic_gpu" (Hopper), None (best available).

A named choice never falls back: it runs, or raises NotImplementedError naming the shape or device it cannot
serve. `None` takes the Mosaic GPU kernel where the arrays lie on a GPU of compute capability 9.x and the
kernel supports the shape, and the reference elsewhere; the log says once which and why. Long chunks
take "flash", cuDNN's flash attention over blocks of dequantized pages, on the same GPUs.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

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

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "flash")
_log = logging.getLogger(__name__)

# Kernel module and function of every implementation but the reference.
Kernels = dict[str, tuple[str, str]]
QUANTIZE_PAGES: Kernels = {"mosaic_gpu": ("quantize.mosaic_gpu", "quantize_page_pair")}
APPEND_TOKEN: Kernels = {"mosaic_gpu": ("append.mosaic_gpu", "append_token")}
DECODE_ATTENTION: Kernels = {"mosaic_gpu": ("decode.mosaic_gpu", "decode_attention")}
CHUNK_ATTENTION: Kernels = {  # the best first
    "flash": ("prefill.flash", "chunk_attention"),
    "mosaic_gpu": ("prefill.mosaic_gpu", "chunk_attention"),
}


@exact_arithmetic
def quantize_pages(
    key_pages: jax.Array,
    value_pages: jax.Array,
    rotation: RotationArrays,
    *,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    quantize.check_page_pair(key_pages, value_pages, rotation)
    key_pages, value_pages = refuse_gradients("quantize_pages", (key_pages, value_pages))
    choice = _choose(implementation, key_pages, QUANTIZE_PAGES, quantize.quantize_page_pair)
    return choice(key_pages, value_pages, rotation)


@exact_arithmetic
def append_token(
    cache: LayerCache,
    rotation: RotationArrays,
    key: jax.Array,
    value: jax.Array,
    new_lengths: jax.Array,
    *,
    implementation: str | None = None,
) -> LayerCache | None:
    """Stores at most one row [B, 1, K, D] per sequence without waiting for the device, where a kernel can.

    Returns None where the choice of implementation means the reference.
    """
    check_rows(cache, key, value, new_lengths)
    check_rotation(cache.config, rotation)
    key, value = refuse_gradients("append_token", (key, value))
    choice = _choose(implementation, key, APPEND_TOKEN, lambda *arguments: None)
    return choice(cache, rotation, key, value, new_lengths)


@exact_arithmetic
def decode_attention(
    query: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    implementation: str | None = None,
    **options: Any,
) -> jax.Array:
    """`attention.decode_attention` by the chosen implementation; [B, N, D] in the query's dtype."""
    check_query(query, cache, rotation, **options)
    kernels: Kernels = {}
    if isinstance(cache, LayerCache):
        kernels = _serving(DECODE_ATTENTION, implementation, options)
        query, cache = refuse_gradients("decode_attention", (query, cache))
    choice = _choose(implementation, query, kernels, _decode_reference)
    return choice(query, cache, rotation, dtype=query.dtype, **options).astype(query.dtype)


def _decode_reference(*arguments: Any, dtype: Any, **options: Any) -> jax.Array:
    return attention.decode_attention(*arguments, **options).astype(dtype)


@exact_arithmetic
def chunk_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: LayerCache | DenseCache,
    rotation: RotationArrays | None,
    *,
    implementation: str | None = None,
    **options: Any,
) -> jax.Array:
    """`attention.chunk_attention` by the chosen implementation; [B, T, N, D] in the query's dtype."""
    check_chunk(query, key, value, cache, options["new_lengths"])
    check_query(query, cache, rotation, **{n: x for n, x in options.items() if n != "new_lengths"})
    kernels: Kernels = {}
    if isinstance(cache, LayerCache):
        kernels = _serving(CHUNK_ATTENTION, implementation, options)
        query, key, value, cache = refuse_gradients("chunk_attention", (query, key, value, cache))
    choice = _choose(implementation, query, kernels, attention.chunk_attention)
    return choice(query, key, value, cache, rotation, **options).astype(query.dtype)


def check_implementation(implementation: str | None) -> None:
    """Raises ConfigError unless the name is known."""
    if implementation not in (*IMPLEMENTATIONS, None):
        raise ConfigError(
            f"implementation = {implementation!r}, allowed: {', '.join(IMPLEMENTATIONS)} or None"
        )


def placed(array: jax.Array) -> contextlib.AbstractContextManager[Any]:
    """Context in which a trace, whose arrays have no place, chooses for the device of this array."""
    device = _placement(array)
    if isinstance(array, Tracer) or _why_not(device) == _why_not(ambient_device()):
        return contextlib.nullcontext()
    return jax.default_device(device)


def check_softcap_kernel(implementation: str | None, softcap: float | None) -> None:
    """Raises NotImplementedError where a kernel is named that is to cap scores: none can."""
    if softcap is not None and implementation not in ("xla", None):
        raise NotImplementedError(
            f"implementation = {implementation!r} with softcap = {softcap}: no kernel caps scores, "
            "allowed: 'xla' or None"
        )


def _choose(
    implementation: str | None, array: jax.Array, kernels: Kernels, reference: Callable[..., Any]
) -> Callable[..., Any]:
    """The named implementation, or for None the best one for the device of the array."""
    check_implementation(implementation)
    # A BF16 cache has no INT2 kernel: every choice means the reference.
    if implementation == "xla" or not kernels:
        return reference
    reason = _why_not(_placement(array))
    if implementation is not None:
        if implementation not in kernels:
            raise NotImplementedError(f"{implementation} has no kernel here, allowed: {', '.join(kernels)}")
        if reason:
            raise NotImplementedError(f"implementation = {implementation!r}: {reason}")
        return _kernel(*kernels[implementation])
    if reason:
        _log_once(f"the reference runs: {reason}")
        return reference

    def best_available(*args: Any, **options: Any) -> Any:
        for name, where in kernels.items():
            try:
                return _kernel(*where)(*args, **options)
            except NotImplementedError as refusal:
                _log_once(f"{name} does not serve this: {refusal}")
        return reference(*args, **options)

    return best_available


def _serving(kernels: Kernels, implementation: str | None, options: dict[str, Any]) -> Kernels:
    """The kernels for a call with these options, which lose a soft cap of None: no kernel has one."""
    if options.get("softcap") is None:
        options.pop("softcap", None)
        return kernels
    check_softcap_kernel(implementation, options["softcap"])
    _log_once("the reference runs: no kernel caps attention scores (softcap)")
    return {}


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """A kernel, imported on first use: Mosaic GPU is not part of every JAX build."""
    return getattr(importlib.import_module(f".pallas.{module}", __package__), name)


def _placement(array: jax.Array) -> Any:
    """The device an array lies on (one of several alike); under a trace, where arrays would go."""
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        return min(array.devices(), key=lambda device: device.id)
    return ambient_device()


def ambient_device() -> Any:
    """The default device."""
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default
    return jax.devices(default)[0]  # a platform's name, or None


@functools.cache
def _why_not(device: Any) -> str | None:
    """None if Mosaic GPU kernels run on the device, else the reason: they need capability 9.x."""
    if device.platform != "gpu":
        return f"the arrays lie on {device.platform}, mosaic_gpu needs a GPU of compute capability 9.x"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability.split(".")[0] != "9":
        return f"{device.device_kind} has compute capability {capability}, mosaic_gpu needs 9.x"
    return None


@functools.cache
def _log_once(message: str) -> None:
    _log.info(message)
