"""The paged cache of both packages against the oracle's plain lists: same rows in, same bytes stored.

Padding rows are always NaN, so that a padding row that reaches a page or a mean is seen.
"""

import dataclasses

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework, PackageCache

LENGTHS = (0, 1, 63, 64, 65, 319, 320, 321, 383, 384, 385, 1000)
HEADS, HEAD_DIM = 2, 64
NAN = np.uint16(0x7FC0)
ARRAYS = (
    "key_codes",
    "value_codes",
    "key_scale",
    "value_scale",
    "key_page_mean",
    "window_key",
    "window_value",
    "page_table",
    "window_table",
    "lengths",
    "history_pages",
)


@dataclasses.dataclass
class Sequences:
    """Rows of a ragged batch, bf16 bits [B, longest, K, D], NaN past each length."""

    lengths: np.ndarray
    key: np.ndarray
    value: np.ndarray
    rotation: dict[str, np.ndarray]

    def append_to(self, cache: PackageCache, chunk: int) -> PackageCache:
        """Writes everything in chunks of `chunk` tokens; shorter sequences run dry and pad."""
        longest = int(self.lengths.max())
        for start in range(0, longest, chunk):
            parts = [bits[:, start : start + chunk] for bits in (self.key, self.value)]
            missing = chunk - parts[0].shape[1]
            padding = ((0, 0), (0, missing), (0, 0), (0, 0))
            key, value = (np.pad(part, padding, constant_values=NAN) for part in parts)
            cache.append(key, value, np.clip(self.lengths - start, 0, chunk))
        return cache


def make_sequences(lengths: tuple[int, ...], seed: int = 0, heads: int = HEADS) -> Sequences:
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths), heads, HEAD_DIM)
    key, value = (
        rows.normal_rows(rng, (shape[0] * shape[1], heads, HEAD_DIM)).reshape(shape) for _ in range(2)
    )
    for b, length in enumerate(lengths):
        key[b, length:], value[b, length:] = NAN, NAN
    return Sequences(np.array(lengths, np.int32), key, value, rows.make_rotation(rng, heads, HEAD_DIM))


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    return make_sequences(LENGTHS)


@pytest.fixture(scope="module")
def one_shot(framework: Framework, sequences: Sequences) -> PackageCache:
    """The ragged batch of all LENGTHS, written in one go."""
    cache = PackageCache(framework, sequences.rotation, len(LENGTHS), 1000)
    return sequences.append_to(cache, 1000)


def assert_holds(cache: PackageCache, index: int, key: np.ndarray, value: np.ndarray) -> None:
    """Sequence `index` holds exactly what the format says for these rows."""
    config = cache.config
    rotation = {
        name: cache.framework.numpy(getattr(cache.rotation, name))
        for name in ("key_transform", "key_multiplier", "value_transform", "value_multiplier", "value_mean")
    }
    expected = oracle.store_sequence(key, value, rotation, config.sink_tokens, config.recent_tokens).arrays()
    assert int(cache.field("history_pages")[index]) == len(expected["key_codes"])
    for name, got in cache.sequence(index).arrays().items():
        want = expected[name]
        assert got.dtype == want.dtype and got.shape == want.shape, f"{name} {got.dtype} {got.shape}"
        where = np.argwhere(got != want)
        assert not len(where), f"sequence {index}: {name} differs first at {where[0]}, {len(where)} places"


def assert_same(a: PackageCache, b: PackageCache, pairs: list[tuple[int, int]]) -> None:
    """Sequences of two caches hold the same bytes."""
    for left, right in pairs:
        other = b.sequence(right).arrays()
        for name, array in a.sequence(left).arrays().items():
            assert np.array_equal(array, other[name]), f"{name} of sequences {left} and {right}"


class TestLayout:
    """Which bytes a cache holds is a function of the rows and of the length alone."""

    def test_one_shot(self, one_shot: PackageCache, sequences: Sequences) -> None:
        """A ragged batch of all lengths, in one go, equals the oracle byte for byte."""
        assert one_shot.field("lengths").tolist() == list(LENGTHS)
        for index, length in enumerate(LENGTHS):
            assert_holds(one_shot, index, sequences.key[index, :length], sequences.value[index, :length])

    @pytest.mark.parametrize("chunk", [1, 64, 400])
    def test_chunked_and_streamed(
        self, framework: Framework, one_shot: PackageCache, sequences: Sequences, chunk: int
    ) -> None:
        """Any chunking, token by token included, leaves the bytes of one go."""
        cache = PackageCache(framework, sequences.rotation, len(LENGTHS), 1000)
        sequences.append_to(cache, chunk)
        assert_same(cache, one_shot, [(i, i) for i in range(len(LENGTHS))])

    def test_single_equals_batch(
        self, framework: Framework, one_shot: PackageCache, sequences: Sequences
    ) -> None:
        """A sequence alone holds the bytes that it holds in a batch."""
        for index in range(len(LENGTHS)):
            cache = PackageCache(framework, sequences.rotation, 1, 1000)
            length = LENGTHS[index]
            if length:
                part = slice(index, index + 1)
                cache.append(sequences.key[part], sequences.value[part], [length])
            assert_same(cache, one_shot, [(0, index)])

    def test_prefill_then_decode(self, framework: Framework) -> None:
        """Prompts in one go, then single tokens at different lengths in one batch, past page boundaries."""
        data = make_sequences((390, 450, 70), seed=1)
        prompts = np.array([300, 383, 1])
        cache = PackageCache(framework, data.rotation, 3, 512)
        cache.append(data.key[:, :390], data.value[:, :390], prompts)
        for step in range(90):
            at = np.minimum(prompts + step, data.lengths - 1)
            new = (prompts + step < data.lengths).astype(np.int32)
            batch = np.arange(3)
            key, value = data.key[batch, at][:, None].copy(), data.value[batch, at][:, None].copy()
            key[new == 0], value[new == 0] = NAN, NAN
            cache.append(key, value, new)
        for index in range(3):
            length = int(cache.field("lengths")[index])
            assert length == min(int(data.lengths[index]), int(prompts[index]) + 90)
            assert_holds(cache, index, data.key[index, :length], data.value[index, :length])

    @pytest.mark.parametrize(("sink", "recent"), [(0, 64), (128, 192)])
    def test_other_windows(self, framework: Framework, sink: int, recent: int) -> None:
        """Sink and recent sizes are settings; the layout follows from them."""
        lengths = (sink + recent - 1, sink + recent + 64, sink + recent + 200)
        data = make_sequences(lengths, seed=2)
        cache = PackageCache(framework, data.rotation, 3, 600, sink_tokens=sink, recent_tokens=recent)
        data.append_to(cache, 50)
        for index, length in enumerate(lengths):
            assert_holds(cache, index, data.key[index, :length], data.value[index, :length])

    def test_shared_rotation(self, framework: Framework) -> None:
        """One rotation for all heads of the layer."""
        data = make_sequences((500,), seed=3)
        data.rotation = rows.make_rotation(np.random.default_rng(3), 1, HEAD_DIM, "hadamard")
        cache = PackageCache(framework, data.rotation, 1, 500, heads=HEADS)
        data.append_to(cache, 500)
        assert_holds(cache, 0, data.key[0], data.value[0])

    def test_hostile_rows(self, framework: Framework) -> None:
        """NaN, infinities, subnormals and any bit pattern travel through window and history as defined."""
        data = make_sequences((1024,), seed=4)
        rng = np.random.default_rng(4)
        for array in (data.key, data.value):
            array[0] = rows.mixed_rows(rng, (1024, HEADS, HEAD_DIM))
            array[0, 700:] = rows.all_bit_patterns(rng, (324, HEADS, HEAD_DIM))
        cache = PackageCache(framework, data.rotation, 1, 1024)
        data.append_to(cache, 100)
        assert_holds(cache, 0, data.key[0], data.value[0])

    def test_any_physical_pages(self, framework: Framework) -> None:
        """Through shuffled page tables the same bytes are found; pages of nobody stay untouched."""
        data = make_sequences((700, 450), seed=5)
        config_pages, slots = 8, 6
        rng = np.random.default_rng(5)
        cache = PackageCache(framework, data.rotation, 2, 900, num_pages=40, num_window_pages=20)
        assert cache.field("page_table").shape[1] >= config_pages
        columns = cache.field("page_table").shape[1]
        pages = rng.permutation(np.arange(1, 40))[: 2 * columns].reshape(2, columns).astype(np.int32)
        windows = rng.permutation(np.arange(1, 20))[: 2 * slots].reshape(2, slots).astype(np.int32)
        cache.set_fields(page_table=pages, window_table=windows)
        data.append_to(cache, 90)
        for index, length in enumerate((700, 450)):
            assert_holds(cache, index, data.key[index, :length], data.value[index, :length])
        free = np.setdiff1d(np.arange(40), [*pages[0, :5], *pages[1, :2]])
        assert 0 in free
        for name in ("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean"):
            assert not cache.field(name)[free].any(), name
        unowned = np.setdiff1d(np.arange(20), windows)
        assert not cache.field("window_key")[unowned].any()
        assert not cache.field("window_value")[unowned].any()

    def test_neighbours_do_not_matter(self, framework: Framework, sequences: Sequences) -> None:
        """Other rows in sequence B leave every byte of sequence A as it was."""
        data = make_sequences((450, 450), seed=6)
        before = data.append_to(PackageCache(framework, data.rotation, 2, 450), 450).sequence(0).arrays()
        data.key[1], data.value[1] = NAN, NAN
        after = data.append_to(PackageCache(framework, data.rotation, 2, 450), 450).sequence(0).arrays()
        assert all(np.array_equal(before[name], after[name]) for name in before)

    def test_read_back(self, one_shot: PackageCache, sequences: Sequences) -> None:
        """Reading gives raw window rows and reconstructed history, to float32 accuracy."""
        for index in (0, 1, 4, 8, 11):
            length = LENGTHS[index]
            expected = oracle.read_sequence(one_shot.sequence(index), sequences.rotation)
            for got, want in zip(one_shot.read(index), expected):
                assert got.dtype == np.float32 and got.shape == (length, HEADS, HEAD_DIM)
                assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)

    def test_live_bytes(self, one_shot: PackageCache) -> None:
        """Bytes in use, counted exactly: 34 D + 256 per INT2 page and head, raw rows elsewhere."""
        live = one_shot.module.live_bytes(one_shot.cache)
        history = [oracle.history_pages(length) for length in LENGTHS]
        window = [-(-length // 64) - pages for length, pages in zip(LENGTHS, history)]
        assert live["int2_pages"] == sum(history) and live["window_pages"] == sum(window)
        assert live["int2"] == sum(history) * HEADS * (34 * HEAD_DIM + 256)
        assert live["window"] == sum(window) * HEADS * 2 * 64 * HEAD_DIM * 2
        assert live["total"] == live["int2"] + live["window"]
        assert live["bfloat16"] == sum(LENGTHS) * HEADS * HEAD_DIM * 4
        assert live["tokens"] == sum(LENGTHS)


def test_packages_agree(sequences: Sequences) -> None:
    """Every array of the two caches is equal after the same calls, bit for bit, page tables included."""
    for one in FRAMEWORKS.values():
        if not one.installed():
            pytest.skip(f"{one.name} is not installed")
    caches = [
        sequences.append_to(PackageCache(framework, sequences.rotation, len(LENGTHS), 1000), 100)
        for framework in FRAMEWORKS.values()
    ]
    for name in ARRAYS:
        a, b = (cache.field(name) for cache in caches)
        assert a.dtype == b.dtype and np.array_equal(a, b), name


class TestErrors:
    """Bad input is refused by name, before anything changes."""

    def make(self, framework: Framework) -> PackageCache:
        rotation = rows.make_rotation(np.random.default_rng(0), HEADS, HEAD_DIM)
        return PackageCache(framework, rotation, 2, 400)

    def refuse(self, cache: PackageCache, error: str, match: str, shape=(2, 8, HEADS, HEAD_DIM), new=(8, 8)):
        before = {name: cache.field(name).copy() for name in ARRAYS}
        bits = np.full(shape, 0x3F80, dtype=np.uint16)
        with pytest.raises(getattr(cache.framework.module("core.errors"), error), match=match):
            cache.append(bits, bits, new, compiled=False)
        assert all(np.array_equal(before[name], cache.field(name)) for name in ARRAYS), "the cache changed"

    @pytest.mark.parametrize(
        "shape",
        [(2, 8, 3, HEAD_DIM), (2, 8, HEADS, 80), (3, 8, HEADS, HEAD_DIM), (8, HEADS, HEAD_DIM)],
        ids=str,
    )
    def test_row_shapes(self, framework: Framework, shape: tuple[int, ...]) -> None:
        self.refuse(self.make(framework), "ShapeError", "rows", shape)

    def test_new_lengths(self, framework: Framework) -> None:
        cache = self.make(framework)
        self.refuse(cache, "ShapeError", "new_lengths", new=(8,))
        self.refuse(cache, "ShapeError", "-1", new=(8, -1))

    def test_unequal_rows(self, framework: Framework) -> None:
        """Key and value rows of different shapes."""
        cache = self.make(framework)
        key = framework.bfloat16(np.zeros((2, 8, HEADS, HEAD_DIM), np.uint16), "cpu")
        new_lengths = framework.array(np.array([8, 8], np.int32), "cpu")
        for value in (key[:, :4], key[..., :48]):
            with pytest.raises(framework.module("core.errors").ShapeError, match="value"):
                cache.module.append_rows(cache.cache, cache.rotation, key, value, new_lengths)

    def test_row_dtype(self, framework: Framework) -> None:
        cache = self.make(framework)
        rows_ = framework.array(np.zeros((2, 8, HEADS, HEAD_DIM), np.int32), "cpu")
        new_lengths = framework.array(np.array([8, 8], np.int32), "cpu")
        with pytest.raises(framework.module("core.errors").DTypeError, match="int32"):
            cache.module.append_rows(cache.cache, cache.rotation, rows_, rows_, new_lengths)

    def test_full(self, framework: Framework) -> None:
        """One token more than the tables hold: an error, and nothing changed."""
        cache = self.make(framework)
        capacity = cache.cache.capacity
        assert capacity >= 400
        shape = (2, capacity, HEADS, HEAD_DIM)
        bits = np.full(shape, 0x3F80, dtype=np.uint16)
        cache.append(bits, bits, [capacity, 3])
        self.refuse(cache, "CacheFullError", str(capacity), new=(1, 1))

    @pytest.mark.parametrize("page", [-1, 999])
    @pytest.mark.parametrize("table", ["page_table", "window_table"])
    def test_table_out_of_range(self, framework: Framework, table: str, page: int) -> None:
        cache = self.make(framework)
        entries = cache.field(table).copy()
        entries[1, 0] = page
        self.refuse(cache.set_fields(**{table: entries}), "OscarError", str(page))

    def test_missing_pages(self, framework: Framework) -> None:
        """A table that names the reserved page 0 where a page is needed."""
        cache = self.make(framework)
        cache.set_fields(window_table=np.zeros_like(cache.field("window_table")))
        self.refuse(cache, "CacheFullError", "window pages")

    @pytest.mark.parametrize(
        "settings",
        [
            {"head_dim": 72},
            {"head_dim": 528},
            {"head_dim": 0},
            {"num_query_heads": 5},
            {"num_key_value_heads": 0},
            {"sink_tokens": 63},
            {"recent_tokens": 0},
            {"recent_tokens": 100},
        ],
        ids=str,
    )
    def test_geometry(self, framework: Framework, settings: dict[str, int]) -> None:
        """Head dimension, GQA ratio and window sizes; the message names the value."""
        config = framework.module("core.config")
        good = {"num_key_value_heads": 2, "num_query_heads": 4, "head_dim": 64}
        with pytest.raises(config.ConfigError, match=str(next(iter(settings.values())))):
            config.CacheConfig(**{**good, **settings})

    @pytest.mark.parametrize(("batch", "max_length"), [(0, 100), (1, 0)])
    def test_sizes(self, framework: Framework, batch: int, max_length: int) -> None:
        rotation = rows.make_rotation(np.random.default_rng(0), HEADS, HEAD_DIM)
        with pytest.raises(framework.module("core.errors").ConfigError):
            PackageCache(framework, rotation, batch, max_length)

    def test_swapped_roles(self, framework: Framework) -> None:
        """Key and value matrices in each other's place are refused, naming layer and field."""
        fields = rows.make_rotation(np.random.default_rng(0), HEADS, HEAD_DIM, "skewed")
        swapped = {
            **fields,
            "key_transform": fields["value_transform"],
            "value_transform": fields["key_transform"],
        }
        validate = framework.module("rotations.rotation").validate_layer
        sizes = {"layer_id": 7, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM}
        validate(framework.layer_rotation(fields, "cpu"), **sizes)
        with pytest.raises(framework.module("core.errors").OscarError, match=r"layer 7.*transform"):
            validate(framework.layer_rotation(swapped, "cpu"), **sizes)
