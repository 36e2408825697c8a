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
from jax.sharding import PartitionSpec

from ..arithmetic import compiled_quickly
from ..core import cache_format as fmt
from ..core.errors import CheckpointError, ConfigError
from ..core.files import replacing_file
from ..evaluation.blockwise import coded_share, finish
from ..evaluation.stepper import ModelRows, allocate_model_rows, attend_and_store, padding_of
from ..models.config import ModelConfig
from ..models.experts import DATA_AXIS, MODEL_AXIS
from ..models.protocol import LanguageModel
from ..models.weights import host_array
from ..quantize import round_to_bfloat16
from ..rotations.statistics import LayerStatistics
from ..sharding.caches import ROWS
from ..sharding.mesh import spread
from . import covariance

STATE_FILE = "calibration_state.npz"


# The streaming pass.


def make_statistics_step(
    model: LanguageModel, config: ModelConfig, layers: Sequence[int]
) -> Callable[..., tuple[ModelRows, Any]]:
    """A compiled step(state, tokens int32 [B, T], start, counts, rows, statistics) -> (rows, statistics).

    The first counts[b] tokens of sequence b are real. The old rows are consumed. With `statistics` None only
    rows are added. Inside `jax.set_mesh` sequences lie along `data`, and statistics have a leading axis with
    one state per data shard.
    """
    graph, _ = nnx.split(model)
    mesh = jax.sharding.get_abstract_mesh()

    def of_layer(layer, query, key, value, stored, statistics, start, counts, sinks):
        part, stored = attend_and_store(
            config, layer, query, key, value, stored, start, None, measure_coded=statistics is not None
        )
        out = finish([part], **sinks)
        if statistics is not None:
            # The statistics are of the rows that a cache stores.
            rows = query, round_to_bfloat16(key), round_to_bfloat16(value), out
            share = coded_share(part, **sinks)
            statistics = covariance.update_pages(statistics, *rows, share, start, counts)
        return out, stored, statistics

    def of_layer_on_a_mesh(layer, query, key, value, stored, statistics, start, counts, sinks):
        def of_a_shard(query, key, value, stored, statistics, start, counts, sinks):
            own = jax.tree.map(lambda leaf: leaf[0], statistics)
            out, stored, own = of_layer(layer, query, key, value, stored, own, start, counts, sinks)
            return out, stored, jax.tree.map(lambda leaf: leaf[None], own)

        sums = None if statistics is None else _lane_specs(statistics)
        places = PartitionSpec(DATA_AXIS, MODEL_AXIS)
        inputs = (ROWS, ROWS, ROWS, places, sums, PartitionSpec())
        return jax.shard_map(
            of_a_shard,
            in_specs=(*inputs, PartitionSpec(DATA_AXIS), PartitionSpec(MODEL_AXIS)),
            out_specs=(ROWS, places, sums),
            check_vma=False,
        )(query, key, value, stored, statistics, start, counts, sinks)

    one_layer = of_layer if mesh.empty else of_layer_on_a_mesh

    @compiled_quickly(donate_argnums=4)
    def step(state, tokens, start, counts, rows, statistics):
        updated = {} if statistics is None else dict(statistics)
        tokens = spread(tokens, DATA_AXIS)

        def attention(layer: int, query, key, value, state, **sinks):
            sums = updated.get(layer)
            out, state, sums = one_layer(layer, query, key, value, state, sums, start, counts, sinks)
            if sums is not None:
                updated[layer] = sums
            return out, state

        positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
        _, rows = nnx.merge(graph, state).hidden_states(
            tokens, rows, positions=positions, attention=attention, **padding_of(config, tokens, counts)
        )
        return rows, None if statistics is None else updated

    return step


def _lane_specs(statistics: covariance.StatisticsState) -> covariance.StatisticsState:
    """How states with a leading axis of data shards lie on a mesh: heads along `model`."""
    lane, heads = PartitionSpec(DATA_AXIS), PartitionSpec(DATA_AXIS, MODEL_AXIS)
    specs = jax.tree.map(lambda leaf: heads if leaf.ndim > 1 else lane, statistics)
    return dataclasses.replace(specs, open_page=PartitionSpec(DATA_AXIS, None, MODEL_AXIS))


def _in_lanes(state: covariance.StatisticsState, lanes: int) -> covariance.StatisticsState:
    """The same state once per data shard, on the mesh of the context."""
    wide = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (lanes, *leaf.shape)), state)
    return jax.tree.map(jax.lax.with_sharding_constraint, wide, _lane_specs(wide))


def _merged(state: covariance.StatisticsState, lanes: int | None) -> covariance.StatisticsState:
    """The sums over all lanes, lane by lane; without lanes the state itself."""
    if lanes is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    leaves = [host_array(leaf) for leaf in leaves]
    parts = [jax.tree.unflatten(structure, [leaf[lane] for leaf in leaves]) for lane in range(lanes)]
    return functools.reduce(covariance.merge_statistics, parts)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which sequences go through the decoder together, and from which step on the surrogate metric is fixed.

    The metric, the query covariance that the published value basis weighs rows by, is that of the first fifth
    of the sequences, or of the first chunks of the first one if there are fewer than five: it depends neither
    on how many go together nor on the mesh. See `covariance.fix_surrogate_metric`.
    """

    groups: list[Sequence[np.ndarray]]  # at most `size` each
    size: int
    steps: list[tuple[int, int]]  # group and first token
    metric_from: int

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], width: int, most: int, lanes: int) -> "_Plan":
        count = len(sequences)
        first = count // 5 or 1  # sequences that go before all others
        rounds = -(-count // (most * lanes))
        size = lanes * -(-count // (rounds * lanes))  # as few steps as possible, filled evenly
        groups: list[Sequence[np.ndarray]] = []
        for part in (sequences[:first], sequences[first:]):
            groups += [part[i : i + size] for i in range(0, len(part), size)]
        starts = [range(0, max(map(len, group)), width) for group in groups]
        steps = [(number, start) for number, group in enumerate(starts) for start in group]
        before = sum(map(len, starts[: -(-first // size)]))
        chunks = sum(-(-len(sequence) // width) for sequence in sequences)
        metric_from = before if count >= 5 else max(1, chunks // 5)
        return cls(groups, size, steps, metric_from)


def gather_statistics(
    model: LanguageModel,
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
    """One pass over `sequences` int32 [S] of any length; `state_path` gets the sums every `save_every` steps.

    A step takes `chunk` tokens: of one sequence, or of as many whole sequences as fit, the shorter ones
    padded on the right; padding counts nowhere. A saved state of the same `run_digest` is taken up; the
    result does not depend on interruptions. `on_chunk(tokens)` is called with the tokens of every step done,
    also of those skipped. Raises ConfigError for an empty sequence.

    Inside `jax.set_mesh` every data shard takes a chunk of sequences of its own into sums of its own, which
    are merged at the end. The products that are added up are those of one device, and adding float32 pairs
    loses less than 2**-40 of the sum of their magnitudes: so much may statistics of another split differ.
    """
    if not sequences or not all(len(sequence) for sequence in sequences):
        raise ConfigError(
            f"sequences of {[len(s) for s in sequences]} tokens, allowed: at least one, none empty"
        )
    mesh = jax.sharding.get_abstract_mesh()
    lanes = None if mesh.empty else mesh.shape[DATA_AXIS]
    step = make_statistics_step(model, config, layers)
    _, weights = nnx.split(model)
    # A metric of zeros gathers nothing, and lets one compiled step serve before and after it is fixed.
    no_metric = jnp.zeros((config.num_key_value_heads, config.head_dim, config.head_dim), jnp.float32)
    empty = dataclasses.replace(
        covariance.init_statistics(
            config.num_key_value_heads, config.head_dim, skip_tokens=config.cache_config().sink_tokens
        ),
        surrogate_metric=no_metric,
    )
    statistics = {layer: empty if lanes is None else _in_lanes(empty, lanes) for layer in layers}
    length = max(map(len, sequences))
    width = min(chunk, -(-length // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS)
    most = max(1, chunk // width) if width >= length else 1
    plan = _Plan.of(sequences, width, most, lanes or 1)
    done = 0
    if state_path is not None and state_path.exists():
        statistics, done = load_state(state_path, statistics, run_digest)
    resumed = plan.steps[done][0] if done < len(plan.steps) else len(plan.groups)
    rows: ModelRows = []
    running: tuple[Any, int] | None = None  # something that is ready when the last step is, and its tokens
    for index, (number, start) in enumerate(plan.steps):
        parts = [sequence[start : start + width] for sequence in plan.groups[number]]
        counts = np.zeros(plan.size, np.int32)
        counts[: len(parts)] = [len(part) for part in parts]
        here = int(counts.sum())
        if number < resumed:
            on_chunk(here)
            continue
        if start == 0:
            rows = allocate_model_rows(config, plan.size, -(-length // width) * width)
        tokens = np.zeros((plan.size, width), np.int32)
        for row, part in zip(tokens, parts):
            row[: len(part)] = part
        if index < done:  # the interrupted group: rebuild its rows, count nothing twice
            rows, _ = step(weights, tokens, start, counts, rows, None)
            on_chunk(here)
            continue
        if index == plan.metric_from:
            for layer, state in statistics.items():
                metric = covariance.fix_surrogate_metric(_merged(state, lanes)).surrogate_metric
                if lanes is not None:
                    metric = _in_lanes(
                        dataclasses.replace(empty, surrogate_metric=metric), lanes
                    ).surrogate_metric
                # Nothing was weighed before: the metric was zero.
                statistics[layer] = dataclasses.replace(state, surrogate_metric=metric)
        rows, statistics = step(weights, tokens, start, counts, rows, statistics)
        # The device is given a step before the one before it is waited for.
        if running is not None:
            jax.block_until_ready(running[0])
            on_chunk(running[1])
        running = (statistics[layers[0]].query_rows, here)
        if state_path is not None and (index + 1) % save_every == 0:
            save_state(state_path, statistics, index + 1, run_digest)
    if running is not None:
        jax.block_until_ready(running[0])
        on_chunk(running[1])
    return {
        layer: dataclasses.replace(
            covariance.finalize_statistics(_merged(state, lanes)), **_positions(config, layer, length)
        )
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
        f"{layer}/{number}": host_array(leaf)
        for layer, state in statistics.items()
        for number, leaf in enumerate(jax.tree.leaves(state))
    }
    if jax.process_index():  # the first host writes
        return
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
