"""Writes the tables of README.md, some other pages and the index of results/ from the recorded runs.

    python scripts/readme_tables.py [--check]

A page marks a table by `<!-- table NAME -->` and `<!-- end -->`; what stands between is replaced by what
`TABLES` makes of results/SUBJECT/DEVICE-DATE/run.json. With --check nothing is written: exit code 1 names the
pages that differ from the runs.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from oscar_torch.core import cache_format as fmt
from oscar_torch.core.config import CacheConfig

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "results/README.md",
    "parity_tests/README.md",
    "docs/vllm.md",
    "docs/models.md",
    "docs/evaluation.md",
)
BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

QUALITY = "quality-qwen2.5-coder-1.5b-32k/h200-2026-12-01"
PEERS = "peers-qwen2.5-coder-1.5b-8k/h200-2026-12-01"
PEERS_SHORT: str | None = PEERS  # README's run of peers; None: the table is empty
TASKS: str | None = "tasks-qwen2.5-coder-1.5b/h200-2026-12-01"
KERNELS_JAX = "kernels-jax/h200-2026-11-29"
STEPS_TORCH, STEPS_JAX = "generate-torch/h200-2026-12-01", "decode-jax/h200-2026-12-01"
ENGINE = "vllm/h200-2026-12-01"
STEP_CASES = ((1, 32_768), (8, 32_768), (1, 98_304))
KERNELS_TORCH = "kernels-torch/h200-2026-11-30"
FAMILIES = "families/cpu-2026-12-01"
PARITY = ("parity/h200-2026-11-30", "parity/cpu-2026-11-29", "parity-xla-torch/cpu-2026-11-29")

METHODS = {  # name in the run -> name in the table
    "bf16": "BF16",
    "int2": "**OSCAR-KV**",
    "published": "published OSCAR recipe",
    "hadamard": "Hadamard, asymmetric",
}
PEER_METHODS = {
    "bf16": "BF16",
    "fp8": "FP8",
    "hqq:4": "HQQ, 4 bits",
    "hqq:2": "HQQ, 2 bits",
    "quanto:4": "quanto, 4 bits",
    "quanto:2": "quanto, 2 bits",
    "kivi": "KIVI's codes, simulated",
    "hadamard": "Hadamard, simulated",
    "published": "published OSCAR recipe, simulated",
    "published:centered": "the same with fixed key means",
    "int2": "**OscarCache**",
    "int2:nearest": "**OscarCache**, rounding nearest",
    "int2:sequential": "**OscarCache**, default rounding",
}
TASK_METHODS = {
    **METHODS,
    "int2": "**OSCAR-KV**",
    "int2:cache": "the same through the kernels",
    "int2:nearest": "**OSCAR-KV**, nearest",
    "int2:sequential": "**OSCAR-KV**, sequential",
    "published:centered": "the same with fixed key means",
    "kivi": "KIVI's codes",
    "fp8": "FP8",
}
SPEED_CASES = ((8, 102_400), (1, 102_400), (32, 32_768), (8, 4096))


def load(run: str) -> dict[str, Any]:
    """The record of one run, SUBJECT/DEVICE-DATE."""
    return json.loads((ROOT / "results" / run / "run.json").read_text())


def table(titles: list[str], rows: list[list[str]], others: str = "---:") -> str:
    """A Markdown table; every column but the first is aligned to the right, or as `others` says."""
    lines = [titles, ["---", *[others] * (len(titles) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(number: float) -> str:
    """Three significant digits, without a zero before the point."""
    return f"{number:.3g}".replace("0.", ".", 1) if 0 < number < 1 else f"{number:.3g}"


def quality() -> str:
    """What two bits cost: perplexity, KL to BF16 below and past 16K, equal first choices."""
    methods = {row["method"]: row for row in load(QUALITY)["methods"]}
    rows = [
        [
            title,
            short(row["bits_per_element"]),
            short(row["perplexity"]),
            short(row["kl_mean_first_half"]),
            short(row["kl_mean_second_half"]),
            f"{row['top1']:.1%}",
        ]
        for title, row in ((title, methods[name]) for name, title in METHODS.items())
    ]
    return table(["method", "bits", "perplexity", "KL, first 16K", "KL past 16K", "same top token"], rows)


def peers() -> str:
    """What other caches cost on the same texts: bits and bytes as stored, KL to BF16, equal first choices."""
    record = load(PEERS)
    settings, methods = record["settings"], {row["method"]: row for row in record["rows"]}
    rows = [
        [
            title,
            short(row["bits_per_number"]),
            f"{methods['bf16']['cache_bytes'] / row['cache_bytes']:.1f} ×",
            short(row["kl"]),
            f"{row['top1']:.1%}",
            short(row["perplexity"]),
        ]
        for title, row in ((title, methods[name]) for name, title in PEER_METHODS.items() if name in methods)
    ]
    titles = ["cache", "bits", "smaller", "KL to BF16", "same top token", "perplexity"]
    text = f"{settings['model']}, {settings['context']:,} tokens ([run](../results/{PEERS}/page.md)):\n\n"
    return text + table(titles, rows)


def peers_short() -> str:
    """The same for README: bits and megabytes stored, KL by text, and how many times the default set's."""
    if PEERS_SHORT is None:
        return ""
    record = load(PEERS_SHORT)
    settings, methods = record["settings"], {row["method"]: row for row in record["rows"]}
    texts = [text for text in record["texts"] if methods.keys() <= text["methods"].keys()]
    ours = methods["int2:sequential" if "int2:sequential" in methods else "int2"]["kl"]
    rows = []
    for name, title in PEER_METHODS.items():
        if name in methods:
            row = methods[name]
            size = f"{row['cache_bytes'] / 1e6:.0f}"
            by_text = (short(text["methods"][name]["kl"]) for text in texts)
            ratio = f"{float(f'{row["kl"] / ours:.2g}'):g} ×" if row["kl"] else "–"
            rows.append([title, short(row["bits_per_number"]), size, *by_text, ratio])
    subjects = (text["label"].rpartition(".")[0].rpartition("_")[2] for text in texts)
    titles = ["cache", "bits", "MB", *(f"KL, {subject}" for subject in subjects), "KL to ours"]
    where = f"[run](results/{PEERS_SHORT}/page.md), [how](docs/evaluation.md#peers)"
    return (
        f"What is used today beside it, in transformers: {settings['model']}, {settings['context']:,} "
        f"tokens, {record['device']} ({where}):\n\n{table(titles, rows)}"
    )


def tasks() -> str:
    """What a model still can do: share of right answers by length, and less BF16's on the same questions."""
    if TASKS is None:
        return ""
    record = load(TASKS)
    accuracy = record["accuracy"]
    counts = {sum(one["questions"] for one in found.values()) for found in accuracy.values()}
    rows = []
    for method in (row["method"] for row in record["methods"]):
        cells = (mean(one["accuracy"][method] for one in found.values()) for found in accuracy.values())
        every = [one for found in accuracy.values() for one in found.values()]
        less = mean(one["difference"][method] for one in every)
        error = math.hypot(*(one["difference_error"][method] for one in every)) / len(every)
        apart = "" if method == "bf16" else f"{100 * less:+.1f} ± {100 * error:.1f}"
        title = TASK_METHODS.get(method, f"`{method}`")
        rows.append([title, *(f"{100 * share:.1f} %" for share in cells), apart])
    titles = ["cache", *(f"{int(length) // 1024}K" for length in accuracy), "less BF16, points"]
    questions = "–".join(str(count) for count in sorted({min(counts), max(counts)}))
    where = f"[run](results/{TASKS}/page.md), [tasks](docs/evaluation.md#tasks)"
    return (
        f"Right answers after that many tokens, means over {', '.join(next(iter(accuracy.values())))}, "
        f"{questions} questions each: {record['model']}, {record['device']} ({where}):\n\n"
        + table(titles, rows)
    )


def size() -> str:
    """Bytes by head_dim, from the constants of the format, and of whole sequences with their BF16 windows."""
    rows = []
    for head_dim in (64, 128, 256):
        int2, bf16 = fmt.int2_page_bytes(head_dim), fmt.window_page_bytes(head_dim)

        def saved(length: int, head_dim: int = head_dim, int2: int = int2, bf16: int = bf16) -> str:
            history = CacheConfig(1, 1, head_dim).history_pages(length)
            pages = -(-length // fmt.PAGE_TOKENS)
            return f"{pages * bf16 / (history * int2 + (pages - history) * bf16):.1f} ×"

        bits = f"{int2 * 8 / (2 * fmt.PAGE_TOKENS * head_dim):.2f}"
        rows.append([str(head_dim), str(int2), str(bf16), bits, saved(8192), saved(32_768), saved(102_400)])
    titles = ["head_dim", "INT2 page, bytes", "BF16 page", "bits per element"]
    return table([*titles, "smaller at 8K", "at 32K", "at 100K"], rows)


def equality() -> str:
    """Codes compared with the NumPy oracle, and how many differed."""
    rows = []
    for run in PARITY:
        record = load(run)
        names = ", ".join(row["implementation"] for row in record["pages"])
        device = record["pages"][0]["versions"]["device"]
        codes = sum(row["codes"] for row in record["pages"])
        differences = sum(row["differences"] for row in record["pages"])
        rows.append([f"[{device}](../results/{run}/page.md)", names, f"{codes:,}", str(differences)])
    return table(["device", "implementations", "codes compared", "differences"], rows)


def speed() -> str:
    """What a user waits for: one decode-attention call of a layer, and whole decode steps, Qwen3-8B shape."""
    titles = ["sequences × tokens", "floor of the bytes", "JAX", "Torch", "best BF16, JAX · Torch", "faster"]
    return table(titles, [*kernel_rows(), *step_rows()])


def kernel_rows() -> list[list[str]]:
    """Decode attention of one layer, microseconds."""
    jax, torch = load(KERNELS_JAX)["rows"], load(KERNELS_TORCH)["rows"]
    rows = []
    for batch, length in SPEED_CASES:
        wanted = {"shape": "qwen3-8b", "what": "decode", "batch": batch, "length": length}
        (mosaic,) = [row for row in jax if wanted.items() <= row.items()]
        wanted = {"model": "qwen3-8b", "task": "decode", "batch": batch, "length": length}
        times = {row["kernel"]: row["microseconds"] for row in torch if wanted.items() <= row.items()}
        best = min(time for kernel, time in times.items() if kernel.startswith("BF16"))
        gluon = times["INT2 gluon"]
        rows.append(
            [
                f"attention, {batch} × {length:,}",
                *(f"{short_us(t)} µs" for t in (mosaic["int2_floor_us"], mosaic["int2_us"], gluon)),
                f"{short_us(mosaic['bf16_us'])} · {short_us(best)}",
                f"**{mosaic['bf16_us'] / mosaic['int2_us']:.1f} × · {best / gluon:.1f} ×**",
            ]
        )
    return rows


def step_rows() -> list[list[str]]:
    """Whole decode steps, milliseconds, the newest row of each kind; BF16: an engine (vLLM), one for both."""
    torch, jax = load(STEPS_TORCH)["rows"], load(STEPS_JAX)["rows"]
    rows = []
    for batch, length in STEP_CASES:
        of = {row["kind"]: row for row in torch if (row["batch"], row["length"]) == (batch, length)}
        engine = next(row["milliseconds"] for kind, row in of.items() if kind.startswith("vLLM"))
        compiled = of["int2, compiled"]
        measured = [row["milliseconds"] for row in jax if row["batch"] == batch and length == 32_768]
        mine = measured[-1] if measured else None
        rows.append(
            [
                f"whole step, {batch} × {length:,}",
                f"{compiled['floor']:.1f} ms",
                f"{mine:.1f} ms" if mine else "not run",
                f"{compiled['milliseconds']:.1f} ms",
                f"{engine:.1f} (vLLM)",
                f"{f'{engine / mine:.1f} ×' if mine else '–'} · {engine / compiled['milliseconds']:.1f} ×",
            ]
        )
    for kinds in engine_rows():
        if "bf16" in kinds:
            mine, other = (kinds[kind]["step_ms"] for kind in ("int2", "bf16"))
            rows.append(
                [
                    f"step in vLLM, {kinds['where']}",
                    "",
                    "",
                    f"{mine:.1f} ms",
                    f"{other:.1f}",
                    f"{other / mine:.1f} ×",
                ]
            )
    return rows


def engine_rows() -> list[dict[str, Any]]:
    """Of every case that both caches ran in vLLM, or 2-bit pages alone: the row of each kind."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for row in load(ENGINE)["rows"]:
        if row["task"] == "decode":
            found.setdefault((row["rows"], row["length"]), {})[row["kind"]] = row
    return [{"where": f"{batch} × {length:,}", **kinds} for (batch, length), kinds in found.items()]


def engine() -> str:
    """vLLM with 2-bit pages beside its own BF16 cache."""
    fits = {row["kind"]: row["tokens"] for row in load(ENGINE)["rows"] if row["task"] == "cache"}
    rows = [
        ["tokens that fit", f"{fits['int2']:,}", f"{fits['bf16']:,}", f"{fits['int2'] / fits['bf16']:.1f} ×"]
    ]
    for name, key in (("decode step, ms", "step_ms"), ("prefill, s", "prefill_s")):
        for kinds in engine_rows():
            mine, other = kinds["int2"].get(key), kinds.get("bf16", {}).get(key)
            if mine:
                ratio = f"{other / mine:.1f} ×" if other else "–"
                rows.append([f"{name}, {kinds['where']}", str(mine), str(other or "not run"), ratio])
    return table(["Qwen3-8B shape, H200", "2-bit pages", "BF16", "better by"], rows)


def short_us(time: float) -> str:
    """Microseconds as whole numbers, one decimal below 10."""
    return f"{time:.0f}" if time >= 9.95 else f"{time:.1f}"


def runs() -> str:
    """Every recorded run with its device, date and command."""
    rows = []
    for path in sorted((ROOT / "results").glob("*/*/run.json")):
        record, folder = json.loads(path.read_text()), path.parent
        subject, name = folder.parts[-2:]
        device, date = name.split("-", 1)
        command = record.get("command", "oscar evaluate, as the page says")
        rows.append([f"[{subject}]({subject}/{name}/page.md)", device, date, f"`{command}`"])
    return table(["subject", "device", "date", "command"], rows)


def families() -> str:
    """A line per family of models: its checkpoints, and what the run of its test found."""
    record = load(FAMILIES)
    rows = [
        [
            row["title"],
            f"`{row['family']}`",
            f"{row['logits']:.0e}",
            *("yes" if row[what] else "–" for what in ("calibrates", "generates", "gguf")),
        ]
        for row in record["rows"]
    ]
    versus = f"logits against transformers {record['versions']['transformers']}"
    return table(["checkpoints", "family", versus, "calibrates", "generates", "GGUF"], rows)


def family_names() -> str:
    """A line per family of models: what is special, and the names it answers to."""
    rows = [
        [
            f"`{row['family']}`",
            row["special"],
            *(
                ", ".join(f"`{name}`" for name in row[names]) or "–"
                for names in ("model_types", "gguf_architectures")
            ),
        ]
        for row in load(FAMILIES)["rows"]
    ]
    return table(["family", "what is special", "`model_type`", "GGUF architecture"], rows, "---")


TABLES: dict[str, Callable[[], str]] = {
    "quality": quality,
    "peers": peers,
    "peers-short": peers_short,
    "tasks": tasks,
    "size": size,
    "equality": equality,
    "speed": speed,
    "engine": engine,
    "runs": runs,
    "families": families,
    "family-names": family_names,
}


def rendered(text: str) -> str:
    """A page with every marked table made anew."""
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]]() + match[4], text)


def main(arguments: list[str] | None = None) -> int:
    """Writes the pages, or with --check says which differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page differs")
    check = parser.parse_args(arguments).check
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        if (new := rendered(text)) != text:
            stale.append(name)
            if not check:
                page.write_text(new)
    if check and stale:
        print(f"not as the runs say: {', '.join(stale)}; run scripts/readme_tables.py", file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
