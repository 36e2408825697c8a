"""Layers with linear attention in an OscarCache: transformers' own states; what they cannot do is refused.

Such a layer keeps a state of fixed size instead of keys and values. The state does not say what it was before
the latest tokens, so nothing can be taken back, and a forward that was interrupted leaves it in between.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..core.errors import ConfigError


class RecurrentLayer(LinearAttentionLayer):
    """The states of one linear layer, in the model's dtype; `steps` counts the forwards that changed them."""

    def __init__(self, layer_id: int, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.layer_id, self.steps = layer_id, 0

    @torch.inference_mode(False)
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocates states that later calls may change, inside inference mode and outside."""
        super().lazy_initialization(*args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Stores the state after new tokens, which ends what a forward does to this layer."""
        self.steps += 1
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def reset(self) -> None:
        """Forgets everything, the number of sequences too."""
        self.__init__(self.layer_id, self.number_of_states)

    def refusal(self, what: str) -> ConfigError:
        """The refusal of something that needs an earlier state."""
        return ConfigError(
            f"layer {self.layer_id} has linear attention, whose state cannot be taken back: {what}, "
            "allowed: reset() and the whole text again"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused."""
        raise self.refusal(f"crop({int(tokens_to_remove)})")

    def activate_past_recording(self) -> None:
        """Refused: drafts could not be taken back."""
        raise self.refusal("assisted decoding")

    def offload(self) -> None:
        """Refused: the states stay where the model is."""
        raise ConfigError(f"layer {self.layer_id}: offloading = True, allowed: False for an OscarCache")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` (or those where a bool mask is True)."""
        if self.device is not None:
            indices = torch.as_tensor(indices)
            chosen: Any = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self.reorder_cache(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times."""
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                states[index] = None if state is None else state.repeat_interleave(repeats, dim=0)

    def copy(self) -> "RecurrentLayer":
        """An independent layer of the same content."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict):
                cloned = {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
                setattr(twin, name, cloned)
        return twin
