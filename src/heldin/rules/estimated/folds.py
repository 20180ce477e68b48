"""Shadow models in lock-step with the real one, each without some of the rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError, HeldinWarning
from heldin.state.schema import check_int, check_schema

from .base import CHUNK, Average, PathStopping, Taken
from .curves import Patience, next_check
from .engines import Engine
from .losses import LossFunction
from .rows import WAY_OUT, RowMatcher
from .stack import Stack, hyperparameters

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
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, loss_fn, data, **options)
        self._label = self._labels().to(self._rows.targets.device)
        self._copies = int(self._label.max()) + 1
        self._targets = self._loss.ready(self._rows.targets)
        self._optimizer, self._engine = optimizer, engine
        self._inside = False  # whether the model itself is trained in the stack
        self._stack = Stack(model, optimizer, self._copies, self._rows.inputs, engine)
        self._twin: Stack | None = None
        if not any(isinstance(m, nn.modules.dropout._DropoutNd) for m in model.modules()):
            self._twin = Stack(model, optimizer, 1, self._rows.inputs, engine)
        self._find = RowMatcher(self._rows)
        self._queue: list[Tensor] = []
        self._place()
        self._start(optimizer)

    def _labels(self) -> Tensor:
        raise NotImplementedError

    def _place(self) -> None:
        """Where the held-out rows of every shadow lie: (K, r) row numbers, padded with row 0."""
        own = [(self._label == k).nonzero().flatten() for k in range(self._stack.copies)]
        width = max(len(rows) for rows in own)
        self._held = torch.stack([torch.cat([r, r.new_zeros(width - len(r))]) for r in own])
        self._real = torch.stack(
            [torch.arange(width, device=self._label.device) < len(r) for r in own]
        )
        self._numbers_of_copies = torch.arange(len(own), device=self._label.device).unsqueeze(1)

    @property
    def engine(self) -> str:
        """How the shadows are run: "dense", "vmap" or "loop"."""
        return self._stack.engine

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
        for index, batch in self._rows.batches(batch_size, shuffle, generator):
            self._queue.append(index)
            yield batch

    def _follow(self, taken: Taken, index: Tensor | None, now: bool) -> None:
        if self._inside:
            raise HeldinError("step: train() takes the steps itself; it is one or the other")
        queued, self._queue = self._queue, []
        inputs = tuple(
            parts[0] if len(parts) == 1 else torch.cat(parts)
            for parts in zip(*taken.calls, strict=True)
        )
        device = self._label.device
        if index is None:
            if queued:
                index = torch.cat(queued).to(device)
            elif inputs:
                index = torch.cat([self._find(call) for call in taken.calls])
            else:
                raise HeldinError(
                    "step: the optimiser stepped, but the model was not called since the last "
                    f"step; {WAY_OUT}"
                )
        if not inputs:
            inputs = tuple(x[index] for x in self._rows.inputs)
        if len(inputs[0]) != len(index):
            raise HeldinError(
                f"step: the model was called with {len(inputs[0])} rows since the last step, but "
                f"{len(index)} row numbers are known for it; call step() after every optimiser step"
            )
        if len(taken.settings) != len(self._stack.optimizers[0].param_groups):
            raise HeldinError(
                "step: the optimiser has got another parameter group, which the shadows do not "
                "have; make a new stopping object when the parameters change"
            )
        self._advance(self._stack, inputs, index, self._keep(index), taken.settings)
        if self._twin is not None:
            twin, self._twin = self._twin, None
            if now:
                self._compare(twin, inputs, index, taken)

    def _keep(self, index: Tensor) -> Tensor:
        """(copies, b): which copy may see which row of the minibatch."""
        return self._label[index] != self._numbers_of_copies

    def _advance(
        self,
        stack: Stack,
        inputs: Sequence[Tensor],
        index: Tensor,
        keep: Tensor,
        settings: Sequence[Mapping[str, Any]],
    ) -> None:
        weights = None if self._weights is None else self._weights[index]
        stack.advance(inputs, self._targets[index], keep, self._loss, settings, weights)

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
            raise HeldinError(f"{name}.train: called after close(); make a new one")
        if self._step and not self._inside:
            raise HeldinError(
                f"{name}.train: this object already follows a loop of yours through step(); make a "
                "new one"
            )
        check_int(name, "max_steps", max_steps, 0)
        if not self._inside:
            self._take_in()
        settings = hyperparameters(self._optimizer)
        while self._step < max_steps and not self.should_stop:
            for index, inputs in self._epoch(batch_size, shuffle, generator):
                self._advance(self._stack, inputs, index, self._keep(index), settings)
                self._step += 1
                if self._step >= next_check(self.history.last().step, self.grid):
                    self._give_back()
                    self._check()
                if self._step >= max_steps or self.should_stop:
                    break
        self._give_back()

    def _epoch(
        self, size: int | None, shuffle: bool, generator: torch.Generator | None
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Row numbers and inputs of the batches of an epoch."""
        rows, device = self._rows, self._label.device
        if rows.loader is None:
            for index in rows.order(size, shuffle, generator):
                yield index, [x[index] for x in rows.inputs]
        else:
            for index, batch in rows.batches(size, shuffle, generator):
                yield index.to(device), [x.to(device) for x in batch[:-1]]

    def _take_in(self) -> None:
        """Make the model one more copy, which misses no row."""
        assert self._model is not None
        self._inside, self._twin = True, None
        self._stack = Stack(
            self._model, self._optimizer, self._copies + 1, self._rows.inputs, self._engine
        )
        self._place()

    def _give_back(self) -> None:
        """Put the weights and buffers of the last copy into the model."""
        assert self._model is not None
        own = self._stack.copy_of(self._copies)
        with torch.no_grad():
            for name, value in self._state():
                if name in own:
                    value.copy_(own[name])

    def _compare(self, twin: Stack, inputs: Sequence[Tensor], index: Tensor, taken: Taken) -> None:
        """Did the model take the step that the loss and the optimiser give? Else say so, once."""
        before = {name: block.detach().clone() for name, block in twin.blocks.items()}
        everything = torch.ones_like(index, dtype=torch.bool)[None]
        self._advance(twin, inputs, index, everything, taken.settings)
        off = size = 0.0
        assert self._model is not None
        params = dict(self._model.named_parameters())
        for name, block in twin.blocks.items():
            if name in twin.idle:  # the optimiser passes over it in the loop
                continue
            moved = params[name].detach() - before[name][0]
            off += float((moved - (block.detach() - before[name])[0]).square().sum())
            size += float(moved.square().sum())
        if off > 1e-4 * size:
            warnings.warn(
                "the model's first step is not the one that loss_fn and the optimiser give on the "
                f"same rows (relative difference {(off / max(size, 1e-300)) ** 0.5:.2g}). The "
                "shadows know nothing of penalties, clipping or scaling in your loop: put them "
                "into loss_fn or the optimiser, or the estimate is that of another training",
                HeldinWarning,
                stacklevel=4,
            )

    def _held_out(self) -> Tensor:
        losses = torch.empty(len(self._rows), dtype=torch.float64, device=self._label.device)
        chunk = max(1, CHUNK // self._copies)
        for start in range(0, self._held.shape[1], chunk):
            index = self._held[:, start : start + chunk]
            real = self._real[:, start : start + chunk]
            outputs = self._stack.evaluate([x[index] for x in self._rows.inputs])
            found = self._loss.rows(outputs, self._rows.targets[index])
            losses[index[real]] = found[real].double()
        if self._weights is not None:
            losses = losses * self._weights
        return losses[self._label >= 0]

    def _own_state(self) -> dict[str, Any]:
        return {
            "label": self._label.clone(),
            "inside": self._inside,
            "stack": self._stack.state_dict(),
            "turns": dict(self._find.turns),
        }

    def _load_own_state(self, state: Mapping[str, Any]) -> None:
        check_schema(
            state, {"label": self._label.cpu(), "inside": bool, "stack": dict, "turns": {int: int}}
        )
        if self._inside and not state["inside"]:
            raise ValueError("the run that was saved did not go through train(), this one does")
        self._stack.check_state(state["stack"], self._copies + int(state["inside"]))
        self._label = state["label"].to(self._label.device)
        if state["inside"] and not self._inside:
            self._take_in()
        self._place()
        self._stack.load_state_dict(state["stack"])
        self._find.turns = dict(state["turns"])
        self._twin, self._queue = None, []


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

    name = "folds"

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
        n = len(self._rows)
        if isinstance(self.folds, int):
            folds = check_int("FoldStopping", "folds", self.folds, 2)
            if folds > n:
                raise HeldinError(
                    f"FoldStopping: {folds} folds of {n} rows would be empty; use at most {n}"
                )
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
            return torch.empty(n, dtype=torch.long).index_copy(0, order, torch.arange(n) % folds)
        given = torch.as_tensor(self.folds)
        if given.shape != (n,) or given.is_floating_point():
            raise HeldinError(
                f"FoldStopping: folds must be a number or one whole number for each of the {n} rows"
            )
        known, labels = given.unique(return_inverse=True)
        if len(known) < 2:
            raise HeldinError("FoldStopping: folds must name at least two folds")
        return torch.as_tensor(labels)

    def _own_settings(self) -> dict[str, Any]:
        return {"folds": self._copies}


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

    name = "shadow"

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
        n = len(self._rows)
        if isinstance(self.fraction, Tensor):
            hidden = self.fraction
            if hidden.shape != (n,) or hidden.dtype != torch.bool:
                raise HeldinError(
                    f"ShadowStopping: fraction must be a number or {n} booleans, one for each row"
                )
        else:
            if not isinstance(self.fraction, (int, float)) or not 0 < self.fraction < 1:
                raise HeldinError(
                    f"ShadowStopping: fraction must lie between 0 and 1, got {self.fraction!r}"
                )
            count = min(n - 1, max(1, round(self.fraction * n)))
            order = torch.randperm(n, generator=torch.Generator().manual_seed(self.seed))
            hidden = torch.zeros(n, dtype=torch.bool).index_fill(0, order[:count], True)
        if not 0 < int(hidden.sum()) < n:
            raise HeldinError("ShadowStopping: the shadow must see some rows and miss some")
        return hidden.long() - 1

    def _own_settings(self) -> dict[str, Any]:
        return {"held_out": int((self._label >= 0).sum())}
