"""Writes the golden vectors of the format: inputs to quantize and SHA-256 digests of the bytes expected.

    python -m parity_tests.golden.make_golden DIR

The files in parity_tests/golden were written once, for version 1 of the format. They never change: another
result for the same input is another version. With them one implementation alone, without the oracle and
without the other framework, can check itself anywhere (test_golden.py).
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.vectors import check_vectors, run_implementation

GOLDEN = Path(__file__).parent
FORMAT = "oscar-int2/1"
CACHE_LENGTH = 450


def digest(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and little-endian bytes."""
    array = np.ascontiguousarray(array)
    header = f"{array.dtype.name} {list(array.shape)} "
    return hashlib.sha256(header.encode() + array.astype(array.dtype.newbyteorder("<")).tobytes()).hexdigest()


def digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Digest of every array by name."""
    return {name: digest(array) for name, array in arrays.items()}


def golden_vectors() -> dict[str, dict[str, np.ndarray]]:
    """Page vectors by case name: one page of every row family, and a per-head case."""
    rng = np.random.default_rng(2605)
    every = {
        head_dim: np.concatenate(
            [family(rng, (128, 1, head_dim))[:64] for family in rows.ROW_FAMILIES.values()]
        )
        for head_dim in (64, 80)
    }
    mean = oracle.to_bfloat16(rng.normal(0, 1, (1, 80)))
    return {
        "key": rows.make_vectors("key", every[64], rows.channel_balanced_transform(rng, 1, 64), 371),
        "value": rows.make_vectors("value", every[80], rows.orthogonal_transform(rng, 1, 80), 300, mean),
        "key_per_head": rows.make_vectors(
            "key",
            rows.normal_rows(rng, (64, 3, 128)),
            rows.orthogonal_transform(rng, 3, 128),
            np.array([1, 371, 511]),
        ),
    }


def golden_cache() -> dict[str, np.ndarray]:
    """Rows of one sequence, key and value bits [450, 1, 64], and the rotation fields to store them with."""
    rng = np.random.default_rng(17757)
    shape = (CACHE_LENGTH, 1, 64)
    rotation = rows.make_rotation(rng, 1, 64, "channel_balanced")
    key, value = rows.normal_rows(rng, shape), rows.normal_rows(rng, shape)
    key[130, 0], value[200, 0, 5] = 0x7F80, 0x7FC0
    return {"key": key, "value": value, **rotation}


def golden_sequential() -> dict[str, np.ndarray]:
    """Rows of keys and values [192, 1, 64], transforms, feedback in 4 blocks, multipliers and the mean."""
    rng = np.random.default_rng(24)
    rotation = rows.make_rotation(rng, 1, 64, "channel_balanced")
    later = np.arange(64)[:, None] // 16 < np.arange(64)[None] // 16
    data = {name: rotation[name] for name in rotation if name.endswith(("transform", "multiplier"))}
    data = {name: array for name, array in data.items() if name[0] in "kv"} | {
        "value_mean": rotation["value_mean"]
    }
    for role, shift in (("key", 7), ("value", 3)):
        families = (rows.normal_rows, rows.all_bit_patterns, rows.threshold_ties)
        data[role] = np.concatenate([family(rng, (64, 1, 64))[:64] for family in families])
        data[f"{role}_feedback"] = (rng.integers(-127, 128, (1, 64, 64)) * later).astype(np.int8)
        data[f"{role}_feedback_shift"] = np.array([shift], np.int32)
    return data


def run_sequential(data: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the oracle makes of `golden_sequential`: words and scales of both roles."""
    out = {}
    for role in ("key", "value"):
        feedback = oracle.Feedback(data[f"{role}_feedback"], data[f"{role}_feedback_shift"], 4)
        mean = data["value_mean"] if role == "value" else None
        arrays = (data[role], data[f"{role}_transform"], data[f"{role}_multiplier"], mean)
        pages = oracle.quantize_pages(role, *arrays, feedback)
        out |= {f"{role}_{name}": pages[name] for name in ("words", "scale")}
    return out


def write_sequential(directory: Path) -> dict[str, Any]:
    """Writes sequential.npz and sequential.json, of sequential rounding; returns the latter's content."""
    data = golden_sequential()
    np.savez_compressed(directory / "sequential.npz", **data)  # type: ignore
    record = {"format": FORMAT, "inputs": digests(data), "outputs": digests(run_sequential(data))}
    (directory / "sequential.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def write_golden(directory: Path) -> dict[str, Any]:
    """Writes one .npz per case, cache.npz and golden.json; returns the content of golden.json."""
    directory.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"format": FORMAT, "pages": {}}
    for name, vectors in golden_vectors().items():
        np.savez_compressed(directory / f"{name}.npz", **check_vectors(vectors))  # type: ignore
        outputs = digests(run_implementation("oracle", vectors))
        record["pages"][name] = {"inputs": digests(vectors), "outputs": outputs}
    cache = golden_cache()
    np.savez_compressed(directory / "cache.npz", **cache)  # type: ignore
    stored = oracle.store_sequence(cache["key"], cache["value"], cache).arrays()
    record["cache"] = {"inputs": digests(cache), "outputs": digests(stored)}
    (directory / "golden.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    write_golden(Path(arguments[0]))
    write_sequential(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
