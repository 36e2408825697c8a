"""Tables, JSON and plots of tasks."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.files import replacing_file
from . import plots

NOTES = {
    "accuracy": "mean share of the expected numbers, names or leading lines of code that an answer holds",
    "error": "standard error of the mean over the questions",
    "difference": "accuracy less that of BF16 on the same questions; difference_error is its standard error",
    "perplexity": "of what the method wrote, by the BF16 model that has read the same prompt and text",
    "agreement": "tokens written before the first that differs from what BF16 wrote",
    "variety": "share of the runs of four tokens that are new: low for a text that goes in circles",
}


def summary(document: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the records say together, ready for JSON: `accuracy` and `writing` by length, records, notes."""
    names = [row["method"] for row in document["methods"]]
    accuracy: dict[str, dict[str, dict[str, Any]]] = {}
    writing: dict[str, dict[str, Any]] = {}
    for length in document["lengths"]:
        here = [record for record in records if record["length"] == length]
        asked = [question for record in here for question in record.get("questions", ())]
        for task in document["tasks"]:
            scores = [question["scores"] for question in asked if question["task"] == task]
            if scores:
                by_method = {name: np.asarray([row[name] for row in scores]) for name in names}
                accuracy.setdefault(str(length), {})[task] = {
                    "questions": len(scores),
                    "accuracy": {name: float(column.mean()) for name, column in by_method.items()},
                    "error": {name: _error(column) for name, column in by_method.items()},
                    "difference": {
                        name: float((column - by_method[names[0]]).mean())
                        for name, column in by_method.items()
                    },
                    "difference_error": {
                        name: _error(column - by_method[names[0]]) for name, column in by_method.items()
                    },
                }
        texts = [record["texts"] for record in here if "texts" in record]
        if texts:
            writing[str(length)] = {
                "texts": len(texts),
                "perplexity": {
                    name: float(np.exp(np.mean([np.log(row[name]["perplexity"]) for row in texts])))
                    for name in names
                },
                **{
                    measure: {name: float(np.mean([row[name][measure] for row in texts])) for name in names}
                    for measure in ("agreement", "variety")
                },
            }
    return {"accuracy": accuracy, "writing": writing, "notes": NOTES, "records": list(records)}


def _error(column: np.ndarray) -> float:
    return float(column.std() / np.sqrt(len(column)))


def mean_difference(document: Mapping[str, Any], length: int | str, method: str) -> tuple[float, float]:
    """Mean accuracy less that of BF16 on the same questions, over the tasks of one length; standard error."""
    rows = list(document["accuracy"][str(length)].values())
    errors = [row["difference_error"][method] for row in rows]
    return float(np.mean([row["difference"][method] for row in rows])), float(
        np.linalg.norm(errors) / len(rows)
    )


def mean_accuracy(document: Mapping[str, Any], length: int | str, method: str) -> float:
    """Mean over the tasks of one length."""
    return float(np.mean([row["accuracy"][method] for row in document["accuracy"][str(length)].values()]))


def record_line(record: Mapping[str, Any]) -> str:
    """One context in one line: the mean accuracy of every method, or the perplexity of what it wrote."""
    where = f"{record['length']:,} tokens, context {record['trial'] + 1}"
    if "texts" in record:
        cells = (f"{name} {row['perplexity']:.4g}" for name, row in record["texts"].items())
        return f"{where}, perplexity: {', '.join(cells)}"
    scores = [question["scores"] for question in record["questions"]]
    cells = (f"{name} {100 * float(np.mean([row[name] for row in scores])):.0f} %" for name in scores[0])
    return f"{where}, {len(scores)} questions: {', '.join(cells)}"


def task_table(document: Mapping[str, Any]) -> list[str]:
    """The report as Markdown lines: accuracy by length and task, then what was written."""
    methods = [row["method"] for row in document["methods"]]
    head = [*methods]
    lines = [
        f"# Tasks, {document['model']}",
        "",
        f"{document['trials']} contexts per length, greedy answers, {document['dtype']} model on "
        f"{document['device']}; sink {document['sink_tokens']}, recent {document['recent_tokens']} tokens in "
        f"BF16. Rotation set: {document['rotations'] or 'none'}. History read {document['history']}.",
    ]
    if document["accuracy"]:
        lines += ["", "Accuracy (higher is better):", ""]
        lines += ["| tokens | task | questions | " + " | ".join(head) + " |"]
        lines += ["|---" * (len(head) + 3) + "|"]
        for length, tasks in document["accuracy"].items():
            for task, row in tasks.items():
                cells = (f"{100 * row['accuracy'][name]:.1f} %" for name in methods)
                lines.append(f"| {length} | {task} | {row['questions']} | " + " | ".join(cells) + " |")
            total = sum(row["questions"] for row in tasks.values())
            cells = (f"**{100 * mean_accuracy(document, length, name):.1f} %**" for name in methods)
            lines.append(f"| {length} | **mean** | {total} | " + " | ".join(cells) + " |")
            differences = (mean_difference(document, length, name) for name in methods)
            cells = (f"{100 * mean:+.1f} ± {100 * error:.1f}" for mean, error in differences)
            lines.append(f"| {length} | less BF16, points | {total} | " + " | ".join(cells) + " |")
    if document["writing"]:
        lines += ["", f"{document['new_tokens']} tokens written after a text of each length:", ""]
        lines += ["| tokens | measure | " + " | ".join(head) + " |", "|---" * (len(head) + 2) + "|"]
        for length, row in document["writing"].items():
            for measure, form in (("perplexity", "{:.4g}"), ("agreement", "{:.0f}"), ("variety", "{:.2f}")):
                cells = (form.format(row[measure][name]) for name in methods)
                lines.append(f"| {length} | {measure} | " + " | ".join(cells) + " |")
    return [*lines, "", *(f"- {name}: {note}" for name, note in document["notes"].items())]


def save_tasks(document: Mapping[str, Any], directory: pathlib.Path, name: str) -> None:
    """Writes NAME and tasks.md into `directory`, each whole or not at all."""
    with replacing_file(directory / name) as partial:
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with replacing_file(directory / "tasks.md") as partial:
        partial.write_text("\n".join(task_table(document)) + "\n", encoding="utf-8")


def save_task_plots(document: Mapping[str, Any], directory: pathlib.Path) -> None:
    """Writes tasks.png and writing.png, those of which there is something to show."""
    methods = [row["method"] for row in document["methods"]]
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for length, tasks in document["accuracy"].items():
        for task, row in tasks.items():
            for method in methods:
                curve = panels.setdefault(task, {}).setdefault(method, {})
                curve[int(length)] = 100 * row["accuracy"][method]
    if panels:
        title = f"Greedy answers, {document['model']}, {document['device']}"
        plots.save_task_plot(directory / "tasks.png", panels, "accuracy, % (higher is better)", title)
    measures = {
        measure: {
            method: {int(length): row[measure][method] for length, row in document["writing"].items()}
            for method in methods
        }
        for measure in ("perplexity", "agreement")
    }
    if document["writing"]:
        title = f"{document['new_tokens']} tokens written, {document['model']}, {document['device']}"
        labels = ("perplexity by BF16 (lower is better)", "tokens equal to BF16's (higher is better)")
        renamed: dict[str, Any] = dict(zip(labels, measures.values()))
        plots.save_task_plot(directory / "writing.png", renamed, "", title)
