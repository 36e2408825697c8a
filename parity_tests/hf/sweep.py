"""Every causal language model of transformers, tiny and random: eager attention against `OscarCache`.

    python -m parity_tests.hf.sweep [--types llama,glm4_moe] [--out results]

A model is served, or refused by the cache in one line before anything is computed. Served: its logits equal
those of eager attention over rows read back from pages that were filled without transformers
(`EagerOverPages`), for a prompt shorter than the windows and for one past them, each followed by a chunk and
by single tokens; and a left-padded batch equals its sequences alone. Each type runs in a process of its own.
"""

import argparse
import datetime
import inspect
import json
import multiprocessing
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oscar_torch.cache import allocate_layer_cache, append_rows, read_layer_cache
from oscar_torch.core.errors import OscarError
from oscar_torch.core.window_policy import DEFAULT_WINDOW_POLICY
from oscar_torch.hf import cache as hf_cache
from oscar_torch.hf import model_check
from parity_tests.hf.tiny import left_padded, make_rotations, prompts, with_cache

VOCABULARY = 97
PROMPTS = (70, 390)  # below the windows of 64 + 256 tokens, and past them
SECOND_CHUNK, STEPS = 40, 3
# Relative to the largest logit. A row that rounds to the neighbouring bf16 number moves logits by less.
TOLERANCE = 3e-3
SECONDS = 150

# What every configuration calls its sizes, and what it is given. Head_dim 16 is the smallest that pages have.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("head_dim", "global_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk"), 2
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 4096),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "sliding_window": 32,
    "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")


class EagerOverPages(DynamicCache):
    """A dense cache for eager attention whose history is what pages give back, filled without transformers.

    A chunk sees its own rows as they are, a single token its own rounded to bfloat16.
    """

    def __init__(self, model: Any, rotations: Any) -> None:
        # Only hybrids need their layers from the configuration, which would give windows to others.
        super().__init__(config=model.config if model_check.linear_layers(model.config) else None)
        geometry = model_check.cache_config(model.config)
        self.rotations = rotations.layers
        paged = model_check.int2_layers(model.config, DEFAULT_WINDOW_POLICY)
        self.stores = {layer: allocate_layer_cache(geometry, 1, 1024) for layer in paged}

    def update(self, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        rows = [rows.bfloat16().to(rows.dtype) for rows in (key, value)]
        new = tuple(rows) if key.shape[2] == 1 else (key, value)
        layers: list[Any] = self.layers
        before = layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0
        full = super().update(*rows, layer_idx)
        past = [full[0][:, :, :before], full[1][:, :, :before]]
        if (store := self.stores.get(layer_idx)) is not None:
            rotation = self.rotations[layer_idx]
            if before:
                read = read_layer_cache(store, rotation, 0)
                past = [part.movedim(0, 1)[None].to(key.dtype) for part in read]
            count = torch.tensor([key.shape[2]], dtype=torch.int32)
            append_rows(store, rotation, rows[0].transpose(1, 2), rows[1].transpose(1, 2), count)
        return tuple(torch.cat([old, mine], 2) for old, mine in zip(past, new))


def tiny_config(model_type: str) -> Any:
    """The type's configuration with small sizes, wherever its defaults have such a key."""
    config = AutoConfig.for_model(model_type)
    changes = small(config.to_dict())
    sections = {
        key: small(value) for key, value in config.to_dict().items() if key.endswith("text_config") and value
    }
    for key, value in sections.items():
        changes[key] = {**value, **({"model_type": getattr(config, key).model_type})}
    config = AutoConfig.for_model(model_type, **changes)
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if isinstance(kinds, list) and len(kinds) != text.num_hidden_layers:
        text.layer_types = kinds[: text.num_hidden_layers]
    return config


def small(values: dict[str, Any]) -> dict[str, Any]:
    """The keys of a configuration that say a size, with the tests' sizes."""
    changes = {key: SIZES[key] for key in SIZES if values.get(key) is not None}
    if isinstance(kinds := values.get("layer_types"), list) and len(kinds) > 2:
        # Two layers of different kinds, if there are any: the last one is usually full attention.
        changes["layer_types"] = [kinds[0], kinds[-1]]
    changes |= {key: 0 for key in TOKENS if isinstance(values.get(key), int)}
    return changes


def tiny_model(model_type: str) -> Any:
    """A random model whose biases and norms are no longer at their start."""
    config = tiny_config(model_type)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.get_input_embeddings().weight.mul_(8)
    return model


@torch.no_grad()
def logits_of(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [B, n, V] of a prompt's last token, a second chunk's, and single tokens'."""
    tail = torch.stack([prompts(SECOND_CHUNK + STEPS, seed=9)[0][0]] * len(ids))
    pieces = [ids, tail[:, :SECOND_CHUNK], *tail[:, SECOND_CHUNK:].split(1, 1)]
    found, seen = [], 0
    for piece in pieces:
        seen += piece.shape[1]
        options: dict[str, Any] = with_cache(model, cache)
        if mask is not None:
            options["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), seen - mask.shape[1])], 1)
            places = options["attention_mask"].cumsum(1) - 1
            options["position_ids"] = places.clamp(min=0)[:, -piece.shape[1] :]
        found.append(model(piece, use_cache=True, **options).logits[:, -1].float())
    return torch.stack(found, 1)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest logit; infinite for NaN."""
    value = float((found - expected).abs().max() / expected.abs().max())
    return value if value == value else float("inf")


def check(model_type: str) -> dict[str, Any]:
    """What became of a type: its `outcome` and, if it is served, three relative differences."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # whatever a configuration needs that this machine or these sizes lack
        return {"outcome": "not built", "why": f"{type(error).__name__}: {error}"}
    if not {"cache", "past_key_values"} & set(inspect.signature(model.forward).parameters):
        return {"outcome": "refused", "why": "the model's forward takes no cache"}
    try:
        model_check.layer_windows(model.config)  # refuses what has no attention, before its heads are read
        rotations = make_rotations(model.config.get_text_config(decoder=True))
        hf_cache.OscarCache(rotations, model.config)
    except OscarError as error:
        return {"outcome": "refused", "why": str(error)}
    rows = prompts(*PROMPTS)
    eager = [logits_of(model, EagerOverPages(model, rotations), ids) for ids in rows]
    model.set_attn_implementation("oscar")

    def cache() -> hf_cache.OscarCache:
        return hf_cache.OscarCache(rotations, model.config, prefill_chunk=512)

    served: dict[str, Any] = {"outcome": "served"}
    try:
        alone = [logits_of(model, cache(), ids) for ids in rows]
        padded = logits_of(model, cache(), *left_padded(rows))
    except OscarError as error:
        return {"outcome": "refused", "why": str(error)}
    served["short"], served["past"] = (difference(*pair) for pair in zip(alone, eager))
    served["padded"] = difference(padded, torch.cat(alone))
    if max(served["short"], served["past"], served["padded"]) > TOLERANCE:
        served["outcome"] = "differs"
    return served


def _report(model_type: str, connection: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        found = check(model_type)
    except BaseException as error:
        found = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
    found["why"] = " ".join(found.get("why", "").split())[:200]
    connection.send(found)


def check_apart(model_type: str) -> dict[str, Any]:
    """`check` in a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_report, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        found = mine.recv() if mine.poll(SECONDS) else {"outcome": "failed", "why": f"over {SECONDS} seconds"}
    except EOFError:
        found = {"outcome": "failed", "why": "the process ended"}
    process.kill()
    process.join()
    return {"type": model_type, **found}


def page_of(record: dict[str, Any]) -> str:
    """The record to read: counts, then a line per type."""
    rows = record["rows"]
    counts = {
        kind: sum(row["outcome"] == kind for row in rows) for kind in sorted({r["outcome"] for r in rows})
    }
    later = [f"`{name}`" for name in record["later"]]
    again = ["", f"Run again later the same day, with `--types`: {', '.join(later)}."] if later else []
    lines = [
        "# transformers' causal language models on OscarCache",
        "",
        f"transformers {record['versions']['transformers']}, torch {record['versions']['torch']}, "
        f"{record['date']}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()) + ".",
        (__doc__ or "").split("\n\n", 2)[2].strip().replace("\n", " "),
        "",
        "Differences of logits relative to the largest one: below the windows, past them, padded against "
        f"alone (allowed: {TOLERANCE:g}).",
        *again,
        "",
        "| model type | | short | past | padded | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        numbers = " | ".join(f"{row[key]:.1e}" if key in row else "" for key in ("short", "past", "padded"))
        why = row.get("why", "").replace("|", "\\|")
        lines.append(f"| `{row['type']}` | {row['outcome']} | {numbers} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints a line per type; with --out records run.json and page.md."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", default="", help="comma-separated model types, default: all")
    parser.add_argument("--out", type=Path, help="folder of recorded runs")
    arguments = parser.parse_args()
    types = [name for name in arguments.types.split(",") if name] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    rows, later = [], []
    for name in types:
        rows.append(check_apart(name))
        print(json.dumps(rows[-1]), flush=True)
    if arguments.out is None:
        return
    date = datetime.date.today().isoformat()
    folder = arguments.out / "transformers-sweep" / f"cpu-{date}"
    if arguments.types and (folder / "run.json").exists():  # a run of today is brought up to date
        earlier = json.loads((folder / "run.json").read_text())
        kept = [row for row in earlier["rows"] if row["type"] not in types]
        rows = sorted([*rows, *kept], key=lambda row: row["type"])
        later = sorted({*earlier.get("later", []), *types})
    record = {
        "command": "python -m parity_tests.hf.sweep --out results",
        "date": date,
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "tolerance": TOLERANCE,
        "later": later,  # types that were run again, with `--types`, after the others
        "rows": rows,
    }
    os.makedirs(folder, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "page.md").write_text(page_of(record))


if __name__ == "__main__":
    main()
