"""As much of vLLM 0.21 as backend.py imports: base classes with its signatures, and settings as plain values.

`scripts/check_vllm.py --only signatures` compares the real classes with ours where vLLM is installed; here
the same lines are run where it is not.
"""

import dataclasses
import enum
import importlib
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class AttentionBackend:
    supported_kv_cache_dtypes: ClassVar[list[str]] = []

    @classmethod
    def validate_configuration(cls, **options: Any) -> list[str]:
        raise NotImplementedError


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    pass


class AttentionMetadataBuilder[T]:
    reorder_batch_threshold: int | None = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def _init_reorder_batch_threshold(self, reorder_batch_threshold: int | None = 1) -> None:
        self.reorder_batch_threshold = reorder_batch_threshold


class AttentionImpl[T]:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class TQFullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: Any
    tq_slot_size: int

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.tq_slot_size


class GPUModelRunner:
    """Rows of the batch as vLLM's runner keeps them: those scheduled, in the order given."""

    def __init__(self, config: Any) -> None:
        self.compilation_config = config.compilation_config
        self.input_batch = types.SimpleNamespace(req_ids=[])

    def _update_states(self, scheduler_output: Any) -> None:
        self.input_batch.req_ids = list(scheduler_output.num_scheduled_tokens)


class Settings:
    """What a fake engine is started with; `rank` of `size` is asked for by the backend."""

    def __init__(self) -> None:
        self.config: Any = None
        self.rank, self.size = 0, 1
        self.registered: dict[str, str] = {}
        self.version = "0.21.0"


def modules(settings: Settings) -> dict[str, types.ModuleType]:
    """Modules by name, as `import` finds them."""
    made: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.envs": {"VLLM_USE_V2_MODEL_RUNNER": False},
        "vllm.config": {"get_current_vllm_config": lambda: settings.config},
        "vllm.distributed": {
            "get_tensor_model_parallel_rank": lambda: settings.rank,
            "get_tensor_model_parallel_world_size": lambda: settings.size,
        },
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend,
            "AttentionCGSupport": AttentionCGSupport,
            "AttentionImpl": AttentionImpl,
            "AttentionMetadata": AttentionMetadata,
            "AttentionMetadataBuilder": AttentionMetadataBuilder,
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": types.SimpleNamespace(CUSTOM="CUSTOM"),
            "register_backend": settings.registered.__setitem__,
        },
        "vllm.v1.kv_cache_interface": {"TQFullAttentionSpec": TQFullAttentionSpec},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": GPUModelRunner},
    }
    found = {}
    for name, names in made.items():
        found[name] = types.ModuleType(name)
        vars(found[name]).update(names)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(found[parent], child, found[name])
    return found


@contextmanager
def vllm(settings: Settings) -> Iterator[types.ModuleType]:
    """`oscar_torch.vllm.backend` on these modules; nothing of it stays."""
    ours = "oscar_torch.vllm.backend"
    names = modules(settings)
    kept = {name: sys.modules.pop(name, None) for name in (*names, ours)}
    update_states = GPUModelRunner._update_states
    sys.modules.update(names)
    try:
        yield importlib.import_module(ours)
    finally:
        GPUModelRunner._update_states = update_states
        for name, module in kept.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def make_config(**changes: Any) -> Any:
    """A VllmConfig of a model of 2 layers, 4 query and 2 key/value heads of 64 channels; nested by dots."""
    space = types.SimpleNamespace
    config = space(
        additional_config={"oscar": {"rotations": "hadamard", "recent_tokens": 64}},
        cache_config=space(
            enable_prefix_caching=False, cache_dtype="auto", block_size=64, user_specified_block_size=False,
            kv_sharing_fast_prefill=False, kv_offloading_size=None, gpu_memory_utilization=0.9,
        ),
        parallel_config=space(
            pipeline_parallel_size=1, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            use_ubatching=False, tensor_parallel_size=1,
        ),
        model_config=space(
            use_mla=False, is_hybrid=False, is_encoder_decoder=False, model="org/model", revision=None,
            max_model_len=700, get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 64,
            get_num_attention_heads=lambda parallel: 4 // parallel.tensor_parallel_size,
            get_total_num_hidden_layers=lambda: 2,
        ),
        scheduler_config=space(max_num_seqs=5),
        device_config=space(device_type="cpu"),
        load_config=space(load_format="dummy"),
        compilation_config=space(static_forward_context={}),
        speculative_config=None,
        kv_transfer_config=None,
    )  # fmt: skip
    for path, value in changes.items():
        *folders, name = path.split("__")
        place = config
        for folder in folders:
            place = getattr(place, folder)
        assert hasattr(place, name), path
        setattr(place, name, value)
    return config
