"""Stopping by the loss on a validation set: the common rule, to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from heldin.crossval import Interval
from heldin.errors import HeldinError
from heldin.pages import Section, Table, csv_link
from heldin.pages.charts import Series, chart
from heldin.state.history import STATE_SCHEMA as HISTORY
from heldin.state.history import History, Record
from heldin.state.schema import check_int, check_schema, model_signature

from .base import StoppingRule, copied, evaluation

__all__ = ["ValidationStopping"]


class ValidationStopping(StoppingRule):
    """Stops when the validation loss has not improved for `patience` checks.

    Args:
        model: the model that is trained.
        loss: returns the validation loss; it is called in evaluation mode and without gradients.
            None: the loss is passed to `step`.
        patience: number of consecutive checks without improvement before training stops.
        improvement: minimum decrease of the loss that counts as an improvement.
        warmup: number of first steps at which training is never stopped.
        every: number of steps between checks.
        restore_best: at the stop, restore weights and buffers of the best check.
        history: maximum number of records, see `heldin.state.History`.
    """

    _state_version = 2
    _saved: ClassVar[dict[str, Any]] = {
        "_streak": int,
        "best_loss": float,
        "best_step": (int, None),
        "last_loss": float,
        "_best": {str: Tensor},
        "history": HISTORY,
    }

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[], float | Tensor] | None = None,
        *,
        patience: int = 5,
        improvement: float = 0.0,
        warmup: int = 0,
        every: int = 1,
        restore_best: bool = True,
        history: int = 4096,
    ) -> None:
        super().__init__()
        name = self.owner
        if not isinstance(model, nn.Module):
            raise HeldinError(f"{name}: expected a torch.nn.Module, got {type(model)}")
        if loss is not None and not callable(loss):
            raise HeldinError(f"{name}: loss must be a function without arguments, got {loss!r}")
        if not improvement >= 0:
            raise HeldinError(f"{name}: improvement must be a number >= 0, got {improvement!r}")
        self.patience = check_int(name, "patience", patience, 1)
        self.warmup = check_int(name, "warmup", warmup, 0)
        self.every = check_int(name, "every", every, 1)
        self.improvement = improvement
        self._restores = restore_best
        self.history = History(check_int(name, "history", history, 2))
        self.best_loss = math.inf
        self.best_step: int | None = None
        self.last_loss = math.nan
        self._best: dict[str, Tensor] = {}
        self._model: nn.Module | None = model
        self._signature = model_signature(model)
        self._loss = loss
        self._streak = 0

    # -- the loop

    @property
    def criterion(self) -> float:
        """Difference between the last loss and the best one; nan before the first check."""
        return self.last_loss - self.best_loss if self.best_step is not None else math.nan

    def step(self, loss: float | Tensor | None = None, *, at: int | None = None) -> bool:
        """Finish a training step; return True if training should stop.

        Args:
            loss: the validation loss, unless the constructor got a function that computes it.
            at: number of optimiser steps so far, for a check at once; None: one more than before.
        """
        model = self._opened("step")
        self._step = self._step + 1 if at is None else at
        if at is not None or self._step % self.every == 0:
            self._check(float(loss) if loss is not None else self._validate(model))
        return self.should_stop

    def _validate(self, model: nn.Module) -> float:
        if self._loss is None:
            raise HeldinError(
                "EarlyStopping.step: no validation loss; pass it to step(), or give the "
                "constructor a function that computes it"
            )
        with evaluation(model):
            return float(self._loss())

    def _check(self, loss: float) -> None:
        at = f"step {self._step}: loss {loss:.6g}"
        if not math.isfinite(loss):
            self.reason = f"step {self._step}: no value, the validation loss is {loss}"
            bad: tuple[str, ...] = ("loss",)
        else:
            bad = ()
            self.last_loss = loss
            if loss < self.best_loss - self.improvement or self.best_step is None:
                self.best_loss, self.best_step, self._streak = loss, self._step, 0
                if self._restores and not self.should_stop:
                    self._best = self._weights()
                self.reason = f"{at}, the best so far"
            else:
                self._streak += 1
                since = f"no better than {self.best_loss:.6g} at step {self.best_step}"
                self.reason = f"{at}, {since} for {self._streak} checks"
        stop = not self.should_stop and not bad and self._streak >= self.patience
        stop = stop and self._step > self.warmup
        if stop:
            self.should_stop, self.stopped_step = True, self._step
            if self._restores:
                self.restore()
        raw = math.nan if bad else loss
        self.history.append(Record(self._step, 0, raw, self.criterion, {}, bad), stop)

    def _weights(self) -> dict[str, Tensor]:
        assert self._model is not None
        state = self._model.state_dict()
        return copied({n: v for n, v in state.items() if isinstance(v, Tensor)})

    def restore(self) -> None:
        """Restore the weights of the best check; automatic at a stop with `restore_best`."""
        if self._model is None or not self._best:
            raise HeldinError(
                "EarlyStopping.restore: no weights are kept; it needs restore_best=True and a "
                "check, before close()"
            )
        self._model.load_state_dict(self._best, strict=False)

    # -- reports

    def intervals(self) -> Mapping[str, Interval]:
        """Return the lowest loss, without an interval."""
        has_best = self.best_step is not None
        return {"loss": Interval(self.best_loss, math.nan, math.nan)} if has_best else {}

    def _headline(self) -> tuple[str, str]:
        if self.best_step is None:
            return "No validation loss yet", self.reason
        return f"Validation loss {self.best_loss:.4g}", self.reason

    def _sections(self) -> list[Section]:
        columns = self.history.columns()
        losses = Series("validation loss", columns["step"], columns["raw"], "a")
        figure = chart([losses], "Validation loss", "step", "loss")
        facts = [("steps", str(self._step)), ("last validation loss", f"{self.last_loss:.4g}")]
        if self.best_step is not None:
            facts += [("lowest", f"{self.best_loss:.6g} at step {self.best_step}")]
        files = {"history.csv": csv_link({"step": columns["step"], "loss": columns["raw"]})}
        return [Section("Validation loss", "", [figure], [Table([], facts)], files)]

    def metrics(self) -> dict[str, float]:
        """Return the current values as a flat mapping for a tracker, without missing ones."""
        values = {
            "heldin/validation_loss": self.last_loss,
            "heldin/best_loss": self.best_loss,
            "heldin/criterion": self.criterion,
            "heldin/should_stop": float(self.should_stop),
        }
        return {name: value for name, value in values.items() if math.isfinite(value)}

    # -- saving and closing

    def _settings(self) -> dict[str, Any]:
        if self._model is not None:
            self._signature = model_signature(self._model)
        settings = {"every": self.every, "improvement": self.improvement}
        return settings | {"restore_best": self._restores, "model": self._signature}

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        if state["best"] and self._model is not None:
            check_schema(state["best"], self._weights(), "['best']")

    def close(self) -> None:
        """Release the model. Results remain available."""
        self._model = self._loss = None
