"""Which parameters a run trains, and that these stay the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from heldin._private_torch import version_of
from heldin.errors import HeldinError

__all__ = ["ParameterGuard"]

ANEW = "make a new stopping object when the parameters change"


class ParameterGuard:
    """Refuses a step that trains other parameters than those of which shadows have copies.

    All others are shared with the model: were they trained, by another optimiser for instance,
    shadows would get to know rows that they must not see.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, state: Sequence[Any] = ()) -> None:
        self._optimizer = optimizer
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._trained = _trained(optimizer)
        mine = {id(p) for group in self._trained for p in group}
        for each in state:  # exchanged as a whole
            if isinstance(each, nn.Module):
                mine |= {id(p) for p in each.parameters()}
            elif isinstance(each, Optimizer):
                mine |= {id(p) for group in each.param_groups for p in group["params"]}
        self._shared = [(n, p) for n, p in model.named_parameters() if id(p) not in mine]
        self._versions: list[int] | None = None

    def check(self) -> None:
        """Refuse what has changed since the last time."""
        self._check_groups()
        if not self._shared:
            return
        versions = [version_of(p) for _, p in self._shared]
        before, self._versions = self._versions, versions
        if before is None or before == versions:
            return
        name = next(
            name
            for (name, _), old, new in zip(self._shared, before, versions, strict=True)
            if old != new
        )
        raise HeldinError(
            f"step: parameter {name!r} was changed, but not by the optimiser that was given, so "
            "that shadows share it and get to know rows that they must not see. Is it trained by a "
            "second optimiser, or does it follow the others as a moving average? Put all "
            "parameters into one optimiser (in groups), or use rule='evidence'"
        )

    def _check_groups(self) -> None:
        now = _trained(self._optimizer)
        if len(now) != len(self._trained):
            raise HeldinError(
                "step: the optimiser has got another parameter group, which the shadows do not "
                f"have; {ANEW}"
            )
        for before, after in zip(self._trained, now, strict=True):
            if [*map(id, before)] == [*map(id, after)]:
                continue
            mine, theirs = {id(p) for p in before}, {id(p) for p in after}
            odd = next(iter(mine ^ theirs), None)
            name, how = self._names.get(odd or 0), "frozen" if odd in mine else "unfrozen or added"
            raise HeldinError(
                f"step: parameter {name!r} was {how} after the shadows were made; {ANEW}"
            )

    def renew(self) -> None:
        """Weights were put into the model on purpose."""
        self._versions = None


def _trained(optimizer: Optimizer) -> list[list[Tensor]]:
    return [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
