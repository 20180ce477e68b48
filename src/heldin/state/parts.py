"""The temporary file of a checkpoint: one for each writer, reused after a crash.

A writer takes the first numbered name whose lock is free and holds the lock until the file has its
final name. The lock of a killed writer is free, so that the next writer reuses its file: there are
never more temporary files than there were simultaneous writers.
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
with suppress(ImportError):  # not available on Windows
    fcntl = import_module("fcntl")

__all__ = ["unfinished"]


@contextmanager
def unfinished(path: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """Yield an empty file that replaces `path` when the block ends without an error."""
    part, file = _first_free(path)
    with file:
        try:
            yield part, file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows cannot rename an open file
            os.replace(part, path)  # before the lock is released
        except BaseException:
            if fcntl is None:
                file.close()
            part.unlink(missing_ok=True)
            raise


def _first_free(path: Path) -> tuple[Path, IO[bytes]]:
    """Open the first file whose lock is free; without locks, a file of this thread."""
    for number in count() if fcntl is not None else ():
        part = path.with_name(f"{path.name}.{number}.part")
        try:
            return part, _locked(part)
        except BlockingIOError:
            continue  # another writer holds the lock
        except _NoLocks:
            part.unlink(missing_ok=True)
            break
    thread_part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    return thread_part, open(thread_part, "w+b")


class _NoLocks(Exception):
    """Raised if the file system has no locks."""


def _locked(part: Path) -> IO[bytes]:
    """Open a file, lock it and truncate it."""
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
            file.close()  # its writer renamed it before the lock was acquired
        except BaseException:
            file.close()
            raise


def _is_at(file: IO[bytes], part: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(part))
    except FileNotFoundError:
        return False
