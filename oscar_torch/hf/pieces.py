"""A prompt in pieces: attention of each, then its rows into the cache, with lengths known on the host.

A piece ends where the length of its sequence is a multiple of the chunk size, so that a row's result depends
on its own tokens only. `cache.append_rows` asks the device which rows go where; here the host knows the
lengths, so the places of a piece's rows are worked out once, uploaded once, and serve every layer.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..cache import check_rows
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..layer_cache import DenseCache, LayerCache, recent_slot
from ..quantize import round_to_bfloat16
from .rows import chunk_attention

PAGE = fmt.PAGE_TOKENS
PIECES_KEPT = 128  # a layer goes through all pieces of a prompt before the next asks for the same


class Places(NamedTuple):
    """Where the rows of a piece go: int64 on the device, M pages to quantize and R rows that stay BF16."""

    new_lengths: Tensor  # int32 [B]
    history: Tensor  # int32 [B], INT2 pages per sequence afterwards
    page_sequence: Tensor  # [M]
    page_slot: Tensor  # [M] window slot where the page is, or would be
    page_number: Tensor  # [M] its place among the sequence's INT2 pages
    page_step: Tensor  # [M, 64] the row of the piece that is each of its tokens
    page_is_new: Tensor  # bool [M, 64] whether that row is in the piece, else in the window
    row_sequence: Tensor  # [R]
    row_step: Tensor  # [R] row of the piece
    row_slot: Tensor  # [R] window slot
    row_token: Tensor  # [R] token within its page


class RingPlaces(NamedTuple):
    """Where the rows of a piece go in a ring, or in plain rows: int64 [R] on the device."""

    new_lengths: Tensor  # int32 [B]
    row_sequence: Tensor
    row_step: Tensor
    row_slot: Tensor


def attend_in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    *,
    counts: list[int],
    lengths: list[int],
    store: LayerCache | DenseCache,
    rotation: Any,
    prefill_chunk: int,
    implementation: str | None,
    softmax_scale: float,
    sliding_window: int | None = None,
    sink_logits: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attends to a prompt and stores it: query [B, T, N, D], key, value [B, T, K, D] -> like query.

    `real` bool [B, T] marks tokens among padding (None: all are tokens), `counts` are its sums; padding
    yields zeros. `lengths` are what `store` holds, in which there is room. Raises ShapeError or DTypeError.
    """
    batch, columns = query.shape[:2]
    device = query.device
    check_rows(store, key, value, store.lengths)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "sliding_window": sliding_window, "sink_logits": sink_logits,
        "softcap": softcap,
    }  # fmt: skip
    together = real is None and len(set(lengths)) == 1
    order = None
    if real is not None:  # columns of the tokens first, in their order
        order = (~real).to(torch.int8).argsort(dim=1, stable=True)
    rows = torch.arange(batch, device=device)[:, None]
    out = torch.empty_like(query) if together else torch.zeros_like(query)
    done = [0] * batch
    while done != counts:
        now = [length + n for length, n in zip(lengths, done)]
        take = [
            min(count - n, prefill_chunk - length % prefill_chunk)
            for count, n, length in zip(counts, done, now)
        ]
        places = _places_of(store, tuple(now), tuple(take), device)
        if together:  # every sequence is at the same column
            part = slice(done[0], done[0] + take[0])
            piece = query[:, part], key[:, part], value[:, part]
        else:
            step = torch.arange(max(take), device=device)
            column = (_integers(tuple(done), device)[:, None] + step).clamp(max=columns - 1)
            column = column if order is None else order.gather(1, column)
            piece = query[rows, column], key[rows, column], value[rows, column]
        stored = store
        if isinstance(store, LayerCache):
            known = [(length, store.config.history_pages(length)) for length in now]
            stored = ops.counted(store, known, whole=together)
        result = chunk_attention(
            *piece, stored, rotation, new_lengths=places.new_lengths, implementation=implementation, **options
        )
        if together:
            out[:, part] = result
        else:
            sequence, index = _tokens_of(tuple(take), device)
            out[sequence, column[sequence, index]] = result[sequence, index]
        _store_rows(store, rotation, *piece[1:], places, implementation, now[0] if together else None)
        done = [n + t for n, t in zip(done, take)]
    return out


def _store_rows(
    store: LayerCache | DenseCache,
    rotation: Any,
    key: Tensor,
    value: Tensor,
    places: Places | RingPlaces,
    implementation: str | None,
    length: int | None,
) -> None:
    """`cache.append_rows` with its answers given; length: what every sequence holds, if all hold the same."""
    if isinstance(store, DenseCache):
        assert isinstance(places, RingPlaces)
        for array, new in ((store.key, key), (store.value, value)):
            rows = new[places.row_sequence, places.row_step]
            array[places.row_sequence, places.row_slot] = rows.to(array.dtype)
        store.lengths += places.new_lengths
        return
    assert isinstance(places, Places)
    key, value = round_to_bfloat16(key), round_to_bfloat16(value)
    if places.page_sequence.numel():
        destination = store.page_table[places.page_sequence, places.page_number].long()
        pages = (
            _pages_by_place(store, key, value, places)
            if length is None
            else _pages(store, key, value, length)
        )
        quantized = ops.quantize_pages(pages[0], pages[1], rotation, implementation=implementation)
        for name, array in quantized.items():
            getattr(store, name)[destination] = array
    target = store.window_table[places.row_sequence, places.row_slot]
    for array, new in ((store.window_key, key), (store.window_value, value)):
        array[target, :, places.row_token] = new[places.row_sequence, places.row_step]
    store.lengths += places.new_lengths
    store.history_pages.copy_(places.history)


def _pages_by_place(store: LayerCache, key: Tensor, value: Tensor, places: Places) -> list[Tensor]:
    """Rows of the pages to quantize, [M, 64, K, D] of keys and of values."""
    source = store.window_table[places.page_sequence, places.page_slot]
    is_new = places.page_is_new[..., None, None]
    pages = []
    for new, old in ((key, store.window_key), (value, store.window_value)):
        rows = new[places.page_sequence[:, None], places.page_step]
        pages.append(torch.where(is_new, rows, old[source].transpose(1, 2)))
    return pages


def _pages(store: LayerCache, key: Tensor, value: Tensor, length: int) -> list[Tensor]:
    """The same where every sequence holds `length` tokens: stored rows, then new ones, none by its index."""
    config, batch, tokens = store.config, *key.shape[:2]
    before, after = config.history_pages(length), config.history_pages(length + tokens)
    first, end = ((config.sink_pages + pages) * PAGE for pages in (before, after))
    stored = range(first // PAGE, -(-min(length, end) // PAGE))
    slots = [recent_slot(page, config) for page in stored]
    pages = []
    for new, old in ((key, store.window_key), (value, store.window_value)):
        rows = new[:, max(0, first - length) : max(0, end - length)]
        if slots:
            kept = torch.stack([old[store.window_table[:, slot].long()] for slot in slots], dim=1)
            kept = kept.transpose(2, 3).flatten(1, 2)[:, : min(length, end) - first]
            rows = torch.cat([kept, rows], dim=1)
        pages.append(rows.reshape(batch * (after - before), PAGE, *rows.shape[2:]))
    return pages


def _places_of(
    store: LayerCache | DenseCache, lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device
) -> Places | RingPlaces:
    if isinstance(store, DenseCache):
        return _ring_places(store.key.shape[1], lengths, counts, device, stream_of(device))
    return _places(store.config, lengths, counts, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """What has been uploaded on one stream must not be used on another."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@functools.lru_cache(maxsize=PIECES_KEPT)
def _places(
    config: CacheConfig, lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device, stream: int
) -> Places:
    """The places of `counts` new rows behind `lengths` tokens; the layers of a model ask for the same."""
    after = [config.history_pages(length + count) for length, count in zip(lengths, counts)]
    pages, rows = [], []
    for b, (length, count) in enumerate(zip(lengths, counts)):
        number = np.arange(config.history_pages(length), after[b])
        page = config.sink_pages + number
        step = page[:, None] * PAGE + np.arange(PAGE) - length
        is_new = step >= 0
        step = np.clip(step, 0, max(count - 1, 0))
        pages.append([np.full_like(page, b), recent_slot(page, config), number, step, is_new])
        token = length + np.arange(count)
        page = token // PAGE
        stays = (page < config.sink_pages) | (page >= config.sink_pages + after[b])
        slot = np.where(page < config.sink_pages, page, recent_slot(page, config))
        rows.append([x[stays] for x in (np.full_like(token, b), np.arange(count), slot, token % PAGE)])
    joined = [np.concatenate(arrays) for arrays in (*zip(*pages), *zip(*rows))]
    head = [np.array(counts), np.array(after)]
    arrays = _upload([*head, *joined], device)
    arrays[0], arrays[1] = arrays[0].int(), arrays[1].int()
    arrays[6] = arrays[6].bool()
    return Places(*arrays)


@functools.lru_cache(maxsize=PIECES_KEPT)
def _ring_places(
    slots: int, lengths: tuple[int, ...], counts: tuple[int, ...], device: torch.device, stream: int
) -> RingPlaces:
    """The places in a ring: of a piece longer than the ring only the last rows are written."""
    rows = []
    for b, (length, count) in enumerate(zip(lengths, counts)):
        step = np.arange(max(0, count - slots), count)
        rows.append([np.full_like(step, b), step, (length + step) % slots])
    arrays = _upload([np.array(counts), *(np.concatenate(a) for a in zip(*rows))], device)
    arrays[0] = arrays[0].int()
    return RingPlaces(*arrays)


@functools.lru_cache(maxsize=PIECES_KEPT)
def _tokens_on(counts: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    sequence = np.repeat(np.arange(len(counts)), counts)
    index = np.concatenate([np.arange(count) for count in counts])
    first, second = _upload([sequence, index], device)
    return first, second


def _tokens_of(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and index of the first counts[b] rows of every sequence, int64."""
    return _tokens_on(counts, device, stream_of(device))


def _integers(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=4)
def on_device(
    rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int, transposed: bool = True
) -> Tensor:
    """A table of integers, int64, or its columns: uploaded once for all layers that ask for the same."""
    table = torch.tensor(rows, dtype=torch.int64)
    return (table.T.contiguous() if transposed else table).to(device)


def _upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays on the device as int64, in one transfer."""
    flat = torch.from_numpy(np.concatenate([a.ravel() for a in arrays]).astype(np.int64)).to(device)
    parts = flat.split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays)]
