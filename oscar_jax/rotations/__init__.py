"""Rotation sets: bases, fixed point, fits, files."""
