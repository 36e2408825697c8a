"""Retrieval of sentences planted in a long text, each method reading it as it would in decoding."""

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError
from ..models.linear_attention import RecurrentState
from ..models.weights import host_array
from ..quantize import round_to_bfloat16
from .blockwise import Partial, attend_own, attend_rows, finish
from .stepper import Method, Runner, recipes_of
from .streams import TokenStream

# Retrieval.

_NAMES = (
    "amber aspen basil birch cedar clover coral crimson daisy ember falcon fern garnet hazel heron "
    "indigo iris jasper juniper kestrel laurel lilac linden lotus magnolia maple marigold meadow moss "
    "nettle oak olive opal orchid osprey pearl plover poppy quartz raven robin rowan ruby saffron sage "
    "sparrow thistle topaz tulip violet walnut willow"
).split()


@dataclasses.dataclass(frozen=True)
class NeedleContext:
    """A long text, `tokens` int32 [S], with sentences planted in it that give names their numbers."""

    tokens: np.ndarray
    names: list[str]
    numbers: list[str]
    depths: list[float]  # share of the context before the needle


def make_needle_context(
    filler: np.ndarray,
    encode: Callable[[str], list[int]],
    context: int,
    needles: int,
    generator: random.Random,
    bos: int | None,
) -> NeedleContext:
    """Plants random keys and values at evenly spaced depths of `filler` token ids, repeated if too short."""
    if not 1 <= needles <= len(_NAMES):
        raise ConfigError(f"needles = {needles}, allowed: 1..{len(_NAMES)}")
    names: list[str] = generator.sample(_NAMES, needles)
    numbers = [str(generator.randrange(10_000, 100_000)) for _ in names]
    planted = [encode(needle_sentence(name, number)) for name, number in zip(names, numbers)]
    body = context - sum(map(len, planted)) - (bos is not None)
    if body < needles:
        raise ConfigError(f"context = {context} is too short for {needles} needles")
    filler = np.resize(filler, body)
    cuts = [round(body * (i + 0.5) / needles) for i in range(needles)]
    parts: list[np.ndarray] = [] if bos is None else [np.asarray([bos])]
    depths, start = [], 0
    for cut, sentence in zip(cuts, planted):
        parts += [filler[start:cut], np.asarray(sentence)]
        depths.append(round(cut / body, 3))
        start = cut
    parts.append(filler[start:])
    return NeedleContext(np.concatenate(parts).astype(np.int32), names, numbers, depths)


def needle_sentence(name: str, number: str) -> str:
    """The planted sentence."""
    return f"\nRemember this: the secret number of {name} is {number}.\n"


def needle_question(name: str) -> str:
    """What stands at the end of the text; the model has to go on with the number."""
    return f"\nNow recall. The secret number of {name} is"


def make_asker(runner: Runner) -> Callable[..., jax.Array]:
    """Compiled ask(state, rows, stored, questions int32 [Q, T], lengths int32 [Q], answer): greedy answers.

    `rows` are the `stored` tokens of the context, one row of the batch per method; all questions continue
    from them at once and see nothing of each other. Questions are padded on the right. Returns int32
    [M, Q, answer].
    """
    config = runner.config

    @functools.partial(jax.jit, static_argnames=("answer",))
    def ask(state, rows, stored, questions, lengths, answer: int):
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
            """Tokens [Q*M, T] at `places` int32 [Q, T] after the context -> next tokens' logits, tails.

            `counts` int32 [Q] (or one for all) of the T are real.
            """
            steps = places.shape[1]
            tiled = jnp.tile(places, (methods, 1))  # [Q*M, T]
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
                before = attend_rows(
                    query.reshape(methods, count * steps, *query.shape[2:]),
                    rows[layer],
                    stored + places.reshape(-1),
                    stored,
                    config=config.cache_config(),
                    softmax_scale=config.attention_scale,
                    sliding_window=window,
                    softcap=config.attention_softcap,
                )
                return finish([_per_question(before, count), own], **sinks), state

            counts = jnp.tile(jnp.broadcast_to(counts, count), methods)
            padding = {"new_lengths": counts} if config.linear_layers else {}
            return decoder.hidden_states(
                tokens, tails, positions=stored + tiled, attention=attention, **padding
            )

        def choose(hidden):  # [Q*M, H] -> int32 [Q*M]
            return jnp.argmax(decoder.logits(hidden), axis=-1).astype(jnp.int32)

        places = jnp.broadcast_to(jnp.arange(longest), (count, longest))
        hidden, tails = advance(jnp.tile(questions, (methods, 1)), places, tails, lengths)
        last = jnp.tile(lengths, methods) - 1
        first = choose(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])

        def step(carry, index):
            tokens, tails = carry
            hidden, tails = advance(tokens[:, None], (lengths + index)[:, None], tails, 1)
            return (choose(hidden[:, 0]), tails), tokens

        _, tokens = jax.lax.scan(step, (first, tails), jnp.arange(answer))
        return tokens.T.reshape(methods, count, answer)

    return ask


def _per_question(part: Partial, count: int) -> Partial:
    """[M, K, G, Q*T, ...] -> [M*Q, K, G, T, ...]."""

    def split(array: jax.Array) -> jax.Array:
        methods, heads, group, tokens, *rest = array.shape
        split = array.reshape(methods, heads, group, count, tokens // count, *rest)
        return jnp.moveaxis(split, 3, 1).reshape(methods * count, heads, group, tokens // count, *rest)

    return jax.tree.map(split, part)


def retrieve(
    runner: Runner,
    ask: Callable[..., jax.Array],
    methods: Sequence[Method],
    planted: NeedleContext,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> list[list[bool]]:
    """Asks for every needle by greedy decoding with every method; [methods][needles].

    The context is read once, by all methods side by side, and shared by all questions.
    """
    context = len(planted.tokens)
    recipes = recipes_of(methods, range(runner.config.num_layers))
    rows = runner.allocate(len(methods), -(-context // chunk) * chunk, list(recipes))
    for start in range(0, context, chunk):
        part = planted.tokens[start : start + chunk]
        padded = np.zeros((len(methods), chunk), np.int32)
        padded[:, : len(part)] = part
        _, rows, _ = runner.step(runner.state, padded, start, rows, recipes, count=len(part))
        jax.block_until_ready(rows)
        on_chunk(len(part))
    asked = [encode(needle_question(name)) for name in planted.names]
    lengths = np.asarray([len(question) for question in asked], np.int32)
    questions = np.zeros((len(asked), lengths.max()), np.int32)
    for row, question in zip(questions, asked):
        row[: len(question)] = question
    longest = max(len(encode(" " + number)) for number in planted.numbers) + 2
    answers = host_array(ask(runner.state, rows, context, questions, lengths, answer=longest))
    return [
        [
            decode(answer.tolist()).strip().startswith(number)
            for answer, number in zip(by_needle, planted.numbers)
        ]
        for by_needle in answers
    ]


def run_needles(
    runner: Runner,
    methods: Sequence[Method],
    streams: Sequence[TokenStream],
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    context: int,
    chunk: int,
    needles: int,
    trials: int,
    seed: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
    on_trial: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """Retrieval of planted numbers by every method in the same contexts, by depth; see `retrieve`.

    Filler is the given streams' text in turn, or made-up sentences when there is none. `on_trial(document)`
    is called after every context with the figures so far.
    """
    generator = random.Random(seed)
    fillers = [stream.tokens for stream in streams]
    if not fillers:
        fillers = [np.asarray(encode(_filler_text(generator, context)), np.int32)]
    config = runner.config
    planted = [
        make_needle_context(
            fillers[trial % len(fillers)], encode, context, needles, generator, config.bos_token_id
        )
        for trial in range(trials)
    ]
    ask = make_asker(runner)
    found: list[list[list[bool]]] = []  # [trials][methods][needles]
    document: dict[str, Any] = {}
    for text in planted:
        found.append(retrieve(runner, ask, methods, text, encode, decode, chunk=chunk, on_chunk=on_chunk))
        by_depth = np.mean(found, axis=0)
        document = {
            "needles": needles,
            "trials": len(found),
            "seed": seed,
            "filler": [{"label": s.label, "digest": s.digest} for s in streams] or "made-up sentences",
            "depths": planted[0].depths,
            "methods": [
                {
                    "method": method.name,
                    "bits_per_element": method.bits,
                    "retrieved": float(shares.mean()),
                    "by_depth": shares.tolist(),
                }
                for method, shares in zip(methods, by_depth)
            ],
        }
        on_trial(document)
    return document


def needle_table(document: Mapping[str, Any]) -> list[str]:
    """The retrieval results as Markdown lines."""
    depths = document["depths"]
    return [
        f"# Retrieval, {document['model']}",
        "",
        f"{document['needles']} numbers planted in each of {document['trials']} contexts of "
        f"{document['context']} tokens, greedy decoding, {document['dtype']} model.",
        "",
        "| method | bits | retrieved | " + " | ".join(f"at {100 * d:.0f} %" for d in depths) + " |",
        "|---" * (len(depths) + 3) + "|",
        *(
            f"| {row['method']} | {row['bits_per_element']:.4g} | {100 * row['retrieved']:.0f} % | "
            + " | ".join(f"{100 * share:.0f} %" for share in row["by_depth"])
            + " |"
            for row in document["methods"]
        ),
    ]


def _filler_text(generator: random.Random, sentences: int) -> str:
    """Plain sentences about nothing, as many as asked."""
    people = ("The baker", "A neighbour", "The old teacher", "Her cousin", "The gardener", "A traveller")
    verbs = ("walked to", "wrote about", "remembered", "painted", "asked about", "drove past")
    things = (
        "the harbour",
        "a small bridge",
        "the quiet library",
        "an empty market",
        "the hill",
        "a red barn",
    )
    times = (
        "in the morning",
        "after lunch",
        "before it rained",
        "on a Sunday",
        "late at night",
        "last winter",
    )
    return " ".join(
        f"{generator.choice(people)} {generator.choice(verbs)} {generator.choice(things)} "
        f"{generator.choice(times)}."
        for _ in range(sentences)
    )
