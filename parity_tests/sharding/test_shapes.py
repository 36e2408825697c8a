"""Models too large for any device here: what lies where, and what is read, by shapes alone."""

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from oscar_jax.core.errors import ConfigError
from oscar_jax.models import weights
from oscar_jax.models.family import LazyTensor, TensorSource, all_families
from oscar_jax.sharding import memory_per_device
from oscar_jax.sharding.weights import parameter_spec
from parity_tests.sharding.random_model import large_config, small_config

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


@pytest.mark.parametrize("name", ["Llama-70B", "Qwen3-235B", "GLM-4.7"])
def test_the_page_states_the_memory_of_every_device(name: str) -> None:
    """The table of docs/sharding.md is what the function says of 8 sequences at 128K on 8 devices."""
    config = large_config(name)
    found = memory_per_device(config, data=1, model=8, batch=8, tokens=131_072)
    row = " | ".join(f"{size / 2**30:.1f}" for size in (found.weights, found.int2, found.bf16))
    assert f"| {name} | data=1,model=8 | {row} |" in PAGE.read_text()
    alone = memory_per_device(config, data=1, model=1, batch=8, tokens=131_072)
    copies = config.for_shards(8).head_copies
    assert math.isclose(found.weights * 8, alone.weights, rel_tol=0.03)  # norms, routers and copies
    tables = _tables(config, 8, 131_072)  # whole on every device
    assert found.int2 * 8 == alone.int2 * copies + (8 - copies) * tables


def _tables(config: Any, batch: int, tokens: int) -> int:
    """Bytes of tables and lengths, which every device of a data shard has whole."""
    geometry = config.cache_config()
    return config.num_layers * 4 * batch * (geometry.history_pages(tokens) + geometry.window_slots + 2)


def test_a_device_reads_its_slices_of_a_70b_file_and_nothing_else() -> None:
    """Every projection, and the embedding: an eighth of it is asked for, joined projections too."""
    config = large_config("Llama-70B")
    spread = config.for_shards(8)
    state = nnx.split(weights.abstract_model(spread, dtype=np.float32, param_dtype=ml_dtypes.bfloat16))[1]
    family = all_families()[config.family]
    asked: list[int] = []

    def load(name: str) -> LazyTensor:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            part = tuple(s.stop - s.start for s in index)
            asked.append(math.prod(part))
            return np.broadcast_to(np.zeros((), ml_dtypes.bfloat16), part)

        return LazyTensor(shapes[name], read)

    shapes: dict[str, tuple[int, ...]] = {}
    source = TensorSource(shapes, load)
    seen = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        parameter = weights._Parameter.from_path(path, leaf, family, spread)
        axes = parameter_spec(parameter.name, parameter.shape, spread)
        if parameter.name.startswith("layers.") and not parameter.name.startswith("layers.79."):
            continue
        shapes |= parameter.shapes
        if not any(axes):
            assert leaf.ndim == 1, parameter.name
            continue
        index = [slice(0, size) for size in parameter.shape]
        at = tuple(axes).index("model")
        each = parameter.shape[at] // 8
        index[at] = slice(3 * each, 4 * each)
        asked.clear()
        part = parameter.read(source, tuple(index))
        assert part.size == sum(asked) == math.prod(parameter.shape) // 8, parameter.name
        seen += 1
    assert seen == 6  # embedding, output, and four matrices of a layer


def test_widths_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="num_query_heads = 4"):
        small_config().for_shards(3)
    with pytest.raises(ConfigError, match="intermediate_size = 97"):
        small_config(intermediate_size=97).for_shards(2)
    with pytest.raises(ConfigError, match="multiples of data = 2"):
        memory_per_device(small_config(), data=2, model=2, batch=3, tokens=1000)
