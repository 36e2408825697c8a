"""vLLM's classes, filled in: the backend, its metadata, and the attention of one layer. Made for vLLM 0.21.

What is decided here is how the engine's words translate; everything else stands in the files beside, which
do not know vLLM. The engine is changed in one place: `_update_states` of its model runner also tells which
requests left and which rows the next step has, since a backend is told neither (`follow_requests`).
"""

import dataclasses
import functools
from typing import Any, ClassVar

import torch
import vllm.envs as envs  # pyright: ignore[reportMissingImports]
from torch import Tensor
from vllm.config import get_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.distributed import (  # pyright: ignore[reportMissingImports]
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import TQFullAttentionSpec  # pyright: ignore[reportMissingImports]

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from .layer import attend_step, workspace_bytes
from .options import CACHE_DTYPES, HEAD_DIMS, check_layer
from .pages import block_bytes, token_bytes
from .state import EngineState
from .step import Step, StepTables


class OscarAttentionBackend(AttentionBackend):
    """Attention over INT2 pages, chosen with --attention-backend CUSTOM."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES)
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM knows backends that are not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type["OscarAttentionImpl"]:
        """The class of one layer's attention."""
        return OscarAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["OscarMetadataBuilder"]:
        """The class that turns a step of the engine into tables."""
        return OscarMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        """Tokens of a block."""
        return [fmt.PAGE_TOKENS]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """A page, exactly."""
        return block_size in (None, fmt.PAGE_TOKENS)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """What all kernels serve."""
        return list(HEAD_DIMS)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and newer, where the kernels run."""
        return capability.major >= 8

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Bytes [blocks, bytes of a block]: `pages.view_pages` says what they are."""
        if block_size != fmt.PAGE_TOKENS:
            raise ConfigError(f"block_size = {block_size}, allowed: {fmt.PAGE_TOKENS}")
        return num_blocks, block_bytes(num_kv_heads, head_size)


@dataclasses.dataclass
class OscarMetadata(AttentionMetadata):
    """What layers get of a step."""

    step: Step


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Refills the tables before every step; batches of single tokens may be recorded as CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        state = find_state(vllm_config.compilation_config.static_forward_context)
        if state is None or set(layer_names) != set(state.memories):
            known = () if state is None else sorted(state.memories)
            raise ConfigError(
                f"oscar-kv in vLLM: a group of the layers {layer_names}, allowed: all of {known}"
            )
        self.state = state
        self.tables = StepTables(
            state.local, len(layer_names), state.slots.count, vllm_config.model_config.max_model_len, device
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> OscarMetadata:
        """The tables of a step; nothing waits for the device."""
        batch = common_attn_metadata
        lengths = batch.seq_lens_cpu_upper_bound
        step = self.tables.fill(
            batch.query_start_loc,
            batch.query_start_loc_cpu.tolist(),
            batch.seq_lens,
            lengths.tolist(),
            batch.block_table_tensor,
            self.state.take_rows(),
        )
        return OscarMetadata(step)


class OscarAttentionImpl(AttentionImpl[OscarMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        check_layer(
            head_dim=head_size,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            **more,
        )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        config = get_current_vllm_config()
        self.layers: dict[str, Any] = config.compilation_config.static_forward_context
        state = find_state(self.layers)
        if state is None:
            follow_requests()
            state = EngineState(
                config,
                rank=get_tensor_model_parallel_rank(),
                size=get_tensor_model_parallel_world_size(),
                second_runner=bool(envs.VLLM_USE_V2_MODEL_RUNNER),
            )
        self.state = state
        local = state.local
        theirs = (num_heads, self.num_kv_heads, head_size)
        if theirs != (local.num_query_heads, local.num_key_value_heads, local.head_dim):
            raise ConfigError(
                f"oscar-kv in vLLM: a layer of {theirs} query heads, key/value heads and channels, allowed: "
                f"{(local.num_query_heads, local.num_key_value_heads, local.head_dim)} in every layer"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Fills the engine's state with its first layer, and tells every layer the bytes of its blocks."""
        own = {name: layer for name, layer in self.layers.items() if _is_ours(layer)}
        device = torch.device(self.state.config.device_config.device_type)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        self.state.load({name: _layer_number(name) for name in own}, device)
        for layer in own.values():
            if layer.impl is self:
                layer.get_kv_cache_spec = self.kv_cache_spec

    def kv_cache_spec(self, vllm_config: Any) -> TQFullAttentionSpec:
        """A block of this layer: as many bytes per token and head as a page has. The engine asks the layer.

        The engine has one kind of block whose bytes do not follow from heads, head_size and dtype, with the
        manager of full attention; its name is that of another format, its meaning is a number of bytes.
        """
        return TQFullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size,
            dtype=torch.uint8,
            tq_slot_size=token_bytes(self.head_size),
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: OscarMetadata,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, N, D], key, value [T, K, D], kv_cache uint8 [P, block bytes] -> output [T, N, D].

        Without metadata the engine measures memory: zeros, and the workspace of the longest chunk.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("quantized outputs of attention, allowed: bfloat16")
        if attn_metadata is None:
            config = self.state.config.model_config
            torch.empty(
                workspace_bytes(self.state.local, query.shape[0], config.max_model_len),
                dtype=torch.uint8,
                device=query.device,
            )
            return output.fill_(0)
        return attend_step(
            self.state.memories[layer.layer_name], kv_cache, attn_metadata.step, query, key, value, output,
            softmax_scale=self.scale, implementation=self.state.options.implementation,
        )  # fmt: skip


def _is_ours(layer: Any) -> bool:
    return isinstance(getattr(layer, "impl", None), OscarAttentionImpl)


def _layer_number(name: str) -> int:
    """The number in a layer's name; ConfigError unless there is exactly one."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"oscar-kv in vLLM: layer {name!r}, allowed: names with one number")
    return numbers[0]


def find_state(layers: dict[str, Any]) -> EngineState | None:
    """The state that the layers of an engine share; None before the first one is made."""
    return next((layer.impl.state for layer in layers.values() if _is_ours(layer)), None)


def follow_requests() -> None:
    """Has the engine's model runner tell its state which requests left and which rows a step has; once."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]

    update_states = GPUModelRunner._update_states
    if getattr(update_states, "follows_requests", False):
        return

    @functools.wraps(update_states)
    def following(self: Any, scheduler_output: Any) -> Any:
        state = find_state(self.compilation_config.static_forward_context)
        if state is None:
            return update_states(self, scheduler_output)
        state.release(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids)
        result = update_states(self, scheduler_output)
        state.seat(self.input_batch.req_ids)
        return result

    following.follows_requests = True  # pyright: ignore[reportAttributeAccessIssue]
    GPUModelRunner._update_states = following
