"""Check the steps of loops on tensors (inputs ..., targets) against `loss_fn`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.loop.events import OptimizerStep
from heldin.loop.hooks import before_calls
from heldin.loop.randomness import RandomState, full_precision

from .exchange import Exchange
from .outputs import one_for_each_row
from .step_check import StepCheck

__all__ = ["PlainStepCheck", "restored_at_calls"]

BatchGradient = Callable[[int], Tensor]


class PlainStepCheck:
    """Compares the gradient of a step with that of the loss on the rows of its calls.

    Args:
        owner: the public name of the rule, for errors.
        model: the user's model.
        optimizer: the user's optimiser.
        clip: largest norm of the gradient, if the loop clips it.
    """

    def __init__(
        self, owner: str, model: nn.Module, optimizer: Optimizer, clip: float | None = None
    ) -> None:
        self._model, self._clip = model, clip
        self._exchange = Exchange(model, optimizer)
        self._device = next(iter(self._exchange.trained.values())).device
        self.steps = StepCheck(
            owner, self._exchange, self._device, relaxed=True, watches_gradients=clip is None
        )
        self.steps.renew()

    def follow(
        self, step: OptimizerStep, loss: Callable[[Tensor, Tensor], Tensor], index: Tensor
    ) -> None:
        """Check a step, if it is due.

        Args:
            step: of the loop.
            loss: (outputs of all rows, their numbers) -> the loss of the step.
            index: numbers of the rows of all calls.
        """
        record = self.steps.take(step.number)
        if record is None or not step.calls:
            return
        trained = list(self._exchange.trained.values())

        def compute() -> Tensor:
            for p in trained:
                p.grad = None
            outputs = []
            for call in step.calls:
                with call.autocast.context():
                    outputs.append(one_for_each_row("step", self._model(*call.tensors)))
            with step.calls[-1].autocast.context():
                total = loss(torch.cat(outputs), index)
            grads = torch.autograd.grad(total, trained, allow_unused=True)
            for p, grad in zip(trained, grads, strict=True):
                p.grad = grad
            if self._clip is not None:
                nn.utils.clip_grad_norm_(trained, self._clip)
            return total.detach()

        def gradients() -> tuple[list[Tensor | None], None]:
            compute()
            return [p.grad for p in trained], None

        optimizer = self._exchange.optimizer
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            full_precision(self._device.type),
            _undisturbed(self._device),
            self._exchange.session() as session,
            self._exchange.modes(step.calls[-1].modes or None),
            restored_at_calls(self._exchange, self._model, step),
        ):
            self.steps.verify(
                step.number,
                record,
                session,
                step.settings,
                gradients,
                lambda: optimizer.step(compute) and None,  # type: ignore[arg-type]
                1,
            )
        self.steps.renew()

    def evaluate(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Return the model's outputs with other weights, in evaluation mode.

        Args:
            weights: trained parameters, and buffers that differ from the model's, by name.
            inputs: arguments of the model.
        """
        exchange = self._exchange
        with torch.no_grad(), _undisturbed(self._device), exchange.session() as session:
            state = exchange.new_state()
            state.weights = [weights[name].detach().clone() for name in exchange.trained]
            names = {id(buffer): name for name, buffer in self._model.named_buffers()}
            own = [table[name] for table, name in exchange.buffer_places]
            state.buffers = [weights.get(names.get(id(b), ""), b).clone() for b in own]
            session.insert(state)
            with exchange.modes(None):
                outputs: Tensor = self._model(*inputs)
        return outputs

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Let calls of the model leave nothing behind: it has a copy of its state meanwhile."""
        exchange = self._exchange
        with torch.no_grad(), _undisturbed(self._device), exchange.session() as session:
            session.insert(exchange.new_state())
            with exchange.modes(None):
                yield


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Leave the global random generators as they were."""
    state = RandomState.current(device)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def restored_at_calls(exchange: Exchange, model: nn.Module, step: OptimizerStep) -> Iterator[None]:
    """Let each call of the model begin with the random state of the user's call."""
    waiting: Sequence[Any] = [call.random_state for call in step.calls if call.random_state]
    remaining = list(waiting)

    def restore() -> None:
        if remaining:
            exchange.restore_random_state(remaining.pop(0))

    with before_calls(model, restore):
        yield
