"""What several files of this folder share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def fast_compilation() -> Iterator[None]:
    """Programs that run once: XLA leaves most optimizations out, and takes two thirds of the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
