"""Log-likelihoods and continuations of texts, with a history that is read as decoding would read it.

A whole text in one forward pass through a cache measures nothing: a chunk attends exactly to itself. Here
every position reads from INT2 what it would if the text had come token by token (`stepper.py`), whatever the
chunk; continuations are made through the real caches, prompts read in chunks of one page. `harness.py` puts
this behind lm-evaluation-harness.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from ..generate import Generator, SamplingConfig
from ..models.weights import host_array
from .job import prepare
from .stepper import make_runner, make_token_judge, recipes_of
from .subject import Subject, window_policy

NO_LENGTH = 256  # tokens of a continuation whose request does not say how many


@dataclasses.dataclass(frozen=True)
class _Scored:
    """Token ids of a text of which the last `scored` are judged."""

    tokens: list[int]
    scored: int


class Scorer:
    """A model with one method of `oscar evaluate`, asked for likelihoods and continuations.

    Texts longer than `max_length` tokens lose their beginning; `batch` of them go through the model together.
    Continuations need a method with a real cache, bf16 or int2. Raises what `prepare` raises.
    """

    def __init__(
        self,
        model: Subject | str | os.PathLike[str],
        *,
        method: str = "int2",
        rotations: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        batch: int = 8,
        all_layers: bool = False,
        dtype: str | None = None,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batch = {batch}, allowed: >= 1")
        least = 512 if max_length is None else max_length  # of the whole, found once the model is known
        ready = prepare(model, [], rotations, least, [method], 1, None, None, all_layers, dtype)
        self.subject, self.method, self.batch = ready.subject, ready.methods[-1], batch
        config = ready.subject.config
        self.max_length = config.max_positions if max_length is None else max_length
        self.int2_share = 0.0  # of the tokens read at scored positions so far, in layers without a window
        self._read, self._coded = 0, 0
        self._rotations, self._all_layers = ready.rotation_set, all_layers
        self._runner = make_runner(self.subject.model, config)
        self._judge = make_token_judge(self._runner)
        self._generators: dict[SamplingConfig, Generator] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as the model meets it: with its one beginning-of-text token, if it has one."""
        ids, bos = self.subject.encode(text), self.subject.config.bos_token_id
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): log-probability of the continuation, and whether it is greedy."""
        return self._score([self._joined(*pair) for pair in pairs])

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Log-probability of each whole text; beyond `max_length` in windows, each token scored once."""
        parts: list[_Scored] = []
        owners: list[int] = []
        for number, text in enumerate(texts):
            tokens = self.subject.encode(text)
            for window in _windows(tokens, self._prefix(), self.max_length):
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
        groups: dict[Any, list[int]] = {}
        for number, (_, options) in enumerate(requests):
            groups.setdefault(_generation(options), []).append(number)
        texts = [""] * len(requests)
        for (sampling, stop, new_tokens), members in groups.items():
            prompts = [self.encode(requests[number][0]) for number in members]
            room = self.max_length - new_tokens
            if room < 1:
                raise ConfigError(f"max_gen_toks = {new_tokens}, allowed: below {self.max_length}")
            prompts = [prompt[-room:] for prompt in prompts]
            order = sorted(range(len(members)), key=lambda index: -len(prompts[index]))
            for start in range(0, len(order), self.batch):
                chosen = order[start : start + self.batch]
                batch = [prompts[index] for index in chosen]
                capacity = _rounded(len(batch[0]) + new_tokens)
                # Padding a short last batch costs less than compiling for its size.
                batch += [batch[-1]] * (self.batch - len(batch)) if len(order) > self.batch else []
                made = self._generator(sampling)(batch, new_tokens, stop=stop, capacity=capacity)
                assert made.texts is not None
                for index, text, tokens in zip(chosen, made.texts, made.tokens):
                    texts[members[index]] = text
                    self._count(range(len(prompts[index]), len(prompts[index]) + len(tokens)))
        return texts

    def _prefix(self) -> int:
        """What stands before a text that has nothing before it."""
        config = self.subject.config
        if config.bos_token_id is not None:
            return config.bos_token_id
        if not config.eos_token_ids:
            raise ConfigError(
                "a text without context needs a beginning-of-text or end token, the model has none"
            )
        return config.eos_token_ids[0]

    def _joined(self, context: str, continuation: str) -> _Scored:
        """Context and continuation as they are cut when they stand together."""
        stripped = context.rstrip(" ")  # tokens begin with the space before a word
        continuation, context = context[len(stripped) :] + continuation, stripped
        if not context:
            ids = self.subject.encode(continuation)
            ids = ids[1:] if ids[:1] == [self._prefix()] else ids
            return self._cut([self._prefix(), *ids], len(ids))
        whole, first = self.encode(context + continuation), self.encode(context)
        return self._cut(whole, len(whole) - len(first))

    def _cut(self, tokens: list[int], scored: int) -> _Scored:
        if not 1 <= scored <= self.max_length:
            raise ConfigError(f"a continuation of {scored} tokens, allowed: 1..{self.max_length}")
        return _Scored(tokens[-(self.max_length + 1) :], scored)

    def _score(self, parts: Sequence[_Scored]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(parts)
        order = sorted(range(len(parts)), key=lambda number: -len(parts[number].tokens))
        with self.subject.context():
            for start in range(0, len(order), self.batch):
                members = order[start : start + self.batch]
                for number, result in zip(members, self._score_batch([parts[m] for m in members])):
                    found[number] = result
        return found

    def _score_batch(self, parts: Sequence[_Scored]) -> list[tuple[float, bool]]:
        """Of up to `batch` texts side by side, the longest first; empty rows stand in for the rest."""
        size = self.batch
        read = len(parts[0].tokens) - 1  # the last token is predicted, not read
        capacity = _rounded(read)
        chunk = min(512, capacity)
        tokens = np.zeros((size, capacity + 1), np.int32)
        for row, part in zip(tokens, parts):
            row[: len(part.tokens)] = part.tokens
        runner = self._runner
        recipes = recipes_of([self.method] * size, range(runner.config.num_layers))
        rows = runner.allocate(size, capacity, list(recipes))
        columns: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, read, chunk):
            hidden, rows, _ = runner.step(
                runner.state, tokens[:, start : start + chunk], start, rows, recipes, count=chunk
            )
            judged = self._judge(runner.state, hidden, tokens[:, start + 1 : start + chunk + 1])
            columns.append((host_array(judged[0]), host_array(judged[1])))
        loss, likeliest = (np.concatenate(column, axis=1) for column in zip(*columns))
        results = []
        for row, part in enumerate(parts):
            end = len(part.tokens) - 1
            places = slice(end - part.scored, end)
            self._count(range(places.start, places.stop))
            results.append(
                (-float(loss[row, places].sum(dtype=np.float64)), bool(likeliest[row, places].all()))
            )
        return results

    def _count(self, positions: range) -> None:
        """Adds what is read at these positions to the share that comes from INT2 pages."""
        if not self.method.rotations:
            return
        geometry = self.subject.config.cache_config()
        self._read += sum(position + 1 for position in positions)
        self._coded += sum(fmt.PAGE_TOKENS * geometry.history_pages(position + 1) for position in positions)
        self.int2_share = self._coded / max(1, self._read)

    def _generator(self, sampling: SamplingConfig) -> Generator:
        if self.method.kind == "simulated":
            raise ConfigError(
                f"method {self.method.name!r} has no cache to generate with, allowed: bf16, int2"
            )
        if sampling not in self._generators:
            self._generators[sampling] = Generator(
                self.subject.model,
                self.subject.config,
                cache=self.method.kind,
                rotations=self.method.rotations or None,
                sampling=sampling,
                chunk=fmt.PAGE_TOKENS,  # a longer one would read its own rows exactly
                window_policy=window_policy(self._all_layers),
                tokenizer=self.subject.tokenizer,
                mesh=self.subject.mesh,
            )
        return self._generators[sampling]


def _rounded(tokens: int) -> int:
    """A power of two of at least 64: few lengths to compile for."""
    return max(fmt.PAGE_TOKENS, 1 << (tokens - 1).bit_length())


def _windows(tokens: list[int], prefix: int, length: int) -> Iterator[_Scored]:
    """Every token scored once, each window with as much before it as fits."""
    done = min(length, len(tokens))
    if done:
        yield _Scored([prefix, *tokens[:done]], done)
    while done < len(tokens):
        end = min(done + length, len(tokens))
        yield _Scored(tokens[end - length - 1 : end], end - done)
        done = end


def _generation(options: Mapping[str, Any]) -> tuple[SamplingConfig, tuple[str, ...], int]:
    """Sampling, stop strings and number of tokens of a request's options; ConfigError for one not known."""
    known = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_p", "top_k"}
    if unknown := sorted(set(options) - known):
        raise ConfigError(f"generation option {unknown[0]!r}, allowed: {', '.join(sorted(known))}")
    until = options.get("until") or ()
    stop = (until,) if isinstance(until, str) else tuple(text for text in until if text)
    new_tokens = int(options.get("max_gen_toks") or options.get("max_new_tokens") or NO_LENGTH)
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0):
        return SamplingConfig(), stop, new_tokens
    sampling = SamplingConfig(
        temperature or 1.0, top_k=int(options.get("top_k") or 0), top_p=float(options.get("top_p") or 1.0)
    )
    return sampling, stop, new_tokens
