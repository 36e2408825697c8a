"""The Mosaic GPU kernels: their bodies executed on the CPU against the reference, every launch lowered for
CUDA without a GPU, and, on a Hopper GPU, the compiled kernels themselves. The cases that all attention
kernels face are in `test_attention_kernels.py`.
"""

import dataclasses
import itertools
import re
import types
import warnings
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.mosaic.gpu")

import jax.numpy as jnp  # noqa: E402

from oscar_jax import attention, ops, packing, quantize  # noqa: E402
from oscar_jax import cache as layer_cache  # noqa: E402
from oscar_jax.cache import LayerCache  # noqa: E402
from oscar_jax.core import cache_format  # noqa: E402
from oscar_jax.core.config import CacheConfig  # noqa: E402
from oscar_jax.core.errors import ShapeError  # noqa: E402
from oscar_jax.pallas.decode import geometry, queries  # noqa: E402
from oscar_jax.pallas.decode import merge as merge_mosaic_gpu  # noqa: E402
from oscar_jax.pallas.decode import mosaic_gpu as decode_mosaic_gpu  # noqa: E402
from oscar_jax.pallas.machine import fragments as frag  # noqa: E402
from oscar_jax.pallas.machine import tuning  # noqa: E402
from oscar_jax.pallas.machine.tuning import DecodePlan, quantize_plan  # noqa: E402
from oscar_jax.pallas.prefill import mosaic_gpu  # noqa: E402
from oscar_jax.pallas.quantize import mosaic_gpu as quantize_mosaic_gpu  # noqa: E402
from oscar_jax.pallas.quantize import page  # noqa: E402
from oscar_jax.pallas.quantize.sequential import Blocks, CodeWords, code_rows, stage_feedback  # noqa: E402
from oscar_jax.rotations.rotation import hadamard_rotation  # noqa: E402
from parity_tests.conformance import rows as row_families  # noqa: E402
from parity_tests.kernels import mosaic_emulator as emulator  # noqa: E402
from parity_tests.kernels.mosaic_launches import emulated, fed_rotation  # noqa: E402

PAGE = cache_format.PAGE_TOKENS
HEAD_DIMS = geometry.HEAD_DIMS
# Of an output entry, relative to the largest one: float16 probabilities and a 15-bit query.
TOLERANCE = 3e-3


# --- shared cases ---------------------------------------------------------------------------------


def random_rotation(heads: int, head_dim: int, rng: np.random.Generator) -> Any:
    rotation = hadamard_rotation(heads, head_dim)
    mean = rng.normal(0, 0.5, rotation.value_mean.shape)
    return dataclasses.replace(rotation, value_mean=jnp.asarray(mean, jnp.bfloat16))


def random_cache(
    heads: int,
    group: int,
    head_dim: int,
    lengths: list[int],
    rng: np.random.Generator,
    cut: bool = False,
    room: int = 0,
) -> LayerCache:
    """Random words, scales and rows under permuted tables; all that no sequence owns is NaN.

    With `cut`, every other sequence was cut inside its INT2 pages: its history reaches past its end. There
    is room for `room` tokens more.
    """
    config = CacheConfig(heads, heads * group, head_dim)
    history = np.array([config.history_pages(n) for n in lengths])
    if cut:
        history[1::2] = [max(0, -(-(n - config.sink_tokens) // PAGE)) for n in lengths[1::2]]
    batch, slots = len(lengths), config.window_slots
    max_pages = max(1, int(history.max())) + -(-room // PAGE)
    pages, window_pages = 1 + int(history.sum()), 1 + batch * slots
    order = iter(1 + rng.permutation(pages - 1))
    table = np.zeros((batch, max_pages), np.int32)
    for b, i in itertools.product(range(batch), range(max_pages)):
        table[b, i] = next(order) if i < history[b] else 0

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        out = size * rng.normal(0, 1, shape)
        out[0] = np.nan
        return out

    def scales(*shape: int, size: float) -> np.ndarray:
        return np.exp(normal(*shape, size=0.5)) * size

    def words(*shape: int) -> Any:
        return jnp.asarray(rng.integers(-(2**31), 2**31, shape), jnp.int32)

    def bfloat16(x: np.ndarray) -> Any:
        return jnp.asarray(x, jnp.bfloat16)

    window = [normal(window_pages, heads, PAGE, head_dim) for _ in range(2)]
    window_table = 1 + rng.permutation(window_pages - 1).reshape(batch, slots)
    cache = LayerCache(
        key_codes=words(pages, heads, PAGE, head_dim // 16),
        value_codes=words(pages, heads, head_dim, 4),
        key_scale=bfloat16(scales(pages, heads, PAGE, size=0.4)),
        value_scale=bfloat16(scales(pages, heads, PAGE, size=3.7)),
        key_page_mean=bfloat16(normal(pages, heads, head_dim)),
        window_key=bfloat16(window[0]),
        window_value=bfloat16(window[1]),
        page_table=jnp.asarray(table),
        window_table=jnp.asarray(window_table, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        history_pages=jnp.asarray(history, jnp.int32),
        config=config,
    )
    free = np.asarray(attention.window_positions(cache)) < 0  # [B, slots, 64]
    for array in window:
        for b, s in itertools.product(range(batch), range(slots)):
            array[window_table[b, s]][:, free[b, s]] = np.nan
    return dataclasses.replace(cache, window_key=bfloat16(window[0]), window_value=bfloat16(window[1]))


def assert_close(got: Any, want: Any) -> None:
    """For every sequence, relative to its largest entry."""
    got, want = np.asarray(got), np.asarray(want)
    assert np.isfinite(got).all()
    for b in range(len(want)):
        error = np.abs(got[b] - want[b]).max() / max(np.abs(want[b]).max(), 1e-6)
        assert error <= TOLERANCE, f"sequence {b}: error {error:.1e}"


# --- index arithmetic and unpack rules --------------------------------------------------------------


def test_unpacked_bytes_are_the_codes_in_the_documented_order() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 4, (PAGE, 128), dtype=np.uint8)
    key_words = np.asarray(packing.pack_key_codes(jnp.asarray(codes))).view(np.uint32)  # [64, 8]
    value_words = np.asarray(packing.pack_value_codes(jnp.asarray(codes))).view(np.uint32)  # [128, 4]
    seen = set()
    for j, c, register, byte in np.ndindex(2, 4, 4, 4):
        channel = frag.byte_channel(2, j, c, register, byte)
        got = frag.unpack_bytes(key_words[:, 2 * c + j])[register] >> (8 * byte) & 0xFF
        assert (got == codes[:, channel] * frag.BYTE_WEIGHTS[register]).all()
        seen.add(channel)
    assert seen == set(range(128))
    seen = set()
    for c, register, half in np.ndindex(4, 8, 2):
        token = frag.half_token(c, register, half)
        got = frag.unpack_halves(value_words[:, c])[register] >> (16 * half) & 0xFFFF
        assert (got == codes[token] * frag.HALF_WEIGHTS[register]).all()
        seen.add(token)
    assert seen == set(range(PAGE))
    seen = set()
    for c, register, byte in np.ndindex(4, 4, 4):
        token = frag.byte_token(c, register, byte)
        got = frag.unpack_bytes(value_words[:, c])[register] >> (8 * byte) & 0xFF
        assert (got == codes[token] * frag.BYTE_WEIGHTS[register]).all()
        seen.add(token)
    assert seen == set(range(PAGE))


def test_rotated_channels_fill_key_words_in_order() -> None:
    n, column = np.divmod(np.arange(256), 8)
    channel = frag.rotated_channel(n, column)
    assert sorted(channel) == list(range(256))
    for lane in range(4):  # what one lane collects from tiles 8j .. 8j+7 is one word
        mine = channel.reshape(32, 8)[:8, 2 * lane : 2 * lane + 2].ravel()
        assert (mine == 16 * lane + np.arange(16)).all()
        for width in (16, 32):  # or its quarter of narrower blocks
            channel_of = frag.rotated_channel(n, column, width).reshape(32, 8)
            mine = channel_of[: width // 8, 2 * lane : 2 * lane + 2].ravel()
            assert (mine == width // 4 * lane + np.arange(width // 4)).all()
            assert sorted(channel_of.ravel()) == list(range(256))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_transform_lies_as_the_products_read_it(head_dim: int) -> None:
    """Products with its two limbs make up those with the columns that rotated_channel names."""
    rng = np.random.default_rng(head_dim)
    limit, columns = cache_format.TRANSFORM_MAX, 64
    transform = rng.integers(-limit, limit + 1, (1, head_dim, head_dim)).astype(np.int16)
    rows = rng.integers(0, 256, (PAGE, head_dim)).astype(np.uint8)
    machine = emulator.Machine(2 * head_dim**2, 4)
    machine.shared.view(np.int32)[:] = np.asarray(page.transform_operand(jnp.asarray(transform))).ravel()
    # Lane 4g + c of warp w: rows 16w + g (+ 8), of k-step s the channels 32 s + 8 c (+ 4) + (0..3).
    warp, g, c = (x.astype(np.int64) for x in np.unravel_index(np.arange(128), (4, 8, 4)))
    for tile in range(0, head_dim // 8, columns // 8):
        total = np.zeros((columns // 2, 128), np.int64)
        for limb, weight in ((0, 256), (1, 1)):
            sums = None
            for s in range(head_dim // 32):
                words = []
                for part, half in np.ndindex(2, 2):
                    channel = (32 * s + 8 * c + 4 * part)[:, None] + np.arange(4)
                    four = rows[(16 * warp + g + 8 * half)[:, None], channel]
                    words.append(emulator.Int(four.view(np.uint32)[:, 0]))
                offset = page.operand_offset(head_dim, limb, s, tile)
                words = machine.wgmma_fence(words)
                start = machine.shared_base
                sums = machine.wgmma_s8(words, start, offset, sums, columns=columns, unsigned_a=True)
            assert sums is not None and (sums[0].value == emulator.POISON).all()  # nobody has waited
            total += weight * np.stack([x.signed for x in machine.wgmma_wait(sums)])
        want = rows.astype(np.int64) @ transform[0].astype(np.int64)
        for i in range(columns // 2):
            channel = frag.rotated_channel(tile + (i >> 2), 2 * c + (i & 1))
            assert (total[i] == want[16 * warp + g + 8 * (i >> 1 & 1), channel]).all()


@pytest.mark.parametrize(("pages", "heads", "kinds"), [(1, 3, 2), (24, 8, 2), (37, 3, 1), (700, 8, 2)])
def test_blocks_share_all_pages(pages: int, heads: int, kinds: int) -> None:
    names = ("key", "value")[:kinds]
    blocks, warpgroups = quantize_plan(pages * heads * kinds, 128)
    shape = page.QuantizeShape(pages, heads, 128, 1, blocks, warpgroups, names)
    seen = {kind: np.zeros((heads, pages), int) for kind in names}

    def run(m: Any, shape: Any, refs: Any, kind: str, head: Any, first: Any, end: Any) -> None:
        if m._active.any():
            numbers = [int(np.broadcast_to(x.value, 128)[m._active][0]) for x in (head, first, end)]
            seen[kind][numbers[0], numbers[1] : numbers[2]] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_mosaic_gpu, "_pages", run)
        for block in range(blocks):
            machine = emulator.Machine(16, 4)
            quantize_mosaic_gpu.quantize_body(machine, shape, (emulator.Int(block),), {})
    assert all((count == 1).all() for count in seen.values())


# --- the emulator itself ----------------------------------------------------------------------------


def test_emulator_delivers_copies_only_when_waited_for() -> None:
    machine = emulator.Machine(4096, 4)
    source = np.arange(128 * 4, dtype=np.int32)
    machine.copy_async(machine.thread * 16, machine.pointer(source).at(machine.thread, 16))
    machine.commit_copies()
    assert (machine.load_shared(machine.thread * 16)[0].value == emulator.POISON).all()
    machine.wait_copies(0)
    assert (machine.load_shared(machine.thread * 16)[0].value == 4 * np.arange(128)).all()


def test_emulator_delivers_bulk_copies_by_their_barrier() -> None:
    machine = emulator.Machine(4096, 4)
    source = np.arange(64, dtype=np.int32)
    barrier, first = emulator.Int(2048), machine.thread.eq(0)

    def fetch(size: int) -> None:
        machine.expect_bytes(barrier, size)
        machine.copy_bulk(emulator.Int(0), machine.pointer(source), 256, barrier)

    machine.when(first, lambda: machine.start_barrier(barrier))
    machine.when(first, lambda: fetch(256))
    assert (machine.load_shared(machine.lane * 4)[0].value == emulator.POISON).all()
    machine.wait_barrier(barrier, emulator.Int(0))
    assert (machine.load_shared(machine.lane * 4)[0].value == machine.lane.value).all()
    machine.when(first, lambda: fetch(512))
    with pytest.raises(AssertionError, match="waits forever"):
        machine.wait_barrier(barrier, emulator.Int(1))


def test_emulator_rounds_fused_sums_down() -> None:
    machine = emulator.Machine(16, 4)
    x = np.array([0.75, -0.75, 2.0**-80, -(2.0**-80), 3.0, 2.0**21 + 0.75], np.float32)
    bias = 1.5 * 2.0**23
    assert (emulator.Float(x).fma_down(1.0, bias).value == bias + np.floor(x)).all()
    x = np.array([2.0**23 + 1, -(2.0**23) - 1, 3.0, -0.75], np.float32)
    assert (emulator.Float(x).add_to_zero(0.5).value == [2.0**23 + 1, -(2.0**23), 3.5, -0.25]).all()
    up = emulator.Int([2**24, 2**24 + 1, -(2**24) - 1]).to_float_up()
    assert (up.value == [2.0**24, 2.0**24 + 2, -(2.0**24)]).all()
    signs = machine.gather_bytes(emulator.Int(0x80), emulator.Int(0x7FFFFFFF), 0xFFB8)
    assert (signs.value == 0x0000_00FF).all()


def test_emulator_refuses_accesses_outside_an_array_and_divided_warps() -> None:
    machine = emulator.Machine(64, 4)
    with pytest.raises(AssertionError):
        machine.load_global(machine.pointer(np.zeros(4, np.int32)).at(machine.thread, 4))
    with pytest.raises(AssertionError, match="divides a warp"):
        machine.branch(machine.lane.lt(3), [machine.Int(0)], lambda carry: carry)


# --- kernel bodies on the CPU -----------------------------------------------------------------------

DECODE_CASES = {
    "paired": (2, 4, 128, {}),
    "separate": (1, 7, 64, {}),
    "tiles": (1, 12, 64, {}),
    "wide": (1, 2, 256, {}),
    "float32": (1, 3, 64, {"dtype": jnp.float32, "sink": True}),
    "float32_separate": (1, 5, 64, {"dtype": jnp.float32}),
    "cut": (1, 4, 64, {"cut": True}),
}


def decode_case(heads: int, group: int, head_dim: int, dtype: Any = jnp.bfloat16, sink=False, cut=False):
    rng = np.random.default_rng([heads, group, head_dim])
    lengths = [64 * 7 + 33, 64 * 5 + 1] if cut else [705, 384, 63, 0]
    cache = random_cache(heads, group, head_dim, lengths, rng, cut)
    query = jnp.asarray(rng.normal(0, 1.5, (len(lengths), heads * group, head_dim)), dtype)
    options = {"softmax_scale": head_dim**-0.5}
    if sink:
        options["sink_logits"] = jnp.asarray(rng.normal(0, 1, heads * group), jnp.float32)
    return query, cache, random_rotation(heads, head_dim, rng), options


def test_decode_body_of_cut_sequences() -> None:
    """Their history reaches past their end."""
    *geometry, settings = DECODE_CASES["cut"]
    query, cache, rotation, options = decode_case(*geometry, **settings)
    with emulated():
        got = decode_mosaic_gpu.decode_attention(query, cache, rotation, splits=2, **options)
    assert got.dtype == jnp.float32 and got.shape == query.shape
    assert_close(got, attention.decode_attention(query, cache, rotation, **options))


def test_result_has_the_dtype_of_the_query() -> None:
    """The kernel rounds once, as the caller would have done, whatever the implementation."""
    query, cache, rotation, options = decode_case(1, 2, 64)
    with emulated():
        exact = decode_mosaic_gpu.decode_attention(query, cache, rotation, **options)
        got = _named(ops.decode_attention, query, cache, rotation, **options)
    assert got.dtype == jnp.bfloat16 and (got == exact.astype(jnp.bfloat16)).all()
    for dtype in (jnp.float32, jnp.bfloat16):
        assert ops.decode_attention(query.astype(dtype), cache, rotation, **options).dtype == dtype


@pytest.mark.parametrize("group", [4, 7])
def test_decode_body_survives_extreme_scales_and_scores(group: int) -> None:
    """Value scales over 80 powers of two or 0, scores of several hundred: P must not overflow or flush."""
    query, cache, rotation, options = decode_case(1, group, 64)
    rng = np.random.default_rng(1)
    size = 2.0 ** rng.integers(-40, 40, cache.value_scale.shape[:2])[..., None]
    size[::2] = 0
    cache = dataclasses.replace(
        cache,
        value_scale=(cache.value_scale * jnp.asarray(size)).astype(jnp.bfloat16),
        key_scale=cache.key_scale * 30,
        window_value=cache.window_value * 0,
    )
    with emulated():
        got = decode_mosaic_gpu.decode_attention(query[:2], _first(cache, 2), rotation, **options)
    assert_close(got, attention.decode_attention(query[:2], _first(cache, 2), rotation, **options))


def _first(cache: LayerCache, batch: int) -> LayerCache:
    names = ("page_table", "window_table", "lengths", "history_pages")
    return dataclasses.replace(cache, **{n: getattr(cache, n)[:batch] for n in names})


@pytest.mark.parametrize(
    ("splits", "window_pages", "window_parts"), [(1, 0, 1), (1, 2, 2), (3, 1, 4), (3, 100, 1)]
)
def test_workers_share_all_pages_and_windows(splits: int, window_pages: int, window_parts: int) -> None:
    cache, query = cache_shapes(1, 2, 64, 2, 40), jax.ShapeDtypeStruct((2, 1, 2, 64), jnp.bfloat16)
    plan = DecodePlan(splits, 4, 3, window_pages, window_parts=window_parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_mosaic_gpu, "decode_plan", lambda *_: plan)
        shape = decode_mosaic_gpu.decode_shape(query, cache, softmax_scale=1.0, transforms=1, windows=True)
    for pages in (0, 1, 7, 40):
        count, workers = emulator.Int(pages), emulator.Int(np.arange(shape.workers + 1))
        first = decode_mosaic_gpu._first_page(shape, count, workers).signed
        assert first[0] == 0 and first[-1] == pages and (np.diff(first) >= 0).all()


@pytest.mark.parametrize(
    ("head_dim", "plan"),
    [
        (64, DecodePlan(3, 8, 3, 1, mean_pages=8)),
        (64, DecodePlan(1, 4, 3, 2, mean_pages=8, window_parts=2)),
        (128, DecodePlan(2, 12, 3, 100, window_parts=4)),
    ],
)
def test_decode_body_reads_every_page_once_whatever_the_plan(head_dim: int, plan: DecodePlan) -> None:
    query, cache, rotation, options = decode_case(1, 2, head_dim)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_mosaic_gpu, "decode_plan", lambda *_: plan)
        got = decode_mosaic_gpu.decode_attention(query, cache, rotation, **options)
    assert_close(got, attention.decode_attention(query, cache, rotation, **options))


@pytest.mark.parametrize(
    ("group", "plan", "pages"),
    [
        (2, DecodePlan(1, 4, 3, 2, mean_pages=4), 33),
        (6, DecodePlan(1, 4, 5, 0, mean_pages=8), 75),
        (1, DecodePlan(1, 8, 4, 3, mean_pages=16), 270),
    ],
)
def test_decode_body_goes_round_its_ring_and_its_mean_keys(group: int, plan: DecodePlan, pages: int) -> None:
    """Several times as many pages per warp as it has stages, and more than two products of mean keys."""
    rng = np.random.default_rng(pages)
    cache = random_cache(1, group, 64, [320 + PAGE * pages + 17], rng)
    query = jnp.asarray(rng.normal(0, 1.5, (1, group, 64)), jnp.bfloat16)
    rotation = random_rotation(1, 64, rng)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_mosaic_gpu, "decode_plan", lambda *_: plan)
        got = decode_mosaic_gpu.decode_attention(query, cache, rotation, softmax_scale=0.2)
    assert_close(got, attention.decode_attention(query, cache, rotation, softmax_scale=0.2))


@pytest.mark.parametrize(
    ("group", "head_dim", "partials"), [(1, 64, 7), (3, 128, 70), (8, 128, 24), (12, 64, 8), (7, 256, 9)]
)
def test_merge_body_weighs_partials_by_their_log_sum_exp(group: int, head_dim: int, partials: int) -> None:
    rng = np.random.default_rng([group, head_dim])
    rotation = random_rotation(2, head_dim, rng)
    out = rng.normal(0, 1, (1, 2, group, partials, head_dim)).astype(np.float32)
    lse = rng.normal(0, 8, (1, 2, group, partials)).astype(np.float32)
    lse[0, 0, 0], lse[..., 1] = -np.inf, -np.inf  # nothing stored at all; one empty window page
    sinks = rng.normal(0, 4, 2 * group).astype(np.float32)
    with emulated():
        got = merge_mosaic_gpu.merge_partials(
            jnp.asarray(out), jnp.asarray(lse), rotation, windows=6, sink_logits=jnp.asarray(sinks)
        )
    weight = np.exp2(lse.astype(np.float64))
    weight /= weight.sum(-1, keepdims=True) + np.exp(sinks.astype(np.float64)).reshape(1, 2, group, 1)
    window, history = ((weight[..., part, None] * out[..., part, :]).sum(-2) for part in np.s_[:6, 6:])
    want = window + np.einsum("bkgd,kde->bkge", history, np.asarray(rotation.output_transform, np.float64))
    mean = np.asarray(rotation.value_mean, np.float64)[:, None]
    np.testing.assert_allclose(got, want + weight[..., 6:].sum(-1)[..., None] * mean, atol=2e-6)


@pytest.mark.parametrize(("group", "dtype"), [(3, jnp.bfloat16), (12, jnp.float32)])
def test_rotate_body_equals_the_product(group: int, dtype: Any) -> None:
    rng = np.random.default_rng(group)
    rotation = random_rotation(2, 256, rng)
    query = jnp.asarray(rng.normal(0, 1, (1, 2, group, 256)), dtype)
    with emulated():
        got = merge_mosaic_gpu.rotate_few_queries(query, rotation)
    np.testing.assert_allclose(got, decode_mosaic_gpu.rotate_queries(query, rotation), atol=2e-5)


@pytest.mark.parametrize(("head_dim", "heads", "pages"), [(64, 2, 3), (128, 1, 1), (256, 1, 1)])
def test_quantize_body_writes_the_bytes_of_the_reference(head_dim: int, heads: int, pages: int) -> None:
    rng = np.random.default_rng(head_dim)
    shape = (PAGE * pages, heads, head_dim)
    key, value = (
        jnp.asarray(family(rng, shape).view(jnp.bfloat16.dtype).reshape(pages, PAGE, heads, head_dim))
        for family in (row_families.normal_rows, row_families.all_bit_patterns)
    )
    rotation = quantizer_rotation(heads, head_dim, rng)
    with emulated():
        got = quantize_mosaic_gpu.quantize_page_pair(key, value, rotation)
        swapped = quantize_mosaic_gpu.quantize_page_pair(value, key, rotation)
    assert_same_bytes(got, quantize.quantize_page_pair(key, value, rotation))
    assert_same_bytes(swapped, quantize.quantize_page_pair(value, key, rotation))


# (head_dim, blocks of keys, of values; 0: to the nearest)
SEQUENTIAL = [(64, 4, 2), (128, 4, 4), (128, 2, 0)]


@pytest.mark.parametrize(("head_dim", "key_steps", "value_steps"), SEQUENTIAL)
def test_sequential_body_writes_the_bytes_of_the_reference(
    head_dim: int, key_steps: int, value_steps: int
) -> None:
    rng = np.random.default_rng([head_dim, key_steps])
    shape = (1, PAGE, 2, head_dim)
    key, value = (
        jnp.asarray(family(rng, (PAGE, 2, head_dim)).view(jnp.bfloat16.dtype).reshape(shape))
        for family in (row_families.mixed_rows, row_families.all_bit_patterns)
    )
    steps = {"key": key_steps} | ({"value": value_steps} if value_steps else {})
    rotation = fed_rotation(quantizer_rotation(2, head_dim, rng), rng, steps)
    with emulated():
        got = quantize_mosaic_gpu.quantize_page_pair(key, value, rotation)
    assert_same_bytes(got, quantize.quantize_page_pair(key, value, rotation))


def test_quantize_body_goes_from_head_to_head() -> None:
    """Two blocks of two warpgroups: one takes keys of three heads, the other what is left, and the values."""
    rng = np.random.default_rng(3)
    key, value = jnp.asarray(rng.normal(0, 1, (2, 2, PAGE, 3, 64)), jnp.bfloat16)
    rotation = quantizer_rotation(3, 64, rng)
    with emulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantize_mosaic_gpu, "quantize_plan", lambda *_: (2, 2))
        patch.setattr(quantize_mosaic_gpu, "page_costs", lambda *_: [5, 4])
        got = quantize_mosaic_gpu.quantize_page_pair(key, value, rotation)
    assert_same_bytes(got, quantize.quantize_page_pair(key, value, rotation))


BOUNDS = [0, 1, 6, 2**20 + 1, 2**22 + 1, 2**23 - 1, 2**23 + 1, 2**24, 2**24 + 1, 2**25]


@pytest.mark.parametrize("bound", BOUNDS)
def test_codes_and_sums_of_integers_at_the_bounds(bound: int) -> None:
    """Integers up to 2**24 as floats: the codes of step 8 and the sum of step 7 are those of the integers."""
    machine = emulator.Machine(16, 4)
    near = [edge + step for edge in (0, bound, 2**23, 2**24) for step in (-1, 0, 1)]
    y = np.array([sign * v for v in near for sign in (-1, 1) if abs(v) <= 2**24])
    y = np.resize(y, 32).reshape(2, 16)
    want = (y >= -bound).astype(int) + (y >= 0) + (y >= bound)
    limit = emulator.Int(bound).to_float_up()
    floats = [[emulator.Int(v).to_float() for v in row] for row in y]
    for place in (page._key_place, page._value_place):
        words = CodeWords(machine, place)
        page.code_nearest(tuple(floats), [limit, limit], words)
        for half, entry in np.ndindex(2, 16):
            word, p = place(half, entry)
            assert (words.words[word].value >> 2 * p & 3 == want[half, entry]).all()
    for row, numbers in zip(y, floats):
        assert (page.sum_magnitudes(numbers).signed == (abs(row) // 8).sum()).all()


@pytest.mark.parametrize(("head_dim", "steps"), [(64, 2), (64, 4), (128, 4), (256, 2), (256, 16)])
def test_sequential_codes_of_integers_at_the_bounds(head_dim: int, steps: int) -> None:
    """Rows of Y from one spike to flat, the smallest bounds that a multiplier allows, feedback of +-127."""
    rng = np.random.default_rng([head_dim, steps])
    rotation = fed_rotation(quantizer_rotation(1, head_dim, rng), rng, {"key": steps}, full=True)
    spread = np.arange(PAGE) % 17  # octaves between the largest entry and most others
    size = np.exp2(rng.uniform(-spread, 0, (head_dim, PAGE))).T * 2.0 ** rng.uniform(0, 24, (PAGE, 1))
    y = np.rint(size * rng.choice([-1, 1], size.shape)).astype(np.int64)
    y[:3] = 0
    y[1, -1], y[2, 0] = -(2**24), 2**24
    s = (np.abs(y) // 8).sum(-1) // head_dim * 64 >> 5
    s[3::8] = np.abs(y[3::8]).max(-1)  # ties of a code
    for shift in (0, 1, 7):
        feedback = dataclasses.replace(rotation.key_feedback, shift=jnp.asarray([shift], jnp.int32))
        integers = [jnp.asarray(x[:, None], jnp.int32) for x in (y, s)]
        want = quantize._sequential_codes(integers[0], integers[1], feedback)[:, 0]
        blocks = Blocks(head_dim, steps)
        machine = emulator.Machine(blocks.feedback_bytes, 4)
        stage_feedback(machine, blocks, 0, machine.pointer(np.asarray(feedback.matrix)), 128)
        warp, g, c = (x.astype(np.int64) for x in np.unravel_index(np.arange(128), (4, 8, 4)))
        entries = np.arange(head_dim // 4)
        column = 2 * c + (entries & 1)[:, None]
        channel = frag.rotated_channel((entries >> 1)[:, None], column, min(blocks.size, 64))
        token = [16 * warp + frag.row_token(g, half) for half in range(2)]
        rows = tuple([emulator.Int(v).to_float() for v in y[t, channel]] for t in token)
        words = CodeWords(machine, page._key_place)
        bounds = [emulator.Int(s[t]) for t in token]
        code_rows(machine, blocks, rows, bounds, emulator.Int(shift), 0, words)
        for half, entry in np.ndindex(2, head_dim // 4):
            word, p = page._key_place(half, entry)
            got = words.words[word].value >> 2 * p & 3
            assert (got == np.asarray(want)[token[half], channel[entry]]).all(), (shift, half, entry)


def quantizer_rotation(heads: int, head_dim: int, rng: np.random.Generator) -> Any:
    """What the quantizer needs of a rotation: random orthogonal transforms, multipliers and a mean value."""
    matrix, _ = np.linalg.qr(rng.normal(0, 1, (heads, head_dim, head_dim)))
    transform = jnp.asarray(np.rint(matrix * cache_format.TRANSFORM_MAX), jnp.int16)
    multiplier = jnp.asarray(rng.integers(1, cache_format.MULTIPLIER_LIMIT, heads), jnp.int32)
    return types.SimpleNamespace(
        key_transform=transform,
        value_transform=transform.swapaxes(1, 2),
        key_multiplier=multiplier,
        value_multiplier=multiplier[::-1],
        value_mean=jnp.asarray(rng.normal(0, 1, (heads, head_dim)), jnp.bfloat16),
    )


def assert_same_bytes(got: dict, want: dict) -> None:
    assert set(got) == set(want)
    for name, array in want.items():
        a, b = (np.asarray(x) for x in (got[name], array))
        assert a.dtype == b.dtype and a.shape == b.shape
        different = a.view(f"i{a.itemsize}") != b.view(f"i{b.itemsize}")
        assert not different.any(), f"{name}: {different.sum()} of {different.size} differ"


# --- every launch lowers for CUDA, without a GPU ------------------------------------------------------


def lower_for_cuda(function: Any, *args: Any) -> list[str]:
    """Lowers without a warning; returns the names of the module's operations."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return re.findall(r" = (stablehlo\.\w+)", text)


def cache_shapes(heads: int, group: int, head_dim: int, batch: int, pages: int) -> Any:
    config = CacheConfig(heads, heads * group, head_dim)
    length = config.sink_tokens + config.recent_tokens + PAGE * pages
    return jax.eval_shape(lambda: layer_cache.allocate_layer_cache(config, batch, length))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("group", "dtype"),
    [(1, "bfloat16"), (4, "bfloat16"), (4, "float32"), (8, "bfloat16"), (8, "float32"), (12, "bfloat16")],
)
def test_decode_lowers_for_cuda(head_dim: int, group: int, dtype: str) -> None:
    cache = cache_shapes(2, group, head_dim, 3, 40)
    query = jax.ShapeDtypeStruct((3, 2 * group, head_dim), jnp.dtype(dtype))
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(2, head_dim)))
    decode = decode_mosaic_gpu.decode_attention
    lower_for_cuda(lambda q, c, r: decode(q, c, r, softmax_scale=0.1), query, cache, rotation)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_decode_step_is_two_launches(head_dim: int) -> None:
    """Nothing else on the device but, for wide heads, the rotation of the queries: no cast, no slice."""
    cache = cache_shapes(2, 4, head_dim, 3, 40)
    query = jax.ShapeDtypeStruct((3, 8, head_dim), jnp.bfloat16)
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(2, head_dim)))
    operations = lower_for_cuda(
        lambda q, c, r: _named(ops.decode_attention, q, c, r, softmax_scale=0.1), query, cache, rotation
    )
    launches = 2 if head_dim <= queries.ROTATED_IN_BLOCK else 3
    assert operations.count("stablehlo.custom_call") == launches
    assert set(operations) == {"stablehlo.custom_call", "stablehlo.reshape"}


@pytest.mark.parametrize("group", [1, 4, 8])
def test_decode_of_long_sequences_lowers_for_cuda(group: int) -> None:
    cache = cache_shapes(2, group, 128, 64, 500)
    query = jax.ShapeDtypeStruct((64, 2 * group, 128), jnp.bfloat16)
    shape = decode_mosaic_gpu.decode_shape(
        query.update(shape=(64, 2, group, 128)), cache, softmax_scale=0.1, transforms=2, windows=True
    )
    assert shape.warps == 12  # the other plan of head_dim 128
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(2, 128)))
    decode = decode_mosaic_gpu.decode_attention
    lower_for_cuda(lambda q, c, r: decode(q, c, r, softmax_scale=0.1), query, cache, rotation)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [4, 8])
def test_decode_of_many_sequences_lowers_for_cuda(head_dim: int, group: int) -> None:
    cache = cache_shapes(2, group, head_dim, 80, 40)
    query = jax.ShapeDtypeStruct((80, 2 * group, head_dim), jnp.bfloat16)
    transforms = 2 if head_dim <= queries.ROTATED_IN_BLOCK else 0
    shape = decode_mosaic_gpu.decode_shape(
        query.update(shape=(80, 2, group, head_dim)),
        cache,
        softmax_scale=0.1,
        transforms=transforms,
        windows=True,
    )
    # Two blocks share the 228 KiB of a multiprocessor; a block costs 1 KiB more than it asks for.
    assert shape.warps == 4 and shape.splits == 1 and 2 * (shape.shared_bytes + 1024) <= 228 * 1024
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(2, head_dim)))
    decode = decode_mosaic_gpu.decode_attention
    lower_for_cuda(lambda q, c, r: decode(q, c, r, softmax_scale=0.1), query, cache, rotation)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_lowers_for_cuda(head_dim: int) -> None:
    cache = cache_shapes(2, 4, head_dim, 1, 40)
    query = jax.ShapeDtypeStruct((1, 192, 8, head_dim), jnp.bfloat16)
    chunk = jax.ShapeDtypeStruct((1, 192, 2, head_dim), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(2, head_dim)))
    prefill = mosaic_gpu.chunk_attention
    lower_for_cuda(
        lambda q, k, v, c, r, n: prefill(q, k, v, c, r, new_lengths=n, softmax_scale=0.1),
        *(query, chunk, chunk, cache, rotation, lengths),
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_quantize_lowers_for_cuda(head_dim: int) -> None:
    pages = jax.ShapeDtypeStruct((5, PAGE, 2, head_dim), jnp.bfloat16)
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, hadamard_rotation(2, head_dim)))
    lower_for_cuda(quantize_mosaic_gpu.quantize_page_pair, pages, pages, rotation)
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(2, head_dim))
    rotation = fed_rotation(rotation, np.random.default_rng(0), {"key": 4, "value": 2})
    lower_for_cuda(quantize_mosaic_gpu.quantize_page_pair, pages, pages, jax.eval_shape(lambda: rotation))


# --- refusals -----------------------------------------------------------------------------------------


def test_unsupported_shapes_are_named_before_launch() -> None:
    rng = np.random.default_rng(0)
    cache = random_cache(1, 2, 96, [400], rng)
    rotation = hadamard_rotation(1, 96)
    query = jnp.zeros((1, 2, 96), jnp.bfloat16)
    for call in (decode_mosaic_gpu.decode_attention, lambda *a, **k: _named(ops.decode_attention, *a, **k)):
        with pytest.raises(NotImplementedError, match="head_dim = 96"):
            call(query, cache, rotation, softmax_scale=1.0)
    pages = jnp.zeros((1, PAGE, 1, 96), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="head_dim = 96"):
        quantize_mosaic_gpu.quantize_page_pair(pages, pages, rotation)
    pages = jnp.zeros((1, PAGE, 1, 64), jnp.bfloat16)
    fed = fed_rotation(quantizer_rotation(1, 64, rng), rng, {"value": 4})
    fed.value_feedback = dataclasses.replace(fed.value_feedback, steps=8)
    with pytest.raises(NotImplementedError, match="rounding_steps = 8 of values, head_dim = 64"):
        quantize_mosaic_gpu.quantize_page_pair(pages, pages, fed)
    fed.value_feedback = dataclasses.replace(fed.value_feedback, steps=4, shift=jnp.zeros(2, jnp.int32))
    with pytest.raises(ShapeError, match="value feedback"):
        quantize_mosaic_gpu.quantize_page_pair(pages, pages, fed)
    cache = random_cache(1, 2, 64, [400], rng)
    query = jnp.zeros((1, 2, 64), jnp.float16)
    with pytest.raises(NotImplementedError, match="float16"):
        decode_mosaic_gpu.decode_attention(query, cache, hadamard_rotation(1, 64), softmax_scale=1.0)
    with pytest.raises(NotImplementedError, match="sliding_window = 128"):
        decode_mosaic_gpu.decode_attention(
            query, cache, hadamard_rotation(1, 64), softmax_scale=1.0, sliding_window=128
        )


def _named(function: Any, *args: Any, **options: Any) -> Any:
    """The function with the kernel by name, as on a Hopper GPU whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_why_not", lambda device: None)
        return function(*args, implementation="mosaic_gpu", **options)


# --- compiled kernels on a Hopper GPU -------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_decode_on_device(head_dim: int, group: int) -> None:
    rng = np.random.default_rng([head_dim, group])
    lengths = [1, 63, 64, 65, 320, 383, 384, 385, 1000, 5000, 0]
    cache = random_cache(3, group, head_dim, lengths, rng)
    rotation = random_rotation(3, head_dim, rng)
    for dtype in (jnp.bfloat16, jnp.float32):
        query = jnp.asarray(rng.normal(0, 1.5, (len(lengths), 3 * group, head_dim)), dtype)
        options = {"softmax_scale": head_dim**-0.5}
        got = decode_mosaic_gpu.decode_attention(query, cache, rotation, **options)
        assert_close(got, attention.decode_attention(query, cache, rotation, **options))
        rounded = _named(ops.decode_attention, query, cache, rotation, **options)
        assert rounded.dtype == dtype and (rounded == got.astype(dtype)).all()


@pytest.mark.hopper
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("name", DECODE_CASES)
def test_decode_cases_on_device(name: str, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if long:
        monkeypatch.setattr(tuning, "LONG_PAGES", 0)  # the plan for long sequences, where there is one
    *geometry, settings = DECODE_CASES[name]
    query, cache, rotation, options = decode_case(*geometry, **settings)
    for splits in (1, 2, 7):
        got = decode_mosaic_gpu.decode_attention(query, cache, rotation, splits=splits, **options)
        assert_close(got, attention.decode_attention(query, cache, rotation, **options))


@pytest.mark.hopper
@pytest.mark.parametrize(("group", "head_dim", "tokens"), [(2, 64, 64), (4, 128, 200), (1, 256, 130)])
def test_prefill_on_device(group: int, head_dim: int, tokens: int) -> None:
    rng = np.random.default_rng([head_dim, tokens])
    heads, lengths = 2, [705, 65, 4160, 0]
    cache = random_cache(heads, group, head_dim, lengths, rng, room=tokens)
    rotation = random_rotation(heads, head_dim, rng)
    query = jnp.asarray(rng.normal(0, 1, (len(lengths), tokens, heads * group, head_dim)), jnp.bfloat16)
    key, value = jnp.asarray(rng.normal(0, 1, (2, len(lengths), tokens, heads, head_dim)), jnp.bfloat16)
    new = [tokens, 2, tokens - 3, tokens]
    options = {"new_lengths": jnp.asarray(new, jnp.int32), "softmax_scale": head_dim**-0.5}
    got = _named(ops.chunk_attention, query, key, value, cache, rotation, **options)
    want = attention.chunk_attention(query, key, value, cache, rotation, **options)
    for b, count in enumerate(new):
        assert_close(got[b : b + 1, :count], want[b : b + 1, :count])


@pytest.mark.hopper
@pytest.mark.parametrize(("group", "warps"), [(1, 12), (4, 12), (8, 12)])
def test_decode_of_a_long_sequence_on_device(group: int, warps: int) -> None:
    rng = np.random.default_rng(group)
    cache = random_cache(2, group, 128, [30_000, 29_000], rng)
    query = jnp.asarray(rng.normal(0, 1.5, (2, 2 * group, 128)), jnp.bfloat16)
    rotation = random_rotation(2, 128, rng)
    plan = DecodePlan(1, warps, 3, tuning.WINDOW_PAGES)  # 38 pages or more per warp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_mosaic_gpu, "decode_plan", lambda *_: plan)
        got = decode_mosaic_gpu.decode_attention(query, cache, rotation, softmax_scale=128**-0.5)
    assert_close(got, attention.decode_attention(query, cache, rotation, softmax_scale=128**-0.5))


@pytest.mark.hopper
@pytest.mark.parametrize("family", sorted(row_families.ROW_FAMILIES))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_quantize_on_device(head_dim: int, family: str) -> None:
    rng = np.random.default_rng(head_dim)
    for heads, pages in ((1, 1), (5, 61), (8, 300)):
        bits = row_families.ROW_FAMILIES[family](rng, (PAGE * pages, heads, head_dim))
        pair = jnp.asarray(bits.view(jnp.bfloat16.dtype).reshape(pages, PAGE, heads, head_dim))
        rotation = quantizer_rotation(heads, head_dim, rng)
        got = quantize_mosaic_gpu.quantize_page_pair(pair, pair[::-1], rotation)
        assert_same_bytes(got, quantize.quantize_page_pair(pair, pair[::-1], rotation))


@pytest.mark.hopper
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("head_dim", "key_steps", "value_steps"), [*SEQUENTIAL, (256, 4, 4), (256, 16, 8)])
def test_sequential_pages_on_device(head_dim: int, key_steps: int, value_steps: int, full: bool) -> None:
    """Every family of rows, feedback as large as it may be."""
    rng = np.random.default_rng([head_dim, key_steps, full])
    steps = {"key": key_steps} | ({"value": value_steps} if value_steps else {})
    for heads, pages in ((1, 1), (5, 61)):
        rotation = fed_rotation(quantizer_rotation(heads, head_dim, rng), rng, steps, full)
        for family in row_families.ROW_FAMILIES.values():
            bits = family(rng, (PAGE * pages, heads, head_dim))
            pair = jnp.asarray(bits.view(jnp.bfloat16.dtype).reshape(pages, PAGE, heads, head_dim))
            got = quantize_mosaic_gpu.quantize_page_pair(pair, pair[::-1], rotation)
            assert_same_bytes(got, quantize.quantize_page_pair(pair, pair[::-1], rotation))


@pytest.mark.hopper
def test_thousand_steps_on_device_equal_the_reference() -> None:
    """1000 decode steps by the kernels: byte-equal pages and outputs within tolerance of the reference."""
    rng = np.random.default_rng(0)
    heads, group, head_dim, batch = 2, 4, 128, 2
    config = CacheConfig(heads, heads * group, head_dim)
    rotation = jax.tree.map(jnp.asarray, random_rotation(heads, head_dim, rng))
    caches = {name: layer_cache.allocate_layer_cache(config, batch, 1100) for name in ("xla", "mosaic_gpu")}
    steps = {
        name: jax.jit(
            lambda q, k, v, n, c, name=name: layer_cache.attend(
                q, k, v, c, rotation, new_lengths=n, softmax_scale=head_dim**-0.5, implementation=name
            )
        )
        for name in caches
    }
    for step in range(1000):
        query = jnp.asarray(rng.normal(0, 1, (batch, 1, heads * group, head_dim)), jnp.float32)
        key, value = jnp.asarray(rng.normal(0, 1, (2, batch, 1, heads, head_dim)), jnp.bfloat16)
        new = jnp.asarray([1, step % 3 > 0], jnp.int32)
        outs = {}
        for name, attend in steps.items():
            outs[name], caches[name] = attend(query, key, value, new, caches[name])
        if step % 50 == 49:
            assert_close(outs["mosaic_gpu"][:1], outs["xla"][:1])
    fields = (*cache_format.INT2_ARRAYS, *cache_format.WINDOW_ARRAYS)
    got, want = ({n: getattr(caches[i], n) for n in fields} for i in ("mosaic_gpu", "xla"))
    assert_same_bytes(got, want)
