"""Cases: fully_shard, and other ways to cut a model into pieces."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

import heldin
from tests.support import runs

from .common import Words, batch, both, case, close, everyone, loss, make, part, refused


def sharded(model: nn.Module) -> nn.Module:
    """Every layer on its own, then the rest; tied weights stay together."""
    from torch.distributed.fsdp import fully_shard

    if not isinstance(model, Words):
        for layer in model.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                fully_shard(layer)
    divided: Any = fully_shard(model)
    return divided


@case
def fsdp_exact(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, estimator="exact", wrap=sharded)


@case
def fsdp_sampled(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, even=False, coordinates=40, wrap=sharded)


@case
def fsdp_has_no_truth(rank: int, world: int) -> None:
    """Comparing with one backward pass per sample would disturb the sharding."""
    model = sharded(make("mlp"))
    x, y = batch("mlp", 4, 0)
    with refused("before the model is sharded"):
        heldin.verify(model, lambda: loss(model(x), y))


@case
def fsdp_microbatch(rank: int, world: int) -> None:
    plain = make("mlp")
    model = sharded(copy.deepcopy(plain))
    alone = runs.EvidenceStopping(plain, process_group=None, estimator="microbatch")
    with alone, runs.EvidenceStopping(model, estimator="microbatch") as together:
        x, y = batch("mlp", 12 * world, 0)
        for a, b in zip(x.split(4), y.split(4), strict=True):
            loss(plain(a), b).backward()
        for a, b in list(zip(x.split(4), y.split(4), strict=True))[rank::world]:
            loss(model(a), b).backward()
        together.step(), alone.step()
        close(together.evidence, alone.evidence)


@case
def fsdp_gathers_nothing_more(rank: int, world: int) -> None:
    """Besides one all-reduce, the collectives are those of the unobserved step."""
    from torch.distributed.tensor.debug import CommDebugMode

    x, y = part(batch("mlp", 4 * world, 0), [4] * world, rank)
    counts = []
    for watched in (False, True):
        model = sharded(make("mlp"))
        stopping = runs.EvidenceStopping(model, coordinates=40) if watched else None
        for _ in range(4):
            with CommDebugMode() as mode:
                loss(model(x), y).backward()
                if stopping is not None:
                    stopping.step()
        counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
        if stopping is not None:
            stopping.close()
    plain, seen = counts
    more = {op: n - plain.get(op, 0) for op, n in seen.items() if n != plain.get(op, 0)}
    assert sum(plain.values()) > 0
    assert sum(more.values()) == 1, (plain, seen)
    assert "allreduce" in next(iter(more)).replace("_", ""), more


@case
def fsdp_elementwise(rank: int, world: int) -> None:
    """Single weights of sharded parameters stop as they do in one process."""
    plain = make("mlp")
    model = sharded(copy.deepcopy(plain))
    options: dict[str, Any] = {"smoothing": 0.5, "start": 1.2}
    alone = heldin.ElementwiseStopping(
        torch.optim.Adam(plain.parameters(), lr=0.01), plain, process_group=None, **options
    )
    together = heldin.ElementwiseStopping(
        torch.optim.Adam(model.parameters(), lr=0.01), model, **options
    )
    for step in range(5):
        x, y = batch("mlp", 4 * world, step)
        a, b = part((x, y), [4] * world, rank)
        for net, optimizer, u, v in ((plain, alone, x, y), (model, together, a, b)):
            optimizer.zero_grad()
            loss(net(u), v).backward()
            optimizer.step()
    averages, own = (each.state_dict()["heldin"]["averages"] for each in (together, alone))
    assert 0 < alone.stopped_fraction() < 1
    for name, p in plain.named_parameters():
        assert torch.allclose(own[name], averages[name].full_tensor(), atol=1e-9), name
        assert torch.allclose(p, dict(model.named_parameters())[name].full_tensor(), atol=1e-9)
    stopped = sum(int(mask.sum()) for mask in together.masks().values())
    assert sum(everyone(stopped)) == sum(int(mask.sum()) for mask in alone.masks().values())
    alone.close(), together.close()


@case
def fsdp_meshes(rank: int, world: int) -> None:
    """Replicas of shards: sums are taken over both dimensions of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if world != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    both("mlp", rank, world, coordinates=40, wrap=lambda model: fully_shard(model, mesh=mesh))
    model = make("mlp")
    with runs.EvidenceStopping(model, process_group=mesh["shards"]) as stopping:
        x, y = part(batch("mlp", 4 * world, 0), [4] * world, rank)
        loss(model(x), y).backward()
        stopping.step()
        assert stopping.evidence.count == 8


@case
def fsdp_of_old_is_refused(rank: int, world: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(make("mlp"), device_id=torch.device("cpu"))
    with refused("use its successor"):
        runs.EvidenceStopping(model)


@case
def tensor_parallel_is_refused(rank: int, world: int) -> None:
    """By name, for every estimator."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    layers = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    model = parallelize_module(layers, init_device_mesh("cpu", (world,)), plan)
    x, y = batch("mlp", 4, 0)
    for estimator in ("exact", "sampled", "microbatch"):
        with runs.EvidenceStopping(model, estimator=estimator):
            value = loss(model(x), y)
            with refused("parameter '2.bias' is a DTensor"):
                value.backward()
