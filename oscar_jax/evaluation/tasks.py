"""Questions with known answers about facts planted in a long text, in the style of RULER; no arrays here.

Every task plants sentences, lines or functions, made up from a seed, among filler, and asks for some of them:

    single     one fact of each kind, such as a gate code
    keys       numbers of many names, asked for a few: the other names are what one may mistake them for
    values     four numbers of one name, in four places
    tracking   VAR A = 52317, elsewhere VAR B = VAR A, elsewhere VAR C = VAR B: which variables are 52317?
    code       a function, to be written again line by line, among others like it

All facts of all tasks stand in one context and all questions are asked of it: a long text
is read once.
"""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence

import numpy as np

from ..core.errors import ConfigError

TASKS = ("single", "keys", "values", "tracking", "code")
MOST_QUESTIONS = 8  # per task and context
KEYS_PER_QUESTION, VALUES, HOPS, FUNCTIONS_PER_QUESTION = 4, 4, 2, 2
SPARE_TOKENS = 6  # that an answer may have beyond the words that are looked for

Encode = Callable[[str], list[int]]

_SINGLES = (
    "gate code of the north harbour",
    "weight of the bronze bell in grams",
    "telephone number of the night nurse",
    "registration number of the red tractor",
    "serial number of the station clock",
    "height of the glacier camp in millimetres",
    "inventory number of the glass violin",
    "combination of the miller's safe",
)
_FIRST = (
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lucid mild noble olive pale"
).split()
_SECOND = (
    "anchor basin candle dolphin engine falcon garden hammer island jacket kettle ladder marble needle "
    "orchid pepper quarry ribbon saddle timber"
).split()  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked after the text: `lead` begins the answer, which should hold all that is `expected`."""

    task: str
    text: str
    lead: str
    expected: tuple[str, ...]  # words for most tasks, lines for code
    depth: float  # mean share of the filler before the facts


@dataclasses.dataclass(frozen=True)
class _Fact:
    """Texts to be planted in this order, and what may be asked about them (None: they only mislead)."""

    texts: tuple[str, ...]
    question: Callable[[float], Question] | None


@dataclasses.dataclass(frozen=True)
class TaskContext:
    """A long text, `tokens` int32 [S], and what to ask about it."""

    tokens: np.ndarray
    questions: tuple[Question, ...]


def make_context(
    tasks: Sequence[str],
    count: int,
    filler: np.ndarray,
    encode: Encode,
    context: int,
    generator: random.Random,
    head: Sequence[int] = (),
) -> TaskContext:
    """`context` tokens, `head` first, with facts for `count` questions of each task at random even depths.

    `filler` int32 [F] is repeated if it is too short. Raises ConfigError if the facts do not fit.
    """
    facts = [fact for task in tasks for fact in _MAKERS[task](count, generator)]
    slots = sum(len(fact.texts) for fact in facts)
    order = [number for number, fact in enumerate(facts) for _ in fact.texts]
    generator.shuffle(order)
    waiting = [list(fact.texts) for fact in facts]
    planted = [np.asarray(encode(waiting[number].pop(0)), np.int32) for number in order]
    body = context - len(head) - sum(map(len, planted))
    if body < slots:
        raise ConfigError(
            f"a context of {context} tokens is too short for {count} questions of each of "
            f"{', '.join(tasks)}: their facts take {context - body - len(head)} tokens"
        )
    filler = np.resize(filler, body)
    cuts = [round(body * (slot + 0.5) / slots) for slot in range(slots)]
    parts, start = [np.asarray(head, np.int32)], 0
    for cut, text in zip(cuts, planted):
        parts += [filler[start:cut], text]
        start = cut
    parts.append(filler[start:])
    depths: list[list[float]] = [[] for _ in facts]
    for cut, number in zip(cuts, order):
        depths[number].append(cut / body)
    questions = tuple(
        fact.question(round(float(np.mean(depth)), 3))
        for fact, depth in zip(facts, depths)
        if fact.question is not None
    )
    return TaskContext(np.concatenate(parts).astype(np.int32), questions)


def answer_limit(question: Question, encode: Encode) -> int:
    """Tokens that an answer may have: what is expected, and a few words around it."""
    if question.task == "code":
        return len(encode("\n".join(question.expected))) + SPARE_TOKENS
    return sum(len(encode(f" {word},")) for word in question.expected) + SPARE_TOKENS


def score(question: Question, answer: str) -> float:
    """Share of what is expected that the answer holds, as in RULER; of code the lines before a mistake."""
    if question.task != "code":
        return float(
            np.mean([bool(re.search(rf"(?<!\w){word}(?!\w)", answer)) for word in question.expected])
        )
    right = 0
    for line, expected in zip(answer.split("\n"), question.expected):
        if line.rstrip() != expected:
            break
        right += 1
    return right / len(question.expected)


def made_up_text(generator: random.Random, sentences: int) -> str:
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


# The tasks.


def _numbers(count: int, generator: random.Random) -> list[str]:
    return [str(number) for number in generator.sample(range(100_000, 1_000_000), count)]


def _names(count: int, generator: random.Random) -> list[str]:
    pairs = [f"{first} {second}" for first in _FIRST for second in _SECOND]
    return generator.sample(pairs, count)


def _single(count: int, generator: random.Random) -> list[_Fact]:
    def fact(thing: str, number: str) -> _Fact:
        def ask(depth: float) -> Question:
            return Question("single", f"What is the {thing}?", f"The {thing} is", (number,), depth)

        return _Fact((f"\nRemember: the {thing} is {number}.\n",), ask)

    things = generator.sample(_SINGLES, count)
    return [fact(thing, number) for thing, number in zip(things, _numbers(count, generator))]


def _keys(count: int, generator: random.Random) -> list[_Fact]:
    def fact(index: int, name: str, number: str) -> _Fact:
        def ask(depth: float) -> Question:
            text, lead = f"What is the secret number of {name}?", f"The secret number of {name} is"
            return Question("keys", text, lead, (number,), depth)

        return _Fact((f"\nThe secret number of {name} is {number}.\n",), ask if index < count else None)

    total = KEYS_PER_QUESTION * count
    made = zip(range(total), _names(total, generator), _numbers(total, generator))
    return [fact(*of) for of in made]


def _values(count: int, generator: random.Random) -> list[_Fact]:
    def fact(name: str, numbers: list[str]) -> _Fact:
        def ask(depth: float) -> Question:
            text = f"What are the {VALUES} magic numbers of {name}?"
            return Question(
                "values", text, f"The {VALUES} magic numbers of {name} are", tuple(numbers), depth
            )

        return _Fact(tuple(f"\nOne magic number of {name} is {number}.\n" for number in numbers), ask)

    return [fact(name, _numbers(VALUES, generator)) for name in _names(count, generator)]


def _tracking(count: int, generator: random.Random) -> list[_Fact]:
    def fact(names: list[str], number: str) -> _Fact:
        def ask(depth: float) -> Question:
            text = f"Which {len(names)} variables have the value {number}?"
            lead = f"The {len(names)} variables with the value {number} are"
            return Question("tracking", text, lead, tuple(names), depth)

        values = [number, *(f"VAR {name}" for name in names[:-1])]
        return _Fact(tuple(f"\nVAR {name} = {value}\n" for name, value in zip(names, values)), ask)

    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    length = HOPS + 1
    names: list[str] = []
    while len(names) < count * length:
        name = "".join(generator.choices(letters, k=5))
        names += [name] if name not in names else []
    chains = [names[start : start + length] for start in range(0, len(names), length)]
    return [fact(chain, number) for chain, number in zip(chains, _numbers(count, generator))]


def _code(count: int, generator: random.Random) -> list[_Fact]:
    def fact(index: int, name: str) -> _Fact:
        other = generator.choice(("total", "limit", "offset", "width"))
        head = f"def {name}(value, {other}):"
        numbers = [str(generator.randrange(2, 1000)) for _ in range(4)]
        sign, compare = generator.choice("+-*"), generator.choice(("<", ">", "!="))
        lines = (
            f"    step = value % {numbers[0]} {sign} {other}",
            f"    if step {compare} {numbers[1]}:",
            f"        {other} += step * {numbers[2]}",
            f"    return {other} - {numbers[3]}",
        )

        def ask(depth: float) -> Question:
            text = f"Write the function {name} again, exactly as it stands in the text."
            return Question("code", text, f"```python\n{head}\n", lines, depth)

        return _Fact(("\n" + "\n".join((head, *lines)) + "\n",), ask if index < count else None)

    total = FUNCTIONS_PER_QUESTION * count
    return [fact(index, name.replace(" ", "_")) for index, name in enumerate(_names(total, generator))]


_MAKERS = {"single": _single, "keys": _keys, "values": _values, "tracking": _tracking, "code": _code}
