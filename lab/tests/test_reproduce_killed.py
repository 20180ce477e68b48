"""Runs of the paper's experiments that are killed, resumed, and made by several processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin_lab.reproduce import EXPERIMENTS, reproduce
from heldin_lab.reproduce import runner as _runner
from heldin_lab.reproduce import tables as _tables
from heldin_lab.reproduce import training as training
from heldin_lab.reproduce.experiments import toy
from heldin_lab.reproduce.run import Run
from small_data import TINY, data, numbers, rows_of, same, settings_of

for package in ("joblib", "matplotlib", "pandas", "sklearn", "rich"):
    pytest.importorskip(package)

__all__ = ["data"]
NAMES = list(EXPERIMENTS)


# --- killed runs -----------------------------------------------------------------------------


class Killed(BaseException):
    """In the place of a kill."""


def _first_parts(name: str) -> list[dict[str, Any]]:
    parts = [dict(p) for p in EXPERIMENTS[name].parts(settings_of(name)).values()]
    return parts if name in ("greedy", "rmsprop", "wdbc", "mnist-gd") else parts[-1:]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_goes_on_where_it_was(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice, right after a checkpoint and some steps later, it gives the same rows."""
    for i, part in enumerate(_first_parts(name)):
        expected = rows_of(name, part, data=data)
        path = tmp_path / f"{i}.pt"
        seen: list[int] = []
        tick = Run.tick
        for end, pause in ((7, 0.0), (13, 1e9)):  # the second one writes no new checkpoint

            def dies(self: Run, step: int, parts: Any, end: int = end) -> None:
                tick(self, step, parts)
                seen.append(step)
                if step == end:
                    raise Killed

            monkeypatch.setattr(Run, "tick", dies)
            with pytest.raises(Killed):
                rows_of(name, part, data=data, path=path, pause=pause)
        monkeypatch.setattr(Run, "tick", tick)
        assert seen == [*range(1, 8), *range(8, 14)]  # the second try began at 8
        assert same(rows_of(name, part, data=data, path=path, pause=1e9), expected)


def test_other_settings_do_not_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    model = torch.nn.Linear(1, 1)

    def count(seed: int, rate: float) -> list[int]:
        run = Run(seed, toy.Settings(rate=rate), path=path, pause=0.0)
        return list(run.steps(4, model=model))

    assert count(0, 0.1) == [1, 2, 3, 4]
    assert count(0, 0.1) == []
    assert count(0, 0.2) == [1, 2, 3, 4]
    assert count(1, 0.2) == [1, 2, 3, 4]


KILLED = """
import sys
from heldin_lab.reproduce import reproduce
reproduce(["toy", "wdbc"], out=sys.argv[1], jobs=2, pause=0.05, seeds=2, device="cpu",
          changes={"wdbc": {"steps": 600}, "toy": {"steps": 100, "test": 100}})
"""


def test_resume_after_a_real_kill(tmp_path: Path) -> None:
    """Kill the whole process group in the middle; --resume repeats nothing and loses nothing."""
    changes = {"wdbc": {"steps": 600}, "toy": {"steps": 100, "test": 100}}
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], start_new_session=True)
    limit = time.monotonic() + 300
    while not (list(out.glob("checkpoints/wdbc*.pt")) and list(out.glob("runs/*.csv"))):
        assert process.poll() is None, "it ended too early"
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.csv")}
    assert 0 < len(finished) < 6
    assert not (out / "report.html").exists()
    options: dict[str, Any] = {"seeds": 2, "changes": changes, "device": "cpu", "jobs": 1}
    reproduce(["toy", "wdbc"], out=out, resume=True, **options)
    reproduce(["toy", "wdbc"], out=tmp_path / "whole", **options)
    assert all(path.stat().st_mtime_ns == then for path, then in finished.items())
    tables = sorted((tmp_path / "whole" / "runs").glob("*.csv"))
    assert len(tables) == 6
    for path in tables:
        first, second = _tables.read(path), _tables.read(out / "runs" / path.name)
        assert numbers(first).equals(numbers(second))
    whole = (tmp_path / "whole" / "claims.csv").read_text()
    assert (out / "claims.csv").read_text() == whole
    assert not list((out / "checkpoints").iterdir())


def test_resume_keeps_what_is_finished(tmp_path: Path) -> None:
    """More seeds keep the old runs, other settings make new ones; without --resume, all are new."""
    options: dict[str, Any] = {"out": tmp_path, "device": "cpu", "changes": {"toy": TINY["toy"]}}

    def times() -> list[int]:
        return [p.stat().st_mtime_ns for p in sorted((tmp_path / "runs").glob("*.csv"))]

    changes = {"toy": {k: v for k, v in TINY["toy"].items() if k != "seeds"}}
    options["changes"] = changes
    reproduce(["toy"], seeds=2, **options)
    first = times()
    reproduce(["toy"], seeds=3, resume=True, **options)
    assert times()[:2] == first
    assert len(times()) == 3
    second = times()
    reproduce(["toy"], seeds=3, **options)
    assert not set(times()) & set(second)
    third = times()
    options["changes"] = {"toy": {**changes["toy"], "rate": 0.02}}
    reproduce(["toy"], seeds=3, resume=True, **options)
    assert not set(times()) & set(third)


def test_processes_give_the_same(tmp_path: Path) -> None:
    found = []
    for jobs in (1, 2):
        out = tmp_path / str(jobs)
        reproduce(["toy"], out=out, jobs=jobs, changes={"toy": TINY["toy"]}, device="cpu")
        tables = [_tables.read(path) for path in sorted((out / "runs").glob("*.csv"))]
        found.append([numbers(table) for table in tables])
    assert all(a.equals(b) for a, b in zip(*found, strict=True))


def test_workers_may_be_elsewhere(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative folders are those of the caller; joblib keeps workers, wherever they began."""
    import joblib

    joblib.Parallel(n_jobs=2)(joblib.delayed(os.chdir)("/") for _ in range(8))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELDIN_DATA", "data")
    found = reproduce(
        ["sketch2d"], out="report", jobs=2, changes={"sketch2d": {"steps": 60}}, device="cpu"
    )
    assert found.report == Path("report/report.html")
    assert len(list((tmp_path / "report" / "runs").glob("*.csv"))) == 2
    tasks: list[_runner.Task] = []
    monkeypatch.setattr(_runner, "_make", lambda given, *others: tasks.extend(given))
    with pytest.raises(FileNotFoundError):  # nothing was run
        reproduce(["sector"], out="report", changes=TINY, device="cpu")
    assert {task.data for task in tasks} == {str(data)}
    assert {task.folder for task in tasks} == {tmp_path / "report"}


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_takes_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip(
        "distributed", reason="dask.distributed is not installed: make setup"
    )
    import joblib

    threads: list[str] = []
    write = _tables.write

    def told(*arguments: Any, **about: Any) -> None:
        threads.append(threading.current_thread().name)
        write(*arguments, **about)

    monkeypatch.setattr(_tables, "write", told)
    options: dict[str, Any] = {"changes": {"toy": TINY["toy"]}, "device": "cpu"}
    reproduce(["toy"], out=tmp_path / "here", jobs=1, **options)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        reproduce(["toy"], out=tmp_path / "there", **options)
    assert len(threads) == 4
    assert all("Dask" in name for name in threads[2:]), threads
    for path in (tmp_path / "here" / "runs").glob("*.csv"):
        twin = tmp_path / "there" / "runs" / path.name
        assert numbers(_tables.read(path)).equals(numbers(_tables.read(twin)))
