"""`heldin fit` and `heldin predict`: models of tables, trained on every row."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError, HeldinWarning

__all__ = ["fit", "predict"]

Options = argparse.Namespace
READING = ("separator", "encoding", "decimal", "missing")  # options that describe a file
LINEAR = {"hidden_layer_sizes": (), "learning_rate_init": 0.01, "weight_decay": 0.0}


def fit(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `heldin fit`."""
    add = parser.add_argument
    add("data", help="CSV or Parquet file: one row per example, with a header")
    add("--target", required=True, help="the column to predict")
    add("--out", required=True, help="folder for the model and its report")
    models = ["mlp", "linear"]
    add("--model", choices=models, default="mlp", help="a network (default) or no layers")
    tasks = ["auto", "classification", "regression"]
    add("--task", choices=tasks, default="auto", help="default: by the target")
    add("--test", metavar="FILE", help="other rows, to measure the loss on new data")
    rules = ["auto", "folds", "evidence", "validation", "none"]
    add("--rule", choices=rules, default="auto", help="what stops training (default auto)")
    add("--hidden", default="100", help="sizes of hidden layers, as 100 or 64,64 (default 100)")
    several: dict[str, Any] = {"action": "append", "default": [], "metavar": "COLUMN"}
    add("--drop", **several, help="leave it out; may be repeated")
    add("--drop-unusable", action="store_true", help="leave out all columns that cannot be used")
    add("--id", **several, help="written beside the predictions, no input; may be repeated")
    add("--groups", metavar="COLUMN", help="no input; rows with the same value belong together")
    add("--time", metavar="COLUMN", help="order of the rows: shadows are tested on later ones")
    orders, first = ["auto", "dmy", "mdy"], "day or month first, where the dates do not tell"
    add("--dates", choices=orders, default="auto", help=first)
    limit = "a limit that the rule should not reach (default 2000)"
    add("--max-epochs", type=int, default=2000, help=limit)
    add("--seed", type=int, default=0, help="of first weights and orders (default 0)")
    add("--force", action="store_true", help="write into a folder that is not empty")
    _add_reading(parser)
    parser.epilog = "Example: heldin fit houses.csv --target price --id address --out model"
    parser.set_defaults(run=run_fit)


def predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `heldin predict`."""
    add = parser.add_argument
    add("model", help="folder that `heldin fit` wrote")
    add("data", help="CSV or Parquet file with the same columns")
    escape = "write ' before cells that a spreadsheet would run as a formula"
    add("--escape-formulas", action="store_true", help=escape)
    _add_reading(parser)
    parser.epilog = "Example: heldin predict model new.csv > predictions.csv"
    parser.set_defaults(run=run_predict)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--separator", help="between the fields of a CSV file; by default found in it")
    add("--encoding", help="of a CSV file; by default UTF-8, or what its first bytes say")
    add("--decimal", choices=[".", ","], help="before decimals; by default found in each column")
    missing = "means a missing value"
    add("--missing", action="append", default=[], metavar="TEXT", help=missing)


@contextmanager
def _needs_extras() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        name = (error.name or str(error)).partition(".")[0]
        raise HeldinError(f"{name} is not installed; pip install 'heldin[fit]'") from error


def run_fit(options: Options) -> int:
    """Train a model and write its folder."""
    with _needs_extras():  # before training, not after it
        import jinja2  # noqa: F401
        import safetensors  # noqa: F401

        from heldin.tables.report import remarks, summary, write_report
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
    from heldin.tables.reading import read_table, refuse_missing

    frame = read_table(path, **{name: getattr(options, name) for name in READING}, texts=texts)
    refuse_missing(frame, [options.target], path, "the target column")
    return frame


def _learn(frame: Any, options: Options) -> tuple[Any, Any, Any, Any]:
    """Return the rows with a target, the target, the other columns, and the times of the rows."""
    from heldin.tables.columns import Column, Columns, Unusable
    from heldin.tables.model import Target
    from heldin.tables.reading import refuse_missing

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
    from sklearn.exceptions import ConvergenceWarning

    from heldin.pages.live import Live
    from heldin.sklearn import MLPClassifier, MLPRegressor
    from heldin.tables.model import TabularModel

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


def run_predict(options: Options) -> int:
    """Write the predictions of a model to stdout."""
    with _needs_extras():
        import safetensors  # noqa: F401

        from heldin.tables.model import TabularModel
        from heldin.tables.reading import SEPARATORS, read_table, refuse_missing
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
    import pandas

    count = 0

    def escaped(values: Any) -> Any:
        nonlocal count
        texts = values.astype("string")
        formulas = texts.str.match(r"[=+\-@\t\r]").fillna(False)
        formulas &= pandas.to_numeric(texts, errors="coerce").isna()
        count += int(formulas.sum())
        return texts.where(~formulas, "'" + texts)

    result = table.copy()
    for place, (_, values) in enumerate(table.items()):
        if values.dtype.kind not in "biuf":
            result.isetitem(place, escaped(values))
    result.columns = escaped(pandas.Series(table.columns))
    if count and not escape:
        print(
            f"heldin: {count} cells begin with = + - or @, which spreadsheets run as formulas; "
            "--escape-formulas writes ' before them",
            file=sys.stderr,
        )
    return result if escape else table
