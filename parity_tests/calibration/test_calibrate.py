"""Calibration: text to sequences, statistics against float64, resuming, the measure of error, the choice."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.cache import allocate_layer_cache, append_rows, read_layer_cache
from oscar_jax.calibration import choice as calibration_choice
from oscar_jax.calibration import job as calibration_job
from oscar_jax.calibration import statistics as calibration_statistics
from oscar_jax.cli import main
from oscar_jax.core import cache_format as fmt
from oscar_jax.core import rotation_header
from oscar_jax.core.config import CacheConfig, CalibrationConfig
from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.evaluation import fidelity, streams
from oscar_jax.evaluation.stepper import make_runner
from oscar_jax.models.decoder import CapturingAttention, CausalAttention
from oscar_jax.models.weights import load_model
from oscar_jax.quantize import round_to_bfloat16
from oscar_jax.rotations import bases, rotation, store
from oscar_jax.rotations import statistics as statistics_file
from oscar_jax.rotations.statistics import LayerStatistics
from parity_tests.models.tiny_model import write_tiny_model

pytestmark = pytest.mark.hf
LAYERS = (0,)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, Any]:
    """Directory, model, configuration and tokenizer of a one-layer random model."""
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)
    return (path, *load_model(path))


def random_sequences(count: int, length: int) -> list[np.ndarray]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, 256, length).astype(np.int32) for _ in range(count)]


def letters(encoded: str) -> list[int]:
    return [ord(character) % 256 for character in encoded]


class TestText:
    def test_every_kind_of_source(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "b.txt").write_text("bravo")
        (tmp_path / "a.txt").write_text("alpha")
        (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
        (tmp_path / "chats.jsonl").write_text('{"said": "one"}\n\n{"said": "two"}\n')
        monkeypatch.setattr(streams.sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"typed")))

        def texts(argument: str, field: str | None = None) -> list[str]:
            return [body for _, body in streams.iterate_documents(argument, field)]

        assert texts(str(tmp_path / "a.txt")) == ["alpha"]
        assert texts(str(tmp_path), "said") == ["alpha", "bravo", "one", "two"]
        assert texts(str(tmp_path / "*.txt")) == ["alpha", "bravo"]
        assert texts(str(tmp_path / "chats.jsonl"), "said") == ["one", "two"]
        assert texts("-") == ["typed"]

    @pytest.mark.parametrize(
        ("name", "body", "field", "message"),
        [
            ("x.txt", b"\xff\xff", None, "not UTF-8"),
            ("x.txt", b"a\0b", None, "binary"),
            ("x.jsonl", b'{"a": "b"}', None, "--field"),
            ("x.jsonl", b'{"a": 1}', "a", "no text field 'a'"),
            ("x.jsonl", b"{", "a", "line 1 is not JSON"),
            ("x.jsonl", b"[" * 100_000, "a", "line 1 is not JSON"),
            ("x.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "a", "line 1 is not JSON"),
            ("x.jsonl", b'{"a": "b"}\n["c"]', "a", "line 2 is a JSON list"),
            ("x.jsonl", b'{"b": "c", "d": "e", "f": 1}', "a", "no text field 'a', it has: b, d$"),
            ("x.jsonl", rb'{"a": "\ud800"}', "a", "half a surrogate pair"),
            ("X.JSONL", b'{"a": "b"}', None, "--field"),
            ("x.txt", "text".encode("utf-16"), None, "looks like UTF-16: save it as UTF-8"),
            ("x.txt", "text".encode("utf-32"), None, "looks like UTF-32"),
            ("x.txt", b"\xef\xbb\xbf", None, "is empty"),
            ("x.txt", b"", None, "is empty"),
            ("x.txt", b"  \n", None, "is empty"),
        ],
    )
    def test_unreadable_text_is_named(
        self, tmp_path: Path, name: str, body: bytes, field: str | None, message: str
    ) -> None:
        (tmp_path / name).write_bytes(body)
        with pytest.raises(streams.TextError, match=message):
            streams.read_stream([str(tmp_path / name)], letters, 10, field)

    def test_marks_and_line_ends_do_not_change_a_text(self, tmp_path: Path) -> None:
        plain = "one\ntwo\u2028still two\n"
        for name, body in {
            "plain": plain.encode(),
            "mark": b"\xef\xbb\xbf" + plain.encode(),
            "windows": plain.replace("\n", "\r\n").encode(),
            "old_mac": plain.replace("\n", "\r").encode(),
        }.items():
            (tmp_path / f"{name}.txt").write_bytes(body)
            assert streams.read_text(tmp_path / f"{name}.txt") == plain, name
        # A line separator may stand inside a JSON string; it does not end the line.
        record = b'\xef\xbb\xbf{"a": "one\xe2\x80\xa8two\xc2\x85"}\r\n\r\n{"a": "x\\r\\ny"}'
        (tmp_path / "x.jsonl").write_bytes(record)
        found = [text for _, text in streams.iterate_documents(str(tmp_path / "x.jsonl"), "a")]
        assert found == ["one\u2028two\x85", "x\ny"]

    def test_a_directory_skips_what_is_no_text_but_not_what_is_wrong(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(b"\x89PNG\xff\x00")
        (tmp_path / "empty.txt").write_bytes(b"\n")
        with pytest.raises(streams.TextError, match="holds no readable UTF-8 text"):
            list(streams.iterate_documents(str(tmp_path)))
        (tmp_path / "b.jsonl").write_text('{"said": "one"}')
        with pytest.raises(streams.TextError, match=r"b\.jsonl is JSON lines: name the field"):
            list(streams.iterate_documents(str(tmp_path)))
        with pytest.raises(streams.TextError, match="no text field 'text', it has: said"):
            list(streams.iterate_documents(str(tmp_path), "text"))
        assert [t for _, t in streams.iterate_documents(str(tmp_path), "said") if t.strip()] == ["one"]

    def test_a_stream_stops_reading_and_remembers_its_text(self, tmp_path: Path) -> None:
        (tmp_path / "1.txt").write_text("a" * 1000)
        (tmp_path / "2.txt").write_text("b")
        stream = streams.read_stream([str(tmp_path)], letters, 300)
        assert len(stream.tokens) == 300
        assert stream.document_digests == (streams.text_digest("a" * 1000),)
        assert stream.digest == streams.text_digest("a" * 1000)

    def test_sequences_share_the_budget_and_take_turns(self) -> None:
        def stream(value: int, count: int) -> streams.TokenStream:
            return streams.TokenStream("", np.full(count, value, np.int32), "", (), count)

        cut = streams.cut_sequences([stream(1, 10), stream(2, 100), stream(3, 100)], 90, 11, bos=7)
        assert [len(sequence) for sequence in cut] == [11] * 9
        assert all(sequence[0] == 7 for sequence in cut)
        assert [int(sequence[1]) for sequence in cut] == [1, 2, 3, 2, 3, 2, 3, 2, 3]
        (short,) = streams.cut_sequences([stream(1, 5)], 90, 11, bos=None)
        assert short.tolist() == [1] * 5


def test_statistics_equal_a_float64_recomputation(tiny: tuple) -> None:
    """Running sums over chunks against formulas over all captured rows at once."""
    _, model, config, _ = tiny
    sequences = random_sequences(2, 320)
    found = calibration_statistics.gather_statistics(
        model, config, LAYERS, sequences, chunk=128, save_every=1, state_path=None, run_digest=""
    )
    heads, group = config.num_key_value_heads, config.num_query_heads // config.num_key_value_heads
    query, centered, values = [], [], []
    for sequence in sequences:
        _, states = model.hidden_states(
            jnp.asarray(sequence)[None], attention=CapturingAttention(CausalAttention(config))
        )
        q, k, v = (np.asarray(rows[0], np.float64) for rows in states[0][1])
        query.append(
            q.reshape(-1, heads, group, config.head_dim).swapaxes(1, 2).reshape(-1, heads, q.shape[-1])
        )
        pages = k[64:].reshape(-1, 64, heads, config.head_dim)
        centered.append((pages - pages.mean(axis=1, keepdims=True)).reshape(-1, heads, config.head_dim))
        values.append(v[64:])

    def second_moment(parts: list[np.ndarray]) -> np.ndarray:
        rows = np.concatenate(parts)
        return np.einsum("tkd,tke->kde", rows, rows) / len(rows)

    # The captured rows are float32, the cache stored (and the statistics took) keys and values in bf16.
    np.testing.assert_allclose(found[0].query_covariance, second_moment(query), rtol=1e-3, atol=1e-4)
    scale = np.abs(second_moment(centered)).max()
    np.testing.assert_allclose(found[0].key_covariance, second_moment(centered), atol=4e-3 * scale)
    np.testing.assert_allclose(found[0].value_mean, np.concatenate(values).mean(axis=0), atol=2e-3)
    assert found[0].surrogate_value_covariance is not None and found[0].exact_value_covariance is not None


def test_interrupted_calibration_ends_in_the_same_bytes(tiny: tuple, tmp_path: Path) -> None:
    """Stopped in the middle of a sequence, again right after a saved state, then finished."""
    _, model, config, _ = tiny
    sequences = random_sequences(3, 256)
    state_path = tmp_path / calibration_statistics.STATE_FILE

    def gather(path: Path | None, stop_after: int | None = None) -> dict[int, Any]:
        chunks = iter(range(1000))

        def on_chunk(tokens: int) -> None:
            if next(chunks) == stop_after:
                raise KeyboardInterrupt

        return calibration_statistics.gather_statistics(
            model, config, LAYERS, sequences, chunk=64, save_every=3, state_path=path, run_digest="run",
            on_chunk=on_chunk,
        )  # fmt: skip

    whole = gather(None)
    for stop_after in (8, 9):
        with pytest.raises(KeyboardInterrupt):
            gather(state_path, stop_after)
    assert int(np.load(state_path)["done"]) == 9
    resumed = gather(state_path)
    for layer in LAYERS:
        for field in dataclasses.fields(whole[layer]):
            first, second = getattr(whole[layer], field.name), getattr(resumed[layer], field.name)
            assert np.array_equal(first, second), f"layer {layer}: {field.name} differs after resuming"
    with pytest.raises(CheckpointError, match="other model, text or settings"):
        calibration_statistics.gather_statistics(
            model, config, LAYERS, sequences, chunk=64, save_every=3, state_path=state_path, run_digest="new"
        )
    state_path.write_bytes(state_path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="damaged"):
        gather(state_path)


def test_statistics_survive_the_disk(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    matrices = [generator.standard_normal((2, 16, 16)) for _ in range(4)]
    means = [generator.standard_normal((2, 16)) for _ in range(2)]
    entry = LayerStatistics(
        matrices[0], matrices[1], means[0], means[1], matrices[2], None, matrices[3], tokens=77
    )
    path = tmp_path / statistics_file.STATISTICS_FILE
    statistics_file.save_statistics({3: entry, 5: entry}, path)
    written = path.read_bytes()
    statistics_file.save_statistics({3: entry, 5: entry}, path)
    assert path.read_bytes() == written
    found, _ = statistics_file.load_statistics(path).values()
    for field in dataclasses.fields(entry):
        assert np.array_equal(getattr(entry, field.name), getattr(found, field.name))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a statistics file"):
        statistics_file.load_statistics(path)


class TestFidelity:
    geometry = CacheConfig(num_key_value_heads=2, num_query_heads=4, head_dim=16)

    def rows(self, *shape: int) -> jax.Array:
        return round_to_bfloat16(jax.random.normal(jax.random.key(sum(shape)), shape))

    def test_error_of_attention_against_float64(self) -> None:
        tokens, probes = 600, np.asarray([383, 384, 500, 599], np.int32)
        query, key, value = self.rows(4, 4, 16), self.rows(tokens, 2, 16), self.rows(tokens, 2, 16)
        coded_key, coded_value = key + 0.3 * self.rows(tokens, 2, 16), 0.9 * value
        found = fidelity.attention_error(
            query, jnp.asarray(probes), key, value, coded_key, coded_value,
            geometry=self.geometry, softmax_scale=0.25, sliding_window=None,
        )  # fmt: skip

        def softmax(scores: np.ndarray) -> np.ndarray:
            weights = np.exp(scores - scores.max())
            return weights / weights.sum()

        kl, moved, energy = np.zeros(2), np.zeros(2), np.zeros(2)
        exact = [np.asarray(a, np.float64) for a in (query, key, value, coded_key, coded_value)]
        for t, position in enumerate(probes):
            stored = position + 1
            end = 64 + 64 * self.geometry.history_pages(int(stored))
            coded = (np.arange(stored) >= 64) & (np.arange(stored) < end)
            for n in range(4):
                q, k, v, ck, cv = exact[0][t, n], *(a[:stored, n // 2] for a in exact[1:])
                p = softmax(k @ q / 4)
                w = softmax(np.where(coded[:, None], ck, k) @ q / 4)
                kl[n // 2] += (p * np.log(p / w)).sum() / (2 * len(probes))
                moved[n // 2] += ((w @ np.where(coded[:, None], cv, v) - p @ v) ** 2).sum()
                energy[n // 2] += ((p @ v) ** 2).sum()
        np.testing.assert_allclose(found["kl"], kl, rtol=1e-4)
        np.testing.assert_allclose(found["output_error"], moved / energy, rtol=1e-4)

    def test_restored_rows_are_those_the_cache_returns(self) -> None:
        key, value = self.rows(1, 700, 2, 16), self.rows(1, 700, 2, 16) + 1
        fitted = jax.tree.map(jnp.asarray, rotation.hadamard_rotation(2, 16))
        cache = allocate_layer_cache(self.geometry, 1, 700)
        cache = jax.jit(append_rows)(cache, fitted, key, value, jnp.asarray([700], jnp.int32))
        stored = read_layer_cache(cache, fitted, 0)
        restored = jax.jit(fidelity.reconstruct_pages)(key[0], value[0], fitted)
        coded = fidelity.coded_mask(jnp.asarray(700), 700, self.geometry)[:, None, None]
        for found, exact, coded_rows in zip(stored, (key[0], value[0]), restored):
            np.testing.assert_array_equal(found, jnp.where(coded, coded_rows, exact))

    def test_probes_end_at_the_last_position(self) -> None:
        probes = fidelity.probe_positions(5000, 10, self.geometry)
        assert probes[0] == 383 and probes[-1] == 4999 and len(probes) == 10
        assert not len(fidelity.probe_positions(383, 10, self.geometry))


def test_the_choice_is_the_best_tried_and_never_worse_than_the_simplest(tiny: tuple) -> None:
    _, model, config, _ = tiny
    fit, held_out = random_sequences(2, 512), random_sequences(3, 512)[2:]
    statistics = calibration_statistics.gather_statistics(
        model, config, LAYERS, fit, chunk=256, save_every=9, state_path=None, run_digest=""
    )
    header = rotation_header.RotationHeader("tiny", LAYERS, 4, 2, 32, "half", "auto", bases.BASIS_VERSION)
    runner = make_runner(model, config)
    errors, roundings = {}, {}
    for basis in ("auto", "channel_balanced", "ordered"):
        settings = CalibrationConfig(basis=basis)
        fitted = calibration_job.fit_rotation_set(runner, statistics, held_out, settings, header, chunk=256)
        rotation.validate_rotation_set(fitted.rotation_set)
        errors[basis] = fitted.report["layers"]
        roundings[basis] = fitted.rotation_set.header.rounding
        if basis == "auto":  # both roundings competed, as whole sets
            predicted = fitted.report["predicted_by_rounding"]
            assert roundings["auto"] == min(predicted, key=predicted.get) and len(predicted) == 2
    assert roundings["channel_balanced"] == "nearest" and roundings["ordered"] == "sequential"
    for layer in map(str, LAYERS):
        entry = errors["auto"][layer]
        tried = np.asarray(list(entry["tried"]["key"].values()))
        assert len(entry["chosen"]["key"]) == config.num_key_value_heads
        simplest = errors["channel_balanced"][layer]["predicted"]
        # The choice is made by the geometric mean of both errors at one of four multipliers.
        product = entry["predicted"]["kl"] * entry["predicted"]["output_error"]
        assert product <= 1.05 * simplest["kl"] * simplest["output_error"]
        assert np.isfinite(tried).all() and (tried > 0).all()


def test_choose_needs_a_clear_win() -> None:
    first, second = (rotation.hadamard_rotation(2, 16) for _ in range(2))
    second = dataclasses.replace(second, key_mean=second.key_mean + 1)
    scores = {id(first): np.asarray([1.0, 1.0]), id(second): np.asarray([0.98, 0.5])}

    def score(fit: Any, multiplier: int) -> np.ndarray:
        return scores.get(id(fit), np.ones(2)) * (0.9 if multiplier == 333 and id(fit) not in scores else 1.0)

    choice = calibration_choice.choose_candidate({"a": first, "b": second}, ("key_mean",), score, (410, 333))
    assert choice.names == ["a", "b"]
    assert choice.multipliers == [333, 410]
    assert np.asarray(choice.fields["key_mean"], np.float32).mean(axis=1).tolist() == [0.0, 1.0]


def test_killed_from_the_command_line_gives_the_same_rotation_set(
    tiny: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    path = tiny[0]
    (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(2000)))

    def run(out: str) -> int:
        return main(
            f"calibrate --model {path} --text {tmp_path / 'text.txt'} --out {tmp_path / out} --tokens 1500 "
            "--context 512 --chunk 128 --save-every 1 --basis balanced".split()
        )

    assert run("whole") == 0
    save_state, saved = calibration_statistics.save_state, []

    def save_and_die(*arguments: Any) -> None:
        save_state(*arguments)
        saved.append(arguments)
        if len(saved) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(calibration_statistics, "save_state", save_and_die)
    assert run("killed") == 130
    monkeypatch.setattr(calibration_statistics, "save_state", save_state)
    assert (tmp_path / "killed" / calibration_statistics.STATE_FILE).exists()
    assert run("killed") == 0
    assert not (tmp_path / "killed" / calibration_statistics.STATE_FILE).exists()
    sets = [store.load_rotation_set(tmp_path / n) for n in ("whole", "killed")]
    for name, rotation_set in zip(("whole", "killed"), sets):
        store.save_safetensors(rotation_set, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "killed.safetensors").read_bytes()
    report = json.loads((tmp_path / "whole" / "report.json").read_text())
    assert set(report["layers"]) == {"0"} and report["layers"]["0"]["key_condition_number"] >= 1
    for name in (
        "report.md",
        "eigenvalues.png",
        "channels.png",
        "layers.png",
        statistics_file.STATISTICS_FILE,
    ):
        assert (tmp_path / "whole" / name).stat().st_size > 0
    assert "Predicted errors" in capsys.readouterr().out


class TestFit:
    """From statistics alone to a rotation set that loads wherever one is taken."""

    def test_fit_of_a_calibration_is_the_calibration(
        self, tiny: tuple, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        (tmp_path / "text.txt").write_text("".join(chr(97 + i * i % 23) for i in range(1200)))
        words = f"--text {tmp_path / 'text.txt'} --tokens 1000 --context 256 --chunk 128".split()
        assert main(["calibrate", "--model", str(tiny[0]), "--out", str(tmp_path / "whole"), *words]) == 0
        assert main(["fit", str(tmp_path / "whole"), "--out", str(tmp_path / "fitted")]) == 0
        assert "channel_balanced" in capsys.readouterr().out
        whole, fitted = (store.load_rotation_set(tmp_path / name) for name in ("whole", "fitted"))
        for name in fmt.ROTATION_FIELDS:
            first, second = getattr(whole.layers[0], name), getattr(fitted.layers[0], name)
            assert np.array_equal(first, second), name
        with pytest.raises(ConfigError, match="sequences of 256 tokens, allowed: >= 384"):
            calibration_job.fit(tmp_path / "whole", settings=CalibrationConfig(rounding="sequential"))
        extra = {key: value for key, value in whole.header.extra.items() if key != "choices"}
        assert fitted.header == dataclasses.replace(whole.header, extra=extra)
        assert statistics_file.load_statistics(tmp_path / "fitted" / statistics_file.STATISTICS_FILE)[
            0
        ].tokens
        assert "choices" in store.read_header(tmp_path / "whole").extra

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rounding": "random"}, "rounding = 'random', allowed: nearest, sequential"),
            ({"rounding": "sequential", "basis": "balanced"}, "'balanced' with rounding = 'sequential'"),
            ({"rounding": "nearest", "basis": "ordered"}, "'ordered' with rounding = 'nearest'"),
        ],
    )
    def test_a_basis_goes_with_its_rounding(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            CalibrationConfig(**options)
        assert CalibrationConfig().rounding == "" and CalibrationConfig(basis="auto").rounding == ""

    def test_both_packages_fit_sequentially_to_the_same_bytes(self, tmp_path: Path) -> None:
        """Header and arrays, from one file of statistics that both read."""
        pytest.importorskip("transformers")
        from oscar_torch.core.config import CalibrationConfig as TorchConfig
        from oscar_torch.hf.calibrate import fit_rotation_set
        from oscar_torch.rotations import statistics as torch_statistics
        from oscar_torch.rotations import store as torch_store

        rng = np.random.default_rng(0)
        rows = rng.standard_normal((2, 100, 64)) * np.geomspace(0.1, 3, 64)
        moment = np.einsum("ktd,kte->kde", rows, rows) / 100
        mean = rows.mean(axis=1)
        entry = LayerStatistics(
            moment, moment[::-1], mean, mean, moment, None, None, tokens=100, coded_query_covariance=moment,
            rope_frequencies=1e4 ** (-np.arange(32) / 32), context=512, reach=4096,
        )  # fmt: skip
        header = rotation_header.RotationHeader("m", (1,), 4, 2, 64, "half", "", "")
        path = tmp_path / "statistics.safetensors"
        statistics_file.save_statistics({1: entry}, path, header)
        ours = calibration_job.fit(path, settings=CalibrationConfig(rounding="sequential"))
        assert ours.header.rounding_steps == 4
        store.save_safetensors(ours, tmp_path / "ours.safetensors")
        read, theirs = torch_statistics.read_statistics(path)
        assert theirs is not None
        fitted = fit_rotation_set(read, theirs, TorchConfig(rounding="sequential"))
        torch_store.save_safetensors(fitted, tmp_path / "theirs.safetensors")
        assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()

    def test_statistics_without_a_header_need_a_name(self, tmp_path: Path) -> None:
        generator = np.random.default_rng(0)
        rows = generator.standard_normal((2, 100, 16))
        moment = np.einsum("ktd,kte->kde", rows, rows) / 100
        mean = rows.mean(axis=1)
        entry = LayerStatistics(moment, moment, mean, mean, moment, None, None, tokens=100)
        path = tmp_path / "statistics.safetensors"
        statistics_file.save_statistics({3: entry, 1: entry}, path)
        with pytest.raises(ConfigError, match="of which model"):
            calibration_job.fit(path)
        with pytest.raises(ConfigError, match="'auto' chooses on held-out text"):
            calibration_job.fit(path, settings=CalibrationConfig(basis="auto"))
        with pytest.raises(CheckpointError, match="not a statistics file"):
            calibration_job.fit(tmp_path / "none.safetensors")
        with pytest.raises(CheckpointError, match="no layer"):
            calibration_job.fit({}, model_id="m", num_query_heads=4)
        fitted = calibration_job.fit({3: entry, 1: entry}, tmp_path / "out", model_id="m", num_query_heads=4)
        header = fitted.header
        assert (header.model_id, header.layers, header.num_query_heads) == ("m", (1, 3), 4)
        assert (header.num_key_value_heads, header.head_dim, header.basis) == (2, 16, "channel_balanced")
        again = calibration_job.fit(tmp_path / "out", settings=CalibrationConfig(basis="hadamard"))
        assert again.header.model_id == "m" and again.header.basis == "hadamard"
