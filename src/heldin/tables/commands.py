"""What `heldin fit` and `heldin predict` do: models of tables, trained on every row."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from argparse import Namespace as Options
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
from sklearn.exceptions import ConvergenceWarning

from heldin.errors import HeldinError, HeldinWarning
from heldin.pages.live import Live
from heldin.sklearn import MLPClassifier, MLPRegressor

from .columns import Column, Columns, Unusable
from .model import TabularModel, Target
from .reading import SEPARATORS, read_table, refuse_missing
from .report import remarks, summary, write_report

__all__ = ["fit", "predict"]

READING = ("separator", "encoding", "decimal", "missing")  # options that describe a file
FORMULA = tuple("=+-@\t\r")  # what cells begin with that spreadsheets run as formulas
LINEAR = {"hidden_layer_sizes": (), "learning_rate_init": 0.01, "weight_decay": 0.0}


def fit(options: Options) -> int:
    """Train a model and write its folder."""
    hidden, path, out = _check(options), options.data, Path(options.out)
    frame = _read(path, options, options.id)
    rows, target, columns, time = _learn(frame, options)
    for remark in remarks(frame, columns, options.groups):
        print(f"heldin: {path}: {remark}", file=sys.stderr)
    if options.test:  # an error in it comes before training
        commas = [*columns.decimal_commas, *[target.name] * (target.decimal == ",")]
        test = _read(options.test, options, [*options.id, *commas])
        columns.encode(test, options.test)
    left_out, data = len(frame) - len(rows), columns.encode(rows, path)[0]
    targets = target.encode(rows[target.name])
    groups = None if options.groups is None else rows[options.groups].to_numpy()
    del frame, rows  # which may be large
    model = _train(options, hidden, target, columns, data, targets, groups, time)
    model.facts |= {
        "data": Path(path).name,
        "dropped_rows": left_out,
        "id": options.id,
        "groups": options.groups,
        "time": options.time,
        "reading": {name: getattr(options, name) for name in READING},
    }
    if options.test:
        measured, unknown = model.test(test, options.test)
        model.facts["test"] = measured | {"data": Path(options.test).name}
        _report_unknown(unknown, options.test)
    lines = list(summary(model))
    try:
        model.save(out)
        write_report(model, lines, out / "report.html")
    except OSError as error:
        raise HeldinError(f"--out: {out} cannot be written ({error})") from error
    print("\n".join(f"{name + ':':<16} {value}" for name, value in lines))
    print(f"Model and report.html are in {out}")
    return 0


def _check(options: Options) -> tuple[int, ...]:
    """Refuse options that are wrong for every table; return the sizes of the hidden layers."""
    try:
        hidden = tuple(int(part) for part in options.hidden.split(","))
    except ValueError:
        hidden = ()
    if not hidden or min(hidden) < 1:
        raise HeldinError(f"--hidden: expected sizes like 100 or 64,64, got {options.hidden!r}")
    if options.time is not None and options.groups is not None:
        raise HeldinError("--time: shadows are tested on later rows; leave --groups out")
    if options.max_epochs < 1:
        raise HeldinError(f"--max-epochs: must be at least 1, got {options.max_epochs}")
    if not 0 <= options.seed < 2**32:
        raise HeldinError(f"--seed: must be a whole number from 0 to 2^32 - 1, got {options.seed}")
    out = Path(options.out)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not options.force):
        raise HeldinError(f"--out: {out} is not an empty folder; name another, or say --force")
    return hidden


def _read(path: str, options: Options, texts: Sequence[str]) -> Any:
    """Read a table as the options describe it, and refuse one without the target."""
    frame = read_table(path, **{name: getattr(options, name) for name in READING}, texts=texts)
    refuse_missing(frame, [options.target], path, "the target column")
    return frame


def _learn(frame: Any, options: Options) -> tuple[Any, Any, Any, Any]:
    """Return the rows with a target, the target, the other columns, and the times of the rows."""
    path, name, time = options.data, options.target, None
    named = [("--drop", each) for each in options.drop] + [("--id", each) for each in options.id]
    named += [] if options.groups is None else [("--groups", options.groups)]
    asked = named + ([] if options.time is None else [("--time", options.time)])
    for option, column in asked:
        refuse_missing(frame, [column], path, f"{option}: the column")
        if column == name:
            raise HeldinError(f"{option}: {column!r} is the target")
    if options.groups is not None and frame[options.groups].isna().any():
        raise HeldinError(
            f"--groups: {options.groups!r} is missing in some rows; which belong together?"
        )
    present = frame[name].notna()
    if not present.any():
        raise HeldinError(f"{path}: the target {name!r} is missing in all rows")
    rows = frame if present.all() else frame[present].reset_index(drop=True)
    if len(rows) < 2:
        raise HeldinError(f"{path}: one row with a value of {name!r} is too few to learn from")
    leave_out, reading = [name, *(each for _, each in named)], (options.decimal, options.dates)
    try:
        target = Target.learn(rows[name], options.task, options.decimal)
        columns = Columns.learn(rows, leave_out, *reading, options.drop_unusable)
        if options.time is not None:
            learnt = Column.learn(options.time, rows[options.time], *reading)
            if learnt is None or learnt.missing or learnt.kind == "category":
                problem = "must hold a number or a date in every row"
                raise HeldinError(f"--time: {options.time!r} {problem}")
            time = learnt.measure(rows[options.time])
    except HeldinError as error:
        command = ""
        if isinstance(error, Unusable) and len(error.reasons) > 1:
            command = f":\n  {shlex.join(['heldin', *options.words, '--drop-unusable'])}"
        raise HeldinError(f"{path}: {error}{command}") from error
    return rows, target, columns, time


def _train(options: Options, hidden: tuple[int, ...], target: Any, *table: Any) -> Any:
    """Train with a progress bar, or lines, on stderr; `table` is for `TabularModel.fit`."""
    reached = 0
    live = Live(options.max_epochs, patient=True)

    def report(epoch: int, loss: float, status: str) -> None:
        nonlocal reached
        reached = epoch
        live.show(epoch, f"epoch {epoch} | loss {loss:.4g} | {status}")

    estimator = (MLPClassifier if target.task == "classification" else MLPRegressor)(
        **(LINEAR if options.model == "linear" else {"hidden_layer_sizes": hidden}),
        early_stopping=False if options.rule == "none" else options.rule,
        max_iter=options.max_epochs,
        random_state=options.seed,
        verbose=report,
    )
    try:
        with live, warnings.catch_warnings():  # the summary has what these warn of
            warnings.simplefilter("ignore", ConvergenceWarning)
            warnings.filterwarnings("ignore", ".*no better than a constant", HeldinWarning)
            return TabularModel.fit(estimator, target, *table)
    except KeyboardInterrupt:
        way_out = f". To end there with a model: --max-epochs {reached}" if reached else ""
        raise KeyboardInterrupt(f"after {reached} epochs; nothing was written{way_out}") from None


def _report_unknown(unknown: dict[str, int], path: str) -> None:
    for name, count in unknown.items():
        print(
            f"heldin: {path}: column {name!r}: {count} rows have a value that was not there in "
            "training; they are predicted as if it were none of those known",
            file=sys.stderr,
        )


def predict(options: Options) -> int:
    """Write the predictions of a model to stdout."""
    model = TabularModel.load(options.model)
    ids, reading = model.facts["id"], model.facts["reading"]
    separator = reading["separator"]
    if separator is not None and separator in SEPARATORS:
        separator = None  # other files may have another of the usual ones
    frame = read_table(
        options.data,
        separator=options.separator or separator,
        encoding=options.encoding,
        otherwise=reading["encoding"],
        decimal=options.decimal or reading["decimal"],
        missing=[*reading["missing"], *options.missing],
        texts=[*ids, *model.columns.decimal_commas],
    )
    refuse_missing(frame, ids, options.data, "the ID column")
    table, unknown = model.predict(frame, options.data)
    for place, name in enumerate(ids):
        table.insert(place, name, frame[name], allow_duplicates=True)
    _report_unknown(unknown, options.data)
    table = _escape_formulas(table, options.escape_formulas)
    try:
        table.to_csv(sys.stdout, index=False, lineterminator="\n", float_format="%.9g")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _escape_formulas(table: Any, escape: bool) -> Any:
    """Warn of cells that spreadsheets run as formulas, or escape them.

    Cells are written as they are by default, as pandas writes them: a changed label or ID would no
    longer equal the one in the user's own file. Numbers such as -5 are no formulas.
    """
    count = 0

    def escaped(cell: Any) -> Any:
        nonlocal count
        if not isinstance(cell, str) or not cell.startswith(FORMULA):
            return cell
        if not pandas.isna(pandas.to_numeric(cell, errors="coerce")):
            return cell
        count += 1
        return f"'{cell}"

    result = table.copy()
    for place, (_, values) in enumerate(table.items()):
        if values.dtype.kind not in "biuf":
            result.isetitem(place, values.map(escaped, na_action="ignore"))
    result.columns = result.columns.map(escaped)
    if count and not escape:
        print(
            f"heldin: {count} cells begin with = + - or @, which spreadsheets run as formulas; "
            "--escape-formulas writes ' before them",
            file=sys.stderr,
        )
    return result if escape else table
