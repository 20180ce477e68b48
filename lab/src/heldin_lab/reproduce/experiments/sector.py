"""Sec. 3.5: logistic regression and a shallow net on SECTOR, many features and few rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heldin import HeldinError
from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce.data import CLASSES, FEATURES
from heldin_lab.reproduce.experiment import NEAR, SLIGHT, Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import Column, columns
from heldin_lab.reproduce.ledger import Log
from heldin_lab.reproduce.readings import DIVISION, SMOOTHING, START
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at, last, least
from heldin_lab.reproduce.training import Rows, batch, mean_loss, perceptron
from heldin_lab.rules import Evidence, EvidenceStopping, ValidationStopping

__all__ = ["EXPERIMENT"]


@dataclass(frozen=True)
class Settings:
    """Of the data, the two models and the training."""

    seeds: int = 3
    steps: int = 1500
    every: int = 25  # steps between records
    features: int = 2000  # the most frequent ones in the training rows
    training: int = 961  # rows, a fifth of which are held out for validation
    test: int = 865
    hidden: int = 50
    rates: tuple[float, ...] = (1.0, 0.1)
    batch: int = 128
    std: float = 0.01  # of the initial weights
    smoothing: float = 0.9
    official: bool = False  # whether only LIBSVM's own files will do


MODELS = ("logistic", "shallow")


@dataclass(frozen=True)
class Split:
    """Rows for training, validation and test, made dense when asked for."""

    train: Rows
    rows: int
    validation: Rows
    held: int
    test: Rows


def split(run: Run, held_out: bool) -> Split:
    """The rows of a seed, scaled so that the entries that are not zero have mean square 1."""
    s = run.settings
    found = _data.sector(run.data, part=not s.official)
    generator = torch.Generator().manual_seed(run.seed)
    if s.training > len(found.y) or s.test > len(found.test_y):
        raise HeldinError(
            f"sector: {s.training} training and {s.test} test rows are asked for, but the data has "
            f"{len(found.y)} and {len(found.test_y)}"
        )
    rows = torch.randperm(len(found.y), generator=generator)[: s.training]
    tests = torch.randperm(len(found.test_y), generator=generator)[: s.test]
    held = s.training // 5
    train, held_rows = rows.split([s.training - held, held])
    own = train if held_out else rows
    used = found.x[own.numpy()]
    counts = torch.tensor(used.getnnz(axis=0))
    kept = counts.argsort(descending=True, stable=True)[: s.features].sort().values.numpy()
    values = used[:, kept].data
    scale = float((values.size / (values.astype("float64") ** 2).sum()) ** 0.5)

    def dense(x: Any, y: Tensor, chosen: Tensor) -> Rows:
        part, labels = x[chosen.numpy()][:, kept].tocsr(), y[chosen]

        def take(places: Tensor) -> tuple[Tensor, Tensor]:
            inputs = torch.from_numpy(part[places.numpy()].toarray()).mul_(scale)
            return inputs.to(run.device), labels[places].to(run.device)

        return take

    return Split(
        dense(found.x, found.y, own),
        len(own),
        dense(found.x, found.y, held_rows),
        held,
        dense(found.test_x, found.test_y, tests),
    )


def descend(run: Run, kind: str, rate: float, method: str) -> None:
    """Train with or without a validation set, the rule watching to the end."""
    s = run.settings
    data = split(run, held_out=method == "validation")
    widths = (s.features, CLASSES) if kind == "logistic" else (s.features, s.hidden, CLASSES)
    model = perceptron(widths, run.seed, s.std).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    log: Log | None = None
    rule: EvidenceStopping | ValidationStopping
    if method == "validation":
        rule = ValidationStopping(
            model,
            lambda: mean_loss(model, data.validation, data.held, 512),
            patience=s.steps,
            every=s.every,
            restore_best=False,
            history=2,
        )
    else:
        # what the log has seen is given to the rule, which needs not look again
        paper = Evidence.paper(smoothing=s.smoothing, check_every=2 * s.steps)
        rule = EvidenceStopping(model, paper)
        log = Log(model)
    everything: dict[str, Any] = {"model": model, "optimizer": optimizer, "rule": rule}
    if log is not None:
        everything["log"] = log
    with rule:
        for step in run.steps(s.steps, **everything):
            x, y = data.train(batch(step, data.rows, s.batch, run.seed))
            F.cross_entropy(model(x), y).backward()
            if log is not None and isinstance(rule, EvidenceStopping):
                rule.take(log.after(step))
            else:
                rule.step()
            if step == 1 or step % s.every == 0 or rule.stopped_step == step:
                run.note(step, test_loss=mean_loss(model, data.test, s.test, 512))
                if isinstance(rule, EvidenceStopping):
                    run.note(step, criterion=rule.criterion, raw=rule.evidence.criterion)
                elif step % s.every == 0:
                    run.note(step, validation_loss=rule.last_loss)
            optimizer.step()
            optimizer.zero_grad()
        found = rule.stopped_step if isinstance(rule, EvidenceStopping) else rule.best_step
        run.mark(found, "stop")
    if log is not None:
        run.arrays = log.arrays()
        log.close()


def _name(kind: str, rate: float, method: str) -> str:
    return f"{kind}, rate {rate:g}, {method}"


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """Each model at each rate with and without a validation set."""
    return {
        _name(kind, rate, method): {"kind": kind, "rate": rate, "method": method}
        for kind in MODELS
        for rate in settings.rates
        for method in ("validation", "evidence")
    }


def draw(results: Results, settings: Settings) -> Any:
    """Validation loss, test losses, criterion; columns: models and rates."""
    tables = next(iter(results.values()))
    titles = {"logistic": "logistic regression", "shallow": "shallow net"}
    return columns(
        [
            Column(
                f"{titles[kind]}, rate {rate:g}",
                tables[_name(kind, rate, "validation")],
                tables[_name(kind, rate, "evidence")],
            )
            for kind in MODELS
            for rate in settings.rates
        ]
    )


def _claims(settings: Settings, kind: str) -> list[Claim]:
    def worst(value: Any) -> Any:
        """Over the rates; nan, a rule that does not stop, is worst."""

        def largest(tables: Tables) -> float:
            found = [
                value(
                    tables[_name(kind, rate, "validation")], tables[_name(kind, rate, "evidence")]
                )
                for rate in settings.rates
            ]
            return float(torch.tensor(found).max())  # nan if one is

        return largest

    loss = "test_loss"
    return [
        Claim(
            f"{kind}: no real overfitting (test loss at the end / least on the path, worse rate)",
            "flattens out",
            worst(lambda held, own: last(own, loss) / least(own, loss)),
            most=NEAR,
        ),
        Claim(
            f"{kind}: evidence stops where the test loss has become flat (test loss at the stop / "
            "least on the path, worse rate)",
            "when it starts to flatten out",
            worst(lambda held, own: at(own, loss) / least(own, loss)),
            most=SLIGHT,
            beside=NEAR,
        ),
        Claim(
            f"{kind}: evidence beats validation (test losses at the stops, evidence / validation, "
            "worse rate)",
            "below 1",
            worst(lambda held, own: at(own, loss) / at(held, loss)),
            most=1.0,
        ),
        Claim(
            f"{kind}: training on all rows gives the lower test loss (least on the paths, all rows "
            "/ without the validation rows, worse rate)",
            "quite a large gap",
            worst(lambda held, own: least(own, loss) / least(held, loss)),
            most=0.999,
            form=".3f",
        ),
    ]


EXPERIMENT = Experiment(
    name="sector",
    title="Logistic regression and a shallow net on SECTOR",
    place="Sec. 3.5, Fig. sector",
    settings={
        "quick": Settings(),
        "full": Settings(
            steps=250_000,
            every=1000,
            features=FEATURES,
            training=6412,
            test=3207,
            hidden=200,
            rates=(0.03, 0.003),
            official=True,
        ),
    },
    parts=parts,
    run=descend,
    figure=draw,
    caption=("Rows as for MNIST. Columns: the two models, each at both rates."),
    claims=lambda settings: [c for kind in MODELS for c in _claims(settings, kind)],
    choices=(
        "Scaling: tf-idf rows times one number, so that the entries that are not zero have mean "
        "square 1. (With rows of length 1 and the paper's rates and steps the logistic regression "
        "has hardly begun to learn at the end.)",
        "Hidden units are ReLUs; initial weights normal with standard deviation 0.01, biases zero.",
        "Smoothing 0.9, the default of rules.Evidence.paper; each tensor is a group; words that "
        "do not occur in a batch are left out of the means.",
        "Validation's stop is the least validation loss of the whole run.",
    ),
    differs={
        "quick": "961 training and 865 test rows in the place of 6,412 and 3,207, the 2,000 most "
        "frequent features in the place of 55,197, 50 hidden units in the place of 200; learning "
        "rates 1 and 0.1 in the place of 0.03 and 0.003, as there are 1,500 steps and not 250,000.",
        "full": "Nothing.",
    },
    data="sector",
    readings=lambda settings: (SMOOTHING, START, DIVISION),
    left_out=(
        'Activation of the hidden units, scaling of the rows, and how "close to zero" weights '
        "start: each would need runs of its own, which were not made, as only a part of the data "
        "is at hand.",
    ),
)
