"""`heldin.fastai.AutoStopping`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from fastai.callback import core
from fastai.callback.core import Callback, CancelFitException, CancelTrainException
from fastai.callback.fp16 import MixedPrecision
from fastai.callback.mixup import MixHandler
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import ValueMetric
from fastai.optimizer import Optimizer as FastaiOptimizer
from fastai.optimizer import OptimWrapper
from fastai.torch_core import get_model, to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from heldin.errors import HeldinError
from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.separate import BatchLoss, Clip
from heldin.rules.estimated.shadows import PATIENCE

from .bridge import Bridge
from .estimating import EstimatingSession, warn_of_seen_rows
from .session import Guard, MethodWrapper
from .settings import spelled_out

__all__ = ["CANCELLED", "AutoStopping"]

CANCELLED = tuple(
    vars(core)[f"Cancel{what}Exception"]
    for what in ("Backward", "Batch", "Epoch", "Fit", "Step", "Train", "Valid")
)
SHOWN = ("heldin/estimate", "heldin/standard_error")


class AutoStopping(Callback):
    """Stops a fit by an estimated test loss, and puts the best weights into the model.

    The model trains on all rows. Shadows of it train beside it by the Learner's loss function and
    optimiser, each without some of the rows, and their loss on these is the estimate: no validation
    set. Held-out rows are transformed as those of a validation set. The estimate and its standard
    error are metrics of the Recorder, `heldin/estimate` and `heldin/standard_error`. `GradientClip`
    and `GradientAccumulation` are followed; what mixes rows (`MixUp`) is refused.

    Args:
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the model at the end.
        verbose: tell what was chosen, and of the stop.
        reset_on_fit: each fit starts anew; False: it goes on where the last one was, or where
            `load_state_dict` says.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        eval_loss: (model, batch) -> the loss to estimate (default: the Learner's own).
        average, grid, patience, engine, seed: see `heldin.FoldStopping`; average=None is the
            rule's own.

    Attributes:
        stopping: the rule of the last fit, with its history and estimate.

    >>> from heldin.fastai import AutoStopping
    >>> callback = AutoStopping(budget=4)
    """

    order = MixedPrecision.order - 2
    run_valid = False

    @spelled_out
    def __init__(
        self,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
        verbose: bool = False,
        reset_on_fit: bool = True,
        *,
        memory: int | None = None,
        stratify: Any = None,
        eval_loss: BatchLoss | None = None,
        average: Average | None = None,
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        engine: Literal["auto", "copies", "swap"] = "auto",
        seed: int = 0,
    ) -> None:
        options = dict(locals())
        super().__init__()
        self._session = EstimatingSession("AutoStopping", options)
        self.verbose, self.reset_on_fit = verbose, reset_on_fit
        self._guard = Guard(self._end, CANCELLED)
        self._detours: list[MethodWrapper] = []
        self._rows: list[int] = []  # of the epoch, in their order
        self._due = False  # the fit that begins with the next epoch

    @property
    def stopping(self) -> PathStopping | None:
        """The rule of the last fit, with its history and estimate."""
        return self._session.stopping

    # -- the fit

    def before_fit(self) -> None:
        """Look out for errors, but not while a learning rate is searched for."""
        learn = self.learn
        self._end()
        self.run = not hasattr(learn, "lr_finder") and not hasattr(learn, "gather_preds")
        if not self.run:
            return
        _refuse(learn)
        if not self.reset_on_fit:
            self._session.load_state_dict(self._session.state_dict())
        elif self.stopping is not None and not self._session.state_waits:
            warn_of_seen_rows(
                "heldin.fastai.AutoStopping", "or set reset_on_fit=False to go on with the shadows"
            )
        metrics = [ValueMetric(partial(self._value, name), name) for name in SHOWN]
        learn.metrics = self._others() + metrics
        self._due = True
        self._guard.over(learn, "_with_events", "_call_one")

    def before_epoch(self) -> None:
        """Make the shadows, after all callbacks have begun; end the fit after a stop."""
        if self._due:
            self._due = False
            self._begin()
        if self._stopped():
            raise CancelFitException

    def _begin(self) -> None:
        learn, train = self.learn, self.learn.dls.train
        optimizer, detours = _optimizer(learn.opt)
        self._detours = [
            *detours,
            MethodWrapper(train, "get_idxs", self._numbers),
            MethodWrapper(learn, "one_batch", self._one_batch),
        ]
        rule = self._session.begin(
            get_model(learn.model), optimizer, LearnerLoss(learn), _rows(train), clip=_clip(learn)
        )
        if self.verbose:
            print(f"AutoStopping: {rule.reason_chosen}")

    def _numbers(self, numbers: Callable[[], Any]) -> Any:
        """The order of an epoch."""
        found = numbers()
        if self.learn.training or not self._rows:
            self._rows = [int(i) for i in found]
            return self._rows
        return found

    def _one_batch(self, one: Callable[..., Any], i: int, batch: Any) -> None:
        """A batch, and what it says about the test loss."""
        one(i, batch)
        if not self.learn.training or not self._session.running:
            return
        size = self.learn.dls.train.bs
        self._session.add(tuple(batch), rows=self._rows[i * size : (i + 1) * size])
        if self._session.step():
            assert self.stopping is not None
            if self.verbose:
                print(f"The estimated loss rises ({self.stopping.reason}): early stopping")
            raise CancelTrainException

    def after_train(self) -> None:
        """Let the Recorder record the losses of the epoch that was cut short."""
        if self._stopped():
            self.learn.recorder.cancel_train = False

    def _stopped(self) -> bool:
        return self._session.running and self.stopping is not None and self.stopping.should_stop

    def _value(self, name: str) -> float:
        return self._session.metrics().get(name, math.nan)

    def _others(self) -> Any:
        return self.learn.metrics.filter(lambda m: m.name not in SHOWN)

    def after_fit(self) -> None:
        """Put the best weights into the model."""
        self._session.finish()
        self._end()

    def _end(self) -> None:
        self._guard.close()
        self._session.end()
        for detour in self._detours:
            detour.close()
        self._detours, self._rows, self._due = [], [], False
        self.learn.metrics = self._others()

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """To be saved beside the learner, as `Learner.save` keeps no callbacks."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next fit."""
        self._session.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        own = {**super().__getstate__(), "_session": (self._session.options, self.state_dict())}
        live = ("_guard", "_detours", "_rows", "_due")
        return {name: value for name, value in own.items() if name not in live}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, saved = state.pop("_session")
        super().__setstate__(state)
        self._session = EstimatingSession("AutoStopping", options)
        self._session.load_state_dict(saved)
        self._guard = Guard(self._end, CANCELLED)
        self._detours, self._rows, self._due = [], [], False


class LearnerLoss:
    """The Learner's loss of a batch."""

    def __init__(self, learn: Any) -> None:
        self._learn = learn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Of another model than the Learner's."""
        split = getattr(self._learn.dls, "n_inp", len(batch) - 1)
        found: Tensor = self._learn.loss_func(model(*batch[:split]), *batch[split:])
        return found

    def scale(self, sizes: list[int]) -> float:
        """`GradientAccumulation` steps on its number of rows or more, and divides by it."""
        found = [c.n_acc for c in self._learn.cbs if isinstance(c, GradientAccumulation)]
        return sum(sizes) / found[0] if found else 1.0


def _optimizer(opt: Any) -> tuple[Any, list[MethodWrapper]]:
    """The Learner's optimiser as one of PyTorch's, and what tells of its steps."""
    if isinstance(opt, OptimWrapper):
        return opt.opt, []

    def make(groups: Sequence[dict[str, Any]], state: Any) -> Callable[[], None]:
        inner = FastaiOptimizer([list(group["params"]) for group in groups], opt.cbs)
        inner.state = state

        def step() -> None:
            for group, hyper in zip(groups, inner.hypers, strict=True):
                hyper.update({k: v for k, v in group.items() if k != "params"})
            inner.step()

        return step

    bridge = Bridge.to(make)(
        [{**group, "params": [*group["params"]]} for group in opt.param_groups]
    )
    bridge.idle = True
    for p, *_ in opt.all_params():
        if opt.state[p]:
            bridge.state[p] = copy.deepcopy(opt.state[p])

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for group, hyper in zip(bridge.param_groups, opt.hypers, strict=True):
            group.update(hyper)
        result = step(*args, **kwargs)
        bridge.step()
        return result

    return bridge, [MethodWrapper(opt, "step", stepped)]


class _Items(Dataset[Any]):
    """The rows of fastai's loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader.dataset)

    def __getitem__(self, i: int) -> Any:
        with _as_validation(self.loader):
            return self.loader.do_item(i)


def _rows(loader: Any) -> DataLoader[Any]:
    """How rows of fastai's loader become a batch, without what is random in training alone."""

    def collate(samples: list[Any]) -> Any:
        with _as_validation(loader):
            batch = loader.do_batch(samples)
            if loader.device is not None:
                batch = to_device(batch, loader.device)
            return tuple(loader.after_batch(batch))

    return DataLoader(_Items(loader), batch_size=2, collate_fn=collate)


@contextmanager
def _as_validation(loader: Any) -> Iterator[None]:
    stages = [getattr(loader, name) for name in ("after_item", "before_batch", "after_batch")]
    before = [(stage, stage.split_idx) for stage in stages if hasattr(stage, "split_idx")]
    try:
        for stage, _ in before:
            stage.split_idx = 1
        yield
    finally:
        for stage, index in before:
            stage.split_idx = index


def _clip(learn: Any) -> Clip | None:
    """How the Learner's callbacks clip gradients."""
    found = [c for c in learn.cbs if isinstance(c, GradientClip)]
    if not found:
        return None

    def clip(parameters: list[nn.Parameter]) -> None:
        for each in found:
            nn.utils.clip_grad_norm_(parameters, each.max_norm, each.norm_type)

    return clip


def _refuse(learn: Any) -> None:
    """What cannot be followed."""
    train = learn.dls.train
    if not getattr(train, "indexed", False) or getattr(train, "bs", None) is None:
        raise HeldinError(
            "AutoStopping: the rows of this loader have no numbers; use fastai's DataLoader with a "
            "batch size over a dataset with __getitem__, or EvidenceStopping"
        )
    for callback in learn.cbs:
        if isinstance(callback, MixHandler):
            raise HeldinError(
                f"AutoStopping: {type(callback).__name__} mixes rows, so that none can be held "
                "out; leave it out, or use a validation set"
            )
        if isinstance(callback, MixedPrecision) and not _is_bfloat16(callback):
            raise HeldinError(
                "AutoStopping: shadows do not scale their loss, as float16 needs; use "
                "MixedPrecision(amp_mode='bf16')"
            )


def _is_bfloat16(callback: Any) -> bool:
    return "bf16" in str(getattr(callback, "amp_mode", "")).lower()
