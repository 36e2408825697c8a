"""Other methods' caches in transformers: what they store and return, and how they are judged."""

import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_jax.evaluation import methods  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import ConfigError  # noqa: E402
from parity_tests.evaluation.test_evaluate import random_statistics  # noqa: E402
from parity_tests.hf import peer_caches  # noqa: E402
from parity_tests.hf.tiny import make_model, make_rotations, prompts  # noqa: E402

pytestmark = pytest.mark.hf
ROWS = torch.randn(1, 2, 128, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(scope="module")
def bench():
    """The script as a module."""
    folder = Path(__file__).parents[2] / "scripts"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        spec = importlib.util.spec_from_file_location("bench_peers", folder / "bench_peers.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def tokens_first(rows):
    """[1, K, T, D] -> float32 NumPy [T, K, D], as the evaluation in JAX has them."""
    return rows[0].transpose(0, 1).float().numpy()


@pytest.mark.parametrize("name", ["kivi", "fp8", "published", "published:centered", "hadamard"])
def test_both_packages_restore_the_same_rows(name):
    """The caches of the script against the recipes of `oscar evaluate`, on the same rows and statistics."""
    statistics = random_statistics()
    statistics.key_mean[:] = 3.0
    config: Any = SimpleNamespace(head_dim=32)
    fitted: Any = statistics
    (method,) = methods.resolve_methods([name], config, [0], None, {0: statistics})[1:]
    expected = method.rotations[0].restore(*[tokens_first(ROWS)] * 2)
    if name == "fp8":
        rows, scale = peer_caches.to_float8(ROWS)
        found = [rows.float() * scale.float()] * 2
    else:
        recipe = (
            peer_caches.PerChannel()
            if name == "kivi"
            else peer_caches.hadamard(32)
            if name == "hadamard"
            else peer_caches.published(fitted, centered=name != "published")
        )
        assert recipe.bits == method.bits
        found = recipe.restore(ROWS, ROWS)
    for mine, theirs in zip(found, expected):
        # A value on the edge between two codes may fall to either side in float32.
        different = np.abs(tokens_first(mine) - np.asarray(theirs)) > 1e-3
        # A value on the edge between two codes may fall to either side in float32, where rows are rotated.
        assert different.mean() <= (0 if name == "fp8" else 0.01)


def test_a_simulated_layer_reads_what_decoding_reads():
    """From 448 tokens on a chunk reads pages as 449 tokens have them: two of 64, behind a sink of 64."""

    class Marked:
        bits = 3.0

        def restore(self, key, value):
            return key.float() + 1000, value.float() + 2000

    layer = peer_caches.SimulatedLayer(Marked(), CacheConfig(2, 2, 32))
    rows = torch.randn(1, 2, 512, 32).bfloat16()
    first = layer.update(rows[:, :, :448], rows[:, :, :448])
    torch.testing.assert_close(first[0], rows[:, :, :448])  # a prompt is read exactly
    key, value = layer.update(rows[:, :, 448:], rows[:, :, 448:])
    for found, mark in ((key, 1000), (value, 2000)):
        shift = (found - rows.float()).round()[0, 0, :, 0]
        assert shift.nonzero()[:, 0].tolist() == list(range(64, 192)) and shift[64:192].unique() == mark
    # Three pages at 512 tokens: 192 tokens of 2 heads of 32 channels in three bits, keys and values.
    assert layer.size() == (192 * 128 * 3 // 8, 192 * 128, 2 * 320 * 128)


def test_fp8_stores_a_byte_per_number_and_two_per_row():
    layer = peer_caches.Float8Layer()
    layer.update(ROWS[:, :, :100], ROWS[:, :, :100])
    key, _ = layer.update(ROWS[:, :, 100:], ROWS[:, :, 100:])
    assert layer.size() == (2 * 128 * 2 * (32 + 2), 2 * 128 * 2 * 32, 0)
    assert layer.get_seq_length() == 128 and 0 < float((key - ROWS).abs().max()) < 2**-4 * float(
        ROWS.abs().max()
    )


def test_a_cache_that_takes_over_a_prompt_goes_on_as_one_that_read_it(bench):
    """A model with a ring and a full layer: KIVI's cache after a forward, and after `begin`."""
    model = make_model("gemma3", attention="sdpa", head_dim=32)
    ids = prompts(576)[0]
    recipes = {1: peer_caches.PerChannel()}
    read, taken = (peer_caches.make_cache("kivi", model.config, recipes) for _ in range(2))
    prompt = peer_caches.make_cache("bf16", model.config)
    for cache in (read, prompt):
        bench.read_prompt(model, cache, ids[:, :512])
    taken.begin(prompt, [1])
    found = []
    for cache in (read, taken):
        chunks = []
        bench.predict(model, cache, ids, 512, 64, 5, chunks.append)
        found.append(torch.cat(chunks))
    assert len(found[0]) == 13  # positions 515, 520, … 575
    torch.testing.assert_close(*found)


def test_figures_are_those_worked_out_by_hand(bench):
    """Two positions over two tokens: (½, ½) against (¾, ¼), and a method that is BF16 itself."""
    half, skewed = (torch.log(torch.tensor([row])) for row in ([0.5, 0.5], [0.75, 0.25]))
    judge = bench.Judge(torch.tensor([1, -1]))
    judge.keep(half)
    judge.keep(skewed)

    def run(on_chunk):
        on_chunk(skewed)
        on_chunk(skewed)

    figures = judge.measure(run)
    kl = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert figures["kl"] == pytest.approx(kl / 2) and figures["positions"] == 2
    assert (
        figures["nll"] == pytest.approx(-math.log(0.25)) and figures["top1"] == 1.0
    )  # the last has no target
    assert judge.measure(judge.replay)["kl"] == 0


def test_a_text_is_judged_method_by_method_and_taken_up_again(bench):
    """Every method costs something, bytes are those of what is stored, and nothing is run twice."""
    model = make_model("llama", attention="sdpa", hidden_size=128)
    rotations, ids = make_rotations(model.config), prompts(640)[0]
    saved, entry = [], {"methods": {}}
    statistics = dict.fromkeys((0, 1), random_statistics())

    def maker(method):
        sets = {"int2:nearest": rotations}
        return bench.cache_maker(method, model, statistics, sets, 512, 64)

    def judge(names):
        bench.judge_text(
            model, ids, names, entry, maker, layers=[0, 1], prompt=512, chunk=64, every=8,
            on_method=lambda: saved.append(len(entry["methods"])),
        )  # fmt: skip

    judge(["bf16", "fp8"])
    judge(["bf16", "fp8", "kivi", "published:centered", "int2:nearest"])
    figures = entry["methods"]
    assert saved == [1, 2, 2, 3, 4, 5] and figures["bf16"]["kl"] == 0 and figures["bf16"]["positions"] == 16
    assert 0 < figures["fp8"]["kl"] < figures["kivi"]["kl"] < 10 and 0 < figures["int2:nearest"]["kl"] < 10
    # Five pages of 64 tokens at 640, in 2 layers of 2 heads of 32 channels: 34 · 32 + 256 bytes each.
    assert figures["int2:nearest"]["history_bytes"] == 2 * 2 * 5 * (34 * 32 + 256)
    assert figures["bf16"]["window_bytes"] == 2 * 640 * 2 * 2 * 2 * 32


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("name", ["hqq", "quanto"])
def test_layers_of_transformers_count_what_they_store(name, bits):
    pytest.importorskip("hqq" if name == "hqq" else "optimum.quanto")
    model = make_model("llama", attention="sdpa", hidden_size=256)  # heads of 64 channels: a group
    cache = peer_caches.make_cache(f"{name}:{bits}", model.config)
    rows = torch.randn(1, 2, 64, 64)
    lengths = []
    for _ in range(6):
        cache.update(rows, rows, 0)
        lengths.append(peer_caches.layer_size(cache.layers[0]).history_numbers // (2 * 2 * 64))
    assert lengths == [64, 64, 64, 64, 320, 320]  # a prompt at once, then every 256 tokens
    size = peer_caches.layer_size(cache.layers[0])
    assert size.window_bytes == 2 * 2 * 2 * 64 * 64
    assert bits + 0.25 <= 8 * size.history_bytes / size.history_numbers <= bits + 1  # scale and zero per 64


def test_packed_codes_come_back():
    codes = torch.randint(0, 4, (8, 5), dtype=torch.uint8)
    packed = codes[:2] | codes[2:4] << 2 | codes[4:6] << 4 | codes[6:] << 6
    assert torch.equal(peer_caches.unpack_codes(packed, 2), codes)


def test_unknown_methods_and_lengths_are_refused(bench):
    config = make_model("llama", attention="sdpa").config
    with pytest.raises(ConfigError, match="method 'hqq:x', allowed: hqq:2"):
        peer_caches.make_cache("hqq:x", config)
    with pytest.raises(ConfigError, match="method 'int3', allowed: bf16"):
        peer_caches.make_cache("int3", config)
    wide = make_model("gemma3", attention="sdpa", sliding_window=2048).config
    with pytest.raises(ConfigError, match="sliding window of 2048"):
        peer_caches.make_cache("bf16", wide)
    good = {"methods": ["bf16"], "chunk": 64, "every": 1, "judged": 64, "context": 448}
    bench.check(SimpleNamespace(**good))
    for change, message in (
        ({"methods": ["int3"]}, "method 'int3'"),
        ({"chunk": 48}, "--chunk 48"),
        ({"every": 0}, "--every 0"),
        ({"judged": 100}, "judged = 100"),
        ({"context": 384}, "context - judged = 320"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench.check(SimpleNamespace(**(good | change)))
