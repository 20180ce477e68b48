"""`heldin.EarlyStopping`: one object that says when to stop, and how good the model will be."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from heldin._private_torch import is_inner_step
from heldin.capture.sharding import unwrapped
from heldin.distributed.ranks import JoinHook
from heldin.errors import HeldinError, HeldinWarning, NamedArguments
from heldin.loop.batches import tensors_in, to_device
from heldin.loop.hooks import call_at_steps
from heldin.rules.auto import follow
from heldin.rules.base import copied, trained_tensors
from heldin.rules.callback_hints import CALLBACKS, PlainLoopOnly
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.evidence_checks import MANY_EPOCHS, has_closure, warn_of_many_epochs
from heldin.rules.folds import FoldStopping
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Evidence, Rule, Validation, resolve
from heldin.rules.outcome import OUTPUTS, OutputOptions
from heldin.rules.path import PathStopping
from heldin.rules.policy import Patience
from heldin.rules.progress import RunProgress
from heldin.rules.reporting import RunFacts
from heldin.rules.results import RunResults
from heldin.rules.validation import ValidationStopping
from heldin.shadows.held_out import loss_of_pairs
from heldin.shadows.stacked import StackedShadows
from heldin.state.schema import check_int, check_schema, checked_state

__all__ = ["EarlyStopping"]

NAME = "heldin.EarlyStopping"

STATE_VERSION = 1
STATE_SCHEMA = {
    "rule": dict,
    "step": int,
    "epoch_ends": [int],
    "stopped_weights": {str: Tensor},
}


class EarlyStopping(NamedArguments, RunResults, PlainLoopOnly):
    """Says when to stop training and estimates the test loss, without a validation set.

    The object observes the optimiser: no call inside the loop is needed. The model trains on every
    row; what is measured depends on `rule`.

    Args:
        model: the model that is trained.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> the mean or the sum of the rows' losses.
        data: the rows that the model is trained on: tensors (x, y), a Dataset or the DataLoader of
            the loop. rule="evidence" needs none.
        rule: "auto", "folds", "shadow", "leave-one-out", "evidence", or one of `heldin.rules`.
        batch_loss: (model, batch) -> loss, in place of loss_fn, for any model and batch.
        eval_loss: (model, batch) -> the loss to estimate (default: batch_loss).
        eval_data: the same rows, shown without augmentation, for the held-out losses.
        clip: how the loop clips gradients: the largest norm, or a function of the parameters.
        groups: (n,) names or numbers; rows with the same one are held out jointly.
        stratify: (n,) classes; each fold gets its share of every class.
        time: (n,) numbers or dates: each shadow sees the rows before one of them and is tested on
            the block after it, as with scikit-learn's TimeSeriesSplit.
        sample_weight: (n,) weights of the rows in the loop's loss.
        patience: number of epochs after the best check, or a `heldin.Patience`; None: never stop.
            An epoch is one of `epochs()`, else as many rows as `data` has. `reason` says when the
            run ends at the latest.
        finish: whether to train to the end of the loop, for learning-rate schedules with a fixed
            end: the last weights are kept, `estimates` are theirs, and `best_step` is advice for
            the length of the next run. None: stop early, and warn of such a schedule.
        budget, memory: shorthand for `heldin.rules.Auto(budget=, memory=)`.
        metrics: names of scikit-learn's scorers, torchmetrics objects, or a mapping of names to
            functions (outputs, targets) -> number; computed on the out-of-fold outputs.
        predict: (model, batch) -> outputs, where they are not what the loss's call of the model
            returned (or its `.logits`).
        targets: (batch) -> targets, where they are neither the last element nor the "labels".
        monitor: "loss", or the name of a metric: what the weights are chosen by.
        mode: "max" or "min", for a metric whose name does not say which is better.
        temperature: whether to divide the logits of a classifier by a temperature, see
            `temperature`. "auto": if the loss is the cross-entropy of the model's outputs and the
            model's last layer can be scaled exactly.
        on_check: a function of this object, called after every check of the loop; see
            `last_check` and `heldin.optuna.pruning`.
        seed: of the folds, the draws and the shadows' random numbers.
        process_group: the processes that train the model jointly: "auto" takes those of
            DistributedDataParallel, None says that there are none.
        train_step: a function of a batch that takes one step of the training, whatever that is:
            clipping, penalties, several passes. Call `stopping.train(batch)` in its place.
        state: further objects that `train_step` changes, each a module or an object with
            `state_dict` and `load_state_dict`: a gradient scaler, a second optimiser.
        averaged_model: an average of the weights that `train_step` updates, such as
            `torch.optim.swa_utils.AveragedModel`. Estimates are those of the average, and its
            weights are restored, into the average and into the model.
        verify: whether to check every step of the loop, not only the first ones and some later
            ones; see `heldin.verify`.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 20)
    >>> y = x[:, :1] + torch.randn(60, 1)
    >>> model = torch.nn.Linear(20, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    >>> loss_fn = torch.nn.MSELoss()
    >>> loader = torch.utils.data.DataLoader(
    ...     torch.utils.data.TensorDataset(x, y), batch_size=20, shuffle=True
    ... )
    >>> stopping = heldin.EarlyStopping(model, optimizer, loss_fn, loader)
    >>> for epoch in stopping.epochs(500):
    ...     for inputs, targets in loader:
    ...         optimizer.zero_grad()
    ...         loss_fn(model(inputs), targets).backward()
    ...         optimizer.step()
    >>> stopping.should_stop
    True
    >>> interval = stopping.estimates["loss"]
    >>> 0.8 < interval.value < 1.8                     # the noise alone is 1
    True
    """

    _callbacks = CALLBACKS

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Any = None,
        data: Any = None,
        rule: str | Rule = "auto",
        *,
        batch_loss: Any = None,
        eval_loss: Any = None,
        eval_data: Any = None,
        clip: Any = None,
        groups: Any = None,
        stratify: Any = None,
        time: Any = None,
        sample_weight: Tensor | None = None,
        patience: int | Patience | str | None = "default",
        finish: bool | None = None,
        budget: float | None = None,
        memory: int | None = None,
        metrics: Any = None,
        predict: Any = None,
        targets: Any = None,
        monitor: str = "loss",
        mode: str | None = None,
        temperature: bool | str = "auto",
        on_check: Callable[[Any], Any] | None = None,
        seed: int = 0,
        process_group: Any = "auto",
        train_step: Callable[[Any], Any] | None = None,
        state: Sequence[Any] = (),
        averaged_model: nn.Module | None = None,
        verify: bool = False,
    ) -> None:
        arguments = dict(locals())
        self.rule: Any = resolve(rule, budget, memory)
        self.seed = seed
        self._optimizer: Any = _check_optimizer(optimizer)
        if not isinstance(model, nn.Module):
            raise HeldinError(
                f"{NAME}: model must be a torch.nn.Module, got a {type(model).__name__}; the order "
                "is EarlyStopping(model, optimizer, loss_fn, data)"
            )
        self._step = 0
        self._failed = False  # whether the latest step could not be followed
        self._batches: list[tuple[Any, Any]] = []  # announced by note_batch
        self._stopped_weights: dict[str, Tensor] | None = None
        self._model: nn.Module | None = unwrapped(model)
        self._loader = data if isinstance(data, DataLoader) else None
        self._data, self._loss = data, batch_loss
        if batch_loss is None and loss_fn is not None:
            self._loss = loss_of_pairs(loss_fn)
        defaults = {n: p.default for n, p in signature(EarlyStopping.__init__).parameters.items()}
        self.rule.refuse_unused(NAME, arguments, defaults)
        arguments["outputs"] = OutputOptions(NAME, **{name: arguments[name] for name in OUTPUTS})
        arguments |= {"optimizer": self._optimizer, "on_check": self._bound_on_check(on_check)}
        names = RunInputs.__dataclass_fields__ & arguments.keys()
        inputs = RunInputs(**{name: arguments[name] for name in names})
        if state and train_step is None:
            raise HeldinError(f"{NAME}: state has no effect without train_step; leave it out")
        if averaged_model is not None and train_step is None:
            raise HeldinError(
                f"{NAME}: averaged_model needs train_step, a function of a batch that takes the "
                "step and updates the average, so that each shadow updates an average, too"
            )
        self._train_step, self._training = train_step, False
        self._progress: RunProgress | None = None
        self._counts_epochs = False  # whether the loop is over `epochs`
        self._inner = self._make(inputs)
        self._facts: RunFacts = getattr(self._inner, "run", RunFacts())
        self._facts.describe(self._model, self._optimizer)
        if verify:
            check = self._inner.step_check if isinstance(self._inner, PathStopping) else None
            if check is None:
                raise HeldinError(f"{NAME}: verify has no effect with this rule; leave it out")
            check.check_every_step()
        self._removals = [
            call_at_steps(self._before_step, self._optimizer),
            call_at_steps(self._after_step, self._optimizer, after=True),
        ]

    # -- making the rule

    def _make(self, inputs: RunInputs) -> Any:
        """Return the object that follows the run."""
        rule = self.rule
        if isinstance(rule, Evidence):
            return self._make_evidence(inputs, rule)
        if isinstance(rule, Validation):
            return self._make_validation(inputs, rule)
        if type(rule).follow is not Rule.follow:  # a rule from elsewhere
            return rule.follow(inputs.model, self._optimizer)
        return follow(inputs, rule)

    def _make_evidence(self, inputs: RunInputs, rule: Evidence) -> Any:
        if rule.window != "epoch" and self._data is not None:
            raise HeldinError(
                f"{NAME}: rule='evidence' uses no data, except for window='epoch'; leave it out"
            )
        steps = None if self._loader is None else len(self._loader)
        rule = rule.in_steps(NAME, steps, "give the DataLoader of the loop as data")
        group = inputs.process_group
        return EvidenceStopping(inputs.model, rule, seed=inputs.seed, process_group=group)

    def _make_validation(self, inputs: RunInputs, rule: Validation) -> Any:
        inputs.check_loss()
        model, patience, batch_loss, data = inputs.model, inputs.patience, self._loss, rule.data
        checks = 5 if patience == "default" else patience
        if not isinstance(checks, int):
            raise HeldinError(
                f"{NAME}: with rules.Validation, patience is a number of epochs, got {checks!r}"
            )
        if rule.check_every is not None and patience != "default":
            if self._loader is None:
                raise HeldinError(
                    f"{NAME}: rules.Validation(check_every=...) needs the DataLoader of the loop "
                    "as data, to know how many checks the epochs of patience have"
                )
            checks = math.ceil(checks * len(self._loader) / rule.check_every)
        device = next(model.parameters()).device
        if isinstance(data, (tuple, list)) and all(isinstance(part, Tensor) for part in data):
            data = [data]

        def loss() -> float:
            total = rows = 0.0
            for batch in data:
                moved = to_device(batch, device)
                count = len(next(tensors_in(moved)))
                total += float(batch_loss(model, moved)) * count
                rows += count
            return total / rows

        return ValidationStopping(model, loss, patience=checks, improvement=rule.improvement)

    # -- following the optimiser

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Form the value of evidence, whose weights are those before the step."""
        if is_inner_step(optimizer):
            return
        self._facts.note_step()
        if not isinstance(self._inner, EvidenceStopping) or self._inner.should_stop:
            return
        if has_closure(args, kwargs):
            raise HeldinError(
                f"{NAME}: with rule='evidence' the gradients must be there before "
                "optimizer.step(); call backward() before it, not in a closure"
            )
        self._note_stop(self._inner.step())

    def _note_stop(self, stops: bool, has_batch: bool = True) -> None:
        """Keep the weights that made evidence stop; of a rank with a batch, if one has none."""
        if stops and self._model is not None:
            weights = copied(trained_tensors(self._model))
            self._inner.share_weights(weights, has_batch)
            self._stopped_weights = weights

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_inner_step(optimizer):
            return
        self._step += 1
        self._failed = True  # until the step was followed
        self._follow_step()
        self._failed = False
        self._show_step()

    def _show_step(self) -> None:
        self._facts.note_step()
        if self._progress is not None:
            self._progress.show(self._step)

    def _follow_step(self) -> None:
        inner = self._inner
        if isinstance(inner, EvidenceStopping):
            return
        if isinstance(inner, ValidationStopping):
            every = self.rule.check_every
            if every is None and not self._counts_epochs and self._loader is not None:
                every = len(self._loader)
            if every is not None and self._step % every == 0 and not inner.should_stop:
                inner.step(at=self._step)
            return
        if self._train_step is not None:
            if not self._training:
                raise HeldinError(
                    f"{NAME}: the optimiser stepped outside of train_step, and shadows would not "
                    "follow; call stopping.train(batch) in place of your own step"
                )
            return
        batches, self._batches = self._batches, []
        if not batches:
            inner.step()
        elif isinstance(inner, FoldStopping) and not isinstance(inner._backend, StackedShadows):
            for batch, indices in batches:
                inner.add_batch(batch, indices)
            inner.step()
        else:
            rows = [torch.as_tensor(indices) for _, indices in batches if indices is not None]
            if len(rows) != len(batches):
                raise HeldinError(f"{NAME}.note_batch: pass the row numbers too: indices=...")
            inner.step(torch.cat(rows))

    def note_batch(self, batch: Any, indices: Tensor | Sequence[int] | None = None) -> None:
        """Announce the batch of the coming step, where it cannot be recognised.

        Args:
            batch: the batch, as the model is trained on it.
            indices: the numbers of its rows, unless the loader given as data returned it.
        """
        self._batches.append((batch, indices))

    def train(self, batch: Any) -> Any:
        """Call `train_step(batch)` for the model and then for its shadows.

        Args:
            batch: as the loader given as data returned it.

        Returns:
            What `train_step` returned for the model.
        """
        self._opened("train")
        if self._train_step is None:
            raise HeldinError(
                f"{NAME}.train: it calls the function given as train_step, and there is none; pass "
                "heldin.EarlyStopping(..., train_step=function)"
            )
        announced, self._batches = self._batches, []
        self._training = True
        try:
            indices = announced[-1][1] if announced else None
            return self._inner.train_on(batch, indices)
        finally:
            self._training = False

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in place of the model's forward pass, and return its result.

        For rule="evidence" and training steps that do not call the model itself but a method of it:
        `loss = stopping.call(flow.loss, inputs, condition).mean()`. Samples are counted by the
        arguments. With other rules it is a plain call.

        Args:
            function: uses the parameters of the model.
            args, kwargs: of the function.
        """
        if isinstance(self._inner, EvidenceStopping):
            return self._inner.call(function, *args, **kwargs)
        return function(*args, **kwargs)

    def step(self) -> bool:
        """Return `should_stop`, for loops that ask after every step."""
        return self.should_stop

    # -- loops

    def epochs(self, max_epochs: int, *, progress: bool = False) -> Iterator[int]:
        """Yield epoch numbers until the rule stops; then restore the best weights and close.

        Args:
            max_epochs: largest number of epochs.
            progress: whether to show losses and the latest stop: as a bar on a terminal and in
                notebooks, if tqdm is installed, else as lines.
        """
        check_int(NAME, "max_epochs", max_epochs, 1)
        self._opened("epochs")
        self._show(progress, max_epochs)
        try:
            for epoch in range(len(self._facts.epoch_ends), max_epochs):
                yield epoch
                self._end_epoch()
                if self.should_stop:
                    break
        except GeneratorExit:  # the loop was left by break, or by an error
            if self._failed:
                self.close()
            else:
                self._end_epoch()
                self._finish()
            raise
        self._finish()

    def _show(self, progress: bool, max_epochs: int) -> None:
        self._counts_epochs = True
        if progress:
            self._progress = RunProgress(self._inner, self._facts, max_epochs)

    def _end_epoch(self) -> None:
        first = self._facts.epoch_ends[-1] if self._facts.epoch_ends else 0
        if self._step > first:
            self._facts.epoch_ends.append(self._step)
            self._facts.epoch_steps = self._step - first
            many = len(self._facts.epoch_ends) == MANY_EPOCHS and self._step >= 10 * MANY_EPOCHS
            if many and isinstance(self._inner, EvidenceStopping) and not self.should_stop:
                warn_of_many_epochs(NAME, self._inner.criterion)
        if isinstance(self._inner, ValidationStopping) and not self._inner.should_stop:
            if self.rule.check_every is None:
                self._inner.step(at=self._step)

    def _finish(self) -> None:
        if self._model is None:  # closed on the way, after an error for instance
            return
        if self._step:
            self.restore()
        self.close()

    def fit(
        self,
        batch_size: int | None = None,
        max_epochs: int = 1000,
        *,
        generator: torch.Generator | None = None,
        progress: bool = False,
        shuffle: bool = True,
        on_epoch: Callable[[EarlyStopping], Any] | None = None,
    ) -> EarlyStopping:
        """Train the model until the rule stops, and restore the best weights.

        Small networks on tensors train in one stack with their shadows. Every other model takes
        `train_step`, or plain steps: loss, backward, step. On tensors its shadows (light ones
        aside) train first, and the model as far as its weights are wanted: the result is the same.

        Args:
            batch_size: rows in a minibatch (default: all rows; a DataLoader has its own).
            max_epochs: largest number of epochs.
            generator: of the order of the rows.
            progress: see `epochs`.
            shuffle: whether each epoch has a new random order (a DataLoader has its own).
            on_epoch: a function of this object, called after every epoch, for models that train in
                one stack with their shadows; the model has the weights of that moment.

        >>> import heldin, torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(60, 20)
        >>> y = x[:, :1] + torch.randn(60, 1)
        >>> model = torch.nn.Linear(20, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        >>> stopping = heldin.EarlyStopping(model, optimizer, torch.nn.MSELoss(), (x, y))
        >>> stopping.fit(batch_size=16).should_stop
        True
        """
        self._opened("fit")
        check_int(NAME, "max_epochs", max_epochs, 1)
        inner = self._inner
        if not isinstance(inner, FoldStopping) or not isinstance(inner._backend, StackedShadows):
            if on_epoch is not None or not shuffle:
                raise HeldinError(
                    f"{NAME}.fit: on_epoch and shuffle=False are for models that train in one "
                    "stack with their shadows; write the loop: for epoch in stopping.epochs(...)"
                )
            self._fit_plainly(batch_size, max_epochs, generator, progress)
            return self
        steps = -(-inner._count // (batch_size or inner._count))
        if self._loader is not None:
            steps = len(self._loader)
        self._facts.epoch_steps = steps
        self._show(progress, max_epochs)

        def after_epoch() -> None:
            self._step = inner._step
            self._facts.epoch_ends.append(self._step)
            self._show_step()
            if on_epoch is not None:
                inner._give_back()
                on_epoch(self)

        self._facts.note_step()
        inner.train(
            batch_size,
            max_steps=max_epochs * steps,
            shuffle=shuffle,
            generator=generator,
            after_epoch=after_epoch,
        )
        self._step = inner._step
        self._facts.note_step()
        self._finish()
        return self

    def _start_shadows(self, weights: Sequence[Mapping[str, Tensor]]) -> None:
        """Let stacked shadows start with weights of their own, and repeat the check at step 0.

        For the estimators, whose networks start at a constant: that of a shadow must not contain
        the targets of rows that it does not see.
        """
        self._inner._stacked("fit").start_at(weights)
        self._inner.first_check()

    def _fit_plainly(
        self,
        batch_size: int | None,
        max_epochs: int,
        generator: torch.Generator | None,
        progress: bool,
    ) -> None:
        """Train in a plain loop."""
        if isinstance(self.rule, Evidence) or type(self.rule).follow is not Rule.follow:
            raise HeldinError(
                f"{NAME}.fit: rule {self.rule.name!r} follows a loop of yours; write it: "
                "for epoch in stopping.epochs(...)"
            )
        if self._data is None or (self._loss is None and self._train_step is None):
            raise HeldinError(
                f"{NAME}.fit: it needs data, and loss_fn, batch_loss or train_step; or write the "
                "loop: for epoch in stopping.epochs(...)"
            )
        model, optimizer = self._opened("fit"), self._optimizer
        loader = self._loader
        if loader is None:
            rows = self._data if isinstance(self._data, Dataset) else TensorDataset(*self._data)
            size = batch_size or len(rows)  # type: ignore[arg-type]
            if generator is None:  # a stream that draws of the model do not move
                seed = int(torch.empty((), dtype=torch.int64).random_())
                generator = torch.Generator().manual_seed(seed)
            order = RandomSampler(rows, generator=generator)  # type: ignore[arg-type]
            loader = DataLoader(rows, size, sampler=order)
        elif batch_size is not None or generator is not None:
            raise HeldinError(
                f"{NAME}.fit: data is a DataLoader, which has its own batch size and order; leave "
                "batch_size and generator out"
            )
        device, inner, loss = next(model.parameters()).device, self._inner, self._loss
        ahead: list[Tensor] = []  # rows of the steps that shadows have taken before the model

        def take_step(batch: Any) -> None:
            optimizer.zero_grad()
            loss(model, to_device(batch, device)).backward()
            optimizer.step()

        fixed = isinstance(loader.dataset, TensorDataset)
        self._show(progress, max_epochs)
        for _ in range(len(self._facts.epoch_ends), max_epochs):
            for batch, index in _numbered_batches(loader, self._loader is None):
                leads = fixed and isinstance(inner, FoldStopping) and inner.may_lead
                if leads and index is not None:
                    inner.lead(batch, index)
                    self._step += 1
                    self._show_step()
                    ahead.append(index)
                else:
                    if index is not None:
                        self.note_batch(batch, index)
                    (take_step if self._train_step is None else self.train)(batch)
                if self.should_stop:
                    break
            self._end_epoch()
            if self.should_stop:
                break
        if ahead:
            inner.catch_up(lambda index: take_step(_rows_of(loader, index.tolist())), ahead)
        self._finish()

    def __enter__(self) -> EarlyStopping:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._model is None:
            return
        unchecked = isinstance(self._inner, ValidationStopping) and self._inner.best_step is None
        if kind is None and unchecked and self._step:
            warnings.warn(
                f"{NAME}: the validation loss was never computed, because this loop does not say "
                "where its epochs end; use `for epoch in stopping.epochs(n)`, "
                "rules.Validation(check_every=...), or give the DataLoader of the loop as data",
                HeldinWarning,
                stacklevel=2,
            )
        if kind is None:
            self._finish()
        else:
            self.close()

    # -- processes that run out of data, see torch.distributed.algorithms.Join

    def join_hook(self, **options: Any) -> JoinHook:
        """Return the hook with which a rank without data follows the steps of the others."""
        inner = self._joinable()
        return JoinHook(lambda: self._note_stop(inner.follow_joined(), has_batch=False))

    @property
    def join_device(self) -> torch.device:
        """The device of the model."""
        return self._joinable().join_device

    @property
    def join_process_group(self) -> Any:
        """The data-parallel processes."""
        return self._joinable().join_process_group

    def _joinable(self) -> EvidenceStopping:
        if not isinstance(self._inner, EvidenceStopping):
            raise HeldinError(
                f"{NAME}: ranks that run out of data would block the others, so that Join is not "
                "possible with shadows; give all ranks as many batches"
            )
        self._inner.joined_as = weakref.ref(self)
        return self._inner

    # -- results

    @property
    def following(self) -> Any:
        """The object that follows the run for the rule, with what only this kind of rule has.

        For rules with shadows: `fold_of_row`, and `backend`, which has the shadows' weights.
        """
        return self._inner

    def _followed(self) -> Any:
        return self._inner

    @property
    def should_stop(self) -> bool:
        """Whether the rule asks to stop."""
        return bool(self._inner.should_stop)

    @property
    def stopped_step(self) -> int | None:
        """The step at which the rule asked to stop."""
        return self._inner.stopped_step  # type: ignore[no-any-return]

    @property
    def reason(self) -> str:
        """The state of the run in words."""
        return str(self._inner.reason)

    @property
    def reason_chosen(self) -> str:
        """Why rule="auto" has chosen its rule."""
        return str(getattr(self._inner, "reason_chosen", ""))

    @property
    def history(self) -> Any:
        """The checks of the run."""
        return self._inner.history

    def metrics(self) -> dict[str, float]:
        """Return the state as a flat mapping for any tracker."""
        return dict(self._inner.metrics())

    def restore(self) -> None:
        """Put the chosen weights into the model."""
        model = self._opened("restore")
        if not isinstance(self._inner, EvidenceStopping):
            if not isinstance(self._inner, ValidationStopping) or self._inner.best_step is not None:
                self._inner.restore()
            return
        weights = self._stopped_weights
        if weights is not None:
            with torch.no_grad():
                for name, value in trained_tensors(model).items():
                    value.copy_(weights[name])

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        inner, values = self._inner, ""
        if isinstance(inner, PathStopping):
            numbers = {"test loss": inner.estimate, **inner.metric_values()}
            values = "".join(f", {name} {value:.4g}" for name, value in numbers.items())
            if inner.uncalibrated:
                values += f", no temperature: {inner.uncalibrated}"
        return f"<heldin.EarlyStopping({self.rule!r}): {self.reason}{values}>"

    # -- saving and closing

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs; `torch.load(..., weights_only=True)` reads it."""
        return {
            "heldin": "EarlyStopping",
            "version": STATE_VERSION,
            "rule": self._inner.state_dict(),
            "step": self._step,
            "epoch_ends": list(self._facts.epoch_ends),
            "stopped_weights": dict(self._stopped_weights or {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken: all later values are the same."""
        model = self._opened("load_state_dict")
        state = checked_state(NAME, state, STATE_VERSION, STATE_SCHEMA, "EarlyStopping")
        stopped = dict(state["stopped_weights"])
        if stopped:
            try:
                check_schema(stopped, trained_tensors(model), "['stopped_weights']")
            except ValueError as error:
                raise HeldinError(f"{NAME}.load_state_dict: {error}") from error
        self._inner.load_state_dict(state["rule"])
        self._step, self._facts.epoch_ends = state["step"], list(state["epoch_ends"])
        self._stopped_weights = stopped or None

    def close(self) -> None:
        """Remove all hooks and release the model. Results remain available."""
        for remove in self._removals:
            remove()
        if self._optimizer is not None:
            self._facts.note_rates(self._optimizer)
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self._inner.close()
        self._model = self._optimizer = self._loader = None
        self._data = self._loss = self._train_step = None
        self._batches = []

    def _opened(self, method: str) -> nn.Module:
        if self._model is None:
            raise HeldinError(f"{NAME}.{method}: called after close(); make a new object")
        return self._model


def _numbered_batches(
    loader: DataLoader[Any], numbered: bool
) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield the batches of an epoch, with the numbers of their rows if the loader is ours."""
    if not numbered:
        yield from ((batch, None) for batch in loader)
        return
    assert loader.batch_sampler is not None
    for index in loader.batch_sampler:
        yield _rows_of(loader, index), torch.tensor(index)


def _rows_of(loader: DataLoader[Any], index: Sequence[int]) -> Any:
    return loader.collate_fn([loader.dataset[i] for i in index])


def _check_optimizer(optimizer: Any) -> Optimizer:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps the real one
    if isinstance(inner, (list, tuple)):
        raise HeldinError(
            f"{NAME}: {len(inner)} optimisers were given, and shadows follow one; put the "
            "parameters into groups of one optimiser, or use rule='evidence' with one of them"
        )
    if not isinstance(inner, Optimizer):
        raise HeldinError(
            f"{NAME}: optimizer must be a torch.optim.Optimizer, got a {type(inner).__name__}; the "
            "order is EarlyStopping(model, optimizer, loss_fn, data)"
        )
    return inner
