"""What a rule asks of its shadows, however they are trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from heldin.crossval import OutOfFold
from heldin.loop.events import OptimizerStep
from heldin.loop.loaders import LoaderRecorder

from .light import RowDraw
from .outputs import OutputRecipe
from .step_check import StepCheck

__all__ = ["RESULTS", "Announced", "ShadowBackend", "release"]

Announced = Sequence[tuple[Any, Tensor | None]]  # batches and row numbers; either may be None

RESULTS = (
    "engine", "copies", "held", "same_loss", "inside", "level_count", "draw", "label", "_steps",
)  # fmt: skip


class ShadowBackend(Protocol):
    """K shadows that follow the steps of a loop, and the losses of the rows that they miss.

    Attributes:
        takes_batches: whether batches can be announced, or row numbers only.
        copies: number of shadows.
        label: (n,) the shadow that is tested on a row; -1: none.
        held: number of rows evaluated at a check.
        level_count: number of rows that `levels` evaluates.
        same_loss: whether the estimated loss is the one that is trained.
        draw: draws the rows of light shadows.
    """

    takes_batches: bool
    copies: int
    label: Tensor
    held: int
    level_count: int
    same_loss: bool
    draw: RowDraw

    @property
    def engine(self) -> str:
        """How the shadows are run: "dense", "vmap" or "replay"."""

    @property
    def recorder(self) -> LoaderRecorder | None:
        """The rows that the loop's loader has drawn, if data is one."""

    @property
    def check(self) -> StepCheck:
        """Compares the loop's steps with those that the shadows take."""

    def follow(self, step: OptimizerStep, announced: Announced) -> int:
        """Repeat a step of the user's optimiser for every shadow; return its number of rows."""

    def restart(self) -> None:
        """Let all shadows start again, on all rows that they may see."""

    def held_out(self) -> Tensor:
        """Return the losses of held-out rows, each on the shadow that has not seen it."""

    def levels(self) -> tuple[float, float]:
        """Return the mean loss of light shadows on training rows, and the model's on the same."""

    def training_loss(self) -> float:
        """Return the training loss that is shown beside the estimate."""

    def row_weights(self, rows: Tensor) -> Tensor | None:
        """Return the weights of rows in the loss; None: all are equal."""

    def keep_outputs(self, recipe: OutputRecipe | None) -> None:
        """Keep the outputs of held-out rows at every later check; None: no longer."""

    def held_out_outputs(self) -> OutOfFold:
        """Return the outputs of the rows at the last `held_out()`."""

    def example(self) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
        """Return a batch of a few rows, and the function that predicts them."""

    def trial(self) -> AbstractContextManager[None]:
        """Return a context in which calls of the model leave nothing behind."""

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights that it is evaluated with."""

    def members(self) -> list[dict[str, Tensor]]:
        """Return copies of the trained weights and the buffers of every shadow, by name."""

    def weights_of(self, number: int) -> dict[str, Tensor]:
        """Return the trained weights of a shadow, by name."""

    def describe_rows(self) -> str:
        """Say how batches are matched to rows."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""

    def close(self) -> None:
        """Leave the loaders as they were, and release all but `RESULTS`."""


def release(closed: object, kept: tuple[str, ...] = RESULTS) -> None:
    """Drop all attributes of a closed object but those that results are computed from."""
    for name in [name for name in vars(closed) if name not in kept]:
        del vars(closed)[name]
