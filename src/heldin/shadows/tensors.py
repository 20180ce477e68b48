"""Training rows that lie in tensors, and what a model makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from heldin.errors import HeldinError
from heldin.loop.items import ItemStore
from heldin.loop.matching import Rows
from heldin.shadows.bare_model import copy_without_hooks
from heldin.shadows.losses import LossFunction, PerRowLoss, criterion_state
from heldin.shadows.outputs import one_for_each_row

__all__ = ["CHUNK", "TensorData"]

CHUNK = 4096  # rows in one evaluation
ENOUGH = 1024  # rows over which a loss is taken, if there are more


class TensorData:
    """Rows (inputs ..., targets), their weights (n,) with mean 1, and the loss of each."""

    def __init__(
        self,
        owner: str,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Any,
        sample_weight: Tensor | None,
        device: torch.device,
        store: ItemStore | None = None,
    ) -> None:
        self._owner, self._model = owner, model
        self._bare = copy_without_hooks(model)
        self.rows = Rows.of(data, device, store)
        self.weights = _row_weights(sample_weight, self.rows)
        some = slice(0, 256)
        outputs = self.outputs([x[some] for x in self.rows.inputs])
        self.loss = PerRowLoss.of(loss_fn, outputs, self.rows.targets[some])
        self._loss_state = criterion_state(loss_fn)

    def check_loss(self) -> None:
        """Refuse a loss function that has changed since it was looked at."""
        if criterion_state(self.loss.loss_fn) != self._loss_state:
            raise HeldinError(
                "step: loss_fn was changed in the course of training (its settings, or its "
                "weights), and shadows would be trained by what it was; pass batch_loss=..., a "
                "function of (model, batch), which is called as it is at every step"
            )

    def __len__(self) -> int:
        return len(self.rows)

    def outputs(self, inputs: Sequence[Tensor]) -> Tensor:
        """Of the model as it is, in evaluation mode and without its hooks."""
        state = dict(self._model.named_buffers())
        self._bare.eval()
        with torch.no_grad():
            outputs = functional_call(self._bare, state, tuple(inputs))
        return one_for_each_row(self._owner, outputs)

    def _losses_of(self, some: slice) -> Tensor:
        outputs = self.outputs([x[some] for x in self.rows.inputs])
        return self.loss.per_row(outputs, self.rows.targets[some])

    def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return inputs and targets of rows."""
        return (*(x[rows] for x in self.rows.inputs), self.rows.targets[rows])

    def weights_of(self, rows: Tensor) -> Tensor | None:
        """Return the weights of rows in the loss; None: all are equal."""
        return None if self.weights is None else self.weights.cpu()[rows]

    def loss_of(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of a step, as the loop computes it from the outputs of rows."""
        targets = self.rows.targets[rows]
        if self.weights is None:
            return self.loss.loss_fn(outputs, targets)
        losses = self.loss.per_row(outputs, targets) * self.weights[rows]
        return losses.sum() if self.loss.kind == "sum" else losses.mean()

    def bad_rows(self) -> list[int]:
        """Return the rows whose loss is nan or infinite."""
        bad: list[int] = []
        for start in range(0, len(self.rows), CHUNK):
            losses = self._losses_of(slice(start, start + CHUNK))
            bad += (start + (~losses.isfinite()).nonzero().flatten()).tolist()
        return bad

    def training_loss(self, most: int = ENOUGH) -> float:
        """Mean over the rows; over some of them, evenly spread, where there are more."""
        n = len(self.rows)
        stride = -(-n // most)
        parts = []
        for start in range(0, n, CHUNK * stride):
            parts.append(self._losses_of(slice(start, start + CHUNK * stride, stride)))
        losses = torch.cat(parts).double()
        return float((losses if self.weights is None else losses * self.weights[::stride]).mean())


def _row_weights(sample_weight: Tensor | None, rows: Rows) -> Tensor | None:
    """(n,) weights with mean 1."""
    if sample_weight is None:
        return None
    weights = torch.as_tensor(sample_weight).detach().double().to(rows.targets.device)
    good = weights.shape == (len(rows),) and bool((weights >= 0).all()) and float(weights.sum()) > 0
    if not good or not bool(weights.isfinite().all()):
        raise HeldinError(
            f"sample_weight: expected {len(rows)} finite numbers >= 0 with a positive sum, one for "
            "each row of data"
        )
    return weights / weights.mean()
