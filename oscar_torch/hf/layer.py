"""The 2-bit cache of one attention layer of a transformers model.

transformers hands new keys and values to `Cache.update` and then calls the attention function with what
`update` returned. An ordinary cache returns all keys; an INT2 cache must not (that would be the dequantized
history), so here `update` only notes which layer comes next, and the attention function makes the one call
that stores the rows and attends: `cache.attend`.

Padding. The mask function passes on which of the new columns are tokens. Only those are stored, so sequences
are ragged inside the cache, and the layout of each depends on its own length alone. `get_seq_length` still
counts columns, since transformers aligns its attention mask with them.
"""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..arithmetic import exact_arithmetic
from ..cache import allocate_dense_cache, allocate_layer_cache, append_rows
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import CacheFullError, ConfigError, ShapeError
from ..core.page_pool import QuantizedTokensError
from ..layer_cache import DenseCache, LayerCache
from ..rotations.rotation import LayerRotation
from .handover import announce, interrupted, request_mask
from .held_pages import HeldPages
from .pieces import attend_in_pieces, on_device, stream_of
from .rows import append_to_ring, append_token, decode_attention

ATTENTION = "oscar"  # the name for attn_implementation
PREFILL_CHUNK = 8192  # prompts are attended to in pieces that end at multiples of this
RING_SLACK = fmt.PAGE_TOKENS  # tokens a ring keeps beyond its window, so that `crop` can go back
GROW_PAGES = 4  # spare INT2 pages per sequence when a pool grows


class OscarLayer(CacheLayerMixin):
    """The cache of one attention layer: INT2 pages between BF16 windows, or a BF16 ring.

    `rotation` None means a BF16 cache: a ring for `sliding_window`, else `max_length` rows.
    """

    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        layer_id: int,
        config: CacheConfig,
        rotation: LayerRotation | None,
        *,
        sliding_window: int | None = None,
        max_length: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        implementation: str | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.config = config
        self.rotation = rotation
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.max_length = max_length
        self.prefill_chunk = prefill_chunk
        self.implementation = implementation
        self.record_past = False
        self.prompt_columns = 0
        self._clear()

    def _clear(self) -> None:
        self.store: LayerCache | DenseCache | None = None
        self.pages: HeldPages | None = None  # who holds the INT2 pages of a growing store
        self._one_each: Tensor | None = None
        self.is_initialized = False
        self.lengths: list[int] = []  # tokens per sequence; the store has the same on its device
        self.reached: list[int] = []  # the length that each ring has been written up to
        self.columns = 0  # what transformers counts: tokens and padding
        self.chunks: list[int | Tensor] = []  # columns that are all tokens, or a bool [B, T] that tells
        self.writing: list[int] | None = None  # while rows are being stored: the lengths they lead to
        self._forget()

    # What transformers asks of a cache layer.

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates an empty store for key_states [B, K, T, D]; raises ShapeError for another geometry."""
        self._check_geometry(key_states, value_states)
        batch, device = key_states.shape[0], key_states.device
        if self.rotation is None:
            longest = self.max_length if self.sliding_window is None else torch.iinfo(torch.int32).max
            ring = None if self.sliding_window is None else self.sliding_window + RING_SLACK
            self.store = allocate_dense_cache(self.config, batch, longest or 1, ring, device=device)
        else:
            self.rotation = self.rotation.to(device)
            self.store = _allocate_int2(self.config, batch, self.max_length, device)
            self.pages = HeldPages(batch, self.store.key_codes.shape[0] - 1, self.store.page_table.shape[1])
        self.lengths = [0] * batch
        self.reached = [0] * batch
        self.is_initialized = True

    def _check_geometry(self, key_states: Tensor, value_states: Tensor) -> None:
        heads, head_dim = key_states.shape[1::2]
        expected = self.config.num_key_value_heads, self.config.head_dim
        if (heads, head_dim) != expected or key_states.shape != value_states.shape:
            raise ShapeError(
                f"layer {self.layer_id}: keys have (heads, head_dim) {(heads, head_dim)}, values "
                f"{tuple(value_states.shape[1::2])}, the rotations and the config say {expected}"
            )

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Notes that this layer's attention comes next; the rows are stored there."""
        announce(self, key_states)
        return key_states, value_states

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the attention mask covers, and its offset."""
        request_mask(self, self.columns, query_length)
        return self.columns + query_length, 0

    def new_tokens(self, attention_mask: Tensor | None, new_columns: int) -> Tensor | None:
        """Which of the new columns are tokens: bool [B, new_columns], or None for all of them.

        `attention_mask` [B, stored and new columns]. Raises ConfigError if it wants to see stored columns
        differently than when they came: what was padding is not stored, what was a token is attended to.
        """
        mask = None if attention_mask is None else attention_mask.to(torch.bool)
        padded = not all(isinstance(chunk, int) for chunk in self.chunks)
        if not padded and (mask is None or bool(mask.all())):
            return None
        if mask is None:
            raise ConfigError(
                f"attention_mask = None over {self.columns} stored columns with padding among them, "
                "allowed: the mask of all columns"
            )
        stored = self._stored_mask(mask)
        if not torch.equal(mask[:, : self.columns], stored):
            b, column = (mask[:, : self.columns] != stored).nonzero()[0].tolist()
            raise ConfigError(
                f"attention mask {int(mask[b, column])} for stored column {column} of sequence {b}, "
                f"allowed: {int(stored[b, column])}, as when it was stored "
                "(crop the cache to forget the latest columns)"
            )
        new = mask[:, self.columns :]
        return None if bool(new.all()) else new

    def _stored_mask(self, mask: Tensor) -> Tensor:
        """Which of the stored columns are tokens, bool [B, columns] on the device of `mask`."""
        parts = [
            mask.new_ones(len(mask), chunk) if isinstance(chunk, int) else chunk.to(mask.device)
            for chunk in self.chunks
        ]
        return torch.cat([mask.new_ones(len(mask), 0), *parts], dim=1)

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """Tokens a sequence can have, -1 for no limit."""
        return -1 if self.max_length is None else self.max_length

    @property
    def batch_size(self) -> int:
        """Number of sequences, -1 before the first."""
        return len(self.lengths) or -1

    def reset(self) -> None:
        """Forgets everything and frees the store."""
        self._clear()

    def offload(self) -> None:
        """Refused: the pages stay where the model is."""
        raise ConfigError(f"layer {self.layer_id}: offloading = True, allowed: False for an OscarCache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequence i continue what sequence beam_idx[i] holds."""
        self.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences `indices` (or those where a bool mask is True)."""
        indices = torch.as_tensor(indices)
        self.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times; INT2 pages are shared, not copied."""
        self.select(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def activate_past_recording(self, prompt_columns: int = 0) -> None:
        """From now on keeps what a `crop` of the latest rows needs to be exact across a quantized page.

        After `prompt_columns`, the rest of a prompt, further columns are drafts: attended to one by one, so
        that each sees what it would see in decoding.
        """
        self.record_past = True
        self.prompt_columns = prompt_columns

    def deactivate_past_recording(self) -> None:
        """Ends `activate_past_recording`: further chunks are prompts."""
        self.record_past = False
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns, as if they had never come.

        Positive numbers are the length to keep, the older meaning of the argument. Raises
        QuantizedTokensError where a token is INT2 (or has left a ring) that a sequence of the new length
        holds in BF16; nothing is changed then.
        """
        self.remove(self.removable(tokens_to_remove))

    # Storing and attending.

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **options: Any
    ) -> Tensor:
        """Stores new rows and attends with them: query [B, T, N, D], key, value [B, T, K, D] -> like query.

        `real` bool [B, T] marks tokens among padding (None: all are tokens); padding yields zeros.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # leaving it turns gradients on
                return self._attend(query, key, value, real, **options)
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._attend(query, key, value, real, **options)
        return self._attend(query, key, value, real, **options)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **options: Any
    ) -> Tensor:
        batch, columns = query.shape[:2]
        if self.writing is not None:
            raise interrupted(self.columns)
        if columns == 1 and real is None and not self.record_past and batch == len(self.lengths):
            return self._attend_step(query, key, value, **options)
        if self.store is None:
            self.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        if batch != len(self.lengths):
            raise ShapeError(f"a batch of {batch} for a cache of {len(self.lengths)} sequences")
        if real is not None and tuple(real.shape) != (batch, columns):
            raise ShapeError(f"the padding mask is {tuple(real.shape)}, expected {(batch, columns)}")
        counts = [columns] * batch if real is None else real.sum(dim=1).tolist()
        self._reserve(counts)
        self.writing = [length + count for length, count in zip(self.lengths, counts)]
        options |= {"sliding_window": self.sliding_window, "implementation": self.implementation}
        drafts = self._draft_columns(columns)
        if drafts in (0, columns):
            out = self._attend_part(query, key, value, real, is_draft=drafts > 0, **options)
        else:
            outputs = []
            for part in (slice(0, columns - drafts), slice(columns - drafts, columns)):
                rows = query[:, part], key[:, part], value[:, part]
                mask = None if real is None else real[:, part]
                outputs.append(self._attend_part(*rows, mask, is_draft=part.start > 0, **options))
            out = torch.cat(outputs, dim=1)
        self.writing = None
        return out

    @exact_arithmetic
    def _attend_step(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """`attend` for one token of every sequence: the same, with nothing looked up that is known."""
        if not self._free_steps:
            self._reserve([1] * len(self.lengths))
            self._forget()
            self._free_steps = self._steps_without_pages()
        self._free_steps -= 1
        self.writing = after = [length + 1 for length in self.lengths]
        store, rotation = self.store, self.rotation
        if isinstance(store, LayerCache):
            append_token(store, rotation, key, value, self._ones(), self.implementation)
        else:
            assert store is not None
            append_to_ring(store, key, value, None)
        out = decode_attention(
            query[:, 0], store, rotation, sliding_window=self.sliding_window,
            implementation=self.implementation, **options,
        )[:, None]  # fmt: skip
        self.reached = after if self.reached == self.lengths else [max(n) for n in zip(self.reached, after)]
        self.lengths = after
        self.columns += 1
        if self.chunks and isinstance(self.chunks[-1], int):
            self.chunks[-1] += 1
        else:
            self.chunks.append(1)
        self.writing = None
        return out

    def _steps_without_pages(self) -> int:
        """How many tokens every sequence can have before `_reserve` has something to do again."""
        steps = 1 << 30
        if self.max_length is not None:
            steps = self.max_length - max(self.lengths)
        if isinstance(self.store, LayerCache):
            windows = self.config.sink_tokens + self.config.recent_tokens
            pages = [self.config.history_pages(length + 1) + 1 for length in self.lengths]
            steps = min(steps, *(windows + fmt.PAGE_TOKENS * p - 1 - n for p, n in zip(pages, self.lengths)))
        return steps

    def _attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        *,
        is_draft: bool,
        **options: Any,
    ) -> Tensor:
        """`attend` for a prompt, or for columns that are attended to one by one and may be taken back."""
        batch, columns = query.shape[:2]
        counts = [columns] * batch if real is None else real.sum(dim=1).tolist()
        if not is_draft:
            self._forget()
        elif self.record_past and self._snapshot is None:
            self._snapshot = {name: getattr(self.store, name).clone() for name in self._mutable()}
            self._snapshot_state = (list(self.lengths), list(self.reached), self.columns, list(self.chunks))
        if is_draft or columns == 1:
            out = self._attend_columns(query, key, value, real, **options)
        else:
            assert self.store is not None
            out = attend_in_pieces(
                query, key, value, real, counts=counts, lengths=self.lengths, store=self.store,
                rotation=self.rotation, prefill_chunk=self.prefill_chunk, **options,
            )  # fmt: skip
        self._count(counts, columns if real is None else real)
        if is_draft and self.record_past:
            self._recorded.append((key, value, real))
        return out

    def _ones(self) -> Tensor:
        """int32 [B] on the store's device: one new token for every sequence."""
        assert self.store is not None
        if self._one_each is None or self._one_each.shape != self.store.lengths.shape:
            self._one_each = torch.ones_like(self.store.lengths)
        return self._one_each

    def _draft_columns(self, columns: int) -> int:
        """How many of the new columns, the last ones, are drafts: to be verified as decoding would see them.

        Only while the past is recorded. The first forward of assisted decoding brings the rest of the prompt
        and drafts in one; where the length of the prompt is not known, a chunk of more than `recent_tokens`
        is a prompt.
        """
        if not self.record_past:
            return 0
        if not self.prompt_columns:
            return columns if columns <= self.config.recent_tokens else 0
        prompt = min(self.prompt_columns, columns)
        self.prompt_columns -= prompt
        # A single column is a decoding step, whoever sends it.
        return columns if prompt == 1 else columns - prompt

    def _attend_columns(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **options: Any
    ) -> Tensor:
        """Attends with one column after the other, each stored before the next: decoding, in one call."""
        assert self.store is not None
        outputs = []
        for t in range(query.shape[1]):
            column = slice(t, t + 1)
            new_lengths = self._ones() if real is None else real[:, t].to(torch.int32)
            if isinstance(self.store, LayerCache):  # `_reserve` has found room
                append_token(
                    self.store, self.rotation, key[:, column], value[:, column], new_lengths,
                    self.implementation,
                )  # fmt: skip
            else:
                append_to_ring(self.store, key[:, column], value[:, column], new_lengths)
            out = decode_attention(query[:, t], self.store, self.rotation, **options)[:, None]
            outputs.append(out if real is None else out * real[:, column, None, None])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _reserve(self, counts: list[int]) -> None:
        """Finds INT2 pages for the tokens to come, enlarging the pool; raises before anything is changed."""
        after = [length + count for length, count in zip(self.lengths, counts)]
        if self.max_length is not None and max(after) > self.max_length:
            raise CacheFullError(
                f"layer {self.layer_id}: a sequence would have {max(after)} tokens, "
                f"max_length = {self.max_length}"
            )
        if not isinstance(self.store, LayerCache):
            return
        before = [self.config.history_pages(length) for length in self.lengths]
        needed = [self.config.history_pages(length) for length in after]
        if needed == before:
            return
        assert self.pages is not None
        # Pages written by one append must be different ones, and a window must have passed.
        kept, pages = self._window_pages(), self.pages
        apart = None if kept is None else max(kept, self.prefill_chunk // fmt.PAGE_TOKENS + 1)
        if kept is not None:
            for b, (reached, end) in enumerate(zip(self.reached, before)):
                pages.keep(b, min(self._first_page(reached), end), end)
        missing = pages.missing(before, needed, apart)
        if missing > 0:
            missing += GROW_PAGES * len(counts) if self.max_length is None else 0
            self.store = _enlarged(self.store, missing)
            pages.grow(missing)
        entries = tuple(pages.take(before, needed, apart))
        device = self.store.page_table.device
        if kept is None and len(pages.tables[0]) == self.store.page_table.shape[1]:
            sequence, page, place = on_device(entries, device, stream_of(device))
            self.store.page_table[sequence, page] = place.int()
        else:
            rows = tuple(map(tuple, pages.tables))
            self.store.page_table = on_device(rows, device, stream_of(device), transposed=False).int()

    def _window_pages(self) -> int | None:
        """INT2 pages that a sliding window can reach, also after a crop of `recent_tokens`; None: all."""
        return None if self.sliding_window is None else -(-self.sliding_window // fmt.PAGE_TOKENS) + 1

    def _first_page(self, reached: int) -> int:
        """The first INT2 page still kept of a sequence that was written up to `reached` tokens."""
        kept = self._window_pages()
        return 0 if kept is None else max(0, self.config.history_pages(reached) - kept)

    def _count(self, counts: list[int], chunk: int | Tensor) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]
        self.reached = [max(pair) for pair in zip(self.reached, self.lengths)]
        self.columns += chunk if isinstance(chunk, int) else chunk.shape[1]
        if isinstance(chunk, int) and self.chunks and isinstance(self.chunks[-1], int):
            chunk += self.chunks.pop()
        self.chunks.append(chunk)

    # Taking back.

    def removable(self, tokens_to_remove: int) -> "Removal":
        """What `crop(tokens_to_remove)` takes away; raises, without changing anything, if it cannot."""
        tokens_to_remove = int(tokens_to_remove)  # some callers pass a 0-dimensional tensor
        if tokens_to_remove > 0:
            tokens_to_remove = -max(0, self.columns - tokens_to_remove)
        columns = min(-tokens_to_remove, self.columns)
        tokens = self._tokens_in_last(columns)
        if self.writing is not None:  # and what an interrupted step may have stored
            tokens = [n + after - before for n, after, before in zip(tokens, self.writing, self.lengths)]
        removal = Removal(columns, tokens, by_replay=False)
        if self.store is None or not any(tokens):
            return removal
        refusal = self._refusal(tokens)
        if refusal is None:
            return removal
        recorded = sum(key.shape[1] for key, _, _ in self._recorded)
        if self._snapshot is None or columns > recorded:
            raise QuantizedTokensError(refusal)
        # Going back brings BF16 rows again, but no INT2 page whose place was reused meanwhile.
        for b, removed in enumerate(tokens):
            if isinstance(self.store, LayerCache) and (lost := self._lost(b, removed)) is not None:
                raise QuantizedTokensError(lost)
        return dataclasses.replace(removal, by_replay=True)

    @torch.inference_mode(False)
    def remove(self, removal: "Removal") -> None:
        """Executes a removal."""
        if removal.by_replay:
            self._replay(removal.columns)
        elif removal.columns or self.writing is not None:
            self._drop_columns(removal.columns)
            written = self.writing or self.lengths
            self.reached = [max(pair) for pair in zip(self.reached, written)]
            self.lengths = [length - n for length, n in zip(written, removal.tokens)]
            if self.store is not None:
                self.store.lengths.copy_(_int32(self.lengths, self.store.lengths.device))
                if isinstance(self.store, LayerCache):
                    history = [self.config.history_pages(length) for length in self.lengths]
                    self.store.history_pages.copy_(_int32(history, self.store.lengths.device))
                    self._drop_pages(history)
                    # Without INT2 pages nothing is lost behind a window: they all come anew.
                    self.reached = [
                        r if pages else n for r, n, pages in zip(self.reached, self.lengths, history)
                    ]
        self.writing = None
        self._forget()

    def _refusal(self, tokens: list[int]) -> str | None:
        """Why the last tokens[b] tokens of the sequences cannot be removed exactly, or None if they can."""
        for b, (length, removed) in enumerate(zip(self.writing or self.lengths, tokens)):
            left = length - removed
            if isinstance(self.store, LayerCache):
                history, wanted = self.config.history_pages(length), self.config.history_pages(left)
                if left > self.config.sink_tokens and history != wanted:
                    first, end = self.config.sink_tokens, self.config.sink_tokens + fmt.PAGE_TOKENS * history
                    return (
                        f"cannot cut sequence {b} of layer {self.layer_id} from {length} to {left} tokens: "
                        f"tokens {first}..{end - 1} are quantized, a sequence of {left} tokens has "
                        f"{wanted} INT2 pages, not {history}"
                    )
                if (lost := self._lost(b, removed)) is not None:
                    return lost
            elif isinstance(self.store, DenseCache) and self.sliding_window is not None:
                slots = self.store.key.shape[1]
                oldest = max(0, max(self.reached[b], length) - slots)
                if removed and max(0, left - self.sliding_window + 1) < oldest:
                    return (
                        f"cannot cut sequence {b} of layer {self.layer_id} from {length} to {left} tokens: "
                        f"its ring goes back to token {oldest}, a window of {self.sliding_window} needs more"
                    )
        return None

    def _lost(self, sequence: int, removed: int) -> str | None:
        """Why a sequence without its last tokens would attend to an INT2 page kept no longer, or None."""
        if self.sliding_window is None or not removed:
            return None
        length = (self.writing or self.lengths)[sequence]
        left = length - removed
        reached = max(self.reached[sequence], self.lengths[sequence])
        oldest = max(0, left - self.sliding_window + 1 - self.config.sink_tokens) // fmt.PAGE_TOKENS
        if not oldest < min(self.config.history_pages(left), self._first_page(reached)):
            return None
        return (
            f"cannot cut sequence {sequence} of layer {self.layer_id} from {length} to {left} tokens: "
            f"its window of {self.sliding_window} needs INT2 page {oldest}, whose place was reused"
        )

    def _tokens_in_last(self, columns: int) -> list[int]:
        """How many of each sequence's last columns are tokens."""
        tokens = [0] * len(self.lengths)
        for chunk in reversed(self.chunks):
            if columns <= 0:
                break
            if isinstance(chunk, int):
                tokens = [n + min(columns, chunk) for n in tokens]
                columns -= chunk
            else:
                tokens = [n + m for n, m in zip(tokens, chunk[:, -columns:].sum(dim=1).tolist())]
                columns -= chunk.shape[1]
        return tokens

    def _drop_columns(self, columns: int) -> None:
        self.columns -= columns
        while columns:
            chunk = self.chunks.pop()
            size = chunk if isinstance(chunk, int) else chunk.shape[1]
            if size > columns:
                self.chunks.append(chunk - columns if isinstance(chunk, int) else chunk[:, :-columns])
            columns -= min(size, columns)

    def _drop_pages(self, history: list[int]) -> None:
        """Releases INT2 pages from the end; sequence b keeps its first history[b]."""
        assert self.pages is not None
        for b, end in enumerate(history):
            self.pages.keep(b, 0, end)

    def _mutable(self) -> tuple[str, ...]:
        if isinstance(self.store, LayerCache):
            return ("window_key", "window_value", "lengths", "history_pages")
        return ("key", "value", "lengths")

    def _replay(self, columns: int) -> None:
        """Goes back to the snapshot and stores again the recorded columns except the last `columns`."""
        assert self._snapshot is not None and self.store is not None
        for name, array in self._snapshot.items():
            setattr(self.store, name, array)
        reached = self.reached
        self.lengths, self.reached, self.columns, self.chunks = self._snapshot_state
        if isinstance(self.store, LayerCache):  # places of INT2 pages were reused, a ring is as it was
            self.reached = reached
            self._drop_pages([self.config.history_pages(length) for length in self.lengths])
        keep = sum(key.shape[1] for key, _, _ in self._recorded) - columns
        for key, value, real in self._recorded:
            size = min(keep, key.shape[1])
            keep -= size
            if not size:
                break
            part = None if real is None else real[:, :size]
            counts = [size] * len(self.lengths) if part is None else part.sum(dim=1).tolist()
            key, value = _tokens_first(key[:, :size], part), _tokens_first(value[:, :size], part)
            self._reserve(counts)
            assert self.store is not None
            self.store = append_rows(
                self.store, self.rotation, key, value, _int32(counts, key.device),
                implementation=self.implementation,
            )  # fmt: skip
            self._count(counts, size if part is None else part)

    def _forget(self) -> None:
        self._free_steps = 0  # tokens that every sequence can have with the pages that the table names
        self._snapshot: dict[str, Tensor] | None = None
        self._snapshot_state: Any = None  # the host-side state beside it
        self._recorded: list[tuple[Tensor, Tensor, Tensor | None]] = []

    # Other batches.

    @torch.inference_mode(False)
    def select(self, indices: Tensor) -> None:
        """Makes the batch the sequences `indices`, repeated or left out as given.

        INT2 pages never change, so sequences name the same ones; BF16 pages are copied.
        """
        if self.store is None:
            return
        indices = indices.to(self.store.lengths.device, torch.int64)
        if isinstance(self.store, DenseCache):
            names: tuple[str, ...] = ("key", "value", "lengths")
        else:
            names = ("page_table", "lengths", "history_pages")
            slots = self.store.window_table.shape[1]
            for name in fmt.WINDOW_ARRAYS:
                window = getattr(self.store, name)
                pages = window[self.store.window_table[indices].flatten().long()]
                setattr(self.store, name, torch.cat([window[:1], pages]))
            self.store.window_table = _window_table(len(indices), slots, indices.device)
        for name in names:
            setattr(self.store, name, getattr(self.store, name)[indices])
        chosen = indices.tolist()
        if self.pages is not None:
            self.pages.select(chosen)
        self.lengths = [self.lengths[b] for b in chosen]
        self.reached = [self.reached[b] for b in chosen]
        self.chunks = [c if isinstance(c, int) else c[indices.to(c.device)] for c in self.chunks]
        self._forget()

    @torch.inference_mode(False)
    def copy(self) -> "OscarLayer":
        """An independent layer of the same content; the rotation is shared."""
        twin = copy.copy(self)
        twin.lengths, twin.reached = list(self.lengths), list(self.reached)
        twin.chunks = list(self.chunks)
        twin._forget()
        twin.pages = None if self.pages is None else self.pages.copy()
        if self.store is not None:
            arrays = {k: v.clone() for k, v in vars(self.store).items() if isinstance(v, Tensor)}
            twin.store = dataclasses.replace(self.store, **arrays)
        return twin


@dataclasses.dataclass(frozen=True)
class Removal:
    """Columns to remove from the end, how many tokens of each sequence they hold, and how it is done."""

    columns: int
    tokens: list[int]
    by_replay: bool


# Small arrays.


def _int32(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _window_table(batch: int, slots: int, device: torch.device) -> Tensor:
    """Every sequence its own BF16 pages, in order; page 0 is reserved."""
    return 1 + torch.arange(batch * slots, dtype=torch.int32, device=device).reshape(batch, slots)


def _allocate_int2(
    config: CacheConfig, batch: int, max_length: int | None, device: torch.device
) -> LayerCache:
    """An empty LayerCache with all BF16 pages, and INT2 pages for `max_length` tokens or none yet."""
    pages = 1 if max_length is None else 1 + batch * config.history_pages(max_length)
    store = allocate_layer_cache(
        config,
        batch,
        max_length or 1,
        num_pages=pages,
        num_window_pages=1 + batch * config.window_slots,
        device=device,
    )
    store.window_table = _window_table(batch, config.window_slots, device)
    return store


def _enlarged(store: LayerCache, extra: int) -> LayerCache:
    """The same cache with `extra` further INT2 pages; an interruption leaves the old one whole."""
    old = {name: getattr(store, name) for name in fmt.INT2_ARRAYS}
    new = {name: torch.cat([a, a.new_zeros((extra, *a.shape[1:]))]) for name, a in old.items()}
    return dataclasses.replace(store, **new)


def _tokens_first(rows: Tensor, real: Tensor | None) -> Tensor:
    """Rows [B, T, ...] with those of tokens moved to the front, in their order."""
    if real is None:
        return rows
    order = (~real).to(torch.int8).argsort(dim=1, stable=True)
    return rows[torch.arange(len(rows), device=rows.device)[:, None], order]
