"""Starting the processes of a distributed test, for pytest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]

Outcome = dict[int, dict[str, str]]  # by rank, what became of each case

needed = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of torch has no gloo",
)


def launch(world: int, out: Path, names: str) -> list[subprocess.Popen[bytes]]:
    """One process per rank."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    command = [sys.executable, "-m", "tests.support.ranks", str(out), names]
    return [
        subprocess.Popen(command, cwd=ROOT, env={**common, "RANK": str(r)}, stderr=subprocess.PIPE)
        for r in range(world)
    ]


def outcomes(world: int, out: Path, names: Sequence[str]) -> Outcome:
    """By rank, what became of each case."""
    processes = launch(world, out, ",".join(names))
    tails = [process.communicate(timeout=300)[1].decode()[-2000:] for process in processes]
    found = {}
    for rank, tail in enumerate(tails):
        path = out / f"{rank}.json"
        found[rank] = json.loads(path.read_text()) if path.exists() else {"": tail}
    return found


def expect_ok(outcome: Outcome, name: str) -> None:
    for rank, results in outcome.items():
        assert name in results, f"rank {rank} did not come that far: {list(results.items())[-1:]}"
        assert results[name] == "ok", f"rank {rank}:\n{results[name]}"
