"""Out-of-fold outputs: what they hold, and mistakes in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from heldin.crossval import (
    OutOfFold,
)
from heldin.errors import HeldinError


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
