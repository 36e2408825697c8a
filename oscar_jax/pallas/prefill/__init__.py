"""Attention of a chunk of new tokens."""
