"""heldin in plain loops with an `Accelerator`: `EarlyStopping`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .adapters.arguments import check_type, needs_framework, strict_kwargs
from .adapters.stopping import FrameworkStopping
from .errors import HeldinError
from .rules.options import Rule
from .shadows.held_out import BatchLoss, FrameworkLoss
from .shadows.replayed import Clip

with needs_framework("Accelerate", "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

__all__ = ["EarlyStopping"]

NAME = "heldin.accelerate.EarlyStopping"
# Every process has all weights.
WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class EarlyStopping(FrameworkStopping):
    """Stops a loop with an `Accelerator`, all its processes in the same step.

    Rules by an estimated test loss: call `step(batch)` for every batch, after `optimizer.step()`.
    At the end of the `with` block the best weights are put into the model.

    Evidence: call `step()` after `accelerator.backward(loss)` and before `optimizer.step()`; of the
    arguments below, `optimizer`, `batch_loss` and `clip` are left out, and `loader` too, unless the
    window is an epoch.

    While gradients are accumulated, `step` returns False. The state is in the accelerator's
    checkpoints (`save_state`, `load_state`).

    Args:
        accelerator: the accelerator of the loop.
        model, optimizer, loader: as `accelerator.prepare` gave them.
        batch_loss: (model, batch) -> loss, as the loop has it, before it is divided by the number
            of accumulated batches.
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        clip: how the loop clips gradients: the largest norm, or a function of the parameters.
        restore: put the weights of the best estimate into the model at the end.
        verbose: print at the end what was chosen, why it stopped and what to expect.
        log_groups: `metrics()` also has the value of each group of parameters, for evidence.
        others: see `heldin.EarlyStopping`.

    Attributes:
        stopping: the rule behind it, with its history and estimate.
        estimates, out_of_fold, temperature: results, see `heldin.EarlyStopping`.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from heldin.accelerate import EarlyStopping
    >>> accelerator = Accelerator(cpu=True)
    >>> x = torch.randn(20, 4)
    >>> rows = torch.utils.data.TensorDataset(x, x[:, :1])
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer, loader = accelerator.prepare(
    ...     model,
    ...     torch.optim.SGD(model.parameters(), lr=0.1),
    ...     torch.utils.data.DataLoader(rows, batch_size=5),
    ... )
    >>> def batch_loss(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> arguments = accelerator, model, optimizer, loader, batch_loss
    >>> with EarlyStopping(*arguments, verbose=False) as stopping:
    ...     for batch in loader:
    ...         accelerator.backward(batch_loss(model, batch))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         if stopping.step(batch):
    ...             break
    >>> 0 < stopping.metrics()["heldin/estimate"] < 3
    True
    """

    name = NAME

    @strict_kwargs(extends=FrameworkStopping.__init__)
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any = None,
        loader: Any = None,
        batch_loss: BatchLoss | None = None,
        rule: str | Rule = "auto",
        *,
        clip: Clip | None = None,
        **options: Any,
    ) -> None:
        check_type(NAME, "accelerator", accelerator, Accelerator, "the Accelerator")
        check_type(NAME, "model", model, nn.Module, "the model that is trained")
        super().__init__(rule, **options)
        self._accelerator = accelerator
        loss = None if batch_loss is None else DividedLoss(batch_loss, accelerator)
        if self.by_evidence:
            self._run.rule.refuse_unused(NAME, {"batch_loss": batch_loss, "clip": clip}, {})
        else:
            if optimizer is None or loader is None or batch_loss is None:
                raise HeldinError(
                    f"{NAME}: optimizer, loader and batch_loss are needed, except for "
                    "rule='evidence'"
                )
            _check_accelerator(accelerator)
        self._run.follow(loader)
        self._run.begin(
            accelerator.unwrap_model(model),
            optimizer,
            loss,
            loader,
            clip=clip,
            pools_ranks=True,
            accumulated=accelerator.gradient_accumulation_steps,
        )
        accelerator.register_for_checkpointing(Registered(self))

    def follow(self, loader: Any) -> None:
        """Follow another loader over the same rows, as `accelerate.skip_first_batches` makes."""
        self._run.follow(loader)

    def step(self, batch: Any = None) -> bool:
        """Follow a step of the loop; return True if training should stop, in all processes alike.

        Args:
            batch: the batch of the optimiser step just taken, as the loader gave it; not for
                evidence.
        """
        accelerator = self._accelerator
        if self.by_evidence:
            if not accelerator.sync_gradients:
                return False
            stops = torch.tensor(int(self.stopping.step()), device=accelerator.device)
            return bool(accelerator.reduce(stops, reduction="sum").item() > 0)
        if batch is None:
            raise HeldinError(f"{NAME}.step: pass the batch, as the loader gave it: step(batch)")
        self._run.add(batch)
        return bool(self._run.step()) if accelerator.sync_gradients else False

    def metrics(self) -> dict[str, float]:
        """Return the values for `accelerator.log`."""
        values: dict[str, float] = self._run.metrics()
        return values

    def close(self) -> None:
        """Put the best weights into the model, and follow no more.

        `accelerator.log(stopping.summary())` logs the results; `end_training` may come before.
        """
        self._conclude()

    def __enter__(self) -> EarlyStopping:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._run.end()


def _check_accelerator(accelerator: Accelerator) -> None:
    """Refuse weights and losses that shadows do not follow."""
    if accelerator.distributed_type not in WHOLE:
        raise HeldinError(
            f"{NAME}: {accelerator.distributed_type.value} divides the weights among the "
            "processes, and shadows have them whole; use DistributedDataParallel, or "
            "rule='evidence'"
        )
    if accelerator.scaler is not None:
        raise HeldinError(
            f"{NAME}: shadows do not scale their loss, as mixed_precision='fp16' needs; use 'bf16'"
        )


class DividedLoss(FrameworkLoss):
    """The loss of a batch, which `accelerator.backward` divides by the batches of a full step."""

    def __init__(self, batch_loss: BatchLoss, accelerator: Accelerator) -> None:
        self._loss, self._accelerator = batch_loss, accelerator

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss before it is divided."""
        return self._loss(model, batch)

    def shares(self, batches: list[Any]) -> list[float]:
        """Return the factors of the losses, also where an epoch ends before a step is full."""
        return [1.0 / self._accelerator.gradient_accumulation_steps] * len(batches)


class Registered:
    """A weak reference to the rule, which the accelerator would keep alive otherwise."""

    def __init__(self, stopping: EarlyStopping) -> None:
        self._stopping = weakref.ref(stopping)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; nothing if the rule is gone."""
        stopping = self._stopping()
        return {} if stopping is None else stopping.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state, if the rule is still there."""
        stopping = self._stopping()
        if stopping is not None:
            stopping.load_state_dict(state_dict)
