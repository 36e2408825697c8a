"""Requests for likelihoods and continuations: how texts are cut, put side by side, and counted.

`RequestScorer` is what both packages' `Scorer` have in common; a subclass runs the model.

Twin file, byte-identical in both packages: standard library only.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError

NO_LENGTH = 256  # tokens of a continuation whose request does not say how many
LEAST_SHARE = 0.5  # of the tokens read that must come from INT2 before figures say much


@dataclasses.dataclass(frozen=True)
class Scored:
    """Token ids of a text of which the last `scored` are judged."""

    tokens: list[int]
    scored: int


@dataclasses.dataclass(frozen=True)
class Wish:
    """What a continuation shall be: tokens at most, where it stops, and how tokens are drawn (0: greedy)."""

    new_tokens: int
    stop: tuple[str, ...]
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class RequestScorer(abc.ABC):
    """Answers requests with a model of one method; a subclass says how `batch` texts are read and continued.

    `bos` stands before every text if there is one; `eos` before a text without anything before it, if there
    is no bos. Texts longer than `max_length` tokens lose their beginning. `geometry` is that of a cache with
    INT2 pages, None if the method has none.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        *,
        tokenizer: Any,
        model_id: str,
        bos: int | None,
        eos: int | None,
        max_length: int,
        batch: int,
        geometry: CacheConfig | None,
    ) -> None:
        self.tokenizer, self.model_id = tokenizer, model_id
        self.max_length, self.batch = max_length, batch
        self.int2_share = 0.0  # of the tokens read at scored positions so far, in layers without a window
        self._plain, self._bos, self._eos, self._pages = encode, bos, eos, geometry
        self._read, self._coded = 0, 0

    @property
    def reads_int2(self) -> bool:
        """Whether the method has INT2 pages at all."""
        return self._pages is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as the model meets it: with its one beginning-of-text token, if it has one."""
        ids = self._plain(text)
        return ids if self._bos is None or ids[:1] == [self._bos] else [self._bos, *ids]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log-probability of the continuation, and whether it is greedy."""
        return self._score([self._joined(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text; beyond `max_length` in windows, each token scored once."""
        parts: list[Scored] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            for window in cut_windows(self._plain(text), self._prefix(), self.max_length):
                parts.append(window)
                owners.append(number)
        totals = [0.0] * len(texts)
        for number, (value, _) in zip(owners, self._score(parts)):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """The continuation of each (prompt, options), up to a stop string.

        Options are those of lm-evaluation-harness: `until`, `max_gen_toks`, and `do_sample`, `temperature`,
        `top_p`, `top_k` where one wants other than greedy tokens; others are a ConfigError.
        """
        groups: dict[Wish, list[int]] = {}
        for number, (_, options) in enumerate(requests):
            groups.setdefault(read_options(options), []).append(number)
        texts = [""] * len(requests)
        for wish, members in groups.items():
            prompts = [self.encode(requests[number][0]) for number in members]
            room = self.max_length - wish.new_tokens
            if room < 1:
                raise ConfigError(f"max_gen_toks = {wish.new_tokens}, allowed: below {self.max_length}")
            prompts = [prompt[-room:] for prompt in prompts]
            order = sorted(range(len(members)), key=lambda index: -len(prompts[index]))
            for start in range(0, len(order), self.batch):
                chosen = order[start : start + self.batch]
                made = self._continue([prompts[i] for i in chosen], wish, min(len(order), self.batch))
                for index, (text, tokens) in zip(chosen, made):
                    texts[members[index]] = text
                    self._count(range(len(prompts[index]), len(prompts[index]) + tokens))
        return texts

    @abc.abstractmethod
    def _score_batch(self, parts: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Log-probability and greediness of up to `batch` texts side by side, the longest first."""

    @abc.abstractmethod
    def _continue(self, prompts: Sequence[list[int]], wish: Wish, size: int) -> list[tuple[str, int]]:
        """Text up to the stop string, and number of tokens, after each of at most `size` prompts."""

    def _prefix(self) -> int:
        """What stands before a text that has nothing before it."""
        found = self._eos if self._bos is None else self._bos
        if found is None:
            raise ConfigError(
                "a text without context needs a beginning-of-text or end token, the model has none"
            )
        return found

    def _joined(self, context: str, continuation: str) -> Scored:
        """Context and continuation as they are cut when they stand together."""
        stripped = context.rstrip(" ")  # tokens begin with the space before a word
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            ids = self._plain(continuation)
            ids = ids[1:] if ids[:1] == [self._prefix()] else ids
            return self._cut([self._prefix(), *ids], len(ids))
        whole, first = self.encode(context + continuation), self.encode(context)
        return self._cut(whole, len(whole) - len(first))

    def _cut(self, tokens: list[int], scored: int) -> Scored:
        if not 1 <= scored <= self.max_length:
            raise ConfigError(f"a continuation of {scored} tokens, allowed: 1..{self.max_length}")
        return Scored(tokens[-(self.max_length + 1) :], scored)

    def _score(self, parts: Sequence[Scored]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(parts)
        order = sorted(range(len(parts)), key=lambda number: -len(parts[number].tokens))
        for start in range(0, len(order), self.batch):
            members = order[start : start + self.batch]
            for number, result in zip(members, self._score_batch([parts[m] for m in members])):
                found[number] = result
            for part in (parts[number] for number in members):
                self._count(range(len(part.tokens) - 1 - part.scored, len(part.tokens) - 1))
        return found

    def _count(self, positions: range) -> None:
        """Adds what is read at these positions to the share that comes from INT2 pages."""
        if self._pages is None:
            return
        self._read += sum(position + 1 for position in positions)
        pages = sum(self._pages.history_pages(position + 1) for position in positions)
        self._coded += fmt.PAGE_TOKENS * pages
        self.int2_share = self._coded / max(1, self._read)


def check_sizes(batch: int, max_length: int | None) -> None:
    """Raises ConfigError unless both are at least 1, before a model is loaded."""
    for name, value in (("batch", batch), ("max_length", max_length)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}, allowed: >= 1")


def cut_windows(tokens: list[int], prefix: int, length: int) -> Iterator[Scored]:
    """Every token scored once, each window with as much before it as fits."""
    done = min(length, len(tokens))
    if done:
        yield Scored([prefix, *tokens[:done]], done)
    while done < len(tokens):
        end = min(done + length, len(tokens))
        yield Scored(tokens[end - length - 1 : end], end - done)
        done = end


def read_options(options: Mapping[str, Any]) -> Wish:
    """What a request's options ask for; ConfigError for one not known."""
    known = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_p", "top_k"}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"generation option {unknown[0]!r}, allowed: {', '.join(sorted(known))}")
    until = options.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    new_tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NO_LENGTH)
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0):
        return Wish(new_tokens, stop)
    return Wish(
        new_tokens,
        stop,
        temperature or 1.0,
        top_k=int(options.get("top_k") or 0),
        top_p=float(options.get("top_p") or 1.0),
    )
