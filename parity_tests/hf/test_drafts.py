"""Drafts and `crop`: what is taken back was never there."""

import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.core.page_pool import QuantizedTokensError  # noqa: E402
from oscar_torch.hf import layer as hf_layer  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    assert_same,
    feed,
    generate,
    make_cache,
    make_layer,
    make_model,
    prompts,
    random_rows,
    stored,
)

pytestmark = pytest.mark.hf


def looping_prompt(length):
    """A text that repeats itself, so that prompt lookup finds drafts, some of them right."""
    (ids,) = prompts(12)
    return ids.repeat(1, -(-length // 12))[:, :length]


class Oracle:
    """A drafter that knows the right tokens, and slips every now and then."""

    def __init__(self, right, draft):
        self.right, self.draft = right, draft

    def get_candidates(self, input_ids, **kwargs):
        length = input_ids.shape[1]
        end = min(length + self.draft, self.right.shape[1] - 1)
        drafts = self.right[:, length:end].clone()
        slip = length * 7 % (self.draft + 2)
        if slip < drafts.shape[1]:
            drafts[:, slip] = (drafts[:, slip] + 1) % 97
        return torch.cat([input_ids, drafts], dim=1), None

    def update_candidate_strategy(self, *args):
        pass

    requires_model_outputs = False


@pytest.mark.parametrize("draft", [1, 3, 10, 40])
def test_drafts_give_greedys_tokens(monkeypatch, draft):
    """[10] Drafts come with the prompt and are taken back across pages: no length is refused, none differs.

    Every length from 64 to 1500 that completes a page is met before, within and behind the drafts.
    """
    model = make_model("llama")
    offsets = (draft + 1, draft, draft // 2, 1, 0)
    pages = range(384 + 64 * (draft % 2), 1500, 128)  # every second one, the others with other drafts
    lengths = {1, 63, 200, *(page - offsets[(i + draft) % 5] for i, page in enumerate(pages))}
    new, forwards = 9, []
    model.register_forward_hook(lambda *_: forwards.append(1))
    options = {"output_logits": False}
    for length in sorted(lengths):
        (ids,) = prompts(length, seed=length)
        greedy = generate(model, ids, make_cache(model), new, **options).sequences
        drafter = Oracle(greedy, draft)
        monkeypatch.setattr(model, "_get_candidate_generator", lambda drafter=drafter, **_: drafter)
        forwards.clear()
        cache = make_cache(model)
        found = generate(model, ids, cache, new, prompt_lookup_num_tokens=draft, **options).sequences
        assert torch.equal(found, greedy), length
        assert cache.get_seq_length() == length + new - 1
        assert len(forwards) < new  # drafts were accepted


# Where the sink, the windows and the first page end, and before the page after it.
BOUNDARIES = (1, 63, 64, 65, 319, 320, 321, 380, 384, 440)


def test_prompt_lookup_gives_greedys_tokens():
    """[10] Through transformers' own drafter, growing and static; OSCAR_EVERY_LENGTH=1: all up to 1500."""
    model = make_model("llama", tie_word_embeddings=True)
    for length in range(1, 1501) if os.environ.get("OSCAR_EVERY_LENGTH") else BOUNDARIES:
        ids = looping_prompt(length)
        greedy = generate(model, ids, make_cache(model), 6, output_logits=False).sequences
        options = {"prompt_lookup_num_tokens": 10, "output_logits": False}
        for cache in (make_cache(model), make_cache(model, max_length=1600)):
            found = generate(model, ids, cache, 6, **options).sequences
            assert torch.equal(found, greedy), (length, cache.ledger)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_draft_model_gives_greedys_tokens(family):
    """[10] The same weights over a BF16 cache are nearly always right: accepted drafts cross pages."""
    model, assistant = make_model(family), make_model(family, "sdpa")
    assistant.generation_config.num_assistant_tokens = 7
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    for length in (60, 380, 440, 509, 700):
        (ids,) = prompts(length, seed=length)
        greedy = generate(model, ids, make_cache(model), 16, output_logits=False).sequences
        found = generate(model, ids, make_cache(model), 16, output_logits=False, assistant_model=assistant)
        assert torch.equal(found.sequences, greedy), length


def test_the_first_forward_is_told_from_its_drafts(monkeypatch):
    """The prompt in pieces, drafts one by one: where they begin is a variable of transformers' own."""
    parts = []
    attend_part = hf_layer.OscarLayer._attend_part

    def recorded(layer, query, *rows, is_draft, **options):
        parts.append((query.shape[1], is_draft))
        return attend_part(layer, query, *rows, is_draft=is_draft, **options)

    monkeypatch.setattr(hf_layer.OscarLayer, "_attend_part", recorded)
    model = make_model("llama", num_hidden_layers=1)
    options = {"prompt_lookup_num_tokens": 4, "output_logits": False}
    cache = make_cache(model)
    first = generate(model, looping_prompt(380), cache, 2, **options).sequences
    assert parts[:2] == [(380, False), (4, True)]
    second = torch.cat([first, looping_prompt(300)], 1)
    with pytest.raises(ConfigError, match="assisted decoding over a cache of 381 columns, allowed: an empty"):
        generate(model, second, cache, 2, **options)
    # A turn without drafts goes on, in pieces again once that is said.
    cache.deactivate_past_recording()
    parts.clear()
    generate(model, second, cache, 2, output_logits=False)
    assert parts[0] == (301, False)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("length", [1, 300, 380, 444])
def test_drafts_are_read_as_decoding_reads(window, length):
    """[10] A chunk of drafts equals single columns, also where it completes a page."""
    chunk, single = make_layer(window), make_layer(window)
    rows, draft = random_rows(2, length), random_rows(2, 9, seed=1)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    for layer in (chunk, single):
        feed(layer, rows)
    chunk.activate_past_recording()
    found = feed(chunk, draft, real)
    expected = [feed(single, draft[:, t : t + 1], real[:, t : t + 1]) for t in range(9)]
    # The page tables may differ in their empty columns, which BLAS may sum in another order.
    torch.testing.assert_close(found, torch.cat(expected, 1), atol=1e-6, rtol=1e-6)
    for b in range(2):
        assert_same(stored(chunk, b), stored(single, b))
    chunk.crop(0)
    chunk.deactivate_past_recording()  # a prompt again, in pieces
    torch.testing.assert_close(feed(chunk, rows), feed(single, rows), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("length", "draft"), [(5, 40), (200, 40), (300, 83), (400, 47)])
def test_crop_is_as_if_never_appended(window, length, draft):
    """[10, 23] Within the recent part (and a ring's slack) cropped rows leave no trace in what follows."""
    layer, expected = make_layer(window), make_layer(window)
    rows, more = random_rows(2, length), random_rows(2, 200, seed=2)
    feed(layer, rows)
    feed(expected, rows)
    if window:
        draft = min(draft, 60)
    feed(layer, random_rows(2, draft, seed=1))
    layer.crop(-draft)
    assert layer.lengths == expected.lengths and layer.get_seq_length() == expected.get_seq_length()
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))
    assert torch.equal(feed(layer, more), feed(expected, more))
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))


def test_crop_past_a_page_is_refused_and_changes_nothing():
    """[10] The named refusal, in all layers or none; a recorded draft may cross a page."""
    layer = make_layer()
    feed(layer, random_rows(2, 383))
    feed(layer, random_rows(2, 4, seed=1))
    before = [stored(layer, b) for b in range(2)]
    with pytest.raises(QuantizedTokensError, match=r"from 387 to 383 tokens: tokens 64\.\.127 are quantized"):
        layer.crop(-4)
    for b in range(2):
        assert_same(stored(layer, b), before[b])
    layer.crop(-3)  # 384 tokens have that page quantized too
    assert layer.lengths == [384, 384]
    layer.crop(64)  # the older meaning: keep 64 columns; the sink is BF16, so this is exact
    assert layer.lengths == [64, 64] and layer.store.history_pages.tolist() == [0, 0]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kept", [0, 1, 5, 9])
def test_recorded_rows_are_taken_back_across_a_page(window, kept):
    layer, expected = make_layer(window), make_layer(window)
    rows, draft = random_rows(2, 380), random_rows(2, 9, seed=1)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    feed(layer, rows)
    feed(expected, rows)
    layer.activate_past_recording()
    for step in (slice(0, 6), slice(6, 9)):
        feed(layer, draft[:, step], real[:, step])
    layer.crop(-(9 - kept))
    layer.deactivate_past_recording()
    if kept:
        feed(expected, draft[:, :kept], real[:, :kept])
    assert layer.lengths == expected.lengths == [380 + kept, 380 + max(0, kept - 3)]
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))
    assert torch.equal(feed(layer, random_rows(2, 70, seed=2)), feed(expected, random_rows(2, 70, seed=2)))


def test_a_ring_refuses_what_it_no_longer_has():
    layer = make_layer(window=100)
    feed(layer, random_rows(1, 400))
    slack = layer.store.key.shape[1] - 100
    layer.crop(-slack)
    with pytest.raises(QuantizedTokensError, match="its ring goes back to token"):
        layer.crop(-2)
    assert layer.lengths == [400 - slack]
