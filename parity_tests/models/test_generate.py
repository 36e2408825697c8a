"""Decoding through caches: equal to the uncached model and to the reference on the same pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.cache import live_bytes, read_layer_cache
from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.core.rotation_header import RotationHeader
from oscar_jax.core.window_policy import EVERY_LAYER_INT2
from oscar_jax.generate import (
    DECODE_BLOCK,
    Generation,
    Generator,
    SamplingConfig,
    TextStream,
    generate,
    sample,
    select_rotations,
)
from oscar_jax.layer_cache import DenseCache, LayerCache
from oscar_jax.models.cached_attention import CachedAttention, allocate_model_cache, int2_layers
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.hf_config import config_from_hf
from oscar_jax.rotations.rotation import RotationSet, hadamard_rotation

VOCABULARY = 80
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
CONFIGS = {
    "qwen3": config_from_hf({**SHAPE, "model_type": "qwen3", "num_hidden_layers": 2}, model_id="tiny"),
    # a windowed layer, kept in a BF16 ring, and a global one; the window is shorter than a page
    "gemma3": config_from_hf(
        {
            **SHAPE,
            "model_type": "gemma3_text",
            "num_hidden_layers": 2,
            "sliding_window": 40,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 16,
        },
        model_id="tiny",
    ),
}
GREEDY = SamplingConfig()


@functools.cache
def tiny_model(family: str) -> tuple[Decoder, ModelConfig]:
    """A random model whose embedding is large enough for logits that differ clearly."""
    config = CONFIGS[family]
    model = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(7))
    graph, state = nnx.split(model)
    noise = np.random.default_rng(8)
    state = jax.tree.map(
        lambda leaf: jnp.asarray(
            1 + 0.2 * noise.standard_normal(leaf.shape) if leaf.ndim == 1 else 1.5 * np.asarray(leaf),
            jnp.float32,
        ),
        state,
    )
    return nnx.merge(graph, state), config


def tokens_of(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length)


def rotations_of(config: ModelConfig) -> dict[int, Any]:
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(config.num_key_value_heads, config.head_dim))
    return {layer: rotation for layer in int2_layers(config)}


@functools.cache
def cached_step(family: str) -> Any:
    """Compiled: new tokens through the caches -> logits float32 [B, T, V] and the caches."""
    model, config = tiny_model(family)

    @jax.jit
    def step(tokens: jax.Array, caches: list[Any], new_lengths: jax.Array) -> Any:
        attention = CachedAttention(config, rotations_of(config), new_lengths)
        positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        return model(tokens, caches, positions=positions, attention=attention)

    return step


def run_cached(
    family: str, tokens: np.ndarray, caches: list[Any], chunk: int, prompt: int
) -> tuple[np.ndarray, list[Any]]:
    """Logits [L, V] of one sequence: `prompt` tokens in chunks, the rest one by one."""
    step, rows = cached_step(family), []
    starts = [*range(0, prompt, chunk), *range(prompt, len(tokens))]
    for start in starts:
        width = chunk if start < prompt else 1
        real = min(width, prompt - start) if start < prompt else 1
        padded = np.zeros((1, width), np.int32)
        padded[0, :real] = tokens[start : start + real]
        logits, caches = step(jnp.asarray(padded), caches, jnp.array([real], jnp.int32))
        rows.append(np.asarray(logits)[0, :real])
    return np.concatenate(rows), caches


@functools.cache
def uncached_logits(family: str, length: int) -> np.ndarray:
    model, _ = tiny_model(family)
    return np.asarray(nnx.jit(lambda m, t: m(t)[0])(model, jnp.asarray(tokens_of(length)[None])))[0]


def relative_error(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.dtype == theirs.dtype == np.float32
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize(("family", "chunk"), [("qwen3", 64), ("qwen3", 128), ("gemma3", 64)])
def test_cached_decoding_equals_the_uncached_model(family: str, chunk: int) -> None:
    """A float32 cache holds the rows exactly, so only the order of sums differs; 141 fills no chunk."""
    tokens = tokens_of(150)
    _, config = tiny_model(family)
    caches = allocate_model_cache(config, 1, 192, kind="bf16", dtype=jnp.float32)
    ours, caches = run_cached(family, tokens, caches, chunk, prompt=141)
    assert relative_error(ours, uncached_logits(family, 150)) <= 1e-5
    assert [int(cache.lengths[0]) for cache in caches] == [150] * config.num_layers


@pytest.mark.parametrize("family", list(CONFIGS))
@pytest.mark.parametrize("kind", ["bf16", "int2"])
def test_below_the_windows_both_caches_are_bf16_rows(family: str, kind: str) -> None:
    """Rows rounded to bf16 (8 bits) move logits by a percent or so; below sink + recent no page is INT2."""
    tokens = tokens_of(150)
    _, config = tiny_model(family)
    ours, caches = run_cached(family, tokens, allocate_model_cache(config, 1, 512, kind=kind), 64, prompt=141)
    error = relative_error(ours, uncached_logits(family, 150))
    assert 1e-5 < error <= 2e-2
    bf16, _ = run_cached(family, tokens, allocate_model_cache(config, 1, 512, kind="bf16"), 64, prompt=141)
    assert relative_error(ours, bf16) <= 1e-5
    assert sum(live_bytes(cache)["int2_pages"] for cache in caches) == 0


class Recording:
    """Wraps CachedAttention and keeps, per layer, the query, the output and the cache after the call."""

    def __init__(self, inner: CachedAttention) -> None:
        self.inner = inner
        self.records: dict[int, tuple[jax.Array, jax.Array, Any]] = {}

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        out, state = self.inner(layer, query, key, value, state)
        self.records[layer] = (query, out, state)
        return out, state


def test_int2_decoding_is_exact_attention_over_the_restored_pages() -> None:
    """The rows that the pages stand for, restored one by one, under a plain float64 softmax."""
    family = "qwen3"
    model, config = tiny_model(family)
    tokens = tokens_of(500)
    caches = allocate_model_cache(config, 1, 512)
    _, caches = run_cached(family, tokens, caches, 64, prompt=500)

    @nnx.jit
    def record(model: Decoder, caches: list[Any]) -> dict[int, Any]:
        attention = Recording(CachedAttention(config, rotations_of(config), jnp.array([1], jnp.int32)))
        model.hidden_states(jnp.array([[3]]), caches, positions=jnp.array([[500]]), attention=attention)
        return attention.records

    records = record(model, caches)
    paged = int2_layers(config)
    assert paged
    for layer in paged:
        query, out, cache = records[layer]
        assert isinstance(cache, LayerCache) and int(cache.history_pages[0]) == 2
        key, value = (
            np.asarray(rows, np.float64) for rows in read_layer_cache(cache, rotations_of(config)[layer], 0)
        )
        assert len(key) == 501
        group = config.num_query_heads // config.num_key_value_heads
        scores = np.einsum("nd,snd->ns", np.asarray(query, np.float64)[0, 0], key.repeat(group, axis=1))
        scores *= config.attention_scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("ns,snd->nd", weights, value.repeat(group, axis=1))
        np.testing.assert_allclose(np.asarray(out)[0, 0], expected, atol=2e-5 * np.abs(value).max())


@pytest.mark.parametrize("family", list(CONFIGS))
def test_two_bits_stay_near_the_exact_model(family: str) -> None:
    """A sanity bound for a random model at 500 tokens: INT2 moves logits more than bf16, but not far."""
    tokens = tokens_of(500)
    _, config = tiny_model(family)
    ours, caches = run_cached(family, tokens, allocate_model_cache(config, 1, 512), 64, prompt=490)
    exact = uncached_logits(family, 500)
    error = np.linalg.norm(ours - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert error[:320].max() < 0.03
    assert 0.005 < error[400:].mean() < 0.35
    assert sum(live_bytes(cache)["int2_pages"] for cache in caches) == 2 * len(int2_layers(config))


def test_prefill_in_other_chunks_stores_the_same_first_layer() -> None:
    """Layer 0 rows depend on their token alone; only a rounding tie may move a code."""
    tokens = tokens_of(500)
    _, config = tiny_model("qwen3")
    stored = []
    for chunk in (64, 256):
        caches = allocate_model_cache(config, 1, 512)
        _, caches = run_cached("qwen3", tokens, caches, chunk, prompt=500)
        stored.append(read_layer_cache(caches[0], rotations_of(config)[0], 0))
    for one, other in zip(*stored):
        equal = np.asarray(one) == np.asarray(other)
        assert equal.mean() > 0.999


# --- the generator ---

RAGGED = (1, 7, 64, 65, 320, 321, 450)


@functools.cache
def generator(family: str, cache: str = "int2", **options: Any) -> Generator:
    model, config = tiny_model(family)
    rotations = rotations_of(config) if cache == "int2" else None
    return Generator(model, config, cache=cache, rotations=rotations, eos_token_ids=(), chunk=128, **options)


@functools.cache
def ragged_run(family: str) -> tuple[Generation, list[tuple[int, int]]]:
    streamed: list[tuple[int, int]] = []
    prompts = [tokens_of(length).tolist() for length in RAGGED]
    return generator(family)(prompts, 12, lambda *event: streamed.append(event)), streamed


@pytest.mark.parametrize(("family", "index"), [("gemma3", 3), ("gemma3", 6)])
def test_ragged_batch_equals_each_prompt_alone(family: str, index: int) -> None:
    together, _ = ragged_run(family)
    alone = generator(family)([tokens_of(RAGGED[index]).tolist()], 12, capacity=512)
    assert alone.tokens[0] == together.tokens[index]
    for one, many in zip(alone.caches, together.caches):
        # the last new token was never fed back
        assert int(one.lengths[0]) == int(many.lengths[index]) == RAGGED[index] + 11
        if isinstance(one, LayerCache):
            assert int(one.history_pages[0]) == int(many.history_pages[index])
            rotation = rotations_of(CONFIGS[family])[int2_layers(CONFIGS[family])[0]]
            for a, b in zip(read_layer_cache(one, rotation, 0), read_layer_cache(many, rotation, index)):
                assert np.mean(np.isclose(np.asarray(a), np.asarray(b), rtol=1e-2, atol=1e-4)) > 0.99


def test_greedy_tokens_are_those_of_the_uncached_model() -> None:
    """Teacher-forced on the generated text, every token is the uncached argmax, up to bf16 rows."""
    prompt = tokens_of(60).tolist()
    made = generator("qwen3", "bf16")([prompt], 12).tokens[0]
    model, _ = tiny_model("qwen3")
    logits = np.asarray(nnx.jit(lambda m, t: m(t)[0])(model, jnp.asarray([prompt + made])))[0, 59:-1]
    chosen = logits[np.arange(12), made]
    assert (logits.max(axis=-1) - chosen <= 0.02 * np.abs(logits).max()).all()


def test_streaming_statistics_and_reuse() -> None:
    result, streamed = ragged_run("gemma3")
    for sequence, tokens in enumerate(result.tokens):
        assert [token for s, token in streamed if s == sequence] == tokens
    statistics = result.statistics
    assert statistics.prompt_tokens == sum(RAGGED)
    assert statistics.new_tokens == 12 * len(RAGGED)
    assert statistics.decode_tokens == 11 * len(RAGGED)
    assert statistics.compile_seconds > 0 and statistics.decode_tokens_per_second > 0
    assert statistics.cache_bytes["total"] == sum(live_bytes(cache)["total"] for cache in result.caches)
    assert statistics.cache_bytes["int2_pages"] == 2  # of the longest prompt, in one layer
    # as many prompts of similar length use the programs that are there
    again = generator("gemma3")([tokens_of(length).tolist() for length in RAGGED], 12)
    assert again.statistics.compile_seconds == 0
    assert again.tokens == result.tokens


def test_caches_are_donated() -> None:
    """The compiled programs write the caches in place."""
    _, config = tiny_model("gemma3")
    ragged_run("gemma3")
    caches = jax.tree.leaves(allocate_model_cache(config, len(RAGGED), 512))
    codes = sum(leaf.nbytes for leaf in caches if leaf.dtype == jnp.int32 and leaf.ndim == 4)
    for (name, *_), program in generator("gemma3")._programs.items():
        if name in ("prefill", "decode"):
            assert program.memory_analysis().alias_size_in_bytes >= codes, name


def test_end_tokens_stop_one_sequence_and_not_the_other() -> None:
    model, config = tiny_model("qwen3")
    prompts = [tokens_of(30).tolist(), tokens_of(50).tolist()]
    free = generator("qwen3", "bf16")(prompts, 20).tokens
    eos = next(token for token in free[0] if token not in free[1])
    at = free[0].index(eos)
    result = generate(model, config, prompts, 20, cache="bf16", eos_token_ids=(eos,))
    assert result.tokens[0] == free[0][: at + 1] and result.finish[0] == "eos"
    assert result.tokens[1] == free[1] and result.finish[1] == "length"
    assert int(result.caches[0].lengths[0]) == 30 + at
    assert int(result.caches[0].lengths[1]) == 50 + 19


@pytest.mark.parametrize("count", [1, 2, DECODE_BLOCK + 1])
def test_number_of_new_tokens_is_exact(count: int) -> None:
    result = generator("qwen3", "bf16")([tokens_of(20).tolist()], count)
    assert len(result.tokens[0]) == count and result.finish == ["length"]


def test_sampling_is_reproducible_and_independent_of_the_batch() -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, seed=3)
    warm = generator("qwen3", "bf16", sampling=sampling)
    prompts = [tokens_of(20).tolist(), tokens_of(30).tolist()]
    both = warm(prompts, 10).tokens
    assert warm(prompts, 10).tokens == both
    assert warm([prompts[0], tokens_of(9).tolist()], 10).tokens[0] == both[0]
    assert generator("qwen3", "bf16")(prompts, 10).tokens != both
    # two copies of a prompt are two draws
    twins = warm([prompts[0], prompts[0]], 10).tokens
    assert twins[0] == both[0] and twins[1] != twins[0]


def test_sample_cuts_and_draws_from_the_stated_distribution() -> None:
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.15, 0.07, 0.03]]))
    many = jnp.tile(logits, (4000, 1))
    keys = jax.random.split(jax.random.key(0), 4000)

    def frequencies(**options: Any) -> np.ndarray:
        drawn = np.asarray(sample(many, keys, SamplingConfig(**options)))
        return np.bincount(drawn, minlength=5) / 4000

    # 4000 draws: three standard deviations are below 0.024
    np.testing.assert_allclose(frequencies(temperature=1.0), [0.5, 0.25, 0.15, 0.07, 0.03], atol=0.025)
    np.testing.assert_allclose(frequencies(temperature=1.0, top_k=2), [2 / 3, 1 / 3, 0, 0, 0], atol=0.025)
    # 0.5 + 0.25 < 0.8, so the third token is the last one kept
    np.testing.assert_allclose(
        frequencies(temperature=1.0, top_p=0.8), np.array([0.5, 0.25, 0.15, 0, 0]) / 0.9, atol=0.025
    )
    sharp = np.array([0.5, 0.25, 0.15, 0.07, 0.03]) ** 2
    np.testing.assert_allclose(frequencies(temperature=0.5), sharp / sharp.sum(), atol=0.025)
    for greedy in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.01}):
        assert frequencies(**greedy)[0] == 1.0


class Letters:
    """A tokenizer of UTF-8 bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_text_stream_never_splits_a_character() -> None:
    text = "naïve 日本 🙂!"
    stream = TextStream(Letters())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text and stream.finish() == ""
    assert not any("\ufffd" in piece for piece in pieces)
    stream = TextStream(Letters())
    assert stream.push("é".encode()[0]) == "" and stream.finish() == "\ufffd"


# --- allocation and refusals ---


def test_short_windows_keep_bf16_rings() -> None:
    _, config = tiny_model("gemma3")
    assert int2_layers(config) == (1,)
    caches = allocate_model_cache(config, 2, 1000)
    assert [type(cache) for cache in caches] == [DenseCache, LayerCache]
    shapes = [cache.key.shape for cache in caches if isinstance(cache, DenseCache)]
    assert shapes == [(2, 64, 2, 16)]  # window 40 in whole pages
    everywhere = allocate_model_cache(config, 2, 1000, window_policy=EVERY_LAYER_INT2)
    assert {type(cache) for cache in everywhere} == {LayerCache}
    dense = allocate_model_cache(config, 2, 1000, kind="bf16")
    rings = [cache.key for cache in dense if isinstance(cache, DenseCache)]
    assert [rows.shape[1] for rows in rings] == [64, 1000]
    assert {rows.dtype for rows in rings} == {jnp.dtype(jnp.bfloat16)}


def rotation_set(config: ModelConfig, **changes: Any) -> RotationSet:
    layers = int2_layers(config)
    fields = {
        "model_id": "other",
        "layers": layers,
        "num_query_heads": config.num_query_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope": str(config.rope),
        "basis": "hadamard",
        "basis_version": 1,
        "corpus_digest": "",
        "calibration_tokens": 0,
        "versions": {},
        "created": "2026-01-01",
    }
    header = RotationHeader(**(fields | changes))
    return RotationSet(header, {layer: hadamard_rotation(2, 16) for layer in layers})


def test_rotations_of_another_model_are_refused() -> None:
    _, config = tiny_model("qwen3")
    assert list(select_rotations(rotation_set(config), config, (0, 1))) == [0, 1]
    with pytest.raises(CheckpointError, match="rotations of 'other' have head_dim = 32, the model has 16"):
        select_rotations(rotation_set(config, head_dim=32), config, (0, 1))
    with pytest.raises(ConfigError, match=r"needs rotations for layers \[0, 1\], have: \[\]"):
        Generator(tiny_model("qwen3")[0], config)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generator("qwen3", "bf16")([], 3), "no prompt given"),
        (lambda: generator("qwen3", "bf16")([[1], []], 3), "prompt 1 has no tokens"),
        (lambda: generator("qwen3", "bf16")([[1, 80]], 3), r"prompt 0 has token 80, allowed: 0\.\.79"),
        (lambda: generator("qwen3", "bf16")([[1]], 0), "max_new_tokens = 0"),
        (lambda: generator("qwen3", "bf16")([[1] * 2040], 9), "2040 tokens: .* more than the 2048 positions"),
        (lambda: generate(*tiny_model("qwen3"), [[1]], 1, cache="int4"), "cache kind 'int4', allowed: int2"),
        (lambda: generate(*tiny_model("qwen3"), [[1]], 1, cache="bf16", chunk=100), "chunk = 100"),
        (lambda: SamplingConfig(temperature=-1.0), "temperature = -1.0"),
        (lambda: SamplingConfig(top_k=-1), "top_k = -1"),
        (lambda: SamplingConfig(top_p=0.0), "top_p = 0.0"),
    ],
)
def test_impossible_requests_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_an_int2_layer_without_rotation_is_refused() -> None:
    model, config = tiny_model("qwen3")
    attention = CachedAttention(config, {}, jnp.array([1], jnp.int32))
    with pytest.raises(ConfigError, match="layer 0 has an INT2 cache but no rotation"):
        model(jnp.array([[1]]), allocate_model_cache(config, 1, 64), attention=attention)
