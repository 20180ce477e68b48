"""What a run is trained on, and how: what `heldin.EarlyStopping` was told about data and loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from heldin.distributed.ranks import ProcessGroup
from heldin.loop.items import ItemStore
from heldin.shadows.held_out import BatchLoss
from heldin.shadows.replayed import Clip

from .outcome import OutputOptions
from .policy import PATIENCE, Patience

__all__ = ["RunInputs"]


@dataclass(frozen=True, eq=False)
class RunInputs:
    """The model, its optimiser, the loss, the rows, and what the loop does with them.

    The fields are arguments of `heldin.EarlyStopping`, which documents them.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Any = None
    data: Any = None
    batch_loss: BatchLoss | None = None
    eval_loss: BatchLoss | None = None
    eval_data: Any = None
    clip: Clip | None = None
    groups: Any = None
    stratify: Any = None
    time: Any = None
    sample_weight: Tensor | None = None
    patience: Patience | int | None = PATIENCE
    seed: int = 0
    process_group: ProcessGroup = "auto"
    train_step: Callable[[Any], Any] | None = None
    state: Sequence[Any] = ()
    averaged_model: nn.Module | None = None
    outputs: OutputOptions | None = None  # None: outputs of held-out rows are not kept
    resumes: bool = False  # whether the state of a run is loaded next
    store: ItemStore = field(default_factory=ItemStore)  # of `data`, while the rule is made

    @property
    def is_grouped(self) -> bool:
        """Whether it is known which rows belong together, or follow each other."""
        return self.groups is not None or self.time is not None

    @property
    def needs_replay(self) -> bool:
        """Whether shadows cannot be stacked, whatever the model is."""
        return self.batch_loss is not None or self.train_step is not None
