"""Register hooks on the user's models, optimisers and parameters.

Only `heldin.loop` and `heldin.capture` register hooks; other packages use these functions.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from heldin.model_hook import ModelHook
from heldin.pause import is_paused

__all__ = [
    "add_to_state",
    "after_calls",
    "after_every_step",
    "before_calls",
    "call_at_steps",
    "record_calls",
    "replaced_forwards",
    "scaled_gradients",
]


def call_at_steps(
    method: Callable[[Optimizer, Any, Any], None],
    optimizer: Optimizer | None = None,
    *,
    after: bool = False,
) -> Callable[[], Any]:
    """Call a bound method before or after steps of an optimiser, but not at those that heldin runs.

    Without an optimiser: of every one. The hook does not keep the object of the method alive.
    Returns a function that removes the hook, which is also removed with that object.
    """
    assert isinstance(method, MethodType)
    reference = weakref.WeakMethod(method)

    def respond(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        living = reference()
        if living is not None and not is_paused():
            living(optimizer, args, kwargs)

    register: Any
    if optimizer is None:
        register = register_optimizer_step_post_hook if after else register_optimizer_step_pre_hook
    else:
        register = optimizer.register_step_post_hook if after else optimizer.register_step_pre_hook
    return weakref.finalize(method.__self__, register(respond).remove)


def after_every_step(optimizer: Optimizer, function: Callable[[], None]) -> Callable[[], None]:
    """Call a function after every step of an optimiser, those of shadows, too; return its end."""
    return optimizer.register_step_post_hook(lambda *_: function()).remove


def before_calls(module: nn.Module, function: Callable[[], None]) -> RemovableHandle:
    """Call a function before the other hooks of each call of a module, while the context lasts."""
    return module.register_forward_pre_hook(lambda module, args: function(), prepend=True)


@contextmanager
def after_calls(
    modules: Iterable[nn.Module], function: Callable[[nn.Module, Any], None]
) -> Iterator[None]:
    """Call a function after each call of a module, with the module and its output."""
    with ExitStack() as handles:
        for module in modules:
            handle = module.register_forward_hook(lambda module, args, out: function(module, out))
            handles.enter_context(handle)
        yield


def record_calls(
    modules: Iterable[nn.Module], function: Callable[[nn.Module, Any, Any, Any], None]
) -> Callable[[], None]:
    """Call a bound method after each call of a module in training, but not in those of heldin.

    It takes the module, its arguments, its keyword arguments and its output. Returns a function
    that removes the hooks.
    """
    assert isinstance(function, MethodType)
    reference = weakref.WeakMethod(function)

    def respond(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        living = reference()
        if living is not None and torch.is_grad_enabled() and not is_paused():
            living(module, args, kwargs, output)

    hook, handles = ModelHook(respond), ExitStack()
    for module in modules:
        handles.enter_context(module.register_forward_hook(hook, with_kwargs=True))
    return weakref.finalize(function.__self__, handles.close)


@contextmanager
def replaced_forwards(
    modules: Iterable[nn.Module],
    function: Callable[[Callable[..., Any], nn.Module, Any, Any], Any],
) -> Iterator[None]:
    """Let a function take the place of modules' `forward`, unless that is an attribute of theirs.

    It takes the module's own `forward`, the module, arguments and keyword arguments.
    """
    replaced = [module for module in modules if "forward" not in vars(module)]

    def of(module: nn.Module) -> Callable[..., Any]:
        original = module.forward
        return lambda *args, **kwargs: function(original, module, args, kwargs)

    try:
        for module in replaced:
            vars(module)["forward"] = of(module)
        yield
    finally:
        for module in replaced:
            vars(module).pop("forward", None)


@contextmanager
def scaled_gradients(parameters: Iterable[Tensor], factor: float) -> Iterator[None]:
    """Multiply gradients of parameters as they arrive; a factor of 0 gives 0, not nan."""

    def scale(gradient: Tensor) -> Tensor:
        return gradient * factor if factor else torch.zeros_like(gradient)

    with ExitStack() as handles:
        for p in parameters if factor != 1.0 else ():
            handles.enter_context(p.register_hook(scale))
        yield


def add_to_state(
    optimizer: Optimizer, add: Callable[[Optimizer, dict[str, Any]], dict[str, Any]]
) -> Any:
    """Let a function change what `optimizer.state_dict()` returns; return the handle."""
    return optimizer.register_state_dict_post_hook(add)
