"""A training loop as its author would write it, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["LOOPS", "Job", "Loop", "Randperm", "class_rows", "loop", "mlp", "plain", "rows"]


@dataclass
class Job:
    """The objects of one run, freshly built.

    Attributes:
        model, optimizer, loader: of the run.
        step: what the loop does with a batch.
        arguments: of `heldin.EarlyStopping`, besides model, optimiser and data.
        state: further objects that a step changes, for `train_step=`.
        uses_train_step: whether the loop calls `stopping.train(batch)`.
        before: called before the stopping object is made.
        after_making: called right after it is made (or would be).
        begin_epoch: called with the number of the epoch.
        end_epoch: called after the last batch of an epoch.
        epochs: number of epochs.
        evaluates: "rows": the loss of each row alone; "blocks": of batches of the loop's size.
        compares: "losses" of the held-out rows, or "weights" where those rows are read at random.
        skips: whether the loop skips the step of some batches.
        follows_rates: whether learning rates depend on the training loss of the model; those of
            a shadow are the model's.
        undrawn: rows that the sampler never draws.
        bad: rows that no estimate can use.
        data: in place of the loader, as argument of `EarlyStopping`.
        independent: whether rows are independent, so that holding some of them out means something.
        coin_flips: whether targets are coin flips, so that no honest estimate is below 0.693.
    """

    model: nn.Module
    optimizer: Optimizer
    loader: Any
    step: Callable[[Any], Any]
    arguments: dict[str, Any]
    state: Sequence[Any] = ()
    uses_train_step: bool = False
    before: Callable[[], None] = lambda: None
    after_making: Callable[[], None] = lambda: None
    begin_epoch: Callable[[int], None] = lambda epoch: None
    end_epoch: Callable[[], None] = lambda: None
    epochs: int = 3
    evaluates: str = "rows"
    compares: str = "losses"
    skips: bool = False
    follows_rates: bool = False
    undrawn: Sequence[int] = ()
    bad: Sequence[int] = ()
    data: Any = None
    independent: bool = True
    coin_flips: bool = False

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """The collate function of the loader."""
        function: Callable[[list[Any]], Any] = self.loader.collate_fn
        return function

    def batch_loss(self, batch: Any) -> Tensor:
        """Return the loss to estimate."""
        function = self.arguments.get("eval_loss") or self.arguments.get("batch_loss")
        if function is not None:
            loss: Tensor = function(self.model, batch)
            return loss
        *inputs, targets = batch
        value: Tensor = self.arguments["loss_fn"](self.model(*inputs), targets)
        return value


@dataclass(frozen=True)
class Loop:
    """An entry of the registry.

    Attributes:
        name: of the loop.
        kind: the part of a training loop that it is about.
        make: builds everything anew.
        expects: verdicts that are right for it.
        uses_train_step: whether it passes its step as `train_step`.
    """

    name: str
    kind: str
    make: Callable[[], Job]
    expects: tuple[str, ...]
    uses_train_step: bool = False

    @property
    def what(self) -> str:
        """What the loop tests: the docstring of the function that builds it."""
        return (self.make.__doc__ or "").strip()

    def build(self) -> Job:
        """Return a freshly built job."""
        job = self.make()
        job.uses_train_step = self.uses_train_step
        return job


LOOPS: dict[str, Loop] = {}
Build = Callable[[], Job]


def loop(
    kind: str, *expects: str, train_step: str | tuple[str, ...] | None = None
) -> Callable[[Build], Build]:
    """Register a loop under the name of its function.

    Args:
        kind: the part of a training loop that it is about.
        expects: verdicts that are right for it (default: "exact"); "none" registers no plain use.
        train_step: verdicts that are right if the same loop passes its step as `train_step`.
    """

    def register(make: Build) -> Build:
        name = make.__name__.strip("_").replace("_", "-")
        if expects != ("none",):
            LOOPS[name] = Loop(name, kind, make, expects or ("exact",))
        if train_step is not None:
            verdicts = (train_step,) if isinstance(train_step, str) else train_step
            other = f"{name}+train_step"
            LOOPS[other] = Loop(other, kind, make, verdicts, uses_train_step=True)
        return make

    return register


# --- small problems ---------------------------------------------------------------------------


def rows(n: int = 48, features: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a regression."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator)
    y = x[:, :1] - 0.5 * x[:, 1:2] + 0.5 * torch.randn(n, 1, generator=generator)
    return x, y


def class_rows(n: int = 48, features: int = 6, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Return inputs and classes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, features, generator=generator)
    noise = torch.randn(n, classes, generator=generator)
    return x, (x[:, :classes] + noise).argmax(1)


def mlp(inputs: int = 6, outputs: int = 1, hidden: int = 8) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Randperm:
    """Batches by `torch.randperm`, as loops without a DataLoader draw them."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int) -> None:
        self.dataset, self.batch_size = TensorDataset(x, y), batch_size
        self.handed_out: list[list[int]] = []

    def collate_fn(self, items: list[Any]) -> tuple[Tensor, Tensor]:
        """Collate rows."""
        x, y = zip(*items, strict=True)
        return torch.stack(x), torch.stack(y)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def __iter__(self) -> Any:
        x, y = self.dataset.tensors
        order = torch.randperm(len(x))
        for index in order.split(self.batch_size):
            self.handed_out.append(index.tolist())
            yield x[index], y[index]


def plain(
    model: nn.Module,
    loader: Any = None,
    batch_loss: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    loss_fn: Any = None,
    optimizer: Optimizer | None = None,
    step: Callable[[Any], Any] | None = None,
    **others: Any,
) -> Job:
    """Return a job whose step is the plain one, unless `step` is given.

    Args:
        model: the model.
        loader: by default, shuffled batches of 12 rows of a regression.
        batch_loss, loss_fn: the loss; by default the squared error by `batch_loss`.
        optimizer: by default, SGD with momentum.
        step: what the loop does with a batch.
        others: further fields of the job; `arguments` are added to those of the loss.
    """
    if loader is None:
        loader = DataLoader(TensorDataset(*rows()), batch_size=12, shuffle=True)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if loss_fn is None and batch_loss is None:

        def batch_loss(model: nn.Module, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(model(x), y)

    arguments = {"loss_fn": loss_fn, "batch_loss": batch_loss}
    arguments = {name: value for name, value in arguments.items() if value is not None}

    def usual(batch: Any) -> None:
        optimizer.zero_grad()
        if batch_loss is not None:
            loss = batch_loss(model, batch)
        else:
            *inputs, targets = batch
            loss = loss_fn(model(*inputs), targets)
        loss.backward()
        optimizer.step()

    arguments |= others.pop("arguments", {})
    return Job(model, optimizer, loader, step or usual, arguments, **others)
