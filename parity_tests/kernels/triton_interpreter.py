"""Triton's CPU interpreter in a process of its own, for tests that share a worker with everything else.

Triton decides at import whether it interprets, so the choice cannot be made in a process that may have
imported it already. `interpret(function, *arguments)` runs a function of an importable module in a child that
was told to interpret from the start; arguments and results are NumPy arrays and plain values.
"""

import concurrent.futures
import functools
import importlib.util
import multiprocessing
import multiprocessing.util
import os
import types
import unittest.mock as mock
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

TIMEOUT = 300  # seconds for one call; the slowest takes a few


def why_not() -> str | None:
    """None when Triton's interpreter can run here, otherwise the reason."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return None


def interpret(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of `function(*arguments, **options)` with every Triton kernel interpreted on the CPU."""
    return _child().submit(function, *arguments, **options).result(timeout=TIMEOUT)


@functools.cache
def _child() -> concurrent.futures.Executor:
    pool = concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_start
    )
    # A finalizer, because a child of multiprocessing waits for its own children before it runs atexit; of
    # high priority, because the pool's queues close at 10 and the shutdown needs them.
    multiprocessing.util.Finalize(pool, pool.shutdown, kwargs={"cancel_futures": True}, exitpriority=100)
    return pool


def _start() -> None:
    """First thing in the child: interpret; poison what is allocated and not written."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN


def quantize_pages(
    role: str,
    rows: np.ndarray,
    transform: np.ndarray,
    multiplier: np.ndarray,
    mean: np.ndarray | None,
    feedback: Any,
    device: str,
) -> dict[str, np.ndarray]:
    """The arrays of `oracle.quantize_pages` by the interpreted Triton quantizer."""
    return interpret(_quantize_pages, role, rows, transform, multiplier, mean, feedback)


def _quantize_pages(role: str, *arrays: Any) -> dict[str, np.ndarray]:
    from parity_tests.conformance.implementations import triton_pages

    return triton_pages()(role, *arrays, "cpu")


def make_case(
    rotation: Mapping[str, np.ndarray],
    lengths: tuple[int, ...],
    max_length: int,
    group: int,
    device: str = "cpu",
    seed: int = 0,
    **settings: Any,
) -> tuple[Any, Any, Any]:
    """(cache, rotation, numpy generator) of the Torch package, filled with random rows, pages shuffled."""
    from parity_tests.conformance import oracle
    from parity_tests.conformance.frameworks import FRAMEWORKS, PackageCache

    rng = np.random.default_rng(seed)
    heads = len(rotation["key_transform"])
    cache = PackageCache(
        FRAMEWORKS["torch"], rotation, len(lengths), max_length, device, query_heads=heads * group, **settings
    )
    table = cache.field("page_table")
    cache.set_fields(page_table=rng.permutation(table.reshape(-1)).reshape(table.shape).astype(np.int32))
    shape = (len(lengths), max(lengths), heads, rotation["key_transform"].shape[-1])
    offset = rng.normal(0, 2, shape[2:])
    key = oracle.to_bfloat16(rng.normal(0, 1, shape) + offset)
    value = oracle.to_bfloat16(rng.normal(0, 1, shape))
    cache.append(key, value, lengths)
    return cache, cache.rotation, rng


def attention_errors(
    kernel: str,
    rotation: Mapping[str, np.ndarray],
    lengths: tuple[int, ...],
    group: int,
    *,
    tokens: int = 0,
    device: str = "cpu",
    sliding_window: int | None = None,
    sinks: bool = False,
    bfloat16: bool = False,
    processors: int | None = None,
    **settings: Any,
) -> tuple[float, bool]:
    """(largest relative error of a query against the reference, all finite) of one attention kernel.

    kernel: "decode.triton", "decode.gluon", or, for a chunk of `tokens`, "prefill.triton", "prefill.gluon".
    Runs wherever Triton runs: interpreted in the child, compiled on a GPU. A decode kernel is tried with one
    last launch and with two, each rounding to bfloat16 too; `processors`: as many as it is to believe in.
    bfloat16: the queries of a chunk.
    """
    import importlib

    import torch

    from oscar_torch import attention
    from oscar_torch.triton_kernels.decode import triton as decode_triton

    machine: dict[str, Any] = {} if processors is None else {"_processors": lambda device: processors}
    cache, layer_rotation, rng = make_case(
        rotation, lengths, max(lengths) + tokens, group, device, **settings
    )
    place = cache.cache.lengths.device
    heads, head_dim = len(rotation["key_transform"]), rotation["key_transform"].shape[-1]

    def normal(*shape: int) -> Any:
        return torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32)).to(place)

    options = {"softmax_scale": head_dim**-0.5, "sliding_window": sliding_window}
    options["sink_logits"] = normal(heads * group) if sinks else None
    module = importlib.import_module(f"oscar_torch.triton_kernels.{kernel}")
    batch = len(lengths)
    if tokens == 0:
        query = normal(batch, heads * group, head_dim)
        want = attention.decode_attention(query, cache.cache, layer_rotation, **options)
        got = []
        for rows in (0, 1 << 20):
            with mock.patch.multiple(decode_triton, ROWS_OF_ONE_MERGE=rows, **machine):
                got.append(module.decode_attention(query, cache.cache, layer_rotation, **options))
                options["dtype"] = torch.bfloat16
                rounded = module.decode_attention(query, cache.cache, layer_rotation, **options)
                del options["dtype"]
            nearest = torch.equal(rounded, got[-1].bfloat16())
            cut = torch.equal(rounded, (got[-1].view(torch.int32) >> 16 << 16).view(torch.float32))
            assert nearest or (cut and device == "cpu"), "rounded otherwise than by Torch, or the interpreter"
        got, want = torch.cat(got), torch.cat([want, want])
    else:
        query = normal(batch, tokens, heads * group, head_dim)
        query = query.bfloat16() if bfloat16 else query
        key, value = (normal(batch, tokens, heads, head_dim).bfloat16() for _ in range(2))
        options["new_lengths"] = torch.arange(tokens, tokens - batch, -1, dtype=torch.int32, device=place)
        live = torch.arange(tokens, device=place) < options["new_lengths"][:, None]
        key[~live], value[~live] = torch.nan, torch.nan
        exact = query.float()
        want = attention.chunk_attention(exact, key, value, cache.cache, layer_rotation, **options)[live]
        got = module.chunk_attention(query, key, value, cache.cache, layer_rotation, **options)[live]
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-30)
    return float(error.max()), bool(torch.isfinite(got).all())


def rotation_errors(batch: int, heads: int, group: int, head_dim: int, shared: bool) -> tuple[float, float]:
    """Largest errors of `decode.triton.Rotation`: rows @ matrix, and the same + added + weight * mean."""
    import torch

    from oscar_torch.cache import allocate_layer_cache
    from oscar_torch.core.config import CacheConfig
    from oscar_torch.triton_kernels.decode import triton as decode_triton

    rng = np.random.default_rng(0)
    query_heads, matrices = heads * group, 1 if shared else heads

    def normal(*shape: int) -> Any:
        return torch.from_numpy(rng.normal(0, 1, shape).astype(np.float32))

    rows, added = normal(batch, query_heads, head_dim), normal(batch, query_heads, head_dim)
    matrix, mean = normal(matrices, head_dim, head_dim), normal(matrices, head_dim).bfloat16()
    weight = normal(batch, query_heads)
    cache = allocate_layer_cache(CacheConfig(heads, query_heads, head_dim), batch, 64)
    rotation = types.SimpleNamespace(query_transform=matrix)
    plan = decode_triton.plan_decode(rows, cache, rotation, None, programs=1, window_pages=8)
    head = torch.arange(query_heads) // group % matrices
    product = torch.einsum("bnd,nde->bne", rows, matrix[head])
    rotated, _ = decode_triton.Rotation(plan, matrix, EARLY=False)(rows)
    back, _ = decode_triton.Rotation(plan, matrix, mean, EARLY=False)(rows, added, weight)
    want = product + added + weight[..., None] * mean[head].float()
    return float((rotated - product).abs().max()), float((back - want).abs().max())


def append_differences(
    rotation: Mapping[str, np.ndarray],
    lengths: tuple[int, ...],
    steps: int,
    device: str = "cpu",
    captured: bool = False,
    kernel: str = "append.triton",
    fed: tuple[str, ...] = (),
) -> list[str]:
    """Cache arrays that differ after `steps` tokens by `append_token` and by the reference append.

    kernel: "append.triton" or "append.gluon". Every step reads its rows and counts from the same arrays:
    `captured` replays one CUDA graph. Roles `fed` are rounded sequentially.
    """
    import dataclasses
    import importlib

    import torch

    from oscar_torch.cache import append_rows

    append_token = importlib.import_module(f"oscar_torch.triton_kernels.{kernel}").append_token
    fused, reference = (make_case(rotation, lengths, max(lengths) + steps, 1, device)[0] for _ in range(2))
    rng = np.random.default_rng(1)
    feedback = {f"{role}_feedback": make_feedback(rng, fused.rotation.key_transform) for role in fed}
    for case in (fused, reference):
        case.rotation = dataclasses.replace(case.rotation, **feedback)
    place, shape = fused.cache.lengths.device, (len(lengths), 1, *fused.cache.window_key.shape[1::2])
    key, value = (torch.empty(shape, dtype=torch.bfloat16, device=place) for _ in range(2))
    counts = torch.ones(len(lengths), dtype=torch.int32, device=place)

    def append() -> None:
        append_token(fused.cache, fused.rotation, key, value, counts)

    run = append
    for step in range(steps):
        key.copy_(torch.from_numpy(rng.normal(0, 1, shape)))
        value.copy_(torch.from_numpy(rng.normal(0, 1, shape)))
        counts[-1] = step % 2
        if captured and step == 1:  # the first call compiled
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                append()
            run = graph.replay
        run()
        append_rows(reference.cache, reference.rotation, key, value, counts, implementation="eager")
    names = ("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean", "window_key")
    names += ("window_value", "lengths", "history_pages")
    return [name for name in names if not np.array_equal(fused.field(name), reference.field(name))]


def pair_differences(
    rotation: Mapping[str, np.ndarray],
    pages: int,
    device: str = "cpu",
    bits: bool = False,
    kernel: str = "quantize.triton",
) -> list[str]:
    """INT2 arrays that differ between keys and values in one launch, each alone, and the reference.

    kernel: "quantize.triton" or "quantize.gluon". Keys lie as in a window, values behind an odd offset; with
    `bits` rows are any bits, NaN included.
    """
    import importlib

    import torch

    from oscar_torch import quantize

    module = importlib.import_module(f"oscar_torch.triton_kernels.{kernel}")
    layer_rotation = make_case(rotation, (1,), 1, 1, device)[1]
    heads, head_dim = rotation["key_transform"].shape[:2]
    rng = np.random.default_rng(2)
    count = pages * 64 * heads * head_dim
    raw = torch.from_numpy(rng.integers(-(2**15), 2**15, 2 * count + 1).astype(np.int16))
    rows = raw.view(torch.bfloat16) if bits else torch.from_numpy(rng.normal(0, 3, 2 * count + 1)).bfloat16()
    rows = rows.to(layer_rotation.key_transform.device)
    key = rows[:count].view(pages, heads, 64, head_dim).transpose(1, 2)
    value = rows[count + 1 :].view(pages, 64, heads, head_dim)
    want = quantize.quantize_page_pair(key, value, layer_rotation)
    pair = module.quantize_page_pair(key, value, layer_rotation)
    key_codes, key_scale, key_page_mean = module.quantize_key_pages(
        key, layer_rotation.key_transform, layer_rotation.key_multiplier
    )
    value_codes, value_scale = module.quantize_value_pages(
        value, layer_rotation.value_transform, layer_rotation.value_multiplier, layer_rotation.value_mean
    )
    alone = {
        **{"key_codes": key_codes, "key_scale": key_scale, "key_page_mean": key_page_mean},
        **{"value_codes": value_codes, "value_scale": value_scale},
    }
    return [
        f"{name}, {way}"
        for way, got in (("pair", pair), ("alone", alone))
        for name, array in want.items()
        if not torch.equal(got[name].view(torch.int16), array.view(torch.int16))
    ]


def make_feedback(rng: np.random.Generator, transform: Any, steps: int = 0, extreme: bool = False) -> Any:
    """Feedback of full size for a Torch transform [K, D, D], one matrix and shift per head.

    In 4 blocks (3 where 4 do not fit) unless `steps` says how many; `extreme`: every entry 127 or -127.
    """
    import torch

    from oscar_torch.quantize import Feedback

    heads, head_dim = transform.shape[:2]
    steps = steps or (3 if head_dim % 64 else 4)
    block = np.arange(head_dim) // (head_dim // steps)
    matrix = rng.integers(-127, 128, (heads, head_dim, head_dim))
    if extreme:
        matrix = np.where(matrix < 0, -127, 127)
    matrix = matrix * (block[:, None] < block[None])
    shift = torch.from_numpy(rng.integers(0, 8, heads).astype(np.int32)).to(transform.device)
    return Feedback(torch.from_numpy(matrix.astype(np.int8)).to(transform.device), shift, steps)


def sequential_differences(
    head_dim: int,
    fed: tuple[str, ...],
    device: str = "cpu",
    kernel: str = "quantize.triton",
    *,
    heads: int = 2,
    pages: int = 3,
    steps: int = 0,
    extreme: bool = False,
) -> list[str]:
    """INT2 arrays in which a quantizer and the reference differ, by sequential rounding or to the nearest.

    kernel: "quantize.triton", "quantize.gluon" or, of Gluon in NumPy, "". Rows of any bits, normal ones and
    hostile ones. Roles `fed` have feedback as of `make_feedback`, one matrix per head.
    """
    import dataclasses
    import importlib

    import torch

    from oscar_torch import quantize
    from parity_tests.conformance import rows as row_families

    module = importlib.import_module(
        f"oscar_torch.triton_kernels.{kernel}" if kernel else "parity_tests.kernels.gluon_emulator"
    )
    rng = np.random.default_rng(head_dim)
    layer_rotation = make_case(row_families.make_rotation(rng, heads, head_dim), (1,), 1, 1, device)[1]
    place = layer_rotation.key_transform.device
    transform = layer_rotation.key_transform
    feedback = {f"{role}_feedback": make_feedback(rng, transform, steps, extreme) for role in fed}
    layer_rotation = dataclasses.replace(layer_rotation, **feedback)
    shape = (pages, 64, heads, head_dim)
    normal = torch.from_numpy(rng.normal(0, 3, shape)).bfloat16()
    bits = torch.from_numpy(rng.integers(-(2**15), 2**15, shape).astype(np.int16)).view(torch.bfloat16)
    hostile = normal.clone()
    hostile[:, ::3, :, 5] *= 3000  # one channel is all that counts: its error saturates
    hostile[:, 1::3, :, :-1] = 0
    hostile[-1] = 0
    found = []
    for pair in ((normal, bits), (bits, normal), (hostile, hostile)):
        key, value = (rows.to(place) for rows in pair)
        want = quantize.quantize_page_pair(key, value, layer_rotation)
        got = module.quantize_page_pair(key, value, layer_rotation)
        found += [
            n for n, x in want.items() if not torch.equal(got[n].view(torch.int16), x.view(torch.int16))
        ]
    return found
