"""INT2 attention and cache writing in Torch against the BF16 kernels and the floor of the memory, in one run.

    python scripts/bench_attention_torch.py --out results [--shapes 1x102400,8x102400,32x32768]

One layer of Qwen3-8B's shape: 32 query heads, 8 key/value heads, head_dim 128. Every time is the median of
CUDA-graph replays with a cold L2 (microseconds). The floor is the bytes a kernel must read, at the bandwidth
that a device-to-device copy reaches in the same run. Random codes: speed does not depend on them. Each INT2
kernel is first compared with the float32 reference on a short cache; no time is reported for a wrong one.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from oscar_torch import attention, ops
from oscar_torch.cache import allocate_layer_cache
from oscar_torch.cache_format import PAGE_TOKENS, int2_page_bytes, window_page_bytes
from oscar_torch.config import CacheConfig
from oscar_torch.layer_cache import LayerCache
from oscar_torch.rotation import LayerRotation
from oscar_torch.triton_kernels import prefill_triton, quantize_triton

HEADS, GROUP, HEAD_DIM = 8, 4, 128
SCALE = HEAD_DIM**-0.5
CONFIG = CacheConfig(HEADS, HEADS * GROUP, HEAD_DIM)
TOLERANCE = 3e-3
SHAPES = ((1, 102_400), (8, 102_400), (32, 32_768))
BASELINES = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}


@dataclasses.dataclass
class Row:
    """One line of the results; `floor` and `baseline` are microseconds in the same run."""

    task: str
    kernel: str
    batch: int
    length: int
    microseconds: float
    floor: float
    baseline: float | None = None


def main() -> None:
    """Parses the arguments, measures, writes attention-torch-<gpu>.{json,md,png}."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--shapes", default=",".join(f"{b}x{s}" for b, s in SHAPES), help="batch x length, ..."
    )
    parser.add_argument("--repetitions", type=int, default=30, help="replays of every measurement")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed")
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in options.shapes.split(",")]
    result: dict[str, Any] = {"command": shlex.join([Path(sys.executable).name, *sys.argv])}
    result |= measure(shapes, options.repetitions)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"attention-torch-{result['gpu'].lower().replace(' ', '-')}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(to_markdown(result))
    plot(result, path.with_suffix(".png"))
    print(to_markdown(result))


def measure(shapes: list[Any], repetitions: int) -> dict[str, Any]:
    """Everything, as JSON-ready values; `repetitions` of every measurement."""
    torch.manual_seed(0)
    rotation = random_rotation()
    wrong = {name: error for name in ("gluon", "triton") if (error := check(name, rotation))}
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    for batch, length in shapes:
        rows += bench_decode(batch, length, rotation, bandwidth, repetitions, wrong)
        torch.cuda.empty_cache()
    rows += bench_launch(repetitions)
    rows += bench_write(rotation, bandwidth, repetitions)
    rows += bench_chunk(rotation, bandwidth, repetitions)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "query bf16; INT2 codes with bf16 scales, means and windows, or a bf16 cache",
        "repetitions": repetitions,
        "copy_bandwidth_tb_s": bandwidth / 1e12,
        "not_measured": wrong,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def check(implementation: str, rotation: LayerRotation) -> str | None:
    """Why an implementation may not be timed here, or None: its error on a short ragged cache."""
    cache = random_cache(3, 5000)
    cache.lengths.copy_(torch.tensor([5000, 700, 64]))
    cache.history_pages.copy_(torch.tensor([CONFIG.history_pages(int(n)) for n in cache.lengths]))
    query = torch.randn(3, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    want = attention.decode_attention(query, cache, rotation, scale=SCALE)
    try:
        got = ops.decode_attention(query, cache, rotation, scale=SCALE, implementation=implementation)
    except NotImplementedError as reason:
        return str(reason)
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
    return None if error <= TOLERANCE else f"relative error {error:.2e}"


def bench_decode(
    batch: int,
    length: int,
    rotation: LayerRotation,
    bandwidth: float,
    repetitions: int,
    wrong: dict[str, str],
) -> list[Row]:
    """One-token attention: INT2 kernels, BF16 kernels, and appending the token."""
    query = torch.randn(batch, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    floor = batch * length * HEADS * HEAD_DIM * 4 / bandwidth * 1e6
    best, rows = bench_bf16(query, length, floor, repetitions)
    cache = random_cache(batch, length)
    floor = int2_bytes(batch, length) / bandwidth * 1e6
    for name in ("gluon", "triton"):
        if name not in wrong:
            call = functools.partial(
                ops.decode_attention, query, cache, rotation, scale=SCALE, implementation=name
            )
            time = graph_time(call, repetitions)
            rows.append(Row("decode", f"INT2 {name}", batch, length, time, floor, best))
    key = torch.randn(batch, 1, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    one = torch.ones(batch, dtype=torch.int32, device="cuda")
    written = batch * 2 * HEADS * HEAD_DIM * 2 / bandwidth * 1e6
    history = CONFIG.history_pages(length) - 1
    due = (CONFIG.window_slots + history) * PAGE_TOKENS - 1  # the next token completes a page
    times = []
    for name, stored in (("append", due - 32), ("append that flushes", due)):

        def reset(stored: int = stored) -> None:
            cache.lengths.fill_(stored)
            cache.history_pages.fill_(history)

        call = functools.partial(quantize_triton.append_token, cache, rotation, key, key, one)
        times.append(graph_time(call, repetitions, reset))
        rows.append(Row(name, "INT2 triton", batch, length, times[-1], written))
    amortized = ((PAGE_TOKENS - 1) * times[0] + times[1]) / PAGE_TOKENS
    rows.append(Row("append, amortized", "INT2 triton", batch, length, amortized, written))
    return rows


def bench_bf16(query: torch.Tensor, length: int, floor: float, repetitions: int) -> tuple[float, list[Row]]:
    """The BF16 kernels that Torch offers, and FlashInfer where installed; the best time and all rows."""
    batch = query.shape[0]
    shape = (batch, HEADS, length, HEAD_DIM)
    key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    one_token = query.view(batch, HEADS * GROUP, 1, HEAD_DIM)
    rows = []
    for name, backend in BASELINES.items():
        try:
            with sdpa_kernel([backend]):
                call = functools.partial(scaled_dot_product_attention, one_token, key, value, enable_gqa=True)
                time = graph_time(call, repetitions)
        except RuntimeError as reason:
            print(f"{name}: {reason}")
            continue
        rows.append(Row("decode", f"BF16 {name}", batch, length, time, floor))
    try:
        import flashinfer  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        if batch == 1:
            decode = flashinfer.single_decode_with_kv_cache
            call = functools.partial(decode, query[0], key[0], value[0], kv_layout="HND")
            time = graph_time(call, repetitions)
            rows.append(Row("decode", "BF16 FlashInfer", batch, length, time, floor))
    return min(row.microseconds for row in rows), rows


def bench_launch(repetitions: int) -> list[Row]:
    """What a CUDA graph with one trivial kernel takes here: no append can take less."""
    number = torch.zeros(1, device="cuda")
    time = graph_time(number.zero_, repetitions)
    return [Row("launch alone", "sets one number", 1, 1, time, time)]


def bench_write(rotation: LayerRotation, bandwidth: float, repetitions: int) -> list[Row]:
    """Quantizing prefill rows: 262 144 tokens of keys, of values, and of both in one launch."""
    pages = 4096
    shape = (pages, PAGE_TOKENS, HEADS, HEAD_DIM)
    key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def keys() -> Any:
        return quantize_triton.quantize_key_pages(key, rotation.key_transform, rotation.key_multiplier)

    def values() -> Any:
        return quantize_triton.quantize_value_pages(
            value, rotation.value_transform, rotation.value_multiplier, rotation.value_mean
        )

    def both() -> Any:
        return quantize_triton.quantize_page_pair(key, value, rotation).values()

    result = []
    cases = (("keys", keys, (key,)), ("values", values, (value,)), ("both", both, (key, value)))
    for role, call, read in cases:
        moved = sum(array.nbytes for array in (*read, *call()))
        time = median_time(call, repetitions)
        result.append(
            Row(f"quantize {role}", "INT2 triton", 1, pages * PAGE_TOKENS, time, moved / bandwidth * 1e6)
        )
    return result


def bench_chunk(rotation: LayerRotation, bandwidth: float, repetitions: int) -> list[Row]:
    """A chunk of 512 queries over a stored prompt, against FlashAttention over the same keys in BF16."""
    tokens, length = 512, 32_768
    cache = random_cache(1, length)
    query = torch.randn(1, tokens, HEADS * GROUP, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(1, tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    counts = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    options = {"new_lengths": counts, "scale": SCALE}
    call = functools.partial(prefill_triton.chunk_attention, query, key, key, cache, rotation, **options)
    time = median_time(call, repetitions)
    stored = torch.randn(1, HEADS * GROUP, length + tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        dense = functools.partial(scaled_dot_product_attention, query.transpose(1, 2), stored, stored)
        baseline = median_time(dense, repetitions)
    floor = int2_bytes(1, length) / bandwidth * 1e6
    return [Row(f"chunk of {tokens}", "INT2 triton", 1, length, time, floor, baseline)]


def graph_time(call: Callable[[], Any], repetitions: int, before: Callable[[], Any] | None = None) -> float:
    """`median_time` of a CUDA-graph replay."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_time(graph.replay, repetitions, before)


def median_time(call: Callable[[], Any], repetitions: int, before: Callable[[], Any] | None = None) -> float:
    """Median microseconds of `call` after `before` and a flush of the L2, both outside the time."""
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for start, end in (*events[:5], *events):  # five to warm up
        if before is not None:
            before()
        flush.zero_()
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


def int2_bytes(batch: int, length: int) -> int:
    """Bytes that one-token attention must read: INT2 pages and the rows of the windows."""
    pages = CONFIG.history_pages(length)
    window = (length - pages * PAGE_TOKENS) * window_page_bytes(HEAD_DIM) // PAGE_TOKENS
    return batch * HEADS * (pages * int2_page_bytes(HEAD_DIM) + window)


def random_cache(batch: int, length: int) -> LayerCache:
    """A full cache of random codes, scales and rows, its pages in random order."""
    cache = allocate_layer_cache(CONFIG, batch, length, device="cuda")
    for codes in (cache.key_codes, cache.value_codes):
        codes.random_(-(2**31), 2**31 - 1)
    for scale in (cache.key_scale, cache.value_scale):
        scale.uniform_(0.3, 0.9)
    for rows in (cache.key_page_mean, cache.window_key, cache.window_value):
        rows.normal_()
    order = 1 + torch.randperm(cache.key_codes.shape[0] - 1, device="cuda")
    cache.page_table.copy_(order[: cache.page_table.numel()].view_as(cache.page_table))
    cache.lengths.fill_(length)
    cache.history_pages.fill_(CONFIG.history_pages(length))
    return cache


def random_rotation() -> LayerRotation:
    """Orthogonal matrices, one per key/value head, in the format's fixed point."""
    fixed = []
    for _ in range(2):
        matrix = torch.linalg.qr(torch.randn(HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float64)).Q
        fixed.append((matrix * 2**14).round())
    key_inverse, value_inverse = (torch.linalg.inv(matrix / 2**14) for matrix in fixed)
    mean = torch.randn(HEADS, HEAD_DIM)
    multiplier = torch.full((HEADS,), 371, dtype=torch.int32)
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


def to_markdown(result: dict[str, Any]) -> str:
    """The results as a page to read."""
    lines = [
        f"# Attention and cache writing in Torch, {result['gpu']}",
        "",
        f"{result['created']}, Torch {result['torch']}, Triton {result['triton']}, copy bandwidth "
        f"{result['copy_bandwidth_tb_s']:.2f} TB/s. {HEADS * GROUP} query heads, {HEADS} key/value heads, "
        f"head_dim {HEAD_DIM}; queries and BF16 rows in bfloat16; microseconds, median, cold L2, decode as "
        "CUDA graphs. "
        f"`{result['command']}`",
        "",
        "| task | kernel | batch | length | µs | floor µs | of the floor | against the best BF16 |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["rows"]:
        time, floor, baseline = row["microseconds"], row["floor"], row["baseline"]
        speedup = f"{baseline / time:.2f} ×" if baseline else ""
        lines.append(
            f"| {row['task']} | {row['kernel']} | {row['batch']} | {row['length']} | {time:.1f} "
            f"| {floor:.1f} | {time / floor:.2f} × | {speedup} |"
        )
    lines += [f"\nNot measured: {name}: {reason}" for name, reason in result["not_measured"].items()]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of the decode times, one group per shape, with the floor of the INT2 cache as a line."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print(f"{path.name} not drawn: matplotlib is not installed")
        return
    rows = [row for row in result["rows"] if row["task"] == "decode"]
    shapes = list(dict.fromkeys((row["batch"], row["length"]) for row in rows))
    figure, all_axes = pyplot.subplots(1, len(shapes), figsize=(4 * len(shapes), 4), squeeze=False)
    for axes, shape in zip(all_axes[0], shapes, strict=True):
        here = [row for row in rows if (row["batch"], row["length"]) == shape]
        bars = axes.bar(
            [row["kernel"].replace(" ", "\n") for row in here], [row["microseconds"] for row in here]
        )
        axes.bar_label(bars, fmt="%.0f")
        axes.axhline(min(row["floor"] for row in here), color="black", linestyle=":", label="floor of INT2")
        axes.set_title(f"batch {shape[0]}, {shape[1]} tokens")
        axes.set_ylabel("µs")
        axes.legend()
    figure.suptitle(f"One-token attention in Torch {result['torch']}, {result['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
