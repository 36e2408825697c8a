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

from ..cache import allocate_dense_cache
from ..core.errors import CheckpointError
from ..core.files import replacing_file
from ..evaluation.stepper import AnyAttention, caches_length
from ..models.config import ModelConfig
from ..quantize import round_to_bfloat16
from . import covariance

HELD_OUT_SHARE = 0.25
HELD_OUT_MOST = 4
STATE_FILE = "calibration_state.npz"


def split_sequences(sequences: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sequences to fit on and sequences to choose on; a single one serves both."""
    if len(sequences) == 1:
        return list(sequences), list(sequences)
    held_out = min(HELD_OUT_MOST, max(1, round(HELD_OUT_SHARE * len(sequences))))
    return list(sequences[:-held_out]), list(sequences[-held_out:])


# The streaming pass.


def make_statistics_step(
    model: Any, config: ModelConfig, layers: Sequence[int]
) -> Callable[..., tuple[list[Any], dict[int, covariance.StatisticsState]]]:
    """A compiled step(state, tokens [1, T], caches, statistics) → (caches, statistics); caches are donated.

    With `statistics` None the step only advances the caches.
    """
    graph, _ = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=2)
    def step(state, tokens, caches, statistics):
        new_lengths = jnp.full(1, tokens.shape[1], jnp.int32)
        updated = {} if statistics is None else dict(statistics)

        strategy = AnyAttention(config, {}, new_lengths)

        def attention(layer: int, query, key, value, cache):
            out, cache = strategy(layer, query, key, value, cache)
            if layer in updated:
                stored = round_to_bfloat16(key[0]), round_to_bfloat16(value[0])
                updated[layer] = covariance.update_statistics(updated[layer], query[0], *stored, out[0])
            return out, cache

        positions = caches_length(caches)[:, None] + jnp.arange(tokens.shape[1])
        _, caches = nnx.merge(graph, state).hidden_states(
            tokens, caches, positions=positions, attention=attention
        )
        return caches, None if statistics is None else updated

    return step


def gather_statistics(
    model: Any,
    config: ModelConfig,
    layers: Sequence[int],
    sequences: Sequence[np.ndarray],
    *,
    chunk: int,
    save_every: int,
    state_path: pathlib.Path | None,
    run_digest: str,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> dict[int, covariance.LayerStatistics]:
    """One pass over `sequences` int32 [S]; running sums are saved to `state_path` every `save_every` chunks.

    A saved state of the same `run_digest` is taken up; the result does not depend on interruptions.
    `on_chunk(tokens)` is called with the tokens of every chunk that is done, also of those skipped.
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
    plan = [
        (number, start, min(chunk, len(sequence) - start))
        for number, sequence in enumerate(sequences)
        for start in range(0, len(sequence), chunk)
    ]
    # The published value basis weighs rows by the query covariance, which must be known before: here from the
    # first fifth of the chunks. See `covariance.fix_surrogate_metric`.
    metric_from = max(1, len(plan) // 5)
    done = 0
    if state_path is not None and state_path.exists():
        statistics, done = load_state(state_path, statistics, run_digest)
    resumed = plan[done][0] if done < len(plan) else len(sequences)
    caches: list[Any] = []
    for index, (number, start, count) in enumerate(plan):
        if number < resumed:
            on_chunk(count)
            continue
        if start == 0:
            caches = _dense_caches(config, len(sequences[number]))
            if index >= done:
                statistics = {k: covariance.start_sequence(s) for k, s in statistics.items()}
        tokens = sequences[number][None, start : start + count]
        if index < done:  # the interrupted sequence: rebuild its cache, count nothing twice
            caches, _ = step(weights, tokens, caches, None)
            on_chunk(count)
            continue
        if index == metric_from:
            statistics = {k: covariance.fix_surrogate_metric(s) for k, s in statistics.items()}
        caches, statistics = jax.block_until_ready(step(weights, tokens, caches, statistics))
        on_chunk(count)
        if state_path is not None and (index + 1) % save_every == 0:
            save_state(state_path, statistics, index + 1, run_digest)
    return {layer: covariance.finalize_statistics(state) for layer, state in statistics.items()}


def _dense_caches(config: ModelConfig, length: int) -> list[Any]:
    geometry = config.cache_config()
    return [allocate_dense_cache(geometry, 1, length, window=window) for window in config.layer_windows]


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
