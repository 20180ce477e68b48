"""What observing promises beyond the list of cases."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import heldin
from tests.support.observe_runs import agree, net
from tests.support.truth import error, truth


@pytest.fixture(autouse=True)
def double_precision() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


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
    spread = heldin.evidence(seen, parameter_groups="all")
    assert spread.groups == {}
    assert spread.criterion != spread.criterion


def test_batch_norm_in_training_mode_is_reported_once_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    with heldin.observe(model) as seen:
        with pytest.warns(heldin.errors.MixedSamplesWarning, match="module '1'"):
            model(torch.randn(6, 3)).sin().sum().backward()
        model(torch.randn(6, 3)).sin().sum().backward()  # no second warning
    assert seen.count == 12
    assert torch.isfinite(seen["0.weight"].squares).all()
    total = seen["0.weight"].total
    assert torch.allclose(total, model[0].weight.grad)  # type: ignore[arg-type]


def test_samples_that_are_mixed_in_many_places_are_reported_once_per_cause() -> None:
    class Standardise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(0)) / x.std(0)

    norms = [layer for _ in range(20) for layer in (nn.Linear(3, 3), nn.BatchNorm1d(3))]
    model = nn.Sequential(*norms, Standardise(), nn.Linear(3, 3), Standardise())
    with heldin.observe(model), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for size in (6, 6, 5):  # of another size it is followed again
            model(torch.randn(size, 3)).sin().sum().backward()
    messages = [str(each.message) for each in said]
    assert len(messages) == 2
    assert "in module '1'" in messages[0]
    assert "(training mode, as in 19 other places)" in messages[0]
    assert "in module '40'" in messages[1]
    assert "statistics of the batch" in messages[1]


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
