"""What `heldin fit` says: remarks on a table, the summary of a model, and its page of HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from heldin.crossval import Interval
from heldin.pages import Section, Table, csv_link, render
from heldin.pages.charts import Series, chart
from heldin.pages.predictions import Predictions, prediction_sections
from heldin.state.estimates import EstimateHistory

from .columns import Columns
from .model import TabularModel

__all__ = ["looks_like_id", "remarks", "summary", "write_report"]

SCORES = {"loss": "estimate", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE", "r2": "R2"}
FEW_ROWS = 20  # rows below which an estimate means little
MANY_VALUES = 20  # categories from which rows may be grouped by them
ID_NAME = re.compile(r"(^|[_\W])(id|uuid|guid|key|index|nr|number)$|Id$|ID$")

Line = tuple[str, str]


def looks_like_id(name: str, values: Any) -> bool:
    """Return whether a column has unique whole numbers that count up, or the name of an ID."""
    present = values.dropna()
    if len(present) < 20 or present.dtype.kind not in "iu" or not present.is_unique:
        return False
    return bool((present.diff().dropna() == 1).all()) or ID_NAME.search(name) is not None


def remarks(frame: Any, columns: Columns, groups: str | None) -> Iterator[str]:
    """Yield a remark for everything in a table that is odd and no error."""
    if all(name.replace(".", "", 1).isdigit() for name in frame.columns):
        names = ", ".join(frame.columns[:4])
        yield f"all names in the header are numbers ({names}); is it a row, and the header missing?"
    for column in columns.used:
        if column.kind == "number" and looks_like_id(column.name, frame[column.name]):
            yield (
                f"column {column.name!r} is different in every row and looks like an ID, from "
                f"which nothing can be learnt; --id {column.name!r} keeps it for the predictions "
                f"only, --drop {column.name!r} leaves it out"
            )
        many = len(column.categories)
        if groups is None and MANY_VALUES < many > len(frame) / 20:
            yield (
                f"column {column.name!r} has {many} different values in {len(frame)} rows; if new "
                "rows will have other ones (other patients, other machines), the estimate is too "
                f"good: --groups {column.name!r}"
            )


# -- the summary


def summary(model: TabularModel) -> Iterator[Line]:
    """Yield the (name, value) lines to print after training."""
    facts, columns, target = model.facts, model.columns, model.target
    classes = target.task == "classification"
    kind = "log loss" if classes else "squared error"
    tested = "" if facts["time"] is None else f"; tested in the order of {facts['time']!r}"
    yield "rows", f"{facts['rows']}, all of them trained on{tested}; numbered from 1"
    if facts["dropped_rows"]:
        yield "left out", f"{facts['dropped_rows']} without a value of {target.name!r}"
    if facts["copies"]:
        yield (
            "copies",
            f"{facts['copies']} rows repeat another one in every column; copies share a fold, "
            "so that no shadow is tested on a row that it has seen",
        )
    yield "columns", f"{len(columns.used)}, as {facts['inputs']} inputs"
    if columns.unusable:
        names = ", ".join(map(repr, columns.unusable))
        yield "unusable", f"{names}: left out, as --drop-unusable says"
    if columns.constant:
        names = ", ".join(map(repr, columns.constant))
        yield "constant", f"{names}: the same in all rows, not used"
    yield "target", f"{target.name!r}, {target.task} ({target.why})"
    yield "rule", facts["rule"] + (f" ({facts['choice']})" if facts["choice"] else "")
    yield "stopped", _stopped(facts)
    yield "training loss", f"{number(facts['training_loss'])} ({kind})"
    yield from _estimates(facts, kind)
    test = facts.get("test")
    said = "none: no row was held out, so no loss was measured; --test FILE measures one"
    if test is not None:
        score = f"{'accuracy' if classes else 'R2'} {test['score']:.3f}"
        rows = f"{test['rows']} rows of {test['data']}"
        said = f"{kind} {interval(test['interval'])}, {score} on {rows}"
    yield "test", said


def _stopped(facts: Any) -> str:
    """Return when training ended, and which weights are kept."""
    epochs = facts["epochs"]
    best = -(-facts["best_step"] * epochs // facts["steps"])  # the epoch that the step lies in
    end = f"stopped at epoch {epochs}"
    if not facts["stopped"]:
        end = f"not stopped: the limit of {epochs} epochs came first"
    if facts["estimate"] is not None:
        end += f"; best at epoch {best}"
    reason = f" ({facts['reason']})" if facts["reason"] else ""
    return f"{end}, {facts['steps']:,} steps in all{reason}"


def number(value: float) -> str:
    """Return a number in four digits, or all of those before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def interval(ends: Any) -> str:
    """Return an estimate with its interval, without powers of ten."""
    value, low, high = ends
    if abs(value) < 1000 or math.isnan(low):
        return number(value) if math.isnan(low) else str(Interval(value, low, high))
    return f"{number(value)} [{low:,.0f}, {high:,.0f}]"


def _estimates(facts: Any, kind: str) -> Iterator[Line]:
    """Yield the estimates for new rows, with 95 % intervals."""
    constants = {"loss": facts["constant"], "accuracy": facts.get("most_frequent")}
    for name, score in facts["scores"].items():
        constant = constants.get(name)
        usual = "" if constant is None else f"; {number(constant)} for a constant prediction"
        said = f"{kind} {interval(score)}" if name == "loss" else interval(score)
        yield SCORES[name], f"{said} on new rows{usual}"
    if facts["temperature"] == math.inf:
        yield (
            "warning",
            "on rows that were not trained on the model was no better than a constant, which it "
            "predicts now; do the columns tell anything about the target?",
        )
    if facts["scores"] and facts["rows"] < FEW_ROWS:
        yield "warning", f"{facts['rows']} rows are too few for the estimate to mean much"


# -- the page


def write_report(model: TabularModel, lines: Sequence[Line], path: Path) -> None:
    """Write the page of a model that has just been fitted; `lines` are its summary."""
    facts, said, rows = model.facts, dict(lines), []
    for column in model.columns.used:
        names = ", ".join(column.categories[:12]) + ", ..." * (len(column.categories) > 12)
        if column.kind == "number":
            names = f"mean {column.mean:.4g}, standard deviation {column.spread:.4g}"
        rows.append([column.name, column.kind, names, "yes" if column.missing else ""])
    columns = Table(["column", "kind", "learnt", "missing values"], rows)
    run = [*model.estimator._facts, ("seed", str(facts["seed"]))]
    sections = [
        Section("", tables=[Table([], lines)]),
        *_importance(facts["importance"]),
        *_out_of_fold(model),
        _training(model),
        Section("Columns", tables=[columns]),
        Section("Run", tables=[Table([], run)]),
    ]
    title = verdict = f"{model.target.name!r} from {facts['data']}"
    if "loss" in facts["scores"]:
        kind = "Log loss" if model.target.task == "classification" else "Squared error"
        title = f"{kind} {interval(facts['scores']['loss'])} on new rows"
    verdict = f"{verdict}: {said['rows']}; {said['stopped']}."
    render("page.html", title=title, verdict=verdict, sections=sections, advice=[]).save(path)


def _importance(rises: Any) -> list[Section]:
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


def _out_of_fold(model: TabularModel) -> list[Section]:
    """Return the sections about out-of-fold predictions; rows count from 1."""
    if model.estimator.oof_predictions_ is None:
        return []
    record = model.estimator.record()
    rows, truth = (record.rows + 1).tolist(), record.targets.tolist()
    losses, predicted = record.row_losses.tolist(), record.outputs.tolist()
    if model.target.task == "regression":
        return prediction_sections(Predictions(rows, truth, losses, (), predicted))
    classes = model.target.classes
    return prediction_sections(Predictions(rows, truth, losses, predicted, (), classes))


def _training(model: TabularModel) -> Section:
    """Return the training loss of the epochs, and the curve of the rule."""
    facts, history = model.facts, model.estimator.history_
    losses, per_step = facts["loss_curve"], facts["epochs"] / facts["steps"]
    epochs = list(range(1, len(losses) + 1))
    training = Series("training loss", epochs, losses, "soft")
    charts = [chart([training], "Training loss", "epoch", "training loss")]
    files = {"training.csv": csv_link({"epoch": epochs, "training_loss": losses})}
    columns = {} if history is None else history.columns()
    if isinstance(history, EstimateHistory):
        columns["low"], columns["high"] = zip(*model.estimator._bands(), strict=True)
        name, steps = "estimated test loss", columns["step"]
        columns["epoch"] = [math.ceil(step * per_step) for step in steps]
        seen = Series("training loss", steps, columns["training_loss"], "soft")
        band, ends = f"{name} with its 95 % interval", (columns["low"], columns["high"])
        curve = Series(band, steps, columns["estimate"], "a", *ends)
        marks = [] if history.best_step is None else [(float(history.best_step), "chosen")]

        def epoch(step: float) -> str:
            return f"epoch {math.ceil(step * per_step)}" if step > 0 else ""

        axis = "step, and its epoch"
        charts = [chart([seen, curve], name, axis, "loss", steps=True, marks=marks, under=epoch)]
    elif facts["rule"] == "evidence":
        series = [Series("criterion", columns["step"], columns["criterion"], "b")]
        charts.append(chart(series, "Criterion", "step", "criterion", signed=True))
    if history is not None:
        files["history.csv"] = csv_link(columns)
    return Section("Training", "", charts, (), files)
