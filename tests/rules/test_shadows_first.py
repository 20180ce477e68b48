"""`fit()` trains the shadows first; the result is that of shadows beside the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin.rules import Folds
from heldin.rules.folds import FoldStopping


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, dtype=torch.float64, generator=generator)
    noise = torch.randn(60, 3, dtype=torch.float64, generator=generator)
    return x, (2 * x[:, :3] + noise).argmax(1)


def network(kind: str) -> nn.Module:
    torch.manual_seed(1)
    extra = {"plain": nn.Identity(), "dropout": nn.Dropout(0.3), "norm": nn.BatchNorm1d(16)}
    layers = [nn.Linear(6, 16), extra[kind], nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def run(monkeypatch: Any, kind: str, leads: bool, epochs: int = 200, **options: Any) -> Any:
    """Return the stopping object, the model and the number of steps that the model took."""
    model = network(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if not leads:
        monkeypatch.setattr(FoldStopping, "may_lead", False)
    settings: dict[str, Any] = {"rule": Folds(folds=3, shadows=1, engine="replay"), **options}
    stopping = heldin.EarlyStopping(model, optimizer, F.cross_entropy, rows(), **settings)
    torch.manual_seed(2)
    stopping.fit(batch_size=20, max_epochs=epochs)
    return stopping, model, int(optimizer.state[next(model.parameters())]["step"])


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {},
    "norm": {},
    "three shadows": {"rule": Folds(folds=3, engine="replay")},
    "best": {"rule": Folds(folds=3, shadows=2, average="best", engine="replay")},
    "little memory": {"rule": Folds(folds=3, engine="replay", snapshot_memory=5000)},
    "epochs": {"patience": 4},
    "metric": {"metrics": ["accuracy"], "monitor": "accuracy", "temperature": False},
    "ended": {"epochs": 10},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_result_with_fewer_steps_of_the_model(monkeypatch: Any, case: str) -> None:
    kind = case if case in ("dropout", "norm") else "plain"
    first, model, steps = run(monkeypatch, kind, True, **CASES[case])
    twin, expected, all_steps = run(monkeypatch, kind, False, **CASES[case])
    assert first.best_step == twin.best_step
    assert first.stopped_step == twin.stopped_step
    assert first.temperature == pytest.approx(twin.temperature, abs=1e-9)
    for name, interval in twin.estimates.items():
        own = first.estimates[name]
        assert (own.value, own.low, own.high) == pytest.approx(
            (interval.value, interval.low, interval.high), abs=1e-9
        )
    for own, other in zip(first.history, twin.history, strict=True):
        assert own.step == other.step
        assert own.estimate == pytest.approx(other.estimate, abs=1e-9)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=1e-9)
    if case == "little memory":
        with pytest.raises(heldin.HeldinError, match="do not fit beside the outputs"):
            first.committee(model)
    else:
        own, other = first.committee(model)(rows()[0]), twin.committee(expected)(rows()[0])
        torch.testing.assert_close(own, other, rtol=0, atol=1e-9)
    assert steps == max(first.following.shares)
    if case in ("norm", "best", "little memory", "metric"):
        assert steps < 0.8 * all_steps
    assert all_steps == twin.history.last().step


def test_light_shadows_stay_beside_the_model(monkeypatch: Any) -> None:
    rule = Folds(folds=3, rows=0.5, engine="replay")
    stopping, _, steps = run(monkeypatch, "plain", True, epochs=5, rule=rule)
    assert steps == stopping.history.last().step
