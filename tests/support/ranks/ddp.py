"""Cases: what DistributedDataParallel gives is what one process gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import heldin
from tests.support import runs

from .common import (
    Forked,
    batch,
    both,
    case,
    close,
    loss,
    make,
    near,
    part,
    refused,
    same_everywhere,
)


@case
def ddp_exact(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, estimator="exact")


@case
def ddp_sampled(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, coordinates=40)


@case
def ddp_uneven(rank: int, world: int) -> None:
    for estimator in ("exact", "sampled"):
        for kind in ("mlp", "words"):
            both(kind, rank, world, even=False, estimator=estimator, coordinates=40)


@case
def ddp_settings(rank: int, world: int) -> None:
    both("mlp", rank, world, coordinates=40, ddp={"static_graph": True})
    both("mlp", rank, world, coordinates=40, ddp={"find_unused_parameters": True})
    both("mlp", rank, world, coordinates=40, ddp={"gradient_as_bucket_view": True})
    options = {"correction": "symmetric", "dead": "zero", "parameter_groups": "all"}
    both("mlp", rank, world, estimator="exact", **options)


@case
def ddp_penalty(rank: int, world: int) -> None:
    both("smooth", rank, world, penalty=0.01, even=False, estimator="exact")
    both("smooth", rank, world, penalty=0.01, coordinates=40)


@case
def ddp_window(rank: int, world: int) -> None:
    both("mlp", rank, world, window=2, even=False, coordinates=40, steps=6)
    both("mlp", rank, world, every=2, even=False, coordinates=40, steps=6)


@case
def ddp_no_sync(rank: int, world: int) -> None:
    """Three micro-batches; only the last one is reduced by DDP."""
    for estimator in ("exact", "sampled"):
        plain = make("mlp")
        model = DDP(copy.deepcopy(plain))
        alone = runs.EvidenceStopping(
            plain, process_group=None, estimator=estimator, coordinates=40
        )
        together = runs.EvidenceStopping(model, estimator=estimator, coordinates=40)
        with alone, together:
            for step in range(3):
                for k in range(3):
                    sizes = [4 + 2 * r for r in range(world)]
                    data = batch("mlp", sum(sizes), 10 * step + k)
                    (loss(plain(data[0]), data[1]) / 3).backward()
                    x, y = part(data, sizes, rank)
                    if k < 2:
                        with model.no_sync():
                            (loss(model(x), y) / 3).backward()
                    else:
                        (loss(model(x), y) / 3).backward()
                together.step(), alone.step()
                close(together.evidence, alone.evidence)
                same_everywhere(together.criterion)


@case
def ddp_levels_micro_batches(rank: int, world: int) -> None:
    """Micro-batches of different sizes: every sample of the step counts alike."""
    plain = make("mlp")
    model = DDP(copy.deepcopy(plain))
    alone = runs.EvidenceStopping(plain, process_group=None, estimator="exact")
    together = runs.EvidenceStopping(model, estimator="exact")
    with alone, together:
        sizes = [[2, 5], [4, 3], [6, 1], [1, 1]]
        x, y = batch("mlp", sum(map(sum, sizes[:world])), 0)
        loss(plain(x), y).backward()
        start = sum(map(sum, sizes[:rank]))
        for size in sizes[rank]:
            loss(model(x[start : start + size]), y[start : start + size]).backward()
            start += size
        together.step(), alone.step()
        close(together.evidence, alone.evidence)


@case
def ddp_unused(rank: int, world: int) -> None:
    """A branch that some ranks do not use."""
    torch.manual_seed(0)
    plain = Forked()
    model = DDP(copy.deepcopy(plain), find_unused_parameters=True)
    for dead in ("out", "zero"):
        for estimator in ("exact", "sampled"):
            options: dict[str, Any] = {"estimator": estimator, "coordinates": 8, "dead": dead}
            alone = runs.EvidenceStopping(plain, process_group=None, **options)
            together = runs.EvidenceStopping(model, **options)
            with alone, together:
                for step in range(3):
                    sizes = [4] * world
                    x, y = batch("mlp", sum(sizes), step)
                    way = torch.cat([torch.full((4,), (r + step) % 2) for r in range(world)])
                    if step == 2:
                        way = torch.zeros_like(way)  # one branch is used by nobody
                    loss(plain(x, way), y).backward()
                    a, b, c = (t.split(sizes)[rank] for t in (x, y, way))
                    loss(model(a, c), b).backward()
                    together.step(), alone.step()
                    close(together.evidence, alone.evidence)
                    same_everywhere(together.evidence)


@case
def ddp_microbatch(rank: int, world: int) -> None:
    """Ranks as samples."""
    plain = make("mlp")
    model = DDP(copy.deepcopy(plain))
    alone = runs.EvidenceStopping(plain, process_group=None, estimator="microbatch")
    together = runs.EvidenceStopping(model, estimator="microbatch")
    with alone, together:
        for step in range(2):
            for k in range(3):
                sizes = [4] * world
                x, y = batch("mlp", sum(sizes), 10 * step + k)
                for a, b in zip(x.split(sizes), y.split(sizes), strict=True):
                    loss(plain(a), b).backward()
                a, b = part((x, y), sizes, rank)
                loss(model(a), b).backward()
            together.step(), alone.step()
            assert together.evidence.count == 3 * world
            close(together.evidence, alone.evidence)


@case
def ddp_join(rank: int, world: int) -> None:
    """Ranks with 2, 3, ... batches, the last of them smaller."""
    from torch.distributed.algorithms.join import Join

    counts = [2 + r for r in range(world)]
    for estimator in ("exact", "sampled"):
        plain = make("mlp")
        model = DDP(copy.deepcopy(plain))
        options: dict[str, Any] = {"estimator": estimator, "coordinates": 40}
        alone = runs.EvidenceStopping(plain, process_group=None, **options)
        together = runs.EvidenceStopping(model, **options)

        def of(r: int, step: int) -> tuple[Tensor, Tensor]:
            return batch("mlp", 3 if step == counts[r] - 1 else 6, 100 * r + step)

        with alone, together:
            with Join([model, together]):
                for step in range(counts[rank]):
                    x, y = of(rank, step)
                    loss(model(x), y).backward()
                    together.step()
            for step in range(max(counts)):
                data = [of(r, step) for r in range(world) if step < counts[r]]
                x, y = (torch.cat(each) for each in zip(*data, strict=True))
                loss(plain(x), y).backward()
                alone.step()
            assert len(together.history) == len(alone.history) == max(counts)
            for one, other in zip(together.history, alone.history, strict=True):
                assert one.count == other.count
                near(one.raw, other.raw)
            same_everywhere(together.state_dict())

    with runs.EvidenceStopping(model) as together, model.join():
        loss(model(x), y).backward()
        with refused("Join([ddp_model, stopping])"):
            together.step()

    # The object that users have. Ranks without data restore the weights of those that had some.
    model = DDP(make("mlp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = heldin.rules.Evidence(arm_threshold=None, warmup=max(counts) - 1, smoothing=0.0)
    stopping = heldin.EarlyStopping(model, optimizer, rule=rule)
    weights = []
    with stopping, Join([model, stopping]):
        for step in range(counts[rank]):
            x, _ = of(rank, step)
            y = torch.arange(plain(x[:1]).shape[1])  # nothing to learn, so that the rule stops
            x = x[:1].expand(len(y), -1)
            weights.append([p.detach().clone() for p in model.parameters()])
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    assert stopping.stopped_step == max(counts)
    same_everywhere([p.tolist() for p in model.parameters()])
    if rank == world - 1:  # the only one with data in the last step
        assert all(torch.equal(a, b) for a, b in zip(weights[-1], model.parameters(), strict=True))


@case
def ddp_trains_as_before(rank: int, world: int) -> None:
    """Observed or not, DDP's gradients are the same to the last bit."""
    x, y = part(batch("mlp", 4 * world, 0), [4] * world, rank)
    grads = []
    for watched in (False, True):
        model = DDP(make("mlp"))
        stopping = runs.EvidenceStopping(model) if watched else None
        for _ in range(3):
            model.zero_grad()
            loss(model(x), y).backward()
            if stopping is not None:
                stopping.step()
        grads.append([p.grad.clone() for p in model.parameters()])
        if stopping is not None:
            stopping.close()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
