"""vLLM itself, without a GPU: its scheduler, block manager and model runner around our backend, on the CPU.

vLLM's wheel for CUDA brings all of its Python. Where no GPU is found, a platform and a worker stand in that
take away what needs compiled code; models run through vLLM's own native paths. So everything of the plugin
runs as the engine calls it, with the reference in the place of kernels, and without CUDA graphs. Import this
before anything of vLLM.
"""

import os
import sys
import types
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")


def stand_in_for_cuda() -> None:
    """Makes a machine without a GPU one that vLLM runs on; call it once, before engines are made."""
    import vllm.platforms as platforms  # pyright: ignore[reportMissingImports]
    from vllm.platforms.cpu import CpuPlatform  # pyright: ignore[reportMissingImports]
    from vllm.platforms.interface import DeviceCapability, Platform  # pyright: ignore[reportMissingImports]

    class StandIn(CpuPlatform):
        """A CPU that asks backends as CUDA does, and leaves the engine's settings alone."""

        @classmethod
        def get_attn_backend_cls(
            cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
        ) -> str:
            reasons = selected_backend.get_class().validate_configuration(
                device_capability=DeviceCapability(9, 0), **attn_selector_config._asdict()
            )
            if reasons:
                raise ValueError(f"{selected_backend} is not valid for this configuration: {reasons}")
            return selected_backend.get_path()

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.model_config.disable_cascade_attn = True
            vllm_config.scheduler_config.async_scheduling = False
            vllm_config.parallel_config.worker_cls = "stand_in_worker.StandInWorker"
            vllm_config.parallel_config.distributed_executor_backend = "uni"
            vllm_config.compilation_config.cudagraph_capture_sizes = []

        @classmethod
        def update_block_size_for_backend(cls, vllm_config: Any) -> None:
            Platform.update_block_size_for_backend.__func__(cls, vllm_config)

        @classmethod
        def import_kernels(cls) -> None:
            pass

    platforms._current_platform = StandIn()

    import vllm.utils.cpu_triton_utils as cpu_kernels  # pyright: ignore[reportMissingImports]
    from vllm.utils.torch_utils import set_random_seed  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker import gpu_worker  # pyright: ignore[reportMissingImports]

    class Nothing:
        """A kernel whose results (slots of tokens) our backend does not read."""

        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: None

    cpu_kernels.compute_slot_mapping_kernel = Nothing()
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # pyright: ignore[reportMissingImports]
    from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]

    class StandInWorker(CPUWorker):
        """A worker that binds no cores and measures no memory."""

        def __init__(self, **options: Any) -> None:
            gpu_worker.Worker.__init__(self, **options)
            self.parallel_config.disable_custom_all_reduce = True
            self.profiler = None

        def init_device(self) -> None:
            gpu_worker.init_worker_distributed_environment(
                self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
            )
            set_random_seed(self.model_config.seed)
            self.model_runner = CPUModelRunner(self.vllm_config, torch.device("cpu"))

        def determine_available_memory(self) -> int:
            self.model_runner.profile_run()
            return self.cache_config.kv_cache_memory_bytes

    module = types.ModuleType("stand_in_worker")
    module.StandInWorker = StandInWorker  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[module.__name__] = module


def make_engine(folder: str, oscar: dict[str, Any] | None, **options: Any) -> Any:
    """A vLLM engine on a model folder; `oscar` is our section of its settings, None for its own backend."""
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

    from oscar_torch.vllm import register

    settings: dict[str, Any] = {"model": folder, "dtype": "bfloat16", "seed": 0, "skip_tokenizer_init": True}
    settings |= {"enable_prefix_caching": False, "disable_log_stats": True}
    if not torch.cuda.is_available():
        settings |= {"enforce_eager": True, "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
    if oscar is not None:
        register()
        settings |= {"attention_config": {"backend": "CUSTOM"}, "additional_config": {"oscar": oscar}}
    return LLMEngine.from_engine_args(EngineArgs(**(settings | options)))
