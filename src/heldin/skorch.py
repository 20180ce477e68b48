"""heldin in skorch: `NeuralNet(..., train_split=None, callbacks=[EarlyStopping()])`."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from .adapters.arguments import check_elementwise, needs_framework, strict_kwargs
from .adapters.patches import Patches, replaced
from .adapters.session import Session
from .adapters.stopping import FrameworkStopping
from .errors import HeldinWarning, more
from .loop.hooks import add_to_state
from .rules.elementwise import GROUP_KEY
from .rules.elementwise import ElementwiseStopping as Elementwise
from .rules.options import Rule
from .rules.outcome import OUTPUTS
from .shadows.held_out import FrameworkLoss
from .shadows.replayed import Clip

with needs_framework("skorch", "skorch"):
    from skorch import NeuralNet
    from skorch.callbacks import Callback, GradientNormClipping
    from skorch.dataset import unpack_data

__all__ = ["EarlyStopping", "ElementwiseStopping"]

CRITERION = "heldin/criterion"


class EarlyStopping(FrameworkStopping, Callback):
    """Stops a net without validation data, in the middle of an epoch if need be.

    Rules by an estimated test loss: the module trains on all rows. Shadows of it train beside it by
    the net's own `infer` and `get_loss`, each without some of the rows, and their loss on these is
    the estimate, in the net's history, of batches and epochs, as `heldin/estimate` and
    `heldin/standard_error`. `GradientNormClipping` is followed. The best weights are left in the
    module.

    Evidence: the step that asks for the stop leaves the weights as they are, and the criterion is
    in the net's history as `heldin/criterion`.

    The epoch of the stop is ended, so that the other callbacks see it. A pickled net continues with
    `partial_fit` where it was; `fit` starts again, unless `LoadInitState` brings a checkpoint with
    the optimiser's state, in which that of the rule is kept.

    Args:
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        sink: where to tell at the end what was chosen, why it stopped and what to expect.
        restore: put the weights of the best estimate into the module at the end.
        verbose: tell it, if the net is verbose or there is a sink.
        log_groups: also put the value of each group of parameters into the history, for evidence.
        others: see `heldin.EarlyStopping`; eval_loss and predict are functions of module and batch.
            All can be searched over, as `callbacks__early__budget` for instance.

    Attributes:
        stopping_: the rule of the last run, with its history and estimate.
        estimates, out_of_fold: results, see `heldin.EarlyStopping`.
        temperature_: the temperature of the logits; `temperature` is the argument.

    >>> from torch import nn
    >>> from skorch import NeuralNetClassifier
    >>> from heldin.skorch import EarlyStopping
    >>> net = NeuralNetClassifier(
    ...     nn.Linear, module__in_features=4, module__out_features=2, criterion=nn.CrossEntropyLoss,
    ...     train_split=None, callbacks=[("early", EarlyStopping())],
    ... )
    >>> _ = net.set_params(callbacks__early__budget=4)
    """

    temperature: Any = "auto"  # the argument, as scikit-learn wants it; the result is temperature_
    verbose_ = False  # of the net

    @strict_kwargs(extends=FrameworkStopping.__init__)
    def __init__(
        self, rule: str | Rule = "auto", *, sink: Callable[[str], Any] = print, **options: Any
    ) -> None:
        super().__init__(rule, **options)
        self.sink = sink
        self.initialize()

    @classmethod
    def _get_param_names(cls) -> list[str]:
        """Return the names of all arguments, for scikit-learn."""
        return sorted({*EarlyStopping.__init__.__signature__.parameters} - {"self"})  # type: ignore[attr-defined]

    def initialize(self) -> EarlyStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self._run: Session | None = None  # of the last fit
        self.state_: dict[str, Any] = {}  # from a pickled net
        self.epoch_: dict[str, Any] = {}  # the arguments of on_epoch_begin
        self.hook_: Any = None  # on the optimiser's state
        self._patches = Patches()
        return self

    def _set_outputs(self, options: dict[str, Any]) -> None:
        self.__dict__.update(options)

    def _output_options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OUTPUTS}

    @property
    def temperature_(self) -> float:
        """The temperature T >= 1 of the logits at the chosen check; 1: none."""
        return self._temperature()

    @property
    def stopping_(self) -> Any:
        """The rule of the last run, with its history."""
        return self._followed()

    # -- saving

    def run_state(self) -> dict[str, Any]:
        """Return the state of the run, which the optimiser's state holds as well."""
        return self._run.state_dict() if self._run is not None else self.state_

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), "state_": self.run_state(), "epoch_": {}, "_patches": Patches()}
        return {**state, "_run": None, "hook_": None}

    @property
    def _key(self) -> str:
        """The name of the state in that of the optimiser."""
        return "heldin_stopping" if self.by_evidence else "heldin_shadows"

    def _add_to_optimizer(self, net: NeuralNet) -> None:
        """Let the optimiser's state, which skorch's checkpoints hold, hold that of the run."""
        reference, key = weakref.ref(self), self._key

        def add(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
            callback = reference()
            if callback is None or not (run_state := callback.run_state()):
                return state
            first, *others = state["param_groups"]
            return {**state, "param_groups": [{**first, key: run_state}, *others]}

        if self.hook_ is not None:
            self.hook_.remove()
        self.hook_ = add_to_state(net.optimizer_, add)

    def _restored_state(self, net: NeuralNet) -> dict[str, Any]:
        """Return the state that a checkpoint brought with the optimiser's, else the present one."""
        states = [group.pop(self._key, None) for group in net.optimizer_.param_groups]
        saved: dict[str, Any] = next((state for state in states if state), {}) or self.run_state()
        if not saved and len(net.history) and CRITERION in net.history[-1] and self.by_evidence:
            warnings.warn(
                f"heldin.skorch.EarlyStopping: the net goes on after {len(net.history)} epochs, "
                "but what the rule had seen in them is lost, and it starts anew. Checkpoints hold "
                "its state if they hold that of the optimiser (f_optimizer of skorch's "
                "Checkpoint), and so does a pickled net " + more("a-state-that-was-lost"),
                HeldinWarning,
                stacklevel=2,
            )
        return saved

    # -- the run

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Follow the loop that comes next; other callbacks may load a checkpoint before it."""
        self._end()
        self.verbose_ = bool(net.verbose)
        self._patches.wrap(net, "fit_loop", partial(self._fit, net))

    def _fit(self, net: NeuralNet, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the net's loop, and end the run whichever way the loop ends."""
        state = self._restored_state(net)
        self._run = self.make_session()
        self._run.load_state_dict(state)
        of_loop = ("X", "y", "epochs", "_routing_method")
        loss = NetLoss(net, {k: v for k, v in kwargs.items() if k not in of_loop})
        self._patches.wrap(net, "get_iterator", partial(self._make_iterator, net, loss))
        self._patches.wrap(net, "train_step", partial(self._train, net))
        try:
            result = loop(*args, **kwargs)
            self._record_end(net)
            return result
        except KeyboardInterrupt:  # the usual way to end it
            self._record_end(net)
            raise
        finally:
            self._end()

    def _record_end(self, net: NeuralNet) -> None:
        """Put the best weights into the module, and the results into the last epoch."""
        for name, value in self._conclude().items():
            net.history.record(name, value)

    def _make_iterator(
        self, net: NeuralNet, loss: NetLoss, get: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Begin the run when the iterator of all epochs is made: its rows are followed."""
        loader = get(*args, **kwargs)
        if kwargs.get("training", args[1] if len(args) > 1 else False):
            self._begin_once(net, loss, loader)
        return loader

    def _begin_once(self, net: NeuralNet, loss: Any = None, loader: Any = None) -> None:
        if self._run is None or self._run.running:
            return
        self._run.follow(loader)
        resumed = len(net.history) > 0
        trained = net.module_, net.optimizer_
        self._run.begin(*trained, loss, loader, clip=_clip(net), resumed=resumed, hook=True)
        self._add_to_optimizer(net)

    def on_epoch_begin(self, net: NeuralNet, **datasets: Any) -> None:
        """Store the arguments of the end of the epoch."""
        self.epoch_ = datasets
        if self.by_evidence:  # a net may make its own iterator
            self._begin_once(net)

    def _train(self, net: NeuralNet, step: Callable[..., Any], batch: Any, **kwargs: Any) -> Any:
        """Train on a batch, and follow the step."""
        run = self._run
        if run is None or not run.running:
            return step(batch, **kwargs)
        run.begin_batch()
        result = step(batch, **kwargs)
        run.add(batch)
        run.step()
        missing = {CRITERION: math.nan} if self.by_evidence else {}
        for name, value in (missing | run.shown()).items():
            net.history.record_batch(name, value)
            net.history.record(name, value)  # of the epoch: its last value
        return result

    def on_grad_computed(self, net: NeuralNet, named_parameters: Any, **_: Any) -> None:
        """Form the evidence; a line search asks more than once."""
        if self._run is not None and self._run.before_step():
            self._run.keep_weights()

    def on_batch_end(self, net: NeuralNet, training: bool | None = None, **_: Any) -> None:
        """End the epoch and the training if the rule has asked for it."""
        run = self._run
        if not training or run is None or not run.running or not run.should_stop:
            return
        net.history.record("train_batch_count", len(net.history[-1, "batches"]))
        net.notify("on_epoch_end", **self.epoch_)  # so that the other callbacks see it
        raise KeyboardInterrupt

    def on_epoch_end(self, net: NeuralNet, **_: Any) -> None:
        """Warn of an epoch in which nothing was observed."""
        if self._run is not None:
            self._run.end_epoch()

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Release the module."""
        self._end()

    def _end(self) -> None:
        if self._run is not None:
            self._run.end()
        self._patches.close()

    def _show(self, message: str) -> None:
        if self.verbose_ or self.sink is not print:
            self.sink(message)


class NetLoss(FrameworkLoss):
    """The loss of a batch by the net's own `infer` and `get_loss`."""

    divided = True  # a net that accumulates gradients divides its loss

    def __init__(self, net: NeuralNet, fit_params: dict[str, Any]) -> None:
        self._net, self._fit_params = net, fit_params

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a model in place of the net's module."""
        net = self._net
        inputs, targets = unpack_data(batch)
        with replaced([(net, "module_", model)]):
            outputs = net.infer(inputs, **self._fit_params)
            loss: Tensor = net.get_loss(outputs, targets, X=inputs, training=model.training)
        return loss

    def shares(self, batches: list[Any]) -> list[float]:
        """Return the factors of the losses of accumulated batches."""
        return [1.0] * len(batches)


def _clip(net: NeuralNet) -> Clip | None:
    """Return how the net's callbacks clip gradients."""
    callbacks = [c for _, c in net.callbacks_ if isinstance(c, GradientNormClipping)]
    callbacks = [c for c in callbacks if c.gradient_clip_value is not None]

    def clip(parameters: list[nn.Parameter]) -> None:
        for callback in callbacks:
            callback.on_grad_computed(None, [("", p) for p in parameters])

    return clip if callbacks else None


class ElementwiseStopping(Callback):
    """Stops single weights by evidence: wraps the net's optimiser while it trains.

    The fraction of stopped weights is in the net's history as `heldin/stopped`. A pickled net
    continues with `partial_fit` where it was, stopped weights included; `fit` starts again.

    Args:
        greedy, smoothing and the others: see `heldin.ElementwiseStopping`.

    Attributes:
        optimizer_: the `heldin.ElementwiseStopping` of the last run.

    >>> from heldin.skorch import ElementwiseStopping
    >>> callback = ElementwiseStopping(smoothing=0.99)
    """

    @strict_kwargs(extends=Elementwise.__init__, without=("optimizer", "model"))
    def __init__(self, **options: Any) -> None:
        check_elementwise(options)
        self.__dict__.update(options)
        self.initialize()

    def initialize(self) -> ElementwiseStopping:
        """Forget earlier runs; the net calls this when it is initialised."""
        self.optimizer_: Elementwise | None = None
        self.patches_ = Patches()
        self.state_: dict[str, Any] | None = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        nothing = {"optimizer_": None, "patches_": Patches()}
        return {**vars(self), **nothing, "state_": self._state()}

    def _state(self) -> dict[str, Any] | None:
        optimizer = self.optimizer_
        return self.state_ if optimizer is None else optimizer.state_dict()["heldin"]

    def on_train_begin(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Follow the loop that comes next; other callbacks may load a checkpoint before it."""
        self._unwrap(net)
        self.patches_.wrap(net, "fit_loop", partial(self._fit, net))

    def _fit(self, net: NeuralNet, loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the net's loop; an error unwraps the optimiser as well as its end does."""
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
        options = {name: value for name, value in vars(self).items() if not name.endswith("_")}
        self.optimizer_ = Elementwise(inner, net.module_, **options)
        if loaded:
            self.optimizer_.load_state_dict(inner.state_dict())
        elif state is not None:
            self.optimizer_.load_state_dict({**inner.state_dict(), "heldin": state})
        net.optimizer_ = self.optimizer_

    def on_epoch_end(self, net: NeuralNet, **_: Any) -> None:
        """Record the stopped fraction."""
        if self.optimizer_ is not None:
            net.history.record("heldin/stopped", self.optimizer_.stopped_fraction())

    def on_train_end(self, net: NeuralNet, X: Any = None, y: Any = None, **_: Any) -> None:
        """Unwrap the optimiser."""
        self._unwrap(net)

    def _unwrap(self, net: NeuralNet) -> None:
        self.patches_.close()
        if isinstance(net.optimizer_, Elementwise):
            net.optimizer_.close()
            net.optimizer_ = net.optimizer_.optimizer
