"""The rules by which other stacks read a published pair, implemented from their documented behaviour alone.

Nothing here imports the packages: a test that an export is right must not share their reading of the files.
Each loader returns the matrices that it applies in every layer that it keeps in two bits, or raises Refused.
"""

import dataclasses
import pathlib

import numpy as np
import torch

ROLE_FILES = {"key": "k_rotation_qqt_r_h_pbr.pt", "value": "v_rotation_sst_r_h_pbr.pt"}


class Refused(Exception):
    """The loader stops with an error."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What a serving stack knows of its model."""

    layers: int
    full: tuple[int, ...]  # ids of the layers with full attention
    query_heads: int
    key_value_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Applied:
    """What is done to rows: k·key, q·query, v·value, o·output, each [heads, D, D]; keys lose the mean."""

    key: np.ndarray
    query: np.ndarray
    value: np.ndarray
    output: np.ndarray
    key_mean: np.ndarray


def read(folder: pathlib.Path, role: str) -> dict:
    return torch.load(folder / ROLE_FILES[role], map_location="cpu", weights_only=True)


def entry_of(state: dict, layer: int) -> dict:
    layers = state["layers"]
    for name in (layer, str(layer)):
        if name in layers:
            return layers[name]
    raise Refused(f"missing layer {layer}")


def one_matrix(state: dict, layer: int, model: Model) -> np.ndarray:
    matrix = entry_of(state, layer)["rotation"]
    if tuple(matrix.shape) != (model.head_dim, model.head_dim):
        raise Refused(f"layer {layer} has shape {tuple(matrix.shape)}")
    return matrix.double().numpy()[None]


def shared_orthogonal(folder: pathlib.Path, model: Model, layers: dict[int, int]) -> dict[int, Applied]:
    """One matrix for rows and queries, its transpose for outputs; `layers`: model's id -> file's id."""
    states = {role: read(folder, role) for role in ROLE_FILES}
    applied = {}
    for layer, identifier in layers.items():
        key, value = (one_matrix(states[role], identifier, model) for role in ("key", "value"))
        applied[layer] = Applied(key, key, value, value.swapaxes(-1, -2), np.zeros((1, model.head_dim)))
    return applied


def sglang(folder: pathlib.Path, model: Model) -> dict[int, Applied]:
    return shared_orthogonal(folder, model, {layer: layer for layer in range(model.layers)})


def sglang_hybrid(folder: pathlib.Path, model: Model) -> dict[int, Applied]:
    return shared_orthogonal(folder, model, {layer: layer for layer in model.full})


def nova(folder: pathlib.Path, model: Model) -> dict[int, Applied]:
    return shared_orthogonal(folder, model, {layer: index for index, layer in enumerate(model.full)})


def vllm(folder: pathlib.Path, model: Model) -> dict[int, Applied]:
    """Reads any ids, but a layer without a matrix runs as naive INT2 (older) or stops the server (newer)."""
    return shared_orthogonal(folder, model, {layer: layer for layer in range(model.layers)})


def heads_of(state: dict, entry: dict, name: str, model: Model, rank: int, ranks: int) -> np.ndarray:
    """[heads of the rank, D, D] of a field that is per head if the file says so, else shared."""
    tensor = entry[name].double().numpy()
    per_head = state["source_grouping"] in ("per_kv_head", "head")
    if not per_head:
        if tensor.ndim != 2:
            raise Refused("a matrix per head in a file of one per layer")
        return tensor[None]
    if tensor.shape != (model.key_value_heads, model.head_dim, model.head_dim):
        raise Refused(f"{name} has shape {tensor.shape}")
    share = model.key_value_heads // ranks
    return tensor[rank * share : (rank + 1) * share]


def per_head(
    folder: pathlib.Path, model: Model, rank: int = 0, ranks: int = 1, *, companions: bool
) -> dict[int, Applied]:
    states = {role: read(folder, role) for role in ROLE_FILES}
    if companions:
        for state in states.values():
            for name in ("q_rotation", "o_rotation", "k_mean"):
                count = sum(name in entry for entry in state["layers"].values())
                if count not in (0, len(state["layers"])):
                    raise Refused(f"{name} on {count} of {len(state['layers'])} layers")
    elif any(state["format_version"] not in (1, 2, 3) for state in states.values()):
        raise Refused("version")
    applied = {}
    for layer in range(model.layers):
        keys, values = (entry_of(states[role], layer) for role in ("key", "value"))
        key = heads_of(states["key"], keys, "rotation", model, rank, ranks)
        value = heads_of(states["value"], values, "rotation", model, rank, ranks)
        query, output, mean = key, value.swapaxes(-1, -2), np.zeros((1, model.head_dim))
        if companions and "q_rotation" in keys:
            query = heads_of(states["key"], keys, "q_rotation", model, rank, ranks)
        if companions and "o_rotation" in values:
            output = heads_of(states["value"], values, "o_rotation", model, rank, ranks).swapaxes(-1, -2)
        if companions and "k_mean" in keys:
            mean = keys["k_mean"].double().numpy().reshape(-1, model.head_dim)
            if len(mean) > 1:
                share = model.key_value_heads // ranks
                mean = mean[rank * share : (rank + 1) * share]
        applied[layer] = Applied(key, query, value, output, mean)
    return applied


def sglang_2026_08(folder: pathlib.Path, model: Model, rank: int = 0, ranks: int = 1) -> dict[int, Applied]:
    return per_head(folder, model, rank, ranks, companions=False)


def sglang_2026_10(folder: pathlib.Path, model: Model, rank: int = 0, ranks: int = 1) -> dict[int, Applied]:
    return per_head(folder, model, rank, ranks, companions=True)


LOADERS = {
    "sglang": sglang,
    "sglang-hybrid": sglang_hybrid,
    "sglang-2026-08": sglang_2026_08,
    "sglang-2026-10": sglang_2026_10,
    "nova": nova,
    "vllm": vllm,
}


def worst_error(applied: dict[int, Applied], model: Model, rank: int = 0, ranks: int = 1) -> float:
    """The largest relative error of attention outputs over all layers, with rows rotated but not coded.

    Scores lose the part that is the same for every key (softmax does not see it), as with a mean taken out.
    """
    generator = np.random.default_rng(0)
    heads = model.key_value_heads // ranks
    group = model.query_heads // model.key_value_heads
    tokens, head_dim, worst = 24, model.head_dim, 0.0
    for layer in applied.values():
        query = generator.standard_normal((heads, group, head_dim))
        key, value = generator.standard_normal((2, heads, tokens, head_dim))

        def attend(query, key, value):
            scores = np.einsum("kgd,ktd->kgt", query, key) / np.sqrt(head_dim)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            return np.einsum("kgt,ktd->kgd", weights / weights.sum(axis=-1, keepdims=True), value)

        exact = attend(query, key, value)
        got = attend(query @ layer.query, (key - layer.key_mean[:, None]) @ layer.key, value @ layer.value)
        worst = max(worst, float(np.abs(got @ layer.output - exact).max() / np.abs(exact).max()))
    return worst
