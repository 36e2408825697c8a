"""Every attention kernel of both packages against dense float64 attention on the same bytes.

A kernel gives the answer or refuses a shape by name; which shapes it may refuse stands beside it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parity_tests.kernels import triton_interpreter
from parity_tests.kernels.attention_problems import Case, Problem, largest_error, make_problem, run

EXACT = 1e-5  # float32 sums
ROUNDED = 3e-3  # probabilities in 16 bits, queries in 15


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to attend. `run` takes a problem; `refuses` says for a case why it may, or None."""

    run: Callable[[Problem], np.ndarray]
    tolerance: float
    refuses: Callable[[Case], str | None] = lambda case: None


def _mosaic(problem: Problem) -> np.ndarray:
    pytest.importorskip("jax.experimental.mosaic.gpu")
    from parity_tests.kernels.mosaic_launches import emulated

    with emulated():
        return run(problem, "jax", _mosaic_module(problem))


def _mosaic_module(problem: Problem) -> str:
    return f"pallas.{'prefill' if problem.case.tokens else 'decode'}.mosaic_gpu"


def _interpreted(problem: Problem) -> np.ndarray:
    if reason := triton_interpreter.why_not():
        pytest.skip(reason)
    return triton_interpreter.interpret(run, problem, "torch", _triton_module(problem, "triton"))


def _triton_module(problem: Problem, language: str) -> str:
    return f"triton_kernels.{'prefill' if problem.case.tokens else 'decode'}.{language}"


def _mosaic_refuses(case: Case) -> str | None:
    if case.sliding_window is not None:
        return "sliding_window"
    return None if case.head_dim in (64, 128, 256) else "head_dim"


def _gluon_refuses(case: Case) -> str | None:
    if case.head_dim not in ((64, 128) if case.tokens else (64, 128, 256)):
        return "head_dim"
    return "float32" if case.tokens and not case.bfloat16 else None


def _gpu(name: str, kernel: Kernel, *marks: str) -> Any:
    return pytest.param(kernel, id=name, marks=[getattr(pytest.mark, mark) for mark in ("gpu", *marks)])


KERNELS = [
    pytest.param(Kernel(lambda problem: run(problem, "jax", "attention", compiled=True), EXACT), id="xla"),
    pytest.param(Kernel(lambda problem: run(problem, "torch", "attention"), EXACT), id="eager"),
    pytest.param(Kernel(_mosaic, ROUNDED, _mosaic_refuses), id="mosaic-emulated"),
    pytest.param(Kernel(_interpreted, ROUNDED), id="triton-interpreted"),
    _gpu("xla-gpu", Kernel(lambda p: run(p, "jax", "attention", "gpu", compiled=True), EXACT)),
    _gpu("eager-gpu", Kernel(lambda p: run(p, "torch", "attention", "gpu"), EXACT)),
    _gpu("triton", Kernel(lambda p: run(p, "torch", _triton_module(p, "triton"), "gpu"), ROUNDED)),
    _gpu(
        "gluon",
        Kernel(lambda p: run(p, "torch", _triton_module(p, "gluon"), "gpu"), ROUNDED, _gluon_refuses),
        "hopper",
    ),
    _gpu(
        "mosaic_gpu",
        Kernel(lambda p: run(p, "jax", _mosaic_module(p), "gpu", compiled=True), ROUNDED, _mosaic_refuses),
        "hopper",
    ),
]

# Lengths around every change of layout; ratios of query to key/value heads from 1 to 16; both dtypes of
# queries; rotations of every head and shared ones; windows; head_dims that some kernels refuse.
DECODE = [
    Case((0, 1, 63, 64, 65), 2, 1, 64),
    Case((319, 320, 321, 383, 384), 1, 3, 64, bfloat16=True),
    Case((705, 449), 2, 4, 128, shared=True, bfloat16=True),
    Case((577,), 1, 5, 64),
    Case((450, 0, 64), 1, 6, 64, sink_tokens=0, recent_tokens=64, bfloat16=True),
    Case((500,), 1, 7, 128),
    Case((640, 130), 1, 8, 64, sinks=True, bfloat16=True),
    Case((449,), 1, 12, 64, bfloat16=True),
    Case((520,), 1, 16, 64),
    Case((450,), 1, 2, 256, bfloat16=True),
    Case((500,), 1, 1, 80),
    Case((600, 130), 1, 4, 64, sliding_window=130),
    Case((600, 130), 1, 2, 64, sliding_window=500, shared=True),
]
CHUNK = [
    Case((705, 0, 64, 321), 1, 2, 64, tokens=9, bfloat16=True),
    Case((450,), 2, 3, 128, tokens=5, shared=True),
    Case((449, 65), 1, 7, 64, tokens=3, sinks=True, bfloat16=True),
    Case((390,), 1, 2, 256, tokens=3),
    Case((450,), 1, 12, 80, tokens=2),
    Case((600,), 1, 2, 64, tokens=9, sliding_window=200, bfloat16=True),
    Case((300, 130), 1, 5, 64, tokens=4, sink_tokens=0, recent_tokens=64),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", DECODE + CHUNK, ids=lambda case: case.name)
class TestAttention:
    def test_answer(self, kernel: Kernel, case: Case) -> None:
        problem = make_problem(case)
        if (reason := kernel.refuses(case)) is not None:
            with pytest.raises(NotImplementedError, match=reason):
                kernel.run(problem)
            return
        error = largest_error(problem, kernel.run(problem))
        assert error <= kernel.tolerance, f"relative error {error:.2e}"
