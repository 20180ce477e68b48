"""heldin in the Hugging Face Trainer: `Trainer(..., callbacks=[AutoStoppingCallback()])`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups
from heldin.rules.evidence import EvidenceStopping

from .adapters.epochs import Epochs
from .adapters.session import (
    Guard,
    StoppingSession,
    flat_metrics,
    forget_gradients,
    length,
    missing_framework,
)
from .adapters.settings import DEFAULTS, check_elementwise, chosen, spelled_out
from .errors import HeldinError
from .rules.elementwise import ElementwiseStopping
from .rules.ranks import ProcessGroup
from .state.packed import packed, unpacked

try:
    import accelerate  # noqa: F401  (without it there is a Trainer, which fails when it is made)
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import CallbackHandler, ExportableState
    from transformers.utils import logging

    from .adapters.auto_transformers import AutoStoppingCallback
    from .adapters.trainer_hooks import LOOP, add_to_logs, callers, put_before_loggers
except ImportError as error:
    raise missing_framework("transformers and accelerate", "transformers", error) from error

__all__ = [
    "AutoStoppingCallback",
    "ElementwiseLoggingCallback",
    "EvidenceStoppingCallback",
    "elementwise",
]

logger = logging.get_logger(__name__)


class EvidenceStoppingCallback(TrainerCallback, ExportableState):
    """Stops a Hugging Face `Trainer` by evidence; needs no evaluation set and no best metric.

    Training stops at the step that asks for it, with its weights; if checkpoints are saved by
    steps, one is saved there. Values are in the Trainer's logs as `heldin/criterion` and others, so
    that its log history and all `report_to` integrations have them.

    The state is in `trainer_state.json` of every checkpoint, and a resumed run takes it up by
    itself. With `restore_callback_states_from_checkpoint=True` the Trainer also builds a new
    callback from the saved arguments and drops the one it was given: look for the new one in
    `trainer.callback_handler.callbacks` then.

    Args:
        early_stopping_patience: number of consecutive checks that must ask for a stop.
        log_groups: also log the value of each group of parameters.
        window: number of steps whose sums add up before a value is formed; "epoch": those of an
            epoch, by the number of its batches, which is better on few data.
        groups, smoothing and the others: see `heldin.EvidenceStopping`.
        not_in_json: set by the Trainer alone, when it builds the callback anew.

    Attributes:
        stopping: the `heldin.EvidenceStopping` of the last run, with its history.

    >>> from heldin.transformers import EvidenceStoppingCallback
    >>> callback = EvidenceStoppingCallback(early_stopping_patience=3)
    >>> callback.state()["args"]
    {'early_stopping_patience': 3, 'log_groups': False}
    """

    @spelled_out
    def __init__(
        self,
        early_stopping_patience: int = 1,
        log_groups: bool = False,
        *,
        groups: Groups = "tensor",
        smoothing: float = 0.9,
        window: int | Literal["epoch"] = 1,
        warmup: int = 0,
        every: int = 1,
        arming: float | None = 0.5,
        across: Across = "median",
        weighted: bool = True,
        start: float | None = None,
        correction: Correction = None,
        dead: Dead = "out",
        reduction: Literal["mean", "sum"] = "mean",
        estimator: Estimator = "sampled",
        budget: int = BUDGET,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
        not_in_json: Sequence[str] = (),
    ) -> None:
        options = chosen(locals())
        if not_in_json:
            raise HeldinError(
                f"EvidenceStoppingCallback: the Trainer builds this callback anew from JSON, which "
                f"cannot hold {' and '.join(not_in_json)}. Set "
                "restore_callback_states_from_checkpoint=False: the state is taken up without it"
            )
        self.early_stopping_patience, self.log_groups = early_stopping_patience, log_groups
        self.saved: dict[str, Any] | None = None  # set by the Trainer that builds a callback anew
        self._epochs = Epochs("EvidenceStoppingCallback")
        self._guard = Guard(self._end)
        self._due = False  # the run that begins with the next epoch
        options["patience"] = early_stopping_patience
        self._run = StoppingSession("EvidenceStoppingCallback", options)

    @property
    def stopping(self) -> EvidenceStopping | None:
        """The `heldin.EvidenceStopping` of the last run, with its history."""
        return self._run.stopping

    # -- the run

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any
    ) -> None:
        """Take the state of the checkpoint, if there is one, and look out for errors."""
        name = type(self).__name__
        self._end()
        self._due = True
        if state.global_step:
            self.saved = self.saved or _stored(state.stateful_callbacks.get(name), self.state())
            self._run.load_state_dict(unpacked(self.saved or {}))
        # a checkpoint made without this callback would make the next save fail
        state.stateful_callbacks.setdefault(name, self.state())
        self.saved = None
        put_before_loggers(self)
        for owner in callers((Trainer, CallbackHandler)):
            self._guard.over(owner, *LOOP)

    def on_epoch_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: nn.Module,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Watch the model: not before all callbacks have begun, which may fail."""
        if self._due:
            self._due = False
            self._run.begin(model, _epoch_steps(args, train_dataloader))
            self._epochs.reset()
        self._epochs.begin(self.stopping)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count."""
        self._epochs.batch()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say so if nothing was seen."""
        self._epochs.end(self.stopping)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, optimizer: Any, **_: Any
    ) -> None:
        """Weigh the evidence of all batches since the last step."""
        stopping = self.stopping
        if stopping is None or not stopping.watching:
            return
        if stopping.step():
            logger.info(f"{stopping.reason}. Stopping training.")
            control.should_training_stop = True
            if getattr(optimizer, "scaler", None) is None:  # a scaler needs gradients to step
                forget_gradients(model.parameters())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log and save the last step, as the Trainer does at the end."""
        if self.stopping is not None and self.stopping.should_stop:
            control.should_log = True
            if args.save_strategy == "steps":
                control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        """Add the values to those that the Trainer logs while it trains."""
        if "loss" in logs:
            add_to_logs(state, logs, flat_metrics(self.stopping, self.log_groups))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Watch no more."""
        self._end()

    def _end(self) -> None:
        self._run.end()
        self._guard.close()

    # -- checkpoints

    def state(self) -> dict[str, Any]:
        """The arguments and the state, as JSON."""
        args: dict[str, Any] = {
            "early_stopping_patience": self.early_stopping_patience,
            "log_groups": self.log_groups,
        }
        usual = {**DEFAULTS, "patience": self.early_stopping_patience}
        given = {k: v for k, v in self._run.options.items() if v != usual[k]}
        args |= {name: value for name, value in given.items() if not callable(value)}
        lost = [name for name, value in given.items() if callable(value)]
        if lost:
            args["not_in_json"] = lost
        return {"args": args, "attributes": {"saved": packed(self._run.state_dict())}}


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
        """Come before the loggers."""
        put_before_loggers(self)

    def on_log(
        self, args: Any, state: Any, control: Any, *, logs: Any, optimizer: Any, **_: Any
    ) -> None:
        """Add the values to those that the Trainer logs while it trains."""
        inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        if "loss" in logs and isinstance(inner, ElementwiseStopping):
            add_to_logs(state, logs, flat_metrics(inner, self.log_groups))


@spelled_out
def elementwise(
    model: nn.Module,
    args: TrainingArguments,
    *,
    greedy: bool = True,
    smoothing: float = 0.999,
    start: float = 10.0,
    every: int = 1,
    correction: Correction = None,
    dead: Dead = "out",
    batch_dim: BatchDim = 0,
    parameters: Callable[[str], bool] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    process_group: ProcessGroup = "auto",
) -> tuple[type[ElementwiseStopping], dict[str, Any]]:
    """The Trainer's own optimiser, around which single weights stop by evidence.

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
    options = chosen(locals(), ElementwiseStopping)
    check_elementwise("elementwise", options)
    inner, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)

    class Elementwise(ElementwiseStopping):
        def __init__(self, params: Iterable[Any], **settings: Any) -> None:
            super().__init__(inner(params, **settings), model, **options)

    return Elementwise, kwargs


def _epoch_steps(args: Any, loader: Any) -> float | None:
    """How many steps the optimiser makes in an epoch; None: the loader does not tell."""
    batches = length(loader)
    return None if batches is None else batches / args.gradient_accumulation_steps


def _stored(states: Any, own: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state that a callback with the same arguments has saved last."""
    every = states if isinstance(states, list) else [states] if states else []
    same = [s for s in every if s["args"] == own["args"]] or every
    return same[-1]["attributes"]["saved"] if same else None
