"""Settings of the process change nothing: every public function gives the same bytes and the same float32."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework

HEADS, GROUP, HEAD_DIM, TOKENS = 2, 2, 32, 460
SCALE = HEAD_DIM**-0.5


@contextlib.contextmanager
def torch_precision(precision: str) -> Iterator[None]:
    """What float32 products may be rounded to: TF32 on a GPU, BF16 on a CPU that has it."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def torch_switch(set_: Callable[[Any], None], on: Any, off: Any) -> Iterator[None]:
    set_(on)
    try:
        yield
    finally:
        set_(off)


def torch_mode(name: str) -> contextlib.AbstractContextManager[Any]:
    import torch

    return {
        "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
        "products in tf32": lambda: torch_precision("high"),
        "products in bfloat16": lambda: torch_precision("medium"),
        "default float64": lambda: torch_switch(torch.set_default_dtype, torch.float64, torch.float32),
        "default bfloat16": lambda: torch_switch(torch.set_default_dtype, torch.bfloat16, torch.float32),
        "inference": torch.inference_mode,
        "deterministic": lambda: torch_switch(torch.use_deterministic_algorithms, True, False),
    }[name]()


def jax_mode(name: str) -> contextlib.AbstractContextManager[Any]:
    import jax

    return {
        "x64": lambda: jax.enable_x64(True),
        "products in bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
        "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
        "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    }[name]()


MODES = {
    "torch": (
        "autocast to bfloat16",
        "autocast to float16",
        "products in tf32",
        "products in bfloat16",
        "default float64",
        "default bfloat16",
        "inference",
        "deterministic",
    ),
    "jax": ("x64", "products in bfloat16", "no rank promotion", "strict promotion"),
}


def results(framework: Framework, dense: bool) -> dict[str, Any]:
    """Every public function of the cache path on fixed inputs."""
    generator = np.random.default_rng(0)

    def bits(*shape: int) -> Any:
        return framework.bfloat16(oracle.to_bfloat16(generator.normal(0, 1, shape)), "cpu")

    def counts(*values: int) -> Any:  # int64 where the mode has it: what a user's arange gives
        return framework.array(np.array(values), "cpu")

    quantize, packing, cache_module = (framework.module(name) for name in ("quantize", "packing", "cache"))
    attention, config = framework.module("attention"), framework.module("core.config")
    rotation = framework.layer_rotation(
        rows.make_rotation(generator, HEADS, HEAD_DIM, "channel_balanced"), "cpu"
    )
    pages = [bits(3, 64, HEADS, HEAD_DIM) for _ in range(2)]
    floats = framework.array(generator.normal(0, 1, (4, HEAD_DIM)).astype(np.float32), "cpu")
    found: dict[str, Any] = {"rounded": quantize.round_to_bfloat16(floats)}
    found["mean"] = quantize.page_key_mean(pages[0])
    found["codes"], found["scale"] = quantize.quantize_rows(
        pages[1], rotation.value_transform, rotation.value_multiplier, rotation.value_mean
    )
    stored = quantize.quantize_page_pair(*pages, rotation)
    found |= stored
    key_codes = packing.unpack_key_codes(stored["key_codes"])
    value_codes = packing.unpack_value_codes(stored["value_codes"])
    found["key words"], found["value words"] = (
        packing.pack_key_codes(key_codes),
        packing.pack_value_codes(value_codes),
    )
    found["keys"] = quantize.dequantize_key_pages(
        stored["key_codes"], stored["key_scale"], stored["key_page_mean"], rotation.query_transform
    )
    found["values"] = quantize.dequantize_value_pages(
        stored["value_codes"], stored["value_scale"], rotation.value_mean, rotation.output_transform
    )

    geometry = config.CacheConfig(HEADS, HEADS * GROUP, HEAD_DIM)
    allocate = cache_module.allocate_dense_cache if dense else cache_module.allocate_layer_cache
    cache = allocate(geometry, 2, 600)
    key, value = (bits(2, TOKENS, HEADS, HEAD_DIM) for _ in range(2))
    query = framework.array(generator.normal(0, 1, (2, 5, HEADS * GROUP, HEAD_DIM)).astype(np.float32), "cpu")
    cache = cache_module.append_rows(cache, rotation, key, value, counts(TOKENS, 70))
    options: dict[str, Any] = {"softmax_scale": SCALE}
    found["chunk"] = attention.chunk_attention(
        query, key[:, :5], value[:, :5], cache, rotation, new_lengths=counts(5, 3), **options
    )
    for tokens in (5, 1):
        new = (query[:, :tokens], key[:, :tokens], value[:, :tokens])
        found[f"attend {tokens}"], cache = cache_module.attend(
            *new, cache, rotation, new_lengths=counts(tokens, 1), **options
        )
    found["decode"] = attention.decode_attention(query[:, 0], cache, rotation, **options)
    if not dense:
        found["read key"], found["read value"] = cache_module.read_layer_cache(cache, rotation, 0)
        found["positions"] = attention.window_positions(cache)
    found |= {name: x for name, x in vars(cache).items() if hasattr(x, "dtype")}
    found["bytes"] = np.array(list(cache_module.live_bytes(cache).values()))
    found["overflowed"] = cache_module.overflowed(cache)
    return {name: x if isinstance(x, np.ndarray) else framework.numpy(x) for name, x in found.items()}


PLAIN: dict[tuple[str, bool], dict[str, Any]] = {}


@pytest.mark.parametrize("dense", [False, True], ids=["int2", "dense"])
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in MODES.items() for mode in modes])
def test_modes_change_nothing(name: str, mode: str, dense: bool) -> None:
    """Same dtypes and same bits as without the mode, of every public function (50)."""
    framework = FRAMEWORKS[name]
    if not framework.installed():
        pytest.skip(f"{name} is not installed")
    if (name, dense) not in PLAIN:
        PLAIN[name, dense] = results(framework, dense)
    with torch_mode(mode) if name == "torch" else jax_mode(mode):
        got = results(framework, dense)
    for field, want in PLAIN[name, dense].items():
        assert got[field].dtype == want.dtype, field
        assert got[field].tobytes() == want.tobytes(), field


def test_a_cache_made_in_inference_mode_is_used_outside() -> None:
    torch = pytest.importorskip("torch")
    from oscar_torch.cache import allocate_layer_cache, append_rows
    from oscar_torch.core.config import CacheConfig
    from oscar_torch.rotations.rotation import identity_rotation

    row = torch.ones(1, 1, 1, 16, dtype=torch.bfloat16)
    with torch.inference_mode():
        cache = allocate_layer_cache(CacheConfig(1, 1, 16), 1, 100)
    for _ in range(2):
        append_rows(cache, identity_rotation(1, 16), row, row, torch.ones(1, dtype=torch.int32))
    assert cache.lengths.tolist() == [2]
