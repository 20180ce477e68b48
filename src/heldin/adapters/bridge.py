"""A framework's own optimiser in the shape of PyTorch's, for the rule and for its shadows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

__all__ = ["Bridge"]


class Bridge(Optimizer):
    """Of the model: tells when the framework's optimiser has stepped. Of a shadow: steps itself.

    A subclass for each run knows how another optimiser of the same kind is made.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> kind = Bridge.to(lambda groups, state: lambda: groups[0]["params"][0].data.mul_(2))
    >>> ours, shadows = kind([{"params": [weight], "lr": 0.1}]), kind([{"params": [weight]}])
    >>> ours.idle = True
    >>> ours.step()
    >>> shadows.step()
    >>> weight.item()
    2.0
    """

    make: ClassVar[Any]

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.idle = False
        self._inner: Callable[[], Any] | None = None
        self._made_for: Any = None

    @classmethod
    def to(cls, make: Callable[[Sequence[dict[str, Any]], Any], Callable[[], Any]]) -> type[Bridge]:
        """The kind for a run.

        Args:
            make: of parameter groups and the state by parameter, a function that takes a step with
                the settings that the groups have then.
        """
        return type("Bridge", (cls,), {"make": staticmethod(make)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step, unless the framework has taken it."""
        if self.idle:
            return
        if self._inner is None or self._made_for is not self.state:
            self._inner = self.make(self.param_groups, self.state)
            self._made_for = self.state  # another one after a state was loaded
        self._inner()
