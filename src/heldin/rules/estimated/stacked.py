"""Shadows of a model on tensors (inputs ..., targets), trained in one stack."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import Dropout
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.state.schema import check_schema

from .engines import Engine
from .labels import LOOKED_AT, thinned
from .randomness import own_random_stream
from .rows import WAY_OUT, RowMatcher
from .stack import Stack
from .tensors import CHUNK, TensorData
from .watch import CHANGED, Taken

__all__ = ["StackedShadows", "differs"]

SHOWN = 256  # rows of which the training loss is shown, no more than are held out
NOISE = 64  # gradients below so many roundings of the largest are nothing but rounding


class StackedShadows:
    """K copies of the model; `label` says for each row which of them must not see it (-1: none).

    Attributes:
        stack: the copies.
        held: how many rows are evaluated at a check.
        cost: of a check, in forward passes of a row.
        inside: whether the model itself is trained in the stack, as one more copy.
        same_loss: true; see `HeldOut`.
    """

    same_loss = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: TensorData,
        label: Tensor,
        engine: Engine,
        seed: int,
        clip: Any = None,
    ) -> None:
        if clip is not None and not isinstance(clip, (int, float)):
            raise HeldinError(
                "clip: stacked shadows clip by the norm only, give the largest one; a function "
                "needs batch_loss, or engine='copies'"
            )
        self._clip = clip
        self.data, self.label, self.seed = data, label.to(data.rows.targets.device), seed
        self.copies = int(label.max()) + 1
        self._model, self._optimizer, self._engine = model, optimizer, engine
        self._targets = data.loss.ready(data.rows.targets)
        self.inside = False
        self.stack = Stack(model, optimizer, self.copies, data.rows.inputs, engine)
        self.engine = self.stack.engine  # how the shadows are run
        self._twin: Stack | None = None
        if not any(isinstance(m, Dropout) for m in model.modules()):
            self._twin = Stack(model, optimizer, 1, data.rows.inputs, engine)
        self._find = RowMatcher(data.rows)
        self._steps = 0
        self._place()

    def _place(self) -> None:
        """Where the held-out rows of every shadow lie: (K, r) row numbers, padded with row 0."""
        own = thinned(self.label, LOOKED_AT)
        own += [own[0][:0]] * (self.stack.copies - len(own))
        width = max(len(rows) for rows in own)
        self._held = torch.stack([torch.cat([r, r.new_zeros(width - len(r))]) for r in own])
        device = self.label.device
        self._real = torch.stack([torch.arange(width, device=device) < len(r) for r in own])
        self._numbers_of_copies = torch.arange(len(own), device=device).unsqueeze(1)
        self._looked_at = torch.cat(own).sort().values
        self.held = len(self._looked_at)
        self._shown = min(SHOWN, self.held)
        self.cost = self.held + self._shown

    # -- training

    def follow(self, taken: Taken, index: Tensor | None, queued: list[Tensor], now: bool) -> int:
        """Repeat an optimiser step for every shadow; the number of rows it was taken on.

        Args:
            taken: the step.
            index: the numbers of its rows, if they were told.
            queued: the same, if the batches came from `batches()`.
            now: whether the model has not moved since.
        """
        if self.inside:
            raise HeldinError("step: train() takes the steps itself; it is one or the other")
        inputs = tuple(
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*taken.calls, strict=True)
        )
        if index is None:
            if queued:
                index = torch.cat(queued).to(self.label.device)
            elif inputs:
                index = torch.cat([self._find(call) for call in taken.calls])
            else:
                raise HeldinError(
                    "step: the optimiser stepped, but the model was not called since the last "
                    f"step; {WAY_OUT}"
                )
        if taken.changed():
            raise HeldinError(CHANGED)
        if not inputs:
            inputs = tuple(x[index] for x in self.data.rows.inputs)
        if len(inputs[0]) != len(index):
            raise HeldinError(
                f"step: the model was called with {len(inputs[0])} rows since the last step, but "
                f"{len(index)} row numbers are known for it; call step() after every optimiser step"
            )
        self.advance(inputs, index, taken.settings)
        if self._twin is not None:
            twin, self._twin = self._twin, None
            if now:
                self._compare(twin, inputs, index, taken)
        return len(index)

    def advance(
        self, inputs: Sequence[Tensor], index: Tensor, settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """One step of all copies on the rows of a minibatch."""
        keep = self.label[index] != self._numbers_of_copies
        self._steps += 1
        self._advance(self.stack, inputs, index, keep, settings)

    def _advance(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        index: Tensor,
        keep: Tensor,
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        weights = None if self.data.weights is None else self.data.weights[index]
        stream = (
            nullcontext()  # nothing in a plain network draws a random number
            if stack.engine == "dense"
            else own_random_stream(self.seed, self._steps, self.label.device)
        )
        with stream:
            stack.advance(
                inputs, self._targets[index], keep, self.data.loss, settings, weights, self._clip
            )

    def _compare(self, twin: Stack, inputs: Sequence[Tensor], index: Tensor, taken: Taken) -> None:
        """Did the model take the step that the loss and the optimiser give? Else say so, once."""
        before = {name: block.detach()[0].clone() for name, block in twin.blocks.items()}
        everything = torch.ones_like(index, dtype=torch.bool)[None]
        self._advance(twin, inputs, index, everything, taken.settings)
        params = dict(self._model.named_parameters())
        differs(
            {
                name: (before[name], params[name].detach(), block.detach()[0], twin.grads[name][0])
                for name, block in twin.blocks.items()
                if name not in twin.idle  # the optimiser passes over it in the loop
            },
            "put them into loss_fn or the optimiser",
        )

    # -- the model in the stack, for train()

    def epoch(
        self, size: int | None, shuffle: bool, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Row numbers and inputs of the batches of an epoch."""
        rows, device = self.data.rows, self.label.device
        if rows.loader is None:
            for index in rows.order(size, shuffle, generator):
                yield index, [x[index] for x in rows.inputs]
        else:
            for index, batch in rows.batches(size, shuffle, generator):
                yield index.to(device), [x.to(device) for x in batch[:-1]]

    def take_in(self) -> None:
        """Make the model one more copy, which misses no row."""
        self.inside, self._twin = True, None
        inputs = self.data.rows.inputs
        self.stack = Stack(self._model, self._optimizer, self.copies + 1, inputs, self._engine)
        self._place()

    def weights_of_the_model(self) -> dict[str, Tensor]:
        """Weights and buffers of the copy that is the model."""
        return self.stack.copy_of(self.copies)

    # -- checks

    def held_out(self) -> Tensor:
        """(held,) losses of rows on the shadow that has not seen them, in the rows' order."""
        rows, device = self.data.rows, self.label.device
        losses = torch.empty(len(rows), dtype=torch.float64, device=device)
        chunk = max(1, CHUNK // self.copies)
        for start in range(0, self._held.shape[1], chunk):
            index = self._held[:, start : start + chunk]
            real = self._real[:, start : start + chunk]
            outputs = self.stack.evaluate([x[index] for x in rows.inputs])
            found = self.data.loss.rows(outputs, rows.targets[index])
            losses[index[real]] = found[real].double()
        if self.data.weights is not None:
            losses = losses * self.data.weights
        return losses[self._looked_at]

    def training_loss(self) -> float:
        """Of the model itself."""
        return self.data.training_loss(self._shown)

    # -- saving and closing

    def close(self) -> None:
        """Release the model, its optimiser and the copies."""
        self.data.release()
        self._twin = None
        for name in ("stack", "_model", "_optimizer"):
            vars(self).pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        """Weights, buffers, optimiser states, and where the look-up of rows is."""
        return {
            "label": self.label.clone(),
            "inside": self.inside,
            "steps": self._steps,
            "stack": self.stack.state_dict(),
            "turns": dict(self._find.turns),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        form = {"inside": bool, "steps": int, "stack": dict, "turns": {int: int}}
        check_schema(state, {"label": self.label.cpu(), **form})
        if self.inside and not state["inside"]:
            raise ValueError("the run that was saved did not go through train(), this one does")
        self.stack.check_state(state["stack"], self.copies + int(state["inside"]))
        self.label = state["label"].to(self.label.device)
        if state["inside"] and not self.inside:
            self.take_in()
        self._place()
        self.stack.load_state_dict(state["stack"])
        self._find.turns = dict(state["turns"])
        self._twin, self._steps = None, state["steps"]


def differs(
    moves: Mapping[str, tuple[Tensor, Tensor, Tensor, Tensor]], way_out: str
) -> float | None:
    """Warn if a model did not take the step that a shadow that sees every row took.

    Parameters whose gradient is nothing but rounding (a bias before a BatchNorm) do not count: an
    optimiser that divides by the gradient's size makes a step at random out of it.

    Args:
        moves: by name: weights before the step, the model's after it, the shadow's, its gradient.
        way_out: what to do about it.

    Returns:
        The relative difference, if it was worth a warning.
    """
    moves = {
        name: (a, b, c, grad.to_dense() if grad.is_sparse else grad)
        for name, (a, b, c, grad) in moves.items()
    }
    sizes = {name: float(grad.abs().double().square().mean()) for name, (*_, grad) in moves.items()}
    largest = max(sizes.values(), default=0.0)
    off = size = 0.0
    for name, (before, after, shadow, grad) in moves.items():
        eps = torch.finfo(grad.dtype).eps if grad.is_floating_point() else 0.0
        if sizes[name] <= (NOISE * eps) ** 2 * largest:
            continue
        moved, expected = after - before, shadow - before
        off += float((moved - expected).abs().double().square().sum())
        size += float(moved.abs().double().square().sum())
    if off <= 1e-4 * size:
        return None
    found = math.sqrt(off / max(size, 1e-300))
    warnings.warn(
        "the model's first step is not the one that loss_fn and the optimiser give on the same "
        f"rows (relative difference {found:.2g}). The shadows know nothing of penalties, clipping "
        f"or scaling in your loop: {way_out}, or the estimate is that of another training "
        + more("another-training-step"),
        HeldinWarning,
        stacklevel=6,
    )
    return found
