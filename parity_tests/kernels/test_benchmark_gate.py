"""No speed number on a wrong kernel: what the JAX benchmarks compare before they time anything."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from parity_tests.house.test_benchmarks import load_script


@pytest.fixture
def options() -> argparse.Namespace:
    return argparse.Namespace(implementation="xla", baseline="xla")


def test_right_kernels_pass_and_wrong_ones_are_refused(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference passes; attention off by one percent, or one wrong byte in a page, is named."""
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from oscar_jax.core.config import CacheConfig

    script = load_script("bench_attention", monkeypatch)
    script.check_kernels(CacheConfig(1, 2, 16), options)
    options.implementation = "mosaic_gpu"
    wrong: set[str] = set()

    def decode(query: Any, *arguments: Any, implementation: str, **named: Any) -> Any:
        return jnp.ones(query.shape) * (1.01 if "decode" in wrong and implementation == "mosaic_gpu" else 1)

    def pages(*arguments: Any, implementation: str) -> dict[str, Any]:
        return {
            "scale": jnp.zeros(4, jnp.int8).at[2].set("pages" in wrong and implementation == "mosaic_gpu")
        }

    monkeypatch.setattr(script.ops, "decode_attention", decode)
    monkeypatch.setattr(script.ops, "quantize_pages", pages)
    for name, what in (
        ("decode", "decode attention: relative error 1.0e-02"),
        ("pages", "page quantizer, scale: 1 bytes differ"),
    ):
        wrong.clear()
        wrong.add(name)
        with pytest.raises(script.WrongKernelError, match=f"{what}.*, allowed"):
            script.check_kernels(CacheConfig(1, 2, 16), options)


def test_nothing_is_timed_after_a_refusal(options: argparse.Namespace, monkeypatch, tmp_path: Path) -> None:
    """Both benchmarks ask the gate first: a refused shape has no row, and decoding does not begin."""
    pytest.importorskip("jax")
    attention, decode = (load_script(name, monkeypatch) for name in ("bench_attention", "bench_decode"))

    def refuse(*arguments: Any) -> None:
        raise attention.WrongKernelError("wrong")

    def timed(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a wrong kernel was timed")

    for script in (attention, decode):
        monkeypatch.setattr(script, "check_kernels", refuse)
    for name in ("bench_decode", "bench_write", "bench_append"):
        monkeypatch.setattr(attention, name, timed)
    monkeypatch.setattr(attention, "copy_bandwidth", lambda size: 1e12)
    monkeypatch.setattr(decode, "random_weights", timed)  # what a benchmark of it begins with
    common: dict[str, Any] = {"full": False, "shapes": ["qwen3-8b"], "batches": [1], "lengths": [1000]}
    common |= {"seconds": 9e9, "out": str(tmp_path), "copy_bytes": 1, "length": 1000}
    common["what"] = list(attention.WHAT)
    with pytest.raises(SystemExit):
        attention.run(argparse.Namespace(**vars(options), **common))
    report = json.loads((tmp_path / "bench_attention.json").read_text())
    assert report["rows"] == [] and report["not_timed"]["qwen3-8b"] == "WrongKernelError: wrong"
    with pytest.raises(attention.WrongKernelError):
        decode.run(argparse.Namespace(**vars(options), **common, model="tiny", layers=2))
