"""Attention statistics, from which rotations are fitted."""
