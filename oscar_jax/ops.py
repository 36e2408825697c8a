"""Choice of implementation: "xla" (the reference, any device), "mosaic_gpu" (Hopper), None (best available).

A named choice never falls back: it runs, or raises NotImplementedError naming the shape or device it cannot
serve. `None` takes the Mosaic GPU kernel where it supports the shape, and the reference elsewhere.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from . import attention, quantize
from .core.errors import ConfigError
from .layer_cache import LayerCache

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


def quantize_pages(
    key_pages: jax.Array, value_pages: jax.Array, rotation: Any, *, implementation: str | None = None
) -> dict[str, jax.Array]:
    """Quantizes pages of keys and values [P, 64, K, D] into the INT2 arrays of the format, by name."""
    return _choose(
        implementation,
        lambda: _mosaic("quantize").quantize_page_pair,
        quantize.quantize_page_pair,
        key_pages,
        value_pages,
        rotation,
    )


def append_token(
    cache: LayerCache,
    rotation: Any,
    key: jax.Array,
    value: jax.Array,
    new_lengths: jax.Array,
    *,
    implementation: str | None = None,
) -> LayerCache | None:
    """Stores at most one row [B, 1, K, D] per sequence without waiting for the device, where a kernel can.

    Returns None where the choice of implementation means the reference.
    """
    kernel = lambda: _mosaic("append").append_token  # noqa: E731
    reference = lambda *_: None  # noqa: E731
    return _choose(implementation, kernel, reference, cache, rotation, key, value, new_lengths)


def decode_attention(
    query: jax.Array, cache: Any, rotation: Any, *, implementation: str | None = None, **options: Any
) -> jax.Array:
    """`attention.decode_attention` by the chosen implementation; [B, N, D] in the query's dtype."""
    kernel = None
    if isinstance(cache, LayerCache):
        kernel = lambda: functools.partial(  # noqa: E731
            _mosaic("decode").decode_attention, dtype=query.dtype
        )
    out = _choose(implementation, kernel, attention.decode_attention, query, cache, rotation, **options)
    return out.astype(query.dtype)


def chunk_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Any,
    rotation: Any,
    *,
    implementation: str | None = None,
    **options: Any,
) -> jax.Array:
    """`attention.chunk_attention` by the chosen implementation; [B, T, N, D] in the query's dtype."""
    kernel = None
    if isinstance(cache, LayerCache):
        kernel = lambda: _mosaic("prefill").chunk_attention  # noqa: E731
    reference = attention.chunk_attention
    out = _choose(implementation, kernel, reference, query, key, value, cache, rotation, **options)
    return out.astype(query.dtype)


def _mosaic(name: str) -> Any:
    """A kernel module, imported on first use: Mosaic GPU is not part of every JAX build."""
    import importlib

    return importlib.import_module(f".pallas.{name}.mosaic_gpu", __package__)


def _choose(
    implementation: str | None,
    kernel: Callable[[], Callable] | None,
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
    if implementation == "xla" or kernel is None:
        return reference(*args, **options)
    if implementation == "mosaic_gpu":
        return kernel()(*args, **options)
    if _hopper():
        try:
            return kernel()(*args, **options)
        except NotImplementedError:
            pass
    return reference(*args, **options)


@functools.cache
def _hopper() -> bool:
    """Whether the default device is a GPU that Mosaic GPU kernels run on (compute capability 9 or newer)."""
    device = jax.devices()[0]
    return device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 9.0
