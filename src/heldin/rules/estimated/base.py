"""What the rules share that follow an estimated test loss along a training run."""

from __future__ import annotations

import math
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.capture.sharding import unwrapped
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.rules.base import StoppingRule
from heldin.rules.ranks import ProcessGroup
from heldin.rules.reporting import EstimateReport
from heldin.state.estimates import STATE_SCHEMA as HISTORY
from heldin.state.estimates import Estimate, EstimateHistory
from heldin.state.schema import (
    check_int,
    check_schema,
    model_signature,
)

from .curves import Patience, best_check, mean_and_error, most_crowded, next_check, votes
from .models import first_trained
from .together import together_of
from .watch import Taken, Watch

__all__ = ["Average", "PathStopping"]

Average = Literal["bagged", "best"]

STATE_SCHEMA = {  # of a saved state
    "history": HISTORY,
    "curves": Tensor,
    "kept": {int: {str: Tensor}},
    "rule": dict,
}


class PathStopping(EstimateReport, StoppingRule):
    """Follows an estimated test loss at log-spaced checks and keeps the weights of the best one.

    A rule says how to follow an optimiser step (`_follow`) and how to estimate the loss of rows
    that were not trained on (`_held_out`).
    """

    _state_schema = STATE_SCHEMA
    name: ClassVar[str]  # by which `heldin.stopping` knows it
    _count: int  # of the training rows
    _same_loss = True  # whether the training loss is of the same kind as the estimated one

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        grid: float,
        average: Average,
        patience: Patience | None,
        memory: int,
        resamples: int,
        seed: int,
        process_group: ProcessGroup,
    ) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise HeldinError(
                f"{name}: optimizer must be a torch.optim.Optimizer, got {type(optimizer)!r}"
            )
        self._together = together_of(name, model, process_group)
        model = unwrapped(model)
        parameter = first_trained(name, model)
        if not isinstance(grid, (int, float)) or not 1 < grid < math.inf:
            raise HeldinError(f"{name}: grid must be a number above 1, got {grid!r}")
        if average not in ("bagged", "best"):
            raise HeldinError(f"{name}: average must be 'bagged' or 'best', got {average!r}")
        if patience is not None and not isinstance(patience, Patience):
            raise HeldinError(
                f"{name}: patience must be a heldin.Patience, or None to go on for ever, got "
                f"{patience!r}"
            )
        self.grid, self.average = float(grid), average
        self.patience = patience
        self.memory = check_int(name, "memory", memory, 0)
        self.resamples = check_int(name, "resamples", resamples, 1)
        self.seed = check_int(name, "seed", seed, 0)

        super().__init__()
        self.reason_chosen = ""  # by `heldin.stopping`
        self.history = EstimateHistory(self.name)

        self._model: nn.Module | None = model
        self._signature = model_signature(model)
        self._device = parameter.device
        self._curves: list[Tensor] = []  # one (rows,) for each check
        self._kept: dict[int, dict[str, Tensor]] = {}  # number of the check -> the model's weights
        self._watch = Watch(name, alone=self._together is None)
        self._release = weakref.finalize(self, self._watch.close)

    def _start(self, optimizer: Optimizer) -> None:
        """To be called at the end of a rule's constructor: the check at step 0."""
        assert self._model is not None
        self._meet()
        self._check()
        self._watch.attach(self._model, optimizer)

    def _meet(self) -> None:
        """Make sure that all processes do the same."""
        if self._together is not None and self._model is not None:
            self._together.meet(self._facts, self._model)

    def _facts(self) -> dict[str, Any]:
        """What must be the same in all processes, by name."""
        names = ("patience", "memory", "resamples", "seed")
        own = {name: getattr(self, name) for name in names}
        return {**self._settings(), **own, "step": self._step}

    # -- what a rule brings

    @abstractmethod
    def _follow(self, taken: Taken, index: Tensor | None, now: bool) -> None:
        """Take notice of an optimiser step; `now`: the model has not moved since."""

    @abstractmethod
    def _held_out(self) -> Tensor:
        """(rows,) estimated losses of rows as if they had not been trained on."""

    @abstractmethod
    def _held_per_trained(self) -> float:
        """Rows that `_held_out` looks at, over those that each model behind it was trained on."""

    @abstractmethod
    def _missing(self) -> float:
        """Share of the rows that each model behind `_held_out` was not trained on."""

    @abstractmethod
    def _training_loss(self) -> float:
        """Of the model (or of its shadows), for the history."""

    @abstractmethod
    def _own_settings(self) -> dict[str, Any]:
        """Arguments that a resumed run must share."""

    @abstractmethod
    def _rule_state(self) -> dict[str, Any]:
        """State of the rule."""

    @abstractmethod
    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `_rule_state` gave."""

    # -- the loop

    def step(self, indices: Tensor | Sequence[int] | None = None) -> bool:
        """Follow the optimiser step just taken; True if training should stop.

        Args:
            indices: numbers of the rows in the minibatch, where they are known (and needed, by
                rules that train shadow models).
        """
        self._opened("step")
        taken = self._watch.take()
        if not taken:
            if self._step == 0:
                raise HeldinError(
                    f"{type(self).__name__}.step: no step of the optimiser was seen. Call it after "
                    "optimizer.step(), with the optimiser that was given to the constructor"
                )
            return self.should_stop  # a gradient scaler skipped the step
        if indices is not None and len(taken) != 1:
            raise HeldinError(
                f"step: indices belong to one optimiser step, but {len(taken)} were taken since "
                "the last call; call step() after each"
            )
        index = None if indices is None else self._numbers(indices)
        self._meet()
        for one in taken:
            self._step += 1
            self._follow(one, index, now=one is taken[-1])
        if self._due():
            self._check()
        return self.should_stop

    @property
    def pending(self) -> bool:
        """Whether the optimiser has stepped since the last `step()`."""
        return bool(self._watch.steps)

    def _due(self) -> bool:
        """Whether it is time for a check."""
        return self._step >= next_check(self.history.last().step, self.grid)

    def _numbers(self, indices: Tensor | Sequence[int]) -> Tensor:
        index = torch.as_tensor(indices, device=self._device).flatten()
        if index.dtype == torch.bool or index.is_floating_point():
            raise HeldinError(f"step: indices must be whole numbers, got {index.dtype}")
        low, high = index.aminmax() if index.numel() else (0, 0)
        if not 0 <= int(low) <= int(high) < self._count:
            raise HeldinError(f"step: indices must lie in 0 ... {self._count - 1}")
        return index.long()

    def _check(self) -> None:
        losses = self._held_out().detach().cpu().double()
        seen = self._training_loss()
        missing = self._missing() if self._same_loss else 0.0
        middle, error = mean_and_error(losses, self._held_per_trained(), missing, seen)
        self._curves.append(losses)
        self._kept[len(self._curves) - 1] = self._snapshot()
        self.history.append(Estimate(self._step, middle, error, seen))
        best = best_check(torch.tensor(self.history.columns()["estimate"]))
        self.history.best_step = self.history[best].step
        self._thin(best)
        since = len(self.history) - 1 - best
        self.reason = (
            f"step {self._step}: estimated loss {middle:.4g}, lowest {self.estimate:.4g} at step "
            f"{self.best_step}"
        )
        if self.should_stop or self.patience is None:
            return
        if self.patience.over(self._step, self.best_step, since):
            self.should_stop, self.stopped_step = True, self._step
            self.history.stopped_step = self._step

    # -- the model

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        assert self._model is not None
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameter
        yield from self._model.named_buffers()

    def _snapshot(self) -> dict[str, Tensor]:
        kept = {name: value.detach().clone() for name, value in self._state()}
        if self._together is not None and self._model is not None:
            self._together.copy_first(kept[name] for name, _ in self._model.named_buffers())
        return kept

    def _thin(self, best: int) -> None:
        """Keep the best weights, and as many others as the memory allows, evenly in log steps."""
        if self.average == "best":
            self._kept = {best: self._kept[best]}
            return
        each = sum(t.numel() * t.element_size() for t in self._kept[best].values())
        while len(self._kept) > 1 and len(self._kept) * each > self.memory:
            steps = {number: self.history[number].step for number in sorted(self._kept)}
            del self._kept[most_crowded(steps, best)]

    # -- results

    @property
    def best_step(self) -> int:
        """The step with the lowest estimated test loss so far."""
        assert self.history.best_step is not None
        return self.history.best_step

    def _best(self) -> Estimate:
        return next(r for r in self.history if r.step == self.best_step)

    @property
    def estimate(self) -> float:
        """Estimated test loss at the best step."""
        return self._best().estimate

    @property
    def standard_error(self) -> float:
        """Of the estimate: the test loss lay within one in 2 of 3 runs of our study.

        See docs/which-rule.md for how it is computed, and how often the truth lies within it.
        """
        return self._best().standard_error

    @property
    def shares(self) -> dict[int, float]:
        """The weights of which step go into the restored model with which share."""
        numbers = sorted(self._kept)
        if self.average == "best":
            return {self.best_step: 1.0}
        curves = torch.stack([self._curves[i] for i in numbers], dim=1)
        found = votes(curves, self.resamples, self.seed, self._held_per_trained())
        shares = found.tolist()
        return {
            self.history[i].step: share
            for i, share in zip(numbers, shares, strict=True)
            if share > 0
        }

    def restore(self) -> None:
        """Put the chosen weights (averaged, if so asked) into the model."""
        self._opened("restore")
        if self._step > self.history.last().step:
            self._check()  # the last weights are a candidate too
        if self.best_step == 0 and self._step > 0 and self.estimate != 0:  # 0 cannot be bettered
            warnings.warn(
                f"{type(self).__name__}: in {self._step} steps the estimated loss never fell below "
                f"that of the model before training ({self.estimate:.4g}), so its untrained "
                "weights are restored. Is the learning rate too high, do the inputs tell nothing "
                "about the targets, or does a fold take all rows of a kind away? "
                + more("never-better-than-untrained"),
                HeldinWarning,
                stacklevel=2,
            )
        numbers = {self.history[i].step: i for i in self._kept}
        parts = [(share, self._kept[numbers[step]]) for step, share in self.shares.items()]
        heaviest = max(parts, key=lambda part: part[0])[1]
        with torch.no_grad():
            for name, value in self._state():
                if value.is_floating_point() or value.is_complex():
                    mixed = sum(share * kept[name] for share, kept in parts)
                    value.copy_(mixed)  # type: ignore[arg-type]
                else:
                    value.copy_(heaviest[name])

    def metrics(self) -> dict[str, float]:
        """The state as a flat mapping for any tracker; values that do not exist are left out."""
        last = self.history.last()
        values = {
            "heldin/estimate": last.estimate,
            "heldin/standard_error": last.standard_error,
            "heldin/training_loss": last.training_loss,
            "heldin/best_estimate": self.estimate,
            "heldin/best_step": float(self.best_step),
            "heldin/should_stop": float(self.should_stop),
        }
        return {name: value for name, value in values.items() if not math.isnan(value)}

    # -- saving and closing

    def __getstate__(self) -> dict[str, Any]:
        if self._model is not None:
            raise HeldinError(
                f"{type(self).__name__}: a rule that follows a run belongs to its model, optimiser "
                "and loader, and a copy would follow nothing; make another one for the other model "
                "and give it the state: other.load_state_dict(stopping.state_dict())"
            )
        return dict(vars(self))

    def _settings(self) -> dict[str, Any]:
        own = {"grid": self.grid, "average": self.average, "rows": self._count}
        return own | self._own_settings() | {"model": self._signature}

    def _own_state(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "curves": torch.stack(self._curves, dim=1),
            "kept": {number: dict(weights) for number, weights in self._kept.items()},
            "rule": self._rule_state(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs; take it before `close()`."""
        self._opened("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: all later values are the same to the last bit."""
        self._opened("load_state_dict")
        super().load_state_dict(state)
        if self._together is not None:
            self._together.forget()
        self._watch.take()
        self._watch.calls = []

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        device = self._device
        checks = len(state["history"]["records"])
        check_schema(
            state["curves"], self._curves[0].new_empty(len(self._curves[0]), checks), "['curves']"
        )
        if not state["kept"] or not all(0 <= number < checks for number in state["kept"]):
            raise ValueError(f"weights of the checks {list(state['kept'])} of {checks}")
        form = {name: value.detach() for name, value in self._state()}
        for number, weights in state["kept"].items():
            check_schema(weights, form, f"['kept'][{number}]")
        self._load_rule_state(state["rule"])
        self.history.load_state_dict(state["history"])
        self._curves = list(state["curves"].unbind(1))
        self._kept = {
            number: {key: value.to(device) for key, value in weights.items()}
            for number, weights in state["kept"].items()
        }

    def close(self) -> None:
        """Remove all hooks and release the model. Results (history, estimate) remain available."""
        self._release()
        self._model = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._model is not None:
            self.restore()
        self.close()
