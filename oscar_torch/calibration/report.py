"""Tables and plots of a calibration.

Twin file, byte-identical in both packages: NumPy, and matplotlib for the plots.
"""

import dataclasses
import importlib.util
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluation import plots
from ..rotations import fixed_point
from ..rotations.rotation import RotationSet
from ..rotations.statistics import LayerStatistics

# The whole run.


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A fitted rotation set with what it was fitted on and what it promises."""

    rotation_set: RotationSet
    statistics: dict[int, LayerStatistics]
    report: dict[str, Any]


def save_report(calibration: Calibration, directory: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Writes report.json, report.md, eigenvalues.png, channels.png and layers.png into `directory`.

    Without matplotlib there are no plots, and the page says so.
    """
    drawn = importlib.util.find_spec("matplotlib") is not None
    directory.mkdir(parents=True, exist_ok=True)
    document = {**about, **calibration.report}
    (directory / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (directory / "report.md").write_text(markdown_report(document, plots_drawn=drawn))
    if not drawn:
        return
    statistics, rotations = calibration.statistics, calibration.rotation_set.layers

    def spectrum(matrices: np.ndarray) -> np.ndarray:
        return np.linalg.eigvalsh(matrices).mean(axis=0)

    plots.save_eigenvalue_plot(
        directory / "eigenvalues.png",
        {layer: spectrum(s.query_covariance) for layer, s in statistics.items()},
        {layer: spectrum(s.key_covariance) for layer, s in statistics.items()},
    )
    before, after = {}, {}
    for layer, entry in statistics.items():
        transform = fixed_point.from_fixed_point(rotations[layer].numpy()["key_transform"])
        covariances = entry.key_covariance
        before[layer] = np.sqrt(np.diagonal(covariances, axis1=1, axis2=2)).mean(axis=0)
        rotated = transform.swapaxes(1, 2) @ covariances @ transform
        after[layer] = np.sqrt(np.maximum(np.diagonal(rotated, axis1=1, axis2=2), 0)).mean(axis=0)
    plots.save_outlier_plot(directory / "channels.png", before, after)
    predicted = {int(layer): entry["predicted"] for layer, entry in document["layers"].items()}
    if all(predicted.values()):
        plots.save_layer_error_plot(
            directory / "layers.png",
            {
                "attention KL, nats": {layer: errors["kl"] for layer, errors in predicted.items()},
                "relative output error": {layer: e["output_error"] for layer, e in predicted.items()},
            },
            "predicted error",
            f"{document['model']}, held-out text",
        )


def markdown_report(document: Mapping[str, Any], *, plots_drawn: bool = True) -> str:
    """The calibration report as Markdown."""
    lines = [
        f"# Calibration of {document['model']}",
        "",
        f"Basis {document['basis']}, {'per head' if document['per_head'] else 'shared in a layer'}, rounding "
        f"{document['rounding']}; "
        f"{document['fit_tokens']} tokens to fit, {document['held_out_tokens']} held out, sequences of "
        f"{document['context']} tokens, {document['dtype']} model, text digest {document['corpus_digest']}.",
        "",
        "Predicted errors: attention over INT2 pages against exact attention on held-out text, at positions "
        "in the later half of the sequences, means over heads.",
        "",
        "| layer | keys | values | attention KL | output error | of values alone | condition of T_K |",
        "|---|---|---|---|---|---|---|",
    ]
    for layer, entry in document["layers"].items():
        predicted = entry["predicted"]
        cells = [f"{predicted[k]:.4g}" if predicted else "–" for k in ("kl", "output_error", "value_error")]
        keys = _describe(entry["chosen"].get("key", []))
        values = _describe(entry["chosen"].get("value", []))
        condition = f"{entry['key_condition_number']:.3g}"
        lines.append(f"| {layer} | {keys} | {values or 'hadamard'} | {' | '.join(cells)} | {condition} |")
    if not document["held_out_is_separate"]:
        lines += ["", "The text was too short to hold a sequence out: the errors are on the fitted text."]
    if plots_drawn:
        lines += ["", "![eigenvalues](eigenvalues.png)", "![channels](channels.png)", ""]
    else:
        lines += ["", "Plots need matplotlib: pip install matplotlib", ""]
    return "\n".join(lines)


def _describe(choices: Sequence[Mapping[str, Any]]) -> str:
    words = []
    for choice in choices:
        text = str(choice["basis"])
        if "alpha" in choice:
            text += f" α {choice['alpha']:.2f}"
        words.append(text)
    counted = {word: words.count(word) for word in words}
    return ", ".join(word if count == 1 else f"{count}× {word}" for word, count in counted.items())
