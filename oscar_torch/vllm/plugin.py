"""What vLLM calls when it starts: it registers the backend, or why this version of vLLM is not served."""

import importlib.metadata
import re
from typing import Any

SERVED = "0.21"  # minor version of vLLM whose classes backend.py fills in
BACKEND = "oscar_torch.vllm.backend.OscarAttentionBackend"
REFUSAL = "oscar_torch.vllm.plugin.RefusedBackend"


def version_refusal(version: str) -> str | None:
    """Why this version of vLLM is not served; None for 0.21.x."""
    found = re.match(r"(\d+\.\d+)(\.|$|rc|a|b)", version)
    if found and found.group(1) == SERVED:
        return None
    return (
        f"vLLM {version}, allowed: {SERVED}.x (the plugin fills in classes that change with minor versions)"
    )


def register() -> None:
    """Entry point of the group vllm.general_plugins; called in every process of the engine, perhaps twice.

    Another version of vLLM goes on to serve with its own backends; only asking for CUSTOM is refused.
    """
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        AttentionBackendEnum,
        register_backend,
    )

    refused = version_refusal(importlib.metadata.version("vllm"))
    register_backend(AttentionBackendEnum.CUSTOM, REFUSAL if refused else BACKEND)


class RefusedBackend:
    """What CUSTOM means in a vLLM that is not served: the engine asks whether it fits, and prints why not."""

    @classmethod
    def validate_configuration(cls, *_: Any, **__: Any) -> list[str]:
        """The reason, as the engine takes it."""
        return [version_refusal(importlib.metadata.version("vllm")) or "vLLM's version changed while it ran"]
