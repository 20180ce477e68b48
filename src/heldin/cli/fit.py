"""`heldin fit` and `heldin predict`: tables in, predictions out, no row held out."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heldin.errors import HeldinError, HeldinWarning
from heldin.state.estimates import COVERAGE
from heldin.tables.trainer import RULE_NAMES

__all__ = ["fit", "predict"]

Options = argparse.Namespace
SCORES = {"accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE", "r2": "R2"}


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
        "--committee", type=int, help="networks that predict together (default: 6; 1: one alone)"
    )
    parser.add_argument("--hidden", default="100", help="sizes of hidden layers (default 100)")
    parser.add_argument(
        "--drop", action="append", default=[], metavar="COLUMN", help="leave it out"
    )
    parser.add_argument(
        "--drop-unusable", action="store_true", help="leave out all columns that cannot be used"
    )
    parser.add_argument(
        "--id", metavar="COLUMN", help="no input; it is written beside the predictions"
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
    parser.add_argument("--separator", default=",", help="between the fields of a CSV file")
    parser.add_argument("--encoding", help="of a CSV file; by default UTF-8, or what it says")
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


def run_fit(options: Options) -> int:
    """The command."""
    with _needs_extras():
        import jinja2  # noqa: F401  (missing ones are said before the training, not after)
        import matplotlib  # noqa: F401
        import pandas  # noqa: F401
        import rich  # noqa: F401
        import safetensors  # noqa: F401
        import sklearn  # noqa: F401

        from heldin.tables.columns import Columns, with_numbers
        from heldin.tables.model import Target
        from heldin.tables.reading import named
        from heldin.tables.report import write_report
        from heldin.tables.written import Unusable
    hidden = _hidden(options.hidden)
    if options.committee is not None and options.model == "linear":
        raise HeldinError("--committee: a linear model has none; leave it out, or use --model mlp")
    if options.max_epochs < 1:
        raise HeldinError(f"--max-epochs: must be at least 1, got {options.max_epochs}")
    if not 0 <= options.seed < 2**32:
        raise HeldinError(f"--seed: must be a whole number from 0 to 2^32 - 1, got {options.seed}")
    out = Path(options.out)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not options.force):
        raise HeldinError(f"--out: {out} is not an empty folder; name another, or say --force")
    kept = [name for name in (options.id,) if name]
    frame, decimals = with_numbers(_read(options.data, options, kept), kept)
    there = named(frame, options.target, options.data).notna()
    no_inputs = _no_inputs(frame, options)
    if not there.any():
        raise HeldinError(f"{options.data}: the target {options.target!r} is missing in all rows")
    rows = frame if there.all() else frame[there].reset_index(drop=True)
    if len(rows) < 2:
        raise HeldinError(f"{options.data}: one row is too few to learn from")
    try:
        target = Target.learn(rows[options.target], options.task)
        columns = Columns.learn(
            rows, [options.target, *no_inputs], decimals, options.dates, options.drop_unusable
        )
    except Unusable as error:
        mend = ""
        if len(error.reasons) > 1:
            mend = f": {shlex.join(['heldin', *options.given, '--drop-unusable'])}"
        raise HeldinError(f"{options.data}: {error}{mend}") from error
    except HeldinError as error:
        raise HeldinError(f"{options.data}: {error}") from error
    test = None
    if options.test:
        test, _ = with_numbers(_read(options.test, options, kept), kept)
        named(test, options.target, options.test)
        columns.encode(test, options.test)  # what is wrong with it should not wait for the training
    model = _train(rows, columns, target, options, hidden)
    model.facts |= {
        "data": Path(options.data).name,
        "dropped_rows": int((~there).sum()),
        "id": options.id,
        "groups": options.groups,
    }
    if test is not None:
        model.facts["test"] = model.test(test, options.test) | {"data": Path(options.test).name}
        _say_unknown(columns.encode(test, options.test)[1], options.test)
    lines = summary(model)
    _remark_ids(rows, columns, options.data)
    try:
        model.save(out)
        write_report(model, lines, out / "report.html")
    except OSError as error:
        raise HeldinError(f"--out: {out} cannot be written ({error})") from error
    print("\n".join(f"{name + ':':<16} {value}" for name, value in lines))
    print(f"Model and report.html are in {out}")
    return 0


def _read(path: str, options: Options, texts: list[str]) -> Any:
    from heldin.tables.reading import read_table

    return read_table(
        path,
        separator=options.separator,
        missing=options.missing,
        encoding=options.encoding,
        decimal=options.decimal,
        texts=texts,
    )


def _no_inputs(frame: Any, options: Options) -> list[str]:
    """Columns that the options name as no inputs; they have to be there."""
    from heldin.tables.reading import named

    single = [("--id", options.id), ("--groups", options.groups)]
    named_ones = [("--drop", name) for name in options.drop]
    named_ones += [(option, name) for option, name in single if name is not None]
    for option, name in named_ones:
        named(frame, name, options.data, f"{option}: the column")
        if name == options.target:
            raise HeldinError(f"{option}: {name!r} is the target")
    if options.groups is not None and frame[options.groups].isna().any():
        raise HeldinError(
            f"--groups: {options.groups!r} is missing in some rows; which belong together?"
        )
    return [name for _, name in named_ones]


def _remark_ids(rows: Any, columns: Any, path: str) -> None:
    from heldin.tables.written import looks_like_id

    for column in columns.used:
        if column.kind == "number" and looks_like_id(column.name, rows[column.name]):
            print(
                f"heldin: {path}: column {column.name!r} is different in every row and looks like "
                f"an ID, from which nothing can be learnt; --id {column.name!r} keeps it for the "
                f"predictions only, --drop {column.name!r} leaves it out",
                file=sys.stderr,
            )


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


def _train(rows: Any, columns: Any, target: Any, options: Options, hidden: tuple[int, ...]) -> Any:
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

            estimator = kinds[options.model, target.task](
                **(_network(options, hidden) if options.model == "mlp" else {}),
                early_stopping=False if options.rule == "none" else options.rule,
                max_iter=options.max_epochs,
                random_state=options.seed,
                verbose=report,
            )
            groups = rows[options.groups] if options.groups is not None else None
            return TabularModel.fit(rows, columns, target, estimator, groups)
    except KeyboardInterrupt:
        way_out = f". To end there with a model: --max-epochs {reached}" if reached else ""
        raise KeyboardInterrupt(f"after {reached} epochs; nothing was written{way_out}") from None


def summary(model: Any) -> list[tuple[str, str]]:
    """What there is to say at the end, as (name, value)."""
    facts, target = model.facts, model.target
    kind = "log loss" if target.task == "classification" else "squared error"
    lines = [("rows", f"{facts['rows']}, all of them trained on")]
    if facts["dropped_rows"]:
        lines.append(("left out", f"{facts['dropped_rows']} without a value of {target.name!r}"))
    columns = model.columns
    lines.append(("columns", f"{len(columns.used)}, as {facts['inputs']} inputs"))
    if columns.unusable:
        names = ", ".join(map(repr, columns.unusable))
        lines.append(("unusable", f"{names}: left out, as --drop-unusable says"))
    if columns.constant:
        names = ", ".join(map(repr, columns.constant))
        lines.append(("constant", f"{names}: the same in all rows, not used"))
    lines.append(("target", f"{target.name!r}, {target.task} ({target.found})"))
    lines.append(
        ("rule", f"{facts['rule']}" + (f" ({facts['choice']})" if facts["choice"] else ""))
    )
    why = facts["reason"] if facts["stopped"] else f"limit of epochs reached; {facts['reason']}"
    lines.append(("steps", f"{facts['steps']} in {facts['epochs']} epochs"))
    lines.append(("stopped", why))
    lines.append(("training loss", f"{facts['training_loss']:.4g} ({kind})"))
    if facts["estimate"] is not None:
        covered = ""
        if not facts["scores"]:  # the rule by itself, of which the study was
            share = COVERAGE[facts["rule"]][2]
            covered = f" (two of them covered {share:.0%} in our study)"
        lines.append(
            (
                "estimate",
                f"{facts['estimate']:.4g} on new rows, standard error "
                f"{facts['standard_error']:.2g}{covered}",
            )
        )
    if facts["members"] > 1:
        lines.append(("committee", f"{facts['members']} networks, whose predictions are averaged"))
    for name, (value, low, high) in facts["scores"].items():
        lines.append(
            (SCORES[name], f"{value:.4g} on new rows, 95 % interval {low:.4g} to {high:.4g}")
        )
    if facts["shrinkage"] == 1:
        lines.append(
            (
                "warning",
                "on rows that were not trained on the model was no better than a constant, which "
                "it predicts now; do the columns tell anything about the target?",
            )
        )
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
        from heldin.tables.reading import named
    model = TabularModel.load(options.model)
    name = model.facts.get("id")
    frame = _read(options.data, options, [name] if name else [])
    table, unknown = model.predict(frame, options.data)
    if name:
        table.insert(0, name, named(frame, name, options.data, "the ID column"))
    _say_unknown(unknown, options.data)
    try:
        table.to_csv(sys.stdout, index=False, lineterminator="\n")
        sys.stdout.flush()
    except BrokenPipeError:  # head, for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
