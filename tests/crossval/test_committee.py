"""Committees: the average of several models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heldin.crossval import (
    Committee,
)
from heldin.errors import HeldinError


def members(outputs: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, outputs).double() for _ in range(3)]


X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_averages() -> None:
    values = torch.stack([model(X) for model in members(2)])
    assert torch.allclose(Committee(members(2))(X), values.mean(0))
    softmax = Committee(members(2), "softmax")(X)
    assert torch.allclose(softmax.exp(), values.softmax(-1).mean(0))
    sigmoid = Committee(members(2), "sigmoid")(X)
    assert torch.allclose(sigmoid.sigmoid(), values.sigmoid().mean(0))


def test_a_committee_of_one_is_its_member() -> None:
    (model, *_) = members(2)
    for average in ("outputs", "sigmoid"):
        assert torch.allclose(Committee([model], average)(X), model(X))
    assert torch.allclose(Committee([model], "softmax")(X), model(X).log_softmax(-1))


def test_large_logits_stay_finite() -> None:
    models = [nn.Identity(), nn.Identity()]
    large = torch.tensor([[800.0, -800.0]])
    for average in ("softmax", "sigmoid"):
        assert Committee(models, average)(large).isfinite().all()


def test_classes_in_another_dimension() -> None:
    images = torch.randn(2, 3, 4, 4)
    first = Committee([nn.Identity(), nn.Hardtanh()], "softmax", dim=1)(images)
    last = Committee([nn.Identity(), nn.Hardtanh()], "softmax")(images.movedim(1, -1))
    assert torch.allclose(first.movedim(1, -1), last)
    assert torch.allclose(first.exp().sum(1), torch.ones(2, 4, 4))


class Named(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, pixels: Tensor) -> Any:
        return SimpleNamespace(logits=self.model(pixels))


def test_keywords_and_logits() -> None:
    committee = Committee([Named(model) for model in members(2)], "softmax")
    assert torch.allclose(committee(pixels=X), Committee(members(2), "softmax")(X))


def test_a_committee_is_a_module() -> None:
    committee = Committee(members(2), "softmax")
    assert sum(p.numel() for p in committee.parameters()) == 3 * 10
    assert not committee.eval().members[0].training
    assert "average='softmax'" in repr(committee)
    committee(X).sum().backward()
    assert all(p.grad is not None for p in committee.parameters())


def test_mistakes_in_committees() -> None:
    with pytest.raises(HeldinError, match="models is empty"):
        Committee([])
    with pytest.raises(HeldinError, match="'outputs', 'softmax', 'sigmoid', got 'mean'"):
        Committee(members(2), "mean")
    with pytest.raises(HeldinError, match='use "sigmoid"'):
        Committee(members(1), "softmax")(X)
    with pytest.raises(HeldinError, match="members must return a tensor"):
        Committee([nn.LSTM(4, 2).double()])(X)


def test_members_are_calibrated_before_they_are_averaged() -> None:
    committee = Committee(members(3), "softmax", temperature=2.0)
    mean = torch.stack([(member(X) / 2).softmax(-1) for member in members(3)]).mean(0)
    assert torch.allclose(committee(X).softmax(-1), mean)
