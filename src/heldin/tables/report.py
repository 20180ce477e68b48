"""Report of `heldin fit`: one self-contained page of HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heldin.pages import Section, Table, csv_link, render
from heldin.pages.charts import Series, chart
from heldin.pages.predictions import prediction_sections
from heldin.state.estimates import EstimateHistory

from .summary import interval, number

__all__ = ["write_report"]


def _training(model: Any) -> Section:
    """Return the training loss of the epochs, and the curve of the rule."""
    losses, history, facts = model.facts["loss_curve"], model.history, model.facts
    epochs = list(range(1, len(losses) + 1))
    training = Series("training loss", epochs, losses, "soft")
    charts = [chart([training], "Training loss", "epoch", "training loss")]
    files = {"training.csv": csv_link({"epoch": epochs, "training_loss": losses})}
    columns = {} if history is None else history.columns()
    if isinstance(history, EstimateHistory):
        columns["low"], columns["high"] = zip(*model.bands, strict=True)
        name, steps, per_step = (
            "estimated test loss",
            columns["step"],
            facts["epochs"] / facts["steps"],
        )
        columns["epoch"] = [math.ceil(step * per_step) for step in steps]
        seen = Series("training loss", steps, columns["training_loss"], "soft")
        curve = Series(
            f"{name} with its 95 % interval", steps, columns["estimate"], "a",
            columns["low"], columns["high"],
        )  # fmt: skip
        marks = [] if history.best_step is None else [(float(history.best_step), "chosen")]

        def epoch(step: float) -> str:
            return f"epoch {math.ceil(step * per_step)}" if step > 0 else ""

        charts = [
            chart(
                [seen, curve],
                name,
                "step, and its epoch",
                "loss",
                steps=True,
                marks=marks,
                under=epoch,
            )
        ]
    elif history is not None and facts["rule"] == "evidence":
        series = [Series("criterion", columns["step"], columns["criterion"], "b")]
        charts.append(chart(series, "Criterion", "step", "criterion", signed=True))
    if history is not None:
        files["history.csv"] = csv_link(columns)
    return Section("Training", "", charts, (), files)


def _importance(model: Any) -> list[Section]:
    rises = model.facts.get("importance")
    if not rises:
        return []
    most = max(abs(rise) for rise, _ in rises.values()) or 1.0
    rows = [[name, number(rise), number(spread)] for name, (rise, spread) in rises.items()]
    shades = [[0.0, max(0.0, rise) / most, 0.0] for rise, _ in rises.values()]
    text = (
        "By how much the loss of out-of-fold rows rises when a column is shuffled. Of two columns "
        "that say the same, neither may seem to matter."
    )
    header = ["column", "rise of the loss", "standard deviation"]
    return [Section("Columns that matter", text, tables=[Table(header, rows, shades)])]


def _columns(model: Any) -> Section:
    """Return name, kind, encoding, and whether values were missing, for each column."""
    rows = []
    for column in model.columns.used:
        if column.kind == "number":
            encoding = f"mean {column.mean:.4g}, standard deviation {column.spread:.4g}"
        else:
            names = ", ".join(column.categories[:12])
            encoding = names + (", ..." if len(column.categories) > 12 else "")
        rows.append([column.name, column.kind, encoding, "yes" if column.missing else ""])
    return Section("Columns", tables=[Table(["column", "kind", "learnt", "missing values"], rows)])


def write_report(model: Any, lines: Sequence[tuple[str, str]], path: Path) -> None:
    """Write the page.

    Args:
        model: a `TabularModel` that has just been fitted.
        lines: the summary, as (name, value).
        path: of the page.
    """
    seen = model.out_of_fold
    sections = [
        Section("", tables=[Table([], lines)]),
        *_importance(model),
        *([] if seen is None else prediction_sections(seen)),
        _training(model),
        _columns(model),
        Section("Run", tables=[Table([], [*model.run, ("seed", str(model.facts["seed"]))])]),
    ]
    title = verdict = f"{model.target.name!r} from {model.facts['data']}"
    if "loss" in model.facts["scores"]:
        kind = "Log loss" if model.target.task == "classification" else "Squared error"
        title = f"{kind} {interval(model.facts['scores']['loss'])} on new rows"
    said = dict(lines)
    verdict = f"{verdict}: {said['rows']}; {said['stopped']}."
    render("page.html", title=title, verdict=verdict, sections=sections, advice=[]).save(path)
