"""Attention statistics of a transformers model."""

import datetime
import inspect
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..calibration import covariance
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..core.rotation_header import RotationHeader
from ..core.window_policy import DEFAULT_WINDOW_POLICY, WindowPolicy
from .cache import OscarCache
from .layer import ATTENTION, OscarLayer
from .model_check import _hub_id, cache_config, layer_windows

# Calibration.


def calibrate_model(
    model: Any,
    token_batches: Iterable[Tensor],
    *,
    layers: Iterable[int] | None = None,
    skip_tokens: int = fmt.SINK_TOKENS,
    window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
    on_sequence: Callable[[int], None] = lambda tokens: None,
) -> dict[int, covariance.LayerStatistics]:
    """Attention statistics of a transformers model, from which `oscar_jax` fits rotations.

    token_batches: integer tensors [T] or [B, T] without padding, every row a sequence of its own. By default
    the layers that an OscarCache would quantize are observed, after QK-norm and RoPE, on BF16 keys and
    values. The surrogate value covariance weighs by the query covariance of the first fifth of the
    sequences, so it needs two. The model's attn_implementation is switched meanwhile and put back.
    `save_statistics` writes the result for `oscar fit`.
    """
    windows = layer_windows(model.config)
    geometry = cache_config(model.config)
    if layers is None:
        layers = window_policy.int2_layers(windows)
    sequences = [row for batch in token_batches for row in batch.reshape(-1, batch.shape[-1])]
    if not sequences:
        raise ConfigError("token_batches is empty, nothing to calibrate on")
    states = {
        layer: covariance.init_statistics(
            geometry.num_key_value_heads, geometry.head_dim, skip_tokens=skip_tokens
        )
        for layer in layers
    }
    # The argument that takes the cache was renamed after transformers 5.17.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    before = model.config.get_text_config(decoder=True)._attn_implementation
    was_training = model.training
    model.set_attn_implementation(ATTENTION)
    model.eval()
    try:
        for number, tokens in enumerate(sequences):
            for state in states.values():
                covariance.start_sequence(state)
                if number == max(1, len(sequences) // 5):
                    covariance.fix_surrogate_metric(state)
            cache = _ObservedCache(model.config, windows, geometry, len(tokens), states)
            with torch.no_grad():
                model(tokens[None].to(model.device), use_cache=True, logits_to_keep=1, **{argument: cache})
            on_sequence(len(tokens))
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
    return {layer: covariance.finalize_statistics(state) for layer, state in states.items()}


def save_statistics(
    model: PreTrainedModel,
    statistics: Mapping[int, covariance.LayerStatistics],
    path: str | os.PathLike[str],
    *,
    model_id: str | None = None,
    corpus_digest: str = "",
) -> None:
    """Writes what `calibrate_model` gathered with all that `oscar fit` must know of the model.

    `model_id`, by default the hub name or the directory the model was loaded from, is the name that later
    checks compare; `corpus_digest` may name the text.
    """
    geometry = cache_config(model.config)
    loaded_from = getattr(model.config, "_name_or_path", "") or ""
    header = RotationHeader(
        model_id=model_id or _hub_id(model.config) or pathlib.Path(loaded_from).name,
        layers=tuple(sorted(statistics)),
        num_query_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        head_dim=geometry.head_dim,
        rope="half",
        basis="",
        basis_version="",
        corpus_digest=corpus_digest,
        calibration_tokens=max(entry.tokens for entry in statistics.values()),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
        created=datetime.date.today().isoformat(),
    )
    covariance.save_statistics(statistics, path, header)


class _ObservedCache(OscarCache):
    """BF16 caches that feed what passes through them to the statistics of their layers."""

    def __init__(
        self,
        config: Any,
        windows: list[int | None],
        geometry: CacheConfig,
        length: int,
        states: dict[int, covariance.StatisticsState],
    ) -> None:
        def observer(layer: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Any] | None:
            if layer not in states:
                return None
            return lambda *rows: covariance.update_statistics(states[layer], *(r[0] for r in rows))

        self.text_config = config.get_text_config(decoder=True)
        Cache.__init__(
            self,
            layers=[
                OscarLayer(
                    layer,
                    geometry,
                    None,
                    sliding_window=window,
                    max_length=length,
                    observer=observer(layer),
                )
                for layer, window in enumerate(windows)
            ],
        )
