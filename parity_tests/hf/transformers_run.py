"""A real model in transformers on 2-bit pages: batched ≡ single, shared ≡ unshared, memory; prints JSON.

    python -m parity_tests.hf.transformers_run model.gguf [--record run.json]

The whole road is walked: statistics gathered in transformers, a rotation set fitted by `oscar_jax`, loaded
from its file, and used by `generate`. The text is the language reference that comes with Python. This takes
minutes on a CPU, so it is not part of the suite.
"""

import argparse
import copy
import datetime
import inspect
import json
import pathlib
import platform
import pydoc_data.topics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from oscar_jax.calibration.job import fit
from oscar_torch.hf import cache as hf_cache
from oscar_torch.hf import calibrate
from oscar_torch.hf import layer as hf_layer

PROMPT_LENGTHS = (560, 400, 450)
CALIBRATION_SEQUENCES, CALIBRATION_TOKENS = 2, 512
PREFILL_CHUNK = 512  # short prompts are to have several pieces


def fit_rotations(model: Any, sequences: list[torch.Tensor], directory: pathlib.Path) -> pathlib.Path:
    """Calibrates in Torch, fits in JAX; returns the folder of the rotation set."""
    statistics = calibrate.calibrate_model(model, sequences)
    calibrate.save_statistics(model, statistics, directory / "statistics.safetensors")
    fit(directory / "statistics.safetensors", directory / "rotations")
    return directory / "rotations"


def check(path: pathlib.Path, new_tokens: int) -> dict[str, Any]:
    """Runs every comparison on the GGUF model at `path`; raises AssertionError where tokens differ."""
    begun = time.perf_counter()
    torch.manual_seed(0)
    options = {"gguf_file": path.name, "dtype": torch.float32}
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    tokens = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    bos = torch.tensor([tokenizer.bos_token_id])

    def sequence(start: int, length: int) -> torch.Tensor:
        return torch.cat([bos, tokens[start : start + length - 1]])

    keyword = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def generate(ids: torch.Tensor, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            **{keyword: cache},
        )
        return out[:, -new_tokens:]

    def note(what: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s  {what}", file=sys.stderr, flush=True)

    prompts = [sequence(40_000 + 5_000 * i, n)[None] for i, n in enumerate(PROMPT_LENGTHS)]
    dense = [generate(ids, DynamicCache(config=model.config)) for ids in prompts]
    note("dense reference done")
    report: dict[str, Any] = {
        "command": f"python -m parity_tests.hf.transformers_run {path.name}",
        "created": datetime.date.today().isoformat(),
        "model": path.name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": str(model.device),
        "prompt_tokens": list(PROMPT_LENGTHS),
        "new_tokens": new_tokens,
    }
    with tempfile.TemporaryDirectory() as directory:
        corpus = [sequence(10_000 * i, CALIBRATION_TOKENS) for i in range(CALIBRATION_SEQUENCES)]
        start = time.perf_counter()
        rotations = fit_rotations(model, corpus, pathlib.Path(directory))
        report["calibration_seconds"] = round(time.perf_counter() - start, 1)
        note("rotations fitted")
        model.set_attn_implementation(hf_layer.ATTENTION)

        def new_cache() -> hf_cache.OscarCache:
            return hf_cache.OscarCache(rotations, model.config, prefill_chunk=PREFILL_CHUNK)

        start = time.perf_counter()
        caches = [new_cache() for _ in prompts]
        single = [generate(ids, cache) for ids, cache in zip(prompts, caches)]
        report["single_seconds"] = round(time.perf_counter() - start, 1)
        note("single runs done")
        width = max(PROMPT_LENGTHS)
        pad = tokenizer.pad_token_id or 0
        ids = torch.cat([torch.nn.functional.pad(p, (width - p.shape[1], 0), value=pad) for p in prompts])
        mask = torch.stack([(torch.arange(width) >= width - n).long() for n in PROMPT_LENGTHS])
        batched = generate(ids, new_cache(), mask)

        note("batched run done")
        base = new_cache()
        prefix = prompts[0][:, :PREFILL_CHUNK]
        with torch.no_grad():
            model(prefix, use_cache=True, logits_to_keep=1, **{keyword: base})
        other = torch.cat([prefix, prompts[1][:, 1:80]], dim=1)
        shared = [generate(ids, copy.deepcopy(base)) for ids in (prompts[0], other)]
        unshared = [single[0], generate(other, new_cache())]

    agreement = [int((a == b).cumprod(dim=1).sum()) for a, b in zip(single, dense)]
    report |= {
        "batched_equals_single": [bool(torch.equal(batched[i], s[0])) for i, s in enumerate(single)],
        "shared_equals_unshared": [bool(torch.equal(a, b)) for a, b in zip(shared, unshared)],
        "first_tokens_equal_to_the_dense_cache": agreement,
        "live_bytes": [cache.live_bytes() for cache in caches],
        "int2_pages": [
            [int(layer.store.history_pages[0]) for layer in cache.layers if layer.rotation is not None]
            for cache in caches
        ],
        "text": [tokenizer.decode(tokens[0]) for tokens in single],
    }
    assert all(report["batched_equals_single"]), report
    assert all(report["shared_equals_unshared"]), report
    assert all(np.min(pages) > 0 for pages in report["int2_pages"]), report
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=pathlib.Path, help="a GGUF file that transformers can read")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--record", type=pathlib.Path, help="write the report here too")
    arguments = parser.parse_args()
    report = json.dumps(check(arguments.model, arguments.new_tokens), indent=1)
    print(report)
    if arguments.record:
        arguments.record.write_text(report + "\n")


if __name__ == "__main__":
    main()
