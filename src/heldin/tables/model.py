"""A model of a table: trained on all of its rows, kept in a folder without pickles."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from heldin.errors import HeldinError
from heldin.state.estimates import EstimateHistory

from .columns import Columns, category
from .mlp import network_of, network_outputs
from .trainer import in_units

__all__ = ["TabularModel", "Target"]

FEW = 10  # different whole numbers up to which a target is taken for classes
VERSION = 2

Task = Literal["classification", "regression"]
Layers = list[tuple[Any, Any]]


@dataclass(frozen=True)
class Target:
    """What is predicted.

    Attributes:
        name: of the column.
        task: what kind.
        classes: for classification, sorted as they are written.
        mean, spread: of the numbers, for regression.
        found: why it is this task.
    """

    name: str
    task: Task
    classes: tuple[Any, ...] = ()
    mean: float = 0.0
    spread: float = 1.0
    found: str = ""

    @classmethod
    def learn(cls, values: Any, task: str = "auto") -> Target:
        """From a column without missing values."""
        import pandas

        name = str(values.name)
        types = pandas.api.types
        number = types.is_numeric_dtype(values.dtype) and not types.is_bool_dtype(values.dtype)
        different = values.nunique()
        found = "as asked for"
        if task == "auto":
            if not number:
                task, found = "classification", "its values are not numbers"
            elif (values % 1 == 0).all() and different <= FEW:
                task, found = "classification", f"it has {different} different whole numbers"
            else:
                task, found = "regression", f"it has {different} different numbers"
        if task == "regression":
            if not number:
                raise HeldinError(
                    f"target {name!r}: {values.iloc[0]!r} is not a number; use --task "
                    "classification, or clean the column"
                )
            numbers = values.to_numpy(float)
            if not all(map(math.isfinite, numbers)):
                raise HeldinError(f"target {name!r} has infinite values; clean them")
            spread = float(numbers.std())
            if not spread > 0:
                raise HeldinError(
                    f"target {name!r} is {numbers[0]:g} in all rows; nothing to learn"
                )
            return cls(name, "regression", (), float(numbers.mean()), spread, found)
        classes = tuple(sorted({category(value) for value in values}, key=_order))
        if len(classes) < 2:
            raise HeldinError(
                f"target {name!r} has one class only, {classes[0]!r}; there must be at least two"
            )
        if len(classes) > max(FEW, len(values) / 2):
            raise HeldinError(
                f"target {name!r} has {len(classes)} different values in {len(values)} rows, too "
                "many for classes" + ("; use --task regression" if number else "")
            )
        return cls(name, "classification", classes, found=found)

    def encode(self, values: Any) -> Any:
        """Class numbers, or scaled numbers; -1 for classes that were not there in training."""
        import numpy as np
        import pandas

        if self.task == "classification":
            place = {text: i for i, text in enumerate(self.classes)}
            return np.array([place.get(category(value), -1) for value in values])
        numbers = pandas.to_numeric(values, errors="coerce")
        if numbers.isna().any():
            wrong = values[numbers.isna()].iloc[0]
            raise HeldinError(f"target {self.name!r}: {wrong!r} is not a number")
        return (numbers.to_numpy(float) - self.mean) / self.spread

    @property
    def unit(self) -> float:
        """What a loss on scaled numbers is multiplied by to be one on the numbers themselves.

        >>> Target("price", "regression", mean=100.0, spread=3.0).unit
        9.0
        """
        return self.spread**2


def _without_nan(value: Any) -> Any:
    """JSON has no nan: null stands for it."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _order(text: str) -> tuple[int, float, str]:
    """Numbers by size, before texts."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def _members(estimator: Any) -> list[Layers]:
    """Weights (inputs, outputs) and biases of a fitted estimator, network by network."""
    import numpy as np

    if hasattr(estimator, "members_"):
        return [list(layers) for layers in estimator.members_]
    return [[(np.atleast_2d(estimator.coef_).T, np.atleast_1d(estimator.intercept_))]]


def _scores(estimator: Any, target: Target) -> dict[str, list[float]]:
    """Estimates of scores on new rows: value, low and high end, in the target's own units."""
    found = getattr(estimator, "estimates_", None) or {}
    units = {"rmse": target.spread}
    return {n: [value * units.get(n, 1.0) for value in each] for n, each in found.items()}


def _without_inputs(targets: Any, target: Target) -> dict[str, float]:
    """The loss of the best constant, and the accuracy of the most frequent class.

    >>> import numpy
    >>> both = Target("y", "classification", ("no", "yes"))
    >>> _without_inputs(numpy.array([0, 0, 0, 1]), both)["most_frequent"]
    0.75
    """
    import numpy as np

    if target.task == "regression":
        return {"constant": target.unit}
    shares = np.bincount(targets) / len(targets)
    some = shares[shares > 0]
    return {"constant": float(-(some * np.log(some)).sum()), "most_frequent": float(shares.max())}


def _calibration(estimator: Any) -> list[list[float]] | None:
    """Probabilities out of fold, and how often they came true."""
    found = getattr(estimator, "calibration_curve_", None)
    return None if found is None else [part.tolist() for part in found]


@dataclass(frozen=True, eq=False)
class Scale:
    """How a network's inputs are scaled: (x - mean) / spread, cut off at +-clip."""

    mean: Any
    spread: Any
    clip: float

    @classmethod
    def of(cls, estimator: Any, inputs: int) -> Scale:
        """Of a fitted estimator; a linear one takes inputs as they are."""
        import numpy as np

        scaler = getattr(estimator, "_scaler", None) if hasattr(estimator, "members_") else None
        if scaler is None:
            return cls(np.zeros(inputs), np.ones(inputs), math.inf)
        return cls(scaler.standard.mean_, scaler.standard.scale_, scaler.clip)

    def __call__(self, inputs: Any) -> Any:
        return ((inputs - self.mean) / self.spread).clip(-self.clip, self.clip)


@dataclass
class TabularModel:
    """Networks with what is needed to use them on a table.

    Attributes:
        columns, target: what was learnt of the table.
        members: weights (inputs, outputs) and biases, layer by layer, of each network.
        scale: of their inputs.
        activation: between layers.
        facts: how training went, for summaries.
    """

    columns: Columns
    target: Target
    members: list[Layers]
    scale: Scale
    activation: str
    facts: dict[str, Any] = field(default_factory=dict)
    history: Any = None

    @classmethod
    def fit(
        cls,
        inputs: Any,
        targets: Any,
        columns: Columns,
        target: Target,
        estimator: Any,
        groups: Any = None,
    ) -> TabularModel:
        """Train an estimator of `heldin.sklearn` on all rows of a table.

        Args:
            inputs, targets: what `columns` and `target` made of the rows.
            columns, target: what was learnt of them.
            estimator: not fitted yet.
            groups: rows with the same value belong together; None: each is by itself.
        """
        estimator.fit(inputs, targets, **({} if groups is None else {"groups": groups}))
        unit = target.unit
        history, reason = estimator.history_, estimator.stopping_reason_
        estimate, error = estimator.estimate_, estimator.estimate_error_
        if isinstance(history, EstimateHistory):
            history = in_units(history, unit)
            estimate, error = estimate * unit, error * unit
            last = history.last()
            reason = (
                f"estimated loss{' of one network' if len(_members(estimator)) > 1 else ''} "
                f"{last.estimate:.4g} at step {last.step}, lowest "
                f"{min(record.estimate for record in history):.4g} at step {estimator.best_step_}"
            )
        elif estimator.stopping_rule_ == "validation" and target.task == "regression":
            reason += " (of the target divided by its standard deviation)"
        facts = {
            "model": "mlp" if hasattr(estimator, "coefs_") else "linear",
            "rows": len(targets),
            "inputs": inputs.shape[1],
            "rule": estimator.stopping_rule_,
            "choice": estimator.stopping_choice_,
            "reason": reason,
            "stopped": estimator.stopped_,
            "epochs": estimator.n_iter_,
            "steps": estimator.n_steps_,
            "best_step": estimator.best_step_,
            "training_loss": estimator.loss_ * unit,
            "loss_curve": [loss * unit for loss in estimator.loss_curve_],
            "evidence_curve": estimator.evidence_curve_,
            "estimate": estimate,
            "standard_error": error,
            **_without_inputs(targets, target),
            "scores": _scores(estimator, target),
            "calibration": _calibration(estimator),
            "shrinkage": getattr(estimator, "shrinkage_", None),
            "members": len(_members(estimator)),
        }
        scale = Scale.of(estimator, inputs.shape[1])
        units = getattr(estimator, "activation_", "identity")
        return cls(columns, target, _members(estimator), scale, units, facts, history)

    def predictions(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """(n, classes) probabilities or (n, 1) scaled numbers, and how many categories are unknown.

        The mean over the networks.
        """
        inputs, unknown = self.columns.encode(frame, path)
        weights = torch.from_numpy(self.members[0][0][0])
        rows = torch.from_numpy(self.scale(inputs)).to(weights.dtype)
        found = [network_outputs(network_of(m, self.activation), rows) for m in self.members]
        if self.target.task == "classification":
            found = [self._shares(outputs) for outputs in found]
        return torch.stack(found).mean(0), unknown

    def predict(self, frame: Any, path: str | Path) -> tuple[Any, dict[str, int]]:
        """A DataFrame of predictions (and probabilities), and the numbers of unknown categories."""
        import pandas

        outputs, unknown = self.predictions(frame, path)
        if self.target.task == "regression":
            values = outputs[:, 0].numpy() * self.target.spread + self.target.mean
            return pandas.DataFrame({self.target.name: values}), unknown
        shares = outputs.numpy()
        labels = [self.target.classes[i] for i in shares.argmax(1)]
        table: dict[str, Any] = {self.target.name: labels}
        table |= {f"p({name})": shares[:, i] for i, name in enumerate(self.target.classes)}
        return pandas.DataFrame(table), unknown

    def _shares(self, outputs: torch.Tensor) -> torch.Tensor:
        if outputs.shape[1] > 1:
            return outputs.softmax(1)
        return torch.hstack([1 - outputs.sigmoid(), outputs.sigmoid()])

    def test(self, frame: Any, path: str | Path) -> dict[str, float]:
        """Loss and score on rows that were not trained on."""
        rows = frame[frame[self.target.name].notna()]
        if not len(rows):
            raise HeldinError(f"{path}: no row has a value of the target {self.target.name!r}")
        outputs, _ = self.predictions(rows, path)
        truth = torch.from_numpy(self.target.encode(rows[self.target.name]))
        if self.target.task == "regression":
            losses = (outputs[:, 0] - truth).square() * self.target.unit
            spread = float((truth - truth.mean()).square().mean()) * self.target.unit
            score = 1 - float(losses.mean()) / spread if spread else math.nan
        else:
            if bool((truth < 0).any()):
                odd = category(rows[self.target.name].iloc[int((truth < 0).nonzero()[0])])
                raise HeldinError(f"{path}: class {odd!r} was not there in training")
            losses = -outputs.gather(1, truth[:, None])[:, 0].log()
            score = float((outputs.argmax(1) == truth).double().mean())
        error = float(losses.std() / len(losses) ** 0.5) if len(losses) > 1 else math.nan
        return {
            "rows": len(losses), "loss": float(losses.mean()), "error": error, "score": score
        }  # fmt: skip

    # -- the folder

    def save(self, folder: str | Path) -> None:
        """Write model.json and weights.safetensors."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            "scale.mean": torch.tensor(self.scale.mean),
            "scale.spread": torch.tensor(self.scale.spread),
        }
        for number, layers in enumerate(self.members):
            for i, (weight, bias) in enumerate(layers):
                weights[f"{number}.{i}.weight"] = torch.tensor(weight)
                weights[f"{number}.{i}.bias"] = torch.tensor(bias)
        save_file(weights, folder / "weights.safetensors")
        content = {
            "heldin": "TabularModel",
            "version": VERSION,
            "target": asdict(self.target),
            "columns": self.columns.to_json(),
            "activation": self.activation,
            "members": len(self.members),
            "clip": self.scale.clip if math.isfinite(self.scale.clip) else None,
            "facts": _without_nan(self.facts),
        }
        text = json.dumps(content, indent=1, allow_nan=False)
        (folder / "model.json").write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> TabularModel:
        """What `save` wrote."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

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
            weights = load_file(folder / "weights.safetensors")
            count = content["members"]
            members = [
                [
                    (weights[f"{m}.{i}.weight"].numpy(), weights[f"{m}.{i}.bias"].numpy())
                    for i in range((len(weights) // 2 - 1) // count)
                ]
                for m in range(count)
            ]
            clip = math.inf if content["clip"] is None else float(content["clip"])
            scale = Scale(weights["scale.mean"].numpy(), weights["scale.spread"].numpy(), clip)
            target = content["target"]
            return cls(
                Columns.from_json(content["columns"]),
                Target(**{**target, "classes": tuple(target["classes"])}),
                members,
                scale,
                content["activation"],
                content["facts"],
            )
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise HeldinError(f"{folder}: the model is damaged ({error!r}); fit again") from error
