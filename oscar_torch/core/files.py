"""Files and directories written whole or not at all: built beside their place, then renamed into it; pointers
of Git LFS known before a reader takes them for a damaged file.

Twin file, byte-identical in both packages. Standard library only.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from .errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"


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


def refuse_lfs_pointer(path: str | os.PathLike[str]) -> None:
    """Raises CheckpointError if a file is the pointer that Git LFS leaves where it fetched nothing."""
    with open(path, "rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a Git LFS pointer, not the file itself: fetch it with `git lfs pull`"
            )
