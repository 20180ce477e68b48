"""Folds: rows, batches and the loop that they come from; refusals with a way out."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import heldin
from heldin.loop.matching import RowMatcher, Rows
from tests.support import runs
from tests.support.folds_runs import (
    MODELS,
    OPTIMIZERS,
    D,
    N,
    Tied,
    check_shadows,
    data,
    minibatches,
    train_once,
)


@pytest.mark.parametrize("name", ["relu", "layernorm"])
def test_train_takes_the_steps_of_the_loop(name: str) -> None:
    torch.manual_seed(16)
    start = MODELS[name]().double()
    x, y = rows = data()
    looped, trained = copy.deepcopy(start), copy.deepcopy(start)
    make = OPTIMIZERS["adam"]
    optimizer = make(looped.parameters())
    first = runs.FoldStopping(looped, optimizer, F.mse_loss, rows, 3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for index in torch.randperm(len(x), generator=generator).split(12):
            F.mse_loss(looped(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            first.step()
    second = runs.FoldStopping(trained, make(trained.parameters()), F.mse_loss, rows, 3)
    second.train(12, max_steps=11, generator=torch.Generator().manual_seed(2))
    saved = copy.deepcopy(second.state_dict())
    second.train(12, max_steps=11)  # nothing left to do
    assert [r.step for r in second.history] == [r.step for r in first.history if r.step <= 11]
    optimizer = make(trained.parameters())
    second = runs.FoldStopping(trained, optimizer, F.mse_loss, rows, 3)
    with pytest.raises(heldin.HeldinError, match="follows a loop of yours"):
        first.train(12)
    third = copy.deepcopy(start)
    whole = runs.FoldStopping(third, make(third.parameters()), F.mse_loss, rows, 3)
    whole.train(12, max_steps=15, generator=torch.Generator().manual_seed(2))
    for a, b in zip(whole.history, first.history, strict=True):
        for key in ("step", "estimate", "standard_error", "training_loss"):
            assert math.isclose(getattr(a, key), getattr(b, key), rel_tol=1e-9)
    for a, b in zip(looped.state_dict().values(), third.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    second.load_state_dict(saved)
    assert list(second.history) == list(whole.history)[: len(second.history)]
    with pytest.raises(heldin.HeldinError, match="one or the other"):
        train_once(second, trained, optimizer, x, y)


class Pairs(Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


@pytest.mark.parametrize("kind", ["tensors", "list", "dataset", "custom", "loader", "loader2"])
def test_all_kinds_of_data_follow_the_contract(kind: str) -> None:
    torch.manual_seed(12)
    x, y = data()
    sets: dict[str, Any] = {
        "tensors": (x, y),
        "list": [x, y],
        "dataset": TensorDataset(x, y),
        "custom": Pairs(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True),
        "loader2": DataLoader(Pairs(x, y), batch_size=8, shuffle=True, drop_last=True),
    }
    given_data = sets[kind]
    loader = given_data if kind.startswith("loader") else DataLoader(Pairs(x, y), batch_size=8)
    start = MODELS["relu"]().double()
    model = copy.deepcopy(start)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, given_data, folds=3)
    batches = []
    for _ in range(3):
        for a, b in loader:
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            batches.append(torch.stack([(x == row).all(1).nonzero()[0, 0] for row in a]))
            stopping.step()
    check_shadows(stopping, start, OPTIMIZERS["adam"], F.mse_loss, (x, y), batches)


def test_random_numbers_of_the_loop_are_left_alone() -> None:
    x, y = data()
    model = nn.Sequential(nn.Linear(D, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loader = DataLoader(Pairs(x, y), batch_size=8, shuffle=True)

    def orders(make: Any) -> Tensor:
        torch.manual_seed(0)
        stopping = make()
        numbers = torch.cat([b for _ in range(2) for _, b in loader])
        del stopping
        return numbers

    def followed() -> Any:
        return runs.FoldStopping(model, optimizer, F.mse_loss, loader)

    assert torch.equal(orders(lambda: None), orders(followed))


def test_rows_of_a_loader_are_known_even_when_augmented() -> None:
    torch.manual_seed(13)
    x, y = data()

    class Augmented(Pairs):
        def __getitem__(self, i: int) -> Any:
            return self.x[i] + 0.01 * torch.randn(D, dtype=torch.float64), self.y[i]

    for dataset, moves in ((Pairs(x, y), 0.0), (Augmented(x, y), 0.0), (Pairs(x, y), 0.1)):
        source = DataLoader(dataset, batch_size=8, shuffle=True)
        start = MODELS["relu"]().double()
        model = copy.deepcopy(start)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        stopping = runs.FoldStopping(model, optimizer, F.mse_loss, source, folds=3)
        twin = copy.deepcopy(start)
        own = OPTIMIZERS["sgd"](twin.parameters())
        for rows, b in source:
            a = rows + moves * torch.randn(D, dtype=torch.float64)  # by the loop itself
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            index = torch.stack([(y == row).all(1).nonzero()[0, 0] for row in b])
            stopping.step()
            kept = stopping.fold_of_row[index] != 2
            own.zero_grad()
            F.mse_loss(twin(a[kept]), b[kept]).backward()
            own.step()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(stopping.backend.weights_of(2)[name].detach(), p.detach())


def test_rows_with_equal_inputs_and_other_targets_are_known_by_the_loader() -> None:
    torch.manual_seed(15)
    x, y = data()
    x[1::2] = x[: len(x) - 1 : 2]  # rows have copies with other targets
    start = MODELS["relu"]().double()
    model = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, loader, folds=3)
    assert stopping.backend.engine == "dense"
    batches = []
    for _ in range(2):
        for a, b in loader:
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            stopping.step()
            batches.append(torch.stack([(y == row).all(1).nonzero()[0, 0] for row in b]))
    check_shadows(stopping, start, OPTIMIZERS["sgd"], F.mse_loss, (x, y), batches)
    other = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), folds=3)
    F.mse_loss(model(x[:4]), y[:4]).backward()
    optimizer.step()
    with pytest.raises(heldin.HeldinError, match="give the DataLoader of the loop as data"):
        other.step()


def test_accumulated_minibatches_are_one() -> None:
    torch.manual_seed(14)
    x, y = data()
    start = MODELS["relu"]().double()
    model = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), folds=3)
    for _ in range(3):
        for half in (slice(0, 10), slice(10, 20)):
            (F.mse_loss(model(x[half]), y[half]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step()
    check_shadows(stopping, start, OPTIMIZERS["sgd"], F.mse_loss, (x, y), [torch.arange(20)] * 3)


def test_steps_may_be_reported_late_and_skipped() -> None:
    torch.manual_seed(14)
    start = MODELS["relu"]().double()
    x, y = data()
    model = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), folds=3)
    batches = minibatches(8, 9)
    for i, index in enumerate(batches):
        F.mse_loss(model(x[index]), y[index]).backward()
        with torch.no_grad():
            model(x)  # an evaluation does not count
        optimizer.step()
        optimizer.zero_grad()
        if i % 3 == 2:
            stopping.step()
            assert not stopping.step()  # nothing happened since
    assert [record.step for record in stopping.history] == [0, 3, 6, 9]
    check_shadows(stopping, start, OPTIMIZERS["sgd"], F.mse_loss, (x, y), batches)


@given(
    values=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    picks=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    kind=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16]),
)
@settings(deadline=None, max_examples=60)
def test_rows_are_found_and_copies_take_turns(
    values: list[int], picks: list[int], kind: torch.dtype
) -> None:
    x = torch.tensor([[v, 1 - v] for v in values]).to(kind)
    rows = Rows((x,), x[:, :1].float())  # equal inputs have equal targets
    find = RowMatcher(rows)
    index = torch.tensor([p % len(values) for p in picks])
    found = find([x[index]])
    assert torch.equal(x[found], x[index])
    unchanged = len(index) == len(x) and torch.equal(x[index], x)
    if not unchanged:
        for value in x.unique(dim=0):
            copies = (x == value).all(1).nonzero().flatten().tolist()
            used = [copies.index(i) for i in found.tolist() if i in copies]
            assert used == [i % len(copies) for i in range(len(used))]


def test_rows_are_found_in_another_type() -> None:
    x, y = data()
    assert RowMatcher(Rows((x,), y))([x[[4, 2]].float()]).tolist() == [4, 2]
    zero = torch.tensor([[0.0], [-0.0]])
    assert RowMatcher(Rows((zero,), torch.tensor([0.0, 1.0])))([zero[[1]]]).tolist() == [1]


def test_a_check_shows_the_training_loss_of_no_more_rows_than_are_held_out() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(500, 3), torch.randn(500, 1)
    with runs.ShadowStopping(model, optimizer, F.mse_loss, (x, y)) as stopping:
        with torch.no_grad():
            some = F.mse_loss(model(x[::5]), y[::5])
        assert stopping.history[0].training_loss == pytest.approx(some.item())


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
        runs.FoldStopping(model, "sgd", F.mse_loss, (x, y))
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
    model: Any = nn.Sequential(
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
        model: Any = nn.Sequential(nn.Linear(D, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
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
