"""Mistakes that are easily made with `heldin.EarlyStopping`, and what it says."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heldin

X, Y = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2


def made(**changes: Any) -> heldin.EarlyStopping:
    model = nn.Linear(5, 2)
    given: dict[str, Any] = {
        "rule": "auto",
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "data": (X, Y),
    }
    return heldin.EarlyStopping(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": nn.Linear(2, 1)}, "there is no rule Linear"),
        ({"rule": "fold"}, "there is no rule 'fold'; did you mean 'folds'"),
        ({"model": torch.optim.SGD(nn.Linear(2, 1).parameters())}, "model must be.*got a SGD"),
        ({"optimizer": nn.Linear(2, 1)}, r"optimizer must be a torch\.optim\.Optimizer, got a Lin"),
        ({"data": None}, "data is missing"),
        ({"budget": "4"}, "budget must be a number above 0, got '4'"),
        ({"budget": 0}, "budget must be a number above 0, got 0"),
        ({"stratify": True}, "stratify must be a list or tensor that names one for each"),
        ({"groups": "patient"}, "groups must be a list or tensor that names one for each"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_says_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(heldin.HeldinError, match=message):
        made(**changes)


def test_arrays_are_no_tensors() -> None:
    pytest.importorskip("numpy")
    with pytest.raises(heldin.HeldinError, match="expected tensors, got arrays"):
        made(data=(X.numpy(), Y.numpy()))


@pytest.mark.parametrize("kind", ["tensors", "dataset", "loader"])
def test_copies_of_rows_are_said_aloud(kind: str) -> None:
    x, y = X.repeat(2, 1), Y.repeat(2)
    data: Any = (x, y)
    if kind != "tensors":
        data = TensorDataset(x, y)
    if kind == "loader":
        data = DataLoader(data, batch_size=10)
    with pytest.warns(heldin.HeldinWarning, match="120 of the 120 rows of data have an exact copy"):
        made(data=data).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(data=data, groups=torch.arange(120) % 60).close()


def test_rows_that_are_equal_by_chance_are_not() -> None:
    """Four questions with three answers; and one copy among many rows."""
    answers = torch.randint(3, (60, 4), generator=torch.Generator().manual_seed(0)).float()
    model = nn.Linear(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data=(answers, Y),
        ).close()
        made(data=(torch.cat([X, X[:1]]), torch.cat([Y, Y[:1]]))).close()


def test_a_page_without_a_step_says_so() -> None:
    stopping = made()
    stopping.close()
    assert [text for text, _ in stopping.following._advice()] == [
        "No step was taken yet: call step() after each optimizer.step()."
    ]


def test_other_rows_in_between_are_named_as_a_cause() -> None:
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stopping = made(model=model, optimizer=optimizer)
    model(X + 1)  # nobody asks for gradients of it
    loss = nn.CrossEntropyLoss()(model(X[:10]), Y[:10])
    loss.backward()
    optimizer.step()
    loss = nn.CrossEntropyLoss()(model(X[:10]), Y[:10]) + model(X + 1).square().mean()
    loss.backward()
    with pytest.raises(heldin.HeldinError, match=re.escape("under torch.no_grad()")):
        optimizer.step()
    stopping.close()
