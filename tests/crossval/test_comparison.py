"""Two runs compared, several in a table, out-of-fold outputs, committees."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heldin.crossval import (
    Committee,
    Comparison,
    Difference,
    OutOfFold,
    RunRecord,
    compare,
    mean_interval,
    resolve_metrics,
    statistic_interval,
    table,
)
from heldin.crossval.intervals import resampled_rows, row_groups
from heldin.errors import HeldinError

ROWS = torch.arange(60)


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    return float((outputs == targets).double().mean())


def spread(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.double().std())


METRICS = resolve_metrics([accuracy, spread])


def run(shift: float = 0.0, wrong: int = 10, seed: int = 0, **changes: Any) -> RunRecord:
    """A run whose first rows are wrong."""
    generator = torch.Generator().manual_seed(0)
    losses = torch.randn(60, generator=generator, dtype=torch.float64).exp()
    noise = torch.Generator().manual_seed(seed)
    losses = losses + shift + 0.1 * torch.randn(60, generator=noise, dtype=torch.float64)
    targets = ROWS % 3
    outputs = torch.where(wrong > ROWS, (targets + 1) % 3, targets)
    fields: dict[str, Any] = {
        "row_losses": losses,
        "outputs": outputs,
        "targets": targets,
        "rows": ROWS,
        "folds": ROWS % 5,
        "metrics": METRICS,
    }
    return RunRecord(**{**fields, **changes})


def test_paired_differences() -> None:
    a, b = run(0.0, wrong=10, seed=1), run(0.2, wrong=20, seed=2)
    comparison = compare(a, b)
    gaps = a.row_losses - b.row_losses
    assert list(comparison) == ["loss", "accuracy", "spread"]
    assert comparison.difference == pytest.approx(float(gaps.mean()))
    assert comparison.standard_error == pytest.approx(float(gaps.std()) / math.sqrt(60), rel=0.1)
    unpaired = float(a.row_losses.std()) / math.sqrt(60)
    assert comparison.standard_error < unpaired / 5
    assert comparison.probability == 1.0
    better = comparison["accuracy"]
    assert (better.a, better.b) == pytest.approx((50 / 60, 40 / 60))
    assert better.difference == pytest.approx(10 / 60)
    assert better.standard_error == pytest.approx(math.sqrt(10 / 60 * 50 / 60 / 60), rel=0.1)
    assert better.probability > 0.99
    assert math.isnan(comparison["spread"].probability)  # whether more is better is unknown
    assert comparison["spread"].standard_error > 0


def test_resampling_by_hand() -> None:
    a, b = run(0.0, seed=1), run(0.01, seed=2)
    comparison = compare(a, b, resamplings=200, seed=7)
    draws = list(resampled_rows(row_groups(None, 60), 200, 7))
    gaps = torch.stack([(a.row_losses - b.row_losses)[rows].mean() for rows in draws])
    assert comparison.standard_error == pytest.approx(float(gaps.std()))
    assert comparison.probability == pytest.approx(float((gaps < 0).double().mean()))
    assert 0 < comparison.probability < 1


def test_the_other_way_round() -> None:
    a, b = run(0.0, 10, seed=1), run(0.01, 12, seed=2)
    first, second = compare(a, b), compare(b, a)
    for name in ("loss", "accuracy"):
        assert first[name].difference == pytest.approx(-second[name].difference)
        assert first[name].standard_error == pytest.approx(second[name].standard_error)
        assert first[name].probability == pytest.approx(1 - second[name].probability)


def test_a_run_and_itself() -> None:
    comparison = compare(run(), run())
    assert (comparison.difference, comparison.standard_error) == (0, 0)
    assert comparison.probability == 0.5
    assert comparison["accuracy"].probability == 0.5
    assert repr(comparison).startswith("<heldin.Comparison: no clear difference between a and b")


def test_groups_are_drawn_jointly() -> None:
    rows = torch.arange(60)
    gaps = (rows // 6 % 2).double()  # the same in each group of six
    single = compare(run(), run(row_losses=run().row_losses + gaps))
    groups = [f"patient {i // 6}" for i in range(60)]
    grouped = compare(run(groups=groups), run(row_losses=run().row_losses + gaps, groups=groups))
    assert grouped.difference == single.difference
    assert grouped.standard_error > 2 * single.standard_error


def test_one_sentence() -> None:
    text = repr(compare(run(0.0, 10, 1), run(0.2, 20, 2), names=("small", "large")))
    assert text.startswith("<heldin.Comparison: small is better than large on 60 rows: loss ")
    assert "accuracy 0.8333 against 0.6667, difference 0.17 +- " in text
    assert text.count("better in") == 2  # not for the metric of unknown mode
    assert "\n" not in text
    assert "a is worse than b" in repr(compare(run(0.2, seed=2), run(0.0, seed=1)))


@pytest.mark.parametrize(("share", "percent"), [(0.999, 99), (1.0, 100), (0.001, 1), (0.0, 0)])
def test_certain_only_if_always(share: float, percent: int) -> None:
    text = str(Difference("loss", 0.5, 0.6, -0.1, 0.01, share))
    assert text.endswith(f"better in {percent} % of the resamplings")


def test_objects_with_a_record() -> None:
    stopping = SimpleNamespace(record=lambda: run())
    assert isinstance(compare(stopping, run()), Comparison)
    assert len(compare(stopping, run())) == 3


def test_a_metric_that_one_run_lacks() -> None:
    assert list(compare(run(), run(metrics={}, outputs=None, targets=None))) == ["loss"]


def test_losses_that_are_not_finite() -> None:
    losses = run().row_losses.clone()
    losses[3] = torch.inf
    comparison = compare(run(), run(row_losses=losses))
    assert comparison.difference == -math.inf
    assert math.isnan(comparison.standard_error)
    assert math.isnan(comparison.probability)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rows": ROWS + 1}, "different rows \\(60 and 60\\)"),
        ({"folds": ROWS % 4}, "different folds"),
        ({"groups": ROWS // 2}, "different groups"),
        ({"targets": (ROWS + 1) % 3}, "different targets"),
    ],
)
def test_refused_where_rows_differ(other: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        compare(run(), run(**other))


def test_folds_with_other_numbers_are_the_same_folds() -> None:
    assert compare(run(), run(folds=4 - ROWS % 5)).difference == 0


def test_what_is_no_run() -> None:
    with pytest.raises(HeldinError, match="3 has no record of its rows"):
        compare(run(), 3)  # type: ignore[arg-type]
    with pytest.raises(HeldinError, match="resamplings must be a whole number >= 2"):
        compare(run(), run(), resamplings=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"row_losses": torch.ones(3)}, "row_losses has 3 entries for 60 rows"),
        ({"outputs": torch.ones(3)}, "outputs has 3 entries"),
        ({"targets": torch.ones(3)}, "targets has 3 entries"),
        ({"groups": [1]}, "groups has 1 entries"),
        ({"outputs": None}, "metrics are computed from outputs and targets"),
        ({"rows": ROWS.flip(0)}, "ascending"),
    ],
)
def test_mistakes_in_a_record(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        run(**fields)


def test_side_by_side() -> None:
    runs = {"small": run(), "a large one": run(1.0, metrics={"accuracy": METRICS["accuracy"]})}
    lines = table(runs).splitlines()
    assert lines[0].split() == ["run", "rows", "loss", "accuracy", "spread"]
    loss = mean_interval(runs["small"].row_losses)
    score = statistic_interval(accuracy, runs["small"].outputs, runs["small"].targets)  # type: ignore[arg-type]
    assert lines[1].startswith(f"small          60  {loss}  {score}  ")
    assert lines[2].startswith("a large one    60  ")
    assert len(lines) == 3
    with pytest.raises(HeldinError, match="at least one run"):
        table({})


# -- out-of-fold outputs


def out_of_fold(**changes: Any) -> OutOfFold:
    fields: dict[str, Any] = {
        "outputs": torch.rand(4, 3),
        "rows": torch.tensor([0, 2, 5, 9]),
        "folds": torch.tensor([1, 1, 1, 1]),
        "targets": torch.tensor([0, 1, 2, 0]),
    }
    return OutOfFold(**{**fields, **changes})


def test_out_of_fold() -> None:
    one = out_of_fold()
    assert repr(one) == "<heldin.OutOfFold: 4 rows in 1 fold, outputs (4, 3), targets (4,)>"
    assert len(one) == 4
    with pytest.raises(AttributeError):
        one.rows = torch.ones(4)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"outputs": torch.rand(3, 3)}, "outputs has 3 entries for 4 rows"),
        ({"targets": torch.tensor(1)}, "targets must be a tensor with one entry"),
        ({"targets": [0, 1, 2, 0]}, "targets must be a tensor"),
        ({"folds": torch.tensor([1])}, "folds has 1 entries for 4 rows"),
        ({"folds": torch.rand(4)}, "folds must be a tensor of shape \\(m,\\) of whole numbers"),
        ({"rows": torch.tensor([0, 2, 2, 9])}, "each row once"),
        ({"rows": torch.tensor([-1, 2, 5, 9])}, "ascending numbers >= 0"),
        ({"rows": torch.tensor([True, False, True, True])}, "use mask.nonzero"),
        ({"rows": torch.zeros(2, 2).long()}, "shape \\(m,\\)"),
    ],
)
def test_mistakes_in_out_of_fold(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError, match=message):
        out_of_fold(**fields)


# -- committees


def members(outputs: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, outputs).double() for _ in range(3)]


X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_averages() -> None:
    values = torch.stack([model(X) for model in members(2)])
    assert torch.allclose(Committee(members(2))(X), values.mean(0))
    softmax = Committee(members(2), "softmax")(X)
    assert torch.allclose(softmax.exp(), values.softmax(-1).mean(0))
    sigmoid = Committee(members(2), "sigmoid")(X)
    assert torch.allclose(sigmoid.sigmoid(), values.sigmoid().mean(0))


def test_a_committee_of_one_is_its_member() -> None:
    (model, *_) = members(2)
    for average in ("outputs", "sigmoid"):
        assert torch.allclose(Committee([model], average)(X), model(X))
    assert torch.allclose(Committee([model], "softmax")(X), model(X).log_softmax(-1))


def test_large_logits_stay_finite() -> None:
    models = [nn.Identity(), nn.Identity()]
    large = torch.tensor([[800.0, -800.0]])
    for average in ("softmax", "sigmoid"):
        assert Committee(models, average)(large).isfinite().all()


def test_classes_in_another_dimension() -> None:
    images = torch.randn(2, 3, 4, 4)
    first = Committee([nn.Identity(), nn.Hardtanh()], "softmax", dim=1)(images)
    last = Committee([nn.Identity(), nn.Hardtanh()], "softmax")(images.movedim(1, -1))
    assert torch.allclose(first.movedim(1, -1), last)
    assert torch.allclose(first.exp().sum(1), torch.ones(2, 4, 4))


class Named(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, pixels: Tensor) -> Any:
        return SimpleNamespace(logits=self.model(pixels))


def test_keywords_and_logits() -> None:
    committee = Committee([Named(model) for model in members(2)], "softmax")
    assert torch.allclose(committee(pixels=X), Committee(members(2), "softmax")(X))


def test_a_committee_is_a_module() -> None:
    committee = Committee(members(2), "softmax")
    assert sum(p.numel() for p in committee.parameters()) == 3 * 10
    assert not committee.eval().members[0].training
    assert "average='softmax'" in repr(committee)
    committee(X).sum().backward()
    assert all(p.grad is not None for p in committee.parameters())


def test_mistakes_in_committees() -> None:
    with pytest.raises(HeldinError, match="models is empty"):
        Committee([])
    with pytest.raises(HeldinError, match="'outputs', 'softmax', 'sigmoid', got 'mean'"):
        Committee(members(2), "mean")
    with pytest.raises(HeldinError, match='use "sigmoid"'):
        Committee(members(1), "softmax")(X)
    with pytest.raises(HeldinError, match="members must return a tensor"):
        Committee([nn.LSTM(4, 2).double()])(X)
