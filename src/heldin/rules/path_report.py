"""The report of a run whose test loss is estimated."""

from __future__ import annotations

from typing import Any

import torch

from heldin.errors import docs
from heldin.pages import Section, Table, csv_link
from heldin.pages.charts import Series, chart
from heldin.pages.predictions import Predictions, prediction_sections

__all__ = ["conclusions", "headline", "method", "sections"]

Run = Any  # a `PathStopping`, whose methods these functions are


def headline(rule: Run) -> tuple[str, str]:
    """Return the title, and the decision in words."""
    title, best = f"Test loss {rule.intervals()['loss']}", rule.run.place(rule.best_step)
    if rule.finish:
        end = rule.run.place(rule._step)
        return title, f"Kept weights: {end} (the end); lowest estimate at {best}."
    stop = f"training had not stopped after {rule._step:,} steps"
    if rule.stopped_step is not None:
        stop = f"training stopped at {rule.run.place(rule.stopped_step)}"
    return title, f"The weights are those of {best}; {stop}."


def conclusions(rule: Run) -> list[str]:
    """Return why the run ended, what was chosen and the temperature, in words."""
    reason = rule.reason.partition(": ")[2].partition("; stops by")[0]
    if rule.stopped_step is None:
        words = [f"not stopped after {rule.run.place(rule._step)}: {reason}"]
    else:
        since = f"no improvement since step {rule.history[rule._lowest()].step:,}"
        words = [f"stopped after {rule.run.place(rule.stopped_step)}: {since}, {reason}"]
    averaged = "the average of those around " if len(rule.shares) > 1 else "those of "
    if rule.finish:
        words.append(f"kept weights: step {rule._step:,} (the end)")
        words.append(f"lowest estimate at step {rule.best_step:,}")
    else:
        words.append(f"the chosen weights are {averaged}step {rule.best_step:,}")
    if rule.temperature != 1:
        words.append(f"temperature {rule.temperature:.3g}")
    elif rule.uncalibrated:
        words.append(f"no temperature, as {rule.uncalibrated}")
    return words


def method(rule: Run) -> str:
    """Return how the estimates came about, as Markdown."""
    return (
        f"The numbers with 95 % intervals are estimates for new rows by [heldin]({docs('')}): "
        f"the model was trained on all {rule._count:,} rows, and each row was evaluated on a "
        "model that was trained beside it without that row."
    )


def sections(rule: Run) -> list[Section]:
    """Return the estimates, the losses along the run, and out-of-fold predictions."""
    estimates = [
        (name, f"{interval.value:.4g}", _ends(str(interval)))
        for name, interval in rule.named_intervals().items()
    ]
    columns, best = rule.history.columns(), rule.history[rule.best_number]
    bands = [rule.loss_interval(number) for number in range(len(rule.history))]
    columns |= {"low": [i.low for i in bands], "high": [i.high for i in bands]}
    if rule.run.knows_epochs:
        columns["epoch"] = [rule.run.epoch(step) for step in columns["step"]]
    series = [
        Series("training loss", columns["step"], columns["training_loss"], "soft"),
        Series(
            "estimated test loss with its 95 % interval", columns["step"],
            columns["estimate"], "a", columns["low"], columns["high"],
        ),
    ]  # fmt: skip
    marks = [(float(rule.best_step), "lowest" if rule.finish else "chosen")]
    if rule.stopped_step is not None:
        marks.append((float(rule.stopped_step), "stopped"))
    figure = chart(
        series, "Losses over the steps", y="loss", steps=True, marks=marks, **rule.run.step_axis()
    )
    facts = [
        ("rows", f"{rule._count:,}, all of them trained on"),
        ("training loss at the chosen weights", f"{best.training_loss:.4g}"),
        ("steps", f"{rule._step:,}, with {len(rule.history)} checks"),
        *([("choice of the rule", rule.reason_chosen)] if rule.reason_chosen else []),
        *([("temperature", f"none, as {rule.uncalibrated}")] if rule.uncalibrated else []),
    ]
    header = ["to expect on new rows", "estimate", "95 % interval"]
    files = {"history.csv": csv_link(columns)}
    return [
        Section("", tables=[Table(header, estimates)]),
        Section("Losses", "", [figure], [Table([], facts)], files),
        *(prediction_sections(_predictions(rule)) if rule._keeps_outputs else []),
    ]


def _ends(interval: str) -> str:
    """Return the ends of an interval, in the digits of its text."""
    return interval.partition(" ")[2].strip("[]").replace(", ", " to ") or "none"


def _predictions(rule: Run) -> Predictions:
    """Return the out-of-fold outputs as probabilities of classes, or as numbers."""
    held, losses = rule.outcome.out_of_fold(rule.best_number), rule.row_losses()
    rows, outputs, targets = held.rows.tolist(), held.outputs.cpu(), held.targets.cpu()
    row_losses = losses.tolist() if len(losses) == len(rows) else []
    if not outputs.is_floating_point() or not bool(outputs.isfinite().all()):
        return Predictions(rows, losses=row_losses)
    outputs = outputs.double()
    single = outputs.numel() == targets.numel() == len(rows)
    if single and rule.outcome.binary and set(targets.flatten().tolist()) <= {0, 1}:
        ones = outputs.flatten().sigmoid()
        truth, probabilities = targets.flatten().tolist(), torch.stack([1 - ones, ones], 1).tolist()
        return Predictions(rows, truth, row_losses, probabilities, (), ("0", "1"))
    if single and targets.is_floating_point():
        values = outputs.flatten().tolist()
        return Predictions(rows, targets.double().flatten().tolist(), row_losses, (), values)
    whole = targets.dim() == 1 and not targets.is_floating_point()
    if whole and outputs.dim() == 2 and 0 <= targets.min() <= targets.max() < outputs.shape[1]:
        names = [str(i) for i in range(outputs.shape[1])]
        sums = outputs.sum(1)
        if bool((outputs < 0).any()) or not torch.allclose(sums, torch.ones_like(sums)):
            outputs = outputs.softmax(1)
        return Predictions(rows, targets.tolist(), row_losses, outputs.tolist(), (), names)
    return Predictions(rows, losses=row_losses)
