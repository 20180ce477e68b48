"""Check the steps of loops on tensors (inputs ..., targets) against `loss_fn`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.loop.events import OptimizerStep
from heldin.loop.hooks import before_calls
from heldin.loop.randomness import full_precision, separate_random_stream

from .exchange import Exchange
from .outputs import one_for_each_row
from .step_check import StepCheck

__all__ = ["PlainStepCheck", "restored_at_calls"]


class PlainStepCheck:
    """Compares the gradient of a step with that of the loss on the rows of its calls.

    clip: largest norm of the gradient, if the loop clips it.
    """

    def __init__(
        self, owner: str, model: nn.Module, optimizer: Optimizer, clip: float | None = None
    ) -> None:
        self._model, self._clip = model, clip
        self.exchange = Exchange(model, optimizer)
        self._device = next(iter(self.exchange.trained.values())).device
        self.steps = StepCheck(
            owner, self.exchange, self._device, relaxed=True, watches_gradients=clip is None
        )
        self.steps.renew()

    def follow(
        self, step: OptimizerStep, loss: Callable[[Tensor, Tensor], Tensor], index: Tensor
    ) -> None:
        """Check a step, if it is due.

        loss: (outputs of all rows, their numbers) -> the loss of the step; index: these numbers.
        """
        record = self.steps.take(step.number)
        if record is None or not step.calls:
            return
        trained = list(self.exchange.trained.values())

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

        def candidates() -> dict[float, list[Tensor | None]]:
            compute()
            return {1.0: [p.grad for p in trained]}

        def take_step() -> None:
            self.exchange.optimizer.step(compute)  # type: ignore[arg-type]

        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            full_precision(self._device.type),
            separate_random_stream(self._device),
            self.exchange.session() as session,
            self.exchange.modes(step.calls[-1].modes or None),
            restored_at_calls(self.exchange, self._model, step),
        ):
            self.steps.verify(step.number, record, session, step.settings, candidates, take_step)
        self.steps.renew()

    def evaluate(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Return the model's outputs with other weights, in evaluation mode."""
        with self.trial(weights):
            outputs: Tensor = self._model(*inputs)
        return outputs

    @contextmanager
    def trial(self, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Let calls of the model leave nothing behind: it has a copy of its state meanwhile.

        weights: trained parameters, and buffers that differ from the model's, by name.
        """
        exchange, stream = self.exchange, separate_random_stream(self._device)
        with torch.no_grad(), stream, exchange.session() as session:
            state = exchange.new_state()
            if weights is not None:
                state.weights = [weights[name].detach().clone() for name in exchange.trained]
                names = {id(buffer): name for name, buffer in self._model.named_buffers()}
                own = [table[name] for table, name in exchange.buffer_places]
                state.buffers = [weights.get(names.get(id(b), ""), b).clone() for b in own]
            session.insert(state)
            with exchange.modes(None):
                yield


@contextmanager
def restored_at_calls(exchange: Exchange, model: nn.Module, step: OptimizerStep) -> Iterator[None]:
    """Let each call of the model begin with the random state of the user's call."""
    remaining = [call.random_state for call in step.calls if call.random_state]

    def restore() -> None:
        if remaining:
            exchange.restore_random_state(remaining.pop(0))

    with before_calls(model, restore):
        yield
