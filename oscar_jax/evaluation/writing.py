"""Long greedy texts from one prompt: every method writes its own, the BF16 model judges all of them.

A text is made as decoding would make it: a page that leaves the recent window is read from two bits from then
on, so that errors add up as they do in use.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from ..models.weights import host_array
from ..quantize import round_to_bfloat16
from .asking import read_text
from .blockwise import StoredRows, attend_few, finish, write_rows
from .stepper import Method, ModelRows, Runner, make_token_judge, padding_of, recipes_of, restore_rows

BLOCK = fmt.PAGE_TOKENS  # tokens of one dispatch: those of a page, which is restored at its end


@dataclasses.dataclass(frozen=True)
class Writer:
    """A model ready to write; build it with `make_writer`."""

    runner: Runner
    first: Callable[..., jax.Array]
    write: Callable[..., tuple[jax.Array, jax.Array, ModelRows]]
    judge: Callable[..., tuple[jax.Array, jax.Array]]


def make_writer(runner: Runner) -> Writer:
    """Compiled steps of a `Writer`.

    first(state, hidden [M, H]): the likeliest tokens int32 [M]. write(state, rows, tokens int32 [M], start,
    recipes): `tokens` stand at position `start`, a multiple of BLOCK; returns the BLOCK tokens from there on,
    int32 [M, BLOCK], the one after them [M], and the rows (the old ones are consumed). judge: that of
    `make_token_judge`. End tokens are never chosen.
    """
    config = runner.config
    ends = jnp.asarray(config.eos_token_ids, jnp.int32)

    def choose(decoder, hidden):
        logits = decoder.logits(hidden).at[:, ends].set(-jnp.inf)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    @jax.jit
    def first(state, hidden):
        return choose(runner.merge(state), hidden)

    @functools.partial(jax.jit, donate_argnums=(1,))
    def write(state, rows, tokens, start, recipes):
        decoder = runner.merge(state)

        def advance(carry, index):
            tokens, rows = carry
            position = start + index

            def attention(
                layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any, **sinks: Any
            ) -> tuple[jax.Array, StoredRows]:
                exact = write_rows(state, position, round_to_bfloat16(key), round_to_bfloat16(value), None)
                stored = dataclasses.replace(state, key=exact.key, value=exact.value)
                parts = attend_few(
                    query,
                    stored,
                    position[None],
                    position + 1,
                    apart=0,
                    config=config.cache_config(),
                    softmax_scale=config.attention_scale,
                    sliding_window=config.layer_windows[layer],
                    softcap=config.attention_softcap,
                )
                return finish(parts, **sinks), stored

            hidden, rows = decoder.hidden_states(
                tokens[:, None],
                rows,
                positions=jnp.broadcast_to(position, (tokens.shape[0], 1)),
                attention=attention,
                **padding_of(config, tokens[:, None], 1),
            )
            return (choose(decoder, hidden[:, 0]), rows), tokens

        (tokens, rows), written = jax.lax.scan(advance, (tokens, rows), jnp.arange(BLOCK))
        # No query reads these from two bits before they are BLOCK tokens old.
        rows = list(rows)
        for layer, methods in recipes.items():
            key, value = (
                jax.lax.dynamic_slice_in_dim(store, start, BLOCK, axis=2).swapaxes(1, 2)
                for store in (rows[layer].key, rows[layer].value)
            )
            rows[layer] = write_rows(rows[layer], start, key, value, restore_rows(key, value, methods))
        return written.T, tokens, rows

    return Writer(runner, first, write, make_token_judge(runner))


def write_texts(
    writer: Writer,
    methods: Sequence[Method],
    prompt: np.ndarray,
    new_tokens: int,
    *,
    capacity: int,
    chunk: int,
    others: Sequence[np.ndarray] = (),
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> tuple[np.ndarray, np.ndarray]:
    """What every method writes after `prompt` int32 [S], and what BF16, methods[0], thinks of it.

    S and `new_tokens` are multiples of BLOCK; `others` int32 [new_tokens] are texts made elsewhere, judged
    after those of the methods. Returns tokens int32 [M, new_tokens] and, float32 of the same shape, their
    negative log-likelihoods under the BF16 model that has read the prompt and them. `on_tokens` counts tokens
    read, written and judged. Raises ConfigError.
    """
    for name, number in (("prompt", len(prompt)), ("new_tokens", new_tokens)):
        if number % BLOCK or not number:
            raise ConfigError(f"{name} = {number} tokens, allowed: multiples of {BLOCK}")
    runner = writer.runner
    recipes = recipes_of(methods, range(runner.config.num_layers))
    last, rows = read_text(runner, methods, prompt, capacity=capacity, chunk=chunk, on_chunk=on_tokens)
    tokens = writer.first(runner.state, last)
    judged_rows = _exact_rows(rows, len(methods) + len(others))
    blocks: list[np.ndarray] = []
    for start in range(len(prompt), len(prompt) + new_tokens, BLOCK):
        block, tokens, rows = writer.write(runner.state, rows, tokens, start, recipes)
        blocks.append(host_array(block))
        on_tokens(BLOCK)
    del rows
    written = np.concatenate([np.concatenate(blocks, axis=1), *(other[None] for other in others)])
    likelihoods = []
    hidden = jnp.repeat(last[:1], len(written), axis=0)[:, None]  # what predicts the first new token
    for start in range(0, new_tokens, BLOCK):
        block = written[:, start : start + BLOCK]
        here, judged_rows, _ = runner.step(
            runner.state, block, len(prompt) + start, judged_rows, {}, count=BLOCK
        )
        before = jnp.concatenate([hidden, here[:, :-1]], axis=1)
        likelihoods.append(host_array(writer.judge(runner.state, before, block)[0]))
        hidden = here[:, -1:]
        on_tokens(BLOCK)
    return written, np.concatenate(likelihoods, axis=1)


@functools.partial(jax.jit, static_argnames=("count",))
def _exact_rows(rows: ModelRows, count: int) -> ModelRows:
    """What BF16, the first row of the batch, has stored: `count` copies, without restored ones."""

    def spread(leaf: jax.Array) -> jax.Array:
        return jnp.repeat(leaf[:1], count, axis=0)

    return [
        StoredRows(spread(layer.key), spread(layer.value), None, None)
        if isinstance(layer, StoredRows)
        else jax.tree.map(spread, layer)
        for layer in rows
    ]


def agreement(written: np.ndarray) -> np.ndarray:
    """How many tokens of each row int32 [M, T] are those of the first row before one differs: int [M]."""
    equal = np.cumprod(written == written[:1], axis=1)
    return equal.sum(axis=1)


def variety(tokens: np.ndarray, length: int = 4) -> float:
    """Share of the runs of `length` tokens that are new: near 0 for a text that goes in circles."""
    runs = {tuple(tokens[start : start + length].tolist()) for start in range(len(tokens) - length + 1)}
    return len(runs) / max(1, len(tokens) - length + 1)
