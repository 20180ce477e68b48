"""A model of a table: trained on all of its rows, stored in a folder without pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas
import torch

from heldin.crossval import mean_interval
from heldin.errors import HeldinError
from heldin.pages.predictions import Predictions
from heldin.sklearn.data import category
from heldin.sklearn.training import ACTIVATIONS, network_of, network_outputs
from heldin.state.estimates import EstimateHistory
from heldin.state.schema import check_schema

from .columns import Columns
from .importance import importances
from .number_formats import is_number

__all__ = ["TabularModel", "Target"]

FEW_CLASSES = 10  # different whole numbers up to which a target is taken for classes
SMALL, LARGE = 1e-100, 1e100  # numbers whose squares, and sums of these, are in range
VERSION = 4
TEXT = (str, None)
FORM = {  # schema of model.json, see `heldin.state.schema`; other facts are for the report
    "target": {"name": str, "task": str, "classes": [str], "why": str},
    "columns": {
        "used": [
            {"name": str, "kind": str, "mean": float, "spread": float, "categories": [str]}
            | {"missing": bool, "decimal": str, "order": str, "clock": bool}
        ],
        "constant": [str],
        "unusable": [str],
    },
    "activation": str,
    "clip": float,
    "facts": {
        "id": [str],
        "reading": {"separator": TEXT, "encoding": TEXT, "decimal": TEXT, "missing": [str]},
    },
}
CHOICES = {
    "task": ("classification", "regression"),
    "kind": ("number", "category", "date"),
    "decimal": (".", ",", None),
    "order": ("ymd", "dmy", "mdy"),
    "activation": tuple(ACTIVATIONS),
}

Layers = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Target:
    """The column to predict.

    Attributes:
        name: of the column.
        task: kind of the target.
        classes: of a classification, numbers by size, before texts.
        why: reason for the task.
    """

    name: str
    task: Literal["classification", "regression"]
    classes: tuple[str, ...] = ()
    why: str = ""

    @classmethod
    def learn(cls, values: Any, task: str = "auto") -> Target:
        """Return the target of a column without missing values; "auto" chooses the task."""
        name, number, different = str(values.name), is_number(values), values.nunique()
        why = "as asked for"
        if task == "auto":
            whole = number and bool((values % 1 == 0).all())
            task = "regression"
            why = f"it has {different} different numbers"
            if not number:
                task, why = "classification", "its values are not numbers"
            elif whole and different <= FEW_CLASSES:
                task, why = "classification", f"it has {different} different whole numbers"
        if task == "regression":
            _refuse_numbers(name, values)
            return cls(name, "regression", (), why)
        classes = tuple(sorted({category(value) for value in values}, key=_numbers_first))
        if len(classes) < 2:
            raise HeldinError(
                f"target {name!r} has one class only, {classes[0]!r}; there must be at least two"
            )
        if len(classes) > max(FEW_CLASSES, len(values) / 2):
            raise HeldinError(
                f"target {name!r} has {len(classes)} different values in {len(values)} rows, too "
                "many for classes" + ("; use --task regression" if number else "")
            )
        return cls(name, "classification", classes, why)

    def encode(self, values: Any) -> Any:
        """Return class numbers, -1 for classes that were not in training; or the numbers."""
        if self.task == "classification":
            texts = [category(value) for value in values]
            return pandas.Index(self.classes).get_indexer(texts)
        numbers = pandas.to_numeric(values, errors="coerce")
        if numbers.isna().any():
            value = values[numbers.isna()].iloc[0]
            raise HeldinError(f"target {self.name!r}: {value!r} is not a number")
        return numbers.to_numpy(float)


def _refuse_numbers(name: str, values: Any) -> None:
    """Refuse the targets of a regression that are no numbers, constant or out of range."""
    if not is_number(values):
        raise HeldinError(
            f"target {name!r}: {values.iloc[0]!r} is not a number; use --task classification, or "
            "clean the column"
        )
    numbers = values.to_numpy(float)
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


def _without_nan(value: Any) -> Any:
    """Replace nan and inf, which JSON has not, by None."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _baseline(targets: Any, target: Target) -> dict[str, float]:
    """Return the loss of the best constant, and the accuracy of the most frequent class.

    >>> both = Target("y", "classification", ("no", "yes"))
    >>> _baseline(np.array([0, 0, 0, 1]), both)["most_frequent"]
    0.75
    """
    if target.task == "regression":
        return {"constant": float(targets.var())}
    shares = np.bincount(targets) / len(targets)
    positive = shares[shares > 0]
    return {
        "constant": float(-(positive * np.log(positive)).sum()),
        "most_frequent": float(shares.max()),
    }


def _out_of_fold(estimator: Any, targets: Any, target: Target) -> Predictions | None:
    """Return out-of-fold predictions for the report; rows count from 1."""
    predicted = estimator.oof_predictions_
    if predicted is None:
        return None
    rows = np.flatnonzero(np.isfinite(predicted.reshape(len(targets), -1)).all(1))
    numbers, truth, predicted = (rows + 1).tolist(), targets[rows], predicted[rows]
    losses = estimator._row_losses(predicted, truth).tolist()
    if target.task == "regression":
        return Predictions(numbers, truth.tolist(), losses, (), predicted.tolist())
    return Predictions(numbers, truth.tolist(), losses, predicted.tolist(), (), target.classes)


@dataclass
class TabularModel:
    """A network with the encodings of a table.

    Attributes:
        columns, target: encodings of inputs and targets.
        layers: weights (inputs, outputs) and biases of the network, layer by layer.
        mean, spread, clip: inputs are scaled to (x - mean) / spread, and cut off at +-clip.
        activation: between layers.
        facts: the course of training, for summaries.
        history: record of the rule, if the model has just been trained.
        bands: (low, high) of the estimates in it.
        run: names and values for the report: optimiser, duration and so on.
        out_of_fold: predictions of rows that were not trained on, if it has.
    """

    columns: Columns
    target: Target
    layers: Layers
    mean: Any
    spread: Any
    clip: float
    activation: str
    facts: dict[str, Any] = field(default_factory=dict)
    history: Any = None
    bands: Sequence[tuple[float, float]] = ()
    run: Sequence[tuple[str, str]] = ()
    out_of_fold: Predictions | None = None

    @classmethod
    def fit(
        cls,
        inputs: Any,
        targets: Any,
        columns: Columns,
        target: Target,
        estimator: Any,
        groups: Any = None,
        time: Any = None,
    ) -> TabularModel:
        """Train an estimator of `heldin.sklearn` on all rows of a table.

        Args:
            inputs, targets: encoded rows.
            columns, target: their encodings.
            estimator: not fitted yet.
            groups: rows with the same value share a fold; None: all rows are independent.
            time: numbers or dates of the rows, if networks are to be tested on later rows.
        """
        estimator.fit(inputs, targets, groups=groups, time=time)
        history, reason = estimator.history_, estimator.stopping_reason_
        if isinstance(history, EstimateHistory):
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
            "importance": importances(estimator, inputs, targets, columns),
        }
        scaler = estimator._scaler
        mean, spread, clip = scaler.standard.mean_, scaler.standard.scale_, scaler.clip
        activation = estimator.activation_
        layers = list(zip(estimator.coefs_, estimator.intercepts_, strict=True))
        rows = _out_of_fold(estimator, targets, target)
        return cls(
            columns, target, layers, mean, spread, clip, activation, facts, history,
            estimator._bands(), estimator._facts, rows,
        )  # fmt: skip

    def outputs(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """Return (n, classes) probabilities or (n, 1) numbers.

        The second value is the number of rows with an unknown category, by column.
        """
        inputs, unknown = self.columns.encode(frame, path)
        scaled = ((inputs - self.mean) / self.spread).clip(-self.clip, self.clip)
        rows = torch.from_numpy(scaled.astype(self.layers[0][0].dtype, copy=False))
        outputs = network_outputs(network_of(self.layers, self.activation), rows)
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

    def test(self, frame: Any, path: str | Path) -> dict[str, Any]:
        """Return loss and score on rows that were not trained on."""
        rows = frame[frame[self.target.name].notna()]
        if not len(rows):
            raise HeldinError(f"{path}: no row has a value of the target {self.target.name!r}")
        outputs, truth = self.outputs(rows, path)[0], self.target.encode(rows[self.target.name])
        if self.target.task == "regression":
            losses = np.square(outputs[:, 0] - truth)
            score = 1 - float(losses.mean()) / truth.var() if truth.var() else math.nan
        else:
            if (truth < 0).any():
                label = category(rows[self.target.name].iloc[int((truth < 0).argmax())])
                raise HeldinError(f"{path}: class {label!r} was not there in training")
            with np.errstate(divide="ignore"):
                losses = -np.log(outputs[np.arange(len(truth)), truth])
            score = float((outputs.argmax(1) == truth).mean())
        loss = mean_interval(torch.from_numpy(losses))
        return {"rows": len(losses), "loss": loss.value, "interval": list(loss), "score": score}

    # -- the folder

    def save(self, folder: str | Path) -> None:
        """Write model.json and weights.safetensors."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {"scale.mean": self.mean, "scale.spread": self.spread}
        for number, (weight, bias) in enumerate(self.layers):
            arrays[f"{number}.weight"], arrays[f"{number}.bias"] = weight, bias
        tensors = {name: torch.tensor(array) for name, array in arrays.items()}
        save_file(tensors, folder / "weights.safetensors")
        content = {
            "heldin": "TabularModel",
            "version": VERSION,
            "target": asdict(self.target),
            "columns": self.columns.to_json(),
            "activation": self.activation,
            "clip": self.clip,
            "facts": _without_nan(self.facts),
        }
        text = json.dumps(content, indent=1, allow_nan=False)
        (folder / "model.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TabularModel:
        """Read a folder that `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        folder = Path(folder)
        for name in ("model.json", "weights.safetensors"):
            if not (folder / name).is_file():
                raise HeldinError(f"{folder}: not a model of `heldin fit`, {name} is missing")
        try:
            content: Mapping[str, Any] = json.loads((folder / "model.json").read_text("utf-8"))
            if content["heldin"] != "TabularModel" or content["version"] != VERSION:
                raise HeldinError(
                    f"{folder}: written by another version of heldin (format "
                    f"{content['version']!r}, this one reads {VERSION}); fit again"
                )
            check_schema(content, FORM)
            arrays = load_file(folder / "weights.safetensors")
            target = content["target"]
            model = cls(
                Columns.from_json(content["columns"]),
                Target(**{**target, "classes": tuple(target["classes"])}),
                _read_layers(arrays),
                arrays["scale.mean"],
                arrays["scale.spread"],
                float(content["clip"]),
                content["activation"],
                content["facts"],
            )
            model._check()
            return model
        except (
            AttributeError,
            ValueError,
            KeyError,
            TypeError,
            RecursionError,
            SafetensorError,
        ) as error:
            raise HeldinError(f"{folder}: the model is damaged ({error!r}); fit again") from error

    def _check(self) -> None:
        """Refuse values of a folder that do not fit each other, before they are used."""
        columns, classes = self.columns.used, self.target.classes
        regression = self.target.task == "regression"
        inputs = sum(column.width for column in columns)
        outputs = 1 if regression or len(classes) == 2 else len(classes)
        values = [("task", self.target.task), ("activation", self.activation)]
        values += [("decimal", self.facts["reading"]["decimal"])]
        values += [(n, getattr(c, n)) for c in columns for n in ("kind", "decimal", "order")]
        for name, value in values:
            if value not in CHOICES[name]:
                raise ValueError(f"{name} {value!r} is not one of {CHOICES[name]}")
        if len(set(classes)) < len(classes) or (not regression and len(classes) < 2):
            raise ValueError("there must be two different classes or more")
        if any(len(set(c.categories)) < len(c.categories) for c in columns):
            raise ValueError("categories must be different")
        if not self.mean.shape == self.spread.shape == (inputs,):
            raise ValueError(f"there are {inputs} inputs and scales of {self.mean.shape}")
        sizes = [inputs, *(weight.shape[-1] for weight, _ in self.layers)]
        shapes = [(weight.shape, bias.shape) for weight, bias in self.layers]
        if shapes != [((a, b), (b,)) for a, b in pairwise(sizes)] or sizes[-1] != outputs:
            raise ValueError(f"layers do not lead from {inputs} inputs to {outputs} outputs")
        parts = [part for layer in self.layers for part in layer]
        numbers = [self.mean, self.spread, *((c.mean, c.spread) for c in columns), *parts]
        if not all(np.isfinite(part).all() for part in numbers):
            raise ValueError("numbers must be finite")
        if len({part.dtype for part in parts}) > 1:
            raise ValueError("weights must have one precision")


def _read_layers(arrays: Mapping[str, Any]) -> Layers:
    """Return the layers of a network from the names of its arrays."""
    if any(array.dtype.kind != "f" for array in arrays.values()):
        raise ValueError("weights must be floating-point numbers")
    numbers = range(len(arrays) // 2 - 1)  # two arrays are scales
    if not numbers or len(arrays) % 2:
        raise ValueError(f"{len(arrays)} tensors are not those of a network")
    return [(arrays[f"{number}.weight"], arrays[f"{number}.bias"]) for number in numbers]
