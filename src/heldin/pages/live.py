"""The progress of a run: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Live", "sparkline"]

BETWEEN = 5.0  # seconds between two plain lines
GLANCE = 0.2  # seconds between two updates of the bar
BLOCKS = "▁▂▃▄▅▆▇█"


class Live:
    """A progress bar with a text beside it, or plain lines with the same text.

    The bar is that of tqdm, if it is installed. Without it, or where the output goes into a file,
    there is a line every few seconds, and one at the end.

    Args:
        total: number of units at the end, if known.
        file: where to write (default: stderr).
        between: seconds between two plain lines.
        patient: print no plain line for a run that ends before the first of them is due.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        file: Any = None,
        between: float = BETWEEN,
        patient: bool = False,
    ) -> None:
        self._total, self._file = total, file or sys.stderr
        self._last = time.monotonic() if patient else -math.inf
        self._quiet, self._latest = patient, ""
        self._state: tuple[int, str | Callable[[], tuple[str, int | None]]] | None = None
        self._bar = _bar(total, self._file)
        self._every = GLANCE if self._bar is not None else between

    def __enter__(self) -> Live:
        return self

    def show(self, done: int, text: str | Callable[[], tuple[str, int | None]]) -> None:
        """Show the number of finished units with a text, unless something was shown just now.

        Args:
            done: number of finished units.
            text: the text, or a function that returns it and the number of units at the end.
        """
        self._state = done, text
        if time.monotonic() - self._last >= self._every:
            self._quiet = False
            self._show()

    def _show(self) -> None:
        assert self._state is not None
        done, shown = self._state
        text, total = (shown, self._total) if isinstance(shown, str) else shown()
        self._last = time.monotonic()
        if self._bar is not None:
            self._bar.n, self._bar.total = done, total
            self._bar.set_description_str(text)
        elif text != self._latest:
            print(text, file=self._file, flush=True)
            self._latest = text

    def close(self) -> None:
        """Show the final state."""
        if self._state is not None and not self._quiet:
            self._show()
        if self._bar is not None:
            self._bar.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _bar(total: int | None, file: Any) -> Any:
    """Return a bar of tqdm; None if it is not installed or the output is a file."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    notebook = shell is not None and "IPKernelApp" in shell.config
    if not notebook and not (hasattr(file, "isatty") and file.isatty()):
        return None
    try:
        from tqdm.auto import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return None
    form = "{bar:10} {elapsed} {desc}"
    return tqdm(total=total, file=file, bar_format=form, dynamic_ncols=True, leave=True)


def sparkline(values: Sequence[float], width: int = 12) -> str:
    """Return the course of positive numbers in a few characters, on a logarithmic scale."""
    finite = [value for value in values if math.isfinite(value)]
    step = max(1, len(finite) / width)
    points = [finite[int(i * step)] for i in range(min(width, len(finite)))]
    if not points:
        return ""
    points[-1] = finite[-1]
    logs = [math.log(value) for value in points] if min(points) > 0 else points
    low, size = min(logs), (max(logs) - min(logs)) or 1.0
    return "".join(BLOCKS[round((value - low) / size * 7)] for value in logs)
