"""Decode steps of a model that transformers splits over GPUs (`tp_plan="auto"`): 2-bit cache and BF16.

    torchrun --nproc-per-node 2 scripts/bench_mesh_torch.py --out results                   # Qwen3-32B
    torchrun --nproc-per-node 1 scripts/bench_mesh_torch.py --out results --shape qwen3-8b  # for scaling
    CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 scripts/bench_mesh_torch.py --out results --tiny

Weights are random, each process makes its own share of them. Before a time is reported the gate must pass: a
prompt and steps of a model of two layers go through the caches of all processes; the rows they stored,
gathered, go through caches of whole layers on every device; all bytes must be equal, and so must the tokens
of all processes. Steps then run on filled caches of `max_length`, replayed as one CUDA graph. The
floor is what a device must read in a step, its weights without the input embedding and its cache, at the
bandwidth of a copy on the same device in the same run; it knows nothing of the links between devices. Their
share is timed by itself: the all-reduces of a step, two per layer, as one CUDA graph. NVLink multicast is
off.
"""

import argparse
import datetime
import functools
import os
import pathlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers
from bench_generate_models import (
    InPlaceLayer,
    hadamard_rotations,
    hold_random_tokens,
    qwen3_8b,
    tiny,
    with_cache,
)
from bench_generate_torch import Bench, Row, copy_bandwidth, graph_step, peak_gib
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from oscar_torch.core import cache_format as fmt
from oscar_torch.hf import OscarCache, OscarLayer, cache_config
from oscar_torch.layer_cache import LayerCache


def qwen3_32b(layers: int) -> Qwen3Config:
    """The shape of Qwen3-32B."""
    return Qwen3Config(
        vocab_size=151_936, hidden_size=5120, intermediate_size=25_600, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


def llama_70b(layers: int) -> LlamaConfig:
    """The shape of Llama 3 70B."""
    return LlamaConfig(
        vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
        eos_token_id=None, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip


SHAPES = {"qwen3-8b": (qwen3_8b, 36), "qwen3-32b": (qwen3_32b, 64), "llama-70b": (llama_70b, 80)}


def make_split_model(config: Any) -> Any:
    """The model in BF16 with random weights, of which every process has its share."""
    maker: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    plan: dict[str, Any] = {"device_map": local_device()}
    if dist.get_world_size() > 1:
        plan = {"distributed_config": DistributedConfig(tp_plan="auto")}
    torch.manual_seed(0)  # what is not split must be the same in all processes
    own = AutoConfig.for_model(**config.to_dict())  # transformers writes the plan into it
    model = maker.from_pretrained(
        None, config=own, state_dict={}, dtype=torch.bfloat16, attn_implementation="oscar", **plan
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def local_device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def local(weight: Any) -> torch.Tensor:
    """This process's part of a weight."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


class MeshBench(Bench):
    """A Bench of which the first process writes."""

    def write(self) -> None:
        if dist.get_rank() == 0:
            super().write()


# -------------------------------------------------------------------------------------------------- the gate


def stored(layer: OscarLayer) -> list[torch.Tensor]:
    """All bytes of a growing layer, heads on axis 1; no page was freed, so unused ones are equal too."""
    store = layer.store
    assert isinstance(store, LayerCache)
    names = (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS)
    return [getattr(store, name).contiguous().view(torch.uint8) for name in names]


def gathered(part: torch.Tensor, axis: int) -> torch.Tensor:
    """The parts of all processes along an axis."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim=axis)


def record_attention(layer: Any, rows: list[tuple[torch.Tensor, ...]]) -> None:
    """Has a layer leave copies of query, key, value and output [B, T, heads, D] of every chunk in `rows`."""
    attend = layer.attend

    def recording(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **options: Any
    ) -> Any:
        out = attend(query, key, value, *more, **options)
        rows.append(tuple(array.clone() for array in (query, key, value, out)))
        return out

    layer.attend = recording


def gate(bench: MeshBench, config: Any) -> None:
    """Raises AssertionError unless the split model's caches hold, gathered, what whole caches hold."""
    model, device = make_split_model(config), bench.device
    rotations = hadamard_rotations(model.config)
    cache = OscarCache(rotations, model)
    chunks: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in cache.layers]
    for layer, rows in zip(cache.layers, chunks):
        record_attention(layer, rows)
    ids = torch.randint(1, 100, (2, 700), generator=torch.Generator().manual_seed(0)).to(device)
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=70,
        **with_cache(model, cache),
    )
    every = gathered(tokens[None], 0)
    assert (every == every[0]).all(), "processes made different tokens"
    geometry = cache_config(config)
    scale = geometry.head_dim**-0.5
    compared, worst = 0, 0.0
    for number, (layer, rows) in enumerate(zip(cache.layers, chunks)):
        whole = OscarLayer(number, geometry, rotations.layers[number])
        for chunk in rows:
            query, key, value, out = (gathered(a, 2) for a in chunk)
            expected = whole.attend(query, key, value, None, softmax_scale=scale)
            worst = max(worst, ((out - expected).float().norm() / expected.float().norm()).item())
        assert rows, f"layer {number}: no chunk was seen"
        for found, kept in zip(stored(layer), stored(whole), strict=True):
            assert torch.equal(gathered(found, 1), kept), f"layer {number}: stored bytes differ"
            compared += kept.numel()
    # Kernels split the tokens by the number of heads, so sums may round otherwise: a bf16 number by 2**-8.
    assert worst < 2**-8, f"outputs differ by {worst}"
    bench.note(
        f"gate: {dist.get_world_size()} processes hold, gathered, the {compared} bytes that one device "
        f"holds; largest relative difference of an output {worst:.5f}"
    )


# -------------------------------------------------------------------------------------------------- measuring


def filled(bench: MeshBench, kind: str, batch: int, length: int) -> Any:
    """A cache whose sequences hold `length` tokens of random content: "int2" or "bf16", in place."""
    model, device = bench.model, bench.device
    geometry = cache_config(model.config)
    if kind == "bf16":
        key = next(module for name, module in model.named_modules() if name.endswith("k_proj"))
        heads = local(key.weight).shape[0] // geometry.head_dim
        rows = torch.empty((batch, heads, 0, geometry.head_dim), dtype=torch.bfloat16, device=device)
        cache: Any = Cache(layers=[InPlaceLayer(length + 8) for _ in range(model.config.num_hidden_layers)])
        for layer in cache.layers:
            layer.lazy_initialization(rows, rows)
            layer.keys.normal_()
            layer.values.normal_()
            layer.length = length
        return cache
    cache = OscarCache(hadamard_rotations(model.config), model, max_length=length + 16)
    for layer in cache.layers:
        heads = layer.config.num_key_value_heads
        rows = torch.zeros((batch, heads, 1, geometry.head_dim), dtype=torch.bfloat16, device=device)
        layer.lazy_initialization(rows, rows)
    return hold_random_tokens(cache, length)


def floor(bench: MeshBench, kind: str, batch: int, length: int, cache: Any) -> float:
    """Milliseconds of a step in which this device only reads what it must."""
    embedding = bench.model.get_input_embeddings().weight
    weights = sum(local(p).nbytes for p in bench.model.parameters() if p is not embedding)
    geometry = cache_config(bench.model.config)
    layer = cache.layers[0]
    heads = layer.config.num_key_value_heads if kind == "int2" else layer.keys.shape[1]
    pages = geometry.history_pages(length) if kind == "int2" else 0
    per_head = pages * fmt.int2_page_bytes(geometry.head_dim)
    per_head += (length - pages * fmt.PAGE_TOKENS) * geometry.head_dim * 4
    rows = batch * len(cache.layers) * heads * per_head
    return 1e3 * (weights + rows) / bench.bandwidth


def time_steps(bench: MeshBench, kind: str, batch: int, length: int) -> None:
    """Adds a row: a step on a filled cache."""
    cache = filled(bench, kind, batch, length)
    dist.barrier()
    attention = "oscar" if kind == "int2" else "bench_rows"
    step = graph_step(bench, attention, cache, batch, length, 12)
    least = floor(bench, kind, batch, length, cache)
    name = f"{kind}, {dist.get_world_size()} devices, step as a graph"
    bench.add(Row("decode", name, batch, length, step, least, None, peak_gib(bench)))


def time_links(bench: MeshBench, batch: int) -> None:
    """Adds a row: the all-reduces of a step alone."""
    if dist.get_world_size() == 1:
        return
    config = bench.model.config
    rows = torch.zeros((batch, 1, config.hidden_size), dtype=torch.bfloat16, device=bench.device)

    def reduce() -> None:
        for _ in range(2 * config.num_hidden_layers):
            dist.all_reduce(rows)

    reduce()
    if bench.device.type != "cuda":
        start = time.perf_counter()
        reduce()
        bench.add(Row("all-reduces", "of a step", batch, 0, 1e3 * (time.perf_counter() - start)))
        return
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reduce()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    bench.add(Row("all-reduces", "of a step, as a graph", batch, 0, sorted(times)[len(times) // 2]))


def main() -> None:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for run.json and page.md")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-32b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--cases", default="1x32768,8x32768,1x98304,8x98304", help="batch x tokens")
    parser.add_argument("--kinds", default="int2,bf16", help="caches, default int2,bf16")
    parser.add_argument("--budget", type=float, default=560, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=120, help="seconds for one configuration")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script without a GPU")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.budget
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    transformers.logging.set_verbosity_error()  # it lists all weights as missing
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=180))
    make, layers = (tiny, 2) if arguments.tiny else SHAPES[arguments.shape]
    typed = [word for word in sys.argv[1:] if word not in ("--out", str(arguments.out))]
    command = f"torchrun --nproc-per-node {dist.get_world_size()} scripts/bench_mesh_torch.py"
    command = " ".join([command, *typed, "--out results"])
    bench = MeshBench(model=None, device=device, out=arguments.out, end=end, command=command)
    bench.bandwidth = copy_bandwidth(device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    gate(bench, make(2))  # an error ends the run: nothing is timed that is not equal
    bench.model = make_split_model(make(arguments.layers or layers))
    cases = "1x512,2x512" if arguments.tiny else arguments.cases
    for batch, length in ((int(n) for n in case.split("x")) for case in cases.split(",")):
        for kind in arguments.kinds.split(","):
            job = functools.partial(time_steps, bench, kind, batch, length)
            bench.run(arguments.seconds, f"{kind} {batch} {length}", job)
        bench.run(30, f"all-reduces {batch}", functools.partial(time_links, bench, batch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
