"""`heldin.verify` on a run, and `verify=True`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import heldin


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def run(steps: int = 5, **options: Any) -> Any:
    torch.manual_seed(0)
    rows = [(torch.randn(3), torch.randn(1)) for _ in range(30)]
    loader: Any = DataLoader(rows, batch_size=6, shuffle=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    stopping = heldin.EarlyStopping(
        model, optimizer, data=loader, batch_loss=loss, rule="folds", **options
    )
    for batch in [batch for _ in range(0, steps, len(loader)) for batch in loader][:steps]:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return stopping


def test_a_run_is_verified() -> None:
    found = heldin.verify(run())
    assert found.ok
    text = str(found)
    for part in (
        "engine replay",
        "5 steps checked",
        "are the same",
        "slices of the loop's batches",
    ):
        assert part in text


def test_every_step_is_checked() -> None:
    some, every = (str(heldin.verify(run(40, verify=verify))) for verify in (False, True))
    assert "40 steps checked" in every
    assert "40 steps checked" not in some


def test_what_cannot_be_verified_is_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evidence = heldin.EarlyStopping(model, optimizer, rule="evidence")
    with pytest.raises(heldin.HeldinError, match="only rules with shadows"):
        heldin.verify(evidence)
    with pytest.raises(heldin.HeldinError, match="verify has no effect"):
        heldin.EarlyStopping(model, optimizer, rule="evidence", verify=True)
    stopping = run()
    with pytest.raises(heldin.HeldinError, match="without further arguments"):
        heldin.verify(stopping, 3)
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="after close"):
        heldin.verify(stopping)
