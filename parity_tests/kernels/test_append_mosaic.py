"""The Mosaic GPU append of one token: its body executed on the CPU against `cache.append_rows`, its launch
lowered for CUDA with every array of the cache in place, and, on a Hopper GPU, the compiled kernel itself.

Caches start as garbage everywhere, so that a byte written where nothing should be, or not written, is seen.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.mosaic.gpu")

import jax.numpy as jnp  # noqa: E402

from oscar_jax import cache as cache_module  # noqa: E402
from oscar_jax import ops  # noqa: E402
from oscar_jax.cache import allocate_layer_cache, append_rows  # noqa: E402
from oscar_jax.core import cache_format  # noqa: E402
from oscar_jax.core.config import CacheConfig  # noqa: E402
from oscar_jax.core.errors import ShapeError  # noqa: E402
from oscar_jax.layer_cache import LayerCache  # noqa: E402
from oscar_jax.pallas.append import mosaic_gpu as append_mosaic_gpu  # noqa: E402
from oscar_jax.pallas.quantize import page  # noqa: E402
from oscar_jax.rotations.rotation import hadamard_rotation  # noqa: E402
from parity_tests.kernels import mosaic_emulator as emulator  # noqa: E402
from parity_tests.kernels.mosaic_launches import fed_rotation  # noqa: E402

PAGE = cache_format.PAGE_TOKENS
HEAD_DIMS = page.HEAD_DIMS
STATE = append_mosaic_gpu._STATE
SHARED_BASE = 1040


def garbage(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Any bit pattern."""
    return jnp.asarray(np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape))


def make_rotation(heads: int, head_dim: int, rng: np.random.Generator) -> Any:
    """Random transforms, multipliers and a mean value; keys and values differ."""

    def transform() -> Any:
        matrix, _ = np.linalg.qr(rng.normal(0, 1, (heads, head_dim, head_dim)))
        return jnp.asarray(np.rint(matrix * cache_format.TRANSFORM_MAX), jnp.int16)

    def multiplier() -> Any:
        return jnp.asarray(rng.integers(1, cache_format.MULTIPLIER_LIMIT, heads), jnp.int32)

    return dataclasses.replace(
        hadamard_rotation(heads, head_dim),
        key_transform=transform(),
        value_transform=transform(),
        key_multiplier=multiplier(),
        value_multiplier=multiplier(),
        value_mean=jnp.asarray(rng.normal(0, 1, (heads, head_dim)), jnp.bfloat16),
    )


def make_cache(
    config: CacheConfig,
    lengths: list[int],
    max_length: int,
    rng: np.random.Generator,
    history: list[int] | None = None,
) -> LayerCache:
    """A cache of garbage under permuted tables, its sequences `lengths` long."""
    cache = allocate_layer_cache(config, len(lengths), max_length)
    pools = (*cache_format.INT2_ARRAYS, *cache_format.WINDOW_ARRAYS)
    arrays = {name: garbage(rng, (x := getattr(cache, name)).shape, x.dtype) for name in pools}

    def permuted(table: Any) -> Any:
        return jnp.asarray(1 + rng.permutation(table.size).reshape(table.shape), jnp.int32)

    return dataclasses.replace(
        cache,
        **arrays,
        page_table=permuted(cache.page_table),
        window_table=permuted(cache.window_table),
        lengths=jnp.asarray(lengths, jnp.int32),
        history_pages=jnp.asarray(history or [config.history_pages(n) for n in lengths], jnp.int32),
    )


def make_rows(cache: LayerCache, rng: np.random.Generator) -> tuple[Any, Any]:
    shape = (cache.batch, 1, cache.config.num_key_value_heads, cache.config.head_dim)
    return garbage(rng, shape, cache.window_key.dtype), garbage(rng, shape, cache.window_key.dtype)


def make_machine(shared_bytes: int) -> emulator.Machine:
    """One warpgroup, whose shared memory starts at no round address."""
    machine = emulator.Machine(SHARED_BASE + shared_bytes, 4)
    machine.shared_base = emulator.Int(SHARED_BASE)
    return machine


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Runs the kernel's body in the emulator instead of launching it."""

    def kernel(shape: Any) -> Any:
        def run(inputs: list, state: list) -> list:
            names = append_mosaic_gpu.input_names(shape) + STATE
            arrays = {name: np.array(array) for name, array in zip(names, [*inputs, *state])}
            kinds = len(append_mosaic_gpu.KINDS)
            for block in np.ndindex(shape.batch, shape.quantize.heads, kinds):
                machine = make_machine(shape.quantize.shared_bytes)
                append_mosaic_gpu.append_body(machine, shape, tuple(map(emulator.Int, block)), arrays)
            return [jnp.asarray(arrays[name]) for name in STATE]

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_mosaic_gpu, "_append_kernel", kernel)
        yield


def assert_same(got: LayerCache, want: LayerCache) -> None:
    for name in STATE:
        a, b = (np.asarray(getattr(cache, name)) for cache in (got, want))
        assert a.dtype == b.dtype and a.shape == b.shape
        different = a.view(f"i{a.itemsize}") != b.view(f"i{b.itemsize}")
        assert not different.any(), f"{name}: {different.sum()} of {different.size} differ"


reference = functools.partial(jax.jit(append_rows, static_argnames="implementation"), implementation="xla")


# --- the body on the CPU ------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_transform_is_staged_as_the_quantizer_wants_it(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    limit = cache_format.TRANSFORM_MAX
    transform = rng.integers(-limit, limit + 1, (2, head_dim, head_dim)).astype(np.int16)
    transform[0, 0, :4] = [-limit, -128, -129, 127]
    machine = make_machine(2 * head_dim**2)
    pointer = machine.pointer(transform).at(1, 2 * head_dim**2)
    page.stage_transform(machine, head_dim, pointer, 128)
    want = np.asarray(page.transform_operand(jnp.asarray(transform[1:])))
    assert (machine.shared.view(np.int32)[SHARED_BASE // 4 :] == want.reshape(-1)).all()


# (head_dim, heads, heads of the rotation, blocks of sequential rounding by role).
# The lengths of a batch are those around every change of layout.
GEOMETRIES = [
    (64, 2, 1, {"key": 4}),
    (64, 2, 2, {"key": 2, "value": 4}),
    (128, 1, 1, {}),
    (256, 1, 1, {}),
]
LENGTHS = [0, 63, 64, 319, 383, 384, 447, 500]


@pytest.mark.parametrize(("head_dim", "heads", "rotation_heads", "steps"), GEOMETRIES)
def test_body_writes_the_bytes_of_the_reference(
    head_dim: int, heads: int, rotation_heads: int, steps: dict[str, int]
) -> None:
    rng = np.random.default_rng(head_dim)
    cache = make_cache(CacheConfig(heads, heads, head_dim), LENGTHS, 520, rng)
    rotation = fed_rotation(make_rotation(rotation_heads, head_dim, rng), rng, steps)
    key, value = make_rows(cache, rng)
    for new in (np.ones(len(LENGTHS)), np.arange(len(LENGTHS)) % 2):
        new = jnp.asarray(new, jnp.int32)
        with emulated():
            got = append_mosaic_gpu.append_token(cache, rotation, key, value, new)
        assert_same(got, reference(cache, rotation, key, value, new))


def test_body_of_two_hundred_steps() -> None:
    """A ragged batch that stands still now and then, one rotation per head, small windows."""
    rng = np.random.default_rng(0)
    config = CacheConfig(2, 2, 64, sink_tokens=0, recent_tokens=64)
    want = got = make_cache(config, [0, 100], 320, rng)
    rotation = make_rotation(2, 64, rng)
    with emulated():
        for step in range(200):
            key, value = make_rows(want, rng)
            new = jnp.asarray([1, step % 3 > 0], jnp.int32)
            want = reference(want, rotation, key, value, new)
            got = append_mosaic_gpu.append_token(got, rotation, key, value, new)
    assert_same(got, want)
    assert want.history_pages.tolist() == [2, 2]


UNUSUAL = {
    # history beyond the formula: cut inside an INT2 page (the row is dropped), at its end, borrowed
    "cut": {"lengths": [400, 384, 447], "history": [6, 5, 3]},
    # nothing stored, and more than one row announced
    "counts": {"lengths": [383, 447, 10], "new": [0, 5, 0]},
    # tables that name the reserved page
    "reserved": {
        "lengths": [383, 447, 511],
        "pages": [[0, 0, 0], [1, 0, 0], [2, 3, 4]],
        "windows": [0, 0, 0],
    },
    # tables too short for the page that leaves, or just long enough
    "full": {"lengths": [511, 510, 100], "max_length": 448},
}


def unusual_case(name: str) -> tuple[LayerCache, tuple]:
    case: dict[str, Any] = UNUSUAL[name]
    rng = np.random.default_rng(len(name))
    cache = make_cache(
        CacheConfig(1, 1, 64), case["lengths"], case.get("max_length", 540), rng, case.get("history")
    )
    if "pages" in case:
        cache = dataclasses.replace(
            cache,
            page_table=jnp.asarray(case["pages"], jnp.int32),
            window_table=cache.window_table.at[2].set(0),
        )
    new = jnp.asarray(case.get("new", [1, 1, 1]), jnp.int32)
    return cache, (make_rotation(1, 64, rng), *make_rows(cache, rng), new)


@pytest.mark.parametrize("name", UNUSUAL)
def test_body_in_unusual_states(name: str) -> None:
    cache, arguments = unusual_case(name)
    with emulated():
        got = append_mosaic_gpu.append_token(cache, *arguments)
    assert_same(got, reference(cache, *arguments))


# --- the launch lowers for CUDA, in place ---------------------------------------------------------------


def lower(function: Any, *arguments: Any) -> str:
    step = jax.jit(function, donate_argnums=0)
    with served_everywhere():
        return step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("steps", [{}, {"key": 4, "value": 2}], ids=["nearest", "sequential"])
@pytest.mark.parametrize(("head_dim", "rotation_heads"), [(64, 2), (128, 1), (256, 2)])
def test_append_lowers_for_cuda_in_place(head_dim: int, rotation_heads: int, steps: dict[str, int]) -> None:
    """One launch per layer and nothing else; every array that it changes lies where its input lay."""
    config = CacheConfig(2, 4, head_dim)
    cache = jax.eval_shape(lambda: allocate_layer_cache(config, 3, 1000))
    rotation = fed_rotation(hadamard_rotation(rotation_heads, head_dim), np.random.default_rng(0), steps)
    rotation = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, rotation))
    row = jax.ShapeDtypeStruct((3, 1, 2, head_dim), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((3,), jnp.int32)

    def step(caches: list, rotation: Any, key: Any, value: Any, new: Any) -> list:
        return [append_rows(c, rotation, key, value, new, implementation="mosaic_gpu") for c in caches]

    text = lower(step, [cache, cache], rotation, row, row, new)
    assert text.count("custom_call @mosaic_gpu_v2") == 1 and text.count("call @run(") == 2
    (launch,) = (line for line in text.splitlines() if "@mosaic_gpu_v2" in line)
    first = len(append_mosaic_gpu._INPUTS) + 2 * len(steps)
    aliases = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", launch)
    assert aliases == [(str(i), str(first + i)) for i in range(len(STATE))]
    operations = set(re.findall(r" = (stablehlo\.\w+)", text))
    assert operations == {"stablehlo.custom_call"}, operations
    main = next(line for line in text.splitlines() if "@main" in line)
    assert main.count("tf.aliasing_output") == 2 * len(jax.tree.leaves(cache))


@contextlib.contextmanager
def served_everywhere() -> Iterator[None]:
    """The choice as on a Hopper GPU: to lower for one, or to see what would be called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_why_not", lambda device: None)
        yield


# --- choice and refusals --------------------------------------------------------------------------------


def test_unsupported_shapes_are_named_before_launch() -> None:
    def append(config: CacheConfig, tokens: int = 400) -> None:
        cache = jax.eval_shape(lambda: allocate_layer_cache(config, 1, tokens))
        rotation = hadamard_rotation(1, config.head_dim)
        row = jnp.zeros((1, 1, config.num_key_value_heads, config.head_dim), jnp.bfloat16)
        new = jnp.ones(1, jnp.int32)
        with served_everywhere():
            jax.eval_shape(
                functools.partial(append_rows, implementation="mosaic_gpu", check=False),
                cache, rotation, row, row, new,
            )  # fmt: skip

    with pytest.raises(NotImplementedError, match="head_dim = 96"):
        append(CacheConfig(1, 1, 96))
    with pytest.raises(NotImplementedError, match="128 key/value heads"):
        append(CacheConfig(128, 128, 64))
    with pytest.raises(NotImplementedError, match="tokens a sequence"):
        append(CacheConfig(1, 1, 64), 1 << 24)
    cache, (rotation, key, value, new) = unusual_case("cut")
    with pytest.raises(ShapeError, match="key rows"):
        append_mosaic_gpu.append_token(cache, rotation, jnp.tile(key, (1, 2, 1, 1)), value, new)


def test_a_named_choice_reaches_the_kernel_and_none_the_reference_without_a_gpu() -> None:
    cache, arguments = unusual_case("counts")
    want = reference(cache, *arguments)
    calls = []

    def kernel(cache: LayerCache, *arguments: Any) -> LayerCache:
        calls.append(arguments)
        return dataclasses.replace(cache, lengths=cache.lengths - 7)

    marked = cache.lengths - 7
    run = functools.partial(cast(Any, append_rows).__wrapped__, check=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_mosaic_gpu, "append_token", kernel)
        # Not compiled, since what is chosen is part of what is compiled.
        patch.setattr(cache_module, "_append", cast(Any, cache_module._append).__wrapped__)
        assert_same(run(cache, *arguments), want)
        with pytest.raises(NotImplementedError, match="cpu"):
            run(cache, *arguments, implementation="mosaic_gpu")
        assert not calls
        with served_everywhere():
            for implementation in ("mosaic_gpu", None):
                got = run(cache, *arguments, implementation=implementation)
                assert (got.lengths == marked).all()
    assert len(calls) == 2


# --- compiled, on a Hopper GPU --------------------------------------------------------------------------


@pytest.mark.hopper
@pytest.mark.parametrize("steps", [{}, {"key": 4}, {"key": 4, "value": 4}], ids=str)
@pytest.mark.parametrize(("head_dim", "rotation_heads"), [(64, 1), (128, 1), (128, 3), (256, 3)])
def test_steps_on_device(head_dim: int, rotation_heads: int, steps: dict[str, int]) -> None:
    """Ragged batches through all changes of layout, eagerly and in a donated loop; bytes of the reference."""
    rng = np.random.default_rng([head_dim, rotation_heads])
    cache = make_cache(CacheConfig(3, 3, head_dim), LENGTHS, 640, rng)
    rotation = jax.tree.map(jnp.asarray, make_rotation(rotation_heads, head_dim, rng))
    rotation = fed_rotation(rotation, rng, steps)
    rows = [jnp.stack(both) for both in zip(*(make_rows(cache, rng) for _ in range(130)))]
    rows.append(jnp.asarray(rng.integers(0, 2, (130, cache.batch)), jnp.int32))

    def run(cache: LayerCache, rows: list, implementation: str) -> LayerCache:
        def step(cache: LayerCache, row: list) -> tuple[LayerCache, None]:
            return append_rows(cache, rotation, *row, implementation=implementation), None

        return jax.lax.scan(step, cache, rows)[0]

    want = jax.jit(run, static_argnums=2)(cache, rows, "xla")
    got = append_rows(cache, rotation, *(x[0] for x in rows), implementation="mosaic_gpu")
    got = jax.jit(run, static_argnums=2, donate_argnums=0)(got, [x[1:] for x in rows], "mosaic_gpu")
    assert_same(got, want)


@pytest.mark.hopper
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_states_on_device(name: str) -> None:
    cache, arguments = unusual_case(name)
    got = append_rows(cache, *arguments, implementation="mosaic_gpu", check=False)
    assert_same(got, reference(cache, *arguments))


@pytest.mark.hopper
def test_donated_step_copies_nothing_on_device() -> None:
    config = CacheConfig(2, 4, 128)
    cache = allocate_layer_cache(config, 2, 1000)
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(1, 128))
    row, new = jnp.zeros((2, 1, 2, 128), jnp.bfloat16), jnp.ones(2, jnp.int32)

    def step(caches: list) -> list:
        return [append_rows(c, rotation, row, row, new, implementation="mosaic_gpu") for c in caches]

    text = jax.jit(step, donate_argnums=0).lower([cache, cache]).compile().as_text()
    assert text.count("mosaic_gpu_v2") == 2 and not re.search(r"= \S+ copy", text), text
