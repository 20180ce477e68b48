"""Loaders are followed: which rows a batch has."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from heldin.loop.loaders import LoaderRecorder

ROWS = 24


def rows() -> TensorDataset:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :1] + 1)


def test_loaders_over_the_same_rows_are_followed_together() -> None:
    first: Any = DataLoader(rows(), batch_size=4)
    second: Any = DataLoader(rows(), batch_size=4, sampler=range(8, ROWS))
    recorder = LoaderRecorder(first)
    recorder.follow(second)
    recorder.follow(second)
    assert recorder.find(next(iter(first))).rows.tolist() == [0, 1, 2, 3]
    assert recorder.find(next(iter(second))).rows.tolist() == [8, 9, 10, 11]
    recorder.close()
    assert "_get_iterator" not in vars(first)
    assert "_get_iterator" not in vars(second)
