"""What configurations mean, over all families: transformers' defaults, and no key silently dropped."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.family import all_families
from oscar_jax.models.gguf_config import config_from_gguf
from oscar_jax.models.hf_config import config_from_hf
from oscar_jax.models.rope import apply_rope
from oscar_jax.models.tokenizer import byte_level_tokenizer, leading_bos
from oscar_jax.models.weights import open_checkpoint

from .tiny_model import write_tiny_model

pytestmark = pytest.mark.hf

MODEL_TYPES = [name for family in all_families().values() for name in family.model_types]
# Fields of every transformers configuration that no decoder reads: training, tasks, how the library is run.
NO_ARITHMETIC = {
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "id2label",
    "chunk_size_feed_forward", "label2id", "problem_type", "initializer_range", "use_cache",
    "attention_dropout", "pad_token_id", "resid_pdrop", "embd_pdrop", "pretraining_tp",
    "router_aux_loss_coef", "output_router_logits",
}  # fmt: skip


# Keys that others switch on, and what does.
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SWITCHES: dict[str, dict[str, Any]] = {
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1},
    "max_window_layers": {"use_sliding_window": True},
    "use_sliding_window": {"sliding_window": 64, "max_window_layers": 1},
    "original_max_position_embeddings": {"rope_scaling": _LLAMA3},
}
OTHER = {"max_window_layers": 3}


def minimal(model_type: str) -> dict[str, Any]:
    """A config.json that leaves everything to defaults."""
    family = next(family for family in all_families().values() if model_type in family.model_types)
    if model_type == "glm4_moe":  # whose default head_dim of 42 no cache can hold
        return {"model_type": model_type, "head_dim": 128}
    text = {"model_type": f"{model_type}_text"}
    return {"model_type": model_type} | ({"text_config": text} if model_type != family.name else {})


def theirs_of(raw: dict[str, Any]) -> Any:
    """transformers' configuration of the decoder."""
    from transformers import AutoConfig

    raw = json.loads(json.dumps(raw))
    return AutoConfig.for_model(raw.pop("model_type"), **raw).get_text_config(decoder=True)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_missing_keys_mean_what_transformers_fills_in(model_type: str) -> None:
    """A configuration without keys equals the one transformers writes with all of them."""
    raw = minimal(model_type)
    theirs = theirs_of(raw)
    ours = config_from_hf(raw, model_id="x")
    complete = {key: value for key, value in theirs.to_dict().items() if key != "dtype"}
    assert config_from_hf(json.loads(json.dumps(complete)), model_id="x") == ours
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.num_query_heads) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    kinds = getattr(theirs, "layer_types", None)
    if kinds is not None:
        windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        assert list(ours.layer_windows) == windows


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_field_of_transformers_is_used_or_refused(model_type: str) -> None:
    """Each field of transformers' class, given another value, changes our configuration or is refused."""
    raw = minimal(model_type)
    theirs = theirs_of(raw)
    raw = {**raw, "model_type": theirs.model_type}
    if raw.pop("text_config", None) is not None:
        raw = {"model_type": theirs.model_type}
    ours = config_from_hf(raw, model_id="x")
    ignored = []
    for field in dataclasses.fields(theirs):
        # (a conditional key counts as used: it is switched on by the key it belongs to)
        if field.name in NO_ARITHMETIC | {"model_type"}:
            continue
        value = OTHER.get(field.name, another(getattr(theirs, field.name, None)))
        switches = SWITCHES.get(field.name, {})
        base = ours
        try:
            if switches:
                known = {key: switch for key, switch in switches.items() if hasattr(theirs, key)}
                known |= {key: switch for key, switch in switches.items() if key == "rope_scaling"}
                base = config_from_hf({**raw, **known}, model_id="x")
                changed = config_from_hf({**raw, **known, field.name: value}, model_id="x")
            else:
                changed = config_from_hf({**raw, field.name: value}, model_id="x")
        except ConfigError:
            continue
        if changed == base:
            ignored.append(f"{field.name} = {value!r}")
    allowed = {f"{key} = " for key in all_families()[ours.family].without_effect}
    assert [line for line in ignored if not line.startswith(tuple(allowed) or "\0")] == []


def another(value: Any) -> Any:
    """A value of the same kind that means something else."""
    match value:
        case bool():
            return not value
        case int():
            return value * 2 + 2
        case float():
            return value * 2 + 1
        case str():
            return "gelu_pytorch_tanh" if value == "silu" else "silu"
        case list():
            return value[::-1] if value and value != value[::-1] else [*value, 1]
        case dict():
            return {"rope_type": "linear", "factor": 3.0, "rope_theta": 77.0}
    return 3


def test_keys_beside_the_decoders_are_refused_too() -> None:
    raw = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "novel_key": 1}
    with pytest.raises(ConfigError, match=r"novel_key = 1 of config\.json: unknown key"):
        config_from_hf(raw, model_id="x")
    raw = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ConfigError, match="weights quantized by 'bitsandbytes'"):
        config_from_hf(raw, model_id="x")


@pytest.mark.parametrize(
    ("generation", "ends"),
    [
        ({"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": 7}, (7,)),
        ({"temperature": 0.7, "repetition_penalty": 1.05}, (2,)),
        ({"eos_token_id": None}, (2,)),
    ],
)
def test_end_tokens_of_the_generation_config_win(generation: dict[str, Any], ends: tuple[int, ...]) -> None:
    assert config_from_hf({"model_type": "llama"}, model_id="x", generation=generation).eos_token_ids == ends


@pytest.mark.parametrize("key", ["suppress_tokens", "forced_eos_token_id", "a_new_rule"])
def test_generation_keys_that_forbid_tokens_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = 5 of generation_config.json"):
        config_from_hf({"model_type": "llama"}, model_id="x", generation={key: 5})


@pytest.mark.parametrize(
    "added",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "attention_factor": 1.5},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
            "original_max_position_embeddings": 300,
        },
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda added: added.get("rope_type", "dynamic"),
)
@pytest.mark.parametrize("beside", [{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}])
def test_rope_scaling_means_what_it_does_in_transformers(
    added: dict[str, Any], beside: dict[str, Any]
) -> None:
    """Frequencies and attention factor, below and above the trained length; rope_scaling wins (f09)."""
    import torch
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4,
        "max_position_embeddings": 512, "rope_scaling": added, **beside,
    }  # fmt: skip
    rope = config_from_hf(raw, model_id="x").rope
    theirs = theirs_of(raw)
    for last in (40, 3000):
        rotary = LlamaRotaryEmbedding(theirs)
        positions = np.array([[0, 1, last]])
        cos, _ = rotary(torch.zeros(1), torch.from_numpy(positions))
        ours = np.asarray(rope.frequencies_at(16, jnp.asarray(positions)))
        np.testing.assert_allclose(ours, rotary.inv_freq.numpy(), rtol=2e-6)
        assert float(cos[0, 0, 0]) == pytest.approx(rope.attention_factor, rel=1e-6)  # cos 0 times the factor


_HALF = {"partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(4)],
            "long_factor": [2.0 + i for i in range(4)],
            "original_max_position_embeddings": 300,
        },
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_every_kind_of_rope_turns_part_of_a_head(scaling: dict[str, Any]) -> None:
    """Rows turned as transformers turns them, half of the channels, below and above the trained length."""
    import torch
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding, apply_rotary_pos_emb

    raw = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": 1e4, **scaling, **_HALF},
    }  # fmt: skip
    rope, theirs = config_from_hf(raw, model_id="x").rope, theirs_of(raw)
    rows = np.random.default_rng(0).standard_normal((1, 3, 4, 16)).astype(np.float32)
    for last in (40, 3000):
        positions = np.array([[0, 7, last]])
        cos, sin = Phi3RotaryEmbedding(theirs)(torch.from_numpy(rows), torch.from_numpy(positions))
        both = torch.from_numpy(rows)
        turned, _ = apply_rotary_pos_emb(both, both, cos, sin, unsqueeze_dim=2)
        ours = np.asarray(apply_rope(jnp.asarray(rows), jnp.asarray(positions), rope))
        # An angle of 3000 radians in float32 is off by 1e-4.
        np.testing.assert_allclose(ours, turned.numpy(), atol=1e-3 if last == 3000 else 2e-5)
        np.testing.assert_array_equal(ours[..., 8:], rows[..., 8:])


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.context_length": 16384,
    "llama.rope.freq_base": 10000.0,
}


def from_gguf(**more: Any) -> ModelConfig:
    metadata = GGUF | {f"llama.{key.replace('__', '.')}": value for key, value in more.items()}
    return config_from_gguf(metadata, {"token_embd.weight": (97, 64)}, rope_divisors=None, model_id="tiny")


@pytest.mark.parametrize(
    ("more", "divisors"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, (4.0,) * 8),
        ({"rope__scaling__factor": 4.0}, (4.0,) * 8),
        ({"rope__scale_linear": 4.0}, (4.0,) * 8),
        ({"rope__scaling__factor": 2.0, "rope__scale_linear": 4.0}, (2.0,) * 8),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({}, None),
    ],
)
def test_gguf_rope_scaling_is_read_as_llama_cpp_does(more: dict[str, Any], divisors: Any) -> None:
    """A missing type is linear; the older key of the factor counts if the newer is missing (f08)."""
    assert from_gguf(**more).rope.divisors == divisors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rope__scaling__type": "longrope"}, "rope.scaling.type = 'longrope'"),
        ({"attention__causal": False}, "llama.attention.causal = False"),
        ({"attention__scale": 0.5}, "llama.attention.scale = 0.5"),
        ({"logit_scale": 0.25}, "llama.logit_scale = 0.25"),
        ({"expert_count": 8}, "llama.expert_count = 8"),
        ({"attention__sliding_window": 512}, "llama.attention.sliding_window = 512"),
        ({"attention__of_tomorrow": 1}, "llama.attention.of_tomorrow = 1: unknown key"),
        ({"attention__head_count_kv": [2, 4]}, r"attention.head_count_kv differs by layer: \[2, 4\]"),
        ({"attention__value_length": 32}, "key and value head_dim differ: 16 and 32"),
    ],
)
def test_gguf_keys_are_used_or_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        from_gguf(**more)
    assert "\n" not in str(caught.value)


def test_a_tied_configuration_with_its_own_projection(tmp_path: Path) -> None:
    """transformers does not tie when the file holds another projection, and takes the only one there is."""
    from safetensors.numpy import load_file, save_file

    directory = write_tiny_model(tmp_path / "model")
    stored = load_file(directory / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    for head, tied in ((embedding, True), (embedding + 1, False)):
        save_file(stored | {"lm_head.weight": head}, directory / "model.safetensors")
        assert open_checkpoint(directory)[0].tie_embeddings is tied
    del stored["model.embed_tokens.weight"]
    save_file(stored | {"lm_head.weight": embedding}, directory / "model.safetensors")
    config, source = open_checkpoint(directory)
    assert config.tie_embeddings
    np.testing.assert_array_equal(source.load("model.embed_tokens.weight"), embedding)


# --- tokenizers ---


def vocabulary() -> dict[str, Any]:
    """GGUF metadata of a byte-level vocabulary without merges, <bos> last."""
    from tokenizers import pre_tokenizers

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "<bos>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": ["1 2"],
        "tokenizer.ggml.bos_token_id": 257,
    }


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["12", "3"]),
        ("qwen2", ["1", "2", "3"]),
        ("qwen35", ["1", "2", "3"]),
        ("gpt-4o", ["12", "3"]),
        ("smollm", ["1", "2", "3"]),
        ("gpt-2", ["12", "3"]),
    ],
)
def test_the_files_rule_cuts_numbers(pre: str, pieces: list[str]) -> None:
    """A file of the llama architecture may cut as another model does (f18)."""
    tokenizer = byte_level_tokenizer(vocabulary() | {"tokenizer.ggml.pre": pre})
    assert tokenizer.tokenize("123") == pieces
    assert tokenizer.decode(tokenizer.encode("né 12<bos>3", add_special_tokens=False)) == "né 12<bos>3"


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen2", "vie\u0302n", ["vie", "\u0302n"]),
        ("qwen35", "vie\u0302n 12", ["vie\u0302n", " ", "1", "2"]),
        ("dbrx", "HelloWorld's 1234", ["HelloWorld", "'s", " ", "123", "4"]),
        ("gpt-4o", "HelloWorld's 1234 a/\n/b", ["Hello", "World's", " ", "123", "4", " a", "/\n/", "b"]),
    ],
)
def test_the_files_rule_cuts_words(pre: str, text: str, words: list[str]) -> None:
    """Marks belong to words or not, capitals begin one or not: as in the published tokenizers."""
    tokenizer = byte_level_tokenizer(vocabulary() | {"tokenizer.ggml.pre": pre})
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[first:last] for _, (first, last) in cut] == words


@pytest.mark.parametrize("pre", ["gpt-5", None])
def test_unknown_rules_are_refused(pre: str | None) -> None:
    with pytest.raises(
        CheckpointError, match=f"tokenizer.ggml.pre = {pre!r} is not supported, allowed: llama"
    ):
        byte_level_tokenizer(vocabulary() | {"tokenizer.ggml.pre": pre})


@pytest.mark.parametrize(
    ("more", "bos"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, 257),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, None),
        ({"tokenizer.ggml.pre": "qwen2"}, None),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, 257),
    ],
)
def test_the_tokenizer_decides_what_stands_before_a_text(more: dict[str, Any], bos: int | None) -> None:
    """A token that the configuration names but the tokenizer does not add is not added (f11)."""
    assert leading_bos(byte_level_tokenizer(vocabulary() | more)) == bos
