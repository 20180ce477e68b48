"""Rows in time: shadows see the past and are tested on the next block."""

from __future__ import annotations

import copy
import datetime
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.rules.policy import mean_and_error
from heldin.shadows.labels import time_labels, visible
from tests.support.reading import curves

N, D = 31, 4
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}
LOSS = nn.MSELoss()


def rows(n: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, 3 * x[:, :1] + noise


def times(n: int = N) -> Tensor:
    """Return times in another order than the rows, some of them twice."""
    drawn = torch.randint(3 * n // 2, (n,), generator=torch.Generator().manual_seed(1))
    assert len(drawn.unique()) < n
    return drawn


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def minibatches(size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [p for _ in range(3) for p in torch.randperm(N, generator=generator).split(size)]


def parts(folds: int, shadows: int) -> list[tuple[Tensor, Tensor]]:
    """Return the rows that each shadow sees, and those that it is tested on, by the clock."""
    clock, order = times(), times().sort().values
    size = N // (folds + 1)
    starts = [int(order[N - (folds - k) * size]) for k in range(folds)]
    ends = [*starts[1:], int(order[-1]) + 1]
    both = zip(starts, ends, strict=True)
    return [(clock < start, (clock >= start) & (clock < end)) for start, end in both][-shadows:]


@pytest.mark.parametrize(("n", "folds"), list(itertools.product((7, 31, 60), (2, 3, 5))))
def test_blocks_are_those_of_scikit_learn(n: int, folds: int) -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    clock = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    order, labels = clock.argsort(), time_labels("rule", clock, folds, folds)
    for shadow, split in enumerate(selection.TimeSeriesSplit(folds).split(range(n))):
        past, following = (order[torch.as_tensor(part)].tolist() for part in split)
        assert {*past} == {*visible(labels, shadow, True).nonzero().flatten().tolist()}
        assert {*following} == {*(labels == shadow).nonzero().flatten().tolist()}


@pytest.mark.parametrize(("optimizer", "size"), list(itertools.product(OPTIMIZERS, (2, 8))))
@pytest.mark.parametrize("shadows", [4, 2])
@pytest.mark.parametrize("engine", ["dense", "vmap", "replay"])
def test_shadows_are_twins_that_saw_the_past(
    engine: Any, shadows: int, optimizer: str, size: int
) -> None:
    x, y = rows()
    model = network()
    made = OPTIMIZERS[optimizer](model.parameters())
    rule = heldin.rules.Folds(folds=4, shadows=shadows, engine=engine)
    stopping: Any = heldin.EarlyStopping(
        model, made, LOSS, (x, y), rule, time=times(), patience=None
    )
    for index in minibatches(size):
        made.zero_grad()
        LOSS(model(x[index]), y[index]).backward()
        made.step()
    losses = torch.full((N,), torch.nan, dtype=torch.float64)
    outputs = torch.full((N, 1), torch.nan, dtype=torch.float64)
    for seen, tested in parts(4, shadows):
        twin = network()
        made = OPTIMIZERS[optimizer](twin.parameters())
        for index in minibatches(size):
            if len(visible_rows := index[seen[index]]):
                made.zero_grad()
                LOSS(twin(x[visible_rows]), y[visible_rows]).backward()
                made.step()
        outputs[tested] = twin(x[tested]).detach()
        losses[tested] = (outputs[tested] - y[tested]).square().mean(1)
    tested = ~losses.isnan()
    inner = stopping.following
    torch.testing.assert_close(inner.backend.held_out(), losses[tested], rtol=1e-8, atol=1e-10)
    held = inner.backend.held_out_outputs()
    assert torch.equal(held.rows, tested.nonzero().flatten())
    torch.testing.assert_close(held.outputs, outputs[tested], rtol=1e-8, atol=1e-10)
    stopping.close()


def test_light_shadows_see_no_row_of_the_future() -> None:
    x, y = rows(60)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[Tensor] = []

    def batch_loss(model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled():
            seen.append(batch[0])
        return F.mse_loss(model(batch[0]), batch[1])

    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    stopping: Any = heldin.EarlyStopping(
        model,
        optimizer,
        data=loader,
        batch_loss=batch_loss,
        rule=heldin.rules.Folds(folds=3, shadows=1, rows=0.5),
        time=range(60),
    )
    seen.clear()
    for batch in loader:
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
    parts = [part for part in seen if len(part) < 20]  # not the checks of whole batches
    drawn = [int((x == row).all(1).nonzero()) for part in parts for row in part]
    stopping.close()
    assert len({*drawn}) >= 20
    assert max(drawn) < 45  # a shadow of the first three of four blocks


def test_the_band_grows_with_the_rows_that_shadows_miss() -> None:
    """Means of 1 / rows: if losses shrink as 1 / rows, this is what the full model gains."""
    x, y = rows(60)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stopping: Any = heldin.EarlyStopping(
        model, optimizer, LOSS, (x, y), heldin.rules.Folds(folds=5), time=range(60)
    )
    seen = [10, 20, 30, 40, 50]
    mean = sum(1 / rows for rows in seen) / 5
    for _ in range(80):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    losses, check = curves(stopping)[-1], stopping.history.last()
    assert check.training_loss < check.estimate
    missing = 1 - 1 / (60 * mean)
    for share, same in ((missing, True), (0.2, False)):
        _, error = mean_and_error(losses, 50 * mean, share, check.training_loss)
        assert (check.standard_error == pytest.approx(error)) == same
    assert len(losses) == 50
    stopping.close()


def train_on_walk(time: Any, order: Tensor, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the estimate, and the loss on what comes after the rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    with torch.no_grad():
        for p in model[0].parameters():
            p.mul_(30)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    data = (x[order], y[order])
    stopping = heldin.EarlyStopping(model, optimizer, LOSS, data, "folds", time=time)
    stopping.fit(batch_size=40, max_epochs=100, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return stopping.estimates["loss"].value, float(LOSS(model(x[240:]), y[240:]))


def test_a_random_walk_is_not_known_from_its_future() -> None:
    """Between two rows that were seen, a walk is easy to guess; after the last one it is not."""
    runs = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        y = torch.randn(280, 1, generator=generator, dtype=torch.float64).cumsum(0)
        y = (y - y.mean()) / y.std()
        x = torch.linspace(-1, 1.333, 280, dtype=torch.float64).unsqueeze(1)
        order = torch.randperm(240, generator=generator)
        runs.append([train_on_walk(time, order, x, y) for time in (None, order)])
    (shuffled, truth), (in_time, truth_in_time) = torch.tensor(runs).mean(0).tolist()
    assert shuffled < 0.5 * truth
    assert in_time > truth_in_time


def test_times_may_be_dates() -> None:
    numpy = pytest.importorskip("numpy")
    x, y = rows(40)
    day = datetime.date(2024, 1, 1)
    dates = [day + datetime.timedelta(days=(7 * i) % 40) for i in range(40)]
    labels = []
    for given in (
        dates,
        numpy.array(dates, dtype="datetime64[D]"),
        [7 * i % 40 for i in range(40)],
    ):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        stopping: Any = heldin.EarlyStopping(model, optimizer, LOSS, (x, y), "folds", time=given)
        labels.append(stopping.following.fold_of_row)
        stopping.close()
    assert torch.equal(labels[0], labels[2])
    assert torch.equal(labels[1], labels[2])


def test_a_resumed_run_is_the_same() -> None:
    x, y = rows()

    def begin(time: Any) -> tuple[Any, Any, Any]:
        model = network()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        return (
            model,
            optimizer,
            heldin.EarlyStopping(model, optimizer, LOSS, (x, y), "folds", time=time),
        )

    def go_on(model: Any, optimizer: Any, batches: list[Tensor]) -> None:
        for index in batches:
            optimizer.zero_grad()
            LOSS(model(x[index]), y[index]).backward()
            optimizer.step()

    batches = minibatches(8)
    model, optimizer, whole = begin(times())
    go_on(model, optimizer, batches[:5])
    state = whole.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    moments = copy.deepcopy(optimizer.state_dict())
    other, other_optimizer, resumed = begin(times())
    other.load_state_dict(weights)
    other_optimizer.load_state_dict(moments)
    resumed.load_state_dict(state)
    go_on(model, optimizer, batches[5:])
    go_on(other, other_optimizer, batches[5:])
    assert list(whole.history) == list(resumed.history)
    _, _, without = begin(None)
    with pytest.raises(heldin.HeldinError, match="saved with in time=True"):
        without.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": range(N)}, "groups, stratify and fold numbers.*leave them out"),
        ({"stratify": [0] * N}, "groups, stratify and fold numbers.*leave them out"),
        (
            {"rule": heldin.rules.Folds(folds=torch.arange(N) % 3)},
            "groups, stratify and fold numbers.*leave them out",
        ),
        ({"time": [0] * 28 + [1, 2, 3]}, "4 different times, which do not fill 6 blocks"),
        ({"time": range(N - 1)}, f"time must be a list or tensor .* each of the {N} rows"),
        ({"time": [None, *range(1, N)]}, "row 0 has None"),
        ({"time": [str(i) for i in range(N)]}, "numbers or dates, not text"),
        ({"rule": "leave-one-out"}, "time has no effect with rule 'leave-one-out'.*rule='folds'"),
        ({"rule": "evidence"}, "has no effect with rule 'evidence'"),
        (
            {"rule": heldin.rules.Validation(data=rows())},
            "time has no effect with rule 'Validation'.*rule='folds'",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], message: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    given = {"rule": "folds", "time": times(), **options}
    with pytest.raises(heldin.HeldinError, match=message):
        heldin.EarlyStopping(model, optimizer, LOSS, rows(), **given)


def test_auto_takes_the_last_blocks() -> None:
    """A single shadow sees most rows if it is tested on the last block."""
    x, y = rows(12_000)  # so many that one shadow is enough
    model = nn.Linear(D, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stopping: Any = heldin.EarlyStopping(model, optimizer, LOSS, (x, y), time=range(12_000))
    label = stopping.following.fold_of_row
    assert stopping.following.backend.copies == 1
    assert torch.equal((label == 0).nonzero().flatten(), torch.arange(10_000, 12_000))
    stopping.close()


def test_auto_takes_no_rule_that_would_ignore_time() -> None:
    """Leave-one-out is what these rows and this budget get without it."""
    x, y = rows(100)
    model = nn.Linear(D, 1).double()
    chosen = []
    for time in (None, range(100)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        stopping = heldin.EarlyStopping(model, optimizer, LOSS, (x, y), budget=2.65, time=time)
        chosen.append(stopping.reason_chosen)
        stopping.close()
    assert "leave-one-out" in chosen[0]
    assert "two of five folds" in chosen[1]
