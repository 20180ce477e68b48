"""Hooks that see what a model is called with and when its optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from heldin._private_torch import graph_task_id, version_of

from .batches import tensors_in
from .randomness import Autocast
from .stack import hyperparameters
from .together import refuse_apart

__all__ = ["CHANGED", "Call", "Taken", "Watch"]

CHANGED = (
    "step: the batch was changed in place when the model was called with it, or afterwards, so "
    "that shadows would be trained on something else; let model and loop change a copy of it"
)


@dataclass(eq=False)
class Call:
    """A call of the model with gradients enabled.

    Attributes:
        tensors: what it was called with.
        versions: of these tensors, to see whether they are changed in place later.
        modes: of all modules, training or not.
        passes: the backward passes that went through it; None if that cannot be seen.
    """

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...] = ()
    modes: tuple[bool, ...] = ()
    passes: set[int] | None = field(default_factory=set)

    @property
    def trained(self) -> bool:
        """Whether gradients of it have been asked for."""
        return self.passes is None or bool(self.passes)


@dataclass(eq=False)
class Taken:
    """An optimiser step that the user's loop took.

    Attributes:
        calls: what the model was called with since the step before, where gradients of the call
            are in the step.
        settings: of the optimiser's groups at the time of the step.
        autocast: mixed precision that the model was called in.
        of: the calls themselves.
        fresh: the number of the last backward pass of the step, from 1 on, that found no gradients
            of those before it: they were thrown away.
    """

    calls: list[tuple[Tensor, ...]]
    settings: list[dict[str, Any]]
    autocast: Autocast | None = None
    of: list[Call] = field(default_factory=list)
    fresh: int = 1

    def changed(self) -> set[int]:
        """Where tensors lie that were changed in place after the model was called with them."""
        return {
            tensor.untyped_storage().data_ptr()
            for call in self.of
            for tensor, version in zip(call.tensors, call.versions, strict=False)
            if version_of(tensor) != version
        }


@dataclass(eq=False)
class Watch:
    """What happened since the last look: calls of the model, steps of the optimiser."""

    owner: str
    alone: bool = True  # no other process trains the model
    calls: list[Call] = field(default_factory=list)
    steps: list[Taken] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    autocast: Autocast | None = None
    before: int = 0  # calls when the optimiser's step began
    device: str = "cpu"
    modules: list[nn.Module] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    deaf: bool = False  # while shadows use the model itself
    passes: int = 0  # backward passes since the last step, if they are counted
    fresh: int = 1  # see `Taken`
    reached: bool = False  # whether there was one since this was set to false
    in_grad: bool = True  # accumulated gradients lie in `.grad`, and are thrown away if not there

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to watch."""
        self.device = next(model.parameters()).device.type
        self.modules = list(model.modules())
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.handles = [
            model.register_forward_pre_hook(self._called, with_kwargs=True),
            model.register_forward_hook(self._returned),
            optimizer.register_step_pre_hook(self._steps),
            optimizer.register_step_post_hook(self._stepped),
        ]

    def count_passes(self, in_grad: bool) -> None:
        """Look out for backward passes, which takes a little of each, from now on."""
        self.in_grad = in_grad
        trained = [p for p in self.trained if p.requires_grad]
        self.handles.append(register_multi_grad_hook(trained, self._arrives, mode="any"))

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.deaf:
            return
        if self.alone:
            refuse_apart(self.owner)
        if torch.is_grad_enabled():
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            call = Call(tuple(t.detach() for t in tensors), passes=None)
            if not torch.compiler.is_compiling():
                call.versions = tuple(version_of(t) for t in call.tensors)
                call.modes = tuple([each.training for each in self.modules])
            self.calls.append(call)
            self.autocast = Autocast.now(self.device)

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        """Look out for gradients of the call that has just ended."""
        if self.deaf or not self.calls or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            return
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        made = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        if not made and (not outputs or any(tensor.requires_grad for tensor in outputs)):
            return  # something that cannot be looked into
        call = self.calls[-1]
        call.passes = set()
        for node in made:  # cheaper than hooks of the tensors
            node.register_prehook(lambda _: self._backward(call))

    def _backward(self, call: Call) -> None:
        """Gradients arrive at a call; those of earlier passes may have been thrown away."""
        now = graph_task_id()
        earlier = [c for c in self.calls if c.passes and now not in c.passes]
        if earlier and not any(_has_gradient(p) for p in self.trained):
            self.calls = [c for c in self.calls if c not in earlier]
        if call.passes is not None:
            call.passes.add(now)

    def _arrives(self, _: Tensor) -> None:
        """A backward pass has come to the first of the trained parameters."""
        self.passes += 1
        self.reached = True
        if self.in_grad and self.passes > 1 and not any(map(_has_gradient, self.trained)):
            self.fresh = self.passes

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.settings = hyperparameters(optimizer)
        self.before = sum(call.trained for call in self.calls)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure calls the model inside the step, a line search more than once: the same rows.
        calls = [call for call in self.calls if call.trained]
        calls = calls if self.before else calls[:1]
        self.steps.append(
            Taken([call.tensors for call in calls], self.settings, self.autocast, calls, self.fresh)
        )
        self.calls, self.passes, self.fresh = [], 0, 1

    @contextmanager
    def as_called(self, taken: Taken) -> Iterator[None]:
        """The model's modules are in the modes in which it was called."""
        modes = taken.of[-1].modes if taken.of else ()
        other = [
            (module, mode)
            for module, mode in zip(self.modules, modes, strict=False)
            if module.training != mode
        ]
        try:
            for module, mode in other:
                module.training = mode
            yield
        finally:
            for module, mode in other:
                module.training = not mode

    def take(self) -> list[Taken]:
        """The steps since the last look."""
        taken, self.steps = self.steps, []
        return taken

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.calls, self.steps = [], [], []
        self.modules, self.trained = [], []


def _has_gradient(p: Tensor) -> bool:
    return p.grad is not None and (p.grad.is_sparse or bool(p.grad.any()))
