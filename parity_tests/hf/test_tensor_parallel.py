"""A model split over two processes (`tp_plan`): each rank's cache is that of one process, cut by heads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.core.rotation_header import FINGERPRINT_FIELD  # noqa: E402
from oscar_torch.hf.fingerprint import model_fingerprint  # noqa: E402
from oscar_torch.rotations.store import save_safetensors  # noqa: E402
from parity_tests.hf.tensor_parallel_rank import load, run_cases  # noqa: E402
from parity_tests.hf.tiny import assert_same, left_padded, make_model, make_rotations, prompts  # noqa: E402

pytestmark = pytest.mark.hf
ROOT = Path(__file__).parents[2]
RANKS = 2
# Names of tiny models to their changes; "whole_keys": key/value heads that every rank computes.
CASES = {
    "llama": {},
    "grouped": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
    "qwen3": {},
    "one_head": {"num_key_value_heads": 1},
    "refused": {"num_key_value_heads": 1},
}


def launched(rank):
    """What torchrun tells a process."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, rotations and prompts, and after two processes what their caches held."""
    folder = tmp_path_factory.mktemp("ranks")
    cases = {}
    for name, changes in CASES.items():
        family = name if name == "qwen3" else "llama"
        model = make_model(family, vocab_size=98, **changes)  # 5.17 splits even vocabularies only
        model.save_pretrained(folder / name)
        extra = {FINGERPRINT_FIELD: model_fingerprint(model)}
        rotations = make_rotations(model.config, extra=extra)
        save_safetensors(rotations, folder / name / "rotations.safetensors")
        torch.save(left_padded(prompts(250, 189)), folder / name / "prompts.pt")
        cases[name] = {"whole_keys": name == "one_head", "refused": name == "refused"}
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "parity_tests.hf.tensor_parallel_rank", str(folder)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS)],
            cwd=ROOT,
            env=environment | launched(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    for rank in ranks:
        output = rank.communicate(timeout=300)[0]
        assert rank.returncode == 0, output[-4000:]
    return folder


@pytest.mark.parametrize("name", [name for name in CASES if name != "refused"])
def test_the_ranks_hold_what_one_process_holds(folder, name):
    """Tokens, and after gathering all bytes; pages of a prompt and of decoding, padded sequences."""
    ids, mask = torch.load(folder / name / "prompts.pt")
    model = load(folder / name)
    whole = run_cases(model, str(folder / name / "rotations.safetensors"), ids, mask)
    ranks = [torch.load(folder / f"{name}.{rank}.pt") for rank in range(RANKS)]
    heads = model.config.num_key_value_heads
    for rank in ranks:
        assert rank["fingerprint"] == whole["fingerprint"]
    for mode in ("growing", "static"):
        for rank in ranks:
            assert torch.equal(rank[mode]["tokens"], whole[mode]["tokens"])
            for kind in ("int2", "window", "bfloat16", "allocated"):
                assert rank[mode]["live"][kind] * min(heads, RANKS) == whole[mode]["live"][kind]
        for layer, sequences in enumerate(whole[mode]["bytes"]):
            for b, arrays in enumerate(sequences):
                assert len(arrays[0]) == 2 - b  # INT2 pages, one of them written while decoding
                parts = [rank[mode]["bytes"][layer][b] for rank in ranks]
                if heads == 1:  # every rank has it, and attends with fewer queries: other float32 sums
                    assert_same(*parts)
                    if layer == 0:
                        assert_same(parts[0], arrays)
                else:
                    assert_same([torch.cat(pair, dim=1) for pair in zip(*parts)], arrays)


def test_heads_that_cannot_be_split_are_refused(folder):
    """By name, on every rank; so is a config, which does not say which rank this is."""
    for rank in range(RANKS):
        heads, config = torch.load(folder / f"refused.{rank}.pt")["refusals"]
        assert "num_key_value_heads = 1 over 2 ranks" in heads
        assert "OscarCache(rotations, model)" in config


def test_the_block_of_the_page_runs(folder):
    """docs/sharding.md as it stands; in float32, so that only the first token must be one process's."""
    ids, _ = torch.load(folder / "llama" / "prompts.pt")
    first, second = (torch.load(folder / f"page.{rank}.pt") for rank in range(RANKS))
    assert first.shape == (2, ids.shape[1] + 16)
    assert torch.equal(first, second)
    found = torch.load(folder / "llama.0.pt")["growing"]["tokens"]
    assert torch.equal(first[:, : ids.shape[1] + 1], found[:, : ids.shape[1] + 1])
