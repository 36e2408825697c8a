"""Tests of hf."""
