"""A LightningModule's own `training_step` on a shadow, without what else it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError

__all__ = ["Rehearsal"]

NO_LOSS = (
    "AutoStopping: training_step gave no loss to self.manual_backward, by which shadows get to "
    "know it; call that instead of loss.backward()"
)


class Rehearsal:
    """The loss of a batch by a module's `training_step`; nothing is logged and nobody steps.

    With manual optimisation the loss is the sum of what is given to `manual_backward` (of held-out
    rows: what the step returns, if it does), and `clip_gradients` is taken down for `clip`.

    Args:
        trainer: that the module asks for epochs, steps and so on.
        module: that is trained.
        logger: to be given to the shadow's step in place of the Trainer's.

    Attributes:
        batch_idx: the number of the batch of the coming step.
    """

    def __init__(self, trainer: Any, module: nn.Module, logger: Any) -> None:
        self._trainer = _Quiet(trainer, logger=logger, loggers=[logger])
        self._module = module
        self._manual = not module.automatic_optimization
        self.batch_idx = 0
        names = inspect.signature(module.training_step).parameters  # type: ignore[arg-type]
        if "dataloader_iter" in names:
            raise HeldinError(
                "AutoStopping: a training_step that takes dataloader_iter draws its batches "
                "itself; let it take batch, or use EvidenceStopping"
            )
        self._numbered = len(names) > 1
        self._clipping: tuple[Any, Any] | None = None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss."""
        losses: list[Tensor] = []
        arguments = (batch, self.batch_idx) if self._numbered else (batch,)
        context = self._trainer.precision_plugin.train_step_context()
        with self._muted(model, losses), context:
            try:
                out = model.training_step(*arguments)  # type: ignore[operator]
            except RuntimeError as error:
                if self._manual and "does not require grad" in str(error):
                    raise HeldinError(NO_LOSS) from error  # a backward pass in an evaluation
                raise
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if self._manual:
            if not losses:
                raise HeldinError(NO_LOSS)
            if isinstance(loss, Tensor) and not torch.is_grad_enabled():
                return loss  # an evaluation: not divided by a number of accumulated batches
            return sum(losses[1:], losses[0])
        if not isinstance(loss, Tensor):
            raise HeldinError(
                "AutoStopping: training_step returned no loss for the rows that a shadow may see; "
                "let it return one for every batch"
            )
        return loss

    def other(self, function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """Another loss, to evaluate held-out rows by, under the same conditions."""

        def evaluated(model: nn.Module, batch: Any) -> Tensor:
            with self._muted(model, []), self._trainer.precision_plugin.val_step_context():
                return function(model, batch)

        return evaluated

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """As the manual step has clipped, if it has."""
        if self._clipping is not None:
            clip_by(*self._clipping)(parameters)

    def shares(self, batches: list[Any]) -> list[float] | None:
        """With manual optimisation the losses of accumulated batches are added as they are."""
        return [1.0] * len(batches) if self._manual else None

    def scale(self, sizes: list[int]) -> float:
        """Lightning divides by the batches of a full step, also where an epoch ends before."""
        number = 0 if self._manual else self._trainer.accumulate_grad_batches
        return len(sizes) / number if number else 1.0

    @contextmanager
    def _muted(self, model: nn.Module, losses: list[Tensor]) -> Iterator[None]:
        quiet: dict[str, Any] = {"log": _nothing, "log_dict": _nothing}
        if self._manual:
            quiet |= {
                "manual_backward": lambda loss, *_, **__: losses.append(loss),
                "optimizers": self._optimizers,
                "lr_schedulers": self._schedulers,
                "clip_gradients": self._clips,
                "toggle_optimizer": _nothing,
                "untoggle_optimizer": _nothing,
            }
        places = [(model, name, value) for name, value in quiet.items()]
        places += [(m, "_trainer", self._trainer) for m in model.modules() if "_trainer" in vars(m)]
        before = [(m, name, vars(m).get(name, _nothing)) for m, name, _ in places]
        try:
            for module, name, value in places:
                vars(module)[name] = value
            yield
        finally:
            for module, name, value in before:
                if value is _nothing:
                    del vars(module)[name]
                else:
                    vars(module)[name] = value

    def _optimizers(self, *args: Any, **kwargs: Any) -> Any:
        return _idle(type(self._module).optimizers(self._module, *args, **kwargs))  # type: ignore[attr-defined]

    def _schedulers(self) -> Any:
        return _idle(type(self._module).lr_schedulers(self._module))  # type: ignore[attr-defined]

    def _clips(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val is not None:
            self._clipping = gradient_clip_val, gradient_clip_algorithm


def clip_by(value: float, algorithm: str | None) -> Callable[[list[nn.Parameter]], Any]:
    """A function that clips gradients as Lightning does.

    >>> weight = nn.Parameter(Tensor([0.0, 0.0]))
    >>> weight.grad = Tensor([3.0, 4.0])
    >>> clip_by(2.0, "value")([weight])
    >>> weight.grad
    tensor([2., 2.])
    """
    if algorithm in (None, "norm"):
        return lambda parameters: nn.utils.clip_grad_norm_(parameters, value)
    return lambda parameters: nn.utils.clip_grad_value_(parameters, value)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _idle(found: Any) -> Any:
    """Optimisers or schedulers that do not step."""
    if isinstance(found, list):
        return [_Idle(each) for each in found]
    return None if found is None else _Idle(found)


class _Idle:
    """An optimiser or scheduler that only answers."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the closure, if there is one."""
        closure = next((a for a in (*args, kwargs.get("closure")) if callable(a)), None)
        return closure() if closure is not None else None

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Shadows see to that."""

    @contextmanager
    def toggle_model(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Nothing to toggle: gradients are asked for by parameter."""
        yield


class _Quiet:
    """A Trainer in which some attributes are others; what is set stays here."""

    def __init__(self, trainer: Any, **others: Any) -> None:
        vars(self).update(others, _heldin_trainer=trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_heldin_trainer"], name)
