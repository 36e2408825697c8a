"""What each command calls and prints. Frameworks are imported inside, so that --help answers at once."""

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING

from ..core.config import CalibrationConfig
from ..core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..evaluation.subject import Subject


def version() -> str:
    """The version of the installed distribution."""
    from .. import __version__

    return __version__


def run_calibrate(arguments: argparse.Namespace) -> None:
    """`oscar calibrate`: a rotation set, statistics and a report in --out."""
    settings = _settings(arguments, tokens=arguments.tokens, context=arguments.context)
    from ..calibration.job import calibrate
    from ..evaluation.bars import Bars

    with Bars() as bars:
        calibrate(
            _model(arguments),
            arguments.text,
            arguments.out,
            settings,
            field=arguments.field,
            all_layers=arguments.all_layers,
            chunk=arguments.chunk,
            save_every=arguments.save_every,
            restart=arguments.restart,
            progress=bars,
        )
    if not _first_host():
        return
    report = (pathlib.Path(arguments.out) / "report.md").read_text(encoding="utf-8")
    print(report.split("\n![")[0])
    print(f"Rotation set and report: {arguments.out}")


def run_fit(arguments: argparse.Namespace) -> None:
    """`oscar fit`: a rotation set from statistics alone."""
    settings = _settings(arguments)
    from ..calibration.job import fit
    from ..interchange.inspect import inspect

    fit(
        arguments.statistics,
        arguments.out,
        settings,
        model_id=arguments.model_id,
        num_query_heads=arguments.query_heads,
    )
    print(inspect(arguments.out).text())
    print(f"Rotation set: {arguments.out}")


def run_evaluate(arguments: argparse.Namespace) -> None:
    """`oscar evaluate`: tables of fidelity."""
    from ..evaluation import job
    from ..evaluation.bars import Bars
    from ..evaluation.methods import check_method_names
    from . import output

    methods = _names(arguments.methods)
    if arguments.as_exported is not None:
        methods.append(f"exported:{arguments.as_exported}".removesuffix(":"))
    check_method_names(methods)
    if not arguments.text:
        raise ConfigError("--text is needed")
    model = _model(arguments)
    with Bars() as bars:
        document = job.evaluate(
            model,
            arguments.text,
            arguments.out,
            rotations=arguments.rotations,
            context=arguments.context,
            methods=methods,
            every=arguments.every,
            chunk=arguments.chunk,
            field=arguments.field,
            all_layers=arguments.all_layers,
            progress=bars,
            warn=output.warn,
            say=output.say if _first_host() else lambda message: None,
        )
    if _first_host():
        output.print_evaluation(document, arguments.out)


def run_tasks(arguments: argparse.Namespace) -> None:
    """`oscar tasks`: accuracy of every method at every length."""
    from ..evaluation.bars import Bars
    from ..evaluation.methods import check_method_names
    from ..evaluation.paged import PAGED
    from ..evaluation.task_job import evaluate_tasks
    from ..evaluation.task_report import task_table
    from . import output

    methods = _names(arguments.methods)
    check_method_names([name for name in methods if name != PAGED] or ["bf16"])
    try:
        lengths = [int(length) for length in _names(arguments.lengths)]
    except ValueError:
        raise ConfigError(f"--lengths {arguments.lengths!r}, allowed: whole numbers, as 4096,8192") from None
    model = _model(arguments)
    with Bars() as bars:
        document = evaluate_tasks(
            model,
            arguments.text or [],
            arguments.out,
            rotations=arguments.rotations,
            lengths=lengths,
            tasks=_names(arguments.tasks),
            methods=methods,
            questions=arguments.questions,
            trials=arguments.trials,
            seed=arguments.seed,
            new_tokens=arguments.new_tokens,
            chat=arguments.chat,
            chunk=arguments.chunk,
            field=arguments.field,
            all_layers=arguments.all_layers,
            restart=arguments.restart,
            progress=bars,
            say=output.say if _first_host() else lambda message: None,
        )
    if _first_host():
        print("\n".join(task_table(document)))
        print(f"Report: {arguments.out}")


def run_generate(arguments: argparse.Namespace) -> None:
    """`oscar generate`: continues prompts; one is shown token by token, several when they are done."""
    from ..evaluation.streams import read_text

    prompts = list(arguments.prompt or [])
    prompts += [read_text(pathlib.Path(name)) for name in arguments.prompt_file or []]
    if not prompts:
        raise ConfigError("a prompt is needed: --prompt TEXT or --prompt-file FILE")
    kind = arguments.cache or ("int2" if arguments.rotations else "bf16")
    if kind == "int2" and arguments.rotations is None:
        raise ConfigError("--cache int2 needs --rotations")
    from ..evaluation.subject import window_policy
    from ..generate import Generator, SamplingConfig
    from ..rotations.store import load_rotation_set
    from ..sharding import check_batch
    from ..text_stream import TextStream
    from . import output

    sampling = SamplingConfig(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    rotations = load_rotation_set(arguments.rotations) if kind == "int2" else None
    subject = _model(arguments)
    config = subject.config
    if rotations is not None:
        layers = subject.int2_layers(all_layers=arguments.all_layers)
        rotations.require_fits(config, layers, model_id=config.model_id, fingerprint=config.fingerprint)
    head = [] if config.bos_token_id is None else [config.bos_token_id]
    if arguments.chat:  # a template says itself whether a text starts with a special token
        encoded = [subject.encode(subject.chat(prompt)) for prompt in prompts]
    else:
        encoded = [subject.encode(prompt) for prompt in prompts]
        # A prompt that starts with the token itself does not get a second one.
        encoded = [ids if head and ids[:1] == head else head + ids for ids in encoded]
    longest = max(map(len, encoded)) + arguments.max_new_tokens
    if longest > config.max_positions:
        raise ConfigError(
            f"prompt and new tokens make {longest} tokens, the model has {config.max_positions} positions"
        )
    if subject.mesh is not None:
        check_batch(len(encoded), subject.mesh)
    generator = Generator(
        subject.model,
        config,
        cache=kind,
        rotations=rotations,
        sampling=sampling,
        window_policy=window_policy(arguments.all_layers),
        tokenizer=subject.tokenizer,
        mesh=subject.mesh,
    )
    stop = arguments.stop or []
    if not _first_host():
        generator(encoded, arguments.max_new_tokens, stop=stop)
        return
    shown = output.Continuations(prompts, [TextStream(subject.tokenizer, stop) for _ in prompts])
    result = generator(encoded, arguments.max_new_tokens, on_token=shown.token, stop=stop)
    shown.finish()
    for line in output.generation_summary(result.statistics, config.model_id):
        print(line, file=sys.stderr)


def run_inspect(arguments: argparse.Namespace) -> None:
    """`oscar inspect`: a summary of a rotation set, a rotation file, a model, or the format."""
    from .describe import describe_format, describe_model

    if arguments.path == "format":
        print(describe_format())
        return
    from ..interchange import inspect
    from ..models.weights import WEIGHT_PACKAGES

    path = pathlib.Path(arguments.path)
    if not path.exists() and arguments.path not in WEIGHT_PACKAGES:
        raise ConfigError(f"{path}: no such file or directory")
    if arguments.path in WEIGHT_PACKAGES or (path / "config.json").exists():
        print(describe_model(arguments.path))
    elif path.suffix == ".gguf":
        print(describe_model(arguments.path))
        try:
            print(inspect.inspect(path).text())
        except CheckpointError as error:
            print(f"rotations: {error}")
    else:
        print(inspect.inspect(path).text())


def run_convert(arguments: argparse.Namespace) -> None:
    """`oscar convert`: another form of the same rotation set."""
    from ..interchange import convert

    report = convert.convert(
        arguments.source,
        arguments.destination,
        target=arguments.target,
        values=arguments.values,
        base=arguments.base,
        model=arguments.model,
        num_query_heads=arguments.query_heads,
        num_key_value_heads=arguments.key_value_heads,
        schema=arguments.schema,
        loader=arguments.loader,
        layer_ids=arguments.layer_ids,
    )
    print(report.text())


def _names(listed: str) -> list[str]:
    """The parts of a comma-separated option."""
    return [name.strip() for name in listed.split(",") if name.strip()]


def _settings(arguments: argparse.Namespace, **sizes: int) -> CalibrationConfig:
    return CalibrationConfig(
        basis=arguments.basis,
        per_head=arguments.per_head,
        damping=arguments.damping,
        rounding=arguments.rounding,
        **sizes,
    )


def _keep_compiled_programs(wanted: bool) -> None:
    """Programs compiled for an accelerator outlive the process, if JAX's settings do not say otherwise."""
    import jax

    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
        return
    undecided = jax.config.jax_enable_compilation_cache and not jax.config.jax_compilation_cache_dir
    if undecided and jax.default_backend() != "cpu":
        home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        jax.config.update("jax_compilation_cache_dir", str(home / "oscar-kv" / "jax"))


def _model(arguments: argparse.Namespace) -> "Subject":
    from rich.console import Console

    from ..evaluation.subject import load_subject

    mesh = _mesh(arguments)
    _keep_compiled_programs(arguments.compilation_cache)

    with Console(stderr=True).status(f"loading {pathlib.Path(arguments.model).name}"):
        subject = load_subject(arguments.model, arguments.dtype, mesh)
    if name := getattr(arguments, "model_id", None):  # the user says whose rotations fit
        config = dataclasses.replace(subject.config, model_id=name, fingerprint=None)
        return dataclasses.replace(subject, config=config)
    return subject


def _mesh(arguments: argparse.Namespace) -> "Mesh | None":
    """The devices of --mesh, the hosts of --coordinator joined first; None without."""
    import jax

    found = (arguments.coordinator, arguments.hosts, arguments.host)
    if any(part is not None for part in found):
        if None in found or arguments.mesh is None:
            raise ConfigError("several hosts need --mesh, --coordinator, --hosts and --host")
        jax.distributed.initialize(*found)
    if arguments.mesh is None:
        return None
    from ..sharding import parse_mesh

    return parse_mesh(arguments.mesh)


def _first_host() -> bool:
    """Whether this host is the one that prints and writes."""
    import jax

    return jax.process_index() == 0
