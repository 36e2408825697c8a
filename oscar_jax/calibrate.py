"""Fits a rotation set to a model: one streaming pass over text, then a choice on held-out sequences.

The pass runs the model chunk by chunk through a BF16 cache and keeps nothing but running sums
(`covariance.py`); they are saved every few chunks, so that an interrupted calibration goes on where it
stopped and ends in the same bytes. The last sequences are held out. On them every candidate, basis and scale
multiplier, is judged by what it does to attention: the real page quantizer, the model's own queries, the
later half of the positions. Calibrated sequences may be short (4096 tokens) although the cache will be long:
covariances are centered page by page and damped, and each page carries its own mean.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import cache_format as fmt
from . import covariance, fidelity, plots, rotation
from .cache import allocate_dense_cache
from .config import CalibrationConfig, CheckpointError, ConfigError
from .models.config import ModelConfig
from .quantize import round_to_bfloat16
from .rotation import LayerRotation, RotationHeader, RotationSet, fit_layer_rotation
from .runner import AnyAttention, Method, Runner, allocate_caches, caches_length, layer_error

HELD_OUT_SHARE = 0.25
HELD_OUT_MOST = 4
PROBES = 192
# Damping 0.01 wins on held-out text as short as the calibration text and loses at 32K (Gemma 3 270M in the
# balanced basis: KL .046 against .033), so it does not compete.
KEY_CANDIDATES = (("channel_balanced", 0.1), ("balanced", 0.1), ("oscar", 0.0), ("hadamard", 0.0))
VALUE_CANDIDATES = ("hadamard", "oscar", "oscar_exact")
# alpha in units of 1/256; bases compete at the first of each: 1.60, 1.30, 1.45, 1.75 and 1.45, 1.30, 1.60
KEY_MULTIPLIERS = (410, 333, 371, 448)
VALUE_MULTIPLIERS = (371, 333, 410)
KEY_FIELDS = ("key_transform", "query_transform", "key_mean")
VALUE_FIELDS = ("value_transform", "output_transform", "value_mean")
MARGIN = 0.97  # a candidate replaces the simplest one only if its error is below this share of it
STATE_FILE = "calibration_state.npz"
STATISTICS_FILE = "statistics.safetensors"
ROTATION_DIRECTORY = "rotation_set"


def rotation_path(given: str) -> pathlib.Path:
    """The rotation set behind what a user names: a calibration's directory, a rotation set, or its file."""
    inside = pathlib.Path(given) / ROTATION_DIRECTORY
    return inside if inside.is_dir() else pathlib.Path(given)


def model_fingerprint(path: pathlib.Path) -> str:
    """Digest of a checkpoint's file names, sizes, first and last MiB; fast, not every byte."""
    digest = hashlib.sha256()
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 20))
            stream.seek(max(0, size - (1 << 20)))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()[:16]


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
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as stream:
        np.savez(stream, **arrays, done=np.int64(done), run_digest=np.asarray(run_digest))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)


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


# The choice on held-out sequences.


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """What one layer saw on one held-out sequence: probed queries and all keys and values."""

    query: jax.Array  # [T, N, D]
    positions: jax.Array  # int32 [T]
    key: jax.Array  # bf16 [S, K, D]
    value: jax.Array  # bf16 [S, K, D]


def observe_sequence(
    runner: Runner,
    layers: Sequence[int],
    tokens: np.ndarray,
    *,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
) -> dict[int, HeldOut]:
    """Runs a held-out sequence through a BF16 cache; keeps queries of the later half of the positions."""
    config = runner.config
    geometry = config.cache_config()
    candidates = fidelity.probe_positions(len(tokens), len(tokens), geometry)
    later = candidates[candidates >= len(tokens) // 2]
    picks = np.unique(np.linspace(0, len(later) - 1, min(PROBES, len(later))).astype(int))
    probes = later[picks] if len(later) else later
    method = Method("bf16", "bf16", {}, 16.0)
    caches = allocate_caches(method, config, len(tokens), full=layers)
    queries: dict[int, list[jax.Array]] = {layer: [] for layer in layers}
    for start in range(0, len(tokens), chunk):
        count = min(chunk, len(tokens) - start)
        part = tokens[None, start : start + count]
        lengths = jnp.full(1, count, jnp.int32)
        _, caches, captured = runner.step(runner.state, part, caches, lengths, {}, capture=tuple(layers))
        here = probes[(probes >= start) & (probes < start + count)] - start
        for layer, query in zip(layers, captured):
            queries[layer].append(jax.block_until_ready(query[0, here]))
        on_chunk(count)
    positions = jnp.asarray(probes)
    return {
        layer: HeldOut(
            jnp.concatenate(queries[layer]), positions, caches[layer].key[0], caches[layer].value[0]
        )
        for layer in layers
    }


@functools.partial(jax.jit, static_argnames=("geometry", "scale", "sliding_window"))
def _key_errors(query, positions, key, value, key_transform, query_transform, multiplier, **options):
    pages = _pad_to_pages(key)
    restored = fidelity.reconstruct_key_pages(pages, key_transform, query_transform, multiplier)[: len(key)]
    errors = fidelity.attention_error(query, positions, key, value, restored, value, **options)
    return errors["kl"], errors["output_error"]


@functools.partial(jax.jit, static_argnames=("geometry", "scale", "sliding_window"))
def _value_errors(query, positions, key, value, transform, inverse, mean, multiplier, **options):
    pages = _pad_to_pages(value)
    restored = fidelity.reconstruct_value_pages(pages, transform, inverse, mean, multiplier)[: len(value)]
    return fidelity.attention_error(query, positions, key, value, key, restored, **options)["output_error"]


def _pad_to_pages(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, -rows.shape[0] % fmt.PAGE_TOKENS), (0, 0), (0, 0)))


def choose_layer_rotation(
    statistics: covariance.LayerStatistics,
    held_out: Sequence[HeldOut],
    config: ModelConfig,
    layer: int,
    *,
    per_head: bool,
) -> tuple[LayerRotation, dict[str, Any]]:
    """The best key and value transform, then the best multipliers, of every head (or of the layer).

    Keys are judged by the geometric mean of attention KL and output error with exact values, values by the
    output error with exact keys. The first candidate wins unless another is at least 3 % better. Returns the
    rotation and what was tried.
    """
    options = {
        "geometry": config.cache_config(),
        "scale": config.attention_scale,
        "sliding_window": config.layer_windows[layer],
    }
    heads = config.num_key_value_heads if per_head else 1

    def over_heads(parts: Sequence[jax.Array]) -> np.ndarray:
        """Mean over sequences, and over all heads if the transform is shared: float64 [heads]."""
        by_head = np.mean([np.asarray(part, np.float64) for part in parts], axis=0)
        return by_head if per_head else by_head.mean(keepdims=True)

    def key_score(fitted: LayerRotation, multiplier: int) -> np.ndarray:
        multipliers = jnp.full(heads, multiplier, jnp.int32)
        arrays = jnp.asarray(fitted.key_transform), jnp.asarray(fitted.query_transform), multipliers
        pairs = [_key_errors(h.query, h.positions, h.key, h.value, *arrays, **options) for h in held_out]
        return np.sqrt(over_heads([kl for kl, _ in pairs]) * over_heads([error for _, error in pairs]))

    def value_score(fitted: LayerRotation, multiplier: int) -> np.ndarray:
        multipliers = jnp.full(heads, multiplier, jnp.int32)
        fields = fitted.value_transform, fitted.output_transform, fitted.value_mean
        arrays = *map(jnp.asarray, fields), multipliers
        return over_heads(
            [_value_errors(h.query, h.positions, h.key, h.value, *arrays, **options) for h in held_out]
        )

    key_fits = {
        f"{basis} {damping:g}" if damping else basis: fit_layer_rotation(
            statistics, basis, per_head=per_head, damping=damping
        )
        for basis, damping in KEY_CANDIDATES
    }
    value_fits = {
        basis: fit_layer_rotation(statistics, "identity", per_head=per_head, damping=0.0, value_basis=basis)
        for basis in VALUE_CANDIDATES
        if basis != "oscar" or statistics.surrogate_value_covariance is not None
    }
    key = _choose(key_fits, KEY_FIELDS, key_score, KEY_MULTIPLIERS)
    value = _choose(value_fits, VALUE_FIELDS, value_score, VALUE_MULTIPLIERS)
    chosen = LayerRotation(
        **key.fields,
        **value.fields,
        key_multiplier=np.asarray(key.multipliers, np.int32),
        value_multiplier=np.asarray(value.multipliers, np.int32),
    )
    return chosen, {
        "key": key.describe(),
        "value": value.describe(),
        "tried": {"key": key.tried, "value": value.tried},
    }


@dataclasses.dataclass(frozen=True)
class Choice:
    """The winners of one role, per head, and the score of everything that was tried."""

    names: list[str]
    multipliers: list[int]
    fields: dict[str, np.ndarray]
    tried: dict[str, list[float]]

    def describe(self) -> list[dict[str, Any]]:
        """Basis and alpha of every head."""
        pairs = zip(self.names, self.multipliers)
        return [{"basis": name, "alpha": multiplier / 256} for name, multiplier in pairs]


def _choose(
    fits: Mapping[str, LayerRotation],
    fields: Sequence[str],
    score: Callable[[LayerRotation, int], np.ndarray],
    multipliers: Sequence[int],
) -> Choice:
    """First the basis at the first multiplier, head by head, then the multiplier of the chosen mixture."""
    names = list(fits)
    by_basis = np.stack([score(fit, multipliers[0]) for fit in fits.values()])  # [candidates, heads]
    best = by_basis.argmin(axis=0)
    best = np.where(by_basis.min(axis=0) < MARGIN * by_basis[0], best, 0)
    mixture = {
        field: np.stack([getattr(fits[names[winner]], field)[head] for head, winner in enumerate(best)])
        for field in fields
    }
    mixed = dataclasses.replace(next(iter(fits.values())), **mixture)
    at_first = by_basis[best, np.arange(len(best))]
    by_multiplier = np.stack([at_first, *(score(mixed, m) for m in multipliers[1:])])
    tried = {name: row.tolist() for name, row in zip(names, by_basis)}
    tried |= {f"alpha {m / 256:.2f}": row.tolist() for m, row in zip(multipliers, by_multiplier)}
    return Choice(
        [names[winner] for winner in best],
        [multipliers[winner] for winner in by_multiplier.argmin(axis=0)],
        mixture,
        tried,
    )


# The whole run.


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A fitted rotation set with what it was fitted on and what it promises."""

    rotation_set: RotationSet
    statistics: dict[int, covariance.LayerStatistics]
    report: dict[str, Any]


def fit_rotation_set(
    runner: Runner,
    statistics: Mapping[int, covariance.LayerStatistics],
    held_out: Sequence[np.ndarray],
    settings: CalibrationConfig,
    header: RotationHeader,
    *,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Calibration:
    """Fits every layer of `statistics` and judges it on the `held_out` sequences (int32 [S] each).

    With basis "auto" the candidates compete there, layer by layer and head by head.
    """
    config = runner.config
    layers = tuple(statistics)
    observed = [
        observe_sequence(runner, layers, tokens, chunk=chunk, on_chunk=on_chunk) for tokens in held_out
    ]
    rotations: dict[int, LayerRotation] = {}
    by_layer: dict[str, Any] = {}
    for layer in layers:
        seen = [observation[layer] for observation in observed if len(observation[layer].positions)]
        alpha = KEY_MULTIPLIERS[0] / (1 << fmt.MULTIPLIER_BITS)
        name = f"{settings.basis} {settings.damping:g}"
        chosen: dict[str, Any] = {"key": [{"basis": name, "alpha": alpha}]}
        if settings.basis == "auto":
            if not seen:
                raise ConfigError(
                    f"basis 'auto' needs held-out sequences of at least {_least_context(config)} tokens, "
                    f"these have {max(map(len, held_out))}: give more text, or name a basis"
                )
            rotations[layer], chosen = choose_layer_rotation(
                statistics[layer], seen, config, layer, per_head=settings.per_head
            )
        else:
            rotations[layer] = fit_layer_rotation(
                statistics[layer],
                settings.basis,
                per_head=settings.per_head,
                damping=settings.damping,
                key_multiplier=KEY_MULTIPLIERS[0],
            )
        fitted = jax.tree.map(jnp.asarray, rotations[layer])
        errors = [layer_error(h.query, h.positions, h.key, h.value, fitted, config, layer) for h in seen]
        by_layer[str(layer)] = {
            "chosen": {name: chosen[name] for name in ("key", "value") if name in chosen},
            "tried": chosen.get("tried", {}),
            "predicted": {k: float(np.mean([e[k] for e in errors])) for k in errors[0]} if errors else {},
            "key_condition_number": rotation.condition_number(rotations[layer].key_transform),
            "value_condition_number": rotation.condition_number(rotations[layer].value_transform),
        }
        on_layer(layer)
    header = dataclasses.replace(
        header,
        extra={
            **header.extra,
            "choices": {layer: entry["chosen"] for layer, entry in by_layer.items()},
        },
    )
    return Calibration(RotationSet(header, rotations), dict(statistics), {"layers": by_layer})


def _least_context(config: ModelConfig) -> int:
    geometry = config.cache_config()
    return geometry.sink_tokens + geometry.recent_tokens + fmt.PAGE_TOKENS


def save_statistics(statistics: Mapping[int, covariance.LayerStatistics], path: pathlib.Path) -> None:
    """Writes the statistics as float64 safetensors: other bases can be fitted without another pass."""
    from safetensors.numpy import save_file

    arrays, scalars = {}, {}
    for layer, entry in statistics.items():
        for field in dataclasses.fields(entry):
            value = getattr(entry, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"{layer}.{field.name}"] = value
            elif value is not None:
                scalars[f"{layer}.{field.name}"] = value
    # One metadata entry: the library writes several in no fixed order, and equal statistics are equal bytes.
    save_file(arrays, path, metadata={"scalars": json.dumps(scalars, sort_keys=True)})


def load_statistics(path: pathlib.Path) -> dict[int, covariance.LayerStatistics]:
    """Reads what `save_statistics` wrote; raises CheckpointError if it is damaged or of another version."""
    from safetensors import SafetensorError, safe_open

    layers: dict[int, dict[str, Any]] = {}
    try:
        with safe_open(path, "numpy") as stored:
            values = {name: stored.get_tensor(name) for name in stored.keys()}
            values |= json.loads(stored.metadata()["scalars"])
        for name, value in values.items():
            layer, _, field = name.partition(".")
            layers.setdefault(int(layer), {})[field] = value
        optional: dict[str, Any] = {"surrogate_value_covariance": None, "exact_value_covariance": None}
        found = {k: covariance.LayerStatistics(**(optional | v)) for k, v in sorted(layers.items())}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a statistics file: {error}") from None
    for layer, entry in found.items():
        if entry.version != covariance.STATISTICS_VERSION:
            raise CheckpointError(
                f"{path}: layer {layer} has statistics version {entry.version!r}, "
                f"expected {covariance.STATISTICS_VERSION!r}"
            )
    return found


def save_report(calibration: Calibration, directory: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Writes report.json, report.md, eigenvalues.png, channels.png and layers.png into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {**about, **calibration.report}
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "report.md").write_text(markdown_report(document))
    statistics, rotations = calibration.statistics, calibration.rotation_set.layers

    def spectrum(matrices: np.ndarray) -> np.ndarray:
        return np.linalg.eigvalsh(matrices).mean(axis=0)

    plots.save_eigenvalue_plot(
        directory / "eigenvalues.png",
        {layer: spectrum(s.query_covariance) for layer, s in statistics.items()},
        {layer: spectrum(s.key_covariance) for layer, s in statistics.items()},
    )
    before, after = {}, {}
    for layer, entry in statistics.items():
        transform = rotation.from_fixed_point(rotations[layer].key_transform)
        covariances = entry.key_covariance
        before[layer] = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2)).mean(axis=0)
        rotated = transform.swapaxes(1, 2) @ covariances @ transform
        after[layer] = np.sqrt(np.maximum(np.diagonal(rotated, axis1=1, axis2=2), 0)).mean(axis=0)
    plots.save_outlier_plot(directory / "channels.png", before, after)
    predicted = {int(layer): entry["predicted"] for layer, entry in document["layers"].items()}
    if all(predicted.values()):
        plots.save_layer_error_plot(
            directory / "layers.png",
            {
                "attention KL, nats": {layer: errors["kl"] for layer, errors in predicted.items()},
                "relative output error": {layer: e["output_error"] for layer, e in predicted.items()},
            },
            "predicted error",
            f"{document['model']}, held-out text",
        )


def markdown_report(document: Mapping[str, Any]) -> str:
    """The calibration report as Markdown."""
    lines = [
        f"# Calibration of {document['model']}",
        "",
        f"Basis {document['basis']}, {'per head' if document['per_head'] else 'shared in a layer'}; "
        f"{document['fit_tokens']} tokens to fit, {document['held_out_tokens']} held out, sequences of "
        f"{document['context']} tokens, {document['dtype']} model, text digest {document['corpus_digest']}.",
        "",
        "Predicted errors: attention over INT2 pages against exact attention on held-out text, at positions "
        "in the later half of the sequences, means over heads.",
        "",
        "| layer | keys | values | attention KL | output error | of values alone | condition of T_K |",
        "|---|---|---|---|---|---|---|",
    ]
    for layer, entry in document["layers"].items():
        predicted = entry["predicted"]
        cells = [f"{predicted[k]:.4g}" if predicted else "–" for k in ("kl", "output_error", "value_error")]
        keys = _describe(entry["chosen"].get("key", []))
        values = _describe(entry["chosen"].get("value", []))
        condition = f"{entry['key_condition_number']:.3g}"
        lines.append(f"| {layer} | {keys} | {values or 'hadamard'} | {' | '.join(cells)} | {condition} |")
    if not document["held_out_is_separate"]:
        lines += ["", "The text was too short to hold a sequence out: the errors are on the fitted text."]
    lines += ["", "![eigenvalues](eigenvalues.png)", "![channels](channels.png)", ""]
    return "\n".join(lines)


def _describe(choices: Sequence[Mapping[str, Any]]) -> str:
    words = []
    for choice in choices:
        text = str(choice["basis"])
        if "alpha" in choice:
            text += f" α {choice['alpha']:.2f}"
        words.append(text)
    counted = {word: words.count(word) for word in words}
    return ", ".join(word if count == 1 else f"{count}× {word}" for word, count in counted.items())
