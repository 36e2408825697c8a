"""Figures of the calibration and evaluation reports: PNG through matplotlib, imported only here.

Twin file, byte-identical in both packages: NumPy and matplotlib.
"""

import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DPI = 110
MOST_TICKS = 24
# One colour per method in every figure; other methods get one of the rest by their name alone.
COLORS = {
    "bf16": "tab:gray",
    "int2": "tab:blue",
    "int2:cache": "deepskyblue",
    "published": "tab:red",
    "hadamard": "tab:orange",
    "naive": "tab:brown",
    "int2:channel_balanced": "tab:cyan",
    "int2:balanced": "tab:green",
    "int2:oscar": "tab:purple",
    "int2:hadamard": "tab:pink",
    "int2:identity": "tab:olive",
    "int2:sequential": "mediumblue",
    "int2:ordered": "royalblue",
    "int2:nearest": "indigo",
    "exported": "rosybrown",
    "published:centered": "lightcoral",
    "kivi": "darkmagenta",
    "fp8": "darkslategray",
    "hqq:4": "forestgreen",
    "hqq:2": "limegreen",
    "quanto:4": "goldenrod",
    "quanto:2": "gold",
}
OTHER_COLORS = ("navy", "teal", "darkgoldenrod", "sienna", "darkgreen", "maroon", "black", "slateblue")


def method_color(method: str) -> str:
    """The colour of a method, the same in every figure."""
    return COLORS.get(method) or OTHER_COLORS[zlib.crc32(method.encode()) % len(OTHER_COLORS)]


def legend_beside(axis: Any) -> None:
    """The legend to the right of the axes, where no data is."""
    if axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def new_figure(columns: int = 1, width: float = 7.0, height: float = 4.2) -> tuple[Any, list[Any]]:
    """A figure and its axes side by side; `width` of each and `height` in inches before they are trimmed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns * 0.8, height), squeeze=False)
    return figure, list(axes[0])


def save_figure(figure: Any, path: pathlib.Path) -> pathlib.Path:
    """Writes a figure and forgets it."""
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    return path


def save_eigenvalue_plot(
    path: pathlib.Path, query: Mapping[int, np.ndarray], key: Mapping[int, np.ndarray]
) -> pathlib.Path:
    """Eigenvalues of the query and of the page-centered key covariance; layer → float [D], head means."""
    figure, axes = new_figure(2)
    for axis, title, spectra in zip(axes, ("queries", "keys (page-centered)"), (query, key)):
        for layer, values in spectra.items():
            ordered = np.sort(np.maximum(values, 1e-12))[::-1]
            axis.semilogy(ordered / ordered.sum(), label=f"layer {layer}", linewidth=1)
        axis.set_title(f"Eigenvalues, {title}")
        axis.set_xlabel("rank")
        axis.set_ylabel("share of the variance")
        axis.grid(alpha=0.3)
        if len(spectra) <= 12:
            legend_beside(axis)
    return save_figure(figure, path)


def save_outlier_plot(
    path: pathlib.Path, before: Mapping[int, np.ndarray], after: Mapping[int, np.ndarray]
) -> pathlib.Path:
    """Standard deviation of the key channels relative to their mean, raw and after the key transform.

    layer → float [D]. A flat line at 1 has no outlier channel.
    """
    figure, axes = new_figure(2)
    for axis, title, channels in zip(axes, ("raw", "after the key transform"), (before, after)):
        for layer, values in channels.items():
            ordered = np.sort(values)[::-1]
            axis.semilogy(ordered / ordered.mean(), label=f"layer {layer}", linewidth=1)
        axis.set_title(f"Key channels, {title}")
        axis.set_xlabel("channel, sorted")
        axis.set_ylabel("standard deviation / mean")
        axis.grid(alpha=0.3)
        if len(channels) <= 12:
            legend_beside(axis)
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, high)
    return save_figure(figure, path)


def save_layer_error_plot(
    path: pathlib.Path, errors: Mapping[str, Mapping[int, float]], ylabel: str, title: str
) -> pathlib.Path:
    """One line per method: layer → error; ticks at the layers measured."""
    figure, axes = new_figure()
    for method, by_layer in errors.items():
        values = [max(value, 1e-9) for value in by_layer.values()]
        axes[0].semilogy(list(by_layer), values, "o-", label=method, ms=3, color=method_color(method))
    layers = sorted({layer for by_layer in errors.values() for layer in by_layer})
    if len(layers) <= MOST_TICKS:
        axes[0].set_xticks(layers)
    axes[0].set_xlabel("layer")
    axes[0].set_ylabel(f"{ylabel} (lower is better)")
    axes[0].set_title(title, fontsize=9)
    axes[0].grid(alpha=0.3)
    legend_beside(axes[0])
    return save_figure(figure, path)


def save_evaluation_plot(
    path: pathlib.Path,
    methods: Sequence[Mapping],
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    title: str,
) -> pathlib.Path:
    """Mean KL to BF16 per method, and KL over the position; curves: method → (positions, mean KL in bins).

    A logarithmic axis has no zero for bars to stand on: the means are points at the end of a line from the
    best method, so that what one sees is how many times worse the others are.
    """
    figure, axes = new_figure(2)
    shown = [row for row in methods if row["kl_mean"] > 0]
    if shown:
        best = min(row["kl_mean"] for row in shown)
        for place, row in enumerate(shown):
            color, value = method_color(row["method"]), row["kl_mean"]
            axes[0].plot([best, value], [place, place], "-", color=color, linewidth=2)
            axes[0].plot([value], [place], "o", color=color)
            ratio = value / best
            times = "" if value == best else f"  ({ratio:,.0f} ×)" if ratio >= 100 else f"  ({ratio:.3g} ×)"
            axes[0].annotate(
                f"{value:.3g}{times}", (value, place), xytext=(7, 0), textcoords="offset points", fontsize=8,
                va="center",
            )  # fmt: skip
        axes[0].set_xscale("log")
        axes[0].axvline(best, color="0.7", linewidth=0.8)
        axes[0].set_yticks(range(len(shown)), [row["method"] for row in shown])
        axes[0].set_ylim(len(shown) - 0.5, -0.7)
        worst = max(row["kl_mean"] for row in shown)
        spread = max(worst / best, 2.0)
        axes[0].set_xlim(best / spread**0.08, worst * spread**0.55)  # the right third is for the numbers
    axes[0].set_xlabel("mean KL(BF16 || method), nats (lower is better)")
    figure.suptitle(title, fontsize=9)
    for method, (positions, values) in curves.items():
        if np.any(values > 0):
            axes[1].semilogy(
                positions, np.maximum(values, 1e-9), "o-", ms=2, linewidth=1, label=method,
                color=method_color(method),
            )  # fmt: skip
    if curves:
        ends = [positions for positions, _ in curves.values() if len(positions)]
        if ends:
            places = np.linspace(ends[0][0], ends[0][-1], min(5, len(ends[0])))
            ticks = np.unique(places.round().astype(int))
            axes[1].set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes[1].set_xlabel("position")
    axes[1].set_ylabel("mean KL, nats (lower is better)")
    axes[1].grid(alpha=0.3)
    legend_beside(axes[1])
    return save_figure(figure, path)


def save_task_plot(
    path: pathlib.Path,
    panels: Mapping[str, Mapping[str, Mapping[int, float]]],
    ylabel: str,
    title: str,
) -> pathlib.Path:
    """One panel per task or measure: method → length → value; ticks at the lengths measured.

    Panels share `ylabel` if there is one, with the same range; else each has its own name there.
    """
    figure, axes = new_figure(len(panels), width=4.0, height=3.6)
    for number, (axis, (name, curves)) in enumerate(zip(axes, panels.items())):
        lengths = sorted({length for by_length in curves.values() for length in by_length})
        for place, (method, by_length) in enumerate(curves.items()):
            size = max(1.0, 4 - 0.7 * place)  # methods that do equally well are seen around each other
            axis.plot(
                list(by_length), list(by_length.values()), "o-", ms=2 * size + 1, linewidth=size,
                label=method, color=method_color(method),
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
        axis.minorticks_off()
        axis.set_xlabel("tokens read")
        axis.grid(alpha=0.3)
        if ylabel:
            axis.set_title(name, fontsize=9)
            axis.set_ylim(-4, 104)
        axis.set_ylabel(ylabel if ylabel and not number else "" if ylabel else name)
        values = [value for by_length in curves.values() for value in by_length.values()]
        if not ylabel and min(values) > 0 and max(values) > 20 * min(values):
            axis.set_yscale("log")
    figure.suptitle(title, fontsize=9)
    legend_beside(axes[-1])
    return save_figure(figure, path)
