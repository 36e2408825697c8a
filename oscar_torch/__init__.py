"""OSCAR-KV in PyTorch: attention-aware rotated 2-bit KV caches, the twin of `oscar_jax`."""
