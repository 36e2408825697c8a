"""Times vLLM 0.21 with 2-bit pages and with its own BF16 cache: Qwen3-8B's shape, random weights, one GPU.

    python scripts/bench_vllm.py --out results                    # both kinds, about six minutes
    python scripts/bench_vllm.py --out results --kind int2        # 2-bit pages alone, about three
    python scripts/bench_vllm.py --out results --throughput       # equal memory, long prompts, both kinds

Every kind runs in a process of its own and adds a line to OUT/bench_vllm.jsonl as soon as it has one. All
lines there, of this run and earlier ones, are laid side by side in OUT/vllm/DEVICE-DATE/{run.json,page.md}.

Cache: blocks that the engine finds room for at --memory of the GPU, in tokens. Prefill: seconds from the
request to its first token, second of two runs. Decode: prompts are prefilled by the engine, then steps are
timed while every row generates; a step is the median time between two returns of `engine.step()`, scheduler
and sampler included. Throughput: --memory-gib for blocks (and for the arena of 2-bit pages, which is taken
off), requests that arrive at once; requests per second, mean time to the first token and per token after it.
"""

import argparse
import importlib.metadata
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from parity_tests.vllm import real_engine

KINDS = ("int2", "bf16")
CASES = ((1, 32_768), (8, 32_768), (1, 98_304))  # rows, tokens of a prompt
TINY = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 151_936}  # fmt: skip
SEQUENCE_BYTES = 36 * 6 * 8 * 2 * 64 * 128 * 2  # of the arena, per running sequence


def make_config(folder: str, length: int, tiny: bool) -> None:
    """Qwen3-8B's config.json, for positions up to `length`; tiny: a small model to try this script with."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16",
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": length, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_theta": 1_000_000.0, "bos_token_id": 151_643, "eos_token_id": 151_645,
    }  # fmt: skip
    pathlib.Path(folder, "config.json").write_text(json.dumps(config | (TINY if tiny else {})))


def synchronize() -> None:
    """Waits for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def about(command: list[str]) -> dict[str, Any]:
    """What was run, with what, on what."""
    versions = {
        name: importlib.metadata.version(name) for name in ("vllm", "torch", "triton", "transformers")
    }
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU (reference in place of kernels)"
    )
    return {"device": device, "dtype": "bfloat16", "command": " ".join(command), **versions}


class Bench:
    """An engine of one kind, and the lines measured on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.counter = options, 0
        longest = max(length for _, length in options.cases) + 1024
        folder = tempfile.mkdtemp(prefix="qwen3_8b_")
        make_config(folder, longest, options.tiny)
        rows = max(rows for rows, _ in options.cases)
        settings: dict[str, Any] = {
            "load_format": "dummy", "max_model_len": longest, "max_num_seqs": rows,
            "max_num_batched_tokens": options.budget, "gpu_memory_utilization": options.memory,
        }  # fmt: skip
        if torch.cuda.is_available():
            sizes = sorted({1, 2, 4, 8, rows})
            settings["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        if options.tiny:
            settings["kv_cache_memory_bytes"] = 1 << 26
        if options.throughput:
            arena = rows * SEQUENCE_BYTES if options.kind == "int2" else 0
            settings["kv_cache_memory_bytes"] = int(options.memory_gib * 2**30) - arena
        if options.kind == "bf16":
            settings["attention_config"] = {"backend": "FLASH_ATTN"}
        since = time.time()
        oscar = {"rotations": "hadamard"} if options.kind == "int2" else None
        self.engine = real_engine.make_engine(folder, oscar, **settings)
        cache = self.engine.vllm_config.cache_config
        self.line("about", **about(sys.argv))
        self.line(
            "cache", tokens=cache.num_gpu_blocks * cache.block_size, start_s=round(time.time() - since, 1)
        )

    def line(self, task: str, **values: Any) -> None:
        """Prints a result and adds it to the file."""
        result = {"kind": self.options.kind, "task": task, **values}
        print(json.dumps(result), flush=True)
        with open(self.options.lines, "a") as file:
            file.write(json.dumps(result) + "\n")

    def add(self, length: int, tokens: int) -> None:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        self.counter += 1
        generator = torch.Generator().manual_seed(self.counter)
        prompt = torch.randint(0, 150_000, (length,), generator=generator).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.counter), {"prompt_token_ids": prompt}, params)

    def decode(self, rows: int, length: int) -> None:
        """Prefill of one prompt, then steps in which all rows generate."""
        seconds = []
        for _ in range(2 if rows == 1 else 0):  # the first run compiles and plans
            self.add(length, 1)
            since = time.perf_counter()
            while self.engine.has_unfinished_requests():
                self.engine.step()
            synchronize()
            seconds.append(time.perf_counter() - since)
        for _ in range(rows):
            self.add(length, self.options.steps + 200)
        produced: dict[str, int] = {}
        while len(produced) < rows:
            for out in self.engine.step():
                produced[out.request_id] = len(out.outputs[0].token_ids)
        times = []
        for _ in range(self.options.steps):
            since = time.perf_counter()
            self.engine.step()
            times.append((time.perf_counter() - since) * 1e3)
        self.engine.abort_request(list(produced))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        milliseconds = statistics.median(times[len(times) // 4 :])
        more = (
            {"prefill_s": round(seconds[-1], 3), "first_prefill_s": round(seconds[0], 3)} if seconds else {}
        )
        self.line("decode", rows=rows, length=length, step_ms=round(milliseconds, 3), **more)

    def throughput(self, rows: int, length: int, tokens: int) -> None:
        """`rows` requests at once."""
        since = time.perf_counter()
        for _ in range(rows):
            self.add(length, tokens)
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                now = time.perf_counter() - since
                first.setdefault(out.request_id, now)
                last[out.request_id] = now
        total = max(last.values())
        each = [(last[name] - first[name]) / (tokens - 1) * 1e3 for name in first]
        self.line(
            "throughput", rows=rows, length=length, tokens=tokens, memory_gib=self.options.memory_gib,
            requests_per_s=round(rows / total, 4), first_token_s=round(statistics.mean(first.values()), 2),
            token_ms=round(statistics.mean(each), 2), total_s=round(total, 1),
        )  # fmt: skip


def record(out: pathlib.Path, command: str) -> None:
    """run.json and page.md of all lines so far."""
    lines = [json.loads(line) for line in (out / "bench_vllm.jsonl").read_text().splitlines()]
    about = next(line for line in lines if line["task"] == "about")
    device = about["device"].split()[-1].lower() if about["device"].startswith("NVIDIA") else "cpu"
    folder = out / "vllm" / f"{device}-{time.strftime('%Y-%m-%d')}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [line for line in lines if line["task"] != "about"]
    run = {
        "device": about["device"], "command": command, "created": time.strftime("%Y-%m-%d"),
        "versions": {name: about[name] for name in ("vllm", "torch", "triton", "transformers")}, "rows": rows,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    (folder / "page.md").write_text(page_of(run))


def page_of(run: dict[str, Any]) -> str:
    """The rows of both kinds side by side, with their ratio (above 1: two bits win)."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        "# vLLM with 2-bit pages and with its BF16 cache, Qwen3-8B's shape, random weights", "",
        f"- command: {run['command']}", f"- device: {run['device']}; {versions}", "",
        "| | 2-bit pages | BF16 | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    found: dict[tuple[str, bool], dict[str, float]] = {}
    for row in run["rows"]:
        where = f"{row['rows']} × {row['length']:,}" if "rows" in row else ""
        for key, title, lower in (
            ("tokens", "tokens that fit in the cache", False),
            ("step_ms", f"decode step, {where}, ms", True),
            ("prefill_s", f"prefill, {where}, s", True),
            ("requests_per_s", f"requests per second, {where}", False),
            ("first_token_s", f"mean time to the first token, {where}, s", True),
            ("token_ms", f"time per token, {where}, ms", True),
        ):
            if key in row and (key != "tokens" or row["task"] == "cache"):
                found.setdefault((title, lower), {})[row["kind"]] = row[key]
    for (title, lower), values in found.items():
        mine, other = values.get("int2"), values.get("bf16")
        ratio = "" if mine is None or other is None else f"{other / mine if lower else mine / other:.2f} ×"
        lines.append(f"| {title} | {_number(mine)} | {_number(other)} | {ratio} |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "not run" if value is None else f"{value:,}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for the lines and the record")
    parser.add_argument("--kind", choices=KINDS, help="one kind alone")
    parser.add_argument("--cases", default="1x32768,8x32768,1x98304", help="rows x tokens of a prompt")
    parser.add_argument("--steps", type=int, default=60, help="decode steps that are timed")
    parser.add_argument("--budget", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--memory", type=float, default=0.9, help="gpu_memory_utilization")
    parser.add_argument("--throughput", action="store_true", help="serving throughput instead")
    parser.add_argument(
        "--memory-gib", type=float, default=32, help="for blocks and arena, with --throughput"
    )
    parser.add_argument("--tokens", type=int, default=512, help="per request, with --throughput")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script; no numbers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cases = [tuple(map(int, case.split("x"))) for case in options.cases.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    options.lines = options.out / "bench_vllm.jsonl"
    if not options.child:  # an engine leaves memory and process groups behind: one process each
        codes = []
        for kind in [options.kind] if options.kind else KINDS:
            command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--child"]
            codes.append(subprocess.run(command, check=False).returncode)
        if options.lines.exists():
            record(options.out, " ".join(["python scripts/bench_vllm.py", *sys.argv[1:]]))
        return max(codes)
    if not torch.cuda.is_available():
        real_engine.stand_in_for_cuda()
    bench = Bench(options)
    for rows, length in options.cases:
        if options.throughput:
            bench.throughput(rows, length, options.tokens)
        else:
            bench.decode(rows, length)
    return 0


if __name__ == "__main__":
    sys.exit(main())
