"""What a static cache refuses and what it takes back: masks, interrupted steps, drafts, chunks of prompts."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.hf import rows as hf_rows  # noqa: E402
from oscar_torch.hf import static_layer, static_state  # noqa: E402
from parity_tests.hf.test_drafts import Oracle  # noqa: E402
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


def forward(model, ids, cache, mask=None, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, **options, **with_cache(model, cache)).logits


def ones(*shape):
    return torch.ones(shape, dtype=torch.long)


def test_a_turn_sees_stored_columns_as_they_came():
    """Also behind padding and behind steps that only the device has counted; a single step asks no device."""
    model = make_model("llama")
    ids, mask = left_padded(prompts(40, 25))
    cache = make_cache(model, max_length=90)
    forward(model, ids, cache, mask)
    forward(model, ids[:, :1], cache, torch.cat([mask, ones(2, 1)], 1))
    longer = torch.cat([mask, ones(2, 1), torch.tensor([[1], [0]])], 1)
    forward(model, ids[:, :1], cache, longer)
    more = ids[:, -3:]
    whole = torch.cat([longer, ones(2, 3)], 1)
    for changed, refusal in (
        ((0, 3, 0), r"mask 0 for stored column 3 of sequence 0, allowed: 1"),
        ((1, 2, 1), r"mask 1 for stored column 2 of sequence 1, allowed: 0"),
        ((1, 41, 1), r"mask of \[2, 2\] tokens over 2 stored columns from 40 on, allowed: \[2, 1\]"),
    ):
        b, column, value = changed
        wrong = whole.clone()
        wrong[b, column] = value
        with pytest.raises(ConfigError, match=refusal):
            forward(model, more, cache, wrong)
    with pytest.raises(ConfigError, match="attention_mask = None over 42 stored columns with padding"):
        forward(model, more, cache)
    forward(model, more, cache, whole)
    assert cache.layers[1].lengths == [45, 29]


@pytest.mark.parametrize("options", [{}, {"max_length": 720}])
@pytest.mark.parametrize("chunk", [64, 100])
def test_prompts_in_chunks_with_padding(chunk, options):
    """[7] Chunks that hold nothing but padding of some sequence; what is read depends on where chunks end."""
    model = make_model("gemma3")
    ids, mask = left_padded(prompts(690, 130, 41))
    chunked = generate(
        model, ids, make_cache(model, **options), 9, attention_mask=mask, prefill_chunk_size=chunk
    )
    single, positions = make_cache(model), (mask.cumsum(1) - 1).clamp(min=0)
    for start in range(0, 690, chunk):
        end = min(start + chunk, 690)
        columns = slice(start, end)
        logits = forward(model, ids[:, columns], single, mask[:, :end], position_ids=positions[:, columns])
    torch.testing.assert_close(chunked.logits[0], logits[:, -1], atol=1e-4, rtol=1e-4)
    expected = generate(model, ids, make_cache(model), 9, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(chunked.sequences, expected.sequences)


class Interruption(KeyboardInterrupt):
    """Ctrl-C."""


@pytest.mark.parametrize("columns", [1, 9])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("when", ["stored", "attended"])
def test_an_interrupted_step_is_refused_until_reset(monkeypatch, columns, call, when):
    """[16] Whatever layer it was: no later call goes on with layers of different lengths."""
    model = make_model("gemma3")
    ids, more = prompts(380, columns)
    cache = make_cache(model, max_length=420)
    forward(model, ids, cache)
    calls = [0]

    def interrupting(function):
        def interrupted(*arguments, **options):
            calls[0] += 1
            result = function(*arguments, **options)
            if calls[0] == call:
                raise Interruption
            return result

        return interrupted

    where = {
        ("stored", 1): [(static_state, "append_token"), (static_state, "append_to_ring")],
        ("stored", 9): [(static_layer, "attend_in_pieces")],
        ("attended", 1): [(static_state, "decode_attention")],
        ("attended", 9): [(hf_rows.ops, "chunk_attention")],
    }[when, columns]
    with monkeypatch.context() as patch:
        for module, name in where:
            patch.setattr(module, name, interrupting(getattr(module, name)))
        with pytest.raises(Interruption):
            forward(model, more, cache)
    whole = torch.cat([ids, more], 1)
    for attempt in (
        lambda: forward(model, more, cache),
        lambda: generate(model, whole, cache, 2),
        lambda: cache.crop(-1),
        lambda: cache.crop(380),
        lambda: cache.batch_repeat_interleave(2),
        lambda: forward(model, more, copy.deepcopy(cache)),
    ):
        with pytest.raises(ConfigError, match=r"interrupted a step.*allowed: reset\(\)$"):
            attempt()
    cache.reset()
    assert torch.equal(
        generate(model, whole, cache, 3).sequences, generate(model, whole, make_cache(model), 3).sequences
    )


def test_layers_of_different_lengths_are_found_on_the_device():
    """[16] A compiled step that ended in the middle leaves the host no trace: the next turn finds it."""
    model = make_model("llama")
    (ids,) = prompts(40)
    cache = make_cache(model, max_length=64)
    forward(model, ids, cache)
    cache.layers[1].store.lengths += 1
    for _ in range(2):
        with pytest.raises(ConfigError, match="interrupted a step"):
            forward(model, ids[:, :3], cache, ones(1, 43))


@pytest.mark.parametrize("draft", [2, 10])
def test_drafts_give_greedys_tokens(monkeypatch, draft):
    """[8, 18] Drafts, some of them wrong, that end before, at and behind the completion of a page."""
    model = make_model("llama")
    new = 9
    for length in (60, 374, 383 - draft, 382, 383, 440, 448 - draft // 2, 511, 700):
        (ids,) = prompts(length, seed=length)
        greedy = generate(model, ids, make_cache(model), new, output_logits=False).sequences
        drafter = Oracle(greedy, draft)
        monkeypatch.setattr(model, "_get_candidate_generator", lambda drafter=drafter, **_: drafter)
        cache, expected = make_cache(model, max_length=length + 30), make_cache(model)
        options = {"output_logits": False, "prompt_lookup_num_tokens": draft}
        found = generate(model, ids, cache, new, **options).sequences
        assert torch.equal(found, greedy), length
        generate(model, ids, expected, new, **options)
        for layer, other in zip(cache.layers, expected.layers):
            assert_same(stored(layer, 0), stored(other, 0))
