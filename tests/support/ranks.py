"""What the ranks of a distributed test do. Run by `test_distributed.py`, one process per rank.

Every case trains in several processes and compares with one process on the concatenated batch. A
case is a function of the rank and the number of ranks; it joins by its decorator.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import heldin

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}
TIGHT = 1e-10
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "distributed.py"
PATIENCE = 8  # seconds until the group of a dead rank gives up


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


# --- models and data -------------------------------------------------------------------------


class Words(nn.Module):
    """Embeddings with broadcast positions, attention, a norm, tied output weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(1, 6, 8))
        self.three, self.norm = nn.Linear(8, 24, bias=False), nn.LayerNorm(8)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids) + self.places
        q, k, v = self.three(self.norm(h)).chunk(3, -1)
        result: Tensor = self.out(h + F.scaled_dot_product_attention(q, k, v))
        return result


class Forked(nn.Module):
    """Half of the samples go one way, the others the other."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor, way: Tensor) -> Tensor:
        h = self.trunk(x).tanh()
        parts = [(self.left, way == 0), (self.right, way == 1)]
        used = [(layer, mask) for layer, mask in parts if bool(mask.any())]
        if len(used) == 1:
            return used[0][0](h)  # type: ignore[no-any-return]
        result = h.new_zeros(len(x), 3)
        for layer, mask in used:
            result = result.index_put((mask,), layer(h[mask]))
        return result


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)
    )


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 3))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 9, 3))


def batch(kind: str, m: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    if kind == "words":
        ids = torch.randint(0, 11, (m, 6), generator=random)
        return ids, ids.roll(1, 1)
    shape = (m, 2, 5, 5) if kind == "conv" else (m, 5)
    x = torch.randn(shape, generator=random)
    y = (x.flatten(1)[:, 0] + torch.randn(m, generator=random) > 0).long()
    return x, y


def make(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return {"mlp": mlp, "smooth": smooth, "conv": conv, "words": Words}[kind]()


def loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


def sizes_of(world: int, even: bool, step: int) -> list[int]:
    return [4] * world if even else [[5, 3, 1, 7], [1, 6, 4, 2]][step % 2][:world]


def part(data: tuple[Tensor, Tensor], sizes: list[int], rank: int) -> tuple[Tensor, ...]:
    return tuple(t.split(sizes)[rank] for t in data)


# --- comparing -------------------------------------------------------------------------------


def close(one: heldin.criterion.Evidence, other: heldin.criterion.Evidence) -> None:
    assert one.count == other.count, (one.count, other.count)
    assert one.live == other.live, (one.live, other.live)
    assert one.groups.keys() == other.groups.keys(), (one.groups, other.groups)
    for name, value in one.groups.items():
        assert abs(value - other.groups[name]) <= TIGHT * max(1, abs(value)), (
            f"{name}: {value} and {other.groups[name]}"
        )
    near(one.criterion, other.criterion)


def near(one: float, other: float) -> None:
    same = abs(one - other) <= TIGHT * max(1, abs(one))
    assert same or repr(one) == repr(other) == "nan", (one, other)


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def refused(message: str) -> Iterator[None]:
    try:
        yield
    except heldin.HeldinError as error:
        if message not in str(error):
            raise
    else:
        raise AssertionError(f"not refused: {message}")


def same_everywhere(value: Any) -> None:
    assert all(repr(other) == repr(value) for other in everyone(value)), everyone(value)


def both(
    kind: str,
    rank: int,
    world: int,
    *,
    steps: int = 3,
    even: bool = True,
    ddp: dict[str, Any] | None = None,
    penalty: float = 0.0,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    **options: Any,
) -> None:
    """Train in all ranks; compare every step with one process on the concatenated batch."""
    plain = make(kind)
    inner = copy.deepcopy(plain)
    model = DDP(inner, **(ddp or {})) if wrap is None else wrap(inner)
    alone = heldin.EvidenceStopping(plain, process_group=None, arming=None, **options)
    together = heldin.EvidenceStopping(model, arming=None, **options)
    rate = 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with alone, together:
        for step in range(steps):
            sizes = sizes_of(world, even, step)
            x, y = batch(kind, sum(sizes), step)
            mine = part((x, y), sizes, rank)
            for net, a, b in ((plain, x, y), (model, *mine)):
                value = loss(net(a), b)
                if penalty:
                    value = value + penalty * sum(p.square().sum() for p in net.parameters())
                value.backward()
            assert together.step() == alone.step()
            close(together.evidence, alone.evidence)
            near(together.criterion, alone.criterion)
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            copy_weights(model, plain)
    same_everywhere((together.criterion, together.evidence))
    assert together.bytes_sent > 0
    assert alone.bytes_sent == 0


def copy_weights(model: nn.Module, plain: nn.Module) -> None:
    own = dict(plain.named_parameters())
    with torch.no_grad():
        for name, p in model.named_parameters():
            full = p.full_tensor() if hasattr(p, "full_tensor") else p
            own[name.removeprefix("module.")].copy_(full)


# --- DDP -------------------------------------------------------------------------------------


@case
def ddp_exact(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, estimator="exact")


@case
def ddp_sampled(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, budget=40)


@case
def ddp_uneven(rank: int, world: int) -> None:
    for estimator in ("exact", "sampled"):
        for kind in ("mlp", "words"):
            both(kind, rank, world, even=False, estimator=estimator, budget=40)


@case
def ddp_settings(rank: int, world: int) -> None:
    both("mlp", rank, world, budget=40, ddp={"static_graph": True})
    both("mlp", rank, world, budget=40, ddp={"find_unused_parameters": True})
    both("mlp", rank, world, budget=40, ddp={"gradient_as_bucket_view": True})
    both("mlp", rank, world, estimator="exact", correction="symmetric", dead="zero", groups="all")


@case
def ddp_penalty(rank: int, world: int) -> None:
    both("smooth", rank, world, penalty=0.01, even=False, estimator="exact")
    both("smooth", rank, world, penalty=0.01, budget=40)


@case
def ddp_window(rank: int, world: int) -> None:
    both("mlp", rank, world, window=2, even=False, budget=40, steps=6)
    both("mlp", rank, world, every=2, even=False, budget=40, steps=6)


@case
def ddp_no_sync(rank: int, world: int) -> None:
    """Three micro-batches; only the last one is reduced by DDP."""
    for estimator in ("exact", "sampled"):
        plain = make("mlp")
        model = DDP(copy.deepcopy(plain))
        alone = heldin.EvidenceStopping(plain, process_group=None, estimator=estimator, budget=40)
        together = heldin.EvidenceStopping(model, estimator=estimator, budget=40)
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
    alone = heldin.EvidenceStopping(plain, process_group=None, estimator="exact")
    together = heldin.EvidenceStopping(model, estimator="exact")
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
            options: dict[str, Any] = {"estimator": estimator, "budget": 8, "dead": dead}
            alone = heldin.EvidenceStopping(plain, process_group=None, **options)
            together = heldin.EvidenceStopping(model, **options)
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
    alone = heldin.EvidenceStopping(plain, process_group=None, estimator="microbatch")
    together = heldin.EvidenceStopping(model, estimator="microbatch")
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
    from torch.distributed.algorithms import Join

    counts = [2 + r for r in range(world)]
    for estimator in ("exact", "sampled"):
        plain = make("mlp")
        model = DDP(copy.deepcopy(plain))
        options: dict[str, Any] = {"estimator": estimator, "budget": 40}
        alone = heldin.EvidenceStopping(plain, process_group=None, **options)
        together = heldin.EvidenceStopping(model, **options)

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

    with heldin.EvidenceStopping(model) as together, model.join():
        loss(model(x), y).backward()
        with refused("Join([ddp_model, stopping])"):
            together.step()


@case
def ddp_trains_as_before(rank: int, world: int) -> None:
    """Observed or not, DDP's gradients are the same to the last bit."""
    x, y = part(batch("mlp", 4 * world, 0), [4] * world, rank)
    grads = []
    for watched in (False, True):
        model = DDP(make("mlp"))
        stopping = heldin.EvidenceStopping(model) if watched else None
        for _ in range(3):
            model.zero_grad()
            loss(model(x), y).backward()
            if stopping is not None:
                stopping.step()
        grads.append([p.grad.clone() for p in model.parameters()])
        if stopping is not None:
            stopping.close()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


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
        with heldin.EvidenceStopping(model, smoothing=0.5, process_group=group) as stopping:
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
    with heldin.EvidenceStopping(model) as stopping:
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
    for options in ({"budget": 40}, {"window": 3, "budget": 40}, {"estimator": "exact"}):
        plain = make("mlp")
        model = DDP(copy.deepcopy(plain))
        alone = heldin.EvidenceStopping(plain, process_group=None, **options)
        together = heldin.EvidenceStopping(model, **options)

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
        alone = heldin.EvidenceStopping(plain, process_group=None, **options)
        together = heldin.EvidenceStopping(model, **options)
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
    with heldin.EvidenceStopping(model, budget=40 + rank) as stopping:
        loss(model(x), y).backward()
        with refused("rank 1 and rank 0 differ in budget: 41 and 40"):
            stopping.step()
    different: dict[str, list[Any]] = {
        "patience": [1, 2],
        "warmup": [0, 3],
        "arming": [None, 0.5],
        "every": [2, 3],
        "window": [2, 3],
        "groups": ["tensor", "all"],
        "smoothing": [0.5, 0.9],
    }
    for name, values in different.items():  # before anything could hang
        options: dict[str, Any] = {name: values[min(rank, 1)]}
        with heldin.EvidenceStopping(model, **options) as stopping:
            loss(model(x), y).backward()
            with refused(f"rank 1 and rank 0 differ in {name}"):
                stopping.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    around = heldin.ElementwiseStopping(optimizer, model, every=2 + min(rank, 1))
    loss(model(x), y).backward()
    with refused("rank 1 and rank 0 differ in every"):
        around.step()
    around.close()
    with refused("expected 'auto'"):
        heldin.EvidenceStopping(model, process_group="world")
    with heldin.EvidenceStopping(model) as stopping, refused("no backward pass"):
        stopping.step()


def own_run(seed: int, rate: float, group: Any, refused_at: int | None) -> None:
    """Three steps of a model that is not wrapped."""
    torch.manual_seed(seed)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x, y = batch("mlp", 4, 0)
    with heldin.EvidenceStopping(model, process_group=group) as stopping:
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
    with heldin.EvidenceStopping(plain, process_group=None, estimator="exact") as alone:
        loss(plain(data[0]), data[1]).backward()
        alone.step()
    for i, (warns, options, scale, value) in enumerate(ways):
        model = DDP(make("mlp"))
        with heldin.EvidenceStopping(model, estimator="exact", **options) as stopping:
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
def ddp_rules_of_one_process(rank: int, world: int) -> None:
    """Rules that look at the rows of one process are refused by name, wrapped or inside."""
    x, y = batch("mlp", 24, 0)
    for kind in (heldin.FoldStopping, heldin.ShadowStopping, heldin.LeaveOneOutStopping):
        name = kind.__name__
        model = make("smooth")
        wrapped = DDP(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made: Any = kind
        with refused(f"{name}: the model is trained by several processes"):
            made(wrapped, optimizer, F.cross_entropy, (x, y))
        with made(model, optimizer, F.cross_entropy, (x, y)):
            with refused(f"{name}: the model is trained by several processes"):
                wrapped(x)
            model(x)  # on its own it is


@case
def ddp_subgroups(rank: int, world: int) -> None:
    """Only the ranks of the given group are pooled."""
    groups = [dist.new_group([r]) for r in range(world)]
    model = make("mlp")
    data = batch("mlp", 4 * world, 0)
    x, y = part(data, [4] * world, rank)
    counts = {}
    for name, group in (("own", groups[rank]), ("all", "auto"), ("none", None)):
        with heldin.EvidenceStopping(model, process_group=group) as stopping:
            loss(model(x), y).backward()
            stopping.step()
            counts[name] = stopping.evidence.count
    assert counts == {"own": 4, "all": 4 * world, "none": 4}, counts


@case
def ddp_bytes(rank: int, world: int) -> None:
    """Sampled evidence of the 12-million-parameter MLP: below 1 % of the gradients, as modelled."""
    if world > 2:
        return
    torch.set_default_dtype(torch.float32)
    costs: Any = SimpleNamespace(**runpy.run_path(str(BENCHMARK)))
    net, x, y = costs.mlp(batch=4)
    model = DDP(net)
    job = costs.Job({n: tuple(p.shape) for n, p in net.named_parameters()}, 4, ranks=world)
    with heldin.EvidenceStopping(model) as stopping:
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
            stopping.step()
        assert 0 < stopping.bytes_sent < 0.01 * 4 * job.parameters
        assert stopping.bytes_sent == costs.sent(job, "sampled")
        assert stopping.metrics()["heldin/bytes_sent"] == stopping.bytes_sent


# --- fully_shard -----------------------------------------------------------------------------


def sharded(model: nn.Module) -> nn.Module:
    """Every layer on its own, then the rest; tied weights stay together."""
    from torch.distributed.fsdp import fully_shard

    if not isinstance(model, Words):
        for layer in model.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                fully_shard(layer)
    return fully_shard(model)


@case
def fsdp_exact(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, estimator="exact", wrap=sharded)


@case
def fsdp_sampled(rank: int, world: int) -> None:
    for kind in ("mlp", "conv", "words"):
        both(kind, rank, world, even=False, budget=40, wrap=sharded)


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
    alone = heldin.EvidenceStopping(plain, process_group=None, estimator="microbatch")
    with alone, heldin.EvidenceStopping(model, estimator="microbatch") as together:
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
        stopping = heldin.EvidenceStopping(model, budget=40) if watched else None
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
    averages = together.state_dict()["heldin"]["averages"]
    assert 0 < alone.stopped_fraction() < 1
    for name, p in plain.named_parameters():
        assert torch.allclose(alone._averages[name], averages[name].full_tensor(), atol=1e-9), name
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
    both("mlp", rank, world, budget=40, wrap=lambda model: fully_shard(model, mesh=mesh))
    model = make("mlp")
    with heldin.EvidenceStopping(model, process_group=mesh["shards"]) as stopping:
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
        heldin.EvidenceStopping(model)


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
        with heldin.EvidenceStopping(model, estimator=estimator):
            value = loss(model(x), y)
            with refused("parameter '2.bias' is a DTensor"):
                value.backward()


# --- checkpoints -----------------------------------------------------------------------------


class Trained:
    """A run with both kinds of stopping, plain or sharded, that can be saved and loaded."""

    def __init__(self, shard: bool, rank: int, world: int) -> None:
        self.shard, self.rank, self.world = shard, rank, world
        self.model = sharded(make("mlp")) if shard else make("mlp")
        group = "auto" if shard else None
        self.stopping = heldin.EvidenceStopping(
            self.model, budget=40, window=2, process_group=group
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
        for one, other in zip(run.train(range(5, 9)), expected[5:], strict=True):
            near(one, other)
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


# --- running ---------------------------------------------------------------------------------


def die(rank: int, world: int) -> None:
    """The last rank dies in the second step; the others are told within the group's timeout."""
    model = DDP(make("mlp"))
    x, y = batch("mlp", 4, rank)
    with heldin.EvidenceStopping(model) as stopping:
        for step in range(3):
            loss(model(x), y).backward()
            if step == 1 and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            start = time.monotonic()
            try:
                stopping.step()
            except RuntimeError:
                assert step == 1
                assert time.monotonic() - start < PATIENCE + 5
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
        timeout=datetime.timedelta(seconds=PATIENCE if names == ["die"] else 60),
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
