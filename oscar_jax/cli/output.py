"""What the commands show: progress bars, tables, summaries."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..generate import GenerationStatistics
    from ..text_stream import TextStream

SHOWN_CHARACTERS = 400  # of a prompt


def warn(message: str) -> None:
    """One line on standard error."""
    print(f"oscar: warning: {message}", file=sys.stderr)


def say(message: str) -> None:
    """One line on standard output, at once: what a job has found so far."""
    print(message, flush=True)


def print_evaluation(document: Mapping[str, Any], out: str) -> None:
    """A table per text, one of all texts if there are several, and where the report is."""
    texts = document["texts"]
    pooled = [{"label": "all texts", "methods": document["methods"]}] if len(texts) > 1 else []
    for part in [*texts, *pooled]:
        Console(width=None if sys.stdout.isatty() else 130).print(_table(part["label"], part["methods"]))
    layers = ", ".join(map(str, document["quantized_layers"]))
    print(f"Quantized in every method: layers {layers}. Report: {out}")


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("method", "bits", "perplexity", "KL mean", "median", "p99", "2nd half", "top-1", "cache MB"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=name == "method")
    for row in rows:
        figures = ("bits_per_element", "perplexity", "kl_mean", "kl_median", "kl_p99", "kl_mean_second_half")
        table.add_row(
            row["method"],
            *(f"{row[name]:.4g}" for name in figures),
            f"{100 * row['top1']:.1f} %",
            f"{row['cache_bytes']['all_layers'] / 1e6:.2f}",
        )
    return table


class Continuations:
    """Prompts with what is generated after them: a single one as it comes, several at the end."""

    def __init__(self, prompts: Sequence[str], streams: Sequence["TextStream"]) -> None:
        self._prompts, self._streams = prompts, streams
        self._texts = ["" for _ in prompts]
        self._single = len(prompts) == 1
        if self._single:
            print(_end_of(prompts[0]), end="", flush=True)

    def token(self, sequence: int, token: int) -> None:
        """Takes the next token of a sequence."""
        self._add(sequence, self._streams[sequence].push(token))

    def finish(self) -> None:
        """Prints what is left."""
        for sequence, stream in enumerate(self._streams):
            self._add(sequence, stream.finish())
            if not self._single:
                print(f"[{sequence + 1}] {_end_of(self._prompts[sequence])}{self._texts[sequence]}\n")
        if self._single:
            print()

    def _add(self, sequence: int, piece: str) -> None:
        self._texts[sequence] += piece
        if self._single:
            print(piece, end="", flush=True)


def _end_of(prompt: str) -> str:
    """The end of a prompt, which is what the new text goes on from."""
    return prompt if len(prompt) <= SHOWN_CHARACTERS else f"[...] {prompt[-SHOWN_CHARACTERS:]}"


def generation_summary(statistics: "GenerationStatistics", model_id: str) -> list[str]:
    """Speed and cache bytes of a run, in two lines."""
    size = statistics.cache_bytes
    ratio = size["bfloat16"] / max(1, size["total"])
    return [
        f"{model_id}, cache {statistics.cache}: {statistics.prompt_tokens} prompt tokens at "
        f"{statistics.prefill_tokens_per_second:,.1f}/s, {statistics.new_tokens} new tokens at "
        f"{statistics.decode_tokens_per_second:,.1f}/s (and {statistics.compile_seconds:.1f} s to compile)",
        f"cache {size['total']:,} bytes, the same tokens in BF16 {size['bfloat16']:,} ({ratio:.2f}x); "
        f"{size['int2_pages']} INT2 pages, {size['window_pages']} BF16 pages",
    ]
