"""The paper's perceptron on MNIST: what four experiments share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heldin import EvidenceStopping, ValidationStopping
from heldin.lab.reproduce import data as _data
from heldin.lab.reproduce.experiment import Tables
from heldin.lab.reproduce.run import Run
from heldin.lab.reproduce.tables import at
from heldin.lab.reproduce.training import Rows, batch, chunks, mean_loss, perceptron

__all__ = ["FULL_NET", "QUICK_NET", "Digits", "Settings", "against", "digits", "net", "train"]

FULL_NET = (784, 2500, 2000, 1500, 1000, 500, 10)
QUICK_NET = (784, 250, 200, 150, 100, 50, 10)


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

    def rows(chosen: Tensor) -> Rows:
        images = (x[chosen].float() / 255).to(run.device)
        labels = y[chosen].to(run.device)
        return lambda places: (images[places], labels[places])

    return Digits(rows(train), rows(validation), rows(test), len(train))


def net(run: Run) -> nn.Sequential:
    """The perceptron of a seed."""
    return perceptron(run.settings.widths, run.seed).to(run.device)


def train(run: Run, rate: float, method: str) -> None:
    """Train with or without a validation set, the rule watching to the end."""
    s = run.settings
    data = digits(run, held_out=method == "validation")
    model = net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    rule: EvidenceStopping | ValidationStopping
    if method == "validation":
        rule = ValidationStopping(
            model,
            lambda: mean_loss(model, data.validation, s.validation, s.piece),
            patience=s.steps,
            every=s.every,
            restore_best=False,
            history=2,
        )
    else:
        rule = EvidenceStopping.paper(model, smoothing=s.smoothing)
    with rule:
        for step in run.steps(s.steps, model=model, optimizer=optimizer, rule=rule):
            if s.batch is None:
                pieces = list(chunks(data.rows, s.piece))
            else:
                pieces = [batch(step, data.rows, s.batch, run.seed)]
            samples = sum(map(len, pieces))
            for piece in pieces:
                x, y = data.train(piece)
                (F.cross_entropy(model(x), y, reduction="sum") / samples).backward()
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


def against(held: str, own: str) -> Any:
    """Test loss at evidence's stop over that at validation's, from the parts of these names."""

    def value(tables: Tables) -> float:
        return at(tables[own], "test_loss") / at(tables[held], "test_loss")

    return value
