"""Decoding through caches: equal to the uncached model and to the reference on the same pages."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.cache import live_bytes, read_layer_cache
from oscar_jax.core.errors import CacheFullError, CheckpointError, ConfigError
from oscar_jax.core.rotation_header import RotationHeader
from oscar_jax.core.window_policy import EVERY_LAYER_INT2
from oscar_jax.generate import (
    DECODE_BLOCK,
    Generation,
    Generator,
    SamplingConfig,
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
from oscar_jax.text_stream import CONTEXT, TextStream

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
        attention: Any = Recording(CachedAttention(config, rotations_of(config), jnp.array([1], jnp.int32)))
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
    pair: tuple[Any, Any]
    for pair in zip(alone.caches, together.caches):
        one, many = pair
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
    assert statistics.cache_bytes["total"] == sum(
        live_bytes(cast(Any, cache))["total"] for cache in result.caches
    )
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
    both = warm(prompts, 10, seed=3).tokens
    assert warm(prompts, 10, seed=3).tokens == both
    assert warm([prompts[0], tokens_of(9).tolist()], 10, seed=3).tokens[0] == both[0]
    assert generator("qwen3", "bf16")(prompts, 10).tokens != both
    # two copies of a prompt are two draws
    twins = warm([prompts[0], prompts[0]], 10, seed=3).tokens
    assert twins[0] == both[0] and twins[1] != twins[0]


def test_seeds_advance_from_the_one_of_the_sampling() -> None:
    """Calls without a seed differ, a fresh Generator repeats them, and each says with which seed it drew."""
    model, config = tiny_model("qwen3")
    prompt = [tokens_of(20).tolist()]

    def three_calls() -> list[Generation]:
        fresh = Generator(model, config, cache="bf16", sampling=SamplingConfig(temperature=1.0, seed=5))
        fresh._programs = programs  # the seed is an argument of the programs, not part of them
        return [fresh(prompt, 10) for _ in range(3)]

    programs: dict[Any, Any] = {}
    runs, again = three_calls(), three_calls()
    assert len({tuple(run.tokens[0]) for run in runs}) == 3 and len({run.seed for run in runs}) == 3
    assert runs[0].seed == 5
    assert [run.tokens for run in again] == [run.tokens for run in runs]
    assert sum(run.statistics.compile_seconds for run in again) == 0
    repeated = generator("qwen3", "bf16", sampling=SamplingConfig(temperature=1.0))
    assert repeated(prompt, 10, seed=runs[2].seed).tokens == runs[2].tokens


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


# --- turns, streams, stop strings, log-probabilities ---


@pytest.mark.parametrize(
    ("family", "cache", "lengths"),
    [
        ("qwen3", "bf16", (30, 90)),
        ("qwen3", "int2", (400, 349)),
        ("gemma3", "bf16", (400, 349)),
        ("gemma3", "int2", (400, 349)),
    ],
)
def test_a_second_turn_equals_the_whole_conversation(family: str, cache: str, lengths: tuple) -> None:
    """Ragged; the longer pair has INT2 history on both sides of the turn, and starts within a page."""
    warm = generator(family, cache)
    first = [tokens_of(length).tolist() for length in lengths]
    second = [tokens_of(length, seed=1).tolist() for length in (70, 5)]
    one = warm(first, 9, capacity=600)
    whole = [a + b + c for a, b, c in zip(first, one.tokens, second)]
    two = warm(second, 12, caches=one)
    at_once = warm(whole, 12, capacity=600)
    assert two.tokens == at_once.tokens
    for ours, theirs in zip(two.caches, at_once.caches):
        assert ours.lengths.tolist() == theirs.lengths.tolist() == [len(text) + 11 for text in whole]
        if isinstance(ours, LayerCache) and isinstance(theirs, LayerCache):
            assert ours.history_pages.tolist() == theirs.history_pages.tolist()
            assert (lengths[0] > 320) == (ours.history_pages.tolist()[0] > 0)
    # a third turn may say nothing new; another one of its width needs no new program
    third = warm([[], []], 4, caches=two)
    again = warm([[], []], 4, caches=at_once)
    assert third.tokens == again.tokens and again.statistics.compile_seconds == 0


def test_caches_alone_go_on_from_what_they_store() -> None:
    warm = generator("qwen3", "bf16")
    prompt = tokens_of(40).tolist()
    one = warm([prompt], 5, capacity=256)
    given = one.tokens[0][-1:] + tokens_of(8, seed=1).tolist()
    two = warm([given], 6, caches=one.caches)
    assert two.tokens == warm([prompt + one.tokens[0][:-1] + given], 6, capacity=256).tokens


def test_turns_that_cannot_go_on_are_refused_by_name_and_leave_the_caches() -> None:
    warm = generator("qwen3", "bf16")
    one = warm([tokens_of(40).tolist()], 5)
    with pytest.raises(CacheFullError, match=r"sequence 0 would have 139 tokens, its caches hold 128"):
        warm([tokens_of(84).tolist()], 11, caches=one)
    with pytest.raises(ConfigError, match="2 prompts for caches of 1 sequences"):
        warm([[1], [2]], 3, caches=one)
    with pytest.raises(ConfigError, match=r"the cache of layer 0 has BF16 rows .* has INT2 pages"):
        generator("qwen3", "int2")([[1]], 3, caches=one)
    with pytest.raises(ConfigError, match=r"the cache of layer 0 has BF16 rows .* window None, .* window 40"):
        generator("gemma3", "bf16")([[1]], 3, caches=one)
    with pytest.raises(ConfigError, match="caches of 1 layers, the model 'tiny' has 2"):
        warm([[1]], 3, caches=one.caches[:1])
    with pytest.raises(ConfigError, match="prompt 0 has 1 tokens after 44 stored ones"):
        warm([[]], 2048 - 44, caches=one)
    with pytest.raises(ConfigError, match="prompt 0 has no tokens"):
        warm([[]], 3, caches=one.caches)
    with pytest.raises(ConfigError, match="capacity = 256: caches of an earlier turn keep"):
        warm([[1]], 3, caches=one, capacity=256)
    two = warm([[1]], 3, caches=one)
    with pytest.raises(ConfigError, match="consumed by a later turn"):
        warm([[1]], 3, caches=one)
    # 48 rows, the token that was not stored and 79 of the 80 new ones fill the cache
    assert len(warm([[]], 80, caches=two).tokens[0]) == 80


def test_a_short_ring_is_full_before_its_window() -> None:
    """A first turn shorter than the window allocates less than a ring, which cannot go round."""
    config = config_from_hf(
        {**SHAPE, "model_type": "gemma3_text", "num_hidden_layers": 1, "sliding_window": 512,
         "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        model_id="ring",
    )  # fmt: skip
    model = Decoder(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(7))
    warm = Generator(model, config, cache="bf16", eos_token_ids=(), chunk=128)
    one = warm([tokens_of(100).tolist()], 2)
    with pytest.raises(CacheFullError, match="its caches hold 128"):
        warm([tokens_of(30).tolist()], 2, caches=one)


def test_a_stream_is_the_call_taken_token_by_token() -> None:
    warm = generator("qwen3", "bf16")
    prompts = [tokens_of(20).tolist(), tokens_of(30).tolist()]
    called = warm(prompts, 12)
    stream = warm.stream(prompts, 12)
    first = next(stream)
    with pytest.raises(ConfigError, match="once all its tokens are taken"):
        _ = stream.generation
    events = [first, *stream]
    assert stream.generation.tokens == called.tokens
    assert [[token for s, token in events if s == index] for index in (0, 1)] == called.tokens
    assert list(stream) == [] and stream.generation.tokens == called.tokens
    # closed early: the generator goes on, the stream has no result
    for after in (0, 1, 5):
        closed = warm.stream(prompts, 12)
        assert [next(closed) for _ in range(after)] == events[:after]
        closed.close()
        assert list(closed) == []
        with pytest.raises(ConfigError, match="once all its tokens are taken"):
            _ = closed.generation
    assert warm(prompts, 12).tokens == called.tokens
    with pytest.raises(ConfigError, match="no prompt given"):  # before a token is asked for
        warm.stream([], 12)


class Words:
    """A tokenizer whose tokens are two letters each: 0 is "aa", 1 is "ab", ..."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token // 10) + chr(97 + token % 10) for token in tokens)


def test_stop_strings_end_one_sequence_and_leave_exact_caches() -> None:
    model, config = tiny_model("qwen3")
    warm = Generator(model, config, cache="bf16", eos_token_ids=(), chunk=128, tokenizer=Words())
    prompts = [tokens_of(20).tolist(), tokens_of(30).tolist()]
    free = warm(prompts, 20)
    assert free.texts == [Words().decode(tokens) for tokens in free.tokens]
    # the second letter of one token and the first of the next, found in the middle of a decode block
    assert free.texts is not None
    text = free.texts[0]
    stop = next(text[at : at + 2] for at in range(9, 30, 2) if text.find(text[at : at + 2]) == at)
    at = text.index(stop)
    assert stop not in free.texts[1]
    result = warm(prompts, 20, stop=("zz", stop))
    assert result.finish == ["stop", "length"]
    assert result.texts == [text[:at], free.texts[1]]
    made = (at + 2 + 1) // 2
    assert result.tokens == [free.tokens[0][:made], free.tokens[1]]
    assert result.caches[0].lengths.tolist() == [20 + made - 1, 30 + 19]
    # what follows is the conversation with the tokens that were made
    more = [[3, 4], [5]]
    whole = [a + b + c for a, b, c in zip(prompts, result.tokens, more)]
    assert warm(more, 6, caches=result).tokens == warm(whole, 6, capacity=128).tokens
    assert warm(prompts, 20, stop=stop).finish == ["stop", "length"]  # a single string is one stop


def test_text_stream_holds_back_what_may_be_a_stop() -> None:
    stream = TextStream(Letters(), stop=("\n\n", "END"))
    assert [stream.push(byte) for byte in b"a\nbE"] == ["a", "", "\nb", ""]
    assert [stream.push(byte) for byte in b"NX"] == ["", "ENX"]
    assert [stream.push(byte) for byte in b"\n"] == [""] and not stream.stopped
    assert [stream.push(byte) for byte in b"\nq"] == ["", ""] and stream.stopped
    assert stream.finish() == ""
    unfinished = TextStream(Letters(), stop=("END",))
    assert [unfinished.push(byte) for byte in b"xEN"] == ["x", "", ""]
    assert unfinished.finish() == "EN" and not unfinished.stopped


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=1.3, top_k=5)])
def test_logprobs_are_those_of_a_direct_forward_pass(sampling: SamplingConfig) -> None:
    """Rows rounded to bf16 in the cache move logits by 2 % of the largest, log-probabilities by twice it."""
    prompts = [tokens_of(60).tolist(), tokens_of(31).tolist()]
    result = generator("qwen3", "bf16", sampling=sampling)(prompts, 12, logprobs=True)
    model, _ = tiny_model("qwen3")
    assert result.logprobs is not None
    for prompt, made, scores in zip(prompts, result.tokens, result.logprobs):
        logits = nnx.jit(lambda m, t: m(t)[0])(model, jnp.asarray([prompt + made]))[0, len(prompt) - 1 : -1]
        expected = np.asarray(jax.nn.log_softmax(logits, axis=-1))[np.arange(12), made]
        bound = 2 * 0.02 * float(jnp.abs(logits).max())
        np.testing.assert_allclose(scores, expected, atol=bound)
        assert np.ptp(expected) > bound  # so that the right token at the right place is told from others
    assert generator("qwen3", "bf16", sampling=sampling)(prompts, 2).logprobs is None


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


class CountingLetters(Letters):
    """Counts what it is given."""

    seen = 0

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        self.seen += len(tokens)
        return super().decode(tokens, skip_special_tokens)


def test_text_stream_costs_the_same_for_every_token() -> None:
    """A long text of characters of one to four bytes: exact, no token decoded more than a few times."""
    text = "naïve 日本語 🙂! " * 60
    tokenizer = CountingLetters()
    stream = TextStream(tokenizer, stop=("never",))
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.seen <= (2 * CONTEXT + 8) * len(text.encode())
    assert stream.finish() == ""


def test_text_stream_equals_the_tokenizers_own_text() -> None:
    """Words that only read right behind others: a tokenizer that joins pieces with spaces."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {word: number for number, word in enumerate(["▁the", "▁sea", "sons", "▁", "é", ",", "<x>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<x>"))
    tokenizer.decoder = decoders.Metaspace()
    tokens = np.random.default_rng(0).integers(0, len(vocabulary), 200).tolist()
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, tokens)) + stream.finish() == tokenizer.decode(tokens)


# --- allocation and refusals ---


def test_short_windows_keep_bf16_rings() -> None:
    _, config = tiny_model("gemma3")
    assert int2_layers(config) == (1,)
    caches = allocate_model_cache(config, 2, 1000)
    assert [type(cache) for cache in caches] == [DenseCache, LayerCache]
    shapes = [cache.key.shape for cache in caches if isinstance(cache, DenseCache)]
    assert shapes == [(2, 64, 2, 16)]  # window 40 in whole pages
    everywhere = allocate_model_cache(config, 2, 1000, window_policy=EVERY_LAYER_INT2)
    pages = [cache.key_codes.shape[0] - 1 for cache in everywhere if isinstance(cache, LayerCache)]
    # Behind the window pages are given up: those of one append of 512 tokens are more than it reaches.
    assert pages == [2 * 8, 2 * config.cache_config().history_pages(1000)]
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
        (lambda: generator("qwen3", "bf16")(cast(Any, [[1, 2.5]]), 3), r"prompt 0 has token 2\.5, allowed"),
        (lambda: generator("qwen3", "bf16")(cast(Any, ["text"]), 3), "prompt 0 has token 't', allowed"),
        (lambda: generator("qwen3", "bf16")([[1]], 0), "max_new_tokens = 0"),
        (lambda: generator("qwen3", "bf16")([[1] * 2040], 9), "2040 tokens: .* more than the 2048 positions"),
        (lambda: generate(*tiny_model("qwen3"), [[1]], 1, cache="int4"), "cache kind 'int4', allowed: int2"),
        (lambda: generate(*tiny_model("qwen3"), [[1]], 1, cache="bf16", chunk=100), "chunk = 100"),
        (lambda: SamplingConfig(temperature=-1.0), "temperature = -1.0"),
        (lambda: SamplingConfig(top_k=-1), "top_k = -1"),
        (lambda: SamplingConfig(top_p=0.0), "top_p = 0.0"),
        (lambda: SamplingConfig(seed=-1), r"seed = -1, allowed: 0\.\.4294967295"),
        (lambda: generator("qwen3", "bf16")([[1]], 3, seed=2**32), "seed = 4294967296"),
        (lambda: generator("qwen3", "bf16")([[1]], 3, stop=("x",)), r"stop = \('x',\) needs a tokenizer"),
        (lambda: generator("qwen3", "bf16")([[1]], 3, stop=("",)), r"stop = \('',\), allowed: strings that"),
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
