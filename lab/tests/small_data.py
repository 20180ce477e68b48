"""Tiny datasets in the formats of MNIST and SECTOR, and settings to match."""

from __future__ import annotations

import bz2
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin_lab.reproduce import EXPERIMENTS
from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce.run import Run

NET = {
    "seeds": 1,
    "steps": 24,
    "every": 4,
    "widths": (784, 12, 10),
    "training": 64,
    "validation": 24,
    "test": 40,
    "piece": 30,
}
TINY = {
    "sketch": {"steps": 41, "population": 2000, "seeds": 2},
    "toy": {"steps": 60, "test": 200, "seeds": 2},
    "quadratic": {"steps": 30, "dimension": 20, "rate": 0.1, "seeds": 2},
    "counterexample": {"steps": 30, "dimension": 20, "rate": 0.1, "seeds": 2},
    "sketch2d": {"steps": 120},
    "wdbc": {"steps": 60, "every": 10, "seeds": 2},
    "mnist-gd": NET,
    "mnist-sgd": {**NET, "batch": 16, "rates": (0.03, 0.1)},
    "sector": {
        "seeds": 1, "steps": 20, "every": 5, "features": 30, "training": 60, "test": 30,
        "hidden": 6, "batch": 20,
    },
    "greedy": {**NET, "batch": 16, "rates": (0.05, 0.1), "smoothing": 0.8, "shown": 30},
    "rmsprop": {**NET, "batch": 16, "smoothing": 0.8, "shown": 30},
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with 200 "digits" and 60 + 30 sparse rows."""
    folder = tmp_path / "data"
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 10
    images = torch.zeros(200, 28, 28)
    for image, label in zip(images, labels.tolist(), strict=True):  # a bar for each digit
        image[2 * label + 2 : 2 * label + 5, 4:24] = 200.0
    images += 40 * torch.rand(200, 28, 28, generator=generator)
    images[:, 0] = 0.0  # pixels that are constant
    contents = {
        "train-images-idx3-ubyte.gz": bytes(16) + images.byte().numpy().tobytes(),
        "train-labels-idx1-ubyte.gz": bytes(8) + labels.byte().numpy().tobytes(),
    }
    (folder / "mnist").mkdir(parents=True)
    for name, raw in contents.items():
        (folder / "mnist" / name).write_bytes(gzip.compress(raw))
    (folder / "sector").mkdir()
    for name, rows in (("sector.test.bz2", 60), ("sector.heldout.bz2", 30)):
        lines = []
        for row in range(rows):
            words = torch.randperm(200, generator=generator)[:12].sort().values + 1
            lines.append(f"{row % 105 + 1} " + " ".join(f"{word}:0.3" for word in words.tolist()))
        text = "\n".join(lines) + "\n"
        (folder / "sector" / name).write_bytes(bz2.compress(text.encode()))
    files = tuple(_data.File(name) for name in contents)
    monkeypatch.setitem(_data.DATASETS, "mnist", _data.Dataset(files, ()))
    part = tuple(_data.File(file.name) for file in _data.SECTOR_PART)
    monkeypatch.setattr(_data, "SECTOR_PART", part)
    return folder


def settings_of(name: str) -> Any:
    """The tiny settings of an experiment."""
    return replace(EXPERIMENTS[name].settings["quick"], **TINY[name])


def rows_of(name: str, part: dict[str, Any], **options: Any) -> list[dict[str, float]]:
    """What a tiny run of the first seed notes."""
    run = Run(0, settings_of(name), part, **options)
    EXPERIMENTS[name].run(run, **part)
    return run.rows


def same(first: list[dict[str, float]], second: list[dict[str, float]]) -> bool:
    """Equal to the last bit, nan being itself."""
    return json.dumps(first) == json.dumps(second)


def numbers(table: Any) -> Any:
    """A run's table without the columns that tell when it was made and how long it took."""
    return table.drop(columns=["seconds", "cpu_seconds", "date"])
