"""Files that are written atomically."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .parts import unfinished

__all__ = ["leftovers", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` once the block has ended without an error.

    A crash at any moment leaves the old file or the new one, and perhaps a `.part` file beside it
    (see `leftovers`). An error leaves only the old file.

    >>> path = getfixture("tmp_path") / "numbers.txt"
    >>> with replacing(path) as part:
    ...     _ = part.write_text("1 2 3")
    ...     print(path.exists())
    False
    >>> path.read_text(), leftovers(path)
    ('1 2 3', [])
    """
    with unfinished(path) as (part, _):
        yield part
    if os.name == "posix":  # flush the new name to disk; Windows cannot open a folder
        _sync(path.parent, os.O_RDONLY)


def leftovers(path: Path) -> list[Path]:
    """List the `.part` files of processes that were killed while they wrote `path`."""
    return sorted(path.parent.glob(f"{path.name}.*.part"))


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
