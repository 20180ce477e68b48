"""Shadow models: the same numbers as training each of them on its own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heldin
from heldin.shadows import stack as _stack
from tests.support import runs
from tests.support.folds_runs import (
    MODELS,
    OPTIMIZERS,
    D,
    N,
    check_shadows,
    data,
    minibatches,
    separately,
)
from tests.support.reading import curves


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 4), nn.Bilinear(4, D, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.b(self.a(x), z)


ENGINES = {
    "linear": ["dense", "vmap", "replay"],
    "relu": ["dense", "vmap", "replay"],
    "deep": ["dense", "vmap", "replay"],
    "tied": ["vmap", "replay"],
    "batchnorm": ["dense", "replay"],
    "batchnorms": ["dense", "replay"],
    "layernorm": ["vmap", "replay"],
}


def run(
    model: nn.Module,
    make: Any,
    loss_fn: Any,
    rows: tuple[Tensor, ...],
    batches: list[Tensor],
    schedule: Any = None,
    cls: Any = runs.FoldStopping,
    how: str = "found",
    **options: Any,
) -> Any:
    """The contract's loop."""
    *inputs, y = rows
    optimizer = make(model.parameters())
    stopping = cls(model, optimizer, loss_fn, rows, patience=None, **options)
    scheduler = schedule(optimizer) if schedule else None
    for index in batches:
        loss_fn(model(*(x[index] for x in inputs)), y[index]).backward()
        optimizer.step()
        if scheduler:
            scheduler.step()
        optimizer.zero_grad()
        stopping.step(indices=index) if how == "told" else stopping.step()
    return stopping


@pytest.mark.parametrize(("name", "engine"), [(m, e) for m, es in ENGINES.items() for e in es])
def test_every_engine_gives_the_numbers_of_separate_runs(name: str, engine: str) -> None:
    torch.manual_seed(1)
    start = MODELS[name]().double()
    rows, batches = data(), minibatches(7, 12)
    for make in (OPTIMIZERS["nesterov"], OPTIMIZERS["adam"]):
        model = copy.deepcopy(start)
        stopping = run(model, make, nn.MSELoss(), rows, batches, folds=4, engine=engine)
        assert stopping.backend.engine == engine
        if name == "tied":  # separate runs leave an unused parameter alone
            batchless = [p for n, p in model.named_parameters() if n == "unused"]
            assert torch.equal(batchless[0], torch.ones(2, dtype=torch.float64))
        check_shadows(stopping, start, make, nn.MSELoss(), rows, batches)


@pytest.mark.parametrize("engine", ["dense", "vmap"])
def test_a_loop_that_writes_every_batch_into_one_tensor(engine: str) -> None:
    """Steps of the copies wait; by then the loop's tensor has the rows of another batch."""
    torch.manual_seed(5)
    start = MODELS["relu"]().double()
    (x, y), batches, make = data(), minibatches(5, 23), OPTIMIZERS["adam"]
    batches = [index for index in batches if len(index) == 5]
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    stopping: Any = runs.FoldStopping(
        model, optimizer, F.mse_loss, (x, y), 4, engine=engine, patience=None
    )
    batch = torch.empty_like(x[:5])
    for index in batches:
        batch.copy_(x[index])
        optimizer.zero_grad()
        F.mse_loss(model(batch), y[index]).backward()
        optimizer.step()
        stopping.step()
    check_shadows(stopping, start, make, F.mse_loss, (x, y), batches)


def test_an_activation_in_two_places() -> None:
    torch.manual_seed(1)
    act = nn.Tanh()
    start = nn.Sequential(nn.Linear(D, 5), act, nn.Linear(5, 4), act, nn.Linear(4, 1)).double()
    rows, batches, make = data(), minibatches(7, 12), OPTIMIZERS["adam"]
    stopping = run(copy.deepcopy(start), make, nn.MSELoss(), rows, batches, folds=4)
    assert stopping.backend.engine == "dense"
    check_shadows(stopping, start, make, nn.MSELoss(), rows, batches)
    twice = nn.Linear(D, D).double()
    optimizer = make(twice.parameters())
    model = nn.Sequential(twice, act, twice)
    assert (
        runs.FoldStopping(model, optimizer, F.mse_loss, (rows[0], rows[0])).backend.engine
        != "dense"
    )


def test_statistics_that_the_loop_has_frozen() -> None:
    torch.manual_seed(1)
    start = MODELS["batchnorms"]().double()
    for norm in (start[0], start[2]):
        norm.eval()
        norm.running_var.add_(torch.rand(norm.num_features))
    rows, batches, make = data(), minibatches(7, 12), OPTIMIZERS["nesterov"]
    stopping = run(copy.deepcopy(start), make, nn.MSELoss(), rows, batches, folds=4)
    assert stopping.backend.engine == "dense"
    check_shadows(stopping, start, make, nn.MSELoss(), rows, batches)


def test_fit_normalises_as_a_loop_does() -> None:
    """The model is one more copy in the stack; its statistics come back to it."""
    x, y = data()
    results = []
    for fits in (True, False):
        torch.manual_seed(1)
        model = MODELS["batchnorms"]().double()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        if fits:
            stopping = heldin.EarlyStopping(
                model, optimizer, F.mse_loss, (x, y), "folds", patience=None, finish=True
            )
            stopping.fit(batch_size=N, max_epochs=5)
        else:
            for _ in range(5):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-9, atol=1e-11)


def test_a_batch_of_one_row_has_no_statistics() -> None:
    model = MODELS["batchnorm"]().double()
    stopping = heldin.EarlyStopping(
        model, OPTIMIZERS["sgd"](model.parameters()), F.mse_loss, data(), "folds"
    )
    with pytest.raises(heldin.HeldinError, match="a batch has a single row"):
        stopping.fit(batch_size=N - 1, max_epochs=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("engine", ["dense", "vmap"])
def test_every_optimiser(optimizer: str, engine: str) -> None:
    torch.manual_seed(2)
    start = MODELS["relu"]().double()
    rows, batches, make = data(), minibatches(9, 9), OPTIMIZERS[optimizer]
    stopping = run(copy.deepcopy(start), make, F.mse_loss, rows, batches, folds=3, engine=engine)
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)


def test_lbfgs_evaluates_each_shadow_by_itself() -> None:
    torch.manual_seed(3)
    start = MODELS["relu"]().double()
    x, y = rows = data()
    model = copy.deepcopy(start)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    stopping = runs.FoldStopping(model, optimizer, F.mse_loss, rows, 3, patience=None)

    def one(m: nn.Module, o: torch.optim.Optimizer, keep: Tensor) -> Any:
        def closure() -> Tensor:
            o.zero_grad()
            loss = F.mse_loss(m(x[keep]), y[keep])
            loss.backward()
            return loss

        return closure

    everything = torch.ones(N, dtype=torch.bool)
    for _ in range(3):
        optimizer.step(one(model, optimizer, everything))
        stopping.step(indices=torch.arange(N))
    for k in range(3):
        twin = copy.deepcopy(start)
        own = torch.optim.LBFGS(twin.parameters(), lr=0.5, max_iter=4)
        for _ in range(3):
            own.step(one(twin, own, stopping.fold_of_row != k))
        for name, p in twin.named_parameters():
            torch.testing.assert_close(stopping.backend.weights_of(k)[name].detach(), p.detach())


def test_parameter_groups_and_schedules_are_followed() -> None:
    torch.manual_seed(4)
    start = MODELS["relu"]().double()
    rows, batches = data(), minibatches(8, 15)

    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first], "lr": 0.1}, {"params": others, "momentum": 0.5}]
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)

    for engine in ("dense", "vmap"):
        model = copy.deepcopy(start)
        stopping = run(model, make, F.mse_loss, rows, batches, schedule, folds=3, engine=engine)
        check_shadows(stopping, start, make, F.mse_loss, rows, batches, schedule=schedule)


def test_an_optimiser_that_has_stepped_is_refused() -> None:
    """The model knows rows that the shadows would hold out."""
    torch.manual_seed(5)
    for make in (OPTIMIZERS["adam"], OPTIMIZERS["adafactor"], OPTIMIZERS["asgd"]):
        model = MODELS["relu"]().double()
        x, y = rows = data()
        optimizer = make(model.parameters())
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping = runs.FoldStopping(model, optimizer, F.mse_loss, rows, 2, patience=None)
        F.mse_loss(model(x), y).backward()
        with pytest.raises(heldin.HeldinError, match="has already taken steps"):
            optimizer.step()
        stopping.close()


def with_own_mean(o: Tensor, t: Tensor) -> Tensor:
    """Neither mean nor sum of the rows' losses."""
    weight = 1 + t.abs()
    return ((o - t).square() * weight).sum() / weight.sum()


def smooth_mean(o: Tensor, t: Tensor) -> Tensor:
    return (1 + (o - t).square()).log().mean()


def branching(o: Tensor, t: Tensor) -> Tensor:
    return (o - t).abs().mean() if bool((o > 1e9).any()) else (o - t).square().mean()


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.MSELoss(reduction="sum"),
        nn.HuberLoss(),
        F.l1_loss,
        smooth_mean,
        branching,
        lambda o, t: F.binary_cross_entropy_with_logits(o, (t > 0).double()),
    ],
)
def test_any_loss(loss_fn: Any) -> None:
    torch.manual_seed(6)
    start = MODELS["relu"]().double()
    rows, batches = data(), minibatches(8, 6)
    make = OPTIMIZERS["sgd"] if "sum" not in str(loss_fn) else OPTIMIZERS["adam"]
    stopping = run(copy.deepcopy(start), make, loss_fn, rows, batches, folds=3)
    check_shadows(stopping, start, make, loss_fn, rows, batches)


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
)
def test_several_classes(loss_fn: Any) -> None:
    torch.manual_seed(7)
    start = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = data()
    rows = x, (y[:, 0] > 0).long() + (y[:, 0] > 1).long()
    batches, make = minibatches(8, 6), OPTIMIZERS["adam"]
    stopping = run(copy.deepcopy(start), make, loss_fn, rows, batches, folds=3)
    check_shadows(stopping, start, make, loss_fn, rows, batches)


def test_class_weights_train_exactly() -> None:
    torch.manual_seed(7)
    start = nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = data()
    rows = x, (y[:, 0] > 0).long() + (y[:, 0] > 1).long()
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64))
    batches, make = minibatches(8, 6), OPTIMIZERS["sgd"]
    stopping = run(copy.deepcopy(start), make, weighted, rows, batches, folds=3)
    assert stopping.backend.engine == "replay"
    assert stopping.backend.describe_rows().endswith("its neither")
    for k in range(3):
        twin = copy.deepcopy(start)
        separately(
            twin, make(twin.parameters()), weighted, rows, batches, stopping.fold_of_row != k
        )
        for name, p in twin.named_parameters():
            torch.testing.assert_close(stopping.backend.weights_of(k)[name].detach(), p.detach())


def test_a_mean_with_its_own_denominator() -> None:
    torch.manual_seed(6)
    start = MODELS["relu"]().double()
    rows, batches, make = data(), minibatches(8, 6), OPTIMIZERS["sgd"]
    stopping = run(copy.deepcopy(start), make, with_own_mean, rows, batches, folds=3)
    x, y = rows
    expected = 0.0
    for k in range(3):
        twin, seen = copy.deepcopy(start), stopping.fold_of_row != k
        separately(twin, make(twin.parameters()), with_own_mean, rows, batches, seen)
        twin.eval()
        own = (~seen).nonzero().flatten()
        for block in own.split(32):  # batches of the loop's size, which nobody has told
            loss = with_own_mean(twin(x[block]).detach(), y[block])
            expected += float(loss) * len(block) / N
    assert math.isclose(float(stopping.backend.held_out().mean()), expected, rel_tol=1e-9)


def test_several_inputs_and_keywords() -> None:
    torch.manual_seed(8)
    start = Two().double()
    x, y = data()
    rows, batches, make = (x, x.flip(0), y), minibatches(8, 6), OPTIMIZERS["sgd"]
    stopping = run(copy.deepcopy(start), make, F.mse_loss, rows, batches, folds=3)
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)


def test_images_are_flattened() -> None:
    torch.manual_seed(8)
    start = nn.Sequential(nn.Flatten(), nn.Linear(D, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x, y = data()
    rows, batches, make = (x.view(N, 2, 3), y), minibatches(8, 6), OPTIMIZERS["sgd"]
    stopping = run(copy.deepcopy(start), make, F.mse_loss, rows, batches, folds=3)
    assert stopping.backend.engine == "dense"
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)


def test_sequences_are_not_taken_for_plain_rows() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x, y = data()
    rows = (x.view(N, 2, 3), y[:, None].expand(N, 2, 1))
    stopping = run(model, OPTIMIZERS["sgd"], F.mse_loss, rows, minibatches(8, 3), folds=3)
    assert stopping.backend.engine == "vmap"


class Branching(nn.Module):
    """As transformers do with a mask: a shortcut where nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        given = x != 0
        return self.last(x) if bool(given.all()) else self.last(x * given)


def test_models_that_branch_on_their_data_are_run_one_by_one() -> None:
    torch.manual_seed(8)
    start, make = Branching().double(), OPTIMIZERS["sgd"]
    rows, batches = data(), minibatches(8, 6)
    stopping = run(copy.deepcopy(start), make, F.mse_loss, rows, batches, folds=3)
    assert stopping.backend.engine == "replay"
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)
    optimizer = make(start.parameters())
    with pytest.raises(heldin.HeldinError, match=r"engine='vmap': .* use engine='replay'"):
        runs.FoldStopping(start, optimizer, F.mse_loss, rows, engine="vmap")


@pytest.mark.parametrize(("cls", "part"), [(runs.FoldStopping, 3), (runs.ShadowStopping, None)])
def test_sample_weights(cls: Any, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stack, "WORTHWHILE", 0)
    torch.manual_seed(9)
    start = MODELS["relu"]().double()
    x, y = data()
    weights = torch.rand(N, dtype=torch.float64)
    weights /= weights.mean()
    rows, batches, make = (x, y), minibatches(8, 6), OPTIMIZERS["sgd"]
    model = copy.deepcopy(start)
    optimizer = make(model.parameters())
    stopping = cls(
        model, optimizer, F.mse_loss, rows, part, patience=None, sample_weight=3 * weights
    )
    for index in batches:
        rowwise = (model(x[index]) - y[index]).square()[:, 0]
        (weights[index] * rowwise).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        stopping.step()

    def loss_fn(o: Tensor, t: Tensor) -> Tensor:
        return ((o - t[:, :1]).square()[:, 0] * t[:, 1]).mean()

    carried = (x, torch.cat([y, weights[:, None]], dim=1))
    check_shadows(stopping, start, make, loss_fn, carried, batches)


@pytest.mark.parametrize("engine", ["dense", "vmap", "replay"])
def test_a_shadow_left_without_rows_steps_with_gradient_zero(engine: str) -> None:
    torch.manual_seed(10)
    start = MODELS["relu"]().double()
    rows, batches, make = data(), minibatches(1, 40), OPTIMIZERS["nesterov"]
    stopping = run(copy.deepcopy(start), make, F.mse_loss, rows, batches, folds=3, engine=engine)
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)


@pytest.mark.parametrize("engine", ["dense", "vmap"])
def test_dropout_draws_for_each_shadow(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    whole = [torch.arange(N)] * 2
    stopping = run(model, OPTIMIZERS["sgd"], F.mse_loss, data(), whole, folds=3, engine=engine)
    assert stopping.backend.engine == engine
    model.eval()  # evaluation has none
    assert torch.equal(stopping.backend.held_out(), stopping.backend.held_out())
    stopping.close()
    model.train()
    label = torch.full((N,), 3)
    label[:3] = torch.arange(3)  # shadows that hardly differ in their rows
    other = run(model, OPTIMIZERS["sgd"], F.mse_loss, data(), whole, folds=label, engine=engine)
    first, second = (other.backend.weights_of(k)["0.weight"] for k in (0, 1))
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(9)])
def test_steps_that_wait_have_the_modes_of_the_loop(kind: Any) -> None:
    """Loops evaluate the model after an epoch, before the shadows' steps are taken."""
    weights = []
    for evaluates in (False, True):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(D, 9), kind(), nn.Linear(9, 1)).double()
        optimizer, (x, y) = OPTIMIZERS["sgd"](model.parameters()), data()
        stopping = runs.FoldStopping(model, optimizer, F.mse_loss, (x, y), 3, patience=None)
        for index in minibatches(8, 6):
            model.train()
            F.mse_loss(model(x[index]), y[index]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates:
                model.eval()
            stopping.step()
        assert stopping.backend.engine == "dense"
        weights.append(stopping.backend.weights_of(1))
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])


@pytest.mark.parametrize("engine", ["dense", "vmap"])
def test_a_rate_of_dropout_that_the_loop_changes(engine: str) -> None:
    """Steps that wait have the rate of their own time, and no other step has."""
    weights = []
    for late, last in ((True, 0.1), (False, 0.1), (False, 0.7)):
        torch.manual_seed(5)
        dropout = nn.Dropout(0.7)
        model = nn.Sequential(nn.Linear(D, 9), dropout, nn.Linear(9, 1)).double()
        optimizer, (x, y) = OPTIMIZERS["sgd"](model.parameters()), data()
        stopping: Any = runs.FoldStopping(
            model, optimizer, F.mse_loss, (x, y), 3, engine=engine, patience=None
        )
        for number, index in enumerate(minibatches(8, 9)):
            if number == 5:
                if not late:
                    _ = stopping.backend.stack  # takes the steps that wait
                dropout.p = last
            optimizer.zero_grad()
            F.mse_loss(model(x[index]), y[index]).backward()
            optimizer.step()
            stopping.step()
        weights.append(stopping.backend.weights_of(1))
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])
    assert any(not torch.equal(weight, weights[2][name]) for name, weight in weights[0].items())


def test_dropout_of_a_dense_stack_repeats_itself_and_leaves_the_loop_alone() -> None:
    start = nn.Sequential(nn.Dropout(0.2), nn.Linear(D, 9), nn.Dropout(0.5), nn.Linear(9, 1))
    states, weights = [], []
    for seed in (3, 3, 4):
        model = copy.deepcopy(start).double()
        torch.manual_seed(5)
        batches = minibatches(8, 6)
        stopping = run(model, OPTIMIZERS["adam"], F.mse_loss, data(), batches, folds=3, seed=seed)
        assert stopping.backend.engine == "dense"
        states.append(torch.get_rng_state())
        weights.append(stopping.backend.weights_of(1)["1.weight"].clone())
    assert torch.equal(states[0], states[2])  # the model's own dropout draws the same
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    model.eval()  # a loop that trains without dropout
    rows, batches = data(), minibatches(8, 6)
    plain = copy.deepcopy(start).double().eval()
    stopping = run(plain, OPTIMIZERS["sgd"], F.mse_loss, rows, batches, folds=3)
    twin = copy.deepcopy(start).double().eval()
    check_shadows(stopping, twin, OPTIMIZERS["sgd"], F.mse_loss, rows, batches)


@pytest.mark.parametrize("engine", ["dense", "vmap", "replay"])
@pytest.mark.parametrize("size", [2, 8])  # with two rows, some minibatches leave it none
@pytest.mark.parametrize("worthwhile", [0, 1 << 20])
def test_one_shadow(
    engine: str, size: int, worthwhile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stack, "WORTHWHILE", worthwhile)
    torch.manual_seed(11)
    start = MODELS["relu"]().double()
    rows, batches, make = data(), minibatches(size, 12), OPTIMIZERS["adam"]
    options: dict[str, Any] = {"cls": runs.ShadowStopping, "engine": engine}
    for share in (0.2, 0.6):
        model = copy.deepcopy(start)
        hidden = torch.randperm(N) < round(share * N)
        stopping = run(model, make, F.mse_loss, rows, batches, hidden=hidden, **options)
        assert torch.equal(stopping.fold_of_row == 0, hidden)
        assert len(curves(stopping)[0]) == round(share * N)
        check_shadows(stopping, start, make, F.mse_loss, rows, batches)
    assert size == 8 or any(bool((stopping.fold_of_row[b] == 0).all()) for b in batches)
    stopping = runs.ShadowStopping(start, make(start.parameters()), F.mse_loss, rows)
    assert int((stopping.fold_of_row == 0).sum()) == -(-N // 5)
