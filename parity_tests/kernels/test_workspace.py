"""What attention kernels allocate beside the cache: bounded for prefill, no dequantized history for decode.

Failures 13 and 18 of the README. The references, "xla" and "eager", read in blocks of pages: what they
allocate depends on the chunk, the block and the heads, so that every device keeps the promise.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import rows
from parity_tests.kernels import triton_interpreter

HEADS, GROUP, HEAD_DIM = 2, 4, 128
TOKENS = 256  # of a chunk
HISTORIES = (8192, 32768, 98304)  # tokens


# --- JAX: every array that the traced functions make -------------------------------------------------


def intermediate_bytes(function: Callable[..., Any], *arguments: Any) -> list[int]:
    """Bytes of every array that `function` makes, from its trace; kernels count with their outputs."""
    jax = pytest.importorskip("jax")

    def equations(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            values = [*equation.params.values(), *equation.params.get("branches", ())]
            inner = [value for value in values if hasattr(value, "jaxpr")]
            if equation.primitive.name in ("jit", "pjit", "closed_call", "custom_jvp_call"):
                for value in inner:
                    yield from equations(value.jaxpr)
            else:
                yield equation
                if equation.primitive.name in ("scan", "while", "cond"):
                    for value in inner:
                        yield from equations(value.jaxpr)

    made = equations(jax.make_jaxpr(function)(*arguments).jaxpr)
    return [out.aval.size * out.aval.dtype.itemsize for one in made for out in one.outvars]


def jax_case(history: int, group: int = GROUP) -> tuple[Any, ...]:
    """Shapes of query [1, T, N, D], rows [1, T, K, D], cache with `history` INT2 tokens, rotation, counts."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax.experimental.mosaic.gpu")
    import jax.numpy as jnp

    from oscar_jax.cache import allocate_layer_cache
    from oscar_jax.core.config import CacheConfig
    from oscar_jax.rotations.rotation import hadamard_rotation

    config = CacheConfig(HEADS, HEADS * group, HEAD_DIM)
    length = config.sink_tokens + config.recent_tokens + history
    cache = jax.eval_shape(lambda: allocate_layer_cache(config, 1, length))
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(HEADS, HEAD_DIM)))
    query = jax.ShapeDtypeStruct((1, TOKENS, HEADS * group, HEAD_DIM), jnp.bfloat16)
    chunk = jax.ShapeDtypeStruct((1, TOKENS, HEADS, HEAD_DIM), jnp.bfloat16)
    return query, chunk, cache, rotation, jax.ShapeDtypeStruct((1,), jnp.int32)


def mosaic_chunk(query: Any, chunk: Any, cache: Any, rotation: Any, counts: Any) -> Any:
    from oscar_jax.pallas.prefill.mosaic_gpu import chunk_attention

    return chunk_attention(query, chunk, chunk, cache, rotation, new_lengths=counts, softmax_scale=0.1)


def mosaic_decode(query: Any, chunk: Any, cache: Any, rotation: Any, counts: Any) -> Any:
    from oscar_jax.pallas.decode.mosaic_gpu import decode_attention

    return decode_attention(query[:, 0], cache, rotation, softmax_scale=0.1)


def test_mosaic_prefill_is_bounded() -> None:
    """13: the arrays of a chunk are the same, to the byte, whatever the history."""
    sizes = [intermediate_bytes(mosaic_chunk, *jax_case(history)) for history in HISTORIES]
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize("history", HISTORIES)
def test_mosaic_decode_makes_no_history(history: int) -> None:
    """18: all arrays of a decode step together are smaller than a tenth of the dequantized keys in BF16."""
    sizes = intermediate_bytes(mosaic_decode, *jax_case(history))
    assert sum(sizes) < history * HEADS * HEAD_DIM * 2 / 10


def xla_chunk(query: Any, chunk: Any, cache: Any, rotation: Any, counts: Any) -> Any:
    from oscar_jax.attention import chunk_attention

    return chunk_attention(query, chunk, chunk, cache, rotation, new_lengths=counts, softmax_scale=0.1)


def xla_decode(query: Any, chunk: Any, cache: Any, rotation: Any, counts: Any) -> Any:
    from oscar_jax.attention import decode_attention

    return decode_attention(query[:, 0], cache, rotation, softmax_scale=0.1)


@pytest.mark.parametrize("reference", [xla_chunk, xla_decode])
def test_the_reference_is_bounded(reference: Callable[..., Any]) -> None:
    """13, 18: the largest array is the same whatever the history, and smaller than what would unpack it."""
    sizes = [intermediate_bytes(reference, *jax_case(history)) for history in HISTORIES]
    assert max(sizes[0]) == max(sizes[1]) == max(sizes[2])
    tokens = TOKENS if reference is xla_chunk else 1
    assert max(sizes[0]) <= 512 * 4 * HEADS * max(tokens * GROUP, HEAD_DIM)
    # Beside them only one number per block of eight pages.
    assert sum(sizes[2]) - sum(sizes[0]) <= (HISTORIES[2] - HISTORIES[0]) // 512 * 8


def test_the_reference_is_bounded_when_compiled() -> None:
    """What XLA plans for a chunk, copies of the cache included."""
    jax = pytest.importorskip("jax")
    planned = [
        jax.jit(xla_chunk).lower(*jax_case(history)).compile().memory_analysis().temp_size_in_bytes
        for history in HISTORIES[:2]
    ]
    assert planned[1] <= planned[0] * 1.01, planned


# --- Torch: every tensor that the launchers allocate, kernels interpreted ------------------------------


def torch_allocations(kernel: str, length: int, tokens: int) -> tuple[list[int], int]:
    """In the interpreting child: bytes of every tensor made by one call, and tokens of INT2 history."""
    import importlib

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    fields = rows.make_rotation(np.random.default_rng(0), 1, 64)
    cache, rotation, _ = triton_interpreter.make_case(fields, (length,), length + tokens, 2)
    made: list[int] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                    made.append(tensor.nbytes)
            return out

    query, key = torch.zeros(1, max(1, tokens), 2, 64), torch.zeros(1, max(1, tokens), 1, 64)
    counts = torch.tensor([tokens], dtype=torch.int32)
    module = importlib.import_module(f"oscar_torch.{kernel}")
    with Recorder():
        if tokens:
            module.chunk_attention(
                query, key, key, cache.cache, rotation, new_lengths=counts, softmax_scale=0.1
            )
        else:
            module.decode_attention(query[:, 0], cache.cache, rotation, softmax_scale=0.1)
    return made, 64 * int(cache.cache.history_pages[0])


def interpreted(kernel: str, length: int, tokens: int) -> tuple[list[int], int]:
    reason = triton_interpreter.why_not()
    if reason:
        pytest.skip(reason)
    return triton_interpreter.interpret(torch_allocations, kernel, length, tokens)


def test_triton_prefill_is_bounded() -> None:
    """13: a chunk allocates its output and copies of its own rows; four times the history changes nothing."""
    (short, _), (long, history) = (
        interpreted("triton_kernels.prefill.triton", length, 5) for length in (450, 900)
    )
    assert history >= 500 and sorted(short) == sorted(long)
    assert 0 < sum(long) < history * 64


def test_triton_decode_makes_no_history() -> None:
    """18: what a decode step allocates grows by bytes per page, not by rows."""
    (short, before), (long, after) = (
        interpreted("triton_kernels.decode.triton", length, 0) for length in (500, 1500)
    )
    assert max(long) < (after - before) * 64  # bytes: a quarter of the dequantized float32 keys
    assert sum(long) - sum(short) < (after - before) * 64 / 4


@pytest.mark.parametrize("tokens", [0, 5])
def test_the_eager_reference_is_bounded(tokens: int) -> None:
    """13, 18: the largest tensor is the same whatever the history, and smaller than what would unpack it."""
    (short, _), (long, history) = (interpreted("attention", length, tokens) for length in (1500, 3000))
    assert max(short) == max(long) < history * 64 * 4


# --- on a GPU: what the device allocates ---------------------------------------------------------------


@pytest.mark.hopper
def test_mosaic_prefill_on_device() -> None:
    """13: temporary memory of the compiled prefill, as the compiler plans it."""
    jax = pytest.importorskip("jax")
    planned = [
        jax.jit(mosaic_chunk).lower(*jax_case(history)).compile().memory_analysis().temp_size_in_bytes
        for history in HISTORIES[:2]
    ]
    assert planned[1] <= planned[0] * 1.01, planned


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_triton_peak_on_device(tokens: int) -> None:
    """13 and 18: peak memory above the cache at 8K and at 32K tokens."""
    torch = pytest.importorskip("torch")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.skip("TRITON_INTERPRET is set for this process")
    from oscar_torch import ops

    peaks = []
    for history in HISTORIES[:2]:
        fields = rows.make_rotation(np.random.default_rng(0), HEADS, HEAD_DIM)
        length = 320 + history
        cache, rotation, _ = triton_interpreter.make_case(fields, (length,), length + TOKENS, GROUP, "gpu")
        query = torch.randn(1, max(1, tokens), HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        key = torch.randn(1, max(1, tokens), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        options: dict[str, Any] = {"softmax_scale": 0.1, "implementation": "triton"}
        counts = torch.tensor([tokens], dtype=torch.int32, device="cuda")

        def call(query=query, key=key, cache=cache, rotation=rotation, counts=counts, options=options) -> Any:
            if tokens:
                rest = {"new_lengths": counts, **options}
                return ops.chunk_attention(query, key, key, cache.cache, rotation, **rest)
            return ops.decode_attention(query[:, 0], cache.cache, rotation, **options)

        call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    if tokens:
        assert peaks[1] <= peaks[0] * 1.01, peaks
    else:
        # Partial results grow with the splits until these fill the device; a tenth of the history's keys and
        # values in BF16 is far more than they need and far less than a restored history.
        assert peaks[1] < 2 * HISTORIES[1] * HEADS * HEAD_DIM * 2 / 10, peaks
