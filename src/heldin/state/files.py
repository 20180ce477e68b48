"""Files that are written atomically."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

fcntl: Any = None
with suppress(ImportError):  # not available on Windows
    fcntl = import_module("fcntl")

__all__ = ["leftovers", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` once the block has ended without an error.

    A crash at any moment leaves the old file or the new one, and perhaps a `.part` file beside it
    (see `leftovers`). An error leaves only the old file.
    """
    part, file = _open_part(path)
    with file:
        try:
            yield part
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows cannot rename an open file
            os.replace(part, path)  # before the lock is released
        except BaseException:
            if fcntl is None:
                file.close()
            part.unlink(missing_ok=True)
            raise
    if os.name == "posix":  # flush the new name to disk; Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def leftovers(path: Path) -> list[Path]:
    """List the `.part` files of processes that were killed while they wrote `path`."""
    return sorted(path.parent.glob(f"{path.name}.*.part"))


def _open_part(path: Path) -> tuple[Path, IO[bytes]]:
    """Open an empty file: the first numbered one whose lock is free.

    The writer holds the lock until the file has its final name. The lock of a killed writer is
    free, so that the next one reuses its file: there are never more of them than there were
    simultaneous writers. Without locks, it is a file of this thread.
    """
    number = 0
    while fcntl is not None:
        part = path.with_name(f"{path.name}.{number}.part")
        file = open(part, "ab")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, part):  # else its writer has renamed it before the lock was acquired
                file.truncate(0)
                return part, file
        except BlockingIOError:
            number += 1  # another writer holds the lock
        except OSError:  # the file system has no locks
            file.close()
            part.unlink(missing_ok=True)
            break
        file.close()
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    return part, open(part, "wb")


def _is_at(file: IO[bytes], part: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), part.stat())
    except FileNotFoundError:
        return False
