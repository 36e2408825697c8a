"""Failure 14 of the README: no benchmark may leave open what was compared with what."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))  # the scripts import each other
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["bench_attention", "bench_decode"])
@pytest.mark.parametrize(("implementation", "baseline"), [("mosaic_gpu", "cudnn"), ("xla", "xla")])
def test_jax_results_name_their_kernels(
    name: str, implementation: str, baseline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels as asked for, dtype and versions stand in the JSON head, whichever benchmark wrote it."""
    pytest.importorskip("jax")
    script = load_script(name, monkeypatch)
    head = script.about(argparse.Namespace(implementation=implementation, baseline=baseline))
    assert (head["implementation"], head["baseline"], head["dtype"]) == (implementation, baseline, "bfloat16")
    assert head["jax"] and head["device"] and head["command"]


def test_jax_page_names_kernels_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page to read says the same, and every row its batch and length."""
    pytest.importorskip("jax")
    script = load_script("bench_attention", monkeypatch)
    options = argparse.Namespace(implementation="xla", baseline="xla")
    head = {**script.about(options), "copy_bytes_per_second": 1e12}
    times = {"int2_us": 10.0, "int2_floor_us": 8.0, "bf16_us": 60.0, "bf16_floor_us": 50.0}
    row = {"what": "decode", "shape": "qwen3-8b", "batch": 8, "length": 4096, **times}
    page = script.document(head, [row])
    assert "INT2: `xla`" in page and "by `xla`" in page and "bfloat16" in page and "cudnn" not in page.lower()
    assert "| qwen3-8b | 8 | 4096 | 10.0 | 8.0 | 1.25 | 60.0 | 50.0 | 6.00 |" in page


def test_torch_page_names_kernels_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every BF16 kernel has a row of its own beside the INT2 kernels; what was not measured says why."""
    pytest.importorskip("triton")
    script = load_script("bench_attention_torch", monkeypatch)
    rows = [
        script.Row("qwen3-8b", "decode", "BF16 FlashAttention", 8, 4096, 60.0, 50.0),
        script.Row("qwen3-8b", "decode", "INT2 triton", 8, 4096, 10.0, 8.0, 60.0),
    ]
    page = script.to_markdown(
        {
            **{"gpu": "some GPU", "created": "2026-11-29", "torch": "2", "triton": "3"},
            **{"dtype": "bfloat16", "command": "the command", "copy_bandwidth_tb_s": 1.0},
            **{"not_measured": {"gluon": "compute capability 8.0"}},
            "rows": [vars(row) for row in rows],
        }
    )
    assert "bfloat16" in page and "some GPU" in page
    assert "| qwen3-8b | decode | BF16 FlashAttention | 8 | 4096 | 60.0 | 50.0 | 1.20 × |  |" in page
    assert "| qwen3-8b | decode | INT2 triton | 8 | 4096 | 10.0 | 8.0 | 1.25 × | 6.00 × |" in page
    assert "Not measured: gluon: compute capability 8.0" in page


def test_recorded_plots_can_be_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plot in results/ has its function; one is drawn from its record, with the colours of methods."""
    pytest.importorskip("matplotlib")
    script = load_script("draw_runs", monkeypatch)
    results = SCRIPTS.parent / "results"
    drawn = [path.parent for path in results.glob("*/*/plot.png")]
    assert drawn and all(run.parent.name.startswith(tuple(script.PLOTS)) for run in drawn)
    colors = list(script.MODEL_COLORS.values())
    assert not set(colors) & {script.method_color(name) for name in ("bf16", "int2", "published", "hadamard")}
    run = tmp_path / "kernels-torch" / "gpu-2026-01-01"
    run.mkdir(parents=True)
    row = {"model": "qwen3-8b", "batch": 8, "length": 102_400, "task": "decode", "floor": 2.0}
    rows = [{**row, "kernel": name, "microseconds": 9.0} for name in ("BF16 cuDNN", "INT2 gluon")]
    (run / "run.json").write_text(json.dumps({"torch": "2", "gpu": "GPU", "rows": rows}))
    assert script.main([str(run)]) == 0 and (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert script.main([str(tmp_path / "parity")]) == 2
