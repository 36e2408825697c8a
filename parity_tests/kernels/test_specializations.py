"""How many kernels a prefill makes: Triton compiles and cuDNN plans per distinct call, and each costs a wait.

Kernels are replaced by recorders that run nothing; everything around them is the real path of a GPU.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("transformers")

from oscar_torch import ops  # noqa: E402
from oscar_torch.cache import allocate_layer_cache  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.hf.layer import OscarLayer  # noqa: E402
from oscar_torch.rotations.rotation import identity_rotation  # noqa: E402
from oscar_torch.triton_kernels.append import gluon as append_gluon  # noqa: E402
from oscar_torch.triton_kernels.append import triton as append_triton  # noqa: E402
from oscar_torch.triton_kernels.decode import gluon as decode_gluon  # noqa: E402
from oscar_torch.triton_kernels.decode import triton as decode_triton  # noqa: E402
from oscar_torch.triton_kernels.launch import tensors  # noqa: E402
from oscar_torch.triton_kernels.launch.repeated import Launch, remembered  # noqa: E402
from oscar_torch.triton_kernels.prefill import dequantize, flash  # noqa: E402
from oscar_torch.triton_kernels.prefill import triton as chunk  # noqa: E402
from oscar_torch.triton_kernels.quantize import triton as quantize  # noqa: E402


@dataclasses.dataclass
class Recorder:
    """In place of a Triton kernel: notes by what Triton would look for a compiled one."""

    kernel: Any
    keys: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **options: Any) -> None:
        values = dict(zip(self.kernel.arg_names, arguments)) | options
        parameters = {parameter.name: parameter for parameter in self.kernel.params}
        self.keys.add(tuple(self.key(parameters.get(name), value) for name, value in values.items()))

    def key(self, parameter: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            aligned = value.data_ptr() % 16 == 0 or parameter.do_not_specialize_on_alignment
            return value.dtype, aligned
        if parameter is None or parameter.is_constexpr:
            return value
        if isinstance(value, int) and not parameter.do_not_specialize:
            return value == 1, value % 16 == 0
        return type(value)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The kernels of a prefill as on a GPU that is no Hopper, and the shapes that flash attention gets."""
    found: dict[str, Any] = {"history": set(), "own": set()}
    for module, name in (
        (chunk, "_chunk_kernel"),
        (chunk, "_rotate_kernel"),
        (dequantize, "_dequantize_kernel"),
        (dequantize, "_rotate_kernel"),
        (quantize, "_bulk_kernel"),
    ):
        found[module.__name__ + name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, found[module.__name__ + name])
    monkeypatch.setattr(tensors, "_capability", lambda tensor: (8, 0))
    monkeypatch.setattr(ops, "_best", lambda device: ("flash", "triton"))

    def shapes(
        query: Any, key: Any, value: Any, scale: float, causal: bool = False, cudnn: bool = True
    ) -> Any:
        if cudnn:  # which plans every shape anew
            kind = "own" if causal else "history"
            found[kind].add((query.shape, key.shape, query.stride(), key.stride()))
        return torch.zeros_like(query), query.new_zeros(query.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(flash, "flash", shapes)
    yield found


def prefill(tokens: int, batch: int, **options: Any) -> None:
    """One layer through a prompt of `tokens` tokens, then through a chunk as a second turn has it."""
    layer = OscarLayer(0, CacheConfig(1, 2, 128), identity_rotation(1, 128), **options)
    for length in (tokens, 1500, 70):
        query, key = (torch.zeros(batch, length, n, 128, dtype=torch.bfloat16) for n in (2, 1))
        layer.attend(query, key, key, None, softmax_scale=0.1)


def test_a_prefill_compiles_few_kernels(recorders: dict[str, Any]) -> None:
    """Whatever the length and the batch, with any table: the same kernels, and few shapes for cuDNN."""
    counts = []
    for tokens, batch, options in (
        (32_768, 1, {"max_length": 40_000}),
        (38_123, 1, {}),
        (9_001, 2, {"max_length": 18_000}),
    ):
        prefill(tokens, batch, **options)
        counts.append([len(r.keys) for n, r in recorders.items() if n not in ("history", "own")])
    sizes = {key[2] for _, key, _, _ in recorders["history"]}
    assert sizes == {2048, 4096, 8192, 16_384, 32_768}
    rows = {2048, 8192}  # of chunks of 1500 tokens, and of 5355 and 8192
    assert {query[2] for query, *_ in recorders["history"]} == {2 * n for n in rows}
    assert {query[2] for query, *_ in recorders["own"]} == rows and len(recorders["own"]) == len(rows)
    # The chunk kernel with history and rows given and, for short chunks, without.
    assert counts == [[2, 1, 1, 1, 1]] * 3


def test_blocks_cover_all_pages_once() -> None:
    """Every page in one block, sizes of the list, less than a step to spare and that in the last block."""
    largest = flash.BLOCK_TOKENS // 64
    allowed = {flash.SIZE_STEP << n for n in range(10) if flash.SIZE_STEP << n <= largest}
    for pages in (1, 31, 32, 33, 95, 475, 511, 512, 513, 1531):
        blocks = flash.blocks_of(pages)
        assert {size for *_, size in blocks} <= allowed
        assert [first for first, *_ in blocks] == [0, *(end for _, end, _ in blocks[:-1])]
        assert blocks[-1][1] == pages
        spare = [size - (end - first) for first, end, size in blocks]
        assert not any(spare[:-1]) and spare[-1] < flash.SIZE_STEP
    assert flash.blocks_of(0) == []


class Compiled:
    """A kernel whose launches are noted: those of the dispatcher by name, those past it in order."""

    arg_names = ("a_ptr", "size", "b_ptr", "D")

    def __init__(self) -> None:
        self.dispatched: list[dict[str, Any]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        assert grid == (3, 2, 1)

        def launch(*arguments: Any, **named: Any) -> Any:
            if named:
                self.dispatched.append(named)
            else:
                self.direct.append(arguments)
            return self

        return launch


def test_repeated_launches_pass_what_the_first_passed() -> None:
    """Past the dispatcher the same arguments in the kernel's order; what is not aligned goes through it."""
    kernel, fixed = Compiled(), torch.zeros(8)
    launch = Launch(kernel, (3, 2), ("b_ptr",), {"a_ptr": fixed, "size": 7, "D": 64}, num_warps=4)
    rows = [torch.zeros(8) for _ in range(3)]
    assert launch(rows[0]) is kernel and launch(rows[1]) is None
    expected = {"a_ptr": fixed, "size": 7, "D": 64, "num_warps": 4}
    assert kernel.dispatched == [expected | {"b_ptr": rows[0]}]
    assert kernel.direct == [(fixed, 7, rows[1], 64)]
    odd = rows[2][1:]
    assert launch(odd) is kernel
    assert kernel.dispatched[1] == expected | {"b_ptr": odd} and len(kernel.direct) == 1


def test_launches_are_prepared_anew_for_other_arrays() -> None:
    """A pool that grew, another rotation, another cache object: what was prepared is forgotten."""
    cache = allocate_layer_cache(CacheConfig(1, 2, 64), 1, 500)
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    first, second = object(), object()
    found = [remembered(cache, first, key, make) for key in (("a",), ("a",), ("b",))]
    found.append(remembered(cache, second, ("a",), make))
    cache.page_table = cache.page_table.clone()
    found.append(remembered(cache, second, ("a",), make))
    found.append(remembered(dataclasses.replace(cache), second, ("a",), make))
    assert found == [0, 0, 1, 2, 3, 4]
    assert remembered(cache, second, ("a",), make) == 3


def test_kernels_are_launched_where_their_tensors_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, which with a device map is not that of every layer."""
    current = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def device(place: Any) -> Iterator[None]:
        current.append(place)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1].index)
    monkeypatch.setattr(torch.cuda, "device", device)
    for index in (0, 1):
        place = torch.device("cuda", index)
        assert ops._on_device(lambda: current[-1], place)() == place
    assert current == [torch.device("cuda", 0)]


@pytest.mark.parametrize("batch", [1, 200])
def test_prepared_launches_name_every_argument_once(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Of all kernels of a step, plain and for Hopper, with one merging launch and with two."""
    monkeypatch.setattr(tensors, "_capability", lambda tensor: (9, 0))
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cache, rotation = allocate_layer_cache(CacheConfig(1, 2, 64), batch, 500), identity_rotation(1, 64)
    query = torch.zeros((batch, 2, 64), dtype=torch.bfloat16)
    launches = [append_gluon._launch(cache, rotation), append_triton._launch(cache, rotation)]
    for module in (decode_gluon, decode_triton):
        step = module._Step(query, cache, rotation, 0.1, None, None, torch.bfloat16)
        launches += [step.rotate.launch, step.stage, step.merge.launch]
        launches += [step.merge.back.launch] if step.merge.back else []
    assert len(launches) == (8 if batch == 1 else 10)
    for launch in launches:
        assert sorted([*launch.changing, *launch.fixed]) == sorted(launch.kernel.arg_names)
