"""Cases: checkpoints that move between numbers of ranks."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import heldin
from tests.support import runs

from .common import batch, case, everyone, loss, make, near, part
from .sharded import sharded


class Trained:
    """A run with both kinds of stopping, plain or sharded, that can be saved and loaded."""

    def __init__(self, shard: bool, rank: int, world: int) -> None:
        self.shard, self.rank, self.world = shard, rank, world
        self.model = sharded(make("mlp")) if shard else make("mlp")
        group = "auto" if shard else None
        self.stopping = runs.EvidenceStopping(
            self.model, coordinates=40, window=2, process_group=group
        )
        inner = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.optimizer = heldin.ElementwiseStopping(
            inner, self.model, smoothing=0.5, start=1.2, process_group=group
        )

    def train(self, steps: range) -> list[float]:
        values = []
        for step in steps:
            x, y = batch("mlp", 4 * self.world, step)
            if self.shard:
                x, y = part((x, y), [4] * self.world, self.rank)
            loss(self.model(x), y).backward()
            self.stopping.step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            values.append(self.stopping.criterion)
        return values

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        packed = heldin.state.Packed(self.stopping)
        return {"model": model, "optimizer": optimizer, "stopping": packed}

    def load(self, path: Path, **options: Any) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=path, **options)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def close(self) -> None:
        self.stopping.close()
        self.optimizer.close()


@case
def checkpoints_move_between_sizes(rank: int, world: int) -> None:
    """torch.distributed.checkpoint: written by many, read by one, and the other way round."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", module="torch.distributed")
    whole = Trained(False, rank, world)
    expected = whole.train(range(9))
    fraction = whole.optimizer.stopped_fraction()
    assert fraction > 0
    whole.close()
    here = Path(everyone(tempfile.mkdtemp())[0])

    first = Trained(True, rank, world)
    first.train(range(5))  # in the middle of a window
    dcp.save(first.state(), checkpoint_id=here / "many")
    first.close()
    again, single = Trained(True, rank, world), Trained(False, rank, world)
    again.load(here / "many")
    single.load(here / "many", no_dist=True)
    for run in (again, single):
        for value, other in zip(run.train(range(5, 9)), expected[5:], strict=True):
            near(value, other)
    assert single.optimizer.stopped_fraction() == fraction
    again.close(), single.close()

    one = Trained(False, rank, world)
    one.train(range(5))
    if rank == 0:
        dcp.save(one.state(), checkpoint_id=here / "one", no_dist=True)
    one.close()
    dist.barrier()
    many = Trained(True, rank, world)
    many.load(here / "one")
    for value, other in zip(many.train(range(5, 9)), expected[5:], strict=True):
        near(value, other)
    many.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(here)
