"""Tables, JSON and plots of an evaluation."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import plots
from .stepper import Method
from .streams import TokenStream

CURVE_BINS = 24


@dataclasses.dataclass
class StreamResult:
    """What one stream yields: per-position measures of every method and per-layer attention errors."""

    stream: TokenStream
    positions: np.ndarray  # int32 [R]
    nll: dict[str, np.ndarray]  # method -> float32 [R]
    kl: dict[str, np.ndarray]
    top1: dict[str, np.ndarray]
    layer_errors: dict[str, dict[int, dict[str, float]]]
    cache_bytes: dict[str, dict[str, int]]


def summarize(results: Sequence[StreamResult], methods: Sequence[Method]) -> list[dict[str, Any]]:
    """One table row per method over all positions of the given streams."""
    rows = []
    positions = np.concatenate([result.positions for result in results])
    for method in methods:
        nll, kl, top1 = (
            np.concatenate([getattr(result, field)[method.name] for result in results])
            for field in ("nll", "kl", "top1")
        )
        late = np.concatenate([result.positions >= len(result.stream.tokens) // 2 for result in results])
        layers = {
            str(layer): {
                measure: float(
                    np.mean([result.layer_errors[method.name][layer][measure] for result in results])
                )
                for measure in ("kl", "output_error", "value_error")
            }
            for layer in method.rotations
        }
        size = {
            part: round(np.mean([result.cache_bytes[method.name][part] for result in results]))
            for part in results[0].cache_bytes[method.name]
        }
        rows.append(
            {
                "method": method.name,
                "basis": method.basis,
                "bits_per_element": method.bits,
                "perplexity": float(np.exp(nll.astype(np.float64).mean())),
                "kl_mean": _mean(kl),
                "kl_median": float(np.median(kl)),
                "kl_p99": float(np.quantile(kl, 0.99)),
                "kl_mean_first_half": _mean(kl[~late]),
                "kl_mean_second_half": _mean(kl[late]),
                "top1": float(top1.mean()),
                "cache_bytes": size,
                "layers": layers,
                "curve": _kl_curve(positions, kl),
            }
        )
    return rows


def _mean(values: np.ndarray) -> float | None:
    return float(values.astype(np.float64).mean()) if len(values) else None


def evaluation_document(
    results: Sequence[StreamResult], methods: Sequence[Method], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that was measured, ready for JSON; `about` says of what and with what."""
    return {
        **about,
        "methods": summarize(results, methods),
        "texts": [
            {
                "label": result.stream.label,
                "digest": result.stream.digest,
                "tokens": len(result.stream.tokens),
                "positions": {
                    "first": int(result.positions[0]),
                    "last": int(result.positions[-1]),
                    "count": len(result.positions),
                },
                "methods": summarize([result], methods),
            }
            for result in results
        ],
        "notes": {
            "kl": "KL(bf16 || method) of next-token distributions, nats, at the listed positions",
            "kl_mean_second_half": "the same in the second half of the context; first_half likewise",
            "top1": "share of positions where the likeliest token equals that of bf16",
            "bits_per_element": (
                "of the quantized history: int2 2 + 16/D (row scale) + 8/64 (mean key of a page, keys "
                "and values averaged); asymmetric recipes 2 + 2*16/group, group = 128 channels, or D if 128 "
                "does not divide it; kivi 2 + 2*16/32; fp8 8 + 16/D"
            ),
            "layers": "attention KL and relative squared output error of a layer on exact inputs",
            "cache_bytes": "live bytes at the end of the context, mean over the texts",
        },
    }


def markdown_report(document: Mapping[str, Any]) -> str:
    """The evaluation as Markdown tables: pooled, then per text, then per layer."""
    quantized, total = document["quantized_layers"], document["num_layers"]
    lines = [
        f"# Evaluation of {document['model']}",
        "",
        f"Context {document['context']} tokens, {document['dtype']} model, "
        f"every {document['every']}. position; sink {document['sink_tokens']}, recent "
        f"{document['recent_tokens']} tokens in BF16. Quantized in every method: "
        f"{len(quantized)} of {total} layers ({short_list(quantized)}).",
        f"History read {document['history']}; {100 * document['int2_share']:.0f} % of the tokens read at the "
        "judged positions come from INT2 pages.",
        f"Rotation set: {document['rotations'] or 'none'}. Device: {document['device']}.",
        "",
        "## All texts",
        "",
        *table_lines(document["methods"]),
    ]
    for text in document["texts"]:
        positions = text["positions"]
        lines += [
            "",
            f"## {text['label']}",
            "",
            f"Text digest {text['digest']}, {positions['count']} positions "
            f"{positions['first']} … {positions['last']}.",
            "",
            *table_lines(text["methods"]),
        ]
    layered = [row for row in document["methods"] if row["layers"]]
    if layered:
        lines += ["", "## Attention by layer (exact inputs): KL · relative output error", ""]
        lines += ["| layer | " + " | ".join(row["method"] for row in layered) + " |"]
        lines += ["|---" * (len(layered) + 1) + "|"]
        for layer in layered[0]["layers"]:
            cells = (row["layers"][layer] for row in layered)
            lines.append(
                f"| {layer} | " + " | ".join(f"{c['kl']:.4f} · {c['output_error']:.4f}" for c in cells) + " |"
            )
    lines += ["", *(f"- {name}: {note}" for name, note in document["notes"].items()), ""]
    return "\n".join(lines)


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The main table as Markdown lines."""
    lines = [
        "| method | bits | perplexity | KL mean | median | p99 | 1st half | 2nd half | top-1 "
        "| cache, INT2 layers |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        size = row["cache_bytes"]
        lines.append(
            f"| {row['method']} | {row['bits_per_element']:.4g} | {row['perplexity']:.4g} "
            f"| {row['kl_mean']:.4g} | {row['kl_median']:.4g} | {row['kl_p99']:.4g} "
            f"| {_figure(row['kl_mean_first_half'])} | {_figure(row['kl_mean_second_half'])} "
            f"| {100 * row['top1']:.1f} % | {size['quantized_layers'] / 1e6:.2f} MB |"
        )
    return lines


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def short_list(values: Sequence[int]) -> str:
    """The first dozen of some numbers."""
    text = ", ".join(map(str, values[:12]))
    return text + (", …" if len(values) > 12 else "")


def save_evaluation(document: Mapping[str, Any], directory: pathlib.Path) -> None:
    """Writes evaluation.json, evaluation.md, evaluation.png and layers.png into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "evaluation.md").write_text(markdown_report(document))
    save_evaluation_plots(document, directory)


def save_evaluation_plots(document: Mapping[str, Any], directory: pathlib.Path) -> None:
    """Writes evaluation.png and layers.png; a record without curves shows the means of both halves."""
    device = " ".join(dict.fromkeys(document["device"].split()))  # "cpu cpu" is one
    title = f"Next-token distributions, {document['model']}, {document['context']:,} tokens, {device}"
    middles = [document["context"] * part for part in (0.25, 0.75)]
    curves = {}
    for row in document["methods"]:
        halves = [middles, [row["kl_mean_first_half"], row["kl_mean_second_half"]]]
        positions, kl = row["curve"].values() if "curve" in row else halves
        if None not in kl:
            curves[row["method"]] = np.asarray(positions), np.asarray(kl)
    plots.save_evaluation_plot(directory / "evaluation.png", document["methods"], curves, title)
    errors = {
        row["method"]: {int(layer): cell["kl"] for layer, cell in row["layers"].items()}
        for row in document["methods"]
        if row["layers"]
    }
    if errors:
        plots.save_layer_error_plot(directory / "layers.png", errors, "attention KL, nats", title)


def _kl_curve(positions: np.ndarray, kl: np.ndarray) -> dict[str, list[float]]:
    """Mean KL in equal bins of positions."""
    edges = np.linspace(positions.min(), positions.max() + 1, min(CURVE_BINS, len(positions)) + 1)
    place = np.digitize(positions, edges) - 1
    filled = np.unique(place)
    means = [float(kl[place == i].mean()) for i in filled]
    return {"positions": ((edges[:-1] + edges[1:])[filled] / 2).tolist(), "kl": means}
