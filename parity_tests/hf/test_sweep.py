"""A small part of `sweep.py`: types that are served and refused, as its record says."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from parity_tests.hf import sweep

pytestmark = pytest.mark.hf
RECORD = Path(__file__).parents[2] / "results" / "transformers-sweep" / "cpu-2026-12-01" / "run.json"


SERVED = ("cohere", "gemma3_text", "gpt_bigcode", "gpt_neox", "granitemoe", "olmoe", "phi", "starcoder2")
REFUSED = ("bamba", "falcon", "moshi")  # layers without attention, attention past the interface, masks


@pytest.mark.parametrize("name", [*SERVED, *REFUSED])
def test_a_type_does_what_its_record_says(name: str) -> None:
    (recorded,) = [row for row in json.loads(RECORD.read_text())["rows"] if row["type"] == name]
    found = sweep.check(name)
    assert found["outcome"] == recorded["outcome"] == ("served" if name in SERVED else "refused"), found
