"""Golden files: each implementation alone reproduces the digests recorded for version 1 of the format."""

import json
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle
from parity_tests.conformance.frameworks import Framework, PackageCache
from parity_tests.conformance.vectors import check_vectors, run_implementation
from parity_tests.conftest import Voice
from parity_tests.golden.make_golden import CACHE_LENGTH, FORMAT, GOLDEN, digests

PAGES = ("key", "value", "key_per_head")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    record = json.loads((GOLDEN / "golden.json").read_text())
    assert record["format"] == FORMAT and set(record["pages"]) == set(PAGES)
    return record


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {array: file[array] for array in file.files}


@pytest.mark.parametrize("case", PAGES)
def test_inputs_and_oracle(record: dict[str, Any], case: str) -> None:
    """The files are whole, and the oracle still says what it said."""
    vectors = check_vectors(load(case))
    assert digests(vectors) == record["pages"][case]["inputs"]
    assert digests(run_implementation("oracle", vectors)) == record["pages"][case]["outputs"]


@pytest.mark.parametrize("case", PAGES)
def test_pages(record: dict[str, Any], voice: Voice, case: str) -> None:
    """Every implementation, on its own."""
    vectors = load(case)
    assert digests(vectors) == record["pages"][case]["inputs"]
    assert digests(voice.quantize_pages(vectors)) == record["pages"][case]["outputs"]


def test_cache_of_the_oracle(record: dict[str, Any]) -> None:
    data = load("cache")
    assert digests(data) == record["cache"]["inputs"]
    stored = oracle.store_sequence(data["key"], data["value"], data).arrays()
    assert digests(stored) == record["cache"]["outputs"]


def test_cache(record: dict[str, Any], framework: Framework) -> None:
    """A sequence written in chunks through the cache of each package."""
    data = load("cache")
    rotation = {name: array for name, array in data.items() if name not in ("key", "value")}
    cache = PackageCache(framework, rotation, 1, CACHE_LENGTH)
    for start in range(0, CACHE_LENGTH, 150):
        part = slice(start, start + 150)
        cache.append(data["key"][None, part], data["value"][None, part], [150])
    assert digests(cache.sequence(0).arrays()) == record["cache"]["outputs"]


def test_digest_sees_one_bit(record: dict[str, Any]) -> None:
    """A single changed bit, another dtype or another shape changes the digest."""
    rows = load("key")["rows"]
    changed = rows.copy()
    changed[0, 0, 0] ^= 1
    for other in (changed, rows.view(np.int16), rows.reshape(-1, 1, 32)):
        assert digests({"rows": other})["rows"] != record["pages"]["key"]["inputs"]["rows"]
