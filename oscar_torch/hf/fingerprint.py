"""Which weights a transformers model has: the fingerprint that rotation sets carry."""

from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError
from ..core.fingerprint import EMBEDDING_ROWS, fingerprint_weights
from .model_check import cache_config
from .tensor_parallel import whole


def model_fingerprint(model: nn.Module) -> str:
    """The fingerprint of a transformers model's weights (core/fingerprint.py), equal to that of `oscar_jax`.

    Of a model with a vision tower it is that of the decoder; of one split over ranks (DTensor weights) that
    of the whole model, and every rank must call this.
    Raises ConfigError for a model whose attention layers have no projection named k_proj or qkv_proj.
    """
    config = model.config.get_text_config(decoder=True)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    geometry = cache_config(config)
    keys: list[Tensor] = []
    decoder: nn.Module = model.get_decoder()  # pyright: ignore[reportCallIssue, reportAssignmentType]
    for name, module in decoder.named_modules():
        if name.endswith("self_attn.k_proj"):
            keys.append(module.weight)  # pyright: ignore[reportArgumentType]
        elif name.endswith("self_attn.qkv_proj"):
            first = geometry.num_query_heads * geometry.head_dim
            rows = geometry.num_key_value_heads * geometry.head_dim
            keys.append(whole(module.weight)[first : first + rows])  # pyright: ignore[reportArgumentType, reportIndexIssue]
    if len(keys) < 1:
        raise ConfigError(f"{type(model).__name__} has no self_attn.k_proj or qkv_proj")
    embedding: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    tensors = {
        "embedding": whole(embedding.weight, EMBEDDING_ROWS),
        "first_key": whole(keys[0]),
        "last_key": whole(keys[-1]),
    }
    return fingerprint_weights(
        geometry, config.num_hidden_layers, {name: _bytes(tensor) for name, tensor in tensors.items()}
    )


def _bytes(tensor: Tensor) -> bytes:
    """Values rounded to bfloat16, little endian."""
    rounded = tensor.detach().to(torch.bfloat16).cpu().contiguous()
    return rounded.view(torch.int16).numpy().astype("<i2").tobytes()
