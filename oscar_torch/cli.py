"""The command line of an installation without JAX: calibrate, fit, generate, inspect, convert.

`oscar` comes here if JAX is not installed, or with `--backend torch`. Models are those of transformers. What
needs JAX says so.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from .core import cache_format as fmt
from .core.config import CalibrationConfig
from .core.errors import CheckpointError, ConfigError, OscarError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141  # as a shell reports SIGPIPE

_DESCRIPTION = "2-bit key/value caches for transformers models: calibrate and run them. (PyTorch backend)"
_EPILOG = """\
a first session:
  oscar calibrate --backend torch --model Qwen/Qwen3-0.6B --text notes/ code/*.py --out rotations/
  oscar generate  --backend torch --model Qwen/Qwen3-0.6B --rotations rotations/ --prompt "Once upon a time"
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (2 for every error the user can cause)."""
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        if unknown and arguments.run is not _run_evaluate:
            raise ConfigError(f"unrecognized arguments: {' '.join(unknown)} (see oscar --help)")
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except (OscarError, OSError, NotImplementedError) as error:
        print(f"oscar: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        print(f"oscar: error: {error.name} is not installed: pip install 'oscar-kv[hf]'", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("\noscar: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(
        prog="oscar",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_const", const=True, help="print the version and exit")
    parser.set_defaults(run=_run_nothing)
    added = parser.add_subparsers(title="commands", metavar="COMMAND")
    defaults = CalibrationConfig()
    command = added.add_parser("calibrate", help="fit a rotation set to a model on some text")
    command.set_defaults(run=_run_calibrate)
    _add_model(command)
    command.add_argument("--text", required=True, nargs="+", metavar="TEXT", help="files, folders, globs, -")
    command.add_argument("--out", required=True, metavar="DIR", help="where set and statistics go")
    command.add_argument("--field", metavar="NAME", help="field of .jsonl lines that holds the text")
    command.add_argument("--tokens", type=int, default=defaults.tokens, metavar="N", help="tokens to read")
    command.add_argument("--context", type=int, default=defaults.context, metavar="N", help="per sequence")
    command.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences at once")
    command.add_argument("--save-every", type=int, default=8, metavar="N", help="batches between savings")
    command.add_argument("--restart", action="store_true", help="forget an interrupted calibration in DIR")
    command.add_argument("--all-layers", action="store_true", help="also layers with short windows")
    command.add_argument("--model-id", metavar="NAME", help="for later checks; default: its source")
    _add_basis(command, defaults)
    command = added.add_parser("fit", help="fit a rotation set to statistics gathered before")
    command.set_defaults(run=_run_fit)
    command.add_argument("statistics", metavar="STATISTICS", help="statistics.safetensors or its folder")
    command.add_argument("--out", required=True, metavar="FILE", help="a .safetensors file")
    _add_basis(command, defaults)
    command = added.add_parser("generate", help="continue a prompt with a 2-bit cache")
    command.set_defaults(run=_run_generate)
    _add_model(command)
    command.add_argument("--rotations", required=True, metavar="PATH", help="what calibrate wrote")
    about = (
        "name of the model in the rotations: it says that they fit, whatever the weights' fingerprint says"
    )
    command.add_argument("--model-id", metavar="NAME", help=about)
    command.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="tokens to generate")
    command = added.add_parser("inspect", help="say what a rotation set or a rotation file contains")
    command.set_defaults(run=_run_inspect)
    command.add_argument("path", metavar="PATH", help="a set, a published .pt file, or their folder")
    command = added.add_parser("convert", help="turn a rotation set into another file format")
    command.set_defaults(run=_run_convert)
    command.add_argument("source", metavar="SOURCE", help="a rotation set or a published pair")
    command.add_argument("destination", metavar="DESTINATION", help="a .safetensors file, or a folder")
    command.add_argument("--to", dest="target", metavar="FORM", help="safetensors or pair")
    command.add_argument("--values", metavar="FILE", help="value file of a published pair")
    command.add_argument("--model", metavar="PATH", help="folder or config.json of the model")
    command.add_argument("--query-heads", type=int, metavar="N", help="if nothing else says it")
    command.add_argument("--key-value-heads", type=int, metavar="N", help="likewise")
    command.add_argument("--for", dest="loader", metavar="LOADER", help="who will read the pair")
    command.add_argument("--schema", type=int, metavar="N", help="newest version of a pair to write")
    command.add_argument("--layer-ids", default="model", metavar="KIND", help="model or attention")
    command = added.add_parser("evaluate", help="needs JAX")
    command.set_defaults(run=_run_evaluate)
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    about = "hub name, folder, .gguf file, or gemma3-270m (from its pip package)"
    command.add_argument("--model", required=True, metavar="NAME", help=about)
    about = "of transformers; default: spread over all CUDA GPUs, else on the CPU"
    command.add_argument("--device-map", metavar="MAP", help=about)
    about = "arithmetic; default: that of the checkpoint, of a .gguf file bfloat16 on a GPU, else float32"
    command.add_argument("--dtype", choices=("float32", "bfloat16"), help=about)


def _add_basis(command: argparse.ArgumentParser, defaults: CalibrationConfig) -> None:
    command.add_argument("--basis", choices=CalibrationConfig.BASES, default="", help="of keys")
    about = "default sequential (blocks of channels one after the other) where model and text allow it"
    command.add_argument("--rounding", choices=fmt.ROUNDINGS, default="", help=about)
    command.add_argument("--shared", action="store_true", help="one matrix for all heads of a layer")
    command.add_argument(
        "--damping", type=float, default=defaults.damping, metavar="X", help="of covariances"
    )


def _settings(arguments: argparse.Namespace, **sizes: int) -> CalibrationConfig:
    return CalibrationConfig(
        basis=arguments.basis,
        per_head=not arguments.shared,
        damping=arguments.damping,
        rounding=arguments.rounding,
        **sizes,
    )


def _run_nothing(arguments: argparse.Namespace) -> None:
    if not arguments.version:
        raise ConfigError("a command is needed (see oscar --help)")
    from importlib.metadata import version

    print(f"oscar {version('oscar-kv')}")


def _run_calibrate(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments, tokens=arguments.tokens, context=arguments.context)
    from .evaluation.bars import Bars
    from .hf.calibrate import calibrate

    with Bars() as bars:
        calibrate(
            arguments.model,
            arguments.text,
            arguments.out,
            settings,
            field=arguments.field,
            all_layers=arguments.all_layers,
            batch_size=arguments.batch_size,
            save_every=arguments.save_every,
            restart=arguments.restart,
            model_id=arguments.model_id,
            device_map=arguments.device_map,
            dtype=arguments.dtype,
            progress=bars,
        )
    report = (pathlib.Path(arguments.out) / "report.md").read_text(encoding="utf-8")
    print(report.split("\n![")[0])
    print(f"Rotation set and report: {arguments.out}")


def _run_fit(arguments: argparse.Namespace) -> None:
    settings = _settings(arguments)
    from .hf.calibrate import fit_rotation_set
    from .rotations import store
    from .rotations.statistics import STATISTICS_FILE, read_statistics

    path = pathlib.Path(arguments.statistics)
    statistics, header = read_statistics(path / STATISTICS_FILE if path.is_dir() else path)
    if header is None:
        raise CheckpointError(f"{path} does not say of which model it is: calibrate writes it with a header")
    if settings.basis == "auto":
        raise ConfigError("basis 'auto' chooses on held-out text, which statistics do not hold")
    store.save_safetensors(fit_rotation_set(statistics, header, settings), arguments.out)
    print(f"Rotation set: {arguments.out}")


def _run_generate(arguments: argparse.Namespace) -> None:
    import torch

    from .hf.cache import OscarCache
    from .hf.calibrate import load_model
    from .hf.layer import ATTENTION

    model, tokenizer = load_model(arguments.model, device_map=arguments.device_map, dtype=arguments.dtype)
    cache = OscarCache(arguments.rotations, model, model_id=arguments.model_id)
    model.set_attn_implementation(ATTENTION)
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(model.device)
    with torch.no_grad():
        tokens = model.generate(  # pyright: ignore[reportCallIssue]
            **inputs, past_key_values=cache, max_new_tokens=arguments.max_new_tokens, do_sample=False
        )
    print(tokenizer.decode(tokens[0], skip_special_tokens=True))


def _run_inspect(arguments: argparse.Namespace) -> None:
    from .interchange.inspect import inspect

    print(inspect(arguments.path).text())


def _run_convert(arguments: argparse.Namespace) -> None:
    from .interchange.convert import convert

    report = convert(
        arguments.source,
        arguments.destination,
        target=arguments.target,
        values=arguments.values,
        model=arguments.model,
        num_query_heads=arguments.query_heads,
        num_key_value_heads=arguments.key_value_heads,
        schema=arguments.schema,
        loader=arguments.loader,
        layer_ids=arguments.layer_ids,
    )
    print(report.text())


def _run_evaluate(arguments: argparse.Namespace) -> None:
    raise ConfigError("evaluate runs the decoder of oscar_jax: pip install 'oscar-kv[demo]'")


if __name__ == "__main__":
    sys.exit(main())
