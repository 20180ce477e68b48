"""Replaced methods of a framework's objects, and its optimiser in the shape of PyTorch's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from traceback import walk_stack
from typing import Any

from torch.optim import Optimizer

from heldin.pause import is_paused

__all__ = [
    "MethodWrapper", "OptimizerBridge", "Patches", "callers", "local_variable", "replaced",
]  # fmt: skip


class MethodWrapper:
    """A method of one object that is called through another function until `close`."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._inner = getattr(owner, name)
        self._is_attribute = name in vars(owner)  # of the object, not of its class
        self._open = True
        self.__wrapped__ = getattr(self._inner, "__wrapped__", self._inner)  # for its signature
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method through the function; after `close`, the method alone."""
        if self._open:
            return self._around(self._inner, *args, **kwargs)
        return self._inner(*args, **kwargs)

    def close(self) -> None:
        """Put the method back, once the wrappers around this one are closed as well."""
        self._open = False
        top = vars(self._owner).get(self._name)
        while isinstance(top, MethodWrapper) and not top._open:
            if top._is_attribute:
                setattr(self._owner, self._name, top._inner)
            else:
                delattr(self._owner, self._name)
            top = vars(self._owner).get(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copy of the owner have its method without the wrapper."""
        return getattr, (self._owner, self._name)


class Patches(ExitStack):
    """The wrapped methods of a run; `close` puts them back.

    Args:
        on_error: called if an error or an interrupt leaves a watched method, for frameworks that do
            not report them to callbacks. The error is raised again.
        harmless: exceptions by which the framework controls its loop.
    """

    def __init__(
        self,
        on_error: Callable[[], None] | None = None,
        harmless: tuple[type[BaseException], ...] = (),
    ) -> None:
        super().__init__()
        self._on_error, self._harmless = on_error, harmless

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Call a method of an object through a function, which gets the method first."""
        self.callback(MethodWrapper(owner, name, around).close)

    def watch_methods(self, owner: Any, *names: str) -> None:
        """Call `on_error` if an error leaves one of these methods; skip names without a method."""
        for name in names:
            if callable(getattr(owner, name, None)):
                self.wrap(owner, name, self.call)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, and `on_error` if an error leaves it."""
        try:
            return function(*args, **kwargs)
        except self._harmless:
            raise
        except BaseException:
            if self._on_error is not None:
                self._on_error()
            raise

    def items(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of an iterable, and call `on_error` if it raises an error."""
        iterator, end = iter(iterable), object()
        while (item := self.call(next, iterator, end)) is not end:
            yield item


@contextmanager
def replaced(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes, each given as object, name and value, inside the context.

    They are set past properties and `__setattr__`.
    """
    new = list(places)
    old = [(owner, name, name in vars(owner), vars(owner).get(name)) for owner, name, _ in new]
    try:
        for owner, name, value in new:
            vars(owner)[name] = value
        yield
    finally:
        for owner, name, existed, value in old:
            if existed:
                vars(owner)[name] = value
            else:
                del vars(owner)[name]


class OptimizerBridge(Optimizer):
    """A framework's optimiser as one of PyTorch, with hooks around its steps.

    Args:
        params: parameters, or groups of them with the settings of the optimiser.
        replay: takes a step of the framework's optimiser with the settings in `param_groups` and
            the state in `state`, which are a shadow's then.
    """

    def __init__(self, params: Any, replay: Callable[[], Any]) -> None:
        super().__init__(params, {})
        self._framework_step = self._replay = replay

    def run(self, step: Callable[[], Any]) -> Any:
        """Let the framework take its step, between the hooks of this optimiser."""
        results: list[Any] = []
        self._framework_step = lambda: results.append(step())
        self.step()
        self._framework_step = self._replay
        return results[0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step: the framework's, or a shadow's."""
        if is_paused():
            self._replay()
        else:
            self._framework_step()


# -- objects that a framework does not give to its callbacks


def callers(kinds: tuple[type, ...]) -> list[Any]:
    """Return the objects of some types whose methods are being called."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    owners = [f.f_locals.get("self") for f in frames if f.f_code.co_varnames[:1] == ("self",)]
    return [*{id(owner): owner for owner in owners if isinstance(owner, kinds)}.values()]


def local_variable(name: str, function: str) -> Any:
    """Return a variable of a function that is being called; None if there is none."""
    frames = (frame for frame, _ in walk_stack(sys._getframe()))
    calls = (f.f_locals for f in frames if f.f_code.co_name == function)
    return next((variables[name] for variables in calls if name in variables), None)
