"""Checkpoints with quantized weights, dequantized while they are read, as transformers does on request.

What a `quantization_config` says is read here; what the tensors hold stands in `quantized_tensors.py`.
The tensors themselves say which modules are quantized, so lists of the others (`modules_to_not_convert`,
`ignore`, `dynamic`) change nothing. Scales of activations are left out: activations are not rounded. Every
other method, and every key that would change the arithmetic otherwise, is refused by name.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.errors import CheckpointError, ConfigError
from .family import LazyTensor, TensorSource
from .quantized_tensors import (
    QuantizedWeight,
    find_awq,
    find_gptq,
    find_mxfp4,
    find_packed,
    find_scaled,
)

Settings = Mapping[str, Any]
_ANY = object()  # a key whose value changes nothing here

# How weights are kept does not depend on these: what was quantized, how the scales were found, who computes.
_GPTQ_HARMLESS = """
    act_group_aware backend batch_size block_name_to_quantize cache_block_outputs cache_examples_on_gpu
    damp_auto_increment damp_percent dataset desc_act disable_exllama do_fuse dynamic exllama_config
    fuse_max_seq_len group_size hyb_act lm_head max_input_length meta model_file_base_name
    model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_fuse modules_to_not_convert mse pad_token_id quantizer static_groups sym tokenizer
    true_sequential use_cuda_fp16 use_exllama
    """.split()
# Allowed values by method and key; what is not listed is refused.
_KEYS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {
        **dict.fromkeys(
            ("weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"), _ANY
        ),
        "modules_to_convert": _ANY,
        "activation_scheme": ("dynamic", "static"),
        "fmt": ("e4m3",),
        "scale_fmt": ("float", "ue8m0"),
        "expert_dtype": ("fp8",),
    },
    "mxfp4": dict.fromkeys(("modules_to_not_convert", "dequantize"), _ANY),
    "gptq": {
        **dict.fromkeys(_GPTQ_HARMLESS, _ANY),
        "bits": (2, 4, 8),
        "format": ("gptq", "gptq_v2"),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
        "is_marlin_format": (False,),
    },
    "awq": {
        **dict.fromkeys(_GPTQ_HARMLESS, _ANY),
        "bits": (4,),
        "w_bit": (4,),
        "q_group_size": _ANY,
        "zero_point": (True,),
        "version": ("gemm", "GEMM"),
        "format": ("gemm",),
        "pack_dtype": ("int32",),
    },
    "compressed-tensors": {
        **dict.fromkeys(("global_compression_ratio", "ignore", "quantization_status", "version"), _ANY),
        **dict.fromkeys(("run_compressed", "dequantize", "use_optimized_inference"), _ANY),
        "config_groups": _ANY,  # read below
        "format": _ANY,
        "kv_cache_scheme": (),
        "sparsity_config": _ANY,  # read below
        "moe_sparsity_config": (),
        "transform_config": ({},),
    },
}
METHODS = tuple(_KEYS)
_GROUP_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(("targets", "input_activations", "format", "weights"), _ANY),
    "output_activations": (),
}
_WEIGHT_KEYS: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "symmetric",
            "group_size",
            "block_structure",
            "observer",
            "observer_kwargs",
            "scale_dtype",
            "zp_dtype",
        ),
        _ANY,
    ),
    "num_bits": (2, 4, 8),
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block"),
    "dynamic": (False,),
    "actorder": (False, "weight", "static"),  # "group" would permute columns
}
_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")


def check_quantization(settings: Any) -> None:
    """Raises ConfigError unless `quantization_config` names a method that is dequantized here."""
    method = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if not isinstance(settings, Mapping) or method not in METHODS:
        raise ConfigError(
            f"quantization_config: weights quantized by {method!r}, allowed: none, {', '.join(METHODS)}"
        )
    _check_keys("quantization_config", settings, {"quant_method": _ANY, **_KEYS[method]})
    if method == "compressed-tensors":
        if (sparse := (settings.get("sparsity_config") or {}).get("format", "dense")) != "dense":
            raise ConfigError(f"quantization_config: sparsity_config of format {sparse!r}, allowed: 'dense'")
        for name, group in _config_groups(settings).items():
            where = f"quantization_config: {name}"
            _check_keys(where, group, _GROUP_KEYS)
            _check_keys(f"{where}.weights", group.get("weights") or {}, _WEIGHT_KEYS)
            if group.get("weights") and (kind := _format_of(group, settings)) not in _FORMATS:
                raise ConfigError(f"{where}: format = {kind!r}, allowed: {', '.join(_FORMATS)}")


def _check_keys(where: str, settings: Settings, allowed: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if value is None:
            continue
        if key not in allowed:
            raise ConfigError(f"{where}: unknown key {key!r} = {value!r}")
        if allowed[key] is not _ANY and value not in allowed[key]:
            values = ", ".join(map(repr, allowed[key])) or "nothing"
            raise ConfigError(f"{where}: {key} = {value!r}, allowed: {values}")


def _config_groups(settings: Settings) -> Mapping[str, Settings]:
    groups = settings.get("config_groups") or {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"quantization_config: {name} = {group!r}, allowed: an object with weights")
    return groups


def _format_of(group: Settings, settings: Settings) -> str:
    return group.get("format") or settings.get("format") or "dense"


def _group_of(settings: Settings) -> Callable[[str], Settings | None]:
    """module -> weights' arguments of the compressed-tensors group that targets it, by name or by class."""
    groups = [group for group in _config_groups(settings).values() if group.get("weights")]

    def names(group: Settings, module: str) -> bool:
        return any(
            re.match(target.removeprefix("re:"), module) if target.startswith("re:") else target == module
            for target in group["targets"]
        )

    def find(module: str) -> Settings | None:
        by_name = [group for group in groups if names(group, module)]
        by_class = [group for group in groups if "Linear" in group["targets"]]
        return next((group["weights"] for group in (*by_name, *by_class)), None)

    return find


def dequantized(source: TensorSource, settings: Settings | None = None) -> TensorSource:
    """A source whose quantized weights are floats, each computed where it is indexed.

    `settings`: the `quantization_config`, checked. Raises CheckpointError for parts that are missing, do not
    fit each other, or that nobody would dequantize.
    """
    settings = settings or {}
    method = settings.get("quant_method", "fp8")
    found: dict[str, QuantizedWeight]
    if method == "gptq":
        kinds = (settings.get("checkpoint_format") or settings.get("format"),)
        found = find_gptq(source, zeros_less_one="gptq_v2" not in kinds)
    elif method == "awq":
        found = find_awq(source)
    elif method == "mxfp4":
        found = find_mxfp4(source)
    elif method == "compressed-tensors":
        group_of = _group_of(settings)
        found = find_packed(source, group_of) | find_scaled(source, _block_of(group_of), round_to_scale=True)
    else:
        size = tuple(settings.get("weight_block_size") or ()) or None
        found = find_scaled(source, lambda module: size, round_to_scale=False)
    used = {part for weight in found.values() for part in weight.parts}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in used}

    def load(name: str) -> np.ndarray | LazyTensor:
        if name in found:
            return LazyTensor(found[name].shape, found[name].read)
        tensor = source.load(name)
        # 8-bit numbers mean nothing without their factors.
        if isinstance(tensor, np.ndarray) and tensor.dtype.itemsize == 1:
            raise CheckpointError(f"{name} has dtype {tensor.dtype} and no scale beside it")
        return tensor

    return dataclasses.replace(
        source, shapes=shapes | {name: weight.shape for name, weight in found.items()}, load=load
    )


def _block_of(group_of: Callable[[str], Settings | None]) -> Callable[[str], tuple[int, int] | None]:
    def block(module: str) -> tuple[int, int] | None:
        size = (group_of(module) or {}).get("block_structure")
        rows, columns = size.split("x") if isinstance(size, str) else size or (0, 0)
        return (int(rows), int(columns)) if int(rows) else None

    return block
