"""Several turns, shared prefixes, sequences that leave a batch."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from parity_tests.hf.tiny import (  # noqa: E402
    RoundingCache,
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


def test_several_turns_equal_the_dense_cache():
    """[1] Turn after turn on one padded cache, rows of different lengths, against the dense oracle."""
    dense, model = make_model("gemma3", "eager"), make_model("gemma3")
    results = []
    for m, cache in ((dense, RoundingCache(config=dense.config)), (model, make_cache(model))):
        ids, mask = left_padded(prompts(50, 31))
        for turn in range(3):
            ids = generate(m, ids, cache, 5, attention_mask=mask).sequences
            more, more_mask = left_padded(prompts(9, 20 - turn, seed=turn))
            mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long), more_mask], 1)
            ids = torch.cat([ids, more], 1)
        results.append(ids)
    assert torch.equal(*results)


def test_shared_prefix_equals_unshared():
    """[1, 24, 29] A prefix prefilled once: its continuations, alone and batched, ≡ from scratch."""
    model = make_model("qwen3")
    prefix, first, second = prompts(512, 90, 33)
    base = make_cache(model, prefill_chunk=512)
    with torch.no_grad():
        model(prefix, use_cache=True, **with_cache(model, base))
    kept = [stored(layer, 0) for layer in base.layers]
    wholes = [torch.cat([prefix, part], 1) for part in (first, second)]
    unshared = [generate(model, ids, make_cache(model, prefill_chunk=512), 6).sequences for ids in wholes]
    for ids, expected in zip(wholes, unshared):
        branch = copy.deepcopy(base)
        assert torch.equal(generate(model, ids, branch, 6).sequences, expected)
    for layer, before in zip(base.layers, kept):
        assert_same(stored(layer, 0), before)
    # Both at once: the prefix repeated (its INT2 pages shared), the rest padded between prefix and turn.
    base.batch_repeat_interleave(2)
    assert base.layers[0].store.page_table[0, :3].tolist() == base.layers[0].store.page_table[1, :3].tolist()
    more, more_mask = left_padded([first, second])
    ids = torch.cat([prefix.expand(2, -1), more], 1)
    mask = torch.cat([torch.ones(2, prefix.shape[1], dtype=torch.long), more_mask], 1)
    batch = generate(model, ids, base, 6, attention_mask=mask).sequences
    for b, expected in enumerate(unshared):
        assert torch.equal(batch[b, -6:], expected[0, -6:])


def test_removing_the_longest_row():
    """[25] The rows that stay continue as if they had been alone."""
    model = make_model("gemma3")
    rows = prompts(450, 100, 33)
    ids, mask = left_padded(rows)
    cache = make_cache(model)
    first = generate(model, ids, cache, 4, attention_mask=mask).sequences
    cache.batch_select_indices(torch.tensor([2, 1]))
    assert cache.batch_size == 2 and cache.layers[1].lengths == [36, 103]
    ids = first[[2, 1]]
    mask = torch.cat([mask[[2, 1]], torch.ones(2, 4, dtype=torch.long)], 1)
    more = generate(model, ids, cache, 4, attention_mask=mask).sequences
    for b, row in enumerate((rows[2], rows[1])):
        alone = generate(model, row, make_cache(model), 8).sequences
        assert torch.equal(more[b, -8:], alone[0, -8:])
