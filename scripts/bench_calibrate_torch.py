"""Times the statistics of `oscar_torch.calibrate` beside the model's forward, on random weights or a model.

    python scripts/bench_calibrate_torch.py --sequences 2048 4096 --tokens 65536 --job 32768 --out results
    python scripts/bench_calibrate_torch.py --shape qwen2.5-0.5b --layers 6 --sequences 1024 4096 --threads 1
    python scripts/bench_calibrate_torch.py --model model.gguf --sequences 2048

Forward: the model alone, sdpa, no cache, logits of one position. Statistics: `calibrate_model`, which runs
the same forward and sums up what attention saw, until the covariances are on the host. Both take the same
tokens, in turns; rates are of the fastest turn. On a GPU the places where the host waits for it are listed,
and what the GPU did in two sequences; --job times a whole `calibrate`, from text to the report.
"""

import argparse
import datetime
import json
import pathlib
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

from oscar_torch import calibrate
from oscar_torch.core.config import CalibrationConfig
from oscar_torch.hf.calibrate import calibrate_model, load_model

SHAPES: dict[str, dict[str, int]] = {
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 300,
    },
}
SUBJECT = "calibration-speed-torch"


class ByteTokenizer:
    """One token per byte."""

    bos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        """Bytes as numbers."""
        return {"input_ids": list(text.encode())}


def random_model(shape: str, layers: int | None, device: torch.device) -> Any:
    """A Qwen 2 decoder with random weights, BF16 on a GPU and float32 elsewhere."""
    sizes = SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})
    config = Qwen2Config(**sizes, max_position_embeddings=32_768, tie_word_embeddings=True)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def waited(device: torch.device) -> float:
    """The time when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def fastest(ways: Sequence[Callable[[], object]], turns: int, device: torch.device) -> list[float]:
    """Seconds of the fastest run of each, in turns, after one that does not count."""
    for way in ways:
        way()
    seconds = [float("inf")] * len(ways)
    for _ in range(turns):
        for number, way in enumerate(ways):
            started = waited(device)
            way()
            seconds[number] = min(seconds[number], waited(device) - started)
    return seconds


@torch.no_grad()
def forward(model: Any, rows: Sequence[torch.Tensor]) -> None:
    """The model over sequences of token ids, one after the other."""
    for ids in rows:
        model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)


def measure(model: Any, length: int, tokens: int, turns: int) -> dict[str, Any]:
    """One row: rates of the forward alone and of the statistics, in sequences of `length` tokens."""
    count = max(2, tokens // length)
    rows = list(torch.randint(3, 256, (count, length)))
    ways = (lambda: forward(model, rows), lambda: calibrate_model(model, rows))
    alone, statistics = fastest(ways, turns, model.device)
    return {
        "sequence": length,
        "sequences": count,
        "forward_tokens_per_second": round(count * length / alone, 1),
        "statistics_tokens_per_second": round(count * length / statistics, 1),
        "share": round(alone / statistics, 3),
    }


def host_waits(model: Any, length: int) -> list[str]:
    """The lines on which the host waits for the GPU in a pass over two sequences, with how often."""
    rows = list(torch.randint(3, 256, (2, length)))
    calibrate_model(model, rows)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            calibrate_model(model, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines = [f"{'/'.join(pathlib.Path(w.filename).parts[-2:])}:{w.lineno}" for w in found]
    return [f"{line} × {lines.count(line)}" for line in dict.fromkeys(lines)]


def busiest(model: Any, length: int) -> list[list[Any]]:
    """What took the GPU longest in a pass over two sequences: name, milliseconds, calls."""
    rows = list(torch.randint(3, 256, (2, length)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        calibrate_model(model, rows)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [[e.key[:90], round(e.self_device_time_total / 1e3, 2), e.count] for e in events[:16]]


def whole_job(model: Any, context: int, tokens: int) -> dict[str, Any]:
    """Seconds of one `calibrate`, from text to the report, and of its parts."""
    marks: list[tuple[str, float]] = []

    def progress(stage: str, done: int, total: int) -> None:
        marks.append((stage, time.perf_counter()))

    with tempfile.TemporaryDirectory() as scratch:
        here = pathlib.Path(scratch)
        letters = torch.randint(97, 123, (tokens,), dtype=torch.uint8)
        (here / "text.txt").write_bytes(bytes(letters.tolist()))
        started = time.perf_counter()
        calibrate(
            model,
            [str(here / "text.txt")],
            here / "rotations",
            CalibrationConfig(tokens=tokens, context=context),
            tokenizer=ByteTokenizer(),
            progress=progress,
        )
        ended = time.perf_counter()
    last = {stage: moment for stage, moment in marks}
    return {
        "tokens": tokens,
        "context": context,
        "seconds": round(ended - started, 2),
        "until_statistics": round(last["statistics"] - started, 2),
        "until_choice": round(last["choice per layer"] - started, 2),
    }


def page_of(document: dict[str, Any]) -> str:
    """The document as a page to read."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        "# Speed of the statistics pass in Torch",
        "",
        f"{document['model']}, {document['dtype']}, {document['device']}; {versions}; {document['created']};",
        f"`{document['command']}`.",
        "",
        "Forward: the model alone (sdpa, no cache, logits of one position). Statistics: `calibrate_model`,",
        f"the same forward and all sums. Fastest of {document['turns']} turns each.",
        "",
        "| sequences | forward, tokens/s | statistics, tokens/s | share of the forward's speed |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['sequences']} × {row['sequence']} | {row['forward_tokens_per_second']:,.0f} "
        f"| {row['statistics_tokens_per_second']:,.0f} | {row['share']:.2f} |"
        for row in document["rows"]
    ]
    if job := document.get("calibrate"):
        lines += [
            "",
            f"A whole `calibrate` of {job['tokens']:,} tokens in sequences of {job['context']}: "
            f"{job['seconds']} s, {job['until_statistics']} s of them until the statistics were gathered, "
            f"{job['seconds'] - job['until_choice']:.2f} s for the report.",
        ]
    if "host_waits" in document:
        waits = document["host_waits"]
        lines += ["", "The host waits for the GPU at: " + (", ".join(waits) if waits else "no line") + "."]
    if busy := document.get("busiest"):
        lines += ["", "| in two sequences the GPU spent | ms | calls |", "| --- | ---: | ---: |"]
        lines += [f"| `{name}` | {milliseconds} | {calls} |" for name, milliseconds, calls in busy]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs, prints every row, and with --out writes a recorded run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b", help="of random weights")
    what.add_argument("--model", help="a model to load instead")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, nargs="+", default=[4096], metavar="N", help="lengths")
    parser.add_argument("--tokens", type=int, default=32_768, help="of one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--job", type=int, default=0, metavar="N", help="also a whole calibrate of N tokens")
    parser.add_argument("--out", type=pathlib.Path, help="the folder of recorded runs")
    arguments = parser.parse_args()

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.model:
        model: Any = load_model(arguments.model, device_map=str(device))[0]
        name = pathlib.Path(arguments.model).name
    else:
        model = random_model(arguments.shape, arguments.layers, device)
        name = f"random weights, {arguments.shape} shape, {model.config.num_hidden_layers} layers"
    threads = "" if device.type == "cuda" else f", threads: {torch.get_num_threads()}"
    document: dict[str, Any] = {
        "command": " ".join(["python scripts/bench_calibrate_torch.py", *sys.argv[1:]]),
        "created": datetime.date.today().isoformat(),
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": (torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()) + threads,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "turns": arguments.turns,
        "rows": [],
    }

    def save() -> None:
        if arguments.out:
            kind = "cpu" if device.type == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
            folder = arguments.out / SUBJECT / f"{kind}-{document['created']}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(json.dumps(document, indent=1) + "\n")
            (folder / "page.md").write_text(page_of(document))

    for length in arguments.sequences:
        document["rows"].append(measure(model, length, arguments.tokens, arguments.turns))
        print(json.dumps(document["rows"][-1]), flush=True)
        save()
    if device.type == "cuda":
        document["host_waits"] = host_waits(model, arguments.sequences[-1])
        print(json.dumps(document["host_waits"]), flush=True)
        document["busiest"] = busiest(model, arguments.sequences[-1])
        print(json.dumps(document["busiest"], indent=1), flush=True)
        save()
    if arguments.job:
        document["calibrate"] = whole_job(model, arguments.sequences[-1], arguments.job)
        print(json.dumps(document["calibrate"]), flush=True)
        save()


if __name__ == "__main__":
    main()
