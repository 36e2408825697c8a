"""The "oscar" attention where no OscarCache is: exactly sdpa; and whose caches it refuses there."""

import copy
import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.hf import attention as hf_attention  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    MODELS,
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


def pair(family, **changes):
    """The same model twice: attending by sdpa and by "oscar"."""
    return make_model(family, "sdpa", **changes), make_model(family, **changes)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_a_plain_forward_equals_sdpa(family, use_cache):
    """Perplexity and the like: padded or not, every bit of the logits."""
    ids, mask = left_padded(prompts(70, 45))
    sdpa, model = pair(family)
    for options in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
        expected, found = (m(**options, use_cache=use_cache).logits for m in (sdpa, model))
        assert torch.equal(found, expected)


def test_gradients_and_training_equal_sdpa():
    """Fine-tuning goes through the same attention, dropout aside."""
    (ids,) = prompts(40)
    gradients = []
    for model in pair("llama"):
        model.train()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_packed_sequences_equal_sdpa():
    """Several texts in one row, told apart by their positions: a mask that the cache would refuse."""
    (ids,) = prompts(40)
    positions = torch.cat([torch.arange(25), torch.arange(15)])[None]
    expected, found = (m(ids, position_ids=positions, use_cache=False).logits for m in pair("llama"))
    assert torch.equal(found, expected)


def test_soft_caps_are_not_lost():
    """transformers' sdpa caps no scores: the model's eager attention is the oracle, gradients included."""
    ids, mask = left_padded(prompts(70, 45))
    found = []
    for attention in ("eager", "oscar"):
        model = make_model("gemma2", attention)
        out = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        out.square().mean().backward()
        found.append((out.detach(), model.model.layers[0].self_attn.q_proj.weight.grad))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
def test_attention_sinks_are_not_lost(padded):
    """transformers' sdpa knows no sink logits: here the model's eager attention is the oracle."""
    ids, mask = left_padded(prompts(70, 45 if padded else 70))
    eager, model = make_model("gpt_oss", "eager"), make_model("gpt_oss")
    with torch.no_grad():
        expected, found = (m(ids, attention_mask=mask).logits for m in (eager, model))
    kept = mask.bool()
    torch.testing.assert_close(found[kept], expected[kept], **TOLERANCE)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-30.0)
    with torch.no_grad():
        without = model(ids, attention_mask=mask).logits
    assert (without - expected)[kept].abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generating_without_an_oscar_cache_equals_sdpa(family, caplog, monkeypatch):
    """Exact, but said once: a forgotten OscarCache looks like this."""
    monkeypatch.setattr(hf_attention, "_told", set())
    ids, mask = left_padded(prompts(70, 45))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    sdpa, model = pair(family)
    with caplog.at_level(logging.WARNING, logger=hf_attention.__name__):
        found = model.generate(ids, **options)
    assert torch.equal(found, sdpa.generate(ids, **options))
    assert [r.name for r in caplog.records if "nothing is quantized" in r.message] == [hf_attention.__name__]
    assert torch.equal(model.generate(ids, use_cache=False, **options), found)


def test_guidance_equals_the_dense_cache():
    """The second pass of guidance has a cache of its own, made by the model."""
    ids, negative = prompts(60, 20)
    dense, model = pair("llama")
    options = {"guidance_scale": 1.7, "negative_prompt_ids": negative}
    expected = generate(dense, ids, RoundingCache(config=dense.config), **options)
    found = generate(model, ids, make_cache(model), **options)
    assert torch.equal(found.sequences, expected.sequences)
    plain = generate(model, ids, make_cache(model))
    assert not torch.equal(found.sequences, plain.sequences)  # guidance does something here


def test_draft_models_and_early_exit_give_greedys_tokens():
    """Drafts attend over caches that `generate` makes; the config is as before."""
    (ids,) = prompts(60)
    model = make_model("llama")
    before = copy.deepcopy(model.config.to_dict())
    expected = generate(model, ids, make_cache(model), 20).sequences
    assistant = make_model("llama", num_hidden_layers=1)
    for options in ({"assistant_model": assistant}, {"assistant_early_exit": 1}):
        found = generate(model, ids, make_cache(model), 20, output_logits=False, **options).sequences
        assert torch.equal(found, expected)
        assert model.config.to_dict() == before


def test_a_failed_generate_leaves_the_config_as_it_was():
    ids, more = prompts(60, 20)
    model = make_model("llama")
    before = copy.deepcopy(model.config.to_dict())
    for options in ({}, {"assistant_early_exit": 1}, {"num_beams": 2}, {"guidance_scale": 2.0}):
        cache = make_cache(model, max_length=62)
        with pytest.raises(ValueError):
            generate(model, ids, cache, 20, output_logits=False, **options)
        assert model.config.to_dict() == before
    model.generate(torch.cat([ids, more], 1), max_new_tokens=2)


def test_image_inputs():
    """A vision tower attends by itself; with {"text_config": "oscar"} or with "oscar" for the whole model."""
    text = tf.LlamaConfig(**SMALL)
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28,
        patch_size=14,
    )  # fmt: skip
    config = tf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=96, image_seq_length=4)
    torch.manual_seed(1)
    base = tf.LlavaForConditionalGeneration(config).eval()
    (ids,) = prompts(60)
    ids = ids.clamp(max=95)
    ids[:, 5:9] = 96
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    results = []
    for attention in ("sdpa", {"text_config": "oscar"}, "oscar"):
        model = copy.deepcopy(base)
        model.set_attn_implementation(attention)
        if attention == "sdpa":
            cache = RoundingCache(config=model.config.get_text_config())
        else:
            cache = hf_cache.OscarCache(make_rotations(text), model.config)
        results.append(generate(model, ids, cache, pixel_values=pixels).sequences)
    assert torch.equal(results[1], results[0]) and torch.equal(results[2], results[0])


def test_foreign_caches_are_refused_by_their_class():
    (ids,) = prompts(40)
    model = make_model("llama")
    for cache in (RoundingCache(config=model.config), tf.StaticCache(config=model.config, max_cache_len=64)):
        with pytest.raises(
            ConfigError, match=rf"cache of class {type(cache).__name__}, allowed: .*OscarCache"
        ):
            generate(model, ids, cache, 2)
        with pytest.raises(ConfigError, match="cache of class"):
            model(ids, use_cache=True, **with_cache(model, cache))


def test_what_an_interrupted_step_announced_is_not_taken_for_the_next():
    """Keys announced, attention never reached: a plain forward afterwards is still sdpa's."""
    (ids,) = prompts(40)
    sdpa, model = pair("llama")
    cache = make_cache(model)
    cache.update(torch.zeros(1, 2, 40, 16), torch.zeros(1, 2, 40, 16), 0)
    assert torch.equal(model(ids, use_cache=False).logits, sdpa(ids, use_cache=False).logits)


def test_keys_changed_after_the_cache_are_refused():
    model = make_model("llama")
    cache = make_cache(model)
    key, value = cache.update(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16), 0)
    attention: Any = hf_attention.oscar_attention
    with pytest.raises(ConfigError, match=r"layer 0 stores keys .* attention got others"):
        attention(model.model.layers[0].self_attn, key, key * 2, value, None)
