"""heldin in fastai: `Learner(..., cbs=EarlyStopping())`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .adapters.arguments import needs_framework, strict_kwargs
from .adapters.patches import OptimizerBridge, Patches, replaced
from .adapters.session import length
from .adapters.stopping import FrameworkStopping
from .criterion.evidence import grouping
from .errors import HeldinError, HeldinWarning, more
from .rules.options import Rule
from .shadows.held_out import FrameworkLoss
from .shadows.replayed import Clip

with needs_framework("fastai", "fastai"):
    from fastai.callback import core
    from fastai.callback.core import Callback, CancelFitException, CancelTrainException
    from fastai.callback.fp16 import MixedPrecision
    from fastai.callback.mixup import MixHandler
    from fastai.callback.schedule import ParamScheduler
    from fastai.callback.training import GradientAccumulation, GradientClip
    from fastai.learner import ValueMetric
    from fastai.optimizer import OptimWrapper
    from fastai.torch_core import get_model, noop, to_device

__all__ = ["EarlyStopping"]

CANCELLED = tuple(
    vars(core)[f"Cancel{what}Exception"]
    for what in ("Backward", "Batch", "Epoch", "Fit", "Step", "Train", "Valid")
)


class EarlyStopping(FrameworkStopping, Callback):
    """Stops a fit without a validation set, in the middle of an epoch if need be.

    Rules by an estimated test loss: the model trains on all rows. Shadows of it train beside it by
    the Learner's loss function and optimiser, each without some of the rows, and their loss on
    these is the estimate. Held-out rows are transformed as those of a validation set. The estimate
    and its standard error are metrics of the Recorder, `heldin/estimate` and
    `heldin/standard_error`. `GradientClip` and `GradientAccumulation` are followed; callbacks that
    mix rows (`MixUp`) are refused. The best weights are put into the model at the end.

    Evidence: the step that asks for the stop leaves the weights as they are, and the criterion is a
    metric, `heldin/criterion`. The epoch of the stop is still recorded.

    Args:
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        verbose: print at the end what was chosen, why it stopped and what to expect, unless the
            Learner has no logger.
        reset_on_fit: each fit starts again; False: it continues where the last one was, or where
            `load_state_dict` says.
        restore: put the weights of the best estimate into the model at the end.
        log_groups: also make a metric of each group of parameters, for evidence.
        others: see `heldin.EarlyStopping`; eval_loss and predict are functions of model and batch.
            There is no eval_data.

    Attributes:
        stopping: the rule of the last fit, with its history and estimate.
        estimates, out_of_fold, temperature: results, see `heldin.EarlyStopping`.

    >>> from heldin.fastai import EarlyStopping
    >>> callback = EarlyStopping(budget=4)
    """

    order = MixedPrecision.order - 2  # after accumulation has decided, before gradients are scaled
    run_valid = False
    _harmless = CANCELLED
    _stateattrs = ("_patches", "_rows", "_starts", "_names")  # that fastai leaves out of pickles

    @strict_kwargs(extends=FrameworkStopping.__init__)
    def __init__(
        self, rule: str | Rule = "auto", *, reset_on_fit: bool = True, **options: Any
    ) -> None:
        super().__init__(rule, **options)
        self.reset_on_fit = reset_on_fit
        if self.eval_data is not None:
            raise HeldinError(
                f"{self.name}: eval_data has no effect in fastai, where held-out rows are "
                "transformed as those of a validation set; leave it out"
            )
        self._init_state()

    def _init_state(self) -> None:
        """Set what `_stateattrs` names; fastai calls this after unpickling."""
        super()._init_state()
        self._patches = Patches(self._end, self._harmless)
        self._rows: list[int] = []  # of the epoch, in their order
        self._starts = False  # whether the run begins with the next epoch
        self._names: list[str] = []  # of the metrics of this fit

    # -- the fit

    def before_fit(self) -> None:
        """Watch for errors, but not while a learning rate is searched for."""
        learn = self.learn
        self._end()
        self.run = not hasattr(learn, "lr_finder") and not hasattr(learn, "gather_preds")
        if not self.run:
            return
        names = self._run.shown_names
        if self.by_evidence and self.log_groups:
            group_of = grouping(self._run.rule.parameter_groups)
            parameters = get_model(learn.model).named_parameters()
            names += dict.fromkeys(f"heldin/group/{group_of(name)}" for name, _ in parameters)
        if not self.by_evidence:
            _check_learner(learn)
        if not self.reset_on_fit:
            self._run.carry_over()
        elif self.stopping is not None and not self.by_evidence and not self._run.next_state:
            warnings.warn(
                "heldin.fastai.EarlyStopping: the shadows of this fit start from a model that an "
                "earlier one has trained, perhaps on the rows they hold out; their estimate would "
                "then be too low. Train in one fit, or set reset_on_fit=False to go on with the "
                "shadows " + more("a-second-fit"),
                HeldinWarning,
                stacklevel=2,
            )
            self._run.warns_itself = True
        metrics = [ValueMetric(partial(self._value, name), name) for name in names]
        learn.metrics, self._names = learn.metrics + metrics, names
        self._starts = True
        self._patches.watch_methods(learn, "_with_events", "_call_one")

    def before_epoch(self) -> None:
        """Begin the run, after all callbacks have begun; end the fit after a stop.

        The other callbacks have ended the epoch of the stop.
        """
        if self._starts:
            self._starts = False
            self._begin_fit()
        if self._stopped():
            raise CancelFitException

    def _begin_fit(self) -> None:
        learn, train = self.learn, self.learn.dls.train
        model, steps = get_model(learn.model), epoch_steps(learn)
        self._patches.wrap(learn, "one_batch", self._one_batch)
        if self.by_evidence:
            self._run.begin(model, epoch_steps=steps)
            return
        self._patches.wrap(train, "get_idxs", self._get_idxs)
        trained = model, _optimizer(learn.opt, self._patches)
        rows, clip = _row_loader(train), _clip(learn)
        schedules = (c for c in learn.cbs if isinstance(c, ParamScheduler) and "lr" in c.scheds)
        schedule = next((f"{c.name} (fit_one_cycle and others)" for c in schedules), None)
        inputs = {"clip": clip, "epoch_steps": steps, "schedule": schedule}
        self._run.begin(*trained, LearnerLoss(learn), rows, **inputs)

    def _get_idxs(self, get_idxs: Callable[[], Any]) -> Any:
        """Record the order of an epoch."""
        numbers = get_idxs()
        if self.learn.training or not self._rows:
            self._rows = [int(i) for i in numbers]
            return self._rows
        return numbers

    def _one_batch(self, one_batch: Callable[..., Any], i: int, batch: Any) -> None:
        """Train on a batch, and follow the step."""
        run, training = self._run, self.learn.training
        if training:
            run.begin_batch()
        one_batch(i, batch)
        if training and run.running and not self.by_evidence:
            size = self.learn.dls.train.bs
            run.add(tuple(batch), rows=self._rows[i * size : (i + 1) * size])
            if run.step():
                raise CancelTrainException

    def before_step(self) -> None:
        """Form the evidence of all batches since the last step."""
        if self._run.before_step():
            self._run.keep_weights()  # nor may the gradients stay until the next fit
            raise CancelTrainException

    def _stopped(self) -> bool:
        return bool(self._run.running and self._run.should_stop)

    def after_train(self) -> None:
        """Let the Recorder record the losses of the epoch that was cut short."""
        self._run.end_epoch()
        if self._stopped():
            self.learn.recorder.cancel_train = False

    def _value(self, name: str) -> float:
        return float(self._run.metrics().get(name, math.nan))

    def after_fit(self) -> None:
        """Put the best weights into the model."""
        self._conclude()
        self._end()

    def _show(self, message: str) -> None:
        if self.learn.logger is not noop:
            print(message)

    def _end(self) -> None:
        super()._end()
        names = self._names
        self.learn.metrics = self.learn.metrics.filter(lambda metric: metric.name not in names)
        self._rows, self._starts, self._names = [], False, []

    # -- saving

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_run")
        super().__setstate__(state)
        self._run = self.make_session()
        self._run.load_state_dict(saved)


def epoch_steps(learn: Any) -> float | None:
    """Return the number of optimiser steps in an epoch, if it is known."""
    batches, accumulates = learn.dls.train, getattr(learn, "gradient_accumulation", None)
    steps = length(batches)
    if steps is None or accumulates is None:
        return steps
    size = getattr(batches, "bs", None) or getattr(batches, "batch_size", None)
    return None if size is None else steps / math.ceil(accumulates.n_acc / size)


class LearnerLoss(FrameworkLoss):
    """The Learner's loss of a batch."""

    def __init__(self, learn: Any) -> None:
        self._learn = learn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a model in place of the Learner's."""
        split = getattr(self._learn.dls, "n_inp", len(batch) - 1)
        loss: Tensor = self._learn.loss_func(model(*batch[:split]), *batch[split:])
        return loss

    def scale(self, sizes: list[int]) -> float:
        """Return the factor of a step: `GradientAccumulation` divides by its number of rows."""
        numbers = [c.n_acc for c in self._learn.cbs if isinstance(c, GradientAccumulation)]
        return sum(sizes) / numbers[0] if numbers else 1.0


def _optimizer(opt: Any, patches: Patches) -> Any:
    """Return the Learner's optimiser as one of PyTorch's, which sees its steps."""
    if isinstance(opt, OptimWrapper):
        return opt.opt
    take_step = opt.step

    def replay() -> None:
        before = [dict(hyper) for hyper in opt.hypers]
        _set(opt.hypers, bridge.param_groups)
        try:
            take_step()
        finally:
            _set(opt.hypers, before)

    def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _set(bridge.param_groups, opt.hypers)
        return bridge.run(lambda: inner(*args, **kwargs))

    groups = [{**group, "params": [*group["params"]]} for group in opt.param_groups]
    bridge = OptimizerBridge(groups, replay)
    bridge.state = opt.state  # the optimiser steps with a shadow's state, while it is there
    patches.wrap(opt, "step", step)
    return bridge


def _set(groups: Any, values: Any) -> None:
    """Set the hyper-parameters of parameter groups."""
    for group, hypers in zip(groups, values, strict=True):
        group.update({name: value for name, value in hypers.items() if name != "params"})


class _Items(Dataset[Any]):
    """The rows of fastai's loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.dataset)

    def __getitem__(self, i: int) -> Any:
        with _as_validation(self.loader):
            return self.loader.do_item(i)


def _row_loader(loader: Any) -> DataLoader[Any]:
    """Return a loader over the rows of fastai's, without random transforms of training alone."""

    def collate(samples: list[Any]) -> Any:
        with _as_validation(loader):
            batch = loader.do_batch(samples)
            if loader.device is not None:
                batch = to_device(batch, loader.device)
            return tuple(loader.after_batch(batch))

    return DataLoader(_Items(loader), batch_size=loader.bs, collate_fn=collate)


def _as_validation(loader: Any) -> AbstractContextManager[None]:
    """Let a loader transform rows as those of a validation set."""
    stages = [getattr(loader, name) for name in ("after_item", "before_batch", "after_batch")]
    return replaced((each, "split_idx", 1) for each in stages if hasattr(each, "split_idx"))


def _clip(learn: Any) -> Clip | None:
    """Return how the Learner's callbacks clip gradients."""
    callbacks = [c for c in learn.cbs if isinstance(c, GradientClip)]

    def clip(parameters: list[nn.Parameter]) -> None:
        for callback in callbacks:
            nn.utils.clip_grad_norm_(parameters, callback.max_norm, callback.norm_type)

    return clip if callbacks else None


def _check_learner(learn: Any) -> None:
    """Refuse rows and losses that shadows do not follow."""
    train = learn.dls.train
    if not getattr(train, "indexed", False) or getattr(train, "bs", None) is None:
        raise HeldinError(
            "EarlyStopping: the rows of this loader have no numbers; use fastai's DataLoader with "
            "a batch size over a dataset with __getitem__, or rule='evidence'"
        )
    for callback in learn.cbs:
        if isinstance(callback, MixHandler):
            raise HeldinError(
                f"EarlyStopping: {type(callback).__name__} mixes rows, so that none can be held "
                "out; leave it out, or use a validation set"
            )
        precision = str(getattr(callback, "amp_mode", "")).lower()
        if isinstance(callback, MixedPrecision) and "bf16" not in precision:
            raise HeldinError(
                "EarlyStopping: shadows do not scale their loss, as float16 needs; use "
                "MixedPrecision(amp_mode='bf16')"
            )
