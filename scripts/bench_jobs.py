"""Times the long jobs, `calibrate`, `evaluate` and `tasks`, on a model of random weights or a real one.

    python scripts/bench_jobs.py                                 # random weights
    python scripts/bench_jobs.py --model MODEL --keep DIRECTORY  # a real model; rotations and reports stay

Random weights have the shape of Qwen2.5-Coder-1.5B and a tokenizer of bytes: the times are those of a real
model, the figures of quality mean nothing. A real model is calibrated and judged on prose and code found on
this machine (`sample_texts`). Each job runs from a cold start, compilation included; the rate of calibration
is also given without it.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from bench_decode import qwen2_1_5b, random_weights
from flax import nnx
from sample_texts import find_texts

from oscar_jax.calibration.job import calibrate
from oscar_jax.core.config import CalibrationConfig
from oscar_jax.evaluation.job import evaluate
from oscar_jax.evaluation.subject import Subject, load_subject
from oscar_jax.evaluation.task_job import evaluate_tasks
from oscar_jax.models.config import ModelConfig

METHODS = ("bf16", "int2", "published", "hadamard")


class ByteTokenizer:
    """One token per byte."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Bytes as numbers."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes below 256."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


def tiny() -> ModelConfig:
    """A small decoder, to try the script without a GPU."""
    return dataclasses.replace(
        qwen2_1_5b(), hidden_size=64, intermediate_size=96, num_layers=2, num_query_heads=4, head_dim=32,
        vocab_size=300, layer_windows=(None,) * 2,
    )  # fmt: skip


def random_texts(directory: pathlib.Path) -> tuple[list[str], list[str]]:
    """Two files of random letters to calibrate, two to judge."""
    words = np.random.default_rng(0).integers(97, 123, (4, 400_000)).astype(np.uint8)
    names = [directory / f"{number}.txt" for number in range(4)]
    for name, letters in zip(names, words):
        name.write_bytes(letters.tobytes())
    return [str(name) for name in names[:2]], [str(name) for name in names[2:]]


def main() -> None:
    """Runs and prints one JSON document; `--out` also writes it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", help="a checkpoint or weights package instead of random weights")
    parser.add_argument("--tiny", action="store_true", help="a two-layer model, to try the script")
    parser.add_argument("--context", type=int, default=32_768, help="of the evaluation")
    parser.add_argument("--sequence", type=int, default=8192, help="of the calibration, and of the tasks")
    parser.add_argument("--tokens", type=int, default=49_152, help="of the calibration")
    parser.add_argument("--rounding", default="", help="of the calibration, see `oscar calibrate --rounding`")
    parser.add_argument("--task-length", type=int, help="default: that of the calibration")
    parser.add_argument("--trials", type=int, default=1, help="contexts of a task")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--keep", type=pathlib.Path, help="folder for rotations, reports and tasks")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()

    times: dict[str, Any] = {"device": jax.devices()[0].device_kind}
    methods = tuple(arguments.methods.split(","))
    began = started = time.perf_counter()
    if arguments.model:
        subject = load_subject(arguments.model)
    else:
        config = tiny() if arguments.tiny else qwen2_1_5b()
        graph, leaves = random_weights(config)
        model = nnx.merge(*jax.tree.unflatten(graph, leaves))
        subject = Subject(pathlib.Path(__file__), model, config, ByteTokenizer())
    times["model"], times["load"] = subject.config.model_id, round(time.perf_counter() - started, 1)

    marks: list[tuple[str, float, int]] = []

    def progress(stage: str, done: int, total: int) -> None:
        marks.append((stage, time.perf_counter(), done))

    with contextlib.ExitStack() as stack:
        here = arguments.keep or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        calibration, evaluation = find_texts(here) if arguments.model else random_texts(here)
        started = time.perf_counter()
        settings = CalibrationConfig(
            tokens=arguments.tokens, context=arguments.sequence, rounding=arguments.rounding
        )
        calibrate(subject, calibration, here / "rotations", settings, progress=progress)
        times["calibrate"] = round(time.perf_counter() - started, 1)
        steps = [(moment, done) for stage, moment, done in marks if stage == "statistics"]
        if len(steps) > 2:
            tokens = sum(done for _, done in steps[2:])
            times["calibrate_tokens_per_second"] = round(tokens / (steps[-1][0] - steps[1][0]))
        fits = [moment for stage, moment, _ in marks if stage == "choice per layer"]
        times["fit"] = round(fits[-1] - max(m for s, m, _ in marks if s == "held-out text"), 1)
        print(json.dumps(times), flush=True)

        common: dict[str, Any] = {"rotations": here / "rotations", "methods": methods, "progress": progress}
        started = time.perf_counter()
        texts = [[text] for text in evaluation]
        evaluate(subject, texts, here / "report", context=arguments.context, every=4, **common)
        times["evaluate"] = round(time.perf_counter() - started, 1)
        print(json.dumps(times), flush=True)

        started = time.perf_counter()
        lengths = [arguments.task_length or arguments.sequence]
        evaluate_tasks(subject, [], here / "tasks", lengths=lengths, trials=arguments.trials, **common)
        times["tasks"] = round(time.perf_counter() - started, 1)
    times["all"] = round(time.perf_counter() - began, 1)
    print(json.dumps(times), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
