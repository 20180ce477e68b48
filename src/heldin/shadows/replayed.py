"""Shadows that replay the user's own step on the user's own objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import BatchNorm, version_of
from heldin.capture.sharding import fully_sharded
from heldin.crossval import OutOfFold
from heldin.errors import HeldinError, refusal, way_out
from heldin.loop.batches import addresses, repack, tensors_in, to_device
from heldin.loop.events import LoaderBatch, OptimizerStep
from heldin.loop.hooks import scaled_gradients
from heldin.loop.randomness import (
    Autocast,
    RandomState,
    full_precision,
    separate_random_stream,
)
from heldin.loop.rows import RowSource
from heldin.state.schema import check_schema

from .exchange import Exchange, Session, ShadowState, group_settings, has_evaluation_mode
from .frozen import FrozenOutputs
from .held_out import BatchLoss, FrameworkLoss, HeldOut, as_number
from .labels import visible
from .light import RowDraw, level_rows
from .outputs import OutputRecipe
from .plain_step import restored_at_calls
from .step_check import StepCheck, StepRecord, scaled
from .variables import Variables

__all__ = [
    "CHANGED",
    "LIGHT_SUM",
    "Announced",
    "Clip",
    "LossIsSum",
    "ReplayedShadows",
    "has_evaluation_mode",
    "release",
]

Announced = Sequence[tuple[Any, Tensor | None]]  # batches and row numbers; either may be None
Clip = float | Callable[[list[nn.Parameter]], Any]

CHANGED = (
    "step: the batch was changed in place when the model was called with it, or afterwards, so "
    "that shadows would be trained on something else; let model and loop change a copy of it"
)
LIGHT_SUM = (
    "rules.Folds: rows below 1 needs a loss that is the mean over a batch; with a sum, fewer rows "
    "mean a smaller step. Use reduction='mean', or rows='all'"
)


class LossIsSum(HeldinError):
    """Raised for light shadows with a loss that is a sum over the batch."""


RESULTS = {
    "engine", "copies", "held", "same_loss", "inside", "level_count", "draw", "label", "_steps",
}  # fmt: skip
REPEATS = 6  # calls of the user's function that are compared with its first one
EVALUATION = -3  # number of the random stream of evaluations


class _SingleRow(Exception):
    """Raised where a batch normalisation cannot be trained on a single row."""


class ReplayedShadows:
    """K shadows, whose weights, buffers and optimiser states take turns in the user's objects.

    source, view: the rows as they are trained on, and as they are evaluated; labels: (n,) the
    shadow that is tested on a row; -1: none; memory: bytes of held-out batches that may be kept;
    ranks: the processes that train the model jointly, if there are several; train_step: the user's
    own step, in place of the plain one; state: further objects that a step changes; rows: share of
    each batch that a shadow is trained on; in_time: see `visible`; evaluated: a module in `state`,
    such as an average of the weights, that is evaluated in place of the model.
    """

    engine, takes_batches = "replay", True  # batches can be announced, not row numbers only
    inside = False  # whether the model is one of the shadows

    def __init__(
        self,
        owner: str,
        model: nn.Module,
        optimizer: Optimizer,
        source: RowSource,
        view: RowSource,
        labels: Tensor,
        loss: BatchLoss,
        eval_loss: BatchLoss | None,
        clip: Clip | None,
        seed: int,
        memory: int,
        ranks: Any = None,
        train_step: Callable[[Any], Any] | None = None,
        state: Sequence[Any] = (),
        rows: float = 1.0,
        in_time: bool = False,
        evaluated: nn.Module | None = None,
    ) -> None:
        self._owner, self._model, self._evaluated = owner, model, evaluated or model
        self._source, self._view, self._loss = source, view, loss
        self.recorder = source.recorder  # of the loop's loader, if data is one
        self._clip, self._seed, self._ranks = clip, seed, ranks
        self._train_step = train_step
        self._values_after: dict[str, Any] | None = None  # of the user's variables
        self._teachers: dict[str, tuple[nn.Module, list[tuple[int, int]]]] | None = None
        self.draw, self._in_time = RowDraw(rows, seed), in_time
        self.label, self.copies = labels.cpu(), int(labels.max()) + 1
        self._exchange = Exchange(model, optimizer, state, owner, has_shadows=True)
        self._trained = list(self._exchange.trained.values())
        self._device = self._trained[0].device
        # around the user's function
        self._variables = None if train_step is None else self._exchange.surroundings(train_step)
        self.shadows = [self._exchange.new_state() for _ in range(self.copies)]
        self._relaxed = isinstance(loss, FrameworkLoss) or ranks is not None
        self.check = StepCheck(
            owner,
            self._exchange,
            self._device,
            relaxed=self._relaxed,
            watches_gradients=not self._relaxed and clip is None,
            recorder=self.recorder,
            ranks=ranks,
            seed=seed,
        )
        self._normalises = any(isinstance(m, BatchNorm) for m in model.modules())
        self._least = 2 if self._normalises and ranks is not None else 1
        self._sharded = bool(fully_sharded(model))
        if self._sharded and train_step is not None:
            raise HeldinError(
                f"{owner}: train_step is not replayed under fully_shard, where gradients cannot be "
                "weighted by the rows of a rank; use the plain step, or DistributedDataParallel"
            )
        self._autocast = Autocast.current(self._device.type)  # of the last call of the model
        self._steps, self._rows = 0, 0
        self._settings: Sequence[Mapping[str, Any]] | None = None
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._session: Session | None = None
        exchanged = {id(p) for p in self._exchange.tensors}
        # outputs of frozen modules, which are computed once for all shadows
        self.frozen = FrozenOutputs(model, exchanged, memory if ranks is None else 0)
        with self._evaluations():
            self._held_out = HeldOut(
                view,
                self.label,
                self._evaluated,
                self._inserted,
                loss,
                eval_loss,
                self._device,
                memory,
                ranks,
                source.batch_size,
                self._sharded,
                self.frozen,
            )
        self.same_loss, self.held = self._held_out.same_loss, self._held_out.held
        self.check.renew()
        self._level_rows: list[Tensor] = []
        self._start: ShadowState | None = None
        if rows < 1.0:
            self._start = self._exchange.new_state()
            if self._held_out.kind == "sum":
                source.close()
                view.close()
                raise LossIsSum(LIGHT_SUM)
            self._level_rows = level_rows(self.label, self._held_out.bad_rows, in_time)
        self.level_count = sum(len(each) for each in self._level_rows)  # rows in `levels`

    # -- training

    def follow(self, step: OptimizerStep, announced: Announced) -> int:
        """Repeat a step of the user's optimiser for every shadow; return its number of rows."""
        self.check.check_weights(contents=False)
        call = step.calls[-1] if step.calls else None
        if call is not None:
            self._autocast = call.autocast
        if self._autocast.enabled and self._autocast.dtype == torch.float16:
            raise refusal(
                self._owner,
                "shadows do not scale their loss, as float16 needs; use bfloat16 "
                "(torch.autocast(..., dtype=torch.bfloat16)), or",
                "pass the loop's own step with its scaler: train_step=..., state=[scaler]",
            )
        batches = self._source.micro_batches(announced, step.calls)
        self._refuse_changed(step, batches)
        self._exchange.follow_the_loop(self.shadows)
        self._refuse_other_models()
        self._steps += 1
        self._settings = step.settings
        record = self.check.take(step.number)
        modes = call.modes if call is not None and call.modes else None
        with (
            self._computing(),
            self._exchange.session() as session,
            self._exchange.modes(modes) if modes is not None else nullcontext(),
        ):
            if record is not None:
                self._verify(step, record, session, batches)
            for number, shadow in enumerate(self.shadows):
                with self._random_stream(self._steps, number), suppress(_SingleRow):
                    self._replay(session, shadow, number, step, batches)
        self._exchange.keep_own(self.shadows, certain=False)
        self.frozen.forget()
        self.check.renew_versions()
        rows = sum(len(batch.rows) for batch in batches)
        return rows if self._ranks is None else int(self._ranks.add([rows], self._device)[0])

    def train_on(self, batch: Any, index: Tensor | None, number: int) -> tuple[Any, int]:
        """Call the user's function for the model and for every shadow.

        index: numbers of the rows, if they are given; number: of steps so far. Returns what the
        function returned for the model, and the number of rows.
        """
        exchange, variables = self._exchange, self._variables
        assert self._train_step is not None
        assert variables is not None
        self.check.check_weights()
        self.check.check_optimizer()
        (record,) = self._source.micro_batches([(batch, index)], ())
        exchange.note_attributes()
        settings = group_settings(exchange.optimizer)
        modes = [module.training for module in exchange.modules]
        before = variables.read()
        self._refuse_iterators(variables)
        for shadow in self.shadows:
            variables.take_over(shadow.variables, self._values_after, before)
        looks = self.check.due
        start = self._start_of_call() if looks else None
        kept = repack(batch) if looks else None  # the function may take parts out of its batch
        result = self._train_step(batch)
        variables.note_changes()
        after = variables.read()
        self._refuse_iterators(variables)
        self._refuse_kept_rows(before, after, len(record.rows))
        exchange.note_group_state(settings, group_settings(exchange.optimizer))
        exchange.note_step()
        exchange.follow_the_loop(self.shadows)
        for name, kept_value in variables.own_values(before, after).items():
            for shadow in self.shadows:
                shadow.variables.setdefault(name, kept_value)
        self._steps += 1
        self._settings = settings
        fingerprints = variables.fingerprints() if looks else {}
        with torch.inference_mode(False), exchange.session() as session, exchange.modes(modes):
            try:
                if start is not None:
                    self._check_repeats(session, start, settings, before, kept, fingerprints)
                for shadow_number, shadow in enumerate(self.shadows):
                    inserted = before | shadow.variables
                    variables.write(inserted)
                    with self._random_stream(self._steps, shadow_number), suppress(_SingleRow):
                        self._replay_function(session, shadow, shadow_number, record, settings)
                    shadow.variables |= variables.changes(inserted, variables.read())
            finally:
                variables.write(after)
        exchange.keep_own(self.shadows, certain=True)
        self._values_after = after
        variables.refuse_changed(fingerprints)
        self.frozen.forget()
        self.check.count_step()
        return result, len(record.rows)

    def _start_of_call(self) -> tuple[ShadowState, RandomState]:
        """Return what a call of the user's function starts from."""
        state = self._exchange.new_state(with_attributes=True)
        grads = [p.grad for p in self._exchange.tensors]
        state.grads = [None if g is None else g.detach().clone() for g in grads]
        return state, RandomState.current(self._device)

    def _refuse_iterators(self, variables: Variables) -> None:
        """Refuse a function that can draw from an iterator: a call cannot be taken back."""
        if variables.iterators:
            raise HeldinError(
                f"train_step: it can draw from {variables.iterators[0]!r}, an iterator, and what a "
                "shadow draws cannot be put back, so that the model would miss it. Draw before the "
                "call, into a variable that the function reads: extra = next(iterator); "
                "stopping.train(batch)"
            )

    def _check_repeats(
        self,
        session: Session,
        start: tuple[ShadowState, RandomState],
        settings: Sequence[Mapping[str, Any]],
        before: Mapping[str, Any],
        batch: Any,
        fingerprints: Mapping[str, Any],
    ) -> None:
        """Refuse a function that does something else when it is called again from one state.

        It is called before any shadow, several times at first: a counter may count to five.
        """
        assert self._train_step is not None
        assert self._variables is not None
        error, calls = 0.0, REPEATS if self._steps == 1 else 1
        for _ in range(calls):
            Variables.write(before)
            session.insert(start[0].copy(), settings, with_gradients=True)
            with self._random_stream(-1, 0), torch.enable_grad():
                start[1].restore()
                self._train_step(repack(batch))
            error = max(error, session.difference(start[0]))
        error = self.check.largest(error)
        self._variables.refuse_changed(fingerprints)
        if error > self.check.tolerance(self._trained):
            raise HeldinError(
                f"train_step: called a second time from the same state, at call {self._steps}, it "
                f"trained otherwise (relative difference {error:.2g}): it changes something that "
                "cannot be put back, such as an iterator, its batch, a file, or a counter or "
                "random generator in another library. Shadows would change it, too. Pass the "
                "object, state=[...], if it has state_dict and load_state_dict; or draw and count "
                "outside of train_step, into variables that it reads. Start the run again: the "
                "calls for this check have changed it"
            )

    def _refuse_kept_rows(
        self, before: Mapping[str, Any], after: Mapping[str, Any], rows: int
    ) -> None:
        """Refuse light shadows if the user's function keeps something of every row of a batch.

        Light shadows draw other rows at every step, and would go on from what belongs to others.
        """
        if self.draw.share == 1.0 or rows < 2:
            return
        for name, value in Variables.new_values(before, after):
            if any(rows in tensor.shape for tensor in tensors_in(value)):
                raise HeldinError(
                    f"{self._owner}: train_step keeps a tensor with {rows} entries, one for each "
                    f"row of a batch, in {name!r} from step to step (the hidden state of a "
                    "recurrent network?), and light shadows draw other rows at every step; use "
                    "rule='folds', or keep no tensor of a batch"
                )

    def _refuse_other_models(self) -> None:
        """Refuse a loss that calls another module whose weights change: a teacher that follows."""
        if self._teachers is None:
            variables = self._exchange.surroundings(self._loss)
            variables.read()
            watched = variables.watched.items()
            trained = {id(p) for p in self._exchange.tensors}
            modules = {
                name: value
                for name, value in watched
                if isinstance(value, nn.Module)
                and not any(id(p) in trained for p in value.parameters())
            }
            self._teachers = {n: (m, _versions_of(m)) for n, m in modules.items()}
        for name, (module, versions) in self._teachers.items():
            if _versions_of(module) != versions:
                raise HeldinError(
                    f"batch_loss: the weights of {name!r} (a {type(module).__name__}), which it "
                    "calls, have changed since the first step. Shadows share them with the model, "
                    "and get to know rows that they must not see; "
                    + way_out(
                        self._owner,
                        f"pass the loop's own step, train_step=..., with state=[{name}], and "
                        "change them in there",
                    )
                )

    def _replay_function(
        self,
        session: Session,
        shadow: ShadowState,
        number: int,
        batch: LoaderBatch,
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        """Call the user's function for a shadow on the rows that it may see."""
        assert self._train_step is not None
        parts = self._parts([batch], number)
        weight = 1.0
        if self._ranks is not None:
            rows = sum(count for _, count in parts)
            (all_rows,) = self._ranks.add([rows], self._device)
            if not all_rows:
                return
            weight = rows * self._ranks.size / all_rows  # DistributedDataParallel takes the mean
            if not parts:  # all ranks take part in every pass
                parts = [(to_device(self._source.whole(batch), self._device), 0)]
        if not parts:
            return
        ((part, rows),) = parts
        before = [] if rows else [buffer.clone() for buffer in shadow.buffers]
        with (
            self._refusing_single_rows(shadow, parts),
            torch.enable_grad(),
            scaled_gradients(self._trained, weight),
            self.frozen.for_part(0),
        ):
            session.insert(shadow, settings, with_gradients=True)
            loss = self._train_step(part)
        session.collect(shadow, with_gradients=True)
        if not rows:
            shadow.buffers = before
        if self._ranks is not None:
            shadow.grads = [None if g is None else g.clone() for g in shadow.grads]
            self._ranks.copy_first(shadow.buffers)
        if rows and isinstance(loss, (Tensor, float)) and torch.as_tensor(loss).numel() == 1:
            self._total += torch.as_tensor(loss).detach().double().to(self._device) * rows
            self._rows += rows

    @contextmanager
    def _refusing_single_rows(
        self, shadow: ShadowState, parts: Sequence[tuple[Any, int]]
    ) -> Iterator[None]:
        """Leave a shadow as it was if a batch normalisation refuses to train on one row."""
        alone = self._normalises and any(count == 1 for _, count in parts)
        before = [buffer.clone() for buffer in shadow.buffers] if alone else []
        try:
            yield
        except ValueError as error:
            if not alone or "more than 1 value per channel" not in str(error):
                raise
            shadow.buffers = before
            raise _SingleRow from error

    def _replay(
        self,
        session: Session,
        shadow: ShadowState,
        number: int,
        step: OptimizerStep,
        batches: Sequence[LoaderBatch],
    ) -> None:
        """Take one step of a shadow on the rows that it may see; none if there are none."""
        parts = self._parts(batches, number)
        weights, rows, factor = self._weights(parts, [len(batch.rows) for batch in batches])
        if not rows:
            return
        idle = self._sharded and not parts  # all ranks take part in every pass
        if idle:
            whole = [self._source.whole(batch) for batch in batches]
            parts = [(to_device(batch, self._device), 0) for batch in whole]
            weights = [0.0 for _ in parts]
            own_buffers = [buffer.clone() for buffer in shadow.buffers]
        with self._refusing_single_rows(shadow, parts):
            session.insert(shadow, step.settings)
            total = self._take_step(shadow, step, parts, weights)
        session.collect(shadow)
        if idle:
            shadow.buffers = own_buffers
        if self._ranks is not None and not self._sharded:
            self._ranks.copy_first(shadow.buffers)
        processes = 1 if self._ranks is None else self._ranks.size
        self._total += total / factor * (processes if self._held_out.kind == "sum" else rows)
        self._rows += rows

    def _parts(self, batches: Sequence[LoaderBatch], number: int) -> list[tuple[Any, int]]:
        """Return the batches that a shadow may see, with their numbers of rows.

        Several ranks pass over a batch of one visible row before a BatchNorm: it may raise, and no
        rank may raise alone.
        """
        parts, selections = [], []
        rank = 0 if self._ranks is None else self._ranks.rank
        for place, batch in enumerate(batches):
            seen = visible(self.label[batch.rows], number, self._in_time)
            rows = self.draw(seen, self._steps, number, place, rank).nonzero().flatten()
            if not len(rows) or len(rows) < min(self._least, len(batch.rows)):
                continue
            if len(rows) == len(batch.rows):
                part = self._source.whole(batch)
            else:
                part = self._source.part(batch, rows, number)
            parts.append((to_device(part, self._device), len(rows)))
            selections.append((place, rows, len(batch.rows)))
        if self._ranks is None:
            self.frozen.select(selections, compares=self._steps & (self._steps - 1) == 0)
        return parts

    def _weights(
        self, parts: Sequence[tuple[Any, int]], sizes: Sequence[int]
    ) -> tuple[list[float], int, float]:
        """Return the weight of each part's loss, the number of rows on all ranks, and a factor.

        The weighted sum of the losses is the factor times their mean (or sum) over all rows.

        The factor of the loop is known from the check of its first steps, or from a framework.
        """
        rows = sum(count for _, count in parts)
        batches = [batch for batch, _ in parts]
        sums = self._held_out.kind == "sum"
        loss = self._loss if isinstance(self._loss, FrameworkLoss) else FrameworkLoss()
        shares = loss.shares(batches) if batches else None
        known = None if self._relaxed else self.check.factor_for(len(sizes))
        if shares is not None:
            weights = [float(share) for share in shares]
        elif known is None:
            weights = [1.0 if sums else count / rows for _, count in parts]
        else:
            weights = [known for _ in parts]
        scale = loss.scale(list(sizes))
        step_factor = 1.0 if scale is None else float(scale) / (len(sizes) if sums else 1)
        weights = [weight * step_factor for weight in weights]
        factor = sum(weights) / (max(1, len(weights)) if sums else 1) or 1.0
        if self._ranks is None:
            return weights, rows, 1.0 if loss.divided else factor
        count = loss.count(batches) if batches else None
        own = 1.0 if sums else float(rows if count is None else count)
        all_rows, total = self._ranks.add([rows, own], self._device)
        weights = [weight * own / (total or 1.0) for weight in weights]
        return weights, int(all_rows), 1.0 if loss.divided else step_factor  # same on all ranks

    def _take_step(
        self,
        shadow: ShadowState,
        step: OptimizerStep,
        parts: Sequence[tuple[Any, int]],
        weights: Sequence[float],
        before_part: Callable[[int], None] = lambda number: None,
    ) -> Tensor:
        """Take the plain step of a shadow whose state is in the user's objects; return the loss.

        Where the loop sets gradients to zero, parameters that the batch does not reach have zeros,
        once they were reached.
        """
        optimizer = self._exchange.optimizer

        def closure() -> Tensor:
            return self._compute_gradients(parts, weights, before_part)

        if step.with_closure:
            return torch.as_tensor(optimizer.step(closure)).detach()  # type: ignore[arg-type]
        total = closure()
        for p in self._trained:
            if p.grad is not None:
                shadow.reached.add(id(p))
            elif id(p) in shadow.reached & step.zeroed:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        return total

    def _compute_gradients(
        self,
        parts: Sequence[tuple[Any, int]],
        weights: Sequence[float],
        before_part: Callable[[int], None] = lambda number: None,
        clips: bool = True,
    ) -> Tensor:
        """Write the gradient of the weighted losses into `.grad`; return their sum."""
        for p in self._trained:
            p.grad = None
        total = torch.zeros_like(self._total)
        for number, ((batch, _), weight) in enumerate(zip(parts, weights, strict=True)):
            if not weight and not self._sharded:
                continue
            before_part(number)
            with self._autocast.context(), self.frozen.for_part(number):
                loss = as_number(self._loss(self._model, repack(batch))) * weight
            if self._sharded:  # which sums the gradients up itself, and divides by the ranks
                (loss * self._ranks.size).backward()
            else:
                _add_gradients(loss, self._trained)
            total += loss.detach()
        if self._sharded:
            total = self._ranks.join(total, self._device)
        elif self._ranks is not None:
            total = self._ranks.add_gradients(self._trained, total)
        if clips:
            self._clip_gradients()
        return total

    def _clip_gradients(self) -> None:
        """Clip the gradients as the loop does."""
        if isinstance(self._clip, (int, float)):
            nn.utils.clip_grad_norm_(self._trained, float(self._clip))
        elif self._clip is not None:
            self._clip(list(self._trained))

    def restart(self) -> None:
        """Let all shadows start again, on all rows that they may see."""
        assert self._start is not None
        self.shadows = [copy.deepcopy(self._start) for _ in range(self.copies)]
        self.draw, self._start = RowDraw(1.0, self._seed), None

    # -- the check of the loop's step

    def _verify(
        self,
        step: OptimizerStep,
        record: StepRecord,
        session: Session,
        batches: Sequence[LoaderBatch],
    ) -> None:
        """Compare the loop's step with that which is replayed."""
        self.frozen.select([], compares=False)
        sizes = [len(batch.rows) for batch in batches]
        whole = [to_device(self._source.whole(batch), self._device) for batch in batches]
        parts = list(zip(whole, sizes, strict=True))
        known = self.check.factor_for(len(parts))

        def before_part(number: int) -> None:
            state = batches[number].random_state
            if state is not None:
                state.restore()

        def candidates() -> dict[float | None, list[Tensor | None]]:
            grads: dict[float | None, list[Tensor | None]] = {}
            if self._relaxed:
                weights, _, _ = self._weights(parts, sizes)
                self._compute_gradients(parts, weights, before_part, clips=False)
                grads[1.0] = [p.grad for p in self._trained]
            else:
                plain: list[Tensor | None] = [None] * len(self._trained)
                by_rows: list[Tensor | None] = [None] * len(self._trained)
                for number, part in enumerate(parts):
                    before_part(number)
                    self._compute_gradients([part], [1.0], clips=False)
                    for i, p in enumerate(self._trained):
                        plain[i] = _sum(plain[i], p.grad, 1.0)
                        by_rows[i] = _sum(by_rows[i], p.grad, part[1] / sum(sizes))
                grads[1.0] = plain
                if len(parts) > 1:
                    grads[1.0 / len(parts)] = scaled(plain, 1.0 / len(parts))
                    grads[None] = by_rows
                if known is not None and known != 1.0:
                    grads[known] = scaled(plain, known)
            return {key: self._clipped(values) for key, values in grads.items()}

        def take_step() -> None:
            weights = self._weights(parts, sizes)[0] if self._relaxed else [1.0 for _ in parts]
            self._take_step(record.state, step, parts, weights, before_part)

        with self._random_stream(-1, 0), restored_at_calls(self._exchange, self._model, step):
            factor = self.check.verify(
                step.number, record, session, step.settings, candidates, take_step, known
            )
        if not self._relaxed and not record.with_closure:
            self.check.factors[len(parts)] = factor

    def _clipped(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Return gradients as the loop would clip them."""
        if self._clip is None:
            return grads
        for p, grad in zip(self._trained, grads, strict=True):
            p.grad = None if grad is None else grad.clone()
        self._clip_gradients()
        return [p.grad for p in self._trained]

    # -- contexts

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Compute gradients whatever context the user's loop is in."""
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            full_precision(self._device.type),
        ):
            yield

    def _random_stream(self, step: int, number: int) -> Any:
        rank = 0 if self._ranks is None or step < 0 else self._ranks.rank
        return separate_random_stream(self._device, self._seed, step, number, rank)

    @contextmanager
    def _evaluations(self) -> Iterator[None]:
        """Keep the user's state aside while shadows are evaluated."""
        with (
            self._computing(),
            self._random_stream(EVALUATION, 0),
            torch.no_grad(),
            self._exchange.modes(None),
            self._exchange.session() as session,
        ):
            self._session = session
            try:
                yield
            finally:
                self._session = None

    @contextmanager
    def _inserted(self, number: int) -> Iterator[None]:
        """Put a copy of a shadow's state into the model, in evaluation mode."""
        assert self._session is not None
        shadow, optimizer = self.shadows[number], self._exchange.optimizer
        evaluates = has_evaluation_mode(optimizer)
        state = copy.copy(shadow)
        state.buffers = [buffer.clone() for buffer in shadow.buffers]
        if evaluates:
            state.weights = [weight.clone() for weight in shadow.weights]
        self._session.insert(state, self._settings)
        if evaluates:
            optimizer.eval()  # type: ignore[attr-defined]
        with self._autocast.context():
            yield

    @contextmanager
    def _model_inserted(self) -> Iterator[None]:
        """Use the model as it is, in evaluation mode; before the first shadow of a session."""
        assert self._session is not None
        optimizer = self._exchange.optimizer
        if has_evaluation_mode(optimizer):  # it changes the weights in place
            self._session.insert(self._exchange.new_state())
            optimizer.eval()  # type: ignore[attr-defined]
        else:
            self._session.protect_buffers()
        with self._autocast.context():
            yield

    def _refuse_changed(self, step: OptimizerStep, batches: Sequence[LoaderBatch]) -> None:
        """Refuse batches that are no longer what the model was trained on."""
        changed = step.changed_storages()
        if changed and any(
            not changed.isdisjoint(addresses(tensor))
            for batch in batches
            for tensor in tensors_in((batch.batch, batch.prepared))
        ):
            raise HeldinError(CHANGED)

    # -- checks

    def held_out(self) -> Tensor:
        """Return losses of the held-out rows, or means over blocks, weighted by their sizes."""
        with self._evaluations():
            return self._held_out.losses()

    def keep_outputs(self, recipe: OutputRecipe | None) -> None:
        """Keep the outputs of held-out rows at every later check; None: no longer."""
        if recipe is not None and self._sharded:
            raise HeldinError(
                f"{self._owner}: outputs of held-out rows are not kept under fully_shard; leave "
                "metrics and predict out, or use DistributedDataParallel"
            )
        self._held_out.keep_outputs(recipe)

    def held_out_outputs(self) -> OutOfFold:
        """Return the outputs of the rows at the last `held_out()`."""
        outputs, targets = self._held_out.outputs, self._held_out.targets
        assert outputs is not None
        assert targets is not None
        rows = self._held_out.rows
        return OutOfFold(outputs, rows, self.label[rows], targets)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Let calls of the model leave nothing behind: it has the state of a shadow meanwhile."""
        with self._evaluations(), self._inserted(0):
            yield

    def example(self) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
        """Return a batch of a few rows, and the function that predicts them."""
        return self._held_out.example(), self._held_out.predict

    def members(self) -> list[dict[str, Tensor]]:
        """Return copies of the trained weights and the buffers of every shadow, by name."""
        trained = {name for name, p in self._model.named_parameters() if p.requires_grad}
        states = []
        with self._evaluations():
            for number in range(self.copies):
                with self._inserted(number):
                    weights = self._evaluated.named_parameters()
                    values = {name: p for name, p in weights if name in trained}
                    values |= dict(self._evaluated.named_buffers())  # type: ignore[arg-type]
                    states.append(
                        {n: value.detach().to("cpu", copy=True) for n, value in values.items()}
                    )
        return states

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Let the model have the weights that it is evaluated with (schedule-free optimisers)."""
        if not has_evaluation_mode(self._exchange.optimizer):
            yield
            return
        with self._evaluations(), self._model_inserted():
            yield

    def levels(self) -> tuple[float, float]:
        """Return the mean loss of light shadows on training rows, and the model's on the same."""
        held_out = self._held_out
        with self._evaluations():
            batches = {id(rows): held_out.batches_of(rows) for rows in self._level_rows}
            with self._model_inserted():
                losses = [held_out.mean_loss(each) for each in batches.values()]
            shadows = []
            for number, rows in enumerate(self._level_rows):
                with self._inserted(number):
                    shadows.append(held_out.mean_loss(batches[id(rows)]))
        return sum(shadows) / len(shadows), sum(losses) / len(losses)

    def training_loss(self) -> float:
        """Return the mean loss of the shadows on the batches since the last call; nan at first."""
        loss = float(self._total) / self._rows if self._rows else float("nan")
        self._rows = 0
        self._total.zero_()
        return loss

    def row_weights(self, rows: Tensor) -> Tensor | None:
        """Return None: the batch carries weights, if there are any."""
        return None

    def describe_rows(self) -> str:
        """Say how batches are matched to rows, and how the loss follows from them."""
        source, held_out = self._source, self._held_out
        if source.recorder is None:
            how = "announced, or found by their contents"
        elif source.recorder.layout is None:
            how = "shadows' batches are collated from the items of the loop's batches"
        else:
            how = "shadows' batches are slices of the loop's batches"
        bad = f", {len(held_out.bad_rows)} without a finite loss" if held_out.bad_rows else ""
        return f"{source.count} rows{bad}; {how}; the loss of a batch is its {held_out.kind}"

    def weights_of(self, number: int) -> dict[str, Tensor]:
        """Return the trained weights of a shadow, by name."""
        weights = self.shadows[number].weights
        return dict(zip(self._exchange.trained, weights, strict=False))

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs."""
        return {
            "label": self.label.clone(),
            "row_share": self.draw.share,
            "steps": self._steps,
            "losses": [float(self._total), float(self._rows)],
            "factors": {
                number: float("nan") if factor is None else factor
                for number, factor in self.check.factors.items()
            },
            "group_state_keys": sorted(self._exchange.group_state_keys),
            "shadows": [self._saved(shadow) for shadow in self.shadows],
            "start": [] if self._start is None else [self._saved(self._start)],
        }

    def _saved(self, shadow: ShadowState) -> dict[str, Any]:
        plain = (bool, int, float, str, Tensor, type(None))
        return {
            "weights": {
                name: weight.detach().clone()
                for name, weight in zip(self._exchange.names, shadow.weights, strict=True)
            },
            "buffers": {str(i): buffer.clone() for i, buffer in enumerate(shadow.buffers)},
            "optimizer": {
                "state": {i: copy.deepcopy(each) for i, each in enumerate(shadow.optimizer) if each}
            },
            "group_state": copy.deepcopy(shadow.group_state),
            "attributes": {
                number: copy.deepcopy(value)
                for number, value in shadow.attributes.items()
                if isinstance(value, plain)
            },
            "objects": copy.deepcopy(shadow.objects),
            "variables": (
                self._variables.saved(shadow.variables)
                if self._variables and shadow.variables
                else {}
            ),
            "nested": self._exchange.nested.saved(shadow.nested) if shadow.nested else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_schema(
            state,
            {
                "label": self.label,
                "row_share": float,
                "steps": int,
                "losses": [float],
                "factors": {int: float},
                "group_state_keys": [str],
                "shadows": [dict],
                "start": [dict],
            },
        )
        if len(state["shadows"]) != self.copies or len(state["losses"]) != 2:
            raise ValueError(f"{len(state['shadows'])} shadows, not {self.copies}")
        for number, saved in enumerate(state["shadows"]):
            self._check_saved(saved, f"['shadows'][{number}]")
        for saved in state["start"]:
            self._check_saved(saved, "['start']")
        if not torch.equal(state["label"], self.label):
            raise ValueError("the rows were divided in another way; use the same seed and groups")
        variables = [
            self._variables.loaded(saved["variables"])
            if self._variables and saved["variables"]
            else {}
            for saved in state["shadows"]
        ]
        nested = [
            self._exchange.nested.loaded(saved["nested"], partly=True) if saved["nested"] else {}
            for saved in state["shadows"]
        ]
        for shadow, *own in zip(self.shadows, state["shadows"], variables, nested, strict=True):
            saved, shadow.variables, shadow.nested = own
            _load_saved(shadow, saved)
        if not state["start"]:
            self._start = None
        elif self._start is not None:
            _load_saved(self._start, state["start"][0])
        self._exchange.group_state_keys = set(state["group_state_keys"])
        self.check.factors = {n: None if f != f else f for n, f in state["factors"].items()}
        self.check.resume()
        self.draw = RowDraw(state["row_share"], self._seed)
        self._steps, self._rows = state["steps"], int(state["losses"][1])
        self._total.fill_(state["losses"][0])

    def _check_saved(self, saved: Any, place: str) -> None:
        """Refuse, before anything is changed, a state of other shadows."""
        shadow = self.shadows[0]
        form = {
            "weights": dict(zip(self._exchange.names, shadow.weights, strict=True)),
            "buffers": {str(i): buffer for i, buffer in enumerate(shadow.buffers)},
            "optimizer": {"state": {int: {str: (Tensor, float, int, bool, list, None)}}},
            "group_state": [dict],
            "attributes": {int: (bool, int, float, str, Tensor, None)},
            "objects": list,
            "variables": dict,
            "nested": dict,
        }
        check_schema(saved, form, place)
        total = sum(weight.numel() for weight in shadow.weights)
        for number, entries in saved["optimizer"]["state"].items():
            if not 0 <= number < len(shadow.weights):
                raise ValueError(f"{place}: the optimiser has no parameter {number}")
            weight = shadow.weights[number]
            for name, value in entries.items():
                if not isinstance(value, Tensor) or value.numel() == total:  # all in one vector
                    continue
                if value.dim() > weight.dim() or value.numel() > max(1, weight.numel()):
                    raise ValueError(f"{name!r} of an optimiser is {tuple(value.shape)}")

    def close(self) -> None:
        """Leave the loaders as they were, and release the model and its shadows."""
        self._source.close()
        self._view.close()
        self.frozen.close()
        release(self)


def release(closed: object) -> None:
    """Drop all attributes of closed shadows but those that results are computed from."""
    for name in vars(closed).keys() - RESULTS:
        del vars(closed)[name]


def _versions_of(module: nn.Module) -> list[tuple[int, int]]:
    return [(p.data_ptr(), version_of(p)) for p in module.parameters()]


def _add_gradients(loss: Tensor, trained: Sequence[nn.Parameter]) -> None:
    """Backpropagate to the trained parameters and to nothing else."""
    try:
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError as error:
        if "Checkpointing is not compatible" not in str(error):
            raise
        raise HeldinError(
            "shadows cannot be trained through torch.utils.checkpoint with use_reentrant=True; "
            "use use_reentrant=False (gradient_checkpointing_kwargs in transformers)"
        ) from error
    if all(gradient is None for gradient in grads):
        raise HeldinError(
            "batch_loss: it does not depend on the weights of the model. Does it call another "
            "model, one from outside of the function? Call its first argument, "
            "def batch_loss(model, batch)"
        )
    for p, gradient in zip(trained, grads, strict=True):
        if gradient is not None:
            p.grad = gradient if p.grad is None else p.grad + gradient


def _sum(total: Tensor | None, grad: Tensor | None, weight: float) -> Tensor | None:
    if grad is None:
        return total
    return grad * weight if total is None else total + grad * weight


def _load_saved(shadow: ShadowState, saved: Mapping[str, Any]) -> None:
    """Set a shadow to a state that was saved."""
    for weight, value in zip(shadow.weights, saved["weights"].values(), strict=True):
        weight.copy_(value)
    for buffer, value in zip(shadow.buffers, saved["buffers"].values(), strict=True):
        buffer.copy_(value)
    entries = copy.deepcopy(saved["optimizer"]["state"])
    shadow.optimizer = [
        {
            key: value.to(weight.device) if isinstance(value, Tensor) and value.dim() else value
            for key, value in entries.get(number, {}).items()
        }
        for number, weight in enumerate(shadow.weights)
    ]
    shadow.group_state = copy.deepcopy(saved["group_state"])
    shadow.attributes = copy.deepcopy(saved["attributes"])
    shadow.objects = copy.deepcopy(saved["objects"])
