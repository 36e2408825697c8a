"""Figures of the calibration and evaluation reports: PNG through matplotlib, imported only here."""

import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

DPI = 110


def _new_figure(columns: int = 1, width: float = 7.0, height: float = 4.2):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, figsize=(width * columns * 0.8, height), squeeze=False)
    return figure, list(axes[0])


def _save(figure, path: pathlib.Path) -> pathlib.Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    return path


def save_eigenvalue_plot(
    path: pathlib.Path, query: Mapping[int, np.ndarray], key: Mapping[int, np.ndarray]
) -> pathlib.Path:
    """Eigenvalues of the query and of the page-centered key covariance; layer → float [D], head means."""
    figure, axes = _new_figure(2)
    for axis, title, spectra in zip(axes, ("queries", "keys (page-centered)"), (query, key)):
        for layer, values in spectra.items():
            ordered = np.sort(np.maximum(values, 1e-12))[::-1]
            axis.semilogy(ordered / ordered.sum(), label=f"layer {layer}", linewidth=1)
        axis.set_title(f"Eigenvalues, {title}")
        axis.set_xlabel("rank")
        axis.set_ylabel("share of the variance")
        axis.grid(alpha=0.3)
        if len(spectra) <= 12:
            axis.legend(fontsize=7)
    return _save(figure, path)


def save_outlier_plot(
    path: pathlib.Path, before: Mapping[int, np.ndarray], after: Mapping[int, np.ndarray]
) -> pathlib.Path:
    """Standard deviation of the key channels relative to their mean, raw and after the key transform.

    layer → float [D]. A flat line at 1 has no outlier channel.
    """
    figure, axes = _new_figure(2)
    for axis, title, channels in zip(axes, ("raw", "after the key transform"), (before, after)):
        for layer, values in channels.items():
            ordered = np.sort(values)[::-1]
            axis.semilogy(ordered / ordered.mean(), label=f"layer {layer}", linewidth=1)
        axis.set_title(f"Key channels, {title}")
        axis.set_xlabel("channel, sorted")
        axis.set_ylabel("standard deviation / mean")
        axis.grid(alpha=0.3)
        if len(channels) <= 12:
            axis.legend(fontsize=7)
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, high)
    return _save(figure, path)


def save_layer_error_plot(
    path: pathlib.Path, errors: Mapping[str, Mapping[int, float]], ylabel: str, title: str
) -> pathlib.Path:
    """One line per method: layer → error."""
    figure, axes = _new_figure()
    for method, by_layer in errors.items():
        axes[0].semilogy(list(by_layer), [max(v, 1e-9) for v in by_layer.values()], "o-", label=method, ms=3)
    axes[0].set_xlabel("layer")
    axes[0].set_ylabel(ylabel)
    axes[0].set_title(title)
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def save_evaluation_plot(
    path: pathlib.Path,
    methods: Sequence[Mapping],
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]],
    title: str,
) -> pathlib.Path:
    """Bars of mean KL to BF16, and KL over the position; curves: method → (positions, mean KL in bins)."""
    figure, axes = _new_figure(2)
    shown = [row for row in methods if row["kl_mean"] > 0]
    bars = axes[0].barh([row["method"] for row in shown], [row["kl_mean"] for row in shown], color="tab:blue")
    axes[0].bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    axes[0].set_xscale("log")
    axes[0].margins(x=0.2)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("mean KL(BF16 || method), nats")
    axes[0].set_title(title)
    for method, (positions, values) in curves.items():
        if np.any(values > 0):
            axes[1].semilogy(positions, np.maximum(values, 1e-9), "o-", ms=2, linewidth=1, label=method)
    axes[1].set_xlabel("position")
    axes[1].set_ylabel("mean KL, nats")
    axes[1].grid(alpha=0.3)
    axes[1].legend(fontsize=8)
    return _save(figure, path)
