"""An optimiser that wraps another one, for schedulers, scalers and checkpoints."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from heldin._private_torch import adopt_hooks
from heldin.errors import HeldinError

from .callback_hints import PlainLoopOnly

__all__ = ["OptimizerWrapper"]


class OptimizerWrapper(Optimizer, PlainLoopOnly):
    """An optimiser with separate hooks around `step` that delegates the rest to another.

    Attributes:
        optimizer: the wrapped optimiser.
    """

    optimizer: Optimizer

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            raise HeldinError(
                f"{name}: expected a torch.optim.Optimizer to wrap, got {type(optimizer).__name__}"
            )
        self.optimizer = optimizer
        adopt_hooks(self, optimizer)  # in place of Optimizer.__init__

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The wrapped optimiser's parameter groups."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The wrapped optimiser's state."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimiser's defaults."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        # Public names only: code that probes for private names would find abilities (such as
        # unscaling gradients) that bypass this wrapper.
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not hasattr(self.optimizer, name):
            return PlainLoopOnly.__getattr__(self, name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        name = type(self).__name__
        raise HeldinError(
            f"{name} cannot be pickled or copied, as it watches a model; save its state_dict()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad(set_to_none)
