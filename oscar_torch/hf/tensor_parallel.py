"""Which heads a rank has of a model that transformers has split over ranks (`tp_plan="auto"`).

transformers makes the weights DTensors and the projections' outputs the rank's own columns: whole heads, if
their number is a multiple of the ranks. What is read here is the plan and the mesh of the weights, so that it
holds for meshes with further axes too.
"""

import re
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..core.config import CacheConfig
from ..core.errors import ConfigError
from ..rotations.head_shard import HeadShard

SPLIT = "colwise"  # the style of a projection whose output stays split; others gather it


def model_shard(model: nn.Module, geometry: CacheConfig) -> HeadShard | None:
    """The heads this rank attends with, of `geometry`, the whole model's; None where it has all of them.

    Raises ConfigError for a plan that does not give every rank whole heads.
    """
    fused = _projection(model, "qkv_proj")
    if fused is not None and _is_split(model, *fused):
        raise ConfigError(f"{fused[0]} split over ranks, allowed: gathered, or separate q_proj and k_proj")
    query, key = _projection(model, "q_proj"), _projection(model, "k_proj")
    if query is None or key is None or not _is_split(model, *query):
        return None
    weight: Any = query[1].weight
    axis = next(i for i, placement in enumerate(weight.placements) if isinstance(placement, Shard))
    return HeadShard(
        rank=weight.device_mesh.get_local_rank(axis),
        ranks=weight.device_mesh.size(axis),
        num_query_heads=geometry.num_query_heads,
        num_key_value_heads=geometry.num_key_value_heads,
        replicated=not _is_split(model, *key),
    )


def refuse_split_config(config: Any) -> None:
    """Raises ConfigError for the config of a model that is split: only the model knows which heads it has."""
    ranks = getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1
    if ranks > 1:
        raise ConfigError(
            f"the config of a model split over {ranks} ranks (tp_plan), allowed: the model itself, "
            "OscarCache(rotations, model)"
        )


def whole(weight: Tensor, rows: int | None = None) -> Tensor:
    """A weight, or its first `rows` rows, on every rank; for a DTensor all ranks must call this."""
    if not isinstance(weight, DTensor):
        return weight[:rows]
    if rows is not None:  # split by columns first, so that no rank has all rows of an embedding
        columns = [Shard(1) if placement.is_shard(0) else placement for placement in weight.placements]
        weight = weight.redistribute(placements=columns)[:rows]  # pyright: ignore[reportAssignmentType]
    return weight.full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def _projection(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """The first attention projection of that name, and its own name in the model."""
    for found, module in model.named_modules():
        if found.endswith(f"self_attn.{name}"):
            return found, module
    return None


def _is_split(model: nn.Module, name: str, module: nn.Module) -> bool:
    """Whether a projection puts out this rank's columns only."""
    weight = module.weight
    if not isinstance(weight, DTensor):
        if (getattr(model, "_tp_size", None) or 1) > 1 and _style(model, name) == SPLIT:
            raise ConfigError(f"{name}.weight is a {type(weight).__name__}, allowed under tp_plan: a DTensor")
        return False
    split = any(isinstance(placement, Shard) and placement.dim == 0 for placement in weight.placements)
    return split and _style(model, name) == SPLIT


def _style(model: nn.Module, name: str) -> str:
    """How the model's plan treats a module; a model without a plan was split by somebody else."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    return plan.get(name) or plan.get(re.sub(r"\d+", "*", name)) or ("" if plan else SPLIT)
