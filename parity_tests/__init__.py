"""Proof that every implementation of the INT2 format writes the same bytes."""
