"""The line that a run shows while it trains."""

from __future__ import annotations

import math
from typing import Any

import torch

from heldin.pages.live import Live, sparkline

from .path import PathStopping
from .reporting import RunFacts

__all__ = ["RunProgress", "is_main_process", "several_processes"]


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_processes() -> bool:
    """Return whether this is one of several processes."""
    return _has_ranks() and torch.distributed.get_world_size() > 1


def is_main_process() -> bool:
    """Return whether this process tells of the run: the only one, or the first."""
    return not _has_ranks() or torch.distributed.get_rank() == 0


class RunProgress:
    """A bar, or lines, about a run; the first process of several shows it."""

    def __init__(self, rule: Any, facts: RunFacts, max_epochs: int, live: Live | None = None):
        self._rule, self._facts, self._max_epochs = rule, facts, max_epochs
        self._live = (live or Live()) if is_main_process() else None
        self._checks, self._check = 0, [""]

    def show(self, step: int) -> None:
        """Show the state at a step, unless something was shown just now."""
        if self._live is not None:
            self._live.show(step, lambda: (self._line(step), self._end(step)))

    def _line(self, step: int) -> str:
        """Return epoch, step, losses, the best of them and the latest stop, as one line."""
        rule, facts = self._rule, self._facts
        epoch = facts.epoch(step)
        parts = [] if epoch is None else [f"epoch {epoch}"]
        parts.append(f"step {step}")
        if not isinstance(rule, PathStopping):
            words = rule.reason.partition(": ")[2] or rule.reason
            return " | ".join([*parts, *(["stopped"] if rule.should_stop else []), words])
        if len(rule.history) != self._checks:  # intervals take a while
            self._checks, self._check = len(rule.history), _latest_check(rule)
        best, limit = rule.history[rule.best_number], rule.stop_limit()
        parts += [*self._check, f"best {best.estimate:.3g} at {_at(facts, best.step)}"]
        if rule.should_stop:
            parts.append("stopped")
        elif limit is not None:
            parts.append(f"stops by {_at(facts, limit)}")
        return " | ".join([*parts, sparkline(rule.history.columns()["estimate"])])

    def _end(self, step: int) -> int | None:
        """Return the step at which the run ends unless the estimate falls; None: not known."""
        if self._rule.should_stop:
            return step
        ends, limit = self._facts.epoch_ends, None
        if isinstance(self._rule, PathStopping):
            limit = self._rule.stop_limit()
        last = self._max_epochs * ends[-1] // len(ends) if ends else None
        return min((step for step in (limit, last) if step is not None), default=None)

    def close(self) -> None:
        """Show the final state."""
        if self._live is not None:
            self._live.close()


def _latest_check(rule: PathStopping) -> list[str]:
    """Return training loss, test loss and metrics of the latest check, in words."""
    last, number = rule.history.last(), len(rule.history) - 1
    loss = [] if math.isnan(last.training_loss) else [f"loss {last.training_loss:.3g}"]
    metrics = [f"{name} {value:.3g}" for name, value in rule.metric_values(number).items()]
    return [*loss, f"test loss {rule.loss_interval(number)}", *metrics]


def _at(facts: RunFacts, step: int) -> str:
    epoch = facts.epoch(step)
    return f"step {step}" if epoch is None else f"epoch {epoch}"
