"""What two bits cost: perplexity, KL to BF16, attention error, memory and retrieval, all on the same text.

All methods walk through the same tokens side by side, chunk by chunk, each with its own cache, so that memory
does not grow with the number of judged positions. The BF16 method is the same model with a BF16 cache; `int2`
is the real page cache; the asymmetric recipes are simulated: they read rows that were quantized and
restored, for exactly the tokens whose pages would be INT2. Prefill runs in chunks of 64 tokens by default, so
that every query sees the windows it would see in decoding: 256 ... 319 recent tokens and its own chunk.
"""

import dataclasses
import datetime
import json
import pathlib
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import cache_format as fmt
from . import fidelity, plots
from .calibrate import KEY_MULTIPLIERS
from .config import CacheConfig, CalibrationConfig, CheckpointError, ConfigError
from .models.config import ModelConfig
from .published import KEY_CLIP_RATIO, VALUE_CLIP_RATIO, fit_published_rotation
from .rotation import KEY_BASES, RotationSet, fit_layer_rotation, hadamard_matrix
from .runner import Method, Runner, allocate_caches, compare_distributions, layer_error, method_bytes
from .text import TextError, TokenStream

PROBES = 256  # query positions at which attention itself is compared
CURVE_BINS = 24
METHODS = ("bf16", "int2", "published", "hadamard", "naive")
# Of a method "int2:BASIS": damping and alpha, as `oscar calibrate --basis BASIS` takes them.
DEFAULT_BASIS_NUMBERS = [CalibrationConfig.damping, KEY_MULTIPLIERS[0] / (1 << fmt.MULTIPLIER_BITS)]


def check_method_names(names: Sequence[str]) -> None:
    """Raises ConfigError for an unknown method, before a model is loaded."""
    if not names:
        raise ConfigError(f"no method was named, allowed: {', '.join(METHODS)}")
    for name in names:
        if name.startswith("int2:"):
            parse_basis(name)
        elif name not in METHODS:
            raise ConfigError(f"unknown method {name!r}, allowed: {', '.join(METHODS)}, int2:BASIS")


def resolve_methods(
    names: Sequence[str],
    config: ModelConfig,
    layers: Sequence[int],
    rotation_set: RotationSet | None,
    statistics: Mapping[int, Any] | None,
) -> list[Method]:
    """The methods of a comma-separated list, bf16 always first; raises ConfigError naming an unknown one."""
    head_dim = config.head_dim
    identity, hadamard = np.eye(head_dim)[None], hadamard_matrix(head_dim)[None]
    methods = [Method("bf16", "bf16", {}, 16.0)]

    def needed(name: str) -> Mapping[int, Any]:
        if statistics is None:
            raise ConfigError(
                f"method {name!r} is fitted to calibration statistics: --rotations must be a directory that "
                "`oscar calibrate` wrote (it holds statistics.safetensors)"
            )
        if missing := [layer for layer in layers if layer not in statistics]:
            raise ConfigError(
                f"the calibration statistics lack layer {missing[0]}: calibrate with --all-layers"
            )
        return statistics

    def simulated(name: str, recipes: Mapping[int, Any], basis: str) -> Method:
        return Method(name, "simulated", recipes, fidelity.asymmetric_bits(head_dim), basis)

    for name in dict.fromkeys(name.strip() for name in names):
        if name == "bf16":
            continue
        elif name == "int2":
            if rotation_set is None:
                raise ConfigError("method 'int2' needs --rotations")
            check_rotations(rotation_set, config, layers)
            rotations = {layer: rotation_set.layers[layer] for layer in layers}
            bits = fidelity.page_bits(head_dim)
            methods.append(Method(name, "int2", _to_device(rotations), bits, rotation_set.header.basis))
        elif name.startswith("int2:"):
            basis, damping, multiplier = parse_basis(name)
            rotations = {
                layer: fit_layer_rotation(
                    needed(name)[layer],
                    basis,
                    per_head=True,
                    damping=damping,
                    key_multiplier=multiplier,
                )
                for layer in layers
            }
            methods.append(Method(name, "int2", _to_device(rotations), fidelity.page_bits(head_dim), basis))
        elif name == "published":
            recipes = {layer: published_recipe(needed(name)[layer]) for layer in layers}
            methods.append(simulated(name, recipes, "oscar, layer-shared"))
        elif name in ("hadamard", "naive"):
            matrix = hadamard if name == "hadamard" else identity
            clips = (KEY_CLIP_RATIO, VALUE_CLIP_RATIO) if name == "hadamard" else (1.0, 1.0)
            recipe = fidelity.make_recipe(matrix, matrix, *clips)
            methods.append(simulated(name, dict.fromkeys(layers, recipe), name.replace("naive", "none")))
        else:
            raise ConfigError(f"unknown method {name!r}, allowed: {', '.join(METHODS)}, int2:BASIS")
    return methods


def _to_device(rotations: Mapping[int, Any]) -> dict[int, Any]:
    return jax.tree.map(jnp.asarray, dict(rotations))


def parse_basis(name: str) -> tuple[str, float, int]:
    """Basis, damping and key multiplier of a method "int2:BASIS[@DAMPING[@ALPHA]]"; raises ConfigError."""
    basis, *numbers = name.removeprefix("int2:").split("@")
    if basis not in KEY_BASES:
        raise ConfigError(f"method {name!r}: basis {basis!r}, allowed: {', '.join(KEY_BASES)}")
    try:
        damping, alpha = [float(number) for number in numbers] + DEFAULT_BASIS_NUMBERS[len(numbers) :]
    except ValueError:
        raise ConfigError(f"method {name!r}: expected int2:BASIS@DAMPING@ALPHA with numbers") from None
    return basis, damping, round(alpha * (1 << fmt.MULTIPLIER_BITS))


def published_recipe(statistics: Any) -> fidelity.AsymmetricRecipe:
    """The published recipe of one layer: layer-shared OSCAR rotations, clip .96 and .92, asymmetric codes."""
    values = statistics.surrogate_value_covariance
    if values is None:
        raise ConfigError(
            "the statistics have no surrogate value covariance: calibrate on more than one chunk"
        )
    key, value = fit_published_rotation(statistics.query_covariance), fit_published_rotation(values)
    return fidelity.make_recipe(key[None], value[None], KEY_CLIP_RATIO, VALUE_CLIP_RATIO)


def check_rotations(rotation_set: RotationSet, config: ModelConfig, layers: Sequence[int]) -> None:
    """Raises CheckpointError unless the rotation set was made for this model and covers `layers`."""
    header = rotation_set.header
    if header.model_id != config.model_id:
        raise CheckpointError(
            f"the rotation set was made for model {header.model_id!r}, this model is {config.model_id!r}"
        )
    for name in ("num_query_heads", "num_key_value_heads", "head_dim"):
        if getattr(header, name) != getattr(config, name):
            raise CheckpointError(
                f"the rotation set has {name} = {getattr(header, name)}, the model {getattr(config, name)}"
            )
    if missing := [layer for layer in layers if layer not in rotation_set.layers]:
        raise CheckpointError(f"the rotation set lacks layer {missing[0]}; it has {list(header.layers)}")


@dataclasses.dataclass
class StreamResult:
    """What one stream yields: per-position measures of every method and per-layer attention errors."""

    stream: TokenStream
    positions: np.ndarray  # int32 [R]
    nll: dict[str, np.ndarray]  # method -> float32 [R]
    kl: dict[str, np.ndarray]
    top1: dict[str, np.ndarray]
    layer_errors: dict[str, dict[int, dict[str, float]]]
    cache_bytes: dict[str, dict[str, int]]


def judged_positions(context: int, every: int, config: CacheConfig) -> np.ndarray:
    """Positions where next-token distributions are compared: past sink, recent and one page, int32 [R]."""
    first = config.sink_tokens + config.recent_tokens + fmt.PAGE_TOKENS
    positions = np.arange(first, context - 1, dtype=np.int32)
    return positions[positions % every == 0]


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

    `on_chunk(tokens)` is called after every chunk with the number of tokens done by all methods.
    """
    config = runner.config
    geometry = config.cache_config()
    context = len(tokens)
    positions = judged_positions(context, every, geometry)
    probes = fidelity.probe_positions(context, PROBES, geometry)
    caches = {m.name: allocate_caches(m, config, context, full=layers) for m in methods}
    measures: dict[str, list[list[np.ndarray]]] = {m.name: [] for m in methods}
    probe_queries: list[list[np.ndarray]] = [[] for _ in layers]
    rows = -(-chunk // every)

    for start in range(0, context, chunk):
        count = min(chunk, context - start)
        padded = np.zeros((1, chunk), np.int32)
        padded[0, :count] = tokens[start : start + count]
        new_lengths = jnp.asarray([count], jnp.int32)
        local = positions[(positions >= start) & (positions < start + count)] - start
        index = np.zeros(rows, np.int32)
        index[: len(local)] = local
        targets = tokens[np.minimum(start + index + 1, context - 1)]
        here = probes[(probes >= start) & (probes < start + count)] - start
        measured, captured, reference = {}, [], None
        for method in methods:  # bf16 comes first: it is the reference, of itself as well
            capture = tuple(layers) if method.kind == "bf16" else ()
            hidden, caches[method.name], queries = runner.step(
                runner.state,
                padded,
                caches[method.name],
                new_lengths,
                dict(method.rotations),
                capture=capture,
            )
            captured = queries or captured
            if len(local):
                log_q = runner.log_probabilities(runner.state, hidden, index)
                reference = log_q if method.kind == "bf16" else reference
                measured[method.name] = compare_distributions(reference, log_q, targets)
        # Only now wait for the device: until here it could run ahead of this loop.
        for name, columns in measured.items():
            measures[name].append([np.asarray(column)[: len(local)] for column in columns])
        for store, query in zip(probe_queries, captured):
            store.append(np.asarray(query, np.float32)[0, here])
        on_chunk(count)

    joined = {name: [np.concatenate(column) for column in zip(*chunks)] for name, chunks in measures.items()}
    exact = caches["bf16"]
    errors: dict[str, dict[int, dict[str, float]]] = {m.name: {} for m in methods if m.rotations}
    for layer, stored in zip(layers, probe_queries):
        query = np.concatenate(stored)
        key, value = exact[layer].key[0], exact[layer].value[0]
        for method in methods:
            if method.rotations:
                errors[method.name][layer] = layer_error(
                    query, probes, key, value, method.rotations[layer], config, layer
                )
    nll, kl, top1 = ({name: columns[i] for name, columns in joined.items()} for i in range(3))
    sizes = {m.name: method_bytes(m, caches[m.name], config) for m in methods}
    return StreamResult(stream, positions, nll, kl, top1, errors, sizes)


def summarize(results: Sequence[StreamResult], methods: Sequence[Method]) -> list[dict[str, Any]]:
    """One table row per method over all positions of the given streams."""
    rows = []
    for method in methods:
        nll, kl, top1 = (
            np.concatenate([getattr(result, field)[method.name] for result in results])
            for field in ("nll", "kl", "top1")
        )
        late = np.concatenate([result.positions >= len(result.stream.tokens) // 2 for result in results])
        layers = {
            str(layer): {
                measure: float(
                    np.mean([result.layer_errors[method.name][layer][measure] for result in results])
                )
                for measure in ("kl", "output_error", "value_error")
            }
            for layer in method.rotations
        }
        size = {
            part: round(np.mean([result.cache_bytes[method.name][part] for result in results]))
            for part in results[0].cache_bytes[method.name]
        }
        rows.append(
            {
                "method": method.name,
                "basis": method.basis,
                "bits_per_element": method.bits,
                "perplexity": float(np.exp(nll.astype(np.float64).mean())),
                "kl_mean": _mean(kl),
                "kl_median": float(np.median(kl)),
                "kl_p99": float(np.quantile(kl, 0.99)),
                "kl_mean_first_half": _mean(kl[~late]),
                "kl_mean_second_half": _mean(kl[late]),
                "top1": float(top1.mean()),
                "cache_bytes": size,
                "layers": layers,
            }
        )
    return rows


def _mean(values: np.ndarray) -> float | None:
    return float(values.astype(np.float64).mean()) if len(values) else None


def evaluation_document(
    results: Sequence[StreamResult], methods: Sequence[Method], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, ready for JSON; `about` says of what and with what."""
    return {
        **about,
        "methods": summarize(results, methods),
        "texts": [
            {
                "label": result.stream.label,
                "digest": result.stream.digest,
                "tokens": len(result.stream.tokens),
                "positions": {
                    "first": int(result.positions[0]),
                    "last": int(result.positions[-1]),
                    "count": len(result.positions),
                },
                "methods": summarize([result], methods),
            }
            for result in results
        ],
        "notes": {
            "kl": "KL(bf16 || method) of next-token distributions, nats, at the listed positions",
            "kl_mean_second_half": "the same in the second half of the context; first_half likewise",
            "top1": "share of positions where the likeliest token equals that of bf16",
            "bits_per_element": (
                "of the quantized history: int2 2 + 16/D (row scale) + 8/64 (mean key of a page, keys "
                "and values averaged); asymmetric recipes 2 + 2*16/group, group = 128 channels, or D if 128 "
                "does not divide it"
            ),
            "layers": "attention KL and relative squared output error of a layer on exact inputs",
            "cache_bytes": "live bytes at the end of the context, mean over the texts",
        },
    }


def markdown_report(document: Mapping[str, Any]) -> str:
    """The evaluation as Markdown tables: pooled, then per text, then per layer."""
    quantized, total = document["quantized_layers"], document["num_layers"]
    lines = [
        f"# Evaluation of {document['model']}",
        "",
        f"Context {document['context']} tokens, {document['dtype']} model, chunks of {document['chunk']}, "
        f"every {document['every']}. position; sink {document['sink_tokens']}, recent "
        f"{document['recent_tokens']} tokens in BF16. Quantized in every method: "
        f"{len(quantized)} of {total} layers ({short_list(quantized)}).",
        f"Rotation set: {document['rotations'] or 'none'}. Device: {document['device']}.",
        "",
        "## All texts",
        "",
        *table_lines(document["methods"]),
    ]
    for text in document["texts"]:
        positions = text["positions"]
        lines += [
            "",
            f"## {text['label']}",
            "",
            f"Text digest {text['digest']}, {positions['count']} positions "
            f"{positions['first']} … {positions['last']}.",
            "",
            *table_lines(text["methods"]),
        ]
    layered = [row for row in document["methods"] if row["layers"]]
    if layered:
        lines += ["", "## Attention by layer (exact inputs): KL · relative output error", ""]
        lines += ["| layer | " + " | ".join(row["method"] for row in layered) + " |"]
        lines += ["|---" * (len(layered) + 1) + "|"]
        for layer in layered[0]["layers"]:
            cells = (row["layers"][layer] for row in layered)
            lines.append(
                f"| {layer} | " + " | ".join(f"{c['kl']:.4f} · {c['output_error']:.4f}" for c in cells) + " |"
            )
    lines += ["", *(f"- {name}: {note}" for name, note in document["notes"].items()), ""]
    return "\n".join(lines)


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The main table as Markdown lines."""
    lines = [
        "| method | bits | perplexity | KL mean | median | p99 | 1st half | 2nd half | top-1 "
        "| cache, INT2 layers |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        size = row["cache_bytes"]
        lines.append(
            f"| {row['method']} | {row['bits_per_element']:.4g} | {row['perplexity']:.4g} "
            f"| {row['kl_mean']:.4g} | {row['kl_median']:.4g} | {row['kl_p99']:.4g} "
            f"| {_figure(row['kl_mean_first_half'])} | {_figure(row['kl_mean_second_half'])} "
            f"| {100 * row['top1']:.1f} % | {size['quantized_layers'] / 1e6:.2f} MB |"
        )
    return lines


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def short_list(values: Sequence[int]) -> str:
    """The first dozen of some numbers."""
    text = ", ".join(map(str, values[:12]))
    return text + (", …" if len(values) > 12 else "")


def save_evaluation(
    document: Mapping[str, Any],
    results: Sequence[StreamResult],
    methods: Sequence[Method],
    directory: pathlib.Path,
) -> None:
    """Writes evaluation.json, evaluation.md, evaluation.png and layers.png into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "evaluation.md").write_text(markdown_report(document))
    curves = {method.name: _kl_curve(results, method.name) for method in methods}
    title = f"{document['model']}, {document['context']} tokens"
    plots.save_evaluation_plot(directory / "evaluation.png", document["methods"], curves, title)
    errors = {
        row["method"]: {int(layer): cell["kl"] for layer, cell in row["layers"].items()}
        for row in document["methods"]
        if row["layers"]
    }
    if errors:
        plots.save_layer_error_plot(directory / "layers.png", errors, "attention KL, nats", title)


def _kl_curve(results: Sequence[StreamResult], method: str) -> tuple[np.ndarray, np.ndarray]:
    positions = np.concatenate([result.positions for result in results])
    kl = np.concatenate([result.kl[method] for result in results])
    edges = np.linspace(positions.min(), positions.max() + 1, min(CURVE_BINS, len(positions)) + 1)
    place = np.digitize(positions, edges) - 1
    filled = np.unique(place)
    return (edges[:-1] + edges[1:])[filled] / 2, np.asarray([kl[place == i].mean() for i in filled])


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
        "device": f"{device.platform} {device.device_kind}",
        "versions": {"jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "created": datetime.date.today().isoformat(),
        **settings,
    }


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
