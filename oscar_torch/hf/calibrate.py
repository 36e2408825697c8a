"""Attention statistics of a transformers model, and a rotation set from model and text in one call.

The statistics are gathered in the model's own fast attention (`observation`). The last sequences are held
out: on them every candidate of basis "auto", and the set itself, is judged by what it does to attention.
"""

import dataclasses
import datetime
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..calibration import choice, covariance
from ..calibration.report import Calibration, save_report
from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import CheckpointError, ConfigError
from ..core.files import replacing_file
from ..core.rotation_header import FINGERPRINT_FIELD, RotationHeader
from ..core.weight_packages import WEIGHT_PACKAGES, assembled_package
from ..core.window_policy import DEFAULT_WINDOW_POLICY, EVERY_LAYER_INT2, WindowPolicy
from ..evaluation import streams
from ..rotations import statistics as statistics_file
from ..rotations import store
from ..rotations.rotation import RotationSet
from ..rotations.statistics import LayerStatistics
from .fingerprint import model_fingerprint
from .held_out import LayerJudge, observe_sequence
from .model_check import _hub_id, cache_config, int2_layers
from .observation import Seen, observing, run_batch
from .positions import coded_share, layer_rope
from .tensor_parallel import model_shard

STATE_FILE = "calibration_state.pt"
Progress = Callable[[str, int, int], None]  # (stage, units done now, units in all)


def calibrate(
    model: PreTrainedModel | str | os.PathLike[str],
    texts: Sequence[str],
    out: str | os.PathLike[str],
    settings: CalibrationConfig | None = None,
    *,
    tokenizer: Any = None,
    field: str | None = None,
    all_layers: bool = False,
    batch_size: int = 1,
    save_every: int = 8,
    restart: bool = False,
    model_id: str | None = None,
    device_map: str | None = None,
    dtype: str | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Calibration:
    """Fits a rotation set to a model on some text and writes set, statistics and report into `out`.

    `model` is a loaded model with its `tokenizer`, or a hub name, folder, .gguf file or weights package
    to load both from, as `load_model` does with `device_map` and `dtype`. `texts` are sources as the command
    line takes them, `field` that of .jsonl lines; each gives an equal share of the tokens. `batch_size`
    sequences run at once; sums are saved every `save_every` batches, and an interrupted run is taken up where
    it stopped unless `restart`. Raises ConfigError, TextError or CheckpointError naming what is wrong.
    """
    settings = CalibrationConfig() if settings is None else settings
    for name, value in (("batch_size", batch_size), ("save_every", save_every)):
        if value < 1:
            raise ConfigError(f"{name} = {value}, allowed: >= 1")
    for source in texts:
        streams.check_source(source)
    if isinstance(model, (str, os.PathLike)):
        name, loaded = os.fspath(model), load_model(model, device_map=device_map, dtype=dtype)
        model_id = model_id or pathlib.Path(name).stem if name.endswith(".gguf") else model_id
        model, tokenizer = loaded[0], tokenizer or loaded[1]
    if tokenizer is None:
        raise ConfigError("a loaded model needs its tokenizer")
    layers = int2_layers(model.config, EVERY_LAYER_INT2 if all_layers else DEFAULT_WINDOW_POLICY)
    if not layers:
        raise ConfigError("every layer has a short sliding window and stays BF16: all_layers fits them too")

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    found = [streams.read_stream([source], encode, settings.tokens, field) for source in texts]
    sequences = streams.cut_sequences(found, settings.tokens, settings.context, tokenizer.bos_token_id)
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    fitted, held_out = choice.split_sequences(sequences)
    fingerprint = _fingerprint(model)
    run = repr((fingerprint, layers, str(model.dtype), batch_size, [s.tolist() for s in fitted]))
    total, held_out_total = (sum(map(len, part)) for part in (fitted, held_out))
    state_path = folder / STATE_FILE
    if restart:
        state_path.unlink(missing_ok=True)
    statistics = _gather(
        model,
        _tensors(fitted),
        layers,
        fmt.SINK_TOKENS,
        batch_size=batch_size,
        on_tokens=lambda tokens: progress("statistics", tokens, total),
        resume=_Resume(state_path, hashlib.sha256(run.encode()).hexdigest(), save_every),
    )
    header = _statistics_header(model, statistics, model_id, streams.combined_digest(found))
    digests = [digest for stream in found for digest in stream.document_digests]
    header = dataclasses.replace(
        header, calibration_tokens=total, extra=header.extra | {"document_digests": digests}
    )
    geometry = cache_config(model.config)
    seen = [
        observe_sequence(
            model,
            layers,
            tokens,
            geometry,
            on_tokens=lambda tokens: progress("held-out text", tokens, held_out_total),
        )
        for tokens in _tensors(held_out)
    ]
    result = choice.fit_and_judge(
        statistics,
        {layer: LayerJudge([part[layer] for part in seen if len(part[layer].positions)]) for layer in layers},
        settings,
        header,
        least_context=geometry.sink_tokens + geometry.recent_tokens + fmt.PAGE_TOKENS,
        on_layer=lambda layer: progress("choice per layer", 1, len(layers)),
    )
    store.save_safetensors(result.rotation_set, folder / store.ROTATION_FILE)
    statistics_file.save_statistics(statistics, folder / statistics_file.STATISTICS_FILE, header)
    about = {
        "model": header.model_id,
        "num_layers": model.config.get_text_config(decoder=True).num_hidden_layers,
        "head_dim": geometry.head_dim,
        "num_key_value_heads": geometry.num_key_value_heads,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "versions": header.versions,
        "created": header.created,
        "basis": result.rotation_set.header.basis,
        "per_head": settings.per_head,
        "damping": settings.damping,
        "context": settings.context,
        "layers_with_rotation": list(layers),
        "fit_tokens": total,
        "held_out_tokens": held_out_total,
        "held_out_is_separate": fitted[-1] is not held_out[-1],
        "corpus_digest": header.corpus_digest,
        "statistics_version": statistics_file.STATISTICS_VERSION,
        "document_digests": digests,
    }
    save_report(result, folder, about)
    state_path.unlink(missing_ok=True)
    return result


def _tensors(sequences: Sequence[np.ndarray]) -> list[Tensor]:
    return [torch.from_numpy(ids.astype(np.int64)) for ids in sequences]


def fit_rotation_set(
    statistics: Mapping[int, LayerStatistics], header: RotationHeader, settings: CalibrationConfig
) -> RotationSet:
    """The rotation set of these statistics, by the same code and to the same bytes as in `oscar_jax`."""
    settings = choice.settled(settings, statistics)
    layers = {layer: choice.fit_layer(entry, settings) for layer, entry in sorted(statistics.items())}
    fields = choice.basis_fields(header, settings, settings.rounding, header.head_dim)
    return RotationSet(dataclasses.replace(header, **fields), layers)


def load_model(
    name: str | os.PathLike[str], *, device_map: str | None = None, dtype: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer of a hub name, folder, .gguf file or weights package; CheckpointError.

    `device_map` is transformers'; None: spread over all CUDA GPUs, else on the CPU. `dtype` "float32" or
    "bfloat16" is the arithmetic; None: that of the checkpoint, of .gguf files bfloat16 on GPUs, else float32.
    """
    if dtype not in (None, "float32", "bfloat16"):
        raise ConfigError(f"dtype = {dtype!r}, allowed: float32, bfloat16")
    if device_map is None and torch.cuda.is_available():
        device_map = "auto"
    path = assembled_package(str(name)) if str(name) in WEIGHT_PACKAGES else pathlib.Path(name)
    if path.suffix == ".gguf":
        where: tuple[Any, dict[str, str]] = (path.parent, {"gguf_file": path.name})
        on_gpu = torch.cuda.is_available() and device_map != "cpu"
        dtype = dtype or ("bfloat16" if on_gpu else "float32")
    else:
        where = (os.fspath(name), {})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where[0], **where[1])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where[0], dtype=dtype or "auto", device_map=device_map, **where[1]
        )
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{name}: {str(error).strip().splitlines()[0]}") from None
    return model.eval(), tokenizer


def calibrate_model(
    model: Any,
    token_batches: Iterable[Tensor],
    *,
    layers: Iterable[int] | None = None,
    skip_tokens: int = fmt.SINK_TOKENS,
    window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
    on_sequence: Callable[[int], None] = lambda tokens: None,
) -> dict[int, LayerStatistics]:
    """Attention statistics of a transformers model, from which a rotation set is fitted.

    token_batches: integer tensors [T] or [B, T] without padding, every row a sequence of its own. By default
    the layers that an OscarCache would quantize are observed, after QK-norm and RoPE; keys and values count
    as stored, in BF16. The surrogate value covariance weighs by the query covariance of the first fifth of
    the sequences, so it needs two. The model's attn_implementation is switched meanwhile and put back.
    `save_statistics` writes the result for `oscar fit`.
    """
    chosen = int2_layers(model.config, window_policy) if layers is None else tuple(layers)
    sequences = [row for batch in token_batches for row in batch.reshape(-1, batch.shape[-1])]
    if not sequences:
        raise ConfigError("token_batches is empty, nothing to calibrate on")
    return _gather(model, sequences, chosen, skip_tokens, batch_size=1, on_tokens=on_sequence)


def save_statistics(
    model: PreTrainedModel,
    statistics: Mapping[int, LayerStatistics],
    path: str | os.PathLike[str],
    *,
    model_id: str | None = None,
    corpus_digest: str = "",
) -> None:
    """Writes what `calibrate_model` gathered with all that `oscar fit` must know of the model.

    `model_id`, by default the hub name or the directory the model was loaded from, is the name that later
    checks compare; `corpus_digest` may name the text.
    """
    header = _statistics_header(model, statistics, model_id, corpus_digest)
    statistics_file.save_statistics(statistics, path, header)


def _statistics_header(
    model: PreTrainedModel, statistics: Mapping[int, LayerStatistics], model_id: str | None, digest: str
) -> RotationHeader:
    """A header without a basis: whose statistics these are."""
    geometry = cache_config(model.config)
    fingerprint = _fingerprint(model)
    loaded_from = getattr(model.config, "_name_or_path", "") or ""
    return RotationHeader(
        model_id=model_id or _hub_id(model.config) or pathlib.Path(loaded_from).name,
        layers=tuple(sorted(statistics)),
        num_query_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.head_dim,
        rope="half",
        basis="",
        basis_version="",
        corpus_digest=digest,
        calibration_tokens=max(entry.tokens for entry in statistics.values()),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        created=datetime.date.today().isoformat(),
        extra={} if fingerprint is None else {FINGERPRINT_FIELD: fingerprint},
    )


def _fingerprint(model: PreTrainedModel) -> str | None:
    """The model's fingerprint; None where its projections have other names, and its name alone must do."""
    try:
        return model_fingerprint(model)
    except ConfigError:
        return None


@dataclasses.dataclass(frozen=True)
class _Resume:
    """Where running sums are saved, of which run they are, and after how many batches."""

    path: pathlib.Path
    run: str
    every: int

    def load(self, states: Mapping[int, covariance.StatisticsState]) -> int:
        """Fills the sums from an earlier interruption; the number of batches they hold, 0 without one."""
        if not self.path.exists():
            return 0
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            run, done, fields = found["run"], int(found["done"]), found["states"]
            if run == self.run:
                for layer, state in states.items():
                    for name, value in fields[layer].items():
                        setattr(state, name, value)
        except Exception as error:
            reason = f"{self.path} is damaged ({type(error).__name__}): forget it with restart"
            raise CheckpointError(reason) from None
        if run != self.run:
            raise CheckpointError(
                f"{self.path} belongs to a calibration with other model, text or settings: "
                "choose another folder or forget it with restart"
            )
        return done

    def save(self, states: Mapping[int, covariance.StatisticsState], done: int) -> None:
        """Writes the sums after `done` batches, whole or not at all."""
        fields = {layer: dict(vars(state)) for layer, state in states.items()}
        with replacing_file(self.path) as partial:
            torch.save({"run": self.run, "done": done, "states": fields}, partial)


def _gather(
    model: Any,
    sequences: Sequence[Tensor],
    layers: Sequence[int],
    skip_tokens: int,
    *,
    batch_size: int,
    on_tokens: Callable[[int], None],
    resume: _Resume | None = None,
) -> dict[int, LayerStatistics]:
    """One pass over the sequences, `batch_size` at a time, shorter ones padded on the right."""
    geometry = cache_config(model.config)
    if model_shard(model, geometry) is not None:
        raise ConfigError(
            "calibrating a model whose heads are split over processes (tp_plan), allowed: one process, "
            "device_map='auto' for several GPUs"
        )
    states = {
        layer: covariance.init_statistics(
            geometry.num_key_value_heads, geometry.head_dim, skip_tokens=skip_tokens
        )
        for layer in layers
    }
    batches = [sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
    done = 0 if resume is None else resume.load(states)
    metric_from = max(1, len(sequences) // 5)  # whatever the batches
    started = 0  # sequences of earlier batches
    sinks = dataclasses.replace(geometry, sink_tokens=skip_tokens)

    def see(layer: int, row: int, seen: Seen) -> None:
        state = states.get(layer)
        if state is None:
            return
        covariance.start_sequence(state)
        if started + row == metric_from:
            covariance.fix_surrogate_metric(state)
        share = coded_share(
            seen.query,
            seen.key,
            sinks,
            seen.softmax_scale,
            sliding_window=seen.sliding_window,
            softcap=seen.softcap,
            sink_logits=seen.sink_logits,
        )
        covariance.update_statistics(state, seen.query, seen.key, seen.value, seen.output, share)

    with observing(model, see):
        for number, batch in enumerate(batches):
            if number >= done:
                run_batch(model, batch)
                if resume is not None and (number + 1) % resume.every == 0:
                    resume.save(states, number + 1)
            started += len(batch)
            on_tokens(sum(map(len, batch)))
    if missing := [layer for layer, state in states.items() if not state.query_rows]:
        raise ConfigError(
            f"layer {missing[0]} was not seen: {type(model).__name__} does not call one attention module per "
            "layer of its configuration"
        )
    text = model.config.get_text_config(decoder=True)
    context = max(map(len, sequences))
    positions = {"context": context, "reach": max(context, text.max_position_embeddings)}
    statistics = {}
    for layer, state in states.items():
        frequencies, interleaved = layer_rope(model, layer)
        statistics[layer] = dataclasses.replace(
            covariance.finalize_statistics(state),
            rope_frequencies=frequencies,
            rope_interleaved=interleaved,
            **positions,
        )
    return statistics
