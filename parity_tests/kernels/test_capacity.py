"""Past the capacity, or with numbers of new rows that cannot be, where nobody checks: every append stores
nothing of that sequence and marks it, every attention kernel makes its output NaN, and its neighbours notice
nothing (52)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, PackageCache
from parity_tests.kernels import triton_interpreter
from parity_tests.kernels.attention_problems import Case, largest_error, make_problem
from parity_tests.kernels.test_attention_kernels import KERNELS, Kernel

POOLS = (
    *("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean"),
    "window_key",
    "window_value",
)
# One column of the page table and six slots of windows: 447 tokens fit, of a chunk 443 and its four.
FULL = [Case((447, 130), 1, 2, 64, bfloat16=True), Case((443, 130), 1, 2, 64, tokens=4, bfloat16=True)]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", FULL, ids=lambda case: case.name)
def test_attention_of_lost_rows_is_nan(kernel: Kernel, case: Case) -> None:
    problem = make_problem(case)
    assert problem.fields["page_table"].shape == (2, 1)
    got = kernel.run(problem)
    assert largest_error(problem, got) <= kernel.tolerance, "the last token that fits"
    lengths = problem.fields["lengths"] + np.array([1, 0], np.int32)
    lost = kernel.run(dataclasses.replace(problem, fields={**problem.fields, "lengths": lengths}))
    assert np.isnan(lost[0]).all()
    live = problem.live()[1]
    assert (lost[1][live] == got[1][live]).all(), "the sequence beside it"
    for claimed in (-1, case.tokens + 1) if case.tokens else ():
        wrong = dataclasses.replace(
            problem, new_lengths=np.array([claimed, *problem.new_lengths[1:]], np.int32)
        )
        lost = kernel.run(wrong)
        assert np.isnan(lost[0]).all(), claimed
        assert (lost[1][live] == got[1][live]).all(), "the sequence beside it"


@dataclasses.dataclass(frozen=True)
class Append:
    """A way to append. `run` takes new rows for each sequence and returns fields before and after."""

    run: Callable[[int, list[int]], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]
    longest: int = 1  # rows of a sequence in a call


def append_when_full(
    package: str, module: str, tokens: int, new: list[int], device: str = "cpu"
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The cache before and after an append: sequence 0 is full, 1 has 100 tokens, 2 is full and one more.

    module: of the package, "cache" for `append_rows`, else a kernel's `append_token`.
    """
    framework, rng = FRAMEWORKS[package], np.random.default_rng(0)
    cache = PackageCache(framework, rows.make_rotation(rng, 1, 64), 3, 447, device)
    fields: dict[str, Any] = {}
    with framework.device_context(device):
        for name in POOLS:
            shape = cache.field(name).shape
            if name.endswith("codes"):
                fields[name] = framework.array(rng.integers(-(2**31), 2**31, shape).astype(np.int32), device)
            else:
                fields[name] = framework.bfloat16(oracle.to_bfloat16(rng.normal(0, 1, shape)), device)
        for name, values in (("lengths", [447, 100, 448]), ("history_pages", [1, 0, 1])):
            fields[name] = framework.array(np.array(values, np.int32), device)
        for name in ("page_table", "window_table"):
            table = cache.field(name)
            table = rng.permutation(table.reshape(-1)).reshape(table.shape).astype(np.int32)
            fields[name] = framework.array(table, device)
        cache.cache = dataclasses.replace(cache.cache, **fields)
        names = (*fields,)
        before = {name: np.array(cache.field(name)) for name in names}
        key, value = (
            framework.bfloat16(oracle.to_bfloat16(rng.normal(0, 1, (3, tokens, 1, 64))), device) for _ in "kv"
        )
        counts = framework.array(np.array(new, np.int32), device)
        if module == "cache":
            append = framework.compiled(framework.module("cache").append_rows, "check", "implementation")
            done = append(
                cache.cache, cache.rotation, key, value, counts,
                check=False, implementation=framework.reference,
            )  # fmt: skip
        else:
            done = framework.module(module).append_token(cache.cache, cache.rotation, key, value, counts)
        if package == "jax":
            cache.cache = done
        lost = framework.numpy(framework.module("cache").overflowed(cache.cache))
        return before, {name: np.array(cache.field(name)) for name in names} | {"lost": lost}


def _mosaic(tokens: int, new: list[int]) -> Any:
    pytest.importorskip("jax.experimental.mosaic.gpu")
    from parity_tests.kernels.test_append_mosaic import emulated

    with emulated():
        return append_when_full("jax", "pallas.append.mosaic_gpu", tokens, new)


def _interpreted(tokens: int, new: list[int]) -> Any:
    if reason := triton_interpreter.why_not():
        pytest.skip(reason)
    module = "triton_kernels.append.triton"
    return triton_interpreter.interpret(append_when_full, "torch", module, tokens, new)


def _gpu(name: str, package: str, module: str, *marks: str) -> Any:
    append = Append(lambda tokens, new: append_when_full(package, module, tokens, new, "gpu"))
    return pytest.param(append, id=name, marks=[getattr(pytest.mark, mark) for mark in ("gpu", *marks)])


APPENDS = [
    pytest.param(Append(lambda tokens, new: append_when_full("jax", "cache", tokens, new), 70), id="xla"),
    pytest.param(Append(lambda tokens, new: append_when_full("torch", "cache", tokens, new), 70), id="eager"),
    pytest.param(Append(_mosaic), id="mosaic-emulated"),
    pytest.param(Append(_interpreted), id="triton-interpreted"),
    _gpu("triton", "torch", "triton_kernels.append.triton"),
    _gpu("gluon", "torch", "triton_kernels.append.gluon", "hopper"),
    _gpu("mosaic_gpu", "jax", "pallas.append.mosaic_gpu", "hopper"),
]


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_append_past_the_capacity_stores_nothing_and_marks(append: Append, tokens: int) -> None:
    if tokens > append.longest:
        tokens = 1
    before, after = append.run(tokens, [1, tokens, 1])
    assert after["lengths"].tolist() == [448, 100 + tokens, 448] and after["history_pages"].tolist() == [
        1,
        0,
        1,
    ]
    assert after["lost"].tolist() == [True, False, True]
    own = before["window_table"][1]
    for name in POOLS:
        others = np.ones(len(before[name]), bool)
        if name.startswith("window"):
            others[own] = False
            assert (before[name][own] != after[name][own]).any(), "sequence 1 has new rows"
        assert (before[name][others] == after[name][others]).all(), name
    before, after = append.run(tokens, [0, 0, 0])
    assert all((before[name] == after[name]).all() for name in before)
    assert after["lost"].tolist() == [False, False, True]
    for claimed in (-1, tokens + 1):
        before, after = append.run(tokens, [0, claimed, 0])
        assert all((before[name] == after[name]).all() for name in before if name != "lengths"), claimed
        assert after["lengths"].tolist() == [447, 448, 448] and after["lost"].tolist() == [False, True, True]
