"""Nothing silently wrong: masks over stored columns, gradients, interrupted steps, inference mode."""

import copy

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch import ops  # noqa: E402
from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.core.page_pool import QuantizedTokensError  # noqa: E402
from oscar_torch.hf import layer as hf_layer  # noqa: E402
from oscar_torch.hf import pieces as hf_pieces  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    assert_same,
    generate,
    left_padded,
    make_cache,
    make_model,
    prompts,
    stored,
    with_cache,
)

pytestmark = pytest.mark.hf


def forward(model, ids, cache, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, **with_cache(model, cache)).logits


# Masks.


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("new_columns", [1, 7])
def test_a_mask_that_forgets_stored_columns_is_refused(family, new_columns):
    model = make_model(family)
    ids, more = prompts(40, new_columns)
    cache = make_cache(model)
    forward(model, ids, cache)
    mask = torch.ones(1, 40 + new_columns, dtype=torch.long)
    mask[:, 3:30] = 0
    with pytest.raises(ConfigError, match=r"attention mask 0 for stored column 3 of sequence 0, allowed: 1"):
        forward(model, more, cache, mask)
    mask[:, 3:30] = 1
    expected = make_cache(model)
    forward(model, ids, expected)
    assert torch.equal(forward(model, more, cache, mask), forward(model, more, expected))


def test_a_mask_that_shows_stored_padding_is_refused():
    """Padding is not in the cache, so nobody can attend to it; nor can the mask of the whole be left out."""
    model = make_model("llama")
    ids, mask = left_padded(prompts(40, 25))
    cache = make_cache(model)
    forward(model, ids, cache, mask)
    more = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"mask 1 for stored column 0 of sequence 1, allowed: 0"):
        forward(model, more, cache, torch.ones(2, 43, dtype=torch.long))
    with pytest.raises(ConfigError, match="attention_mask = None over 40 stored columns with padding"):
        forward(model, more, cache)
    assert cache.get_seq_length() == 40
    forward(model, more, cache, torch.cat([mask, more], 1))
    swapped = torch.cat([mask[[1, 0]], more[:, :2], more[:, :2]], 1)
    with pytest.raises(ConfigError, match="stored column 0 of sequence 0"):
        forward(model, more[:, :1], cache, swapped[:, :44])


def test_masks_follow_crop_and_selection():
    """The stored pattern is that of the columns which are left, sequence by sequence."""
    model = make_model("llama")
    ids, mask = left_padded(prompts(40, 25))
    cache = make_cache(model)
    forward(model, ids, cache, mask)
    more = torch.tensor([[1, 1, 1], [0, 0, 1]])
    forward(model, more, cache, torch.cat([mask, more], 1))
    cache.crop(-1)
    cache.batch_select_indices(torch.tensor([1]))
    right = torch.cat([mask[1:], torch.tensor([[0, 0, 1]])], 1)
    forward(model, more[:1, :1], cache, right)
    assert cache.layers[0].lengths == [26]


@pytest.mark.parametrize("pattern", ["or", "and"])
def test_other_attention_patterns_are_refused(pattern):
    model = make_model("llama")
    (ids,) = prompts(40)
    make_mask = tf.masking_utils.create_causal_mask
    cache = make_cache(model)
    embeds = model.get_input_embeddings()(ids)
    options = {f"{pattern}_mask_function": lambda b, h, q, kv: kv < 4}
    argument = with_cache(model, cache)
    with pytest.raises(ConfigError, match=f"attention pattern '{pattern}_masks"):
        make_mask(config=model.config, inputs_embeds=embeds, attention_mask=None, **argument, **options)


# Gradients.


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_backward_through_the_cache_is_an_error(family):
    """Silence would be gradients that lack every attention path."""
    model = make_model(family)
    (ids,) = prompts(40)
    rows = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=rows, **with_cache(model, make_cache(model))).logits
    with pytest.raises(ConfigError, match="backward through attention over an OscarCache"):
        logits[0, -1].max().backward()
    assert torch.equal(logits, forward(model, ids, make_cache(model)))


# Interrupted steps.


class Interruption(KeyboardInterrupt):
    """Ctrl-C."""


WHERE = {  # rows of a prompt's piece, and of a single column
    "stored": [(hf_pieces, "_store_rows"), (hf_layer, "append_token"), (hf_layer, "append_to_ring")],
    "attended": [(ops, "chunk_attention"), (ops, "decode_attention")],
}


def interrupt(monkeypatch, where, call):
    """The `call`-th time that rows have been stored (or attended to), an Interruption ends the step."""
    calls = [0]

    def interrupting(function):
        def interrupted(*args, **options):
            calls[0] += 1
            result = function(*args, **options)
            if calls[0] == call:
                raise Interruption
            return result

        return interrupted

    for module, name in WHERE[where]:
        monkeypatch.setattr(module, name, interrupting(getattr(module, name)))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("where", "call"), [("stored", 1), ("stored", 2), ("attended", 2)])
@pytest.mark.parametrize("columns", [1, 9])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_interrupted_step_is_refused_until_it_is_taken_back(
    monkeypatch, family, columns, where, call, padded
):
    """Whatever layer it was and however far it came; then everything is as if the step had never begun."""
    model = make_model(family)
    ids, mask = left_padded(prompts(350, 340 if padded else 350))
    more, _ = left_padded(prompts(columns, columns, seed=1))
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    cache, expected = make_cache(model), make_cache(model)
    for each in (cache, expected):
        forward(model, ids, each, mask)
    with monkeypatch.context() as patch:
        interrupt(patch, where, call)
        with pytest.raises(Interruption):
            forward(model, more, cache, longer)
    refusal = r"interrupted a step, layers have parts of it; allowed: crop\(350\), .* or reset\(\)"
    for attempt in (
        lambda: forward(model, more, cache, longer),
        lambda: generate(model, torch.cat([ids, more], 1), cache, 2, attention_mask=longer),
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_select_indices(torch.tensor([1])),
    ):
        with pytest.raises(ConfigError, match=refusal):
            attempt()
    cache.crop(350)
    for layer, other in zip(cache.layers, expected.layers):
        for b in range(2):
            assert_same(stored(layer, b), stored(other, b))
    assert torch.equal(forward(model, more, cache, longer), forward(model, more, expected, longer))


def test_an_interrupted_step_across_a_page_says_what_is_lost(monkeypatch):
    """At 384 tokens a page is quantized: the step cannot be taken back, `reset` begins anew."""
    model = make_model("llama")
    ids, more = prompts(383, 1)
    cache = make_cache(model)
    forward(model, ids, cache)
    with monkeypatch.context() as patch:
        interrupt(patch, "stored", 2)
        with pytest.raises(Interruption):
            forward(model, more, cache)
    with pytest.raises(QuantizedTokensError, match="from 384 to 383 tokens"):
        cache.crop(383)
    with pytest.raises(ConfigError, match="interrupted a step"):
        forward(model, more, cache)
    cache.reset()
    whole = torch.cat([ids, more], 1)
    assert torch.equal(forward(model, whole, cache), forward(model, whole, make_cache(model)))


def test_an_interrupted_first_prompt_is_reset(monkeypatch):
    model = make_model("llama")
    (ids,) = prompts(2100)
    cache = make_cache(model, prefill_chunk=2048)
    with monkeypatch.context() as patch:
        interrupt(patch, "stored", 3)  # the second layer's first piece
        with pytest.raises(Interruption):
            generate(model, ids, cache, 2)
    with pytest.raises(ConfigError, match=r"allowed: reset\(\)$"):
        generate(model, ids, cache, 2)
    cache.reset()
    assert torch.equal(
        generate(model, ids, cache, 3).sequences,
        generate(model, ids, make_cache(model, prefill_chunk=2048), 3).sequences,
    )


def test_an_interrupted_draft_is_taken_back_from_the_record(monkeypatch):
    """With recorded rows a step across a page can be taken back too."""
    model = make_model("llama")
    ids, first, second = prompts(380, 2, 6)
    cache, expected = make_cache(model), make_cache(model)
    for each in (cache, expected):
        forward(model, ids, each)
        each.activate_past_recording()
        forward(model, first, each)
    with monkeypatch.context() as patch:
        interrupt(patch, "stored", 10)  # the second layer's fourth draft
        with pytest.raises(Interruption):
            forward(model, second, cache)
    cache.crop(382)
    for layer, other in zip(cache.layers, expected.layers):
        assert_same(stored(layer, 0), stored(other, 0))


# Inference mode.


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_inference_mode_and_generate_share_a_cache(family):
    """Tensors made in inference mode cannot be written to outside; the cache is not made of such."""
    model = make_model(family)
    ids, more = prompts(400, 80)
    cache = make_cache(model)
    with torch.inference_mode():
        forward(model, ids, cache)
        cache.crop(-3)
        cache.batch_repeat_interleave(2)
        branch = copy.deepcopy(cache)
    whole = torch.cat([ids[:, :397], more], 1)
    expected = make_cache(model)
    forward(model, ids[:, :397], expected)
    expected = generate(model, whole, expected, 4).sequences
    for each in (cache, branch):
        found = generate(model, whole.expand(2, -1), each, 4).sequences
        assert torch.equal(found, expected.expand(2, -1))
        each.reorder_cache(torch.tensor([1, 0]))
