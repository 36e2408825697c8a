"""The methods an evaluation compares, by the names the command line uses."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import ConfigError
from ..interchange.report import has_means
from ..models.config import ModelConfig
from ..rotations.bases import KEY_BASES, hadamard_matrix
from ..rotations.fit import ORDERED, ORDERED_KEY_MULTIPLIERS, fit_layer_rotation
from ..rotations.rotation import RotationSet
from . import fidelity
from .exported import MEANS_DROPPED, MEANS_KEPT, exported_recipes, parse_reader
from .exported import NAME as EXPORTED
from .peers import Float8Recipe, PerChannelRecipe, float8_bits, per_channel_bits
from .published import KEY_CLIP_RATIO, VALUE_CLIP_RATIO, fit_published_rotation
from .stepper import Method

METHODS = ("bf16", "int2", "published", "hadamard", "naive")
CENTERED, KIVI, FLOAT8 = "published:centered", "kivi", "fp8"
PEERS = (CENTERED, KIVI, FLOAT8)
OTHER_METHODS = f"{', '.join(PEERS)}, int2:BASIS, int2:ROUNDING, exported, exported:READER"


def check_method_names(names: Sequence[str]) -> None:
    """Raises ConfigError for an unknown method, before a model is loaded."""
    if not names:
        raise ConfigError(f"no method was named, allowed: {', '.join(METHODS)}")
    for name in names:
        if name.startswith("int2:"):
            parse_basis(name)
        elif _is_exported(name):
            parse_reader(name)
        elif name not in (*METHODS, *PEERS):
            raise ConfigError(f"unknown method {name!r}, allowed: {', '.join(METHODS)}, {OTHER_METHODS}")


def resolve_methods(
    names: Sequence[str],
    config: ModelConfig,
    layers: Sequence[int],
    rotation_set: RotationSet | None,
    statistics: Mapping[int, Any] | None,
) -> list[Method]:
    """The methods of a comma-separated list, bf16 always first; raises ConfigError naming an unknown one."""
    head_dim = config.head_dim
    identity, hadamard = np.eye(head_dim)[None], hadamard_matrix(head_dim)[None]
    methods = [Method("bf16", "bf16", {}, 16.0)]

    def needed(name: str) -> Mapping[int, Any]:
        if statistics is None:
            raise ConfigError(
                f"method {name!r} is fitted to calibration statistics: --rotations must be a directory that "
                "`oscar calibrate` wrote (it holds statistics.safetensors)"
            )
        if missing := [layer for layer in layers if layer not in statistics]:
            raise ConfigError(
                f"the calibration statistics lack layer {missing[0]}: calibrate with --all-layers"
            )
        return statistics

    def simulated(name: str, recipes: Mapping[int, Any], basis: str, bits: float | None = None) -> Method:
        bits = fidelity.asymmetric_bits(head_dim) if bits is None else bits
        return Method(name, "simulated", recipes, bits, basis)

    for name in dict.fromkeys(name.strip() for name in names):
        if name == "bf16":
            continue
        elif name == "int2" or _is_exported(name):
            if rotation_set is None:
                raise ConfigError(f"method {name!r} needs --rotations")
            rotation_set.require_fits(
                config, layers, model_id=config.model_id, fingerprint=config.fingerprint
            )
            basis = rotation_set.header.basis
            if name == "int2":
                rotations = {layer: rotation_set.layers[layer] for layer in layers}
                bits = fidelity.page_bits(head_dim)
                methods.append(Method(name, "int2", _to_device(rotations), bits, basis))
                continue
            recipes = exported_recipes(rotation_set, config, layers, name)
            centered = all(recipe.key_mean is not None for recipe in recipes.values())
            if has_means(rotation_set, "key_mean"):
                basis += MEANS_KEPT if centered else MEANS_DROPPED
            methods.append(simulated(name, recipes, basis))
        elif name.startswith("int2:"):
            basis, damping, multiplier = parse_basis(name)
            rotations = {
                layer: fit_layer_rotation(
                    needed(name)[layer],
                    basis,
                    per_head=True,
                    damping=damping,
                    key_multiplier=multiplier,
                )
                for layer in layers
            }
            methods.append(Method(name, "int2", _to_device(rotations), fidelity.page_bits(head_dim), basis))
        elif name in ("published", CENTERED):
            recipes = {
                layer: published_recipe(needed(name)[layer], centered=name == CENTERED) for layer in layers
            }
            basis = "oscar, layer-shared" + (MEANS_KEPT if name == CENTERED else "")
            methods.append(simulated(name, recipes, basis))
        elif name == KIVI:
            bits = per_channel_bits(head_dim)
            methods.append(simulated(name, dict.fromkeys(layers, PerChannelRecipe()), "none", bits))
        elif name == FLOAT8:
            bits = float8_bits(head_dim)
            methods.append(simulated(name, dict.fromkeys(layers, Float8Recipe()), "none", bits))
        elif name in ("hadamard", "naive"):
            matrix = hadamard if name == "hadamard" else identity
            clips = (KEY_CLIP_RATIO, VALUE_CLIP_RATIO) if name == "hadamard" else (1.0, 1.0)
            recipe = fidelity.make_recipe(matrix, matrix, *clips)
            methods.append(simulated(name, dict.fromkeys(layers, recipe), name.replace("naive", "none")))
        else:
            raise ConfigError(f"unknown method {name!r}, allowed: {', '.join(METHODS)}, {OTHER_METHODS}")
    return methods


def _is_exported(name: str) -> bool:
    return name.partition(":")[0] == EXPORTED


def _to_device(rotations: Mapping[int, Any]) -> dict[int, Any]:
    return jax.tree.map(jnp.asarray, dict(rotations))


def parse_basis(name: str) -> tuple[str, float, int]:
    """Basis, damping and key multiplier of a method "int2:BASIS[@DAMPING[@ALPHA]]"; raises ConfigError.

    A rounding in place of BASIS is its default basis; damping and alpha are by default those of `oscar
    calibrate --basis BASIS`.
    """
    basis, *numbers = name.removeprefix("int2:").split("@")
    if basis in fmt.ROUNDINGS:
        basis = CalibrationConfig(rounding=basis).basis
    if basis not in KEY_BASES:
        allowed = ", ".join((*KEY_BASES, *fmt.ROUNDINGS))
        raise ConfigError(f"method {name!r}: basis {basis!r}, allowed: {allowed}")
    alpha = ORDERED_KEY_MULTIPLIERS[0] if basis == ORDERED else fmt.KEY_MULTIPLIER_DEFAULT
    defaults = [CalibrationConfig.damping, alpha / (1 << fmt.MULTIPLIER_BITS)]
    try:
        damping, alpha = [float(number) for number in numbers] + defaults[len(numbers) :]
    except ValueError:
        raise ConfigError(f"method {name!r}: expected int2:BASIS@DAMPING@ALPHA with numbers") from None
    if not 0.0 <= damping <= 1.0:
        raise ConfigError(f"method {name!r}: damping = {damping!r}, allowed: 0..1")
    one = 1 << fmt.MULTIPLIER_BITS
    if not 1 <= alpha * one < fmt.MULTIPLIER_LIMIT - 0.5:
        most = (fmt.MULTIPLIER_LIMIT - 1) / one
        raise ConfigError(f"method {name!r}: alpha = {alpha!r}, allowed: {1 / one}..{most}")
    return basis, damping, round(alpha * one)


def published_recipe(statistics: Any, *, centered: bool = False) -> fidelity.AsymmetricRecipe:
    """The published recipe of one layer: layer-shared OSCAR rotations, clip .96 and .92, asymmetric codes.

    `centered` takes the calibrated mean key of each head from its keys first, as the recipe does since its
    version 3.
    """
    values = statistics.surrogate_value_covariance
    if values is None:
        raise ConfigError(
            "the statistics have no surrogate value covariance: calibrate on more than one chunk"
        )
    key, value = fit_published_rotation(statistics.query_covariance), fit_published_rotation(values)
    mean = statistics.key_mean if centered else None
    return fidelity.make_recipe(key[None], value[None], KEY_CLIP_RATIO, VALUE_CLIP_RATIO, key_mean=mean)
