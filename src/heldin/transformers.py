"""heldin in the Hugging Face Trainer: `Trainer(..., callbacks=[EarlyStoppingCallback()])`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._private_torch import DisableTorchFunction
from .adapters.arguments import check_elementwise, needs_framework, strict_kwargs
from .adapters.patches import callers, local_variable, replaced
from .adapters.session import flat_metrics
from .adapters.stopping import FrameworkStopping
from .errors import HeldinError
from .loop.batches import repack
from .rules.elementwise import ElementwiseStopping
from .shadows.held_out import FrameworkLoss
from .state.checkpoint import load, save

with needs_framework("transformers and accelerate", "transformers"):
    import accelerate  # noqa: F401  (without it there is a Trainer, which fails when it is made)
    import transformers.trainer as trainer_module
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

__all__ = ["EarlyStoppingCallback", "ElementwiseLoggingCallback", "elementwise"]

NAME = "EarlyStoppingCallback"
# The methods of Trainer and CallbackHandler that a run consists of once it has begun.
LOOP = (
    "_run_epoch", "_evaluate", "_finalize_training", "call_event",
    "get_batch_samples", "training_step", "_maybe_log_save_evaluate",
)  # fmt: skip


class EarlyStoppingCallback(FrameworkStopping, TrainerCallback):
    """Stops a Hugging Face `Trainer`; needs no `eval_dataset` and no `metric_for_best_model`.

    Rules by an estimated test loss: the model trains on all rows. Shadows of its trainable
    parameters (of the adapters alone, with LoRA) train beside it by the Trainer's own
    `compute_loss`, each without some of the rows, and their loss on these is the estimate, in the
    logs as `heldin/estimate` and `heldin/standard_error`. The best weights are put into the model
    at the end. Batches may be padded, grouped by length and accumulated; bf16, label smoothing,
    clipping and schedulers are followed, in one process or in several (torchrun). The dataset is a
    map-style one.

    Evidence: training stops at the step that asks for it, with its weights; values are in the logs
    as `heldin/criterion` and others.

    If checkpoints are saved by steps, one is saved at the stop. The state is in the file
    `heldin.ckpt` of every checkpoint (evidence: `heldin_evidence.ckpt`), and a resumed run loads
    it.

    Args:
        rule: "auto", "folds", "shadow", "evidence", or one of `heldin.rules`.
        restore: put the weights of the best estimate into the model at the end.
        verbose: print at the end what was chosen, why it stopped and what to expect.
        log_groups: also log the value of each group of parameters, for evidence.
        others: see `heldin.EarlyStopping`; eval_loss and predict are functions of model and inputs.
            Outputs are the model's `logits`, targets the `labels`.

    Attributes:
        stopping: the rule of the last run, with its history and estimate.
        estimates, out_of_fold, temperature: results, see `heldin.EarlyStopping`.

    >>> from heldin.transformers import EarlyStoppingCallback
    >>> callback = EarlyStoppingCallback(budget=4)
    """

    name = NAME
    _trainer: Any = None

    @property
    def file(self) -> str:
        """The file in the folder of a checkpoint."""
        return "heldin_evidence.ckpt" if self.by_evidence else "heldin.ckpt"

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load the state of the checkpoint, if there is one, and watch for errors."""
        self._end()
        owners = callers((Trainer, CallbackHandler))
        trainer = next((owner for owner in owners if isinstance(owner, Trainer)), None)
        if trainer is None:
            raise HeldinError(f"{NAME}: it is for transformers.Trainer and its subclasses")
        if not self.by_evidence:
            _check_trainer(trainer, self._run.restores)
        self._run.load_state_dict({})
        if state.global_step:
            folder = local_variable("resume_from_checkpoint", "_inner_training_loop")
            path = Path(str(folder), self.file)
            if path.is_file():
                self._run.load_state_dict(load(path)["run"])
        _put_before_loggers(self)
        self._trainer = trainer
        self._patches.wrap(trainer, "_save_rng_state", self._save)
        for owner in owners:
            self._patches.watch_methods(owner, *LOOP)

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **_: Any
    ) -> None:
        """Begin the run: not before all callbacks have begun, which may fail."""
        trainer = self._trainer
        if trainer is None or self._run.running:
            return
        self._patches.wrap(trainer, "training_step", self._train)
        self._patches.wrap(trainer_module, "skip_first_batches", self._skip)
        self._run.follow(train_dataloader)
        self._run.begin(
            trainer.model,
            trainer.optimizer,
            TrainerLoss(trainer),
            train_dataloader,
            clip=args.max_grad_norm if args.max_grad_norm > 0 else None,
            resumed=state.global_step > 0,
            pools_ranks=True,
            accumulated=args.gradient_accumulation_steps,
        )

    def _train(self, step: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, one of those of an optimiser step."""
        self._run.begin_batch()
        loss = step(model, inputs, *args, **kwargs)
        self._run.add(inputs)
        return loss

    def _skip(self, skip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Follow the loader of an epoch that continues in its middle."""
        loader = skip(*args, **kwargs)
        if self._run.running:
            self._run.follow(loader)
        return loader

    def on_pre_optimizer_step(self, *_: Any, optimizer: Any, **__: Any) -> None:
        """Form the evidence of all batches since the last step."""
        if self._run.before_step() and getattr(optimizer, "scaler", None) is None:
            self._run.keep_weights()  # a scaler needs gradients to step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follow the step of the optimiser; log and save the last one, as the Trainer does."""
        if self._run.step():
            control.should_training_stop = control.should_log = True
            if args.save_strategy == "steps":
                control.should_save = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Warn of an epoch in which nothing was observed."""
        self._run.end_epoch()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        """Add the values to those that the Trainer logs; the results to its last entry."""
        if "loss" in logs:
            _add_to_logs(state, logs, self._run.metrics())
        elif "train_runtime" in logs:
            _add_to_logs(state, logs, self._conclude())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Put the best weights into the model."""
        self._conclude()
        self._end()

    def _save(self, save_rng_state: Callable[..., Any], output_dir: Any) -> Any:
        """Save the state with a checkpoint of the Trainer."""
        if self._trainer.args.should_save:  # one process for all
            save(Path(output_dir, self.file), run=self._run.state_dict())
        return save_rng_state(output_dir)

    def _end(self) -> None:
        super()._end()
        self._trainer = None


class TrainerLoss(FrameworkLoss):
    """The mean loss of a batch by a Trainer's own `compute_loss`, which leaves no trace there."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counts = False  # whether the model gets the number of items
        self._divides: bool | None = None  # whether its loss is divided by that

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean over tokens or samples."""
        items = self._items(batch)
        loss = self._compute(model, batch, items)
        if self._divides is None:  # in an evaluation, where nothing is random
            self._divides = items is not None and self._is_halved(loss, model, batch, items)
        return loss

    def _is_halved(self, loss: Tensor, model: nn.Module, batch: Any, items: Any) -> bool:
        """Return whether twice the number of items makes half the loss."""
        with DisableTorchFunction(), torch.no_grad():  # the rows' losses are not recorded here
            twice = float(self._compute(model, batch, 2 * items))
        return abs(2 * twice - float(loss)) < abs(twice - float(loss))

    def _compute(self, model: nn.Module, batch: Any, items: Any) -> Tensor:
        trainer = self._trainer
        inputs = trainer._prepare_inputs(repack(batch))
        with _untouched(trainer), trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return loss

    def _items(self, batch: Any) -> Any:
        trainer = self._trainer
        with _untouched(trainer):
            items = trainer._get_num_items_in_batch([batch], trainer.args.device)
        self._counts = trainer.model_accepts_loss_kwargs and items is not None
        return items

    def shares(self, batches: list[Any]) -> list[float]:
        """Return the factors of the losses of the batches of a step.

        The Trainer divides them by the number of batches, or assumes that the model has divided
        them by the number of items in all of them. Some models have not: their losses are added up.
        """
        trainer, number = self._trainer, len(batches)
        items = [self._items(batch) for batch in batches]
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = trainer.compute_loss_func is not None or self._counts
        factor = 1.0 if scaled else 1.0 / number
        if not self._divides:
            return [factor] * number
        total = float(sum(items))
        return [factor * float(count) / total if total else 0.0 for count in items]

    def count(self, batches: list[Any]) -> float | None:
        """Return the number of tokens, by which this process counts among others."""
        items = [self._items(batch) for batch in batches]
        return None if any(count is None for count in items) else float(sum(items))


@contextmanager
def _untouched(trainer: Any) -> Iterator[None]:
    """Put back counts and metrics that `compute_loss` collects, and log nothing.

    Nor does a process ask the others for their tokens: they may be at another place.
    """
    before = {k: v for k, v in vars(trainer).items() if isinstance(v, (bool, int, float, str))}
    if "_metrics" in vars(trainer):  # of the trainers of TRL
        before["_metrics"] = copy.deepcopy(trainer._metrics)
    muted = (trainer, "log", lambda *args, **kwargs: None)
    try:
        with replaced([muted, (trainer.args, "average_tokens_across_devices", False)]):
            yield
    finally:
        vars(trainer).update(before)


def _check_trainer(trainer: Any, restore: bool) -> None:
    """Refuse weights and losses that shadows do not follow."""
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
            "them out, or use rule='evidence' (with FSDP)"
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


def _put_before_loggers(callback: TrainerCallback) -> None:
    """Let a callback's `on_log` come before those of the Trainer's integrations.

    Otherwise its values are printed and in the log history alone.
    """
    for handler in callers((CallbackHandler,)):
        if callback in handler.callbacks:
            handler.callbacks.remove(callback)
            handler.callbacks.insert(0, callback)


def _add_to_logs(state: Any, logs: dict[str, Any], values: Mapping[str, float]) -> None:
    """Add values to the logs and to the entry of the log history that was made from them."""
    logs.update(values)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(values)


# -- single weights


class ElementwiseLoggingCallback(TrainerCallback):
    """Logs the fraction of stopped weights, as `heldin/stopped`, of a run with `elementwise`.

    Args:
        log_groups: also log the stopped fraction of each parameter.

    >>> from heldin.transformers import ElementwiseLoggingCallback
    >>> callback = ElementwiseLoggingCallback(log_groups=True)
    """

    def __init__(self, log_groups: bool = False) -> None:
        self.log_groups = log_groups

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move this callback before the loggers."""
        _put_before_loggers(self)

    def on_log(
        self, args: Any, state: Any, control: Any, *, logs: Any, optimizer: Any, **_: Any
    ) -> None:
        """Add the values to those that the Trainer logs while it trains."""
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if "loss" in logs and isinstance(inner, ElementwiseStopping):
            _add_to_logs(state, logs, flat_metrics(inner, self.log_groups))


@strict_kwargs(extends=ElementwiseStopping.__init__, without=("optimizer",))
def elementwise(
    model: nn.Module, args: TrainingArguments, **options: Any
) -> tuple[type[ElementwiseStopping], dict[str, Any]]:
    """Return the Trainer's own optimiser, around which single weights stop by evidence.

    For `Trainer(model, args, optimizer_cls_and_kwargs=elementwise(model, args))`. The averages are
    kept with the optimiser's state in the Trainer's checkpoints.

    Args:
        model: the model that the Trainer gets.
        args: its arguments: optimiser, learning rate and weight decay are taken from there.
        greedy, smoothing and the others: see `heldin.ElementwiseStopping`.

    >>> import torch
    >>> from transformers import TrainingArguments
    >>> from heldin.transformers import elementwise
    >>> args = TrainingArguments("out", optim="sgd", learning_rate=0.1, report_to="none")
    >>> kind, kwargs = elementwise(torch.nn.Linear(2, 1), args, smoothing=0.99)
    >>> kwargs
    {'lr': 0.1}
    """
    check_elementwise(options)
    inner, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)

    class Elementwise(ElementwiseStopping):
        def __init__(self, params: Iterable[Any], **settings: Any) -> None:
            super().__init__(inner(params, **settings), model, **options)

    return Elementwise, kwargs
