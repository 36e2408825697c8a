"""Models with linear attention in some layers: pages beside transformers' own states."""

import copy

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.hf.cache import OscarCache  # noqa: E402
from oscar_torch.hf.calibrate import calibrate_model  # noqa: E402
from oscar_torch.hf.recurrent import RecurrentLayer  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    FAMILIES,
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

LINEAR = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRIDS = {
    "qwen3_5": (tf.Qwen3_5TextConfig, tf.Qwen3_5ForCausalLM, LINEAR),
    "qwen3_next": (
        tf.Qwen3NextConfig,
        tf.Qwen3NextForCausalLM,
        {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 32},
    ),
}


@pytest.fixture(autouse=True)
def hybrids(monkeypatch):
    for name, entry in HYBRIDS.items():
        monkeypatch.setitem(FAMILIES, name, entry)


def make_hybrid_cache(model, **options):
    return OscarCache(make_rotations(model.config, layers=(1,)), model.config, **options)


@pytest.mark.parametrize("family", list(HYBRIDS))
def test_short_sequences_equal_the_dense_cache(family):
    """A padded batch whose shorter prompt starts inside a page, then a second turn: eager's own tokens."""
    ids, mask = left_padded(prompts(70, 45))
    dense, model = make_model(family, "eager"), make_model(family)
    caches = RoundingCache(config=dense.config), make_hybrid_cache(model)
    expected, found = (
        generate(m, ids, cache, 6, attention_mask=mask) for m, cache in zip((dense, model), caches)
    )
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **TOLERANCE)
    more = torch.cat([found.sequences, torch.cat(prompts(9, 9, seed=3))], dim=1)
    mask = torch.cat([mask, mask.new_ones(2, more.shape[1] - mask.shape[1])], dim=1)
    expected, found = (
        generate(m, more, cache, 4, attention_mask=mask) for m, cache in zip((dense, model), caches)
    )
    assert torch.equal(found.sequences, expected.sequences)


def test_long_sequences_have_pages_in_attention_layers_alone():
    """Past the windows: pages are read, and beams and copies carry the states along."""
    (ids,) = prompts(420)
    model = make_model("qwen3_5")
    cache = make_hybrid_cache(model)
    with torch.no_grad():
        model(ids, use_cache=True, **with_cache(model, cache))
    assert [isinstance(layer, RecurrentLayer) for layer in cache.layers] == [True, False, True]
    assert cache.layers[1].store.history_pages.tolist() == [1]
    assert cache.live_bytes()["tokens"] == cache.get_seq_length() == 420
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    step = torch.tensor([[5], [6]])
    with torch.no_grad():
        both = model(step, use_cache=True, **with_cache(model, twin)).logits
        twin.batch_select_indices(torch.tensor([False, True]))
        one = model(step[1:], use_cache=True, **with_cache(model, twin)).logits
        alone = model(step[:1], use_cache=True, **with_cache(model, cache)).logits
    torch.testing.assert_close(both[:1], alone)
    assert twin.get_seq_length() == 422 and one.shape[0] == 1 and cache.get_seq_length() == 421


def test_what_a_state_cannot_do_is_refused():
    """Nothing is taken back or drafted upon; static memory is for models of attention alone."""
    (ids,) = prompts(20)
    model = make_model("qwen3_5")
    cache = make_hybrid_cache(model)
    with torch.inference_mode():
        generate(model, ids, cache, 2)
    for call in (lambda: cache.crop(-1), cache.activate_past_recording):
        with pytest.raises(ConfigError, match="layer 0 has linear attention, whose state cannot"):
            call()
    cache.crop(0)
    assert cache.get_seq_length() == 21
    for mode in (torch.inference_mode, torch.no_grad):  # states allocated in one may be written in the other
        with mode():
            model(ids[:, :1], use_cache=True, **with_cache(model, cache))
    with pytest.raises(ConfigError, match=r"max_length = 64 with linear attention in layers \[0, 2\]"):
        make_hybrid_cache(model, max_length=64)
    with pytest.raises(ConfigError, match="layer 0 is 'linear_attention'"):
        make_cache(make_model("llama", layer_types=["linear_attention", "full_attention"]))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_interrupted_forward_is_noticed(layer, monkeypatch):
    """Ctrl-C in any layer leaves states in between: the next call is refused until all is forgotten."""
    (ids,) = prompts(20)
    model = make_model("qwen3_5")
    cache = make_hybrid_cache(model)
    expected = generate(model, ids, cache, 2).sequences
    stopped = model.model.layers[layer].mlp
    monkeypatch.setattr(stopped, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    arguments = {"use_cache": True, **with_cache(model, cache)}
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], **arguments)
        monkeypatch.undo()
        if layer < 2:  # after the last one every layer is done
            with pytest.raises(ConfigError, match=r"interrupted a step, .* allowed: reset"):
                model(ids[:, :1], **arguments)
    cache.reset()
    assert torch.equal(generate(model, ids, cache, 2).sequences, expected)


def test_calibration_watches_the_attention_layers():
    statistics = calibrate_model(make_model("qwen3_5"), [torch.cat(prompts(130, 130))])
    assert list(statistics) == [1] and statistics[1].tokens > 0
