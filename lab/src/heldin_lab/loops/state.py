"""Loops that keep something from step to step, or do something at a few steps only."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from .job import Job, loop, mlp, plain, rows

STEP = "what a step keeps outside of the model"
INSIDE = "what the model and the optimiser keep"
RARELY = "what the loop does at a few steps"


def _mse(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return mse_loss(model(x), y)


def _weighted(weight: Callable[[], float], **others: Any) -> Job:
    """Return a job whose step multiplies the loss by what a function returns."""
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (_mse(model, batch) * weight()).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step, batch_loss=_mse, **others)


def _ramp(count: float) -> float:
    return min(1.0, count / 20)


# --- what a step keeps ------------------------------------------------------------------------


@loop(STEP, "none", train_step="exact")
def torch_generator_of_the_step() -> Job:
    """The step draws from its own torch.Generator."""
    generator = torch.Generator().manual_seed(0)
    return _weighted(lambda: 1 + 0.1 * float(torch.rand((), generator=generator)))


@loop(STEP, "none", train_step="exact")
def numpy_generator_of_the_step() -> Job:
    """The step draws from its own NumPy generator."""
    generator = np.random.default_rng(0)
    return _weighted(lambda: 1 + 0.1 * generator.random())


@loop(STEP, "none", train_step="exact")
def python_generator_of_the_step() -> Job:
    """The step draws from its own random.Random, in a nested dictionary."""
    state = {"noise": {"generators": (random.Random(0),)}}  # noqa: S311
    return _weighted(lambda: 1 + 0.1 * state["noise"]["generators"][0].random())


@loop(STEP, "none", train_step="exact")
def counter_in_an_array() -> Job:
    """The step counts in a NumPy array."""
    count = np.zeros(1)

    def weight() -> float:
        count[0] += 1
        return _ramp(float(count[0]))

    return _weighted(weight)


@loop(STEP, "none", train_step="exact")
def counter_in_a_default() -> Job:
    """The step counts in a default argument."""

    def weight(state: dict[str, int] = {"n": 0}) -> float:  # noqa: B006
        state["n"] += 1
        return _ramp(state["n"])

    return _weighted(weight)


@loop(STEP, "none", train_step="exact")
def counter_of_a_function() -> Job:
    """The step counts in an attribute of a function."""

    def weight() -> float:
        weight.calls += 1  # type: ignore[attr-defined]
        return _ramp(weight.calls)  # type: ignore[attr-defined]

    weight.calls = 0  # type: ignore[attr-defined]
    return _weighted(weight)


@loop(STEP, "none", train_step="exact")
def counter_in_a_partial() -> Job:
    """The step is a functools.partial with a dictionary."""

    def weight(state: dict[str, int]) -> float:
        state["n"] += 1
        return _ramp(state["n"])

    return _weighted(functools.partial(weight, {"n": 0}))


class _Ramp:
    """A callable object that counts, in a slot and in its class."""

    __slots__ = ("calls",)
    total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.calls = _Ramp.total = 0

    def __call__(self) -> float:
        self.calls += 1
        _Ramp.total += 1
        return _ramp(self.calls + _Ramp.total)


@loop(STEP, "none", train_step="exact")
def counter_in_a_slot_and_a_class() -> Job:
    """The step counts in a slot of an object and in an attribute of its class."""
    return _weighted(_Ramp())


@loop(STEP, "none", train_step="exact")
def counter_deep_inside() -> Job:
    """The step counts in a dictionary of a dictionary of a dictionary of a list."""
    state = [{"a": {"b": {"c": {"n": 0}}}}]

    def weight() -> float:
        inner = state[0]["a"]["b"]["c"]
        inner["n"] += 1
        return _ramp(inner["n"])

    return _weighted(weight)


class _Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return mse_loss(outputs, targets) * _ramp(self.calls)


@loop(STEP, "none", train_step="exact")
def counter_of_the_criterion() -> Job:
    """The criterion of the step is a module that counts its calls."""
    model, criterion = mlp(), _Criterion()
    optimizer = SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        criterion(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step, batch_loss=_mse)


@loop(STEP, "none", train_step="refused")
def iterator_of_a_second_loader() -> Job:
    """The step draws an unlabelled batch, next(iterator) (FixMatch)."""
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(4000, 6, generator=generator))
    unlabelled = iter(DataLoader(data, 8, shuffle=True, generator=generator))
    model = mlp()
    optimizer = SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        (x,) = next(unlabelled)
        (_mse(model, batch) + (model(x) - model(x.flip(1))).square().mean()).backward()
        optimizer.step()

    return plain(model, optimizer=optimizer, step=step, batch_loss=_mse)


@loop(STEP, "none", train_step="refused")
def ramp_of_a_generator_function() -> Job:
    """The step takes the next value of a generator function."""

    def values() -> Iterator[float]:
        for count in itertools.count(1):
            yield _ramp(count)

    ramp = values()
    return _weighted(lambda: next(ramp))


class _Hidden(Dataset[Any]):
    """Noise that depends on how often it was read."""

    def __init__(self) -> None:
        self.reads = 0

    def __getitem__(self, row: int) -> float:
        self.reads += 1
        return 1 + 0.1 * (self.reads % 5 == 0)


@loop(STEP, "none", train_step="refused")
def counter_that_cannot_be_found() -> Job:
    """The step reads an object that heldin leaves alone, and that counts to five."""
    hidden = _Hidden()
    return _weighted(lambda: hidden[0])


# --- what the model and the optimiser keep ----------------------------------------------------


class _Lookahead(Optimizer):
    """Gradient descent with slow weights in a list of lists (Lookahead)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.calls = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, q in zip(group["params"], slow, strict=True):
                p.add_(p.grad, alpha=-group["lr"])
                if self.calls % 3 == 0:
                    q.add_(0.5 * (p - q))
                    p.copy_(q)


class _Decaying(Optimizer):
    """Gradient descent with state under a text and momentum in one large tensor."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.005})
        self.state["global"]["calls"] = 0  # type: ignore[index]
        self.flat = torch.zeros(sum(p.numel() for p in self.param_groups[0]["params"]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state, start = self.state["global"], 0  # type: ignore[index]
        state["calls"] += 1
        group = self.param_groups[0]
        self.flat.mul_(0.9).add_(torch.cat([p.grad.flatten() for p in group["params"]]))
        for p in group["params"]:
            part = self.flat[start : start + p.numel()].view_as(p)
            p.add_(part, alpha=-group["lr"] / state["calls"] ** 0.5)
            start += p.numel()


@loop(INSIDE)
def slow_weights_in_lists() -> Job:
    """An optimiser that keeps slow weights in lists (Lookahead)."""
    model = mlp()
    return plain(model, optimizer=_Lookahead(model.parameters()), batch_loss=_mse)


@loop(INSIDE)
def optimiser_with_global_state() -> Job:
    """An optimiser with state under a text, and 5,601 numbers of momentum in one attribute."""
    model = mlp(hidden=700)
    return plain(model, optimizer=_Decaying(model.parameters()), batch_loss=_mse)


class _Settings:
    def __init__(self) -> None:
        self.count, self.noise = 0, np.random.default_rng(0)


class _Nested(nn.Module):
    """A network with a queue, counters and a generator inside of its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.settings = mlp(), _Settings()
        self.queue, self.counts = {"all": {"rows": torch.zeros(2048, 6)}}, [[0]]

    def forward(self, x: Tensor) -> Tensor:
        queue = self.queue["all"]["rows"]
        shift = queue.mean(0) * 50
        if self.training:
            queue[: -len(x)] = queue[len(x) :].clone()
            queue[-len(x) :] = x
            self.settings.count += 1
            self.counts[0][0] += 1
            shift = shift + 0.1 * float(self.settings.noise.normal())
        factor = 1 + 0.01 * self.settings.count + 0.01 * self.counts[0][0]
        outputs: Tensor = self.net(x - shift) * factor
        return outputs


@loop(INSIDE)
def nested_attributes() -> Job:
    """A queue, counters and a generator in dictionaries and objects of the model."""
    model = _Nested()
    return plain(model, optimizer=SGD(model.parameters(), 0.02), batch_loss=_mse)


class _Scaled(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x) * self.scale
        return outputs


@loop(INSIDE)
def buffer_annealed() -> Job:
    """The loop sets a buffer of the model in every epoch."""
    model = _Scaled()

    def begin(epoch: int) -> None:
        if epoch % 2:
            model.scale.fill_(1 - epoch / 10)
        else:
            model.scale = torch.tensor(1 - epoch / 10)

    optimizer = SGD(model.parameters(), 0.05)
    return plain(model, optimizer=optimizer, batch_loss=_mse, epochs=6, begin_epoch=begin)


def _normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


@loop(INSIDE)
def statistics_reset() -> Job:
    """The loop resets BatchNorm's statistics in every epoch."""
    model = _normalised()
    norm: Any = model[1]

    def begin(epoch: int) -> None:
        norm.reset_running_stats()

    optimizer = SGD(model.parameters(), 0.05)
    return plain(model, optimizer=optimizer, batch_loss=_mse, begin_epoch=begin)


@loop(INSIDE, "refused")
def statistics_computed_anew() -> Job:
    """The loop computes BatchNorm's statistics anew, from all rows, after every epoch."""
    model = _normalised()
    data = DataLoader(TensorDataset(*rows()), 12)
    optimizer = SGD(model.parameters(), 0.05)
    return plain(
        model, optimizer=optimizer, batch_loss=_mse, end_epoch=lambda: update_bn(data, model)
    )


@loop(INSIDE, "refused")
def teacher_outside_of_the_model() -> Job:
    """batch_loss calls a teacher that follows the model once in an epoch."""
    model, teacher = mlp(), mlp()
    teacher.load_state_dict(model.state_dict())

    def batch_loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        loss = mse_loss(outputs, batch[1])
        return loss + mse_loss(outputs, teacher(batch[0]).detach()) if model.training else loss

    def follow() -> None:
        teacher.load_state_dict(model.state_dict())

    optimizer = SGD(model.parameters(), 0.1)
    return plain(model, optimizer=optimizer, batch_loss=batch_loss, end_epoch=follow)


class _Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([mlp(), mlp()])

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        outputs: Tensor = self.heads[int(task[0])](x)
        return outputs


def _task_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y, task = batch
    return mse_loss(model(x, task), y)


@loop(INSIDE)
def heads_that_take_turns() -> Job:
    """Every batch is of one task, and zero_grad(set_to_none=False) leaves zeros for the other."""
    task = torch.arange(48) % 2
    batches = [list(range(i % 2, 48, 2))[i // 2 * 6 : i // 2 * 6 + 6] for i in range(8)]
    loader = DataLoader(TensorDataset(*rows(), task), batch_sampler=batches)
    model = _Tasks()
    optimizer = AdamW(model.parameters(), 0.01, weight_decay=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        _task_loss(model, batch).backward()
        optimizer.step()

    return plain(model, loader, _task_loss, optimizer=optimizer, step=step, compares="weights")


# --- what the loop does at a few steps --------------------------------------------------------


def _at_times(
    optimizer: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, 0.1),
    *,
    loss: Callable[[nn.Module, Any, int], Tensor] = lambda model, batch, step: _mse(model, batch),
    before_step: Callable[[nn.Module, Any, int], None] = lambda model, batch, step: None,
    after_step: Callable[[nn.Module, Any, int], None] = lambda model, optimizer, step: None,
    with_loss_fn: bool = False,
) -> Job:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimiser, number = optimizer(model.parameters()), 0

    def step(batch: Any) -> None:
        nonlocal number
        number += 1
        optimiser.zero_grad()
        loss(model, batch, number).backward()
        before_step(model, batch, number)
        optimiser.step()
        after_step(model, optimiser, number)

    kind: dict[str, Any] = {"loss_fn": nn.MSELoss()} if with_loss_fn else {"batch_loss": _mse}
    return plain(model, optimizer=optimiser, step=step, epochs=5, **kind)


@loop(RARELY, "refused", train_step="exact")
def penalty_at_every_fifth_step() -> Job:
    """A penalty at every fifth step."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return _mse(model, batch) + 0.1 * penalty * (step % 5 == 0)

    return _at_times(loss=loss)


@loop(RARELY, "refused")
def wrong_labels_at_every_fifth_step() -> Job:
    """The loop turns the signs of the targets at every fifth step, with loss_fn."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        x, y = batch
        return _mse(model, (x, -y if step % 5 == 0 else y))

    return _at_times(loss=loss, with_loss_fn=True)


@loop(RARELY, "refused", train_step="exact")
def another_loss_later() -> Job:
    """Another loss from step 9 on."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        return _mse(model, batch) if step < 9 else l1_loss(model(batch[0]), batch[1])

    return _at_times(loss=loss)


@loop(RARELY, "refused", train_step="exact")
def second_backward_at_step_11() -> Job:
    """A second loss with its own backward pass, once, at a step that nobody would check."""

    def again(model: nn.Module, batch: Any, step: int) -> None:
        if step == 11:
            (model(batch[0] + 0.3) - model(batch[0])).square().mean().backward()

    return _at_times(before_step=again)


@loop(RARELY, "refused", train_step="exact")
def mixed_inputs_at_step_11() -> Job:
    """The loop mixes the inputs of one batch, at a step that nobody would check."""

    def loss(model: nn.Module, batch: Any, step: int) -> Tensor:
        x, y = batch
        return _mse(model, (0.5 * x + 0.5 * x.flip(0) if step == 11 else x, y))

    return _at_times(loss=loss)


@loop(RARELY, "refused", train_step="exact")
def gradient_data_at_step_11() -> Job:
    """The loop scales p.grad.data, once, at a step that nobody would check."""

    def scale(model: nn.Module, batch: Any, step: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.data.mul_(0.1 if step == 11 else 1.0)

    return _at_times(before_step=scale)


@loop(RARELY, "refused")
def moments_set_to_zero() -> Job:
    """The loop sets Adam's moments to zero in place after step 5."""

    def clear(model: nn.Module, optimizer: Any, step: int) -> None:
        for entries in optimizer.state.values() if step == 5 else ():
            entries["exp_avg"].zero_()
            entries["exp_avg_sq"].zero_()

    return _at_times(lambda parameters: Adam(parameters, 0.02), after_step=clear)


@loop(RARELY, "refused")
def state_of_the_last_layer_removed() -> Job:
    """The loop removes the optimiser's state of the last layer after step 5, with loss_fn."""

    def remove(model: Any, optimizer: Any, step: int) -> None:
        if step == 5:
            optimizer.state.pop(model[4].weight)

    return _at_times(lambda p: Adam(p, 0.02), after_step=remove, with_loss_fn=True)


@loop(RARELY, "refused")
def signs_turned_by_data() -> Job:
    """The loop turns the signs of weights through .data after step 5."""

    def turn(model: Any, optimizer: Any, step: int) -> None:
        if step == 5:
            model[0].weight.data.neg_()

    return _at_times(after_step=turn)


@loop(RARELY, "refused")
def pruned_by_data() -> Job:
    """The loop prunes a model of 1.2 million weights through .data after step 5."""
    layers = [nn.Linear(6, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 1)]
    model: Any = nn.Sequential(*layers)
    optimizer, number = SGD(model.parameters(), 0.01), 0

    def step(batch: Any) -> None:
        nonlocal number
        number += 1
        optimizer.zero_grad()
        _mse(model, batch).backward()
        optimizer.step()
        if number == 5:
            model[2].weight.data *= torch.arange(1100) % 2

    return plain(model, optimizer=optimizer, step=step, batch_loss=_mse)


# --- generators that reading draws from -------------------------------------------------------


class _Noisy(Dataset[Any]):
    """Rows with a transform, and an object that cannot be copied."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        self.tensors, self.transform, self.lock = rows(), transform, threading.Lock()
        self.noise = np.random.default_rng(1)

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        with self.lock:
            x = self.tensors[0][row] + 0.1 * float(self.noise.normal())
        return self.transform(x), self.tensors[1][row]


@loop(STEP)
def generators_of_transform_and_collation() -> Job:
    """A transform and a collate function draw from generators of their closures."""
    one, two = np.random.default_rng(0), torch.Generator().manual_seed(0)

    def collate(items: list[Any]) -> Any:
        x, y = default_collate(items)
        return x + 0.1 * torch.randn(x.shape, generator=two), y

    data = _Noisy(lambda x: x + 0.1 * float(one.normal()))
    loader = DataLoader(data, 12, shuffle=True, collate_fn=collate)
    return plain(mlp(), loader, _mse, compares="weights")
