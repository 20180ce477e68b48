"""Steps like those before them take a short path through compiled code (`heldin._routine`).

Every story is lived twice, with the short path and without it. All that a rule says must be the
same to the last bit, whatever happens between two steps or in the middle of one.
"""

from __future__ import annotations

import gc
import math
import pickle
import random
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import heldin
from heldin import _routine
from heldin._rules import RULES

pytestmark = pytest.mark.skipif(
    _routine._COMPILED is None,
    reason="src/heldin/_routine.c was not compiled here, or PyTorch lacks what it needs",
)

ESTIMATORS = [
    {"estimator": "exact"},
    {"estimator": "sampled"},  # all of these small tensors
    {"estimator": "sampled", "budget": 8},  # other parts of them in each step
]
STEPS = 16
LATE = (9, 13)  # when something else happens; by then steps are routine


class Life:
    """A model, its rule and its data; `step` is one training step."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = model.to(dtype)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.dtype, self.taken = dtype, 0
        self.rule = heldin.EvidenceStopping(model, **settings)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def batch(self, m: int = 12, features: int = 7) -> tuple[Tensor, Tensor]:
        return torch.randn(m, features, dtype=self.dtype), torch.randn(m, 3, dtype=self.dtype)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) - y).square().mean()

    def close(self) -> None:
        self.rule.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.loss(*self.batch()).backward()
        self.close()


def deep() -> nn.Module:
    last = nn.Linear(5, 3, bias=False)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), last)


def lived(
    story: Callable[[Life, int], None],
    monkeypatch: pytest.MonkeyPatch,
    short: bool,
    make: Callable[[], nn.Module] = deep,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[Life, list[Any]]:
    run = _routine.Routine.run
    with monkeypatch.context() as patch:
        life = Life(make(), dtype, **settings)

        def counted(self: Any, *args: Any) -> bool:
            done = run(self, *args)
            life.taken += done
            return done

        patch.setattr(_routine.Routine, "run", counted)
        if not short:
            patch.setattr(_routine, "_COMPILED", None)
        rule, found = life.rule, []
        with rule:
            for number in range(STEPS):
                story(life, number) if number in LATE else life.step()
                found.append([rule.evidence, rule.criterion, rule.reason, rule.history.columns()])
        found.append([rule.state_dict()["sampler"]])
    return life, found


def both(
    story: Callable[[Life, int], None], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Life:
    """Live it twice; the rules must agree, and the short path must have been taken."""
    life, found = lived(story, monkeypatch, True, **settings)
    other, expected = lived(story, monkeypatch, False, **settings)
    assert repr(found) == repr(expected)
    assert other.taken == 0
    assert life.taken >= 4, "nothing was tested"
    return life


def usual(life: Life, number: int) -> None:
    life.step()


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["exact", "sampled", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"groups": "all"},
        {"correction": "symmetric"},
        {"correction": "gaussian"},
        {"dead": "zero"},
        {"weighted": False, "start": 0.0},
        {"parameters": lambda name: name.startswith("0")},
    ],
    ids=["plain", "all", "symmetric", "gaussian", "zero", "unweighted", "some"],
)
def test_steps_of_one_kind(
    estimator: Any, dtype: torch.dtype, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = both(usual, monkeypatch, dtype=dtype, **estimator, **settings)
    assert life.taken >= STEPS - 6


def test_what_was_found_is_not_the_users_to_change() -> None:
    model = nn.Linear(7, 3)
    rule = at_work(model, torch.randn(12, 7))
    rule.evidence.groups.clear()
    assert rule.evidence.groups.keys() == {"weight", "bias"}
    assert rule.history[-1].groups.keys() == {"weight", "bias"}
    rule.remove()


def test_what_is_found_is_what_single_samples_give() -> None:
    model = deep().double()
    rule = heldin.EvidenceStopping(model)
    x, y = torch.randn(12, 7).double(), torch.randn(12, 3).double()
    for _ in range(8):
        (model(x) - y).square().sum().backward()
        rule.step()
    assert rule._seen.routine is not None
    for name, parameter in model.named_parameters():
        each = [
            torch.autograd.grad((model(x[i : i + 1]) - y[i]).square().sum(), parameter)[0]
            for i in range(12)
        ]
        rows = torch.stack(each)
        expected = heldin.Moments(rows.sum(0), rows.square().sum(0), 12)
        alive = expected.squares > 0
        f = float(expected.snr[alive].mean())
        assert math.isclose(rule.evidence.groups[name], 1 - f, rel_tol=1e-9)
        assert rule.evidence.live[name] == int(alive.sum())
    rule.remove()


def random_life(seed: int, compiled: Any) -> tuple[str, int]:
    """A network, a rule and batches by chance; what the rule says, and the steps of routine."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtype = chance.choice([torch.float32, torch.float64])
    sizes = [chance.randint(1, 20) for _ in range(chance.randint(2, 6))]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers.append(nn.Linear(before, after, bias=chance.random() < 0.7))
        layers.append(chance.choice([nn.Tanh, nn.ReLU, nn.Identity, nn.GELU])())
    model = nn.Sequential(*layers, nn.Dropout(chance.choice([0.0, 0.2]))).to(dtype)
    optimizer = chance.choice([torch.optim.SGD, torch.optim.Adam])(model.parameters(), lr=0.01)
    rule = heldin.EvidenceStopping(
        model,
        groups=chance.choice(["tensor", "all"]),
        correction=chance.choice([None, None, "symmetric", "gaussian"]),
        estimator=chance.choice(["exact", "sampled"]),
        budget=chance.choice([1, 3, 16, 4096]),
    )
    found, routine, batches = [], 0, [chance.randint(2, 40) for _ in range(2)]
    with rule, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_routine, "_COMPILED", compiled)
        for _ in range(25):
            x = torch.randn(batches[chance.random() < 0.15], sizes[0], dtype=dtype)
            if chance.random() < 0.3:
                x = x.t().contiguous().t()
            model.train(chance.random() < 0.95)
            out = model(x)
            loss = out.square().mean() if chance.random() < 0.9 else out.abs().sum()
            loss.backward(retain_graph=chance.random() < 0.1)
            if chance.random() < 0.05:
                model(x).square().mean().backward()
            routine += rule._seen.routine is not None
            rule.step()
            optimizer.step()
            optimizer.zero_grad()
            found.append((rule.evidence, rule.criterion))
    return repr(found), routine


def test_random_lives() -> None:
    taken = 0
    for seed in range(40):
        found, routine = random_life(seed, _routine._COMPILED)
        assert found == random_life(seed, None)[0], seed
        taken += routine
    assert taken > 200


# --- stories ---------------------------------------------------------------------------------


def another_size(life: Life, number: int) -> None:
    life.loss(*life.batch(5)).backward()
    life.close()


def one_sample(life: Life, number: int) -> None:
    life.loss(*life.batch(1)).backward()
    life.close()


def accumulated(life: Life, number: int) -> None:
    for _ in range(2):
        life.loss(*life.batch()).backward()
    life.close()


def twice_through_one_graph(life: Life, number: int) -> None:
    loss = life.loss(*life.batch())
    loss.backward(retain_graph=True)
    with pytest.raises(heldin.NotObservable, match="still to be followed back"):
        loss.backward(retain_graph=number == LATE[0])
    life.close()
    with pytest.raises(heldin.NotObservable, match="still to be followed back"):
        loss.backward()


def gradients_of_gradients(life: Life, number: int) -> None:
    life.loss(*life.batch()).backward(create_graph=True)
    life.rule.step()
    for parameter in life.model.parameters():
        parameter.grad = None


def a_penalty(life: Life, number: int) -> None:
    penalty = sum(p.square().sum() for p in life.model.parameters())
    (life.loss(*life.batch()) + 0.01 * penalty).backward()
    life.close()


def only_some(life: Life, number: int) -> None:
    first, *_ = life.model.parameters()
    life.loss(*life.batch()).backward(inputs=[first])
    life.rule.step()
    life.optimizer.zero_grad()


def frozen(life: Life, number: int) -> None:
    first, *_ = life.model.parameters()
    first.requires_grad_(number == LATE[1])
    life.step()


def replaced(life: Life, number: int) -> None:
    assert isinstance(life.model, nn.Sequential)
    life.model[2] = nn.Linear(5, 5).to(life.dtype)
    life.step()


def resized(life: Life, number: int) -> None:
    assert isinstance(life.model, nn.Sequential)
    wide = 6 if number == LATE[0] else 5
    for layer, shape in (life.model[0], (wide, 7)), (life.model[2], (5, wide)):
        layer.weight.data = torch.ones(shape, dtype=life.dtype)
    life.model[0].bias.data = torch.ones(wide, dtype=life.dtype)
    life.loss(*life.batch()).backward()
    life.rule.step()
    life.model.zero_grad()


def doubled_gradient(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    out.register_hook(lambda grad: 2 * grad)
    (out - y).square().mean().backward()
    life.close()


def changed_at_a_node(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    out.grad_fn.register_prehook(lambda grads: tuple(g * g.abs() for g in grads))
    (out - y).square().mean().backward()
    life.close()


def transposed_gradient(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    out.register_hook(lambda grad: grad.t().contiguous().t())
    (out - y).square().mean().backward()
    life.close()


def a_pass_inside(life: Life, number: int) -> None:
    """A hook of the user's runs another pass through the graph, before this one gets there."""
    x, y = life.batch()
    out = life.model(x)
    other = out.exp().sum()

    def look(grad: Tensor) -> None:
        handle.remove()
        torch.autograd.grad(other, list(life.model.parameters()), retain_graph=True)

    handle = out.register_hook(look)
    (out - y).square().mean().backward()
    life.close()


def a_backward_inside(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    other = life.loss(*life.batch())
    out.register_hook(lambda grad: other.backward())
    (out - y).square().mean().backward()
    life.close()


def many_passes_inside(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)
    inner = life.model[0].weight  # type: ignore[index]

    def look(grad: Tensor) -> None:
        handle.remove()
        torch.autograd.grad(
            out, inner, torch.stack([grad, -grad]), retain_graph=True, is_grads_batched=True
        )

    handle = out.register_hook(look)
    (out - y).square().mean().backward()
    life.close()


def broken_off(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)

    def refuse(grad: Tensor) -> None:
        raise ValueError("no")

    handle = life.model[0].weight.register_hook(refuse)  # type: ignore[index]
    with pytest.raises(ValueError, match="no"):
        (out - y).square().mean().backward()
    handle.remove()
    life.optimizer.zero_grad()
    life.rule._seen.clear(redraw=False)
    life.step()


def packed(life: Life, number: int) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = life.loss(*life.batch())
    loss.backward()
    life.close()


def other_data(life: Life, number: int) -> None:
    """The saved rows are replaced while the pass is under way."""
    x, y = life.batch()
    out = life.model(x)

    def put(grad: Tensor) -> None:
        x.data = torch.ones_like(x)

    out.register_hook(put)
    (out - y).square().mean().backward()
    life.close()


def evaluated(life: Life, number: int) -> None:
    life.model.eval()
    with torch.no_grad():
        life.model(life.batch()[0])
    life.model.train()
    life.step()


def two_calls(life: Life, number: int) -> None:
    (life.loss(*life.batch()) + life.loss(*life.batch())).backward()
    life.close()


def a_call_without_a_pass(life: Life, number: int) -> None:
    life.model(life.batch()[0])
    life.step()


def another_loss(life: Life, number: int) -> None:
    x, y = life.batch()
    (life.model(x) - y).abs().mean().backward()
    life.close()


def infinite(life: Life, number: int) -> None:
    x, y = life.batch()
    x[3, 2] = math.inf if number == LATE[0] else math.nan
    (life.model(x) - y).square().mean().backward()
    life.rule.step()
    life.optimizer.zero_grad()


def alike(life: Life, number: int) -> None:
    """All samples are the same: the variance is lost in rounding."""
    x, y = life.batch()
    life.loss(x[:1].expand(12, -1), y[:1].expand(12, -1)).backward()
    life.close()


def nothing_at_all(life: Life, number: int) -> None:
    (0 * life.loss(*life.batch())).backward()
    life.close()


def through_the_function(life: Life, number: int) -> None:
    torch.autograd.backward([life.loss(*life.batch())])
    life.close()


def a_rule_of_ones_own(life: Life, number: int) -> None:
    ours = RULES["AddmmBackward0"]
    RULES["AddmmBackward0"] = lambda use: ours(use)
    life.step()
    RULES["AddmmBackward0"] = ours


def in_another_precision(life: Life, number: int) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = life.loss(*life.batch())
    loss.backward()
    life.close()


def larger_memory(life: Life, number: int) -> None:
    """A graph with more to read takes the memory of all."""
    assert isinstance(life.model, nn.Sequential)
    life.model.append(nn.Linear(3, 3).to(life.dtype))
    life.step()


class Gate(torch.autograd.Function):
    """Lets no gradient through if it is closed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, closed: bool) -> Tensor:
        ctx.closed = closed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None if ctx.closed else grad, None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.closed = nn.Linear(7, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Gate.apply(self.first(x).tanh(), self.closed))  # type: ignore[no-any-return]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["exact", "sampled", "blocks"])
def test_layers_that_no_gradient_comes_to(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(life: Life, number: int) -> None:
        life.model.closed = True  # type: ignore[assignment]
        life.loss(*life.batch()).backward()
        life.rule.step()
        assert life.rule.evidence.groups.keys() == {"last.weight", "last.bias"}
        life.model.closed = False  # type: ignore[assignment]
        life.optimizer.zero_grad()

    both(story, monkeypatch, make=Gated, **estimator)


def test_a_layer_that_takes_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are looked up again when a pass meets a leaf that is not the model's."""
    scale = nn.Parameter(torch.ones(()))

    def story(life: Life, number: int) -> None:
        if number == LATE[0]:
            life.model.first = nn.Sequential(life.model.first)  # type: ignore[arg-type]
        other = nn.Linear(2, 1)
        (other(torch.randn(4, 2)).sum() * scale).backward()
        life.step()

    both(story, monkeypatch, make=Gated)


def test_a_leaf_that_is_not_the_models_is_no_routine() -> None:
    model, scale = nn.Linear(7, 3), nn.Parameter(torch.ones(()))
    with heldin.EvidenceStopping(model) as rule:
        for _ in range(8):
            (model(torch.randn(12, 7)) * scale).square().mean().backward()
            rule.step()
            assert rule._seen.routine is None


def test_another_pass_while_the_hooks_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may run it: registering a hook is Python, in the middle of `begin`."""
    model, other = nn.Linear(7, 3), nn.Linear(7, 3)
    x = torch.randn(12, 7)
    rule = at_work(model, x)
    make, inside = RemovableHandle.__init__, []

    def switched(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if not inside:
            inside.append(True)
            other(x).square().mean().backward()

    with monkeypatch.context() as patch:
        patch.setattr(RemovableHandle, "__init__", switched)
        model(x).square().mean().backward()
    assert inside
    before = rule.evidence
    rule.step()
    assert rule.evidence == before
    rule.remove()


def test_a_copy_of_a_routine_is_none() -> None:
    model = nn.Linear(7, 3)
    rule = at_work(model, torch.randn(12, 7))
    assert pickle.loads(pickle.dumps(rule._seen.routine)) is None
    rule.remove()


def a_step_inside(life: Life, number: int) -> None:
    x, y = life.batch()
    out = life.model(x)

    def close(grad: Tensor) -> None:
        life.rule.step()

    out.register_hook(close)
    (out - y).square().mean().backward()
    life.close()


STORIES = [
    a_step_inside,
    another_size, one_sample, accumulated, twice_through_one_graph, gradients_of_gradients,
    a_penalty, only_some, frozen, replaced, resized, doubled_gradient, changed_at_a_node,
    transposed_gradient, a_pass_inside, a_backward_inside, many_passes_inside, broken_off, packed,
    other_data, evaluated, two_calls, a_call_without_a_pass, another_loss, infinite, alike,
    nothing_at_all, through_the_function, a_rule_of_ones_own, in_another_precision, larger_memory,
]  # fmt: skip


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["exact", "sampled", "blocks"])
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:.*its graph differs:heldin.HeldinWarning")
def test_surprises(
    story: Callable[[Life, int], None], estimator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(story, monkeypatch, dtype=torch.float64, **estimator)


class Scaled(nn.Module):
    """Uses factors that change from one step to another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(3))
        self.alpha = self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight, alpha=self.alpha, beta=self.beta)


@pytest.mark.parametrize("which", ["alpha", "beta"])
def test_factors_that_change(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def story(life: Life, number: int) -> None:
        setattr(life.model, which, 0.5)
        life.step()
        setattr(life.model, which, 1.0)

    both(story, monkeypatch, make=Scaled)
    both(usual, monkeypatch, make=Scaled)


# --- what cannot be read ---------------------------------------------------------------------


def test_a_gradient_that_cannot_be_read_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    def story(life: Life, number: int) -> None:
        x, y = life.batch()
        out = life.model(x)
        out.register_hook(lambda grad: torch._neg_view(-grad))
        with pytest.warns(heldin.HeldinWarning, match="is not observed"):
            (out - y).square().mean().backward()
        life.close()
        assert math.isnan(life.rule.evidence.criterion)
        assert "no value" in life.rule.reason

    life, _ = lived(story, monkeypatch, True)
    assert life.taken >= 4
    assert life.rule.history[-1].raw < 1


# --- life time -------------------------------------------------------------------------------


def at_work(model: nn.Module, x: Tensor) -> heldin.EvidenceStopping:
    rule = heldin.EvidenceStopping(model)
    for _ in range(8):
        model(x).square().mean().backward()
        rule.step()
    assert rule._seen.routine is not None
    return rule


def test_nothing_is_kept_alive() -> None:
    class Marked(torch.autograd.Function):
        """Its node can be watched."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            marks.append(weakref.ref(ctx))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Marked.apply(super().forward(x))  # type: ignore[no-any-return]

    marks: list[weakref.ref[Any]] = []
    model, x = Model(7, 3), torch.randn(12, 7)
    rule = at_work(model, x)
    assert all(mark() is None for mark in marks)
    kept = weakref.ref(model.weight)
    rule.remove()
    del model
    assert kept() is None


def test_a_routine_in_a_cycle_is_collected() -> None:
    model = nn.Linear(7, 3)
    rule = at_work(model, torch.randn(12, 7))
    model.weight.routine = rule._seen.routine  # type: ignore[assignment]
    found = weakref.ref(model.weight)
    rule.remove()
    del model, rule
    gc.collect()
    assert found() is None


def test_a_resumed_run_is_the_same_to_the_last_bit() -> None:
    def run(stop: int | None) -> list[float]:
        torch.manual_seed(0)
        model = deep()
        rule = heldin.EvidenceStopping(model)
        batches = [torch.randn(12, 7) for _ in range(20)]
        for i, x in enumerate(batches):
            if i == stop:
                state, rule_before = rule.state_dict(), rule
                rule = heldin.EvidenceStopping(model)
                rule.load_state_dict(state)
                rule_before.remove()
            model(x).square().mean().backward()
            rule.step()
        rule.remove()
        return rule.history.columns()["criterion"]

    assert run(None) == run(12)


@pytest.mark.parametrize(
    "wrong",
    [
        ((), b"", (), (), (), (), (), (0.0, 1.0)),
        ((int,) * 65, b"", (None,) * 65, ((),) * 65, (), (), (), (0.0, 1.0, 1.0)),
        ((int,), bytes(8), (None,), ((1, 2, 3),), (), (), (), (0.0, 1.0, 1.0)),
        ((int,), bytes(8), (None,), ((),), (), ("a",), (), (0.0, 1.0, 1.0)),
        ((int,), bytes(8), (None,), ((),), ((1, 2),), (), (), (0.0, 1.0, 1.0)),
        ((int,), bytes(8), (None,), ((),), (), ("a",), ("b",), (0.0, 1.0, 1.0)),
    ],
)
def test_what_is_no_routine_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        _routine._COMPILED(*wrong)


@pytest.mark.parametrize("wrong", [(), ((),), ((), ((1, 1.0),)), (((0,) * 9,), ())])
def test_places_that_do_not_fit_are_refused(wrong: Any) -> None:
    made = _routine._COMPILED((int,), bytes(8), (None,), ((),), (), (), (), (0.0, 1.0, 1.0))
    with pytest.raises((TypeError, ValueError)):
        made.place(*wrong)
    made.place((), ())
    assert not made.begin(None, None)
