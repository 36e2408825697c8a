"""Positions in a transformers model: how its keys turn with them, what a query reads from INT2 pages."""

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core import cache_format as fmt
from ..core.config import CacheConfig

EVERY = 4  # queries at positions 3, 7, ...: neighbours are alike, and all would cost as much as attention
_BLOCK = 128  # sampled queries at a time, or as many as have
_SCORES, _SCORES_GPU = 1 << 23, 1 << 27  # scores: what a CPU caches, what keeps launches few


def coded_share(
    query: Tensor,
    key: Tensor,
    geometry: CacheConfig,
    softmax_scale: float,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Of each sampled query's attention what goes to tokens of INT2 pages, as in decoding: float32 [T, N].

    query [T, N, D], key [T, K, D] of one sequence from its start, after RoPE; zeros at the other queries.
    """
    tokens, heads = query.shape[:2]
    share = torch.zeros(tokens, heads, device=query.device)
    first = geometry.sink_tokens + geometry.recent_tokens + fmt.PAGE_TOKENS - 1  # the first that reads a page
    sample = range(first, tokens, EVERY)
    group = heads // key.shape[1]
    keys = key.float().permute(1, 2, 0)  # [K, D, T]
    room = _SCORES if query.device.type == "cpu" else _SCORES_GPU
    block = max(_BLOCK, room // (heads * tokens))
    for chosen in (sample[start : start + block] for start in range(0, len(sample), block)):
        positions = torch.arange(chosen.start, chosen.stop, EVERY, device=query.device)
        stored = torch.arange(chosen[-1] + 1, device=query.device)  # the last of them sees no more
        queries = query[positions].float() * softmax_scale
        queries = queries.unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [K, G, t, D]
        scores = queries.flatten(1, 2) @ keys[..., : len(stored)]
        scores = scores.reshape(heads, len(positions), len(stored))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        here = positions[:, None]
        hidden = stored > here
        if sliding_window is not None:
            hidden |= stored <= here - sliding_window
        scores += torch.zeros_like(scores[0]).masked_fill_(hidden, -torch.inf)  # once for all heads
        if sink_logits is not None:
            sinks = sink_logits.float()[:, None, None].expand(-1, len(positions), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(stored)]
        pages = (here + 1 - geometry.sink_tokens - geometry.recent_tokens) // fmt.PAGE_TOKENS
        coded = (stored >= geometry.sink_tokens) & (stored < geometry.sink_tokens + pages * fmt.PAGE_TOKENS)
        share[positions] = torch.einsum("nts,ts->tn", weights, coded.float())
    return share


def layer_rope(model: Any, layer: int) -> tuple[np.ndarray | None, bool]:
    """Radians per position of the channel pairs that turn, float64 [R/2], and whether a pair are neighbours.

    Empty for a layer without RoPE; None where the model does not show how it turns keys. Channel i pairs with
    i + R/2, or 2i with 2i + 1: seen in what becomes of a row with one channel.
    """
    text = model.config.get_text_config(decoder=True)
    turned = getattr(text, "no_rope_layers", None)  # 1 where a layer turns
    if turned is not None and not turned[layer]:
        return np.zeros(0), False
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    rotary = next((m for n, m in model.named_modules() if n.rpartition(".")[2] == "rotary_emb"), None)
    attention = next((m for m in model.modules() if getattr(m, "layer_idx", None) == layer), None)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotary is None or apply is None:
        return None, False
    own = getattr(rotary, f"{kinds[layer]}_inv_freq", None)
    frequencies = getattr(rotary, "inv_freq", None) if own is None else own
    if not isinstance(frequencies, Tensor):
        return None, False
    interleaved = _pairs_neighbours(rotary, apply, frequencies, () if own is None else (kinds[layer],))
    return (None, False) if interleaved is None else (frequencies.double().cpu().numpy(), interleaved)


def _pairs_neighbours(
    rotary: nn.Module, apply: Any, frequencies: Tensor, kind: tuple[str, ...]
) -> bool | None:
    """Whether channel 0 turns into channel 1, or else into channel R/2; None if into another."""
    width = 2 * len(frequencies)
    row = torch.zeros(1, 1, 1, width, device=frequencies.device)
    row[..., 0] = 1
    position = torch.ones(1, 1, dtype=torch.long, device=row.device)
    with torch.no_grad():
        turned, _ = apply(row, row, *rotary(row, position, *kind))
    partner = int(turned.flatten()[1:].abs().argmax()) + 1
    return {1: True, width // 2: False}.get(partner)
