"""Cases: ranks of DistributedDataParallel decide together, or are refused."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import heldin
from tests.support import runs

from .common import (
    batch,
    case,
    close,
    loss,
    make,
    mlp,
    near,
    part,
    refused,
    same_everywhere,
    sizes_of,
)


@case
def ddp_decides_in_one_step(rank: int, world: int) -> None:
    """A run to the stop: all ranks stop together, in the step in which one process would."""
    x, y = batch("mlp", 24, 1)
    stops = []
    for alone in (True, False):
        inner = make("mlp")
        model = inner if alone else DDP(inner)
        a, b = (x, y) if alone else part((x, y), [24 // world] * world, rank)
        group = None if alone else "auto"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with runs.EvidenceStopping(model, smoothing=0.5, process_group=group) as stopping:
            for _ in range(300):
                loss(model(a), b).backward()
                if stopping.step():
                    break
                optimizer.step()
                optimizer.zero_grad()
        stops.append(stopping.stopped_step)
    assert stops[0] is not None
    assert stops[0] == stops[1], stops
    same_everywhere(stops)


@case
def ddp_nonfinite(rank: int, world: int) -> None:
    """A nan on one rank is a step without a value on all of them."""
    model = DDP(make("mlp"))
    with runs.EvidenceStopping(model) as stopping:
        x, y = part(batch("mlp", 4 * world, 0), [4] * world, rank)
        if rank == 1:
            x = x * torch.nan
        loss(model(x), y).backward()
        stopping.step()
        same_everywhere(stopping.reason)
        assert "inf or nan" in stopping.reason


@case
def ddp_elementwise(rank: int, world: int) -> None:
    """Single weights stop as they do in one process."""
    plain = make("mlp")
    model = DDP(copy.deepcopy(plain))
    options: dict[str, Any] = {"smoothing": 0.5, "start": 1.2, "greedy": False}
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
    assert together.stopped_fraction() == alone.stopped_fraction() > 0
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-9), name
    alone.close(), together.close()


@case
def ddp_resumes_on_other_sizes(rank: int, world: int) -> None:
    """A state written by one process goes on in many, and the other way round."""
    for options in ({"coordinates": 40}, {"window": 3, "coordinates": 40}, {"estimator": "exact"}):
        plain = make("mlp")
        model = DDP(copy.deepcopy(plain))
        alone = runs.EvidenceStopping(plain, process_group=None, **options)
        together = runs.EvidenceStopping(model, **options)

        def step(number: int) -> None:
            x, y = batch("mlp", 4 * world, number)
            loss(plain(x), y).backward()
            a, b = part((x, y), [4] * world, rank)
            loss(model(a), b).backward()
            alone.step(), together.step()

        for number in range(4):
            step(number)
        one, other = alone.state_dict(), together.state_dict()
        alone.close(), together.close()
        alone = runs.EvidenceStopping(plain, process_group=None, **options)
        together = runs.EvidenceStopping(model, **options)
        alone.load_state_dict(other)
        together.load_state_dict(one)
        for number in range(4, 9):
            step(number)
            near(alone.criterion, together.criterion)
        same_everywhere(together.state_dict())
        assert together.evidence.count > 0
        alone.close(), together.close()


@case
def ddp_refuses_strangers(rank: int, world: int) -> None:
    """Ranks that differ are told so, all of them."""
    model = DDP(make("mlp"))
    x, y = batch("mlp", 4, 0)
    with runs.EvidenceStopping(model, coordinates=40 + rank) as stopping:
        loss(model(x), y).backward()
        with refused("rank 1 and rank 0 differ in coordinates: 41 and 40"):
            stopping.step()
    different: dict[str, tuple[str, list[Any]]] = {  # and the option of rules.Evidence
        "patience": ("checks", [1, 2]),
        "warmup": ("warmup", [0, 3]),
        "arming": ("arm_threshold", [None, 0.5]),
        "every": ("check_every", [2, 3]),
        "window": ("window", [2, 3]),
        "parameter_groups": ("parameter_groups", ["tensor", "all"]),
        "smoothing": ("smoothing", [0.5, 0.9]),
    }
    for name, (option, values) in different.items():  # before anything could hang
        arguments: dict[str, Any] = {name: values[min(rank, 1)]}
        with runs.EvidenceStopping(model, **arguments) as stopping:
            loss(model(x), y).backward()
            with refused(f"rank 1 and rank 0 differ in {option}"):
                stopping.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    around = heldin.ElementwiseStopping(optimizer, model, every=2 + min(rank, 1))
    loss(model(x), y).backward()
    with refused("rank 1 and rank 0 differ in every"):
        around.step()
    around.close()
    with refused("expected 'auto'"):
        runs.EvidenceStopping(model, process_group="world")
    with runs.EvidenceStopping(model) as stopping, refused("no backward pass"):
        stopping.step()


def own_run(seed: int, rate: float, group: Any, refused_at: int | None) -> None:
    """Three steps of a model that is not wrapped."""
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x, y = batch("mlp", 4, 0)
    with runs.EvidenceStopping(model, process_group=group) as stopping:
        for step in range(3):
            loss(model(x), y).backward()
            if step == refused_at:
                with refused("rank 1 and rank 0 train different models: the weights of parameter"):
                    stopping.step()
                return
            stopping.step()
            optimizer.step()
            optimizer.zero_grad()


@case
def ranks_with_models_of_their_own(rank: int, world: int) -> None:
    """A sweep under torchrun: other weights, or the same ones trained in another way."""
    own_run(seed=rank, rate=0.1, group="auto", refused_at=0)
    own_run(seed=0, rate=0.1 * (rank + 1), group="auto", refused_at=1)
    own_run(seed=rank, rate=0.1, group=None, refused_at=None)
    own_run(seed=0, rate=0.1, group="auto", refused_at=None)


@case
def ddp_weighted_losses(rank: int, world: int) -> None:
    """Factors that differ from rank to rank are noticed, those that do not are not."""
    sizes = sizes_of(world, False, 0)
    data = batch("mlp", sum(sizes), 0)
    x, y = part(data, sizes, rank)
    share = len(x) * world / sum(sizes)
    each = F.cross_entropy
    ways: list[tuple[bool, dict[str, Any], float, Callable[[Tensor], Tensor]]] = [
        (True, {}, 1.0, lambda out: each(out, y) * share),
        (True, {}, 1.0, lambda out: world * each(out, y, reduction="sum") / sum(sizes)),
        (True, {}, 1.0, lambda out: torch.tensor(share) * each(out, y, reduction="none").mean()),
        (False, {}, share, lambda out: each(out, y) * share),
        (False, {"reduction": "sum"}, 1.0, lambda out: each(out, y, reduction="sum") / 7),
        (False, {}, 1.0, lambda out: 1024 * each(out, y) / 3),
        (False, {}, 1.0, lambda out: each(out, y, reduction="none").sum() / len(x)),
        (False, {}, 1.0, lambda out: each(out, y) + out.square().mean()),
    ]
    plain = make("mlp")
    with runs.EvidenceStopping(plain, process_group=None, estimator="exact") as alone:
        loss(plain(data[0]), data[1]).backward()
        alone.step()
    for i, (warns, options, scale, value) in enumerate(ways):
        model = DDP(make("mlp"))
        with runs.EvidenceStopping(model, estimator="exact", **options) as stopping:
            value(model(x)).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", heldin.HeldinWarning)
                stopping.step(scale=scale)
            told = [str(w.message) for w in caught if w.category is heldin.HeldinWarning]
            assert bool(told) == warns, (i, told)
            assert not told or "losses of the ranks are weighted" in told[0], told
            if not warns and i < 7:
                close(stopping.evidence, alone.evidence)


@case
def ddp_subgroups(rank: int, world: int) -> None:
    """Only the ranks of the given group are pooled."""
    groups = [dist.new_group([r]) for r in range(world)]
    model = make("mlp")
    data = batch("mlp", 4 * world, 0)
    x, y = part(data, [4] * world, rank)
    counts = {}
    for name, group in (("own", groups[rank]), ("all", "auto"), ("none", None)):
        with runs.EvidenceStopping(model, process_group=group) as stopping:
            loss(model(x), y).backward()
            stopping.step()
            counts[name] = stopping.evidence.count
    assert counts == {"own": 4, "all": 4 * world, "none": 4}, counts


@case
def ddp_bytes(rank: int, world: int) -> None:
    """Sampled evidence of the 12-million-parameter MLP: below 1 % of the gradients."""
    if world > 2:
        return
    torch.set_default_dtype(torch.float32)
    net = nn.Sequential()
    for a, b in pairwise((784, 2500, 2000, 1500, 1000, 500, 10)):
        net.extend([nn.Linear(a, b), nn.ReLU()])
    model, x, y = DDP(net), torch.randn(4, 784), torch.randint(10, (4,))
    gradients = sum(p.numel() * p.element_size() for p in net.parameters())
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            stopping.step()
        assert 0 < stopping.bytes_sent < 0.01 * gradients
        assert stopping.metrics()["heldin/bytes_sent"] == stopping.bytes_sent
