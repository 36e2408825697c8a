"""Times a model on a mesh of devices: decode against the bytes it must read, and calibration per second.

    python scripts/bench_mesh.py --out results/mesh/h200x2            # every device
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python scripts/bench_mesh.py --check                          # tiny shapes

Weights are random and made in place on their devices. The floor of a decode step is weights and cache of a
device over --bandwidth. First of all caches on the mesh are compared with one device's, byte by byte: no
figure is printed on a difference.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from oscar_jax import sharding
from oscar_jax.cache import allocate_layer_cache, attend
from oscar_jax.calibration.statistics import gather_statistics
from oscar_jax.core.config import CacheConfig
from oscar_jax.models.cached_attention import CachedAttention
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.rope import RopeConfig
from oscar_jax.models.weights import abstract_model
from oscar_jax.rotations.rotation import hadamard_rotation
from oscar_jax.sharding.mesh import on_mesh
from oscar_jax.sharding.places import OnMesh
from oscar_jax.sharding.weights import abstract_model as abstract_on_mesh

# name -> hidden, intermediate, layers, query heads, key/value heads, head_dim, vocabulary
SHAPES = {
    "qwen3-8b": (4096, 12_288, 36, 32, 8, 128, 151_936),
    "qwen3-32b": (5120, 25_600, 64, 64, 8, 128, 151_936),
    "llama-70b": (8192, 28_672, 80, 64, 8, 128, 128_256),
    "tiny": (64, 96, 2, 8, 4, 16, 264),
}
WARM_UP, REPEATS = 3, 20


def config_of(name: str) -> ModelConfig:
    """The configuration of a shape."""
    hidden, inner, layers, heads, kv_heads, width, vocabulary = SHAPES[name]
    return ModelConfig(
        family="qwen3", model_id=name, vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner,
        num_layers=layers, num_query_heads=heads, num_key_value_heads=kv_heads, head_dim=width,
        max_positions=262_144, rms_norm_eps=1e-6, attention_scale=width**-0.5, rope=RopeConfig(1_000_000.0),
        layer_windows=(None,) * layers, qk_norm="head",
    )  # fmt: skip


def random_model(config: ModelConfig, mesh: Mesh, dtype: Any) -> Any:
    """A decoder on the mesh; every weight is drawn where it lies."""
    spread = config.for_shards(mesh.shape["model"])
    graph, _ = nnx.split(abstract_model(spread, dtype=dtype, param_dtype=dtype))
    leaves, structure = jax.tree.flatten(abstract_on_mesh(config, mesh, dtype=dtype, param_dtype=dtype))
    drawn = []
    for number, leaf in enumerate(leaves):

        def draw(number: int = number, leaf: Any = leaf) -> jax.Array:
            if len(leaf.shape) == 1:
                return jnp.ones(leaf.shape, leaf.dtype)
            rows = jax.random.normal(jax.random.key(number), leaf.shape, jnp.bfloat16)
            return (rows * leaf.shape[-2] ** -0.5).astype(leaf.dtype)

        drawn.append(jax.jit(draw, out_shardings=leaf.sharding)())
    return nnx.merge(graph, jax.tree.unflatten(structure, drawn))


def rotations_of(config: ModelConfig, mesh: Mesh) -> dict[int, Any]:
    """A Hadamard rotation for every layer."""
    one = hadamard_rotation(config.num_key_value_heads, config.head_dim)
    placed = sharding.place_rotations(one, mesh, config.num_key_value_heads)
    return dict.fromkeys(range(config.num_layers), placed)


def compare_bytes(mesh: Mesh) -> int:
    """Arrays that differ between a cache on the mesh and one device's after a chunk and a token."""
    model, batch = mesh.shape["model"], 2 * mesh.shape["data"]
    config = CacheConfig(2 * model, 8 * model, 128)
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(config.num_key_value_heads, 128))
    cache = allocate_layer_cache(config, batch, 1024)
    placed, spread = sharding.place_cache(cache, mesh), sharding.place_rotations(rotation, mesh, 2 * model)
    rng = np.random.default_rng(0)
    for tokens in (700, 1):
        heads = (config.num_query_heads, config.num_key_value_heads, config.num_key_value_heads)
        query, key, value = (
            jnp.asarray(rng.standard_normal((batch, tokens, n, 128)), jnp.bfloat16) for n in heads
        )
        counts = jnp.full(batch, tokens, jnp.int32)
        options: dict[str, Any] = {"new_lengths": counts, "softmax_scale": 128**-0.5}
        _, cache = attend(query, key, value, cache, rotation, **options)
        query, key, value = (
            jax.device_put(x, on_mesh(mesh, "data", None, "model")) for x in (query, key, value)
        )
        _, placed = sharding.attend(query, key, value, placed, spread, mesh=mesh, **options)
    want = sharding.place_cache(cache, mesh)
    pairs = zip(jax.tree.leaves(placed), jax.tree.leaves(want))
    return sum(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in pairs)


def time_decode(
    name: str, mesh: Mesh, batch: int, context: int, dtype: Any, bandwidth: float
) -> dict[str, Any]:
    """Median milliseconds of a decode step behind `context` stored tokens, and what it must read at least."""
    config = config_of(name)
    place = OnMesh(config, mesh)
    model = random_model(config, mesh, dtype)
    graph, parameters = nnx.split(model)
    rotations = rotations_of(config, mesh)
    caches = sharding.allocate_model_cache(config, batch, context + 512, mesh)
    # Full pages of zeros read as any others: only the lengths say how much is stored.
    history = config.cache_config().history_pages(context)

    def filled(cache: Any) -> Any:
        return dataclasses.replace(
            cache,
            lengths=jnp.full_like(cache.lengths, context),
            history_pages=jnp.full_like(cache.history_pages, history),
        )

    fill = jax.jit(filled, donate_argnums=0)
    caches = [fill(cache) for cache in caches]

    def step(parameters, tokens, caches, rotations):
        ones = jnp.ones(batch, jnp.int32)
        attention = CachedAttention(config, rotations, ones, attend=place.attend)
        positions = caches[0].lengths[:, None]
        decoder = nnx.merge(graph, parameters)
        hidden, caches = decoder.hidden_states(
            place.by_sequence(tokens[:, None]), caches, positions=positions, attention=attention
        )
        return place.everywhere(jnp.argmax(decoder.logits(hidden[:, 0]), axis=-1).astype(jnp.int32)), caches

    with jax.set_mesh(mesh):
        run = jax.jit(step, donate_argnums=2)
        tokens, times = place.put(np.zeros(batch, np.int32)), []
        for _ in range(WARM_UP + REPEATS):
            started = time.perf_counter()
            tokens, caches = run(parameters, tokens, caches, rotations)
            jax.block_until_ready((tokens, caches))
            times.append(1e3 * (time.perf_counter() - started))
    sizes = {"data": mesh.shape["data"], "model": mesh.shape["model"]}
    memory = sharding.memory_per_device(config, **sizes, batch=batch, tokens=context, dtype=dtype)
    floor = 1e3 * (memory.weights + memory.int2) / (bandwidth * 1e12)
    milliseconds = statistics.median(times[WARM_UP:])
    return {
        "shape": name, **sizes, "batch": batch, "context": context, "milliseconds": milliseconds,
        "floor_milliseconds": floor, "times_floor": milliseconds / floor,
        "tokens_per_second": 1e3 * batch / milliseconds,
    }  # fmt: skip


def time_calibration(name: str, mesh: Mesh, sequences: int, length: int, dtype: Any) -> dict[str, Any]:
    """Tokens per second of the statistics, the second pass over the same text: the first one compiles."""
    config = config_of(name)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, config.vocab_size, length).astype(np.int32) for _ in range(sequences)]
    seconds = 0.0
    with jax.set_mesh(mesh):
        model = random_model(config, mesh, dtype)
        for _ in range(2):
            started = time.perf_counter()
            gather_statistics(
                model, config, tuple(range(config.num_layers)), texts, chunk=min(2048, length),
                save_every=10**9, state_path=None, run_digest="",
            )  # fmt: skip
            seconds = time.perf_counter() - started
    return {
        "shape": name, "data": mesh.shape["data"], "model": mesh.shape["model"],
        "calibration_tokens_per_second": sequences * length / seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="tiny shapes")
    parser.add_argument("--devices", type=int, help="default: all")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["qwen3-8b", "qwen3-32b", "llama-70b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--contexts", nargs="+", type=int, default=[32_768, 98_304])
    parser.add_argument("--bandwidth", type=float, default=4.8, help="TB/s of a device (default: H200)")
    parser.add_argument("--no-calibration", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, help="folder for run.json")
    arguments = parser.parse_args()
    count = arguments.devices or len(jax.devices())
    if arguments.check:
        arguments.models, arguments.batches, arguments.contexts = ["tiny"], [2], [512]
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    data = 2 if arguments.check and count % 2 == 0 else 1
    mesh = sharding.make_mesh(data, min(count // data, 4) if arguments.check else count)
    different = compare_bytes(mesh)
    device = jax.devices()[0].device_kind
    print(f"{count} x {device}: {different} arrays differ from one device's", flush=True)
    if different:
        raise SystemExit(1)
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        # One device beside the mesh, where the weights fit.
        meshes = [mesh] if name == "llama-70b" else [sharding.make_mesh(1, 1), mesh]
        for each in meshes:
            for batch in arguments.batches:
                for context in arguments.contexts:
                    rows.append(time_decode(name, each, batch, context, dtype, arguments.bandwidth))
                    print(json.dumps(rows[-1]), flush=True)
    if not arguments.no_calibration:
        name, sequences, length = ("tiny", 8, 256) if arguments.check else ("qwen3-8b", 16, 4096)
        for each in (sharding.make_mesh(1, 1), sharding.make_mesh(count, 1)):
            rows.append(time_calibration(name, each, sequences, length, dtype))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        about = {"device": device, "devices": count, "jax": jax.__version__, "bytes_differ": different}
        (arguments.out / "run.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
