"""Greedy answers to many questions about one long text, each method reading it as it would in decoding."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..models.linear_attention import RecurrentState
from ..quantize import round_to_bfloat16
from .blockwise import Partial, attend_few, attend_own, attend_rows, finish
from .stepper import Method, ModelRows, Runner, recipes_of


def read_text(
    runner: Runner,
    methods: Sequence[Method],
    tokens: np.ndarray,
    *,
    capacity: int,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> tuple[jax.Array, ModelRows]:
    """Takes int32 [S] tokens through all methods side by side, once.

    Returns the last hidden row of each, [M, H], and the rows of all layers, with room for `capacity` tokens
    rounded up to whole chunks: equal capacities share compiled programs.
    """
    recipes = recipes_of(methods, range(runner.config.num_layers))
    rows = runner.allocate(len(methods), -(-max(capacity, len(tokens)) // chunk) * chunk, list(recipes))
    last = None
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.zeros((len(methods), chunk), np.int32)
        padded[:, : len(part)] = part
        hidden, rows, _ = runner.step(runner.state, padded, start, rows, recipes, count=len(part))
        last = hidden[:, len(part) - 1]
        jax.block_until_ready(last)
        on_chunk(len(part))
    assert last is not None
    return last, rows


def make_asker(runner: Runner) -> Callable[..., jax.Array]:
    """Compiled ask(state, rows, stored, questions [Q, T], lengths [Q], limits [Q], answer): greedy answers.

    `rows` are the `stored` tokens of the context, one row of the batch per method; all questions continue
    from them at once and see nothing of each other. Questions, int32, are padded on the right. Returns int32
    [M, Q, answer]; what stands past `limits` means nothing, and no token is made past the largest of them.
    """
    config = runner.config

    @functools.partial(jax.jit, static_argnames=("answer",))
    def ask(state, rows, stored, questions, lengths, limits, answer: int):
        count, longest = questions.shape
        methods = rows[config.attention_layers[0]].key.shape[0]
        sequences = methods * count
        shape = (sequences, longest + answer, config.num_key_value_heads, config.head_dim)
        tails = [
            jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), layer)
            if isinstance(layer, RecurrentState)
            else (jnp.zeros(shape, jnp.bfloat16),) * 2
            for layer in rows
        ]
        decoder = runner.merge(state)
        slots = jnp.arange(shape[1])

        def advance(tokens, places, tails, counts):
            """Tokens [M*Q, T] at `places` int32 [Q, T] after the context -> next tokens' rows, tails.

            `counts` int32 [Q] (or one for all) of the T are real.
            """
            steps = places.shape[1]
            tiled = jnp.tile(places, (methods, 1))  # [M*Q, T]
            at = jnp.arange(sequences)[:, None]

            def attention(
                layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any, **sinks: Any
            ) -> tuple[jax.Array, Any]:
                window = config.layer_windows[layer]
                state = tuple(
                    store.at[at, tiled].set(round_to_bfloat16(new)) for store, new in zip(state, (key, value))
                )
                mask = slots <= tiled[..., None]
                if window is not None:
                    mask &= slots > tiled[..., None] - window
                own = attend_own(
                    query, state[0], state[1], mask, config.attention_scale, config.attention_softcap
                )
                context = (
                    query.reshape(methods, count * steps, *query.shape[2:]),
                    rows[layer],
                    stored + places.reshape(-1),
                    stored,
                )
                options: dict[str, Any] = {
                    "config": config.cache_config(),
                    "softmax_scale": config.attention_scale,
                    "sliding_window": window,
                    "softcap": config.attention_softcap,
                }
                if steps == 1:  # questions of all lengths up to the longest have made equally many tokens
                    before = attend_few(*context, apart=longest, **options)
                else:
                    before = [attend_rows(*context, **options)]
                return finish([*(_per_question(part, count) for part in before), own], **sinks), state

            counts = jnp.tile(jnp.broadcast_to(counts, count), methods)
            padding = {"new_lengths": counts} if config.linear_layers else {}
            return decoder.hidden_states(
                tokens, tails, positions=stored + tiled, attention=attention, **padding
            )

        def choose(hidden):  # [M*Q, H] -> int32 [M*Q]
            return jnp.argmax(decoder.logits(hidden), axis=-1).astype(jnp.int32)

        places = jnp.broadcast_to(jnp.arange(longest), (count, longest))
        hidden, tails = advance(jnp.tile(questions, (methods, 1)), places, tails, lengths)
        last = jnp.tile(lengths, methods) - 1
        first = choose(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
        answers = jnp.zeros((sequences, answer), jnp.int32).at[:, 0].set(first)

        def step(carry):
            index, answers, tails = carry
            tokens = answers[:, index]
            hidden, tails = advance(tokens[:, None], (lengths + index)[:, None], tails, 1)
            return index + 1, answers.at[:, index + 1].set(choose(hidden[:, 0])), tails

        most = jnp.minimum(limits.max(), answer) - 1
        _, answers, _ = jax.lax.while_loop(lambda carry: carry[0] < most, step, (0, answers, tails))
        return answers.reshape(methods, count, answer)

    return ask


def _per_question(part: Partial, count: int) -> Partial:
    """[M, K, G, Q*T, ...] -> [M*Q, K, G, T, ...]."""

    def split(array: jax.Array) -> jax.Array:
        methods, heads, group, tokens, *rest = array.shape
        split = array.reshape(methods, heads, group, count, tokens // count, *rest)
        return jnp.moveaxis(split, 3, 1).reshape(methods * count, heads, group, tokens // count, *rest)

    return jax.tree.map(split, part)
