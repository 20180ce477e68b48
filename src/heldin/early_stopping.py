"""`heldin.EarlyStopping`: one object that says when to stop, and how good the model will be."""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from heldin.capture.sharding import unwrapped
from heldin.errors import HeldinError
from heldin.rules.estimated.base import PathStopping
from heldin.rules.estimated.batches import tensors_in, to_device
from heldin.rules.estimated.choose import stopping as choose
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.folds import FoldStopping
from heldin.rules.estimated.leave_one_out import LeaveOneOutStopping
from heldin.rules.estimated.shadows import PATIENCE, ShadowModels
from heldin.rules.estimated.stacked import StackedShadows
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.options import Auto, Evidence, Folds, LeaveOneOut, Rule, Validation, resolve
from heldin.rules.validation import ValidationStopping
from heldin.state.estimates import COVERAGE
from heldin.state.schema import check_int

__all__ = ["EarlyStopping", "Interval"]

NAME = "heldin.EarlyStopping"
CHECKS = 3  # fewest checks after the best one before patience in epochs may end the run


@dataclass(frozen=True)
class Interval:
    """A number with an interval around it.

    Attributes:
        value: the estimate.
        low, high: the ends of the interval; nan if there is none.
        coverage: share of the runs of our study in which such an interval held the truth; None: not
            measured for this configuration.

    >>> Interval(0.5, 0.4, 0.6)
    Interval(value=0.5, low=0.4, high=0.6, coverage=None)
    """

    value: float
    low: float
    high: float
    coverage: float | None = None


class EarlyStopping:
    """Says when to stop training and estimates the test loss, without a validation set.

    The object observes the optimiser: no call inside the loop is needed. The model trains on every
    row; what is measured depends on `rule`.

    Args:
        model: the model that is trained.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> the mean or the sum of the rows' losses.
        data: the rows that the model is trained on: tensors (x, y), a Dataset or the DataLoader of
            the loop. rule="evidence" needs none.
        rule: "auto", "folds", "shadow", "leave-one-out", "evidence", or one of `heldin.rules`.
        batch_loss: (model, batch) -> loss, in place of loss_fn, for any model and batch.
        eval_loss: (model, batch) -> the loss to estimate (default: batch_loss).
        eval_data: the same rows, shown without augmentation, for the held-out losses.
        clip: how the loop clips gradients: the largest norm, or a function of the parameters.
        groups: (n,) names or numbers; rows with the same one are held out jointly.
        stratify: (n,) classes; each fold gets its share of every class.
        sample_weight: (n,) weights of the rows in the loop's loss.
        patience: number of epochs after the best one, or a `heldin.Patience`; None: never stop.
        budget, memory: shorthand for `heldin.rules.Auto(budget=, memory=)`.
        seed: of the folds, the draws and the shadows' random numbers.
        process_group: the processes that train the model jointly, see `heldin.FoldStopping`.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 20)
    >>> y = x[:, :1] + torch.randn(60, 1)
    >>> model = torch.nn.Linear(20, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    >>> loss_fn = torch.nn.MSELoss()
    >>> loader = torch.utils.data.DataLoader(
    ...     torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True
    ... )
    >>> stopping = heldin.EarlyStopping(model, optimizer, loss_fn, loader)
    >>> for epoch in stopping.epochs(500):
    ...     for inputs, targets in loader:
    ...         optimizer.zero_grad()
    ...         loss_fn(model(inputs), targets).backward()
    ...         optimizer.step()
    >>> stopping.should_stop
    True
    >>> interval = stopping.estimates["loss"]
    >>> 0.8 < interval.value < 1.8                     # the noise alone is 1
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Any = None,
        data: Any = None,
        rule: str | Rule = "auto",
        *,
        batch_loss: Any = None,
        eval_loss: Any = None,
        eval_data: Any = None,
        clip: Any = None,
        groups: Any = None,
        stratify: Any = None,
        sample_weight: Tensor | None = None,
        patience: int | Patience | str | None = "default",
        budget: float | None = None,
        memory: int | None = None,
        seed: int = 0,
        process_group: Any = "auto",
    ) -> None:
        self.rule = resolve(rule, budget, memory)
        self.seed = check_int(NAME, "seed", seed, 0)
        self._optimizer: Optimizer | None = _check_optimizer(optimizer)
        _check_model(model)
        self._patience = _check_patience(patience)
        self._epoch_ends: list[int] = []  # the step at the end of every epoch
        self._step = 0
        self._batches: list[tuple[Any, Any]] = []  # announced by note_batch
        self._stopped_weights: dict[str, Tensor] | None = None
        self._model: nn.Module | None = unwrapped(model)
        self._loader = data if isinstance(data, DataLoader) else None
        described = {
            "eval_loss": eval_loss,
            "eval_data": eval_data,
            "clip": clip,
            "groups": groups,
            "stratify": stratify,
            "sample_weight": sample_weight,
        }
        options = {name: value for name, value in described.items() if value is not None}
        self._inner = self._make(model, loss_fn, batch_loss, data, options, process_group)
        self._follow(self._optimizer)

    # -- making the rule

    def _make(
        self,
        model: nn.Module,
        loss_fn: Any,
        batch_loss: Any,
        data: Any,
        options: dict[str, Any],
        process_group: Any,
    ) -> Any:
        """Return the object that follows the run."""
        rule = self.rule
        if isinstance(rule, Evidence):
            options |= {"loss_fn": loss_fn, "batch_loss": batch_loss}
            self._refuse("evidence", {k: v for k, v in options.items() if v is not None})
            return self._make_evidence(model, rule, data, process_group)
        if isinstance(rule, Validation):
            self._refuse("validation", options)
            return self._make_validation(model, rule, loss_fn, batch_loss)
        if data is None:
            raise HeldinError(
                f"{NAME}: data is missing: the tensors (x, y), the Dataset or the DataLoader that "
                "the model is trained on"
            )
        options |= {
            "patience": self._in_steps(len(self._loader) if self._loader else None),
            "seed": self.seed,
            "process_group": process_group,
        }
        if isinstance(rule, LeaveOneOut):
            if batch_loss is not None:
                raise HeldinError(f"{NAME}: leave-one-out needs loss_fn and tensors, no batch_loss")
            extra = ("eval_loss", "eval_data", "clip", "groups", "stratify")
            self._refuse("leave-one-out", {k: v for k, v in options.items() if k in extra})
            return LeaveOneOutStopping(
                model,
                self._opened_optimizer(),
                loss_fn,
                data,
                rule.probes,
                **options,
                **_path_options(rule),
            )
        if batch_loss is not None:
            options["batch_loss"] = batch_loss
        if isinstance(rule, Folds):
            return FoldStopping(
                model,
                self._opened_optimizer(),
                loss_fn,
                data,
                rule.folds,
                shadows=rule.shadows,
                engine=rule.engine,
                **options,
                **_path_options(rule),
            )
        assert isinstance(rule, Auto)
        return choose(
            "auto",
            model,
            self._opened_optimizer(),
            loss_fn,
            data,
            budget=rule.budget,
            memory=rule.memory,
            **options,
        )

    def _make_evidence(self, model: nn.Module, rule: Evidence, data: Any, group: Any) -> Any:
        window = 1
        if rule.window == "epoch":
            if self._loader is None:
                raise HeldinError(
                    f"{NAME}: window='epoch' needs the DataLoader of the loop as data, to know how "
                    "many steps an epoch has; or pass the number of steps"
                )
            window = max(1, len(self._loader) // rule.check_every)
        else:
            window = rule.window
            if data is not None:
                raise HeldinError(
                    f"{NAME}: rule='evidence' uses no data, except for window='epoch'; leave it out"
                )
        if self._patience != "default":
            raise HeldinError(f"{NAME}: rule='evidence' has checks= in place of patience=")
        more = {} if rule.coordinates is None else {"budget": rule.coordinates}
        return EvidenceStopping(
            model,
            rule.parameter_groups,
            smoothing=rule.smoothing,
            window=window,
            patience=rule.checks,
            warmup=rule.warmup,
            every=rule.check_every,
            arming=rule.arm_threshold,
            across=rule.group_reduction,
            weighted=rule.weight_by_batch_size,
            start=rule.initial_average,
            correction=rule.correction,
            dead="out" if rule.dead_coordinates == "exclude" else "zero",
            reduction=rule.loss_reduction,
            estimator=rule.estimator,
            seed=self.seed,
            batch_dim=rule.batch_dim,
            parameters=rule.parameters,
            process_group=group,
            **more,
        )

    def _make_validation(
        self, model: nn.Module, rule: Validation, loss_fn: Any, batch_loss: Any
    ) -> Any:
        if (loss_fn is None) == (batch_loss is None):
            raise HeldinError(f"{NAME}: give either loss_fn or batch_loss")
        patience = 5 if self._patience == "default" else self._patience
        if not isinstance(patience, int):
            raise HeldinError(
                f"{NAME}: with rules.Validation, patience is a number of checks, got {patience!r}"
            )
        device = next(model.parameters()).device

        def loss() -> float:
            total = rows = 0.0
            for batch in _batches(rule.data):
                moved = to_device(batch, device)
                count = len(next(tensors_in(moved)))
                if batch_loss is not None:
                    value = batch_loss(model, moved)
                else:
                    *inputs, targets = moved
                    value = loss_fn(model(*inputs), targets)
                total += float(value) * count
                rows += count
            return total / rows

        return ValidationStopping(
            model, loss, patience=patience, improvement=rule.improvement, restore_best=True
        )

    def _refuse(self, rule: str, options: Mapping[str, Any]) -> None:
        """Refuse arguments that would be ignored."""
        if options:
            name = next(iter(options))
            raise HeldinError(f"{NAME}: {name} has no effect with rule {rule!r}; leave it out")

    def _in_steps(self, epoch_steps: int | None) -> Patience | None:
        """Return the patience of the rule, as far as the number of steps in an epoch is known."""
        if self._patience == "default":
            return PATIENCE
        if isinstance(self._patience, int):
            if epoch_steps is None:
                return None
            return Patience(1.0, self._patience * epoch_steps, CHECKS)
        assert self._patience is None or isinstance(self._patience, Patience)
        return self._patience

    # -- following the optimiser

    def _follow(self, optimizer: Optimizer) -> None:
        alive = weakref.ref(self)  # hooks keep no lost object alive

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            stopping = alive()
            if stopping is not None:
                stopping._before_step(_has_closure(args, kwargs))

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            stopping = alive()
            if stopping is not None:
                stopping._after_step()

        handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self._release = weakref.finalize(self, _remove, handles)

    def _before_step(self, with_closure: bool) -> None:
        """Form the value of evidence, whose weights are those before the step."""
        if not isinstance(self._inner, EvidenceStopping) or self._inner.should_stop:
            return
        if with_closure:
            raise HeldinError(
                f"{NAME}: with rule='evidence' the gradients must be there before "
                "optimizer.step(); call backward() before it, not in a closure"
            )
        stops = self._inner.step()
        if stops and self._model is not None:
            self._stopped_weights = _weights(self._model)

    def _after_step(self) -> None:
        self._step += 1
        inner = self._inner
        if isinstance(inner, EvidenceStopping):
            return
        if isinstance(inner, ValidationStopping):
            assert isinstance(self.rule, Validation)
            every = self.rule.check_every
            if every is not None and self._step % every == 0 and not inner.should_stop:
                inner.step()
            return
        batches, self._batches = self._batches, []
        if not batches:
            inner.step()
        elif isinstance(inner, ShadowModels) and not isinstance(inner._team, StackedShadows):
            for batch, indices in batches:
                inner.add_batch(batch, indices)
            inner.step()
        else:
            rows = [torch.as_tensor(indices) for _, indices in batches if indices is not None]
            if len(rows) != len(batches):
                raise HeldinError(f"{NAME}.note_batch: pass the row numbers too: indices=...")
            inner.step(torch.cat(rows))

    def note_batch(self, batch: Any, indices: Tensor | Sequence[int] | None = None) -> None:
        """Announce the batch of the coming step, where it cannot be recognised.

        Args:
            batch: the batch, as the model is trained on it.
            indices: the numbers of its rows, unless the loader given as data returned it.
        """
        self._batches.append((batch, indices))

    def step(self) -> bool:
        """Return `should_stop`, for loops that ask after every step."""
        return self.should_stop

    # -- loops

    def epochs(self, max_epochs: int) -> Iterator[int]:
        """Yield epoch numbers until the rule stops; then restore the best weights and close.

        Args:
            max_epochs: largest number of epochs.
        """
        check_int(NAME, "max_epochs", max_epochs, 1)
        self._opened("epochs")
        try:
            for epoch in range(len(self._epoch_ends), max_epochs):
                yield epoch
                self._end_epoch()
                if self.should_stop:
                    break
        except GeneratorExit:  # the loop was left by break
            self._end_epoch()
            self._finish()
            raise
        self._finish()

    def _end_epoch(self) -> None:
        first = self._epoch_ends[-1] if self._epoch_ends else 0
        if self._step > first:
            self._epoch_ends.append(self._step)
            if isinstance(self._inner, PathStopping) and isinstance(self._patience, int):
                self._inner.patience = self._in_steps(self._step - first)
        if isinstance(self._inner, ValidationStopping) and not self._inner.should_stop:
            assert isinstance(self.rule, Validation)
            if self.rule.check_every is None:
                self._inner.step()

    def _finish(self) -> None:
        if self._step:
            self.restore()
        self.close()

    def fit(
        self,
        batch_size: int | None = None,
        max_epochs: int = 1000,
        *,
        generator: torch.Generator | None = None,
    ) -> EarlyStopping:
        """Train the model until the rule stops, and restore the best weights.

        Small networks on tensors train in one stack with their shadows. For models that need more
        than a loss and a step, write the loop.

        Args:
            batch_size: rows in a minibatch (default: all rows; a DataLoader has its own).
            max_epochs: largest number of epochs.
            generator: of the order of the rows.

        >>> import heldin, torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(60, 20)
        >>> y = x[:, :1] + torch.randn(60, 1)
        >>> model = torch.nn.Linear(20, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        >>> stopping = heldin.EarlyStopping(model, optimizer, torch.nn.MSELoss(), (x, y))
        >>> stopping.fit(batch_size=16).should_stop
        True
        """
        self._opened("fit")
        check_int(NAME, "max_epochs", max_epochs, 1)
        inner = self._inner
        if not isinstance(inner, ShadowModels) or not isinstance(inner._team, StackedShadows):
            raise HeldinError(
                f"{NAME}.fit: it trains networks on tensors with loss_fn by folds, and this run "
                "has another engine; write the loop: for epoch in stopping.epochs(...)"
            )
        rows = inner._count
        if self._loader is not None:
            steps = len(self._loader)
        else:
            steps = -(-rows // (batch_size or rows))
        if isinstance(self._patience, int):
            inner.patience = self._in_steps(steps)
        inner.train(batch_size, max_steps=max_epochs * steps, generator=generator)
        self._step = inner._step
        self._epoch_ends = [*range(steps, self._step + 1, steps)]
        self._finish()
        return self

    def __enter__(self) -> EarlyStopping:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._model is None:
            return
        if kind is None:
            self._finish()
        else:
            self.close()

    # -- results

    @property
    def should_stop(self) -> bool:
        """Whether the rule asks to stop."""
        return bool(self._inner.should_stop)

    @property
    def stopped_step(self) -> int | None:
        """The step at which the rule asked to stop."""
        step: int | None = self._inner.stopped_step
        return step

    @property
    def reason(self) -> str:
        """The state of the run in words."""
        return str(self._inner.reason)

    @property
    def reason_chosen(self) -> str:
        """Why rule="auto" has chosen its rule."""
        return str(getattr(self._inner, "reason_chosen", ""))

    @property
    def history(self) -> Any:
        """The checks of the run."""
        return self._inner.history

    @property
    def best_step(self) -> int | None:
        """The step whose weights are restored (with averaging: the lowest estimate)."""
        if isinstance(self._inner, EvidenceStopping):
            return None if self.stopped_step is None else self.stopped_step - 1
        step: int | None = self._inner.best_step
        return step

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 0 on, in which the best step lies; None if epochs are not known."""
        if self.best_step is None or not self._epoch_ends:
            return None
        return bisect.bisect_left(self._epoch_ends, self.best_step)

    @property
    def estimates(self) -> dict[str, Interval]:
        """The estimated test loss, by the name "loss", with its interval.

        The interval is two standard errors wide to each side. rule="evidence" estimates no loss.
        """
        inner = self._inner
        if isinstance(inner, PathStopping):
            value, error = inner.estimate, 2 * inner.standard_error
            coverage = COVERAGE.get(inner.history.rule, {}).get(2)
            return {"loss": Interval(value, value - error, value + error, coverage)}
        if isinstance(inner, ValidationStopping) and inner.best_step is not None:
            return {"loss": Interval(inner.best_loss, math.nan, math.nan)}
        return {}

    def metrics(self) -> dict[str, float]:
        """Return the state as a flat mapping for any tracker."""
        values: dict[str, float] = self._inner.metrics()
        return values

    def restore(self) -> None:
        """Put the chosen weights into the model."""
        model = self._opened("restore")
        if not isinstance(self._inner, EvidenceStopping):
            if not isinstance(self._inner, ValidationStopping) or self._inner.best_step is not None:
                self._inner.restore()
            return
        weights = self._stopped_weights
        if weights is not None:
            with torch.no_grad():
                for name, value in _state(model):
                    value.copy_(weights[name])

    def report(self, path: str | Path) -> Path:
        """Write a page about the run: curves, decision, settings, cost, and what to try."""
        written: Path = self._inner.report(path)
        return written

    def __repr__(self) -> str:
        estimate = self.estimates.get("loss")
        loss = "" if estimate is None else f", test loss {estimate.value:.4g}"
        return f"<heldin.EarlyStopping({self.rule!r}): {self.reason}{loss}>"

    # -- saving and closing

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs; `torch.load(..., weights_only=True)` reads it."""
        return {
            "heldin": "EarlyStopping",
            "rule": self._inner.state_dict(),
            "step": self._step,
            "epoch_ends": list(self._epoch_ends),
            "stopped_weights": dict(self._stopped_weights or {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: all later values are the same."""
        self._opened("load_state_dict")
        if not isinstance(state, Mapping) or state.get("heldin") != "EarlyStopping":
            raise HeldinError(
                f"{NAME}.load_state_dict: this is not a state of EarlyStopping; pass what its "
                "state_dict() returned"
            )
        self._inner.load_state_dict(state["rule"])
        self._step, self._epoch_ends = int(state["step"]), list(state["epoch_ends"])
        self._stopped_weights = dict(state["stopped_weights"]) or None

    def close(self) -> None:
        """Remove all hooks and release the model. Results remain available."""
        self._release()
        self._inner.close()
        self._model = self._optimizer = self._loader = None

    def _opened(self, method: str) -> nn.Module:
        if self._model is None:
            raise HeldinError(f"{NAME}.{method}: called after close(); make a new object")
        return self._model

    def _opened_optimizer(self) -> Optimizer:
        assert self._optimizer is not None
        return self._optimizer


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise HeldinError(
            f"{NAME}: model must be a torch.nn.Module, got a {type(model).__name__}; the order is "
            "EarlyStopping(model, optimizer, loss_fn, data)"
        )


def _check_optimizer(optimizer: Any) -> Optimizer:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the real one
    if isinstance(inner, (list, tuple)):
        raise HeldinError(
            f"{NAME}: {len(inner)} optimisers were given, and shadows follow one; put the "
            "parameters into groups of one optimiser, or use rule='evidence' with one of them"
        )
    if not isinstance(inner, Optimizer):
        raise HeldinError(
            f"{NAME}: optimizer must be a torch.optim.Optimizer, got a {type(inner).__name__}; the "
            "order is EarlyStopping(model, optimizer, loss_fn, data)"
        )
    return inner


def _check_patience(patience: Any) -> Any:
    if patience == "default" or patience is None or isinstance(patience, Patience):
        return patience
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        raise HeldinError(
            f"{NAME}: patience must be a number of epochs >= 1, a heldin.Patience, or None to "
            f"never stop, got {patience!r}"
        )
    return patience


def _path_options(rule: Folds | LeaveOneOut) -> dict[str, Any]:
    return {
        "average": rule.average,
        "grid": rule.check_spacing,
        "memory": rule.snapshot_memory,
        "resamples": rule.resamples,
    }


def _batches(data: Any) -> Any:
    if isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data):
        return [data]
    return data


def _has_closure(args: Any, kwargs: Mapping[str, Any]) -> bool:
    return any(value is not None for value in (*args[1:], kwargs.get("closure")))


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what training changes."""
    yield from ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    yield from model.named_buffers()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in _state(model)}


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
