"""Attention over the cache of a transformers layer; BF16 rows (rings) through Torch's own kernels.

INT2 pages have kernels behind `ops`. Rings have the float32 reference there, which is what every other
implementation is compared with; on a CUDA device they take `scaled_dot_product_attention` here, unless
scores are capped or the reference is asked for by name.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .. import ops
from ..cache import append_rows
from ..layer_cache import DenseCache, LayerCache


def append_token(
    store: LayerCache, rotation: Any, key: Tensor, value: Tensor, new_lengths: Tensor,
    implementation: str | None,
) -> None:  # fmt: skip
    """`cache.append_rows` of one row [B, 1, K, D] per sequence, for which the caller has found room."""
    if not ops.append_token(store, rotation, key, value, new_lengths, implementation=implementation):
        append_rows(store, rotation, key, value, new_lengths, implementation=implementation, check=False)


def append_to_ring(ring: DenseCache, key: Tensor, value: Tensor, new_lengths: Tensor | None) -> None:
    """Writes one row [B, 1, K, D] per sequence where new_lengths is 1 (None: everywhere), without a wait."""
    sequence = torch.arange(ring.batch, device=key.device)
    slot = (ring.lengths % ring.key.shape[1]).long()
    for rows, new in ((ring.key, key), (ring.value, value)):
        row = new[:, 0].to(rows.dtype)
        if new_lengths is not None:
            row = torch.where((new_lengths > 0)[:, None, None], row, rows[sequence, slot])
        rows[sequence, slot] = row
    ring.lengths += 1 if new_lengths is None else new_lengths


def decode_attention(
    query: Tensor,
    store: Any,
    rotation: Any,
    *,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """`ops.decode_attention`: query [B, N, D] -> [B, N, D], waiting for no device."""
    if softcap is not None or not _through_torch(query, store, implementation):
        return ops.decode_attention(
            query, store, rotation, softmax_scale=softmax_scale, sliding_window=sliding_window,
            sink_logits=sink_logits, softcap=softcap, implementation=implementation,
        )  # fmt: skip
    return ring_attention(
        query[:, None], None, None, store, new_lengths=None, softmax_scale=softmax_scale,
        sliding_window=sliding_window, sink_logits=sink_logits,
    )[:, 0]  # fmt: skip


def chunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    store: Any,
    rotation: Any,
    *,
    new_lengths: Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """`ops.chunk_attention`: query [B, T, N, D], key, value [B, T, K, D] -> [B, T, N, D]."""
    if softcap is not None or not _through_torch(query, store, implementation):
        return ops.chunk_attention(
            query, key, value, store, rotation, new_lengths=new_lengths, softmax_scale=softmax_scale,
            sliding_window=sliding_window, sink_logits=sink_logits, softcap=softcap,
            implementation=implementation,
        )  # fmt: skip
    return ring_attention(
        query, key, value, store, new_lengths=new_lengths, softmax_scale=softmax_scale,
        sliding_window=sliding_window, sink_logits=sink_logits,
    )  # fmt: skip


def _through_torch(query: Tensor, store: Any, implementation: str | None) -> bool:
    return isinstance(store, DenseCache) and query.device.type == "cuda" and implementation != "eager"


def ring_attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    ring: DenseCache,
    *,
    new_lengths: Tensor | None,
    softmax_scale: float,
    sliding_window: int | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """Attention of rows [B, T, N, D] over a ring as it is, and over the new rows [B, T, K, D] if given.

    Without new rows the queries are the newest tokens of the ring. A query that sees nothing gets a finite
    result that means nothing. `sink_logits` [N] are those of a further key whose value is zero.
    """
    device, tokens, group = query.device, query.shape[1], query.shape[2] // ring.key.shape[2]
    slots = ring.key.shape[1]
    newest = ring.lengths[:, None] - 1
    token = newest - (newest - torch.arange(slots, device=device)) % slots  # [B, S], negative for none
    step = torch.arange(tokens, device=device)
    position = newest + (0 if key is None else 1) + step  # [B, T]
    mask = (token >= 0)[:, None] & (token[:, None] <= position[:, :, None])
    if sliding_window is not None:
        mask &= position[:, :, None] - token[:, None] < sliding_window
    keys, values = (x.to(query.dtype) for x in (ring.key, ring.value))
    if key is not None and value is not None and new_lengths is not None:
        own = (step[:, None] >= step) & (step < new_lengths[:, None, None])
        if sliding_window is not None:
            own = own & (step[:, None] - step < sliding_window)
        mask = torch.cat([mask, own], dim=2)
        keys, values = (torch.cat(pair, dim=1) for pair in ((keys, key), (values, value)))
    mask = (mask | ~mask.any(dim=2, keepdim=True))[:, None]  # [B, 1, T, S]
    keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (keys, values))
    if sink_logits is not None:
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=device).masked_fill_(~mask, -torch.inf)
        sink = sink_logits.to(query.dtype)[None, :, None, None].expand(mask.shape[0], -1, tokens, 1)
        mask = torch.cat([bias.expand(-1, query.shape[2], -1, -1), sink], dim=3)
        keys, values = pad(keys, (0, 0, 0, 1)), pad(values, (0, 0, 0, 1))
    out = scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, attn_mask=mask, scale=softmax_scale
    )
    return out.transpose(1, 2)
