"""Attention of the newest tokens."""
