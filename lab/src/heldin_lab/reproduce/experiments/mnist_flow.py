"""The perceptron on MNIST along gradient flow, where gradient descent would take days."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heldin import observe
from heldin_lab.reproduce.flow import Sharpness, advance, ends, stages_for
from heldin_lab.reproduce.ledger import Ledger, criteria, first_above, smooth
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.training import backward, chunks, mean_loss

from .mnist import digits, net

__all__ = ["follow"]

ROUNDS = 2  # of power iteration for the sharpness, at each record


def follow(run: Run, rate: float, method: str) -> None:
    """Train with or without a validation set, and record where stretches of the flow end.

    Steps are those that gradient descent of this rate would have made. Gradients are in float32, as
    bfloat16 moves f where it is small.

    Args:
        run: the run; `piece` images are worked on at a time, and the sharpness is that of the
            first piece.
        rate: of the gradient descent.
        method: "validation" or "evidence".
    """
    s = run.settings
    data = digits(run, held_out=method == "validation")
    model = net(run)
    weights = list(model.parameters())
    pieces = list(chunks(data.rows, s.piece))

    def gradient() -> list[Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            backward(model, data.train, pieces)
        return [w.grad for w in weights if w.grad is not None]

    images, labels = data.train(pieces[0])
    sharpness = Sharpness()
    ledger = Ledger({name: p.numel() for name, p in model.named_parameters()})
    records = ends(s.length(rate))
    before = dict(zip(records[1:], records, strict=False))  # where each stretch begins
    for step in run.steps(records[-1], model=model, sharpness=sharpness, ledger=ledger):
        if step not in before and step != 1:
            continue  # inside of a stretch
        curved = sharpness.at(
            weights, lambda: F.cross_entropy(model(images), labels), rounds=ROUNDS
        )
        if step != 1:
            stretch = rate * (step - before[step])
            advance(weights, gradient, stretch, stages_for(stretch, curved))
        run.note(
            step,
            test_loss=mean_loss(model, data.test, s.test, s.piece),
            sharpness=curved,
        )
        if method == "validation":
            run.note(step, validation_loss=mean_loss(model, data.validation, s.validation, s.piece))
        else:
            with observe(model) as seen:
                gradient()
                ledger.add(step, seen)
    if method == "validation":
        run.mark(int(min(run.rows, key=lambda row: row["validation_loss"])["step"]), "stop")
    else:
        _stop(run, ledger.arrays())


def _stop(run: Run, arrays: dict[str, Any]) -> None:
    """Note the criterion under our reading, and its stop."""
    run.arrays = arrays
    raw = criteria(arrays, "out")
    smoothed = smooth(raw, run.settings.smoothing, 0.0, arrays["steps"])
    for row, value, average in zip(run.rows, raw, smoothed, strict=True):
        row.update(criterion=float(average), raw=float(value))
    stop = float(first_above(smoothed, arrays["steps"]))
    run.mark(None if math.isnan(stop) else int(stop), "stop")
