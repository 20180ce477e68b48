"""`heldin.lightning.AutoStopping`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from heldin.errors import HeldinError
from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.separate import BatchLoss, Clip
from heldin.rules.estimated.shadows import PATIENCE

from .estimating import EstimatingSession, only_optimizer, own_loader
from .rehearsal import Rehearsal, clip_by
from .session import MethodWrapper
from .settings import spelled_out

__all__ = ["AutoStopping"]


class AutoStopping(Callback):
    """Stops a `Trainer` by an estimated test loss, and puts the best weights into the module.

    The module trains on all rows. Shadows of it train beside it by its own `training_step`, each
    without some of the rows, and their loss on these is the estimate: no validation loop, no rows
    lost. The estimate and its standard error are logged as `heldin/estimate` and
    `heldin/standard_error` and shown in the progress bar. State is in the Trainer's checkpoints.

    With automatic or manual optimisation, one optimiser, a DataLoader over a map-style dataset, in
    one process or in several (strategy="ddp"). In manual optimisation, losses are given to
    `self.manual_backward`, one batch has at most one step, and the loss that the step returns, if
    any, is the one that is estimated.

    Args:
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the module at the end.
        verbose: tell what was chosen, and of the stop.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        eval_data: the same rows without augmentation: a Dataset, or a DataLoader over one.
        eval_loss: (module, batch) -> the loss to estimate (default: that of `training_step`).
        average, grid, patience, engine, seed: see `heldin.FoldStopping`; average=None is the
            rule's own.

    Attributes:
        stopping: the rule of the last run, with its history and estimate.
        stopped_epoch: the epoch in which training was stopped, 0 if it was not.
        stopping_reason_message: why.

    >>> import lightning
    >>> from heldin.lightning import AutoStopping
    >>> trainer = lightning.Trainer(
    ...     callbacks=[AutoStopping(budget=4)], barebones=True, max_epochs=100
    ... )
    """

    @spelled_out
    def __init__(
        self,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
        verbose: bool = False,
        *,
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
        self._run = EstimatingSession("AutoStopping", locals())
        self.verbose = verbose
        self.stopped_epoch = 0
        self.stopping_reason_message: str | None = None
        self._detours: list[MethodWrapper] = []
        self._loss: Rehearsal | None = None
        self._given: Any = None  # the coming batch, as the loader has handed it out

    @property
    def stopping(self) -> PathStopping | None:
        """The rule of the last run, with its history and estimate."""
        return self._run.stopping

    # -- the run

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the loaders from their beginning."""
        self._end()
        if trainer.global_step:  # fit() goes on with the run before
            self._run.load_state_dict(self._run.state_dict())
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise HeldinError(
                f"AutoStopping: {type(trainer.strategy).__name__} divides the weights among the "
                "processes, and shadows have them whole; use strategy='ddp', or EvidenceStopping"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise HeldinError(
                "AutoStopping: shadows do not scale their loss, as precision='16-mixed' needs; use "
                "'bf16-mixed'"
            )

        def process(processed: Callable[[Any], Any], loader: Any) -> Any:
            loader = processed(loader)
            if trainer.training:
                self._run.follow(loader)
            return loader

        def convert(converted: Callable[[Any], Any], batch: Any) -> Any:
            self._given = batch
            return converted(batch)

        self._detours = [
            MethodWrapper(trainer.strategy, "process_dataloader", process),
            MethodWrapper(trainer.precision_plugin, "convert_input", convert),
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the shadows, once module and optimiser are as the checkpoint has them."""
        optimizer = only_optimizer("AutoStopping", trainer.optimizers)
        loss = self._loss = Rehearsal(trainer, pl_module, DummyLogger())
        plugin, strategy = trainer.precision_plugin, trainer.strategy

        def prepare(batch: Any) -> Any:
            batch = type(plugin).convert_input(plugin, batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            return strategy.batch_to_device(batch, dataloader_idx=0)

        evaluated = self._run.options["eval_loss"]
        chosen_rule = self._run.begin(
            pl_module,
            optimizer,
            loss,
            own_loader("AutoStopping", trainer.train_dataloader),
            prepare=prepare,
            eval_loss=loss.other(evaluated) if evaluated is not None else None,
            clip=_clip(trainer, pl_module, loss),
            resumed=trainer.global_step > 0,
            together=True,
        )
        self._tell(chosen_rule.reason_chosen)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Follow the step of the optimiser, log, and ask for the stop."""
        stopping = self.stopping
        if stopping is None or self._loss is None:
            return
        self._loss.batch_idx = batch_idx
        self._run.add(batch, self._given)
        known = stopping.should_stop
        stop = self._run.step()
        values = stopping.metrics()
        shown = ("heldin/estimate", "heldin/standard_error")
        bar = {name: values.pop(name) for name in shown if name in values}
        pl_module.log_dict(bar, on_step=True, on_epoch=False, prog_bar=True)
        pl_module.log_dict(values, on_step=True, on_epoch=False)
        if stop:
            trainer.should_stop = True
            if not known:
                self.stopped_epoch = trainer.current_epoch
                self.stopping_reason_message = f"{stopping.reason}. Signaling Trainer to stop."
                self._tell(self.stopping_reason_message)

    def _tell(self, message: str) -> None:
        if self.verbose:
            rank_zero_info(f"AutoStopping: {message}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the best weights into the module."""
        self._run.finish()
        self._end()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow no more."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: Any) -> None:
        """Follow no more."""
        self._end()

    def _end(self) -> None:
        self._run.end()
        for detour in self._detours:
            detour.close()
        self._detours, self._loss, self._given = [], None, None

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Kept in the checkpoint."""
        return {
            "run": self._run.state_dict(),
            "stopped_epoch": self.stopped_epoch,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._run.load_state_dict(state_dict["run"])
        self.stopped_epoch = state_dict["stopped_epoch"]
        self.stopping_reason_message = state_dict["stopping_reason_message"]


def _clip(trainer: Trainer, module: LightningModule, loss: Rehearsal) -> Clip | None:
    """How gradients are clipped in this run."""
    if not module.automatic_optimization:
        return loss.clip
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if is_overridden("configure_gradient_clipping", module):
        return lambda parameters: module.configure_gradient_clipping(
            torch.optim.SGD(parameters, lr=0.0), value, algorithm
        )
    return clip_by(value, algorithm) if value else None
