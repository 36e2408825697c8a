"""Times INT2 attention against BF16 attention on a GPU: decode, write path and append, each beside its floor.

    python scripts/bench_attention.py            # the quick cases, about a minute
    python scripts/bench_attention.py --full     # every shape, batch and length
    python scripts/bench_attention.py --what write append   # the write path alone, either rounding

Every INT2 figure stands next to the BF16 kernel of the same run (`jax.nn.dot_product_attention`, cuDNN) and
next to the time that its bytes alone would take at the device's copy bandwidth, measured in the same run.
Times are medians of device time (the profiler's sum over the kernels of one call) on cold L2: a call walks
over several distinct batches whenever one batch would fit into the cache. The directory OUT receives
bench_attention.json, .md and .png.
Before anything is timed, the kernels of a shape are compared with the reference on a small ragged cache: no
time is reported for a wrong one (`check_kernels`).
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_cases import BATCHES, LAYERS, LENGTHS, QUICK, SHAPES
from draw_runs import draw_speed_ups

from oscar_jax import ops
from oscar_jax.cache import append_rows
from oscar_jax.core import cache_format as fmt
from oscar_jax.core.config import CacheConfig
from oscar_jax.core.errors import OscarError
from oscar_jax.layer_cache import LayerCache
from oscar_jax.quantize import Feedback
from oscar_jax.rotations.rotation import LayerRotation, hadamard_rotation

# Largest relative error of a row of attention against the float32 reference: a bf16 result is rounded by up
# to 2**-9 of an element, 1.2e-3 of a row; cuDNN's BF16 attention rounds its probabilities to bf16, too.
TOLERANCE = 3e-3
BASELINE_TOLERANCE = 1e-2
COLD_BYTES = 300 << 20  # several times any L2
PER_SEQUENCE = ("page_table", "window_table", "lengths", "history_pages")  # fields of a cache
WRITE_SHAPE = "qwen3-8b"  # of the quick cases
WHAT = ("decode", "write", "append")
ROUNDINGS = ("nearest", "sequential")
INT2_KERNELS = {
    "mosaic_gpu": "oscar_jax.pallas.decode.mosaic_gpu",
    "xla": "oscar_jax.attention, compiled by XLA",
}


def random_cache(config: CacheConfig, batch: int, length: int, seed: int = 0) -> LayerCache:
    """A full cache of random words, scales and rows, whose pages are scattered over the pool."""
    return _random_cache(seed, config, batch, length)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _random_cache(seed: int, config: CacheConfig, batch: int, length: int) -> LayerCache:
    heads, head_dim = config.num_key_value_heads, config.head_dim
    pages, slots = max(1, config.history_pages(length)), config.window_slots
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    pool = 1 + batch * pages
    int2 = fmt.int2_array_shapes(pool, heads, head_dim)
    window = fmt.window_array_shapes(1 + batch * slots, heads, head_dim)

    def words(shape: tuple[int, ...]) -> jax.Array:
        return jax.lax.bitcast_convert_type(jax.random.bits(next(keys), shape), jnp.int32)

    def scales(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(next(keys), shape, jnp.float32, 0.3, 0.7).astype(jnp.bfloat16)

    def rows(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    return LayerCache(
        key_codes=words(int2["key_codes"]),
        value_codes=words(int2["value_codes"]),
        key_scale=scales(int2["key_scale"]),
        value_scale=scales(int2["value_scale"]),
        key_page_mean=rows(int2["key_page_mean"]),
        window_key=rows(window["window_key"]),
        window_value=rows(window["window_value"]),
        page_table=1 + jax.random.permutation(next(keys), pool - 1).reshape(batch, pages),
        window_table=1 + jnp.arange(batch * slots, dtype=jnp.int32).reshape(batch, slots),
        lengths=jnp.full(batch, length, jnp.int32),
        history_pages=jnp.full(batch, config.history_pages(length), jnp.int32),
        config=config,
    )


def random_rotation(heads: int, head_dim: int, rounding: str = "nearest") -> LayerRotation:
    """A Hadamard rotation; with "sequential" feedback of any size in four blocks, keys and values."""
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(heads, head_dim))
    if rounding == "nearest":
        return rotation
    steps = min(4, head_dim // fmt.FEEDBACK_BLOCK_MIN)
    block = jnp.arange(head_dim) // (head_dim // steps)
    limit = fmt.FEEDBACK_LIMIT
    entries = jax.random.randint(jax.random.key(5), (heads, head_dim, head_dim), -limit, limit + 1)
    matrix = jnp.where(block[:, None] < block[None], entries, 0).astype(jnp.int8)
    feedback = Feedback(matrix, jnp.full(heads, fmt.FEEDBACK_MAX_SHIFT, jnp.int32), steps)
    return dataclasses.replace(rotation, key_feedback=feedback, value_feedback=feedback)


class WrongKernelError(OscarError):
    """A kernel differs from the reference, so its time means nothing."""


def check_kernels(config: CacheConfig, options: argparse.Namespace) -> None:
    """Raises WrongKernelError unless the kernels to be timed agree with the reference on small inputs.

    Decode attention within TOLERANCE on three sequences of different length, the BF16 baseline within its
    own; pages and appended tokens byte for byte in either rounding, two flushes included.
    """
    heads, head_dim = config.num_key_value_heads, config.head_dim
    lengths = [1022, 703, 64]  # the first two flush a page at 1024 and 704
    cache = dataclasses.replace(
        random_cache(config, len(lengths), 1100),
        lengths=jnp.asarray(lengths, jnp.int32),
        history_pages=jnp.asarray([config.history_pages(n) for n in lengths], jnp.int32),
    )
    roundings = ROUNDINGS if head_dim >= 2 * fmt.FEEDBACK_BLOCK_MIN else ROUNDINGS[:1]
    rotations = [random_rotation(heads, head_dim, rounding) for rounding in roundings]
    keys = iter(jax.random.split(jax.random.key(7), 4))
    query = jax.random.normal(next(keys), (len(lengths), config.num_query_heads, head_dim), jnp.bfloat16)
    scale = head_dim**-0.5

    def attended(query: jax.Array, name: str) -> jax.Array:
        function = functools.partial(ops.decode_attention, softmax_scale=scale, implementation=name)
        return jax.jit(function)(query, cache, rotations[0])

    got = attended(query, options.implementation)
    want = attended(query.astype(jnp.float32), "xla")
    _require_close("decode attention", got, want, TOLERANCE)

    page = (3, fmt.PAGE_TOKENS, heads, head_dim)
    key, value = (jax.random.normal(next(keys), page, jnp.bfloat16) for _ in "kv")
    new = jnp.ones(len(lengths), jnp.int32)
    for rotation in rotations:
        quantized, reference = (
            jax.jit(functools.partial(ops.quantize_pages, implementation=name))(key, value, rotation)
            for name in (options.implementation, "xla")
        )
        for name in reference:
            _require_equal(f"page quantizer, {name}", quantized[name], reference[name])
        stored = {name: cache for name in (options.implementation, "xla")}
        for _ in range(3):
            stored = {
                name: _append(cache, rotation, key[:, :1], new, implementation=name)
                for name, cache in stored.items()
            }
        for name in (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS, "lengths", "history_pages"):
            arrays = [getattr(stored[choice], name) for choice in (options.implementation, "xla")]
            _require_equal(f"append, {name}", *arrays)

    attend: Any = jax.nn.dot_product_attention
    dense = [query[:1, None], *(rows.reshape(1, -1, heads, head_dim) for rows in (key, value))]
    _require_close(
        "BF16 baseline",
        attend(*dense, scale=scale, implementation=options.baseline),
        attend(*(x.astype(jnp.float32) for x in dense), scale=scale, implementation="xla"),
        BASELINE_TOLERANCE,
    )


_append = jax.jit(
    lambda cache, rotation, row, new, implementation: append_rows(
        cache, rotation, row, row, new, implementation=implementation
    ),
    static_argnames="implementation",
)


def _require_close(what: str, got: jax.Array, want: jax.Array, tolerance: float) -> None:
    found, wanted = np.asarray(got, np.float32), np.asarray(want, np.float32)
    error = float((np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)).max())
    if not error <= tolerance:  # NaN is wrong, too
        raise WrongKernelError(f"{what}: relative error {error:.1e}, allowed: {tolerance:.0e}")


def _require_equal(what: str, got: jax.Array, want: jax.Array) -> None:
    differences = int((np.asarray(got).view(np.uint8) != np.asarray(want).view(np.uint8)).sum())
    if differences:
        raise WrongKernelError(f"{what}: {differences} bytes differ from the reference, allowed: 0")


def device_time(function: Callable, *args: Any, iterations: int = 7) -> float:
    """Median microseconds of device time of one call; on a CPU of wall time."""
    function = jax.jit(function)
    jax.block_until_ready(function(*args))
    if jax.devices()[0].platform == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        milliseconds: Any = profiler.measure(function, iterations=iterations)(*args)[1]
        return float(np.median(milliseconds)) * 1e3
    samples = []
    for _ in range(iterations):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        samples.append(time.perf_counter() - start)
    return float(np.median(samples)) * 1e6


def copy_bandwidth(size: int) -> float:
    """Bytes per second (read plus written) of a device-to-device copy."""
    x = jnp.zeros(size // 4, jnp.int32)
    return 2 * x.nbytes / device_time(lambda x: x + 1, x) * 1e6


def sequence_bytes(config: CacheConfig, length: int) -> tuple[int, int]:
    """Bytes that one decode step reads for one sequence: INT2 cache, and the same tokens in BF16."""
    int2 = config.history_pages(length) * fmt.int2_page_bytes(config.head_dim)
    window = (length - config.history_pages(length) * fmt.PAGE_TOKENS) * 4 * config.head_dim
    heads = config.num_key_value_heads
    return heads * (int2 + window), heads * length * 4 * config.head_dim


def bench_decode(
    name: str, batch: int, length: int, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    """One decode step of one layer: INT2 against BF16, both with their floors, in microseconds."""
    heads, query_heads, head_dim = SHAPES[name]
    config = CacheConfig(heads, query_heads, head_dim)
    int2_bytes, bf16_bytes = (batch * x for x in sequence_bytes(config, length))
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(heads, head_dim))
    softmax_scale = head_dim**-0.5
    query = jax.random.normal(jax.random.key(1), (batch, query_heads, head_dim), jnp.bfloat16)

    copies = max(1, min(16, COLD_BYTES // int2_bytes))
    pool = random_cache(config, batch * copies, length)
    caches = [
        dataclasses.replace(pool, **{f: getattr(pool, f)[i * batch : (i + 1) * batch] for f in PER_SEQUENCE})
        for i in range(copies)
    ]

    def int2(query: jax.Array, caches: list[LayerCache], rotation: LayerRotation) -> list[jax.Array]:
        named = {"softmax_scale": softmax_scale, "implementation": options.implementation}
        return [ops.decode_attention(query, cache, rotation, **named) for cache in caches]

    row: dict[str, Any] = {"what": "decode", "shape": name, "batch": batch, "length": length}
    row["int2_us"] = device_time(int2, query, caches, rotation) / copies
    del pool, caches
    row["int2_floor_us"] = int2_bytes / bandwidth * 1e6
    row["bf16_floor_us"] = bf16_bytes / bandwidth * 1e6

    copies = max(1, min(16, COLD_BYTES // bf16_bytes))
    shape = (copies, batch, length, heads, head_dim)
    if 2 * 2 * np.prod(shape) > options.memory:
        row["bf16_us"] = None  # the BF16 rows do not fit
        return row
    key, value = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (2, 3))

    def bf16(query: jax.Array, key: jax.Array, value: jax.Array) -> list[jax.Array]:
        attend: Any = jax.nn.dot_product_attention
        return [
            attend(query[:, None], key[i], value[i], scale=softmax_scale, implementation=options.baseline)
            for i in range(copies)
        ]

    row["bf16_us"] = device_time(bf16, query, key, value) / copies
    return row


def bench_write(
    name: str, rounding: str, pages: int, bandwidth: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Quantizing `pages` pages of keys and values of all heads of one layer, in microseconds."""
    heads, _, head_dim = SHAPES[name]
    rotation = random_rotation(heads, head_dim, rounding)
    shape = (pages, fmt.PAGE_TOKENS, heads, head_dim)
    key, value = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))

    def quantize(key: jax.Array, value: jax.Array, rotation: LayerRotation) -> dict[str, jax.Array]:
        return ops.quantize_pages(key, value, rotation, implementation=options.implementation)

    moved = key.nbytes + value.nbytes + pages * heads * fmt.int2_page_bytes(head_dim)
    # The rotation is an argument: what the kernel needs prepared of it counts.
    time_us = device_time(quantize, key, value, rotation)
    return {
        "what": "write",
        "shape": name,
        "rounding": rounding,
        "pages": pages,
        "int2_us": time_us,
        "int2_floor_us": moved / bandwidth * 1e6,
        "share_of_copy_bandwidth": moved / bandwidth * 1e6 / time_us,
    }


def bench_append(name: str, rounding: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Storing one token of every sequence, averaged over the 64 steps in which each flushes one page.

    As in a decoder, a step stores into several layers, which share what a loop costs by itself.
    """
    heads, query_heads, head_dim = SHAPES[name]
    config = CacheConfig(heads, query_heads, head_dim)
    rotation = random_rotation(heads, head_dim, rounding)
    # Fresh lengths, so that sequence b flushes in step b: the flushes of a batch rarely coincide.
    lengths = [1024 + b % fmt.PAGE_TOKENS for b in range(batch)]
    history = [config.history_pages(n) for n in lengths]
    caches = [
        dataclasses.replace(
            random_cache(config, batch, 1024 + 3 * fmt.PAGE_TOKENS, layer),
            lengths=jnp.asarray(lengths, jnp.int32),
            history_pages=jnp.asarray(history, jnp.int32),
        )
        for layer in range(LAYERS)
    ]
    rows = jax.random.normal(jax.random.key(1), (batch, 1, heads, head_dim), jnp.bfloat16)
    new = jnp.ones(batch, jnp.int32)

    def steps(pages: int) -> float:
        def step(_: int, caches: list[LayerCache]) -> list[LayerCache]:
            named = {"implementation": options.implementation}
            return [append_rows(cache, rotation, rows, rows, new, **named) for cache in caches]

        return device_time(lambda c: jax.lax.fori_loop(0, pages * fmt.PAGE_TOKENS, step, c), caches)

    # The difference leaves out what a call costs once: a copy of the caches, which are not donated here.
    return {
        "what": "append",
        "shape": name,
        "rounding": rounding,
        "batch": batch,
        "int2_us": (steps(2) - steps(1)) / (fmt.PAGE_TOKENS * LAYERS),
    }


def versions() -> dict[str, str]:
    device = jax.devices()[0]
    return {
        "time": "device" if device.platform == "gpu" else "wall",
        "device": getattr(device, "device_kind", str(device)),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": sys.version.split()[0],
    }


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader must know of every figure: command, versions, both kernels and their dtype."""
    return {
        "command": "python " + " ".join(sys.argv),
        **versions(),
        "int2_kernel": f"{options.implementation} ({INT2_KERNELS[options.implementation]})",
        "bf16_kernel": f"jax.nn.dot_product_attention(implementation={options.baseline!r})",
        "implementation": options.implementation,
        "baseline": options.baseline,
        "dtype": "bfloat16",
    }


def document(head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as a page to read."""
    facts = "".join(f"- {name}: {value}\n" for name, value in head.items())
    return (
        f"# Attention: INT2 against BF16\n\n{facts}\n"
        f"INT2: `{head['implementation']}`. BF16: `jax.nn.dot_product_attention` by `{head['baseline']}`. "
        f"Queries and BF16 rows: {head['dtype']}.\n\n{table(rows)}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown tables of the decode, write and append rows."""

    def number(x: Any, digits: int = 1) -> str:
        return "" if x is None else f"{x:.{digits}f}"

    lines = [
        "| shape | B | S | INT2 µs | INT2 floor | × floor | BF16 µs | BF16 floor | speed-up |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in (r for r in rows if r["what"] == "decode"):
        speedup = r["bf16_us"] / r["int2_us"] if r["bf16_us"] else None
        cells = [r["shape"], r["batch"], r["length"], number(r["int2_us"]), number(r["int2_floor_us"])]
        cells += [number(r["int2_us"] / r["int2_floor_us"], 2), number(r["bf16_us"])]
        cells += [number(r["bf16_floor_us"]), number(speedup, 2)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| write | rounding | pages | µs | share of copy bandwidth |", "|---|---|---|---|---|"]
    for r in (r for r in rows if r["what"] == "write"):
        share = number(100 * r["share_of_copy_bandwidth"]) + " %"
        lines.append(f"| {r['shape']} | {r['rounding']} | {r['pages']} | {number(r['int2_us'])} | {share} |")
    lines += ["", "| append, flush amortized | rounding | B | µs |", "|---|---|---|---|"]
    for r in (r for r in rows if r["what"] == "append"):
        lines.append(f"| {r['shape']} | {r['rounding']} | {r['batch']} | {number(r['int2_us'], 2)} |")
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace) -> None:
    """Runs every case and writes the results after each: an interrupted run leaves what it measured."""
    start = time.perf_counter()
    bandwidth = copy_bandwidth(options.copy_bytes)
    rows: list[dict[str, Any]] = []
    output = pathlib.Path(options.out) / "bench_attention"
    output.parent.mkdir(parents=True, exist_ok=True)
    head = {**about(options), "copy_bytes_per_second": bandwidth}

    def record(case: str, measure: Callable[[], dict[str, Any]]) -> None:
        if time.perf_counter() - start > options.seconds:
            head.setdefault("skipped", []).append(case)
            return
        try:
            rows.append(measure())
        except Exception as error:  # one case that runs out of memory must not hide the others
            head.setdefault("failed", {})[case] = f"{type(error).__name__}: {error}"[:300]
            print("failed:", case, head["failed"][case])
            return
        print(json.dumps(rows[-1]), flush=True)
        output.with_suffix(".json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")

    every = itertools.product(options.shapes, options.batches, options.lengths)
    cases = list(every if options.full else QUICK)
    if "decode" not in options.what and not options.full:
        cases = [case for case in cases if case[0] == WRITE_SHAPE]
    right = []
    for name in dict.fromkeys(name for name, *_ in cases):
        try:
            check_kernels(CacheConfig(*SHAPES[name]), options)
            right.append(name)
        except (WrongKernelError, NotImplementedError) as reason:
            head.setdefault("not_timed", {})[name] = f"{type(reason).__name__}: {reason}"[:300]
            print("not timed:", name, head["not_timed"][name])
    cases = [case for case in cases if case[0] in right]
    for name, batch, length in cases if "decode" in options.what else []:
        case = f"decode {name} B={batch} S={length}"
        record(case, lambda n=name, b=batch, s=length: bench_decode(n, b, s, bandwidth, options))
    writers = [name for name in (options.shapes if options.full else [WRITE_SHAPE]) if name in right]
    for name, rounding in itertools.product(writers, ROUNDINGS):
        arguments: Any = (name, rounding)
        if "write" in options.what:
            write = functools.partial(bench_write, *arguments, options.write_pages, bandwidth, options)
            record(f"write {name} {rounding}", write)
        for batch in options.batches if options.full else [8]:
            if "append" in options.what:
                append = functools.partial(bench_append, *arguments, batch, options)
                record(f"append {name} {rounding} B={batch}", append)
    output.with_suffix(".json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    output.with_suffix(".md").write_text(document(head, rows))
    draw_speed_ups(rows, jax.devices()[0].device_kind, output.with_suffix(".png"))
    print(table(rows))
    if "not_timed" in head:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="all --shapes x --batches x --lengths")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--write-pages", type=int, default=2048)
    parser.add_argument("--implementation", choices=ops.IMPLEMENTATIONS, default="mosaic_gpu")
    parser.add_argument("--baseline", choices=("cudnn", "xla"), default="cudnn")
    parser.add_argument("--memory", type=float, default=60e9, help="bytes that BF16 rows may take")
    parser.add_argument("--copy-bytes", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, help="start no case later; 75, with --full unlimited")
    parser.add_argument("--out", default="results", help="directory")
    options = parser.parse_args()
    options.seconds = options.seconds or (float("inf") if options.full else 75.0)
    run(options)


if __name__ == "__main__":
    main()
