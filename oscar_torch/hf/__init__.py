"""OSCAR-KV inside transformers: a cache class and an attention function. The only folder that imports it.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="oscar")
    cache = OscarCache("rotations.safetensors", model)
    model.generate(**inputs, past_key_values=cache)

Importing this package registers the attention function "oscar".
"""

from .attention import oscar_attention, oscar_mask
from .cache import OscarCache
from .calibrate import calibrate_model, save_statistics
from .layer import ATTENTION, OscarLayer
from .model_check import cache_config, layer_windows

__all__ = [
    "ATTENTION",
    "OscarCache",
    "OscarLayer",
    "cache_config",
    "calibrate_model",
    "layer_windows",
    "oscar_attention",
    "oscar_mask",
    "save_statistics",
]
