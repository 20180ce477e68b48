"""Cases: outputs of held-out rows in several processes are those of one."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import heldin
from heldin import rules

from .common import case, make, refused, same_everywhere
from .shadows import Batches, batch_loss, drawn, table, union

STEPS = 24
FOLDS = rules.Folds(folds=3)


def train(
    plan: Batches, rank: int | None, **options: Any
) -> tuple[heldin.EarlyStopping, nn.Module, nn.Module]:
    """Train on the batches of a rank, or on those of all of them in one process."""
    net = make("smooth")
    model: nn.Module = net if rank is None else DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    own = [union(parts) if rank is None else parts[rank] for parts in plan]
    loader = DataLoader(table(), batch_sampler=own)
    options = {"data": loader, "batch_loss": batch_loss, "rule": FOLDS, **options}
    alone = {"process_group": None} if rank is None else {}
    stopping = heldin.EarlyStopping(model, optimizer, patience=None, **options, **alone)
    for _ in stopping.epochs(1):
        for batch, parts in zip(loader, plan, strict=True):
            ranks = 1 if rank is None else dist.get_world_size()
            optimizer.zero_grad()
            share = len(batch[1]) * ranks / len(union(parts))
            (batch_loss(model, batch) * share).backward()
            optimizer.step()
    return stopping, net, model


@case
def shadows_outputs(rank: int, world: int) -> None:
    """Metrics, temperature, out-of-fold outputs, committee and restored weights."""
    plan = drawn(world, STEPS, lambda step: [4] * world)
    groups = torch.arange(len(table())) // 2
    for options in (
        {"metrics": ["accuracy", "f1_macro"]},
        {"monitor": "accuracy", "metrics": ["accuracy"], "groups": groups},
        {"rule": rules.Folds(folds=5, shadows=1), "temperature": True},  # a block for one rank
        {"predict": lambda model, batch: model(batch[0]).softmax(1), "temperature": False},
    ):
        stopping, net, _ = train(plan, rank, **options)
        one, alone, _ = train(plan, None, **options)
        held, expected = stopping.out_of_fold, one.out_of_fold
        for name in ("outputs", "rows", "folds", "targets"):
            torch.testing.assert_close(getattr(held, name), getattr(expected, name))
        torch.testing.assert_close(stopping.temperature, one.temperature)
        for name, interval in one.estimates.items():
            found = stopping.estimates[name]
            torch.testing.assert_close(
                [found.value, found.low, found.high], [interval.value, interval.low, interval.high]
            )
        assert stopping.best_step == one.best_step
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)
        x = table().tensors[0]
        torch.testing.assert_close(stopping.committee()(x), one.committee()(x))
        same_everywhere(held.outputs.tolist())
        same_everywhere(stopping.summary())


@case
def shadows_outputs_refused(rank: int, world: int) -> None:
    """An error of one rank is one of all; nothing waits for ever."""
    plan = drawn(world, STEPS, lambda step: [4] * world)
    calls = [0]

    def predict(model: nn.Module, batch: Any) -> Any:
        calls[0] += 1
        return model(batch[0]) if rank else None

    with refused("expected a tensor, got NoneType"):
        train(plan, rank, metrics=["accuracy"], predict=predict)
    assert calls[0]
    divided = fully_shard(make("smooth"))
    optimizer = torch.optim.SGD(divided.parameters(), lr=0.1)
    with refused("are not kept under fully_shard"):
        heldin.EarlyStopping(divided, optimizer, F.cross_entropy, table(), metrics=["accuracy"])
    stopping = heldin.EarlyStopping(divided, optimizer, F.cross_entropy, table())
    assert stopping.temperature == 1.0
    stopping.close()
