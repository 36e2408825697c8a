"""docs/own-models.md is run as it stands: a decoder that no family knows, from calibration to generation."""

from pathlib import Path
from typing import Any

import numpy as np

from oscar_jax.models.decoder import CausalAttention


def test_the_page_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/own-models.md", "exec"), names)
    made = names["generation"]
    assert len(made.tokens[0]) == 8 and made.statistics.cache_bytes["int2_pages"] > 0
    rotations = names["rotations"]
    assert rotations.header.layers == (0, 1) and rotations.header.model_id == "mine"
    transform = np.abs(np.asarray(rotations.layers[0].key_transform))
    assert len(np.unique(transform)) > 1  # fitted: a plain Hadamard matrix has one magnitude
    # The prompt is one chunk, attended to exactly: the first token is that of plain causal attention.
    model, prompt = names["model"], names["texts"][0][None]
    rows, _ = model.hidden_states(
        prompt, None, positions=np.arange(512)[None], attention=CausalAttention(names["config"])
    )
    assert made.tokens[0][0] == int(model.logits(rows)[0, -1].argmax())
