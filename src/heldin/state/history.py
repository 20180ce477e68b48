"""The history of a stopping rule, in bounded memory."""

from __future__ import annotations

import csv
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor

from heldin.errors import HeldinError

__all__ = ["STATE_SCHEMA", "History", "Record", "Records", "axes"]

R = TypeVar("R")

STATE_SCHEMA = {  # of a saved state
    "limit": int,
    "stride": int,
    "checks": int,
    "stopped_step": (int, None),
    "groups": [str],
    "integers": Tensor,
    "values": Tensor,
    "nonfinite": [[(int, list)]],
}


class Records(Sequence[R]):
    """The base class of both histories: one record per check, oldest first."""

    def __init__(self) -> None:
        self._records: list[R] = []

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        return iter(self._records)

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> list[R]: ...
    def __getitem__(self, index: int | slice) -> R | list[R]:
        return self._records[index]

    @abstractmethod
    def columns(self) -> dict[str, list[Any]]:
        """Return the records as columns of equal length."""

    def to_dataframe(self) -> Any:
        """Return a pandas DataFrame with one row per check."""
        try:
            import pandas
        except ImportError as error:
            raise HeldinError(
                "history.to_dataframe needs pandas: pip install 'heldin[frame]', or use columns() "
                "or to_csv()"
            ) from error
        return pandas.DataFrame(self.columns())

    def to_csv(self, path: str | Path) -> None:
        """Write one line per check, with a header."""
        table = self.columns()
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(table)
            writer.writerows(zip(*table.values(), strict=True))


def axes(ax: Any, size: tuple[float, float]) -> Any:
    """Return the given axes, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise HeldinError("history.plot needs matplotlib: pip install 'heldin[plot]'") from error
    return pyplot.figure(figsize=size, layout="constrained").add_subplot()


@dataclass(frozen=True)
class Record:
    """One check.

    Attributes:
        step: number of the step, from 1.
        count: number of samples behind the value.
        raw: the unsmoothed value of this check; nan if it has none.
        criterion: the smoothed value, which decides.
        groups: unsmoothed values per group.
        nonfinite: parameters with an inf or nan contribution.

    >>> import heldin
    >>> heldin.state.Record(step=3, count=64, raw=-0.5, criterion=-0.2).criterion
    -0.2
    """

    step: int
    count: int
    raw: float
    criterion: float
    groups: Mapping[str, float] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()


class History(Records[Record]):
    """The checks of a run, oldest first.

    At most `limit` records are kept: when the history is full, every second record is dropped, and
    afterwards only every second (fourth, ...) check is recorded. The latest check and the one that
    stopped training are always kept.

    Attributes:
        limit: maximum number of records.
        checks: number of checks, dropped ones included.
        stopped: the check that stopped training, if one did.

    >>> history = History(limit=4)
    >>> for step in range(1, 11):
    ...     history.append(Record(step, 8, raw=-1.0 / step, criterion=-1.0 / step))
    >>> [record.step for record in history]
    [1, 5, 9, 10]
    """

    def __init__(self, limit: int = 4096) -> None:
        super().__init__()
        self.limit = limit
        self.checks = 0
        self.stopped: Record | None = None
        self._numbers: list[int] = []  # number of each kept record among all checks
        self._stride = 1

    def append(self, record: Record, stopped: bool = False) -> None:
        """Add a check; `stopped` marks the one that stopped training."""
        if self._numbers and not self._stays(-1):  # it was kept only as the latest
            del self._numbers[-1], self._records[-1]
        number, self.checks = self.checks, self.checks + 1
        if number % self._stride == 0 and number // self._stride >= self.limit:
            self._stride *= 2
            stay = [i for i in range(len(self)) if self._stays(i)]
            self._numbers = [self._numbers[i] for i in stay]
            self._records = [self._records[i] for i in stay]
        self._numbers.append(number)
        self._records.append(record)
        if stopped:
            self.stopped = record

    def _stays(self, i: int) -> bool:
        return self._numbers[i] % self._stride == 0 or self._records[i] is self.stopped

    def __repr__(self) -> str:
        return f"<heldin.History: {len(self)} of {self.checks} checks>"

    # -- export

    def columns(self) -> dict[str, list[Any]]:
        """Return the records as columns: step, count, raw, criterion, nonfinite, one per group."""
        records = self._records
        table: dict[str, list[Any]] = {
            "step": [r.step for r in records],
            "count": [r.count for r in records],
            "raw": [r.raw for r in records],
            "criterion": [r.criterion for r in records],
            "nonfinite": [" ".join(r.nonfinite) for r in records],
        }
        for name in _group_names(records):
            table[f"group/{name}"] = [r.groups.get(name, math.nan) for r in records]
        return table

    def plot(self, ax: Any = None, *, groups: bool = False) -> Any:
        """Draw the criterion over the steps, as in the bottom row of the paper's figures.

        The figure shows the zero line, the raw values in the background and a vertical bar at the
        stop. The scale is linear between -1 and 1 and logarithmic beyond.

        Args:
            ax: where to draw (default: a new figure).
            groups: also draw each group's raw values.

        Returns:
            The matplotlib axes.
        """
        ax = axes(ax, (6, 2.5))
        table = self.columns()
        for name in table if groups else ():
            if name.startswith("group/"):
                ax.plot(table["step"], table[name], color="0.8", linewidth=0.6)
        ax.plot(table["step"], table["raw"], color="tab:blue", alpha=0.25, linewidth=0.8)
        ax.plot(table["step"], table["criterion"], color="tab:blue", label="criterion")
        ax.axhline(0.0, color="0.4", linewidth=0.8)
        if self.stopped is not None:
            ax.axvline(self.stopped.step, color="tab:blue", linewidth=3, alpha=0.5, label="stop")
        ax.set_yscale("symlog", linthresh=1.0)
        ax.set_xlabel("step")
        ax.set_ylabel("criterion")
        return ax

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and strings."""
        records, names = self._records, _group_names(self._records)
        integers = [[n, r.step, r.count] for n, r in zip(self._numbers, records, strict=True)]
        values = [
            [r.raw, r.criterion, *(r.groups.get(n, math.nan) for n in names)] for r in records
        ]
        return {
            "limit": self.limit,
            "stride": self._stride,
            "checks": self.checks,
            "stopped_step": None if self.stopped is None else self.stopped.step,
            "groups": names,
            "integers": torch.tensor(integers, dtype=torch.int64).reshape(-1, 3),
            "values": torch.tensor(values, dtype=torch.float64).reshape(-1, 2 + len(names)),
            "nonfinite": [[i, list(r.nonfinite)] for i, r in enumerate(records) if r.nonfinite],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        names, integers, stop = state["groups"], state["integers"], state["stopped_step"]
        if integers.is_floating_point() or state["stride"] < 1:
            raise ValueError(f"a history with {integers.dtype}, stride {state['stride']}")
        bad = dict(state["nonfinite"])
        numbers, records = [], []
        rows = zip(integers.tolist(), state["values"].tolist(), strict=True)
        for i, ((number, step, count), (raw, criterion, *groups)) in enumerate(rows):
            present = {n: v for n, v in zip(names, groups, strict=True) if not math.isnan(v)}
            numbers.append(number)
            records.append(Record(step, count, raw, criterion, present, tuple(bad.get(i, ()))))
        stopped = next((r for r in records if r.step == stop), None)
        latest = numbers[-1] + 1 if numbers else 0
        if latest != state["checks"] or (stopped is None) != (stop is None):
            raise ValueError(f"a history of {state['checks']} checks without its last or its stop")
        self.limit, self._stride, self.checks = state["limit"], state["stride"], latest
        self._numbers, self._records, self.stopped = numbers, records, stopped


def _group_names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.groups))
