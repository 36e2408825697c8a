"""One rank of test_tensor_parallel.py: `python -m parity_tests.hf.tensor_parallel_rank FOLDER RANK RANKS`.

FOLDER holds tiny models and rotation sets, and gets what this rank's caches hold: `case.rank.pt`.
"""

import datetime
import json
import pathlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig  # pyright: ignore[reportPrivateImportUsage]

from oscar_torch.core.errors import ConfigError
from oscar_torch.hf import OscarCache
from oscar_torch.hf.fingerprint import model_fingerprint
from parity_tests.hf.tiny import stored, with_cache

WINDOWS: dict[str, Any] = {"sink_tokens": 64, "recent_tokens": 64}
NEW_TOKENS = 8  # across a page boundary
KEYS_WHOLE = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.v_proj": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.o_proj": "rowwise",
}


def run_cases(model: Any, rotations: str, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Fingerprint; tokens and stored bytes of a padded batch in a growing and in a static cache."""
    found: dict[str, Any] = {"fingerprint": model_fingerprint(model)}
    modes: dict[str, dict[str, Any]] = {"growing": {}, "static": {"max_length": ids.shape[1] + NEW_TOKENS}}
    for mode, options in modes.items():
        cache = OscarCache(rotations, model, **WINDOWS, **options)
        tokens = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            **with_cache(model, cache),
        )  # fmt: skip
        found[mode] = {
            "tokens": tokens,
            "bytes": [[stored(layer, b) for b in range(len(ids))] for layer in cache.layers],
            "live": cache.live_bytes(),
        }
    return found


def load(folder: pathlib.Path, **options: Any) -> Any:
    """The model in a folder; float64, so that sums in another order give the same BF16 rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="oscar", dtype=torch.float64, **options
    )
    return model.eval()


def run_page(folder: pathlib.Path) -> torch.Tensor:
    """The tokens of the first block of docs/sharding.md on PyTorch, as it stands there."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "sharding.md"
    ids, mask = torch.load(folder / "prompts.pt")
    inputs = transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask})
    names = {"name": folder, "rotations": str(folder / "rotations.safetensors"), "inputs": inputs}
    section = page.read_text().split("\n## PyTorch")[1]
    exec(section.split("```python\n")[1].split("```")[0], names)
    return names["output"]


def main(folder: pathlib.Path, rank: int, ranks: int) -> None:
    """Runs every case of `cases.json`."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=timeout
    )
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        plan = DistributedConfig(tp_plan=KEYS_WHOLE if case["whole_keys"] else "auto")
        model = load(folder / name, distributed_config=plan)
        ids, mask = torch.load(folder / name / "prompts.pt")
        if case["refused"]:
            refusals = []
            for given in (model, model.config):
                try:
                    OscarCache(str(folder / name / "rotations.safetensors"), given)
                except ConfigError as error:
                    refusals.append(str(error))
            found: dict[str, Any] = {"refusals": refusals}
        else:
            found = run_cases(model, str(folder / name / "rotations.safetensors"), ids, mask)
        torch.save(found, folder / f"{name}.{rank}.pt")
    torch.save(run_page(folder / "llama"), folder / f"page.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
