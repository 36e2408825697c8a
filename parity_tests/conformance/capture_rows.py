"""Queries, keys and values of a real model, captured for the parity report and the GPU tests.

    python -m parity_tests.conformance.capture_rows --model gemma3-270m --text FILE --out rows.npz
    python -m parity_tests.conformance.report --real-rows rows.npz --out DIR

`rows.npz` holds `key` and `value` uint16 [layers, T, K, D] (bf16 bits; T a multiple of 64), `query` uint16
[layers, N, D] of the last of these T tokens, and `model`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PAGE = 64


def capture_rows(model_name: str, files: Sequence[str], count: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """The config, and query, key and value [1, T, heads, D] of every layer for T <= `count` tokens."""
    import jax.numpy as jnp
    from flax import nnx

    from oscar_jax.evaluation import streams
    from oscar_jax.evaluation.subject import load_subject
    from oscar_jax.models.decoder import CapturingAttention, CausalAttention

    subject = load_subject(model_name)
    config = subject.config
    stream = streams.read_stream(files, subject.encode, count)
    head = [] if config.bos_token_id is None else [config.bos_token_id]
    tokens = jnp.asarray([*head, *stream.tokens])[None, :count]

    @nnx.jit
    def capture(model, tokens):
        attention = CapturingAttention(CausalAttention(model.config))
        return [rows for _, rows in model.hidden_states(tokens, attention=attention)[1]]

    return config, capture(subject.model, tokens)


def save_rows(path: Path, model_id: str, captured: Sequence[tuple[Any, ...]]) -> tuple[int, ...]:
    """Writes whole pages of the captured keys and values and the last query; returns [layers, T, K, D]."""
    import jax.numpy as jnp

    arrays = {}
    for index, name in enumerate(("query", "key", "value")):
        rows = np.stack([np.asarray(layer[index][0].astype(jnp.bfloat16)) for layer in captured])
        arrays[name] = rows[:, : rows.shape[1] // PAGE * PAGE].view(np.uint16)
    arrays["query"] = arrays["query"][:, -1]
    np.savez_compressed(path, model=np.array(model_id), **arrays)  # pyright: ignore[reportArgumentType]
    return arrays["key"].shape


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m parity_tests.conformance.capture_rows", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", required=True, help="as for `oscar calibrate`")
    parser.add_argument("--text", action="append", required=True, help="file, may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args(arguments)
    if options.tokens < PAGE:
        parser.error(f"--tokens {options.tokens}, allowed: at least {PAGE}")
    config, captured = capture_rows(options.model, options.text, options.tokens)
    print(f"{options.out}: {config.model_id}, rows {save_rows(options.out, config.model_id, captured)}")


if __name__ == "__main__":
    main()
