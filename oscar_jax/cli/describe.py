"""What a checkpoint and the page format are, as lines for a terminal."""

from collections.abc import Mapping
from typing import Any

from ..core import cache_format as fmt


def describe_model(name: str) -> str:
    """Geometry of a checkpoint, and what a token costs in its cache."""
    from ..models.cached_attention import int2_layers
    from ..models.weights import open_checkpoint, resolve_model_path

    config, source = open_checkpoint(resolve_model_path(name))
    paged = int2_layers(config)
    dense = 4 * config.num_key_value_heads * config.head_dim
    packed = config.num_key_value_heads * fmt.int2_page_bytes(config.head_dim) / fmt.PAGE_TOKENS
    return _aligned(
        {
            "model": config.model_id,
            "family": config.family,
            "tensors": len(source.shapes),
            "layers": config.num_layers,
            "hidden size": config.hidden_size,
            "vocabulary": config.vocab_size,
            "query heads": config.num_query_heads,
            "key/value heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "positions": config.max_positions,
            "rope": config.rope,
            "INT2 layers": f"{len(paged)}: {', '.join(map(str, paged))}" if paged else "none by default",
            "bytes per token": f"{packed:g} in INT2 pages, {dense} in BF16, per layer",
        }
    )


def describe_format() -> str:
    """The INT2 page format: shapes, dtypes and bytes."""
    rows: dict[str, Any] = {
        "format": fmt.format_id(),
        "page": f"{fmt.PAGE_TOKENS} tokens of one sequence and one key/value head",
        "windows": f"{fmt.SINK_TOKENS} sink and {fmt.RECENT_TOKENS} recent tokens in BF16",
        "bits": f"{fmt.CODE_BITS} per code, {fmt.CODES_PER_WORD} codes per int32 word",
    }
    shapes = fmt.int2_array_shapes(1, 1, 128)
    rows |= {name: f"{dtype} {shapes[name]} at D = 128" for name, dtype in fmt.INT2_ARRAYS.items()}
    for head_dim in (64, 128, 256):
        size = fmt.int2_page_bytes(head_dim)
        bits = 8 * size / (2 * fmt.PAGE_TOKENS * head_dim)
        rows[f"bytes, D = {head_dim}"] = f"{size} per page, {bits:g} bits per element"
    return _aligned(rows)


def _aligned(rows: Mapping[str, Any]) -> str:
    return "\n".join(f"{name:>20}: {value}" for name, value in rows.items())
