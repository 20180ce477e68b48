"""The checks of a run as a sequence, with export to columns, files and data frames."""

from __future__ import annotations

import csv
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from heldin.errors import HeldinError

__all__ = ["Records", "axes"]

R = TypeVar("R")


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
