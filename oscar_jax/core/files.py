"""Files and directories written whole or not at all: built beside their place, then renamed into it.

Twin file, byte-identical in both packages. Standard library only.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A name beside `path` to write a file to; renamed over `path` when the block ends well, else removed.

    The bytes reach the disk before the rename, so that a crash leaves the old file or the new one.
    """
    path = pathlib.Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield partial
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_directory(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """A new empty directory that takes the place of `path` when the block ends well, else is removed.

    An earlier directory at `path` is put back if the rename fails; missing parents are made.
    """
    path = pathlib.Path(path).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    workspace = pathlib.Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    new, old = workspace / "new", workspace / "old"
    try:
        new.mkdir()
        yield new
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
    finally:
        shutil.rmtree(workspace)
