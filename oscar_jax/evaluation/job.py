"""What two bits cost: perplexity, KL to BF16, attention error and memory, all on the same text.

All methods walk through the same tokens side by side as one batch, so that memory does not grow with the
number of judged positions. The first row is the same model with a BF16 cache; `int2` codes pages with the
real quantizer and reads them back, the asymmetric recipes are simulated likewise. Every query reads exactly
the tokens from INT2 that it would read in decoding, token by token, however long the chunks are
(`blockwise.py`): figures do not depend on the chunk, and do not flatter.
"""

import dataclasses
import datetime
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..arithmetic import default_chunk
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..models.config import ModelConfig
from ..models.weights import host_array
from ..rotations import store
from ..rotations.rotation import RotationSet
from ..rotations.statistics import STATISTICS_FILE, load_statistics
from . import fidelity
from .exported import MEANS_DROPPED
from .methods import METHODS, check_method_names, resolve_methods
from .report import StreamResult, evaluation_document, save_evaluation
from .requests import LEAST_SHARE
from .stepper import JUDGED_ROWS, Method, Runner, layer_error, make_runner, method_bytes, recipes_of
from .streams import TextError, TokenStream, check_source, read_stream
from .subject import Progress, Subject, load_subject, no_progress

HISTORY = "at decode granularity: each query reads from INT2 what it would in decoding token by token"
PROBES = 256  # query positions at which attention itself is compared


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that an evaluation needs, checked and loaded."""

    subject: Subject
    layers: tuple[int, ...]
    methods: list[Method]
    streams: list[TokenStream]
    rotation_set: RotationSet | None
    chunk: int
    about: dict[str, Any]


def evaluate(
    model: Subject | str | os.PathLike[str],
    texts: Sequence[Sequence[str]],
    out: str | os.PathLike[str],
    *,
    rotations: str | os.PathLike[str] | None = None,
    context: int = 4096,
    methods: Sequence[str] = METHODS,
    every: int = 1,
    chunk: int | None = None,
    field: str | None = None,
    all_layers: bool = False,
    dtype: str | None = None,
    progress: Progress = no_progress,
    warn: Callable[[str], None] = lambda message: None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """What two bits cost on unseen text: returns the report and writes it, with tables and plots, into `out`.

    Each of `texts` is one stream: sources as the command line takes them, `context` tokens of each are judged
    at every `every`-th position. `methods` are names as in `oscar evaluate --help`; `rotations` is what
    `calibrate` wrote, or a rotation set. The report is saved after every text, and `say` told of it. Raises
    ConfigError, TextError or CheckpointError before anything runs.
    """
    if not texts:
        raise ConfigError("--text is needed")
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)  # before anything expensive: a file may stand there
    question = prepare(model, texts, rotations, context, methods, every, chunk, field, all_layers, dtype)
    config = question.subject.config
    sequences = [with_bos(stream, context, config) for stream in question.streams]
    for stream in question.streams:
        if is_calibration_text(stream, question.rotation_set):
            warn(f"{stream.label} is part of the calibration text; its figures flatter int2")
    for method in question.methods:
        if method.basis.endswith(MEANS_DROPPED):
            warn(f"{method.name}: the key means of the set are dropped, its reader does not take them")
    if (share := question.about["int2_share"]) < LEAST_SHARE:
        warn(
            f"only {100 * share:.0f} % of the tokens read at the judged positions come from INT2 pages; "
            "a longer --context shows more of the error"
        )
    with question.subject.context():
        runner = make_runner(question.subject.model, config)
        results: list[StreamResult] = []
        document: dict[str, Any] = {}
        for stream, tokens in zip(question.streams, sequences):
            result = evaluate_stream(
                runner,
                question.methods,
                stream,
                tokens,
                question.layers,
                chunk=question.chunk,
                every=every,
                on_chunk=lambda count: progress("evaluation", count, context * len(sequences)),
            )
            results.append(result)
            # Saved after every text, so that an interrupted run keeps what it has measured.
            document = evaluation_document(results, question.methods, question.about)
            if jax.process_index() == 0:  # of several hosts the first one writes
                save_evaluation(document, out)
            cells = (f"{name} {float(values.mean()):.4g}" for name, values in result.kl.items())
            say(f"{stream.label}, mean KL: {', '.join(cells)}")
    return document


def prepare(
    model: Subject | str | os.PathLike[str],
    texts: Sequence[Sequence[str]],
    rotations: str | os.PathLike[str] | None,
    context: int,
    methods: Sequence[str],
    every: int,
    chunk: int | None,
    field: str | None,
    all_layers: bool,
    dtype: str | None,
) -> Prepared:
    """Checks what can be checked without the model, loads it, then checks the rest."""
    rotation_set, statistics = None, None
    if rotations is not None:
        rotation_set = store.load_rotation_set(rotations)
        path = pathlib.Path(rotations) / STATISTICS_FILE
        statistics = load_statistics(path) if path.exists() else None
    names = list(methods)
    check_method_names(names)
    if context < 1:
        raise ConfigError(f"context = {context}, allowed: >= 1")
    for source in (source for sources in texts for source in sources):
        check_source(source)
    subject = load_subject(model, dtype)
    config = subject.config
    layers = subject.int2_layers(all_layers=all_layers)
    # No more than the context: a short text must not be padded to a long chunk.
    chunk = min(default_chunk(), -(-context // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS) if chunk is None else chunk
    check_evaluation(context, chunk, every, config)
    resolved = resolve_methods(names, config, layers, rotation_set, statistics)
    streams = [read_stream(sources, subject.encode, context, field) for sources in texts]
    geometry = config.cache_config()
    about = about_this_run(
        config,
        subject.dtype,
        context=context,
        chunk=chunk,
        every=every,
        sink_tokens=geometry.sink_tokens,
        recent_tokens=geometry.recent_tokens,
        quantized_layers=list(layers),
        rotations=describe_rotations(rotation_set),
        history=HISTORY,
        int2_share=int2_share(judged_positions(context, every, geometry), geometry),
    )
    return Prepared(subject, layers, resolved, streams, rotation_set, chunk, about)


def judged_positions(context: int, every: int, config: CacheConfig) -> np.ndarray:
    """Positions where next-token distributions are compared: past sink, recent and one page, int32 [R]."""
    first = config.sink_tokens + config.recent_tokens + fmt.PAGE_TOKENS
    positions = np.arange(first, context - 1, dtype=np.int32)
    return positions[positions % every == 0]


def int2_share(positions: np.ndarray, config: CacheConfig) -> float:
    """Mean share of the tokens read at `positions` that come from INT2 pages, in a layer without a window."""
    pages = np.asarray([config.history_pages(int(position) + 1) for position in positions])
    return float(np.mean(fmt.PAGE_TOKENS * pages / (positions + 1)))


def split_methods(methods: Sequence[Method], bytes_each: int) -> list[list[Method]]:
    """Methods that walk together, BF16 first in every group; one group unless memory is too small.

    `bytes_each`: what the rows of one method take. Half of the free memory is left to the model's steps.
    """
    memory = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in memory:
        return [list(methods)]
    free = (memory["bytes_limit"] - memory.get("bytes_in_use", 0)) // 2
    others = max(1, free // max(1, bytes_each) - 1)
    rest = methods[1:]
    groups = [[methods[0], *rest[i : i + others]] for i in range(0, len(rest), others)]
    return groups or [[methods[0]]]


def evaluate_stream(
    runner: Runner,
    methods: Sequence[Method],
    stream: TokenStream,
    tokens: np.ndarray,
    layers: Sequence[int],
    *,
    chunk: int,
    every: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> StreamResult:
    """Runs every method over `tokens` int32 [S] side by side; `layers` are the quantized ones.

    methods[0] is BF16, the reference. `on_chunk(tokens)` is called when a chunk is judged for all methods. If
    the device's memory does not hold the rows of all of them, some walk after the others.
    """
    config = runner.config
    per_token = (
        config.num_key_value_heads * config.head_dim * (4 * len(config.attention_layers) + 8 * len(layers))
    )
    groups = split_methods(methods, per_token * len(tokens))
    parts = []
    for number, group in enumerate(groups):

        def counted(tokens: int, number: int = number) -> None:  # a chunk once, in equal shares of the groups
            on_chunk(tokens * (number + 1) // len(groups) - tokens * number // len(groups))

        parts.append(_walk(runner, group, stream, tokens, layers, chunk=chunk, every=every, on_chunk=counted))
    result = parts[0]
    for part in parts[1:]:
        for field in ("nll", "kl", "top1", "layer_errors", "cache_bytes"):
            getattr(result, field).update(getattr(part, field))
    return result


def _walk(
    runner: Runner,
    methods: Sequence[Method],
    stream: TokenStream,
    tokens: np.ndarray,
    layers: Sequence[int],
    *,
    chunk: int,
    every: int,
    on_chunk: Callable[[int], None],
) -> StreamResult:
    """One batch of methods over `tokens`; see `evaluate_stream`."""
    config = runner.config
    geometry = config.cache_config()
    context = len(tokens)
    positions = judged_positions(context, every, geometry)
    probes = fidelity.probe_positions(context, PROBES, geometry)
    recipes = recipes_of(methods, layers)
    rows = runner.allocate(len(methods), -(-context // chunk) * chunk, list(recipes))
    measures: list[list[np.ndarray]] = []
    probe_queries: list[list[np.ndarray]] = []
    judged = -(-chunk // (every * JUDGED_ROWS)) * JUDGED_ROWS

    def collect(pending: tuple[Any, int, list[jax.Array], int, int]) -> None:
        columns, count, queries, probed, done = pending
        if columns is not None:
            measures.append([host_array(column)[:, :count] for column in columns])
        probe_queries.append([host_array(query)[:probed] for query in queries])
        on_chunk(done)

    # The device works on one chunk while the outcome of the one before is fetched.
    pending = None
    for start in range(0, context, chunk):
        count = min(chunk, context - start)
        padded = np.zeros(chunk, np.int32)
        padded[:count] = tokens[start : start + count]
        local = positions[(positions >= start) & (positions < start + count)] - start
        here = probes[(probes >= start) & (probes < start + count)] - start
        probe = np.zeros(min(chunk, PROBES), np.int32)
        probe[: len(here)] = here
        batch = np.broadcast_to(padded, (len(methods), chunk))
        hidden, rows, queries = runner.step(
            runner.state, batch, start, rows, recipes, probe, capture=tuple(layers)
        )
        columns = None
        if len(local):
            index = np.zeros(judged, np.int32)
            index[: len(local)] = local
            targets = tokens[np.minimum(start + index + 1, context - 1)]
            columns = runner.judge(runner.state, hidden, index, targets)
        if pending is not None:
            collect(pending)
        pending = (columns, len(local), queries, len(here), count)
    assert pending is not None
    collect(pending)

    nll, kl, top1 = (
        {m.name: row for m, row in zip(methods, np.concatenate(column, axis=1))} for column in zip(*measures)
    )
    errors: dict[str, dict[int, dict[str, float]]] = {m.name: {} for m in methods if m.rotations}
    for number, layer in enumerate(layers):
        query = np.concatenate([queries[number] for queries in probe_queries])
        key, value = (part[0, :, :context].swapaxes(0, 1) for part in (rows[layer].key, rows[layer].value))
        for method in methods:
            if method.rotations:
                errors[method.name][layer] = layer_error(
                    query, probes, key, value, method.rotations[layer], config, layer
                )
    sizes = {m.name: method_bytes(m, context, config, layers) for m in methods}
    return StreamResult(stream, positions, nll, kl, top1, errors, sizes)


def check_evaluation(context: int, chunk: int, every: int, config: ModelConfig) -> None:
    """Raises ConfigError unless there is something to judge: context, chunk and stride in range."""
    geometry = config.cache_config()
    least = geometry.sink_tokens + geometry.recent_tokens + fmt.PAGE_TOKENS + 2
    if context < least:
        raise ConfigError(
            f"context = {context}, allowed: >= {least} (sink, recent window, one page, two tokens)"
        )
    if context > config.max_positions:
        raise ConfigError(f"context = {context}, the model has {config.max_positions} positions")
    if chunk < fmt.PAGE_TOKENS or chunk % fmt.PAGE_TOKENS:
        raise ConfigError(f"chunk = {chunk}, allowed: multiples of {fmt.PAGE_TOKENS}")
    if every < 1:
        raise ConfigError(f"every = {every}, allowed: >= 1")
    if not len(judged_positions(context, every, geometry)):
        raise ConfigError(f"every = {every} leaves no position below the context of {context} tokens")


def with_bos(stream: TokenStream, context: int, config: ModelConfig) -> np.ndarray:
    """The first `context` tokens of a stream, the beginning-of-sequence token included: int32 [context]."""
    head = [] if config.bos_token_id is None else [config.bos_token_id]
    tokens = np.concatenate([np.asarray(head, np.int32), stream.tokens])[:context]
    if len(tokens) < context:
        raise TextError(f"text {stream.label} has {len(tokens)} tokens, the context needs {context}")
    return tokens


def is_calibration_text(stream: TokenStream, rotation_set: RotationSet | None) -> bool:
    """Whether a document of the stream was part of the text that the rotation set was calibrated on."""
    seen = rotation_set.header.extra.get("document_digests", []) if rotation_set is not None else []
    return bool(set(stream.document_digests) & set(seen))


def describe_rotations(rotation_set: RotationSet | None) -> str | None:
    """One line on where a rotation set comes from."""
    if rotation_set is None:
        return None
    header = rotation_set.header
    return (
        f"basis {header.basis}, {header.calibration_tokens} calibration tokens, "
        f"text digest {header.corpus_digest}, {header.created}"
    )


def about_this_run(config: ModelConfig, dtype: str, **settings: Any) -> dict[str, Any]:
    """What every report carries: model, arithmetic, device, library versions, date."""
    device = jax.devices()[0]
    return {
        "model": config.model_id,
        "num_layers": config.num_layers,
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads,
        "dtype": dtype,
        "device": " ".join(dict.fromkeys((device.platform, device.device_kind))),
        "versions": {"jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "created": datetime.date.today().isoformat(),
        **settings,
    }
