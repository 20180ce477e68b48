"""What there is to say about a table before training, and about a model after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from heldin.state.estimates import COVERAGE

from .written import looks_like_id

__all__ = ["remarks", "summary"]

SCORES = {"accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE", "r2": "R2"}
FEW_ROWS = 20  # below which an estimate says next to nothing
MANY_VALUES = 20  # of a category, from which its rows may belong together

Line = tuple[str, str]


def remarks(frame: Any, columns: Any, groups: str | None) -> Iterator[str]:
    """What looks odd in a table and is no error."""
    if all(_is_written_number(name) for name in frame.columns):
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


def _is_written_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def summary(model: Any) -> list[Line]:
    """What there is to say at the end, as (name, value)."""
    facts, target = model.facts, model.target
    kind = "log loss" if target.task == "classification" else "squared error"
    lines = [("rows", f"{facts['rows']}, all of them trained on")]
    if facts["dropped_rows"]:
        lines.append(("left out", f"{facts['dropped_rows']} without a value of {target.name!r}"))
    columns = model.columns
    lines.append(("columns", f"{len(columns.used)}, as {facts['inputs']} inputs"))
    if columns.unusable:
        lines.append(
            ("unusable", f"{_listed(columns.unusable)}: left out, as --drop-unusable says")
        )
    if columns.constant:
        lines.append(("constant", f"{_listed(columns.constant)}: the same in all rows, not used"))
    lines.append(("target", f"{target.name!r}, {target.task} ({target.found})"))
    chosen = f" ({facts['choice']})" if facts["choice"] else ""
    lines.append(("rule", f"{facts['rule']}{chosen}"))
    lines.append(("steps", f"{facts['steps']} in {facts['epochs']} epochs"))
    limit = "" if facts["stopped"] else "limit of epochs reached; "
    lines.append(("stopped", limit + facts["reason"]))
    lines.append(("training loss", f"{facts['training_loss']:.4g} ({kind})"))
    lines += _estimates(facts)
    if "test" in facts:
        test = facts["test"]
        score = "accuracy" if target.task == "classification" else "R2"
        lines.append(
            (
                "test",
                f"{kind} {test['loss']:.4g}, standard error {test['error']:.2g}, {score} "
                f"{test['score']:.3f} on {test['rows']} rows of {test['data']}",
            )
        )
    else:
        lines.append(
            ("test", "none: no row was held out, so no loss was measured; --test FILE measures one")
        )
    return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _estimates(facts: Any) -> Iterator[Line]:
    """What to expect on new rows."""
    if facts["estimate"] is not None:
        together = f" for all {facts['members']} networks together" if facts["members"] > 1 else ""
        covered = ""
        if not facts["scores"]:  # the rule by itself, of which the study was
            share = COVERAGE[facts["rule"]][2]
            covered = f" (two of them covered {share:.0%} in our study)"
        yield (
            "estimate",
            f"{facts['estimate']:.4g} on new rows{together}, standard error "
            f"{facts['standard_error']:.2g}{covered}; {facts['constant']:.4g} if it always said "
            "the same",
        )
    for name, (value, low, high) in facts["scores"].items():
        usual = ""
        if name == "accuracy":
            usual = f"; {facts['most_frequent']:.4g} by always saying the most frequent class"
        yield (
            SCORES[name],
            f"{value:.4g} on new rows, 95 % interval {low:.4g} to {high:.4g}{usual}",
        )
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
