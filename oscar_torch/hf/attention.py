"""The attention function and the mask function that transformers calls by the name "oscar".

Where an OscarCache is behind the keys, they go to its layer (`OscarLayer.attend`). Where none is (a forward
without a cache, a vision tower, a draft model, the second pass of guidance), the same name attends as "sdpa"
does, by calling transformers' own functions: exact, differentiable, nothing is quantized. An OscarCache is
known to the mask function because transformers asks it for the sizes of the mask first, and to the attention
function because its `update` announced the keys.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import cap_scores
from ..core.errors import ConfigError, ShapeError
from .handover import forget_handover, note_window, require_window, take_announced, take_mask_request
from .layer import ATTENTION, OscarLayer
from .static_layer import StaticLayer, traced

_log = logging.getLogger(__name__)
_told: set[str] = set()  # what has been logged once


def outside_graphs[F: Callable[..., Any]](function: F) -> F:
    """`torch.compiler.disable`, which keeps the function's type."""
    return torch.compiler.disable(function)  # type: ignore[return-value]


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

    The output has the query's dtype. `s_aux` [N] are attention-sink logits. Without an OscarCache behind the
    keys this is transformers' "sdpa" (which knows no `softcap`: then the same in plain operations), gradients
    included; with one it is for inference only. Raises
    ConfigError and ShapeError, with nothing stored, for what the cache cannot honour.
    """
    given = (scaling, sliding_window, softcap, s_aux, position_bias)
    if not torch.compiler.is_compiling():
        return _attend(module, query, key, value, attention_mask, *given, **kwargs)
    if traced.layer is not None:
        layer, traced.layer = traced.layer, None
        with torch.no_grad():
            return _over_cache(layer, module, query, key, value, attention_mask, *given), None
    return _attend_outside(module, query, key, value, attention_mask, *given, **kwargs)


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None, sliding_window: int | None, softcap: float | None, s_aux: Tensor | None,
    position_bias: Tensor | None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`oscar_attention` where no compiler is tracing."""
    layer = take_announced(key)
    if layer is None:
        if attention_mask is not None and attention_mask.ndim == 2:
            raise ConfigError("the mask was made for an OscarCache, but no OscarCache got these keys")
        options = kwargs | {"scaling": scaling, "position_bias": position_bias}
        if softcap is not None:
            if s_aux is not None or position_bias is not None:
                raise ConfigError(f"softcap = {softcap} beside s_aux or position_bias, allowed: alone")
            return _softcapped(query, key, value, attention_mask, softcap, scaling), None
        if s_aux is not None:
            return _sdpa_with_sinks(module, query, key, value, attention_mask, s_aux, **options)
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)
    given = (scaling, sliding_window, softcap, s_aux, position_bias)
    if not torch.is_grad_enabled():
        return _over_cache(layer, module, query, key, value, attention_mask, *given), None
    with torch.no_grad():
        out = _over_cache(layer, module, query, key, value, attention_mask, *given)
    return _without_gradient(out, query, key, value), None


# Disabling costs time where nothing is compiled, so that path does without.
_attend_outside = outside_graphs(_attend)


def _over_cache(
    layer: OscarLayer, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | None, scaling: float | None, sliding_window: int | None,
    softcap: float | None, s_aux: Tensor | None, position_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention over the rows of `layer`, which stores the new ones; a static cache's step is traced."""
    if position_bias is not None:
        raise ConfigError(f"attention with position_bias = {position_bias!r}, allowed: None")
    if module.training:
        raise ConfigError("model.training = True, allowed: False (call model.eval())")
    if sliding_window is not None and sliding_window != layer.sliding_window:
        raise ConfigError(
            f"layer {layer.layer_id} attends with sliding_window = {sliding_window}, "
            f"the config says {layer.sliding_window}"
        )
    if sliding_window is None and not torch.compiler.is_compiling():
        require_window(layer.sliding_window, layer.columns + query.shape[2])
    real = None if attention_mask is None else _columns_of(attention_mask)
    softmax_scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sink_logits = None if s_aux is None else s_aux.float()
    if isinstance(layer, StaticLayer) and query.shape[2] == 1:
        return layer.step(
            query, key, value, real, softmax_scale=softmax_scale, sink_logits=sink_logits, softcap=softcap
        )
    attend = _store_and_attend_outside if torch.compiler.is_compiling() else _store_and_attend
    return attend(layer, query, key, value, real, softmax_scale, sink_logits, softcap)


def _store_and_attend(
    layer: OscarLayer, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None,
    softmax_scale: float, sink_logits: Tensor | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    return layer.attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None if real is None else real.to(query.device, torch.bool),
        softmax_scale=softmax_scale,
        sink_logits=sink_logits,
        softcap=softcap,
    )


_store_and_attend_outside = outside_graphs(_store_and_attend)


def _columns_of(mask: Tensor) -> Tensor:
    """A mask as `oscar_mask` made it, [B, T], or [B, 1, T, 1] for a static cache -> [B, T]."""
    if mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[3] == 1:
        return mask[:, 0, :, 0]
    if mask.ndim != 2:
        raise ShapeError(f"attention mask {tuple(mask.shape)}, allowed: [batch, columns], 1 for tokens")
    return mask


def oscar_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Which of the new columns are tokens: bool [B, q_length], or None for all of them.

    For a static cache that has tokens (its offset is a tensor) int32 [B, 1, q_length, 1], which transformers
    passes on as it is; before a step this is where CacheFullError is raised, on the host. Causality and
    sliding windows are the cache's own business; any other pattern is refused, ConfigError. Without an
    OscarCache this is the mask of "sdpa"; ConfigError for caches of another class than DynamicCache.
    """
    arguments: dict[str, Any] = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "mask_function": mask_function, "attention_mask": attention_mask,
        "local_size": local_size, "use_vmap": use_vmap,
    }  # fmt: skip
    if torch.compiler.is_compiling() and traced.mask_layer is not None:
        layer, traced.mask_layer = traced.mask_layer, None
        return _new_tokens(layer, q_length, q_offset, mask_function, attention_mask, local_size, use_vmap)
    return _mask(**arguments, **kwargs)


@outside_graphs
def _mask(
    *, q_length: int, q_offset: int | Tensor, mask_function: Callable, attention_mask: Tensor | None,
    local_size: int | None, use_vmap: bool, **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """`oscar_mask` where no compiler is tracing."""
    forget_handover()  # whatever a step that did not end has left
    layer = take_mask_request(q_offset, q_length)
    if layer is None:
        _check_foreign(_cache_of_the_caller())
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](
            q_length=q_length,
            q_offset=q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            **kwargs,
        )
    return _new_tokens(layer, q_length, q_offset, mask_function, attention_mask, local_size, use_vmap)


def _new_tokens(
    layer: OscarLayer,
    q_length: int,
    q_offset: int | Tensor,
    mask_function: Callable,
    attention_mask: Tensor | None,
    local_size: int | None,
    use_vmap: bool,
) -> Tensor | None:
    """The mask for an OscarCache, of which `layer` was asked for the sizes."""
    causal = mask_function is causal_mask_function or (
        local_size is not None and "and_masks" in mask_function.__qualname__
    )
    if use_vmap or not causal:
        raise ConfigError(
            f"attention pattern {mask_function.__qualname__!r}, allowed: causal, also with a sliding window "
            "(image blocks that see themselves both ways, and texts packed into one row, are other patterns)"
        )
    if not torch.compiler.is_compiling():
        note_window(local_size)
    if isinstance(layer, StaticLayer):
        if attention_mask is None:
            if not torch.compiler.is_compiling() and any(not isinstance(c, int) for c in layer.ledger.chunks):
                raise ConfigError(
                    f"attention_mask = None over {layer.ledger.columns} stored columns with padding among "
                    "them, allowed: the mask of all columns"
                )
            return None
        if isinstance(q_offset, Tensor):
            return _static_mask(layer, attention_mask, q_length)
    if attention_mask is not None and attention_mask.shape[1] != q_offset + q_length:
        raise ShapeError(
            f"attention mask of {attention_mask.shape[1]} columns, expected {q_offset + q_length}: "
            f"{q_offset} in the cache and {q_length} new"
        )
    return layer.new_tokens(attention_mask, q_length)


def _static_mask(layer: StaticLayer, attention_mask: Tensor, q_length: int) -> Tensor | None:
    new = attention_mask[:, -q_length:]
    if not torch.compiler.is_compiling():
        if q_length == 1:
            layer.ledger.expect_step(attention_mask.shape[1])
        else:
            layer.ledger.check_columns(attention_mask.shape[1], q_length)
            layer.ledger.check_stored(attention_mask[:, :-q_length].to(torch.bool))
    if q_length > 1 and _unless_all_tokens(new) is None:
        return None
    # A tensor of its own: a view of one sequence is contiguous whatever its strides, which grow with the
    # columns and would make every step a new one for a compiler.
    mask = torch.empty((new.shape[0], 1, q_length, 1), dtype=torch.int32, device=new.device)
    return mask.copy_(new[:, None, :, None])


@outside_graphs
def _unless_all_tokens(columns: Tensor) -> Tensor | None:
    columns = columns.to(torch.bool)
    return None if columns.all() else columns


class _NoGradient(torch.autograd.Function):
    """The output of attention over 2-bit pages, where a backward pass ends with an error."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ConfigError(
            "backward through attention over an OscarCache, allowed: inference "
            "(without past_key_values the same model attends like 'sdpa' and has gradients)"
        )


def _without_gradient(out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`, from which no gradient can be asked: silence would be a gradient without any attention path."""
    if torch.is_grad_enabled() and any(rows.requires_grad for rows in inputs):
        return _NoGradient.apply(out, *inputs)  # type: ignore[return-value]
    return out


# Without an OscarCache.


def _sdpa_with_sinks(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """sdpa with a sink logit per head: a further key whose score is that logit and whose value is zero."""
    batch, heads, columns = query.shape[:3]
    stored = key.shape[2]
    if attention_mask is None:
        step = torch.arange(columns, device=query.device)[:, None] + (stored - columns)
        attention_mask = (torch.arange(stored, device=query.device) <= step)[None, None]
    bias = torch.zeros_like(attention_mask, dtype=query.dtype)
    bias = bias.masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    bias = bias.expand(batch, heads, columns, stored)
    sink = s_aux.to(query.dtype)[None, :, None, None].expand(batch, heads, columns, 1)
    key, value = (torch.nn.functional.pad(rows, (0, 0, 0, 1)) for rows in (key, value))
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return sdpa(module, query, key, value, torch.cat([bias, sink], dim=-1), **options)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    softcap: float,
    scaling: float | None,
) -> Tensor:
    """Attention whose scaled scores x become softcap * tanh(x / softcap), which "sdpa" would leave out."""
    columns, stored, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = (rows.repeat_interleave(group, dim=1) for rows in (key, value))
    if attention_mask is None:
        step = torch.arange(columns, device=query.device)[:, None] + (stored - columns)
        attention_mask = torch.arange(stored, device=query.device) <= step
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = cap_scores(scores, softcap).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


def _check_foreign(cache: Cache | None) -> None:
    """Raises ConfigError for a cache class that "oscar" cannot attend over.

    A DynamicCache (or one of its kinds for drafts) is what models and `generate` make for themselves: its
    keys are plain rows and attended to exactly. It is mentioned once in the log: a forgotten OscarCache looks
    the same.
    """
    if cache is None:
        return
    own = type(cache).__module__ == DynamicCache.__module__
    if not (own and isinstance(cache, DynamicCache)):
        raise ConfigError(
            f"attn_implementation {ATTENTION!r} with a cache of class {type(cache).__name__}, "
            "allowed: past_key_values=OscarCache(rotations, model), or transformers' own DynamicCache"
        )
    if "dynamic" not in _told:
        _told.add("dynamic")
        _log.warning(
            "attention %r over a DynamicCache attends like 'sdpa', nothing is quantized "
            "(2-bit pages need past_key_values=OscarCache(rotations, model))",
            ATTENTION,
        )


def _cache_of_the_caller() -> Cache | None:
    """The cache for which transformers is making a mask; its interface does not pass it on.

    Read from the frame of `transformers.masking_utils` that called. Where it cannot be found (compiled code)
    the answer is None, and the keys are attended to as they come.
    """
    frame: Any = sys._getframe(1)
    for _ in range(8):
        frame = frame and frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == "transformers.masking_utils":
            names = frame.f_locals
            cache = names.get("cache", names.get("past_key_values"))
            return cache if isinstance(cache, Cache) else None
    return None


AttentionInterface.register(ATTENTION, oscar_attention)
AttentionMaskInterface.register(ATTENTION, oscar_mask)
