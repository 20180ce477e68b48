"""The arguments of `heldin fit` and `heldin predict`."""

from __future__ import annotations

import argparse
from typing import Any

from heldin.errors import HeldinError

__all__ = ["fit", "predict"]


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
    parser.set_defaults(run=lambda options: _commands().fit(options))


def predict(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `heldin predict`."""
    add = parser.add_argument
    add("model", help="folder that `heldin fit` wrote")
    add("data", help="CSV or Parquet file with the same columns")
    escape = "write ' before cells that a spreadsheet would run as a formula"
    add("--escape-formulas", action="store_true", help=escape)
    _add_reading(parser)
    parser.epilog = "Example: heldin predict model new.csv > predictions.csv"
    parser.set_defaults(run=lambda options: _commands().predict(options))


def _add_reading(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--separator", help="between the fields of a CSV file; by default found in it")
    add("--encoding", help="of a CSV file; by default UTF-8, or what its first bytes say")
    add("--decimal", choices=[".", ","], help="before decimals; by default found in each column")
    missing = "means a missing value"
    add("--missing", action="append", default=[], metavar="TEXT", help=missing)


def _commands() -> Any:
    """Return the module with the commands, which needs what the extra installs."""
    try:
        import jinja2  # noqa: F401
        import safetensors  # noqa: F401

        from heldin.tables import commands
    except ImportError as error:
        name = (error.name or str(error)).partition(".")[0]
        raise HeldinError(f"{name} is not installed; pip install 'heldin[fit]'") from error
    return commands
