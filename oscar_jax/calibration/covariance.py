"""Streaming attention statistics of one layer: what a rotation is fitted on, gathered chunk by chunk.

Why: a calibration text has more queries, keys and values than fit in memory, so only sums are kept. The sums
are float32 pairs (a total and its rounding error, added without loss), because JAX has no float64 by default
and 10**5 plain float32 additions would cost three digits.

Definitions ("statistics version 2"), rows as row vectors, per key/value head, K heads, D channels:

- query covariance C_Q: Σ qᵀq / rows over all queries of the head's group, not centered; q after RoPE.
- coded query covariance: Σ w qᵀq / Σ w, w the attention that the query gives to tokens of INT2 pages
  (those from skip_tokens on that the cache has coded by then); needs these weights.
- key covariance C_K, page-centered: Σ (k−m)ᵀ(k−m) / rows, m the mean of the key's page. A page is the 64
  tokens at absolute positions 64i … 64i+63, whatever the chunks. An incomplete last page does not count: the
  cache never codes one.
- value covariance: Σ vᵀv / rows − mᵀm, m the value mean.
- exact score-weighted value covariance C_S (the paper's): Σ oᵀo / rows over the attention outputs o of all
  query heads of the group; needs the outputs.
- surrogate value covariance (the published code's): Σ w vᵀv / Σ w with w = k·M·kᵀ. There M is C_Q of the very
  same rows, which no single pass can know. Here M is C_Q as it stood when `fix_surrogate_metric` was called:
  call it after a first pass (or a first sequence) and all later rows are weighed by that one matrix.

Tokens at positions < skip_tokens (the sink, never coded) count for queries and outputs only.

Accuracy: products of 256 rows are float32, everything above them loses nothing. An entry Σ x·y is off from
float64 by at most 256 · 2⁻²⁴ · Σ |x·y|, 1.5e-5 of it; on real rows it is 1e-7.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import cache_format as fmt
from ..core.config import check_head_dim
from ..core.errors import ConfigError, ShapeError
from ..rotations.statistics import LayerStatistics

_BLOCK_ROWS = 256  # rows per float32 product; longer chunks are split, so accuracy does not depend on them
_PAGE = fmt.PAGE_TOKENS


@dataclasses.dataclass(frozen=True, eq=False)
class Total:
    """A sum as an unevaluated float32 pair high + low, about 48 bits; a pytree."""

    high: Any
    low: Any


jax.tree_util.register_dataclass(Total, data_fields=["high", "low"], meta_fields=[])


@dataclasses.dataclass(frozen=True, eq=False)
class StatisticsState:
    """Running sums of one layer; a pytree of fixed shapes.

    Moments are Totals [K, D, D], sums Totals [K, D], counts int32 scalars. open_page float32 [64, K, D] holds
    the keys of the page being filled, position (int32) the tokens of the current sequence so far.
    surrogate_metric float32 [K, D, D] is None until fixed.
    """

    query_moment: Total
    query_rows: Any
    coded_query_moment: Total
    coded_query_weight: Total  # [K]
    key_moment: Total
    key_rows: Any
    key_sum: Total
    value_sum: Total
    value_moment: Total
    token_rows: Any
    output_moment: Total
    output_rows: Any
    surrogate_moment: Total
    surrogate_weight: Total  # [K]
    surrogate_metric: Any
    open_page: Any
    position: Any
    skip_tokens: int


jax.tree_util.register_dataclass(
    StatisticsState,
    data_fields=[f.name for f in dataclasses.fields(StatisticsState) if f.name != "skip_tokens"],
    meta_fields=["skip_tokens"],
)


def init_statistics(num_key_value_heads: int, head_dim: int, *, skip_tokens: int = 0) -> StatisticsState:
    """Empty sums, at position 0; skip_tokens is a multiple of 64. Raises ConfigError."""
    check_head_dim(head_dim)
    if skip_tokens < 0 or skip_tokens % _PAGE:
        raise ConfigError(f"skip_tokens = {skip_tokens}, allowed: multiples of {_PAGE}")

    def zeros(*shape: int) -> Total:
        return Total(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    heads, count = num_key_value_heads, jnp.zeros((), jnp.int32)
    return StatisticsState(
        query_moment=zeros(heads, head_dim, head_dim),
        query_rows=count,
        coded_query_moment=zeros(heads, head_dim, head_dim),
        coded_query_weight=zeros(heads),
        key_moment=zeros(heads, head_dim, head_dim),
        key_rows=count,
        key_sum=zeros(heads, head_dim),
        value_sum=zeros(heads, head_dim),
        value_moment=zeros(heads, head_dim, head_dim),
        token_rows=count,
        output_moment=zeros(heads, head_dim, head_dim),
        output_rows=count,
        surrogate_moment=zeros(heads, head_dim, head_dim),
        surrogate_weight=zeros(heads),
        surrogate_metric=None,
        open_page=jnp.zeros((_PAGE, heads, head_dim), jnp.float32),
        position=count,
        skip_tokens=skip_tokens,
    )


def start_sequence(state: StatisticsState, position: int = 0) -> StatisticsState:
    """The same sums at the start of another sequence, or of its part from `position`, a multiple of 64."""
    if position < 0 or position % _PAGE:
        raise ConfigError(f"position = {position}, allowed: multiples of {_PAGE}")
    return dataclasses.replace(state, position=jnp.asarray(position, jnp.int32))


def fix_surrogate_metric(state: StatisticsState) -> StatisticsState:
    """The same sums, with C_Q as of now the weight of all further rows in the surrogate covariance.

    Surrogate sums gathered under another metric are dropped. Raises ConfigError before any query was seen.
    """
    if int(state.query_rows) == 0:
        raise ConfigError("the surrogate metric is the query covariance, but no query was seen yet")
    metric = (_value(state.query_moment) / int(state.query_rows)).astype(np.float32)
    return dataclasses.replace(
        state,
        surrogate_metric=jnp.asarray(metric),
        surrogate_moment=jax.tree.map(jnp.zeros_like, state.surrogate_moment),
        surrogate_weight=jax.tree.map(jnp.zeros_like, state.surrogate_weight),
    )


@jax.jit
def update_statistics(
    state: StatisticsState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array | None = None,
    coded_share: jax.Array | None = None,
) -> StatisticsState:
    """The sums with the next T tokens of the sequence added: query [T, N, D], key and value [T, K, D].

    output [T, N, D], the layer's attention outputs before the output projection, adds to C_S; None leaves it.
    coded_share [T, N], of each query's attention what goes to tokens of INT2 pages, likewise.
    Any float dtype; sums are float32 pairs. One compilation per T. Raises ShapeError.
    """
    heads, head_dim = state.key_sum.high.shape
    tokens = key.shape[0]
    if key.shape != (tokens, heads, head_dim) or value.shape != key.shape:
        raise ShapeError(
            f"key has shape {key.shape}, value {value.shape}, expected [T, {heads}, {head_dim}] for both"
        )
    for name, rows in (("query", query), ("output", query if output is None else output)):
        if rows.ndim != 3 or rows.shape[0] != tokens or rows.shape[1] % heads or rows.shape[2] != head_dim:
            raise ShapeError(
                f"{name} has shape {rows.shape}, expected [{tokens}, a multiple of {heads}, {head_dim}]"
            )

    keys, values = key.astype(jnp.float32), value.astype(jnp.float32)
    counts = state.position + jnp.arange(tokens) >= state.skip_tokens
    mask = counts.astype(jnp.float32)[:, None, None]
    counted_keys, counted_values = keys * mask, values * mask
    grouped = _group_rows(query, heads)
    centered, key_rows, open_page = _center_pages(state, keys)
    changes: dict[str, Any] = {
        "query_moment": _add_moment(state.query_moment, grouped, grouped),
        "query_rows": state.query_rows + grouped.shape[0],
        "key_moment": _add_moment(state.key_moment, centered, centered),
        "key_rows": state.key_rows + key_rows,
        "key_sum": _add_rows(state.key_sum, counted_keys),
        "value_sum": _add_rows(state.value_sum, counted_values),
        "value_moment": _add_moment(state.value_moment, counted_values, values),
        "token_rows": state.token_rows + counts.sum(dtype=jnp.int32),
        "open_page": open_page,
        "position": state.position + tokens,
    }
    if coded_share is not None:
        if coded_share.shape != query.shape[:2]:
            raise ShapeError(f"coded_share has shape {coded_share.shape}, expected {query.shape[:2]}")
        changes |= _add_coded(state, grouped, _group_rows(coded_share[..., None], heads))
    if output is not None:
        grouped = _group_rows(output, heads)
        changes["output_moment"] = _add_moment(state.output_moment, grouped, grouped)
        changes["output_rows"] = state.output_rows + grouped.shape[0]
    if state.surrogate_metric is not None:
        weighed = jnp.einsum("tkd,kde->tke", counted_keys, state.surrogate_metric, precision="highest")
        weight = (weighed * counted_keys).sum(axis=-1)  # [T, K]
        changes["surrogate_moment"] = _add_moment(state.surrogate_moment, values * weight[..., None], values)
        changes["surrogate_weight"] = _add_rows(state.surrogate_weight, weight)
    return dataclasses.replace(state, **changes)


def update_pages(
    state: StatisticsState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    coded_share: jax.Array,
    start: jax.Array | int,
    count: jax.Array | int,
) -> StatisticsState:
    """The sums with tokens start ... start + count - 1 of B sequences added: rows [B, T, N or K, D].

    coded_share [B, T, N] as in `update_statistics`.

    As `update_statistics` for each sequence in turn, in products over all of them; `start` and T are
    multiples of 64, so that no page is open between calls. Rows from `count` on, a number or one per
    sequence, are padding.
    """
    heads, head_dim = state.key_sum.high.shape
    batch, tokens = key.shape[:2]
    step, count = jnp.arange(tokens), jnp.broadcast_to(jnp.asarray(count, jnp.int32), (batch,))[:, None]
    real = (step < count)[:, :, None, None]
    counts = (step < count) & (start + step >= state.skip_tokens)  # [B, T]
    counted = counts[:, :, None, None]

    def flat(rows: jax.Array) -> jax.Array:
        return rows.reshape(-1, *rows.shape[2:])

    keys, values = (jnp.where(real, rows.astype(jnp.float32), 0) for rows in (key, value))
    counted_keys, counted_values = (flat(jnp.where(counted, rows, 0)) for rows in (keys, values))
    queries, outputs = (
        _group_rows(flat(jnp.where(real, rows.astype(jnp.float32), 0)), heads) for rows in (query, output)
    )
    share = _group_rows(flat(jnp.where(real, coded_share[..., None].astype(jnp.float32), 0)), heads)
    query_rows = count.sum(dtype=jnp.int32) * (query.shape[2] // heads)
    paged = keys.reshape(batch, tokens // _PAGE, _PAGE, heads, head_dim)
    first = jnp.arange(tokens // _PAGE) * _PAGE
    whole = (first + _PAGE <= count) & (start + first >= state.skip_tokens)  # [B, pages]
    centered = jnp.where(whole[:, :, None, None, None], paged - paged.mean(axis=2, keepdims=True), 0)
    centered = centered.reshape(-1, heads, head_dim)
    metric = state.surrogate_metric
    weighed = jnp.einsum("tkd,kde->tke", counted_keys, metric, precision="highest")
    weight = (weighed * counted_keys).sum(axis=-1)  # [B·T, K]
    return dataclasses.replace(
        state,
        query_moment=_add_moment(state.query_moment, queries, queries),
        query_rows=state.query_rows + query_rows,
        **_add_coded(state, queries, share),
        key_moment=_add_moment(state.key_moment, centered, centered),
        key_rows=state.key_rows + _PAGE * whole.sum(dtype=jnp.int32),
        key_sum=_add_rows(state.key_sum, counted_keys),
        value_sum=_add_rows(state.value_sum, counted_values),
        value_moment=_add_moment(state.value_moment, counted_values, counted_values),
        token_rows=state.token_rows + counts.sum(dtype=jnp.int32),
        output_moment=_add_moment(state.output_moment, outputs, outputs),
        output_rows=state.output_rows + query_rows,
        surrogate_moment=_add_moment(
            state.surrogate_moment, counted_values * weight[..., None], counted_values
        ),
        surrogate_weight=_add_rows(state.surrogate_weight, weight),
    )


def merge_statistics(first: StatisticsState, second: StatisticsState) -> StatisticsState:
    """The sums of both, between sequences: the open pages of either are dropped.

    Raises ConfigError if they differ in skip_tokens or in the surrogate metric, ShapeError in geometry.
    """
    if first.key_sum.high.shape != second.key_sum.high.shape:
        raise ShapeError(
            f"statistics of [K, D] {first.key_sum.high.shape} and {second.key_sum.high.shape} do not merge"
        )
    if first.skip_tokens != second.skip_tokens:
        raise ConfigError(f"skip_tokens = {first.skip_tokens} and {second.skip_tokens} do not merge")
    metrics = (first.surrogate_metric, second.surrogate_metric)
    if (metrics[0] is None) != (metrics[1] is None) or (
        metrics[0] is not None and not np.array_equal(metrics[0], metrics[1])
    ):
        raise ConfigError("statistics weighed by different surrogate metrics do not merge")
    changes: dict[str, Any] = {"position": jnp.zeros((), jnp.int32)}
    for field in dataclasses.fields(StatisticsState):
        mine, other = getattr(first, field.name), getattr(second, field.name)
        if isinstance(mine, Total):
            changes[field.name] = _add(_add(mine, other.high), other.low)
        elif field.name.endswith("_rows"):
            changes[field.name] = mine + other
    return dataclasses.replace(first, **changes)


def finalize_statistics(state: StatisticsState) -> LayerStatistics:
    """The covariances and means, float64; ConfigError unless a full page was seen."""
    if int(state.key_rows) == 0:
        raise ConfigError(f"no full page of {_PAGE} counted keys was seen, nothing can be fitted")
    tokens = int(state.token_rows)
    value_mean = _value(state.value_sum) / tokens
    weight = _value(state.surrogate_weight)[:, None, None]
    coded = _value(state.coded_query_weight)[:, None, None]
    return LayerStatistics(
        query_covariance=_value(state.query_moment) / int(state.query_rows),
        key_covariance=_value(state.key_moment) / int(state.key_rows),
        key_mean=_value(state.key_sum) / tokens,
        value_mean=value_mean,
        value_covariance=_value(state.value_moment) / tokens
        - value_mean[:, :, None] * value_mean[:, None, :],
        surrogate_value_covariance=_value(state.surrogate_moment) / weight if (weight > 0).all() else None,
        exact_value_covariance=(
            _value(state.output_moment) / int(state.output_rows) if int(state.output_rows) else None
        ),
        tokens=tokens,
        coded_query_covariance=_value(state.coded_query_moment) / coded if (coded > 0).all() else None,
    )


def _add_coded(state: StatisticsState, queries: jax.Array, share: jax.Array) -> dict[str, Total]:
    """The sums of the coded query covariance with queries [R, K, D] of shares [R, K, 1] added."""
    return {
        "coded_query_moment": _add_moment(state.coded_query_moment, queries * share, queries),
        "coded_query_weight": _add_rows(state.coded_query_weight, share[..., 0]),
    }


def _add(total: Total, term: jax.Array) -> Total:
    """TwoSum (Knuth): the rounding error of high + term goes to low."""
    high = total.high + term
    rest = high - total.high
    error = (total.high - (high - rest)) + (term - rest)
    return Total(high, total.low + error)


def _value(total: Total) -> np.ndarray:
    return np.asarray(total.high, np.float64) + np.asarray(total.low, np.float64)


def _blocks(rows: jax.Array) -> jax.Array:
    """[R, ...] -> [R / block, block, ...], padded with zero rows, which add nothing to a sum."""
    block = min(_BLOCK_ROWS, max(rows.shape[0], 1))
    padding = [(0, -rows.shape[0] % block)] + [(0, 0)] * (rows.ndim - 1)
    return jnp.pad(rows, padding).reshape(-1, block, *rows.shape[1:])


def _add_moment(total: Total, left: jax.Array, right: jax.Array) -> Total:
    """total + Σ leftᵀ right for rows [R, K, D]: a batched product over all blocks, then a compensated sum."""
    return _add_blocks(
        total, jnp.einsum("nrkd,nrke->nkde", _blocks(left), _blocks(right), precision="highest")
    )


def _add_rows(total: Total, rows: jax.Array) -> Total:
    return _add_blocks(total, _blocks(rows).sum(axis=1))


def _add_blocks(total: Total, terms: jax.Array) -> Total:
    """total + Σ terms [n, ...]: halves are added pairwise with TwoSum, so that log2(n) steps lose no bit."""
    pairs = Total(terms, jnp.zeros_like(terms))
    while (count := pairs.high.shape[0]) > 1:
        if count % 2:
            pairs = jax.tree.map(lambda a: jnp.concatenate([a, jnp.zeros_like(a[:1])]), pairs)
        first, second = (Total(pairs.high[i::2], pairs.low[i::2]) for i in (0, 1))
        pairs = _add(Total(first.high, first.low + second.low), second.high)
    return _add(_add(total, pairs.high[0]), pairs.low[0])


def _group_rows(query: jax.Array, heads: int) -> jax.Array:
    """[T, N, D] -> float32 [T·G, K, D]: query head n belongs to key/value head n // G."""
    tokens, query_heads, head_dim = query.shape
    grouped = query.astype(jnp.float32).reshape(tokens, heads, query_heads // heads, head_dim)
    return grouped.swapaxes(1, 2).reshape(-1, heads, head_dim)


def _center_pages(state: StatisticsState, keys: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows of pages now complete, minus their page's mean (else zeros), their count, the open page."""
    tokens, heads, head_dim = keys.shape
    pages = (tokens + _PAGE - 1) // _PAGE + 1
    filled = state.position % _PAGE
    rows = jnp.zeros((pages * _PAGE, heads, head_dim), jnp.float32)
    rows = jax.lax.dynamic_update_slice(rows, state.open_page, (0, 0, 0))
    rows = jax.lax.dynamic_update_slice(rows, keys, (filled, 0, 0))
    complete = (filled + tokens) // _PAGE
    open_page = jax.lax.dynamic_slice(rows, (complete * _PAGE, 0, 0), (_PAGE, heads, head_dim))
    paged = rows.reshape(pages, _PAGE, heads, head_dim)
    page = jnp.arange(pages)
    counted = (page < complete) & ((state.position // _PAGE + page) * _PAGE >= state.skip_tokens)
    centered = (paged - paged.mean(axis=1, keepdims=True)) * counted[:, None, None, None]
    return centered.reshape(-1, heads, head_dim), counted.sum(dtype=jnp.int32) * _PAGE, open_page
