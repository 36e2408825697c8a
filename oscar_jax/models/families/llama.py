"""Llama 1 to 3.x, SmolLM 1 and 2, and all that call themselves Llama: the plain decoder."""

from ..family import Family, Fields, Settings


def read_hf(settings: Settings, fields: Fields) -> Fields:
    """Biases of all four attention projections, and of the MLP, by one key each."""
    bias = settings.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": settings.flag("mlp_bias")}


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    gguf_architectures=("llama",),
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    read_hf=read_hf,
    gguf_interleaves_rope=True,
)
