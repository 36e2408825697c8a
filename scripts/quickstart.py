"""The quickstart after installation: calibrate, evaluate, generate, compare the caches of both frameworks."""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
from sample_texts import find_texts

import oscar_torch.cache
import oscar_torch.rotations.store
from oscar_jax import cache
from oscar_jax.cli import main as oscar
from oscar_jax.core import cache_format as fmt
from oscar_jax.rotations import store
from oscar_jax.rotations.rotation import RotationSet
from parity_tests.conformance.capture_rows import capture_rows

OUT = pathlib.Path("quickstart-out")
METHODS = "bf16,int2,published,hadamard,naive"
PARITY_TOKENS = 4096
PROMPT_CHARACTERS = 4000  # enough that most of the prompt is read from INT2 pages


def main() -> None:
    """Runs every step; stops at the first that fails."""
    parser = argparse.ArgumentParser(prog="scripts/quickstart.sh")
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--text", action="append")
    parser.add_argument("--context", type=int, default=2048)
    arguments = parser.parse_args()
    started = time.perf_counter()
    OUT.mkdir(exist_ok=True)
    calibration, evaluation = find_texts(OUT / "text")
    rotations = OUT / "rotations"

    heading("1. Calibrate")
    run("calibrate", "--model", arguments.model, "--out", str(rotations), "--tokens", "16384",
        "--context", "2048", "--text", *(arguments.text or calibration))  # fmt: skip
    heading("2. Evaluate")
    streams = [word for file in evaluation for word in ("--text", file)]
    run("evaluate", "--model", arguments.model, "--rotations", str(rotations), "--out", str(OUT),
        "--context", str(arguments.context), "--methods", METHODS, "--every", "2", *streams)  # fmt: skip
    heading("3. Generate with the 2-bit cache")
    prompt = OUT / "prompt.txt"
    prompt.write_text(pathlib.Path(evaluation[0]).read_text()[:PROMPT_CHARACTERS])
    run("generate", "--model", arguments.model, "--rotations", str(rotations), "--prompt-file", str(prompt),
        "--max-new-tokens", "48")  # fmt: skip
    heading("4. The same rotation set in Torch: caches of the model's own keys and values, byte for byte")
    parity = compare_frameworks(arguments.model, rotations, [*calibration, *evaluation])
    (OUT / "parity.json").write_text(json.dumps(parity, indent=1) + "\n")
    print(
        f"{parity['layers']} layers ({parity['fitted_layers']} with their fitted rotation, the others with "
        f"that of another), {parity['tokens']} tokens: {parity['bytes']:,} bytes compared, "
        f"{parity['different_bytes']} different"
    )
    heading("Result")
    closing_table(json.loads((OUT / "evaluation.json").read_text()))
    print(f"\n{time.perf_counter() - started:.0f} s after installation. Everything is in {OUT}/")
    if parity["different_bytes"]:
        sys.exit("the caches of the two frameworks differ")


def heading(title: str) -> None:
    """Marks a step on the terminal."""
    print(f"\n== {title}", flush=True)


def run(*words: str) -> None:
    """One `oscar` command, shown before it runs."""
    print("oscar " + " ".join(words), flush=True)
    if code := oscar(words):
        sys.exit(code)


def compare_frameworks(model_name: str, rotation_directory: pathlib.Path, files: list[str]) -> dict[str, int]:
    """Fills INT2 caches of every layer in JAX and in Torch from the same rows and compares all their bytes.

    The rows are the model's own keys and values of `PARITY_TOKENS` tokens. Layers without a fitted rotation
    (short sliding windows stay BF16 in use) take another layer's; the whole set travels through one file.
    """
    config, captured = capture_rows(model_name, files, PARITY_TOKENS)
    fitted = store.load_rotation_set(rotation_directory)
    other = next(iter(fitted.layers.values()))  # Hadamard's would not do: all of a set round alike
    layers = {layer: fitted.layers.get(layer, other) for layer in range(config.num_layers)}
    header = dataclasses.replace(fitted.header, layers=tuple(layers))
    path = OUT / "all_layers.safetensors"
    store.save_safetensors(RotationSet(header, layers), path)
    in_jax = store.load_rotation_set(path)
    in_torch = oscar_torch.rotations.store.load_rotation_set(path)

    geometry = config.cache_config()
    compared = different = 0
    append = jax.jit(cache.append_rows)
    for layer, (_, key, value) in enumerate(captured):
        rows = [np.array(part.astype(jnp.bfloat16)) for part in (key, value)]  # Torch wants writable memory
        theirs = oscar_torch.cache.allocate_layer_cache(geometry_of_torch(geometry), 1, PARITY_TOKENS)
        ours = cache.allocate_layer_cache(geometry, 1, PARITY_TOKENS)
        lengths = [rows[0].shape[1]]
        key, value = map(jnp.asarray, rows)
        ours = append(ours, in_jax.layers[layer], key, value, jnp.asarray(lengths))
        key, value = (torch.from_numpy(part.view(np.int16)).view(torch.bfloat16) for part in rows)
        theirs = oscar_torch.cache.append_rows(
            theirs, in_torch.layers[layer], key, value, torch.tensor(lengths, dtype=torch.int32)
        )
        for name in (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS, "page_table", "window_table", "lengths"):
            mine = np.frombuffer(np.asarray(getattr(ours, name)).tobytes(), np.uint8)
            other = getattr(theirs, name).contiguous().flatten().view(torch.uint8).numpy()
            compared += mine.size
            different += int((mine != other).sum()) if mine.size == other.size else mine.size
    return {
        "layers": config.num_layers,
        "fitted_layers": len(fitted.layers),
        "tokens": captured[0][1].shape[1],
        "bytes": compared,
        "different_bytes": different,
    }


def geometry_of_torch(geometry):
    """The Torch package's CacheConfig of the same geometry."""
    return oscar_torch.cache.CacheConfig(**dataclasses.asdict(geometry))


def closing_table(document: dict) -> None:
    """The main figures of all texts."""
    print(f"{document['model']}, {document['context']} tokens of each text, {document['dtype']}")
    print(f"{'method':<10} {'bits':>6} {'perplexity':>11} {'KL mean':>9} {'KL p99':>8} {'top-1':>7}")
    for row in document["methods"]:
        print(
            f"{row['method']:<10} {row['bits_per_element']:>6.4g} {row['perplexity']:>11.4g} "
            f"{row['kl_mean']:>9.4g} {row['kl_p99']:>8.3g} {100 * row['top1']:>6.1f}%"
        )


if __name__ == "__main__":
    main()
