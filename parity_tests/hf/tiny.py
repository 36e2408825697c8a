"""Tiny random models, rotations that need no fit, and dense oracles: what the tests of this folder share."""

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core import cache_format as fmt  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.rotation_header import RotationHeader  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
from oscar_torch.hf import layer as hf_layer  # noqa: E402
from oscar_torch.hf import model_check  # noqa: E402
from oscar_torch.layer_cache import LayerCache  # noqa: E402
from oscar_torch.rotations.rotation import LayerRotation, RotationSet, identity_rotation  # noqa: E402

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {}),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {"head_dim": 32}),
    "gemma3": (
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 16, **SLIDING},
    ),
    "gemma2": (  # a cap small enough to bend what random weights give
        tf.Gemma2Config,
        tf.Gemma2ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5, **SLIDING},
    ),
    "gpt_oss": (
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING},
    ),
}
# Logits are of order 1 to 10; a row that rounds to the neighbouring bf16 number moves them by less than this.
TOLERANCE = {"atol": 2e-3, "rtol": 1e-3}
MODELS = ("llama", "qwen2", "qwen3", "gemma3")


def make_model(family, attention="oscar", **changes):
    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(1)
    model = model_class(config_class(**{**SMALL, **options, **changes})).eval()
    if family == "gpt_oss":  # sinks start at zero, which would hide their absence from every other layer
        for layer in model.model.layers:
            torch.nn.init.uniform_(layer.self_attn.sinks, 2.0, 6.0)
    if family in ("gemma2", "gemma3"):
        # with norms at their initial zero every position predicts the same token
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.set_attn_implementation(attention)
    return model


def hadamard_layer(head_dim, heads=1):
    """A per-head rotation that needs no fit: Hadamard, with other signs for every head; exact in int16."""
    matrix = np.ones((1, 1))
    while len(matrix) < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    generator = np.random.default_rng(head_dim)
    signs = np.where(generator.random((heads, head_dim)) < 0.5, -1.0, 1.0)
    rows = np.trunc(matrix * (1 << fmt.TRANSFORM_BITS) / np.sqrt(head_dim))  # column norms at most 1
    transform = (signs[:, :, None] * rows).astype(np.int16)
    exact = transform.astype(np.float64) / (1 << fmt.TRANSFORM_BITS)
    inverse = np.linalg.inv(exact)
    base = identity_rotation(heads, head_dim)
    return LayerRotation(
        key_transform=torch.from_numpy(transform),
        query_transform=torch.from_numpy(inverse.swapaxes(1, 2).astype(np.float32)),
        value_transform=torch.from_numpy(transform),
        output_transform=torch.from_numpy(inverse.astype(np.float32)),
        value_mean=base.value_mean,
        key_mean=base.key_mean,
        key_multiplier=base.key_multiplier,
        value_multiplier=base.value_multiplier,
    )


def make_rotations(config, *, model_id="tiny", layers=None, **changes):
    geometry = model_check.cache_config(config)
    layers = range(config.num_hidden_layers) if layers is None else layers
    fields = {
        "model_id": model_id,
        "layers": tuple(layers),
        "num_query_heads": geometry.num_query_heads,
        "num_key_value_heads": geometry.num_key_value_heads,
        "head_dim": geometry.head_dim,
        "rope": "half",
        "basis": "hadamard",
        "basis_version": "1",
    } | changes
    heads, head_dim = fields["num_key_value_heads"], fields["head_dim"]
    return RotationSet(
        RotationHeader(**fields), {i: hadamard_layer(head_dim, heads) for i in fields["layers"]}
    )


def make_cache(model, **options):
    return hf_cache.OscarCache(make_rotations(model.config), model.config, **options)


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (1, n), generator=generator) for n in lengths]


def left_padded(rows):
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, width - row.shape[1] :] = row[0]
        mask[b, width - row.shape[1] :] = 1
    return ids, mask


def with_cache(model, cache):
    """The keyword that takes the cache, which newer transformers versions renamed."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def generate(model, ids, cache, new=8, **options):
    options = {"do_sample": False, "max_new_tokens": new, "output_logits": True, **options}
    return model.generate(ids, return_dict_in_generate=True, **with_cache(model, cache), **options)


class RoundingCache(tf.DynamicCache):
    """The dense oracle: stored rows are bf16 numbers; a prompt sees its own rows as they are."""

    def update(self, key, value, layer_idx, *args, **kwargs):
        full = super().update(key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), layer_idx)
        count = key.shape[2]
        if count == 1:
            return full
        return tuple(torch.cat([a[:, :, :-count], new], 2) for a, new in zip(full, (key, value)))


def stored(layer, sequence):
    """Every byte a sequence owns, physical page numbers aside: comparable between caches."""
    store, length = layer.store, layer.lengths[sequence]
    assert int(store.lengths[sequence]) == length
    if not isinstance(store, LayerCache):
        slots = store.key.shape[1]
        tokens = torch.arange(max(0, length - (layer.sliding_window or slots)), length)
        return [store.key[sequence, tokens % slots], store.value[sequence, tokens % slots]]
    pages = store.page_table[sequence, : int(store.history_pages[sequence])].tolist()
    assert 0 not in pages
    arrays = [getattr(store, name)[pages] for name in fmt.INT2_ARRAYS]
    config = layer.config
    tokens = torch.arange(length)
    page = tokens // 64
    history = len(pages)
    bf16 = (page < config.sink_pages) | (page >= config.sink_pages + history)
    page, row = page[bf16], tokens[bf16] % 64
    ring = config.sink_pages + (page - config.sink_pages) % config.recent_slots
    slot = torch.where(page < config.sink_pages, page, ring)
    physical = store.window_table[sequence, slot]
    assert (physical > 0).all()
    return [*arrays, store.window_key[physical, :, row], store.window_value[physical, :, row]]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


# One layer, fed with rows.

GEOMETRY = CacheConfig(num_key_value_heads=2, num_query_heads=4, head_dim=16)


def make_layer(window=None, **options) -> Any:
    rotation = None if window else hadamard_layer(16, 2)
    return hf_layer.OscarLayer(0, GEOMETRY, rotation, sliding_window=window, **options)


def feed(layer, rows, real=None):
    """Appends rows float32 [B, T, 16 channels] as queries, keys and values of every head."""
    query = rows[:, :, None].expand(-1, -1, 4, -1)
    key = rows[:, :, None].expand(-1, -1, 2, -1)
    return layer.attend(query, key, -key, real, softmax_scale=0.25)


def random_rows(batch, tokens, seed=0):
    return torch.randn(batch, tokens, 16, generator=torch.Generator().manual_seed(seed))
