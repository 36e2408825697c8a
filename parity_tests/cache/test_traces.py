"""JAX: what is compiled and how often, where it runs, and how it is spread over devices."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

from oscar_jax import ops  # noqa: E402
from oscar_jax.attention import chunk_attention, decode_attention  # noqa: E402
from oscar_jax.cache import allocate_layer_cache, append_rows, attend  # noqa: E402
from oscar_jax.core.config import CacheConfig  # noqa: E402
from oscar_jax.rotations.rotation import hadamard_rotation  # noqa: E402
from parity_tests.sharding.devices import on_eight_devices  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_eager_calls_compile_once_per_shape() -> None:
    """54: the second call of a shape compiles nothing, whatever the lengths; another shape compiles once."""
    config = CacheConfig(1, 2, 48)
    rotation = jax.tree.map(jnp.asarray, hadamard_rotation(1, 48))
    cache = allocate_layer_cache(config, 1, 700)
    rows = {t: jnp.ones((1, t, 1, 48)) for t in (1, 3)}
    query = {t: jnp.ones((1, t, 2, 48)) for t in (1, 3)}
    counts = {t: jnp.full(1, t, jnp.int32) for t in (1, 3)}
    out = query[1][:, 0]
    compiled = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    def calls(cache: Any) -> Any:
        for t in (1, 3):
            options: dict[str, Any] = {"new_lengths": counts[t], "softmax_scale": 0.1}
            _, cache = attend(query[t], rows[t], rows[t], cache, rotation, **options)
        cache = append_rows(cache, rotation, rows[3], rows[3], counts[3])
        decode_attention(out, cache, rotation, softmax_scale=0.1)
        chunk_attention(query[3], rows[3], rows[3], cache, rotation, new_lengths=counts[3], softmax_scale=0.1)
        return cache

    cache = calls(cache)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(3):
            cache = calls(cache)
        assert not compiled
        # Another batch is another shape of everything: one program, for a call that has no other work.
        other = allocate_layer_cache(config, 2, 700)
        two = [jnp.concatenate([x, x]) for x in (query[1], rows[1], counts[1])]
        jax.block_until_ready((other, two))
        compiled.clear()
        attend(two[0], two[1], two[1], other, rotation, new_lengths=two[2], softmax_scale=0.1)
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("platform", "capability", "served"),
    [("cpu", None, False), ("tpu", None, False)]
    + [("gpu", c, c == "9.0") for c in ("7.5", "8.0", "8.9", "9.0", "10.0", "12.0")],
)
def test_capability_decides(platform: str, capability: str | None, served: bool) -> None:
    """Exactly 9.x has Mosaic GPU kernels; the reason names the device."""
    device = SimpleNamespace(platform=platform, device_kind=f"the {platform}")
    if capability:
        device.compute_capability = capability
    reason = ops._why_not.__wrapped__(device)
    assert (reason is None) == served
    assert served or (capability or platform) in str(reason)


def test_the_arrays_decide_where(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Arrays of a CPU take the reference on a host with a Hopper GPU, and the log says it once."""
    array = jnp.ones((1, 64, 1, 16), jnp.bfloat16)

    class Hopper:
        platform, device_kind, compute_capability = "gpu", "a Hopper", "9.0"

    monkeypatch.setattr(ops, "ambient_device", Hopper)
    monkeypatch.setattr(ops, "_kernel", lambda module, name: lambda *arguments: "kernel")
    ops._log_once.cache_clear()
    rotation: Any = hadamard_rotation(1, 16)
    with caplog.at_level(logging.INFO, logger=ops.__name__):
        for _ in range(2):
            assert ops.quantize_pages(array, array, rotation)["key_codes"].shape == (1, 1, 64, 1)
    assert [record.message for record in caplog.records if "the reference runs" in record.message] == [
        "the reference runs: the arrays lie on cpu, mosaic_gpu needs a GPU of compute capability 9.x"
    ]
    with pytest.raises(NotImplementedError, match="cpu"):
        ops.quantize_pages(array, array, rotation, implementation="mosaic_gpu")

    def traced(pages: Any) -> Any:  # has no place of its own: the default device decides
        assert cast(Any, ops.quantize_pages(pages, pages, rotation)) == "kernel"
        return pages

    jax.eval_shape(traced, array)


def test_a_refusal_of_the_kernel_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise NotImplementedError("head_dim = 16")

    monkeypatch.setattr(ops, "_why_not", lambda device: None)
    monkeypatch.setattr(ops, "_kernel", lambda module, name: refuse)
    ops._log_once.cache_clear()
    array = jnp.ones((1, 64, 1, 16), jnp.bfloat16)
    with caplog.at_level(logging.INFO, logger=ops.__name__):
        for _ in range(2):
            ops.quantize_pages(array, array, hadamard_rotation(1, 16))
    assert [record.message for record in caplog.records] == ["mosaic_gpu does not serve this: head_dim = 16"]
    with pytest.raises(NotImplementedError, match="head_dim = 16"):
        ops.quantize_pages(array, array, hadamard_rotation(1, 16), implementation="mosaic_gpu")


SHARDED = """
import dataclasses
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from oscar_jax.cache import allocate_layer_cache, attend
from oscar_jax.core.config import CacheConfig
from oscar_jax.rotations.rotation import hadamard_rotation

assert len(jax.devices()) == 8
full, local = CacheConfig(8, 16, 32), CacheConfig(1, 2, 32)
rotation = jax.tree.map(jnp.asarray, hadamard_rotation(8, 32))
rng = np.random.default_rng(0)
query, key, value = (jnp.asarray(rng.standard_normal((2, 500, n, 32)), jnp.bfloat16) for n in (16, 8, 8))
counts = jnp.array([500, 400], jnp.int32)
cache = allocate_layer_cache(full, 2, 1000)
names = [f.name for f in dataclasses.fields(cache) if f.name != "config"]
tables = ("page_table", "window_table", "lengths", "history_pages")
specs = dataclasses.replace(cache, **{n: P() if n in tables else P(None, "model") for n in names})
heads = P(None, None, "model")

def one(query, key, value, cache, rotation, counts):
    return attend(query, key, value, cache, rotation, new_lengths=counts, softmax_scale=0.2)

def of_a_shard(query, key, value, cache, rotation, counts):
    cache = dataclasses.replace(cache, config=local)
    out, cache = one(query, key, value, cache, rotation, counts)
    return out, dataclasses.replace(cache, config=full)

def two_steps(step, query, key, value, cache, rotation, counts):
    first, cache = step(query, key, value, cache, rotation, counts)
    second, cache = step(*(x[:, :1] for x in (query, key, value)), cache, rotation, jnp.ones_like(counts))
    return first, second, cache

def placed(mesh):
    def put(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))
    rows = (put(x, heads) for x in (query, key, value))
    spread = jax.tree.map(lambda x: put(x, P("model")), rotation)
    return *rows, jax.tree.map(put, cache, specs), spread, put(counts, P())

want = two_steps(jax.jit(one), query, key, value, cache, rotation, counts)
def same(name, got):
    for field in names:
        a, b = (np.asarray(getattr(x[2], field)) for x in (got, want))
        assert a.tobytes() == b.tobytes(), (name, field)
    for a, b in zip(got[:2], want[:2]):  # one bfloat16 step: sums of another order, rounded
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-7, atol=1e-5)
    print("same:", name)

mesh = Mesh(np.array(jax.devices()), ("model",))
same("jit", two_steps(jax.jit(one), *placed(mesh)))
for check in (False, True):
    step = jax.shard_map(
        of_a_shard, mesh=mesh, in_specs=(heads, heads, heads, specs, P("model"), P()),
        out_specs=(heads, specs), check_vma=check,
    )
    same(f"shard_map {check}", two_steps(jax.jit(step), *placed(mesh)))
mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    same("explicit", two_steps(jax.jit(one), *placed(mesh)))
"""


def test_sharded_heads_store_the_same_bytes() -> None:
    """55: eight devices with a head each, by jit, shard_map and explicit sharding: one device's bytes."""
    assert [line for line in on_eight_devices(SHARDED) if line.startswith("same")] == [
        "same: jit", "same: shard_map False", "same: shard_map True", "same: explicit",
    ]  # fmt: skip
