"""OSCAR-KV in JAX: attention-aware rotated 2-bit KV caches."""
