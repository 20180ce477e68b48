"""`heldin fit` on tables as people have them: encodings, decimal commas, dates, IDs, groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

for needed in ("sklearn", "pandas", "safetensors"):
    pytest.importorskip(needed)

import numpy as np
import pandas

from heldin.cli.main import main
from heldin.tables.columns import Columns, Unusable

FAST = ["--target", "y", "--hidden", "4", "--max-epochs", "8"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(columns: dict[str, list[Any]], name: str = "t.csv", **options: Any) -> str:
    pandas.DataFrame(columns).to_csv(name, index=False, **options)
    return name


def classes(n: int) -> list[str]:
    return ["pq"[i % 2] for i in range(n)]


def fit(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["fit", *arguments, *FAST])
    found = capsys.readouterr()
    return code, found.out, found.err


def test_predict_reads_as_fit_did(capsys: pytest.CaptureFixture[str]) -> None:
    """Encoding, decimals and gaps are remembered; a file in UTF-8 is read as such."""
    n = 24
    table = {"x": [f"{i},00{i % 9}" for i in range(n)], "city": ["Genève", "Zug"] * (n // 2)}
    table["x"][3] = "?"
    write({**table, "y": classes(n)}, encoding="cp1252", sep=";")
    said = ["--encoding", "cp1252", "--decimal", ",", "--missing", "?", "--out", "m"]
    assert fit(capsys, "t.csv", *said)[0] == 0
    found = []
    for encoding in ("cp1252", "utf-8"):
        write(table, "new.csv", encoding=encoding)  # with quotes and commas, this time
        assert main(["predict", "m", "new.csv"]) == 0
        output = capsys.readouterr()
        assert output.err == ""  # no unknown category
        found.append(output.out)
    assert main(["predict", "m", "t.csv", *said[:-2]]) == 0
    assert found == [capsys.readouterr().out] * 2


def test_a_point_that_means_thousands_in_training_does_so_later(
    capsys: pytest.CaptureFixture[str],
) -> None:
    n = 24
    prices = [f"{1 + i % 7}.{i:03},50 €" for i in range(n)]
    write({"price": prices, "y": classes(n)}, sep=";")
    assert fit(capsys, "t.csv", "--out", "m")[0] == 0
    found = []
    for text in ("1.500", "1.500,00 €", "1500"):
        write({"price": [text] * 2}, "new.csv", sep=";")
        assert main(["predict", "m", "new.csv"]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("unit", ["", " €"])
def test_decimal_is_obeyed(unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    n = 24
    write({"x": [f"{i},00{i % 9}{unit}" for i in range(n)], "y": classes(n)}, sep=";")
    code, _, _ = fit(capsys, "t.csv", "--separator", ";", "--decimal", ",", "--out", "m")
    assert code == 0
    (column,) = json.loads(Path("m/model.json").read_text())["columns"]["used"]
    assert column["kind"] == "number"
    assert column["mean"] == pytest.approx(np.mean([i + (i % 9) / 1000 for i in range(n)]))


def test_a_decimal_comma_leaves_dates_and_decimal_points_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    n = 24
    table: dict[str, list[Any]] = {
        "day": [f"{1 + i:02}.01.2024" for i in range(n)],
        "age": [f"{i}.25" for i in range(n)],
        "price": [f"{i},5" for i in range(n)],
        "paid": [f"{1 + i}.{i:03}" for i in range(n)],
    }
    write({**table, "y": classes(n)}, sep=";")
    assert fit(capsys, "t.csv", "--decimal", ",", "--out", "m")[0] == 0
    used = json.loads(Path("m/model.json").read_text())["columns"]["used"]
    assert [column["kind"] for column in used] == ["date", "number", "number", "number"]
    means = np.mean([[i + 0.25, i + 0.5, 1000 * (1 + i) + i] for i in range(n)], axis=0)
    assert [column["mean"] for column in used[1:]] == pytest.approx(means)
    assert main(["predict", "m", "t.csv"]) == 0


# -- columns that cannot be used


def unusable() -> dict[str, list[Any]]:
    n = 30
    return {
        "a": [i % 7 for i in range(n)],
        "notes": [f"once upon a time {i}" for i in range(n)],
        "clock": [f"{i % 24}:30" for i in range(n)],
        "y": classes(n),
    }


def test_all_unusable_columns_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unusable) as caught:
        Columns.learn(pandas.DataFrame(unusable()), ["y"])
    assert list(caught.value.reasons) == ["notes", "clock"]
    write(unusable())
    code, _, err = fit(capsys, "t.csv", "--out", "m")
    assert code == 2
    assert "2 columns cannot be used" in err
    assert "'notes' holds free text" in err
    assert "'clock' holds dates or times" in err
    *_, way_out, command = err.strip().splitlines()
    assert way_out == "--drop-unusable leaves them out:"
    assert command.startswith("  heldin fit t.csv")
    mended = command.partition("heldin ")[2].split()
    assert main(mended) == 0
    assert "'notes', 'clock': left out" in capsys.readouterr().out


# -- IDs and groups


def test_ids_are_kept_and_not_learnt_from(capsys: pytest.CaptureFixture[str]) -> None:
    n = 30
    table: dict[str, list[Any]] = {
        "id": [f"{i:03}" for i in range(n)],
        "a": [i % 7 for i in range(n)],
        "y": classes(n),
    }
    write(table)
    code, _, err = fit(capsys, "t.csv", "--out", "looks")
    assert code == 0
    assert "column 'id' is different in every row and looks like an ID" in err
    code, _, err = fit(capsys, "t.csv", "--id", "id", "--out", "m")
    assert code == 0
    assert "looks like an ID" not in err
    assert [c["name"] for c in json.loads(Path("m/model.json").read_text())["columns"]["used"]] == [
        "a"
    ]
    assert main(["predict", "m", "t.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("id,y,")
    assert [line.split(",")[0] for line in lines[1:4]] == ["000", "001", "002"]  # as written


def test_several_ids_and_ids_that_are_texts(capsys: pytest.CaptureFixture[str]) -> None:
    n = 30
    table: dict[str, list[Any]] = {
        "code": [f"BK-{i:03}" for i in range(n)],
        "nr": list(range(n)),
        "a": [0, 1, 2] * 10,
    }
    write({**table, "y": classes(n)})
    code, _, err = fit(capsys, "t.csv", "--out", "m")
    assert code == 2
    assert "'code' is different in every row ('BK-000' for instance)" in err
    assert "--id 'code' keeps it" in err
    assert fit(capsys, "t.csv", "--id", "code", "--id", "nr", "--out", "m")[0] == 0
    assert main(["predict", "m", "t.csv"]) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("BK-001,1,")
    write({"a": [1, 2]}, "new.csv")
    assert main(["predict", "m", "new.csv"]) == 2
    assert "2 columns are not there: 'code', 'nr'" in capsys.readouterr().err


def test_remarks_on_odd_tables(capsys: pytest.CaptureFixture[str]) -> None:
    n = 100
    write({"1": [i % 7 for i in range(n)], "2": [f"p{i // 4}" for i in range(n)], "y": classes(n)})
    _, out, err = fit(capsys, "t.csv", "--out", "m")
    assert "column '2' has 25 different values in 100 rows" in err
    assert "--groups '2'" in err
    assert "too few" not in out
    _, _, err = fit(capsys, "t.csv", "--groups", "2", "--out", "g")
    assert "heldin:" not in err
    Path("t.csv").write_text("3,7\n" + "".join(f"{i},{i % 2}\n" for i in range(6)))
    code = main(["fit", "t.csv", "--target", "7", "--max-epochs", "4", "--out", "few"])
    found = capsys.readouterr()
    assert code == 0
    assert "all names in the header are numbers (3, 7)" in found.err
    assert "6 rows are too few for the estimate" in found.out


def test_groups_are_not_torn_apart(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from heldin.sklearn import MLPClassifier

    seen: list[Any] = []
    plain = MLPClassifier.fit

    def fit_and_note(self: Any, X: Any, y: Any, **options: Any) -> Any:
        seen.append(options["groups"])
        return plain(self, X, y, **options)

    monkeypatch.setattr(MLPClassifier, "fit", fit_and_note)
    n = 40
    write(
        {"a": [i % 7 for i in range(n)], "who": [f"p{i // 4}" for i in range(n)], "y": classes(n)}
    )
    code, out, _ = fit(capsys, "t.csv", "--groups", "who", "--out", "m")
    assert code == 0
    assert list(seen[0]) == [f"p{i // 4}" for i in range(n)]
    assert "columns:         1, as 1 inputs" in out


def test_rows_in_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from heldin.sklearn import MLPClassifier

    seen: list[Any] = []
    plain = MLPClassifier.fit

    def fit_and_note(self: Any, X: Any, y: Any, **options: Any) -> Any:
        seen.append(options["time"])
        return plain(self, X, y, **options)

    monkeypatch.setattr(MLPClassifier, "fit", fit_and_note)
    n = 48
    days = [f"{1 + 5 * i % 28:02}.{1 + i // 28:02}.2024" for i in range(n)]
    write({"a": [i % 7 for i in range(n)], "day": days, "y": classes(n)})
    code, out, _ = fit(capsys, "t.csv", "--time", "day", "--out", "m")
    assert code == 0
    dates = pandas.to_datetime(pandas.Series(days), format="%d.%m.%Y")
    assert [*pandas.Series(seen[0]).rank()] == [*dates.rank()]
    assert "48, all of them trained on; tested in the order of 'day'" in out
    assert "trained together with 10 shadows" in out
    assert "columns:         2," in out  # it stays an input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--time", "z"], "is not there"),
        (["--time", "y"], "--time: 'y' is the target"),
        (["--time", "name"], "must hold a number or a date in every row"),
        (["--time", "gap"], "must hold a number or a date in every row"),
        (["--time", "a", "--groups", "gap"], "leave --groups out"),
        (["--time", "a", "--rule", "evidence"], "time needs folds"),
    ],
)
def test_wrong_times(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    n = 30
    columns = {"a": list(range(n)), "gap": [None, *range(1, n)], "name": ["x", "z"] * (n // 2)}
    write({**columns, "y": classes(n)})
    code, _, err = fit(capsys, "t.csv", *options, "--out", "m")
    assert code == 2
    assert message in err


@pytest.mark.parametrize("option", ["--id", "--groups"])
def test_named_columns_have_to_be_there(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    write({"a": [1, 2, 3, 4], "g": [1, None, 2, 2], "y": classes(4)})
    for name, message in (("z", "is not there"), ("y", "is the target")):
        code, _, err = fit(capsys, "t.csv", option, name, "--out", "m")
        assert code == 2
        assert message in err
    code, _, err = fit(capsys, "t.csv", "--groups", "g", "--out", "m")
    assert code == 2
    assert "which belong together?" in err


def test_large_tables_are_kept_in_single_precision(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and their models predict small tables, which are not."""
    n = 30
    write({"a": [i % 7 for i in range(n)], "b": [i % 5 for i in range(n)], "y": classes(n)})
    monkeypatch.setattr("heldin.tables.columns.SINGLE", 59)
    code, _, _ = fit(capsys, "t.csv", "--out", "m")
    assert code == 0
    assert main(["predict", "m", "t.csv"]) == 0
    many = capsys.readouterr().out
    monkeypatch.setattr("heldin.tables.columns.SINGLE", 60)
    assert main(["predict", "m", "t.csv"]) == 0
    few = capsys.readouterr().out
    numbers = [[float(line.split(",")[1]) for line in t.splitlines()[1:]] for t in (many, few)]
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-5)
