"""How far attention over pages of a rotation is from exact, on the rows of one layer.

Tokens of the BF16 windows stay exact, as in decoding: for a query at position p the cache holds p + 1
tokens, and exactly the tokens `sink ... sink + 64 * history_pages(p + 1)` are read from INT2 pages.
Everything here is float32; nothing is stored in two bits.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..arithmetic import exact_arithmetic
from ..attention import cap_scores
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..quantize import (
    Feedback,
    dequantize_key_pages,
    dequantize_value_pages,
    quantize_key_pages,
    quantize_value_pages,
)
from ..rotations.rotation import LayerRotation


def reconstruct_key_pages(
    key: Tensor,
    transform: Tensor,
    inverse_transposed: Tensor,
    multiplier: Tensor,
    feedback: Feedback | None = None,
) -> Tensor:
    """Keys as INT2 pages return them: [S, K, D], S a multiple of 64 -> float32 [S, K, D]."""
    pages = (-1, fmt.PAGE_TOKENS, *key.shape[1:])
    words, scale, mean = quantize_key_pages(key.reshape(pages), transform, multiplier, feedback)
    return dequantize_key_pages(words, scale, mean, inverse_transposed).reshape(key.shape)


def reconstruct_value_pages(
    value: Tensor,
    transform: Tensor,
    inverse: Tensor,
    mean: Tensor,
    multiplier: Tensor,
    feedback: Feedback | None = None,
) -> Tensor:
    """Values as INT2 pages return them: [S, K, D], S a multiple of 64 -> float32 [S, K, D]."""
    pages = (-1, fmt.PAGE_TOKENS, *value.shape[1:])
    words, scale = quantize_value_pages(value.reshape(pages), transform, multiplier, mean, feedback)
    return dequantize_value_pages(words, scale, mean, inverse).reshape(value.shape)


def reconstruct_pages(key: Tensor, value: Tensor, rotation: LayerRotation) -> tuple[Tensor, Tensor]:
    """Keys and values as the pages of a LayerRotation return them: [S, K, D], any S -> float32 [S, K, D]."""
    tokens = key.shape[0]
    padding = (0, 0, 0, 0, 0, -tokens % fmt.PAGE_TOKENS)
    restored_key = reconstruct_key_pages(
        pad(key, padding),
        rotation.key_transform,
        rotation.query_transform,
        rotation.key_multiplier,
        rotation.key_feedback,
    )
    restored_value = reconstruct_value_pages(
        pad(value, padding),
        rotation.value_transform,
        rotation.output_transform,
        rotation.value_mean,
        rotation.value_multiplier,
        rotation.value_feedback,
    )
    return restored_key[:tokens], restored_value[:tokens]


def coded_mask(lengths: Tensor, tokens: int, config: CacheConfig) -> Tensor:
    """Which of `tokens` tokens are INT2 when the cache holds `lengths` tokens: bool [..., tokens]."""
    pages = ((lengths - config.sink_tokens - config.recent_tokens) // fmt.PAGE_TOKENS).clamp(min=0)
    end = config.sink_tokens + fmt.PAGE_TOKENS * pages
    index = torch.arange(tokens, device=lengths.device)
    return (index >= config.sink_tokens) & (index < end[..., None])


@exact_arithmetic
def attention_error(
    query: Tensor,
    positions: Tensor,
    key: Tensor,
    value: Tensor,
    coded_key: Tensor,
    coded_value: Tensor,
    *,
    geometry: CacheConfig,
    softmax_scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """KL of attention weights and relative error of the attention output, per key/value head.

    query float [T, N, D] at `positions` int [T]; key, value (exact) and coded_key, coded_value (as read
    from INT2) float [S, K, D]. Returns float32 [K] each:
    `kl`: mean over queries of KL(exact weights || weights over coded keys), in nats;
    `output_error`: sum |o - o~|^2 / sum |o|^2 with keys and values coded; `value_error`: with values alone.
    Rows of positions past what is stored must not be passed.
    """
    tokens, heads, head_dim = key.shape
    group = query.shape[1] // heads
    queries = query.float().reshape(query.shape[0], heads, group, head_dim).permute(1, 2, 0, 3)
    index = torch.arange(tokens, device=key.device)
    visible = index <= positions[:, None]
    if sliding_window is not None:
        visible &= index > positions[:, None] - sliding_window
    coded = coded_mask(positions + 1, tokens, geometry)
    errors: dict[str, list[Tensor]] = {"kl": [], "output_error": [], "value_error": []}
    for head in range(heads):
        q = queries[head]  # [G, T, D]
        k, v, k_coded, v_coded = (rows[:, head].float() for rows in (key, value, coded_key, coded_value))
        exact, mixed = (cap_scores((q @ rows.T) * softmax_scale, softcap) for rows in (k, k_coded))
        log_p = torch.log_softmax(exact.masked_fill(~visible, -torch.inf), dim=-1)
        log_q = torch.log_softmax(torch.where(coded, mixed, exact).masked_fill(~visible, -torch.inf), dim=-1)
        p, weights = log_p.exp(), log_q.exp()
        errors["kl"].append((p * (log_p - log_q)).masked_fill(~visible, 0.0).sum(dim=-1).mean())
        reference = p @ v
        energy = (reference**2).sum().clamp(min=1e-30)
        for name, w in (("output_error", weights), ("value_error", p)):
            out = w.masked_fill(coded, 0.0) @ v + w.masked_fill(~coded, 0.0) @ v_coded
            errors[name].append(((out - reference) ** 2).sum() / energy)
    return {name: torch.stack(parts) for name, parts in errors.items()}


def probe_positions(length: int, count: int, config: CacheConfig) -> np.ndarray:
    """At most `count` query positions, evenly spread from the first that reads an INT2 page: int32.

    They end at the last position, so the longest history is always judged. Empty if the sequence has no INT2
    page.
    """
    first = config.sink_tokens + config.recent_tokens + fmt.PAGE_TOKENS - 1
    if length <= first:
        return np.zeros(0, np.int32)
    available = length - first
    steps = np.linspace(first, length - 1, min(count, available))
    return np.unique(np.round(steps).astype(np.int32))
