"""The stopping rule for a model, its data and what it may cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from heldin.errors import HeldinError

from .base import PathStopping
from .engines import is_plain
from .folds import FoldStopping, ShadowStopping
from .leave_one_out import KNOWN, LeaveOneOutStopping
from .losses import LossFunction
from .rows import Rows

__all__ = ["stopping"]

RuleName = Literal["auto", "folds", "shadow", "leave-one-out"]
RULES: dict[str, Callable[..., PathStopping]] = {
    "folds": FoldStopping,
    "shadow": ShadowStopping,
    "leave-one-out": LeaveOneOutStopping,
}

FEW = 1000  # rows below which five folds are worth more than one shadow (docs/which-rule.md)
SMALL = 20_000  # parameters up to which calls, not arithmetic, are what a step costs
TENSORS = 4  # of the size of the weights, for each copy: weights, gradients, two moments
PROBES = 2e9  # samples^2 x parameters up to which a check of leave-one-out is a matter of seconds


@dataclass(frozen=True)
class _Case:
    """What the choice depends on."""

    rows: int
    parameters: int
    bytes: int
    plain: bool  # a network that can be stacked by hand
    known: bool  # an optimiser whose steps leave-one-out can follow

    def cost(self, rule: str) -> float:
        """Time of a training run with the rule, in runs without (benchmarks/folds.py)."""
        small = self.parameters <= SMALL
        if rule == "folds":
            return (2.6 if self.plain else 4.5) if small else 6.0
        if rule == "shadow":
            return 2.2 if self.plain else 2.7
        return 1.5


def _chosen(case: _Case, budget: float, memory: int) -> tuple[str, str]:
    """A rule, and why."""
    size = f"{case.rows} rows and {case.parameters} parameters"
    fits = {"folds": 5, "shadow": 1}

    def affordable(rule: str) -> bool:
        room = fits[rule] * TENSORS * case.bytes <= memory
        return room and case.cost(rule) <= budget

    if case.rows < FEW and affordable("folds"):
        return "folds", (
            f"{size}: with fewer than {FEW} rows five folds lose least, for about "
            f"{case.cost('folds'):g} times the time (budget {budget:g})"
        )
    followed = case.known and float(min(case.rows, 1024)) ** 2 * case.parameters <= PROBES
    if case.rows < FEW and followed and case.cost("leave-one-out") <= budget:
        return "leave-one-out", (
            f"{size}: five folds would cost {case.cost('folds'):g} times the time or "
            f"{5 * TENSORS * case.bytes:,} bytes, more than the budget of {budget:g} or the memory"
        )
    if affordable("shadow"):
        return "shadow", (
            f"{size}: one shadow comes within a percent or two of five folds, for about "
            f"{case.cost('shadow'):g} times the time (budget {budget:g})"
        )
    if followed and case.cost("leave-one-out") <= budget:
        return "leave-one-out", (
            f"{size}: a second model would cost more than the budget of {budget:g} or the memory"
        )
    raise HeldinError(
        f"heldin.stopping: with {size} no rule that estimates the test loss fits a budget of "
        f"{budget:g} and {memory:,} bytes; raise them, or use heldin.EvidenceStopping(model, "
        "window=steps of an epoch), which needs neither"
    )


def stopping(
    rule: RuleName,
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFunction,
    data: Any,
    *,
    budget: float = 6.0,
    memory: int = 2**30,
    **options: Any,
) -> PathStopping:
    """A stopping rule by name, or the one that suits the case.

    The object has the same interface whatever was chosen: `step()` after `optimizer.step()`,
    `restore()`, `estimate`, and so on.

    Args:
        rule: "folds", "shadow", "leave-one-out", or "auto": five folds for fewer than 1,000 rows,
            one shadow above, leave-one-out where no second model is affordable.
        model, optimizer, loss_fn, data: see `heldin.FoldStopping`.
        budget: for "auto": how many times the time of a plain run training may take.
        memory: for "auto": bytes that the shadows may take.
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
    '50 rows and 4 parameters: with fewer than 1000 rows five folds lose least, ...'
    """
    if rule != "auto" and rule not in RULES:
        raise HeldinError(
            f"heldin.stopping: expected 'auto', {', '.join(map(repr, RULES))}, got {rule!r}"
        )
    reason = f"asked for {rule!r}"
    if rule == "auto":
        params = [p for p in model.parameters() if p.requires_grad]
        if not params:
            raise HeldinError(
                "heldin.stopping: the model has no parameter that requires a gradient; unfreeze at "
                "least one"
            )
        rows = Rows.of(data, params[0].device)
        case = _Case(
            rows=len(rows),
            parameters=sum(p.numel() for p in params),
            bytes=sum(p.numel() * p.element_size() for p in params),
            plain=is_plain(model, rows.inputs),
            known=type(optimizer) in KNOWN,
        )
        chosen, reason = _chosen(case, budget, memory)
    else:
        chosen = rule
    made = RULES[chosen](model, optimizer, loss_fn, data, **options)
    made.reason_chosen = reason
    return made
