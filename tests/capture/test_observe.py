"""What observing promises beyond the list of cases."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from heldin.capture.collector import Collector
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def agree(seen: Any, model: nn.Module, losses: Tensor, tolerance: float = 1e-9) -> None:
    worst = error(seen, truth(model, losses), 1e-12)
    assert max(worst.values()) < tolerance, worst


# --- what adds up, what is absent ------------------------------------------------------------


def test_passes_add_up() -> None:
    model, a, b = net(3, 4, 2), torch.randn(5, 3), torch.randn(3, 3)
    with heldin.observe(model) as seen:
        model(a).sin().sum().backward()
        model(b).sin().sum().backward()
    assert seen.count == 8
    agree(seen, model, model(torch.cat([a, b])).sin().sum(1))


def test_single_samples_add_up() -> None:
    model, x = net(3, 4, 2), torch.randn(5, 3)
    with heldin.observe(model) as seen:
        for row in x:
            model(row[None]).sin().sum().backward()
    assert seen.count == 5
    agree(seen, model, model(x).sin().sum(1))


def test_two_forward_passes_then_two_backward_passes() -> None:
    model, a, b = net(3, 2), torch.randn(4, 3), torch.randn(6, 3)
    with heldin.observe(model) as seen:
        first, second = model(a).sin().sum(), model(b).sin().sum()
        first.backward()
        second.backward()
    assert seen.count == 10
    agree(seen, model, model(torch.cat([a, b])).sin().sum(1))


def test_frozen_and_unused_parameters_are_absent() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2), "c": nn.Linear(3, 2)})
    model["b"].requires_grad_(False)
    model.forward = lambda x: model["a"](x) + model["b"](x)
    with heldin.observe(model) as seen:
        model(torch.randn(4, 3)).sum().backward()
    assert set(seen) == {"a.weight", "a.bias"}


def test_tied_parameters_have_one_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    x = torch.randn(4, 3)
    with heldin.observe(model) as seen:
        model(x).sin().sum().backward()
    assert set(seen) == set(dict(model.named_parameters()))
    agree(seen, model, model(x).sin().sum(1))


def test_parameters_can_be_chosen() -> None:
    model = net(3, 4, 2)
    with heldin.observe(model, parameters=lambda name: name.endswith("bias")) as seen:
        model(torch.randn(4, 3)).sum().backward()
    assert set(seen) == {"0.bias", "2.bias"}


def test_calls_without_gradient_do_not_count() -> None:
    model, x = net(3, 2), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        with torch.no_grad():
            model(torch.randn(9, 3))
        unused = model(torch.randn(7, 3))
        model(x).sin().sum().backward()
    assert seen.count == 4
    assert unused.requires_grad
    agree(seen, model, model(x).sin().sum(1))


def test_gradients_of_inputs_are_not_observed() -> None:
    model, x = net(3, 2), torch.randn(4, 3, requires_grad=True)
    with heldin.observe(model) as seen:
        out = model(x).sin().sum()
        torch.autograd.grad(out, x, retain_graph=True)
        assert len(seen) == 0
        out.backward()
    assert seen.count == 4


def test_any_function_can_be_the_forward_pass() -> None:
    model, x, y = net(3, 2), torch.randn(4, 3), torch.randn(4, 2)

    def training_step(batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = F.linear(batch[0], model[0].weight, model[0].bias)
        return F.mse_loss(hidden, batch[1])

    with heldin.observe(model) as seen:
        for _ in range(2):
            seen.clear()
            seen.call(training_step, (x, y)).backward()
    agree(seen, model, F.mse_loss(model(x), y, reduction="none").mean(1) / 4)


def test_model_that_returns_only_its_loss() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(3, 4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    model, x, y = Model(), torch.randn(6, 3), torch.randint(0, 2, (6,))
    with heldin.observe(model) as seen:
        for _ in range(2):
            seen.clear()
            model(x, y).backward()
    agree(seen, model, F.cross_entropy(model.net(x), y, reduction="none") / 6)


# --- scale, precision ------------------------------------------------------------------------


def snrs(seen: Any) -> Tensor:
    return torch.cat([m.snr.flatten() for m in seen.values()])


@pytest.mark.parametrize("factor", [1.0, 65536.0, 1 / 3, 1e-6])
def test_the_scale_of_the_loss_changes_nothing(factor: float) -> None:
    model, x, y = net(3, 4, 2), torch.randn(8, 3), torch.randn(8, 2)
    with heldin.observe(model) as plain:
        F.mse_loss(model(x), y, reduction="sum").backward()
    with heldin.observe(model) as scaled:
        (F.mse_loss(model(x), y) * factor).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        for p in model.parameters():
            p.grad = None
    assert torch.allclose(snrs(plain), snrs(scaled), rtol=1e-9)
    assert heldin.evidence(plain).criterion == pytest.approx(heldin.evidence(scaled).criterion)


@pytest.mark.parametrize("bias", [1.0, 30.0, 1e3, 1e5, 1e8])
def test_a_mean_far_above_the_spread(bias: float) -> None:
    x = torch.randn(64, 5) + bias
    exact = nn.Linear(5, 3)
    single = nn.Linear(5, 3).float()
    single.load_state_dict(exact.state_dict())
    with heldin.observe(exact) as reference:
        exact(x).sum().backward()
    with heldin.observe(single) as seen:
        single(x.float()).sum().backward()
    f, true = seen["weight"].snr, reference["weight"].snr
    assert torch.isfinite(f).all()
    assert (f > 0).all()
    if bias <= 30:
        assert torch.allclose(f.double(), true, rtol=1e-2)
    constant = seen["bias"].snr  # the same contribution from every sample
    assert torch.isfinite(constant).all()
    assert (constant > 1e6).all()


def test_statistics_under_autocast_are_float32() -> None:
    model = net(3, 4, 2).float()
    with torch.autocast("cpu", torch.bfloat16), heldin.observe(model) as seen:
        model(torch.randn(8, 3, dtype=torch.float32)).float().square().sum().backward()
    assert {m.squares.dtype for m in seen.values()} == {torch.float32}
    assert {m.total.dtype for m in seen.values()} == {torch.float32}


def test_pure_bfloat16() -> None:
    model, x = net(3, 4, 2).bfloat16(), torch.randn(8, 3).bfloat16()
    with heldin.observe(model) as seen:
        model(x).float().square().sum().backward()
    assert {m.squares.dtype for m in seen.values()} == {torch.float32}
    worst = error(seen, truth(model, model(x).float().square().sum(1)), 1e-3)
    assert max(worst.values()) < 0.05


def test_non_finite_contributions_are_reported() -> None:
    model, x = net(3, 4, 2), torch.randn(8, 3)
    x[2, 1] = torch.nan
    with heldin.observe(model) as seen:
        model(x).square().sum().backward()
    assert not seen["0.weight"].finite
    e = heldin.evidence(seen)
    assert "0.weight" in e.nonfinite
    assert "0.weight" not in e.groups
    spread = heldin.evidence(seen, groups="all")
    assert spread.groups == {}
    assert spread.criterion != spread.criterion


# --- mixing ----------------------------------------------------------------------------------


def test_batch_norm_in_training_mode_is_reported_once_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    with heldin.observe(model) as seen:
        with pytest.warns(heldin.errors.MixedSamplesWarning, match="module '1'"):
            model(torch.randn(6, 3)).sin().sum().backward()
        model(torch.randn(6, 3)).sin().sum().backward()  # no second warning
    assert seen.count == 12
    assert torch.isfinite(seen["0.weight"].squares).all()
    total = seen["0.weight"].total
    assert torch.allclose(total, model[0].weight.grad)


def test_batch_norm_takes_the_contributions_of_rows() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)), torch.randn(6, 3)
    with pytest.warns(heldin.errors.MixedSamplesWarning), heldin.observe(model) as seen:
        model(x).sin().sum().backward()
    hidden = model[0](x)
    (delta,) = torch.autograd.grad(model[1](hidden).sin().sum(), hidden)
    expected = (delta[:, :, None] * x[:, None, :]).square().sum(0)
    assert torch.allclose(seen["0.weight"].squares, expected)


def contrastive(out: Tensor) -> Tensor:
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


def test_a_loss_that_mixes_samples_is_reported() -> None:
    model, x = net(3, 4, 2), torch.randn(6, 3)
    with heldin.observe(model) as seen:
        with pytest.warns(heldin.errors.MixedSamplesWarning, match="the loss"):
            contrastive(model(x)).backward()
        contrastive(model(x)).backward()
    assert seen.count == 12


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ordinary_losses_are_not_reported(reduction: str) -> None:
    model, x = net(3, 4, 3), torch.randn(6, 3)
    targets = torch.tensor([0, 1, 2, 2, -100, 1])
    for loss in (
        lambda o: F.cross_entropy(o, targets, reduction=reduction, weight=torch.rand(3)),
        lambda o: F.mse_loss(o, x, reduction=reduction),
        lambda o: F.huber_loss(o, x, reduction=reduction),
        lambda o: F.binary_cross_entropy_with_logits(o, (x > 0).double(), reduction=reduction),
        lambda o: F.l1_loss(o, x, reduction=reduction),
        lambda o: F.triplet_margin_loss(o, x, -x, reduction=reduction),
    ):
        with heldin.observe(model):
            loss(model(x)).backward()


def test_batch_statistics_by_hand_are_reported() -> None:
    class Standardise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / x.std(0)

    model = nn.Sequential(nn.Linear(3, 4), Standardise(), nn.Linear(4, 2))
    with (
        pytest.warns(heldin.errors.MixedSamplesWarning, match="module '1'"),
        heldin.observe(model) as seen,
    ):
        model(torch.randn(6, 3)).sin().sum().backward()
    assert set(seen) == set(dict(model.named_parameters()))


# --- penalties -------------------------------------------------------------------------------


def penalised(model: nn.Module, losses: Tensor) -> Tensor:
    """The penalty belongs to every sample in equal parts."""
    penalty = sum(p.square().sum() for p in model.parameters())
    return losses + 0.1 * penalty / len(losses)


@pytest.mark.parametrize("inside", [False, True])
def test_a_penalty_is_shared_by_all_samples(inside: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(3, 4, 2)

        def penalty(self) -> Tensor:
            return 0.1 * sum(p.square().sum() for p in self.net.parameters())

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(self.net(x), y)
            return loss + self.penalty() if inside else loss

    model, x, y = Model(), torch.randn(6, 3), torch.randn(6, 2)
    with heldin.observe(model) as seen:
        for _ in range(2):
            seen.clear()
            loss = model(x, y)
            (loss if inside else loss + model.penalty()).backward()
    each = F.mse_loss(model.net(x), y, reduction="none").mean(1) / 6
    agree(seen, model, penalised(model, each))


def test_penalties_over_two_batches() -> None:
    model, x = net(3, 2), torch.randn(8, 3)
    with heldin.observe(model) as seen:
        for part in x.split(4):
            (model(part).sin().sum() + 0.1 * model[0].weight.square().sum()).backward()
    losses = model(x).sin().sum(1) + 2 * 0.1 * model[0].weight.square().sum() / 8
    agree(seen, model, losses)


# --- what is refused -------------------------------------------------------------------------


def test_no_trainable_parameters() -> None:
    with pytest.raises(heldin.HeldinError, match="no parameter that requires a gradient"):
        heldin.observe(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(heldin.HeldinError, match=r"torch\.nn\.Module"):
        heldin.observe(torch.sin)  # type: ignore[arg-type]


def test_parameters_used_outside_the_model() -> None:
    model, x = net(3, 3), torch.randn(4, 3)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"'0\.weight'.*outside"):
        F.linear(model(x), model[0].weight).square().sum().backward()
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"0\.weight.*outside"):
        (model(x).sum() + F.linear(x, model[0].weight).square().sum()).backward()


def test_the_model_was_not_called() -> None:
    model, x = net(3, 2), torch.randn(4, 3)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="call of the model"):
        F.linear(x, model[0].weight).sum().backward()


def test_two_backward_passes_through_one_call() -> None:
    model, x = net(3, 2), torch.randn(4, 3)
    with heldin.observe(model):
        out = model(x)
        out.sin().sum().backward(retain_graph=True)
        with pytest.raises(heldin.NotObservable, match="add up losses"):
            out.cos().sum().backward()


def test_calls_of_different_size_in_one_pass() -> None:
    model = net(3, 2)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="samples"):
        (model(torch.randn(4, 3)).sum() + model(torch.randn(5, 3)).sum()).backward()


def test_samples_mixed_before_a_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b((h @ h.t()).softmax(1) @ h)

    model, x = Model(), torch.randn(5, 3)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match=r"'b\..*mixed by mm"):
        model(x).sum().backward()


def test_reentrant_checkpoints() -> None:
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(self.a, x, use_reentrant=True))

    model, x = Model(), torch.randn(5, 3, requires_grad=True)
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="use_reentrant=False"):
        model(x).sum().backward()


def test_double_backward() -> None:
    model, x = net(3, 4, 1), torch.randn(5, 3, requires_grad=True)
    with heldin.observe(model):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        with pytest.raises(heldin.NotObservable, match="call of the model"):
            grad.square().sum().backward()
    with heldin.observe(model):
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(heldin.NotObservable, match="outside"):
            (out.sum() + grad.square().sum()).backward()


def test_no_batch_among_the_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, n: int) -> Tensor:
            return self.w * n

    model = Model()
    with heldin.observe(model), pytest.raises(heldin.NotObservable, match="batch_dim"):
        model(3)


def test_an_unknown_graph_without_outputs_is_let_go_once() -> None:
    """The model branches on something that cannot be known beforehand, and returns only a loss."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.other = nn.Linear(3, 2), nn.Linear(3, 2), False

        def forward(self, x: Tensor) -> Tensor:
            return (self.b(x).tanh() if self.other else self.a(x)).square().sum()

    model, x = Model(), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        model(x).backward()
        seen.clear()
        model.other = True
        with pytest.warns(heldin.HeldinWarning, match="not observed"):
            model(x).backward()
        assert len(seen) == 0
        assert seen.count == 0
        for _ in range(2):
            seen.clear()
            model(x).backward()
            agree(seen, model, model.b(x).tanh().square().sum(1))


# --- nothing is disturbed --------------------------------------------------------------------


def train(observed: bool) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3)
    ).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    values = []
    seen = heldin.observe(model)
    if observed:
        seen.__enter__()
    for _ in range(20):
        x = torch.randn(5, 6, dtype=torch.float32)
        loss = F.cross_entropy(model(x), torch.randint(0, 3, (5,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values += [loss.detach(), *[p.detach().clone() for p in model.parameters()]]
    seen.close()
    return values, torch.get_rng_state()


def test_training_is_bit_identical() -> None:
    plain, observed = train(False), train(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], observed[0], strict=True))
    assert torch.equal(plain[1], observed[1])


def test_hooks_of_the_user_see_what_they_would() -> None:
    model, x = net(3, 4, 2), torch.randn(5, 3)
    calls: list[Tensor] = []
    handle = model[0].weight.register_hook(lambda g: calls.append(g.clone()) or g * 0)
    with heldin.observe(model) as seen:
        model(x).sin().sum().backward()
    assert len(calls) == 1
    assert torch.equal(model[0].weight.grad, torch.zeros(4, 3))
    handle.remove()
    agree(seen, model, model(x).sin().sum(1))


def test_backward_is_put_back() -> None:
    before = torch.autograd.backward
    with heldin.observe(net(3, 2)):
        assert torch.autograd.backward is not before
        with heldin.observe(net(3, 2)):
            pass
        assert torch.autograd.backward is not before
    assert torch.autograd.backward is before


def test_errors_in_forward_and_backward_leave_no_trace() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fail = nn.Linear(3, 2), ""

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            if self.fail == "forward":
                raise RuntimeError("on purpose")
            if self.fail == "backward":
                h.register_hook(self.broken)
            return h.sin()

        def broken(self, grad: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    model, x = Fragile(), torch.randn(4, 3)
    with heldin.observe(model) as seen:
        for fail in ("forward", "", "forward", "backward", ""):
            model.fail = fail
            seen.clear()
            if fail:
                with pytest.raises(RuntimeError, match="on purpose"):
                    model(x).sum().backward()
                assert len(seen) == 0
                assert seen.count == 0
            else:
                model(x).sum().backward()
                agree(seen, model, model(x).sum(1))
                seen.clear()


def test_two_models_and_nested_observation() -> None:
    a, b, x = net(3, 2), net(2, 2), torch.randn(5, 3)
    with heldin.observe(a) as outer, heldin.observe(b) as other, heldin.observe(a) as inner:
        b(a(x)).sin().sum().backward()
    agree(outer, a, b(a(x)).sin().sum(1))
    agree(inner, a, b(a(x)).sin().sum(1))
    agree(other, b, b(a(x)).sin().sum(1))


def test_copies_of_an_observed_model_are_not_observed() -> None:
    model, x = net(3, 2), torch.randn(5, 3)
    with heldin.observe(model) as seen:
        model(x).sum().backward()
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        read = torch.load(buffer, weights_only=False)
        for other in (twin, read):
            other(x).sum().backward()
            assert torch.equal(other(x), model(x))
    assert seen.count == 5


def test_closing_one_observation_leaves_the_others() -> None:
    a, b, x = net(3, 2), net(3, 2), torch.randn(5, 3)
    with heldin.observe(a) as first:
        other = heldin.observe(b)
        other.__enter__()
        other.pause()
        a(x).sum().backward()
        b(x).sum().backward()
        other.close()
        a(x).sum().backward()
    assert first.count == 10
    assert other.count == 0


def test_threads() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            model = net(3, 4, 2)
            with heldin.observe(model) as seen:
                for _ in range(20):
                    x = torch.randn(4 + seed, 3, generator=generator)
                    seen.clear()
                    model(x).sin().sum().backward()
                    agree(seen, model, model(x).sin().sum(1))
        except BaseException as failure:
            failures.append(failure)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


def tensors_alive() -> int:
    gc.collect()
    return sum(1 for o in gc.get_objects() if issubclass(type(o), Tensor))


def test_nothing_is_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with heldin.observe(model) as seen:
        counts = []
        for step in range(30):
            out = model(torch.randn(5 if step % 3 else 6, 3))
            out.sin().sum().backward()
            seen.clear()
            model(torch.randn(5, 3))  # never followed back
            del out
            counts.append(tensors_alive())
            model.zero_grad()
        assert len(set(counts[6:])) <= 2, counts
    reference = sys.getrefcount(model)
    del seen
    assert sys.getrefcount(model) == reference


def test_the_graph_dies_with_the_step() -> None:
    class Watched(torch.autograd.Function):
        alive = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            class Token:
                def __init__(self) -> None:
                    Watched.alive += 1

                def __del__(self) -> None:
                    Watched.alive -= 1

            ctx.token = Token()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(self.a(x))

    model = Model()
    gc.disable()
    try:
        with heldin.observe(model):
            for _ in range(5):
                model(torch.randn(4, 3)).sum().backward()
                assert Watched.alive == 0  # without the help of the garbage collector
    finally:
        gc.enable()


# --- verify ----------------------------------------------------------------------------------


def test_verify_agrees_both_ways() -> None:
    model, x, y = net(3, 4, 2), torch.randn(6, 3), torch.randn(6, 2)
    model[0].weight.grad = torch.ones(4, 3)
    alone = heldin.verify(model, lambda x, y: F.mse_loss(model(x), y), x, y)
    assert alone.ok, str(alone)
    assert alone.count == 6
    same_graph = heldin.verify(model, lambda: F.mse_loss(model(x), y))
    assert same_graph
    assert "all parameters agree" in str(same_graph)
    itself = heldin.verify(model, lambda: F.mse_loss(model(x), y).backward())
    assert itself.ok
    assert torch.equal(model[0].weight.grad, torch.ones(4, 3))


def test_verify_finds_a_wrong_rule() -> None:
    from heldin.capture.ops import OP_RULES

    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(6, 3)
    right = OP_RULES["AddmmBackward0"]
    try:

        @heldin.ops.register_op_rule("AddmmBackward0")
        def wrong(use: heldin.ops.OpUse) -> Any:
            return right(use) if use.argument == 0 else torch.zeros(use.m, *use.shape)

        found = heldin.verify(model, lambda: model(x).square().sum())
    finally:
        OP_RULES["AddmmBackward0"] = right
    assert not found.ok
    assert "WRONG" in str(found)
    assert found.errors["0.bias"] < 1e-8 < found.errors["0.weight"]


def test_verify_says_when_it_needs_the_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).square().sum()

    model, x = Model(), torch.randn(4, 3)
    with pytest.raises(heldin.HeldinError, match="pass the batch"):
        heldin.verify(model, lambda: model(x))
    assert heldin.verify(model, lambda x: model(x), x).ok


def test_a_rule_of_the_user() -> None:
    from heldin.capture.ops import OP_RULES

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.atan2(self.w, x)

    model, x = Model(), torch.randn(4, 3)
    calls = []

    @heldin.ops.register_op_rule("Atan2Backward0")
    def atan2(use: heldin.ops.OpUse) -> Any:
        calls.append(use.argument)
        w, x = use.saved("self"), use.saved("other")
        return use.per_sample_sum(use.grad * x / (w * w + x * x))

    try:
        assert heldin.verify(model, lambda: model(x).sin().sum()).ok
    finally:
        del OP_RULES["Atan2Backward0"]
    assert calls == [0]
    assert heldin.verify(model, lambda: model(x).sin().sum()).ok  # the generic path


# --- the package -----------------------------------------------------------------------------


def test_importing_heldin_imports_no_framework() -> None:
    code = (
        "import sys, heldin; heavy = {'transformers', 'lightning', 'sklearn', 'matplotlib', "
        "'pandas', 'skorch', 'ignite', 'keras', 'fastai', 'accelerate', 'ray', 'scipy', 'joblib'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_may_be_collected_while_another_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage comes when it likes: in the middle of `attach`, too."""
    forgotten, other = heldin.observe(nn.Linear(2, 1)), heldin.observe(nn.Linear(2, 1))
    forgotten.__enter__()
    plain_open = Collector.open

    def open_late(self: Collector) -> None:
        forgotten.close()
        plain_open(self)

    monkeypatch.setattr(Collector, "open", open_late)
    opening = threading.Thread(target=other.__enter__, daemon=True)
    opening.start()
    opening.join(30)
    assert not opening.is_alive()
    other.close()
    assert torch.autograd.backward.__module__ == "torch.autograd"
