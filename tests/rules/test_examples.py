"""Small parts of the rules, each with an example."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import heldin
from heldin.rules import Auto, Evidence, policy
from heldin.rules.auto import follow
from heldin.rules.callback_hints import PlainLoopOnly
from heldin.rules.displacements import directions, solve, unit_gradient_step
from heldin.rules.evidence import Decision
from heldin.rules.inputs import RunInputs
from heldin.rules.jacobians import jacobians_by_capture, jacobians_by_vmap
from heldin.rules.options import resolve
from heldin.rules.reporting import RunFacts
from heldin.rules.schedules import fixed_schedule
from tests.support import runs


def test_evidence_of_moments_that_were_computed_elsewhere() -> None:
    model = nn.Linear(1, 1, bias=False)
    moments = heldin.Moments(torch.ones(1, 1), torch.full((1, 1), 9.0), 2)
    with runs.EvidenceStopping(model, arming=None, estimator="exact") as stopping:
        assert stopping.take({"weight": moments})


def test_evidence_stops_a_loop() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 30)
    y = x[:, :1] + torch.randn(20, 1)
    model = nn.Linear(30, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    with runs.EvidenceStopping(model) as stopping:
        for _ in range(1000):
            nn.functional.mse_loss(model(x), y).backward()
            if stopping.step():
                break
            optimizer.step()
            optimizer.zero_grad()
    assert stopping.stopped_step is not None
    assert stopping.stopped_step < 100


def test_a_decision_needs_so_many_checks() -> None:
    decision = Decision(Evidence(smoothing=0.0, arm_threshold=None, checks=2))
    assert decision.add(1, -0.5) == (False, "criterion -0.5, not above 0")
    assert decision.add(2, 0.1) == (False, "criterion 0.1 > 0, check 1 of 2")
    assert decision.add(3, 0.2) == (True, "criterion 0.2 > 0, check 2 of 2")


def test_a_validation_loss_that_no_longer_falls() -> None:
    stopping = runs.ValidationStopping(nn.Linear(2, 1), patience=2)
    assert [stopping.step(loss) for loss in (3.0, 1.0, 1.5, 1.2)] == [False, False, False, True]
    assert (stopping.best_step, stopping.stopped_step) == (2, 4)
    assert stopping.reason == "step 4: loss 1.2, no better than 1 at step 2 for 2 checks"


def test_steps_lie_in_epochs() -> None:
    facts = RunFacts(epoch_ends=[10, 20])
    assert [facts.epoch(step) for step in (0, 10, 11, 45)] == [0, 1, 2, 5]
    assert facts.place(15) == "epoch 2 (step 15)"
    by_length = RunFacts(epoch_steps=2.5)
    assert [by_length.epoch(step) for step in (0, 1, 3, 5, 6)] == [0, 1, 2, 2, 3]
    assert RunFacts().epoch(5) is None


def test_nothing_pulls_a_single_sample_back() -> None:
    one = torch.ones(1, dtype=torch.float64)
    gram, shift = 2 * one.view(1, 1, 1, 1), 0 * one.view(1, 1, 1)
    shift, _ = solve(gram, shift, one.view(1, 1), one.view(1, 1, 1), source=1.0, share=1.0)
    assert shift.item() == pytest.approx(2.0)


def test_a_single_direction_is_that_of_the_slope() -> None:
    found = directions(torch.tensor([[3.0, 4.0]]), lambda v: v, 1)
    torch.testing.assert_close(found, torch.tensor([[[0.6, 0.8]]]))


def test_derivatives_of_a_linear_model_are_its_inputs() -> None:
    model, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    along = torch.ones(2, 1, 1)
    for way in (jacobians_by_vmap, jacobians_by_capture):
        found = way(model, ["weight", "bias"], [x], along)
        assert found["weight"].tolist() == [[[[1.0, 2.0]]], [[[3.0, 4.0]]]]
        assert found["bias"].tolist() == [[[1.0]], [[1.0]]]


def test_momentum_carries_a_constant_gradient_further() -> None:
    velocity = far = 0.0
    for _ in range(200):
        settings = {"lr": 0.1, "momentum": 0.9}
        velocity, far = unit_gradient_step(torch.optim.SGD, settings, velocity)
    assert far == pytest.approx(0.1 / (1 - 0.9))


def test_the_class_to_use_in_a_framework_is_named() -> None:
    class Rule(PlainLoopOnly):
        _callbacks = {"lightning": "heldin.lightning.EarlyStopping"}  # noqa: RUF012

    with pytest.raises(heldin.HeldinError, match=r"no callback: use heldin\.lightning\.Early"):
        _ = Rule().state_key
    assert not hasattr(Rule(), "state_key")


def test_the_choice_for_fifty_rows() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(50, 3), torch.randn(50, 1)
    made = follow(RunInputs(model, optimizer, nn.MSELoss(), data), Auto())
    expected = "50 rows and 4 parameters: five folds, for about 2.8 times the time of a run of "
    assert made.reason_chosen.startswith(expected)
    made.close()


def test_a_scheduler_with_a_fixed_end_is_found() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert fixed_schedule(optimizer) is None
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    assert fixed_schedule(optimizer) == "CosineAnnealingLR(T_max=50)"
    del scheduler


def test_rules_by_name() -> None:
    assert resolve("auto", budget=2) == Auto(budget=2)
    with pytest.raises(heldin.HeldinError, match="no rule 'fold'; did you mean 'folds'"):
        resolve("fold")


def test_patience_counts_from_the_first_check_that_is_as_good_as_the_best() -> None:
    assert heldin.Patience.of_epochs(5, epoch_steps=8).slack == 40
    rows = torch.tensor([[9.0], [1.0], [4.0], [2.0]])
    fall = torch.tensor([0.5, 0.1, 0.0]) * torch.tensor([[1.0], [1.2], [0.9], [-1.5]])
    assert heldin.Patience(1.5, 100, 3, improvement=1.0).reference(2, rows + fall) == 0
    assert heldin.Patience(1.5, 100, 3).reference(2, rows + fall) == 2


def test_a_rise_of_every_row_is_beyond_doubt() -> None:
    rows = torch.tensor([[9.0], [1.0], [4.0]])  # they differ more than the checks do
    rise = torch.tensor([[0.0, 0.5, 0.6], [0.0, 0.4, 0.6], [0.0, 0.5, 0.7]])
    assert policy.worse_beyond_doubt(rows + rise, errors=2.0)
    assert not policy.worse_beyond_doubt(rows - rise, errors=2.0)


def test_checks_that_are_chosen_and_given_up() -> None:
    assert policy.best_check(torch.tensor([3.0, torch.nan, 1.0, 1.0])) == 2
    assert policy.densest_check({0: 0, 1: 10, 2: 11, 3: 12, 4: 13, 5: 100}, best=2) == 3
    shares = policy.bootstrap_shares(torch.tensor([[3.0, 1.0, 2.0]] * 4))
    assert shares.tolist() == [0.0, 1.0, 0.0]
    assert policy.lag([0, 9, 19, 39], [(4.0, 4.0), (3.9, 3.0), (3.5, 2.0), (3.0, 1.0)]) == 4.0
