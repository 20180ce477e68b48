"""Which rule is chosen, and that it says why."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import heldin
from heldin.rules.auto import (
    COSTS,
    EQUAL,
    LEAVE_ONE_OUT,
    NAMES,
    REGRETS,
    SIZES,
    SLACK,
    _Case,
    _choose,
    _size,
)
from tests.support import runs


def case(**options: Any) -> _Case:
    usual: dict[str, Any] = {"rows": 200, "parameters": 5000, "engine": "dense", "known": True}
    usual |= options
    usual.setdefault("size", sum(usual["parameters"] > size for size in SIZES))
    return _Case(bytes=4 * usual["parameters"], **usual)


@pytest.mark.parametrize(
    ("options", "budget", "expected"),
    [
        ({}, 6.0, "folds"),
        ({"engine": "vmap"}, 6.0, ("folds", 5)),
        ({"engine": "replay", "known": False}, 6.0, ("folds", 3)),
        ({"parameters": 1_000_000}, 6.0, "folds"),
        ({"engine": "vmap", "parameters": 1000}, 3.0, "leave-one-out"),
        ({"engine": "vmap", "known": False}, 4.5, ("folds", 2)),
        ({"rows": 5000}, 6.0, ("folds", 2)),
        ({"rows": 10_000}, 6.0, "shadow"),
        ({"rows": 50_000, "parameters": 1000}, 2.6, "shadow"),  # too many to leave out
        ({"parameters": 40_000_000}, 6.0, "shadow"),  # five copies do not fit the memory
        ({"parameters": 40_000, "known": False}, 4.2, ("folds", 3)),
        ({"parameters": 40_000, "known": False}, 3.4, ("folds", 2)),
        ({"parameters": 10**6, "engine": "replay", "known": False}, 2.5, ("shadow", 1)),
        ({"parameters": 10**6, "engine": "replay", "known": False}, 6.0, ("folds", 4)),
        ({"parameters": 10**6, "engine": "replay", "known": False, "rows": 99}, 7.0, ("folds", 5)),
        ({"parameters": 10**6, "engine": "replay", "known": False, "rows": 5000}, 6.0, "folds"),
        ({"parameters": 10**4, "engine": "replay", "known": False, "size": 2}, 2.5, "shadow"),
        ({"parameters": 1000}, 2.0, "leave-one-out"),
    ],
)
def test_the_choice(options: dict[str, Any], budget: float, expected: Any) -> None:
    one = case(**options)
    choice = _choose(one, budget, 2**30, light=one.engine == "replay")
    shadows = choice.shadows
    rule = {0: "leave-one-out", 1: "shadow"}.get(shadows, "folds")
    assert (rule, shadows) == expected if isinstance(expected, tuple) else rule == expected
    assert f"{one.rows} rows" in choice.reason
    cost = one.cost(shadows, choice.share) if shadows else LEAVE_ONE_OUT
    assert cost <= budget
    assert f"about {cost:g} times" in choice.reason
    assert not choice.over
    assert 4 * shadows * one.bytes <= 2**30


GRID = [
    case(rows=rows, engine=engine, size=size, known=known, moving=moving)
    for rows, engine, size, known, moving in itertools.product(
        (50, 200, 201, 1000, 20_000), COSTS, range(3), (False, True), (1.0, 0.02)
    )
    if moving == 1.0 or (engine == "replay" and size == 2)
]
BUDGETS = (None, 0.5, 2.0, 2.5, 3.0, 4.5, 6.0, 10.0, 100.0)


@pytest.mark.parametrize("budget", BUDGETS)
def test_reason_chosen_says_what_is_chosen(budget: float | None) -> None:
    """Of all cases: the name and the cost, what fits, and no advice that does not help."""
    for one, memory in itertools.product(GRID, (2**30, 16 * 5000, 5 * 16 * 5000)):
        light = one.engine == "replay"
        choice = _choose(one, budget, memory, light)
        limit = one.usual_budget if budget is None else budget
        said, _, advice = choice.reason.partition("; ")
        if not choice.shadows:
            assert "leave-one-out, for about 2 times" in said
            assert one.known
            assert choice.over == (limit < LEAVE_ONE_OUT)
            continue
        own = choice.shadows, choice.share
        cost, regret = one.cost(*own), one.regret(*own)
        assert f": {NAMES[own]}, for about {cost:g} times" in said
        assert f"budget {limit:g}" in said
        assert ("no rule fits" in said) == (cost > limit)
        assert choice.over == (cost > limit and budget is not None)
        room = memory // (4 * one.bytes)
        options = [
            each
            for each in REGRETS
            if each[0] <= min(room, one.wanted()) and (light or each[1] == 1.0)
        ]
        assert own in options
        cheapest = min(one.cost(*each) for each in options)
        for other in options:
            if one.cost(*other) <= max(limit, cheapest):  # nothing that fits is better
                assert regret < one.regret(*other) + EQUAL
        assert cost <= limit or cost <= SLACK * cheapest
        if "buys" in advice:
            price, name = re.search(r"budget=([\d.]+) buys ([^:]*?)(?:: |, whose)", advice).groups()
            bought = next(each for each in REGRETS if NAMES[each] == name)
            assert float(price) == one.cost(*bought) > limit
            assert _choose(one, float(price), memory, light).shadows == bought[0]
            lower = one.regret(*bought) <= regret - EQUAL
            assert ("not better weights" in advice) is not lower
            assert (f"{one.regret(*bought):.3f} times the lowest" in advice) is lower


def test_budgets_buy_no_worse_rules() -> None:
    """A larger budget never chooses a rule whose test loss was higher."""
    for one in GRID:
        regrets = []
        for budget in BUDGETS[1:]:
            choice = _choose(one, budget, 2**30, light=one.engine == "replay")
            if choice.shadows and not choice.over:
                regrets.append(one.regret(choice.shadows, choice.share))
        assert all(b < a + EQUAL for a, b in itertools.pairwise(regrets)), one


def test_costs_grow_with_shadows_and_shrink_with_size() -> None:
    """A model whose steps are dearer pays less for what Python adds to them, beside one shadow."""
    for engine, columns in COSTS.items():
        ones = [sum(column) for column in columns]
        assert ones == sorted(ones, reverse=True), engine
        assert all(each > 0 for _, each in columns)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (nn.Linear(10, 10), 0),
        (nn.Sequential(nn.Linear(200, 200), nn.LayerNorm(200), nn.ReLU()), 1),
        (nn.Sequential(nn.Linear(400, 400), nn.BatchNorm1d(400)), 2),
        (nn.Conv2d(1, 2, 3), 2),
        (nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2)), 2),
    ],
)
def test_the_size_is_how_much_of_a_step_is_arithmetic(model: nn.Module, size: int) -> None:
    assert _size(model) == size


def test_small_networks_on_images_and_texts_are_not_large() -> None:
    """By multiplications with a row, where the rows are known; no random number is drawn."""

    class Text(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(9, width), nn.Linear(width, 2)

        def forward(self, ids: Any) -> Any:
            return self.last(self.embed(ids)).mean(1)

    words = torch.zeros(3, 500, dtype=torch.long)
    images = torch.zeros(3, 1, 28, 28)
    assert _size(Text(4), [words]) == 0
    assert _size(Text(64), [words]) == 1
    assert _size(Text(600), [words]) == 2
    assert _size(nn.Conv2d(1, 2, 3), [images]) == 0
    assert _size(nn.Conv2d(1, 32, 3, padding=1), [images]) == 1
    assert _size(nn.Conv2d(1, 99, 3, padding=1), [images]) == 2
    # with more rows, one replayed shadow is as good as several in a stack
    assert _size(nn.Conv2d(1, 32, 3, padding=1), [torch.zeros(201, 1, 28, 28)]) == 2
    assert _size(nn.Conv2d(1, 16, 3, padding=1), [torch.zeros(201, 1, 28, 28)]) == 1
    model = nn.Sequential(nn.Conv2d(4, 2, 3), nn.Dropout())
    state = torch.get_rng_state()
    assert _size(model, [images]) == 2  # does not take the rows
    assert _size(model, [torch.zeros(3, 4, 9, 9)]) == 0
    assert torch.equal(state, torch.get_rng_state())


def test_the_work_of_transformer_layers_is_counted() -> None:
    """In evaluation PyTorch fuses them into one op, whose multiplications it does not count."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    words = torch.zeros(3, 24, 16)
    assert _size(layer, [words]) == 1
    assert _size(layer.requires_grad_(False), [words]) == 1
    assert torch.backends.mha.get_fastpath_enabled()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(3, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("budget", [None, 6.0])
def test_what_cannot_be_stacked_is_chosen_at_the_price_of_replay(budget: float | None) -> None:
    x, y = torch.randn(60, 5, 3), torch.randn(60, 1)
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, (x, y), budget=budget)
    shadows = stopping.following.backend.copies
    assert stopping.following.backend.engine == "replay"
    one = case(rows=60, parameters=425, engine="replay", size=0, known=False)
    rows = stopping.following.rule.rows
    cost = one.cost(shadows, 1.0 if rows == "all" else rows)
    assert f"for about {cost:g} times" in stopping.reason_chosen
    assert shadows == (1 if budget is None else 3)
    stopping.close()


def test_small_networks_on_images_are_stacked() -> None:
    x, y = torch.randn(60, 1, 8, 8), torch.randn(60, 1)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1)]
    for extra, engine, shadows in (([], "vmap", 5), ([nn.BatchNorm1d(1)], "replay", 1)):
        model = nn.Sequential(*layers, *extra)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, (x, y))
        assert (stopping.following.backend.engine, stopping.following.backend.copies) == (
            engine,
            shadows,
        )
        stopping.close()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_trunk_is_computed_once(frozen: bool) -> None:
    """Shadows of a head cost little where replay keeps what frozen modules give."""
    model = nn.Sequential(nn.Linear(3, 999), nn.ReLU(), nn.Linear(999, 999), nn.Linear(999, 1))
    model[:3].requires_grad_(not frozen)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    x = torch.randn(60, 3)
    stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, (x, x[:, :1]))
    copies = stopping.following.backend.copies
    assert (stopping.following.backend.engine, copies) == (
        ("replay", 1) if frozen else ("dense", 4)
    )
    assert ("budget=3 buys five folds" in stopping.reason_chosen) is frozen
    stopping.close()


def test_memory_for_no_shadow_is_refused() -> None:
    with pytest.raises(heldin.HeldinError, match=r"raise memory=, or use rule='evidence'"):
        _choose(case(rows=100_000, parameters=10**9), 1.2, 2**30)
    assert _choose(case(parameters=1000), None, 10).shadows == 0  # leave-one-out has none


def test_the_made_object_is_the_rule_and_trains() -> None:
    torch.manual_seed(0)
    x = torch.randn(60, 5)
    y = x[:, :1] + torch.randn(60, 1)
    kinds = {
        "folds": runs.FoldFollower,
        "shadow": runs.FoldFollower,
        "leave-one-out": runs.LeaveOneOutFollower,
        "auto": runs.FoldFollower,
    }
    for rule, kind in kinds.items():
        model = nn.Linear(5, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        made = runs.stopping(rule, model, optimizer, F.mse_loss, (x, y))
        assert type(made) is kind
        assert bool(made.reason_chosen) == (rule == "auto")
        with made:
            for _ in range(20):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                made.step()
        assert made.estimate > 0


def test_more_rows_get_fewer_shadows() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for rows, shadows in ((40, 5), (1200, 2), (12_000, 1)):
        x = torch.randn(rows, 3)
        data = x, x[:, :1]
        made = runs.stopping("auto", model, optimizer, F.mse_loss, data)
        assert isinstance(made, runs.FoldFollower)
        assert (made.rule.folds, made.rule.shadows) == (5, shadows)


def test_refusals() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.ones(4, 2), torch.ones(4, 1)
    with pytest.raises(heldin.HeldinError, match="no rule 'best'; rules are 'auto', 'folds'"):
        heldin.EarlyStopping(model, optimizer, F.mse_loss, data, "best")
    with pytest.raises(heldin.HeldinError, match="no parameter that requires"):
        runs.stopping("auto", nn.ReLU(), optimizer, F.mse_loss, data)
    lazy = nn.LazyLinear(1)
    optimizer = torch.optim.SGD(lazy.parameters(), lr=0.1)
    with pytest.raises(heldin.HeldinError, match="lazy layers"):
        runs.stopping("auto", lazy, optimizer, F.mse_loss, data)


def test_any_batch_within_a_budget() -> None:
    torch.manual_seed(0)
    rows = [{"x": torch.randn(64), "y": torch.randn(1)} for _ in range(60)]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=20, shuffle=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(64, 400), nn.ReLU(), nn.Linear(400, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batch_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]), batch["y"])

    options: dict[str, Any] = {"data": loader, "batch_loss": batch_loss, "groups": range(60)}
    made = runs.stopping("auto", model, optimizer, budget=3, **options)
    assert isinstance(made, runs.FoldFollower)
    assert made.rule.shadows == 1
    assert (
        "one shadow, for about 3 times the time of a run of 1,000 steps or more (budget 3)"
        in made.reason_chosen
    )
    for batch in loader:
        batch_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        made.step()
    made.close()
    made = runs.stopping("auto", model, optimizer, budget=4.5, **options)
    assert isinstance(made, runs.FoldFollower)
    assert made.rule.shadows == 2
    made.close()
    with pytest.raises(heldin.HeldinError, match="needs loss_fn and tensors"):
        heldin.EarlyStopping(model, optimizer, rule="leave-one-out", **options)
    with pytest.warns(heldin.HeldinWarning, match=r"fits budget=1\.5; for .* one shadow") as told:
        made = runs.stopping("auto", model, optimizer, budget=1.5, **options)
    assert len(told) == 1
    assert isinstance(made, runs.FoldFollower)
    assert made.rule.shadows == 1
    assert "(budget 1.5, which no rule fits: this is among the cheapest)" in made.reason_chosen
    made.close()


def test_moving_averages_are_refused_by_name() -> None:
    x = torch.randn(40, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    average = torch.optim.swa_utils.AveragedModel(model)
    for rule in ("folds", "shadow", "leave-one-out"):
        with pytest.raises(heldin.HeldinError, match=r"AveragedModel is a moving average.*trains"):
            runs.stopping(rule, average, optimizer, F.mse_loss, (x, x[:, :1]))
    runs.stopping("folds", model, optimizer, F.mse_loss, (x, x[:, :1])).close()


def general(rows: int, width: int = 4, loss: Any = F.mse_loss, **options: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(rows, 3)
    layers = [nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, width)]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return heldin.EarlyStopping(
        model,
        optimizer,
        data=(x, x[:, :1]),
        batch_loss=lambda model, batch: loss(model(batch[0]), batch[1]),
        **options,
    )


@pytest.mark.parametrize(
    ("rows", "shadows", "share", "reason"),
    [
        ((200, 400), 3, 0.25, r"three light shadows.*budget=6\.7 buys five folds.*1\.019 times"),
        ((200, 4), 1, "all", r"one shadow, for about 3\.4 times.*in place of 1\.071$"),
        ((201, 400), 1, "all", r"one shadow, for about 2\.5 times.*budget=6\.7 buys five folds"),
        ((1000, 4), 1, "all", r"one shadow.*budget=4\.6 buys two of five folds"),
        ((10_000, 4), 1, "all", "one shadow.*more would gain little"),
    ],
)
def test_general_models_get_a_cheap_rule_by_default(
    rows: tuple[int, int], shadows: int, share: Any, reason: str
) -> None:
    """By the number of rows and the width of the model: light steps of a small one cost as much."""
    stopping = general(*rows)
    assert stopping.following.backend.copies == shadows
    assert stopping.following.rule.rows == share
    assert re.search(reason, stopping.reason_chosen)
    stopping.close()


def test_a_budget_buys_full_folds() -> None:
    stopping = general(100, budget=9)
    assert stopping.following.backend.copies == 5
    assert stopping.following.rule.rows == "all"
    stopping.close()


def test_small_stacked_networks_keep_five_folds() -> None:
    x = torch.randn(100, 3)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, (x, x[:, :1]))
    assert stopping.following.backend.copies == 5
    assert stopping.following.rule.rows == "all"
    stopping.close()


def test_a_summed_loss_gets_one_full_shadow() -> None:
    def summed(outputs: Any, targets: Any) -> Any:
        return F.mse_loss(outputs, targets, reduction="sum")

    stopping = general(100, 400, summed)
    assert stopping.following.backend.copies == 1
    assert stopping.following.rule.rows == "all"
    assert "one shadow" in stopping.reason_chosen
    stopping.close()


@pytest.mark.parametrize("form", ["tensors", "dataset", "loader"])
def test_a_network_that_cannot_be_stacked(form: str) -> None:
    """BatchNorm of images, and a model that vmap refuses: their shadows are replayed."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x: Any) -> Any:
            return self.layer(x) if float(x.sum()) < 1e9 else x[:, :1]

    torch.manual_seed(0)
    x = torch.randn(60, 3)
    rows: Any = (x, x[:, :1])
    loader = DataLoader(TensorDataset(*rows), 20, shuffle=True)
    data = {"tensors": rows, "dataset": TensorDataset(*rows), "loader": loader}[form]
    images = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten())
    for model in (nn.Sequential(images, nn.Linear(3, 1)), Branches()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        stopping: Any = heldin.EarlyStopping(model, optimizer, F.mse_loss, data)
        assert stopping.following.backend.engine == "replay"
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        assert len(stopping.history) > 1
        stopping.close()


class Counted(Dataset[Any]):
    reads = 0  # of all copies

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        Counted.reads += 1
        return torch.full((4,), float(index)), torch.zeros(1)


def test_auto_reads_the_data_once() -> None:
    data, model, Counted.reads = Counted(), nn.Linear(4, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs.stopping("auto", model, optimizer, nn.MSELoss(), data).close()
    assert Counted.reads == 24
