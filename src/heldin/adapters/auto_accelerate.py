"""`heldin.accelerate.AutoStopping`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from heldin.errors import HeldinError
from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.separate import BatchLoss, Clip
from heldin.rules.estimated.shadows import PATIENCE

from .estimating import EstimatingSession, own_loader
from .settings import refuse_stranger, spelled_out

__all__ = ["AutoStopping", "Registered"]

NAME = "heldin.accelerate.AutoStopping"
# Every process has all weights.
WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class AutoStopping:
    """Stops a loop by an estimated test loss; at the end of its `with` block the best weights stay.

    Call `step(batch)` for every batch, after `optimizer.step()`. While gradients are accumulated it
    returns False. The state is in the accelerator's checkpoints (`save_state`, `load_state`). One
    process.

    Args:
        accelerator: the accelerator of the loop.
        model, optimizer, loader: as `accelerator.prepare` gave them.
        batch_loss: (model, batch) -> loss, as the loop has it, before it is divided by the number
            of accumulated batches.
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the model at the end.
        clip: how the loop clips gradients: the largest norm, or a function of the parameters.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        eval_data: the same rows without augmentation: a Dataset, or a DataLoader over one.
        eval_loss: (model, batch) -> the loss to estimate (default: batch_loss).
        average, grid, patience, engine, seed: see `heldin.FoldStopping`; average=None is the
            rule's own.

    Attributes:
        stopping: the rule behind it, with its history and estimate.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from heldin.accelerate import AutoStopping
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
    >>> with AutoStopping(accelerator, model, optimizer, loader, batch_loss) as stopping:
    ...     for batch in loader:
    ...         accelerator.backward(batch_loss(model, batch))
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         if stopping.step(batch):
    ...             break
    >>> 0 < stopping.metrics()["heldin/estimate"] < 3
    True
    """

    @spelled_out
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        loader: Any,
        batch_loss: BatchLoss,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
        *,
        clip: Clip | None = None,
        memory: int | None = None,
        stratify: Any = None,
        eval_data: Any = None,
        eval_loss: BatchLoss | None = None,
        average: Average | None = None,
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        engine: Literal["auto", "copies", "swap"] = "auto",
        seed: int = 0,
    ) -> None:
        refuse_stranger(NAME, "accelerator", accelerator, Accelerator, "the Accelerator")
        refuse_stranger(NAME, "model", model, nn.Module, "the model that is trained")
        self._run = EstimatingSession(NAME, locals())
        if accelerator.distributed_type not in WHOLE:
            raise HeldinError(
                f"{NAME}: {accelerator.distributed_type.value} divides the weights among the "
                "processes, and shadows have them whole; use DistributedDataParallel, or "
                "EvidenceStopping"
            )
        if accelerator.scaler is not None:
            raise HeldinError(
                f"{NAME}: shadows do not scale their loss, as mixed_precision='fp16' needs; use "
                "'bf16'"
            )
        self._accelerator = accelerator
        self._run.follow(loader)
        self.stopping: PathStopping = self._run.begin(
            accelerator.unwrap_model(model),
            optimizer,
            DividedLoss(batch_loss, accelerator),
            own_loader(NAME, loader),
            clip=clip,
            together=True,
        )
        accelerator.register_for_checkpointing(Registered(self))

    def follow(self, loader: Any) -> None:
        """Another loader over the same rows, such as `accelerate.skip_first_batches` makes."""
        self._run.follow(loader)

    def step(self, batch: Any) -> bool:
        """Follow the optimiser step just taken; True if training should stop.

        Args:
            batch: the batch of it, as the loader gave it.
        """
        self._run.add(batch)
        return self._run.step() if self._accelerator.sync_gradients else False

    def metrics(self) -> dict[str, float]:
        """For `accelerator.log`."""
        return self._run.metrics()

    def state_dict(self) -> dict[str, Any]:
        """For the accelerator's checkpoints."""
        return self._run.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._run.load_state_dict(state_dict)

    def close(self) -> None:
        """Put the best weights into the model, if so asked, and follow no more."""
        self._run.finish()

    def __enter__(self) -> AutoStopping:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._run.end()


class DividedLoss:
    """The loss of a batch, which `accelerator.backward` divides by the batches of a full step."""

    def __init__(self, batch_loss: BatchLoss, accelerator: Accelerator) -> None:
        self._loss, self._accelerator = batch_loss, accelerator

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Before it is divided."""
        return self._loss(model, batch)

    def scale(self, sizes: list[int]) -> float:
        """A step at the end of an epoch may be one on fewer batches."""
        return len(sizes) / float(self._accelerator.gradient_accumulation_steps)


class Registered:
    """What the accelerator keeps, so that it does not keep a rule alive that nobody else has."""

    def __init__(self, stopping: Any) -> None:
        self._stopping = weakref.ref(stopping)

    def state_dict(self) -> dict[str, Any]:
        """Called by the accelerator; nothing if the rule is gone."""
        stopping = self._stopping()
        return {} if stopping is None else stopping.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Called by the accelerator."""
        stopping = self._stopping()
        if stopping is not None:
            stopping.load_state_dict(state_dict)
