"""Outputs for held-out rows, from the calls that the loss makes of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError
from heldin.loop.batches import repack
from heldin.loop.hooks import after_calls

__all__ = ["OutputCollector", "OutputRecipe", "logits_in", "one_for_each_row"]

TARGETS = ("labels", "label", "targets", "target", "y")  # keys of a batch that is a mapping


@dataclass(frozen=True, eq=False)
class OutputRecipe:
    """How outputs and targets follow from a model and a batch."""

    memory: int  # bytes that the outputs of a check may take
    # (model, batch) -> outputs; None: what the loss's own call of the model returned, or, if it
    # calls a single child of the model instead, what that one returned
    predict: Callable[[nn.Module, Any], Any] | None = None
    # (batch) -> targets; None: the last element of a batch, or its "labels"
    targets: Callable[[Any], Any] | None = None
    # (model, batch) -> outputs, where the loss calls neither of them once
    fallback: Callable[[nn.Module, Any], Any] | None = None

    def targets_of(self, batch: Any, rows: int) -> Tensor:
        """Return the targets of a batch."""
        if self.targets is not None:
            value = self.targets(repack(batch))
        elif isinstance(batch, Mapping):
            name = next((name for name in TARGETS if name in batch), None)
            value = None if name is None else batch[name]
        else:
            value = batch[-1] if isinstance(batch, (tuple, list)) and batch else None
        return _one_for_each_row("targets", value, rows, "targets=(batch) -> targets")

    def outputs_of(self, value: Any, rows: int) -> Tensor:
        """Return the outputs in what a model or `predict` has returned."""
        self.check_room(value, rows, rows)
        return _one_for_each_row(
            "outputs", logits_in(value), rows, "predict=(model, batch) -> outputs"
        )

    def check_room(self, value: Any, rows: int, all_rows: int) -> None:
        """Refuse outputs that do not fit into the memory."""
        outputs = logits_in(value)
        if not isinstance(outputs, Tensor) or not rows:
            return
        size = outputs.numel() * outputs.element_size() * all_rows // rows
        if size > self.memory:
            raise HeldinError(
                f"outputs: those of {all_rows} rows take {size:,} bytes, and {self.memory:,} are "
                "allowed; raise snapshot_memory of the rule, or let predict=(model, batch) return "
                "less, the most probable class for instance"
            )


def one_for_each_row(owner: str, value: Any) -> Tensor:
    """Return what a model returned to a loss of (outputs, targets); refuse all but a tensor."""
    if not isinstance(value, Tensor) or value.dim() < 1:
        raise HeldinError(
            f"{owner}: with loss_fn the model must return a tensor with one entry for each row, in "
            f"every call, got {type(value).__name__}; give batch_loss, a function of model and "
            "batch, in place of loss_fn (predict= changes what metrics get, not what the loss "
            "gets), or wrap the model in a module that returns a tensor"
        )
    return value


def logits_in(value: Any) -> Any:
    """Return `.logits` or ["logits"] where there is one, else the value itself."""
    if isinstance(value, Mapping):
        return value.get("logits", value)
    return getattr(value, "logits", value)


def _one_for_each_row(what: str, value: Any, rows: int, way_out: str) -> Tensor:
    if not isinstance(value, Tensor) or value.is_nested:
        raise HeldinError(f"{what}: expected a tensor, got {type(value).__name__}; give {way_out}")
    if value.dim() == 0 or len(value) != rows:
        raise HeldinError(
            f"{what}: expected one entry for each of {rows} rows, got the shape "
            f"{tuple(value.shape)}; give {way_out}"
        )
    return value.detach().as_subclass(Tensor).cpu()


class OutputCollector:
    """Outputs and targets of one pass over the held-out `rows`, batch by batch in `blocks`."""

    def __init__(
        self, recipe: OutputRecipe, model: nn.Module, rows: int, with_targets: bool
    ) -> None:
        self._recipe, self._model, self._rows = recipe, model, rows
        self._with_targets = with_targets
        self._calls: list[Any] = []  # what the model returned
        self._child_calls: list[Any] = []
        self.blocks: list[tuple[Tensor, Tensor | None]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the model returns, unless `predict` calls it."""
        self._calls, self._child_calls = [], []
        if self._recipe.predict is not None:
            yield
            return
        children = [m for m in self._model.children() if next(m.parameters(), None) is not None]
        # Hooks that refer to the model itself cannot be compiled with it.
        own, of_children = self._calls.append, self._child_calls.append
        with (
            after_calls([self._model], lambda _, output: own(output)),
            after_calls(children, lambda _, output: of_children(output)),
        ):
            yield

    def add(self, batch: Any, rows: int) -> None:
        """Take the outputs for a batch whose loss was just computed."""
        recipe, calls = self._recipe, self._calls or self._child_calls
        function = recipe.predict or (None if len(calls) == 1 else recipe.fallback)
        if function is not None:
            value = function(self._model, repack(batch))
        elif len(calls) == 1:
            value = calls[0]
        else:
            raise HeldinError(
                f"outputs: the loss calls the model {len(self._calls)} times, so that it is "
                "unknown which outputs are meant; give predict=(model, batch) -> outputs"
            )
        self._calls, self._child_calls = [], []
        if not self.blocks:
            recipe.check_room(value, rows, self._rows)
        outputs = recipe.outputs_of(value, rows)
        self.blocks.append(
            (outputs, recipe.targets_of(batch, rows) if self._with_targets else None)
        )

    def outputs(self, order: Tensor) -> Tensor:
        return _joined("outputs", [o for o, _ in self.blocks], "predict=(model, batch)")[order]

    def targets(self, order: Tensor) -> Tensor:
        targets = [t for _, t in self.blocks if t is not None]
        return _joined("targets", targets, "targets=(batch)")[order]


def _joined(what: str, parts: list[Tensor], argument: str) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise HeldinError(
            f"{what}: rows of different batches have different shapes, {first} and {second}; let "
            f"{argument} return the same shape for every row"
        )
    return torch.cat(parts)
