"""The stopping rule for a model, its data and what it may cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from heldin._private_torch import BatchNorm
from heldin.errors import HeldinError
from heldin.rules.ranks import groups_of

from .base import PathStopping
from .dense import is_plain
from .engines import check_engine
from .folds import FoldStopping, ShadowStopping
from .leave_one_out import LeaveOneOutStopping
from .losses import LossFunction
from .models import first_trained
from .optimizers import KNOWN
from .rows import Rows
from .separate import BatchLoss
from .source import Source

__all__ = ["ESTIMATED_RULES", "stopping"]

RuleName = Literal["auto", "folds", "shadow", "leave-one-out"]
# A new one joins here, and nowhere else.
ESTIMATED_RULES: dict[str, Callable[..., PathStopping]] = {
    rule.name: rule for rule in (FoldStopping, ShadowStopping, LeaveOneOutStopping)
}

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
    "loop": ((3.0, 0.85), (1.8, 1.4), (1.65, 1.42)),
    "copies": ((2.2, 1.22), (1.75, 1.2), (1.45, 1.05)),
}
BUDGET, MEMORY = 6.0, 2**30  # defaults of "auto": times a plain run, bytes of the shadows
PROBES = 5e7  # samples^2 x parameters up to which leave-one-out costs as said below
LEAVE_ONE_OUT = 2.0  # runs, in runs of 1,000 steps and more


@dataclass(frozen=True)
class _Case:
    """What the choice depends on."""

    rows: int
    parameters: int
    bytes: int
    engine: str  # that shadows are run by
    size: int  # 0, 1 or 2: small, medium or large in `COSTS`
    known: bool = False  # an optimiser whose steps leave-one-out can follow, on tensors

    def cost(self, shadows: int) -> float:
        """Time of a run with so many shadows, in runs without: see `COSTS`."""
        base, each = COSTS[self.engine][self.size]
        return round(base + each * shadows, 1)

    def wanted(self) -> int:
        """How many shadows are worth their time."""
        return 5 if self.rows < FEW else 2 if self.rows < MANY else 1


def _chosen(case: _Case, budget: float, memory: int) -> tuple[str, int, str]:
    """A rule, its number of shadows, and why."""
    size = f"{case.rows} rows and {case.parameters} parameters"
    room = memory // max(1, TENSORS * case.bytes)
    shadows = max(
        (k for k in range(1, case.wanted() + 1) if k <= room and case.cost(k) <= budget), default=0
    )
    followed = case.known and float(min(case.rows, 1024)) ** 2 * case.parameters <= PROBES
    followed = followed and budget >= LEAVE_ONE_OUT
    enough = min(3, case.wanted())
    if followed and shadows < enough:
        return (
            "leave-one-out",
            0,
            (
                f"{size}: leave-one-out, for about {LEAVE_ONE_OUT:g} times the time of a run; "
                f"{enough} shadow{'s' if enough > 1 else ''} would take {case.cost(enough):g} "
                f"times and {enough * TENSORS * case.bytes:,} bytes (budget {budget:g}, "
                f"{memory:,} bytes)"
            ),
        )
    if shadows:
        what = {1: "one shadow", 5: "five folds"}.get(shadows, f"{shadows} of five folds")
        spent = (
            f"for about {case.cost(shadows):g} times the time of a run of 1,000 steps or more "
            f"(budget {budget:g})"
        )
        why = "more would gain little" if shadows == case.wanted() else "more do not fit"
        if shadows == 5:
            why = f"the best rule with fewer than {FEW} rows"
        return ("shadow" if shadows == 1 else "folds"), shadows, f"{size}: {what}, {spent}; {why}"
    raise HeldinError(
        f"heldin.stopping: with {size} no rule that estimates the test loss fits a budget of "
        f"{budget:g} and {memory:,} bytes (one shadow takes {case.cost(1):g} times the time and "
        f"{TENSORS * case.bytes:,} bytes); raise them, or use heldin.EvidenceStopping(model, "
        "window=steps of an epoch), which needs neither"
    )


def stopping(
    rule: RuleName,
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFunction | None = None,
    data: Any = None,
    *,
    budget: float | None = None,
    memory: int | None = None,
    batch_loss: BatchLoss | None = None,
    **options: Any,
) -> PathStopping:
    """A stopping rule by name, or the one that suits the case.

    The object has the same interface whatever was chosen: `step()` after `optimizer.step()`,
    `restore()`, `estimate`, and so on.

    Args:
        rule: "folds", "shadow", "leave-one-out", or "auto": as many of five folds as the budget
            allows, but two from 1,000 rows on and one shadow from 10,000 rows on; leave-one-out
            where fewer than three (or those two, or that one) are affordable and it costs two runs
            at most: small networks on few rows, with loss_fn.
        model, optimizer, loss_fn, data: see `heldin.FoldStopping`.
        budget: for "auto" only: how many times the time of a plain run training may take (default:
            6), in runs of 1,000 steps or more; shorter ones also pay for the making of the shadows.
        memory: for "auto" only: bytes that the shadows may take (default: 1 GiB).
        batch_loss: (model, batch) -> loss, in place of loss_fn, for any model and batch.
        options: further arguments of the class.

    Returns:
        The object; `reason_chosen` says why it is what it is.

    >>> import heldin, torch
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = torch.randn(50, 3), torch.randn(50, 1)
    >>> chosen = heldin.stopping("auto", model, optimizer, torch.nn.MSELoss(), data)
    >>> type(chosen).__name__
    'FoldStopping'
    >>> chosen.reason_chosen
    '50 rows and 4 parameters: five folds, for about 2.8 times the time of a run of ...'
    """
    _check_arguments(rule, model, optimizer, data, budget, memory)
    budget, memory = budget or BUDGET, memory or MEMORY
    reason, chosen = f"asked for {rule!r}", str(rule)
    if batch_loss is not None:
        if rule == "leave-one-out":
            raise HeldinError(
                "heldin.stopping: leave-one-out needs tensors and loss_fn, not batch_loss; use "
                "'folds' or 'shadow'"
            )
        options["batch_loss"] = batch_loss
    _check_options(rule, options)
    if rule == "auto":
        engine = options.get("engine", "auto")
        check_engine(engine)
        together = bool(groups_of(model, options.get("process_group", "auto")))
        if batch_loss is not None or together or engine == "swap":
            engine = "copies"
        if engine != "copies":
            first_trained("heldin.stopping", model)  # or there is none
            data = Rows.of(data, next(p for p in model.parameters() if p.requires_grad).device)
        case = _case(model, optimizer, data, engine)
        chosen, shadows, reason = _chosen(case, budget, memory)
        if chosen == "shadow" and options.keys() & {"folds", "stratify"}:
            chosen = "folds"  # one of them
        if chosen == "folds" and (shadows != 5 or "folds" in options):
            given = options.get("folds", 5)
            number = given if isinstance(given, int) else len(set(torch.as_tensor(given).tolist()))
            options["shadows"] = min(shadows, number)
        if chosen == "leave-one-out" and options.get("groups") is not None:
            raise HeldinError(
                f"heldin.stopping: leave-one-out takes every row for itself and cannot keep "
                f"groups, and more does not fit ({reason}); raise budget or memory"
            )
    made = ESTIMATED_RULES[chosen](model, optimizer, loss_fn, data, **options)
    made.reason_chosen = reason
    return made


def _check_arguments(
    rule: Any, model: Any, optimizer: Any, data: Any, budget: Any, memory: Any
) -> None:
    """What is easily mixed up or forgotten."""
    known = ", ".join(map(repr, ESTIMATED_RULES))
    if not isinstance(rule, str) or rule not in ("auto", *ESTIMATED_RULES):
        got = repr(rule) if isinstance(rule, str) else f"a {type(rule).__name__}"
        raise HeldinError(
            f"heldin.stopping: the first argument is the name of a rule, 'auto', {known}; got {got}"
        )
    for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        inner = getattr(value, "optimizer", None) if kind is Optimizer else None
        if not isinstance(value, kind) and not isinstance(inner, kind):
            raise HeldinError(
                f"heldin.stopping: {name} must be a torch {kind.__name__}, got a "
                f"{type(value).__name__}; the order is stopping(rule, model, optimizer, loss_fn, "
                "data)"
            )
    if data is None:
        raise HeldinError(
            "heldin.stopping: data is missing: the tensors (x, y), the Dataset or the DataLoader "
            "that the model is trained on"
        )
    for name, number in (("budget", budget), ("memory", memory)):
        if number is None:
            continue
        if rule != "auto":
            raise HeldinError(
                f"heldin.stopping: {name} is for rule='auto', which chooses by it, and would be "
                f"ignored with {rule!r}; leave it out"
            )
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
            raise HeldinError(f"heldin.stopping: {name} must be a number above 0, got {number!r}")


def _check_options(rule: str, options: Mapping[str, Any]) -> None:
    """What is easily misspelt."""
    allowed: set[str] = set()
    for each in ESTIMATED_RULES.values() if rule == "auto" else (ESTIMATED_RULES[rule],):
        allowed |= inspect.signature(each).parameters.keys()
    for name in options.keys() - allowed:
        near = get_close_matches(name, [*allowed, "budget", "memory"], 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {sorted(allowed)}"
        raise HeldinError(f"heldin.stopping: unknown argument {name!r}{hint}")


def _case(model: nn.Module, optimizer: Optimizer, data: Any, engine: str) -> _Case:
    first_trained("heldin.stopping", model)  # or there is none
    params = [p for p in model.parameters() if p.requires_grad]
    if engine == "copies":
        count, known = Source(data, seed=0, listen=False).count, False
    else:
        count, known = len(data), type(optimizer) in KNOWN
        if engine == "auto" and is_plain(model, data.inputs):
            engine = "dense"
        elif engine == "auto":  # the copies of a BatchNorm run one after the other
            normed = any(isinstance(module, BatchNorm) for module in model.modules())
            engine = "loop" if normed else "vmap"
    return _Case(
        rows=count,
        parameters=sum(p.numel() for p in params),
        bytes=sum(p.numel() * p.element_size() for p in params),
        engine=engine,
        size=_size(model),
        known=known,
    )


def _size(model: nn.Module) -> int:
    """Which column of `COSTS` a model belongs to: how much of a step is arithmetic."""
    if any(isinstance(module, ARITHMETIC) for module in model.modules()):
        return len(SIZES)
    parameters = sum(p.numel() for p in model.parameters())
    return sum(parameters > size for size in SIZES)
