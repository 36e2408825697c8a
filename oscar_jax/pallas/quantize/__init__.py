"""Whole pages of rows into two bits."""
