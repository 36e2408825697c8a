"""The Triton and Gluon kernels: interpreted on the CPU against the reference, compiled for Hopper without a
GPU, and, where there is one, run.

The quantizer faces the shared format tests as "triton-interpreted" and "triton", the attention kernels those
of `test_attention_kernels.py`; here are the entries around them (append, flush), what they do with much or
little work, and what the compiler makes of them.
"""

import dataclasses
import os
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import rows
from parity_tests.kernels import triton_interpreter
from parity_tests.kernels.triton_interpreter import (
    append_differences,
    attention_errors,
    interpret,
    pair_differences,
    rotation_errors,
    sequential_differences,
)

pytest.importorskip("torch")
pytest.importorskip("triton")

# Relative error of one query's output: fp16 probabilities and scores of up to 15 bits.
TOLERANCE = 3e-3
INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
LENGTHS = (1, 64, 65, 320, 321, 448, 700)


def rotation(heads: int, head_dim: int) -> dict[str, np.ndarray]:
    return rows.make_rotation(np.random.default_rng(head_dim), heads, head_dim)


def assert_close(result: tuple[float, bool]) -> None:
    error, finite = result
    assert finite, "NaN or infinity in the output"
    assert error <= TOLERANCE, f"relative error {error:.2e}"


class TestInterpreted:
    """Plain Triton under its CPU interpreter."""

    def test_decode_of_more_programs_than_work(self) -> None:
        """As on a large GPU; one last launch and two, rounding as Torch does."""
        fields, lengths = rotation(1, 64), (300, 1, 449)
        assert_close(interpret(attention_errors, "decode.triton", fields, lengths, 2, processors=132))

    def test_chunk_over_blocks_of_pages(self) -> None:
        """More pages than one product with the page means covers; an odd number."""
        assert_close(interpret(attention_errors, "prefill.triton", rotation(1, 64), (4700,), 1, tokens=5))

    @pytest.mark.parametrize(("batch", "group", "head_dim", "shared"), [(9, 4, 64, False), (2, 7, 80, True)])
    def test_rotate(self, batch: int, group: int, head_dim: int, shared: bool) -> None:
        """More rows than a program takes; matrices of every head and a shared one."""
        assert max(interpret(rotation_errors, batch, 2, group, head_dim, shared)) <= 1e-4

    def test_append_token(self) -> None:
        """Ragged, over page boundaries, one sequence standing still every other step."""
        assert interpret(append_differences, rotation(2, 64), (1, 63, 383, 447, 500), 4) == []

    @pytest.mark.parametrize("fed", [("key", "value"), ("key",)])
    def test_append_token_rounds_sequentially(self, fed: tuple[str, ...]) -> None:
        """The page that leaves is coded with the rotation's feedback; values fed and not."""
        assert interpret(append_differences, rotation(2, 64), (383, 447), 2, fed=fed) == []

    @pytest.mark.parametrize(("head_dim", "fed"), [(64, ("key", "value")), (96, ("key",))])
    def test_sequential_pages(self, head_dim: int, fed: tuple[str, ...]) -> None:
        """Feedback of full size, rows of any bits; values fed and not."""
        assert interpret(sequential_differences, head_dim, fed) == []

    @pytest.mark.parametrize("bits", [False, True])
    def test_page_pair(self, bits: bool) -> None:
        """Keys and values of pages in one launch, more pages than programs, strided rows."""
        assert interpret(pair_differences, rotation(2, 64), 5, bits=bits) == []


class TestEmulated:
    """The Gluon quantizer's own source in NumPy, against the reference (see `gluon_emulator.py`)."""

    @pytest.mark.parametrize(
        ("head_dim", "fed", "steps", "extreme"),
        [
            (64, (), 0, False),  # what Hopper has shown to be right: so the stand-in is
            (128, (), 0, False),
            (64, ("key", "value"), 4, False),
            (64, ("key",), 2, True),
            (128, ("key", "value"), 4, True),
            (128, ("key", "value"), 8, False),
        ],
    )
    def test_pages(self, head_dim: int, fed: tuple[str, ...], steps: int, extreme: bool) -> None:
        """Blocks of 16, 32 and more channels, feedback of full size, rows that saturate."""
        if INTERPRETING:
            pytest.skip("TRITON_INTERPRET is set for this process: constants are others")
        options: dict[str, Any] = {"kernel": "", "steps": steps, "extreme": extreme}
        assert sequential_differences(head_dim, fed, **options) == []


class TestCompiled:
    """Kernels compiled for Hopper on a host without a GPU; assertions on what the compiler made of them."""

    @pytest.mark.parametrize(("head_dim", "padded_group"), [(64, 16), (128, 4), (256, 8)])
    def test_codes_stay_in_registers(self, head_dim: int, padded_group: int) -> None:
        """The Gluon stage has no shared memory but its rings, and unpacks by single instructions."""
        from oscar_torch.triton_kernels.decode.gluon import shared_bytes

        stages = 2
        ptx, shared = compile_stage(head_dim, padded_group, stages)
        assert shared == shared_bytes(head_dim, stages), (
            "the rings must be all: they are found by their address"
        )
        assert ptx.count("bar.sync") == 3, "at the start and around the merge; the compiler exchanges nothing"
        assert ptx.count("cp.async.bulk.shared") == 5 * (stages + 1), "the ring, then a page in the loop"
        words = head_dim // 8  # of keys, and as many of values, that a lane holds of one page
        assert ptx.count("and.b32") >= 2 * words * 4
        tiles = padded_group // 4  # of 8 columns, two for each head
        products = (head_dim // 32 * 4 + head_dim // 16 * 2) * tiles
        assert ptx.count("m16n8k32.row.col.satfinite.s32.s8.s8.s32") == products
        assert ptx.count("movmatrix") == 4 * tiles + 2 * tiles, "P of a page, P of 16 tokens of a window"

    def test_plain_codes_need_no_exchange(self) -> None:
        """Plain Triton on Ampere: staged code words are read as operands, and a mask serves two codes."""
        ptx = compile_plain_stage(128)
        words = 2 * 64 * 128 // 16 // 32  # of keys, and as many of values, that a lane holds of two pages
        assert sum(ptx.count(f"{0x00030003 << 2 * e:#x};") for e in range(5)) == 2 * 8 * words

    @pytest.mark.parametrize("exact", [False, True])
    def test_rotations_are_not_rounded_to_tf32(self, exact: bool) -> None:
        """Two or three products of TF32 parts to rotate, none in the merge. Triton 3.6 makes a single product
        of a sum that it recognizes, and attention of bf16 queries hardly shows the error."""
        from oscar_torch.triton_kernels.decode.triton import _merge_kernel, _rotate_kernel

        constants = {"K": 8, "G": 4, "D": 128, "CHUNK": 128, "COLUMNS": 32, "ROWS": 16, "EARLY": True}
        constants |= {"EXACT_ROWS": exact, "BACK": not exact}
        types = {"rows_ptr": "*bf16" if exact else "*fp32", "mean_ptr": "*i16"}
        ptx = compile_around_stage(_rotate_kernel, constants, types)
        steps = 128 // 8  # of 8 channels; a warp has 8 of the 32 columns
        assert ptx.count("mma.sync.aligned.m16n8k8.row.col.f32.tf32") == (2 if exact else 3) * steps

        constants = {"K": 8, "G": 4, "D": 128, "DP": 128, "SINK_PAGES": 1, "SLOTS": 6, "SLOTS_P": 8}
        constants |= {"WINDOW_PAGES": 8, "SLIDING": False, "BATCH_P": 32, "PIECES_P": 64, "STEP": 16}
        constants |= {"COLUMNS": 64, "SINK_LOGITS": True, "ROTATE": True, "EARLY": True}
        ptx = compile_around_stage(_merge_kernel, constants, {"value_mean_ptr": "*i16"})
        assert "mma" not in ptx

    def test_quantizer_uses_the_matrix_unit(self) -> None:
        """Four limb products and the packing of values by wgmma, limbs from shared memory, no division."""
        import torch
        from triton.compiler import ASTSource

        from oscar_torch.triton_kernels.quantize.triton import _bulk_kernel, _bulk_tiles

        tiles = _bulk_tiles(128, torch.device("cpu"))
        options = {name: tiles.pop(name) for name in ("num_warps", "maxnreg")}
        constants = {"FIRST_ROLE": 0, "K": 8, "D": 128, **tiles}
        ptx, shared = compile_quantizer(ASTSource, _bulk_kernel, constants, options)
        # Both roles: 4 products of 4 steps, both operands given by their address.
        product = r"wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 \{[^}]*\}, %rd\d+, %rd\d+"
        assert len(re.findall(product, ptx)) == 2 * 4 * 4
        assert re.search(r"mma\S*f32\.f16\.f16", ptx), "values are packed by a matrix product"
        assert "div" not in ptx.replace("divergent", "")
        assert 3 * (shared + 1024) <= 227 * 1024, "three programs must fit a multiprocessor"

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_gluon_chunk_unpacks_by_single_instructions(self, head_dim: int) -> None:
        """Two codes an instruction, consumers with registers for products in flight, two slots that fit."""
        ptx, shared = compile_chunk(head_dim)
        words = 2 * 2 * 64 * head_dim // 16 // 128  # of keys and of values of two pages, of a thread
        assert ptx.count("fma.rn.f16x2") == 8 * words
        assert "setmaxnreg.inc.sync.aligned.u32 \t192;" in ptx
        products = 2 * (2 * head_dim // 16 + 8)  # two consumers: keys before and in the loop, values
        assert len(re.findall(r"wgmma.mma_async\S*\.f32\.f16\.f16", ptx)) == products
        assert shared <= 227 * 1024

    @pytest.mark.parametrize(
        ("name", "head_dim", "steps"),
        [
            ("_bulk_kernel", 64, 0),
            ("_bulk_kernel", 128, 0),
            ("_append_kernel", 128, 0),
            ("_bulk_kernel", 128, 4),
            ("_append_kernel", 64, 4),
        ],
    )
    def test_gluon_quantizer_keeps_operands_in_registers(self, name: str, head_dim: int, steps: int) -> None:
        """Limbs of rows and units of blocks go to wgmma from registers; three programs fit a multiprocessor;
        no division; feedback of keys alone."""
        from triton.experimental.gluon._runtime import GluonASTSource

        from oscar_torch.triton_kernels.append import gluon as append_gluon
        from oscar_torch.triton_kernels.quantize import gluon

        constants, module = {"K": 8, "D": head_dim, "KEY_STEPS": steps, "VALUE_STEPS": 0}, gluon
        fed = ("value",) if steps else ("key", "value")
        constants |= {f"{role}_{array}_ptr": None for role in fed for array in ("feedback", "shift")}
        if name == "_bulk_kernel":
            constants |= {"FIRST_ROLE": 0}
        else:
            module = append_gluon
            constants |= {"SINK_PAGES": 1, "RECENT_SLOTS": 5, "SLOTS": 8}
        programs, warps, registers = gluon.PLANS[head_dim]
        options = {"num_warps": warps, "maxnreg": registers}
        ptx, shared = compile_quantizer(GluonASTSource, getattr(module, name), constants, options)
        # Both roles: blocks of 64 columns, 4 products of them, steps of 32 channels.
        product = r"wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 \{[^}]*\}, \{(?:%r\d+,? ?){4}\}"
        assert len(re.findall(product, ptx)) == 2 * (head_dim // 64) * 4 * (head_dim // 32)
        # Groups of 32 channels, fed by those before and, in blocks of 16, by themselves.
        groups = head_dim // 32
        fed_by = groups * (groups - 1) // 2 + (groups if steps and head_dim // steps < 32 else 0)
        product = r"wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.s8 \{[^}]*\}, \{(?:%r\d+,? ?){4}\}"
        assert len(re.findall(product, ptx)) == (fed_by if steps else 0)
        assert "div" not in ptx.replace("divergent", "")
        assert programs * (shared + 1024) <= 227 * 1024

    def test_wide_gluon_quantizer_overlaps_pages(self) -> None:
        """Products of half of the channels, both operands by address, before the loop and in it; all fits."""
        from triton.experimental.gluon._runtime import GluonASTSource

        from oscar_torch.triton_kernels.quantize import gluon

        constants = {"FIRST_ROLE": 0, "K": 8, "D": 256, "KEY_STEPS": 0, "VALUE_STEPS": 0}
        constants |= {f"{r}_{array}_ptr": None for r in ("key", "value") for array in ("feedback", "shift")}
        _, warps, registers = gluon.PLANS[256]
        options = {"num_warps": warps, "maxnreg": registers}
        ptx, shared = compile_quantizer(GluonASTSource, gluon._bulk_kernel, constants, options)
        # Steps of 32 of 128 channels: three portions go ahead of the first page, eight are those of a page.
        product = r"wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 \{[^}]*\}, %rd\d+, %rd\d+"
        assert len(re.findall(product, ptx)) == 2 * (3 + 8) * 4
        assert ptx.count("wgmma.wait_group.sync.aligned 1") == 2 * 2, "two waits leave a portion under way"
        assert "div" not in ptx.replace("divergent", "")
        assert shared <= 227 * 1024


def compile_stage(head_dim: int, padded_group: int, stages: int) -> tuple[str, int]:
    """PTX and bytes of shared memory of the Gluon stage kernel for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from oscar_torch.triton_kernels.decode.gluon import WARPS, _stage_kernel

    if INTERPRETING:
        pytest.skip("TRITON_INTERPRET is set for this process")
    constants = {
        **{"K": 8, "G": padded_group, "GP": padded_group, "D": head_dim, "SINK_PAGES": 1, "RECENT_SLOTS": 5},
        **{"WINDOW_PAGES": 8, "SLIDING": False, "BATCH_P": 32, "STAGES": stages, "EXACT_QUERY": True},
    }
    source = GluonASTSource(*stage_arguments(_stage_kernel, constants))
    options = {"num_warps": WARPS.value}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def compile_around_stage(kernel: Any, constants: dict[str, Any], types: dict[str, str]) -> str:
    """PTX for compute capability 9.0 of a kernel that runs before or after stage 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if INTERPRETING:
        pytest.skip("TRITON_INTERPRET is set for this process")
    floats = ("rows", "matrix", "added", "weight", "out", "o", "lse", "transform", "sink", "window")
    types = dict.fromkeys((f"{name}_ptr" for name in floats), "*fp32") | types
    types |= dict.fromkeys(("stride_rotation", "table_pages", "batch", "pieces", "sliding_window"), "i32")
    kernel, signature, values, aligned = stage_arguments(kernel, constants)
    signature |= {
        name: kind for name, kind in types.items() if signature.get(name, "constexpr") != "constexpr"
    }
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


def compile_chunk(head_dim: int) -> tuple[str, int]:
    """PTX and bytes of shared memory of the Gluon chunk kernel for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from oscar_torch.triton_kernels.prefill.gluon import _history_kernel

    if INTERPRETING:
        pytest.skip("TRITON_INTERPRET is set for this process")
    constants = {"K": 8, "G": 4, "D": head_dim, "SINK_PAGES": 1, "SLIDING": False}
    types = {"rotated_ptr": "*fp16", "unit_ptr": "*fp32", "sums_ptr": "*fp32", "state_ptr": "*fp32"}
    types |= dict.fromkeys(("tokens", "all_rows", "pieces"), "i32")
    types |= {"key_codes_ptr": "*i32", "value_codes_ptr": "*i32", "key_page_mean_ptr": "*i16"}
    kernel, signature, values, aligned = stage_arguments(_history_kernel, constants)
    source = GluonASTSource(kernel, signature | types, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return compiled.asm["ptx"], compiled.metadata.shared


def compile_plain_stage(head_dim: int) -> str:
    """PTX of the plain stage kernel for compute capability 8.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from oscar_torch.triton_kernels.decode.triton import _stage_kernel

    if INTERPRETING:
        pytest.skip("TRITON_INTERPRET is set for this process")
    constants = {
        **{"K": 8, "G": 4, "D": head_dim, "DP": head_dim, "ROWS": 8, "CHUNK": 128, "SINK_PAGES": 1},
        **{"RECENT_SLOTS": 5, "WINDOW_PAGES": 8, "SLIDING": False, "BATCH_P": 32, "WINDOW_STEP": 16},
        **{"EXACT_QUERY": True},
    }
    source = ASTSource(*stage_arguments(_stage_kernel, constants, codes="*i16"))
    options = {"num_warps": 1, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options).asm["ptx"]


def stage_arguments(kernel: Any, constants: dict[str, Any], codes: str = "*i32") -> tuple[Any, ...]:
    """A stage kernel, its signature, constants and attributes, as Triton's sources take them."""
    types = {"query_ptr": "*bf16", "softmax_scale": "fp32", "key_codes_ptr": codes, "value_codes_ptr": codes}
    types |= dict.fromkeys(("stride_table", "sliding_window", "batch", "pieces"), "i32")
    types |= dict.fromkeys(("rotated_ptr", "page_score_ptr", "o_ptr", "lse_ptr"), "*fp32")
    bf16 = ("mean_ptr", "key_scale_ptr", "value_scale_ptr", "window_key_ptr", "window_value_ptr")
    types |= dict.fromkeys(bf16, "*i16")
    names = kernel.arg_names
    return (
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names},
        {(i,): constants[name] for i, name in enumerate(names) if name in constants},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")},
    )


def compile_quantizer(
    source: Any, kernel: Any, constants: dict[str, Any], options: dict[str, int]
) -> tuple[str, int]:
    """PTX and bytes of shared memory of a quantizing kernel for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget

    if INTERPRETING:
        pytest.skip("TRITON_INTERPRET is set for this process")
    strides = ("stride_page", "stride_token", "stride_head")
    types = dict.fromkeys((*strides, "num_pages", "stride_rotation", "stride_table", "shift"), "i32")
    halves = ("key_transform_ptr", "value_transform_ptr", "key_scale_ptr", "value_scale_ptr")
    types |= dict.fromkeys((*halves, "value_mean_ptr", "key_page_mean_ptr"), "*i16")
    types |= dict.fromkeys(("key_feedback_ptr", "value_feedback_ptr"), "*i8")
    names = kernel.arg_names
    aligned = [i for i, name in enumerate(names) if name.endswith("_ptr") or name in strides]
    aligned = [i for i in aligned if names[i] not in constants]
    code = source(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "*i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(code, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


class TestErrors:
    """What cannot run says so by name, before anything is allocated; a named choice never falls back."""

    @pytest.mark.parametrize("implementation", ["triton", "gluon"])
    def test_cpu_tensors(self, implementation: str) -> None:
        import torch

        from oscar_torch import ops

        if INTERPRETING:
            pytest.skip("TRITON_INTERPRET is set for this process")
        cache, layer_rotation, _ = triton_interpreter.make_case(rotation(1, 64), (400,), 420, 2)
        query, key = torch.zeros(1, 3, 2, 64), torch.zeros(1, 3, 1, 64)
        pages = torch.zeros(1, 64, 1, 64)
        counts = torch.tensor([3], dtype=torch.int32)
        options: dict[str, Any] = {"softmax_scale": 0.125, "implementation": implementation}
        with pytest.raises(NotImplementedError, match="cpu"):
            ops.decode_attention(query[:, 0], cache.cache, layer_rotation, **options)
        with pytest.raises(NotImplementedError, match="cpu"):
            ops.chunk_attention(query, key, key, cache.cache, layer_rotation, new_lengths=counts, **options)
        with pytest.raises(NotImplementedError, match="cpu"):
            ops.quantize_pages(pages, pages, layer_rotation, implementation=implementation)
        with pytest.raises(NotImplementedError, match="cpu"):
            ops.append_token(
                cache.cache, layer_rotation, key[:, :1], key[:, :1], counts, implementation=implementation
            )

    def test_none_takes_the_reference_on_a_cpu(self) -> None:
        import torch

        from oscar_torch import attention, ops

        cache, layer_rotation, rng = triton_interpreter.make_case(rotation(1, 64), (400,), 420, 2)
        query = torch.from_numpy(rng.normal(0, 1, (1, 2, 64)).astype(np.float32))
        got = ops.decode_attention(query, cache.cache, layer_rotation, softmax_scale=0.125)
        assert torch.equal(
            got, attention.decode_attention(query, cache.cache, layer_rotation, softmax_scale=0.125)
        )

    @pytest.mark.parametrize(
        ("capability", "served"),
        [
            ((7, 5), ()),
            ((8, 6), ("flash", "triton")),
            ((9, 0), ("flash", "gluon", "triton")),
            ((10, 0), ("flash", "triton")),
        ],
    )
    def test_capability_decides(
        self,
        capability: tuple[int, int],
        served: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What None takes on a GPU, with a line in the log where that is not Gluon; names refuse the rest."""
        import torch

        from oscar_torch import ops
        from oscar_torch.triton_kernels.launch import tensors

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        tensor: Any = SimpleNamespace(device=torch.device("cuda"))
        with caplog.at_level("INFO"):
            assert ops._best.__wrapped__(tensor.device) == served
        number = f"{capability[0]}.{capability[1]}"
        assert (number in caplog.text) == ("gluon" not in served)
        checks = {"triton": tensors.check_device, "gluon": tensors.check_hopper}
        for name, check in checks.items():
            if name in served:
                check(tensor)
            else:
                with pytest.raises(NotImplementedError, match=number):
                    check(tensor)

    def test_none_goes_on_where_a_kernel_does_not_serve(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        import torch

        from oscar_torch import ops
        from oscar_torch.rotations.rotation import hadamard_rotation

        def refuse(*arguments: Any, **options: Any) -> Any:
            raise NotImplementedError("head_dim 80")

        kernels = {"quantize.gluon": refuse, "quantize.triton": lambda *arguments: "plain Triton"}
        monkeypatch.setattr(ops, "_best", lambda device: ("gluon", "triton"))
        monkeypatch.setattr(ops, "_kernel", lambda module, name: kernels[module])
        pages, fitted = torch.zeros(1, 64, 1, 64), hadamard_rotation(1, 64)
        with caplog.at_level("INFO"):
            assert ops.quantize_pages(pages, pages, fitted) == "plain Triton"
        assert "gluon does not serve this: head_dim 80" in caplog.text
        with pytest.raises(NotImplementedError, match="head_dim 80"):
            ops.quantize_pages(pages, pages, fitted, implementation="gluon")

    @pytest.mark.hopper
    def test_shapes_of_the_gluon_kernel(self) -> None:
        import torch

        from oscar_torch import ops

        for heads, group, head_dim in ((1, 2, 80), (1, 17, 64)):
            cache, layer_rotation, _ = triton_interpreter.make_case(
                rotation(heads, head_dim), (400,), 420, group, "gpu"
            )
            query = torch.zeros(1, heads * group, head_dim, device="cuda")
            options: dict[str, Any] = {"softmax_scale": 0.125, "implementation": "gluon"}
            with pytest.raises(NotImplementedError, match=str(head_dim if head_dim == 80 else group)):
                ops.decode_attention(query, cache.cache, layer_rotation, **options)


SHAPES = [
    (LENGTHS, 2, 1, 128),
    ((700, 3000), 2, 3, 64),
    ((5000, 384), 2, 4, 128),
    ((2000, 449), 1, 5, 128),
    ((2000, 449), 2, 8, 128),
    ((2000,), 1, 12, 128),
    ((2000,), 2, 16, 64),
    ((2000, 7), 1, 7, 256),
    (tuple(500 + 37 * n for n in range(33)), 2, 4, 128),
]


@pytest.mark.gpu
class TestOnGpu:
    """The compiled kernels against the reference on the same device."""

    @pytest.mark.parametrize(("lengths", "heads", "group", "head_dim"), SHAPES)
    @pytest.mark.parametrize(
        "kernel", ["decode.triton", pytest.param("decode.gluon", marks=pytest.mark.hopper)]
    )
    def test_decode(
        self, kernel: str, lengths: tuple[int, ...], heads: int, group: int, head_dim: int
    ) -> None:
        assert_close(attention_errors(kernel, rotation(heads, head_dim), lengths, group, device="gpu"))

    @pytest.mark.parametrize("options", [{"sliding_window": 777}, {"sinks": True}, {"recent_tokens": 64}])
    @pytest.mark.parametrize(
        "kernel", ["decode.triton", pytest.param("decode.gluon", marks=pytest.mark.hopper)]
    )
    def test_decode_options(self, kernel: str, options: dict[str, Any]) -> None:
        assert_close(attention_errors(kernel, rotation(2, 128), (3000, 700), 4, device="gpu", **options))

    @pytest.mark.parametrize("bfloat16", [False, True])
    @pytest.mark.parametrize(("lengths", "heads", "group", "head_dim"), SHAPES)
    def test_chunk(
        self, lengths: tuple[int, ...], heads: int, group: int, head_dim: int, bfloat16: bool
    ) -> None:
        fields, options = rotation(heads, head_dim), {"tokens": 100, "device": "gpu", "bfloat16": bfloat16}
        assert_close(attention_errors("prefill.triton", fields, lengths, group, **options))

    @pytest.mark.hopper
    @pytest.mark.parametrize(
        ("lengths", "heads", "group", "head_dim", "tokens"),
        [
            *((*shape, 100) for shape in SHAPES if shape[3] <= 128),
            ((6000, 0, 5200, 64), 2, 4, 128, 300),  # several pieces, some without a page
            ((9000,), 8, 4, 128, 512),  # one piece
            ((4000, 1000), 2, 2, 64, 77),
        ],
    )
    def test_chunk_gluon(
        self, lengths: tuple[int, ...], heads: int, group: int, head_dim: int, tokens: int
    ) -> None:
        fields, options = rotation(heads, head_dim), {"tokens": tokens, "device": "gpu", "bfloat16": True}
        assert_close(attention_errors("prefill.gluon", fields, lengths, group, **options))

    @pytest.mark.parametrize(
        "options",
        [
            {"sliding_window": 777},
            {"sinks": True},
            {"recent_tokens": 64},
            {"sink_tokens": 0, "recent_tokens": 64},
        ],
    )
    @pytest.mark.parametrize(
        "kernel", ["prefill.triton", pytest.param("prefill.gluon", marks=pytest.mark.hopper)]
    )
    def test_chunk_options(self, kernel: str, options: dict[str, Any]) -> None:
        options = {"tokens": 100, "device": "gpu", "bfloat16": True, **options}
        for head_dim in (64, 128):
            assert_close(attention_errors(kernel, rotation(2, head_dim), (3000, 700), 4, **options))

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("captured", [False, True])
    def test_append_token(self, captured: bool, head_dim: int) -> None:
        """Step by step, and as one CUDA graph replayed."""
        fields, lengths = rotation(2, head_dim), (1, 63, 383, 447, 500)
        assert append_differences(fields, lengths, 130, "gpu", captured) == []

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
    def test_append_token_rounds_sequentially(self, head_dim: int) -> None:
        """Pages that leave within one CUDA graph, coded with feedback of full size."""
        fields, lengths = rotation(2, head_dim), (1, 63, 383, 447, 500)
        fed = ("key", "value")
        assert append_differences(fields, lengths, 130, "gpu", captured=True, fed=fed) == []

    @pytest.mark.hopper
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(("heads", "fed"), [(1, ("key",)), (2, ("key", "value")), (8, ("key", "value"))])
    @pytest.mark.parametrize("captured", [False, True])
    def test_append_token_gluon_rounds_sequentially(
        self, captured: bool, heads: int, fed: tuple[str, ...], head_dim: int
    ) -> None:
        """Lengths on both sides of a page, one sequence standing still every other step, two pages each."""
        fields, lengths = rotation(heads, head_dim), (1, 63, 320, 383, 447, 500)
        assert append_differences(fields, lengths, 130, "gpu", captured, "append.gluon", fed) == []

    @pytest.mark.hopper
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("captured", [False, True])
    def test_append_token_gluon(self, captured: bool, head_dim: int) -> None:
        fields, lengths = rotation(2, head_dim), (1, 63, 383, 447, 500)
        assert append_differences(fields, lengths, 130, "gpu", captured, "append.gluon") == []

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
    def test_sequential_pages(self, head_dim: int) -> None:
        both = ("key", "value")
        for fed, heads, extreme in ((("key",), 2, False), (both, 1, True), (both, 8, False)):
            options: dict[str, Any] = {"heads": heads, "pages": 20, "extreme": extreme}
            assert sequential_differences(head_dim, fed, "gpu", **options) == []

    @pytest.mark.hopper
    @pytest.mark.parametrize(("head_dim", "steps"), [(64, 2), (64, 4), (128, 2), (128, 4), (128, 8)])
    def test_sequential_pages_gluon(self, head_dim: int, steps: int) -> None:
        """One page, fewer pages than programs, and more; values fed and not."""
        both = ("key", "value")
        for fed, heads, pages in ((both, 1, 1), (("key",), 2, 50), (both, 8, 60), (both, 1, 500)):
            for extreme in (False, True):
                options = {"heads": heads, "pages": pages, "steps": steps, "extreme": extreme}
                found = sequential_differences(head_dim, fed, "gpu", "quantize.gluon", **options)
                assert found == [], (fed, options)

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
    def test_page_pair(self, head_dim: int) -> None:
        for bits in (False, True):
            assert pair_differences(rotation(2, head_dim), 50, "gpu", bits) == []

    @pytest.mark.hopper
    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_page_pair_gluon(self, head_dim: int) -> None:
        """One page, fewer pages than programs, and more."""
        for pages, bits in ((1, False), (50, False), (50, True), (300, True)):
            assert pair_differences(rotation(2, head_dim), pages, "gpu", bits, "quantize.gluon") == []

    @pytest.mark.hopper
    def test_head_dim_of_the_gluon_quantizer(self) -> None:
        import torch

        from oscar_torch import ops

        for head_dim in (96, 256):
            layer_rotation = triton_interpreter.make_case(rotation(1, head_dim), (1,), 1, 1, "gpu")[1]
            if head_dim == 256:  # but for feedback it is served
                feedback = triton_interpreter.make_feedback(
                    np.random.default_rng(0), layer_rotation.key_transform
                )
                layer_rotation = dataclasses.replace(layer_rotation, key_feedback=feedback)
            pages = torch.zeros(1, 64, 1, head_dim, device="cuda")
            with pytest.raises(NotImplementedError, match=str(head_dim)):
                ops.quantize_pages(pages, pages, layer_rotation, implementation="gluon")

    @pytest.mark.hopper
    def test_cuda_graph(self) -> None:
        """Append and decode captured once, replayed over a page boundary."""
        import torch

        from oscar_torch import attention
        from oscar_torch.triton_kernels.append.triton import append_token
        from oscar_torch.triton_kernels.decode import gluon as decode_gluon

        cache, layer_rotation, rng = triton_interpreter.make_case(
            rotation(2, 128), (380, 900), 1100, 4, "gpu"
        )
        query = torch.from_numpy(rng.normal(0, 1, (2, 8, 128)).astype(np.float32)).cuda()
        row = torch.from_numpy(rng.normal(0, 1, (2, 1, 2, 128))).bfloat16().cuda()
        counts = torch.ones(2, dtype=torch.int32, device="cuda")

        def step() -> torch.Tensor:
            append_token(cache.cache, layer_rotation, row, row, counts)
            return decode_gluon.decode_attention(query, cache.cache, layer_rotation, softmax_scale=128**-0.5)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for _ in range(70):
            graph.replay()
        assert cache.cache.lengths.tolist() == [451, 971]
        want = attention.decode_attention(query, cache.cache, layer_rotation, softmax_scale=128**-0.5)
        assert (out - want).norm() <= TOLERANCE * want.norm()
