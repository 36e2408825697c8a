"""Many devices: a mesh with axes data and model, and what lies where on it.

Sequences are spread over `data`, heads, columns and experts over `model`. Every data shard has its own pool
of pages and its own tables, every device the key/value heads that its query heads read: attention needs no
word from another device.
"""

from .caches import allocate_model_cache, attend, place_cache, place_rotations
from .memory import memory_per_device
from .mesh import check_batch, make_mesh, parse_mesh
from .weights import load_model, place_model

__all__ = [
    "allocate_model_cache",
    "attend",
    "check_batch",
    "load_model",
    "make_mesh",
    "memory_per_device",
    "parse_mesh",
    "place_cache",
    "place_model",
    "place_rotations",
]
