"""What the adapters to training frameworks have in common."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from heldin.errors import HeldinError
from heldin.rules.elementwise import ElementwiseStopping
from heldin.rules.evidence import EvidenceStopping

__all__ = [
    "BeforeStep",
    "Guard",
    "MethodWrapper",
    "StoppingSession",
    "flat_metrics",
    "forget_gradients",
    "forget_passes",
    "length",
    "missing_framework",
]

EPOCH = "epoch"  # a window as long as an epoch


def length(loader: Any) -> int | None:
    """Number of batches of a loader; None if it has none, or does not tell.

    >>> length([1, 2, 3]), length(iter([1, 2, 3]))
    (3, None)
    """
    try:
        return len(loader)
    # An iterator or a stream of rows; loaders of Lightning and fastai before they are begun.
    except (TypeError, NotImplementedError, AttributeError, RuntimeError):
        return None


def missing_framework(framework: str, extra: str, error: ImportError) -> ImportError:
    """The error of an adapter whose framework cannot be imported."""
    return ImportError(
        f"heldin.{extra} needs {framework} ({error}): pip install 'heldin[{extra}]'",
        name=error.name,
    )


class StoppingSession:
    """The `EvidenceStopping` of a training run that a framework begins, feeds and ends.

    Settings are checked at once, though the model comes later; a state may be loaded before.

    >>> session = StoppingSession("Callback", {"smoothing": 0.5})
    >>> session.begin(nn.Linear(2, 1)).smoothing
    0.5
    >>> session.end()
    >>> try:
    ...     StoppingSession("Callback", {"smoothness": 0.5})
    ... except HeldinError as error:
    ...     print(error)
    Callback: ...got an unexpected keyword argument 'smoothness'...
    """

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        self._owner, self.options = owner, dict(options)
        self.stopping: EvidenceStopping | None = None
        self._state: Mapping[str, Any] | None = None
        self._check()

    def _check(self) -> None:
        """Refuse what EvidenceStopping would refuse, names of parameters aside."""
        owner = self._owner
        if "model" in self.options:
            raise HeldinError(f"{owner}: the model is the one that the framework trains")
        if isinstance(self.options.get("patience"), nn.Module):
            raise HeldinError(
                f"{owner}: patience is a model; leave it out, the framework hands over the model "
                "that it trains (in a plain loop: heldin.EvidenceStopping)"
            )
        anything = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        groups = self.options.get("groups", "tensor")
        known = groups if isinstance(groups, str) else "tensor"
        options = {**self.options, "groups": known, "parameters": None}
        if self.by_epoch:
            options["window"] = 1  # known when the run begins
        try:
            EvidenceStopping(anything, **options).close()
        except TypeError as error:
            raise HeldinError(f"{owner}: {error}; see heldin.EvidenceStopping") from None

    def begin(self, model: nn.Module, epoch_steps: float | None = None) -> EvidenceStopping:
        """Watch a model from now on, from the state that was loaded last.

        Args:
            model: the model.
            epoch_steps: how many steps of the optimiser an epoch has, where the framework knows.
        """
        self.end()
        options = dict(self.options)
        if self.by_epoch:
            options["window"] = self._window(epoch_steps)
        self.stopping = EvidenceStopping(model, **options)
        if self._state:
            try:
                self.stopping.load_state_dict(self._state)
            except HeldinError:
                self.end()
                raise
        self._state = None
        return self.stopping

    @property
    def by_epoch(self) -> bool:
        """Whether the window is as long as an epoch."""
        return bool(self.options.get("window") == EPOCH)

    def _window(self, epoch_steps: float | None) -> int:
        """Number of observed steps in an epoch; in a run that goes on, what it was."""
        if self._state and isinstance(known := self._state["settings"]["window"], int):
            return known
        if epoch_steps is None or not math.isfinite(epoch_steps):
            raise HeldinError(
                f"{self._owner}: window='epoch' needs to know how many steps an epoch has, and "
                "these data do not tell; pass their number, window=100 for instance"
            )
        return max(1, math.ceil(epoch_steps) // int(self.options.get("every", 1)))

    def end(self) -> None:
        """Watch no more. What was found stays readable."""
        if self.stopping is not None:
            self.stopping.close()

    def state_dict(self) -> dict[str, Any]:
        """The state of the run, or the one it will begin with."""
        if self._state is None and self.stopping is not None:
            return self.stopping.state_dict()
        return dict(self._state or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: now if a run is under way, else when the next one begins."""
        if self.stopping is not None and self.stopping.watching:
            self.stopping.load_state_dict(state)
        else:
            self._state = dict(state)


class HasMetrics(Protocol):
    """EvidenceStopping or ElementwiseStopping."""

    def metrics(self) -> dict[str, float]:
        """The state as a flat mapping."""


def flat_metrics(source: HasMetrics | None, groups: bool) -> dict[str, float]:
    """What to log: a few numbers, and on request one for each group or tensor."""
    if source is None:
        return {}
    single = ("heldin/group/", "heldin/stopped/")
    return {k: v for k, v in source.metrics().items() if groups or not k.startswith(single)}


def forget_gradients(parameters: Iterable[Tensor]) -> None:
    """Make the coming step of the optimiser an empty one.

    Optimisers leave parameters without a gradient alone, momentum and weight decay included. So
    the weights that asked for the stop are kept where a framework goes on to step.
    """
    for parameter in parameters:
        parameter.grad = None


def forget_passes(stopping: EvidenceStopping) -> None:
    """Drop backward passes after the one that closed a step, as a line search makes them."""
    if stopping.watching and stopping.counts[2]:
        stopping.discard()


class BeforeStep:
    """Calls a function right before a step of optimisers with parameters of a model.

    Once in each iteration of the framework, however many optimisers step in it. If the function
    returns True, for stop, the steps of that iteration are empty ones. It is not called if they
    step with a closure: the batch has not been seen then, and `missed` is set.

    >>> model = nn.Linear(2, 1)
    >>> before = BeforeStep(model, lambda: print("a step"))
    >>> torch.optim.SGD([model.weight], lr=0.1).step()
    a step
    >>> torch.optim.SGD([model.bias], lr=0.1).step()
    >>> before.next_iteration()
    >>> torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1).step()
    >>> before.close()
    """

    def __init__(self, model: nn.Module, function: Callable[[], bool | None]) -> None:
        self.done = self.missed = self.stop = False
        self._own = {id(p) for p in model.parameters()}
        self._function = function
        respond = weakref.WeakMethod(self._stepping)  # the hook must not keep a lost run alive

        def stepping(optimizer: Any, args: Any, kwargs: Any) -> None:
            alive = respond()
            if alive is not None:
                alive(optimizer, args, kwargs)

        self.close = weakref.finalize(self, register_optimizer_step_pre_hook(stepping).remove)

    def next_iteration(self) -> None:
        """The framework begins an iteration: the next step of an optimiser is a new one."""
        self.done = self.missed = self.stop = False

    def weigh(self) -> None:
        """Call the function, unless that was done in this iteration."""
        if not self.done:
            self.done = True
            self.stop = bool(self._function())

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, ElementwiseStopping):
            return  # the one inside will step as well
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in self._own for p in params):
            return
        closure = next((c for c in (*args[1:], kwargs.get("closure")) if c is not None), None)
        if closure is not None:
            self.missed = not self.done
            return
        self.weigh()
        if self.stop:
            forget_gradients(params)


class MethodWrapper:
    """A method of one object that goes through another function until the wrapper is closed.

    >>> class Greeter:
    ...     def greet(self, name):
    ...         return "hello " + name
    >>> greeter = Greeter()
    >>> loud = MethodWrapper(greeter, "greet", lambda greet, name: greet(name).upper())
    >>> twice = MethodWrapper(greeter, "greet", lambda greet, name: 2 * greet(name))
    >>> greeter.greet("you")
    'HELLO YOUHELLO YOU'
    >>> loud.close()                                         # in any order
    >>> greeter.greet("you")
    'hello youhello you'
    >>> twice.close()
    >>> vars(greeter)
    {}
    """

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._inner = getattr(owner, name)
        self._own = name in vars(owner)  # or the class's
        self._open = True
        self.__wrapped__ = getattr(self._inner, "__wrapped__", self._inner)  # for its signature
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapper while it is in place, the method itself afterwards."""
        if self._open:
            return self._around(self._inner, *args, **kwargs)
        return self._inner(*args, **kwargs)

    def close(self) -> None:
        """Put the method back, once the wrappers made later are closed as well."""
        self._open = False
        top = vars(self._owner).get(self._name)
        while isinstance(top, MethodWrapper) and not top._open:
            if top._own:
                setattr(self._owner, self._name, top._inner)
            else:
                delattr(self._owner, self._name)
            top = vars(self._owner).get(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the owner has its own method, without the detour."""
        return getattr, (self._owner, self._name)


class Guard:
    """Ends a run if an error leaves one of the methods through which a framework's loop goes.

    For frameworks that do not tell callbacks of errors and interrupts. Errors pass on as they are.

    Args:
        end: closes all, this guard as well.
        harmless: errors by which the framework steers itself.

    >>> class Loop:
    ...     def train(self):
    ...         raise KeyboardInterrupt
    >>> loop = Loop()
    >>> guard = Guard(lambda: print("the run is over")).over(loop, "train")
    >>> try:
    ...     loop.train()
    ... except KeyboardInterrupt:
    ...     guard.close()
    the run is over
    >>> vars(loop)
    {}
    """

    def __init__(
        self, end: Callable[[], None], harmless: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._end, self._harmless = end, harmless
        self._detours: list[MethodWrapper] = []

    def over(self, owner: Any, *names: str) -> Guard:
        """Watch those methods of an object that it has."""
        for name in names:
            if callable(getattr(owner, name, None)):
                self._detours.append(MethodWrapper(owner, name, self.watched))
        return self

    def watched(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method, and end the run if that fails."""
        try:
            return method(*args, **kwargs)
        except self._harmless:
            raise
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Leave the methods as they were."""
        for detour in self._detours:
            detour.close()
        self._detours = []
