"""Evaluation: the measures, the simulated recipes and the accounting."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.cache import allocate_layer_cache, append_rows, live_bytes
from oscar_jax.core.config import CacheConfig
from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.core.rotation_header import RotationHeader
from oscar_jax.evaluation import fidelity, flash_rows, plots, stepper
from oscar_jax.evaluation import job as evaluation_job
from oscar_jax.evaluation import methods as evaluation_methods
from oscar_jax.evaluation import report as evaluation_report
from oscar_jax.evaluation.blockwise import StoredRows, attend_rows, coded_share, finish
from oscar_jax.evaluation.streams import TextError, TokenStream
from oscar_jax.models.cached_attention import CachedAttention, allocate_model_cache
from oscar_jax.models.weights import load_model
from oscar_jax.quantize import round_to_bfloat16
from oscar_jax.rotations import bases
from oscar_jax.rotations.fit import fit_layer_rotation
from oscar_jax.rotations.rotation import RotationSet, hadamard_rotation
from oscar_jax.rotations.statistics import LayerStatistics
from parity_tests.models.tiny_model import write_tiny_model

pytestmark = pytest.mark.hf
LAYERS = (0, 1)
CONTEXT = 576


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any, stepper.Runner]:
    """Model, configuration, tokenizer and compiled steps of a two-layer random model."""
    model, config, tokenizer = load_model(write_tiny_model(tmp_path_factory.mktemp("tiny")))
    return model, config, tokenizer, stepper.make_runner(model, config)


def rotation_set(config: Any, **changes: Any) -> RotationSet:
    header = RotationHeader(
        **(
            {
                "model_id": config.model_id,
                "layers": LAYERS,
                "num_query_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rope": "half",
                "basis": "hadamard",
                "basis_version": bases.BASIS_VERSION,
            }
            | changes
        )
    )
    return RotationSet(header, {layer: hadamard_rotation(2, header.head_dim) for layer in header.layers})


def random_statistics(head_dim: int = 32) -> LayerStatistics:
    generator = np.random.default_rng(1)

    def covariance() -> np.ndarray:
        rows = generator.standard_normal((2, 100, head_dim)) * np.geomspace(0.1, 3, head_dim)
        return np.einsum("ktd,kte->kde", rows, rows) / 100

    return LayerStatistics(
        covariance(), covariance(), np.zeros((2, head_dim)), np.zeros((2, head_dim)), covariance(),
        covariance(), covariance(), tokens=100, coded_query_covariance=covariance(),
        rope_frequencies=np.zeros(0),
    )  # fmt: skip


def stream_of(tokens: np.ndarray, digests: tuple[str, ...] = ()) -> TokenStream:
    return TokenStream("random", tokens, "0" * 16, digests, len(tokens))


@pytest.fixture(scope="module")
def result(tiny: tuple) -> tuple[list[stepper.Method], evaluation_report.StreamResult]:
    """One stream judged by every kind of method."""
    _, config, _, steps = tiny
    tokens = np.random.default_rng(5).integers(0, 256, CONTEXT).astype(np.int32)
    statistics: dict[int, Any] = dict.fromkeys(LAYERS, random_statistics())
    names = ["int2", "int2:balanced@0.1@1.6", "published", "hadamard", "naive", "kivi"]
    methods = evaluation_methods.resolve_methods(names, config, LAYERS, rotation_set(config), statistics)
    found = evaluation_job.evaluate_stream(
        steps, methods, stream_of(tokens), tokens, LAYERS, chunk=64, every=3
    )
    return methods, found


def test_distributions_are_compared_as_in_float64() -> None:
    generator = np.random.default_rng(0)
    logits = [generator.standard_normal((5, 40)) * 3 for _ in range(2)]
    log_p, log_q = (z - np.log(np.exp(z).sum(axis=1, keepdims=True)) for z in logits)
    targets = np.asarray([0, 39, 7, 7, 1], np.int32)
    both = jnp.asarray(np.stack([log_p, log_q]), jnp.float32)
    nll, kl, same = stepper.compare_distributions(both, jnp.asarray(targets))
    np.testing.assert_allclose(nll[1], -log_q[np.arange(5), targets], rtol=1e-5)
    np.testing.assert_allclose(kl[1], (np.exp(log_p) * (log_p - log_q)).sum(axis=1), rtol=1e-5)
    assert same[1].tolist() == (log_p.argmax(1) == log_q.argmax(1)).tolist()
    assert not kl[0].any() and same[0].all()


def test_positions_lie_past_sink_recent_window_and_one_page(tiny: tuple) -> None:
    geometry = tiny[1].cache_config()
    assert evaluation_job.judged_positions(600, 1, geometry).tolist() == list(range(384, 599))
    assert evaluation_job.judged_positions(600, 100, geometry).tolist() == [400, 500]


def test_bits_are_counted_by_the_stated_formulas() -> None:
    assert [fidelity.asymmetric_bits(d) for d in (64, 128, 192, 256)] == [2.5, 2.25, 2 + 32 / 192, 2.25]
    assert [fidelity.page_bits(d) for d in (64, 128, 256)] == [2.375, 2.25, 2.1875]


def test_bf16_figures_are_those_of_the_plain_model(tiny: tuple, result: tuple) -> None:
    """Chunked and cached against one uncached pass: likelihoods agree up to the cache's rounding to bf16."""
    model, _, _, _ = tiny
    methods, found = result
    tokens = found.stream.tokens
    logits, _ = model(jnp.asarray(tokens)[None])
    log_p = jax.nn.log_softmax(logits[0])
    expected = -np.asarray(log_p)[found.positions, tokens[found.positions + 1]]
    difference = np.abs(found.nll["bf16"] - expected)
    assert np.median(difference) < 0.02 * np.abs(expected).mean()
    assert not found.kl["bf16"].any() and found.top1["bf16"].all()
    assert set(found.layer_errors) == {method.name for method in methods} - {"bf16"}


def test_every_method_is_worse_than_bf16_and_finite(result: tuple) -> None:
    _, found = result
    for name in found.layer_errors:
        assert np.isfinite(found.kl[name]).all() and found.kl[name].mean() > 1e-6, name
        for errors in found.layer_errors[name].values():
            assert 0 < errors["value_error"] < errors["output_error"] < 10, name
    naive, int2 = (np.mean([e["kl"] for e in found.layer_errors[n].values()]) for n in ("naive", "int2"))
    assert int2 < naive


@pytest.mark.parametrize("window", [None, 300])
def test_each_query_reads_int2_where_decoding_would(tiny: tuple, window: int | None) -> None:
    """Attention over exact and restored rows at once, query by query against one softmax over mixed rows."""
    geometry = tiny[1].cache_config()
    keys = jax.random.split(jax.random.key(0), 5)
    query = jax.random.normal(keys[0], (1, 256, 4, 32))
    exact = [jax.random.normal(k, (1, 2, 1024, 32)).astype(jnp.bfloat16) for k in keys[1:3]]
    restored = [jax.random.normal(k, (1, 2, 1024, 32)) for k in keys[3:5]]
    rows = StoredRows(*exact, *restored)
    positions = jnp.arange(512, 768)
    out = finish([
        attend_rows(query, rows, positions, 768, config=geometry, softmax_scale=0.2, sliding_window=window)
    ])  # fmt: skip
    index = np.arange(1024)
    for t in (0, 62, 63, 64, 200, 255):
        position = 512 + t
        coded = (index >= 64) & (index < 64 + 64 * geometry.history_pages(position + 1))
        seen = (index <= position) & (index > position - (window or 4096))
        key, value = (np.where(coded[:, None], r[0], e[0]) for r, e in zip(restored, exact))
        for n in range(4):
            scores = np.where(seen, key[n // 2] @ np.asarray(query[0, t, n]) * 0.2, -np.inf)
            expected = jax.nn.softmax(scores) @ value[n // 2].astype(np.float32)
            np.testing.assert_allclose(out[0, t, n], expected, atol=2e-5)


@pytest.mark.parametrize(("sink", "recent"), [(64, 256), (0, 64), (128, 128)])
@pytest.mark.parametrize("coded", [True, False])
def test_a_chunk_through_flash_attention_reads_the_same(sink: int, recent: int, coded: bool) -> None:
    """The parts that a GPU computes, with cuDNN's steps in float32, against one walk over all rows."""
    geometry = CacheConfig(2, 4, 16, sink_tokens=sink, recent_tokens=recent)
    rng = np.random.default_rng(sink + recent)

    def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.normal(0, 1, shape), dtype)

    exact = [normal(2, 2, 1536, 16, dtype=jnp.bfloat16) for _ in range(2)]
    rows = StoredRows(*exact, *([normal(2, 2, 1536, 16) for _ in range(2)] if coded else (None, None)))
    options: dict[str, Any] = {"config": geometry, "softmax_scale": 0.5, "measure_coded": not coded}
    one = jax.jit(lambda q, start: flash_rows.attend_chunk(q, rows, start, backend="xla", **options))
    other = jax.jit(
        lambda q, start: attend_rows(
            q, rows, start + jnp.arange(q.shape[1]), start + q.shape[1], sliding_window=None, **options
        )
    )
    for start, tokens in ((0, 256), (64, 256), (320, 256), (1024, 256), (1280, 256), (448, 64)):
        query = normal(2, tokens, 4, 16)
        got, want = one(query, start), other(query, start)
        np.testing.assert_allclose(finish([got]), finish([want]), atol=1e-5, err_msg=f"at {start}")
        if not coded:
            share = coded_share(got)
            np.testing.assert_allclose(share, coded_share(want), atol=2e-6, err_msg=f"at {start}")
            assert start < 1000 or float(share.mean()) > 0.2


@pytest.mark.hopper
def test_a_chunk_through_cudnn() -> None:
    """The same with cuDNN, BF16 queries: each output within BF16's rounding of weights and rows."""
    geometry = CacheConfig(2, 4, 128)
    rng = np.random.default_rng(0)
    exact = [jnp.asarray(rng.normal(0, 1, (2, 2, 2048, 128)), jnp.bfloat16) for _ in range(2)]
    restored = [store.astype(jnp.float32) * 1.5 for store in exact]
    query = jnp.asarray(rng.normal(0, 1, (2, 512, 4, 128)), jnp.bfloat16)
    options: dict[str, Any] = {"config": geometry, "softmax_scale": 128**-0.5}
    for others in (restored, (None, None)):
        rows = StoredRows(*exact, *others)
        got = finish([flash_rows.attend_chunk(query, rows, 1024, **options)])
        want = finish(
            [attend_rows(query, rows, 1024 + jnp.arange(512), 1536, sliding_window=None, **options)]
        )
        error = jnp.linalg.norm(got - want, axis=-1) / jnp.linalg.norm(want, axis=-1)
        assert float(error.max()) < 2e-2, f"{float(error.max()):.1e}"


@pytest.mark.parametrize("name", ["int2", "int2:sequential"])
def test_figures_do_not_depend_on_the_chunk_and_are_those_of_decoding(tiny: tuple, name: str) -> None:
    """A text read in one forward pass, in chunks, and token by token through the real 2-bit cache."""
    model, config, _, steps = tiny
    tokens = np.random.default_rng(5).integers(0, 256, CONTEXT).astype(np.int32)
    statistics: dict[int, Any] = dict.fromkeys(LAYERS, random_statistics())
    methods = evaluation_methods.resolve_methods([name], config, LAYERS, rotation_set(config), statistics)
    assert (methods[1].rotations[0].key_feedback is not None) == (name == "int2:sequential")
    kl = []
    for chunk in (64, CONTEXT):
        found = evaluation_job.evaluate_stream(
            steps, methods, stream_of(tokens), tokens, LAYERS, chunk=chunk, every=1
        )
        kl.append(found.kl[name])
    assert kl[0].mean() > 0.01
    np.testing.assert_allclose(kl[0], kl[1], atol=1e-4 * kl[0].max())

    rotations = methods[1].rotations

    @jax.jit
    def decode(token: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        attention = CachedAttention(config, rotations, jnp.ones(1, jnp.int32))
        logits, caches = model(token, caches, positions=caches[0].lengths[:, None], attention=attention)
        return jax.nn.log_softmax(logits[0, 0]), caches

    caches, log_q = allocate_model_cache(config, 1, CONTEXT, kind="int2"), []
    for token in tokens[:-1]:
        row, caches = decode(jnp.asarray([[token]]), caches)
        log_q.append(row)
    expected = -np.asarray(log_q)[found.positions, tokens[found.positions + 1]]
    # The cache multiplies codes in the rotated basis, here rows are rotated back first: float32 rounding.
    np.testing.assert_allclose(found.nll[name], expected, rtol=5e-4)


def test_published_recipe_is_orthogonal_clipped_and_grouped() -> None:
    recipe = evaluation_methods.published_recipe(random_statistics(256))
    rows = round_to_bfloat16(jax.random.normal(jax.random.key(2), (3, 1, 256)))
    assert (int(recipe.key_clip_index), int(recipe.value_clip_index)) == (245, 235)
    matrix = np.asarray(recipe.key_rotation[0], np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(256), atol=1e-5)
    rotated = np.asarray(rows[:, 0], np.float64) @ matrix
    threshold = np.sort(np.abs(rotated), axis=1)[:, 245:246]
    grouped = np.clip(rotated, -threshold, threshold).reshape(3, 2, 128)
    low, high = grouped.min(axis=2, keepdims=True), grouped.max(axis=2, keepdims=True)
    scale = (high - low) / 3
    codes = np.trunc((grouped - low) / scale + 0.5)
    expected = (codes * scale + low).reshape(3, 256) @ matrix.T
    found = fidelity.fake_quantize_rows(rows, recipe.key_rotation, recipe.key_clip_index)
    # A value on the edge between two codes may fall to either side in float32.
    assert np.mean(np.abs(np.asarray(found[:, 0]) - expected) > 1e-4) < 0.01


def test_a_recipe_takes_the_mean_off_and_uses_the_inverse_it_is_given() -> None:
    """A uniform matrix scaled by 3: with its inverse transpose the codes of the orthogonal one come back."""
    rows = round_to_bfloat16(jax.random.normal(jax.random.key(3), (64, 2, 32)))
    mean = np.stack([np.full(32, 5.0), np.linspace(-4, 4, 32)]).astype(np.float32)
    matrix = bases.hadamard_matrix(32)[None]
    plain = fidelity.make_recipe(matrix, matrix)
    scaled = fidelity.make_recipe(
        3 * matrix, 3 * matrix, query_rotation=matrix / 3, output_rotation=matrix / 3, key_mean=mean
    )
    key, value = fidelity.reconstruct_rows(rows - mean, rows, plain)
    found_key, found_value = fidelity.reconstruct_rows(rows, rows, scaled)
    # A value on the edge between two codes may fall to either side in float32.
    for found, expected in ((found_key, key + mean), (found_value, value)):
        assert np.mean(np.abs(np.asarray(found) - np.asarray(expected)) > 1e-4) < 0.01


def test_keys_that_need_means_lose_more_when_exported(tiny: tuple) -> None:
    """Keys around an offset: a page takes it off, the fixed mean of version 3 too, version 2 has none."""
    config = tiny[1]
    generator = np.random.default_rng(11)
    offset = 8 * generator.standard_normal((2, 32))
    key, query = generator.standard_normal((1024, 2, 32)) + offset, generator.standard_normal((64, 4, 32))
    value = generator.standard_normal((1024, 2, 32))
    statistics = dataclasses.replace(random_statistics(), key_mean=offset)
    layers: dict[int, Any] = dict.fromkeys(
        LAYERS, fit_layer_rotation(statistics, "oscar", per_head=True, damping=0.1)
    )
    fitted = RotationSet(rotation_set(config).header, layers)
    names = ["int2", "exported", "exported:2", "exported:sglang-2026-08"]
    methods = evaluation_methods.resolve_methods(names, config, LAYERS, fitted, None)[1:]
    assert [method.basis.partition(", ")[2] for method in methods] == [
        "", "fixed key means", "key means dropped", "key means dropped",
    ]  # fmt: skip
    exact_key, exact_value = jnp.asarray(key, jnp.float32), jnp.asarray(value, jnp.float32)
    positions = np.arange(960, 1024, dtype=np.int32)
    int2, kept, dropped, loader = (
        stepper.layer_error(query, positions, exact_key, exact_value, method.rotations[0], config, 0)["kl"]
        for method in methods
    )
    assert dropped == loader > 2 * int2 and dropped > 2 * kept


def test_an_exported_set_of_a_hybrid_model_is_read_by_the_ids_of_its_loader(tiny: tuple) -> None:
    """Layer 1 has a short window: nova counts the others from 0, sglang asks for all of them."""
    config = dataclasses.replace(tiny[1], num_layers=3, layer_windows=(None, 128, None))
    fitted = rotation_set(config, layers=(0, 2))
    for name in ("exported:nova", "exported:sglang-hybrid", "exported:1"):
        method = evaluation_methods.resolve_methods([name], config, (0, 2), fitted, None)[1]
        assert list(method.rotations) == [0, 2] and method.basis == "hadamard"
        for recipe in method.rotations.values():
            assert recipe.query_rotation is recipe.output_rotation is recipe.key_mean is None
            np.testing.assert_allclose(recipe.key_rotation, bases.hadamard_matrix(32)[None], atol=1e-6)
    with pytest.raises(CheckpointError, match=r"not for sglang .* has no rotation for layer 1"):
        evaluation_methods.resolve_methods(["exported:sglang"], config, (0, 2), fitted, None)
    every = rotation_set(config, layers=(0, 1, 2))
    with pytest.raises(CheckpointError, match="pair has no rotation for layer 1"):
        evaluation_methods.resolve_methods(["exported:nova"], config, (0, 1, 2), every, None)


def test_bytes_are_those_of_the_real_cache_or_counted_likewise(tiny: tuple, result: tuple) -> None:
    config = tiny[1]
    methods, found = result
    pages = config.cache_config().history_pages(CONTEXT)
    int2_page = 34 * 32 + 256
    window = 4 * 2 * 32 * (CONTEXT - 64 * pages)
    by_name = {method.name: found.cache_bytes[method.name] for method in methods}
    assert by_name["bf16"]["all_layers"] == by_name["bf16"]["all_layers_bf16"] == 2 * 4 * 2 * 32 * CONTEXT
    assert by_name["int2"]["quantized_layers"] == 2 * (2 * pages * int2_page + window)
    assert by_name["naive"]["quantized_layers"] == 2 * (round(64 * pages * 2 * 2 * 32 * 3 / 8) + window)
    assert by_name["bf16"]["quantized_layers"] == by_name["bf16"]["all_layers"]
    # Whole pages, as the cache itself counts: one more token takes a page of 64 in the window.
    cache = allocate_layer_cache(config.cache_config(), 1, 700)
    rows = jnp.zeros((1, CONTEXT + 1, 2, 32), jnp.bfloat16)
    cache = append_rows(cache, hadamard_rotation(2, 32), rows, rows, jnp.asarray([CONTEXT + 1]))
    size = stepper.method_bytes(methods[1], CONTEXT + 1, config, LAYERS)["quantized_layers"]
    assert size == 2 * live_bytes(cache)["total"]


def test_report_carries_what_the_numbers_mean(tiny: tuple, result: tuple, tmp_path: Path) -> None:
    config = tiny[1]
    methods, found = result
    about = evaluation_job.about_this_run(
        config, "float32", context=CONTEXT, chunk=64, every=3, sink_tokens=64, recent_tokens=256,
        quantized_layers=list(LAYERS), rotations=None, history=evaluation_job.HISTORY,
        int2_share=evaluation_job.int2_share(found.positions, config.cache_config()),
    )  # fmt: skip
    document = evaluation_report.evaluation_document([found, found], methods, about)
    evaluation_report.save_evaluation(document, tmp_path)
    stored = json.loads((tmp_path / "evaluation.json").read_text())
    assert [row["method"] for row in stored["methods"]] == [method.name for method in methods]
    for row in stored["methods"]:
        for name in ("bits_per_element", "perplexity", "kl_mean", "kl_median", "kl_p99", "top1"):
            assert isinstance(row[name], float)
        assert len(row["curve"]["kl"]) == len(row["curve"]["positions"]) == evaluation_report.CURVE_BINS
        assert min(row["curve"]["kl"]) <= row["kl_mean"] <= max(row["curve"]["kl"])
    # Pooling a text with itself changes nothing.
    one, two = stored["texts"][0]["methods"][1], stored["methods"][1]
    assert one["kl_mean"] == pytest.approx(two["kl_mean"]) and one["perplexity"] == pytest.approx(
        two["perplexity"]
    )
    assert stored["texts"][0]["positions"] == {"first": 384, "last": 573, "count": len(found.positions)}
    table = (tmp_path / "evaluation.md").read_text()
    assert "History read at decode granularity" in table and "26 % of the tokens read" in table
    assert "2 of 2 layers (0, 1)" in table and "| naive | 3 |" in table and "0" * 16 in table
    assert (tmp_path / "evaluation.png").stat().st_size > 0 and (tmp_path / "layers.png").stat().st_size > 0


def test_refusals_name_their_cause(tiny: tuple) -> None:
    config = tiny[1]
    fitted, statistics = rotation_set(config), {0: random_statistics()}

    def resolve(name: str, rotations: Any = fitted, found: Any = statistics) -> None:
        evaluation_methods.resolve_methods([name], config, LAYERS, rotations, found)

    for call, error, message in (
        (lambda: resolve("int3"), ConfigError, "unknown method 'int3'"),
        (lambda: resolve("int2:best"), ConfigError, "basis 'best'"),
        (lambda: resolve("int2:oscar@x"), ConfigError, "with numbers"),
        (lambda: resolve("int2:oscar@0.1@1.6@3"), ConfigError, "with numbers"),
        (lambda: resolve("int2:oscar@nan"), ConfigError, "damping = nan"),
        (lambda: resolve("int2:oscar@2"), ConfigError, "damping = 2.0"),
        (lambda: resolve("int2:oscar@0.1@inf"), ConfigError, "alpha = inf"),
        (lambda: resolve("int2:oscar@0.1@2"), ConfigError, "alpha = 2.0"),
        (lambda: resolve("int2", None), ConfigError, "needs --rotations"),
        (lambda: resolve("published", fitted, None), ConfigError, "statistics.safetensors"),
        (lambda: resolve("published"), ConfigError, "lack layer 1"),
        (
            lambda: resolve("int2", rotation_set(config, model_id="x")),
            CheckpointError,
            "are of model 'x', this is",
        ),
        (lambda: resolve("int2", rotation_set(config, head_dim=64)), CheckpointError, "head_dim = 64"),
        (lambda: resolve("int2", rotation_set(config, layers=(1,))), CheckpointError, "have no layer 0"),
        (lambda: evaluation_job.check_evaluation(0, 64, 1, config), ConfigError, "context = 0"),
        (lambda: evaluation_job.check_evaluation(5000, 64, 1, config), ConfigError, "4096 positions"),
        (lambda: evaluation_job.check_evaluation(600, 65, 1, config), ConfigError, "chunk = 65"),
        (
            lambda: evaluation_job.with_bos(stream_of(np.zeros(3, np.int32)), 9, config),
            TextError,
            "has 4 tokens",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_calibration_text_is_recognized(tiny: tuple) -> None:
    fitted = rotation_set(tiny[1], extra={"document_digests": ["a", "b"]})
    assert evaluation_job.is_calibration_text(stream_of(np.zeros(1, np.int32), ("c", "b")), fitted)
    assert not evaluation_job.is_calibration_text(stream_of(np.zeros(1, np.int32), ("c",)), fitted)


def test_the_share_read_from_int2_is_counted_and_a_small_one_warned_of(tiny: tuple) -> None:
    geometry = tiny[1].cache_config()
    assert evaluation_job.int2_share(np.asarray([639]), geometry) == 320 / 640
    assert evaluation_job.int2_share(np.asarray([383, 319]), geometry) == (64 / 384 + 0) / 2


def test_a_method_has_one_colour_everywhere() -> None:
    known = list(plots.COLORS.values())
    assert len(set(known)) == len(known) and not set(known) & set(plots.OTHER_COLORS)
    assert plots.method_color("int2") == "tab:blue"
    assert plots.method_color("int2:oscar@0.3") == plots.method_color("int2:oscar@0.3") in plots.OTHER_COLORS


def test_methods_that_do_not_fit_together_walk_one_after_the_other(
    tiny: tuple, result: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same figures, every group with its own BF16 row, and a bar that still ends at the whole."""
    methods, whole = result
    assert evaluation_job.split_methods(methods, 1) == [methods]
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 1000, "bytes_in_use": 200})
    with monkeypatch.context() as patch:
        patch.setattr(evaluation_job.jax, "devices", lambda: [device])
        names = [[m.name for m in group] for group in evaluation_job.split_methods(methods, 130)]
        assert names == [["bf16", "int2", "int2:balanced@0.1@1.6"], ["bf16", "published", "hadamard"],
                         ["bf16", "naive", "kivi"]]  # fmt: skip
        assert evaluation_job.split_methods(methods[:1], 10**6) == [methods[:1]]
        assert [len(group) for group in evaluation_job.split_methods(methods, 10**6)] == [2] * 6
    groups = [[methods[0], methods[1]], [methods[0], *methods[2:]]]
    monkeypatch.setattr(evaluation_job, "split_methods", lambda *_: groups)
    done: list[int] = []
    split = evaluation_job.evaluate_stream(
        tiny[3], methods, whole.stream, whole.stream.tokens, LAYERS, chunk=192, every=3, on_chunk=done.append
    )
    assert sum(done) == CONTEXT
    for method in methods:
        np.testing.assert_allclose(split.kl[method.name], whole.kl[method.name], atol=1e-3)
        assert split.cache_bytes[method.name] == whole.cache_bytes[method.name]
    assert split.layer_errors.keys() == whole.layer_errors.keys()
