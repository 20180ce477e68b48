"""Ways out for what is kept as columns: files, data frames, figures."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError

__all__ = ["Exportable", "axes"]


class Exportable(ABC):
    """Has columns of equal length, and can write them."""

    @abstractmethod
    def columns(self) -> dict[str, list[Any]]:
        """The records as columns."""

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, one row per check."""
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
    """The axes to draw in: those given, or of a new figure."""
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise HeldinError("history.plot needs matplotlib: pip install 'heldin[plot]'") from error
    return pyplot.figure(figsize=size, layout="constrained").add_subplot()
