"""`heldin.transformers.AutoStoppingCallback`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import accelerate  # noqa: F401  (without it there is a Trainer, which fails when it is made)
import torch
import transformers.trainer as trainer_module
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.utils import logging

from heldin._private_torch import DisableTorchFunction
from heldin.errors import HeldinError
from heldin.rules.estimated.base import Average, PathStopping
from heldin.rules.estimated.batches import repacked
from heldin.rules.estimated.curves import Patience
from heldin.rules.estimated.separate import BatchLoss
from heldin.rules.estimated.shadows import PATIENCE
from heldin.state.checkpoint import load, save

from .estimating import EstimatingSession, own_loader
from .session import Guard, MethodWrapper
from .settings import spelled_out
from .trainer_hooks import LOOP, add_to_logs, callers, local, put_before_loggers

__all__ = ["AutoStoppingCallback"]

logger = logging.get_logger("heldin.transformers")
NAME = "AutoStoppingCallback"
FILE = "heldin.ckpt"  # in the folder of a checkpoint


class AutoStoppingCallback(TrainerCallback):
    """Stops a Hugging Face `Trainer` by an estimated test loss, and keeps the best weights.

    The model trains on all rows. Shadows of its trainable parameters (of the adapters alone, with
    LoRA) train beside it by the Trainer's own `compute_loss`, each without some of the rows, and
    their loss on these is the estimate: no `eval_dataset`, no `metric_for_best_model`. The estimate
    and its standard error are in the logs as `heldin/estimate` and `heldin/standard_error`.

    Batches may be padded, grouped by length and accumulated; bf16, label smoothing, clipping and
    schedulers are followed, in one process or in several (torchrun). The dataset is a map-style
    one. The state is in the file `heldin.ckpt` of every checkpoint, and a resumed run takes it up
    by itself.

    Args:
        rule: "auto", "folds" or "shadow", see `heldin.stopping`.
        budget: for "auto": how many times the time of a plain run training may take (6).
        groups: (n,) names or numbers of the rows; equal ones are held out together.
        restore: put the weights of the best estimate into the model at the end.
        memory: for "auto": bytes that the shadows may take (1 GiB).
        stratify: (n,) classes; each fold gets its share of every class.
        eval_data: the same rows without augmentation: a Dataset, or a DataLoader over one.
        eval_loss: (model, inputs) -> the loss to estimate (default: `compute_loss`).
        average, grid, patience, engine, seed: see `heldin.FoldStopping`; average=None is the
            rule's own.

    Attributes:
        stopping: the rule of the last run, with its history and estimate.

    >>> from heldin.transformers import AutoStoppingCallback
    >>> callback = AutoStoppingCallback(budget=4)
    """

    @spelled_out
    def __init__(
        self,
        rule: Literal["auto", "folds", "shadow"] = "auto",
        budget: float | None = None,
        groups: Any = None,
        restore: bool = True,
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
        self._run = EstimatingSession(NAME, locals())
        self._guard = Guard(self._end)
        self._detours: list[MethodWrapper] = []
        self._trainer: Any = None

    @property
    def stopping(self) -> PathStopping | None:
        """The rule of the last run, with its history and estimate."""
        return self._run.stopping

    # -- the run

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the state of the checkpoint, if there is one, and look out for errors."""
        self._end()
        found = callers((Trainer, CallbackHandler))
        trainer = next((each for each in found if isinstance(each, Trainer)), None)
        if trainer is None:
            raise HeldinError(f"{NAME}: it is for transformers.Trainer and what derives from it")
        _refuse(trainer, self._run.options["restore"])
        self._run.load_state_dict({})
        if state.global_step:
            folder = local("resume_from_checkpoint", "_inner_training_loop")
            path = Path(str(folder), FILE)
            if path.is_file():
                self._run.load_state_dict(load(path)["run"])
        put_before_loggers(self)
        self._trainer = trainer
        for owner in found:
            self._guard.over(owner, *LOOP)

    def on_epoch_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        optimizer: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        """Make the shadows: not before all callbacks have begun, which may fail."""
        trainer = self._trainer
        if trainer is None or self._detours:
            return
        self._detours = [
            MethodWrapper(trainer, "training_step", self._train),
            MethodWrapper(trainer, "_save_rng_state", self._save),
            MethodWrapper(trainer_module, "skip_first_batches", self._skip),
        ]
        noisy = getattr(trainer, "neftune_noise_alpha", None) is not None
        self._run.follow(train_dataloader)
        rule = self._run.begin(
            trainer.model,
            optimizer,
            TrainerLoss(trainer),
            own_loader(NAME, train_dataloader),
            clip=args.max_grad_norm if args.max_grad_norm > 0 else None,
            resumed=state.global_step > 0,
            engine="swap" if noisy else None,  # a copy has not the hook that makes the noise
            together=True,
        )
        logger.info(f"{NAME}: {rule.reason_chosen}")

    def _train(
        self, step: Callable[..., Any], model: Any, inputs: Any, *rest: Any, **named: Any
    ) -> Any:
        """A batch of an optimiser step."""
        loss = step(model, inputs, *rest, **named)
        self._run.add(inputs)
        return loss

    def _skip(self, skip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The loader of an epoch that goes on in its middle."""
        loader = skip(*args, **kwargs)
        if self._run.running:
            self._run.follow(loader)
        return loader

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follow the step of the optimiser; log and save the last one."""
        if self._run.step():
            assert self.stopping is not None
            logger.info(f"{self.stopping.reason}. Stopping training.")
            control.should_training_stop = control.should_log = True
            if args.save_strategy == "steps":
                control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        """Add the values to those that the Trainer logs while it trains."""
        if "loss" in logs:
            add_to_logs(state, logs, self._run.metrics())

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the best weights into the model."""
        self._run.finish()
        self._end()

    def _save(self, save_rng_state: Callable[..., Any], output_dir: Any) -> Any:
        """Called by the Trainer for every checkpoint from which a run can go on."""
        if self._trainer.args.should_save:  # one process for all
            save(Path(output_dir, FILE), run=self._run.state_dict())
        return save_rng_state(output_dir)

    def _end(self) -> None:
        self._run.end()
        self._guard.close()
        for detour in self._detours:
            detour.close()
        self._detours, self._trainer = [], None


class TrainerLoss:
    """The mean loss of a batch by a Trainer's own `compute_loss`, which leaves no trace there."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counts = False  # whether the model is told the number of items
        self._divides: bool | None = None  # whether its loss is divided by that

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over tokens or samples."""
        items = self._items(batch)
        loss = self._of(model, batch, items)
        if self._divides is None:  # in an evaluation, where nothing is random
            self._divides = items is not None and self._is_halved(loss, model, batch, items)
        return loss

    def _is_halved(self, loss: Tensor, model: nn.Module, batch: Any, items: Any) -> bool:
        """Whether twice the number of items makes half the loss."""
        with DisableTorchFunction(), torch.no_grad():  # nobody is to note the rows' losses here
            twice = float(self._of(model, batch, 2 * items))
        return abs(2 * twice - float(loss)) < abs(twice - float(loss))

    def _of(self, model: nn.Module, batch: Any, items: Any) -> Tensor:
        trainer = self._trainer
        inputs = trainer._prepare_inputs(repacked(batch))
        with _untouched(trainer), trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return loss

    def _items(self, batch: Any) -> Any:
        trainer = self._trainer
        with _untouched(trainer):
            items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        self._counts = trainer.model_accepts_loss_kwargs and items is not None
        return items

    def shares(self, batches: list[Any]) -> list[float] | None:
        """By the number of tokens, where the Trainer divides by it."""
        items = [self._items(batch) for batch in batches]
        if any(each is None for each in items):
            return None
        total = float(sum(items))
        return [float(each) / total if total else 0.0 for each in items]

    def scale(self, sizes: list[int]) -> float:
        """What the Trainer makes of a step on several batches.

        It divides their losses by the number of batches, or believes that the model has divided
        them by the number of items. Some models have not: their losses are added up.
        """
        trainer, number = self._trainer, len(sizes)
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = trainer.compute_loss_func is not None or self._counts
        if self._divides:
            return 1.0 if scaled else 1.0 / number
        return float(number) if scaled else 1.0

    def count(self, batches: list[Any]) -> float | None:
        """Tokens of this process, by which it counts among others."""
        items = [self._items(batch) for batch in batches]
        return None if any(each is None for each in items) else float(sum(items))


@contextmanager
def _untouched(trainer: Any) -> Iterator[None]:
    """Counts and metrics that `compute_loss` collects are as before, and nothing is logged.

    Nor does a process ask the others for their tokens: they may be at something else.
    """
    args, across = trainer.args, trainer.args.average_tokens_across_devices
    before = {k: v for k, v in vars(trainer).items() if isinstance(v, (bool, int, float, str))}
    if "_metrics" in vars(trainer):  # of the trainers of TRL
        before["_metrics"] = copy.deepcopy(trainer._metrics)
    detour = MethodWrapper(trainer, "log", lambda log, *args, **kwargs: None)
    try:
        args.average_tokens_across_devices = False
        yield
    finally:
        args.average_tokens_across_devices = across
        detour.close()
        vars(trainer).update(before)


def _refuse(trainer: Any, restore: bool) -> None:
    """What cannot be followed."""
    args = trainer.args
    if args.n_gpu > 1:
        raise HeldinError(
            f"{NAME}: DataParallel divides each batch among {args.n_gpu} GPUs, which shadows do "
            "not; launch a process for each of them (torchrun), or train on one "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise HeldinError(
            f"{NAME}: DeepSpeed and FSDP divide the parameters, and shadows have them whole; leave "
            "them out, or use EvidenceStoppingCallback (with FSDP)"
        )
    if trainer.accelerator.scaler is not None:
        raise HeldinError(
            f"{NAME}: shadows do not scale their loss, as fp16=True needs; use bf16=True"
        )
    if restore and args.load_best_model_at_end:
        raise HeldinError(
            f"{NAME}: load_best_model_at_end=True and restore=True would both put weights into the "
            "model at the end; set one of them to False"
        )
