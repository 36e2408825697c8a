"""The command line `oscar`: grammar and printing."""

from .main import main

__all__ = ["main"]
