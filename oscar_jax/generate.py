"""Generation: prefill in chunks, then a jitted decode loop over donated caches, for ragged batches.

Prompts are padded on the right inside a chunk only; a sequence that has ended, or whose prompt is shorter
than its neighbours', adds no row to its cache. Random choices depend on the seed, the sequence's index and
the token's index, not on the batch.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .core import cache_format as fmt
from .core.errors import ConfigError
from .core.window_policy import DEFAULT_WINDOW_POLICY, WindowPolicy
from .models.cached_attention import CachedAttention, allocate_model_cache, int2_layers, model_live_bytes
from .models.config import ModelConfig
from .models.decoder import Decoder
from .rotations.rotation import LayerRotation, RotationSet

PREFILL_CHUNK = 512  # tokens; chunk boundaries lie on multiples of it
DECODE_BLOCK = 8  # tokens generated per dispatch, and so the grain of streaming


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn; temperature 0 is greedy, top_k 0 and top_p 1 keep all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature = {self.temperature!r}, allowed: >= 0")
        if self.top_k < 0:
            raise ConfigError(f"top_k = {self.top_k!r}, allowed: >= 0 (0 keeps all)")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p = {self.top_p!r}, allowed: 0 < top_p <= 1")


@dataclasses.dataclass(frozen=True)
class GenerationStatistics:
    """Times and sizes of one run; compilation is counted apart from the work itself."""

    cache: str  # "int2" | "bf16"
    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prefill_seconds: float  # up to and with the first new token of every sequence
    decode_seconds: float
    decode_tokens: int  # new tokens without the first of every sequence
    cache_bytes: dict[str, int]  # see `cache.live_bytes`, summed over layers, at the end of the run

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens per second, over all sequences."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens per second, over all sequences."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class Generation:
    """New tokens per sequence (an end token, if reached, is the last), why each ended, and what it took."""

    tokens: list[list[int]]
    finish: list[str]  # "eos" | "length"
    statistics: GenerationStatistics
    caches: list[Any]


def sample(logits: jax.Array, keys: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Next tokens int32 [B] from float32 logits [B, V] with one random key per sequence.

    Top-k and top-p are cut in this order, on the logits divided by the temperature; a token tied with the
    last one kept is kept too. The most likely token always stays.
    """
    if sampling.temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    if sampling.top_p < 1.0:
        descending = -jnp.sort(-logits, axis=-1)
        mass = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1)
        kept = jnp.sum(mass < sampling.top_p, axis=-1, keepdims=True)  # index of the last token kept
        smallest = jnp.take_along_axis(descending, jnp.minimum(kept, logits.shape[-1] - 1), axis=-1)
        logits = jnp.where(logits < smallest, -jnp.inf, logits)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class Generator:
    """A decoder with its cache kind, rotations and sampling; compiled programs are kept between calls.

    `cache` is "int2" (needs rotations for every layer that is not kept in BF16) or "bf16"; `implementation`
    is that of `cache.attend`. Raises ConfigError, or CheckpointError for rotations of other weights; a
    `model_id` equal to the rotations' own says that they fit all the same.
    """

    def __init__(
        self,
        model: Decoder,
        config: ModelConfig,
        *,
        cache: str = "int2",
        rotations: RotationSet | Mapping[int, LayerRotation] | None = None,
        sampling: SamplingConfig | None = None,
        eos_token_ids: Sequence[int] | None = None,
        chunk: int = PREFILL_CHUNK,
        window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
        implementation: str | None = None,
        model_id: str | None = None,
    ) -> None:
        if chunk < fmt.PAGE_TOKENS or chunk % fmt.PAGE_TOKENS:
            raise ConfigError(f"chunk = {chunk}, allowed: multiples of {fmt.PAGE_TOKENS}")
        self.config, self.cache, self.chunk = config, cache, chunk
        self.sampling = SamplingConfig() if sampling is None else sampling
        self.eos = tuple(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.window_policy, self.implementation = window_policy, implementation
        needed = int2_layers(config, window_policy=window_policy) if cache == "int2" else ()
        self.rotations = jax.tree.map(jnp.asarray, select_rotations(rotations, config, needed, model_id))
        self._graph, self._parameters = nnx.split(model)
        self._dtype = model.dtype
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._compile_seconds = 0.0

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_token: Callable[[int, int], None] | None = None,
        *,
        capacity: int = 0,
    ) -> Generation:
        """Continues each prompt (token ids, any lengths) by up to `max_new_tokens` tokens.

        `on_token(sequence, token)` is called for every new token, in order, a few tokens after it was made.
        Caches hold at least `capacity` tokens per sequence; equal capacities share compiled programs.
        Raises ConfigError for an empty prompt, a token outside the vocabulary or an impossible length.
        """
        lengths = _check_prompts(prompts, self.config, max_new_tokens)
        batch, compiled_before = len(prompts), self._compile_seconds
        longest = max(capacity, int(lengths.max()) + max_new_tokens)
        caches = allocate_model_cache(
            self.config,
            batch,
            # whole chunks, so that runs of similar length share programs too
            -(-longest // self.chunk) * self.chunk,
            kind=self.cache,
            window_policy=self.window_policy,
        )
        new = [[] for _ in prompts]

        def deliver(block: np.ndarray) -> None:
            for column in block.T.tolist():
                for sequence, token in enumerate(column):
                    if token >= 0:
                        new[sequence].append(token)
                        if on_token is not None:
                            on_token(sequence, token)

        started, compiling = time.perf_counter(), self._compile_seconds
        last_rows, caches = self._prefill(prompts, lengths, caches)
        tokens, done = self._run("first", self._first, self._parameters, last_rows)
        deliver(np.asarray(tokens)[:, None])
        prefill_seconds = time.perf_counter() - started - (self._compile_seconds - compiling)

        started, compiling, made = time.perf_counter(), self._compile_seconds, 1
        while made < max_new_tokens and not np.asarray(done).all():
            steps = min(DECODE_BLOCK, max_new_tokens - made)
            arguments = (self._parameters, tokens, done, caches, jnp.int32(made), jnp.int32(steps))
            block, tokens, done, caches = self._run(
                "decode", self._decode_block, *arguments, self.rotations, donate=(3,)
            )
            deliver(np.asarray(block))
            made += steps
        decode_seconds = time.perf_counter() - started - (self._compile_seconds - compiling)

        total = sum(len(sequence) for sequence in new)
        statistics = GenerationStatistics(
            cache=self.cache,
            prompt_tokens=int(lengths.sum()),
            new_tokens=total,
            compile_seconds=self._compile_seconds - compiled_before,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            decode_tokens=total - batch,
            cache_bytes=model_live_bytes(caches, self.config),
        )
        finish = ["eos" if sequence[-1] in self.eos else "length" for sequence in new]
        return Generation(new, finish, statistics, caches)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], lengths: np.ndarray, caches: list[Any]
    ) -> tuple[jax.Array, list[Any]]:
        """Runs all prompts through the caches; returns the last row of each, [B, H], and the caches."""
        longest = int(lengths.max())
        width = min(self.chunk, -(-longest // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS)
        padded = np.zeros((len(prompts), -(-longest // width) * width), np.int32)
        for row, prompt in zip(padded, prompts):
            row[: len(prompt)] = prompt
        last_rows = jnp.zeros((len(prompts), self.config.hidden_size), self._dtype)
        for start in range(0, longest, width):
            new_lengths = jnp.asarray(np.clip(lengths - start, 0, width), jnp.int32)
            chunk = jnp.asarray(padded[:, start : start + width])
            arguments = (self._parameters, chunk, new_lengths, last_rows, caches, self.rotations)
            last_rows, caches = self._run("prefill", self._prefill_chunk, *arguments, donate=(3, 4))
        return last_rows, caches

    def _prefill_chunk(
        self,
        parameters: Any,
        tokens: jax.Array,
        new_lengths: jax.Array,
        last_rows: jax.Array,
        caches: list[Any],
        rotations: Mapping[int, LayerRotation],
    ) -> tuple[jax.Array, list[Any]]:
        """Stores tokens int32 [B, T]; last_rows [B, H] is replaced where a sequence has new tokens."""
        hidden, caches = self._rows(parameters, tokens, new_lengths, caches, rotations)
        last = jnp.take_along_axis(hidden, jnp.maximum(new_lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return jnp.where((new_lengths > 0)[:, None], last, last_rows), caches

    def _first(self, parameters: Any, last_rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first new tokens int32 [B], and which sequences end with them."""
        return self._choose(parameters, last_rows, jnp.int32(0))

    def _decode_block(
        self,
        parameters: Any,
        tokens: jax.Array,
        done: jax.Array,
        caches: list[Any],
        made: jax.Array,
        steps: jax.Array,
        rotations: Mapping[int, LayerRotation],
    ) -> tuple[jax.Array, jax.Array, jax.Array, list[Any]]:
        """Up to `steps` tokens per sequence after the `made` so far; ended sequences yield -1.

        Returns the block int32 [B, DECODE_BLOCK], the newest tokens, which sequences have ended, the caches.
        """

        def unfinished(state: tuple) -> jax.Array:
            step, _, _, done, _ = state
            return (step < steps) & ~done.all()

        def advance(state: tuple) -> tuple:
            step, block, tokens, done, caches = state
            new_lengths = jnp.where(done, 0, 1).astype(jnp.int32)
            hidden, caches = self._rows(parameters, tokens[:, None], new_lengths, caches, rotations)
            chosen, ended = self._choose(parameters, hidden[:, 0], made + step)
            block = block.at[:, step].set(jnp.where(done, -1, chosen))
            return step + 1, block, jnp.where(done, tokens, chosen), done | ended, caches

        block = jnp.full((tokens.shape[0], DECODE_BLOCK), -1, jnp.int32)
        state = (jnp.int32(0), block, tokens, done, caches)
        _, block, tokens, done, caches = jax.lax.while_loop(unfinished, advance, state)
        return block, tokens, done, caches

    def _rows(
        self, parameters: Any, tokens: jax.Array, new_lengths: jax.Array, caches: list[Any], rotations: Any
    ) -> tuple[jax.Array, list[Any]]:
        """Last hidden rows [B, T, H] of new tokens, and the caches with the tokens stored."""
        attention = CachedAttention(self.config, rotations, new_lengths, implementation=self.implementation)
        positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        model = nnx.merge(self._graph, parameters)
        return model.hidden_states(tokens, caches, positions=positions, attention=attention)

    def _choose(self, parameters: Any, rows: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Samples token number `index` of every sequence from rows [B, H]; also whether it is an end."""

        def key_of(sequence: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.sampling.seed), sequence), index)

        keys = jax.vmap(key_of)(jnp.arange(rows.shape[0]))
        logits = nnx.merge(self._graph, parameters).logits(rows)
        tokens = sample(logits, keys, self.sampling)
        return tokens, jnp.isin(tokens, jnp.asarray(self.eos, jnp.int32))

    def _run(
        self, name: str, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
    ) -> Any:
        """Calls the program compiled for arguments of these shapes; compile time is counted apart."""
        key = (name, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[1:])))
        if key not in self._programs:
            started = time.perf_counter()
            self._programs[key] = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
            self._compile_seconds += time.perf_counter() - started
        return self._programs[key](*arguments)


def generate(
    model: Decoder,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    on_token: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Generation:
    """One run of a `Generator` with these options."""
    return Generator(model, config, **options)(prompts, max_new_tokens, on_token)


class TextStream:
    """Turns the tokens of one sequence into text piece by piece, never splitting a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # characters

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # bytes of a character are still missing
            return ""
        piece, self._shown = text[self._shown :], len(text)
        return piece

    def finish(self) -> str:
        """What is left at the end, broken characters included."""
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        piece, self._shown = text[self._shown :], len(text)
        return piece


def select_rotations(
    rotations: RotationSet | Mapping[int, LayerRotation] | None,
    config: ModelConfig,
    layers: Sequence[int],
    model_id: str | None = None,
) -> dict[int, LayerRotation]:
    """The rotations of `layers`; ConfigError if some are missing, CheckpointError if a set does not fit."""
    if isinstance(rotations, RotationSet):
        # By the weights if both are known; the name of a model made in memory says nothing.
        known = None if model_id else config.fingerprint
        rotations.require_fits(config, layers, model_id=model_id, fingerprint=known)
        return {layer: rotations.layers[layer] for layer in layers}
    available = rotations or {}
    missing = [layer for layer in layers if layer not in available]
    if missing:
        raise ConfigError(f"the INT2 cache needs rotations for layers {missing}, have: {sorted(available)}")
    return {layer: available[layer] for layer in layers}


def _check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, max_new_tokens: int) -> np.ndarray:
    """Prompt lengths [B]; raises ConfigError naming the prompt."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens}, allowed: >= 1")
    if not prompts:
        raise ConfigError("no prompt given")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {index} has no tokens")
        foreign = [token for token in prompt if not 0 <= token < config.vocab_size]
        if foreign:
            raise ConfigError(f"prompt {index} has token {foreign[0]}, allowed: 0..{config.vocab_size - 1}")
        if len(prompt) + max_new_tokens > config.max_positions:
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens: with {max_new_tokens} new ones more than the "
                f"{config.max_positions} positions of {config.model_id!r}"
            )
    return np.array([len(prompt) for prompt in prompts])
