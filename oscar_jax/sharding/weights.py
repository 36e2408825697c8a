"""Where the weights of a decoder lie on a mesh, and how they get there.

Projections into heads, channels and experts are split along `model` by what comes out, those back by what
goes in, so that a layer adds up twice: behind attention and behind the MLP. Nothing is split along `data`.
"""

import re
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from ..core.errors import ConfigError
from ..models import weights
from ..models.config import ModelConfig
from ..models.decoder import Decoder
from ..models.experts import MODEL_AXIS
from .mesh import on_mesh

# Ends of parameter names -> axes of the parameter. What is named nowhere lies on every device.
_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"experts\.(gate|up|down)_proj\.(kernel|bias)", (MODEL_AXIS,)),
    (r"(qkv|gate_up)_proj\.kernel|lm_head\.kernel", (None, MODEL_AXIS)),
    (r"(qkv|gate_up)_proj\.bias|self_attn\.sinks", (MODEL_AXIS,)),
    (r"(o|down)_proj\.kernel|embed_tokens\.embedding", (MODEL_AXIS, None)),
)
_WHOLE_IF_ODD = re.compile(r"embed_tokens|lm_head")  # vocabularies of any size


def parameter_spec(name: str, shape: tuple[int, ...], config: ModelConfig) -> PartitionSpec:
    """How a parameter such as "layers.0.mlp.down_proj.kernel" lies on a mesh, `config.shards` along model.

    Raises ConfigError for a width that does not divide; a vocabulary that does not lies on every device.
    """
    axes = next((axes for end, axes in _RULES if re.search(rf"(^|\.)({end})$", name)), ())
    if config.qk_norm == "projection" and re.search(r"self_attn\.[qk]_norm\.weight$", name):
        axes = (MODEL_AXIS,)
    if axes and shape[axes.index(MODEL_AXIS)] % config.shards:
        if not _WHOLE_IF_ODD.match(name):
            raise ConfigError(f"{name} {list(shape)} does not spread over {config.shards} devices")
        axes = ()
    return PartitionSpec(*axes)


def placement(config: ModelConfig, mesh: Mesh) -> weights.Placement:
    """Where `models.weights.build_model` puts each weight; ConfigError if a width does not divide."""
    if config.linear_layers:
        raise ConfigError(
            f"{config.model_id!r} has recurrent layers, which do not spread, allowed: models without"
        )
    spread = config.for_shards(mesh.shape[MODEL_AXIS])
    return weights.Placement(
        spread.shards, lambda name, shape: on_mesh(mesh, *parameter_spec(name, shape, spread))
    )


def load_model(
    path: str | Path, mesh: Mesh, *, dtype: DTypeLike | None = None, param_dtype: DTypeLike | None = None
) -> tuple[Decoder, ModelConfig, Any]:
    """`models.weights.load_model` onto a mesh: each host reads only the parts that its devices hold.

    The decoder is that of `config.for_shards`, the configuration the checkpoint's.
    """
    config, _ = weights.open_checkpoint(weights.resolve_model_path(path))
    return weights.load_model(path, dtype=dtype, param_dtype=param_dtype, placement=placement(config, mesh))


def place_model(model: Decoder, mesh: Mesh) -> Decoder:
    """A decoder of one device on a mesh, with its columns in the order `ModelConfig.for_shards` says."""
    config = model.config
    if config.shards != 1:
        raise ConfigError(f"the model is spread over {config.shards} devices already, allowed: 1")
    return weights.build_model(
        config,
        weights.tensors_of(model),
        dtype=model.dtype,
        param_dtype=model.embed_tokens.embedding[...].dtype,
        placement=placement(config, mesh),
    )


def abstract_model(config: ModelConfig, mesh: Mesh, *, dtype: DTypeLike, param_dtype: DTypeLike) -> Any:
    """The state of the decoder on a mesh by shapes alone: `jax.ShapeDtypeStruct`s with their shardings."""
    spread = config.for_shards(mesh.shape[MODEL_AXIS])
    state = nnx.split(weights.abstract_model(spread, dtype=dtype, param_dtype=param_dtype))[1]
    leaves, structure = jax.tree.flatten(state)
    placed = [
        jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=on_mesh(mesh, *parameter_spec(name, leaf.shape, spread))
        )
        for name, leaf in zip(weights.parameter_names(state), leaves)
    ]
    return jax.tree.unflatten(structure, placed)
