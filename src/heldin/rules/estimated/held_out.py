"""The held-out rows of shadows on any batches, and their losses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError

from .batches import refused_if_changed, repacked, select, tensors_in, to_device
from .labels import LOOKED_AT, thinned
from .row_losses import RowLosses
from .source import Source
from .together import Together

__all__ = ["BatchLoss", "HeldOut", "one_number"]

BatchLoss = Callable[[nn.Module, Any], Tensor]
Evaluate = Callable[[int, Any, BatchLoss], Tensor]  # of the shadow with this number

BLOCKS = 16  # means of so many blocks of held-out rows tell the error of the estimate
EVALUATED = 256  # rows in one evaluation, if the loss comes row by row
LEAST = 8  # rows that an evaluation costs, however few they are


class HeldOut:
    """Rows that shadows must not see, in batches of the loader's own kind.

    Attributes:
        held: how many rows are evaluated at a check.
        cost: of a check, in forward passes of a row.
        adds_up: whether the loss of a batch is the sum of its samples' losses, and not their mean.
        same_loss: whether eval_loss is the loss that is trained, so that both can be compared.
    """

    def __init__(
        self,
        view: Source,
        label: Tensor,
        evaluate: Evaluate,
        loss: BatchLoss,
        eval_loss: BatchLoss | None,
        device: torch.device,
        memory: int,
        together: Together | None,
    ) -> None:
        self._view, self._evaluate, self._device = view, evaluate, device
        self._loss, self._eval_loss = loss, eval_loss or loss
        self._together = together
        own = thinned(label, LOOKED_AT)
        self.held = sum(len(rows) for rows in own)
        some = torch.arange(min(8, view.count))
        self._find_kind(to_device(view.batch(some), device), len(some))
        size = EVALUATED if self._by_rows else max(1, self.held // BLOCKS)
        self._blocks = [
            (number, block)
            for number, rows in enumerate(own)
            for block in rows.tensor_split(max(1, -(-len(rows) // size)))
            if len(block)
        ]
        self.cost = sum(max(LEAST, len(block)) for _, block in self._blocks)
        self._cached = self._batches_within(memory)

    def _find_kind(self, batch: Any, rows: int) -> None:
        """Is the loss a mean of the samples' losses, their sum, or does it come row by row?"""
        self._noted = False
        with RowLosses() as noted:
            whole = self._evaluated(0, batch, self._eval_loss)
        if self._eval_loss is self._loss:
            whole = one_number(whole)
        if whole.numel() not in (1, rows):
            raise HeldinError(
                f"eval_loss must return the loss of a batch or one for each of its {rows} samples, "
                f"got {tuple(whole.shape)}"
            )
        with refused_if_changed(batch):
            self._evaluated(0, batch, self._eval_loss)
        self._by_rows = whole.dim() > 0 and whole.numel() == rows
        self.adds_up = self._is_sum(batch, rows)
        self.same_loss = self._eval_loss is self._loss
        if not self.same_loss:
            trained = self._evaluated(0, batch, self._loss).sum() / (rows if self.adds_up else 1)
            self.same_loss = bool((whole.mean() - trained).abs() <= 1e-3 * trained.abs())
        each = noted.of(rows)
        if self._by_rows or each is None:
            return
        total = float(each.double().sum() if self.adds_up else each.double().mean())
        self._noted = self._by_rows = abs(total - float(whole)) <= 1e-3 * abs(float(whole))

    def _is_sum(self, batch: Any, rows: int) -> bool:
        if rows < 2:
            return False
        half = rows // 2
        first, second, both = (
            self._evaluated(0, select(batch, self._view.layout, index), self._loss).sum()
            for index in (torch.arange(half), torch.arange(half, rows), torch.arange(rows))
        )
        mean = (half * first + (rows - half) * second) / rows
        return bool((both - first - second).abs() < (both - mean).abs() / 4)

    def _batches_within(self, memory: int) -> list[Any] | None:
        """The batches of this process, if there is room for all of them."""
        batches = []
        for _, block in self._own_blocks():
            batch = self._view.batch(block)
            memory -= sum(t.numel() * t.element_size() for t in tensors_in(batch))
            if memory < 0:
                return None
            batches.append(to_device(batch, self._device))
        return batches

    def _own_blocks(self) -> list[tuple[int, Tensor]]:
        return (
            self._blocks[self._together.rank :: self._together.size]
            if self._together
            else self._blocks
        )

    def _evaluated(self, number: int, batch: Any, loss: BatchLoss) -> Tensor:
        found = self._evaluate(number, repacked(batch), loss)
        if not isinstance(found, Tensor):
            raise HeldinError(
                f"batch_loss must return the loss of a batch, a tensor, got {type(found).__name__}"
            )
        return found.detach().double().cpu()

    def losses(self) -> Tensor:
        """Losses of the held-out rows, or means over blocks of them, weighted by their sizes."""
        blocks = self._own_blocks()
        found = []
        for i, (number, block) in enumerate(blocks):
            batch = self._cached[i] if self._cached is not None else self._view.batch(block)
            found.append(self._of_block(number, to_device(batch, self._device), len(block)))
        if self._together is None:
            return torch.cat(found)
        each = [
            torch.zeros(len(b) if self._by_rows else 1, dtype=torch.float64)
            for _, b in self._blocks
        ]
        each[self._together.rank :: self._together.size] = found
        return self._together.join(torch.cat(each), self._device)

    def _of_block(self, number: int, batch: Any, rows: int) -> Tensor:
        noted = RowLosses()
        with noted if self._noted else nullcontext():
            whole = self._evaluated(number, batch, self._eval_loss)
        if self._by_rows and not self._noted:
            return whole.flatten()
        mean = whole.reshape(1) / (rows if self.adds_up else 1)
        if not self._by_rows:
            return mean * rows * len(self._blocks) / self.held
        each = noted.of(rows)
        if each is None:
            return mean.expand(rows)
        each = each.double().cpu()
        return each + (mean - each.mean())  # rows without a target do not count in the mean


def one_number(loss: Any) -> Tensor:
    """The loss of a batch, if it is one."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise HeldinError(
            f"batch_loss must return the loss of a batch, a tensor with one number, got {found}"
        )
    return loss.reshape(())
