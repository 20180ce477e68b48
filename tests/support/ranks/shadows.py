"""Cases: folds and shadow of several processes are those of one on the batches put together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import heldin
from tests.support import runs

from .common import case, everyone, make, refused, same_everywhere

N = 30
PATIENCE = heldin.Patience(factor=1.3, slack=10, checks=1)
Batches = list[list[list[int]]]  # by step and rank, the numbers of the rows


def table(n: int = N) -> TensorDataset:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(n, 5, generator=random)
    return TensorDataset(x, (x[:, 0] + torch.randn(n, generator=random) > 0).long())


def batch_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def drawn(world: int, steps: int, sizes: Callable[[int], Sequence[int]]) -> Batches:
    """Epochs in random orders, cut into batches of these sizes in each step."""
    random = torch.Generator().manual_seed(1)
    rows: list[int] = []
    plan = []
    for step in range(steps):
        parts = []
        for size in sizes(step):
            while len(rows) < size:
                rows += torch.randperm(N, generator=random).tolist()
            parts.append([rows.pop() for _ in range(size)])
        plan.append(parts[:world])
    return plan


def uneven(step: int) -> list[int]:
    return [[5, 1, 2], [1, 4, 3], [2, 3, 1]][step % 3]


def union(parts: list[list[int]]) -> list[int]:
    return [row for part in parts for row in part]


class Run:
    """A training run, of one process on all rows of a step or of several on their own."""

    def __init__(
        self,
        plan: Batches,
        rank: int | None,
        start: nn.Module | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        rule: Any = runs.FoldStopping,
        accumulate: int = 1,
        wrap: bool = True,
        shard: Callable[[nn.Module], Any] | None = None,
        **options: Any,
    ) -> None:
        self.plan, self.rank, self.accumulate = plan, rank, accumulate
        self.net = copy.deepcopy(start) if start is not None else make("smooth")
        if shard is not None:
            shard(self.net)
        self.model: nn.Module = DDP(self.net) if rank is not None and wrap else self.net
        make_optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9))
        self.optimizer = make_optimizer(self.net.parameters())
        self.loss: Any = options.setdefault("batch_loss", batch_loss)
        self.clip = options.get("clip")
        self.loader = DataLoader(options.pop("data", table()), batch_sampler=self)
        if rank is None:
            options["process_group"] = None
        options = {"patience": PATIENCE, "data": self.loader, **options}
        self.stopping = rule(self.model, self.optimizer, **options)
        self.first = 0

    def __iter__(self) -> Iterator[list[int]]:
        for parts in self.plan[self.first :]:
            yield union(parts) if self.rank is None else parts[self.rank]

    def __len__(self) -> int:
        return len(self.plan)

    def train(self, until: int | None = None) -> Run:
        """Until the rule stops, the plan ends, or so many batches were seen."""
        done, waiting = self.first, self.plan[self.first :][: self.accumulate]
        for batch in self.loader:
            rows = sum(len(part) for parts in waiting for part in parts)
            share = len(batch[1]) * (1 if self.rank is None else dist.get_world_size()) / rows
            (self.loss(self.model, batch) * share).backward()
            done += 1
            if done % self.accumulate == 0:
                if self.clip is not None:
                    nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                waiting = self.plan[done : done + self.accumulate]
                if self.stopping.step():
                    break
            if done == until:
                break
        self.first = done
        return self


def expect_same(one: Run, other: Run, rtol: float = 1e-9) -> None:
    """Estimates, stop, best step, shadows; then the restored weights. Closes both."""
    a, b = one.stopping, other.stopping
    assert [r.step for r in a.history] == [r.step for r in b.history]
    for name, values in a.history.columns().items():
        found = torch.tensor(values, dtype=torch.float64)
        expected = torch.tensor(b.history.columns()[name], dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True)
    assert (a.stopped_step, a.best_step) == (b.stopped_step, b.best_step)
    for number in range(a.backend.copies):
        theirs = b.backend.weights_of(number)
        for name, weight in a.backend.weights_of(number).items():
            torch.testing.assert_close(weight, theirs[name], rtol=rtol, atol=rtol)
    for run in (one, other):
        run.stopping.restore()
        run.stopping.close()
    for p, q in zip(one.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
    same_everywhere([p.tolist() for p in one.net.state_dict().values()])
    same_everywhere(a.history.columns())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


@case
def shadows_even(rank: int, world: int) -> None:
    """As many rows on every rank, all kinds of optimisers, and a stop."""
    plan = drawn(world, 80, lambda step: [4] * world)
    for make_optimizer in OPTIMIZERS.values():
        options: dict[str, Any] = {"optimizer": make_optimizer, "folds": 3}
        together = Run(plan, rank, **options).train()
        assert together.stopping.should_stop
        assert together.stopping.best_step > 0
        expect_same(together, Run(plan, None, **options).train())


@case
def shadows_uneven(rank: int, world: int) -> None:
    """Other numbers of rows on each rank; ranks and whole steps without a row of a shadow."""
    plan = drawn(world, 40, uneven)
    hidden = torch.zeros(N, dtype=torch.bool)
    hidden[: N // 3] = True
    plan[3] = [[2], [3, 4], [1]][:world]  # nothing of the shadow on any rank: no step
    plan[4] = [[2, 20], [3, 4], [1]][:world]  # only on the first
    for options in (
        {"rule": runs.ShadowStopping, "hidden": hidden},
        {"folds": 5, "shadows": 2, "clip": 0.3},
        {"folds": 3, "accumulate": 3, "engine": "replay"},
    ):
        expect_same(
            Run(plan, rank, **options).train(),
            Run(plan, None, **options).train(),
        )


@case
def shadows_samplers(rank: int, world: int) -> None:
    """DistributedSampler: rows that are drawn twice to make ranks even, and rows left out."""
    from torch.utils.data.distributed import DistributedSampler

    data = table(N - 1)
    for drop_last in (False, True):
        plan: Batches = []
        own: list[DistributedSampler[Any]] = [
            DistributedSampler(data, world, r, drop_last=drop_last) for r in range(world)
        ]
        for epoch in range(4):
            for sampler in own:
                sampler.set_epoch(epoch)
            rows = [list(sampler) for sampler in own]
            for start in range(0, len(rows[0]) - 3 * drop_last, 4):
                plan.append([each[start : start + 4] for each in rows])
        model = DDP(make("smooth"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        loader = DataLoader(data, 4, sampler=own[rank], drop_last=drop_last, num_workers=rank % 2)
        stopping = runs.FoldStopping(
            model, optimizer, data=loader, batch_loss=batch_loss, folds=3, patience=None
        )
        for epoch in range(4):
            own[rank].set_epoch(epoch)
            for batch in loader:
                batch_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                stopping.step()
        alone = Run(plan, None, folds=3, data=data, patience=None).train()
        assert len(alone.stopping.history) > 3
        together = copy.copy(alone)
        together.stopping, together.net = stopping, model.module
        expect_same(together, alone)


@case
def shadows_resume(rank: int, world: int) -> None:
    """A state that one rank has saved goes on in all of them, and in one process."""
    plan = drawn(world, 60, uneven)
    options: dict[str, Any] = {"folds": 3, "optimizer": OPTIMIZERS["adamw"]}
    whole = Run(plan, rank, **options).train()
    first = Run(plan, rank, **options).train(until=17)
    states = [first.net.state_dict(), first.optimizer.state_dict(), first.stopping.state_dict()]
    states = everyone(copy.deepcopy(states))[0]
    first.stopping.close()
    runs = [Run(plan, rank, **options), Run(plan, None, **options)]
    for run in runs:
        run.first = 17
        for part, state in zip((run.net, run.optimizer, run.stopping), states, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        run.train()
    columns = [repr(run.stopping.history.columns()) for run in (runs[0], whole)]
    assert columns[0] == columns[1]
    expect_same(runs[0], runs[1])
    whole.stopping.close()
    late = Run(plan, rank, **options)
    if rank == 0:
        late.stopping.load_state_dict(states[2])
    else:
        late.stopping._process_group.forget()  # as if it had loaded another state
    with refused("rank 1 and rank 0 differ in step: 0 and 17"):
        late.train()
    late.stopping.close()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).tanh())
        return out


def by_hand(run: Run, shadow: int, least: int, scale: float | None = None) -> nn.Module:
    """The slow twin: all ranks train one model on the rows that a shadow may see."""
    world, own = dist.get_world_size(), run.rank
    assert own is not None
    torch.manual_seed(3)
    model = copy.deepcopy(run.start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    data, label = table(), run.stopping.fold_of_row
    for parts in run.plan[: run.first]:
        kept = [[i for i in part if int(label[i]) != shadow] for part in parts]
        used = [some if len(some) >= least else [] for some in kept]
        rows = sum(map(len, used))
        if not rows:
            continue
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        mine = torch.tensor(used[own], dtype=torch.long)
        if len(mine):
            share = len(mine) / rows if scale is None else scale
            (run.loss(model, [t[mine] for t in data.tensors]) * share).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        for b in model.buffers():
            dist.broadcast(b, 0)
    assert world > 1
    return model


def expect_twin(run: Run, least: int = 1, scale: float | None = None) -> None:
    for number, shadow in enumerate(run.stopping.backend.shadows):
        twin = by_hand(run, number, least, scale)
        weights = run.stopping.backend.weights_of(number)
        for name, p in twin.named_parameters():
            torch.testing.assert_close(weights[name].detach(), p.detach())
        for found, b in zip(shadow.buffers, twin.buffers(), strict=True):
            torch.testing.assert_close(found, b)


@case
def shadows_batch_norm(rank: int, world: int) -> None:
    """Statistics of each rank's own rows; buffers are those of the first rank everywhere."""
    torch.manual_seed(3)
    start = Normed()
    run = Run(drawn(world, 20, lambda step: [4] * world), rank, start=start, folds=3)
    run.start = start
    run.train()
    expect_twin(run, least=2)
    run.stopping.restore()
    same_everywhere([p.tolist() for p in run.net.state_dict().values()])
    same_everywhere(run.stopping.history.columns())
    run.stopping.close()


@case
def shadows_sums(rank: int, world: int) -> None:
    """A sum over rows is averaged over ranks, as DistributedDataParallel averages gradients."""

    def added(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 5

    start = make("smooth")
    model = DDP(copy.deepcopy(start))
    run = Run(drawn(world, 20, lambda step: [4] * world), rank, batch_loss=added, wrap=False)
    run.stopping.close()
    run.start, run.model, run.net = start, model, model.module
    run.optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    run.stopping = runs.FoldStopping(
        model, run.optimizer, data=run.loader, batch_loss=added, folds=3, patience=None
    )
    for batch in run.loader:
        added(model, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.stopping.step()
    run.first = len(run.plan)
    expect_twin(run, scale=1 / world)
    losses = run.stopping.history.columns()["training_loss"]
    assert all(0 < value < 1 for value in losses[1:]), losses  # of a row
    run.stopping.close()


@case
def shadows_tensors(rank: int, world: int) -> None:
    """loss_fn on tensors, rows found by their bits; `auto`; one number for dropout everywhere."""
    x, y = table().tensors
    plan = drawn(world, 12, lambda step: [4] * world)
    made = []
    for group in ("auto", None):
        net = make("smooth")
        model: nn.Module = DDP(net) if group else net
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        stopping = runs.FoldStopping(
            model,
            optimizer,
            F.cross_entropy,
            (x, y),
            patience=None,
            process_group=group,
            engine="replay",
        )
        for parts in plan:
            index = parts[rank] if group else union(parts)
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step()
        made.append(stopping)
    one, other = made
    assert type(one) is type(other)
    torch.testing.assert_close(
        one.history.columns()["estimate"], other.history.columns()["estimate"], rtol=1e-9, atol=1e-9
    )
    one.close(), other.close()

    torch.manual_seed(7)
    dropping = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    torch.manual_seed(100 + rank)
    run = Run(plan, rank, start=dropping, folds=3).train()
    same_everywhere(run.stopping.history.columns())
    run.stopping.close()


@case
def shadows_differ(rank: int, world: int) -> None:
    """Ranks with other settings, rows or weights are refused by name, all of them."""
    plan = drawn(world, 4, lambda step: [4] * world)
    odd = min(rank, 1)
    different: dict[str, list[Any]] = {
        "grid": [1.2, 1.3],
        "patience": [PATIENCE, None],
        "seed": [0, 1],
        "memory": [2**20, 2**21],
        "clip": [1.0, 2.0],
        "engine": ["replay", "auto"],
        "average": ["best", "bagged"],
    }
    for name, values in different.items():
        options: dict[str, Any] = {name: values[odd]}
        with refused(f"rank 1 and rank 0 differ in {name}"):
            Run(plan, rank, **options)
    with refused("rank 1 and rank 0 differ in optimizer"):
        Run(plan, rank, optimizer=lambda p: torch.optim.SGD(p, lr=0.1 * (1 + odd)))
    with refused("rank 1 and rank 0 differ in rows: 29 and 30"):
        Run(plan, rank, data=table(N - odd))
    shifted = TensorDataset(table().tensors[0] + odd, table().tensors[1])
    with refused("rank 1 and rank 0 differ in the first rows of data"):
        Run(plan, rank, data=shifted)
    with refused("rank 1 and rank 0 differ in the rows held out"):
        Run(plan, rank, groups=torch.arange(N) // (5 + odd))


@case
def shadows_unwrapped(rank: int, world: int) -> None:
    """Bare models: trained together by hand, trained apart, and by a group of one's own."""
    plan = drawn(world, 10, lambda step: [4] * world)
    alone = Run(plan, None, folds=3, patience=None).train()
    run = Run(plan, rank, wrap=False, folds=3, patience=None)
    for batch in run.loader:
        batch_loss(run.net, batch).backward()
        for p in run.net.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= world
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.stopping.step()
    expect_same(run, alone)
    with refused("rank 1 and rank 0 train different models: the weights of parameter"):
        Run(plan, rank, wrap=False, folds=3).train()
    apart = Run(plan, rank, wrap=False, folds=3, process_group=None, patience=None).train()
    assert len(set(everyone(apart.stopping.estimate))) > 1
    apart.stopping.close()


@case
def shadows_sharded(rank: int, world: int) -> None:
    """Under fully_shard: the estimates, the stop and the weights of one process."""
    from torch.distributed.fsdp import fully_shard

    plan = drawn(world, 60, uneven)
    for reshard in (True, False):
        for name in ("sgd", "adamw"):
            alone = Run(plan, None, optimizer=OPTIMIZERS[name], folds=3).train()
            run = Run(
                plan,
                rank,
                start=None,
                optimizer=OPTIMIZERS[name],
                wrap=False,
                shard=lambda net, again=reshard: fully_shard(net, reshard_after_forward=again),
                folds=3,
            ).train()
            a, b = run.stopping, alone.stopping
            assert [r.step for r in a.history] == [r.step for r in b.history]
            for column in ("estimate", "standard_error"):
                found = torch.tensor(a.history.columns()[column])
                expected = torch.tensor(b.history.columns()[column])
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            assert (a.stopped_step, a.best_step) == (b.stopped_step, b.best_step)
            for each in (run, alone):
                each.stopping.restore()
                each.stopping.close()
            for p, q in zip(run.net.parameters(), alone.net.parameters(), strict=True):
                whole = p.full_tensor()
                torch.testing.assert_close(whole, q.detach(), rtol=1e-3, atol=1e-5)


class _OwnStep:
    """A step with clipping and a penalty."""

    def __init__(self, model: nn.Module, net: nn.Module) -> None:
        self.model, self.net = model, net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)

    def __call__(self, batch: Any) -> None:
        self.optimizer.zero_grad()
        loss = batch_loss(self.model, batch)
        loss = loss + 0.01 * sum(p.square().sum() for p in self.net.parameters())
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()


@case
def shadows_train_step(rank: int, world: int) -> None:
    """The user's own step under DistributedDataParallel: shadows are those of one process."""
    plan = drawn(world, 25, lambda step: [4] * world)

    def run(own: bool) -> tuple[Any, nn.Module]:
        net = make("smooth")
        step = _OwnStep(DDP(net) if own else net, net)
        sampler: Any = [parts[rank] if own else union(parts) for parts in plan]
        loader: Any = DataLoader(table(), batch_sampler=sampler)
        stopping = heldin.EarlyStopping(
            step.model,
            step.optimizer,
            data=loader,
            batch_loss=batch_loss,
            rule=heldin.rules.Folds(folds=3),
            train_step=step,
            patience=None,
            **({} if own else {"process_group": None}),
        )
        for batch in loader:
            stopping.train(batch)
        return stopping, net

    (mine, net), (alone, other) = run(True), run(False)
    for number in range(3):
        theirs = alone.following.backend.weights_of(number)
        for name, weight in mine.following.backend.weights_of(number).items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-5, atol=1e-6)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    mine.close()
    alone.close()


@case
def shadows_refused(rank: int, world: int) -> None:
    """What shadows cannot follow in several processes is refused by name."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.fsdp import fully_shard

    plan = drawn(world, 4, lambda step: [4] * world)
    x, y = table().tensors
    net = make("smooth")
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parts = (model, optimizer, F.cross_entropy, (x, y))
    with refused("in several processes, engine must be 'auto' or 'replay'"):
        runs.FoldStopping(*parts, engine="dense")
    with refused("sample_weight is for stacked shadows"):
        runs.FoldStopping(*parts, sample_weight=torch.ones(N))
    with runs.FoldStopping(*parts) as stopping:
        with refused("train: it is for tensors and loss_fn in one process"):
            stopping.train()
        stopping.close()
    with refused("EarlyStopping: several processes train the model"):
        runs.LeaveOneOutStopping(*parts)
    for kind in (runs.FoldStopping, runs.LeaveOneOutStopping):
        with refused("several processes train the model"):
            kind(*parts, process_group=None)
        with kind(net, *parts[1:], process_group=None) as alone:
            with refused("several processes train the model"):
                model(x)
            alone.close()
    with refused("SyncBatchNorm"):
        Run(plan, rank, start=nn.SyncBatchNorm.convert_sync_batchnorm(Normed()), wrap=False)
    divided = fully_shard(make("smooth"))
    with refused("train_step is not replayed under fully_shard"):
        heldin.EarlyStopping(
            divided,
            torch.optim.SGD(divided.parameters(), lr=0.1),
            F.cross_entropy,
            table(),
            train_step=print,
        )
    bag = nn.EmbeddingBag(N, 3, sparse=True, mode="sum")
    with refused("sparse gradients cannot be summed"):
        ids = TensorDataset(torch.arange(N)[:, None], y)
        start = nn.Sequential(bag)
        run = Run(plan, rank, start=start, data=ids, optimizer=plain_sgd)
        run.train()
    run.stopping.close()
    run = Run(plan, rank)
    with refused("so that Join is not possible"), Join([run.model]):
        run.train()
    run.stopping.close()


def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
