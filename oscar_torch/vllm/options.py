"""What a user sets, by the engine's own means, and the engine settings that cannot be served.

--additional-config '{"oscar": {"rotations": PATH, "sink_tokens": 64, "recent_tokens": 256}}'
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..core import cache_format as fmt
from ..core.errors import ConfigError

SECTION = "oscar"  # key in --additional-config
HADAMARD = "hadamard"  # instead of a path: the rotation that needs no calibration
HEAD_DIMS = (64, 128, 256)
CACHE_DTYPES = ("auto", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """The section "oscar" of --additional-config.

    `rotations`: path of a rotation set, or "hadamard"; `sink_tokens`, `recent_tokens`: the BF16 part of a
    sequence, multiples of 64; `model_id`: the name in the rotations' header, where the model's own name does
    not tell; `implementation`: of the kernels, None for the fastest that runs.
    """

    rotations: str
    sink_tokens: int = fmt.SINK_TOKENS
    recent_tokens: int = fmt.RECENT_TOKENS
    model_id: str | None = None
    implementation: str | None = None


def read_options(additional_config: Any) -> ServeOptions:
    """The options in the engine's additional_config; ConfigError names what is missing or unknown."""
    section = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    example = f'--additional-config \'{{"{SECTION}": {{"rotations": "PATH"}}}}\''
    if not isinstance(section, Mapping):
        raise ConfigError(f"additional_config has no section {SECTION!r}, expected {example}")
    names = [field.name for field in dataclasses.fields(ServeOptions)]
    if unknown := sorted(set(section) - set(names)):
        raise ConfigError(f"additional_config: {SECTION} has {unknown[0]!r}, allowed: {', '.join(names)}")
    if not isinstance(section.get("rotations"), str):
        raise ConfigError(
            f"additional_config: {SECTION}: rotations = {section.get('rotations')!r}, expected the path of a "
            f"rotation set or {HADAMARD!r}: {example}"
        )
    return ServeOptions(**section)


def check_engine(config: Any, *, second_runner: bool = False) -> None:
    """Raises ConfigError for engine settings that the backend does not serve, naming setting and way out.

    config: vLLM's VllmConfig; second_runner: whether the engine's rewritten model runner is asked for.
    """
    cache, parallel, model = config.cache_config, config.parallel_config, config.model_config
    refusals = (
        (
            cache.enable_prefix_caching,
            "enable_prefix_caching = True, allowed: --no-enable-prefix-caching (the newest 256 tokens of a "
            "shared prefix are BF16 rows of one sequence, not pages)",
        ),
        (
            cache.cache_dtype not in CACHE_DTYPES,
            f"kv_cache_dtype = {cache.cache_dtype!r}, allowed: {' or '.join(CACHE_DTYPES)}",
        ),
        (
            cache.block_size not in (None, fmt.PAGE_TOKENS) and cache.user_specified_block_size,
            f"block_size = {cache.block_size}, allowed: {fmt.PAGE_TOKENS}",
        ),
        (config.speculative_config is not None, "speculative decoding, allowed: none"),
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline_parallel_size = {parallel.pipeline_parallel_size}, allowed: 1",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism, allowed: decode_context_parallel_size = prefill_context_parallel_size = 1",
        ),
        (parallel.use_ubatching, "micro-batches (dual batch overlap), allowed: none"),
        (
            config.kv_transfer_config is not None or cache.kv_offloading_size is not None,
            "KV transfer or offloading: blocks without their BF16 rows, allowed: none",
        ),
        (cache.kv_sharing_fast_prefill, "kv_sharing_fast_prefill, allowed: False"),
        (model.use_mla, "multi-head latent attention, allowed: attention with keys and values"),
        (model.is_hybrid, "a hybrid model, allowed: full attention in every layer"),
        (model.is_encoder_decoder, "an encoder-decoder model, allowed: decoders"),
        (second_runner, "VLLM_USE_V2_MODEL_RUNNER = 1, allowed: 0"),
    )
    for refused, what in refusals:
        if refused:
            raise ConfigError(f"oscar-kv in vLLM: {what}")


def check_layer(
    *,
    head_dim: int,
    alibi_slopes: Any = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    attn_type: str = "decoder",
    kv_sharing_target_layer_name: str | None = None,
    **more: Any,
) -> None:
    """Raises ConfigError for an attention layer that the pages or kernels do not serve."""
    refusals = (
        (head_dim not in HEAD_DIMS, f"head_dim = {head_dim}, allowed: {', '.join(map(str, HEAD_DIMS))}"),
        (alibi_slopes is not None, "ALiBi, allowed: none"),
        (sliding_window is not None, f"sliding_window = {sliding_window}, allowed: full attention"),
        (bool(logits_soft_cap), f"logits_soft_cap = {logits_soft_cap}, allowed: none"),
        (attn_type != "decoder", f"attention of type {attn_type!r}, allowed: 'decoder'"),
        (
            kv_sharing_target_layer_name is not None,
            f"a layer that reads the keys of {kv_sharing_target_layer_name!r}, allowed: its own",
        ),
        (bool(more), f"attention with {', '.join(sorted(more))}, allowed: none"),
    )
    for refused, what in refusals:
        if refused:
            raise ConfigError(f"oscar-kv in vLLM: {what}")
