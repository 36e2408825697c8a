"""The tokens of one sequence as text, piece by piece, at a cost that does not grow with the text."""

from collections.abc import Sequence
from typing import Any

CONTEXT = 16  # tokens in front of a new one that decide how it reads: spaces, accents, bytes of a character


class TextStream:
    """Turns the tokens of one sequence into text piece by piece, never splitting a character.

    The text ends before the first of the `stop` strings; what may be the beginning of one is held back. Each
    token is decoded behind the latest `CONTEXT` to `2 * CONTEXT`, cut where a character ends; only `finish`
    decodes everything.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._start = self._mark = 0  # tokens: where decoding begins, where it will begin next
        self._before = ""  # the text from `_start` to the last token that ended with a whole character
        self._waiting = ""  # whole characters that are not shown
        self._shown = 0  # characters
        self.stopped = False  # whether a stop string was met

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._tokens.append(token)
        text = self._decode(self._start)
        if text.endswith("\ufffd"):  # bytes of a character are still missing
            return ""
        self._waiting += text[len(self._before) :]
        self._before = text
        if len(self._tokens) - self._mark >= CONTEXT:
            self._start, self._mark = self._mark, len(self._tokens)
            self._before = self._decode(self._start)
        return self._next(len(self._waiting) - self._held())

    def finish(self) -> str:
        """What is left at the end, broken characters included."""
        self._waiting = self._decode(0)[self._shown :]
        return self._next(len(self._waiting))

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._tokens[start:], skip_special_tokens=True)

    def _next(self, certain: int) -> str:
        """The first `certain` characters of what waits, or those in front of a stop string."""
        if self.stopped:
            return ""
        met = [at for stop in self._stop if (at := self._waiting.find(stop)) >= 0]
        self.stopped = bool(met)
        end = min(met, default=certain)
        piece, self._waiting = self._waiting[:end], self._waiting[end:]
        self._shown += len(piece)
        return piece

    def _held(self) -> int:
        """Length of the longest end of what waits that a stop string begins with."""
        text = self._waiting
        lengths = [size for stop in self._stop for size in range(len(stop)) if text.endswith(stop[:size])]
        return max(lengths, default=0)
