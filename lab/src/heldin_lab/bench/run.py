"""Timing: every method in the same process, interleaved, in several processes; medians of many."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log
from multiprocessing import get_context

import torch
from torch import Tensor, nn

from .methods import METHODS, Skip, Way, run
from .workloads import WORKLOADS, encoder, mlp

__all__ = ["Measurement", "growth", "measure", "measure_apart", "peak_memory", "steady_heap"]

Progress = Callable[[str], None]
PROCESSES = 7  # where a process has its memory moves a ratio by several hundredths
SLOW = 20.0  # times a plain step: a few rounds are enough


def steady_heap() -> bool:
    """Tell glibc to keep freed memory, as jemalloc and tcmalloc do; whether it could be told.

    Otherwise it is luck which method frees the last block of the heap and pays for giving it back
    and taking it again in every step: for gradients of 48 MB more than what is to be measured.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    keep, from_heap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    return mallopt is not None and all(mallopt(what, 2**31 - 1) for what in (keep, from_heap))


@dataclass
class Measurement:
    """One workload: median seconds per step of each method, and what was left out and why.

    Attributes:
        apart: the multiples of the plain step in each of several processes.
    """

    workload: str
    title: str
    seconds: dict[str, float] = field(default_factory=dict)
    apart: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Multiples of the plain step."""
        base = self.seconds["plain"]
        return {name: value / base for name, value in self.seconds.items()}


def measure_apart(
    name: str,
    methods: Sequence[str],
    progress: Progress,
    steady: bool = False,
    processes: int = PROCESSES,
    processor_time: bool = False,
) -> Measurement:
    """`measure` in several new processes, one after the other.

    Where the memory of a process happens to lie moves a ratio by some hundredths, however often it
    is measured there; hence the medians of the ratios over processes. Methods that are far behind
    are timed in the first one only. Processor time is for machines that others use; the process
    must have one thread then.
    """
    found: list[Measurement] = []
    fast = list(methods)
    for number in range(processes):
        with get_context("spawn").Pool(1) as pool:
            where = f" in process {number + 1}"
            args = (name, fast, progress, where, steady, processor_time)
            found.append(pool.apply(_in_process, args))
        fast = [m for m in fast if found[0].ratios.get(m, SLOW) < SLOW]
    result = found[0]
    apart = {m: [f.ratios[m] for f in found if m in f.seconds] for m in result.seconds}
    base = statistics.median(f.seconds["plain"] for f in found)
    seconds = {m: base * statistics.median(each) for m, each in apart.items()}
    return replace(result, seconds=seconds, apart=apart)


def _in_process(
    name: str,
    methods: Sequence[str],
    progress: Progress,
    where: str,
    steady: bool,
    processor_time: bool,
) -> Measurement:
    if steady:
        steady_heap()
    if processor_time:
        torch.set_num_threads(1)
    clock = time.process_time if processor_time else time.perf_counter
    return measure(name, methods, lambda line: progress(line + where if line else line), clock)


def measure(
    name: str,
    methods: Sequence[str],
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Time the methods on one workload, after checking that they agree on the second moment."""
    workload = WORKLOADS[name]
    if workload.batches is not None:
        return _measure_runs(name, workload.batches(), methods, progress, clock)
    torch.manual_seed(0)
    model, x, y = workload.make()
    result = Measurement(name, workload.title)
    ways = _agreeing(model, x, y, methods, result, progress)
    for way in ways.values():
        with way.active():
            for _ in range(3):
                way.step()
    times: dict[str, list[float]] = {method: [] for method in ways}
    for repeat in range(workload.repeats):
        progress(f"{name}: round {repeat + 1} of {workload.repeats}")
        turns = list(ways.items())
        for method, way in turns if repeat % 2 == 0 else reversed(turns):  # against a drift
            if repeat > 2 and times[method][0] > SLOW * times["plain"][0]:
                continue
            with way.active():
                start = clock()
                for _ in range(workload.inner):
                    way.step()
                times[method].append((clock() - start) / workload.inner)
    result.seconds = {method: statistics.median(values) for method, values in times.items()}
    return result


def _measure_runs(
    name: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    methods: Sequence[str],
    progress: Progress,
    clock: Callable[[], float],
) -> Measurement:
    """Seconds per step of whole runs, each with a new model and a new rule."""
    workload = WORKLOADS[name]
    result = Measurement(name, workload.title)
    times: dict[str, list[float]] = {}
    turns = list(dict.fromkeys(["plain", *methods]))
    for repeat in range(workload.repeats):
        progress(f"{name}: run {repeat + 1} of {workload.repeats}")
        for method in turns if repeat % 2 == 0 else reversed(turns):
            torch.manual_seed(0)
            model, _, _ = workload.make()
            start = clock()
            try:
                run(method, model, batches)
            except Skip as reason:
                result.skipped[method] = str(reason)
                continue
            times.setdefault(method, []).append((clock() - start) / len(batches))
    result.seconds = {m: statistics.median(times[m]) for m in turns if m in times}
    return result


def _agreeing(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    methods: Sequence[str],
    result: Measurement,
    progress: Progress,
) -> dict[str, Way]:
    ways: dict[str, Way] = {}
    truth: dict[str, Tensor] | None = None
    for method in dict.fromkeys(["plain", "heldin exact", *methods]):
        progress(f"{result.workload}: preparing {method}")
        try:
            way = METHODS[method](model, x, y)
        except Skip as reason:
            result.skipped[method] = str(reason)
            continue
        if way.squares is not None:
            found = way.squares()
            truth = truth or found
            for parameter, squares in truth.items():
                error = float((found[parameter] - squares).norm() / squares.norm())
                if error > 1e-3:
                    result.skipped[method] = f"wrong second moment of {parameter} ({error:.2g})"
                    break
        if method in ("plain", *methods) and method not in result.skipped:
            ways[method] = way
    return {method: ways[method] for method in dict.fromkeys(["plain", *methods]) if method in ways}


# --- memory ----------------------------------------------------------------------------------


def peak_bytes() -> int:
    """The most memory that this program has had (Linux).

    Not `ru_maxrss`: that survives exec, so the child of a large process starts with its parent's.
    """
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


# For the environment of a process: the heap gives every larger block back as soon as it is freed.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

_PROGRAM = """
import resource, sys, torch
from heldin_lab.bench.methods import METHODS, Skip
from heldin_lab.bench.run import peak_bytes
from heldin_lab.bench.workloads import SMALL, WORKLOADS
torch.set_num_threads(2)
method, workload = sys.argv[1:]
for make in SMALL:
    try:
        way = METHODS[method](*make())
    except Skip:
        continue
    with way.active():
        for _ in range(4):
            way.step()
page = resource.getpagesize()
with open("/proc/self/statm") as f:
    base = int(f.read().split()[1]) * page
model, x, y = WORKLOADS[workload].make()
way = METHODS[method](model, x, y)
with way.active():
    for _ in range(4):
        way.step()
print(peak_bytes() - base)
"""


def peak_memory(name: str, methods: Sequence[str], repeats: int = 5) -> dict[str, float]:
    """Peak memory of four steps as multiples of the plain one's, each in processes of its own.

    What the interpreter and its libraries take is left out. The heap is told to give every larger
    block back at once: how much of what was freed it would keep otherwise is luck, up to a quarter
    more here. Medians of several processes; one is enough for a method that takes long. Linux only.
    """
    found = {}
    for method in dict.fromkeys(["plain", *methods]):
        values: list[float] = []
        start = time.perf_counter()
        while len(values) < repeats and (not values or time.perf_counter() - start < 30):
            done = subprocess.run(
                [sys.executable, "-c", _PROGRAM, method, name],
                capture_output=True,
                text=True,
                env={**os.environ, **GIVEN_BACK},
            )
            if done.returncode:
                break
            values.append(float(done.stdout))
        if values:
            found[method] = statistics.median(values)
    return {method: value / found["plain"] for method, value in found.items() if "plain" in found}


# --- growth ----------------------------------------------------------------------------------

GROWTH: dict[str, tuple[list[int], Callable[[int], tuple[nn.Module, Tensor, Tensor]]]] = {
    "width": ([128, 256, 512, 1024, 2048], lambda n: mlp((n, n, n, 10))),
    "depth": ([2, 4, 8, 16], lambda n: mlp((256, *[256] * n, 10))),
    "batch": ([16, 64, 256, 1024], lambda n: mlp((256, 256, 256, 10), n)),
    "length": ([16, 32, 64, 128, 256], lambda n: encoder(128, 2, n, 8)),
}


def growth(
    what: str, methods: Sequence[str], progress: Progress = lambda _: None
) -> tuple[list[int], dict[str, list[float]], dict[str, float]]:
    """Seconds per step as one size grows, and the slope in log-log (1: proportional)."""
    sizes, make = GROWTH[what]
    seconds: dict[str, list[float]] = {method: [] for method in ("plain", *methods)}
    for size in sizes:
        progress(f"growth with {what}: {size}")
        torch.manual_seed(0)
        model, x, y = make(size)
        ways = {method: METHODS[method](model, x, y) for method in seconds}
        for method, value in _medians(ways):
            seconds[method].append(value)
    slopes = {method: slope(sizes, values) for method, values in seconds.items()}
    return sizes, seconds, slopes


def _medians(ways: dict[str, Way]) -> Iterator[tuple[str, float]]:
    times: dict[str, list[float]] = {method: [] for method in ways}
    for repeat in range(13):
        for method, way in ways.items():
            with way.active():
                start = time.perf_counter()
                for _ in range(3):
                    way.step()
                if repeat > 2:
                    times[method].append((time.perf_counter() - start) / 3)
    return ((method, statistics.median(values)) for method, values in times.items())


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    a, b = [log(s) for s in sizes], [log(v) for v in values]
    ma, mb = statistics.fmean(a), statistics.fmean(b)
    up = sum((u - ma) * (v - mb) for u, v in zip(a, b, strict=True))
    return up / sum((u - ma) ** 2 for u in a)
