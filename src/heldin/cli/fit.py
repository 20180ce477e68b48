"""`heldin fit` and `heldin predict`: tables in, predictions out, no row held out."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError, HeldinWarning
from heldin.tables.trainer import RULE_NAMES

__all__ = ["fit", "predict"]

Options = argparse.Namespace
READING = ("separator", "encoding", "decimal", "missing")  # how a file is written, if it was said


def fit(parser: argparse.ArgumentParser) -> None:
    """Train a model on all rows of a table; nothing is held out to know when to stop."""
    parser.add_argument("data", help="CSV or Parquet file: one row per example, with a header")
    parser.add_argument("--target", required=True, help="the column to predict")
    parser.add_argument("--out", required=True, help="folder for the model and its report")
    parser.add_argument(
        "--model", choices=["mlp", "linear"], default="mlp", help="a network (default) or no layers"
    )
    parser.add_argument(
        "--task",
        choices=["auto", "classification", "regression"],
        default="auto",
        help="by default found out from the target",
    )
    parser.add_argument(
        "--test", metavar="FILE", help="other rows, to measure the loss on new data"
    )
    parser.add_argument(
        "--rule", choices=[*RULE_NAMES, "none"], default="auto", help="what stops training"
    )
    parser.add_argument(
        "--committee",
        type=int,
        help="networks that predict together (default: 6, up to 100 rows 11; 1: one alone)",
    )
    parser.add_argument("--hidden", default="100", help="sizes of hidden layers (default 100)")
    parser.add_argument(
        "--drop", action="append", default=[], metavar="COLUMN", help="leave it out"
    )
    parser.add_argument(
        "--drop-unusable", action="store_true", help="leave out all columns that cannot be used"
    )
    parser.add_argument(
        "--id",
        action="append",
        default=[],
        metavar="COLUMN",
        help="no input; it is written beside the predictions",
    )
    parser.add_argument(
        "--groups", metavar="COLUMN", help="no input; rows with the same value belong together"
    )
    parser.add_argument(
        "--dates",
        choices=["auto", "dmy", "mdy"],
        default="auto",
        help="day or month first, where the dates do not tell",
    )
    parser.add_argument(
        "--max-epochs", type=int, default=2000, help="a limit that the rule should not reach"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of first weights and orders (default 0)"
    )
    parser.add_argument(
        "--force", action="store_true", help="write into a folder that is not empty"
    )
    _reading(parser)
    parser.set_defaults(run=run_fit)


def predict(parser: argparse.ArgumentParser) -> None:
    """Predict the rows of a table with a model of `heldin fit`; CSV to stdout."""
    parser.add_argument("model", help="folder that `heldin fit` wrote")
    parser.add_argument("data", help="CSV or Parquet file with the same columns")
    _reading(parser)
    parser.set_defaults(run=run_predict)


def _reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--separator", help="between the fields of a CSV file; by default found in it"
    )
    parser.add_argument(
        "--encoding", help="of a CSV file; by default UTF-8, or what its first bytes say"
    )
    parser.add_argument(
        "--decimal", choices=[".", ","], help="before decimals; by default found in each column"
    )
    parser.add_argument(
        "--missing", action="append", default=[], metavar="TEXT", help="means a missing value"
    )


@contextmanager
def _needs_extras() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        name = (error.name or str(error)).partition(".")[0]
        raise HeldinError(f"{name} is not installed; pip install 'heldin[fit]'") from error


@dataclass(frozen=True, eq=False)
class Prepared:
    """A table, as it is trained on."""

    inputs: Any
    targets: Any
    columns: Any
    target: Any
    decimals: Any
    groups: Any
    without_target: int


def run_fit(options: Options) -> int:
    """The command."""
    with _needs_extras():
        import jinja2  # noqa: F401  (missing ones are said before the training, not after)
        import matplotlib  # noqa: F401
        import pandas  # noqa: F401
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import sklearn  # noqa: F401

        from heldin.tables.report import write_report
        from heldin.tables.summary import summary
    hidden = _check(options)
    out = Path(options.out)
    table = _prepare(options)
    test = _read_test(table, options) if options.test else None
    model = _train(table, options, hidden)
    model.facts |= {
        "data": Path(options.data).name,
        "dropped_rows": table.without_target,
        "id": options.id,
        "groups": options.groups,
        "reading": {name: getattr(options, name) for name in READING},
    }
    if test is not None:
        model.facts["test"] = model.test(test, options.test) | {"data": Path(options.test).name}
        _say_unknown(table.columns.encode(test, options.test)[1], options.test)
    lines = summary(model)
    try:
        model.save(out)
        write_report(model, lines, out / "report.html")
    except OSError as error:
        raise HeldinError(f"--out: {out} cannot be written ({error})") from error
    print("\n".join(f"{name + ':':<16} {value}" for name, value in lines))
    print(f"Model and report.html are in {out}")
    return 0


def _check(options: Options) -> tuple[int, ...]:
    """Options that are wrong whatever is in the table; sizes of the hidden layers."""
    hidden, members = _hidden(options.hidden), options.committee
    if members is not None and options.model == "linear":
        raise HeldinError("--committee: a linear model has none; leave it out, or use --model mlp")
    if members is not None and members != 1 and members < 3:
        raise HeldinError(f"--committee: must be 1, or at least 3, got {members}")
    if options.max_epochs < 1:
        raise HeldinError(f"--max-epochs: must be at least 1, got {options.max_epochs}")
    if not 0 <= options.seed < 2**32:
        raise HeldinError(f"--seed: must be a whole number from 0 to 2^32 - 1, got {options.seed}")
    out = Path(options.out)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not options.force):
        raise HeldinError(f"--out: {out} is not an empty folder; name another, or say --force")
    return hidden


def _prepare(options: Options) -> Prepared:
    """Read the table and make numbers of it. The table itself is not kept, for the room."""
    from heldin.tables.columns import Columns
    from heldin.tables.model import Target
    from heldin.tables.reading import named, read_table
    from heldin.tables.summary import remarks
    from heldin.tables.written import Unusable, with_numbers

    way = {name: getattr(options, name) for name in READING}
    frame = read_table(options.data, **way, texts=options.id)
    said = dict.fromkeys(frame.columns, options.decimal) if options.decimal else {}
    frame, decimals = with_numbers(frame, options.id, said)
    there = named(frame, options.target, options.data).notna()
    no_inputs = _no_inputs(frame, options)
    if not there.any():
        raise HeldinError(f"{options.data}: the target {options.target!r} is missing in all rows")
    rows = frame if there.all() else frame[there].reset_index(drop=True)
    if len(rows) < 2:
        raise HeldinError(
            f"{options.data}: one row with a value of {options.target!r} is too few to learn from"
        )
    try:
        target = Target.learn(rows[options.target], options.task)
        columns = Columns.learn(
            rows, [options.target, *no_inputs], decimals, options.dates, options.drop_unusable
        )
    except Unusable as error:
        mend = ""
        if len(error.reasons) > 1:
            mend = f":\n  {shlex.join(['heldin', *options.given, '--drop-unusable'])}"
        raise HeldinError(f"{options.data}: {error}{mend}") from error
    except HeldinError as error:
        raise HeldinError(f"{options.data}: {error}") from error
    for remark in remarks(frame, columns, options.groups):
        print(f"heldin: {options.data}: {remark}", file=sys.stderr)
    return Prepared(
        columns.encode(rows, options.data)[0],
        target.encode(rows[options.target]),
        columns,
        target,
        decimals,
        None if options.groups is None else rows[options.groups].to_numpy(),
        int((~there).sum()),
    )


def _read_test(table: Prepared, options: Options) -> Any:
    """Rows to measure on; what is wrong with them should not wait for the training."""
    from heldin.tables.reading import named, read_table
    from heldin.tables.written import with_numbers

    way = {name: getattr(options, name) for name in READING}
    commas = [name for name, mark in table.decimals.items() if mark == ","]
    frame = read_table(options.test, **way, texts=[*options.id, *commas])
    frame, _ = with_numbers(frame, options.id, {c: "," for c in commas if c in frame.columns})
    named(frame, options.target, options.test)
    table.columns.encode(frame, options.test)
    return frame


def _no_inputs(frame: Any, options: Options) -> list[str]:
    """Columns that the options name as no inputs; they have to be there."""
    from heldin.tables.reading import named

    named_ones = [("--drop", name) for name in options.drop]
    named_ones += [("--id", name) for name in options.id]
    named_ones += [("--groups", options.groups)] if options.groups is not None else []
    for option, name in named_ones:
        named(frame, name, options.data, f"{option}: the column")
        if name == options.target:
            raise HeldinError(f"{option}: {name!r} is the target")
    if options.groups is not None and frame[options.groups].isna().any():
        raise HeldinError(
            f"--groups: {options.groups!r} is missing in some rows; which belong together?"
        )
    return [name for _, name in named_ones]


def _hidden(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise HeldinError(f"--hidden: expected sizes like 100 or 64,64, got {text!r}")
    return sizes


def _network(options: Options, hidden: tuple[int, ...]) -> dict[str, Any]:
    """What a linear model has not."""
    members = "auto" if options.committee is None else options.committee
    return {"hidden_layer_sizes": hidden, "committee": members}


def _train(table: Prepared, options: Options, hidden: tuple[int, ...]) -> Any:
    """With a bar or lines on stderr; Ctrl-C says what is left of it."""
    from sklearn.exceptions import ConvergenceWarning

    from heldin import sklearn as estimators
    from heldin.pages.live import Live
    from heldin.tables.model import TabularModel

    kinds: dict[tuple[str, str], Any] = {
        ("mlp", "classification"): estimators.MLPClassifier,
        ("mlp", "regression"): estimators.MLPRegressor,
        ("linear", "classification"): estimators.LogisticRegression,
        ("linear", "regression"): estimators.LinearRegression,
    }
    reached = 0
    live = Live(options.max_epochs, "epoch", patient=True)
    try:
        with live, warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the summary says it
            warnings.filterwarnings("ignore", ".*no better than a constant", HeldinWarning)

            def report(epoch: int, loss: float, status: str) -> None:
                nonlocal reached
                reached = epoch
                live.show(epoch, f"loss {loss:.4g}; {status}")

            estimator = kinds[options.model, table.target.task](
                **(_network(options, hidden) if options.model == "mlp" else {}),
                early_stopping=False if options.rule == "none" else options.rule,
                max_iter=options.max_epochs,
                random_state=options.seed,
                verbose=report,
            )
            return TabularModel.fit(
                table.inputs, table.targets, table.columns, table.target, estimator, table.groups
            )
    except KeyboardInterrupt:
        way_out = f". To end there with a model: --max-epochs {reached}" if reached else ""
        raise KeyboardInterrupt(f"after {reached} epochs; nothing was written{way_out}") from None


def _say_unknown(unknown: dict[str, int], path: str) -> None:
    for name, count in unknown.items():
        print(
            f"heldin: {path}: column {name!r}: {count} rows have a value that was not there in "
            "training; they are predicted as if it were none of those known",
            file=sys.stderr,
        )


def run_predict(options: Options) -> int:
    """The command."""
    with _needs_extras():
        import pandas  # noqa: F401
        import safetensors  # noqa: F401

        from heldin.tables.model import TabularModel
        from heldin.tables.reading import read_table, refuse_missing
    model = TabularModel.load(options.model)
    ids, way = model.facts["id"], model.facts["reading"]
    frame = read_table(
        options.data,
        separator=options.separator or _unusual(way["separator"]),
        encoding=options.encoding,
        otherwise=way["encoding"],
        decimal=options.decimal or way["decimal"],
        missing=[*way["missing"], *options.missing],
        texts=[*ids, *model.columns.decimal_commas],
    )
    refuse_missing(frame, ids, options.data, "the ID column")
    table, unknown = model.predict(frame, options.data)
    for place, name in enumerate(ids):
        table.insert(place, name, frame[name], allow_duplicates=True)
    _say_unknown(unknown, options.data)
    try:
        table.to_csv(sys.stdout, index=False, lineterminator="\n", float_format="%.9g")
        sys.stdout.flush()
    except BrokenPipeError:  # head, for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _unusual(separator: str | None) -> str | None:
    """One that cannot be found in the file by itself."""
    from heldin.tables.reading import SEPARATORS

    return None if separator is None or separator in SEPARATORS else separator
