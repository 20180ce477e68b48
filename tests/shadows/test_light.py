"""Light shadows: every engine against slow twins, the matched step, and the state."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import heldin
from heldin.rules.policy import bootstrap_shares, matched_checks
from heldin.shadows.light import LEVEL_ROWS, RowDraw, level_rows
from heldin.state.estimates import INTERVAL_COVERAGE, interval_coverage
from tests.support.reading import curves, held_per_trained, missing_share, rule_state

N, D, SEED = 24, 4, 3


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


ENGINES = ("dense", "vmap", "replay")


GRID = list(itertools.product(OPTIMIZERS, (1, 3, 8, 24)))


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    noise = torch.randn(N, 1, generator=generator, dtype=torch.float64)
    return x, 3 * x[:, :1] + noise


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def minibatches(size: int, epochs: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [p for _ in range(epochs) for p in torch.randperm(N, generator=generator).split(size)]


def start(engine: str, optimizer: str, **options: Any) -> Any:
    model = network()
    made = OPTIMIZERS[optimizer](model.parameters())
    rule = heldin.rules.Folds(rows=0.25, **{"shadows": 3, "engine": engine, **options})
    stopping: Any = heldin.EarlyStopping(
        model, made, nn.MSELoss(), rows(), rule, patience=None, seed=SEED
    )
    return stopping, model, made


def train(stopping: Any, model: nn.Module, optimizer: Any, batches: list[Tensor]) -> None:
    x, y = rows()
    for index in batches:

        def closure(index: Tensor = index) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[index]), y[index])
            loss.backward()
            return loss

        optimizer.step(closure)


def twin(label: Tensor, shadow: int, optimizer: str, batches: list[Tensor]) -> nn.Module:
    """Train a freshly built model by hand on the rows that are drawn for a shadow."""
    x, y = rows()
    model = network()
    made = OPTIMIZERS[optimizer](model.parameters())
    draw = RowDraw(0.25, SEED)
    for step, index in enumerate(batches, 1):
        seen = index[draw(label[index] != shadow, step, shadow)]

        def closure(seen: Tensor = seen) -> Tensor:
            made.zero_grad()
            loss = F.mse_loss(model(x[seen]), y[seen])
            loss.backward()
            return loss

        if len(seen):
            made.step(closure)
    return model


@pytest.mark.parametrize(("optimizer", "size"), GRID)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_gives_the_numbers_of_the_twin(engine: str, optimizer: str, size: int) -> None:
    stopping, model, made = start(engine, optimizer)
    train(stopping, model, made, minibatches(size))
    inner = stopping.following
    x, y = rows()
    model.requires_grad_(False)
    shadow_levels, model_levels = [], []
    for number, some in enumerate(level_rows(inner.fold_of_row)):
        expected = twin(inner.fold_of_row, number, optimizer, minibatches(size)).requires_grad_(
            False
        )
        for name, weight in expected.named_parameters():
            torch.testing.assert_close(
                inner.backend.weights_of(number)[name], weight.detach(), rtol=1e-9, atol=1e-11
            )
        shadow_levels.append(float(F.mse_loss(expected(x[some]), y[some])))
        model_levels.append(float(F.mse_loss(model(x[some]), y[some])))
    model.requires_grad_()
    levels = inner.backend.levels()
    assert levels == pytest.approx((sum(shadow_levels) / 3, sum(model_levels) / 3))
    stopping.close()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "loss_fn", [F.cross_entropy, lambda o, t: F.cross_entropy(o, t), nn.NLLLoss(), None]
)
def test_losses_of_stacked_shadows(loss_fn: Any, weighted: bool) -> None:
    """Closed forms, torch.func and calls row by row have the gradient of the twin."""
    if weighted and loss_fn is not F.cross_entropy:
        return
    x, y = rows()
    classes = (y[:, 0] > 0).long() + (y[:, 0] > 2).long()

    def made() -> nn.Module:
        torch.manual_seed(1)
        last = [nn.LogSoftmax(-1)] if isinstance(loss_fn, nn.NLLLoss) else []
        return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3), *last).double()

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.softmax(-1) - F.one_hot(targets, 3)).square().sum(1).mean()

    function = loss_fn or squared
    weights = torch.rand(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights / weights.mean()
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    stopping: Any = heldin.EarlyStopping(
        model,
        optimizer,
        function,
        (x, classes),
        heldin.rules.Folds(rows=0.25, shadows=2),
        sample_weight=weights if weighted else None,
        patience=None,
        seed=SEED,
    )
    label = stopping.following.fold_of_row
    twins = [made(), made()]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in twins]
    draw = RowDraw(0.25, SEED)

    def loss(network: nn.Module, index: Tensor) -> Tensor:
        if not weighted:
            return function(network(x[index]), classes[index])
        each = F.cross_entropy(network(x[index]), classes[index], reduction="none")
        return (weights[index] * each).mean()

    for step, index in enumerate(minibatches(8), 1):
        optimizer.zero_grad()
        loss(model, index).backward()
        optimizer.step()
        for number, (shadow, own) in enumerate(zip(twins, optimizers, strict=True)):
            own.zero_grad()
            loss(shadow, index[draw(label[index] != number, step, number)]).backward()
            own.step()
    assert stopping.following.backend.engine == (
        "vmap" if isinstance(loss_fn, nn.NLLLoss) else "dense"
    )
    for number, shadow in enumerate(twins):
        for name, weight in shadow.named_parameters():
            torch.testing.assert_close(
                stopping.following.backend.weights_of(number)[name], weight.detach()
            )
    stopping.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_levels_leave_the_model_as_it_was(engine: str) -> None:
    stopping, model, made = start(engine, "adam")
    train(stopping, model, made, minibatches(8))
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(made.state_dict())
    stopping.following.backend.levels()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert str(made.state_dict()) == str(state)
    stopping.close()


def test_shadows_with_batch_normalisation_and_accumulated_batches() -> None:
    def normed() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).double()

    x, y = rows()
    model = normed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True, generator=generator)
    stopping: Any = heldin.EarlyStopping(
        model,
        optimizer,
        nn.MSELoss(),
        loader,
        heldin.rules.Folds(rows=0.25, shadows=1, engine="replay"),
        seed=SEED,
    )
    recorded = []
    for _ in range(2):
        batches = list(loader)
        recorded.append(batches)
        for number, (inputs, targets) in enumerate(batches):
            (F.mse_loss(model(inputs), targets) / 3).backward()
            if number == 2:
                optimizer.step()
                optimizer.zero_grad()
    label = stopping.following.fold_of_row
    shadow = normed()
    own = torch.optim.Adam(shadow.parameters(), lr=0.01)
    draw = RowDraw(0.25, SEED)
    for step, batches in enumerate(recorded, 1):
        own.zero_grad()
        for place, (inputs, targets) in enumerate(batches):
            index = torch.tensor([int((x == row).all(1).nonzero()) for row in inputs])
            seen = draw(label[index] != 0, step, 0, place)
            (F.mse_loss(shadow(inputs[seen]), targets[seen]) / 3).backward()
        own.step()
    for name, weight in shadow.named_parameters():
        torch.testing.assert_close(
            stopping.following.backend.weights_of(0)[name], weight.detach(), rtol=1e-9, atol=1e-11
        )
    stopping.close()


def test_fit_draws_the_rows_of_the_loop() -> None:
    """The model in the stack sees all rows, its shadows the ones that are drawn."""
    stopping, model, _made = start("dense", "momentum")
    orders = torch.Generator().manual_seed(5)
    inner = stopping.following
    inner.train(8, max_steps=12, generator=orders)
    again = torch.Generator().manual_seed(5)
    batches = [p for _ in range(4) for p in torch.randperm(N, generator=again).split(8)]
    x, y = rows()
    alone = network()
    optimizer = OPTIMIZERS["momentum"](alone.parameters())
    for index in batches:
        optimizer.zero_grad()
        F.mse_loss(alone(x[index]), y[index]).backward()
        optimizer.step()
    for name, weight in alone.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], weight)
    expected = twin(inner.fold_of_row, 2, "momentum", batches)
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(inner.backend.weights_of(2)[name], weight.detach())
    some = torch.cat(level_rows(inner.fold_of_row))
    with torch.no_grad():
        assert inner.backend.levels()[1] == pytest.approx(
            float(F.mse_loss(alone(x[some]), y[some]))
        )
    stopping.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_resumed_run_is_the_same(engine: str) -> None:
    whole, model, made = start(engine, "adam")
    batches = minibatches(8, epochs=8)
    train(whole, model, made, batches[:12])
    state, weights = copy.deepcopy(whole.state_dict()), copy.deepcopy(model.state_dict())
    moments = copy.deepcopy(made.state_dict())
    train(whole, model, made, batches[12:])

    resumed, other, optimizer = start(engine, "adam")
    other.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    resumed.load_state_dict(state)
    train(resumed, other, optimizer, batches[12:])
    levels = [rule_state(each)["levels"] for each in (resumed, whole)]
    assert torch.equal(*levels)
    assert len(levels[1]) == len(whole.history) > 5
    assert resumed.history.columns() == whole.history.columns()
    assert resumed.following.shares == whole.following.shares
    whole.close()
    resumed.close()


def test_a_state_of_full_shadows_is_refused() -> None:
    light, model, made = start("dense", "sgd")
    full: Any = heldin.EarlyStopping(
        model, made, nn.MSELoss(), rows(), heldin.rules.Folds(shadows=3), seed=SEED
    )
    with pytest.raises(heldin.HeldinError, match="rows of a batch"):
        light.load_state_dict(full.state_dict())
    light.close()
    full.close()


@pytest.mark.parametrize("average", ["bagged", "best"])
def test_the_weights_of_matched_steps_are_restored(average: str) -> None:
    stopping, model, made = start("dense", "adam", average=average)
    snapshots: dict[int, dict[str, Tensor]] = {0: copy.deepcopy(model.state_dict())}
    x, y = rows()
    for step, index in enumerate(minibatches(8, epochs=40), 1):
        made.zero_grad()
        F.mse_loss(model(x[index]), y[index]).backward()
        made.step()
        snapshots[step] = copy.deepcopy(model.state_dict())
    stopping.restore()  # after a check of the last step
    inner = stopping.following
    columns = inner.history.columns()
    numbers = range(len(columns["step"]))
    matched = matched_checks(columns["step"], rule_state(stopping)["levels"].tolist(), numbers)
    if average == "best":
        lowest = min(numbers, key=lambda i: columns["estimate"][i])
        expected = {matched[lowest]: 1.0}
        assert columns["step"][matched[lowest]] < columns["step"][lowest]  # shadows are slower
        assert stopping.best_step == columns["step"][matched[lowest]]
    else:
        losses = torch.stack(curves(stopping), 1)
        shares = bootstrap_shares(losses, 100, SEED, held_per_trained(inner.fold_of_row))
        expected = {}
        for number, share in enumerate(shares.tolist()):
            expected[matched[number]] = expected.get(matched[number], 0.0) + share
    for name, value in model.state_dict().items():
        mixed = sum(
            share * snapshots[columns["step"][number]][name] for number, share in expected.items()
        )
        torch.testing.assert_close(value, mixed)
    stopping.close()


def test_the_error_of_light_shadows_has_a_tenth_of_the_estimate() -> None:
    stopping, model, made = start("dense", "sgd")
    train(stopping, model, made, minibatches(8))
    inner = stopping.following
    record = min(inner.history, key=lambda r: r.estimate)
    assert stopping.estimates["loss"].value == record.estimate
    assert record.standard_error > 0.1 * record.estimate
    plain = math.sqrt(record.standard_error**2 - (0.1 * record.estimate) ** 2)
    number = list(inner.history).index(record)
    expected = heldin.rules.policy.mean_and_error(
        curves(stopping)[number],
        held_per_trained(inner.fold_of_row),
        missing_share(inner.fold_of_row),
        record.training_loss,
    )[1]
    assert plain == pytest.approx(expected)
    assert stopping.estimates["loss"].coverage == INTERVAL_COVERAGE[3, True][0]  # of few rows
    stopping.close()


@pytest.mark.parametrize(
    ("options", "measured"),
    [
        ({}, (5, False)),
        ({"shadows": 2}, (2, False)),
        ({"shadows": 1}, (1, False)),
        ({"shadows": 3}, (3, False)),
        ({"shadows": 4}, (4, False)),
        ({"folds": 10, "shadows": 5}, None),
        ({"rows": 0.5, "shadows": 3}, None),
    ],
)
def test_the_interval_quotes_the_coverage_of_its_configuration(
    options: dict[str, Any], measured: tuple[int, bool] | None
) -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    rule = heldin.rules.Folds(**options)
    stopping = heldin.EarlyStopping(model, optimizer, nn.MSELoss(), rows(), rule, patience=None)
    train(stopping, model, optimizer, minibatches(4))
    expected = None if measured is None else INTERVAL_COVERAGE[measured][0]
    assert stopping.estimates["loss"].coverage == expected
    stopping.close()


def test_a_draw_has_so_many_rows_and_only_visible_ones() -> None:
    draw = RowDraw(0.25, seed=0)
    visible = torch.arange(40) % 5 != 0
    counts = torch.zeros(40)
    for step in range(400):
        drawn = draw(visible, step, shadow=1)
        assert int(drawn.sum()) == 10
        assert not bool((drawn & ~visible).any())
        counts += drawn
    mean = counts[visible] / 400  # each is drawn 10 / 32 of the time
    assert float((mean - 10 / 32).abs().max()) < 0.1
    assert int(draw(torch.ones(3, dtype=torch.bool), 1, 0).sum()) == 2
    assert int(draw(torch.tensor([False, True, False]), 1, 0).sum()) == 1
    assert not torch.equal(draw(visible, 1, 0), draw(visible, 1, 1))
    assert not torch.equal(draw(visible, 1, 0), draw(visible, 2, 0))


def test_levels_are_of_rows_that_the_shadow_sees() -> None:
    label = torch.arange(500) % 5
    label = torch.where(label < 3, label, -1)
    shared = level_rows(label)
    assert all(each is shared[0] for each in shared)
    assert len(shared[0]) == LEVEL_ROWS
    assert bool((label[shared[0]] < 0).all())
    few = level_rows(label[:60])
    for number, each in enumerate(few):
        assert len(each) == 48
        assert bool((label[each] != number).all())


def test_a_loss_that_is_a_sum_is_refused() -> None:
    engine: Any
    for engine in ENGINES:
        model = network()
        made = torch.optim.SGD(model.parameters(), lr=0.01)
        rule = heldin.rules.Folds(rows=0.25, engine=engine)
        with pytest.raises(heldin.HeldinError, match="mean over a batch"):
            heldin.EarlyStopping(model, made, nn.MSELoss(reduction="sum"), rows(), rule)


@pytest.mark.parametrize("share", [0.0, 1.0, 2, True, "most"])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(heldin.HeldinError, match="rows must be 'all' or a share"):
        heldin.rules.Folds(rows=share)


def hot(engine: Any, rate: float = 0.25, **options: Any) -> Any:
    """A rate at which two rows a step are too noisy, and eight are not."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, D, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [2.0], [-1.0], [0.5]], dtype=torch.float64)
    y += 0.3 * x[:, :1] * x[:, 1:2]
    model = nn.Linear(D, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    rule = heldin.rules.Folds(rows=0.1, shadows=3, engine=engine)
    stopping: Any = heldin.EarlyStopping(
        model, optimizer, nn.MSELoss(), (x, y), rule, seed=1, **options
    )
    orders = torch.Generator().manual_seed(1)

    def epochs(count: int) -> list[Tensor]:
        batches = []
        for _ in range(count):
            for index in torch.randperm(60, generator=orders).split(12):
                optimizer.zero_grad()
                F.mse_loss(model(x[index]), y[index]).backward()
                optimizer.step()
                batches.append(index)
        return batches

    return stopping, model, optimizer, (x, y), epochs


@pytest.mark.parametrize("engine", ENGINES)
def test_shadows_that_leave_the_model_start_again_on_all_rows(engine: str) -> None:
    stopping, _, _, (x, y), epochs = hot(engine, patience=None)
    batches: list[Tensor] = []
    reasons: list[str] = []
    start = copy.deepcopy(rule_state(stopping)["kept"][0])
    inner = stopping.following
    while len(batches) < 60:
        batches += epochs(1)
        reasons.append(stopping.reason)
    assert any("start again on all rows" in reason for reason in reasons)
    behind, void = rule_state(stopping)["behind"], rule_state(stopping)["void"]
    assert 10 <= behind < 60
    assert inner.backend.draw.share == 1.0
    for number in range(3):
        twin = nn.Linear(D, 1).double()
        twin.load_state_dict(start)
        own = torch.optim.SGD(twin.parameters(), lr=0.25, momentum=0.5)
        for index in batches[behind:]:
            seen = index[inner.fold_of_row[index] != number]
            own.zero_grad()
            F.mse_loss(twin(x[seen]), y[seen]).backward()
            own.step()
        for name, weight in twin.named_parameters():
            torch.testing.assert_close(inner.backend.weights_of(number)[name], weight.detach())
    # The checks before do not count, and the step that is kept is that of the shadows.
    steps = inner.history.columns()["step"]
    assert inner.best_number >= void > 0
    matched = inner._matched()
    for number in range(void, len(steps)):
        nearest = min(steps, key=lambda s: abs(math.log1p(s) - math.log1p(steps[number] - behind)))
        assert steps[matched[number]] == nearest
    assert sum(inner.shares.values()) == pytest.approx(1.0)
    stopping.restore()
    stopping.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", [1, 8])
def test_a_run_resumed_before_or_after_the_restart_is_the_same(engine: str, before: int) -> None:
    stopping, model, optimizer, _, epochs = hot(engine, patience=None)
    epochs(before)
    assert bool(rule_state(stopping)["behind"]) == (before == 8)
    saved = copy.deepcopy((stopping.state_dict(), model.state_dict(), optimizer.state_dict()))
    epochs(12)

    resumed, other, second, _, again = hot(engine, patience=None)
    again(before)  # on other weights than at the start
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    second.load_state_dict(saved[2])
    again(12)
    assert rule_state(resumed)["behind"] == rule_state(stopping)["behind"] > 0
    assert resumed.history.columns() == stopping.history.columns()
    assert resumed.following.shares == stopping.following.shares
    stopping.close()
    resumed.close()


def test_shadows_that_follow_the_model_stay_light() -> None:
    stopping, *_, epochs = hot("dense", rate=0.01, patience=None)
    epochs(30)
    assert rule_state(stopping)["behind"] == 0
    assert stopping.following.backend.draw.share == 0.1
    stopping.close()


def test_fit_starts_shadows_again_and_not_the_model() -> None:
    stopping, model, _, (x, y), _ = hot("dense")
    behind: list[int] = []
    note = lambda each: behind.append(rule_state(each)["behind"])  # noqa: E731
    stopping.fit(batch_size=12, max_epochs=100, on_epoch=note)
    assert behind[-1] > 0
    assert stopping.should_stop
    with torch.no_grad():
        assert float(F.mse_loss(model(x), y)) < 0.3


def test_coverage_depends_on_the_number_of_rows() -> None:
    for (shadows, light), shares in INTERVAL_COVERAGE.items():
        places = (20, 100, 101, 300, 301, 9999)
        quoted = [interval_coverage(shadows, light, rows) for rows in places]
        assert quoted == [share for share in shares for _ in range(2)]
    assert interval_coverage(6, False, 20) is None
