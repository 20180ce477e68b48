"""Several backward passes of one step, through one graph or through several."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from heldin.capture.step import OPEN
from heldin.criterion.running import Window
from tests.support import inside
from tests.support.promise_data import X, Y, net
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Tasks(nn.Module):
    """Two heads on one trunk, of layers that fast rules, the generic path and pulls look at."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(width, 2))
        self.second = nn.Bilinear(width, width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh() * self.scale
        return self.first(h + self.trunk(x)), self.second(h, h)


def first(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[0].sin().sum(1)


def second(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1].square().sum(1)


def both(model: nn.Module, x: Tensor) -> Tensor:
    return first(model, x) + second(model, x)


def is_true(seen: Any, model: nn.Module, losses: Tensor) -> None:
    """The sums, or the blocks of them that are looked at, are those of single samples."""
    expected = truth(model, losses)
    assert set(seen) == set(expected)
    sampler = inside.collector(seen).sampler
    if sampler is not None:
        blocks = {n: sampler.drawn(n, tuple(t.shape))[0] or () for n, (t, _) in expected.items()}
        expected = {n: (t[blocks[n]], s[blocks[n]]) for n, (t, s) in expected.items()}
    worst = error(seen, expected, 1e-12)
    assert max(worst.values()) < 1e-9, worst


@pytest.mark.parametrize("estimator", ["exact", "sampled"])
@pytest.mark.parametrize("width", [4, 90])
def test_a_pass_for_each_task(estimator: Any, width: int) -> None:
    """A sample's contribution is the sum of both passes before it is squared."""
    model = Tasks(width)
    with heldin.observe(model, estimator=estimator, coordinates=64) as seen:
        for step in range(4):
            seen.clear()
            model.zero_grad()
            x = torch.randn(5 if step < 3 else 1, 3)
            a, b = model(x)
            a.sin().sum().backward(retain_graph=True)
            if step == 2:
                is_true(seen, model, first(model, x))  # between the two
            b.square().sum().backward()
            assert seen.count == len(x)
            is_true(seen, model, both(model, x))


def test_more_than_two_passes_and_a_penalty_in_the_last() -> None:
    model = net()
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            out = model(X)
            for _ in range(3):
                out.sin().sum().backward(retain_graph=True)
            penalty = sum(p.square().sum() for p in model.parameters())
            (out.square().sum() + penalty).backward()
            assert seen.count == 6
            losses = 3 * model(X).sin().sum(1) + model(X).square().sum(1)
            is_true(seen, model, losses + sum(p.square().sum() for p in model.parameters()) / 6)


def test_two_calls_with_two_passes_each() -> None:
    model, u = Tasks(), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            one, two = model(X), model(u)
            one[0].sin().sum().backward(retain_graph=True)
            two[0].sin().sum().backward(retain_graph=True)
            two[1].square().sum().backward()
            one[1].square().sum().backward()
            assert seen.count == 10
            is_true(seen, model, both(model, torch.cat([X, u])))


def test_samples_that_were_counted_apart_are_refused_together() -> None:
    model = net()
    with heldin.observe(model):
        one, two = model(X), model(X + 1)
        one.sin().sum().backward(retain_graph=True)
        two.sin().sum().backward(retain_graph=True)
        with pytest.raises(heldin.NotObservable, match=r"\(loss_a \+ loss_b\)\.backward"):
            (one - two).square().sum().backward()


def test_gradients_that_are_thrown_away_between_two_passes() -> None:
    model = Tasks()
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            a, b = model(X)
            a.sin().sum().backward(retain_graph=True)
            model.zero_grad()
            b.square().sum().backward()
            is_true(seen, model, second(model, X))


def test_gradients_of_some_parameters_are_thrown_away_between_two_passes() -> None:
    model = Tasks()
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            a, b = model(X)
            a.sin().sum().backward(retain_graph=True)
            model.trunk.zero_grad()
            b.square().sum().backward()
            assert {moments.count for moments in seen.values()} == {6}
            expected = truth(model, both(model, X))
            rest = truth(model, second(model, X))
            expected |= {name: rest[name] for name in ("trunk.weight", "trunk.bias")}
            assert max(error(seen, expected, 1e-12).values()) < 1e-9


@pytest.mark.parametrize("estimator", ["exact", "sampled"])
def test_a_graph_that_is_retained_for_nothing(estimator: Any) -> None:
    """Passes of other calls are passes of other samples, and nothing of them stays."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with heldin.observe(model, estimator=estimator) as seen:
        graphs = []
        for part in X.split(1):
            out = model(part.expand(3, -1))
            mark = Mark()
            out.register_hook(mark)
            graphs.append(weakref.ref(mark))
            out.sin().sum().backward(retain_graph=True)
            del out, mark
        gc.collect()
        assert sum(graph() is not None for graph in graphs) <= OPEN
        assert len(inside.collector(seen).calls.pending) == OPEN
        optimizer.step()
        gc.collect()
        assert not any(graph() is not None for graph in graphs)
        assert not inside.collector(seen).calls.pending
        assert seen.count == 18
        is_true(seen, model, model(X.repeat_interleave(3, 0)).sin().sum(1))


class Mark:
    """Lives as long as the graph whose hook it is."""

    def __call__(self, grad: Tensor) -> None:
        """Let it be."""


def test_kept_contributions_do_not_change_with_the_gradients() -> None:
    """The gradient of a sum is the incoming one: adding to it in place would change the first."""
    shift = nn.Parameter(torch.zeros(6, 2))

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = shift

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    model = Shift()
    with heldin.observe(model) as seen:
        out = model(Y)
        (out * Y).sum().backward(retain_graph=True)
        shift.grad.mul_(7.0)  # clipped, say
        (out * Y).sum().backward()
    assert torch.allclose(seen["shift"].squares, 4 * Y.square())


PASSES: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "inputs alone": lambda m, x: m(x).sin().sum().backward(inputs=[x]),
    "inputs alone, retained": lambda m, x: m(x).sin().sum().backward(inputs=[x], retain_graph=True),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_for_the_inputs_alone_counts_no_samples(name: str) -> None:
    """As an attack on the inputs does before the step."""
    model = net()
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            x = X.clone().requires_grad_()
            PASSES[name](model, x)
            attacked = (x + x.grad).detach()  # type: ignore[operator]
            model(attacked).sin().sum().backward()
            assert seen.count == 6
            is_true(seen, model, model(attacked).sin().sum(1))


def test_a_pass_for_the_inputs_before_one_through_the_same_graph() -> None:
    model = net()
    with heldin.observe(model) as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            x = X.clone().requires_grad_()
            loss = model(x).sin().sum()
            loss.backward(inputs=[x], retain_graph=True)
            assert seen.count == 0
            loss.backward()
            assert seen.count == 6
            is_true(seen, model, model(X).sin().sum(1))


@pytest.mark.filterwarnings("ignore:.*has built another graph before:heldin.HeldinWarning")
@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_passes_of_which_one_is_looked_at_as_a_whole(order: tuple[bool, bool]) -> None:
    """A penalty is known for a whole parameter only, other passes for a block of it."""
    model = nn.Sequential(nn.Linear(60, 70), nn.Tanh(), nn.Linear(70, 50))
    with heldin.observe(model, estimator="sampled", coordinates=16) as seen:
        for step in range(5):
            seen.clear()
            model.zero_grad()
            for penalised in order:
                loss = model(torch.randn(8, 60)).square().mean()
                if penalised:
                    loss = loss + sum(p.square().sum() for p in model.parameters())
                loss.backward()
            sampler = inside.collector(seen).sampler
            assert sampler is not None
            for name, parameter in model.named_parameters():
                if step:  # at first, the second graph is a surprise
                    assert parameter.grad is not None
                    shape = tuple(parameter.shape)
                    block = sampler.drawn(name, shape)[0] or ()
                    assert torch.allclose(seen[name].total, parameter.grad[block])


def test_a_window_of_which_one_step_is_looked_at_as_a_whole() -> None:
    """A single sample's gradient can be cut; what the generic path gives of several cannot."""

    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.randn(300))

        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(x, self.p)

    for sizes in ((1, 4), (4, 1)):
        model, window = Angles(), Window(mean=False)
        with heldin.observe(model, estimator="sampled", coordinates=16) as seen:
            sampler = inside.collector(seen).sampler
            for size in sizes:
                model(torch.randn(size, 300)).sum().backward()
                window.add(seen, ["p"], 1.0, sampler)
                seen.clear(redraw=False)
            (found,) = window.moments().values()
            assert sampler is not None
            assert model.p.grad is not None
            block, weight = sampler.drawn("p", (300,), in_part=len(found.total) < 300)
            assert found.weight == weight
            assert torch.allclose(found.total, model.p.grad[block or ()])


def test_what_a_failed_pass_has_left_is_said_aloud() -> None:
    model, broken = net(), [True]

    def fail(grad: Tensor) -> None:
        if broken[0]:
            raise ValueError("on purpose")

    model[0].register_forward_hook(lambda *args: args[-1].register_hook(fail) and None)
    with heldin.observe(model) as seen:
        with pytest.raises(ValueError, match="on purpose"):
            model(X).sin().sum().backward()
        broken[0] = False
        with pytest.warns(heldin.HeldinWarning, match=r"'2\.\w+' is still there.*zero_grad"):
            model(X).sin().sum().backward()
        seen.clear()
        broken[0] = True
        with pytest.raises(ValueError, match="on purpose"):
            model(X).sin().sum().backward()
        broken[0] = False
        model.zero_grad()
        model(X).sin().sum().backward()  # a warning would be an error
        is_true(seen, model, model(X).sin().sum(1))


def test_a_loop_over_samples_before_one_pass_is_said_aloud() -> None:
    model = net()
    with heldin.observe(model) as seen:
        with pytest.warns(heldin.HeldinWarning, match="6 calls of the model with one sample each"):
            sum(F.mse_loss(model(x[None]), y[None]) for x, y in zip(X, Y, strict=True)).backward()
        assert seen.count == 1
    with heldin.observe(model) as seen:  # two views, and a last batch of one
        for part in (X[:5], X[5:]):
            (model(part) - model(part + 1)).square().sum().backward()
        assert seen.count == 6
