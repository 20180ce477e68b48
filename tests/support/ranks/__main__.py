"""Runs cases, as one rank of several."""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.support import runs

from .common import CASES, PATIENCE, batch, loss, make


def die(rank: int, world: int) -> None:
    """The last rank dies in the second step; the others are told within the group's timeout."""
    model = DDP(make("mlp"))
    x, y = batch("mlp", 4, rank)
    with runs.EvidenceStopping(model) as stopping:
        for step in range(3):
            loss(model(x), y).backward()
            if step == 1 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            try:
                stopping.step()
            except RuntimeError:
                assert step == 1
                assert time.monotonic() - start < 2 * PATIENCE
                return
    raise AssertionError("nobody noticed")


def run(out: Path, names: list[str]) -> None:
    warnings.simplefilter("error")
    for harmless in ("barrier", "returned a view tensor", "Full backward hook"):  # torch's own
        warnings.filterwarnings("ignore", message=f".*{harmless}.*")
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out / 'meeting'}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=PATIENCE),
    )
    results: dict[str, str] = {}
    times: dict[str, float] = {}
    for name in names:
        torch.set_default_dtype(torch.float64)
        start = time.monotonic()
        try:
            (die if name == "die" else CASES[name])(rank, world)
            results[name] = "ok"
            times[name] = time.monotonic() - start
        except Exception:
            results[name] = traceback.format_exc()
        (out / f"{rank}.json").write_text(json.dumps(results))
        if results[name] != "ok":
            os._exit(1)  # the others cannot go on
    if names != ["die"]:
        dist.destroy_process_group()
    print(rank, {name: round(seconds, 1) for name, seconds in times.items()}, file=sys.stderr)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2].split(",") if len(sys.argv) > 2 else list(CASES))
