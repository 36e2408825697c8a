"""Shows every layer's queries, keys, values and outputs as they pass through a model's own fast attention.

While a model is observed it attends by the name "oscar_observed", which is its sdpa and hands the rows on.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..core.errors import ConfigError
from .attention import oscar_attention

OBSERVED = "oscar_observed"


class Seen(NamedTuple):
    """What one layer saw of one sequence, without padding, and how it attends."""

    query: Tensor  # [T, N, D]
    key: Tensor  # bf16 [T, K, D], as the cache stores it
    value: Tensor  # bf16 [T, K, D]
    output: Tensor  # [T, N, D]
    softmax_scale: float
    sliding_window: int | None
    softcap: float | None
    sink_logits: Tensor | None  # [N]


See = Callable[[int, int, Seen], None]  # (layer, row of the batch, what was seen)
_observers: list[See] = []  # at most one
_lengths: list[int] = []  # of the rows of the batch that is running


def observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa, [B, N, T, D] -> [B, T, N, D], while the observer sees what it saw."""
    out, _ = oscar_attention(module, query, key, value, attention_mask, **options)
    for see in _observers:
        for row, length in enumerate(_lengths):
            rows = (x[row, :, :length].transpose(0, 1) for x in (query, key, value))
            queries, keys, values = rows
            seen = Seen(
                queries,
                keys.bfloat16(),
                values.bfloat16(),
                out[row, :length],
                options.get("scaling") or query.shape[-1] ** -0.5,
                options.get("sliding_window"),
                options.get("softcap"),
                options.get("s_aux"),
            )
            see(int(module.layer_idx), row, seen)  # pyright: ignore[reportArgumentType]
    return out, None


AttentionInterface.register(OBSERVED, observed_attention)
AttentionMaskInterface.register(OBSERVED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextlib.contextmanager
def observing(model: Any, see: See) -> Iterator[None]:
    """The model attends by OBSERVED, in eval mode, and `see` is called; everything is put back.

    Raises ConfigError while another model is observed in this process.
    """
    if _observers:
        raise ConfigError("another calibration is running in this process")
    before = model.config.get_text_config(decoder=True)._attn_implementation
    was_training = model.training
    model.set_attn_implementation(OBSERVED)
    model.eval()
    _observers.append(see)
    try:
        yield
    finally:
        _observers.clear()
        model.set_attn_implementation(before)
        model.train(was_training)


@torch.no_grad()
def run_batch(model: Any, batch: Sequence[Tensor]) -> None:
    """One forward over sequences of token ids [T], shorter ones padded on the right."""
    _lengths[:] = lengths = [len(tokens) for tokens in batch]
    ids = nn.utils.rnn.pad_sequence(list(batch), batch_first=True).to(model.device)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    padding = {} if mask.all() else {"attention_mask": mask.long().to(model.device)}
    model(ids, use_cache=False, logits_to_keep=1, **padding)
