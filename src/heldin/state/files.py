"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .parts import unfinished

__all__ = ["leftovers", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write to the path that is given; it takes the place of `path` once it is complete, on disk.

    A crash at any moment leaves the old file or the new one, and perhaps a `.part` file beside it,
    which nothing reads (see `leftovers`). An error leaves the old one and nothing else.

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
    if os.name == "posix":  # the new name is on disk, too; Windows cannot open a folder
        _sync(path.parent, os.O_RDONLY)


def leftovers(path: Path) -> list[Path]:
    """What processes that were killed while they wrote `path` have left behind."""
    return sorted(path.parent.glob(f"{path.name}.*.part"))


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
