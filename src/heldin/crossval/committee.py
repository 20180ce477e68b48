"""An average of models as one model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from heldin.errors import HeldinError
from heldin.state.schema import shown

__all__ = ["Committee"]

AVERAGES = ("outputs", "softmax", "sigmoid")


class Committee(nn.Module):
    """A model that averages the outputs of its members.

    Classifiers are averaged by their probabilities, not by their logits: a member that is sure of
    the wrong class then cannot overrule the others. The result is a logit again (the logarithm of
    the mean probability, the log odds for "sigmoid"), so that the same loss and metrics apply.

    Args:
        models: the members. The committee shares their parameters.
        average: "outputs" (regression), "softmax" (logits of classes) or "sigmoid" (one logit for
            yes or no, or for each of several labels).
        dim: dimension of the classes, for "softmax".
        temperature: that divides the logits of every member before they are averaged.

    >>> _ = torch.manual_seed(0)
    >>> members = [nn.Linear(3, 2) for _ in range(5)]
    >>> committee = Committee(members, average="softmax")
    >>> x = torch.randn(4, 3)
    >>> mean = torch.stack([model(x).softmax(-1) for model in members]).mean(0)
    >>> torch.allclose(committee(x).softmax(-1), mean)
    True
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        average: str = "outputs",
        dim: int = -1,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(models)
        if not len(self.members):
            raise HeldinError("heldin.Committee: models is empty; give at least one model")
        if average not in AVERAGES:
            raise HeldinError(
                f"heldin.Committee: average must be one of {', '.join(map(repr, AVERAGES))}, got "
                f"{shown(average)}"
            )
        self.average, self.dim, self.temperature = average, dim, temperature

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the average of the members' outputs; those with `.logits` are taken by these."""
        outputs = torch.stack([_tensor(model(*args, **kwargs)) for model in self.members])
        if self.temperature != 1:
            outputs = outputs / self.temperature
        if self.average == "outputs":
            return outputs.mean(0)
        if self.average == "sigmoid":
            return logsigmoid(outputs).logsumexp(0) - logsigmoid(-outputs).logsumexp(0)
        dim = self.dim if self.dim < 0 else self.dim + 1
        if outputs.shape[dim] == 1:
            raise HeldinError(
                'heldin.Committee: average="softmax" of a single class is always 1; use "sigmoid" '
                "for models with one logit"
            )
        return outputs.log_softmax(dim).logsumexp(0) - math.log(len(self.members))

    def extra_repr(self) -> str:
        """Return the way of averaging."""
        return f"average={self.average!r}"


def _tensor(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise HeldinError(
            f"heldin.Committee: a member returned {shown(output)}; members must return a tensor or "
            "an object with logits"
        )
    return logits
