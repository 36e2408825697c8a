"""What the cache path keeps out: settings of the process that change arithmetic, and impossible gradients.

A page is defined in integers and attention in float32. 64-bit types, other promotion rules and the like must
therefore end at the public functions, which are marked `exact_arithmetic`.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from .core.errors import GradientError

_NARROW = {"int64": jnp.int32, "uint64": jnp.uint32, "float64": jnp.float32}


def exact_arithmetic[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function in plain float32 and int32, whatever the process has switched on."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        config = jax.config
        x64 = config.jax_enable_x64
        if not x64 and config.jax_numpy_rank_promotion == "allow" and _standard_promotion():
            return function(*args, **options)
        if x64:
            args, options = jax.tree.map(_narrow, (args, options))
        with _plain_settings():
            return function(*args, **options)

    return wrapped


def compiled_quickly[**P, R](**settings: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`jax.jit` with these settings, for programs that run for seconds.

    On a GPU the compiler would try many kernels for every shape of a product, which can take longer than a
    whole evaluation; here it takes the vendor's choice.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.cache
        def compiled() -> Callable[P, R]:  # at the first call: asking for the backend starts it
            gpu = jax.default_backend() == "gpu"
            options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if gpu else None
            return jax.jit(function, compiler_options=options, **settings)

        @functools.wraps(function)
        def wrapped(*args: P.args, **options: P.kwargs) -> R:
            return compiled()(*args, **options)

        return wrapped

    return decorate


def default_chunk() -> int:
    """Tokens per forward pass: enough for large matrix products, 512 on a CPU and 2048 elsewhere."""
    return 512 if jax.default_backend() == "cpu" else 2048


def compiled_once[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled once per shape where it is called on arrays; inside a trace as it is.

    Numbers, names and None are part of what is compiled; everything else is an array or a tree of arrays.
    """
    signature = inspect.signature(function)

    @functools.partial(jax.jit, static_argnames="settings")
    def run(arrays: dict[str, Any], settings: tuple[tuple[str, Any], ...]) -> Any:
        return function(**arrays, **dict(settings))  # type: ignore[call-arg]

    @functools.wraps(function)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        if traced((args, options)):
            return function(*args, **options)
        named = signature.bind(*args, **options).arguments
        settings = {name: x for name, x in named.items() if isinstance(x, int | float | str | None)}
        arrays = {name: x for name, x in named.items() if name not in settings}
        return run(arrays, settings=tuple(settings.items()))

    return wrapped


def traced(arrays: Any) -> bool:
    """Whether any leaf of a tree has no value yet, as under jit."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays))


def zeros_of(kind: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape, a dtype, and whatever sharding and varying axes the type names."""
    zeros = jnp.zeros(kind.shape, kind.dtype, device=kind.sharding)
    axes: Any = getattr(kind, "manual_axis_type", None)
    varying = tuple(axes.varying if axes is not None else getattr(kind, "vma", None) or ())
    return jax.lax.pcast(zeros, varying, to="varying") if varying else zeros


def refuse_gradients(function: str, arrays: Any) -> Any:
    """The arrays; raises GradientError, naming the function, where a gradient through them is asked for."""
    return _undifferentiable(function, arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _undifferentiable(function: str, arrays: Any) -> Any:
    return arrays


@_undifferentiable.defjvp
def _raise(function: str, primals: Any, tangents: Any) -> Any:
    raise GradientError(
        f"{function} cannot be differentiated: 2-bit pages have no gradient; "
        "allowed: a DenseCache, or jax.lax.stop_gradient on what goes in"
    )


def _narrow(leaf: Any) -> Any:
    """64-bit arrays as their 32-bit twins; the format knows no other."""
    if isinstance(leaf, jax.Array) and leaf.dtype.name in _NARROW:
        return leaf.astype(_NARROW[leaf.dtype.name])
    return leaf


def _standard_promotion() -> bool:
    return str(jax.config.jax_numpy_dtype_promotion) in ("standard", "NumpyDtypePromotion.STANDARD")


@contextlib.contextmanager
def _plain_settings() -> Iterator[None]:
    with (
        jax.enable_x64(False),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
    ):
        yield
