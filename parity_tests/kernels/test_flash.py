"""Chunks through flash attention over dequantized blocks, against the reference, in both packages.

Here every step but the vendor's kernel runs: JAX with the steps of cuDNN's kernel written in float32, Torch
with its Triton kernels interpreted. On a GPU the vendor's kernels run too, with bfloat16 queries.
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest

from parity_tests.conformance.frameworks import FRAMEWORKS, PackageCache
from parity_tests.conformance.rows import make_rotation
from parity_tests.kernels import triton_interpreter

SHAPES = [
    ((600, 0, 64), 9, 2, 64, {"sinks": True}),  # several blocks, an empty sequence, no history
    ((300, 130), 7, 3, 128, {"sink_tokens": 0, "recent_tokens": 64}),
]
EXACT = 1e-5  # float32 sums in another order
HALF = 4e-3  # float16 queries, keys, values and weights: 11 bits; bfloat16 has 8
BFLOAT16 = 2e-2
TORCH_BFLOAT16 = 3e-2  # the worst row of thousands: .026 on an H200; of each part, all rows together, .002


def rotation(heads: int, head_dim: int) -> dict[str, np.ndarray]:
    return make_rotation(np.random.default_rng(3), heads, head_dim, "channel_balanced")


def jax_error(
    fields: Mapping[str, np.ndarray],
    lengths: tuple[int, ...],
    tokens: int,
    group: int,
    backend: str,
    **options: Any,
) -> float:
    """The largest relative error of a query of a chunk; blocks of two pages on the CPU."""
    import jax
    import jax.numpy as jnp

    from oscar_jax import attention
    from oscar_jax.pallas.prefill import flash

    device = "cpu" if backend == "xla" else "gpu"
    heads, head_dim = len(fields["key_transform"]), fields["key_transform"].shape[-1]
    rng = np.random.default_rng(5)
    sinks = options.pop("sinks", False)
    framework = FRAMEWORKS["jax"]
    cache = PackageCache(
        framework, fields, len(lengths), max(lengths) + tokens, device, query_heads=heads * group, **options
    )
    stored = [
        (rng.normal(0, 1, (len(lengths), max(lengths), heads, head_dim)) + 3)
        .astype("bfloat16")
        .view(np.uint16)
        for _ in range(2)
    ]
    cache.append(stored[0], stored[1], lengths)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jnp.asarray(rng.normal(0, 1, shape), dtype)

    batch = len(lengths)
    query = normal(batch, tokens, heads * group, head_dim)
    new_lengths = jnp.arange(tokens, tokens - batch, -1, dtype=jnp.int32)
    live = np.arange(tokens) < np.asarray(new_lengths)[:, None]
    key, value = (
        jnp.where(live[..., None, None], normal(batch, tokens, heads, head_dim), jnp.nan) for _ in range(2)
    )
    arguments = {
        "new_lengths": new_lengths,
        "softmax_scale": head_dim**-0.5,
        "sink_logits": normal(heads * group, dtype=jnp.float32) if sinks else None,
    }
    wanted = attention.chunk_attention(query, key, value, cache.cache, cache.rotation, **arguments)
    block = 128 if backend == "xla" else flash.BLOCK_TOKENS
    with mock.patch.multiple(flash, BLOCK_TOKENS=block, MIN_TOKENS=1):
        run = jax.jit(lambda *x: flash.chunk_attention(*x, backend=backend, **arguments))
        got = run(query, key, value, cache.cache, cache.rotation)
    got, wanted = np.asarray(got)[live], np.asarray(wanted)[live]
    return float((np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())


def torch_error(
    fields: Mapping[str, np.ndarray],
    lengths: tuple[int, ...],
    tokens: int,
    group: int,
    device: str = "cpu",
    dtype: str = "float16",
    block: int = 256,
    step: int = 2,
    **settings: Any,
) -> float:
    """The same for Torch, wherever Triton runs: interpreted in the child, compiled on a GPU."""
    import torch

    from oscar_torch import attention
    from oscar_torch.triton_kernels.prefill import flash

    sinks = settings.pop("sinks", False)
    cache, layer_rotation, rng = triton_interpreter.make_case(
        fields, lengths, max(lengths) + tokens, group, device, **settings
    )
    place = cache.cache.lengths.device
    heads, head_dim = len(fields["key_transform"]), fields["key_transform"].shape[-1]
    batch = len(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(place)

    query = normal(batch, tokens, heads * group, head_dim).to(getattr(torch, dtype))
    key, value = (normal(batch, tokens, heads, head_dim).bfloat16() for _ in range(2))
    new_lengths = torch.arange(tokens, tokens - batch, -1, dtype=torch.int32, device=place)
    live = torch.arange(tokens, device=place) < new_lengths[:, None]
    key[~live], value[~live] = torch.nan, torch.nan
    options = {
        "new_lengths": new_lengths,
        "softmax_scale": head_dim**-0.5,
        "sink_logits": normal(heads * group) if sinks else None,
    }
    wanted = attention.chunk_attention(query.float(), key, value, cache.cache, layer_rotation, **options)[
        live
    ]
    with mock.patch.multiple(flash, BLOCK_TOKENS=block, SIZE_STEP=step, MIN_TOKENS=4):
        got = flash.chunk_attention(query, key, value, cache.cache, layer_rotation, **options)[live]
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize(("lengths", "tokens", "group", "head_dim", "options"), SHAPES)
class TestChunks:
    def test_jax(self, lengths, tokens, group, head_dim, options) -> None:
        assert jax_error(rotation(1, head_dim), lengths, tokens, group, "xla", **options) <= EXACT

    def test_torch_interpreted(self, lengths, tokens, group, head_dim, options) -> None:
        reason = triton_interpreter.why_not()
        if reason:
            pytest.skip(reason)
        error = triton_interpreter.interpret(
            torch_error, rotation(1, head_dim), lengths, tokens, group, **options
        )
        assert error <= HALF

    @pytest.mark.hopper
    def test_jax_on_device(self, lengths, tokens, group, head_dim, options) -> None:
        assert jax_error(rotation(2, head_dim), lengths, tokens, group, "cudnn", **options) <= BFLOAT16

    @pytest.mark.gpu
    def test_torch_on_device(self, lengths, tokens, group, head_dim, options) -> None:
        error = torch_error(rotation(2, head_dim), lengths, tokens, group, "gpu", "bfloat16", **options)
        assert error <= TORCH_BFLOAT16, f"{error:.1e}"


@pytest.mark.hopper
def test_long_history_on_device() -> None:
    """A chunk of 600 over 40000 tokens, three blocks, per-head rotations."""
    assert jax_error(rotation(2, 128), (40_000,), 600, 4, "cudnn") <= BFLOAT16
    assert torch_error(rotation(2, 128), (40_000,), 600, 4, "gpu", "bfloat16", 16_384, 32) <= TORCH_BFLOAT16


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_long_chunk_on_device(head_dim: int) -> None:
    """1500 queries over 9000 tokens and over none, with the sizes that a prompt meets."""
    from oscar_torch.triton_kernels.prefill import flash

    sizes = {"block": flash.BLOCK_TOKENS, "step": flash.SIZE_STEP}
    error = torch_error(rotation(2, head_dim), (9000, 0), 1500, 4, "gpu", "bfloat16", **sizes)
    assert error <= TORCH_BFLOAT16, f"{error:.1e}"
