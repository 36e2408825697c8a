"""JAX and Torch on one GPU in one process: the same rows leave the same bytes, and each reads the other's.

Cache arrays cross by DLPack, on the device, without a copy. The Torch side writes with the Triton kernels
(Gluon on Hopper as well), the JAX side with the best it has on this device (Mosaic on Hopper, XLA elsewhere)
and with XLA.
With OSCAR_REAL_ROWS naming a file of `capture_rows.py`, rows of a real model are stored and read as well.
"""

import os
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import FRAMEWORKS, PackageCache

pytest.importorskip("torch")
pytest.importorskip("jax")
pytestmark = pytest.mark.gpu

HEADS, HEAD_DIM, GROUP = 2, 128, 4
MAX_LENGTH = 1500
LENGTHS = (1, 64, 321, 384, 700, 1000)
FIELDS = (
    "key_codes",
    "value_codes",
    "key_scale",
    "value_scale",
    "key_page_mean",
    "window_key",
    "window_value",
)
COUNTS = ("lengths", "history_pages")
TOLERANCE = 3e-3  # two attention kernels against each other; the bytes they read are the same


@pytest.fixture(scope="module", autouse=True)
def both_see_the_gpu() -> None:
    for name, framework in FRAMEWORKS.items():
        reason = framework.why_not("gpu")
        if reason:
            pytest.skip(f"{name}: {reason}")


def new_rows(rng: np.random.Generator, tokens: int, family: Any = rows.mixed_rows) -> list[np.ndarray]:
    shape = (64 * -(-tokens // 64), HEADS, HEAD_DIM)
    return [np.stack([family(rng, shape)[:tokens] for _ in LENGTHS]) for _ in range(2)]


class Pair:
    """The same cache in both packages."""

    def __init__(
        self,
        jax_implementation: str | None,
        torch_implementation: str | None,
        heads: int = HEADS,
        head_dim: int = HEAD_DIM,
        query_heads: int = HEADS * GROUP,
    ):
        self.implementations = {"jax": jax_implementation, "torch": torch_implementation}
        rotation = rows.make_rotation(np.random.default_rng(7), heads, head_dim)
        self.caches = {
            name: PackageCache(framework, rotation, len(LENGTHS), MAX_LENGTH, "gpu", query_heads=query_heads)
            for name, framework in FRAMEWORKS.items()
        }

    def append(self, key: np.ndarray, value: np.ndarray, counts: Any) -> None:
        """Appends the same rows to both caches through `cache.append_rows`."""
        for name, cache in self.caches.items():
            framework = cache.framework
            with framework.device_context("gpu"):
                run = framework.compiled(framework.module("cache").append_rows, "implementation")
                cache.cache = run(
                    cache.cache,
                    cache.rotation,
                    framework.bfloat16(key, "gpu"),
                    framework.bfloat16(value, "gpu"),
                    framework.array(np.asarray(counts, np.int32), "gpu"),
                    implementation=self.implementations[name],
                )

    def differences(self) -> list[str]:
        """Fields whose bytes differ, compared on the device through DLPack."""
        import torch

        ours, theirs = self.caches["torch"].cache, self.caches["jax"].cache
        found = []
        for name in (*FIELDS, *COUNTS):
            left, right = getattr(ours, name), torch.from_dlpack(getattr(theirs, name))
            assert left.dtype == right.dtype and left.device == right.device, name
            if left.dtype == torch.bfloat16:
                left, right = left.view(torch.int16), right.view(torch.int16)
            if not torch.equal(left, right):
                found.append(name)
        return found


GLUON = pytest.param((None, "gluon"), marks=pytest.mark.hopper)


@pytest.fixture(params=[(None, "triton"), ("xla", "triton"), (None, "eager"), GLUON], ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(*request.param)


class TestBytes:
    """Everything stored is equal: INT2 pages, windows and counts."""

    def test_prefill(self, pair: Pair) -> None:
        """Ragged prompts in one go, against the oracle as well."""
        key, value = new_rows(np.random.default_rng(0), max(LENGTHS))
        pair.append(key, value, LENGTHS)
        assert pair.differences() == []
        for b, length in enumerate(LENGTHS):
            cache = pair.caches["torch"]
            want = oracle.store_sequence(key[b, :length], value[b, :length], _rotation(cache)).arrays()
            got = cache.sequence(b).arrays()
            assert [name for name in want if not np.array_equal(got[name], want[name])] == []

    def test_chunks(self, pair: Pair) -> None:
        """Ragged prompts in chunks that do not divide a page."""
        key, value = new_rows(np.random.default_rng(1), max(LENGTHS))
        for start in range(0, max(LENGTHS), 100):
            counts = np.clip(np.array(LENGTHS) - start, 0, 100)
            pair.append(key[:, start : start + 100], value[:, start : start + 100], counts)
        assert pair.differences() == []

    @pytest.mark.parametrize("torch_implementation", [None, "triton"])
    def test_thousand_appends(self, torch_implementation: str | None) -> None:
        """A thousand tokens one by one, one sequence pausing every third step."""
        pair = Pair(None, torch_implementation)
        key, value = new_rows(np.random.default_rng(2), 1000)
        for step in range(1000):
            counts = np.ones(len(LENGTHS), np.int32)
            counts[-1] = step % 3 > 0
            pair.append(key[:, step : step + 1], value[:, step : step + 1], counts)
        assert pair.differences() == []
        assert pair.caches["torch"].field("history_pages").tolist() == [10] * 5 + [5]


class TestExchange:
    """A cache written by one package is read by the other."""

    def test_torch_reads_what_jax_wrote(self) -> None:
        import dataclasses

        import torch

        pair = Pair(None, "triton")
        key, value = new_rows(np.random.default_rng(3), max(LENGTHS), rows.normal_rows)
        pair.append(key, value, LENGTHS)
        written = pair.caches["jax"].cache
        ours = pair.caches["torch"]
        names = (*FIELDS, *COUNTS, "page_table", "window_table")
        foreign = dataclasses.replace(
            ours.cache, **{name: torch.from_dlpack(getattr(written, name)) for name in names}
        )
        query = np.random.default_rng(4).normal(0, 1, (len(LENGTHS), HEADS * GROUP, HEAD_DIM))
        options = {"softmax_scale": HEAD_DIM**-0.5}
        want = pair.caches["jax"].decode_attention(query.astype(np.float32), module="ops", **options)
        ours.cache = foreign
        for implementation in ("triton", None):
            got = ours.decode_attention(
                query.astype(np.float32), module="ops", implementation=implementation, **options
            )
            error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
            assert error.max() <= TOLERANCE, f"{implementation}: {error.max():.2e}"


class TestRealRows:
    """Keys and values captured from a model: its layers stand for the sequences of the batch."""

    @pytest.fixture
    def stored(self) -> tuple[Pair, np.ndarray]:
        """The filled caches, and every layer's last query [B, N, D]."""
        if not (path := os.environ.get("OSCAR_REAL_ROWS")):
            pytest.skip("OSCAR_REAL_ROWS names no file of `python -m parity_tests.conformance.capture_rows`")
        with np.load(path) as file:
            key, value = (file[role][-len(LENGTHS) :, : max(LENGTHS)] for role in ("key", "value"))
            query = oracle.from_bfloat16(file["query"][-len(LENGTHS) :])
        heads, head_dim = key.shape[2:]
        pair = Pair(None, "triton", heads, head_dim, query.shape[1])
        pair.append(key, value, LENGTHS)
        return pair, query.astype(np.float32)

    def test_bytes(self, stored: tuple[Pair, np.ndarray]) -> None:
        assert stored[0].differences() == []

    @pytest.mark.parametrize(
        ("package", "implementation"), [("jax", None), ("torch", None), ("torch", "triton")], ids=str
    )
    def test_decode(self, stored: tuple[Pair, np.ndarray], package: str, implementation: str | None) -> None:
        """Every kernel against the reference on the same cache."""
        pair, query = stored
        cache, scale = pair.caches[package], query.shape[-1] ** -0.5
        want = cache.decode_attention(query, softmax_scale=scale)
        got = cache.decode_attention(query, softmax_scale=scale, module="ops", implementation=implementation)
        error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
        assert error.max() <= TOLERANCE, f"{error.max():.2e}"


def _rotation(cache: PackageCache) -> dict[str, np.ndarray]:
    """The rotation's arrays by field name, read back from the device."""
    names = ("key_transform", "value_transform", "value_mean", "key_multiplier", "value_multiplier")
    names += ("query_transform", "output_transform", "key_mean")
    return {name: cache.framework.numpy(getattr(cache.rotation, name)) for name in names}
