"""Tasks and scores: what is planted, how answers count, and that all is read and written as in decoding."""

import importlib
import json
import random
import re
import sys
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.cache import allocate_layer_cache, append_rows
from oscar_jax.core import cache_format as fmt
from oscar_jax.core.config import CacheConfig
from oscar_jax.core.errors import ConfigError
from oscar_jax.core.rotation_header import RotationHeader
from oscar_jax.evaluation import asking, fidelity, paged, requests, task_job, task_report, tasks, writing
from oscar_jax.evaluation.blockwise import StoredRows, attend_few, attend_rows, finish
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.evaluation.stepper import Method, Runner, make_runner, recipes_of
from oscar_jax.evaluation.subject import load_subject
from oscar_jax.evaluation.tasks import Question, TaskContext
from oscar_jax.layer_cache import LayerCache
from oscar_jax.models.cached_attention import CachedAttention, allocate_model_cache
from oscar_jax.rotations.bases import BASIS_VERSION
from oscar_jax.rotations.rotation import RotationSet, hadamard_rotation
from oscar_jax.rotations.store import save_rotation_set
from parity_tests.models.tiny_model import write_tiny_model

pytestmark = pytest.mark.hf
PROMPT = np.random.default_rng(8).integers(97, 123, 384).astype(np.int32)  # one page of it is INT2
METHODS = [
    Method("bf16", "bf16", {}, 16.0),
    Method("int2", "int2", {0: hadamard_rotation(2, 32)}, 2.25),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A one-layer model of random weights, whose tokens are bytes."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def runner(path: Path) -> Runner:
    subject = load_subject(path)
    return make_runner(subject.model, subject.config)


@pytest.fixture(scope="module")
def step(runner: Runner) -> Any:
    """One token through the real caches: (token, caches) -> log-probabilities [V], caches."""
    config, rotations = runner.config, METHODS[1].rotations

    @jax.jit
    def step(token: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        attention = CachedAttention(config, rotations, jnp.ones(1, jnp.int32))
        decoder: Any = runner.merge(runner.state)
        rows, caches = decoder.hidden_states(
            token[None, None], caches, positions=caches[0].lengths[:, None], attention=attention
        )
        return jax.nn.log_softmax(decoder.logits(rows[0, 0])), caches

    return step


@pytest.fixture(scope="module")
def read(runner: Runner, step: Any) -> dict[str, tuple[Any, Any]]:
    """The outcome of PROMPT, token by token through the real caches: kind -> log-probabilities, caches."""
    found = {}
    for kind in ("bf16", "int2"):
        log_p, caches = None, allocate_model_cache(runner.config, 1, 576, kind=kind)
        for token in PROMPT:
            log_p, caches = step(jnp.int32(token), caches)
        found[kind] = log_p, caches
    return found


def encode(text: str) -> list[int]:
    return list(text.encode())


def planted(count: int, context: int, seed: int = 0) -> tuple[str, TaskContext]:
    filler = np.full(200, ord(" "), np.int32)
    made = tasks.make_context(tasks.TASKS, count, filler, encode, context, random.Random(seed), head=[300])
    assert len(made.tokens) == context and made.tokens[0] == 300
    return bytes(made.tokens[1:].tolist()).decode(), made


def test_facts_stand_in_the_text_and_questions_find_them() -> None:
    text, made = planted(3, 9000)
    assert planted(3, 9000)[0] == text and planted(3, 9000, seed=1)[0] != text
    assert [question.task for question in made.questions] == [t for t in tasks.TASKS for _ in range(3)]
    for question in made.questions:
        places = [text.index(part) / len(text) for part in question.expected]
        assert min(places) - 0.1 < question.depth < max(places) + 0.1
        if question.task != "code":  # each number or name once, or where a variable is handed on
            assert all(len(re.findall(part, text)) <= 2 for part in question.expected)
        if question.task == "values":
            assert max(places) - min(places) > 0.05
        if question.task == "tracking":
            first, *others = question.expected
            assert f"VAR {first} = {question.text.split()[-1][:-1]}\n" in text
            assert [f"VAR {b} = VAR {a}\n" in text for a, b in zip(question.expected, others)] == [True] * 2
            assert places == sorted(places)
        if question.task == "code":
            assert question.lead.removeprefix("```python\n") + "\n".join(question.expected) in text
    assert text.count("The secret number of") == 12 and text.count("def ") == 6
    with pytest.raises(ConfigError, match=r"a context of 2000 tokens is too short .* their facts take"):
        planted(3, 2000)


def test_answers_count_by_whole_words_and_leading_lines() -> None:
    numbers = Question("values", "", "", ("123456", "654321"), 0.5)
    assert [tasks.score(numbers, a) for a in (" 654321, 123456.", "1234567 654321", "none")] == [1, 0.5, 0]
    code = Question("code", "", "", ("    a", "    b", "    c"), 0.5)
    answers = ("    a\n    b\n    c\nmore", "    a  \n    x\n    c", "", "    a\n    b")
    assert [tasks.score(code, answer) for answer in answers] == pytest.approx([1, 1 / 3, 0, 2 / 3])
    assert tasks.answer_limit(numbers, encode) == 2 * len(" 123456,") + tasks.SPARE_TOKENS


@pytest.mark.parametrize("window", [None, 300])
def test_few_queries_see_what_many_see(window: int | None) -> None:
    """Positions on both sides of page boundaries, with pages that are INT2 for some of the queries only."""
    geometry = CacheConfig(2, 4, 32)
    keys = jax.random.split(jax.random.key(0), 5)
    one, two, three, four = (jax.random.normal(key, (2, 2, 1024, 32)) for key in keys[1:])
    key, value = one.astype(jnp.bfloat16), two.astype(jnp.bfloat16)
    options: dict[str, Any] = {"config": geometry, "softmax_scale": 0.2, "sliding_window": window}
    cases = [(StoredRows(key, value, three, four), [639, 702, 703, 766, 640], 128)]
    if window is None:
        cases += [(cases[0][0], [703], 0), (StoredRows(key, value, None, None), [639, 702], 64)]
    for rows, places, apart in cases:
        query = jax.random.normal(keys[0], (2, len(places), 4, 32))

        @jax.jit
        def both(query: jax.Array, rows: Any, places: jax.Array, apart: int = apart) -> Any:
            many = [attend_rows(query, rows, places, 640, **options)]
            return finish(many), finish(attend_few(query, rows, places, 640, apart=apart, **options))

        np.testing.assert_allclose(*both(query, rows, jnp.asarray(places)), atol=2e-6)


def test_answers_are_greedy_and_no_question_disturbs_another(runner: Runner, step: Any, read: Any) -> None:
    """BF16 answers as the real BF16 cache does, int2 as the real 2-bit cache; a limit ends the work."""
    asked = [encode("\nWhat is it? It is"), encode("\nWhere?")]
    questions = np.zeros((2, 24), np.int32)
    for row, question in zip(questions, asked):
        row[: len(question)] = question
    lengths, limits = np.asarray([len(question) for question in asked]), np.asarray([6, 4])
    _, rows = asking.read_text(runner, METHODS, PROMPT, capacity=500, chunk=64)
    ask = asking.make_asker(runner)
    answers = np.asarray(ask(runner.state, rows, len(PROMPT), questions, lengths, limits, answer=9))
    assert not answers[..., 6:].any()
    for method, by_question in zip(METHODS, answers):
        for question, answer, limit in zip(asked, by_question, limits):
            log_p, caches = read[method.kind]
            for token in question:
                log_p, caches = step(jnp.int32(token), caches)
            for token in answer[:limit]:
                assert int(log_p.argmax()) == token
                log_p, caches = step(jnp.int32(token), caches)


@pytest.mark.parametrize("window", [None, 300])
def test_sequences_share_pages_and_go_on_alone(window: int | None) -> None:
    """Sequences that share a prefix get other rows each, and hold afterwards what a copy of it would."""
    config = CacheConfig(2, 4, 32, window=window)
    rotation, generator = hadamard_rotation(2, 32), np.random.default_rng(1)

    def rows(batch: int) -> tuple[jax.Array, jax.Array]:
        both = jnp.asarray(generator.standard_normal((2, batch, 139, 2, 32)), jnp.bfloat16)
        return both[0], both[1]

    alone = allocate_layer_cache(config, 1, 1200, chunk=256)
    for _ in range(5):
        alone = append_rows(alone, rotation, *rows(1), jnp.asarray([139], jnp.int32))
    (shared,) = paged.share_pages([alone], 2, 139)
    assert isinstance(shared, LayerCache) and shared.batch == 2
    new = rows(2)
    shared = append_rows(shared, rotation, *new, jnp.asarray([139, 139], jnp.int32))
    for sequence in range(2):
        key, value = (part[sequence : sequence + 1] for part in new)
        copy = append_rows(alone, rotation, key, value, jnp.asarray([139], jnp.int32))
        pages = int(copy.history_pages[0])
        assert int(shared.history_pages[sequence]) == pages == int(alone.history_pages[0]) + 3
        first = 0 if window is None else pages - 5  # those that the window reaches
        for names, table, places in (
            (fmt.INT2_ARRAYS, "page_table", slice(first, pages)),
            (fmt.WINDOW_ARRAYS, "window_table", slice(None)),
        ):
            mine, theirs = getattr(shared, table)[sequence, places], getattr(copy, table)[0, places]
            for name in names:
                np.testing.assert_array_equal(getattr(shared, name)[mine], getattr(copy, name)[theirs])


def test_the_real_cache_answers_as_it_would_one_question(path: Path, step: Any) -> None:
    """Two questions on shared pages, against single tokens from the same caches."""
    reader = paged.Paged(load_subject(path), fitted_set(load_subject(path).config))
    asked = [encode("\nWhat is it? It is"), encode("\nWhere?")]
    caches = reader._answering([PROMPT.tolist()], 1, capacity=500).caches
    for question, answer in zip(asked, reader.answer(PROMPT, asked, 5, capacity=500)):
        log_p, mine = jnp.zeros(0), caches
        for token in question:
            log_p, mine = step(jnp.int32(token), mine)
        for token in answer:
            assert int(log_p.argmax()) == token
            log_p, mine = step(jnp.int32(token), mine)
    rows = jnp.ones((1, 64))
    endless, ended = paged._Endless(load_subject(path).model, [257]).logits(rows), load_subject(path).model
    assert endless[0, 257] == -jnp.inf and (endless == ended.logits(rows)).sum() == 271
    with pytest.raises(ConfigError, match="'int2:cache' needs --rotations"):
        paged.Paged(load_subject(path), None)


def test_texts_are_written_as_in_decoding_and_judged_by_bf16(runner: Runner, step: Any, read: Any) -> None:
    """Pages that fill up on the way are read from two bits; the judge has read the same text in BF16."""
    writer = writing.make_writer(runner)
    written, losses = writing.write_texts(writer, METHODS, PROMPT, 128, capacity=512, chunk=64)
    assert written.shape == losses.shape == (2, 128)
    (end,) = runner.config.eos_token_ids
    assert end not in written

    def decoded(kind: str, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities [T, V] of what follows the prompt and each of the tokens but the last."""
        log_p, caches = read[kind]
        found = [log_p]
        for token in tokens[:-1]:
            log_p, caches = step(jnp.int32(token), caches)
            found.append(log_p)
        return np.array(jnp.stack(found))

    for method, tokens in zip(METHODS, written):
        log_p = decoded(method.kind, tokens)
        chosen = np.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0]
        log_p[:, end] = -np.inf
        # Codes are multiplied in the rotated basis there, rows rotated back first here: a tie may fall to
        # either side.
        assert (chosen > log_p.max(axis=1) - 1e-3).all()
    expected = -np.take_along_axis(decoded("bf16", written[1]), written[1][:, None], axis=1)[:, 0]
    np.testing.assert_allclose(losses[1], expected, atol=2e-3)
    assert writing.agreement(written)[0] == 128
    assert writing.agreement(np.asarray([[1, 2, 3], [1, 5, 3], [4, 2, 3]])).tolist() == [3, 1, 0]
    assert writing.variety(np.asarray([1, 2, 3, 4, 5])) == 1 and writing.variety(np.ones(9, int)) == 1 / 6
    # What the real quantizer makes of the rows is kept, for the time when the page leaves the recent window.
    last, rows = asking.read_text(runner, METHODS, PROMPT, capacity=512, chunk=64)
    recipes: Any = recipes_of(METHODS, (0,))
    _, _, rows = writer.write(runner.state, rows, writer.first(runner.state, last), 384, recipes)
    page = [store[1, :, 384:448].swapaxes(0, 1) for store in (rows[0].key, rows[0].value)]
    restored = fidelity.reconstruct_pages(page[0], page[1], METHODS[1].rotations[0])
    for found, expected in zip((rows[0].restored_key, rows[0].restored_value), restored):
        np.testing.assert_allclose(found[1, :, 384:448].swapaxes(0, 1), expected, atol=1e-5)
        assert np.abs(expected).max() > 0.1
    with pytest.raises(ConfigError, match="prompt = 100 tokens"):
        writing.write_texts(writer, METHODS, PROMPT[:100], 64, capacity=512, chunk=64)


def test_a_run_goes_on_where_it_stopped(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second run asks only what the first did not reach; other settings are refused by name."""
    options: dict[str, Any] = {
        "lengths": (512,), "tasks": ("single", "writing"), "methods": ("bf16", "hadamard"), "trials": 2,
        "questions": 1, "new_tokens": 64, "chunk": 128,
    }  # fmt: skip
    saved, calls = task_job.save_tasks, []

    def stop(*arguments: Any) -> None:
        saved(*arguments)
        raise KeyboardInterrupt

    scores = {"bf16": 1.0, "hadamard": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(task_job, "_answer", lambda *_: [{"task": "single", "scores": scores}])
        patch.setattr(task_job, "save_tasks", stop)
        with pytest.raises(KeyboardInterrupt):
            task_job.evaluate_tasks(path, [], tmp_path, **options)
    assert len(json.loads((tmp_path / "tasks.json").read_text())["records"]) == 1
    real = task_job._answer
    monkeypatch.setattr(task_job, "_answer", lambda *a: calls.append(a[6]) or real(*a))
    done, said = [], []
    document = task_job.evaluate_tasks(
        path, [], tmp_path, progress=lambda stage, count, total: done.append((count, total)), say=said.append,
        **options,
    )  # fmt: skip
    assert [line.split(":")[0] for line in said] == [  # of what the first run did not reach
        "512 tokens, context 1, perplexity", "512 tokens, context 2, 1 questions",
        "512 tokens, context 2, perplexity",
    ]  # fmt: skip
    assert said[1] == "512 tokens, context 2, 1 questions: bf16 0 %, hadamard 0 %"
    assert calls == [1] and sum(count for count, _ in done) == done[0][1] == 2 * (512 + 512 + 128)
    stored = json.loads((tmp_path / "tasks.json").read_text())
    assert stored["accuracy"] == json.loads(json.dumps(document["accuracy"]))
    row = document["accuracy"]["512"]["single"]
    assert row["questions"] == 2 and set(row["accuracy"]) == {"bf16", "hadamard"}
    assert document["writing"]["512"]["agreement"]["bf16"] == 64
    assert [record["trial"] for record in stored["records"] if record["kind"] == "questions"] == [0, 1]
    table = (tmp_path / "tasks.md").read_text()
    assert "| 512 | single | 2 |" in table and "64 tokens written after a text of each length" in table
    assert all((tmp_path / name).stat().st_size > 0 for name in ("tasks.png", "writing.png"))
    assert task_report.mean_accuracy(document, 512, "bf16") == row["accuracy"]["bf16"]
    differences = task_report.mean_difference(document, 512, "hadamard")
    # The first context's scores are 1 and 0, the second's those of random weights, which find nothing.
    assert row["accuracy"] == {"bf16": 0.5, "hadamard": 0} and differences == (-0.5, 0.5 / 2**0.5)
    with pytest.raises(ConfigError, match=r"other settings \(seed\): --restart"):
        task_job.evaluate_tasks(path, [], tmp_path, **options, seed=1)


def fitted_set(config: Any) -> RotationSet:
    header = RotationHeader(
        model_id=config.model_id, layers=(0,), num_query_heads=4, num_key_value_heads=2, head_dim=32,
        rope="half", basis="hadamard", basis_version=BASIS_VERSION,
    )  # fmt: skip
    return RotationSet(header, dict(METHODS[1].rotations))


def test_likelihoods_and_continuations_are_those_of_decoding(
    path: Path, tmp_path: Path, runner: Runner, step: Any
) -> None:
    """Whole texts in one chunk, a shorter one beside them, against single tokens through the real cache."""
    subject = load_subject(path)
    save_rotation_set(fitted_set(subject.config), tmp_path / "set")
    scorer = Scorer(subject, method="int2", rotations=tmp_path / "set", batch=4, max_length=600)
    context, continuation = bytes(PROMPT.tolist()).decode() + " ", "and so on"
    tokens = [256, *subject.encode(context + continuation)]
    caches: Any = allocate_model_cache(runner.config, 1, 576, kind="int2")
    losses, greedy = [], []
    for token, following in zip(tokens, [*tokens[1:], None]):
        log_p, caches = step(jnp.int32(token), caches)
        if following is not None:
            losses.append(float(log_p[following]))
            greedy.append(int(log_p.argmax()) == following)
    likeliest = requests.Scored([*tokens, int(log_p.argmax())], 1)
    parts = [scorer._joined(*pair) for pair in (("a", "b"), (context, continuation), ("", "ab"))]
    short, long, bare, best = scorer._score([*parts, likeliest])
    # The space belongs to the continuation, as tokens are cut.
    assert long[0] == pytest.approx(sum(losses[-10:]), abs=2e-3) and long[1] == all(greedy[-10:])
    assert best[1] and best[0] == pytest.approx(float(log_p.max()), abs=2e-3)
    a, b = subject.encode("ab")
    early: Any = allocate_model_cache(runner.config, 1, 576, kind="int2")
    first, early = step(jnp.int32(256), early)
    second, _ = step(jnp.int32(a), early)
    assert short[0] == pytest.approx(float(second[b]), abs=2e-3)
    assert bare[0] == pytest.approx(float(first[a] + second[b]), abs=2e-3)
    assert 0 < scorer.int2_share < 0.25  # one page of 64 at most of the scored positions
    rolled, again = scorer.loglikelihood_rolling([context + continuation, "ab"])
    assert rolled == pytest.approx(sum(losses), abs=0.02) and again == pytest.approx(bare[0], abs=1e-4)

    asked = [context + continuation, "a"]
    made = scorer.generate_until([(prompt, {"until": [], "max_gen_toks": 5}) for prompt in asked])
    text = []
    for _ in range(5):
        text.append(int(log_p.argmax()))
        log_p, caches = step(jnp.int32(text[-1]), caches)
    assert made[0] == subject.decode(text)
    stop = {"until": made[0][2], "max_gen_toks": 5}
    assert scorer.generate_until([(prompt, stop) for prompt in asked])[0] == made[0].split(made[0][2])[0]
    # The twin in PyTorch gives the same, up to the order of sums in float32.
    torch_scorer = pytest.importorskip("oscar_torch.hf.scorer")
    assert list(signature(torch_scorer.Scorer).parameters) == list(signature(Scorer).parameters)
    twin = torch_scorer.Scorer(path, method="int2", rotations=tmp_path / "set", batch=4, dtype="float32")
    pairs = [("a", "b"), (context, continuation), ("", "ab")]
    for mine, theirs in zip((short, long, bare), twin.loglikelihood(pairs)):
        assert theirs == (pytest.approx(mine[0], abs=5e-3), mine[1])
    assert twin.loglikelihood_rolling([context + continuation, "ab"]) == pytest.approx(
        [rolled, again], abs=0.05
    )
    assert twin.generate_until([(prompt, {"until": [], "max_gen_toks": 5}) for prompt in asked]) == made


def test_requests_and_arguments_that_cannot_be_served_are_refused(path: Path) -> None:
    """By name, with what is allowed."""
    scorer = Scorer(path, method="hadamard", max_length=600)
    for call, message in (
        (lambda: scorer.generate_until([("a", {"num_beams": 2})]), "'num_beams', allowed: do_sample"),
        (lambda: scorer.generate_until([("a", {"max_gen_toks": 600})]), "max_gen_toks = 600"),
        (lambda: scorer.generate_until([("a", {})]), "'hadamard' has no cache"),
        (lambda: scorer.loglikelihood([("a", "")]), "a continuation of 0 tokens"),
        (lambda: Scorer(path, method="int2"), "needs --rotations"),
        (lambda: Scorer(path, method="bf16", batch=0), "batch = 0"),
        (lambda: Scorer(path, method="bf16", max_length=5000), "4096 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_long_texts_are_scored_in_windows_each_token_once() -> None:
    """Those of lm-evaluation-harness: full windows, the last one with as much before it as fits."""
    found = list(requests.cut_windows(list(range(10)), 99, 4))
    assert [window.tokens for window in found] == [[99, 0, 1, 2, 3], [3, 4, 5, 6, 7], [5, 6, 7, 8, 9]]
    assert [window.scored for window in found] == [4, 4, 2]


@pytest.mark.parametrize("package", ["oscar_jax", "oscar_torch"])
def test_the_harness_is_answered_request_by_request(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The class that lm-evaluation-harness finds as `oscar`, on a base that stands for the harness's own."""
    registered: dict[str, Any] = {}
    kept: list[Any] = []

    class LM:
        def __init__(self) -> None:
            self.cache_hook = SimpleNamespace(add_partial=lambda *partial: kept.append(partial))

    def register_model(name: str) -> Any:
        return lambda cls: registered.setdefault(name, cls)

    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.api", ModuleType("lm_eval.api"))
    for name, content in (("model", LM), ("registry", register_model)):
        module: Any = ModuleType(f"lm_eval.api.{name}")
        setattr(module, content.__name__, content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, f"{package}.evaluation.harness", raising=False)
    harness = importlib.import_module(f"{package}.evaluation.harness")
    made: list[Any] = []

    class Asked:
        int2_share, reads_int2 = 0.25, True

        def __init__(self, *arguments: Any, **options: Any) -> None:
            made.append((arguments, options))

        def loglikelihood(self, pairs: Any) -> Any:
            return [(float(len(context)), True) for context, _ in pairs]

        def loglikelihood_rolling(self, texts: Any) -> Any:
            return [float(len(text)) for text in texts]

        def generate_until(self, requests: Any) -> Any:
            return [prompt + options["until"] for prompt, options in requests]

    assert harness.register(Asked) is registered["oscar"]
    model = registered["oscar"]("m.gguf", rotations="r", batch_size="auto", device="cuda:0")
    assert made[0][0] == ("m.gguf",) and made[0][1]["batch"] == 8 and made[0][1]["method"] == "int2"

    def requests(*arguments: Any) -> list[Any]:
        return [SimpleNamespace(args=found) for found in arguments]

    assert model.loglikelihood(requests(("ab", "c"), ("a", "c"))) == [(2.0, True), (1.0, True)]
    assert model.loglikelihood_rolling(requests(("abc",))) == [3.0]
    assert model.generate_until(requests(("a", {"until": "."}))) == ["a."]
    assert [name for name, _, _ in kept] == ["loglikelihood"] * 2 + [
        "loglikelihood_rolling",
        "generate_until",
    ]
    assert "only 25 % of the tokens" in caplog.text
    monkeypatch.delitem(sys.modules, f"{package}.evaluation.harness")
