"""Folds as pairs of rows to train on and to test, and `fit` with a call after every epoch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

import heldin
from heldin.shadows import labels as of
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


def test_folds_keep_groups_and_classes() -> None:
    assert of.fold_labels(6, 3, seed=0).bincount().tolist() == [2, 2, 2]
    groups = torch.tensor([7, 7, 7, 7, 1, 2])
    assert of.fold_labels(6, 2, seed=0, groups=groups).tolist() == [0, 0, 0, 0, 1, 1]
    classes = torch.tensor([0, 0, 0, 0, 1, 1])
    assert of.fold_labels(6, 2, seed=0, stratify=classes)[4:].sort().values.tolist() == [0, 1]


def test_labels_in_time() -> None:
    times = torch.tensor([8, 5, 1, 2, 3, 5, 9])
    assert of.time_labels("rule", times, 3, 3).tolist() == [1, 0, -1, -1, -1, 0, 2]
    assert of.time_labels("rule", times, 3, 2).tolist() == [0, -1, -1, -1, -1, -1, 1]
    assert of.stretches(torch.tensor([5, 0, 1, 2, 2, 4, 6, 3])).tolist() == [3, 0, 0, 1, 1, 2, 3, 2]
    labels = torch.tensor([-1, 0, 1, 2])
    assert of.visible(labels, 1, in_time=False).tolist() == [True, True, False, True]
    assert of.visible(labels, 1, in_time=True).tolist() == [True, True, False, False]


def test_labels_of_pairs_and_of_some_folds() -> None:
    labels, sees = of.split_labels("rule", [([0, 1], [2]), ([0, 1, 2], [3])], 4)
    assert labels.tolist() == [-1, -1, 0, 1]
    assert sees.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    assert of.keep_first_folds(torch.tensor([0, 1, 2, 1]), 2).tolist() == [0, 1, -1, 1]
    rows = of.subsample_held_out(torch.tensor([0, 1, 0, -1, 1, 0, 0]), 4)
    assert [each.tolist() for each in rows] == [[0, 5], [1]]
    numbers: Any = of.numbered("rule", "time", [20, 7, 20], 3, in_order=True)
    assert numbers.tolist() == [1, 0, 1]
