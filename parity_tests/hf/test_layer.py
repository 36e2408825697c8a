"""One `OscarLayer` fed with rows: selection, growth, memory."""

import collections
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.cache import live_bytes  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import CacheFullError  # noqa: E402
from oscar_torch.core.page_pool import QuantizedTokensError  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
from oscar_torch.hf import layer as hf_layer  # noqa: E402
from oscar_torch.layer_cache import LayerCache  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    assert_same,
    feed,
    hadamard_layer,
    make_layer,
    random_rows,
    stored,
)

pytestmark = pytest.mark.hf


def test_a_piece_of_one_token_is_no_decoding_step():
    """[19] From 511 tokens a turn's first piece is one token, which completes a page: alone ≡ in a batch."""
    first, turn = random_rows(2, 511), random_rows(2, 9, seed=1)
    alone, batch = make_layer(prefill_chunk=512), make_layer(prefill_chunk=512)
    feed(alone, first[:1])
    expected = feed(alone, turn[:1])
    real = torch.ones(2, 511, dtype=torch.bool)
    real[1, :300] = False
    feed(batch, first, real)
    torch.testing.assert_close(feed(batch, turn)[:1], expected, atol=1e-5, rtol=1e-5)
    assert_same(stored(alone, 0), stored(batch, 0))


@pytest.mark.parametrize("window", [None, 100])
def test_select_then_append_equals_sequences_alone(window):
    """[23, 24] Repeat, reorder and select, then different rows for everyone: no page is shared by mistake."""
    starts = [random_rows(1, n, seed=n) for n in (330, 520, 70)]
    layer, width = make_layer(window), 520
    batch, real = torch.zeros(3, width, 16), torch.zeros(3, width, dtype=torch.bool)
    for b, rows in enumerate(starts):
        batch[b, width - rows.shape[1] :] = rows[0]
        real[b, width - rows.shape[1] :] = True
    feed(layer, batch, real)
    parents = [0, 1, 2]
    layer.batch_repeat_interleave(2)
    parents = [p for p in parents for _ in range(2)]
    layer.reorder_cache(torch.tensor([3, 3, 1, 5, 2, 0]))
    parents = [parents[i] for i in (3, 3, 1, 5, 2, 0)]
    layer.batch_select_indices(torch.tensor([True, True, True, True, True, False]))
    parents = parents[:5]
    more = random_rows(5, 140, seed=9)
    outputs = [feed(layer, more[:, i : i + 70]) for i in (0, 70)]
    for b, parent in enumerate(parents):
        alone = make_layer(window)
        feed(alone, starts[parent])
        expected = [feed(alone, more[b : b + 1, i : i + 70]) for i in (0, 70)]
        assert_same(stored(layer, b), stored(alone, 0))
        for o, e in zip(outputs, expected):
            torch.testing.assert_close(o[b : b + 1], e, atol=1e-5, rtol=1e-5)


def test_growing_equals_preallocated_and_full_is_an_error():
    """[26] Pools that grow page by page hold the bytes of one allocated at once; the limit is a limit."""
    grown, fixed = make_layer(), make_layer(max_length=700)
    rows = random_rows(2, 700)
    for start in range(0, 700, 50):
        feed(grown, rows[:, start : start + 50])
    feed(fixed, rows)
    for b in range(2):
        assert_same(stored(grown, b), stored(fixed, b))
    assert fixed.get_max_length() == 700 and grown.get_max_length() == -1
    before = stored(fixed, 0)
    with pytest.raises(CacheFullError, match="701 tokens, max_length = 700"):
        feed(fixed, rows[:, :1])
    assert_same(stored(fixed, 0), before)
    assert grown.store.key_codes.shape[0] <= 1 + 2 * (5 + hf_layer.GROW_PAGES)
    grown.reset()
    assert grown.get_seq_length() == 0 and grown.store is None
    feed(grown, rows[:1])
    assert_same(stored(grown, 0), stored(fixed, 0))


def test_memory_is_the_formulas():
    """[21] Bytes in use within 1 % of the format page's formula; bytes allocated within 1 % of those."""
    tokens, heads, head_dim = 2047, 2, 16  # a length that fills every BF16 page but for one row
    layer = make_layer(max_length=tokens)
    feed(layer, random_rows(2, tokens))
    pages = (tokens - 320) // 64
    windows = -(-tokens // 64) - pages
    formula = 2 * heads * (pages * (34 * head_dim + 256) + windows * 256 * head_dim)
    model = hf_cache.OscarCache.__new__(hf_cache.OscarCache)
    model.layers, model._steps = [layer], {}
    live = model.live_bytes()
    assert abs(live["total"] - formula) <= 0.01 * formula
    arrays = [a for a in vars(layer.store).values() if isinstance(a, torch.Tensor)]
    in_memory = sum(a.untyped_storage().nbytes() for a in arrays)
    reserved = heads * ((34 * head_dim + 256) + 256 * head_dim)  # page 0 of either kind
    assert abs(in_memory - reserved - formula) <= 0.01 * formula
    # At head_dim 16 an INT2 page is 5.12 times smaller than in BF16; at this length the windows weigh much.
    assert live["bfloat16"] / live["total"] > 2.5


# A window above the limit for rings: INT2 pages that are given up behind it.


def make_long_window(window=1088, **options):
    geometry = CacheConfig(num_key_value_heads=2, num_query_heads=4, head_dim=16)
    rotation = hadamard_layer(16, 2)
    return hf_layer.OscarLayer(0, geometry, rotation, sliding_window=window, prefill_chunk=512, **options)


def test_pages_behind_a_long_window_are_reused():
    """[10 of the field's list] Memory stops growing, and attention equals that over pages never given up."""
    layer, whole = make_long_window(), make_long_window()
    whole._window_pages = lambda: None  # keeps everything
    rows = random_rows(2, 5000)
    for start, end in ((0, 2100), (2100, 2101), (2101, 2900), (2900, 2940), (2940, 5000)):
        part = rows[:, start:end]
        torch.testing.assert_close(feed(layer, part), feed(whole, part), atol=1e-6, rtol=1e-6)
        if end == 2940:
            for each in (layer, whole):
                each.crop(-30)
                feed(each, part[:, -30:])
    more = random_rows(2, 64, seed=1)
    feed(layer, more)
    feed(whole, more)
    assert isinstance(layer.store, LayerCache) and isinstance(whole.store, LayerCache)
    size = live_bytes(layer.store, layer.sliding_window)
    assert size["int2_pages"] == 2 * (1088 // 64 + 1) and live_bytes(whole.store)["int2_pages"] == 2 * 74
    assert size["bfloat16"] == 2 * 1088 * 2 * 16 * 4
    assert layer.store.key_codes.shape[0] <= 1 + 2 * (18 + 8 + hf_layer.GROW_PAGES)
    assert whole.store.key_codes.shape[0] > 2 * 73


def test_sequences_behind_a_long_window_do_not_write_to_each_others_pages():
    """Shared pages are given up by one sequence while the other still reads them."""
    layer, alone = make_long_window(), [make_long_window() for _ in range(2)]
    rows = random_rows(1, 2500)
    more = random_rows(2, 1500, seed=1)
    feed(layer, rows)
    layer.batch_repeat_interleave(2)
    outputs = [feed(layer, more[:, start : start + 500]) for start in (0, 500, 1000)]
    for b, single in enumerate(alone):
        feed(single, rows)
        for i, start in enumerate((0, 500, 1000)):
            expected = feed(single, more[b : b + 1, start : start + 500])
            torch.testing.assert_close(outputs[i][b : b + 1], expected, atol=1e-5, rtol=1e-5)


def test_a_crop_to_pages_that_were_given_up_is_refused():
    layer = make_long_window(window=64 * 4)
    feed(layer, random_rows(1, 1400))
    layer.activate_past_recording()
    feed(layer, random_rows(1, 200, seed=1))
    layer.crop(-200)
    assert layer.lengths == [1400]
    fresh = make_long_window(window=64 * 4)
    feed(fresh, random_rows(1, 1400))
    layer.deactivate_past_recording()
    part = random_rows(1, 300, seed=2)
    torch.testing.assert_close(feed(layer, part), feed(fresh, part), atol=1e-6, rtol=1e-6)
    with pytest.raises(QuantizedTokensError, match="from 1700 to 70 tokens"):
        layer.crop(70)
    layer.crop(60)  # of the sink alone, which is BF16; the INT2 pages come anew
    fresh = make_long_window(window=64 * 4)
    feed(fresh, random_rows(1, 1400)[:, :60])
    for part in (random_rows(1, 900, seed=3), random_rows(1, 100, seed=4)):
        torch.testing.assert_close(feed(layer, part), feed(fresh, part), atol=1e-6, rtol=1e-6)


# Who holds the INT2 pages.


def check_pages(layer):
    """The allocator counts what the sequences hold, and that is what the live part of the table names."""
    owners = collections.Counter(page for held in layer.pages.held for page in held.values())
    if layer.pages.allocator is None:
        assert not owners
        return
    layer.pages.allocator.check(dict(owners))
    assert layer.pages.allocator.capacity == layer.store.key_codes.shape[0] - 1
    table, history = layer.store.page_table.tolist(), layer.store.history_pages.tolist()
    assert set(owners) == {page for row, pages in zip(table, history) for page in row[:pages]}
    assert layer.pages.allocator.live == live_bytes(layer.store)["int2_pages"]
    for row, held in zip(table, layer.pages.held):
        assert len(set(held.values())) == len(held)  # a sequence has no place twice
        assert all(row[page] == place for page, place in held.items())


def test_a_replayed_crop_to_pages_that_were_given_up_is_refused():
    """48: more drafts than recent tokens; the rows come back, the pages behind them do not."""
    layer = make_long_window(window=64 * 8)
    feed(layer, random_rows(1, 1400))
    layer.activate_past_recording()
    for start in range(0, 340, 170):
        feed(layer, random_rows(1, 170, seed=start))
    before = [x.clone() for x in vars(layer.store).values() if isinstance(x, torch.Tensor)]
    with pytest.raises(
        QuantizedTokensError, match="from 1740 to 1400 tokens: its window of 512 needs INT2 page 12"
    ):
        layer.crop(-340)
    after = [x for x in vars(layer.store).values() if isinstance(x, torch.Tensor)]
    assert layer.lengths == [1740] and all(torch.equal(x, y) for x, y in zip(before, after))
    layer.crop(-100)  # of which all is still there
    assert layer.lengths == [1640]


@pytest.mark.parametrize("window", [None, 256])
@pytest.mark.parametrize("seed", [0, 1])
def test_no_page_is_leaked_or_used_twice(window, seed):
    """Random appends, selections, copies, crops and drafts: counts, tables and attention agree."""
    rng = random.Random(seed)
    layer = make_long_window(window)
    feed(layer, random_rows(2, 700))
    histories = [random_rows(2, 700)[b] for b in range(2)]
    for step in range(20):
        columns = rng.choice((1, 40, 64, 300, 700))
        action = rng.choice(("append", "append", "select", "draft", "sink", "copy"))
        more = random_rows(len(histories), columns, seed=100 * seed + step)
        if action == "append":
            feed(layer, more)
            histories = [torch.cat([rows, new]) for rows, new in zip(histories, more)]
        elif action == "select":
            chosen = [rng.randrange(len(histories)) for _ in range(rng.randint(1, 3))]
            layer.reorder_cache(torch.tensor(chosen))
            histories = [histories[b] for b in chosen]
        elif action == "draft":
            layer.activate_past_recording()
            feed(layer, more[:, :70])
            drafts = min(columns, 70)
            kept = rng.randint(0, drafts)
            layer.crop(kept - drafts)
            layer.deactivate_past_recording()
            histories = [torch.cat([rows, new[:kept]]) for rows, new in zip(histories, more)]
        elif action == "sink" and len(histories[0]) > 60 and rng.random() < 0.5:
            layer.crop(60)  # the BF16 start alone, so every INT2 page goes
            histories = [rows[:60] for rows in histories]
            pages = layer.pages
            assert pages is not None and pages.allocator is not None and pages.allocator.live == 0
        elif action == "copy":
            twin = layer.copy()
            feed(twin, more)
            check_pages(twin)
        check_pages(layer)
    assert layer.lengths == [len(rows) for rows in histories]
    probe = random_rows(len(histories), 100, seed=999)
    found = feed(layer, probe)
    for b, rows in enumerate(histories):
        alone = make_long_window(window)
        feed(alone, rows[None])
        torch.testing.assert_close(found[b : b + 1], feed(alone, probe[b : b + 1]), atol=1e-5, rtol=1e-5)
