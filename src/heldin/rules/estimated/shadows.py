"""What folds and a single shadow have in common: models that train beside the real one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.capture.sharding import unwrapped
from heldin.errors import HeldinError
from heldin.rules.ranks import ProcessGroup
from heldin.state.schema import check_int, check_schema

from .base import PathStopping
from .curves import Patience
from .engines import Engine
from .labels import numbered
from .losses import LossFunction
from .parameters import SameParameters
from .rows import warn_of_copies
from .separate import BatchLoss, Clip, SeparateShadows
from .source import Source
from .stack import hyperparameters
from .stacked import StackedShadows
from .tensors import TensorData
from .watch import Taken

__all__ = ["MEMORY", "PATIENCE", "ShadowModels", "Shadows"]

MEMORY = 256 * 2**20
PATIENCE = Patience(factor=2.0, slack=200, checks=3)
SHARE = 0.05  # of the time of the run that checks may take
FIRST = 8  # checks beyond that, without which a short run would have none

Shadows = StackedShadows | SeparateShadows


class ShadowModels(PathStopping):
    """K shadows; `_labels` says for each row which of them must not see it (-1: all may)."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None,
        data: Any,
        *,
        batch_loss: BatchLoss | None,
        eval_loss: BatchLoss | None,
        eval_data: Any,
        clip: Clip | None,
        groups: Any,
        engine: Engine,
        sample_weight: Tensor | None,
        process_group: ProcessGroup,
        **options: Any,
    ) -> None:
        inner = getattr(optimizer, "optimizer", None)  # accelerate wraps the real one
        optimizer = inner if isinstance(inner, Optimizer) else optimizer
        super().__init__(model, optimizer, process_group=process_group, **options)
        model, name = unwrapped(model), type(self).__name__
        if data is None:
            raise HeldinError(f"{name}: data is missing: the DataLoader, the Dataset or tensors")
        together = self._together is not None
        general = batch_loss is not None or engine in ("copies", "swap") or together
        _check_losses(name, loss_fn, batch_loss, eval_loss, engine, together)
        if general and sample_weight is not None:
            raise HeldinError(
                f"{name}: sample_weight is for stacked shadows; let the batch carry the weights "
                "and batch_loss use them"
            )
        if not general and (eval_loss is not None or eval_data is not None):
            raise HeldinError(
                f"{name}: eval_loss and eval_data need batch_loss, or engine='copies'"
            )
        self._optimizer: Optimizer | None = optimizer
        self._engine, self._clip = engine, clip
        self._first_rows: int | None = None
        self._queue: list[Tensor] = []
        self._given: list[tuple[Any, Tensor | None, int]] = []  # and backward passes before it
        self._seen = 0  # rows that the model was trained on
        self._seen_at_check = 0
        self._same = SameParameters(model, optimizer)
        self._team: Shadows
        if general:
            source = Source(data, self.seed)
            view = source if eval_data is None else Source(eval_data, self.seed, listen=False)
            if view.count != source.count:
                raise HeldinError(
                    f"{name}: eval_data must show the same rows as data, row for row; it has "
                    f"{view.count}, data has {source.count}"
                )
            self._count = source.count
            self._first_rows = source.digest() if together else None
        else:
            assert loss_fn is not None
            rows = TensorData(name, model, loss_fn, data, sample_weight, self._device)
            self._count = len(rows)
        if groups is None:
            warn_of_copies(name, data)
        self._groups = numbered(name, "groups", groups, self._count)
        self._label = self._labels().to("cpu" if general else self._device)
        if general:
            self._team = SeparateShadows(
                model,
                optimizer,
                source,
                view,
                self._label,
                batch_loss or _usual(loss_fn),
                eval_loss,
                clip,
                engine,
                self.seed,
                self.memory,
                self._watch,
                self._together,
            )
        else:
            self._team = StackedShadows(
                model,
                optimizer,
                rows,
                self._label,
                engine,
                self.seed,
                clip,
            )
        self._same_loss = self._team.same_loss
        self._start(optimizer)

    @abstractmethod
    def _labels(self) -> Tensor:
        """(rows,) which shadow must not see a row; -1: all may."""

    @property
    def engine(self) -> str:
        """How the shadows are run: "dense", "vmap", "loop", "copies" or "swap"."""
        return self._team.engine

    @property
    def held_out(self) -> int:
        """How many rows are evaluated at a check, on shadows that have not seen them."""
        return self._team.held

    def add_batch(self, batch: Any, indices: Tensor | Sequence[int] | None = None) -> None:
        """Say which batch the model was just trained on, before `step()`.

        For loops and frameworks in which it cannot be seen, and for gradients that are accumulated
        over several batches. Call it once for each of them.

        Args:
            batch: as the loader gave it, here or moved to the model's device.
            indices: the numbers of its rows, unless the loader that made it was given as data.
        """
        if isinstance(self._team, StackedShadows):
            raise HeldinError(
                "add_batch: these shadows are stacked and take rows of the tensors given as data; "
                "pass step(indices=...), or make the object with batch_loss"
            )
        index = None if indices is None else self._numbers(indices)
        self._given.append((batch, index, self._watch.passes))

    def count_passes(self, in_grad: bool) -> None:
        """Find out which batches are trained on (accumulated in `.grad`, or somewhere else)."""
        self._watch.count_passes(in_grad)

    def trained_on(self) -> bool:
        """Whether a backward pass has reached the parameters since this was asked last."""
        reached, self._watch.reached = self._watch.reached, False
        return reached

    def step(self, indices: Tensor | Sequence[int] | None = None, *, batch: Any = None) -> bool:
        """Follow the optimiser step just taken; True if training should stop.

        Args:
            indices: numbers of the rows in the minibatch, where they are not found out.
            batch: the batch of the step, where it is not found out (with batch_loss).
        """
        if isinstance(self._team, SeparateShadows) and (batch is not None or indices is not None):
            self.add_batch(batch, indices)
            return super().step()
        if batch is not None:
            self.add_batch(batch)  # refuses
        return super().step(indices)

    def batches(
        self,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """One epoch of minibatches whose row numbers need not be found out.

        If `data` is a DataLoader, its own batches (call without arguments); else batches of
        `batch_size` rows (default: all of them at once) in a new random order.

        >>> import heldin, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> data = torch.randn(20, 3), torch.randn(20, 1)
        >>> stopping = heldin.FoldStopping(model, optimizer, torch.nn.MSELoss(), data)
        >>> [len(x) for x, y in stopping.batches(8)]
        [8, 8, 4]
        """
        team = self._stacked("batches")
        self._queue = []
        for index, batch in team.data.rows.batches(batch_size, shuffle, generator):
            self._queue.append(index)
            yield batch

    def _stacked(self, method: str) -> StackedShadows:
        if isinstance(self._team, SeparateShadows):
            raise HeldinError(
                f"{method}: it is for tensors and loss_fn in one process; with batch_loss, or in "
                "several, iterate over your own loader and call step()"
            )
        return self._team

    def _follow(self, taken: Taken, index: Tensor | None, now: bool) -> None:
        self._same.check()
        with self._watch.as_called(taken):
            if isinstance(self._team, SeparateShadows):
                # Gradients of batches before the last fresh pass were thrown away.
                given = [
                    (b, i) for b, i, passes in self._given if passes not in range(1, taken.fresh)
                ]
                self._given = []
                self._seen += self._team.follow(taken, given, now)
            else:
                queued, self._queue = self._queue, []
                self._seen += self._team.follow(taken, index, queued, now)

    def _due(self) -> bool:
        if not super()._due():
            return False
        if self._seen - self._seen_at_check < self._count / 4:  # an epoch has no more than four
            return False
        # In forward passes of a row; a backward pass costs two. The first checks are always there.
        shares = self._team.copies - float((self._label >= 0).double().mean())
        run = 3.0 * self._seen * (1.0 + shares)
        cost = 2 * self._team.held  # the same for every engine, so that the grid is
        return (len(self.history) + 1) * cost <= SHARE * run + FIRST * cost

    def train(
        self,
        batch_size: int | None = None,
        *,
        max_steps: int = 10_000,
        shuffle: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        """Train the model in the same stack as its shadows, until it should stop.

        In place of a loop, where the loop would do nothing else. The model is one more copy in the
        stack, so that small networks train with five folds in little more time than alone. The
        optimiser gives its kind and its settings; its own state is left as it is.

        Args:
            batch_size: rows in a minibatch (default: all; for a DataLoader: its own batches).
            max_steps: number of steps after which to end even if no stop was found.
            shuffle: whether each epoch has a new random order.
            generator: of the order.

        >>> import heldin, torch
        >>> _ = torch.manual_seed(0)
        >>> x = torch.randn(60, 20)
        >>> y = x[:, :1] + torch.randn(60, 1)
        >>> model = torch.nn.Linear(20, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        >>> with heldin.FoldStopping(model, optimizer, torch.nn.MSELoss(), (x, y)) as stopping:
        ...     stopping.train(batch_size=16)
        >>> stopping.should_stop
        True
        """
        name = type(self).__name__
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
        assert self._optimizer is not None
        settings = hyperparameters(self._optimizer)
        while self._step < max_steps and not self.should_stop:
            for index, inputs in team.epoch(batch_size, shuffle, generator):
                team.advance(inputs, index, settings)
                self._step += 1
                self._seen += len(index)
                if self._due():
                    self._give_back()
                    self._check()
                if self._step >= max_steps or self.should_stop:
                    break
        self._give_back()

    def _give_back(self) -> None:
        """Put the weights and buffers of the copy that is the model into the model."""
        own = self._stacked("train").weights_of_the_model()
        with torch.no_grad():
            for name, value in self._state():
                if name in own:
                    value.copy_(own[name])

    def _held_out(self) -> Tensor:
        self._seen_at_check = self._seen
        return self._team.held_out()

    def _held_per_trained(self) -> float:
        return self._team.held / (self._count * (1 - self._missing()))

    def _missing(self) -> float:
        return int((self._label >= 0).sum()) / self._team.copies / self._count

    def _training_loss(self) -> float:
        return self._team.training_loss()

    def _facts(self) -> dict[str, Any]:
        clip = self._clip if isinstance(self._clip, (int, float)) else self._clip is not None
        optimizer = self._optimizer
        assert optimizer is not None
        return {
            **super()._facts(),
            "engine": self._engine,
            "clip": clip,
            "optimizer": (type(optimizer).__name__, hyperparameters(optimizer)),
            "the rows held out (folds, groups, stratify)": crc32(
                repr(self._label.tolist()).encode()
            ),
            "the first rows of data": self._first_rows,
        }

    def _rule_state(self) -> dict[str, Any]:
        seen = {"seen": self._seen, "seen_at_check": self._seen_at_check}
        return seen | self._team.state_dict()

    def _load_rule_state(self, state: Mapping[str, Any]) -> None:
        check_schema(state, {"seen": int, "seen_at_check": int})
        self._team.load_state_dict(state)
        self._label, self._queue, self._given = self._team.label, [], []
        self._seen, self._seen_at_check = state["seen"], state["seen_at_check"]
        self._same.renew()

    def restore(self) -> None:
        """Put the chosen weights (averaged, if so asked) into the model."""
        super().restore()
        self._same.renew()

    def close(self) -> None:
        """Remove all hooks; release the model and its shadows. Results remain available."""
        super().close()
        self._team.close()
        self._same.close()
        self._optimizer = None


def _check_losses(
    name: str,
    loss_fn: LossFunction | None,
    batch_loss: BatchLoss | None,
    eval_loss: BatchLoss | None,
    engine: str,
    together: bool,
) -> None:
    """Refuse arguments that would be ignored."""
    if (loss_fn is None) == (batch_loss is None):
        raise HeldinError(
            f"{name}: give either loss_fn, a function of (outputs, targets), or batch_loss, a "
            "function of (model, batch)"
        )
    for argument, function in (("batch_loss", batch_loss), ("eval_loss", eval_loss)):
        if function is not None and not callable(function):
            raise HeldinError(
                f"{name}: {argument} must be a function of (model, batch), got {function!r}"
            )
    if (batch_loss is not None or together) and engine not in ("auto", "copies", "swap"):
        raise HeldinError(
            f"{name}: with batch_loss, or in several processes, engine must be 'auto', 'copies' or "
            f"'swap', got {engine!r}"
        )


def _usual(loss_fn: LossFunction | None) -> BatchLoss:
    """loss_fn(model(inputs ...), targets) of a batch (inputs ..., targets)."""
    assert loss_fn is not None

    def batch_loss(model: nn.Module, batch: Any) -> Tensor:
        *inputs, targets = batch
        return loss_fn(model(*inputs), targets)

    return batch_loss
