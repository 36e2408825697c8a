"""Rotation sets and their files."""
