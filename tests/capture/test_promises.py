"""Attacks on the promise: exact, or refused or warned about by name, never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.cases import Fn, flat
from tests.support.promise_data import CLASS, X, Y, agree, net


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def outer(s: Any, points: Tensor, functions: Tensor) -> Tensor:
    return s.a(functions) @ s.b(points).T


def over_time(s: Any, t: Tensor, x: Tensor) -> Tensor:
    return (s.a(x)[None] * s.b(t[:, None, None].expand(-1, 1, 2))).tanh()


def boxes(s: Any, places: Tensor, image: Tensor) -> Tensor:
    return s.b(s.a(image) + places)


@pytest.mark.parametrize(
    ("forward", "first", "second"),
    [
        (outer, torch.randn(5, 2), torch.randn(4, 3)),
        (outer, torch.randn(4, 2), torch.randn(5, 3)),
        (outer, torch.randn(5, 2), torch.randn(3, 3)),
        (over_time, torch.randn(5), torch.randn(4, 3)),
        (over_time, torch.randn(5), torch.randn(1, 3)),
        (boxes, torch.randn(5, 2), torch.randn(1, 3)),
    ],
    ids=[
        "points, functions",
        "more functions",
        "square functions",
        "times, states",
        "times, one state",
        "boxes in one image",
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


def test_nodes_or_graphs_is_refused_unless_it_is_told() -> None:
    """Where nothing passes between nodes, and nothing is pooled, each may be a sample."""

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor, batch: Tensor) -> Tensor:
            return self.a(x).tanh()

    model, owner = Nodes(), torch.tensor([0, 0, 1, 1, 1, 2])
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="6 rows of 'x'") as said:
        model(X, owner).sum().backward()
    assert "3 samples in one of 'x' and 'batch'" in str(said.value)
    assert 'batch_dim={name: "owner"}' in str(said.value)
    with heldin.observe(model, batch_dim={"batch": None}) as seen:
        model(X, owner).sum().backward()
    assert seen.count == 6
    with heldin.observe(model, batch_dim={"batch": "owner"}) as seen:
        model(X, owner).sum().backward()
    assert seen.count == 3
    for wrong in (owner + 1, owner.double(), owner[:, None], owner > 1):
        with (
            heldin.observe(model, batch_dim={"batch": "owner"}),
            pytest.raises(heldin.NotObservable, match="'batch' holds the \"owner\" of each row"),
        ):
            model(X, wrong)


def test_what_a_changed_batch_cannot_tell_is_refused() -> None:
    """Without an index of nodes, the parts of a batch are known from when it was put together."""
    batch = flat.Batch(*flat.graphs())
    batch.edge_attr = batch.edge_attr[:-1]
    batch.stores = [{"x": batch.x, "edge_index": batch.edge_index, "edge_attr": batch.edge_attr}]
    with heldin.observe(flat.OfBatch()) as seen, pytest.raises(heldin.NotObservable) as said:
        seen.call(lambda data: data.x, batch)
    assert "'edge_attr' of the batch was changed after it was put together" in str(said.value)


def test_the_loss_decides_what_is_counted() -> None:
    """Rows of a table of scores are samples if the loss is a sum over them."""
    model = Fn(outer, a=nn.Linear(3, 2), b=nn.Linear(2, 2))
    classes, x, y = torch.randn(5, 2), torch.randn(4, 3), torch.arange(4)
    with heldin.observe(model) as seen:
        F.cross_entropy(model(classes, x), y, reduction="sum").backward()
    assert seen.count == 4
    agree(seen, model, F.cross_entropy(model(classes, x), y, reduction="none"))


def test_a_yes_or_no_about_the_batch_tells_plans_apart() -> None:
    """Rows are turned by one or by two between two uses of a layer; the graph is the same."""

    def forward(s: Any, x: Tensor, mask: Tensor) -> Tensor:
        by = 1 if mask.all() else 2
        h = s.a(x).tanh()
        return s.a(torch.cat([h[by:], h[:by]]))

    model = Fn(forward, a=nn.Linear(3, 3))
    with heldin.observe(model) as seen:
        for step in range(16):
            seen.clear()
            model.zero_grad()
            mask = torch.ones(6).bool()
            mask[step % 6] = step % 3 > 0
            out = model(X, mask)
            out.sin().sum().backward(retain_graph=True)
            by = 1 if step % 3 else 2
            agree(seen, model, out.sin().sum(1).roll(by, 0))


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


def pairs(out: Tensor) -> Tensor:
    return out[:, None] - out[None]


def _one_pair(out: Tensor) -> Tensor:
    """Each row less its target; one of them less another row."""
    chosen = torch.arange(len(out))[:, None] == 700
    return out - torch.where(chosen, out.roll(1, 0), torch.ones(()))


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
    "a pair among many rows": lambda o: _one_pair(torch.cat([o] * 200)).abs().sum(),
    "dice": lambda o: 1 - (o.sigmoid() * Y).sum() / (o.sigmoid().sum() + 1),
}


@pytest.mark.parametrize("name", COUPLED)
def test_losses_that_couple_samples_are_reported(name: str) -> None:
    model = nn.Linear(3, 2)
    with heldin.observe(model), pytest.warns(heldin.errors.MixedSamplesWarning, match="the loss"):
        COUPLED[name](model(X)).backward()


def test_a_loss_that_couples_samples_through_an_inner_output_is_reported() -> None:
    """The load of experts: the gate feeds the output, and goes into the loss by itself."""

    def forward(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = s.a(x).softmax(1)
        return s.b(gate), gate

    model = Fn(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    with heldin.observe(model):
        out, gate = model(X)
        with pytest.warns(heldin.errors.MixedSamplesWarning, match="the loss"):
            (F.mse_loss(out, Y) + gate.mean(0).std().abs()).backward()
    with heldin.observe(model) as seen:  # a warning would be an error
        out, gate = model(X)
        (F.mse_loss(out, Y) + gate.square().mean()).backward(retain_graph=True)
    agree(seen, model, (out - Y).square().mean(1) / 6 + gate.square().mean(1) / 6)


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
