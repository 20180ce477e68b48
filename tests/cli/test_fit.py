"""`heldin fit` and `heldin predict`, through the command line."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
pytest.importorskip("safetensors")

import numpy as np
import pandas
from safetensors.numpy import load_file, save_file

import heldin
from heldin.cli.main import main
from heldin.sklearn.training import Trainer
from heldin.tables.model import TabularModel

FAST = ["--hidden", "6", "--max-epochs", "25"]


def table(n: int = 80, seed: int = 0) -> Any:
    """Numbers, categories, truth values, gaps and a constant."""
    generator = np.random.default_rng(seed)
    city = generator.choice(["Bern", "Basel", "Zug"], n)
    age = generator.integers(18, 80, n).astype(float)
    score = (age - 50) / 15 + 2 * (city == "Bern") + generator.normal(size=n)
    frame = pandas.DataFrame(
        {
            "age": age,
            "city": city,
            "member": generator.random(n) < 0.5,
            "country": "CH",
            "label": np.where(score > 0.7, "yes", "no"),
            "price": 1000 + 300 * score,
        }
    )
    frame.loc[[2, 5], "age"] = np.nan
    frame.loc[[3, 9], "city"] = None
    return frame


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    frame = table()
    frame.drop(columns="price").to_csv("classes.csv", index=False)
    frame.drop(columns="label").to_csv("prices.csv", index=False)
    table(40, seed=1).to_csv("new.csv", index=False)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    found = capsys.readouterr()
    return code, found.out, found.err


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refusal is."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("heldin: ")
    return lines[0]


# -- what it is for


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_classes(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "fit", "classes.csv", "--target", "label", "--model", kind, "--out", "m",
        "--test", "new.csv", "--hidden", "6", "--max-epochs", "200",
    )  # fmt: skip
    assert code == 0
    assert "heldin:" not in err  # no remark
    for said in (
        "rows:            80, all of them trained on",
        "'country': the same in all rows, not used",
        "'label', classification (its values are not numbers)",
        "rule:            folds (",
        "stopped:         ",
        "; best at epoch ",
        "on new rows; 0.",
        "for a constant prediction",
        "on 40 rows of new.csv",
    ):
        assert said in out
    files = {path.name for path in Path("m").iterdir()}
    assert files == {"model.json", "weights.safetensors", "report.html"}
    code, out, err = run(capsys, "predict", "m", "new.csv")
    assert (code, err) == (0, "")
    Path("p.csv").write_text(out)
    found, truth = pandas.read_csv("p.csv"), pandas.read_csv("new.csv")
    assert list(found.columns) == ["label", "p(no)", "p(yes)"]
    assert (found["label"] == truth["label"]).mean() > 0.7
    np.testing.assert_allclose(found["p(no)"] + found["p(yes)"], 1)
    facts = json.loads(Path("m/model.json").read_text())["facts"]
    accuracy = (found["label"] == truth["label"]).mean()
    assert facts["test"]["score"] == pytest.approx(accuracy)
    shares = np.where(truth["label"] == "yes", found["p(yes)"], found["p(no)"])
    assert facts["test"]["loss"] == pytest.approx(-np.log(shares).mean())


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_numbers(kind: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "fit", "prices.csv", "--target", "price", "--model", kind, "--out", "m",
        "--max-epochs", "400", "--test", "new.csv",
    )  # fmt: skip
    assert code == 0
    assert "'price', regression (it has 80 different numbers)" in out
    _, out, _ = run(capsys, "predict", "m", "new.csv")
    Path("p.csv").write_text(out)
    found, truth = pandas.read_csv("p.csv")["price"], pandas.read_csv("new.csv")["price"]
    assert np.corrcoef(found, truth)[0, 1] > 0.8
    facts = json.loads(Path("m/model.json").read_text())["facts"]
    error = (found - truth).pow(2).mean()
    assert facts["test"]["loss"] == pytest.approx(error)
    assert facts["test"]["score"] == pytest.approx(1 - error / truth.var(ddof=0))
    # losses are in the target's own units
    _, out, _ = run(capsys, "predict", "m", "prices.csv")
    Path("p.csv").write_text(out)
    own = (pandas.read_csv("p.csv")["price"] - pandas.read_csv("prices.csv")["price"]).pow(2)
    assert facts["training_loss"] == pytest.approx(own.mean())
    assert 0.3 * error < facts["estimate"] < 3 * error


def test_without_a_test_file_it_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "fit", "classes.csv", "--target", "label", "--out", "m", *FAST)
    assert "no row was held out, so no loss was measured; --test FILE measures one" in out


def test_report_is_one_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table()
    frame["<b>tag</b>"] = np.arange(80.0)
    frame.to_csv("t.csv", index=False)
    for rule in ("auto", "evidence", "validation", "none"):
        run(
            capsys, "fit", "t.csv", "--target", "label", "--out", rule, "--rule", rule,
            *FAST, "--drop", "price",
        )  # fmt: skip
        page = (here / rule / "report.html").read_text()
        assert "<svg" in page
        for outside in ("<script", "src=", "<link", 'href="http'):
            assert outside not in page
        assert "<b>tag" not in page
        assert "&lt;b&gt;tag&lt;/b&gt;" in page
        assert "training loss" in page
    page = (here / "auto/report.html").read_text()
    for heading in ("Columns that matter", "Confusion matrix", "Calibration", "Worst rows"):
        assert f"<h2>{heading}</h2>" in page
    assert "estimated test loss" in page
    assert "criterion" in (here / "evidence/report.html").read_text()


def test_columns_that_matter_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(generator.normal(size=(120, 2)), columns=["noise", "signal"])
    frame["kind"] = generator.choice(["a", "b"], 120)
    frame["y"] = 3 * frame["signal"] + (frame["kind"] == "a") + 0.3 * generator.normal(size=120)
    frame.to_csv("t.csv", index=False)
    run(capsys, "fit", "t.csv", "--target", "y", "--out", "m", "--max-epochs", "100")
    rises = json.loads(Path("m/model.json").read_text())["facts"]["importance"]
    assert list(rises) == ["signal", "kind", "noise"]
    # a shuffled column adds its variance twice: 2 x 9
    assert rises["signal"][0] == pytest.approx(2 * 9 * frame["signal"].var(), rel=0.25)
    assert abs(rises["noise"][0]) < 0.1
    page = Path("m/report.html").read_text()
    assert page.index(">signal<") < page.index(">kind<") < page.index(">noise<")
    assert "Predicted against true" in page
    run(capsys, "fit", "t.csv", "--target", "y", "--out", "one", "--rule", "evidence", *FAST)
    assert "Columns that matter" not in Path("one/report.html").read_text()


def test_same_seed_same_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in ("a", "b"):
        run(capsys, "fit", "classes.csv", "--target", "label", "--out", out, "--seed", "3", *FAST)
    assert Path("a/model.json").read_bytes() == Path("b/model.json").read_bytes()
    pages = [Path(out, "report.html").read_text("utf-8") for out in ("a", "b")]
    first_page, second_page = (re.sub(r">duration<.*?</tr>", "", p, flags=re.S) for p in pages)
    assert first_page == second_page != pages[0]
    first, second = (load_file(f"{out}/weights.safetensors") for out in ("a", "b"))
    assert all((first[name] == second[name]).all() for name in first)


def test_parquet(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    frame = table().drop(columns="price")
    frame["city"] = frame["city"].astype("category")
    frame.to_parquet("t.parquet")
    code, _, _ = run(capsys, "fit", "t.parquet", "--target", "label", "--out", "m", *FAST)
    assert code == 0
    _, by_parquet, _ = run(capsys, "predict", "m", "t.parquet")
    _, by_csv, _ = run(capsys, "predict", "m", "classes.csv")
    assert by_parquet == by_csv
    frame["when"] = pandas.Timestamp("2024-01-03") + pandas.to_timedelta(range(len(frame)), "h")
    frame["long"] = pandas.to_timedelta(range(len(frame)), "h")
    frame.to_parquet("dated.parquet")
    said = fails(capsys, "fit", "dated.parquet", "--target", "label", "--out", "d")
    assert "column 'long' holds durations" in said
    arguments = ("fit", "dated.parquet", "--target", "label", "--out", "d", "--drop", "long")
    assert run(capsys, *arguments, *FAST)[0] == 0
    Path("no.parquet").write_text("a,b\n1,2\n")
    said = fails(capsys, "fit", "no.parquet", "--target", "a", "--out", "n")
    assert "not a Parquet file" in said


def test_other_ways_to_write_csv(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table().drop(columns="price")
    frame.to_csv("t.tsv", index=False, sep="\t")
    frame.to_csv("s.csv", index=False, sep=";")
    Path("t.csv.gz").write_bytes(gzip.compress(Path("classes.csv").read_bytes()))
    frame.to_csv("hat.csv", index=False, sep="^")
    for name, more in (
        ("t.tsv", []), ("s.csv", []), ("t.csv.gz", []), ("hat.csv", ["--separator", "^"])
    ):  # fmt: skip
        code, *_ = run(capsys, "fit", name, "--target", "label", "--out", name + "-m", *more, *FAST)
        assert code == 0
        code, found, _ = run(capsys, "predict", name + "-m", name)  # which remembers an odd mark
        assert code == 0
        assert found == run(capsys, "predict", name + "-m", "classes.csv", "--separator", ",")[1]
    said = fails(capsys, "fit", "hat.csv", "--target", "label", "--out", "m")
    assert "the target column 'label' is not there" in said


# -- gaps and unknown things


def test_unknown_categories_are_none_of_the_known(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "fit", "classes.csv", "--target", "label", "--out", "m", *FAST)
    frame = table(20, seed=2).drop(columns=["label", "price"]).head(6)
    frame["city"] = ["Bern", "Rome", "Rome", None, "Zug", "Bern"]
    frame["extra"] = 1
    frame.to_csv("odd.csv", index=False)
    code, out, err = run(capsys, "predict", "m", "odd.csv")
    assert code == 0
    assert len(out.splitlines()) == 7
    assert "column 'city': 2 rows have a value that was not there in training" in err


def test_rows_without_target_are_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table().drop(columns="price")
    frame.loc[:4, "label"] = None
    frame.to_csv("t.csv", index=False)
    _, out, _ = run(capsys, "fit", "t.csv", "--target", "label", "--out", "m", *FAST)
    assert "rows:            75" in out
    assert "left out:        5 without a value of 'label'" in out


# -- refusals, each one line


def write(text: str, name: str = "t.csv") -> str:
    Path(name).write_text(text)
    return name


GOOD = "a,b,y\n" + "".join(f"{i},{i % 3},{'pq'[i % 2]}\n" for i in range(12))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ("a,b,y\n", "there are no rows"),
        ("a,b,y\n1,2,p\n1,2,3,4\n", "malformed CSV: Expected 3 fields in line 3, saw 4"),
        ("a,b,y\n1,2,p,5\n1,2,q,5\n", "more fields than the header"),
        ('a,b,y\n1,"2,p\n3,4,q\n', "malformed CSV"),
        ("a,a,y\n1,2,p\n3,4,q\n", "two columns are called 'a'"),
        ("a,b\n1,2\n3,4\n", "the target column 'y' is not there (columns: 'a', 'b')"),
        ("a,Y\n1,2\n3,4\n", "is not there"),
        ("a,b,y\n1,2,\n3,4,\n", "the target 'y' is missing in all rows"),
        ("a,b,y\n1,2,p\n3,4,\n", "one row with a value of 'y' is too few"),
        ("a,b,y\n1,2,p\n3,4,p\n", "target 'y' has one class only, 'p'"),
        ("a,b,y\n1,2,p\n1,2,q\n", "every column has the same value in all rows"),
        ("y\np\nq\n", "no column to predict from"),
        ("a,y\ninf,p\n1,q\n", "column 'a' has infinite values"),
        (
            "d,y\n"
            + "".join(f"{i % 12 + 1:02}/{i % 9 + 1:02}/2024,{'pq'[i % 2]}\n" for i in range(20)),
            "day and month cannot be told apart; say --dates dmy or --dates mdy",
        ),
        (
            "n,y\n" + "".join(f'"{i},00{i % 9}",{"pq"[i % 2]}\n' for i in range(1, 20)),
            "may have thousands or decimals; say --decimal , or --decimal .",
        ),
        (
            "d,y\n" + "".join(f"{i}:30,{'pq'[i % 2]}\n" for i in range(1, 20)),
            "column 'd' holds dates or times",
        ),
        (
            "s,y\n" + "".join(f"once upon a time {i},{'pq'[i % 2]}\n" for i in range(30)),
            "column 's' holds free text or names (30 different values in 30 rows",
        ),
        (
            "n,y\n" + "".join(f"{i if i % 7 else '?'},{'pq'[i % 2]}\n" for i in range(30)),
            "column 'n' holds numbers, but also '?'; if that means missing, say --missing '?'",
        ),
        ("a,y\n" + "".join(f"{i},n{i}\n" for i in range(30)), "too many for classes"),
    ],
)
def test_bad_tables(
    text: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, "fit", write(text), "--target", "y", "--out", "m")
    assert not Path("m").exists()


def test_more_bad_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such file" in fails(capsys, "fit", "x.csv", "--target", "y", "--out", "m")
    write(GOOD, "t.xlsx")
    assert "must end in .csv" in fails(capsys, "fit", "t.xlsx", "--target", "y", "--out", "m")
    Path("t.csv").write_bytes(b"a,y\n\xff\xfe\x00,p\n")
    assert "not UTF-8" in fails(capsys, "fit", "t.csv", "--target", "y", "--out", "m")
    Path("t.csv.gz").write_bytes(b"no gzip")
    assert "cannot be read" in fails(capsys, "fit", "t.csv.gz", "--target", "y", "--out", "m")
    write("a,label\n1,p\n2,q\n")
    assert "did you mean 'label'?" in fails(
        capsys, "fit", "t.csv", "--target", "labl", "--out", "m"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task", "regression"], "target 'y': 'p' is not a number"),
        (["--hidden", "a"], "--hidden: expected sizes like"),
        (["--hidden", "0"], "--hidden: expected sizes like"),
        (["--max-epochs", "0"], "--max-epochs: must be at least 1"),
        (["--seed", "-1"], "--seed: must be"),
        (["--drop", "z"], "--drop: the column 'z' is not there"),
        (["--drop", "y"], "--drop: 'y' is the target"),
        (["--test", "z.csv"], "z.csv: there is no such file"),
        (["--rule", "validation"], "is not two"),
    ],
)
def test_bad_options(
    more: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, "fit", write(GOOD), "--target", "y", "--out", "m", *more)
    assert not Path("m").exists()


@pytest.mark.filterwarnings("ignore:.*never fell below:heldin.HeldinWarning")
def test_full_folders_are_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("m").mkdir()
    write("mine", "m/notes.txt")
    arguments = ["fit", write(GOOD), "--target", "y", "--out", "m", *FAST]
    assert "--out: m is not an empty folder" in fails(capsys, *arguments)
    assert run(capsys, *arguments, "--force")[0] == 0
    assert Path("m/notes.txt").read_text() == "mine"
    assert "is not an empty folder" in fails(capsys, *arguments[:-6], "--out", "t.csv")


def test_a_bad_test_file_is_said_before_training(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "run", lambda *_: pytest.fail("trained"))
    write("a,y\n1,p\n", "test.csv")
    said = fails(capsys, "fit", write(GOOD), "--target", "y", "--out", "m", "--test", "test.csv")
    assert "test.csv: the column 'b' is not there" in said


@pytest.mark.filterwarnings("ignore:.*never fell below:heldin.HeldinWarning")
def test_bad_models(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "fit", write(GOOD), "--target", "y", "--out", "m", *FAST)
    assert "not a model of `heldin fit`" in fails(capsys, "predict", "x", "t.csv")
    for name, text in (("model.json", "{"), ("model.json", "[]"), ("weights.safetensors", "123")):
        shutil.copytree("m", "bad", dirs_exist_ok=True)
        Path("bad", name).write_text(text)
        assert "the model is damaged" in fails(capsys, "predict", "bad", "t.csv")
    content = json.loads(Path("m/model.json").read_text())
    shutil.copytree("m", "bad", dirs_exist_ok=True)
    Path("bad/model.json").write_text(json.dumps({**content, "version": 99}))
    assert "another version of heldin" in fails(capsys, "predict", "bad", "t.csv")


def _nested(content: dict[str, Any]) -> str:
    return "[" * 100_000 + "]" * 100_000


def _column(content: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Change the first column."""
    first, *others = content["columns"]["used"]
    return {**content, "columns": {**content["columns"], "used": [{**first, **changes}, *others]}}


SPOILT: dict[str, Any] = {
    "activation": lambda c: {**c, "activation": "__import__('os').system('true')"},
    "one class": lambda c: {**c, "target": {**c["target"], "classes": ["p"]}},
    "three classes": lambda c: {**c, "target": {**c["target"], "classes": ["p", "q", "r"]}},
    "classes as numbers": lambda c: {**c, "target": {**c["target"], "classes": [1, 2]}},
    "another task": lambda c: {**c, "target": {**c["target"], "task": "clustering"}},
    "no columns": lambda c: {**c, "columns": {**c["columns"], "used": []}},
    "columns as text": lambda c: {**c, "columns": "a"},
    "no facts": lambda c: {**c, "facts": {}},
    "clip as text": lambda c: {**c, "clip": "wide"},
    "nested": _nested,
    "a name as number": lambda c: _column(c, name=3),
    "a mean as text": lambda c: _column(c, mean="3"),
    "an infinite spread": lambda c: _column(c, spread=float("inf")),
    "another kind": lambda c: _column(c, kind="picture"),
    "equal categories": lambda c: _column(c, kind="category", categories=["x", "x"]),
    "no way of reading": lambda c: {**c, "facts": {**c["facts"], "reading": {}}},
    "IDs as numbers": lambda c: {**c, "facts": {**c["facts"], "id": [1]}},
}


@pytest.mark.parametrize("kind", SPOILT)
def test_spoilt_models_are_one_line(
    kind: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "fit", write(GOOD), "--target", "y", "--out", "m", *FAST)
    content = SPOILT[kind](json.loads(Path("m/model.json").read_text()))
    Path("m/model.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert "the model is damaged" in fails(capsys, "predict", "m", "t.csv")


@pytest.mark.parametrize(
    "change",
    [
        lambda w: {n: np.full_like(a, np.nan) for n, a in w.items()},
        lambda w: {n: a.astype(int) for n, a in w.items()},
        lambda w: {n: a.astype(np.float32 if n[0] == "0" else a.dtype) for n, a in w.items()},
        lambda w: {n: a.T for n, a in w.items()},
        lambda w: {n: a for n, a in w.items() if n != "scale.mean"},
    ],
)
def test_spoilt_weights_are_one_line(
    change: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "fit", write(GOOD), "--target", "y", "--out", "m", *FAST)
    spoilt = change(load_file("m/weights.safetensors"))
    weights = {name: np.ascontiguousarray(array) for name, array in spoilt.items()}
    save_file(weights, "m/weights.safetensors")
    assert "the model is damaged" in fails(capsys, "predict", "m", "t.csv")


def test_copies_do_not_leak_and_are_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(rng.normal(size=(60, 5)), columns=list("abcde"))
    frame["y"] = rng.choice(["heads", "tails"], 60)
    frame.loc[np.repeat(frame.index, 4)].to_csv("t.csv", index=False)
    _, out, _ = run(capsys, "fit", "t.csv", "--target", "y", "--out", "m", "--max-epochs", "300")
    assert "180 rows repeat another one in every column; copies share a fold" in out
    facts = json.loads(Path("m/model.json").read_text())["facts"]
    assert facts["scores"]["accuracy"][1] < 0.5
    assert facts["scores"]["loss"][2] > np.log(2)


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_targets_out_of_range(size: float, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "a,y\n" + "".join(f"{i % 7},{size * (i + 0.5)}\n" for i in range(12))
    said = fails(capsys, "fit", write(text), "--target", "y", "--out", "m")
    assert "squares are out of range; divide them by" in said


@pytest.mark.parametrize("rows", [3, 4, 6])
def test_few_rows_have_no_interval_without_width(
    rows: int, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a,b,y\n" + "".join(f"{i * 1.5},{i % 3},{'pq'[i % 2]}\n" for i in range(rows))
    arguments = ("fit", write(text), "--target", "y", "--out", "m")
    if rows == 3:
        assert "all of one class" in fails(capsys, *arguments)
        return
    assert run(capsys, *arguments)[0] == 0
    scores = json.loads(Path("m/model.json").read_text())["facts"]["scores"]
    for _, low, high in scores.values():
        assert low is None or high - low > 0.1


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("--targett", "did you mean '--target'"), ("--sed=3", "did you mean '--seed'")],
)
def test_a_mistyped_option(wrong: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hint in fails(capsys, "fit", "t.csv", wrong, "x", "--out", "m")
    assert "heldin fit --help lists" in fails(capsys, "fit", "t.csv", "--zzz")


def test_the_walk_of_the_page(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers on docs/command-line.md are those that the program prints."""
    page = (Path(__file__).parents[2] / "docs/command-line.md").read_text("utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    code, out, _ = run(
        capsys, "fit", "people.csv", "--target", "label", "--out", "model", "--test", "later.csv"
    )
    assert code == 0
    shown = page.split("and says\n\n```\n")[1].split("```")[0]
    number = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
    assert number.sub("#", out) == number.sub("#", shown)
    found, expected = (
        [float(text.replace(",", "")) for text in number.findall(each)] for each in (out, shown)
    )
    assert found == pytest.approx(expected, rel=0.3, abs=0.1)  # other processors round otherwise


def test_formulas_are_said_and_escaped(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    n = 24
    frame = pandas.DataFrame(
        {
            "id": ["=1+1", "-5", "@x", "+49 30", "plain", "+5"] * 4,
            "a": np.arange(n) % 7,
            "y": ["=cmd|' /C calc'!A0", "no"] * (n // 2),
        }
    )
    frame.to_csv("t.csv", index=False)
    run(capsys, "fit", "t.csv", "--target", "y", "--id", "id", "--out", "m", *FAST)
    _, plain, err = run(capsys, "predict", "m", "t.csv")
    assert "cells begin with = + - or @, which spreadsheets run as formulas" in err
    Path("p.csv").write_text(plain)
    assert pandas.read_csv("p.csv")["id"].tolist() == frame["id"].tolist()
    _, escaped, err = run(capsys, "predict", "m", "t.csv", "--escape-formulas")
    assert err == ""
    Path("p.csv").write_text(escaped)
    found = pandas.read_csv("p.csv")
    assert found["id"].tolist() == ["'=1+1", "-5", "'@x", "'+49 30", "plain", "+5"] * 4
    assert set(found["y"]) <= {"'=cmd|' /C calc'!A0", "no"}


@pytest.mark.filterwarnings("ignore:.*never fell below:heldin.HeldinWarning")
def test_bad_rows_to_predict(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "fit", write(GOOD), "--target", "y", "--out", "m", *FAST)
    said = fails(capsys, "predict", "m", write("a\n1\n", "n.csv"))
    assert "n.csv: the column 'b' is not there" in said
    said = fails(capsys, "predict", "m", write("c\n1\n", "n.csv"))
    assert "n.csv: 2 columns are not there: 'a', 'b' (columns: 'c')" in said
    said = fails(capsys, "predict", "m", write("a,b\n1,2\n1,many\n", "n.csv"))
    assert "column 'b' held numbers in training, but row 2 has 'many'" in said
    assert "the file is empty" in fails(capsys, "predict", "m", write("", "n.csv"))
    odd = TabularModel.load("m")
    with pytest.raises(heldin.HeldinError, match="class 'r' was not there in training"):
        odd.test(pandas.DataFrame({"a": [1], "b": [1], "y": ["r"]}), "n.csv")


def test_ctrl_c(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Trainer.end_epoch, []

    def interrupted(self: Trainer, loss: float) -> None:
        real(self, loss)
        calls.append(loss)
        if len(calls) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "end_epoch", interrupted)
    code, out, err = run(capsys, "fit", "classes.csv", "--target", "label", "--out", "m")
    assert (code, out) == (130, "")
    assert "interrupted after 4 epochs; nothing was written" in err
    assert "--max-epochs 4" in err
    assert not Path("m").exists()


def test_a_closed_pipe_is_no_error(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "fit", "classes.csv", "--target", "label", "--out", "m", *FAST)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["predict", "m", "new.csv"]) == 0
    assert capsys.readouterr().err == ""


def test_missing_extras_are_named(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for arguments in (["fit", "t.csv", "--target", "y", "--out", "m"], ["predict", "m", "t.csv"]):
        said = fails(capsys, *arguments)
        assert "safetensors is not installed; pip install 'heldin[fit]'" in said
