"""Failure 17 of the README: the BF16 windows are honoured, and what they are worth can be measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import Framework, PackageCache
from parity_tests.models.tiny_model import write_tiny_model

TOKENS, CHUNK = 576, 64
WINDOWS = {"default": {}, "none": {"sink_tokens": 0, "recent_tokens": 64}}
# Tokens that attention reads as BF16 before the first INT2 page, and INT2 pages at TOKENS.
EXPECTED = {"default": (320, 4), "none": (64, 8)}


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[np.ndarray, int]]:
    """Hidden rows float32 [T, H] of a tiny model and INT2 pages of its cache, by windows; "dense" is BF16."""
    pytest.importorskip("jax")
    import jax
    import jax.numpy as jnp

    from oscar_jax.cache import allocate_dense_cache, allocate_layer_cache
    from oscar_jax.models.cached_attention import CachedAttention
    from oscar_jax.models.weights import load_model
    from oscar_jax.rotations.rotation import hadamard_rotation

    directory: Path = tmp_path_factory.mktemp("model")
    model, config, _ = load_model(write_tiny_model(directory, num_hidden_layers=1))
    rotation = hadamard_rotation(config.num_key_value_heads, config.head_dim)
    rotations = dict.fromkeys(range(config.num_layers), rotation)
    tokens = np.random.default_rng(0).integers(0, 256, TOKENS).astype(np.int32)

    @jax.jit
    def step(chunk: jax.Array, caches: list[Any], rotations: dict[int, Any]) -> tuple[jax.Array, list[Any]]:
        attention = CachedAttention(config, rotations, jnp.full(1, CHUNK, jnp.int32))
        positions = caches[0].lengths[:, None] + jnp.arange(CHUNK)
        return model.hidden_states(chunk, caches, positions=positions, attention=attention)

    def run(caches: list[Any], rotations: dict[int, Any]) -> tuple[np.ndarray, int]:
        parts = []
        for start in range(0, TOKENS, CHUNK):
            chunk = jnp.asarray(tokens[None, start : start + CHUNK])
            out, caches = step(chunk, caches, rotations)
            parts.append(np.asarray(out[0], np.float32))
        pages = getattr(caches[0], "history_pages", None)
        return np.concatenate(parts), 0 if pages is None else int(pages[0])

    layers = range(config.num_layers)
    dense = [allocate_dense_cache(config.cache_config(), 1, TOKENS) for _ in layers]
    result = {"dense": run(dense, {})}
    for name, windows in WINDOWS.items():
        caches = [allocate_layer_cache(config.cache_config(**windows), 1, TOKENS) for _ in layers]
        result[name] = run(caches, rotations)
    return result


@pytest.mark.parametrize("name", WINDOWS)
def test_model_reads_its_windows_in_bf16(hidden: dict[str, tuple[np.ndarray, int]], name: str) -> None:
    """Every position that sees windows alone equals the BF16 cache; the first one beyond does not."""
    exact, pages = EXPECTED[name]
    got, stored = hidden[name]
    dense = hidden["dense"][0]
    assert stored == pages
    error = np.abs(got - dense).max(axis=-1) / np.abs(dense).max()
    # A chunk reads the cache as it was before it: INT2 pages count from the chunk after the flush.
    assert error[: exact + CHUNK].max() <= 1e-5
    assert error[exact + CHUNK :].max() >= 1e-3


def test_ablation_on_a_model(hidden: dict[str, tuple[np.ndarray, int]]) -> None:
    """Without windows the error is larger: the ablation runs, and can tell."""
    dense = hidden["dense"][0][-128:]
    errors = {name: float(np.linalg.norm(hidden[name][0][-128:] - dense)) for name in WINDOWS}
    assert 0 < errors["default"] < errors["none"]


@pytest.mark.parametrize("name", WINDOWS)
def test_stored_windows_are_the_rows(framework: Framework, name: str) -> None:
    """Both packages keep sink and recent rows of the configured lengths bit by bit, and quantize the rest."""
    rng = np.random.default_rng(17)
    rotation = rows.make_rotation(rng, 1, 32)
    key, value = (rows.normal_rows(rng, (TOKENS, 1, 32)) for _ in range(2))
    cache = PackageCache(framework, rotation, 1, TOKENS, **WINDOWS[name])
    stored = cache.append(key[None], value[None], [TOKENS]).sequence(0)
    sink, pages = cache.config.sink_tokens, EXPECTED[name][1]
    assert len(stored.key_codes) == pages
    np.testing.assert_array_equal(stored.sink_key, key[:sink])
    np.testing.assert_array_equal(stored.recent_key, key[sink + 64 * pages :])
    wanted = oracle.store_sequence(key, value, rotation, sink, cache.config.recent_tokens).arrays()
    for field, array in stored.arrays().items():
        np.testing.assert_array_equal(array, wanted[field], err_msg=field)


def test_windows_below_one_page_are_refused(framework: Framework) -> None:
    """The page being filled is always BF16; recent_tokens = 0 and parts of pages are errors by name."""
    config = framework.module("core.config")
    for windows in ({"recent_tokens": 0}, {"recent_tokens": 100}, {"sink_tokens": 1}):
        with pytest.raises(config.ConfigError, match=next(iter(windows))):
            config.CacheConfig(1, 1, 32, **windows)
