"""The stopping rule for a model, its data and what it may cost."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from heldin._private_torch import BatchNorm
from heldin.distributed.ranks import groups_of
from heldin.errors import HeldinError, HeldinWarning
from heldin.loop.matching import Rows
from heldin.loop.randomness import separate_random_stream
from heldin.loop.rows import RowSource
from heldin.rules.displacements import KNOWN
from heldin.rules.folds import FoldStopping
from heldin.rules.inputs import RunInputs
from heldin.rules.leave_one_out import LeaveOneOutStopping
from heldin.rules.options import Auto, Folds, LeaveOneOut
from heldin.rules.path import PathStopping
from heldin.shadows.bare_model import copy_without_hooks, unfused_attention
from heldin.shadows.dense import is_plain
from heldin.shadows.engines import CannotStack
from heldin.shadows.models import check_trainable
from heldin.shadows.replayed import LossIsSum

__all__ = ["follow"]

FEW, MANY = 1000, 10_000  # rows from which two shadows, and one, are worth their time
TENSORS = 4  # of the size of the weights, for each copy: weights, gradients, two moments
SIZES = (20_000, 100_000)  # parameters up to which calls, not arithmetic, are what a step costs
# Multiplications with a row, where there are more than parameters, up to `REGRET_ROWS` rows and
# beyond: small transformers with more rows are as good with one replayed shadow as with three in a
# stack, in two thirds of the time (heldin_lab.study.choice).
WORK = ((20_000, 500_000), (20_000, 200_000))
ARITHMETIC = (  # works much with few parameters, or belongs to models of many layers
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.RNNBase, nn.MultiheadAttention, nn.Embedding, nn.EmbeddingBag,
)  # fmt: skip
# Time of a run with k shadows is base + each x k, in runs without, by engine, for small, medium and
# large models. The most that was measured, in runs of 1,000 steps and more with SGD, whose plain
# steps are the cheapest.
COSTS: dict[str, tuple[tuple[float, float], ...]] = {
    "dense": ((2.55, 0.05), (1.5, 0.9), (1.25, 0.98)),
    "vmap": ((4.3, 0.1), (2.9, 0.96), (2.6, 1.02)),
    "replay": ((2.2, 1.22), (1.75, 1.2), (1.45, 1.05)),
}
# Arguments that leave-one-out does not have.
FOLDS_ONLY = ("batch_loss", "clip", "groups", "stratify", "time", "train_step", "averaged_model")
# Time of a light shadow, in full ones: small ones and large ones measured, medium ones in between.
LIGHT = (1.2, 0.7, 0.5)
FROZEN = 1_000_000  # first parameters that do not move from which replay, which computes them once
MOVED = 0.3  # of a shadow's time is not arithmetic, and not saved by them
BUDGET = 6.0  # times a plain run, where shadows are stacked
GENERAL_BUDGET = 2.0  # where they are not
SLACK = 1.25  # where nothing fits the budget: what costs so much more is as cheap as the cheapest
# Test loss of what is kept, over the lowest on the path, by the number of shadows and the share of
# rows that each is trained on, up to 200 rows and beyond: geometric means of 63 runs of networks on
# images, texts and in fine-tuning (docs/study), for light shadows of 35 other runs.
REGRETS: dict[tuple[int, float], tuple[float, float]] = {
    (3, 0.25): (1.034, 1.046),
    (1, 1.0): (1.071, 1.005),
    (2, 1.0): (1.038, 1.013),
    (3, 1.0): (1.036, 1.002),
    (4, 1.0): (1.028, 1.010),
    (5, 1.0): (1.019, 1.004),
}
REGRET_ROWS = 200
EQUAL = 0.01  # differences of regrets that the runs cannot tell
PROBES = 5e7  # samples^2 x parameters up to which leave-one-out costs as said below
LEAVE_ONE_OUT = 2.0  # runs, in runs of 1,000 steps and more


NAMES = {
    (1, 1.0): "one shadow",
    (2, 1.0): "two of five folds",
    (3, 1.0): "three of five folds",
    (4, 1.0): "four of five folds",
    (5, 1.0): "five folds",
    (3, 0.25): "three light shadows, on a quarter of each batch",
}
Option = tuple[int, float]  # number of shadows, and the share of rows that each is trained on


@dataclass(frozen=True)
class _Case:
    """What the choice depends on."""

    rows: int
    parameters: int
    bytes: int
    engine: str  # that shadows are run by
    size: int  # 0, 1 or 2: small, medium or large in `COSTS`
    known: bool = False  # an optimiser whose steps leave-one-out can follow, on tensors
    moving: float = 1.0  # share of the model that shadows compute again, behind frozen modules

    def cost(self, shadows: int, share: float = 1.0) -> float:
        """Time of a run with so many shadows, in runs without: see `COSTS`."""
        base, each = COSTS[self.engine][self.size]
        part = self.moving * (1.0 if share == 1.0 else LIGHT[self.size])
        return round(base + each * shadows * max(MOVED, part), 1)

    def regret(self, shadows: int, share: float = 1.0) -> float:
        """Test loss that is reached, over the lowest on the path: see `REGRETS`."""
        return REGRETS[shadows, share][self.rows > REGRET_ROWS]

    @property
    def text(self) -> str:
        return f"{self.rows} rows and {self.parameters} parameters"

    @property
    def usual_budget(self) -> float:
        """What a run may cost where nobody says."""
        return GENERAL_BUDGET if self.engine == "replay" else BUDGET

    def wanted(self) -> int:
        """How many shadows are worth their time."""
        return 5 if self.rows < FEW else 2 if self.rows < MANY else 1


@dataclass(frozen=True)
class _Choice:
    """Shadows, or leave-one-out where there are none, and why."""

    shadows: int
    share: float
    reason: str
    over: bool = False  # whether it costs more than the budget


def _choose(case: _Case, budget: float | None, memory: int, light: bool = True) -> _Choice:
    """Choose the rule with the lowest test loss in the budget, and the surer of equals.

    Where nothing fits the budget, the cheapest is chosen: of those that cost up to `SLACK` times as
    much, the one with the lowest test loss.

    Args:
        case: what the choice depends on.
        budget: in runs without shadows; None: the default.
        memory: bytes of shadows.
        light: whether light shadows can be trained.
    """
    limit = case.usual_budget if budget is None else budget
    wanted, room = case.wanted(), memory // max(1, TENSORS * case.bytes)
    most = min(wanted, room)  # shadows that the rows make worthwhile and the memory holds
    options = [(k, share) for k, share in REGRETS if k <= most and (light or share == 1.0)]
    affordable = [each for each in options if case.cost(*each) <= limit]
    enough = min(3, wanted)
    followed = case.known and float(min(case.rows, 1024)) ** 2 * case.parameters <= PROBES
    if followed and not any(k >= enough for k, _ in affordable):
        if limit >= LEAVE_ONE_OUT or not affordable:
            reason = (
                f"{case.text}: leave-one-out, for about {LEAVE_ONE_OUT:g} times the time of a run; "
                f"{NAMES[enough, 1.0]} would take {case.cost(enough):g} times and "
                f"{enough * TENSORS * case.bytes:,} bytes (budget {limit:g}, {memory:,} bytes)"
            )
            return _Choice(0, 1.0, reason, limit < LEAVE_ONE_OUT)
    if not options:
        raise HeldinError(
            f"heldin.EarlyStopping: with {case.text} no rule that estimates the test loss fits "
            f"{memory:,} bytes (one shadow takes {TENSORS * case.bytes:,} bytes and "
            f"{case.cost(1):g} times the time); raise memory=, or use rule='evidence', which needs "
            "no shadow"
        )
    over = not affordable
    if over:
        cheap = SLACK * min(case.cost(*each) for each in options)
        affordable = [each for each in options if case.cost(*each) <= cheap]
    best = _best(case, affordable, surest=not over)
    spent = (
        f"for about {case.cost(*best):g} times the time of a run of 1,000 steps or more "
        f"({'' if budget is not None else 'default '}budget {limit:g}"
        f"{', which no rule fits: this is among the cheapest' if over else ''})"
    )
    reason = f"{case.text}: {NAMES[best]}, {spent}; {_more(case, best, options, memory)}"
    return _Choice(*best, reason, over and budget is not None)


def _best(case: _Case, options: list[Option], surest: bool) -> Option:
    """Return the lowest regret; of those that are equal, most full shadows, or the cheapest."""
    lowest = min(case.regret(*each) for each in options)
    equal = [each for each in options if case.regret(*each) < lowest + EQUAL]
    if surest:
        return max(equal, key=lambda each: (each[1] == 1.0, each[0]))
    return min(equal, key=lambda each: case.cost(*each))


def _more(case: _Case, chosen: Option, options: list[Option], memory: int) -> str:
    """Say what a larger budget, or more memory, would buy."""
    wanted = case.wanted()
    if chosen == (5, 1.0):
        return f"the best rule with fewer than {FEW} rows"
    if chosen[0] >= wanted and chosen[1] == 1.0:
        return "more would gain little"
    best = _best(case, options, surest=True)
    if best == chosen:
        takes = f"{NAMES[wanted, 1.0]} take {wanted * TENSORS * case.bytes:,}"
        return f"more do not fit {memory:,} bytes, {takes}"
    now, then = case.regret(*chosen), case.regret(*best)
    buys = f"budget={case.cost(*best):g} buys {NAMES[best]}"
    if then > now - EQUAL:
        return f"{buys}: a surer estimate, not better weights"
    return f"{buys}, whose test loss was {then:.3f} times the lowest, in place of {now:.3f}"


def follow(inputs: RunInputs, rule: Auto | Folds | LeaveOneOut) -> PathStopping:
    """Begin to follow a run by a rule that estimates the test loss."""
    if inputs.data is None:
        raise HeldinError(
            "heldin.EarlyStopping: data is missing: the tensors (x, y), the Dataset or the "
            "DataLoader that the model is trained on"
        )
    if isinstance(rule, Folds):
        return FoldStopping(inputs, rule)
    if isinstance(rule, LeaveOneOut):
        return LeaveOneOutStopping(inputs, rule)
    return _follow_best(inputs, rule)


def _follow_best(inputs: RunInputs, rule: Auto) -> PathStopping:
    """Follow a run by what suits the model, its rows and the budget; say why."""
    several = bool(groups_of(inputs.model, inputs.process_group))
    read = inputs
    if inputs.needs_replay or several:
        case = _case(inputs.model, inputs.optimizer, inputs.data, "replay")
    else:
        parameter = check_trainable("heldin.EarlyStopping", inputs.model)
        data = inputs.data
        if _may_stack(inputs.model, data) or not _is_read_by_rows(data):
            data = Rows.of(data, parameter.device, inputs.store)
        case = _case(inputs.model, inputs.optimizer, data, "auto")
        if case.engine != "replay":
            read = replace(inputs, data=data)  # which are read once
    if any(getattr(inputs, name) is not None for name in FOLDS_ONLY):
        case = replace(case, known=False)
    try:
        followed, choice = _follow_case(read, rule, case, several)
    except CannotStack:  # recurrent layers, say: the shadows cost what replay costs
        case = replace(case, engine="replay", known=False)
        followed, choice = _follow_case(inputs, rule, case, several)
    if choice.over:
        warnings.warn(
            f"heldin.EarlyStopping: nothing that estimates the test loss fits budget="
            f"{rule.budget:g}; for {choice.reason}. rule='evidence' has no shadow",
            HeldinWarning,
            stacklevel=2,
        )
    followed.reason_chosen = choice.reason
    return followed


def _follow_case(
    inputs: RunInputs, rule: Auto, case: _Case, several: bool
) -> tuple[PathStopping, _Choice]:
    """Follow a run by what is chosen for a case; raise CannotStack if its engine cannot run it."""
    replays, weighted = case.engine == "replay", inputs.sample_weight is not None
    light = replays and not several and inputs.time is None and not weighted
    choice = _choose(case, rule.budget, rule.memory, light)
    room = min(Folds.snapshot_memory, rule.memory)
    if not choice.shadows:
        return LeaveOneOutStopping(inputs, LeaveOneOut(snapshot_memory=room)), choice
    # only stacked shadows have weights, whatever they cost
    engine: Any = "replay" if replays and not weighted else "auto"
    rows: Any = "all" if choice.share == 1.0 else choice.share
    folds = Folds(shadows=choice.shadows, rows=rows, engine=engine, snapshot_memory=room)
    try:
        return FoldStopping(inputs, folds, must_stack=not replays), choice
    except LossIsSum:  # which light shadows cannot be trained by
        choice = _choose(case, rule.budget, rule.memory, light=False)
        return FoldStopping(inputs, replace(folds, shadows=choice.shadows, rows="all")), choice


def _case(model: nn.Module, optimizer: Optimizer, data: Any, engine: str) -> _Case:
    check_trainable("heldin.EarlyStopping", model)  # or there is none
    params = [p for p in model.parameters() if p.requires_grad]
    every = sum(p.numel() for p in model.parameters())
    size = _size(model)
    first = itertools.takewhile(lambda p: not p.requires_grad, model.parameters())
    frozen = sum(p.numel() for p in first)  # their outputs are computed once for all shadows
    if isinstance(data, Rows):
        count, size = len(data), _size(model, data.inputs)
        if is_plain(model, data.inputs) and frozen < FROZEN:
            engine = "dense"
        else:
            engine = "vmap" if size < len(SIZES) and not _is_normed(model) else "replay"
    else:
        count, engine = RowSource(data, seed=0, records=False).count, "replay"
    return _Case(
        rows=count,
        parameters=sum(p.numel() for p in params),
        bytes=sum(p.numel() * p.element_size() for p in params),
        engine=engine,
        size=size,
        known=engine != "replay" and type(optimizer) in KNOWN,
        moving=1 - frozen / every if frozen >= FROZEN else 1.0,
    )


def _may_stack(model: nn.Module, data: Any) -> bool:
    """Return whether shadows of a model may be trained in one stack, whatever the rows are.

    Small networks on images or texts are, but many rows of a data set that is read row by row are
    not taken into memory for it.
    """
    if is_plain(model, [torch.zeros(1, 1)]):
        return True
    source: Any = data.dataset if isinstance(data, DataLoader) else data
    many = _is_read_by_rows(data) and len(source) > FEW
    if _is_normed(model) or (many and _works_much(model)):
        return False
    return sum(p.numel() for p in model.parameters()) <= SIZES[-1]


def _is_normed(model: nn.Module) -> bool:
    """Return whether there is a BatchNorm, which cannot be mapped over shadows."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


def _works_much(model: nn.Module) -> bool:
    return any(isinstance(module, ARITHMETIC) for module in model.modules())


def _is_read_by_rows(data: Any) -> bool:
    """Return whether the rows of data are read one by one, which may take long."""
    source = data.dataset if isinstance(data, DataLoader) else data
    fixed = isinstance(source, (IterableDataset, TensorDataset))
    return isinstance(source, Dataset) and not fixed


def _size(model: nn.Module, inputs: Sequence[torch.Tensor] | None = None) -> int:
    """Which column of `COSTS` a model belongs to: how much of a step is arithmetic."""
    parameters = sum(p.numel() for p in model.parameters())
    if not _works_much(model):
        return sum(parameters > size for size in SIZES)
    if inputs is None or parameters > SIZES[-1]:
        return len(SIZES)
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    row = [each[:1] for each in inputs]
    with separate_random_stream(row[0].device, 0), torch.no_grad():
        try:
            bare = copy_without_hooks(model).eval()
            with counter, unfused_attention():
                bare(*row)
        except Exception:  # whatever the model raises for one row
            return len(SIZES)
    work = int(counter.get_total_flops()) // 2  # multiplications with one row
    return sum(work > most for most in WORK[len(inputs[0]) > REGRET_ROWS])
