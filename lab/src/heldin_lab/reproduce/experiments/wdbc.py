"""Sec. 3.3: logistic regression on the Wisconsin breast cancer data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heldin_lab.reproduce import data as _data
from heldin_lab.reproduce.experiment import NEAR, SLIGHT, Claim, Experiment, Results, Tables
from heldin_lab.reproduce.figures import Column, columns
from heldin_lab.reproduce.readings import DIVISION, SMOOTHING, START, Choice, Value
from heldin_lab.reproduce.run import Run
from heldin_lab.reproduce.tables import at, last, least, step_of
from heldin_lab.rules import Evidence, EvidenceStopping, ValidationStopping

__all__ = ["EXPERIMENT"]


@dataclass(frozen=True)
class Settings:
    """Of the split and the descent."""

    seeds: int = 5
    steps: int = 4000
    every: int = 10  # steps between records
    test: int = 369
    validation: int = 60  # of the 200 others, in the run that has a validation set
    rate: float = 0.01
    smoothing: float = 0.9


METHODS = ("validation", "evidence")
CHOICES = (
    Choice(
        "scaling",
        "Whether the inputs are scaled to mean 0 and variance 1, and when.",
        (
            Value("before and after", "both the 30 inputs and the 495 features", "both"),
            Value("before", "the inputs, and then the expansion", "before"),
            Value("after", "the features that the classifier sees", "after"),
        ),
        replayed=False,
    ),
    Choice(
        "rows of the scaling",
        "By which rows means and variances are computed.",
        (
            Value("trained on", "nothing is known of the others", "train"),
            Value("all 569", "a table that comes scaled, as is common", "all"),
        ),
        replayed=False,
    ),
    Choice(
        "initial weights",
        "Where the weights start.",
        (
            Value("zero", "usual for logistic regression", 0.0),
            Value("small", '"small", as Sec. 3.2 says of weights: normal, deviation 0.01', 0.01),
            Value("0.1", "normal, deviation 0.1", 0.1),
        ),
        replayed=False,
    ),
    Choice(
        "rate",
        "The learning rate.",
        (
            Value("0.01", "that of gradient descent on MNIST", 0.01),
            Value("0.001", "a tenth of it", 0.001),
        ),
        replayed=False,
    ),
    Choice(
        "length",
        "How many steps are made.",
        (
            Value("4000", "the criterion has crossed zero long before", 4000),
            Value("1000", "a quarter", 1000),
            Value("10000", "more than twice as many", 10_000),
        ),
    ),
    SMOOTHING,
    START,
    replace(DIVISION, values=(DIVISION.values[0], *DIVISION.values[2:])),  # 0/0 does not occur
)


def expand(x: Tensor) -> Tensor:
    """All inputs, squares and products; with the bias these are 496 weights.

    >>> expand(torch.tensor([[2.0, 3.0]]))
    tensor([[2., 3., 4., 6., 9.]])
    """
    rows, columns = torch.triu_indices(x.shape[1], x.shape[1])
    return torch.cat([x, x[:, rows] * x[:, columns]], 1)


def standard(x: Tensor, others: list[Tensor]) -> list[Tensor]:
    """All tables, scaled so that the columns of the first have mean 0 and variance 1."""
    mean, std = x.mean(0), x.std(0)
    return [(each - mean) / std for each in (x, *others)]


def descend(run: Run, method: str) -> None:
    """Gradient descent, with 60 rows held out for validation or on all 200."""
    s = run.settings
    x, y = _data.wdbc()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(run.seed))
    held = s.validation if method == "validation" else 0
    split = [len(x) - s.test - held, held, s.test]
    rows = order.split(split)
    inputs = standard(x[rows[0]], [x[rows[1]], x[rows[2]]])
    inputs = [expand(each) for each in inputs]
    train, val, test = standard(inputs[0], inputs[1:])
    train_y, val_y, test_y = (y[each] for each in rows)
    model = nn.utils.skip_init(nn.Linear, train.shape[1], 1, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=s.rate)

    def loss(inputs: Tensor, answers: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(inputs)[:, 0], answers)

    rule: EvidenceStopping | ValidationStopping
    if held:
        rule = ValidationStopping(
            model,
            lambda: loss(val, val_y),
            patience=s.steps,
            every=s.every,
            restore_best=False,
            history=2,
        )
    else:
        rule = EvidenceStopping(model, Evidence.paper(smoothing=s.smoothing))
    with rule:
        for step in run.steps(s.steps, model=model, optimizer=optimizer, rule=rule):
            trained = loss(train, train_y)
            trained.backward()
            rule.step()
            if step == 1 or step % s.every == 0 or rule.stopped_step == step:
                with torch.no_grad():
                    run.note(
                        step,
                        train_loss=float(trained.detach()),
                        test_loss=float(loss(test, test_y)),
                    )
                if isinstance(rule, EvidenceStopping):
                    run.note(step, criterion=rule.criterion, raw=rule.evidence.criterion)
                elif step % s.every == 0:
                    run.note(step, validation_loss=rule.last_loss)
            optimizer.step()
            optimizer.zero_grad()
        found = rule.stopped_step if isinstance(rule, EvidenceStopping) else rule.best_step
        run.mark(found, "stop")


def draw(results: Results, settings: Settings) -> Any:
    """Validation loss, test losses, criterion."""
    tables = next(iter(results.values()))
    held = tables["validation"]
    if at(held, "validation_loss") == last(held, "validation_loss"):
        held = held.assign(stop=0.0)  # the loss fell to the end: no stop, as in the paper
    return columns([Column("logistic regression, WDBC", held, tables["evidence"])])


def claims(settings: Settings) -> list[Claim]:
    """An acceptable stop, against validation at its best."""

    def near(tables: Tables) -> float:
        return at(tables["evidence"], "test_loss") / least(tables["evidence"], "test_loss")

    def against(tables: Tables) -> float:
        return at(tables["evidence"], "test_loss") / least(tables["validation"], "test_loss")

    def turns(tables: Tables) -> float:
        held = tables["validation"]
        return last(held, "validation_loss") / least(held, "validation_loss")

    def throughout(tables: Tables) -> float:
        own, held = (tables[name].set_index("step").test_loss for name in METHODS[::-1])
        return float((own / held).max())  # at the steps that both have recorded

    def early(tables: Tables) -> float:
        own = tables["evidence"]
        return step_of(own) / float(own.step[own.test_loss.idxmin()])

    return [
        Claim(
            "evidence stops in an acceptable region (test loss at the stop / least on its path)",
            "not optimal but acceptable",
            near,
            most=SLIGHT,
            beside=NEAR,
        ),
        Claim(
            "its test loss is lower than any on the path of the validation split "
            "(at the stop / least on that path)",
            "below 1",
            against,
            most=1.0,
        ),
        Claim(
            "the validation loss falls to the end: no stop (at the end / least)",
            "1, no stop",
            turns,
            most=1.001,
            form=".3f",
        ),
        Claim(
            "training on all 200 rows gives lower test losses throughout (largest ratio of the "
            "test losses of both runs at the same step)",
            "lower throughout",
            throughout,
            most=1.001,
            form=".3f",
        ),
        Claim(
            "evidence stops early (step of the stop / step of the least test loss)",
            "slightly early",
            early,
            most=0.999,
            form=".3f",
        ),
    ]


def parts(settings: Settings) -> Mapping[str, Mapping[str, Any]]:
    """With and without a validation set."""
    return {method: {"method": method} for method in METHODS}


EXPERIMENT = Experiment(
    name="wdbc",
    title="Logistic regression on WDBC",
    place="Sec. 3.3, Fig. logreg",
    settings={"quick": Settings(), "full": Settings(seeds=20, steps=20_000, every=20)},
    parts=parts,
    run=descend,
    figure=draw,
    caption=(
        "Top: validation loss of the run on 140 rows (no bar: it falls to the end). Middle: "
        "test loss of that run (red) and of the run on 200 rows (blue). Bottom: the "
        "criterion, smoothed and raw, and the stop (bar)."
    ),
    claims=claims,
    choices=(
        "Inputs are scaled to mean 0 and variance 1 before and after the expansion, by the rows "
        "trained on; start at zero; learning rate 0.01; the split is drawn anew for each seed.",
        "Smoothing 0.9, the default of rules.Evidence.paper; double precision.",
        "The least validation loss of the whole run counts as validation's stop; if that is the "
        "last one, there was none.",
    ),
    readings=lambda settings: CHOICES,
    left_out=(
        "Which rows are held out: the seeds vary that.",
        "0/0 read as 0: no variance is zero here, so that it is the same as left out.",
        "Whether the criterion is smoothed as a whole or group by group: both are the same.",
    ),
)
