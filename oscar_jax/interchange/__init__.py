"""Rotations in other stacks' files: published pairs, GGUF, absorbed checkpoints."""
