"""What one family of models is: the names in its files and what its configuration means.

A file in `families/` holds a `Family`; nothing else in the package knows a family by name.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.errors import ConfigError

Fields = dict[str, Any]  # arguments of ModelConfig


class Settings:
    """Keys of a model's file, with the defaults of its family; remembers which were read.

    What nobody reads is refused at the end by name, so that no key is dropped unnoticed. A key that stands in
    the file as null is None, whatever the default, as in transformers.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values, self._defaults = values, defaults
        self.read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self.read.add(key)
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The value in the file, else the family's default, else `default`."""
        self.read.add(key)
        return self._values[key] if key in self._values else self._defaults.get(key, default)

    def integer_of(self, *keys: str) -> int:
        """`integer` of the first of several spellings that the file has, else of the first."""
        found = [key for key in keys if key in self]
        return self.integer(found[0] if found else keys[0])

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; ConfigError names the key."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} = {value!r}, allowed: an integer >= 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; ConfigError names the key."""
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value - value != 0:
            raise ConfigError(f"{key} = {value!r}, allowed: a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """A truth value, False if missing or null; ConfigError names the key."""
        value = self.get(key)
        if value not in (None, True, False):
            raise ConfigError(f"{key} = {value!r}, allowed: true, false")
        return bool(value)

    def unread(self) -> list[str]:
        """Keys of the file that nobody read, sorted."""
        return sorted(set(self._values) - self.read)


class LazyTensor:
    """A tensor of a checkpoint that is read, or computed, where it is indexed, and no further than that.

    `read` gets one slice per axis, with whole numbers and step 1, and returns that part.
    """

    def __init__(self, shape: tuple[int, ...], read: Callable[[tuple[slice, ...]], np.ndarray]) -> None:
        self.shape, self._read = shape, read

    def __getitem__(self, index: Any) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(part, slice) and part.step in (None, 1) for part in index)
        if len(index) > len(self.shape) or not plain:
            return np.asarray(self)[index]
        ranges = [s.indices(size) for s, size in zip((*index, *[slice(None)] * len(self.shape)), self.shape)]
        return self._read(tuple(slice(first, max(first, last)) for first, last, _ in ranges))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self._read(tuple(slice(0, size) for size in self.shape))
        return whole if dtype is None else whole.astype(dtype)


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """Tensors a checkpoint offers: shapes by Hugging Face name, and a loader that returns one of them.

    What is returned is read where it is indexed: a view of the file, or a LazyTensor.
    """

    shapes: Mapping[str, tuple[int, ...]]
    load: Callable[[str], np.ndarray | LazyTensor]  # any float dtype, [out, in] for projections
    norms_include_one: bool = False  # GGUF stores Gemma's norm weights as 1 + w, Hugging Face as w


def _nothing(settings: Settings, fields: Fields) -> Fields:
    return {}


def _unchanged(source: TensorSource, fields: Any) -> TensorSource:
    return source


@dataclasses.dataclass(frozen=True)
class Family:
    """Everything one family needs: names, defaults, and what its keys mean beyond the common ones.

    `defaults` are the values that transformers' config class fills in for missing keys. `read_hf` and
    `read_gguf` get the settings and the ModelConfig fields found so far and return fields to add or replace;
    `fields` are those that hold whatever the file says. `names` maps module names inside a layer, as the
    decoder has them, to the checkpoint's; `gguf_names` names inside a GGUF block to the decoder's, of modules
    or, with the suffix, of single tensors.
    `adapt` turns the checkpoint's tensors into the ones the decoder has (fused projections, experts), after
    `adapt_gguf` has turned a GGUF file's into a checkpoint's.
    """

    name: str
    model_types: tuple[str, ...]
    defaults: Mapping[str, Any]
    gguf_architectures: tuple[str, ...]  # (): llama.cpp has no architecture of its own for the family
    text_section: str | None = None  # the key of a multimodal config.json that holds the decoder's
    activation_key: str = "hidden_act"
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    read_hf: Callable[[Settings, Fields], Fields] = _nothing
    read_gguf: Callable[[Settings, Fields], Fields] = _nothing
    rope_interleaved: bool = False  # neighbouring channels turn together, in the checkpoint's order too
    layer_types: tuple[str, ...] = ("full_attention", "sliding_attention")  # that its layers may have
    rope_without_effect: tuple[str, ...] = ()  # keys of the rope's object that change nothing for text
    rope_type_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"pre_feedforward_layernorm": "post_attention_layernorm"}
    )
    gguf_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gguf_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without_effect: tuple[str, ...] = ()  # keys that transformers has for the family and does not use
    gguf_interleaves_rope: bool = False  # llama.cpp stores query and key rows in interleaved rope order
    adapt: Callable[[TensorSource, Any], TensorSource] = _unchanged  # (source, ModelConfig)
    adapt_gguf: Callable[[TensorSource, Any], TensorSource] = _unchanged

    def tensor_name(self, name: str) -> str:
        """The checkpoint's name of a decoder tensor, such as "layers.0.mlp.up_proj.weight"."""
        if not name.startswith("layers."):
            return name if name.startswith("lm_head.") else f"model.{name}"
        _, layer, rest = name.split(".", 2)
        if rest in self.names:
            return f"model.layers.{layer}.{self.names[rest]}"
        stem, _, suffix = rest.rpartition(".")
        return f"model.layers.{layer}.{self.names.get(stem, stem)}.{suffix}"


def all_families() -> dict[str, Family]:
    """Every family in `families/`, by name: each file there holds one as FAMILY, or several as FAMILIES."""
    from . import families

    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        content = importlib.import_module(f"{families.__name__}.{module.name}")
        for family in getattr(content, "FAMILIES", None) or (content.FAMILY,):
            found[family.name] = family
    return found


def family_of(model_type: str) -> Family:
    """The family of a Hugging Face model_type; ConfigError names what is supported."""
    return _find(model_type, {name: f for f in all_families().values() for name in f.model_types})


def gguf_family_of(architecture: str) -> Family:
    """The family of a GGUF architecture; ConfigError names what is supported."""
    return _find(architecture, {name: f for f in all_families().values() for name in f.gguf_architectures})


def _find(name: str, known: Mapping[str, Family]) -> Family:
    if name not in known:
        raise ConfigError(f"architecture {name!r} is not supported, allowed: {', '.join(sorted(known))}")
    return known[name]
