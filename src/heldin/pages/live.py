"""How far a run has come: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from heldin.errors import HeldinError

__all__ = ["Live", "Watching"]

BETWEEN = 5.0  # seconds between two plain lines
GLANCE = 0.25  # seconds between two looks at a run


class Live:
    """A bar with words beside it, or lines of the same words.

    Args:
        total: of what is counted, if known.
        unit: what is counted.
        console: a `rich.console.Console` (default: stderr).
        between: seconds between two lines, where there is no terminal.
        patient: without a terminal, say nothing of a run that is over before the first of them.
    """

    def __init__(
        self,
        total: int | None = None,
        unit: str = "step",
        console: Any = None,
        between: float = BETWEEN,
        patient: bool = False,
    ) -> None:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.table import Column
        except ImportError as error:
            raise HeldinError(
                "showing progress needs rich: pip install 'heldin[report]'"
            ) from error
        console = console or Console(file=sys.stderr)
        self._total, self._unit, self._between = total, unit, between
        self._file, self._lines = console.file, not (console.is_terminal or console.is_jupyter)
        self._last, self._waiting = time.monotonic() if patient else -float("inf"), ""
        self._quiet = patient
        words = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # they alone give way
        self._bar: Any = Progress(
            TextColumn(f"{unit} {{task.completed}}", table_column=Column(min_width=len(unit) + 5)),
            BarColumn(10, table_column=Column(min_width=10)),
            TimeElapsedColumn(table_column=Column(min_width=7)),
            TextColumn("{task.description}", markup=False, table_column=words),
            console=console,
            expand=True,
        )
        self._task: Any = None

    def __enter__(self) -> Live:
        if not self._lines:
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._total)
        return self

    def show(self, done: int, text: str) -> None:
        """So much is done, and this is to be said of it."""
        if self._lines:
            of = f" of {self._total}" if self._total is not None else ""
            self._waiting = f"{self._unit} {done}{of}: {text}"
            if time.monotonic() - self._last >= self._between:
                self._quiet = False
                self._say()
        else:
            self._bar.update(self._task, completed=done, description=text)

    def _say(self) -> None:
        if self._waiting:
            print(self._waiting, file=self._file, flush=True)
        self._last, self._waiting = time.monotonic(), ""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lines and not self._quiet:
            self._say()  # the last word
        elif self._lines:
            return
        else:
            self._bar.stop()


class Watching:
    """Shows what a function says, again and again, while a `with` block runs.

    Args:
        look: how far the run has come, and what is to be said of it.
        total, console, between: see `Live`.
    """

    def __init__(
        self,
        look: Callable[[], tuple[int, str]],
        total: int | None = None,
        console: Any = None,
        between: float = BETWEEN,
    ) -> None:
        self._look = look
        self._live = Live(total, console=console, between=between)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heldin progress", daemon=True)

    def _run(self) -> None:
        while not self._over.wait(GLANCE):
            self._live.show(*self._look())

    def __enter__(self) -> Watching:
        self._live.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()
        self._live.show(*self._look())
        self._live.__exit__(kind, error, trace)
