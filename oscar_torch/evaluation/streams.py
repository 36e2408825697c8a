"""Text for calibration and evaluation: files, directories, globs, JSON lines or standard input.

Each argument of the command line is one *source*, an ordered run of documents. A source is read lazily and
only as far as it is needed, so that a directory of any size costs bounded memory. A stream remembers the
digest of exactly the text it was made from and the digests of its documents, so that reports can name their
text and `oscar evaluate` can notice that it is asked to judge on the calibration text.

Twin file, byte-identical in both packages: NumPy only.
"""

import codecs
import dataclasses
import glob
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..core.errors import OscarError

SEPARATOR = "\n\n"  # between two documents of one source
MAX_CHARACTERS_PER_TOKEN = 12  # no source is read further than this times the tokens wanted
STANDARD_INPUT = "-"


class TextError(OscarError):
    """A text cannot be found, decoded or is too short."""


class NotTextError(TextError):
    """A file is not UTF-8 text at all."""


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """Token ids of one source and where they came from."""

    label: str
    tokens: np.ndarray  # int32 [S]
    digest: str  # sha256 of the UTF-8 text that was tokenized, first 16 hex digits
    document_digests: tuple[str, ...]
    characters: int


def text_digest(text: str) -> str:
    """First 16 hex digits of the sha256 of `text` in UTF-8."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def check_source(argument: str) -> None:
    """Raises TextError if a source does not exist, before anything expensive is done."""
    if argument != STANDARD_INPUT and not pathlib.Path(argument).exists() and not glob.has_magic(argument):
        raise TextError(f"text file not found: {argument}")


def iterate_documents(argument: str, field: str | None = None) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every document of one command-line argument, in a fixed order.

    `argument` is a file, a directory (all readable text files below it, sorted), a glob, a `.jsonl` file
    whose lines hold the text under `field`, or "-" for standard input. Raises TextError naming what is wrong.
    """
    if argument == STANDARD_INPUT:
        yield "standard input", _decode(sys.stdin.buffer.read(), "standard input")
        return
    path = pathlib.Path(argument)
    if path.is_dir():
        yield from _directory_documents(path, field)
    elif path.exists():
        yield from _file_documents(path, field)
    elif glob.has_magic(argument):
        matches = sorted(glob.glob(argument, recursive=True))
        files = [pathlib.Path(match) for match in matches if pathlib.Path(match).is_file()]
        if not files:
            raise TextError(f"text pattern {argument!r} matches no file")
        for file in files:
            yield from _file_documents(file, field)
    else:
        raise TextError(f"text file not found: {argument}")


def _directory_documents(path: pathlib.Path, field: str | None) -> Iterator[tuple[str, str]]:
    found = False
    for file in sorted(path.rglob("*")):
        hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
        if hidden or not file.is_file():
            continue
        try:
            documents = list(_file_documents(file, field))
        except NotTextError:  # a directory may hold pictures and archives; a file named by the user may not
            continue
        found = found or any(text.strip() for _, text in documents)
        yield from documents
    if not found:
        raise TextError(f"directory {path} holds no readable UTF-8 text")


def _file_documents(path: pathlib.Path, field: str | None) -> Iterator[tuple[str, str]]:
    text = read_text(path)
    if path.suffix.lower() != ".jsonl":
        yield str(path), text
        return
    if field is None:
        raise TextError(f"{path} is JSON lines: name the field that holds the text (--field)")
    # Not splitlines: it also cuts at characters that may stand inside a JSON string, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise TextError(f"{path} line {number} is not JSON: {reason}") from None
        if not isinstance(record, dict):
            raise TextError(f"{path} line {number} is a JSON {type(record).__name__}, expected an object")
        if not isinstance(record.get(field), str):
            names = ", ".join(name for name, value in record.items() if isinstance(value, str))
            raise TextError(f"{path} line {number} has no text field {field!r}, it has: {names or 'none'}")
        try:
            record[field].encode()
        except UnicodeEncodeError:
            raise TextError(f"{path} line {number}: field {field!r} holds half a surrogate pair") from None
        yield f"{path}:{number}", _with_plain_line_ends(record[field])


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 file without its byte-order mark, lines ending in "\\n"; TextError if it is something else."""
    try:
        return _decode(path.read_bytes(), str(path))
    except OSError as error:
        raise TextError(f"text file {path} cannot be read: {error.strerror}") from None


def _decode(data: bytes, name: str) -> str:
    """The same text for the same characters: no byte-order mark, and one kind of line end."""
    for encoding, mark in (("UTF-32", codecs.BOM_UTF32_LE), ("UTF-16", codecs.BOM_UTF16_LE)):
        if data.startswith((mark, mark[::-1])):
            raise NotTextError(f"{name} is not UTF-8 text, it looks like {encoding}: save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotTextError(f"{name} is not UTF-8 text (byte {error.start}): unreadable as text") from None
    if "\0" in text:
        raise NotTextError(f"{name} is binary (it contains NUL bytes): unreadable as text")
    return _with_plain_line_ends(text)


def _with_plain_line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_stream(
    arguments: Sequence[str], encode: Callable[[str], list[int]], tokens: int, field: str | None = None
) -> TokenStream:
    """Tokenizes sources one after the other until there are `tokens` ids; fewer only if the text ends before.

    `encode` returns token ids without a beginning-of-sequence token.
    """
    parts: list[str] = []
    digests: list[str] = []
    ids: list[int] = []
    characters = 0
    limit = MAX_CHARACTERS_PER_TOKEN * tokens
    for text in (text for argument in arguments for _, text in iterate_documents(argument, field)):
        if not text.strip():
            continue
        piece = (SEPARATOR if parts else "") + text[: limit - characters]
        parts.append(piece)
        digests.append(text_digest(text))
        ids.extend(encode(piece))
        characters += len(piece)
        if len(ids) >= tokens or characters >= limit:
            break
    names = ["stdin" if name == STANDARD_INPUT else pathlib.Path(name).name or name for name in arguments]
    if not ids:
        raise TextError(f"text {', '.join(arguments)} is empty")
    label = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    digest = text_digest("".join(parts))
    return TokenStream(label, np.asarray(ids[:tokens], np.int32), digest, tuple(digests), characters)


def combined_digest(streams: Sequence[TokenStream]) -> str:
    """One digest for several streams, in order."""
    return text_digest(" ".join(stream.digest for stream in streams))


def cut_sequences(
    streams: Sequence[TokenStream], tokens: int, context: int, bos: int | None
) -> list[np.ndarray]:
    """Cuts `tokens` ids, an equal share of every stream, into sequences of `context` ids (int32 [context]).

    Every sequence starts with `bos` if there is one. Sequences take turns among the streams; the left-overs
    of all streams are joined and cut last. If less than one whole sequence is there, the one short sequence
    is used. Raises TextError if nothing is left to calibrate on.
    """
    body = context - (bos is not None)
    shares = _equal_shares([len(stream.tokens) for stream in streams], tokens)
    per_stream: list[list[np.ndarray]] = []
    left_over: list[np.ndarray] = []
    for stream, share in zip(streams, shares):
        whole = share // body
        per_stream.append([stream.tokens[i * body : (i + 1) * body] for i in range(whole)])
        left_over.append(stream.tokens[whole * body : share])
    turns = max((len(sequences) for sequences in per_stream), default=0)
    bodies = [sequences[i] for i in range(turns) for sequences in per_stream if i < len(sequences)]
    rest = np.concatenate(left_over)
    bodies += [rest[i * body : (i + 1) * body] for i in range(len(rest) // body)]
    if not bodies and len(rest):
        bodies = [rest]
    if not bodies:
        raise TextError("the calibration text holds no tokens")
    head = np.asarray([] if bos is None else [bos], np.int32)
    return [np.concatenate([head, ids]).astype(np.int32) for ids in bodies]


def _equal_shares(available: Sequence[int], total: int) -> list[int]:
    """Splits `total` evenly; what a short stream cannot give, the others give."""
    shares = [0] * len(available)
    remaining = min(total, sum(available))
    while remaining > 0:
        open_streams = [i for i, count in enumerate(available) if shares[i] < count]
        portion = max(1, remaining // len(open_streams))
        for i in open_streams:
            take = min(portion, available[i] - shares[i], remaining)
            shares[i] += take
            remaining -= take
    return shares
