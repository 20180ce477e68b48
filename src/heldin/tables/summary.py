"""Remarks on a table before training, and the summary of a model after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .number_formats import looks_like_id

__all__ = ["remarks", "summary"]

SCORES = {"accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE", "r2": "R2"}
FEW_ROWS = 20  # rows below which an estimate means little
MANY_VALUES = 20  # categories from which rows may be grouped by them

Line = tuple[str, str]


def remarks(frame: Any, columns: Any, groups: str | None) -> Iterator[str]:
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


def summary(model: Any) -> list[Line]:
    """Return the (name, value) lines to print after training."""
    return list(_lines(model))


def _lines(model: Any) -> Iterator[Line]:
    facts, target, columns = model.facts, model.target, model.columns
    classes = target.task == "classification"
    kind = "log loss" if classes else "squared error"
    tested = "" if facts["time"] is None else f"; tested in the order of {facts['time']!r}"
    yield "rows", f"{facts['rows']}, all of them trained on{tested}"
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
    yield "steps", f"{facts['steps']} in {facts['epochs']} epochs"
    yield "stopped", ("" if facts["stopped"] else "limit of epochs reached; ") + facts["reason"]
    yield "training loss", f"{facts['training_loss']:.4g} ({kind})"
    yield from _estimates(facts)
    if "test" in facts:
        test, score = facts["test"], "accuracy" if classes else "R2"
        yield (
            "test",
            f"{kind} {test['loss']:.4g}, standard error {test['error']:.2g}, {score} "
            f"{test['score']:.3f} on {test['rows']} rows of {test['data']}",
        )
    else:
        yield "test", "none: no row was held out, so no loss was measured; --test FILE measures one"


def _estimates(facts: Any) -> Iterator[Line]:
    """Yield the estimates for new rows."""
    if facts["estimate"] is not None:
        yield (
            "estimate",
            f"{facts['estimate']:.4g} on new rows, standard error "
            f"{facts['standard_error']:.2g}; {facts['constant']:.4g} if it always said the same",
        )
    for name, (value, low, high) in facts["scores"].items():
        usual = ""
        if name == "accuracy":
            usual = f"; {facts['most_frequent']:.4g} by always saying the most frequent class"
        interval = f"95 % interval {low:.4g} to {high:.4g}"
        yield SCORES[name], f"{value:.4g} on new rows, {interval}{usual}"
    if facts["shrinkage"] == 1:
        yield (
            "warning",
            "on rows that were not trained on the model was no better than a constant, which it "
            "predicts now; do the columns tell anything about the target?",
        )
    if facts["estimate"] is not None and facts["rows"] < FEW_ROWS:
        yield (
            "warning",
            f"{facts['rows']} rows are too few for the estimate and its standard error to mean "
            "much",
        )
