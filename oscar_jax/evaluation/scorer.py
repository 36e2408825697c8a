"""Log-likelihoods and continuations of texts, with a history that is read as decoding would read it.

A whole text in one forward pass through a cache measures nothing: a chunk attends exactly to itself. Here
every position reads from INT2 what it would if the text had come token by token (`stepper.py`), whatever the
chunk; continuations are made through the real caches, prompts read in chunks of one page. `harness.py` puts
this behind lm-evaluation-harness.
"""

import os
from collections.abc import Sequence

import numpy as np

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from ..generate import Generator, SamplingConfig
from ..models.weights import host_array
from .job import prepare
from .requests import RequestScorer, Scored, Wish, check_sizes
from .stepper import make_runner, make_token_judge, recipes_of
from .subject import Subject, window_policy


class Scorer(RequestScorer):
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
        check_sizes(batch, max_length)
        least = 512 if max_length is None else max_length  # of the whole, found once the model is known
        ready = prepare(model, [], rotations, least, [method], 1, None, None, all_layers, dtype)
        self.subject, self.method = ready.subject, ready.methods[-1]
        config = ready.subject.config
        super().__init__(
            self.subject.encode,
            tokenizer=self.subject.tokenizer,
            model_id=config.model_id,
            bos=config.bos_token_id,
            eos=next(iter(config.eos_token_ids), None),
            max_length=config.max_positions if max_length is None else max_length,
            batch=batch,
            geometry=config.cache_config() if self.method.rotations else None,
        )
        self._rotations, self._all_layers = ready.rotation_set, all_layers
        self._runner = make_runner(self.subject.model, config)
        self._judge = make_token_judge(self._runner)
        self._generators: dict[SamplingConfig, Generator] = {}

    def _score_batch(self, parts: Sequence[Scored]) -> list[tuple[float, bool]]:
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
        with self.subject.context():
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
            results.append(
                (-float(loss[row, places].sum(dtype=np.float64)), bool(likeliest[row, places].all()))
            )
        return results

    def _continue(self, prompts: Sequence[list[int]], wish: Wish, size: int) -> list[tuple[str, int]]:
        """Text up to the stop string, and number of tokens, after each of at most `size` prompts."""
        sampling = SamplingConfig(wish.temperature, top_k=wish.top_k, top_p=wish.top_p)
        capacity = _rounded(max(map(len, prompts)) + wish.new_tokens)
        # Padding a short last batch costs less than compiling for its size.
        batch = [*prompts, *[prompts[-1]] * (size - len(prompts))]
        made = self._generator(sampling)(batch, wish.new_tokens, stop=wish.stop, capacity=capacity)
        assert made.texts is not None
        return [(text, len(tokens)) for text, tokens in zip(made.texts, made.tokens)][: len(prompts)]

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
