"""The mesh of devices, by name from the command line or by sizes, and the shardings that everything uses."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core.errors import ConfigError
from ..models.experts import DATA_AXIS, MODEL_AXIS

AXES = (DATA_AXIS, MODEL_AXIS)


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None, **options: Any) -> Mesh:
    """A mesh of data x model devices, by default the first of `jax.devices()`, neighbours along `model`.

    Neighbours share a host, so that the sums of a layer cross hosts only if one has fewer than `model`
    devices. With several hosts every device takes part. `options` are those of `jax.sharding.Mesh`, such as
    axis_types. Raises ConfigError.
    """
    if data < 1 or model < 1:
        raise ConfigError(f"mesh data={data},model={model}, allowed: sizes >= 1")
    found = list(jax.devices() if devices is None else devices)
    if data * model > len(found) or (jax.process_count() > 1 and data * model != len(found)):
        raise ConfigError(
            f"mesh data={data},model={model} takes {data * model} devices, there are {len(found)} on "
            f"{jax.process_count()} hosts (all of several hosts' devices must take part)"
        )
    return Mesh(np.array(found[: data * model]).reshape(data, model), AXES, **options)


def parse_mesh(text: str) -> Mesh:
    """The mesh of "data=2,model=4"; a size left out is 1. Raises ConfigError."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name.strip() not in AXES or name.strip() in sizes or not size.strip().isdecimal():
            raise ConfigError(f"mesh {text!r}, allowed: data=N,model=N")
        sizes[name.strip()] = int(size)
    return make_mesh(sizes.get(DATA_AXIS, 1), sizes.get(MODEL_AXIS, 1))


def check_batch(batch: int, mesh: Mesh) -> None:
    """Raises ConfigError unless `batch` sequences divide among the data shards."""
    if batch % mesh.shape[DATA_AXIS]:
        raise ConfigError(f"{batch} sequences, allowed: multiples of data = {mesh.shape[DATA_AXIS]}")


def spread(array: jax.Array, *axes: str | None) -> jax.Array:
    """Inside `jax.set_mesh`: the array spread along these axes where sizes divide; elsewhere as it is."""
    sizes = jax.sharding.get_abstract_mesh().shape
    if not sizes:
        return array
    known = [axis if axis and size % sizes[axis] == 0 else None for axis, size in zip(axes, array.shape)]
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*known))


def on_mesh(mesh: Mesh, *axes: str | None) -> NamedSharding:
    """The sharding whose array axes lie along these mesh axes; none: a copy on every device."""
    return NamedSharding(mesh, PartitionSpec(*axes))
