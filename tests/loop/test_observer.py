"""Loops that do more, or less, than one step on every batch: the numbers of a slow twin, or none.

Every case here was silently wrong once, or was tried in order to make it so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import heldin
from tests.support import runs
from tests.support.shadow_loops import (
    ROWS,
    Loop,
    batch_loss,
    loader_of,
    network,
    sgd,
    trained,
    x,
    y,
)
from tests.support.shadow_runs import D, N

EXACT: dict[str, Callable[[], Loop]] = {}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {}


def exact(function: Callable[[], Loop]) -> Callable[[], Loop]:
    EXACT[function.__name__] = function
    return function


def refused(message: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def keep(function: Callable[[], Any]) -> Callable[[], Any]:
        REFUSED[function.__name__] = function, message
        return function

    return keep


@exact
def batches_skipped_after_the_forward_pass() -> Loop:
    loop = Loop(network(), loader_of())
    for number, batch in loop.batches():
        loss = batch_loss(loop.model, batch)
        if number != 1:  # as a guard against nan does
            loss.backward()
            loop.step(batch)
            loop.stopping.step()
    return loop


@exact
def gradients_thrown_away() -> Loop:
    loop = Loop(network(), loader_of())
    for number, batch in loop.batches():
        loss = batch_loss(loop.model, batch)
        loop.optimizer.zero_grad(set_to_none=number == 2)
        loss.backward()
        if number not in (1, 2):
            loop.step(batch)
            loop.stopping.step()
    return loop


@exact
def evaluation_with_gradients_in_between() -> Loop:
    loop = Loop(network(), loader_of())
    for _, batch in loop.batches():
        batch_loss(loop.model, batch).backward()
        loop.model(torch.zeros(3, D, dtype=torch.float64))
        loop.step(batch)
        loop.stopping.step()
    return loop


@exact
def two_steps_on_one_batch() -> Loop:
    loop = Loop(network(), loader_of())
    for number, batch in loop.batches():
        for _ in range(2):
            batch_loss(loop.model, batch).backward()
            loop.step(batch)
            if number % 2:
                loop.stopping.add_batch(batch)
            loop.stopping.step()
    return loop


@exact
def one_backward_pass_for_two_batches() -> Loop:
    loop = Loop(network(), loader_of(drop_last=True))
    waiting: list[Any] = []
    for _, batch in loop.batches():
        waiting.append(batch)
        if len(waiting) == 2:
            (sum(batch_loss(loop.model, one) for one in waiting) / 2).backward()
            loop.step(*waiting)
            loop.stopping.step()
            waiting = []
    return loop


@exact
def step_after_evaluation() -> Loop:
    loop = Loop(network(nn.BatchNorm1d(8).double()), loader_of(batch_size=13))
    for _, batch in loop.batches():
        loop.model.train()
        batch_loss(loop.model, batch).backward()
        loop.step(batch)
        loop.model.eval()
        loop.stopping.step()
    return loop


@exact
def a_batch_sampler_of_tensors() -> Loop:
    loop = Loop(network(), DataLoader(ROWS, batch_sampler=torch.arange(N).split(6)))
    return trained(loop)


@exact
def batches_of_different_lengths_with_rows_twice() -> Loop:
    batches = [[0, 1, 2], [5, 5, 7, 8], [3], [*range(9, N)]]
    return trained(Loop(network(), DataLoader(ROWS, batch_sampler=batches)))


@exact
def a_weighted_sampler() -> Loop:
    generator = torch.Generator().manual_seed(2)
    sampler = WeightedRandomSampler(range(1, N + 1), N + 3, generator=generator)
    return trained(Loop(network(), DataLoader(ROWS, 7, sampler=sampler, drop_last=True)))


@exact
def workers_that_prefetch_in_an_epoch_cut_short() -> Loop:
    loop = Loop(network(), loader_of(num_workers=1, persistent_workers=True, prefetch_factor=3))
    for _ in range(2):
        for number, batch in enumerate(loop.loader):
            if number == 2:
                break
            batch_loss(loop.model, batch).backward()
            loop.step(batch)
            loop.stopping.step()
    return loop


@refused("yields .'a', 1.*whole numbers")
def a_sampler_of_names() -> None:
    trained(Loop(network(), DataLoader(ROWS, batch_sampler=[["a", 1]])))


@exact
def a_loss_that_calls_the_model_by_its_name() -> Loop:
    model = network()
    return trained(Loop(model, loader_of(), batch_loss=lambda _, batch: batch_loss(model, batch)))


@refused("does not depend on the weights of the model")
def a_loss_of_another_model() -> None:
    other = network()
    trained(Loop(network(), loader_of(), batch_loss=lambda _, batch: batch_loss(other, batch)))


@exact
def a_patched_forward() -> Loop:
    model = network()
    start = copy.deepcopy(model)  # a copy of the patched model would call the model
    forward = model.forward
    model.forward = lambda rows: forward(rows)
    loop = Loop(model, loader_of())
    loop.start = start
    return trained(loop)


@exact
def calls_that_are_not_seen() -> Loop:
    loop = Loop(network(), loader_of())
    for _, batch in loop.batches():
        F.cross_entropy(loop.model.forward(batch["x"]), batch["y"]).backward()
        loop.step(batch)
        loop.stopping.step()
    return loop


@refused("'2.weight' was changed, but not by the optimiser")
def a_second_optimiser() -> None:
    model = network()
    model[2].requires_grad_(False)
    loop = Loop(model, loader_of())
    model[2].requires_grad_(True)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    for number, batch in loop.batches():
        batch_loss(model, batch).backward()
        if number:  # else the first step is warned about, too
            second.step()
        loop.step(batch)
        loop.stopping.step()


@refused("'0.weight' was unfrozen or added")
def parameters_unfrozen_on_the_way() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = runs.FoldStopping(model, optimizer, F.cross_entropy, (x, y))
    for number in range(3):
        if number == 1:
            model[0].weight.requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        stopping.step()


@refused("lazy layers")
def lazy_layers() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs.FoldStopping(model, optimizer, data=loader_of(), batch_loss=batch_loss)


@refused("changed in place when the model was called")
def a_batch_changed_afterwards() -> None:
    loop = Loop(network(), loader_of())
    for _, batch in loop.batches():
        batch_loss(loop.model, batch).backward()
        loop.step(batch)
        batch["x"].zero_()
        loop.stopping.step()


@refused("changed in place when the model was called")
def tensors_changed_afterwards() -> None:
    model = network()
    optimizer = sgd(model)
    stopping = runs.FoldStopping(model, optimizer, F.cross_entropy, (x, y))
    rows = x.clone()
    F.cross_entropy(model(rows), y).backward()
    optimizer.step()
    rows.zero_()
    stopping.step(indices=range(N))


class Halved(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.mul_(0.5)


@refused("changes the batch in place")
def a_model_that_changes_its_batch() -> None:
    trained(Loop(nn.Sequential(Halved(), network()), loader_of()))


class HalvedInTraining(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows.mul_(0.5) if self.training else rows * 1.0


@refused("changed in place when the model was called")
def a_model_that_changes_its_batch_in_training() -> None:
    loop = Loop(nn.Sequential(HalvedInTraining(), network()), loader_of())
    for _, batch in loop.batches():
        batch_loss(loop.model, batch).backward()
        loop.step(batch)
        loop.stopping.add_batch(batch)
        loop.stopping.step()


@refused("a part of the batch only")
def a_part_of_the_batch() -> None:
    loop = Loop(network(), loader_of(batch_size=8))
    for number, batch in loop.batches():
        rows = slice(0, 8 if number == 0 else 4)
        F.cross_entropy(loop.model(batch["x"][rows]), batch["y"][rows]).backward()
        loop.step(batch)
        loop.stopping.step()


@exact
def a_part_taken_out_of_the_batch() -> Loop:
    def popped(model: nn.Module, batch: Any) -> Tensor:
        labels = batch.pop("y")
        return F.cross_entropy(model(batch["x"]), labels)

    loop = Loop(network(), loader_of(), batch_loss=popped)
    for _, batch in loop.batches():
        whole = dict(batch)
        popped(loop.model, batch).backward()
        loop.step(whole)
        loop.stopping.step()
    return loop


@refused("a copy would follow nothing")
def a_copy_of_the_rule() -> None:
    copy.deepcopy(Loop(network(), loader_of()).stopping)


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    EXACT[name]().check()


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(heldin.HeldinError, match=message):
        function()


@pytest.mark.parametrize("groups", [[float("nan"), *range(N - 1)], torch.arange(N).view(N, 1)])
def test_groups_without_a_name(groups: Any) -> None:
    with pytest.raises(heldin.HeldinError, match="groups must be one name or number for each row"):
        Loop(network(), loader_of(), groups=groups)


class Counting(nn.Module):
    """Keeps a number among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = network(), 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += self.training
        return self.inner(rows) * (1 + 0.1 * self.calls)


@exact
def a_counter_in_the_model() -> Loop:
    return trained(Loop(Counting(), loader_of(), epochs=1))


def test_a_loss_that_remembers_its_calls_is_refused() -> None:
    calls = [0]

    def counting(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return batch_loss(model, batch) * (1 + 0.1 * calls[0])

    loop = Loop(network(), loader_of(), batch_loss=counting)
    _, batch = next(iter(loop.batches()))
    counting(loop.model, batch).backward()
    loop.step(batch)
    with pytest.raises(heldin.HeldinError, match="another gradient"):
        loop.stopping.step()


def test_labels_of_padding_may_be_written_into_the_batch() -> None:
    def padded(model: nn.Module, batch: Any) -> Tensor:
        batch["y"][batch["y"] == 2] = -100
        return batch_loss(model, batch)

    loop = Loop(network(), loader_of(), batch_loss=padded)
    for _, batch in loop.batches():
        padded(loop.model, batch).backward()
        loop.step(batch)
        loop.stopping.step()
    twin = loop.twin(0)
    found = loop.stopping.backend.weights_of(0)["0.weight"].detach()
    torch.testing.assert_close(found, twin[0].weight.detach())


def test_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(N, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(range(N), batch_size=5)  # type: ignore[arg-type]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()

    stopping: Any = runs.FoldStopping(model, optimizer, data=loader, batch_loss=loss)
    before = model[0].weight.detach().clone()  # type: ignore[operator]
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step()
    moved = (stopping.backend.weights_of(0)["0.weight"].detach() != before).any(1)
    assert torch.equal(moved, stopping.fold_of_row != 0)


class Halving(torch.optim.SGD):
    """SGD whose rate falls, by a number that it keeps as an attribute."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


def test_a_step_that_calls_another_one_is_one_step() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)  # its class has hooks from now on
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(20, 3)
    optimizer = Halving(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(x, 3 + x[:, :1]), batch_size=10)
    stopping = heldin.EarlyStopping(
        model,
        optimizer,
        data=loader,
        batch_loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        patience=None,
    )
    for _ in stopping.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    assert stopping.history.last().step == 4  # the last weights are checked at the end
    assert optimizer.taken == 4


def test_closing_after_an_error_leaves_the_loop_quietly() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stopping = heldin.EarlyStopping(
        model, optimizer, nn.MSELoss(), (torch.randn(20, 3), torch.randn(20, 1))
    )
    epochs = stopping.epochs(3)
    next(epochs)
    nn.functional.mse_loss(model(torch.randn(4, 3)), torch.zeros(4, 1))
    stopping._step = 1
    stopping.close()
    epochs.close()  # type: ignore[attr-defined]
