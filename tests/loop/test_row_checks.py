"""Rows that are not independent observations, and rows that only look so."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import heldin
from heldin.loop.row_checks import check_rows
from heldin.loop.rows import RowSource

IMAGES = torch.rand(120, 6, 6, generator=torch.Generator().manual_seed(0))


class Drawn(Dataset[Any]):
    """Rows that a function makes of their numbers."""

    def __init__(self, row: Callable[[int], Any]) -> None:
        self.row = row

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, number: int) -> Any:
        return self.row(number)


def any_image() -> torch.Tensor:
    return IMAGES[random.randrange(len(IMAGES))]


def two_images(number: int) -> Any:
    return any_image(), any_image(), torch.tensor(float(number % 2))  # the target is the same


def partner(number: int) -> Any:
    return {"x": IMAGES[number], "partner": any_image(), "y": number % 2}


def partner_in_arrays(number: int) -> Any:
    return IMAGES[number].numpy(), any_image().numpy(), np.int64(number % 2)


def flipped(number: int) -> Any:
    return IMAGES[number].flip(0) if random.random() < 0.5 else IMAGES[number], number % 2


def cropped(number: int) -> Any:
    """Segmentation: the target has the shape of the image."""
    start = random.randrange(3)
    image = IMAGES[number, start : start + 4]
    return image, (image > 0.5).float()


def cropped_twice(number: int) -> Any:
    return [dict(zip(("img", "seg"), cropped(number), strict=True)) for _ in range(2)]


def masked(number: int) -> Any:
    return IMAGES[number] * (torch.rand(6, 6) < 0.8), torch.rand(6, 6) < 0.8, number % 2


def with_a_template(number: int) -> Any:
    template = torch.arange(20) * random.randrange(1, 5)
    return IMAGES[number], template, number % 2


def check(row: Callable[[int], Any], grouped: bool = False) -> None:
    check_rows("rule", RowSource(Drawn(row), seed=0), grouped)


@pytest.mark.parametrize("row", [two_images, partner, partner_in_arrays])
def test_rows_that_show_other_rows_are_warned_of(row: Callable[[int], Any]) -> None:
    with pytest.warns(heldin.HeldinWarning, match="contain inputs of other rows"):
        check(row)


@pytest.mark.parametrize("row", [flipped, cropped, cropped_twice, masked, with_a_template])
def test_augmentation_is_no_such_case(row: Callable[[int], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(row)


def test_groups_may_draw_from_themselves() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(two_images, grouped=True)


@pytest.mark.parametrize("engine", ["dense", "replay"])
def test_windows_are_warned_of_whatever_the_engine(engine: Any) -> None:
    series = torch.randn(80, generator=torch.Generator().manual_seed(0))
    rows = [(series[i : i + 12], series[i + 12 : i + 13]) for i in range(60)]
    model = torch.nn.Sequential(torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader: Any = DataLoader(rows, batch_size=20)  # type: ignore[arg-type]
    rule = heldin.rules.Folds(engine=engine)
    with pytest.warns(heldin.HeldinWarning, match="neighbouring rows overlap"):
        heldin.EarlyStopping(model, optimizer, torch.nn.MSELoss(), loader, rule=rule)
