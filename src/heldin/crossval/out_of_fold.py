"""Outputs for rows that the models behind them were not trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heldin.errors import HeldinError

__all__ = ["OutOfFold"]


@dataclass(frozen=True, eq=False, repr=False)
class OutOfFold:
    """Out-of-fold outputs, as five-fold cross-validation gives them.

    Entry i of each tensor belongs to row `rows[i]` of the training data. With folds every row has
    an output, and the entries are in the order of the data; with a single shadow only the rows
    that it does not see have one.

    Attributes:
        outputs: (m, ...) of the shadow that was not trained on the row. Logits of a run with a
            temperature are divided by it (log-probabilities stay such), so softmax or sigmoid
            make calibrated probabilities of them; times `stopping.temperature` they are the
            shadow's own.
        rows: (m,) numbers of the rows that have an output, ascending.
        folds: (m,) number of the fold that each row is in.
        targets: (m, ...) of the same rows.

    >>> out_of_fold = OutOfFold(
    ...     outputs=torch.tensor([[0.2, 0.9], [1.0, 0.1], [0.3, 0.4]]),
    ...     rows=torch.tensor([0, 1, 2]),
    ...     folds=torch.tensor([0, 1, 0]),
    ...     targets=torch.tensor([1, 0, 0]),
    ... )
    >>> out_of_fold
    <heldin.OutOfFold: 3 rows in 2 folds, outputs (3, 2), targets (3,)>
    >>> out_of_fold.outputs.argmax(1) == out_of_fold.targets
    tensor([ True,  True, False])
    """

    outputs: Tensor
    rows: Tensor
    folds: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        check_rows(self.rows, self.folds)
        for name in ("outputs", "targets"):
            entries = getattr(self, name)
            if not isinstance(entries, Tensor) or entries.dim() == 0:
                raise HeldinError(f"{name} must be a tensor with one entry for each row")
            if len(entries) != len(self.rows):
                raise HeldinError(f"{name} has {len(entries)} entries for {len(self.rows)} rows")

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        folds = len(torch.unique(self.folds))
        return (
            f"<heldin.OutOfFold: {len(self)} rows in {folds} fold{'s' * (folds != 1)}, outputs "
            f"{tuple(self.outputs.shape)}, targets {tuple(self.targets.shape)}>"
        )


def check_rows(rows: Tensor, folds: Tensor) -> None:
    """Refuse row numbers that are not ascending, and folds that do not match them."""
    for name, numbers in (("rows", rows), ("folds", folds)):
        if not isinstance(numbers, Tensor) or numbers.dim() != 1 or numbers.is_floating_point():
            raise HeldinError(f"{name} must be a tensor of shape (m,) of whole numbers")
    if len(rows) != len(folds):
        raise HeldinError(f"folds has {len(folds)} entries for {len(rows)} rows")
    if rows.dtype == torch.bool:
        raise HeldinError("rows must be the numbers of the rows; use mask.nonzero()[:, 0]")
    if len(rows) and (int(rows.min()) < 0 or not bool((rows.diff() > 0).all())):
        raise HeldinError("rows must be ascending numbers >= 0, each row once; sort them first")
