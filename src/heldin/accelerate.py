"""heldin in plain loops with an `Accelerator`: `AutoStopping`, or `EvidenceStopping`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from heldin.capture.arguments import BatchDim
from heldin.capture.collector import BUDGET, Estimator
from heldin.criterion.evidence import Across, Correction, Dead, Groups
from heldin.rules.evidence import EvidenceStopping as Stopping

from .adapters.session import StoppingSession, flat_metrics, missing_framework
from .adapters.settings import chosen, refuse_stranger, spelled_out
from .rules.ranks import ProcessGroup

try:
    from accelerate import Accelerator

    from .adapters.auto_accelerate import AutoStopping, Registered
except ImportError as error:
    raise missing_framework("Accelerate", "accelerate", error) from error

__all__ = ["AutoStopping", "EvidenceStopping"]

NAME = "heldin.accelerate.EvidenceStopping"


class EvidenceStopping:
    """Stops a loop by evidence, all its processes in the same step.

    Call `step()` after `accelerator.backward(loss)` and before `optimizer.step()`. While gradients
    are accumulated it returns False. The state is in the accelerator's checkpoints
    (`save_state`, `load_state`).

    Args:
        accelerator: the accelerator of the loop.
        model: the model, prepared or not.
        patience: number of consecutive checks that must ask for a stop.
        groups, smoothing and the others: see `heldin.EvidenceStopping`.

    Attributes:
        stopping: the `heldin.EvidenceStopping` behind it, with its history.

    >>> import torch
    >>> from accelerate import Accelerator
    >>> from heldin.accelerate import EvidenceStopping
    >>> accelerator = Accelerator(cpu=True)
    >>> model = torch.nn.Linear(4, 1)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> x = torch.randn(20, 4)
    >>> with EvidenceStopping(accelerator, model) as stopping:
    ...     for step in range(100):
    ...         with accelerator.accumulate(model):
    ...             accelerator.backward((model(x) - 1 - torch.randn(20, 1)).square().mean())
    ...             if stopping.step():
    ...                 break
    ...             optimizer.step()
    ...             optimizer.zero_grad()
    >>> sorted(stopping.metrics())
    ['heldin/armed', 'heldin/count', 'heldin/criterion', 'heldin/raw', 'heldin/should_stop']
    """

    @spelled_out
    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        patience: int = 1,
        *,
        groups: Groups = "tensor",
        smoothing: float = 0.9,
        window: int = 1,
        warmup: int = 0,
        every: int = 1,
        arming: float | None = 0.5,
        across: Across = "median",
        weighted: bool = True,
        start: float | None = None,
        correction: Correction = None,
        dead: Dead = "out",
        reduction: Literal["mean", "sum"] = "mean",
        estimator: Estimator = "sampled",
        budget: int = BUDGET,
        seed: int = 0,
        batch_dim: BatchDim = 0,
        parameters: Callable[[str], bool] | None = None,
        process_group: ProcessGroup = "auto",
        history: int = 4096,
    ) -> None:
        refuse_stranger(NAME, "accelerator", accelerator, Accelerator, "the Accelerator")
        refuse_stranger(NAME, "model", model, nn.Module, "the model that is trained")
        self._run = StoppingSession(NAME, chosen(locals()))
        self._accelerator = accelerator
        self.stopping: Stopping = self._run.begin(accelerator.unwrap_model(model))
        accelerator.register_for_checkpointing(Registered(self))

    def step(self) -> bool:
        """Close a training step; True if training should stop, in all processes alike."""
        if not self._accelerator.sync_gradients:
            return False
        asked = torch.tensor(int(self.stopping.step()), device=self._accelerator.device)
        return bool(self._accelerator.reduce(asked, reduction="sum").item() > 0)

    def metrics(self, groups: bool = False) -> dict[str, float]:
        """For `accelerator.log`.

        Args:
            groups: also the value of each group of parameters.
        """
        return flat_metrics(self.stopping, groups)

    def state_dict(self) -> dict[str, Any]:
        """For the accelerator's checkpoints."""
        return self._run.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._run.load_state_dict(state_dict)

    def close(self) -> None:
        """Watch no more. What was found stays readable."""
        self._run.end()

    def __enter__(self) -> EvidenceStopping:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
