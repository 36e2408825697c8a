"""Fits a rotation set to a model: one streaming pass over text, then a choice on held-out sequences.

The pass runs the model chunk by chunk through a BF16 cache and keeps nothing but running sums
(`covariance.py`); they are saved every few chunks, so that an interrupted calibration goes on where it
stopped and ends in the same bytes. The last sequences are held out. On them every candidate, basis and scale
multiplier, is judged by what it does to attention: the real page quantizer, the model's own queries, the
later half of the positions. Calibrated sequences may be short (4096 tokens) although the cache will be long:
covariances are centered page by page and damped, and each page carries its own mean.
"""

import dataclasses
import datetime
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from ..arithmetic import default_chunk
from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import CheckpointError, ConfigError
from ..core.rotation_header import FINGERPRINT_FIELD, RotationHeader
from ..evaluation import streams
from ..evaluation.job import about_this_run
from ..evaluation.stepper import Runner, make_runner
from ..evaluation.subject import Progress, Subject, load_subject, no_progress
from ..models.weights import weights_fingerprint
from ..rotations import bases, store
from ..rotations import statistics as statistics_file
from ..rotations.rotation import RotationSet, validate_rotation_set
from ..rotations.statistics import LayerStatistics
from . import choice
from . import statistics as running_sums
from .held_out import LayerJudge, least_context, observe_sequence
from .report import Calibration, save_report

SAVE_EVERY = 8  # forward passes


def calibrate(
    model: Subject | str | os.PathLike[str],
    texts: Sequence[str],
    out: str | os.PathLike[str],
    settings: CalibrationConfig | None = None,
    *,
    field: str | None = None,
    all_layers: bool = False,
    dtype: str | None = None,
    chunk: int | None = None,
    save_every: int = SAVE_EVERY,
    restart: bool = False,
    progress: Progress = no_progress,
) -> Calibration:
    """Fits a rotation set to a model on some text and writes set, statistics and report into `out`.

    `model` is a checkpoint, a weights package or a loaded Subject; `texts` are sources as the command line
    takes them (see `evaluation.streams`), `field` that of .jsonl lines; each gives an equal share of the
    tokens. An interrupted run is taken up where it stopped unless `restart`. Raises ConfigError, TextError or
    CheckpointError naming what is wrong.
    """
    settings = CalibrationConfig() if settings is None else settings
    chunk = default_chunk() if chunk is None else chunk
    if chunk < fmt.PAGE_TOKENS or chunk % fmt.PAGE_TOKENS:
        raise ConfigError(f"chunk = {chunk}, allowed: multiples of {fmt.PAGE_TOKENS}")
    if save_every < 1:
        raise ConfigError(f"save-every = {save_every}, allowed: >= 1")
    for source in texts:
        streams.check_source(source)
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)  # before anything expensive: a file may stand there
    subject = load_subject(model, dtype)
    config = subject.config
    layers = subject.int2_layers(all_layers=all_layers)
    found = [streams.read_stream([source], subject.encode, settings.tokens, field) for source in texts]
    sequences = streams.cut_sequences(found, settings.tokens, settings.context, config.bos_token_id)
    fitted, held_out = choice.split_sequences(sequences)
    digest = streams.combined_digest(found)
    about = about_this_run(
        config,
        subject.dtype,
        per_head=settings.per_head,
        damping=settings.damping,
        context=settings.context,
        chunk=chunk,
        layers_with_rotation=list(layers),
        fit_tokens=sum(map(len, fitted)),
        held_out_tokens=sum(map(len, held_out)),
        held_out_is_separate=fitted[-1] is not held_out[-1],
        corpus_digest=digest,
        statistics_version=statistics_file.STATISTICS_VERSION,
        document_digests=[d for stream in found for d in stream.document_digests],
    )
    fingerprint = config.fingerprint or weights_fingerprint(subject.model)
    run = repr((fingerprint, [s.tolist() for s in fitted], chunk, layers, about["dtype"], about["device"]))
    if subject.mesh is not None:
        run += repr(dict(subject.mesh.shape))
    header = RotationHeader(
        model_id=config.model_id,
        layers=layers,
        num_query_heads=config.num_query_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope="half",
        basis="",
        basis_version="",
        corpus_digest=digest,
        calibration_tokens=about["fit_tokens"],
        versions=about["versions"],
        created=about["created"],
        extra={FINGERPRINT_FIELD: fingerprint, "document_digests": about["document_digests"]},
    )
    state_path = out / running_sums.STATE_FILE
    if restart:
        state_path.unlink(missing_ok=True)
    with subject.context():
        statistics = running_sums.gather_statistics(
            subject.model,
            config,
            layers,
            fitted,
            chunk=chunk,
            save_every=save_every,
            state_path=state_path,
            run_digest=streams.text_digest(run),
            on_chunk=lambda tokens: progress("statistics", tokens, about["fit_tokens"]),
        )
        result = fit_rotation_set(
            make_runner(subject.model, config),
            statistics,
            held_out,
            settings,
            header,
            chunk=chunk,
            on_chunk=lambda tokens: progress("held-out text", tokens, about["held_out_tokens"]),
            on_layer=lambda layer: progress("choice per layer", 1, len(layers)),
        )
    if jax.process_index() == 0:  # of several hosts the first one writes
        if jax.process_count() == 1:
            store.save_rotation_set(result.rotation_set, out / store.ROTATION_DIRECTORY)
        else:  # an Orbax directory would wait for the others
            store.save_safetensors(result.rotation_set, out / store.ROTATION_FILE)
        statistics_file.save_statistics(statistics, out / statistics_file.STATISTICS_FILE, header)
        save_report(result, out, about | {"basis": result.rotation_set.header.basis})
        state_path.unlink(missing_ok=True)
    return result


def fit(
    statistics: str | os.PathLike[str] | Mapping[int, LayerStatistics],
    out: str | os.PathLike[str] | None = None,
    settings: CalibrationConfig | None = None,
    *,
    header: RotationHeader | None = None,
    model_id: str | None = None,
    num_query_heads: int | None = None,
) -> RotationSet:
    """A rotation set from attention statistics alone, those of `oscar calibrate` or of `oscar_torch.hf`.

    `statistics` is the file, a calibration's folder, or the statistics by layer. What a file says of its
    model is its header; `header` takes its place, and `model_id` and `num_query_heads` take precedence. With
    `out` the set is written there as `oscar calibrate` writes it, statistics beside it. Raises ConfigError
    (basis "auto" needs held-out text) or CheckpointError.
    """
    settings = CalibrationConfig() if settings is None else settings
    if settings.basis == "auto":
        raise ConfigError(
            "basis 'auto' chooses on held-out text, which statistics do not hold, allowed: "
            + ", ".join(bases.KEY_BASES)
        )
    path = None if isinstance(statistics, Mapping) else pathlib.Path(statistics)
    if path is not None and path.is_dir():
        path = path / statistics_file.STATISTICS_FILE
    by_layer, found = (statistics, None) if isinstance(statistics, Mapping) else (None, None)
    if path is not None:
        by_layer, found = statistics_file.read_statistics(path)
    assert by_layer is not None
    settings = choice.settled(settings, by_layer) if by_layer else settings
    header = _fit_header(by_layer, header or found, settings, model_id, num_query_heads)
    rotations = {layer: choice.fit_layer(entry, settings) for layer, entry in by_layer.items()}
    rotation_set = RotationSet(header, rotations)
    validate_rotation_set(rotation_set)
    if out is not None:
        out = pathlib.Path(out)
        out.mkdir(parents=True, exist_ok=True)
        store.save_rotation_set(rotation_set, out / store.ROTATION_DIRECTORY)
        target = out / statistics_file.STATISTICS_FILE
        if path is None:
            statistics_file.save_statistics(by_layer, target, header)
        elif target.resolve() != path.resolve():
            shutil.copyfile(path, target)
    return rotation_set


def _fit_header(
    statistics: Mapping[int, LayerStatistics],
    header: RotationHeader | None,
    settings: CalibrationConfig,
    model_id: str | None,
    num_query_heads: int | None,
) -> RotationHeader:
    """The header of a set fitted to these statistics; ConfigError if nothing says whose they are."""
    if not statistics:
        raise CheckpointError("the statistics hold no layer")
    entry = next(iter(statistics.values()))
    heads, head_dim = entry.key_mean.shape
    if header is None:
        if model_id is None or num_query_heads is None:
            raise ConfigError(
                "the statistics do not say of which model they are: --model-id and --query-heads "
                "(model_id, num_query_heads) are needed"
            )
        header = RotationHeader(
            model_id, (), num_query_heads, heads, head_dim, "half", "", "", calibration_tokens=entry.tokens,
            created=datetime.date.today().isoformat(),
        )  # fmt: skip
    return dataclasses.replace(
        header,
        model_id=model_id or header.model_id,
        layers=tuple(sorted(statistics)),
        num_query_heads=num_query_heads or header.num_query_heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        **choice.basis_fields(header, settings, settings.rounding, head_dim),
    )


def fit_rotation_set(
    runner: Runner,
    statistics: Mapping[int, LayerStatistics],
    held_out: Sequence[np.ndarray],
    settings: CalibrationConfig,
    header: RotationHeader,
    *,
    chunk: int,
    on_chunk: Callable[[int], None] = lambda tokens: None,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> Calibration:
    """Fits every layer of `statistics` and judges it on the `held_out` sequences (int32 [S] each).

    With basis "auto" the candidates compete there, layer by layer and head by head; if settings leave the
    rounding open, the better of the two whole sets is taken.
    """
    config = runner.config
    layers = tuple(statistics)
    observed = [
        observe_sequence(runner, layers, tokens, chunk=chunk, on_chunk=on_chunk) for tokens in held_out
    ]
    seen = {layer: [part[layer] for part in observed if len(part[layer].positions)] for layer in layers}
    judges = {layer: LayerJudge(seen[layer], config, layer) for layer in layers}
    least = least_context(config)
    return choice.fit_and_judge(statistics, judges, settings, header, least_context=least, on_layer=on_layer)
