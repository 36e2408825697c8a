"""The command line `oscar`: grammar and printing; every command calls one function of the library."""

import io
import os
import sys
from collections.abc import Sequence

from ..core.errors import OscarError
from .grammar import build_parser

EXIT_USER_ERROR = 2
EXIT_CLOSED_PIPE = 141  # as a shell reports SIGPIPE
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (2 for every error the user can cause)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode is no reason to stop
    try:
        arguments = build_parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
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
