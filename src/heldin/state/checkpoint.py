"""Checkpoints on disk: written atomically, and verified when they are read.

A checkpoint is what `torch.save` writes (a zip archive), with a comment at its end that holds the
version of the format and the checksum of everything before it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from heldin.errors import HeldinError

from .files import replacing

__all__ = ["load", "save"]

VERSION = 1
MARK = b"heldin checkpoint "
LENGTH = len(MARK) + len("000001 ") + 64  # length of the comment: mark, version, SHA-256
PIECE = 1 << 20  # bytes per read


def save(path: str | Path, /, **states: Any) -> None:
    """Write a checkpoint atomically: a crash at any moment leaves the old file or the new one.

    The bytes go to a temporary file in the same folder, which is renamed once it is complete and on
    disk. A run that is killed while it writes leaves a `.part` file behind, which the next save
    reuses. Threads and processes may save to the same path: one complete checkpoint remains.

    Args:
        path: path of the checkpoint; an existing file is replaced.
        states: values to save, by name: tensors, numbers, strings, and lists and dicts of them, as
            `state_dict()` returns. Values that `torch.load(..., weights_only=True)` would refuse
            are refused.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stopping = heldin.EarlyStopping(model, optimizer, rule="evidence")
    >>> path = getfixture("tmp_path") / "run.ckpt"
    >>> heldin.state.save(path, model=model.state_dict(), stopping=stopping.state_dict(), step=7)
    >>> states = heldin.state.load(path)
    >>> stopping.load_state_dict(states["stopping"])
    >>> states["step"]
    7
    >>> stopping.close()
    """
    path = Path(path)
    with replacing(path) as part, open(part, "r+b") as file:
        torch.save(states, file)
        _readable(part, file)
        file.seek(-2, os.SEEK_END)  # the length of the archive's comment, which is zero
        size = file.tell()
        comment = MARK + b"%06d " % VERSION + _digest(file, size).encode()
        file.seek(size)
        file.write(struct.pack("<H", len(comment)) + comment)


def load(path: str | Path, /) -> dict[str, Any]:
    """Read a checkpoint that `heldin.state.save` wrote; all tensors are on the CPU.

    Args:
        path: path of the checkpoint.

    Returns:
        The states by name, as they were passed to `heldin.state.save`.

    Raises:
        HeldinError: if the file is damaged, truncated or not a checkpoint of heldin.

    >>> import heldin
    >>> path = getfixture("tmp_path") / "run.ckpt"
    >>> heldin.state.save(path, step=7)
    >>> heldin.state.load(path)
    {'step': 7}
    """
    path = Path(path)
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        size = end - LENGTH - 2
        file.seek(max(0, size + 2))
        comment = file.read()
        if size < 0 or not comment.startswith(MARK):
            raise HeldinError(
                f"heldin.state.load: {path} is no checkpoint that heldin.state.save wrote, or the "
                "end of it is missing; load an older one (torch.load reads other files)"
            )
        version, _, digest = comment[len(MARK) :].decode("ascii", "replace").partition(" ")
        if version != f"{VERSION:06d}":
            raise HeldinError(
                f"heldin.state.load: {path} has version {version.lstrip('0')} of the format, this "
                f"heldin reads version {VERSION}; load it with the heldin that wrote it"
            )
        if _digest(file, size) != digest:
            raise HeldinError(
                f"heldin.state.load: {path} is damaged (its checksum differs); load an older "
                "checkpoint"
            )
        file.seek(0)
        states: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return states


def _digest(file: IO[bytes], size: int) -> str:
    """Return the SHA-256 of the first `size` bytes."""
    digest = hashlib.sha256()
    file.seek(0)
    while size > 0:
        piece = file.read(min(size, PIECE))
        if not piece:
            break
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest()


def _readable(part: Path, file: IO[bytes]) -> None:
    """Refuse states that `load` could not read, before they replace an older checkpoint."""
    file.flush()
    try:
        torch.load(part, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        first = str(error).strip().splitlines()[-1]
        raise HeldinError(
            "heldin.state.save: the states hold something besides tensors, numbers, strings, lists "
            f"and dicts, which could not be loaded again safely; convert it ({first})"
        ) from error
