"""Programs on eight virtual devices of a CPU, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_eight_devices(code: str, *arguments: str, quickly: bool = False) -> list[str]:
    """The lines that a program prints on eight virtual devices; its failure is the test's.

    quickly: compiled without most optimizations, for programs that run once and compare nothing but tokens.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ
        | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quickly))},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.splitlines()
