"""A tiny random checkpoint on disk, tokenizer included, for the tests of the command line and its parts."""

import json
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def write_tiny_model(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Writes config.json, model.safetensors and a byte tokenizer; `changes` override the config."""
    from safetensors.numpy import save_file

    config = CONFIG | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(seed)
    hidden, width = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * width, config["num_key_value_heads"] * width

    def random(*shape: int, spread: float | None = None) -> np.ndarray:
        scale = shape[-1] ** -0.5 if spread is None else spread
        return (scale * generator.standard_normal(shape)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": random(config["vocab_size"], hidden, spread=1.0)}
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        tensors |= {
            f"{name}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}self_attn.q_proj.weight": random(query, hidden),
            f"{name}self_attn.k_proj.weight": random(key, hidden),
            f"{name}self_attn.v_proj.weight": random(key, hidden),
            f"{name}self_attn.o_proj.weight": random(hidden, query),
            # Uneven norms make outlier channels, as in real keys.
            f"{name}self_attn.q_norm.weight": 1 + random(width, spread=0.5) ** 2,
            f"{name}self_attn.k_norm.weight": 1 + 2 * random(width, spread=1.0) ** 2,
            f"{name}mlp.gate_proj.weight": random(config["intermediate_size"], hidden),
            f"{name}mlp.up_proj.weight": random(config["intermediate_size"], hidden),
            f"{name}mlp.down_proj.weight": random(hidden, config["intermediate_size"]),
        }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(directory)
    return directory


def write_byte_tokenizer(directory: Path) -> None:
    """A tokenizer whose tokens are the 256 bytes, 256 for <bos> and 257 for <eos>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    vocabulary |= {"<bos>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(
        directory
    )
