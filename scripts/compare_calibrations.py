"""Rotation sets of both backends and both roundings, judged side by side on text that they have not seen.

    python scripts/compare_calibrations.py --backends jax torch --subject calibration-backends --out results
    python scripts/compare_calibrations.py --model FILE --sequences 4096 8192 --context 32768 --out results

For each length in --sequences and each backend `calibrate` reads prose and code of the Python installation
(those of the quickstart), and `oscar fit --rounding sequential` makes a second set of the same statistics.
Judged are the sets as they were written, by what `oscar evaluate` measures: KL to the same model with a BF16
cache, values quantized too. What a query reads depends on its position alone, so the figures of a shorter
context are those of the positions below it. "keys only": keys rounded sequentially, values to the nearest.
--noise also judges sets of the same statistics, moved by so little (relative) that they are as good: how far
apart their figures lie is how much a difference means.
"""

import argparse
import dataclasses
import datetime
import json
import pathlib
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sample_texts import find_texts

from oscar_jax.arithmetic import default_chunk
from oscar_jax.calibration.job import calibrate, fit
from oscar_jax.core import cache_format as fmt
from oscar_jax.core.config import CalibrationConfig
from oscar_jax.evaluation import fidelity, job
from oscar_jax.evaluation.report import StreamResult
from oscar_jax.evaluation.stepper import Method, make_runner
from oscar_jax.evaluation.streams import read_stream
from oscar_jax.evaluation.subject import Subject, load_subject
from oscar_jax.rotations import store
from oscar_jax.rotations.fit import fit_layer_rotation
from oscar_jax.rotations.rotation import LayerRotation
from oscar_jax.rotations.statistics import STATISTICS_FILE, LayerStatistics, load_statistics

RATIOS = ("to_nearest", "to_first_backend", "medians")
CONTEXTS = (2048, 4096, 8192, 16_384, 32_768)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """A set to judge: who calibrated in sequences of how many tokens, and how its pages are rounded."""

    backend: str
    sequence: int
    rounding: str
    seconds: float

    @property
    def name(self) -> str:
        """Its name as a method."""
        return f"{self.backend} {self.sequence} {self.rounding}"


def calibrated(
    subject: Subject, arguments: argparse.Namespace, texts: list[str], here: pathlib.Path
) -> Iterator[tuple[Calibrated, dict[int, LayerRotation]]]:
    """Every set that was asked for, from its files."""
    for backend in arguments.backends:
        for sequence in arguments.sequences:
            folder = here / f"{backend}-{sequence}"
            settings = CalibrationConfig(tokens=arguments.tokens, context=sequence, rounding="nearest")
            started = time.perf_counter()
            if backend == "jax":
                calibrate(subject, texts, folder, settings)
            else:
                calibrate_in_torch(arguments.model, texts, folder, settings)
            seconds = round(time.perf_counter() - started, 1)
            yield Calibrated(backend, sequence, "nearest", seconds), store.load_rotation_set(folder).layers
            sequential = CalibrationConfig(rounding="sequential")
            if both := "sequential" in arguments.roundings:
                fitted = fit(folder, here / f"{backend}-{sequence}-sequential", sequential).layers
                yield Calibrated(backend, sequence, "sequential", seconds), fitted
            statistics = load_statistics(folder / STATISTICS_FILE)
            if both and arguments.keys_only and backend == arguments.backends[0]:
                keys = fitted_to(statistics, "sequential", value_basis="hadamard")
                yield Calibrated(backend, sequence, "sequential, keys only", seconds), keys
            if arguments.noise and backend == arguments.backends[0]:
                moved = {layer: moved_by(entry, arguments.noise) for layer, entry in statistics.items()}
                for rounding in arguments.roundings:
                    one = Calibrated(f"{backend}, moved", sequence, rounding, seconds)
                    yield one, fitted_to(moved, rounding)


def fitted_to(
    statistics: Mapping[int, LayerStatistics], rounding: str, **options: Any
) -> dict[int, LayerRotation]:
    """The rotations of the default basis of a rounding."""
    settings = CalibrationConfig(rounding=rounding)
    return {
        layer: fit_layer_rotation(entry, settings.basis, per_head=True, damping=settings.damping, **options)
        for layer, entry in statistics.items()
    }


def moved_by(entry: LayerStatistics, share: float) -> LayerStatistics:
    """Covariances C of keys and queries as (1 + E) C (1 + E)ᵀ, E random of norm about `share`."""
    generator = np.random.default_rng(0)
    size = entry.key_mean.shape[1]
    turn = np.eye(size) + generator.standard_normal((size, size)) * share / np.sqrt(size)
    names = ("query_covariance", "coded_query_covariance", "key_covariance")
    found = {name: getattr(entry, name) for name in names}
    return dataclasses.replace(
        entry, **{name: turn @ value @ turn.T for name, value in found.items() if value is not None}
    )


def calibrate_in_torch(
    model: str, texts: list[str], folder: pathlib.Path, settings: CalibrationConfig
) -> None:
    """`oscar calibrate --backend torch`."""
    from oscar_torch import calibrate as calibrate_torch
    from oscar_torch.core.config import CalibrationConfig as Settings

    calibrate_torch(model, texts, folder, Settings(**dataclasses.asdict(settings)))


def rows_of(sets: list[Calibrated], results: list[StreamResult], contexts: list[int]) -> list[dict[str, Any]]:
    """A row per set, context and text, and one of all texts."""
    rows = []
    for context in contexts:
        for label, parts in (
            *((result.stream.label, [result]) for result in results),
            ("all", results),
        ):
            for one in sets:
                kl, top1, late = [], [], []
                for result in parts:
                    judged = result.positions < context - 1
                    kl.append(result.kl[one.name][judged])
                    top1.append(result.top1[one.name][judged])
                    late.append(result.positions[judged] >= context // 2)
                every, half = np.concatenate(kl), np.concatenate(late)
                rows.append(
                    {
                        **dataclasses.asdict(one),
                        "context": context,
                        "text": label,
                        "positions": len(every),
                        "kl_mean": float(every.mean()),
                        "kl_error": float(every.std() / len(every) ** 0.5),
                        "kl_median": float(np.median(every)),
                        "kl_mean_second_half": float(every[half].mean()),
                        "kl_p99": float(np.quantile(every, 0.99)),
                        "top1": float(np.concatenate(top1).mean()),
                    }
                )
    return rows


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean KL of each set relative to the one of nearest rounding, and to that of the first backend."""
    by_key = {(r["backend"], r["sequence"], r["rounding"], r["context"], r["text"]): r for r in rows}
    first = rows[0]["backend"]
    found = []
    for (backend, sequence, rounding, context, text), row in by_key.items():
        entry: dict[str, Any] = {}
        if rounding != "nearest":
            nearest = by_key[backend, sequence, "nearest", context, text]
            entry["to_nearest"] = row["kl_mean"] / nearest["kl_mean"]
        if backend != first:
            other = by_key[first, sequence, rounding, context, text]
            entry["to_first_backend"] = row["kl_mean"] / other["kl_mean"]
            entry["medians"] = row["kl_median"] / other["kl_median"]
        if entry:
            place = {"backend": backend, "sequence": sequence, "rounding": rounding}
            found.append(place | {"context": context, "text": text} | entry)
    return found


def page_of(document: dict[str, Any]) -> str:
    """The document as a page to read."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"# {document['title']}",
        "",
        f"{document['model']}, {document['dtype']}, {document['device']}; {versions}; {document['created']};",
        f"`{document['command']}`.",
        "",
        f"Calibrated on {document['tokens']} tokens of {' and '.join(document['calibration_texts'])},",
        f"judged on {document['context']} tokens of each text, at every {document['every']}. position.",
        "KL to the same model with a BF16 cache, nats; values quantized too; late: second half of them.",
        "",
        "| calibrated by | sequences | rounding | context | text | mean KL | median | late | p99 | top-1 |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {r['backend']} | {r['sequence']} | {r['rounding']} | {r['context']} | {r['text']} "
        f"| {r['kl_mean']:.5f} ± {r['kl_error']:.5f} | {r['kl_median']:.5f} "
        f"| {r['kl_mean_second_half']:.5f} | {r['kl_p99']:.4f} | {r['top1']:.2%} |"
        for r in document["rows"]
    ]
    lines += ["", "## Mean KL, relative", ""]
    first = document["rows"][0]["backend"]
    lines += [
        f"| calibrated by | sequences of | rounding | context | text | to nearest | to {first} | medians |"
    ]
    lines += ["| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |"]
    for r in document["ratios"]:
        shares = [f"{r[name]:.3f}" if name in r else "" for name in RATIOS]
        lines.append(
            f"| {r['backend']} | {r['sequence']} | {r['rounding']} | {r['context']} | {r['text']} "
            f"| {' | '.join(shares)} |"
        )
    seconds = [f"{r['backend']} {r['sequence']}: {r['seconds']} s" for r in document["calibrations"]]
    if document["noise"]:
        lines += ["", f"moved: fitted to statistics that differ by a relative {document['noise']:g}."]
    lines += ["", f"Calibrations, compilation and loading included: {', '.join(seconds)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs, prints the page, and with --out writes a recorded run, whole again after every text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="gemma3-270m", help="a checkpoint, .gguf file or weights package")
    parser.add_argument("--backends", nargs="+", choices=("jax", "torch"), default=["jax"])
    parser.add_argument("--roundings", nargs="+", choices=fmt.ROUNDINGS, default=list(fmt.ROUNDINGS))
    parser.add_argument("--keys-only", action="store_true", help="also sequential keys with nearest values")
    parser.add_argument("--noise", type=float, default=0.0, help="relative; also sets that should be as good")
    parser.add_argument("--sequences", type=int, nargs="+", default=[4096], help="lengths to calibrate in")
    parser.add_argument("--tokens", type=int, default=CalibrationConfig.tokens, help="to calibrate on")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each text that are judged")
    parser.add_argument("--every", type=int, default=2, help="judge every N-th position")
    parser.add_argument("--subject", nargs="+", default=["sequential-rounding"], help="folders below --out")
    parser.add_argument("--title", default="Nearest and sequential rounding")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of recorded runs")
    arguments = parser.parse_args()
    subject = load_subject(arguments.model)
    config = subject.config
    layers = subject.int2_layers()
    device = jax.devices()[0]
    contexts = [context for context in CONTEXTS if context < arguments.context] + [arguments.context]
    with tempfile.TemporaryDirectory() as scratch:
        here = pathlib.Path(scratch)
        calibration, evaluation = find_texts(here / "text")
        sets: list[Calibrated] = []
        methods = [Method("bf16", "bf16", {}, 16.0)]
        for one, rotations in calibrated(subject, arguments, calibration, here):
            sets.append(one)
            on_device = jax.tree.map(jnp.asarray, {layer: rotations[layer] for layer in layers})
            methods.append(Method(one.name, "int2", on_device, fidelity.page_bits(config.head_dim)))
            print(f"{one.name}: {one.seconds} s", flush=True)
        streams = [read_stream([text], subject.encode, arguments.context) for text in evaluation]
        shutil.rmtree(here / "text")
    runner = make_runner(subject.model, config)
    document: dict[str, Any] = {
        "command": command_of(arguments),
        "title": arguments.title,
        "created": datetime.date.today().isoformat(),
        "model": config.model_id,
        "dtype": subject.dtype,
        "device": f"{device.platform} {device.device_kind}",
        "versions": {"jax": jax.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "tokens": arguments.tokens,
        "calibration_texts": [pathlib.Path(text).name for text in calibration],
        "text_digests": {stream.label: stream.digest for stream in streams},
        "context": arguments.context,
        "every": arguments.every,
        "noise": arguments.noise,
        "calibrations": [
            dataclasses.asdict(one)
            for one in sets
            if one.rounding == "nearest" and "moved" not in one.backend
        ],
    }
    results: list[StreamResult] = []
    for stream in streams:
        tokens = job.with_bos(stream, arguments.context, config)
        started = time.perf_counter()
        chunk = min(default_chunk(), arguments.context)
        results.append(
            job.evaluate_stream(runner, methods, stream, tokens, layers, chunk=chunk, every=arguments.every)
        )
        print(f"{stream.label}: {time.perf_counter() - started:.0f} s", flush=True)
        document["rows"] = rows_of(sets, results, contexts)
        document["ratios"] = ratios(document["rows"])
        if arguments.out:
            kind = "cpu" if device.platform == "cpu" else device.device_kind.split()[-1].lower()
            for subject_name in arguments.subject:
                folder = arguments.out / subject_name / f"{kind}-{document['created']}"
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "run.json").write_text(json.dumps(document, indent=1) + "\n")
                (folder / "page.md").write_text(page_of(document))
    print(page_of(document))


def command_of(arguments: argparse.Namespace) -> str:
    """The command line without the folder of the model."""
    words = ["python scripts/compare_calibrations.py"]
    for name, value in vars(arguments).items():
        if name in ("title", "out") or value in (None, False, 0.0):
            continue
        value = pathlib.Path(value).name if name == "model" else value
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {shown}"))
    return " ".join(words) + " --out results"


if __name__ == "__main__":
    main()
