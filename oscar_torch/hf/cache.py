"""`OscarCache`: a 2-bit cache for `model.generate(past_key_values=...)`, one `OscarLayer` per layer."""

import copy
import functools
import logging
import os
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .. import ops
from ..cache import live_bytes
from ..core import cache_format as fmt
from ..core.errors import ConfigError
from ..core.rotation_header import FINGERPRINT_FIELD
from ..core.window_policy import DEFAULT_WINDOW_POLICY, WindowPolicy
from ..rotations.rotation import RotationSet, validate_rotation_set
from ..rotations.store import load_rotation_set
from .fingerprint import model_fingerprint
from .handover import interrupted
from .layer import ATTENTION, PREFILL_CHUNK, OscarLayer
from .model_check import _hub_id, cache_config, int2_layers, layer_geometries, layer_windows, linear_layers
from .recurrent import RecurrentLayer
from .static_layer import Ledger, StaticLayer
from .tensor_parallel import model_shard, refuse_split_config

_log = logging.getLogger(__name__)


class OscarCache(Cache):
    """A 2-bit cache for `model.generate(past_key_values=...)`.

    `rotations` is a RotationSet or where one is stored; `config` is the model itself, whose weights then tell
    by their fingerprint whether the rotations are theirs, or `model.config`, which is only read and has no
    weights: then the name decides, and the log says once that the fingerprint was not compared. Of a
    model split over ranks (`tp_plan`), which must be given itself and on every rank, the cache holds the
    rank's heads, with their part of `rotations`. With
    `max_length` (tokens per sequence) memory is allocated once, `generate` compiles its steps on a GPU, and
    longer sequences raise CacheFullError; without it the pools grow. Layers with a short sliding window keep
    a BF16 ring by `window_policy`; those with linear attention keep transformers' states, which can be
    neither cropped nor drafted upon. `model_id`, default the hub name in the config, must be the one in the
    rotations' header. `implementation` is that of `cache.attend`. Raises ConfigError for models this cache
    cannot serve, CheckpointError for rotations of another model; nothing is allocated before.
    """

    layers: list[Any]  # OscarLayer, or RecurrentLayer where attention is linear

    def __init__(
        self,
        rotations: RotationSet | str | os.PathLike[str],
        config: Any,
        *,
        max_length: int | None = None,
        sink_tokens: int = fmt.SINK_TOKENS,
        recent_tokens: int = fmt.RECENT_TOKENS,
        window_policy: WindowPolicy = DEFAULT_WINDOW_POLICY,
        prefill_chunk: int = PREFILL_CHUNK,
        model_id: str | None = None,
        implementation: str | None = None,
    ) -> None:
        model: Any = config if isinstance(config, nn.Module) else None
        config = cast(Any, config if model is None else model.config)
        if model is None:
            refuse_split_config(config)
        text_config = config.get_text_config(decoder=True)
        windows = layer_windows(config)
        geometry = cache_config(text_config, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
        self.shard = None if model is None else model_shard(model, geometry)
        if isinstance(rotations, RotationSet):
            validate_rotation_set(rotations)
        else:
            rotations = load_rotation_set(rotations)
        ops.check_implementation(implementation)
        ops.check_softcap_kernel(implementation, getattr(text_config, "attn_logit_softcapping", None))
        int2, linear = list(int2_layers(config, window_policy)), linear_layers(config)
        fingerprint = None
        if model is not None and model_id is None and rotations.header.extra.get(FINGERPRINT_FIELD):
            fingerprint = model_fingerprint(model)
        name = model_id or _hub_id(config)
        rotations.require_fits(geometry, int2, model_id=name, fingerprint=fingerprint)
        if model is None and model_id is None and rotations.header.extra.get(FINGERPRINT_FIELD):
            _say_that_weights_are_unknown()
        if prefill_chunk < fmt.PAGE_TOKENS or prefill_chunk % fmt.PAGE_TOKENS:
            raise ConfigError(f"prefill_chunk = {prefill_chunk}, allowed: multiples of {fmt.PAGE_TOKENS}")
        if max_length is not None and max_length < 1:
            raise ConfigError(f"max_length = {max_length}, allowed: >= 1 or None")
        if linear and (max_length is not None or self.shard is not None):
            given = "a model split over ranks" if max_length is None else f"max_length = {max_length}"
            raise ConfigError(f"{given} with linear attention in layers {list(linear)}, allowed: neither")
        geometries = layer_geometries(text_config, sink_tokens=sink_tokens, recent_tokens=recent_tokens)
        if self.shard is not None and len(set(geometries)) > 1:
            raise ConfigError("a model split over ranks with heads that differ by layer, allowed: equal ones")
        self.text_config = text_config
        self.ledger = None if max_length is None else Ledger(max_length, len(windows))
        held = {layer: rotations.layers[layer] for layer in int2}
        if self.shard is not None:
            geometries = [self.shard.config(geometry)] * len(windows)
            held = {layer: self.shard.rotation(rotation) for layer, rotation in held.items()}

        def make_layer(layer: int, window: int | None) -> OscarLayer | RecurrentLayer:
            if layer in linear:
                return RecurrentLayer(layer, getattr(text_config, "number_of_conv_states", 1))
            rotation = held.get(layer)
            options: dict[str, Any] = {
                "sliding_window": window,
                "max_length": max_length,
                "prefill_chunk": prefill_chunk,
                "implementation": implementation,
            }
            if self.ledger is None:
                return OscarLayer(layer, geometries[layer], rotation, **options)
            options |= {"ledger": self.ledger, "leading": layer == 0}
            return StaticLayer(layer, geometries[layer], rotation, **options)

        super().__init__(layers=[make_layer(layer, window) for layer, window in enumerate(windows)])
        self._linear = linear
        attending = [layer for layer in range(len(windows)) if layer not in linear]
        self._first = attending[0]
        # Forwards that each attention layer has begun; counted only where linear layers count theirs.
        self._steps = dict.fromkeys(attending, 0) if linear else {}

    @property
    def _attending(self) -> list[Any]:
        """The layers with keys and values."""
        return [self.layers[layer] for layer in self._steps] if self._steps else self.layers

    @property
    def _recurrent(self) -> list[RecurrentLayer]:
        return [self.layers[layer] for layer in self._linear]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Announces new rows of a layer to the attention function; raises ConfigError if that is another."""
        if layer_idx == self._first:  # once per step
            implementation = getattr(self.text_config, "_attn_implementation", None)
            if implementation != ATTENTION:
                raise ConfigError(
                    f"attn_implementation = {implementation!r}, allowed with an OscarCache: {ATTENTION!r} "
                    "(and the config given to the cache must be model.config)"
                )
            self._require_whole(begun=True)
        if self._steps:
            self._steps[layer_idx] += 1
        if self.shard is not None and self.shard.replicated:
            own = slice(self.shard.heads.start, self.shard.heads.stop)
            key_states, value_states = key_states[:, own], value_states[:, own]
        return self.layers[layer_idx].update(key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that the attention mask covers, and its offset; ConfigError after an interrupted step."""
        self._require_whole()
        return super().get_mask_sizes(query_length, layer_idx)

    def _require_whole(self, *, begun: bool = False) -> None:
        """Raises ConfigError if an exception left the middle of a forward: some layers have its rows.

        `begun`: the first attention layer is about to store; linear layers before it have done their part.
        """
        if self.ledger is not None:
            if not torch.compiler.is_compiling():
                self.ledger.require_whole()
            return
        layers = self._attending
        columns = {layer.columns for layer in layers}
        if len(columns) > 1 or any(layer.writing is not None for layer in layers):
            raise interrupted(0 if self._linear else min(columns))
        if self._linear:
            steps = {layer.steps - (begun and layer.layer_id < self._first) for layer in self._recurrent}
            if len(steps.union(self._steps.values())) > 1:
                raise interrupted(0)

    def reset(self) -> None:
        """Forgets everything."""
        super().reset()
        self._steps = dict.fromkeys(self._steps, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns from every layer or from none; see `OscarLayer.crop`.

        After a forward that was interrupted, only a length to keep (a positive number) says what is meant; a
        static cache can only be `reset`.
        """
        if tokens_to_remove <= 0 or self.ledger is not None:
            self._require_whole()
        layers = self._attending
        removals = [layer.removable(tokens_to_remove) for layer in layers]
        if any(removal.columns for removal in removals):
            for layer in self._recurrent:
                layer.crop(tokens_to_remove)
        for layer, removal in zip(layers, removals):
            layer.remove(removal)

    def activate_past_recording(self) -> None:
        """From now on chunks are drafts that `crop` can take back; assisted decoding calls this by itself.

        Raises ConfigError where assisted decoding is to continue a cache: transformers sends all of the
        prompt then, with what the cache holds already.
        """
        for layer in self._recurrent:
            layer.activate_past_recording()
        prompt = _prompt_of_the_caller()
        if prompt and (columns := self.get_seq_length()):
            raise ConfigError(
                f"assisted decoding over a cache of {int(columns)} columns, allowed: an empty one "
                "(transformers would send it the whole prompt a second time)"
            )
        for layer in self.layers:
            layer.activate_past_recording(prompt)

    def deactivate_past_recording(self) -> None:
        """Ends `activate_past_recording`: further chunks are prompts."""
        for layer in self._attending:
            layer.deactivate_past_recording()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` (or those where a bool mask is True)."""
        self._require_whole()
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times; INT2 pages are shared, not copied."""
        self._require_whole()
        super().batch_repeat_interleave(repeats)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequence i continue what sequence beam_idx[i] holds."""
        self._require_whole()
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def live_bytes(self) -> dict[str, int]:
        """Sums of `cache.live_bytes` over the layers: bytes in use, bytes allocated, a BF16 cache's."""
        totals: dict[str, int] = {}
        for layer in self._attending:
            if layer.store is not None:
                for name, count in live_bytes(layer.store, layer.sliding_window).items():
                    totals[name] = totals.get(name, 0) + count
        return totals

    def __deepcopy__(self, memo: Any) -> "OscarCache":
        twin = copy.copy(self)
        twin._steps = dict(self._steps)
        if self.ledger is None:
            twin.layers = [layer.copy() for layer in self.layers]
        else:
            twin.ledger = self.ledger.copy()
            twin.layers = [layer.copy(twin.ledger) for layer in self.layers]
        return twin


@functools.cache
def _say_that_weights_are_unknown() -> None:
    _log.warning(
        "OscarCache(rotations, config) knows no weights: whether the rotations are theirs is not checked "
        "(OscarCache(rotations, model) compares fingerprints; model_id= says that they fit)"
    )


def _prompt_of_the_caller() -> int:
    """Columns of the prompt that assisted decoding begins with, 0 if unknown.

    Its first forward brings the prompt and drafts in one chunk, and nothing that reaches a cache says where
    the drafts begin; so the length is read where assisted decoding switches the recording on.
    """
    caller: Any = sys._getframe(2)
    if caller.f_code.co_name != "_assisted_decoding":
        return 0
    tokens = caller.f_locals.get("input_ids")
    return tokens.shape[1] if isinstance(tokens, Tensor) else 0
