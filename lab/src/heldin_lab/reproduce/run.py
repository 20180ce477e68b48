"""One run of an experiment: its record, and the checkpoints that let a killed run go on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from heldin.state.files import leftovers, replacing

__all__ = ["Run", "described"]


class Stateful(Protocol):
    """Models, optimisers and heldin's rules."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class _Clocks:
    """Wall and CPU time (of the whole process) since it was made, and what was spent before."""

    def __init__(self, wall: float = 0.0, cpu: float = 0.0) -> None:
        self._wall, self._cpu = wall - time.monotonic(), cpu - time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "wall": self._wall + time.monotonic(),
            "cpu": self._cpu + time.process_time(),
        }


class Run:
    """What a run is given, and what it notes.

    Args:
        seed: of everything that is drawn.
        settings: the experiment's settings, a dataclass.
        part: what sets this run apart from the others of its seed.
        data: folder of datasets, see `heldin_lab.reproduce.data`.
        device: where to train.
        path: where checkpoints go (default: none are written).
        pause: seconds between checkpoints.

    >>> model = torch.nn.Linear(1, 1)
    >>> run = Run(0, None)
    >>> for step in run.steps(3, model=model):
    ...     run.note(step, loss=1.0 / step)
    >>> run.mark(2, "stop")
    >>> run.rows[1]
    {'step': 2, 'loss': 0.5, 'stop': 1.0}
    """

    def __init__(
        self,
        seed: int,
        settings: Any,
        part: Mapping[str, Any] | None = None,
        *,
        data: str | Path | None = None,
        device: str = "cpu",
        path: Path | None = None,
        pause: float = 30.0,
    ) -> None:
        self.seed, self.settings, self.data, self.device = seed, settings, data, device
        self.rows: list[dict[str, float]] = []
        self.arrays: dict[str, Any] = {}  # what was logged to replay readings
        self.path, self.pause = path, pause
        self.key = json.dumps([seed, described(settings), dict(part or {})], sort_keys=True)
        self._saved = self._ticked = time.monotonic()
        self._clocks = _Clocks()

    # -- the record

    def note(self, step: int, **values: float) -> None:
        """Note quantities of a step; steps come in order."""
        if not self.rows or self.rows[-1]["step"] != step:
            self.rows.append({"step": step})
        self.rows[-1].update(values)

    def mark(self, step: int | None, name: str) -> None:
        """Mark the row of a step, or none if the step is None."""
        for row in self.rows:
            row[name] = float(row["step"] == step)

    @property
    def seconds(self) -> dict[str, float]:
        """How long it has taken, "wall" and "cpu" time, that until the last checkpoint included."""
        return self._clocks.read()

    # -- the loop

    def steps(self, total: int, **parts: Stateful) -> Iterator[int]:
        """Count from 1 to `total`, from the last checkpoint on if there is one.

        Args:
            total: number of steps.
            parts: whatever changes from step to step, by name. It is saved after a step is over.
        """
        first = 1
        state = self._load()
        if state is not None:
            for name, part in parts.items():
                part.load_state_dict(state["parts"][name])
            self.rows, self._clocks = state["rows"], _Clocks(**state["seconds"])
            first = state["step"] + 1
        for step in range(first, total + 1):
            yield step
            self.tick(step, parts)

    def tick(self, step: int, parts: Mapping[str, Stateful]) -> None:
        """Save the run now and then, and say how far it is."""
        if self.path is None:
            return
        now = time.monotonic()
        if now - self._saved >= self.pause:
            state = {
                "key": self.key,
                "step": step,
                "rows": self.rows,
                "seconds": self.seconds,
                "parts": {name: part.state_dict() for name, part in parts.items()},
            }
            with replacing(self.path) as part:
                torch.save(state, part)
            self._saved = time.monotonic()
        if now - self._ticked >= 0.5:
            self.path.with_suffix(".step").write_text(str(step))
            self._ticked = now

    def _load(self) -> dict[str, Any] | None:
        if self.path is None or not self.path.exists():
            return None
        state: dict[str, Any] = torch.load(self.path, map_location=self.device, weights_only=True)
        return state if state["key"] == self.key else None

    def clear(self) -> None:
        """Remove what was kept to go on."""
        if self.path is not None:
            for kept in (self.path, self.path.with_suffix(".step"), *leftovers(self.path)):
                kept.unlink(missing_ok=True)


def described(settings: Any) -> dict[str, Any]:
    """Settings that decide what a run gives: all but the number of seeds."""
    plain = {} if settings is None else asdict(settings)
    return {name: value for name, value in plain.items() if name != "seeds"}
