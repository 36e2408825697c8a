"""Which tests can run here: those marked gpu, hopper or hf are skipped, with the reason, where they cannot.

No framework is imported to find out: the driver is asked through `nvidia-smi`.
"""

import dataclasses
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import rows
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework
from parity_tests.conformance.implementations import IMPLEMENTATIONS, Implementation

# Several frameworks and test processes share the device and the processor.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Tests of the command line compile what they test, and leave nothing in the user's cache directory.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")


@functools.cache
def compute_capabilities() -> tuple[float, ...]:
    """Compute capability of every visible NVIDIA GPU; empty without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return ()
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
        return tuple(float(line) for line in answer.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def reason_to_skip(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None."""
    if marker == "gpu":
        return None if compute_capabilities() else "no CUDA device"
    if marker == "hopper":
        return None if any(9 <= c < 10 for c in compute_capabilities()) else "no Hopper GPU"
    if marker == "hf":
        return None if importlib.util.find_spec("transformers") else "transformers is not installed"
    return None


@dataclasses.dataclass(frozen=True)
class Voice:
    """An implementation on a device, as a test meets it."""

    implementation: Implementation
    device: str

    @property
    def slow(self) -> bool:
        return self.implementation.slow

    def quantize_pages(self, vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The output arrays for one set of vectors; skips the test where the head_dim is not supported."""
        head_dim = vectors["rows"].shape[-1]
        if not self.implementation.supports(head_dim, "feedback" in vectors):
            pytest.skip(f"{self.implementation.name} does not support head_dim {head_dim} or its rounding")
        arrays = [vectors.get(name) for name in ("rows", "transform", "multiplier", "mean")]
        role, feedback = str(vectors["role"]), rows.feedback_of(vectors)
        return self.implementation.quantize_pages(role, *arrays, self.device, feedback)  # type: ignore


def _voices() -> list[Any]:
    return [
        pytest.param(
            Voice(implementation, device),
            id=name if implementation.devices == (device,) else f"{name}-{device}",
            marks=[pytest.mark.gpu] if device == "gpu" else [],
        )
        for name, implementation in IMPLEMENTATIONS.items()
        if name != "oracle"
        for device in implementation.devices
    ]


@pytest.fixture(params=_voices(), scope="module")
def voice(request: pytest.FixtureRequest) -> Voice:
    """Every implementation on every device it knows; skipped with the reason where it cannot run."""
    reason = request.param.implementation.why_not(request.param.device)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture(params=FRAMEWORKS.values(), ids=list(FRAMEWORKS), scope="module")
def framework(request: pytest.FixtureRequest) -> Framework:
    """Both packages, on the CPU; skipped where the framework is not installed."""
    reason = request.param.why_not("cpu")
    if reason:
        pytest.skip(reason)
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "hopper", "hf"):
            if item.get_closest_marker(marker):
                reason = reason_to_skip(marker)
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))
