"""Folds: what cannot be right is refused with a way out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import heldin
from tests.support import runs
from tests.support.folds_runs import MODELS, OPTIMIZERS, D, N, Tied, data, train_once


@pytest.fixture
def setting() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(15)
    model = MODELS["relu"]().double()
    return model, OPTIMIZERS["sgd"](model.parameters()), *data()


def test_what_cannot_be_matched_says_the_way_out(setting: Any) -> None:
    model, optimizer, x, y = setting
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match=r"not rows of data.*stopping\.note_batch"):
        train_once(stopping, model, optimizer, x[:4] + 1, y[:4])
    optimizer.zero_grad()
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    F.mse_loss(model(x[:4]), y[:4]).backward()
    optimizer.step()
    with pytest.raises(heldin.HeldinError, match=r"4 rows.*but 3 row numbers"):
        stopping.step(indices=[0, 1, 2])
    x = x.clone()
    x[5] = x[3]
    optimizer.zero_grad()
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match="row 3 of data has copies"):
        train_once(stopping, model, optimizer, x[2:8], y[2:8])
    optimizer.zero_grad()
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    train_once(stopping, model, optimizer, x, y)  # the whole set is not ambiguous


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be a whole number >= 2"),
        ({"folds": 40}, "40 folds of 31 rows"),
        ({"folds": [0] * N}, "at least two folds"),
        ({"folds": [0, 1]}, "one whole number for each of the 31 rows"),
        ({"average": "mean"}, "average must be 'bagged' or 'best'"),
        ({"grid": 1.0}, "check_spacing must be a number above 1"),
        ({"patience": 0}, "patience must be a number of epochs >= 1"),
        ({"engine": "fast"}, "engine must be one of 'auto'"),
        ({"sample_weight": torch.ones(3)}, "31 finite numbers"),
        ({"memory": -1}, "memory must be a whole number"),
        ({"resamples": 0}, "resamples must be"),
    ],
)
def test_bad_arguments(setting: Any, options: dict[str, Any], message: str) -> None:
    model, optimizer, x, y = setting
    with pytest.raises(heldin.HeldinError, match=message):
        runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), **options)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (7, "expected tensors"),
        ((torch.ones(3, 2),), "at least two"),
        ((torch.ones(3, D), torch.ones(4)), "one length"),
        (Stream(), "IterableDataset has no row numbers"),
        ((torch.ones(1, D), torch.ones(1)), "at least 2"),
    ],
)
def test_bad_data(setting: Any, rows: Any, message: str) -> None:
    model, optimizer, _, _ = setting
    with pytest.raises(heldin.HeldinError, match=message):
        runs.FoldStopping(model, optimizer, F.mse_loss, rows)


def test_other_refusals(setting: Any) -> None:
    model, optimizer, x, y = setting
    other = MODELS["relu"]().double()
    with pytest.raises(heldin.HeldinError, match="none of its parameters"):
        runs.FoldStopping(other, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match=r"must be a torch\.optim\.Optimizer"):
        runs.FoldStopping(model, "sgd", F.mse_loss, (x, y))  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="one number for a batch"):
        runs.FoldStopping(model, optimizer, nn.MSELoss(reduction="none"), (x, y))
    with pytest.raises(heldin.HeldinError, match="loss_fn failed"):
        runs.FoldStopping(model, optimizer, F.cross_entropy, (x, y[:, :0]))
    with pytest.raises(heldin.HeldinError, match="no parameter that requires"):
        runs.FoldStopping(nn.ReLU(), optimizer, F.mse_loss, (x, y))
    tied, normed = Tied().double(), MODELS["batchnorm"]().double()
    with pytest.raises(heldin.HeldinError, match="engine='dense' is for"):
        runs.FoldStopping(
            tied, OPTIMIZERS["sgd"](tied.parameters()), F.mse_loss, (x, y), engine="dense"
        )
    with pytest.raises(heldin.HeldinError, match="batch statistics"):
        runs.FoldStopping(
            normed, OPTIMIZERS["sgd"](normed.parameters()), F.mse_loss, (x, y), engine="vmap"
        )
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match=r"after optimizer\.step\(\)"):
        stopping.step()
    train_once(stopping, model, optimizer, x, y)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(heldin.HeldinError, match="another parameter group"):
        train_once(stopping, model, optimizer, x, y)
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="called after close"):
        stopping.step()


class Wrapped(torch.optim.SGD):
    def __init__(self, parameters: Any, secret: int) -> None:
        super().__init__(parameters, lr=0.1)


def test_an_optimiser_that_cannot_be_made_again(setting: Any) -> None:
    model, _, x, y = setting
    with pytest.raises(heldin.HeldinError, match="another Wrapped"):
        runs.FoldStopping(model, Wrapped(model.parameters(), 3), F.mse_loss, (x, y))


def test_a_first_step_of_another_kind_is_refused(setting: Any) -> None:
    model, optimizer, x, y = setting
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    (2 * F.mse_loss(model(x), y)).backward()
    optimizer.step()
    with pytest.raises(heldin.HeldinError, match=r"another gradient .* 2 times that"):
        stopping.step()


def test_a_bias_whose_gradient_is_rounding_does_not_alarm() -> None:
    """A convolution's bias before a BatchNorm: Adam makes steps at random out of its gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 6, 6), torch.randint(3, (64,))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stopping = runs.FoldStopping(model, optimizer, F.cross_entropy, (x, y))
    F.cross_entropy(model(x[:32]), y[:32]).backward()
    assert model[0].bias.grad.abs().max() < 1e-6
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopping.step()


def test_dropout_of_the_shadows_leaves_the_random_numbers_of_the_loop_alone() -> None:
    x, y = data()

    def train(follow: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        rows, loss_fn = (x, y), F.mse_loss
        stopping = runs.FoldStopping(model, optimizer, loss_fn, rows, 3) if follow else None
        for _ in range(6):
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stopping is not None:
                stopping.step()
        return torch.random.get_rng_state(), model[0].weight.detach()

    for plain, followed in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, followed)
