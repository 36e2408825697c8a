"""What the attention benchmarks of both packages measure, so that their tables can be laid side by side."""

SHAPES = {  # one layer of a model: key/value heads, query heads, head_dim
    "qwen3-8b": (8, 32, 128),
    "qwen3-32b": (8, 64, 128),
    "llama3-8b": (8, 32, 128),
    "gemma3-4b": (4, 8, 256),
    "qwen2.5-0.5b": (2, 14, 64),
}
BATCHES = (1, 8, 32)
LENGTHS = (4096, 32_768, 102_400)
QUICK = (  # (shape, batch, length), the most telling first
    ("qwen3-8b", 8, 102_400),
    ("qwen3-8b", 1, 102_400),
    ("qwen3-8b", 32, 32_768),
    ("qwen3-32b", 8, 32_768),
    ("gemma3-4b", 8, 32_768),
    ("qwen2.5-0.5b", 8, 32_768),
)
LAYERS = 8  # that run one after the other, as in a decoder: they share what a graph or a loop costs by itself
