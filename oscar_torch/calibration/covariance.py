"""Streaming attention statistics of one layer: what a rotation is fitted on, gathered chunk by chunk.

Why: a calibration text has more queries, keys and values than fit in memory, so only sums are kept, in
float64. `rotations/fit.py` fits, `rotations/statistics.py` writes them to a file.

Definitions ("statistics version 2"), rows as row vectors, per key/value head, K heads, D channels:

- query covariance C_Q: Σ qᵀq / rows over all queries of the head's group, not centered; q after RoPE.
- coded query covariance: Σ w qᵀq / Σ w, w the attention that the query gives to tokens of INT2 pages
  (those from skip_tokens on that the cache has coded by then); needs these weights, may be of a sample.
- key covariance C_K, page-centered: Σ (k−m)ᵀ(k−m) / rows, m the mean of the key's page. A page is the 64
  tokens at absolute positions 64i … 64i+63, whatever the chunks. An incomplete last page does not count: the
  cache never codes one.
- value covariance: Σ vᵀv / rows − mᵀm, m the value mean.
- exact score-weighted value covariance C_S (the paper's): Σ oᵀo / rows over the attention outputs o of all
  query heads of the group.
- surrogate value covariance (the published code's): Σ w vᵀv / Σ w with w = k·M·kᵀ, where M is C_Q as it
  stood when `fix_surrogate_metric` was called.

Tokens at positions < skip_tokens (the sink, never coded) count for queries and outputs only.
"""

import dataclasses
import math

import numpy as np
import torch
from torch import Tensor

from ..core import cache_format as fmt
from ..core.config import check_head_dim
from ..core.errors import ConfigError, ShapeError
from ..rotations.statistics import LayerStatistics

_PAGE = fmt.PAGE_TOKENS
_BLOCK_ROWS = 1024  # of one product on a GPU


@dataclasses.dataclass(eq=False)
class StatisticsState:
    """Running sums of one layer, float64, on the device of the first rows.

    Moments are [K, D, D], sums [K, D], weights [K]. open_page [n, K, D] holds the keys of the page
    being filled, position the tokens of the current sequence so far. surrogate_metric is None until fixed.
    """

    query_moment: Tensor
    query_rows: int
    coded_query_moment: Tensor
    coded_query_weight: Tensor
    key_moment: Tensor
    key_rows: int
    key_sum: Tensor
    value_sum: Tensor
    value_moment: Tensor
    token_rows: int
    output_moment: Tensor
    output_rows: int
    surrogate_moment: Tensor
    surrogate_weight: Tensor
    surrogate_metric: Tensor | None
    open_page: Tensor
    position: int
    skip_tokens: int


def init_statistics(num_key_value_heads: int, head_dim: int, *, skip_tokens: int = 0) -> StatisticsState:
    """Empty sums, at position 0; skip_tokens is a multiple of 64. Raises ConfigError."""
    check_head_dim(head_dim)
    if skip_tokens < 0 or skip_tokens % _PAGE:
        raise ConfigError(f"skip_tokens = {skip_tokens}, allowed: multiples of {_PAGE}")

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    heads = num_key_value_heads
    return StatisticsState(
        query_moment=zeros(heads, head_dim, head_dim),
        query_rows=0,
        coded_query_moment=zeros(heads, head_dim, head_dim),
        coded_query_weight=zeros(heads),
        key_moment=zeros(heads, head_dim, head_dim),
        key_rows=0,
        key_sum=zeros(heads, head_dim),
        value_sum=zeros(heads, head_dim),
        value_moment=zeros(heads, head_dim, head_dim),
        token_rows=0,
        output_moment=zeros(heads, head_dim, head_dim),
        output_rows=0,
        surrogate_moment=zeros(heads, head_dim, head_dim),
        surrogate_weight=zeros(heads),
        surrogate_metric=None,
        open_page=zeros(0, heads, head_dim),
        position=0,
        skip_tokens=skip_tokens,
    )


def start_sequence(state: StatisticsState, position: int = 0) -> StatisticsState:
    """The same sums at the start of another sequence, or of its part from `position`, a multiple of 64."""
    if position < 0 or position % _PAGE:
        raise ConfigError(f"position = {position}, allowed: multiples of {_PAGE}")
    state.position = position
    state.open_page = state.open_page[:0]
    return state


def fix_surrogate_metric(state: StatisticsState) -> StatisticsState:
    """The same sums, with C_Q as of now the weight of all further rows in the surrogate covariance.

    Surrogate sums gathered under another metric are dropped. Raises ConfigError before any query was seen.
    """
    if state.query_rows == 0:
        raise ConfigError("the surrogate metric is the query covariance, but no query was seen yet")
    state.surrogate_metric = state.query_moment / state.query_rows
    state.surrogate_moment.zero_()
    state.surrogate_weight.zero_()
    return state


def update_statistics(
    state: StatisticsState,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor | None = None,
    coded_share: Tensor | None = None,
) -> StatisticsState:
    """The sums with the next T tokens of the sequence added: query [T, N, D], key and value [T, K, D].

    output [T, N, D], the layer's attention outputs before the output projection, adds to C_S; None leaves it.
    coded_share [T, N], of each query's attention what goes to tokens of INT2 pages, likewise.
    Any float dtype; sums are float64 on the rows' device, which is not waited for. Raises ShapeError.
    """
    heads, head_dim = state.key_sum.shape
    tokens = key.shape[0]
    if key.shape != (tokens, heads, head_dim) or value.shape != key.shape:
        raise ShapeError(
            f"key has shape {tuple(key.shape)}, value {tuple(value.shape)}, "
            f"expected [T, {heads}, {head_dim}] for both"
        )
    for name, rows in (("query", query), ("output", query if output is None else output)):
        if rows.ndim != 3 or rows.shape[0] != tokens or rows.shape[1] % heads or rows.shape[2] != head_dim:
            raise ShapeError(
                f"{name} has shape {tuple(rows.shape)}, "
                f"expected [{tokens}, a multiple of {heads}, {head_dim}]"
            )
    for field in dataclasses.fields(state):
        if isinstance(array := getattr(state, field.name), Tensor):
            setattr(state, field.name, array.to(key.device))

    first_counted = min(tokens, max(0, state.skip_tokens - state.position))
    counted_keys, counted_values = (_by_head(rows[first_counted:], heads) for rows in (key, value))
    queries = _by_head(query, heads)
    state.query_moment += _moment(queries, queries)
    state.query_rows += tokens * query.shape[1] // heads
    state.key_sum += counted_keys.sum(dim=1)
    state.value_sum += counted_values.sum(dim=1)
    state.value_moment += _moment(counted_values, counted_values)
    state.token_rows += tokens - first_counted
    if coded_share is not None:
        if coded_share.shape != query.shape[:2]:
            raise ShapeError(
                f"coded_share has shape {tuple(coded_share.shape)}, expected {tuple(query.shape[:2])}"
            )
        share = _by_head(coded_share[..., None], heads)
        state.coded_query_moment += _moment(queries * share, queries)
        state.coded_query_weight += share.sum(dim=(1, 2))
    if output is not None:
        outputs = _by_head(output, heads)
        state.output_moment += _moment(outputs, outputs)
        state.output_rows += tokens * output.shape[1] // heads
    if state.surrogate_metric is not None:
        weight = ((counted_keys @ state.surrogate_metric) * counted_keys).sum(dim=-1)
        state.surrogate_moment += _moment(counted_values * weight[..., None], counted_values)
        state.surrogate_weight += weight.sum(dim=1)
    _add_pages(state, key)
    state.position += tokens
    return state


def merge_statistics(first: StatisticsState, second: StatisticsState) -> StatisticsState:
    """The sums of both, between sequences: the open pages of either are dropped.

    Raises ConfigError if they differ in skip_tokens or in the surrogate metric, ShapeError in geometry.
    """
    if first.key_sum.shape != second.key_sum.shape:
        raise ShapeError(
            f"statistics of [K, D] {tuple(first.key_sum.shape)} and {tuple(second.key_sum.shape)} "
            "do not merge"
        )
    if first.skip_tokens != second.skip_tokens:
        raise ConfigError(f"skip_tokens = {first.skip_tokens} and {second.skip_tokens} do not merge")
    metrics = (first.surrogate_metric, second.surrogate_metric)
    if (metrics[0] is None) != (metrics[1] is None) or (
        metrics[0] is not None and metrics[1] is not None and not torch.equal(metrics[0], metrics[1])
    ):
        raise ConfigError("statistics weighed by different surrogate metrics do not merge")
    for field in dataclasses.fields(StatisticsState):
        if field.name.endswith(("_moment", "_sum", "_rows", "_weight")):
            setattr(first, field.name, getattr(first, field.name) + getattr(second, field.name))
    return start_sequence(first)


def finalize_statistics(state: StatisticsState) -> LayerStatistics:
    """The covariances and means, float64; ConfigError unless a full page was seen."""
    if state.key_rows == 0:
        raise ConfigError(f"no full page of {_PAGE} counted keys was seen, nothing can be fitted")
    tokens = state.token_rows
    value_mean = state.value_sum / tokens
    weight = state.surrogate_weight[:, None, None]
    coded = state.coded_query_weight[:, None, None]

    def array(values: Tensor) -> np.ndarray:
        return values.cpu().numpy()

    return LayerStatistics(
        query_covariance=array(state.query_moment / state.query_rows),
        key_covariance=array(state.key_moment / state.key_rows),
        key_mean=array(state.key_sum / tokens),
        value_mean=array(value_mean),
        value_covariance=array(state.value_moment / tokens - value_mean[:, :, None] * value_mean[:, None, :]),
        surrogate_value_covariance=(
            array(state.surrogate_moment / weight) if bool((weight > 0).all()) else None
        ),
        exact_value_covariance=array(state.output_moment / state.output_rows) if state.output_rows else None,
        tokens=tokens,
        coded_query_covariance=array(state.coded_query_moment / coded) if bool((coded > 0).all()) else None,
    )


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """[T, N, D] -> float64 [K, T·G, D]: query head n belongs to key/value head n // G."""
    tokens, all_heads, width = rows.shape
    grouped = rows.reshape(tokens, heads, all_heads // heads, width).transpose(0, 1)
    grouped = grouped.to(torch.float64, memory_format=torch.contiguous_format)
    return grouped.reshape(heads, tokens * all_heads // heads, width)


def _moment(left: Tensor, right: Tensor) -> Tensor:
    """Σ leftᵀ right for rows [K, R, D] -> [K, D, D]."""
    block = math.gcd(left.shape[1], _BLOCK_ROWS)
    if left.device.type == "cpu" or block < _PAGE:
        return left.mT @ right
    # One product of many rows has few tiles of output, and most of a GPU would idle.
    left, right = (rows.unflatten(1, (-1, block)) for rows in (left, right))
    return (left.mT @ right).sum(dim=1)


def _add_pages(state: StatisticsState, keys: Tensor) -> None:
    """Adds the pages now complete, minus their page's mean; the rest waits in the open page."""
    rows = torch.cat([state.open_page, keys.double()])
    complete = len(rows) // _PAGE
    pages = rows[: complete * _PAGE].unflatten(0, (complete, _PAGE))
    state.open_page = rows[complete * _PAGE :].clone()
    pages = pages[max(0, state.skip_tokens // _PAGE - state.position // _PAGE) :]
    centered = _by_head((pages - pages.mean(dim=1, keepdim=True)).flatten(0, 1), state.key_sum.shape[0])
    state.key_moment += _moment(centered, centered)
    state.key_rows += len(pages) * _PAGE
