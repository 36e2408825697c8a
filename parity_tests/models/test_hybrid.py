"""Models with linear attention between attention layers: the recurrent state wherever one is kept."""

import dataclasses
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.evaluation.asking import make_asker
from oscar_jax.evaluation.stepper import make_runner
from oscar_jax.generate import Generator, select_rotations
from oscar_jax.interchange.convert import load_any
from oscar_jax.layer_cache import LayerCache
from oscar_jax.models.cached_attention import int2_layers
from oscar_jax.models.hf_config import config_from_hf
from oscar_jax.models.linear_attention import (
    DeltaRows,
    LinearAttentionConfig,
    RecurrentState,
    allocate_recurrent_state,
    gated_delta_rule,
)
from oscar_jax.models.weights import build_model, open_checkpoint
from oscar_jax.rotations.rotation import hadamard_rotation

from . import test_families

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("fast_compilation")]

TOKENS = np.random.default_rng(5).integers(0, test_families.VOCABULARY, 700).tolist()


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """(transformers' model, ours, configuration): one linear layer, one with gated attention."""
    reference = test_families.random_reference("qwen3_5_text")
    path = tmp_path_factory.mktemp("hybrid")
    reference.save_pretrained(path)
    config, source = open_checkpoint(path)
    return reference, build_model(config, source, dtype=jnp.float32, param_dtype=jnp.float32), config


def test_chunks_equal_single_tokens() -> None:
    """The products of a chunk are the recurrence, token by token, from a memory that is not empty."""
    rng = np.random.default_rng(0)
    batch, tokens, heads, width, values = 2, 150, 3, 8, 5

    def rows(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(batch, tokens, heads, *shape)), jnp.float32)

    key = rows(width)
    key = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    new = DeltaRows(rows(width), key, rows(values), jax.nn.sigmoid(rows()), -jnp.abs(rows()) / 4)
    memory = jnp.asarray(rng.normal(size=(batch, heads, width, values)), jnp.float32)
    out, after = gated_delta_rule(new, memory)

    def step(memory: jax.Array, token: DeltaRows) -> tuple[jax.Array, jax.Array]:
        read, memory = gated_delta_rule(DeltaRows(*(part[:, None] for part in token)), memory)
        return memory, read[:, 0]

    memory, one_by_one = jax.lax.scan(step, memory, DeltaRows(*(jnp.moveaxis(part, 1, 0) for part in new)))
    # Float32 sums of up to 150 terms of order 1 in another order.
    np.testing.assert_allclose(out, jnp.moveaxis(one_by_one, 0, 1), atol=2e-5)
    np.testing.assert_allclose(after, memory, atol=2e-5)


def continuation(reference: Any, tokens: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers' model, which recomputes everything for each of them."""
    import torch

    with torch.no_grad():
        for _ in range(count):
            logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens = [*tokens, int(logits.argmax())]
    return tokens[-count:]


def test_a_ragged_batch_generates_what_transformers_does(hybrid: Any) -> None:
    """Prompts of other lengths, prefilled in chunks with padding; then a second turn on the same caches."""
    reference, model, config = hybrid
    rotations = {1: hadamard_rotation(config.num_key_value_heads, config.head_dim)}
    generator = Generator(model, config, rotations=rotations, eos_token_ids=(), chunk=64)
    prompts = [TOKENS[:150], TOKENS[200:235]]
    turn = generator(prompts, 4, capacity=300)
    assert turn.tokens == [continuation(reference, prompt, 4) for prompt in prompts]
    assert isinstance(turn.caches[0], RecurrentState) and isinstance(turn.caches[1], LayerCache)
    assert turn.caches[0].lengths.tolist() == turn.caches[1].lengths.tolist() == [153, 38]
    added = [TOKENS[300:420], TOKENS[500:501]]
    whole = [prompt + made + more for prompt, made, more in zip(prompts, turn.tokens, added)]
    again = generator(added, 4, caches=turn)
    assert again.tokens == [continuation(reference, tokens, 4) for tokens in whole]


def test_evaluation_steps_and_questions_equal_the_whole_text(hybrid: Any) -> None:
    """Padding behind a chunk leaves no trace in the state; questions see nothing of each other."""
    _, model, config = hybrid
    runner = make_runner(model, config)
    rows = runner.allocate(1, 256)
    text, hidden = np.asarray(TOKENS[:200], np.int32), []
    for start in (0, 128):
        part = np.zeros((1, 128), np.int32)
        count = min(128, len(text) - start)
        part[0, :count] = text[start : start + count]
        rows_of_chunk, rows, _ = runner.step(runner.state, part, start, rows, {}, count=count)
        hidden.append(np.asarray(rows_of_chunk)[:, :count])
    whole = nnx.jit(lambda model, tokens: model(tokens)[0])
    padded = np.zeros((1, 256), np.int32)
    padded[0, :200] = text
    logits = np.asarray(model.logits(jnp.asarray(np.concatenate(hidden, axis=1))))
    # Rows are rounded to bfloat16 where they are stored.
    np.testing.assert_allclose(logits, np.asarray(whole(model, padded))[:, :200], atol=0.05)

    questions = [TOKENS[600:605], TOKENS[610:613]]
    asked = np.zeros((2, 5), np.int32)
    for row, question in zip(asked, questions):
        row[: len(question)] = question
    lengths, limits = np.array([5, 3]), np.array([3, 3])
    answers = np.asarray(make_asker(runner)(runner.state, rows, 200, asked, lengths, limits, answer=3))
    for question, answer in zip(questions, answers[0]):
        tokens = [*text.tolist(), *question]
        for expected in answer.tolist():
            padded = np.zeros((1, 256), np.int32)
            padded[0, : len(tokens)] = tokens
            assert int(whole(model, padded)[0, len(tokens) - 1].argmax()) == expected
            tokens.append(expected)


def test_caches_of_another_kind_are_refused(hybrid: Any) -> None:
    _, model, config = hybrid
    rotations = {1: hadamard_rotation(config.num_key_value_heads, config.head_dim)}
    generator = Generator(model, config, rotations=rotations, eos_token_ids=())
    other = dataclasses.replace(config.linear, value_dim=8)
    good = [allocate_recurrent_state(config.linear, 1)]
    for state in (good[0], allocate_recurrent_state(other, 1)):
        with pytest.raises(ConfigError, match="the cache of layer") as error:
            generator([[1]], 1, caches=[state, state])
        assert "a recurrent state" in str(error.value) and "\n" not in str(error.value)


def test_heads_of_linear_layers_do_not_spread(hybrid: Any) -> None:
    """Devices may share the sequences of a batch, not the heads."""
    _, _, config = hybrid
    assert config.for_shards(1) == config
    with pytest.raises(ConfigError, match="does not spread over 2 devices: it has linear layers, allowed: 1"):
        config.for_shards(2)


SMALL = {
    "model_type": "qwen3_5_text",
    **test_families._TINY,
    **test_families.TINY["qwen3_5_text"],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate = False is not supported, allowed: None, True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ({"layer_types": ["linear_attention"] * 2}, r"linear_layers = \[0, 1\], allowed: some of 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "allowed: full_attention, linear_attention"),
        ({"linear_num_value_heads": 6}, "6 value heads, no multiple of 4 key heads"),
    ],
)
def test_what_is_not_computed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_hf({**SMALL, **change}, model_id="x")


ZOO = os.environ.get("OSCAR_ROTATION_ZOO")
PUBLISHED = sorted(pathlib.Path(ZOO).glob("qwen3.5-4b*")) if ZOO else []


@pytest.mark.skipif(not PUBLISHED, reason="OSCAR_ROTATION_ZOO names no folder of published rotations")
@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_rotations_of_qwen3_5_fit_its_attention_layers(folder: pathlib.Path) -> None:
    """Their ids are those of the model's layers: 3, 7, ... of the 32 of Qwen3.5 4B."""
    geometry = {"num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4}
    raw = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **geometry}}
    config = config_from_hf(raw, model_id="Qwen3.5-4B")
    rotations = load_any(folder)[0]
    assert tuple(select_rotations(rotations, config, int2_layers(config))) == tuple(range(3, 32, 4))
    with pytest.raises(CheckpointError, match="no layer 0"):
        select_rotations(rotations, config, range(32))


def test_every_linear_geometry_needs_its_numbers() -> None:
    with pytest.raises(ConfigError, match="conv_width = 0, allowed: >= 1"):
        LinearAttentionConfig(1, 1, 8, 8, 0)
