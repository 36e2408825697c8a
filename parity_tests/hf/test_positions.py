"""Positions in transformers models: the share of INT2 pages in what queries read, and RoPE's pairs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.hf import positions  # noqa: E402
from parity_tests.hf.tiny import SMALL, make_model  # noqa: E402

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("sinks", [False, True])
def test_coded_share_is_that_of_the_jax_twin(window, sinks):
    """At the sampled positions; JAX measures all of them on its way through blocks of keys."""
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from oscar_jax.core.config import CacheConfig as JaxCacheConfig
    from oscar_jax.evaluation import blockwise

    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((540, heads, 16)).astype(np.float32) for heads in (4, 2))
    key = key.astype(jnp.bfloat16).astype(np.float32)  # stored rows are bf16
    logits = rng.standard_normal(4).astype(np.float32) if sinks else None
    geometry = JaxCacheConfig(2, 4, 16)
    rows = blockwise.allocate_rows(geometry, 1, 540, restored=False)
    stored = jnp.asarray(key)[None]
    rows = blockwise.write_rows(rows, 0, stored, stored, None)
    part = blockwise.attend_rows(
        jnp.asarray(query)[None], rows, jnp.arange(540), 540, config=geometry, softmax_scale=0.25,
        sliding_window=window, measure_coded=True,
    )  # fmt: skip
    want = np.asarray(blockwise.coded_share(part, None if logits is None else jnp.asarray(logits)))[0]
    found = positions.coded_share(
        torch.from_numpy(query), torch.from_numpy(key), CacheConfig(2, 4, 16), 0.25, sliding_window=window,
        sink_logits=None if logits is None else torch.from_numpy(logits),
    )  # fmt: skip
    sampled = np.arange(383, 540, positions.EVERY)
    np.testing.assert_allclose(found.numpy()[sampled], want[sampled], rtol=1e-4, atol=1e-6)
    assert (want[sampled].max() > 0.1) or window is not None
    assert not found.numpy()[np.setdiff1d(np.arange(540), sampled)].any()


def rope(model, layer):
    """Frequencies and pairing of a layer that shows them."""
    frequencies, interleaved = positions.layer_rope(model, layer)
    assert frequencies is not None
    return frequencies, interleaved


def test_rope_of_every_kind():
    """Pairs and frequencies as the model's own forward pass uses them."""
    half = 1e4 ** (-np.arange(8) / 8)
    frequencies, interleaved = rope(make_model("llama"), 0)
    np.testing.assert_allclose(frequencies, half, rtol=1e-6)
    assert interleaved is False
    frequencies, interleaved = rope(make_model("gpt_oss"), 0)  # halves in a function of its own
    assert len(frequencies) == 8 and interleaved is False
    gemma = make_model("gemma3")
    local, whole = (
        next(i for i, kind in enumerate(gemma.config.layer_types) if kind == name)
        for name in ("sliding_attention", "full_attention")
    )
    theta = {name: gemma.config.rope_parameters[name]["rope_theta"] for name in gemma.config.layer_types}
    for layer, kind in ((local, "sliding_attention"), (whole, "full_attention")):
        frequencies, interleaved = rope(gemma, layer)
        np.testing.assert_allclose(frequencies, theta[kind] ** (-np.arange(8) / 8), rtol=1e-6)
        assert interleaved is False
    glm = tf.Glm4ForCausalLM(tf.Glm4Config(**{**SMALL, "head_dim": 16, "partial_rotary_factor": 0.5}))
    frequencies, interleaved = rope(glm, 0)
    assert len(frequencies) == 4 and interleaved is True
    smol = tf.SmolLM3Config(**SMALL, no_rope_layers=[1, 0] + [1] * (SMALL["num_hidden_layers"] - 2))
    frequencies, _ = rope(tf.SmolLM3ForCausalLM(smol), 1)
    assert frequencies.shape == (0,)
