"""Hooks that see what a model is called with and when its optimiser steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .randomness import Autocast
from .stack import hyperparameters
from .together import refuse_apart

__all__ = ["Taken", "Watch"]


@dataclass(eq=False)
class Taken:
    """An optimiser step that the user's loop took.

    Attributes:
        calls: what the model was called with since the step before, with gradients enabled.
        settings: of the optimiser's groups at the time of the step.
        autocast: mixed precision that the model was called in.
    """

    calls: list[tuple[Tensor, ...]]
    settings: list[dict[str, Any]]
    autocast: Autocast | None = None


@dataclass(eq=False)
class Watch:
    """What happened since the last look: calls of the model, steps of the optimiser."""

    owner: str
    alone: bool = True  # no other process trains the model
    calls: list[tuple[Tensor, ...]] = field(default_factory=list)
    steps: list[Taken] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    autocast: Autocast | None = None
    before: int = 0  # calls when the optimiser's step began
    device: str = "cpu"
    handles: list[Any] = field(default_factory=list)
    deaf: bool = False  # while shadows use the model itself

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to watch."""
        self.device = next(model.parameters()).device.type
        self.handles = [
            model.register_forward_pre_hook(self._called, with_kwargs=True),
            optimizer.register_step_pre_hook(self._steps),
            optimizer.register_step_post_hook(self._stepped),
        ]

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.deaf:
            return
        if self.alone:
            refuse_apart(self.owner)
        if torch.is_grad_enabled():
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            self.calls.append(tuple(t.detach() for t in tensors))
            self.autocast = Autocast.now(self.device)

    def _steps(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.settings, self.before = hyperparameters(optimizer), len(self.calls)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # A closure calls the model inside the step, a line search more than once: the same rows.
        calls = self.calls if self.before else self.calls[:1]
        self.steps.append(Taken(calls, self.settings, self.autocast))
        self.calls = []

    def take(self) -> list[Taken]:
        """The steps since the last look."""
        taken, self.steps = self.steps, []
        return taken

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.calls, self.steps = [], [], []
