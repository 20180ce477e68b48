"""Every rule of the study, replayed on a logged run.

All constants of all rules are in this file or in the defaults of the classes that it names. They
were chosen on the development datasets or taken from the rules' sources.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from heldin.criterion.average import Average, weight
from heldin_lab.rules import Patience, best_check, bootstrap_shares, mean_and_error

from .logged import Choice, LoggedRun, Outcome
from .rivals import (
    Stop,
    best_alignment,
    disparity_consecutive,
    disparity_total,
    generalisation_loss,
    label_wave,
    patience,
    progress_quotient,
)
from .run import FOLDS

__all__ = ["NETWORK_RULES", "RULES", "replay"]

# The study replays the patience in steps, without the rise that is beyond doubt.
FOLD_PATIENCE, LOO_PATIENCE = Patience(2.0, 200, 3), Patience(2.0, 200, 5)  # of the stored studies
RESAMPLES = 100  # of rows, for bagged weights
VALIDATION_PATIENCE = 20  # epochs without a lower validation loss
ARMING = 0.5  # of EvidenceStopping
GL_ALPHA, PQ_ALPHA, PQ_STRIP = 5.0, 0.75, 5  # Prechelt's middle values


# -- ours, on curves of held-out losses


def _ended(steps: Sequence[int], means: torch.Tensor, rule: Patience | None) -> int:
    """Number of checks that were seen when patience ended the run."""
    if rule is not None:
        for seen in range(1, len(steps) + 1):
            best = best_check(means[:seen])
            if rule.is_exhausted(steps[seen - 1], steps[best], seen - 1 - best):
                return seen
    return len(steps)


def _curve(
    run: LoggedRun,
    steps: Any,
    curves: Any,
    rule: Patience | None,
    bagged: bool,
    models: int,
    parts: Sequence[str],
    trained: float,
) -> Choice:
    steps, values = [int(s) for s in steps], torch.tensor(curves)
    means = values.mean(0)
    seen = _ended(steps, means, rule)
    best = best_check(means[:seen])
    shares = {steps[best]: 1.0}
    if bagged:
        found = bootstrap_shares(
            values[:, :seen], RESAMPLES, held_per_trained=len(values) / trained
        )
        shares = {s: v for s, v in zip(steps, found.tolist(), strict=False) if v > 0}
    end = steps[seen - 1]
    fired = end < run.last if rule is not None else steps[best] < run.last
    return Choice(
        shares,
        models * end,
        fired,
        estimate=mean_and_error(
            values[:, best],
            len(values) / trained,
            1 - trained / run.spec.n,
            float(np.interp(steps[best], run["fold_steps"], run["training_loss"])),
        ),
        parts=parts,
        progress=end / run.last,
    )


def folds(
    run: LoggedRun, rule: Patience | None = None, bagged: bool = False, shadows: int = FOLDS
) -> Choice:
    """All five, or the first so many of them."""
    curves = run["fold_curves"][run["fold_label"] < shadows]
    trained = run.spec.n * (1 - 1 / FOLDS)
    steps = run["fold_steps"]
    return _curve(run, steps, curves, rule, bagged, shadows + 1, ("folds",), trained)


def shadow(run: LoggedRun, rule: Patience | None = None, bagged: bool = False) -> Choice:
    """A shadow without 20 % of the rows is the first of five folds.

    It is replayed at the checks of the five. A live shadow evaluates fewer rows, and may check more
    often where checks would take more than their share of a run.
    """
    return folds(run, rule, bagged, shadows=1)


def auto(run: LoggedRun) -> Choice:
    """`runs.stopping("auto", ...)`; of networks with `batch_loss`, as for any model and batch."""
    chosen, shadows = run.chosen()
    if chosen == "leave-one-out":
        return leave_one_out(run, LOO_PATIENCE, True)
    return folds(run, FOLD_PATIENCE, True, shadows)


def leave_one_out(
    run: LoggedRun, rule: Patience | None = None, bagged: bool = False, part: str = "loo"
) -> Choice:
    """All rows are left out in turn, or 64 of them."""
    steps, curves = run["loo_steps"], run[f"{part}_curves"]
    return _curve(run, steps, curves, rule, bagged, 1, (part,), run.spec.n - 1)


def committee(run: LoggedRun) -> Choice:
    chosen = folds(run)
    return Choice(chosen.shares, chosen.spent, True, committee=True, parts=("folds",))


# -- evidence


def first_above_zero(
    values: Sequence[float],
    count: int,
    smoothing: float,
    arming: float | None,
    start: float | None = None,
) -> int | None:
    """Where `EvidenceStopping` stops on raw criteria of equal batches; None: nowhere."""
    average, recent = Average(smoothing, start), Average(0.9, 0.0)
    armed = arming is None
    for i, value in enumerate(values):
        if math.isnan(value):
            continue
        average.add(value, 1.0 if start is not None else weight(count, None))
        recent.add(value)
        if arming is not None and abs(recent.value) > arming:
            armed = True
        if armed and average.value > 0:
            return i
    return None


def _evidence(run: LoggedRun, values: Any, every: int, count: int, **options: Any) -> Choice:
    found = first_above_zero(list(values), count, **options)
    # the rule looks before the optimiser's step, and keeps the weights that it saw
    step = run.last if found is None else (found + 1) * every - 1
    return Choice(
        {step: 1.0}, step, found is not None, parts=("evidence",), progress=step / run.last
    )


def evidence_paper(run: LoggedRun) -> Choice:
    """`EvidenceStopping.paper(model)`."""
    return _evidence(run, run["evidence"], 1, run.spec.batch, smoothing=0.9, arming=None, start=0.0)


def evidence_robust(run: LoggedRun) -> Choice:
    """`EvidenceStopping(model, across="mean")`."""
    return _evidence(run, run["evidence"], 1, run.spec.batch, smoothing=0.9, arming=ARMING)


def evidence_epoch(run: LoggedRun) -> Choice:
    """`EvidenceStopping(model, window=steps of an epoch, smoothing=0.8, across="mean")`."""
    window = int(run["window"])
    return _evidence(
        run, run["epoch_evidence"], window, window * run.spec.batch, smoothing=0.8, arming=ARMING
    )


def evidence_median(run: LoggedRun) -> Choice:
    """`EvidenceStopping(model)`: the median over tensors."""
    values = medians(run["evidence_tensors"])
    return _evidence(run, values, 1, run.spec.batch, smoothing=0.9, arming=ARMING)


def evidence_epoch_median(run: LoggedRun) -> Choice:
    """`EvidenceStopping(model, window=steps of an epoch)`: the same, of an epoch's sums."""
    window = int(run["window"])
    values = medians(run["epoch_evidence_tensors"])
    return _evidence(run, values, window, window * run.spec.batch, smoothing=0.9, arming=ARMING)


def medians(values: Any) -> list[float]:
    """Over the tensors that have a value, for each row; nan where none has.

    >>> medians([[1.0, 5.0, 2.0], [1.0, float("nan"), 2.0]])
    [2.0, 1.5]
    """
    known = [[value for value in row if not math.isnan(value)] for row in values]
    return [float(np.median(row)) if row else math.nan for row in known]


def pooled(run: LoggedRun) -> Choice:
    """Pooled evidence, smoothed as the paper's rule."""
    values = 1 - np.asarray(run["pooled"])
    return _evidence(run, values, 1, run.spec.batch, smoothing=0.9, arming=None, start=0.0)


# -- a validation split


def _validation(run: LoggedRun, split: int) -> tuple[list[float], list[float]]:
    values = run["split_values"]  # (epochs, 3, splits)
    return list(values[:, 0, split]), list(values[:, 2, split])


def _from_stop(
    run: LoggedRun, stop: Stop | None, keep_if_none: int, split: int | None, refit: bool = False
) -> Choice:
    steps = run["epoch_steps"]
    number = stop.keep if stop else keep_if_none
    kept = int(steps[number])
    end = int(steps[stop.end]) if stop else run.last
    spent = end + (kept if refit else 0)
    estimate = (math.nan, math.nan)
    if split is not None:
        loss, error, _ = run["split_values"][number, :, split]
        estimate = (float(loss), float(error))
    return Choice(
        {kept: 1.0},
        spent,
        stop is not None,
        None if refit else split,
        estimate,
        parts=("splits",) if split is not None or refit else ("epochs",),
        progress=end / run.last,
    )


def split_argmin(run: LoggedRun, split: int, refit: bool = False) -> Choice:
    losses, _ = _validation(run, split)
    best = best_check(torch.tensor(losses))
    choice = _from_stop(run, None, best, split, refit)
    kept = int(run["epoch_steps"][best])
    return replace(choice, spent=run.last + (kept if refit else 0), fired=kept < run.last)


def split_patience(run: LoggedRun, split: int) -> Choice:
    losses, _ = _validation(run, split)
    best = best_check(torch.tensor(losses))
    return _from_stop(run, patience(losses, VALIDATION_PATIENCE), best, split)


def prechelt_gl(run: LoggedRun, split: int) -> Choice:
    losses, _ = _validation(run, split)
    best = best_check(torch.tensor(losses))
    return _from_stop(run, generalisation_loss(losses, GL_ALPHA), best, split)


def prechelt_pq(run: LoggedRun, split: int) -> Choice:
    losses, training = _validation(run, split)
    best = best_check(torch.tensor(losses))
    return _from_stop(run, progress_quotient(losses, training, PQ_ALPHA, PQ_STRIP), best, split)


# -- rivals without one


def _epochs(run: LoggedRun, column: int) -> list[float] | None:
    values = list(run["epoch_values"][:, column])
    return None if all(math.isnan(v) for v in values) else values


def disparity_t1(run: LoggedRun) -> Choice | None:
    values = _epochs(run, 0)
    return None if values is None else _from_stop(run, disparity_total(values), -1, None)


def disparity_t2(run: LoggedRun) -> Choice | None:
    values = _epochs(run, 0)
    return None if values is None else _from_stop(run, disparity_consecutive(values), -1, None)


def wave(run: LoggedRun) -> Choice | None:
    values = _epochs(run, 1)
    return None if values is None else _from_stop(run, label_wave(values[1:]), -1, None)


def aligned(run: LoggedRun) -> Choice | None:
    values = _epochs(run, 2)
    return None if values is None else _from_stop(run, best_alignment(values), -1, None)


# -- controls


def last(run: LoggedRun) -> Choice:
    return Choice({run.last: 1.0}, run.last, False)


def oracle(run: LoggedRun) -> Choice:
    best = int(run["steps"][int(np.nanargmin(run["tested"][:, 0]))])
    return Choice({best: 1.0}, run.last, True)


Rule = Callable[[LoggedRun], "Choice | None"]

RULES: dict[str, Rule] = {
    "oracle": oracle,
    "auto": auto,
    "folds": folds,
    "folds patience": lambda run: folds(run, FOLD_PATIENCE),
    "folds bagged": lambda run: folds(run, None, True),
    "folds bagged patience": lambda run: folds(run, FOLD_PATIENCE, True),
    "2 folds bagged patience": lambda run: folds(run, FOLD_PATIENCE, True, 2),
    "3 folds bagged patience": lambda run: folds(run, FOLD_PATIENCE, True, 3),
    "4 folds bagged patience": lambda run: folds(run, FOLD_PATIENCE, True, 4),
    "folds committee": committee,
    "shadow": shadow,
    "shadow patience": lambda run: shadow(run, FOLD_PATIENCE),
    "shadow bagged": lambda run: shadow(run, None, True),
    "shadow bagged patience": lambda run: shadow(run, FOLD_PATIENCE, True),
    "leave-one-out": leave_one_out,
    "leave-one-out patience": lambda run: leave_one_out(run, LOO_PATIENCE),
    "leave-one-out bagged": lambda run: leave_one_out(run, None, True),
    "leave-one-out bagged patience": lambda run: leave_one_out(run, LOO_PATIENCE, True),
    "64 probes": lambda run: leave_one_out(run, None, False, "probe"),
    "64 probes bagged patience": lambda run: leave_one_out(run, LOO_PATIENCE, True, "probe"),
    "evidence (paper)": evidence_paper,
    "evidence": evidence_robust,
    "evidence, median": evidence_median,
    "evidence, epochs": evidence_epoch,
    "evidence, epochs, median": evidence_epoch_median,
    "pooled evidence": pooled,
    "split 10 %": lambda run: split_argmin(run, 0),
    "split 20 %": lambda run: split_argmin(run, 1),
    "split 30 %": lambda run: split_argmin(run, 2),
    "split 10 % patience": lambda run: split_patience(run, 0),
    "split 20 % patience": lambda run: split_patience(run, 1),
    "split 30 % patience": lambda run: split_patience(run, 2),
    "split 10 % refit": lambda run: split_argmin(run, 0, refit=True),
    "split 20 % refit": lambda run: split_argmin(run, 1, refit=True),
    "split 30 % refit": lambda run: split_argmin(run, 2, refit=True),
    "Prechelt GL": lambda run: prechelt_gl(run, 1),
    "Prechelt PQ": lambda run: prechelt_pq(run, 1),
    "gradient disparity t1": disparity_t1,
    "gradient disparity t2": disparity_t2,
    "label wave": wave,
    "gradient-weight alignment": aligned,
    "last iterate": last,
}

# Of networks, whose runs have five folds, evidence and one split beside them.
NETWORK_RULES = tuple(
    name
    for name in RULES
    if re.match("oracle|auto|folds(?! committee)|. folds|shadow|evidence|split 20 %|last", name)
)


def replay(run: LoggedRun, name: str) -> Outcome | None:
    """What a rule would have given; None where it is not defined (classes only, for instance)."""
    choice = RULES[name](run)
    if choice is None:
        return None
    stop = max(choice.shares, key=lambda step: choice.shares[step])
    if choice.committee:
        found = tuple(run["committee"])
    elif len(choice.shares) > 1:
        found = run.averaged(choice.shares)
    else:
        found = tuple(run.tested(stop, choice.split))
    best = float(np.nanmin(run["tested"][:, 0]))
    seconds = float(run["seconds_train"]) + sum(
        float(run[f"seconds_{part}"]) for part in choice.parts
    )
    return Outcome(
        name,
        stop,
        round(choice.spent),
        float(found[0]),
        best,
        float(found[0]) / best,
        float(found[1]),
        choice.fired,
        seconds * choice.progress,
        float(found[2]),
        float(np.nanmin(run["tested"][:, 2])),
        *choice.estimate,
        float(found[3]),
        choice.spent / run.last,
    )
