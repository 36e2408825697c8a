"""Which weights are these? A digest of a model's geometry and of a few tensors, whatever file they came from.

The same weights give the same fingerprint from a hub folder, a renamed copy, shards or memory, in either
framework; a quantized copy has other weights and another fingerprint.

Twin file, byte-identical in both packages. Standard library only.
"""

import hashlib
from collections.abc import Mapping

from .errors import ConfigError
from .rotation_header import Geometry

EMBEDDING_ROWS = 64  # of the input embedding, the first ones
FINGERPRINT_TENSORS = ("embedding", "first_key", "last_key")


def fingerprint_weights(geometry: Geometry, num_layers: int, tensors: Mapping[str, bytes]) -> str:
    """32 hex digits for heads, head_dim, layers and three tensors, each rounded to bfloat16, little endian.

    `tensors`: "embedding", the first EMBEDDING_ROWS rows of the input embedding [rows, hidden]; "first_key"
    and "last_key", the key projections [K·D, hidden] of the first and last layer that has one, in Hugging
    Face's order of rows. Raises ConfigError for other names.
    """
    if sorted(tensors) != sorted(FINGERPRINT_TENSORS):
        raise ConfigError(f"tensors {sorted(tensors)}, allowed: {', '.join(FINGERPRINT_TENSORS)}")
    digest = hashlib.sha256(
        f"{geometry.num_query_heads} {geometry.num_key_value_heads} {geometry.head_dim} {num_layers}".encode()
    )
    for name in FINGERPRINT_TENSORS:
        digest.update(hashlib.sha256(tensors[name]).digest())
    return digest.hexdigest()[:32]
