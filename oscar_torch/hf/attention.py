"""The attention function and the mask function that transformers calls by the name "oscar"."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ..core.errors import ConfigError, ShapeError
from .layer import ATTENTION, _handover

# What transformers calls.


@torch.compiler.disable
@torch.no_grad()
def oscar_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over an OscarCache: query [B, N, T, D], key, value [B, K, T, D] -> [B, T, N, D].

    The output has the query's dtype. `s_aux` [N] are attention-sink logits. Inference only: no gradient.
    """
    layer, announced = getattr(_handover, "layer", None), getattr(_handover, "key", None)
    _handover.layer = _handover.key = None
    if layer is None or announced is None or announced.data_ptr() != key.data_ptr():
        raise ConfigError(
            f"attn_implementation {ATTENTION!r} found no OscarCache behind these keys: "
            "pass past_key_values=OscarCache(rotations, model.config)"
        )
    for name, given in (("softcap", softcap), ("position_bias", position_bias)):
        if given is not None:
            raise ConfigError(f"attention with {name} = {given!r}, allowed: None")
    if module.training:
        raise ConfigError("model.training = True, allowed: False (call model.eval())")
    if sliding_window is not None and sliding_window != layer.sliding_window:
        raise ConfigError(
            f"layer {layer.layer_id} attends with sliding_window = {sliding_window}, "
            f"the config says {layer.sliding_window}"
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ShapeError(
            f"attention mask {tuple(attention_mask.shape)}, allowed: [batch, columns], 1 for tokens"
        )
    out = layer.attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None if attention_mask is None else attention_mask.to(query.device),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sink_logits=None if s_aux is None else s_aux.float(),
    )
    return out, None


@torch.compiler.disable
def oscar_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Which of the new columns are tokens: bool [B, q_length], or None for all of them.

    Causality and sliding windows are the cache's own business; any other pattern is refused, ConfigError.
    """
    causal = mask_function is causal_mask_function or (
        local_size is not None and "and_masks" in mask_function.__qualname__
    )
    if use_vmap or not causal:
        raise ConfigError(
            f"attention pattern {mask_function.__qualname__!r}, allowed: causal, also with a sliding window"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape[1] != q_offset + q_length:
        raise ShapeError(
            f"attention mask of {attention_mask.shape[1]} columns, expected {q_offset + q_length}: "
            f"{q_offset} in the cache and {q_length} new"
        )
    new = attention_mask[:, -q_length:].to(torch.bool)
    return None if new.all() else new


AttentionInterface.register(ATTENTION, oscar_attention)
AttentionMaskInterface.register(ATTENTION, oscar_mask)
