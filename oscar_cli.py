"""The command `oscar`: JAX's command line where JAX is installed, PyTorch's elsewhere, or by --backend."""

import importlib.util
import sys
from collections.abc import Sequence

BACKENDS = ("jax", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line of the backend that is asked for, or installed; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    backend = "jax" if importlib.util.find_spec("jax") else "torch"
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name == "--backend":
            value = value or next(iter(arguments[place + 1 : place + 2]), "")
            if value not in BACKENDS:
                print(f"oscar: error: --backend {value}, allowed: {', '.join(BACKENDS)}", file=sys.stderr)
                return 2
            backend = value
            del arguments[place : place + (1 if "=" in argument else 2)]
            break
    if backend == "torch":
        from oscar_torch.cli import main as run
    else:
        from oscar_jax.cli import main as run
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
