"""JAX on many devices: eight virtual ones of a CPU, in a process of their own each time.

What is stored is equal to one device's to the bit where the rows are; what a whole model makes of a prompt is
equal in its tokens, and its rows differ by what float32 sums of another order differ by.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

from oscar_jax import sharding
from oscar_jax.cache import allocate_layer_cache
from oscar_jax.cli import main
from oscar_jax.core.config import CacheConfig
from oscar_jax.core.errors import ShapeError
from oscar_jax.rotations.rotation import hadamard_rotation
from oscar_jax.rotations.store import load_rotation_set
from parity_tests.models.tiny_model import write_tiny_model
from parity_tests.sharding.devices import ROOT, on_eight_devices

ATTEND = """
import dataclasses, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType
from oscar_jax import sharding
from oscar_jax.cache import allocate_dense_cache, allocate_layer_cache, attend, live_bytes
from oscar_jax.core.config import CacheConfig
from oscar_jax.rotations.rotation import hadamard_rotation
from oscar_jax.sharding.caches import ROWS, cache_specs
from oscar_jax.sharding.mesh import on_mesh

COLLECTIVE = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
rng = np.random.default_rng(0)
counts = [jnp.array(n, jnp.int32) for n in ([400, 330, 64, 0], [1, 1, 0, 1])]

def check(name, heads, make, explicit=False):
    kinds = {"axis_types": (AxisType.Explicit,) * 2} if explicit else {}
    mesh = sharding.make_mesh(2, 4, **kinds)
    config, copies = CacheConfig(heads, 8, 16, recent_tokens=128), max(1, 4 // heads)
    cache = make(config)
    rotation = None
    if not hasattr(cache, "window"):
        rotation = jax.tree.map(jnp.asarray, hadamard_rotation(heads, 16))
    rows = [
        [jnp.asarray(rng.standard_normal((4, t, n, 16)), jnp.bfloat16) for n in (8, heads, heads)]
        for t in (400, 1)
    ]
    options = {"softmax_scale": 0.25, "sliding_window": getattr(cache, "window", None)}
    one = jax.jit(lambda *a: attend(*a[:5], new_lengths=a[5], **options))
    many = jax.jit(lambda *a: sharding.attend(*a[:5], new_lengths=a[5], mesh=mesh, **options))
    placed = sharding.place_cache(cache, mesh)
    spread = rotation and sharding.place_rotations(rotation, mesh, heads)
    with jax.set_mesh(mesh):
        for (query, key, value), count in zip(rows, counts):
            out, cache = one(query, key, value, cache, rotation, count)
            key, value = (jnp.repeat(x, copies, axis=2) for x in (key, value))
            arguments = [jax.device_put(x, on_mesh(mesh, *ROWS)) for x in (query, key, value)]
            arguments += [placed, spread, jax.device_put(count, on_mesh(mesh, "data"))]
            if query.shape[1] == 1:
                found = re.findall(COLLECTIVE, many.lower(*arguments).compile().as_text())
                print("collectives:", name, len(found))
            got, placed = many(*arguments)
            assert got.sharding.is_equivalent_to(on_mesh(mesh, *ROWS), 4), got.sharding
            # Heads apart give the sums of one device in the same order, up to the shape of the products.
            np.testing.assert_allclose(np.float32(got), np.float32(out), rtol=2**-7, atol=1e-5)
    want = sharding.place_cache(cache, mesh)
    for field, spec in dataclasses.asdict(cache_specs(want)).items():
        if field not in ("config", "window"):
            a, b = getattr(placed, field), getattr(want, field)
            # Reserved pages and those that nobody has keep what they have.
            assert a.sharding.is_equivalent_to(on_mesh(mesh, *spec), a.ndim), (field, a.sharding)
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (name, field)
    sizes = live_bytes(placed), live_bytes(cache)
    assert sizes[0]["total"] == copies * sizes[1]["total"] and sizes[0]["tokens"] == sizes[1]["tokens"]
    print("same:", name)

def paged(config):
    return allocate_layer_cache(config, 4, 512)

def shared(config):  # a pool whose tables are not in order, with pages to spare
    cache = allocate_layer_cache(config, 4, 512, 40, 20)
    tables = {"page_table": cache.page_table, "window_table": cache.window_table}
    for name, table in tables.items():
        pages = rng.permutation(np.arange(1, table.size + 1, dtype=np.int32))
        tables[name] = jnp.asarray(pages.reshape(table.shape))
    return dataclasses.replace(cache, **tables)

check("heads copied", 2, paged)
check("one head", 1, shared)
check("a head each, explicit axes", 4, paged, explicit=True)
check("ring", 2, lambda config: allocate_dense_cache(config, 4, 512, window=100))
"""


def test_attention_on_a_mesh_stores_the_same_bytes_and_asks_nobody() -> None:
    """Sequences over data, heads over model, copied or not: one device's bytes, and no collective at all."""
    lines = on_eight_devices(ATTEND)
    names = ("heads copied", "one head", "a head each, explicit axes", "ring")
    assert [line for line in lines if line.startswith("same")] == [f"same: {name}" for name in names]
    assert [line for line in lines if line.startswith("coll")] == [f"collectives: {n} 0" for n in names]


def test_more_new_rows_than_given_are_refused_on_a_mesh() -> None:
    """As by `cache.attend`, before anything runs."""
    mesh = sharding.make_mesh(1, 1)
    cache = allocate_layer_cache(CacheConfig(1, 1, 16), 1, 64)
    rows = jnp.ones((1, 2, 1, 16), jnp.bfloat16)
    with pytest.raises(ShapeError, match=r"new_lengths \[3\], allowed: 0\.\.2, the rows given"):
        sharding.attend(
            rows, rows, rows, cache, hadamard_rotation(1, 16), mesh=mesh, softmax_scale=0.25,
            new_lengths=jnp.full(1, 3, jnp.int32),
        )  # fmt: skip


GENERATE = """
import dataclasses, pathlib, sys
import jax, numpy as np
from flax import nnx
from oscar_jax import sharding
from oscar_jax.cache import read_layer_cache
from oscar_jax.core.errors import ConfigError
from oscar_jax.generate import Generator
from oscar_jax.models.experts import ExpertsConfig
from oscar_jax.models.weights import load_model, weights_fingerprint
from oscar_jax.rotations.rotation import hadamard_rotation
from parity_tests.models.tiny_model import write_tiny_model
from parity_tests.sharding.devices import ROOT, on_eight_devices
from parity_tests.sharding.random_model import random_decoder

def check(name, model, placed, config, mesh):
    heads = config.num_key_value_heads
    rotations = {layer: hadamard_rotation(heads, config.head_dim) for layer in range(config.num_layers)}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 250, n).tolist() for n in (420, 390, 64, 385)]
    options = {"rotations": rotations, "eos_token_ids": (), "chunk": 448}
    one = Generator(model, config, **options)(prompts, 9)
    generator = Generator(placed, config, mesh=mesh, **options)
    got = generator(prompts, 9)
    assert got.tokens == one.tokens, (got.tokens, one.tokens)
    copies = placed.config.head_copies
    spread = sharding.place_rotations(rotations, mesh, heads)
    for layer in rotations:
        for sequence in range(4):
            want = read_layer_cache(one.caches[layer], rotations[layer], sequence)
            have = read_layer_cache(got.caches[layer], spread[layer], sequence)
            for a, b in zip(want, have):  # float32 sums of another order, rounded to bfloat16
                a, b = np.asarray(a), np.asarray(b)[:, ::copies]
                assert (a != b).mean() < 0.02 and np.abs(a - b).mean() < 1e-4 * np.abs(a).mean()
    for cache in got.caches:
        shard = cache.key_codes.addressable_shards[0].data
        sizes = tuple(mesh.shape.values())
        assert shard.shape[:2] == tuple(n // by for n, by in zip(cache.key_codes.shape, sizes)), shard.shape
    print("same:", name)
    return generator

def try_all(directory):
    mesh = sharding.make_mesh(2, 4)
    write_tiny_model(directory, head_dim=16, num_attention_heads=8, tie_word_embeddings=True)
    model, config, _ = load_model(directory)
    placed, found, _ = sharding.load_model(directory, mesh)
    assert found == config and weights_fingerprint(placed) == config.fingerprint
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (placed, sharding.place_model(model, mesh)))):
        assert a.sharding == b.sharding and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for leaf in jax.tree.leaves(nnx.state(placed)):
        assert leaf.ndim < 2 or all(s.data.size < leaf.size for s in leaf.addressable_shards)
    generator = check("dense", model, placed, config, mesh)
    try:
        generator([[1], [2], [3]], 1)
    except ConfigError as error:
        print(error)
    experts = ExpertsConfig(8, 2, 32, normalize=True, shared_size=32, bias=True)
    model = random_decoder(experts=experts)
    mesh = sharding.make_mesh(2, 2)
    check("experts", model, sharding.place_model(model, mesh), model.config, mesh)

try_all(pathlib.Path(sys.argv[1]))
"""


def test_generation_on_a_mesh_makes_the_same_tokens(tmp_path: Path) -> None:
    """A checkpoint loaded in parts, heads copied, and experts: the tokens of one device."""
    lines = on_eight_devices(GENERATE, str(tmp_path / "model"), quickly=True)
    assert lines == ["same: dense", "3 sequences, allowed: multiples of data = 2", "same: experts"]


CALIBRATE = """
import dataclasses
import jax, numpy as np
from oscar_jax import sharding
from oscar_jax.calibration.statistics import gather_statistics
from parity_tests.sharding.random_model import random_decoder

model = random_decoder(num_layers=1)
rng = np.random.default_rng(0)
sequences = [rng.integers(0, 250, 448).astype(np.int32) for _ in range(6)]

def gather(mesh):
    options = {"chunk": 256, "save_every": 99, "state_path": None, "run_digest": ""}
    if mesh is None:
        return gather_statistics(model, model.config, (0,), sequences, **options)[0]
    with jax.set_mesh(mesh):
        placed = sharding.place_model(model, mesh)
        return gather_statistics(placed, model.config, (0,), sequences, **options)[0]

one = gather(None)
# Alone along data every device does what one does, and only sums are merged; along model rows are rounded
# differently, which moves a mean of products by as much as they are off, 2**-8 a row, less over many.
for sizes, bound in (((4, 1), 2.0**-40), ((2, 2), 2.0**-10)):
    found = gather(sharding.make_mesh(*sizes))
    for field in dataclasses.fields(one):
        a, b = (getattr(statistics, field.name) for statistics in (one, found))
        assert (a is None) == (b is None), field.name
        if a is not None:
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            assert np.abs(a - b).max() <= bound * np.abs(a).max(), (sizes, field.name, np.abs(a - b).max())
    print("same:", sizes)
"""


def test_statistics_do_not_depend_on_the_split() -> None:
    """Sequences over data: statistics within the stated 2**-40; heads over model: within rounding of rows."""
    assert on_eight_devices(CALIBRATE) == ["same: (4, 1)", "same: (2, 2)"]


@pytest.mark.hf
def test_two_hosts_calibrate_and_generate_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, one device each, by the command line: the rotations and the text of one process."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("localhost", 0))
        other.bind(("localhost", 0))
        ports = [place.getsockname()[1] for place in (one, other)]
    write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("Caches forget what nobody asks for. " * 60)
    model = ["--model", str(tmp_path / "model")]

    def on_two_hosts(port: int, *arguments: str) -> list[str]:
        place = ["--mesh", "data=2", "--coordinator", f"localhost:{port}", "--hosts", "2"]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "oscar_jax", *arguments, *place, "--host", str(host)],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in range(2)
        ]
        outcomes = [process.communicate(timeout=300) for process in processes]
        assert not any(process.returncode for process in processes), [err[-2000:] for _, err in outcomes]
        # The library that joins the hosts greets on standard output.
        return ["".join(x for x in out.splitlines(True) if "[Gloo]" not in x) for out, _ in outcomes]

    calibrate = ["calibrate", *model, "--text", str(tmp_path / "text.txt"), "--context", "256"]
    calibrate += ["--tokens", "1280", "--chunk", "256", "--basis", "channel_balanced", "--out"]
    assert main([*calibrate, str(tmp_path / "one")]) == 0
    on_two_hosts(ports[0], *calibrate, str(tmp_path / "two"))
    first, second = (load_rotation_set(tmp_path / name).layers[0].numpy() for name in ("one", "two"))
    for field, array in first.items():
        assert array.tobytes() == second[field].tobytes(), field
    generate = ["generate", *model, "--rotations", str(tmp_path / "two"), "--max-new-tokens", "4"]
    generate += ["--prompt", "One", "--prompt", "Two and"]
    capsys.readouterr()
    assert main(generate) == 0
    assert on_two_hosts(ports[1], *generate) == [capsys.readouterr().out, ""]
