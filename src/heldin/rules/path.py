"""What the rules share that follow an estimated test loss along a training run."""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.capture.sharding import unwrapped
from heldin.distributed.shadow_group import refuse_unpooled_ddp, shadow_group_for
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.loop.events import OptimizerStep
from heldin.loop.observer import LoopObserver
from heldin.pause import paused
from heldin.rules.calibration import is_scalable, scale_outputs
from heldin.rules.estimated import EstimatedRun
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Folds, LeaveOneOut
from heldin.rules.outcome import Outcome
from heldin.rules.policy import densest_check, mean_and_error, next_check
from heldin.rules.schedules import fixed_schedule, warn_of_schedule
from heldin.shadows.exchange import group_settings
from heldin.shadows.models import check_trainable, note_trained, warn_of_training
from heldin.shadows.outputs import OutputRecipe
from heldin.shadows.replayed import has_evaluation_mode
from heldin.shadows.step_check import StepCheck
from heldin.state.estimates import STATE_SCHEMA as HISTORY
from heldin.state.estimates import Estimate, EstimateHistory
from heldin.state.schema import check_schema, model_signature

__all__ = ["PathStopping"]

REPEATED = ("_outcome", "_keeps_outputs", "_curves", "_kept", "_levels", "history", "reason")
STATE_SCHEMA = {  # of a saved state
    "history": HISTORY,
    "curves": Tensor,
    "kept": {int: {str: Tensor}},
    "outcome": dict,
    "levels": Tensor,
    "void": int,
    "behind": int,
    "next_look": int,
    "rule": dict,
}


class PathStopping(EstimatedRun):
    """Follows an estimated test loss at log-spaced checks and keeps the weights of the best one.

    A rule says how to follow an optimiser step (`_follow`); its backend estimates the loss of rows
    that were not trained on.
    """

    _state_schema = STATE_SCHEMA
    _is_light = False  # whether shadows are trained on a share of the rows of each batch

    def __init__(self, inputs: RunInputs, rule: Folds | LeaveOneOut) -> None:
        self.owner = getattr(inputs.data, "owner", self.owner)  # of a framework's run
        name, optimizer = self.owner, inputs.optimizer
        if not isinstance(optimizer, Optimizer):
            raise HeldinError(
                f"{name}: optimizer must be a torch.optim.Optimizer, got {type(optimizer)!r}"
            )
        self._process_group = shadow_group_for(name, inputs.model, inputs.process_group)
        self._resumes = inputs.resumes
        model = unwrapped(inputs.model)
        self._device = check_trainable(name, model).device
        super().__init__(inputs, rule)
        self.on_check: Callable[[], Any] | None = None  # called after every check of the loop
        self.schedule: str | None = None  # of a framework, with a fixed end, in words
        self._model: nn.Module | None = model
        self._optimizer: Any = optimizer
        self._average: nn.Module | None = None  # an average of its weights, which is estimated
        self._signature = model_signature(model)
        self.run.describe(model, optimizer)
        self.scaled_names: list[str] = []  # of parameters that were divided by the temperature
        self._frozen: list[tuple[nn.Parameter, Tensor]] = []  # of them, and their values before
        self._doubted = False  # whether a warning was given that nothing was learnt
        self._rate_sum, self._rated = 0.0, 0  # of the steps so far, and their number
        self._leads = False  # whether shadows are ahead of the model
        self._next_look = 0  # step of the next check for patience in epochs; 0: none
        self._backend: Any = None  # the shadows, or what stands in for them
        self._release: Any = None

    def _start(self) -> None:
        """To be called at the end of a rule's constructor: the check at step 0."""
        assert self._model is not None
        name, check, alone = self.owner, self._step_check(), self._process_group is None
        self._observer = LoopObserver(
            name,
            group_settings,
            on_call=None if check is None else check.on_call,
            on_step=None if check is None else check.on_step,
            on_stepped=None if check is None else check.on_stepped,
            refuse=functools.partial(refuse_unpooled_ddp, name) if alone else None,
        )
        self._release = weakref.finalize(self, self._observer.close)
        self._check_ranks_agree()
        self._check()
        self._observer.attach(self._model, self._optimizer)
        if not self._resumes:
            warn_of_training(name, self._model)

    def _step_check(self) -> StepCheck | None:
        """Return what compares the loop's steps with those that the rule takes them for."""
        check: StepCheck = self._backend.check
        return check

    @property
    def backend(self) -> Any:
        """The shadows; `backend.weights_of(number)` are the weights of one."""
        return self._backend

    def _check_ranks_agree(self) -> None:
        """Make sure that all processes do the same."""
        if self._process_group is not None and self._model is not None:
            self._process_group.meet(self._facts, self._model)

    def _facts(self) -> dict[str, Any]:
        """Return the settings that must be the same in all processes, by name."""
        names = ("patience", "memory", "resamples", "seed")
        own = {name: getattr(self, name) for name in names}
        return {**self._settings(), **own, "step": self._step}

    # -- what a rule brings

    @abstractmethod
    def _follow(self, taken: OptimizerStep, index: Tensor | None) -> None:
        """Take notice of an optimiser step on rows; index: their numbers, where they are known."""

    def _row_groups(self, rows: Tensor) -> Tensor | None:
        """Return the groups of rows."""
        return None

    @abstractmethod
    def _own_settings(self) -> dict[str, Any]:
        """Arguments that a resumed run must share."""

    def _rule_state(self) -> dict[str, Any]:
        """Return the state of the rule."""
        state: dict[str, Any] = self._backend.state_dict()
        return state

    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `_rule_state` gave."""
        self._backend.load_state_dict(state)

    # -- the loop

    def step(self, indices: Tensor | Sequence[int] | None = None) -> bool:
        """Follow the optimiser step just taken; True if training should stop.

        Args:
            indices: numbers of the rows in the minibatch, where they cannot be recognised.
        """
        self._opened("step")
        taken = self._observer.take()
        if not taken:
            if self._step == 0:
                raise HeldinError(
                    f"{self.owner}.step: no step of the optimiser was seen. Call it after "
                    "optimizer.step(), with the optimiser that was given to the constructor"
                )
            return self.should_stop  # a gradient scaler skipped the step
        if indices is not None and len(taken) != 1:
            raise HeldinError(
                f"step: indices belong to one optimiser step, but {len(taken)} were taken since "
                "the last call; call step() after each"
            )
        index = self._numbers(indices)
        self._check_ranks_agree()
        for one in taken:
            self._step += 1
            self._note_rate(one.settings, 1)
            self._follow(one, index)
        if self._due():
            self._check_and_tell()
        return self.should_stop

    @property
    def pending(self) -> bool:
        """Whether the optimiser has stepped since the last `step()`."""
        return self._observer.pending

    def _due(self) -> bool:
        """Whether it is time for a check."""
        return self._looks or self._step >= next_check(self.history.last().step, self.grid)

    @property
    def _looks(self) -> bool:
        """Whether patience in epochs asks for a check."""
        return 0 < self._next_look <= self._step

    def _numbers(self, indices: Tensor | Sequence[int] | None) -> Tensor | None:
        if indices is None:
            return None
        index = torch.as_tensor(indices, device=self._device).flatten()
        if index.dtype == torch.bool or index.is_floating_point():
            raise HeldinError(f"step: indices must be whole numbers, got {index.dtype}")
        low, high = index.aminmax() if index.numel() else (0, 0)
        if not 0 <= int(low) <= int(high) < self._count:
            raise HeldinError(f"step: indices must lie in 0 ... {self._count - 1}")
        return index.long()

    def _check(self) -> None:
        self._intervals, self._values = {}, {}
        if self._step and self.finish is None:
            self.finish = False  # one warning is enough
            warn_of_schedule(self.owner, self.schedule or fixed_schedule(self._optimizer))
        losses = self._backend.held_out().detach().cpu().double()
        number, estimated, outcome = len(self._curves), losses, self._outcome
        self._note_rate(self._optimizer.param_groups, self._step - self._rated)
        self._rates[self._step] = self._rate_sum
        if self._keeps_outputs:
            held = self._backend.held_out_outputs()
            if number == 0:
                weights = self._backend.row_weights(held.rows)
                outcome.begin(held, weights, self._row_groups(held.rows))
            losses, estimated = outcome.add(number, losses, held.outputs)
        levels = self._backend.levels() if self._is_light else None
        seen = self._backend.training_loss()
        if levels is not None:
            self._levels.append(levels)
            seen = levels[1]
        missing = self._missing() if self._same_loss else 0.0
        middle, error = mean_and_error(estimated, self._held_per_trained(), missing, seen)
        error = math.hypot(error, self._light_error() * middle)
        self._curves.append(losses)
        self._kept[number] = {} if self._leads else self._snapshot()
        self.history.append(Estimate(self._step, middle, error, seen))
        lowest, chosen = self._lowest(), self.best_number
        best = self._matched()[lowest]
        self.history.best_step = self.history[best].step
        outcome.thin(chosen, self.history.columns()["step"])
        if self._keeps_outputs and chosen == number:
            fits = self._backend.copies * self._snapshot_bytes() <= self.memory
            outcome.take_members(self._backend.members() if fits else [])
        self._thin(number if self.finish else best)
        self._next_look, patience = 0, self._patience_in_steps()
        if self.should_stop:  # the reason is that of the stop
            return
        self.reason = f"step {self._step}: {self._compared(number, lowest)}"
        if patience is None:
            return
        if not patience.stops(*self._course(lowest), self._epochs()):
            if isinstance(self.patience, int):
                limit = patience.step_limit(self.history[lowest].step - self._behind) + self._behind
                spacing = patience.slack // patience.checks
                self._next_look = max(self._step + 1, min(self._step + spacing, limit))
            self.reason += f"; stops by step {self.stop_limit()}, unless the estimate falls"
        else:
            self.should_stop, self.stopped_step = True, self._step
            self.history.stopped_step = self._step

    def _compared(self, number: int, best: int) -> str:
        """Return what is monitored at a check, and at the best one, in words."""
        name, word = "estimated loss", "lowest"
        if self._outcome.by_metric:
            name, word = self._outcome.monitor, "best"
        now, then = (f"{self.monitored(i):.4g}" for i in (number, best))
        return f"{name} {now}, {word} {then} at step {self.history[best].step}"

    def _note_rate(self, groups: Any, steps: int) -> None:
        """Add steps with the learning rates of now to the sum for `plan`."""
        if steps and groups and "lr" in groups[0]:
            self._rate_sum += float(groups[0]["lr"]) * steps
            self._rated += steps

    def _check_and_tell(self) -> None:
        self._check()
        if self.on_check is not None:
            self.on_check()

    def follow_outputs(self, recipe: OutputRecipe, outcome: Outcome) -> None:
        """Keep the outputs of held-out rows at every check; the one at step 0 is repeated."""
        assert self._step == 0
        self._backend.keep_outputs(recipe)
        before = {name: getattr(self, name) for name in REPEATED}
        self._outcome, self._curves, self._kept, self._levels = outcome, [], {}, []
        self._keeps_outputs, self.history = True, EstimateHistory(self.history.rule)
        try:
            if outcome.calibrates and not outcome.required:
                with self._backend.trial():
                    model = self._average or self._opened("predict")
                    outcome.calibrates = is_scalable(model, *self._backend.example())
                if not outcome.calibrates:
                    outcome.uncalibrated = "the last layer cannot be scaled exactly"
            self._check()
            self.metric_values()  # an error now, not after the training
        except BaseException:
            self._backend.keep_outputs(None)
            vars(self).update(before)
            raise
        finally:
            self._backend.check.renew()  # weights were scaled to try it, and put back bit for bit

    # -- the model

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is kept at a check and restored: trained weights, and buffers."""
        assert self._model is not None
        source = self._average or self._model
        parameters = dict(source.named_parameters())
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, parameters[name]
        yield from source.named_buffers()

    def _snapshot(self) -> dict[str, Tensor]:
        kept = {name: value.detach().clone() for name, value in self._state()}
        if self._process_group is not None and self._model is not None:
            self._process_group.copy_first(kept[name] for name, _ in self._model.named_buffers())
        return kept

    def _snapshot_bytes(self) -> int:
        return sum(value.numel() * value.element_size() for _, value in self._state())

    def _thin(self, best: int) -> None:
        """Keep the best weights, and as many others as the memory allows, evenly in log steps."""
        if (self.finish or self._averages_none) and not self._levels:
            self._kept = {best: self._kept[best]}
            return
        each = self._snapshot_bytes()
        while len(self._kept) > 1 and len(self._kept) * each > self._outcome.room:
            steps = {number: self.history[number].step for number in sorted(self._kept)}
            del self._kept[densest_check(steps, best)]

    def restore(self) -> None:
        """Put the chosen weights (averaged, if so asked) into the model."""
        self._opened("restore")
        if self._step > self.history.last().step:
            self._check()  # the last weights are a candidate too
        if has_evaluation_mode(self._optimizer):
            self._optimizer.eval()  # the weights that are restored are those of evaluation
        untrained = self.best_step == 0 and self._step > 0 and not self.finish
        if untrained and self.estimate != 0:  # 0 cannot be bettered
            warnings.warn(
                f"{self.owner}: in {self._step} steps the estimated loss never fell below "
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
                whole = not (value.is_floating_point() or value.is_complex())
                if isinstance(value, nn.Parameter) and not whole:
                    mixed = sum(share * kept[name] for share, kept in parts)
                    value.copy_(mixed)  # type: ignore[arg-type]
                else:  # statistics and other buffers belong to the weights of one check
                    value.copy_(heaviest[name])
        self._calibrate()
        if self._average is not None:
            self._opened("restore").load_state_dict(self._average.state_dict())
        if not untrained:
            note_trained(self._opened("restore"))

    def _calibrate(self) -> None:
        """Divide the outputs of the restored model by the temperature."""
        with torch.no_grad():
            for p, old in self._frozen:
                p.copy_(old)
        self.scaled_names, self._frozen = [], []
        if self.temperature != 1:
            model = self._average or self._opened("restore")
            with paused():
                scaled = scale_outputs(model, self.temperature, *self._backend.example())
            self.scaled_names, self._frozen = scaled
        over = bool(self.should_stop or self.finish)
        doubt = self._outcome.doubt(self.best_number) if over and not self._doubted else ""
        if doubt and self.best_step:
            self._doubted = True
            warnings.warn(
                f"{self.owner}: {doubt}: the model has learnt nothing that holds on other rows. Do "
                "the inputs say anything about the targets? " + more("no-better-than-a-constant"),
                HeldinWarning,
                stacklevel=3,
            )

    # -- saving and closing

    def __getstate__(self) -> dict[str, Any]:
        if self._model is not None:
            raise HeldinError(
                f"{self.owner}: a rule that follows a run belongs to its model, optimiser "
                "and loader, and a copy would follow nothing; make another one for the other model "
                "and give it the state: other.load_state_dict(stopping.state_dict())"
            )
        return dict(vars(self))

    def _settings(self) -> dict[str, Any]:
        shared = {"grid": self.grid, "average": self.average, "rows": self._count}
        shared["finish"] = bool(self.finish)
        monitor = {"monitor": self._outcome.monitor} if self._keeps_outputs else {}
        return {**shared, **monitor, **self._own_settings(), "model": self._signature}

    def _own_state(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "curves": torch.stack(self._curves, dim=1),
            "kept": {number: dict(weights) for number, weights in self._kept.items()},
            "outcome": self._outcome.state_dict() if self._keeps_outputs else {},
            "levels": torch.tensor(self._levels, dtype=torch.float64).reshape(-1, 2),
            "void": self._void,
            "behind": self._behind,
            "next_look": self._next_look,
            "rule": self._rule_state(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs; take it before `close()`."""
        self._opened("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: all later values are the same to the last bit."""
        self._opened("load_state_dict")
        super().load_state_dict(state)
        if self._process_group is not None:
            self._process_group.forget()
        self._observer.forget()

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        device = self._device
        checks = len(state["history"]["records"])
        check_schema(
            state["curves"], self._curves[0].new_empty(len(self._curves[0]), checks), "['curves']"
        )
        if not state["kept"] or not all(0 <= number < checks for number in state["kept"]):
            raise ValueError(f"weights of the checks {list(state['kept'])} of {checks}")
        levels = state["levels"].tolist()
        if len(levels) != (checks if self._levels else 0):
            raise ValueError(f"training losses of {len(levels)} of {checks} checks")
        form = {name: value.detach() for name, value in self._state()}
        for number, weights in state["kept"].items():
            check_schema(weights, form, f"['kept'][{number}]")
        if self._keeps_outputs:
            self._outcome.load_state_dict(state["outcome"], checks)
        self._load_rule_state(state["rule"])
        self.history.load_state_dict(state["history"])
        self._curves = list(state["curves"].unbind(1))
        self._rate_sum = math.nan  # rates before the state are not known
        self._intervals, self._values = {}, {}
        self._void, self._behind = state["void"], state["behind"]
        self._next_look = state["next_look"]
        self._levels = [(shadows, model) for shadows, model in levels]
        self._kept = {
            number: {key: value.to(device) for key, value in weights.items()}
            for number, weights in state["kept"].items()
        }

    def close(self) -> None:
        """Remove all hooks and release the model. Results (history, estimate) remain available."""
        self._release()
        if self._model is not None:
            self._backend.close()
        self._frozen = []
        self._kept = {number: {} for number in self._kept}
        self._model = self._optimizer = self._average = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._model is not None:
            self.restore()
        self.close()
