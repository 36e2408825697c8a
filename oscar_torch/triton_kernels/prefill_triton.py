"""Attention of a chunk of queries over INT2 history, BF16 window and the chunk itself, in plain Triton.

Why: a prompt longer than one chunk reads its own history from INT2 pages. One program owns `ROWS` queries of
one key/value head (row = token * G + query head of the group) and walks over all keys with one softmax, so
there is no workspace at all and the history is unpacked only inside a tile.

Order: rotated query over INT2 pages; output transform and value mean applied to what was accumulated; then
sink, recent and chunk tokens as plain rows. Scores are in log2 units. Format page, section 5.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from .. import cache_format as fmt
from ..config import ShapeError
from .decode_triton import LOG2_E, MAX_GROUP
from .quantize_triton import check_device, rotation_stride

PAGE = tl.constexpr(fmt.PAGE_TOKENS)
CODE_UNIT = tl.constexpr(2.0**24)  # a code read as an fp16 subnormal is code * 2**-24
PAGES_PER_MEAN = tl.constexpr(16)  # page means that one product with the queries covers
UNSEEN = tl.constexpr(-1.0e30)


@dataclasses.dataclass(frozen=True)
class Tile:
    """How one padded head_dim runs: query rows per program, warps, pipeline stages."""

    rows: int
    warps: int
    stages: int


TILES = {
    32: Tile(rows=64, warps=4, stages=2),
    64: Tile(rows=128, warps=8, stages=2),
    128: Tile(rows=128, warps=8, stages=2),
    256: Tile(rows=32, warps=8, stages=1),
    512: Tile(rows=16, warps=8, stages=1),
}
SMALL_TILES = {**TILES, 128: Tile(rows=64, warps=4, stages=1)}  # for less than 164 KB of shared memory


@triton.jit
def _widen(raw):
    """bf16 bits (int16) -> float32."""
    return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _code(words, place: tl.constexpr):
    """The codes at one place of every word, as fp16 subnormals code * 2**-24."""
    return ((words >> (2 * place)) & 3).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def unpack_codes(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Words int32 [ROWS, COLUMNS / 16] -> codes as fp16 subnormals [ROWS, COLUMNS].

    Joined pairwise, so that a thread holds the 16 codes of its word next to each other.
    """
    low = tl.join(
        tl.join(tl.join(_code(words, 0), _code(words, 8)), tl.join(_code(words, 4), _code(words, 12))),
        tl.join(tl.join(_code(words, 2), _code(words, 10)), tl.join(_code(words, 6), _code(words, 14))),
    )
    high = tl.join(
        tl.join(tl.join(_code(words, 1), _code(words, 9)), tl.join(_code(words, 5), _code(words, 13))),
        tl.join(tl.join(_code(words, 3), _code(words, 11)), tl.join(_code(words, 7), _code(words, 15))),
    )
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))


@triton.jit
def _softmax_step(score, visible, m, l):
    """Online softmax: score [ROWS, S] -> weights, rescaling factor, new maximum and sum."""
    score = tl.where(visible, score, UNSEEN)
    m_new = tl.maximum(m, tl.max(score, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.where(visible, tl.exp2(score - m_new[:, None]), 0.0)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _times_matrix(
    rows_ptr, row_mask, matrix_ptr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr
):
    """Rows in memory (pointers [ROWS, 1]) @ matrix float32 [D, D] -> float32 [ROWS, DP]."""
    channels = tl.arange(0, DP)
    out = tl.zeros((ROWS, DP), tl.float32)
    for chunk in range(0, D, CHUNK):
        c = chunk + tl.arange(0, CHUNK)
        rows = tl.load(rows_ptr + c[None, :], mask=row_mask[:, None] & (c < D)[None, :], other=0.0)
        mask = (c < D)[:, None] & (channels < D)[None, :]
        t = tl.load(matrix_ptr + c[:, None] * D + channels[None, :], mask=mask, other=0.0)
        out = tl.dot(rows.to(tl.float32), t, acc=out, input_precision="tf32x3")
    return out


@triton.jit
def _plain_rows(
    q, key_ptr, value_ptr, stride_row, row_offset, stored, visible, acc, m, l,
    D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One step over 64 BF16 rows: stored [64] says which exist, visible [ROWS, 64] who sees them."""
    channels = tl.arange(0, DP)
    mask = stored[:, None] & (channels < D)[None, :]
    offset = row_offset[:, None] * stride_row + channels[None, :]
    key = _widen(tl.load(key_ptr + offset, mask=mask, other=0))
    value = _widen(tl.load(value_ptr + offset, mask=mask, other=0))
    score = tl.dot(q, tl.trans(key), input_precision="tf32")
    p, alpha, m, l = _softmax_step(score, visible & stored[None, :], m, l)
    return tl.dot(p, value, acc=acc * alpha[:, None], input_precision="tf32"), m, l


@triton.jit
def _chunk_kernel(
    query_ptr, key_ptr, value_ptr, new_lengths_ptr, tokens,
    key_codes_ptr, value_codes_ptr, key_scale_ptr, value_scale_ptr, key_page_mean_ptr,
    window_key_ptr, window_value_ptr, page_table_ptr, stride_table, window_table_ptr,
    lengths_ptr, history_ptr, query_transform_ptr, output_transform_ptr, value_mean_ptr, stride_rotation,
    softmax_scale, sliding_window, sink_ptr, out_ptr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, SINK_PAGES: tl.constexpr, RECENT_SLOTS: tl.constexpr, SLIDING: tl.constexpr,
    SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T * G / ROWS), K, B)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    b = tl.program_id(2)
    step = row // G
    live = step < tokens
    length = tl.load(lengths_ptr + b)
    history = tl.load(history_ptr + b)
    new_length = tl.load(new_lengths_ptr + b)
    position = length + step
    oldest = position - sliding_window + 1 if SLIDING else position * 0
    channels = tl.arange(0, DP)
    in_page = tl.arange(0, PAGE)
    out_row = ((b * tokens + step) * (K * G) + head * G + row % G).to(tl.int64) * D
    row_mask = live[:, None] & (channels < D)[None, :]
    m = tl.full((ROWS,), UNSEEN, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)

    # --- INT2 pages ---
    first_page = tl.maximum(tl.min(oldest, 0) // PAGE - SINK_PAGES, 0) if SLIDING else 0
    if first_page < history:
        matrix = head * stride_rotation * D * D
        query_rows = query_ptr + out_row[:, None]
        rotated = _times_matrix(query_rows, live, query_transform_ptr + matrix, ROWS, D, DP, CHUNK)
        largest = tl.max(tl.abs(rotated), 1)
        unit = tl.where(largest > 0, largest, 1.0) * (1.0 / 1024)
        rotated16 = (rotated / unit[:, None]).to(tl.float16)
        query_sum = 1.5 * tl.sum(rotated16.to(tl.float32), 1)
        unit = unit * softmax_scale
        weight_sum = tl.zeros((ROWS,), tl.float32)
        value_unit = 1.0e-30  # largest value scale so far / 1024: keeps the weights inside fp16
        word = tl.arange(0, DP // 16)
        token_word = tl.arange(0, PAGE // 16)
        group = tl.arange(0, PAGES_PER_MEAN)
        for block in range(first_page, history, PAGES_PER_MEAN):
            index = block + group
            in_history = index < history
            entry = tl.load(page_table_ptr + b * stride_table + index, mask=in_history, other=0).to(tl.int64)
            page_scores = tl.zeros((ROWS, PAGES_PER_MEAN), tl.float32)
            for chunk in range(0, D, CHUNK):
                c = chunk + tl.arange(0, CHUNK)
                q_mask = live[:, None] & (c < D)[None, :]
                q_part = tl.load(query_rows + c[None, :], mask=q_mask, other=0.0).to(tl.float32)
                mean_offset = (entry * K + head)[None, :] * D + c[:, None]
                mean_mask = in_history[None, :] & (c < D)[:, None]
                mean = _widen(tl.load(key_page_mean_ptr + mean_offset, mask=mean_mask, other=0))
                page_scores = tl.dot(q_part, mean, acc=page_scores, input_precision="tf32x3")
            page_scores *= softmax_scale
            for page in range(block, tl.minimum(block + PAGES_PER_MEAN, history)):
                physical = tl.load(page_table_ptr + b * stride_table + page).to(tl.int64) * K + head
                codes_offset = physical * (PAGE * D // 16)
                word_mask = (in_page >= 0)[:, None] & (word < D // 16)[None, :]
                word_offset = in_page[:, None] * (D // 16) + word[None, :]
                words = tl.load(key_codes_ptr + codes_offset + word_offset, mask=word_mask, other=0)
                key_codes = unpack_codes(words, PAGE, DP)
                key_scale = _widen(tl.load(key_scale_ptr + physical * PAGE + in_page))
                score = tl.dot(rotated16, tl.trans(key_codes)) * CODE_UNIT - query_sum[:, None]
                page_score = tl.sum(tl.where((group == page - block)[None, :], page_scores, 0.0), 1)
                score = score * unit[:, None] * key_scale[None, :] + page_score[:, None]
                visible = (in_page + (SINK_PAGES + page) * PAGE)[None, :] >= oldest[:, None]
                p, alpha, m, l = _softmax_step(score, visible, m, l)
                value_scale = _widen(tl.load(value_scale_ptr + physical * PAGE + in_page))
                new_unit = tl.maximum(value_unit, tl.max(value_scale, 0) * (1.0 / 1024))
                alpha = alpha * (value_unit / new_unit)
                value_unit = new_unit
                weight = p * (value_scale / value_unit)[None, :]
                weight_sum = weight_sum * alpha + tl.sum(weight, 1)
                channel_mask = (channels < D)[:, None] & (token_word >= 0)[None, :]
                word_offset_v = channels[:, None] * (PAGE // 16) + token_word[None, :]
                words_v = tl.load(value_codes_ptr + codes_offset + word_offset_v, mask=channel_mask, other=0)
                value_codes = unpack_codes(words_v, DP, PAGE)
                acc = tl.dot(weight.to(tl.float16), tl.trans(value_codes), acc=acc * alpha[:, None])
        # A register tile cannot be cut into chunks: the rotated output passes through its own rows.
        out_rows = out_ptr + out_row[:, None]
        acc = (acc * CODE_UNIT - 1.5 * weight_sum[:, None]) * value_unit
        tl.store(out_rows + channels[None, :], acc, mask=row_mask)
        tl.debug_barrier()
        acc = _times_matrix(out_rows, live, output_transform_ptr + matrix, ROWS, D, DP, CHUNK)
        tl.debug_barrier()
        mean_offset_v = head * stride_rotation * D + channels
        value_mean = _widen(tl.load(value_mean_ptr + mean_offset_v, mask=channels < D, other=0))
        acc += l[:, None] * value_mean[None, :]

    q = tl.load(query_ptr + out_row[:, None] + channels[None, :], mask=row_mask, other=0.0)
    q = q.to(tl.float32) * softmax_scale

    # --- sink and recent pages ---
    stored_pages = (length + PAGE - 1) // PAGE
    for index in range(0, tl.minimum(stored_pages - history, SINK_PAGES + RECENT_SLOTS)):
        page = index + history if index >= SINK_PAGES else index
        slot = SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS if index >= SINK_PAGES else index
        physical = tl.load(window_table_ptr + b * (SINK_PAGES + RECENT_SLOTS) + slot).to(tl.int64)
        token = in_page + page * PAGE
        base = (physical * K + head) * (PAGE * D)
        acc, m, l = _plain_rows(
            q, window_key_ptr + base, window_value_ptr + base, D, in_page, token < length,
            token[None, :] >= oldest[:, None], acc, m, l, D, DP,
        )  # fmt: skip

    # --- the chunk itself, causal ---
    last = tl.minimum(tl.max(step, 0) + 1, new_length)
    base = (b * tokens).to(tl.int64) * (K * D) + head * D
    for start in range(0, last, PAGE):
        other = start + in_page
        causal = (other[None, :] <= step[:, None]) & ((length + other)[None, :] >= oldest[:, None])
        acc, m, l = _plain_rows(
            q, key_ptr + base, value_ptr + base, K * D, other, other < new_length, causal, acc, m, l, D, DP
        )

    if SINK_LOGITS:
        sink = tl.load(sink_ptr + head * G + row % G).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2(m - m_new)
        acc = acc * alpha[:, None]
        l = l * alpha + tl.exp2(sink - m_new)
    out = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(out_ptr + out_row[:, None] + channels[None, :], out, mask=row_mask)


def _tile(padded_dim: int, device: torch.device) -> Tile:
    if device.type != "cuda":
        return TILES[padded_dim]
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    return (TILES if shared >= 164 * 1024 else SMALL_TILES)[padded_dim]


def chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache,
    rotation,
    *,
    new_lengths: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a chunk of new tokens over the stored tokens and, causally and exactly, over the chunk.

    query [B, T, N, D], key and value [B, T, K, D] -> float32 [B, T, N, D]. `cache` is the state before the
    chunk; token j of sequence b stands at position lengths[b] + j. Rows at or past new_lengths[b] are
    padding: nothing attends to them and their output means nothing. Raises ShapeError; NotImplementedError
    (device, more than 16 query heads per key/value head) before anything is allocated.
    """
    config = cache.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    batch, tokens, query_heads = query.shape[:3]
    if batch != cache.batch or query.shape[3] != head_dim or query_heads % heads:
        raise ShapeError(f"query {tuple(query.shape)}, expected [{cache.batch}, T, G * {heads}, {head_dim}]")
    for name, rows in (("key", key), ("value", value)):
        if rows.shape != (batch, tokens, heads, head_dim):
            raise ShapeError(f"{name} {tuple(rows.shape)}, expected {(batch, tokens, heads, head_dim)}")
    if sink_logits is not None and sink_logits.shape != (query_heads,):
        raise ShapeError(f"sink_logits {tuple(sink_logits.shape)}, expected ({query_heads},)")
    check_device(query)
    group = query_heads // heads
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads per key/value head, the kernel serves 1..{MAX_GROUP}")
    stride_rotation = rotation_stride(rotation.query_transform.shape[0], heads)
    padded = max(32, triton.next_power_of_2(head_dim))
    out = torch.empty((batch, tokens, query_heads, head_dim), device=query.device)
    tile = _tile(padded, query.device)
    key, value = (x.to(torch.bfloat16).contiguous().view(torch.int16) for x in (key, value))
    _chunk_kernel[(triton.cdiv(tokens * group, tile.rows), heads, batch)](
        query.contiguous(), key, value, new_lengths, tokens,
        cache.key_codes, cache.value_codes, cache.key_scale.view(torch.int16),
        cache.value_scale.view(torch.int16), cache.key_page_mean.view(torch.int16),
        cache.window_key.view(torch.int16), cache.window_value.view(torch.int16),
        cache.page_table, cache.page_table.shape[1], cache.window_table, cache.lengths, cache.history_pages,
        rotation.query_transform, rotation.output_transform, rotation.value_mean.view(torch.int16),
        stride_rotation, scale * LOG2_E, sliding_window or 0,
        cache.lengths if sink_logits is None else sink_logits, out,
        K=heads, G=group, D=head_dim, DP=padded, ROWS=tile.rows, CHUNK=32,
        SINK_PAGES=config.sink_pages, RECENT_SLOTS=config.recent_slots, SLIDING=sliding_window is not None,
        SINK_LOGITS=sink_logits is not None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
