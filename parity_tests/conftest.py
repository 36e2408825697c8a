"""Which tests can run here: those marked gpu, hopper or hf are skipped, with the reason, where they cannot.

No framework is imported to find out: the driver is asked through `nvidia-smi`.
"""

import functools
import importlib.util
import os
import shutil
import subprocess

import pytest

# Several frameworks and test processes share the device and the processor.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in ("gpu", "hopper", "hf"):
            if item.get_closest_marker(marker):
                reason = reason_to_skip(marker)
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))
