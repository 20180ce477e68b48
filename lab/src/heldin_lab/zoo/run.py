"""Running the zoo: in a process of its own, which may die or hang without harm."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .entry import Entry
from .judge import Outcome, judge
from .models import ENTRIES

__all__ = ["Keeper", "run_zoo", "version_of"]


def version_of(library: str) -> str | None:
    """The version of a library; None: it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def run_zoo(
    entries: Sequence[Entry],
    out: Path,
    timeout: float,
    tell: Callable[[str], None],
    again: bool = False,
) -> list[Outcome]:
    """Run entries, and go on after those whose outcomes are there already.

    Args:
        entries: of libraries that are installed.
        out: folder of the outcomes, one JSON file each.
        timeout: seconds after which a model is given up.
        tell: is told how far it has come.
        again: run also those whose outcomes are there.
    """
    out.mkdir(parents=True, exist_ok=True)
    outcomes, keeper = [], Keeper(timeout)
    try:
        for i, entry in enumerate(entries):
            path = out / f"{entry.library}-{entry.name}.json".replace("/", "-").replace(" ", "-")
            if path.exists() and not again:
                outcomes.append(Outcome(**json.loads(path.read_text(encoding="utf-8"))))
                continue
            outcome = keeper.run(entry)
            path.write_text(json.dumps(outcome.as_dict(), indent=1) + "\n", encoding="utf-8")
            outcomes.append(outcome)
            reason = f": {outcome.reason}" if outcome.reason else ""
            head = f"[{i + 1}/{len(entries)}] {entry.library} {entry.name}"
            tell(f"{head}: {outcome.status}{reason[:300]}")
    finally:
        keeper.close()
    return outcomes


class Keeper:
    """Holds the process in which models are run, and starts another one where it is lost."""

    def __init__(self, timeout: float, serve: Callable[[Connection], None] | None = None) -> None:
        self._timeout, self._serve = timeout, serve or _serve
        self._process: Any = None
        self._pipe: Any = None

    def run(self, entry: Entry) -> Outcome:
        """What became of an entry; a process that died or hangs is a failure of its model."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        known = version_of(entry.library) or ""
        started, died = False, "the process died"
        try:
            self._pipe.send(ENTRIES.index(entry))
            while self._pipe.poll(self._timeout):
                answer = self._pipe.recv()
                if isinstance(answer, Outcome):
                    return answer
                started = True
            died = f"no answer in {self._timeout:g} seconds"
        except (EOFError, ConnectionError):
            pass
        self.close()
        status = "crashed" if started else "broken"
        return Outcome(entry.library, entry.name, known, status, died)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Connection) -> None:
    """Run the entries whose numbers arrive, and answer with their outcomes."""
    torch.set_num_threads(1)  # sums over threads come in any order
    while True:
        try:
            entry = ENTRIES[pipe.recv()]
        except (EOFError, KeyboardInterrupt):
            return
        with redirect_stdout(StringIO()):  # libraries talk
            outcome = judge(entry, version_of(entry.library) or "", lambda: pipe.send("started"))
        pipe.send(outcome)
