"""The run of a rule that a framework begins, feeds and ends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from heldin.errors import FrameworkName, HeldinError, HeldinWarning, more
from heldin.loop.events import LoaderBatch
from heldin.loop.hooks import call_at_steps
from heldin.loop.items import ItemStore
from heldin.loop.loaders import LoaderRecorder, inner_loader
from heldin.loop.randomness import RandomState
from heldin.loop.rows import TrainingRows, has_same_rows
from heldin.rules.auto import follow
from heldin.rules.base import copied, trained_tensors
from heldin.rules.elementwise import ElementwiseStopping
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.evidence_checks import MANY_EPOCHS, warn_of_many_epochs
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Auto, Evidence, Folds, Rule
from heldin.rules.path import PathStopping
from heldin.rules.progress import several_processes
from heldin.shadows.held_out import BatchLoss

__all__ = [
    "BATCH_SIZE",
    "Session",
    "flat_metrics",
    "length",
    "unwrap_loader",
]

BATCH_SIZE = 32  # rows per evaluation, where the loader has no batch size


NO_INPUTS = RunInputs(None, None)


def length(loader: Any) -> int | None:
    """Return the number of batches of a loader; None if it is unknown."""
    try:
        return len(loader)
    # An iterator or a stream of rows; loaders of Lightning and fastai before they are begun.
    except (TypeError, NotImplementedError, AttributeError, RuntimeError):
        return None


def flat_metrics(source: Any, groups: bool) -> dict[str, float]:
    """Return the values to log of a rule; those of single parameters only if `groups` is true."""
    values = {} if source is None else source.metrics()
    single = ("heldin/group/", "heldin/stopped/")
    return {k: v for k, v in values.items() if groups or not k.startswith(single)}


class Session:
    """The object that follows a training run, whatever the rule.

    A framework's adapter calls `begin`; `begin_batch`, `before_step`, `add` and `step` for every
    batch; `end_epoch`; and `finish` or `end`. Calls that do not belong to the rule do nothing. A
    state may be loaded before the run begins. Messages name the owner, the framework's class.

    Args:
        owner: the name of the framework's class.
        rule: Auto, Folds or Evidence.
        inputs: what the user has said of data and loop.
        restore: whether the chosen weights are put into the model at the end.
        log_groups: whether values of single groups of parameters are logged.

    Attributes:
        by_evidence: whether the rule is evidence, which needs neither data nor optimiser.
        stopping: the object that follows the last run, with its history.
        next_state: the state that the next run begins with.
        evidence_formed: whether the evidence of the present batch was formed.
        just_stopped: whether the present batch is the first with a request to stop.
    """

    def __init__(
        self,
        owner: str,
        rule: Rule,
        inputs: RunInputs = NO_INPUTS,
        *,
        restore: bool = True,
        log_groups: bool = False,
    ) -> None:
        self.owner = FrameworkName(owner)
        self.rule, self.inputs = rule, replace(inputs, owner=self.owner)
        self.restores, self._log_groups = restore, log_groups
        self.by_evidence = isinstance(rule, Evidence)
        self.stopping: Any = None
        self.evidence_formed = self.just_stopped = self._has_closure = False
        self._model: nn.Module | None = None
        self._order: LoaderRecorder | None = None
        self._first: DataLoader[Any] | None = None  # the loader that was followed first
        self.next_state: Mapping[str, Any] = {}  # for the next run
        self.warns_itself = False  # whether the adapter warns of models that were trained before
        self._last: dict[str, Tensor] = {}  # weights before `finish` put the best ones in place
        self._final: dict[str, Any] = {}  # state of the rule when its run ended
        self._random_state: RandomState | None = None  # when the present batch began
        self._remove_hook: Callable[[], Any] = lambda: None
        self._batches = self._epochs = 0
        self._counts = (0, 0, 0)  # of the rule when the epoch began
        self._warned = False

    @property
    def running(self) -> bool:
        """Whether a run is under way."""
        return self._model is not None

    @property
    def should_stop(self) -> bool:
        """Whether the rule of the last run asks to stop."""
        return self.stopping is not None and bool(self.stopping.should_stop)

    # -- the run

    def follow(self, loader: Any) -> None:
        """Record the row numbers of a loader's batches."""
        if self.by_evidence:
            return
        inner = unwrap_loader(self.owner, loader)
        if self._first is not None and not has_same_rows(self._first, inner):
            raise HeldinError(
                f"{self.owner}: the loader was replaced by one over other rows, and shadows hold "
                "out those of the first. Keep one dataset in a run (a sampler may choose among its "
                "rows), or use rule='evidence'"
            )
        if self._order is None:
            self._order, self._first = LoaderRecorder(inner, owner=self.owner), inner
        else:
            self._order.follow(inner)

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        loss: BatchLoss | None = None,
        rows: Any = None,
        *,
        prepare: Callable[[Any], Any] | None = None,
        resumed: bool = False,
        pools_ranks: bool = False,
        in_grad: bool = True,
        hook: bool = False,
        accumulated: int = 1,
        epoch_steps: float | None = None,
        **inputs: Any,
    ) -> Any:
        """Make the object that follows the run, from the state that was loaded last.

        Evidence uses model, in_grad, hook and epoch_steps alone.

        Args:
            model, optimizer: what is trained, and by what.
            loss: (model, batch) -> loss, of a prepared batch.
            rows: the loader, for its dataset and collate function. It is not iterated over.
            prepare: the framework's changes of a batch before the model sees it.
            resumed: whether the model was trained before, in the same run.
            pools_ranks: whether the framework may train the model in several processes.
            in_grad: whether the framework accumulates gradients in `.grad`.
            hook: form the evidence in a hook before the steps of all optimisers of the model.
            accumulated: number of batches in an optimiser step.
            epoch_steps: number of optimiser steps in an epoch (default: by the length of rows).
            inputs: clip; averaged_model, which hooks of the optimiser's step update; schedule, the
                framework's own one of learning rates, if it has a fixed end; eval_loss and outputs,
                in place of those of the user.
        """
        self.close()
        batches = length(rows)
        if epoch_steps is None and batches is not None:
            epoch_steps = batches / accumulated
        try:
            if self.by_evidence:
                self.stopping = self._make_evidence(model, epoch_steps)
                self.stopping._collector.keeps_all_passes = not in_grad
            else:
                self._check_run(resumed, pools_ranks)
                self.stopping = self._make_folds(model, optimizer, loss, rows, prepare, **inputs)
                self.stopping.observer.count_passes(in_grad)
            if epoch_steps is not None and math.isfinite(epoch_steps):
                self.stopping.run.epoch_steps = epoch_steps
            self._model, state = model, self.next_state
            self.next_state, self._last = {}, {}
            if state:
                self._load(state)
            if hook and self.by_evidence:
                self._remove_hook = call_at_steps(self._before_any_step)
            self._batches, self._epochs, self._warned = 0, 0, False
            self._counts = self.stopping.counts if self.by_evidence else self._counts
        except BaseException:
            self.end()
            raise
        return self.stopping

    def _check_run(self, resumed: bool, pools_ranks: bool) -> None:
        """Refuse runs in which shadows would estimate a wrong loss."""
        if several_processes() and not pools_ranks:
            raise HeldinError(
                f"{self.owner}: several processes train this model, and each would estimate by its "
                "own rows. Train in one process, or use rule='evidence', whose processes decide "
                "together"
            )
        if resumed and not self.next_state:
            raise HeldinError(
                f"{self.owner}: the run goes on, but the state of its shadows is not there. New "
                "ones would start from a model that has seen the rows they hold out, and estimate "
                f"too low a loss. Resume from a checkpoint of a run with {self.owner}, train from "
                "the beginning with a new optimiser, or use rule='evidence'"
            )

    def _make_evidence(self, model: nn.Module, epoch_steps: float | None) -> EvidenceStopping:
        rule = self.rule
        assert isinstance(rule, Evidence)
        if rule.window == "epoch" and self.next_state:  # a resumed run keeps its number of steps
            rule = replace(rule, window=self.next_state["settings"]["window"])
        rule = rule.in_steps(self.owner, epoch_steps, "train on data that have a length")
        return EvidenceStopping(model, rule, seed=self.inputs.seed)

    def _make_folds(
        self, model: nn.Module, optimizer: Any, loss: Any, rows: Any, prepare: Any, **inputs: Any
    ) -> PathStopping:
        loader = unwrap_loader(self.owner, rows)
        assert isinstance(self.rule, (Auto, Folds))  # there is no loss_fn for leave-one-out
        data = TrainingRows(_row_loader(loader, loader), self._order, prepare, self.owner)
        if self.inputs.eval_data is not None:
            eval_rows = _row_loader(self.inputs.eval_data, loader)
            inputs["eval_data"] = TrainingRows(eval_rows, None, prepare)
        inputs |= {"model": model, "optimizer": optimizer, "data": data, "batch_loss": loss}
        resumes = bool(self.next_state) or self.warns_itself
        inputs |= {"resumes": resumes, "store": ItemStore()}  # a store for each run
        return follow(replace(self.inputs, **inputs), self.rule)

    def begin_batch(self) -> None:
        """Prepare for a batch, which is trained on next."""
        self._batches += 1
        self.evidence_formed = self.just_stopped = self._has_closure = False
        if self.running and not self.by_evidence:
            self._random_state = self.stopping.begin_batch()

    def before_step(self) -> bool:
        """Form the evidence before a step of the optimiser; return True if training should stop.

        Several optimisers that step in one batch have one value.
        """
        if self.by_evidence and self.running and not self.evidence_formed:
            self.evidence_formed = True
            self._advance()
        return self.by_evidence and self.running and self.should_stop

    def keep_weights(self, others: Sequence[Tensor] = ()) -> None:
        """Make the coming step of the optimiser an empty one, for model and other parameters.

        Optimisers skip parameters without a gradient, momentum and weight decay included. So the
        weights at the stop are kept where a framework steps all the same.
        """
        model = self._model
        for parameter in (*others, *(model.parameters() if model is not None else ())):
            parameter.grad = None

    def _before_any_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Form the evidence, and keep the weights if training should stop."""
        if isinstance(optimizer, ElementwiseStopping) or self._model is None:
            return  # the optimiser inside of it will step as well
        trained = {id(p) for p in self._model.parameters()}
        stepping = [p for group in optimizer.param_groups for p in group["params"]]
        if not any(id(p) in trained for p in stepping):
            return
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            self._has_closure = True  # the backward passes lie inside of the step
        elif self.before_step():
            self.keep_weights(stepping)

    def add(
        self,
        batch: Any,
        delivered: Any = None,
        rows: Sequence[int] | None = None,
        in_batches: bool = False,
    ) -> None:
        """Record a batch that was trained on, whether or not the optimiser has stepped.

        Args:
            batch: as the model saw it.
            delivered: as the followed loader returned it (default: batch).
            rows: its row numbers, where no loader is followed.
            in_batches: whether the dataset makes whole batches, and no rows.
        """
        if self.by_evidence or not self.running:
            return
        if not self.stopping.observer.take_reached():  # the loop skipped it, because of a nan say
            return
        if rows is not None:
            record = LoaderBatch(torch.tensor(rows), None)
        else:
            assert self._order is not None
            record = self._order.find(batch if delivered is None else delivered)
            if in_batches:
                record = replace(record, batch=None, items=None)
        record = replace(record, prepared=batch, random_state=self._random_state)
        self.stopping.add_batch(record)
        self._random_state = None

    def step(self) -> bool:
        """Follow the optimiser's step, if it has taken one; return True if training should stop."""
        if not self.running:
            return False
        if not self.by_evidence:
            if self.stopping.observer.pending:
                self._advance()
        elif self._has_closure:
            if self.evidence_formed:
                self.drop_passes()
            else:
                self.before_step()
        return self.should_stop

    def _advance(self) -> None:
        before = self.should_stop
        self.stopping.step()
        self.just_stopped = self.should_stop and not before

    def drop_passes(self) -> None:
        """Ignore backward passes after the evidence was formed, as a line search makes them."""
        if self.by_evidence and self.evidence_formed and self.running and self.stopping.counts[2]:
            self.stopping.discard()

    def end_epoch(self) -> None:
        """Warn of an epoch without a backward pass, and of many epochs without a stop."""
        batches, self._batches = self._batches, 0
        if not self.by_evidence or not self.running or not batches:
            return
        stopping, before = self.stopping, self._counts
        self._counts = stopping.counts
        self._epochs += 1
        many = self._epochs == MANY_EPOCHS and stopping.counts[0] >= 10 * MANY_EPOCHS
        if many and not stopping.should_stop:
            warn_of_many_epochs(self.owner, stopping.criterion)
        unobserved = before[0] < stopping.counts[0] < before[0] + stopping.every
        if stopping.counts[1:] != before[1:] or unobserved or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.owner}: no backward pass through the model was seen in a whole epoch of "
            f"{batches} batches, so the rule cannot stop training. Is the model that it was "
            "given the one that is trained, and are its parameters those of the optimiser? A step "
            "that does not call the model's forward goes through stopping.call(...) "
            + more("no-backward-pass-seen"),
            HeldinWarning,
            stacklevel=2,
        )

    # -- values

    def metrics(self) -> dict[str, float]:
        """Return the values to log."""
        return flat_metrics(self.stopping, self._log_groups)

    @property
    def shown_names(self) -> list[str]:
        """The names of the values for a progress bar or a table, those of groups aside."""
        if self.by_evidence:
            return ["heldin/criterion"]
        outputs = self.inputs.outputs
        names = ["estimate", "standard_error", *(outputs.resolved if outputs is not None else ())]
        return [f"heldin/{name}" for name in names]

    def shown(self) -> dict[str, float]:
        """Return the values for a progress bar or a table."""
        values, names = self.metrics(), self.shown_names
        shown = {name: values[name] for name in names if name in values}
        return shown | {k: v for k, v in values.items() if k.startswith("heldin/group/")}

    # -- the end

    def finish(self) -> None:
        """End the run: put the chosen weights into the model, if the user wants it."""
        if self._model is not None and not self.by_evidence:
            if self.restores and len(self.stopping.history):
                self._last = copied(trained_tensors(self._model))
                self.stopping.restore()
        self.end()

    def end(self) -> None:
        """End the run, also after an error. Results remain available."""
        self.close()
        if self._order is not None:
            self._order.close()
        self._order = self._first = None

    def close(self) -> None:
        """Release model and optimiser; loaders are still followed."""
        self._remove_hook()
        if self.stopping is not None:
            if self._model is not None:
                self._final = self.stopping.state_dict()  # a later run may continue from here
            self.stopping.close()
        self._model = None

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, or the one that the next begins with."""
        if self.stopping is None or self.next_state:
            return dict(self.next_state)
        rule = self.stopping.state_dict() if self.running else self._final
        return rule if self.by_evidence else {"rule": rule, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: now in a run, else when the next one begins."""
        if state and not self.by_evidence and {*state} != {"rule", "last"}:
            raise HeldinError(
                f"{self.owner}.load_state_dict: this is not a state of {self.owner}; pass what its "
                "state_dict() returned"
            )
        if self.running and state:
            self._load(state)
        else:
            self.next_state = dict(state)

    def carry_over(self) -> None:
        """Let the next run continue where the last one ended."""
        self.close()
        self.next_state = self.state_dict()

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load a state into the rule and the weights at which training ended into the model."""
        if self.by_evidence:
            self.stopping.load_state_dict(state)
            return
        self.stopping.load_state_dict(state["rule"])
        assert self._model is not None
        with torch.no_grad():
            for name, value in trained_tensors(self._model).items():
                if name in state["last"]:
                    value.copy_(state["last"][name])


def unwrap_loader(owner: str, loader: Any) -> DataLoader[Any]:
    """Return the DataLoader inside of Accelerate's wrapper; refuse one without row numbers."""
    if type(loader).__name__ == "DataLoaderDispatcher" and several_processes():
        raise HeldinError(
            f"{owner}: with dispatch_batches=True one process draws the rows of all, and the "
            "others do not see their numbers; use dispatch_batches=False"
        )
    if not isinstance(getattr(loader, "base_dataloader", loader), DataLoader):
        raise HeldinError(
            f"{owner}: the training data must be a torch.utils.data.DataLoader, whose sampler "
            f"gives the numbers of the rows, got {type(loader).__name__}; or use rule='evidence', "
            "which needs none"
        )
    try:
        return inner_loader(loader)
    except HeldinError as error:
        raise HeldinError(f"{owner}: {error}") from None


def _row_loader(data: Any, rows: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader that only holds a dataset and a collate function."""
    inner = getattr(data, "base_dataloader", data)
    loader = inner if isinstance(inner, DataLoader) else rows
    dataset = loader.dataset if loader is inner else data
    size = getattr(rows.batch_sampler, "batch_size", None)
    return DataLoader(dataset, batch_size=size or BATCH_SIZE, collate_fn=loader.collate_fn)
