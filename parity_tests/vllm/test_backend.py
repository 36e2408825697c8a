"""The backend as vLLM uses it, on stand-ins for vLLM's classes: start, blocks, steps, refusals, ranks."""

import dataclasses
import importlib.metadata
import types
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import CheckpointError, ConfigError  # noqa: E402
from oscar_torch.core.fingerprint import fingerprint_weights  # noqa: E402
from oscar_torch.core.rotation_header import FINGERPRINT_FIELD, RotationHeader  # noqa: E402
from oscar_torch.rotations.bases import BASIS_VERSION, hadamard_matrix  # noqa: E402
from oscar_torch.rotations.rotation import (  # noqa: E402
    LayerRotation,
    RotationSet,
    hadamard_rotation,
    make_layer_rotation,
)
from oscar_torch.rotations.store import save_safetensors  # noqa: E402
from oscar_torch.vllm import plugin, register  # noqa: E402
from oscar_torch.vllm.identity import (  # noqa: E402
    checkpoint_fingerprint,
    head_range,
    model_folder,
    read_rotations,
    slice_rotation,
)
from oscar_torch.vllm.layer import workspace_bytes  # noqa: E402
from oscar_torch.vllm.options import ServeOptions, check_engine, check_layer, read_options  # noqa: E402

from . import fakes  # noqa: E402
from .engine import Engine  # noqa: E402

NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def start(backend: Any, settings: fakes.Settings, config: Any, blocks: int = 20) -> list[Any]:
    """The layers of a fake engine, loaded, with memory for blocks: what vLLM does until it serves."""
    settings.config = config
    context = config.compilation_config.static_forward_context
    for name in NAMES:
        heads = 4 // settings.size, max(1, 2 // settings.size)
        impl = backend.OscarAttentionBackend.get_impl_cls()(heads[0], 64, 0.125, heads[1], None, None, "auto")
        context[name] = types.SimpleNamespace(impl=impl, layer_name=name)
    layers = list(context.values())
    for layer in layers:
        layer.impl.process_weights_after_loading(torch.bfloat16)
    for layer in layers:
        spec = layer.get_kv_cache_spec(config)
        shape = backend.OscarAttentionBackend.get_kv_cache_shape(
            blocks + 1, spec.block_size, spec.num_kv_heads, spec.head_size
        )
        raw = torch.zeros((blocks + 1) * spec.page_size_bytes, dtype=torch.int8)
        layer.kv_cache = raw.view(spec.dtype).view(shape)
    return layers


def serve(
    backend: Any, layers: list[Any], config: Any, budget: int, blocks: int
) -> tuple[dict[str, list[Any]], int]:
    """Runs requests to their end; per request the outputs of both layers in order; preemptions."""
    builder = backend.OscarAttentionBackend.get_builder_cls()(
        layers[0].get_kv_cache_spec(config), NAMES, config, torch.device("cpu")
    )
    assert builder.reorder_batch_threshold == 1
    runner = fakes.GPUModelRunner(config)
    engine = Engine(blocks=blocks, sequences=5, budget=budget, seed=4)
    for name, prompt, total in (("a", 430, 434), ("b", 60, 70), ("c", 190, 205), ("d", 64, 68)):
        engine.add(name, prompt, total)
    outputs: dict[str, dict[int, Any]] = {}
    for batch in engine.run():
        runner._update_states(
            types.SimpleNamespace(
                finished_req_ids=set(batch.ended), preempted_req_ids=set(batch.left) - set(batch.ended),
                num_scheduled_tokens={r.name: n for r, n in zip(batch.requests, batch.counts)},
            )
        )  # fmt: skip
        if not batch.requests:
            continue
        starts = [0]
        for count in batch.counts:
            starts.append(starts[-1] + count)
        after = torch.tensor(
            [r.computed + n for r, n in zip(batch.requests, batch.counts)], dtype=torch.int32
        )
        table = torch.zeros((len(after), 11), dtype=torch.int32)
        for row, request in enumerate(batch.requests):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        starts = torch.tensor(starts, dtype=torch.int32)
        common = types.SimpleNamespace(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=after,
            seq_lens_cpu_upper_bound=after, block_table_tensor=table,
        )  # fmt: skip
        metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
        for index, layer in enumerate(layers):
            rows = [
                rows_of(r.name, index)[:, r.computed : r.computed + n]
                for r, n in zip(batch.requests, batch.counts)
            ]
            query, key, value = torch.cat(rows, dim=1)
            shape = (len(query), -1, 64)
            query, key, value = query.view(shape), key[:, :128].reshape(shape), value[:, :128].reshape(shape)
            out = layer.impl.forward(
                layer, query, key, value, layer.kv_cache, metadata, output=torch.full_like(query, torch.nan)
            )
            for row, request in enumerate(batch.requests):
                place = outputs.setdefault(request.name, {})
                for i in range(batch.counts[row]):
                    place[2 * (request.computed + i) + index] = out[int(starts[row]) + i]
    assert layers[0].impl.state.slots.used == 0
    rows = {name: [place[i] for i in sorted(place)] for name, place in outputs.items()}
    return rows, engine.preemptions


def rows_of(name: str, layer: int) -> Any:
    generator = torch.Generator().manual_seed(ord(name) * 2 + layer)
    return torch.randn(3, 700, 256, generator=generator).bfloat16()


def test_an_engine_from_start_to_end() -> None:
    """Mixed batches give what one request at a time gives, whatever is preempted."""
    settings = fakes.Settings()
    with fakes.vllm(settings) as backend:
        config = fakes.make_config()
        layers = start(backend, settings, config)
        together, preempted = serve(backend, layers, config, budget=500, blocks=20)
        assert not preempted
        assert [len(together[name]) for name in "abcd"] == [868, 140, 410, 136]
        assert all(bool(torch.isfinite(torch.stack(rows)).all()) for rows in together.values())
        state = layers[0].impl.state
        assert state is layers[1].impl.state and list(state.memories) == NAMES
        spec = layers[0].get_kv_cache_spec(config)
        assert spec.page_size_bytes == layers[0].kv_cache.shape[1] == 64 * 2 * 38

        config = fakes.make_config(cache_config__gpu_memory_utilization=0.5)
        layers = start(backend, settings, config, blocks=12)
        tight, preempted = serve(backend, layers, config, budget=500, blocks=12)
        assert preempted
        for name, rows in together.items():  # sums of float32 in another order, rounded to bf16
            torch.testing.assert_close(torch.stack(rows), torch.stack(tight[name]), rtol=2**-7, atol=1e-4)


def test_profiling_takes_the_workspace_and_returns_zeros() -> None:
    settings = fakes.Settings()
    with fakes.vllm(settings) as backend:
        layer = start(backend, settings, fakes.make_config())[0]
        query = torch.randn(8, 4, 64).bfloat16()
        out = layer.impl.forward(
            layer, query, query[:, :2], query[:, :2], torch.tensor([]), None, torch.ones(8, 4, 64)
        )
        assert not out.any()
        with pytest.raises(NotImplementedError, match="quantized outputs"):
            layer.impl.forward(layer, query, query, query, query, None, out, output_scale=torch.ones(1))
    config = CacheConfig(8, 32, 128)
    assert workspace_bytes(config, 8192, 8192) == 8192 * 32 * 128 * 20
    assert workspace_bytes(config, 8192, 106_496) == 8192 * 32 * 128 * 26 + 4 * 32_768 * 8 * 128


def test_the_backend_describes_itself() -> None:
    with fakes.vllm(fakes.Settings()) as backend:
        ours = backend.OscarAttentionBackend
        assert ours.get_name() == "CUSTOM" and ours.supported_dtypes == [torch.bfloat16]
        assert [ours.supports_block_size(n) for n in (None, 64, 16, 128)] == [True, True, False, False]
        assert ours.get_supported_kernel_block_sizes() == [64]
        assert not ours.supports_compute_capability(types.SimpleNamespace(major=7))
        assert backend.OscarMetadataBuilder._cudagraph_support.name == "UNIFORM_SINGLE_TOKEN_DECODE"
        with pytest.raises(ConfigError, match="block_size = 16, allowed: 64"):
            ours.get_kv_cache_shape(10, 16, 8, 128)
        backend.follow_requests()
        once = fakes.GPUModelRunner._update_states
        backend.follow_requests()
        assert fakes.GPUModelRunner._update_states is once
        runner = fakes.GPUModelRunner(fakes.make_config())  # an engine with another backend
        runner._update_states(types.SimpleNamespace(num_scheduled_tokens={"a": 1}))
        assert runner.input_batch.req_ids == ["a"]


def test_layers_that_do_not_belong_together_are_refused() -> None:
    settings = fakes.Settings()
    with fakes.vllm(settings) as backend:
        config = fakes.make_config()
        layers = start(backend, settings, config)
        builder, spec = backend.OscarMetadataBuilder, layers[0].get_kv_cache_spec(config)
        with pytest.raises(ConfigError, match="a group of the layers"):
            builder(spec, NAMES[:1], config, torch.device("cpu"))
        with pytest.raises(ConfigError, match="in every layer"):
            backend.OscarAttentionImpl(4, 128, 0.1, 2)
        with pytest.raises(ConfigError, match="names with one number"):
            backend._layer_number("model.layers.0.experts.1.attn")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("cache_config__enable_prefix_caching", True, "--no-enable-prefix-caching"),
        ("cache_config__cache_dtype", "fp8", "kv_cache_dtype = 'fp8', allowed: auto or bfloat16"),
        ("speculative_config", object(), "speculative decoding"),
        ("parallel_config__pipeline_parallel_size", 2, "pipeline_parallel_size = 2, allowed: 1"),
        ("parallel_config__decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config__use_ubatching", True, "micro-batches"),
        ("kv_transfer_config", object(), "KV transfer"),
        ("cache_config__kv_offloading_size", 4, "KV transfer or offloading"),
        ("cache_config__kv_sharing_fast_prefill", True, "kv_sharing_fast_prefill"),
        ("model_config__use_mla", True, "latent attention"),
        ("model_config__is_hybrid", True, "hybrid model"),
        ("model_config__is_encoder_decoder", True, "encoder-decoder"),
        ("additional_config", {}, "no section 'oscar'"),
        ("additional_config", {"oscar": {"rotation": "x"}}, "oscar has 'rotation', allowed: rotations"),
        ("additional_config", {"oscar": {"sink_tokens": 64}}, "rotations = None"),
        ("additional_config", {"oscar": {"rotations": "hadamard", "recent_tokens": 100}}, "multiple of 64"),
    ],
)
def test_settings_that_cannot_be_served(setting: str, value: Any, words: str) -> None:
    settings = fakes.Settings()
    with fakes.vllm(settings) as backend:
        with pytest.raises(ConfigError, match=words):
            start(backend, settings, fakes.make_config(**{setting: value}))


def test_more_refusals() -> None:
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER = 1, allowed: 0"):
        check_engine(fakes.make_config(), second_runner=True)
    config = fakes.make_config(cache_config__block_size=32, cache_config__user_specified_block_size=True)
    with pytest.raises(ConfigError, match="block_size = 32, allowed: 64"):
        check_engine(config)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"head_dim": 96}, "head_dim = 96, allowed: 64, 128, 256"),
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 1024}, "sliding_window = 1024, allowed: full attention"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap = 30.0"),
        ({"attn_type": "encoder"}, "attention of type 'encoder'"),
        ({"kv_sharing_target_layer_name": "x"}, "reads the keys of 'x'"),
        ({"sinks": object()}, "attention with sinks"),
    ]
    for options, words in cases:
        with pytest.raises(ConfigError, match=words):
            check_layer(**cast(Any, {"head_dim": 64} | options))
    assert read_options({"oscar": {"rotations": "x", "sink_tokens": 128}}) == ServeOptions("x", 128)


@pytest.mark.parametrize(
    ("version", "served"),
    [("0.21.0", True), ("0.21.3", True), ("0.21.0rc1", True), ("0.21", True), ("0.2.1", False),
     ("0.22.0", False), ("1.21.0", False), ("0.210.0", False)],
)  # fmt: skip
def test_versions(version: str, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another minor version keeps its own backends; asking for ours names the versions."""
    settings = fakes.Settings()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with fakes.vllm(settings):
        register()
    assert settings.registered == {"CUSTOM": plugin.BACKEND if served else plugin.REFUSAL}
    if not served:
        (reason,) = plugin.RefusedBackend.validate_configuration(head_size=128)
        assert reason.startswith(f"vLLM {version}, allowed: 0.21.x")


# Ranks and identity.


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [(8, 1, [range(8)]), (8, 2, [range(0, 4), range(4, 8)]), (2, 4, [range(0, 1)] * 2 + [range(1, 2)] * 2)],
)
def test_ranks_take_their_heads(heads: int, size: int, expected: list[range]) -> None:
    assert [head_range(heads, rank, size) for rank in range(size)] == expected
    with pytest.raises(ConfigError, match="tensor_parallel_size = 3"):
        head_range(8, 0, 3)


def signed_rotation(heads: int) -> LayerRotation:
    """A rotation that differs from head to head."""
    generator = torch.Generator().manual_seed(heads)
    signs = torch.randint(0, 2, (2, heads, 64), generator=generator).numpy() * 2.0 - 1.0
    key, value = ([s[:, None] * hadamard_matrix(64) for s in role] for role in signs)
    return make_layer_rotation(key, value)


def test_a_rank_computes_its_heads_of_the_whole(tmp_path: Path) -> None:
    """Two ranks of one key/value head each, side by side, are the engine of one rank, byte for byte."""
    path = tmp_path / "set.safetensors"
    save(path, {0: signed_rotation(2), 1: signed_rotation(2)})
    results = []
    for size in (1, 2):
        outputs, blocks = [], []
        for rank in range(size):
            settings = fakes.Settings()
            settings.rank, settings.size = rank, size
            with fakes.vllm(settings) as backend:
                config = fakes.make_config(
                    parallel_config__tensor_parallel_size=size,
                    additional_config={
                        "oscar": {"rotations": str(path), "recent_tokens": 64, "model_id": "set"}
                    },
                )
                layers = start(backend, settings, config)
                state = layers[0].impl.state
                assert len(state.heads) == 2 // size
                settled = backend.OscarMetadataBuilder(None, NAMES, config, torch.device("cpu"))
                state.seat(["a"])
                starts, after = (
                    torch.tensor([0, 400], dtype=torch.int32),
                    torch.tensor([400], dtype=torch.int32),
                )
                table = torch.arange(1, 12, dtype=torch.int32)[None]
                metadata = settled.build(0, types.SimpleNamespace(
                    query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=after,
                    seq_lens_cpu_upper_bound=after, block_table_tensor=table))  # fmt: skip
                generator = torch.Generator().manual_seed(7)
                query = torch.randn(400, 4, 64, generator=generator).bfloat16()
                key, value = (torch.randn(400, 2, 64, generator=generator).bfloat16() for _ in "kv")
                own = slice(rank * 2 // size, (rank + 1) * 2 // size)
                mine = query[:, 2 * own.start : 2 * own.stop], key[:, own], value[:, own]
                out = layers[1].impl.forward(
                    layers[1], *mine, layers[1].kv_cache, metadata, torch.empty_like(mine[0])
                )
                outputs.append(out)
                memory = state.memories[NAMES[1]]
                from oscar_torch.vllm.pages import view_pages

                blocks.append(view_pages(layers[1].kv_cache, len(state.heads), 64))
                blocks[-1] |= {"window_key": memory.window_key, "window_value": memory.window_value}
        arrays = {name: torch.cat([b[name] for b in blocks], dim=1) for name in blocks[0]}
        results.append((torch.cat(outputs, dim=1), arrays))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=2**-7, atol=1e-4)
    for name, array in results[0][1].items():
        assert torch.equal(array, results[1][1][name]), name
    assert int((results[0][1]["key_scale"] != 0).sum()) == 4 * 2 * 64, "400 tokens have 4 pages of history"


def save(path: Path, layers: dict[int, LayerRotation], **extra: Any) -> None:
    header = RotationHeader(
        model_id="org/set", layers=tuple(layers), num_query_heads=4, num_key_value_heads=2, head_dim=64,
        rope="half", basis="hadamard", basis_version=BASIS_VERSION, extra=extra,
    )  # fmt: skip
    save_safetensors(RotationSet(header, layers), path)


def test_a_shared_rotation_is_not_sliced() -> None:
    shared = hadamard_rotation(1, 64)
    assert slice_rotation(shared, range(3, 4)) is shared
    whole = signed_rotation(4)
    part = slice_rotation(whole, range(1, 3))
    for field in dataclasses.fields(part):
        if (array := getattr(whole, field.name)) is not None:
            assert torch.equal(getattr(part, field.name), array[1:3])


def test_whose_rotations(tmp_path: Path) -> None:
    """The fingerprint of the files decides; without one the names; other heads are refused."""
    from safetensors.torch import save_file

    geometry = CacheConfig(2, 4, 64)
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": torch.randn(100, 32, generator=generator),
        "model.layers.0.self_attn.k_proj.weight": torch.randn(128, 32, generator=generator),
        "model.layers.10.self_attn.qkv_proj.weight": torch.randn(512, 32, generator=generator),
        "model.layers.2.self_attn.k_proj.weight": torch.randn(128, 32, generator=generator),
    }
    folder = tmp_path / "model"
    folder.mkdir()
    names = list(weights)
    save_file({name: weights[name] for name in names[:2]}, folder / "model-1.safetensors")
    save_file({name: weights[name] for name in names[2:]}, folder / "model-2.safetensors")

    def as_bytes(rows: Any) -> bytes:
        return rows.bfloat16().view(torch.int16).numpy().tobytes()

    expected = fingerprint_weights(
        geometry, 11,
        {"embedding": as_bytes(weights[names[0]][:64]), "first_key": as_bytes(weights[names[1]]),
         "last_key": as_bytes(weights[names[2]][256:384])},
    )  # fmt: skip
    assert model_folder(str(folder), None) == folder and model_folder("org/absent-model", None) is None
    found = checkpoint_fingerprint(folder, geometry, 11)
    assert found == expected
    assert checkpoint_fingerprint(None, geometry, 11) is None

    path = tmp_path / "set.safetensors"
    save(path, {0: signed_rotation(2), 1: signed_rotation(2)}, **{FINGERPRINT_FIELD: expected})
    options = ServeOptions(str(path))
    assert set(read_rotations(options, geometry, [0, 1], str(folder), fingerprint=found)) == {0, 1}
    with pytest.raises(CheckpointError, match="were made for other weights"):
        read_rotations(options, geometry, [0, 1], str(folder), fingerprint="0" * 32)
    with pytest.raises(CheckpointError, match="the rotations are of model 'org/set', this is 'org/other'"):
        read_rotations(options, geometry, [0, 1], "org/other")
    read_rotations(
        dataclasses.replace(options, model_id="set"), geometry, [0, 1], "org/other", fingerprint="0"
    )
    with pytest.raises(CheckpointError, match="no layer 2"):
        read_rotations(options, geometry, [0, 1, 2], "org/set")
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        read_rotations(options, CacheConfig(4, 4, 64), [0, 1], "org/set")
    quantized = {name: weights[name].to(torch.int8) for name in names}
    for file in folder.iterdir():
        file.unlink()
    save_file(quantized, folder / "model.safetensors")
    assert checkpoint_fingerprint(folder, geometry, 11) is None
