"""The static mode of an OscarCache (`max_length` given): all state on the device, at addresses that stay.

A decode step neither waits for the device nor builds a table: every sequence owns its pages, the append
kernel decides which page a row goes to and which page leaves, lengths are device tensors. So `generate` can
compile the step and replay it as a CUDA graph, and without a compiler nothing waits either. Prompts and
everything that changes what is stored (crop, select) may ask the device.

The host knows, in one `Ledger` per cache, how many columns transformers has handed over. That is enough to
say before a step that the longest sequence may not fit; only then are the exact lengths read.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from ..cache import append_rows
from ..core import cache_format as fmt
from ..core.errors import CacheFullError, ConfigError, ShapeError
from ..core.page_pool import QuantizedTokensError
from ..layer_cache import LayerCache
from ..rotations.rotation import FEEDBACKS
from .handover import announce, interrupted, request_mask
from .layer import RING_SLACK, OscarLayer, Removal, _int32, _tokens_first
from .pieces import attend_in_pieces
from .static_state import (
    Layout,
    State,
    decode_step,
    decode_step_op,
    new_state,
    open_state,
    pin,
    write_layout,
)


class Traced:
    """While a compiler traces: whose keys, and whose mask, come next. One thread traces at a time."""

    layer: "StaticLayer | None" = None
    mask_layer: "StaticLayer | None" = None


traced = Traced()


class Columns:
    """Columns whose tokens only the device has counted: how many, and each sequence's tokens in them."""

    def __init__(self, count: int, tokens: list[int]) -> None:
        self.count, self.tokens = count, tokens


class Ledger:
    """What the host knows of a static cache, shared by its layers.

    `read_columns` and `read_lengths` are what was last seen on the device; `columns` counts ahead of it. The
    device's own count is `device_columns`, int64 [], which transformers takes positions from.
    """

    def __init__(self, max_length: int, layers: int = 1) -> None:
        self.max_length = max_length
        self.layers = layers
        self.clear()

    def clear(self) -> None:
        """Forgets everything; the tensors belong to whoever holds them still."""
        self.device_columns: Tensor | None = None
        self.device_lengths: Tensor | None = None  # int32 [B], of the leading layer
        self.ones: Tensor | None = None  # int32 [B]
        self.all_lengths: dict[int, Tensor] = {}  # int32 [B] of every layer
        self.pending = 0  # layers that a forward has still to come through
        self.columns = 0
        self.read_columns = 0
        self.read_lengths: list[int] = []
        self.chunks: list[int | Tensor | Columns] = []
        self.before: list[int] = []  # lengths before the prompt that the layers are working on
        self._expected = False  # whether the step to come is in `columns` already
        self._counted: tuple[Tensor, list[int]] | None = None
        self._mark: tuple[int, list[int], list[int | Tensor | Columns]] | None = None

    def begin(self, lengths: Tensor) -> None:
        """Takes the lengths of an empty leading layer."""
        device = lengths.device
        self.device_lengths = lengths
        self.device_columns = torch.zeros((), dtype=torch.int64, device=device)
        self.ones = torch.ones_like(lengths)
        for tensor in (self.device_columns, self.ones):
            pin(tensor)
        self.read_lengths = [0] * lengths.shape[0]

    def enter(self) -> None:
        """The leading layer begins a forward, which `leave` ends layer by layer.

        Raises ConfigError if an exception has ended the one before in the middle.
        """
        self.require_whole()
        self.pending = self.layers

    def leave(self) -> None:
        """A layer has stored its rows and attended."""
        self.pending -= 1

    def require_whole(self) -> None:
        """Raises ConfigError if some layers have rows that others lack."""
        if self.pending:
            raise interrupted(0)

    def refresh(self) -> None:
        """Reads columns and lengths from the device; the only place that waits for it.

        Raises ConfigError if layers have different lengths: a compiled step was interrupted.
        """
        if self.device_columns is None or self.device_lengths is None:
            return
        device = self.device_lengths.device
        each = torch.stack([lengths.to(device) for lengths in self.all_lengths.values()]).long()
        differ = (each != self.device_lengths).any()
        counts = torch.cat([self.device_columns.view(1), differ.view(1).long(), self.device_lengths.long()])
        columns, differ, *lengths = counts.tolist()
        if differ:
            self.pending = self.layers
            raise interrupted(0)
        count = columns - self.read_columns
        tokens = [new - old for new, old in zip(lengths, self.read_lengths)]
        if count:
            self._remember(count if tokens == [count] * len(tokens) else Columns(count, tokens))
        self.columns = self.read_columns = columns
        self.read_lengths = lengths
        self._expected = False

    def counts(self, real: Tensor) -> list[int]:
        """Tokens per sequence of a mask bool [B, T]; one wait where the layers of a model share it."""
        if self._counted is None or self._counted[0] is not real:
            self._counted = (real, real.sum(dim=1).tolist())
        return self._counted[1]

    def expect_step(self, total: int) -> None:
        """Before a step of one column that makes `total` columns: raises CacheFullError if it cannot fit."""
        if self._expected and total == self.columns:  # masks of several kinds announce the same step
            return
        if total != self.columns + 1:
            self.refresh()
            if total != self.columns + 1:
                raise ShapeError(
                    f"attention mask of {total} columns, expected {self.columns + 1}: "
                    f"{self.columns} in the cache and 1 new"
                )
        self._check_step()
        self.columns, self._expected = total, True

    def count_step(self, announced: bool) -> None:
        """Counts a step of one column that the leading layer makes without a compiler."""
        assert self.device_columns is not None
        if not (announced and self._expected):
            self._check_step()
            self.columns += 1
        self._expected = False
        self.device_columns.add_(1)

    def _check_step(self) -> None:
        ahead = self.columns + 1 - self.read_columns
        if max(self.read_lengths) + ahead <= self.max_length:
            return
        self.refresh()  # padding is no token: perhaps there is room
        self._require([length + 1 for length in self.read_lengths])

    def _require(self, after: list[int]) -> None:
        if max(after) > self.max_length:
            raise CacheFullError(f"a sequence would have {max(after)} tokens, max_length = {self.max_length}")

    def require(self, counts: list[int]) -> None:
        """Raises CacheFullError unless there is room for `counts` more tokens."""
        self.refresh()
        self._require([length + count for length, count in zip(self.read_lengths, counts)])

    def count_prompt(self, counts: list[int], chunk: int | Tensor) -> None:
        """Counts a prompt of `counts` tokens per sequence; the ledger is fresh and there is room."""
        assert self.device_columns is not None
        after = [length + count for length, count in zip(self.read_lengths, counts)]
        columns = chunk if isinstance(chunk, int) else chunk.shape[1]
        self.read_lengths = after
        self.read_columns += columns
        self.columns = self.read_columns
        self.device_columns.add_(columns)
        self._remember(chunk)

    def check_columns(self, total: int, new: int) -> None:
        """Raises ShapeError unless a prompt's mask covers the stored columns and the new ones."""
        self.refresh()
        if total != self.columns + new:
            raise ShapeError(
                f"attention mask of {total} columns, expected {self.columns + new}: "
                f"{self.columns} in the cache and {new} new"
            )

    def check_stored(self, mask: Tensor) -> None:
        """Raises ConfigError where a mask bool [B, columns] shows stored columns otherwise than they came.

        Of steps with padding among them the number of each sequence's tokens is known, and compared.
        """
        start = 0
        for chunk in self.chunks:
            part = mask[:, start : start + _size(chunk)]
            if isinstance(chunk, Columns):
                tokens = part.sum(dim=1).tolist()
                if tokens != chunk.tokens:
                    raise ConfigError(
                        f"attention mask of {tokens} tokens over {chunk.count} stored columns from {start} "
                        f"on, allowed: {chunk.tokens}, as when they were stored"
                    )
            else:
                expected = torch.ones_like(part) if isinstance(chunk, int) else chunk.to(part.device)
                if not torch.equal(part, expected):
                    b, column = (part != expected).nonzero()[0].tolist()
                    raise ConfigError(
                        f"attention mask {int(part[b, column])} for stored column {start + column} of "
                        f"sequence {b}, allowed: {int(expected[b, column])}, as when it was stored "
                        "(crop the cache to forget the latest columns)"
                    )
            start += _size(chunk)

    def mark(self) -> None:
        """Keeps the present state for `go_back`."""
        self.refresh()
        self._mark = self.columns, list(self.read_lengths), list(self.chunks)

    def go_back(self) -> None:
        """Makes the marked state the present one; the layers have put their lengths back."""
        assert self._mark is not None and self.device_columns is not None
        self.columns, lengths, chunks = self._mark
        self.read_columns, self.read_lengths, self.chunks = self.columns, list(lengths), list(chunks)
        self.device_columns.fill_(self.columns)

    def tokens_in_last(self, columns: int) -> list[int]:
        """How many of each sequence's last columns are tokens; the ledger is fresh."""
        tokens = [0] * len(self.read_lengths)
        for chunk in reversed(self.chunks):
            if columns <= 0:
                break
            if isinstance(chunk, int):
                tokens = [n + min(columns, chunk) for n in tokens]
                columns -= chunk
            elif isinstance(chunk, Columns):
                if columns < chunk.count:
                    raise ShapeError(
                        f"{columns} columns of {chunk.count} decoding steps with padding among them: "
                        "only all of them can be removed"
                    )
                tokens = [n + m for n, m in zip(tokens, chunk.tokens)]
                columns -= chunk.count
            else:
                tokens = [n + m for n, m in zip(tokens, chunk[:, -columns:].sum(dim=1).tolist())]
                columns -= chunk.shape[1]
        return tokens

    def drop(self, columns: int, tokens: list[int]) -> None:
        """Forgets the last columns; the layers change their lengths."""
        assert self.device_columns is not None
        self.device_columns.sub_(columns)
        self.read_columns -= columns
        self.columns = self.read_columns
        self.read_lengths = [length - n for length, n in zip(self.read_lengths, tokens)]
        while columns:
            chunk = self.chunks.pop()
            size = _size(chunk)
            if size > columns:
                assert not isinstance(chunk, Columns)
                self.chunks.append(chunk - columns if isinstance(chunk, int) else chunk[:, :-columns])
            columns -= min(size, columns)

    def select(self, chosen: list[int], lengths: Tensor) -> None:
        """Makes the batch the sequences `chosen`, whose lengths the leading layer now has in `lengths`."""
        if lengths.shape != (len(self.read_lengths),):
            self.ones = pin(torch.ones_like(lengths))
        self.device_lengths = lengths
        self.read_lengths = [self.read_lengths[b] for b in chosen]
        for i, chunk in enumerate(self.chunks):
            if isinstance(chunk, Columns):
                self.chunks[i] = Columns(chunk.count, [chunk.tokens[b] for b in chosen])
            elif isinstance(chunk, Tensor):
                self.chunks[i] = chunk[chosen]

    def copy(self) -> "Ledger":
        """An independent ledger; the leading layer's copy puts its own lengths in."""
        twin = copy.copy(self)
        twin.chunks, twin.read_lengths = list(self.chunks), list(self.read_lengths)
        twin.all_lengths = {}
        if self.device_columns is not None and self.ones is not None:
            twin.device_columns, twin.ones = pin(self.device_columns.clone()), pin(self.ones.clone())
        return twin

    def _remember(self, chunk: int | Tensor | Columns) -> None:
        if isinstance(chunk, int) and self.chunks and isinstance(self.chunks[-1], int):
            chunk += self.chunks.pop()  # type: ignore[operator]
        self.chunks.append(chunk)


def _size(chunk: int | Tensor | Columns) -> int:
    if isinstance(chunk, int):
        return chunk
    return chunk.count if isinstance(chunk, Columns) else chunk.shape[1]


class StaticLayer(OscarLayer):
    """An OscarLayer of `max_length` tokens per sequence whose decode step runs on the device alone.

    `ledger` is the cache's; the layer that is `leading` counts columns for all of them.
    """

    def __init__(self, *args: Any, ledger: Ledger, leading: bool, **options: Any) -> None:
        self.ledger = ledger
        self.leading = leading
        super().__init__(*args, **options)

    def _clear(self) -> None:
        self.buffer: Tensor | None = None
        self.state: State | None = None
        self.layout: Layout | None = None
        self.layout_text = ""
        self.ring: int | None = None
        if self.leading:
            self.ledger.clear()
        super()._clear()

    # What the growing mode keeps on the host is read from the device here, where somebody asks for it.

    @property
    def lengths(self) -> list[int]:
        """Tokens per sequence."""
        return [] if self.store is None else self.store.lengths.tolist()

    @lengths.setter
    def lengths(self, values: list[int]) -> None:
        """The device has them."""

    @property
    def reached(self) -> list[int]:
        """The length that each ring has been written up to."""
        reached = None if self.state is None else self.state.reached
        return [] if reached is None else reached.tolist()

    @reached.setter
    def reached(self, values: list[int]) -> None:
        """The device has them."""

    @property
    def batch_size(self) -> int:
        """Number of sequences, -1 before the first."""
        return -1 if self.layout is None else self.layout.batch

    # What transformers asks of a cache layer.

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether steps may be compiled: not while rows are recorded, which the host does."""
        return not self.record_past

    @torch.inference_mode(False)
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates an empty store for key_states [B, K, T, D]; raises ShapeError for another geometry."""
        self._check_geometry(key_states, value_states)
        self._allocate(key_states.shape[0], key_states.device)
        if self.leading:
            assert self.store is not None
            self.ledger.begin(self.store.lengths)

    def _allocate(self, batch: int, device: torch.device) -> None:
        config = self.config
        assert self.max_length is not None
        if self.rotation is None:
            window = self.max_length if self.sliding_window is None else self.sliding_window + RING_SLACK
            self.ring = None if self.sliding_window is None else window
            pages = min(self.max_length, -(-window // fmt.PAGE_TOKENS) * fmt.PAGE_TOKENS)
        else:
            pages = max(1, config.history_pages(self.max_length))
        self.layout = Layout(
            batch=batch,
            pages=pages,
            query_heads=config.num_query_heads,
            heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            sink_tokens=config.sink_tokens,
            recent_tokens=config.recent_tokens,
            rotation_heads=0 if self.rotation is None else self.rotation.key_transform.shape[0],
            **{
                f"{name.partition('_')[0]}_steps": feedback.steps
                for name in FEEDBACKS
                if (feedback := getattr(self.rotation, name, None)) is not None
            },
        )
        self.layout_text = write_layout(self.layout)
        self.buffer, self.state = new_state(self.layout, self.rotation, self.ring, device)
        self.store, self.rotation = self.state.store, self.state.rotation  # from here on in the buffer
        self.ledger.all_lengths[self.layer_id] = self.store.lengths
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Notes that this layer's attention comes next; the rows are stored there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if torch.compiler.is_compiling():
            traced.layer = self
        else:
            announce(self, key_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the attention mask covers, and its offset."""
        if torch.compiler.is_compiling():
            traced.mask_layer = self
        else:  # the mask function gets this very tensor as its offset: comparing it asks no device
            request_mask(self, self.get_seq_length(), query_length)
        return self.ledger.max_length, 0

    def new_tokens(self, attention_mask: Tensor | None, new_columns: int) -> Tensor | None:
        """Which of the new columns are tokens: bool [B, new_columns], or None for all of them."""
        if attention_mask is None:
            return None
        new = attention_mask[:, -new_columns:].to(torch.bool)
        return None if new.all() else new

    def get_seq_length(self) -> Any:
        """Columns seen so far, padding included: int64 [] on the device, 0 before the first."""
        return 0 if self.ledger.device_columns is None else self.ledger.device_columns

    # Storing and attending.

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **options: Any
    ) -> Tensor:
        """Stores new rows and attends with them: query [B, T, N, D], key, value [B, T, K, D] -> like query.

        `real` bool [B, T] marks tokens among padding (None: all are tokens); padding of a prompt yields
        zeros, that of a single column means nothing.
        """
        batch, columns = query.shape[:2]
        if not self.is_initialized:
            self.lazy_initialization(key.transpose(1, 2), value.transpose(1, 2))
        if batch != self.batch_size:
            raise ShapeError(f"a batch of {batch} for a cache of {self.batch_size} sequences")
        if real is not None and tuple(real.shape) != (batch, columns):
            raise ShapeError(f"the padding mask is {tuple(real.shape)}, expected {(batch, columns)}")
        if columns == 1 and not self.record_past:
            rows = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            return self.step(*rows, real, **options)
        if self.leading:
            self.ledger.require([columns] * batch if real is None else self.ledger.counts(real))
            self.ledger.enter()
        prompt, outputs = columns - self._draft_columns(columns), []
        for part, attend in (
            (slice(0, prompt), self._attend_prompt),
            (slice(prompt, columns), self._attend_drafts),
        ):
            if part.start < part.stop:
                mask = real if real is None or prompt == columns else real[:, part]
                outputs.append(attend(query[:, part], key[:, part], value[:, part], mask, **options))
        self.ledger.leave()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attend_prompt(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **options: Any
    ) -> Tensor:
        """`attend` for columns that nobody takes back."""
        assert self.store is not None and self.state is not None
        self._forget()
        counts = [query.shape[1]] * query.shape[0] if real is None else self.ledger.counts(real)
        if self.leading:
            self.ledger.before = self.ledger.read_lengths
            self.ledger.count_prompt(counts, query.shape[1] if real is None else real)
        out = attend_in_pieces(
            query, key, value, real, counts=counts, lengths=self.ledger.before, store=self.store,
            rotation=self.rotation, prefill_chunk=self.prefill_chunk,
            sliding_window=self.sliding_window, implementation=self.implementation, **options,
        )  # fmt: skip
        if self.state.reached is not None:
            torch.maximum(self.state.reached, self.store.lengths, out=self.state.reached)
        return out

    def _attend_drafts(
        self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None, **options: Any
    ) -> Tensor:
        """`attend` for columns that may be taken back: one by one, as decoding would see them."""
        assert self.store is not None and self.state is not None
        batch, columns = query.shape[:2]
        if self._snapshot is None:
            self._snapshot = {name: getattr(self.store, name).clone() for name in self._mutable()}
            if self.leading:
                self.ledger.mark()
        counts = [columns] * batch if real is None else real.sum(dim=1).tolist()
        if self.leading:
            self.ledger.count_prompt(counts, columns if real is None else real)
        outputs = []
        for t in range(columns):
            q, k, v = (x[:, t : t + 1].transpose(1, 2) for x in (query, key, value))
            new_lengths = self._ones() if real is None else real[:, t].to(torch.int32)
            out = decode_step(
                q, k, v, new_lengths, self.state, sliding_window=self.sliding_window,
                implementation=self.implementation, **options,
            )  # fmt: skip
            outputs.append(out if real is None else out * real[:, t, None, None, None])
        self._recorded.append((key, value, real))
        return torch.cat(outputs, dim=1)

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        real: Tensor | None,
        *,
        softmax_scale: float,
        sink_logits: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """One column: query [B, N, 1, D], key, value [B, K, 1, D], real [B, 1] or None -> [B, 1, N, D].

        Without a host wait, with a compiler or without. Raises CacheFullError without one; a compiled
        `generate` raises it from the mask function, before the step.
        """
        ledger = self.ledger
        assert self.buffer is not None and ledger.ones is not None and ledger.device_columns is not None
        # Guards of compiled code are counted: only what the operator does not check itself.
        if not torch.compiler.is_compiling() and query.shape[0] != self.batch_size:
            raise ShapeError(f"a batch of {query.shape[0]} for a cache of {self.batch_size} sequences")
        if self.record_past:  # no compiler is tracing then
            columns = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
            options: dict[str, Any] = {
                "softmax_scale": softmax_scale, "sink_logits": sink_logits, "softcap": softcap,
            }  # fmt: skip
            return self.attend(*columns, None if real is None else real.to(torch.bool), **options)
        if real is not None:
            new_lengths = real.reshape(query.shape[0]).to(torch.int32)
        else:  # with a device map this layer may lie elsewhere than the first
            new_lengths = ledger.ones if ledger.ones.device == self.buffer.device else self._ones()
        if torch.compiler.is_compiling():
            if self.leading:
                ledger.device_columns.add_(1)
            return decode_step_op(
                query, key, value, new_lengths, self.buffer, self.layout_text, self.ring, softmax_scale,
                self.sliding_window, sink_logits, softcap, self.implementation,
            )  # fmt: skip
        if self.leading:
            ledger.require_whole()
            ledger.count_step(real is not None)
            ledger.enter()
        assert self.state is not None
        out = decode_step(
            query, key, value, new_lengths, self.state, softmax_scale=softmax_scale,
            sliding_window=self.sliding_window, sink_logits=sink_logits, softcap=softcap,
            implementation=self.implementation,
        )  # fmt: skip
        ledger.leave()
        return out

    # Taking back, other batches.

    def removable(self, tokens_to_remove: int) -> Removal:
        """What `crop(tokens_to_remove)` takes away; raises, without changing anything, if it cannot."""
        if self.leading:
            self.ledger.refresh()
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            tokens_to_remove = -max(0, self.ledger.columns - tokens_to_remove)
        columns = min(-tokens_to_remove, self.ledger.columns)
        tokens = self.ledger.tokens_in_last(columns)
        refusal = self._refusal(tokens) if self.store is not None and any(tokens) else None
        if refusal is not None and columns > sum(key.shape[1] for key, _, _ in self._recorded):
            raise QuantizedTokensError(refusal)
        return Removal(columns, tokens, by_replay=refusal is not None)

    @torch.inference_mode(False)
    def remove(self, removal: Removal) -> None:
        """Executes a removal."""
        if removal.by_replay:
            self._replay(removal.columns)
        elif removal.columns and self.store is not None:
            self._cut(removal)
        self._forget()

    def _cut(self, removal: Removal) -> None:
        assert self.store is not None
        if self.leading:
            self.ledger.drop(removal.columns, removal.tokens)
        self.store.lengths -= _int32(removal.tokens, self.store.lengths.device)
        if isinstance(self.store, LayerCache):
            windows = self.config.sink_tokens + self.config.recent_tokens
            history = ((self.store.lengths - windows) // fmt.PAGE_TOKENS).clamp(min=0)
            self.store.history_pages.copy_(history)

    def _replay(self, columns: int) -> None:
        """Goes back to the snapshot and stores again the recorded columns except the last `columns`."""
        assert self._snapshot is not None and self.store is not None and self.state is not None
        for name, array in self._snapshot.items():
            getattr(self.store, name).copy_(array)
        if self.leading:
            self.ledger.go_back()
        keep = sum(key.shape[1] for key, _, _ in self._recorded) - columns
        for key, value, real in self._recorded:
            size = min(keep, key.shape[1])
            keep -= size
            if not size:
                break
            part = None if real is None else real[:, :size]
            counts = [size] * self.batch_size if part is None else part.sum(dim=1).tolist()
            if self.leading:
                self.ledger.count_prompt(counts, size if part is None else part)
            key, value = _tokens_first(key[:, :size], part), _tokens_first(value[:, :size], part)
            append_rows(
                self.store, self.rotation, key, value, _int32(counts, key.device),
                implementation=self.implementation, check=False,
            )  # fmt: skip
        if self.state.reached is not None:  # never less than before: what the ring lost stays lost
            torch.maximum(self.state.reached, self.store.lengths, out=self.state.reached)

    @torch.inference_mode(False)
    def select(self, indices: Tensor) -> None:
        """Makes the batch the sequences `indices`, repeated or left out as given; all pages are copied."""
        if self.state is None or self.layout is None:
            return
        old, store = self.state, self.state.store
        indices = indices.to(store.lengths.device, torch.int64)
        if self.leading:
            self.ledger.refresh()
        if len(indices) != self.layout.batch:
            self._allocate(len(indices), indices.device)
        assert self.state is not None
        for name in ("lengths", "history_pages", "key", "value"):
            if hasattr(store, name):
                getattr(self.state.store, name).copy_(getattr(store, name)[indices])
        if old.reached is not None and self.state.reached is not None:
            self.state.reached.copy_(old.reached[indices])
        if isinstance(store, LayerCache):
            for names, table in ((fmt.INT2_ARRAYS, "page_table"), (fmt.WINDOW_ARRAYS, "window_table")):
                pages = getattr(store, table)[indices].flatten().long()
                for name in names:  # page 0 belongs to nobody
                    getattr(self.state.store, name)[1:].copy_(getattr(store, name)[pages])
        if self.leading:
            self.ledger.select(indices.tolist(), self.state.store.lengths)
        self._forget()

    def copy(self, ledger: Ledger | None = None) -> "StaticLayer":
        """An independent layer of the same content that counts in `ledger`, default a copy of its own."""
        twin = copy.copy(self)
        twin._forget()
        twin.ledger = self.ledger.copy() if ledger is None else ledger
        if self.buffer is not None and self.layout is not None:
            twin.buffer = pin(self.buffer.clone())
            twin.state = open_state(twin.buffer, self.layout, self.ring)
            twin.store, twin.rotation = twin.state.store, twin.state.rotation
            twin.ledger.all_lengths[self.layer_id] = twin.store.lengths
            if self.leading:
                twin.ledger.device_lengths = twin.state.store.lengths
        return twin
