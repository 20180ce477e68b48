"""Tables, and the small problems that are cut from them."""

from __future__ import annotations

import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heldin.errors import HeldinError
from heldin_lab.rules import LossFunction

from .spec import Spec, network

__all__ = ["LEAST_TEST", "Problem", "Role", "Table", "other_classes", "role", "tables"]

Role = Literal["development", "confirmation", "all"]
LEAST_TEST, MOST_TEST = 100, 2000  # rows of a test set
MOST_PRODUCTS = 500  # features of degree two
CLIP = 5.0  # standard deviations of an input


def role(name: str) -> str:
    """Whether a dataset is for choosing constants or for reporting, by its name alone.

    >>> role("sk_diabetes"), role("sk_wdbc")
    ('development', 'confirmation')
    """
    first = hashlib.sha256(name.encode()).digest()[0]
    return "confirmation" if first % 5 >= 2 else "development"


@dataclass(frozen=True, eq=False)
class Table:
    """A dataset: where it is, and its size."""

    name: str
    rows: int
    path: Path | None  # None: scikit-learn's

    def load(self) -> tuple[Any, Any, bool]:
        """(rows, features), (rows,), and whether the targets are classes."""
        if self.path is None:
            x, y, classes = _bundled(self.name)
        else:
            with np.load(self.path, allow_pickle=False) as file:
                x, y, classes = file["X"], file["y"], str(file["task"]) == "clf"
        x = np.asarray(x, dtype=np.float64)
        if classes:
            y = np.unique(y, return_inverse=True)[1]
        return x, y, classes

    def problem(self, spec: Spec) -> Problem:
        """Training and test rows of a run."""
        return Problem.cut(self, spec.n, spec.noise, 2 if spec.model == "degree2" else 1, spec.seed)

    def model(self, spec: Spec, problem: Problem) -> nn.Sequential:
        """The network at the start of a run."""
        return network(spec, problem.x.shape[1], problem.outputs)


_BUNDLED = {
    "sk_wine": ("load_wine", 178),
    "sk_digits": ("load_digits", 1797),
    "sk_iris": ("load_iris", 150),
    "sk_wdbc": ("load_breast_cancer", 569),
    "sk_diabetes": ("load_diabetes", 442),
}


def _bundled(name: str) -> tuple[Any, Any, bool]:
    from sklearn import datasets

    x, y = getattr(datasets, _BUNDLED[name][0])(return_X_y=True)
    return x, y, name != "sk_diabetes"


def tables(folder: str | Path | None) -> list[Table]:
    """The datasets of a folder of .npz files (X, y, task); without one, scikit-learn's.

    `folder` may also hold them in a sub-folder `tabular`.
    """
    if folder is None:
        return [Table(name, rows, None) for name, (_, rows) in _BUNDLED.items()]
    path = Path(folder)
    files = sorted(path.glob("*.npz")) or sorted((path / "tabular").glob("*.npz"))
    if not files:
        raise HeldinError(
            f"study: no .npz file in {os.fspath(folder)!r}; give a folder of files with X, y and "
            "task ('clf' or 'reg'), or none for the datasets that come with scikit-learn"
        )
    found = []
    for file in files:
        with np.load(file, allow_pickle=False) as content:
            missing = {"X", "y", "task"} - set(content.files)
            if missing:
                raise HeldinError(
                    f"study: {file.name} lacks {', '.join(sorted(missing))}; each file needs X "
                    "(rows, features), y (rows,) and task ('clf' or 'reg')"
                )
            found.append(Table(file.stem, len(content["y"]), file))
    return found


@dataclass(frozen=True, eq=False)
class Problem:
    """A training set and a test set, ready for a network.

    Attributes:
        x, y: training rows; the targets may be noisy.
        x_test, y_test: test rows with targets of the same kind, noise included.
        y_clean: the test targets without the added noise.
        loss_fn: the loss that is trained and measured.
        outputs: number of outputs that it takes.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    y_clean: Tensor
    loss_fn: LossFunction
    outputs: int

    @classmethod
    def cut(cls, table: Table, n: int, noise: float, degree: int, seed: int) -> Problem:
        """Draw n training rows and up to 2000 test rows; standardise by the training rows."""
        x, y, classes = table.load()
        generator = np.random.default_rng([seed, zlib.crc32(table.name.encode())])
        order = generator.permutation(len(x))[: n + MOST_TEST]
        x, y = x[order], y[order]
        x = _standard(x, n)
        if degree == 2:
            x = _standard(_products(x, generator), n)
        clean = y.copy()
        if classes:
            y = other_classes(y, noise, int(y.max()) + 1, generator)
        else:
            centre, spread = y[:n].mean(), max(float(y[:n].std()), 1e-12)
            clean = (y - centre) / spread
            y = clean + noise * generator.standard_normal(len(y))
        rows = torch.tensor(x, dtype=torch.float32)
        targets, truth = (_targets(values, classes) for values in (y, clean))
        loss_fn: LossFunction = F.mse_loss
        outputs = 1
        if classes:
            two = int(clean.max()) == 1
            loss_fn = F.binary_cross_entropy_with_logits if two else F.cross_entropy
            outputs = 1 if two else int(clean.max()) + 1
        return cls(rows[:n], targets[:n], rows[n:], targets[n:], truth[n:], loss_fn, outputs)

    def accuracy(self, outputs: Tensor) -> float:
        """Share of the clean test targets that are hit; for numbers, the R^2."""
        if self.loss_fn is F.mse_loss:
            rest = (outputs - self.y_clean).square().mean() / self.y_clean.var()
            return float(1 - rest)
        found = classes_of(outputs).flatten()
        return float((found == self.y_clean.flatten()).float().mean())


def other_classes(y: Any, noise: float, many: int, generator: Any) -> Any:
    """Classes of which that share is one of the others, all the same likely."""
    flipped = generator.random(y.shape) < noise
    return np.where(flipped, (y + generator.integers(1, max(2, many), y.shape)) % many, y)


def classes_of(outputs: Tensor) -> Tensor:
    """(b,) predicted classes, or (b, places)."""
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()


def _targets(y: Any, classes: bool) -> Tensor:
    if classes and int(y.max()) > 1:
        return torch.tensor(y, dtype=torch.long)
    return torch.tensor(y, dtype=torch.float32).unsqueeze(1)


def _standard(x: Any, n: int) -> Any:
    centre, spread = x[:n].mean(0), x[:n].std(0)
    return np.clip((x - centre) / np.where(spread > 1e-9, spread, 1.0), -CLIP, CLIP)


def _products(x: Any, generator: Any) -> Any:
    """The features and their products, at most 500 of these, drawn if there are more."""
    first, second = np.triu_indices(x.shape[1])
    if len(first) > MOST_PRODUCTS:
        chosen = np.sort(generator.choice(len(first), MOST_PRODUCTS, replace=False))
        first, second = first[chosen], second[chosen]
    return np.concatenate([x, x[:, first] * x[:, second]], axis=1)
