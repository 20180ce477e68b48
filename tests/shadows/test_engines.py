"""Every engine gives the numbers of the same slow twin, and checks at the same steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from tests.support import runs

N, D = 24, 4


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


GRID = list(itertools.product(OPTIMIZERS, (1, 2, 3, 8)))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, 1, generator=generator, dtype=torch.float64)
    return x, 3 * x[:, :1] + 0.1 * noise


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    # a bias before a batch normalisation would have a gradient of rounding only
    middle = [nn.BatchNorm1d(5)] if norm else []
    layers = [nn.Linear(D, 5, bias=not norm), *middle, nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers).double()


def minibatches(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [p for _ in range(3) for p in torch.randperm(N, generator=generator).split(size)]


def run(engine: str, optimizer: str, size: int, norm: bool = False) -> Any:
    x, y = rows()
    model = network(norm)
    made = OPTIMIZERS[optimizer](model.parameters())
    stopping: Any = runs.FoldStopping(
        model, made, nn.MSELoss(), (x, y), folds=5, engine=engine, patience=None
    )
    for index in minibatches(size):
        made.zero_grad()
        F.mse_loss(model(x[index]), y[index]).backward()
        made.step()
        stopping.step()
    losses = stopping.backend.held_out()
    return stopping, losses


def twin_losses(label: Tensor, optimizer: str, size: int, norm: bool = False) -> Tensor:
    """Train freshly built models by hand; one without a row in a minibatch takes no step.

    Nor does a batch normalisation that has a single one.
    """
    x, y = rows()
    losses = torch.empty(N, dtype=torch.float64)
    for k in range(5):
        model = network(norm)
        made = OPTIMIZERS[optimizer](model.parameters())
        for index in minibatches(size):
            visible = index[label[index] != k]
            if len(visible) > norm:
                made.zero_grad()
                F.mse_loss(model(x[visible]), y[visible]).backward()
                made.step()
        held = label == k
        model.eval()
        with torch.no_grad():
            losses[held] = (model(x[held]) - y[held]).square().mean(1)
    return losses


@pytest.mark.parametrize(("optimizer", "size"), GRID)
@pytest.mark.parametrize("engine", ["dense", "vmap", "replay"])
def test_engine_gives_the_numbers_of_the_twin(engine: str, optimizer: str, size: int) -> None:
    stopping, losses = run(engine, optimizer, size)
    expected = twin_losses(stopping.fold_of_row, optimizer, size)
    torch.testing.assert_close(losses, expected, rtol=1e-8, atol=1e-10)


# two normalised rows are -1 and 1: their gradient is rounding, which RMSprop would enlarge
NORMED = [(name, size) for name, size in GRID if size > 2 or (size == 2 and name != "rmsprop")]


@pytest.mark.parametrize(("optimizer", "size"), NORMED)
@pytest.mark.parametrize("engine", ["dense", "replay"])
def test_engine_normalises_the_rows_that_a_shadow_sees(
    engine: str, optimizer: str, size: int
) -> None:
    stopping, losses = run(engine, optimizer, size, norm=True)
    expected = twin_losses(stopping.fold_of_row, optimizer, size, norm=True)
    torch.testing.assert_close(losses, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_checks_do_not_depend_on_the_engine(size: int) -> None:
    steps = [[r.step for r in run(e, "sgd", size)[0].history] for e in ("dense", "vmap", "replay")]
    assert steps[0] == steps[1] == steps[2]


def test_resume_after_a_copy_has_skipped_a_step() -> None:
    stopping, losses = run("dense", "adam", 1)
    x, y = rows()
    model = network()
    made = OPTIMIZERS["adam"](model.parameters())
    other: Any = runs.FoldStopping(model, made, nn.MSELoss(), (x, y), engine="dense", patience=None)
    other.load_state_dict(stopping.state_dict())
    assert torch.equal(other.backend.held_out(), losses)
    other.close()


def test_transformer_layers_are_mapped_at_checks() -> None:
    """PyTorch fuses them in evaluation, into ops that vmap would run copy by copy and warn of."""
    losses = []
    for engine in ("vmap", "replay"):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 1)).double()
        x, y = torch.randn(40, 3, 4).double(), torch.randn(40, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rule = heldin.rules.Folds(engine=engine)
        stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, (x, y), rule)
        for _ in range(6):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        losses.append([record.estimate for record in stopping.history])
        stopping.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
