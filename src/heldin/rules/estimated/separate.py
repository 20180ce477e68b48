"""Shadows of any model on any batches, trained one after the other by the user's own loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import BatchNorm
from heldin.errors import HeldinError
from heldin.state.schema import check_schema

from .batches import select, tensors_in, to_device
from .labels import thinned
from .randomness import Autocast, own_random_stream
from .shadow import Shadow, Stage, trained_parameters
from .source import Source
from .stacked import LOOKED_AT, differs
from .watch import Taken, Watch

__all__ = ["BatchLoss", "Clip", "SeparateShadows"]

BatchLoss = Callable[[nn.Module, Any], Tensor]
Clip = float | Callable[[list[nn.Parameter]], Any]

BLOCKS = 16  # means of so many blocks of held-out rows tell the error of the estimate
LEAST = 8  # rows that an evaluation costs, however few they are
EVALUATED = 256  # rows in one evaluation, if the loss comes row by row


class SeparateShadows:
    """K shadows; `label` says for each row which of them must not see it (-1: none).

    Attributes:
        held: how many rows are evaluated at a check.
        cost: of a check, in forward passes of a row.
        inside: false; the model is never trained together with these shadows.
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
    ) -> None:
        parameters = trained_parameters(model, optimizer)
        self.label, self.copies = label.cpu(), int(label.max()) + 1
        self._model, self._source, self._view = model, source, view
        self._loss, self._clip, self._seed, self._watch = loss, clip, seed, watch
        self._eval_loss = eval_loss or loss
        self._device = next(iter(parameters.values())).device
        self._stage = Stage(model, list(parameters), engine)
        self.shadows = [
            Shadow(parameters, optimizer, self._stage.buffers()) for _ in range(self.copies)
        ]
        self._trained = parameters
        self._least = 2 if any(isinstance(m, BatchNorm) for m in model.modules()) else 1
        self._autocast: Autocast | None = None
        self._steps, self._rows = 0, 0
        self._total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._place(memory)

    @property
    def engine(self) -> str:
        """How the shadows are run."""
        return "copies" if self._stage.apart else "swap"

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
        self._same_parameters(taken)
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
        self._steps += 1
        twin = self._twin(micro) if self._steps == 1 and now else None
        with self._quietly(self._steps):
            for number, shadow in enumerate(self.shadows):
                self._train(shadow, micro, number, taken.settings)
        if twin is not None:
            self._compare(twin, micro, taken.settings)
        return sum(len(index) for _, index in micro)

    def _same_parameters(self, taken: Taken) -> None:
        if len(taken.settings) != len(self.shadows[0].optimizer.param_groups):
            raise HeldinError(
                "step: the optimiser has got another parameter group, which the shadows do not "
                "have; make a new stopping object when the parameters change"
            )
        for name, p in self._trained.items():
            if not p.requires_grad:
                raise HeldinError(
                    f"step: parameter {name!r} was frozen after the shadows were made; make a new "
                    "stopping object when the parameters change"
                )

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
            if len(some) >= min(self._least, len(index))
        ]
        parts = [(batch, some) for batch, some in parts if len(some)]
        if not parts:
            return
        rows = sum(len(some) for _, some in parts)
        shares = self._shares(parts, rows)

        def gradients() -> Tensor:
            shadow.forget_gradients()
            total = torch.zeros_like(self._total)
            for (batch, _), share in zip(parts, shares, strict=True):
                if share:
                    with self._stage.with_weights(shadow, True) as model, self._precision():
                        loss = self._number(self._loss(model, batch)) * share
                    shadow.add_gradients(loss)
                    total += loss.detach()
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
                shadow.optimizer.step()
        if number >= 0:
            self._total += total if self._adds_up else total * rows
            self._rows += rows
            shadow.forget_gradients()

    def _shares(self, parts: Sequence[tuple[Any, Tensor]], rows: int) -> list[float]:
        """What the losses of accumulated batches are multiplied by before they are added up.

        By their numbers of rows, unless the loss says it itself by a method `shares(batches)`: by
        tokens, for instance. It may return None.
        """
        own = getattr(self._loss, "shares", None)
        found = own([batch for batch, _ in parts]) if own is not None else None
        if found is not None:
            return [float(share) for share in found]
        return [1.0 if self._adds_up else len(some) / rows for _, some in parts]

    def _number(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise HeldinError(
                f"batch_loss must return the loss of a batch, a tensor with one number, got {found}"
            )
        return loss.reshape(())

    def _precision(self) -> Any:
        return nullcontext() if self._autocast is None else self._autocast.again()

    def _quietly(self, number: int) -> Any:
        """Random numbers apart from the loop's, and no ear for calls of the model."""
        return _Quiet(self._watch, own_random_stream(self._seed, number, self._device))

    # -- is the user's step the one that shadows repeat?

    def _twin(self, micro: Sequence[tuple[Any, Tensor]]) -> Shadow | None:
        """One more shadow, for the first step; None if the model draws random numbers."""
        first = self.shadows[0]
        buffers = {key: value.clone() for key, value in first.buffers.items()}
        twin = Shadow(first.weights, first.optimizer, buffers)
        losses = []
        for number in range(2):
            stage = self._stage.with_weights(twin, True)
            with self._quietly(-1 - number), torch.no_grad(), self._precision(), stage as model:
                losses.append(float(self._number(self._loss(model, micro[0][0]))))
        if losses[0] != losses[1]:
            return None
        fresh = {key: value.clone() for key, value in first.buffers.items()}
        return Shadow(first.weights, first.optimizer, fresh)

    def _compare(
        self, twin: Shadow, micro: Sequence[tuple[Any, Tensor]], settings: Sequence[Any]
    ) -> None:
        before = {name: weight.detach().clone() for name, weight in twin.weights.items()}
        with self._quietly(0):
            self._train(twin, micro, -2, settings)
        differs(
            {
                name: (before[name], self._trained[name].detach(), weight.detach(), weight.grad)
                for name, weight in twin.weights.items()
                if weight.grad is not None
            },
            "put them into batch_loss, pass clip=",
        )

    # -- checks

    def _place(self, memory: int) -> None:
        """Divide the held-out rows into blocks, and keep their batches if there is room."""
        own = thinned(self.label, LOOKED_AT)
        self.held = sum(len(rows) for rows in own)
        some = own[0][: min(8, len(own[0]))]
        with self._quietly(-3):
            self._find_kind(to_device(self._view.batch(some), self._device), len(some))
        size = EVALUATED if self._by_rows else max(1, self.held // BLOCKS)
        self._blocks = [
            (number, block)
            for number, rows in enumerate(own)
            for block in rows.tensor_split(max(1, -(-len(rows) // size)))
            if len(block)
        ]
        self.cost = sum(max(LEAST, len(block)) for _, block in self._blocks)
        self._cached: list[Any] | None = None
        batches, room = [], memory
        for _, block in self._blocks:
            batch = self._view.batch(block)
            room -= sum(t.numel() * t.element_size() for t in tensors_in(batch))
            if room < 0:
                return
            batches.append(to_device(batch, self._device))
        self._cached = batches

    def _find_kind(self, batch: Any, rows: int) -> None:
        """Is the loss a mean of the samples' losses, their sum, or does it come row by row?"""
        whole = self._evaluated(self.shadows[0], batch)
        if self._eval_loss is self._loss:
            whole = self._number(whole)
        if whole.numel() not in (1, rows):
            raise HeldinError(
                f"eval_loss must return the loss of a batch or one for each of its {rows} samples, "
                f"got {tuple(whole.shape)}"
            )
        self._by_rows = whole.dim() > 0 and whole.numel() == rows
        self._adds_up = False
        if rows < 2:
            return
        layout = self._view.layout
        half = rows // 2
        parts = [
            self._evaluated(self.shadows[0], select(batch, layout, index), self._loss).sum()
            for index in (torch.arange(half), torch.arange(half, rows), torch.arange(rows))
        ]
        mean = (half * parts[0] + (rows - half) * parts[1]) / rows
        self._adds_up = bool((parts[2] - parts[0] - parts[1]).abs() < (parts[2] - mean).abs() / 4)

    def _evaluated(self, shadow: Shadow, batch: Any, loss: BatchLoss | None = None) -> Tensor:
        stage = self._stage.with_weights(shadow, False)
        with torch.no_grad(), self._precision(), stage as model:
            found = (loss or self._eval_loss)(model, batch)
        if not isinstance(found, Tensor):
            raise HeldinError(
                f"batch_loss must return the loss of a batch, a tensor, got {type(found).__name__}"
            )
        return found.detach().double().cpu()

    def held_out(self) -> Tensor:
        """Losses of the held-out rows, or means over blocks of them, weighted by their sizes."""
        with self._quietly(-3):
            return self._losses()

    def _losses(self) -> Tensor:
        losses = []
        for i, (number, block) in enumerate(self._blocks):
            if self._cached is not None:
                batch = self._cached[i]
            else:
                batch = to_device(self._view.batch(block), self._device)
            found = self._evaluated(self.shadows[number], batch)
            if self._by_rows:
                losses.append(found.flatten())
            else:
                each = found.reshape(1) / (len(block) if self._adds_up else 1)
                losses.append(each * len(block) * len(self._blocks) / self.held)
        return torch.cat(losses)

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
        """Leave the loaders as they were."""
        self._source.close()
        self._view.close()


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
