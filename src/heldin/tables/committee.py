"""Several networks with starts of their own, trained in lock-step, each without some of the rows.

One of them sees every row. What the others say of the rows that they have not seen tells when to
stop, how much to believe, and how good the committee will be; together they predict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.rules.estimated.curves import Patience, best_check, mean_and_error, next_check, votes
from heldin.rules.estimated.labels import fold_labels
from heldin.rules.estimated.losses import RowLoss
from heldin.rules.estimated.stack import Stack, hyperparameters
from heldin.state.estimates import Estimate, EstimateHistory

from .assess import Assessment, assess, prediction_losses
from .mlp import constant_outputs, predictions, start_at
from .trainer import TURNED, Report, Trainer

__all__ = ["Committee", "Folds", "drawn_folds", "train_committee", "usual_folds"]

FOLDS = 5  # of the rows; a member misses one of them
FEW, FOLDS_OF_FEW = 100, 10  # rows up to which a fifth of them is too many to miss
LOOKED_AT = 2048  # rows that are evaluated at a check
CHEAP = 1024  # rows up to which a check costs nothing to speak of
SHARE = 0.1  # of the time of training, that checks may take where there are more
CHUNK = 4096  # rows in one evaluation
GRID = 1.2  # ratio of the steps of successive checks
PATIENCE = Patience(factor=2.0, slack=200, checks=3)
MEMORY = 256 * 2**20  # bytes for the weights of the checks; where they do not fit, only the best


@dataclass(frozen=True, eq=False)
class Folds:
    """Which rows a member trains on, and which rows it is asked about.

    Attributes:
        sees: (members, n) booleans. The last member sees all rows.
        judges: (members, n) booleans: rows that it has not seen, nor any that belong to them.
    """

    sees: Tensor
    judges: Tensor

    def __len__(self) -> int:
        return len(self.sees)

    @property
    def judged(self) -> Tensor:
        """(n,): whether some member is asked about the row."""
        return self.judges.any(0)

    def rows(self, index: Tensor) -> Folds:
        """Of some rows, perhaps more than once."""
        return Folds(self.sees[:, index], self.judges[:, index])

    @classmethod
    def of(cls, splits: Sequence[tuple[Tensor, Tensor]], n: int, members: int) -> Folds:
        """From row numbers to see and to be asked about; they come round again for more members."""
        sees = torch.zeros(members, n, dtype=torch.bool)
        judges = torch.zeros(members, n, dtype=torch.bool)
        for member in range(members - 1):
            train, test = splits[member % len(splits)]
            sees[member, train] = True
            judges[member, test] = True
        sees[-1] = True
        return cls(sees, judges & ~sees)


def usual_folds(n: int) -> int:
    """Their number where nobody says another.

    >>> usual_folds(100), usual_folds(101)
    (10, 5)
    """
    return FOLDS_OF_FEW if n <= FEW else FOLDS


def drawn_folds(
    n: int,
    members: int,
    seed: int,
    groups: Tensor | None = None,
    stratify: Tensor | None = None,
    folds: int = FOLDS,
) -> Folds:
    """Random folds, each missed by one member; drawn anew when all have been missed.

    Args:
        n: number of rows.
        members: their number, with the one that sees all rows.
        seed: of the draws.
        groups: (n,) whole numbers; rows with the same one are in the same fold.
        stratify: (n,) classes; each fold gets its share of every class.
        folds: their number, at least two; fewer where there are fewer rows or groups.

    >>> folds = drawn_folds(10, 6, seed=0)
    >>> folds.sees.sum(1)
    tensor([ 8,  8,  8,  8,  8, 10])
    >>> folds.judges.sum(0)
    tensor([1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    """
    many = min(folds, n if groups is None else len(groups.unique()))
    sees = torch.ones(members, n, dtype=torch.bool)
    for member in range(members - 1):
        draw, fold = divmod(member, many)
        if fold == 0:
            labels = fold_labels(n, many, seed + draw, groups, stratify)
        sees[member] = labels != fold
    return Folds(sees, ~sees)


class Committee:
    """Trains the members in one stack and keeps the weights where the estimate is lowest.

    Args:
        starts: networks of the same shape, one for each member.
        optimizer: over the last one's parameters; its kind and settings are those of all.
        loss: row by row.
        x: (n, inputs).
        y: (n,) class numbers or (n, outputs).
        weights: (n,) with mean 1, or None.
        folds: who sees what.
        seed: of the draws that average the weights around the best step.

    Attributes:
        history: the mean loss of judged rows on the members that judge them, at every check.
        step: optimiser steps taken.
        should_stop: whether training has gone on for long enough after the best check.
    """

    def __init__(
        self,
        starts: Sequence[nn.Sequential],
        optimizer: Optimizer,
        loss: RowLoss,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
        folds: Folds,
        seed: int,
    ) -> None:
        self.loss, self.x, self.y, self.weights, self.folds = loss, x, y, weights, folds
        self.seed = seed
        self._targets = loss.ready(y)
        self._optimizer = optimizer
        self.stack = Stack(starts[-1], optimizer, len(starts), [x], "dense")
        with torch.no_grad():
            for number, start in enumerate(starts):
                for name, parameter in start.named_parameters():
                    self.stack.blocks[name].detach()[number].copy_(parameter)
        judged = folds.judged.nonzero().flatten()
        self._looked_at = judged[:: max(1, -(-len(judged) // LOOKED_AT))]
        self.step, self.should_stop = 0, False
        self.history = EstimateHistory("folds")
        self._curves: list[Tensor] = []
        self._kept: dict[int, dict[str, Tensor]] = {}
        self._check()

    # -- training

    def epoch(self, batches: Sequence[Tensor]) -> None:
        """Steps on the rows of these numbers, until they are over or it is time to stop."""
        settings = hyperparameters(self._optimizer)
        for index in batches:
            self.stack.advance(
                [self.x[index]],
                self._targets[index],
                self.folds.sees[:, index],
                self.loss,
                settings,
                None if self.weights is None else self.weights[index],
            )
            self.step += 1
            last = self.history.last().step
            if self.step >= max(next_check(last, GRID), last + self._apart(len(index))):
                self._check()
                if self.should_stop:
                    return

    def _apart(self, batch: int) -> int:
        """Steps between checks, of which a forward pass is a third, so that these cost little."""
        if len(self.y) <= CHEAP:
            return 1
        return math.ceil(len(self._looked_at) / (3 * batch * SHARE))

    def _check(self) -> None:
        rows = self._looked_at
        outputs = self._outputs(self.x[rows])
        losses = self._row_losses(outputs, rows)
        judges = self.folds.judges[:, rows]
        held = torch.where(judges, losses, 0.0).sum(0) / judges.sum(0)
        if self.weights is not None:
            held = held * self.weights[rows]
        seen = losses[-1] if self.weights is None else losses[-1] * self.weights[rows]
        middle, error = mean_and_error(held)
        self._curves.append(held)
        self.history.append(Estimate(self.step, middle, error, float(seen.mean())))
        best = best_check(torch.tensor(self.history.columns()["estimate"]))
        self.history.best_step = self.history[best].step
        self._keep(best)
        since = len(self.history) - 1 - best
        if PATIENCE.over(self.step, self.history.best_step, since):
            self.should_stop, self.history.stopped_step = True, self.step

    def _keep(self, best: int) -> None:
        now = {name: block.detach().clone() for name, block in self.stack.blocks.items()}
        self._kept[len(self._curves) - 1] = now
        size = sum(t.numel() * t.element_size() for t in now.values())
        if len(self._kept) * size > MEMORY:
            self._kept = {best: self._kept[best]}

    def _row_losses(self, outputs: Tensor, rows: Tensor) -> Tensor:
        targets = self.y[rows]
        return self.loss.rows(outputs, targets.expand(len(outputs), *targets.shape)).double()

    def _outputs(self, x: Tensor) -> Tensor:
        members = len(self.folds)
        return self.stack.evaluate([x.expand(members, *x.shape)])

    # -- results

    def restore(self) -> None:
        """Go back to the best check: an average of the weights around it, of each member."""
        if self.step > self.history.last().step:
            self._check()
        numbers = sorted(self._kept)
        shares = votes(torch.stack([self._curves[i] for i in numbers], 1), seed=self.seed)
        with torch.no_grad():
            for name, block in self.stack.blocks.items():
                parts = [
                    share * self._kept[number][name]
                    for number, share in zip(numbers, shares.tolist(), strict=True)
                    if share > 0
                ]
                block.detach().copy_(torch.stack(parts).sum(0))

    def outputs(self) -> Tensor:
        """(members, n, outputs): of all members on all rows."""
        return torch.cat([self._outputs(part) for part in self.x.split(CHUNK)], 1)

    def weights_of(self, member: int) -> dict[str, Tensor]:
        """By the names of the parameters."""
        return {name: value.clone() for name, value in self.stack.copy_of(member).items()}


def train_committee(
    trainer: Trainer,
    starts: Sequence[nn.Sequential],
    folds: Folds,
    *,
    together: bool,
    first: bool = True,
    report: Report | None = None,
) -> Assessment:
    """Train until the estimate has passed its lowest value; the weights are in `starts` then.

    Args:
        trainer: of the last member; its outcome says how it went.
        starts: networks, one for each member.
        folds: who sees what.
        together: whether all members will predict, or the last one alone.
        first: whether the networks were just built, and start at the constants of their rows.
        report: called after every epoch.
    """
    y, weights, loss_fn = trainer.y, trainer.weights, trainer.loss_fn
    size = _last(starts[-1]).out_features
    constants = []
    for model, seen in zip(starts, folds.sees, strict=True):
        some = None if weights is None else weights[seen]
        constant = constant_outputs(loss_fn, y[seen], size, some)
        if _last(model).bias is None:
            constant = torch.zeros_like(constant)
        if first:
            start_at(model, constant)
        constants.append(constant)
    assert isinstance(trainer.x, Tensor)
    committee = Committee(
        starts, trainer.optimizer, trainer.loss, trainer.x, y, weights, folds, trainer.seed
    )
    out, history = trainer.outcome, committee.history
    shown = slice(None, None, -(-len(y) // LOOKED_AT))  # the training loss of an epoch is of these
    shown_weights = None if weights is None else weights[shown]
    while out.epochs < trainer.config.max_iter and not committee.should_stop:
        committee.epoch(trainer.batches())
        out.steps = committee.step
        _put(starts[-1], committee.weights_of(len(starts) - 1))
        trainer.end_epoch(trainer.mean_loss(trainer.x[shown], y[shown], shown_weights))
        out.reason = (
            f"step {out.steps}: estimated loss {history.last().estimate:.4g}, lowest "
            f"{history[_best(history)].estimate:.4g} at step {history.best_step}"
        )
        if report is not None:
            report(out.epochs, out.losses[-1], out.reason)
    committee.restore()
    for member, model in enumerate(starts):
        _put(model, committee.weights_of(member))
    outputs = committee.outputs()
    found = assess(loss_fn, outputs, torch.stack(constants), folds.judges, y, weights, together)
    for model in starts:
        _shrink(model, found.share, constants[-1])
    assert history.best_step is not None
    out.rule = "folds" if int(folds.judges.any(1).sum()) > 1 else "shadow"
    out.stopped, out.best_step, out.history = committee.should_stop, history.best_step, history
    later = sum(record.step > history.best_step for record in history)
    out.converged = out.stopped or later >= TURNED
    out.estimate, out.standard_error = found.estimate, found.standard_error
    kept = outputs if together else outputs[-1:]
    mixed = found.share * kept + (1 - found.share) * constants[-1]
    losses = prediction_losses(loss_fn, predictions(loss_fn, mixed).mean(0), y)
    out.loss = float((losses if weights is None else losses * weights).mean())
    return found


def _best(history: EstimateHistory) -> int:
    return next(i for i, record in enumerate(history) if record.step == history.best_step)


def _last(model: nn.Sequential) -> nn.Linear:
    last = model[-1]
    assert isinstance(last, nn.Linear)
    return last


@torch.no_grad()
def _put(model: nn.Sequential, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


@torch.no_grad()
def _shrink(model: nn.Sequential, share: float, constant: Tensor) -> None:
    """Outputs become so much of what they were, and for the rest the constant."""
    last = _last(model)
    last.weight.mul_(share)
    if last.bias is not None:
        last.bias.copy_(share * last.bias + (1 - share) * constant)
