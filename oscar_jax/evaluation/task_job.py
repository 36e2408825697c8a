"""Tasks: what a model still can do when its history is read from two bits, at chosen lengths.

All methods read one context side by side, as in `job.py`: every query takes from INT2 exactly the tokens that
it would in decoding, token by token. All questions about it are then answered greedily as one batch on the
same stored rows. Contexts and questions follow from the seed; a context that is done is saved at once, and an
interrupted run goes on after it.
"""

import dataclasses
import json
import os
import pathlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..core.errors import ConfigError
from ..models.weights import host_array
from .asking import make_asker, read_text
from .fidelity import page_bits
from .job import Prepared, prepare, split_methods
from .paged import PAGED, Paged
from .stepper import Method, Runner, make_runner
from .streams import TextError, TokenStream, check_source, read_stream
from .subject import Progress, Subject, no_progress
from .task_report import record_line, save_task_plots, save_tasks, summary
from .tasks import (
    MOST_QUESTIONS,
    TASKS,
    Question,
    TaskContext,
    answer_limit,
    made_up_text,
    make_context,
    score,
)
from .writing import BLOCK, Writer, agreement, make_writer, variety, write_texts

WRITING = "writing"
TASK_METHODS = ("bf16", "int2", PAGED, "published", "hadamard")
RESULTS = "tasks.json"
INSTRUCTION = "Remember the numbers, variables and functions in this text: questions about them follow.\n\n"
TOKENS_PER_QUESTION = 1024  # of context, by default


@dataclasses.dataclass(frozen=True)
class _Asked:
    """A question as token ids, and how many the answer may have."""

    question: Question
    tokens: list[int]
    limit: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Every context of a run with its questions; `longest` and `answer` tokens are kept free after it."""

    contexts: dict[tuple[int, int], tuple[TaskContext, list[_Asked]]]  # (length, trial)
    longest: int
    answer: int
    count: int  # questions of a batch


def evaluate_tasks(
    model: Subject | str | os.PathLike[str],
    texts: Sequence[Sequence[str]],
    out: str | os.PathLike[str],
    *,
    rotations: str | os.PathLike[str] | None = None,
    lengths: Sequence[int] = (4096,),
    tasks: Sequence[str] = TASKS,
    methods: Sequence[str] = TASK_METHODS,
    questions: int = 0,
    trials: int = 4,
    seed: int = 0,
    new_tokens: int = 1024,
    chat: bool = False,
    chunk: int | None = None,
    field: str | None = None,
    all_layers: bool = False,
    dtype: str | None = None,
    restart: bool = False,
    progress: Progress = no_progress,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Accuracy of every method at every length; returns the report and writes it, with plots, into `out`.

    `tasks` are names of `tasks.TASKS`, or "writing": `new_tokens` greedy tokens after a text of each length,
    judged by the BF16 model. Each of `trials` contexts per length has `questions` of every task (0: one per
    1024 tokens, at most 8). `texts` are the filler, or what is written on (none: made-up sentences); with
    `chat` the tokenizer's template surrounds context and question. `restart` forgets an interrupted run in
    `out`; `say` is told of every context that is done. Raises ConfigError, TextError or CheckpointError
    before anything runs.
    """
    lengths, tasks = sorted(set(lengths)), list(dict.fromkeys(tasks))
    for task in tasks:
        if task not in (*TASKS, WRITING):
            raise ConfigError(f"unknown task {task!r}, allowed: {', '.join((*TASKS, WRITING))}")
    if not tasks or not lengths:
        raise ConfigError(f"tasks = {tasks}, lengths = {lengths}: at least one of each is needed")
    for name, number, least, most in (
        ("questions", questions, 0, MOST_QUESTIONS),
        ("trials", trials, 1, 1000),
        ("new_tokens", new_tokens, BLOCK, 1 << 20),
    ):
        if not least <= number <= most:
            raise ConfigError(f"{name} = {number}, allowed: {least}..{most}")
    for source in (source for sources in texts for source in sources):
        check_source(source)
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)  # before anything expensive: a file may stand there
    stepped = [name for name in methods if name != PAGED] or ["bf16"]
    ready = prepare(model, [], rotations, lengths[-1], stepped, 1, chunk, field, all_layers, dtype)
    subject, config = ready.subject, ready.subject.config
    paged = Paged(subject, ready.rotation_set, all_layers=all_layers) if PAGED in methods else None
    streams = [read_stream(sources, subject.encode, trials * lengths[-1], field) for sources in texts]
    written = -(-new_tokens // BLOCK) * BLOCK if WRITING in tasks else 0
    for length in lengths:
        if length + written > config.max_positions:
            raise ConfigError(
                f"length = {length} and {written} new tokens, the model has {config.max_positions} positions"
            )
    asked = [task for task in tasks if task != WRITING]
    plan = _plan(subject, asked, lengths, streams, questions, trials, seed, chat)
    prompts = _prompts(subject, lengths if written else [], streams, trials, seed)
    document = ready.about | {
        "lengths": lengths,
        "tasks": tasks,
        "trials": trials,
        "questions": questions or f"one per {TOKENS_PER_QUESTION} tokens, at most {MOST_QUESTIONS}",
        "new_tokens": written,
        "seed": seed,
        "chat": chat,
        "filler": [{"label": s.label, "digest": s.digest} for s in streams] or "made-up sentences",
        "methods": [
            {"method": method.name, "basis": method.basis, "bits_per_element": method.bits}
            for method in _with_cache(ready, methods)
        ],
    }
    records = [] if restart else _earlier(out / RESULTS, document)
    done = {(record["kind"], record["length"], record["trial"]) for record in records}
    total = sum(trials * length for length in lengths) * bool(asked)
    total += sum(trials * (length + 2 * written) for length in lengths) * bool(written)

    def save(record: dict[str, Any]) -> None:
        records.append(record)
        if jax.process_index() == 0:  # of several hosts the first one writes
            save_tasks(document | summary(document, records), out, RESULTS)
        say(record_line(record))

    def count(tokens: int) -> None:
        progress("tasks", tokens, total)

    with subject.context():
        runner = make_runner(subject.model, config)
        ask, writer = make_asker(runner), make_writer(runner)
        for length in lengths:
            for trial in range(trials):
                where = {"length": length, "trial": trial}
                if asked and ("questions", length, trial) in done:
                    count(length)
                elif asked:
                    found = _answer(ready, paged, runner, ask, plan, length, trial, lengths[-1], count)
                    save({"kind": "questions", **where, "questions": found})
                if written and (WRITING, length, trial) in done:
                    count(length + 2 * written)
                elif written:
                    capacity = lengths[-1] + written
                    prompt = prompts[length, trial]
                    texts_written = _write(ready, paged, writer, prompt, written, capacity, count)
                    save({"kind": WRITING, **where, "texts": texts_written})
    document |= summary(document, records)
    if jax.process_index() == 0:
        save_tasks(document, out, RESULTS)
        save_task_plots(document, out)
    return document


def _with_cache(ready: Prepared, names: Sequence[str]) -> list[Method]:
    """The methods to be shown: those that are stepped, the real cache beside the set it holds."""
    found = list(ready.methods)
    if PAGED in names and ready.rotation_set is not None:
        bits = page_bits(ready.subject.config.head_dim)
        served = Method(PAGED, "int2", {}, bits, ready.rotation_set.header.basis)
        places = [place for place, method in enumerate(found, 1) if method.name == "int2"]
        found.insert(places[0] if places else len(found), served)
    return found


def _earlier(path: pathlib.Path, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of an interrupted run of the same settings; ConfigError if the file is of others."""
    if not path.exists():
        return []
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(f"{path} is not JSON: --restart writes it anew") from None
    apart = ("created", "versions", "device", "chunk")
    wanted = json.loads(json.dumps(document))
    different = [name for name in wanted if name not in apart and stored.get(name) != wanted[name]]
    if different:
        raise ConfigError(
            f"{path} is of a run with other settings ({', '.join(different)}): --restart forgets it, or name "
            "another --out"
        )
    return list(stored["records"])


def _filler(streams: Sequence[TokenStream], number: int, length: int) -> np.ndarray:
    """`length` ids of the stream whose turn it is, another part of it each time as long as it lasts."""
    stream = streams[number % len(streams)]
    start = number // len(streams) * length % len(stream.tokens)
    return np.resize(np.roll(stream.tokens, -start), length)


def _plan(
    subject: Subject,
    tasks: Sequence[str],
    lengths: Sequence[int],
    streams: Sequence[TokenStream],
    questions: int,
    trials: int,
    seed: int,
    chat: bool,
) -> _Plan:
    """Makes all contexts, each with room for the longest question and answer of the run."""
    head, tail = subject.chat("\0").split("\0") if chat else ("", "\nAnswer: ")
    bos = subject.config.bos_token_id
    start = subject.encode(head + INSTRUCTION)
    if not chat and bos is not None:  # a template says itself whether a text starts with a special token
        start = [bos, *start]

    def made(length: int, trial: int, room: int) -> tuple[TaskContext, list[_Asked]]:
        generator = random.Random(f"{seed} {length} {trial}")
        if streams:
            filler = _filler(streams, trial, length)
        else:
            filler = np.asarray(subject.encode(made_up_text(generator, length // 8)), np.int32)
        each = questions or min(MOST_QUESTIONS, max(1, length // TOKENS_PER_QUESTION))
        context = make_context(tasks, each, filler, subject.encode, length - room, generator, start)
        asked = [
            _Asked(
                question,
                subject.encode(f"\n\nQuestion: {question.text}{tail}{question.lead}"),
                answer_limit(question, subject.encode),
            )
            for question in context.questions
        ]
        return context, asked

    cases = [(length, trial) for length in lengths for trial in range(trials)] if tasks else []
    # Questions do not depend on the room left for them: so it is found first.
    drafts = [made(*case, 0)[1] for case in cases]
    most = [max((pick(a) for draft in drafts for a in draft), default=1) for pick in (_length, _limit)]
    longest, answer = (-(-number // 16) * 16 for number in most)  # programs are compiled for these sizes
    count = max(map(len, drafts), default=0)
    contexts = {case: made(*case, longest + answer) for case in cases}
    return _Plan(contexts, longest, answer, count)


def _length(asked: _Asked) -> int:
    return len(asked.tokens)


def _limit(asked: _Asked) -> int:
    return asked.limit


def _prompts(
    subject: Subject, lengths: Sequence[int], streams: Sequence[TokenStream], trials: int, seed: int
) -> dict[tuple[int, int], np.ndarray]:
    """Texts to be written on: int32 [length rounded down to whole pages] each."""
    prompts = {}
    head = [] if subject.config.bos_token_id is None else [subject.config.bos_token_id]
    for length in lengths:
        tokens = length // BLOCK * BLOCK
        for trial in range(trials):
            if streams:
                stream = streams[trial % len(streams)]
                if len(stream.tokens) < tokens:
                    raise TextError(f"text {stream.label} has {len(stream.tokens)} tokens, needed: {tokens}")
                text = _filler(streams, trial, length)
            else:
                generator = random.Random(f"{seed} {length} {trial}")
                text = np.asarray(subject.encode(made_up_text(generator, length // 4)), np.int32)
            prompts[length, trial] = np.concatenate([np.asarray(head, np.int32), text])[:tokens]
    return prompts


def _groups(ready: Prepared, capacity: int) -> list[list[Method]]:
    """Methods that fit into memory together, BF16 first in each group."""
    config = ready.subject.config
    rows = 4 * len(config.attention_layers) + 8 * len(ready.layers)
    return split_methods(ready.methods, config.num_key_value_heads * config.head_dim * rows * capacity)


def _answer(
    ready: Prepared,
    paged: Paged | None,
    runner: Runner,
    ask: Callable[..., jax.Array],
    plan: _Plan,
    length: int,
    trial: int,
    capacity: int,
    on_tokens: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Every question about one context with the answer and score of every method."""
    subject = ready.subject
    context, asked = plan.contexts[length, trial]
    batch = np.zeros((plan.count, plan.longest), np.int32)
    lengths, limits = np.ones(plan.count, np.int32), np.ones(plan.count, np.int32)
    for row, one in enumerate(asked):
        batch[row, : len(one.tokens)] = one.tokens
        lengths[row], limits[row] = len(one.tokens), one.limit
    texts: dict[str, list[str]] = {}
    groups = _groups(ready, capacity)
    for number, group in enumerate(groups):
        _, rows = read_text(runner, group, context.tokens, capacity=capacity, chunk=ready.chunk)
        stored = len(context.tokens)
        answers = host_array(ask(runner.state, rows, stored, batch, lengths, limits, answer=plan.answer))
        for method, by_question in zip(group, answers):
            texts.setdefault(
                method.name,
                [_text(subject, answer[: one.limit]) for answer, one in zip(by_question, asked)],
            )
        on_tokens(length * (number + 1) // len(groups) - length * number // len(groups))
    if paged is not None:
        padded = [one.tokens for one in asked] + [asked[0].tokens] * (plan.count - len(asked))
        tokens = paged.answer(context.tokens, padded, plan.answer, capacity=capacity)
        texts[PAGED] = [_text(subject, np.asarray(of[: one.limit])) for of, one in zip(tokens, asked)]
    return [
        {
            "task": one.question.task,
            "depth": one.question.depth,
            "question": one.question.text,
            "expected": list(one.question.expected),
            "answers": {name: of[index] for name, of in texts.items()},
            "scores": {name: score(one.question, of[index]) for name, of in texts.items()},
        }
        for index, one in enumerate(asked)
    ]


def _text(subject: Subject, tokens: np.ndarray) -> str:
    """The text of an answer up to its end token."""
    ends = np.flatnonzero(np.isin(tokens, subject.config.eos_token_ids))
    return subject.decode(tokens[: ends[0] if len(ends) else len(tokens)].tolist())


def _write(
    ready: Prepared,
    paged: Paged | None,
    writer: Writer,
    prompt: np.ndarray,
    new_tokens: int,
    capacity: int,
    on_tokens: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """What every method writes after a prompt, and how it compares with what BF16 writes."""
    texts: dict[str, dict[str, Any]] = {}
    groups = _groups(ready, 2 * capacity)  # the judge's rows lie beside the writers'
    counts = (len(prompt) + 2 * new_tokens) // len(groups)
    others = [] if paged is None else [paged.write(prompt, new_tokens, capacity=capacity)]
    for group in groups:
        tokens, losses = write_texts(
            writer, group, prompt, new_tokens, capacity=capacity, chunk=ready.chunk, others=others
        )
        names = [*(method.name for method in group), PAGED]
        for name, agreed, row, loss in zip(names, agreement(tokens), tokens, losses):
            texts.setdefault(
                name,
                {
                    "perplexity": float(np.exp(loss.astype(np.float64).mean())),
                    "agreement": int(agreed),
                    "variety": variety(row),
                    "text": ready.subject.decode(row.tolist()),
                },
            )
        on_tokens(counts)
    return texts
