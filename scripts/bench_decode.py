"""Times the Flax decoder end to end, full depth and random weights: INT2 caches beside BF16 with cuDNN.

    python scripts/bench_decode.py                                   # decode, Qwen3-8B shape, four cases
    python scripts/bench_decode.py --what decode prefill --model qwen2.5-1.5b --cases 1x30720
    python scripts/bench_decode.py --what throughput                 # equal memory, 102 400 tokens each

Decode: caches are filled with random content. "step" is one forward pass and argmax, dispatched one after the
other; "Generator" is what a user calls, timed by its own statistics. Busy is the device time of a step. The
floor is the bytes that a step must read (weights without the input embedding, and the cache) at the bandwidth
of a device-to-device copy in the same run. Prefill: random tokens through `Generator`, second run; BF16: the
same decoder over the whole prompt at once, attention by cuDNN, keys and values kept. Throughput: as many
sequences as fit into --memory beside the weights, steps as above.
Before anything is timed, the kernels are compared with the reference (`bench_attention.check_kernels`). The
record, OUT/{decode,prefill,throughput}-jax/DEVICE-DATE/{run.json,page.md}, is written after every row.
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import glob
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_attention import about, check_kernels, copy_bandwidth, random_cache, sequence_bytes
from flax import nnx

from oscar_jax import ops
from oscar_jax.cache import append_rows
from oscar_jax.core import cache_format as fmt
from oscar_jax.generate import Generator
from oscar_jax.layer_cache import DenseCache
from oscar_jax.models.cached_attention import CachedAttention
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.rope import RopeConfig
from oscar_jax.rotations.rotation import hadamard_rotation

STEPS = 16  # per sample; with the samples and the one before them every sequence flushes a page
WHAT = ("decode", "prefill", "throughput")
WAYS = ("step", "generator", "bf16")
LONG = 102_400  # tokens of a sequence, throughput


def qwen3_8b(layers: int) -> ModelConfig:
    """The geometry of Qwen3-8B with `layers` layers."""
    return ModelConfig(
        family="qwen3",
        model_id="random weights, Qwen3-8B shape",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=layers,
        num_query_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_positions=131_072,
        rms_norm_eps=1e-6,
        attention_scale=128**-0.5,
        rope=RopeConfig(1_000_000.0),
        layer_windows=(None,) * layers,
        qk_norm="head",
    )


def qwen2_1_5b(layers: int = 28) -> ModelConfig:
    """The geometry of Qwen2.5-Coder-1.5B."""
    return ModelConfig(
        family="qwen2", model_id="random weights, Qwen2.5-1.5B shape", vocab_size=151_936, hidden_size=1536,
        intermediate_size=8960, num_layers=layers, num_query_heads=12, num_key_value_heads=2, head_dim=128,
        max_positions=32_768, rms_norm_eps=1e-6, attention_scale=128**-0.5, rope=RopeConfig(1_000_000.0),
        layer_windows=(None,) * layers, qkv_bias=True, tie_embeddings=True,
    )  # fmt: skip


def tiny(layers: int) -> ModelConfig:
    """A small decoder, to try the script without a GPU."""
    small = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_query_heads": 4}
    return dataclasses.replace(
        qwen3_8b(layers), num_key_value_heads=2, head_dim=64, attention_scale=0.125, **small
    )


def random_weights(config: ModelConfig) -> tuple[Any, list[Any]]:
    """The decoder as a structure and its arrays: normal matrices, unit norms, made on the device."""
    shapes = nnx.eval_shape(
        lambda: Decoder(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    leaves, structure = jax.tree.flatten(nnx.split(shapes))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.float32)).astype(dtype)

    arrays = [
        normal(i, x.shape, x.dtype) if len(x.shape) > 1 else jnp.ones(x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    return structure, arrays


MODELS = {"qwen3-8b": (qwen3_8b, 36), "qwen2.5-1.5b": (qwen2_1_5b, 28), "tiny": (tiny, 2)}


class DenseAttention:
    """Decoding over BF16 caches by `jax.nn.dot_product_attention`: the baseline."""

    def __init__(self, config: ModelConfig, baseline: str) -> None:
        self.config, self.baseline = config, baseline

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer; see `decoder.Attention`."""
        state = append_rows(state, None, key, value, jnp.ones(query.shape[0], jnp.int32))
        attend: Any = jax.nn.dot_product_attention
        out = attend(
            query,
            state.key,
            state.value,
            scale=self.config.attention_scale,
            key_value_seq_lengths=state.lengths,
            implementation=self.baseline,
        )
        return out, state


def make_caches(config: ModelConfig, kind: str, batch: int, length: int, steps: int) -> list[Any]:
    """Full caches of random content, one per layer, with room for `steps` more tokens.

    The lengths of a batch differ by less than a page, so that the sequences flush in different steps.
    """
    geometry = config.cache_config()
    total = length + steps
    stored = [length - b * fmt.PAGE_TOKENS // batch for b in range(batch)]
    pages = [geometry.history_pages(n) for n in stored]
    caches: list[Any] = []
    for layer in range(config.num_layers):
        # Arrays of their own for every layer: they are donated.
        lengths, history = jnp.asarray(stored, jnp.int32), jnp.asarray(pages, jnp.int32)
        if kind == "int2":
            # The tables hold the pages that the steps will complete, too.
            cache = random_cache(geometry, batch, total, layer)
            caches.append(dataclasses.replace(cache, lengths=lengths, history_pages=history))
        else:
            shape = (batch, total, geometry.num_key_value_heads, geometry.head_dim)
            caches.append(DenseCache(_rows(2 * layer, shape), _rows(2 * layer + 1, shape), lengths))
    return caches


def make_step(config: ModelConfig, structure: Any, kind: str, options: argparse.Namespace) -> Any:
    """One decode step, to be compiled: (arrays, tokens int32 [B], caches, rotation) -> tokens, caches."""

    def step(
        arrays: list[Any], tokens: jax.Array, caches: list[Any], rotation: Any
    ) -> tuple[jax.Array, list[Any]]:
        if kind == "int2":
            rotations: Any = dict.fromkeys(range(config.num_layers), rotation)
            new = jnp.ones_like(tokens)
            attention: Any = CachedAttention(config, rotations, new, implementation=options.implementation)
        else:
            attention = DenseAttention(config, options.baseline)
        positions = caches[0].lengths[:, None]
        model = nnx.merge(*jax.tree.unflatten(structure, arrays))
        logits, caches = model(tokens[:, None], caches, positions=positions, attention=attention)
        return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), caches

    # Donated arrays meet results of their shape in order: without the tokens, every length would be copied.
    return jax.jit(step, donate_argnums=(1, 2))


class Bench:
    """A model of random weights, the bandwidth of the device, and the record that is being written."""

    def __init__(self, options: argparse.Namespace) -> None:
        make_config, layers = MODELS[options.model]
        self.options = options
        self.config: ModelConfig = make_config(options.layers or layers)
        check_kernels(self.config.cache_config(), options)
        self.weights = random_weights(self.config)
        self.bandwidth = copy_bandwidth(options.copy_bytes)
        # An embedding that is no output matrix too is looked up, not read.
        lookup = 0 if self.config.tie_embeddings else self.config.vocab_size * self.config.hidden_size * 2
        self.weight_bytes = sum(x.nbytes for x in self.weights[1]) - lookup
        self.rows: list[dict[str, Any]] = []
        self.began = time.perf_counter()

    def rotation(self) -> Any:
        """Hadamard in every layer: the kernels do the same work for any rotation."""
        return jax.tree.map(
            jnp.asarray, hadamard_rotation(self.config.num_key_value_heads, self.config.head_dim)
        )

    def floor(self, kind: str, batch: int, length: int) -> float:
        """Milliseconds that the bytes of one step take at the bandwidth of a copy."""
        cache = sequence_bytes(self.config.cache_config(), length)[kind == "bf16"] * self.config.num_layers
        return (self.weight_bytes + batch * cache) / self.bandwidth * 1e3

    def add(
        self, what: str, way: str, kind: str, batch: int, length: int, milliseconds: float, **more: Any
    ) -> None:
        """Prints a row and writes the record."""
        row = {
            "what": what,
            "way": way,
            "cache": kind,
            "sequences": batch,
            "tokens": length,
            "ms": milliseconds,
        }
        if what != "prefill":
            row |= {"floor_ms": self.floor(kind, batch, length)}
            row |= {
                "x_floor": milliseconds / row["floor_ms"],
                "tokens_per_second": batch / milliseconds * 1e3,
            }
        else:
            row["tokens_per_second"] = batch * length / milliseconds * 1e3
        self.rows.append({**row, **more})
        print(json.dumps(self.rows[-1]), flush=True)
        self.write()

    def try_to(self, function: Any, *arguments: Any) -> None:
        """Runs a case unless time is up; one that fails, for want of memory say, must not hide the others."""
        name = f"{function.__name__}{arguments}"
        if time.perf_counter() - self.began > self.options.seconds:
            print(f"{name}: not started within {self.options.seconds:.0f} s", flush=True)
            return
        try:
            function(self, *arguments)
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {error}"[:600], flush=True)
        gc.collect()

    def write(self) -> None:
        """One folder for each kind of row."""
        device = jax.devices()[0].device_kind
        where = f"{device.split()[-1].lower()}-{datetime.date.today().isoformat()}"
        head = {**about(self.options), "model": self.config.model_id, "layers": self.config.num_layers}
        head |= {"copy_bytes_per_second": self.bandwidth, "date": datetime.date.today().isoformat()}
        for what in WHAT:
            rows = [row for row in self.rows if row["what"] == what]
            if rows:
                folder = pathlib.Path(self.options.out) / f"{what}-jax" / where
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "run.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
                (folder / "page.md").write_text(page(what, head, rows))


COLUMNS = {
    "way": "", "cache": "cache", "sequences": "sequences", "tokens": "tokens", "ms": "ms",
    "floor_ms": "floor, ms", "x_floor": "x floor", "busy_ms": "busy, ms", "kernels": "kernels",
    "tokens_per_second": "tokens/s",
    "compile_seconds": "compilation, s",
}  # fmt: skip


def page(what: str, head: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The record to read."""
    title = {"decode": "Decode steps", "prefill": "Prefill", "throughput": "Throughput at equal memory"}[what]
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    lines = [f"# {title} of the Flax decoder, {head['model']}, {head['layers']} layers", ""]
    lines += [
        f"- {name}: {head[name]}" for name in ("command", "device", "jax", "int2_kernel", "bf16_kernel")
    ]
    lines += [f"- copy: {head['copy_bytes_per_second'] / 1e12:.2f} TB/s", ""]
    lines += ["| " + " | ".join(COLUMNS[name] for name in names) + " |", "|---" * len(names) + "|"]

    def cell(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
        return "" if value is None else str(value)

    lines += ["| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def time_steps(bench: Bench, what: str, kind: str, batch: int, length: int) -> None:
    """Steps dispatched one after the other; then some under the profiler."""
    options, config = bench.options, bench.config
    structure, arrays = bench.weights
    caches = make_caches(config, kind, batch, length, STEPS * (options.samples + 2))
    rotation, tokens = bench.rotation(), jnp.zeros(batch, jnp.int32)
    start = time.perf_counter()
    step = make_step(config, structure, kind, options).lower(arrays, tokens, caches, rotation).compile()
    compile_seconds = time.perf_counter() - start
    samples = []
    for _ in range(options.samples + 1):
        start = time.perf_counter()
        for _ in range(STEPS):
            tokens, caches = step(arrays, tokens, caches, rotation)
        jax.block_until_ready(tokens)
        samples.append((time.perf_counter() - start) / STEPS * 1e3)
    with profiled(4) as profile:
        for _ in range(4):
            tokens, caches = step(arrays, tokens, caches, rotation)
        jax.block_until_ready(tokens)
    middle = statistics.median(samples[1:])  # the first sample loads and warms up
    bench.add(what, "step", kind, batch, length, middle, compile_seconds=compile_seconds, **profile)


def time_generator(bench: Bench, batch: int, length: int) -> None:
    """`Generator` going on from filled caches."""
    new, config = STEPS * bench.options.samples, bench.config
    generator = make_generator(bench, fmt.PAGE_TOKENS)
    for run in range(2):
        caches = make_caches(config, "int2", batch, length, new + fmt.PAGE_TOKENS)
        result = generator([[1]] * batch, new + 1, caches=caches)
        taken = result.statistics
        milliseconds = taken.decode_seconds / new * 1e3
        del caches, result
        if run:
            bench.add("decode", "Generator", "int2", batch, length, milliseconds)


def make_generator(bench: Bench, chunk: int) -> Generator:
    """A greedy one over INT2 caches that never ends early."""
    model = nnx.merge(*jax.tree.unflatten(*bench.weights))
    rotation = bench.rotation()
    rotations = {layer: rotation for layer in range(bench.config.num_layers)}
    implementation = None if chunk > fmt.PAGE_TOKENS else bench.options.implementation
    return Generator(
        model, bench.config, rotations=rotations, eos_token_ids=(), chunk=chunk, implementation=implementation
    )


def time_prefill(bench: Bench, batch: int, length: int) -> None:
    """A prompt through `Generator` in chunks of several sizes, and at once with cuDNN's attention in BF16."""
    prompts = np.random.default_rng(0).integers(1, 100, (batch, length)).tolist()
    for chunk in bench.options.chunks:
        generator = make_generator(bench, chunk)
        generator(prompts, 1)
        seconds = generator(prompts, 1).statistics.prefill_seconds
        bench.add("prefill", f"Generator, chunks of {chunk}", "int2", batch, length, seconds * 1e3)
        del generator
        gc.collect()
    structure, arrays = bench.weights

    def whole(arrays: list[Any], tokens: jax.Array) -> tuple[jax.Array, list[Any]]:
        model = nnx.merge(*jax.tree.unflatten(structure, arrays))
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        attention = WholePrompt(bench.config, bench.options.baseline)
        hidden, states = model.hidden_states(tokens, None, positions=positions, attention=attention)
        return jnp.argmax(model.logits(hidden[:, -1:]), axis=-1), states

    tokens = jnp.asarray(prompts, jnp.int32)
    program = jax.jit(whole).lower(arrays, tokens).compile()
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        jax.block_until_ready(program(arrays, tokens))
        seconds = time.perf_counter() - start
    bench.add("prefill", f"at once, {bench.options.baseline}", "bf16", batch, length, seconds * 1e3)


class WholePrompt:
    """Causal attention of a whole prompt by `jax.nn.dot_product_attention`; the states are its rows."""

    def __init__(self, config: ModelConfig, baseline: str) -> None:
        self.config, self.baseline = config, baseline

    def __call__(
        self, layer: int, query: jax.Array, key: jax.Array, value: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        """Attention of one layer; see `decoder.Attention`."""
        attend: Any = jax.nn.dot_product_attention
        scale = self.config.attention_scale
        out = attend(query, key, value, scale=scale, is_causal=True, implementation=self.baseline)
        return out, (key, value)


@contextlib.contextmanager
def profiled(steps: int) -> Any:
    """Yields a dict that afterwards holds device time and kernels of a step, and the busiest by name."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            yield found
        names: dict[str, list[float]] = {}
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            planes: Any = jax.profiler.ProfileData.from_file(path).planes
            for line in (line for plane in planes for line in plane.lines if "Stream" in line.name):
                for event in line.events:
                    names.setdefault(event.name, []).append(event.duration_ns / 1e6 / steps)
    if names:
        found["busy_ms"] = sum(map(sum, names.values()))
        found["kernels"] = round(sum(map(len, names.values())) / steps)
        busiest = sorted(names, key=lambda name: -sum(names[name]))[:16]
        found["busiest"] = {
            name[:90]: [round(sum(names[name]), 4), round(len(names[name]) / steps)] for name in busiest
        }


@functools.partial(jax.jit, static_argnums=1)
def _rows(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def run(options: argparse.Namespace) -> None:
    """Runs every case with both caches and writes the record after each."""
    bench = Bench(options)
    config, cases = bench.config, [tuple(map(int, case.split("x"))) for case in options.cases]
    room = options.memory - bench.weight_bytes
    need = [n * config.num_layers for n in sequence_bytes(config.cache_config(), 1 << 20)]
    for batch, length in cases if "decode" in options.what else []:
        if "step" in options.ways:
            bench.try_to(time_steps, "decode", "int2", batch, length)
        if "generator" in options.ways:
            bench.try_to(time_generator, batch, length)
        if "bf16" in options.ways and batch * length * (need[1] >> 20) <= room:
            bench.try_to(time_steps, "decode", "bf16", batch, length)
    for batch, length in cases if "prefill" in options.what else []:
        bench.try_to(time_prefill, batch, length)
    for kind in ("int2", "bf16") if "throughput" in options.what else ():
        batch = int(room // (need[kind == "bf16"] * options.long >> 20))
        bench.try_to(time_steps, "throughput", kind, batch, options.long)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["decode"])
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    cases = ["1x32768", "8x32768", "1x98304", "8x98304"]
    parser.add_argument("--cases", nargs="+", default=cases, help="sequences x tokens (default %(default)s)")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of decode (default: all)"
    )
    parser.add_argument("--chunks", nargs="+", type=int, default=[2048, 8192], help="of prefill")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing later")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--long", type=int, default=LONG, help="tokens of a sequence, throughput")
    parser.add_argument("--samples", type=int, default=3, help=f"of {STEPS} steps each")
    parser.add_argument(
        "--implementation", choices=ops.IMPLEMENTATIONS, default="mosaic_gpu", help="of decode"
    )
    parser.add_argument("--baseline", choices=("cudnn", "xla"), default="cudnn")
    parser.add_argument("--memory", type=float, default=132e9, help="bytes for weights and caches")
    parser.add_argument("--copy-bytes", type=int, default=2 << 30)
    parser.add_argument("--out", default="results", help="directory")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
