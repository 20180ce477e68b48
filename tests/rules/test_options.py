"""Rules as data: their names, those of other packages, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import heldin
from heldin import rules
from heldin.rules import options
from heldin.rules.base import StoppingRule
from heldin.state import History

untyped: Any = rules  # for arguments of wrong types


@dataclass(frozen=True, kw_only=True)
class Three(heldin.rules.Rule):
    """Stop after three steps."""

    steps: int = 3

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return StopAfter(self.steps)


class StopAfter(StoppingRule):
    _state_schema: ClassVar[dict[str, Any]] = {}

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps, self.history = steps, History()
        self.best_step: int | None = None

    def step(self) -> bool:
        self._step += 1
        self.best_step = self._step
        self.should_stop = self._step >= self.steps
        return self.should_stop

    def restore(self) -> None: ...
    def close(self) -> None: ...
    def metrics(self) -> dict[str, float]:
        return {}

    _settings = _own_state = metrics

    def _take_own_state(self, state: Any) -> None: ...


def nothing() -> None: ...


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package with three entry points is installed."""
    points = [
        EntryPoint("three", f"{__name__}:Three", "heldin.rules"),
        EntryPoint("broken", f"{__name__}:nothing", "heldin.rules"),
        EntryPoint("folds", f"{__name__}:Three", "heldin.rules"),
    ]

    def entry_points(group: str) -> list[EntryPoint]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr(options, "entry_points", entry_points)


@pytest.mark.usefixtures("installed")
def test_a_rule_of_another_package_is_known_by_its_name() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = heldin.EarlyStopping(model, optimizer, rule="three")
    assert stopping.rule == Three()
    for _ in stopping.epochs(9):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
    assert stopping.best_epoch == 2
    assert stopping.should_stop
    page = stopping.report()
    assert "<h1>StopAfter: stopped</h1>" in page
    assert stopping.estimates == {}


@pytest.mark.usefixtures("installed")
def test_names_of_other_packages() -> None:
    assert isinstance(options.resolve("folds"), heldin.rules.Folds)  # ours come first
    with pytest.raises(heldin.HeldinError, match="did you mean 'three'"):
        options.resolve("threes")
    with pytest.raises(heldin.HeldinError, match=r"'broken' of heldin\.rules names, makes a None"):
        options.resolve("broken")


@pytest.mark.parametrize("name", ["budget", "memory"])
def test_what_would_be_ignored_is_refused(name: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.zeros(24, 4), torch.zeros(24, 1))
    options: dict[str, Any] = {name: 10}
    with pytest.raises(heldin.HeldinError, match=f"{name}: it is an option of rule='auto'"):
        heldin.EarlyStopping(model, optimizer, nn.MSELoss(), data, "folds", **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rules.Auto(budget=0),
        lambda: rules.Folds(folds=1),
        lambda: rules.Folds(engine="gpu"),  # type: ignore[arg-type]
        lambda: rules.LeaveOneOut(probes=1),
        lambda: rules.Evidence(smoothing=1.0),
        lambda: rules.Evidence(estimator="all"),  # type: ignore[arg-type]
        lambda: rules.Validation(data=None, improvement=-1.0),
    ],
)
def test_a_rule_is_validated_when_it_is_made(make: Any) -> None:
    with pytest.raises(heldin.HeldinError, match="must be"):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rules.Folds(folds="a"), "folds must be a whole number >= 2, got 'a'"),
        (lambda: rules.Folds(shadows=9), "shadows must be at most the number of folds, 5, got 9"),
        (lambda: untyped.Folds(fold=3), "unknown argument 'fold'; did you mean 'folds'"),
        (lambda: untyped.Auto(memory=1.5), "memory must be a whole number >= 1, got 1.5"),
        (lambda: rules.Validation(data=3), "data must be a DataLoader or tensors"),
        (lambda: rules.Validation(data=None), "data must be a DataLoader or tensors"),
        (lambda: rules.Evidence(parameter_groups=3), "parameter_groups must be 'tensor', 'all'"),
        (
            lambda: untyped.Evidence(initial_average="a"),
            "initial_average must be a number or None",
        ),
        (
            lambda: untyped.Evidence(parameters="a"),
            "parameters must be a function of names or None",
        ),
        (lambda: untyped.Evidence(arm_threshold="a"), "arm_threshold must be a number above 0"),
        (lambda: rules.Evidence(coordinates=5, estimator="exact"), "coordinates must be None with"),
    ],
)
def test_wrong_options_are_refused_when_a_rule_is_made(make: Any, message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        make()
