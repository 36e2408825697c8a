"""One pass over the calibration text: running sums per layer, resumable, saved for other fits."""

import dataclasses
import functools
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core import cache_format as fmt
from ..core.errors import CheckpointError
from ..core.files import replacing_file
from ..evaluation.blockwise import coded_share, finish
from ..evaluation.stepper import ModelRows, allocate_model_rows, attend_and_store, padding_of
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..quantize import round_to_bfloat16
from ..rotations.statistics import LayerStatistics
from . import covariance

STATE_FILE = "calibration_state.npz"


# The streaming pass.


def make_statistics_step(
    model: Decoder, config: ModelConfig, layers: Sequence[int]
) -> Callable[..., tuple[ModelRows, dict[int, covariance.StatisticsState]]]:
    """A compiled step(state, tokens int32 [B, T], start, count, rows, statistics) -> (rows, statistics).

    The first `count` tokens are real. The old rows are consumed. With `statistics` None only rows are added.
    """
    graph, _ = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=4)
    def step(state, tokens, start, count, rows, statistics):
        updated = {} if statistics is None else dict(statistics)

        def attention(layer: int, query, key, value, state, **sinks):
            part, state = attend_and_store(
                config, layer, query, key, value, state, start, None, measure_coded=layer in updated
            )
            out = finish([part], **sinks)
            if layer in updated:
                # The statistics are of the rows that a cache stores.
                rows = query, round_to_bfloat16(key), round_to_bfloat16(value), out
                share = coded_share(part, **sinks)
                updated[layer] = covariance.update_pages(updated[layer], *rows, share, start, count)
            return out, state

        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        _, rows = nnx.merge(graph, state).hidden_states(
            tokens, rows, positions=positions, attention=attention, **padding_of(config, tokens, count)
        )
        return rows, None if statistics is None else updated

    return step


def gather_statistics(
    model: Decoder,
    config: ModelConfig,
    layers: Sequence[int],
    sequences: Sequence[np.ndarray],
    *,
    chunk: int,
    save_every: int,
    state_path: pathlib.Path | None,
    run_digest: str,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> dict[int, LayerStatistics]:
    """One pass over `sequences` int32 [S] of one length; `state_path` gets the sums every `save_every` steps.

    A step takes `chunk` tokens: of one sequence, or of as many whole sequences as fit. A saved state of the
    same `run_digest` is taken up; the result does not depend on interruptions. `on_chunk(tokens)` is called
    with the tokens of every step that is done, also of those skipped.
    """
    step = make_statistics_step(model, config, layers)
    _, weights = nnx.split(model)
    # A metric of zeros gathers nothing, and lets one compiled step serve before and after it is fixed.
    no_metric = jnp.zeros((config.num_key_value_heads, config.head_dim, config.head_dim), jnp.float32)
    statistics = {
        layer: dataclasses.replace(
            covariance.init_statistics(
                config.num_key_value_heads, config.head_dim, skip_tokens=config.cache_config().sink_tokens
            ),
            surrogate_metric=no_metric,
        )
        for layer in layers
    }
    length = len(sequences[0])
    width = min(chunk, -(-length // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS)
    # As many as fit and divide the whole, so that one compiled step serves all.
    most = max(1, chunk // width) if width >= length else 1
    together = max(n for n in range(1, most + 1) if len(sequences) % n == 0)
    groups = [np.stack(sequences[i : i + together]) for i in range(0, len(sequences), together)]
    plan = [(number, start) for number in range(len(groups)) for start in range(0, length, width)]
    # The published value basis weighs rows by the query covariance, which must be known before: here from the
    # first fifth of the steps. See `covariance.fix_surrogate_metric`.
    metric_from = max(1, len(plan) // 5)
    done = 0
    if state_path is not None and state_path.exists():
        statistics, done = load_state(state_path, statistics, run_digest)
    resumed = plan[done][0] if done < len(plan) else len(groups)
    rows: ModelRows = []
    running: tuple[Any, int] | None = None  # something that is ready when the last step is, and its tokens
    for index, (number, start) in enumerate(plan):
        group = groups[number]
        count = min(width, length - start)
        if number < resumed:
            on_chunk(count * len(group))
            continue
        if start == 0:
            rows = allocate_model_rows(config, len(group), -(-length // width) * width)
        tokens = np.zeros((len(group), width), np.int32)
        tokens[:, :count] = group[:, start : start + count]
        if index < done:  # the interrupted group: rebuild its rows, count nothing twice
            rows, _ = step(weights, tokens, start, count, rows, None)
            on_chunk(count * len(group))
            continue
        if index == metric_from:
            statistics = {k: covariance.fix_surrogate_metric(s) for k, s in statistics.items()}
        rows, statistics = step(weights, tokens, start, count, rows, statistics)
        # The device is given a step before the one before it is waited for.
        if running is not None:
            jax.block_until_ready(running[0])
            on_chunk(running[1])
        running = (statistics[layers[0]].query_rows, count * len(group))
        if state_path is not None and (index + 1) % save_every == 0:
            save_state(state_path, statistics, index + 1, run_digest)
    if running is not None:
        jax.block_until_ready(running[0])
        on_chunk(running[1])
    return {
        layer: dataclasses.replace(covariance.finalize_statistics(state), **_positions(config, layer, length))
        for layer, state in statistics.items()
    }


def _positions(config: ModelConfig, layer: int, context: int) -> dict[str, Any]:
    """What statistics say of positions: how keys turn with them, and up to where the model has some."""
    rope = config.layer_rope(layer)
    frequencies = np.zeros(0) if rope is None else rope.inverse_frequencies(config.head_dim)
    return {
        "rope_frequencies": np.asarray(frequencies, np.float64),
        "rope_interleaved": rope is not None and rope.interleaved,
        "context": context,
        "reach": max(context, config.max_positions),
    }


def save_state(
    path: pathlib.Path, statistics: Mapping[int, covariance.StatisticsState], done: int, run_digest: str
) -> None:
    """Writes the running sums after `done` chunks, atomically."""
    arrays: dict[str, Any] = {
        f"{layer}/{number}": np.asarray(leaf)
        for layer, state in statistics.items()
        for number, leaf in enumerate(jax.tree.leaves(state))
    }
    with replacing_file(path) as partial, partial.open("wb") as stream:
        np.savez(stream, **arrays, done=np.int64(done), run_digest=np.asarray(run_digest))


def load_state(
    path: pathlib.Path, empty: Mapping[int, covariance.StatisticsState], run_digest: str
) -> tuple[dict[int, covariance.StatisticsState], int]:
    """Running sums and the number of chunks they hold; raises CheckpointError for another run's state."""
    try:
        with np.load(path) as stored:
            found, done = str(stored["run_digest"]), int(stored["done"])
            if found != run_digest:
                raise CheckpointError(
                    f"{path} belongs to a calibration with other model, text or settings; "
                    "choose another --out or forget it with --restart"
                )
            restored = {}
            for layer, state in empty.items():
                leaves, tree = jax.tree.flatten(state)
                arrays = [jnp.asarray(stored[f"{layer}/{i}"]) for i in range(len(leaves))]
                restored[layer] = jax.tree.unflatten(tree, arrays)
            return restored, done
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged ({error}); forget it with --restart") from None
