"""Retrieval of sentences planted in a long text, through each method's real cache."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import ConfigError
from .stepper import Method, Runner, allocate_caches
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


def retrieve(
    runner: Runner,
    method: Method,
    planted: NeedleContext,
    encode: Callable[[str], list[int]],
    decode: Callable[[Sequence[int]], str],
    *,
    chunk: int,
) -> list[bool]:
    """Asks for every needle by greedy decoding through the method's real cache; one bool per needle.

    The context is prefilled once; every question continues from that same cache.
    """
    questions = [encode(needle_question(name)) for name in planted.names]
    answer_length = max(len(encode(" " + number)) for number in planted.numbers) + 2
    longest = len(planted.tokens) + max(map(len, questions)) + answer_length
    caches = allocate_caches(method, runner.config, longest)
    rotations = dict(method.rotations)
    for start in range(0, len(planted.tokens), chunk):
        part = planted.tokens[start : start + chunk]
        padded = np.zeros((1, chunk), np.int32)
        padded[0, : len(part)] = part
        new_lengths = jnp.asarray([len(part)], jnp.int32)
        _, caches, _ = runner.step(runner.state, padded, caches, new_lengths, rotations)
    one = jnp.ones(1, jnp.int32)
    found = []
    for question, number in zip(questions, planted.numbers):
        branch = jax.tree.map(jnp.copy, caches)  # steps consume the cache they are given
        answer: list[int] = []
        for token in question:
            hidden, branch, _ = runner.step(
                runner.state, np.full((1, 1), token, np.int32), branch, one, rotations
            )
        for _ in range(answer_length):
            answer.append(int(runner.next_token(runner.state, hidden[:, 0])[0]))
            token = np.full((1, 1), answer[-1], np.int32)
            hidden, branch, _ = runner.step(runner.state, token, branch, one, rotations)
        found.append(decode(answer).strip().startswith(number))
    return found


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
    on_context: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Retrieval of planted numbers by every method in the same contexts, by depth; see `retrieve`.

    Filler is the given streams' text in turn, or made-up sentences when there is none.
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
    found: dict[str, list[list[bool]]] = {method.name: [] for method in methods}
    for text in planted:
        for method in methods:
            found[method.name].append(retrieve(runner, method, text, encode, decode, chunk=chunk))
            on_context()
    return {
        "needles": needles,
        "trials": trials,
        "seed": seed,
        "filler": [{"label": s.label, "digest": s.digest} for s in streams] or "made-up sentences",
        "depths": planted[0].depths,
        "methods": [
            {
                "method": method.name,
                "bits_per_element": method.bits,
                "retrieved": float(np.mean(found[method.name])),
                "by_depth": np.mean(found[method.name], axis=0).tolist(),
            }
            for method in methods
        ],
    }


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
