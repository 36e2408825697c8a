"""The model under study: decoder, configuration, tokenizer; what every job starts with."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ..core.errors import ConfigError
from ..core.window_policy import DEFAULT_WINDOW_POLICY, EVERY_LAYER_INT2, WindowPolicy
from ..models.cached_attention import int2_layers
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.experts import MODEL_AXIS
from ..models.weights import load_model, resolve_model_path
from ..sharding.weights import load_model as load_sharded

# progress(stage, done, total): `done` more of `total` units of a stage are finished.
Progress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def window_policy(all_layers: bool) -> WindowPolicy:
    """What `--all-layers` says: INT2 pages in every layer, or BF16 rings in those with a short window."""
    return EVERY_LAYER_INT2 if all_layers else DEFAULT_WINDOW_POLICY


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A loaded model with its tokenizer; `path` is the checkpoint, for its fingerprint."""

    path: Path
    model: Decoder
    config: ModelConfig
    tokenizer: Any  # a transformers tokenizer
    mesh: Mesh | None = None  # the devices that the model is spread over

    @property
    def dtype(self) -> str:
        """The arithmetic of the model."""
        return str(self.model.dtype)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens around it."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(list(tokens))

    def chat(self, prompt: str) -> str:
        """A conversation in which the user says `prompt`, by the tokenizer's own template; ConfigError."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise ConfigError(f"--chat: the tokenizer of {self.config.model_id!r} has no chat template")
        messages = [{"role": "user", "content": prompt}]
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except ImportError as error:  # transformers raises it without the name of the package
            raise ConfigError(f"--chat: {error}") from None

    def int2_layers(self, *, all_layers: bool = False) -> tuple[int, ...]:
        """Layers that are quantized; ConfigError if there is none. `all_layers` takes windowed ones too."""
        policy = window_policy(all_layers)
        layers = int2_layers(self.config, window_policy=policy)
        if not layers:
            raise ConfigError(
                f"every layer has a sliding window of at most {policy.ring_window} tokens and stays BF16: "
                "use --all-layers (all_layers=True)"
            )
        return layers

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where its jobs run: one device, or the mesh. ConfigError if heads would have to be copied there."""
        if self.mesh is None:
            return contextlib.nullcontext()
        shards, heads = self.mesh.shape[MODEL_AXIS], self.config.num_key_value_heads
        if heads % shards:
            raise ConfigError(
                f"model = {shards} devices would copy the {heads} key/value heads, allowed here: divisors of "
                f"{heads}"
            )
        return jax.set_mesh(self.mesh)


def load_subject(
    model: Subject | str | os.PathLike[str], dtype: str | None = None, mesh: Mesh | None = None
) -> Subject:
    """A subject from a checkpoint or the name of a weights package; the last one loaded is kept.

    `dtype` is the arithmetic: by default float32 on a CPU, bfloat16 elsewhere; `mesh` the devices it is
    spread over. A Subject is returned as it is.
    """
    if isinstance(model, Subject):
        return model
    return _load_once(str(resolve_model_path(str(model))), dtype, mesh)


@functools.lru_cache(maxsize=1)
def _load_once(path: str, dtype: str | None, mesh: Mesh | None) -> Subject:
    if mesh is None:
        return Subject(Path(path), *load_model(path, dtype=dtype))
    return Subject(Path(path), *load_sharded(path, mesh, dtype=dtype), mesh)
