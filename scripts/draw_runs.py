"""Draws the plots of recorded runs, as the programs do that recorded them.

    python scripts/draw_runs.py results/SUBJECT/DEVICE-DATE ...

Reads run.json of each folder and writes plot.png beside it. Colours are those of `plots.method_color`: a
method has one in every figure; models have others.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_cases import QUICK, SHAPES

from oscar_torch.evaluation.plots import OTHER_COLORS, legend_beside, method_color, new_figure, save_figure

MODEL_COLORS = dict(zip(SHAPES, (OTHER_COLORS[index] for index in (0, 1, 2, 4, 5)), strict=True))


def draw_speed_ups(rows: Sequence[Mapping[str, Any]], device: str, path: Path) -> None:
    """Speed-up of decode attention over BF16 by sequence length, one line per shape and batch."""
    figure, (axis,) = new_figure(width=10.0)
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for row in rows:
        if row["what"] == "decode" and row["bf16_us"]:
            point = (row["length"], row["bf16_us"] / row["int2_us"])
            lines.setdefault((row["shape"], row["batch"]), []).append(point)
    styles = dict(zip(sorted({batch for _, batch in lines}), itertools.cycle((":", "--", "-"))))
    for (name, batch), points in lines.items():
        axis.plot(
            *zip(*sorted(points)), "o", linestyle=styles[batch], ms=4, color=MODEL_COLORS[name],
            label=f"{name}, batch {batch}",
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()
    axis.axhline(1, color="gray", linewidth=0.8)
    axis.set_xlabel("tokens in the cache")
    axis.set_ylabel("BF16 time / INT2 time (higher is better)")
    axis.set_title(f"Decode attention of one layer in JAX, {device}", fontsize=9)
    axis.grid(alpha=0.3)
    legend_beside(axis)
    save_figure(figure, path)


def draw_times(record: Mapping[str, Any], path: Path) -> None:
    """Bars of the decode times of the quick cases, with the floor of the INT2 cache as a line."""
    measured: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for row in record["rows"]:
        case = (row["model"], row["batch"], row["length"])
        if row["task"] == "decode" and case in QUICK:
            measured.setdefault(case, []).append(row)
    if not measured:
        return
    figure, every = new_figure(len(measured), width=3.4, height=4.2)
    for number, (axis, (case, rows)) in enumerate(zip(every, measured.items())):
        names = [row["kernel"].replace("Attention", " Attention").replace(" ", "\n") for row in rows]
        colors = [method_color(row["kernel"].split()[0].lower()) for row in rows]
        bars = axis.bar(names, [row["microseconds"] for row in rows], color=colors)
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
        axis.axhline(min(row["floor"] for row in rows), color="black", linestyle=":", label="floor of INT2")
        axis.margins(y=0.12)
        axis.set_title("{}, batch {},\n{:,} tokens".format(*case), fontsize=9)
        axis.tick_params(axis="x", labelsize=6)
        if not number:
            axis.set_ylabel("µs (lower is better)")
    figure.suptitle(f"Decode attention of one layer in Torch {record['torch']}, {record['gpu']}", fontsize=10)
    legend_beside(every[-1])
    save_figure(figure, path)


def draw_peers(record: Mapping[str, Any], path: Path) -> None:
    """KL over the bytes of the cache, a point per method, both on logarithmic axes."""
    from matplotlib import ticker

    rows = [row for row in record["rows"] if row["method"] != "bf16"]
    if not rows:
        return
    settings = record["settings"]
    figure, (axis,) = new_figure(width=9.5, height=4.8)
    for row in rows:
        mine = row["method"].startswith("int2")
        axis.scatter(
            row["cache_bytes"] / 1e6, row["kl"], s=70 if mine else 35, color=method_color(row["method"]),
            marker="D" if mine else "o", label=row["method"], zorder=3, alpha=0.8,
        )  # fmt: skip
    dense = next((row["cache_bytes"] for row in record["rows"] if row["method"] == "bf16"), None)
    if dense:
        axis.axvline(
            dense / 1e6, color=method_color("bf16"), linewidth=1, linestyle="--", label="bf16 (KL 0)"
        )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 6, 8)))
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_xlabel("cache of the quantized layers, MB (smaller is better)")
    axis.set_ylabel("mean KL(BF16 || method), nats (lower is better)")
    title = f"Caches side by side, {settings['model']}, {settings['context']:,} tokens, {record['device']}"
    axis.set_title(title, fontsize=9)
    axis.grid(alpha=0.3, which="both")
    legend_beside(axis)
    save_figure(figure, path)


def draw_steps(record: Mapping[str, Any], path: Path) -> None:
    """Speed-up of whole decode steps over BF16 by batch, beside what the bytes allow."""
    rows = sorted(record["rows"], key=lambda row: row["batch"])
    figure, (axis,) = new_figure(width=8.0)
    for offset, name, color, label in (
        (-0.2, "speed_up", method_color("int2"), "measured"),
        (0.2, "allowed_speed_up", "0.8", "allowed by the bytes"),
    ):
        places = [place + offset for place in range(len(rows))]
        bars = axis.bar(places, [row[name] for row in rows], 0.4, color=color, label=label)
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
    axis.margins(y=0.1)
    axis.set_ylabel("BF16 step / INT2 step (higher is better)")
    axis.set_title(
        f"Decode steps in JAX, {record['model']},\n{record['length']:,} tokens, {record['device']}",
        fontsize=9,
    )
    legend_beside(axis)
    save_figure(figure, path)


def draw_evaluation(record: Mapping[str, Any], path: Path) -> None:
    """What `oscar evaluate` draws."""
    from oscar_jax.evaluation.report import save_evaluation_plots

    _first_of(lambda folder: save_evaluation_plots(record, folder), "evaluation.png", path)


def draw_tasks(record: Mapping[str, Any], path: Path) -> None:
    """What `oscar tasks` draws: answers, or where there are none what was written."""
    from oscar_jax.evaluation.task_report import save_task_plots

    name = "tasks.png" if record["accuracy"] else "writing.png"
    _first_of(lambda folder: save_task_plots(record, folder), name, path)


def _first_of(draw: Callable[[Path], None], name: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
        shutil.copy(Path(folder) / name, path)


PLOTS: dict[str, Callable[[Mapping[str, Any], Path], None]] = {  # by how the subject begins
    "quality-": draw_evaluation,
    "sequential-rounding-": draw_evaluation,
    "tasks-": draw_tasks,
    "peers-": draw_peers,
    "kernels-jax": lambda record, path: draw_speed_ups(record["rows"], record["device"], path),
    "kernels-torch": draw_times,
    "decode-six-layers-jax": draw_steps,
}


def main(arguments: list[str] | None = None) -> int:
    """Draws the plots; exit code 2 for a run of a subject that has none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="FOLDER", help="results/SUBJECT/DEVICE-DATE")
    for run in parser.parse_args(arguments).runs:
        subject = run.resolve().parent.name
        draw = next((draw for start, draw in PLOTS.items() if subject.startswith(start)), None)
        if draw is None:
            print(f"{run} has no plot, allowed: {', '.join(PLOTS)}", file=sys.stderr)
            return 2
        draw(json.loads((run / "run.json").read_text()), run / "plot.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
