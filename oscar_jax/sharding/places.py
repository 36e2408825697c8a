"""What a program needs to know of the devices it runs on: one, or a mesh.

A place puts arrays where they belong, allocates caches and attends through them; `Generator` is the same on
either.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import cache as one_device
from ..core.errors import ConfigError
from ..core.window_policy import WindowPolicy
from ..models import cached_attention
from ..models.config import ModelConfig
from ..models.experts import DATA_AXIS, MODEL_AXIS
from ..models.protocol import LanguageModel
from ..models.weights import host_array
from ..rotations.rotation import LayerRotation
from . import caches as on_a_mesh
from .mesh import on_mesh

Caches = list[cached_attention.AnyCache]


class OneDevice:
    """The default device; `config` is the model's."""

    attend: Callable[..., tuple[jax.Array, Any]] = staticmethod(one_device.attend)

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def put(self, array: Any) -> jax.Array:
        """An array of the host, where every device sees it."""
        return jnp.asarray(array)

    def host(self, array: jax.Array) -> np.ndarray:
        """A whole array on the host."""
        return host_array(array)

    def everywhere[Tree](self, arrays: Tree) -> Tree:
        """Inside a program: results that every host reads."""
        return arrays

    def by_sequence[Tree](self, arrays: Tree) -> Tree:
        """Inside a program: arrays whose first axis is that of the sequences."""
        return arrays

    def rotations(self, rotations: Mapping[int, LayerRotation]) -> Mapping[int, LayerRotation]:
        """Rotations by layer, with the heads of `config`."""
        return jax.tree.map(jnp.asarray, rotations)

    def allocate(
        self, batch: int, max_length: int, *, kind: str, window_policy: WindowPolicy, chunk: int
    ) -> Caches:
        """Empty caches, one per layer, for appends of up to `chunk` tokens; see `allocate_model_cache`."""
        return cached_attention.allocate_model_cache(
            self.config, batch, max_length, kind=kind, window_policy=window_policy, chunk=chunk
        )

    def live_bytes(self, caches: Sequence[cached_attention.AnyCache]) -> dict[str, int]:
        """`cache.live_bytes`, summed over layers; copied heads count as often as they are stored."""
        return cached_attention.model_live_bytes(caches, self.config)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where programs are traced."""
        return contextlib.nullcontext()


class OnMesh(OneDevice):
    """A mesh; `config` is that of the decoder spread over it."""

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        super().__init__(config.for_shards(mesh.shape[MODEL_AXIS]))
        self.mesh, self._heads = mesh, config.num_key_value_heads
        self.attend = functools.partial(on_a_mesh.attend, mesh=mesh)

    def put(self, array: Any) -> jax.Array:
        """An array of the host, the same on every host, where every device sees it."""
        return jax.device_put(array, on_mesh(self.mesh))

    def everywhere[Tree](self, arrays: Tree) -> Tree:
        """Inside a program: results that every host reads, so a copy on every device."""
        return jax.lax.with_sharding_constraint(arrays, on_mesh(self.mesh))

    def by_sequence[Tree](self, arrays: Tree) -> Tree:
        """Inside a program: arrays whose first axis is that of the sequences, spread over `data`."""
        return jax.lax.with_sharding_constraint(arrays, on_mesh(self.mesh, DATA_AXIS))

    def rotations(self, rotations: Mapping[int, LayerRotation]) -> Mapping[int, LayerRotation]:
        """Rotations by layer, each device with those of its heads."""
        return on_a_mesh.place_rotations(rotations, self.mesh, self._heads)

    def allocate(
        self, batch: int, max_length: int, *, kind: str, window_policy: WindowPolicy, chunk: int
    ) -> Caches:
        """Empty caches, one per layer; see `sharding.allocate_model_cache`, which keeps all pages."""
        return on_a_mesh.allocate_model_cache(
            self.config, batch, max_length, self.mesh, kind=kind, window_policy=window_policy
        )

    def live_bytes(self, caches: Sequence[cached_attention.AnyCache]) -> dict[str, int]:
        """`cache.live_bytes`, summed over layers; copied heads count as often as they are stored."""
        # Only numbers that every host can read: pages and rows stay where they are.
        names = ("lengths", "history_pages", *on_a_mesh.TABLES)
        readable = [
            dataclasses.replace(
                cache, **{n: self.host(getattr(cache, n)) for n in names if hasattr(cache, n)}
            )
            for cache in caches
        ]
        return super().live_bytes(readable)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Where programs are traced."""
        return jax.set_mesh(self.mesh)


def place_of(model: LanguageModel, config: ModelConfig, mesh: Mesh | None) -> OneDevice:
    """The place of a decoder with the checkpoint's `config`; ConfigError unless it is spread for the mesh."""
    place = OneDevice(config) if mesh is None else OnMesh(config, mesh)
    shards = getattr(getattr(model, "config", None), "shards", 1)  # a decoder of one's own may have none
    if shards != place.config.shards:
        raise ConfigError(
            f"the model is spread over {shards} devices, the mesh has model = "
            f"{place.config.shards}: place it by oscar_jax.sharding.place_model or load_model"
        )
    return place
