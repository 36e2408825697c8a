"""Drafts and `crop`: what is taken back was never there."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.core.page_pool import QuantizedTokensError  # noqa: E402
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


def test_prompt_lookup_decoding_rolls_back():
    """[10] Drafts are appended and taken back: short ≡ greedy, and across a page flush nothing is refused."""
    model = make_model("llama", tie_word_embeddings=True)
    (short,) = prompts(12)
    short = short.repeat(1, 4)
    greedy = generate(model, short, make_cache(model), 30).sequences
    drafted = generate(model, short, make_cache(model), 30, prompt_lookup_num_tokens=3, output_logits=False)
    assert torch.equal(drafted.sequences, greedy)
    long = short[:, :12].repeat(1, 31)  # 372 tokens: the first flush comes while drafting
    cache = make_cache(model)
    out = generate(model, long, cache, 30, prompt_lookup_num_tokens=3, output_logits=False)
    length = out.sequences.shape[1] - 1
    assert cache.get_seq_length() == length and cache.layers[0].lengths == [length]
    assert cache.layers[0].store.history_pages.tolist() == [1]


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
