"""What a stopping rule has seen, in bounded memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from .export import Exportable, axes

__all__ = ["STATE_SCHEMA", "History", "Record"]

WAITING = 32  # checks noted before they are filed: filing many at once costs less than one by one

STATE_SCHEMA = {  # of a saved state
    "limit": int,
    "stride": int,
    "checks": int,
    "kept": int,
    "stopped": bool,
    "groups": [str],
    "integers": Tensor,
    "values": Tensor,
    "nonfinite": [[(int, list)]],
}


@dataclass(frozen=True)
class Record:
    """One check.

    Attributes:
        step: number of the step, from 1.
        count: number of samples behind the value.
        raw: the value of this check alone; nan if there was none.
        criterion: the smoothed value that decides.
        groups: raw values per group.
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


Fields = tuple[int, int, float, float, Mapping[str, float], tuple[str, ...]]  # of a `Record`


def _fields(record: Record) -> Fields:
    """The values of a record, in the order of its fields."""
    r = record
    return r.step, r.count, r.raw, r.criterion, r.groups, r.nonfinite


class _Table:
    """Records as columns of numbers: eight bytes for each, however many groups there are."""

    def __init__(self) -> None:
        self.steps, self.counts = array("q"), array("q")
        self.raw, self.criterion = array("d"), array("d")
        self.groups: dict[str, array[float]] = {}  # nan: not in this record
        self.nonfinite: dict[int, tuple[str, ...]] = {}  # by step

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, fields: Fields) -> None:
        step, count, raw, criterion, groups, nonfinite = fields
        for name in groups:
            if name not in self.groups:
                self.groups[name] = array("d", [math.nan]) * len(self)
        for name, values in self.groups.items():
            values.append(groups.get(name, math.nan))
        if nonfinite:
            self.nonfinite[step] = nonfinite
        self.steps.append(step)
        self.counts.append(count)
        self.raw.append(raw)
        self.criterion.append(criterion)

    def thin(self) -> None:
        """Drop every second record."""
        self.steps, self.counts = self.steps[::2], self.counts[::2]
        self.raw, self.criterion = self.raw[::2], self.criterion[::2]
        self.groups = {name: values[::2] for name, values in self.groups.items()}
        self.nonfinite = {s: self.nonfinite[s] for s in self.steps if s in self.nonfinite}

    def record(self, i: int) -> Record:
        values = {name: column[i] for name, column in self.groups.items()}
        groups = {name: value for name, value in values.items() if not math.isnan(value)}
        bad = self.nonfinite.get(self.steps[i], ())
        return Record(self.steps[i], self.counts[i], self.raw[i], self.criterion[i], groups, bad)


class History(Exportable, Sequence[Record]):
    """The checks of a run, oldest first.

    At most `limit` records are kept: when it is full every second one is dropped, and from then on
    every second (fourth, ...) check is recorded. The latest check and the one that stopped are
    always there.

    >>> history = History(limit=4)
    >>> for step in range(1, 11):
    ...     history.append(Record(step, 8, raw=-1.0 / step, criterion=-1.0 / step))
    >>> [record.step for record in history]
    [1, 5, 9, 10]
    """

    def __init__(self, limit: int = 4096) -> None:
        self.limit = limit
        self.stopped: Record | None = None
        self._checks = 0
        self._new: list[Fields] = []  # noted, but not filed yet
        self._stride = 1
        self._kept = _Table()
        self._last: Fields | None = None

    @property
    def checks(self) -> int:
        """How many checks there were, those included that are no longer kept."""
        return self._checks + len(self._new)

    def append(self, record: Record, stopped: bool = False) -> None:
        """Add a check; `stopped` marks the one that stopped training."""
        self.note(_fields(record), stopped)

    def note(self, fields: Fields, stopped: bool) -> None:
        """Like `append`, from the fields of a record; it is filed later, with others."""
        self._new.append(fields)
        if stopped or len(self._new) == WAITING:
            self._file()
            if stopped:
                self.stopped = Record(*fields)

    def _file(self) -> None:
        """File the checks that were only noted: keep every `_stride`-th, thin out when full."""
        for fields in self._new:
            if self._checks % self._stride == 0:
                if len(self._kept) >= self.limit:
                    self._kept.thin()
                    self._stride *= 2
                if self._checks % self._stride == 0:
                    self._kept.add(fields)
            self._last = fields
            self._checks += 1
        self._new = []

    def _extras(self) -> dict[int, Record]:
        """The stop and the latest check, by their place among the records, if thinned out."""
        self._file()
        found: dict[int, Record] = {}
        last = None if self._last is None else Record(*self._last)
        by_step = {r.step: r for r in (self.stopped, last) if r is not None}
        for step, record in sorted(by_step.items()):
            at = bisect_left(self._kept.steps, step)
            if at == len(self._kept) or self._kept.steps[at] != step:
                found[at + len(found)] = record
        return found

    def _records(self) -> list[Record]:
        extras = self._extras()
        records = [self._kept.record(i) for i in range(len(self._kept))]
        for at, record in extras.items():
            records.insert(at, record)
        return records

    def __len__(self) -> int:
        extras = self._extras()
        return len(self._kept) + len(extras)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records())

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return self._records()[index]
        extras = self._extras()
        i = range(len(self._kept) + len(extras))[index]
        return extras[i] if i in extras else self._kept.record(i - sum(at < i for at in extras))

    def __repr__(self) -> str:
        return f"<heldin.History: {len(self)} of {self.checks} checks>"

    # -- ways out

    def columns(self) -> dict[str, list[Any]]:
        """The records as columns: step, count, raw, criterion, nonfinite, one per group."""
        records = self._records()
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

        The zero line, the raw values in the background and a vertical bar at the stop. The scale
        is linear between -1 and 1 and logarithmic beyond.

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
        """Tensors, numbers and strings only."""
        self._file()
        last = None if self._last is None else Record(*self._last)
        extra = [r for r in (self.stopped, last) if r is not None]
        records = [*map(self._kept.record, range(len(self._kept))), *extra]
        names = _group_names(records)
        values = [
            [r.raw, r.criterion, *(r.groups.get(n, math.nan) for n in names)] for r in records
        ]
        return {
            "limit": self.limit,
            "stride": self._stride,
            "checks": self.checks,
            "kept": len(self._kept),
            "stopped": self.stopped is not None,
            "groups": names,
            "integers": torch.tensor([[r.step, r.count] for r in records], dtype=torch.int64),
            "values": torch.tensor(values, dtype=torch.float64).reshape(-1, 2 + len(names)),
            "nonfinite": [[i, list(r.nonfinite)] for i, r in enumerate(records) if r.nonfinite],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        names, kept, counts = state["groups"], state["kept"], state["integers"]
        ends = int(state["stopped"]) + int(state["checks"] > 0)
        if len(counts) != kept + ends or counts.is_floating_point() or state["stride"] < 1:
            raise ValueError(f"a history of {len(counts)} records, {kept} of them kept")
        bad = dict(state["nonfinite"])
        records = []
        rows = zip(counts.tolist(), state["values"].tolist(), strict=True)
        for i, ((step, count), (raw, criterion, *groups)) in enumerate(rows):
            present = {n: v for n, v in zip(names, groups, strict=True) if not math.isnan(v)}
            records.append(Record(step, count, raw, criterion, present, tuple(bad.get(i, ()))))
        self.limit, self._stride, self._checks = state["limit"], state["stride"], state["checks"]
        self._new = []
        self._kept = _Table()
        for record in records[:kept]:
            self._kept.add(_fields(record))
        self.stopped = records[kept] if state["stopped"] else None
        self._last = _fields(records[-1]) if records else None


def _group_names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.groups))
