"""Triton kernels (any recent NVIDIA GPU) and Gluon kernels (Hopper)."""
