"""INT2 attention and cache writing in Torch against the BF16 kernels and the floor of the memory, in one run.

    python scripts/bench_attention_torch.py --out results            # the quick cases
    python scripts/bench_attention_torch.py --out results --full     # every model, batch and length
    python scripts/bench_attention_torch.py --out results --tasks write append --models qwen3-8b qwen2.5-0.5b

As in a decoder: decode and append times are those of one layer in a CUDA graph that runs at least LAYERS of
them, whose caches are too large together for the L2 to keep; the others are of one call after a flush of the
L2. Medians, microseconds. The floor is the bytes a kernel must read, at the bandwidth that a device-to-device
copy reaches in the same run. Random codes: speed does not depend on them.
Each INT2 kernel is first compared with the float32 reference on a short cache; no time is reported for a
wrong one. The results are written after every case.
"""

import argparse
import dataclasses
import datetime
import functools
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from bench_cases import BATCHES, LAYERS, LENGTHS, QUICK, SHAPES
from draw_runs import draw_times
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oscar_torch import attention, ops
from oscar_torch.cache import allocate_layer_cache
from oscar_torch.core.cache_format import PAGE_TOKENS, int2_page_bytes, window_page_bytes
from oscar_torch.core.config import CacheConfig
from oscar_torch.layer_cache import LayerCache
from oscar_torch.quantize import Feedback
from oscar_torch.rotations.rotation import LayerRotation
from oscar_torch.triton_kernels.prefill import gluon
from oscar_torch.triton_kernels.prefill import triton as prefill_triton
from oscar_torch.triton_kernels.quantize import gluon as quantize_gluon
from oscar_torch.triton_kernels.quantize import triton as quantize_triton

TOLERANCE = 3e-3
TASKS = ("decode", "write", "append", "chunk")
WRITERS = {"gluon": quantize_gluon, "triton": quantize_triton}
CHUNK_KERNELS = {"gluon": gluon.chunk_attention, "triton": prefill_triton.chunk_attention}
WRITE_BYTES = 1 << 30  # of BF16 keys and values
COLD_BYTES = 1 << 30  # that a graph reads before it comes back to a cache: many times any L2
MOST_LAYERS = 64  # of a graph whose caches are small
BASELINES = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}


@dataclasses.dataclass
class Row:
    """One line of the results; `floor` and `baseline` are microseconds in the same run."""

    model: str
    task: str
    kernel: str
    batch: int
    length: int
    microseconds: float
    floor: float | None = None
    baseline: float | None = None


@dataclasses.dataclass(frozen=True)
class Bench:
    """What every measurement of one model needs."""

    model: str
    config: CacheConfig
    rotation: LayerRotation
    fed: LayerRotation  # the same, made for sequential rounding
    bandwidth: float
    repetitions: int

    @property
    def softmax_scale(self) -> float:
        return self.config.head_dim**-0.5

    def floor(self, size: int) -> float:
        """Microseconds that a copy takes to move `size` bytes."""
        return size / self.bandwidth * 1e6


def main() -> None:
    """Parses the arguments, measures, writes attention-torch-<gpu>.{json,md,png}."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--full", action="store_true", help="all --models x --batches x --lengths")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--repetitions", type=int, default=30, help="replays of every measurement")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name()
    path = options.out / f"attention-torch-{gpu.lower().replace(' ', '-')}"
    bandwidth = copy_bandwidth()
    result: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "query bf16; INT2 codes with bf16 scales, means and windows, or a bf16 cache",
        "repetitions": options.repetitions,
        "copy_bandwidth_tb_s": bandwidth / 1e12,
        "not_measured": {},
        "rows": [],
    }
    for rows in measure(options, bandwidth, result["not_measured"]):
        result["rows"] += [dataclasses.asdict(row) for row in rows]
        for row in rows:
            print(
                f"{row.model} {row.task} {row.kernel} {row.batch} x {row.length}: {row.microseconds:.1f} us"
            )
        path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(to_markdown(result))
    plot(result, path.with_suffix(".png"))
    print(to_markdown(result))


def measure(options: argparse.Namespace, bandwidth: float, wrong: dict[str, str]) -> Iterator[list[Row]]:
    """The rows of one case after the other; `wrong` receives the kernels that may not be timed."""
    torch.manual_seed(0)
    cases = itertools.product(options.models, options.batches, options.lengths) if options.full else QUICK
    cases = [case for case in cases if case[0] in options.models]
    benches: dict[str, Bench] = {}
    for model, batch, length in cases:
        if model not in benches:
            config = CacheConfig(*SHAPES[model])
            rotation = random_rotation(config)
            fed = dataclasses.replace(rotation, **random_feedback(config))
            bench = Bench(model, config, rotation, fed, bandwidth, options.repetitions)
            benches[model] = bench
            for name in ("gluon", "triton"):
                if error := check(name, bench):
                    wrong[f"{model} {name}"] = error
        if "decode" in options.tasks:
            yield bench_decode(benches[model], batch, length, wrong)
            torch.cuda.empty_cache()
    for bench in benches.values():
        if "write" in options.tasks:
            yield bench_write(bench)
            torch.cuda.empty_cache()
        if bench.model == "qwen3-8b" and "append" in options.tasks:
            for batch in options.batches:
                yield bench_append(bench, batch)
        if bench.model == "qwen3-8b" and "chunk" in options.tasks:
            yield bench_chunk(bench)


def check(implementation: str, bench: Bench) -> str | None:
    """Why an implementation may not be timed here, or None: its error on a short ragged cache."""
    config = bench.config
    cache = random_cache(config, 3, 5000)
    cache.lengths.copy_(torch.tensor([5000, 700, 64]))
    cache.history_pages.copy_(torch.tensor([config.history_pages(int(n)) for n in cache.lengths]))
    query = torch.randn(3, config.num_query_heads, config.head_dim, device="cuda", dtype=torch.bfloat16)
    want = attention.decode_attention(query, cache, bench.rotation, softmax_scale=bench.softmax_scale)
    try:
        got = ops.decode_attention(
            query, cache, bench.rotation, softmax_scale=bench.softmax_scale, implementation=implementation
        )
    except NotImplementedError as reason:
        return str(reason)
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
    return None if error <= TOLERANCE else f"relative error {error:.2e}"


def bench_decode(bench: Bench, batch: int, length: int, wrong: dict[str, str]) -> list[Row]:
    """One-token attention: BF16 kernels and INT2 kernels."""
    config = bench.config
    query = torch.randn(batch, config.num_query_heads, config.head_dim, device="cuda", dtype=torch.bfloat16)
    rows = bench_bf16(bench, query, length)
    best = min(row.microseconds for row in rows)
    torch.cuda.empty_cache()
    size = int2_bytes(config, batch, length)
    caches = [random_cache(config, batch, length) for _ in range(distinct_layers(size))]
    for name in ("gluon", "triton"):
        if f"{bench.model} {name}" not in wrong:
            time = layer_time(
                lambda cache, name=name: ops.decode_attention(
                    query, cache, bench.rotation, softmax_scale=bench.softmax_scale, implementation=name
                ),
                caches,
                bench.repetitions,
            )
            kernel = f"INT2 {name}"
            rows.append(Row(bench.model, "decode", kernel, batch, length, time, bench.floor(size), best))
    return rows


def bench_append(bench: Bench, batch: int) -> list[Row]:
    """Storing one token of every sequence into one layer: a graph stores into LAYERS of them."""
    config, length = bench.config, 1024
    caches = [random_cache(config, batch, length + 3 * PAGE_TOKENS) for _ in range(LAYERS)]
    rows = torch.randn(batch, 1, config.num_key_value_heads, config.head_dim, device="cuda").bfloat16()
    one = torch.ones(batch, dtype=torch.int32, device="cuda")

    def step(implementation: str, rotation: LayerRotation) -> None:
        for cache in caches:
            ops.append_token(cache, rotation, rows, rows, one, implementation=implementation)

    def reset(tokens: list[int]) -> None:
        for cache in caches:
            cache.lengths.copy_(torch.tensor(tokens))
            cache.history_pages.copy_(torch.tensor([config.history_pages(n) for n in tokens]))

    # A multiple of the page has just flushed; spread lengths let the sequences flush one after the other.
    spread = [length + b % PAGE_TOKENS for b in range(batch)]
    cases = (
        ("append, 64 steps, each sequence flushes once", spread, PAGE_TOKENS),
        ("append, no sequence flushes", [length + PAGE_TOKENS // 2] * batch, 1),
        ("append, every sequence flushes", [length - 1] * batch, 1),
    )
    roundings = (("", bench.rotation), (", sequential", bench.fed))
    result = []
    for name, (rounding, rotation), (task, tokens, steps) in itertools.product(WRITERS, roundings, cases):
        call, before = functools.partial(step, name, rotation), functools.partial(reset, tokens)
        time = graph_time(call, bench.repetitions, before, steps) / LAYERS
        result.append(Row(bench.model, task + rounding, f"INT2 {name}", batch, 1, time))
    return result


def bench_bf16(bench: Bench, query: torch.Tensor, length: int) -> list[Row]:
    """The BF16 kernels that Torch offers, and FlashInfer where installed."""
    config, batch = bench.config, query.shape[0]
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    size = 4 * batch * config.num_key_value_heads * length * config.head_dim
    layers = [
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for _ in range(distinct_layers(size))
    ]
    calls: dict[str, Callable[[list[torch.Tensor]], Any]] = {}
    one_token = query.view(batch, config.num_query_heads, 1, config.head_dim)
    for name, backend in BASELINES.items():

        def attend(layer: list[torch.Tensor], backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel([backend]):
                return scaled_dot_product_attention(one_token, layer[0], layer[1], enable_gqa=True)

        calls[name] = attend
    try:
        import flashinfer  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        if batch == 1:
            decode = flashinfer.single_decode_with_kv_cache
            calls["FlashInfer"] = lambda layer: decode(query[0], layer[0][0], layer[1][0], kv_layout="HND")
    rows = []
    for name, call in calls.items():
        try:
            time = layer_time(call, layers, bench.repetitions)
        except RuntimeError as reason:
            print(f"{name}: {reason}")
            continue
        rows.append(Row(bench.model, "decode", f"BF16 {name}", batch, length, time, bench.floor(size)))
    return rows


def bench_write(bench: Bench) -> list[Row]:
    """Quantizing prefill rows: of keys, of values, and of both in one launch, also sequentially."""
    heads, head_dim, rotation = bench.config.num_key_value_heads, bench.config.head_dim, bench.rotation
    pages = WRITE_BYTES // (4 * PAGE_TOKENS * heads * head_dim)
    shape = (pages, PAGE_TOKENS, heads, head_dim)
    key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    read = key.nbytes
    for_keys = (rotation.key_transform, rotation.key_multiplier)
    for_values = (rotation.value_transform, rotation.value_multiplier, rotation.value_mean)
    result = []
    for name, writer in WRITERS.items():
        if wrong := wrong_pages(bench, writer.quantize_page_pair):
            print(f"{bench.model}, {name}: not timed, {wrong}")
            continue
        calls = {
            "keys": lambda w=writer: w.quantize_key_pages(key, *for_keys),
            "values": lambda w=writer: w.quantize_value_pages(value, *for_values),
            "both": lambda w=writer: w.quantize_page_pair(key, value, rotation).values(),
            "both, sequential": lambda w=writer: w.quantize_page_pair(key, value, bench.fed).values(),
        }
        for role, call in calls.items():
            try:
                written = sum(array.nbytes for array in call())
            except NotImplementedError as reason:
                print(f"{bench.model}, {name}: {reason}")
                break
            floor = bench.floor(written + read * (2 if role.startswith("both") else 1))
            time = median_time(call, bench.repetitions)
            kernel = f"INT2 {name}"
            row = Row(bench.model, f"quantize {role}", kernel, 1, pages * PAGE_TOKENS, time, floor)
            result.append(row)
    return result


def wrong_pages(bench: Bench, write: Any) -> str:
    """Which arrays of a few pages differ from the reference's in a byte, in either rounding; "" if none."""
    shape = (5, PAGE_TOKENS, bench.config.num_key_value_heads, bench.config.head_dim)
    key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    wrong = []
    for rounding, rotation in (("nearest", bench.rotation), ("sequential", bench.fed)):
        try:
            got = write(key, value, rotation)
        except NotImplementedError:  # said when it is to be timed
            continue
        want = ops.quantize_pages(key, value, rotation, implementation="eager")
        for name in want:
            one, other = (arrays[name].contiguous().view(torch.uint8) for arrays in (got, want))
            if not torch.equal(one, other):
                wrong.append(f"{rounding} {name}")
    return ", ".join(wrong)


def bench_chunk(bench: Bench) -> list[Row]:
    """A chunk of 512 queries over a stored prompt, against the BF16 kernels over the same keys."""
    tokens, length, config = 512, 32_768, bench.config
    heads, query_heads, head_dim = config.num_key_value_heads, config.num_query_heads, config.head_dim
    cache = random_cache(config, 1, length)
    query = torch.randn(1, tokens, query_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    counts = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    options = {"new_lengths": counts, "softmax_scale": bench.softmax_scale}
    stored = torch.randn(1, query_heads, length + tokens, head_dim, device="cuda", dtype=torch.bfloat16)
    baselines = {}
    for name, backend in BASELINES.items():
        with sdpa_kernel([backend]):
            dense = functools.partial(scaled_dot_product_attention, query.transpose(1, 2), stored, stored)
            baselines[name] = median_time(dense, bench.repetitions)
    floor, best = bench.floor(int2_bytes(config, 1, length)), min(baselines.values())
    task = f"chunk of {tokens}"
    rows = [Row(bench.model, task, f"BF16 {name}", 1, length, time) for name, time in baselines.items()]
    for name, kernel in CHUNK_KERNELS.items():
        call = functools.partial(kernel, query, key, key, cache, bench.rotation, **options)
        time = median_time(call, bench.repetitions)
        rows.append(Row(bench.model, task, f"INT2 {name}", 1, length, time, floor, best))
    return rows


def distinct_layers(size: int) -> int:
    """Caches of `size` bytes to go round, so that none is still in the L2 when its turn comes again."""
    return min(MOST_LAYERS, 1 + COLD_BYTES // size)


def layer_time(call: Callable[[Any], Any], layers: list[Any], repetitions: int) -> float:
    """Microseconds of one `call(layer)` in a graph that calls it for at least LAYERS, one after the other."""
    count = max(LAYERS, len(layers))
    turns = [layers[n % len(layers)] for n in range(count)]
    return graph_time(lambda: [call(layer) for layer in turns], repetitions) / count


def graph_time(
    call: Callable[[], Any], repetitions: int, before: Callable[[], Any] | None = None, replays: int = 1
) -> float:
    """`median_time` of a CUDA-graph replay, the mean of `replays` in a row."""
    if before is not None:
        before()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        for _ in range(replays):
            graph.replay()

    return median_time(replay, repetitions, before) / replays


def median_time(call: Callable[[], Any], repetitions: int, before: Callable[[], Any] | None = None) -> float:
    """Median microseconds of `call` after `before` and a flush of the L2, both outside the time.

    The flush reads, as other layers do in a decoder: `call` would have to write back what a flush wrote.
    """
    flush = torch.ones(1 << 26, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in (*events[:5], *events):  # five to warm up
        if before is not None:
            before()
        flush.amax()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large device-to-device copy."""
    source = torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_time(lambda: target.copy_(source), 30) * 1e-6)


def int2_bytes(config: CacheConfig, batch: int, length: int) -> int:
    """Bytes that one-token attention must read: INT2 pages and the rows of the windows."""
    pages = config.history_pages(length)
    rows = length - pages * PAGE_TOKENS
    window = rows * window_page_bytes(config.head_dim) // PAGE_TOKENS
    return batch * config.num_key_value_heads * (pages * int2_page_bytes(config.head_dim) + window)


def random_cache(config: CacheConfig, batch: int, length: int) -> LayerCache:
    """A full cache of random codes, scales and rows, its pages in random order."""
    cache = allocate_layer_cache(config, batch, length, device="cuda")
    for codes in (cache.key_codes, cache.value_codes):
        codes.random_(-(2**31), 2**31 - 1)
    for scale in (cache.key_scale, cache.value_scale):
        scale.uniform_(0.3, 0.9)
    for rows in (cache.key_page_mean, cache.window_key, cache.window_value):
        rows.normal_()
    order = 1 + torch.randperm(cache.key_codes.shape[0] - 1, device="cuda")
    cache.page_table.copy_(order[: cache.page_table.numel()].view_as(cache.page_table))
    cache.lengths.fill_(length)
    cache.history_pages.fill_(config.history_pages(length))
    return cache


def random_rotation(config: CacheConfig) -> LayerRotation:
    """Orthogonal matrices, one per key/value head, in the format's fixed point."""
    heads, head_dim = config.num_key_value_heads, config.head_dim
    fixed = []
    for _ in range(2):
        matrix = torch.linalg.qr(torch.randn(heads, head_dim, head_dim, dtype=torch.float64)).Q
        fixed.append((matrix * 2**14).round())
    key_inverse, value_inverse = (torch.linalg.inv(matrix / 2**14) for matrix in fixed)
    mean = torch.randn(heads, head_dim)
    multiplier = torch.full((heads,), 371, dtype=torch.int32)
    fields = {
        "key_transform": fixed[0].to(torch.int16),
        "query_transform": key_inverse.mT.contiguous().float(),
        "value_transform": fixed[1].to(torch.int16),
        "output_transform": value_inverse.contiguous().float(),
        "value_mean": mean.bfloat16(),
        "key_mean": mean.bfloat16(),
        "key_multiplier": multiplier,
        "value_multiplier": multiplier.clone(),
    }
    return LayerRotation(**{name: field.cuda() for name, field in fields.items()})


def random_feedback(config: CacheConfig) -> dict[str, Feedback]:
    """Feedback of keys and values in four blocks, by field."""
    heads, head_dim = config.num_key_value_heads, config.head_dim
    block = torch.arange(head_dim) // (head_dim // 4)
    found = {}
    for role in ("key", "value"):
        matrix = torch.randint(-40, 41, (heads, head_dim, head_dim)) * (block[:, None] < block)
        shift = torch.full((heads,), 7, dtype=torch.int32)
        found[f"{role}_feedback"] = Feedback(matrix.to(torch.int8).cuda(), shift.cuda(), 4)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    """The results as a page to read."""
    lines = [
        f"# Attention and cache writing in Torch, {result['gpu']}",
        "",
        f"{result['created']}, Torch {result['torch']}, Triton {result['triton']}, copy bandwidth "
        f"{result['copy_bandwidth_tb_s']:.2f} TB/s. Queries and BF16 rows in bfloat16; microseconds, median, "
        f"cold L2; decode and append: one layer in a CUDA graph of at least {LAYERS}. `{result['command']}`",
        "",
        "| model | task | kernel | batch | length | µs | floor µs | of the floor | against the best BF16 |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        time, floor, baseline = row["microseconds"], row["floor"], row["baseline"]
        speedup = f"{baseline / time:.2f} ×" if baseline else ""
        share = (f"{floor:.1f}", f"{time / floor:.2f} ×") if floor else ("", "")
        lines.append(
            f"| {row['model']} | {row['task']} | {row['kernel']} | {row['batch']} | {row['length']} "
            f"| {time:.1f} | {share[0]} | {share[1]} | {speedup} |"
        )
    lines += [f"\nNot measured: {name}: {reason}" for name, reason in result["not_measured"].items()]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of the decode times of the quick cases."""
    try:
        draw_times(result, path)
    except ImportError:
        print(f"{path.name} not drawn: matplotlib is not installed")


if __name__ == "__main__":
    main()
