"""What `oscar generate` hands to the model: the ids of the model's own tokenizer, BOS once."""

from pathlib import Path
from typing import Any

import pytest

from oscar_jax import cli, generate

from .tiny_model import write_tiny_model

pytestmark = pytest.mark.hf


class Seen(Exception):
    """Stops the command where the model would begin."""


@pytest.mark.parametrize("prompt", ["ab", "<bos>ab"])
def test_bos_stands_once_before_a_prompt(
    prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt from a chat template starts with BOS already (f11)."""
    seen: list[list[int]] = []

    def spy(self: Any, prompts: list[list[int]], *args: Any, **options: Any) -> None:
        seen.extend(prompts)
        raise Seen

    monkeypatch.setattr(generate.Generator, "__call__", spy)
    directory = write_tiny_model(tmp_path / "model")
    with pytest.raises(Seen):
        cli.main(["generate", "--model", str(directory), "--prompt", prompt, "--max-new-tokens", "2"])
    ((bos, *rest),) = seen
    assert bos == 256 and 256 not in rest and len(rest) == 2
