"""docs/own-models.md is run as it stands: decoders that no family knows, from calibration to generation."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.calibration.statistics import gather_statistics
from oscar_jax.core.errors import ConfigError, ShapeError
from oscar_jax.models.decoder import CausalAttention, Decoder
from oscar_jax.models.protocol import LanguageModel, PlainDecoder


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's code leaves."""
    text = (Path(__file__).parents[2] / "docs" / "own-models.md").read_text()
    names: dict[str, Any] = {}
    for block in text.split("```python\n")[1:]:
        exec(compile(block.split("```")[0], "docs/own-models.md", "exec"), names)
    return names


@pytest.mark.parametrize(("model", "generation"), [("model", "generation"), ("plain", "plain_generation")])
def test_the_page_runs(page: dict[str, Any], model: str, generation: str) -> None:
    made, decoder = page[generation], page[model]
    assert isinstance(decoder, LanguageModel)
    assert len(made.tokens[0]) == 8 and made.statistics.cache_bytes["int2_pages"] > 0
    # The prompt is one chunk, attended to exactly: the first token is that of plain causal attention.
    prompt = page["texts"][0][None]
    rows, _ = decoder.hidden_states(
        prompt, None, positions=jnp.arange(512)[None], attention=CausalAttention(page["config"])
    )
    assert made.tokens[0][0] == int(decoder.logits(rows)[0, -1].argmax())


def test_the_fit_knows_the_model(page: dict[str, Any]) -> None:
    rotations = page["rotations"]
    assert rotations.header.layers == (0, 1) and rotations.header.model_id == "plain"
    transform = np.abs(np.asarray(rotations.layers[0].key_transform))
    assert len(np.unique(transform)) > 1  # fitted: a plain Hadamard matrix has one magnitude


def test_the_built_in_decoder_offers_what_own_ones_must() -> None:
    assert all(hasattr(Decoder, name) for name in ("hidden_states", "logits"))
    assert not isinstance(object(), LanguageModel)


def test_padding_counts_nowhere(page: dict[str, Any]) -> None:
    """Two texts in one padded step give the sums of each alone; what stands in the padding is never seen."""
    texts = [page["texts"][0], page["texts"][1][:320]]

    def gather(texts: list[np.ndarray]) -> Any:
        return gather_statistics(
            page["plain"],
            page["config"],
            (0, 1),
            texts,
            chunk=1024,
            save_every=8,
            state_path=None,
            run_digest="x",
        )

    together, alone = gather(texts), [gather([text]) for text in texts]
    for layer, found in together.items():
        parts = [each[layer] for each in alone]
        assert found.tokens == sum(part.tokens for part in parts) == 512 + 320 - 2 * 64
        # Queries and outputs count from the first token on, keys from behind the sink, in whole pages.
        for name, first in (("query_covariance", 0), ("exact_value_covariance", 0), ("key_covariance", 64)):
            counts = [len(text) - first for text in texts]
            sums = sum(getattr(part, name) * count for part, count in zip(parts, counts))
            expected = sums / sum(counts)
            # sums of float32 products in another order
            np.testing.assert_allclose(getattr(found, name), expected, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(ConfigError, match=r"sequences of \[3, 0\] tokens"):
        gather([texts[0][:3], texts[0][:0]])


@pytest.mark.parametrize(
    ("calls", "error", "message"),
    [
        ([(1, 4)], ConfigError, "called for layer 1, expected layer 0"),
        ([(0, 4)], ConfigError, "called for 1 layers, expected 2"),
        ([(0, 3)], ShapeError, r"query has shape \(1, 5, 3, 16\), expected \(1, 5, 4, 16\)"),
    ],
)
def test_a_forward_that_breaks_the_rules_is_named(
    page: dict[str, Any], calls: Any, error: Any, message: str
) -> None:
    def forward(params: Any, tokens: Any, positions: Any, attend: Any) -> Any:
        for layer, heads in calls:
            attend(layer, jnp.ones((1, 5, heads, 16)), jnp.ones((1, 5, 2, 16)), jnp.ones((1, 5, 2, 16)))
        return jnp.ones((1, 5, 8))

    broken = PlainDecoder(page["config"], {}, forward, lambda params, rows: rows)
    with pytest.raises(error, match=message):
        broken.hidden_states(jnp.zeros((1, 5), jnp.int32))
