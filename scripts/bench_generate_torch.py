"""Times transformers' `generate` on a decoder of Qwen3-8B's shape with random weights: 2-bit cache and BF16.

    python scripts/bench_generate_torch.py --out results --quick       # about five minutes
    python scripts/bench_generate_torch.py --out results               # all lengths and batches
    python scripts/bench_generate_torch.py --out results --throughput  # equal memory, two minutes
    python scripts/bench_generate_torch.py --out results --prefill-only --cases 1x32768  # one minute

Decode: caches are filled with random content, then `generate` makes steps; a step is the median time between
two calls of `prepare_inputs_for_generation`, host time the part of it before transformers waits for the
tokens. The floor is the bytes a step must read (weights without the input embedding, and the cache) at the
bandwidth of a device-to-device copy in the same run. "graph" rows replay the eager step as one CUDA graph,
without `generate`: what is left when the host costs nothing. Prefill: random tokens, one new token; the row
is the second run, its note the first, in which kernels are compiled, layer by layer in the log.
Throughput: as many sequences of 102 400 tokens as fit beside the weights, decode steps as a CUDA graph.
No time of a way to make steps is reported before the gate has passed: compiled, eager and growing steps agree
on a short prompt, and an eager step of the static mode asks the device nothing. Results are written after
every line.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import pathlib
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from bench_generate_models import (
    InPlaceLayer,
    fewer_layers,
    hadamard_rotations,
    hold_random_tokens,
    make_model,
    qwen3_8b,
    tiny,
    with_cache,
)
from transformers import DynamicCache, Qwen3Config, StaticCache, StoppingCriteriaList
from transformers.cache_utils import Cache

from oscar_torch.core import cache_format as fmt
from oscar_torch.hf import OscarCache, cache_config

LONG = 102_400  # tokens of a sequence in the throughput mode
WARM = 5  # steps before the clock counts: compilation, warm-up and recording of CUDA graphs
# A BF16 engine on the same model shape: vLLM 0.21.0, FlashAttention 3, CUDA graphs, H200, 2026-11-30.
VLLM = {(1, 32_768): (6.55, 1.40), (8, 32_768): (14.6, 10.2), (1, 98_304): (8.91, 6.91)}


@dataclasses.dataclass
class Row:
    """One line: milliseconds per decode step or seconds of a prefill, and what stands beside it."""

    task: str
    kind: str
    batch: int
    length: int
    milliseconds: float
    floor: float | None = None  # milliseconds
    host: float | None = None  # milliseconds
    peak_gib: float | None = None
    note: str = ""


@dataclasses.dataclass
class Bench:
    """A model, where results go, and how much time is left."""

    model: Any
    device: torch.device
    out: pathlib.Path
    end: float
    command: str
    bandwidth: float = float("nan")  # bytes per second
    rows: list[Row] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    allowed: set[str] = dataclasses.field(default_factory=set)  # ways to make a step that passed the gate
    start: float = dataclasses.field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{time.monotonic() - self.start:7.1f} s] {text}", flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)
        self.write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)
        self.write()

    def write(self) -> None:
        """run.json and page.md, as far as results have come."""
        self.out.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
        run = {
            "device": device,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": self.command,
            "created": time.strftime("%Y-%m-%d"),
            "bandwidth": self.bandwidth,
            "notes": self.notes,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        (self.out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
        lines = [
            "# `generate` with 2-bit and BF16 caches",
            "",
            f"- command: {self.command}",
            f"- {device}, torch {torch.__version__}, transformers {transformers.__version__}; "
            f"copy {self.bandwidth / 1e12:.2f} TB/s",
            "",
            "| task | cache | batch | tokens | ms | x floor | host ms | peak GiB | |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for r in self.rows:
            floor = "" if r.floor is None else f"{r.milliseconds / r.floor:.2f} ({r.floor:.2f})"
            host = "" if r.host is None else f"{r.host:.2f}"
            peak = "" if r.peak_gib is None else f"{r.peak_gib:.1f}"
            lines.append(
                f"| {r.task} | {r.kind} | {r.batch} | {r.length} | {r.milliseconds:.2f} | {floor} | {host} "
                f"| {peak} | {r.note} |"
            )
        (self.out / "page.md").write_text("\n".join([*lines, "", *(f"- {n}" for n in self.notes)]) + "\n")

    def run(self, seconds: float, name: str, job: Callable[[], None]) -> None:
        """One configuration within its share of the time; a failure is a note, the others go on."""
        left = self.end - time.monotonic()
        if left < 5:
            self.note(f"{name}: no time left")
            return

        def too_long(signum: int, frame: Any) -> None:
            raise TimeoutError(f"more than {min(seconds, left):.0f} s")

        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(max(1, int(min(seconds, left))))
        self.say(f"{name}: begins")
        try:
            job()
        except Exception as reason:  # what fails (memory, time, compiler) must not cost the other lines
            self.note(f"{name}: {type(reason).__name__}: {str(reason)[:300]}")
        finally:
            signal.alarm(0)
            self.say(f"{name}: ends")
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------------------------------- the caches


def filled_int2(bench: Bench, batch: int, length: int, capacity: int) -> OscarCache:
    """A static OscarCache whose sequences hold `length` tokens of random content."""
    config = bench.model.config
    cache = OscarCache(hadamard_rotations(config), config, max_length=capacity)
    geometry = cache_config(config)
    shape = (batch, geometry.num_key_value_heads, 0, geometry.head_dim)
    rows = torch.empty(shape, dtype=torch.bfloat16, device=bench.device)
    for layer in cache.layers:
        layer.lazy_initialization(rows, rows)
    return hold_random_tokens(cache, length)


def filled_bf16(bench: Bench, kind: str, batch: int, length: int, capacity: int) -> Cache:
    """A BF16 cache of `length` random tokens: "dynamic", "static" or "in place"."""
    config = bench.model.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    rows = torch.empty((batch, heads, 0, head_dim), dtype=torch.bfloat16, device=bench.device)
    if kind == "static":
        cache: Any = StaticCache(config=config, max_cache_len=capacity)
        for layer in cache.layers:
            layer.lazy_initialization(rows, rows)
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(length)
        return cache
    if kind == "in place":
        cache = Cache(layers=[InPlaceLayer(capacity) for _ in range(config.num_hidden_layers)])
        for layer in cache.layers:
            layer.lazy_initialization(rows, rows)
            layer.keys.normal_()
            layer.values.normal_()
            layer.length = length
        return cache
    cache = DynamicCache(config=config)
    shape = (batch, heads, length, head_dim)
    for i in range(config.num_hidden_layers):
        key, value = (torch.randn(shape, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
        cache.update(key, value, i)
    return cache


# -------------------------------------------------------------------------------------------------- measuring


def synchronize(bench: Bench) -> None:
    if bench.device.type == "cuda":
        torch.cuda.synchronize()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a device-to-device copy reads and writes."""
    if device.type != "cuda":
        return 1e10
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / statistics.median(times[2:])


def weight_bytes(model: Any) -> int:
    """What a step reads of the parameters: all but the input embedding."""
    embedding = model.get_input_embeddings().weight
    return sum(p.nbytes for p in model.parameters() if p is not embedding)


def cache_bytes(bench: Bench, kind: str, batch: int, length: int) -> int:
    """What a step reads of a cache."""
    config, geometry = bench.model.config, cache_config(bench.model.config)
    tokens = length
    per_head = 0
    if kind == "int2":
        pages = geometry.history_pages(length)
        per_head = pages * fmt.int2_page_bytes(geometry.head_dim)
        tokens = length - pages * fmt.PAGE_TOKENS
    per_head += tokens * geometry.head_dim * 4
    return batch * config.num_hidden_layers * geometry.num_key_value_heads * per_head


def floor(bench: Bench, kind: str, batch: int, length: int) -> float:
    """Milliseconds of a step that only reads what it must."""
    return 1e3 * (weight_bytes(bench.model) + cache_bytes(bench, kind, batch, length)) / bench.bandwidth


PROFILED = 3  # steps
# What is cheap to measure first; compiling takes about a minute per batch size.
WAYS = ("int2-eager", "int2-graph", "int2-compiled", "bf16-graph", "bf16-eager", "bf16-compiled")


class Clock:
    """When steps begin and when the host has nothing left to do in them, seen from inside `generate`.

    After the warm and the timed ones, `PROFILED` steps are profiled, if `profiler` is given.
    """

    def __init__(self, model: Any, steps: int, profiler: Any = None) -> None:
        self.model, self.begins, self.ends = model, [], []
        self.last, self.profiler = WARM + steps, profiler

    def __enter__(self) -> "Clock":
        prepare = self.model.prepare_inputs_for_generation

        @functools.wraps(prepare)  # `generate` looks at its arguments
        def noted(*args: Any, **options: Any) -> Any:
            if self.profiler is not None and len(self.begins) == self.last:
                self.profiler.start()
            if self.profiler is not None and len(self.begins) == self.last + PROFILED:
                self.profiler.stop()
            self.begins.append(time.perf_counter())
            return prepare(*args, **options)

        self.model.prepare_inputs_for_generation = noted
        return self

    def __exit__(self, *error: Any) -> None:
        del self.model.prepare_inputs_for_generation

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.ends.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def medians(self) -> tuple[float, float]:
        """Milliseconds of a step and of the host's part in it."""
        begins, ends = self.begins[WARM : self.last], self.ends[WARM : self.last]
        steps = [b - a for a, b in itertools.pairwise(begins)]
        host = [b - a for a, b in zip(begins, ends, strict=True)]
        return 1e3 * statistics.median(steps), 1e3 * statistics.median(host)


def time_generate(
    bench: Bench, name: str, attention: str, cache: Cache, batch: int, length: int, steps: int, compiled: bool
) -> None:
    """Steps of `generate` on a filled cache; adds a row."""
    model = bench.model
    if isinstance(cache, OscarCache) and ("compiled" if compiled else "eager") not in bench.allowed:
        raise AssertionError("did not pass the gate")
    model.set_attn_implementation(attention)
    ids = torch.randint(1, 100, (batch, length + 1), device=bench.device)
    options: dict[str, Any] = {"disable_compile": not compiled}
    if compiled and bench.device.type != "cuda":
        config: Any = transformers.CompileConfig(**{"backend": "eager", "mode": None})
        config._compile_all_devices = True
        options["compile_config"] = config
    profiler = None
    if bench.device.type == "cuda" and isinstance(cache, OscarCache):
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        profiler = torch.profiler.profile(activities=activities)
    new = WARM + steps + PROFILED + 1
    with Clock(model, steps, profiler) as clock:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new,
            stopping_criteria=StoppingCriteriaList([clock]), **with_cache(model, cache), **options,
        )  # fmt: skip
    synchronize(bench)
    if profiler is not None:
        table = profiler.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70
        )
        file = bench.out / f"profile-{name}-{batch}-{length}.txt".replace(", ", "-").replace(" ", "-")
        file.write_text(f"{PROFILED} steps\n{table}\n")
    step, host = clock.medians()
    kind = "int2" if isinstance(cache, OscarCache) else "bf16"
    bench.add(
        Row("decode", name, batch, length, step, floor(bench, kind, batch, length), host, peak_gib(bench))
    )


def peak_gib(bench: Bench) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if bench.device.type == "cuda" else None


def graph_step(bench: Bench, attention: str, cache: Cache, batch: int, length: int, replays: int) -> float:
    """Milliseconds of one forward pass and argmax on a filled cache, replayed as a CUDA graph."""
    model = bench.model
    model.set_attn_implementation(attention)
    tokens = torch.ones((batch, 1), dtype=torch.long, device=bench.device)
    position = torch.full((batch, 1), length, dtype=torch.long, device=bench.device)
    in_place = [layer for layer in cache.layers if isinstance(layer, InPlaceLayer)]

    def step() -> None:
        for layer in in_place:
            layer.length = length
        logits = model(tokens, position_ids=position, use_cache=True, **with_cache(model, cache)).logits
        tokens.copy_(logits[:, -1].argmax(dim=-1, keepdim=True))

    with torch.no_grad():
        if bench.device.type != "cuda":
            start = time.perf_counter()
            step()
            return 1e3 * (time.perf_counter() - start)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def time_graph(bench: Bench, name: str, attention: str, cache: Cache, batch: int, length: int) -> None:
    """Adds a row of `graph_step`."""
    step = graph_step(bench, attention, cache, batch, length, 12)
    kind = "int2" if isinstance(cache, OscarCache) else "bf16"
    bench.add(
        Row("decode", name, batch, length, step, floor(bench, kind, batch, length), None, peak_gib(bench))
    )


def time_prefill(
    bench: Bench, name: str, attention: str, make: Callable[[], Cache], batch: int, length: int
) -> None:
    """A prompt of random tokens, twice: the first time kernels are compiled; adds a row of the second."""
    model = bench.model
    model.set_attn_implementation(attention)
    ids = torch.randint(1, 100, (batch, length), device=bench.device)
    if isinstance(make(), OscarCache) and "prefill" not in bench.allowed:
        raise AssertionError("did not pass the gate")
    seconds = []
    for run in ("first run", "second run"):
        cache = make()
        synchronize(bench)
        start = time.perf_counter()
        with contextlib.ExitStack() as hooks:
            if run == "first run":
                say_layers(bench, name, hooks)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=1,
                **with_cache(model, cache),
            )  # fmt: skip
        synchronize(bench)
        seconds.append(time.perf_counter() - start)
        bench.say(f"{name}, {batch} x {length}, {run}: {seconds[-1]:.2f} s")
        del cache
    note = f"first run {seconds[0]:.2f} s"
    bench.add(Row("prefill", name, batch, length, 1e3 * seconds[1], None, None, peak_gib(bench), note))


def say_layers(bench: Bench, name: str, hooks: contextlib.ExitStack) -> None:
    """While `hooks` are open: says when the first layers of a prefill and every eighth have been done."""
    for number, layer in enumerate(bench.model.model.layers):

        def done(module: Any, *arguments: Any, number: int = number) -> None:
            synchronize(bench)
            bench.say(f"{name}: layer {number} done")

        if number < 2 or number % 8 == 0:
            hooks.callback(layer.register_forward_hook(done).remove)


# ------------------------------------------------------------------------------------------------ what is run


def gate(bench: Bench, config: Qwen3Config) -> None:
    """Notes which ways to make a step agree with the growing mode; only those are `bench.allowed`."""
    model = make_model(fewer_layers(config, 2), bench.device)
    model.set_attn_implementation("oscar")
    rotations = hadamard_rotations(model.config)
    ids = torch.randint(1, 100, (2, 700), device=bench.device)
    mask = torch.ones_like(ids)
    mask[1, :250] = 0
    forced = torch.randint(1, 100, (2, 80), device="cpu").tolist()

    def logits(compiled: bool, **options: Any) -> torch.Tensor:
        cache = OscarCache(rotations, model.config, **options)
        run = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=70, output_logits=True,
            return_dict_in_generate=True, disable_compile=not compiled,
            prefix_allowed_tokens_fn=lambda b, row: [forced[b][len(row) - 700]], **with_cache(model, cache),
        )  # fmt: skip
        return torch.stack(run.logits).float()

    expected = logits(False)

    def compare(name: str, compiled: bool) -> None:
        found = logits(compiled, max_length=900)
        worst = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
        bench.note(f"gate: {name} steps against the growing mode, largest relative error {worst:.4f}")
        # A rounding elsewhere moves bf16 logits by a few 1e-3; a wrong page or position by more than 0.3.
        if worst < 0.05:
            bench.allowed.add(name)

    bench.run(60, "gate: eager", lambda: compare("eager", False))
    bench.run(120, "gate: compiled", lambda: compare("compiled", True))
    if bench.device.type == "cuda":
        bench.run(30, "gate: no wait", lambda: step_without_waiting(bench, model))
    torch._dynamo.reset()


def prefill_gate(bench: Bench, config: Qwen3Config) -> None:
    """Allows prefill where its kernels agree with the float32 reference: two layers, pieces of many sizes."""
    model = make_model(fewer_layers(config, 2), bench.device)
    model.set_attn_implementation("oscar")
    rotations = hadamard_rotations(model.config)
    ids = torch.randint(1, 100, (2, 5300), device=bench.device)

    def compare() -> None:
        logits = []
        for implementation in (None, "eager"):
            cache = OscarCache(rotations, model.config, max_length=5400, implementation=implementation)
            with torch.no_grad():
                out = model(ids, use_cache=True, logits_to_keep=1, **with_cache(model, cache))
            logits.append(out.logits.float())
            bench.say(f"gate: prefill of 2 x 5300 tokens, implementation {implementation}")
        worst = ((logits[0] - logits[1]).norm(dim=-1) / logits[1].norm(dim=-1)).max().item()
        bench.note(f"gate: prefill against the reference, largest relative error {worst:.4f}")
        if worst < 0.05:  # as for steps
            bench.allowed.add("prefill")

    bench.run(90, "gate: prefill", compare)


def step_without_waiting(bench: Bench, model: Any) -> None:
    """Raises RuntimeError where an eager step of the static mode waits for the device."""
    cache = OscarCache(hadamard_rotations(model.config), model.config, max_length=900)
    options = {"use_cache": True, **with_cache(model, cache)}
    tokens = torch.ones((2, 1), dtype=torch.long, device=bench.device)
    position = torch.full((2, 1), 500, device=bench.device)
    with torch.no_grad():
        model(tokens.expand(-1, 500).contiguous(), **options)
        model(tokens, position_ids=position, **options)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(tokens, position_ids=position, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    bench.note("gate: an eager step of the static mode asks the device nothing")


def decode(bench: Bench, cases: list[tuple[int, int]], ways: list[str], steps: int, seconds: float) -> None:
    """All kinds of caches, or those named in `ways`, at every batch and length."""
    room = WARM + steps + PROFILED + 3
    longest = max(length for _, length in cases)

    def ours(batch: int, length: int) -> OscarCache:
        # One capacity for all lengths: its graph is compiled once per batch.
        return filled_int2(bench, batch, length, longest + room)

    def job(run: Callable[..., None], name: str, *arguments: Any) -> Callable[[int, int], None]:
        return lambda batch, length: bench.run(
            seconds, f"{name} {batch} {length}", lambda: run(bench, name, *arguments, batch, length)
        )

    def int2(way: str) -> Callable[[int, int], None]:
        def run(bench: Bench, name: str, batch: int, length: int) -> None:
            cache = ours(batch, length)
            if way == "graph":
                time_graph(bench, name, "oscar", cache, batch, length)
            else:
                time_generate(bench, name, "oscar", cache, batch, length, steps, way == "compiled")

        return job(run, "int2, eager step as a graph" if way == "graph" else f"int2, {way}")

    def bf16(way: str) -> Callable[[int, int], None]:
        def run(bench: Bench, name: str, batch: int, length: int) -> None:
            if way == "graph":
                cache = filled_bf16(bench, "in place", batch, length, length + 8)
                time_graph(bench, name, "bench_rows", cache, batch, length)
                return
            kind = "static" if way == "compiled" else "dynamic"
            cache = filled_bf16(bench, kind, batch, length, length + room)
            time_generate(bench, name, "sdpa", cache, batch, length, steps, way == "compiled")

        names = {
            "graph": "bf16 in place, eager step as a graph",
            "eager": "bf16 DynamicCache, eager",
            "compiled": "bf16 StaticCache, compiled",
        }
        return job(run, names[way])

    for case in cases:
        if figures := VLLM.get(case):
            bench.add(Row("decode", "vLLM 0.21 bf16, 2026-11-30", *case, figures[0]))
    makers = {"int2": int2, "bf16": bf16}
    for group in (WAYS[:3], WAYS[3:5], WAYS[5:]):
        for case in cases:
            for kind, way in (name.split("-") for name in group if name in ways):
                makers[kind](way)(*case)


def prefill(bench: Bench, cases: list[tuple[int, int]], seconds: float) -> None:
    """Prompts through both caches."""
    config = bench.model.config
    rotations = hadamard_rotations(config)
    for batch, length in cases:
        if figures := VLLM.get((batch, length)):
            bench.add(Row("prefill", "vLLM 0.21 bf16, 2026-11-30", batch, length, 1e3 * figures[1]))
        bench.run(seconds, f"bf16 prefill {batch} {length}", lambda b=batch, n=length: time_prefill(
            bench, "bf16 DynamicCache", "sdpa", lambda: DynamicCache(config=config), b, n))  # fmt: skip
        bench.run(seconds, f"int2 prefill {batch} {length}", lambda b=batch, n=length: time_prefill(
            bench, "int2", "oscar", lambda: OscarCache(rotations, config, max_length=n + 8), b,
            n))  # fmt: skip


def throughput(bench: Bench, length: int, seconds: float) -> None:
    """Tokens per second of as many sequences as fit: weights, caches, and 6 GiB for what a step needs."""
    rate = {}
    for kind in ("bf16", "int2"):
        if bench.device.type == "cuda":
            free = torch.cuda.mem_get_info()[0] - (6 << 30)
        else:
            free = 20 << 20
        batch = max(1, free // cache_bytes(bench, kind, 1, length + fmt.PAGE_TOKENS))

        def job(kind: str = kind, batch: int = batch) -> None:
            if kind == "int2":
                cache: Cache = filled_int2(bench, batch, length, length + fmt.PAGE_TOKENS)
                step = graph_step(bench, "oscar", cache, batch, length, 10)
            else:
                cache = filled_bf16(bench, "in place", batch, length, length + 8)
                step = graph_step(bench, "bench_rows", cache, batch, length, 10)
            rate[kind] = 1e3 * batch / step
            bench.add(
                Row("throughput", f"{kind}, step as a graph", batch, length, step,
                    floor(bench, kind, batch, length), None, peak_gib(bench), f"{rate[kind]:.0f} tokens/s")
            )  # fmt: skip

        bench.run(seconds, f"throughput {kind}", job)
    if len(rate) == 2:
        bench.note(f"throughput at equal memory: int2 / bf16 = {rate['int2'] / rate['bf16']:.2f}")


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for run.json and page.md")
    parser.add_argument("--quick", action="store_true", help="three cases of decode, one of prefill")
    parser.add_argument("--throughput", action="store_true", help="only throughput at equal memory")
    parser.add_argument("--prefill-only", action="store_true", help="no decode")
    parser.add_argument("--decode-only", action="store_true", help="no prefill")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of decode, default {','.join(WAYS)}")
    parser.add_argument("--cases", help="batch x tokens, as 1x32768,8x32768")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=120, help="seconds for one configuration")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script without a GPU")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.budget
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = tiny(2) if arguments.tiny else qwen3_8b(arguments.layers)
    torch._dynamo.config.cache_size_limit = 64
    typed = [
        word for word in sys.argv[1:] if word not in ("--out", str(arguments.out))
    ]  # no path of a machine
    command = " ".join(["python scripts/bench_generate_torch.py", *typed, "--out results"])
    bench = Bench(model=None, device=device, out=arguments.out, end=end, command=command)
    bench.bandwidth = copy_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if not arguments.prefill_only:
        gate(bench, config)
    if not (arguments.decode_only or arguments.throughput):
        prefill_gate(bench, config)
    bench.model = make_model(config, device)
    bench.say("the model is made")
    if arguments.throughput:
        throughput(bench, 2048 if arguments.tiny else LONG, arguments.seconds)
        return
    short, long = (512, 1024) if arguments.tiny else (32_768, 98_304)
    quick = [(1, short), (8, short), (1, long)]
    pairs = [case.split("x") for case in (arguments.cases or "").split(",") if case]
    named = [(int(batch), int(length)) for batch, length in pairs]
    if not arguments.prefill_only:
        cases = named or (quick if arguments.quick else [*quick, (8, long)])
        decode(bench, cases, arguments.ways.split(","), arguments.steps, arguments.seconds)
    if not arguments.decode_only:
        cases = named or ([(1, short)] if arguments.quick else [(1, short), (1, long), (8, short)])
        prefill(bench, cases, arguments.seconds)


if __name__ == "__main__":
    main()
