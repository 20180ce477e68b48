"""Folds: shadows that train beside the model, each without some of the rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import forward_hooks
from heldin.capture.sharding import unwrapped
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.loop.events import ModelCall, OptimizerStep
from heldin.loop.items import ItemStore
from heldin.loop.matching import Rows, warn_of_copies
from heldin.loop.randomness import Autocast, RandomState
from heldin.loop.row_checks import check_rows, keep_items, refuse_other_order
from heldin.loop.rows import RowSource, undrawn_rows
from heldin.pause import paused
from heldin.rules.inputs import RunInputs
from heldin.rules.options import Folds
from heldin.rules.path import PathStopping
from heldin.rules.policy import lag
from heldin.shadows.backend import ShadowBackend
from heldin.shadows.bare_model import is_parametrization_hook
from heldin.shadows.exchange import group_settings
from heldin.shadows.held_out import loss_of_pairs
from heldin.shadows.labels import (
    fold_labels,
    given_folds,
    keep_first_folds,
    numbered,
    split_labels,
    stretches,
    time_labels,
    visible,
)
from heldin.shadows.models import module_of
from heldin.shadows.parameters import ParameterGuard
from heldin.shadows.replayed import ReplayedShadows
from heldin.shadows.stacked import CannotStack, StackedShadows
from heldin.shadows.tensors import TensorData
from heldin.state.estimates import interval_coverage
from heldin.state.schema import check_int

__all__ = ["FoldStopping"]

SHARE = 0.05  # of the time of the run that checks may take
LIGHT_SHARE = 0.1  # the same for light shadows, whose steps cost less
FIRST = 8  # checks that are made whatever they cost, so that short runs have some

UNDRAWN_EPOCHS = 8  # in which a loader draws every row that it ever draws

# Light shadows start again on all rows, once, if they fall behind: between these epochs, the model
# had their training loss this many times earlier, and its own has fallen to this share.
GUARDED_EPOCHS, GUARDED_LAG, GUARDED_LEVEL = (2, 16), 4.0, 0.9


class FoldStopping(PathStopping):
    """Trains K shadows beside the model, each without a fold of the rows.

    Shadows start where the model does and take the same steps on the same minibatches, each without
    the rows of its fold; one that may see no row of a minibatch takes no step. The mean loss of the
    rows on the shadows that have not seen them estimates the test loss.

    Attributes:
        fold_of_row: (rows,) the number of the shadow that is tested on a row; -1: none.
    """

    name = "folds"
    _saved: ClassVar[dict[str, Any]] = {"_seen": int, "_seen_at_check": int, "_seen_at_start": int}

    def __init__(self, inputs: RunInputs, rule: Folds, must_stack: bool = False) -> None:
        """Begin to follow a run; with `must_stack`, raise CannotStack rather than replay."""
        wrapped = getattr(inputs.optimizer, "optimizer", None)  # of Accelerate
        if isinstance(wrapped, Optimizer):
            inputs = replace(inputs, optimizer=wrapped)
        super().__init__(inputs, rule)
        self.rule, self._is_light = rule, rule.rows != "all"
        self._row_share = 1.0 if rule.rows == "all" else rule.rows  # of a batch, for each shadow
        model, optimizer, state = unwrapped(inputs.model), inputs.optimizer, inputs.state
        several = self._process_group is not None
        replays = inputs.needs_replay or rule.engine == "replay" or several
        self._refuse_arguments(inputs, replays, several)
        if inputs.averaged_model is not None:
            state = (*state, inputs.averaged_model)
            self._average = module_of(self.owner, inputs.averaged_model, model)
            inputs = replace(inputs, state=state)
        self._clip, self._store = inputs.clip, inputs.store
        self._first_rows: int | None = None
        self._warned_of_undrawn = False
        self._announced: list[tuple[Any, Tensor | None, int]] = []  # and backward passes before it
        self._seen = 0  # rows that the model was trained on
        self._seen_at_check = 0
        self._seen_at_start = 0  # of the shadows
        self._same = ParameterGuard(model, optimizer, state)
        self._replays_function = inputs.train_step is not None
        self._backend: ShadowBackend = self._make_backend(inputs, model, replays, must_stack)
        self._same_loss = self._backend.same_loss
        self.step_check = None if self._replays_function else self._backend.check
        self._start()

    def _refuse_arguments(self, inputs: RunInputs, replays: bool, several: bool) -> None:
        """Refuse what is missing, and what would be ignored."""
        name, engine = self.owner, self.rule.engine
        if inputs.data is None:
            raise HeldinError(f"{name}: data is missing: the DataLoader, the Dataset or tensors")
        inputs.check_loss()
        if (inputs.batch_loss is not None or several) and engine not in ("auto", "replay"):
            raise HeldinError(
                f"{name}: with batch_loss, or in several processes, engine must be 'auto' or "
                f"'replay', got {engine!r}"
            )
        if replays and inputs.sample_weight is not None:
            raise HeldinError(
                f"{name}: sample_weight is for stacked shadows; let the batch carry the weights "
                "and batch_loss use them"
            )
        if not replays and (inputs.eval_loss or inputs.eval_data) is not None:
            raise HeldinError(
                f"{name}: eval_loss and eval_data need batch_loss, or engine='replay'"
            )

    # -- the shadows

    def _make_backend(
        self, inputs: RunInputs, model: nn.Module, replays: bool, must_stack: bool
    ) -> ShadowBackend:
        """Return the shadows: in one stack where that can be right, else by replaying the step."""
        if not replays:
            stacked = self._stack(inputs, model)
            if stacked is not None:
                inputs.store.close()
                return stacked
            if must_stack:
                raise CannotStack
            if isinstance(inputs.data, Rows):
                rows = inputs.data
                inputs = replace(inputs, data=rows.loader or (*rows.inputs, rows.targets))
        return self._replay(inputs, model)

    def _stack(self, inputs: RunInputs, model: nn.Module) -> StackedShadows | None:
        """Return stacked shadows; None if they cannot be stacked, and nobody insists on it."""
        insists = inputs.sample_weight is not None or self.rule.engine != "auto"
        try:
            rows = TensorData(
                self.owner, model, inputs.loss_fn, inputs.data, inputs.sample_weight, self._device,
                inputs.store,
            )  # fmt: skip
        except HeldinError:
            raise
        except Exception:
            if insists or not _has_hooks(model):  # else the model needs its hooks
                raise
            return None
        if rows.rows.loader is not None:
            source = RowSource(rows.rows.loader, self.seed, False, inputs.store)
            check_rows(self.owner, source, inputs.is_grouped, compares=False)
        self._assign_rows(inputs, len(rows), self._device)
        try:
            return StackedShadows(
                self.owner, model, inputs.optimizer, rows, self.fold_of_row, self.rule.engine,
                self.seed, inputs.clip, self._row_share, self._times is not None, self._sees,
            )  # fmt: skip
        except CannotStack as error:
            if insists or self._sees is not None:
                raise HeldinError(f"{self.owner}: {error}") from error
            return None

    def _replay(self, inputs: RunInputs, model: nn.Module) -> ReplayedShadows:
        """Return shadows that replay the loop's step in the user's own objects."""
        name = self.owner
        source = view = RowSource(inputs.data, self.seed, store=inputs.store)
        if inputs.eval_data is not None:
            view = RowSource(inputs.eval_data, self.seed, False, ItemStore())
        if view.count != source.count:
            raise HeldinError(
                f"{name}: eval_data must show the same rows as data, row for row; it has "
                f"{view.count}, data has {source.count}"
            )
        self._first_rows = source.digest() if self._process_group is not None else None
        check_rows(name, source, inputs.is_grouped)
        if view is not source:
            keep_items(view)
            refuse_other_order(name, source, view)
        self._assign_rows(inputs, source.count, torch.device("cpu"))
        if self._sees is not None:
            raise HeldinError(
                f"{name}: folds as pairs of rows to train on and to test need loss_fn, tensors and "
                "shadows in one stack; give the fold of each row"
            )
        return ReplayedShadows(
            name, model, inputs.optimizer, source, view, self.fold_of_row,
            inputs.batch_loss or loss_of_pairs(inputs.loss_fn), inputs.eval_loss, inputs.clip,
            self.seed, self.memory, self._process_group, inputs.train_step, inputs.state,
            self._row_share, self._times is not None, self._average,
        )  # fmt: skip

    def _assign_rows(self, inputs: RunInputs, count: int, device: torch.device) -> None:
        """Assign the rows to folds; warn of copies of rows, which would be in several."""
        name, self._count = self.owner, count
        if not inputs.is_grouped:
            warn_of_copies(name, inputs.data)
        self._groups = numbered(name, "groups", inputs.groups, count)
        self._times = numbered(name, "time", inputs.time, count, in_order=True)
        self._sees: Tensor | None = None  # (shadows, rows), where labels do not say it
        label = self._labels(numbered(name, "stratify", inputs.stratify, count))
        undrawn = undrawn_rows(inputs.data, count)
        if bool(undrawn.any()):  # the model never sees them, so they cannot be held out
            label = torch.where(undrawn.to(label.device), -1, label)
            if int(label.max()) < 0:
                raise HeldinError(f"{name}: the sampler draws none of the rows to hold out")
        self.fold_of_row = label.to(device)
        self._visible = [  # number of rows that each shadow may see
            int(self._sees_rows(label, k).sum()) for k in range(int(label.max()) + 1)
        ]

    def _labels(self, classes: Tensor | None) -> Tensor:
        """Return (rows,) the number of the shadow that is tested on a row; -1: none."""
        n, folds = self._count, self.rule.folds
        counted = isinstance(folds, int)
        if self._times is not None:
            if self._groups is not None or classes is not None or not counted:
                raise HeldinError(
                    f"{self.owner}: with time, a shadow is tested on the rows after those it sees, "
                    "and groups, stratify and fold numbers of the rows cannot be kept; leave them "
                    "out (rows with the same time are never divided)"
                )
            self._folds = folds
            shadows = self._checked_shadows()
            self.history.rule = f"in time: {self.history.rule}"
            return time_labels(self.owner, self._times, self._folds, shadows)
        if counted:
            if folds > n:
                raise HeldinError(
                    f"{self.owner}: {folds} folds of {n} rows would be empty; use at most {n}"
                )
            if self._groups is not None and classes is not None:
                raise HeldinError(
                    f"{self.owner}: groups and stratify cannot both be kept; give one of them, or "
                    "fold numbers of your own: folds=..."
                )
            labels = fold_labels(n, folds, self.seed, self._groups, classes)
        elif classes is not None:
            raise HeldinError(
                f"{self.owner}: folds gives the fold of every row already; leave stratify out"
            )
        elif isinstance(folds, list) and all(isinstance(split, tuple) for split in folds):
            labels, self._sees = split_labels(self.owner, folds, n)
            if self.rule.shadows is not None or self._is_light:
                raise HeldinError(
                    f"{self.owner}: with pairs of rows to train on and to test, every pair has a "
                    "shadow that sees all of its rows; leave shadows and rows out"
                )
        else:
            labels = given_folds(self.owner, folds, n)
        if self._groups is not None and not counted:
            self._refuse_torn_groups(labels, self._groups)
        self._folds = int(labels.max()) + 1
        return keep_first_folds(labels, self._checked_shadows())

    def renumber(self, numbers: Tensor) -> None:
        """Give row i the number `numbers[i]` in all results of a finished run."""
        super().renumber(numbers)
        folds = self.fold_of_row.new_full((int(numbers.max()) + 1,), -1)
        folds[numbers] = self.fold_of_row
        self.fold_of_row = folds

    def _sees_rows(self, labels: Tensor, shadow: int) -> Tensor:
        """Return which rows a shadow may see, as booleans."""
        if self._sees is not None:
            return self._sees[shadow]
        return visible(labels, shadow, self._times is not None)

    def _refuse_torn_groups(self, labels: Tensor, groups: Tensor) -> None:
        for number in range(int(labels.max()) + 1):
            torn = groups[labels == number]
            torn = torn[torch.isin(torn, groups[self._sees_rows(labels, number)])]
            if len(torn):
                row = int((groups == torn[0]).nonzero()[0])
                raise HeldinError(
                    f"{self.owner}: folds tears groups apart: the group of row {row} is tested on "
                    "and trained on in the same fold"
                )

    def _checked_shadows(self) -> int:
        """Return the number of shadows."""
        shadows = self._folds if self.rule.shadows is None else self.rule.shadows
        if shadows > self._folds:
            raise HeldinError(
                f"{self.owner}: {shadows} shadows for {self._folds} folds; use at most as many"
            )
        if shadows < self._folds:  # what is known of the band is known of all folds
            self.history.rule = f"{shadows} of {self._folds} folds" if shadows > 1 else "shadow"
        if self._is_light:
            self.history.rule = f"light shadows: {self.history.rule}"
        return shadows

    def add_batch(self, batch: Any, indices: Tensor | Sequence[int] | None = None) -> None:
        """Announce a batch that the model was just trained on, before `step()`.

        Args:
            batch: as the loader gave it, here or moved to the model's device.
            indices: the numbers of its rows, unless the loader that made it was given as data.
        """
        if not self._backend.takes_batches:
            raise HeldinError(
                "add_batch: these shadows are stacked and take rows of the tensors given as data; "
                "pass step(indices=...), or make the object with batch_loss"
            )
        self._announced.append((batch, self._numbers(indices), self.observer.passes))

    def begin_batch(self) -> RandomState | None:
        """Return the states of the random generators before a batch, at steps that are checked."""
        state = self._backend.check.on_call()
        return None if state is None else state[0]

    def _stacked(self, method: str) -> StackedShadows:
        if not isinstance(self._backend, StackedShadows):
            raise HeldinError(
                f"{method}: it is for tensors and loss_fn in one process; with batch_loss, or in "
                "several, iterate over your own loader and call step()"
            )
        return self._backend

    def train_on(self, batch: Any, indices: Tensor | Sequence[int] | None = None) -> Any:
        """Call `train_step` for the model and then for its shadows; return what it returned."""
        self._opened("train")
        assert isinstance(self._backend, ReplayedShadows)
        self._same.check()
        self._store.close()
        result, rows = self._backend.train_on(batch, self._numbers(indices), self._step)
        self._seen += rows
        self._step += len(self.observer.take())
        self.observer.forget()
        if self._step > self.history.last().step and self._due():
            self._check_and_tell()
        return result

    @property
    def may_lead(self) -> bool:
        """Whether shadows may go on without the model, which then follows in `catch_up`.

        The first steps are checked. Light shadows are compared with the model at every check.
        """
        replayed = self._backend.engine == "replay" and not self._replays_function
        return replayed and not self._is_light and self._process_group is None and self._step >= 2

    def lead(self, batch: Any, index: Tensor) -> bool:
        """Train the shadows on a batch that the model has not seen; True if they should stop."""
        self._leads = True
        self._step += 1
        call = ModelCall((), (), (), Autocast.current(self._device.type))
        settings = tuple(group_settings(self._optimizer))
        self.add_batch(batch, index)
        self._follow(OptimizerStep(self._step, (call,), settings), None)
        if self._due():
            self._check()
        return self.should_stop

    def catch_up(self, take_step: Callable[[Tensor], None], order: Sequence[Tensor]) -> None:
        """Train the model on the batches that shadows have seen, as far as its weights are wanted.

        order: the numbers of the rows of every step in which shadows were alone.
        """
        if self._step > self.history.last().step:
            self._check()
        self._leads, first = False, self._step - len(order)
        checks = {self.history[number].step: number for number in self._kept}
        with paused():
            for step, rows in enumerate(order[: max(0, max(self.shares) - first)], first + 1):
                take_step(rows)
                if step in checks:
                    self._kept[checks[step]] = self._snapshot()
        self._backend.check.renew()

    def _follow(self, taken: OptimizerStep, index: Tensor | None) -> None:
        self._same.check()
        self._store.close()
        # The loop threw gradients of batches before the first pass of the step away.
        announced = [
            (batch, rows)
            for batch, rows, passes in self._announced
            if passes not in range(1, taken.first_pass)
        ]
        self._announced = []
        if index is not None:
            announced.append((None, index))
        self._seen += self._backend.follow(taken, announced)

    def _due(self) -> bool:
        if self._patience_asks or not super()._due():
            return self._patience_asks
        if self._seen - self._seen_at_check < self._count / 4:  # an epoch has no more than four
            return False
        # In forward passes of a row; a backward pass costs two. The first checks are always there.
        shares = sum(self._visible) / self._count
        if self._is_light:
            shares = min(shares, self._backend.copies * self._row_share)
        run = 3.0 * self._seen * (1.0 + shares)
        # the same for every engine, so that the grid is
        cost = 2 * self._backend.held + self._backend.level_count
        share = LIGHT_SHARE if self._is_light else SHARE
        return (len(self.history) + 1) * cost <= share * run + FIRST * cost

    def train(
        self,
        batch_size: int | None = None,
        *,
        max_steps: int = 10_000,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
        after_epoch: Callable[[], None] | None = None,
    ) -> None:
        """Train the model in the same stack as its shadows, until it should stop.

        The model is one more copy in the stack, so that small networks train with five folds in
        little more time than alone. The optimiser gives its kind and its settings; its own state is
        left as it is. For the arguments, see `heldin.EarlyStopping.fit`.
        """
        name = self.owner
        self._opened("train")
        team = self._stacked("train")
        if self._step and not team.inside:
            raise HeldinError(
                f"{name}.train: this object already follows a loop of yours through step(); make a "
                "new one"
            )
        check_int(name, "max_steps", max_steps, 0)
        if not team.inside:
            team.take_in()
        while self._step < max_steps and not self.should_stop:
            settings = group_settings(self._optimizer)
            for index, inputs in team.epoch(batch_size, shuffle, generator):
                team.advance(inputs, index, settings)
                self._step += 1
                self._seen += len(index)
                if self._due():
                    self._give_back()
                    self._check_and_tell()
                if self._step >= max_steps or self.should_stop:
                    break
            if after_epoch is not None:
                after_epoch()
        self._give_back()

    def _give_back(self) -> None:
        """Put the weights and buffers of the copy that is the model into the model."""
        own = self._stacked("train").weights_of_the_model()
        with torch.no_grad():
            for name, value in self._state().items():
                if name in own:
                    value.copy_(own[name])

    def _row_groups(self, rows: Tensor) -> Tensor | None:
        if self._times is not None:
            return stretches(self._times[rows])
        return None if self._groups is None else self._groups[rows]

    def _check(self) -> None:
        self._seen_at_check = self._seen
        super()._check()
        self._warn_of_undrawn()
        if self._backend.draw.share < 1.0 and not self.should_stop:
            self._guard()

    def _warn_of_undrawn(self) -> None:
        """Warn, once, of held-out rows that the loader of the loop has never drawn."""
        recorder = self._backend.recorder
        if recorder is None or recorder.epochs <= UNDRAWN_EPOCHS or self._warned_of_undrawn:
            return
        self._warned_of_undrawn = True
        held: set[int] = set((self.fold_of_row >= 0).nonzero().flatten().tolist())
        undrawn = held - recorder.drawn
        if undrawn and self._process_group is None:
            warnings.warn(
                f"{self.owner}: {len(undrawn)} rows, {min(undrawn)} among them, are held out, but "
                f"the loader has not drawn them in {UNDRAWN_EPOCHS} epochs. The estimate counts "
                "them, and the model never learns from them; give a Subset of the rows that are "
                "trained on as the dataset " + more("rows-that-are-never-drawn"),
                HeldinWarning,
                stacklevel=2,
            )

    def _guard(self) -> None:
        """Let light shadows that have left the model start again, on all rows."""
        first, last = GUARDED_EPOCHS
        progress = self._levels[-1][1] < GUARDED_LEVEL * self._levels[0][1]
        if not first <= self._epochs() <= last or not progress:
            return
        behind = lag(self.history.columns()["step"], self._levels)
        if behind <= GUARDED_LAG:
            return
        self._backend.restart()
        self._void, self._behind = len(self._curves), self._step
        self._seen_at_start = self._seen
        self.reason = (
            f"step {self._step}: light shadows have left the model (their training loss is that of "
            f"the model {behind:.1f} times earlier), so they start again on all rows; rows='all' "
            "does so from the beginning"
        )

    def _epochs(self) -> float:
        return (self._seen - self._seen_at_start) / self._count

    def _held_per_trained(self) -> float:
        return self._backend.held / (self._count * (1 - self._missing()))

    def _missing(self) -> float:
        # If losses shrink as 1 / rows, their mean is that of a model on the harmonic mean of rows.
        tested: list[int] = self.fold_of_row[self.fold_of_row >= 0].bincount().tolist()
        per_row = sum(t / v for t, v in zip(tested, self._visible, strict=True)) / sum(tested)
        return 1 - 1 / (per_row * self._count)

    def _own_settings(self) -> dict[str, Any]:
        rows = {"rows of a batch": self.rule.rows} if self._is_light else {}
        counts = {"folds": self._folds, "shadows": self._backend.copies}
        return {**counts, "in time": self._times is not None, **rows}

    def _coverage(self) -> float | None:
        if abs(self._missing() - 0.2) > 0.03:
            return None  # fewer or more than five folds
        light = bool(self._light_error())
        if light and self.rule.rows != 0.25:
            return None
        return interval_coverage(self._backend.copies, light, self._count)

    def _facts(self) -> dict[str, Any]:
        clip = self._clip if isinstance(self._clip, (int, float)) else self._clip is not None
        return {
            **super()._facts(),
            "engine": self.rule.engine,
            "clip": clip,
            "optimizer": (type(self._optimizer).__name__, group_settings(self._optimizer)),
            "the rows held out (folds, groups, stratify, time)": crc32(
                repr((self.fold_of_row.tolist(), self._visible)).encode()
            ),
            "the first rows of data": self._first_rows,
        }

    def _take_own_state(self, state: Mapping[str, Any]) -> None:
        super()._take_own_state(state)
        self.fold_of_row, self._announced = self._backend.label, []
        self._same.renew()

    def _snapshot(self) -> dict[str, Tensor]:
        with self._backend.evaluated_weights():
            return super()._snapshot()

    def restore(self) -> None:
        """Put the chosen weights (averaged, if so asked) into the model."""
        super().restore()
        self._same.renew()

    def close(self) -> None:
        """Remove all hooks; release the model and its shadows. Results remain available."""
        super().close()
        self._clip, self._announced = None, []
        self._store.close()
        vars(self).pop("_same", None)


def _has_hooks(model: nn.Module) -> bool:
    """Return whether copies of the model lack hooks that it has."""
    hooks = (hook for module in model.modules() for hook in forward_hooks(module))
    return any(not is_parametrization_hook(hook) for hook in hooks)
