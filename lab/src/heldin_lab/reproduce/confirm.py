"""Simulated stops beside real ones, for every reading of the criterion.

A small perceptron is trained on some images of MNIST. `EvidenceStopping.paper` watches it once for
each reading, by its own observation and `step()`, and is closed when it stops; a rule that watches
does not change the path, so that one training serves all readings. Beside it a log is kept as by
the long runs, and each reading is replayed from that. The rule has no constant in the variance:
for these readings the criterion is computed from the gradient of every sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heldin_lab.rules import Evidence, EvidenceStopping

from .experiments import mnist as _mnist
from .experiments import mnist_gd as _mnist_gd
from .ledger import Log, criteria, first_above, smooth
from .readings import DIVISION, SMOOTHING, START
from .run import Run
from .training import batch

__all__ = ["TRAININGS", "Confirmed", "Training", "beside_steps", "confirm"]

GROUPS = ("tensor", "all")
CORRECTIONS = (None, "gaussian", "symmetric")


@dataclass(frozen=True)
class Training:
    """A training in which stops are confirmed.

    Attributes:
        name: in the table.
        settings: of the net and the images; those held out for validation are trained on.
        steps: at most.
        whole: also for other groupings and corrections, which no reading of the paper has, with
            averages that start at zero.
    """

    name: str
    settings: _mnist.Settings
    steps: int
    whole: bool


_NET = _mnist.Settings(widths=(784, 32, 16, 10), validation=0, test=1)
TRAININGS = (
    Training(
        "gradient descent, 256 images",
        replace(_NET, training=256, batch=256, rates=(0.3,)),
        3500,
        whole=True,
    ),
    Training(
        "SGD, batch 128, 2,500 images",
        replace(_NET, training=2500, batch=128, rates=(0.1,)),
        1200,
        whole=False,
    ),
)


@dataclass(frozen=True)
class Confirmed:
    """A reading, and the steps at which it stops; nan if it does not."""

    training: str
    smoothing: float
    start: float
    division: str | float
    groups: str
    correction: str | None
    by: str
    simulated: float
    real: float

    @property
    def agrees(self) -> bool:
        """Whether both stop at the same step, or neither does.

        >>> Confirmed("", 0.9, 0.0, "out", "tensor", None, "", math.nan, 7.0).agrees
        False
        """
        return self.simulated == self.real or (math.isnan(self.simulated) and math.isnan(self.real))


@dataclass
class _Watched:
    """A reading while the training goes on."""

    smoothing: float
    start: float
    division: str | float
    groups: str = "tensor"
    correction: str | None = None
    rule: EvidenceStopping | None = None
    average: float = 0.0
    stop: float = field(default=math.nan)

    def look(self, step: int, slow: Mapping[float, float]) -> None:
        """Take in a step."""
        if not math.isnan(self.stop):
            return
        if self.rule is not None:
            if self.rule.step():
                self.stop = float(step)
                self.rule.close()
            return
        value = slow[float(self.division)]
        self.average = self.smoothing * self.average + (1 - self.smoothing) * value
        if self.average > 0:
            self.stop = float(step)


def confirm(
    trainings: Sequence[Training] = TRAININGS,
    data: str | Path | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Confirmed]:
    """Let the rule stop for real, and compare with the replay.

    Args:
        trainings: which are made.
        data: folder of datasets.
        tell: gets a line for each training.
    """
    found: list[Confirmed] = []
    for training in trainings:
        each = list(_confirm(training, data))
        found += each
        agree = sum(one.agrees for one in each)
        tell(f"{training.name}: simulated stop = real stop for {agree} of {len(each)} readings")
    return found


def _confirm(training: Training, data: str | Path | None) -> Iterator[Confirmed]:
    s = training.settings
    run = Run(0, s, data=data)
    images, model = _mnist.digits(run, held_out=False), _mnist.net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=s.rates[0])
    log = Log(model)
    watched = list(_watched(model, training.whole))
    for step in range(1, training.steps + 1):
        x, y = images.train(batch(step, images.rows, s.batch or images.rows, 0))
        slow = {} if all(w.rule or w.stop > 0 for w in watched) else _by_sample(model, x, y)
        F.cross_entropy(model(x), y).backward()
        log.after(step)
        for each in watched:
            each.look(step, slow)
        optimizer.step()
        optimizer.zero_grad()
        if all(each.stop > 0 for each in watched):
            break
    arrays = log.arrays()
    log.close()
    for each in watched:
        if each.rule is not None and math.isnan(each.stop):
            each.rule.close()
        raw = criteria(arrays, each.division, each.groups, each.correction)
        stop = float(first_above(smooth(raw, each.smoothing, each.start), arrays["steps"]))
        yield Confirmed(
            training.name, each.smoothing, each.start, each.division, each.groups, each.correction,
            "sample by sample" if each.rule is None else "EvidenceStopping.paper", stop, each.stop,
        )  # fmt: skip


def _watched(model: nn.Module, whole: bool) -> Iterator[_Watched]:
    """All readings; and, if asked for, other groupings and corrections of those the rule has."""
    for smoothing, start, division in product(
        *([value.setting for value in choice.values] for choice in (SMOOTHING, START, DIVISION))
    ):
        if not isinstance(division, str):
            yield _Watched(smoothing, start, division, average=start)
            continue
        more = whole and start == 0.0
        for groups, correction in product(GROUPS, CORRECTIONS) if more else [("tensor", None)]:
            paper = Evidence.paper(
                parameter_groups=groups,
                smoothing=smoothing,
                initial_average=start,
                dead_coordinates="exclude" if division == "out" else division,
                correction=correction,
            )
            rule = EvidenceStopping(model, paper)
            yield _Watched(smoothing, start, division, groups, correction, rule)


def _by_sample(model: nn.Module, x: Tensor, y: Tensor) -> dict[float, float]:
    """The criterion with each constant in the variance, from the gradient of every sample."""
    from torch.func import functional_call, grad, vmap

    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, values, (row[None],)), label[None])

    gradients = vmap(grad(loss), (None, 0, 0))(weights, x, y)
    found = {}
    for epsilon in (v.setting for v in DIVISION.values if not isinstance(v.setting, str)):
        f = [
            float((len(x) * g.mean(0).square() / (g.var(0) + epsilon)).double().mean())
            for g in gradients.values()
        ]
        found[epsilon] = 1 - sum(f) / len(f)
    return found


# --- gradient flow beside gradient descent ---------------------------------------------------


def beside_steps(
    settings: Any = None,
    data: str | Path | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """How far the flow that stands for gradient descent is from its steps, where both are cheap.

    Args:
        settings: of the gradient descent (default: the quick preset with the paper's rate).
        data: folder of datasets.
        tell: gets a line.

    Returns:
        The settings that matter, the largest relative difference of the test losses and that of
        the criterion's distance from 1 (the mean of f) after a tenth of the steps, and both stops.
    """
    import numpy

    quick = _mnist_gd.EXPERIMENT.settings["quick"]
    s = settings or replace(quick, rates=(0.01,), steps=1000, every=5)
    (rate,) = s.rates
    runs = []
    for flow in (False, True):
        run = Run(0, replace(s, flow=flow), data=data)
        _mnist_gd.descend(run, rate, "evidence")
        runs.append(run)
    steps, flow_rows = (run.rows for run in runs)
    late = [row for row in flow_rows if row["step"] > s.steps / 10]

    def apart(of: Callable[[Mapping[str, float]], float]) -> float:
        known = numpy.interp(
            [row["step"] for row in late], [row["step"] for row in steps], list(map(of, steps))
        )
        return float(abs(numpy.array(list(map(of, late))) / known - 1).max())

    found = {
        "steps": s.steps,
        "rate": rate,
        "images": s.training + s.validation,
        "records": len(flow_rows),
        "test_loss": apart(lambda row: row["test_loss"]),
        "ratio": apart(lambda row: 1 - row["raw"]),
        "stops": [next((r["step"] for r in run.rows if r["stop"]), math.nan) for run in runs],
    }
    tell(f"gradient flow beside {s.steps} steps: test losses within {found['test_loss']:.1%}")
    return found
