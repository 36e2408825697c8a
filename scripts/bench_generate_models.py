"""Models, rotations and the BF16 cache of `bench_generate_torch.py`."""

import inspect
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config
from transformers.cache_utils import Cache, DynamicLayer

from oscar_torch.core import cache_format as fmt
from oscar_torch.core.rotation_header import RotationHeader
from oscar_torch.hf import OscarCache, cache_config
from oscar_torch.layer_cache import LayerCache
from oscar_torch.rotations.rotation import LayerRotation, RotationSet, identity_rotation


def qwen3_8b(layers: int) -> Qwen3Config:
    """The shape of Qwen3-8B with `layers` layers."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )


def tiny(layers: int) -> Qwen3Config:
    """A small shape, to try the script without a GPU."""
    small: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
    }
    return Qwen3Config(
        **small, num_key_value_heads=2, head_dim=64, num_hidden_layers=layers, eos_token_id=None,
        pad_token_id=0, max_position_embeddings=131_072, initializer_range=0.2,
    )  # fmt: skip


def make_model(config: Qwen3Config, device: torch.device) -> Any:
    """The model in BF16 with random weights, made on the device."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def hold_random_tokens(cache: OscarCache, length: int) -> OscarCache:
    """A static cache, its memory allocated, whose sequences now hold `length` tokens of random content."""
    for layer in cache.layers:
        store = layer.store
        assert isinstance(store, LayerCache)
        for codes in (store.key_codes, store.value_codes):
            codes.random_(-(2**31), 2**31 - 1)
        for scale in (store.key_scale, store.value_scale):
            scale.fill_(0.5)
        for window in (store.window_key, store.window_value, store.key_page_mean):
            window.normal_()
        store.lengths.fill_(length)
        store.history_pages.fill_(store.config.history_pages(length))
    ledger = cache.layers[0].ledger
    ledger.device_columns.fill_(length)
    ledger.refresh()
    return cache


def hadamard_rotations(config: Qwen3Config) -> RotationSet:
    """Hadamard matrices for every layer: speed does not depend on the rotation."""
    geometry = cache_config(config)
    size = geometry.head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    transform = np.trunc(matrix * (1 << fmt.TRANSFORM_BITS) / np.sqrt(size)).astype(np.int16)[None]
    inverse = np.linalg.inv(transform.astype(np.float64) / (1 << fmt.TRANSFORM_BITS))
    base = identity_rotation(1, size)
    layer = LayerRotation(
        key_transform=torch.from_numpy(transform),
        query_transform=torch.from_numpy(inverse.swapaxes(1, 2).astype(np.float32)),
        value_transform=torch.from_numpy(transform),
        output_transform=torch.from_numpy(inverse.astype(np.float32)),
        value_mean=base.value_mean,
        key_mean=base.key_mean,
        key_multiplier=base.key_multiplier,
        value_multiplier=base.value_multiplier,
    )
    header = RotationHeader(
        model_id="", layers=tuple(range(config.num_hidden_layers)),
        num_query_heads=geometry.num_query_heads, num_key_value_heads=geometry.num_key_value_heads,
        head_dim=size, rope="half", basis="hadamard", basis_version="1",
    )  # fmt: skip
    return RotationSet(header, dict.fromkeys(header.layers, layer))


class InPlaceLayer(DynamicLayer):
    """BF16 rows written in place and read without padding: the best that transformers' sdpa can have."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.length = rows, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            torch.empty((batch, heads, self.rows, head_dim), dtype=self.dtype, device=self.device)
            for _ in range(2)
        )
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0


def flash_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """The newest token over all rows, no mask: the vendor's kernels, with grouped heads as they are."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=options["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


# transformers' "sdpa" makes a mask while a CUDA graph is captured, and repeats the key heads under a mask.
AttentionInterface.register("bench_rows", flash_attention)


def fewer_layers(config: Qwen3Config, layers: int) -> Qwen3Config:
    """The same shape with fewer layers."""
    values = config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    return Qwen3Config(**values)


def with_cache(model: Any, cache: Cache) -> dict[str, Cache]:
    """The keyword that takes the cache, which newer transformers versions renamed."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
