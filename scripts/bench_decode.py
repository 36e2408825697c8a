"""Times end-to-end decoding of a Flax decoder with random weights: INT2 cache against BF16 with cuDNN.

    python scripts/bench_decode.py            # few layers, about a minute and a half
    python scripts/bench_decode.py --full     # as many layers as fit

Both runs use the same decoder, the same number of layers and full caches of random content. Beside tokens per
second stands the speed-up that the bytes alone would allow: weights plus cache read per step, BF16 over INT2.
Layers are cut until the BF16 caches fit into `--memory`; the report names how many were run.
Before anything is timed, the kernels are compared with the reference (`bench_attention.check_kernels`).
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from bench_attention import about, check_kernels, random_cache, sequence_bytes
from flax import nnx

from oscar_jax import ops
from oscar_jax.cache import append_rows
from oscar_jax.core import cache_format as fmt
from oscar_jax.layer_cache import DenseCache
from oscar_jax.models.cached_attention import CachedAttention
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.rope import RopeConfig
from oscar_jax.rotations.rotation import hadamard_rotation

STEPS = 16  # per sample; with the three samples and the one before them every sequence flushes one page
QUICK_LAYERS = 6


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


MODELS = {"qwen3-8b": (qwen3_8b, 36), "tiny": (tiny, 2)}


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


def measure(
    config: ModelConfig, weights: Any, kind: str, batch: int, length: int, options: argparse.Namespace
) -> tuple[float, float]:
    """Median milliseconds per decode step with caches of `kind`, and seconds of compilation."""
    structure, arrays = weights
    caches = make_caches(config, kind, batch, length, STEPS * (options.samples + 1))
    rotation = hadamard_rotation(config.num_key_value_heads, config.head_dim)
    rotation = jax.tree.map(jnp.asarray, rotation)
    tokens = jnp.zeros(batch, jnp.int32)
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
    return statistics.median(samples[1:]), compile_seconds  # the first sample loads and warms up


@functools.partial(jax.jit, static_argnums=1)
def _rows(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def write(head: dict[str, Any], rows: list[dict[str, Any]], output: pathlib.Path) -> None:
    """Writes the report as JSON, Markdown and a plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    output.with_suffix(".json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    lines = ["# End-to-end decoding: INT2 against BF16\n", *(f"- {k}: {v}" for k, v in head.items()), ""]
    lines.append("| B | layers | INT2 ms | BF16 ms | INT2 tokens/s | speed-up | allowed by bytes | share |")
    lines.append("|---|---|---|---|---|---|---|---|")
    done = [r for r in rows if "skipped" not in r]
    for r in done:
        numbers = [r["int2_ms"], r["bf16_ms"], r["int2_tokens_per_second"], r["speed_up"]]
        cells = [f"{x:.2f}" for x in (*numbers, r["allowed_speed_up"])] + [
            f"{100 * r['share_of_allowed']:.0f} %"
        ]
        lines.append(f"| {r['batch']} | {r['layers']} | " + " | ".join(cells) + " |")
    lines += [f"\nB = {r['batch']} skipped: {r['skipped']}" for r in rows if "skipped" in r]
    output.with_suffix(".md").write_text("\n".join(lines) + "\n")

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for shift, name in ((-0.2, "allowed_speed_up"), (0.2, "speed_up")):
        axis.bar([i + shift for i in range(len(done))], [r[name] for r in done], 0.4, label=name)
    axis.set_xticks(range(len(done)), [f"B = {r['batch']}" for r in done])
    axis.set_ylabel("BF16 step time / INT2 step time (higher is better)")
    axis.set_title(", ".join(str(head[name]) for name in ("model", "device") if name in head), fontsize=9)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.tight_layout()
    figure.savefig(output.with_suffix(".png"), dpi=150)
    pyplot.close(figure)


def run(options: argparse.Namespace) -> None:
    """Runs every batch size with both caches and writes the results after each."""
    make_config, all_layers = MODELS[options.model]
    output = pathlib.Path(options.out) / "bench_decode"
    output.parent.mkdir(parents=True, exist_ok=True)
    head = {**about(options), "model": make_config(1).model_id, "length": options.length}
    head |= {"time": "wall, median of samples"}
    check_kernels(make_config(1).cache_config(), options)
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    weights: Any = None
    built = 0  # layers of the weights
    for batch in options.batches:
        if time.perf_counter() - begin > options.seconds:
            rows.append({"batch": batch, "skipped": f"not started within {options.seconds:.0f} s"})
            continue
        int2_bytes, bf16_bytes = (
            batch * x for x in sequence_bytes(make_config(1).cache_config(), options.length)
        )
        wanted = options.layers or (all_layers if options.full else min(all_layers, QUICK_LAYERS))
        layers = min(wanted, int(options.memory // bf16_bytes))
        if layers < 1:
            rows.append({"batch": batch, "skipped": f"one layer of BF16 rows takes {bf16_bytes} bytes"})
            continue
        config = make_config(layers)
        if layers != built:
            weights = None  # not both at a time
            weights, built = random_weights(config), layers
        # The embedding is looked up, not read.
        lookup = config.vocab_size * config.hidden_size * 2
        read = sum(x.nbytes for x in weights[1]) - lookup
        row: dict[str, Any] = {"batch": batch, "layers": layers, "weight_bytes": read}
        row["allowed_speed_up"] = (read + layers * bf16_bytes) / (read + layers * int2_bytes)
        try:
            for kind in ("int2", "bf16"):
                timing = measure(config, weights, kind, batch, options.length, options)
                row[f"{kind}_ms"], row[f"{kind}_compile_seconds"] = timing
                row[f"{kind}_tokens_per_second"] = batch / row[f"{kind}_ms"] * 1e3
        except Exception as error:  # one batch that runs out of memory must not hide the others
            rows.append({**row, "skipped": f"{type(error).__name__}: {error}"[:300]})
            print("failed:", json.dumps(rows[-1]), flush=True)
            continue
        row["speed_up"] = row["bf16_ms"] / row["int2_ms"]
        row["share_of_allowed"] = row["speed_up"] / row["allowed_speed_up"]
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(head, rows, output)
    write(head, rows, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 1, 32])
    parser.add_argument("--full", action="store_true", help="as many layers as fit, without a time limit")
    parser.add_argument("--seconds", type=float, help="start no batch later; 60, with --full unlimited")
    parser.add_argument("--length", type=int, default=102_400)
    parser.add_argument("--layers", type=int, help="at most; by default few, or all that fit")
    parser.add_argument("--samples", type=int, default=3, help=f"of {STEPS} steps each")
    parser.add_argument("--implementation", choices=ops.IMPLEMENTATIONS, default="mosaic_gpu")
    parser.add_argument("--baseline", choices=("cudnn", "xla"), default="cudnn")
    parser.add_argument("--memory", type=float, default=90e9, help="bytes that the BF16 caches may take")
    parser.add_argument("--out", default="results", help="directory")
    options = parser.parse_args()
    options.seconds = options.seconds or (float("inf") if options.full else 60.0)
    run(options)


if __name__ == "__main__":
    main()
