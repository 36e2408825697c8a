"""Models whose layers differ in their heads, and models that leave the sliding window to the mask."""

import copy

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.core.window_policy import EVERY_LAYER_INT2  # noqa: E402
from oscar_torch.hf.cache import OscarCache  # noqa: E402
from oscar_torch.hf.model_check import cache_config, layer_geometries  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    FAMILIES,
    SLIDING,
    SMALL,
    TOLERANCE,
    RoundingCache,
    generate,
    left_padded,
    make_cache,
    make_model,
    make_rotations,
    prompts,
    with_cache,
)

pytestmark = pytest.mark.hf

EXPERTS = {"num_experts_per_tok": 2}
OTHERS = {
    # rings of 2 heads x 16, pages of 1 head x 32; no embedding per layer
    "gemma4": (
        tf.Gemma4TextConfig,
        tf.Gemma4ForCausalLM,
        {
            **SLIDING,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 97,
        },
    ),
    # one key for all queries, in one projection with them
    "gpt_bigcode": (tf.GPTBigCodeConfig, tf.GPTBigCodeForCausalLM, {"num_key_value_heads": 1}),
    # their attention calls name no window
    "phimoe": (
        tf.PhimoeConfig,
        tf.PhimoeForCausalLM,
        {**EXPERTS, "num_local_experts": 4, "sliding_window": 32},
    ),
    "qwen2_moe": (
        tf.Qwen2MoeConfig,
        tf.Qwen2MoeForCausalLM,
        {
            **EXPERTS,
            **SLIDING,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "use_sliding_window": True,
        },
    ),
}


@pytest.fixture(autouse=True)
def others(monkeypatch):
    for name, entry in OTHERS.items():
        monkeypatch.setitem(FAMILIES, name, entry)


@pytest.mark.parametrize("family", list(OTHERS))
@pytest.mark.parametrize("padded", [False, True])
def test_short_sequences_equal_the_dense_cache(family, padded):
    """Past the window, not past the pages: the tokens and logits of eager attention over bf16 rows."""
    ids, mask = left_padded(prompts(70, 45 if padded else 70))
    dense, model = make_model(family, "eager"), make_model(family)
    cache = make_cache(model)
    expected, found = (
        generate(m, ids, c, 8, attention_mask=mask)
        for m, c in ((dense, RoundingCache(config=dense.config)), (model, cache))
    )
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **TOLERANCE)
    assert cache.layers[0].sliding_window == getattr(model.config, "sliding_window", None)


def test_the_window_is_seen():
    """Without it the same model says something else: the comparison above can fail."""
    (ids,) = prompts(70)
    with torch.no_grad():
        near, far = (make_model("phimoe", sliding_window=window)(ids).logits for window in (32, None))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(near, far, **TOLERANCE)


def test_every_layer_has_its_own_heads():
    """A ring has its layer's heads, pages have those that the rotations are for."""
    model = make_model("gemma4")
    first, second = layer_geometries(model.config)
    assert (first.num_key_value_heads, first.head_dim) == (2, 16)
    assert (second.num_key_value_heads, second.head_dim) == (1, 32) and second == cache_config(model.config)
    (ids,) = prompts(420)
    cache = OscarCache(make_rotations(model.config, layers=(1,)), model.config)
    with torch.no_grad():
        model(ids, use_cache=True, **with_cache(model, cache))
    assert cache.layers[0].store.key.shape[2:] == (2, 16)
    assert cache.layers[1].store.key_codes.shape[1] == 1 and cache.layers[1].store.history_pages.tolist() == [
        1
    ]


def test_pages_of_several_geometries_are_refused():
    """A rotation set has one; the message names the layer and both."""
    model = make_model("gemma4")
    rotations = make_rotations(model.config, layers=(0, 1))
    with pytest.raises(ConfigError, match=r"layer 0 has 2 key/value heads of 16 .* 1 key/value heads of 32"):
        OscarCache(rotations, model.config, window_policy=EVERY_LAYER_INT2)


def test_a_window_that_the_model_does_not_apply_is_refused():
    """Moshi's configuration names one, its masks have none: beyond it a ring would forget what is read."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = tf.MoshiConfig(**sizes, head_dim=16, ffn_dim=128, vocab_size=97, sliding_window=70)
    model = tf.MoshiForCausalLM._from_config(config, attn_implementation="eager").eval()
    (ids,) = prompts(71)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("oscar")
        cache = OscarCache(make_rotations(model.config), model.config)
        found = model(ids[:, :70], use_cache=True, **with_cache(model, cache)).logits
        torch.testing.assert_close(found, expected[:, :70], **TOLERANCE)
        with pytest.raises(
            ConfigError, match=r"71 columns with sliding_window = 70 .* allowed: up to 70 columns"
        ):
            model(ids[:, 70:], use_cache=True, **with_cache(model, cache))
    assert cache.get_seq_length() == 70


def test_a_window_that_only_the_masks_have_is_refused():
    """A cache whose configuration names no window would read what the model's masks hide."""
    config_class, model_class, options = OTHERS["phimoe"]
    torch.manual_seed(1)
    model = model_class(config_class(**{**SMALL, **options})).eval()
    (ids,) = prompts(33)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("oscar")
        config = copy.deepcopy(model.config)
        config.sliding_window = None
        cache = OscarCache(make_rotations(config), config)
        found = model(ids[:, :32], use_cache=True, **with_cache(model, cache)).logits
        torch.testing.assert_close(found, expected[:, :32], **TOLERANCE)
        with pytest.raises(
            ConfigError,
            match=r"33 columns with sliding_window = None .*, \[32\] in the masks, allowed: up to 32",
        ):
            model(ids[:, 32:], use_cache=True, **with_cache(model, cache))
    assert cache.get_seq_length() == 32


HEADS = [
    (tf.FalconConfig, {}, 1),
    (tf.FalconConfig, {"multi_query": False}, 4),
    (tf.FalconConfig, {"multi_query": False, "num_kv_heads": 2}, 2),
    (tf.FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2}, 4),
    (tf.GPTBigCodeConfig, {}, 1),
    (tf.GPTBigCodeConfig, {"multi_query": False}, 4),
    (tf.LlamaConfig, {"num_key_value_heads": 2}, 2),
    (tf.GPT2Config, {}, 4),
]


@pytest.mark.parametrize(("config_class", "options", "heads"), HEADS)
def test_every_key_that_says_the_heads_of_keys(config_class, options, heads):
    config = config_class(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, **options)
    assert cache_config(config).num_key_value_heads == heads


def test_values_of_another_size_are_refused():
    config = tf.LlamaConfig(**SMALL)
    config.v_head_dim = 32
    with pytest.raises(ConfigError, match=r"values of 32 channels \(v_head_dim\) beside keys of 16"):
        OscarCache(make_rotations(tf.LlamaConfig(**SMALL)), config)


def test_attention_outside_the_interface_is_refused():
    """A model that attends by itself would do so over the new keys alone: noticed at its second layer."""
    model = make_model("llama")
    cache = make_cache(model)
    key = torch.zeros(1, 2, 5, 16)
    cache.update(key, key, 0)
    with pytest.raises(ConfigError, match="attention of layer 0 did not go through"):
        cache.update(key, key, 1)
    assert cache.get_seq_length() == 0
    generate(model, prompts(5)[0], cache, 2)
    assert cache.get_seq_length() == 6
