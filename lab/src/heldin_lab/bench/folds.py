"""What shadow models cost, as multiples of training the model alone.

    python -m heldin_lab.bench.folds --out folds.json

Whole training steps are timed (forward, backward, optimiser, checks), in rounds that alternate
between the variants. It is the processor's time that is taken: with one thread the time on a clock,
were the machine idle. What is given is the median over rounds of the ratio to the plain run of the
same round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heldin_lab.rules import Folds, follow


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        layers += [nn.ReLU()] if i else []
        layers += [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def forever(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    while True:
        for index in torch.randperm(len(x)).split(size):
            if len(index) == size:
                yield index, x[index], y[index]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
}


def trainer(
    sizes: tuple[int, ...], optimizer: str, rows: int, batch: int, how: Callable[..., Any] | None
) -> Callable[[int], None]:
    """A function that takes so many training steps."""
    torch.manual_seed(0)
    x, y = torch.randn(rows, sizes[0]), torch.randint(sizes[-1], (rows,))
    model = network(*sizes)
    made = OPTIMIZERS[optimizer](model.parameters())
    stopping = how(model, made, F.cross_entropy, (x, y)) if how else None
    stream = forever(x, y, batch)

    def go(steps: int) -> None:
        for _ in range(steps):
            index, a, b = next(stream)
            F.cross_entropy(model(a), b).backward()
            made.step()
            made.zero_grad()
            if stopping is not None:
                stopping.step(indices=index)

    return go


def separate(sizes: tuple[int, ...], optimizer: str, rows: int, batch: int, k: int) -> Any:
    runs = [trainer(sizes, optimizer, rows, batch, None) for _ in range(k + 1)]

    def go(steps: int) -> None:
        for run in runs:
            run(steps)

    return go


def folds(**options: Any) -> Callable[..., Any]:
    return lambda *parts: follow(Folds(**options), *parts, patience=None)


def shadow(**options: Any) -> Callable[..., Any]:
    return folds(shadows=1, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "20-64-64-3, batch 32": {
        "shape": ((20, 64, 64, 3), 200, 32),
        "steps": 200,
        "ways": {
            "5 folds, dense": folds(engine="dense"),
            "5 folds, dense, train()": ("train", "dense"),
            "5 folds, vmap": folds(engine="vmap"),
            "5 folds, vmap, train()": ("train", "vmap"),
            "one shadow, dense": shadow(engine="dense"),
            "5 folds, rows found by their bits": "found",
            "5 + 1 separate runs": "separate",
        },
    },
    "784-256-256-10, batch 128": {
        "shape": ((784, 256, 256, 10), 2000, 128),
        "steps": 40,
        "ways": {
            "one shadow, dense": shadow(engine="dense"),
            "one shadow, dense, train()": ("train", "dense", 1),
            "one shadow, vmap": shadow(engine="vmap"),
            "5 folds, dense": folds(engine="dense"),
            "5 folds, dense, train()": ("train", "dense"),
        },
    },
    **{
        f"20-{width}-{width}-3, batch 32": {
            "shape": ((20, width, width, 3), 200, 32),
            "steps": 20_000 // width,
            "ways": {
                "5 folds, dense": folds(engine="dense"),
                "5 folds, dense, train()": ("train", "dense"),
                "one shadow, dense": shadow(engine="dense"),
            },
        }
        for width in (128, 256, 512)
    },
}


def found(sizes: tuple[int, ...], optimizer: str, rows: int, batch: int) -> Callable[[int], None]:
    """As `trainer`, with the contract's `step()`: the rows are looked up."""
    torch.manual_seed(0)
    x, y = torch.randn(rows, sizes[0]), torch.randint(sizes[-1], (rows,))
    model = network(*sizes)
    made = OPTIMIZERS[optimizer](model.parameters())
    stopping = folds()(model, made, F.cross_entropy, (x, y))
    stream = forever(x, y, batch)

    def go(steps: int) -> None:
        for _ in range(steps):
            _, a, b = next(stream)
            F.cross_entropy(model(a), b).backward()
            made.step()
            made.zero_grad()
            stopping.step()

    return go


def inside(
    sizes: tuple[int, ...],
    optimizer: str,
    rows: int,
    batch: int,
    engine: Any,
    shadows: int | None = None,
) -> Callable[[int], None]:
    """As `trainer`, with the model in the same stack as its shadows."""
    torch.manual_seed(0)
    x, y = torch.randn(rows, sizes[0]), torch.randint(sizes[-1], (rows,))
    model = network(*sizes)
    made = OPTIMIZERS[optimizer](model.parameters())
    rule = folds(engine=engine, shadows=shadows)
    stopping = rule(model, made, F.cross_entropy, (x, y))
    taken = 0

    def go(steps: int) -> None:
        nonlocal taken
        taken += steps
        stopping.train(batch, max_steps=taken)

    return go


def measure(rounds: int) -> list[dict[str, Any]]:
    results = []
    for name, setting in SETTINGS.items():
        shape, rows, batch = setting["shape"]
        for optimizer in OPTIMIZERS:
            runs: dict[str, Callable[[int], None]] = {
                "alone": trainer(shape, optimizer, rows, batch, None)
            }
            for way, how in setting["ways"].items():
                if how == "separate":
                    runs[way] = separate(shape, optimizer, rows, batch, 5)
                elif isinstance(how, tuple):
                    runs[way] = inside(shape, optimizer, rows, batch, *how[1:])
                elif how == "found":
                    runs[way] = found(shape, optimizer, rows, batch)
                else:
                    runs[way] = trainer(shape, optimizer, rows, batch, how)
            times: dict[str, list[float]] = {way: [] for way in runs}
            for run in runs.values():
                run(max(200, setting["steps"] // 4))  # past the dense checks of the first steps
            for _ in range(rounds):
                for way, run in runs.items():
                    start = time.process_time()
                    run(setting["steps"])
                    times[way].append((time.process_time() - start) / setting["steps"])
            for way, values in times.items():
                middle = statistics.median(values)
                pairs = zip(values, times["alone"], strict=True)
                ratio = statistics.median(own / alone for own, alone in pairs)
                results.append(
                    {
                        "network": name,
                        "optimizer": optimizer,
                        "way": way,
                        "microseconds": round(middle * 1e6, 1),
                        "times": round(ratio, 2),
                    }
                )
                print(
                    f"{name:28} {optimizer:6} {way:36} {middle * 1e6:9.1f} us {ratio:6.2f} x",
                    flush=True,
                )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="write the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(options.rounds)
    if options.out:
        machine = {"torch": torch.__version__, "machine": platform.machine(), "threads": 1}
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
