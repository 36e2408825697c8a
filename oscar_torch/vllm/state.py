"""What all layers of one engine share: options, rotations, the arena, and who sits where in it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError
from .identity import (
    checkpoint_fingerprint,
    head_range,
    local_config,
    model_folder,
    read_rotations,
    slice_rotation,
)
from .layer import LayerMemory
from .options import HADAMARD, check_engine, read_options
from .pages import allocate_windows, check_arena
from .slots import SlotTable

_log = logging.getLogger(__name__)


class EngineState:
    """One per engine and rank: made with its first layer, filled when the weights are loaded.

    config: vLLM's VllmConfig; rank of size: of the tensor-parallel group. Raises ConfigError.
    """

    def __init__(self, config: Any, *, rank: int, size: int, second_runner: bool = False) -> None:
        check_engine(config, second_runner=second_runner)
        self.options = read_options(config.additional_config)
        self.config = config
        self.rank, self.size = rank, size
        self.slots = SlotTable(config.scheduler_config.max_num_seqs)
        self.memories: dict[str, LayerMemory] = {}  # by name of the layer
        self._seated: list[int] = []
        model = config.model_config
        self.geometry = CacheConfig(
            num_key_value_heads=model.get_total_num_kv_heads(),
            num_query_heads=model.get_num_attention_heads(config.parallel_config) * size,
            head_dim=model.get_head_size(),
            sink_tokens=self.options.sink_tokens,
            recent_tokens=self.options.recent_tokens,
        )
        self.heads = head_range(self.geometry.num_key_value_heads, rank, size)
        self.local = local_config(self.geometry, self.geometry.num_query_heads // size, self.heads)

    def load(self, layers: Mapping[str, int], device: torch.device) -> None:
        """Reads the rotations and allocates the arena of the layers, id by name; once.

        The engine calls this while it loads weights, so it counts the arena before it sizes its blocks.
        """
        if self.memories:
            return
        model = self.config.model_config
        fingerprint = None
        if self.options.rotations != HADAMARD and self.config.load_config.load_format != "dummy":
            folder = model_folder(model.model, model.revision)
            fingerprint = checkpoint_fingerprint(folder, self.geometry, model.get_total_num_hidden_layers())
        ids = sorted(set(layers.values()))
        if len(ids) != len(layers):
            raise ConfigError(f"oscar-kv in vLLM: layers {sorted(layers)} share numbers, allowed: one each")
        rotations = read_rotations(self.options, self.geometry, ids, model.model, fingerprint=fingerprint)
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            memory = int(memory * self.config.cache_config.gpu_memory_utilization)
            arena = check_arena(self.local, len(layers), self.slots.count, memory)
            _log.info(
                "oscar-kv: %d layers, %d + %d BF16 tokens for each of %d running sequences: %.2f GiB; "
                "blocks of %d tokens in %d bytes per layer",
                len(layers), self.local.sink_tokens, self.local.recent_tokens + fmt.PAGE_TOKENS,
                self.slots.count, arena / 2**30, fmt.PAGE_TOKENS,
                self.local.num_key_value_heads * fmt.int2_page_bytes(self.local.head_dim),
            )  # fmt: skip
        for index, (name, layer) in enumerate(sorted(layers.items(), key=lambda item: item[1])):
            rotation = slice_rotation(rotations[layer], self.heads).to(device)
            windows = allocate_windows(self.local, self.slots.count, device)
            self.memories[name] = LayerMemory(index, self.local, rotation, *windows)

    # Steps.

    def release(self, *groups: Iterable[str] | None) -> None:
        """Frees the places of requests that ended, were aborted or preempted."""
        for requests in groups:
            self.slots.release(requests or ())

    def seat(self, requests: Sequence[str]) -> None:
        """Says which requests stand in the rows of the next step."""
        self._seated = self.slots.seat(requests)

    def take_rows(self) -> list[int]:
        """Places of the rows of the step now prepared; empty in the engine's trial runs."""
        rows, self._seated = self._seated, []
        return rows
