"""Attacks on the promise: exact, or refused or warned about by name, never silently wrong."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from heldin.capture import forward
from heldin.capture.knowledge import IDLE
from tests.support.cases import Fn, rows
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def agree(seen: Any, model: nn.Module, losses: Tensor) -> None:
    expected = truth(model, losses)
    assert set(seen) == set(expected)
    worst = error(seen, expected, 1e-12)
    assert max(worst.values()) < 1e-9, worst


X, Y, CLASS = torch.randn(6, 3).double(), torch.randn(6, 2).double(), torch.arange(6) % 2

# --- how many samples ------------------------------------------------------------------------


def outer(s: Any, points: Tensor, functions: Tensor) -> Tensor:
    return s.a(functions) @ s.b(points).T


def over_time(s: Any, t: Tensor, x: Tensor) -> Tensor:
    return (s.a(x)[None] * s.b(t[:, None, None].expand(-1, 1, 2))).tanh()


@pytest.mark.parametrize(
    ("forward", "first", "second"),
    [
        (outer, torch.randn(5, 2), torch.randn(4, 3)),
        (outer, torch.randn(4, 2), torch.randn(5, 3)),
        (outer, torch.randn(5, 2), torch.randn(3, 3)),
        (over_time, torch.randn(5), torch.randn(4, 3)),
        (over_time, torch.randn(5), torch.randn(1, 3)),
    ],
    ids=[
        "points, functions",
        "more functions",
        "square functions",
        "times, states",
        "times, one state",
    ],
)
def test_what_may_be_counted_in_two_ways_is_refused(
    forward: Any, first: Tensor, second: Tensor
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)

        def forward(self, grid: Tensor, batch: Tensor) -> Tensor:
            return forward(self, grid, batch)

    model, rows = Model(), (first.double(), second.double())
    with heldin.observe(model), pytest.raises(heldin.NotObservable) as refused:
        model(*rows).square().sum().backward()
    assert f"{len(first)} rows of 'grid'" in str(refused.value)
    assert f"{len(second)} rows of 'batch'" in str(refused.value)
    with heldin.observe(model, batch_dim={"grid": None}) as seen:
        model(*rows).square().sum().backward()
    assert seen.count == len(second)


def test_the_loss_decides_what_is_counted() -> None:
    """Rows of a table of scores are samples if the loss is a sum over them."""
    model = Fn(outer, a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    classes, x, y = torch.randn(5, 2), torch.randn(4, 3), torch.arange(4)
    with heldin.observe(model) as seen:
        F.cross_entropy(model(classes, x), y, reduction="sum").backward()
    assert seen.count == 4
    agree(seen, model, F.cross_entropy(model(classes, x), y, reduction="none"))


# --- gradients that were thrown away ---------------------------------------------------------


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("estimator", ["exact", "sampled"])
def test_passes_whose_gradients_were_thrown_away_do_not_count(
    to_none: bool, estimator: Any
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3):
            seen.clear()
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(5, 3)).exp().sum().backward()  # SAM's first pass, a generator's
            model(torch.randn(4, 3)).exp().sum().backward()
            optimizer.zero_grad(set_to_none=to_none)
            model(X[:3]).sin().sum().backward()
            model(X[3:]).sin().sum().backward()  # accumulated
            assert seen.count == 6
            agree(seen, model, model(X).sin().sum(1))


def test_gradients_that_an_optimiser_has_used_count() -> None:
    """A whole epoch may be observed in one block, with a step and zero_grad after each batch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with heldin.observe(model) as seen:
        for part in X.split(2):
            optimizer.zero_grad()
            model(part).sin().sum().backward()
            optimizer.step()
    assert seen.count == len(X)
    agree(seen, model, model(X).sin().sum(1))


def test_gradients_of_some_parameters_are_thrown_away() -> None:
    model = net()
    with heldin.observe(model) as seen:
        model(torch.randn(5, 3)).exp().sum().backward()
        model[2].zero_grad()
        model(X).sin().sum().backward()
    assert (seen["0.bias"].count, seen["2.bias"].count) == (11, 6)
    agree({n: seen[n] for n in ("2.weight", "2.bias")}, Named(model), model(X).sin().sum(1))


class Named(nn.Module):
    """Only the last layer of a model, under the names that it has there."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.add_module("2", model[2])


def test_closures_that_are_run_several_times() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    counts = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        counts.append(seen.count)
        return loss

    with heldin.observe(model) as seen:
        optimizer.step(closure)
    assert len(counts) > 2
    assert set(counts) == {6}


# --- data that meets a parameter outside forward ---------------------------------------------


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.shift = nn.Linear(3, 2), nn.Parameter(torch.zeros(()))
        self.table = nn.Embedding(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.shift + self.table(x[:, 0].long().clamp(0, 4))


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        (lambda m: m.a(torch.randn(9, 3)).square().mean(), r"a\.\w+"),
        (lambda m: m.a(torch.randn(6, 3)).square().mean(), r"a\.\w+"),
        (lambda m: (m.shift - Y).square().mean(), "shift"),
        (lambda m: (torch.randn(11) - m.shift).square().mean(), "shift"),
        (lambda m: m.table(torch.tensor([1, 2])).norm(), r"table\.weight"),
        (lambda m: m.table.weight[torch.tensor([1, 2])].norm(), r"table\.weight"),
    ],
    ids=["other rows", "as many rows", "targets", "other targets", "tokens", "index"],
)
def test_data_outside_forward_is_no_penalty(extra: Any, name: str) -> None:
    model = Shifted()
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=f"'{name}'.*outside"):
        (F.mse_loss(model(X), Y) + extra(model)).backward()


@pytest.mark.parametrize(
    "penalty",
    [
        lambda w: w.square().sum(),
        lambda w: w.norm() + w.abs().sum() / 3,
        lambda w: (torch.ones(2, 3) * (w - torch.ones(2, 3)).square()).sum(),
        lambda w: (w @ w.T - torch.eye(2)).square().sum(),
        lambda w: F.mse_loss(w, torch.zeros(2, 3)),
        lambda w: w[0, :2].square().sum() + torch.cat([w, w]).sum(),
    ],
    ids=["squares", "norms", "old weights", "orthogonal", "loss of weights", "parts"],
)
def test_penalties_are_shared(penalty: Any) -> None:
    model = nn.Linear(3, 2)
    with heldin.observe(model) as seen:
        (model(X).sin().sum() + penalty(model.weight)).backward()
    agree(seen, model, model(X).sin().sum(1) + penalty(model.weight) / 6)


# --- losses that couple samples --------------------------------------------------------------


def pairs(out: Tensor) -> Tensor:
    return out[:, None] - out[None]


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "pairwise hinge": lambda o: (1 - pairs(o[:, 0])).clamp(min=0).mean(),
    "hinge of few pairs": lambda o: (pairs(o).abs().sum(2) - 5).relu().sum(),
    "ranking": lambda o: F.margin_ranking_loss(o[:3, 0], o[3:, 0], torch.ones(3)),
    "L1 of pairs": lambda o: pairs(o).abs().mean(),
    "cdist": lambda o: torch.cdist(o, o).mean(),
    "triplet": lambda o: F.triplet_margin_loss(o[:2], o[2:4], o[4:]),
    "L1 of sums over groups": lambda o: torch.zeros(2, 2).index_add(0, CLASS, o).abs().sum(),
    "L1 of a mean": lambda o: (o.mean(0) - 1).abs().sum(),
    "root of a mean": lambda o: F.mse_loss(o, Y).sqrt(),
    "dice": lambda o: 1 - (o.sigmoid() * Y).sum() / (o.sigmoid().sum() + 1),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_samples_are_reported(name: str) -> None:
    model = nn.Linear(3, 2)
    with heldin.observe(model), pytest.warns(heldin.errors.MixedSamplesWarning, match="the loss"):
        COUPLED[name](model(X)).backward()


SEPARATE: dict[str, Callable[[Tensor], Tensor]] = {
    "weights": lambda o: (F.l1_loss(o, Y, reduction="none").mean(1) * torch.rand(6)).sum() / 3,
    "smoothed classes": lambda o: F.cross_entropy(o, CLASS, label_smoothing=0.1),
    "logits": lambda o: F.binary_cross_entropy_with_logits(o[:, 0], CLASS.double()),
    "gaussian": lambda o: F.gaussian_nll_loss(o[:, 0], Y[:, 0], o[:, 1].exp()),
    "cosine": lambda o: F.cosine_embedding_loss(o, Y, torch.ones(6)),
    "margin": lambda o: F.multi_margin_loss(o, CLASS),
    "focal": lambda o: ((1 - o.softmax(1)[:, 0]) ** 2 * -o.log_softmax(1)[:, 0]).mean(),
    "distance": lambda o: F.pairwise_distance(o, Y).mean(),
    "hardest": lambda o: F.cross_entropy(o, CLASS, reduction="none").topk(3).values.mean(),
    "hinge": lambda o: (1 - o).clamp(min=0).mean() + (o - o.detach()).abs().sum(),
}


@pytest.mark.parametrize("name", SEPARATE)
def test_losses_that_do_not_are_not(name: str) -> None:
    model = nn.Linear(3, 2)
    with heldin.observe(model) as seen:  # a warning would be an error
        SEPARATE[name](model(X)).backward()
    assert seen.count == 6


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0, keepdim=True)


def test_statistics_of_the_batch_inside_a_function_are_reported() -> None:
    model = Fn(lambda s, x: s.b(Centred.apply(s.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    with heldin.observe(model), pytest.warns(heldin.errors.MixedSamplesWarning, match="statistics"):
        model(X).sin().sum().backward()


# --- code that worked before it was observed -------------------------------------------------


def transforms(model: nn.Module) -> dict[str, Callable[[], Any]]:
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    return {
        "vmap": lambda: torch.vmap(model)(X.reshape(3, 2, 3)),
        "grad": lambda: torch.func.grad(loss)(weights, X)["0.weight"],
        "gradients of samples": lambda: torch.vmap(torch.func.grad(loss), (None, 0))(
            weights, X.reshape(3, 2, 3)
        )["0.weight"],
        "jacrev": lambda: torch.func.jacrev(model)(X),
        "jvp": lambda: torch.func.jvp(model, (X,), (X,))[1],
        "hessian": lambda: torch.func.hessian(lambda x: model(x).sum())(X),
        "export": lambda: torch.export.export(model, (X,)).module()(X),
        "trace": lambda: torch.jit.trace(model, X)(X),
    }


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", transforms(nn.Linear(1, 1)))
def test_transforms_and_exports_run_as_if_nothing_were_observed(name: str) -> None:
    model = net()
    plain = transforms(model)[name]()
    with heldin.observe(model) as seen:
        with pytest.warns(heldin.errors.HeldinWarning, match="not observed"):
            found = transforms(model)[name]()
        assert torch.equal(found, plain)
        transforms(model)[name]()  # said once
        model(X).sin().sum().backward()
        agree(seen, model, model(X).sin().sum(1))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripted_modules() -> None:
    scripted = torch.jit.script(net())
    with pytest.raises(heldin.NotObservable, match=r"ScriptModule.*microbatch"):
        heldin.observe(scripted).__enter__()
    with heldin.observe(scripted, estimator="microbatch") as seen:
        scripted(X).sum().backward()
    assert seen.count == 1
    model = Fn(lambda s, x: s.b(s.a(x)), a=nn.Linear(3, 3), b=torch.jit.script(net()))
    with heldin.observe(model) as seen:
        for _ in range(8):  # the graph changes when the compiler has seen a few calls
            seen.clear()
            model.zero_grad()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                model(X).sin().sum().backward()
            if said:
                assert "is not observed" in str(said[0].message)
                assert seen.count == 0
            else:
                agree(seen, model, model(X).sin().sum(1))


def test_an_argument_with_an_attribute_that_mappings_have() -> None:
    class Order:
        items = 3

    model = Fn(lambda s, x, order: s.a(x) * order.items, a=nn.Linear(3, 2))
    with heldin.observe(model) as seen:
        model(X, Order()).sin().sum().backward()
    agree(seen, model, model(X, Order()).sin().sum(1))


def test_a_model_that_returns_another_structure_for_the_same_inputs() -> None:
    turns = iter(range(1000))

    def forward(s: Any, x: Tensor) -> Any:
        h = s.a(x)
        return (h, (h, h * 2), {"a": h, "b": [h + 1, h]})[next(turns) % 3]

    model = Fn(forward, a=nn.Linear(3, 2))
    with heldin.observe(model) as seen:
        for step in range(12):
            seen.clear()
            model.zero_grad()
            out = model(X)
            out = out if isinstance(out, Tensor) else out[1] if step % 3 == 1 else out["b"][0]
            out.sin().sum().backward()
            factor, shift = (1, 2, 1)[step % 3], (0, 0, 1)[step % 3]
            agree(seen, model, (model.a(X) * factor + shift).sin().sum(1))


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_without_no_grad_keeps_no_graphs(training: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def held() -> int:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alive = [o for o in gc.get_objects() if isinstance(o, Tensor)]
        return sum(t.untyped_storage().nbytes() for t in alive)

    with heldin.observe(model) as seen:
        model(torch.randn(64, 64)).sum().backward()
        model.train(training)
        for _ in range(20):
            model(torch.randn(64, 64)).sum()
        before = held()
        for _ in range(60):
            model(torch.randn(64, 64)).sum()
        assert held() - before < 60 * 64 * 64  # each keeps less than an eighth of one activation
        seen.clear()
        model.train().zero_grad()
        x = torch.randn(5, 64)
        model(x).sin().sum().backward()
        agree(seen, model, model(x).sin().sum(1))


def test_evaluation_without_no_grad_is_not_followed_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = []
    tracker = forward.Tracker
    monkeypatch.setattr(forward, "Tracker", lambda *a: (followed.append(1), tracker(*a))[1])
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    with heldin.observe(model) as seen:
        for _ in range(4):
            for _ in range(30):
                model(X)
            seen.clear()
        assert len(followed) <= forward.RECENT + IDLE + 1
        for _ in range(4):  # a backward pass is seen all the same, and the next calls are followed
            seen.clear()
            model.zero_grad()
            losses = rows(model(X))
            losses.sum().backward(retain_graph=True)
            agree(seen, model, losses)


def test_evaluation_whose_rows_are_shared_out_by_numbers_is_followed() -> None:
    """Rows of samples, one after the other, as many as the lengths say."""

    def unpadded(s: Any, x: Tensor, n: Tensor) -> Tensor:
        return s.a(torch.cat([row[:length] for row, length in zip(x, n.tolist(), strict=True)]))

    model = Fn(unpadded, a=nn.Linear(3, 2)).double().eval()
    x = torch.randn(3, 4, 3).double()
    with heldin.observe(model) as seen:
        for _ in range(30):
            model(x, torch.tensor([2, 2, 2]))
        seen.clear()
        lengths = torch.tensor([1, 4, 1])
        out = model(x, lengths).square().sum(1)
        losses = torch.stack([part.sum() for part in out.split(lengths.tolist())])
        losses.sum().backward(retain_graph=True)
        agree(seen, model, losses)


@pytest.mark.parametrize("calls", [3, 30])
def test_many_calls_before_one_backward_pass(calls: int) -> None:
    model = nn.Linear(3, 3)
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            h = X
            for _ in range(calls):
                h = model(h).tanh()
            h.sin().sum().backward()
            assert seen.count == 6
            expected = X
            for _ in range(calls):
                expected = F.linear(expected, model.weight, model.bias).tanh()
            agree(seen, model, expected.sin().sum(1))


def test_a_forgotten_observation_ends() -> None:
    model = net()
    heldin.observe(model).__enter__()
    gc.collect()
    assert torch.autograd.backward.__module__.startswith("torch")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


# --- what is said ----------------------------------------------------------------------------


def test_a_refusal_names_the_op_that_mixed() -> None:
    model = Fn(
        lambda s, x, y: s.b(s.a(x * y.detach().mean()) + s.a(x).flip(0)),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 2),
    )
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"mixed by add"):
        model(X, Y).sin().sum().backward()
