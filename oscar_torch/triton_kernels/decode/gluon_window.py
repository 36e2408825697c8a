"""A warp's share of the BF16 pages (sink and recent) in Gluon: flash attention over 16 tokens at a time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..launch.aggregate import aggregate
from .gluon_warp import (
    ACC,
    EMPTY,
    HALVES_LEFT,
    HALVES_RIGHT,
    HIDDEN,
    PAGE,
    bits,
    first_of_pair,
    iota,
    lanes,
    linear,
    mma,
    run,
    store_partial,
    transpose_operand,
)

PREFETCH = gl.constexpr(
    "{ .reg .pred p; elect.sync _|p, 0xffffffff; @p cp.async.bulk.prefetch.L2.global [$1], $3;"
    " @p cp.async.bulk.prefetch.L2.global [$2], $3; mov.b32 $0, 0; }"
)


@gluon.constexpr_function
def _window_key_layout(head_dim: int):
    """[16 tokens, D / 32, 4 c, 8]: lane (g, c) holds 8 neighbouring channels of tokens g and g + 8."""
    blocks = bits(1, head_dim // 32)
    return linear([16, head_dim // 32, 4, 8], [*bits(3, 8), (0, 8), *blocks], lanes(0, 2))


@gluon.constexpr_function
def _window_query_layout(head_dim: int, padded_group: int):
    """[2 GP, D / 32, 4 c, 8]: lane (g, c) holds 8 neighbouring channels of columns g, g + 8, ..."""
    columns = [(0, 8 << n) for n in range((padded_group // 4).bit_length() - 1)]
    blocks = bits(1, head_dim // 32)
    return linear([2 * padded_group, head_dim // 32, 4, 8], [*bits(3, 8), *blocks, *columns], lanes(0, 2))


@gluon.constexpr_function
def _window_value_layout(head_dim: int):
    """[16 tokens, D / 64, 8 g, 8]: lane (g, c) holds 8 neighbouring channels of tokens 2 c, 2 c + 1, ..."""
    registers = [*bits(3, 8), (0, 1), (0, 8), *bits(1, head_dim // 64)]
    return linear([16, head_dim // 64, 8, 8], registers, [(0, 2), (0, 4), (2, 1), (2, 2), (2, 4)])


@aggregate
class Window:
    """The BF16 pages of one sequence and a key/value head; `table_ptr` is at the sequence."""

    key_ptr: gl.tensor
    value_ptr: gl.tensor
    table_ptr: gl.tensor
    length: gl.tensor
    history: gl.tensor
    head: gl.tensor


@gluon.jit
def _find_page(window, index, K: gl.constexpr, SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr):
    """(page of the sequence, head's page in memory) of BF16 page `index`: sink pages, then recent pages."""
    recent = index - SINK_PAGES
    page = gl.where(recent < 0, index, index + window.history)
    slot = gl.where(recent < 0, index, SINK_PAGES + (page - SINK_PAGES) % RECENT_SLOTS)
    return page, gl.load(window.table_ptr + slot).to(gl.int64) * K + window.head


@gluon.jit
def prefetch_page(
    window, index, K: gl.constexpr, D: gl.constexpr, SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr
):  # fmt: skip
    """Brings BF16 page `index` into the L2 cache, if a token is stored in it."""
    page, physical = _find_page(window, index, K, SINK_PAGES, RECENT_SLOTS)
    if page * PAGE < window.length:
        key_page = (window.key_ptr + physical * (PAGE * D)).to(gl.int64)
        value_page = (window.value_ptr + physical * (PAGE * D)).to(gl.int64)
        run(PREFETCH, "=r,l,l,r", (key_page, value_page, 2 * PAGE * D))


@gluon.jit
def attend_page(
    query_ptr, window, oldest, softmax_scale, index, segment, o_ptr, lse_ptr,
    K: gl.constexpr, G: gl.constexpr, GP: gl.constexpr, D: gl.constexpr,
    SINK_PAGES: gl.constexpr, RECENT_SLOTS: gl.constexpr, EXACT_QUERY: gl.constexpr,
):  # fmt: skip
    """Attention over BF16 page `index` of the window, 16 tokens at a time.

    Query and probabilities are split into two bf16, in neighbouring columns 2 h and 2 h + 1.
    """
    page, physical = _find_page(window, index, K, SINK_PAGES, RECENT_SLOTS)
    length = window.length

    # Contraction index 32 s + 16 t + 8 x + 2 c + b is channel 32 s + 8 c + 4 t + 2 x + b.
    query_layout: gl.constexpr = _window_query_layout(D, GP)
    n = iota(query_layout, 4, 0, 2 * GP)
    place = 32 * iota(query_layout, 4, 1, D // 32) + 8 * iota(query_layout, 4, 2, 4)
    place = (n >> 1) * D + place + iota(query_layout, 4, 3, 8)
    q = gl.load(query_ptr + place, mask=((n >> 1) < G) & (place >= 0), other=0.0)
    if EXACT_QUERY:
        q = gl.where((n & 1) == 0, q, 0.0)
    else:
        coarse = q.to(gl.bfloat16)
        q = gl.where((n & 1) == 0, coarse, (q - coarse.to(gl.float32)).to(gl.bfloat16))
    q = q.reshape([2 * GP, D // 32, 4, 2, 2, 2]).permute((1, 3, 4, 2, 5, 0)).reshape([D, 2 * GP])
    q = gl.convert_layout(q, HALVES_RIGHT, assert_trivial=True)

    key_layout: gl.constexpr = _window_key_layout(D)
    key_token = iota(key_layout, 4, 0, 16)
    key_channel = 32 * iota(key_layout, 4, 1, D // 32) + 8 * iota(key_layout, 4, 2, 4)
    key_channel = key_channel + iota(key_layout, 4, 3, 8)
    value_layout: gl.constexpr = _window_value_layout(D)
    value_token = iota(value_layout, 4, 0, 16)
    value_channel = 64 * iota(value_layout, 4, 1, D // 64) + 8 * iota(value_layout, 4, 2, 8)
    value_channel = value_channel + iota(value_layout, 4, 3, 8)

    like = first_of_pair(gl.full([16, 2 * GP], 0.0, gl.float32, layout=ACC).reshape([16, GP, 2]))
    score_layout: gl.constexpr = like.type.layout
    head_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    m = gl.full([GP], EMPTY, gl.float32, layout=head_layout)
    l = gl.full([GP], 0.0, gl.float32, layout=head_layout)
    acc = gl.full([D, 2 * GP], 0.0, gl.float32, layout=ACC)
    low = page * PAGE
    for token in range(low, gl.minimum(low + PAGE, length), 16):
        offset = physical * (PAGE * D) + (token - low) * D
        key_mask = (token + key_token < length) & (token + key_token >= oldest) & (key_channel >= 0)
        key = gl.load(window.key_ptr + offset + key_token * D + key_channel, mask=key_mask, other=0)
        value_mask = (token + value_token < length) & (token + value_token >= oldest) & (value_channel >= 0)
        value = gl.load(window.value_ptr + offset + value_token * D + value_channel, mask=value_mask, other=0)
        # [16, D/32, c, t, x, b] -> [16, D/32, t, x, c, b]
        key = key.to(gl.bfloat16, bitcast=True).reshape([16, D // 32, 4, 2, 2, 2]).permute((0, 1, 3, 4, 2, 5))
        key = gl.convert_layout(key.reshape([16, D]), HALVES_LEFT, assert_trivial=True)
        score = mma(key, q, gl.full([16, 2 * GP], 0.0, gl.float32, layout=ACC))
        first, second = gl.split(score.reshape([16, GP, 2]))
        row = token + gl.arange(0, 16, layout=gl.SliceLayout(1, score_layout))
        visible = ((row < length) & (row >= oldest))[:, None]
        score = gl.where(visible, (first + second) * softmax_scale, HIDDEN)
        m_new = gl.maximum(m, gl.max(score, 0))
        alpha = gl.exp2(m - m_new)
        p = gl.where(visible, gl.exp2(score - m_new[None, :]), 0.0)
        l = l * alpha + gl.sum(p, 0)
        rounded = p.to(gl.bfloat16)
        p = gl.join(rounded, (p - rounded.to(gl.float32)).to(gl.bfloat16)).reshape([16, 2 * GP])
        # rows of the product: [D/64, 4, 2, 8 g] = channel 64 s + 8 g + x, x = (4, 2)
        value = value.to(gl.bfloat16, bitcast=True).permute((1, 3, 2, 0)).reshape([D, 16])
        value = gl.convert_layout(value, HALVES_LEFT, assert_trivial=True)
        columns = gl.join(alpha, alpha).reshape([2 * GP])
        columns = gl.convert_layout(columns, gl.SliceLayout(0, ACC), assert_trivial=True)
        acc = mma(value, transpose_operand(p, 16, 2 * GP), acc * columns[None, :])
        m = m_new
    first, second = gl.split(acc.reshape([D, GP, 2]))
    o = first + second
    out_layout: gl.constexpr = gl.SliceLayout(0, o.type.layout)
    l = gl.convert_layout(l, out_layout)
    m = gl.convert_layout(m, out_layout)
    o = o * (1.0 / gl.where(l > 0, l, 1.0))[None, :]
    row = gl.arange(0, D, layout=gl.SliceLayout(1, o.type.layout))
    channel = (row & -64) + (row & 7) * 8 + ((row >> 3) & 7)
    store_partial(o, m, l, segment, channel, o_ptr, lse_ptr, G, GP, D)
