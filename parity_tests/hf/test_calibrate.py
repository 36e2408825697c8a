"""Attention statistics of transformers models against their definitions and the JAX twin."""

import copy
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.calibration import covariance  # noqa: E402
from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
from oscar_torch.hf import calibrate  # noqa: E402
from oscar_torch.rotations import statistics as statistics_file  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    generate,
    make_model,
    make_rotations,
    prompts,
)

pytestmark = pytest.mark.hf


def float64_statistics(rows, metric, skip):
    """The definitions of covariance.py, written out per head for a list of sequences (q, k, v, o)."""
    heads = rows[0][1].shape[1]
    group = rows[0][0].shape[1] // heads
    result = {}
    for head in range(heads):
        part = slice(head * group, (head + 1) * group)
        q = np.concatenate([r[0][:, part].reshape(-1, r[0].shape[-1]) for r in rows])
        o = np.concatenate([r[3][:, part].reshape(-1, r[0].shape[-1]) for r in rows])
        pages = np.concatenate(
            [r[1][skip : len(r[1]) // 64 * 64, head].reshape(-1, 64, q.shape[-1]) for r in rows]
        )
        centered = (pages - pages.mean(axis=1, keepdims=True)).reshape(-1, q.shape[-1])
        k, v = (np.concatenate([r[i][skip:, head] for r in rows]) for i in (1, 2))
        # The first fifth of the sequences (one, here) sets the metric and is not weighed by it.
        kw, vw = (np.concatenate([r[i][skip:, head] for r in rows[1:]]) for i in (1, 2))
        weight = np.einsum("td,de,te->t", kw, metric[head], kw)
        for name, value in {
            "query_covariance": q.T @ q / len(q),
            "exact_value_covariance": o.T @ o / len(o),
            "key_covariance": centered.T @ centered / len(centered),
            "key_mean": k.mean(axis=0),
            "value_mean": v.mean(axis=0),
            "value_covariance": np.cov(v.T, bias=True),
            "surrogate_value_covariance": np.einsum("t,td,te->de", weight, vw, vw) / weight.sum(),
        }.items():
            result.setdefault(name, []).append(value)
    return {name: np.stack(value) for name, value in result.items()}


def test_calibration_equals_float64(monkeypatch, tmp_path):
    """[20] Statistics of what the attention layers really saw; the model is left as it was."""
    seen = {}
    update = covariance.update_statistics

    def recorded(state, *rows):
        seen.setdefault(id(state), []).append([r.double().numpy() for r in rows])
        return update(state, *rows)

    monkeypatch.setattr(covariance, "update_statistics", recorded)
    model = make_model("llama", "sdpa")
    before = copy.deepcopy(model.config.to_dict())
    batches = [torch.cat(prompts(230, 230)), prompts(150)[0][0]]
    statistics = calibrate.calibrate_model(model, batches)
    assert model.config.to_dict() == before and model.config._attn_implementation == "sdpa"
    assert list(statistics) == [0, 1] and len(seen) == 2
    for entry, rows in zip(statistics.values(), seen.values()):
        first = rows[0][0]
        grouped = first.reshape(len(first), 2, 2, 16).transpose(1, 0, 2, 3).reshape(2, -1, 16)
        metric = np.einsum("krd,kre->kde", grouped, grouped) / grouped.shape[1]
        assert entry.tokens == 2 * (230 - 64) + 150 - 64
        for name, expected in float64_statistics(rows, metric, 64).items():
            np.testing.assert_allclose(getattr(entry, name), expected, rtol=1e-9, atol=1e-12, err_msg=name)
    # The rows are the model's own: its dense attention reproduces the outputs.
    q, k, v, o = next(iter(seen.values()))[0][:4]
    scores = np.einsum("tkgd,skd->kgts", q.reshape(-1, 2, 2, 16), k) / 4
    scores[..., np.triu(np.ones((230, 230), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    dense = np.einsum("kgts,skd->tkgd", weights / weights.sum(-1, keepdims=True), v).reshape(o.shape)
    # Up to the rounding of keys and values to BF16: the model attends to the rows it has.
    assert np.linalg.norm(o - dense) < 0.01 * np.linalg.norm(dense)

    path = tmp_path / "statistics.safetensors"
    statistics_file.save_statistics(statistics, path)
    with pytest.raises(ConfigError, match="token_batches is empty"):
        calibrate.calibrate_model(model, [])


def test_from_transformers_to_a_fitted_cache(tmp_path):
    """Statistics gathered here, fitted by oscar_jax, applied here: the whole road, through files."""
    pytest.importorskip("jax")
    from oscar_jax.core import rotation_header as jax_rotation_header
    from oscar_jax.rotations import fit as jax_fit
    from oscar_jax.rotations import rotation as jax_rotation
    from oscar_jax.rotations import statistics as jax_statistics
    from oscar_jax.rotations import store as jax_checkpoint

    model = make_model("qwen3")
    statistics = calibrate.calibrate_model(model, prompts(320, 320, 200))
    statistics_file.save_statistics(statistics, tmp_path / "statistics.safetensors")
    loaded = jax_statistics.load_statistics(tmp_path / "statistics.safetensors")
    header = make_rotations(model.config).header
    fitted = jax_rotation.RotationSet(
        jax_rotation_header.RotationHeader(**vars(header)),
        {i: jax_fit.fit_layer_rotation(s, "channel_balanced", per_head=True, damping=0.01)
         for i, s in loaded.items()},
    )  # fmt: skip
    jax_checkpoint.save_safetensors(fitted, tmp_path / "rotations.safetensors")
    (ids,) = prompts(400)
    cache = hf_cache.OscarCache(tmp_path / "rotations.safetensors", model.config)
    assert generate(model, ids, cache, 3).sequences.shape == (1, 403)
    assert cache.layers[0].store.history_pages.tolist() == [1]


def test_statistics_are_those_of_the_jax_twin():
    pytest.importorskip("jax")
    from oscar_jax.calibration import covariance as jax_covariance

    generator = np.random.default_rng(0)
    rows = [generator.standard_normal((300, n, 32)).astype(np.float32) for n in (6, 2, 2, 6)]
    rows.append(generator.random((300, 6)).astype(np.float32))
    results = []
    for package, convert in ((covariance, torch.from_numpy), (jax_covariance, np.asarray)):
        halves = [[convert(r[start : start + 150]) for r in rows] for start in (0, 150)]
        metric = package.init_statistics(2, 32)
        metric = package.fix_surrogate_metric(package.update_statistics(metric, *halves[0]))
        state, other = (
            dataclasses.replace(
                package.init_statistics(2, 32, skip_tokens=64), surrogate_metric=metric.surrogate_metric
            )
            for _ in range(2)
        )
        for half in halves:
            state = package.update_statistics(state, *half)
        other = package.update_statistics(package.start_sequence(other, 64), *halves[1])
        results.append(package.finalize_statistics(package.merge_statistics(state, other)))
    assert results[0].tokens == results[1].tokens == 300 - 64 + 150
    for name, value in vars(results[0]).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, getattr(results[1], name), rtol=2e-5, atol=2e-6, err_msg=name)
