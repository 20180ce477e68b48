"""Check that a step of the loop is the plain step that shadows repeat.

Without `train_step`, shadows take the step `zero_grad`, `batch_loss`, `backward`, `step`. At the
first steps, at steps 16, 32, ..., at round numbers and at random ones the gradient of `batch_loss`
on the user's batch, with the user's random numbers, is compared with the gradient that the
optimiser used. So it is where the number of calls or of backward passes is new, or the model gets
other tensors than those of the loader. Gradients are compared, not weights: the first step of Adam
hides the scale of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from heldin._private_torch import versions_of
from heldin.errors import HeldinError, more, refusal
from heldin.loop.changes import checksums, marks_of
from heldin.loop.events import ModelCall
from heldin.loop.loaders import LoaderRecorder
from heldin.loop.randomness import mixed_seed

from .exchange import Exchange, Session, ShadowState, group_settings, has_evaluation_mode, local

__all__ = ["StepCheck", "StepRecord", "scaled"]

WAY_OUT = (
    "pass the loop's own step, heldin.EarlyStopping(..., train_step=function), and call "
    "stopping.train(batch) in its place"
)
MORE = "another-training-step"
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative, of all gradients jointly
FIRST = 8  # steps at the beginning that are all checked
ROUND = {10, 12, 20, 25, 50, 100, 200, 500, 1000}  # further ones: where loops do things at times
RARE = 50  # steps, of which about one is checked later on
SAMPLE = 64  # elements of each tensor of a larger model that are compared after every step
SMALL = 1_000_000  # weights of models whose contents are compared after every step
COARSE = 2e-2  # for gradients of lower precision


@dataclass(eq=False)
class StepRecord:
    """What a step of the loop started from, and the gradient that it used."""

    state: ShadowState  # before the first call of the model
    grads: list[Tensor | None]  # copies of those that the optimiser used
    with_closure: bool  # whether a closure computed them inside the step


class StepCheck:
    """Records the steps to be checked, and compares them with the plain step.

    relaxed: whether the factor of a loss is known, as frameworks and ranks have their own;
    watches_gradients: whether changes between the backward pass and the step are refused; recorder:
    of the loop's loader, whose new kinds of batches are checked, too; ranks: none may raise alone;
    seed: of the random steps that are checked.
    """

    def __init__(
        self,
        owner: str,
        exchange: Exchange,
        device: torch.device,
        *,
        relaxed: bool = False,
        watches_gradients: bool = False,
        recorder: LoaderRecorder | None = None,
        ranks: Any = None,
        seed: int = 0,
    ) -> None:
        self._owner, self._exchange, self._device = owner, exchange, device
        self._watches_gradients, self._ranks, self._seed = watches_gradients, ranks, seed
        self._swaps_weights = has_evaluation_mode(exchange.optimizer)
        self._recorder = None if ranks is not None else recorder
        if recorder is not None:
            recorder.record_random_state(lambda: self.due or recorder.has_new_size)
        # by which the loop multiplies the loss of each micro-batch, by the number of micro-batches
        # in a step; None: it weights them by their rows
        self.factors: dict[int, float | None] = {}
        self.differences: dict[int, float] = {}  # relative ones of gradients, by step
        self._kinds: set[tuple[int, int, bool]] = set()  # of steps that were checked
        self._buffers: list[Tensor] | None = None  # before the first call of the step
        self._every_step = self._resumed = False
        self._due_at = 0, False  # number of a step, and whether it is checked in any case
        self._trained = list(exchange.trained.values())
        self._is_small = sum(p.numel() for p in self._trained) <= SMALL
        self._steps = 0
        self._called = False  # whether the model was called since the last step
        self._new_kind = False  # whether the coming step is on a new kind of batch
        self._state: ShadowState | None = None
        self._records: dict[int, StepRecord] = {}
        self._pending: StepRecord | None = None
        self._versions: list[int] | None = None
        self._sums: Tensor | None = None
        self._marks: Any = None  # of the optimiser's state, see `marks_of`
        self._moments: Tensor | None = None
        self._looks_at_all, self._rounding = False, 0.0
        buffers = [table[name] for table, name in exchange.buffer_places]
        self._looks_back = not relaxed and sum(b.numel() for b in buffers) <= SMALL
        self._samples = not self._is_small and device.type == "cpu"

    @property
    def due(self) -> bool:
        """Whether the coming step is checked."""
        if self._due_at[0] != self._steps + 1:
            self._due_at = self._steps + 1, is_checked(self._steps + 1, self._seed)
        return self._every_step or self._new_kind or self._due_at[1]

    # -- callbacks of the observer

    def on_call(self) -> Any:
        """Record the random state and, before the first call, everything else."""
        exchange = self._exchange
        if not self._called:
            if self._steps == 0:
                self.check_weights()
            self._called = True
            self._new_kind = self._recorder is not None and self._recorder.take_new_size()
            exchange.note_attributes()
            if self._looks_back and not self.due:
                buffers = (table[name] for table, name in exchange.buffer_places)
                self._buffers = [buffer.detach().clone() for buffer in buffers]
        if not self.due:
            return exchange.random_state(self._device, True) if self._looks_back else None
        if self._state is None:
            self._state = self._exchange.new_state(with_attributes=True)
        return self._exchange.random_state(self._device)

    def on_step(
        self,
        with_closure: bool,
        gradients_changed: bool = False,
        calls: Sequence[ModelCall] = (),
        passes: int = 0,
    ) -> None:
        """Record the gradient of a step to be checked.

        The calls of the model are those in the step, and `passes` go through them. Where the loop
        changes gradients after its backward pass, and that has no effect at a step that is checked
        (clipping of a small norm), all steps are checked.
        """
        self.check_weights()
        self.check_optimizer()
        if self._watches_gradients and gradients_changed:
            if not self.due:
                raise refusal(
                    self._owner,
                    f"at step {self._steps + 1} the loop changed gradients between backward() and "
                    "optimizer.step(), and did not at the steps that were checked (does it clip or "
                    "scale them?). Shadows would not do so, and estimate the loss of another "
                    "training:",
                    f"{WAY_OUT}; for clipping alone, clip=1.0",
                    MORE,
                )
            self._every_step = True
        recorder = self._recorder
        from_loader = recorder is None or all(recorder.shares_storage(c.tensors) for c in calls)
        kind = (len(calls), passes, from_loader)
        is_new = self._looks_back and kind not in self._kinds
        if not self.due and not (is_new and self._buffers is not None):
            return
        self._kinds.add(kind)
        state = self._state
        if state is None and self._buffers is not None:
            state = self._exchange.state_before(self._buffers)
        state = state or self._exchange.new_state(with_attributes=True)
        grads = [] if with_closure else self._gradients()
        self._pending = StepRecord(state, grads, with_closure)

    def _gradients(self) -> list[Tensor | None]:
        grads = (p.grad for p in self._trained)
        return [None if grad is None else local(grad).detach().clone() for grad in grads]

    def on_stepped(self, before: Sequence[Mapping[str, Any]]) -> None:
        """Remember what the step left, and which group settings it changed."""
        optimizer = self._exchange.optimizer
        self._exchange.note_group_state(before, group_settings(optimizer))
        self._exchange.note_step()
        self._steps += 1
        if self._pending is not None:
            if self._pending.with_closure:
                self._pending.grads = self._gradients()
            self._records[self._steps] = self._pending
        self._pending = self._state = self._buffers = None
        self._called = self._new_kind = False
        self.renew()

    def check_every_step(self) -> None:
        """Check all steps from now on."""
        self._every_step = True

    # -- what must not change between two steps

    def renew(self) -> None:
        """Accept the present weights, buffers and optimiser state."""
        self.renew_versions()
        self._exchange.accept_buffers()
        values = self._values_of_state()
        self._marks = marks_of(values) if values else None
        self._moments = self._sums_of_state() if self.due else None
        self._looks_at_all = self._is_small or self.due
        looked_at = self._looked_at()
        self._sums = checksums(looked_at)
        if self._swaps_weights:
            self._rounding = 1e-6 * float(checksums([t.abs() for t in looked_at]).sum())

    def renew_versions(self) -> None:
        """Accept that weights were exchanged, and put back as they were."""
        self._versions = versions_of(self._trained)

    def _looked_at(self) -> list[Tensor]:
        """Return the weights whose contents are compared before the coming step."""
        if self._looks_at_all:
            return [local(p).detach() for p in self._trained]
        return [_sample(p) for p in self._trained] if self._samples else []

    def _values_of_state(self) -> list[Any]:
        """Return the values of the optimiser's state."""
        state = self._exchange.optimizer.state
        entries = [state.get(p) for p in self._trained] if state else []
        return [value for entry in entries if entry for value in entry.values()]

    def _sums_of_state(self) -> Tensor:
        values = [v for v in self._values_of_state() if isinstance(v, Tensor)]
        return checksums([local(v).detach() for v in values if v.is_floating_point()])

    def forget(self) -> None:
        """Accept whatever the next step finds: weights or a state were put in on purpose."""
        self._versions = self._sums = self._marks = None
        self._exchange.forget_buffers()

    def resume(self) -> None:
        """Accept a state that an earlier part of the run has left."""
        self._resumed = True
        self.forget()

    def count_step(self) -> None:
        """Count a step that the user's function took, and accept what it left."""
        self._steps += 1
        self.renew()

    def check_weights(self, contents: bool = True) -> None:
        """Refuse weights that changed since the last step; `contents`: also through `.data`."""
        if self._versions is None:
            return
        changed = not self._swaps_weights and self._versions != versions_of(self._trained)
        if not changed and self._sums is not None and contents:
            sums = checksums(self._looked_at())
            if self._swaps_weights:  # there and back again, but for rounding
                changed = not torch.allclose(self._sums, sums, rtol=1e-6, atol=self._rounding)
            else:
                changed = not torch.equal(self._sums, sums)
        if changed and self._steps == 0 and not self._called:
            raise HeldinError(
                f"{self._owner}: the weights of the model were changed after the stopping object "
                "was made and before the first step (initialised, or loaded), and shadows have "
                "started from the former ones; make the stopping object after that " + more(MORE)
            )
        if changed:
            raise refusal(
                self._owner,
                "the weights of the model were changed outside of optimizer.step() after step "
                f"{self._steps} (perturbed, clamped, averaged), and shadows would not follow;",
                WAY_OUT,
                MORE,
            )

    def check_optimizer(self) -> None:
        """Refuse an optimiser that has stepped before, or whose state was replaced."""
        optimizer = self._exchange.optimizer
        if self._steps == 0 and not self._resumed and _has_stepped(optimizer, self._trained):
            raise HeldinError(
                f"{self._owner}: the optimiser has already taken steps. A model that was trained "
                "on the rows knows those that the shadows hold out, so that the estimate would be "
                "too low; make the stopping object before training begins, load the state of its "
                "run (stopping.load_state_dict), or, if the model was trained on other rows, make "
                "a new optimiser"
            )
        if self._marks is None:
            return
        changed = self._marks != marks_of(self._values_of_state())
        if not changed and self._moments is not None:
            changed = not torch.equal(self._moments, self._sums_of_state())
        if changed:
            raise refusal(
                self._owner,
                "the state of the optimiser was cleared, changed or loaded after step "
                f"{self._steps}, and shadows would keep theirs;",
                f"make the stopping object anew, or {WAY_OUT}",
            )

    # -- comparing

    def take(self, number: int) -> StepRecord | None:
        """Return the record of a step, if it is to be checked."""
        for old in [key for key in self._records if key < number]:
            del self._records[old]
        return self._records.pop(number, None)

    def verify(
        self,
        number: int,
        record: StepRecord,
        session: Session,
        settings: Sequence[Mapping[str, Any]],
        candidates: Callable[[], Mapping[Any, Sequence[Tensor | None]]],
        take_step: Callable[[], Any],
        known: Any = 1.0,
    ) -> Any:
        """Compare a step of the loop with the plain step; raise HeldinError if they differ.

        settings: of the optimiser's groups before the step; candidates: computes gradients of plain
        steps, by the factor of the loss; take_step: takes a plain step with a closure, which leaves
        its gradient in `.grad`. Returns the factor that agrees best, `known` if it is as good.
        """
        session.insert(record.state, settings)
        if not record.with_closure:
            return self._compare(number, record.grads, candidates(), known)
        take_step()
        return self._compare(number, record.grads, {known: self._gradients()}, known)

    def largest(self, error: float) -> float:
        """Return the largest number of all ranks."""
        return error if self._ranks is None else float(self._ranks.largest(error, self._device))

    def factor_for(self, micro_batches: int) -> float | None:
        """Return the factor of the loss of each of a number of micro-batches; None: by their rows.

        Steps with another number of micro-batches tell it where this number was not checked: one
        factor for all of them, or one divided by the number.
        """
        if micro_batches in self.factors or not self.factors:
            return self.factors.get(micro_batches, 1.0)
        values = set(self.factors.values())
        if len(values) == 1:
            return values.pop()
        if all(f is not None and abs(f * m - 1) < 1e-9 for m, f in self.factors.items()):
            return 1.0 / micro_batches
        return None

    def tolerance(self, tensors: Iterable[Tensor]) -> float:
        """Return the relative difference that rounding explains."""
        if torch.is_autocast_enabled(self._device.type):
            return COARSE
        kinds = {tensor.dtype for tensor in tensors}
        return max((TOLERANCE.get(kind, COARSE) for kind in kinds), default=COARSE)

    def _compare(
        self,
        number: int,
        actual: Sequence[Tensor | None],
        candidates: Mapping[Any, Sequence[Tensor | None]],
        known: Any,
    ) -> Any:
        """Return the candidate that agrees with the loop's gradient best."""
        errors = {
            key: self.largest(_difference(actual, values)) for key, values in candidates.items()
        }
        least = max(10 * min(errors.values()), 1e-12)  # batches of one size do not separate them
        alike = [key for key in errors if errors[key] <= least]
        best = known if known in alike else alike[0]
        if errors[best] <= self.tolerance([t for t in actual if t is not None]):
            self.differences[number] = errors[best]
            return best
        scale = _best_scale(actual, candidates[best])
        if scale is not None:
            raise refusal(
                self._owner,
                f"at step {number} the optimiser used another gradient than that of the loss on "
                f"the batch: it is {scale:.3g} times that, and shadows would not follow;",
                "if the loop clips gradients, pass the largest norm, clip=1.0. If it scales its "
                f"loss, pass the scaled one, batch_loss=lambda model, batch: {scale:.3g} * ..., "
                f"and as eval_loss= the plain one, which is estimated. Or {WAY_OUT}",
                MORE,
            )
        raise refusal(
            self._owner,
            f"at step {number} the optimiser used another gradient than that of the loss on the "
            f"batch (relative difference {errors[best]:.2g}). Does the loop clip gradients, add a "
            "penalty or a second loss, keep gradients of earlier steps, reshape the outputs or "
            "change the batch on its way to the model? Shadows would not, and estimate the loss of "
            "another training:",
            f"{WAY_OUT}; for clipping alone, clip=1.0",
            MORE,
        )


def is_checked(number: int, seed: int) -> bool:
    """Return whether a step is checked, whatever it does."""
    if number <= FIRST or number in ROUND or number & (number - 1) == 0:
        return True
    power = 1 << (number.bit_length() - 1)
    return mixed_seed(seed, power) % power == number - power or mixed_seed(seed, number) % RARE == 0


def _sample(p: Tensor) -> Tensor:
    """Return some elements of a tensor, in even and in odd places."""
    flat = local(p).detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat[0].reshape(-1)
    return flat[:: len(flat) // SAMPLE | 1]


def _has_stepped(optimizer: Optimizer, trained: Sequence[Tensor]) -> bool:
    for p in trained:
        entries = optimizer.state.get(p) or {}
        if "step" in entries:
            if float(entries["step"]) > 0:
                return True
        elif any(isinstance(v, Tensor) and bool(local(v).any()) for v in entries.values()):
            return True
    return False


def _whole(tensor: Tensor | None) -> Tensor | None:
    """Return a gradient as a plain tensor: dense, or the part of this rank."""
    if tensor is None:
        return None
    return tensor.to_dense() if tensor.is_sparse else local(tensor)


def _square(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.abs().double().square().sum())


def scaled(tensors: Sequence[Tensor | None], factor: float) -> list[Tensor | None]:
    """Return gradients times a factor."""
    return [None if t is None else t * factor for t in tensors]


def _difference(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Return the norm of the difference of two gradients, relative to the larger norm."""
    off = mine = theirs = 0.0
    for a, b in zip(map(_whole, actual), map(_whole, expected), strict=True):
        mine += _square(a)
        theirs += _square(b)
        off += _square(b if a is None else a if b is None else a - b)
    if off != off or mine != mine:  # a loop that trains on nan is repeated as it is
        return 0.0 if mine != mine and theirs != theirs else float("inf")
    return (off / max(mine, theirs)) ** 0.5 if max(mine, theirs) > 0 else 0.0


def _best_scale(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float | None:
    """Return the factor between two gradients, if they differ by nothing else."""
    product = square = 0.0
    for a, b in zip(map(_whole, actual), map(_whole, expected), strict=True):
        if a is not None and b is not None:
            product += float((a.double() * b.double()).real.sum())
            square += _square(b)
    if square == 0:
        return None
    scale = product / square
    return scale if _difference(actual, scaled(expected, scale)) < 1e-3 else None
