"""The rows of a dataset in tensors."""

from __future__ import annotations

import random

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from heldin.loop.matching import Rows, rows_with_copies


class Noisy(Dataset[tuple[Tensor, int]]):
    """Rows with noise of a generator that the dataset keeps, and of the global one."""

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return torch.full((2,), row + self.generator.random()) + torch.rand(2), row % 2


def test_reading_all_rows_leaves_random_numbers_alone() -> None:
    drawn = []
    for reads in (False, True):
        torch.manual_seed(0)
        loader = DataLoader(Noisy(), batch_size=5, shuffle=True)
        if reads:
            rows = Rows.of(loader, torch.device("cpu"))
            assert rows.inputs[0].shape == (10, 2)
            assert rows.targets.tolist() == [0, 1] * 5
        drawn.append([inputs for inputs, _ in loader])
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_copies_are_counted_unless_they_are_equal_by_chance() -> None:
    x, y = torch.arange(100.0).reshape(50, 2), torch.zeros(50)
    assert rows_with_copies(Rows((x,), y)) == 0
    assert rows_with_copies(Rows((x.repeat(2, 1),), y.repeat(2))) == 100
    few = torch.randint(3, (50, 2), generator=torch.Generator().manual_seed(0))
    assert rows_with_copies(Rows((few,), y)) == 0
