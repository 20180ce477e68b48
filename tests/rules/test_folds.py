"""Shadow models: the same numbers as training each of them on its own."""

from __future__ import annotations

import copy
import io
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
from heldin.rules.estimated import curves as _curves
from heldin.rules.estimated import stack as _stack
from heldin.rules.estimated.losses import RowLoss
from heldin.rules.estimated.rows import RowMatcher, Rows

N, D = 31, 6


class Tied(nn.Module):
    """A weight used twice, a scalar parameter, an unused one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.linspace(-1, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.first(F.gelu(self.first(x + self.shift)))[:, :1]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 4), nn.Bilinear(4, D, 1)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.b(self.a(x), z)


MODELS: dict[str, Any] = {
    "linear": lambda: nn.Linear(D, 1),
    "relu": lambda: nn.Sequential(nn.Linear(D, 8), nn.ReLU(), nn.Linear(8, 1)),
    "deep": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(D, 8), nn.Tanh()),
        nn.Linear(8, 7, bias=False),
        nn.SiLU(),
        nn.Linear(7, 5),
        nn.GELU(approximate="tanh"),
        nn.Linear(5, 4),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Identity(),
        nn.Linear(4, 3),
        nn.Sigmoid(),
        nn.Linear(3, 1),
    ),
    "tied": Tied,
    "batchnorm": lambda: nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)),
    "layernorm": lambda: nn.Sequential(nn.Linear(D, 8), nn.LayerNorm(8), nn.Linear(8, 1)),
}
ENGINES = {
    "linear": ["dense", "vmap", "loop"],
    "relu": ["dense", "vmap", "loop"],
    "deep": ["dense", "vmap", "loop"],
    "tied": ["vmap", "loop"],
    "batchnorm": ["loop"],
    "layernorm": ["vmap", "loop"],
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.02, t0=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
}


def data(seed: int = 0, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = torch.randn(N, outputs, generator=generator, dtype=torch.float64)
    return x, y + x[:, :1]


def minibatches(size: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    found: list[Tensor] = []
    while len(found) < steps:
        found += list(torch.randperm(N, generator=generator).split(size))
    return found[:steps]


def separately(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Any,
    rows: tuple[Tensor, ...],
    batches: list[Tensor],
    seen: Tensor,
    schedule: Any = None,
) -> nn.Module:
    """The slow twin: train one model on the rows of each minibatch that it may see."""
    *inputs, y = rows
    scheduler = schedule(optimizer) if schedule else None
    for index in batches:
        kept = index[seen[index]]
        optimizer.zero_grad(set_to_none=False)
        if len(kept):
            loss_fn(model(*(x[kept] for x in inputs)), y[kept]).backward()
        for p in model.parameters():  # a shadow without a row takes its step with gradient 0
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        if scheduler:
            scheduler.step()
    return model


def run(
    model: nn.Module,
    make: Any,
    loss_fn: Any,
    rows: tuple[Tensor, ...],
    batches: list[Tensor],
    schedule: Any = None,
    cls: Any = heldin.FoldStopping,
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


def check_shadows(
    stopping: Any, start: nn.Module, make: Any, loss_fn: Any, rows: Any, batches: Any, **more: Any
) -> None:
    *inputs, y = rows
    expected = torch.full((N,), math.nan, dtype=torch.float64)
    for k in range(int(stopping._label.max()) + 1):
        twin = copy.deepcopy(start)
        separately(
            twin, make(twin.parameters()), loss_fn, rows, batches, stopping._label != k, **more
        )
        for name, p in twin.named_parameters():
            torch.testing.assert_close(
                stopping._team.stack.blocks[name][k].detach(), p.detach(), rtol=1e-9, atol=1e-11
            )
        held = stopping._label == k
        twin.eval()
        with torch.no_grad():
            for i in held.nonzero().flatten().tolist():
                expected[i] = loss_fn(twin(*(x[i : i + 1] for x in inputs)), y[i : i + 1])
    losses = stopping._held_out()
    torch.testing.assert_close(losses, expected[stopping._label >= 0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("name", "engine"), [(m, e) for m, es in ENGINES.items() for e in es])
def test_every_engine_gives_the_numbers_of_separate_runs(name: str, engine: str) -> None:
    torch.manual_seed(1)
    start = MODELS[name]().double()
    rows, batches = data(), minibatches(7, 12)
    for make in (OPTIMIZERS["nesterov"], OPTIMIZERS["adam"]):
        model = copy.deepcopy(start)
        stopping = run(model, make, nn.MSELoss(), rows, batches, folds=4, engine=engine)
        assert stopping.engine == engine
        if name == "tied":  # separate runs leave an unused parameter alone
            batchless = [p for n, p in model.named_parameters() if n == "unused"]
            assert torch.equal(batchless[0], torch.ones(2, dtype=torch.float64))
        check_shadows(stopping, start, make, nn.MSELoss(), rows, batches)


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
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, rows, 3, patience=None)

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
            own.step(one(twin, own, stopping._label != k))
        for name, p in twin.named_parameters():
            torch.testing.assert_close(stopping._team.stack.blocks[name][k].detach(), p.detach())


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


def test_an_optimiser_that_has_stepped_hands_on_its_state() -> None:
    torch.manual_seed(5)
    for make in (OPTIMIZERS["adam"], OPTIMIZERS["adafactor"], OPTIMIZERS["asgd"]):
        model = MODELS["tied"]().double()
        x, y = rows = data()
        optimizer = make(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) + 0 * model.unused.sum()).backward()
            optimizer.step()
        twin, everything = copy.deepcopy(model), torch.ones(N, dtype=torch.bool)
        own = make(twin.parameters())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, rows, 2, patience=None)
        everything = stopping._label != 1
        for _ in range(4):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            stopping.step()
        separately(twin, own, F.mse_loss, rows, [torch.arange(N)] * 4, everything)
        for name, p in twin.named_parameters():
            if name != "unused":
                torch.testing.assert_close(
                    stopping._team.stack.blocks[name][1].detach(), p.detach()
                )


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
        with_own_mean,
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
    assert stopping._team.data.loss.kind == "other"
    for k in range(3):
        twin = copy.deepcopy(start)
        separately(twin, make(twin.parameters()), weighted, rows, batches, stopping._label != k)
        for name, p in twin.named_parameters():
            torch.testing.assert_close(stopping._team.stack.blocks[name][k].detach(), p.detach())


@given(seed=st.integers(0, 1000), k=st.integers(1, 3), b=st.integers(1, 6), c=st.integers(1, 4))
@settings(deadline=None, max_examples=25)
def test_closed_slopes_are_those_of_autograd(seed: int, k: int, b: int, c: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    o, keep = normal(k, b, c), torch.rand(k, b, generator=generator) > 0.4
    some = torch.randn(5, c, dtype=torch.float64)
    weights = torch.rand(b, generator=generator, dtype=torch.float64)
    labels = torch.randint(c, (5 + b,), generator=generator)
    shaped = torch.rand(5 + b, c, generator=generator, dtype=torch.float64)
    for loss_fn, targets in (
        (F.mse_loss, shaped),
        (nn.MSELoss(reduction="sum"), shaped),
        (F.binary_cross_entropy_with_logits, shaped),
        (F.cross_entropy, labels),
    ):
        fast = RowLoss.of(loss_fn, some, targets[:5])
        assert fast.row_gradient is not None
        slow = RowLoss(fast.loss_fn, fast.per_row, fast.kind, None, True, lambda t: t)
        for w in (None, weights):
            ready = fast.ready(targets[5:])
            torch.testing.assert_close(
                fast.gradient(o, ready, keep, w), slow.gradient(o, targets[5:], keep, w)
            )


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
    assert stopping.engine == "dense"
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)


def test_sequences_are_not_taken_for_plain_rows() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x, y = data()
    rows = (x.view(N, 2, 3), y[:, None].expand(N, 2, 1))
    stopping = run(model, OPTIMIZERS["sgd"], F.mse_loss, rows, minibatches(8, 3), folds=3)
    assert stopping.engine == "vmap"


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
    assert stopping.engine == "loop"
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)
    optimizer = make(start.parameters())
    with pytest.raises(heldin.HeldinError, match=r"engine='vmap': .* use engine='loop'"):
        heldin.FoldStopping(start, optimizer, F.mse_loss, rows, engine="vmap")


@pytest.mark.parametrize(("cls", "part"), [(heldin.FoldStopping, 3), (heldin.ShadowStopping, 0.4)])
def test_sample_weights(cls: Any, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("engine", ["dense", "vmap", "loop"])
def test_a_shadow_left_without_rows_steps_with_gradient_zero(engine: str) -> None:
    torch.manual_seed(10)
    start = MODELS["relu"]().double()
    rows, batches, make = data(), minibatches(1, 40), OPTIMIZERS["nesterov"]
    stopping = run(copy.deepcopy(start), make, F.mse_loss, rows, batches, folds=3, engine=engine)
    check_shadows(stopping, start, make, F.mse_loss, rows, batches)


def test_dropout_draws_for_each_shadow() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    rows = data()
    stopping = run(model, OPTIMIZERS["sgd"], F.mse_loss, rows, [torch.arange(N)], folds=3)
    assert stopping.engine == "vmap"
    model.eval()  # evaluation has none
    assert torch.equal(stopping._held_out(), stopping._held_out())


@pytest.mark.parametrize("engine", ["dense", "vmap", "loop"])
@pytest.mark.parametrize("size", [2, 8])  # with two rows, some minibatches leave it none
@pytest.mark.parametrize("worthwhile", [0, 1 << 20])
def test_one_shadow(
    engine: str, size: int, worthwhile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_stack, "WORTHWHILE", worthwhile)
    torch.manual_seed(11)
    start = MODELS["relu"]().double()
    rows, batches, make = data(), minibatches(size, 12), OPTIMIZERS["adam"]
    options: dict[str, Any] = {"cls": heldin.ShadowStopping, "engine": engine}
    for share in (0.2, 0.6):
        model = copy.deepcopy(start)
        stopping = run(model, make, F.mse_loss, rows, batches, fraction=share, **options)
        assert int((stopping._label == 0).sum()) == round(share * N)
        assert len(stopping._curves[0]) == round(share * N)
        check_shadows(stopping, start, make, F.mse_loss, rows, batches)
    assert size == 8 or any(bool((stopping._label[b] == 0).all()) for b in batches)
    chosen = torch.arange(N) < 4
    stopping = heldin.ShadowStopping(
        start, make(start.parameters()), F.mse_loss, rows, fraction=chosen
    )
    assert torch.equal(stopping._label == 0, chosen)


@pytest.mark.parametrize("name", ["relu", "layernorm", "batchnorm"])
def test_train_takes_the_steps_of_the_loop(name: str) -> None:
    torch.manual_seed(16)
    start = MODELS[name]().double()
    x, y = rows = data()
    looped, trained = copy.deepcopy(start), copy.deepcopy(start)
    make = OPTIMIZERS["adam"]
    optimizer = make(looped.parameters())
    first = heldin.FoldStopping(looped, optimizer, F.mse_loss, rows, 3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for a, b in first.batches(12, generator=generator):
            F.mse_loss(looped(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            first.step()
    second = heldin.FoldStopping(trained, make(trained.parameters()), F.mse_loss, rows, 3)
    second.train(12, max_steps=11, generator=torch.Generator().manual_seed(2))
    saved = copy.deepcopy(second.state_dict())
    second.train(12, max_steps=11)  # nothing left to do
    assert [r.step for r in second.history] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    second = heldin.FoldStopping(trained, make(trained.parameters()), F.mse_loss, rows, 3)
    with pytest.raises(heldin.HeldinError, match="follows a loop of yours"):
        first.train(12)
    third = copy.deepcopy(start)
    whole = heldin.FoldStopping(third, make(third.parameters()), F.mse_loss, rows, 3)
    whole.train(12, max_steps=15, generator=torch.Generator().manual_seed(2))
    for a, b in zip(whole.history, first.history, strict=True):
        for key in ("step", "estimate", "standard_error", "training_loss"):
            assert math.isclose(getattr(a, key), getattr(b, key), rel_tol=1e-9)
    for a, b in zip(looped.state_dict().values(), third.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    second.load_state_dict(saved)
    assert list(second.history) == list(whole.history)[: len(second.history)]
    with pytest.raises(heldin.HeldinError, match="one or the other"):
        train_once(second, trained, second._optimizer, x, y)


# -- which rows


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
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, given_data, folds=3)
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
        source = make()
        return torch.cat([b for _ in range(2) for _, b in source()])

    def plain() -> Any:
        return lambda: loader

    def followed() -> Any:
        return heldin.FoldStopping(model, optimizer, F.mse_loss, loader).batches

    assert torch.equal(orders(plain), orders(followed))


def test_batches_know_their_rows_even_when_augmented() -> None:
    torch.manual_seed(13)
    x, y = data()

    class Augmented(Pairs):
        def __getitem__(self, i: int) -> Any:
            return self.x[i] + 0.01 * torch.randn(D, dtype=torch.float64), self.y[i]

    for source, options in (
        ((x, y), {"batch_size": 8}),
        (DataLoader(Pairs(x, y), batch_size=8, shuffle=True), {}),
        (DataLoader(Augmented(x, y), batch_size=8, shuffle=True), {}),
    ):
        start = MODELS["relu"]().double()
        model = copy.deepcopy(start)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, source, folds=3)
        twin = copy.deepcopy(start)
        own = OPTIMIZERS["sgd"](twin.parameters())
        for a, b in stopping.batches(**options):
            F.mse_loss(model(a), b).backward()
            optimizer.step()
            optimizer.zero_grad()
            index = torch.stack([(y == row).all(1).nonzero()[0, 0] for row in b])
            stopping.step()
            kept = stopping._label[index] != 2
            own.zero_grad()
            F.mse_loss(twin(a[kept]), b[kept]).backward()
            own.step()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(stopping._team.stack.blocks[name][2].detach(), p.detach())


def test_accumulated_minibatches_are_one() -> None:
    torch.manual_seed(14)
    x, y = data()
    start = MODELS["relu"]().double()
    model = copy.deepcopy(start)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y), folds=3)
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
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y), folds=3)
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


def train_once(stopping: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> bool:
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return bool(stopping.step())


@pytest.fixture
def setting() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    torch.manual_seed(15)
    model = MODELS["relu"]().double()
    return model, OPTIMIZERS["sgd"](model.parameters()), *data()


def test_what_cannot_be_matched_says_the_way_out(setting: Any) -> None:
    model, optimizer, x, y = setting
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match=r"not rows of data.*stopping\.batches"):
        train_once(stopping, model, optimizer, x[:4] + 1, y[:4])
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    F.mse_loss(model(x[:4]), y[:4]).backward()
    optimizer.step()
    with pytest.raises(heldin.HeldinError, match=r"4 rows.*but 3 row numbers"):
        stopping.step(indices=[0, 1, 2])
    x = x.clone()
    x[5] = x[3]
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match="row 3 of data has copies"):
        train_once(stopping, model, optimizer, x[2:8], y[2:8])
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    train_once(stopping, model, optimizer, x, y)  # the whole set is not ambiguous


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folds": 1}, "folds must be a whole number >= 2"),
        ({"folds": 40}, "40 folds of 31 rows"),
        ({"folds": [0] * N}, "at least two folds"),
        ({"folds": [0, 1]}, "one whole number for each of the 31 rows"),
        ({"average": "mean"}, "average must be 'bagged' or 'best'"),
        ({"grid": 1.0}, "grid must be a number above 1"),
        ({"patience": 3}, "patience must be a heldin.Patience"),
        ({"engine": "fast"}, "engine: expected"),
        ({"sample_weight": torch.ones(3)}, "31 finite numbers"),
        ({"memory": -1}, "memory must be a whole number"),
        ({"resamples": 0}, "resamples must be"),
    ],
)
def test_bad_arguments(setting: Any, options: dict[str, Any], message: str) -> None:
    model, optimizer, x, y = setting
    with pytest.raises(heldin.HeldinError, match=message):
        heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y), **options)


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
        heldin.FoldStopping(model, optimizer, F.mse_loss, rows)


def test_other_refusals(setting: Any) -> None:
    model, optimizer, x, y = setting
    other = MODELS["relu"]().double()
    with pytest.raises(heldin.HeldinError, match="none of its parameters"):
        heldin.FoldStopping(other, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match=r"must be a torch\.optim\.Optimizer"):
        heldin.FoldStopping(model, "sgd", F.mse_loss, (x, y))  # type: ignore[arg-type]
    with pytest.raises(heldin.HeldinError, match="one number for a batch"):
        heldin.FoldStopping(model, optimizer, nn.MSELoss(reduction="none"), (x, y))
    with pytest.raises(heldin.HeldinError, match="loss_fn failed"):
        heldin.FoldStopping(model, optimizer, F.cross_entropy, (x, y[:, :0]))
    with pytest.raises(heldin.HeldinError, match="no parameter that requires"):
        heldin.FoldStopping(nn.ReLU(), optimizer, F.mse_loss, (x, y))
    tied, normed = Tied().double(), MODELS["batchnorm"]().double()
    with pytest.raises(heldin.HeldinError, match="engine='dense' is for"):
        heldin.FoldStopping(
            tied, OPTIMIZERS["sgd"](tied.parameters()), F.mse_loss, (x, y), engine="dense"
        )
    with pytest.raises(heldin.HeldinError, match="batch statistics"):
        heldin.FoldStopping(
            normed, OPTIMIZERS["sgd"](normed.parameters()), F.mse_loss, (x, y), engine="vmap"
        )
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match=r"after optimizer\.step\(\)"):
        stopping.step()
    train_once(stopping, model, optimizer, x, y)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(heldin.HeldinError, match="another parameter group"):
        train_once(stopping, model, optimizer, x, y)
    stopping.close()
    with pytest.raises(heldin.HeldinError, match="called after close"):
        stopping.step()
    for fraction in (0.0, 1.0, torch.ones(N, dtype=torch.bool), torch.ones(3)):
        with pytest.raises(heldin.HeldinError, match="ShadowStopping"):
            heldin.ShadowStopping(
                other, OPTIMIZERS["sgd"](other.parameters()), F.mse_loss, (x, y), fraction
            )


class Wrapped(torch.optim.SGD):
    def __init__(self, parameters: Any, secret: int) -> None:
        super().__init__(parameters, lr=0.1)


def test_an_optimiser_that_cannot_be_made_again(setting: Any) -> None:
    model, _, x, y = setting
    with pytest.raises(heldin.HeldinError, match="another Wrapped"):
        heldin.FoldStopping(model, Wrapped(model.parameters(), 3), F.mse_loss, (x, y))


def test_a_first_step_of_another_kind_is_warned_about(setting: Any) -> None:
    model, optimizer, x, y = setting
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    (2 * F.mse_loss(model(x), y)).backward()
    optimizer.step()
    with pytest.warns(heldin.HeldinWarning, match="first step is not the one"):
        stopping.step()


def test_a_bias_whose_gradient_is_rounding_does_not_alarm() -> None:
    """A convolution's bias before a BatchNorm: Adam makes steps at random out of its gradient."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 6, 6), torch.randint(3, (64,))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stopping = heldin.FoldStopping(model, optimizer, F.cross_entropy, (x, y))
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
        stopping = heldin.FoldStopping(model, optimizer, loss_fn, rows, 3) if follow else None
        for _ in range(6):
            loss_fn(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if stopping is not None:
                stopping.step()
        return torch.random.get_rng_state(), model[0].weight.detach()

    for plain, followed in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, followed)


# -- decisions


def test_votes_follow_the_bootstrap() -> None:
    generator = torch.Generator().manual_seed(0)
    curves = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    found = _curves.votes(curves, resamples=50, seed=3)
    draws = torch.randint(20, (50, 20), generator=torch.Generator().manual_seed(3))
    expected = torch.zeros(6, dtype=torch.float64)
    for draw in draws:
        expected[curves[draw].mean(0).argmin()] += 1 / 50
    torch.testing.assert_close(found, expected)
    curves[3, 2] = math.inf
    curves[4, 1] = math.nan
    again = _curves.votes(curves, 50, 3)
    assert again[1] == again[2] == 0
    assert math.isclose(float(again.sum()), 1)
    assert _curves.votes(torch.full((3, 2), math.nan)).tolist() == [1, 0]


def overfitting(n: int = 40, d: int = 30) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, x[:, :1] + torch.randn(n, 1, generator=generator, dtype=torch.float64)


def fit(steps: int, **options: Any) -> tuple[Any, nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    x, y = overfitting()
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y), **options)
    path = [model.weight.detach().clone()]
    for _ in range(steps):
        stop = train_once(stopping, model, optimizer, x, y)
        path.append(model.weight.detach().clone())
        if stop:
            break
    return stopping, model, path


def test_the_standard_error_is_that_of_the_held_out_rows_and_of_the_training_rows() -> None:
    losses = torch.tensor([0.5, 1.0, 4.0, 0.5, 1.5], dtype=torch.float64)
    middle, error = _curves.mean_and_error(losses, held_per_trained=1.25)
    assert middle == 1.5
    squares = [1.0, 0.25, 6.25, 1.0, 0.0]  # the largest loss counts twice, m - 3 = 2
    assert math.isclose(error, math.sqrt((sum(squares) + 6.25) / 2 * (1 / 5 + 1.25 / 5 / 2)))
    assert math.isnan(_curves.mean_and_error(losses[:1])[1])
    assert _curves.mean_and_error(torch.ones(2))[1] == 0.0


@pytest.mark.parametrize(("shadows", "held"), [(None, 20), (2, 8), (1, 4)])
@pytest.mark.parametrize("general", [False, True])
def test_each_rule_says_how_many_rows_its_error_rests_on(
    shadows: int | None, held: int, general: bool
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    how: dict[str, Any] = {"loss_fn": nn.MSELoss()}
    if general:
        how = {
            "batch_loss": lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
            "eval_loss": lambda model, batch: (model(batch[0]) - batch[1]).square()[:, 0],
        }
    stopping = heldin.FoldStopping(model, optimizer, data=(x, y), shadows=shadows, **how)
    (curve,) = stopping._curves
    assert len(curve) == held
    assert stopping.standard_error == _curves.mean_and_error(curve, held / 16)[1]


def test_the_band_covers_what_it_should() -> None:
    """Least squares with Gaussian noise, five folds: the loss of the fit to all rows is known."""
    generator = torch.Generator().manual_seed(0)
    fold = torch.arange(60) % 5
    off = []
    for _ in range(300):
        x = torch.randn(60, 5, generator=generator, dtype=torch.float64)
        y = x[:, :1] + torch.randn(60, 1, generator=generator, dtype=torch.float64)
        fits = [torch.linalg.lstsq(x[fold != k], y[fold != k]).solution for k in range(5)]
        losses = [(x[fold == k] @ w - y[fold == k]).square()[:, 0] for k, w in enumerate(fits)]
        middle, error = _curves.mean_and_error(torch.cat(losses), 60 / 48)
        slope = torch.linalg.lstsq(x, y).solution
        slope[0] -= 1
        off.append(abs(middle - 1 - float(slope.square().sum())) / error)
    within = [sum(value <= width for value in off) / 300 for width in (1, 2)]
    assert 0.63 < within[0] < 0.83  # a plain standard error covers 0.60 and 0.88
    assert within[1] > 0.92


def test_patience_stops_and_restores_the_best() -> None:
    stopping, model, path = fit(3000, average="best")
    table = stopping.history.columns()
    best = min(range(len(table["step"])), key=lambda i: table["estimate"][i])
    assert stopping.best_step == table["step"][best]
    assert stopping.estimate == table["estimate"][best]
    assert stopping.standard_error == table["standard_error"][best]
    assert stopping.should_stop
    assert stopping.stopped_step == len(path) - 1
    last = next(s for s in table["step"] if s >= 2 * stopping.best_step + 200)
    assert stopping.stopped_step == last
    assert not torch.equal(model.weight, path[stopping.best_step])
    stopping.restore()
    assert torch.equal(model.weight, path[stopping.best_step])
    assert "lowest" in stopping.reason
    assert stopping.metrics()["heldin/best_step"] == stopping.best_step
    assert stopping.metrics()["heldin/should_stop"] == 1.0


def test_bagged_weights_are_the_average_by_votes() -> None:
    stopping, model, path = fit(400, patience=None)
    shares = stopping.shares
    assert math.isclose(sum(shares.values()), 1)
    assert len(shares) > 1
    curves = torch.stack(stopping._curves, dim=1)
    assert curves.shape == (40, len(stopping.history))
    torch.testing.assert_close(
        curves.mean(0), torch.tensor(stopping.history.columns()["estimate"], dtype=torch.float64)
    )
    stopping.restore()
    expected = sum(share * path[step] for step, share in stopping.shares.items())
    torch.testing.assert_close(model.weight.detach(), expected)


def test_restore_takes_the_last_weights_into_account() -> None:
    stopping, model, path = fit(7, average="best")  # still improving, and 7 is not on the grid
    assert stopping.history[-1].step == 6
    stopping.restore()
    assert stopping.history[-1].step == 7
    assert torch.equal(model.weight, path[7])


def test_memory_thins_the_checkpoints_and_keeps_the_best() -> None:
    each = 31 * 8
    full, _, _ = fit(500, patience=None)
    thin, model, path = fit(500, patience=None, memory=6 * each)
    assert len(full._kept) == len(full.history)
    assert len(thin._kept) == 6
    steps = [thin.history[i].step for i in sorted(thin._kept)]
    assert thin.best_step in steps
    assert thin.best_step == full.best_step
    thin.restore()
    expected = sum(share * path[step] for step, share in thin.shares.items())
    torch.testing.assert_close(model.weight.detach(), expected)
    none, _, _ = fit(50, patience=None, memory=0)
    assert len(none._kept) == 1


def test_context_manager_restores_unless_an_error_passes() -> None:
    x, y = overfitting()
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y), average="best") as stopping:
        for _ in range(1000):
            train_once_more = train_once(stopping, model, optimizer, x, y)
        last = model.weight.detach().clone()
        assert train_once_more
    assert not torch.equal(model.weight, last)
    assert not model._forward_pre_hooks
    assert stopping.best_step > 0  # still readable
    broken = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    train_once(broken, model, optimizer, x, y)
    before = model.weight.detach().clone()
    with pytest.raises(ZeroDivisionError), broken:
        raise ZeroDivisionError
    assert torch.equal(model.weight, before)
    assert not model._forward_pre_hooks


def test_integer_buffers_survive_restoring() -> None:
    torch.manual_seed(0)
    x, y = overfitting()
    model = nn.Sequential(nn.Linear(30, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y)) as stopping:
        for _ in range(40):
            train_once(stopping, model, optimizer, x, y)
    assert model[1].num_batches_tracked in [record.step for record in stopping.history]


def test_a_run_that_diverges_keeps_the_last_good_weights() -> None:
    torch.manual_seed(0)
    x, y = overfitting()
    model = nn.Linear(30, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e10)
    stopping = heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y))
    start = model.weight.detach().clone()
    for _ in range(60):
        train_once(stopping, model, optimizer, x, y)
    assert not model.weight.isfinite().all()
    with pytest.warns(heldin.HeldinWarning, match="never fell below"):
        stopping.restore()
    assert stopping.best_step == 0
    assert torch.equal(model.weight, start)


@pytest.mark.parametrize("name", ["relu", "tied", "batchnorm"])
def test_a_resumed_run_goes_on_bit_for_bit(name: str) -> None:
    x, y = data()
    batches = minibatches(8, 40)

    def parts() -> Any:
        torch.manual_seed(3)
        model = MODELS[name]().double()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        return model, optimizer, heldin.FoldStopping(model, optimizer, F.mse_loss, (x, y), 3)

    def go(model: Any, optimizer: Any, stopping: Any, some: list[Tensor]) -> None:
        for index in some:
            train_once(stopping, model, optimizer, x[index], y[index])

    whole = parts()
    go(*whole, batches)
    first = parts()
    go(*first, batches[:17])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = parts()
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*second, batches[17:])
    assert list(second[2].history) == list(whole[2].history)
    assert torch.equal(second[2]._held_out(), whole[2]._held_out())
    for stopping in (whole[2], second[2]):
        stopping.restore()
    for a, b in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
    damaged = first[2].state_dict() | {"curves": None}
    before = second[2].state_dict()["curves"]
    with pytest.raises(heldin.HeldinError, match="incomplete or damaged"):
        second[2].load_state_dict(damaged)
    assert torch.equal(second[2].state_dict()["curves"], before)
    other = heldin.FoldStopping(whole[0], whole[1], F.mse_loss, (x, y), 4)
    shadow = heldin.ShadowStopping(whole[0], whole[1], F.mse_loss, (x, y))
    with pytest.raises(heldin.HeldinError, match="saved with folds=3"):
        other.load_state_dict(first[2].state_dict())
    with pytest.raises(heldin.HeldinError, match="state of a FoldStopping"):
        shadow.load_state_dict(first[2].state_dict())


def test_nothing_is_printed_warned_or_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stopping, model, _ = fit(30)
    state = torch.random.get_rng_state()
    stopping._check()
    assert torch.equal(state, torch.random.get_rng_state())
    del stopping
    assert not model._forward_pre_hooks
    assert capsys.readouterr() == ("", "")


def test_the_history_leaves_by_all_ways(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    stopping, _, _ = fit(3000)
    axes = stopping.history.plot(errors=3)
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert any("covered" in label for label in labels)
    assert any("chosen step" in label for label in labels)
    with pytest.raises(heldin.HeldinError, match="errors must be 2 or 3"):
        stopping.history.plot(errors=1)
    stopping.history.to_csv(tmp_path / "history.csv")
    lines = (tmp_path / "history.csv").read_text().splitlines()
    assert lines[0] == "step,estimate,standard_error,training_loss"
    assert len(lines) == len(stopping.history) + 1
    matplotlib.pyplot.close("all")


def test_the_training_loss_is_that_of_the_model() -> None:
    stopping, model, _ = fit(6)
    x, y = overfitting()
    with torch.no_grad():
        assert math.isclose(
            stopping.history[-1].training_loss, float(F.mse_loss(model(x), y)), rel_tol=1e-12
        )


def test_patience_needs_time_and_checks() -> None:
    rule = heldin.Patience(2.0, 0, 3)
    assert not rule.over(step=10, best=5, since=2)
    assert rule.over(step=10, best=5, since=3)
    assert not rule.over(step=9, best=5, since=9)
