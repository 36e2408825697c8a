"""Log-likelihoods and continuations of texts, with a history that is read as decoding would read it.

A whole text in one forward pass through an OscarCache measures nothing: a chunk attends exactly to itself.
Here a text comes in chunks that end one token before a page does, and that last token alone, as a decoding
step: between these all queries read the same pages, so every position reads from INT2 what it would if the
text had come token by token. Continuations are made by `generate`, prompts read in pieces of one page.
`evaluation/harness.py` puts this behind lm-evaluation-harness.
"""

import contextlib
import inspect
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ..core import cache_format as fmt
from ..core.config import CacheConfig, CalibrationConfig
from ..core.errors import ConfigError
from ..core.window_policy import DEFAULT_WINDOW_POLICY, EVERY_LAYER_INT2
from ..evaluation.requests import RequestScorer, Scored, Wish, check_sizes
from ..rotations.rotation import RotationSet
from ..rotations.statistics import STATISTICS_FILE, read_statistics
from ..rotations.store import load_rotation_set
from .cache import OscarCache
from .calibrate import fit_rotation_set, load_model
from .layer import ATTENTION
from .model_check import _hub_id, cache_config

CHUNK = 2 * fmt.PAGE_TOKENS  # most tokens per forward: distributions over the vocabulary are float32
BASES = tuple(basis for basis in CalibrationConfig.BASES if basis != "auto")


class RoundedRows(Cache):
    """Rows are rounded to BF16 before they are read the first time, as decoding reads them.

    By itself a chunk would read its own rows as the model made them, which differs in a float32 model.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """`update` of the cache, with rounded rows in the dtype they had."""
        key, value = (rows.to(torch.bfloat16).to(rows.dtype) for rows in (key_states, value_states))
        return super().update(key, value, layer_idx, *args, **kwargs)


class Bfloat16Cache(RoundedRows, DynamicCache):
    """transformers' own cache with rows rounded to BF16: the baseline."""


class DecodedCache(RoundedRows, OscarCache):
    """An OscarCache whose chunks read their own rows rounded."""


class Scorer(RequestScorer):
    """A transformers model with one method, asked for likelihoods and continuations.

    `model` is a loaded one with its tokenizer, or what `load_model` takes. Methods: `bf16`; `int2`, the set
    in `rotations`; `int2:BASIS` and `int2:ROUNDING`, fitted to the statistics beside it. Texts longer than
    `max_length` tokens lose their beginning; `batch` of them go through the model together. Raises
    ConfigError, and what `load_model` and `OscarCache` raise.
    """

    def __init__(
        self,
        model: tuple[PreTrainedModel, Any] | str | os.PathLike[str],
        *,
        method: str = "int2",
        rotations: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        batch: int = 8,
        all_layers: bool = False,
        dtype: str | None = None,
    ) -> None:
        check_sizes(batch, max_length)
        rotation_set = _rotations_of(method, rotations)
        self.model, tokenizer = model if isinstance(model, tuple) else load_model(model, dtype=dtype)
        text_config = self.model.config.get_text_config(decoder=True)
        longest = text_config.max_position_embeddings
        if max_length is not None and max_length > longest:
            raise ConfigError(f"max_length = {max_length}, the model has {longest} positions")
        name = None if isinstance(model, tuple) else pathlib.Path(model).stem

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        super().__init__(
            encode,
            tokenizer=tokenizer,
            model_id=_hub_id(self.model.config) or name or type(self.model).__name__,
            bos=tokenizer.bos_token_id,
            eos=tokenizer.eos_token_id,
            max_length=longest if max_length is None else max_length,
            batch=batch,
            geometry=None if rotation_set is None else cache_config(text_config),
        )
        self.method, self._rotations = method, rotation_set
        self._policy = EVERY_LAYER_INT2 if all_layers else DEFAULT_WINDOW_POLICY
        self._belongs: str | None = None  # once a cache has found that the rotations are the model's
        self._new_cache()

    def _new_cache(self) -> Cache:
        """An empty cache of the method; a prompt of several pages is read in pieces of one."""
        if self._rotations is None:
            return Bfloat16Cache(config=self.model.config)
        cache = DecodedCache(
            self._rotations,
            self.model,
            window_policy=self._policy,
            prefill_chunk=fmt.PAGE_TOKENS,  # a longer one would read its own rows exactly
            model_id=self._belongs,
        )
        self._belongs = self._rotations.header.model_id
        return cache

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """The model with this method's attention and none of its checkpoint's wishes for sampling."""
        attention = self.model.config.get_text_config(decoder=True)._attn_implementation or "sdpa"
        wishes = self.model.generation_config
        self.model.set_attn_implementation("sdpa" if self._rotations is None else ATTENTION)
        self.model.generation_config = GenerationConfig()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.set_attn_implementation(attention)
            self.model.generation_config = wishes

    def _score_batch(self, parts: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Log-probability and greediness of up to `batch` texts side by side, the longest first.

        Shorter texts are filled up on the right, which no position before sees.
        """
        read = len(parts[0].tokens) - 1  # the last token is predicted, not read
        tokens = torch.zeros(len(parts), read + 1, dtype=torch.long)
        judged = torch.zeros(len(parts), read, dtype=torch.bool)
        for row, marks, part in zip(tokens, judged, parts):
            row[: len(part.tokens)] = torch.tensor(part.tokens)
            marks[len(part.tokens) - 1 - part.scored : len(part.tokens) - 1] = True
        tokens = tokens.to(self.model.device)
        cache = self._new_cache()
        named = _cache_argument(self.model, cache)
        value = torch.zeros(len(parts), read, dtype=torch.float64)
        likeliest = torch.ones(len(parts), read, dtype=torch.bool)
        with self._running():
            for start, end in decoding_chunks(read, self._pages):
                columns = judged[:, start:end].any(dim=0).nonzero()[:, 0]
                keep: Any = columns.to(tokens.device) if len(columns) else 1
                logits = self.model(tokens[:, start:end], use_cache=True, logits_to_keep=keep, **named).logits
                if not len(columns):
                    continue
                logits = logits.float()
                following = tokens[:, start + 1 + keep]
                log_p = logits.gather(2, following[..., None])[..., 0] - logits.logsumexp(dim=2)
                value[:, start + columns] = log_p.double().cpu()
                likeliest[:, start + columns] = (logits.argmax(dim=2) == following).cpu()
        return [
            (float(row[marks].sum()), bool(greedy[marks].all()))
            for row, greedy, marks in zip(value, likeliest, judged)
        ]

    def _continue(self, prompts: Sequence[list[int]], wish: Wish, size: int) -> list[tuple[str, int]]:
        """Text up to the stop string, and number of tokens, after each of at most `size` prompts."""
        width, eos = max(map(len, prompts)), self.tokenizer.eos_token_id
        wanted = self.model.generation_config
        ends = eos if wanted is None or wanted.eos_token_id is None else wanted.eos_token_id
        ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
        ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
        for row, marks, prompt in zip(ids, mask, prompts):
            row[width - len(prompt) :] = torch.tensor(prompt)
            marks[width - len(prompt) :] = 1
        options: dict[str, Any] = {"do_sample": wish.temperature > 0}
        if wish.temperature > 0:
            options |= {"temperature": wish.temperature, "top_k": wish.top_k, "top_p": wish.top_p}
        if wish.stop:
            options |= {"stop_strings": list(wish.stop), "tokenizer": self.tokenizer}
        with self._running():
            made = self.model.generate(  # pyright: ignore[reportCallIssue]
                ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=wish.new_tokens,
                eos_token_id=ends or None,
                pad_token_id=ends[0] if ends else 0,
                disable_compile=True,
                **_cache_argument(self.model, self._new_cache()),
                **options,
            )[:, width:].tolist()
        found = []
        for row in made:
            tokens = row[: next((place for place, token in enumerate(row) if token in ends), len(row))]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            for stop in wish.stop:
                text = text.split(stop)[0]
            found.append((text, len(tokens)))
        return found


def decoding_chunks(length: int, geometry: CacheConfig | None) -> Iterator[tuple[int, int]]:
    """Chunks (start, end) of `length` positions within which each reads the pages that decoding reads.

    In decoding, position p reads the INT2 pages of p + 1 tokens, a chunk from `start` on those of `start`
    tokens. So a position whose token fills a page is a step of its own, from the first that has an INT2 page.
    Without INT2 pages (`geometry` None) only `CHUNK` bounds a chunk.
    """
    start = 0
    while start < length:
        end = min(start + CHUNK, length)
        if geometry is not None:
            pages = geometry.history_pages(start + 1)
            if pages == geometry.history_pages(start):
                end = next(
                    p for p in range(start + 1, end + 1) if p == end or geometry.history_pages(p + 1) > pages
                )
            else:
                end = start + 1
        yield start, end
        start = end


def _rotations_of(method: str, rotations: str | os.PathLike[str] | None) -> RotationSet | None:
    """The rotation set of a method, None for bf16; raises ConfigError naming what is wrong."""
    kind, _, wanted = method.partition(":")
    if kind not in ("bf16", "int2") or (kind == "bf16" and wanted):
        raise ConfigError(f"method {method!r}, allowed: bf16, int2, int2:BASIS, int2:ROUNDING")
    if kind == "bf16":
        return None
    if wanted not in ("", *fmt.ROUNDINGS, *BASES):
        allowed = ", ".join((*BASES, *fmt.ROUNDINGS))
        raise ConfigError(f"method {method!r}: basis {wanted!r}, allowed: {allowed}")
    if rotations is None:
        raise ConfigError(f"method {method!r} needs rotations")
    if not wanted:
        return load_rotation_set(rotations)
    path = pathlib.Path(rotations) / STATISTICS_FILE
    statistics, header = read_statistics(path) if path.exists() else ({}, None)
    if header is None:
        raise ConfigError(
            f"method {method!r} is fitted to calibration statistics: rotations must be a folder that "
            "`oscar calibrate` wrote"
        )
    rounding = wanted in fmt.ROUNDINGS
    settings = CalibrationConfig(rounding=wanted) if rounding else CalibrationConfig(basis=wanted)
    return fit_rotation_set(statistics, header, settings)


def _cache_argument(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The cache under the name that this version of transformers knows it by."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}
