"""Every implementation of the format by name, behind one NumPy-in, NumPy-out interface.

`IMPLEMENTATIONS[name].quantize_pages(role, rows, transform, multiplier, mean, device, feedback)` takes bf16
as bits and returns the arrays of `oracle.quantize_pages`. A name says which code runs; a device ("cpu" or
"gpu") says where. `why_not(device)` returns None when both can be had here, otherwise the reason in one line.
A named implementation never falls back to another one.

To add an implementation, append to IMPLEMENTATIONS; the conformance command, the shared tests and the report
then include it. Frameworks are imported on first use only.
"""

import dataclasses
import os
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from parity_tests.conformance import oracle
from parity_tests.conformance.frameworks import DEVICES, FRAMEWORKS, Framework, processor_name
from parity_tests.kernels import triton_interpreter

# Both frameworks share the GPU in one process; JAX would otherwise reserve three quarters of its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

QuantizePages = Callable[..., dict[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute pages; `run` and `reason` take the device last, framework is None for NumPy.

    `head_dims` are those it supports (None: all), `sequential_head_dim` the largest with feedback (0: it only
    rounds to the nearest). `slow` ones, such as interpreted kernels, face the shared
    tests on small inputs only.
    """

    name: str
    framework: Framework | None
    devices: tuple[str, ...]
    run: QuantizePages
    reason: Callable[[str], str | None] = lambda device: None
    head_dims: tuple[int, ...] | None = None
    slow: bool = False
    sequential_head_dim: int = 512

    def supports(self, head_dim: int, sequential: bool = False) -> bool:
        """Whether rows of `head_dim` channels can be asked for, rounded to the nearest or sequentially."""
        fits = self.head_dims is None or head_dim in self.head_dims
        return fits and (not sequential or head_dim <= self.sequential_head_dim)

    def why_not(self, device: str = "cpu") -> str | None:
        """None when this implementation can run on `device` here, otherwise the reason in one line."""
        if device not in self.devices:
            return f"{self.name} does not run on {device!r}, allowed: {', '.join(self.devices)}"
        reason = self.framework.why_not(device) if self.framework else None
        return reason or self.reason(device)

    def versions(self, device: str) -> dict[str, str]:
        """Versions and device name for the report."""
        if self.framework:
            return self.framework.versions(device)
        return {"numpy": np.__version__, "device": processor_name()}

    def quantize_pages(
        self,
        role: str,
        rows: np.ndarray,
        transform: np.ndarray,
        multiplier: np.ndarray,
        mean: np.ndarray | None = None,
        device: str | None = None,
        feedback: oracle.Feedback | None = None,
    ) -> dict[str, np.ndarray]:
        """The arrays of `oracle.quantize_pages`, computed by this implementation on `device`."""
        return self.run(role, rows, transform, multiplier, mean, feedback, device or self.devices[0])


def _oracle_pages(
    role: str,
    rows: np.ndarray,
    transform: np.ndarray,
    multiplier: np.ndarray,
    mean: np.ndarray | None,
    feedback: oracle.Feedback | None,
    device: str,
) -> dict[str, np.ndarray]:
    return oracle.quantize_pages(role, rows, transform, multiplier, mean, feedback)


def package_pages(framework: Framework, key_pages: Any, value_pages: Any, pair: Any = None) -> QuantizePages:
    """`run` of a package whose functions have the signatures of `quantize.py`.

    `key_pages` and `value_pages` are called without arguments and return the function to run, so that nothing
    is imported before it is needed. Codes are read back from the words by the package's own `packing.py`.
    `pair` likewise returns a `quantize_page_pair`, of kernels that take feedback in no other way: the rows
    then are keys and values at once.
    """

    def run(
        role: str,
        rows: np.ndarray,
        transform: np.ndarray,
        multiplier: np.ndarray,
        mean: np.ndarray | None,
        feedback: oracle.Feedback | None,
        device: str,
    ) -> dict[str, np.ndarray]:
        tokens, heads, head_dim = rows.shape
        packing = framework.module("packing")
        result: dict[str, np.ndarray] = {}
        with framework.device_context(device):
            pages = framework.bfloat16(rows.reshape(tokens // 64, 64, heads, head_dim), device)
            arguments = [pages, framework.array(transform, device), framework.array(multiplier, device)]
            fed = []
            if feedback is not None:
                parts = (framework.array(part, device) for part in (feedback.matrix, feedback.shift))
                fed = [framework.module("quantize").Feedback(*parts, feedback.steps)]
            if fed and pair is not None:
                zeros = np.zeros((len(transform), head_dim), np.uint16)
                given = framework.bfloat16(zeros if mean is None else mean, device)
                rotation = types.SimpleNamespace(
                    key_transform=arguments[1], value_transform=arguments[1], value_mean=given,
                    key_multiplier=arguments[2], value_multiplier=arguments[2],
                    key_feedback=fed[0], value_feedback=fed[0],
                )  # fmt: skip
                both = pair()(pages, pages, rotation)
                words, scale = both[f"{role}_codes"], both[f"{role}_scale"]
                codes = framework.compiled(getattr(packing, f"unpack_{role}_codes"))(words)
                if role == "key":
                    result["page_mean"] = framework.numpy(both["key_page_mean"])
            elif role == "key":
                words, scale, page_mean = key_pages()(*arguments, *fed)
                codes = framework.compiled(packing.unpack_key_codes)(words)  # [P, K, 64, D]
                result["page_mean"] = framework.numpy(page_mean)
            else:
                assert mean is not None, "values need their calibrated mean"
                words, scale = value_pages()(*arguments, framework.bfloat16(mean, device), *fed)
                codes = framework.compiled(packing.unpack_value_codes)(words)  # [P, K, 64, D]
            result["words"] = framework.numpy(words)
            result["scale"] = framework.numpy(scale).transpose(0, 2, 1).reshape(tokens, heads)
            result["codes"] = framework.numpy(codes).transpose(0, 2, 1, 3).reshape(rows.shape)
        return result

    return run


def _reference(framework: Framework) -> Implementation:
    def function(attribute: str) -> Callable[[], Any]:
        return lambda: framework.compiled(getattr(framework.module("quantize"), attribute))

    run = package_pages(framework, function("quantize_key_pages"), function("quantize_value_pages"))
    return Implementation(framework.reference, framework, DEVICES, run)


def triton_pages(kernel: str = "quantize.triton") -> QuantizePages:
    """A Triton quantizer; the plain one is compiled or interpreted as this process decides."""

    def function(attribute: str) -> Callable[[], Any]:
        return lambda: getattr(FRAMEWORKS["torch"].module(f"triton_kernels.{kernel}"), attribute)

    names = ("quantize_key_pages", "quantize_value_pages", "quantize_page_pair")
    return package_pages(FRAMEWORKS["torch"], *map(function, names))


def _mosaic_pages() -> QuantizePages:
    """The Mosaic quantizer as compiled models run it: under jit."""

    def function(attribute: str) -> Callable[[], Any]:
        framework = FRAMEWORKS["jax"]
        return lambda: framework.compiled(getattr(framework.module("pallas.quantize.mosaic_gpu"), attribute))

    return package_pages(FRAMEWORKS["jax"], function("quantize_key_pages"), function("quantize_value_pages"))


def _no_hopper(device: str) -> str | None:
    """Why Mosaic GPU kernels cannot run, or None; asked only where JAX sees a GPU."""
    capability = getattr(FRAMEWORKS["jax"].place(device), "compute_capability", "unknown")
    if str(capability).split(".")[0] != "9":
        return f"no Hopper GPU: the compute capability is {capability}"
    return None


def _no_hopper_torch() -> str | None:
    """Why Gluon kernels cannot run, or None; asked only where Torch sees a GPU."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"no Hopper GPU: the compute capability is {major}.{minor}"


IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Implementation("oracle", None, ("cpu",), _oracle_pages),
        _reference(FRAMEWORKS["jax"]),
        _reference(FRAMEWORKS["torch"]),
        Implementation(
            "mosaic_gpu",
            FRAMEWORKS["jax"],
            ("gpu",),
            _mosaic_pages(),
            _no_hopper,
            head_dims=(64, 128, 256),
        ),
        Implementation(
            "triton",
            FRAMEWORKS["torch"],
            ("gpu",),
            triton_pages(),
            lambda device: triton_interpreter.why_not(),
            sequential_head_dim=256,
        ),
        Implementation(
            "gluon",
            FRAMEWORKS["torch"],
            ("gpu",),
            triton_pages("quantize.gluon"),
            lambda device: triton_interpreter.why_not() or _no_hopper_torch(),
            head_dims=(64, 128, 256),
            sequential_head_dim=128,
        ),
        Implementation(
            "triton-interpreted",
            FRAMEWORKS["torch"],
            ("cpu",),
            triton_interpreter.quantize_pages,
            lambda device: triton_interpreter.why_not(),
            slow=True,
            sequential_head_dim=256,
        ),
    )
}
