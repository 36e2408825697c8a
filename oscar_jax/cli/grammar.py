"""The grammar of the command line: every command with its options, help and examples."""

import argparse
import functools
from typing import NoReturn

from ..core import cache_format as fmt
from ..core.config import CalibrationConfig
from ..core.errors import ConfigError
from ..core.window_policy import RING_WINDOW
from . import commands

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
_FIT_EPILOG = """\
STATISTICS is a file, or the folder of `oscar calibrate` that holds one. `oscar_torch.hf.calibrate_model`
gathers statistics of any transformers model, `oscar_torch.hf.save_statistics` writes the file.

examples:
  oscar fit statistics.safetensors --out rotations/
  oscar fit rotations/ --basis balanced --damping 0.3 --out balanced/
  oscar fit rotations/ --rounding sequential --out sequential/
"""
_EVALUATE_EPILOG = """\
Every --text is one stream that is judged on its own and pooled with the others; give it twice to judge two
kinds of text. All methods see the same tokens, quantize the same layers and keep the same BF16 windows.

methods:
  bf16           the same model with a BF16 cache: the reference
  int2           the rotation set: pages coded by the real quantizer, read where decoding would
  int2:BASIS     the same with another basis fitted to the same statistics; BASIS is channel_balanced,
                 balanced, oscar, hadamard, identity or ordered; @DAMPING and @ALPHA may follow (default
                 @0.1@1.6, ordered @0.1@1.75); int2:nearest and int2:sequential: the default of a rounding
  published      the published recipe, simulated: layer-shared rotation, clip .96/.92, asymmetric codes with
                 scale and zero per 128 channels; published:centered takes the calibrated mean key off first
  hadamard       the same quantizer behind a plain Hadamard rotation, simulated
  naive          asymmetric INT2 without a rotation, simulated
  kivi           as in KIVI, simulated: asymmetric INT2, scale and zero per channel and 32 tokens of keys, per
                 token and 32 channels of values
  fp8            simulated: float8 (e4m3) with a scale per token and head
  exported       the rotation set as another stack reads it from an exported pair (oscar convert --to pair),
                 simulated: asymmetric codes, clip .96/.92, a fixed key mean if the pair carries one, no page
                 means; against int2 it shows what that costs. exported:READER: for a schema version (below
                 3 without key means) or a loader of oscar convert --for; what it would misread is refused

examples:
  oscar evaluate --model gemma.gguf --rotations rotations/ --text book.txt --context 4096 --out report/
  oscar evaluate --model gemma.gguf --rotations rotations/ --text book.txt --text src/ --context 16384 \\
                 --methods bf16,int2,int2:oscar,published --every 4 --out report/
"""
_TASKS_EPILOG = """\
Facts are planted in a long text and asked for; all methods read the same text, each as it would in decoding.

tasks:
  single         one fact of each kind, such as a gate code
  keys           the number of one name among many
  values         four numbers of one name, in four places
  tracking       VAR A = 52317, elsewhere VAR B = VAR A, elsewhere VAR C = VAR B: which are 52317?
  code           a function of the text, to be written again line by line
  writing        --new-tokens after a text of each length, judged by the BF16 model

Methods are those of oscar evaluate, and int2:cache: the rotation set in the real paged cache with the kernels
of this device, read in chunks as when serving. Interrupted? The same command goes on where it stopped.

examples:
  oscar tasks --model gemma.gguf --rotations rotations/ --lengths 1024,2048 --out tasks/
  oscar tasks --model coder.gguf --rotations rotations/ --chat --lengths 4096,8192,16384,32768 --out tasks/
  oscar tasks --model coder.gguf --rotations rotations/ --tasks writing --text src/ --lengths 16384 \\
              --new-tokens 2048 --trials 2 --out writing/
"""
_GENERATE_EPILOG = """\
examples:
  oscar generate --model gemma.gguf --rotations rotations/ --prompt "The capital of France is"
  oscar generate --model gemma.gguf --cache bf16 --prompt-file question.txt --max-new-tokens 200
  oscar generate --model gemma.gguf --rotations rotations/ --prompt One --prompt Two --temperature 0.8
  oscar generate --model Qwen3-4B/ --rotations rotations/ --chat --prompt "What is a cache?"
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
  oscar convert rotations/ for-sglang/ --for sglang
  oscar convert rotations/ rotated.gguf --base model.gguf
"""

_FORMATTER = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=110)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def number(self, flag: str, default: int | float | None, meaning: str) -> None:
        """An option with a number, of the default's type."""
        kind, metavar = (float, "X") if isinstance(default, float) else (_integer, "N")
        shown = meaning if default is None else f"{meaning} (default %(default)s)"
        self.add_argument(flag, type=kind, default=default, metavar=metavar, help=shown)


def _integer(text: str) -> int:
    """An int that fits what devices count with."""
    value = int(text)
    if abs(value) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text} is out of range, allowed: below 2**31")
    return value


_integer.__name__ = "int"  # argparse shows it


class _Version(argparse.Action):
    """Prints the version, looked up only when it is asked for."""

    def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:
        print(f"oscar {commands.version()}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(prog="oscar", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=_FORMATTER)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, summary: str, epilog: str, run) -> _Parser:
        described = summary[0].upper() + summary[1:] + "."
        new = added.add_parser(
            name, help=summary, description=described, epilog=epilog, formatter_class=_FORMATTER
        )
        new.set_defaults(run=run)
        return new

    say = "fit a rotation set to a model on some text"
    _grow_calibrate(command("calibrate", say, _CALIBRATE_EPILOG, commands.run_calibrate))
    say = "fit a rotation set to statistics gathered before, or by transformers"
    _grow_fit(command("fit", say, _FIT_EPILOG, commands.run_fit))
    say = "measure what a 2-bit cache costs on a model"
    _grow_evaluate(command("evaluate", say, _EVALUATE_EPILOG, commands.run_evaluate))
    say = "measure what a model still can do with a 2-bit cache: retrieval, tracking, code, long texts"
    _grow_tasks(command("tasks", say, _TASKS_EPILOG, commands.run_tasks))
    say = "continue prompts with a 2-bit or BF16 cache"
    _grow_generate(command("generate", say, _GENERATE_EPILOG, commands.run_generate))
    say = "say what a rotation set, a rotation file or a checkpoint contains"
    inspect = command("inspect", say, _INSPECT_EPILOG, commands.run_inspect)
    about = "a directory or file, or the word format: the INT2 page format itself"
    inspect.add_argument("path", metavar="PATH", help=about)
    say = "turn a rotation set into another file format"
    _grow_convert(command("convert", say, _CONVERT_EPILOG, commands.run_convert))
    return parser


def _add_model(command: _Parser) -> None:
    about = "a .gguf file, a Hugging Face checkpoint directory, or gemma3-270m (from its pip package)"
    command.add_argument("--model", required=True, metavar="PATH", help=about)
    about = "arithmetic of the model; default: float32 on a CPU, bfloat16 on a GPU"
    command.add_argument("--dtype", choices=DTYPES, help=about)
    about = "compile anew, and do not keep compiled programs in the user's cache directory"
    command.add_argument("--no-compilation-cache", dest="compilation_cache", action="store_false", help=about)


def _add_model_id(command: _Parser) -> None:
    about = (
        "name of the model in the rotations: it says that they fit, whatever the weights' fingerprint says"
    )
    command.add_argument("--model-id", metavar="NAME", help=about)


def _add_mesh(command: _Parser) -> None:
    group = command.add_argument_group("several devices (docs/sharding.md)")
    about = "data=N,model=N: sequences spread over data, heads and weights over model"
    group.add_argument("--mesh", metavar="SIZES", help=about)
    about = "the same command runs on every host; --hosts of them find each other here"
    group.add_argument("--coordinator", metavar="HOST:PORT", help=about)
    group.add_argument("--hosts", type=_integer, metavar="N", help="number of hosts, with --coordinator")
    group.add_argument("--host", type=_integer, metavar="I", help="which of them this one is, from 0")


def _add_basis(command: _Parser, bases: tuple[str, ...], about: str) -> None:
    defaults = CalibrationConfig()
    command.add_argument("--basis", choices=bases, default="", help=about)
    about = (
        "sequential: blocks of channels coded one after the other, in basis ordered (default wherever model "
        "and text allow it; with auto what does less harm to held-out tokens); nearest: for exports"
    )
    command.add_argument("--rounding", choices=fmt.ROUNDINGS, default="", help=about)
    heads = command.add_mutually_exclusive_group()
    about = "one matrix per key/value head (the default)"
    heads.add_argument("--per-head", action="store_true", default=True, help=about)
    about = "one matrix for all heads of a layer"
    heads.add_argument("--shared", dest="per_head", action="store_false", help=about)
    about = "added to covariances, relative to the mean variance"
    command.number("--damping", defaults.damping, about + ("; not used by auto" if "auto" in bases else ""))


def _grow_calibrate(command: _Parser) -> None:
    defaults = CalibrationConfig()
    _add_model(command)
    _add_mesh(command)
    about = "calibration text, see below"
    command.add_argument("--text", required=True, nargs="+", metavar="TEXT", help=about)
    command.add_argument("--out", required=True, metavar="DIR", help="where rotation set and report go")
    command.add_argument("--field", metavar="NAME", help="field of .jsonl lines that holds the text")
    command.number("--tokens", defaults.tokens, "tokens to read")
    command.number("--context", defaults.context, "tokens per sequence")
    about = (
        "key basis; auto chooses basis and alpha per layer and head on held-out tokens, which pays when "
        "these are as long as the contexts to be served (default ordered; channel_balanced with --rounding "
        "nearest)"
    )
    _add_basis(command, CalibrationConfig.BASES, about)
    about = f"also layers with a sliding window of at most {RING_WINDOW} tokens"
    command.add_argument("--all-layers", action="store_true", help=about)
    command.number("--chunk", None, "tokens per forward pass (default 512 on a CPU, 2048 elsewhere)")
    command.number("--save-every", 8, "save the statistics every N forward passes, to resume from")
    about = "forget an interrupted calibration in DIR"
    command.add_argument("--restart", action="store_true", help=about)


def _grow_fit(command: _Parser) -> None:
    about = "statistics.safetensors, or a folder that holds it"
    command.add_argument("statistics", metavar="STATISTICS", help=about)
    command.add_argument("--out", required=True, metavar="DIR", help="where the rotation set goes")
    bases = tuple(name for name in CalibrationConfig.BASES if name != "auto")
    about = "key basis (default ordered, channel_balanced with --rounding nearest)"
    _add_basis(command, bases, about)
    about = "name of the model, if STATISTICS does not say it"
    command.add_argument("--model-id", metavar="NAME", help=about)
    command.number("--query-heads", None, "likewise")


def _grow_evaluate(command: _Parser) -> None:
    _add_model(command)
    _add_mesh(command)
    about = "what `oscar calibrate` wrote, or a .safetensors file"
    command.add_argument("--rotations", metavar="DIR", help=about)
    _add_model_id(command)
    about = "one stream; may be given several times"
    command.add_argument("--text", nargs="+", action="append", metavar="TEXT", help=about)
    command.add_argument("--field", metavar="NAME", help="field of .jsonl lines that holds the text")
    command.number("--context", 4096, "tokens of every stream")
    about = "comma-separated, see below (default %(default)s)"
    methods = "bf16,int2,published,hadamard,naive"
    command.add_argument("--methods", default=methods, metavar="LIST", help=about)
    about = "add method exported, or exported:READER: what the set is worth once exported, see below"
    command.add_argument("--as-exported", nargs="?", const="", metavar="READER", help=about)
    command.add_argument("--out", required=True, metavar="DIR", help="where table, JSON and plot go")
    command.number("--every", 1, "judge every N-th position")
    command.number("--chunk", None, "tokens per forward pass; the figures do not depend on it")
    about = "quantize layers with a sliding window too, in every method"
    command.add_argument("--all-layers", action="store_true", help=about)


def _grow_tasks(command: _Parser) -> None:
    _add_model(command)
    _add_mesh(command)
    command.add_argument("--rotations", metavar="DIR", help="what `oscar calibrate` wrote")
    _add_model_id(command)
    about = "tokens of a context, comma-separated (default %(default)s)"
    command.add_argument("--lengths", default="4096", metavar="LIST", help=about)
    about = "comma-separated, see below (default %(default)s)"
    every = "single,keys,values,tracking,code"
    command.add_argument("--tasks", default=every, metavar="LIST", help=about)
    methods = "bf16,int2,int2:cache,published,hadamard"
    command.add_argument("--methods", default=methods, metavar="LIST", help="likewise (default %(default)s)")
    command.number("--trials", 4, "contexts per length")
    command.number("--questions", 0, "of each task in a context, at most 8; 0: one per 1024 tokens")
    command.number("--seed", 0, "of facts, names and numbers")
    command.number("--new-tokens", 1024, "of the task writing")
    about = "filler, and what is written on; may be given several times (default: made-up sentences)"
    command.add_argument("--text", nargs="+", action="append", metavar="TEXT", help=about)
    command.add_argument("--field", metavar="NAME", help="field of .jsonl lines that holds the text")
    about = "the tokenizer's chat template surrounds text and question: for models that follow instructions"
    command.add_argument("--chat", action="store_true", help=about)
    command.add_argument("--out", required=True, metavar="DIR", help="where tables, JSON and plots go")
    command.number("--chunk", None, "tokens per forward pass; the answers do not depend on it")
    about = "quantize layers with a sliding window too, in every method"
    command.add_argument("--all-layers", action="store_true", help=about)
    command.add_argument("--restart", action="store_true", help="forget an interrupted run in DIR")


def _grow_generate(command: _Parser) -> None:
    _add_model(command)
    _add_mesh(command)
    command.add_argument("--rotations", metavar="DIR", help="needed for --cache int2")
    _add_model_id(command)
    about = "default: int2 with --rotations, else bf16"
    command.add_argument("--cache", choices=("int2", "bf16"), help=about)
    about = "may be given several times: a batch"
    command.add_argument("--prompt", action="append", metavar="TEXT", help=about)
    command.add_argument("--prompt-file", action="append", metavar="FILE", help="a prompt read from a file")
    about = "prompts are messages of a user: the tokenizer's chat template surrounds them"
    command.add_argument("--chat", action="store_true", help=about)
    command.number("--max-new-tokens", 128, "tokens to generate per prompt")
    about = "text that ends a continuation, not shown itself; may be given several times"
    command.add_argument("--stop", action="append", metavar="TEXT", help=about)
    command.number("--temperature", 0.0, "0 is greedy")
    command.number("--top-k", 0, "sample among the N likeliest tokens; 0 keeps all")
    command.number("--top-p", 1.0, "sample among the likeliest tokens of mass X")
    command.number("--seed", 0, "of the sampling")
    about = "quantize layers with a sliding window too"
    command.add_argument("--all-layers", action="store_true", help=about)


def _grow_convert(command: _Parser) -> None:
    about = "a rotation set, or another project's rotations"
    command.add_argument("source", metavar="SOURCE", help=about)
    command.add_argument("destination", metavar="DESTINATION", help="a directory or file")
    about = "orbax, safetensors, pair, gguf or absorb (values baked into the weights of --base)"
    command.add_argument("--to", dest="target", metavar="FORM", help=about)
    command.add_argument("--values", metavar="FILE", help="value file of a published pair")
    command.add_argument("--base", metavar="PATH", help="model to bake rotations into (gguf, absorb)")
    about = "model that SOURCE must fit; gives its head counts"
    command.add_argument("--model", metavar="PATH", help=about)
    command.number("--query-heads", None, "if neither SOURCE nor --model says it")
    command.number("--key-value-heads", None, "likewise")
    about = "who will read the pair: refuses what that loader would refuse or misread (docs/interchange.md)"
    command.add_argument("--for", dest="loader", metavar="LOADER", help=about)
    about = "newest version of a pair to write, 1, 2 or 3; below 3 key means are dropped"
    command.add_argument("--schema", type=int, metavar="N", help=about)
    about = "attention: ids of a pair count the layers with full attention of --model (default %(default)s)"
    command.add_argument("--layer-ids", default="model", metavar="KIND", help=about)
