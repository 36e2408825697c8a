"""Every family against transformers on a tiny random checkpoint: logits, then generation in INT2.

A family's test is one entry of TINY. `FAMILIES` of test_models.py (the first four) face more tests.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.generate import generate
from oscar_jax.models.family import all_families
from oscar_jax.models.weights import build_model, open_checkpoint
from oscar_jax.rotations.rotation import hadamard_rotation

from .test_models import FAMILIES, LOGIT_TOLERANCE

pytestmark = pytest.mark.hf

VOCABULARY = 96
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
TINY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8, "head_dim": 32},
    "qwen3_moe": {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "phi3": {"rope_scaling": _LONGROPE, "original_max_position_embeddings": 64, "sliding_window": 16},
    "olmo2": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "granite": {
        "attention_multiplier": 0.6,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "glm4": {"head_dim": 32},
    "glm4_moe": {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    },
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 8},
    "smollm3": {"num_hidden_layers": 5},
}


def random_reference(family: str) -> Any:
    """A tiny transformers model in float32 whose every weight, biases and norms included, is random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_TINY, **TINY[family]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            center = 1.0 if "norm" in name else 0.0
            spread = 0.3 if tensor.ndim == 1 else 0.6 / tensor.shape[-1] ** 0.5
            tensor.copy_(center + spread * torch.randn_like(tensor))
        model.get_input_embeddings().weight.mul_(8)
    return model


def test_every_family_has_an_entry() -> None:
    assert sorted([*TINY, *FAMILIES]) == sorted(all_families())


@pytest.mark.parametrize("family", list(TINY))
def test_family(family: str, tmp_path: Path) -> None:
    """Logits near and far (rope, windows), and a generation whose history lies in INT2 pages."""
    import torch

    reference = random_reference(family)
    reference.save_pretrained(tmp_path)
    config, source = open_checkpoint(tmp_path)
    assert config.family == family
    model = build_model(config, source, dtype=jnp.float32, param_dtype=jnp.float32)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 24))
    positions = np.tile(np.arange(24), (2, 1))
    apart = positions + np.where(np.arange(24) < 2, 0, 998)
    run = nnx.jit(lambda model, tokens, positions: model(tokens, positions=positions)[0])
    for places in (positions, apart):
        with torch.no_grad():
            theirs = reference(
                torch.from_numpy(tokens),
                position_ids=torch.from_numpy(places),
                attention_mask=torch.ones(2, 24, dtype=torch.long),
                use_cache=False,
            ).logits.numpy()
        ours = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(places)))
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() <= LOGIT_TOLERANCE
    shifted = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(apart * 2)))
    assert np.abs(shifted - theirs).max() / np.abs(theirs).max() > 100 * LOGIT_TOLERANCE  # it can fail

    rotation = hadamard_rotation(config.num_key_value_heads, config.head_dim)
    rotations = dict.fromkeys(range(config.num_layers), rotation)
    prompt = np.random.default_rng(2).integers(0, VOCABULARY, 450).tolist()
    made = generate(model, config, [prompt], 4, rotations=rotations, eos_token_ids=())
    assert len(made.tokens[0]) == 4
    with torch.no_grad():
        first = int(reference(torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())
    # One chunk is attended to exactly, in BF16: the first token is the reference's.
    assert made.tokens[0][0] == first
    windows = config.layer_windows
    assert (made.statistics.cache_bytes["int2_pages"] > 0) == (None in windows)
