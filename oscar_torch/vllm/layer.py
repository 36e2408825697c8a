"""One attention layer in a step of the engine: rows stored, attention computed, output written in place."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..arithmetic import exact_arithmetic
from ..cache import append_rows
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..layer_cache import LayerCache, recent_slot
from ..quantize import round_to_bfloat16
from .pages import view_pages
from .step import Chunk, Step


@dataclasses.dataclass
class LayerMemory:
    """What a layer owns beside the engine's blocks: its arena, and the rotation of its key/value heads."""

    index: int  # among the layers of this engine, from 0
    config: CacheConfig
    rotation: Any  # LayerRotation
    window_key: Tensor  # bf16 [1 + sequences * slots, K, 64, D]
    window_value: Tensor  # bf16 [1 + sequences * slots, K, 64, D]


@exact_arithmetic
def attend_step(
    memory: LayerMemory,
    blocks: Tensor,
    step: Step,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    softmax_scale: float,
    implementation: str | None = None,
) -> Tensor:
    """Stores the rows of a step and attends with them: query [T, N, D], key, value [T, K, D] -> output.

    blocks uint8 [P, block bytes] is the engine's memory of this layer; output [T, N, D] is written and
    returned. Rows of padding get values that mean nothing.
    """
    pages = view_pages(blocks, memory.config.num_key_value_heads, memory.config.head_dim)
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "implementation": implementation}
    if rows := step.decodes:
        cache = _cache(memory, pages, step, 0, rows)
        new_lengths = step.tables.new_lengths[:rows]
        append_rows(
            cache, memory.rotation, key[:rows, None], value[:rows, None], new_lengths,
            implementation=implementation, check=False,
        )  # fmt: skip
        output[:rows] = ops.decode_attention(query[:rows], cache, memory.rotation, **options)
    for chunk in step.chunks:
        part = slice(chunk.start, chunk.start + chunk.count)
        cache = _cache(memory, pages, step, chunk.row, chunk.row + 1)
        counts = chunk.length, memory.config.history_pages(chunk.length)
        cache = ops.counted(cache, [counts], whole=True)
        new_lengths = step.tables.new_lengths[chunk.row : chunk.row + 1]
        rows = query[None, part], key[None, part], value[None, part]
        output[part] = ops.chunk_attention(*rows, cache, memory.rotation, new_lengths=new_lengths, **options)[
            0
        ]
        if chunk.slot >= 0:
            store_chunk(cache, memory.rotation, key[part], value[part], chunk, implementation)
    return output


def _cache(memory: LayerMemory, pages: dict[str, Tensor], step: Step, start: int, stop: int) -> LayerCache:
    """The cache of rows start .. stop - 1, all arrays in place."""
    tables = step.tables
    return LayerCache(
        **pages,
        window_key=memory.window_key,
        window_value=memory.window_value,
        page_table=tables.page_table[start:stop],
        window_table=tables.window_table[start:stop],
        lengths=tables.lengths[memory.index, start:stop],
        history_pages=tables.history_pages[memory.index, start:stop],
        config=memory.config,
    )


@exact_arithmetic
def store_chunk(
    cache: LayerCache, rotation: Any, key: Tensor, value: Tensor, chunk: Chunk, implementation: str | None
) -> None:
    """`cache.append_rows` for one sequence whose numbers the host knows: waits for no device.

    cache: of this sequence alone, with its counts before the chunk, which stay as they are; key, value
    [T, K, D]; the window pages of a place in the arena lie together, from 1 + slot * slots on.
    """
    config, length, stop = cache.config, chunk.length, chunk.length + chunk.count
    before, after = config.history_pages(length), config.history_pages(stop)
    first = 1 + chunk.slot * config.window_slots
    rows = (round_to_bfloat16(key), round_to_bfloat16(value))
    windows = tuple(
        window[first : first + config.window_slots] for window in (cache.window_key, cache.window_value)
    )
    if after > before:
        token = (config.sink_pages + before) * fmt.PAGE_TOKENS
        end = (config.sink_pages + after) * fmt.PAGE_TOKENS
        fresh = slice(max(0, token - length), max(0, end - length))
        pages = [
            torch.cat([*_stored(window, token, min(length, end), config), new[fresh]]).unflatten(
                0, (after - before, fmt.PAGE_TOKENS)
            )
            for window, new in zip(windows, rows)
        ]
        destination = cache.page_table[0, before:after].long()
        for name, new in ops.quantize_pages(
            pages[0], pages[1], rotation, implementation=implementation
        ).items():
            getattr(cache, name)[destination] = new
    for page in range(length // fmt.PAGE_TOKENS, -(-stop // fmt.PAGE_TOKENS)):
        if config.sink_pages <= page < config.sink_pages + after:
            continue
        slot = page if page < config.sink_pages else recent_slot(page, config)
        low, high = max(length, page * fmt.PAGE_TOKENS), min(stop, (page + 1) * fmt.PAGE_TOKENS)
        place = slice(low - page * fmt.PAGE_TOKENS, high - page * fmt.PAGE_TOKENS)
        for window, new in zip(windows, rows):
            window[slot, :, place] = new[low - length : high - length].transpose(0, 1)


def _stored(window: Tensor, token: int, end: int, config: CacheConfig) -> list[Tensor]:
    """Rows [T, K, D] of the tokens token .. end - 1, a whole number of pages first, from a recent part."""
    pages = range(token // fmt.PAGE_TOKENS, -(-end // fmt.PAGE_TOKENS)) if end > token else ()
    rows = [window[recent_slot(page, config)].transpose(0, 1) for page in pages]
    return [part[: end - page * fmt.PAGE_TOKENS] for page, part in zip(pages, rows)]


def workspace_bytes(config: CacheConfig, tokens: int, max_length: int) -> int:
    """Bytes that a chunk of `tokens` needs beside its rows, at most: what the engine must leave free.

    Queries in float32, rotated, and as BF16; the output in float32 and cast; one BF16 output for every block
    of the history that flash attention reads at a time, and that block dequantized.
    """
    from ..triton_kernels.prefill import flash  # needs Triton, which a CPU does without

    history = max(0, max_length - tokens)
    pieces = len(flash.blocks_of(-(-history // fmt.PAGE_TOKENS)))
    rows = -(-tokens // flash.MIN_TOKENS) * flash.MIN_TOKENS * config.num_query_heads * config.head_dim
    block = 2 * 2 * min(history, flash.BLOCK_TOKENS) * config.num_key_value_heads * config.head_dim
    return rows * (20 + 2 * pieces) + block
