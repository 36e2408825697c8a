"""What is refused: by name, in one line, before anything is allocated."""

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core.errors import CheckpointError, ConfigError, OscarError, ShapeError  # noqa: E402
from oscar_torch.core.rotation_header import FINGERPRINT_FIELD  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
from oscar_torch.hf.fingerprint import model_fingerprint  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    SMALL,
    generate,
    make_cache,
    make_model,
    make_rotations,
    prompts,
    with_cache,
)

pytestmark = pytest.mark.hf


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tf.T5Config(), "encoder-decoder"),
        (tf.DeepseekV3Config(), "kv_lora_rank = 512"),
        (tf.JambaConfig(), "layer 0 is '(linear_attention|mamba)'"),
        (tf.Gemma3nTextConfig(), "share another layer's keys and values"),
        (tf.Llama4TextConfig(), "layer 0 is 'chunked_attention'"),
        (tf.models.mllama.MllamaTextConfig(), r"cross-attention in layers \[3, 8"),
        (tf.LlamaConfig(**SMALL, head_dim=24), "head_dim = 24"),
    ],
)
def test_models_that_cannot_be_served_are_refused(config, message):
    """[7, 8, 9, 12, 30]"""
    rotations = make_rotations(tf.LlamaConfig(**SMALL))
    with pytest.raises(ConfigError, match=message) as error:
        hf_cache.OscarCache(rotations, config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_query_heads": 8}, "num_query_heads = 8, the model 'some/Model-4B' has 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4, the model 'some/Model-4B' has 2"),
        ({"head_dim": 32}, "head_dim = 32, the model 'some/Model-4B' has 16"),
        ({"layers": (0,)}, "no layer 1"),
        ({"model_id": "other/Model-8B"}, "of model 'other/Model-8B', this is 'some/Model-4B'"),
    ],
)
def test_rotations_of_another_model_are_refused(changes, message):
    """[16]"""
    config = tf.LlamaConfig(**SMALL)
    config._name_or_path = "some/Model-4B"
    with pytest.raises(CheckpointError, match=message):
        hf_cache.OscarCache(make_rotations(config, **({"model_id": "some/Model-4B"} | changes)), config)
    hf_cache.OscarCache(make_rotations(config, model_id="a-copy/model-4b"), config)
    hf_cache.OscarCache(make_rotations(config, model_id="x"), config, model_id="x")


def test_the_fingerprint_decides_whose_rotations_these_are():
    """[16] Renamed weights are accepted, other weights under the same name are not; a name overrides."""
    model, other = make_model("llama"), make_model("llama")
    torch.nn.init.normal_(other.model.layers[0].self_attn.k_proj.weight)
    extra = {FINGERPRINT_FIELD: model_fingerprint(model)}
    rotations = make_rotations(model.config, model_id="some/name", extra=extra)
    for each in (model, other):
        each.config._name_or_path = "other/renamed" if each is model else "some/name"
    hf_cache.OscarCache(rotations, model)
    with pytest.raises(CheckpointError, match="made for other weights") as error:
        hf_cache.OscarCache(rotations, other)
    assert "\n" not in str(error.value)
    hf_cache.OscarCache(rotations, other, model_id="some/name")
    with pytest.raises(CheckpointError, match="'other/renamed'"):
        hf_cache.OscarCache(rotations, model.config)  # a config has no weights, the name is all there is


def test_a_config_without_weights_is_mentioned_once(caplog):
    """49: the log says where only names were compared; not where nothing more is known or a name is given."""
    model = make_model("llama")
    hf_cache._say_that_weights_are_unknown.cache_clear()
    known = make_rotations(model.config, extra={FINGERPRINT_FIELD: model_fingerprint(model)})
    hf_cache.OscarCache(make_rotations(model.config), model.config)
    hf_cache.OscarCache(known, model.config, model_id=known.header.model_id)
    hf_cache.OscarCache(known, model)
    assert not caplog.records
    for _ in range(2):
        hf_cache.OscarCache(known, model.config)
    (said,) = caplog.messages
    assert "is not checked" in said and "OscarCache(rotations, model)" in said


def test_a_kernel_named_for_capped_scores_is_refused():
    model = make_model("gemma2")
    with pytest.raises(NotImplementedError, match=r"implementation = 'triton' with softcap = 0\.5: no"):
        make_cache(model, implementation="triton")
    with pytest.raises(ConfigError, match="implementation = 'cuda'"):
        make_cache(model, implementation="cuda")


def test_misuse_is_refused():
    (ids,) = prompts(10)
    model = make_model("llama")
    cache = make_cache(model)
    generate(model, ids, cache, 2)
    with pytest.raises(ShapeError, match="a batch of 2 for a cache of 1"):
        model(ids.expand(2, -1), use_cache=True, **with_cache(model, cache))
    with pytest.raises(ShapeError, match="mask of 4 columns, expected 15"):
        short_mask = torch.ones(1, 4)
        model(ids[:, :4], attention_mask=short_mask, use_cache=True, **with_cache(model, cache))
    with pytest.raises(ShapeError, match="attention mask"):
        mask = torch.zeros(1, 1, 4, 15)
        model(ids[:, :4], attention_mask=mask, use_cache=True, **with_cache(model, cache))
    assert cache.get_seq_length() == 11 and cache.layers[0].lengths == [11]
    with pytest.raises(ConfigError, match=r"model\.training = True"):
        model.train()
        model(ids, use_cache=True, **with_cache(model, make_cache(model)))
    model.eval()
    model.set_attn_implementation("sdpa")
    with pytest.raises(
        ConfigError, match="attn_implementation = 'sdpa', allowed with an OscarCache: 'oscar'"
    ):
        generate(model, ids, make_cache(model), 2)
    for options in ({"prefill_chunk": 100}, {"max_length": 0}, {"recent_tokens": 100}):
        with pytest.raises(ConfigError):
            make_cache(model, **options)
    with pytest.raises(OscarError, match="offloading"):
        cache.offload(0, only_non_sliding=False)
