"""Tests of interchange."""
