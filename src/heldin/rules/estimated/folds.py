"""Shadow models in lock-step with the real one, each without some of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.state.schema import whole

from .base import Average, PathStopping
from .curves import Patience, next_check
from .engines import Engine
from .labels import fold_labels, given_folds, hidden_labels
from .losses import LossFunction
from .stack import hyperparameters
from .stacked import StackedShadows
from .tensors import TensorData
from .watch import Taken

__all__ = ["FoldStopping", "ShadowStopping"]

MEMORY = 256 * 2**20
PATIENCE = Patience(factor=2.0, slack=200, checks=3)


class _Shadows(PathStopping):
    """K shadows; `label` says for each row which of them must not see it (-1: all may)."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        data: Any,
        *,
        engine: Engine,
        sample_weight: Tensor | None,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, **options)
        self._optimizer = optimizer
        self._queue: list[Tensor] = []
        name = type(self).__name__
        rows = TensorData(name, model, loss_fn, data, sample_weight, self._device)
        self._count = len(rows)
        self._label = self._labels().to(self._device)
        self._team = StackedShadows(model, optimizer, rows, self._label, engine, self.seed)
        self._start(optimizer)

    def _labels(self) -> Tensor:
        raise NotImplementedError

    @property
    def engine(self) -> str:
        """How the shadows are run: "dense", "vmap" or "loop"."""
        return self._team.engine

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
        self._queue = []
        for index, batch in self._team.data.rows.batches(batch_size, shuffle, generator):
            self._queue.append(index)
            yield batch

    def _follow(self, taken: Taken, index: Tensor | None, now: bool) -> None:
        queued, self._queue = self._queue, []
        self._team.follow(taken, index, queued, now)

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
        if self._model is None:
            raise HeldinError(f"{name}.train: called after remove(); make a new one")
        if self._step and not self._team.inside:
            raise HeldinError(
                f"{name}.train: this object already follows a loop of yours through step(); make a "
                "new one"
            )
        whole(name, "max_steps", max_steps, 0)
        if not self._team.inside:
            self._team.take_in()
        settings = hyperparameters(self._optimizer)
        while self._step < max_steps and not self.should_stop:
            for index, inputs in self._team.epoch(batch_size, shuffle, generator):
                self._team.advance(inputs, index, settings)
                self._step += 1
                if self._step >= next_check(self.history.last().step, self.grid):
                    self._give_back()
                    self._check()
                if self._step >= max_steps or self.should_stop:
                    break
        self._give_back()

    def _give_back(self) -> None:
        """Put the weights and buffers of the copy that is the model into the model."""
        own = self._team.weights_of_the_model()
        with torch.no_grad():
            for name, value in self._state():
                if name in own:
                    value.copy_(own[name])

    def _held_out(self) -> Tensor:
        return self._team.held_out()

    def _training_loss(self) -> float:
        return self._team.training_loss()

    def _own_state(self) -> dict[str, Any]:
        return self._team.state_dict()

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        self._team.load_state_dict(state)
        self._label, self._queue = self._team.label, []


class FoldStopping(_Shadows):
    """Stops by cross-validation while the model trains on all rows.

    K shadow models start where the model does and take the same steps on the same minibatches,
    each without its own fold of the rows. The mean loss of the rows on the shadows that have not
    seen them estimates the test loss; the weights of its minimum, or an average of the weights
    around it, are kept.

    Call `step()` after `optimizer.step()`. Which rows a minibatch holds is found out from what the
    model was called with: the whole of `data`, or rows of it, as from a DataLoader over a
    TensorDataset. Where that cannot work (augmentation, equal inputs with different targets), take
    the minibatches from `stopping.batches(...)`, or pass `stopping.step(indices=...)`.

    The shadows repeat `loss_fn(model(x), y)` and the optimiser's step, with its learning rate of
    that moment. They know nothing of what else the loop does to the gradients; a first step that
    differs is warned about.

    Args:
        model: the model that is trained.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> the mean or the sum of the rows' losses. Other losses work,
            but cost a call for each shadow.
        data: all training rows: tensors (x, y) or (x1, x2, ..., y), a map-style Dataset, or a
            DataLoader over one.
        folds: number of folds, or (n,) fold numbers of the rows (rows that belong together should
            be in one fold).
        average: "bagged" averages the weights of the checks by how often each would have been
            chosen had the rows been drawn again; "best" keeps those of the lowest estimate.
        grid: ratio of the steps of successive checks.
        patience: when to stop, see `heldin.Patience`; None: never (`restore()` still chooses).
        sample_weight: (n,) if the loop's loss is the mean of weight x loss over a minibatch.
        engine: "dense" (plain networks: nn.Linear and activations in sequence), "vmap" (whatever
            torch.func can stack), "loop" (anything), or "auto", the first of them that works.
        memory: bytes for the weights of the checks; where it is too little, fewer are kept.
        resamples: how often rows are drawn for average="bagged".
        seed: of the folds and the draws.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(60, 20)
    >>> y = x[:, :1] + torch.randn(60, 1)
    >>> model = torch.nn.Linear(20, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    >>> loss_fn = torch.nn.MSELoss()
    >>> with heldin.FoldStopping(model, optimizer, loss_fn, (x, y)) as stopping:
    ...     for step in range(2000):
    ...         loss_fn(model(x), y).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         if stopping.step():
    ...             break
    >>> stopping.best_step < stopping.stopped_step < 1000
    True
    >>> 0.8 < stopping.estimate < 1.8                  # the noise alone is 1
    True
    """

    _rule = "folds"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        data: Any,
        folds: int | Tensor | Sequence[int] = 5,
        *,
        average: Average = "bagged",
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        sample_weight: Tensor | None = None,
        engine: Engine = "auto",
        memory: int = MEMORY,
        resamples: int = 100,
        seed: int = 0,
    ) -> None:
        self.folds = folds
        super().__init__(
            model,
            optimizer,
            loss_fn,
            data,
            engine=engine,
            grid=grid,
            average=average,
            patience=patience,
            sample_weight=sample_weight,
            memory=memory,
            resamples=resamples,
            seed=seed,
        )

    def _labels(self) -> Tensor:
        n = self._count
        if not isinstance(self.folds, int):
            return given_folds("FoldStopping", self.folds, n)
        folds = whole("FoldStopping", "folds", self.folds, 2)
        if folds > n:
            raise HeldinError(
                f"FoldStopping: {folds} folds of {n} rows would be empty; use at most {n}"
            )
        return fold_labels(n, folds, self.seed)

    def _own_settings(self) -> dict[str, Any]:
        return {"folds": self._team.copies}


class ShadowStopping(_Shadows):
    """Stops by one shadow model that does not see some of the rows, for larger models.

    As `FoldStopping`, with a single shadow: about the cost of a second model. The real model sees
    all rows; the shadow's loss on the rows withheld from it says when to stop.

    Args:
        model: the model that is trained.
        optimizer: the optimiser that trains it.
        loss_fn: see `FoldStopping`.
        data: see `FoldStopping`.
        fraction: share of the rows that the shadow does not see, or (n,) booleans, true for those.
        average: see `FoldStopping`.
        grid: ratio of the steps of successive checks.
        patience, sample_weight, engine, memory, resamples, seed: see `FoldStopping`.

    >>> import heldin, torch
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(300, 20)
    >>> y = x[:, :1] + torch.randn(300, 1)
    >>> model = torch.nn.Linear(20, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    >>> loss_fn = torch.nn.MSELoss()
    >>> with heldin.ShadowStopping(model, optimizer, loss_fn, (x, y)) as stopping:
    ...     for step in range(2000):
    ...         loss_fn(model(x), y).backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         if stopping.step():
    ...             break
    >>> len(stopping.history) > 10
    True
    """

    _rule = "shadow"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction,
        data: Any,
        fraction: float | Tensor = 0.2,
        *,
        average: Average = "best",
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        sample_weight: Tensor | None = None,
        engine: Engine = "auto",
        memory: int = MEMORY,
        resamples: int = 100,
        seed: int = 0,
    ) -> None:
        self.fraction = fraction
        super().__init__(
            model,
            optimizer,
            loss_fn,
            data,
            engine=engine,
            grid=grid,
            average=average,
            patience=patience,
            sample_weight=sample_weight,
            memory=memory,
            resamples=resamples,
            seed=seed,
        )

    def _labels(self) -> Tensor:
        n = self._count
        if isinstance(self.fraction, Tensor):
            if self.fraction.shape != (n,) or self.fraction.dtype != torch.bool:
                raise HeldinError(
                    f"ShadowStopping: fraction must be a number or {n} booleans, one for each row"
                )
            label = self.fraction.long() - 1
        else:
            if not isinstance(self.fraction, (int, float)) or not 0 < self.fraction < 1:
                raise HeldinError(
                    f"ShadowStopping: fraction must lie between 0 and 1, got {self.fraction!r}"
                )
            label = hidden_labels(n, self.fraction, self.seed)
        if not 0 < int((label == 0).sum()) < n:
            raise HeldinError("ShadowStopping: the shadow must see some rows and miss some")
        return label

    def _own_settings(self) -> dict[str, Any]:
        return {"held_out": int((self._label >= 0).sum())}
