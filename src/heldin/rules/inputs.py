"""What a run is trained on, and how: what `heldin.EarlyStopping` was told about data and loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from heldin.distributed.ranks import ProcessGroup
from heldin.errors import HeldinError
from heldin.loop.items import ItemStore
from heldin.shadows.held_out import BatchLoss
from heldin.shadows.replayed import Clip
from heldin.state.schema import check_int

from .outcome import OutputOptions
from .policy import PATIENCE, Patience

__all__ = ["RunInputs"]


@dataclass(frozen=True, eq=False)
class RunInputs:
    """The model, its optimiser, the loss, the rows, and what the loop does with them, checked.

    Fields without a comment are arguments of `heldin.EarlyStopping`, which documents them.
    """

    model: Any
    optimizer: Any
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
    patience: Patience | int | str | None = "default"
    finish: bool | None = None
    seed: int = 0
    process_group: ProcessGroup = "auto"
    train_step: Callable[[Any], Any] | None = None
    state: Sequence[Any] = ()
    averaged_model: nn.Module | None = None
    on_check: Callable[[], Any] | None = None  # called after every check of the loop
    schedule: str | None = None  # of learning rates, of a framework, if it has a fixed end
    outputs: OutputOptions | None = None  # None: outputs of held-out rows are not kept
    owner: str = "heldin.EarlyStopping"  # by which messages name the run
    resumes: bool = False  # whether the state of a run is loaded next
    store: ItemStore = field(default_factory=ItemStore)  # of `data`, while the rule is made

    def __post_init__(self) -> None:
        check_int(self.owner, "seed", self.seed, 0)
        self._check_patience()
        for name in ("loss_fn", "batch_loss", "eval_loss"):
            function = getattr(self, name)
            if isinstance(function, type):
                raise HeldinError(
                    f"{self.owner}: {name} must be a function, got the class {function.__name__}; "
                    f"make an object of it: {name}={function.__name__}()"
                )
        for name in ("batch_loss", "eval_loss"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise HeldinError(
                    f"{self.owner}: {name} must be a function of (model, batch), got {function!r}"
                )
        self._check_train_step()

    def _check_patience(self) -> None:
        owner, patience, finish = self.owner, self.patience, self.finish
        if finish not in (None, True, False):
            raise HeldinError(f"{owner}: finish must be True, False or None, got {finish!r}")
        if finish and patience not in ("default", None):
            raise HeldinError(f"{owner}: patience has no effect with finish=True; leave it out")
        whole = isinstance(patience, int) and not isinstance(patience, bool) and patience >= 1
        if not whole and patience not in ("default", None) and not isinstance(patience, Patience):
            raise HeldinError(
                f"{owner}: patience must be a number of epochs >= 1, a heldin.Patience, or None to "
                f"never stop, got {patience!r}"
            )

    def _check_train_step(self) -> None:
        owner, state, average = self.owner, self.state, self.averaged_model
        if self.train_step is not None and not callable(self.train_step):
            raise HeldinError(
                f"{owner}: train_step must be a function of a batch, got {self.train_step!r}"
            )
        if not isinstance(state, (list, tuple)):
            raise HeldinError(
                f"{owner}: state must be a list of objects, got {type(state).__name__}"
            )
        for each in state:
            if not isinstance(each, nn.Module) and not hasattr(each, "load_state_dict"):
                raise HeldinError(
                    f"{owner}: state must hold modules, or objects with state_dict and "
                    f"load_state_dict, got a {type(each).__name__}"
                )
        if average is not None and not isinstance(average, nn.Module):
            raise HeldinError(
                f"{owner}: averaged_model must be a module, such as "
                f"torch.optim.swa_utils.AveragedModel, got a {type(average).__name__}"
            )

    def check_loss(self) -> None:
        """Refuse two losses, and none."""
        if (self.loss_fn is None) == (self.batch_loss is None):
            raise HeldinError(
                f"{self.owner}: give either loss_fn, a function of (outputs, targets), or "
                "batch_loss, a function of (model, batch)"
            )

    @property
    def stop_patience(self) -> Patience | int | None:
        """The patience, the usual one if nothing was said; None: never stop."""
        if self.finish:
            return None
        return PATIENCE if isinstance(self.patience, str) else self.patience

    @property
    def is_grouped(self) -> bool:
        """Whether it is known which rows belong together, or follow each other."""
        return self.groups is not None or self.time is not None

    @property
    def needs_replay(self) -> bool:
        """Whether shadows cannot be stacked, whatever the model is."""
        return self.batch_loss is not None or self.train_step is not None
