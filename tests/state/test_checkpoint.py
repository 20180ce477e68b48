"""Checkpoints: damaged and foreign ones are refused, killed writers leave the old one."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heldin
from tests.support import runs
from tests.support.states import same


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    made = runs.EvidenceStopping(model, coordinates=3)
    for _ in range(7):
        model(torch.randn(12, 4)).square().mean().backward()
        made.step()
    states = {
        "model": model.state_dict(),
        "stopping": made.state_dict(),
        "generator": torch.Generator().manual_seed(1).get_state(),
        "nothing": None,
        "numbers": [1, math.inf, True, "a"],
    }
    heldin.state.save(tmp_path / "a.ckpt", **states)
    heldin.state.save(str(tmp_path / "a.ckpt"), **states)  # over the old one
    assert same(heldin.state.load(tmp_path / "a.ckpt"), states)
    assert same(torch.load(tmp_path / "a.ckpt", weights_only=True), states)  # a plain file, too
    assert os.listdir(tmp_path) == ["a.ckpt"]
    made.close()


def test_every_flipped_or_missing_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    heldin.state.save(path, weights=torch.arange(40.0), step=3)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 64]) + whole[place + 1 :])
        with pytest.raises(heldin.HeldinError, match=r"a\.ckpt"):
            heldin.state.load(path)
        path.write_bytes(whole[:place])
        with pytest.raises(heldin.HeldinError, match="no checkpoint that heldin"):
            heldin.state.load(path)
    path.write_bytes(whole)
    assert heldin.state.load(path)["step"] == 3


def test_foreign_and_newer_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"step": 3}, path)
    with pytest.raises(heldin.HeldinError, match="no checkpoint that heldin"):
        heldin.state.load(path)
    heldin.state.save(path, step=3)
    path.write_bytes(path.read_bytes().replace(b"checkpoint 000001", b"checkpoint 000002"))
    with pytest.raises(heldin.HeldinError, match=r"has version 2 .*reads version 1"):
        heldin.state.load(path)
    with pytest.raises(FileNotFoundError):
        heldin.state.load(tmp_path / "none.ckpt")


def test_what_could_not_be_loaded_does_not_replace_what_can(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    heldin.state.save(path, step=3)
    with pytest.raises(heldin.HeldinError, match="something besides tensors"):
        heldin.state.save(path, step=4, path=Path("x"))
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        heldin.state.save(path, step=4, function=lambda: 3)
    assert heldin.state.load(path) == {"step": 3}
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_while_writing_leaves_the_old_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.ckpt"
    heldin.state.save(path, step=3)
    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space"):
        heldin.state.save(path, step=4)
    monkeypatch.undo()
    assert heldin.state.load(path) == {"step": 3}
    assert os.listdir(tmp_path) == ["a.ckpt"]


KILLED = """
import os, signal, sys
import heldin
from heldin.state import checkpoint
from tests.support import runs

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint._digest = killed
heldin.state.save(sys.argv[1], step=4)
"""


@pytest.mark.skipif(os.name != "posix", reason="no locks, no kill -9")
def test_killed_writers_leave_one_unfinished_file_at_most(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for _ in range(3):
        run = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
        assert run.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    heldin.state.save(path, step=5)
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert heldin.state.load(path) == {"step": 5}


@pytest.mark.parametrize("locks", [True, False])
def test_threads_that_save_to_one_path_do_not_collide(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:

        def refuse(*_: Any) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("heldin.state.files.fcntl.flock", refuse)
    path, errors = tmp_path / "a.ckpt", []

    def write(thread: int) -> None:
        try:
            for step in range(20):
                heldin.state.save(path, thread=thread, step=step, weights=torch.ones(1000))
                assert heldin.state.load(path)["weights"].sum() == 1000
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert heldin.state.load(path)["step"] == 19
