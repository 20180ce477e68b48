"""Run a loop without heldin, with it, and beside twins trained by hand; compare."""

from __future__ import annotations

import copy
import inspect
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import heldin
from heldin._private_torch import is_inner_step
from heldin.errors import HeldinError, HeldinWarning
from heldin.loop.randomness import separate_random_stream

from .job import Job, Loop

__all__ = ["Outcome", "judge"]

TOLERANCE = 1e-7  # relative
FOLDS = 4
SEED = 0
CHANCE = 0.6931471805599453  # log 2: the loss of a coin flip
CPU = torch.device("cpu")


@dataclass
class Outcome:
    """What became of a loop.

    Attributes:
        name, kind, what: of the loop.
        verdict: "exact", "refused", "warned", "wrong", "changed", "crashed" or "skipped".
        expected: whether the verdict is one of those that are right for the loop.
        difference: largest relative difference of held-out losses (or weights) from the twins'.
        cost: time of the run with heldin over the time without.
        message: of the error or warning.
    """

    name: str
    kind: str
    what: str
    verdict: str
    expected: bool
    difference: float | None = None
    cost: float | None = None
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        return asdict(self)


@dataclass
class _Batch:
    """A batch of the recorded run."""

    epoch: int
    rows: list[int]
    items: list[Any]
    whole: Any
    stepped: int  # steps of the optimiser up to the end of this batch
    skipped: bool
    rates: list[float]  # of the optimiser's groups, before the batch


@contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def judge(loop: Loop) -> Outcome:
    """Return what becomes of a loop with heldin."""
    outcome = Outcome(loop.name, loop.kind, loop.what, "", False)
    if loop.uses_train_step and not _has_train_step():
        outcome.verdict, outcome.expected = "skipped", True
        return outcome
    with _double():
        _judge(loop, outcome)
    outcome.expected = outcome.verdict in loop.expects
    return outcome


def _has_train_step() -> bool:
    return "train_step" in inspect.signature(heldin.EarlyStopping).parameters


def _judge(loop: Loop, outcome: Outcome) -> None:
    recorded, _, _ = _run_recorded(loop)
    sums, seconds, generators = _run_without(loop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = _run_with(loop, caught)
    ours = [str(w.message) for w in run.warned if issubclass(w.category, HeldinWarning)]
    outcome.message = run.error or (ours[0] if ours else "")
    outcome.cost = run.seconds / seconds if not run.error else None
    same = run.sums == sums[: len(run.sums)]
    if not same or (not run.error and (len(run.sums) != len(sums) or run.generators != generators)):
        outcome.verdict = "changed"
        number = next(
            (i for i, (a, b) in enumerate(zip(run.sums, sums, strict=False)) if a != b), None
        )
        where = "random generators" if number is None else f"weights from batch {number} on"
        outcome.message = f"{where} differ; {outcome.message}"
        return
    if run.error:
        outcome.verdict = "refused" if run.refused else "crashed"
        return
    job = run.job
    leak = _leak(run.stopping) if job.coin_flips else ""
    try:
        outcome.difference = _compare(loop, run, recorded)
    except _NoTwin as error:
        outcome.difference, leak = float("inf"), leak or str(error)
    if not job.independent:
        leak = leak or "rows that are not independent are held out without a word"
    exact = outcome.difference <= TOLERANCE and not leak
    outcome.verdict = "exact" if exact else "warned" if ours else "wrong"
    if outcome.verdict == "wrong":
        outcome.message = leak or f"held-out losses differ by {outcome.difference:.2g}"


class _NoTwin(Exception):
    """Raised where no twin can exist."""


# --- the three runs ---------------------------------------------------------------------------


def _checksum(job: Job) -> int:
    total = 0
    for value in job.model.state_dict().values():
        total = crc32(value.detach().cpu().contiguous().numpy().tobytes(), total)
    return total


def _generators() -> int:
    numpy: Any = np.random.get_state()
    states = (torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy[1].tobytes())
    return crc32(repr((*states, numpy[2])).encode())


def _epochs(job: Job, numbers: Any, act: Callable[[Any], Any], each: Callable[[int], None]) -> None:
    for epoch in numbers:
        job.begin_epoch(epoch)
        for batch in job.loader:
            act(batch)
            each(epoch)
        job.end_epoch()


def _run_without(loop: Loop) -> tuple[list[int], float, int]:
    _seed()
    job = loop.build()
    job.before()
    job.after_making()
    sums: list[int] = []
    start = time.perf_counter()
    _epochs(job, range(job.epochs), job.step, lambda _: sums.append(_checksum(job)))
    return sums, time.perf_counter() - start, _generators()


def _run_recorded(loop: Loop) -> tuple[list[_Batch], list[int], Job]:
    """Run without heldin; record the rows and the items of every batch."""
    _seed()
    job = loop.build()
    job.before()
    job.after_making()
    batches: list[_Batch] = []
    handed_out: list[list[int]] = getattr(job.loader, "handed_out", [])
    items: list[list[Any]] = []
    whole: list[Any] = []
    collate = job.loader.collate_fn
    if not hasattr(job.loader, "handed_out"):
        loader = job.loader
        vars(loader)["batch_sampler"] = _Noting(loader.batch_sampler, handed_out)

        def noting(given: list[Any]) -> Any:
            items.append(copy.deepcopy(given))
            batch = collate(given)
            whole.append(copy.deepcopy(batch))
            return batch

        loader.collate_fn = noting
    steps = 0

    def count(optimizer: Optimizer, *_: Any) -> None:
        nonlocal steps
        steps += optimizer is job.optimizer and not is_inner_step(optimizer)

    handle = register_optimizer_step_post_hook(count)
    sums: list[int] = []

    def each(epoch: int) -> None:
        place = len(batches) if getattr(job.loader, "num_workers", 0) else -1
        numbers = handed_out[place]
        here = bool(items)  # and not in a worker
        read = items[place] if here else [job.loader.dataset[i] for i in numbers]
        batch = whole[place] if here else collate(read)
        before = batches[-1].stepped if batches else 0
        batches.append(_Batch(epoch, numbers, read, batch, steps, steps == before, rates[-1]))
        sums.append(_checksum(job))

    rates: list[list[float]] = []

    def act(batch: Any) -> None:
        rates.append([float(group["lr"]) for group in job.optimizer.param_groups])
        job.step(batch)

    try:
        _epochs(job, range(job.epochs), act, each)
    finally:
        handle.remove()
    return batches, sums, job


class _Noting:
    """A batch sampler that records its lists."""

    def __init__(self, inner: Any, handed_out: list[list[int]]) -> None:
        self.inner, self.handed_out = inner, handed_out

    def __iter__(self) -> Iterator[list[int]]:
        for numbers in self.inner:
            self.handed_out.append(list(numbers))
            yield numbers

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class _Run:
    job: Job
    sums: list[int]
    seconds: float = 0.0
    generators: int = 0
    stopping: Any = None
    error: str = ""
    refused: bool = False
    weights: list[dict[str, Tensor]] | None = None
    label: Any = None
    held: Any = None
    curves: Any = None
    steps: Sequence[int] = ()
    warned: Sequence[warnings.WarningMessage] = ()


def _run_with(loop: Loop, caught: list[warnings.WarningMessage]) -> _Run:
    _seed()
    job = loop.build()
    job.before()
    run = _Run(job, [])
    arguments = dict(job.arguments)
    if job.uses_train_step:
        arguments |= {"train_step": job.step}
        if job.state:
            arguments |= {"state": list(job.state)}
    rule = arguments.pop("rule", heldin.rules.Folds(folds=FOLDS))
    arguments.setdefault("temperature", False)  # twins have the loop's own loss
    data = job.loader if job.data is None else job.data
    try:
        run.stopping = stopping = heldin.EarlyStopping(
            job.model, job.optimizer, data=data, rule=rule, patience=None, seed=SEED, **arguments
        )
        job.after_making()
        act = stopping.train if job.uses_train_step else job.step
        start = time.perf_counter()
        epochs = stopping.epochs(job.epochs)
        for epoch in epochs:
            _epochs(job, [epoch], act, lambda _: run.sums.append(_checksum(job)))
            if epoch == job.epochs - 1:  # before the best weights are restored
                run.seconds, run.generators = time.perf_counter() - start, _generators()
                run.warned = list(caught)
                _read(run)
    except HeldinError as error:
        run.error, run.refused = str(error), True
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"
    if run.error and run.stopping is not None:
        run.stopping.close()
    return run


def _read(run: _Run) -> None:
    """Read the shadows before the object is closed."""
    rule = run.stopping._inner
    run.label, run.curves = rule.fold_of_row.cpu(), [curve.clone() for curve in rule._curves]
    run.steps = [record.step for record in rule.history]
    team = rule._backend
    run.held = getattr(getattr(team, "_held_out", None), "rows", None)
    if run.held is None:
        run.held = (run.label >= 0).nonzero().flatten()
    run.weights = [
        {name: w.detach().clone() for name, w in team.weights_of(k).items()}
        for k in range(team.copies)
    ]


# --- twins ------------------------------------------------------------------------------------


def _compare(loop: Loop, run: _Run, recorded: Sequence[_Batch]) -> float:
    """Return the largest relative difference between shadows and freshly built twins."""
    steps = run.steps
    held = set(run.held.tolist())
    drawn = {row for batch in recorded for row in batch.rows}
    if held & set(run.job.undrawn):
        raise _NoTwin("rows that the sampler never draws are held out")
    if held & set(run.job.bad) or len(held) + len(run.job.bad) + len(run.job.undrawn) < len(
        run.label
    ):
        raise _NoTwin(f"{len(held)} of {len(run.label)} rows are held out; {len(drawn)} are drawn")
    totals = torch.zeros(len(steps))
    difference = 0.0
    for number in range(int(run.label.max()) + 1):
        hidden = [row for row in sorted(held) if run.label[row] == number]
        losses, weights = _twin(loop, number, run.label, recorded, steps, hidden)
        totals += losses
        assert run.weights is not None
        shadow = run.weights[number]
        for name in [name for name in shadow if name in weights]:
            weight = shadow[name]
            off = float((weights[name] - weight).norm() / (weights[name].norm() + 1e-300))
            difference = max(difference, off if run.job.compares == "weights" else 0.0)
    if run.job.compares == "weights":
        return difference
    means = torch.stack([curve.double().mean() for curve in run.curves])
    expected = totals / len(held)
    relative = ((means - expected).abs() / expected.abs().clamp_min(1e-300)).max()
    return float(relative.nan_to_num(nan=float("inf")))


def _twin(
    loop: Loop,
    number: int,
    label: Tensor,
    recorded: Sequence[_Batch],
    steps: Sequence[int],
    hidden: Sequence[int],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train a freshly built model on the rows that a shadow may see.

    Returns the sum of the losses of the hidden rows at every check, and the weights at the end.
    """
    _seed()
    job = loop.build()
    job.before()
    job.after_making()
    losses = torch.full((len(steps),), float("nan"))
    checks = {step: place for place, step in enumerate(steps)}
    if job.compares == "weights":
        checks = {}
    else:
        losses[0] = _held_out_sum(job, hidden)
    epoch, counted = -1, 0

    def look(step: int) -> None:
        if step in checks:
            losses[checks[step]] = _held_out_sum(job, hidden)

    taken = 0  # steps of the twin in a batch

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        nonlocal taken
        if optimizer is not job.optimizer or is_inner_step(optimizer):
            return
        taken += 1
        if not job.uses_train_step and counted + taken < batch.stepped:
            look(counted + taken)

    handle = register_optimizer_step_post_hook(stepped)
    try:
        for batch in recorded:
            if batch.epoch != epoch:
                if epoch >= 0:
                    job.end_epoch()
                epoch = batch.epoch
                job.begin_epoch(epoch)
            visible = [i for i, row in enumerate(batch.rows) if label[row] != number]
            taken = 0
            if visible and not (job.skips and batch.skipped):
                if job.follows_rates:
                    for group, rate in zip(job.optimizer.param_groups, batch.rates, strict=True):
                        group["lr"] = rate
                with separate_random_stream(CPU, SEED, counted + 1, number, 0):
                    if len(visible) == len(batch.rows):  # a random collation is the loop's
                        job.step(copy.deepcopy(batch.whole))
                    else:
                        items = [copy.deepcopy(batch.items[i]) for i in visible]
                        job.step(job.collate(items))
            if batch.stepped > counted:
                look(batch.stepped)
            counted = batch.stepped
    finally:
        handle.remove()
    return losses, {name: p.detach().clone() for name, p in job.model.named_parameters()}


def _held_out_sum(job: Job, hidden: Sequence[int]) -> Tensor:
    """Return the sum of the losses of rows, each weighted by the rows of its block."""
    modes = {module: module.training for module in job.model.modules()}
    evaluates = hasattr(job.optimizer, "eval")
    if evaluates:
        job.optimizer.eval()  # type: ignore[attr-defined]
    job.model.eval()
    view = job.arguments.get("eval_data")
    dataset = job.loader.dataset if view is None else getattr(view, "dataset", view)
    collate = job.collate if view is None else getattr(view, "collate_fn", None)
    if collate is None:
        collate = torch.utils.data.default_collate
    size = 1 if job.evaluates == "rows" else job.loader.batch_size
    total = torch.zeros(())
    state = torch.get_rng_state()
    with torch.no_grad():
        for start in range(0, len(hidden), size):
            block = hidden[start : start + size]
            loss = job.batch_loss(collate([copy.deepcopy(dataset[i]) for i in block]))
            total += loss.double() * len(block)
    torch.set_rng_state(state)
    for module, mode in modes.items():
        module.training = mode
    if evaluates:
        job.optimizer.train()  # type: ignore[attr-defined]
    return total


def _leak(stopping: Any) -> str:
    """Return what is wrong with an estimate for coin flips; empty if nothing is."""
    for record in stopping.history:
        error = record.standard_error
        if record.estimate < CHANCE - 3 * (error if error == error else 0.0):
            return (
                f"estimate {record.estimate:.3g} +- {error:.2g} for coin flips at step "
                f"{record.step}"
            )
    return ""
