"""Shadows of any model on any batches, trained one after the other by the user's own loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import BatchNorm
from heldin.errors import HeldinError, HeldinWarning, more
from heldin.state.schema import check_schema

from .batches import cloned, refused_if_changed, repacked, select, tensors_in, to_device
from .held_out import BatchLoss, HeldOut, one_number
from .randomness import Autocast, own_random_stream
from .shadow import Shadow, Stage, trained_parameters
from .source import Source
from .stack import take_step
from .stacked import differs
from .together import Together
from .watch import CHANGED, Taken, Watch

__all__ = ["BatchLoss", "Clip", "SeparateShadows"]

Clip = float | Callable[[list[nn.Parameter]], Any]


class SeparateShadows:
    """K shadows; `label` says for each row which of them must not see it (-1: none).

    Attributes:
        held: how many rows are evaluated at a check.
        cost: of a check, in forward passes of a row.
        inside: false; the model is never trained together with these shadows.
        same_loss: see `HeldOut`.
    """

    inside = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        source: Source,
        view: Source,
        label: Tensor,
        loss: BatchLoss,
        eval_loss: BatchLoss | None,
        clip: Clip | None,
        engine: str,
        seed: int,
        memory: int,
        watch: Watch,
        together: Together | None,
    ) -> None:
        parameters = trained_parameters(model, optimizer)
        self.label, self.copies = label.cpu(), int(label.max()) + 1
        self._source, self._view, self._loss = source, view, loss
        self._clip, self._seed, self._watch = clip, seed, watch
        self._together = together
        self._processes = 1 if together is None else together.size
        self._device = next(iter(parameters.values())).device
        self._stage = Stage(model, list(parameters), engine)
        self.shadows = [
            Shadow(parameters, optimizer, self._stage.buffers()) for _ in range(self.copies)
        ]
        self._trained: dict[str, nn.Parameter] = parameters
        self.engine = "copies" if self._stage.apart else "swap"  # how the shadows are run
        self._least = 2 if any(isinstance(m, BatchNorm) for m in model.modules()) else 1
        self._autocast: Autocast | None = None
        self._steps, self._rows = 0, 0
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        with self._quietly(-3):
            self._checks = HeldOut(
                view, self.label, self._evaluated, loss, eval_loss, self._device, memory, together
            )
        self.same_loss = self._checks.same_loss
        self.held, self.cost = self._checks.held, self._checks.cost

    # -- training

    def follow(
        self,
        taken: Taken,
        given: Sequence[tuple[Any, Tensor | None]],
        now: bool,
    ) -> int:
        """Repeat an optimiser step for every shadow; the number of rows it was taken on.

        Args:
            taken: the step.
            given: batches and row numbers that the user has passed.
            now: whether the model has not moved since.
        """
        self._autocast = taken.autocast or self._autocast
        if self._autocast and self._autocast.enabled and self._autocast.dtype == torch.float16:
            raise HeldinError(
                "step: shadows do not scale their loss, as float16 needs; use bfloat16 "
                "(torch.autocast(..., dtype=torch.bfloat16))"
            )
        micro = [
            (to_device(batch, self._device), index.cpu())
            for batch, index in self._source.micro_batches(given, taken.calls)
        ]
        _refuse_changed(taken, micro)
        self._steps += 1
        self._stage.follow()
        twin = self._twin(micro) if self._steps == 1 and now else None
        with self._quietly(self._steps):
            for number, shadow in enumerate(self.shadows):
                self._train(shadow, micro, number, taken.settings)
        if twin is not None:
            self._compare(twin, micro, taken.settings)
        rows = sum(len(index) for _, index in micro)
        return rows if self._together is None else int(self._together.add([rows], self._device)[0])

    def _train(
        self,
        shadow: Shadow,
        micro: Sequence[tuple[Any, Tensor]],
        number: int,
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        """One step of a shadow on the rows that it may see; none if there are none.

        Its weights and the state of its optimiser (step count, moments, weight decay) then stay as
        they are; rates and other settings follow the user's optimiser all the same.
        """
        shadow.set(settings)
        kept = [(self.label[index] != number).nonzero().flatten() for _, index in micro]
        parts = [
            (batch if len(some) == len(index) else select(batch, self._source.layout, some), some)
            for (batch, index), some in zip(micro, kept, strict=True)
            if len(some) >= min(self._least, len(index)) and len(some)
        ]
        shares, rows = self._shares(parts)
        if not rows:
            return
        scale = self._scale([len(index) for _, index in micro])

        def gradients() -> Tensor:
            shadow.forget_gradients()
            total = torch.zeros_like(self._total)
            for (batch, _), share in zip(parts, shares, strict=True):
                if share:
                    with self._stage.with_weights(shadow, True) as model, self._precision():
                        loss = one_number(self._loss(model, repacked(batch))) * (share * scale)
                    shadow.add_gradients(loss)
                    total += loss.detach()
            if self._together is not None:
                total = self._together.add_gradients(shadow.weights.values(), total)
            if isinstance(self._clip, (int, float)):
                nn.utils.clip_grad_norm_(shadow.weights.values(), float(self._clip))
            elif self._clip is not None:
                self._clip(list(shadow.weights.values()))
            return total

        with torch.enable_grad():
            if isinstance(shadow.optimizer, torch.optim.LBFGS):
                total = torch.as_tensor(shadow.optimizer.step(gradients))
            else:
                total = gradients()
                take_step(shadow.optimizer)
        if self._together is not None:
            self._together.copy_first(shadow.buffers.values())
        if number >= 0:
            self._total += total * (self._processes if self._checks.adds_up else rows) / scale
            self._rows += rows
            shadow.forget_gradients()

    def _shares(self, parts: Sequence[tuple[Any, Tensor]]) -> tuple[list[float], int]:
        """What losses are multiplied by before they are added up, and the number of all rows.

        Accumulated batches, and those of other processes, count by their rows. The loss may know
        better, by methods `shares(batches)`, for those that are accumulated, and `count(batches)`,
        for those of a process: by tokens, for instance. Both may return None.
        """
        adds_up, batches = self._checks.adds_up, [batch for batch, _ in parts]
        rows = sum(len(some) for _, some in parts)
        own = self._asked("shares", batches)
        if own is not None:
            shares = [float(share) for share in own]
        else:
            shares = [1.0 if adds_up else len(some) / rows for _, some in parts]
        if self._together is None:
            return shares, rows
        count = self._asked("count", batches)
        weight = 1.0 if adds_up else float(rows if count is None else count)
        all_rows, total = self._together.add([rows, weight], self._device)
        return [share * weight / (total or 1.0) for share in shares], int(all_rows)

    def _scale(self, sizes: list[int]) -> float:
        """By how much the mean over a step's rows is multiplied.

        A framework may divide every loss by a number of batches, and step on fewer at the end of
        an epoch. The loss knows that by a method `scale(sizes)`, of the rows in each batch.
        """
        function = getattr(self._loss, "scale", None)
        if function is None:
            return 1.0
        return float(function(sizes)) / (len(sizes) if self._checks.adds_up else 1)

    def _asked(self, method: str, batches: list[Any]) -> Any:
        function = getattr(self._loss, method, None)
        return None if function is None or not batches else function(batches)

    def _precision(self) -> Any:
        return nullcontext() if self._autocast is None else self._autocast.again()

    def _quietly(self, number: int) -> Any:
        """Random numbers apart from the loop's, and no ear for calls of the model."""
        if self._together is not None and number > 0:  # each process draws for its own rows
            number = number * self._together.size + self._together.rank
        return _Quiet(self._watch, own_random_stream(self._seed, number, self._device))

    # -- is the user's step the one that shadows repeat?

    def _twin(self, micro: Sequence[tuple[Any, Tensor]]) -> Shadow | None:
        """One more shadow, for the first step; None if the model draws random numbers."""
        first = self.shadows[0]
        buffers = {key: value.clone() for key, value in first.buffers.items()}
        twin = Shadow(first.weights, first.optimizer, buffers)
        batch = cloned(micro[0][0])

        def loss(number: int) -> float:
            stage = self._stage.with_weights(twin, True)
            with self._quietly(-1 - number), torch.no_grad(), self._precision(), stage as model:
                return float(one_number(self._loss(model, repacked(batch))))

        one = loss(0)
        with refused_if_changed(batch):
            other = loss(1)
        random = one != other
        if random:
            twin.buffers = {key: value.clone() for key, value in first.buffers.items()}
            _warn_of_memory(one, loss(0))
        if self._together is not None:
            random = self._together.add([random], self._device)[0] > 0
        if random:
            return None
        fresh = {key: value.clone() for key, value in first.buffers.items()}
        return Shadow(first.weights, first.optimizer, fresh)

    def _compare(
        self, twin: Shadow, micro: Sequence[tuple[Any, Tensor]], settings: Sequence[Any]
    ) -> None:
        before = {name: weight.detach().clone() for name, weight in twin.weights.items()}
        with self._quietly(0):
            self._train(twin, micro, -2, settings)
        moves = {}
        for name, weight in twin.weights.items():
            after, grad = self._trained[name].detach(), weight.grad
            if grad is None:  # then the model's own must not have moved, either
                grad = after - before[name]
            moves[name] = (before[name], after, weight.detach(), grad)
        differs(moves, "put them into batch_loss, pass clip=")

    # -- checks

    def _evaluated(self, number: int, batch: Any, loss: BatchLoss) -> Tensor:
        stage = self._stage.with_weights(self.shadows[number], False)
        with torch.no_grad(), self._precision(), stage as model:
            return loss(model, batch)

    def held_out(self) -> Tensor:
        """Losses of the held-out rows, or means over blocks of them, weighted by their sizes."""
        self._stage.follow()
        with self._quietly(-3):
            return self._checks.losses()

    def training_loss(self) -> float:
        """Mean loss of the shadows on the batches since the last time; nan before the first."""
        found = float(self._total) / self._rows if self._rows else float("nan")
        self._rows = 0
        self._total.zero_()
        return found

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        return {
            "label": self.label.clone(),
            "steps": self._steps,
            "losses": [float(self._total), float(self._rows)],
            "shadows": [shadow.state_dict() for shadow in self.shadows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        check_schema(
            state, {"label": self.label, "steps": int, "losses": [float], "shadows": [dict]}
        )
        if len(state["shadows"]) != self.copies or len(state["losses"]) != 2:
            raise ValueError(f"{len(state['shadows'])} shadows, not {self.copies}")
        for number, (shadow, saved) in enumerate(zip(self.shadows, state["shadows"], strict=True)):
            shadow.check_state(saved, f"['shadows'][{number}]")
        if not torch.equal(state["label"], self.label):
            raise ValueError("the rows were divided in another way; use the same seed and groups")
        for shadow, saved in zip(self.shadows, state["shadows"], strict=True):
            shadow.load_state_dict(saved)
        self._steps, self._rows = state["steps"], int(state["losses"][1])
        self._total.fill_(state["losses"][0])

    def close(self) -> None:
        """Leave the loaders as they were, and release the model and its shadows."""
        self._source.close()
        self._view.close()
        self.shadows, self._trained = [], {}
        for name in ("_stage", "_checks", "_loss", "_clip"):
            vars(self).pop(name, None)


def _warn_of_memory(first: float, again: float) -> None:
    """Say so if the same weights, buffers, batch and random numbers give another loss."""
    if not abs(first - again) <= 1e-6 * abs(first):
        warnings.warn(
            "batch_loss gives another loss when it is called again with the same weights, buffers, "
            f"batch and random numbers ({first:.6g} and {again:.6g}). Something that it keeps from "
            "call to call (a counter, a running mean) is shared by all shadows, and the estimate "
            "is that of another training: make it a buffer of the model, self.register_buffer(...) "
            + more("a-loss-with-a-memory"),
            HeldinWarning,
            stacklevel=7,
        )


def _refuse_changed(taken: Taken, micro: Sequence[tuple[Any, Tensor]]) -> None:
    """Refuse batches that are no longer what the model was trained on."""
    changed = taken.changed()
    if changed and any(
        tensor.untyped_storage().data_ptr() in changed
        for batch, _ in micro
        for tensor in tensors_in(batch)
    ):
        raise HeldinError(CHANGED)


class _Quiet:
    """A context in which the watch does not listen, around another."""

    def __init__(self, watch: Watch, inner: Any) -> None:
        self.watch, self.inner = watch, inner

    def __enter__(self) -> None:
        self.watch.deaf = True
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.watch.deaf = False
