"""Remarks on a table before training, and the summary of a model after it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from heldin.crossval import Interval

from .number_formats import looks_like_id

__all__ = ["interval", "number", "remarks", "summary"]

SCORES = {"loss": "estimate", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE", "r2": "R2"}
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
    if "test" in facts:
        test, score = facts["test"], "accuracy" if classes else "R2"
        yield (
            "test",
            f"{kind} {interval(test['interval'])}, {score} {test['score']:.3f} on {test['rows']} "
            f"rows of {test['data']}",
        )
    else:
        yield "test", "none: no row was held out, so no loss was measured; --test FILE measures one"


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
    """Return a number in four digits, or all of those before the point.

    >>> number(23970.4), number(0.39861)
    ('23,970', '0.3986')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def interval(ends: Any) -> str:
    """Return an estimate with its interval, without powers of ten.

    >>> interval([23970.4, 20111.0, 31000.0]), interval([0.4, 0.31, 0.53])
    ('23,970 [20,111, 31,000]', '0.40 [0.31, 0.53]')
    """
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
