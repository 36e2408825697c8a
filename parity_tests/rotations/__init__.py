"""Tests of rotations."""
