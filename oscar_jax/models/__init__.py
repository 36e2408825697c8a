"""Decoders of real models, written with Flax NNX."""
