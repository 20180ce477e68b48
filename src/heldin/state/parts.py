"""The unfinished file of a checkpoint: one for each writer, none left for good.

A writer takes the first numbered name whose lock is free and holds the lock until the file has its
final name. A killed writer's lock is free, so that the next writer takes its file over: there are
never more such files than there were writers at one time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import IO, Any

fcntl: Any = None
with suppress(ImportError):  # Windows has none
    fcntl = import_module("fcntl")

__all__ = ["unfinished"]


@contextmanager
def unfinished(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """An empty file beside a path, which takes its place when the block ends without an error."""
    part, file = _first_free(path)
    with file:
        try:
            yield part, file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # an open file cannot be renamed there
            os.replace(part, path)  # before the lock is given back
        except BaseException:
            if fcntl is None:
                file.close()
            part.unlink(missing_ok=True)
            raise


def _first_free(path: Path) -> tuple[Path, IO[bytes]]:
    """The first file whose lock is free; where there are no locks, one of this thread's own."""
    for number in count() if fcntl is not None else ():
        part = path.with_name(f"{path.name}.{number}.part")
        try:
            return part, _locked(part)
        except BlockingIOError:
            continue  # another writer has it
        except _NoLocks:
            part.unlink(missing_ok=True)
            break
    own = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    return own, open(own, "w+b")


class _NoLocks(Exception):
    """The file system knows no locks."""


def _locked(part: Path) -> IO[bytes]:
    """The file, emptied, with its lock."""
    while True:
        file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                raise _NoLocks from error
            if _is_at(file, part):
                file.truncate()
                return file
            file.close()  # it got its final name before the lock was ours
        except BaseException:
            file.close()
            raise


def _is_at(file: IO[bytes], part: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(part))
    except FileNotFoundError:
        return False
