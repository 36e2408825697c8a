"""Rotation sets to and from other stacks, for installations without JAX."""
