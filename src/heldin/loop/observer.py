"""Observe a training loop: calls of the model, backward passes, steps of the optimiser.

Rules by an estimated loss observe the loop through this class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from heldin._private_torch import (
    after_backward,
    graph_task_id,
    is_inner_step,
    transform_stack,
    versions_of,
)
from heldin.capture.gradient_ledger import is_zeroed
from heldin.errors import HeldinError, refusal
from heldin.model_hook import ModelHook
from heldin.pause import is_paused

from .batches import tensors_in
from .changes import checksums, marks_of
from .events import ModelCall, OptimizerStep
from .randomness import Autocast

__all__ = ["LoopObserver"]

SMALL = 1_000_000  # weights of models on the CPU, the contents of whose gradients are compared


@dataclass(eq=False)
class _ObservedCall:
    """A call of the model, and numbers of backward passes through it; None if these are unseen."""

    call: ModelCall
    passes: set[int] | None = None

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass went through the call, as far as that can be seen."""
        return self.passes is None or bool(self.passes)


class LoopObserver:
    """Records what the user's loop does between two steps of its optimiser.

    settings: returns copies of the settings of an optimiser's groups; on_call: called before every
    call of the model with gradients; its result is kept in `ModelCall.random_state`; on_step:
    called before every step of the optimiser with whether it has a closure, whether gradients were
    changed since the end of the backward pass, the calls of the model, and the number of backward
    passes through them; on_stepped: called after every step, with the settings before it; refuse:
    called before every call of the model; raises to forbid it.
    """

    def __init__(
        self,
        owner: str,
        settings: Callable[[Optimizer], list[dict[str, Any]]],
        *,
        on_call: Callable[[], Any] | None = None,
        on_step: Callable[[bool, bool, Sequence[ModelCall], int], None] | None = None,
        on_stepped: Callable[[Sequence[dict[str, Any]]], None] | None = None,
        refuse: Callable[[], None] | None = None,
    ) -> None:
        self._owner, self._settings_of = owner, settings
        self._on_call, self._on_step, self._on_stepped = on_call, on_step, on_stepped
        self._refuse = refuse
        self._calls: list[_ObservedCall] = []
        self._steps: list[OptimizerStep] = []
        self._settings: list[dict[str, Any]] = []
        self._calls_before = 0  # calls with gradients when the optimiser's step began
        self._with_closure = False
        self._device = "cpu"
        self._modules: list[nn.Module] = []
        self._trained: list[Tensor] = []
        self._numbers: set[int] = set()  # `id` of these
        self._optimizer: Optimizer | None = None
        self._handles: list[Any] = []
        self._count = 0  # steps so far
        self.passes = 0  # backward passes since the last step, where they are counted
        self._fresh = 1  # see `OptimizerStep`
        self._reached = False
        self._gradients: Any = None  # see `_state_of_gradients`, at the end of the backward pass
        self._queued = -1  # the backward pass at whose end it is read
        self._zeroed: frozenset[int] | None = None  # see `OptimizerStep`
        self._is_small = False
        self._in_grad = True

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._device = next(model.parameters()).device.type
        self._modules = list(model.modules())
        self._optimizer = optimizer
        self._trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._numbers = {id(p) for p in self._trained}
        is_plain = all(p.device.type == "cpu" and type(p.data) is Tensor for p in self._trained)
        self._is_small = is_plain and sum(p.numel() for p in self._trained) <= SMALL
        self._handles = [
            model.register_forward_pre_hook(ModelHook(self._called), with_kwargs=True),
            model.register_forward_hook(ModelHook(self._returned)),
            optimizer.register_step_pre_hook(self._steps_now),
            optimizer.register_step_post_hook(self._stepped),
            register_optimizer_step_pre_hook(self._refuse_other),
        ]

    def count_passes(self, in_grad: bool) -> None:
        """Begin to count backward passes; `in_grad`: the loop accumulates them in `.grad`."""
        self._in_grad = in_grad
        trained = [p for p in self._trained if p.requires_grad]
        self._handles.append(register_multi_grad_hook(trained, self._arrives, mode="any"))

    def take_reached(self) -> bool:
        """Return whether a backward pass has reached the parameters since this was asked last."""
        reached, self._reached = self._reached, False
        return reached

    @property
    def pending(self) -> bool:
        """Whether the optimiser has stepped since the last `take`."""
        return bool(self._steps)

    def take(self) -> list[OptimizerStep]:
        """Return the steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def forget(self) -> None:
        """Forget the calls and steps since the last `take`."""
        self._calls, self._steps = [], []

    # -- hooks

    def _refuse_other(self, other: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse the step of another optimiser that trains the same parameters."""
        mine = self._optimizer
        if is_paused() or mine is None or other is mine:
            return
        if getattr(other, "optimizer", None) is mine:  # a wrapper around it
            return
        if any(id(p) in self._numbers for group in other.param_groups for p in group["params"]):
            raise refusal(
                self._owner,
                f"another optimiser than the one given ({type(other).__name__}) trains the model, "
                "and shadows would not follow it;",
                "make the stopping object with the optimiser that trains the model, or pass the "
                "whole step: train_step=..., with every further optimiser in state=[...]",
            )

    def _called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_paused():
            return
        if self._refuse is not None:
            self._refuse()
        if not torch.is_grad_enabled() or transform_stack() is not None:
            return  # an evaluation, or a derivative by torch.func
        tensors = [t.detach() for t in tensors_in([*args, *kwargs.values()])]
        compiling = torch.compiler.is_compiling()
        call = ModelCall(
            tuple(tensors),
            () if compiling else tuple(versions_of(tensors)),
            () if compiling else tuple([each.training for each in self._modules]),
            Autocast.current(self._device),
            None if compiling or self._on_call is None else self._on_call(),
        )
        self._calls.append(_ObservedCall(call))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        """Look for backward passes through the call that has just ended."""
        if is_paused() or not self._calls or not torch.is_grad_enabled():
            return
        if transform_stack() is not None:
            return
        if torch.compiler.is_compiling():
            return
        outputs = [output] if isinstance(output, Tensor) else list(tensors_in(output))
        nodes = {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}
        if not nodes and (not outputs or any(tensor.requires_grad for tensor in outputs)):
            return  # an output without tensors
        observed = self._calls[-1]
        observed.passes = set()
        for node in nodes:  # cheaper than hooks of the tensors
            node.register_prehook(lambda _: self._backward(observed))

    def _backward(self, observed: _ObservedCall) -> None:
        """Record a backward pass; the loop may have thrown the gradients of earlier ones away."""
        now = graph_task_id()
        earlier = [c for c in self._calls if c.passes and now not in c.passes]
        if earlier and self._gradients_are_zeroed():
            self._calls = [c for c in self._calls if c not in earlier]
        if observed.passes is not None:
            observed.passes.add(now)
        if self._zeroed is None:
            self._zeroed = frozenset(id(p) for p in self._trained if p.grad is not None)
        if self._on_step is not None and self._queued != now:
            self._queued = now
            after_backward(self._note_gradients)

    def _gradients_are_zeroed(self) -> bool:
        """Return whether the loop has thrown the gradients of earlier passes away."""
        return all(is_zeroed(p.grad) for p in self._trained)

    def _note_gradients(self) -> None:
        self._gradients = self._state_of_gradients()

    def _state_of_gradients(self) -> Any:
        """Return numbers that change if a gradient is replaced or changed in place."""
        grads = [p.grad for p in self._trained if p.grad is not None]
        if not self._is_small or any(g.layout != torch.strided for g in grads):
            return marks_of(grads), len(grads)
        return marks_of(grads), checksums([g.detach() for g in grads]).tolist()

    def _arrives(self, _: Tensor) -> None:
        if is_paused():
            return
        self.passes += 1
        self._reached = True
        if self._in_grad and self.passes > 1 and self._gradients_are_zeroed():
            self._fresh = self.passes

    def _steps_now(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_paused() or is_inner_step(optimizer):
            return
        if graph_task_id() != -1:
            raise HeldinError(
                f"{self._owner}: the optimiser steps inside backward(), parameter by parameter, so "
                "that no step belongs to one batch; call optimizer.step() after backward()"
            )
        self._settings = self._settings_of(optimizer)
        self._calls_before = sum(observed.has_gradient for observed in self._calls)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._with_closure = closure is not None
        if self._on_step is not None:
            changed = self._gradients not in (None, self._state_of_gradients())
            live = [observed for observed in self._calls if observed.has_gradient]
            passes = set().union(*(observed.passes or () for observed in live))
            calls = [observed.call for observed in live]
            changed = changed and not self._with_closure
            self._on_step(self._with_closure, changed, calls, len(passes))

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_paused() or is_inner_step(optimizer):
            return
        # A closure calls the model inside the step, a line search more than once: the same rows.
        calls = [observed.call for observed in self._calls if observed.has_gradient]
        calls = calls if self._calls_before else calls[:1]
        self._count += 1
        self._steps.append(
            OptimizerStep(
                self._count,
                tuple(calls),
                tuple(self._settings),
                self._with_closure,
                self._fresh,
                self._zeroed or frozenset(),
            )
        )
        self._calls, self.passes, self._fresh, self._gradients = [], 0, 1, None
        self._zeroed, self._queued = None, -1
        if self._on_stepped is not None:
            self._on_stepped(self._settings)

    def close(self) -> None:
        """Remove all hooks and release the model and the optimiser."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._calls, self._steps = [], [], []
        self._modules, self._trained = [], []
        self._optimizer = self._on_call = self._on_step = self._on_stepped = self._refuse = None
