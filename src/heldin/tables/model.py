"""A model of a table: trained on all of its rows, stored in a folder without pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor, nn

from heldin.crossval import mean_interval
from heldin.errors import HeldinError
from heldin.sklearn.base import Estimator
from heldin.sklearn.data import category
from heldin.sklearn.training import build_network, linear_layers, network_outputs
from heldin.state.estimates import EstimateHistory

from .columns import Columns, as_numbers

__all__ = ["TabularModel", "Target"]

FEW_CLASSES = 10  # different whole numbers up to which a target is taken for classes
SMALL, LARGE = 1e-100, 1e100  # numbers whose squares, and sums of these, are in range
REPEATS, MOST_ROWS = 5, 2_000  # shuffles of a column, and rows, that show how much it matters
VERSION = 6


@dataclass(frozen=True)
class Target:
    """The column to predict."""

    name: str
    task: str  # "classification" or "regression"
    classes: Sequence[str] = ()  # numbers by size, before texts
    why: str = ""  # reason for the task
    decimal: str = "."  # mark of numbers that are written as text

    @classmethod
    def learn(cls, values: Any, task: str = "auto", decimal: str | None = None) -> Target:
        """Return the target of a column without missing values; "auto" chooses the task."""
        name, read = str(values.name), as_numbers(values, decimal)
        values, mark = (values, ".") if read is None else read
        why = "as asked for"
        if task == "auto" and read is None:
            task, why = "classification", "its values are not numbers"
        elif task == "auto":
            different = values.nunique()
            few = different <= FEW_CLASSES and bool((values % 1 == 0).all())
            task = "classification" if few else "regression"
            why = f"it has {different} different {'whole ' * few}numbers"
        if task == "regression":
            if read is None:
                raise HeldinError(
                    f"target {name!r}: {values.iloc[0]!r} is not a number; use --task "
                    "classification, or clean the column"
                )
            _refuse_numbers(name, values.to_numpy(float))
            return cls(name, task, (), why, mark)
        classes = tuple(sorted({category(value) for value in values}, key=_numbers_first))
        if len(classes) < 2:
            raise HeldinError(
                f"target {name!r} has one class only, {classes[0]!r}; there must be at least two"
            )
        if len(classes) > max(FEW_CLASSES, len(values) / 2):
            raise HeldinError(
                f"target {name!r} has {len(classes)} different values in {len(values)} rows, too "
                "many for classes" + ("; use --task regression" if read is not None else "")
            )
        return cls(name, task, classes, why, mark)

    def encode(self, values: Any) -> Any:
        """Return class numbers, -1 for classes that were not in training; or the numbers."""
        read = as_numbers(values, self.decimal)
        values = values if read is None else read[0]
        if self.task == "classification":
            return pandas.Index(self.classes).get_indexer([category(value) for value in values])
        numbers = pandas.to_numeric(values, errors="coerce")
        for value in values[numbers.isna()]:
            raise HeldinError(f"target {self.name!r}: {value!r} is not a number")
        return numbers.to_numpy(float)


def _refuse_numbers(name: str, numbers: Any) -> None:
    """Refuse the targets of a regression that are constant or out of range."""
    if not np.isfinite(numbers).all():
        raise HeldinError(f"target {name!r} has infinite values; clean them")
    size = float(abs(numbers).max())
    if size and not SMALL < size < LARGE:
        raise HeldinError(
            f"target {name!r} has numbers of about {size:.3g}, whose squares are out of range; "
            f"divide them by {size:.0e}"
        )
    if not numbers.std() > 0:
        raise HeldinError(f"target {name!r} is {numbers[0]:g} in all rows; nothing to learn")


def _numbers_first(text: str) -> tuple[int, float, str]:
    """Return a key that sorts numbers by size, before texts."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _baseline(targets: Any, target: Target) -> dict[str, float]:
    """Return the loss of the best constant, and the accuracy of the most frequent class."""
    if target.task == "regression":
        return {"constant": float(targets.var())}
    shares = np.bincount(targets) / len(targets)
    positive = shares[shares > 0]
    constant = float(-(positive * np.log(positive)).sum())
    return {"constant": constant, "most_frequent": float(shares.max())}


def _importances(
    estimator: Estimator, inputs: Any, targets: Any, columns: Columns
) -> dict[str, list[float]]:
    """Return by how much the mean loss rises with each column, and the standard deviation.

    A row is predicted by the shadow that was not trained on it. Columns of the table are shuffled
    among the rows, five times each; the inputs of one column move jointly. The largest is first;
    without out-of-fold rows there is none.
    """
    if estimator.oof_predictions_ is None:
        return {}
    generator, record = np.random.default_rng(0), estimator.record()
    some = slice(None, None, -(-len(record.rows) // MOST_ROWS))
    rows, shadow_of = record.rows[some].numpy(), record.folds[some].numpy()
    x, y = inputs[rows], targets[rows]

    def loss(x: Any) -> float:
        predicted = estimator._out_of_fold(x, shadow_of)
        return float(estimator._row_losses(predicted, y).mean())

    baseline, first, rises = loss(x), 0, {}
    for column in columns.used:
        inputs_of_column = slice(first, first + column.width)
        first += column.width
        losses = []
        for _ in range(REPEATS):
            shuffled = x.copy()
            shuffled[:, inputs_of_column] = x[generator.permutation(len(x)), inputs_of_column]
            losses.append(loss(shuffled) - baseline)
        rises[column.name] = [float(np.mean(losses)), float(np.std(losses))]
    return dict(sorted(rises.items(), key=lambda item: -item[1][0]))


@dataclass
class TabularModel:
    """A network with the encodings of a table.

    Inputs are scaled to (x - mean) / spread, and cut off at +-clip.
    """

    columns: Columns
    target: Target
    network: nn.Sequential
    mean: Tensor
    spread: Tensor
    clip: float
    activation: str
    facts: dict[str, Any] = field(default_factory=dict)  # the course of training, for summaries
    estimator: Any = None  # if the model has just been trained

    @classmethod
    def fit(
        cls,
        estimator: Estimator,
        target: Target,
        columns: Columns,
        inputs: Any,
        targets: Any,
        groups: Any,
        time: Any,
    ) -> TabularModel:
        """Train an estimator on all encoded rows; the last two as in its `fit`."""
        estimator.fit(inputs, targets, groups=groups, time=time)
        reason = estimator.stopping_reason_
        if isinstance(estimator.history_, EstimateHistory):
            reason = ""
        elif estimator.stopping_rule_ == "validation" and target.task == "regression":
            reason += " (of the target divided by its standard deviation)"
        facts = {
            "model": "mlp" if estimator.n_layers_ > 2 else "linear",
            "rows": len(targets),
            "inputs": inputs.shape[1],
            "rule": estimator.stopping_rule_,
            "choice": estimator.stopping_choice_,
            "reason": reason,
            "stopped": estimator.stopped_,
            "epochs": estimator.n_iter_,
            "steps": estimator.n_steps_,
            "best_step": estimator.best_step_,
            "training_loss": estimator.loss_,
            "loss_curve": estimator.loss_curve_,
            "estimate": estimator.estimate_,
            **_baseline(targets, target),
            "scores": {name: list(score) for name, score in (estimator.estimates_ or {}).items()},
            "temperature": estimator.temperature_,
            "seed": estimator.random_state,
            "copies": estimator.n_copies_,
            "importance": _importances(estimator, inputs, targets, columns),
        }
        scaler = estimator._scaler
        mean, spread = map(torch.from_numpy, (scaler.standard.mean_, scaler.standard.scale_))
        course = estimator.activation_, facts, estimator
        return cls(columns, target, estimator._network, mean, spread, scaler.clip, *course)

    def outputs(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """Return (n, classes) probabilities or (n, 1) numbers.

        The second value is the number of rows with an unknown category, by column.
        """
        inputs, unknown = self.columns.encode(frame, path)
        scaled = (torch.from_numpy(inputs) - self.mean) / self.spread
        rows = scaled.clamp(-self.clip, self.clip).to(next(self.network.parameters()).dtype)
        outputs = network_outputs(self.network, rows)
        if self.target.task == "classification":
            two = torch.cat([-outputs, outputs], 1).sigmoid()
            outputs = two if outputs.shape[1] == 1 else outputs.softmax(1)
        return outputs.numpy(), unknown

    def predict(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """Return a DataFrame of predictions, and the numbers of unknown categories."""
        outputs, unknown = self.outputs(frame, path)
        name, classes = self.target.name, self.target.classes
        if self.target.task == "regression":
            return pandas.DataFrame({name: outputs[:, 0]}), unknown
        table: dict[str, Any] = {name: [classes[i] for i in outputs.argmax(1)]}
        table |= {f"p({label})": outputs[:, i] for i, label in enumerate(classes)}
        return pandas.DataFrame(table), unknown

    def test(self, frame: Any, path: str | Path) -> tuple[dict[str, Any], dict[str, int]]:
        """Return loss and score on rows that were not trained on, and unknown categories."""
        rows = frame[frame[self.target.name].notna()]
        if not len(rows):
            raise HeldinError(f"{path}: no row has a value of the target {self.target.name!r}")
        (outputs, unknown), targets = self.outputs(rows, path), rows[self.target.name]
        truth = self.target.encode(targets)
        if self.target.task == "regression":
            losses = np.square(outputs[:, 0] - truth)
            score = 1 - float(losses.mean()) / truth.var() if truth.var() else math.nan
        else:
            for value in targets[truth < 0]:
                label = category(value)
                raise HeldinError(f"{path}: class {label!r} was not there in training")
            with np.errstate(divide="ignore"):
                losses = -np.log(outputs[np.arange(len(truth)), truth])
            score = float((outputs.argmax(1) == truth).mean())
        loss = mean_interval(torch.from_numpy(losses))
        facts = {"rows": len(losses), "loss": loss.value, "interval": list(loss), "score": score}
        return facts, unknown

    # -- the folder

    def save(self, folder: str | Path) -> None:
        """Write model.json and weights.safetensors."""
        from safetensors.torch import save

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        scales = {"scale.mean": self.mean, "scale.spread": self.spread}
        weights = save({**self.network.state_dict(), **scales})
        facts = json.loads(json.dumps(self.facts), parse_constant=lambda nan: None)
        content = {
            "heldin": "TabularModel",
            "version": VERSION,
            "target": asdict(self.target),
            "columns": asdict(self.columns),
            "activation": self.activation,
            "sizes": [len(self.mean), *(each.out_features for each in linear_layers(self.network))],
            "clip": self.clip,
            "facts": facts,
        }
        text = json.dumps(content | {"digest": _digest(content, weights)}, indent=1)
        (folder / "weights.safetensors").write_bytes(weights)
        (folder / "model.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TabularModel:
        """Read a folder that `save` wrote, and refuse one that was changed since."""
        from safetensors.torch import load

        folder = Path(folder)
        for name in ("model.json", "weights.safetensors"):
            if not (folder / name).is_file():
                raise HeldinError(f"{folder}: not a model of `heldin fit`, {name} is missing")
        weights = (folder / "weights.safetensors").read_bytes()
        try:
            content = json.loads((folder / "model.json").read_text("utf-8"))
            if content["version"] != VERSION:
                raise HeldinError(
                    f"{folder}: written by another version of heldin (format "
                    f"{content['version']!r}, this one reads {VERSION}); fit again"
                )
            if content.pop("digest") != _digest(content, weights):
                raise ValueError("the files are not as they were written")
            tensors = load(weights)
            mean, spread = tensors.pop("scale.mean"), tensors.pop("scale.spread")
            network = build_network(content["sizes"], content["activation"])
            network.load_state_dict(tensors, assign=True)  # in the precision that they have
            return cls(
                Columns.from_json(content["columns"]),
                Target(**content["target"]),
                network,
                mean,
                spread,
                content["clip"],
                content["activation"],
                content["facts"],
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise HeldinError(f"{folder}: the model is damaged ({error}); fit again") from error


def _digest(content: dict[str, Any], weights: bytes) -> str:
    """Return a hash of both files of a model, by which a change of one is noticed."""
    return sha256(json.dumps(content, allow_nan=False).encode() + weights).hexdigest()
