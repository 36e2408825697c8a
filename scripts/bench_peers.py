"""What a reader uses today beside a 2-bit OscarCache: KL to BF16, equal top tokens, perplexity and bytes.

    python scripts/bench_peers.py --out results
    python scripts/bench_peers.py --model coder.gguf --context 8192 --judged 2048 --out results

Every method reads the same texts with the same model in transformers. The first tokens of a text are a
prompt, read exactly in one forward and then stored; the last --judged tokens follow in chunks of --chunk, so
that they read what the cache has stored (a text in one forward measures nothing). Chunks end where pages end:
all queries of a chunk but its last read what decoding token by token reads; --chunk 1 is decoding itself.
HQQ and quanto are the layers of transformers' QuantizedCache, in the layers that an OscarCache quantizes.
int2:nearest and int2:sequential are the default sets of both roundings. All are compared with the BF16 cache.

The record is written after every method and text; the same command goes on where it was interrupted. Needs
torch and transformers, hqq and optimum-quanto for their methods (extra "peers"), no JAX.
"""

import argparse
import datetime
import inspect
import json
import math
import pathlib
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from draw_runs import draw_peers
from sample_texts import find_texts
from torch import Tensor
from transformers.cache_utils import Cache

from oscar_torch.core import cache_format as fmt
from oscar_torch.core.config import CalibrationConfig
from oscar_torch.core.errors import ConfigError, OscarError
from oscar_torch.core.window_policy import DEFAULT_WINDOW_POLICY
from oscar_torch.evaluation.bars import Bars
from oscar_torch.evaluation.streams import TokenStream, read_stream
from oscar_torch.hf.calibrate import calibrate, fit_rotation_set, load_model
from oscar_torch.hf.model_check import cache_config, int2_layers
from oscar_torch.rotations.rotation import RotationSet
from oscar_torch.rotations.statistics import STATISTICS_FILE, LayerStatistics, read_statistics
from parity_tests.hf import peer_caches

METHODS = {  # name -> what it is
    "bf16": "BF16 rows, the reference",
    "fp8": "float8 (e4m3), a bfloat16 scale per token and head, no window",
    "hqq:4": "transformers' QuantizedCache, HQQ, groups of 64, axis 1, residual 256",
    "hqq:2": "the same with 2 bits",
    "quanto:4": "transformers' QuantizedCache, quanto, groups of 64, axis 0, residual 256",
    "quanto:2": "the same with 2 bits",
    "kivi": "KIVI's codes, simulated: keys per channel and 32 tokens, values per token and 32 channels",
    "hadamard": "asymmetric codes behind a Hadamard rotation, simulated",
    "published": "the published OSCAR recipe, simulated",
    "published:centered": "the published OSCAR recipe with fixed key means, simulated",
    "int2:nearest": "OscarCache, the default set of rounding nearest",
    "int2:sequential": "OscarCache, the default set of rounding sequential",
}
FITTED = ("published", "published:centered", "int2:nearest", "int2:sequential")


# The model's part: one text through one cache.


@torch.no_grad()
def predict(
    model: Any,
    cache: Cache,
    ids: Tensor,
    prompt: int,
    chunk: int,
    every: int,
    on_chunk: Callable[[Tensor], None],
) -> None:
    """Calls on_chunk with log-probabilities float32 [R, V] of every chunk of ids [1, S] after the prompt."""
    if not cache.get_seq_length():
        read_prompt(model, cache, ids[:, :prompt])
    for start in range(prompt, ids.shape[1], chunk):
        part = ids[:, start : start + chunk]
        keep = judged(start, part.shape[1], every).to(ids.device)
        options = {"logits_to_keep": keep if len(keep) else 1}
        logits = model(part, use_cache=True, **options, **cache_argument(model, cache)).logits
        if len(keep):
            on_chunk(logits[0].float().log_softmax(dim=-1))


@torch.no_grad()
def read_prompt(model: Any, cache: Cache, ids: Tensor) -> None:
    """Fills a cache with ids [1, S] in one forward."""
    model(ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))


def judged(start: int, count: int, every: int) -> Tensor:
    """Which of `count` tokens from position `start` on are judged: int64 indices."""
    index = torch.arange(count)
    return index[(index + start) % every == 0]


def cache_argument(model: Any, cache: Cache) -> dict[str, Cache]:
    """The cache under the name that this version of transformers knows it by."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


class Judge:
    """Compares a method's distributions, chunk by chunk in order, with those that BF16 left here."""

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets  # int64 [R], the next token at every judged position; -1: there is none
        self.reference: list[Tensor] = []

    def keep(self, log_p: Tensor) -> None:
        """One chunk of the reference."""
        self.reference.append(log_p)

    def replay(self, on_chunk: Callable[[Tensor], None]) -> None:
        """The reference as a method."""
        for log_p in self.reference:
            on_chunk(log_p)

    def measure(self, run: Callable[[Callable[[Tensor], None]], None]) -> dict[str, Any]:
        """KL(BF16 || method), nats, negative log-likelihood and top-1 agreement over the chunks of `run`."""
        rows: list[Tensor] = []
        done = 0

        def compare(log_q: Tensor) -> None:
            nonlocal done
            log_p = self.reference[len(rows)]
            targets = self.targets[done : done + len(log_q)]
            done += len(log_q)
            nll = -log_q.gather(1, targets.clamp(min=0)[:, None])[:, 0]
            kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
            same = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).float()
            rows.append(torch.stack([torch.where(targets < 0, torch.nan, nll), kl, same]))

        run(compare)
        nll, kl, same = (column.double().cpu().numpy() for column in torch.cat(rows, dim=1))
        return {
            "positions": len(kl),
            "nll": float(np.nanmean(nll)),
            "kl": float(kl.mean()),
            "kl_median": float(np.median(kl)),
            "kl_p99": float(np.quantile(kl, 0.99)),
            "top1": float(same.mean()),
        }


# Methods.


def cache_maker(
    method: str,
    model: Any,
    statistics: Mapping[int, LayerStatistics],
    sets: Mapping[str, RotationSet],
    prompt: int,
    chunk: int,
) -> Callable[[], Cache]:
    """A function that makes an empty cache of the method."""
    head_dim = cache_config(model.config).head_dim
    recipes: Mapping[int, peer_caches.Recipe] | None = None
    if method in sets:
        return lambda: peer_caches.make_oscar_cache(sets[method], model, prompt)
    if method.startswith("published"):
        centered = method.endswith(":centered")
        recipes = {
            layer: peer_caches.published(entry, centered=centered) for layer, entry in statistics.items()
        }
    elif method in ("kivi", "hadamard"):
        recipe = peer_caches.PerChannel() if method == "kivi" else peer_caches.hadamard(head_dim)
        recipes = dict.fromkeys(int2_layers(model.config, DEFAULT_WINDOW_POLICY), recipe)
    return lambda: peer_caches.make_cache(method, model.config, recipes, chunk=chunk)


def fitted_sets(
    model: Any, tokenizer: Any, arguments: argparse.Namespace, texts: Sequence[str], bars: Bars
) -> tuple[dict[int, LayerStatistics], dict[str, RotationSet]]:
    """Statistics of --rotations, or of a calibration kept in --work, and the default sets made from them."""
    folder = arguments.rotations or arguments.work / "rotations"
    if not (folder / STATISTICS_FILE).exists():
        if arguments.rotations:
            raise ConfigError(f"{folder} has no {STATISTICS_FILE}, allowed: a folder of `oscar calibrate`")
        settings = CalibrationConfig(
            tokens=arguments.calibration_tokens, context=arguments.calibration_context
        )
        calibrate(model, texts, folder, settings, tokenizer=tokenizer, progress=bars)
    statistics, header = read_statistics(folder / STATISTICS_FILE)
    if header is None:
        raise ConfigError(f"{folder / STATISTICS_FILE} names no model, allowed: that of `oscar calibrate`")
    sets = {
        "int2:nearest": fit_rotation_set(statistics, header, CalibrationConfig(rounding="nearest")),
        "int2:sequential": fit_rotation_set(statistics, header, CalibrationConfig(rounding="sequential")),
    }
    return statistics, sets


# The record.


def pooled(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per method that all texts have: means over positions, bytes over texts."""
    rows = []
    for method in record["settings"]["methods"]:
        found = [text["methods"][method] for text in record["texts"] if method in text["methods"]]
        if len(found) < len(record["settings"]["texts"]):
            continue
        weight = [entry["positions"] for entry in found]

        def mean(name: str, found: Any = found, weight: Any = weight) -> float:
            return float(np.average([entry[name] for entry in found], weights=weight))

        size = {name: round(np.mean([e[name] for e in found])) for name in peer_caches.Size._fields}
        numbers = size["history_numbers"]
        rows.append(
            {
                "method": method,
                "what": METHODS[method],
                "bits_per_number": 8 * size["history_bytes"] / numbers if numbers else 16.0,
                "cache_bytes": size["history_bytes"] + size["window_bytes"],
                "kl": mean("kl"),
                "top1": mean("top1"),
                "perplexity": math.exp(mean("nll")),
                **size,
            }
        )
    return rows


def page_of(record: Mapping[str, Any]) -> str:
    """The record to read: the pooled table, one per text, and what the methods are."""
    settings, rows = record["settings"], record["rows"]
    lines = [
        f"# Caches side by side: {settings['model']}",
        "",
        f"{record['device']}, {settings['dtype']} model, torch {record['versions']['torch']}, transformers "
        f"{record['versions']['transformers']}, {record['date']}: `{record['command']}`",
        "",
        f"Texts of {settings['context']} tokens: a prompt, then {settings['judged']} tokens in chunks of "
        f"{settings['chunk']}, every {settings['every']}. position judged. Quantized in every method: "
        f"{len(settings['quantized_layers'])} of {settings['layers']} layers. The cache is that of these "
        "layers at the end of a text; bits are of what is quantized there, scales and means included.",
        "",
        "| method | bits | cache | KL to BF16 | same top token | perplexity |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    dense = next((row["cache_bytes"] for row in rows if row["method"] == "bf16"), 0)
    for row in rows:
        smaller = f" ({dense / row['cache_bytes']:.1f} × smaller)" if dense > row["cache_bytes"] else ""
        lines.append(
            f"| {row['method']} | {row['bits_per_number']:.3g} | {row['cache_bytes'] / 1e6:.2f} MB{smaller} "
            f"| {row['kl']:.4g} | {row['top1']:.1%} | {row['perplexity']:.4g} |"
        )
    for text in record["texts"]:
        lines += [
            "",
            f"## {text['label']}",
            "",
            f"Text digest {text['digest']}.",
            "",
            "| method | KL | median | p99 | same top token | perplexity | seconds |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *(
                f"| {method} | {row['kl']:.4g} | {row['kl_median']:.3g} | {row['kl_p99']:.3g} "
                f"| {row['top1']:.1%} | {math.exp(row['nll']):.4g} | {row['seconds']:.0f} |"
                for method, row in text["methods"].items()
            ),
        ]
    lines += ["", *(f"- {row['method']}: {row['what']}" for row in rows), ""]
    return "\n".join(lines)


def save(record: dict[str, Any], folder: pathlib.Path) -> None:
    """Writes run.json, page.md and plot.png."""
    record["rows"] = pooled(record)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "page.md").write_text(page_of(record))
    draw_peers(record, folder / "plot.png")


def opened(folder: pathlib.Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The record in `folder` to go on with, or `fresh`; ConfigError if it has other settings."""
    path = folder / "run.json"
    if not path.exists():
        return fresh
    found = json.loads(path.read_text())
    for name, value in fresh["settings"].items():
        if name != "methods" and found["settings"].get(name) != value:
            raise ConfigError(
                f"{path} was made with {name} = {found['settings'].get(name)!r}, now {value!r}: "
                "choose another --out"
            )
    earlier = [name for name in found["settings"]["methods"] if name not in fresh["settings"]["methods"]]
    found["settings"]["methods"] = sorted([*earlier, *fresh["settings"]["methods"]], key=list(METHODS).index)
    return found


def run(arguments: argparse.Namespace, bars: Bars) -> dict[str, Any]:
    """Everything that the command line asks for; returns the record."""
    calibration, evaluation = find_texts(arguments.work / "text")
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    methods = ["bf16", *(name for name in METHODS if name in arguments.methods and name != "bf16")]
    layers = int2_layers(model.config, DEFAULT_WINDOW_POLICY)
    prompt = arguments.context - arguments.judged
    head = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    streams = [
        read_stream([source], encode, arguments.context - len(head))
        for source in arguments.text or evaluation
    ]
    if short := [s for s in streams if len(s.tokens) + len(head) < arguments.context]:
        raise ConfigError(
            f"text {short[0].label} has {len(short[0].tokens)} tokens, --context {arguments.context} needs "
            "more"
        )
    on_gpu = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if on_gpu else "CPU"
    name = pathlib.Path(arguments.model).stem
    date = datetime.date.today().isoformat()
    slug = re.sub(r"[-_.]?(i?q\d\w*|f16|bf16|gguf)$", "", name.lower())
    length = arguments.context
    folder = arguments.out / f"peers-{slug}-{f'{length // 1024}k' if length % 1024 == 0 else length}"
    folder /= f"{device.split()[-1].lower()}-{date}"
    record = opened(
        folder,
        {
            "command": command(),
            "date": date,
            "device": device,
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "settings": {
                "model": name,
                "dtype": str(model.dtype).removeprefix("torch."),
                "context": arguments.context,
                "judged": arguments.judged,
                "chunk": arguments.chunk,
                "every": arguments.every,
                "layers": model.config.get_text_config(decoder=True).num_hidden_layers,
                "quantized_layers": list(layers),
                "texts": [stream.digest for stream in streams],
                "methods": methods,
            },
            "rows": [],
            "texts": [],
        },
    )
    missing = [method for method in methods if any(method not in t["methods"] for t in record["texts"])]
    if len(record["texts"]) == len(streams) and not missing:
        save(record, folder)
        return record
    statistics, sets = {}, {}
    if set(methods) & set(FITTED):
        texts = arguments.calibration_text or calibration
        statistics, sets = fitted_sets(model, tokenizer, arguments, texts, bars)
    total = len(streams) * len(methods) * arguments.context
    for stream in streams:
        ids = torch.tensor([head + stream.tokens.tolist()], device=model.device)
        entry = text_entry(record, stream)
        judge_text(
            model, ids, methods, entry,
            lambda method: cache_maker(method, model, statistics, sets, prompt, arguments.chunk),
            layers=layers, prompt=prompt, chunk=arguments.chunk, every=arguments.every,
            on_method=lambda: save(record, folder),
            on_tokens=lambda tokens: bars("caches side by side", tokens, total),
        )  # fmt: skip
    return record


def text_entry(record: dict[str, Any], stream: TokenStream) -> dict[str, Any]:
    """The part of the record that holds a text's figures, made if there is none."""
    for entry in record["texts"]:
        if entry["digest"] == stream.digest:
            return entry
    record["texts"].append({"label": stream.label, "digest": stream.digest, "methods": {}})
    return record["texts"][-1]


def judge_text(
    model: Any,
    ids: Tensor,
    methods: Sequence[str],
    entry: dict[str, Any],
    maker: Callable[[str], Callable[[], Cache]],
    *,
    layers: Sequence[int],
    prompt: int,
    chunk: int,
    every: int,
    on_method: Callable[[], None] = lambda: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> None:
    """Every method of `methods` that `entry` lacks over one text ids [1, S]; bf16, the first, always runs."""
    length = ids.shape[1]
    positions = prompt + judged(prompt, length - prompt, every).to(ids.device)
    following = torch.cat([ids[0, 1:], ids.new_tensor([-1])])
    judge = Judge(following[positions])
    found = entry["methods"]
    if all(method in found for method in methods):
        on_tokens(length * len(methods))
        return
    model.set_attn_implementation("sdpa")
    begin = maker("bf16")()
    assert isinstance(begin, peer_caches.PeerCache)
    read_prompt(model, begin, ids[:, :prompt])
    for method in methods:
        if method != "bf16" and method in found:
            on_tokens(length)
            continue
        model.set_attn_implementation("oscar" if method.startswith("int2") else "sdpa")
        begun = time.perf_counter()
        cache = maker(method)()
        if isinstance(cache, peer_caches.PeerCache):  # an OscarCache reads the prompt itself
            cache.begin(begin, layers)

        def walk(on_chunk: Callable[[Tensor], None], cache: Cache = cache) -> None:
            predict(model, cache, ids, prompt, chunk, every, on_chunk)

        if method == "bf16":
            walk(judge.keep)
        figures = judge.measure(judge.replay if method == "bf16" else walk)
        size = peer_caches.cache_size(cache, layers)
        found[method] = figures | size._asdict() | {"seconds": round(time.perf_counter() - begun, 1)}
        del cache
        on_method()
        on_tokens(length)


def command() -> str:
    """The command as it was typed, without this machine's paths."""
    words, skip = ["python", "scripts/bench_peers.py"], False
    for word in sys.argv[1:]:
        if not skip and word not in ("--out", "--work"):
            words.append(pathlib.Path(word).name if word.startswith(("/", "~")) else word)
        skip = word in ("--out", "--work")
    return shlex.join([*words, "--out", "results"])


def main() -> int:
    """Parses the command line and runs; exit code 2 where something is refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="gemma3-270m", help="hub name, folder, .gguf file or weights package"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the model")
    parser.add_argument(
        "--text", action="append", help="a source of text to judge; default: prose and code found here"
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens of each text (default %(default)s)")
    parser.add_argument("--judged", type=int, default=1024, help="of these, the last (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=64, help="tokens per forward, a divisor of 64")
    parser.add_argument("--every", type=int, default=1, help="judge every n-th position")
    parser.add_argument("--methods", default=",".join(METHODS), help="default %(default)s")
    parser.add_argument(
        "--rotations", type=pathlib.Path, help="a folder of `oscar calibrate`, with its statistics"
    )
    parser.add_argument(
        "--calibration-text", action="append", help="without --rotations: what to calibrate on"
    )
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--calibration-context", type=int, default=2048)
    parser.add_argument(
        "--work", type=pathlib.Path, default=pathlib.Path("peers-out"), help="texts and calibration"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("results"), help="folder of recorded runs"
    )
    arguments = parser.parse_args()
    arguments.methods = arguments.methods.split(",")
    try:
        check(arguments)
        with Bars() as bars:
            record = run(arguments, bars)
    except OscarError as error:
        print(f"bench_peers.py: error: {error}", file=sys.stderr)
        return 2
    print(page_of(record))
    return 0


def check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for numbers and names that cannot be meant, before a model is loaded."""
    if unknown := [name for name in arguments.methods if name not in METHODS]:
        raise ConfigError(f"method {unknown[0]!r}, allowed: {', '.join(METHODS)}")
    if arguments.chunk < 1 or fmt.PAGE_TOKENS % arguments.chunk:
        raise ConfigError(f"--chunk {arguments.chunk}, allowed: divisors of {fmt.PAGE_TOKENS}")
    if arguments.every < 1:
        raise ConfigError(f"--every {arguments.every}, allowed: >= 1")
    least = fmt.SINK_TOKENS + fmt.RECENT_TOKENS + fmt.PAGE_TOKENS
    for name, value in (
        ("judged", arguments.judged),
        ("context - judged", arguments.context - arguments.judged),
    ):
        low = fmt.PAGE_TOKENS if name == "judged" else least
        if value < low or value % fmt.PAGE_TOKENS:
            raise ConfigError(f"{name} = {value}, allowed: multiples of {fmt.PAGE_TOKENS}, >= {low}")


if __name__ == "__main__":
    sys.exit(main())
