"""The engine's blocks as INT2 pages, and the arena of BF16 rows beside them.

Block i of a sequence stands for its tokens 64 i .. 64 i + 63. The engine allocates it as INT2 bytes; those of
the sink and of the recent part stay unwritten, since their rows lie in the arena. History page n of a
sequence is the block numbered n + sink_pages. Within one layer's memory all pages of an array lie together,
as the kernels read them: codes of keys [P, K, 64, D/16], then those of values, the scales, the mean keys.
"""

import math

import torch
from torch import Tensor

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError, ShapeError

ARENA_SHARE = 0.5  # of the device's memory, at most


def token_bytes(head_dim: int) -> int:
    """Bytes of one token of one key/value head in a block: a whole number for every head_dim served."""
    whole, rest = divmod(fmt.int2_page_bytes(head_dim), fmt.PAGE_TOKENS)
    if rest:
        raise ConfigError(f"head_dim = {head_dim}: no whole bytes per token, allowed: multiples of 32")
    return whole


def block_bytes(heads: int, head_dim: int) -> int:
    """Bytes of one block of 64 tokens of one layer."""
    return heads * fmt.int2_page_bytes(head_dim)


def view_pages(blocks: Tensor, heads: int, head_dim: int) -> dict[str, Tensor]:
    """The INT2 arrays, by name, in one layer's memory uint8 [P, block bytes]; nothing is copied.

    Raises ShapeError for another shape.
    """
    size = block_bytes(heads, head_dim)
    if blocks.ndim != 2 or blocks.shape[1] != size or not blocks.is_contiguous():
        raise ShapeError(f"blocks {tuple(blocks.shape)}, expected [P, {size}], contiguous")
    flat, start, arrays = blocks.view(torch.uint8).view(-1), 0, {}
    for name, shape in fmt.int2_array_shapes(blocks.shape[0], heads, head_dim).items():
        dtype = getattr(torch, fmt.INT2_ARRAYS[name])
        stop = start + math.prod(shape) * dtype.itemsize
        arrays[name] = flat[start:stop].view(dtype).view(shape)
        start = stop
    return arrays


def window_bytes(config: CacheConfig) -> int:
    """Bytes of the BF16 rows of one running sequence in one layer."""
    return config.window_slots * config.num_key_value_heads * fmt.window_page_bytes(config.head_dim)


def check_arena(config: CacheConfig, layers: int, sequences: int, device_bytes: int) -> int:
    """Bytes of the arena of all layers; ConfigError, naming a number that fits, if it takes too much.

    `sequences` run at a time (max_num_seqs); device_bytes is the memory of the device.
    """
    each = layers * window_bytes(config)
    allowed = int(device_bytes * ARENA_SHARE)
    if sequences * each > allowed:
        raise ConfigError(
            f"max_num_seqs = {sequences}: the BF16 rows of a running sequence take {each} bytes, together "
            f"more than {ARENA_SHARE:.0%} of the device, allowed: --max-num-seqs <= {allowed // each}"
        )
    return sequences * each


def allocate_windows(config: CacheConfig, sequences: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One layer's arena: keys and values bf16 [1 + sequences * slots, K, 64, D]; page 0 belongs to nobody."""
    pages = 1 + sequences * config.window_slots
    shape = fmt.window_array_shapes(pages, config.num_key_value_heads, config.head_dim)["window_key"]
    rows = torch.zeros((2, *shape), dtype=torch.bfloat16, device=device)
    return rows[0], rows[1]
