"""The command line of lm-evaluation-harness with the model `oscar`.

python -m oscar_torch.evaluation run --model oscar --tasks TASK \\
    --model_args pretrained=model.gguf,rotations=rotations/,method=int2
"""

import sys


def main() -> int:
    """Registers the model and starts the harness; exit code 2 if it is not installed."""
    try:
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

        from ..hf.scorer import Scorer
        from .harness import register
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed: pip install 'oscar-kv[hf]' lm_eval", file=sys.stderr)
        return 2
    register(Scorer)
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
