"""Whose rotations are these: the weights decide, not a directory's name, in both packages alike."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.core.fingerprint import fingerprint_weights
from oscar_jax.core.rotation_header import RotationHeader
from oscar_jax.generate import Generator
from oscar_jax.models.weights import load_model
from oscar_jax.rotations.rotation import RotationSet, hadamard_rotation
from parity_tests.models.tiny_model import write_tiny_model

pytestmark = pytest.mark.hf


def rotations_of(config: Any) -> RotationSet:
    header = RotationHeader(
        model_id=config.model_id,
        layers=(0, 1),
        num_query_heads=config.num_query_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope="half",
        basis="hadamard",
        basis_version="1",
        extra={"weights_fingerprint": config.fingerprint},
    )
    rotation = hadamard_rotation(config.num_key_value_heads, config.head_dim)
    return RotationSet(header, {0: rotation, 1: rotation})


def test_the_weights_decide(tmp_path: Path) -> None:
    """Renamed weights are accepted, others under the same name refused; the name overrides."""
    _, config, _ = load_model(write_tiny_model(tmp_path / "a" / "name"))
    shutil.copytree(tmp_path / "a" / "name", tmp_path / "renamed")
    rotations = rotations_of(config)
    renamed, renamed_config, _ = load_model(tmp_path / "renamed", dtype=jnp.bfloat16)
    assert renamed_config.model_id != config.model_id
    Generator(renamed, renamed_config, rotations=rotations)
    other, other_config, _ = load_model(write_tiny_model(tmp_path / "b" / "name", seed=1))
    assert other_config.model_id == config.model_id
    with pytest.raises(CheckpointError, match="made for other weights") as caught:
        Generator(other, other_config, rotations=rotations)
    assert "\n" not in str(caught.value)
    Generator(other, other_config, rotations=rotations, model_id="name")
    with pytest.raises(CheckpointError, match="of model 'name', this is 'x'"):
        Generator(other, other_config, rotations=rotations, model_id="x")


def test_both_packages_and_dtypes_agree(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from oscar_torch.hf.fingerprint import model_fingerprint

    directory = write_tiny_model(tmp_path / "model")
    prints = {load_model(directory, dtype=dtype)[1].fingerprint for dtype in (jnp.float32, jnp.bfloat16)}
    for dtype in (torch.float32, torch.bfloat16):
        prints.add(model_fingerprint(AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)))
    assert len(prints) == 1


def test_a_vision_tower_does_not_count() -> None:
    """The decoder alone and the model with images around it have one fingerprint."""
    transformers = pytest.importorskip("transformers")
    from oscar_torch.hf.fingerprint import model_fingerprint

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 97, "num_key_value_heads": 1, "head_dim": 16}
    vision = sizes | {"image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    whole = transformers.Gemma3ForConditionalGeneration(config)
    alone = transformers.Gemma3ForCausalLM(config.get_text_config())
    alone.load_state_dict(
        {f"model.{name}": weight for name, weight in whole.get_decoder().state_dict().items()}, strict=False
    )
    assert model_fingerprint(whole) == model_fingerprint(alone)


def test_geometry_and_every_tensor_count() -> None:
    @dataclasses.dataclass(frozen=True)
    class Shape:
        num_query_heads: int = 4
        num_key_value_heads: int = 2
        head_dim: int = 16

    base = {name: np.zeros(4, np.uint16).tobytes() for name in ("embedding", "first_key", "last_key")}
    seen = {fingerprint_weights(Shape(), 2, base), fingerprint_weights(Shape(), 3, base)}
    seen |= {fingerprint_weights(Shape(**{name: 8}), 2, base) for name in Shape.__annotations__}
    seen |= {fingerprint_weights(Shape(), 2, base | {name: b"\0\1"}) for name in base}
    assert len(seen) == 8
    with pytest.raises(ConfigError, match="allowed: embedding, first_key, last_key"):
        fingerprint_weights(Shape(), 2, {"embedding": b""})
