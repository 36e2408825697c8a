"""Every family against transformers on a tiny random checkpoint: logits, calibration, generation, GGUF.

A family's test is one entry of TINY. `FAMILIES` of test_models.py (the first four) face more tests. What a
run finds is recorded by families_run.py; the tables of README and docs/models.md are made from it.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.calibration.job import fit
from oscar_jax.calibration.statistics import gather_statistics
from oscar_jax.core.config import CalibrationConfig
from oscar_jax.generate import generate
from oscar_jax.models.family import Family, all_families
from oscar_jax.models.tensors import stack_experts
from oscar_jax.models.weights import build_model, open_checkpoint

from . import families_run
from .test_models import FAMILIES, LLAMA3_SCALING, LOGIT_TOLERANCE

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("fast_compilation")]

VOCABULARY = 96
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
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
_HYBRID = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
TINY: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_theta": 1e6},
    "qwen3": {"head_dim": 32, "rope_theta": 1e6},
    "llama": {"head_dim": 16, "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
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
    "smollm3": {"no_rope_layer_interval": 2},
    "qwen3_next": {
        **_EXPERTS,
        **_HYBRID,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "full_attention"],
    },
    "qwen3_5_text": {
        **_HYBRID,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    },
    "qwen3_5_moe_text": {
        **_EXPERTS,
        **_HYBRID,
        "shared_expert_intermediate_size": 48,
        "layer_types": ["full_attention", "linear_attention"],
    },
    # caps small enough to bend what random weights give
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": True,
    },
}


def random_reference(family: str, **changes: Any) -> Any:
    """A tiny transformers model in float32 whose every weight, biases and norms included, is random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_TINY, **TINY[family], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or tensor.ndim == 0:  # embed_scale follows from the width
                continue
            center = 1.0 if "norm" in name else 0.0
            spread = 0.3 if tensor.ndim == 1 else 0.6 / tensor.shape[-1] ** 0.5
            tensor.copy_(center + spread * torch.randn_like(tensor))
        model.get_input_embeddings().weight.mul_(8)
    return model


def test_every_family_has_an_entry() -> None:
    assert sorted(TINY) == sorted(all_families()) and set(FAMILIES) < set(TINY)


def test_every_family_states_its_gguf_architecture() -> None:
    """One that llama.cpp has, and then its names are tested below; or none, said in its file."""
    import gguf

    for family in all_families().values():
        assert set(family.gguf_architectures) <= set(gguf.MODEL_ARCH_NAMES.values())
        tested = family.name in GGUF_KEYS or family.name in FAMILIES
        assert tested == bool(family.gguf_architectures), family.name
    with pytest.raises(TypeError, match="gguf_architectures"):
        Family("new", ("new",), {})  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("family", list(TINY))
def test_family(family: str, tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    """Logits near and far (rope, windows), calibration, and a generation whose history lies in INT2 pages."""
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
    errors = []
    for places in (positions, apart):
        with torch.no_grad():
            theirs = reference(
                torch.from_numpy(tokens),
                position_ids=torch.from_numpy(places),
                attention_mask=torch.ones(2, 24, dtype=torch.long),
                use_cache=False,
            ).logits.numpy()
        ours = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(places)))
        errors.append(float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    record_property("logits", max(errors))
    assert max(errors) <= LOGIT_TOLERANCE
    shifted = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(apart * 2)))
    assert np.abs(shifted - theirs).max() / np.abs(theirs).max() > 100 * LOGIT_TOLERANCE  # it can fail

    prompt = np.random.default_rng(2).integers(0, VOCABULARY, 450).tolist()
    statistics = gather_statistics(
        model,
        config,
        config.attention_layers,
        [np.asarray(prompt[:256], np.int32)] * 2,
        chunk=256,
        save_every=8,
        state_path=None,
        run_digest=family,
    )
    settings = CalibrationConfig(basis="channel_balanced")
    rotations = fit(statistics, settings=settings, model_id=family, num_query_heads=4).layers
    assert sorted(rotations) == sorted(config.attention_layers)
    for rotation in rotations.values():  # fitted: a plain Hadamard matrix has one magnitude
        assert len(np.unique(np.abs(np.asarray(rotation.key_transform)))) > 1
    record_property("calibrates", True)
    made = generate(model, config, [prompt], 4, rotations=rotations, eos_token_ids=())
    assert len(made.tokens[0]) == 4
    with torch.no_grad():
        first = int(reference(torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())
    # One chunk is attended to exactly, in BF16: the first token is the reference's.
    assert made.tokens[0][0] == first
    windows = config.layer_windows
    assert (made.statistics.cache_bytes["int2_pages"] > 0) == (None in windows)
    record_property("generates", True)


_GGUF_LINEAR = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 4 * 24,
    "full_attention_interval": 2,
}
_GGUF_EXPERTS = {
    "expert_count": 8,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 48,
}
GGUF_KEYS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
    "qwen2_moe": _GGUF_EXPERTS,
    "phi3": {},
    "olmo2": {},
    "granite": {
        "attention.scale": 0.6,
        "embedding_scale": 3.0,
        "residual_scale": 0.5,
        "logit_scale": 2.0,
    },
    "glm4": {"rope.dimension_count": 16},
    "smollm3": {"rope.freq_base": 2e6},
    "glm4_moe": {
        "rope.dimension_count": 16,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "leading_dense_block_count": 1,
        "nextn_predict_layers": 1,
    },
    "gpt_oss": {
        "rope.freq_base": 150_000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 64,
        "attention.sliding_window": 8,
    },
    "gemma2": {
        "attention.sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 12.0,
    },
    "qwen3_next": {**_GGUF_LINEAR, **_GGUF_EXPERTS, "rope.dimension_count": 8},
    "qwen3_5_text": {
        **_GGUF_LINEAR,
        "rope.dimension_count": 16,
        "ssm.group_count": 2,
        "nextn_predict_layers": 1,
    },
    "qwen3_5_moe_text": {**_GGUF_LINEAR, **_GGUF_EXPERTS, "rope.dimension_count": 8},
}
# Settings that GGUF cannot hold, or that llama.cpp computes in one way only.
GGUF_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": []},
    "qwen2_moe": {"decoder_sparse_step": 1},
    "phi3": {"rope_scaling": None, "sliding_window": None},
    "olmo2": {"rope_scaling": None},
    "gemma2": {"query_pre_attn_scalar": 32},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layer_interval": 4},
    "qwen3_next": {"mlp_only_layers": []},
    "qwen3_5_text": {"linear_num_key_heads": 2},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_oss": {
        "intermediate_size": 64,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    },
}


def stored_linear(name: str, array: np.ndarray, config: Any, tiled: bool) -> dict[str, np.ndarray]:
    """A linear layer's tensor as llama.cpp's converter writes it, by the name it looks up.

    `tiled`: value heads in the order first of every key head, second of every key head, ...
    """
    linear = config.linear
    if name.endswith("in_proj_qkvz.weight"):  # by key head: query, key, values, gates
        parts = array.reshape(linear.key_heads, -1, array.shape[-1])
        width = linear.value_heads // linear.key_heads * linear.value_dim
        ends = np.cumsum([linear.key_dim, linear.key_dim, width])
        *mixed, gates = (part.reshape(-1, array.shape[-1]) for part in np.split(parts, ends, axis=1))
        stem = name.removesuffix("qkvz.weight")
        return {f"{stem}qkv.weight": np.concatenate(mixed), f"{stem}z.weight": gates}

    def reordered(array: np.ndarray, width: int) -> np.ndarray:
        return (
            array.reshape(linear.key_heads, -1, width, *array.shape[1:]).swapaxes(0, 1).reshape(array.shape)
        )

    if name.endswith("conv1d.weight"):
        array = array[:, 0]
    if tiled:
        keys = 2 * linear.key_heads * linear.key_dim
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            array = np.concatenate([array[:keys], reordered(array[keys:], linear.value_dim)])
        elif name.endswith("in_proj_z.weight"):
            array = reordered(array, linear.value_dim)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            array = reordered(array, 1)
        elif name.endswith("out_proj.weight"):
            array = reordered(array.T, linear.value_dim).T
    if name.endswith("A_log"):
        array = -np.exp(array)
    return {name.replace("dt_bias", "dt_proj.bias"): array}


MXFP4 = "gpt_oss"  # the family whose experts are published in this code


@pytest.mark.parametrize("family", list(GGUF_KEYS))
def test_gguf_names_are_those_of_llama_cpp(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The tiny checkpoint as llama.cpp's converter would write it, names from its own table.

    Behind the last layer stands a block that only guesses further tokens, where the architecture has one.
    """
    import gguf

    monkeypatch.setitem(TINY, family, {**TINY[family], **GGUF_CHANGES.get(family, {})})
    random_reference(family).save_pretrained(tmp_path)
    config, source = open_checkpoint(tmp_path)
    known = all_families()[family]
    architecture = known.gguf_architectures[0]
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", architecture)
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    guessing = GGUF_KEYS[family].get("nextn_predict_layers", 0)
    writer.add_block_count(config.num_layers + guessing)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_query_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    keys = {"rope.freq_base": 1e4, **GGUF_KEYS[family]}
    for key, value in keys.items():
        kind = {float: "float32", int: "uint32", bool: "bool", str: "string"}[type(value)]
        getattr(writer, f"add_{kind}")(f"{architecture}.{key}", value)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    rounded: dict[str, np.ndarray] = {}  # weights that the file holds in a code
    stacked = known.adapt(source, config) if family == MXFP4 else stack_experts(source)
    tensors: dict[str, np.ndarray] = {}
    for name in stacked.shapes:
        array = np.asarray(stacked.load(name), np.float32)
        if ".linear_attn." in name:
            tensors |= stored_linear(name, array, config, tiled=family.startswith("qwen3_5"))
        elif name.endswith("shared_expert_gate.weight") and config.linear:
            tensors[name] = array[0]
        else:
            tensors[name] = array
    for name, array in tensors.items():
        # Parameters without a module of their own get a suffix of their own, as in the converter, or none.
        stem, _, suffix = name.replace("_correction_bias", "_correction.bias").rpartition(".")
        if suffix == "sinks":
            stem, suffix = name, "weight"
        if suffix == "A_log":
            stem, suffix = name, ""
        if config.norm_plus_one and stem.endswith("norm") and not stem.endswith("linear_attn.norm"):
            array = array + 1.0  # as the converter stores them
        if known.gguf_interleaves_rope and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_query_heads if stem.endswith("q_proj") else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        target, array = f"{names.get_name(stem)}.{suffix}".rstrip("."), np.ascontiguousarray(array)
        if family == MXFP4 and "_exps.weight" in target:
            code = gguf.GGMLQuantizationType.MXFP4
            blocks = gguf.quants.quantize(array, code)
            rounded[name] = gguf.quants.dequantize(blocks, code)
            writer.add_tensor(target, blocks, raw_dtype=code)
            continue
        writer.add_tensor(target, array)
    if guessing:
        width = (config.hidden_size, 2 * config.hidden_size)
        writer.add_tensor(f"blk.{config.num_layers}.nextn.eh_proj.weight", np.zeros(width, np.float32))
        writer.add_tensor(f"blk.{config.num_layers}.attn_norm.weight", np.zeros(width[:1], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if rounded:
        assert sorted(rounded) == sorted(
            name for name in stacked.shapes if re.search("experts.*weight", name)
        )
        source = dataclasses.replace(stacked, load=lambda name: rounded.get(name, stacked.load(name)))
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, VOCABULARY, (1, 24)))
    logits = [
        np.asarray(build_model(*opened, dtype=jnp.float32, param_dtype=jnp.float32)(tokens)[0])
        for opened in ((config, source), open_checkpoint(tmp_path / "tiny.gguf"))
    ]
    assert np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max() <= 2e-5


def test_the_recorded_run_is_of_these_families() -> None:
    """README and docs/models.md show every family, what it answers to, and the installed transformers."""
    import transformers

    record = families_run.newest_record()
    again = "run python -m parity_tests.models.families_run --out results"
    assert record["versions"]["transformers"] == transformers.__version__, again
    found = {row["family"]: row for row in record["rows"]}
    assert sorted(found) == sorted(all_families()), again
    for name, family in all_families().items():
        row = found[name]
        assert families_run.description_of(family).items() <= row.items(), again
        assert row["logits"] <= LOGIT_TOLERANCE and row["calibrates"] and row["generates"], name
        assert row["gguf"] == bool(family.gguf_architectures), name
