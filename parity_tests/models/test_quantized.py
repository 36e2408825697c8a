"""Quantized checkpoints: each form against whoever defined it, bit for bit, then whole models.

FP8 and MXFP4 are compared with transformers' own code and compressed-tensors with its library. GPTQ and AWQ
need kernels to be dequantized elsewhere, so their writers and readers here follow the formats' definitions.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from oscar_jax.cli import main
from oscar_jax.core.errors import CheckpointError, ConfigError
from oscar_jax.models.family import LazyTensor, TensorSource
from oscar_jax.models.hf_config import config_from_hf
from oscar_jax.models.quantized import check_quantization, dequantized
from oscar_jax.models.safetensors_file import SafetensorsFile
from oscar_jax.models.weights import build_model, open_checkpoint

from .test_families import VOCABULARY, random_reference
from .test_models import LOGIT_TOLERANCE
from .tiny_model import write_byte_tokenizer

pytestmark = [pytest.mark.hf, pytest.mark.usefixtures("fast_compilation")]


def source_of(tensors: dict[str, Any], directory: Path) -> TensorSource:
    """The tensors through a file, as a checkpoint has them."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "w.safetensors")
    file = SafetensorsFile(directory / "w.safetensors")
    return TensorSource(file.shapes, file.load)


def assert_reads(source: TensorSource, name: str, expected: Any) -> None:
    """The tensor equals `expected` bit for bit once both are of its dtype, as a whole and in parts."""
    import torch

    found = source.load(name)
    assert isinstance(found, LazyTensor) and found.shape == tuple(expected.shape) == source.shapes[name]
    dtype = {torch.float32: np.float32, torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}[
        expected.dtype
    ]
    wanted = expected.float().numpy()
    assert np.unique(wanted).size > 8  # something is there to be wrong about
    random = np.random.default_rng(0)
    parts = [(slice(None),) * wanted.ndim]
    for _ in range(6):
        cuts = [sorted(random.integers(0, size + 1, 2)) for size in wanted.shape]
        parts.append(tuple(slice(int(low), int(high)) for low, high in cuts))
    for part in parts:
        rounded = found[part].astype(dtype).astype(np.float32)
        assert rounded.tobytes() == np.ascontiguousarray(wanted[part]).tobytes()


def random_fp8(*shape: int) -> Any:
    import torch

    return (100 * torch.randn(shape)).to(torch.float8_e4m3fn)


FP8_SCALES: dict[str, Callable[[Any], Any]] = {
    "blocks": lambda torch: torch.rand(4, 3) * 1e-2,
    "bfloat16": lambda torch: (torch.rand(4, 3) * 1e-2).bfloat16(),
    "tensor": lambda torch: torch.tensor(0.0123),
    "vector": lambda torch: torch.tensor([0.0123]),
    "rows": lambda torch: torch.rand(64, 1) * 1e-2,
    "bytes": lambda torch: torch.randint(100, 130, (4, 3), dtype=torch.uint8),
    "e8m0": lambda torch: (2.0 ** torch.randint(-9, 3, (4, 3))).to(torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("scales", list(FP8_SCALES))
def test_fp8_is_what_transformers_dequantizes(scales: str, tmp_path: Path) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    weight, scale = random_fp8(64, 48), FP8_SCALES[scales](torch)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "a.activation_scale": torch.tensor(0.1)}
    source = dequantized(source_of(tensors, tmp_path))
    assert sorted(source.shapes) == ["a.weight"]
    for dtype in (torch.float32, torch.bfloat16):
        expected = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=dtype)
        assert_reads(source, "a.weight", expected)


def test_fp8_blocks_may_end_with_the_weight(tmp_path: Path) -> None:
    """Blocks of 32 on 40 rows: the second has eight. transformers refuses these; their meaning is plain."""
    import torch

    weight, scale = random_fp8(40, 48), torch.rand(2, 2)
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    spread = scale.repeat_interleave(32, 0)[:40].repeat_interleave(32, 1)[:, :48]
    assert_reads(dequantized(source_of(tensors, tmp_path), settings), "a.weight", weight.float() * spread)


def test_mxfp4_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(90, 140, (3, 10, 2), dtype=torch.uint8)
    tensors = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    source = dequantized(source_of(tensors, tmp_path), {"quant_method": "mxfp4"})
    for dtype in (torch.float32, torch.bfloat16):
        assert_reads(source, "experts.down_proj", convert_moe_packed_tensors(blocks, scales, dtype=dtype))


COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 groups": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "int4 with zeros": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "int4 rows": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
    "int8 groups": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}),
    "int8 rows with zeros": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8 rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
}


def compress(
    weight: Any, form: str, arguments: dict[str, Any], dtype: Any
) -> tuple[dict[str, Any], Any, Any]:
    """Tensors of a module as the compressed-tensors library writes them, its scheme and its compressor."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": arguments})
    rows, columns = weight.shape
    grid = {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, columns // arguments.get("group_size", columns)),
        "block": (-(-rows // 16), -(-columns // 32)),
    }[arguments["strategy"]]
    state = {"weight": weight.to(dtype), "weight_scale": (0.02 + 0.02 * torch.rand(grid)).to(dtype)}
    if not arguments.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-5, 5, grid, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    return compressor.compress(state, scheme), scheme, compressor


@pytest.mark.parametrize("case", list(COMPRESSED))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compressed_tensors_is_what_its_library_decompresses(case: str, dtype: str, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(0)
    form, arguments = COMPRESSED[case]
    stored, scheme, compressor = compress(torch.randn(40, 96), form, arguments, getattr(torch, dtype))
    settings = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments}},
    }
    check_quantization(settings)
    tensors = {f"a.{name}": tensor for name, tensor in stored.items()}
    source = dequantized(source_of(tensors, tmp_path), settings)
    assert sorted(source.shapes) == ["a.weight"]
    assert_reads(source, "a.weight", compressor.decompress(stored, scheme)["weight"])


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Codes to int32 words along an axis, the first in the lowest bits."""
    each = 32 // bits
    codes = np.moveaxis(codes.astype(np.uint32), axis, -1)
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // each), np.uint32)
    for place in range(each):
        words |= codes[..., place::each] << np.uint32(bits * place)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "act-order"])
def test_gptq_by_its_definition(bits: int, form: str, tmp_path: Path) -> None:
    """W[o, i] = scales[g_idx[i], o] * (code - zero), in float16 as the format's layers multiply."""
    import torch

    random = np.random.default_rng(0)
    rows, columns, groups = 48, 96, 3
    codes = random.integers(0, 1 << bits, (columns, rows))
    zeros = random.integers(1, 1 << bits, (groups, rows))
    index = np.arange(columns) // (columns // groups)
    if form == "act-order":
        index = random.permutation(index)
    scales = torch.from_numpy(random.uniform(0.01, 0.03, (groups, rows))).half()
    tensors = {
        "a.qweight": torch.from_numpy(pack(codes, bits, 0)),
        "a.qzeros": torch.from_numpy(pack(zeros - (form != "gptq_v2"), bits, 1)),
        "a.scales": scales,
        "a.g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "desc_act": form == "act-order",
        "checkpoint_format": "gptq_v2" if form == "gptq_v2" else "gptq",
    }
    check_quantization(settings)
    source = dequantized(source_of(tensors, tmp_path), settings)
    assert sorted(source.shapes) == ["a.weight"]
    difference = torch.from_numpy((codes - zeros[index]).astype(np.int16))
    assert_reads(source, "a.weight", (scales[index] * difference).T)


def test_awq_by_its_definition(tmp_path: Path) -> None:
    """Eight outputs to a word, in the order 0, 2, 4, 6, 1, 3, 5, 7; (code - zero) * scale in float16."""
    import torch

    random = np.random.default_rng(0)
    rows, columns, groups = 48, 96, 3
    codes = random.integers(0, 16, (columns, rows))
    zeros = random.integers(0, 16, (groups, rows))
    scales = torch.from_numpy(random.uniform(0.01, 0.03, (groups, rows))).half()

    def shuffled(codes: np.ndarray) -> np.ndarray:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # which output stands at each place of a word
        return pack(codes.reshape(len(codes), -1, 8)[:, :, order].reshape(codes.shape), 4, 1)

    tensors = {
        "a.qweight": torch.from_numpy(shuffled(codes)),
        "a.qzeros": torch.from_numpy(shuffled(zeros)),
        "a.scales": scales,
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    check_quantization(settings)
    source = dequantized(source_of(tensors, tmp_path), settings)
    assert sorted(source.shapes) == ["a.weight"]
    spread = np.repeat(zeros, columns // groups, axis=0)
    difference = torch.from_numpy((codes - spread).astype(np.int8))
    assert_reads(source, "a.weight", (difference * scales.repeat_interleave(32, 0)).T)


def quantize_checkpoint(
    directory: Path, chosen: Callable[[str, Any], dict[str, Any] | None], quantization: dict[str, Any]
) -> None:
    """Replaces tensors of a saved model by what `chosen(name, tensor)` makes of them (None: stays)."""
    from safetensors.torch import load_file, save_file

    stored: dict[str, Any] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored |= chosen(name, tensor) or {name: tensor}
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))


def assert_same_logits(directory: Path, **how: Any) -> None:
    """The directory's model here and in transformers, which dequantizes it while loading."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **how
    ).eval()
    assert type(next(reference.parameters())) is torch.nn.Parameter
    config, source = open_checkpoint(directory)
    model = build_model(config, source, dtype=jnp.float32, param_dtype=jnp.float32)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (2, 24))
    with torch.no_grad():
        theirs = reference(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    ours = np.asarray(model(jnp.asarray(tokens))[0])
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() <= LOGIT_TOLERANCE


@pytest.fixture(scope="module")
def fp8_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GLM-4 MoE with FP8 weights in blocks, experts one by one, and a tokenizer of bytes."""
    import torch

    def chosen(name: str, tensor: Any) -> dict[str, Any] | None:
        if not name.endswith("_proj.weight"):
            return None
        blocks = tensor.reshape(tensor.shape[0] // 16, 16, tensor.shape[1] // 16, 16)
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scales).reshape(tensor.shape).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scales[:, 0, :, 0]}

    directory = tmp_path_factory.mktemp("fp8")
    reference = random_reference("glm4_moe", vocab_size=272, num_hidden_layers=2, eos_token_id=257)
    reference.save_pretrained(directory)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    quantize_checkpoint(directory, chosen, quantization)
    write_byte_tokenizer(directory)
    return directory


def test_fp8_experts_mean_what_transformers_makes_of_them(fp8_experts: Path) -> None:
    from transformers import FineGrainedFP8Config

    settings = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    assert_same_logits(fp8_experts, quantization_config=settings)


def test_fp8_experts_from_calibration_to_generation(
    fp8_experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """GLM-4 MoE in FP8 through the command line: calibrated, evaluated, and generating from INT2 pages."""
    for name, step in (("one", 23), ("two", 19)):
        (tmp_path / f"{name}.txt").write_text("".join(chr(97 + i * i % step) for i in range(2000)))
    model, rotations = f"--model {fp8_experts}", tmp_path / "rotations"
    words = f"calibrate {model} --text {tmp_path}/one.txt --out {rotations} --tokens 1024 --context 512"
    assert main([*words.split(), "--chunk", "512"]) == 0
    words = f"evaluate {model} --rotations {rotations} --text {tmp_path}/two.txt --out {tmp_path}/report"
    assert main([*words.split(), *"--context 512 --chunk 512 --every 8 --methods bf16,int2".split()]) == 0
    document = json.loads((tmp_path / "report" / "evaluation.json").read_text())
    rows = {row["method"]: row for row in document["methods"]}
    assert document["quantized_layers"] == [0, 1] and 0 < rows["int2"]["kl_mean"] < 1
    capsys.readouterr()
    words = f"generate {model} --rotations {rotations} --max-new-tokens 4"
    assert main([*words.split(), "--prompt", (tmp_path / "two.txt").read_text()[:600]]) == 0
    output = capsys.readouterr()
    assert "8 INT2 pages" in output.err and "4 new tokens" in output.err


def test_a_compressed_mixture_of_experts(tmp_path: Path) -> None:
    """GLM-4 MoE as its FP8 releases are: a scale per row; that activations are rounded too is left out."""
    import torch
    from transformers.utils.quantization_config import CompressedTensorsConfig

    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}

    def chosen(name: str, tensor: Any) -> dict[str, Any] | None:
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            return None
        stored, *_ = compress(tensor, "float-quantized", weights, torch.bfloat16)
        return {f"{stem}.{kind}": part for kind, part in stored.items()}

    random_reference("glm4_moe").save_pretrained(tmp_path)
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
    }
    quantize_checkpoint(tmp_path, chosen, quantization)
    assert_same_logits(tmp_path, quantization_config=CompressedTensorsConfig(**quantization, dequantize=True))


def test_a_published_gpt_oss(tmp_path: Path) -> None:
    """Experts in MXFP4 and everything else as it is, the form in which gpt-oss is published."""
    import torch
    from transformers.utils.quantization_config import Mxfp4Config

    def chosen(name: str, tensor: Any) -> dict[str, Any] | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        grid = (tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32)
        return {
            f"{name}_blocks": torch.randint(0, 256, (*grid, 16), dtype=torch.uint8),
            f"{name}_scales": torch.randint(121, 125, grid, dtype=torch.uint8),
        }

    random_reference("gpt_oss", intermediate_size=96).save_pretrained(tmp_path)
    torch.manual_seed(0)
    quantization = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    quantize_checkpoint(tmp_path, chosen, quantization)
    assert_same_logits(tmp_path, quantization_config=Mxfp4Config(dequantize=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights quantized by 'bitsandbytes', allowed: none, fp8, mxfp4"),
        ({"quant_method": "fp8", "new": 1}, "unknown key 'new' = 1"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype = 'fp4', allowed: 'fp8'"),
        ({"quant_method": "gptq", "bits": 3}, "bits = 3, allowed: 2, 4, 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv', allowed: 'gemm'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False, allowed: True"),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {}},
            "kv_cache_scheme = {}, allowed: nothing",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "x"}},
            "of format 'x', allowed: 'dense'",
        ),
        ("nvfp4-pack-quantized", "group_0: format = 'nvfp4-pack-quantized', allowed: pack-quantized"),
        ({"num_bits": 3}, r"group_0.weights: num_bits = 3, allowed: 2, 4, 8"),
        ({"actorder": "group"}, "group_0.weights: actorder = 'group', allowed: False, 'weight'"),
    ],
)
def test_other_quantizations_are_refused_by_name(settings: Any, message: str) -> None:
    if not isinstance(settings, dict) or "quant_method" not in settings:
        form, weights = (
            ("pack-quantized", settings) if isinstance(settings, dict) else (settings, {"num_bits": 4})
        )
        group = {"targets": ["Linear"], "weights": weights}
        settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    with pytest.raises(ConfigError, match=message):
        config_from_hf({"model_type": "llama", "quantization_config": settings}, model_id="x")


def zeros(**shapes: tuple[int, ...]) -> TensorSource:
    named = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return TensorSource(named, lambda name: np.ones(named[name], np.int8 if "weight" in name else np.float32))


GROUP = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "channel"}}}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": GROUP}


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (zeros(a__weight=(32, 32), a__weight_scale_inv=(3, 2)), {}, r"a.weight_scale_inv has shape \[3, 2\]"),
        (zeros(b__weight_scale_inv=(1, 1)), {}, "b.weight_scale_inv has no b.weight"),
        (
            zeros(a__weight=(32, 32), a__weight_scale_inv=(1, 1)),
            {},
            "a.weight has dtype int8 beside a.weight_scale_inv",
        ),
        (zeros(a__weight=(32, 32)), {}, "a.weight has dtype int8 and no scale beside it"),
        (zeros(a__qweight=(4, 32)), {"quant_method": "gptq"}, "a.qweight has no a.g_idx beside it"),
        (zeros(a__qweight=(32, 4)), {"quant_method": "awq"}, "a.qweight has no a.scales beside it"),
        (
            zeros(a__qweight=(3, 32), a__g_idx=(32,), a__scales=(1, 32), a__qzeros=(1, 4)),
            {"quant_method": "gptq"},
            r"a.qweight \[3, 32\] does not hold 32 outputs of 32 inputs in 2, 4 or 8 bits",
        ),
        (zeros(a_blocks=(2, 8, 2, 16)), {"quant_method": "mxfp4"}, "a_blocks has no a_scales beside it"),
        (zeros(a__weight_packed=(8, 4)), INT4, "a.weight_packed has no a.weight_scale beside it"),
        (zeros(a__weight_packed=(8, 4)), {**INT4, "config_groups": {}}, "no config_groups entry"),
    ],
)
def test_missing_pieces_are_named(source: TensorSource, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        np.asarray(dequantized(source, settings).load("a.weight"))
