"""What is not training, or not ordinary, runs as if nothing were observed."""

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
from heldin._private_torch import forward_hooks, is_wrapped_by_transform
from heldin.capture import forward
from heldin.capture.plan_cache import IDLE
from tests.support.cases import Fn, rows
from tests.support.promise_data import X, Y, agree, net
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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


@pytest.mark.filterwarnings("ignore:.torch.jit")
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


@pytest.mark.filterwarnings("ignore:.torch.jit")
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
            agree(seen, model, (model.a(X) * factor + shift).sin().sum(1))  # type: ignore[operator]


CHANGING = {  # what a model returns at first, and later
    "more outputs": (lambda y, z, w: y, lambda y, z, w: (z, y)),
    "fewer outputs": (lambda y, z, w: (z, y), lambda y, z, w: y),
    "other outputs": (lambda y, z, w: (y, z), lambda y, z, w: {"w": w, "y": y}),
    "another width": (lambda y, z, w: y, lambda y, z, w: z),
    "samples elsewhere": (lambda y, z, w: w, lambda y, z, w: w.transpose(0, 1)),
    "samples elsewhere, all sizes alike": (
        lambda y, z, w: w[..., :2].repeat(1, 3, 3),
        lambda y, z, w: w[..., :2].repeat(1, 3, 3).transpose(0, 2),
    ),
}


@pytest.mark.parametrize("name", CHANGING)
def test_outputs_that_change_are_right_or_a_warning_says_so(name: str) -> None:
    first, later = CHANGING[name]
    turns = iter(range(1000))

    def forward(s: Any, x: Tensor) -> Any:
        y = s.a(x)
        z = s.b(y.tanh())
        return (later if next(turns) in (2, 3, 4) else first)(y, z, z[:, None] * y[:, :, None])

    model = Fn(forward, a=nn.Linear(3, 2), b=nn.Linear(2, 5))
    skipped = 0
    with heldin.observe(model) as seen:
        for step in range(8):
            seen.clear()
            model.zero_grad()
            out = model(X)
            if name.startswith("samples elsewhere") and step in (2, 3, 4):
                out = out.transpose(0, 2 if "alike" in name else 1)
            tensors = [out] if isinstance(out, Tensor) else out
            tensors = tensors.values() if isinstance(tensors, dict) else tensors
            losses = sum(each.sin().flatten(1).sum(1) for each in tensors)
            expected = truth(model, losses)  # type: ignore[arg-type]
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                losses.sum().backward()
            if said:
                assert "place of each sample" in str(said[0].message)
                assert seen.count == 0
                skipped += 1
            else:
                assert max(error(seen, expected, 1e-12).values()) < 1e-9
    assert skipped <= 2


@pytest.mark.parametrize("training", [True, False])
def test_evaluation_without_no_grad_keeps_no_graphs(training: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    def held() -> int:
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            alive = [o for o in gc.get_objects() if isinstance(o, Tensor)]
        # what a test before this one left behind in a transform has no memory of its own
        alive = [tensor for tensor in alive if not is_wrapped_by_transform(tensor)]
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
    tracker = forward.Tracker  # type: ignore[attr-defined]
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
    assert not forward_hooks(model)


def test_a_refusal_names_the_op_that_mixed() -> None:
    model = Fn(
        lambda s, x, y: s.b(s.a(x * y.detach().mean()) + s.a(x).flip(0)),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 2),
    )
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"mixed by add"):
        model(X, Y).sin().sum().backward()
