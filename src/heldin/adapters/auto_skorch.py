"""`heldin.skorch.AutoStopping`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from skorch import NeuralNet
from skorch.callbacks import Callback, GradientNormClipping
from skorch.dataset import unpack_data
from torch import Tensor, nn

from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.separate import BatchLoss, Clip
from heldin.rules.estimated.shadows import PATIENCE

from .estimating import OPTIONS, EstimatingSession, own_loader
from .session import MethodWrapper
from .settings import spelled_out
from .skorch_hooks import in_optimizer, stop_epoch, taken_up

__all__ = ["AutoStopping"]

SHOWN = ("heldin/estimate", "heldin/standard_error")
IN_OPTIMIZER = "heldin_shadows"


class AutoStopping(Callback):
    """Stops a net by an estimated test loss, and leaves the best weights in its module.

    The module trains on all rows. Shadows of it train beside it by the net's own `infer` and
    `get_loss`, each without some of the rows, and their loss on these is the estimate: no
    validation split. The estimate and its standard error are in the net's history, of batches and
    epochs, as `heldin/estimate` and `heldin/standard_error`. `GradientNormClipping` is followed.

    A pickled net goes on with `partial_fit` where it was; `fit` starts anew, unless `LoadInitState`
    brings a checkpoint with the optimiser's state, in which that of the rule is kept.

    Args:
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the module at the end.
        sink: where to tell of choice and stop, if the net is verbose.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        eval_data: the same rows without augmentation: a Dataset, or a DataLoader over one.
        eval_loss: (module, batch) -> the loss to estimate (default: the net's own).
        average, grid, patience, engine, seed: see `heldin.FoldStopping`; average=None is the
            rule's own.

    Attributes:
        stopping_: the rule of the last run, with its history and estimate.

    >>> from torch import nn
    >>> from skorch import NeuralNetClassifier
    >>> from heldin.skorch import AutoStopping
    >>> net = NeuralNetClassifier(
    ...     nn.Linear, module__in_features=4, module__out_features=2, criterion=nn.CrossEntropyLoss,
    ...     train_split=None, callbacks=[("auto", AutoStopping())],
    ... )
    >>> _ = net.set_params(callbacks__auto__budget=4)
    """

    @spelled_out
    def __init__(
        self,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
        sink: Callable[[str], Any] = print,
        *,
        memory: int | None = None,
        stratify: Any = None,
        eval_data: Any = None,
        eval_loss: BatchLoss | None = None,
        average: Average | None = None,
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        engine: Literal["auto", "copies", "swap"] = "auto",
        seed: int = 0,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in (*OPTIONS, "sink")}
        EstimatingSession("AutoStopping", given)  # refuses wrong values
        self.__dict__.update(given)
        self.initialize()

    def initialize(self) -> AutoStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self.run_: EstimatingSession | None = None
        self.detours_: list[MethodWrapper] = []
        self.kept_: Any = None
        self.state_: dict[str, Any] = {}
        self.epoch_: dict[str, Any] = {}
        return self

    @property
    def stopping_(self) -> PathStopping | None:
        """The rule of the last run, with its history and estimate."""
        return self.run_.stopping if self.run_ is not None else None

    def run_state(self) -> dict[str, Any]:
        """What the optimiser's state holds of the rule."""
        return self.run_.state_dict() if self.run_ is not None else self.state_

    def __getstate__(self) -> dict[str, Any]:
        live: dict[str, Any] = {"run_": None, "kept_": None, "detours_": [], "epoch_": {}}
        return {**vars(self), **live, "state_": self.run_state()}

    # -- the run

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Watch the loop that comes next; other callbacks may load a checkpoint before it."""
        self._end()
        self.detours_ = [MethodWrapper(net, "fit_loop", partial(self._around, net))]

    def _around(self, net: NeuralNet, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The net's loop, whichever way it ends."""
        state = taken_up(net, IN_OPTIMIZER) or self.run_state()
        options = {name: getattr(self, name) for name in OPTIONS}
        self.run_ = EstimatingSession("AutoStopping", options)
        self.run_.load_state_dict(state)
        known = ("X", "y", "epochs", "_routing_method")
        loss = NetLoss(net, {k: v for k, v in kwargs.items() if k not in known})
        self.detours_ += [
            MethodWrapper(net, "get_iterator", partial(self._begin, net, loss)),
            MethodWrapper(net, "train_step", partial(self._train, net)),
        ]
        try:
            result = loop(*args, **kwargs)
            self.run_.finish()
            return result
        except KeyboardInterrupt:  # the usual way to end it
            self.run_.finish()
            raise
        finally:
            self._end()

    def _begin(
        self, net: NeuralNet, loss: NetLoss, get: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The iterator of all epochs is made: its rows are followed."""
        loader = get(*args, **kwargs)
        if kwargs.get("training") and self.run_ is not None and not self.run_.running:
            self.run_.follow(loader)
            rule = self.run_.begin(
                net.module_,
                net.optimizer_,
                loss,
                own_loader("AutoStopping", loader),
                clip=_clip(net),
                resumed=len(net.history) > 0,
            )
            self._tell(net, rule.reason_chosen)
            if self.kept_ is not None:
                self.kept_.remove()
            self.kept_ = in_optimizer(net, IN_OPTIMIZER, self)
        return loader

    def on_epoch_begin(self, net: NeuralNet, **datasets: Any) -> None:
        """Remember what the end of the epoch is told with."""
        self.epoch_ = datasets

    def _train(self, net: NeuralNet, step: Callable[..., Any], batch: Any, **kwargs: Any) -> Any:
        """A batch, and what it says about the test loss."""
        result = step(batch, **kwargs)
        if self.run_ is not None and self.run_.running:
            self.run_.add(batch)
            self.run_.step()
            for name, value in self.run_.metrics().items():
                if name in SHOWN:
                    net.history.record_batch(name, value)
                    net.history.record(name, value)  # of the epoch: its last value
        return result

    def on_batch_end(self, net: NeuralNet, training: bool | None = None, **_: Any) -> None:
        """End the epoch and the training if the rule has asked for it."""
        stopping = self.stopping_
        if training and self.detours_ and stopping is not None and stopping.should_stop:
            self._tell(net, f"Stopping since the estimated loss rises ({stopping.reason}).")
            stop_epoch(net, self.epoch_)

    def _tell(self, net: NeuralNet, message: str) -> None:
        if net.verbose or self.sink is not print:
            self.sink(message)

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Follow no more."""
        self._end()

    def _end(self) -> None:
        if self.run_ is not None:
            self.run_.end()
        for detour in self.detours_:
            detour.close()
        self.detours_ = []


class NetLoss:
    """The loss of a batch by the net's own `infer` and `get_loss`."""

    def __init__(self, net: NeuralNet, fit_params: dict[str, Any]) -> None:
        self._net, self._fit_params = net, fit_params

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """With another module in the place of the net's."""
        net, own = self._net, self._net.module_
        inputs, targets = unpack_data(batch)
        vars(net)["module_"] = model
        try:
            outputs = net.infer(inputs, **self._fit_params)
            loss: Tensor = net.get_loss(outputs, targets, X=inputs, training=model.training)
        finally:
            vars(net)["module_"] = own
        return loss

    def shares(self, batches: list[Any]) -> list[float]:
        """A net that accumulates gradients divides its loss by itself."""
        return [1.0] * len(batches)


def _clip(net: NeuralNet) -> Clip | None:
    """How the net's callbacks clip gradients."""
    found = [c for _, c in net.callbacks_ if isinstance(c, GradientNormClipping)]
    found = [c for c in found if c.gradient_clip_value is not None]
    if not found:
        return None

    def clip(parameters: list[nn.Parameter]) -> None:
        for callback in found:
            callback.on_grad_computed(None, [("", p) for p in parameters])

    return clip
