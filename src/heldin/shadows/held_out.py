"""Evaluate shadows on the rows that they have not seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from heldin.errors import HeldinError, HeldinWarning, more
from heldin.loop.batches import bytes_in, equal, repack, tensors_in, to_device
from heldin.loop.rows import RowSource

from .frozen import FrozenOutputs
from .labels import LOOKED_AT, subsample_held_out
from .losses import RowLossRecorder
from .outputs import OutputCollector, OutputRecipe, one_for_each_row

__all__ = ["BatchLoss", "FrameworkLoss", "HeldOut", "as_number", "loss_of_pairs"]

BatchLoss = Callable[[nn.Module, Any], Tensor]

BLOCKS = 16  # blocks of held-out rows whose means show the error of the estimate
EVALUATED = 256  # rows per evaluation call, if the loss comes row by row
EXAMPLE = 8  # rows of a batch on which the last layer of a model is examined
TRIED = (16, 12, 8)  # rows of the batches on which the kind of a loss is decided
AGREEMENT = {torch.float64: 1e-9, torch.float32: 2e-5}  # relative, of the losses of two batches
COARSE = 1e-2  # for losses of lower precision
REPEATS = 8  # evaluations of a batch, if its loss draws random numbers
ERRORS = 5.0  # standard errors within which means of such losses agree


def loss_of_pairs(loss_fn: Callable[[Any, Any], Any]) -> BatchLoss:
    """Return the loss of a batch (inputs ..., targets): loss_fn(model(inputs ...), targets)."""

    def batch_loss(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise HeldinError(
                "data: with loss_fn, a row must be tensors (inputs ..., target), at least two of "
                "them; for other rows give batch_loss, a function of (model, batch)"
            )
        *inputs, targets = batch
        outputs = model(*inputs)
        try:
            value: Tensor = loss_fn(outputs, targets)
        except (AttributeError, TypeError):
            one_for_each_row("step", outputs)
            raise
        return value

    return batch_loss


class FrameworkLoss:
    """The loss of a batch in a framework's step, which weights batches in its own way.

    Attributes:
        divided: whether each loss is already divided by the number of accumulated batches.
    """

    divided = False

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        raise NotImplementedError

    def scale(self, sizes: list[int]) -> float | None:
        """Return the factor of the loss of a step of batches of these sizes; None: not known."""
        return None

    def shares(self, batches: list[Any]) -> list[float] | None:
        """Return the factors of the losses of accumulated batches; None: not known."""
        return None

    def count(self, batches: list[Any]) -> float | None:
        """Return the weight of this rank among all; None: its number of rows."""
        return None


class HeldOut:
    """Rows that shadows must not see, in batches of the loader's own kind.

    view: the rows as they are evaluated; labels: (n,) the shadow that must not see a row; -1: all
    may; inserted: context in which the model is the shadow with a number, in evaluation mode;
    memory: bytes of batches that may be kept; batch_size: of the loop, if it is known; sharded:
    whether all ranks must take part in every call of the model.
    """

    # How the loss of a batch follows from its rows: "mean", "sum" or "neither" (class weights,
    # ratios, contrastive losses), which is evaluated in batches of the loop's size.
    kind: str
    same_loss: bool  # whether the estimated loss is the one that is trained

    def __init__(
        self,
        view: RowSource,
        labels: Tensor,
        model: nn.Module,
        inserted: Callable[[int], AbstractContextManager[None]],
        loss: BatchLoss,
        eval_loss: BatchLoss | None,
        device: torch.device,
        memory: int,
        ranks: Any,
        batch_size: int | None,
        sharded: bool,
        frozen: FrozenOutputs,
    ) -> None:
        self._view, self._model, self._inserted, self._frozen = view, model, inserted, frozen
        self._loss, self._eval_loss, self._device = loss, eval_loss or loss, device
        self._ranks, self._divided = ranks, ranks is not None and not sharded
        self._recipe: OutputRecipe | None = None
        # (held, ...) at the last evaluation, in the order of `rows`
        self.outputs: Tensor | None = None
        self.targets: Tensor | None = None
        self.bad_rows: list[int] = []  # whose loss was not a number before training: left out
        rows = subsample_held_out(labels, LOOKED_AT)
        most = self._most_collated(batch_size)
        with self._inserted(0):
            self._decide_kind(min(view.count, most))
        self._size = EVALUATED
        if most < max(TRIED):
            self._size, self.kind = most, "neither"
            self._has_row_losses = self._records_row_losses = False
        elif self.kind == "neither":
            self._size = max(1, batch_size or 32)
        elif not self._has_row_losses:
            self._size = max(1, sum(map(len, rows)) // BLOCKS)
        self._make_blocks(rows)
        self._room = 0  # bytes that are left of the memory
        self._training_batches: dict[tuple[int, ...], list[tuple[Any, int]]] = {}
        self._cached, self._looks = self._read_within(memory), 0
        self._leave_bad_rows_out(rows, memory)
        self.rows = torch.cat([block for _, block in self._blocks]).cpu()
        self.rows, self._order = self.rows.sort()  # numbers of the rows, in order
        self.held = len(self.rows)

    def _make_blocks(self, rows: list[Tensor]) -> None:
        self._blocks = [
            (number, block)
            for number, each in enumerate(rows)
            for block in _split(each, self._size, self.kind == "neither")
            if len(block)
        ]
        if not self._blocks:
            raise HeldinError("data: no row can be held out; are all losses nan?")

    # -- the kind of loss

    def _most_collated(self, batch_size: int | None) -> int:
        """Return how many rows can be collated at once: rows of different sizes only one by one."""
        order = self._random_order()
        sizes = [min(self._view.count, max(TRIED)), batch_size or 1, 1]
        for size in sizes:
            try:
                self._view.read(order[:size])
                return max(TRIED) if size == sizes[0] else size
            except (RuntimeError, ValueError, TypeError):
                if size == 1:
                    raise
        raise AssertionError

    def _random_order(self) -> Tensor:
        return torch.randperm(self._view.count, generator=torch.Generator().manual_seed(0))

    def _decide_kind(self, rows: int) -> None:
        """Decide on several batches of two sizes how the loss of a batch follows from its rows."""
        order = self._random_order()
        votes: set[str | None] = set()
        first: tuple[Tensor | None, float] = (None, 0.0)
        self._records_row_losses = self._has_row_losses = False
        for start in range(3):
            size = min(rows, TRIED[start])
            index = order.roll(-start * size)[:size]
            cut = max(1, size // 3)
            places = [slice(0, size), slice(0, cut), slice(cut, size)]
            batches = self._view.read_parts(index, places if size > 1 else places[:1])
            batch, *parts = (to_device(each, self._device) for each in batches)
            with RowLossRecorder() as recorder:
                whole = self._evaluate(batch, self._eval_loss)
            if self._eval_loss is self._loss:
                whole = as_number(whole)
            if whole.numel() not in (1, size):
                raise HeldinError(
                    "eval_loss must return the loss of a batch or one for each of its "
                    f"{size} samples, got {tuple(whole.shape)}"
                )
            if start == 0:
                self._refuse_changes(batch)
                self._compare_losses(batch, whole, size)
            self._has_row_losses = whole.dim() > 0 and whole.numel() == size and size > 1
            if not self._has_row_losses and size > 1:
                votes.add(self._vote(batch, parts, cut, size, float(whole)))
            if start == 0 and not self._has_row_losses:
                first = (recorder.of(size), float(whole))
        votes.discard(None)
        self.kind = "neither"
        if len(votes) < 2:
            self.kind = next(iter(votes), None) or "mean"
        if self._has_row_losses:
            self.kind = "mean"
            return
        each, total = first
        if each is not None and self.kind != "neither":
            rows_total = float(each.double().sum() if self.kind == "sum" else each.double().mean())
            self._records_row_losses = self._has_row_losses = abs(
                rows_total - total
            ) <= self._close * abs(total)

    def _compare_losses(self, batch: Any, whole: Tensor, rows: int) -> None:
        """Determine whether the estimated loss is the one that is trained."""
        self.same_loss = self._eval_loss is self._loss
        if not self.same_loss:
            trained = float(self._evaluate(batch, self._loss).sum())
            mean = float(whole.mean())
            self.same_loss = any(
                abs(mean - value) <= 1e-3 * abs(value) for value in (trained, trained / rows)
            )

    def _vote(self, batch: Any, parts: list[Any], cut: int, rows: int, both: float) -> str | None:
        """Return whether the loss of a batch is the mean or the sum of the losses of two parts.

        None: the batch does not show it (all losses are zero or nan).
        """
        try:
            one, other = (float(self._evaluate(part, self._eval_loss)) for part in parts)
        except (RuntimeError, ValueError):  # a loss that needs more rows
            return "neither"
        size = abs(both) + abs(one) + abs(other)
        if not 0 < size < float("inf"):
            return None
        if abs(both - (cut * one + (rows - cut) * other) / rows) <= self._close * size:
            return "mean"
        if abs(both - one - other) <= self._close * size:
            return "sum"
        if float(self._evaluate(parts[0], self._eval_loss)) == one:
            return "neither"
        return self._vote_on_means([batch, *parts], cut, rows)

    def _vote_on_means(self, batches: list[Any], cut: int, rows: int) -> str:
        """Decide on means over several evaluations, for a loss that draws random numbers (a VAE).

        batches: one of `rows` rows, and its two parts, the first with `cut` rows.
        """
        each = [
            [float(self._evaluate(b, self._eval_loss)) for _ in range(REPEATS)] for b in batches
        ]
        values = torch.tensor(each, dtype=torch.float64)
        both, one, other = values.mean(1).tolist()
        both_var, one_var, other_var = (values.var(1) / REPEATS).tolist()
        share = cut / rows
        mean_off = abs(both - share * one - (1 - share) * other)
        mean_var = both_var + share**2 * one_var + (1 - share) ** 2 * other_var
        is_mean = mean_off <= ERRORS * mean_var**0.5
        is_sum = abs(both - one - other) <= ERRORS * (both_var + one_var + other_var) ** 0.5
        if is_mean == is_sum:
            return "neither"
        return "mean" if is_mean else "sum"

    def _refuse_changes(self, batch: Any) -> None:
        """Refuse a loss that changes the values of a batch in place when it is called again.

        The first call was made before: writing the same values a second time does no harm.
        """
        tensors = list(tensors_in(batch))
        before = [t.clone() for t in tensors]
        self._evaluate(batch, self._eval_loss)
        for tensor, values in zip(tensors, before, strict=True):
            if not equal(tensor, values):
                raise HeldinError(
                    "batch_loss: it, or the model, changes the batch in place, so that shadows "
                    "would see it changed more than once; let it work on a copy (x = x / 255, not "
                    "x /= 255)"
                )

    # -- rows

    def _read(self, rows: Tensor, stream: int = 0) -> Any:
        return to_device(self._view.read(rows, stream), self._device)

    def _read_within(self, memory: int) -> list[Any] | None:
        """Return the batches of this process, if there is room for all of them."""
        batches = []
        for number, (_, block) in enumerate(self._own_blocks()):
            batches.append(self._read(block, number))
            memory -= bytes_in(batches[-1])
            if memory < 0:
                return None
        self._room = memory
        return batches

    def _leave_bad_rows_out(self, rows: list[Tensor], memory: int) -> None:
        """Leave rows out of the estimate whose loss is not a number before training begins."""
        if self._ranks is not None:
            return  # all ranks must have the same blocks
        bad = []
        for number, group in self._groups():
            with self._inserted(number):
                for block, batch in group:
                    losses = self._losses_of_block(batch, len(block))
                    if bool(losses.isfinite().all()):
                        continue
                    bad += self._bad_rows_of(block, losses)
        if not bad:
            return
        self.bad_rows = sorted(bad)
        out = torch.tensor(self.bad_rows)
        if len(bad) == sum(len(each) for each in rows):
            raise HeldinError(
                "data: the loss of every held-out row is nan or infinite before training; look at "
                "the targets and at the model's outputs"
            )
        for number, each in enumerate(rows):
            rows[number] = each[~torch.isin(each.cpu(), out).to(each.device)]
        self._make_blocks(rows)
        self._cached, self._looks = self._read_within(memory), 0
        left = sum(len(block) for _, block in self._blocks)
        shown = ", ".join(map(str, self.bad_rows[:5])) + (" ..." if len(bad) > 5 else "")
        warnings.warn(
            f"the loss of row {shown} is nan or infinite before training, so the estimate is that "
            f"of the other {left} rows; look at the inputs and targets of that row "
            + more("rows-without-a-loss"),
            HeldinWarning,
            stacklevel=6,
        )

    def _bad_rows_of(self, block: Tensor, losses: Tensor) -> list[int]:
        if self._has_row_losses and len(losses) == len(block):
            return list(block[~losses.isfinite().to(block.device)].tolist())
        numbers: list[int] = block.tolist()
        bad = [row for row in numbers if not self._is_finite([row])]
        if len(bad) < len(numbers):
            return bad or numbers
        # A single row is no batch for this loss: which one spoils the others?
        bad = [row for row in numbers if self._is_finite([i for i in numbers if i != row])]
        return bad or numbers

    def _is_finite(self, rows: list[int]) -> bool:
        """Return whether the loss of a batch of rows is a number, for the inserted weights."""
        if not rows:
            return False
        batch = self._read(torch.tensor(rows))
        return bool(self._losses_of_block(batch, len(rows)).isfinite().all())

    def _own_blocks(self) -> list[tuple[int, Tensor]]:
        if not self._divided:
            return self._blocks
        return self._blocks[self._ranks.rank :: self._ranks.size]

    def _groups(self) -> Iterator[tuple[int, Iterator[tuple[Tensor, Any]]]]:
        """Yield the blocks of each shadow with their batches."""
        for number, group in groupby(enumerate(self._own_blocks()), key=lambda each: each[1][0]):
            yield (
                number,
                (
                    (block, self._read(block, i) if self._cached is None else self._cached[i])
                    for i, (_, block) in group
                ),
            )

    def _drop_stale_cache(self) -> None:
        """Read rows at every check if some have changed; each check looks at another block."""
        self._view.refresh()
        if self._cached:
            number = self._looks % len(self._cached)
            self._looks += 1
            again = self._read(self._own_blocks()[number][1], number)
            pairs = zip(tensors_in(self._cached[number]), tensors_in(again), strict=True)
            if not all(equal(before, now) for before, now in pairs):
                self._cached, self._training_batches = None, {}

    # -- losses

    def _evaluate(self, batch: Any, loss: BatchLoss) -> Tensor:
        value = loss(self._model, repack(batch))
        if not isinstance(value, Tensor):
            raise HeldinError(
                f"batch_loss must return the loss of a batch, a tensor, got {type(value).__name__}"
            )
        self._close = AGREEMENT.get(value.dtype, COARSE)
        return value.detach().double().cpu()

    def keep_outputs(self, recipe: OutputRecipe | None) -> None:
        """Keep outputs, and how they follow from a batch, at later evaluations; None: no longer."""
        self._recipe = recipe

    def losses(self) -> Tensor:
        """Return the losses of the held-out rows, or means over blocks, weighted by their sizes."""
        self._drop_stale_cache()
        results: list[Tensor] = []
        failure, collector = "", None
        if self._recipe is not None:
            with_targets = self.targets is None
            collector = OutputCollector(self._recipe, self._model, self.held, with_targets)
        for number, group in self._groups():
            with self._inserted(number):
                for block, batch in group:
                    recording = nullcontext() if collector is None else collector.recording()
                    with self._frozen.for_block(len(results)), recording:
                        results.append(self._losses_of_block(batch, len(block)))
                    if collector is None or failure:
                        continue
                    try:
                        collector.add(batch, len(block))
                    except HeldinError as error:
                        if not self._divided:
                            raise
                        failure = str(error)  # which is an error in all ranks, or in none
        if collector is not None:
            self._join_outputs(collector, failure)
            self.outputs = collector.outputs(self._order)
            if self.targets is None:
                self.targets = collector.targets(self._order)
        if not self._divided:
            return torch.cat(results)[self._order] if self._has_row_losses else torch.cat(results)
        each = [
            torch.zeros(len(block) if self._has_row_losses else 1, dtype=torch.float64)
            for _, block in self._blocks
        ]
        each[self._ranks.rank :: self._ranks.size] = results
        joined: Tensor = self._ranks.join(torch.cat(each), self._device)
        return joined[self._order] if self._has_row_losses else joined

    def _join_outputs(self, collector: OutputCollector, failure: str) -> None:
        """Gather the outputs of all ranks; a failure of one is an error in all of them."""
        if not self._divided:
            return
        parts = self._ranks.gather((failure, collector.blocks))
        for message, _ in parts:
            if message:
                raise HeldinError(message)
        blocks: list[Any] = [None] * len(self._blocks)
        for rank, (_, part) in enumerate(parts):
            blocks[rank :: self._ranks.size] = part
        collector.blocks = blocks

    def example(self) -> Any:
        """Return a batch of a few held-out rows."""
        return self._read(self._blocks[0][1][:EXAMPLE])

    def predict(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the outputs of the model for the batch of `example`, as they are collected."""
        assert self._recipe is not None
        rows = min(EXAMPLE, len(self._blocks[0][1]))
        collector = OutputCollector(self._recipe, model, rows, with_targets=False)
        with collector.recording():
            if self._recipe.predict is None:
                self._evaluate(batch, self._eval_loss)
        collector.add(batch, rows)
        return collector.outputs(torch.arange(rows))

    def batches_of(self, rows: Tensor) -> list[tuple[Any, int]]:
        """Return batches of rows, with their sizes; kept if the held-out rows are."""
        numbers = tuple(rows.tolist())
        if numbers in self._training_batches:
            return self._training_batches[numbers]
        blocks = _split(rows, self._size, self.kind == "neither")
        batches = [(self._read(block), len(block)) for block in blocks]
        size = sum(bytes_in(batch) for batch, _ in batches)
        if self._cached is not None and size <= self._room:
            self._room -= size
            self._training_batches[numbers] = batches
        return batches

    def mean_loss(self, batches: list[tuple[Any, int]]) -> float:
        """Return the mean loss of batches on whatever is in the model."""
        total = sum(
            float(self._evaluate(batch, self._eval_loss).mean()) * rows for batch, rows in batches
        )
        return total / sum(rows for _, rows in batches)

    def _losses_of_block(self, batch: Any, rows: int) -> Tensor:
        recorder = RowLossRecorder()
        with recorder if self._records_row_losses else nullcontext():
            whole = self._evaluate(batch, self._eval_loss)
        if self._has_row_losses and not self._records_row_losses:
            return whole.flatten()
        mean = whole.reshape(1) / (rows if self.kind == "sum" else 1)
        if not self._has_row_losses:
            total = sum(len(block) for _, block in self._blocks)
            return mean * rows * len(self._blocks) / total
        each = recorder.of(rows)
        if each is None:
            return mean.expand(rows)
        each = each.double().cpu()
        if not bool(mean.isfinite()):
            return each  # one bad row does not spoil the others
        return each + (mean - each.mean())  # rows without a target do not count in the mean


def _split(rows: Tensor, size: int, exact: bool) -> list[Tensor]:
    """Split row numbers into blocks of a size, or of about that size."""
    if exact:
        return list(rows.split(size))
    return list(rows.tensor_split(max(1, -(-len(rows) // size))))


def as_number(loss: Any) -> Tensor:
    """Return the loss of a batch as a tensor with one number; refuse anything else."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise HeldinError(
            f"batch_loss must return the loss of a batch, a tensor with one number, got {shown}"
        )
    return loss.reshape(())
