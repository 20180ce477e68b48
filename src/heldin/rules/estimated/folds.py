"""The one rule with shadow models, by its two names: some of several folds, or one shadow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.errors import HeldinError
from heldin.rules.ranks import ProcessGroup
from heldin.state.schema import check_int

from .base import Average
from .curves import Patience
from .engines import Engine
from .labels import fold_labels, given_folds, hidden_labels, numbered, only_first
from .losses import LossFunction
from .separate import BatchLoss, Clip
from .shadows import MEMORY, PATIENCE, ShadowModels

__all__ = ["FoldStopping", "ShadowStopping"]


class FoldStopping(ShadowModels):
    """Stops by cross-validation while the model trains on all rows.

    K shadow models start where the model does and take the same steps on the same minibatches,
    each without its own fold of the rows. The mean loss of the rows on the shadows that have not
    seen them estimates the test loss; the weights of its minimum, or an average of the weights
    around it, are kept. With `shadows=`, only so many of the folds get a shadow: the fewer, the
    cheaper, and the less certain the estimate.

    Call `step()` after `optimizer.step()`. There are two ways to say what a training step is.

    With `loss_fn`, rows are tensors (x, y), a step is `loss_fn(model(x), y)`, and the shadows of a
    small network are trained at once in one stack. Which rows a minibatch holds is found out from
    what the model was called with, bit for bit. Where that cannot work (augmentation, equal inputs
    with different targets), take the minibatches from `stopping.batches(...)`, or pass
    `stopping.step(indices=...)`.

    With `batch_loss`, a function of model and batch, model and batches may be anything. A shadow
    then has copies of the parameters that are trained and of the buffers, and shares all others; it
    is trained on those samples of each batch that it may see. If it may see none, it takes no step:
    its weights and its optimiser's state stay. Which rows a batch holds is written down when the
    DataLoader hands it out. Held-out rows are evaluated through the same dataset and collate
    function, in evaluation mode.

    The shadows repeat the loss and the optimiser's step, with its settings of that moment and in
    the mixed precision of the model's last call, on random numbers of their own. They know nothing
    of what else the loop does to the gradients, except for `clip`; a first step that differs is
    warned about.

    Args:
        model: the model that is trained.
        optimizer: the optimiser that trains it.
        loss_fn: (outputs, targets) -> the mean or the sum of the rows' losses. Other losses work,
            but cost a call for each shadow.
        data: all training rows: tensors (x, y) or (x1, x2, ..., y), a map-style Dataset, or a
            DataLoader over one. With batch_loss: the DataLoader that the loop uses, a Dataset, or
            tensors in a tuple, list or dictionary.
        folds: number of folds, or (n,) fold numbers of the rows (rows that belong together should
            be in one fold).
        shadows: how many of the folds have a shadow (default: all).
        batch_loss: (model, batch) -> loss, in place of loss_fn:
            `lambda model, batch: model(**batch).loss`.
        eval_loss: (model, batch) -> the loss to estimate, or one for each sample (default:
            batch_loss).
        eval_data: the same rows, shown without augmentation, for the held-out losses.
        clip: how the loop clips gradients: the largest norm (`clip_grad_norm_`), or, with
            batch_loss, a function of the list of parameters.
        groups: (n,) names or numbers; rows with the same one (of a patient, of a document) are in
            the same fold.
        stratify: (n,) classes; each fold gets its share of every class.
        average: "bagged" averages the weights of the checks by how often each would have been
            chosen had the rows been drawn again; "best" keeps those of the lowest estimate.
        grid: ratio of the steps of successive checks. There are fewer where they would take more
            than 5 % of the run, the same ones with every engine, and no more than 4,096 held-out
            rows are evaluated (the standard error tells what that costs).
        patience: when to stop, see `heldin.Patience`; None: never (`restore()` still chooses).
        sample_weight: (n,) if the loop's loss is the mean of weight x loss over a minibatch.
        engine: "dense" (plain networks: nn.Linear and activations in sequence), "vmap" (whatever
            torch.func can stack), "loop" (anything), or "auto", the first of them that works. With
            batch_loss: "copies" (shadows run in a copy of the model's modules without its hooks),
            "swap" (in the model itself, with weights and buffers exchanged), or "auto", the first
            that works.
        memory: bytes for the weights of the checks; where it is too little, fewer are kept. With
            batch_loss, as much again for held-out batches.
        resamples: how often rows are drawn for average="bagged".
        seed: of the folds, the draws and the shadows' random numbers.
        process_group: the processes that train the model together, each on its own batches of the
            same data, and come to the same decision. "auto": that of DistributedDataParallel, or
            all processes, if torch.distributed is initialised. None: this process alone. Also a
            ProcessGroup or a DeviceMesh of one dimension.

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

    Any model and batch, two of the five folds:

    >>> rows = [{"x": a, "y": b} for a, b in zip(x, y)]
    >>> loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    >>> def batch_loss(model, batch):
    ...     return loss_fn(model(batch["x"]), batch["y"])
    >>> stopping = heldin.FoldStopping(
    ...     model, optimizer, data=loader, batch_loss=batch_loss, shadows=2
    ... )
    >>> for batch in loader:
    ...     batch_loss(model, batch).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     stop = stopping.step()
    >>> stopping.held_out
    24
    """

    name = "folds"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None = None,
        data: Any = None,
        folds: int | Tensor | Sequence[int] = 5,
        *,
        shadows: int | None = None,
        batch_loss: BatchLoss | None = None,
        eval_loss: BatchLoss | None = None,
        eval_data: Any = None,
        clip: Clip | None = None,
        groups: Any = None,
        stratify: Any = None,
        average: Average = "bagged",
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        sample_weight: Tensor | None = None,
        engine: Engine = "auto",
        memory: int = MEMORY,
        resamples: int = 100,
        seed: int = 0,
        process_group: ProcessGroup = "auto",
    ) -> None:
        self.folds, self.shadows = folds, shadows
        self._stratify = stratify
        super().__init__(
            model,
            optimizer,
            loss_fn,
            data,
            batch_loss=batch_loss,
            eval_loss=eval_loss,
            eval_data=eval_data,
            clip=clip,
            groups=groups,
            engine=engine,
            grid=grid,
            average=average,
            patience=patience,
            sample_weight=sample_weight,
            memory=memory,
            resamples=resamples,
            seed=seed,
            process_group=process_group,
        )

    def _labels(self) -> Tensor:
        n = self._count
        classes = numbered("FoldStopping", "stratify", self._stratify, n)
        if isinstance(self.folds, int):
            folds = check_int("FoldStopping", "folds", self.folds, 2)
            if folds > n:
                raise HeldinError(
                    f"FoldStopping: {folds} folds of {n} rows would be empty; use at most {n}"
                )
            if self._groups is not None and classes is not None:
                raise HeldinError(
                    "FoldStopping: groups and stratify cannot both be kept; give one of them, or "
                    "fold numbers of your own: folds=..."
                )
            labels = fold_labels(n, folds, self.seed, self._groups, classes)
        elif self._groups is not None or classes is not None:
            raise HeldinError(
                "FoldStopping: folds gives the fold of every row already; leave groups and "
                "stratify out"
            )
        else:
            labels = given_folds("FoldStopping", self.folds, n)
        self._folds = int(labels.max()) + 1
        if self.shadows is None:
            return labels
        shadows = check_int("FoldStopping", "shadows", self.shadows, 1)
        if shadows > self._folds:
            raise HeldinError(
                f"FoldStopping: {shadows} shadows for {self._folds} folds; use at most as many"
            )
        if shadows < self._folds:  # what is known of the band is known of all folds
            self.history.rule = f"{shadows} of {self._folds} folds"
        return only_first(labels, shadows)

    def _own_settings(self) -> dict[str, Any]:
        return {"folds": self._folds, "shadows": self._team.copies}


class ShadowStopping(ShadowModels):
    """Stops by one shadow model that does not see some of the rows, for larger models.

    As `FoldStopping` with one shadow: about the cost of a second model. The real model sees all
    rows; the shadow's loss on the rows withheld from it says when to stop.

    Args:
        model: the model that is trained.
        optimizer: the optimiser that trains it.
        loss_fn: see `FoldStopping`.
        data: see `FoldStopping`.
        fraction: share of the rows that the shadow does not see, or (n,) booleans, true for those.
        batch_loss, eval_loss, eval_data, clip, groups: see `FoldStopping`.
        average: see `FoldStopping`.
        grid: ratio of the steps of successive checks.
        patience, sample_weight, engine, memory, resamples, seed, process_group: see
            `FoldStopping`.

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
        loss_fn: LossFunction | None = None,
        data: Any = None,
        fraction: float | Tensor = 0.2,
        *,
        batch_loss: BatchLoss | None = None,
        eval_loss: BatchLoss | None = None,
        eval_data: Any = None,
        clip: Clip | None = None,
        groups: Any = None,
        average: Average = "bagged",
        grid: float = 1.2,
        patience: Patience | None = PATIENCE,
        sample_weight: Tensor | None = None,
        engine: Engine = "auto",
        memory: int = MEMORY,
        resamples: int = 100,
        seed: int = 0,
        process_group: ProcessGroup = "auto",
    ) -> None:
        self.fraction = fraction
        super().__init__(
            model,
            optimizer,
            loss_fn,
            data,
            batch_loss=batch_loss,
            eval_loss=eval_loss,
            eval_data=eval_data,
            clip=clip,
            groups=groups,
            engine=engine,
            grid=grid,
            average=average,
            patience=patience,
            sample_weight=sample_weight,
            memory=memory,
            resamples=resamples,
            seed=seed,
            process_group=process_group,
        )

    def _labels(self) -> Tensor:
        n = self._count
        if isinstance(self.fraction, Tensor):
            if self.fraction.shape != (n,) or self.fraction.dtype != torch.bool:
                raise HeldinError(
                    f"ShadowStopping: fraction must be a number or {n} booleans, one for each row"
                )
            if self._groups is not None:
                raise HeldinError(
                    "ShadowStopping: fraction says of every row whether it is hidden; leave groups "
                    "out"
                )
            label = self.fraction.long() - 1
        else:
            if not isinstance(self.fraction, (int, float)) or not 0 < self.fraction < 1:
                raise HeldinError(
                    f"ShadowStopping: fraction must lie between 0 and 1, got {self.fraction!r}"
                )
            label = hidden_labels(n, self.fraction, self.seed, self._groups)
        if not 0 < int((label == 0).sum()) < n:
            raise HeldinError("ShadowStopping: the shadow must see some rows and miss some")
        return label

    def _own_settings(self) -> dict[str, Any]:
        return {"held_out": int((self._label >= 0).sum())}
