"""What two bits cost: perplexity, KL to BF16, attention error, memory and retrieval, all on the same text.

All methods walk through the same tokens side by side, chunk by chunk, each with its own cache, so that memory
does not grow with the number of judged positions. The BF16 method is the same model with a BF16 cache; `int2`
is the real page cache; the asymmetric recipes are simulated: they read rows that were quantized and
restored, for exactly the tokens whose pages would be INT2. Prefill runs in chunks of 64 tokens by default, so
that every query sees the windows it would see in decoding: 256 ... 319 recent tokens and its own chunk.
"""

import datetime
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..models.config import ModelConfig
from ..rotations.rotation import RotationSet
from . import fidelity
from .report import StreamResult
from .stepper import Method, Runner, allocate_caches, compare_distributions, layer_error, method_bytes
from .streams import TextError, TokenStream

PROBES = 256  # query positions at which attention itself is compared


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
