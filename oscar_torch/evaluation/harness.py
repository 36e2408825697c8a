"""Model `oscar` of lm-evaluation-harness, which the extra `eval` installs: likelihoods as in decoding.

Its requests go to a package's `Scorer`. `python -m oscar_jax.evaluation`, and the same of `oscar_torch`, are
the harness's own command line with this model known to it.

Twin file, byte-identical in both packages: the harness alone.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from .requests import LEAST_SHARE, RequestScorer

_LOG = logging.getLogger(__name__)


def register(scorer_class: type[RequestScorer]) -> type["OscarLM"]:
    """Makes model `oscar` of the harness answer through this class of scorers."""
    return register_model("oscar")(type("OscarLM", (OscarLM,), {"scorer_class": scorer_class}))


class OscarLM(LM):
    """A model with one method of its package's `Scorer`; arguments as there, `pretrained` is its model.

    `device`, which the harness always passes, is left to the package.
    """

    scorer_class: ClassVar[Callable[..., RequestScorer]]

    def __init__(
        self,
        pretrained: str,
        *,
        method: str = "int2",
        rotations: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = 8,
        all_layers: bool = False,
        dtype: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if str(batch_size or 8).partition(":")[0] == "auto":
            batch_size = max_batch_size or 8
        self.scorer = type(self).scorer_class(
            pretrained,
            method=method,
            rotations=rotations,
            max_length=max_length,
            batch=int(batch_size or 8),
            all_layers=all_layers,
            dtype=dtype,
        )

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is greedy."""
        return self._answered("loglikelihood", self.scorer.loglikelihood, requests)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Log-probability of each text."""

        def scored(arguments: Sequence[tuple[str]]) -> list[float]:
            return self.scorer.loglikelihood_rolling([text for (text,) in arguments])

        return self._answered("loglikelihood_rolling", scored, requests)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """The continuation of each prompt."""
        return self._answered("generate_until", self.scorer.generate_until, requests)

    @property
    def tokenizer_name(self) -> str:
        """Names the cache of prompts made with a chat template."""
        return self.scorer.model_id.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a prompt, by the tokenizer's own template."""
        return self.scorer.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template itself, for the harness's record."""
        return getattr(self.scorer.tokenizer, "chat_template", None) or ""

    def _answered(self, name: str, answer: Callable[..., list[Any]], requests: Sequence[Any]) -> list[Any]:
        found = answer([request.args for request in requests])
        for request, result in zip(requests, found):
            self.cache_hook.add_partial(name, request.args, result)
        share = self.scorer.int2_share
        if self.scorer.reads_int2 and share < LEAST_SHARE:
            _LOG.warning(
                "only %.0f %% of the tokens read at scored positions come from INT2 pages: a task of short "
                "texts says little about a 2-bit cache",
                100 * share,
            )
        return found
