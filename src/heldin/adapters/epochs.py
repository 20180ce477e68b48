"""Notices a rule that looks at a model which nobody trains, or that does not stop for long."""

from __future__ import annotations

import warnings

from heldin.errors import HeldinWarning, more
from heldin.rules.evidence import EvidenceStopping
from heldin.rules.outlook import INSTEAD

__all__ = ["Epochs"]

MANY = 200  # epochs after which to doubt that evidence works here


class Epochs:
    """Warns of a whole epoch without a backward pass, and of very many epochs without a stop.

    The framework's adapter tells of the beginning and the end of each epoch, and of its batches.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._batches = 0
        self._before = (0, 0, 0)
        self._told = False
        self._epochs = 0

    def reset(self) -> None:
        """A run begins."""
        self._told, self._epochs = False, 0

    def begin(self, stopping: EvidenceStopping | None) -> None:
        """An epoch begins."""
        self._batches = 0
        if stopping is not None:
            self._before = stopping.counts

    def batch(self) -> None:
        """A batch of it was trained on."""
        self._batches += 1

    def end(self, stopping: EvidenceStopping | None) -> None:
        """It is over."""
        if stopping is None or not stopping.watching or not self._batches:
            return
        self._epochs += 1
        if self._epochs == MANY and stopping.counts[0] >= 10 * MANY and not stopping.should_stop:
            warnings.warn(
                f"{self._owner}: {MANY} epochs have passed and the criterion is "
                f"{stopping.criterion:.3g}. If the training loss does not fall any more, evidence "
                "will hardly stop this run, as on tables with rare classes or many columns. "
                f"{INSTEAD} {more('evidence-will-hardly-stop')}",
                HeldinWarning,
                stacklevel=2,
            )
        (step, *seen), (step_before, *seen_before) = stopping.counts, self._before
        waiting = step_before < step < step_before + stopping.every  # it was not its turn
        if seen != seen_before or waiting or self._told:
            return
        self._told = True
        warnings.warn(
            f"{self._owner}: no backward pass through the model was seen in a whole epoch of "
            f"{self._batches} batches, so the rule cannot stop training. Is the model that it was "
            "given the one that is trained, and are its parameters those of the optimiser? A step "
            "that does not call the model's forward goes through stopping.call(...) "
            + more("no-backward-pass-seen"),
            HeldinWarning,
            stacklevel=2,
        )
