"""The float32 reference attention of both packages against dense float64 attention on the same cache."""

from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import Framework, PackageCache

HEADS, HEAD_DIM, TOKENS = 2, 64, 5
LENGTHS = (1, 320, 500, 0)  # sink only; no history yet; history of two pages; empty
SCALE = HEAD_DIM**-0.5
TOLERANCE = 1e-5
NAN = np.uint16(0x7FC0)


class Case:
    """A ragged batch in the cache of one framework, and new rows to attend with."""

    def __init__(self, framework: Framework, dense: bool = False, **settings: Any):
        rng = np.random.default_rng(0)
        self.batch = len(LENGTHS)
        self.rotation = rows.make_rotation(rng, HEADS, HEAD_DIM, "channel_balanced")
        shape = (self.batch, max(LENGTHS), HEADS, HEAD_DIM)
        self.stored = [self.rows_of(rng, shape) for _ in range(2)]
        for bits in self.stored:
            for b, length in enumerate(LENGTHS):
                bits[b, length:] = NAN
        self.cache = PackageCache(framework, self.rotation, self.batch, 600, dense=dense, **settings)
        self.cache.append(self.stored[0], self.stored[1], LENGTHS)
        self.new = [self.rows_of(rng, (self.batch, TOKENS, HEADS, HEAD_DIM)) for _ in range(2)]
        self.new_lengths = np.array([TOKENS, 1, TOKENS - 1, 3], dtype=np.int32)
        for bits in self.new:
            for b, length in enumerate(self.new_lengths):
                bits[b, length:] = NAN

    @staticmethod
    def rows_of(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return oracle.to_bfloat16(rng.normal(0, 1, shape) + rng.normal(0, 1, shape[2:]))

    def dequantized(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of a sequence as attention sees them, by the oracle from the stored bytes."""
        if hasattr(self.cache.cache, "key"):
            key, value = (oracle.from_bfloat16(bits[b, : LENGTHS[b]]) for bits in self.stored)
            return key.astype(np.float64), value.astype(np.float64)
        return oracle.read_sequence(self.cache.sequence(b), self.rotation)


def queries(tokens: int, group: int, seed: int = 1) -> np.ndarray:
    shape = (len(LENGTHS), tokens, HEADS * group, HEAD_DIM)
    return np.random.default_rng([seed, group]).normal(0, 1, shape).astype(np.float32)


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Relative error at most 1e-5, measured for every query on its own."""
    assert got.dtype == np.float32
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert error.max() <= TOLERANCE, f"relative error {error.max():.2e}"


def check_decode(case: Case, group: int, **options: Any) -> None:
    query = queries(1, group)
    got = case.cache.decode_attention(query[:, 0], softmax_scale=SCALE, **options)
    for b, length in enumerate(LENGTHS):
        if length == 0:
            assert not got[b].any(), "an empty sequence attends to nothing"
            continue
        expected = oracle.attention(query[b], *case.dequantized(b), softmax_scale=SCALE, **options)
        assert_close(got[b], expected[0])


def check_chunk(case: Case, group: int, **options: Any) -> None:
    query = queries(TOKENS, group, seed=2)
    got = case.cache.chunk_attention(
        query, *case.new, new_lengths=case.new_lengths, softmax_scale=SCALE, **options
    )
    for b, new in enumerate(case.new_lengths):
        key, value = (
            np.concatenate([old, oracle.from_bfloat16(bits[b, :new]).astype(np.float64)])
            for old, bits in zip(case.dequantized(b), case.new)
        )
        expected = oracle.attention(query[b, :new], key, value, softmax_scale=SCALE, **options)
        assert_close(got[b, :new], expected)


@pytest.fixture(scope="module")
def case(framework: Framework) -> Case:
    return Case(framework)


@pytest.mark.parametrize("group", range(1, 17))
def test_decode_group_sizes(case: Case, group: int) -> None:
    """One token over sink | INT2 | recent, for every GQA ratio from 1 to 16."""
    check_decode(case, group)


@pytest.mark.parametrize("group", [1, 7, 16])
def test_chunk_group_sizes(case: Case, group: int) -> None:
    """A ragged chunk of queries; its own rows are attended exactly and causally."""
    check_chunk(case, group)


@pytest.mark.parametrize("window", [1, 3, 64, 250, 370, 450, 5000])
def test_sliding_window(case: Case, window: int) -> None:
    """A window that ends in the recent part, inside an INT2 page, in the sink, or beyond all."""
    check_decode(case, 2, sliding_window=window)
    if window in (1, 3, 370):
        check_chunk(case, 2, sliding_window=window)


@pytest.mark.parametrize("size", [-5.0, 3.0, 30.0])
def test_sink_logits(case: Case, size: float) -> None:
    """Logits that enter the denominator alone, far below, among and far above the scores."""
    logits = (size + np.arange(HEADS * 3)).astype(np.float32)
    check_decode(case, 3, sink_logits=logits)
    check_chunk(case, 3, sink_logits=logits, sliding_window=200)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(case: Case, softcap: float) -> None:
    """Scores bent by a tanh, strongly and hardly, in every segment; beside sink logits and a window."""
    check_decode(case, 2, softcap=softcap)
    check_chunk(case, 2, softcap=softcap, sliding_window=370, sink_logits=np.ones(2 * HEADS, np.float32))


def test_kernels_refuse_a_softcap_by_name(framework: Framework) -> None:
    """A named kernel does not drop the cap, a wrong one is no cap; nothing is stored."""
    errors = framework.module("core.errors")
    case = Case(framework, query_heads=2 * HEADS)
    arguments = [queries(1, 2), *(bits[:, :1] for bits in case.new)]
    options = {"new_lengths": np.ones(case.batch, np.int32), "softmax_scale": SCALE}
    kernel = "mosaic_gpu" if framework.name == "jax" else "triton"
    with pytest.raises(NotImplementedError, match=f"implementation = '{kernel}' with softcap = 3.0"):
        case.cache.attend(*arguments, softcap=3.0, implementation=kernel, **options)
    with pytest.raises(errors.ConfigError, match=r"softcap = 0\.0, allowed: a finite"):
        case.cache.attend(*arguments, softcap=0.0, **options)
    assert case.cache.field("lengths").tolist() == list(LENGTHS)


def test_other_windows(framework: Framework) -> None:
    """No sink and one recent page: almost everything is read from INT2 pages."""
    case = Case(framework, sink_tokens=0, recent_tokens=64)
    check_decode(case, 2)
    check_chunk(case, 2)


def test_dense_cache(framework: Framework) -> None:
    """The same functions over the BF16 cache."""
    case = Case(framework, dense=True)
    check_decode(case, 3)
    check_chunk(case, 3, sliding_window=100, sink_logits=np.ones(3 * HEADS, np.float32))
    check_decode(case, 3, softcap=0.5)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_attend(framework: Framework, tokens: int) -> None:
    """The one call of a decoder layer: one token is stored first, a chunk afterwards; both are stored."""
    case = Case(framework, query_heads=2 * HEADS)
    query = queries(tokens, 2, seed=3)
    new = [bits[:, :tokens] for bits in case.new]
    lengths = np.minimum(case.new_lengths, tokens)
    before = [case.dequantized(b) for b in range(case.batch)]
    got = case.cache.attend(query, *new, new_lengths=lengths, softmax_scale=SCALE)
    assert got.shape == query.shape
    assert case.cache.field("lengths").tolist() == [a + b for a, b in zip(LENGTHS, lengths)]
    for b, count in enumerate(lengths):
        if tokens == 1:
            key, value = case.dequantized(b)
        else:
            key, value = (
                np.concatenate([old, oracle.from_bfloat16(bits[b, :count])])
                for old, bits in zip(before[b], new)
            )
        expected = oracle.attention(query[b, :count], key, value, softmax_scale=SCALE)
        assert_close(got[b, :count], expected)


@pytest.mark.parametrize("dense", [False, True])
def test_result_has_the_dtype_of_the_query(framework: Framework, dense: bool) -> None:
    """A bf16 query gets the float32 result rounded once: of one token and of a chunk."""
    case = Case(framework, dense=dense)
    ops, cache = framework.module("ops"), case.cache
    options = {"softmax_scale": SCALE, "implementation": framework.reference}
    bits = oracle.to_bfloat16(queries(TOKENS, 2))
    exact = oracle.from_bfloat16(bits).astype(np.float32)
    query, key, value = (framework.bfloat16(rows, "cpu") for rows in (bits, *case.new))
    got = ops.decode_attention(query[:, 0], cache.cache, cache.rotation, **options)
    want = cache.decode_attention(exact[:, 0], softmax_scale=SCALE)
    assert (framework.numpy(got) == oracle.to_bfloat16(want)).all()
    new_lengths = framework.array(case.new_lengths, "cpu")
    got = ops.chunk_attention(
        query, key, value, cache.cache, cache.rotation, new_lengths=new_lengths, **options
    )
    want = cache.chunk_attention(exact, *case.new, new_lengths=case.new_lengths, softmax_scale=SCALE)
    for b, count in enumerate(case.new_lengths):
        assert (framework.numpy(got)[b, :count] == oracle.to_bfloat16(want[b, :count])).all()


def test_large_scores_do_not_overflow(case: Case) -> None:
    """Scores in the thousands: the softmax is taken about its maximum, segment by segment."""
    query = queries(1, 1) * 300
    got = case.cache.decode_attention(query[:, 0], softmax_scale=SCALE)
    for b, length in enumerate(LENGTHS[:3]):
        assert np.isfinite(got[b]).all() and length
        expected = oracle.attention(query[b], *case.dequantized(b), softmax_scale=SCALE)
        error = np.linalg.norm(got[b] - expected[0]) / np.linalg.norm(expected[0])
        assert error <= 1e-3, error  # float32 scores of size 1e3 carry an error of 1e-4


@pytest.mark.parametrize("shape", [(4, 3, 64), (4, 2, 80), (3, 2, 64)], ids=str)
def test_query_shapes(case: Case, shape: tuple[int, ...]) -> None:
    """Heads that are no multiple of K, another head_dim, another batch: refused by name."""
    error = case.cache.framework.module("core.errors").ShapeError
    with pytest.raises(error, match="query"):
        case.cache.decode_attention(np.zeros(shape, np.float32), softmax_scale=SCALE)
