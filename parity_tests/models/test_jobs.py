"""The jobs on the models that differ most from a Llama: soft caps, and linear layers with experts."""

from pathlib import Path
from typing import Any

import pytest

from oscar_jax.calibration.job import calibrate
from oscar_jax.core.config import CalibrationConfig
from oscar_jax.evaluation.job import evaluate
from oscar_jax.evaluation.subject import load_subject
from oscar_jax.evaluation.task_job import evaluate_tasks

from .test_families import random_reference
from .tiny_model import write_byte_tokenizer

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("fast_compilation")]


@pytest.mark.parametrize("family", ["gemma2", "qwen3_next"])
def test_calibrated_evaluated_and_asked(family: str, tmp_path: Path) -> None:
    """Layer 1, which attends without a window, goes to INT2; layer 0 keeps a ring, or a state."""
    random_reference(family, vocab_size=272).save_pretrained(tmp_path)
    write_byte_tokenizer(tmp_path)
    for name, step in (("one", 23), ("two", 19)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i * i % step) for i in range(1100)))
    subject, rotations = load_subject(tmp_path), tmp_path / "rotations"
    settings = CalibrationConfig(basis="channel_balanced", tokens=1024, context=512)
    calibration = calibrate(subject, [str(tmp_path / "one.txt")], rotations, settings)
    assert calibration.rotation_set.header.layers == (1,)

    shared: dict[str, Any] = {"rotations": rotations, "methods": ("bf16", "int2")}
    text = [[str(tmp_path / "two.txt")]]
    document = evaluate(subject, text, tmp_path / "report", context=512, every=8, **shared)
    found = {row["method"]: row for row in document["methods"]}
    assert document["quantized_layers"] == [1] and 0 < found["int2"]["kl_mean"] < 1
    document = evaluate_tasks(
        subject, [], tmp_path / "tasks", lengths=(512,), tasks=("single",), questions=1, trials=1, **shared
    )
    assert document["accuracy"]["512"]["single"]["accuracy"].keys() == {"bf16", "int2"}
