"""Wrong arguments, gradients and full tables: refused by name before anything runs, or visible afterwards."""

from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework

HEADS, QUERY_HEADS, HEAD_DIM = 2, 4, 32
SCALE = HEAD_DIM**-0.5


class Call:
    """The arguments of `attend`, right unless something is changed."""

    def __init__(self, framework: Framework, tokens: int = 10, max_length: int = 512, dense: bool = False):
        self.framework = framework
        self.cache_module = framework.module("cache")
        config = framework.module("core.config").CacheConfig(HEADS, QUERY_HEADS, HEAD_DIM)
        allocate = self.cache_module.allocate_dense_cache if dense else self.cache_module.allocate_layer_cache
        self.arguments = {
            "query": self.floats(1, tokens, QUERY_HEADS, HEAD_DIM),
            "key": self.floats(1, tokens, HEADS, HEAD_DIM),
            "value": self.floats(1, tokens, HEADS, HEAD_DIM),
            "cache": allocate(config, 1, max_length),
            "rotation": self.rotation(HEADS, HEAD_DIM),
            "new_lengths": framework.array(np.array([tokens], np.int32), "cpu"),
            "softmax_scale": SCALE,
        }

    def floats(self, *shape: int) -> Any:
        values = np.random.default_rng(len(shape)).normal(0, 1, shape).astype(np.float32)
        return self.framework.array(values, "cpu")

    def integers(self, *shape: int) -> Any:
        return self.framework.array(np.ones(shape, np.int32), "cpu")

    def rotation(self, heads: int, head_dim: int, **changes: Any) -> Any:
        fields = rows.make_rotation(np.random.default_rng(0), heads, head_dim, "channel_balanced")
        return self.framework.layer_rotation(fields | changes, "cpu")

    def run(self, **changes: Any) -> Any:
        return self.cache_module.attend(**(self.arguments | changes))


WRONG = {
    "no tokens": lambda c: {n: x[:, :0] for n, x in c.arguments.items() if n in ("query", "key", "value")},
    "query heads": lambda c: {"query": c.floats(1, 10, 6, HEAD_DIM)},
    "query heads no multiple": lambda c: {"query": c.floats(1, 10, 3, HEAD_DIM)},
    "key heads": lambda c: {"key": c.floats(1, 10, 1, HEAD_DIM)},
    "head_dim": lambda c: {"query": c.floats(1, 10, QUERY_HEADS, 64)},
    "batch": lambda c: {"query": c.floats(2, 10, QUERY_HEADS, HEAD_DIM)},
    "one query, ten keys": lambda c: {"query": c.floats(1, 1, QUERY_HEADS, HEAD_DIM)},
    "ten queries, five keys": lambda c: {n: c.floats(1, 5, HEADS, HEAD_DIM) for n in ("key", "value")},
    "key and value differ": lambda c: {"value": c.floats(1, 9, HEADS, HEAD_DIM)},
    "no axis of tokens": lambda c: {"query": c.floats(1, QUERY_HEADS, HEAD_DIM)},
    "integer query": lambda c: {"query": c.integers(1, 10, QUERY_HEADS, HEAD_DIM)},
    "integer rows": lambda c: {"value": c.integers(1, 10, HEADS, HEAD_DIM)},
    "float lengths": lambda c: {"new_lengths": c.floats(1)},
    "a list of lengths": lambda c: {"new_lengths": [10]},
    "two lengths": lambda c: {"new_lengths": c.integers(2)},
    "more rows than given": lambda c: {"new_lengths": 11 * c.integers(1)},
    "negative rows": lambda c: {"new_lengths": -1 * c.integers(1)},
    "short lengths": lambda c: {"new_lengths": c.framework.array(np.ones(1, np.int16), "cpu")},
    "a list of queries": lambda c: {"query": [[[1.0]]]},
    "no values": lambda c: {"value": None},
    "scale NaN": lambda c: {"softmax_scale": float("nan")},
    "scale infinite": lambda c: {"softmax_scale": float("inf")},
    "scale 0": lambda c: {"softmax_scale": 0},
    "scale negative": lambda c: {"softmax_scale": -0.2},
    "scale missing": lambda c: {"softmax_scale": None},
    "window 0": lambda c: {"sliding_window": 0},
    "window negative": lambda c: {"sliding_window": -1},
    "window of a fraction": lambda c: {"sliding_window": 99.5},
    "a scalar length": lambda c: {"new_lengths": c.integers()},
    "no rotation": lambda c: {"rotation": None},
    "rotation heads": lambda c: {"rotation": c.rotation(3, HEAD_DIM)},
    "rotation head_dim": lambda c: {"rotation": c.rotation(HEADS, 64)},
    "rotation dtype": lambda c: {
        "rotation": c.rotation(HEADS, HEAD_DIM, key_transform=np.zeros((HEADS, HEAD_DIM, HEAD_DIM), np.int32))
    },
    "sink logits": lambda c: {"sink_logits": c.floats(QUERY_HEADS - 1)},
    "implementation": lambda c: {"implementation": "cuda"},
}


@pytest.mark.parametrize("case", [name for name in WRONG if name != "implementation"])
def test_the_same_refusal_in_both_packages(case: str) -> None:
    """A named error of the same words, with nothing stored (51)."""
    messages = set()
    for framework in FRAMEWORKS.values():
        if not framework.installed():
            pytest.skip(f"{framework.name} is not installed")
        call = Call(framework)
        errors = framework.module("core.errors")
        with pytest.raises((errors.ShapeError, errors.DTypeError, errors.ConfigError)) as caught:
            call.run(**WRONG[case](call))
        messages.add((type(caught.value).__name__, str(caught.value).split("\n---")[0]))
        assert framework.numpy(call.arguments["cache"].lengths).tolist() == [0]
    assert len(messages) == 1, messages


def transforms(c: Call, *names: str) -> list[Any]:
    return [getattr(c.arguments["rotation"], name) for name in names]


def pages(c: Call, count: int = 1) -> Any:
    return c.floats(count, 64, HEADS, HEAD_DIM)


def page_pool(c: Call, m: Any) -> Any:
    sizes = {"int2_pages": 9, "window_pages": 9, "int2_page_bytes": 1, "window_page_bytes": 1}
    pool = m("core.page_pool").PagePool(c.arguments["cache"].config, **sizes)
    pool.create()
    return pool


ELSEWHERE = {
    "integer pages": lambda c, m: m("quantize").quantize_key_pages(
        c.integers(1, 64, HEADS, HEAD_DIM), *transforms(c, "key_transform", "key_multiplier")
    ),
    "integer rows": lambda c, m: m("quantize").quantize_rows(
        c.integers(64, HEADS, HEAD_DIM), *transforms(c, "key_transform", "key_multiplier", "value_mean")
    ),
    "a list of pages": lambda c, m: m("quantize").page_key_mean([[[0.0]]]),
    "fewer pages of keys": lambda c, m: m("ops").quantize_pages(
        pages(c), pages(c, 2), c.arguments["rotation"]
    ),
    "words of floats": lambda c, m: m("quantize").dequantize_key_pages(
        c.floats(1, HEADS, 64, 2), c.floats(1, HEADS, 64), c.floats(1, HEADS, HEAD_DIM),
        *transforms(c, "query_transform"),
    ),
    "words of another head_dim": lambda c, m: m("quantize").dequantize_value_pages(
        c.integers(1, HEADS, 64, 4), c.floats(1, HEADS, 64), *transforms(c, "value_mean", "output_transform")
    ),
    "scales of one token": lambda c, m: m("quantize").dequantize_value_pages(
        c.integers(1, HEADS, HEAD_DIM, 4), c.floats(1, HEADS, 1),
        *transforms(c, "value_mean", "output_transform"),
    ),
    "a sequence past the batch": lambda c, m: m("cache").read_layer_cache(
        c.arguments["cache"], c.arguments["rotation"], 1
    ),
    "a sequence before it": lambda c, m: m("cache").read_layer_cache(
        c.arguments["cache"], c.arguments["rotation"], -1
    ),
    "half a token of room": lambda c, m: m("cache").allocate_layer_cache(
        c.arguments["cache"].config, 1, 512.5
    ),
    "half a window": lambda c, m: m("cache").allocate_dense_cache(c.arguments["cache"].config, 1, 512, 70.5),
    "tokens of a fraction": lambda c, m: page_pool(c, m).create([1.5] * 99),
    "tokens of a fraction to append": lambda c, m: page_pool(c, m).begin_append([0], [2], [[1, 1.5]]),
    "no heads": lambda c, m: m("rotations.rotation").hadamard_rotation(0, HEAD_DIM),
}  # fmt: skip


@pytest.mark.parametrize("case", ELSEWHERE)
def test_the_same_refusal_beside_attend(case: str) -> None:
    """51: what quantizes, restores, reads and allocates checks its arguments too."""
    messages = set()
    for framework in FRAMEWORKS.values():
        if not framework.installed():
            pytest.skip(f"{framework.name} is not installed")
        with pytest.raises(framework.module("core.errors").OscarError) as caught:
            ELSEWHERE[case](Call(framework), framework.module)
        messages.add((type(caught.value).__name__, str(caught.value)))
    assert len(messages) == 1, messages


RING = {
    "no window": (128, None, None),
    "a longer window": (128, None, 129),
    "a ring shorter than its window": (128, 100, 128),
    "what else is wrong": (128, None, -3),
}


@pytest.mark.parametrize("case", RING)
def test_a_ring_serves_its_own_window_only(case: str) -> None:
    """51: rows that the ring has overwritten are not silently missing from a longer window."""
    window, room, asked = RING[case]
    messages = set()
    for framework in FRAMEWORKS.values():
        if not framework.installed():
            pytest.skip(f"{framework.name} is not installed")
        call, errors = Call(framework, 101), framework.module("core.errors")
        config = framework.module("core.config").CacheConfig(HEADS, QUERY_HEADS, HEAD_DIM)
        ring = call.cache_module.allocate_dense_cache(config, 1, room or 512, window)
        with pytest.raises((errors.ConfigError, errors.CacheFullError)) as caught:
            call.run(cache=ring, sliding_window=asked)
        messages.add((type(caught.value).__name__, str(caught.value)))
        assert framework.numpy(ring.lengths).tolist() == [0]
    assert len(messages) == 1, messages


def test_an_unknown_implementation(framework: Framework) -> None:
    call = Call(framework)
    with pytest.raises(framework.module("core.errors").ConfigError, match="'cuda'"):
        call.run(**WRONG["implementation"](call))
    assert framework.numpy(call.arguments["cache"].lengths).tolist() == [0]


def test_a_named_kernel_on_a_cpu(framework: Framework) -> None:
    """A named choice names the device that it cannot serve; None takes the reference there (12)."""
    call = Call(framework)
    (name,) = {"jax": ("mosaic_gpu",), "torch": ("gluon",)}[framework.name]
    with pytest.raises(NotImplementedError, match="cpu"):
        call.run(implementation=name)
    out, _ = call.run(implementation=None)
    want, _ = Call(framework).run(implementation=framework.reference)
    assert (framework.numpy(out) == framework.numpy(want)).all()


# --- past the capacity where nobody checks -------------------------------------------------------------


@pytest.mark.parametrize("dense", [False, True], ids=["int2", "dense"])
def test_past_the_capacity_is_nan_in_that_sequence_only(framework: Framework, dense: bool) -> None:
    """52: unchecked rows past the capacity make the sequence NaN, are reported, and leave its neighbour."""
    cache_module = framework.module("cache")
    config = framework.module("core.config").CacheConfig(1, 1, HEAD_DIM)
    rotation = framework.layer_rotation(rows.make_rotation(np.random.default_rng(0), 1, HEAD_DIM), "cpu")
    allocate = cache_module.allocate_dense_cache if dense else cache_module.allocate_layer_cache
    append = framework.compiled(cache_module.append_rows, "check")
    decode = framework.compiled(framework.module("attention").decode_attention, "softmax_scale")
    stored = [
        framework.bfloat16(
            oracle.to_bfloat16(np.random.default_rng(i).normal(0, 1, (2, 900, 1, HEAD_DIM))), "cpu"
        )
        for i in (1, 2)
    ]
    query = framework.array(np.random.default_rng(3).normal(0, 1, (2, 1, HEAD_DIM)).astype(np.float32), "cpu")
    outs = {}
    for room in (256, 1024):
        cache = allocate(config, 2, room)
        counts = framework.array(np.array([900, 100], np.int32), "cpu")
        cache = append(cache, rotation, *stored, counts, check=False)
        outs[room] = framework.numpy(decode(query, cache, rotation, softmax_scale=SCALE))
        over = framework.numpy(cache_module.overflowed(cache)).tolist()
        assert over == [room == 256, False]
        step = [x[:, :1] for x in stored]
        cache = append(cache, rotation, *step, framework.array(np.ones(2, np.int32), "cpu"), check=False)
        later = framework.numpy(decode(query, cache, rotation, softmax_scale=SCALE))
        assert np.isnan(later[0]).all() == (room == 256) and np.isfinite(later[1]).all()
    assert np.isnan(outs[256][0]).all() and np.isfinite(outs[1024]).all()
    np.testing.assert_allclose(outs[256][1], outs[1024][1], rtol=1e-5, atol=1e-6)


# --- gradients -----------------------------------------------------------------------------------------


def gradient(framework: Framework, function: Any, array: Any) -> Any:
    """Gradient of the sum of squares of `function` at an array."""
    if framework.name == "jax":
        import jax

        return jax.grad(lambda x: (function(x) ** 2).sum())(array)
    array = array.detach().requires_grad_()
    (function(array) ** 2).sum().backward()
    return array.grad


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_no_gradient_through_int2(framework: Framework, tokens: int, name: str) -> None:
    """53: attention over an INT2 cache has no gradient, and says so instead of giving zeros."""
    call = Call(framework, tokens)
    with pytest.raises(framework.module("core.errors").GradientError, match="DenseCache"):
        gradient(framework, lambda x: call.run(**{name: x})[0], call.arguments[name])


@pytest.mark.parametrize(
    "name", ["quantize_rows", "quantize_key_pages", "quantize_value_pages", "page_key_mean"]
)
def test_no_gradient_through_the_quantizer(framework: Framework, name: str) -> None:
    call = Call(framework)
    rotation, pages = call.arguments["rotation"], call.floats(1, 64, HEADS, HEAD_DIM)
    more = {
        "page_key_mean": (),
        "quantize_key_pages": (rotation.key_transform, rotation.key_multiplier),
    }.get(name, (rotation.value_transform, rotation.value_multiplier, rotation.value_mean))
    function = getattr(framework.module("quantize"), name)

    def scale(x: Any) -> Any:
        found = function(x, *more)
        return found if name == "page_key_mean" else found[1]

    with pytest.raises(framework.module("core.errors").GradientError, match=name):
        gradient(framework, scale, pages)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_dense_cache_has_its_gradient(framework: Framework, name: str) -> None:
    """Of a chunk over an empty BF16 cache, against finite differences; long enough for two blocks."""
    call = Call(framework, 520, max_length=600, dense=True)
    array = call.arguments[name]
    found = framework.numpy(gradient(framework, lambda x: call.run(**{name: x})[0], array))
    values = np.array(framework.numpy(array))
    direction = np.random.default_rng(5).normal(0, 1, values.shape).astype(np.float32)

    def loss(step: float) -> float:
        moved = framework.array((values + step * direction).astype(np.float32), "cpu")
        out = framework.numpy(Call(framework, 520, max_length=600, dense=True).run(**{name: moved})[0])
        return float((out.astype(np.float64) ** 2).sum())

    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    # Float32 sums over 520 tokens, and a difference of second order in 1e-2.
    assert abs(float((found * direction).sum()) - slope) <= 2e-2 * max(1.0, abs(slope))
