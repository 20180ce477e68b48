"""The paper's perceptron on MNIST: what four experiments share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce.averages import Averages
from heldin_lab.reproduce.experiment import Tables
from heldin_lab.reproduce.ledger import Log
from heldin_lab.reproduce.readings import Choice, Value
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at
from heldin_lab.reproduce.training import Rows, backward, batch, chunks, mean_loss, perceptron
from heldin_lab.rules import Evidence, EvidenceStopping, ValidationStopping

__all__ = [
    "FULL_NET",
    "INITIAL",
    "PIXELS",
    "QUICK_NET",
    "Digits",
    "Settings",
    "against",
    "digits",
    "net",
    "train",
]

FULL_NET = (784, 2500, 2000, 1500, 1000, 500, 10)
QUICK_NET = (784, 250, 200, 150, 100, 50, 10)
PIXELS = Choice(
    "pixels",
    "How pixels are scaled.",
    (
        Value("0 to 1", "divided by 255, the most common", "unit"),
        Value("standard", "mean 0 and variance 1 over all pixels, as common", "standard"),
    ),
    replayed=False,
)
INITIAL = Choice(
    "initial weights",
    "How weights are initialised.",
    (
        Value("He", "normal, variance 2 / inputs: made for ReLUs", "he"),
        Value("Glorot", "uniform, variance 2 / (inputs + outputs): TensorFlow's default", "glorot"),
    ),
    replayed=False,
)


@dataclass(frozen=True)
class Settings:
    """Of the net, the split of MNIST's 60,000 images, and the training."""

    seeds: int = 3
    steps: int = 1500
    every: int = 25  # steps between records
    widths: tuple[int, ...] = QUICK_NET
    training: int = 2000
    validation: int = 500  # added to the training images where none are held out
    test: int = 2000
    rates: tuple[float, ...] = (0.03, 0.05, 0.1)
    batch: int | None = 128  # None: all images, accumulated in pieces
    piece: int = 2500  # images worked on at a time
    smoothing: float = 0.9
    travel: float | None = None  # rate times steps, where that decides how long a rate is run
    budget: int | None = None  # coordinates of each tensor looked at in a step; None: all
    pixels: str = "unit"  # 0 to 1; or "standard": mean 0 and variance 1 over all pixels
    init: str = "he"

    def length(self, rate: float) -> int:
        """The number of steps at a rate."""
        return self.steps if self.travel is None else round(self.travel / rate)


@dataclass(frozen=True)
class Digits:
    """Images and labels on the device, for training, validation and test."""

    train: Rows
    validation: Rows
    test: Rows
    rows: int  # for training


def digits(run: Run, held_out: bool) -> Digits:
    """The split of a seed. Without images held out, those of the validation set are trained on."""
    s = run.settings
    x, y = _data.mnist(run.data)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(run.seed))
    test, train, validation = order[: s.test + s.training + s.validation].split(
        [s.test, s.training, s.validation]
    )
    if not held_out:
        train = torch.cat([train, validation])

    mean, std = 0.0, 1.0
    if s.pixels == "standard":
        shown = x[train].float() / 255
        mean, std = float(shown.mean()), float(shown.std())

    def rows(chosen: Tensor) -> Rows:
        images = x[chosen].float().div_(255).sub_(mean).div_(std).to(run.device)
        labels = y[chosen].to(run.device)
        return lambda places: (images[places], labels[places])

    return Digits(rows(train), rows(validation), rows(test), len(train))


def net(run: Run) -> nn.Sequential:
    """The perceptron of a seed."""
    s = run.settings
    return perceptron(s.widths, run.seed, init=s.init).to(run.device)


def train(run: Run, rate: float, method: str) -> None:
    """Train with or without a validation set, the rule watching to the end."""
    s = run.settings
    data = digits(run, held_out=method == "validation")
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    steps = s.length(rate)
    log: Log | None = None
    rule: EvidenceStopping | ValidationStopping
    if method == "validation":
        rule = ValidationStopping(
            model,
            lambda: mean_loss(model, data.validation, s.validation, s.piece),
            patience=steps,
            every=s.every,
            restore_best=False,
            history=2,
        )
    else:
        # what the log has seen is given to the rule, which needs not look again
        paper = Evidence.paper(smoothing=s.smoothing, check_every=2 * steps)
        rule = EvidenceStopping(model, paper)
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        log = Log(model, s.budget, Averages(sizes, s.every) if s.batch else None)
    everything: dict[str, Any] = {"model": model, "optimizer": optimizer, "rule": rule}
    if log is not None:
        everything["log"] = log
    with rule:
        for step in run.steps(steps, **everything):
            if log is not None:
                log.before(step)
            if s.batch is None:
                pieces = list(chunks(data.rows, s.piece))
            else:
                pieces = [batch(step, data.rows, s.batch, run.seed)]
            backward(model, data.train, pieces)
            if log is not None and isinstance(rule, EvidenceStopping):
                rule.take(log.after(step))
            else:
                rule.step()
            if step == 1 or step % s.every == 0 or rule.stopped_step == step:
                run.note(step, test_loss=mean_loss(model, data.test, s.test, s.piece))
                if isinstance(rule, EvidenceStopping):
                    run.note(step, criterion=rule.criterion, raw=rule.evidence.criterion)
                elif step % s.every == 0:
                    run.note(step, validation_loss=rule.last_loss)
            optimizer.step()
            optimizer.zero_grad()
        found = rule.stopped_step if isinstance(rule, EvidenceStopping) else rule.best_step
        run.mark(found, "stop")
    if log is not None:
        run.arrays = log.arrays()
        log.close()


def against(held: str, own: str) -> Any:
    """Test loss at evidence's stop over that at validation's, from the parts of these names."""

    def value(tables: Tables) -> float:
        return at(tables[own], "test_loss") / at(tables[held], "test_loss")

    return value
