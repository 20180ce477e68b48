"""Kill a training run again and again, and compare it with one that was left alone.

    python -m heldin_lab.bench.faults --kills 200

Every run trains a small model with one of the stopping rules, writes a checkpoint every few steps
and is killed (SIGKILL) a few times: at a random moment, or in the middle of writing a checkpoint.
Each time it goes on from what it finds on disk. In the end it must be the run that was never
killed: the same steps, each taken once, the same criterion at each of them, the same history,
stopping step and weights, to the last bit.

The processes are forked from one that has only imported PyTorch, so that a run takes a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._decomp
import torch._dynamo  # what a first step would import, once for all runs
import torch.nn.functional as F
from torch import nn

import heldin
from heldin_lab.rules import (
    ElementwiseStopping,
    Evidence,
    EvidenceStopping,
    Folds,
    LeaveOneOut,
    Patience,
    ValidationStopping,
    follow,
)

RULES = ("evidence", "window", "elementwise", "fold", "shadow", "leave-one-out", "validation")
LAST = 240  # steps after which a run ends by itself
EVERY = 9  # steps between checkpoints
BALLAST = 1 << 17  # numbers that make a checkpoint take its time
KILLS_PER_RUN = 5


# --- the run, in a process of its own --------------------------------------------------------


class Run:
    """A training run that goes on from its checkpoint, if there is one."""

    def __init__(self, rule: str, folder: Path) -> None:
        self.rule, self.path = rule, folder / "run.ckpt"
        torch.manual_seed(0)
        x = torch.randn(40, 20)
        y = x[:, :1] + torch.randn(40, 1)
        self.x, self.y = x[:30], y[:30]
        self.model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))
        if rule in ("evidence", "window"):
            self.model.insert(2, nn.Dropout(0.1))
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), lr=0.004)
        patience = Patience(1.5, 20, 3)
        whole = (self.model, self.optimizer, F.mse_loss, (self.x, self.y))
        self.stopping: Any = None
        if rule in ("evidence", "window"):
            window = 3 if rule == "window" else 1
            self.stopping = EvidenceStopping(self.model, Evidence(window=window, coordinates=16))
        elif rule == "elementwise":
            self.optimizer = ElementwiseStopping(self.optimizer, self.model, smoothing=0.9)
        elif rule == "fold":
            self.stopping = follow(Folds(folds=3), *whole, patience=patience)
        elif rule == "shadow":
            self.stopping = follow(Folds(shadows=1), *whole, patience=patience)
        elif rule == "leave-one-out":
            self.stopping = follow(LeaveOneOut(), *whole, patience=patience)
        else:
            self.stopping = ValidationStopping(
                self.model, lambda: F.mse_loss(self.model(x[30:]), y[30:]), patience=20
            )
        self.generator = torch.Generator().manual_seed(7)
        self.step = 0

    def go(self, log: int) -> dict[str, Any]:
        """Train to the end; a line in the log for each step."""
        if self.path.exists():
            states = heldin.state.load(self.path)
            for name in ("model", "optimizer", "stopping"):
                part = getattr(self, name)
                if part is not None:
                    part.load_state_dict(states[name])
            self.generator.set_state(states["generator"])
            torch.set_rng_state(states["random"])
            self.step = states["step"]
        os.write(log, f"from {self.step}\n".encode())
        while self.step < LAST and not (self.stopping is not None and self.stopping.should_stop):
            self.step += 1
            value = self.advance()
            os.write(log, f"{self.step} {float(value).hex()}\n".encode())
            if self.step % EVERY == 0:
                self.save()
        return self.result()

    def advance(self) -> float:
        rows = torch.randperm(30, generator=self.generator)[:12]
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(self.x[rows]), self.y[rows])
        loss.backward()
        before = self.rule in ("evidence", "window", "validation")
        if before and self.stopping.step():
            return float(self.stopping.criterion)
        self.optimizer.step()
        if self.rule == "elementwise":
            return float(self.optimizer.stopped_fraction())
        if not before:
            self.stopping.step(indices=rows)
            return float(self.stopping.history.last().estimate)
        return float(self.stopping.criterion)

    def save(self) -> None:
        parts = {n: getattr(self, n) for n in ("model", "optimizer", "stopping")}
        heldin.state.save(
            self.path,
            **{n: None if part is None else part.state_dict() for n, part in parts.items()},
            generator=self.generator.get_state(),
            random=torch.get_rng_state(),
            step=self.step,
            ballast=torch.zeros(BALLAST),
        )

    def result(self) -> dict[str, Any]:
        """What must be the same, with numbers to the last bit."""
        history: dict[str, list[Any]] = {}
        if self.stopping is not None:
            history = self.stopping.history.columns()
        exact = {
            name: [v.hex() if isinstance(v, float) else v for v in column]
            for name, column in history.items()
        }
        state = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            state.update(bytes(tensor.flatten().view(torch.uint8).tolist()))
        return {
            "step": self.step,
            "stopped_step": None if self.stopping is None else self.stopping.stopped_step,
            "history": exact,
            "weights": state.hexdigest(),
        }


def start(rule: str, folder: Path) -> int:
    """Fork a process that goes on with the run in a folder."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        result = Run(rule, folder).go(log)
        (folder / "result.new").write_text(json.dumps(result))
        os.replace(folder / "result.new", folder / "result")
        status = 0
    except BaseException:
        (folder / "error").write_text(traceback.format_exc())
    finally:
        os._exit(status)


# --- the harness -----------------------------------------------------------------------------


def finish(pid: int, folder: Path) -> dict[str, Any]:
    _, status = os.waitpid(pid, 0)
    if status:
        error = folder / "error"
        raise SystemExit(f"a run failed:\n{error.read_text() if error.exists() else status}")
    found: dict[str, Any] = json.loads((folder / "result").read_text())
    return found


def attempts(folder: Path) -> list[tuple[int, list[tuple[int, str]]]]:
    """Each start of the run: the step it went on from, and the steps after it with their values."""
    found: list[tuple[int, list[tuple[int, str]]]] = []
    for line in (folder / "log").read_text().splitlines():
        first, _, second = line.partition(" ")
        if first == "from":
            found.append((int(second), []))
        else:
            found[-1][1].append((int(first), second))
    return found


def differences(
    plain: Path, killed: Path, expected: dict[str, Any], found: dict[str, Any]
) -> list[str]:
    """In what the killed run differs from the one that was left alone."""
    wrong = [f"{key} differs" for key in expected if found[key] != expected[key]]
    ((_, alone),) = attempts(plain)
    true = dict(alone)
    reached = 0
    for origin, steps in attempts(killed):
        if origin > reached:
            wrong.append(f"went on from step {origin}, but only {reached} steps were taken")
        numbers = [number for number, _ in steps]
        if numbers != list(range(origin + 1, origin + 1 + len(steps))):
            wrong.append(f"after step {origin} came the steps {numbers[:5]} ...")
        wrong += [f"another value at step {n}" for n, v in steps if true.get(n) != v]
        reached = max(reached, origin + len(steps))
    if reached != expected["step"]:
        wrong.append(f"{reached} steps, not {expected['step']}")
    return wrong


def strike(pid: int, folder: Path, writing: bool, seconds: float, chance: random.Random) -> str:
    """Kill the process; where it was hit ("" if it was done before)."""
    until = time.monotonic() + chance.uniform(0, seconds)
    skip = chance.randrange(3) if writing else 0  # not always the first checkpoint
    seen: set[str] = set()
    while True:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            return ""
        if not writing:
            if time.monotonic() >= until:
                break
            time.sleep(0.0005)
            continue
        writes = any(entry.name.endswith(".part") for entry in os.scandir(folder))
        if writes and len(seen) >= skip:
            time.sleep(chance.uniform(0, 0.004))
            break
        if writes:
            seen.add(str(_mark(folder)))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (*left,) = folder.glob("*.part")
    assert len(left) <= 1, left
    for part in left:
        part.unlink()
    return "while writing a checkpoint" if left else "elsewhere"


def _mark(folder: Path) -> int:
    """Tells one checkpoint from the next."""
    try:
        return os.stat(folder / "run.ckpt").st_mtime_ns
    except FileNotFoundError:
        return 0


def main(kills: int, seed: int, out: str | None) -> int:
    chance = random.Random(seed)
    home = Path(tempfile.mkdtemp(prefix="heldin-faults-"))
    began = time.monotonic()
    references: dict[str, tuple[Path, dict[str, Any], float]] = {}
    done, runs, wrong = Counter[str](), Counter[str](), 0
    try:
        while sum(done.values()) < kills:
            rule = RULES[sum(runs.values()) % len(RULES)]
            if rule not in references:
                folder = home / f"{rule}-plain"
                folder.mkdir()
                at = time.monotonic()
                result = finish(start(rule, folder), folder)
                references[rule] = (folder, result, time.monotonic() - at)
            plain, expected, seconds = references[rule]
            folder = home / "killed"
            folder.mkdir()
            for _ in range(min(KILLS_PER_RUN, kills - sum(done.values()))):
                pid = start(rule, folder)
                where = strike(pid, folder, chance.random() < 0.5, 0.6 * seconds, chance)
                if not where:  # it was faster
                    break
                done[where] += 1
                _show(f"{sum(done.values())} of {kills} kills, {wrong} runs differ")
            pid = start(rule, folder)
            found = finish(pid, folder)
            bad = differences(plain, folder, expected, found)
            runs[rule] += 1
            wrong += bool(bad)
            for each in bad[:5]:
                print(f"\n{rule}: {each}")
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(home)
    report = {
        "kills": sum(done.values()),
        "where": dict(done),
        "runs": dict(runs),
        "runs that differ": wrong,
        "stopping steps": {rule: r[1]["stopped_step"] for rule, r in references.items()},
        "seconds": round(time.monotonic() - began, 1),
        "seed": seed,
    }
    _show("")
    print(json.dumps(report, indent=2))
    if out:
        text = markdown(report) if out.endswith(".md") else json.dumps(report, indent=2) + "\n"
        Path(out).write_text(text, encoding="utf-8")
    return 1 if wrong else 0


def markdown(report: dict[str, Any]) -> str:
    """The report as a table for the documentation."""
    rows = {
        "kills (-9)": report["kills"],
        "of them while a checkpoint was written": report["where"]["while writing a checkpoint"],
        "runs that were killed, in turn with " + ", ".join(report["runs"]): sum(
            report["runs"].values()
        ),
        "runs that differ from the one left alone": report["runs that differ"],
    }
    lines = [f"| {name} | {number} |" for name, number in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="a file for the report: JSON, or a table if it ends in .md")
    given = parser.parse_args()
    sys.exit(main(given.kills, given.seed, given.out))
