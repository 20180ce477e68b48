"""Folds as pairs of rows to train on and to test, and `fit` with a call after every epoch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import heldin
from tests.support.reading import step_of


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
    return torch.nn.Sequential(*layers).double()


def run(
    folds: Any,
    max_epochs: int = 6,
    batch_size: int = 8,
    fit: Any = None,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> heldin.EarlyStopping:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    y = x[:, :1] + torch.randn(24, 1, generator=generator, dtype=torch.float64)
    model = model or network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rule = heldin.rules.Folds(folds=folds)
    stopping = heldin.EarlyStopping(
        model, optimizer, torch.nn.MSELoss(), (x, y), rule, **{"patience": None, **options}
    )
    generator = torch.Generator().manual_seed(1)
    return stopping.fit(batch_size, max_epochs, generator=generator, **(fit or {}))


def test_pairs_are_fold_numbers() -> None:
    labels = torch.arange(24) % 4
    pairs = [((labels != k).nonzero()[:, 0], (labels == k).nonzero()[:, 0]) for k in range(4)]
    by_pairs, by_labels = run(pairs), run(labels)
    assert by_pairs.history.columns() == by_labels.history.columns()
    assert torch.equal(by_pairs.out_of_fold.outputs, by_labels.out_of_fold.outputs)


def test_pairs_are_blocks_in_time() -> None:
    rows = torch.arange(24)
    in_time = run(4, time=rows)
    pairs = [
        (rows[: 24 - 4 * (4 - k)], rows[24 - 4 * (4 - k) : 24 - 4 * (3 - k)]) for k in range(4)
    ]
    assert run(pairs).history.columns() == in_time.history.columns()


def test_groups_beside_fold_numbers_widen_the_interval() -> None:
    labels, groups = torch.arange(24) // 6, torch.arange(24) // 3
    alone, grouped = run(labels), run(labels, groups=groups)
    assert alone.history.columns() == grouped.history.columns()
    assert alone.estimates["loss"].high != grouped.estimates["loss"].high
    with pytest.raises(heldin.HeldinError, match="tears groups apart: the group of row 4"):
        run(labels, groups=torch.arange(24) // 4)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([([0, 1], [2]), ([0, 2], [2])], "row 2 is tested by two splits"),
        ([([0, 1], [1]), ([0, 2], [3])], "split 0 must train on some rows and test others"),
        ([([0, 1], [])], "split 0 must train on some rows and test others, got 2 to train"),
    ],
)
def test_wrong_pairs_are_refused(pairs: Any, message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        run(pairs)


def test_fit_calls_after_every_epoch_with_the_weights_of_that_moment() -> None:
    model, steps, weights = network(), [], []

    def note(stopping: heldin.EarlyStopping) -> None:
        steps.append(step_of(stopping))
        weights.append(model.get_parameter("0.weight").detach().clone())

    run(torch.arange(24) % 3, 4, fit={"on_epoch": note}, model=model)
    assert steps == [3, 6, 9, 12]
    assert all(not torch.equal(a, b) for a, b in pairwise(weights))
    ordered = [run(torch.arange(24) % 3, fit={"shuffle": False}) for _ in range(2)]
    assert ordered[0].history.columns() == ordered[1].history.columns()
    assert ordered[0].history.columns() != run(torch.arange(24) % 3).history.columns()
