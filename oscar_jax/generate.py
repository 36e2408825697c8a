"""Generation: prefill in chunks, then a jitted decode loop over donated caches, for ragged batches.

Prompts are padded on the right inside a chunk only; a sequence that has ended, or whose prompt is shorter
than its neighbours', adds no row to its cache. Random choices depend on the seed, the sequence's index and
the token's index, not on the batch.

Caches belong to the newest turn: a turn that goes on from them is handed their memory and writes in place,
and the `Generation` they came from cannot be continued a second time.
"""

import collections.abc
import dataclasses
import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .arithmetic import default_chunk
from .core import cache_format as fmt
from .core.errors import CacheFullError, ConfigError
from .core.window_policy import DEFAULT_WINDOW_POLICY, WindowPolicy
from .layer_cache import DenseCache, LayerCache
from .models.cached_attention import AnyCache, CachedAttention, int2_layers
from .models.config import ModelConfig
from .models.linear_attention import RecurrentState
from .models.protocol import LanguageModel
from .rotations.rotation import LayerRotation, RotationSet
from .sharding.places import place_of
from .text_stream import TextStream

DECODE_BLOCK = 8  # tokens generated per dispatch, and so the grain of streaming


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn; temperature 0 is greedy, top_k 0 and top_p 1 keep all tokens.

    `seed` is where a `Generator` starts: each of its calls draws with a seed of its own that follows from it.
    """

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
        _check_seed(self.seed)


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
    """New tokens per sequence (an end token, if reached, is the last), why each ended, and what it took.

    The last token of a sequence is not stored in `caches` yet; a call that goes on from the Generation itself
    stores it first.
    """

    tokens: list[list[int]]
    finish: list[str]  # "eos" | "length" | "stop"
    statistics: GenerationStatistics
    caches: list[AnyCache]  # consumed by the call that goes on from them
    seed: int  # the same call with this seed draws the same tokens
    texts: list[str] | None = None  # with a tokenizer: the new text, up to a stop string
    logprobs: list[list[float]] | None = None  # of `tokens`, in nats, if asked for


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


class TokenStream:
    """(sequence, token) pairs as they are made, and the whole run once the last one has been taken.

    Closing it early drops the caches of the run, also those it was given; its Generator stays usable.
    """

    def __init__(self, steps: collections.abc.Generator[tuple[int, int], None, Generation]) -> None:
        self._steps = steps
        self._generation: Generation | None = None

    def __iter__(self) -> "TokenStream":
        return self

    def __next__(self) -> tuple[int, int]:
        try:
            return next(self._steps)
        except StopIteration as end:
            self._generation = self._generation or end.value
            raise StopIteration from None

    def close(self) -> None:
        """Ends the run where it is."""
        self._steps.close()

    @property
    def generation(self) -> Generation:
        """The whole run; ConfigError while tokens are left, or if the stream was closed before its end."""
        if self._generation is None:
            raise ConfigError("a stream has its generation once all its tokens are taken, not before")
        return self._generation


class Generator:
    """A decoder with its cache kind, rotations and sampling; compiled programs are kept between calls.

    `cache` is "int2" (needs rotations for every layer that is not kept in BF16) or "bf16"; `implementation`
    is that of `cache.attend`; a `tokenizer` (anything with `decode`) gives texts, and is needed for stop
    strings. Prompts go through the model `chunk` tokens at a time (default 512 on a CPU, 2048 elsewhere), cut
    at its multiples. Calls without a `seed` draw with new seeds each, all fixed by the sampling's. With a
    `mesh` the model is one that `sharding` has placed there, `config` the checkpoint's all the same, and
    every batch a multiple of its data axis. Raises ConfigError, or CheckpointError for rotations of other
    weights; a `model_id` equal to the rotations' own says that they fit all the same.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: ModelConfig,
        *,
        cache: str = "int2",
        rotations: RotationSet | Mapping[int, LayerRotation] | None = None,
        sampling: SamplingConfig | None = None,
        eos_token_ids: Sequence[int] | None = None,
        chunk: int | None = None,
        window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
        implementation: str | None = None,
        model_id: str | None = None,
        tokenizer: Any | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        chunk = default_chunk() if chunk is None else chunk
        if chunk < fmt.PAGE_TOKENS or chunk % fmt.PAGE_TOKENS:
            raise ConfigError(f"chunk = {chunk}, allowed: multiples of {fmt.PAGE_TOKENS}")
        self.config, self.cache, self.chunk = config, cache, chunk
        self.sampling = SamplingConfig() if sampling is None else sampling
        self.eos = tuple(config.eos_token_ids if eos_token_ids is None else eos_token_ids)
        self.window_policy, self.implementation = window_policy, implementation
        self.tokenizer = tokenizer
        needed = int2_layers(config, window_policy=window_policy) if cache == "int2" else ()
        self._place = place_of(model, config, mesh)
        self.rotations = self._place.rotations(select_rotations(rotations, config, needed, model_id))
        self._graph, self._parameters = nnx.split(model)
        self._dtype = model.dtype
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._compile_seconds = 0.0
        self._unseeded_calls = 0

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        on_token: Callable[[int, int], None] | None = None,
        *,
        caches: Generation | Sequence[AnyCache] | None = None,
        capacity: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> Generation:
        """Continues each prompt (token ids, any lengths) by up to `max_new_tokens` tokens.

        `on_token(sequence, token)` is called for every new token, in order, a few tokens after it was made.
        Caches hold at least `capacity` tokens per sequence; equal capacities share compiled programs.

        `caches` goes on from an earlier Generation of this model: the prompts follow its last tokens, and may
        then be empty. Caches alone hold no such last token: the prompts follow what is stored. Either way the
        caches are consumed, unless an error is raised. `seed` makes the draws those of another call with it.
        A sequence ends when its new text contains one of the `stop` strings; tokens are then made one by one,
        so that caches hold nothing after the end. `logprobs` asks for the logarithm of each new token's
        probability under the model itself, before temperature and cuts.

        Raises ConfigError for an empty prompt, a token outside the vocabulary, an impossible length, stop
        strings without tokenizer, and caches of another batch or geometry, or consumed before; CacheFullError
        if the caches cannot hold the new tokens.
        """
        options = {"caches": caches, "capacity": capacity, "seed": seed, "stop": stop, "logprobs": logprobs}
        stream = self.stream(prompts, max_new_tokens, **options)
        for sequence, token in stream:
            if on_token is not None:
                on_token(sequence, token)
        return stream.generation

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        caches: Generation | Sequence[AnyCache] | None = None,
        capacity: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
    ) -> TokenStream:
        """The same run as an iterator over (sequence, token); `TokenStream.generation` is the result.

        Arguments and errors are those of a call; errors are raised here, before the first token is asked for.
        Work is done while tokens are taken.
        """
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stop:
            raise ConfigError(f"stop = {stop!r}, allowed: strings that are not empty")
        if stop and self.tokenizer is None:
            raise ConfigError(f"stop = {stop!r} needs a tokenizer: Generator(..., tokenizer=...)")
        if seed is not None:
            _check_seed(seed)
        if caches is None:
            lengths = _check_prompts(prompts, self.config, max_new_tokens)
            longest = max(capacity, int(lengths.max()) + max_new_tokens)
            stored = self._place.allocate(
                len(prompts),
                # whole chunks, so that runs of similar length share programs too
                -(-longest // self.chunk) * self.chunk,
                kind=self.cache,
                window_policy=self.window_policy,
                chunk=self.chunk,
            )
        else:
            if capacity:
                raise ConfigError(f"capacity = {capacity}: caches of an earlier turn keep the size they have")
            prompts, stored = self._next_turn(prompts, max_new_tokens, caches)
        if seed is None:
            seed = self._next_seed()
        return TokenStream(self._steps(prompts, max_new_tokens, stored, seed, stop, logprobs))

    def _next_turn(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        caches: Generation | Sequence[AnyCache],
    ) -> tuple[list[list[int]], list[AnyCache]]:
        """The tokens to be stored next, and the caches, found to have room for them and for the new ones."""
        stored = list(caches.caches if isinstance(caches, Generation) else caches)
        paged = int2_layers(self.config, window_policy=self.window_policy) if self.cache == "int2" else ()
        _check_geometry(stored, self._place.config, paged, len(prompts))
        if isinstance(caches, Generation):
            prompts = [[last[-1], *prompt] for last, prompt in zip(caches.tokens, prompts)]
        before = self._place.host(stored[0].lengths)
        lengths = _check_prompts(prompts, self.config, max_new_tokens, before)
        _check_room(stored, before + lengths + max_new_tokens - 1)  # the last token is not stored
        return [list(prompt) for prompt in prompts], stored

    def _next_seed(self) -> int:
        """The seed of the next call without one: the sampling's own first, then seeds spread out by it."""
        call, self._unseeded_calls = self._unseeded_calls, self._unseeded_calls + 1
        first = self.sampling.seed
        return int(np.random.SeedSequence([first, call]).generate_state(1)[0]) if call else first

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        caches: list[AnyCache],
        seed: int,
        stop: tuple[str, ...],
        logprobs: bool,
    ) -> collections.abc.Generator[tuple[int, int], None, Generation]:
        """The run itself; the clock stands still while a caller has a token in hand."""
        compiled_before = self._compile_seconds
        with self._place.context():  # a key is made where it is used
            key = jax.random.key(seed)
        lengths = np.array([len(prompt) for prompt in prompts])
        new: list[list[int]] = [[] for _ in prompts]
        scores: list[list[float]] = [[] for _ in prompts]
        texts = ["" for _ in prompts]
        readers = [TextStream(self.tokenizer, stop) for _ in prompts] if stop else []

        def take(block: np.ndarray, block_scores: np.ndarray) -> list[tuple[int, int]]:
            taken = []
            for column, column_scores in zip(block.T.tolist(), block_scores.T.tolist()):
                for sequence, token in enumerate(column):
                    if token >= 0:
                        new[sequence].append(token)
                        scores[sequence].append(column_scores[sequence])
                        if stop:
                            texts[sequence] += readers[sequence].push(token)
                        taken.append((sequence, token))
            return taken

        started, compiling = time.perf_counter(), self._compile_seconds
        last_rows, caches = self._prefill(prompts, lengths, caches)
        arguments = (self._parameters, last_rows, key)
        tokens, token_scores, done = self._run("first", self._first, *arguments, static=(logprobs,))
        taken = take(np.asarray(tokens)[:, None], np.asarray(token_scores)[:, None])
        prefill_seconds = time.perf_counter() - started - (self._compile_seconds - compiling)
        yield from taken

        decode_seconds, made = 0.0, 1
        while True:
            if stop:
                stopped = np.array([reader.stopped for reader in readers])
                done = self._place.put(np.asarray(done) | stopped)
            if made >= max_new_tokens or np.asarray(done).all():
                break
            started, compiling = time.perf_counter(), self._compile_seconds
            # After a stop string nothing may be stored, and only the host can read text.
            steps = 1 if stop else min(DECODE_BLOCK, max_new_tokens - made)
            counts = self._place.put(np.int32(made)), self._place.put(np.int32(steps))
            arguments = (self._parameters, tokens, done, caches, *counts, key)
            block, block_scores, tokens, done, caches = self._run(
                "decode", self._decode_block, *arguments, self.rotations, static=(logprobs,), donate=(3,)
            )
            taken = take(np.asarray(block), np.asarray(block_scores))
            made += steps
            decode_seconds += time.perf_counter() - started - (self._compile_seconds - compiling)
            yield from taken

        total = sum(len(sequence) for sequence in new)
        statistics = GenerationStatistics(
            cache=self.cache,
            prompt_tokens=int(lengths.sum()),
            new_tokens=total,
            compile_seconds=self._compile_seconds - compiled_before,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            decode_tokens=total - len(prompts),
            cache_bytes=self._place.live_bytes(caches),
        )
        finish = ["eos" if sequence[-1] in self.eos else "length" for sequence in new]
        for sequence, reader in enumerate(readers):
            texts[sequence] += reader.finish()
            finish[sequence] = "stop" if reader.stopped else finish[sequence]
        if self.tokenizer is not None and not stop:
            texts = [self.tokenizer.decode(sequence, skip_special_tokens=True) for sequence in new]
        return Generation(
            new,
            finish,
            statistics,
            caches,
            seed,
            texts=None if self.tokenizer is None else texts,
            logprobs=scores if logprobs else None,
        )

    def _prefill(
        self, prompts: Sequence[Sequence[int]], lengths: np.ndarray, caches: list[Any]
    ) -> tuple[jax.Array, list[Any]]:
        """Runs all prompts through the caches; returns the last row of each, [B, H], and the caches."""
        longest = int(lengths.max())
        width = min(self.chunk, -(-longest // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS)
        padded = np.zeros((len(prompts), -(-longest // width) * width), np.int32)
        for row, prompt in zip(padded, prompts):
            row[: len(prompt)] = prompt
        last_rows = self._place.put(np.zeros((len(prompts), self.config.hidden_size), self._dtype))
        for start in range(0, longest, width):
            new_lengths = self._place.put(np.clip(lengths - start, 0, width).astype(np.int32))
            chunk = self._place.put(padded[:, start : start + width])
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
        return self._place.everywhere(jnp.where((new_lengths > 0)[:, None], last, last_rows)), caches

    def _first(
        self, logprobs: bool, parameters: Any, last_rows: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first new tokens int32 [B], their log-probabilities, and which sequences end with them."""
        return self._place.everywhere(self._choose(logprobs, parameters, last_rows, key, jnp.int32(0)))

    def _decode_block(
        self,
        logprobs: bool,
        parameters: Any,
        tokens: jax.Array,
        done: jax.Array,
        caches: list[Any],
        made: jax.Array,
        steps: jax.Array,
        key: jax.Array,
        rotations: Mapping[int, LayerRotation],
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, list[Any]]:
        """Up to `steps` tokens per sequence after the `made` so far; ended sequences yield -1.

        Returns the block int32 [B, DECODE_BLOCK], its log-probabilities float32, the newest tokens, which
        sequences have ended, the caches.
        """

        def unfinished(state: tuple) -> jax.Array:
            step, _, _, _, done, _ = state
            return (step < steps) & ~done.all()

        def advance(state: tuple) -> tuple:
            step, block, scores, tokens, done, caches = state
            new_lengths = jnp.where(done, 0, 1).astype(jnp.int32)
            hidden, caches = self._rows(parameters, tokens[:, None], new_lengths, caches, rotations)
            chosen, score, ended = self._choose(logprobs, parameters, hidden[:, 0], key, made + step)
            block = block.at[:, step].set(jnp.where(done, -1, chosen))
            scores = scores.at[:, step].set(score)
            return step + 1, block, scores, jnp.where(done, tokens, chosen), done | ended, caches

        block = jnp.full((tokens.shape[0], DECODE_BLOCK), -1, jnp.int32)
        state = (jnp.int32(0), block, jnp.zeros(block.shape, jnp.float32), tokens, done, caches)
        _, block, scores, tokens, done, caches = jax.lax.while_loop(unfinished, advance, state)
        return *self._place.everywhere((block, scores, tokens, done)), caches

    def _rows(
        self, parameters: Any, tokens: jax.Array, new_lengths: jax.Array, caches: list[Any], rotations: Any
    ) -> tuple[jax.Array, list[Any]]:
        """Last hidden rows [B, T, H] of new tokens, and the caches with the tokens stored."""
        attention = CachedAttention(
            self.config,
            rotations,
            new_lengths,
            implementation=self.implementation,
            attend=self._place.attend,
        )
        tokens = self._place.by_sequence(tokens)
        positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        model = nnx.merge(self._graph, parameters)
        # A model of one's own need not know about rows that are padding, unless it keeps a state of them.
        padding = {"new_lengths": new_lengths} if self.config.linear_layers else {}
        return model.hidden_states(tokens, caches, positions=positions, attention=attention, **padding)

    def _choose(
        self, logprobs: bool, parameters: Any, rows: jax.Array, key: jax.Array, index: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Samples token number `index` of every sequence from rows [B, H].

        Returns the tokens, their log-probabilities float32 [B] (zeros unless asked for), and whether each is
        an end.
        """

        def key_of(sequence: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(key, sequence), index)

        keys = jax.vmap(key_of)(jnp.arange(rows.shape[0]))
        logits = nnx.merge(self._graph, parameters).logits(rows)
        tokens = sample(logits, keys, self.sampling)
        scores = jnp.zeros(tokens.shape, jnp.float32)
        if logprobs:
            chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
            scores = chosen - jax.nn.logsumexp(logits, axis=-1)
        return tokens, scores, jnp.isin(tokens, jnp.asarray(self.eos, jnp.int32))

    def _run(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        static: tuple[bool, ...] = (),
        donate: tuple[int, ...] = (),
    ) -> Any:
        """Calls the program compiled for arguments of these shapes; compile time is counted apart.

        `static` are leading arguments that the program is compiled for; `donate` does not count them.
        """
        key = (name, static, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[1:])))
        if key not in self._programs:
            started = time.perf_counter()
            program = jax.jit(functools.partial(function, *static), donate_argnums=donate)
            with self._place.context():
                self._programs[key] = program.lower(*arguments).compile()
            self._compile_seconds += time.perf_counter() - started
        return self._programs[key](*arguments)


def generate(
    model: LanguageModel,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    on_token: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Generation:
    """One run of a `Generator` with these options."""
    return Generator(model, config, **options)(prompts, max_new_tokens, on_token)


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


def _check_seed(seed: int) -> None:
    """Raises ConfigError unless a seed is one of those that all differ."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed = {seed!r}, allowed: 0..{2**32 - 1}")


def _check_geometry(
    caches: Sequence[AnyCache],
    config: ModelConfig,
    paged: Sequence[int],
    batch: int,
) -> None:
    """Raises ConfigError unless the caches are those of this model and cache kind, for a batch, and alive."""
    if len(caches) != config.num_layers:
        raise ConfigError(
            f"caches of {len(caches)} layers, the model {config.model_id!r} has {config.num_layers}"
        )
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(list(caches))):
        raise ConfigError("these caches were consumed by a later turn: go on from the newest Generation")
    geometry = config.cache_config()
    rows = (config.num_key_value_heads, config.head_dim)
    for layer, (cache, window) in enumerate(zip(caches, config.layer_windows)):
        if config.linear is not None and layer in config.linear_layers:
            wanted = f"the recurrent state of {config.linear}"
            fits = isinstance(cache, RecurrentState) and cache.fits(config.linear)
        elif layer in paged:
            wanted = f"INT2 pages of {geometry}"
            known = geometry, dataclasses.replace(geometry, window=window)  # all pages kept, or given up
            fits = isinstance(cache, LayerCache) and cache.config in known
        else:
            wanted = f"BF16 rows of {rows[0]} heads x {rows[1]}, window {window}"
            fits = isinstance(cache, DenseCache) and (cache.window, cache.key.shape[2:]) == (window, rows)
        if not fits:
            found = _described(cache)
            raise ConfigError(f"the cache of layer {layer} has {found}, this generator's has {wanted}")
        if cache.batch != batch:
            raise ConfigError(f"{batch} prompts for caches of {cache.batch} sequences")


def _described(cache: AnyCache) -> str:
    if isinstance(cache, LayerCache):
        return f"INT2 pages of {cache.config}"
    if isinstance(cache, RecurrentState):
        return f"a recurrent state {cache.memory.shape[1:]}"
    return f"BF16 rows of {cache.key.shape[2]} heads x {cache.key.shape[3]}, window {cache.window}"


def _check_room(caches: Sequence[AnyCache], lengths: np.ndarray) -> None:
    """Raises CacheFullError unless every layer can hold sequences of these lengths [B]."""
    for cache in caches:
        if isinstance(cache, LayerCache):
            room = cache.capacity
        elif isinstance(cache, RecurrentState):
            continue  # of fixed size
        elif cache.window is not None and cache.key.shape[1] >= cache.window:
            continue  # a whole ring goes round for ever
        else:
            room = cache.key.shape[1]
        if lengths.max() > room:
            sequence = int(lengths.argmax())
            raise CacheFullError(
                f"sequence {sequence} would have {int(lengths[sequence])} tokens, its caches hold {room}: "
                "give the first turn a larger capacity"
            )


def _is_token(token: Any, vocab_size: int) -> bool:
    """Whether something is the id of a token; 1.5 is none, and would be cut to 1 in an array."""
    try:
        return 0 <= operator.index(token) < vocab_size
    except TypeError:
        return False


def _check_prompts(
    prompts: Sequence[Sequence[int]],
    config: ModelConfig,
    max_new_tokens: int,
    stored: np.ndarray | None = None,
) -> np.ndarray:
    """Prompt lengths [B]; raises ConfigError naming the prompt. `stored` [B] tokens come before them."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens}, allowed: >= 1")
    if not prompts:
        raise ConfigError("no prompt given")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {index} has no tokens")
        foreign = [token for token in prompt if not _is_token(token, config.vocab_size)]
        if foreign:
            raise ConfigError(f"prompt {index} has token {foreign[0]!r}, allowed: 0..{config.vocab_size - 1}")
        before = 0 if stored is None else int(stored[index])
        if before + len(prompt) + max_new_tokens > config.max_positions:
            after = f" after {before} stored ones" if before else ""
            raise ConfigError(
                f"prompt {index} has {len(prompt)} tokens{after}: with {max_new_tokens} new ones more than "
                f"the {config.max_positions} positions of {config.model_id!r}"
            )
    return np.array([len(prompt) for prompt in prompts])
