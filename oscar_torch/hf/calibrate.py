"""Attention statistics of a transformers model, and a rotation set from model and text in one call.

The statistics are gathered in the model's own fast attention: while they are, the model attends by the name
"oscar_observed", which is its sdpa and shows every layer's rows to the sums as they pass.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..calibration import covariance
from ..core import cache_format as fmt
from ..core.config import CacheConfig, CalibrationConfig
from ..core.errors import CheckpointError, ConfigError
from ..core.files import replacing_file
from ..core.rotation_header import FINGERPRINT_FIELD, RotationHeader
from ..core.window_policy import DEFAULT_WINDOW_POLICY, EVERY_LAYER_INT2, WindowPolicy
from ..evaluation import streams
from ..rotations import bases, store
from ..rotations import statistics as statistics_file
from ..rotations.fit import fit_layer_rotation, rounding_fields
from ..rotations.rotation import RotationSet
from ..rotations.statistics import LayerStatistics
from .attention import oscar_attention
from .fingerprint import model_fingerprint
from .model_check import _hub_id, cache_config, int2_layers
from .positions import coded_share, layer_rope

OBSERVED = "oscar_observed"
STATE_FILE = "calibration_state.pt"
Progress = Callable[[str, int, int], None]  # (stage, units done now, units in all)

# The sums of each layer that see what passes through "oscar_observed", and the lengths of a batch's rows.
_watching: dict[int, covariance.StatisticsState] = {}
_lengths: list[int] = []


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa, [B, N, T, D] -> [B, T, N, D], while the layer's statistics see what it saw."""
    out, _ = oscar_attention(module, query, key, value, attention_mask, **options)
    state = _watching.get(int(module.layer_idx))  # pyright: ignore[reportArgumentType]
    if state is not None:
        for row, length in enumerate(_lengths):
            if row:
                covariance.start_sequence(state)
            # Keys and values as the cache stores them, in BF16.
            keys, values = (rows[row, :, :length].transpose(0, 1).bfloat16() for rows in (key, value))
            queries = query[row, :, :length].transpose(0, 1)
            share = coded_share(
                queries,
                keys,
                CacheConfig(keys.shape[1], queries.shape[1], keys.shape[2], sink_tokens=state.skip_tokens),
                options.get("scaling") or query.shape[-1] ** -0.5,
                sliding_window=options.get("sliding_window"),
                softcap=options.get("softcap"),
                sink_logits=options.get("s_aux"),
            )
            covariance.update_statistics(state, queries, keys, values, out[row, :length], share)
    return out, None


AttentionInterface.register(OBSERVED, observed_attention)
AttentionMaskInterface.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


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
    progress: Progress = lambda stage, done, total: None,
) -> RotationSet:
    """Fits a rotation set to a transformers model on some text; writes set and statistics into `out`.

    `model` is a loaded model with its `tokenizer`, or a hub name, folder or .gguf file to load both from
    (`device_map` spreads it over GPUs). `texts` are sources as the command line takes them, `field` that of
    .jsonl lines; each gives an equal share of the tokens. `batch_size` sequences run at once; sums are saved
    every `save_every` batches, and an interrupted run is taken up where it stopped unless `restart`. Basis
    "auto" needs JAX. Raises ConfigError, TextError or CheckpointError naming what is wrong.
    """
    settings = CalibrationConfig() if settings is None else settings
    if settings.basis == "auto":
        raise ConfigError(
            "basis 'auto' is measured by JAX and needs it: pip install 'oscar-kv[jax]', or name a basis"
        )
    for name, value in (("batch_size", batch_size), ("save_every", save_every)):
        if value < 1:
            raise ConfigError(f"{name} = {value}, allowed: >= 1")
    for source in texts:
        streams.check_source(source)
    if isinstance(model, (str, os.PathLike)):
        name, loaded = os.fspath(model), load_model(model, device_map=device_map)
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
    fingerprint = model_fingerprint(model)
    run = repr((fingerprint, layers, str(model.dtype), batch_size, [s.tolist() for s in sequences]))
    total = sum(map(len, sequences))
    state_path = folder / STATE_FILE
    if restart:
        state_path.unlink(missing_ok=True)
    statistics = _gather(
        model,
        [torch.from_numpy(ids.astype(np.int64)) for ids in sequences],
        layers,
        fmt.SINK_TOKENS,
        batch_size=batch_size,
        on_tokens=lambda tokens: progress("statistics", tokens, total),
        resume=_Resume(state_path, hashlib.sha256(run.encode()).hexdigest(), save_every),
    )
    header = _statistics_header(model, statistics, model_id, streams.combined_digest(found))
    header = dataclasses.replace(header, extra=header.extra | {FINGERPRINT_FIELD: fingerprint})
    rotation_set = fit_rotation_set(statistics, header, settings)
    store.save_safetensors(rotation_set, folder / store.ROTATION_FILE)
    statistics_file.save_statistics(statistics, folder / statistics_file.STATISTICS_FILE, header)
    state_path.unlink(missing_ok=True)
    return rotation_set


def fit_rotation_set(
    statistics: Mapping[int, LayerStatistics], header: RotationHeader, settings: CalibrationConfig
) -> RotationSet:
    """The rotation set of these statistics, by the same code and to the same bytes as in `oscar_jax`."""
    extra = header.extra | {"damping": settings.damping, "per_head": settings.per_head}
    fitted = dataclasses.replace(
        header,
        basis=settings.basis,
        basis_version=bases.BASIS_VERSION,
        extra=extra,
        **rounding_fields(settings.basis, header.head_dim),
    )
    layers = {
        layer: fit_layer_rotation(entry, settings.basis, per_head=settings.per_head, damping=settings.damping)
        for layer, entry in sorted(statistics.items())
    }
    return RotationSet(fitted, layers)


def load_model(name: str | os.PathLike[str], *, device_map: str | None = None) -> tuple[PreTrainedModel, Any]:
    """Model and tokenizer of a hub name, a folder or a .gguf file, for inference; CheckpointError."""
    path = pathlib.Path(name)
    if path.suffix == ".gguf":
        where: tuple[Any, dict[str, str]] = (path.parent, {"gguf_file": path.name})
    else:
        where = (os.fspath(name), {})
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where[0], **where[1])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where[0], dtype="auto", device_map=device_map, **where[1]
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
    )


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
    states = {
        layer: covariance.init_statistics(
            geometry.num_key_value_heads, geometry.head_dim, skip_tokens=skip_tokens
        )
        for layer in layers
    }
    batches = [sequences[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
    done = 0 if resume is None else resume.load(states)
    with _observing(model, states):
        for number, batch in enumerate(batches):
            lengths = [len(tokens) for tokens in batch]
            if number >= done:
                for state in states.values():
                    covariance.start_sequence(state)
                    if number == max(1, len(batches) // 5):
                        covariance.fix_surrogate_metric(state)
                _lengths[:] = lengths
                ids = nn.utils.rnn.pad_sequence(list(batch), batch_first=True).to(model.device)
                mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
                padding = {} if mask.all() else {"attention_mask": mask.long().to(model.device)}
                with torch.no_grad():
                    model(ids, use_cache=False, logits_to_keep=1, **padding)
                if resume is not None and (number + 1) % resume.every == 0:
                    resume.save(states, number + 1)
            on_tokens(sum(lengths))
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


@contextlib.contextmanager
def _observing(model: Any, states: dict[int, covariance.StatisticsState]) -> Iterator[None]:
    """The model attends by OBSERVED, in eval mode; everything is put back."""
    if _watching:
        raise ConfigError("another calibration is running in this process")
    before = model.config.get_text_config(decoder=True)._attn_implementation
    was_training = model.training
    model.set_attn_implementation(OBSERVED)
    model.eval()
    _watching.update(states)
    try:
        yield
    finally:
        _watching.clear()
        model.set_attn_implementation(before)
        model.train(was_training)
