"""What users do between two steps, or in the middle of one, after the ways are known.

The first steps of each test teach the observation what the graphs look like; then something else
happens. All are compared with one backward pass per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heldin
from heldin.capture import backward as _observe
from tests.support import inside, runs

DOUBLE: Any = {"dtype": torch.float64}
estimators = pytest.mark.parametrize("estimator", ["exact", "sampled"])


def same(seen: heldin.Observation, expected: dict[str, tuple[Tensor, Tensor]]) -> None:
    assert seen.keys() == expected.keys()
    for name, (total, squares) in expected.items():
        block: Any = ()
        sampler = inside.collector(seen).sampler
        if sampler is not None:
            block = sampler.drawn(name, tuple(total.shape))[0] or ()
        assert seen[name].total.shape == total[block].shape, name
        assert torch.allclose(seen[name].total, total[block], rtol=1e-9, atol=1e-12), name
        assert torch.allclose(seen[name].squares, squares[block], rtol=1e-9, atol=1e-12), name


def expected_of(model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    found: dict[str, list[Tensor]] = {}
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(x[i : i + 1]), list(model.parameters()))
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            found.setdefault(name, []).append(grad.to_dense())
    each = {name: torch.stack(grads) for name, grads in found.items()}
    return {name: (e.sum(0), e.square().sum(0)) for name, e in each.items()}


class Chosen(nn.Module):
    """Uses the first features only, as many as its weight has rows, and adds a vector."""

    def __init__(self, features: int, entries: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, 5, **DOUBLE))
        self.bias = nn.Parameter(torch.randn(entries, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : len(self.weight)] @ self.weight + self.bias


REPLACED: dict[str, Callable[[], tuple[list[nn.Module], list[nn.Module], Tensor]]] = {
    "smaller layers": lambda: (
        [nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3)],
        [nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3)],
        torch.randn(6, 20),
    ),
    "fewer features": lambda: ([Chosen(12, 5)], [Chosen(4, 5)], torch.randn(6, 12)),
    "a single entry": lambda: ([Chosen(12, 5)], [Chosen(12, 1)], torch.randn(6, 12)),
    "a larger table": lambda: (
        [nn.Embedding(10, 2)], [nn.Embedding(20, 2)], torch.randint(0, 20, (6, 3))
    ),
    "a smaller kernel": lambda: (
        [nn.Conv2d(3, 8, 3, padding=1)], [nn.Conv2d(3, 8, 1)], torch.randn(6, 3, 5, 5)
    ),
}  # fmt: skip


@estimators
@pytest.mark.parametrize("kind", REPLACED)
def test_layers_replaced_by_others_of_another_size(kind: str, estimator: Any) -> None:
    torch.manual_seed(0)
    before, after, x = REPLACED[kind]()
    model = nn.Sequential(*before).double()
    x = x.double() if x.is_floating_point() else x

    def loss(given: Tensor) -> Tensor:
        return model(given).square().sum()

    with heldin.observe(model, estimator=estimator, coordinates=16) as seen:
        for step in range(6):
            if step == 3:
                for i, layer in enumerate(after):
                    model[i] = layer.double()
            seen.clear()
            inputs = x if step > 2 or x.is_floating_point() else x % 10
            loss(inputs).backward()
        seen.pause()
        same(seen, expected_of(model, loss, x))


@estimators
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_hook_that_runs_through_the_same_graph(estimator: Any, where: str, batched: bool) -> None:
    """With torch.autograd.grad, before or after the pass itself comes by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(6, 5, **DOUBLE)
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3):
            seen.clear()
            inside: list[Tensor] = []
            handle = model[1].register_forward_hook(lambda m, i, o: inside.append(o))
            y = model(x)
            handle.remove()
            other, ran = 3 * y.sum((0, 1), keepdim=True), []  # type: ignore[var-annotated]

            def hook(grad: Tensor) -> None:
                if not ran:
                    ran.append(1)
                    ones = torch.ones(2, 1, 1, **DOUBLE) if batched else torch.ones(1, 1, **DOUBLE)
                    torch.autograd.grad(
                        other, inside[0], ones, retain_graph=True, is_grads_batched=batched
                    )

            (y if where == "before" else inside[0]).register_hook(hook)
            y.square().sum().backward(retain_graph=True)
            assert ran
        seen.pause()
        same(seen, expected_of(model, lambda part: model(part).square().sum(), x))


@estimators
@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_inside_the_very_first_one(estimator: Any, fails: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(6, 5, **DOUBLE)
    with heldin.observe(model, estimator=estimator) as seen:
        inside: list[Tensor] = []
        handle = model[1].register_forward_hook(lambda m, i, o: inside.append(o))
        other, loss = model(x).square().sum(), model(x).square().sum()
        handle.remove()
        if fails:
            inside[0].register_hook(lambda grad: 1 / 0)

        def hook(grad: Tensor) -> None:
            try:
                with torch.enable_grad():
                    other.backward()
            except ZeroDivisionError:
                assert fails

        inside[1].register_hook(hook)
        loss.backward()
        seen.pause()
        times = 1 if fails else 2
        expected = expected_of(model, lambda part: model(part).square().sum(), x)
        same(seen, {n: (times * a, times * b) for n, (a, b) in expected.items()})


@estimators
@pytest.mark.parametrize("empty", [False, True])
def test_activations_that_are_put_away_for_a_while(estimator: Any, empty: bool) -> None:
    """By hand, with `.data`, and brought back by a hook."""
    model = nn.Linear(5, 3).double()
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3):
            seen.clear()
            x = torch.randn(6, 5, **DOUBLE)
            kept, y = x.clone(), model(x)
            x.data = torch.empty(0, **DOUBLE) if empty else torch.zeros(5, 6, **DOUBLE).t()
            y.register_hook(lambda grad: setattr(x, "data", kept))
            y.square().sum().backward()
        seen.pause()
        same(seen, expected_of(model, lambda part: model(part).square().sum(), x))


@estimators
def test_a_gradient_without_memory(estimator: Any) -> None:
    model, x = nn.Linear(5, 3).double(), torch.randn(6, 5, **DOUBLE)
    with heldin.observe(model, estimator=estimator) as seen:
        model(x).sum().backward()
        seen.clear()
        model(x).backward(torch._efficientzerotensor(6, 3, **DOUBLE))
        assert float(seen["weight"].squares.abs().max()) == 0.0


@estimators
@pytest.mark.parametrize("edge", [False, True])
def test_only_some_parameters_get_a_gradient(estimator: Any, edge: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(6, 5, **DOUBLE)
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3):
            seen.clear()
            weight = model[0].weight
            wanted = torch.autograd.graph.get_gradient_edge(weight) if edge else weight  # type: ignore[arg-type]
            model(x).square().sum().backward(inputs=[wanted])
            assert list(seen) == ["0.weight"]
        seen.pause()
        expected = expected_of(model, lambda part: model(part).square().sum(), x)
        same(seen, {"0.weight": expected["0.weight"]})


def test_many_samples_lose_no_digits() -> None:
    """A million contributions of the same size."""
    model = nn.Linear(1, 1)
    x = torch.zeros(1_000_000, 1)
    signs = (torch.arange(len(x)) % 3 - 1.0)[:, None] * 0.1
    with heldin.observe(model) as seen:
        for _ in range(2):
            seen.clear()
            (model(x) * signs).sum().backward()
    exact = float(signs.double().square().sum())
    assert float(seen["bias"].squares) == pytest.approx(exact, rel=1e-5)


@estimators
@pytest.mark.parametrize("size", [20, 900])
def test_contributions_whose_squares_are_lost_ask_for_nothing(estimator: Any, size: int) -> None:
    """They are no evidence of anything, least of all for a stop."""
    torch.manual_seed(0)
    model, x = nn.Linear(size, 700), torch.randn(16, size)
    target = torch.randn(16, 700) + 0.3
    values = []
    for scale in (1.0, 1e-12, 1e-22):
        with runs.EvidenceStopping(model, estimator=estimator, smoothing=0.0) as stopping:
            for _ in range(2):
                ((model(x) * target).sum() * scale).backward()
                stopping.step()
            values.append(stopping.evidence.groups)
    assert values[0] == pytest.approx(values[1], rel=1e-3)
    assert values[2] == {}


def test_an_observation_closed_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the beginning of a pass and the look at its names."""
    model, x = nn.Linear(5, 3), torch.randn(6, 5)
    mine, theirs = heldin.observe(model), heldin.observe(nn.Linear(2, 2))
    real = _observe.walk  # type: ignore[attr-defined]

    def walk(roots: Any) -> Any:
        theirs.close()
        return real(roots)

    monkeypatch.setattr(_observe, "walk", walk)
    with theirs, mine:
        model(x).sum().backward()
        assert set(mine) == {"weight", "bias"}


class Stop(torch.autograd.Function):
    """Lets no gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None


@estimators
def test_an_op_that_stops_the_gradient(estimator: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            stopped: Tensor = Stop.apply(self.one(x))
            return stopped + self.two(x)

    model, x = Net().double(), torch.randn(6, 5, **DOUBLE)
    with heldin.observe(model, estimator=estimator) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            model(x).square().sum().backward()
        assert float(seen["two.weight"].squares.min()) > 0
        if "one.weight" in seen:
            assert float(seen["one.weight"].squares.max()) == 0.0


@estimators
def test_a_resumed_run_over_sequences_is_the_same_to_the_last_bit(estimator: Any) -> None:
    """Sums over rows are formed in the same order in the first step as in later ones."""
    torch.manual_seed(0)
    layers = [nn.Linear(7, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 2)]
    model = nn.Sequential(*layers).double()
    batches = torch.randn(8, 5, 6, 7, **DOUBLE)

    def fresh() -> runs.EvidenceStopping:
        return runs.EvidenceStopping(model, estimator=estimator, coordinates=5, batch_dim=1)

    found = []
    for cut in (None, 4):
        stopping, values = fresh(), []
        for step, x in enumerate(batches):
            if step == cut:
                state = stopping.state_dict()
                stopping.close()
                stopping = fresh()
                stopping.load_state_dict(state)
            model(x).square().mean().backward()
            stopping.step()
            values.append(stopping.evidence.groups)
        stopping.close()
        found.append(values)
    assert found[0] == found[1]
