"""The `oscar` command: calibrate, evaluate, generate, inspect and convert.

This file parses arguments, calls one function per subcommand and turns every error the user can cause into
one line on standard error and exit code 2. Frameworks are imported inside the subcommands, so that `--help`
and wrong arguments answer at once.
"""

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import CheckpointError, ConfigError, OscarError
from ..core.window_policy import DEFAULT_WINDOW_POLICY, EVERY_LAYER_INT2, RING_WINDOW, WindowPolicy

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
SHOWN_CHARACTERS = 400  # of a prompt
DTYPES = ("float32", "bfloat16")

_DESCRIPTION = "2-bit key/value caches for language models: calibrate, judge and run them."
_EPILOG = """\
a first session:
  oscar calibrate --model gemma.gguf --text notes/ code/*.py --out rotations/
  oscar evaluate  --model gemma.gguf --rotations rotations/ --text book.txt --context 4096 --out report/
  oscar generate  --model gemma.gguf --rotations rotations/ --prompt "Once upon a time"
"""
_CALIBRATE_EPILOG = """\
Text is a file, a directory, a glob, a .jsonl file (with --field) or - for standard input; every argument
gives an equal share of the tokens. Interrupted? The same command goes on where it stopped.

examples:
  oscar calibrate --model gemma.gguf --text notes/ src/*.py --out rotations/
  oscar calibrate --model Qwen3-4B/ --text chats.jsonl --field text --tokens 60000 --out rotations/
  oscar calibrate --model gemma.gguf --text book.txt --basis balanced --damping 0.3 --out rotations/
"""
_EVALUATE_EPILOG = """\
Every --text is one stream that is judged on its own and pooled with the others; give it twice to judge two
kinds of text. All methods see the same tokens, quantize the same layers and keep the same BF16 windows.

methods:
  bf16           the same model with a BF16 cache: the reference
  int2           the rotation set, through the real 2-bit cache
  int2:BASIS     the real cache with another basis fitted to the same statistics; BASIS is channel_balanced,
                 balanced, oscar, hadamard or identity; @DAMPING and @ALPHA may follow (default @0.1@1.6)
  published      the published recipe, simulated: layer-shared rotation, clip .96/.92, asymmetric codes with
                 scale and zero per 128 channels
  hadamard       the same quantizer behind a plain Hadamard rotation, simulated
  naive          asymmetric INT2 without a rotation, simulated

examples:
  oscar evaluate --model gemma.gguf --rotations rotations/ --text book.txt --context 4096 --out report/
  oscar evaluate --model gemma.gguf --rotations rotations/ --text book.txt --text src/ --context 16384 \\
                 --methods bf16,int2,int2:oscar,published --every 4 --out report/
  oscar evaluate --model gemma.gguf --rotations rotations/ --needle --context 4096 --methods int2 --out n/
"""
_GENERATE_EPILOG = """\
examples:
  oscar generate --model gemma.gguf --rotations rotations/ --prompt "The capital of France is"
  oscar generate --model gemma.gguf --cache bf16 --prompt-file question.txt --max-new-tokens 200
  oscar generate --model gemma.gguf --rotations rotations/ --prompt One --prompt Two --temperature 0.8
"""
_INSPECT_EPILOG = """\
examples:
  oscar inspect rotations/
  oscar inspect rotations.safetensors
  oscar inspect k_rotation.pt
  oscar inspect model.gguf
  oscar inspect format
"""
_CONVERT_EPILOG = """\
SOURCE is a rotation set (directory or .safetensors), a directory or key file of a published .pt pair, or a
.gguf file with rotation tensors. What DESTINATION becomes follows from its suffix, or from --to.

examples:
  oscar convert rotations/ rotations.safetensors
  oscar convert published/k_rotation.pt mine/ --values published/v_rotation.pt --model Qwen3-8B/
  oscar convert rotations/ for-sglang/ --to pair
  oscar convert rotations/ rotated.gguf --base model.gguf
"""


_FORMATTER = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (2 for every error the user can cause)."""
    try:
        arguments = build_parser().parse_args(argv)
        return arguments.run(arguments) or 0
    except (OscarError, OSError, NotImplementedError) as error:
        print(f"oscar: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except ModuleNotFoundError as error:
        print(f"oscar: error: {error.name} is not installed: pip install 'oscar-kv[demo]'", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("\noscar: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return " ".join(str(error).split()) or type(error).__name__


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(
        prog="oscar",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=_FORMATTER,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_calibrate(commands)
    _add_evaluate(commands)
    _add_generate(commands)
    _add_inspect(commands)
    _add_convert(commands)
    return parser


def _add_command(commands, name: str, summary: str, epilog: str, run) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=_FORMATTER,
    )
    command.set_defaults(run=run)
    return command


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="a .gguf file, a Hugging Face checkpoint directory, or gemma3-270m (from its pip package)",
    )
    command.add_argument(
        "--dtype",
        choices=DTYPES,
        help="arithmetic of the model; default: float32 on a CPU, bfloat16 on a GPU",
    )


def _add_calibrate(commands) -> None:
    defaults = CalibrationConfig()
    command = _add_command(
        commands,
        "calibrate",
        "fit a rotation set to a model on some text",
        _CALIBRATE_EPILOG,
        _run_calibrate,
    )
    _add_model(command)
    command.add_argument(
        "--text", required=True, nargs="+", metavar="TEXT", help="calibration text, see below"
    )
    command.add_argument("--out", required=True, metavar="DIR", help="where rotation set and report go")
    command.add_argument("--field", metavar="NAME", help="field of .jsonl lines that holds the text")
    command.add_argument(
        "--tokens",
        type=int,
        default=defaults.tokens,
        metavar="N",
        help="tokens to read (default %(default)s)",
    )
    command.add_argument(
        "--context",
        type=int,
        default=defaults.context,
        metavar="N",
        help="tokens per sequence (default %(default)s)",
    )
    command.add_argument(
        "--basis",
        choices=CalibrationConfig.BASES,
        default=defaults.basis,
        help="key basis; auto chooses basis and alpha per layer and head on held-out tokens, which pays when "
        "these are as long as the contexts to be served (default %(default)s)",
    )
    heads = command.add_mutually_exclusive_group()
    heads.add_argument(
        "--per-head", action="store_true", default=True, help="one matrix per key/value head (the default)"
    )
    heads.add_argument(
        "--shared", dest="per_head", action="store_false", help="one matrix for all heads of a layer"
    )
    command.add_argument(
        "--damping",
        type=float,
        default=defaults.damping,
        metavar="X",
        help="added to covariances, relative to the mean variance (default %(default)s; not used by auto)",
    )
    command.add_argument(
        "--all-layers",
        action="store_true",
        help=f"also layers with a sliding window of at most {RING_WINDOW} tokens",
    )
    command.add_argument(
        "--chunk", type=int, default=512, metavar="N", help="tokens per forward pass (default %(default)s)"
    )
    command.add_argument(
        "--save-every",
        type=int,
        default=8,
        metavar="N",
        help="save the statistics every N chunks, to resume from (default %(default)s)",
    )
    command.add_argument("--restart", action="store_true", help="forget an interrupted calibration in DIR")


def _add_evaluate(commands) -> None:
    command = _add_command(
        commands,
        "evaluate",
        "measure what a 2-bit cache costs on a model",
        _EVALUATE_EPILOG,
        _run_evaluate,
    )
    _add_model(command)
    command.add_argument(
        "--rotations", metavar="DIR", help="what `oscar calibrate` wrote, or a .safetensors file"
    )
    command.add_argument(
        "--text", nargs="+", action="append", metavar="TEXT", help="one stream; may be given several times"
    )
    command.add_argument("--field", metavar="NAME", help="field of .jsonl lines that holds the text")
    command.add_argument(
        "--context", type=int, default=4096, metavar="N", help="tokens of every stream (default %(default)s)"
    )
    command.add_argument(
        "--methods",
        default="bf16,int2,published,hadamard,naive",
        metavar="LIST",
        help="comma-separated, see below (default %(default)s)",
    )
    command.add_argument("--out", required=True, metavar="DIR", help="where table, JSON and plot go")
    command.add_argument(
        "--every", type=int, default=1, metavar="N", help="judge every N-th position (default %(default)s)"
    )
    command.add_argument(
        "--chunk", type=int, default=64, metavar="N", help="tokens per forward pass (default %(default)s)"
    )
    command.add_argument(
        "--all-layers", action="store_true", help="quantize layers with a sliding window too, in every method"
    )
    command.add_argument(
        "--needle", action="store_true", help="retrieval of planted keys instead of perplexity"
    )
    command.add_argument(
        "--needles", type=int, default=10, metavar="N", help="keys planted per context (default %(default)s)"
    )
    command.add_argument(
        "--trials", type=int, default=3, metavar="N", help="contexts with new keys (default %(default)s)"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the needles (default %(default)s)"
    )


def _add_generate(commands) -> None:
    command = _add_command(
        commands, "generate", "continue prompts with a 2-bit or BF16 cache", _GENERATE_EPILOG, _run_generate
    )
    _add_model(command)
    command.add_argument("--rotations", metavar="DIR", help="needed for --cache int2")
    command.add_argument(
        "--cache", choices=("int2", "bf16"), help="default: int2 with --rotations, else bf16"
    )
    command.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be given several times: a batch"
    )
    command.add_argument("--prompt-file", action="append", metavar="FILE", help="a prompt read from a file")
    command.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default %(default)s)")
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default %(default)s)"
    )
    command.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="sample among the N likeliest tokens"
    )
    command.add_argument(
        "--top-p", type=float, default=1.0, metavar="X", help="sample among the likeliest tokens of mass X"
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the sampling (default %(default)s)"
    )
    command.add_argument(
        "--all-layers", action="store_true", help="quantize layers with a sliding window too"
    )


def _add_inspect(commands) -> None:
    command = _add_command(
        commands,
        "inspect",
        "say what a rotation set, a rotation file or a checkpoint contains",
        _INSPECT_EPILOG,
        _run_inspect,
    )
    command.add_argument(
        "path", metavar="PATH", help="a directory or file, or the word format: the INT2 page format itself"
    )


def _add_convert(commands) -> None:
    command = _add_command(
        commands,
        "convert",
        "turn a rotation set into another file format",
        _CONVERT_EPILOG,
        _run_convert,
    )
    command.add_argument("source", metavar="SOURCE", help="a rotation set, or another project's rotations")
    command.add_argument("destination", metavar="DESTINATION", help="a directory or file")
    command.add_argument(
        "--to",
        dest="target",
        metavar="FORM",
        help="orbax, safetensors, pair, gguf or absorb (values baked into the weights of --base)",
    )
    command.add_argument("--values", metavar="FILE", help="value file of a published pair")
    command.add_argument("--base", metavar="PATH", help="model to bake rotations into (gguf, absorb)")
    command.add_argument("--model", metavar="PATH", help="model that SOURCE must fit; gives its head counts")
    command.add_argument("--query-heads", type=int, metavar="N", help="if neither SOURCE nor --model says it")
    command.add_argument("--key-value-heads", type=int, metavar="N", help="likewise")


# The subcommands.


def _run_calibrate(arguments: argparse.Namespace) -> int:
    settings = CalibrationConfig(
        tokens=arguments.tokens,
        context=arguments.context,
        basis=arguments.basis,
        per_head=arguments.per_head,
        damping=arguments.damping,
    )
    chunk = _multiple_of_page("chunk", arguments.chunk)
    if arguments.save_every < 1:
        raise ConfigError(f"save-every = {arguments.save_every}, allowed: >= 1")
    from ..calibration import covariance
    from ..calibration import job as calibration_job
    from ..calibration import report as calibration_report
    from ..calibration import statistics as calibration_statistics
    from ..core import rotation_header
    from ..evaluation import streams as text
    from ..evaluation.job import about_this_run
    from ..evaluation.stepper import make_runner
    from ..rotations import bases, store

    model, config, tokenizer = _load_model(arguments)
    streams = [
        text.read_stream([source], _encoder(tokenizer), settings.tokens, arguments.field)
        for source in arguments.text
    ]
    sequences = text.cut_sequences(streams, settings.tokens, settings.context, config.bos_token_id)
    fit, held_out = calibration_statistics.split_sequences(sequences)
    layers = _int2_layers(arguments, config)
    digest = text.combined_digest(streams)
    about = about_this_run(
        config,
        str(model.dtype),
        basis=settings.basis,
        per_head=settings.per_head,
        damping=settings.damping,
        context=settings.context,
        chunk=chunk,
        layers_with_rotation=list(layers),
        fit_tokens=sum(map(len, fit)),
        held_out_tokens=sum(map(len, held_out)),
        held_out_is_separate=fit[-1] is not held_out[-1],
        corpus_digest=digest,
        statistics_version=covariance.STATISTICS_VERSION,
        document_digests=[d for stream in streams for d in stream.document_digests],
    )
    fingerprint = calibration_job.model_fingerprint(_model_path(arguments))
    run_digest = text.text_digest(
        repr((fingerprint, [s.tolist() for s in fit], chunk, layers, about["dtype"], about["device"]))
    )
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    state_path = out / calibration_statistics.STATE_FILE
    if arguments.restart:
        state_path.unlink(missing_ok=True)
    with _progress() as progress:
        task = progress.add_task("statistics", total=sum(map(len, fit)))
        statistics = calibration_statistics.gather_statistics(
            model,
            config,
            layers,
            fit,
            chunk=chunk,
            save_every=arguments.save_every,
            state_path=state_path,
            run_digest=run_digest,
            on_chunk=lambda tokens: progress.advance(task, tokens),
        )
        header = rotation_header.RotationHeader(
            model_id=config.model_id,
            layers=layers,
            num_query_heads=config.num_query_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rope="half",
            basis=settings.basis,
            basis_version=bases.BASIS_VERSION,
            corpus_digest=digest,
            calibration_tokens=about["fit_tokens"],
            versions=about["versions"],
            created=about["created"],
            extra={
                "model_fingerprint": fingerprint,
                "document_digests": about["document_digests"],
                "damping": settings.damping,
                "per_head": settings.per_head,
            },
        )
        watching = progress.add_task("held-out text", total=sum(map(len, held_out)))
        choosing = progress.add_task("choice per layer", total=len(layers))
        result = calibration_job.fit_rotation_set(
            make_runner(model, config),
            statistics,
            held_out,
            settings,
            header,
            chunk=chunk,
            on_chunk=lambda tokens: progress.advance(watching, tokens),
            on_layer=lambda layer: progress.advance(choosing, 1),
        )
    store.save_rotation_set(result.rotation_set, out / calibration_job.ROTATION_DIRECTORY)
    calibration_statistics.save_statistics(statistics, out / calibration_statistics.STATISTICS_FILE)
    calibration_report.save_report(result, out, about)
    state_path.unlink(missing_ok=True)
    print((out / "report.md").read_text().split("\n![")[0])
    print(f"Rotation set and report: {out}")
    return 0


def _run_evaluate(arguments: argparse.Namespace) -> int:
    from ..calibration import job as calibration_job
    from ..calibration import statistics as calibration_statistics
    from ..evaluation import job as evaluation_job
    from ..evaluation import methods as evaluation_methods
    from ..evaluation import report as evaluation_report
    from ..evaluation import streams as text
    from ..evaluation.stepper import make_runner
    from ..rotations import store

    rotation_set, statistics = None, None
    if arguments.rotations is not None:
        path = calibration_job.rotation_path(arguments.rotations)
        rotation_set = store.load_rotation_set(path)
        statistics_path = pathlib.Path(arguments.rotations) / calibration_statistics.STATISTICS_FILE
        if statistics_path.exists():
            statistics = calibration_statistics.load_statistics(statistics_path)
    names = [name.strip() for name in arguments.methods.split(",") if name.strip()]
    evaluation_methods.check_method_names(names)
    if not arguments.needle and not arguments.text:
        raise ConfigError("--text is needed (without it only --needle works)")
    if arguments.context < 1:
        raise ConfigError(f"context = {arguments.context}, allowed: >= 1")
    for source in (source for sources in arguments.text or [] for source in sources):
        text.check_source(source)

    model, config, tokenizer = _load_model(arguments)
    encode = _encoder(tokenizer)
    layers = _int2_layers(arguments, config)
    evaluation_job.check_evaluation(arguments.context, arguments.chunk, arguments.every, config)
    methods = evaluation_methods.resolve_methods(names, config, layers, rotation_set, statistics)
    streams = [
        text.read_stream(sources, encode, arguments.context, arguments.field)
        for sources in arguments.text or []
    ]
    geometry = config.cache_config()
    about = evaluation_job.about_this_run(
        config,
        str(model.dtype),
        context=arguments.context,
        chunk=arguments.chunk,
        every=arguments.every,
        sink_tokens=geometry.sink_tokens,
        recent_tokens=geometry.recent_tokens,
        quantized_layers=list(layers),
        rotations=evaluation_job.describe_rotations(rotation_set),
    )
    out = pathlib.Path(arguments.out)
    runner = make_runner(model, config)
    if arguments.needle:
        return _run_needle(arguments, about, runner, methods, streams, tokenizer, out)
    sequences = [evaluation_job.with_bos(stream, arguments.context, config) for stream in streams]
    for stream in streams:
        if evaluation_job.is_calibration_text(stream, rotation_set):
            print(
                f"oscar: warning: {stream.label} is part of the calibration text; its figures flatter int2",
                file=sys.stderr,
            )
    results = []
    with _progress() as progress:
        task = progress.add_task("evaluation", total=arguments.context * len(streams))
        for stream, tokens in zip(streams, sequences):
            result = evaluation_job.evaluate_stream(
                runner,
                methods,
                stream,
                tokens,
                layers,
                chunk=arguments.chunk,
                every=arguments.every,
                on_chunk=lambda count: progress.advance(task, count),
            )
            results.append(result)
            # Saved after every text, so that an interrupted run keeps what it has measured.
            document = evaluation_report.evaluation_document(results, methods, about)
            evaluation_report.save_evaluation(document, results, methods, out)
    for part in [*document["texts"], {"label": "all texts", "methods": document["methods"]}]:
        if len(document["texts"]) > 1 or "digest" in part:
            _print_evaluation(part["label"], part["methods"])
    print(f"Quantized in every method: layers {evaluation_report.short_list(layers)}. Report: {out}")
    return 0


def _run_needle(arguments, about, runner, methods, streams, tokenizer, out: pathlib.Path) -> int:
    from ..evaluation import needles

    encode = _encoder(tokenizer)
    with _progress() as progress:
        task = progress.add_task("needles", total=arguments.trials * len(methods))
        document = needles.run_needles(
            runner,
            methods,
            streams,
            encode,
            lambda ids: tokenizer.decode(list(ids)),
            context=arguments.context,
            chunk=arguments.chunk,
            needles=arguments.needles,
            trials=arguments.trials,
            seed=arguments.seed,
            on_context=lambda: progress.advance(task, 1),
        )
    out.mkdir(parents=True, exist_ok=True)
    document = {**about, **document}
    (out / "needle.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = needles.needle_table(document)
    (out / "needle.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


def _print_evaluation(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("method", "bits", "perplexity", "KL mean", "median", "p99", "2nd half", "top-1", "cache MB"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=name == "method")
    for row in rows:
        size = row["cache_bytes"]["all_layers"] / 1e6
        table.add_row(
            row["method"],
            f"{row['bits_per_element']:.4g}",
            f"{row['perplexity']:.4g}",
            f"{row['kl_mean']:.4g}",
            f"{row['kl_median']:.4g}",
            f"{row['kl_p99']:.4g}",
            f"{row['kl_mean_second_half']:.4g}",
            f"{100 * row['top1']:.1f} %",
            f"{size:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def _run_generate(arguments: argparse.Namespace) -> int:
    prompts = list(arguments.prompt or [])
    for name in arguments.prompt_file or []:
        try:
            prompts.append(pathlib.Path(name).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            raise ConfigError(f"prompt file {name} is not UTF-8 text") from None
    if not prompts:
        raise ConfigError("a prompt is needed: --prompt TEXT or --prompt-file FILE")
    kind = arguments.cache or ("int2" if arguments.rotations else "bf16")
    if kind == "int2" and arguments.rotations is None:
        raise ConfigError("--cache int2 needs --rotations")
    from ..calibration.job import rotation_path
    from ..generate import Generator, SamplingConfig, TextStream
    from ..rotations import store

    sampling = SamplingConfig(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    rotations = None
    if kind == "int2":
        rotations = store.load_rotation_set(rotation_path(arguments.rotations))
    model, config, tokenizer = _load_model(arguments)
    if rotations is not None:
        rotations.require_fits(config, _int2_layers(arguments, config), model_id=config.model_id)
    head = [] if config.bos_token_id is None else [config.bos_token_id]
    encoded = [head + _encoder(tokenizer)(prompt) for prompt in prompts]
    longest = max(map(len, encoded)) + arguments.max_new_tokens
    if longest > config.max_positions:
        raise ConfigError(
            f"prompt and new tokens make {longest} tokens, the model has {config.max_positions} positions"
        )
    generator = Generator(
        model,
        config,
        cache=kind,
        rotations=rotations,
        sampling=sampling,
        window_policy=_window_policy(arguments),
    )
    streams = [TextStream(tokenizer) for _ in prompts]
    texts = ["" for _ in prompts]
    single = len(prompts) == 1

    def show(sequence: int, token: int) -> None:
        piece = streams[sequence].push(token)
        texts[sequence] += piece
        if single:
            print(piece, end="", flush=True)

    if single:
        print(_shown(prompts[0]), end="", flush=True)
    result = generator(encoded, arguments.max_new_tokens, on_token=show)
    for number, stream in enumerate(streams):
        rest = stream.finish()
        texts[number] += rest
        if single:
            print(rest)
        else:
            print(f"[{number + 1}] {_shown(prompts[number])}{texts[number]}\n")
    for line in _generation_summary(result.statistics, config):
        print(line, file=sys.stderr)
    return 0


def _shown(prompt: str) -> str:
    """The end of a prompt, which is what the new text goes on from."""
    return prompt if len(prompt) <= SHOWN_CHARACTERS else f"[...] {prompt[-SHOWN_CHARACTERS:]}"


def _generation_summary(statistics: Any, config: Any) -> list[str]:
    size = statistics.cache_bytes
    ratio = size["bfloat16"] / max(1, size["total"])
    return [
        f"{config.model_id}, cache {statistics.cache}: {statistics.prompt_tokens} prompt tokens at "
        f"{statistics.prefill_tokens_per_second:,.1f}/s, {statistics.new_tokens} new tokens at "
        f"{statistics.decode_tokens_per_second:,.1f}/s (and {statistics.compile_seconds:.1f} s to compile)",
        f"cache {size['total']:,} bytes, the same tokens in BF16 {size['bfloat16']:,} ({ratio:.2f}x); "
        f"{size['int2_pages']} INT2 pages, {size['window_pages']} BF16 pages",
    ]


def _run_inspect(arguments: argparse.Namespace) -> int:
    if arguments.path == "format":
        print(_describe_format())
        return 0
    from ..calibration.job import rotation_path
    from ..interchange import inspect

    path = rotation_path(arguments.path)
    if not path.exists() and arguments.path not in _weight_packages():
        raise ConfigError(f"{path}: no such file or directory")
    is_model = arguments.path in _weight_packages() or (path.is_dir() and (path / "config.json").exists())
    if is_model:
        print(_describe_model(arguments.path))
    elif path.suffix == ".gguf":
        print(_describe_model(arguments.path))
        try:
            print(inspect.inspect(path).text())
        except CheckpointError as error:
            print(f"rotations: {error}")
    else:
        print(inspect.inspect(path).text())
    return 0


def _weight_packages() -> Mapping[str, Any]:
    from ..models.weights import WEIGHT_PACKAGES

    return WEIGHT_PACKAGES


def _describe_model(name: str) -> str:
    from ..models.cached_attention import int2_layers
    from ..models.weights import open_checkpoint, resolve_model_path

    config, source = open_checkpoint(resolve_model_path(name))
    paged = int2_layers(config)
    dense = 4 * config.num_key_value_heads * config.head_dim
    packed = config.num_key_value_heads * fmt.int2_page_bytes(config.head_dim) / fmt.PAGE_TOKENS
    rows = {
        "model": config.model_id,
        "family": config.family,
        "tensors": len(source.shapes),
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "vocabulary": config.vocab_size,
        "query heads": config.num_query_heads,
        "key/value heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "positions": config.max_positions,
        "rope": config.rope,
        "INT2 layers": f"{len(paged)}: {', '.join(map(str, paged))}" if paged else "none by default",
        "bytes per token": f"{packed:g} in INT2 pages, {dense} in BF16, per layer",
    }
    return "\n".join(f"{name:>20}: {value}" for name, value in rows.items())


def _describe_format() -> str:
    rows = {
        "format": fmt.format_id(),
        "page": f"{fmt.PAGE_TOKENS} tokens of one sequence and one key/value head",
        "windows": f"{fmt.SINK_TOKENS} sink and {fmt.RECENT_TOKENS} recent tokens in BF16",
        "bits": f"{fmt.CODE_BITS} per code, {fmt.CODES_PER_WORD} codes per int32 word",
    }
    shapes = fmt.int2_array_shapes(1, 1, 128)
    rows |= {name: f"{dtype} {shapes[name]} at D = 128" for name, dtype in fmt.INT2_ARRAYS.items()}
    for head_dim in (64, 128, 256):
        size = fmt.int2_page_bytes(head_dim)
        bits = 8 * size / (2 * fmt.PAGE_TOKENS * head_dim)
        rows[f"bytes, D = {head_dim}"] = f"{size} per page, {bits:g} bits per element"
    return "\n".join(f"{name:>20}: {value}" for name, value in rows.items())


def _run_convert(arguments: argparse.Namespace) -> int:
    from ..calibration.job import rotation_path
    from ..interchange import convert

    report = convert.convert(
        rotation_path(arguments.source),
        arguments.destination,
        target=arguments.target,
        values=arguments.values,
        base=arguments.base,
        model=arguments.model,
        num_query_heads=arguments.query_heads,
        num_key_value_heads=arguments.key_value_heads,
    )
    print(report.text())
    return 0


def _window_policy(arguments: argparse.Namespace) -> WindowPolicy:
    return EVERY_LAYER_INT2 if arguments.all_layers else DEFAULT_WINDOW_POLICY


def _int2_layers(arguments: argparse.Namespace, config: Any) -> tuple[int, ...]:
    from ..models.cached_attention import int2_layers

    policy = _window_policy(arguments)
    layers = int2_layers(config, window_policy=policy)
    if not layers:
        raise ConfigError(
            f"every layer has a sliding window of at most {policy.ring_window} tokens and stays BF16: "
            "use --all-layers"
        )
    return layers


def _multiple_of_page(name: str, value: int) -> int:
    if value < fmt.PAGE_TOKENS or value % fmt.PAGE_TOKENS:
        raise ConfigError(f"{name} = {value}, allowed: multiples of {fmt.PAGE_TOKENS}")
    return value


def _model_path(arguments: argparse.Namespace) -> pathlib.Path:
    from ..models.weights import resolve_model_path

    return resolve_model_path(arguments.model)


def _load_model(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    from rich.console import Console

    path = _model_path(arguments)
    with Console(stderr=True).status(f"loading {path.name}"):
        return load_once(str(path), arguments.dtype)


@functools.lru_cache(maxsize=1)
def load_once(path: str, dtype: str | None) -> tuple[Any, Any, Any]:
    """Decoder, configuration and tokenizer; commands that follow each other in one process share them."""
    from ..models.weights import load_model

    return load_model(path, dtype=dtype)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _progress() -> Any:
    """A progress bar on standard error: done, tokens per second, time left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
