"""heldin in skorch: `NeuralNet(..., train_split=None, callbacks=[EvidenceStopping()])`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.session import (
    DEFAULTS,
    BeforeStep,
    StoppingSession,
    forget_gradients,
    missing_framework,
)
from .rules.elementwise import ElementwiseStopping as Elementwise

try:
    from skorch import NeuralNet
    from skorch.callbacks import Callback
except ImportError as error:
    raise missing_framework("skorch", "skorch", error) from error

__all__ = ["ElementwiseStopping", "EvidenceStopping"]

KEY = "heldin/criterion"


class EvidenceStopping(Callback):
    """Stops a net by evidence, in the middle of an epoch if need be; no validation data.

    The step that asks for the stop leaves the weights as they are, and the epoch is ended, so that
    the other callbacks see it. The criterion is in the net's history, of batches and epochs, as
    `heldin/criterion`: it is printed in the table and logged by skorch's loggers. A pickled net
    goes on with `partial_fit` where it was; `fit` starts anew.

    Args:
        patience: number of consecutive checks that must ask for a stop.
        sink: where to tell of the stop, if the net is verbose.
        log_groups: also put the value of each group of parameters into the history.
        options: any other argument of `heldin.EvidenceStopping`; all can be searched over, as
            `callbacks__evidence__smoothing` for instance.

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

    def __init__(
        self,
        patience: int = 1,
        sink: Callable[[str], Any] = print,
        log_groups: bool = False,
        **options: Any,
    ) -> None:
        StoppingSession(
            type(self).__name__, {"patience": patience, **options}
        )  # refuses what is unknown
        self.sink, self.log_groups = sink, log_groups
        self.__dict__.update({**DEFAULTS, "patience": patience, **options})
        self.initialize()

    def initialize(self) -> EvidenceStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self.run_: StoppingSession | None = None
        self.before_: BeforeStep | None = None
        self.state_: dict[str, Any] = {}
        self.epoch_: dict[str, Any] = {}
        return self

    @property
    def stopping_(self) -> Stopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self.run_.stopping if self.run_ is not None else None

    def __getstate__(self) -> dict[str, Any]:
        state = self.run_.state_dict() if self.run_ is not None else self.state_
        return {**vars(self), "run_": None, "before_": None, "state_": state, "epoch_": {}}

    # -- the run

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Watch the module."""
        state = self.run_.state_dict() if self.run_ is not None else self.state_
        self._end()
        self.run_ = StoppingSession(
            type(self).__name__, {name: getattr(self, name) for name in DEFAULTS}
        )
        self.run_.load_state_dict(state)
        self.run_.begin(net.module_)
        self.before_ = BeforeStep(net.module_, lambda: self._weigh(net))

    def on_epoch_begin(self, net: NeuralNet, **datasets: Any) -> None:
        """Remember what the end of the epoch is told with."""
        self.epoch_ = datasets

    def on_grad_computed(self, net: NeuralNet, named_parameters: Any, **_: Any) -> None:
        """Weigh the evidence. A net that does not tell is asked before its optimiser steps."""
        self._weigh(net)
        if self.before_ is not None:
            self.before_.done = True

    def _weigh(self, net: NeuralNet) -> None:
        stopping = self.stopping_
        if stopping is None or not stopping.watching or not net.module_.training:
            return
        if stopping.step():
            forget_gradients(net.module_.parameters())
        values = {KEY: stopping.criterion}
        if self.log_groups:
            values |= {f"heldin/group/{n}": v for n, v in stopping.evidence.groups.items()}
        for name, value in values.items():
            net.history.record_batch(name, value)
            net.history.record(name, value)  # of the epoch: its last value

    def on_batch_end(self, net: NeuralNet, training: bool | None = None, **_: Any) -> None:
        """End the epoch and the training if the rule has asked for it."""
        stopping = self.stopping_
        if not training or stopping is None or not stopping.should_stop:
            return
        if net.verbose or self.sink is not print:
            self.sink(f"Stopping since there is no more evidence ({stopping.reason}).")
        net.history.record("train_batch_count", len(net.history[-1, "batches"]))
        net.notify("on_epoch_end", **self.epoch_)
        raise KeyboardInterrupt

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Watch no more."""
        self._end()

    def _end(self) -> None:
        if self.run_ is not None:
            self.run_.end()
        if self.before_ is not None:
            self.before_.close()
        self.before_ = None


class ElementwiseStopping(Callback):
    """Stops single weights by evidence: wraps the net's optimiser while it trains.

    The fraction of stopped weights is in the net's history as `heldin/stopped`. A pickled net goes
    on with `partial_fit` where it was, stopped weights included; `fit` starts anew.

    Args:
        options: arguments of `heldin.ElementwiseStopping`.

    Attributes:
        optimizer_: the `heldin.ElementwiseStopping` of the last run.

    >>> from heldin.skorch import ElementwiseStopping
    >>> callback = ElementwiseStopping(smoothing=0.99)
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.initialize()

    def initialize(self) -> ElementwiseStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self.optimizer_: Elementwise | None = None
        self.state_: dict[str, Any] | None = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "optimizer_": None, "state_": self._state()}

    def _state(self) -> dict[str, Any] | None:
        return (
            self.optimizer_.state_dict()["heldin"] if self.optimizer_ is not None else self.state_
        )

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Wrap the optimiser."""
        state = self._state()
        inner = net.optimizer_
        if isinstance(inner, Elementwise):  # left by a run that ended in an error
            inner.close()
            inner = inner.optimizer
        self.optimizer_ = Elementwise(inner, net.module_, **self.options)
        if state is not None:
            self.optimizer_.load_state_dict({**inner.state_dict(), "heldin": state})
        net.optimizer_ = self.optimizer_

    def on_epoch_end(self, net: NeuralNet, **_: Any) -> None:
        """Note the stopped fraction."""
        if self.optimizer_ is not None:
            net.history.record("heldin/stopped", self.optimizer_.stopped_fraction())

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Unwrap the optimiser."""
        if self.optimizer_ is not None:
            self.optimizer_.close()
            net.optimizer_ = self.optimizer_.optimizer
