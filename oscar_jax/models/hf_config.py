"""ModelConfig of a Hugging Face directory: every key of its files is used, known to be harmless, or refused.

The meaning of keys and of missing keys is that of transformers, whose tests these readers face.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from .config import ModelConfig
from .family import Family, Fields, Settings, family_of
from .quantized import check_quantization
from .rope import RopeConfig, rope_of_parameters

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

# Keys that change nothing the decoder computes: names, training, tasks, loading, how it is run.
_HARMLESS = frozenset(
    """
    architectures auto_map model_type name_or_path tokenizer_class transformers_version torch_dtype
    dtype torchscript use_cache use_bfloat16 return_dict output_attentions output_hidden_states
    return_dict_in_generate initializer_range initializer_factor attention_dropout resid_pdrop
    embd_pdrop hidden_dropout embedding_dropout residual_dropout router_aux_loss_coef
    output_router_logits router_jitter_noise input_jitter_noise use_mems gradient_checkpointing
    chunk_size_feed_forward problem_type id2label label2id num_labels finetuning_task
    task_specific_params pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id prefix pretraining_tp bos_token eos_token pad_token license
    quantization_config attn_implementation experts_implementation use_flash_attn transformers.js_config
    cache_implementation unsloth_fixed unsloth_version quantization ignore_keys_at_rope_validation
    max_length min_length do_sample temperature top_k top_p typical_p repetition_penalty num_beams
    num_return_sequences length_penalty no_repeat_ngram_size early_stopping diversity_penalty
    num_beam_groups encoder_no_repeat_ngram_size remove_invalid_values output_scores
    exponential_decay_length_penalty
    """.split()
)
# Keys that change the arithmetic unless they have one of these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None, 0, False),
    "final_logit_softcapping": (None, 0, False),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "is_decoder": (None, True, False),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
    "per_layer_config": (None, {}),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "use_sliding_window": (None, False),
    "sliding_window": (None,),
    "max_window_layers": (),
    "num_nextn_predict_layers": (None, 0),
    "mlp_only_layers": (None, []),
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None,),
}
# Keys of a multimodal config.json around the decoder's own section.
_AROUND_TEXT = frozenset(
    """
    text_config vision_config audio_config mm_tokens_per_image boi_token_index eoi_token_index
    image_token_index image_token_id boi_token_id eoi_token_id eos_token_id bos_token_id vocab_size
    hidden_size tie_word_embeddings video_token_id vision_start_token_id vision_end_token_id
    """.split()
)
# generation_config.json: how tokens are drawn is the caller's choice, but not what forces or forbids some.
_GENERATION_HARMLESS = frozenset(
    """
    _from_model_config bos_token_id pad_token_id eos_token_id decoder_start_token_id
    transformers_version do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff
    eta_cutoff repetition_penalty presence_penalty frequency_penalty no_repeat_ngram_size
    encoder_repetition_penalty encoder_no_repeat_ngram_size length_penalty diversity_penalty num_beams
    num_beam_groups num_return_sequences early_stopping max_length max_new_tokens min_length
    min_new_tokens max_time use_cache cache_implementation cache_config return_legacy_cache
    prefill_chunk_size output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate renormalize_logits remove_invalid_values low_memory trust_remote_code
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind
    target_lookbehind compile_config disable_compile generation_kwargs chat_format max_window_size
    penalty_alpha use_mtp speculation_type
    """.split()
)
_GENERATION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": (None, []),
    "begin_suppress_tokens": (None, []),
    "constraints": (None,),
    "dola_layers": (None,),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": (None,),
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1, 1.0),
    "sequence_bias": (None, {}),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "token_healing": (None, False),
    "watermarking_config": (None,),
}


def read_hf_config(directory: Path) -> ModelConfig:
    """ModelConfig of a Hugging Face directory; raises CheckpointError if config.json is unreadable."""
    raw = _read_object(directory / "config.json")
    if raw is None:
        raise CheckpointError(f"{directory} has no config.json")
    name = raw.get("_name_or_path") or directory.resolve().name
    return config_from_hf(raw, model_id=name, generation=_read_object(directory / "generation_config.json"))


def read_quantization(directory: Path) -> Mapping[str, Any] | None:
    """The `quantization_config` of a directory's config.json; `config_from_hf` is what checks it."""
    return (_read_object(directory / "config.json") or {}).get("quantization_config")


def config_from_hf(
    raw: Mapping[str, Any], *, model_id: str, generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """ModelConfig of a `config.json` and, if there is one, a `generation_config.json`.

    Old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`); a multimodal config of a family is read
    through the decoder's section. Raises ConfigError naming the key.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json has no model_type")
    family = family_of(model_type)
    text, around = raw, {}
    if family.text_section is not None and family.text_section in raw:
        text, around = raw[family.text_section], raw
        if not isinstance(text, dict):
            raise ConfigError(f"{family.text_section} holds {type(text).__name__}, expected an object")
        _refuse(sorted(set(around) - _AROUND_TEXT), around, _HARMLESS, _NEUTRAL, "config.json")
    if (quantization := raw.get("quantization_config")) is not None:
        check_quantization(quantization)
    settings = Settings(text, family.defaults)
    fields = _read_common(settings, family)
    fields |= family.fields
    fields |= family.read_hf(settings, fields)
    if generation is not None:
        where = "generation_config.json"
        _refuse(sorted(generation), generation, _GENERATION_HARMLESS, _GENERATION_NEUTRAL, where)
    fields["eos_token_ids"] = token_ids(
        next(
            (
                source["eos_token_id"]
                for source in (generation or {}, around)
                if source.get("eos_token_id") is not None
            ),
            settings.get("eos_token_id"),
        )
    )
    _refuse(settings.unread(), text, _HARMLESS, _NEUTRAL, "config.json")
    return ModelConfig(family=family.name, model_id=model_id, **fields)


def _read_common(settings: Settings, family: Family) -> Fields:
    """Fields whose keys mean the same in every family."""
    activation = settings.get(family.activation_key, "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation {activation!r} is not supported, allowed: {', '.join(_ACTIVATIONS)}")
    layers, heads = settings.integer("num_hidden_layers"), settings.integer("num_attention_heads")
    hidden = settings.integer("hidden_size")
    head_dim = settings.integer("head_dim", max(1, hidden // heads))
    kinds = settings.get("layer_types")
    if kinds is not None:
        if unknown := sorted(set(kinds) - set(family.layer_types)):
            raise ConfigError(f"layer_types {unknown}, allowed: {', '.join(family.layer_types)}")
        if len(kinds) != layers:
            raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers = {layers}")
    fields: Fields = {
        "vocab_size": settings.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.integer("intermediate_size"),
        "num_layers": layers,
        "num_query_heads": heads,
        "num_key_value_heads": settings.integer("num_key_value_heads", heads),
        "head_dim": head_dim,
        "max_positions": settings.integer("max_position_embeddings"),
        "rms_norm_eps": settings.number("rms_norm_eps", 1e-6),
        "attention_scale": 1.0 / math.sqrt(head_dim),
        "layer_windows": (None,) * layers,
        "activation": _ACTIVATIONS[activation],
        "tie_embeddings": settings.flag("tie_word_embeddings"),
        "bos_token_id": settings.get("bos_token_id"),
    }
    if family.text_section is None:  # such a family's layers have ropes of different kinds
        fields["rope"] = read_rope(settings, fields, family)
    return fields


def read_rope(settings: Settings, fields: Fields, family: Family) -> RopeConfig:
    """Rope of `rope_scaling`, which wins, or `rope_parameters`, with the keys that stand beside them."""
    parameters = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"rope parameters are {parameters!r}, expected an object")
    parameters = {key: value for key, value in parameters.items() if key not in family.rope_without_effect}
    settings.get("rope_parameters")  # read, even where rope_scaling wins
    kind = str(parameters.get("rope_type", parameters.get("type")))
    if kind in family.rope_type_aliases:
        parameters = {**parameters, "rope_type": family.rope_type_aliases[kind]}
    return rope_of_parameters(
        parameters,
        theta=settings.number("rope_theta", 10_000.0),
        head_dim=fields["head_dim"],
        max_positions=fields["max_positions"],
        trained_positions=settings.get("original_max_position_embeddings"),
        partial_rotary_factor=settings.get("partial_rotary_factor"),
        interleaved=family.rope_interleaved,
    )


def token_ids(value: Any) -> tuple[int, ...]:
    """Distinct ids of a number, a list or nothing; ConfigError for anything else."""
    if value is None:
        return ()
    ids = tuple(dict.fromkeys(value)) if isinstance(value, list) else (value,)
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"eos_token_id = {value!r}, expected an integer or a list of them")
    return ids


def _refuse(
    keys: list[str],
    values: Mapping[str, Any],
    harmless: frozenset[str],
    neutral: Mapping[str, tuple[Any, ...]],
    where: str,
) -> None:
    """Raises ConfigError for the first key that is neither harmless nor has a value without effect."""
    for key in keys:
        if key in harmless or key.startswith("_"):
            continue
        allowed = neutral.get(key)
        if allowed == () or (allowed and values[key] in allowed):
            continue
        said = f"{key} = {values[key]!r} of {where}"
        if allowed is None:
            raise ConfigError(
                f"{said}: unknown key, its meaning cannot be honoured; remove it if it has none"
            )
        raise ConfigError(f"{said} is not supported, allowed: {', '.join(map(repr, allowed))}")


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file, None if there is no file; CheckpointError for anything else."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds {type(raw).__name__}, expected an object")
    return raw
