"""The command line: a whole session on a tiny model, its help, and every wrong invocation in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from oscar_jax.cli import main
from oscar_jax.evaluation import fidelity, job
from oscar_jax.evaluation.stepper import Method, make_runner
from oscar_jax.evaluation.streams import read_stream
from oscar_jax.evaluation.subject import load_subject
from oscar_jax.rotations.fixed_point import from_fixed_point
from oscar_jax.rotations.store import load_rotation_set
from parity_tests.models.tiny_model import write_tiny_model

pytestmark = pytest.mark.hf
COMMANDS = ("calibrate", "fit", "evaluate", "tasks", "generate", "inspect", "convert")


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, two texts and a calibrated rotation set."""
    here = tmp_path_factory.mktemp("session")
    write_tiny_model(here / "model", num_hidden_layers=1)
    write_tiny_model(here / "other", num_hidden_layers=1, seed=1)
    (here / "one.txt").write_text("".join(chr(97 + i * i % 23) for i in range(3000)))
    (here / "two.txt").write_text("".join(chr(97 + i * i % 19) for i in range(3000)))
    command = f"calibrate --model {here}/model --text {here}/one.txt --out {here}/rotations --tokens 1536"
    assert main(f"{command} --context 512 --chunk 256".split()) == 0
    return here


def test_a_session_from_evaluation_to_conversion(session: Path, capsys: pytest.CaptureFixture) -> None:
    command = f"evaluate --model {session}/model --rotations {session}/rotations --context 512 --every 4"
    words = f"{command} --text {session}/two.txt --text {session}/one.txt --out {session}/report".split()
    assert main([*words, "--methods", "bf16,int2,published,hadamard,naive"]) == 0
    output = capsys.readouterr()
    document = json.loads((session / "report" / "evaluation.json").read_text())
    assert [row["method"] for row in document["methods"]] == "bf16 int2 published hadamard naive".split()
    assert document["quantized_layers"] == [0] and document["dtype"] == "float32"
    assert "only 21 % of the tokens read" in output.err
    assert "one.txt is part of the calibration text" in output.err and "two.txt is" not in output.err
    assert "published" in output.out and "KL mean" in output.out

    command = f"generate --model {session}/model --rotations {session}/rotations --max-new-tokens 4"
    prompt = (session / "two.txt").read_text()[:600]
    assert main([*command.split(), "--prompt", prompt]) == 0
    output = capsys.readouterr()
    assert "4 INT2 pages" in output.err and "4 new tokens" in output.err

    for path in ("rotations", "model"):
        assert main(["inspect", str(session / path)]) == 0
    assert main(["inspect", "format"]) == 0
    shown = capsys.readouterr().out
    assert "oscar-int2/1" in shown and "head_dim: 32" in shown
    assert main(["convert", str(session / "rotations"), str(session / "set.safetensors")]) == 0
    assert main(["inspect", str(session / "set.safetensors")]) == 0


def test_an_exported_set_is_judged_as_its_reader_holds_it(
    session: Path, capsys: pytest.CaptureFixture
) -> None:
    """The figures are those of a recipe built by hand from the set's own transforms and key means."""
    assert main(f"fit {session}/rotations --rounding nearest --out {session}/nearest".split()) == 0
    command = f"evaluate --model {session}/model --rotations {session}/nearest --context 512 --every 4"
    words = f"{command} --text {session}/two.txt --out {session}/exported --methods bf16 --as-exported"
    assert main(words.split()) == 0
    assert "are dropped" not in capsys.readouterr().err
    row = json.loads((session / "exported" / "evaluation.json").read_text())["methods"][1]
    assert (row["method"], row["basis"]) == ("exported", "channel_balanced, fixed key means")

    subject = load_subject(session / "model")
    fields = load_rotation_set(session / "nearest").layers[0].numpy()
    left, _, right = np.linalg.svd(from_fixed_point(fields["value_transform"]))
    recipe = fidelity.make_recipe(
        from_fixed_point(fields["key_transform"]),
        left @ right,
        0.96,
        0.92,
        query_rotation=fields["query_transform"],
        key_mean=fields["key_mean"].astype(np.float32),
    )
    methods = [Method("bf16", "bf16", {}, 16.0), Method("by hand", "simulated", {0: recipe}, 3.0)]
    stream = read_stream([str(session / "two.txt")], subject.encode, 512, None)
    found = job.evaluate_stream(
        make_runner(subject.model, subject.config),
        methods,
        stream,
        job.with_bos(stream, 512, subject.config),
        (0,),
        chunk=512,
        every=4,
    )
    assert row["kl_mean"] == pytest.approx(found.kl["by hand"].mean(), rel=1e-5)  # the order of one sum
    assert row["layers"]["0"] == pytest.approx(found.layer_errors["by hand"][0], rel=1e-5)

    assert main(f"fit {session}/rotations --basis oscar --out {session}/oscar".split()) == 0
    words = words.replace(f"{session}/nearest", f"{session}/oscar") + " 2"
    assert main(words.split()) == 0
    assert "exported:2: the key means" in capsys.readouterr().err
    row = json.loads((session / "exported" / "evaluation.json").read_text())["methods"][1]
    assert (row["method"], row["basis"]) == ("exported:2", "oscar, key means dropped")


def test_chat_prompts_and_stop_strings(session: Path, capsys: pytest.CaptureFixture) -> None:
    """The template's text is what a plain prompt of the same text continues; a stop cuts what is shown."""
    model = session / "chat"
    shutil.copytree(session / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}oscar:"
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    command = ["generate", "--model", str(model), "--max-new-tokens", "6"]
    assert main([*command, "--chat", "--prompt", "hello"]) == 0
    chat = capsys.readouterr().out
    text = "user: hello\noscar:"
    assert main([*command, "--prompt", text]) == 0
    plain = capsys.readouterr().out
    made = chat.removeprefix("hello")
    assert len(made) > 1 and made == plain.removeprefix(text)
    assert main([*command, "--prompt", text, "--stop", made[0]]) == 0
    assert capsys.readouterr().out == f"{text}\n"


def test_compiled_programs_are_kept_where_the_user_keeps_caches(tmp_path: Path) -> None:
    """In a process of its own: off by the option, or by JAX's own switch."""
    script = (
        "import jax, sys; jax.default_backend = lambda: sys.argv[2];"
        "from oscar_jax.cli.commands import _keep_compiled_programs as keep;"
        "keep(sys.argv[1] == 'yes');"
        "print(jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache)"
    )

    def settings(wanted: str, backend: str = "gpu", **environment: str) -> str:
        surroundings = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | environment
        command = [sys.executable, "-c", script, wanted, backend]
        return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True).stdout

    kept = {"JAX_ENABLE_COMPILATION_CACHE": "true"}
    assert settings("yes", **kept) == f"{tmp_path}/oscar-kv/jax True\n"
    assert settings("yes", **kept, JAX_COMPILATION_CACHE_DIR="/elsewhere") == "/elsewhere True\n"
    assert settings("yes", "cpu", **kept) == "None True\n"
    assert settings("no", **kept) == "None False\n"
    assert settings("yes") == "None False\n"  # as this suite runs


def test_the_weights_decide_and_a_name_overrides(session: Path, capsys: pytest.CaptureFixture) -> None:
    """49: rotations of other weights are refused by every command that reads them, unless named."""
    name = load_rotation_set(session / "rotations").header.model_id
    read = f"--model {session}/other --rotations {session}/rotations"
    for command in (
        f"generate {read} --prompt abc --max-new-tokens 2",
        f"evaluate {read} --text {session}/two.txt --context 512 --every 64 --methods int2 --out {session}/o",
    ):
        assert main(command.split()) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert "made for other weights" in error and "--model-id" in error
        assert main([*command.split(), "--model-id", name]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert main([*command.split(), "--model-id", "x"]) == 2
        assert "this is 'x'" in capsys.readouterr().err


def test_wrong_invocations_name_their_cause_in_one_line(session: Path, capsys: pytest.CaptureFixture) -> None:
    """Exit code 2 and a single line that contains the offending thing."""
    (session / "noise.txt").write_bytes(b"\xff\x00")
    (session / "empty.txt").write_text("")
    (session / "short.gguf").write_bytes(b"GGUF" + bytes(20))
    (session / "strange").mkdir(exist_ok=True)
    (session / "strange" / "config.json").write_text('{"model_type": "mamba"}')
    broken = session / "broken"
    shutil.copytree(session / "rotations", broken, dirs_exist_ok=True)
    (broken / "rotation_set" / "header.json").write_text("{}")
    model, text = f"--model {session}/model", f"--text {session}/two.txt"
    rotations, out = f"--rotations {session}/rotations", f"--out {session}/x"
    calibrate, evaluate, tasks, generate = (
        f"calibrate {out} {text}",
        f"evaluate {out} {rotations}",
        f"tasks {out} {rotations}",
        "generate --prompt a",
    )
    assert main(f"fit {session}/rotations --rounding nearest --out {session}/for-readers".split()) == 0
    exported = f"evaluate {out} --rotations {session}/for-readers"
    wrong = {
        f"calibrate {model} {out} --text {session}/no.txt": "no.txt",
        f"calibrate {model} {out} --text {session}/noise.txt": "noise.txt is not UTF-8",
        f"calibrate {model} {out} --text {session}/empty.txt": "empty.txt is empty",
        f"{calibrate} --model {session}/no-model": "no-model",
        f"{calibrate} --model {session}/short.gguf": "short.gguf",
        f"{calibrate} --model {session}/strange": "'mamba'",
        f"{calibrate} {model} --tokens 0": "tokens = 0",
        f"{calibrate} {model} --basis best": "'best'",
        f"{calibrate} {model} --damping 2": "damping = 2.0",
        f"{evaluate} {model} {text} --context 0": "context = 0",
        f"{evaluate} {model} {text} --context 100": "context = 100",
        f"{evaluate} {model} {text} --context 4000": "has 3001 tokens",
        f"{evaluate} {model} {text} --methods bf16,int3": "'int3'",
        f"{evaluate} {model}": "--text is needed",
        f"{evaluate} --model {session}/other {text} --context 512": "'model'",
        f"evaluate {out} {model} {text} --rotations {broken}": "broken",
        f"evaluate {out} {model} {text} --rotations {session}/one.txt": "one.txt",
        f"{generate} {model} --cache int2": "--rotations",
        f"{generate} {model} --temperature -1": "temperature = -1.0",
        f"{generate} {model} {rotations} --max-new-tokens 9999": "4096 positions",
        f"generate {model}": "a prompt is needed",
        f"{generate} {model} --chat": "has no chat template",
        f"inspect {session}/nothing": "nothing",
        f"convert {session}/rotations {session}/x.safetensors --to zip": "'zip'",
        f"{generate} {model} --max-new-tokens 0": "max_new_tokens",
        f"{generate} {model} --max-new-tokens -5": "max_new_tokens",
        f"{generate} {model} --seed 99999999999999999999": "out of range",
        f"{generate} {model} --top-p nan": "top_p = nan",
        f"{generate} {model} --prompt-file {session}/noise.txt": "noise.txt is not UTF-8",
        f"{generate} {model} --prompt-file {session}": "Is a directory",
        f"{calibrate} {model} --damping nan": "damping = nan",
        f"{calibrate} {model} --chunk 100": "chunk = 100",
        f"{calibrate} {model} --save-every 0": "save-every = 0",
        f"calibrate {model} {text} --out {session}/one.txt": "one.txt",
        f"{evaluate} {model} {text} --every 0 --context 512": "every = 0",
        f"{evaluate} {model} {text} --chunk 1 --context 512": "chunk = 1",
        f"{evaluate} {model} {text} --methods ,": "no method was named",
        f"{evaluate} {model} {text} --context 512 --as-exported 2": "fit --rounding nearest",
        f"{exported} {model} {text} --context 512 --as-exported 2": "key file needs schema version 3",
        f"{exported} {model} {text} --context 512 --methods exported:nova": "not for nova",
        f"{evaluate} {model} {text} --as-exported llama": "reader 'llama'",
        f"evaluate {out} {model} {text} --context 512 --methods exported": "'exported' needs --rotations",
        f"{evaluate} {model} {text} --methods int2:oscar@nan": "damping = nan",
        f"{tasks} {model} --questions 9": "questions = 9",
        f"{tasks} {model} --trials 0": "trials = 0",
        f"{tasks} {model} --tasks needle": "unknown task 'needle'",
        f"{tasks} {model} --lengths 4k": "'4k'",
        f"{tasks} {model} --lengths 512,8192": "8192",
        f"{tasks} {model} --lengths 512 --questions 8": "too short for 8 questions",
        f"{tasks} {model} --lengths 4096 --tasks writing": "length = 4096 and 1024 new tokens",
        f"{tasks} {model} --lengths 3072 --tasks writing {text}": "has 3000 tokens, needed: 3072",
        f"{tasks} {model} --chat": "no chat template",
        f"evaluate {model} {rotations} {text} --out {session}/one.txt": "one.txt",
        f"fit {session}/one.txt {out}": "one.txt is not a statistics file",
        f"fit {session}/nothing {out}": "not a statistics file",
        f"fit {session}/rotations {out} --basis auto": "'auto'",
        f"inspect {session}/one.txt": "one.txt",
        f"inspect {session}/strange": "'mamba'",
        f"convert {session}/one.txt {session}/y": "one.txt",
        "calibrate": "--model",
        "": "COMMAND",
        "dance": "dance",
    }
    for words, cause in wrong.items():
        code = main(words.split())
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line.startswith("oscar: error:")]
        assert code == 2, f"{words}: exit code {code}"
        assert len(lines) == 1 and error.splitlines()[-1] == lines[0], f"{words}: {error}"
        assert cause in lines[0], f"{words}: {lines[0]}"
        assert "Traceback" not in error


def test_random_words_never_end_in_a_traceback(session: Path, capsys: pytest.CaptureFixture) -> None:
    """Words of the grammar in any order: an exit code, and an error in one line, whatever they are."""
    import random

    generator = random.Random(0)
    words = [
        *COMMANDS,
        "--model",
        "--text",
        "--out",
        "--rotations",
        "--tokens",
        "--context",
        "--basis",
        "--to",
    ]
    words += ["--lengths", "--every", "--methods", "--chunk", "--prompt", "--field", "--damping", "--seed"]
    values = [
        str(session / "one.txt"),
        str(session / "nothing"),
        str(session / "strange"),
        "",
        "-1",
        "nan",
        "x",
    ]
    for _ in range(300):
        line = [generator.choice(COMMANDS)]
        line += [generator.choice(words + values) for _ in range(generator.randrange(6))]
        try:
            code = main(line)
        except SystemExit as stop:  # --help
            code = stop.code
        error = capsys.readouterr().err
        assert code in (0, 2), f"{line}: {code}"
        if code == 2:
            assert error.splitlines()[-1].startswith("oscar: error: ") and "Traceback" not in error, line


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_itself_with_examples(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: oscar {command}" in shown and f"examples:\n  oscar {command}" in shown
    assert all(len(line) <= 110 for line in shown.splitlines())


def test_help_names_every_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n    {command}" in shown for command in COMMANDS)
