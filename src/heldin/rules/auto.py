"""The stopping rule for a model, its data and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from heldin._private_torch import BatchNorm
from heldin.distributed.ranks import groups_of
from heldin.errors import HeldinError
from heldin.loop.matching import Rows
from heldin.loop.rows import RowSource
from heldin.rules.folds import FoldStopping
from heldin.rules.inputs import RunInputs
from heldin.rules.leave_one_out import LeaveOneOutStopping
from heldin.rules.options import Auto, Folds, LeaveOneOut
from heldin.rules.path import PathStopping
from heldin.rules.unit_steps import KNOWN
from heldin.shadows.dense import is_plain
from heldin.shadows.models import check_trainable
from heldin.shadows.replayed import LossIsSum

__all__ = ["follow"]

FEW, MANY = 1000, 10_000  # rows from which two shadows, and one, are worth their time
TENSORS = 4  # of the size of the weights, for each copy: weights, gradients, two moments
SIZES = (20_000, 100_000)  # parameters up to which calls, not arithmetic, are what a step costs
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
BUDGET = 6.0  # times a plain run, where shadows are stacked
GENERAL_BUDGET = 2.0  # where shadows are not stacked; the cheapest rule is never refused for it,
SLACK = 1.25  # and one that costs so much more is as cheap
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
PROBES = 5e7  # samples^2 x parameters up to which leave-one-out costs as said below
LEAVE_ONE_OUT = 2.0  # runs, in runs of 1,000 steps and more


NAMES = {1: "one shadow", 2: "two of five folds", 3: "three of five folds"}
NAMES |= {4: "four of five folds", 5: "five folds"}


@dataclass(frozen=True)
class _Case:
    """What the choice depends on."""

    rows: int
    parameters: int
    bytes: int
    engine: str  # that shadows are run by
    size: int  # 0, 1 or 2: small, medium or large in `COSTS`
    known: bool = False  # an optimiser whose steps leave-one-out can follow, on tensors

    def cost(self, shadows: int, share: float = 1.0) -> float:
        """Time of a run with so many shadows, in runs without: see `COSTS`."""
        base, each = COSTS[self.engine][self.size]
        return round(base + each * shadows * (1.0 if share == 1.0 else LIGHT[self.size]), 1)

    def regret(self, shadows: int, share: float = 1.0) -> float:
        """Test loss that is reached, over the lowest on the path: see `REGRETS`."""
        return REGRETS[shadows, share][self.rows > REGRET_ROWS]

    def wanted(self) -> int:
        """How many shadows are worth their time."""
        return 5 if self.rows < FEW else 2 if self.rows < MANY else 1


def _chosen(case: _Case, budget: float, memory: int) -> tuple[int, str]:
    """Return a number of shadows, 0 for leave-one-out, and the reason."""
    size = f"{case.rows} rows and {case.parameters} parameters"
    room = memory // max(1, TENSORS * case.bytes)
    shadows = max(
        (k for k in range(1, case.wanted() + 1) if k <= room and case.cost(k) <= budget), default=0
    )
    followed = case.known and float(min(case.rows, 1024)) ** 2 * case.parameters <= PROBES
    followed = followed and budget >= LEAVE_ONE_OUT
    enough = min(3, case.wanted())
    if followed and shadows < enough:
        return 0, (
            f"{size}: leave-one-out, for about {LEAVE_ONE_OUT:g} times the time of a run; "
            f"{enough} shadow{'s' if enough > 1 else ''} would take {case.cost(enough):g} times "
            f"and {enough * TENSORS * case.bytes:,} bytes (budget {budget:g}, {memory:,} bytes)"
        )
    if shadows:
        what = NAMES[shadows]
        spent = (
            f"for about {case.cost(shadows):g} times the time of a run of 1,000 steps or more "
            f"(budget {budget:g})"
        )
        why = _more(case, shadows, 1.0, room)
        return shadows, f"{size}: {what}, {spent}; {why}"
    raise HeldinError(
        f"heldin.EarlyStopping: with {size} no rule that estimates the test loss fits a budget of "
        f"{budget:g} and {memory:,} bytes (one shadow takes {case.cost(1):g} times the time and "
        f"{TENSORS * case.bytes:,} bytes); raise them, or use "
        "rule='evidence', which needs neither"
    )


def _more(case: _Case, shadows: int, share: float, room: int) -> str:
    """Say what a larger budget, or more memory, would buy."""
    wanted = case.wanted()
    if shadows == 5:
        return f"the best rule with fewer than {FEW} rows"
    if shadows >= wanted and share == 1.0:
        return "more would gain little"
    if room < wanted:
        return f"more do not fit; {NAMES[wanted]} take {wanted * TENSORS * case.bytes:,} bytes"
    return (
        f"budget={case.cost(wanted):g} buys {NAMES[wanted]}, whose test loss was "
        f"{case.regret(wanted):.3f} times the lowest, in place of {case.regret(shadows, share):.3f}"
        ", and a surer estimate"
    )


def _frugal(case: _Case, memory: int, light: bool) -> tuple[int, float, str]:
    """Return the best rule in the default budget of a general model: shadows, rows, and why."""
    room = memory // max(1, TENSORS * case.bytes)
    if not room:
        _chosen(case, case.cost(1), memory)  # refuses, and says what would fit
    options = [each for each in REGRETS if each[0] <= room and (light or each[1] == 1.0)]
    budget = max(GENERAL_BUDGET, SLACK * min(case.cost(*each) for each in options))
    cheap = [each for each in options if case.cost(*each) <= budget]
    shadows, share = min(cheap, key=lambda each: case.regret(*each))
    what = NAMES[shadows]
    if share < 1.0:
        what = "three light shadows, on a quarter of each batch"
    spent = f"for about {case.cost(shadows, share):g} times the time of a run of 1,000 steps"
    size = f"{case.rows} rows and {case.parameters} parameters"
    return shadows, share, f"{size}: {what}, {spent}; {_more(case, shadows, share, room)}"


def follow(inputs: RunInputs, rule: Auto | Folds | LeaveOneOut) -> PathStopping:
    """Begin to follow a run by a rule that estimates the test loss.

    >>> import torch
    >>> model = nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.randn(50, 3), torch.randn(50, 1)
    >>> follow(RunInputs(model, optimizer, nn.MSELoss(), data), Auto()).reason_chosen
    '50 rows and 4 parameters: five folds, for about 2.8 times the time of a run of ...'
    """
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
    if inputs.needs_replay or several:
        case = _case(inputs.model, inputs.optimizer, inputs.data, "replay")
    else:
        parameter = check_trainable("heldin.EarlyStopping", inputs.model)
        data = inputs.data
        if _may_stack(inputs.model) or not _is_read_by_rows(data):
            data = Rows.of(data, parameter.device, inputs.store)
        case = _case(inputs.model, inputs.optimizer, data, "auto")
        if case.engine != "replay":
            inputs = replace(inputs, data=data)  # which are read once
    if any(getattr(inputs, name) is not None for name in FOLDS_ONLY):
        case = replace(case, known=False)
    budget, share = rule.budget, 1.0
    if budget is None and case.engine == "replay":
        light = not several and inputs.time is None
        shadows, share, reason = _frugal(case, rule.memory, light)
    else:
        shadows, reason = _chosen(case, budget or BUDGET, rule.memory)
    if not shadows:
        followed: PathStopping = LeaveOneOutStopping(inputs, LeaveOneOut())
    else:
        engine: Any = "replay" if case.engine == "replay" else "auto"
        if inputs.sample_weight is not None:
            engine = "auto"  # only stacked shadows have weights
        folds = Folds(shadows=shadows, rows="all" if share == 1.0 else share, engine=engine)
        try:
            followed = FoldStopping(inputs, folds)
        except LossIsSum:  # which light shadows cannot be trained by
            shadows, _, reason = _frugal(case, rule.memory, light=False)
            followed = FoldStopping(inputs, replace(folds, shadows=shadows, rows="all"))
    followed.reason_chosen = reason
    return followed


def _case(model: nn.Module, optimizer: Optimizer, data: Any, engine: str) -> _Case:
    check_trainable("heldin.EarlyStopping", model)  # or there is none
    params = [p for p in model.parameters() if p.requires_grad]
    known = engine == "auto" and type(optimizer) in KNOWN
    if isinstance(data, Rows):
        count = len(data)
        plain = is_plain(model, data.inputs)
        engine = "dense" if plain else "vmap" if _gains_by_stack(model) else "replay"
    else:
        count, engine = RowSource(data, seed=0, records=False).count, "replay"
    return _Case(
        rows=count,
        parameters=sum(p.numel() for p in params),
        bytes=sum(p.numel() * p.element_size() for p in params),
        engine=engine,
        size=_size(model),
        known=known,
    )


def _may_stack(model: nn.Module) -> bool:
    """Return whether shadows of a model may be trained in one stack, whatever the rows are."""
    return _gains_by_stack(model) or is_plain(model, [torch.zeros(1, 1)])


def _gains_by_stack(model: nn.Module) -> bool:
    """Return whether it is worth mapping: BatchNorm cannot be, large models gain nothing by it."""
    normed = any(isinstance(module, BatchNorm) for module in model.modules())
    return not normed and _size(model) < len(SIZES)


def _is_read_by_rows(data: Any) -> bool:
    """Return whether the rows of data are read one by one, which may take long."""
    source = data.dataset if isinstance(data, DataLoader) else data
    fixed = isinstance(source, (IterableDataset, TensorDataset))
    return isinstance(source, Dataset) and not fixed


def _size(model: nn.Module) -> int:
    """Which column of `COSTS` a model belongs to: how much of a step is arithmetic."""
    if any(isinstance(module, ARITHMETIC) for module in model.modules()):
        return len(SIZES)
    parameters = sum(p.numel() for p in model.parameters())
    return sum(parameters > size for size in SIZES)
