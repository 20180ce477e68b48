"""heldin in skorch: `NeuralNet(..., train_split=None, callbacks=[AutoStopping()])`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups
from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.epochs import Epochs
from .adapters.session import (
    EPOCH,
    BeforeStep,
    MethodWrapper,
    StoppingSession,
    forget_gradients,
    forget_passes,
    length,
    missing_framework,
)
from .adapters.settings import DEFAULTS, check_elementwise, chosen, spelled_out
from .errors import HeldinWarning, more
from .rules.elementwise import ElementwiseStopping as Elementwise
from .rules.optimizer_state import GROUP_KEY
from .rules.ranks import ProcessGroup

try:
    from skorch import NeuralNet
    from skorch.callbacks import Callback

    from .adapters.auto_skorch import AutoStopping
    from .adapters.skorch_hooks import in_optimizer, stop_epoch, taken_up
except ImportError as error:
    raise missing_framework("skorch", "skorch", error) from error

__all__ = ["AutoStopping", "ElementwiseStopping", "EvidenceStopping"]

KEY = "heldin/criterion"
NAME = "heldin.skorch.EvidenceStopping"
IN_OPTIMIZER = "heldin_stopping"  # where its state is in that of the optimiser


class EvidenceStopping(Callback):
    """Stops a net by evidence, in the middle of an epoch if need be; no validation data.

    The step that asks for the stop leaves the weights as they are, and the epoch is ended, so that
    the other callbacks see it. The criterion is in the net's history, of batches and epochs, as
    `heldin/criterion`: it is printed in the table and logged by skorch's loggers. A pickled net
    goes on with `partial_fit` where it was; `fit` starts anew, unless `LoadInitState` brings a
    checkpoint with the optimiser's state, in which that of the rule is kept.

    Args:
        patience: number of consecutive checks that must ask for a stop.
        sink: where to tell of the stop, if the net is verbose.
        log_groups: also put the value of each group of parameters into the history.
        window: number of steps whose sums add up before a value is formed; "epoch": those of an
            epoch, by the number of its batches, which is better on few data.
        groups, smoothing and the others: see `heldin.EvidenceStopping`. All can be searched over,
            as `callbacks__evidence__smoothing` for instance.

    Attributes:
        stopping_: the `heldin.EvidenceStopping` of the last run, with its history.

    >>> from torch import nn
    >>> from skorch import NeuralNetClassifier
    >>> from heldin.skorch import EvidenceStopping
    >>> net = NeuralNetClassifier(
    ...     nn.Linear, module__in_features=4, module__out_features=2, criterion=nn.CrossEntropyLoss,
    ...     train_split=None, callbacks=[("evidence", EvidenceStopping(patience=3))],
    ... )
    >>> _ = net.set_params(callbacks__evidence__smoothing=0.8)
    """

    @spelled_out
    def __init__(
        self,
        patience: int = 1,
        sink: Callable[[str], Any] = print,
        log_groups: bool = False,
        *,
        groups: Groups = "tensor",
        smoothing: float = 0.9,
        window: int | Literal["epoch"] = 1,
        warmup: int = 0,
        every: int = 1,
        arming: float | None = 0.5,
        across: Across = "median",
        weighted: bool = True,
        start: float | None = None,
        correction: Correction = None,
        dead: Dead = "out",
        reduction: Literal["mean", "sum"] = "mean",
        estimator: Estimator = "sampled",
        budget: int = BUDGET,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        options = chosen(locals())
        StoppingSession(type(self).__name__, options)  # refuses wrong values
        self.sink, self.log_groups = sink, log_groups
        self.__dict__.update(options)
        self.initialize()

    def initialize(self) -> EvidenceStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self.run_: StoppingSession | None = None
        self.before_: BeforeStep | None = None
        self.loop_: MethodWrapper | None = None
        self.epochs_ = Epochs(NAME)
        self.kept_: Any = None
        self.state_: dict[str, Any] = {}
        self.epoch_: dict[str, Any] = {}
        return self

    @property
    def stopping_(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self.run_.stopping if self.run_ is not None else None

    def __getstate__(self) -> dict[str, Any]:
        state = self.run_.state_dict() if self.run_ is not None else self.state_
        live = dict.fromkeys(("run_", "before_", "loop_", "kept_"))
        return {**vars(self), **live, "state_": state, "epoch_": {}}

    # -- the run

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Watch the loop that comes next; other callbacks may load a checkpoint before it."""
        self._end()
        self.loop_ = MethodWrapper(net, "fit_loop", partial(self._around, net))

    def _around(self, net: NeuralNet, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The net's loop, whichever way it ends."""
        made = MethodWrapper(net, "get_iterator", partial(self._iterator, net))
        if self.window != EPOCH:
            self._begin(net)
        try:
            return loop(*args, **kwargs)
        finally:
            made.close()
            self._end()

    def _iterator(self, net: NeuralNet, get: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The iterator of all epochs is made: it knows how many steps an epoch has."""
        batches = get(*args, **kwargs)
        training = kwargs.get("training", args[1] if len(args) > 1 else False)
        if training and self.before_ is None:
            self._begin(net, length(batches))
        return batches

    def _begin(self, net: NeuralNet, epoch_steps: int | None = None) -> None:
        state = self.run_.state_dict() if self.run_ is not None else self.state_
        state = restored(net, state)
        self.run_ = StoppingSession(
            type(self).__name__, {name: getattr(self, name) for name in DEFAULTS}
        )
        self.run_.load_state_dict(state)
        self.run_.begin(net.module_, epoch_steps)
        self.epochs_.reset()
        self.before_ = BeforeStep(net.module_, lambda: self._weigh(net))
        self._keep(net)

    def _keep(self, net: NeuralNet) -> None:
        """Let the optimiser's state, which skorch's checkpoints hold, hold ours as well."""
        if self.kept_ is not None:
            self.kept_.remove()
        self.kept_ = in_optimizer(net, IN_OPTIMIZER, self)

    def run_state(self) -> dict[str, Any]:
        """What the optimiser's state holds of the rule."""
        return self.run_.state_dict() if self.run_ is not None else {}

    def on_epoch_begin(self, net: NeuralNet, **datasets: Any) -> None:
        """Remember what the end of the epoch is told with."""
        self.epoch_ = datasets
        if self.loop_ is not None and self.before_ is None:  # of a net that makes its own iterator
            self._begin(net)
        self.epochs_.begin(self.stopping_)

    def on_batch_begin(self, net: NeuralNet, training: bool | None = None, **_: Any) -> None:
        """The next step of an optimiser is a new one."""
        if training and self.before_ is not None:
            self.before_.next_iteration()
            self.epochs_.batch()

    def on_epoch_end(self, net: NeuralNet, **_: Any) -> None:
        """Say so if nothing was seen."""
        self.epochs_.end(self.stopping_)

    def on_grad_computed(self, net: NeuralNet, named_parameters: Any, **_: Any) -> None:
        """Weigh the evidence. A net that does not tell is asked before its optimiser steps."""
        if self.before_ is not None:
            self.before_.weigh()
            if self.before_.stop:  # a line search asks more than once
                forget_gradients(net.module_.parameters())

    def _weigh(self, net: NeuralNet) -> bool:
        stopping = self.stopping_
        if stopping is None or not stopping.watching or not net.module_.training:
            return False
        if stopping.step():
            forget_gradients(net.module_.parameters())
        values = {KEY: stopping.criterion}
        if self.log_groups:
            values |= {f"heldin/group/{n}": v for n, v in stopping.evidence.groups.items()}
        for name, value in values.items():
            net.history.record_batch(name, value)
            net.history.record(name, value)  # of the epoch: its last value
        return stopping.should_stop

    def on_batch_end(self, net: NeuralNet, training: bool | None = None, **_: Any) -> None:
        """End the epoch and the training if the rule has asked for it."""
        stopping, before = self.stopping_, self.before_
        if stopping is not None and before is not None and before.done and before.missed:
            forget_passes(stopping)
        if not training or stopping is None or not stopping.should_stop:
            return
        if net.verbose or self.sink is not print:
            self.sink(f"Stopping since there is no more evidence ({stopping.reason}).")
        stop_epoch(net, self.epoch_)

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Watch no more."""
        self._end()

    def _end(self) -> None:
        if self.run_ is not None:
            self.run_.end()
        if self.before_ is not None:
            self.before_.close()
        if self.loop_ is not None:
            self.loop_.close()
        self.before_ = self.loop_ = None


def restored(net: NeuralNet, state: dict[str, Any]) -> dict[str, Any]:
    """The state that a checkpoint has brought with the optimiser's, else the one that there is."""
    found = taken_up(net, IN_OPTIMIZER)
    if found is None and not state and len(net.history) and KEY in net.history[-1]:
        warnings.warn(
            f"{NAME}: the net goes on after {len(net.history)} epochs, but what the rule had seen "
            "in them is lost, and it starts anew. Checkpoints hold its state if they hold that of "
            "the optimiser (f_optimizer of skorch's Checkpoint), and so does a pickled net "
            + more("a-state-that-was-lost"),
            HeldinWarning,
            stacklevel=2,
        )
    return found or state


class ElementwiseStopping(Callback):
    """Stops single weights by evidence: wraps the net's optimiser while it trains.

    The fraction of stopped weights is in the net's history as `heldin/stopped`. A pickled net goes
    on with `partial_fit` where it was, stopped weights included; `fit` starts anew.

    Args:
        greedy, smoothing and the others: see `heldin.ElementwiseStopping`.

    Attributes:
        optimizer_: the `heldin.ElementwiseStopping` of the last run.

    >>> from heldin.skorch import ElementwiseStopping
    >>> callback = ElementwiseStopping(smoothing=0.99)
    """

    @spelled_out
    def __init__(
        self,
        *,
        greedy: bool = True,
        smoothing: float = 0.999,
        start: float = 10.0,
        every: int = 1,
        correction: Correction = None,
        dead: Dead = "out",
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        process_group: ProcessGroup = "auto",
    ) -> None:
        options = chosen(locals(), Elementwise)
        check_elementwise(type(self).__name__, options)
        self.__dict__.update(options)
        self.initialize()

    def initialize(self) -> ElementwiseStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self.optimizer_: Elementwise | None = None
        self.loop_: MethodWrapper | None = None
        self.state_: dict[str, Any] | None = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "optimizer_": None, "loop_": None, "state_": self._state()}

    def _state(self) -> dict[str, Any] | None:
        return (
            self.optimizer_.state_dict()["heldin"] if self.optimizer_ is not None else self.state_
        )

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Watch the loop that comes next; other callbacks may load a checkpoint before it."""
        self._unwrap(net)
        self.loop_ = MethodWrapper(net, "fit_loop", partial(self._around, net))

    def _around(self, net: NeuralNet, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The net's loop; an error unwraps the optimiser as well as its end does."""
        self._wrap(net)
        try:
            return loop(*args, **kwargs)
        except KeyboardInterrupt:  # the usual way to end it
            raise
        except BaseException:
            self._unwrap(net)
            raise

    def _wrap(self, net: NeuralNet) -> None:
        state, inner = self._state(), net.optimizer_
        loaded = any(GROUP_KEY in group for group in inner.param_groups)  # with a checkpoint
        self.optimizer_ = Elementwise(inner, net.module_, **chosen(vars(self), Elementwise))
        if loaded:
            self.optimizer_.load_state_dict(inner.state_dict())
        elif state is not None:
            self.optimizer_.load_state_dict({**inner.state_dict(), "heldin": state})
        net.optimizer_ = self.optimizer_

    def on_epoch_end(self, net: NeuralNet, **_: Any) -> None:
        """Note the stopped fraction."""
        if self.optimizer_ is not None:
            net.history.record("heldin/stopped", self.optimizer_.stopped_fraction())

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Unwrap the optimiser."""
        self._unwrap(net)

    def _unwrap(self, net: NeuralNet) -> None:
        if self.loop_ is not None:
            self.loop_.close()
            self.loop_ = None
        if isinstance(net.optimizer_, Elementwise):
            net.optimizer_.close()
            net.optimizer_ = net.optimizer_.optimizer
