"""From a transformers model and text to a rotation set in one call, and the command line without JAX."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.core.config import CalibrationConfig  # noqa: E402
from oscar_torch.core.errors import CheckpointError, ConfigError  # noqa: E402
from oscar_torch.hf import calibrate  # noqa: E402
from oscar_torch.hf.fingerprint import model_fingerprint  # noqa: E402
from oscar_torch.rotations import statistics as statistics_file  # noqa: E402
from oscar_torch.rotations import store  # noqa: E402
from parity_tests.hf.tiny import make_model, prompts  # noqa: E402

pytestmark = pytest.mark.hf
ROOT = Path(__file__).parents[2]
SETTINGS = CalibrationConfig(tokens=1280, context=256)


class Letters:
    """A tokenizer of single letters, as far as a calibration calls one."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [2 + ord(letter) % 90 for letter in text]}


def write_text(folder):
    generator = np.random.default_rng(0)
    path = folder / "text.txt"
    path.write_text("".join(chr(97 + letter) for letter in generator.integers(0, 26, 2000)))
    return str(path)


def run(model, folder, name="out", **options: Any):
    arguments: dict[str, Any] = {"tokenizer": Letters()} | options
    return calibrate.calibrate(model, [write_text(folder)], folder / name, SETTINGS, **arguments)


def test_one_call_writes_what_a_cache_takes(tmp_path):
    model = make_model("qwen3", "sdpa")
    seen = []
    rotation_set = run(model, tmp_path, model_id="org/tiny", progress=lambda *step: seen.append(step))
    assert model.config._attn_implementation == "sdpa"
    assert sum(done for _, done, _ in seen) == seen[0][2] == 5 * 256
    header = rotation_set.header
    assert (header.model_id, header.basis, header.calibration_tokens) == (
        "org/tiny",
        "channel_balanced",
        5 * 192,
    )
    assert header.extra["weights_fingerprint"] == model_fingerprint(model) and len(header.corpus_digest) > 8
    back = store.load_rotation_set(tmp_path / "out")  # the folder, as `oscar calibrate` names it
    assert back.header == header and not (tmp_path / "out" / calibrate.STATE_FILE).exists()
    # The file beside it fits other bases, and the same one to the same bytes, in either package.
    statistics, found = statistics_file.read_statistics(tmp_path / "out" / statistics_file.STATISTICS_FILE)
    assert found is not None
    again = calibrate.fit_rotation_set(statistics, found, SETTINGS)
    store.save_safetensors(again, tmp_path / "again.safetensors")
    written = (tmp_path / "out" / store.ROTATION_FILE).read_bytes()
    assert (tmp_path / "again.safetensors").read_bytes() == written


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path):
    model = make_model("llama", "sdpa")
    run(model, tmp_path, "whole")

    def stop(stage, done, total):
        stop.seen += done
        if stop.seen == 3 * 256:
            raise KeyboardInterrupt

    stop.seen = 0
    with pytest.raises(KeyboardInterrupt):
        run(model, tmp_path, "cut", save_every=2, progress=stop)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(CheckpointError, match="belongs to a calibration with other model, text or settings"):
        run(make_model("llama", "sdpa", num_hidden_layers=1), tmp_path, "cut")
    run(model, tmp_path, "cut", save_every=2)
    files = [tmp_path / name / store.ROTATION_FILE for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()
    (tmp_path / "cut" / calibrate.STATE_FILE).write_bytes(b"PK")
    with pytest.raises(CheckpointError, match="is damaged"):
        run(model, tmp_path, "cut")
    run(model, tmp_path, "cut", restart=True)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_batches_with_padding_count_what_single_sequences_count():
    """Several lengths in one batch: padding adds nothing, and each sequence starts its own pages."""
    model = make_model("qwen3", "sdpa")
    sequences = [row[0] for row in prompts(320, 200, 130)]
    single, batched = (
        calibrate._gather(model, sequences, (0, 1), 64, batch_size=size, on_tokens=lambda tokens: None)
        for size in (1, 3)
    )
    for layer, entry in single.items():
        assert entry.tokens == batched[layer].tokens == 320 + 200 + 130 - 3 * 64
        for name in (
            "query_covariance",
            "key_covariance",
            "key_mean",
            "value_mean",
            "exact_value_covariance",
        ):
            # BF16 rows may round the other way when sdpa's sums differ in their last bits.
            np.testing.assert_allclose(
                getattr(entry, name), getattr(batched[layer], name), rtol=1e-2, atol=1e-3, err_msg=name
            )


def test_refusals_come_before_anything_is_written(tmp_path):
    model = make_model("llama", "sdpa")
    for options, reason in (
        ({"settings": dataclasses.replace(SETTINGS, basis="auto")}, "basis 'auto' is measured by JAX"),
        ({"batch_size": 0}, "batch_size = 0, allowed: >= 1"),
        ({"tokenizer": None}, "needs its tokenizer"),
    ):
        arguments: dict[str, Any] = {"settings": SETTINGS, "tokenizer": Letters()} | options
        with pytest.raises(ConfigError, match=reason):
            calibrate.calibrate(model, [write_text(tmp_path)], tmp_path / "out", **arguments)
        assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="nowhere"):
        calibrate.load_model(tmp_path / "nowhere")


ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "jaxlib", "flax", "orbax", "oscar_jax"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jax" else found(name, *rest)
import oscar_cli
for line in sys.stdin.read().splitlines():
    print("$", line)
    print("=", oscar_cli.main(line.split("|")))
"""


def test_the_command_line_without_jax(tmp_path):
    """From nothing to generated text in an installation that has no JAX."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"<s>": 0, "?": 1} | {chr(97 + i): 2 + i for i in range(26)}
    table = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    table.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=table, bos_token="<s>").save_pretrained(
        tmp_path / "m"
    )
    make_model("llama", "sdpa").save_pretrained(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "b" / "m")  # other weights of the same name
    other = make_model("llama", "sdpa")
    other.model.embed_tokens.weight.data.mul_(2)
    other.save_pretrained(tmp_path / "b" / "m")
    model, rotations = str(tmp_path / "m"), str(tmp_path / "rotations")
    commands = [
        ["calibrate", "--model", model, "--text", write_text(tmp_path), "--out", rotations, "--tokens", "600",
         "--context", "256"],
        ["inspect", rotations],
        ["convert", rotations, str(tmp_path / "pair"), "--for", "sglang-2026-10"],
        ["convert", str(tmp_path / "pair"), str(tmp_path / "back.safetensors")],
        ["generate", "--model", model, "--rotations", rotations, "--prompt", "abc", "--max-new-tokens", "4"],
        ["fit", rotations, "--out", str(tmp_path / "fit.safetensors"), "--basis", "oscar", "--shared"],
        ["evaluate", "--model", model],
        ["convert", rotations, str(tmp_path / "x.gguf")],
        ["--backend", "tpu", "inspect", rotations],
        ["generate", "--model", str(tmp_path / "b" / "m"), "--rotations", rotations, "--prompt", "abc"],
        ["generate", "--model", str(tmp_path / "b" / "m"), "--rotations", rotations, "--prompt", "abc",
         "--max-new-tokens", "4", "--model-id", "m"],
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input="\n".join("|".join(command) for command in commands),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("= ")]
    assert codes == ["0"] * 6 + ["2"] * 4 + ["0"], done.stdout + done.stderr[-3000:]
    assert "made for other weights" in done.stderr and "--model-id" in done.stderr
    assert (
        "pip install 'oscar-kv[demo]'" in done.stderr and "--backend tpu, allowed: jax, torch" in done.stderr
    )
    assert "basis: channel_balanced" in done.stdout
    assert store.read_header(tmp_path / "fit.safetensors").basis == "oscar"
